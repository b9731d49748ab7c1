"""One microbatch as straight graphs, which the host calls one after the other.

    uncut:   value_and_grad, add, end           alone: value_and_grad, update: a window of one microbatch
    pieces:  value_and_grad, add  for each piece, which gathers its own rows; then end, and the mean of the losses
"""
from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, Optional

import mindspore as ms
import numpy as np
from mindspore import Tensor, ops

from ..arguments import as_weight
from ..core.boundary import nothing_of
from ..tensors import as_tensor, as_vector
from .differentiate import make_gradients_of, weight_of
from .errors import ask_about_piece
from .pieces import aux_values, checked_aux, counted, join_aux, select_rows, starts_of
from .straight import compiled, straight

if TYPE_CHECKING:
    from ..core.accumulator import Accumulator
    from .pieces import Cut


class Functions(NamedTuple):
    """What a train step does with a piece; see `make_train_step`. Functions are by position: `batch.positional`."""

    forward_fn: Callable
    weight_fn: Optional[Callable]
    has_aux: bool
    batch_axis: int = 0


class Uncut:
    """A microbatch that is not cut.

    Attributes:
        alone: One graph for a window of one microbatch, which needs no buffers; None if a microbatch or window may be
            left out, or is watched, or ranks sum each microbatch, or its weight decides whether it is the last one.
    """

    def __init__(self, functions: Functions, accumulator: Accumulator, samples: int) -> None:
        forward_fn, weight_fn, has_aux, _ = functions  # a graph cannot read a named tuple
        accumulated = make_gradients_of(forward_fn, accumulator, has_aux)
        straightaway = make_gradients_of(forward_fn, accumulator, has_aux, begins=False)

        def differentiated(gradients_of: Callable, batch: tuple) -> tuple:
            weight = weight_of(weight_fn, samples, batch)
            loss, aux, gradients = gradients_of(*batch)
            if isinstance(weight, Tensor):
                loss = loss + as_weight(weight) * 0.0  # a weight that is NaN or infinite makes the loss NaN
            return ((loss, aux) if has_aux else loss), gradients, weight

        def add(*batch: Any) -> Any:
            result, gradients, weight = differentiated(accumulated, batch)
            accumulator.add_microbatch(gradients, weight)
            return result

        def alone(*batch: Any) -> Any:
            result, gradients, weight = differentiated(straightaway, batch)
            accumulator.update_alone(gradients, weight)
            return result

        self._add = straight(add, accumulator)
        needs_buffers = (accumulator.guard.judges or accumulator.guard.judges_pieces or accumulator.observer.watches
                         or accumulator.exchange.inside > 1 or accumulator.length.budget is not None)
        self.alone = None if needs_buffers else straight(alone, accumulator)

    def __call__(self, *batch: Any) -> Any:
        """Add a microbatch. Return the loss, or `(loss, aux)`."""
        return self._add(*batch)


