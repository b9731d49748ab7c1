"""Raise an error where MindSpore, or the network, shards itself; warn where ranks train alone."""
from __future__ import annotations

from collections.abc import Iterable
from os import environ
from warnings import warn

from mindspore import nn

from ..mindspore_api import GlobalComm, get_auto_parallel_context, get_group_size, is_a

_ALONE = ("this run has {} ranks, but this accumulator has no reducer: each rank trains alone, and their parameters "
          "become different; give reducer=DataParallel(), after mindspore.communication.init(). If the script sums "
          "gradients over the ranks itself, ignore this warning")
_SHARDED = ("{} shards the network or sums its gradients itself, so ms_accum cannot accumulate them; accumulate with "
            "mindspore.parallel.nn.GradAccumulation there, or train the network as it is, with "
            "reducer=DataParallel(zero=1), which divides the optimizer's state")
_HYPER = "hsdp_scheduler"  # what `hsdp` and `fully_shard` of HyperParallel set on a Cell


def require_unsharded(cells: Iterable[nn.Cell] = ()) -> None:
    """Raise ValueError in MindSpore's semi-auto and auto parallel modes, and for Cells that parallelise themselves."""
    mode = get_auto_parallel_context("parallel_mode")
    if mode in ("semi_auto_parallel", "auto_parallel"):
        raise ValueError(_SHARDED.format(f"MindSpore's mode {mode}"))
    for cell in (inner for outer in cells for _, inner in outer.cells_and_names()):
        if hasattr(cell, _HYPER) or is_a(cell, "AutoParallel", "DistributedDataParallel"):
            raise ValueError(_SHARDED.format(type(cell).__name__))


def warn_if_alone() -> None:
    """Warn if there are several ranks, and nothing sums their gradients."""
    ranks = get_group_size() if GlobalComm.INITED else int(environ.get("MS_WORKER_NUM") or 1)  # the latter from msrun
    if ranks > 1:
        warn(_ALONE.format(ranks), UserWarning, stacklevel=2)
