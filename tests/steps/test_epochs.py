"""Loops over epochs: what is read, counted, skipped, flushed, owned and called; sentences 2, 3, 8 and 11."""
import pickle
from contextlib import nullcontext
from copy import copy, deepcopy
from itertools import chain, islice, repeat

import numpy as np
import pytest
from mindspore import amp
from mindspore.dataset import NumpySlicesDataset
from support.modes import running
from support.training import LOSS, sgd, step_of

from ms_accum import load_checkpoint, make_train_step, save_checkpoint, until_weight
from ms_accum.selftest.comparing import difference, values
from ms_accum.selftest.networks import MLP, batches, mean_loss, tensors

pytestmark = [pytest.mark.core, pytest.mark.usefixtures("uncompiled")]
DATA = [tensors(*batch) for batch in batches([6] * 7)]


def parameters(step):
    return values(step.optimizer.parameters)


def interrupted(data, error=KeyboardInterrupt):
    """Batches, and then an error of reading."""
    yield from data
    raise error("the disk is gone")


# --- what an epoch reads and trains -----------------------------------------------------------------------------------


def test_a_loop_that_does_not_exhaust_the_epoch_loses_no_update():
    """`zip` asks for no more losses than there are batches. A generator may fill its arrays anew for each batch.

    Control: the last batch each time."""
    data = batches([6] * 10)

    def arrays():
        x, y = np.zeros((6, 6), np.float32), np.zeros(6, np.int32)
        for rows, labels in data:
            x[:], y[:] = rows, labels
            yield x, y

    results = []
    for given in ([tensors(*batch) for batch in data], [tensors(*data[-1])] * 10, arrays()):
        step = step_of(4)
        updated = [i for i, _ in enumerate(zip(range(10), step.epoch(given)), 1) if step.updated]
        assert updated == [4, 8, 10], "the last one closes a window"
        assert (step.status().update_step, step.status().mini_step) == (3, 0)
        assert step.flush() is step.updated is False
        results.append(parameters(step))
    right, wrong, copied = results
    assert difference(copied, right) == 0
    assert difference(wrong, right) > 1e-3
    assert (len(list(step.epoch(DATA[:4]))), step.updated) == (4, True), "so does a last one that needs no flush"


@pytest.mark.parametrize("accumulate_step", [3, {0: 2, 1: 3}, until_weight(13)])
def test_a_batch_is_read_when_all_windows_before_it_have_updated(accumulate_step):
    """So it may be made with the current parameters. The body sees a loss when one more batch was read."""
    step, asked, closed, in_body = step_of(accumulate_step), [], [0], []

    def made():
        for batch in DATA:
            asked.append(step.update_step)
            yield batch

    for _ in step.epoch(made()):
        in_body.append(len(asked))
        closed.append(closed[-1] + step.updated)
    assert asked == closed[:7]
    assert in_body == [2, 3, 4, 5, 6, 7, 7]
    assert step.update_step == 3


def test_an_error_of_reading_comes_after_the_loss_of_what_was_trained():
    """An interrupt is raised at once, before the loss that waits for it. Control: an error that the loop leaves behind.
    """
    for after in (2, 3):
        step, seen = step_of(2), []
        with pytest.raises(OSError, match="the disk is gone"):
            seen.extend(step.epoch(interrupted(DATA[:after], OSError)))
        assert len(seen) == step.trained == after
    for error, first in ((KeyboardInterrupt, 1), (OSError, 2)):
        step, seen = step_of(4), []
        with pytest.raises(error) if first == 1 else nullcontext():
            for _, loss in zip(range(2), step.epoch(interrupted(DATA[:2], error))):
                seen.append(loss)
        assert (len(seen), step.status().mini_step) == (first, 2)


def test_an_epoch_without_batches_and_one_that_is_left():
    """The first is finished, the other is not, and its window stays open."""
    step = step_of(4)
    assert list(step.epoch([])) == []
    assert (step.epochs, step.trained) == (1, 0)
    for _ in step.epoch(DATA):
        break
    assert (step.epochs, step.trained, step.status().mini_step) == (1, 1, 1)
    for skip in (None, 2):
        with pytest.raises(RuntimeError, match=r"^a window of 1 microbatch\(es\) is open, .* flush\(\) applies it"):
            next(step.epoch(DATA, skip=skip))
    step.reset()
    assert len(list(step.epoch(islice(DATA, 3)))) == 3
    assert (step.epochs, step.trained) == (2, 0)


# --- the place in the data --------------------------------------------------------------------------------------------


