"""TrainOneStepCell in `mindspore.train.Model`: against the oracle, beside MindSpore's own callbacks, saved in mid-window."""
import itertools
import re

import mindspore as ms
import numpy as np
import pytest
import reference
from conftest import MLP, batches, difference, run_python, tensors, values
from mindspore import Tensor, amp, nn, ops
from mindspore.dataset import GeneratorDataset
from mindspore.train import (
    Callback,
    CheckpointConfig,
    EarlyStopping,
    LearningRateScheduler,
    LossMonitor,
    Model,
    ModelCheckpoint,
    ReduceLROnPlateau,
    TimeMonitor,
)

from ms_accum import Accumulator, FlushCallback, PerUpdate, TrainOneStepCell, WindowLog, load_checkpoint, make_train_step, save_checkpoint

LOSS = nn.CrossEntropyLoss()
SIZES = [6, 6, 7, 6, 2]


@pytest.fixture(params=["graph", "pynative"])
def context(request, mode_named):
    return mode_named(request.param)


class Microbatches:
    """A dataset of the microbatches of `conftest.batches`, ragged as they are."""

    def __init__(self, sizes):
        self.microbatches = [(x.astype(np.float32), y.astype(np.int32)) for x, y in batches(sizes)]

    def __getitem__(self, i):
        return self.microbatches[i]

    def __len__(self):
        return len(self.microbatches)


def dataset(sizes=SIZES):
    return GeneratorDataset(Microbatches(sizes), ["x", "y"], shuffle=False)


class Recorder(Callback):
    """What the model gave after each microbatch, and the events it saw."""

    def __init__(self):
        self.outputs, self.steps, self.events = [], [], []

    def on_train_begin(self, run_context):
        self.events.append("begin")

    def on_train_epoch_begin(self, run_context):
        self.events.append("epoch begin")

    def on_train_step_end(self, run_context):
        context = run_context.original_args()
        self.outputs.append(context.net_outputs)
        self.steps.append(context.cur_step_num)

    def on_train_epoch_end(self, run_context):
        self.events.append("epoch end")

    def on_train_end(self, run_context):
        self.events.append("end")


def make_cell(accumulate_step=2, clip_norm=0.7, learning_rate=0.1, on_nonfinite="apply", after_update=None, **options):
    network = MLP()
    optimizer = nn.Momentum(network.trainable_params(), learning_rate, 0.9)
    acc = Accumulator(optimizer, accumulate_step, clip_norm, reduction="mean", on_nonfinite=on_nonfinite, after_update=after_update)
    return network, TrainOneStepCell(nn.WithLossCell(network, LOSS), acc, **options)


def trained_oracle(network, epochs, sizes=SIZES, accumulate_step=2, clip_norm=0.7, learning_rate=0.1):
    """The oracle after the same epochs, and the losses of its microbatches."""
    oracle = reference.Accumulation(values(network.trainable_params()), reference.SGD(learning_rate, 0.9), accumulate_step, "mean",
                                    clip_norm)
    losses = []
    for _ in range(epochs):
        for x, y in batches(sizes):
            loss, gradients = reference.loss_and_gradients(oracle.parameters, x, y)
            losses.append(loss)
            oracle(gradients, len(x))
        oracle.flush()
    return oracle, losses


# --- training ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("context", "micro_size"), [("graph", 3), ("pynative", 1), ("pynative", 3)])
def test_a_model_follows_the_oracle(mode_named, context, micro_size):
    mode_named(context)
    network, cell = make_cell(micro_size=micro_size)
    oracle, losses = trained_oracle(network, epochs=2)
    record = Recorder()
    Model(cell).train(2, dataset(), callbacks=[FlushCallback(), record], dataset_sink_mode=False)
    assert difference(values(network.trainable_params()), oracle.parameters) <= 1e-6
    assert [float(loss) for loss in record.outputs] == pytest.approx(losses, rel=1e-5)
    assert int(cell.accumulator.update_step) == oracle.update_step == 6
    assert float(cell.accumulator.grad_norm) == pytest.approx(oracle.grad_norm, rel=1e-5)


def test_without_the_flush_the_last_window_leaks_into_the_next_epoch(mode_named):
    """Negative control of the test above."""
    mode_named("pynative")
    network, cell = make_cell()
    oracle, _ = trained_oracle(network, epochs=2)
    Model(cell).train(2, dataset(), dataset_sink_mode=False)
    assert (int(cell.accumulator.update_step), int(cell.accumulator.mini_step)) == (5, 0)
    assert difference(values(network.trainable_params()), oracle.parameters) > 1e-3


