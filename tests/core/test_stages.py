"""Loss scalers: what is state, and what is refused. Scales, and what NaN does to them, are drawn in
test_differential.py."""
import gc

import mindspore as ms
import pytest
from mindspore import Parameter, Tensor, amp
from support.mlp import MLP
from support.training import sgd

from ms_accum import Accumulator

pytestmark = pytest.mark.core


def accumulator(scaler, **options):
    return Accumulator(sgd(MLP()), 2, loss_scaler=scaler, **options)


def test_a_scaler_is_state_of_its_accumulator():
    scalers = [amp.DynamicLossScaler(2**10, 2, 2) for _ in range(2)]
    accumulators = [accumulator(scaler) for scaler in scalers]
    for acc, scaler in zip(accumulators, scalers):
        assert acc.state["loss_scaler.scale_value"] is scaler.scale_value
        assert "loss_scaler.counter" in acc.state
    names = [p.name for acc in accumulators for p in acc.parameters]
    assert len(set(names)) == len(names)
    with pytest.raises(ValueError, match=r"the loss_scaler belongs to another accumulator, .* give each accumulator "):
        accumulator(scalers[0])
    del acc, accumulators
    gc.collect()
    assert accumulator(scalers[0]).loss_scaler is scalers[0]


class AnyScaler(amp.StaticLossScaler):
    """With a scale that MindSpore's own refuse to be built with."""

    def __init__(self, scale):
        super().__init__(1.0)
        self.scale_value = Parameter(Tensor(scale, ms.float32), name="scale_value")


UNFIT = [amp.StaticLossScaler(float("nan")), amp.DynamicLossScaler(float("inf"), 2, 5),
         *map(AnyScaler, (0.0, -2.0, [2.0, 2.0]))]


@pytest.mark.parametrize(("error", "message", "scaler", "options"), [
    *[(ValueError, r"the loss scale is .*, expected one finite number > 0; give e\.g\. amp\.Dyn", scaler, {})
      for scaler in UNFIT],
    *[(TypeError, r"loss_scaler is of type \w+, expected a mindspore\.amp\.LossScaler; give", scaler, {})
      for scaler in (1024, amp.LossScaler)],
    (ValueError, r'loss_scaler with on_nonfinite="skip_microbatch": .* skipped every time', AnyScaler(8.0),
     {"on_nonfinite": "skip_microbatch"}),
])
def test_what_is_no_scaler_or_does_not_fit_is_refused(error, message, scaler, options):
    assert accumulator(AnyScaler(0.5)).loss_scaler is not None
    with pytest.raises(error, match=message):
        accumulator(scaler, **options)
