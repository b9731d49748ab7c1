"""DataParallel: the reducer that a user gives an accumulator to train on several ranks."""
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from os import environ
from typing import Any, Optional
from warnings import warn

import mindspore as ms
from mindspore import Parameter, Tensor, ops

from ..arguments import boolean, instance_of, number, one_of, whole_number
from ..mindspore_api import GlobalComm, get_auto_parallel_context, get_group_size, get_local_rank_size, get_rank
from ..tensors import HALF, as_array
from .buckets import MEBIBYTE
from .exchange import BUILD, OneDevice, whole_of
from .meeting import world_size
from .ranks import ManyRanks, Zero, part_of

_SYNC = ("window", "microbatch", "node")
_ELEMENTWISE = {"ASGD", "AdaMax", "Adadelta", "Adagrad", "Adam", "AdamOffload", "AdamW", "AdamWeightDecay", "Adamax",
                "FTRL", "FusedAdamW", "LazyAdam", "Momentum", "NAdam", "ProximalAdagrad", "RAdam", "RMSProp", "RMSprop",
                "Rprop", "SGD"}
_ALONE = ("this run has {} ranks, but this accumulator has no reducer: each rank trains alone, and their parameters "
          "become different; give reducer=DataParallel(), after mindspore.communication.init(). If the script sums "
          "gradients over the ranks itself, ignore this warning")
_SHARDED = ("MindSpore's mode {} shards the network itself, so ms_accum cannot accumulate its gradients; accumulate "
            "with mindspore.parallel.nn.GradAccumulation there, or train the network as it is, with "
            "reducer=DataParallel(zero=1), which divides the optimizer's state")


@dataclass(frozen=True)
class DataParallel:
    """Train each rank on its own part of the batch, with the same update on all ranks: `reducer=DataParallel()`.

    Start the script with `msrun`, and call `mindspore.communication.init()` first. Without `msrun`, or with one rank,
    the same script accumulates on one device. With `reduction="mean"`, the sum of the gradients of all ranks is divided
    by the weights of all ranks, so ranks may hold different numbers of samples or tokens. With "sum", it is averaged
    over the ranks, as in PyTorch's DistributedDataParallel.

    Ranks may have different numbers of microbatches: at the end of an epoch, a rank takes part in the exchanges of the
    others with weight 0 until no rank has data left. (A rank without any loops over `epoch([])`.) Otherwise, all make
    the same calls: build, `epoch`, `flush`, `evaluate`, save and load. Ranks meet before they exchange, and say what
    they are about to do: if that differs, all raise `RanksDiffer`, nothing is applied, and the run has to end. So do
    they if parameters, learning rates or other state of the optimizer differ, which is compared at each flush and save.

    Of the network, only the optimizer's parameters are broadcast: give every rank the same seed or checkpoint for
    frozen ones, and for statistics (e.g. of BatchNorm), which are not synchronized.

    Args:
        sync: When ranks exchange gradients. "window": once per window, when it closes. "microbatch": in each
            microbatch. "node": the ranks of a node exchange each microbatch, and the nodes exchange once per window, of
            which each rank takes a part. None: "microbatch" with `zero=2`, else "window".
        zero: Stage of ZeRO: what is divided among the n ranks. 0: nothing. 1 and 2 need an optimizer of
            `shard_parameters(...)`: each rank updates 1/n of each parameter, and holds the optimizer's state for it.
            2: the accumulated gradients are divided, too, and are scattered in each microbatch; with `sync="node"`,
            among the ranks of a node. On CPU, which has no ReduceScatter, an AllReduce takes its place.
        bucket_mib: Size of the gradients in one collective, in mebibytes.
        ranks_per_node: With `sync="node"`: the number of ranks in each node, which have consecutive numbers. None: the
            number that msrun started on this host.
        elementwise: With `zero`: that an optimizer of your own updates each element without looking at others or at
            shapes. MindSpore's optimizers that do so are known by name.

    Raises:
        TypeError: If an argument is of the wrong kind or has an unknown name.
        ValueError: If an argument is out of range, or `zero` does not fit `sync`. When the accumulator is built: if
            the optimizer does not fit `zero`, or `ranks_per_node` does not divide the number of ranks.
        RanksDiffer: When it is built, if ranks give different parameters, options or optimizers.
        RuntimeError: If msrun started several ranks and `init()` was not called.

    Source: "window" is `no_sync` of PyTorch's DistributedDataParallel (Li et al. 2020,
    https://arxiv.org/abs/2006.15704); `zero` is ZeRO, stages 1 and 2 (Rajbhandari et al. 2020,
    https://arxiv.org/abs/1910.02054), with accumulation between the two exchanges of "node".

    Example:
        >>> from mindspore import nn
        >>> from ms_accum import Accumulator, DataParallel
        >>> network = nn.Dense(2, 1)
        >>> optimizer = nn.SGD(network.trainable_params(), learning_rate=0.5)
        >>> accumulator = Accumulator(optimizer, 4, reduction="mean", reducer=DataParallel())
        >>> print(accumulator.window.exchange.ranks)  # 2, under msrun --worker_num=2
        1
    """

    sync: Optional[str] = None
    zero: int = 0
    bucket_mib: float = 32
    ranks_per_node: Optional[int] = None
    elementwise: bool = False

    def __post_init__(self) -> None:
        one_of("sync", self.sync, (None, *_SYNC))
        whole_number("zero", self.zero, "0, 1 and 2 are the stages of ZeRO", minimum=0, maximum=2)
        boolean("elementwise", self.elementwise)
        number("bucket_mib", self.bucket_mib, lambda size: 0 < size < inf, "a finite number of mebibytes > 0")
        # One field says when ranks exchange, also where it was left out: equal reducers have equal texts.
        object.__setattr__(self, "sync", self.sync or ("microbatch" if self.zero == 2 else "window"))
        if self.zero and (self.zero == 1) != (self.sync == "window"):
            raise ValueError(f'got zero={self.zero} with sync="{self.sync}"; give zero=1 with sync="window", where '
                             'buffers stay whole, or zero=2 with "microbatch" or "node", where they are divided')
        if self.ranks_per_node is not None:
            whole_number("ranks_per_node", self.ranks_per_node, "None takes those that msrun started on this host")
            if self.sync != "node":
                raise ValueError(f'got ranks_per_node={self.ranks_per_node} with sync="{self.sync}", which does not '
                                 'use nodes; give sync="node"')


