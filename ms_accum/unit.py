"""The unit of weights: buffers count in multiples of the first weight, so that equal microbatches cost no
multiplication.

    buffer += weight / unit * gradient        # weight / unit is the constant 1 for microbatches of equal weight
    gradient = buffer * (unit / sum of the weights)
"""
from __future__ import annotations

from typing import Optional, Union
from weakref import WeakValueDictionary

import mindspore as ms
from mindspore import Parameter, Tensor, ops
from mindspore.ops import constexpr

from .gradients import Scalar, scaled


@ms.jit_class
class One:
    """Count in the user's own unit. Every unit has these methods, and `keep` if `is_state`."""

    is_state = False

    def of(self, weight: Scalar) -> Scalar:
        """Return the unit of the window that a microbatch of this weight is added to."""
        return 1.0

    def current(self) -> Scalar:
        """Return the unit that the buffers count in."""
        return 1.0

    def settle(self, buffers: tuple[Parameter, ...]) -> None:
        """Rescale loaded buffers if compiled graphs hold another unit as a constant. For the host."""


@ms.jit_class
class FirstWeight:
    """Count in the first weight that is not 0, for the life of an accumulator; see `One` for the methods.

    Args:
        name: A name that no other accumulator of the process has.
        parameter: The unit on the device, 0 until there is one: float32 Parameter of shape `()`.
    """

    is_state = True

    def __init__(self, name: str, parameter: Parameter) -> None:
        self.name = name
        self.parameter = parameter
        self.constant = _Constant(parameter)
        _constants[name] = self.constant

    def of(self, weight: Scalar) -> Scalar:
        """See `One`: a number, so that a number divided by it is a constant of the graph, unless the device decides."""
        unit = constant_of(self.name, None if isinstance(weight, Tensor) else weight)
        if unit == 0:
            # The first weight is known to the device alone.
            first = weight * ops.ones_like(self.parameter)
            unit = ops.where(ops.logical_and(self.parameter == 0, ops.isfinite(first)), first, self.parameter)
        return unit

    def current(self) -> Tensor:
        """See `One`."""
        return self.parameter + 0.0

    def keep(self, unit: Scalar) -> None:
        """Remember the unit of what was added."""
        ops.assign(self.parameter, unit)

    def settle(self, buffers: tuple[Parameter, ...]) -> None:
        """See `One`."""
        unit, loaded = self.constant.number, float(self.parameter)
        if unit and loaded and unit != loaded:
            for buffer in buffers:
                ops.assign(buffer, scaled(loaded / unit, buffer, buffer.dtype))
            ops.assign(self.parameter, unit)


Unit = Union[One, FirstWeight]


class _Constant:
    """A unit as a constant of compiled graphs: 0 if only the device knows it, None until a graph needs it."""

    def __init__(self, parameter: Parameter) -> None:
        self.parameter = parameter
        self.number: Optional[float] = None


# By name, because a `constexpr` is given values only.
_constants: WeakValueDictionary[str, _Constant] = WeakValueDictionary()


@constexpr
def constant_of(name: str, weight: Optional[float]) -> float:
    """Return the unit of that name; 0 if only the device knows it.

    A `constexpr`: graph mode runs it while it compiles, so that a weight divided by it is a constant of the graph, too.
        The first call
    decides, by what a checkpoint brought or by `weight` (None for a Tensor).
    """
    unit = _constants[name]
    if unit.number is None and weight != 0:
        unit.number = float(unit.parameter.asnumpy()) or weight or 0.0
    return unit.number or 0.0
