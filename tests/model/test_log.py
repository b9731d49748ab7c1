"""WindowLog: its columns, its file in a run that goes on, and what is an error. Sentence 9.

Rows of steps and of Model in whole runs, with dropped windows and loads: test_differential.py and test_callbacks.py.
"""
import csv
from functools import partial

import pytest
from mindspore import ParameterTuple, amp, nn
from mindspore.train import LambdaCallback
from support.cells import Counting
from support.model_runs import SIZES, load, make_cell, momentum, saved, train
from support.modes import recorded_warnings

from ms_accum import FlushCallback, WindowLog, make_train_step
from ms_accum.core.boundary import Boundary
from ms_accum.selftest.networks import MLP, batches, mean_loss, tensors

pytestmark = pytest.mark.usefixtures("uncompiled")


def make_step(accumulate_step=2, network=None, optimizer=momentum, **options):
    network = network or MLP()
    return make_train_step(mean_loss(network), optimizer(network.trainable_params()), accumulate_step, eager=True,
                           **options)


def run(step, data, **options):
    for _ in step.epoch([tensors(*batch) for batch in data], **options):
        pass


def updates(path="windows.csv"):
    with open(path, newline="", encoding="utf-8") as file:
        return [int(row["update_step"]) for row in csv.DictReader(file)]


def grouped(weights):
    return nn.Momentum([{"params": weights[:2], "lr": [0.4, 0.3, 0.2]}, {"params": weights[2:], "lr": 0.5}], 0.1, 0.9)


def test_columns():
    """Those of a loss scaler, of one's own, and of the rates, which are those of the update, not of the next one.
    Controls: losses and norms differ from window to window; a file; an optimizer without a rate."""
    rows, without = [], []
    step = make_step(optimizer=grouped, clip_norm=0.7, loss_scaler=amp.DynamicLossScaler(8.0, 2, 1))
    for to in (rows.append, "windows.csv"):
        step.on_update(WindowLog(to, extra=lambda: {"own": step.update_step / 2}))
    run(step, batches(SIZES))
    with open("windows.csv", newline="", encoding="utf-8") as file:
        header, *written = csv.reader(file)
    assert header == [*rows[0]] == ["epoch", "microbatch", "update_step", "loss", "weight", "learning_rate_0",
                                    "learning_rate_1", "grad_norm", "skipped", "seen", "seconds", "per_second",
                                    "loss_scale", "own"]
    names = ("microbatch", "weight", "learning_rate_0", "learning_rate_1", "seen", "loss_scale", "own")
    assert [[row[name] for name in names] for row in rows] == [
        pytest.approx(row) for row in ([2, 12, 0.4, 0.5, 12, 16, 0.5], [4, 12, 0.3, 0.5, 24, 32, 1],
                                       [5, 2, 0.2, 0.5, 26, 64, 1.5])]
    assert len({row["loss"] for row in rows}) == len({row["grad_norm"] for row in rows}) == len(written) == 3
    step = make_step(optimizer=lambda weights: Counting(ParameterTuple(weights)))
    step.on_update(WindowLog(without.append))
    run(step, batches(SIZES))
    assert not any("rate" in name for name in without[0])


def test_a_log_is_called_before_other_functions_and_reads_once_for_a_window(monkeypatch):
    """So its row has the rate of its update, whatever a function sets. Control: without a log, nothing is read."""
    reads, copies = [], Boundary._copies  # noqa: SLF001
    monkeypatch.setattr(Boundary, "_copies", lambda boundary: reads.append(1) or copies(boundary))
    step, rows, counts = make_step(), [], []
    step.on_update(lambda step: setattr(step, "learning_rate", step.learning_rate / 2))
    for has_log in (False, True):
        if has_log:
            log = step.on_update(WindowLog(rows.append))
            assert isinstance(log, WindowLog)
        first, before = step.learning_rate, len(reads)
        for batch in batches([6] * 4):
            step(*tensors(*batch))
        counts.append(len(reads) - before)
    assert [row["learning_rate"] for row in rows] == pytest.approx([first, first / 2])
    assert counts == [0, 2]


def test_seconds_are_those_of_training(monkeypatch):
    """By a clock that the forward pass, a function of `on_update` and the loop set: not what is between."""
    now, rows = {"time": 100.0}, []
    for module in ("core.boundary", "model.log"):
        monkeypatch.setattr(f"ms_accum.{module}.perf_counter", lambda: now["time"])
    network, durations = MLP(), iter([1, 2, 3, 1, 0.5, 1.5])
    loss = mean_loss(network)

    def pass_time(seconds):
        now["time"] += seconds

    def forward_fn(x, y):
        pass_time(next(durations))
        return loss(x, y)

    step = make_train_step(forward_fn, nn.SGD(network.trainable_params()), 2, eager=True)
    step.on_update(WindowLog(rows.append))
    step.on_update(lambda step: pass_time(1000))  # evaluates, saves
    run(step, batches([6, 4, 3, 5]))
    pass_time(1000)  # evaluates between epochs
    run(step, batches([2, 2]))
    assert [(row["seconds"], row["per_second"]) for row in rows] == [(3, 10 / 3), (4, 2.0), (2, 2.0)]


