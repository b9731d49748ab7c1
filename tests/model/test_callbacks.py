"""FlushCallback, PerUpdate and WindowLog in `mindspore.train.Model`: when they act, and what they refuse."""
import csv
import itertools
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import mindspore as ms
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mindspore import ParameterTuple, amp, mint, nn, ops
from mindspore.dataset import GeneratorDataset, NumpySlicesDataset
from mindspore.train import LambdaCallback, LearningRateScheduler, Model, ModelCheckpoint, ReduceLROnPlateau
from support import reference
from support.cells import Counting as Unrated
from support.model_runs import (
    SIZES,
    TwoCells,
    dataset,
    dataset_of,
    make_cell,
    make_step,
    momentum,
    train,
    trained_oracle,
)
from support.modes import recorded_warnings
from support.training import LOSS

from ms_accum import FlushCallback, PerUpdate, WindowLog, load_checkpoint, make_train_step, save_checkpoint
from ms_accum.core.boundary import Boundary
from ms_accum.selftest.comparing import difference, values
from ms_accum.selftest.modes import running
from ms_accum.selftest.networks import MLP, batches, mean_loss, tensors

pytestmark = pytest.mark.usefixtures("uncompiled")
COLUMNS = ["epoch", "microbatch", "update_step", "loss", "weight", "learning_rate", "grad_norm", "skipped",
           "seen", "seconds", "weight_per_second"]


def timeless(row):
    """The values of a row, without those that depend on the machine, which fit each other."""
    row = dict(row)
    seconds, per_second = row.pop("seconds"), row.pop("weight_per_second")
    assert seconds > 0
    assert per_second * seconds == pytest.approx(row["weight"])
    return [*row.values()]


class Oracle(reference.Accumulation):
    """The oracle, which keeps the weight of the last window, and of all updates."""

    seen = 0

    def apply(self):
        self.weight, updates = sum(weight for weight, _ in self.window), self.update_step
        super().apply()
        self.seen += self.weight * (self.update_step - updates)


class Own(LambdaCallback):
    """A user's: `Model.fit` does not tell MindSpore's own of its tests."""


class Recorder(LambdaCallback):
    """The numbers of the microbatches, how many began, and the events it saw."""

    def __init__(self):
        self.steps, self.events, self.begun = [], [], []
        noted = {f"on_train_{event}": lambda context, event=event: self.events.append(event)
                 for event in ("begin", "epoch_begin", "epoch_end", "end")}
        super().__init__(on_train_step_begin=self.begun.append, **noted,
                         on_train_step_end=lambda context: self.steps.append(context.original_args().cur_step_num))


def expected_rows(oracle, epochs, acts):
    """What `WindowLog` writes: the oracle's windows, and the mean loss of the microbatches that were seen."""
    rows, seen, microbatch = [], [], 0
    for epoch, data in enumerate(epochs, 1):
        for i, (x, y) in enumerate(data, 1):
            microbatch += 1
            act = "flush" if i == len(data) else acts.get(microbatch)
            loss, gradients = reference.loss_and_gradients(oracle.parameters, x, y)
            if oracle.on_nonfinite != "skip_microbatch" or not np.isnan(loss):
                seen.append((loss, len(x)))
            if oracle(gradients, len(x)) or (act == "flush" and oracle.flush()):
                losses, weights = zip(*seen or [(0, 1)])
                rows.append([epoch, microbatch, oracle.update_step, np.average(losses, weights=weights), oracle.weight,
                             0.1, oracle.grad_norm, oracle.skipped, oracle.seen])
                seen = []
            elif act == "reset":
                oracle.reset()
                seen = []
    return rows


@pytest.mark.parametrize("examples", [5, pytest.param(50, marks=pytest.mark.slow)])
def test_a_row_for_each_window_and_a_call_for_each_update(examples):
    settings(max_examples=examples)(given(st.data())(rows_and_calls))()


def rows_and_calls(data):
    """As the oracle has them, with FlushCallback before or behind, and so a callback that flushes and resets.

    The window that is open when the training begins has its whole weight, and the mean loss of what was seen.
    """
    draw = data.draw
    length = draw(st.sampled_from([1, 2, 3, {0: 2, 2: 3}]))
    on_nonfinite = draw(st.sampled_from(["apply", "skip_microbatch", "skip_window"]))
    _, cell = make_cell(length, on_nonfinite=on_nonfinite)
    oracle = Oracle(values(cell.optimizer.parameters), reference.SGD(0.1, 0.9), length, "mean", 0.7, on_nonfinite)
    for x, y in batches(draw(st.lists(st.integers(1, 7), max_size=3))):
        cell(*tensors(x, y))
        oracle(reference.loss_and_gradients(oracle.parameters, x, y)[1], len(x))
    epoch = batches(draw(st.lists(st.integers(1, 7), min_size=1, max_size=6)), seed=2)
    if on_nonfinite != "apply":
        epoch[draw(st.integers(0, len(epoch) - 1))][0][:] = np.nan
    acts = draw(st.dictionaries(st.integers(1, 2 * len(epoch)), st.sampled_from(["reset", "flush"]), max_size=3))
    # At the end of an epoch, whether there is a window to flush depends on who resets or flushes first.
    acts = {microbatch: act for microbatch, act in acts.items() if act == "flush" or microbatch % len(epoch)}
    functions = {"reset": cell.accumulator.reset, "flush": cell.flush, None: int}

    def meddle(context):
        functions[acts.get(context.original_args().cur_step_num)]()

    meddling = LambdaCallback(on_train_step_end=meddle)
    inner, outer, rows, updates = Recorder(), Recorder(), [], oracle.update_step
    callbacks = [FlushCallback(), WindowLog(rows.append)][::draw(st.sampled_from([1, -1]))]
    callbacks = [meddling, *callbacks] if draw(st.booleans()) else [*callbacks, meddling]
    train(cell, *callbacks, PerUpdate(inner), outer, epochs=2, data=dataset_of(epoch))
    expected = expected_rows(oracle, 2 * [epoch], acts)
    assert all(list(row) == COLUMNS for row in rows)
    np.testing.assert_allclose([timeless(row) for row in rows], expected, rtol=1e-4)
    assert difference(values(cell.optimizer.parameters), oracle.parameters) <= 1e-5
    assert inner.steps == [*range(updates + 1, oracle.update_step + 1)]
    assert outer.steps == [*range(1, 2 * len(epoch) + 1)], "the run's own count is put back"
    assert len(inner.steps) <= len(inner.begun) <= len(inner.steps) + 1 <= len(outer.begun) + 1 == 2 * len(epoch) + 1
    assert inner.events == outer.events == ["begin", *2 * ["epoch_begin", "epoch_end"], "end"]


