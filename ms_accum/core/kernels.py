"""What is done to buffers in place, without a second copy of them, where the device has kernels for that.

MindSpore keeps the order of the program among operators that are marked as side effects. One without the mark runs as
soon as its inputs are there.
"""
from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING

import mindspore as ms
from mindspore import Parameter, Tensor, ops
from mindspore.ops.auto_generate import InplaceZero

from ..tensors import HALF, as_tensor, mapped, multiply_no_nan, scaled

if TYPE_CHECKING:
    from ..tensors import Gradients, Scalar

SMALL = 2**25  # bytes


@ms.jit_class
class Copying:
    """Add in place, scale and clear by assigning new values. For CPU and GPU: with kernels that every device has."""

    def add(self, buffers: Gradients, gradients: Gradients) -> Gradients:
        """Add gradients of the buffers' dtypes, each as soon as it is made, in a graph that does not read the buffers.

        16-bit buffers are added in turn: on CPU, an AssignAdd of 16 bits without a mark is lost. Return what to wait
        for.
        """
        return mapped(_add_early_if_wide, None, buffers, gradients)

    def behind(self, note: Tensor, loss: Tensor) -> Tensor:
        """Return a loss of which no gradient is made, and so none added, before a note.

        By a multiplication, whose backward pass needs the other factor and so waits for the note; that of a dependency
        would not. Nothing else orders additions without a mark.
        """
        return loss * ops.depend(Tensor(1, loss.dtype), note)

    def scale(self, factor: Scalar, gradients: Gradients, dtypes: tuple[ms.Type, ...]) -> Gradients:
        """Return `factor * gradients` in `dtypes`. `InPlace` overwrites them: they have to be cleared next."""
        return mapped(scaled, factor, gradients, dtypes)

    def clear(self, zero: Tensor, buffers: Gradients) -> None:
        """Set all buffers to 0, given a float32 Tensor that is 0.

        By `buffer * 0`, where NaN * 0 is 0: for `zeros_like(buffer)`, a constant, graph mode keeps a second copy of all
        buffers (258 MB measured), and so it does for a broadcast 0, which is also 3 x slower.
        """
        mapped(_clear, zero, buffers)


@ms.jit_class
class InTurn(Copying):
    """Add one after the other. For small buffers, where gradients that wait take little memory.

    On CPU, additions compete with the backward pass for cores: with an MLP of 2.7 MB, a step that added each gradient
    as soon as it was made took 1.02 x the time.
    """

    def add(self, buffers: Gradients, gradients: Gradients) -> Gradients:
        """See `Copying`. There is nothing to wait for: what comes later in the code follows what is marked.

        If the results were used, MindSpore would join each addition with the kernel that makes its gradient, and no two
        gradients would be made side by side.
        """
        mapped(_add_marked, None, buffers, gradients)
        return ()

    def behind(self, note: Tensor, loss: Tensor) -> Tensor:
        """See `Copying`: additions in turn come after the note anyway. The multiplication costs three kernels."""
        return ops.depend(loss, note)


@ms.jit_class
class InPlace(Copying):
    """Multiply and clear in place. For Ascend, where copies of all buffers would be in memory together.

    13 x Dense 2048 in float32 with Momentum: 16.0 bytes per parameter at the peak with copies, 12.0 in place; clipped,
    12.6.
    """

    def add(self, buffers: Gradients, gradients: Gradients) -> Gradients:
        """See `Copying`, 16-bit buffers too: 13 x Dense 2048 with these take 4.2 bytes per parameter instead of 6.2."""
        return mapped(_add_unmarked, None, buffers, gradients)

    def scale(self, factor: Scalar, gradients: Gradients, dtypes: tuple[ms.Type, ...]) -> Gradients:
        """See `Copying`. Whatever reads the buffers has to come before `factor`."""
        return mapped(_scaled_in_place, as_tensor(factor), gradients, dtypes)

    def clear(self, zero: Tensor, buffers: Gradients) -> None:
        """See `Copying`."""
        mapped(_empty, None, buffers)


class _Multiply(ops.Primitive):
    """Multiply in place, without a mark of the side effect: MindSpore would copy a buffer that is read around one.

    Graphs take the operator of this name. Op by op, Ascend has none for it, and a copy is made.
    """

    def __init__(self) -> None:
        super().__init__("InplaceMul")

    def __call__(self, buffer: Parameter, factor: Tensor) -> Tensor:
        """Return the product, op by op."""
        return ops.mul(buffer, factor)


_multiply_unmarked = _Multiply()
_zero = InplaceZero()
_zero.add_prim_attr("side_effect_mem", True)  # which it lacks in MindSpore 2.10: graphs would drop it without an error


def in_place(buffers: bool = True, nbytes: float = inf) -> Copying:
    """Return what suits the device, for buffers of so many bytes; False: for exchanged or unscaled copies of them."""
    if buffers and ms.get_context("device_target") == "Ascend":
        return InPlace()
    return InTurn() if nbytes <= SMALL else Copying()


# AssignAdd without its mark of a side effect, and without a signature that says that it writes, which is a mark, too.
_assign_add_unmarked = ops.Primitive("AssignAdd")


def _add_unmarked(_: None, buffer: Parameter, gradient: Tensor) -> Tensor:
    return _assign_add_unmarked(buffer, gradient.astype(buffer.dtype))


def _add_early_if_wide(_: None, buffer: Parameter, gradient: Tensor) -> Tensor:
    return add_in_turn(None, buffer, gradient) if buffer.dtype in HALF else _add_unmarked(None, buffer, gradient)


def add_in_turn(_: None, buffer: Parameter, gradient: Tensor) -> Tensor:
    """Add behind a mark of a side effect: each waits for the one before it in the code."""
    gradient = gradient.astype(buffer.dtype)
    if buffer.dtype in HALF:
        # MindSpore 2.10 on CPU: of two float16 AssignAdd on one Parameter in one graph, the first is lost.
        return ops.assign(buffer, buffer + gradient)
    return ops.assign_add(buffer, gradient)


def _add_marked(_: None, buffer: Parameter, gradient: Tensor) -> None:
    add_in_turn(None, buffer, gradient)


def _clear(zero: Tensor, buffer: Parameter) -> None:
    ops.assign(buffer, multiply_no_nan(buffer, zero.astype(buffer.dtype)))


def _scaled_in_place(factor: Tensor, buffer: Parameter, dtype: ms.Type) -> Tensor:
    if buffer.dtype in HALF:  # rounded to 16 bits only if the parameter is
        return scaled(factor, buffer, dtype)
    return _multiply_unmarked(buffer, factor.astype(buffer.dtype)).astype(dtype)


def _empty(_: None, buffer: Parameter) -> Tensor:
    return _zero(buffer)