class Pieces:
    """A microbatch in pieces: a graph for each length of a piece, which the host calls for each in turn.

    The sums go from piece to piece. Keeping what each returned would cut MindSpore's pool of memory into parts, and the
    peak would grow with their number (48 pieces: 286 MB instead of 84).

    Attributes:
        starts: First row and rows of each piece.
        count: How many losses `forward_fn` returns. `totals` are the sums of weight * loss, then those of the weights:
            float32 `(2 * count,)`.
    """

    alone = None
    count = 1

    def __init__(self, functions: Functions, accumulator: Accumulator, samples: int, cut: Cut,
                 pieces: int) -> None:
        self.functions, self.accumulator, self.cut = functions, accumulator, cut
        self.starts = starts_of(samples, pieces)
        self._graphs: dict[tuple, Callable] = {}
        # Ranks that sum each piece have to add as many.
        self._missing = pieces - len(self.starts) if accumulator.exchange.inside > 1 else 0
        self._nothing = straight(nothing_of(accumulator), accumulator)
        end = _end_of(accumulator, self.count, len(self.starts), self._missing, functions.batch_axis)
        self._end = compiled(end)

    def __call__(self, *batch: Any) -> Any:
        """Add a microbatch. Return the loss, or `(loss, aux)`: the mean over the pieces."""
        return self.run([(rows,) for _, rows in self.starts], [()] * len(self.starts), batch)

    def run(self, keys: list[tuple], inputs: list[tuple], batch: tuple) -> Any:
        """Add each piece by the graph of its key, given its inputs. Return as in a call."""
        has_aux, count = self.functions.has_aux, self.count
        totals, results, place = Tensor(np.zeros(2 * count), ms.float32), [], 0
        try:
            for place in range(len(self.starts)):
                (start, _), key, own = self.starts[place], keys[place], inputs[place]
                if key not in self._graphs:
                    self._graphs[key] = straight(self.graph_for(*key), self.accumulator)
                totals = self._graphs[key](Tensor(start, ms.int32), totals, *own, *batch)
                if has_aux:
                    totals, weight, aux = totals
                    results += [weight, *aux_values(aux)]
            for _ in range(self._missing):
                self._nothing()
            joined = self._end(totals, *results)
        except Exception as error:
            ask_about_piece(error, place, len(self.starts))
            raise
        losses = joined[0] if count == 1 else joined[:count]
        if not has_aux:
            return losses
        return losses, (joined[count:] if isinstance(aux, tuple) else joined[count])

    def graph_for(self, rows: int) -> Callable:
        """Return `(start, totals, *batch) -> totals`, or `(totals, weight, aux)`, which adds a piece of so many rows.
        """
        (forward_fn, weight_fn, has_aux, axis), accumulator, cut = self.functions, self.accumulator, self.cut
        gradients_of = make_gradients_of(forward_fn, accumulator, has_aux)

        def piece(start: Tensor, totals: Tensor, *batch: Any) -> Any:
            # The rows are gathered here, from the whole batch: a graph's argument is not copied.
            inputs = select_rows(start + ops.arange(rows), cut, batch)
            weight = weight_of(weight_fn, rows, inputs)
            loss, aux, gradients = gradients_of(*inputs)
            aux = checked_aux(aux, rows, axis) if has_aux else aux
            active = accumulator.add_piece(gradients, weight)
            totals = totals + as_vector((counted(loss, weight), ops.depend(as_tensor(weight), active)))
            return (totals, as_vector((weight,)), aux) if has_aux else totals

        return piece


class Empty:
    """A microbatch without samples, as a filter may leave one: it counts, and weighs nothing.

    Nothing is compiled for it, except where ranks sum each microbatch: one graph that takes part in their exchange.

    Attributes:
        result: What a call returns: the loss 0, or as many losses; with aux, `(loss, None)`.
    """

    alone = None

    def __init__(self, accumulator: Accumulator, pieces: int = 1, losses: int = 1, has_aux: bool = False) -> None:
        self.accumulator, self.pieces, self.losses = accumulator, pieces, losses
        loss = Tensor(0.0, ms.float32) if losses == 1 else (Tensor(0.0, ms.float32),) * losses
        self.result = (loss, None) if has_aux else loss
        self._nothing = straight(nothing_of(accumulator, 1), accumulator)  # compiled only where ranks sum each piece

    def weigh(self, *batch: Any) -> np.ndarray:
        """See `losses.WeighedPieces`."""
        return np.zeros((1, self.losses))

    def __call__(self, *batch: Any) -> Any:
        """Count a microbatch. Ranks that sum each piece take part in it."""
        if self.accumulator.exchange.inside == 1:
            self.accumulator.counters.count(1)
            return self.result
        for _ in range(self.pieces):
            self._nothing()
        self.accumulator.end_microbatch(self.pieces)
        return self.result


def _end_of(accumulator: Accumulator, count: int, pieces: int, missing: int, batch_axis: int) -> Callable:
    """Return `(totals, *results) -> (*losses, *aux)`, which ends a microbatch of so many pieces."""
    def end(totals: Tensor, *results: Tensor) -> tuple[Tensor, ...]:
        accumulator.end_microbatch(pieces + missing)
        losses = ()
        for t in range(count):
            losses = (*losses, totals[t] / _divisor(totals[count + t]))
        return (*losses, *join_aux(results, pieces, _divisor(totals[count]), batch_axis))

    return end


def _divisor(weight: Tensor) -> Tensor:
    return ops.where(weight == 0, Tensor(1.0, ms.float32), weight)
