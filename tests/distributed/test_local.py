"""Local updates in real processes, and in one, against NumPy; how several ranks resume is in test_ranks.py."""
import mindspore as ms
import numpy as np
import pytest
import reference
from conftest import MLP, compiled, difference, mean_loss, tensors, values
from mindspore import nn
from mindspore.dataset import GeneratorDataset
from mindspore.train import Model
from rank_cases import LAUNCHES, LOCAL, N, accumulator, cases_of, every_launch_of, losses_of, microbatches, rows_of_both
from test_reducers import ORACLES, arrays_of

from ms_accum import (
    CheckpointError,
    FlushCallback,
    LocalUpdates,
    TrainOneStepCell,
    load_checkpoint,
    make_train_step,
    save_checkpoint,
)

pytest_plugins = ["launch"]


class Uphill(reference.LocalUpdates):
    def step(self, moved):
        self.rate = -abs(self.rate)
        return super().step(moved)


class HeavyBall(reference.LocalUpdates):
    """Without Nesterov's look ahead."""
    def step(self, moved):
        super().step(moved)
        return [p - self.rate * v for p, v in zip(self.parameters, self.velocity)]


class Averaged(reference.LocalUpdates):
    """Without an outer step."""
    def step(self, moved):
        return [np.mean(each, axis=0) for each in zip(*[rank.parameters for rank in moved])]


class EveryRank(reference.LocalUpdates):
    """Where ranks without an update count, too."""
    def step(self, moved):
        return super().step(self.ranks)


def simulated(count, sizes, reducer, optimizer, features=(), kind=reference.LocalUpdates):
    """The same runs in float64, each window as one batch."""
    start = values(MLP(seed=0).trainable_params())
    ranks = [reference.Accumulation(start, ORACLES[optimizer](), 1, "mean", 0.5, "skip_window") for _ in range(count)]
    settings = LOCAL[reducer]
    run = kind(ranks, settings.every, settings.outer_learning_rate, settings.outer_momentum)
    for epoch in range(1 + ("twice" in features)):
        batches = [microbatches(sizes, rank) for rank in range(count)]
        if "nan" in features:
            batches[1][0][0][0, 0] = np.nan if epoch == 0 else 0
        run.epoch([[tuple(map(np.concatenate, zip(*mine[i:i + N]))) for i in range(0, len(mine), N)] for mine in batches])
    return run


@every_launch_of("outer")
def test_local_updates_of_ranks_follow_the_simulation(left_by, launch):
    """{SGD, Momentum, Adam} x even and uneven data x a dropped window x two epochs. All hold the same bits after a flush, and
    different ones before an exchange."""
    count = LAUNCHES[launch][0]
    for case in cases_of(launch, "outer"):
        sizes, reducer, optimizer, *features = case.split(":")[1:]
        run, results = simulated(count, sizes, reducer, optimizer, features), left_by(case, launch)
        for rank, (left, expected) in enumerate(zip(results, run.ranks)):
            assert difference(arrays_of(left), run.parameters) <= 1e-6, f"{case}, rank {rank}"
            assert left["counters"] == [expected.update_step, 0, expected.skipped], case
            assert left["parameters"] == results[0]["parameters"], f"{case}: ranks hold different parameters"
        assert results[0]["spread"] != results[1]["spread"]


@pytest.mark.parametrize("wrong", [Uphill, HeavyBall, Averaged, EveryRank])
def test_wrong_outer_steps_are_seen(wrong):
    """Negative control of the simulation."""
    right, other = (simulated(2, "halved", "local", "SGD", kind=kind) for kind in (reference.LocalUpdates, wrong))
    assert difference(other.parameters, right.parameters) > 1e-3


@every_launch_of("as_data_parallel")
def test_averaging_after_each_update_is_data_parallel(left_by, launch):
    """With SGD and equal weights, also where one rank has fewer windows. Control: after each second update it is not."""
    cases = cases_of(launch, "as_data_parallel")
    assert len(cases) == 2
    for case in cases:
        for left in left_by(case, launch):
            expected, each, second = (list(map(np.array, left[name])) for name in ("window", "each", "averaged"))
            assert difference(each, expected) <= 1e-6, case
            assert difference(second, expected) > 1e-4, case


