"""TrainOneStepCell: in `mindspore.train.Model` beside MindSpore's own callbacks, by itself, and saved in the middle of a window."""
import re
from pathlib import Path

import mindspore as ms
import numpy as np
import pytest
import reference
from conftest import MLP, batches, difference, tensors, values
from following import LOSS
from mindspore import Parameter, ParameterTuple, Tensor, amp, nn, ops
from mindspore.train import (
    Callback,
    CheckpointConfig,
    EarlyStopping,
    LearningRateScheduler,
    LossMonitor,
    Model,
    ModelCheckpoint,
    TimeMonitor,
)
from model_runs import RATES, SIZES, Recorder, dataset, make_cell, rate_of, train, trained_oracle

from ms_accum import Accumulator, FlushCallback, PerUpdate, TrainOneStepCell, load_checkpoint, save_checkpoint


@pytest.fixture(params=["graph", "pynative"])
def context(request, mode_named):
    return mode_named(request.param)


class Measured(Callback):
    """What the model measured in each test, what the oracle's loss says, and the microbatches in the open window then."""

    def __init__(self, network, cell):
        self.network, self.cell, self.seen = network, cell, []

    def on_eval_end(self, run_context):
        weights = values(self.network.trainable_params())
        losses = [reference.loss_and_gradients(weights, x, y)[0] for x, y in batches([8, 8])]
        self.seen.append((run_context.original_args().metrics["loss"], np.mean(losses), int(self.cell.accumulator.mini_step)))


@pytest.mark.parametrize(("name", "micro_size"), [("graph", 3), ("pynative", 1)])
def test_a_model_follows_the_oracle_beside_mindspores_callbacks(mode_named, name, micro_size, capsys):
    mode_named(name)
    network, cell = make_cell(learning_rate=RATES[0], micro_size=micro_size)
    oracle, losses = trained_oracle(network, 2, learning_rate=rate_of)
    asked, tests, outer, inner = [], Measured(network, cell), Recorder(), Recorder()

    def learning_rate(rate, update):
        asked.append(update)
        return RATES[update]

    model = Model(cell, eval_network=nn.WithEvalCell(network, LOSS), eval_indexes=[0, 1, 2], metrics={"loss"})
    model.fit(5, dataset(), dataset([8, 8]), dataset_sink_mode=False, valid_dataset_sink_mode=False, callbacks=[
        FlushCallback(), LossMonitor(), TimeMonitor(), tests, EarlyStopping(monitor="eval_loss", patience=1, min_delta=100.0), outer,
        ModelCheckpoint("all", ".", CheckpointConfig(save_checkpoint_steps=1, keep_checkpoint_max=20)), PerUpdate(inner),
        PerUpdate(LearningRateScheduler(learning_rate)),
        PerUpdate(ModelCheckpoint("second", ".", CheckpointConfig(save_checkpoint_steps=2, keep_checkpoint_max=20)))])

    assert difference(values(network.trainable_params()), oracle.parameters) <= 1e-6
    assert [float(loss) for loss in outer.outputs] == pytest.approx(losses, rel=1e-5)
    assert len(losses) == 2 * len(SIZES), "EarlyStopping stopped it"
    assert int(cell.accumulator.update_step) == oracle.update_step == 6
    assert float(cell.accumulator.grad_norm) == pytest.approx(oracle.grad_norm, rel=1e-5, nan_ok=True)
    assert asked == inner.steps == [1, 2, 3, 4, 5, 6]
    assert outer.steps == list(range(1, 11)), "the run's own count is put back"
    assert inner.events == outer.events == ["begin", "epoch begin", "epoch end", "epoch begin", "epoch end", "end"]
    printed = capsys.readouterr().out
    assert len(re.findall(r"^epoch: \d+ step: \d+, loss is \d", printed, re.MULTILINE)) == 10
    assert len(re.findall(r"^Train epoch time: ", printed, re.MULTILINE)) == 2
    for metric, expected, mini_step in tests.seen:
        assert mini_step == 0, "tested before the flush"
        assert metric == pytest.approx(expected, rel=1e-5)
    assert model.eval(dataset([8, 8]), dataset_sink_mode=False)["loss"] == pytest.approx(tests.seen[-1][1], rel=1e-5)
    assert [sorted(map(updates_in, saved)) for saved in (saved_as("all"), saved_as("second"))] == [
        [0, 1, 1, 2, 3, 3, 4, 4, 5, 6], [2, 4, 6]]


