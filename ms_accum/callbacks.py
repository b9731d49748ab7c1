"""Callbacks for `Model` with a `TrainOneStepCell`: apply incomplete windows, count updates, log windows."""
from __future__ import annotations

import csv
import os
from collections.abc import Callable
from math import nan
from typing import Any, Optional, Union

from mindspore import Tensor, nn
from mindspore.train import Callback, LearningRateScheduler, ModelCheckpoint, ReduceLROnPlateau, RunContext

from .accumulator import Accumulator
from .arguments import instance_of
from .batch import require_batched
from .model import TrainOneStepCell
from .optimizers import require_rates, require_trainable

_REMEDY = "give Model(TrainOneStepCell(network_with_loss, optimizer, accumulate_step=4)), without an optimizer"


class FlushCallback(Callback):
    """Apply the incomplete last window of each epoch and of the training.

    It flushes every `TrainOneStepCell` of the run after microbatch `dataset.get_dataset_size()` of an epoch, so that a
    `Model.fit` that evaluates afterwards sees the updated weights. If an epoch has more microbatches than that, it has
    one more incomplete window. Put it before callbacks that save or read the weights.

    Raises:
        ValueError: When training begins, if there is no `TrainOneStepCell`, if a `LearningRateScheduler` or
            `ReduceLROnPlateau` is not wrapped in `PerUpdate`, or a dataset of samples has no batch operation. When an
            epoch begins, if a parameter was frozen, or a list of learning rates is used up.

    Source: Lightning and HF Accelerate apply the last window of an epoch, too, but divide it by the full length.

    Example:
        >>> import numpy as np
        >>> from mindspore import nn
        >>> from mindspore.dataset import GeneratorDataset
        >>> from mindspore.train import Model
        >>> from ms_accum import FlushCallback, TrainOneStepCell
        >>> rows = [(np.ones((4, 2), np.float32), np.full((4, 1), y, np.float32)) for y in (4, 5, 9)]
        >>> dataset = GeneratorDataset(rows, ["data", "label"], shuffle=False)
        >>> network = nn.Dense(2, 1, weight_init="ones", bias_init="zeros")
        >>> optimizer = nn.SGD(network.trainable_params(), learning_rate=0.5)
        >>> cell = TrainOneStepCell(nn.WithLossCell(network, nn.L1Loss()), optimizer, accumulate_step=2)
        >>> Model(cell).train(1, dataset, callbacks=[FlushCallback()], dataset_sink_mode=False)
        >>> print(int(cell.accumulator.update_step), int(cell.accumulator.mini_step))
        2 0
    """

    def __init__(self) -> None:
        super().__init__()
        self._begin = 0

    def on_train_begin(self, run_context: RunContext) -> None:
        """Raise ValueError if there is no cell to flush, or what follows cannot work."""
        train_cells(run_context)
        context = run_context.original_args()
        require_batched(context.train_dataset)
        for callback in context.list_callback:
            if isinstance(callback, (LearningRateScheduler, ReduceLROnPlateau)):
                name = type(callback).__name__
                raise ValueError(f"{name} needs the optimizer, which Model does not know, and counts updates; give "
                                 f"PerUpdate({name}(...))")
        before = context.list_callback[:context.list_callback.index(self)] if self in context.list_callback else []
        if any(isinstance(callback, ModelCheckpoint) for callback in before):
            raise ValueError("ModelCheckpoint stands before FlushCallback, expected it behind: at the end of an epoch "
                             "it would save a window that is not applied; give callbacks=[FlushCallback(), ...]")

    def on_train_epoch_begin(self, run_context: RunContext) -> None:
        """Remember where the epoch begins, and check that the optimizer can go on."""
        for cell in train_cells(run_context):
            require_trainable(cell.optimizer.parameters)
            require_rates(cell.optimizer)
        self._begin = run_context.original_args().cur_step_num

    def on_train_step_end(self, run_context: RunContext) -> None:
        """Flush after the last microbatch of an epoch."""
        context = run_context.original_args()
        if context.cur_step_num - self._begin == context.batch_num:
            self.on_train_epoch_end(run_context)

    def on_eval_begin(self, run_context: RunContext) -> None:
        """Flush before `Model.fit` evaluates, which is before the end of the epoch."""
        if "train_network" in run_context.original_args():
            self.on_train_epoch_end(run_context)

    def on_train_epoch_end(self, run_context: RunContext) -> None:
        """Flush what an epoch or a training that was stopped early has left."""
        for cell in train_cells(run_context):
            cell.flush()

    on_train_end = on_train_epoch_end


