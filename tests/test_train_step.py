"""make_train_step: what it compiles and how often, epochs and flushes, a very long run, and what it refuses.

That its updates are exact is drawn in test_differential.py, in any order of calls in test_machine.py.
"""
import sys
from contextlib import nullcontext
from pathlib import Path

import mindspore as ms
import numpy as np
import pytest
from conftest import MLP, batches, compiled_graphs, difference, mean_loss, run_python, tensors, values
from following import LOSS, warned
from mindspore import amp, nn

from ms_accum import Accumulator, TrainOneStepCell, make_grad_cache_step, make_train_step

BATCHES = [tensors(x, y) for x, y in batches([6, 6, 6, 4, 6, 6, 2])]


def rows(x, y):
    return (y >= 0).sum()


def sgd(network):
    return nn.SGD(network.trainable_params(), 0.1)


@pytest.mark.parametrize(("context", "graphs", "options"), [
    ("jit", 4, {"accumulate_step": 2}),  # add, for each of three sizes, and apply
    ("jit", 2, {"accumulate_step": 1, "sizes": 1}),  # alone, and apply at the end of an epoch
    ("graph", 6, {"accumulate_step": 2, "sizes": 1, "pieces": 4, "weight_fn": rows, "on_nonfinite": "skip_window",
                  "loss_scaler": amp.DynamicLossScaler(2.0**8, 2, 2)}),
])
def test_steps_compile_once_and_warn_of_nothing(mode_named, capfd, context, graphs, options):
    """In the first epoch only. 4 pieces of 6 = 2 + 2 + 2: piece, end, judge, apply, and the two of an incomplete window."""
    mode_named(context)
    data, network = BATCHES[:3] if options.pop("sizes", 0) else BATCHES, MLP()
    train_step = make_train_step(mean_loss(network), sgd(network), **options)
    counts = [compiled_graphs()]
    for _ in range(3):
        for loss in train_step.epoch(data):
            assert (loss.shape, loss.dtype) == ((), ms.float32)
        counts.append(compiled_graphs())
    assert 0 < counts[1] - counts[0] <= graphs
    assert counts[1] == counts[2] == counts[3]
    assert warned(capfd) == []


@pytest.mark.usefixtures("uncompiled")
def test_updated_says_whether_the_last_call_closed_a_window():
    network = MLP()
    train_step = make_train_step(mean_loss(network), sgd(network), 2)
    assert train_step.updated is False
    assert [train_step.updated for _ in train_step.epoch(BATCHES[:3])] == [False, True, True], "the last one applied the incomplete window"
    assert train_step.updated is True
    assert train_step.flush() is train_step.updated is False


def forward_of(network, losses):
    """One loss, or the same one twice."""
    one = mean_loss(network)

    def pair(x, y):
        return one(x, y), one(x, y)

    return one if losses == 1 else pair


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize("losses", [1, 2])
@pytest.mark.parametrize("loop", [lambda data, epoch: zip(data, epoch), lambda data, epoch: zip(range(len(data)), epoch)])
def test_a_loop_that_does_not_exhaust_the_epoch_loses_no_update(loop, losses):
    """`zip` asks for no more losses than there are batches. Generators fill their arrays anew for each batch, and with two losses, of
    which a window is read before it is trained, their Tensors."""
    def arrays():
        x, y = np.zeros((6, 6), np.float32), np.zeros(6, np.int32)
        for rows, labels in data:
            x[:], y[:] = rows, labels
            yield x, y

    def filled():
        x, y = tensors(*data[0])
        for batch in data:
            x.assign_value(tensors(*batch)[0])
            y.assign_value(tensors(*batch)[1])
            yield x, y

    data, results = batches([6] * 10), []
    again = [arrays, *[filled] * (losses - 1)]
    for batches_of in (lambda: [tensors(x, y) for x, y in data], lambda: [tensors(*data[-1])] * 10, *again):
        network = MLP()
        train_step = make_train_step(forward_of(network, losses), sgd(network), 4, losses=losses)
        updated = [train_step.updated for _ in loop(data, train_step.epoch(batches_of()))]
        assert (int(train_step.accumulator.update_step), int(train_step.accumulator.mini_step)) == (3, 0)
        assert [i for i, closed in enumerate(updated, 1) if closed] == [4, 8, 10]
        results.append(values(network.trainable_params()))
    right, wrong, *copied = results
    assert [difference(got, right) for got in copied] == [0] * losses
    assert difference(wrong, right) > 1e-3, "control: the rows of the last batch"


