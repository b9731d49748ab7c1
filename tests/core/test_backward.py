"""Loops in the style of loss.backward(): every optimizer, what is refused, and hooks that go. Whole runs are drawn in
test_differential.py, and calls in any order in test_machine.py."""
import random

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn, ops
from support.differential.cases import compose
from support.differential.optimizers import COMPILED_ONLY, OPTIMIZERS, build_optimizer
from support.processes import MEMORY, run_python
from support.training import sgd

from ms_accum import Accumulator, load_checkpoint, mindspore_api, save_checkpoint
from ms_accum.core.stream import Stream
from ms_accum.mindspore_api import recording
from ms_accum.selftest.comparing import difference, relative, values
from ms_accum.selftest.networks import MLP, batches, mean_loss, tensors

pytestmark = pytest.mark.core
SIZES = [4, 4, 2, 3, 1]



def built(name, network):
    case = compose(random.Random(0).choice, driver="hand-pynative", optimizer=name, level="none", loss="mean",
                   factor=1.0, groups=False, rates="number")
    return build_optimizer(case, network.trainable_params())


def plain(name, network):
    """The parameters after training on windows of two microbatches as undivided batches."""
    loss, optimizer, given = mean_loss(network), built(name, network), batches(SIZES)
    grad_fn = ms.value_and_grad(loss, None, optimizer.parameters)
    for i in range(0, len(given), 2):
        optimizer(grad_fn(*tensors(*map(np.concatenate, zip(*given[i:i + 2]))))[1])
    return values(network.trainable_params())


def by_backward(accumulator, loss):
    for batch in accumulator.epoch([tensors(*batch) for batch in batches(SIZES)]):
        accumulator.backward(loss(*batch), len(batch[0]))


def by_gradients(accumulator, loss, record=lambda: None):
    """`record`: called after each gradient, which switches recording off."""
    grad_fn = ms.value_and_grad(loss, None, accumulator.weights)
    for batch in batches(SIZES):
        gradients = grad_fn(*tensors(*batch))[1]
        record()
        accumulator(gradients, len(batch[0]))
    accumulator.flush()


def by_gradients_while_recording(accumulator, loss):
    with recording() as record:
        by_gradients(accumulator, loss, record)


def by_apply_while_recording(accumulator, loss):
    """Close each window by hand, the last one by `flush`."""
    grad_fn = ms.value_and_grad(loss, None, accumulator.weights)
    with recording() as record:
        for i, batch in enumerate(batches(SIZES)):
            gradients = grad_fn(*tensors(*batch))[1]
            record()
            accumulator.add(gradients, len(batch[0]))
            if i % 2:
                accumulator.apply()
        accumulator.flush()


WAYS = [by_backward, by_gradients, by_gradients_while_recording]


@pytest.mark.parametrize(("train", "optimizers"), [
    *((train, slice(i, None, 3)) for i, train in enumerate(WAYS)),  # each optimizer once
    *(pytest.param(train, slice(None), marks=pytest.mark.slow) for train in WAYS)])
def test_every_optimizer_trains_as_on_the_undivided_batch(train, optimizers, uncompiled):
    trained = [name for name in OPTIMIZERS if name not in COMPILED_ONLY]
    assert len(trained) > 20
    for name in trained[optimizers]:
        network = MLP(seed=0)
        start = values(network.trainable_params())
        accumulator = Accumulator(built(name, network), 2, reduction="mean")
        train(accumulator, mean_loss(network))
        expected = plain(name, MLP(seed=0))
        assert difference(values(network.trainable_params()), expected) <= 1e-5, name
        assert min(relative([one], [other]) for one, other in zip(start, expected)) > 1e-4, name
        assert int(accumulator.update_step) == 3


@pytest.mark.parametrize("train", [by_backward, by_gradients_while_recording, by_apply_while_recording])
def test_an_optimizer_that_compiles_itself_updates_while_mindspore_records(train):
    """Control: the next test. Where `MS_JIT` is 0, no optimizer compiles itself, and each one updates."""
    network, other = MLP(seed=0), MLP(seed=0)
    train(Accumulator(built("nn.AdamWeightDecay", network), 2, reduction="mean"), mean_loss(network))
    expected = plain("nn.AdamWeightDecay", other)
    assert difference(values(network.trainable_params()), expected) <= 1e-5
    assert min(relative([one], [to]) for one, to in zip(values(MLP(seed=0).trainable_params()), expected)) > 1e-4


def test_an_optimizer_that_is_called_while_mindspore_records_may_change_nothing():
    """If this fails, MindSpore has mended it, and `Window.update_with` need not switch recording off."""
    network = MLP(seed=0)
    start, optimizer = values(network.trainable_params()), nn.AdamWeightDecay(network.trainable_params(), 0.1)
    with recording():
        optimizer(tuple(map(ops.ones_like, optimizer.parameters)))
    assert difference(values(network.trainable_params()), start) == 0


