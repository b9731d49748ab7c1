"""Stages: a stage of a user's own, what of a loss scaler is state, and what is no scaler. What NaN does is drawn in
test_accumulator.py, what a stage measures in test_exact.py."""
import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, amp, nn, ops
from support.training import sgd

from ms_accum import Accumulator, Stage, make_train_step
from ms_accum.selftest.comparing import difference, values
from ms_accum.selftest.networks import MLP, batches, mean_loss, tensors

pytestmark = pytest.mark.core


@ms.jit_class
class Counting(Stage):
    """Double the weight of each piece, and count what each method sees."""

    measures = 2

    def __init__(self):
        self.verdicts, self.closed, self.summed, self.norm = (
            Parameter(Tensor(0.0), name=name, requires_grad=False) for name in ("verdicts", "closed", "summed", "norm"))
        self.state = (self.verdicts, self.closed, self.summed, self.norm)

    def weigh(self, gradients, weight):
        return weight * 2, 1.0

    def measure(self, gradients, factor, weight):
        return weight, ops.square(gradients[0] * factor).sum() * weight

    def accepts(self, window):
        ops.assign_add(self.verdicts, 1.0)
        return window["weight"] > 0

    def on_update(self, window):
        ops.assign_add(self.summed, window["measured"][0])
        ops.assign(self.norm, window["measured"][1])

    def on_close(self, applied):
        ops.assign_add(self.closed, ops.cast(applied, ms.float32))


@pytest.mark.parametrize("eager", [True, False])
def test_a_stage_of_a_users_own_sees_each_piece_and_is_asked_once_for_each_window(eager):
    """Its state is in checkpoints. The parameters are those without it, for all weights are doubled. A reset forgets
    what was measured. What an earlier stage skips stays skipped."""
    batches_of = [tensors(x, y) for x, y in batches([6, 4, 6, 6])]
    batches_of = [tensors(np.full((6, 6), np.nan), np.zeros(6)), batches_of[0], *batches_of]
    ended = []
    for stages in ((), (Counting(),)):
        network = MLP()
        train_step = make_train_step(mean_loss(network), sgd(network), 2, pieces=2, eager=eager, stages=stages,
                                     on_nonfinite="skip_microbatch")
        train_step(*batches_of[1])
        train_step.reset()
        for batch in batches_of:
            train_step(*batch)
        ended.append(values(network.trainable_params()))
    (stage,) = stages
    assert train_step.status().skipped == 2
    assert [float(p.asnumpy()) for p in stage.state[:3]] == [3, 3, 56]
    assert float(stage.norm.asnumpy()) > 0
    assert {f"stage1.Counting.{i}" for i in range(4)} < {*train_step.boundary.window.state}
    assert difference(*ended) <= 1e-6


class AnyScaler(amp.StaticLossScaler):
    """With a scale below 1, which MindSpore's own refuse to be built with."""

    def __init__(self, scale):
        super().__init__(1.0)
        self.scale_value = Parameter(Tensor(scale, ms.float32), name="scale_value")


def accumulator(scaler, **options):
    return Accumulator(sgd(MLP()), 2, reduction="sum", loss_scaler=scaler, **options)


@pytest.mark.parametrize(("error", "message", "scaler", "options"), [
    *[(TypeError, r"loss_scaler is of type \w+, expected a mindspore\.amp\.LossScaler; give", scaler, {})
      for scaler in (1024, amp.LossScaler)],
    (ValueError, r'loss_scaler with on_nonfinite="skip_microbatch": .* skipped every time', AnyScaler(8.0),
     {"on_nonfinite": "skip_microbatch"}),
    (TypeError, r"stages\[0\] is of type Dense, expected a ms_accum\.Stage", None, {"stages": (nn.Dense(2, 2),)}),
])
def test_what_is_no_scaler_or_no_stage_is_refused(error, message, scaler, options):
    assert {"stage0.LossScale.0"} < {*accumulator(AnyScaler(0.5)).window.state}
    with pytest.raises(error, match=message):
        accumulator(scaler, **options)


@pytest.mark.parametrize("eager", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_dynamic_scale_is_adjusted_once_for_each_window(eager):
    """Halved by a window that overflows, doubled after two that do not."""
    network, scaler = MLP(), amp.DynamicLossScaler(2.0**8, 2, 2)
    train_step = make_train_step(mean_loss(network), sgd(network), 2, loss_scaler=scaler, eager=eager)
    good, bad = tensors(*batches([6])[0]), tensors(np.full((6, 6), np.inf), np.zeros(6))
    scales = []
    for batch in (good, bad, good, good, good, good):
        train_step(*batch)
        scales.append(float(scaler.scale_value.asnumpy()))
    assert scales == [256, 128, 128, 128, 128, 256]
    assert (train_step.status().skipped, train_step.status().update_step) == (1, 2)
