"""DataParallel in real processes against NumPy: every way to exchange, uneven data, decisions that ranks make alike."""
import mindspore as ms
import numpy as np
import pytest
import reference
from conftest import MLP, difference, tensors, values
from mindspore import Tensor, nn
from noisy_samples import Expected
from rank_cases import (
    BUDGET_OF_A_RANK,
    LAUNCHES,
    SYNCS,
    TOGETHER,
    WITHOUT_NODES,
    N,
    article_rows,
    cases_of,
    every_launch_of,
    losses_of,
    microbatches,
    noisy_data,
    together,
    train_article,
    weight_of,
)

from ms_accum import Accumulator, DataParallel
from ms_accum.distributed import reducers

pytest_plugins = ["launch"]
ARTICLE = ["0.9472", "0.9440", "0.9527", "0.9687", "0.9570", "0.9343", "0.9411", "0.9186"]  # published
ORACLES = {"SGD": lambda: reference.SGD(0.1), "still": lambda: reference.SGD(1e-30),
           "Adam": lambda: reference.Adam(0.01), "Momentum": lambda: reference.SGD(0.1, 0.9)}


def once(rank, i):
    return 1


def windows_of(sizes, count, skipped=(), weight=once):
    """The undivided batches: what all ranks have in each window, without microbatches (by index) that all of them skip.

    A microbatch of weight 2 is in its batch twice.
    """
    batches = [microbatches(sizes, rank) for rank in range(count)]
    kept = [i for i in range(max(map(len, batches))) if i not in skipped]
    groups = [kept[i:i + N] for i in range(0, len(kept), N)]
    windows = [[batch[i] for rank, batch in enumerate(batches) for i in group if i < len(batch)
                for _ in range(weight(rank, i))] for group in groups]
    return [tuple(map(np.concatenate, zip(*window))) for window in windows]


