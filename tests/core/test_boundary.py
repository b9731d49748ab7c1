"""The boundary: how often it reads the device, what it counts, what stays after an error, and who owns a step."""
import gc
import warnings

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, amp, ops
from support.training import sgd

from ms_accum import make_train_step, until_weight
from ms_accum.core.window import ADDED, BEGIN, CLOSE, END, HOLD, LOADING, change
from ms_accum.selftest.checks import counted_reads
from ms_accum.selftest.networks import MLP, mean_loss, tensors

pytestmark = pytest.mark.core

BATCH = tensors(np.ones((6, 6)), np.zeros(6))


def step_of(accumulate_step=2, eager=True, **options):
    network = MLP()
    return make_train_step(mean_loss(network), sgd(network), accumulate_step, eager=eager, **options)


def counted(x, y):
    return (y >= 0).sum()


@pytest.mark.parametrize(("expected", "options"), [
    (0, {"accumulate_step": 4}), (32, {"accumulate_step": until_weight(12)}),
    (0, {"accumulate_step": 4, "on_nonfinite": "skip_window", "loss_scaler": amp.DynamicLossScaler(2.0, 2, 9)}),
    *(pytest.param(*one, marks=pytest.mark.slow) for one in (
        (0, {"accumulate_step": 4, "pieces": 2}), (0, {"accumulate_step": 1}), (0, {"accumulate_step": {0: 4, 3: 2}}),
        (0, {"accumulate_step": 4, "weight_fn": counted, "loss_reduction": "sum", "clip_norm": 1.0}),
        (0, {"accumulate_step": 4, "on_nonfinite": "skip_microbatch"}))),
])
def test_the_device_is_read_only_where_the_host_cannot_know(expected, options):
    """In 32 microbatches: never, or at each microbatch until its weight is reached. Control: a function of `on_update`
    where windows may be dropped is one read for each window. A read is of the counts and of the sums."""
    train_step = step_of(eager=False, **options)
    for _ in range(8):
        train_step(*BATCH)
    with counted_reads() as reads:
        for _ in range(32):
            train_step(*BATCH)
    assert len(reads) == 2 * expected, reads
    for ask in (lambda: train_step.update_step, lambda: train_step.updated):  # once: of counts, of sums and of `seen`
        with counted_reads() as reads:
            assert ask()
        assert len(reads) == 3 * train_step.boundary.window.drops
    if train_step.boundary.window.drops:
        train_step.on_update(lambda step: None)
        with counted_reads() as reads:
            for _ in range(32):
                train_step(*BATCH)
        assert len(reads) == 2 * 32 // 4


