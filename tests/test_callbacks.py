"""WindowLog: a row for each window, in a CSV file or wherever a function puts it. The other callbacks: test_model_callbacks.py."""
import csv
import os

import mindspore as ms
import numpy as np
import pytest
import reference
from conftest import MLP, batches, tensors, values
from mindspore import Tensor, amp, nn
from mindspore.dataset import GeneratorDataset
from mindspore.train import Callback, Model
from model_runs import TwoCells

from ms_accum import Accumulator, FlushCallback, TrainOneStepCell, WindowLog

COLUMNS = ["epoch", "microbatch", "update_step", "loss", "weight", "grad_norm", "skipped"]
SIZES = [6, 6, 7, 6, 2]


def make_cell(accumulate_step=2, on_nonfinite="apply", **options):
    network = MLP()
    acc = Accumulator(nn.Momentum(network.trainable_params(), 0.1, 0.9), accumulate_step, 0.7, reduction="mean", on_nonfinite=on_nonfinite)
    return TrainOneStepCell(nn.WithLossCell(network, nn.CrossEntropyLoss()), acc, **options)


def train(cell, sizes=SIZES, epochs=1, callbacks=(), broken=None):
    """Train on microbatches of these sizes, of which the one numbered `broken` is NaN."""
    rows = [(x.astype(np.float32), y.astype(np.int32)) for x, y in batches(sizes)]
    if broken is not None:
        rows[broken][0][:] = np.nan
    Model(cell).train(epochs, GeneratorDataset(rows, ["x", "y"], shuffle=False), callbacks=list(callbacks), dataset_sink_mode=False)


@pytest.mark.parametrize(("mode", "order"), [pytest.param("graph", 1, marks=pytest.mark.slow), ("pynative", 1), ("pynative", -1)])
def test_a_row_for_each_window(mode_named, mode, order):
    """As the oracle computes it; with FlushCallback in front of the log and behind it."""
    mode_named(mode)
    cell = make_cell()
    oracle = reference.Accumulation(values(cell.accumulator.optimizer.parameters), reference.SGD(0.1, 0.9), 2, "mean", 0.7)
    expected, window = [], []
    for microbatch, (x, y) in enumerate(2 * batches(SIZES), 1):
        loss, gradients = reference.loss_and_gradients(oracle.parameters, x, y)
        window.append((loss, len(x)))
        closed = oracle(gradients, len(x))
        if microbatch % len(SIZES) == 0:
            oracle.flush()
        if closed or microbatch % len(SIZES) == 0:
            losses, weights = zip(*window)
            expected.append([1 + (microbatch - 1) // len(SIZES), microbatch, oracle.update_step, np.average(losses, weights=weights),
                             sum(weights), oracle.grad_norm, 0])
            window = []
    train(cell, epochs=2, callbacks=[FlushCallback(), WindowLog("windows.csv")][::order])
    with open("windows.csv", newline="", encoding="utf-8") as file:
        header, *rows = csv.reader(file)
    assert header == COLUMNS
    assert len(expected) == 6
    np.testing.assert_allclose(np.array(rows, float), expected, rtol=1e-5)
    assert len({row[COLUMNS.index("grad_norm")] for row in rows}) == 6


def test_windows_that_others_close_or_reset():
    """By a callback behind the log: reset after the second microbatch, closed after the sixth."""
    cell, losses, rows, sizes = make_cell(accumulate_step=3), [], [], [6, 5, 4, 3, 2, 1, 7, 8]

    class Meddling(Callback):
        def on_train_step_end(self, run_context):
            context = run_context.original_args()
            losses.append(float(context.net_outputs))
            if context.cur_step_num == 2:
                cell.accumulator.reset()
            elif context.cur_step_num == 6:
                cell.flush()

    train(cell, sizes, callbacks=[FlushCallback(), WindowLog(rows.append), Meddling()])
    parts = [slice(2, 5), slice(5, 6), slice(6, 8)]
    assert [(row["microbatch"], row["update_step"], row["weight"]) for row in rows] == [
        (part.stop, i + 1, sum(sizes[part])) for i, part in enumerate(parts)]
    assert [row["loss"] for row in rows] == pytest.approx(
        [np.average(losses[part], weights=sizes[part]) for part in parts], rel=1e-6)


def test_a_window_that_was_open_when_the_training_began():
    """A window was closed and one opened by hand; the row has the whole window's weight, and the loss of what was seen."""
    cell = make_cell()
    for x, y in batches([7, 7, 7]):
        cell(*tensors(x, y))
    rows, (x, y) = [], batches([6])[0]
    loss, _ = reference.loss_and_gradients(values(cell.accumulator.optimizer.parameters), x, y)
    train(cell, [6, 6, 5], callbacks=[WindowLog(rows.append)])
    assert [(row["microbatch"], row["update_step"], row["weight"]) for row in rows] == [(1, 2, 13), (3, 3, 11)]
    assert rows[0]["loss"] == pytest.approx(loss, rel=1e-5)


@pytest.mark.parametrize(("on_nonfinite", "closed_at"), [("skip_microbatch", [3, 5]), ("skip_window", [2, 4, 5])])
def test_skipped_ones_show(on_nonfinite, closed_at):
    """A skipped microbatch does not make its window's loss NaN; a dropped window has a row, with the loss it had."""
    rows = []
    train(make_cell(on_nonfinite=on_nonfinite), [4] * 5, callbacks=[FlushCallback(), WindowLog(rows.append)], broken=0)
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
        train(make_cell(loss_scaler=amp.DynamicLossScaler(8.0, 2, 1)), [4] * 4, callbacks=[WindowLog(write)])
    assert [list(row) for row in rows] == [[*COLUMNS, "loss_scale"]] * 2
    assert [row["loss_scale"] for row in rows] == [16.0, 32.0]
    (file,) = os.listdir("summary")
    with open(f"summary/{file}", "rb") as events:
        assert events.read().count(b"grad_norm") == 2


def test_what_cannot_be_logged_is_refused():
    with pytest.raises(TypeError, match="to is of type int, expected the path of a CSV file or a function of a dict"):
        WindowLog(3)
    with pytest.raises(ValueError, match="WindowLog found 2 TrainOneStepCells"):
        train(TwoCells(make_cell(), make_cell()), callbacks=[WindowLog("a.csv")])
    with pytest.raises(FileNotFoundError, match=r"nowhere/a\.csv"):
        train(make_cell(), callbacks=[WindowLog("nowhere/a.csv")])