def test_16_bit_gradients_are_summed_in_float32():
    """Control: the sum that MindSpore itself makes of float16 gradients stops growing at 2,048."""
    parameter = Parameter(Tensor([1.0], ms.float16), name="half")
    accumulator = Accumulator(nn.SGD([parameter], 0.0), 100, reduction="sum")
    gradients = (2000, *[1] * 60)
    with recording():
        for gradient in gradients:
            mindspore_api.backward((parameter * gradient).sum())
    assert float(mindspore_api.gradient_of(parameter)[0]) == 2048
    mindspore_api.forget_gradient(parameter)
    for gradient in accumulator.epoch(gradients):
        accumulator.backward((parameter * gradient).sum())
        if gradient == gradients[-1] and int(accumulator.mini_step) == len(gradients):
            break
    assert float(accumulator.window.buffers[0][0]) == 2060
    accumulator.reset()


def parts():
    network = MLP(seed=0)
    accumulator = Accumulator(sgd(network), 2, reduction="mean")
    return network, accumulator, mean_loss(network), tensors(*batches([4])[0])


def test_what_would_be_silent_is_refused_and_changes_nothing(monkeypatch):
    network, accumulator, loss, batch = parts()

    def said(expected, match, given, weight=1.0):
        with pytest.raises(expected, match=match):
            accumulator.backward(given, weight)
        status = accumulator.status()
        assert (status.trained, status.unfinished) == (0, 0)
        assert not any(buffer.asnumpy().any() for buffer in accumulator.window.buffers)

    said(RuntimeError, r"computed while nothing was recorded.*accumulator\.epoch", loss(*batch))
    with recording():
        value = loss(*batch)
        said(RuntimeError, "computed while nothing was recorded", ops.stop_gradient(value))
        said(TypeError, "loss is of type float, .*without float", float(value))
        said(ValueError, r"loss has shape \(1,\)", value.reshape(1))
        said(TypeError, "loss is of Int32", value.astype(ms.int32))
        said(ValueError, "weight is -1.0", value, -1.0)
        mindspore_api.backward(loss(*batch))
        said(RuntimeError, "first.weight holds a gradient of another backward pass", value)
        for parameter in accumulator.weights:
            mindspore_api.forget_gradient(parameter)
        network.first.weight.to_local = int
        said(RuntimeError, "first.weight is sharded", value)
        del network.first.weight.to_local
        monkeypatch.setattr("ms_accum.core.stream.run_backward", None)
        said(RuntimeError, "lacks a private function .*eager=True", value)
        monkeypatch.undo()
        assert accumulator.backward(value).dtype == ms.bool_  # control
        assert accumulator.status().trained == 1
        with pytest.raises(RuntimeError, match="backward the graph twice"):
            accumulator.backward(value)
    accumulator.reset()


def test_a_gradient_that_comes_twice_in_a_backward_pass_is_never_applied():
    """Control: once, it is added."""
    _, accumulator, loss, batch = parts()
    grad_fn, stream = ms.value_and_grad(loss, None, accumulator.weights), Stream(accumulator.window)
    accumulator.window.begin(Tensor(0.0))
    with pytest.raises(RuntimeError, match=r"came more than once in one backward pass.*accumulator\.reset"):
        stream(1.0, lambda: (stream.start(), grad_fn(*batch), grad_fn(*batch)))
    with pytest.raises(RuntimeError, match="may hold only some pieces"):
        accumulator.flush()
    accumulator.reset()
    accumulator.window.begin(Tensor(0.0))
    stream(1.0, lambda: (stream.start(), grad_fn(*batch)))
    expected = values(grad_fn(*batch)[1])
    assert difference([b.asnumpy() * float(accumulator.window.unit) for b in accumulator.window.buffers], expected) == 0
    accumulator.reset()


def test_two_accumulators_take_turns_and_leave_no_gradient_at_each_others_parameters():
    """A generator, through a discriminator, and the discriminator. Control: MindSpore's pass fills both."""
    made, judged = MLP(6, 5, 6, seed=0), MLP(6, 5, 1, seed=1)
    first, second = (Accumulator(nn.AdamWeightDecay(network.trainable_params(), 0.01), 2, reduction="mean")
                     for network in (made, judged))
    given = [tensors(*batch)[0] for batch in batches(SIZES)]

    def of_first(x):
        return judged(made(x)).mean()

    def of_second(x):
        return judged(x).mean()

    for x, _ in zip(first.epoch(given), second.epoch(given)):
        first.backward(of_first(x), len(x))
        assert not any(map(mindspore_api.gradient_of, judged.trainable_params()))
        second.backward(of_second(x), len(x))
        if x is given[0]:
            mindspore_api.backward(of_first(x))
            assert all(mindspore_api.gradient_of(p) is not None for p in judged.trainable_params())
            for parameter in (*made.trainable_params(), *judged.trainable_params()):
                mindspore_api.forget_gradient(parameter)
    assert not mindspore_api.executor.grad_flag()
    assert second.flush()  # whose loop `zip` has left
    assert (int(first.update_step), int(second.update_step)) == (3, 3)


