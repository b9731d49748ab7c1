"""Stages: what of a loss scaler is state, a stage of a user's own, and what is refused. Scales, and what NaN does to
them, are drawn in runs/test_differential.py."""
import gc

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, amp, nn, ops
from support.modes import running
from support.training import sgd

from ms_accum import Accumulator, Stage, load_checkpoint, make_train_step, save_checkpoint
from ms_accum.selftest.comparing import difference, values
from ms_accum.selftest.networks import MLP, batches, mean_loss, tensors

pytestmark = pytest.mark.core


def accumulator(scaler, **options):
    return Accumulator(sgd(MLP()), 2, reduction="sum", loss_scaler=scaler, **options)


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


@ms.jit_class
class Counting(Stage):
    """A stage of a user's own: it doubles the weight of each piece, sums what it sees, and counts windows."""

    measures = 1

    def __init__(self):
        self.closed, self.summed, self.largest = (
            Parameter(Tensor(0.0), name=name, requires_grad=False) for name in ("closed", "summed", "largest"))
        self.run_state = (self.closed, self.summed, self.largest)

    def weigh(self, gradients, weight):
        return weight * 2, 1

    def measure(self, gradients, weight):
        return (weight,)

    def on_update(self, window, measured):
        ops.assign_add(self.summed, measured[0])
        ops.assign(self.largest, ops.maximum(self.largest, window["microbatches"] * 1.0))

    def on_close(self, applied):
        ops.assign_add(self.closed, 1.0 if applied else 0.0)


@pytest.mark.usefixtures("compiled_if_slow")
@pytest.mark.parametrize(("accumulate_step", "pieces"), [
    (2, 2), pytest.param(1, 1, marks=pytest.mark.slow)])
def test_a_stage_of_a_users_own_sees_each_piece_and_each_window(accumulate_step, pieces):
    """Its state is in checkpoints. Control: the parameters are those without it, for all weights are doubled."""
    batches_of = [tensors(x, y) for x, y in batches([6, 4, 6, 6])]
    ended = []
    for stages in ((), (Counting(),)):
        network = MLP()
        train_step = make_train_step(mean_loss(network), sgd(network), accumulate_step, pieces=pieces, stages=stages)
        with running("jit" if stages else "pynative"):
            for batch in batches_of:
                train_step(*batch)
        ended.append(values(network.trainable_params()))
    (stage,), windows = stages, 4 // accumulate_step
    assert [float(p.asnumpy()) for p in stage.run_state] == [windows, 44, accumulate_step]
    assert {"closed", "summed", "largest"} < {*train_step.accumulator.state}
    assert difference(*ended) <= 1e-6


@ms.jit_class
class Closing(Stage):
    """Look at no piece: count losses in the window, windows, and the losses in the last window."""

    def __init__(self):
        self.closed, self.opened, self.last = (
            Parameter(Tensor(0, ms.int32), name=name, requires_grad=False) for name in ("closed", "opened", "last"))
        self.run_state, self.window_state = (self.closed, self.last), (self.opened,)

    def scale_loss(self, loss):
        return ops.depend(loss, ops.assign_add(self.opened, 1))

    def on_close(self, applied):
        ops.assign_add(self.closed, 1)
        ops.assign(self.last, self.opened + 0)


@pytest.mark.usefixtures("compiled_if_slow")
def test_what_a_stage_keeps_of_a_window_goes_with_it():
    """By a reset, where a window closes, and by loading a checkpoint of a closed one."""
    network, stage = MLP(), Closing()
    train_step = make_train_step(mean_loss(network), sgd(network), 2, stages=(stage,))
    batch = tensors(*batches([6])[0])
    save_checkpoint("c.safetensors", network, train_step)
    for ends in (train_step.accumulator.reset, lambda: train_step(*batch),
                 lambda: load_checkpoint("c.safetensors", network, train_step)):
        train_step(*batch)
        ops.assign_add(stage.opened, 5)
        ends()
        assert int(stage.opened) == 0


