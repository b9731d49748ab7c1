"""Runs of ranks in real processes against one process of plain MindSpore, and what DataParallel refuses."""
import mindspore as ms
import numpy as np
import pytest
from mindspore import nn
from support import reference
from support.differential.follow import Comparison
from support.differential.ranks import DRAWN, DRIVERS, NONFINITE, SYNCS, WINDOWS, case_of, simulated
from support.noisy_samples import FEATURES
from support.rank_cases import LAUNCHES, NOISE_DECAY, NOISE_RATE, every, noisy_data

from ms_accum import Accumulator, DataParallel
from ms_accum.distributed import data_parallel
from ms_accum.selftest.comparing import difference
from ms_accum.selftest.networks import MLP

pytest_plugins = ["support.launch"]


@every("trained")
def test_ranks_train_as_one_process(left_by, launch, case):
    """All hold the same bits. A resumed run ends with those of the one that was saved."""
    ranks, results, name, case = LAUNCHES[launch][0], left_by(case, launch), case, case_of(case.split(":")[1])
    print(name, case)
    inside, size = SYNCS[case.sync](ranks) if "zero2" in case.sync else 1, 2 if case.buffer_dtype == "float16" else 4
    plain = simulated(case, ranks)
    unknown = "window_weight", "skipped_in_row"  # what a rank has added to a window itself, the simulation has not
    for rank, left in enumerate(results):
        where, comparison = f"on rank {rank}", Comparison(case, plain)
        comparison.counters(left, where, unknown, skipped=plain.skips if rank == 1 else 0)
        comparison.window(left, where)
        comparison.require_motion()
        assert left["parameters"] == results[0]["parameters"]
        # Padding: at most an element of each parameter in each row that this rank keeps.
        assert 0 <= left["bytes"] - size * sum(left["sizes"]) / inside <= size * len(left["sizes"]) * ranks / inside
        if case.save_at:
            assert (left["position"], left["same"]) == (rank, True)


def test_each_kind_of_exchange_is_drawn_with_each_choice():
    """Of two ranks: alone or together at each microbatch."""
    cases = [case_of(str(number)) for number in range(DRAWN)]
    for inside in (1, 2):
        kind = [case for case in cases if SYNCS[case.sync](2) == inside]
        assert {case.driver.split("-")[0] for case in kind} >= {name.split()[0] for name in DRIVERS}
        assert {(case.on_nonfinite, case.scaler) for case in kind} == set(NONFINITE)
        assert {case.accumulate_step for case in kind} == set(WINDOWS)
        for name in ("save_at", "noise_scale", "reduction", "buffer_dtype"):
            assert len({getattr(case, name) for case in kind}) == 2, (inside, name)


@pytest.mark.parametrize(("changes", "options"), [
    pytest.param({"accumulate_step": WINDOWS[-1]}, {"together": 2}, id="windows that all close together"),
    pytest.param({"on_nonfinite": "skip_microbatch", "accumulate_step": 1}, {"together": 2},
                 id="a microbatch that all skip"),
    pytest.param({}, {"ranks": 1}, id="one rank for all")])
def test_wrong_simulations_are_seen(changes, options):
    """Negative control of what ranks are compared with."""
    case = case_of("window")._replace(**changes)
    right, wrong = simulated(case, 2), simulated(case, **{"ranks": 2, **options})
    comparison = Comparison(case, right)
    with pytest.raises(pytest.fail.Exception, match="plain training has"):
        comparison.window({"parameters": wrong.parameters, "state": [], "noise": None}, "")


def test_graphs_that_were_compiled_before_follow(left_by):
    (before, after), (other, same) = left_by("followed:jit")
    assert before == after == pytest.approx(same, rel=1e-6)
    assert other != pytest.approx(same, rel=1e-3)


