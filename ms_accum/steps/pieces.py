"""The graphs for all batches of one layout, which the host calls one after the other.

    whole:   value_and_grad, add                 alone: value_and_grad, update: a window of one microbatch
    pieces:  value_and_grad, add  for each piece, which gathers its own samples; then end, and the mean of the losses
    empty:   no pieces: the microbatch counts, and its loss is 0
"""
from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Optional, Union

import mindspore as ms
import numpy as np
from mindspore import Tensor, ops
from mindspore.ops import constexpr

from ..mindspore_api import jit_class
from ..tensors import as_vector, cast, concat, reshape
from .batch import axis_of, divisor, places_of, samples_in_graph, select_rows, starts_of
from .errors import ask_about_piece

if TYPE_CHECKING:
    from ..core.boundary import Boundary
    from ..tensors import Scalar
    from .batch import Cut, Loss
    from .shapes import Inputs

Aux = Union[Tensor, tuple[Tensor, ...]]
_entries = ops.Unstack()  # in a graph, to compile an index takes 0.1 s


class Pieces:
    """Add a batch of one layout by its graphs: one for each kind of piece, and one that ends the microbatch.

    Sums are passed from piece to piece. Keeping the losses of each piece would fragment MindSpore's memory pool, and
    the peak would grow with the number of pieces (48 pieces: 286 MB instead of 84).

    Args:
        boundary: The boundary of the window that collects the gradients.
        loss: What is differentiated.
        samples: Number of samples in a batch.
        cut: The axis along which each argument is cut.
        pieces: Number of pieces that a batch is cut into.
        inputs: What is declared of a batch with dynamic shapes; see `boundary.compiled`.

    Attributes:
        starts: First sample and number of samples of each piece; empty for a batch without samples.
        alone: `(*batch) -> loss`, or `(loss, aux)`, which updates with a window of one microbatch without buffers; None
            if that is not possible.
    """

    def __init__(self, boundary: Boundary, loss: Loss, samples: int, cut: Cut, pieces: int,
                 inputs: Optional[Inputs] = None) -> None:
        self.boundary, self.window, self.loss, self.samples, self.cut = boundary, boundary.window, loss, samples, cut
        self.starts, self.inputs = starts_of(samples, pieces), inputs
        # If ranks sum each piece, each rank has to add as many: a short batch adds empty ones.
        self._absent = pieces - len(self.starts) if self.window.exchange.inside > 1 else 0
        self._graphs: dict[int, Callable] = {}
        self._evaluations: dict[int, Callable] = {}
        self._end = boundary.compiled(End(loss, len(self.starts), self._absent))
        self.alone: Optional[Callable] = None
        self._whole: Optional[Callable] = None
        if pieces == 1 and samples:
            whole = Whole(loss, samples, inputs is not None)
            self._whole = boundary.straight(whole.add, inputs)
            if not self.window.looks_at_pieces and not self.window.may_drop:
                self.alone = boundary.straight(whole.update, inputs)

    def __call__(self, *batch: Any) -> Any:
        """Add a microbatch. Return the loss, or `(loss, aux)`: the mean over the pieces."""
        if self._whole is not None:
            return self._whole(*batch)
        totals, results, aux, place = Tensor(np.zeros(2), ms.float32), [], None, 0
        try:
            for place in range(len(self.starts)):
                start, rows = self.starts[place]
                totals = self.graph(rows)(Tensor(start, ms.int32), totals, *batch)
                if self.loss.has_aux:
                    totals, weight, aux = totals
                    results += [weight, *aux_values(aux)]
            for _ in range(self._absent):
                self.boundary.add_nothing(active=0.0 if self.starts else 1.0)
            if self.starts or self._absent:
                loss, *joined = self._end(totals, *results)
            else:  # an empty batch compiles nothing
                ops.assign_add(self.window.mini_step, 1)
                self.window.count_trained(1)
                loss, joined = totals[0], []
        except Exception as error:
            ask_about_piece(error, place, len(self.starts))
            raise
        if not self.loss.has_aux:
            return loss
        return loss, (tuple(joined) if isinstance(aux, tuple) else joined[0] if joined else None)

    def evaluated(self, *batch: Any) -> np.ndarray:
        """Return the sums over a batch of weight * loss and of the weights, without training: float64 `(2,)`.

        It waits for the device.
        """
        totals, place = Tensor(np.zeros(2), ms.float32), 0
        try:
            for place in range(len(self.starts)):
                start, rows = self.starts[place]
                if rows not in self._evaluations:
                    cut = self.cut if len(self.starts) > 1 else None
                    evaluated = Evaluated(self.loss, cut, rows, self.inputs is not None)
                    self._evaluations[rows] = self.boundary.straight(evaluated, self.inputs)
                totals = self._evaluations[rows](Tensor(start, ms.int32), totals, *batch)
        except Exception as error:
            ask_about_piece(error, place, len(self.starts))
            raise
        return totals.asnumpy().astype(np.float64)

    def graph(self, rows: int) -> Callable:
        """Return the graph that adds a piece of `rows` samples, compiled once."""
        if rows not in self._graphs:
            self._graphs[rows] = self.boundary.straight(self.piece(rows), self.inputs)
        return self._graphs[rows]

    def piece(self, rows: int) -> Callable:
        """Return what adds a piece of `rows` samples."""
        return Piece(self.loss, self.cut, rows)