@pytest.mark.parametrize("eager", [True, False])
def test_a_call_that_first_closes_a_full_window_has_updated(monkeypatch, eager):
    """What an interrupt between a microbatch and its close leaves. Control: the next call."""
    step = step_of(3, eager=eager)
    step(*BATCH)
    step(*BATCH)
    with monkeypatch.context() as patch:
        patch.setattr(step.boundary, "_run_close", lambda: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            step(*BATCH)
    step(*BATCH)
    assert (step.updated, step.status().mini_step, step.update_step) == (True, 1, 1)
    step(*BATCH)
    assert not step.updated
    step.reset()


def test_the_time_of_a_row_begins_at_a_reset():
    """The seconds of a dropped window are not those of the next one. Control: a microbatch leaves it."""
    train_step = step_of()
    began = train_step.boundary.since
    train_step(*BATCH)
    assert train_step.boundary.since == began
    train_step.reset()
    assert train_step.boundary.since > began


def test_too_many_dropped_windows_raise_an_error_until_a_reset():
    """Where counters are read. Control: as many as are allowed."""
    nothing = tensors(np.full((6, 6), np.nan), np.zeros(6))
    train_step = step_of(1, on_nonfinite="skip_window", max_skips=2)
    for _ in range(2):
        train_step(*nothing)
    assert not train_step.flush()
    train_step(*nothing)
    for call in (train_step.flush, lambda: next(train_step.epoch([BATCH]))):
        with pytest.raises(RuntimeError, match=r"3 windows in a row were dropped \(3 skips in all\).*max_skips=2"):
            call()
    assert (train_step.status().skipped, train_step.updated) == (3, False)
    train_step.reset()
    train_step(*BATCH)
    assert not train_step.flush()
    assert (train_step.status().skipped_in_row, train_step.update_step) == (0, 1)
    with pytest.raises(RuntimeError, match=r"in a row were dropped"):
        list(train_step.epoch([nothing] * 70))
    assert train_step.trained == 64  # an epoch looks before it ends


def test_a_mark_that_stays_says_what_was_not_finished():
    """A part of a microbatch: everything but a reset raises an error, and the place goes back to where the window
    began. A part of an update: a reset drops the window. Control: no mark."""
    for mark, message in ((BEGIN, "stopped a microbatch, .*call reset"), (CLOSE, "stopped an update, .*call reset")):
        train_step = step_of(3)
        for _ in range(5):
            train_step(*BATCH)
        assert train_step.status().mini_step == 2
        ops.assign_add(train_step.boundary.window.counts, mark)
        train_step.boundary.missing = None  # as after an error or an interrupt
        for call in (train_step.status, train_step.flush, lambda step=train_step: step(*BATCH),
                     lambda step=train_step: next(step.epoch([BATCH]))):
            with pytest.raises(RuntimeError, match=message):
                call()
        train_step.reset()
        assert train_step.status()[:2] == (1, 0)
        assert train_step.trained == (3 if mark is BEGIN else 5)
        assert not train_step.boundary.window.buffers[0].asnumpy().any()
        train_step(*BATCH)
        assert train_step.flush()


def test_after_a_torn_load_only_a_load_helps():
    """A reset would leave values of two files. Control: a torn update, which a reset takes back to a window."""
    for mark, stays in ((change(MARK=LOADING), True), (CLOSE, False)):
        train_step = step_of(3)
        ops.assign_add(train_step.boundary.window.counts, mark)
        for _ in range(2):
            if stays:
                with pytest.raises(RuntimeError, match="stopped a load, so values are of two files; load a checkpoint"):
                    train_step.reset()
            else:
                train_step.reset()
        assert (train_step.boundary.window.counts.asnumpy()[0] != 0) == stays


def test_microbatches_of_other_ranks_do_not_move_this_ranks_place():
    """Where ranks sum each microbatch, a window also holds theirs. Control: its own do."""
    for of_others, place in ((True, 0), (False, 0)):
        train_step = step_of(4)
        train_step(*BATCH)
        ops.assign_add(train_step.boundary.window.counts, HOLD if of_others else END)
        ops.assign_add(train_step.boundary.window.counts, BEGIN)  # HOLD and END take one mark away
        assert train_step.trained == (1 if of_others else 2)
        counts, _, held = train_step.boundary.of_last_update()
        assert (counts[ADDED], held) == (place, 1 if of_others else 2)
        train_step.reset()


def test_an_interrupt_between_a_microbatch_and_its_close_loses_nothing(monkeypatch):
    """The next call closes the window first. Control: without the interrupt."""
    ended = []
    for interrupts in (False, True):
        train_step = step_of()
        train_step(*BATCH)
        if interrupts:
            with monkeypatch.context() as patch:
                patch.setattr(type(train_step.boundary), "close", interrupted)
                with pytest.raises(KeyboardInterrupt):
                    train_step(*BATCH)
        else:
            train_step(*BATCH)
        train_step(*BATCH)
        assert train_step.status()[:2] == (1, 1)
        ended.append(train_step.optimizer.parameters[0].asnumpy())
        train_step.reset()
    assert (ended[0] == ended[1]).all()


def interrupted(boundary):
    raise KeyboardInterrupt


def test_new_memory_of_a_parameter_or_a_rate_is_noticed():
    """At a flush and where an epoch begins. Control: a value that is assigned."""
    for of in ("parameter", "rate"):
        train_step = step_of()
        optimizer = train_step.optimizer
        changed = optimizer.parameters[0] if of == "parameter" else optimizer.learning_rate
        list(train_step.epoch([BATCH] * 2))
        ops.assign(changed, changed * 0.5)
        assert not train_step.flush()
        changed.set_data(Tensor(changed.asnumpy() * 2))
        for call in (train_step.flush, lambda step=train_step: next(step.epoch([BATCH]))):
            with pytest.raises(RuntimeError, match=rf"^{changed.name} was given new memory .*ops\.assign"):
                call()


def test_a_window_that_is_lost_is_reported_when_its_step_is_collected():
    """Control: not if the window was applied or reset."""
    for end, lost in ((lambda step: None, 1), (lambda step: step.flush(), 0), (lambda step: step.reset(), 0)):
        train_step = step_of()
        train_step(*BATCH)
        end(train_step)
        gc.collect()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            del train_step
            gc.collect()
        said = [str(warning.message) for warning in caught if "is lost" in str(warning.message)]
        assert len(said) == lost
        assert all("of first.weight that holds 1 microbatch(es)" in text for text in said)


def test_state_is_four_parameters_and_one_buffer_for_each_parameter():
    """Names are unique in a process, so that two accumulators may be in one graph. A window of one has no buffers."""
    steps = [step_of(), step_of()]
    windows = [step.boundary.window for step in steps]
    assert [b.shape for b in windows[0].buffers] == [p.shape for p in steps[0].optimizer.parameters]
    state = [(w.counts, w.sums, w.seen, w.zero) for w in windows]
    assert len({p.name for of in state for p in of}) == 8
    assert (state[0][0].dtype, state[0][1].dtype, state[0][2].dtype) == (ms.int32, ms.float32, ms.int64)
    alone = step_of(1)
    alone(*BATCH)
    assert (len(alone.boundary.window.buffers), alone.trained) == (0, 1)
