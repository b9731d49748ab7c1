"""FlushCallback, PerUpdate and WindowLog in `mindspore.train.Model`: when they act, and what they refuse."""
import csv
import itertools
import os

import mindspore as ms
import numpy as np
import pytest
import reference
from conftest import MLP, batches, difference, tensors, values
from following import LOSS
from mindspore import Tensor, amp, nn
from mindspore.dataset import GeneratorDataset
from mindspore.train import Callback, LearningRateScheduler, LossMonitor, Model, ReduceLROnPlateau
from model_runs import SIZES, Recorder, TwoCells, dataset, make_cell, train, trained_oracle

from ms_accum import FlushCallback, PerUpdate, WindowLog

COLUMNS = ["epoch", "microbatch", "update_step", "loss", "weight", "grad_norm", "skipped"]
RAGGED = [6, 6, 7, 6, 2]


def test_per_update_shows_the_optimizer():
    """At the end of an epoch, too. Negative control: by themselves, MindSpore's callbacks do not find it."""
    _, cell = make_cell(learning_rate=0.5)

    def halving():
        return ReduceLROnPlateau(monitor="loss", factor=0.5, patience=1, min_delta=100.0)

    for callback in (halving(), LearningRateScheduler(lambda rate, step: rate)):
        with pytest.raises(AttributeError):
            train(cell, FlushCallback(), callback)
    train(cell, FlushCallback(), PerUpdate(halving()), epochs=3)
    assert float(cell.optimizer.learning_rate) == 0.125


@pytest.mark.parametrize("flush_first", [True, False])
def test_per_update_calls_once_for_each_update(flush_first):
    _, cell = make_cell(accumulate_step={0: 1, 2: 3})
    inner, outer = Recorder(), Recorder()
    callbacks = [FlushCallback(), PerUpdate(inner)]
    train(cell, *(callbacks if flush_first else callbacks[::-1]), outer, epochs=2)
    assert inner.steps == [1, 2, 3, 4, 5]
    assert outer.steps == list(range(1, 11)), "the run's own count is put back"
    assert inner.events == outer.events == ["begin", "epoch begin", "epoch end", "epoch begin", "epoch end", "end"]


class StopAfterThree(Callback):
    """Stops in the middle of an epoch; notes what is in the open window at each test."""

    def __init__(self, cell):
        self.cell, self.open_windows = cell, []

    def on_train_step_end(self, run_context):
        if run_context.original_args().cur_step_num == 3:
            run_context.request_stop()

    def on_eval_end(self, run_context):
        self.open_windows.append(int(self.cell.accumulator.mini_step))


def test_flush_after_a_stop_in_mid_epoch_comes_before_the_test():
    network, cell = make_cell()
    oracle, _ = trained_oracle(network, 1, sizes=SIZES[:3])
    stop = StopAfterThree(cell)
    model = Model(cell, eval_network=nn.WithEvalCell(network, LOSS), eval_indexes=[0, 1, 2], metrics={"loss"})
    model.fit(4, dataset(), dataset([8]), callbacks=[FlushCallback(), stop], dataset_sink_mode=False, valid_dataset_sink_mode=False)
    assert stop.open_windows == [0]
    assert int(cell.accumulator.update_step) == 2
    assert difference(values(network.trainable_params()), oracle.parameters) <= 1e-6
    cell(*tensors(*batches([6])[0]))  # negative control: a test of its own is none of the training's, and flushes nothing
    model.eval(dataset([8]), callbacks=[FlushCallback()], dataset_sink_mode=False)
    assert int(cell.accumulator.mini_step) == 1


def test_flush_after_a_stop_without_a_test():
    _, cell = make_cell()
    train(cell, FlushCallback(), StopAfterThree(cell), epochs=4)
    assert (int(cell.accumulator.update_step), int(cell.accumulator.mini_step)) == (2, 0)