def broken(after, error=OSError):
    """Batches, and then an error of reading."""
    yield from [tensors(*batch) for batch in batches([6] * after)]
    raise error("the disk is gone")


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize("losses", [1, 2])
def test_an_error_of_reading_comes_after_the_loss_of_what_was_trained(losses):
    """So a loop that counts losses knows what was trained: with two losses, windows of 2 alone."""
    for after in (2, 3):
        network, seen = MLP(), []
        train_step = make_train_step(forward_of(network, losses), sgd(network), 2, losses=losses)
        with pytest.raises(OSError, match="the disk is gone"):
            seen.extend(train_step.epoch(broken(after)))
        accumulator = train_step.accumulator
        assert len(seen) == 2 * int(accumulator.update_step) + int(accumulator.mini_step) == (after if losses == 1 else 2)


@pytest.mark.usefixtures("uncompiled")
def test_an_interrupt_while_reading_is_raised_at_once():
    """Before the loss that waits for it, whatever the loop does then. Control: an error that the loop leaves behind."""
    for error, first in ((KeyboardInterrupt, 1), (OSError, 2)):
        network, seen = MLP(), []
        train_step = make_train_step(mean_loss(network), sgd(network), 4)
        with pytest.raises(error) if first == 1 else nullcontext():
            for _, loss in zip(range(2), train_step.epoch(broken(2, error))):
                seen.append(loss)
        assert (len(seen), int(train_step.accumulator.mini_step)) == (first, 2)


@pytest.mark.usefixtures("uncompiled")
def test_one_batch_is_read_ahead_and_a_loop_that_is_left_leaves_the_window_open():
    network, read = MLP(), []
    train_step = make_train_step(mean_loss(network), sgd(network), 4)
    accumulator = train_step.accumulator
    counted = (read.append(i) or batch for i, batch in enumerate(BATCHES[:4]))
    next(train_step.epoch(counted))
    assert (len(read), int(accumulator.mini_step), int(accumulator.update_step)) == (2, 1, 0)
    read.clear()
    counted = (read.append(i) or batch for i, batch in enumerate(BATCHES[:3]))
    assert [len(read) for _ in train_step.epoch(counted)] == [2, 3, 3]
    assert (int(accumulator.mini_step), int(accumulator.update_step)) == (0, 1)


@pytest.mark.usefixtures("uncompiled")
def test_single_calls_take_arrays_and_repr_says_where_it_stands():
    network, (x, y) = MLP(), batches([6])[0]
    train_step = make_train_step(mean_loss(network), sgd(network), 4, pieces=2)
    losses = [float(train_step(*batch)) for batch in (tensors(x, y), (x.astype(np.float32), y.astype(np.int32)))]
    assert losses[0] == losses[1]
    assert repr(train_step) == "TrainStep(4 microbatches a window, 2 pieces, SGD, 2 of 4 in the open window, 0 updates, 0 seen)"
    train_step.flush()
    assert repr(train_step).endswith("SGD, 0 of 4 in the open window, 1 updates, 12 seen)")
    scheduled = make_train_step(mean_loss(network), sgd(network), {0: 1, 5: 8}, losses=1)
    assert repr(scheduled) == "TrainStep({0: 1, 5: 8}, SGD, 0 of 1 in the open window, 0 updates, 0 seen)"


def test_what_changed_since_the_last_epoch_is_refused():
    """A parameter that was frozen, and a list of learning rates that is used up: at the next epoch, and in the middle of one."""
    network = MLP()
    train_step = make_train_step(mean_loss(network), nn.SGD(network.trainable_params(), [0.1, 0.1, 0.1]), 2)
    assert len(list(train_step.epoch(BATCHES[:2] * 3))) == 6
    with pytest.raises(ValueError, match=r"list of 3 learning rates is used up, .*; give ceil\(microbatches / accumulate"):
        next(train_step.epoch(BATCHES))
    train_step(*BATCHES[0])
    with pytest.raises(ValueError, match="list of 3 learning rates is used up"):
        train_step(*BATCHES[1])
    train_step.accumulator.reset()
    network.first.bias.requires_grad = False
    with pytest.raises(ValueError, match=r"first\.bias has requires_grad=False, expected trainable parameters"):
        next(train_step.epoch(BATCHES))


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/statm")
@pytest.mark.parametrize("microbatches", [4_000, pytest.param(200_000, marks=pytest.mark.slow)])
def test_a_very_long_run_grows_by_nothing_and_counts_right(microbatches):
    """After a warm-up of 300 windows of 3: windows of 7."""
    script = (Path(__file__).parent / "support" / "long_run.py").read_text(encoding="utf-8")
    grown, compiled, mini_step, update_step, finite = run_python(script, str(microbatches)).split()
    print(f"{microbatches} microbatches: memory grew by {int(grown) / 2**20:.2f} MiB after the warm-up")
    assert int(grown) <= 5e6
    assert int(compiled) == 0
    assert (int(update_step), int(mini_step)) == (300 + (microbatches - 900) // 7, (microbatches - 900) % 7)
    assert finite == "True"


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("error", "message", "options"), [
    (ValueError, r"reduction='sum', expected \"mean\": .* N times too large", {"reduction": "sum"}),
    (ValueError, r"pieces is 0, expected an int >= 1; it is the number of pieces", {"pieces": 0}),
    (ValueError, r"losses is 0, expected an int >= 1", {"losses": 0}),
    (TypeError, r"forward_fn is a lambda whose source.*define it with def", {"forward_fn": lambda x: x.mean()}),
    (TypeError, r"^micro_size is now called pieces, .*: give pieces=4", {"micro_size": 4}),
    (TypeError, r"^strategy is gone: the host always schedules .*leave it out", {"strategy": "fused"}),
    (TypeError, r"^accumulator is now called optimizer, which may be an Accumulator, too", {"accumulator": 3}),
    (TypeError, r"make_train_step\(\) got an unexpected argument clipnorm; did you mean clip_norm\?", {"clipnorm": 1.0}),
])
def test_bad_arguments_are_refused(error, message, options):
    given = {"forward_fn": LOSS, **options}
    if "optimizer" not in given and "accumulator" not in given:
        given["optimizer"] = Accumulator(sgd(MLP()), 2, reduction=given.pop("reduction", "mean"))
    with pytest.raises(error, match=message):
        make_train_step(**given)


