"""A log: a row for each update, to a CSV file or a function."""
from __future__ import annotations

import csv
import os
from collections.abc import Callable
from functools import partial
from time import perf_counter
from typing import Any, Optional, Union
from warnings import warn

from mindspore.train import Callback, RunContext

from ..arguments import instance_of
from ..core.boundary import Boundary
from ..core.stages import LossScale
from .callbacks import one_cell


class WindowLog(Callback):
    """Write a row for each update, to a CSV file or a function.

        train_step.on_update(WindowLog("windows.csv"))
        Model(cell).train(epochs, dataset, callbacks=[FlushCallback(), WindowLog("windows.csv")])

    The columns are `epoch`, from 1; `microbatch` of the epoch; `update_step`; the mean `loss` and the `weight` of the
    window, over all ranks; `learning_rate`, that of this update (with groups, `learning_rate_0` and so on);
    `grad_norm`, before clipping (NaN without `clip_norm`); `skipped` and `seen`, totals so far; `seconds` of training,
    without those of functions of `on_update`; `per_second`, which is `weight / seconds`; with a loss scaler
    `loss_scale`, that of the next window; and those of `extra`. A dropped window shows in the next row's `skipped`.
    With several ranks, rank 0 writes. An interrupt between an update and its row leaves out the row.

    Args:
        to: Path of a CSV file, or a function of a dict. With its first update, a run begins the file anew, and warns if
            it had rows. A run that goes on keeps the rows before its next update.
        extra: A function without arguments that returns a dict: more columns. Rank 0 calls it for each row.

    Raises:
        ValueError, OSError: At an update: if a run goes on with a file of other columns, two columns have the same
            name, the log follows another step, or the file cannot be written. When training begins: see `PerUpdate`.

    Source: the loggers of HF Accelerate and Lightning write the same values, once per update.

    Example:
        >>> import numpy as np
        >>> from mindspore import nn
        >>> from ms_accum import WindowLog, make_train_step
        >>> network = nn.Dense(2, 1, weight_init="ones", bias_init="zeros")
        >>> def forward_fn(x):
        ...     return network(x).mean()
        >>> train_step = make_train_step(forward_fn, nn.SGD(network.trainable_params(), 0.5), accumulate_step=2)
        >>> def write(row):
        ...     print(row["microbatch"], row["update_step"], row["loss"], row["weight"], row["learning_rate"])
        >>> log = train_step.on_update(WindowLog(write))
        >>> losses = list(train_step.epoch([np.full((4, 2), value, np.float32) for value in (1, 3, 2)]))
        2 1 4.0 8.0 0.5
        3 2 -0.5 4.0 0.5
    """

    is_log = True  # `on_update` calls it before other functions

    def __init__(self, to: Union[str, os.PathLike, Callable[[dict], Any]], *,
                 extra: Callable[[], dict[str, Any]] = dict) -> None:
        super().__init__()
        instance_of("to", to, (str, os.PathLike, Callable), "the path of a CSV file or a function of a dict")
        self._to: Any = to if callable(to) else os.path.abspath(to)
        self._extra = instance_of("extra", extra, Callable, "a function without arguments that returns a dict")
        self._written: Optional[int] = None  # the update of the last row
        self._boundary: Optional[Boundary] = None  # that it follows

    def on_train_begin(self, run_context: RunContext) -> None:
        """Let the cell call it after each update, as `TrainStep.on_update` does."""
        self.on_train_end(run_context)  # also of a training that has failed
        cell = one_cell(self, run_context)
        cell.boundary.functions.append((1, partial(self, cell)))

    def on_train_end(self, run_context: RunContext) -> None:
        """Log no update that this training does not make."""
        boundary, logs = one_cell(self, run_context).boundary, run_context.original_args().list_callback
        given: Any = boundary.functions
        boundary.functions = [(n, log) for n, log in given if log.func in logs and log.func is not self]

    def __call__(self, train_step: Any) -> None:
        """Write the row of the last update. `on_update` and `Model` call it."""
        boundary: Boundary = train_step.boundary
        if self._boundary not in (None, boundary):
            raise ValueError("this WindowLog follows another train step; give each step a WindowLog of its own")
        self._boundary = boundary
        if boundary.window.exchange.rank > 0:
            return
        status, rates = boundary.status(), boundary.rates.read(-1)
        seconds = perf_counter() - boundary.since
        row = {"epoch": status.epochs + 1, "microbatch": status.trained, "update_step": status.update_step,
               "loss": status.loss, "weight": status.weight,
               **{f"learning_rate{f'_{i}' * (len(rates) > 1)}": rate for i, rate in enumerate(rates)},
               "grad_norm": status.grad_norm, "skipped": status.skipped, "seen": status.seen, "seconds": seconds,
               "per_second": status.weight / seconds}
        for scaling in (stage for stage in boundary.window.stages if isinstance(stage, LossScale)):
            row["loss_scale"] = float(scaling.loss_scale())
        extra = self._extra()
        if twice := row.keys() & extra:
            raise ValueError(f"two columns of WindowLog would be called {min(twice)}; let extra= return another name")
        row.update(extra)
        if callable(self._to):
            self._to(row)
            return
        if self._written != status.update_step - 1:
            self._begin(status.update_step, [*row])
        with open(self._to, "a", newline="", encoding="utf-8") as file:  # closed, so that it can be read at any time
            csv.writer(file).writerow(row.values())
        self._written = status.update_step

    def _begin(self, update_step: int, columns: list[str]) -> None:
        """Begin the file with the rows before an update."""
        rows = []
        if os.path.exists(self._to):
            with open(self._to, newline="", encoding="utf-8") as file:
                reader = csv.DictReader(file)
                rows = [*reader]
            if update_step > 1 and reader.fieldnames not in (None, columns):
                raise ValueError(f"{self._to} has the columns {reader.fieldnames}, expected {columns}, with which this "
                                 "run goes on; give WindowLog another path")
        if rows and update_step == 1 and self._written is None:
            warn(f"{self._to} holds {len(rows)} rows of an earlier run, which this new run overwrites; give WindowLog "
                 "another path to keep them", UserWarning, stacklevel=2)
        kept = [row for row in rows if update_step > 1 and None not in (*row, *row.values())  # cut by a full disk
                and int(row["update_step"]) < update_step]
        with open(f"{self._to}.part", "w", newline="", encoding="utf-8") as file:  # no interrupt loses the rows
            csv.writer(file).writerows([columns, *(row.values() for row in kept)])
        os.replace(f"{self._to}.part", self._to)