def test_flush_keeps_to_the_ends_of_epochs_that_differ_in_length():
    """MindSpore counts a dataset's microbatches once, here 3; some epochs then have 1."""
    _, cell = make_cell(accumulate_step=2)
    lengths = itertools.cycle([3, 3, 1])
    microbatch = batches([4])[0][0].astype(np.float32), batches([4])[0][1].astype(np.int32)
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
    train(cell, FlushCallback(), Windows(), epochs=6, data=varying)
    assert {1, 3} == set(map(len, epochs))
    assert all(epoch == [1, 0, 0][:len(epoch)] for epoch in epochs)


def test_flush_finds_every_cell_and_per_update_refuses_two():
    (_, one), (_, other) = make_cell(), make_cell(accumulate_step=4)
    train(TwoCells(one, other), FlushCallback())
    assert [int(cell.accumulator.update_step) for cell in (one, other)] == [3, 2]
    with pytest.raises(ValueError, match="PerUpdate found 2 TrainOneStepCells, whose updates differ in number; expected one"):
        train(TwoCells(one, other), PerUpdate(LossMonitor()))


def test_models_that_do_not_fit_are_refused():
    """Without the cell; or with an optimizer of their own, with which MindSpore would update at each microbatch, too."""
    network, cell = make_cell()
    plain = MLP()
    model = Model(plain, LOSS, nn.SGD(plain.trainable_params(), 0.1))
    before = values(plain.trainable_params())
    for callback in (FlushCallback(), PerUpdate(LossMonitor()), WindowLog(print)):
        with pytest.raises(ValueError, match=r"without a TrainOneStepCell of ms_accum in it; give Model\(TrainOneStepCell"):
            model.train(1, dataset(), callbacks=[callback], dataset_sink_mode=False)
    assert difference(values(plain.trainable_params()), before) == 0
    with pytest.raises(ValueError, match=r"give Model\(TrainOneStepCell\(...\)\) without an optimizer"):
        Model(cell, optimizer=nn.SGD(network.trainable_params(), 0.1))


class Sunk:
    """A run context of sunk data, which no CPU run gives."""

    def __init__(self, network):
        self.context = {"train_network": network, "dataset_sink_mode": True}

    def original_args(self):
        return type("Context", (dict,), {"__getattr__": dict.__getitem__})(self.context)


def test_per_update_refuses_sunk_data_and_what_is_no_callback():
    _, cell = make_cell()
    with pytest.raises(ValueError, match="PerUpdate with dataset_sink_mode=True: single microbatches are not seen then"):
        PerUpdate(LossMonitor()).on_train_begin(Sunk(cell))
    FlushCallback().on_train_begin(Sunk(cell))
    with pytest.raises(TypeError, match=r"callback is of type builtin_function_or_method, expected a mindspore\.train\.Callback"):
        PerUpdate(print)


# --- WindowLog ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("mode", "order"), [pytest.param("graph", 1, marks=pytest.mark.slow), ("pynative", 1), ("pynative", -1)])
def test_a_row_for_each_window(mode_named, mode, order):
    """As the oracle computes it; with FlushCallback in front of the log and behind it."""
    mode_named(mode)
    _, cell = make_cell()
    oracle = reference.Accumulation(values(cell.accumulator.optimizer.parameters), reference.SGD(0.1, 0.9), 2, "mean", 0.7)
    expected, window = [], []
    for microbatch, (x, y) in enumerate(2 * batches(RAGGED), 1):
        loss, gradients = reference.loss_and_gradients(oracle.parameters, x, y)
        window.append((loss, len(x)))
        closed = oracle(gradients, len(x))
        if microbatch % len(RAGGED) == 0:
            oracle.flush()
        if closed or microbatch % len(RAGGED) == 0:
            losses, weights = zip(*window)
            expected.append([1 + (microbatch - 1) // len(RAGGED), microbatch, oracle.update_step, np.average(losses, weights=weights),
                             sum(weights), oracle.grad_norm, 0])
            window = []
    train(cell, *[FlushCallback(), WindowLog("windows.csv")][::order], epochs=2, data=dataset(RAGGED))
    with open("windows.csv", newline="", encoding="utf-8") as file:
        header, *rows = csv.reader(file)
    assert header == COLUMNS
    assert len(expected) == 6
    np.testing.assert_allclose(np.array(rows, float), expected, rtol=1e-5)
    assert len({row[COLUMNS.index("grad_norm")] for row in rows}) == 6