def follow(driver, log, step, part):
    """Train on a part of the data by `Model` or by single calls, with a log."""
    if driver == "Model":
        train(step, log, data=dataset_of(part))
    else:
        for batch in part:
            log(step, step(*tensors(*batch)))


def test_a_file_has_the_rows_that_a_function_is_given():
    """With the loss scale. Negative control of the test above: losses and norms differ from window to window."""
    rows, names = [], ("epoch", "microbatch", "update_step", "weight", "seen", "loss_scale")
    _, cell = make_cell(loss_scaler=amp.DynamicLossScaler(8.0, 2, 1))
    train(cell, FlushCallback(), WindowLog("windows.csv"), WindowLog(rows.append), epochs=2)
    with open("windows.csv", newline="", encoding="utf-8") as file:
        header, *written = csv.reader(file)
    assert header == [*COLUMNS, "loss_scale"]
    assert [timeless(zip(header, map(float, line))) for line in written] == [timeless(row) for row in rows]
    assert [[row[name] for name in names] for row in rows] == [
        [1, 2, 1, 12, 12, 16], [1, 4, 2, 12, 24, 32], [1, 5, 3, 2, 26, 64],
        [2, 7, 4, 12, 38, 128], [2, 9, 5, 12, 50, 256], [2, 10, 6, 2, 52, 512]]
    assert len({row["loss"] for row in rows}) == len({row["grad_norm"] for row in rows}) == 6


def half(parameters, rate):
    """An optimizer with a rate, which may be a list or a schedule, for each of two groups."""
    return nn.Momentum([{"params": parameters[:2], "lr": rate}, {"params": parameters[2:], "lr": 0.5}], 0.1, 0.9)


RATES = [0.4, 0.3, 0.2, 0.1, 0.05, 0.025, 0.0125]


@pytest.mark.parametrize(("optimizer", "columns"), [
    (lambda parameters: nn.Momentum(parameters, RATES, 0.9), {"learning_rate": RATES}),
    (lambda parameters: half(parameters, RATES), {"learning_rate_0": RATES, "learning_rate_1": [0.5] * 6}),
    (lambda parameters: Unrated(ParameterTuple(parameters)), {}),
    *(pytest.param(*one, marks=pytest.mark.slow) for one in (
        (lambda parameters: nn.Momentum(parameters, nn.ExponentialDecayLR(0.5, 0.5, 1), 0.9),
         {"learning_rate": [0.5 ** (i + 1) for i in range(6)]}),
        (lambda parameters: mint.optim.SGD(parameters, 0.25), {"learning_rate": [0.25] * 6})))])
def test_a_loop_of_ones_own_writes_the_rows_of_model(optimizer, columns):
    """By a train step and by a cell, in two epochs; the rates are those of the update, not of the next one.

    A window that somebody has flushed or reset, and one that was open before, is told as it is by `Model`. The loop of
    the cell tells the log only of the last flush; the next microbatch shows it the one before.
    """
    rows = {"model": [], "step": [], "cell": []}
    data = [tensors(x, y) for x, y in batches(SIZES)]
    for driver, found in rows.items():
        _, step = (make_step if driver == "step" else make_cell)(optimizer=optimizer)
        if driver == "model":
            train(step, FlushCallback(), WindowLog(found.append), epochs=2)
            continue
        log = WindowLog(found.append)
        for epoch in range(2):
            for loss in step.epoch(data) if driver == "step" else map(lambda batch: step(*batch), data):
                log(step, loss)
            step.flush()
            if driver == "step" or epoch == 1:
                log(step)
    names = {"model": rows["model"][0].keys(), "step": rows["step"][0].keys()}
    assert names["model"] == names["step"]
    assert all(name in names["step"] for name in columns)
    for row in [row for found in rows.values() for row in found]:
        assert {name: row[name] for name in columns} == pytest.approx(
            {name: of_updates[row["update_step"] - 1] for name, of_updates in columns.items()})
    table = {driver: np.array([timeless(row) for row in found]) for driver, found in rows.items()}
    np.testing.assert_allclose(table["step"], table["model"], rtol=1e-5)
    table["cell"][:, 0] = table["model"][:, 0]  # a cell knows no epochs
    assert len(table["model"]) == 6


@pytest.mark.parametrize("tells", [True, False])
def test_a_loop_that_goes_on_with_an_open_window(tells):
    """Its row has the whole weight, and the mean loss of what the log has seen. So after a reset and a flush, of which
    the log may be told.
    """
    (_, step), rows = make_step(accumulate_step=4), []
    (x, y), log = tensors(*batches([6])[0]), WindowLog(rows.append)
    step(x, y)
    losses = []
    for i in range(9):
        losses.append(float(step(x, y)))
        log(step, losses[-1])
        if i == 4:  # the second window holds two microbatches
            step.reset()
        if i == 7:
            step.flush()
        if i in (4, 7) and tells:
            log(step)
    assert [row["microbatch"] for row in rows] == [3, 8]
    assert [row["weight"] for row in rows] == [24, 18]
    np.testing.assert_allclose([row["loss"] for row in rows], [np.mean(losses[:3]), np.mean(losses[5:8])], rtol=1e-5)


@pytest.mark.parametrize("left", [0, 1])
def test_a_window_that_only_a_flush_closes_after_a_resume_has_its_row(left, tmp_path):
    """In the loop of single calls, of which nothing is left to train. Control: one microbatch is left."""
    data = [tensors(*batch) for batch in batches([6] * (3 + left))]

    def run(batches, path=None):
        network = MLP()
        step = make_train_step(mean_loss(network), nn.SGD(network.trainable_params(), 0.1), 2)
        log = WindowLog(tmp_path / f"{path or 'whole'}.csv")
        if path and (tmp_path / "c.safetensors").exists():
            load_checkpoint(tmp_path / "c.safetensors", network, step)
        for batch in batches:
            log(step, step(*batch))
        if path:
            save_checkpoint(tmp_path / "c.safetensors", network, step)
        return step, log

    step, log = run(data)
    step.flush()
    log(step)
    run(data[:3], "resumed")
    step, log = run(data[3:], "resumed")
    step.flush()
    log(step)
    rows = [list(csv.DictReader((tmp_path / name).read_text().splitlines())) for name in ("whole.csv", "resumed.csv")]
    kept = [[(row["update_step"], row["loss"], row["weight"]) for row in each] for each in rows]
    assert kept[0] == kept[1]
    assert len(kept[0]) == 2


