"""FlushCallback and PerUpdate in `mindspore.train.Model`: when they act, and what they refuse. See also test_model.py."""
import itertools

import numpy as np
import pytest
from conftest import MLP, batches, difference, tensors, values
from following import LOSS
from mindspore import nn
from mindspore.dataset import GeneratorDataset
from mindspore.train import Callback, LearningRateScheduler, LossMonitor, Model, ReduceLROnPlateau
from model_runs import SIZES, Recorder, TwoCells, dataset, make_cell, train, trained_oracle

from ms_accum import FlushCallback, PerUpdate, WindowLog


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


# --- refusals -------------------------------------------------------------------------------------------------------------------


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