def saved_as(prefix):
    return [ms.load_checkpoint(str(file)) for file in Path().glob(f"{prefix}-*.ckpt")]


def updates_in(saved):
    return next(int(value) for name, value in saved.items() if name.endswith(".update_step"))


def test_without_the_flush_the_last_window_leaks_into_the_next_epoch(mode_named):
    """Negative control of the test above."""
    network, cell = make_cell()
    oracle, _ = trained_oracle(network, epochs=2)
    train(cell, epochs=2)
    assert (int(cell.accumulator.update_step), int(cell.accumulator.mini_step)) == (5, 0)
    assert difference(values(network.trainable_params()), oracle.parameters) > 1e-3


def test_sink_mode_on_cpu_is_none_and_trains_the_same():
    """MindSpore's Model takes dataset_sink_mode=True on CPU and feeds the microbatches one by one. The rates are MindSpore's own list."""
    network, cell = make_cell(learning_rate=RATES)
    oracle, _ = trained_oracle(network, 2, learning_rate=rate_of)
    train(cell, FlushCallback(), epochs=2, sink=True)
    assert difference(values(network.trainable_params()), oracle.parameters) <= 1e-6


# --- a loss scaler, a hook after each update -----------------------------------------------------------------------------


class Average(nn.Cell):
    """The exponential moving average of parameters, and how often it was taken."""

    def __init__(self, network):
        super().__init__(auto_prefix=False)
        self.parameters_now = ParameterTuple(network.trainable_params())
        self.averages = self.parameters_now.clone(prefix="average", init="same")
        self.taken = Parameter(Tensor(0, ms.int32), name="average.taken")

    def construct(self):
        for average, parameter in zip(self.averages, self.parameters_now):
            ops.assign(average, average * 0.9 + parameter * 0.1)
        ops.assign_add(self.taken, 1)
        return True


@pytest.mark.parametrize(("name", "scaled"), [("graph", True), ("pynative", True), ("pynative", False)])
def test_a_dropped_window_shows_and_calls_no_hook(mode_named, name, scaled):
    """With a loss scaler the cell returns what MindSpore's own does: whether a window was dropped, and the scale of the loss.

    The hook, a moving average of the weights, is called after each update and no microbatch.
    """
    mode_named(name)
    options = {"loss_scaler": amp.DynamicLossScaler(2.0**10, 2, 2)} if scaled else {"on_nonfinite": "skip_window"}
    network, cell = make_cell(clip_norm=None, after_update=Average, **options)
    acc, average = cell.accumulator, cell.accumulator.after_update
    oracle, _ = trained_oracle(network, 0, clip_norm=None)
    expected, record = values(network.trainable_params()), []
    for i, (x, y) in enumerate(batches([6] * 7)):
        result = cell(*tensors(x * (np.inf if i == 2 else 1.0), y))
        if scaled:
            result, overflow, scale = result
            record.append((bool(overflow), float(scale)))
        if i not in (2, 3):
            loss, gradients = reference.loss_and_gradients(oracle.parameters, x, y)
            assert float(result) == pytest.approx(loss, rel=1e-5)
            if oracle(gradients, len(x)):
                expected = [0.9 * a + 0.1 * p for a, p in zip(expected, oracle.parameters)]
    assert bool(cell.flush()) == oracle.flush()
    expected = [0.9 * a + 0.1 * p for a, p in zip(expected, oracle.parameters)]
    assert record == [(False, 1024)] * 3 * scaled + [(True, 1024)] * scaled + [(False, 512)] * 3 * scaled
    assert difference(values(network.trainable_params()), oracle.parameters) <= 1e-6
    assert int(average.taken) == int(acc.update_step) == 3
    assert int(acc.skipped) == 1
    assert difference(values(average.averages), expected) <= 1e-6
    assert difference(values(average.averages), oracle.parameters) > 1e-3, "the average is not the parameters themselves"
    state = {id(p) for p in acc.parameters}
    assert {id(p) for p in (*average.averages, average.taken)} <= state
    assert not {id(p) for p in network.trainable_params()} & state


