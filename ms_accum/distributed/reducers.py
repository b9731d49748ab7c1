"""Reducers: how the gradients of several ranks are combined. A single device is the plain case.

    rank 0:  add, add, ... ─┐
    rank 1:  add, add, ... ─┼─ one exchange for each window ─► the same update on every rank       sync="window"
    rank 2:  add, add, ... ─┘

    node 0:  rank 0 ─┬─ sum at each microbatch ─┐
             rank 1 ─┘                          ├─ one exchange between nodes for each window       sync="node"
    node 1:  rank 2 ─┬─ sum at each microbatch ─┘
             rank 3 ─┘

An exchange carries the gradients in few large buckets, and a header of a few numbers to be summed: the weight, how many
microbatches there are, who still has data, and others. A rank that has run out takes part with zeros until all have.
"""
from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import Optional

import mindspore as ms
from mindspore import Parameter, Tensor, ops
from mindspore.communication import create_group, get_local_rank_size, get_rank

from ..arguments import boolean, number, one_of, whole_number
from ..gradients import Gradients, Header, Scalar, as_vector, mapped, scaled
from ..state import empty_parameter
from .buckets import MEBIBYTE, Buckets, Layout
from .ranks import broadcast_parameters, require_alike, world_size

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
    of an epoch. Where ranks exchange something at each microbatch, `reset`, `apply` and `close_if` also have to be
    called on all ranks at the same place; with "window", a rank may close incomplete windows on its own.

    Only the optimizer's parameters are made alike. Frozen parameters and statistics (of BatchNorm, say) stay what each
    rank built: give every rank the same seed or the same checkpoint for those.

    Args:
        sync: "window": one exchange for each window, when it closes; `add` communicates nothing but one flag with
            `on_nonfinite="skip_microbatch"`, on which all ranks have to agree. "microbatch": each microbatch is
            exchanged. "node": the ranks of a node exchange each microbatch, and nodes exchange once for each window:
            each rank one part of the gradients, with its counterparts on the other nodes.
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
        >>> print(accumulator.reducer.rank, "of", accumulator.reducer.ranks)  # of 2, under msrun --worker_num=2
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

    def bind(self, layout: Layout) -> OneDevice:
        """Return the reducer of one accumulator. Raises ValueError if ranks are not alike."""
        ranks = world_size()
        if ranks == 1:
            return OneDevice(layout)
        refused = [dtype for dtype in (ms.float64, ms.bfloat16) if dtype in layout.dtypes]
        if refused and ms.get_context("device_target") == "CPU":
            raise ValueError(f"DataParallel with buffers of {str(refused[0]).lower()}: MindSpore's CPU backend "
                             "exchanges none; give buffer_dtype=ms.float32")
        make_alike(layout, repr(self), self.broadcast)
        size = int(self.bucket_mib * MEBIBYTE)
        if self.sync == "node":
            return self._nodes(layout, size, ranks)
        kind = ShardedSync if self.shard else MicrobatchSync if self.sync == "microbatch" else WindowSync
        return kind(layout, Buckets(layout, size, get_rank(), ranks), ranks)

    def _nodes(self, layout: Layout, size: int, ranks: int) -> OneDevice:
        """Return the reducer for ranks in nodes: each node is a group, and the ranks at one place of all nodes are."""
        remedy = "start as many ranks on each host, or give ranks_per_node"
        together = get_local_rank_size() if self.ranks_per_node is None else int(self.ranks_per_node)
        require_alike({"the number of ranks on their host": str(together)}, remedy)
        if ranks % together:
            raise ValueError(f"{ranks} ranks make no whole number of nodes of {together}; {remedy}")
        node, place = divmod(get_rank(), together)
        inside = Buckets(layout, size, place, together, _group(range(node * together, (node + 1) * together)))
        across = ops.AllReduce(group=_group(range(place, ranks, together)))
        return (ShardedNodeSync if self.shard else NodeSync)(layout, inside, ranks, across)


