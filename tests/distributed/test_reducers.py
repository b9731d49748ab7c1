"""Runs of ranks in real processes against one process in NumPy, and what DataParallel refuses."""
from itertools import product

import mindspore as ms
import numpy as np
import pytest
import reference
from conftest import MLP, difference, values
from drivers import LossOf
from mindspore import nn
from noisy_samples import Expected
from rank_cases import LAUNCHES, accumulator, cases_of, driver_of, every_launch_of, noisy_data
from rank_runs import CHOICES, DRAWN, SYNCS, microbatches, run_of, simulated

from ms_accum import Accumulator, DataParallel
from ms_accum.distributed import exchange

pytest_plugins = ["launch"]


@every_launch_of("trained")
def test_ranks_train_as_one_process(left_by, launch):
    """A microbatch is skipped by the rank that has the NaN alone; a window, or a scaler's overflow, by all ranks but those with updates
    of their own. A resumed run ends with the same bits.
    """
    ranks = LAUNCHES[launch][0]
    whole = sum(p.nbytes for p in MLP().trainable_params())
    for case in cases_of(launch, "trained"):
        run, results = run_of(case.split(":")[1]), left_by(case, launch)
        what, local, inside = f"{case} {run}", run["sync"] == "local", SYNCS[run["sync"]](ranks)
        for rank, (left, oracle) in enumerate(zip(results, simulated(run, ranks))):
            assert difference(list(map(np.array, left["parameters"])), oracle.parameters) <= 1e-5, f"{what}, rank {rank}"
            assert left["parameters"] == results[0]["parameters"], f"{what}: ranks hold different parameters"
            expected = oracle.counters()
            if not local:
                assert oracle.skipped == (run["nan"] in ("skip_window", "scaler")), what
                del expected["window_weight"], expected["skipped_in_row"]  # of this rank
                expected["skipped"] += run["nan"] == "skip_microbatch" and rank == 1
            if case.split(":")[1] == "pair":
                del expected["seen"]  # of windows that others fill, a rank counts pieces
            assert left == {**left, **expected}, what
            assert left["grad_norm"] == pytest.approx(oracle.grad_norm, rel=1e-5, nan_ok=True), what
            assert left["loss"] == pytest.approx(results[0]["loss"], rel=1e-5), "a graph that was compiled before follows"
            assert left["scale"] == (1024 / 2**oracle.skipped if run["nan"] == "scaler" else None), what
            # Padding: at most an element in each of three buckets.
            assert 0 <= left["bytes"] - whole / (inside if "shard" in run["sync"] else 1) <= 3 * 4, what
            if run["noise"]:
                noise = reference.noise_and_signal(oracle.measured, 0.9)
                np.testing.assert_allclose(left["noise"], noise, rtol=1e-4, atol=1e-5 * noise[0], err_msg=what)
            if run["save"]:
                assert left["saved"] == {"mini_step": int(run["windows"] != "one"), "extra": {"rank": rank}, "same": True}, what


def test_each_kind_of_exchange_is_drawn_with_each_choice():
    """Of two ranks: alone or together at each microbatch."""
    runs = [run_of(str(number)) for number in range(DRAWN)]
    for inside, (name, options) in product((1, 2), CHOICES.items()):
        found = {run[name] for run in runs if (SYNCS[run["sync"]](2), run["sync"] == "local") == (inside, False)}
        assert found == set(options), (name, inside)
    assert {run["local"] for run in runs if run["sync"] == "local"} == set(CHOICES["local"])


class HeavyBall(reference.LocalUpdates):
    """Without Nesterov's look ahead."""
    def step(self, moved):
        super().step(moved)
        return [p - self.rate * v for p, v in zip(self.parameters, self.velocity)]


class EveryRank(reference.LocalUpdates):
    """Where ranks without an update count, too."""
    def step(self, moved):
        return super().step(self.ranks)