def test_a_cell_without_a_model_is_a_train_step(context):
    """Called and flushed from the host, with a weight_fn; the same parameters as make_train_step, to the bit in PyNative."""
    def weight_fn(x, y):
        return (y >= 0).sum()

    network, cell = make_cell(weight_fn=weight_fn)
    other = MLP()
    forward = nn.WithLossCell(other, LOSS)
    train_step = make_train_step(forward, Accumulator(nn.Momentum(other.trainable_params(), 0.1, 0.9), 2, 0.7, reduction="mean"),
                                 weight_fn=weight_fn)
    before = values(network.trainable_params())
    for x, y in batches([6, 6, 6]):
        y[:2] = -100  # what the loss ignores
        assert float(cell(*tensors(x, y))) == pytest.approx(float(train_step(*tensors(x, y))), rel=1e-6)
    assert [bool(closed) for closed in (cell.flush(), train_step.flush(), cell.flush())] == [True, True, False]
    assert difference(values(network.trainable_params()), values(other.trainable_params())) <= 1e-6
    assert difference(values(network.trainable_params()), before) > 1e-3


def test_sink_mode_on_cpu_is_none_and_trains_the_same(mode_named):
    """MindSpore's Model takes dataset_sink_mode=True on CPU and feeds the microbatches one by one."""
    mode_named("pynative")
    network, cell = make_cell()
    oracle, _ = trained_oracle(network, epochs=1)
    Model(cell).train(1, dataset(), callbacks=[FlushCallback()], dataset_sink_mode=True)
    assert difference(values(network.trainable_params()), oracle.parameters) <= 1e-6


# --- loss scaler --------------------------------------------------------------------------------------------------------------


def test_with_a_loss_scaler_it_returns_what_mindspores_own_cell_does(context):
    """An overflow shows at the boundary that drops its window, with the scale the loss was multiplied by."""
    scaler = amp.DynamicLossScaler(2.0 ** 10, 2, 2)
    network, cell = make_cell(clip_norm=None, loss_scaler=scaler)
    oracle, _ = trained_oracle(network, 0, clip_norm=None)
    record = []
    for i, (x, y) in enumerate(batches([6, 6, 6, 6, 6, 6])):
        bad = i == 2
        loss, overflow, scale = cell(*tensors(x * (np.inf if bad else 1.0), y))
        record.append((bool(overflow), float(scale)))
        if i in (2, 3):
            continue
        expected, gradients = reference.loss_and_gradients(oracle.parameters, x, y)
        assert float(loss) == pytest.approx(expected, rel=1e-5)
        oracle(gradients, len(x))
    assert record == [(False, 1024), (False, 1024), (False, 1024), (True, 1024), (False, 512), (False, 512)]
    assert difference(values(network.trainable_params()), oracle.parameters) <= 1e-6
    assert int(cell.accumulator.skipped) == 1


# --- MindSpore's callbacks ------------------------------------------------------------------------------------------------------


def test_mindspores_callbacks_work(context, tmp_path, capsys):
    network, cell = make_cell()
    evaluation = nn.WithEvalCell(network, LOSS)
    model = Model(cell, eval_network=evaluation, eval_indexes=[0, 1, 2], metrics={"loss"})
    seen = []

    class Evaluated(Callback):
        def on_eval_end(self, run_context):
            weights = values(network.trainable_params())
            losses = [reference.loss_and_gradients(weights, x, y)[0] for x, y in batches([8, 8])]
            seen.append((run_context.original_args().metrics["loss"], np.mean(losses), int(cell.accumulator.mini_step)))

    stopping = EarlyStopping(monitor="eval_loss", patience=1, min_delta=100.0)
    saving = ModelCheckpoint("m", str(tmp_path), CheckpointConfig(save_checkpoint_steps=1, keep_checkpoint_max=20))
    model.fit(5, dataset(), dataset([8, 8]), callbacks=[FlushCallback(), LossMonitor(), TimeMonitor(), Evaluated(), stopping, saving],
              dataset_sink_mode=False, valid_dataset_sink_mode=False)
    printed = capsys.readouterr().out
    epochs = len(seen)
    assert 1 < epochs < 5, "EarlyStopping stopped it"
    assert len(re.findall(r"^epoch: \d+ step: \d+, loss is \d", printed, re.MULTILINE)) == epochs * len(SIZES)
    assert len(re.findall(r"^Train epoch time: ", printed, re.MULTILINE)) == epochs
    assert int(cell.accumulator.update_step) == 3 * epochs
    for metric, expected, mini_step in seen:
        assert mini_step == 0, "tested before the flush"
        assert metric == pytest.approx(expected, rel=1e-5)
    assert len(list(tmp_path.glob("m-*.ckpt"))) == epochs * len(SIZES)
    assert model.eval(dataset([8, 8]), dataset_sink_mode=False)["loss"] == pytest.approx(seen[-1][1], rel=1e-5)


