"""The buffers: one for each parameter, in a unit of weights with which equal microbatches need no multiplication.

    buffer += weight / unit * gradient        # weight / unit is the constant 1 for pieces of equal weight, and for sums
    gradient = buffer * (unit / sum of the weights)
"""
from __future__ import annotations

from itertools import count
from math import prod
from typing import TYPE_CHECKING, Optional
from warnings import warn
from weakref import WeakValueDictionary

import mindspore as ms
from mindspore import Parameter, ParameterTuple, Tensor, ops
from mindspore.ops import constexpr

from ..distributed.parallel_modes import shards
from ..tensors import FLOATS, HALF, mapped, scaled, state_parameter, weighted
from .kernels import add_each
from .probe import kernels

if TYPE_CHECKING:
    from ..tensors import Gradients, Scalar

# A sum of n equal gradients is at least 2**p / 2 units in its last place, of p significant bits, if n is, in units of a
# gradient. So an addition is rounded by up to n / 2**p gradients, and has no effect from n = 2**p on (float16: 2,048,
# bfloat16: 256). These are a quarter of that: there, sums of equal gradients are off by 3 % of their norm, and those of
# gradients of one sign, drawn from 0.5 to 1.5 times their mean, by 0.8 % at most.
LONGEST_SUM = {ms.float16: 512, ms.bfloat16: 64}
_LOST = ("buffer_dtype is {0} and windows may hold {1} gradients, expected at most {2} in 16 bits: the sum becomes so "
         "large that later gradients are rounded up or away, without an overflow, and updates are wrong; leave out "
         "buffer_dtype, which makes float32 buffers, or give shorter windows (with until_weight, at_most={2})")


@ms.jit_class
class Buffers:
    """Hold what a window has accumulated so far.

    Graphs hold the unit as a constant: 1, unless the host sets it before the first graph is compiled. A step sets it to
    the number of samples in its first piece, so that the weight of a piece divided by the unit is a constant, too. If
    that constant is 1, at most a cast stands between the backward pass and `AssignAdd`.

    Buffers take no memory before the first graph that holds them is compiled, or the first gradient is added op by op:
    windows of one microbatch never need them.

    Args:
        prefix: Prefix of the name of `weight_unit`.
        parameters: The buffers, from an exchange. Their names begin with "{prefix}.sum", because a network's parameter
            may have the name of a counter.
        gradient_dtypes: dtypes of the gradients that `weighed` returns, one for each parameter.
        unit: The unit of weights. None: the host sets it.

    Attributes:
        parameters: The buffers.
        unit: The unit of weights.
        weight_unit: The same on the device: float32 Parameter of shape `()`.
        state: The buffers and `weight_unit`.
    """

    def __init__(self, prefix: str, parameters: tuple[Parameter, ...], gradient_dtypes: tuple[ms.Type, ...],
                 unit: Optional[float] = None) -> None:
        self.parameters, self.kernels = ParameterTuple(parameters), kernels()
        sizes = [prod(p.shape) for p in parameters]
        self.small = max(sizes) // 64 if min(sizes) < max(sizes) // 64 else 0  # elements
        self.gradient_dtypes = gradient_dtypes
        self.unit, self.settled, self.number = unit or 1.0, unit is not None, next(_numbers)
        self.weight_unit = state_parameter(f"{prefix}.weight_unit", (), ms.float32, self.unit)
        self.state = (*self.parameters, self.weight_unit)
        _buffers[self.number] = self

    def allocated(self) -> ParameterTuple:
        """Return the buffers, which have memory from now on."""
        allocate(self.number)
        return self.parameters

    @property
    def nbytes(self) -> int:
        """Return the number of bytes of all buffers, also before they have memory."""
        return sum(prod(p.shape) * p.itemsize for p in self.parameters)

    def weighed(self, gradients: Gradients, weight: Scalar) -> Gradients:
        """Return `weight / unit * gradients` in `gradient_dtypes`; 0 where the weight is 0, NaN included.

        For the gradients of a sum, `weight` is 1: see `factor` in `Way.add`.
        """
        note_reader(self.number)
        return mapped(weighted, weight / self.unit, gradients, self.gradient_dtypes)

    def add(self, gradients: Gradients) -> None:
        """Add the result of `weighed`, or the result of its exchange."""
        # Not `add`: a graph would take a function of that name for this method.
        add_each(self.small, self.allocated(), gradients)

    def empty(self, zero: Tensor) -> None:
        """Set all buffers to 0, given a float32 Tensor that is 0."""
        self.kernels.clear(zero, self.allocated())

    @property
    def is_allocated(self) -> bool:
        """Return whether the buffers have memory; before that, they are 0."""
        return not self.parameters[0].has_init

    @property
    def is_compiled(self) -> bool:
        """Return whether a graph holds the buffers, or something was added op by op."""
        return self.number in _read

    def fix_unit(self, weight: float) -> None:
        """Set the unit to `weight`, unless it is given, or a graph holds it. For the host."""
        if not self.settled:
            self.settled = True
            if not self.is_compiled:
                self.unit = weight
                ops.assign(self.weight_unit, weight)

    def adopt(self, loaded: float) -> None:
        """Convert loaded buffers, whose unit is `loaded`, to the unit of this run if necessary. For the host.

        This is necessary if compiled graphs hold the unit of this run as a constant.
        """
        if self.settled or self.is_compiled:
            for buffer in self.parameters if loaded != self.unit and self.is_allocated else ():
                ops.assign(buffer, scaled(loaded / self.unit, buffer, buffer.dtype))
        else:
            self.settled, self.unit = True, loaded
        ops.assign(self.weight_unit, self.unit)


