"""Graphs without control flow, scheduled by the host: `strategy="split"` of a train step.

    host:    count pieces and microbatches            window full?  compare with the device's counters
                |                                          |
    device:  add one piece, straight: gather rows,     update, straight: reduce, normalise, clip, optimizer, reset
             value_and_grad, add
"""
from __future__ import annotations

from collections.abc import Callable
from typing import Any, Optional

import mindspore as ms
import numpy as np
from mindspore import Tensor, ops

from .accumulate import alone_or_all, make_add_piece, means_of, whole
from .accumulator import Accumulator
from .compiled import CompiledStep, compiled
from .gradients import Scalar, as_vector
from .split import aux_values, checked_aux, counted, join_aux_of_all, select_rows


class SplitStep(CompiledStep):
    """A train step of straight graphs: one adds a microbatch or a piece of it, one updates; the host decides when.

    Where a window may be dropped (a loss scaler, `on_nonfinite="skip_window"`), a third one says whether it is finite,
    and the host reads that before it calls the update.
    """

    strategy = "split"

    def __init__(
        self,
        forward_fn: Callable,
        functions_for: Callable,
        accumulator: Accumulator,
        micro_size: int,
        has_aux: bool,
    ) -> None:
        def graph_for(samples: int, cut: tuple[bool, ...], names: tuple[str, ...]) -> Callable:
            forward, weigh = functions_for(len(cut), names)
            if micro_size > 1:
                add_piece = make_add_piece(forward, accumulator, weigh, has_aux)
                return _Pieces(add_piece, accumulator, samples, micro_size, cut, has_aux)

            def graph(add: Optional[Callable], end: Callable) -> Callable:
                accumulate = whole(make_add_piece(forward, accumulator, weigh, has_aux, add), end, has_aux)

                def accumulate_whole(*batch: Any) -> Any:
                    return accumulate(samples, cut, *batch)

                return straight(accumulate_whole, accumulator)

            return _Whole(graph, accumulator)

        super().__init__(forward_fn, accumulator, micro_size, graph_for)
        self._updated = Tensor(True)
        self._count = accumulator._count
        self._make_closing_graphs()

    def _make_closing_graphs(self) -> None:
        accumulator = self.accumulator
        self._judge = straight(_judge(accumulator), accumulator)
        self._apply, self._drop = (straight(_closing(accumulator, finite), accumulator) for finite in (True, False))

    def _discard(self, key: tuple) -> None:
        super()._discard(key)
        self._make_closing_graphs()

    def _run(self, graph: Callable, batch: tuple) -> Any:
        count = self._count
        count.settle()
        if count.length == 1 and count.microbatches == 0 and graph.alone is not None:
            count.compare(fewer_allowed=False)
            result = graph.alone(*batch)
            count.close(updated=True)
            self.updated = self._updated
            return result
        count.closing = count.may_close
        result = graph(*batch)
        count.microbatches += 1
        if count.full and self._close():
            self.updated = self._updated
        return result

    def flush(self) -> Tensor:
        """Apply the incomplete window, if one is open. Return whether one was: bool Tensor of shape `()`."""
        self._count.forget()
        if self.accumulator.reducer.ranks > 1:
            return super().flush()
        self.accumulator._require_whole()
        self._count.settle(refuse=False)
        self.updated = self._not_updated
        if self._count.microbatches > 0:
            self._conclude()
            self.updated = self._updated
        return self.updated

    def _close(self) -> bool:
        """Close the window if the device has as many microbatches, too. Return whether it did."""
        self._count.compare(fewer_allowed=self.accumulator.on_nonfinite == "skip_microbatch")
        if self.accumulator._in_pieces:
            self.accumulator._require_whole()
        if not self._count.full:
            return False
        self._conclude()
        return True

    def _conclude(self) -> None:
        finite, reduced = True, ()
        if self.accumulator._window_guard.judges:
            finite, *reduced = self._judge()
            finite = bool(finite)
        (self._apply if finite else self._drop)(*reduced)
        self._count.close(finite)


def straight(function: Callable, accumulator: Accumulator) -> Callable:
    """Return `function` as a graph without control flow; on CPU with a branch that is never taken.

    On CPU, MindSpore 2.10 runs the kernels of a graph one after the other if they are at most 100, there is no branch,
    and the machine has few cores (`GraphScheduler::SetActorExecutionStrategy`; no setting changes that). On 2 cores,
    forward and backward of an MLP take 1.2 times as long then.
    """
    if not needs_branch():
        return compiled(function)

    def with_branch(*arguments: Any) -> Any:
        result = function(*arguments)
        if accumulator.mini_step < 0:
            ops.assign(accumulator.mini_step, 0)
        return result

    return compiled(with_branch)


