"""Callbacks for a `Model` with a `TrainOneStepCell`: begin and end epochs, and count updates."""
from __future__ import annotations

from functools import partialmethod
from itertools import takewhile
from warnings import warn

from mindspore import train
from mindspore.train import Callback, RunContext

from ..arguments import instance_of
from ..mindspore_api import is_skipping
from ..steps.batch import require_batched
from .cell import TrainOneStepCell


class FlushCallback(Callback):
    """Begin and end epochs, and apply the incomplete last window of each. Use it with every `TrainOneStepCell`.

    Put it before callbacks that save or read the weights. It flushes each cell after microbatch number
    `dataset.get_dataset_size()`, before `Model.fit` evaluates. With `sink_size`, epochs are those of the dataset.

    `cell.status()` has the place: `epochs` finished, and microbatches `trained` since. After the load of a file from
    inside an epoch, or an interrupt, `model.train(1, dataset.skip(cell.status().trained), ...)` goes on there; later
    epochs begin at 0. An epoch that a callback stops with `request_stop` is not finished.

    Raises:
        ValueError: When training begins: without a `TrainOneStepCell`; if a `LearningRateScheduler` or
            `ReduceLROnPlateau` is not in `PerUpdate`; for `EarlyStopping(restore_best_weights=True)`; if a dataset has
            no batch operation, or an epoch ends inside a sink. Later: if a list of learning rates is used up.
        RuntimeError: When an epoch begins in an open window of another one, or a parameter has new memory.

    Source: Lightning and HF Accelerate also apply the last window, but divide it by the full length.

    Example:
        >>> import numpy as np
        >>> from mindspore import dataset, nn, train
        >>> from ms_accum import FlushCallback, PerUpdate, TrainOneStepCell
        >>> rows = [(np.ones((4, 2), np.float32), np.full((4, 1), y, np.float32)) for y in (4, 5, 9)]
        >>> data = dataset.GeneratorDataset(rows, ["data", "label"], shuffle=False)
        >>> network = nn.Dense(2, 1, weight_init="ones", bias_init="zeros")
        >>> optimizer = nn.SGD(network.trainable_params(), learning_rate=0.5)
        >>> cell = TrainOneStepCell(nn.WithLossCell(network, nn.L1Loss()), optimizer, accumulate_step=2)
        >>> halving = PerUpdate(train.LearningRateScheduler(lambda rate, update_step: rate / 2))
        >>> train.Model(cell).train(1, data, callbacks=[FlushCallback(), halving], dataset_sink_mode=False)
        >>> print(cell.status().update_step, cell.status().epochs, float(optimizer.learning_rate))
        2 1 0.125
    """

    def __init__(self) -> None:
        super().__init__()
        self._begin = self._length = self._is_sunk = 0  # of the dataset's epoch; whether data is sunk

    def on_train_begin(self, run_context: RunContext) -> None:
        """Raise ValueError if there is no cell to flush, or another callback cannot work."""
        _, context = cells_to_train(run_context), run_context.original_args()
        require_batched(context.train_dataset)
        # Not `batch_num`, which is `sink_size`. On CPU, MindSpore sinks nothing, whatever it is told.
        self._begin, self._length = context.cur_step_num, context.train_dataset.get_dataset_size()
        self._is_sunk = context.dataset_sink_mode
        if self._is_sunk and self._length % context.sink_size:
            raise ValueError(f"sink_size is {context.sink_size}, expected a divisor of the {self._length} microbatches "
                             "of an epoch, so that one can be flushed; give sink_size=-1, or leave FlushCallback out")
        before = takewhile(lambda callback: callback is not self, context.list_callback)
        if any(isinstance(callback, train.ModelCheckpoint) for callback in before):
            raise ValueError("ModelCheckpoint stands before FlushCallback, expected after it: it would save weights to "
                             "which the incomplete window is not applied; give callbacks=[FlushCallback(), ...]")

    def on_train_epoch_begin(self, run_context: RunContext) -> None:
        """Begin an epoch of each cell, or go on with the one of a file, or of which the dataset skips as much."""
        if self._is_inside(run_context):
            return
        context = run_context.original_args()
        self._begin = context.cur_step_num
        for cell in _train_cells(run_context):
            boundary, trained = cell.boundary, cell.boundary.added - cell.boundary.place.first
            skips, is_loaded = is_skipping(context.train_dataset, trained), boundary.place.is_loaded
            if is_loaded and not skips:
                warn(f"the loaded file stopped after {trained} batches of an epoch, which the dataset does not skip; "
                     "unless it begins there, give dataset.skip(cell.status().trained)", UserWarning, stacklevel=2)
            boundary.enter_epoch(boundary.begin_epoch(trained if is_loaded or skips else 0)[1])

    def on_train_step_begin(self, run_context: RunContext) -> None:
        """Look for dropped windows and for used-up rates, now and then."""
        if self._is_sunk or (run_context.original_args().cur_step_num - self._begin) % 64 == 1:
            for cell in _train_cells(run_context):
                cell.boundary.look()

    def on_train_step_end(self, run_context: RunContext) -> None:
        """Flush after the last microbatch of an epoch, and count the epoch, so that a callback may save."""
        if run_context.original_args().cur_step_num - self._begin == self._length:
            self._end_epoch(run_context)

    def on_eval_begin(self, run_context: RunContext) -> None:
        """Flush before `Model.fit` evaluates; it evaluates before the end of the epoch."""
        if "train_network" in run_context.original_args() and not self._is_inside(run_context):
            self.on_train_end(run_context)

    def on_train_epoch_end(self, run_context: RunContext) -> None:
        """Flush what is left. Count an epoch that was shorter than others, but not one that a stop has ended."""
        if not self._is_inside(run_context):
            (self.on_train_end if run_context.get_stop_requested() else self._end_epoch)(run_context)

    def on_train_end(self, run_context: RunContext) -> None:
        """Flush what was trained since the last flush. (With several ranks, one more would be a call of its own.)"""
        for cell in _train_cells(run_context):
            if not cell.boundary.is_idle:
                cell.flush()

    def _end_epoch(self, run_context: RunContext) -> None:
        self.on_train_end(run_context)
        for boundary in [cell.boundary for cell in _train_cells(run_context)]:
            if boundary.added > boundary.place.first:  # it has not ended yet
                boundary.end_epoch()

    def _is_inside(self, run_context: RunContext) -> bool:
        """Return whether a sink, which `Model` calls an epoch, begins or ends inside one of the dataset."""
        return bool(self._is_sunk) and (run_context.original_args().cur_step_num - self._begin) % self._length > 0


