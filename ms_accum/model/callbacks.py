"""Callbacks for a `Model` with a `TrainOneStepCell`: apply incomplete windows, count updates, log windows."""
from __future__ import annotations

import csv
import os
from collections.abc import Callable, Iterable
from functools import partialmethod
from math import nan
from time import perf_counter
from typing import TYPE_CHECKING, Any, Optional, Union
from warnings import warn

from mindspore import Tensor, nn
from mindspore.train import Callback, LearningRateScheduler, ModelCheckpoint, ReduceLROnPlateau, RunContext

from ..arguments import instance_of
from ..core.boundary import Logged
from ..core.optimizers import rates_at, require_rates
from ..mindspore_api import is_skipping
from ..steps.batch import require_batched
from ..steps.train_step import TrainStep
from ..tensors import require_trainable
from .cell import TrainOneStepCell

if TYPE_CHECKING:
    from ..core.accumulator import Accumulator
    from ..core.boundary import Status

_MISSED = ("WindowLog was not called after {} microbatch{}, so the loss of their window is that of the others; call it "
           "after each microbatch, not only if train_step.updated, and before what saves")


class FlushCallback(Callback):
    """Apply the incomplete last window of each epoch and of the training. Use it with every `TrainOneStepCell`.

    Put it before callbacks that save or read the weights. It flushes every `TrainOneStepCell` of the run after
    microbatch number `dataset.get_dataset_size()` of an epoch, so that the evaluation of `Model.fit` uses the updated
    weights. If an epoch has more microbatches than `get_dataset_size()`, it has one more incomplete window. With
    `sink_size`, epochs are still those of the dataset.

    Raises:
        ValueError: When training begins: if there is no `TrainOneStepCell`, if a `LearningRateScheduler` or
            `ReduceLROnPlateau` is not wrapped in `PerUpdate`, if a dataset of samples has no batch operation, or if
            an epoch ends inside a sink. When an epoch begins: if a parameter was frozen, or the list of learning rates
            is used up.

    Source: Lightning and HF Accelerate also apply the last window of an epoch, but divide it by the full length.

    Example:
        >>> import numpy as np
        >>> from mindspore import dataset, nn, train
        >>> from ms_accum import FlushCallback, TrainOneStepCell
        >>> rows = [(np.ones((4, 2), np.float32), np.full((4, 1), y, np.float32)) for y in (4, 5, 9)]
        >>> data = dataset.GeneratorDataset(rows, ["data", "label"], shuffle=False)
        >>> network = nn.Dense(2, 1, weight_init="ones", bias_init="zeros")
        >>> optimizer = nn.SGD(network.trainable_params(), learning_rate=0.5)
        >>> cell = TrainOneStepCell(nn.WithLossCell(network, nn.L1Loss()), optimizer, accumulate_step=2)
        >>> train.Model(cell).train(1, data, callbacks=[FlushCallback()], dataset_sink_mode=False)
        >>> print(int(cell.accumulator.update_step), int(cell.accumulator.mini_step))
        2 0
    """

    def __init__(self) -> None:
        super().__init__()
        self._begin = self._length = 0  # of the dataset's epoch
        self._is_sunk = False

    def on_train_begin(self, run_context: RunContext) -> None:
        """Raise ValueError if there is no cell to flush, or another callback cannot work."""
        _cells_to_train(run_context)
        context = run_context.original_args()
        require_batched(context.train_dataset)
        # Not `batch_num`, which is `sink_size`. On CPU, MindSpore sinks nothing, whatever it is told.
        self._begin, self._length = context.cur_step_num, context.train_dataset.get_dataset_size()
        self._is_sunk = context.dataset_sink_mode
        if self._is_sunk and self._length % context.sink_size:
            raise ValueError(f"sink_size is {context.sink_size}, expected a divisor of the {self._length} microbatches "
                             "of an epoch: inside a sink, FlushCallback cannot apply the incomplete last window; give "
                             "sink_size=-1, or leave FlushCallback out, and windows continue in the next epoch")
        for boundary in [cell.accumulator.boundary for cell in _train_cells(run_context)]:
            boundary.begin_training(is_skipping(context.train_dataset))
        before = context.list_callback[:context.list_callback.index(self)] if self in context.list_callback else []
        if any(isinstance(callback, ModelCheckpoint) for callback in before):
            raise ValueError("ModelCheckpoint stands before FlushCallback, expected after it: at the end of an epoch "
                             "it would save the weights before the incomplete window is applied; give "
                             "callbacks=[FlushCallback(), ...]")

    def on_train_epoch_begin(self, run_context: RunContext) -> None:
        """Remember where the epoch begins, and check that the optimizer can make the next update."""
        for cell in _train_cells(run_context):
            require_trainable(cell.accumulator.weights)
            require_rates(cell.optimizer)
        if not self._is_inside(run_context):
            self._begin = run_context.original_args().cur_step_num

    def on_train_step_end(self, run_context: RunContext) -> None:
        """Flush after the last microbatch of an epoch."""
        if self._is_complete(run_context):
            self.on_train_epoch_end(run_context)

    def on_eval_begin(self, run_context: RunContext) -> None:
        """Flush before `Model.fit` evaluates; it evaluates before the end of the epoch."""
        if "train_network" in run_context.original_args() and not self._is_inside(run_context):
            self.on_train_end(run_context)

    def on_train_epoch_end(self, run_context: RunContext) -> None:
        """Flush the window that is left when an epoch was stopped early; count the epoch, unless a stop was asked for.
        """
        if not self._is_inside(run_context):
            self.on_train_end(run_context)
            if self._is_complete(run_context) or not run_context.get_stop_requested():
                for boundary in [cell.accumulator.boundary for cell in _train_cells(run_context)]:
                    boundary.end_epoch()

    def on_train_end(self, run_context: RunContext) -> None:
        """Flush the window that is left when the training was stopped early."""
        for callback in run_context.original_args().list_callback:
            if isinstance(callback, WindowLog):
                callback.take(run_context)
        for cell in _train_cells(run_context):
            cell.flush()

    def _is_complete(self, run_context: RunContext) -> bool:
        return run_context.original_args().cur_step_num - self._begin == self._length

    def _is_inside(self, run_context: RunContext) -> bool:
        """Return whether a sink, which `Model` calls an epoch, begins or ends inside an epoch of the dataset."""
        return self._is_sunk and (run_context.original_args().cur_step_num - self._begin) % self._length > 0


