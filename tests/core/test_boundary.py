"""The boundary: how often it reads the device. When windows close is in tests/runs/, by every driver."""

import mindspore as ms
import numpy as np
import pytest
from mindspore import amp, nn, ops
from support.training import step_of

from ms_accum import TrainOneStepCell, make_train_step, until_weight
from ms_accum.selftest.networks import MLP, batches, mean_loss, tensors
from ms_accum.selftest.reads import counted_reads

pytestmark = pytest.mark.core


@pytest.fixture
def reads():
    """A list that grows with each value that the host reads from the device."""
    with counted_reads() as made:
        yield made


def counted(x, y):
    return (y >= 0).sum()


def with_two(network):
    def forward_fn(x, y):
        logits = network(x)
        return ops.cross_entropy(logits, y), ops.square(logits).mean()

    return forward_fn


@pytest.mark.parametrize(("expected", "options"), [
    (0, {"accumulate_step": 4}), (32, {"accumulate_step": until_weight(12)}),
    (8, {"accumulate_step": 4, "on_nonfinite": "skip_microbatch", "max_skips": 3}),
    *(pytest.param(*one, marks=pytest.mark.slow) for one in (
        (0, {"accumulate_step": 4, "pieces": 2}), (0, {"accumulate_step": 1}), (0, {"accumulate_step": {0: 4, 3: 2}}),
        (0, {"accumulate_step": 4, "weight_fn": counted, "loss_reduction": "sum", "clip_norm": 1.0}),
        (8, {"accumulate_step": 4, "on_nonfinite": "skip_window"}))),
])
def test_the_device_is_read_only_where_the_host_cannot_know(reads, expected, options):
    """In 32 microbatches: never, or once a window, or at each microbatch until its weight is reached.

    Control: a status is one read more.
    """
    network = MLP()
    batch = tensors(np.ones((6, 6)), np.zeros(6))
    train_step = make_train_step(mean_loss(network), nn.SGD(network.trainable_params(), 0.1), **options)
    for _ in range(8):
        train_step(*batch)
    reads.clear()
    for _ in range(32):
        train_step(*batch)
    assert len(reads) == expected, reads
    train_step.status()
    assert len(reads) == expected + 1


@pytest.mark.usefixtures("uncompiled")
def test_status_says_where_a_window_stands():
    """Of a train step and of its accumulator, in the middle of a window and behind it."""
    network = MLP()
    train_step = make_train_step(mean_loss(network), nn.SGD(network.trainable_params(), 0.1), 3, clip_norm=1.0)
    for samples in (6, 4, 5, 2):
        train_step(*tensors(np.ones((samples, 6)), np.zeros(samples)))
    status = train_step.status()
    assert status == train_step.accumulator.status()
    assert status[:7] == (1, 1, 2, 15, 0, 1, 15.0)
    assert status.grad_norm == float(train_step.accumulator.grad_norm) > 0
    assert ms.get_context("mode") == ms.PYNATIVE_MODE


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize("accumulate_step", [1, 3])
def test_a_load_that_is_interrupted_is_refused_by_the_next_call(accumulate_step):
    """A step that counted down reads the device again, although it had nothing to ask. Control: after a reset."""
    network = MLP()
    batch = tensors(np.ones((6, 6)), np.zeros(6))
    train_step = make_train_step(mean_loss(network), nn.SGD(network.trainable_params(), 0.1), accumulate_step)
    for _ in range(2):
        train_step(*batch)
    with pytest.raises(KeyboardInterrupt), train_step.boundary.loading(True):
        raise KeyboardInterrupt
    with pytest.raises(RuntimeError, match="stopped an update, so it may have changed only some of the"):
        train_step(*batch)
    train_step.accumulator.reset()
    train_step(*batch)


def skipping_step(driver, loss_scale=None, **options):
    """A step or a cell that skips what is not finite."""
    network = MLP()
    if loss_scale is not None:
        options["loss_scaler"] = amp.StaticLossScaler(loss_scale)
    optimizer = nn.SGD(network.trainable_params(), 0.1)
    if driver == "cell":
        return TrainOneStepCell(nn.WithLossCell(network, nn.CrossEntropyLoss()), optimizer, 1, **options)
    return make_train_step(mean_loss(network), optimizer, 1, **options)


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize(("driver", "options", "noun"), [
    ("step", {"on_nonfinite": "skip_window"}, "windows"), ("cell", {"on_nonfinite": "skip_window"}, "windows"),
    *(pytest.param(*one, marks=pytest.mark.slow) for one in (
        ("step", {"on_nonfinite": "skip_microbatch"}, "microbatches or pieces"),
        ("step", {"loss_scale": 2.0}, "windows"), ("cell", {"loss_scale": 2.0}, "windows")))])
def test_more_than_20_skips_in_a_row_are_an_error(driver, options, noun):
    """In the 21st, also if finite ones came before. Control: after 20, a finite one begins anew."""
    x, y = tensors(np.ones((6, 6)), np.zeros(6))
    step = skipping_step(driver, **options)
    for skips in (3, 20, 20):
        for _ in range(skips):
            step(x * np.nan, y)
        step(x, y)
    for _ in range(20):
        step(x * np.nan, y)
    with pytest.raises(RuntimeError, match=rf"^more than max_skips=20 {noun} in a row were skipped \(21 by now, 64 in "
                                           r"all\), because their gradients were not finite, after update 3;"):
        step(x * np.nan, y)


@pytest.mark.usefixtures("uncompiled")
def test_a_cell_reads_skips_as_seldom_as_it_may():
    """Not after each microbatch. Control: where nothing may be skipped, it reads none."""
    batch = tensors(np.ones((6, 6)), np.zeros(6))
    for options, times in (({"on_nonfinite": "skip_window"}, 3), ({}, 0)):
        cell = skipping_step("cell", **options)
        cell(*batch)
        with counted_reads() as made:
            for _ in range(62):
                cell(*batch)
        assert made.count("asnumpy") == times  # op by op, a condition reads by `bool`


@pytest.mark.parametrize(("updates", "called"), [(9, [10]), (8, [])])
def test_a_full_window_that_is_closed_late_is_counted_from_the_devices_count(updates, called):
    """As after a load or an interrupt. Control: another count calls nothing."""
    step, seen = step_of(2), []
    step.on_update(lambda: seen.append(step.status().update_step), every=10)
    step(*tensors(*batches([4])[0]))
    ops.assign(step.accumulator.mini_step, 2)
    ops.assign(step.accumulator.update_step, updates)
    step.boundary.forget()
    step.boundary.ask()
    assert seen == called
    assert step.status()[:2] == (updates + 1, 0)