class PerUpdate(Callback):
    """Call another callback after each update instead of after each microbatch, and let it count updates.

        Model(cell).train(epochs, dataset, callbacks=[FlushCallback(), PerUpdate(LearningRateScheduler(learning_rate))])

    The inner callback gets `update_step` as `cur_step_num`, and the cell's optimizer, which `LearningRateScheduler` and
    `ReduceLROnPlateau` need. It is called before the first microbatch of an update (`on_train_step_begin`) and at its
    end (`on_train_step_end`), and at the begin and end of epochs and of the training. `batch_num` still counts
    microbatches, so the position in the epoch that `LossMonitor` prints and `ModelCheckpoint` puts into names is a
    remainder by it. `update_step` is read after each microbatch, which waits for the device. Put it after
    `FlushCallback`.

    On several ranks, the learning rate has to change alike on all. A rank that runs out of data takes part in the
    updates of the others at once, and the inner callback is called after the last of them: give every rank the same
    number of microbatches, or the optimizer a schedule. `ReduceLROnPlateau` sees the loss of its rank alone.

    Args:
        callback: A `mindspore.train.Callback`.

    Raises:
        TypeError: If `callback` is not a Callback.
        ValueError: When training begins, if there is not exactly one `TrainOneStepCell`, or in data sink mode.
        RuntimeError: If the callback changes the learning rate on a rank that has made several updates at once.

    Source: optax and MindSpore's dynamic learning rates count updates; MindSpore's callbacks count microbatches.

    Example:
        >>> import numpy as np
        >>> from mindspore import nn
        >>> from mindspore.dataset import GeneratorDataset
        >>> from mindspore.train import LearningRateScheduler, Model
        >>> from ms_accum import FlushCallback, PerUpdate, TrainOneStepCell
        >>> rows = [(np.ones((4, 2), np.float32), np.full((4, 1), y, np.float32)) for y in (4, 5, 9)]
        >>> dataset = GeneratorDataset(rows, ["data", "label"], shuffle=False)
        >>> network = nn.Dense(2, 1, weight_init="ones", bias_init="zeros")
        >>> optimizer = nn.SGD(network.trainable_params(), learning_rate=0.5)
        >>> cell = TrainOneStepCell(nn.WithLossCell(network, nn.L1Loss()), optimizer, accumulate_step=2)
        >>> def learning_rate(rate, update_step):
        ...     print("update", update_step)
        ...     return rate / 2
        >>> callbacks = [FlushCallback(), PerUpdate(LearningRateScheduler(learning_rate))]
        >>> Model(cell).train(1, dataset, callbacks=callbacks, dataset_sink_mode=False)
        update 1
        update 2
    """

    def __init__(self, callback: Callback) -> None:
        super().__init__()
        self.callback = instance_of("callback", callback, Callback, "a mindspore.train.Callback")
        self._update_step, self._begun = 0, False

    def on_train_begin(self, run_context: RunContext) -> None:
        """Remember how many updates there are, and pass it on."""
        self._update_step = int(_only_cell(run_context, self).accumulator.update_step)
        self._pass_on("on_train_begin", run_context)

    def on_train_epoch_begin(self, run_context: RunContext) -> None:
        """Pass it on."""
        self._pass_on("on_train_epoch_begin", run_context)

    def on_train_step_begin(self, run_context: RunContext) -> None:
        """Pass it on if it is the first since the last update."""
        if not self._begun:
            self._begun = True
            self._pass_on("on_train_step_begin", run_context)

    def on_train_step_end(self, run_context: RunContext) -> None:
        """Pass it on if there was an update since the last time."""
        cell = _only_cell(run_context, self)
        updates = int(cell.accumulator.update_step) - self._update_step
        if updates > 0:
            rate = _learning_rate(cell.optimizer)
            self._update_step, self._begun = self._update_step + updates, False
            self._pass_on("on_train_step_end", run_context)
            if updates > 1 and cell.accumulator.exchange.ranks > 1 and _learning_rate(cell.optimizer) != rate:
                raise RuntimeError(f"the learning rate was changed after {updates} updates, which this rank made at "
                                   "once because it ran out of data before the others: ranks now hold different "
                                   "parameters; give every rank the same number of microbatches, or the optimizer a "
                                   "schedule")

    def on_train_epoch_end(self, run_context: RunContext) -> None:
        """Pass it on, after an update that a flush has just made."""
        self.on_train_step_end(run_context)
        self._pass_on("on_train_epoch_end", run_context)

    def on_train_end(self, run_context: RunContext) -> None:
        """Pass it on, after an update that a flush has just made."""
        self.on_train_step_end(run_context)
        self._pass_on("on_train_end", run_context)

    def _pass_on(self, event: str, run_context: RunContext) -> None:
        context = run_context.original_args()
        before = context.cur_step_num, context.optimizer
        context.cur_step_num, context.optimizer = self._update_step, _only_cell(run_context, self).optimizer
        try:
            getattr(self.callback, event)(run_context)
        finally:
            context.cur_step_num, context.optimizer = before


