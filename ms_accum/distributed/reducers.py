"""Reducers: how the gradients of several ranks become one. A single device is the plain case.

    rank 0:  add, add, ... ─┐
    rank 1:  add, add, ... ─┼─ one exchange for each window ─► the same update on every rank       sync="window"
    rank 2:  add, add, ... ─┘

An exchange carries the gradients in few large buckets, and a header of a few numbers that tells what the ranks have in common: the
weight, how many microbatches there are, and who still has data; then whatever else is to be summed. A rank that has run out takes part
with zeros until all have.
"""
from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import Union

import mindspore as ms
from mindspore import Parameter, Tensor, ops

from ..gradients import Gradients, Scalar, scaled
from ..state import empty_parameter
from .buckets import Buckets, Header, Layout
from .ranks import broadcast_parameters, require_alike, world_size

_SYNC = ("window", "microbatch")
_MEBIBYTE = 2**20
_multiply_no_nan = ops.MulNoNan()


@dataclass(frozen=True)
class DataParallel:
    """Every rank trains on its own part of the batch, and all make the same update. Given as `Accumulator(reducer=DataParallel())`.

    Start the script with `msrun` and call `mindspore.communication.init()` first. Without that, or with one rank, the same script
    accumulates on one device.

    With `reduction="mean"`, the sum of the gradients of all ranks is divided by the weights of all ranks, so that they may hold
    different numbers of samples or tokens; with "sum", it is averaged over the ranks, as PyTorch's DistributedDataParallel does.
    Ranks may have different numbers of microbatches: `flush` waits for the others, and takes part in their exchanges with weight 0
    until every rank has called it. So each rank has to call it, at the end of an epoch. Where ranks exchange something at each microbatch,
    each also has to call `reset`, `apply` and `close_if` where the others do; with "window", they may close short windows on their own.

    Only the optimizer's parameters are made alike. Frozen parameters and statistics (of BatchNorm, say) are what each rank built: give
    every rank the same seed or the same checkpoint for those.

    Args:
        sync: "window": one exchange for each window, when it closes (what `no_sync` of PyTorch's DDP and of Colossal-AI's booster
            are for); `add` does not communicate, but for one flag with `on_nonfinite="skip_microbatch"`, which every rank has to
            decide alike. "microbatch": each microbatch is exchanged (as with Colossal-AI's Gemini).
        shard: With `sync="microbatch"`: each rank keeps 1/n of the accumulated gradients (ZeRO-2). They are gathered when a window
            closes, so the optimizer and its state stay whole; see README for sharding those. Where the backend has no
            ReduceScatter (CPU), an AllReduce of which each rank keeps its part: the same memory, twice the traffic.
        broadcast: Whether parameters are copied from rank 0 at the start. If False, they have to be the same already.
        bucket_mib: Mebibytes of gradients in one collective.

    Raises:
        TypeError: If an argument is of the wrong kind.
        ValueError: If an argument is out of range, `shard` comes with `sync="window"` (the gradients of a rank are whole until they
            are exchanged), or, when the Accumulator is made, ranks hold different parameters, settings or optimizers.
        RuntimeError: If msrun started several ranks and `init()` was not called.

    Source: "window" is `no_sync` of PyTorch's DistributedDataParallel (Li et al. 2020, https://arxiv.org/abs/2006.15704) and of
    Colossal-AI's booster; "microbatch" is Colossal-AI's Gemini; `shard` is ZeRO-2 (Rajbhandari et al. 2020,
    https://arxiv.org/abs/1910.02054).

    Example:
        >>> from mindspore import nn
        >>> from ms_accum import Accumulator, DataParallel
        >>> network = nn.Dense(2, 1)
        >>> optimizer = nn.SGD(network.trainable_params(), learning_rate=0.5)
        >>> accumulator = Accumulator(optimizer, 4, reduction="mean", reducer=DataParallel())
        >>> print(accumulator.reducer.rank, "of", accumulator.reducer.ranks)  # of 2, under msrun --worker_num=2 and after init()
        0 of 1
    """

    sync: str = "window"
    shard: bool = False
    broadcast: bool = True
    bucket_mib: float = 32

    def __post_init__(self) -> None:
        if not isinstance(self.sync, str) or self.sync not in _SYNC:
            raise ValueError(f"sync is {self.sync!r}, expected one of {', '.join(map(repr, _SYNC))}")
        for name in ("shard", "broadcast"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name} is {getattr(self, name)!r}, expected True or False")
        if self.shard and self.sync == "window":
            raise ValueError('shard=True with sync="window": until they are exchanged, the gradients of a rank are whole; '
                             'give sync="microbatch"')
        if isinstance(self.bucket_mib, bool) or not isinstance(self.bucket_mib, (int, float)):
            raise TypeError(f"bucket_mib is {self.bucket_mib!r}, expected a number of mebibytes > 0")
        if not 0 < self.bucket_mib < inf:
            raise ValueError(f"bucket_mib is {self.bucket_mib}, expected a number of mebibytes > 0 and below infinity")

    def bind(self, layout: Layout) -> Reducer:
        """The reducer of one accumulator. Raises ValueError if ranks are not alike."""
        ranks = world_size()
        if ranks == 1:
            return OneDevice(layout)
        if ms.float64 in layout.dtypes and ms.get_context("device_target") == "CPU":
            raise ValueError("DataParallel with buffers of float64: MindSpore's CPU backend exchanges none; give buffer_dtype=ms.float32")
        settings = {**layout.settings, "DataParallel": f"{self.sync} {self.shard} {self.bucket_mib}"}
        facts = {"parameters (names, shapes, dtypes)": _describe(layout), **settings}
        require_alike(facts, "give every rank the same network and arguments")
        if self.broadcast:
            broadcast_parameters(layout.parameters)
        else:
            require_alike({f"the values of {p.name}": p.asnumpy().tobytes() for p in layout.parameters},
                          "give every rank the same seed, or broadcast=True")
        buckets = Buckets(layout, int(self.bucket_mib * _MEBIBYTE), ranks)
        if self.shard:
            return ShardedSync(layout, buckets, ranks)
        return MicrobatchSync(layout, buckets, ranks) if self.sync == "microbatch" else WindowSync(layout, buckets, ranks)


