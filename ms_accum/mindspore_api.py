"""All that is not in MindSpore's documented, stable API: each name, what it is for, and what happens without it.

No other file imports such a name. A later MindSpore may lack any of them: then `ms_accum` still imports and trains.
"""
from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from importlib import import_module
from os import environ
from types import SimpleNamespace
from typing import Any, NoReturn
from warnings import warn

import mindspore as ms
from mindspore import ops

NEWEST = (2, 10)  # the newest MindSpore on which all tests were run


# Tells what runs op by op from what is compiled. Without it, a `constexpr` does, which gets None for a number that a
# graph computes; op by op, it waits for the device.
try:
    from mindspore.ops import isconstant
except ImportError:
    _is_known = ops.constexpr(lambda number: number is not None, check=False)

    def isconstant(value: Any) -> bool:
        """Return whether a number, or the elements of a Tensor, are known."""
        return _is_known(float(value.reshape(-1)[0].astype(ms.float32)) if isinstance(value, ms.Tensor) else value)

# Lets a step raise a clear error inside a compiled function. Without it, MindSpore says there that `require_python` is
# invalid.
try:
    from mindspore.ops import PrimitiveWithInfer
except ImportError:
    PrimitiveWithInfer = ops.Primitive

# Clears buffers in place on Ascend. Without it, the portable kernel does.
try:
    from mindspore.ops.auto_generate import InplaceZero
except ImportError:
    InplaceZero = None

# Makes buffers without memory. Without it, they get memory at once, not in the first call.
try:
    from mindspore.nn.utils import no_init_parameters
except ImportError:
    no_init_parameters = nullcontext

# The base of schedules. Without it, no error says before the update that a list of learning rates is used up, and ranks
# do not compare the values of schedules, but still their numbers.
try:
    from mindspore.nn.learning_rate_schedule import LearningRateSchedule
except ImportError:
    LearningRateSchedule = ()  # of which nothing is an instance

# Lengths that are multiples of a number, in declared shapes. Without it, they are any length.
try:
    from mindspore import Symbol
except ImportError:
    Symbol = None

# The classes of datasets. Without one of them, no error says that a dataset has no batch operation, or should skip.
try:
    from mindspore.dataset.engine.datasets import (
        BatchDataset,
        BucketBatchByLengthDataset,
        Dataset,
        FilterDataset,
        PaddedBatchDataset,
        SourceDataset,
    )
except ImportError:
    BatchDataset = BucketBatchByLengthDataset = Dataset = FilterDataset = PaddedBatchDataset = SourceDataset = ()

# The iterator of a dataset. Without it, the same error is not raised for an iterator.
try:
    from mindspore.dataset.engine.iterators import Iterator as DatasetIterator
except ImportError:
    DatasetIterator = ()

# The counts of functional random operators. Without them, a check of a network does not put them back.
try:
    from mindspore.common.seed import _KERNEL_SEED as KERNEL_SEEDS
except ImportError:
    KERNEL_SEEDS = {}

# MindSpore's own parallel modes. Without a name, what it detects is not: nothing counts as sharded or synchronised.
try:
    from mindspore import get_auto_parallel_context
except ImportError:
    def get_auto_parallel_context(_: str) -> str:
        """Return the mode in which nothing is sharded."""
        return "stand_alone"

try:
    from mindspore.parallel.auto_parallel import AutoParallel
except ImportError:
    AutoParallel = ()

try:
    from mindspore.parallel.distributed import DistributedDataParallel
except ImportError:
    DistributedDataParallel = ()

# Ranks. Without one of these, one device trains, and an accumulator raises an error if several ranks were started.
try:
    from mindspore.communication import (
        GlobalComm,
        create_group,
        get_group_size,
        get_local_rank_size,
        get_rank,
        init,
    )
except ImportError:
    class GlobalComm:  # type: ignore[no-redef]
        """Say that there are ranks if several were started, so that their number is asked for."""

        INITED = any(int(environ.get(name) or 1) > 1 for name in ("MS_WORKER_NUM", "RANK_SIZE", "OMPI_COMM_WORLD_SIZE"))
        WORLD_COMM_GROUP = ""

    def get_rank(*_: Any) -> NoReturn:
        """Raise RuntimeError."""
        raise RuntimeError(f"several ranks were started, but MindSpore {ms.__version__} lacks a name of "
                           "mindspore.communication that ms_accum needs for them; train on one device, or install "
                           f"MindSpore {'.'.join(map(str, NEWEST))}")

    create_group = get_group_size = get_local_rank_size = init = get_rank


# Op by op, an update must not be recorded for a backward pass: AdamWeightDecay changes nothing then (2.10). Without it,
# it may be, after an error in a function whose gradient MindSpore takes.
unrecorded = getattr(ms, "_no_grad", nullcontext)


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


def is_read_to_be_counted(dataset: Any) -> bool:
    """Return whether MindSpore would read a whole dataset to say its length."""
    return (is_a(dataset, "FilterDataset", "BucketBatchByLengthDataset") or getattr(dataset, "source_len", 0) == -1
            or any(map(is_read_to_be_counted, getattr(dataset, "children", ()))))


def is_skipping(dataset: Any, count: int) -> bool:
    """Return whether a dataset skips so many items."""
    return ((type(dataset).__name__ == "SkipDataset" and dataset.count == count)
            or any(is_skipping(child, count) for child in getattr(dataset, "children", ())))


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