def exchange_of(reducer: Optional[DataParallel], optimizer: Callable, parameters: Sequence[Parameter],
                dtypes: Sequence[ms.Type], facts: Mapping[str, object]) -> OneDevice:
    """Return the exchange of one accumulator; without a reducer or with one rank, what exchanges nothing.

    `parameters`: the optimizer's. `dtypes`: of the buffers. `facts`: settings that must be equal on all ranks, by name.
    """
    mode = get_auto_parallel_context("parallel_mode")
    if mode in ("semi_auto_parallel", "auto_parallel"):
        raise ValueError(_SHARDED.format(mode))
    if reducer is None:
        _require_slices(0, parameters)
        ranks = get_group_size() if GlobalComm.INITED else int(environ.get("MS_WORKER_NUM") or 1)  # from msrun
        if ranks > 1:
            warn(_ALONE.format(ranks), UserWarning, stacklevel=2)
        return OneDevice(parameters)
    given = instance_of("reducer", reducer, DataParallel, "a DataParallel, or None", "give e.g. DataParallel()")
    ranks, zero, whole = world_size(), given.zero, [whole_of(p) for p in parameters]
    if ranks == 1:
        return OneDevice(parameters)
    on_host = given.ranks_per_node or get_local_rank_size()
    # A window of one microbatch, without buffers, is exchanged once in any case.
    inside = {"window": 1, "microbatch": ranks, "node": on_host}[str(given.sync)] if dtypes else 1
    exchange = (Zero if zero else ManyRanks)(parameters, inside)
    exchange.require_alike(BUILD, {
        **{f"{name}= of DataParallel": value for name, value in vars(given).items()},
        "the number of ranks on their host": on_host if given.sync == "node" else "any",
        "parameters (names, shapes, dtypes)": [(p.name, p.shape, str(p.dtype)) for p in whole],
        "which parameters of the optimizer are slices": [p.name for p in parameters if whole_of(p) is not p], **facts})
    _require_slices(zero, parameters)
    if zero:
        _require_elementwise(optimizer, given.elementwise)
    if ranks % inside:
        raise ValueError(f"{ranks} ranks cannot be divided into nodes of {inside}; start as many ranks on each host, "
                         "or give ranks_per_node")
    exchanged = dtypes or [ms.float32 if p.dtype in HALF else p.dtype for p in whole]
    unsupported = {*exchanged, *(p.dtype for p in whole if zero)}.intersection((ms.float64, ms.bfloat16))
    if unsupported and ms.get_context("device_target") == "CPU":
        raise ValueError(f"DataParallel with buffers or slices of {', '.join(map(str, unsupported)).lower()}: "
                         "MindSpore's CPU backend exchanges none; give buffer_dtype=ms.float32 or zero=0")
    exchange.connect(exchanged, int(given.bucket_mib * MEBIBYTE))
    for parameter in whole:
        # Not set_data: a graph that is compiled already would keep the old values (MindSpore 2.10).
        ops.assign(parameter, Tensor(exchange.sent(as_array(parameter)), parameter.dtype))
    return exchange