def test_a_method_of_a_cell_is_a_hook_with_the_same_state():
    network = MLP()
    average = Average(network)
    average.optimizer = nn.SGD(network.trainable_params(), 0.1)
    acc = Accumulator(average.optimizer, 2, reduction="mean", after_update=average.construct)
    state = {id(p) for p in acc.parameters}
    assert {id(p) for p in (*average.averages, average.taken)} <= state
    assert not {id(p) for p in average.optimizer.get_parameters()} & state


# --- saved in the middle of a window -------------------------------------------------------------------------------------


def go_on(network, cell):
    """Train to the end of the window, and beyond; the bits of the parameters."""
    for x, y in batches([6] * 3, seed=2):
        cell(*tensors(x, y))
    cell.flush()
    return [p.asnumpy().tobytes() for p in network.trainable_params()]


def test_a_model_checkpoint_holds_a_window_that_is_half_full(context):
    """Loaded into a fresh cell, or with our own loading into the one that has run, training goes on to the same bits.

    Not if the window is forgotten. MindSpore's `load_param_into_net` does not reach a cell that has run.
    """
    network, cell = make_cell(accumulate_step=3)
    train(cell, ModelCheckpoint("run", ".", CheckpointConfig(save_checkpoint_steps=4)), data=dataset([6] * 4))
    assert int(cell.accumulator.mini_step) == 1
    save_checkpoint("window.ckpt", network, cell.accumulator)
    uninterrupted = go_on(network, cell)

    fresh_network, fresh = make_cell(accumulate_step=3)
    saved = ms.load_checkpoint("run-1_4.ckpt")
    # In another process it would have the names of the first.
    renamed = {mine.name: saved[its.name] for mine, its in zip(fresh.get_parameters(), cell.get_parameters())}
    missing, unexpected = ms.load_param_into_net(fresh, renamed)
    assert missing == unexpected == []
    assert go_on(fresh_network, fresh) == uninterrupted

    load_checkpoint("window.ckpt", network, cell.accumulator)
    assert go_on(network, cell) == uninterrupted
    load_checkpoint("window.ckpt", network, cell.accumulator)
    cell.accumulator.reset()
    assert go_on(network, cell) != uninterrupted


def test_the_network_keeps_its_names():
    network, cell = make_cell()
    assert [p.name for p in network.trainable_params()] == [p.name for p in MLP().trainable_params()]
    assert {p.name for p in network.trainable_params()} <= {p.name for p in cell.get_parameters()}


def test_wrong_arguments_are_refused():
    network = MLP()
    optimizer = nn.SGD(network.trainable_params(), 0.1)
    acc, loss = Accumulator(optimizer, 2, reduction="mean"), nn.WithLossCell(network, LOSS)
    for arguments, options, error, message in (
            ((lambda x: x, acc), {}, TypeError, r"network is of type function, expected a Cell that returns the loss; .*make_train_step"),
            ((loss, Accumulator(optimizer, 2)), {}, ValueError, r'reduction=.sum., expected "mean"'),
            ((loss, optimizer), {}, TypeError, "accumulate_step is missing, expected it with an optimizer"),
            ((loss, acc), {"micro_size": 0}, ValueError, "micro_size is 0, expected an int >= 1"),
            ((loss, acc), {"weight_fn": 3}, TypeError, "weight_fn is of type int, expected a function")):
        with pytest.raises(error, match=message):
            TrainOneStepCell(*arguments, **options)
    with pytest.raises(ValueError, match="returned a loss of shape \\(4,\\), expected shape \\(\\); return the mean"):
        TrainOneStepCell(nn.WithLossCell(network, nn.CrossEntropyLoss(reduction="none")), acc)(*tensors(*batches([4])[0]))
    with pytest.raises(TypeError, match="after_update is of type int, expected a function without arguments, a Cell, or None"):
        Accumulator(optimizer, 2, after_update=3)
