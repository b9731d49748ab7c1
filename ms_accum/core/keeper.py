"""The keeper: decide on the host when a window of a train step closes.

(In a cell, and with an Accumulator by hand, the device decides.) The keeper counts down, and reads the device once per
window, when the window should be full. With `until_weight`, or in a cell with `max_skips`, it reads after each
microbatch; in a cell without `max_skips` that may skip, after each 64th, to warn of many skips. If a graph may close
windows by hand, it also reads before each microbatch.

    microbatch:  count down ─ some missing ─► nothing to read
                     │ none missing: read the facts
                     ▼
                   full? ─ no (one was skipped, or the window waits for its weight) ─► count again
                     │ yes
                     ▼
    close:       may a stage drop it? ─ no ─► update
                     │ yes
                     ▼
                  accepted? ─ yes ─► update            flush:  take part in the windows of ranks that still have data,
                     │ no                                      with weight 0; then close what is open
                     ▼
                    drop
"""
from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple, Optional
from warnings import warn

import mindspore as ms
from mindspore import Tensor, ops

from ..tensors import as_tensor, as_vector, require_trainable
from .counters import NoProgress, require_whole
from .stages import ACTIVE, TAKEN

if TYPE_CHECKING:
    from .accumulator import Accumulator
    from .way import Way

_ADDED = ("the open window holds {} microbatches, but only {} came from this train step: an accumulator must be filled "
          "by one train step or by hand; give the other one an accumulator of its own, and call accumulator.reset(), "
          "which drops the open window")
_CHANGED = ("the open window was closed or dropped inside the loop, but its weights were already summed for all of its "
            "batches; leave the loop and call accumulator.reset(). Call flush(), apply() and reset() only outside of "
            "the loop")
_STUCK = ("more than max_skips={} {} in a row were skipped ({} by now, {} in all), because their gradients were not "
          "finite, after update {}; look for NaN in the batches since then, lower the initial loss scale or the "
          "learning rate, or load a checkpoint; another call continues the training")
_SKIPPED = ("{} {} in a row were skipped, because their gradients were not finite, so nothing was trained with them; "
            "lower the initial loss scale or the learning rate, or look for NaN in the batches; give max_skips={} to "
            "get an error instead")
_FEW_READS = 64  # microbatches of a cell between two reads of the skips
_MANY = 10  # skips in a row that are worth a warning; a loss scale of 2**24 comes down in fewer


class Facts(NamedTuple):
    """Hold the state of the open window on the device, in one read.

    See `Accumulator` for the counters. `unfinished` is the number of marks in the journal; `full` is 1 or 0; `accepted`
    is 1 or 0, or -1 if the stages were not asked.
    """

    mini_step: int
    update_step: int
    unfinished: int
    skipped_in_row: int
    skipped: int
    full: int
    accepted: int = -1


class Turn:
    """Follow one microbatch from its begin to its end.

    Attributes:
        is_alone: Whether it is a window of its own and the buffers are empty: the block may update without buffers.
        updated: Whether it closed a window with an update. The block sets it if it updates without buffers. False if
            the device closes windows: the host does not know.
        closes: Whether the device closes the window, if it is full. The block sets it.
    """

    def __init__(self, is_alone: bool) -> None:
        self.is_alone, self.updated, self.closes = is_alone, False, False