@every_launch_of("alone")
def test_until_the_exchange_a_rank_is_a_process_of_its_own(left_by, launch):
    """Noise scale, adaptive windows, norms, parameters. Control: ranks have different data."""
    for case in cases_of(launch, "alone"):
        results = left_by(case, launch)
        for left in results:
            assert left["local"] == left["plain"]
            assert left["local"][0][-1] > 2
        assert results[0] != results[1]


# --- one rank ---------------------------------------------------------------------------------------------------------


def trained_by_split(network, acc, data):
    for _ in make_train_step(mean_loss(network), acc).epoch(data):
        pass


def trained_by_fused(network, acc, data):
    for _ in make_train_step(mean_loss(network), acc, strategy="fused", micro_size=2).epoch(data):
        pass


def trained_by_hand(network, acc, data):
    grad_fn = ms.grad(mean_loss(network), None, acc.optimizer.parameters)

    def step(x, y, weight):
        return acc(grad_fn(x, y), weight)

    def flush():
        return acc.flush()

    mode = "jit" if ms.get_context("mode") == ms.GRAPH_MODE else "pynative"
    step, flush = compiled(step, mode), compiled(flush, mode)
    closed = [bool(step(x, y, ms.Tensor(x.shape[0], ms.float32))) for x, y in data]
    assert closed == [i % N == N - 1 for i in range(len(data))]
    assert [bool(flush()), bool(flush())] == [True, False]


def trained_by_model(network, acc, data):
    cell = TrainOneStepCell(nn.WithLossCell(network, nn.CrossEntropyLoss()), acc)
    dataset = GeneratorDataset([[t.asnumpy() for t in batch] for batch in data], ["x", "y"], shuffle=False)
    Model(cell).train(1, dataset, callbacks=[FlushCallback()], dataset_sink_mode=False)


DRIVERS = {"split": trained_by_split, "fused": trained_by_fused, "by hand": trained_by_hand, "model": trained_by_model}


@pytest.mark.parametrize(("mode", "driver"), [
    *(("pynative", driver) for driver in DRIVERS), ("jit", "split"), ("graph", "by hand"),
    *(pytest.param(*case, marks=pytest.mark.slow) for case in (("jit", "fused"), ("graph", "fused"), ("graph", "model")))])
def test_one_rank_takes_the_outer_steps_along_its_own_differences(monkeypatch, mode_named, mode, driver):
    """In mid-epoch, and in the flush. Control: plain training is something else."""
    mode_named(mode)
    monkeypatch.setenv("MS_JIT", "0" if mode == "pynative" else "1")
    run, plain = simulated(1, "long", "local", "Momentum"), simulated(1, "long", "averaged", "Momentum")
    network = MLP(seed=0)
    acc = accumulator(network, "Momentum", "local")
    DRIVERS[driver](network, acc, [tensors(x, y) for x, y in microbatches("long", 0)])
    assert difference(values(acc.optimizer.parameters), run.parameters) <= 1e-6
    assert int(acc.update_step) == run.ranks[0].update_step == 6
    assert difference(plain.parameters, run.parameters) > 1e-2


@pytest.mark.parametrize("driver", ["split", "fused", "ahead"])
def test_two_losses_are_trained_as_without_a_reducer(monkeypatch, driver):
    """With an outer step that goes all the way."""
    monkeypatch.setenv("MS_JIT", "0")
    found = []
    for reducer in (None, "each"):
        network = MLP(seed=0)
        acc = accumulator(network, sync=reducer, losses=2)
        step = make_train_step(losses_of(network), acc, weight_fn=rows_of_both, strategy="fused" if driver == "fused" else "split")
        for _ in step.epoch([tensors(x, y) for x, y in microbatches("equal", 0)], lookahead=driver == "ahead"):
            pass
        found.append(values(acc.optimizer.parameters))
    assert difference(*found) <= 1e-6


