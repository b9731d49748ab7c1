"""WindowLog: its rows, for a train step and for Model, and the file of a run that goes on."""
import csv
from functools import partial

import numpy as np
import pytest
from mindspore import ParameterTuple, amp, nn
from mindspore.train import LambdaCallback
from support.cells import Counting
from support.model_runs import SIZES, dataset_of, load, make_cell, momentum, saved, train
from support.modes import recorded_warnings

from ms_accum import FlushCallback, WindowLog, make_train_step
from ms_accum.core.boundary import Boundary
from ms_accum.selftest.networks import MLP, batches, mean_loss, tensors

pytestmark = pytest.mark.usefixtures("uncompiled")
COLUMNS = ["epoch", "microbatch", "update_step", "loss", "weight", "learning_rate", "grad_norm", "skipped", "seen",
           "seconds", "per_second"]


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


def test_a_file_has_the_rows_that_a_function_is_given():
    """With the loss scale and a column of one's own. Control: losses and norms differ from window to window."""
    rows, names = [], ("epoch", "microbatch", "update_step", "weight", "seen", "loss_scale", "own")
    _, cell = make_cell(loss_scaler=amp.DynamicLossScaler(8.0, 2, 1))
    extra = {"extra": lambda: {"own": cell.update_step / 2}}
    train(cell, FlushCallback(), WindowLog("windows.csv", **extra), WindowLog(rows.append, **extra), epochs=2)
    with open("windows.csv", newline="", encoding="utf-8") as file:
        header, *written = csv.reader(file)
    assert header == [*rows[0]] == [*COLUMNS, "loss_scale", "own"]
    timed = {COLUMNS.index("seconds"), COLUMNS.index("per_second")}
    for line, row in zip(written, rows):
        assert [float(value) for i, value in enumerate(line) if i not in timed] == [
            value for i, value in enumerate(row.values()) if i not in timed]
        assert row["per_second"] * row["seconds"] == pytest.approx(row["weight"])
    assert [[row[name] for name in names] for row in rows] == [
        [1, 2, 1, 12, 12, 16, 0.5], [1, 4, 2, 12, 24, 32, 1], [1, 5, 3, 2, 26, 64, 1.5],
        [2, 2, 4, 12, 38, 128, 2], [2, 4, 5, 12, 50, 256, 2.5], [2, 5, 6, 2, 52, 512, 3]]
    assert len({row["loss"] for row in rows}) == len({row["grad_norm"] for row in rows}) == len(written) == 6


RATES = [0.4, 0.3, 0.2, 0.1, 0.05, 0.025, 0.0125]


@pytest.mark.parametrize(("optimizer", "columns"), [
    (lambda parameters: nn.Momentum([{"params": parameters[:2], "lr": RATES}, {"params": parameters[2:], "lr": 0.5}],
                                    0.1, 0.9), {"learning_rate_0": RATES, "learning_rate_1": [0.5] * 6}),
    (lambda parameters: Counting(ParameterTuple(parameters)), {})])
def test_a_train_step_writes_the_rows_of_model(optimizer, columns):
    """The rates are those of the update, not of the next one."""
    rows, data = {"model": [], "step": []}, batches(SIZES)
    train(make_cell(optimizer=optimizer)[1], FlushCallback(), WindowLog(rows["model"].append), epochs=2)
    step = make_step(optimizer=optimizer, clip_norm=0.7)
    step.on_update(WindowLog(rows["step"].append))
    for _ in range(2):
        run(step, data)
    assert rows["model"][0].keys() == rows["step"][0].keys()
    assert {name for name in rows["step"][0] if "rate" in name} == set(columns)
    for name, values in columns.items():
        assert [row[name] for row in rows["step"]] == pytest.approx(values[:6])
    untimed = [[[value for name, value in row.items() if name not in ("seconds", "per_second")] for row in found]
               for found in rows.values()]
    np.testing.assert_allclose(untimed[0], untimed[1], rtol=1e-5)
    assert len(untimed[0]) == 6


