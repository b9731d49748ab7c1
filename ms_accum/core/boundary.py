"""The boundary: the host's side of a window. It counts down, closes what is full, and keeps the place in the data.

    add:     is `missing` known? ─ no ─► read the device, and close the window if it is full
                  ▼ yes, or now
             meet ─► the step's graphs add the microbatch ─► one less is missing; none: close
    close:   meet ─► the graph that updates or drops ─► functions of `on_update`
    flush:   take part in the microbatches of ranks that still have data ─► close what is open ─► take part in the
             windows of others ─► compare parameters

What adds or closes sets `missing` to None first, and to a number when it is done; a reset and a load leave None. So if
one was stopped, it is None, and the next call reads the device: all of its numbers fit together, or a mark in them says
what was not finished; see `window.py`. `exchange.meet` returns the largest number that a rank gave: of pieces, or 1 for
a window; 0: nobody has data left. On one device, it returns its own.
"""
from __future__ import annotations

import atexit
import os
from collections.abc import Callable
from time import perf_counter
from typing import Any, NamedTuple, Optional
from warnings import warn
from weakref import finalize

import numpy as np
from mindspore import Parameter, Tensor, ops

from ..distributed.exchange import EPOCH, FLUSHED, IDLE, MICROBATCH, WINDOW
from ..mindspore_api import address_of, unrecorded
from ..tensors import require_trainable
from .graphs import straight
from .optimizers import Rates
from .window import (
    ADDED,
    BEGIN,
    CLOSING,
    END,
    HELD,
    HOLD,
    IN_ROW,
    LAST,
    LOADING,
    MARK,
    MEASURED,
    OWN,
    PART,
    SKIPPED,
    UPDATES,
    WEIGHT,
    Window,
)

_TORN_BATCH = ("an error or an interrupt stopped a microbatch, so the open window may hold a part of it; call reset(), "
               "which drops the open window; then epoch(batches, skip=train_step.trained) trains it again")
_TORN_UPDATE = ("an error or an interrupt stopped an update, so it may have changed some of the parameters; load a "
                "checkpoint, on all ranks, or, on one device, call reset(), which drops the window")
_TORN_LOAD = "an error or an interrupt stopped a load, so values are of two files; load a checkpoint, on all ranks"
_STUCK = ("{} windows in a row were dropped ({} skips in all), because their gradients were not finite or their weight "
          "was 0, expected at most max_skips={}; look for NaN in the batches since update {}, lower the initial loss "
          "scale or the learning rate, then load a checkpoint, or call reset()")
_OWNED = ("the train step was called, looped over or loaded inside {}, which owns it; begin a new loop")
_LOADED = ("the loaded file stopped after {0} batches of an epoch; give all batches of that epoch and "
           "skip=train_step.trained to go on there, or skip=0 to begin the epoch again")
_SPLIT = ("the loaded file was saved with another number of ranks, inside an epoch: train_step.trained ({0}) counts "
          "rank 0's batches of the former split; give the batches that are left, or skip=0 to begin the epoch again")
_OPEN = ("a window of {} microbatch(es) is open, expected none where an epoch begins: flush() applies it, reset() "
         "drops it, skip=train_step.trained (for Model, dataset.skip(cell.status().trained)) goes on with its epoch")
_MOVED = ("{} was given new memory (by mindspore.load_param_into_net or set_data), which compiled graphs do not see; "
          "copy values with ops.assign or ms_accum.load_weights")
_LOST = ("a window of the train step of {} that holds {} microbatch(es) is lost: it was neither applied, saved nor "
         "reset; train with train_step.epoch(batches), which applies the incomplete last window, call flush(), or give "
         "Model FlushCallback()")


class Status(NamedTuple):
    """Hold the counters of an accumulator.

    Attributes:
        update_step: Number of updates done.
        mini_step: Number of microbatches in the open window, with empty ones that a rank without data adds.
        closed_windows: Number of windows closed, with an update or dropped.
        skipped: Number of windows dropped; with `on_nonfinite="skip_microbatch"`, of skipped microbatches, or of their
            pieces, on all ranks, and at least 1 for a window dropped. It changes when a window closes.
        skipped_in_row: Number of windows dropped since the last update or reset.
        empty_windows: Number of windows closed whose weight was 0.
        seen: Sum of the weights of all updates, of all ranks, rounded: samples, or what `weight_fn` counts.
        epochs: Number of epochs finished.
        trained: Number of microbatches of this rank trained or skipped since the epoch began; see `TrainStep.trained`.
        loss: Mean loss of the last closed window, over all ranks. By hand, NaN, or 0 for a window of weight 0.
        weight: Sum of its weights.
        grad_norm: Norm of its gradient before clipping. NaN without `clip_norm`.
    """

    update_step: int
    mini_step: int
    closed_windows: int
    skipped: int
    skipped_in_row: int
    empty_windows: int
    seen: int
    epochs: int
    trained: int
    loss: float
    weight: float
    grad_norm: float


