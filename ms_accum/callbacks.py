"""Callbacks for `mindspore.train.Model` with a `TrainOneStepCell`: close the last window, call others per update, log each window."""
from __future__ import annotations

import csv
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Union

from mindspore import nn
from mindspore.train import Callback, RunContext

from .model import TrainOneStepCell


class FlushCallback(Callback):
    """Closes the short last window of each epoch, and of the training.

    At the end of the epoch's last microbatch, so that a `Model.fit` which tests afterwards tests the updated weights; the last one is
    that of the number `dataset.get_dataset_size()`, so an epoch with more than that has one short window more. Finds the
    `TrainOneStepCell` (or several, inside a Cell of your own) in the run context. Put it before callbacks that save or read the
    weights.

    Raises:
        ValueError: When training begins, if there is no `TrainOneStepCell`, or the Model was given an optimizer besides it.

    Source: Lightning and HF Accelerate close the last window of an epoch, too, but divide it by the full length.

    Example:
        >>> import numpy as np
        >>> from mindspore import nn
        >>> from mindspore.dataset import GeneratorDataset
        >>> from mindspore.train import Model
        >>> from ms_accum import Accumulator, FlushCallback, TrainOneStepCell
        >>> rows = [(np.ones((4, 2), np.float32), np.full((4, 1), target, np.float32)) for target in (4.0, 5.0, 9.0)]
        >>> dataset = GeneratorDataset(rows, ["data", "label"], shuffle=False)
        >>> network = nn.Dense(2, 1, weight_init="ones", bias_init="zeros")
        >>> accumulator = Accumulator(nn.SGD(network.trainable_params(), learning_rate=0.5), 2, reduction="mean")
        >>> cell = TrainOneStepCell(nn.WithLossCell(network, nn.L1Loss()), accumulator)
        >>> Model(cell).train(1, dataset, callbacks=[FlushCallback()], dataset_sink_mode=False)
        >>> print(int(accumulator.update_step), int(accumulator.mini_step))
        2 0
    """

    def __init__(self) -> None:
        super().__init__()
        self._begin = 0

    def on_train_begin(self, run_context: RunContext) -> None:
        """Find the cell."""
        train_cells(run_context)

    def on_train_epoch_begin(self, run_context: RunContext) -> None:
        """Remember where the epoch begins."""
        self._begin = run_context.original_args().cur_step_num

    def on_train_step_end(self, run_context: RunContext) -> None:
        """Flush after the last microbatch of an epoch."""
        context = run_context.original_args()
        if context.cur_step_num - self._begin == context.batch_num:
            self._flush(run_context)

    def on_eval_begin(self, run_context: RunContext) -> None:
        """As at the end of an epoch: `Model.fit` tests before that."""
        if "train_network" in run_context.original_args():
            self._flush(run_context)

    def on_train_epoch_end(self, run_context: RunContext) -> None:
        """Flush what an epoch that was stopped early has left."""
        self._flush(run_context)

    def on_train_end(self, run_context: RunContext) -> None:
        """As at the end of an epoch."""
        self._flush(run_context)

    def _flush(self, run_context: RunContext) -> None:
        for cell in train_cells(run_context):
            cell.flush()