class PerUpdate(Callback):
    """Wrap a callback so that it is called after each update, not after each microbatch, and counts updates.

    Put it after `FlushCallback`, whose example shows it. The inner callback gets `update_step` as `cur_step_num`, and
    the cell's optimizer, which `LearningRateScheduler` and `ReduceLROnPlateau` need. It is called before the first
    microbatch of a window (`on_train_step_begin`), after the update (`on_train_step_end`), and at the begin and end of
    epochs and of the training. `batch_num` still counts microbatches: the position in the epoch that `LossMonitor`
    prints and `ModelCheckpoint` puts into file names is `update_step` modulo that.

    Raises:
        ValueError: When training begins, if there is not exactly one `TrainOneStepCell`, or in data sink mode.

    Source: optax and MindSpore's dynamic learning rates count updates.

    Example:
        >>> from mindspore.train import LossMonitor
        >>> from ms_accum import PerUpdate
        >>> print(type(PerUpdate(LossMonitor()).callback).__name__)
        LossMonitor
    """

    def __init__(self, callback: Callback) -> None:
        super().__init__()
        self.callback = instance_of("callback", callback, Callback, "a mindspore.train.Callback")
        self._update_step, self._begun = 0, False  # whether a window has begun since that update

    def on_train_begin(self, run_context: RunContext) -> None:
        """Remember the cell and the number of updates, and pass the event on."""
        self._cell, self._begun = one_cell(self, run_context), False
        self._begin("on_train_begin", run_context)

    def on_train_step_begin(self, run_context: RunContext) -> None:
        """Pass the event on if this is the first microbatch since the last update."""
        self.on_train_step_end(run_context)  # a later callback may have flushed
        if not self._begun:
            self._begun = True
            self._pass_on("on_train_step_begin", run_context)

    def on_train_step_end(self, run_context: RunContext) -> None:
        """Pass the event on if there was an update since the last time."""
        if self._count() > 0:
            self._pass_on("on_train_step_end", run_context)

    def _count(self) -> int:
        before, self._update_step = self._update_step, self._cell.update_step
        self._begun = self._begun and self._update_step == before
        return self._update_step - before

    def _begin(self, event: str, run_context: RunContext) -> None:
        self._count()  # not as updates: a callback may have loaded a file
        self._pass_on(event, run_context)

    def _pass_on(self, event: str, run_context: RunContext) -> None:
        context = run_context.original_args()
        before = context.cur_step_num, context.optimizer
        context.cur_step_num, context.optimizer = self._update_step, self._cell.optimizer
        try:
            getattr(self.callback, event)(run_context)
        finally:
            context.cur_step_num, context.optimizer = before

    def _end(self, event: str, run_context: RunContext) -> None:
        self.on_train_step_end(run_context)  # of an update that a flush has just made
        self._pass_on(event, run_context)

    on_train_epoch_begin = partialmethod(_begin, "on_train_epoch_begin")
    on_train_epoch_end = partialmethod(_end, "on_train_epoch_end")
    on_train_end = partialmethod(_end, "on_train_end")


