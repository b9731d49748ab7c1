"""DataParallel in real processes against NumPy on the undivided batch, and what it refuses."""
import mindspore as ms
import numpy as np
import pytest
from conftest import MLP, difference, tensors, values
from mindspore import Tensor, nn
from noisy_samples import Expected
from rank_cases import LAUNCHES, accumulator, cases_of, drawn, every_launch_of, losses_of, microbatches, noisy_data, train_by
from simulated_ranks import inside, simulated, undivided

from ms_accum import Accumulator, DataParallel
from ms_accum.distributed import exchange

pytest_plugins = ["launch"]


def require_equal(results, oracle, case, skipped):
    """Each rank ends where the oracle does, and all hold the same bits."""
    for rank, left in enumerate(results):
        allowed = 1e-5 if "Adam" in case else 1e-6
        assert difference(list(map(np.array, left["parameters"])), oracle.parameters) <= allowed, f"{case}, rank {rank}"
        assert left["counters"] == [oracle.update_step, 0, skipped[rank]], case
        assert left["grad_norm"] == pytest.approx(oracle.grad_norm, rel=1e-5), case
        assert left["parameters"] == results[0]["parameters"], f"{case}: ranks hold different parameters"


@every_launch_of("trained")
def test_ranks_train_as_one_process_on_the_undivided_batch(left_by, launch):
    """Drawn: sync x sizes x optimizer x driver x windows x pieces x reduction x what happens to a NaN on rank 1.

    A microbatch is skipped by the rank that has the NaN alone; a window, or a scaler's overflow, by all.
    """
    count = LAUNCHES[launch][0]
    whole = sum(p.nbytes for p in MLP().trainable_params())
    for case in cases_of(launch, "trained"):
        run, results = undivided(drawn(case.split(":")[1])), left_by(case, launch)
        oracle = simulated(run, count)
        alone = [int(run["nan"] == "skip_microbatch" and rank == 1) for rank in range(count)]
        require_equal(results, oracle, f"{case} {run}", [oracle.skipped + skipped for skipped in alone])
        assert oracle.skipped == (run["nan"] in ("skip_window", "scaler")), case
        for left in results:
            assert left["loss"] == pytest.approx(results[0]["loss"], rel=1e-5), "a graph that was compiled before follows"
            assert left["scale"] == (1024 / 2**oracle.skipped if run["nan"] == "scaler" else None), case
            shards = inside(run["sync"], count) if "shard" in run["sync"] else 1
            # Padding: at most an element in each of three buckets.
            assert 0 <= left["bytes"] - whole / shards <= 3 * 4, case
            if run["noise"]:
                np.testing.assert_allclose(left["noise"], oracle.noise, rtol=1e-4, atol=1e-5 * oracle.noise[0], err_msg=f"{case} {run}")


def test_wrong_simulations_are_seen():
    """Negative control: windows that all ranks close together, a microbatch that all ranks skip, equal weights of unequal ranks."""
    budget = undivided({"sync": "window", "sizes": "uneven", "windows": "budget"})
    skip = undivided({"sync": "window", "sizes": "uneven", "nan": "skip_microbatch"})
    uneven, equal = (undivided({"sync": "window", "sizes": sizes}) for sizes in ("uneven", "unequal"))
    for right, wrong in ((simulated(budget, 2), simulated(budget, 2, 2)), (simulated(skip, 2), simulated(skip, 2, 2)),
                         (simulated(uneven, 2), simulated({**uneven, "reduction": "sum"}, 2)),
                         (simulated(equal, 2), simulated({**equal, "pieces": 1}, 1))):
        assert difference(wrong.parameters, right.parameters) > 1e-4


@every_launch_of("pair")
def test_two_losses_are_divided_by_what_all_ranks_have(left_by, launch):
    """Control: the sum of each rank's means is another gradient."""
    network = MLP(seed=0)

    def gradients_of(parameters, x, y):
        """Of the sum of both losses of one batch, by plain MindSpore."""
        for parameter, value in zip(network.trainable_params(), parameters):
            parameter.set_data(Tensor(value, ms.float32))
        losses = losses_of(network)

        def total(x, y):
            one, other = losses(x, y)
            return one + other

        return None, values(ms.grad(total, None, ms.ParameterTuple(network.trainable_params()))(*tensors(x, y)))

    count = LAUNCHES[launch][0]
    for case in cases_of(launch, "pair"):
        oracle = simulated(undivided({"sync": "window", "sizes": case.split(":")[1], "losses": 2}), count, gradients_of=gradients_of)
        require_equal(left_by(case, launch), oracle, case, [0] * count)
    start, halves = values(MLP(seed=0).trainable_params()), [microbatches("unequal", rank)[0] for rank in range(2)]
    means = zip(*(gradients_of(start, *half)[1] for half in halves))
    assert difference([sum(g) / 2 for g in means], gradients_of(start, *map(np.concatenate, zip(*halves)))[1]) > 1e-3


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
            assert left["counters"] == [len(expected.lengths), 0, 0], case
            assert difference(list(map(np.array, left["parameters"])), [expected.point]) <= 1e-6, case
            assert left["parameters"] == results[0]["parameters"], case


def test_traffic_of_a_window_is_that_of_one_microbatch(left_by):
    """16 microbatches, N = 8: one bucket a window, the gradients and a header of 12 bytes. Parameters move at boundaries.

    A rank that skips a microbatch exchanges nothing about it.
    """
    window, microbatch, nodes = (left_by(f"traffic:{sync}") for sync in ("window", "microbatch", "nodes"))
    assert (window[0]["collectives"], microbatch[0]["collectives"]) == (2, 16)
    assert window[0]["bytes"] == 2 * (window[0]["parameters"] + 12)
    assert window[0]["bytes"] * 8 == microbatch[0]["bytes"]
    assert (nodes[0]["collectives"], nodes[0]["bytes"]) == (2, window[0]["bytes"])  # of one rank each
    assert [left["skipped"] for left in window] == [0, 2]
    for left in (*window, *microbatch, *nodes):
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
        train_by("hand", network, acc, microbatches("equal", 0))
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
