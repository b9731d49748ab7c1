"""The exchange between ranks: how the gradients of several ranks are combined. One device is the plain case.

    rank 0:  add, add, ... ─┐
    rank 1:  add, add, ... ─┼─ one exchange for each window ─► the same update on every rank       sync="window"
    rank 2:  add, add, ... ─┘

    node 0:  rank 0 ─┬─ sum at each microbatch ─┐
             rank 1 ─┘                          ├─ one exchange between nodes for each window       sync="node"
    node 1:  rank 2 ─┬─ sum at each microbatch ─┘
             rank 3 ─┘

Two groups describe every exchange: the ranks *inside* sum each microbatch ("window": each rank alone; "microbatch":
all), and their counterparts *across* sum each window ("window": all; "microbatch": nobody). First, ranks `meet`: they
compare what they are about to exchange (see `tags.py`), and sum the weight, how many microbatches there are, and which
ranks still have data. Then the gradients travel in few large buckets, with the numbers that stages have measured.
"""
from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Optional

import mindspore as ms
import numpy as np
from mindspore import Parameter, ParameterTuple, Tensor, ops

from ..mindspore_api import GlobalComm, create_group, get_rank, jit_class, no_init_parameters
from ..tensors import as_numbers, as_vector, state_parameter
from .buckets import Buckets
from .ranks import gather, left_alone, require_alike, require_equal, together, world_size
from .tags import (
    BUILD,
    COMPARE,
    EVALUATE,
    LOAD,
    RanksDiffer,
    Tags,
    announce,
    disagreement,
    disagreements,
    forget_disagreement,
    tags_of,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

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


@jit_class
class OneDevice:
    """Exchange nothing, on one device; the base of `Exchange` and `Zero`.

    Attributes:
        number: This accumulator's number: accumulators that exchange are counted as they are built; 0 on one device.
        rank, ranks: This rank, and the number of ranks.
        inside, across: The number of ranks that sum each microbatch; the number of such groups, which sum each window.
        divides_buffers: Whether a rank keeps only a part of the buffers.
        divides_parameters: Whether the optimizer updates slices of the parameters: windows return slices of gradients.
        weights: The whole parameters, in the optimizer's order.
        shared_unit: The unit of weights, if ranks must share one. None: each rank sets its own.
        jit_options: Options of `ms.jit` for graphs that add microbatches.
    """

    number = 0
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

    def microbatch(self, gradients: Gradients, numbers: Numbers, measured: Numbers, held: Any
                   ) -> tuple[Gradients, Numbers, Numbers]:
        """Return the gradients to add to the buffers, and the numbers, summed over the ranks inside.

        Args:
            gradients: Of this rank's microbatch, or piece.
            numbers: The weight, whether it is taken, whether the rank still has data.
            measured: What stages have measured.
            held: Number of microbatches in the open window, int32 `()`: ranks inside must hold as many.
        """
        return gradients, numbers, measured

    def meet(self, numbers: Numbers) -> tuple[Any, Numbers]:
        """Return whether all ranks are about to close a window of this accumulator, and the sums of numbers across.

        See `Window.meet`.
        """
        return True, numbers

    def window(self, buffers: Gradients, unit: Scalar, numbers: Numbers, measured: Numbers
               ) -> tuple[Gradients, Scalar, Numbers]:
        """Return the gradients of a window of all ranks, their unit, and what stages have measured, summed across.

        `numbers`: those of `Window.meet`; the exchange begins after it.
        """
        return buffers, unit, measured

    def evaluated(self, count: Callable[[], np.ndarray]) -> np.ndarray:
        """Return the sum over all ranks of what `count` returns on each, float64. For the host; every rank calls it.

        If `count` raises an error on one rank, all ranks raise one.
        """
        return count()

    def disagreement(self) -> Optional[RanksDiffer]:
        """Return the error to raise if ranks have disagreed in an earlier exchange, in a graph. It reads the device."""
        return None

    def require_agreement(self) -> None:
        """Raise `RanksDiffer` if ranks have disagreed in an earlier exchange."""
        differ = self.disagreement()
        if differ is not None:
            raise differ

    def forgive(self) -> None:
        """Forget rounds, and an earlier disagreement: all ranks load a checkpoint."""

    def end_round(self) -> None:
        """Begin the next round: a flush of all ranks has ended, or this rank has left an epoch without one."""

    def announce(self, what: int) -> None:
        """Say what this rank does next with this accumulator, and raise `RanksDiffer` unless all ranks do the same."""

    def compare_parameters(self) -> None:
        """Raise RuntimeError on every rank if the parameters differ, at the end of a flush or in a save."""

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

    def require_alike(self, settings: Mapping[str, object]) -> None:
        """Raise ValueError on every rank if settings of a step differ between ranks, and name them. For the host."""

    def describe(self) -> str:
        """Return the settings that must be equal in the run that resumes."""
        return f"sum inside {self.inside}, across {self.across}{', sharded' if self.divides_buffers else ''}"


@jit_class
class ManyRanks(OneDevice):
    """Compare tags before each exchange; the base of `Exchange` and `Zero`.

    Attributes:
        rounds: The round: the number of flushes of all ranks, and of epochs that this rank has left without one;
            float32 Parameter `(1,)`.
    """

    def __init__(self, accumulated: AccumulatedParameters, inside: int, ranks: int) -> None:
        super().__init__(accumulated)
        self.number, self.compares = accumulated.number, accumulated.compares
        self.rank, self.ranks = get_rank(), ranks
        self.inside, self.across, self.shared_unit = inside, ranks // inside, 1.0 if inside > 1 else None
        self.jit_options = depth_first(inside)
        node, place = divmod(self.rank, inside)
        self.members_inside = range(node * inside, (node + 1) * inside)
        self.members_across = range(place, ranks, inside)
        self.rounds = state_parameter(f"exchange{self.number}.rounds", (1,), ms.float32)
        self.tags_inside: Any = None  # Tags, if ranks inside sum
        self.tags_across: Any = None  # Tags, if ranks across do
        if inside > 1:
            self.tags_inside = tags_of(group_of(self.members_inside), self.members_inside)
        if self.across > 1:
            self.tags_across = tags_of(group_of(self.members_across), self.members_across)
        self.sum, self.forgiven = ops.AllReduce(), disagreements()

    def _meet_inside(self, numbers: Numbers, held: Any) -> tuple[Tensor, Numbers]:
        """Return a token that the exchange waits for, and the sums of numbers inside. Mark if ranks disagree.

        No branch follows: all gradients would be in memory until it is taken.
        """
        agreed, sums, flat = self._compared(self.tags_inside, numbers, held + 0)
        return flat, as_numbers(ops.depend(sums, agreed), 3)

    def meet(self, numbers: Numbers) -> tuple[Any, Numbers]:
        """See `OneDevice`."""
        if self.across == 1:
            return (self.tags_inside.agreed == 1).all(), numbers
        agreed, sums, flat = self._compared(self.tags_across, numbers)
        return agreed, as_numbers(ops.depend(sums, flat), 3)  # `depend` uses what nobody needs, or MindSpore warns

    def _compared(self, tags: Tags, numbers: Numbers, held: Scalar = 0) -> tuple[Tensor, Tensor, Tensor]:
        return tags.compare(self.number, self.rounds + 0.0, numbers, held)

    def evaluated(self, count: Callable[[], np.ndarray]) -> np.ndarray:
        """See `OneDevice`."""
        self.announce(EVALUATE)
        with left_alone(f"evaluates with accumulator {self.number}"):
            return gather(together(count, RuntimeError)).sum(0)

    def disagreement(self) -> Optional[RanksDiffer]:
        """See `OneDevice`."""
        return disagreement(self.forgiven)

    def forgive(self) -> None:
        """See `OneDevice`."""
        forget_disagreement()
        self.forgiven = disagreements()
        ops.assign(self.rounds, ops.zeros_like(self.rounds))

    def end_round(self) -> None:
        """See `OneDevice`."""
        ops.assign_add(self.rounds, Tensor([1.0], ms.float32))

    def announce(self, what: int) -> None:
        """See `OneDevice`."""
        if what != LOAD:  # which is the way out of a disagreement
            self.require_agreement()
        announce(what, self.number, [tags for tags in (self.tags_inside, self.tags_across) if tags is not None])

    def require_alike(self, settings: Mapping[str, object]) -> None:
        """See `OneDevice`."""
        self.announce(BUILD)
        require_alike({name: repr(value) for name, value in settings.items()})

    def compare_parameters(self) -> None:
        """See `OneDevice`."""
        if self.compares:
            self.announce(COMPARE)
            require_equal({p.name: p for p in self.weights})


@jit_class
class Exchange(ManyRanks):
    """Exchange in two groups: `inside` consecutive ranks sum each microbatch, and `across` groups sum each window.

    If ranks inside sum, the unit of the buffers is 1, the only unit that they share.
    """

    def __init__(self, accumulated: AccumulatedParameters, inside: int, ranks: int, size: int) -> None:
        super().__init__(accumulated, inside, ranks)
        self.all = Buckets(accumulated.parameters, accumulated.dtypes, size, self.rank, ranks)
        self.inner: Any = None  # Buckets, if ranks inside sum
        self.outer: Any = None  # an AllReduce, if ranks across do
        if inside > 1:
            self.inner = self.all if inside == ranks else Buckets(
                accumulated.parameters, accumulated.dtypes, size, self.rank % inside, inside,
                group_of(self.members_inside))
        if inside < ranks:
            self.outer = ops.AllReduce(group=group_of(self.members_across))

    def microbatch(self, gradients: Gradients, numbers: Numbers, measured: Numbers, held: Any
                   ) -> tuple[Gradients, Numbers, Numbers]:
        """See `OneDevice`."""
        if self.inside == 1:
            return gradients, numbers, measured
        sums, numbers = self._meet_inside(numbers, held)
        gradients, measured = self.inner.all_reduce(gradients, measured, sums)
        return gradients, numbers, measured

    def window(self, buffers: Gradients, unit: Scalar, numbers: Numbers, measured: Numbers
               ) -> tuple[Gradients, Scalar, Numbers]:
        """See `OneDevice`. The returned unit is a Tensor of 1.

        With the constant 1, MindSpore 2.10 on CPU reads 16-bit buffers too early if one graph both adds and updates.
        """
        one = ops.ones_like(numbers[0])
        if self.inside == 1:
            gradients, measured = self.all.all_reduce(buffers, measured, as_vector(numbers), unit)
            return gradients, one, measured
        if self.across == 1:
            return buffers, one, measured
        sums, parts = as_vector(numbers), ()  # type: Tensor, Gradients
        if measured:
            sums = self.outer(ops.depend(as_vector(measured), sums))
            measured = as_numbers(sums, len(measured))
        for part in self.inner.parts(buffers):
            sums = self.outer(ops.depend(part, sums))
            parts = (*parts, sums)
        # The first part waits for all earlier exchanges, and the other parts wait for it.
        parts = self.inner.all_gather((ops.depend(parts[0], sums), *parts[1:]))
        return parts, one, measured


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