def test_the_rate_of_mints_sgd_is_the_one_it_updates_with():
    """A new value of "lr" has no effect on it, as the change of the parameters shows. Op by op, none moves (2.10)."""
    network, rows, (batch,), moved = MLP(), [], [tensors(x, y) for x, y in batches([6])], []
    weight, weights, log = network.first.weight, network.trainable_params(), WindowLog(rows.append)
    with running("jit"):
        step = make_train_step(mean_loss(network), mint.optim.SGD(weights, 0.25), 1)
        for rate in (0.25, 0.5):
            ops.assign(step.accumulator.optimizer.param_groups[0]["lr"], rate)
            before = weight.asnumpy().copy()
            gradient = ms.value_and_grad(mean_loss(network), None, weights)(*batch)[1][0].asnumpy().copy()
            log(step, step(*batch))
            moved.append(np.linalg.norm(before - weight.asnumpy()) / np.linalg.norm(gradient))
    assert [row["learning_rate"] for row in rows] == pytest.approx(moved, rel=1e-3)
    with pytest.raises(ValueError, match="follows another train step; give each step a WindowLog of its own"):
        log(make_cell()[1], 1.0)


def test_a_loss_that_comes_with_aux_is_logged():
    network, rows, (batch, *_) = MLP(), [], [tensors(*batch) for batch in batches([6])]

    def forward_fn(x, y):
        return LOSS(network(x), y), network(x).max()

    step = make_train_step(forward_fn, nn.SGD(network.trainable_params(), 0.1), 1, has_aux=True)
    loss, aux = step(*batch)
    WindowLog(rows.append)(step, (loss, aux))
    assert [row["loss"] for row in rows] == [float(loss)] != [float(aux)]


def test_seconds_are_those_since_the_row_before(monkeypatch):
    """By a clock that the loop sets. Control: the rows differ."""
    now, rows = {"time": 100.0}, []
    monkeypatch.setattr("ms_accum.model.callbacks.perf_counter", lambda: now["time"])
    network = MLP()
    step, log = make_train_step(mean_loss(network), nn.SGD(network.trainable_params(), 0.1), 2), WindowLog(rows.append)
    for (x, y), seconds in zip(batches([6, 4, 3, 5, 2, 2]), (1, 2, 3, 1, 0.5, 1.5)):
        now["time"] += seconds
        log(step, step(*tensors(x, y)))
    assert [(row["seconds"], row["weight_per_second"]) for row in rows] == [(3, 10 / 3), (4, 2.0), (2, 2.0)]


def test_a_loop_that_goes_back_to_a_checkpoint_logs_all_its_windows(tmp_path):
    """In one process, to an open window and to closed ones."""
    for saved, ran, after, updates in ((4, 6, 5, [1, 2, 3, 3, 4]), (3, 6, 3, [1, 2, 3, 3]), (2, 3, 4, [1, 2, 2, 3])):
        network, rows = MLP(), []
        step = make_train_step(mean_loss(network), nn.SGD(network.trainable_params(), 0.1), {0: 2, 1: 1, 2: 3})
        log, batch = WindowLog(rows.append), tensors(*batches([6])[0])
        for i in range(ran):
            log(step, step(*batch))
            if i + 1 == saved:
                save_checkpoint(tmp_path / "a.safetensors", network, step)
        load_checkpoint(tmp_path / "a.safetensors", network, step)
        for _ in range(after):
            log(step, step(*batch))
        step.accumulator.reset()
        assert [row["update_step"] for row in rows] == updates


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("held", [1, 2, 3])
def test_a_window_of_one_microbatch_after_a_reset_has_its_own_loss(held, eager):
    """After the log, which does not know of the reset. Controls: a reset before the log; a window that was applied, of
    which the log was told or not: then one row stands for two windows."""
    for act in ("reset", "reset before", "apply", "apply untold", "nothing"):
        network, rows, losses = MLP(), [], []
        step = make_train_step(mean_loss(network), nn.SGD(network.trainable_params(), 0.1), 4, eager=eager)
        log = WindowLog(rows.append)
        for i, loss in enumerate(step.epoch([tensors(*batch) for batch in batches([6] * (4 + held + 1))])):
            losses.append(float(loss))
            if (act, i) == ("reset before", 3 + held):
                step.accumulator.reset()
            log(step, loss)
            if i == 3 + held and act in ("reset", "apply", "apply untold"):
                getattr(step.accumulator, act.partition(" ")[0])()
                if act == "apply":
                    log(step)
        if act == "apply untold":
            assert np.isnan([rows[-1]["loss"], rows[-1]["weight"]]).all()
            continue
        expected = {"reset": losses[-1:], "reset before": losses[-1:], "nothing": losses[4:],
                    "apply": losses[-1:]}[act]
        assert rows[-1]["loss"] == pytest.approx(np.mean(expected), rel=1e-6)
        assert (rows[-1]["weight"], len(rows)) == (6 * len(expected), 3 if act == "apply" else 2)