SAVED_IN_MID_WINDOW = """
import sys
sys.path.insert(0, sys.argv[1])
import mindspore as ms
from conftest import batches, tensors
from mindspore import ops
from mindspore.train import CheckpointConfig, Model, ModelCheckpoint
from test_model import dataset, make_cell

network, cell = make_cell(accumulate_step=3)


def go_on():
    for x, y in batches([6, 5, 4], seed=2):
        cell(*tensors(x, y))
    cell.flush()
    print(repr([p.asnumpy().tobytes().hex() for p in network.trainable_params()]))


if sys.argv[2] == "first":
    saving = ModelCheckpoint("run", ".", CheckpointConfig(save_checkpoint_steps=4))
    Model(cell).train(1, dataset([6, 6, 6, 6]), callbacks=[saving], dataset_sink_mode=False)
    assert int(cell.accumulator.mini_step) == 1
    go_on()
else:
    saved = ms.load_checkpoint("run-1_4.ckpt")
    missing, unexpected = ms.load_param_into_net(cell, saved)
    assert missing == []
    saved = {name: ms.Tensor(value.asnumpy()) for name, value in saved.items()}
    go_on()
    for forgetful in (False, True):
        for parameter in cell.get_parameters():  # what has run sees nothing of another load_param_into_net
            ops.assign(parameter, saved[parameter.name])
        if forgetful:
            cell.accumulator.reset()
        go_on()
"""


def test_a_model_checkpoint_holds_a_window_that_is_half_full(request):
    """Loaded into a fresh process, training goes on to the same bits; not if the window is forgotten."""
    here = str(request.path.parent)
    first = run_python(SAVED_IN_MID_WINDOW, here, "first").splitlines()[-1]
    resumed, again, forgetful = run_python(SAVED_IN_MID_WINDOW, here, "resumed").splitlines()[-3:]
    assert resumed == again == first != forgetful


def test_our_own_loading_reaches_a_cell_that_has_run(context):
    """MindSpore's `load_param_into_net` does not."""
    network, cell = make_cell()
    save_checkpoint("start.ckpt", network, cell.accumulator)

    def three_microbatches():
        for x, y in batches([6, 6, 6]):
            cell(*tensors(x, y))
        return values(network.trainable_params())

    once, further = three_microbatches(), three_microbatches()
    load_checkpoint("start.ckpt", network, cell.accumulator)
    assert difference(three_microbatches(), once) <= 1e-6 < difference(further, once)
    assert [int(cell.accumulator.update_step), int(cell.accumulator.mini_step)] == [1, 1]


RATES = [0.3, 0.1, 0.05, 0.02, 0.01, 0.005, 0.001]


def rate_of(calls):
    return RATES[calls]


def test_dynamic_learning_rates_count_updates(mode_named):
    """By MindSpore's own count of the optimizer's calls."""
    mode_named("pynative")
    network, cell = make_cell(learning_rate=RATES)
    oracle, _ = trained_oracle(network, 2, learning_rate=rate_of)
    Model(cell).train(2, dataset(), callbacks=[FlushCallback()], dataset_sink_mode=False)
    assert difference(values(network.trainable_params()), oracle.parameters) <= 1e-6


def test_a_learning_rate_scheduler_counts_updates(context):
    asked = []

    def learning_rate(rate, update):
        asked.append(update)
        return RATES[update]

    network, cell = make_cell(learning_rate=RATES[0])
    oracle, _ = trained_oracle(network, 1, learning_rate=rate_of)
    scheduler = LearningRateScheduler(learning_rate)
    Model(cell).train(1, dataset(), callbacks=[FlushCallback(), PerUpdate(scheduler)], dataset_sink_mode=False)
    assert asked == [1, 2, 3]
    assert difference(values(network.trainable_params()), oracle.parameters) <= 1e-6
    with pytest.raises(AttributeError):  # negative control: by itself it does not find the optimizer
        Model(cell).train(1, dataset(), callbacks=[FlushCallback(), scheduler], dataset_sink_mode=False)