def test_a_dropped_window_has_no_row_but_shows_in_the_next_one():
    """Nor in the numbers of the file, which go on. Control: nothing is dropped."""
    for is_bad in (False, True):
        rows, data = [], batches([6] * 6)
        data[2][0][:] = np.nan if is_bad else 1.0
        step = make_step(on_nonfinite="skip_window")
        step.on_update(WindowLog(rows.append))
        step.on_update(WindowLog("windows.csv"))
        run(step, data)
        assert [(row["microbatch"], row["update_step"], row["skipped"], row["seen"]) for row in rows] == (
            [(2, 1, 0, 12), (6, 2, 1, 24)] if is_bad else [(2, 1, 0, 12), (4, 2, 0, 24), (6, 3, 0, 36)])
        assert updates() == [row["update_step"] for row in rows]
    assert np.isfinite([row["loss"] for row in rows]).all()


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


@pytest.mark.parametrize("driver", ["step", "Model"])
def test_a_run_that_goes_on_keeps_the_rows_of_its_file(driver):
    """Up to the file's update, whatever was written after it, also if the last row was cut, or in one process. A new
    run begins the file anew, and says so. Other columns, in a run that goes on, are an error, and the update stands.
    """
    data = batches([6, 2, 4, 3, 5, 1, 2, 2])

    def made():
        return make_cell(accumulate_step=2)[1] if driver == "Model" else make_step()

    def log_into(step, part, log):
        if driver == "Model":
            train(step, log, data=dataset_of(part))
        else:
            step.boundary.functions = []
            step.on_update(log)
            for batch in part:
                step(*tensors(*batch))

    step = made()
    log_into(step, data[:4], WindowLog("windows.csv"))
    file = saved(step)
    with recorded_warnings() as caught:
        log = WindowLog("windows.csv")
        log_into(step, data[4:], log)
        assert updates() == [1, 2, 3, 4]
        for again, same in ((step, True), (made(), False)):
            with open("windows.csv", "a", encoding="utf-8") as written:
                written.write("1,7,")  # cut, as on a full disk
            load(again, file)
            log_into(again, data[4:6], log if same else WindowLog("windows.csv"))
            assert updates() == [1, 2, 3]
    assert not caught
    with pytest.raises(ValueError, match=r"windows\.csv has the columns .*; give WindowLog another path"):
        log_into(again, data[6:], WindowLog("windows.csv", extra=lambda: {"accuracy": 1.0}))
    assert (updates(), again.update_step) == ([1, 2, 3], 4)
    with recorded_warnings() as caught:
        log_into(made(), data[:2], WindowLog("windows.csv"))
    assert [str(each.message).partition("windows.csv ")[2] for each in caught] == [
        "holds 3 rows of an earlier run, which this new run overwrites; give WindowLog another path to keep them"]
    assert updates() == [1]


@pytest.mark.parametrize("stopped", [1, 2, 3])
def test_an_error_in_a_function_passes_unchanged_and_loses_nothing(stopped):
    """Nor a row, unless the log itself fails: then that row alone. Control: the function after the last update."""
    for fails in ("function", "log"):
        rows, calls, step = [], [], make_step()

        def fail(*_, calls=calls):
            calls.append(1)
            if len(calls) == stopped:
                raise OSError("no space left on device")
            return {}

        step.on_update(WindowLog(rows.append, extra=fail if fails == "log" else dict))
        if fails == "function":
            step.on_update(fail)
        data = batches([4] * 5)
        with pytest.raises(OSError, match=r"^no space left on device$"):
            run(step, data)
        run(step, data, skip=step.trained)
        assert (step.update_step, len(calls)) == (3, 3)
        assert [row["update_step"] for row in rows] == [
            update for update in (1, 2, 3) if fails == "function" or update != stopped]


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