def _describe(layout: Layout) -> str:
    return repr([(p.name, tuple(p.shape), str(p.dtype), str(dtype)) for p, dtype in zip(layout.parameters, layout.dtypes)])


# --- reducers: what an accumulator asks at each microbatch and when a window closes ---------------------------------------


@ms.jit_class
class OneDevice:
    """Nobody to exchange with.

    Every reducer has these methods and attributes.

    Attributes:
        rank, ranks: Which one this is, of how many.
        each_microbatch: Whether ranks exchange something at each microbatch.
        sums_microbatches: Whether that is the gradients. Ranks have no common unit of weights, so buffers then count in the user's.
    """

    sums_microbatches = False

    def __init__(self, layout: Layout) -> None:
        self.rank, self.ranks = 0, 1
        self.each_microbatch = False
        self.layout = layout

    def new_buffers(self, prefix: str) -> list[Parameter]:
        """Empty buffers for accumulated gradients."""
        return _whole_buffers(self.layout, prefix)

    def microbatch(self, gradients: Gradients, header: Header) -> tuple[Gradients, Header]:
        """What to add to the buffers. Header: weight, whether this is to be skipped (0 or more), how many ranks have data, others."""
        return gradients, header

    def window(self, buffers: Gradients, unit: Scalar, header: Header) -> tuple[Gradients, Scalar, Header]:
        """The whole gradients of a window, and the unit of weights that they count in.

        Header: weight, microbatches, whether any rank asks for an update (0 or more), others.
        """
        return buffers, unit, header