def test_per_update_shows_the_optimizer_at_the_end_of_an_epoch(mode_named):
    mode_named("pynative")
    _, cell = make_cell(learning_rate=0.5)
    model = Model(cell)

    def halving():
        return ReduceLROnPlateau(monitor="loss", factor=0.5, patience=1, min_delta=100.0)

    with pytest.raises(AttributeError):  # negative control: by itself it does not find the optimizer
        model.train(1, dataset(), callbacks=[FlushCallback(), halving()], dataset_sink_mode=False)
    model.train(3, dataset(), callbacks=[FlushCallback(), PerUpdate(halving())], dataset_sink_mode=False)
    assert float(cell.optimizer.learning_rate) == 0.125


def test_a_model_checkpoint_in_per_update_counts_updates(mode_named, tmp_path):
    """Six updates, saved after each second one, and no more than that at the end."""
    mode_named("pynative")
    _, cell = make_cell()
    saving = ModelCheckpoint("m", str(tmp_path), CheckpointConfig(save_checkpoint_steps=2, keep_checkpoint_max=20))
    Model(cell).train(2, dataset(), callbacks=[FlushCallback(), PerUpdate(saving)], dataset_sink_mode=False)
    saved = [ms.load_checkpoint(str(file)) for file in tmp_path.glob("m-*.ckpt")]
    updates = [int(value) for entries in saved for name, value in entries.items() if name.endswith(".update_step")]
    assert sorted(updates) == [2, 4, 6]


# --- our callbacks --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("flush_first", [True, False])
def test_per_update_calls_once_for_each_update(mode_named, flush_first):
    mode_named("pynative")
    _, cell = make_cell(accumulate_step={0: 1, 2: 3})
    inner = Recorder()
    callbacks = [FlushCallback(), PerUpdate(inner)]
    outer = Recorder()
    Model(cell).train(2, dataset(), callbacks=[*(callbacks if flush_first else callbacks[::-1]), outer], dataset_sink_mode=False)
    assert inner.steps == [1, 2, 3, 4, 5]
    assert outer.steps == list(range(1, 11)), "the run's own count is put back"
    assert inner.events == outer.events == ["begin", "epoch begin", "epoch end", "epoch begin", "epoch end", "end"]


def test_flush_after_a_stop_in_mid_epoch(mode_named):
    mode_named("pynative")
    network, cell = make_cell()

    class StopAfterThree(Callback):
        def on_train_step_end(self, run_context):
            if run_context.original_args().cur_step_num == 3:
                run_context.request_stop()

    oracle, _ = trained_oracle(network, 1, sizes=SIZES[:3])
    Model(cell).train(4, dataset(), callbacks=[FlushCallback(), StopAfterThree()], dataset_sink_mode=False)
    assert int(cell.accumulator.update_step) == 2
    assert difference(values(network.trainable_params()), oracle.parameters) <= 1e-6


def test_flush_after_a_stop_in_mid_epoch_comes_before_the_test(mode_named):
    mode_named("pynative")
    network, cell = make_cell()
    open_windows = []

    class StopAfterThree(Callback):
        def on_train_step_end(self, run_context):
            if run_context.original_args().cur_step_num == 3:
                run_context.request_stop()

        def on_eval_end(self, run_context):
            open_windows.append(int(cell.accumulator.mini_step))

    model = Model(cell, eval_network=nn.WithEvalCell(network, LOSS), eval_indexes=[0, 1, 2], metrics={"loss"})
    model.fit(2, dataset(), dataset([8]), callbacks=[FlushCallback(), StopAfterThree()], dataset_sink_mode=False,
              valid_dataset_sink_mode=False)
    assert open_windows == [0]
    cell(*tensors(*batches([6])[0]))  # negative control: a test of its own is none of the training's, and flushes nothing
    model.eval(dataset([8]), callbacks=[FlushCallback()], dataset_sink_mode=False)
    assert int(cell.accumulator.mini_step) == 1