def _require_slices(zero: int, parameters: Sequence[Parameter]) -> None:
    """Raise ValueError unless an optimizer holds slices where ranks divide its state, and only there."""
    if {whole_of(p) is not p for p in parameters} != {zero > 0}:
        raise ValueError(f"the optimizer's parameters do not fit zero={zero}; to divide its state among ranks, build "
                         "it from shard_parameters(network.trainable_params()) and give reducer=DataParallel(zero=1); "
                         "otherwise, do neither")


def _require_elementwise(optimizer: Any, is_declared: bool) -> None:
    """Raise ValueError for an optimizer that may need whole parameters. `is_declared`: that it does not."""
    kind, centralizes = type(optimizer), getattr(optimizer, "grad_centralization", False) or any(
        getattr(optimizer, "grad_centralization_flags", ()))
    is_known = kind.__module__.startswith("mindspore.") and kind.__name__ in _ELEMENTWISE
    if centralizes or not (is_declared or is_known):
        raise ValueError(f"{kind.__name__}{' with grad_centralization=True' * bool(centralizes)} may look at whole "
                         "parameters, but with zero > 0 a rank updates slices; give an elementwise optimizer of "
                         "MindSpore, or zero=0; or elementwise=True, if yours looks at no other elements or shapes")


def shard_parameters(parameters: Any) -> Any:
    """Return this rank's slices of parameters, to divide the optimizer's state among the ranks (ZeRO).

        optimizer = nn.AdamWeightDecay(shard_parameters(network.trainable_params()), 1e-3)
        train_step = make_train_step(forward_fn, optimizer, accumulate_step=4, reducer=DataParallel(zero=1))

    A slice is a flat Parameter of `ceil(size / ranks)` elements, padded with 0, whose attribute `whole` is the whole
    parameter. Filters by name, weight decay and learning rates of groups work as with whole parameters; filter by shape
    before you call this function. With one rank, or without msrun, the argument is returned unchanged.

    The optimizer must treat each element by itself, as SGD, Adam and most others do. Optimizers that look at a whole
    parameter (LARS, Lamb, AdaFactor) raise an error when the accumulator is built. An optimizer that copies values of
    parameters when it is built is wrong without an error: rank 0's values arrive later.

    Args:
        parameters: The parameters as for an optimizer: Parameters, or groups as dicts with "params" or "order_params".

    Raises:
        TypeError: If an entry of `parameters` is anything else.
        RuntimeError: If msrun started several ranks and `init()` was not called.

    Source: ZeRO (Rajbhandari et al. 2020, https://arxiv.org/abs/1910.02054), stages 1 and 2.

    Example:
        >>> from mindspore import nn
        >>> from ms_accum import shard_parameters
        >>> network = nn.Dense(3, 1, has_bias=False)
        >>> optimizer = nn.Adam(shard_parameters(network.trainable_params()), 1e-3)
        >>> print(sum(state.size for state in optimizer.moment1))  # 2, under msrun --worker_num=2
        3
    """
    if world_size() == 1:
        return parameters
    known: dict[int, Parameter] = {}
    return [_group(p, known) if isinstance(p, dict) else _slice(p, known) for p in parameters]


def _group(group: dict, known: dict[int, Parameter]) -> dict:
    """Return a group with slices instead of its parameters; a parameter that is in two groups has one slice."""
    return {key: [_slice(p, known) for p in value] if key in ("params", "order_params") else value
            for key, value in group.items()}


def _slice(parameter: Any, known: dict[int, Parameter]) -> Parameter:
    instance_of("an entry of parameters", parameter, Parameter, "a Parameter, or a group as a dict",
                "give network.trainable_params()")
    if getattr(parameter, "whole", None) is not None:
        raise ValueError(f"{parameter.name} is already a slice; call shard_parameters only once, with the network's "
                         "parameters")
    if id(parameter) not in known:
        own = part_of(as_array(parameter), get_rank(), world_size())
        made = Parameter(Tensor(own, parameter.dtype), name=parameter.name, requires_grad=parameter.requires_grad)
        made.whole = parameter
        known[id(parameter)] = made
    return known[id(parameter)]
