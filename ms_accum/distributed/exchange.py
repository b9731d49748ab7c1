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
large buckets, with a few numbers to be summed: the weight, how many microbatches there are, who has data, and others.
"""
from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING, Optional

import mindspore as ms
from mindspore import Parameter, ops
from mindspore.communication import GlobalComm, create_group, get_local_rank_size, get_rank
from mindspore.nn.utils import no_init_parameters

from ..arguments import boolean, number, one_of, whole_number
from ..tensors import as_vector, mapped, scaled, state_parameter
from .buckets import MEBIBYTE, Buckets
from .parallel_modes import require_unreduced
from .ranks import broadcast_parameters, require_alike, world_size

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ..tensors import Gradients, Numbers, Scalar
    from .buckets import Accumulated

_SYNC = ("window", "microbatch", "node")


@dataclass(frozen=True)
class DataParallel:
    """Train every rank on its own part of the batch, with the same update on all: `reducer=DataParallel()`.

    Start the script with `msrun` and call `mindspore.communication.init()` first. Without that, or with one rank, the
    same script accumulates on one device.

    With `reduction="mean"`, the sum of the gradients of all ranks is divided by the weights of all ranks, so that they
    may hold different numbers of samples or tokens; with "sum", it is averaged over the ranks, as PyTorch's
    DistributedDataParallel does. Ranks may have different numbers of microbatches: `flush` waits for the others, and
    takes part in their exchanges with weight 0 until every rank has called it, so each rank has to call it at the end
    of an epoch. Where ranks exchange microbatches, `reset`, `apply` and `close_if` also have to be called on all ranks
    at the same place; with "window", a rank may close incomplete windows on its own.

    Only the optimizer's parameters are made alike. Frozen parameters and statistics (of BatchNorm, say) stay what each
    rank built: give every rank the same seed or the same checkpoint for those.

    Args:
        sync: "window": one exchange for each window, when it closes; adding a microbatch communicates nothing.
            "microbatch": each microbatch is exchanged. "node": the ranks of a node exchange each microbatch, and nodes
            exchange once for each window: each rank one part of the gradients, with its counterparts on other nodes.
        shard: With `sync="microbatch"`: each rank keeps 1/n of the accumulated gradients (ZeRO-2). They are gathered
            when a window closes, so the optimizer and its state stay whole; see the guide for sharding those. Where the
            backend has no ReduceScatter (CPU), an AllReduce of which each rank keeps its part: the same memory, twice
            the traffic. With `sync="node"`, n is the number of ranks in a node.
        broadcast: Whether parameters are copied from rank 0 at the start. If False, they have to be the same already.
        bucket_mib: Mebibytes of gradients in one collective.
        ranks_per_node: With `sync="node"`: ranks in each node, which have consecutive numbers. None: as many as msrun
            started on this host.

    Raises:
        TypeError: If an argument is of the wrong kind.
        ValueError: If an argument is out of range, `shard` comes with `sync="window"` (the gradients of a rank are
            whole until they are exchanged), or, when the Accumulator is made, ranks hold different parameters, settings
            or optimizers, or `ranks_per_node` does not divide their number.
        RuntimeError: If msrun started several ranks and `init()` was not called.

    Source: "window" is `no_sync` of PyTorch's DistributedDataParallel (Li et al. 2020,
    https://arxiv.org/abs/2006.15704) and of Colossal-AI's booster; "microbatch" is Colossal-AI's Gemini; `shard` is
    ZeRO-2 (Rajbhandari et al. 2020, https://arxiv.org/abs/1910.02054); "node" with `shard` is the gradients' part of
    PyTorch's hybrid sharding (HSDP), with accumulation between the two exchanges (asked for in pytorch #126166).

    Example:
        >>> from mindspore import nn
        >>> from ms_accum import Accumulator, DataParallel
        >>> network = nn.Dense(2, 1)
        >>> optimizer = nn.SGD(network.trainable_params(), learning_rate=0.5)
        >>> accumulator = Accumulator(optimizer, 4, reduction="mean", reducer=DataParallel())
        >>> print(accumulator.exchange.rank, "of", accumulator.exchange.ranks)  # of 2, under msrun --worker_num=2
        0 of 1
    """

    sync: str = "window"
    shard: bool = False
    broadcast: bool = True
    bucket_mib: float = 32
    ranks_per_node: Optional[int] = None

    def __post_init__(self) -> None:
        one_of("sync", self.sync, _SYNC)
        boolean("shard", self.shard)
        boolean("broadcast", self.broadcast)
        number("bucket_mib", self.bucket_mib, lambda size: 0 < size < inf, "a finite number of mebibytes > 0")
        if self.shard and self.sync == "window":
            raise ValueError('shard=True with sync="window": until they are exchanged, the gradients of a rank are '
                             'whole; give sync="microbatch" or "node"')
        if self.ranks_per_node is not None:
            whole_number("ranks_per_node", self.ranks_per_node, "None takes those that msrun started on this host")
            if self.sync != "node":
                raise ValueError(f'got ranks_per_node={self.ranks_per_node} with sync="{self.sync}", which knows no '
                                 'nodes; give sync="node"')

    def bind(self, layout: Accumulated) -> OneDevice:
        """Return the exchange of one accumulator. Raises ValueError if ranks are not alike."""
        require_unreduced()
        ranks = world_size()
        if ranks == 1:
            return OneDevice(layout)
        refused = [dtype for dtype in (ms.float64, ms.bfloat16) if dtype in layout.dtypes]
        if refused and ms.get_context("device_target") == "CPU":
            raise ValueError(f"DataParallel with buffers of {str(refused[0]).lower()}: MindSpore's CPU backend "
                             "exchanges none; give buffer_dtype=ms.float32")
        make_alike(layout, repr(self), self.broadcast)
        return Exchange(layout, self._inside(ranks), ranks, int(self.bucket_mib * MEBIBYTE), self.shard)

    def _inside(self, ranks: int) -> int:
        """Return how many ranks sum each microbatch."""
        if self.sync != "node":
            return ranks if self.sync == "microbatch" else 1
        remedy = "start as many ranks on each host, or give ranks_per_node"
        inside = get_local_rank_size() if self.ranks_per_node is None else int(self.ranks_per_node)
        require_alike({"the number of ranks on their host": str(inside)}, remedy)
        if ranks % inside:
            raise ValueError(f"{ranks} ranks make no whole number of nodes of {inside}; {remedy}")
        return inside


def new_buffers(prefix: str, shapes: Iterable[tuple[str, tuple[int, ...]]], dtypes: tuple[ms.Type, ...]) -> tuple[
        Parameter, ...]:
    """Return Parameters that are 0 and have no memory yet, given the name and shape of each."""
    with no_init_parameters():
        return tuple(state_parameter(f"{prefix}.{name}", shape, dtype)
                     for (name, shape), dtype in zip(shapes, dtypes))


def make_alike(layout: Accumulated, reducer: str, broadcast: bool = True) -> None:
    """Give every rank rank 0's parameters, or compare them. ValueError if what ranks are built of is not the same."""
    described = repr([(p.name, tuple(p.shape), str(p.dtype), str(dtype))
                      for p, dtype in zip(layout.parameters, layout.dtypes)])
    facts = {"parameters (names, shapes, dtypes)": described, **layout.settings, "the reducer": reducer}
    require_alike(facts, "give every rank the same network and arguments")
    if broadcast:
        broadcast_parameters(layout.parameters)
    else:
        require_alike({f"the values of {p.name}": p.asnumpy().tobytes() for p in layout.parameters},
                      "give every rank the same seed, or broadcast=True")


@ms.jit_class
class OneDevice:
    """No exchange: the plain case, and the base of `Exchange`.

    Attributes:
        rank, ranks: Which rank this is, of how many.
        inside, across: How many ranks sum each microbatch; how many of such groups sum each window.
        sharded: Whether a rank keeps a part of the buffers.
        shared_unit: The unit of weights, if ranks have to share one; None: each fixes its own.
    """

    shared_unit = None

    def __init__(self, layout: Accumulated) -> None:
        self.rank, self.ranks, self.inside, self.across, self.sharded = 0, 1, 1, 1, False
        self.dtypes = layout.dtypes
        self.shapes = [(p.name, tuple(p.shape)) for p in layout.parameters]

    def buffers(self, prefix: str) -> tuple[Parameter, ...]:
        """Return new buffers, whose names begin with `prefix`. They have no memory yet."""
        return new_buffers(prefix, self.shapes, self.dtypes)

    def microbatch(self, gradients: Gradients, numbers: Numbers) -> tuple[Gradients, Numbers]:
        """Return what to add to the buffers, and the numbers, summed over the ranks inside.

        Numbers: the weight, whether it is taken, whether the rank has data, others.
        """
        return gradients, numbers

    def window(self, buffers: Gradients, unit: Scalar, numbers: Numbers) -> tuple[Gradients, Scalar, Numbers]:
        """Return the gradients of a window of all ranks, the unit they count in, and the numbers, summed across.

        Numbers: the weight, microbatches, how many ask for an update, others.
        """
        return buffers, unit, numbers

    def total(self, numbers: Numbers) -> Numbers:
        """Return the sums over all ranks."""
        return numbers

    def require_whole_state(self) -> None:
        """Refuse to save or load where this rank holds slices of the state only. ValueError."""

    def describe(self) -> str:
        """Return what has to be the same in the run that resumes."""
        return f"sum inside {self.inside}, across {self.across}{', sharded' if self.sharded else ''}"


@ms.jit_class
class Exchange(OneDevice):
    """Two groups: `inside` consecutive ranks sum each microbatch, and their counterparts `across` sum each window.

    Where ranks inside sum, they keep the whole sums or, sharded, each a part of them. The unit of the buffers is 1
    then, the only one that they share.
    """

    def __init__(self, layout: Accumulated, inside: int, ranks: int, size: int, sharded: bool) -> None:
        super().__init__(layout)
        self.rank, self.ranks, self.sharded = get_rank(), ranks, sharded and inside > 1
        self.inside, self.across, self.shared_unit = inside, ranks // inside, 1.0 if inside > 1 else None
        node, place = divmod(self.rank, inside)
        among = Buckets(layout.parameters, layout.dtypes, size, self.rank, ranks)  # for all ranks
        self.all = among
        self.near = self.far = None
        if inside > 1:
            near = among if inside == ranks else Buckets(layout.parameters, layout.dtypes, size, place, inside, _group(
                range(node * inside, (node + 1) * inside)))
            self.near = near
        if inside < ranks:
            self.far = ops.AllReduce(group=_group(range(place, ranks, inside)))

    def buffers(self, prefix: str) -> tuple[Parameter, ...]:
        """See `OneDevice`. Sharded, a flat part of each bucket."""
        if not self.sharded:
            return super().buffers(prefix)
        parts = [(f"shard{i}", (length // self.inside,)) for i, length in enumerate(self.near.lengths)]
        return new_buffers(prefix, parts, self.near.bucket_dtypes)

    def microbatch(self, gradients: Gradients, numbers: Numbers) -> tuple[Gradients, Numbers]:
        """See `OneDevice`."""
        require_unreduced()
        if self.inside == 1:
            return gradients, numbers
        if self.sharded:
            return self.near.reduce_scatter(gradients, numbers)
        return self.near.all_reduce(gradients, numbers)

    def window(self, buffers: Gradients, unit: Scalar, numbers: Numbers) -> tuple[Gradients, Scalar, Numbers]:
        """See `OneDevice`: in the user's unit, 1, which is a Tensor.

        Where the factor of the gradient is a constant, MindSpore 2.10 on CPU lets a graph of additions and an update
        read 16-bit buffers before the last addition.
        """
        require_unreduced()
        if self.inside == 1:
            gradients, numbers = self.all.all_reduce(mapped(scaled, unit, buffers, self.dtypes), numbers)
            return gradients, ops.ones_like(numbers[0]), numbers
        parts, sums = buffers, buffers[0]
        if self.across > 1:
            sums = self.far(as_vector(numbers))
            numbers = tuple([sums[i] for i in range(len(numbers))])
            parts = ()
            for part in (buffers if self.sharded else self.near.parts(buffers)):
                sums = self.far(ops.depend(part, sums))
                parts = (*parts, sums)
        if self.sharded or self.across > 1:
            # The first part waits for all exchanges before, and the others for it.
            parts = self.near.all_gather((ops.depend(parts[0], sums), *parts[1:]))
        return parts, ops.ones_like(numbers[0]), numbers

    def total(self, numbers: Numbers) -> Numbers:
        """See `OneDevice`."""
        return self.all.sum_numbers(numbers)


def _group(ranks: range) -> str:
    """Return the name of the group of some ranks, which all of them create."""
    if len(ranks) == world_size():
        return GlobalComm.WORLD_COMM_GROUP
    name = f"ms_accum.{ranks.start}.{ranks.stop}.{ranks.step}"
    if name not in _groups:
        create_group(name, list(ranks))
        _groups.add(name)
    return name


_groups: set[str] = set()
