"""Check what is special on Ascend: kernels that work in place, and matrix products that are added to a buffer."""
from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

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
from .rows import Check, Name, NotRun, require

SIZES = (1, 7, 1_000, 65_537, 10_000_000)
FUSION = "matmul_assignadd_fusion"
FLAGS = "MS_DEV_GRAPH_KERNEL_FLAGS"


def checks_of_kernels() -> Iterator[Check]:
    """Yield a check for each size of a buffer, and a check of products that are fused with their addition."""
    for size in SIZES:
        yield Check(Name("kernels in place", f"buffer of {size:,}", "float32"), require_in_place,
                    partial(in_place, size), 1e-6)
    yield Check(Name(FUSION, "train step", "bfloat16"), partial(gradients_by_numpy, "bfloat16"),
                partial(fused, "bfloat16"), 2e-2)


def require_in_place() -> None:
    """Raise NotRun if no kernel works in place on this device."""
    device = ms.get_context("device_target")
    if device != "Ascend":
        raise NotRun(f"none works in place on {device}")


def in_place(size: int, _: None) -> float:
    """Return the difference between results of the kernels in place and portable ones, in a buffer of this size."""
    return largest_difference(InPlace(), (size,))


def fusion_is_switched_on() -> bool:
    """Return whether the fusion is switched on."""
    return FUSION in os.environ.get(FLAGS, "")


def microbatches() -> list[tuple[np.ndarray, np.ndarray]]:
    """Return two microbatches of equal size."""
    rng = np.random.default_rng(3)
    return [(rng.normal(size=(16, 64)).astype(np.float32), rng.integers(0, 32, 16).astype(np.int32)) for _ in range(2)]


def gradients_by_numpy(dtype: str) -> Sequence[np.ndarray]:
    """Return the sums of gradients of plain MindSpore, added by NumPy. Raise NotRun if nothing is fused here."""
    if not fusion_is_switched_on():
        raise NotRun(f"not switched on in {FLAGS}")
    if "MS_DEV_SAVE_GRAPHS" in os.environ:
        raise NotRun("it saves graphs itself, to count in them; unset MS_DEV_SAVE_GRAPHS")
    network = MLP(64, 64, 32, dtype=getattr(ms, dtype))
    gradients_of = ms.grad(TargetLoss(network), None, ms.ParameterTuple(network.trainable_params()))
    with running("pynative"):
        gradients = [values(gradients_of(*map(Tensor, batch))) for batch in microbatches()]
    sums: list[Any] = [sum(parts) for parts in zip(*gradients)]
    return sums


def fused(dtype: str, expected: Sequence[np.ndarray]) -> float:
    """Return the error of the buffers of an open window. Raise Wrong if a matrix has no fused product."""
    network = MLP(64, 64, 32, dtype=getattr(ms, dtype))
    matrices = sum(parameter.ndim == 2 for parameter in network.trainable_params())
    step = make_train_step(TargetLoss(network), plain.optimizer_of(network.trainable_params()), 3)
    with TemporaryDirectory() as folder:
        with saved_graphs(folder):
            for batch in microbatches():
                step(*batch)
        found = fused_products(Path(folder))
    require(found == matrices, f"{found} products of {matrices} are fused")
    buffers = values(step.window.buffers)
    step.accumulator.reset()
    return relative(buffers, expected)


@contextmanager
def saved_graphs(folder: str) -> Iterator[None]:
    """Let MindSpore save the graphs that it compiles in the block."""
    ms.set_context(save_graphs=1, save_graphs_path=folder)
    try:
        yield
    finally:
        ms.set_context(save_graphs=0)


def fused_products(folder: Path) -> int:
    """Return the number of products that are fused with their addition, in the graph of the folder with the most."""
    graphs = [file.read_text(encoding="utf-8") for file in folder.glob("graph_build*.ir")]
    return max((graph.count("InplaceMatmulAdd(") for graph in graphs), default=0)
