"""Loss scalers: what is state, and what is refused. Scales, and what NaN does to them, are drawn in test_differential.py."""
import gc

import mindspore as ms
import pytest
from following import LOSS
from mindspore import Parameter, Tensor, amp, nn

from ms_accum import Accumulator, make_train_step

pytestmark = pytest.mark.core


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