class Keeper:
    """Open and close the windows of an accumulator, for the host.

    Args:
        accumulator: The accumulator. Several keepers may share it: each reads the device first when it continues.
        compiling: Function that compiles a function without control flow. By default, functions run op by op.
    """

    def __init__(self, accumulator: Accumulator, compiling: Callable[[Callable], Callable] = lambda f: f) -> None:
        self.accumulator, self._way, self._length = accumulator, accumulator.way, accumulator.way.length
        self._counters, self._exchange = self._way.counters, self._way.exchange
        # By the names of the inner functions below: "counted", "judged", "apply" and so on.
        self._run = {function.__name__: compiling(function) for function in (
            *_questions(self._way), *_endings(self._way), end_of(accumulator), nothing_of(accumulator))}
        self._held = 0  # microbatches in the open window of a step; at most, because some may have been skipped
        self._dropped = 0  # windows dropped in a row
        self._unread = 0  # microbatches of a cell since the last read of skips
        self._fixed: Optional[int] = None  # the length that `open` gave the window; None: `accumulate_step` decides
        self.before_exchange: Callable[[], object] = lambda: None  # called in `flush` before each exchange
        self.forget()

    def forget(self) -> None:
        """Read the device before the next microbatch."""
        self._missing: Optional[int] = None  # microbatches still needed, at least

    @contextmanager
    def microbatch(self) -> Iterator[Turn]:
        """Run the block as one microbatch, and close the window after it if it is full.

        If the block or the closing raises an error, the next microbatch reads the device.

        Raises:
            RuntimeError: If an error left a part of a batch in the open window, or stopped an update; if other code
                added to the window, or closed a window that `open` has opened; if more than `max_skips` were skipped in
                a row.
            ValueError: If a parameter is frozen, and this microbatch may close the window.
        """
        missing = self._missing
        self.forget()
        if self._way.take_over(self) or missing is None:
            missing = self._settled()
        if missing <= 1:
            require_trainable(self._way.weights)
        turn = Turn(missing == 1 and self._held == 0)
        yield turn
        if turn.closes:
            self._look_after_skips()
            self._missing = 1  # the window is not full: no more is known without reading
        elif turn.updated:
            self._missing = 1 if self._length.is_one else None  # else the next one's length is not known
        elif missing > 1:
            self._held, self._missing = self._held + 1, missing - 1
        else:
            turn.updated = self._close_if_full()

    def _look_after_skips(self) -> None:
        """After a microbatch of a cell: raise an error after too many skips, or warn of many, with few reads."""
        self.require_progress()
        self._unread += 1
        warns = self._way.stages and self._counters.max_skips is None and not self._counters.warned
        if warns and self._unread >= _FEW_READS:
            self._unread = 0
            self._warn_of_skips(self.facts().skipped_in_row)

    def open(self, microbatches: int) -> None:
        """Open a window of this many microbatches, regardless of `accumulate_step`. No window may be open now."""
        self._way.take_over(self)
        self._held, self._missing, self._fixed = 0, microbatches, microbatches

    def require_open(self) -> None:
        """Raise RuntimeError if the window that `open` opened is no longer open, as far as the host knows."""
        if self._missing is None:
            raise RuntimeError(_CHANGED)

    def close(self, accepted: int = -1) -> bool:
        """Update with the open window, or drop it if a stage does not accept it. Return whether it was applied.

        `accepted`: the value in the facts, if they were read.
        """
        if not self._way.may_drop:
            self._run["apply"]()
            return True
        if self._exchange.ranks > 1:
            applied = self._close_together(1.0)[1]
        else:
            applied = (self.facts("judged").accepted if accepted < 0 else accepted) == 1
            self._run["apply" if applied else "drop"]()
        self._dropped = 0 if applied else self._dropped + 1
        if not applied:
            self._warn_of_skips(self._dropped)
            self.require_progress()
        return applied

    def flush(self, pieces: int = 1) -> tuple[bool, bool]:
        """Apply the incomplete window if one is open. Return whether a window was closed, and whether one was applied.

        With several ranks, take part in the windows of the others until no rank has data. `pieces`: the number of
        pieces in which each rank adds a microbatch.
        """
        require_trainable(self._way.weights)
        self._way.release()
        facts, exchange, closed, applied = self._whole(), self._exchange, False, False
        self._warn_of_skips(facts.skipped_in_row)
        held = facts.mini_step
        while exchange.inside > 1 and self._add_nothing(pieces) > 0:
            facts = self._whole()
            held = facts.mini_step
            if facts.full:
                closed, applied, held = True, self.close() or applied, 0
        active = 1.0  # ranks that still have data
        while exchange.across > 1 and active > 0:
            self.before_exchange()
            was_open, updated, active = self._close_together(0.0)
            closed, applied, held = closed or was_open, applied or updated, 0
        if held > 0:
            closed, applied = True, self.close() or applied
        self.require_progress()
        return closed, applied

    def facts(self, graph: str = "counted") -> Facts:
        """Read the device, and wait for it. With "judged", also read whether all stages accept the open window."""
        return Facts(*self._run[graph]().asnumpy().tolist())

    def require_progress(self, facts: Optional[Facts] = None) -> None:
        """Raise RuntimeError if more than `max_skips` were skipped in a row, unless these were reported before."""
        max_skips = self._counters.max_skips
        if max_skips is None:
            return
        facts = facts or self.facts()
        if facts.skipped_in_row > max_skips and facts.skipped != self._counters.reported:
            self._counters.reported = facts.skipped
            raise NoProgress(_STUCK.format(max_skips, self._skipped_noun(), facts.skipped_in_row, facts.skipped,
                                           facts.update_step))

    def _warn_of_skips(self, in_row: int) -> None:
        """Warn once about many skips in a row, if `max_skips` does not raise an error."""
        if self._counters.max_skips is None and in_row >= _MANY and not self._counters.warned:
            self._counters.warned = True
            warn(_SKIPPED.format(in_row, self._skipped_noun(), _MANY), UserWarning, stacklevel=2)

    def _skipped_noun(self) -> str:
        return "windows" if self._way.may_drop else "microbatches or pieces"

    def _whole(self) -> Facts:
        """Return the facts. Raise RuntimeError if a batch or an update was not finished."""
        facts = self.facts()
        require_whole(facts.unfinished)
        return facts

    def _settled(self) -> int:
        """Close the open window if it is full. Return the least number of microbatches that the open window needs.

        Raise RuntimeError if `open` has opened a window that was not trained to its end.
        """
        if self._fixed is not None:
            self._fixed = None
            raise RuntimeError(_CHANGED)
        facts = self._whole()
        if facts.full:
            self.close()
            facts = self._whole()
        self._held = facts.mini_step
        return self._needed(facts)

    def _needed(self, facts: Facts) -> int:
        if self._fixed is not None:
            return self._fixed - facts.mini_step
        return self._length.missing(facts.mini_step, facts.update_step, bool(facts.full))

    def _close_if_full(self) -> bool:
        """Close the window if it is full on the device. Return whether it was applied."""
        # If a weight closes windows, most reads find no full window: no verdict is needed.
        judge = self._way.may_drop and self._exchange.ranks == 1 and self._length.budget is None
        facts = self.facts("judged" if judge else "counted")
        require_whole(facts.unfinished)
        needed = self._needed(facts)
        if facts.mini_step > self._held + 1:
            raise RuntimeError(_ADDED.format(facts.mini_step, self._held + 1))
        if needed > 0 and self._fixed is not None:
            raise RuntimeError(_CHANGED)
        if needed > 0:  # a microbatch was skipped, or the window waits for its weight
            self._warn_of_skips(facts.skipped_in_row)
            self.require_progress(facts)
            self._held, self._missing = facts.mini_step, needed
            return False
        applied = self.close(facts.accepted)
        if self._fixed is None:
            self._held, self._missing = 0, self._length.length_after(facts.update_step + applied)
        self._fixed = None
        return applied

    def _add_nothing(self, pieces: int) -> float:
        """Take part in a microbatch of the ranks inside. Return the number of them that still have data."""
        active = max(float(self._run["nothing"]()) for _ in range(pieces))
        self._run["end"](Tensor(pieces, ms.int32))
        return active

    def _close_together(self, active: float) -> tuple[bool, bool, float]:
        """Exchange, and close the window of all ranks if one is open.

        Return whether one was open, whether it was applied, and the number of ranks that still have data.
        """
        accepted, sums, *gradients = self._run["reduce"](Tensor(active))
        accepted, microbatches, active = accepted.asnumpy().tolist()
        if active == 0 and microbatches == 0:
            return False, False, 0.0
        if accepted:
            self._run["update"](sums, *gradients)
        else:
            self._run["drop"]()
        return True, bool(accepted), active