@ms.jit_class
class WindowSync:
    """One exchange for each window; see `OneDevice` for the methods."""

    sums_microbatches = False

    def __init__(self, layout: Layout, buckets: Buckets, ranks: int) -> None:
        self.rank, self.ranks = buckets.rank, ranks
        self.each_microbatch = layout.flags
        self.layout = layout
        self.buckets = buckets

    def new_buffers(self, prefix: str) -> list[Parameter]:
        """See `OneDevice`."""
        return _whole_buffers(self.layout, prefix)

    def microbatch(self, gradients: Gradients, header: Header) -> tuple[Gradients, Header]:
        """See `OneDevice`: as they are; flags of all ranks, if those have to agree."""
        if self.each_microbatch:
            flags = self.buckets.sum_header(header)
            header = (header[0], flags[1], flags[2], *header[3:])
        return gradients, header

    def window(self, buffers: Gradients, unit: Scalar, header: Header) -> tuple[Gradients, Scalar, Header]:
        """See `OneDevice`: the sums over all ranks, in the user's unit."""
        gradients, header = self.buckets.all_reduce(tuple([scaled(b, unit, b.dtype) for b in buffers]), header)
        return gradients, 1.0, header


@ms.jit_class
class MicrobatchSync:
    """One exchange for each microbatch; see `OneDevice` for the methods."""

    sums_microbatches = True

    def __init__(self, layout: Layout, buckets: Buckets, ranks: int) -> None:
        self.rank, self.ranks = buckets.rank, ranks
        self.each_microbatch = True
        self.layout = layout
        self.buckets = buckets

    def new_buffers(self, prefix: str) -> list[Parameter]:
        """See `OneDevice`."""
        return _whole_buffers(self.layout, prefix)

    def microbatch(self, gradients: Gradients, header: Header) -> tuple[Gradients, Header]:
        """See `OneDevice`: their sums over all ranks."""
        return self.buckets.all_reduce(_counted(gradients, header[0]), header)

    def window(self, buffers: Gradients, unit: Scalar, header: Header) -> tuple[Gradients, Scalar, Header]:
        """See `OneDevice`: as they are, sums already."""
        return buffers, unit, header


@ms.jit_class
class ShardedSync:
    """One exchange for each microbatch, of which a rank keeps its part, and one more when a window closes; methods: `OneDevice`."""

    sums_microbatches = True

    def __init__(self, layout: Layout, buckets: Buckets, ranks: int) -> None:
        self.rank, self.ranks = buckets.rank, ranks
        self.each_microbatch = True
        self.buckets = buckets

    def new_buffers(self, prefix: str) -> list[Parameter]:
        """See `OneDevice`: a part of each bucket."""
        return [empty_parameter(f"{prefix}.shard{i}", (length // self.ranks,), dtype)
                for i, (length, dtype) in enumerate(zip(self.buckets.lengths, self.buckets.bucket_dtypes))]

    def microbatch(self, gradients: Gradients, header: Header) -> tuple[Gradients, Header]:
        """See `OneDevice`: this rank's part of their sums."""
        return self.buckets.reduce_scatter(_counted(gradients, header[0]), header)

    def window(self, buffers: Gradients, unit: Scalar, header: Header) -> tuple[Gradients, Scalar, Header]:
        """See `OneDevice`: gathered from all ranks."""
        return self.buckets.all_gather(buffers), unit, header


Reducer = Union[OneDevice, WindowSync, MicrobatchSync, ShardedSync]


def _whole_buffers(layout: Layout, prefix: str) -> list[Parameter]:
    return [empty_parameter(f"{prefix}.{p.name}", p.shape, dtype) for p, dtype in zip(layout.parameters, layout.dtypes)]


def _counted(gradients: Gradients, weight: Scalar) -> Gradients:
    """The gradients; zero for a weight of 0, be they NaN as those of a mean over no unmasked token are."""
    if not isinstance(weight, Tensor):
        return gradients if weight != 0 else tuple([_multiply_no_nan(g, 0) for g in gradients])
    return tuple([ops.where(weight != 0, g, ops.zeros((), g.dtype)) for g in gradients])