class PerUpdate(Callback):
    """Calls another callback after each update instead of after each microbatch, and lets it count updates.

        Model(cell).train(epochs, dataset, callbacks=[FlushCallback(), PerUpdate(LearningRateScheduler(learning_rate))])

    The other one sees `update_step` as `cur_step_num`, and the cell's optimizer, which `LearningRateScheduler` and
    `ReduceLROnPlateau` need. It is told of the ends of updates (`on_train_step_end`), of epochs and of the training; of testing, and of
    a microbatch that begins, it is not. `batch_num` still counts microbatches, so that the place in the epoch that `LossMonitor` prints
    and `ModelCheckpoint` puts into names is a remainder by it. Reads `update_step` after each microbatch, so it waits for the device.
    Put it behind `FlushCallback`.

    Args:
        callback: A `mindspore.train.Callback`.

    Raises:
        TypeError: If it is none.
        ValueError: When training begins, if there is not exactly one `TrainOneStepCell`, or the data are sunk.

    Source: optax and MindSpore's dynamic learning rates count updates; MindSpore's callbacks count microbatches.

    Example:
        >>> import numpy as np
        >>> from mindspore import nn
        >>> from mindspore.dataset import GeneratorDataset
        >>> from mindspore.train import LearningRateScheduler, Model
        >>> from ms_accum import Accumulator, FlushCallback, PerUpdate, TrainOneStepCell
        >>> rows = [(np.ones((4, 2), np.float32), np.full((4, 1), target, np.float32)) for target in (4.0, 5.0, 9.0)]
        >>> dataset = GeneratorDataset(rows, ["data", "label"], shuffle=False)
        >>> network = nn.Dense(2, 1, weight_init="ones", bias_init="zeros")
        >>> accumulator = Accumulator(nn.SGD(network.trainable_params(), learning_rate=0.5), 2, reduction="mean")
        >>> cell = TrainOneStepCell(nn.WithLossCell(network, nn.L1Loss()), accumulator)
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
        if not isinstance(callback, Callback):
            raise TypeError(f"callback is of type {type(callback).__name__}, expected a mindspore.train.Callback")
        self.callback = callback
        self._update_step = 0

    def on_train_begin(self, run_context: RunContext) -> None:
        """Remember how many updates there are."""
        self._update_step = int(_only_cell(run_context, "PerUpdate").accumulator.update_step)
        with self._context(run_context):
            self.callback.on_train_begin(run_context)

    def on_train_epoch_begin(self, run_context: RunContext) -> None:
        """Passed on."""
        with self._context(run_context):
            self.callback.on_train_epoch_begin(run_context)

    def on_train_step_end(self, run_context: RunContext) -> None:
        """Passed on if there was an update since the last time."""
        update_step = int(_only_cell(run_context, "PerUpdate").accumulator.update_step)
        if update_step > self._update_step:
            self._update_step = update_step
            with self._context(run_context):
                self.callback.on_train_step_end(run_context)

    def on_train_epoch_end(self, run_context: RunContext) -> None:
        """Passed on, after an update that a flush has just made."""
        self.on_train_step_end(run_context)
        with self._context(run_context):
            self.callback.on_train_epoch_end(run_context)

    def on_train_end(self, run_context: RunContext) -> None:
        """As at the end of an epoch."""
        self.on_train_step_end(run_context)
        with self._context(run_context):
            self.callback.on_train_end(run_context)

    @contextmanager
    def _context(self, run_context: RunContext) -> Iterator[None]:
        """What the other one sees."""
        context = run_context.original_args()
        before = context.cur_step_num, context.optimizer
        context.cur_step_num, context.optimizer = self._update_step, _only_cell(run_context, "PerUpdate").optimizer
        try:
            yield
        finally:
            context.cur_step_num, context.optimizer = before


class WindowLog(Callback):
    """Logs each window when it is closed: a row of a CSV file, or a call of your own.

    The columns: `epoch`; `microbatch`, counted from the start of the training; `update_step`; `loss`, the weighted mean of the window's
    microbatches; `weight`, the sum of their weights; `grad_norm`, before clipping (0 without `clip_norm`); `skipped`, so far; with a
    loss scaler also `loss_scale`. On several ranks, losses are of this rank, and so are weights, but with `sync="microbatch"`, where they
    are the sums of all ranks. Of a window that was open when the training began, the loss is the mean of what was seen. Put it behind
    `FlushCallback`. Reads a few numbers before and after each microbatch, so it waits for the device.

    Args:
        to: A CSV file, which is written anew, or a function of a dict, e.g. for TensorBoard
            `lambda row: writer.add_scalar("loss", row["loss"], row["update_step"])`.

    Raises:
        TypeError: If it is neither.
        ValueError: When training begins, if there is not exactly one `TrainOneStepCell`, or the data are sunk.
        OSError: When training begins, if the file cannot be written.

    Source: the columns are what HF Accelerate's and Lightning's loggers are asked for, one row for each update.

    Example:
        >>> import numpy as np
        >>> from mindspore import nn
        >>> from mindspore.dataset import GeneratorDataset
        >>> from mindspore.train import Model
        >>> from ms_accum import Accumulator, FlushCallback, TrainOneStepCell, WindowLog
        >>> rows = [(np.ones((4, 2), np.float32), np.full((4, 1), target, np.float32)) for target in (4.0, 5.0, 9.0)]
        >>> dataset = GeneratorDataset(rows, ["data", "label"], shuffle=False)
        >>> network = nn.Dense(2, 1, weight_init="ones", bias_init="zeros")
        >>> accumulator = Accumulator(nn.SGD(network.trainable_params(), learning_rate=0.5), 2, reduction="mean")
        >>> cell = TrainOneStepCell(nn.WithLossCell(network, nn.L1Loss()), accumulator)
        >>> def write(row):
        ...     print(row["microbatch"], row["update_step"], row["loss"], row["weight"])
        >>> Model(cell).train(1, dataset, callbacks=[FlushCallback(), WindowLog(write)], dataset_sink_mode=False)
        2 1 2.5 8.0
        3 2 5.5 4.0
    """

    def __init__(self, to: Union[str, os.PathLike, Callable[[dict], Any]]) -> None:
        super().__init__()
        if not callable(to) and not isinstance(to, (str, os.PathLike)):
            raise TypeError(f"to is of type {type(to).__name__}, expected the path of a CSV file or a function of a dict")
        self._write = to if callable(to) else _CsvFile(Path(to))
        self._losses: list[tuple[float, float]] = []
        self._weight = 0.0
        self._closed = 0
        self._place = (0, 0)

    def on_train_begin(self, run_context: RunContext) -> None:
        """Remember where the accumulator stands."""
        acc = _only_cell(run_context, "WindowLog").accumulator
        self._losses, self._weight, self._closed = [], float(acc.weight_sum), int(acc.closed_windows)
        if isinstance(self._write, _CsvFile):
            self._write.open(_columns(acc))

    def on_train_step_begin(self, run_context: RunContext) -> None:
        """Log the window if others closed it since, and forget it if they have reset it."""
        acc = _only_cell(run_context, "WindowLog").accumulator
        self._log_if(int(acc.closed_windows) > self._closed, acc)
        if float(acc.weight_sum) != self._weight:
            self._losses, self._weight = [], float(acc.weight_sum)

    def on_train_step_end(self, run_context: RunContext) -> None:
        """Take the microbatch's loss, and log the window if it was closed."""
        acc = _only_cell(run_context, "WindowLog").accumulator
        context = run_context.original_args()
        outputs = context.net_outputs
        self._place = context.cur_epoch_num, context.cur_step_num
        closed = int(acc.closed_windows) > self._closed
        weight = float(acc.window_weight if closed else acc.weight_sum)
        self._losses.append((float(outputs[0] if isinstance(outputs, tuple) else outputs), weight - self._weight))
        self._weight = weight
        self._log_if(closed, acc)

    def on_train_epoch_end(self, run_context: RunContext) -> None:
        """Log what a flush has just closed."""
        acc = _only_cell(run_context, "WindowLog").accumulator
        self._log_if(int(acc.closed_windows) > self._closed, acc)

    def on_train_end(self, run_context: RunContext) -> None:
        """As at the end of an epoch; close the file."""
        self.on_train_epoch_end(run_context)
        if isinstance(self._write, _CsvFile):
            self._write.close()

    def _log_if(self, closed: bool, acc: Any) -> None:
        if not closed:
            return
        weight = sum(weight for _, weight in self._losses)
        # A microbatch of weight 0 counts nothing, be its loss NaN.
        total = sum(loss * weight for loss, weight in self._losses if weight != 0)
        row = (*self._place, int(acc.update_step), total / weight if weight else 0.0,
               float(acc.window_weight), float(acc.grad_norm), int(acc.skipped))
        scale = () if acc.loss_scaler is None else (float(acc.loss_scaler.scale_value),)
        self._write(dict(zip(_columns(acc), (*row, *scale))))
        self._losses, self._weight, self._closed = [], 0.0, int(acc.closed_windows)


