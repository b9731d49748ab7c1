"""One training: a small network, an accumulator and its driver, compared with plain MindSpore. And data for it."""
from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from itertools import product
from typing import Any, Optional, Union

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, ops

from . import plain
from .drivers import Driver
from .networks import MLP, NO_TARGET, TargetLoss

# By the name of a driver in the table: its name for `Driver`, and the pieces of a microbatch.
DRIVERS = {
    "by hand, compiled": ("hand-jit", 1), "by hand, op by op": ("hand-pynative", 1), "train step": ("step-jit", 1),
    "train step, 2 pieces": ("step-jit", 2), "cell, graph mode": ("cell-graph", 1),
    "cell, PyNative": ("cell-pynative", 1),
}
# The largest norm of the difference to plain training, relative to the norm of the parameters' change.
BOUNDS = {"float32": 1e-4, "float16": 2e-2, "bfloat16": 1e-1}


def rows(quick: Union[str, tuple[str, ...], None] = None, drivers: Collection[str] = DRIVERS,
         dtypes: Collection[str] = BOUNDS, checks: Collection[str] = ()) -> pytest.MarkDecorator:
    """Parametrize a test: it is a row of the table for each driver and dtype.

    Args:
        quick: The driver, or drivers, in the quick run, which has only the first dtype. None: all drivers.
        drivers, dtypes: Values of these arguments.
        checks: Values of the argument `check`, which are names of rows. Without it, the test names them.
    """
    first, checked, fast = next(iter(dtypes)), bool(checks), (quick,) if isinstance(quick, str) else quick
    return pytest.mark.parametrize(("check", "driver", "dtype")[not checked:], [
        pytest.param(*(check, driver, dtype)[not checked:],
                     marks=[pytest.mark.quick] * (dtype == first and (fast is None or driver in fast)))
        for dtype, driver, check in product(dtypes, drivers, checks or [""])], scope="module")


class Training:
    """Train a network with a driver of an accumulator. Compiling takes most of the time, so tests share a training.

    Args:
        driver: One of DRIVERS.
        dtype: Name of the parameters' dtype.
        length: Number of microbatches in a window.
        reduction: Reduction of the loss over its targets.
        weight_fn: Function that returns the weight of a microbatch. None: its number of samples.
        divisor: By hand: the divisor of summed gradients. None: means, as in a train step.
        trained: Function that returns the parameters to train, given those of the network.
        seed: Seed of the initial weights. Plain training uses 0.
        options: Further options of the accumulator.
    """

    def __init__(self, driver: str, dtype: str, length: int, *, reduction: str = "mean",
                 weight_fn: Optional[Callable] = None, divisor: Optional[float] = None, trained: Callable = list,
                 seed: int = 0, **options: Any) -> None:
        self.dtype, self.reduction, self.weight_fn = getattr(ms, dtype), reduction, weight_fn
        self.clip_norm: float = options.get("clip_norm", np.inf)
        self.plainly([samples((5,), 2)])  # first of all: the device may have no kernels for this dtype
        self.network = MLP(seed=seed, dtype=self.dtype)
        optimizer, (name, pieces) = plain.optimizer_of(trained(self.network.trainable_params())), DRIVERS[driver]
        by_hand = name.startswith("hand")
        summed = by_hand and divisor is not None
        own: dict[str, Any] = {} if by_hand else {"loss_reduction": reduction}
        if name.startswith("step"):
            own["pieces"] = pieces
        self.driver = Driver(name, TargetLoss(self.network, reduction), optimizer, length,
                             once if summed else weight_fn, (divisor or 1.0) if summed else 1.0,
                             "sum" if summed else "mean", options, **own)
        self.boundary = self.driver.boundary
        every = (*self.network.get_parameters(), *optimizer.get_parameters())
        self.state = list({id(p): p for p in every}.values())
        # A copy, because asnumpy() shares the memory of a Parameter, which training changes.
        self.start = [Tensor(p.asnumpy().copy(), p.dtype) for p in self.state]

    def plainly(self, windows: Sequence[Sequence[tuple]]) -> plain.Expected:
        """Train in plain MindSpore."""
        network, weight = MLP(dtype=self.dtype), self.weight_fn
        loss = TargetLoss(network, self.reduction)
        if self.reduction == "mean" or weight is None:
            return plain.train(loss, network.trainable_params(), windows, self.clip_norm)
        return plain.train(lambda *batch: loss(*batch) / weight(*batch), network.trainable_params(), windows)

    def expect(self, windows: Sequence[Sequence[tuple]], clipped: bool = False) -> plain.Expected:
        """Train in plain MindSpore, and go back to the start. `clipped`: whether gradients are that large."""
        expected = self.plainly(windows)
        assert all((norm > self.clip_norm) == clipped for norm in expected.norms), \
            f"gradients of plain training have the norms {expected.norms}, expected them to be clipped: {clipped}"
        for parameter, value in zip(self.state, self.start):
            ops.assign(parameter, value)
        self.boundary.reset()
        return expected

    def learn(self, windows: Sequence[Sequence[tuple]]) -> list[Tensor]:
        """Train on microbatches. Return their losses."""
        with self.driver:
            returned = [self.driver(*microbatch) for window in windows for microbatch in window]
        return [loss[0] if isinstance(loss, tuple) else loss for loss in returned]  # a cell may also return an overflow

    def flush(self) -> bool:
        """Apply the incomplete window. Return whether one was open."""
        with self.driver:
            return self.driver.flush()

    def off(self, expected: plain.Expected) -> float:
        """Return the error of the parameters, relative to how far plain training moved them."""
        return expected.off(self.network.trainable_params())


def once(*batch: Tensor) -> float:
    """Return the weight 1 for every microbatch."""
    return 1.0


def samples(sizes: Sequence[int], seed: int, loud: bool = False) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return microbatches of these sizes. `loud`: all samples are of one class, which makes a large gradient."""
    rng, microbatches = np.random.default_rng(seed), []
    for size in sizes:
        x, y = rng.normal(size=(size, 6)), rng.integers(0, 3, size)
        microbatches.append(((2 * x if loud else x).astype(np.float32), (0 * y + 1 if loud else y).astype(np.int32)))
    return microbatches


def texts(counts: Sequence[int], seed: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return microbatches of 3 texts of 4 tokens, with these numbers of targets."""
    rng, microbatches = np.random.default_rng(seed), []
    for count in counts:
        y = rng.integers(0, 3, 12)
        y[rng.permutation(12)[count:]] = NO_TARGET
        microbatches.append((rng.normal(size=(3, 4, 6)).astype(np.float32), y.reshape(3, 4).astype(np.int32)))
    return microbatches