@jit_class
class Whole:
    """Add a microbatch that is not cut, or update with it.

    `is_dynamic`: whether shapes of the batch are, so that the graph may be for any number of samples.
    """

    def __init__(self, loss: Loss, samples: int, is_dynamic: bool) -> None:
        self.loss, self.window, self.samples, self.is_dynamic = loss, loss.window, samples, is_dynamic

    def add(self, *batch: Any) -> Any:
        """Add a microbatch. Return the loss, or `(loss, aux)`."""
        found = self.loss.gradients_of(self._rows(batch), batch, True)
        loss = ops.depend(found["loss"], self.window.add(found["gradients"], found["weight"], found["factor"], ends=1))
        return (loss, found["aux"]) if self.loss.has_aux else loss

    def update(self, *batch: Any) -> Any:
        """Update with a microbatch as a window of its own. Return the loss, or `(loss, aux)`."""
        found = self.loss.gradients_of(self._rows(batch), batch, False)
        self.window.update_alone(found["gradients"], found["weight"], found["factor"])
        return (found["loss"], found["aux"]) if self.loss.has_aux else found["loss"]

    def _rows(self, batch: tuple) -> Scalar:
        return samples_in_graph(batch, self.loss.batch_axis) if self.is_dynamic else self.samples


@jit_class
class Piece:
    """Add a piece of a microbatch."""

    def __init__(self, loss: Loss, cut: Cut, rows: int) -> None:
        self.loss, self.window, self.cut, self.rows, self.places = loss, loss.window, cut, rows, places_of(rows)

    def __call__(self, start: Tensor, totals: Tensor, *batch: Any) -> Any:
        """Add the piece that begins with sample `start`. Return the new totals, or `(totals, weight, aux)`.

        `totals`: sums of weight * loss, and of the weights: float32 `(2,)`.
        """
        # The samples are gathered here, from the whole batch: a graph's argument is not copied.
        found = self.loss.gradients_of(self.rows, select_rows(start + self.places, self.cut, batch), True)
        aux, weight = found["aux"], found["weight"]
        if self.loss.has_aux:
            aux = checked_aux(aux, self.rows, self.loss.batch_axis)
        active = self.window.add(found["gradients"], weight, found["factor"])
        summed = found["loss"] * divisor(weight) if self.loss.is_added else counted(found["loss"], weight)
        totals = ops.depend(totals + as_vector((summed, weight)), active)
        return (totals, as_vector((weight,)), aux) if self.loss.has_aux else totals


