"""All that is not in MindSpore's documented, stable API: each name, what it is for, and what happens without it.

No other file imports such a name. A later MindSpore may lack any of them: then `ms_accum` still imports and trains.
"""
from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from functools import partial
from importlib import import_module
from os import environ
from types import SimpleNamespace
from typing import Any, NoReturn
from warnings import warn

import mindspore as ms
from mindspore import ops

NEWEST = (2, 10)  # the newest MindSpore on which all tests were run


def found(module: str, name: str, instead: Any) -> Any:
    """Return what a module of MindSpore calls `name`; if it lacks that, `instead`."""
    try:
        return getattr(import_module(module), name, instead)
    except ImportError:
        return instead


def is_a(value: Any, *names: str) -> bool:
    """Return whether a class of a value, or a base of it, is one of MindSpore's with one of these names."""
    return any(kind.__name__ in names and kind.__module__.startswith("mindspore.") for kind in type(value).__mro__)


def _marked(cls: Any) -> Any:
    cls.__ms_class__ = True  # what graph mode looks for up to 2.10; where it looks for none, classes need no mark
    return cls


_is_known = ops.constexpr(lambda number: number is not None, check=False)


def _isconstant(value: Any) -> bool:  # op by op, it waits for the device
    return _is_known(float(value.reshape(-1)[0].astype(ms.float32)) if isinstance(value, ms.Tensor) else value)


def _no_rank(*_: Any) -> NoReturn:
    raise RuntimeError(f"several ranks were started, but MindSpore {ms.__version__} lacks a name of "
                       "mindspore.communication that ms_accum needs for them; train on one device, or install "
                       f"MindSpore {'.'.join(map(str, NEWEST))}")


_STARTED = any(int(environ.get(name) or 1) > 1 for name in ("MS_WORKER_NUM", "RANK_SIZE", "OMPI_COMM_WORLD_SIZE"))
# What each is for, unless its name says so; what happens without it.
jit_class = found("mindspore", "jit_class", _marked)  # marks classes that graphs may use
isconstant = found("mindspore.ops", "isconstant", _isconstant)  # tells what runs op by op from what is compiled
InplaceZero = found("mindspore.ops.auto_generate", "InplaceZero", None)  # without it, the portable kernel clears
Symbol = found("mindspore", "Symbol", None)  # multiples of a number in declared shapes; without it, any length
KERNEL_SEEDS = found("mindspore.common.seed", "_KERNEL_SEED", {})  # a check does not put back random operators' counts
get_auto_parallel_context = found("mindspore", "get_auto_parallel_context", lambda _: "")  # no error says it shards
# Without one of these, one device trains, and several ranks raise an error.
GlobalComm = found("mindspore.communication", "GlobalComm", SimpleNamespace(INITED=_STARTED, WORLD_COMM_GROUP=""))
create_group = found("mindspore.communication", "create_group", _no_rank)
get_group_size = found("mindspore.communication", "get_group_size", _no_rank)
get_local_rank_size = found("mindspore.communication", "get_local_rank_size", _no_rank)
get_rank = found("mindspore.communication", "get_rank", _no_rank)
init = found("mindspore.communication", "init", _no_rank)
# Op by op, an update must not be recorded for a backward pass (AdamWeightDecay changes nothing then, 2.10). Without it,
# it may be, after an error in a function whose gradient MindSpore takes.
unrecorded = found("mindspore", "_no_grad", lambda: lambda function: function)


def address_of(parameter: Any) -> int:
    """Return where a parameter's memory is, an experimental call; 0 without it: then no error says that it changed."""
    return parameter.data_ptr() if hasattr(parameter, "data_ptr") else 0


def add_hook(parameter: Any, function: Callable) -> Any:
    """Call a function with the gradient of a parameter in each backward pass. Return what has `remove`.

    `Parameter.register_hook` and the removal of such a hook make MindSpore 2.7 compile all functions again, also an
    optimizer that compiles itself: at each update. The method of Tensor does not, nor does a removal without a Tensor.
    """
    handle = ms.Tensor.register_hook(parameter, function)
    handle.tensor_weakref = lambda: None
    return handle


def is_skipping(dataset: Any, count: int) -> bool:
    """Return whether a dataset skips so many items."""
    return is_a(dataset, "SkipDataset") and dataset.count == count


def dynamic_inputs(function: Any) -> dict[Any, Any]:
    """Return what `enable_dynamic` or `set_inputs` declare of a function's or a Cell's inputs, by name, else by place.

    The attributes that they leave are private. Without these, each shape of a batch is compiled.
    """
    if not isinstance(function, ms.nn.Cell):
        inner = inspect.unwrap(function.func if isinstance(function, partial) else function)
        declared = getattr(getattr(inner, "__func__", inner), "__enable_dynamic__", {})
        return dict(declared.values())
    declared = function.get_inputs() or ()
    if isinstance(declared, dict):
        declared = declared.get("arg_specified_infos", ())
    else:
        declared = enumerate(declared)
    parameters = inspect.signature(function.construct).parameters.values()
    names = [p.name for p in parameters if p.kind is not p.VAR_POSITIONAL]
    return {names[i] if i < len(names) else i: value for i, value in declared}


def with_length(declared: Any, axis: int, length: int) -> Any:
    """Return a declared Tensor, with a known length of one axis."""
    lengths = [*(getattr(declared, "symbolic_shape", None) or declared.shape)]
    lengths[axis] = length
    return ms.Tensor(dtype=declared.dtype, shape=[
        Symbol(**entry) if isinstance(entry, dict) else None if entry < 0 else entry for entry in lengths])


def warn_if_untried(version: str) -> None:
    """Warn of a version of MindSpore that is newer than `NEWEST`."""
    if tuple(map(int, re.findall(r"\d+", version)[:2])) > NEWEST:
        warn(f"MindSpore {version} was not tried with ms_accum, which was tested with 2.7 to "
             f"{'.'.join(map(str, NEWEST))}; run `ms-accum selftest`, which tests whether accumulation is exact with "
             "it on this device", UserWarning, stacklevel=2)


warn_if_untried(ms.__version__)
