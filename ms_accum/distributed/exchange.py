"""The exchange between ranks: how the gradients of several ranks are combined. One device is the plain case.

    rank 0:  add, add, ... ─┐
    rank 1:  add, add, ... ─┼─ one exchange for each window ─► the same update on every rank       sync="window"
    rank 2:  add, add, ... ─┘

    node 0:  rank 0 ─┬─ sum at each microbatch ─┐
             rank 1 ─┘                          ├─ one exchange between nodes for each window       sync="node"
    node 1:  rank 2 ─┬─ sum at each microbatch ─┘
             rank 3 ─┘

Two groups describe every exchange: the ranks *inside* sum each microbatch ("window": each rank alone; "microbatch":
all), and their counterparts *across* sum each window ("window": all; "microbatch": nobody). The gradients travel in few
large buckets, with a few numbers to be summed: the weight, how many microbatches there are, which ranks still have
data, and others.
"""
from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Optional

import mindspore as ms
import numpy as np
from mindspore import Parameter, ParameterTuple, ops
from mindspore.communication import GlobalComm, create_group, get_rank
from mindspore.nn.utils import no_init_parameters

from ..tensors import as_numbers, as_vector, state_parameter
from .buckets import Buckets
from .parallel_modes import require_unreduced
from .ranks import world_size

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from mindspore import Tensor

    from ..tensors import Gradients, Numbers, Scalar
    from .buckets import AccumulatedParameters


# Buffers of accumulators that are gone, by shape and dtype. MindSpore keeps the memory of a Parameter that a compiled
# graph has used until the process ends, so the next accumulator takes them.
_unused: dict[tuple, list[Parameter]] = {}


def reuse(buffers: Iterable[Parameter]) -> None:
    """Keep buffers that have memory, and that nothing uses any more, for `new_buffers`."""
    for buffer in buffers:
        if not buffer.has_init:
            _unused.setdefault((tuple(buffer.shape), buffer.dtype), []).append(buffer)


def new_buffers(prefix: str, shapes: Iterable[tuple[str, tuple[int, ...]]], dtypes: tuple[ms.Type, ...]) -> tuple[
        Parameter, ...]:
    """Return Parameters that are 0, given their names and shapes. Those that are new have no memory yet."""
    return tuple(_new_buffer(f"{prefix}.{name}", shape, dtype) for (name, shape), dtype in zip(shapes, dtypes))


def _new_buffer(name: str, shape: tuple[int, ...], dtype: ms.Type) -> Parameter:
    unused = _unused.get((shape, dtype))
    if unused:
        buffer = unused.pop()
        buffer.name = name
        ops.assign(buffer, ops.zeros(shape, dtype))
        return buffer
    with no_init_parameters():
        return state_parameter(name, shape, dtype)


@ms.jit_class
class OneDevice:
    """Exchange nothing, on one device; the base of `Exchange`, `Zero` and `Slices`.

    Attributes:
        rank, ranks: This rank, and the number of ranks.
        inside, across: The number of ranks that sum each microbatch; the number of such groups, which sum each window.
        divides_buffers: Whether a rank keeps only a part of the buffers.
        divides_parameters: Whether the optimizer updates slices of the parameters: windows return slices of gradients.
        weights: The whole parameters, in the optimizer's order.
        shared_unit: The unit of weights, if ranks must share one. None: each rank sets its own.
        jit_options: Options of `ms.jit` for graphs that add microbatches.
    """

    shared_unit: Optional[float] = None
    divides_parameters = False
    jit_options: Mapping[str, str] = MappingProxyType({})

    def __init__(self, accumulated: AccumulatedParameters) -> None:
        self.rank, self.ranks, self.inside, self.across, self.divides_buffers = 0, 1, 1, 1, False
        self.weights, self.dtypes = ParameterTuple(accumulated.parameters), accumulated.dtypes
        self.shapes = [(p.name, tuple(p.shape)) for p in accumulated.parameters]

    def buffers(self, prefix: str) -> tuple[Parameter, ...]:
        """Return buffers of 0, whose names begin with `prefix`; see `new_buffers`."""
        return new_buffers(prefix, self.shapes, self.dtypes)

    def give_back(self, buffers: tuple[Parameter, ...]) -> None:
        """Keep buffers that nothing uses any more for the next accumulator."""
        reuse(buffers)

    def microbatch(self, gradients: Gradients, numbers: Numbers) -> tuple[Gradients, Numbers]:
        """Return the gradients to add to the buffers, and the numbers, summed over the ranks inside.

        Numbers: the weight, whether it is taken, whether the rank still has data, others.
        """
        return gradients, numbers

    def window(self, buffers: Gradients, unit: Scalar, numbers: Numbers) -> tuple[Gradients, Scalar, Numbers]:
        """Return the gradients of a window of all ranks, their unit, and the numbers, summed across.

        Numbers: the weight, the number of microbatches, the number of ranks that still have data, others.
        """
        return buffers, unit, numbers

    def total(self, numbers: Numbers) -> Numbers:
        """Return the sums over all ranks."""
        return numbers

    def over_slices(self, number: Tensor) -> Tensor:
        """Return the sum over ranks of a number that was computed from a window's gradients, if these are slices.

        float32 `()`, equal on all ranks. If gradients are whole, the number is returned unchanged.
        """
        return number

    def cut_parameters(self) -> None:
        """Prepare the parameters that the optimizer updates, before each update."""

    def gather_parameters(self) -> None:
        """Set the whole parameters after the optimizer has updated."""

    def joined(self, state: Parameter, whole: Parameter) -> np.ndarray:
        """Return state of the optimizer for a whole parameter, given this rank's slice of it. For the host."""
        return state.asnumpy()

    def cut(self, value: Tensor, whole: Parameter) -> Tensor:
        """Return this rank's slice of such state. For the host."""
        return value

    def require_whole_state(self) -> None:
        """Raise ValueError if this rank holds only slices of the state, so that it cannot be saved or loaded."""

    def describe(self) -> str:
        """Return the settings that must be equal in the run that resumes."""
        return f"sum inside {self.inside}, across {self.across}{', sharded' if self.divides_buffers else ''}"