@pytest.mark.usefixtures("compiled_if_slow")
@pytest.mark.parametrize("accumulate_step", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_what_a_stage_keeps_of_a_window_is_0_when_the_next_begins(accumulate_step):
    """Also in windows of one microbatch, which have no buffers."""
    network, stage = MLP(), Closing()
    train_step = make_train_step(mean_loss(network), sgd(network), accumulate_step, stages=(stage,))
    assert train_step.accumulator.window.looks_at_pieces is False
    for x, y in batches([6] * 2 * accumulate_step):
        train_step(*tensors(x, y))
    assert (int(stage.opened), int(stage.last), int(stage.closed)) == (0, accumulate_step, 2)


@pytest.mark.usefixtures("compiled_if_slow")
def test_a_stage_that_looks_at_no_piece_sees_windows_without_buffers():
    network, stage = MLP(), Closing()
    train_step = make_train_step(mean_loss(network), sgd(network), 1, stages=(stage,))
    for x, y in batches([6, 6, 6]):
        train_step(*tensors(x, y))
    assert int(stage.closed) == 3
    window = train_step.window
    assert (window.looks_at_pieces, window.may_drop, window.is_in_use) == (False, False, False)


@ms.jit_class
class Heavy(Stage):
    """Accept windows of more than ten samples, or of a weight that is NaN: no comparison with it is true."""

    def accepts(self, window):
        return ops.logical_not(window["weight"] <= 10)


@pytest.mark.parametrize("mode", [pytest.param("jit", marks=pytest.mark.slow), "pynative"], indirect=True)
def test_a_stage_judges_a_window_by_its_sums_and_no_other_judges_for_it(mode):
    """Also a weight that is not finite: `on_nonfinite="apply"` lets it pass."""
    network, updated = MLP(), []
    with running(mode):
        train_step = make_train_step(mean_loss(network), sgd(network), 2, stages=(Heavy(),))
        for x, y in batches([4, 4, 6, 6]):
            train_step(*tensors(x, y))
            updated.append(train_step.updated)
        moved = values(network.trainable_params())
        ops.assign_add(train_step.window.weight_sum, Tensor(float("nan")))
        accepted = train_step.window.total(train_step.window.own_numbers())["accepted"]
    assert updated == [False, False, False, True]
    assert all(np.isfinite(value).all() for value in moved)
    assert bool(accepted)


@ms.jit_class
class Never(Stage):
    """Accept no window, and say so without a Tensor."""

    def accepts(self, window):
        return False


@pytest.mark.usefixtures("compiled_if_slow")
@pytest.mark.parametrize(("first", "applied"), [(Never, False), (Heavy, True)])
def test_a_window_has_to_be_accepted_by_all_stages(first, applied):
    train_step = make_train_step(mean_loss(network := MLP()), sgd(network), 2, stages=(first(), Heavy()))
    for x, y in batches([6, 6]):
        train_step(*tensors(x, y))
    assert (train_step.updated, train_step.status().closed_windows) == (applied, 1)


@pytest.mark.parametrize(("error", "message", "stages"), [
    (TypeError, r"stages\[0\] is of type int, expected a ms_accum", (3,)),
    (TypeError, r"stages is of type int, expected a tuple of stages", 3),
])
def test_what_is_no_stage_is_refused(error, message, stages):
    with pytest.raises(error, match=message):
        Accumulator(sgd(MLP()), 2, reduction="sum", stages=stages)


class CountingLoss(nn.Cell):
    """A network that counts its samples in each forward pass."""

    def __init__(self):
        super().__init__()
        self.network, self.seen = nn.Dense(2, 1), Parameter(Tensor(0.0), name="seen_by_network", requires_grad=False)

    def construct(self, x):
        seen = ops.assign_add(self.seen, Tensor(float(x.shape[0])))
        return ops.depend(self.network(x).mean(), seen)


@ms.jit_class
class PutBack(Stage):
    """Put a count back when its window is dropped, as the docstring of `on_close` says."""

    def __init__(self, count):
        self.count, self.kept = count, Parameter(Tensor(0.0), name="kept_count", requires_grad=False)
        self.run_state = (self.kept,)

    def on_close(self, applied):
        if applied:
            ops.assign(self.kept, self.count)
        else:
            ops.assign(self.count, self.kept)


@pytest.mark.parametrize("eager", [True, False])
@pytest.mark.parametrize("puts_back", [True, False])
def test_on_close_undoes_what_forward_passes_of_a_dropped_window_counted(eager, puts_back):
    """Windows of two microbatches of 3 samples, of which the second is dropped. Control: without the stage, 18."""
    loss = CountingLoss()
    stages = (PutBack(loss.seen),) if puts_back else ()
    train_step = make_train_step(loss, nn.SGD(loss.trainable_params(), 0.1), 2, eager=eager, stages=stages,
                                 on_nonfinite="skip_window")
    for value in (1, 1, 1, np.nan, 1, 1):
        train_step(np.full((3, 2), value, np.float32))
    assert int(train_step.accumulator.update_step) == 2
    assert float(loss.seen) == (12 if puts_back else 18)
