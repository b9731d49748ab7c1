"""Kernels that scale gradients for the optimizer and clear buffers: portable ones, and those of Ascend, in place."""
from __future__ import annotations

from collections.abc import Sequence
from os import environ
from typing import Any

import mindspore as ms
from mindspore import Parameter, Tensor, ops

from ..mindspore_api import InplaceZero, jit_class
from ..tensors import HALF, Gradients, Scalar, add_one, as_tensor, cast, cleared, mapped, mapped_backwards, scaled

SWITCH = "MS_ACCUM_IN_PLACE"  # in the environment: "1" takes the kernels in place


@jit_class
class Portable:
    """Scale and clear by assigning new values, with kernels that every device has.

    Args:
        small: Gradients of fewer elements are added after all others.
    """

    def __init__(self, small: int = 0) -> None:
        self.small = small

    def add(self, factor: Scalar, buffers: Gradients, gradients: Gradients) -> None:
        """Add `factor * gradient` to each buffer: in a graph, the last one first.

        The backward pass computes the gradient of the last parameter first. In the order of the parameters, all
        gradients would be in memory together (13 x Dense 2048 in bfloat16 on Ascend: 10.2 bytes per parameter at the
        peak in place of 6.5; with biases between the weights: 8.3). The results of the additions are not used:
        MindSpore would fuse each with the kernel that computes its gradient, and on CPU no two gradients would be
        computed in parallel.
        """
        if self.small == 0:
            mapped_backwards(add_one, factor, buffers, gradients)
        else:
            for is_small in (False, True):
                mapped_backwards(_add_some, (is_small, self.small, factor), buffers, gradients)

    def scale(self, factor: Scalar, gradients: Gradients, dtypes: tuple[ms.Type, ...]) -> Gradients:
        """Return `factor * gradient` for each gradient, in `dtypes`."""
        return mapped(scaled, factor, gradients, dtypes)

    def clear(self, zero: Tensor, buffers: Gradients) -> None:
        """Set all buffers to 0, given a float32 Tensor that is 0 and that no graph knows."""
        mapped(_clear, zero, buffers)


@jit_class
class OneByOne(Portable):
    """Scale one gradient after the other, and clear one buffer after the other, or all that 16 bits need are in memory.

    For Ascend: 12.5 bytes per parameter at the peak in place of 15.2 (AdamWeightDecay, bfloat16). To compile it takes
    longer than to compile `Portable`, and float32 gains nothing.
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

    def clear(self, zero: Tensor, buffers: Gradients) -> None:
        """See `Portable`."""
        previous = zero
        for buffer in buffers:  # zero is read for each: read once, products would come before the optimizer (14.0)
            previous = cleared(ops.depend(zero, previous), buffer)
            ops.assign(buffer, previous)


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


def kernels_for(parameters: Sequence[Parameter]) -> Portable:
    """Return the kernels for these parameters."""
    is_in_place = environ.get(SWITCH) == "1"
    if ms.get_context("device_target") != "Ascend":
        return InPlace() if is_in_place else Portable()
    # MindSpore runs one side effect for each operator on a path through the graph: biases between weights would let
    # the gradients of weights wait.
    small = max(p.size for p in parameters) // 64
    if any(p.dtype in HALF for p in parameters):
        return OneByOne(small)  # in place, no byte less
    return (InPlace if is_in_place else Portable)(small)


def _add_some(shared: tuple, buffer: Parameter, gradient: Tensor) -> None:
    if (buffer.size < shared[1]) == shared[0]:
        add_one(shared[2], buffer, gradient)


def _clear(zero: Tensor, buffer: Parameter) -> None:
    ops.assign(buffer, cleared(zero, buffer))


def _clear_in_place(_: Tensor, buffer: Parameter) -> Tensor:
    return _zero(buffer)


def _scaled_in_place(factor: Tensor, buffer: Parameter, dtype: ms.Type) -> Tensor:
    if buffer.dtype in HALF:  # rounded to 16 bits only if the parameter is
        return scaled(factor, buffer, dtype)
    return cast(_multiply(buffer, cast(factor, buffer.dtype)), dtype)