@every("noise")
def test_the_noise_scale_is_that_of_all_ranks_together(left_by, launch, case):
    """As one process measures it that sees all microbatches, also where the data of some ranks ends.

    Control: what rank 0 has alone is something else.
    """
    count = LAUNCHES[launch][0]
    data = [noisy_data(rank, count) for rank in range(count)]
    point, windows, alone, sizes = np.zeros(FEATURES), [], [], np.zeros(2)
    for start in range(0, len(data[0]), 3):
        window = [(point - x.mean(0, dtype=np.float64), len(x)) for batches in data for x in batches[start:start + 3]]
        longest = len(data[0][start:start + 3])
        windows.append(window)
        alone.append(window[:longest])
        weight = sum(w for _, w in window)
        one_by_one = case.split(":")[1] in ("window", "zero1")
        sizes = NOISE_DECAY * sizes + [weight, len(window) / count if one_by_one else longest]
        point = point - NOISE_RATE * sum(g * w for g, w in window) / weight
    expected = [*reference.noise_and_signal(windows, NOISE_DECAY), sizes[0] / sizes[1]]
    assert reference.noise_and_signal(alone, NOISE_DECAY)[1] != pytest.approx(expected[1], rel=0.01)
    results = left_by(case, launch)
    for left in results:
        assert left["measured"] == pytest.approx(expected, rel=1e-4)
        counted = [left["counters"][name] for name in ("update_step", "mini_step", "skipped")]
        assert counted == [len(windows), 0, 0]
        assert difference([np.array(left["point"])], [point]) <= 1e-6
        assert left["point"] == results[0]["point"]


def test_traffic_of_a_window_is_that_of_one_microbatch(left_by):
    """16 microbatches, N = 8: in each window, 8 float32 of each rank, and one bucket of the gradients.

    Parameters move at boundaries. A rank that skips a microbatch exchanges nothing about it.
    """
    window, microbatch = (left_by(f"traffic:{sync}") for sync in ("window", "microbatch"))
    assert (window[0]["collectives"], microbatch[0]["collectives"]) == (4, 32)
    assert window[0]["bytes"] == 2 * (window[0]["parameters"] + 2 * 8 * 4)
    assert window[0]["bytes"] * 8 == microbatch[0]["bytes"]
    assert [left["skipped"] for left in window] == [0, 2]
    for left in (*window, *microbatch):
        assert left["moved"] == ([[False] * 4] * 7 + [[True] * 4]) * 2


@pytest.mark.parametrize(("error", "message", "arguments"), [
    (ValueError, r"zero=2 with sync=\"window\", .* give zero=1, or sync=\"microbatch\" or \"node\"",
     {"zero": 2, "sync": "window"}),
    (ValueError, r"zero=1 with sync=\"node\", where .*; give zero=2, or sync=\"window\"", {"zero": 1, "sync": "node"}),
    (ValueError, "zero is 3, expected at most 2; 0, 1 and 2 are the stages", {"zero": 3}),
    (ValueError, r"got ranks_per_node=2 with sync=\"window\", which does not use nodes; give sync=\"node\"",
     {"ranks_per_node": 2}),
    (ValueError, r"ranks_per_node is 0, expected an int >= 1; None takes those", {"sync": "node", "ranks_per_node": 0}),
])
def test_bad_arguments_are_refused(error, message, arguments):
    with pytest.raises(error, match=message):
        DataParallel(**arguments)


@pytest.mark.parametrize(("name", "refused"), [
    ("float64", r"DataParallel with buffers or slices of float64: .* give buffer_dtype=ms\.float32"),
    ("bfloat16", r"buffer_dtype is BFloat16, .* on CPU: .*; leave buffer_dtype out")])
def test_what_cpu_ranks_cannot_exchange_is_refused(name, refused, monkeypatch):
    monkeypatch.setattr(data_parallel, "world_size", lambda: 2)
    with pytest.raises(ValueError, match=refused):
        Accumulator(nn.SGD(MLP().trainable_params(), 0.1), 2, reduction="sum", buffer_dtype=getattr(ms, name),
                    reducer=DataParallel())