def test_what_is_skipped_is_read_and_not_looked_at():
    """A loader that skips by itself gives placeholders. If all are skipped, the open window is applied, and the epoch
    ends; fewer batches are an error. Control: `skip=0` is another run."""
    whole = step_of(3)
    list(whole.epoch(DATA))
    rows = NumpySlicesDataset(tuple(np.concatenate([part.asnumpy() for part in parts]) for parts in zip(*DATA)),
                              ["x", "y"], shuffle=False).batch(6)
    for stopped, skip, given, losses in ((4, 4, chain(repeat(None, 4), DATA[4:]), 3), (5, 5, rows, 2), (7, 7, DATA, 0),
                                         (3, 0, DATA, 7)):
        step = step_of(3)
        with pytest.raises(KeyboardInterrupt):
            list(step.epoch(interrupted(DATA[:stopped])))
        with pytest.raises(ValueError, match=r"^the data ended after 2 batches, expected the \d that are to"):
            list(step.epoch(DATA[:2], skip=stopped))
        assert (step.epochs, step.trained) == (0, stopped)
        assert len(list(step.epoch(given, skip=skip))) == losses
        assert (step.epochs, step.trained) == (1, 0)
        assert (difference(parameters(step), parameters(whole)) == 0) == (skip > 0)
    for skip, error in ((-1, ValueError), (1.5, TypeError), (True, TypeError)):
        with pytest.raises(error, match=r"skip is .*, expected an int >= 0"):
            step.epoch(DATA, skip=skip)


def test_reset_in_a_body_moves_on():
    """After an error, it goes back: see test_errors.py. Control: without it, there is one update more."""
    step = step_of(3)
    for i, _ in enumerate(step.epoch(DATA)):
        if i == 1:
            step.reset()
            assert (step.trained, step.status().mini_step) == (2, 0)
    assert (step.update_step, step.epochs) == (2, 1)  # 3 + 2 of the 5 that were left
    list(step.epoch(DATA))
    assert (step.update_step, step.epochs) == (5, 2)


def test_an_empty_microbatch_counts_and_no_window_waits_for_another():
    """Sentence 8. Control: where windows may be dropped, the one of weight 0 is no update."""
    empty = tuple(part[:0] for part in DATA[0])
    for options, status in (({}, (3, 0, 3, 0, 0, 1, 12)), ({"eager": True}, (3, 0, 3, 0, 0, 1, 12)),
                            ({"on_nonfinite": "skip_window"}, (2, 0, 3, 1, 0, 1, 12))):
        step = step_of(2, **options)
        losses = list(step.epoch([DATA[0], empty, empty, empty, DATA[1]]))
        assert [float(loss) == 0 for loss in losses] == [False, True, True, True, False]
        assert step.status()[:7] == status
        assert step.status()[9:11] == (pytest.approx(float(losses[-1])), 6)


# --- who owns a step --------------------------------------------------------------------------------------------------

def load(step):
    save_checkpoint("run.safetensors", step.optimizer, step)
    load_checkpoint("run.safetensors", step.optimizer, step)


def allowed(step):
    step.evaluate(DATA[:1])
    save_checkpoint("run.safetensors", step.optimizer, step)
    step.learning_rate *= 0.5
    step.status()


OWNED = r"^the train step was called, looped over or loaded inside {}, which owns it; begin a new loop"
BREAKS = [lambda step: (step(*DATA[0]), step(*DATA[0])), lambda step: next(step.epoch(DATA, skip=step.trained)), load]


@pytest.mark.parametrize("breaks", BREAKS, ids=["calls", "another loop", "a load"])
def test_a_loop_and_a_function_of_on_update_own_the_step(breaks):
    """The loop raises an error at its next batch; the call that updated, when all functions have returned. They
    are not called for the windows that one of them closes. Controls: what is allowed in a body and in a function."""
    step = step_of(2)
    loop = step.epoch(DATA)
    next(loop)
    breaks(step)
    with pytest.raises(RuntimeError, match=OWNED.format("this loop over train_step.epoch")):
        next(loop)
    for act in (breaks, allowed):
        step, calls = step_of(2), []
        step.on_update(act)
        step.on_update(lambda step, calls=calls: calls.append(step.update_step))
        with pytest.raises(RuntimeError, match=OWNED.format("a function of on_update")) if act is breaks else (
                nullcontext()):
            list(step.epoch(DATA))
        assert len(calls) == (1 if act is breaks else 4)
    for i, _ in enumerate(step.epoch(DATA)):
        allowed(step)
        assert i != 2 or step.flush()
    assert (step.epochs, step.update_step) == (2, 8)