def test_windows_that_others_close_or_reset():
    """By a callback behind the log: reset after the second microbatch, closed after the sixth."""
    (_, cell), losses, rows, sizes = make_cell(accumulate_step=3), [], [], [6, 5, 4, 3, 2, 1, 7, 8]

    class Meddling(Callback):
        def on_train_step_end(self, run_context):
            context = run_context.original_args()
            losses.append(float(context.net_outputs))
            if context.cur_step_num == 2:
                cell.accumulator.reset()
            elif context.cur_step_num == 6:
                cell.flush()

    train(cell, FlushCallback(), WindowLog(rows.append), Meddling(), data=dataset(sizes))
    parts = [slice(2, 5), slice(5, 6), slice(6, 8)]
    assert [(row["microbatch"], row["update_step"], row["weight"]) for row in rows] == [
        (part.stop, i + 1, sum(sizes[part])) for i, part in enumerate(parts)]
    assert [row["loss"] for row in rows] == pytest.approx(
        [np.average(losses[part], weights=sizes[part]) for part in parts], rel=1e-6)


def test_a_window_that_was_open_when_the_training_began():
    """A window was closed and one opened by hand; the row has the whole window's weight, and the loss of what was seen."""
    _, cell = make_cell()
    for x, y in batches([7, 7, 7]):
        cell(*tensors(x, y))
    rows, (x, y) = [], batches([6])[0]
    loss, _ = reference.loss_and_gradients(values(cell.accumulator.optimizer.parameters), x, y)
    train(cell, WindowLog(rows.append), data=dataset([6, 6, 5]))
    assert [(row["microbatch"], row["update_step"], row["weight"]) for row in rows] == [(1, 2, 13), (3, 3, 11)]
    assert rows[0]["loss"] == pytest.approx(loss, rel=1e-5)


@pytest.mark.parametrize(("on_nonfinite", "closed_at"), [("skip_microbatch", [3, 5]), ("skip_window", [2, 4, 5])])
def test_skipped_ones_show(on_nonfinite, closed_at):
    """A skipped microbatch does not make its window's loss NaN; a dropped window has a row, with the loss it had."""
    rows, (_, cell) = [], make_cell(on_nonfinite=on_nonfinite)
    train(cell, FlushCallback(), WindowLog(rows.append), data=dataset([4] * 5, broken=0))
    assert [row["microbatch"] for row in rows] == closed_at
    assert [row["skipped"] for row in rows] == [1] * len(rows)
    assert [bool(np.isnan(row["loss"])) for row in rows] == [on_nonfinite == "skip_window"] + [False] * (len(rows) - 1)


def test_a_loss_scale_is_a_column_and_rows_go_into_mindspores_summary_record():
    rows = []
    with ms.SummaryRecord("summary") as summary:
        def write(row):
            rows.append(row)
            for name in ("loss", "grad_norm", "weight"):
                summary.add_value("scalar", name, Tensor(row[name], ms.float32))
            assert summary.record(row["update_step"])
        train(make_cell(loss_scaler=amp.DynamicLossScaler(8.0, 2, 1))[1], WindowLog(write), data=dataset([4] * 4))
    assert [list(row) for row in rows] == [[*COLUMNS, "loss_scale"]] * 2
    assert [row["loss_scale"] for row in rows] == [16.0, 32.0]
    (file,) = os.listdir("summary")
    with open(f"summary/{file}", "rb") as events:
        assert events.read().count(b"grad_norm") == 2


def test_what_cannot_be_logged_is_refused():
    with pytest.raises(TypeError, match="to is of type int, expected the path of a CSV file or a function of a dict"):
        WindowLog(3)
    with pytest.raises(ValueError, match="WindowLog found 2 TrainOneStepCells"):
        train(TwoCells(make_cell()[1], make_cell()[1]), WindowLog("a.csv"))
    with pytest.raises(FileNotFoundError, match=r"nowhere/a\.csv"):
        train(make_cell()[1], WindowLog("nowhere/a.csv"))
