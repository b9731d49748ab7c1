"""Kernels that add to buffers, scale and clear them: portable ones, and those of Ascend, which work in place.

MindSpore keeps the order of the program among operators that are marked as side effects, as AssignAdd is.
"""
from __future__ import annotations

from os import environ
from typing import TYPE_CHECKING, Any

import mindspore as ms
from mindspore import Parameter, Tensor, ops

from ..mindspore_api import InplaceZero, jit_class
from ..tensors import HALF, as_tensor, cast, mapped, mapped_backwards, multiply_no_nan, scaled, weighted

if TYPE_CHECKING:
    from ..tensors import Gradients, Scalar

SWITCH = "MS_ACCUM_IN_PLACE"  # in the environment: 1 switches kernels in place on, which no device has run yet


def add_each(small: int, buffers: Gradients, gradients: Gradients, factor: Scalar) -> None:
    """Add `factor * gradient` to each buffer: those of at least `small` elements first; in a graph, the last one first.

    The backward pass computes the gradient of the last parameter first. In the order of the parameters, all gradients
    would be in memory together (13 x Dense 2048 in bfloat16 on Ascend: 10.2 bytes per parameter at the peak instead of
    6.5). Small gradients come last, because MindSpore runs one side effect for each operator on a path through the
    graph.

    Nothing is returned: if the results were used, MindSpore would fuse each addition with the kernel that computes its
    gradient, and on CPU no two gradients would be computed in parallel.
    """
    mapped_backwards(_add_large, (small, factor), buffers, gradients)
    if small > 0:
        mapped_backwards(_add_small, (small, factor), buffers, gradients)


@jit_class
class Portable:
    """Scale and clear by assigning new values, with kernels that every device has."""

    def scale(self, factor: Scalar, gradients: Gradients, dtypes: tuple[ms.Type, ...]) -> Gradients:
        """Return `factor * gradient` for each gradient, in `dtypes`. `InPlace` overwrites them: clear them next."""
        return mapped(scaled, factor, gradients, dtypes)

    def clear(self, zero: Tensor, buffers: Gradients) -> None:
        """Set all buffers to 0, given a float32 Tensor that is 0.

        It multiplies by 0, with NaN * 0 = 0. For `zeros_like(buffer)`, a constant, graph mode keeps a second copy of
        all buffers (258 MB measured); so it does for a broadcast or tiled 0, which does not wait for the buffer.
        """
        mapped(_clear, zero, buffers)


@jit_class
class InPlace(Portable):
    """Scale and clear in place. For Ascend: there, copies of all buffers would be in memory together.

    13 x Dense 2048 in float32 with Momentum: 16.0 bytes per parameter at the peak with copies, 12.0 in place; clipped,
    12.6.
    """

    def scale(self, factor: Scalar, gradients: Gradients, dtypes: tuple[ms.Type, ...]) -> Gradients:
        """See `Portable`. Operators that read the buffers must come before `factor`."""
        return mapped(_scaled_in_place, as_tensor(factor), gradients, dtypes)

    def clear(self, zero: Tensor, buffers: Gradients) -> None:
        """See `Portable`."""
        mapped(_empty, zero, buffers)


class _Multiply(ops.Primitive):
    """Multiply in place, without the mark of a side effect: with it, MindSpore would copy a buffer that is also read.

    Graphs use the operator of this name. Op by op, Ascend has no such operator, and a copy is made.
    """

    def __init__(self) -> None:
        super().__init__("InplaceMul")

    def __call__(self, buffer: Parameter, factor: Tensor) -> Tensor:
        """Return the product, op by op."""
        return ops.mul(buffer, factor)


_multiply_unmarked = _Multiply()
_zero: Any = None
if InplaceZero is not None:
    _zero = InplaceZero()
    # It lacks this mark in MindSpore 2.10: graphs would drop it without an error.
    _zero.add_prim_attr("side_effect_mem", True)


def kernels(in_buffers: bool = True) -> Portable:
    """Return the kernels that scale and clear buffers, or copies of them: portable ones unless `SWITCH` is 1."""
    in_place = in_buffers and environ.get(SWITCH) == "1" and ms.get_context("device_target") == "Ascend"
    return InPlace() if in_place else Portable()


def add_one(factor: Scalar, buffer: Parameter, gradient: Tensor) -> Tensor:
    """Add `factor * gradient` to a buffer."""
    if isinstance(factor, Tensor) or factor != 1:
        gradient = weighted(factor, gradient, buffer.dtype)
    gradient = cast(gradient, buffer.dtype)
    if buffer.dtype == ms.float16:
        # MindSpore 2.10 on CPU: of two float16 AssignAdd on one Parameter in one graph, the first is lost.
        return ops.assign(buffer, buffer + gradient)
    return ops.assign_add(buffer, gradient)


def _add_large(options: tuple, buffer: Parameter, gradient: Tensor) -> None:
    if buffer.size >= options[0]:
        add_one(options[1], buffer, gradient)


def _add_small(options: tuple, buffer: Parameter, gradient: Tensor) -> None:
    if buffer.size < options[0]:
        add_one(options[1], buffer, gradient)


def _clear(zero: Tensor, buffer: Parameter) -> None:
    ops.assign(buffer, multiply_no_nan(buffer, cast(zero, buffer.dtype)))


def _scaled_in_place(factor: Tensor, buffer: Parameter, dtype: ms.Type) -> Tensor:
    if buffer.dtype in HALF:  # rounded to 16 bits only if the parameter is
        return scaled(factor, buffer, dtype)
    return cast(_multiply_unmarked(buffer, cast(factor, buffer.dtype)), dtype)


def _clear_in_place(_: Tensor, buffer: Parameter) -> Tensor:
    return _zero(buffer)


_empty = _clear if _zero is None else _clear_in_place