PLAIN = {**run_of("window"), "nan": "", "optimizer": "SGD", "sizes": "uneven"}
OUTER = {**run_of("local"), "sizes": "uneven"}
WRONG = {
    "windows that all ranks close together": (({**PLAIN, "windows": "budget"},), {"together": 2}),
    "a microbatch that all ranks skip": (({**PLAIN, "nan": "skip_microbatch"},), {"together": 2}),
    "no weights": ((PLAIN, {**PLAIN, "drivers": ("hand sum",)}), {}),
    "one rank for all": (({**PLAIN, "sizes": "unequal"},), {"ranks": 1}),
    "heavy ball": ((OUTER,), {"kind": HeavyBall}),
    "ranks without an update": ((OUTER,), {"kind": EveryRank}),
    "averages of updates": (({**PLAIN, "sizes": "alike"}, {**OUTER, "sizes": "alike", "local": "averaged"}), {}),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_simulations_are_seen(wrong):
    """Negative control of what ranks are compared with."""
    (run, *other), options = WRONG[wrong]
    right, found = simulated(run, 2)[0], simulated(other[0] if other else run, **{"ranks": 2, **options})[0]
    assert difference(found.parameters, right.parameters) > 1e-4


def test_local_updates_of_one_step_are_data_parallel():
    """With SGD and equal weights, where nothing is clipped: so are the ranks of the run "each", which follow the simulation."""
    one, other = (simulated({**run_of("each"), "sync": sync}, 2)[0].parameters for sync in ("local", "window"))
    assert difference(one, other) <= 1e-12


@every_launch_of("adaptive")
def test_windows_that_follow_the_noise_scale_do_so_on_all_ranks_alike(left_by, launch):
    """With the lengths of one process that sees all microbatches. Control: if the weight of one rank's microbatch were taken for that
    of all, windows would get longer."""
    count = LAUNCHES[launch][0]
    data = [noisy_data(rank, count) for rank in range(count)]
    for case in cases_of(launch, "adaptive"):
        expected, wrong = (Expected(1, 8, target, rate=1e-3) for target in (1.0, 1 / count))
        lengths = []
        for i in range(len(data[0])):
            present = [batch[i] for batch in data if i < len(batch)]
            for oracle in (expected, wrong):
                oracle.microbatch(*present, of_a_rank=len(present) / count if ":window" in case else 1)
            lengths.append(expected.adaptive.length)
        expected.flush()
        assert lengths[-1] == 2 < wrong.adaptive.length
        results = left_by(case, launch)
        for rank, left in enumerate(results):
            assert left["lengths"] == lengths[:len(data[rank])], case
            assert (left["update_step"], left["mini_step"], left["skipped"]) == (len(expected.lengths), 0, 0), case
            assert difference(list(map(np.array, left["parameters"])), [expected.point]) <= 1e-6, case
            assert left["parameters"] == results[0]["parameters"], case


def test_traffic_of_a_window_is_that_of_one_microbatch(left_by):
    """16 microbatches, N = 8: one bucket a window, the gradients and a header of 12 bytes. Parameters move at boundaries.

    A rank that skips a microbatch exchanges nothing about it.
    """
    window, microbatch = (left_by(f"traffic:{sync}") for sync in ("window", "microbatch"))
    assert (window[0]["collectives"], microbatch[0]["collectives"]) == (2, 16)
    assert window[0]["bytes"] == 2 * (window[0]["parameters"] + 12)
    assert window[0]["bytes"] * 8 == microbatch[0]["bytes"]
    assert [left["skipped"] for left in window] == [0, 2]
    for left in (*window, *microbatch):
        seen = np.array(left["seen"])
        assert seen.shape == (17, 10)
        assert [not np.array_equal(seen[i], seen[i + 1]) for i in range(16)] == ([False] * 7 + [True]) * 2


def test_buckets_of_other_dtypes(left_by):
    """The numbers, one of which float16 does not hold, travel alone where there is no float32."""
    expected = [np.full(shape, 3 * (i + 1)).tolist() for i, shape in enumerate([(3,), (2, 2), (), (5,)])]
    assert left_by("two_dtypes") == [[[expected, expected, [2 * 4097, 1], [2 * 4097, 1]]] * 2] * 2


@pytest.mark.parametrize("jit", ["0", "1"])
def test_without_other_ranks_it_accumulates_on_one(monkeypatch, jit):
    """No process group: the same script, bit-identical parameters."""
    monkeypatch.setenv("MS_JIT", jit)
    found = []
    for sync in (None, "window", "shard"):
        network = MLP(seed=0)
        acc = accumulator(network, sync=sync)
        with driver_of("hand", LossOf(network), acc) as driver:
            driver.epoch(microbatches("equal", 0))
        found.append(values(network.trainable_params()))
        assert int(acc.update_step) == 3
    assert difference(found[0], values(MLP(seed=0).trainable_params())) > 1e-2
    assert all(np.array_equal(p, q) for other in found[1:] for p, q in zip(found[0], other))


@pytest.mark.parametrize(("error", "message", "arguments"), [
    (ValueError, r"sync is 'epoch', expected one of 'window', 'microbatch', 'node'", {"sync": "epoch"}),
    (TypeError, r"shard is 1 of type int, expected True or False", {"shard": 1}),
    (TypeError, r"broadcast is None of type NoneType, expected True or False", {"broadcast": None}),
    (ValueError, r"shard=True with sync=\"window\": .* give sync=\"microbatch\" or \"node\"", {"shard": True}),
    (ValueError, r"got ranks_per_node=2 with sync=\"window\", which knows no nodes; give sync=\"node\"", {"ranks_per_node": 2}),
    (ValueError, r"ranks_per_node is 0, expected an int >= 1; None takes those", {"sync": "node", "ranks_per_node": 0}),
    (ValueError, r"bucket_mib is nan, expected a finite number of mebibytes > 0", {"bucket_mib": float("nan")}),
])
def test_bad_arguments_are_refused(error, message, arguments):
    with pytest.raises(error, match=message):
        DataParallel(**arguments)


@pytest.mark.parametrize("name", ["float64", "bfloat16"])
def test_what_cpu_ranks_cannot_exchange_is_refused(name, monkeypatch):
    monkeypatch.setattr(exchange, "world_size", lambda: 2)
    with pytest.raises(ValueError, match=rf"DataParallel with buffers of {name}: .* give buffer_dtype=ms\.float32"):
        Accumulator(nn.SGD(MLP().trainable_params(), 0.1), 2, buffer_dtype=getattr(ms, name), reducer=DataParallel())