_numbers = count()
_buffers: WeakValueDictionary[int, Buffers] = WeakValueDictionary()
_read: set[int] = set()  # the numbers of the buffers whose unit a graph holds


@constexpr
def note_reader(number: int) -> bool:
    """Note, when a graph is compiled or runs op by op, that it holds the unit of the buffers with this number."""
    _read.add(number)
    return True


@constexpr
def allocate(number: int) -> bool:
    """Allocate the buffers with this number, when a graph that holds them is compiled or runs op by op.

    If MindSpore shards, it allocates them itself, when it knows the slices.
    """
    for parameter in _buffers[number].parameters:
        if parameter.has_init and not shards():
            parameter.init_data()
    return True


def warn_of_lost_gradients(buffer_dtype: Optional[ms.Type], longest: int, pieces: int = 1) -> None:
    """Warn if windows of up to `longest` microbatches, each in `pieces` pieces, are too long for 16-bit buffers.

    With several pieces, warn only if the accumulator has not warned already, for the microbatches alone.
    """
    limit = LONGEST_SUM.get(buffer_dtype)
    if limit is not None and longest * pieces > limit >= longest * (pieces > 1):
        warn(_LOST.format(buffer_dtype, f"{longest} x {pieces}" if pieces > 1 else longest, limit), stacklevel=2)


def buffer_dtype_of(buffer_dtype: Optional[ms.Type], parameter_dtype: ms.Type) -> ms.Type:
    """Return the dtype of a parameter's buffer: `buffer_dtype`, or the parameter's dtype, but float32 for 16 bits."""
    if buffer_dtype is None:
        return ms.float32 if parameter_dtype in HALF else parameter_dtype
    if buffer_dtype not in FLOATS:
        raise ValueError(f"buffer_dtype is {buffer_dtype}, expected a float dtype such as ms.float32, or None")
    if buffer_dtype == ms.bfloat16 and ms.get_context("device_target") == "CPU":
        raise ValueError("buffer_dtype is BFloat16, expected ms.float32 or None on CPU: MindSpore's CPU backend cannot "
                         "add in BFloat16 (2.10); leave buffer_dtype out")
    return buffer_dtype