def test_a_gradient_in_the_loop_switches_recording_off_for_its_batch_alone():
    _, accumulator, loss, batch = parts()
    grad_fn = ms.value_and_grad(loss, None, accumulator.weights)
    for i, _ in enumerate(accumulator.epoch([0, 1])):
        if i == 0:
            grad_fn(*batch)
            with pytest.raises(RuntimeError, match=r"ms\.grad, .*switches recording off"):
                accumulator.backward(loss(*batch))
        else:
            accumulator.backward(loss(*batch))
    assert accumulator.status()[:2] == (1, 0)


def test_a_load_after_a_loop_that_was_left_holds_the_place_of_the_file(tmp_path):
    """The next call by hand counts from it. Control: without a load, from the loop's."""
    network, accumulator, loss, batch = parts()
    trained = []
    for loads in (True, False):
        accumulator.reset()
        for i, _ in enumerate(accumulator.epoch(range(9))):
            accumulator.backward(loss(*batch))
            if i == 0:
                save_checkpoint(tmp_path / "c.safetensors", network, accumulator)
            if i == 3:
                break
        if loads:
            load_checkpoint(tmp_path / "c.safetensors", network, accumulator)
        accumulator(ms.value_and_grad(loss, None, accumulator.weights)(*batch)[1])
        trained.append(accumulator.status().trained)
    assert trained == [2, 4]


def test_a_window_that_is_closed_late_or_by_an_update_that_fails_changes_nothing_else(monkeypatch):
    """As after an interrupt: the optimizer does not record, and after an error MindSpore may record again."""
    network = MLP(seed=0)
    accumulator = Accumulator(nn.AdamWeightDecay(network.trainable_params(), 0.1), 2, reduction="mean")
    loss, batch = mean_loss(network), tensors(*batches([4])[0])
    start = values(network.trainable_params())
    for i, _ in enumerate(accumulator.epoch(range(3))):
        value = loss(*batch)
        with monkeypatch.context() as patch:
            if i == 1:
                patch.setattr(type(accumulator.window), "close_if", interrupted)
            if i == 1:
                with pytest.raises(KeyboardInterrupt):
                    accumulator.backward(value)
            else:
                accumulator.backward(value)
    assert int(accumulator.update_step) == 2
    assert min(relative([one], [other]) for one, other in zip(values(network.trainable_params()), start)) > 1e-3


def interrupted(*_):
    raise KeyboardInterrupt


def test_other_backward_passes_see_no_hook_also_after_an_error():
    _, accumulator, loss, batch = parts()
    grad_fn = ms.value_and_grad(loss, None, accumulator.weights)
    expected = values(grad_fn(*batch)[1])

    stream = Stream(accumulator.window)

    def interrupted_pass():
        stream.start()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        stream(1.0, interrupted_pass)
    with recording():
        accumulator.backward(loss(*batch))
        value = loss(*batch)
    assert difference(values(grad_fn(*batch)[1]), expected) == 0
    assert difference(values(ms.jit(grad_fn)(*batch)[1]), expected) <= 1e-6
    assert value.shape == ()
    accumulator.reset()


def test_a_parameter_without_a_gradient_stays_and_hooks_of_stages_get_0_for_it():
    """Streamed, and whole for a stage that looks at gradients."""
    for options in ({}, {"on_nonfinite": "skip_microbatch"}):
        network = MLP(seed=0)
        start = values(network.trainable_params())
        accumulator = Accumulator(sgd(network), 1, reduction="mean", **options)
        for batch in accumulator.epoch([tensors(*batches([4])[0])]):
            accumulator.backward(network.first(batch[0]).sum())
        moved = [bool((one != other).any()) for one, other in zip(start, values(network.trainable_params()))]
        assert moved == [True, True, False, False]


@pytest.mark.slow
def test_peak_memory_grows_by_two_weights_for_a_layer():
    """Its weight and its buffer. Control: by hand, where all gradients are held, by three."""
    def growth(way):
        peaks = [float(run_python(MEMORY, "layers", way, str(layers))) for layers in (8, 24)]
        return (peaks[1] - peaks[0]) / 16

    for way in ("eager", "eager tokens", "cell", "backward"):
        assert growth(way) <= 2.1, way
    assert 2.9 <= growth("by hand") <= 3.2