class PerUpdate(Callback):
    """Wrap a callback so that it is called after each update, not after each microbatch, and counts updates.

        Model(cell).train(epochs, dataset, callbacks=[FlushCallback(), PerUpdate(LearningRateScheduler(learning_rate))])

    Put it after `FlushCallback`. The inner callback gets `update_step` as `cur_step_num`, and the cell's optimizer,
    which `LearningRateScheduler` and `ReduceLROnPlateau` need. It is called before the first microbatch of a window
    (`on_train_step_begin`), after the update (`on_train_step_end`), and at the begin and end of epochs and of the
    training. `batch_num` still counts microbatches. So the position in the epoch that `LossMonitor` prints and
    `ModelCheckpoint` puts into file names is `update_step` modulo the number of microbatches in an epoch. `update_step`
    is read after each microbatch, which waits for the device.

    With several ranks, the learning rate must be equal on all of them. A rank that runs out of data makes the remaining
    updates of the others in one flush, and the inner callback is called only after the last of them. So give every rank
    the same number of microbatches, or give the optimizer a schedule. `ReduceLROnPlateau` sees only the loss of its own
    rank.

    Args:
        callback: A `mindspore.train.Callback`.

    Raises:
        TypeError: If `callback` is not a Callback.
        ValueError: When training begins, if there is not exactly one `TrainOneStepCell`, or in data sink mode.
        RuntimeError: If the callback changes the learning rate on a rank that has made several updates in one flush.

    Source: optax and MindSpore's dynamic learning rates count updates; MindSpore's callbacks count microbatches.

    Example:
        >>> import numpy as np
        >>> from mindspore import dataset, nn, train
        >>> from ms_accum import FlushCallback, PerUpdate, TrainOneStepCell
        >>> rows = [(np.ones((4, 2), np.float32), np.full((4, 1), y, np.float32)) for y in (4, 5, 9)]
        >>> data = dataset.GeneratorDataset(rows, ["data", "label"], shuffle=False)
        >>> network = nn.Dense(2, 1, weight_init="ones", bias_init="zeros")
        >>> optimizer = nn.SGD(network.trainable_params(), learning_rate=0.5)
        >>> cell = TrainOneStepCell(nn.WithLossCell(network, nn.L1Loss()), optimizer, accumulate_step=2)
        >>> def learning_rate(rate, update_step):
        ...     print("update", update_step)
        ...     return rate / 2
        >>> callbacks = [FlushCallback(), PerUpdate(train.LearningRateScheduler(learning_rate))]
        >>> train.Model(cell).train(1, data, callbacks=callbacks, dataset_sink_mode=False)
        update 1
        update 2
    """

    def __init__(self, callback: Callback) -> None:
        super().__init__()
        self.callback = instance_of("callback", callback, Callback, "a mindspore.train.Callback")

    def on_train_begin(self, run_context: RunContext) -> None:
        """Remember the number of updates, and pass the event on."""
        cell = _one_cell(self, run_context)
        self._optimizer, self._accumulator = cell.optimizer, cell.accumulator
        self._update_step, self._begun = int(self._accumulator.update_step), False
        self._recalled = self._accumulator.boundary.recalled
        self._pass_on("on_train_begin", run_context)

    def on_train_step_begin(self, run_context: RunContext) -> None:
        """Pass the event on if this is the first microbatch since the last update."""
        self._note_load()
        if not self._begun:
            self._begun = True
            self._pass_on("on_train_step_begin", run_context)

    def on_train_step_end(self, run_context: RunContext) -> None:
        """Pass the event on if there was an update since the last time."""
        self._note_load()
        updates = int(self._accumulator.update_step) - self._update_step
        if updates > 0:
            rate = _learning_rate(self._optimizer)
            self._update_step, self._begun = self._update_step + updates, False
            self._pass_on("on_train_step_end", run_context)
            if updates > 1 and self._accumulator.exchange.ranks > 1 and _learning_rate(self._optimizer) != rate:
                raise RuntimeError(f"the learning rate was changed after {updates} updates that this rank made in one "
                                   "flush, because it ran out of data before the others: ranks now hold different "
                                   "parameters; give every rank the same number of microbatches, or give the optimizer "
                                   "a schedule")

    def _note_load(self) -> None:
        """Count from the updates of a checkpoint that another callback has loaded."""
        self._recalled, is_loaded = _loaded_since(self._accumulator, self._recalled)
        if is_loaded:
            self._update_step, self._begun = int(self._accumulator.update_step), False

    def _pass_on(self, event: str, run_context: RunContext) -> None:
        context = run_context.original_args()
        before = context.cur_step_num, context.optimizer
        context.cur_step_num, context.optimizer = self._update_step, self._optimizer
        try:
            getattr(self.callback, event)(run_context)
        finally:
            context.cur_step_num, context.optimizer = before

    def _pass_on_after(self, event: str, run_context: RunContext) -> None:
        """Pass the event on after an update that a flush has just made."""
        self.on_train_step_end(run_context)
        self._pass_on(event, run_context)

    on_train_epoch_begin = partialmethod(_pass_on, "on_train_epoch_begin")
    on_train_epoch_end = partialmethod(_pass_on_after, "on_train_epoch_end")
    on_train_end = partialmethod(_pass_on_after, "on_train_end")


