"""FlushCallback and PerUpdate in `mindspore.train.Model`: epochs, their last windows, updates, and what is an error."""
import itertools
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mindspore import nn
from mindspore.dataset import GeneratorDataset, NumpySlicesDataset
from mindspore.train import EarlyStopping, LambdaCallback, LearningRateScheduler, Model, ModelCheckpoint
from mindspore.train import ReduceLROnPlateau as Plateau
from support import reference
from support.model_runs import SIZES, TwoCells, dataset, dataset_of, load, make_cell, momentum, saved, train
from support.modes import recorded_warnings

from ms_accum import FlushCallback, PerUpdate, WindowLog
from ms_accum.selftest.comparing import difference, values
from ms_accum.selftest.networks import MLP, batches, tensors

pytestmark = pytest.mark.usefixtures("uncompiled")


class Own(LambdaCallback):
    """A user's: `Model.fit` does not tell MindSpore's own of its evaluations."""


class Recorder(LambdaCallback):
    """The numbers of the microbatches, how many began, and the events it saw."""

    def __init__(self):
        self.steps, self.events, self.begun = [], [], []
        noted = {f"on_train_{event}": lambda context, event=event: self.events.append(event)
                 for event in ("begin", "epoch_begin", "epoch_end", "end")}
        super().__init__(on_train_step_begin=self.begun.append, **noted,
                         on_train_step_end=lambda context: self.steps.append(context.original_args().cur_step_num))


def place(cell):
    return cell.status().epochs, cell.status().trained


@pytest.mark.parametrize("examples", [10, pytest.param(100, marks=pytest.mark.slow)])
def test_an_update_for_each_window_a_call_and_a_row_for_each_update(examples):
    settings(max_examples=examples)(given(st.data())(updates_and_calls))()


def updates_and_calls(data):
    """As the oracle has them, with FlushCallback before or behind, and with a callback that flushes and resets."""
    draw = data.draw
    length = draw(st.sampled_from([1, 2, 3, {0: 2, 2: 3}]))
    on_nonfinite = draw(st.sampled_from(["apply", "skip_window"]))
    _, cell = make_cell(length, on_nonfinite=on_nonfinite)
    oracle = reference.Accumulation(
        values(cell.optimizer.parameters), reference.SGD(0.1, 0.9), length, "mean", 0.7, on_nonfinite)
    epoch = batches(draw(st.lists(st.integers(1, 7), min_size=1, max_size=6)), seed=2)
    if on_nonfinite != "apply":
        epoch[draw(st.integers(0, len(epoch) - 1))][0][:] = np.nan
    acts = draw(st.dictionaries(st.integers(1, 2 * len(epoch)), st.sampled_from(["reset", "flush"]), max_size=3))
    # At the end of an epoch, whether there is a window to flush depends on who resets or flushes first.
    acts = {microbatch: act for microbatch, act in acts.items() if act == "flush" or microbatch % len(epoch)}
    functions = {"reset": cell.reset, "flush": cell.flush, None: int}
    meddling = LambdaCallback(on_train_step_end=lambda context: functions[
        acts.get(context.original_args().cur_step_num)]())
    inner, outer, rows = Recorder(), Recorder(), []
    callbacks = [FlushCallback(), WindowLog(rows.append)][::draw(st.sampled_from([1, -1]))]
    callbacks = [meddling, *callbacks] if draw(st.booleans()) else [*callbacks, meddling]
    train(cell, *callbacks, PerUpdate(inner), outer, epochs=2, data=dataset_of(epoch))

    expected, losses = [], []  # epoch, microbatch, update, loss, weight, skipped
    for number, (microbatch, (x, y)) in itertools.product((1, 2), enumerate(epoch, 1)):
        loss, gradients = reference.loss_and_gradients(oracle.parameters, x, y)
        losses = [(loss, len(x))] if oracle.mini_step == 0 else [*losses, (loss, len(x))]
        updates, act = oracle.update_step, acts.get((number - 1) * len(epoch) + microbatch)
        is_closed = oracle(gradients, len(x))
        if act == "reset":
            oracle.reset()
        elif not is_closed and (act == "flush" or microbatch == len(epoch)):
            oracle.flush()
        if oracle.update_step > updates:
            means, weights = zip(*losses)
            expected.append([number, microbatch, oracle.update_step, np.average(means, weights=weights),
                             oracle.window_weight, oracle.skipped])
    columns = ("epoch", "microbatch", "update_step", "loss", "weight", "skipped")
    np.testing.assert_allclose([[row[name] for name in columns] for row in rows], expected, rtol=1e-4)
    assert difference(values(cell.optimizer.parameters), oracle.parameters) <= 1e-5
    assert place(cell) == (2, 0)
    assert inner.steps == [*range(1, oracle.update_step + 1)]
    assert outer.steps == [*range(1, 2 * len(epoch) + 1)], "the run's own count is put back"
    assert len(inner.steps) <= len(inner.begun) <= len(inner.steps) + 1 <= len(outer.begun) + 1 == 2 * len(epoch) + 1
    assert inner.events == outer.events == ["begin", *2 * ["epoch_begin", "epoch_end"], "end"]