class Place(NamedTuple):
    """Hold the place in the data as one value, so that an interrupt finds the old one or the new one.

    Attributes:
        epochs: Number of epochs finished.
        first: The device's count of this rank's microbatches at which `trained` is 0.
        is_loaded: Whether a file saved inside this epoch was loaded, and no loop has gone on with it.
        is_split: Whether that file was saved with another number of ranks.
    """

    epochs: int = 0
    first: int = 0
    is_loaded: bool = False
    is_split: bool = False


class Boundary:
    """Open and close the windows of one accumulator, for a train step, a cell or a loop by hand.

    Attributes:
        window, rates: The window on the device, and the rates of its optimizer.
        max_skips: The most windows that may be dropped in a row; None: any number.
        eager: Whether to run op by op.
        graphs: What was compiled, also by the step. After an error in training, all are forgotten.
        missing: Number of microbatches that the open window still needs, at least. None: unknown, read the device.
        updates: Number of updates. Stale while `missing` is None, or where windows may be dropped and nothing needs it.
        is_closed: Whether the last call of the step, flush or end of an epoch closed a window: `updated` reports it.
        is_idle: Whether no microbatch or epoch began since the last flush. Another flush fails if a rank still trains.
        turn: How often a call, a loop or a load has begun; a loop goes on while `turn` is the number that it got.
        place: See `Place`.
        functions: What to call after updates: `(every, function)`; `is_calling`: whether they are being called.
        since: When the last close, reset or start of an epoch was done, by `perf_counter`: for the seconds of a log.
        addresses: Where trained parameters and rates are in memory, once a window was closed: to find what was moved.
        saved: The count of microbatches at the last save, in a list, which `checkpoint` writes and the finalizer reads.
    """

    def __init__(self, window: Window, rates: Rates, max_skips: Optional[int], eager: bool) -> None:
        self.window, self.rates, self.max_skips, self.eager = window, rates, max_skips, eager
        self.graphs: dict[Any, Callable] = {}
        if eager:  # not op by op: thirty small operators would take longer than the optimizer
            window.record = straight(window.record, window)
        self.missing: Optional[int] = window.length.missing(0, 0)
        self.updates = self.turn = 0
        self.is_closed, self.is_idle, self.is_calling, self.place = False, True, False, Place()
        self.functions: list[tuple[int, Callable[[], object]]] = []
        self.since, self.addresses, self.saved = perf_counter(), [], [-1]  # type: float, list[int], list[int]
        # Not by the finalizer itself, which may run after MindSpore has ended.
        ended = finalize(self, _warn_of_a_lost_window, window, self.saved, os.getpid())
        ended.atexit = False
        atexit.register(ended)

    # --- a microbatch -------------------------------------------------------------------------------------------------

    def add(self, run: Callable, batch: tuple, pieces: int = 1, closes: bool = False) -> Any:
        """Add a microbatch by `run(*batch)`, and close the window if it is full. Return what `run` returns.

        `pieces`: how many `run` adds. `closes`: whether `run` also updates with them, as a window of one.
        """
        self.is_idle, self.is_closed = False, False
        missing, self.missing = self.known() if self.missing is None else self.missing, None
        others = self.window.exchange.meet(WINDOW if closes else MICROBATCH, pieces) - pieces
        result = self._result_of(run, *batch)
        if others:
            self._add_nothing([PART] * others)
        if closes:
            self._closed()
        elif missing > 1:
            self.missing = missing - 1
        elif self.window.length.budget is None:
            self.close()
        else:  # any microbatch may bring the weight
            self.known()
        return result

    def add_empty(self) -> None:
        """Add a microbatch without samples: it counts, with the weight 0."""
        if self.window.exchange.sums_each:
            self.add(lambda: self._add_nothing([END]), ())
        else:
            self.add(lambda: ops.assign_add(self.window.counts, BEGIN + END), ())

    def known(self) -> int:
        """Return `missing`. If it is unknown, read it, and close a window that is full."""
        while self.missing is None:
            counts, sums = self._read()
            missing = self.window.length.missing(counts[HELD], counts[UPDATES], sums[WEIGHT])
            if missing:
                self.missing, self.updates = missing, counts[UPDATES]
            else:
                self.close()
        return self.missing

    # --- a window -----------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Update with the open window, or drop it."""
        self.missing = None
        self.window.exchange.meet(WINDOW, 1)
        self._run_close()
        self._closed()

    def flush(self) -> bool:
        """Apply the incomplete window, and take part in those of other ranks. Return whether this rank had one."""
        exchange, self.missing, self.is_closed = self.window.exchange, None, False
        self.require_unchanged()
        self.known()
        if self.is_idle:
            exchange.meet(IDLE)
        while pieces := exchange.meet(MICROBATCH):
            self.missing = None
            self._add_nothing([HOLD] + [PART] * (pieces - 1))
            self.known()
        is_open = self._read()[0][HELD] > 0
        if is_open:
            self.rates.require_next()
            self.close()
        while exchange.meet(WINDOW):
            self._run_close()
            self._closed()
        exchange.compare(FLUSHED, self.compared())
        self.known()
        self.is_idle = True
        return is_open

    def reset(self) -> None:
        """Drop the open window, and a row of dropped ones.

        If a microbatch was left half added, the place goes back to where the window began; otherwise it stays.
        """
        self.missing, self.is_closed, self.since = None, False, perf_counter()
        counts, sums = self._copies()
        if counts[MARK] < LOADING // 2:
            raise RuntimeError(_TORN_LOAD)
        counts[IN_ROW] = 0
        if counts[MARK] > 0:
            counts[ADDED] -= counts[OWN]
        self.window.empty(counts, sums, counts[MARK] or 1)

    def _run_close(self) -> None:
        window, self.missing = self.window, None
        window.unit = window.unit or 1.0  # of a rank that has had no data: the graph holds it from now on
        # Or MindSpore takes it for a part of a forward pass. Not by `with`: an interrupt at its end would leave it on.
        unrecorded()(self._run)("close", window.close)

    def _closed(self) -> None:
        """The window was closed. Functions are the user's: what they raise is raised as it is, and all counts stand."""
        window, turn, is_update = self.window, self.turn, True
        self.missing, self.is_closed = None, True
        if not self.addresses:
            self.addresses = [address_of(p) for p in self._placed()]
        if not window.drops:
            self.updates += 1
        elif self.functions or window.length.constant is None:
            counts, _ = self._read()
            self.updates, is_update = counts[UPDATES], counts[IN_ROW] == 0
        self.missing = window.length.missing(0, self.updates)
        if is_update and not self.is_calling:  # a function that closes a window does not call them once more
            self.is_calling = True
            try:
                for every, function in self.functions:
                    if self.updates % every == 0:
                        function()
            finally:
                self.is_calling = False
        self.since = perf_counter()
        if self.turn != turn:  # compared afterwards: a lock, held while functions run, would outlive an interrupt
            raise RuntimeError(_OWNED.format("a function of on_update"))

    def _add_nothing(self, ends: list[Tensor]) -> None:
        """Take part in pieces of other ranks. `ends`: what each adds to the counts."""
        for after in ends:
            self._run("nothing", self.window.add_nothing, after)

    def _run(self, name: str, function: Callable, *arguments: Tensor) -> None:
        if name not in self.graphs:
            self.graphs[name] = self.compiled(function)
        self._result_of(self.graphs[name], *arguments)

    def _result_of(self, run: Callable, *arguments: Any) -> Any:
        try:
            return run(*arguments)
        except Exception:
            self.graphs = {}  # a graph in which a kernel has failed fails again (MindSpore 2.10)
            raise

    def compiled(self, function: Callable, inputs: Optional[Callable] = None) -> Callable:
        """Return `function` as a graph; op by op, the function itself."""
        return function if self.eager else straight(function, self.window, inputs)

    # --- an epoch -----------------------------------------------------------------------------------------------------

    def begin_epoch(self, skip: Optional[int]) -> tuple[int, int]:
        """Return the turn of the loop that begins, and how many batches to skip; see `enter_epoch`."""
        self.window.exchange.meet(EPOCH)
        self.require_unchanged()
        self.missing = None
        self.known()
        counts, _ = self._read()
        trained = counts[ADDED] - self.place.first
        if skip is None and self.place.is_loaded:
            raise RuntimeError((_SPLIT if self.place.is_split else _LOADED).format(trained))
        if counts[HELD] and (skip or 0) != trained:
            raise RuntimeError(_OPEN.format(counts[HELD]))
        self.turn, self.is_idle, self.is_calling, self.is_closed = self.turn + 1, False, False, False
        return self.turn, skip or 0

    def enter_epoch(self, skip: int) -> None:
        """Begin the epoch, once so many batches were skipped."""
        self.place, self.since = Place(self.place.epochs, self.added - skip), perf_counter()

    def end_epoch(self) -> None:
        """Count the epoch. `trained` is 0 from now on."""
        self.place = Place(self.place.epochs + 1, self.added)

    def require_turn(self, turn: int) -> None:
        """Raise RuntimeError if a loop no longer owns the step."""
        if self.turn != turn:
            raise RuntimeError(_OWNED.format("this loop over train_step.epoch"))

    @property
    def added(self) -> int:
        """Return the device's count of microbatches. It waits for the device."""
        return int(self.window.counts.asnumpy()[ADDED])

    # --- a file -------------------------------------------------------------------------------------------------------

    def of_last_update(self) -> tuple[np.ndarray, np.ndarray, int]:
        """Return counts and sums as they were when the open window began, and how many microbatches it holds."""
        self.require_unchanged()
        counts, sums = self._copies()
        if counts[MARK] < CLOSING // 2:
            _require_whole(counts[MARK])
        held = int(counts[OWN] + (counts[MARK] > 0))
        counts[ADDED] -= counts[OWN]
        counts[MARK] = counts[HELD] = counts[OWN] = sums[:LAST] = sums[MEASURED:] = 0
        return counts, sums, held

    def load(self, counts: np.ndarray, sums: np.ndarray, assign: Callable[[], None], place: tuple[int, int],
             is_inside: bool = False, is_split: bool = False) -> None:
        """Load numbers of `of_last_update`, and what `assign` assigns. `place`: epochs, and microbatches trained."""
        self.turn, self.missing, self.is_closed = self.turn + 1, None, False
        marked = counts.copy()
        marked[MARK] = LOADING
        ops.assign(self.window.counts, Tensor(marked))  # an interrupt leaves the mark
        assign()
        self.place = Place(place[0], int(counts[ADDED]) - place[1], is_inside or place[1] > 0, is_split)
        self.window.empty(counts, sums, LOADING)

    def compared(self) -> dict[str, list[Parameter]]:
        """Return the values that must be equal on all ranks, by what they are."""
        rates, state = self.rates.parameters, self.rates.state
        return {"learning rates": list(rates.values()), "parameters": list(self.window.exchange.parameters),
                "state of the optimizer": [p for name, p in state.items()
                                           if name not in rates and name not in self.rates.divided]}

    # --- what it knows ------------------------------------------------------------------------------------------------

    def status(self) -> Status:
        """Return the counters. It waits for the device. Raise RuntimeError if something was begun and not finished."""
        counts, sums = self._copies()
        _require_whole(counts[MARK])
        _, held, _, added, updates, windows, skipped, in_row, empty = counts.tolist()
        weight, loss, norm, _ = sums[LAST:MEASURED].tolist()
        seen = int(self.window.seen.asnumpy())  # what it lacks is half of 1 at most
        return Status(updates, held, windows, skipped, in_row, empty, seen, self.place.epochs, added - self.place.first,
                      loss, weight, norm)

    def require_unchanged(self) -> None:
        """Raise an error if a parameter was frozen or got new memory, or `param_groups` was changed."""
        require_trainable(self.window.exchange.parameters)
        if self.addresses:
            moved = [p.name for p, address in zip(self._placed(), self.addresses) if address_of(p) != address]
            if moved:
                raise RuntimeError(_MOVED.format(moved[0]))
        self.rates.require_unchanged()

    def look(self) -> None:
        """Raise RuntimeError if too many windows were dropped, ValueError if the rates are used up: now and then."""
        if self.window.drops and self.max_skips is not None:
            self._read()
        self.rates.require_next()

    def _read(self) -> tuple[list[int], list[float]]:
        counts, sums = self._copies()
        _require_whole(counts[MARK])
        if self.max_skips is not None and counts[IN_ROW] > self.max_skips:
            raise RuntimeError(_STUCK.format(counts[IN_ROW], counts[SKIPPED], self.max_skips, counts[UPDATES]))
        return counts.tolist(), sums.tolist()

    def _copies(self) -> tuple[np.ndarray, np.ndarray]:
        return self.window.counts.asnumpy().copy(), self.window.sums.asnumpy().copy()

    def _placed(self) -> list[Parameter]:
        return [*self.window.exchange.parameters, *self.rates.parameters.values()]


def _require_whole(mark: int) -> None:
    if mark:
        raise RuntimeError(_TORN_LOAD if mark < LOADING // 2 else _TORN_UPDATE if mark < CLOSING // 2 else _TORN_BATCH)


def _warn_of_a_lost_window(window: Window, saved: list[int], process: int) -> None:
    if os.getpid() != process:  # a child that was forked must not touch the device
        return
    try:
        counts = window.counts.asnumpy()
    except RuntimeError:  # the device may be unreadable by now
        return
    if counts[HELD] and counts[ADDED] != saved[0]:
        warn(_LOST.format(window.exchange.parameters[0].name, counts[HELD]), UserWarning, stacklevel=2)