def test_the_other_doors_answer_the_same():
    network = MLP()
    cell = nn.WithLossCell(network, LOSS)
    for make, first, message, options in (
            (TrainOneStepCell, (cell,), r"micro_size is gone from TrainOneStepCell; use make_train_step", {"micro_size": 2}),
            (TrainOneStepCell, (cell,), r"pieces is an option of make_train_step", {"pieces": 2}),
            (TrainOneStepCell, (cell,), r"losses is an option of make_train_step", {"losses": 2}),
            (TrainOneStepCell, (cell,), r"unexpected argument clipnorm; did you mean clip_norm\?", {"clipnorm": 1.0}),
            (make_grad_cache_step, (network, LOSS), r"micro_size is now called pieces", {"micro_size": 2})):
        with pytest.raises(TypeError, match=message):
            make(*first, sgd(network), 2, **options)


@pytest.mark.parametrize("make", [make_train_step, TrainOneStepCell])
def test_arguments_that_contradict_an_accumulator_are_refused(make):
    network = MLP()
    first, ready = nn.WithLossCell(network, LOSS), Accumulator(sgd(network), 2, reduction="mean")
    assert make(first, optimizer=ready).accumulator is ready
    for arguments, options, error, message in (
            ((ready, 2), {}, ValueError, "got an Accumulator and also accumulate_step, which the Accumulator has already"),
            ((ready,), {"clip_norm": 1.0, "loss_scaler": amp.StaticLossScaler(8)}, ValueError, "also clip_norm, loss_scaler,"),
            ((sgd(network),), {}, TypeError, "accumulate_step is missing, expected it with an .* give accumulate_step=4"),
            ((3, 2), {}, TypeError, "optimizer is of type int, expected a MindSpore optimizer")):
        with pytest.raises(error, match=message):
            make(first, *arguments, **options)


def test_a_parameter_frozen_after_the_optimizer_was_made_is_refused():
    acc = Accumulator(sgd(MLP()), 2, reduction="mean")
    acc.optimizer.parameters[0].requires_grad = False
    with pytest.raises(ValueError, match=r"first\.weight has requires_grad=False"):
        make_train_step(LOSS, acc)


def test_a_network_that_was_built_again_is_refused_with_the_remedy():
    old, new = MLP(), MLP()
    train_step = make_train_step(mean_loss(new), sgd(old), 2)
    with pytest.raises(ValueError, match=r"different Parameters of the same name.*built again .*, build the optimizer"):
        train_step(*BATCHES[0])
    with pytest.raises(ValueError, match=r"the optimizer updates another Parameter called first.weight .*built again"):
        TrainOneStepCell(nn.WithLossCell(new, LOSS), sgd(old), 2)


@pytest.mark.parametrize("make", [make_train_step, TrainOneStepCell])
def test_an_optimizer_that_takes_no_bfloat16_is_named(make):
    class Scaled(nn.Cell):
        def __init__(self):
            super().__init__()
            self.weight = ms.Parameter(ms.Tensor([1.0, 1.0], ms.bfloat16), name="weight")

        def construct(self, x):
            return (self.weight.astype(ms.float32) * x).mean()

    network = Scaled()
    train_step = make(network, nn.SGD(network.trainable_params(), 0.1), 1)
    with pytest.raises(TypeError, match=r"takes no bfloat16 .*\(here: SGD\); give nn.AdamWeightDecay"):
        train_step(ms.Tensor([[1.0, 1.0]], ms.float32))
