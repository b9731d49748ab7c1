"""Local updates in real processes, and in one, against NumPy."""
import numpy as np
import pytest
import reference
from conftest import MLP, difference, mean_loss, tensors, values
from rank_cases import LAUNCHES, LOCAL, accumulator, cases_of, every_launch_of, microbatches, train, train_by
from simulated_ranks import ORACLES, undivided
from simulated_ranks import simulated as distributed

from ms_accum import load_checkpoint, make_train_step, save_checkpoint
from ms_accum.distributed import LocalUpdates

pytest_plugins = ["launch"]


class HeavyBall(reference.LocalUpdates):
    """Without Nesterov's look ahead."""
    def step(self, moved):
        super().step(moved)
        return [p - self.rate * v for p, v in zip(self.parameters, self.velocity)]


class EveryRank(reference.LocalUpdates):
    """Where ranks without an update count, too."""
    def step(self, moved):
        return super().step(self.ranks)


def simulated(count, sizes, name, optimizer, features=(), kind=reference.LocalUpdates):
    """The same runs in float64, each window as one batch."""
    start = values(MLP(seed=0).trainable_params())
    ranks = [reference.Accumulation(start, ORACLES[optimizer](), 1, "mean", None if name == "each" else 0.5, "skip_window")
             for _ in range(count)]
    run = kind(ranks, *LOCAL[name])
    for _ in range(1 + ("twice" in features)):
        batches = [microbatches(sizes, rank, "nan" in features) for rank in range(count)]
        run.epoch([[tuple(map(np.concatenate, zip(*mine[i:i + 2]))) for i in range(0, len(mine), 2)] for mine in batches])
    return run


@every_launch_of("outer")
def test_local_updates_of_ranks_follow_the_simulation(left_by, launch):
    """Even and uneven data x a dropped window x two epochs. All hold the same bits in the end."""
    count = LAUNCHES[launch][0]
    for case in cases_of(launch, "outer"):
        sizes, name, optimizer, *features = case.split(":")[1:]
        run, results = simulated(count, sizes, name, optimizer, features), left_by(case, launch)
        for rank, (left, expected) in enumerate(zip(results, run.ranks)):
            assert difference(list(map(np.array, left["parameters"])), run.parameters) <= 1e-6, f"{case}, rank {rank}"
            assert left["counters"] == [expected.update_step, 0, expected.skipped], case
            assert left["parameters"] == results[0]["parameters"], f"{case}: ranks hold different parameters"


@pytest.mark.parametrize("wrong", [HeavyBall, EveryRank])
def test_wrong_outer_steps_are_seen(wrong):
    """Negative control of the simulation."""
    right, other = (simulated(2, "halved", "local", "SGD", kind=kind) for kind in (reference.LocalUpdates, wrong))
    assert difference(other.parameters, right.parameters) > 1e-3


@every_launch_of("outer")
def test_averaging_after_each_update_is_data_parallel(left_by, launch):
    """With SGD and equal weights, also where one rank has fewer windows. Control: other outer steps are not."""
    count, run = LAUNCHES[launch][0], undivided({"sync": "window", "sizes": "alike"})
    expected = distributed(run, count, clip_norm=None).parameters
    for left in left_by(cases_of(launch, "outer")[0], launch):
        assert difference(list(map(np.array, left["parameters"])), expected) <= 1e-6
    assert difference(simulated(count, "alike", "averaged", "SGD").parameters, expected) > 1e-4


def local_step(network, name, optimizer="SGD"):
    """A train step of windows of two, whose updates are local."""
    local = LocalUpdates(network.trainable_params(), *LOCAL[name])
    return local, make_train_step(mean_loss(network), accumulator(network, optimizer, after_update=local))


@pytest.mark.parametrize(("mode", "driver"), [
    ("pynative", "step"), ("pynative", "cell"), ("pynative", "hand"), ("jit", "step"),
    *(pytest.param(*case, marks=pytest.mark.slow) for case in (("jit", "hand"), ("graph", "hand"), ("graph", "cell")))])
def test_one_rank_takes_the_outer_steps_along_its_own_differences(monkeypatch, mode_named, mode, driver):
    """In mid-epoch, and in the end. Control: plain training is something else."""
    mode_named(mode)
    monkeypatch.setenv("MS_JIT", "0" if mode == "pynative" else "1")
    run, plain = (simulated(1, "long", name, "Momentum") for name in ("local", "averaged"))
    network = MLP(seed=0)
    local = LocalUpdates(network.trainable_params(), *LOCAL["local"])
    acc = accumulator(network, "Momentum", after_update=local)
    train_by(driver, network, acc, microbatches("long", 0))
    local.finish()
    assert difference(values(network.trainable_params()), run.parameters) <= 1e-6
    assert int(acc.update_step) == run.ranks[0].update_step == 6
    assert difference(plain.parameters, run.parameters) > 1e-2


@pytest.mark.parametrize(("name", "copies"), [("local", 2), ("averaged", 1)])
def test_the_outer_state_is_two_copies_and_one_without_momentum(name, copies):
    plain, (local, step) = accumulator(MLP()), local_step(MLP(), name)
    sizes = [sum(p.nbytes for p in acc.parameters) for acc in (plain, step.accumulator)]
    assert sizes[1] - sizes[0] == copies * sum(p.nbytes for p in local.trained) + local.updates.nbytes


def test_a_round_resumes_bit_identically(monkeypatch):
    """Saved in the middle of a window and of a round, and resumed from other weights."""
    monkeypatch.setenv("MS_JIT", "0")
    ends = []
    for seed in (0, 1):
        network = MLP(seed=seed)
        local, step = local_step(network, "local", "Momentum")
        if seed == 0:
            train(step, microbatches("long", 0)[:2])
            step(*tensors(*microbatches("long", 0)[2]))
            assert (int(local.updates), step.accumulator.position()) == (1, (1, 1))
            save_checkpoint("local.ckpt", network, step)
        else:
            load_checkpoint("local.ckpt", network, step)
        train(step, microbatches("long", 0)[3:])
        local.finish()
        ends.append([p.asnumpy().tobytes() for p in (*local.trained, *step.accumulator.parameters)])
    assert ends[0] == ends[1]


@pytest.mark.parametrize(("error", "message", "arguments"), [
    (ValueError, r"every is 0, expected an int >= 1; it counts a rank's updates between exchanges", {"every": 0}),
    (TypeError, r"every is 2.5 of type float, expected an int >= 1", {"every": 2.5}),
    (ValueError, r"outer_learning_rate is nan, expected a finite number > 0; give 1", {"outer_learning_rate": float("nan")}),
    (ValueError, r"outer_momentum is 1, expected a number >= 0 and < 1; give 0 for none", {"outer_momentum": 1}),
])
def test_bad_arguments_are_refused(error, message, arguments):
    with pytest.raises(error, match=message):
        LocalUpdates(MLP().trainable_params(), **arguments)
