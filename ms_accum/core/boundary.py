"""The end of windows, scheduled by the host: by one straight graph, or two where a window may be dropped.

    close:  judges? ─ no ─► update                        flush:  take part in the windows of ranks that have data,
               │ yes                                              with weight 0; then close what is open
               ▼
            reduced ─► finite? ─ yes ─► update
                          │ no
                          ▼
                         drop
"""
from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import mindspore as ms
from mindspore import Tensor, ops

from ..tensors import as_tensor, as_vector

if TYPE_CHECKING:
    from .accumulator import Accumulator


def _as_it_is(function: Callable) -> Callable:
    return function


class Boundary:
    """What closes the windows of an accumulator, for the host.

    Args:
        accumulator: The accumulator.
        compiling: What makes a graph of a function without control flow; by default, functions run op by op.
    """

    def __init__(self, accumulator: Accumulator, compiling: Callable[[Callable], Callable] = _as_it_is) -> None:
        self.accumulator = accumulator
        functions = _graphs(accumulator)
        self._graphs = {name: compiling(function) for name, function in functions.items()}

    def settle(self) -> tuple[int, int]:
        """Close the open window if it is full. Return what the open one holds and what it needs: see `position`."""
        held, remaining = self.accumulator.position()
        if remaining == 0:
            self.close()
            held, remaining = self.accumulator.position()
        return held, remaining

    def close(self) -> bool:
        """Update with the open window, or drop it if the guard does not accept it. Return whether it was applied."""
        run = self._graphs
        if not self.accumulator.guard.judges:
            run["apply"]()
            return True
        if self.accumulator.exchange.ranks > 1:
            return self._close_with(1.0)[0]
        if run["judge"]():
            run["apply"]()
            return True
        run["drop"]()
        return False

    def flush(self, pieces: int = 1, before: Callable[[], None] = lambda: None) -> bool:
        """Apply the incomplete window, if one is open. Return whether a window was closed: applied or dropped.

        With several ranks, this one takes part in the windows of the others until none has data.

        Args:
            pieces: In how many pieces each rank adds a microbatch.
            before: Called before each exchange of windows.
        """
        accumulator, exchange = self.accumulator, self.accumulator.exchange
        accumulator.countdown.claim()
        accumulator.require_whole()
        windows = int(accumulator.closed_windows)
        while exchange.inside > 1 and self._add_nothing(pieces) > 0:
            if accumulator.position()[1] == 0:
                self.close()
        if exchange.across > 1:
            active = 1.0  # ranks that have data or close a window
            while active > 0:
                before()
                active = self._close_with(0.0)[1]
        elif int(accumulator.mini_step) > 0:
            self.close()
        accumulator.guard.require_progress()
        return int(accumulator.closed_windows) > windows

    def _add_nothing(self, pieces: int) -> float:
        """Take part in a microbatch of the ranks inside. Return how many of them have data."""
        active = max(float(self._graphs["nothing"]()) for _ in range(pieces))
        self._graphs["end"](Tensor(pieces, ms.int32))
        return active

    def _close_with(self, active: float) -> tuple[bool, float]:
        """Exchange, and close the window of all ranks if there is one.

        Return whether it was applied, and how many ranks are active.
        """
        finite, numbers, *gradients = self._graphs["reduce"](Tensor(active))
        microbatches, active = numbers[1:3].asnumpy().tolist()
        if active == 0 and microbatches == 0:
            return False, 0.0
        if finite:
            self._graphs["update"](numbers, *gradients)
        else:
            self._graphs["drop"]()
        return bool(finite), active


def _graphs(accumulator: Accumulator) -> dict[str, Callable]:
    """Return the functions of a boundary. A graph has to return something: here, the updates done."""
    def apply() -> Tensor:
        accumulator.update_with(accumulator.reduced())
        return accumulator.update_step + 0

    def judge() -> Tensor:
        reduced = accumulator.reduced()
        # `depend` uses what nobody needs, or MindSpore warns of "side effect nodes eliminated by mistake".
        return ops.depend(reduced[3], reduced[1])

    def reduce(active: Tensor) -> tuple:
        gradients, unit, numbers, finite = accumulator.reduced(active)
        finite = finite if isinstance(finite, Tensor) else Tensor(finite)
        return (ops.depend(finite, unit), as_vector(numbers), *gradients)

    def update(numbers: Tensor, *gradients: Tensor) -> Tensor:
        accumulator.update_with((gradients, 1.0, tuple([numbers[i] for i in range(numbers.shape[0])]), True))
        return accumulator.update_step + 0

    def drop() -> Tensor:
        accumulator.drop()
        return accumulator.update_step + 0

    return {function.__name__: function for function in (
        apply, judge, reduce, update, drop, end_of(accumulator), nothing_of(accumulator))}


def end_of(accumulator: Accumulator) -> Callable:
    """Return `pieces -> microbatches in the window`, which ends a microbatch of so many pieces."""
    def end(pieces: Tensor) -> Tensor:
        accumulator.end_microbatch(pieces)
        return accumulator.mini_step + 0

    return end


def nothing_of(accumulator: Accumulator, active: int = 0) -> Callable:
    """Return `() -> ranks that have data`, which takes part in the exchange of a piece and adds nothing.

    `active`: 1 if this rank counts its microbatch by this piece.
    """
    def nothing() -> Tensor:
        # With weight 0, any Tensors of the right shapes are ignored. No gradient comes from this loss.
        begun = accumulator.begun(Tensor(0.0, ms.float32))
        return ops.depend(as_tensor(accumulator.add_piece(accumulator.optimizer.parameters, 0.0, active)), begun)

    return nothing
