"""One microbatch as straight graphs, which the host calls one after the other.

    whole:   value_and_grad, add, end           alone: value_and_grad, update: a window of one microbatch
    pieces:  value_and_grad, add  for each piece, which gathers its own rows; then end, and the mean of the losses
"""
from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Optional

import mindspore as ms
import numpy as np
from mindspore import Tensor, ops

from .accumulator import Accumulator
from .arguments import as_weight
from .boundary import nothing_of
from .differentiate import make_gradients_of, weight_of
from .gradients import as_vector
from .pieces import aux_values, checked_aux, counted, join_aux, select_rows
from .straight import compiled, straight


class Functions(NamedTuple):
    """What a train step does with a piece. Functions are by position, as from `batch.positional`."""

    forward_fn: Callable
    weight_fn: Optional[Callable]
    has_aux: bool


class Whole:
    """A microbatch that is not cut.

    Attributes:
        alone: One graph for a window of one microbatch, which needs no buffers; None if a microbatch or window may be
            left out, or is watched, or ranks sum each microbatch, or its weight decides whether it is the last one.
    """

    def __init__(self, functions: Functions, accumulator: Accumulator, samples: int) -> None:
        forward_fn, weight_fn, has_aux = functions  # a graph cannot read a named tuple
        gradients_of = make_gradients_of(forward_fn, accumulator, has_aux)

        def differentiated(batch: tuple) -> tuple:
            weight = weight_of(weight_fn, samples, batch)
            loss, aux, gradients = gradients_of(*batch)
            if isinstance(weight, Tensor):
                loss = loss + as_weight(weight) * 0.0  # a weight that is not finite shows in the loss
            return ((loss, aux) if has_aux else loss), gradients, weight

        def add(*batch: Any) -> Any:
            result, gradients, weight = differentiated(batch)
            accumulator.add(gradients, weight)
            return result

        def alone(*batch: Any) -> Any:
            result, gradients, weight = differentiated(batch)
            accumulator.update_alone(gradients, weight)
            return result

        self._add = straight(add, accumulator)
        needs_buffers = (accumulator.guard.judges or accumulator.guard.judges_pieces or accumulator.observer.watches
                         or accumulator.exchange.inside > 1 or accumulator.window.budget is not None)
        self.alone = None if needs_buffers else straight(alone, accumulator)

    def __call__(self, *batch: Any) -> Any:
        """Add a microbatch. Return the loss, or `(loss, aux)`."""
        return self._add(*batch)


class Pieces:
    """A microbatch in pieces: a graph for each length of a piece, which the host calls for each in turn.

    The sums go from piece to piece. Keeping what each returned would cut MindSpore's pool of memory into parts, and the
    peak would grow with their number (48 pieces: 286 MB instead of 84).
    """

    alone = None

    def __init__(self, functions: Functions, accumulator: Accumulator, samples: int, cut: tuple[bool, ...],
                 pieces: int) -> None:
        rows = -(-samples // pieces)
        self._functions, self._accumulator, self._cut = functions, accumulator, cut
        self._starts = [(Tensor(start, ms.int32), min(rows, samples - start)) for start in range(0, samples, rows)]
        self._graphs = {rows: self._graph_for(rows) for rows in {rows for _, rows in self._starts}}
        # Ranks that sum each piece have to add as many.
        self._missing = pieces - len(self._starts) if accumulator.exchange.inside > 1 else 0
        self._nothing = straight(nothing_of(accumulator), accumulator)
        self._end = compiled(_end_of(accumulator, len(self._starts), self._missing))

    def _graph_for(self, rows: int) -> Callable:
        (forward_fn, weight_fn, has_aux), accumulator, cut = self._functions, self._accumulator, self._cut
        gradients_of = make_gradients_of(forward_fn, accumulator, has_aux)

        def piece(start: Tensor, totals: Tensor, *batch: Any) -> Any:
            # The rows are gathered here, from the whole batch: a graph's argument is not copied.
            inputs = select_rows(start + ops.arange(rows), cut, batch)
            weight = weight_of(weight_fn, rows, inputs)
            loss, aux, gradients = gradients_of(*inputs)
            aux = checked_aux(aux, rows) if has_aux else aux
            present = accumulator.add_piece(gradients, weight)
            totals = totals + as_vector((counted(loss, weight), ops.depend(weight, present)))
            return (totals, as_vector((weight,)), aux) if has_aux else totals

        return straight(piece, accumulator)

    def __call__(self, *batch: Any) -> Any:
        """Add a microbatch. Return the loss, or `(loss, aux)`: the mean over the pieces."""
        totals, results = Tensor(np.zeros(2), ms.float32), []
        for start, rows in self._starts:
            totals = self._graphs[rows](start, totals, *batch)
            if self._functions.has_aux:
                totals, weight, aux = totals
                results += [weight, *aux_values(aux)]
        for _ in range(self._missing):
            self._nothing()
        joined = self._end(totals, *results)
        if not self._functions.has_aux:
            return joined[0]
        return joined[0], (joined[1:] if isinstance(aux, tuple) else joined[1])


def _end_of(accumulator: Accumulator, pieces: int, missing: int) -> Callable:
    """Return `(totals, *results) -> (loss, *aux)`, which ends a microbatch of so many pieces."""
    def end(totals: Tensor, *results: Tensor) -> tuple[Tensor, ...]:
        accumulator.end_microbatch(pieces + missing)
        divisor = ops.where(totals[1] == 0, Tensor(1.0, ms.float32), totals[1])
        return (totals[0] / divisor, *join_aux(results, pieces, divisor))

    return end