class WindowLog(Callback):
    """Log each window when it closes, to a CSV file or by calling a function.

    Give it to `Model` as a callback, after `FlushCallback` and other callbacks that flush, and before callbacks that
    change the learning rate or save. Or call it in a loop of your own:

        log = WindowLog("windows.csv")
        for loss in train_step.epoch(data):
            log(train_step, loss)

    The columns are `epoch`; `microbatch`, counted since the log began, and anew after a load; `update_step`; `loss`,
    the weighted mean over the window's microbatches; `weight`, the sum of their weights; `learning_rate`, if it is
    known, that of this window's update (`optimizer.get_lr()` is that of the next update; with groups, `learning_rate_0`
    and so on; NaN before the first update); `grad_norm`, before clipping (NaN without `clip_norm`); `skipped` and
    `seen`, totals so far (see `Accumulator`); and with a loss scaler `loss_scale`.

    A dropped window has a row, too: `skipped` grows and `update_step` does not. For a window that was open when the
    training began, the loss is the mean over the microbatches that the log has seen, also before a checkpoint that was
    saved after it saw them. The log reads a few numbers after each microbatch, which waits for the device.

    `seconds` is the time since the row before, or since the log was made, with all that the loop did; and
    `weight_per_second` is `weight / seconds`: samples, or what `weight_fn` counts.

    With several ranks, losses and weights are those of this rank; with `sync="microbatch"` and "node", weights are sums
    over the ranks that exchange each microbatch. A window in which this rank has no microbatches has no row. A rank
    that has run out of data takes part in the windows of the others. If they close in the same flush as this rank's
    last window, then `grad_norm` is NaN in the row of that window. `weight` is NaN, too, if it is a sum over ranks.

    Args:
        to: Path of a CSV file, or a function of a dict. A new run overwrites the file. A run that goes on keeps its
            rows, up to the checkpoint. The guide's page "Recipes" shows summary files and Weights & Biases.

    Raises:
        TypeError: If `to` is neither a path nor a function.
        ValueError: When training begins, if there is not exactly one `TrainOneStepCell`, in data sink mode, or if the
            file of a run that goes on has other columns.
        OSError: Before the first microbatch, if the file cannot be written.

    Source: the loggers of HF Accelerate and Lightning write the same values, once per update.

    Example:
        >>> import numpy as np
        >>> from mindspore import dataset, nn, train
        >>> from ms_accum import FlushCallback, TrainOneStepCell, WindowLog
        >>> rows = [(np.ones((4, 2), np.float32), np.full((4, 1), y, np.float32)) for y in (4, 5, 9)]
        >>> data = dataset.GeneratorDataset(rows, ["data", "label"], shuffle=False)
        >>> network = nn.Dense(2, 1, weight_init="ones", bias_init="zeros")
        >>> optimizer = nn.SGD(network.trainable_params(), learning_rate=0.5)
        >>> cell = TrainOneStepCell(nn.WithLossCell(network, nn.L1Loss()), optimizer, accumulate_step=2)
        >>> def write(row):
        ...     print(row["microbatch"], row["update_step"], row["loss"], row["weight"])
        >>> train.Model(cell).train(1, data, callbacks=[FlushCallback(), WindowLog(write)], dataset_sink_mode=False)
        2 1 2.5 8.0
        3 2 5.5 4.0
    """

    def __init__(self, to: Union[str, os.PathLike, Callable[[dict], Any]]) -> None:
        super().__init__()
        instance_of("to", to, (str, os.PathLike, Callable), "the path of a CSV file or a function of a dict")
        self._since = perf_counter()
        self._to: Any = to if callable(to) else os.path.abspath(to)

        self._followed: Optional[Accumulator] = None  # in a loop of a user's own
        self._has_warned = False  # of microbatches that it was not called after
        self._recalled: Optional[Logged] = None  # of the last checkpoint that was loaded
        self._losses: list[tuple[float, float]] = []  # of each microbatch: its loss and its weight
        self._weight, self._closed, self._held, self._skipped = 0.0, 0, 0, 0
        self._trained: Optional[int] = None  # microbatches until the last one that it has seen, if known
        self._before: Optional[int] = None  # epochs before those that `Model.train` counts, once it has counted one

    def __call__(self, train_step: TrainStep, loss: Any = None) -> None:
        """Record the loss of a microbatch, after the call that trained it, and log its window if it was closed.

        Also call it without a loss: after each flush of your own, or an error in the last call of all, and before
        the first microbatch if you continue an open window. The next epoch begins when `train_step.trained` starts
        again.

        Args:
            train_step: A step of `make_train_step` or a `TrainOneStepCell`; the same one in all calls.
            loss: The value that it returned: the loss, or `(loss, aux)`.

        Warns:
            UserWarning: If it was not called after each microbatch: the loss of a window is that of the others.

        Raises:
            OSError: At the first call, if the file cannot be written.
            ValueError: If it follows another step.
        """
        instance_of("train_step", train_step, (TrainStep, TrainOneStepCell), "a train step or a TrainOneStepCell")
        accumulator = train_step.accumulator
        status = accumulator.status()
        boundary = accumulator.boundary
        recalled, is_loaded = _loaded_since(accumulator, self._recalled)  # then begin again
        is_closed = recalled is not self._recalled  # a window, by hand, without a word to the log
        self._recalled = recalled
        if is_loaded and boundary.since_load == 0:
            loss = None  # of a microbatch that the load has undone, e.g. in a function of `on_update`
        if self._followed is not accumulator or is_loaded:
            if self._followed not in (None, accumulator):
                raise ValueError("this WindowLog follows another train step; give each step a WindowLog of its own")
            self._begin(accumulator)
            if boundary.since_load == 0 and recalled.is_loaded and recalled.closed + 1 == self._closed:
                self._closed -= 1  # a flush has closed the window of the checkpoint
                self._recall(0)
            self._followed, self._place = accumulator, (status.epochs + 1, 0)
            # A loop may go on at a place of its own after a load.
            self._trained = None if loss is None else boundary.others + getattr(train_step, "trained", 0) - 1
            self._held, self._skipped = 0, status.skipped
            if loss is not None:
                self._came_late(status)
                if not self._losses:
                    self._warn_of_missed(status.mini_step - 1)
            self._begin_file(status, loss is not None and status.mini_step == 0)
        if loss is None:
            self._catch_up()
        else:
            # Whether a reset has dropped this microbatch, too.
            is_dropped = is_closed and status.mini_step == 0 and status.closed_windows == self._closed
            if not is_dropped:
                self._follow(status, is_closed)
            # An interrupted microbatch has left no loss, but counts. A cell does not count them.
            trained = boundary.others + train_step.trained if isinstance(train_step, TrainStep) else None
            missed = 0 if trained is None or self._trained is None else trained - self._trained - 1
            self._warn_of_missed(missed)
            self._place = status.epochs + 1, self._place[1] + 1 + missed
            self._trained = trained
            if is_dropped:
                self._losses, self._weight = [], 0.0
            else:
                self._count(loss)
            self._log_closed()
        self._held, self._skipped = status.mini_step, status.skipped

    def _follow(self, status: Status, is_closed: bool) -> None:
        """Log the window that was closed before this microbatch, or forget one that was reset, or loaded over."""
        is_open, closed = status.mini_step > 0, status.closed_windows  # whether the microbatch is in an open window
        if is_open:
            self._log_closed()
        stands = closed == self._closed and status.skipped == self._skipped
        is_reset = is_closed and not is_open and closed == self._closed + 1  # and this microbatch closed the next one
        if closed < self._closed or is_reset or (stands and status.mini_step <= self._held):
            self._losses, self._weight = [], 0.0
            self._closed = closed if is_open else closed - 1
            self._recall(1)

    def on_train_begin(self, run_context: RunContext) -> None:
        """Remember the state of the accumulator."""
        self._since, self._before, self._has_file = perf_counter(), None, False
        self._begin(_one_cell(self, run_context).accumulator)
        self._losses = self._losses or [*self._accumulator.boundary.losses()]  # of a call that an error has ended
        self._recalled = self._accumulator.boundary.recalled

    def _begin(self, accumulator: Accumulator) -> None:
        self._accumulator, self._optimizer = accumulator, accumulator.optimizer
        self._losses = []
        self._weight, self._closed = float(accumulator.weight_sum), int(accumulator.closed_windows)
        self._taken, self._place, self._trained = True, (0, 0), None
        self._recall(0)
        self._columns = [*self._row(0)]

    def _came_late(self, status: Status) -> None:
        """Set the state as if the log had begun one microbatch earlier."""
        if status.mini_step == 0:  # it closed a window
            self._weight, self._closed = 0.0, self._closed - 1
        else:  # others may be in the window: of their weights, only the sum is known
            self._weight -= self._weight / status.mini_step
        self._recall(1)

    def _warn_of_missed(self, missed: int) -> None:
        if missed > 0 and not self._has_warned:
            self._has_warned = True
            warn(_MISSED.format(missed, "es" * (missed != 1)), UserWarning, stacklevel=3)

    def _recall(self, trained: int) -> None:
        """Go on with the open window of a checkpoint, if `trained` microbatches were trained since it was loaded."""
        boundary = self._accumulator.boundary
        logged = boundary.recalled
        if logged.is_loaded and (logged.closed, boundary.since_load) == (self._closed, trained):
            self._weight, self._losses = logged.weight, [*logged.losses]

    def on_train_step_begin(self, run_context: RunContext) -> None:
        """Log the window if other code has closed it, and forget it if other code has reset it, or loaded another.

        Begin the file with the first microbatch, and again after a load.
        """
        self._recalled, is_loaded = _loaded_since(self._accumulator, self._recalled)
        if is_loaded:
            self._begin(self._accumulator)
        if is_loaded or not self._has_file:
            status, self._has_file = self._accumulator.status(), True
            if not self._losses:
                self._warn_of_missed(status.mini_step)
            self._begin_file(status, False)
        self._taken = False
        self._catch_up()

    def _catch_up(self) -> None:
        self._log_closed()
        weight = float(self._accumulator.weight_sum)
        if weight != self._weight:
            self._losses, self._weight = [], weight
            self._recall(0)

    def take(self, run_context: RunContext) -> None:
        """Record the microbatch's loss, once, and log the window if the microbatch or a flush closed it.

        `FlushCallback` calls it before a flush, which may close further windows. If other code has made such a flush,
        the weight of this microbatch is unknown.
        """
        if not self._taken:
            self._taken, context = True, run_context.original_args()
            if self._before is None:  # with `initial_epoch`, it counts those before, too
                self._before = 0 if context.cur_epoch_num > 1 else self._accumulator.status().epochs
            self._place = self._before + context.cur_epoch_num, context.cur_step_num
            self._count(context.net_outputs)
        self._log_closed()

    def _count(self, loss: Any) -> None:
        """Add the loss of a microbatch to those of its window. It may come with aux."""
        accumulator = self._accumulator
        windows = int(accumulator.closed_windows) - self._closed
        weight = nan if windows > 1 else float(accumulator.window_weight if windows else accumulator.weight_sum)
        if windows == 0 and weight < self._weight:  # somebody has reset the window since this microbatch
            self._losses = []
        else:
            self._losses.append((float(loss[0] if isinstance(loss, tuple) else loss), weight - self._weight))
        self._weight = weight
        accumulator.boundary.logged = Logged(self._closed, weight, tuple(self._losses))

    on_train_step_end = on_train_epoch_end = on_train_end = take

    def _log_closed(self) -> None:
        windows = int(self._accumulator.closed_windows) - self._closed
        if windows <= 0:
            return
        self._closed += windows
        if self._losses or self._accumulator.exchange.ranks == 1:
            row = self._row(windows - 1)
            self._since += row["seconds"]
            if callable(self._to):
                self._to(row)
            else:
                self._write(row.values())
        self._losses, self._weight = [], 0.0

    def _begin_file(self, status: Status, is_late: bool) -> None:
        """Begin a file. If the run goes on, keep the rows of windows that were closed before.

        `is_late`: whether the last window was closed since the run went on; then its row is still to be written.
        """
        if callable(self._to):
            return
        columns, rows, reached = self._columns, [], (status.update_step, status.skipped - is_late)
        if self._closed and os.path.exists(self._to):
            with open(self._to, newline="", encoding="utf-8") as file:
                reader = csv.DictReader(file)
                if reader.fieldnames != columns:
                    raise ValueError(f"{self._to} has the columns {reader.fieldnames}, but this run goes on with "
                                     f"{columns}; give WindowLog another path")
                whole = (row for row in reader if None not in row.values())  # a full disk may have cut the last one
                rows = [row for row in whole if (int(row["update_step"]), int(row["skipped"])) <= reached]
        with open(f"{self._to}.part", "w", newline="", encoding="utf-8") as file:  # no interrupt loses the rows
            csv.writer(file).writerows([columns, *(row.values() for row in rows)])
        os.replace(f"{self._to}.part", self._to)

    def _write(self, values: Iterable) -> None:
        """Write a row, and close the file, so that it can be read during a long run."""
        with open(self._to, "a", newline="", encoding="utf-8") as file:
            csv.writer(file).writerow(values)

    def _row(self, of_others: int) -> dict[str, Union[int, float]]:
        """Return the row of this rank's window. `of_others` windows of other ranks were closed after it."""
        accumulator, status = self._accumulator, self._accumulator.status()
        exchange, scaler = accumulator.exchange, accumulator.loss_scaler
        row = {"epoch": self._place[0], "microbatch": self._place[1],
               "update_step": status.update_step - of_others, "loss": _mean(self._losses),
               "weight": status.window_weight, **_rates_of_last_update(accumulator), "grad_norm": status.grad_norm,
               "skipped": status.skipped, "seen": status.seen}
        if of_others:
            row.update(weight=self._weight if exchange.inside == 1 else nan, grad_norm=nan)
        seconds = perf_counter() - self._since
        row.update(seconds=seconds, weight_per_second=row["weight"] / (seconds or nan))
        if scaler is not None:
            row["loss_scale"] = float(scaler.scale_value)
        return row