@pytest.mark.parametrize("held", [1, 2, 3])
def test_a_run_goes_on_inside_an_epoch_with_what_the_dataset_has_left(held):
    """After a load, by another process; after an interrupt, in the same one. Then epochs begin at 0 again. The rows and
    parameters are those of the unbroken run. Control: with all of the data, an open window is an error.
    """
    data, broken, rows = batches([6, 4, 6, 2]), [], {True: [], False: []}

    def stop(context):
        if context.original_args().cur_step_num == 4 + held and not broken:
            broken.append(saved(cell))
            raise KeyboardInterrupt

    def made():
        return make_cell(accumulate_step=2)[1]

    def log(rows):
        return WindowLog(lambda row: rows.append([*row.values()][:5]))

    cell, whole, ends = made(), [], []
    train(cell, FlushCallback(), log(whole), LambdaCallback(on_train_step_end=lambda _: ends.append(place(cell))),
          epochs=3, data=dataset_of(data))
    expected = values(cell.optimizer.parameters)
    assert ends[:4] == [(0, 1), (0, 2), (0, 3), (1, 0)], "what a callback saves"
    for loads in (True, False):
        cell, broken = made(), []
        with pytest.raises(KeyboardInterrupt):
            train(cell, FlushCallback(), log(rows[loads]), LambdaCallback(on_train_step_end=stop), epochs=2,
                  data=dataset_of(data))
        assert place(cell) == (1, held)
        if loads:
            cell, broken_by_load = made(), broken[0]
            load(cell, broken[0])
            assert place(cell) == (1, held - held % 2)
        elif held % 2:
            message = r"a window of 1 microbatch\(es\) is open, .*dataset\.skip\(cell\.status\(\)\.trained\)"
            with pytest.raises(RuntimeError, match=message):
                train(cell, FlushCallback(), data=dataset_of(data))
        with recorded_warnings() as caught:
            train(cell, FlushCallback(), log(rows[loads]), data=dataset_of(data).skip(cell.status().trained))
        assert (place(cell), caught) == ((2, 0), [])
        train(cell, FlushCallback(), log(rows[loads]), data=dataset_of(data))
        assert place(cell) == (3, 0)
        np.testing.assert_allclose(rows[loads], whole, rtol=1e-5)
        assert difference(values(cell.optimizer.parameters), expected) <= 1e-6
    if held > 1:
        load(cell, broken_by_load)
        with pytest.warns(UserWarning, match="stopped after 2 batches of an epoch, which the dataset does not skip"):
            train(cell, FlushCallback(), data=dataset_of(data))


