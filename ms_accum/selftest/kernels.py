"""What is special for Ascend: kernels that work in place, and matrix products that are added to a buffer."""
from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from functools import partial

import mindspore as ms
import numpy as np
from mindspore import Tensor

from ms_accum import make_train_step

from ..core.kernels import InPlace
from ..core.probe import largest_difference
from . import plain
from .comparing import relative, values
from .modes import running
from .networks import MLP, TargetLoss
from .rows import Check, Name, NotRun

SIZES = (1, 7, 1_000, 65_537, 10_000_000)
FUSION = "matmul_assignadd_fusion"
FLAGS = "MS_DEV_GRAPH_KERNEL_FLAGS"


def checks_of_kernels() -> Iterator[Check]:
    """Yield a check for each size of a buffer, and one of fused products."""
    for size in SIZES:
        yield Check(Name("kernels in place", f"buffer of {size:,}", "float32"), require_in_place,
                    partial(in_place, size), 1e-6)
    yield Check(Name(FUSION, "train step", "bfloat16"), partial(gradients_by_numpy, "bfloat16"),
                partial(fused, "bfloat16"), 2e-2)


def require_in_place() -> None:
    """Raise NotRun where no kernel works in place."""
    device = ms.get_context("device_target")
    if device != "Ascend":
        raise NotRun(f"none works in place on {device}")


def in_place(size: int, _: None) -> float:
    """Return how far the kernels in place are off the portable ones, for a buffer of this size."""
    return largest_difference(InPlace(), (size,))


def is_fused() -> bool:
    """Return whether the fusion is switched on."""
    return FUSION in os.environ.get(FLAGS, "")


def microbatches() -> list[tuple[np.ndarray, np.ndarray]]:
    """Return two microbatches of equal size."""
    rng = np.random.default_rng(3)
    return [(np.float32(rng.normal(size=(16, 64))), np.int32(rng.integers(0, 32, 16))) for _ in range(2)]


def gradients_by_numpy(dtype: str) -> Sequence[np.ndarray]:
    """Return gradients of plain MindSpore, which NumPy adds. NotRun where nothing is fused."""
    if not is_fused():
        raise NotRun(f"not switched on in {FLAGS}")
    network = MLP(64, 64, 32, dtype=getattr(ms, dtype))
    gradients_of = ms.grad(TargetLoss(network), None, ms.ParameterTuple(network.trainable_params()))
    with running("pynative"):
        return [sum(parts) for parts in zip(*(values(gradients_of(*map(Tensor, batch))) for batch in microbatches()))]


def fused(dtype: str, expected: Sequence[np.ndarray]) -> float:
    """Return how far the buffers of an open window are off."""
    network = MLP(64, 64, 32, dtype=getattr(ms, dtype))
    step = make_train_step(TargetLoss(network), plain.optimizer_of(network.trainable_params()), 3)
    for batch in microbatches():
        step(*batch)
    buffers = values(step.accumulator.way.buffers.allocated())
    step.accumulator.reset()
    return relative(buffers, expected)