def _mean(pairs: Iterable[tuple[float, float]]) -> float:
    """Return the weighted mean of values, given with their weights; one of weight 0 may be NaN."""
    pairs = [(value, weight) for value, weight in pairs if weight != 0]
    return sum(value * weight for value, weight in pairs) / (sum(weight for _, weight in pairs) or 1.0)


def _loaded_since(accumulator: Accumulator, before: Optional[Logged]) -> tuple[Logged, bool]:
    """Return what the last checkpoint held of a log, and whether it was loaded since `before` was returned."""
    recalled = accumulator.boundary.recalled
    return recalled, recalled is not before and recalled.is_loaded


def _one_cell(callback: Callback, run_context: RunContext) -> TrainOneStepCell:
    """Return the cell that a callback follows. Raise ValueError if there is not exactly one, or in data sink mode."""
    cells, name = _cells_to_train(run_context), type(callback).__name__
    if len(cells) > 1:
        raise ValueError(f"{name} found {len(cells)} TrainOneStepCells, expected one, because each counts its own "
                         "updates; train them in separate Models")
    if run_context.original_args().get("dataset_sink_mode"):
        raise ValueError(f"{name} got dataset_sink_mode=True, which hides single microbatches from callbacks; give "
                         "dataset_sink_mode=False")
    return cells[0]


