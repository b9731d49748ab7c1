"""The buffers: one for each parameter, in a unit of weights that spares equal microbatches a multiplication.

    buffer += weight / unit * gradient        # weight / unit is the constant 1 for pieces of equal weight
    gradient = buffer * (unit / sum of the weights)
"""
from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Optional

import mindspore as ms
from mindspore import Parameter, ParameterTuple, Tensor, ops
from mindspore.common.initializer import initializer

from ..tensors import FLOATS, HALF, mapped, scaled, weighted
from .kernels import add_in_turn, in_place

if TYPE_CHECKING:
    from ..tensors import Gradients, Scalar


def state_parameter(name: str, shape: tuple[int, ...], dtype: ms.Type, value: float = 0) -> Parameter:
    """Return a Parameter that is state and not trained, filled with `value`."""
    return Parameter(initializer(value, shape, dtype), name=name, requires_grad=False)


@ms.jit_class
class Buffers:
    """What a window has accumulated so far.

    The unit is a number that the host fixes before the first graph is compiled: a driver takes the rows of its first
    piece; by hand, and where ranks sum each microbatch, it is 1. So the weight of a piece divided by the unit is a
    constant of the graph. Where it is 1, at most a cast stands between the backward pass and `AssignAdd`.

    Args:
        prefix: What the names of the buffers begin with.
        shapes: Name and shape of each buffer.
        dtypes: Their dtypes.
        gradient_dtypes: dtypes of the gradients that `weighed` returns, one for each parameter.
        unit: What they count in, if that is fixed from the start.

    Attributes:
        parameters: The buffers.
        unit: What they count in: a float, or None before anything has fixed it.
        weight_unit: The same on the device, 0 before: float32 Parameter of shape `()`.
        state: The buffers and `weight_unit`.
    """

    def __init__(self, prefix: str, shapes: list[tuple[str, tuple]], dtypes: tuple[ms.Type, ...],
                 gradient_dtypes: tuple[ms.Type, ...], unit: Optional[float] = None) -> None:
        self.parameters = ParameterTuple([state_parameter(f"{prefix}.{name}", shape, dtype)
                                          for (name, shape), dtype in zip(shapes, dtypes)])
        self._in_place = in_place(nbytes=self.nbytes)
        self.large = max(prod(shape) for _, shape in shapes) // 64
        self.gradient_dtypes = gradient_dtypes
        self.unit = unit
        self.weight_unit = state_parameter(f"{prefix}.weight_unit", (), ms.float32, unit or 0.0)
        self.state = (*self.parameters, self.weight_unit)

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return sum(prod(p.shape) * p.itemsize for p in self.parameters)

    def weighed(self, gradients: Gradients, weight: Scalar) -> Gradients:
        """Return `weight / unit * gradients` in `gradient_dtypes`; 0 where the weight is 0, NaN included."""
        if self.unit is None:
            ops.assign(self.weight_unit, 1.0)
            factor = weight
        else:
            factor = weight / self.unit
        return mapped(weighted, factor, gradients, self.gradient_dtypes)

    def add(self, gradients: Gradients) -> Gradients:
        """Add what `weighed` returned, or what an exchange made of it, for a graph that does not read the buffers.

        Each gradient is added as soon as it is made. Side effects of a graph run in the order of the program, and those
        in the order of the parameters would keep all gradients in memory: the backward pass makes the gradient of the
        last one first (13 x Dense 2048 in bfloat16 on Ascend: 10.2 bytes per parameter at the peak instead of 6.5).
        On CPU and GPU, 16-bit buffers are added in the order of the parameters, and so are all buffers that are small
        together.

        Return what the next side effect has to wait for.
        """
        return self._in_place.add(self.parameters, gradients)

    def add_in_turn(self, gradients: Gradients) -> tuple[Gradients, Gradients]:
        """The same for any graph: one after the other, as side effects, roughly in the order of the backward pass.

        Small buffers come last: MindSpore runs one side effect for each operator on a path through the graph. The
        result is returned because MindSpore would otherwise warn of lost side effects, although none are lost.
        """
        large = mapped(_add_large, self.large, self.parameters[::-1], gradients[::-1])
        return large, mapped(_add_small, self.large, self.parameters[::-1], gradients[::-1])

    def behind(self, note: Tensor, loss: Tensor) -> Tensor:
        """Return a loss of which no gradient is added by `add` before a note."""
        return self._in_place.behind(note, loss)

    def empty(self, zero: Tensor) -> None:
        """Set all buffers to 0, given a float32 Tensor that is 0."""
        self._in_place.clear(zero, self.parameters)

    def fix_unit(self, weight: float) -> None:
        """Count in units of `weight` from now on, unless the unit is fixed already. For the host.

        Once something was added in a unit, compiled graphs may hold it as a constant: it stays.
        """
        if self.unit is None:
            unit = float(self.weight_unit) or weight
            ops.assign(self.weight_unit, unit)
            self.unit = unit

    def adopt(self, before: float) -> None:
        """Go on with loaded buffers. `before`: the unit of this run before it loaded them, 0 without one. For the host.

        Compiled graphs may hold that one as a constant: the buffers are converted to it.
        """
        loaded = float(self.weight_unit)
        if before and loaded and before != loaded:
            for buffer in self.parameters:
                ops.assign(buffer, scaled(loaded / before, buffer, buffer.dtype))
        unit = before or loaded
        if unit:
            self.unit = unit
        ops.assign(self.weight_unit, unit)


def _add_large(size: int, buffer: Parameter, gradient: Tensor) -> Tensor:
    return add_in_turn(None, buffer, gradient) if buffer.size >= size else Tensor(0.0)


def _add_small(size: int, buffer: Parameter, gradient: Tensor) -> Tensor:
    return add_in_turn(None, buffer, gradient) if buffer.size < size else Tensor(0.0)


def buffer_dtype_of(buffer_dtype: Optional[ms.Type], parameter_dtype: ms.Type) -> ms.Type:
    """Return the dtype of a parameter's buffer: as asked for, or the parameter's own, but float32 for 16 bits."""
    if buffer_dtype is None:
        return ms.float32 if parameter_dtype in HALF else parameter_dtype
    if buffer_dtype not in FLOATS:
        raise ValueError(f"buffer_dtype is {buffer_dtype}, expected a float dtype such as ms.float32, or None")
    return buffer_dtype
