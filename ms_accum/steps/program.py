"""The graphs for all batches of one layout, which the host calls one after the other: a program.

    whole:   value_and_grad, add, end           alone: value_and_grad, update: a window of one microbatch
    pieces:  value_and_grad, add  for each piece, which gathers its own samples; then end, and the mean of the losses
    empty:   no pieces: nothing is compiled, the microbatch counts, and its loss is 0
"""
from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Optional

import mindspore as ms
import numpy as np
from mindspore import Tensor, ops

from ..core.keeper import nothing_of
from ..tensors import as_tensor, as_vector
from .errors import ask_about_piece
from .graphs import compiled, divisor, make_gradients_of, straight
from .pieces import aux_values, checked_aux, counted, join_aux, select_rows, starts_of

if TYPE_CHECKING:
    from ..core.accumulator import Accumulator
    from .graphs import Functions
    from .pieces import Cut


class Program:
    """Add a batch of one layout by its graphs: one for each kind of piece, and one that ends the microbatch.

    Sums are passed from piece to piece. Keeping the results of each piece would fragment MindSpore's memory pool, and
    the peak would grow with the number of pieces (48 pieces: 286 MB instead of 84).

    Args:
        accumulator: The accumulator that collects the gradients.
        starts: First sample and number of samples of each piece; empty for a batch without samples.
        piece_of: Called as `piece_of(*key)`, once for each key of a piece; returns the function that adds one:
            `(start, totals, *own, *batch) -> totals`, or `(totals, weight, aux)`.
        absent: Number of pieces that this rank lacks: if ranks sum each piece, all must add the same number.
        losses: Number of losses. `totals` holds the sums of weight * loss, then those of the weights: float32
            `(2 * losses,)`.
        has_aux: Whether there is aux.
        batch_axis: The axis that counts the samples.

    Attributes:
        whole: `(*batch) -> loss`, or `(loss, aux)`: one graph for a batch that is not cut. None if it is cut.
        alone: The same for a window of one microbatch, which needs no buffers, or None.
    """

    def __init__(self, accumulator: Accumulator, starts: list[tuple[int, int]], piece_of: Callable, absent: int = 0,
                 losses: int = 1, has_aux: bool = False, batch_axis: int = 0) -> None:
        self.starts, self.losses, self.has_aux, self._absent, self._piece_of = starts, losses, has_aux, absent, piece_of
        self._way = accumulator.way
        self._pieces: dict[tuple, Callable] = {}
        self.whole: Optional[Callable] = None
        self.alone: Optional[Callable] = None
        self._nothing = straight(nothing_of(accumulator, 0 if starts else 1), accumulator.way)
        self._end = compiled(self._end_fn(batch_axis))

    def __call__(self, *batch: Any) -> Any:
        """Add a microbatch. Return the loss, or `(loss, aux)`: the mean over the pieces."""
        if self.whole is not None:
            return self.whole(*batch)
        return self.run([(rows,) for _, rows in self.starts], [()] * len(self.starts), batch)

    def run(self, keys: list[tuple], inputs: list[tuple], batch: tuple) -> Any:
        """Add each piece by the graph of its key, given its own inputs. Return what a call returns."""
        totals, results, aux, place = Tensor(np.zeros(2 * self.losses), ms.float32), [], None, 0
        try:
            for place in range(len(self.starts)):
                totals = self.piece(*keys[place])(Tensor(self.starts[place][0], ms.int32), totals, *inputs[place],
                                                  *batch)
                if self.has_aux:
                    totals, weight, aux = totals
                    results += [weight, *aux_values(aux)]
            for _ in range(self._absent):
                self._nothing()
            joined = self._ended(totals, *results)
        except Exception as error:
            ask_about_piece(error, place, len(self.starts))
            raise
        losses = joined[0] if self.losses == 1 else joined[:self.losses]
        if not self.has_aux:
            return losses
        joined = joined[self.losses:]
        return losses, (joined if isinstance(aux, tuple) else joined[0] if joined else None)

    def piece(self, *key: Any) -> Callable:
        """Return the graph that adds a piece with this key."""
        if key not in self._pieces:
            self._pieces[key] = straight(self._piece_of(*key), self._way)
        return self._pieces[key]

    def _ended(self, totals: Tensor, *results: Tensor) -> tuple[Tensor, ...]:
        """End the microbatch. Nothing is compiled for an empty one."""
        if self.starts or self._absent:
            return self._end(totals, *results)
        self._way.counters.count(1)
        return tuple(totals[:self.losses])

    def _end_fn(self, batch_axis: int) -> Callable:
        """Return `(totals, *results) -> (*losses, *aux)`, which ends a microbatch that is cut into these pieces."""
        way, losses, pieces, absent = self._way, self.losses, len(self.starts), self._absent

        def end(totals: Tensor, *results: Tensor) -> tuple[Tensor, ...]:
            way.end_microbatch(pieces + absent)
            means = ()  # type: tuple[Tensor, ...]
            for t in range(losses):
                means = (*means, totals[t] / divisor(totals[losses + t]))
            if not results:
                return means
            return (*means, *join_aux(results, pieces, divisor(totals[losses]), batch_axis))

        return end