@pytest.mark.parametrize("tested", [True, False])
def test_flush_after_a_stop_in_mid_epoch(tested):
    """Before the test, if there is one; and the update that it makes is counted. The epoch is not finished."""
    network, cell = make_cell()
    inner, open_windows = Recorder(), []
    stop = Own(on_train_step_end=lambda context: context.original_args().cur_step_num == 3 and context.request_stop(),
               on_eval_end=lambda context: open_windows.append(cell.status().mini_step))
    model = Model(cell, eval_network=nn.WithEvalCell(network, nn.CrossEntropyLoss()), eval_indexes=[0, 1, 2],
                  metrics={"loss"})
    options = {"callbacks": [FlushCallback(), PerUpdate(inner), stop], "dataset_sink_mode": False}
    if tested:
        model.fit(4, dataset(), dataset([8]), valid_dataset_sink_mode=False, **options)
    else:
        model.train(4, dataset(), **options)
    assert (open_windows, inner.steps, cell.update_step, place(cell)) == ([0] * tested, [1, 2], 2, (0, 3))
    expected, plain = make_cell()
    train(plain, FlushCallback(), data=dataset(SIZES[:3]))
    assert difference(values(network.trainable_params()), values(expected.trainable_params())) == 0
    cell(*tensors(*batches([6])[0]))  # negative control: a test of its own is none of the training's
    model.eval(dataset([8]), callbacks=[FlushCallback()], dataset_sink_mode=False)
    assert cell.status().mini_step == 1
    cell.flush()
    train(cell, FlushCallback())  # from the first batch on: the epoch that was left is begun again
    assert place(cell) == (1, 0)


def test_flush_keeps_to_the_ends_of_epochs_that_differ_in_length():
    """MindSpore counts a dataset's microbatches once, here 3; some epochs then have 1."""
    _, cell = make_cell(accumulate_step=2)
    lengths, epochs, (x, y) = itertools.cycle([3, 3, 1]), [], batches([4])[0]

    class Varying:
        def __iter__(self):
            return iter([(x.astype(np.float32), y.astype(np.int32))] * next(lengths))

    windows = LambdaCallback(on_train_epoch_begin=lambda context: epochs.append([]),
                             on_train_step_end=lambda context: epochs[-1].append(cell.status().mini_step))
    train(cell, FlushCallback(), windows, epochs=6, data=GeneratorDataset(Varying(), ["x", "y"], shuffle=False))
    assert {1, 3} == set(map(len, epochs))
    assert all(epoch == [1, 0, 0][:len(epoch)] for epoch in epochs)
    assert place(cell) == (6, 0)


def test_per_update_counts_from_a_file_that_a_later_callback_loads():
    """When training begins, or later, an older one: each update after the load counts. Control: without a load."""
    _, cell = make_cell(accumulate_step=2)
    train(cell, data=dataset([6] * 4))
    file = saved(cell)
    for at, number, steps in (("on_train_begin", 0, [3, 4, 5, 6]), ("on_train_step_end", 4, [1, 2, 3, 4]),
                              ("on_train_end", 8, [1, 2, 3, 4])):
        _, cell = make_cell(accumulate_step=2)
        inner = Recorder()

        def act(context, cell=cell, number=number):
            if context.original_args().cur_step_num == number:
                load(cell, file)

        train(cell, PerUpdate(inner), LambdaCallback(**{at: act}), epochs=2, data=dataset([6] * 4))
        assert inner.steps == steps


def test_callbacks_that_set_the_rate_are_given_to_per_update():
    """It shows the optimizer. Outside, MindSpore's callbacks do not find it, as each of ours says."""
    _, cell = make_cell(optimizer=partial(momentum, rate=0.5))

    def halving():
        return Plateau(monitor="loss", factor=0.5, patience=1, min_delta=100.0)

    restoring, memory = EarlyStopping(monitor="loss", restore_best_weights=True), r"restore with ms_accum.load_weights"
    for callback, message in (
            (halving(), r"^ReduceLROnPlateau needs the optimizer, .* give PerUpdate\(ReduceLROnPlateau\("),
            (LearningRateScheduler(lambda rate, step: rate), r"give PerUpdate\(LearningRateScheduler\("),
            (restoring, memory), (PerUpdate(restoring), memory)):
        for ours in (FlushCallback(), WindowLog(print), PerUpdate(Recorder())):
            with pytest.raises(ValueError, match=message):
                train(cell, ours, callback)
    assert cell.status().mini_step == 0
    train(cell, FlushCallback(), PerUpdate(halving()), EarlyStopping(monitor="loss", patience=9), epochs=3)
    assert float(cell.optimizer.learning_rate) == 0.125


def test_a_list_of_rates_may_end_with_the_training_and_not_before():
    """Three updates; the third is the flush's."""
    exact, short = (make_cell(optimizer=partial(momentum, rate=[0.3] * rates))[1] for rates in (3, 2))
    train(exact, FlushCallback())
    with pytest.raises(ValueError, match="list of learning rates is used up"):
        train(short, FlushCallback())
    assert (exact.update_step, short.update_step) == (3, 2)