def _group(ranks: range) -> str:
    """Return the name of the group of some ranks, which all of them create."""
    name = f"ms_accum.{ranks.start}.{ranks.stop}.{ranks.step}"
    if name not in _groups:
        create_group(name, list(ranks))
        _groups.add(name)
    return name


_groups: set[str] = set()


def make_alike(layout: Layout, reducer: str, broadcast: bool = True) -> None:
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
    """The reducer of a single device, without communication, and the base of all others.

    Attributes:
        rank, ranks: Which rank this is, of how many.
        contributors: Of how many ranks an update holds the microbatches.
        each_microbatch: Whether ranks exchange something at each microbatch.
        sums_microbatches: Whether that is the gradients. Buffers then count in the user's unit, the only one that ranks
            share.
        summed: How many ranks' microbatches the buffers and `weight_sum` hold.
        windows_apart: Whether ranks may close their windows after different numbers of microbatches.
        exchanges_windows: Whether ranks exchange something when a window closes.
        sharded: Whether a rank keeps a part of the buffers.
        flushes_alone: Whether a flush has nothing to do but to apply the open window.
    """

    sums_microbatches = False
    windows_apart = True
    exchanges_windows = False
    sharded = False
    flushes_alone = True

    def __init__(self, layout: Layout) -> None:
        self.rank, self.ranks, self.contributors, self.summed = 0, 1, 1, 1
        self.each_microbatch = False
        self.layout = layout

    def new_buffers(self, prefix: str) -> list[Parameter]:
        """Create empty buffers for accumulated gradients."""
        layout = self.layout
        return [empty_parameter(f"{prefix}.{p.name}", p.shape, dtype)
                for p, dtype in zip(layout.parameters, layout.dtypes)]

    def microbatch(self, gradients: Gradients, header: Header) -> tuple[Gradients, Header]:
        """Return what to add to the buffers.

        Header: the weight of each loss, whether this is to be skipped (0 or more), how many ranks have data, others.
        """
        return gradients, header

    def header(self, header: Header) -> Header:
        """Return the sums over all ranks of a window's header alone, before its gradients."""
        return header

    def window(self, buffers: Gradients, unit: Scalar, header: Header) -> tuple[Gradients, Scalar, Header]:
        """Return the whole gradients of a window, and the unit of weights that they count in.

        Header: the weight of each loss, microbatches, whether any rank asks for an update (0 or more), others.
        """
        return buffers, unit, header

    def describe(self) -> str:
        """Return what has to be the same in the run that resumes."""
        return type(self).__name__

    def new_state(self, prefix: str) -> list[Parameter]:
        """Create the reducer's own state."""
        return []

    def conclude(self, asking: Scalar, updates: Tensor) -> Scalar:
        """Do what is left after a window. Return how many ranks still have data or close a window.

        Args:
            asking: How many ranks asked for an update; 0 only in a flush.
            updates: `update_step`.
        """
        return asking

    def due(self, updates: int) -> bool:
        """Return whether the host has to call `exchange` after the update with this number."""
        return False

    def exchange(self, present: float, updates: Tensor) -> Scalar:
        """Exchange what updates changed. Return the sum of `present`, 1 for a rank that has data, else 0."""
        return present


@ms.jit_class
class WindowSync(OneDevice):
    """One exchange for each window, and one of flags for each microbatch if ranks have to agree about it."""

    exchanges_windows = True
    flushes_alone = False

    def __init__(self, layout: Layout, buckets: Buckets, ranks: int) -> None:
        self.rank, self.ranks, self.contributors, self.summed = buckets.rank, ranks, ranks, 1
        self.each_microbatch = layout.flags
        self.windows_apart = not layout.flags
        self.losses = layout.losses
        self.layout = layout
        self.buckets = buckets

    def microbatch(self, gradients: Gradients, header: Header) -> tuple[Gradients, Header]:
        """Return the gradients of this rank."""
        if self.each_microbatch:
            flags = self.buckets.sum_header(header[self.losses:self.losses + 2])
            header = (*header[:self.losses], *flags, *header[self.losses + 2:])
        return gradients, header

    def header(self, header: Header) -> Header:
        """See `OneDevice`."""
        return self.buckets.sum_header(header)

    def window(self, buffers: Gradients, unit: Scalar, header: Header) -> tuple[Gradients, Scalar, Header]:
        """Return the sums over all ranks, in the user's unit."""
        gradients, header = self.buckets.all_reduce(mapped(scaled, unit, buffers, self.buckets.dtypes), header)
        return gradients, 1.0, header


