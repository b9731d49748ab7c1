"""One training: a network with a driver, and the phases that check it, each from the same start.

Compiling takes most of the time, so the phases of a training share its graphs, and each phase has a row.
"""
from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, partial
from typing import Any, NamedTuple, Optional

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops

from ms_accum import Accumulator

from . import plain
from .drivers import Driver
from .networks import MLP, TargetLoss
from .rows import Check, Name

# By the name of a driver in the table: its name for `Driver`, and the pieces of a microbatch.
DRIVERS = {
    "by hand, compiled": ("hand-jit", 1), "by hand, op by op": ("hand-pynative", 1), "train step": ("step-jit", 1),
    "train step, 2 pieces": ("step-jit", 2), "cell, graph mode": ("cell-graph", 1),
    "cell, PyNative": ("cell-pynative", 1),
}
# The largest norm of the difference to plain training, relative to the norm of the parameters' change.
BOUNDS = {"float32": 1e-4, "float16": 2e-2, "bfloat16": 1e-1}


class Phase(NamedTuple):
    """Define what a training checks in one row.

    Attributes:
        name: The check.
        windows: Windows of microbatches; plain training trains on each as one undivided batch.
        run: `(training, expected, windows) -> error`: trains.
        exact: Whether the results must be bit-identical.
    """

    name: str
    windows: Sequence[Sequence[tuple]]
    run: Callable
    exact: bool = False


class Setting(NamedTuple):
    """Define what the phases of a training share.

    Attributes:
        phases: The phases to check.
        accumulate_step: Number of microbatches in a window.
        options: Function that returns further options of the accumulator.
        reduction: Reduction of the loss over its targets.
        weight_fn: Function that returns the weight of a microbatch. None: its number of samples.
        by_hand: By hand: the divisor of summed gradients. None: means, as in a train step.
        trained: Function that returns the parameters to train, given those of the network.
    """

    phases: tuple[Phase, ...]
    accumulate_step: int
    options: Callable[[], dict[str, Any]] = dict
    reduction: str = "mean"
    weight_fn: Optional[Callable] = None
    by_hand: Optional[float] = None
    trained: Callable[[list[ms.Parameter]], Sequence[ms.Parameter]] = list


class Training:
    """Train a setting with a driver; it is built when a phase first runs.

    Args:
        setting: The setting.
        driver: One of DRIVERS.
        dtype: Name of the parameters' dtype.
        seed: Seed of the initial weights: 0, unless a checkpoint or rank 0 replaces the weights. Plain training uses 0.
    """

    def __init__(self, setting: Setting, driver: str, dtype: str, seed: int = 0) -> None:
        self.setting, self.name, self.dtype, self.seed = setting, driver, dtype, seed

    def checks(self) -> Iterator[Check]:
        """Yield a check for each phase."""
        for phase in self.setting.phases:
            yield Check(Name(phase.name, self.name, self.dtype), partial(self.expect, phase),
                        partial(self.run, phase), 0.0 if phase.exact else BOUNDS[self.dtype])

    @cached_property
    def network(self) -> MLP:
        """Return the network that is trained."""
        return MLP(seed=self.seed, dtype=getattr(ms, self.dtype))

    @cached_property
    def optimizer(self) -> nn.Optimizer:
        """Return the optimizer that updates the network."""
        return plain.optimizer_of(self.setting.trained(self.network.trainable_params()))

    @cached_property
    def accumulator(self) -> Accumulator:
        """Return the accumulator that is checked."""
        setting = self.setting
        summed = setting.by_hand is not None and self.name.startswith("by hand")
        return Accumulator(self.optimizer, setting.accumulate_step, reduction="sum" if summed else "mean",
                           **setting.options())

    @cached_property
    def driver(self) -> Driver:
        """Return the driver of the accumulator."""
        setting, (name, pieces) = self.setting, DRIVERS[self.name]
        loss = TargetLoss(self.network, setting.reduction)
        options: dict[str, Any] = {} if name.startswith("hand") else {"loss_reduction": setting.reduction}
        if setting.by_hand is not None and name.startswith("hand"):
            return Driver(name, self.accumulator, loss, (once,), setting.by_hand)
        if name.startswith("step"):
            options["pieces"] = pieces
        return Driver(name, self.accumulator, loss, (setting.weight_fn,), **options)

    @cached_property
    def start(self) -> list[tuple[ms.Parameter, Tensor]]:
        """Return the network's and the optimizer's state, with their initial values."""
        return [(p, Tensor(p.asnumpy().copy(), p.dtype)) for p in self.state]

    @property
    def state(self) -> list[ms.Parameter]:
        """Return the network's and the optimizer's state."""
        return list({id(p): p for p in (*self.network.get_parameters(), *self.optimizer.get_parameters())}.values())

    def expect(self, phase: Phase) -> plain.Expected:
        """Train in plain MindSpore."""
        network = MLP(dtype=getattr(ms, self.dtype))
        clip_norm = self.setting.options().get("clip_norm")
        loss, weight = TargetLoss(network, self.setting.reduction), self.setting.weight_fn
        if self.setting.reduction == "mean":
            return plain.train(loss, network.trainable_params(), phase.windows, clip_norm)
        assert weight is not None  # of a sum
        return plain.train(lambda *batch: loss(*batch) / weight(*batch), network.trainable_params(), phase.windows)

    def run(self, phase: Phase, expected: plain.Expected) -> float:
        """Run a phase from the start. Return its error."""
        self.restart()
        try:
            with self.driver:
                return phase.run(self, expected, phase.windows)
        finally:
            self.accumulator.reset()

    def restart(self) -> None:
        """Set the network and the optimizer to their start, and drop the open window."""
        for parameter, value in self.start:
            ops.assign(parameter, value)
        self.accumulator.reset()

    def learn(self, windows: Sequence[Sequence[tuple]]) -> list[Tensor]:
        """Train on microbatches. Return their losses."""
        returned = [self.driver(*microbatch) for window in windows for microbatch in window]
        return [loss[0] if isinstance(loss, tuple) else loss for loss in returned]  # a cell may also return an overflow

    def off(self, expected: plain.Expected) -> float:
        """Return the error of the parameters, relative to how far plain training moved them."""
        return plain.off(self.network.trainable_params(), expected)

    def bits(self) -> list[np.ndarray]:
        """Return all values of the state."""
        return [p.asnumpy().copy() for p in (*self.state, *self.accumulator.parameters)]


def once(*batch: Tensor) -> float:
    """Return the weight 1 for every microbatch."""
    return 1.0