def test_flush_keeps_to_the_ends_of_epochs_that_differ_in_length(mode_named):
    """MindSpore counts a dataset's microbatches once, here 3; some epochs then have 1."""
    mode_named("pynative")
    _, cell = make_cell(accumulate_step=2)
    lengths = itertools.cycle([3, 3, 1])
    (microbatch,) = Microbatches([4]).microbatches
    epochs = []

    class Varying:
        def __iter__(self):
            return iter([microbatch] * next(lengths))

    class Windows(Callback):
        def on_train_epoch_begin(self, run_context):
            epochs.append([])

        def on_train_step_end(self, run_context):
            epochs[-1].append(int(cell.accumulator.mini_step))

    varying = GeneratorDataset(Varying(), ["x", "y"], shuffle=False)
    assert varying.get_dataset_size() == 3
    Model(cell).train(6, varying, callbacks=[FlushCallback(), Windows()], dataset_sink_mode=False)
    assert {1, 3} == set(map(len, epochs))
    assert all(epoch == [1, 0, 0][:len(epoch)] for epoch in epochs)


class TwoCells(nn.Cell):
    """Trains two networks on the same microbatch."""

    def __init__(self, one, other):
        super().__init__(auto_prefix=False)
        self.one, self.other = one, other

    def construct(self, x, y):
        return self.one(x, y) + self.other(x, y)


def test_flush_finds_every_cell_and_per_update_refuses_two(mode_named):
    mode_named("pynative")
    _, one = make_cell()
    _, other = make_cell(accumulate_step=4)
    Model(TwoCells(one, other)).train(1, dataset(), callbacks=[FlushCallback()], dataset_sink_mode=False)
    assert [int(cell.accumulator.update_step) for cell in (one, other)] == [3, 2]
    with pytest.raises(ValueError, match="PerUpdate found 2 TrainOneStepCells, whose updates differ in number; expected one"):
        Model(TwoCells(one, other)).train(1, dataset(), callbacks=[PerUpdate(LossMonitor())], dataset_sink_mode=False)


# --- refusals -------------------------------------------------------------------------------------------------------------------


def test_a_model_without_the_cell_is_refused():
    network = MLP()
    model = Model(network, LOSS, nn.SGD(network.trainable_params(), 0.1))
    for callback in (FlushCallback(), PerUpdate(LossMonitor())):
        with pytest.raises(ValueError, match=r"without a TrainOneStepCell of ms_accum in it; give Model\(TrainOneStepCell"):
            model.train(1, dataset(), callbacks=[callback], dataset_sink_mode=False)


def test_a_model_with_an_optimizer_of_its_own_is_refused():
    """MindSpore would wrap the cell and update at each microbatch, besides the accumulator's updates."""
    network, cell = make_cell()
    before = [p.asnumpy().copy() for p in network.trainable_params()]
    model = Model(cell, optimizer=nn.SGD(network.trainable_params(), 0.1))
    for callback in (FlushCallback(), PerUpdate(LossMonitor()), WindowLog(print)):
        with pytest.raises(ValueError, match=r"given an optimizer of its own.* give Model\(TrainOneStepCell"):
            model.train(1, dataset(), callbacks=[callback], dataset_sink_mode=False)
    assert all((old == p.asnumpy()).all() for old, p in zip(before, network.trainable_params()))


def test_the_network_keeps_its_names():
    network, cell = make_cell()
    assert [p.name for p in network.trainable_params()] == [p.name for p in MLP().trainable_params()]
    assert {p.name for p in network.trainable_params()} <= {p.name for p in cell.get_parameters()}


def test_wrong_arguments_are_refused():
    network = MLP()
    acc = Accumulator(nn.SGD(network.trainable_params(), 0.1), 2, reduction="mean")
    loss = nn.WithLossCell(network, LOSS)
    with pytest.raises(TypeError, match=r"network is of type function, expected a Cell that gives the loss.*make_train_step"):
        TrainOneStepCell(lambda x: x, acc)
    with pytest.raises(ValueError, match=r'reduction=.sum., expected "mean"'):
        TrainOneStepCell(loss, Accumulator(nn.SGD(network.trainable_params(), 0.1), 2))
    with pytest.raises(TypeError, match="acc is of type Momentum, expected an Accumulator"):
        TrainOneStepCell(loss, nn.Momentum(network.trainable_params(), 0.1, 0.9))
    with pytest.raises(ValueError, match="micro_size is 0, expected an int >= 1"):
        TrainOneStepCell(loss, acc, micro_size=0)
    with pytest.raises(TypeError, match="weight_fn is of type int, expected a function"):
        TrainOneStepCell(loss, acc, weight_fn=3)
    with pytest.raises(TypeError, match=r"callback is of type function, expected a mindspore\.train\.Callback"):
        PerUpdate(print_nothing)
    x, y = tensors(*batches([4])[0])
    with pytest.raises(TypeError, match="the batch holds a tuple, list or dict, expected Tensors"):
        TrainOneStepCell(loss, acc)((x, y))
    with pytest.raises(ValueError, match="returned a loss of shape \\(4,\\), expected shape \\(\\); give the mean"):
        TrainOneStepCell(nn.WithLossCell(network, nn.CrossEntropyLoss(reduction="none")), acc)(x, y)


