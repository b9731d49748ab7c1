"""WindowLog: a row for each window, in a CSV file or wherever a function puts it."""
import csv
import os

import mindspore as ms
import numpy as np
import pytest
import reference
from conftest import batches, tensors, values
from mindspore import Tensor, amp
from mindspore.dataset import GeneratorDataset
from mindspore.train import Callback, Model
from test_model import SIZES, TwoCells, dataset, make_cell, trained_oracle

from ms_accum import FlushCallback, WindowLog

COLUMNS = ["epoch", "microbatch", "update_step", "loss", "weight", "grad_norm", "skipped"]


@pytest.fixture(params=["graph", "pynative"])
def context(request, mode_named):
    return mode_named(request.param)


def windows(losses):
    """(loss, weight) of each window of two microbatches of SIZES, the last one short, for each epoch."""
    rows = []
    for start in range(0, len(losses), len(SIZES)):
        for i in range(0, len(SIZES), 2):
            sizes, part = SIZES[i:i + 2], losses[start + i:start + i + 2][:len(SIZES) - i]
            rows.append((np.average(part, weights=sizes), sum(sizes)))
    return rows


@pytest.mark.parametrize("flush_first", [True, False])
def test_a_row_for_each_window(context, flush_first):
    if not flush_first and context == "graph":
        return  # the order of callbacks is none of the graph's: one mode shows it
    network, cell = make_cell()
    oracle, losses = trained_oracle(network, epochs=2)
    callbacks = [FlushCallback(), WindowLog("windows.csv")]
    Model(cell).train(2, dataset(), callbacks=callbacks if flush_first else callbacks[::-1], dataset_sink_mode=False)
    with open("windows.csv", newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == COLUMNS
    assert [(int(r["epoch"]), int(r["microbatch"]), int(r["update_step"]), int(r["skipped"])) for r in rows] == [
        (1, 2, 1, 0), (1, 4, 2, 0), (1, 5, 3, 0), (2, 7, 4, 0), (2, 9, 5, 0), (2, 10, 6, 0)]
    for row, (loss, weight) in zip(rows, windows(losses)):
        assert float(row["loss"]) == pytest.approx(loss, rel=1e-5)
        assert float(row["weight"]) == weight
    assert float(rows[-1]["grad_norm"]) == pytest.approx(oracle.grad_norm, rel=1e-5)
    assert len({row["grad_norm"] for row in rows}) == 6


def test_windows_that_others_close_or_reset(mode_named):
    """By a callback behind the log: reset after the second microbatch, closed after the sixth."""
    mode_named("pynative")
    _, cell = make_cell(accumulate_step=3)

    losses = []

    class Meddling(Callback):
        def on_train_step_end(self, run_context):
            context = run_context.original_args()
            losses.append(float(context.net_outputs))
            if context.cur_step_num == 2:
                cell.accumulator.reset()
            elif context.cur_step_num == 6:
                cell.flush()

    rows, sizes = [], [6, 5, 4, 3, 2, 1, 7, 8]
    Model(cell).train(1, dataset(sizes), callbacks=[FlushCallback(), WindowLog(rows.append), Meddling()], dataset_sink_mode=False)
    parts = [slice(2, 5), slice(5, 6), slice(6, 8)]
    assert [(row["microbatch"], row["update_step"], row["weight"]) for row in rows] == [
        (part.stop, i + 1, sum(sizes[part])) for i, part in enumerate(parts)]
    assert [row["loss"] for row in rows] == pytest.approx(
        [np.average(losses[part], weights=sizes[part]) for part in parts], rel=1e-6)


def test_a_window_that_was_open_when_the_training_began(mode_named):
    """A window was closed and one opened by hand; the row has the whole window's weight, and the loss of what was seen."""
    mode_named("pynative")
    network, cell = make_cell()
    for x, y in batches([7, 7, 7]):
        cell(*tensors(x, y))
    rows, (x, y) = [], batches([6, 6, 5])[0]
    loss, _ = reference.loss_and_gradients(values(network.trainable_params()), x, y)
    Model(cell).train(1, dataset([6, 6, 5]), callbacks=[WindowLog(rows.append)], dataset_sink_mode=False)
    assert [(row["microbatch"], row["update_step"], row["weight"]) for row in rows] == [(1, 2, 13), (3, 3, 11)]
    assert rows[0]["loss"] == pytest.approx(loss, rel=1e-5)


@pytest.mark.parametrize(("on_nonfinite", "closed_at"), [("skip_microbatch", [3, 5]), ("skip_window", [2, 4, 5])])
def test_skipped_ones_show(mode_named, on_nonfinite, closed_at):
    """A skipped microbatch does not make its window's loss NaN; a dropped window has a row, with the loss it had."""
    mode_named("pynative")
    _, cell = make_cell(on_nonfinite=on_nonfinite)
    rows = []
    microbatches = [(x.astype(np.float32), y.astype(np.int32)) for x, y in batches([4, 4, 4, 4, 4])]
    microbatches[0][0][:] = np.nan
    Model(cell).train(1, GeneratorDataset(microbatches, ["x", "y"], shuffle=False), callbacks=[FlushCallback(), WindowLog(rows.append)],
                      dataset_sink_mode=False)
    dropped = on_nonfinite == "skip_window"
    assert [row["microbatch"] for row in rows] == closed_at
    assert [row["skipped"] for row in rows] == [1] * len(rows)
    assert [bool(np.isnan(row["loss"])) for row in rows] == [dropped] + [False] * (len(rows) - 1)


def test_a_loss_scale_is_a_column(mode_named):
    mode_named("pynative")
    _, cell = make_cell(loss_scaler=amp.DynamicLossScaler(8.0, 2, 1))
    rows = []
    Model(cell).train(1, dataset([4, 4, 4, 4]), callbacks=[WindowLog(rows.append)], dataset_sink_mode=False)
    assert [list(row) for row in rows] == [[*COLUMNS, "loss_scale"]] * 2
    assert [row["loss_scale"] for row in rows] == [16.0, 32.0]


def test_mindspores_summary_record_takes_the_rows(mode_named):
    mode_named("pynative")
    _, cell = make_cell()
    with ms.SummaryRecord("summary") as summary:
        def write(row):
            for name in ("loss", "grad_norm", "weight"):
                summary.add_value("scalar", name, Tensor(row[name], ms.float32))
            assert summary.record(row["update_step"])
        Model(cell).train(1, dataset(), callbacks=[FlushCallback(), WindowLog(write)], dataset_sink_mode=False)
    (file,) = os.listdir("summary")
    with open(f"summary/{file}", "rb") as events:
        assert events.read().count(b"grad_norm") == 3


def test_what_cannot_be_logged_is_refused(mode_named):
    mode_named("pynative")
    with pytest.raises(TypeError, match="to is of type int, expected the path of a CSV file or a function of a dict"):
        WindowLog(3)
    _, cell = make_cell()
    _, other = make_cell()
    with pytest.raises(ValueError, match="WindowLog found 2 TrainOneStepCells"):
        Model(TwoCells(cell, other)).train(1, dataset(), callbacks=[WindowLog("a.csv")], dataset_sink_mode=False)
    with pytest.raises(FileNotFoundError, match=r"nowhere/a\.csv"):
        Model(cell).train(1, dataset(), callbacks=[WindowLog("nowhere/a.csv")], dataset_sink_mode=False)
