"""DataParallel: the reducer that a user gives an accumulator to train on several ranks."""
from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf
from typing import TYPE_CHECKING, Optional
from warnings import warn

import mindspore as ms

from ..arguments import boolean, number, one_of, whole_number
from ..mindspore_api import get_local_rank_size
from .buckets import MEBIBYTE
from .exchange import Exchange, OneDevice
from .ranks import broadcast_parameters, require_alike, world_size
from .tags import announce_new
from .zero import Zero

if TYPE_CHECKING:
    from mindspore import Parameter

    from .buckets import AccumulatedParameters

_SYNC = ("window", "microbatch", "node")


@dataclass(frozen=True)
class DataParallel:
    """Train each rank on its own part of the batch, with the same update on all ranks: `reducer=DataParallel()`.

    Start the script with `msrun`, and call `mindspore.communication.init()` first. Without `msrun`, or with one rank,
    the same script accumulates on one device.

    With `reduction="mean"`, the sum of the gradients of all ranks is divided by the weights of all ranks, so ranks may
    hold different numbers of samples or tokens. With "sum", it is averaged over the ranks, as in PyTorch's
    DistributedDataParallel.

    Ranks may have different numbers of microbatches. Every rank has to call `flush` at the end of an epoch (`epoch`
    does). It takes part in the exchanges of the other ranks with weight 0 until all have called it. If ranks exchange
    microbatches, `reset`, `apply` and `close_if` also have to be called on all ranks at the same place; with "window",
    a rank may close incomplete windows on its own.

    Only the optimizer's parameters are broadcast. Frozen parameters and statistics (e.g. of BatchNorm) are not
    synchronized: give every rank the same seed or the same checkpoint for them.

    Args:
        sync: When ranks exchange gradients. "window": once per window, when it closes; adding a microbatch needs no
            communication. "microbatch": in each microbatch. "node": the ranks of a node exchange each microbatch, and
            the nodes exchange once per window; each rank exchanges a part of the gradients with the ranks of the same
            place in other nodes. None: "microbatch" with `zero=2`, else "window".
        zero: Stage of ZeRO: what is divided among the n ranks. 0: nothing. 1 and 2 need an optimizer of
            `shard_parameters(...)`: each rank updates 1/n of each parameter, and holds the optimizer's state for this
            part only. 1: gradients are scattered when a window closes, and parameters are gathered after the update;
            the traffic per window is that of `zero=0`. 2: the accumulated gradients are divided, too, and are scattered
            in each microbatch; with `sync="node"`, among the ranks of a node, and once per window across nodes. A
            backend without ReduceScatter (CPU) uses an AllReduce of which each rank keeps its part: the same memory,
            more traffic.
        broadcast: Whether to copy the parameters from rank 0 at the start. If False, they must already be equal.
        bucket_mib: Size of the gradients in one collective, in mebibytes.
        ranks_per_node: With `sync="node"`: the number of ranks in each node, which have consecutive numbers. None: the
            number that msrun started on this host.
        compare: Whether to compare what the optimizers of all ranks hold, when an accumulator is built, and the
            parameters, by checksums, at the end of each flush (so of each epoch) and in each save.
        elementwise: With `zero`: that an optimizer of your own updates each element without looking at others or at
            shapes. MindSpore's optimizers that do so are known by name.

    Raises:
        TypeError: If an argument is of the wrong kind or has an unknown name.
        ValueError: If an argument is out of range, or `zero` does not fit `sync`. When the Accumulator is built: if
            ranks hold different parameters, settings or optimizers, if the optimizer does not fit `zero`, or if
            `ranks_per_node` does not divide the number of ranks.
        RuntimeError: If msrun started several ranks and `init()` was not called.

    Source: "window" is `no_sync` of PyTorch's DistributedDataParallel (Li et al. 2020,
    https://arxiv.org/abs/2006.15704) and of Colossal-AI's booster; "microbatch" is Colossal-AI's Gemini; `zero`
    is ZeRO, stages 1 and 2 (Rajbhandari et al. 2020, https://arxiv.org/abs/1910.02054), with accumulation between the
    two exchanges of "node" (asked for in pytorch #126166).

    Example:
        >>> from mindspore import nn
        >>> from ms_accum import Accumulator, DataParallel
        >>> network = nn.Dense(2, 1)
        >>> optimizer = nn.SGD(network.trainable_params(), learning_rate=0.5)
        >>> accumulator = Accumulator(optimizer, 4, reduction="mean", reducer=DataParallel())
        >>> print(accumulator.exchange.rank, "of", accumulator.exchange.ranks)  # of 2, under msrun --worker_num=2
        0 of 1
    """

    sync: Optional[str] = None
    zero: int = 0
    broadcast: bool = True
    bucket_mib: float = 32
    ranks_per_node: Optional[int] = None
    compare: bool = True
    elementwise: bool = False

    def __post_init__(self) -> None:
        one_of("sync", self.sync, (None, *_SYNC))
        whole_number("zero", self.zero, "0, 1 and 2 are the stages of ZeRO", minimum=0, maximum=2)
        boolean("broadcast", self.broadcast)
        boolean("compare", self.compare)
        boolean("elementwise", self.elementwise)
        number("bucket_mib", self.bucket_mib, lambda size: 0 < size < inf, "a finite number of mebibytes > 0")
        # One field says when ranks exchange, also where it was left out: equal reducers have equal texts.
        object.__setattr__(self, "sync", self.sync or ("microbatch" if self.zero == 2 else "window"))
        if self.zero == 1 and self.sync != "window":
            raise ValueError(f'got zero=1 with sync="{self.sync}", where ranks exchange each microbatch, so whole '
                             'buffers gain nothing; give zero=2, or sync="window"')
        if self.zero == 2 and self.sync == "window":
            raise ValueError('got zero=2 with sync="window", where the gradients of a rank stay whole until the window '
                             'closes; give zero=1, or sync="microbatch" or "node"')
        if self.ranks_per_node is not None:
            whole_number("ranks_per_node", self.ranks_per_node, "None takes those that msrun started on this host")
            if self.sync != "node":
                raise ValueError(f'got ranks_per_node={self.ranks_per_node} with sync="{self.sync}", which does not '
                                 'use nodes; give sync="node"')

    def bind(self, accumulated: AccumulatedParameters) -> OneDevice:
        """Return the exchange of one accumulator. Raise ValueError if the ranks' parameters or settings differ."""
        ranks = world_size()
        if ranks == 1:
            return OneDevice(accumulated)
        exchanged = (*accumulated.dtypes, *(p.dtype for p in accumulated.slices))
        unsupported = [dtype for dtype in (ms.float64, ms.bfloat16) if dtype in exchanged]
        if unsupported and ms.get_context("device_target") == "CPU":
            raise ValueError(f"DataParallel with buffers or slices of {str(unsupported[0]).lower()}: MindSpore's CPU "
                             "backend exchanges none; give buffer_dtype=ms.float32 or zero=0")
        number = announce_new(accumulated.parameters[0].name, self.sync != "window")
        accumulated = replace(accumulated, number=number, compares=self.compare)
        options = {**vars(self), "bucket_mib": float(self.bucket_mib)}
        # First, and alone: much of the rest follows from them.
        require_alike({f"{name}= of DataParallel": str(value) for name, value in options.items()})
        make_alike(accumulated, self.broadcast)
        self._require_fit(accumulated.slices)
        kind = Zero if self.zero else Exchange
        exchange = kind(accumulated, self._inside(ranks), ranks, int(self.bucket_mib * MEBIBYTE))
        exchange.cut_parameters()
        return exchange

    def _require_fit(self, slices: tuple[Parameter, ...]) -> None:
        if self.zero and not slices:
            raise ValueError(f"zero={self.zero} with an optimizer of whole parameters; build it from "
                             "shard_parameters(network.trainable_params())")
        if slices and not self.zero:
            raise ValueError("the optimizer updates this rank's slices, which zero=0 does not gather; give "
                             "DataParallel(zero=1), or build the optimizer from network.trainable_params()")

    def _inside(self, ranks: int) -> int:
        """Return the number of ranks that sum each microbatch."""
        if self.sync != "node":
            return ranks if self.sync == "microbatch" else 1
        remedy = "start as many ranks on each host, or give ranks_per_node"
        inside = get_local_rank_size() if self.ranks_per_node is None else int(self.ranks_per_node)
        require_alike({"the number of ranks on their host": str(inside)}, remedy)
        if ranks % inside:
            raise ValueError(f"{ranks} ranks cannot be divided into nodes of {inside}; {remedy}")
        if inside == 1 and self.zero == 2:
            warn("zero=2 divides no buffers if each node has one rank; give zero=1", UserWarning, stacklevel=2)
        return inside


def make_alike(accumulated: AccumulatedParameters, broadcast: bool) -> None:
    """Copy rank 0's parameters to every rank, or compare them. Raise ValueError if the ranks' settings differ."""
    described = repr([(p.name, tuple(p.shape), str(p.dtype)) for p in accumulated.parameters])
    require_alike({"parameters (names, shapes, dtypes)": described, "whether the optimizer holds the slices of "
                   "shard_parameters": str(len(accumulated.slices)), **accumulated.settings})
    if broadcast:
        broadcast_parameters(accumulated.parameters)
    else:
        require_alike({f"the values of {p.name}": p.asnumpy().tobytes() for p in accumulated.parameters},
                      "give every rank the same seed, or broadcast=True")