def test_functions_are_called_after_updates_logs_first_and_never_for_a_dropped_window():
    data = [(x * (np.nan if i in (2, 3) else 1.0), y) for i, (x, y) in enumerate(DATA)]
    step, calls = step_of(2, on_nonfinite="skip_window"), []
    step.on_update(lambda step: calls.append(("each", step.update_step, step.trained)))
    step.on_update(lambda step: calls.append(("second", step.update_step)), every=2)

    class Log:
        is_log = True

        def __call__(self, step):
            calls.append("log")

    step.on_update(Log())
    list(step.epoch(data))
    assert calls == ["log", ("each", 1, 2), "log", ("each", 2, 6), ("second", 2), "log", ("each", 3, 7)]
    assert (step.status().closed_windows, step.status().skipped) == (4, 1)


def test_what_a_function_raises_passes_unchanged_and_its_update_stands():
    """Nothing is compiled again, and the run goes on as if nothing had been. Control: an error in `forward_fn`."""
    whole, step = step_of(2), step_of(2)
    list(whole.epoch(DATA))
    fails, error = [True], OSError("no space left")

    @step.on_update
    def save(step):
        if fails:
            fails.clear()
            raise error

    with pytest.raises(OSError, match=r"^no space left$") as raised:
        list(step.epoch(DATA))
    assert raised.value is error
    graphs = dict(step.boundary.graphs)
    assert (len(graphs) > 0, step.trained, step.update_step) == (True, 2, 1)
    list(step.epoch(DATA, skip=step.trained))
    assert {key: step.boundary.graphs[key] for key in graphs} == graphs
    assert difference(parameters(step), parameters(whole)) == 0
    with pytest.raises((ValueError, RuntimeError)):
        step(DATA[0][0][:, :4], DATA[0][1])
    assert step.boundary.graphs == {}


@pytest.mark.parametrize(("function", "every", "error", "message"), [
    (lambda: None, 1, TypeError, r"^a function of on_update has the parameters \(\), expected one: it is called"),
    (3, 1, TypeError, "function is of type int, expected a function of the train step"),
    (print, 0, ValueError, "every is 0, expected an int >= 1; it is a number of updates")])
def test_what_is_no_function_of_an_update_is_an_error(function, every, error, message):
    with pytest.raises(error, match=message):
        step_of(2).on_update(function, every)


# --- what changed, what is given --------------------------------------------------------------------------------------


def test_what_changed_since_the_last_epoch_is_an_error():
    """A frozen parameter, a used-up list of rates. Control: exactly enough. New memory: see test_boundary.py."""
    network = MLP()
    step = make_train_step(mean_loss(network), sgd(network, [0.1, 0.1, 0.1]), 2)
    assert len(list(step.epoch(DATA[:6]))) == 6
    with pytest.raises(ValueError, match=r"list of learning rates is used up, .*ms_accum\.updates_of"):
        next(step.epoch(DATA))
    network.first.bias.requires_grad = False
    with pytest.raises(ValueError, match=r"first\.bias has requires_grad=False, expected trainable parameters"):
        next(step.epoch(DATA))


def test_single_calls_take_arrays():
    step, (x, y) = step_of(4, pieces=2), batches([6])[0]
    losses = [float(step(*batch)) for batch in (tensors(x, y), (x.astype(np.float32), y.astype(np.int32)))]
    assert losses[0] == losses[1]
    assert step.trained == 2
    step.flush()
    for copied in (copy, deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="TrainStep holds compiled graphs and Parameters of its own"):
            copied(step)
    with pytest.raises(AttributeError):
        step.clip_norm = 1.0


LISTED = [lambda x, y: 1.0][0]


@pytest.mark.parametrize(("error", "message", "options"), [
    (TypeError, r"gradient_accumulation_steps; did you mean accumulate_step\?", {"gradient_accumulation_steps": 2}),
    (TypeError, r"scale_sense; did you mean loss_scaler\?", {"scale_sense": 2.0}),
    (ValueError, 'got a loss_scaler with on_nonfinite="skip_microbatch"',
     {"loss_scaler": amp.StaticLossScaler(8), "on_nonfinite": "skip_microbatch"}),
    (TypeError, "weight_fn is a lambda whose source.*define it with def", {"weight_fn": LISTED}),
    (ValueError, "got has_weight=True and a weight_fn, expected one of them", {"has_weight": True, "weight_fn": LOSS}),
])
def test_options_that_do_not_fit_are_errors(error, message, options):
    """Junk as one option alone: test_arguments.py."""
    with pytest.raises(error, match=message):
        step_of(2, **options)


def test_eager_in_graph_mode_is_an_error():
    step = step_of(2, eager=True)
    with running("graph"), pytest.raises(RuntimeError, match="eager=True was called in graph mode, expected PyNative"):
        step(*DATA[0])