def _questions(way: Way) -> tuple[Callable, ...]:
    """Return the functions that read the facts."""
    counters, journal = way.counters, way.journal

    def counted() -> Tensor:
        return ops.stack((counters.mini_step + 0, counters.update_step + 0, journal.unfinished + 0,
                          counters.skipped_in_row + 0, counters.skipped + 0, way.is_full().astype(ms.int32)))

    def judged() -> Tensor:
        window = way.window()
        # `depend` uses the unit, which nobody needs; otherwise MindSpore warns of "nodes eliminated by mistake".
        accepted = ops.depend(as_tensor(window[3]), window[1])
        return ops.concat((counted(), accepted.astype(ms.int32).reshape(1)))

    return counted, judged


def _endings(way: Way) -> tuple[Callable, ...]:
    """Return the functions that close a window. A graph has to return something: here, the updates done."""
    update_step = way.counters.update_step

    def apply() -> Tensor:
        way.update_with(way.window())
        return update_step + 0

    def reduce(active: Tensor) -> tuple:
        gradients, unit, sums, accepted = way.window(active)
        accepted = as_tensor(accepted).astype(ms.float32)
        return as_vector((ops.depend(accepted, unit), sums[TAKEN], sums[ACTIVE])), as_vector(sums), *gradients

    def update(sums: Tensor, *gradients: Tensor) -> Tensor:
        # The exchange of several ranks returns the unit 1.
        way.update_with((gradients, 1.0, tuple([sums[i] for i in range(sums.shape[0])]), True))
        return update_step + 0

    def drop() -> Tensor:
        way.close(False)
        return update_step + 0

    return apply, reduce, update, drop


def end_of(accumulator: Accumulator) -> Callable:
    """Return `pieces -> microbatches in the window`, which ends a microbatch of that many pieces."""
    way = accumulator.way

    def end(pieces: Tensor) -> Tensor:
        way.end_microbatch(pieces)
        return way.counters.mini_step + 0

    return end


def nothing_of(accumulator: Accumulator, active: int = 0) -> Callable:
    """Return `() -> ranks that still have data`, which takes part in the exchange of a piece and adds nothing.

    `active`: 1 if this rank still has data, and this piece stands for its empty microbatch.
    """
    way = accumulator.way

    def nothing() -> Tensor:
        # With weight 0, any Tensors of the right shapes are ignored. This loss has no gradient.
        begun = way.begin(Tensor(0.0, ms.float32))
        return ops.depend(as_tensor(way.add_piece(way.weights, 0.0, None, active)), begun)

    return nothing