@ms.jit_class
class Exchange(OneDevice):
    """Exchange in two groups: `inside` consecutive ranks sum each microbatch, and `across` groups sum each window.

    If ranks inside sum, the unit of the buffers is 1, the only unit that they share.
    """

    def __init__(self, accumulated: AccumulatedParameters, inside: int, ranks: int, size: int) -> None:
        super().__init__(accumulated)
        self.rank, self.ranks = get_rank(), ranks
        self.inside, self.across, self.shared_unit = inside, ranks // inside, 1.0 if inside > 1 else None
        self.jit_options = depth_first(inside)
        node, place = divmod(self.rank, inside)
        self.all = Buckets(accumulated.parameters, accumulated.dtypes, size, self.rank, ranks)
        self.inner: Any = None  # Buckets, if ranks inside sum
        self.outer: Any = None  # an AllReduce, if ranks across do
        if inside > 1:
            group = group_of(range(node * inside, (node + 1) * inside))
            self.inner = self.all if inside == ranks else Buckets(accumulated.parameters, accumulated.dtypes, size,
                                                                  place, inside, group)
        if inside < ranks:
            self.outer = ops.AllReduce(group=group_of(range(place, ranks, inside)))

    def microbatch(self, gradients: Gradients, numbers: Numbers) -> tuple[Gradients, Numbers]:
        """See `OneDevice`."""
        require_unreduced()
        if self.inside == 1:
            return gradients, numbers
        return self.inner.all_reduce(gradients, numbers)

    def window(self, buffers: Gradients, unit: Scalar, numbers: Numbers) -> tuple[Gradients, Scalar, Numbers]:
        """See `OneDevice`. The unit is the user's unit, 1, as a Tensor.

        With the constant 1, MindSpore 2.10 on CPU reads 16-bit buffers too early if one graph both adds and updates.
        """
        require_unreduced()
        if self.inside == 1:
            gradients, numbers = self.all.all_reduce(buffers, numbers, unit)
            return gradients, ops.ones_like(numbers[0]), numbers
        if self.across == 1:
            return buffers, ops.ones_like(numbers[0]), numbers
        sums, parts = self.outer(as_vector(numbers)), ()  # type: Tensor, Gradients
        numbers = as_numbers(sums, len(numbers))
        for part in self.inner.parts(buffers):
            sums = self.outer(ops.depend(part, sums))
            parts = (*parts, sums)
        # The first part waits for all earlier exchanges, and the other parts wait for it.
        parts = self.inner.all_gather((ops.depend(parts[0], sums), *parts[1:]))
        return parts, ops.ones_like(numbers[0]), numbers

    def total(self, numbers: Numbers) -> Numbers:
        """See `OneDevice`."""
        return self.all.sum_numbers(numbers)


def depth_first(inside: int) -> dict[str, str]:
    """Return options of `ms.jit` for graphs in which `inside` ranks sum each microbatch.

    By default, MindSpore 2.10 orders kernels on Ascend breadth first: collectives last, when all gradients are in
    memory. Depth first, after each kernel comes the kernel that uses its result and is nearest to what the graph
    returns. So what the graph returns has to depend on the gradients, without a kernel in between: otherwise the
    backward pass may go on before a weight's gradient is computed and exchanged, and many wait for one (12 x Dense 2048
    with biases in float32, zero=2, buckets of 16 MiB: 9.0 bytes per parameter at the peak with ReLU between layers, and
    8.7 without, instead of 6.7).
    """
    return {"exec_order": "dfs"} if inside > 1 and ms.get_context("device_target") == "Ascend" else {}


def group_of(ranks: range) -> str:
    """Return the name of the group of these ranks; all of them create it."""
    if len(ranks) == world_size():
        return GlobalComm.WORLD_COMM_GROUP
    name = f"ms_accum.{ranks.start}.{ranks.stop}.{ranks.step}"
    if name not in _groups:
        create_group(name, list(ranks))
        _groups.add(name)
    return name


_groups: set[str] = set()