def one_cell(callback: Callback, run_context: RunContext) -> TrainOneStepCell:
    """Return the cell that a callback follows. Raise ValueError if there is not exactly one, or in data sink mode."""
    cells, name = cells_to_train(run_context), type(callback).__name__
    if len(cells) > 1:
        raise ValueError(f"{name} found {len(cells)} TrainOneStepCells, expected one; train them in separate Models")
    if run_context.original_args().get("dataset_sink_mode"):
        raise ValueError(f"{name} got dataset_sink_mode=True, which hides microbatches; give dataset_sink_mode=False")
    return cells[0]


def cells_to_train(run_context: RunContext) -> list[TrainOneStepCell]:
    """Return the cells of a run. Raise ValueError if there is none, or the Model or a callback cannot work with one."""
    cells, context = _train_cells(run_context), run_context.original_args()
    if not cells:
        raise ValueError(f"the model trains a {type(context.train_network).__name__} without a TrainOneStepCell of "
                         "ms_accum in it; give Model(TrainOneStepCell(network_with_loss, ...)), without an optimizer")
    if context.get("loss_fn") is not None and isinstance(context.network, TrainOneStepCell):
        raise ValueError("Model got a loss_fn together with a TrainOneStepCell, which would get the data without the "
                         "labels; give Model(TrainOneStepCell(nn.WithLossCell(network, loss_fn), ...)) without it")
    for callback in context.list_callback:
        name, inner, wrong = type(callback).__name__, getattr(callback, "callback", callback), ""
        if isinstance(callback, (train.LearningRateScheduler, train.ReduceLROnPlateau)):
            wrong = f"{name} needs the optimizer, which Model does not know; give PerUpdate({name}(...))"
        if isinstance(inner, train.EarlyStopping) and inner.restore_best_weights:
            wrong = ("EarlyStopping has restore_best_weights=True, which gives parameters new memory; leave it out, "
                     "save in a callback, and restore with ms_accum.load_weights")
        if wrong:
            raise ValueError(wrong)
    return cells


def _train_cells(run_context: RunContext) -> list[TrainOneStepCell]:
    cells = run_context.original_args().train_network.cells_and_names()
    return [cell for _, cell in cells if isinstance(cell, TrainOneStepCell)]