def windows_apart(sync, sizes, count, budget, skipped=()):
    """The k-th update has the k-th window of each rank with "window", or of each node, which each closed itself.

    Microbatches (by index) are skipped by those that count them together with rank 1.
    """
    batches = [microbatches(sizes, rank) for rank in range(count)]
    indices = range(max(map(len, batches)))
    together = {"window": 1, "nodes": count // 2, "nodes-shard": count // 2}.get(sync, count)
    windows = []
    for start in range(0, count, together):
        ranks = range(start, start + together)
        held, k = 0, 0
        for i in indices:
            present = [batches[rank][i] for rank in ranks if i < len(batches[rank])]
            if present and not (i in skipped and 1 in ranks):
                if len(windows) <= k:
                    windows.append([])
                windows[k] += present
                held += sum(len(x) for x, _ in present) if budget else 1
            if held >= (BUDGET_OF_A_RANK * together if budget else N):
                held, k = 0, k + 1
    return [tuple(map(np.concatenate, zip(*window))) for window in windows]


def undivided(windows, optimizer):
    """The oracle: one process, each window as one batch."""
    oracle = reference.Accumulation(values(MLP(seed=0).trainable_params()), ORACLES[optimizer](), 1, "mean", 0.5)
    for x, y in windows:
        oracle(reference.loss_and_gradients(oracle.parameters, x, y)[1])
    return oracle


def arrays_of(left):
    return list(map(np.array, left["parameters"]))


def require_equal(results, oracle, case, skipped=0):
    """Each rank ends where the oracle does, and all hold the same bits."""
    for rank, left in enumerate(results):
        allowed = 1e-5 if "Adam" in case else 1e-6
        assert difference(arrays_of(left), oracle.parameters) <= allowed, f"{case}, rank {rank}"
        assert left["counters"] == [oracle.update_step, 0, np.broadcast_to(skipped, len(results))[rank]], case
        assert left["grad_norm"] == pytest.approx(oracle.grad_norm, rel=1e-5), case
        assert left["parameters"] == results[0]["parameters"], f"{case}: ranks hold different parameters"


@every_launch_of("trained")
def test_ranks_train_as_one_process_on_the_undivided_batch(left_by, launch):
    """{window, microbatch, shard} x {equal, unequal, uneven numbers of microbatches} x short last window x clipping.

    A NaN in rank 1's second microbatch makes all ranks, or its node, skip that microbatch, or all drop that window; so does an overflow on
    rank 0, which halves the loss scale of all.
    """
    count = LAUNCHES[launch][0]
    for case in cases_of(launch, "trained"):
        sync, sizes, optimizer, *features = case.split(":")[1:]
        results, bad, skips = left_by(case, launch), {"nan", "overflow"} & set(features), "skip_microbatch" in features
        if bad == {"nan"} and not skips and "skip_window" not in features:  # control: there is something to skip
            assert all(np.isnan(p).any() for left in results for p in arrays_of(left)), case
            continue
        windows = windows_of(sizes, count, (1,) if bad and skips else ())
        skipped = [len(bad)] * count
        if "budget" in features:
            windows = windows_apart(sync, sizes, count, True)
        elif skips and "nodes" in sync:
            windows, node = windows_apart(sync, sizes, count, False, (1,)), count // 2
            skipped = [int(rank // node == 1 // node) for rank in range(count)]
        oracle = undivided(windows[1:] if bad and not skips else windows, optimizer)
        assert oracle.update_step == (2 if all(skipped) and bad else 3) or "budget" in features
        require_equal(results, oracle, case, skipped)
        assert [left["scale"] for left in results] == [512 if "overflow" in bad else None] * count, case


@every_launch_of("pair")
def test_two_losses_are_divided_by_what_all_ranks_have(left_by, launch):
    """Control: the sum of each rank's means is another gradient."""
    count = LAUNCHES[launch][0]
    for case in cases_of(launch, "pair"):
        _, sizes, driver = case.split(":")[:3]
        results, network = left_by(case, launch), MLP(seed=0)
        oracle = undivided([], "SGD")
        skipped = (1,) if driver == "skip" else ()
        for x, y in windows_of(sizes, count, skipped):
            for parameter, value in zip(network.trainable_params(), oracle.parameters):
                parameter.set_data(Tensor(value, ms.float32))
            oracle(pair_gradients(network, x, y))
        require_equal(results, oracle, case, len(skipped))
        assert [left["sets"] for left in results] == [1 if driver == "ahead" else 2] * count
    x, y = windows_of("unequal", 2)[0]
    halves = [pair_gradients(network, x[part], y[part]) for part in (slice(0, 6), slice(6, None))]
    assert difference([sum(g) / 2 for g in zip(*halves)], pair_gradients(network, x, y)) > 1e-3


def pair_gradients(network, x, y):
    """Of the sum of both losses of one batch, by plain MindSpore."""
    losses = losses_of(network)

    def total(x, y):
        one, other = losses(x, y)
        return one + other

    return values(ms.grad(total, None, ms.ParameterTuple(network.trainable_params()))(*tensors(x, y)))


def test_ranks_train_as_one_process_in_one_graph(left_by):
    """The same, compiled, with Tensors as weights; the last accumulator skips the second microbatch, NaN on one rank."""
    for number, (optimizer, _, on_nonfinite) in enumerate(TOGETHER):
        skipped = (1,) if on_nonfinite == "skip_microbatch" else ()
        oracle = undivided(windows_of("equal", 2, skipped, weight_of), optimizer)
        require_equal([left[number] for left in left_by("together:jit")], oracle, optimizer, len(skipped))


def test_wrong_weights_are_seen():
    """Negative control: ranks with unequal samples or weights that all count the same are not the undivided batch."""
    windows = windows_of("unequal", 2)
    doubled = [(np.concatenate([x, x[:2]]), np.concatenate([y, y[:2]])) for x, y in windows]
    weighted, alike = (windows_of("equal", 2, weight=weight) for weight in (weight_of, once))
    for right, wrong in ((windows, doubled), (weighted, alike)):
        assert difference(undivided(wrong, "SGD").parameters, undivided(right, "SGD").parameters) > 1e-4


@pytest.mark.parametrize("sync", [*SYNCS, "each"])
def test_sum_is_averaged_over_ranks(left_by, sync):
    batches = [microbatches("equal", rank) for rank in range(2)]
    oracle = reference.Accumulation(values(MLP(seed=0).trainable_params()), reference.SGD(0.1), N)
    for pieces in zip(*batches):
        gradients = [reference.loss_and_gradients(oracle.parameters, x, y)[1] for x, y in pieces]
        oracle([sum(g) / 2 / N for g in zip(*gradients)])
    oracle.flush()
    for left in left_by("by_hand"):
        assert difference(arrays_of(left[f"sum:{sync}"]), oracle.parameters) <= 1e-6


@pytest.mark.parametrize("sync", SYNCS)
def test_a_weight_of_zero_counts_nothing_on_any_rank(left_by, sync):
    """Three microbatches of gradient 1 and weight 1, and a NaN of weight 0."""
    for left in left_by("by_hand"):
        for start, value in zip(values(MLP(seed=0).trainable_params()), arrays_of(left[f"zero:{sync}"])):
            np.testing.assert_allclose(value, start - 0.1, rtol=1e-5, atol=1e-6)


def test_article_in_two_processes_and_in_one(left_by):
    """Two microbatches, loss / 2; control: without the division the weights are others."""
    assert [left["article"] for left in left_by("by_hand")] == [ARTICLE] * 2
    one, undivided = (train_article([article_rows()[0::2], article_rows()[1::2]], divisor) for divisor in (2, 1))
    assert one == ARTICLE != undivided


@every_launch_of("trained", "noise")
def test_microbatches_of_all_ranks_are_in_the_noise_scale(left_by, launch):
    """The estimates of one process that has all microbatches. Controls: those of one rank, or of sums, are others."""
    parameters = values(MLP(seed=0).trainable_params())

    def pair(x, y):
        return np.concatenate([g.reshape(-1) for g in reference.loss_and_gradients(parameters, x, y)[1]]), len(x)

    batches = [microbatches("uneven", rank) for rank in range(LAUNCHES[launch][0])]
    parts = [[batch[i] for batch in batches if i < len(batch)] for i in range(max(map(len, batches)))]
    windows, sums, one = [], [], []
    for i in range(0, len(parts), N):
        windows.append([pair(x, y) for part in parts[i:i + N] for x, y in part])
        sums.append([pair(*map(np.concatenate, zip(*part))) for part in parts[i:i + N]])
        one.append([pair(x, y) for x, y in batches[0][i:i + N]])
    expected = reference.noise_and_signal(windows, 0.9)
    for wrong in (sums, one):
        assert abs(reference.noise_and_signal(wrong, 0.9)[0] / expected[0] - 1) > 0.02
    for case in cases_of(launch, "trained", "noise"):
        for left in left_by(case, launch):
            np.testing.assert_allclose(left["noise"], expected, rtol=1e-4, err_msg=case)


@every_launch_of("adaptive")
def test_windows_that_follow_the_noise_scale_do_so_on_all_ranks_alike(left_by, launch):
    """With the lengths of one process that sees all microbatches; resumed across a change, bit-identically. Control: if the weight of
    one rank's microbatch were taken for that of all, windows would get longer."""
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
            assert left["lengths"] == lengths[9:len(data[rank])], case
            assert left["counters"] == [len(expected.lengths), 0, 0], case
            assert difference(arrays_of(left), [expected.point]) <= 1e-6, case
            assert left["parameters"] == results[0]["parameters"], case
            assert left["resumed"] == [[1, 0, True], [2, 1, True]], case


@pytest.mark.parametrize("rank", range(6))
def test_groups_of_three_nodes_of_two(monkeypatch, rank):
    groups = {}
    for name, value in {"create_group": groups.__setitem__, "_groups": set(), "require_alike": lambda *_: None,
                        "make_alike": lambda *_: None, "get_rank": lambda: rank, "world_size": lambda: 6}.items():
        monkeypatch.setattr(reducers, name, value)
    reducer = Accumulator(nn.SGD(MLP().trainable_params(), 0.1), 2, reducer=DataParallel(sync="node", ranks_per_node=2)).reducer
    assert groups[reducer.buckets.sum.group] == [rank // 2 * 2, rank // 2 * 2 + 1]
    assert groups[reducer.across.group] == [rank % 2, rank % 2 + 2, rank % 2 + 4]
    assert (reducer.rank, reducer.buckets.rank) == (rank, rank % 2)


# --- one rank, and bad arguments --------------------------------------------------------------------------------------


@pytest.mark.parametrize("jit", ["0", "1"])
def test_without_other_ranks_it_accumulates_on_one(monkeypatch, jit):
    """No process group: the same script, the same parameters to the bit as without a reducer."""
    monkeypatch.setenv("MS_JIT", jit)
    expected, *others = together(0, [("SGD", sync, "apply") for sync in (None, *WITHOUT_NODES)])
    assert expected["counters"] == [3, 0, 0]
    assert difference(expected["parameters"], values(MLP(seed=0).trainable_params())) > 1e-2
    for left in others:
        assert left["counters"] == [3, 0, 0]
        assert all(map(np.array_equal, left["parameters"], expected["parameters"]))


@pytest.mark.parametrize(("error", "message", "arguments"), [
    (ValueError, r"sync is 'epoch', expected one of 'window', 'microbatch', 'node'", {"sync": "epoch"}),
    (TypeError, r"shard is 1 of type int, expected True or False", {"shard": 1}),
    (TypeError, r"broadcast is None of type NoneType, expected True or False", {"broadcast": None}),
    (ValueError, r"shard=True with sync=\"window\": .* give sync=\"microbatch\" or \"node\"", {"shard": True}),
    (ValueError, r"got ranks_per_node=2 with sync=\"window\", which knows no nodes; give sync=\"node\"", {"ranks_per_node": 2}),
    (ValueError, r"ranks_per_node is 0, expected an int >= 1; None takes those", {"sync": "node", "ranks_per_node": 0}),
    (ValueError, r"bucket_mib is 0, expected a finite number of mebibytes > 0", {"bucket_mib": 0}),
    (ValueError, r"bucket_mib is nan, expected", {"bucket_mib": float("nan")}),
    (TypeError, r"bucket_mib is '1' of type str, expected", {"bucket_mib": "1"}),
])
def test_bad_arguments_are_refused(error, message, arguments):
    with pytest.raises(error, match=message):
        DataParallel(**arguments)


@pytest.mark.parametrize("name", ["float64", "bfloat16"])
def test_what_cpu_ranks_cannot_exchange_is_refused(name, monkeypatch):
    monkeypatch.setattr(reducers, "world_size", lambda: 2)
    with pytest.raises(ValueError, match=rf"DataParallel with buffers of {name}: .* give buffer_dtype=ms\.float32"):
        Accumulator(nn.SGD(MLP().trainable_params(), 0.1), 2, buffer_dtype=getattr(ms, name), reducer=DataParallel())