class Sunk:
    """A run context of sunk data, which no CPU run gives."""

    def __init__(self, network, sink_size=5):
        self.context = {"train_network": network, "train_dataset": dataset(), "dataset_sink_mode": True,
                        "sink_size": sink_size, "batch_num": sink_size, "cur_step_num": 0, "list_callback": []}

    def original_args(self):
        return type("Context", (dict,), {"__getattr__": dict.__getitem__})(self.context)

    def get_stop_requested(self):
        return False


@pytest.mark.parametrize(("sink_size", "epochs", "updates"), [(1, 10, 4), (5, 2, 4), (1, 8, 3), (1, 7, 3)])
def test_a_sink_ends_where_an_epoch_does_or_inside_it(sink_size, epochs, updates):
    """As MindSpore sinks data on a device: an "epoch" is a sink, and a callback hears only of its end."""
    (network, cell), (expected, plain) = make_cell(accumulate_step=3), make_cell(accumulate_step=3)
    flushing, context, rows = FlushCallback(), Sunk(cell, sink_size), [tensors(*batch) for batch in batches(SIZES)]
    flushing.on_train_begin(context)
    for _ in range(epochs):
        flushing.on_train_epoch_begin(context)
        flushing.on_train_step_begin(context)
        for _ in range(sink_size):
            cell(*rows[context.context["cur_step_num"] % len(rows)])
            context.context["cur_step_num"] += 1
        for event in (flushing.on_train_step_end, flushing.on_eval_begin, flushing.on_train_epoch_end):
            event(context)
    flushing.on_train_end(context)
    trained = epochs * sink_size
    for i in range(trained):
        plain(*rows[i % len(rows)])
        if i + 1 in (5, trained):
            plain.flush()
    assert (cell.update_step, plain.update_step, place(cell)) == (updates, updates, divmod(trained, 5))
    assert difference(values(network.trainable_params()), values(expected.trainable_params())) == 0


def test_what_does_not_fit_is_an_error_when_training_begins():
    """Control: FlushCallback takes two cells, and sunk data."""
    one, other = (make_cell(accumulate_step=n)[1] for n in (2, 4))
    train(TwoCells(one, other), FlushCallback())
    assert [cell.update_step for cell in (one, other)] == [3, 2]
    FlushCallback().on_train_begin(Sunk(one))
    plain, calls = MLP(), []
    samples = NumpySlicesDataset({"x": np.zeros((8, 6), np.float32), "y": np.zeros(8, np.int32)})
    for make in (FlushCallback, lambda: PerUpdate(Recorder()), lambda: WindowLog(print)):
        for network, optimizer, message in (
                (plain, nn.SGD(plain.trainable_params(), 0.1), "without a TrainOneStepCell of ms_accum in it; give"),
                (one, None, r"^Model got a loss_fn together with a TrainOneStepCell, .*; give Model\(TrainOneStep")):
            model = Model(network, nn.CrossEntropyLoss(), optimizer)
            calls.append((partial(model.train, 1, dataset(), [make()], dataset_sink_mode=False), message))
        if make is not FlushCallback:
            calls += [(partial(train, TwoCells(one, other), make()), r"^\w+ found 2 TrainOneStepCells, expected one"),
                      (partial(make().on_train_begin, Sunk(one)), r"^\w+ got dataset_sink_mode=True, which hides")]
    calls += [
        (partial(FlushCallback().on_train_begin, Sunk(one, 2)),
         r"^sink_size is 2, expected a divisor of the 5 microbatches of an epoch, so that .*; give sink"),
        (partial(train, one, FlushCallback(), data=samples), r"yields samples of NumpySlicesDataset one by one"),
        (partial(train, one, ModelCheckpoint(), FlushCallback()), "ModelCheckpoint stands before FlushCallback")]
    for call, message in calls:
        with pytest.raises(ValueError, match=message):
            call()
    with pytest.raises(TypeError, match=r"callback is of type builtin_function_or_method, expected a"):
        PerUpdate(print)
    assert difference(values(plain.trainable_params()), values(MLP().trainable_params())) == 0