@jit_class
class Evaluated:
    """Add up the losses of a piece, without a backward pass.

    `cut`: the axis along which each argument is cut; None: the piece is the whole batch. `is_dynamic`: see `Whole`.
    """

    def __init__(self, loss: Loss, cut: Optional[Cut], rows: int, is_dynamic: bool) -> None:
        self.loss, self.cut, self.rows, self.places = loss, cut, rows, places_of(rows)
        self.is_dynamic = is_dynamic and cut is None

    def __call__(self, start: Tensor, totals: Tensor, *batch: Any) -> Tensor:
        """Return the new totals, given those before the piece that begins with sample `start`; see `Piece`."""
        piece = batch if self.cut is None else select_rows(start + self.places, self.cut, batch)
        rows = samples_in_graph(batch, self.loss.batch_axis) if self.is_dynamic else self.rows
        loss, weight = self.loss.evaluated(rows, piece)
        return totals + concat((loss if self.loss.is_sum else counted(loss, weight), weight))


@jit_class
class End:
    """End a microbatch that is cut into pieces."""

    def __init__(self, loss: Loss, pieces: int, absent: int) -> None:
        self.window, self.batch_axis = loss.window, loss.batch_axis
        self.pieces, self.absent = pieces, absent

    def __call__(self, totals: Tensor, *results: Tensor) -> tuple[Tensor, ...]:
        """Return the mean loss, and the joined aux, given `totals` and what `join_aux` takes."""
        self.window.end(self.pieces + self.absent)
        summed, weight = _entries(totals)
        by = divisor(weight)  # type: Any
        mean = summed / by
        return (mean, *join_aux(results, self.pieces, by, self.batch_axis)) if results else (mean,)


# --- aux --------------------------------------------------------------------------------------------------------------


def checked_aux(aux: Aux, rows: int, batch_axis: int) -> Aux:
    """Return the aux of a piece. Raise TypeError or ValueError if it cannot be joined to that of other pieces."""
    require_aux_values(len(aux_values(aux)))
    for value in aux_values(aux):
        require_aux_shape(value.shape if isinstance(value, Tensor) else None, rows, batch_axis)
    return aux


def join_aux(results: tuple[Tensor, ...], pieces: int, divisor: Tensor, batch_axis: int) -> tuple[Tensor, ...]:
    """Join the aux of pieces: concatenate values per sample, and return the weighted means of scalars.

    Args:
        results: For each piece, its weight (float32, `(1,)`) followed by the Tensors of its aux.
        pieces: Number of pieces.
        divisor: The sum of the weights.
        batch_axis: The axis that counts the samples, in Tensors with that axis.
    """
    if pieces == 1:
        return tuple(results[1:])
    values = len(results) // pieces
    joined = ()  # type: tuple[Tensor, ...]
    for place in range(1, values):
        parts = results[place::values]
        if parts[0].ndim:
            whole = ops.concat(tuple(parts), axis_of(parts[0].ndim, batch_axis))
        else:
            whole = 0.0
            for i, part in enumerate(parts):
                whole = whole + counted(part, reshape(results[i * values], ()))
            whole = whole / divisor
        joined = (*joined, whole)
    return joined


def counted(value: Tensor, weight: Scalar) -> Tensor:
    """Return `value * weight` in float32; 0 for a weight of 0, also if the value is NaN (a mean over no token)."""
    product = cast(value, ms.float32) * weight
    return ops.where(weight == 0, Tensor(0.0, ms.float32), product) if isinstance(weight, Tensor) else product


def aux_values(aux: Aux) -> tuple[Tensor, ...]:
    """Return the Tensors of an aux."""
    return aux if isinstance(aux, tuple) else (aux,)


@constexpr
def require_aux_values(count: int) -> bool:
    """Raise ValueError for an empty aux: there is nothing to join."""
    if count == 0:
        raise ValueError("forward_fn returned an empty aux; return the loss alone, without has_aux=True")
    return True


@constexpr
def require_aux_shape(shape: Optional[tuple], rows: int, batch_axis: int) -> bool:
    """Raise an error for aux that is neither a scalar nor a value per sample: it cannot be joined."""
    remedy = "return Tensors of shape () or with one row for each sample, or give pieces=1"
    if shape is None:
        raise TypeError(f"forward_fn returned aux that is neither a Tensor nor a tuple of Tensors; {remedy}")
    if len(shape) and shape[axis_of(len(shape), batch_axis)] != rows:
        raise ValueError(f"forward_fn returned aux of shape {tuple(shape)} for a piece of {rows} samples; {remedy}")
    return True