class WindowLog(Callback):
    """Log each window when it closes, as a row of a CSV file or by calling a function.

    The columns are `epoch`; `microbatch`, counted from the start of the training; `update_step`; `loss`, the weighted
    mean over the window's microbatches; `weight`, the sum of their weights; `grad_norm`, before clipping (NaN without
    `clip_norm`); `skipped` and `seen`, so far (see `Accumulator`); with a loss scaler `loss_scale`; and with a noise
    scale `noise_scale`. For a window that was open when the training began, the loss is the mean over the microbatches
    that the callback has seen. It reads a few numbers before and after each microbatch, which waits for the device. Put
    it after `FlushCallback`.

    On several ranks, losses and weights are those of this rank, but with `sync="microbatch"` and "node" weights are
    sums over the ranks that exchange each microbatch. A window in which this rank has no microbatches has no row. A
    rank that has run out of data takes part in the windows of others. If these close in the same flush as its own last
    one, that one's `grad_norm` is NaN, and so are weights that are sums.

    Args:
        to: A CSV file, which is overwritten, or a function of a dict, e.g. for TensorBoard
            `lambda row: writer.add_scalar("loss", row["loss"], row["update_step"])`.

    Raises:
        TypeError: If `to` is neither.
        ValueError: When training begins, if there is not exactly one `TrainOneStepCell`, or in data sink mode.
        OSError: When training begins, if the file cannot be written.

    Source: HF Accelerate's and Lightning's loggers write the same figures, one row for each update.

    Example:
        >>> import numpy as np
        >>> from mindspore import nn
        >>> from mindspore.dataset import GeneratorDataset
        >>> from mindspore.train import Model
        >>> from ms_accum import FlushCallback, TrainOneStepCell, WindowLog
        >>> rows = [(np.ones((4, 2), np.float32), np.full((4, 1), y, np.float32)) for y in (4, 5, 9)]
        >>> dataset = GeneratorDataset(rows, ["data", "label"], shuffle=False)
        >>> network = nn.Dense(2, 1, weight_init="ones", bias_init="zeros")
        >>> optimizer = nn.SGD(network.trainable_params(), learning_rate=0.5)
        >>> cell = TrainOneStepCell(nn.WithLossCell(network, nn.L1Loss()), optimizer, accumulate_step=2)
        >>> def write(row):
        ...     print(row["microbatch"], row["update_step"], row["loss"], row["weight"])
        >>> Model(cell).train(1, dataset, callbacks=[FlushCallback(), WindowLog(write)], dataset_sink_mode=False)
        2 1 2.5 8.0
        3 2 5.5 4.0
    """

    def __init__(self, to: Union[str, os.PathLike, Callable[[dict], Any]]) -> None:
        super().__init__()
        instance_of("to", to, (str, os.PathLike, Callable), "the path of a CSV file or a function of a dict")
        self._to, self._file, self._place = to, None, (0, 0)

    def on_train_begin(self, run_context: RunContext) -> None:
        """Remember the state of the accumulator, and open the file."""
        cell, running = _only_cell(run_context, self), run_context.original_args().list_callback
        others = [do for do in cell.before_flush if getattr(do, "__self__", None) is not self]
        # An error in a training leaves its logs behind.
        cell.before_flush[:] = [do for do in others if not _is_of_log(do) or do.__self__ in running] + [self._take]
        accumulator = cell.accumulator
        self._losses: list[tuple[float, float]] = []  # of each microbatch: its loss and weight
        self._weight, self._closed = float(accumulator.weight_sum), int(accumulator.closed_windows)
        self._step: Optional[RunContext] = None  # whose loss was not taken yet
        if not callable(self._to):
            self._file = open(self._to, "w", newline="", encoding="utf-8")
            csv.writer(self._file).writerow(self._row(accumulator, 0))

    def on_train_step_begin(self, run_context: RunContext) -> None:
        """Log the window if something else closed it since, and forget it if something else reset it."""
        accumulator, self._step = _only_cell(run_context, self).accumulator, run_context
        self._log_closed(accumulator)
        if float(accumulator.weight_sum) != self._weight:
            self._losses, self._weight = [], float(accumulator.weight_sum)

    def on_train_step_end(self, run_context: RunContext) -> None:
        """Take the microbatch's loss, and log the window if it was closed, by it or by a flush."""
        self._take()
        self._log_closed(_only_cell(run_context, self).accumulator)

    def on_train_epoch_end(self, run_context: RunContext) -> None:
        """Log what a flush has just closed."""
        self._log_closed(_only_cell(run_context, self).accumulator)

    def on_train_end(self, run_context: RunContext) -> None:
        """Log what a flush has just closed, and close the file."""
        self.on_train_epoch_end(run_context)
        _only_cell(run_context, self).before_flush.remove(self._take)
        if self._file:
            self._file.close()

    def _take(self) -> None:
        """Take the microbatch's loss, before a flush closes further windows, and log the window if it was closed."""
        if self._step is None:
            return
        context, accumulator = self._step.original_args(), _only_cell(self._step, self).accumulator
        self._step = None
        outputs = context.net_outputs
        self._place = context.cur_epoch_num, context.cur_step_num
        closed = int(accumulator.closed_windows) > self._closed
        weight = float(accumulator.window_weight if closed else accumulator.weight_sum)
        self._losses.append((float(outputs[0] if isinstance(outputs, tuple) else outputs), weight - self._weight))
        self._weight = weight
        self._log_closed(accumulator)

    def _log_closed(self, accumulator: Accumulator) -> None:
        windows = int(accumulator.closed_windows) - self._closed
        if windows <= 0:
            return
        self._closed += windows
        if self._losses or accumulator.exchange.ranks == 1:
            row = self._row(accumulator, windows - 1)
            if self._file:
                csv.writer(self._file).writerow(row.values())
                self._file.flush()  # so that the file can be followed during a long run
            else:
                self._to(row)
        self._losses, self._weight = [], 0.0

    def _row(self, accumulator: Accumulator, of_others: int) -> dict[str, Union[int, float]]:
        """Return the row of this rank's window. After it, so many windows of other ranks were closed."""
        # A microbatch of weight 0 is ignored, even if its loss is NaN.
        counted = [(loss, weight) for loss, weight in self._losses if weight != 0]
        total, weight = sum(loss * weight for loss, weight in counted), sum(weight for _, weight in counted)
        row = {"epoch": self._place[0], "microbatch": self._place[1],
               "update_step": int(accumulator.update_step) - of_others, "loss": total / (weight or 1.0),
               "weight": float(accumulator.window_weight), "grad_norm": float(accumulator.grad_norm),
               "skipped": int(accumulator.skipped), "seen": int(accumulator.seen)}
        if of_others:
            row.update(weight=self._weight if accumulator.exchange.inside == 1 else nan, grad_norm=nan)
        if accumulator.loss_scaler is not None:
            row["loss_scale"] = float(accumulator.loss_scaler.scale_value)
        if accumulator.noise_scale is not None:
            row["noise_scale"] = accumulator.noise_scale.scale()
        return row