class _CsvFile:
    """A CSV file that grows by a row for each call."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.file = None

    def open(self, columns: tuple[str, ...]) -> None:
        self.file = self.path.open("w", newline="", encoding="utf-8")
        self.writer = csv.DictWriter(self.file, columns)
        self.writer.writeheader()

    def __call__(self, row: dict) -> None:
        self.writer.writerow(row)
        self.file.flush()  # whoever watches a long run sees it grow

    def close(self) -> None:
        self.file.close()


def train_cells(run_context: RunContext) -> list[TrainOneStepCell]:
    """The `TrainOneStepCell`s that a run trains. Raises ValueError if there is none, or MindSpore trains it once more."""
    network = run_context.original_args().train_network
    cells = [cell for _, cell in network.cells_and_names() if isinstance(cell, TrainOneStepCell)]
    if not cells:
        raise ValueError(f"the model trains a {type(network).__name__} without a TrainOneStepCell of ms_accum in it; "
                         "give Model(TrainOneStepCell(network, accumulator)), without an optimizer")
    if isinstance(network, nn.TrainOneStepCell):
        raise ValueError("the model was given an optimizer of its own, which would update at each microbatch once more; give "
                         "Model(TrainOneStepCell(network, accumulator)), without an optimizer")
    return cells


def _only_cell(run_context: RunContext, name: str) -> TrainOneStepCell:
    cells = train_cells(run_context)
    if len(cells) > 1:
        raise ValueError(f"{name} found {len(cells)} TrainOneStepCells, whose updates differ in number; expected one")
    if run_context.original_args().get("dataset_sink_mode"):
        raise ValueError(f"{name} with dataset_sink_mode=True: single microbatches are not seen then; give dataset_sink_mode=False")
    return cells[0]


def _columns(acc: Any) -> tuple[str, ...]:
    columns = ("epoch", "microbatch", "update_step", "loss", "weight", "grad_norm", "skipped")
    return columns if acc.loss_scaler is None else (*columns, "loss_scale")
