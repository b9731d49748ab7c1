"""MindSpore's own parallel modes, semi-auto and auto: detect them, and raise errors for what cannot work in them.

A graph that is compiled in these modes holds slices of the parameters, and each rank computes slices of the gradients.
The mode is a setting of the process (`set_auto_parallel_context`), or of one Cell (`AutoParallel(cell)`).
`AutoParallel` sets it only while the Cell is compiled, so it cannot be detected earlier.
"""
from __future__ import annotations

from collections.abc import Iterable
from os import environ
from warnings import warn

from mindspore import nn
from mindspore.ops import constexpr

from ..mindspore_api import AutoParallel, DistributedDataParallel, GlobalComm, get_auto_parallel_context, get_group_size

_ALONE = ("this run has {} ranks, but this accumulator has no reducer: each rank trains alone, and their parameters "
          "become different; give reducer=DataParallel(), after mindspore.communication.init(). If MindSpore shards "
          "the network (AutoParallel), or the script sums gradients over the ranks itself, ignore this warning")
_SLICES = ("{}: in MindSpore's {} mode, each rank holds slices of the gradients, and would use only its own slices; "
           "leave this out, or train without that mode, with reducer=DataParallel()")
_REDUCED = ("reducer: in {} mode, MindSpore sums gradients over the ranks itself; leave reducer=DataParallel() out, or "
            "train without that mode")
_OP_BY_OP = ("a microbatch ran op by op in MindSpore's {} mode, which shards only graphs, so each rank would train "
             "alone; compile the train step (graph mode, or ms.jit)")
_STEP = ("a train step compiles graphs of its own, which MindSpore's {} mode cannot shard; use a TrainOneStepCell in "
         "AutoParallel(cell), or a hand-written loop, or train without that mode, with reducer=DataParallel()")
_INSIDE = "AutoParallel is inside the network, where MindSpore ignores it and shards nothing; {}"
_SYNCING = ("{} sums or accumulates gradients itself, so they would be counted more than once; give the network inside "
            "it, with reducer=DataParallel()")
# What HyperParallel's `hsdp` and `fully_shard` set on a Cell. Their switches are elsewhere in each version, and without
# an exchange they accumulate gradients; so their networks are refused whatever these say.
_SHARDED = "hsdp_scheduler"


def shards() -> bool:
    """Return whether MindSpore shards graphs that are compiled now."""
    return get_auto_parallel_context("parallel_mode") in ("semi_auto_parallel", "auto_parallel")


def may_shard() -> bool:
    """Return whether MindSpore shards, or may do so later because there are several ranks."""
    return shards() or initialised_ranks() > 1


def warn_if_alone() -> None:
    """Warn if there are several ranks, nothing sums their gradients, and MindSpore does not shard."""
    ranks = max(initialised_ranks(), int(environ.get("MS_WORKER_NUM") or 1))  # the latter from msrun
    if ranks > 1 and not shards():
        warn(_ALONE.format(ranks), UserWarning, stacklevel=2)


@constexpr
def require_whole_gradients(features: tuple[str, ...]) -> bool:
    """Raise ValueError for features that need whole gradients if MindSpore shards, also when a graph is compiled."""
    if features and shards():
        raise ValueError(_SLICES.format(", ".join(features), _mode()))
    return True


@constexpr
def require_unreduced() -> bool:
    """Raise ValueError for an exchange of ms_accum if MindSpore shards, also when a graph is compiled."""
    if shards():
        raise ValueError(_REDUCED.format(_mode()))
    return True


@constexpr
def require_compiled(runs_op_by_op: bool) -> bool:
    """Raise ValueError for gradients that were computed op by op if graphs would be sharded."""
    if runs_op_by_op and shards():
        raise ValueError(_OP_BY_OP.format(_mode()))
    return True


def require_unsharded() -> None:
    """Raise ValueError for a train step if MindSpore shards."""
    if shards():
        raise ValueError(_STEP.format(_mode()))


def require_plain(cells: Iterable[nn.Cell], remedy: str) -> None:
    """Raise ValueError for networks that MindSpore or HyperParallel parallelise themselves.

    `remedy`: what to do with a network in `AutoParallel`.
    """
    for cell in (inner for outer in cells for _, inner in outer.cells_and_names()):
        if isinstance(cell, AutoParallel):
            raise ValueError(_INSIDE.format(remedy))
        if isinstance(cell, DistributedDataParallel) or hasattr(cell, _SHARDED):
            raise ValueError(_SYNCING.format(type(cell).__name__))


def initialised_ranks() -> int:
    """Return the number of ranks of this run, or 1 before `communication.init()`."""
    return get_group_size() if GlobalComm.INITED else 1


def _mode() -> str:
    return get_auto_parallel_context("parallel_mode").replace("_", "-").replace("-parallel", " parallel")