@ms.jit_class
class MicrobatchSync(OneDevice):
    """One exchange for each microbatch; what the buffers then hold is summed already."""

    sums_microbatches = True
    windows_apart = False
    flushes_alone = False

    def __init__(self, layout: Layout, buckets: Buckets, ranks: int) -> None:
        self.rank, self.ranks, self.contributors, self.summed = get_rank(), ranks, ranks, buckets.ranks
        self.each_microbatch = True
        self.layout = layout
        self.buckets = buckets

    def microbatch(self, gradients: Gradients, header: Header) -> tuple[Gradients, Header]:
        """Return the sums over all ranks."""
        return self.buckets.all_reduce(gradients, header)


@ms.jit_class
class ShardedSync(MicrobatchSync):
    """One exchange per microbatch, of which a rank keeps its part, and one gathering of the parts per window."""

    exchanges_windows = True
    sharded = True

    def new_buffers(self, prefix: str) -> list[Parameter]:
        """Create an empty buffer for this rank's part of each bucket."""
        return shards(self.buckets, prefix)

    def microbatch(self, gradients: Gradients, header: Header) -> tuple[Gradients, Header]:
        """Return this rank's part of the sums over all ranks."""
        return self.buckets.reduce_scatter(gradients, header)

    def window(self, buffers: Gradients, unit: Scalar, header: Header) -> tuple[Gradients, Scalar, Header]:
        """Return the gradients, gathered from all ranks."""
        return self.buckets.all_gather(buffers), unit, header


@ms.jit_class
class NodeSync(MicrobatchSync):
    """One exchange per microbatch inside each node, and one per window between nodes, of a part by each rank."""

    exchanges_windows = True
    windows_apart = True

    def __init__(self, layout: Layout, buckets: Buckets, ranks: int, across: ops.AllReduce) -> None:
        super().__init__(layout, buckets, ranks)
        self.across = across

    def window(self, buffers: Gradients, unit: Scalar, header: Header) -> tuple[Gradients, Scalar, Header]:
        """Return the sums over all nodes."""
        sums = self.across(as_vector(header))
        header = tuple([sums[i] for i in range(len(header))])
        parts = ()
        for part in self.mine(buffers):
            sums = self.across(ops.depend(part, sums))
            parts = (*parts, sums)
        # The first part waits for all exchanges between nodes, and the others for it.
        return self.buckets.all_gather((ops.depend(parts[0], sums), *parts[1:])), unit, header

    def mine(self, buffers: Gradients) -> Gradients:
        """Return this rank's part of the node's sums."""
        return self.buckets.parts(buffers)


@ms.jit_class
class ShardedNodeSync(NodeSync):
    """The same, where each rank of a node keeps its part of the buffers alone."""

    sharded = True

    def new_buffers(self, prefix: str) -> list[Parameter]:
        """See `ShardedSync`."""
        return shards(self.buckets, prefix)

    def microbatch(self, gradients: Gradients, header: Header) -> tuple[Gradients, Header]:
        """Return this rank's part of the sums over the node."""
        return self.buckets.reduce_scatter(gradients, header)

    def mine(self, buffers: Gradients) -> Gradients:
        """Return the buffers."""
        return buffers


def shards(buckets: Buckets, prefix: str) -> list[Parameter]:
    """Create an empty buffer for a rank's part of each bucket."""
    return [empty_parameter(f"{prefix}.shard{i}", (length // buckets.ranks,), dtype)
            for i, (length, dtype) in enumerate(zip(buckets.lengths, buckets.bucket_dtypes))]
