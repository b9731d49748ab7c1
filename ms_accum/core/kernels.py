"""Kernels that scale gradients for the optimizer and clear buffers: portable ones, and those of Ascend, in place."""
from __future__ import annotations

from os import environ
from typing import Any

import mindspore as ms
from mindspore import Parameter, Tensor, ops

from ..mindspore_api import InplaceZero, jit_class
from ..tensors import HALF, Gradients, Scalar, as_tensor, cast, cleared, mapped, scaled

SWITCH = "MS_ACCUM_IN_PLACE"  # in the environment: "1" takes the kernels in place


@jit_class
class Portable:
    """Scale and clear by assigning new values, with kernels that every device has."""

    def scale(self, factor: Scalar, gradients: Gradients, dtypes: tuple[ms.Type, ...]) -> Gradients:
        """Return `factor * gradient` for each gradient, in `dtypes`."""
        return mapped(scaled, factor, gradients, dtypes)

    def clear(self, zero: Tensor, buffers: Gradients) -> None:
        """Set all buffers to 0, given a float32 Tensor that is 0 and that no graph knows."""
        mapped(_clear, zero, buffers)


@jit_class
class OneByOne(Portable):
    """Scale one gradient after the other, or all that 16 bits need are in memory together.

    For Ascend: 14.0 bytes per parameter at the peak in place of 15.2 (AdamWeightDecay, bfloat16). To compile it takes
    longer than to compile `Portable`.
    """

    def scale(self, factor: Scalar, gradients: Gradients, dtypes: tuple[ms.Type, ...]) -> Gradients:
        """See `Portable`."""
        if not isinstance(factor, Tensor):
            return mapped(scaled, factor, gradients, dtypes)
        found, previous = (), factor  # type: tuple, Tensor
        for gradient, dtype in zip(gradients, dtypes):
            previous = scaled(ops.depend(factor, previous), gradient, dtype)
            found = (*found, previous)
        return found


class _Multiply(ops.Primitive):
    """Multiply in place, without the mark of a side effect: which makes MindSpore copy buffers that are also read."""

    def __init__(self) -> None:
        super().__init__("InplaceMul")

    def __call__(self, buffer: Parameter, factor: Tensor) -> Tensor:
        """Return the product. Op by op, Ascend has no such operator, and a copy is made."""
        return ops.mul(buffer, factor)


_multiply = _Multiply()
_zero: Any = None
if InplaceZero is not None:
    _zero = InplaceZero()
    # It lacks this mark in MindSpore 2.10: graphs would drop it without an error.
    _zero.add_prim_attr("side_effect_mem", True)


@jit_class
class InPlace(Portable):
    """Scale and clear in place (Momentum, float32, on Ascend: 12.0 bytes per parameter at the peak, not 16.0)."""

    def scale(self, factor: Scalar, gradients: Gradients, dtypes: tuple[ms.Type, ...]) -> Gradients:
        """See `Portable`. It overwrites the gradients: operators that read them must come before `factor`."""
        return mapped(_scaled_in_place, as_tensor(factor), gradients, dtypes)

    def clear(self, zero: Tensor, buffers: Gradients) -> None:
        """See `Portable`."""
        mapped(_clear if _zero is None else _clear_in_place, zero, buffers)


def kernels_for(dtypes: tuple[ms.Type, ...]) -> Portable:
    """Return the kernels for parameters of these dtypes."""
    if environ.get(SWITCH) == "1":
        return InPlace()
    is_chained = ms.get_context("device_target") == "Ascend" and any(dtype in HALF for dtype in dtypes)
    return OneByOne() if is_chained else Portable()


def _clear(zero: Tensor, buffer: Parameter) -> None:
    ops.assign(buffer, cleared(zero, buffer))


def _clear_in_place(_: Tensor, buffer: Parameter) -> Tensor:
    return _zero(buffer)


def _scaled_in_place(factor: Tensor, buffer: Parameter, dtype: ms.Type) -> Tensor:
    if buffer.dtype in HALF:  # rounded to 16 bits only if the parameter is
        return scaled(factor, buffer, dtype)
    return cast(_multiply(buffer, cast(factor, buffer.dtype)), dtype)