def test_a_run_that_goes_on_keeps_the_rows_of_its_file():
    """Up to the file's update, whatever was written after it, also if the last row was cut, or in one process. A new
    run begins the file anew, and says so. Other columns, in a run that goes on, are an error, and the update stands.
    """
    data = batches([6, 2, 4, 3, 5, 1])

    def go_on(step, log, part):
        step.boundary.functions = []
        step.on_update(log)
        run(step, part)

    step, log = make_step(), WindowLog("windows.csv")
    go_on(step, log, data[:4])
    file = saved(step)
    with recorded_warnings() as caught:
        go_on(step, log, data)
        assert updates() == [1, 2, 3, 4, 5]
        for again, its_log in ((step, log), (make_step(), WindowLog("windows.csv"))):
            with open("windows.csv", "a", encoding="utf-8") as written:
                written.write("1,7,")  # cut, as on a full disk
            load(again, file)
            go_on(again, its_log, data[:2])
            assert updates() == [1, 2, 3]
    assert not caught
    with pytest.raises(ValueError, match=r"windows\.csv has the columns .*; give WindowLog another path"):
        go_on(again, WindowLog("windows.csv", extra=lambda: {"accuracy": 1.0}), data[:2])
    assert (updates(), again.update_step) == ([1, 2, 3], 4)
    with pytest.warns(UserWarning, match=r"windows\.csv holds 3 rows of an earlier run, which this new run overwrites"):
        go_on(make_step(), WindowLog("windows.csv"), data[:2])
    assert updates() == [1]


def test_an_error_of_a_log_passes_unchanged_and_loses_its_row_alone():
    rows, fails, step = [], [False, True, False], make_step()

    def extra():
        if fails.pop(0):
            raise OSError("no space left on device")
        return {}

    step.on_update(WindowLog(rows.append, extra=extra))
    with pytest.raises(OSError, match=r"^no space left on device$"):
        run(step, batches([4] * 5))
    run(step, batches([4] * 5), skip=step.trained)
    assert (step.update_step, [row["update_step"] for row in rows]) == (3, [1, 3])


def test_a_log_of_a_training_that_failed_or_has_ended_does_not_log_the_next_one():
    (_, cell), first, second = make_cell(), [], []

    def stop(context):
        if context.original_args().cur_step_num == 3:
            raise KeyError

    with pytest.raises(KeyError):
        train(cell, FlushCallback(), LambdaCallback(on_train_step_end=stop), WindowLog(first.append))
    cell.reset()
    train(cell, FlushCallback(), WindowLog(second.append), WindowLog(second.append))
    train(cell)
    assert [[row["update_step"] for row in rows] for rows in (first, second)] == [[1], [2, 2, 3, 3, 4, 4]]
    assert cell.update_step == 6


def test_what_does_not_fit_is_an_error(monkeypatch):
    """Rank 0 alone writes. Control: the first row, which is right."""
    rows, batch = [], tensors(*batches([6])[0])
    log, step = WindowLog(rows.append), make_step(1)
    step.on_update(log)
    step(*batch)
    other, twice, nowhere = make_step(1), make_step(1), make_step(1)
    other.on_update(log)
    twice.on_update(WindowLog(rows.append, extra=lambda: {"loss": 1.0}))
    nowhere.on_update(WindowLog("nowhere/a.csv"))
    for call, error, message in (
            (partial(WindowLog, 3), TypeError, "to is of type int, expected the path of a CSV file or a function"),
            (partial(WindowLog, print, extra=("aux",)), TypeError, "extra is of type tuple, expected a function"),
            (partial(other, *batch), ValueError, "follows another train step; give each step a WindowLog of its own"),
            (partial(twice, *batch), ValueError, "two columns of WindowLog would be called loss"),
            (partial(nowhere, *batch), FileNotFoundError, r"nowhere/a\.csv")):
        with pytest.raises(error, match=message):
            call()
    assert (len(rows), other.update_step) == (1, 1)
    monkeypatch.setattr(step.boundary.window.exchange, "rank", 1)
    step(*batch)
    assert (len(rows), step.update_step) == (1, 2)
