"""What is special on Ascend: kernels that work in place, and matrix products that are added to a buffer."""
from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, ParameterTuple, Tensor, nn, ops

from ms_accum import make_train_step

from ..core.kernels import InPlace, Portable, add_each
from ..tensors import state_parameter
from . import plain
from .comparing import relative, values
from .modes import running
from .networks import MLP, TargetLoss
from .training import rows

SIZES = {f"buffer of {size:,}": size for size in (1, 7, 1_000, 65_537, 10_000_000)}
FUSION, FLAGS = "matmul_assignadd_fusion", "MS_DEV_GRAPH_KERNEL_FLAGS"


@rows(drivers=SIZES, dtypes=["float32"])
def test_kernels_in_place(driver: str, holds: Callable) -> None:
    """Kernels that work in place give what the portable ones give."""
    require_in_place()
    holds(largest_difference(InPlace(), SIZES[driver]), limit=1e-6)


def largest_difference(special: Portable, size: int) -> float:
    """Return the difference between results of `special` and of the portable kernels, relative to the largest element.

    Each trains with float32 buffers of this size and of 640, compiled and op by op.
    """
    random, worst = np.random.default_rng(0), 0.0
    gradients = [Tensor(random.uniform(0.5, 1, n).astype(np.float32)) for n in (size, 640)]
    for compiling in (ms.jit, op_by_op):
        for got, wanted in zip(*(trained(kind, gradients, compiling) for kind in (special, Portable()))):
            difference = float(np.abs(got - wanted).max() / (np.abs(wanted).max() or 1.0))
            worst = max(worst, float("inf") if np.isnan(difference) else difference)
    return worst


class Windows(nn.Cell):
    """Windows of one microbatch, each with an update of SGD, given the kernels and the sizes of parameters."""

    def __init__(self, kind: Portable, sizes: Sequence[int]) -> None:
        super().__init__(auto_prefix=False)
        self.kind, self.dtypes, self.small = kind, (ms.float32,) * len(sizes), max(sizes) // 64
        self.parameters, self.buffers = (
            ParameterTuple([Parameter(np.zeros(size, np.float32), f"kernels.{name}{i}")
                            for i, size in enumerate(sizes)]) for name in ("parameter", "buffer"))
        self.updates = state_parameter("kernels.updates", (), ms.int32)

    def construct(self, zero: Tensor, *gradients: Tensor) -> Tensor:
        """Add, scale and clear, in the order and with the dependencies of `Window`."""
        add_each(self.small, self.buffers, gradients, 1.0)
        factor = ops.depend(zero + 0.375, ops.assign_add(self.updates, 1))
        for parameter, scaled in zip(self.parameters, self.kind.scale(factor, self.buffers, self.dtypes)):
            ops.assign_sub(parameter, scaled)
        self.kind.clear(zero, self.buffers)
        return zero


def trained(kind: Portable, gradients: Sequence[Tensor], compiling: Callable) -> list[np.ndarray]:
    """Return parameters and buffers after two windows. The second one shows whether the first one left anything."""
    windows = Windows(kind, [gradient.size for gradient in gradients])
    run = compiling(windows)
    for _ in range(2):
        run(Tensor(0.0, ms.float32), *gradients)
    return values((*windows.parameters, *windows.buffers))


def op_by_op(cell: nn.Cell) -> Callable:
    """Return what runs a Cell op by op."""
    return cell.construct


def require_in_place() -> None:
    """Skip the test if no kernel works in place on this device."""
    if (device := ms.get_context("device_target")) != "Ascend":
        pytest.skip(f"ms_accum has no kernel that works in place on {device}")


@rows(drivers=["train step"], dtypes=["bfloat16"])
def test_fused_products(dtype: str, holds: Callable) -> None:
    """Matrix products that are added to a buffer in one kernel are right, and each weight matrix has one."""
    if not fusion_is_switched_on():
        pytest.skip(f"{FUSION} is not switched on in {FLAGS}")
    if "MS_DEV_SAVE_GRAPHS" in os.environ:
        pytest.skip("it saves graphs itself, to count in them: unset MS_DEV_SAVE_GRAPHS")
    network = MLP(64, 64, 32, dtype=getattr(ms, dtype))
    with plain.kernels_for(network.first.weight.dtype), running("pynative"):
        gradients_of = ms.grad(TargetLoss(network), None, ms.ParameterTuple(network.trainable_params()))
        gradients = [values(gradients_of(*map(Tensor, batch))) for batch in microbatches()]
    sums: list[Any] = [sum(parts) for parts in zip(*gradients)]
    holds(relative(fused_buffers(dtype), sums))


def fusion_is_switched_on() -> bool:
    """Return whether the fusion is switched on."""
    return FUSION in os.environ.get(FLAGS, "")


def microbatches() -> list[tuple[np.ndarray, np.ndarray]]:
    """Return two microbatches of equal size."""
    rng = np.random.default_rng(3)
    return [(rng.normal(size=(16, 64)).astype(np.float32), rng.integers(0, 32, 16).astype(np.int32)) for _ in range(2)]


def fused_buffers(dtype: str) -> Sequence[np.ndarray]:
    """Return the buffers of an open window. Raise AssertionError if a matrix has no fused product."""
    network = MLP(64, 64, 32, dtype=getattr(ms, dtype))
    matrices = sum(parameter.ndim == 2 for parameter in network.trainable_params())
    step = make_train_step(TargetLoss(network), plain.optimizer_of(network.trainable_params()), 3)
    with TemporaryDirectory() as folder:
        ms.set_context(save_graphs=1, save_graphs_path=folder)
        try:
            for batch in microbatches():
                step(*batch)
        finally:
            ms.set_context(save_graphs=0)
        found = fused_products(Path(folder))
    assert found == matrices, f"{found} products of {matrices} are fused"
    buffers = values(step.window.buffers)
    step.reset()
    return buffers


def fused_products(folder: Path) -> int:
    """Return the number of products that are fused with their addition, in the graph of the folder with the most."""
    graphs = [file.read_text(encoding="utf-8") for file in folder.glob("graph_build*.ir")]
    return max((graph.count("InplaceMatmulAdd(") for graph in graphs), default=0)
