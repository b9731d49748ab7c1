"""Local updates in one process; test_reducers.py has them in several."""
import pytest
from conftest import MLP, difference, mean_loss, values
from drivers import LossOf
from rank_cases import accumulator, driver_of, train
from rank_runs import LOCAL, microbatches, run_of, simulated

from ms_accum import load_checkpoint, make_train_step, save_checkpoint
from ms_accum.distributed import LocalUpdates


def local_step(network, name, optimizer="SGD"):
    """A train step of windows of two, whose updates are local."""
    local = LocalUpdates(network.trainable_params(), *LOCAL[name])
    return local, make_train_step(mean_loss(network), accumulator(network, optimizer, after_update=local))


@pytest.mark.parametrize(("jit", "driver"), [
    ("0", "step"), ("0", "cell"), ("0", "hand"), ("1", "step"),
    *(pytest.param("1", driver, marks=pytest.mark.slow) for driver in ("hand", "cell"))])
def test_one_rank_takes_the_outer_steps_along_its_own_differences(monkeypatch, jit, driver):
    """In mid-epoch, and in the end. Control: plain training is something else."""
    monkeypatch.setenv("MS_JIT", jit)
    run = {**run_of("local"), "optimizer": "Momentum"}
    expected, plain = (simulated({**run, "local": name}, 1)[0] for name in ("twice", "averaged"))
    network = MLP(seed=0)
    local = LocalUpdates(network.trainable_params(), *LOCAL["twice"])
    acc = accumulator(network, "Momentum", after_update=local)
    with driver_of(driver, LossOf(network), acc) as driving:
        driving.epoch(microbatches("alike", 0))
    local.finish()
    assert difference(values(network.trainable_params()), expected.parameters) <= 1e-6
    assert int(acc.update_step) == expected.update_step == 3
    assert difference(plain.parameters, expected.parameters) > 1e-2


@pytest.mark.parametrize(("name", "copies"), [("twice", 2), ("averaged", 1)])
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
        local, step = local_step(network, "twice", "Momentum")
        if seed == 0:
            train(step, microbatches("uneven", 0)[:2])
            step(*microbatches("uneven", 0)[2])
            assert (int(local.updates), step.accumulator.position()) == (1, (1, 1))
            save_checkpoint("local.ckpt", network, step)
        else:
            load_checkpoint("local.ckpt", network, step)
        train(step, microbatches("uneven", 0)[3:])
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
