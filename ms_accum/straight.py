"""Graphs without control flow, scheduled by the host: `strategy="split"` of a train step.

    host:    count pieces and microbatches            window full?  compare with the device's counters
                |                                          |
    device:  add one piece, straight: gather rows,     update, straight: reduce, normalise, clip, optimizer, reset
             value_and_grad, add
"""
from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, Optional

import mindspore as ms
import numpy as np
from mindspore import Tensor, ops

from .accumulate import alone_or_all, make_add_known, make_add_piece, means_of, weights_of, whole
from .accumulator import Accumulator
from .arguments import boolean
from .batch import as_arguments
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
            if accumulator._known:
                def add_known(counts: tuple[bool, ...]) -> Callable:
                    return make_add_known(forward, accumulator, weigh, has_aux, counts)

                return _Known(add_known, weigh, accumulator, samples, micro_size, cut, has_aux)
            if micro_size > 1:
                add_piece = make_add_piece(forward, accumulator, weigh, has_aux)
                return _Pieces(lambda counts: add_piece, accumulator, samples, micro_size, cut, has_aux)

            def graph(add: Optional[Callable], end: Callable) -> Callable:
                accumulate = whole(make_add_piece(forward, accumulator, weigh, has_aux, add), end, has_aux)

                def accumulate_whole(*batch: Any) -> Any:
                    return accumulate(samples, cut, *batch)

                return straight(accumulate_whole, accumulator)

            return _Whole(graph, accumulator)

        super().__init__(forward_fn, accumulator, micro_size, graph_for)
        self._updated = Tensor(True)
        self._count = accumulator._count
        self._ahead: Optional[_Ahead] = None
        self._make_closing_graphs()
        if accumulator.losses > 1 and accumulator.window.is_one and not accumulator._why_apart():
            # Each batch is a window, which is weighed before its pieces are trained.
            accumulator._know_totals()

    def _make_closing_graphs(self) -> None:
        accumulator = self.accumulator
        self._judge = straight(_judge(accumulator), accumulator)
        self._apply, self._drop = (straight(_closing(accumulator, finite), accumulator) for finite in (True, False))
        self._announce = compiled(_announcing(accumulator))
        self._exchange = straight(_exchanging(accumulator), accumulator)

    def _discard(self, key: tuple) -> None:
        super()._discard(key)
        self._make_closing_graphs()

    def _compile_again(self) -> None:
        """Forget all graphs, of which some were compiled for losses that are kept apart."""
        self._graphs.clear()
        self._make_closing_graphs()
        self._make_flush()

    def epoch(self, batches: Iterable, lookahead: bool = False) -> Iterator[Any]:
        """See `CompiledStep.epoch`."""
        boolean("lookahead", lookahead, "say whether windows are weighed before they are trained")
        if not lookahead or self.accumulator.losses == 1 or self.accumulator.window.is_one:
            yield from super().epoch(batches)
            return
        self.accumulator._require_whole()
        if not self.accumulator._known:
            self.accumulator._know_totals()
            self._compile_again()
        window, weights = [], []
        for batch in batches:
            graph, arguments = self._prepared(*as_arguments(batch))
            window.append((graph, arguments))
            weights.append(self._graphs[graph].weigh(*arguments))
            if self._is_full(weights):
                yield from self._train_ahead(window, weights)
                window, weights = [], []
        if window:
            yield from self._train_ahead(window, weights)
        self.flush()
        if window:
            self.updated = self._updated

    def _is_full(self, weights: list[np.ndarray]) -> bool:
        """Return whether these microbatches fill a window; `weights` as from `_Known.weigh`."""
        self._count.settle()
        budget = self.accumulator._budget
        if len(weights) >= self._count.length or budget is None:
            return len(weights) >= self._count.length
        # As the device adds and compares.
        return np.add.accumulate(np.concatenate(weights)[:, 0].astype(np.float32))[-1] >= np.float32(budget)

    def _train_ahead(self, window: list[tuple], weights: list[np.ndarray]) -> Iterator[Any]:
        total = self._announce(Tensor(sum(w.sum(0) for w in weights), ms.float32))
        for i, ((key, batch), of_pieces) in enumerate(zip(window, weights)):
            if i > 0 and not self._count.ahead:
                raise RuntimeError("the open window was closed or dropped in the middle of epoch(lookahead=True), "
                                   "which weighed it as a whole; expected no flush(), apply() or reset() inside the "
                                   "loop: leave the loop first")
            self._ahead = _Ahead(total, of_pieces, last=i + 1 == len(window))
            try:
                result = self._call(key, batch)
            finally:
                self._ahead = None
            yield result

    def _run_known(self, graph: _Known, batch: tuple) -> Any:
        """Train on a microbatch of a window whose weights are known: of this batch alone, or of `_train_ahead`."""
        count, ahead = self._count, self._ahead
        if ahead is None:
            if not self.accumulator.window.is_one:
                raise RuntimeError("the train step weighs windows before it trains on them, expected no single calls: "
                                   "go on with epoch(batches, lookahead=True), or build another accumulator")
            weights = graph.weigh(*batch)
            ahead = _Ahead(self._announce(Tensor(weights.sum(0), ms.float32)), weights, last=True)
        count.closing, count.ahead = ahead.last, self._ahead is not None
        result = graph(*batch, known=ahead)
        count.microbatches += 1
        if ahead.last:
            count.ahead = False
            count.compare(fewer_allowed=False)
            self.accumulator._require_whole()
            self._conclude()
            self.updated = self._updated
        return result

    def _run(self, graph: Callable, batch: tuple) -> Any:
        count = self._count
        count.settle()
        if self.accumulator._known:
            return self._run_known(graph, batch)
        if count.length == 1 and count.microbatches == 0 and graph.alone is not None:
            count.compare(fewer_allowed=False)
            result = self._update(graph.alone, *batch)
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
        if not self.accumulator.reducer.flushes_alone:
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
        if finite:
            self._update(self._apply, *reduced)
        else:
            self._drop(*reduced)
            self._count.close(updated=False)

    def _update(self, graph: Callable, *arguments: Any) -> Any:
        """Run a graph that updates, and the exchange between ranks that is due after it. Return what it returned."""
        # Asked before: afterwards, the answer would wait for the update.
        due = self.accumulator.reducer.due(self._count.updates + 1)
        result = graph(*arguments)
        self._count.close(updated=True)
        if due:
            self._exchange()
        return result


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
    """A batch of one layout in pieces: a graph for each length of a piece, which the host calls for each in turn.

    Args:
        make_add: `(counts) -> ` a function as from `accumulate.make_add_piece`, or, where windows are weighed before,
            as from `make_add_known` for these counts.
    """

    alone = None

    def __init__(
        self,
        make_add: Callable,
        accumulator: Accumulator,
        samples: int,
        micro_size: int,
        cut: tuple[bool, ...],
        has_aux: bool,
    ) -> None:
        def join(totals: Tensor, *aux: Tensor) -> tuple[Tensor, ...]:
            accumulator._end_microbatch(totals[2 * losses].astype(ms.int32), notes=2 * len(starts))
            means, divisors = means_of(tuple([totals[i] for i in range(2 * losses)]), losses)
            return (*means, *join_aux_of_all(aux, len(starts), divisors[0]))

        losses = self._losses = accumulator.losses
        rows = -(-samples // micro_size)
        starts = range(0, samples, rows)
        self._starts = [(Tensor(start, ms.int32), min(rows, samples - start)) for start in starts]
        self._make_add, self._accumulator, self._cut, self._has_aux = make_add, accumulator, cut, has_aux
        self._graphs: dict[tuple, Callable] = {}
        self._join = compiled(join)

    def _graph(self, rows: int, counts: Optional[tuple[bool, ...]]) -> Callable:
        if (rows, counts) not in self._graphs:
            self._graphs[rows, counts] = self._new_graph(rows, self._make_add(counts))
        return self._graphs[rows, counts]

    def _new_graph(self, rows: int, add_piece: Callable) -> Callable:
        accumulator, cut, has_aux = self._accumulator, self._cut, self._has_aux

        def piece(start: Tensor, totals: Tensor, *arguments: Any) -> Any:
            known = arguments[:len(arguments) - len(cut)]
            batch = arguments[len(arguments) - len(cut):]
            accumulator._note_piece()
            # The rows are gathered here, from the whole batch: a graph's argument is not copied.
            inputs = select_rows(start + ops.arange(rows), cut, batch)
            losses, weights, taken, aux = add_piece(rows, *known, *inputs)
            accumulator._note_piece()
            sums = tuple([counted(loss, weight) for loss, weight in zip(losses, weights)])
            totals = totals + as_vector((*sums, *weights, taken))
            return (totals, as_vector(weights[:1]), checked_aux(aux, rows)) if has_aux else totals

        return straight(piece, accumulator)

    def __call__(self, *batch: Any, known: Optional[_Ahead] = None) -> Any:
        # The sums go from piece to piece. Keeping what each returned would cut MindSpore's pool of memory into pieces,
        # and the peak would grow with their number (48 pieces: 286 MB instead of 84).
        totals, results = Tensor(np.zeros(2 * self._losses + 1), ms.float32), []
        for i, (start, rows) in enumerate(self._starts):
            if known is None:
                totals = self._graph(rows, None)(start, totals, *batch)
            else:
                totals = self._graph(rows, known.counts(i))(start, totals, known.total, *batch)
            if self._has_aux:
                totals, weight, aux = totals
                results += [weight, *aux_values(aux)]
        joined = self._join(totals, *results)
        losses, joined = alone_or_all(joined[:self._losses]), joined[self._losses:]
        if not self._has_aux:
            return losses
        return losses, (joined if isinstance(aux, tuple) else joined[0])


class _Ahead(NamedTuple):
    """What is known of a microbatch before it is trained.

    Attributes:
        total: The weights of its whole window, of all ranks: float32 Tensor `(losses,)`.
        weights: Of its pieces: float64 `(pieces, losses)`.
        last: Whether it is the last one of its window.
    """

    total: Tensor
    weights: np.ndarray
    last: bool

    def counts(self, piece: int) -> tuple[bool, ...]:
        """Return which losses have a weight in a piece."""
        return tuple((self.weights[piece] != 0).tolist())


class _Known(_Pieces):
    """A batch of one layout, whole or in pieces, for windows that are weighed before they are trained.

    Args:
        weight_fn: As in `accumulate.make_add_piece`.
    """

    def __init__(self, make_add: Callable, weight_fn: Optional[Callable], accumulator: Accumulator, samples: int,
                 micro_size: int, cut: tuple[bool, ...], has_aux: bool) -> None:
        def weights(*batch: Any) -> Tensor:
            rows = ()
            for start in range(0, samples, length):
                size = min(length, samples - start)
                inputs = select_rows(ops.arange(start, start + size), cut, batch)
                rows = (*rows, as_vector(weights_of(weight_fn, accumulator.losses, size, inputs)))
            return ops.stack(rows)

        super().__init__(make_add, accumulator, samples, micro_size, cut, has_aux)
        length = -(-samples // micro_size)
        self._samples, self._weights = samples, compiled(weights)

    def _new_graph(self, rows: int, add_piece: Callable) -> Callable:
        if len(self._starts) > 1:
            return super()._new_graph(rows, add_piece)
        accumulate = whole(add_piece, self._accumulator._end_microbatch, self._has_aux)
        samples, cut = self._samples, self._cut

        def accumulate_whole(total: Tensor, *batch: Any) -> Any:
            return accumulate(samples, cut, total, *batch)

        return straight(accumulate_whole, self._accumulator)

    def __call__(self, *batch: Any, known: Optional[_Ahead] = None) -> Any:
        if len(self._starts) > 1:
            return super().__call__(*batch, known=known)
        return self._graph(self._samples, known.counts(0))(known.total, *batch)

    def weigh(self, *batch: Any) -> np.ndarray:
        """Return the weights of the pieces, without training on them: float64 `(pieces, losses)`. It waits for them."""
        return self._weights(*batch).asnumpy().astype(np.float64)


def _announcing(accumulator: Accumulator) -> Callable:
    """Return `(weights of this rank) -> (weights of all ranks)`, float32 `(losses,)`, of a window to be trained."""
    def announce(weights: Tensor) -> Tensor:
        return as_vector(accumulator.reducer.header(accumulator._each(weights)))

    return announce


def _judge(accumulator: Accumulator) -> Callable:
    """Return `() -> (whether the window is finite, and, if ranks exchange it, its header and gradients)`."""
    def judge() -> tuple:
        gradients, unit, header = accumulator._reduced(1.0)
        # `depend` uses what nobody needs, or MindSpore warns of "side effect nodes eliminated by mistake".
        finite = ops.depend(accumulator._window_guard.accepts(gradients), unit)
        return (finite, as_vector(header), *gradients) if accumulator.reducer.exchanges_windows else (finite,)

    return judge


def _exchanging(accumulator: Accumulator) -> Callable:
    """Return `() -> the updates done`: what ranks exchange after some of them."""
    def exchange() -> Tensor:
        accumulator.reducer.exchange(1.0, accumulator.update_step)
        return accumulator.update_step + 0  # a graph has to return something

    return exchange


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