def program_of(functions: Functions, accumulator: Accumulator, samples: int, cut: Cut, pieces: int) -> Program:
    """Return the program for batches of `samples` samples, cut into `pieces` along the axes in `cut`."""
    starts, way = starts_of(samples, pieces), accumulator.way
    absent = pieces - len(starts) if way.exchange.inside > 1 else 0
    program = Program(accumulator, starts, partial(_piece_fn, functions, accumulator, cut), absent,
                      has_aux=functions.has_aux, batch_axis=functions.batch_axis)
    if pieces == 1 and samples:
        add, alone = _whole_fns(functions, accumulator, samples)
        program.whole = straight(add, accumulator.way)
        if not way.looks_at_pieces and not way.may_drop:
            program.alone = straight(alone, accumulator.way)
    return program


def _piece_fn(functions: Functions, accumulator: Accumulator, cut: Cut, rows: int) -> Callable:
    """Return `(start, totals, *batch) -> totals`, or `(totals, weight, aux)`, which adds a piece of `rows` samples."""
    has_aux, axis, way = functions.has_aux, functions.batch_axis, accumulator.way  # a graph cannot read a named tuple
    gradients_of = make_gradients_of(functions, way)

    def piece(start: Tensor, totals: Tensor, *batch: Any) -> Any:
        # The samples are gathered here, from the whole batch: a graph's argument is not copied.
        inputs = select_rows(start + ops.arange(rows), cut, batch)
        loss, aux, gradients, weight, factor = gradients_of(rows, *inputs)
        aux = checked_aux(aux, rows, axis) if has_aux else aux
        active = way.add_piece(gradients, weight, factor=factor)
        summed = counted(loss, weight) if factor is None else loss * divisor(as_tensor(weight))
        totals = totals + as_vector((summed, ops.depend(as_tensor(weight), active)))
        return (totals, as_vector((weight,)), aux) if has_aux else totals

    return piece


def _whole_fns(functions: Functions, accumulator: Accumulator, samples: int) -> tuple[Callable, Callable]:
    """Return two functions of a microbatch that is not cut: one adds it, one updates with it as a window of its own."""
    has_aux, way = functions.has_aux, accumulator.way
    marked, unmarked = (make_gradients_of(functions, way, begin) for begin in (True, False))

    def add(*batch: Any) -> Any:
        loss, aux, gradients, weight, factor = marked(samples, *batch)
        way.add_microbatch(gradients, weight, factor)
        return (loss, aux) if has_aux else loss

    def alone(*batch: Any) -> Any:
        loss, aux, gradients, weight, factor = unmarked(samples, *batch)
        way.update_alone(gradients, weight, factor)
        return (loss, aux) if has_aux else loss

    return add, alone