def nothing(x, y):
    return 0


@pytest.mark.parametrize(("mode", "strategy"), [("pynative", "split"), ("pynative", "fused"), ("jit", "split")])
def test_updates_without_weight_count(monkeypatch, mode, strategy):
    """Windows of one, whose gradients are 0: the outer steps go nowhere, and are taken once each."""
    monkeypatch.setenv("MS_JIT", "0" if mode == "pynative" else "1")
    network, data = MLP(seed=0), [tensors(x, y) for x, y in microbatches("equal", 0)]
    acc = accumulator(network, "SGD", "local", None, 1)
    step = make_train_step(mean_loss(network), acc, weight_fn=nothing, strategy=strategy)
    assert [int(acc.reducer.exchanged) for batch in data if step(*batch) is not None] == [0, 2, 2, 4, 4]
    assert difference(values(acc.optimizer.parameters), values(MLP(seed=0).trainable_params())) == 0


@pytest.mark.parametrize(("reducer", "copies"), [("local", 2), ("averaged", 1)])
def test_the_outer_state_is_two_copies_and_one_without_momentum(reducer, copies):
    sizes = []
    for name in (None, reducer):
        acc = accumulator(MLP(), sync=name)
        sizes.append(sum(p.nbytes for p in acc.parameters))
    counter = acc.reducer.exchanged.nbytes
    assert sizes[1] - sizes[0] == copies * sum(p.nbytes for p in acc.optimizer.parameters) + counter


def test_float16_parameters_stay_those_of_the_anchor(monkeypatch):
    """The differences are averaged in float32."""
    monkeypatch.setenv("MS_JIT", "0")
    network = MLP(seed=0).to_float(ms.float16)
    for parameter in network.trainable_params():
        parameter.set_dtype(ms.float16)
    acc = accumulator(network, "SGD", "local")
    trained_by_split(network, acc, [tensors(x, y) for x, y in microbatches("long", 0)])
    run = simulated(1, "long", "local", "SGD")
    assert difference(values(acc.optimizer.parameters), run.parameters) <= 2e-2
    assert {p.dtype for p in acc.reducer.momenta} == {ms.float32}
    assert {p.dtype for p in (*acc.reducer.anchors, *acc.optimizer.parameters)} == {ms.float16}
    assert all(map(np.array_equal, values(acc.reducer.anchors), values(acc.optimizer.parameters)))


def test_checkpoints_of_another_outer_step_are_refused():
    network = MLP()
    save_checkpoint("c.ckpt", network, accumulator(network, sync="local"))
    message = (r"was saved with reducer LocalUpdates\(every=2, outer_learning_rate=0.7, outer_momentum=0.9\) and ranks 1, but this run has "
               r"LocalUpdates\(every=3, .*\) and 1; local updates need the same reducer and ranks")
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint("c.ckpt", network, accumulator(network, sync="rounds"))


@pytest.mark.parametrize(("error", "message", "arguments"), [
    (ValueError, r"every is 0, expected an int >= 1; give the updates of a rank between two exchanges", {"every": 0}),
    (TypeError, r"every is 2.5 of type float, expected an int >= 1", {"every": 2.5}),
    (ValueError, r"every is 2147483648, expected at most 2147483647", {"every": 2**31}),
    (ValueError, r"outer_learning_rate is 0, expected a finite number > 0; give 1", {"outer_learning_rate": 0}),
    (ValueError, r"outer_learning_rate is nan, expected", {"outer_learning_rate": float("nan")}),
    (ValueError, r"outer_momentum is 1, expected a number >= 0 and < 1; give 0 for none", {"outer_momentum": 1}),
    (TypeError, r"outer_momentum is None of type NoneType, expected", {"outer_momentum": None}),
])
def test_bad_arguments_are_refused(error, message, arguments):
    with pytest.raises(error, match=message):
        LocalUpdates(**arguments)