def _train_cells(run_context: RunContext) -> list[TrainOneStepCell]:
    """Return the `TrainOneStepCell`s of a run. Raise ValueError if there is none."""
    network = run_context.original_args().train_network
    cells = [cell for _, cell in network.cells_and_names() if isinstance(cell, TrainOneStepCell)]
    if not cells:
        raise ValueError(f"the model trains a {type(network).__name__} without a TrainOneStepCell of ms_accum in it; "
                         "give Model(TrainOneStepCell(network_with_loss, optimizer, accumulate_step=4)), without an "
                         "optimizer")
    return cells


def _cells_to_train(run_context: RunContext) -> list[TrainOneStepCell]:
    """Return the cells before the training. Raise ValueError if the Model or a callback cannot work with a cell."""
    cells, context = _train_cells(run_context), run_context.original_args()
    if context.get("loss_fn") is not None and isinstance(context.network, TrainOneStepCell):
        raise ValueError("Model got a loss_fn together with a TrainOneStepCell, whose network computes the loss "
                         "itself, so the cell would get the data without the labels; give "
                         "Model(TrainOneStepCell(nn.WithLossCell(network, loss_fn), ...)) without a loss_fn")
    for callback in context.list_callback:
        if isinstance(callback, (LearningRateScheduler, ReduceLROnPlateau)):
            name = type(callback).__name__
            raise ValueError(f"{name} needs the optimizer, which Model does not know, and counts updates; give "
                             f"PerUpdate({name}(...))")
    return cells


def _learning_rate(optimizer: nn.Cell) -> Optional[bytes]:
    """Return the learning rate as bytes if it is a number that a callback can change."""
    rate = getattr(optimizer, "learning_rate", None)
    return rate.asnumpy().tobytes() if isinstance(rate, Tensor) else None


def _rates_of_last_update(accumulator: Accumulator) -> dict[str, float]:
    """Return the learning rate of the last update by column, one for each group; empty if it is unknown."""
    used = accumulator.boundary.used_rates
    values = rates_at(accumulator.optimizer, -1) if used is None else used
    return {f"learning_rate{f'_{i}' * (len(values) > 1)}": value for i, value in enumerate(values)}