def _is_of_log(function: Callable) -> bool:
    return isinstance(getattr(function, "__self__", None), WindowLog)


def train_cells(run_context: RunContext) -> list[TrainOneStepCell]:
    """Return the `TrainOneStepCell`s of a run. ValueError if there is none."""
    network = run_context.original_args().train_network
    cells = [cell for _, cell in network.cells_and_names() if isinstance(cell, TrainOneStepCell)]
    if not cells:
        raise ValueError(f"the model trains a {type(network).__name__} without a TrainOneStepCell of ms_accum in it; "
                         f"{_REMEDY}")
    return cells


def _only_cell(run_context: RunContext, callback: Callback) -> TrainOneStepCell:
    cells, name = train_cells(run_context), type(callback).__name__
    if len(cells) > 1:
        raise ValueError(f"{name} found {len(cells)} TrainOneStepCells, whose updates differ in number; expected one")
    if run_context.original_args().get("dataset_sink_mode"):
        raise ValueError(f"{name} with dataset_sink_mode=True: single microbatches are not seen then; give "
                         "dataset_sink_mode=False")
    return cells[0]


def _learning_rate(optimizer: nn.Cell) -> Optional[bytes]:
    """Return the learning rate if it is a number that a callback can change."""
    rate = getattr(optimizer, "learning_rate", None)
    return rate.asnumpy().tobytes() if isinstance(rate, Tensor) else None