@pytest.mark.parametrize("sets", ["learning_rate", "Parameter"])
def test_a_row_has_the_rate_of_its_update_also_if_the_body_sets_another_before_the_log(sets):
    """Control: a Parameter that the body assigns itself."""
    network, rows = MLP(), []
    step = make_train_step(mean_loss(network), nn.SGD(network.trainable_params(), 0.1), 2, eager=True)
    log = WindowLog(rows.append)
    for i, loss in enumerate(step.epoch([tensors(*batch) for batch in batches([6] * 6)])):
        if step.updated and sets == "learning_rate":
            step.learning_rate = 0.05
            step.learning_rate *= 0.5 ** (i // 2)
        elif step.updated:
            ops.assign(step.accumulator.optimizer.learning_rate, 0.05 * 0.5 ** (i // 2))
        log(step, loss)
    expected = [0.1, 0.05, 0.025] if sets == "learning_rate" else [0.05, 0.025, 0.0125]
    assert [row["learning_rate"] for row in rows] == pytest.approx(expected)


@pytest.mark.parametrize("logs", [1, 2])
def test_a_log_whose_run_goes_back_in_one_process_has_the_rows_of_a_new_start(logs, tmp_path):
    """Its epochs, too. Control: the rates of updates 2 and 3, which were made twice."""
    network = MLP()
    step = make_train_step(mean_loss(network), nn.SGD(network.trainable_params(), 0.1), 2, eager=True)
    files, rows = [tmp_path / f"{i}.csv" for i in range(logs)], []
    made = [*map(WindowLog, files), WindowLog(rows.append)]

    def train():
        for loss in step.epoch([tensors(*batches([6])[0])] * 6, resume=step.trained > 0):
            for log in made:
                log(step, loss)
            if step.trained == 2 and step.updated:
                save_checkpoint(tmp_path / "a.safetensors", network, step)

    train()
    load_checkpoint(tmp_path / "a.safetensors", network, step)
    step.learning_rate = 0.05
    train()
    train()
    rates = {1: 0.1, **dict.fromkeys(range(2, 7), 0.05)}
    for file in files:
        read = [(int(row["epoch"]), int(row["update_step"]), float(row["learning_rate"]))
                for row in csv.DictReader(file.open())]
        assert read == [(1 + (update > 3), update, pytest.approx(rate)) for update, rate in rates.items()]
    assert [(row["epoch"], row["update_step"]) for row in rows] == [
        (1, 1), (1, 2), (1, 3), (1, 2), (1, 3), (2, 4), (2, 5), (2, 6)]


def test_epochs_are_counted_over_calls_of_model_train():
    """As a run that is resumed trains. Controls: one call; without `FlushCallback`, nobody says that an epoch ends."""
    def epochs(calls, *others):
        (_, cell), rows = make_cell(accumulate_step=2), []
        for each in calls:
            Model(cell).train(each, dataset_of(batches([6] * 3)), dataset_sink_mode=False,
                              callbacks=[*others, WindowLog(rows.append)])
        cell.accumulator.reset()
        return [row["epoch"] for row in rows]

    assert epochs([1, 1, 2], FlushCallback()) == epochs([4], FlushCallback()) == [1, 1, 2, 2, 3, 3, 4, 4]
    assert epochs([1, 1, 2]) == [1, 1, 1, 1, 2, 2]


@pytest.mark.parametrize("skips", [True, False])
def test_a_model_goes_on_in_the_middle_of_an_epoch_with_what_is_left(skips, tmp_path):
    """With all of it, a warning says what to call. With `initial_epoch`, a log counts as `Model` does."""
    def data():
        return dataset_of(batches([6] * 4))

    network, cell = make_cell(accumulate_step=2)
    Model(cell).train(2, data(), callbacks=[FlushCallback()], dataset_sink_mode=False)
    for batch in batches([6] * 2):
        cell(*tensors(*batch))
    save_checkpoint(tmp_path / "c.safetensors", network, cell)
    network, cell = make_cell(accumulate_step=2)
    load_checkpoint(tmp_path / "c.safetensors", network, cell)
    trained, rows = cell.status().trained, []
    assert trained == 2
    with recorded_warnings() as caught:
        Model(cell).train(1, data().skip(trained) if skips else data(), callbacks=[FlushCallback()],
                          dataset_sink_mode=False)
    assert [str(each.message).partition(",")[0] for each in caught] == [
        "the checkpoint was saved after 2 microbatches of an epoch"] * (not skips)
    with recorded_warnings() as caught:
        Model(cell).train(5, data(), callbacks=[FlushCallback(), WindowLog(rows.append)], dataset_sink_mode=False,
                          initial_epoch=3)
    assert not caught
    assert [row["epoch"] for row in rows] == [4, 4, 5, 5]


@pytest.mark.parametrize("at", [3, 4, 5])
def test_a_log_goes_on_in_the_window_of_a_file_that_the_loop_goes_back_to(at):
    """With what the file holds of it. Control: the losses differ."""
    network, rows, data = MLP(), [], [tensors(*batch) for batch in batches([6] * 8)]
    step, log = make_train_step(mean_loss(network), nn.SGD(network.trainable_params(), 0.0), 3), WindowLog(rows.append)
    losses = []
    for i, loss in enumerate(step.epoch(data)):
        losses.append(float(loss))
        log(step, loss)
        if i == 1:
            save_checkpoint("open.safetensors", network, step)
        if i == at:
            load_checkpoint("open.safetensors", network, step)
    seen = [*losses[:2], losses[at + 1]]
    assert rows[-2]["loss"] == pytest.approx(np.mean(seen))
    assert len({*seen}) == 3


@pytest.mark.parametrize("update", [2, 3])
@pytest.mark.parametrize("held", [2, 3])
def test_a_load_in_on_update_leaves_no_row_of_what_it_has_undone(held, update):
    """The next row is that of the file's window. Control: the losses differ."""
    network, rows, data = MLP(), [], [tensors(*batch) for batch in batches([6] * 12)]
    step, log = make_train_step(mean_loss(network), nn.SGD(network.trainable_params(), 0.0), 2), WindowLog(rows.append)
    losses, files = [], ["file.safetensors"]

    def load():
        if step.status().update_step == update and files:
            load_checkpoint(files.pop(), network, step)

    step.on_update(load)
    with recorded_warnings() as caught:
        for i, loss in enumerate(step.epoch(data)):
            losses.append(float(loss))
            log(step, loss)
            if i + 1 == held:
                save_checkpoint("file.safetensors", network, step)
    assert not caught
    undone = 2 * update - 1  # the microbatch that has led to the load
    after = losses[undone + 1:]
    expected = [*zip(losses[0:undone - 1:2], losses[1:undone - 1:2])]
    if held == 3:  # an open window
        expected.append((losses[2], after.pop(0)))
    expected += [*zip(after[::2], after[1::2])]
    assert [row["loss"] for row in rows][:len(expected)] == pytest.approx([np.mean(pair) for pair in expected])
    assert len({*losses}) == 12


@pytest.mark.parametrize("loads", [1, 0])
def test_callbacks_begin_with_a_file_that_a_later_one_loads_when_training_begins(loads):
    """The rows of the run before are kept. Control: without the load, a new run overwrites them."""
    network, cell = make_cell(accumulate_step=2)
    inner = Recorder()
    train(cell, WindowLog("rows.csv"), data=dataset_of(batches([6] * 4)))
    save_checkpoint("end.safetensors", network, cell)
    network, cell = make_cell(accumulate_step=2)
    loading = LambdaCallback(on_train_begin=lambda _: load_checkpoint("end.safetensors", network, cell))
    train(cell, PerUpdate(inner), WindowLog("rows.csv"), *[loading] * loads,
          data=dataset_of(batches([6] * 4)))
    with open("rows.csv", newline="", encoding="utf-8") as file:
        rows = [(int(row["update_step"]), float(row["weight"])) for row in csv.DictReader(file)]
    assert rows == [(1, 12), (2, 12), (3, 12), (4, 12)][:2 + 2 * loads]
    assert inner.steps == ([3, 4] if loads else [1, 2])


@pytest.mark.parametrize("at", ["on_train_step_end", "on_train_epoch_end"])
@pytest.mark.parametrize("is_first", [True, False])
def test_callbacks_go_on_where_another_one_loads_an_older_file(at, is_first):
    """Each update after the load counts, and has its row. Control: nothing is loaded."""
    for loads in (False, True):
        (network, cell), inner = make_cell(accumulate_step=2), Recorder()

        def save_or_load(context, network=network, cell=cell, loads=loads):
            if context.original_args().cur_step_num == 4:  # after update 2
                save_checkpoint("old.safetensors", network, cell)
            elif context.original_args().cur_step_num == 8 and loads:
                with recorded_warnings():
                    load_checkpoint("old.safetensors", network, cell)

        watching = [PerUpdate(inner), WindowLog("rows.csv")]
        going_back = LambdaCallback(**{at: save_or_load})
        train(cell, *([going_back, *watching] if is_first else [*watching, going_back]), epochs=3,
              data=dataset_of(batches([6] * 4)))
        with open("rows.csv", newline="", encoding="utf-8") as file:
            rows = [(int(row["update_step"]), int(row["microbatch"])) for row in csv.DictReader(file)]
        # What an earlier callback has undone is not passed on.
        undone = loads and is_first and at == "on_train_step_end"
        assert inner.steps == ([1, 2, 3, *[4] * (not undone), 3, 4] if loads else [1, 2, 3, 4, 5, 6])
        assert rows == [(1, 2), (2, 4), *([(3, 10), (4, 12)] if loads else [(3, 6), (4, 8), (5, 10), (6, 12)])]


@pytest.mark.parametrize("driver", ["a new log", "a told log", "the same log", "Model"])
@pytest.mark.parametrize("held", [1, 2])
def test_a_window_that_goes_on_after_a_resume_reports_its_whole_loss(driver, held, monkeypatch):
    """Its weight, too, of uneven microbatches; the window is closed by the next microbatch or by a later one. Controls:
    the window is reset after the load, or the file holds nothing of the log.
    """
    data, rows = batches([6, 2, 4]), []

    def made():
        return *(make_cell if driver == "Model" else make_step)(accumulate_step=3), WindowLog(rows.append)

    run = partial(follow, driver)

    def row_of_the_resumed(is_reset=False):
        network, step, log = made()
        run(log, step, data[:held])
        save_checkpoint("c.safetensors", network, step)
        if driver != "the same log":
            network, step, log = made()
        else:
            run(log, step, data[:1])  # may close the window
        load_checkpoint("c.safetensors", network, step)
        with recorded_warnings() as caught:
            if driver == "a told log":
                log(step)
            if is_reset:
                step.accumulator.reset()
            run(log, step, data if is_reset else data[held:])
        row, said = rows.pop(), [str(each.message) for each in caught if "WindowLog" in str(each.message)]
        return row["loss"], step.accumulator.status().window_weight, said

    _, step, log = made()
    run(log, step, data)
    whole = pytest.approx(rows.pop()["loss"], rel=1e-6), 12, []
    assert row_of_the_resumed() == whole
    assert row_of_the_resumed(is_reset=True) == whole
    monkeypatch.setattr(Boundary, "losses", lambda boundary: ())
    assert row_of_the_resumed() != whole


@pytest.mark.parametrize("driver", ["step", "Model"])
@pytest.mark.parametrize("closes", [True, False])
def test_a_run_that_goes_on_keeps_the_rows_of_its_file(driver, closes):
    """Up to the checkpoint; those after it are written again. Also if the first microbatch closes a window (`closes`).
    Control: a new run overwrites the file. Other columns are refused.
    """
    data = batches([6, 2, 4, 3, 5, 1, 2, 2])

    def made():
        return (make_cell if driver == "Model" else make_step)(accumulate_step=2)

    run = partial(follow, driver)

    def updates():
        with open("windows.csv", newline="", encoding="utf-8") as file:
            return [int(row["update_step"]) for row in csv.DictReader(file)]

    network, step = made()
    held = 3 if closes else 2
    run(WindowLog("windows.csv"), step, data[:held])
    save_checkpoint("c.safetensors", network, step)
    run(WindowLog("windows.csv"), step, data[held:6])
    assert updates() == [1, 2, 3]
    with open("windows.csv", "a", encoding="utf-8") as file:
        file.write("1,7,")  # cut, as on a full disk
    network, step = made()
    load_checkpoint("c.safetensors", network, step)
    run(WindowLog("windows.csv"), step, data[held:])
    assert updates() == [1, 2, 3, 4]
    text = Path("windows.csv").read_text(encoding="utf-8")
    Path("windows.csv").write_text(text.replace("seen", "accuracy", 1), encoding="utf-8")
    with pytest.raises(ValueError, match=r"windows\.csv has the columns .*; give WindowLog another path"):
        run(WindowLog("windows.csv"), step, data[:1])
    Path("windows.csv").write_text(text, encoding="utf-8")
    assert updates() == [1, 2, 3, 4]
    run(WindowLog("windows.csv"), made()[1], data[:2])
    assert updates() == [1]


def test_a_row_has_the_rate_of_its_update_though_on_update_sets_the_next():
    """Control: the rate that the optimizer has when the row is written is another one."""
    (_, step), rows, now = make_step(accumulate_step=2), [], []
    log = WindowLog(lambda row: (rows.append(row["learning_rate"]), now.append(step.learning_rate)))
    first = step.learning_rate
    step.on_update(lambda: setattr(step, "learning_rate", step.learning_rate / 2))
    for loss in step.epoch([tensors(*batch) for batch in batches([4] * 5)]):
        log(step, loss)
    assert rows == pytest.approx([first, first / 2, first / 4])
    assert now == pytest.approx([first / 2, first / 4, first / 8])
    later = WindowLog(lambda row: now.append(row["epoch"]))  # it counts the epochs before it
    for loss in step.epoch([tensors(*batch) for batch in batches([4] * 4)]):
        later(step, loss)
    assert now[3:] == [2, 2]


def test_two_logs_go_on_with_the_open_window_of_a_checkpoint():
    """Control: without the checkpoint's losses, the mean is another one."""
    data = batches([6, 2, 4])

    made = partial(make_step, accumulate_step=3)
    network, step = made()
    whole = []
    log = WindowLog(whole.append)
    for i, batch in enumerate(data):
        log(step, step(*tensors(*batch)))
        if i == 1:
            save_checkpoint("c.safetensors", network, step)
    network, step = made()
    load_checkpoint("c.safetensors", network, step)
    rows = []
    logs = WindowLog(rows.append), WindowLog(rows.append)
    loss = step(*tensors(*data[2]))
    for log in logs:
        log(step, loss)
    assert [row["loss"] for row in rows] == pytest.approx([whole[0]["loss"]] * 2, rel=1e-6)
    assert float(loss) != pytest.approx(whole[0]["loss"], rel=1e-3)


@pytest.mark.parametrize("log", ["same", "new"])
def test_a_model_that_goes_on_after_an_error_logs_the_whole_window(log):
    """In one process, also by a new log. Control: the loss of the microbatch that the second call trains."""
    network, cell = make_cell(accumulate_step=3)
    data, rows = batches([6] * 6), []

    def stop(context):
        if context.original_args().cur_step_num == 2:
            raise KeyError("stop")

    def run(given, *callbacks):
        Model(cell).train(1, dataset_of(given), callbacks=[FlushCallback(), *callbacks], dataset_sink_mode=False)

    losses = [float(mean_loss(network)(*tensors(*batch))) for batch in data[:3]]
    first, late = WindowLog(rows.append), []
    with pytest.raises(KeyError):
        run(data, first, Own(on_train_step_end=stop))
    run(data[2:], first if log == "same" else WindowLog(rows.append), WindowLog(lambda row: late.append(row["loss"])))
    assert rows[0]["loss"] == pytest.approx(np.mean(losses), rel=1e-6)
    assert late == [row["loss"] for row in rows]
    assert losses[2] != pytest.approx(np.mean(losses), rel=1e-3)


@pytest.mark.parametrize("eager", [False, True])
def test_two_logs_in_one_loop_have_the_same_rows(eager):
    """Each counts each microbatch once. Control: the losses of the microbatches of a window differ."""
    network, rows = MLP(), ([], [])
    step = make_train_step(mean_loss(network), nn.SGD(network.trainable_params()), 3, eager=eager)
    logs, losses = [WindowLog(each.append) for each in rows], []
    for loss in step.epoch([tensors(*batch) for batch in batches([4] * 6)]):
        losses.append(float(loss))
        for log in logs:
            log(step, loss)
    expected = np.mean(np.reshape(losses, (2, 3)), 1)
    for each in rows:
        assert [row["loss"] for row in each] == pytest.approx(expected, rel=1e-6)
    assert losses[0] != pytest.approx(expected[0], rel=1e-3)


def test_a_log_follows_a_step():
    with pytest.raises(TypeError, match=r"^train_step is of type Accumulator, expected a train step or a TrainOneStep"):
        WindowLog(print)(make_cell()[1].accumulator, 0.0)


def test_a_log_that_begins_in_an_open_window_says_what_it_has_not_seen():
    """Control: one that begins with the window."""
    network, rows = MLP(), []
    for begins, said in ((0, []), (1, ["WindowLog was not called after 1 microbatch, so the loss of their window is"])):
        step, log = make_train_step(mean_loss(network), nn.SGD(network.trainable_params()), 3), WindowLog(rows.append)
        with recorded_warnings() as caught:
            for i, loss in enumerate(step.epoch([tensors(*batch) for batch in batches([4] * 6)])):
                if i >= begins:
                    log(step, loss)
        assert [str(each.message).partition(" that of")[0] for each in caught] == said
        assert {each.filename for each in caught} <= {__file__}


@pytest.mark.parametrize("is_first", [True, False])
def test_a_log_that_a_model_calls_after_a_save_says_what_it_has_not_seen(is_first):
    """The file lacks the last microbatch's loss, so the resumed run's first row does. Control: the log comes first."""
    part, rows = batches([4] * 4), []
    network, cell = make_cell(accumulate_step=3)
    expected = np.mean([float(mean_loss(network)(*tensors(*batch))) for batch in part[:3]])
    saving = LambdaCallback(on_train_step_end=lambda _: save_checkpoint("c.safetensors", network, cell))
    for data, callbacks in ((part[:2], [WindowLog(print), saving][::1 if is_first else -1]), (part[2:], [])):
        if not callbacks:
            network, cell = make_cell(accumulate_step=3)
            load_checkpoint("c.safetensors", network, cell)
        with recorded_warnings() as caught:
            train(cell, *callbacks, *([] if callbacks else [WindowLog(rows.append)]), data=dataset_of(data))
    said = [str(each.message) for each in caught if "WindowLog" in str(each.message)]
    assert [text[:49] for text in said] == [] if is_first else ["WindowLog was not called after 2 microbatches, so"]
    assert bool(rows[0]["loss"] == pytest.approx(expected)) is is_first


def test_a_log_that_misses_microbatches_says_so(recwarn):
    """Once. Control: a log that is called after each microbatch says nothing, over two epochs."""
    (_, step), rows = make_step(accumulate_step=2), []
    every, some = WindowLog(rows.append), WindowLog(rows.append)
    for _ in range(2):
        for loss in step.epoch([tensors(*batch) for batch in batches([4] * 5)]):
            every(step, loss)
    assert not [str(warning.message) for warning in recwarn if "WindowLog" in str(warning.message)]
    for loss in step.epoch([tensors(*batch) for batch in batches([4] * 6)]):
        if step.updated:
            some(step, loss)
    said = [warning for warning in recwarn if "WindowLog was not called after 1 microbatch, so" in str(warning.message)]
    assert [warning.filename for warning in said] == [__file__]


@pytest.mark.parametrize("stopped", [0, 1, 2])
def test_a_log_says_which_loss_an_error_after_an_update_has_kept_from_it(stopped):
    """Also at the last update of an epoch. Control: no error."""
    network, rows, updates = MLP(), [], []
    step, log = make_train_step(mean_loss(network), nn.SGD(network.trainable_params()), 2), WindowLog(rows.append)

    def save():
        updates.append(1)
        if len(updates) == stopped:
            raise OSError("no space left on device")

    step.on_update(save)
    data = [tensors(*batch) for batch in batches([4] * 4)]
    with recorded_warnings() as caught:
        for _ in range(2):
            try:
                for loss in step.epoch(data):
                    log(step, loss)
            except OSError:
                for loss in step.epoch(data, resume=True):
                    log(step, loss)
    assert (len(updates), [row["update_step"] for row in rows]) == (4, [1, 2, 3, 4])
    assert [str(each.message)[:48] for each in caught] == ["WindowLog was not called after 1 microbatch, so "] * (
        stopped > 0)
    assert rows[-1]["microbatch"] == 8


def test_per_update_shows_the_optimizer():
    """At the end of an epoch, too. Control: MindSpore's callbacks alone do not find it, and FlushCallback says so."""
    _, cell = make_cell(optimizer=partial(momentum, rate=0.5))

    def halving():
        return ReduceLROnPlateau(monitor="loss", factor=0.5, patience=1, min_delta=100.0)

    for callback in (halving(), LearningRateScheduler(lambda rate, step: rate)):
        with pytest.raises(AttributeError):
            train(cell, callback)
        cell.accumulator.reset()
        name = type(callback).__name__
        for ours in (FlushCallback(), WindowLog(print), PerUpdate(Recorder())):
            for order in ((ours, callback), (callback, ours)):
                message = rf"^{name} needs the optimizer, .* give PerUpdate\({name}\("
                with pytest.raises(ValueError, match=message):
                    train(cell, *order)
        assert int(cell.accumulator.mini_step) == 0
    train(cell, FlushCallback(), PerUpdate(halving()), epochs=3)
    assert float(cell.optimizer.learning_rate) == 0.125


@pytest.mark.parametrize("tested", [True, False])
def test_flush_after_a_stop_in_mid_epoch(tested):
    """Before the test, if there is one; and the update that it makes is counted."""
    network, cell = make_cell()
    oracle = trained_oracle(network, SIZES[:3])
    inner, open_windows = Recorder(), []
    stop = Own(on_train_step_end=lambda context: context.original_args().cur_step_num == 3 and context.request_stop(),
               on_eval_end=lambda context: open_windows.append(int(cell.accumulator.mini_step)))
    callbacks = [FlushCallback(), PerUpdate(inner), stop]
    model = Model(cell, eval_network=nn.WithEvalCell(network, nn.CrossEntropyLoss()), eval_indexes=[0, 1, 2],
                  metrics={"loss"})
    if tested:
        model.fit(4, dataset(), dataset([8]), callbacks=callbacks, dataset_sink_mode=False,
                  valid_dataset_sink_mode=False)
    else:
        train(cell, *callbacks, epochs=4)
    assert open_windows == [0] * tested
    assert inner.steps == [1, 2]
    assert int(cell.accumulator.update_step) == 2
    assert (cell.status().epochs, cell.status().trained) == (0, 3)
    assert difference(values(network.trainable_params()), oracle.parameters) <= 1e-6
    cell(*tensors(*batches([6])[0]))  # negative control: a test of its own is none of the training's
    model.eval(dataset([8]), callbacks=[FlushCallback()], dataset_sink_mode=False)
    assert int(cell.accumulator.mini_step) == 1
    train(cell, FlushCallback())  # from the first batch on: the epoch that was left has ended
    assert (cell.status().epochs, cell.status().trained) == (2, 0)


def test_flush_keeps_to_the_ends_of_epochs_that_differ_in_length():
    """MindSpore counts a dataset's microbatches once, here 3; some epochs then have 1."""
    _, cell = make_cell(accumulate_step=2)
    lengths = itertools.cycle([3, 3, 1])
    microbatch = batches([4])[0][0].astype(np.float32), batches([4])[0][1].astype(np.int32)
    epochs = []

    class Varying:
        def __iter__(self):
            return iter([microbatch] * next(lengths))

    windows = LambdaCallback(on_train_epoch_begin=lambda context: epochs.append([]),
                             on_train_step_end=lambda context: epochs[-1].append(int(cell.accumulator.mini_step)))
    varying = GeneratorDataset(Varying(), ["x", "y"], shuffle=False)
    assert varying.get_dataset_size() == 3
    train(cell, FlushCallback(), windows, epochs=6, data=varying)
    assert {1, 3} == set(map(len, epochs))
    assert all(epoch == [1, 0, 0][:len(epoch)] for epoch in epochs)


def test_a_log_of_a_training_that_failed_does_not_log_the_next_one():
    """The window that the error left open is part of the next training's first one, as a warning says."""
    _, cell = make_cell()
    first, second = [], []
    log = WindowLog(first.append)
    with pytest.raises(KeyError):
        train(cell, LambdaCallback(on_train_step_end=Mock(side_effect=KeyError)), log)
    with recorded_warnings() as caught:
        train(cell, FlushCallback(), WindowLog(second.append))
    assert [str(each.message).partition(", which")[0] for each in caught if "WindowLog" not in str(each.message)] == [
        "1 microbatches that were trained before are in an open window"]
    assert first == []
    assert [(row["microbatch"], row["weight"]) for row in second] == [(1, 12), (3, 12), (5, 8)]
    with recorded_warnings() as caught:  # none is open
        train(cell, FlushCallback(), log)
    assert not caught
    assert [row["microbatch"] for row in first] == [2, 4, 5]


@pytest.mark.parametrize("told", [True, False])
def test_a_flush_that_closes_further_windows(told, monkeypatch):
    """As on a rank that has run out of data. A log that is not told of it before knows no weight of it."""
    _, cell = make_cell(accumulate_step=3)
    flush, rows = cell.flush, []

    def flush_twice():
        flush()
        cell(*tensors(*batches([4])[0]))
        flush()

    monkeypatch.setattr(cell, "flush", flush_twice)
    flushing = FlushCallback() if told else LambdaCallback(on_train_step_end=lambda context: cell.flush())
    train(cell, flushing, WindowLog(rows.append), data=dataset([6]))
    assert rows[0]["microbatch"] == 1
    assert [np.isnan(rows[0][name]) for name in ("grad_norm", "loss", "weight")] == [True, not told, not told]


@pytest.mark.parametrize("sink_size", [-1, 2, 7])
@pytest.mark.parametrize("way", [pytest.param("graph", marks=pytest.mark.slow), "pynative"])
def test_a_sink_does_not_change_the_windows(way, sink_size):
    """On CPU, where MindSpore sinks nothing: windows of 3 and 2 of the 5 microbatches of an epoch."""
    with running(way):
        network, cell = make_cell(accumulate_step=3)
        expected, unsunk = make_cell(accumulate_step=3)
        Model(cell).train(2, dataset(), [FlushCallback()], dataset_sink_mode=True, sink_size=sink_size)
        train(unsunk, FlushCallback(), epochs=2)
    assert [int(each.accumulator.update_step) for each in (cell, unsunk)] == [4, 4]
    assert difference(values(network.trainable_params()), values(expected.trainable_params())) == 0


@pytest.mark.parametrize(("sink_size", "epochs", "updates"), [(1, 10, 4), (5, 2, 4), (1, 8, 3), (1, 7, 3)])
def test_a_sink_ends_where_an_epoch_does_or_inside_it(sink_size, epochs, updates):
    """As MindSpore sinks data on a device: an "epoch" is a sink, and a callback hears only of its end."""
    network, cell = make_cell(accumulate_step=3)
    expected, unsunk = make_cell(accumulate_step=3)
    flushing, context, rows = FlushCallback(), Sunk(cell, sink_size), list(dataset().create_tuple_iterator())
    flushing.on_train_begin(context)
    for _ in range(epochs):
        flushing.on_train_epoch_begin(context)
        for _ in range(sink_size):
            cell(*rows[context.context["cur_step_num"] % len(rows)])
            context.context["cur_step_num"] += 1
        flushing.on_train_step_end(context)
        flushing.on_eval_begin(context)
        flushing.on_train_epoch_end(context)
    flushing.on_train_end(context)
    trained = [*rows, *rows][:epochs * sink_size]
    for i, row in enumerate(trained, 1):
        unsunk(*row)
        if i in (5, len(trained)):
            unsunk.flush()
    assert [int(each.accumulator.update_step) for each in (cell, unsunk)] == [updates] * 2
    assert difference(values(network.trainable_params()), values(expected.trainable_params())) == 0


class Sunk:
    """A run context of sunk data, which no CPU run gives."""

    def __init__(self, network, sink_size=5):
        self.context = {"train_network": network, "train_dataset": dataset(), "dataset_sink_mode": True,
                        "sink_size": sink_size, "batch_num": sink_size, "cur_step_num": 0, "list_callback": []}

    def original_args(self):
        return type("Context", (dict,), {"__getattr__": dict.__getitem__})(self.context)


def test_what_does_not_fit_is_refused():
    """Two cells, no cell, sunk data, no callback, no file; control: FlushCallback takes two cells, and sunk data."""
    one, other = (make_cell(accumulate_step=n)[1] for n in (2, 4))
    train(TwoCells(one, other), FlushCallback())
    assert [int(cell.accumulator.update_step) for cell in (one, other)] == [3, 2]
    FlushCallback().on_train_begin(Sunk(one))
    plain, before = MLP(), values(MLP().trainable_params())
    model = Model(plain, nn.CrossEntropyLoss(), nn.SGD(plain.trainable_params(), 0.1))
    samples = NumpySlicesDataset({"x": np.zeros((8, 6), np.float32), "y": np.zeros(8, np.int32)})
    makers = {"FlushCallback": FlushCallback, "PerUpdate": lambda: PerUpdate(Recorder()),
              "WindowLog": lambda: WindowLog(print)}
    calls = [(partial(model.train, 1, dataset(), [make()], dataset_sink_mode=False),
              r"without a TrainOneStepCell of ms_accum in it; give Model\(TrainOneStep") for make in makers.values()]
    for name in ("PerUpdate", "WindowLog"):
        calls += [
            (partial(train, TwoCells(one, other), makers[name]()), f"{name} found 2 TrainOneStepCells, expected one"),
            (partial(makers[name]().on_train_begin, Sunk(one)), f"{name} got dataset_sink_mode=True, which hides sin")]
    labelled = Model(one, nn.CrossEntropyLoss())
    calls += [(partial(labelled.train, 1, dataset(), [make()], dataset_sink_mode=False),
               r"^Model got a loss_fn together with a TrainOneStepCell, .*; give "
               r"Model\(TrainOneStepCell\(nn\.WithLossCell\(")
              for make in makers.values()]
    two_rates = make_cell(optimizer=partial(momentum, rate=[0.3, 0.1]))[1]  # the third update is the flush's
    calls += [
        (partial(train, two_rates, FlushCallback()), "list of 2 learning rates is used up"),
        *((partial(FlushCallback().on_train_begin, Sunk(one, size)),
           rf"^sink_size is {size}, expected a divisor of the 5 microbatches of an epoch: inside a sink, .*; give sink")
          for size in (2, 10)),
        (partial(train, one, FlushCallback(), data=samples), r"yields samples of NumpySlicesDataset one by one"),
        (partial(train, one, ModelCheckpoint(), FlushCallback()), "ModelCheckpoint stands before FlushCallback")]
    for call, message in calls:
        with pytest.raises(ValueError, match=message):
            call()
    for call, error, message in (
            (partial(PerUpdate, print), TypeError, r"callback is of type builtin_function_or_method, expected a"),
            (partial(WindowLog, 3), TypeError, "to is of type int, expected the path of a CSV file or a function"),
            (partial(train, one, WindowLog("nowhere/a.csv")), FileNotFoundError, r"nowhere/a\.csv")):
        with pytest.raises(error, match=message):
            call()
    assert difference(values(plain.trainable_params()), before) == 0
