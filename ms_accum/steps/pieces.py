"""A batch and its pieces: which arguments are cut, the samples of a piece, and how results of pieces are joined."""
from __future__ import annotations

from typing import TYPE_CHECKING, Any, Optional, Union

import mindspore as ms
from mindspore import Tensor, ops
from mindspore.ops import constexpr

from ..arguments import whole_number

if TYPE_CHECKING:
    from ..tensors import Scalar

_NESTED = ("a tuple, list or dict, expected Tensors and plain values; give each Tensor as an argument of its own (a "
           "dict as **batch)")
Aux = Union[Tensor, tuple[Tensor, ...]]
Cut = tuple[Optional[int], ...]  # the axis along which each argument is cut; None: it is passed whole to every piece


def layout(batch: tuple, batch_axis: int = 0) -> tuple[int, Cut]:
    """Return the number of samples in a batch, and for each argument the axis that counts them, or None."""
    return _layout(tuple([_kind(argument) for argument in batch]), batch_axis)


def checked_pieces(pieces: object) -> int:
    """Return `pieces` as an int >= 1. Raise TypeError or ValueError if it is invalid."""
    return whole_number("pieces", pieces, "it is the number of pieces that a batch is cut into")


def checked_axis(batch_axis: object) -> int:
    """Return `batch_axis` as an int >= 0. Raise TypeError or ValueError if it is invalid."""
    return whole_number("batch_axis", batch_axis, "it is the axis that counts the samples", minimum=0)


def axis_of(axes: int, batch_axis: int) -> int:
    """Return the axis that counts the samples: `batch_axis`, or 0 if there are too few axes."""
    return batch_axis if batch_axis < axes else 0


@constexpr
def _layout(kinds: tuple, batch_axis: int) -> tuple[int, Cut]:
    """Compute `layout`. `kinds` holds for each argument its shape, an error message, or None for a plain value."""
    wrong = next((kind for kind in kinds if isinstance(kind, str)), None)
    if wrong is not None:
        # Graph mode would take the Tensors inside a tuple for constants, and compile again for each batch.
        raise TypeError(f"the batch holds {wrong}")
    dynamic = next((kind for kind in kinds if kind and any(length is None or length < 0 for length in kind)), None)
    if dynamic is not None:
        raise ValueError(f"the batch holds a Tensor of the dynamic shape {tuple(dynamic)}, expected a shape that is "
                         "known when the graph is compiled; leave set_inputs out, or give it the full shapes")
    axes = [axis_of(len(kind), batch_axis) if kind else None for kind in kinds]
    lengths = [None if axis is None else kind[axis] for kind, axis in zip(kinds, axes)]
    samples = next((length for length in lengths if length is not None), None)
    if samples is None:
        given = ["no Tensor" if kind is None else f"a Tensor of shape {tuple(kind)}" for kind in kinds]
        raise ValueError(f"the batch is {', '.join(given) or 'empty'}, expected at least one Tensor with axes; axis "
                         f"{batch_axis} of the first one is the batch")
    return samples, tuple([axis if length == samples else None for axis, length in zip(axes, lengths)])


def _kind(argument: Any) -> Union[tuple, str, None]:
    if isinstance(argument, Tensor):
        return argument.shape
    return _NESTED if isinstance(argument, (tuple, list, dict)) else None


def starts_of(samples: int, pieces: int) -> list[tuple[int, int]]:
    """Return the first sample and the number of samples of each piece of a batch.

    There may be fewer than `pieces` pieces, and the last one may be shorter.
    """
    rows = max(-(-samples // pieces), 1)
    return [(start, min(rows, samples - start)) for start in range(0, samples, rows)]


def select_rows(rows: Tensor, cut: Cut, batch: tuple) -> tuple:
    """Return the arguments of one piece: samples `rows` (int Tensor) of those that are cut, the others whole."""
    inputs = ()  # type: tuple
    for argument, axis in zip(batch, cut):
        inputs = (*inputs, argument if axis is None else ops.gather(argument, rows, axis))
    return inputs


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
                whole = whole + counted(part, results[i * values].reshape(()))
            whole = whole / divisor
        joined = (*joined, whole)
    return joined


def counted(value: Tensor, weight: Scalar) -> Tensor:
    """Return `value * weight` in float32; 0 for a weight of 0, also if the value is NaN (a mean over no token)."""
    product = value.astype(ms.float32) * weight
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