def needs_branch() -> bool:
    """Return whether `straight` adds the branch."""
    return ms.get_context("device_target") == "CPU"


class _Whole:
    """The graphs for a batch of one layout that is not cut.

    Attributes:
        alone: One graph for a window of one microbatch, which needs no buffers; None if a microbatch or window may
            be skipped, or is measured.
    """

    def __init__(self, graph: Callable, accumulator: Accumulator) -> None:
        def apply_alone(gradients: tuple, factors: tuple[Scalar, ...], weights: tuple[Scalar, ...]) -> Tensor:
            accumulator._apply_alone(gradients, weights)
            return accumulator.update_step + 0

        def nothing(updates: Tensor) -> None:
            pass

        self._add = graph(None, accumulator._end_microbatch)
        skips = accumulator.on_nonfinite != "apply" or accumulator._window_guard.judges
        self.alone = None if skips or accumulator._meters else graph(apply_alone, nothing)

    def __call__(self, *batch: Any) -> Any:
        return self._add(*batch)


class _Pieces:
    """A batch of one layout in pieces: a graph for each length of a piece, which the host calls for each in turn."""

    alone = None

    def __init__(
        self,
        add_piece: Callable,
        accumulator: Accumulator,
        samples: int,
        micro_size: int,
        cut: tuple[bool, ...],
        has_aux: bool,
    ) -> None:
        def graph_of(rows: int) -> Callable:
            def piece(start: Tensor, totals: Tensor, *batch: Any) -> Any:
                accumulator._note_piece()
                # The rows are gathered here, from the whole batch: a graph's argument is not copied.
                losses, weights, taken, aux = add_piece(rows, *select_rows(start + ops.arange(rows), cut, batch))
                accumulator._note_piece()
                sums = tuple([counted(loss, weight) for loss, weight in zip(losses, weights)])
                totals = totals + as_vector((*sums, *weights, taken))
                return (totals, as_vector(weights[:1]), checked_aux(aux, rows)) if has_aux else totals

            return straight(piece, accumulator)

        def join(totals: Tensor, *aux: Tensor) -> tuple[Tensor, ...]:
            accumulator._end_microbatch(totals[2 * count].astype(ms.int32), notes=2 * len(starts))
            means, divisors = means_of(tuple([totals[i] for i in range(2 * count)]), count)
            return (*means, *join_aux_of_all(aux, len(starts), divisors[0]))

        count = self._count = accumulator.losses
        rows = -(-samples // micro_size)
        starts = range(0, samples, rows)
        graphs = {length: graph_of(length) for length in {min(rows, samples - start) for start in starts}}
        self._calls = [(graphs[min(rows, samples - start)], Tensor(start, ms.int32)) for start in starts]
        self._join = compiled(join)
        self._has_aux = has_aux

    def __call__(self, *batch: Any) -> Any:
        # The sums go from piece to piece. Keeping what each returned would cut MindSpore's pool of memory into pieces,
        # and the peak would grow with their number (48 pieces: 286 MB instead of 84).
        totals, results = Tensor(np.zeros(2 * self._count + 1), ms.float32), []
        for graph, start in self._calls:
            totals = graph(start, totals, *batch)
            if self._has_aux:
                totals, weight, aux = totals
                results += [weight, *aux_values(aux)]
        joined = self._join(totals, *results)
        losses, joined = alone_or_all(joined[:self._count]), joined[self._count:]
        if not self._has_aux:
            return losses
        return losses, (joined if isinstance(aux, tuple) else joined[0])


def _judge(accumulator: Accumulator) -> Callable:
    """Return `() -> (whether the window is finite, and, if ranks exchange it, its header and gradients)`."""
    def judge() -> tuple:
        gradients, _, header = accumulator._reduced(1.0)
        finite = accumulator._window_guard.accepts(gradients)
        return (finite, as_vector(header), *gradients) if accumulator.reducer.exchanges_windows else (finite,)

    return judge


def _closing(accumulator: Accumulator, finite: bool) -> Callable:
    """Return `(*what was reduced by _judge) -> the updates done`: the update of a window, or its end without one."""
    def close(*reduced: Tensor) -> Tensor:
        if reduced:
            unit, gradients = 1.0, reduced[1:]
            header = tuple([reduced[0][i] for i in range(reduced[0].shape[0])])
        else:
            gradients, unit, header = accumulator._reduced(1.0)
        if finite:
            accumulator._update(gradients, unit, header)
        accumulator._conclude(finite)
        accumulator.reset()
        return accumulator.update_step + 0  # a graph has to return something

    return close
