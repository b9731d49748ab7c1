"""Loss scalers: what an overflow does, what is state, and what is refused. Scales of any size are drawn by the fuzzer."""
import gc

import mindspore as ms
import pytest
from following import LOSS, run_as
from mindspore import Parameter, Tensor, amp, nn

from ms_accum import Accumulator, make_train_step

pytestmark = pytest.mark.core


class Overflowing(nn.Cell):
    """y = w x, where a float16 gradient of 2**15 x 2 overflows on the way back and 2**15 x 0.5 does not."""

    def __init__(self):
        super().__init__()
        self.w = Parameter(Tensor([1.0], ms.float32), name="w")

    def construct(self, x):
        return (self.w.astype(ms.float16) * x.astype(ms.float16)).astype(ms.float32).mean()


def by_hand(network, acc):
    def scaled(x):
        return acc.scaled(network(x))

    grad_fn = ms.grad(scaled, None, acc.optimizer.parameters)
    return lambda x: acc(grad_fn(x))


@pytest.mark.parametrize(("mode", "on_nonfinite"), [
    ("jit", "skip_window"), ("pynative", "apply"), ("pynative", "skip_window"), ("hand", "apply")])
def test_an_overflow_drops_the_window_and_halves_the_scale_once(mode, on_nonfinite):
    network = Overflowing()
    scaler = amp.DynamicLossScaler(2**15, 2, 2)
    acc = Accumulator(nn.Momentum(network.trainable_params(), 0.5, 0.9), 3, reduction="mean", on_nonfinite=on_nonfinite,
                      loss_scaler=scaler)
    step = by_hand(network, acc) if mode == "hand" else make_train_step(network, acc)
    seen = []
    for x in [0.25, 2.0, 0.25] + [0.5] * 3 + [0.25] * 7:
        with run_as("jit" if mode == "hand" else mode):
            step(Tensor([x], ms.float32))
        seen.append((float(scaler.scale_value), int(scaler.counter), int(acc.update_step), int(acc.skipped)))
    start = (2**15, 0, 0, 0)       # the second microbatch overflows: its gradient is 2 * 2**15
    dropped = (2**14, 0, 0, 1)
    assert seen == [*[start] * 2, *[dropped] * 3, *[(2**14, 1, 1, 1)] * 3, *[(2**15, 0, 2, 1)] * 3, *[(2**15, 1, 3, 1)] * 2]
    velocity, w = 0.0, 1.0
    for gradient in (0.5, 0.25, 0.25):
        velocity = 0.9 * velocity + gradient
        w -= 0.5 * velocity
    assert float(network.w.asnumpy()[0]) == pytest.approx(w, rel=1e-6)


def accumulator(scaler, **options):
    weights = [Parameter(Tensor([0.0]), name="w")]
    return Accumulator(nn.SGD(weights, 0.1), 2, reduction="mean", loss_scaler=scaler, **options)


def test_a_scaler_is_state_of_its_accumulator():
    names = []
    for _ in range(2):
        scaler = amp.DynamicLossScaler(2**10, 2, 2)
        acc = accumulator(scaler)
        assert acc.state["loss_scaler.scale_value"] is scaler.scale_value
        assert "loss_scaler.counter" in acc.state
        names += [p.name for p in acc.parameters]
    assert len(set(names)) == len(names)
    with pytest.raises(ValueError, match=r"the loss_scaler belongs to another accumulator, .* give each accumulator its"):
        accumulator(scaler)
    del acc
    gc.collect()
    assert accumulator(scaler).loss_scaler is scaler


class AnyScaler(amp.StaticLossScaler):
    """With a scale that MindSpore's own refuse to be built with."""

    def __init__(self, scale):
        super().__init__(1.0)
        self.scale_value = Parameter(Tensor(scale, ms.float32), name="scale_value")


@pytest.mark.parametrize("scaler", [
    amp.StaticLossScaler(float("nan")), amp.DynamicLossScaler(float("inf"), 2, 5), *map(AnyScaler, (0.0, -2.0, [2.0, 2.0]))])
def test_a_scale_that_nothing_can_be_divided_by_is_refused(scaler):
    with pytest.raises(ValueError, match=r"the loss scale is .*, expected one finite number > 0; give e\.g\. amp\.Dyn"):
        accumulator(scaler)


def test_what_is_no_scaler_or_does_not_fit_is_refused():
    assert accumulator(AnyScaler(0.5)).loss_scaler is not None
    for scaler in (1024, amp.LossScaler):
        with pytest.raises(TypeError, match=r"loss_scaler is of type \w+, expected a mindspore\.amp\.LossScaler; give"):
            accumulator(scaler)
    for make in (accumulator, lambda scaler, **options: make_train_step(
            LOSS, nn.SGD(nn.Dense(2, 1).trainable_params(), 0.1), 2, loss_scaler=scaler, **options)):
        with pytest.raises(ValueError, match=r"loss_scaler with on_nonfinite=\"skip_microbatch\": .* skipped every time"):
            make(AnyScaler(8.0), on_nonfinite="skip_microbatch")