def print_nothing(*_):
    """No callback."""


class Sunk:
    """A run context of sunk data, which no CPU run gives."""

    def __init__(self, network):
        self.context = {"train_network": network, "dataset_sink_mode": True}

    def original_args(self):
        context = type("Context", (dict,), {"__getattr__": dict.__getitem__})(self.context)
        return context


def test_callbacks_of_single_microbatches_refuse_sunk_data():
    _, cell = make_cell()
    with pytest.raises(ValueError, match="PerUpdate with dataset_sink_mode=True: single microbatches are not seen then"):
        PerUpdate(LossMonitor()).on_train_begin(Sunk(cell))
    FlushCallback().on_train_begin(Sunk(cell))


# --- a hook after each update ------------------------------------------------------------------------------------------------------


class Average(nn.Cell):
    """The exponential moving average of parameters, and how often it was taken."""

    def __init__(self, parameters, decay):
        super().__init__(auto_prefix=False)
        self.decay = decay
        self.parameters_now = ms.ParameterTuple(parameters)
        self.averages = self.parameters_now.clone(prefix="average", init="same")
        self.taken = ms.Parameter(Tensor(0, ms.int32), name="average.taken")

    def construct(self):
        for average, parameter in zip(self.averages, self.parameters_now):
            ops.assign(average, average * self.decay + parameter * (1 - self.decay))
        ops.assign_add(self.taken, 1)
        return True


def test_a_hook_runs_after_each_update_and_no_microbatch(context):
    """A moving average of the weights, as the oracle's; a dropped window does not count."""
    network = MLP()
    average = Average(network.trainable_params(), 0.9)
    acc = Accumulator(nn.Momentum(network.trainable_params(), 0.1, 0.9), 2, reduction="mean", on_nonfinite="skip_window",
                      after_update=average)
    cell = TrainOneStepCell(nn.WithLossCell(network, LOSS), acc)
    oracle, _ = trained_oracle(network, 0, clip_norm=None)
    expected = values(network.trainable_params())
    for i, (x, y) in enumerate(batches([6, 6, 6, 6, 6, 6, 4])):
        if i == 2:
            x = x * np.nan
        cell(*tensors(x, y))
        if i in (2, 3):
            continue
        if oracle(reference.loss_and_gradients(oracle.parameters, x, y)[1], len(x)):
            expected = [0.9 * a + 0.1 * p for a, p in zip(expected, oracle.parameters)]
    cell.flush()
    oracle.flush()
    expected = [0.9 * a + 0.1 * p for a, p in zip(expected, oracle.parameters)]
    assert int(average.taken) == int(acc.update_step) == 3
    assert int(acc.skipped) == 1
    assert difference(values(average.averages), expected) <= 1e-6
    assert difference(values(average.averages), oracle.parameters) > 1e-3, "the average is not the parameters themselves"
    state = {id(p) for p in acc.parameters}
    assert {id(p) for p in (*average.averages, average.taken)} <= state
    assert not {id(p) for p in network.trainable_params()} & state


def test_a_method_of_a_cell_is_a_hook_with_the_same_state(mode_named):
    mode_named("pynative")
    network = MLP()
    average = Average(network.trainable_params(), 0.9)
    average.optimizer = nn.SGD(network.trainable_params(), 0.1)
    acc = Accumulator(average.optimizer, 2, reduction="mean", after_update=average.construct)
    state = {id(p) for p in acc.parameters}
    assert {id(p) for p in (*average.averages, average.taken)} <= state
    assert not {id(p) for p in average.optimizer.get_parameters()} & state


def test_a_hook_is_checked():
    network = MLP()
    with pytest.raises(TypeError, match="after_update is of type int, expected a function without arguments or a Cell"):
        Accumulator(nn.SGD(network.trainable_params(), 0.1), 2, after_update=3)
