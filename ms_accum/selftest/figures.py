"""Measure the cost of accumulation on this device: memory, time, and reads of the device."""
from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from functools import cached_property
from statistics import median, quantiles
from time import perf_counter
from typing import Any, Optional, Union

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn

from ms_accum import make_train_step

from ..core.kernels import InPlace
from ..core.probe import kernels
from ..runtime import synchronize
from . import plain
from .kernels import fusion_is_switched_on
from .networks import MLP, mean_loss
from .reads import counted_reads
from .rows import Check, Figure, Name, NotRun
from .tutorial import TwoBuffers, train_step_with

LAYERS, WIDTH, BATCH = 13, 2048, 16
# Bytes per parameter at the peak of an add and of an update, as the dry run planned them with kernels in place: see
# "On Ascend and GPU".
PLAN = {"float32": {"add": 8.34, "update": 12.0}, "bfloat16": {"add": 6.48, "update": 14.0}}
FUSED_ADD = 6.02


def figures(quick: bool) -> Iterator[Union[Check, Figure]]:
    """Yield a row for each figure."""
    for dtype in ("float32",) if quick else PLAN:
        memory = Memory(dtype, 512 if quick else WIDTH)
        for call in ("add", "update"):
            yield Figure(Name("bytes per parameter", call, dtype), memory.plain, memory.measure(call))
    times = Times(20 if quick else 100)
    yield Figure(Name("milliseconds", "train step", "float32"), times.plain, times.measure)
    yield Check(Name("reads of the device", "train step", "float32"), lambda: 8, surplus_reads, 0.0)


class Memory:
    """Measure the peak memory of a window of two microbatches."""

    def __init__(self, dtype: str, width: int) -> None:
        self.dtype, self.width = dtype, width

    def network(self) -> nn.Cell:
        """Return the layers that the plan was made for."""
        dtype = getattr(ms, self.dtype)
        return nn.SequentialCell([nn.Dense(self.width, self.width, dtype=dtype) for _ in range(LAYERS)])

    def batch(self) -> Tensor:
        """Return the samples."""
        return Tensor(np.ones((BATCH, self.width)), getattr(ms, self.dtype))

    def plain(self) -> None:
        """Train a small layer. Raise NotRun on CPU, where MindSpore does not count bytes."""
        if ms.get_context("device_target") == "CPU":
            raise NotRun("not measured on CPU")
        layer = nn.Dense(self.width, 1, dtype=getattr(ms, self.dtype))
        optimizer = plain.optimizer_of(layer.trainable_params())
        optimizer(ms.grad(layer, None, optimizer.parameters)(self.batch()))
        synchronize()

    @cached_property
    def peaks(self) -> dict[str, float]:
        """Return the peak bytes per parameter in the first microbatch, and in the second one with its update."""
        gc.collect()
        synchronize()
        before = ms.runtime.memory_allocated()
        network, batch = self.network(), self.batch()

        def forward_fn(x: Tensor) -> Tensor:
            return network(x).astype(ms.float32).mean()

        step = make_train_step(forward_fn, plain.optimizer_of(network.trainable_params()), 2)
        parameters, peaks = sum(p.size for p in network.trainable_params()), {}
        for call in ("add", "update"):
            ms.runtime.reset_max_memory_allocated()
            step(batch)
            synchronize()
            peaks[call] = (ms.runtime.max_memory_allocated() - before) / parameters
        return peaks

    def measure(self, call: str) -> Callable[[], tuple[float, str]]:
        """Return a function that measures an add or an update."""
        def measured() -> tuple[float, str]:
            planned: Optional[float] = PLAN[self.dtype][call]
            if call == "add" and self.dtype == "bfloat16" and fusion_is_switched_on():
                planned = FUSED_ADD
            if self.width != WIDTH or not isinstance(kernels(), InPlace):
                planned = None
            peak = self.peaks[call]
            return peak, f"{peak:.2f}; {'no plan' if planned is None else f'planned {planned:.2f}'}"
        return measured


class Times:
    """Time train steps of ms_accum and of the tutorial's class, in turn.

    Args:
        rounds: Number of windows of each.
    """

    length = 4

    def __init__(self, rounds: int) -> None:
        self.rounds = rounds

    @cached_property
    def batch(self) -> tuple[Tensor, Tensor]:
        """Return a microbatch."""
        rng = np.random.default_rng(0)
        return Tensor(rng.normal(size=(32, 784)), ms.float32), Tensor(rng.integers(0, 10, 32), ms.int32)

    def start(self) -> tuple[Callable, nn.Optimizer]:
        """Return a forward function and an optimizer."""
        network = MLP(784, 512, 10)
        return mean_loss(network), nn.Momentum(network.trainable_params(), 0.01, 0.9)

    def tutorial(self) -> Callable[[], float]:
        """Return a function that trains a window with the tutorial's class and returns its seconds."""
        forward_fn, optimizer = self.start()
        length = self.length

        def divided(x: Tensor, y: Tensor) -> Tensor:
            return forward_fn(x, y) / length

        grad_fn = ms.value_and_grad(divided, None, optimizer.parameters)
        return self.timed(train_step_with(TwoBuffers(optimizer, length), grad_fn), optimizer)

    def ours(self) -> Callable[[], float]:
        """Return a function that trains a window with ms_accum and returns its seconds."""
        forward_fn, optimizer = self.start()
        return self.timed(make_train_step(forward_fn, optimizer, self.length), optimizer)

    def timed(self, step: Callable, optimizer: nn.Optimizer) -> Callable[[], float]:
        """Return a function that trains a window and returns its seconds."""
        smallest = min(optimizer.parameters, key=lambda p: p.size)

        def window() -> float:
            start = perf_counter()
            for _ in range(self.length):
                step(*self.batch)
            smallest.asnumpy()
            return perf_counter() - start
        return window

    def plain(self) -> None:
        """Train a window with the tutorial's class."""
        self.tutorial()()

    def measure(self) -> tuple[dict[str, Any], str]:
        """Return the milliseconds of a microbatch, and their ratio in pairs of windows."""
        both, pairs = (self.ours(), self.tutorial()), []
        for number in range(self.rounds + 5):
            order = (0, 1) if number % 2 else (1, 0)
            seconds = {which: both[which]() for which in order}
            pairs.append((seconds[0], seconds[1]))
        pairs = pairs[5:]  # the first ones compile and warm up
        ours, tutorial = (median(column) / self.length * 1e3 for column in zip(*pairs))
        ratios = [a / b for a, b in pairs]
        low, ratio, high = quantiles(ratios, n=4)
        return ({"ours": ours, "tutorial": tutorial, "ratio": ratio, "quartiles": [low, high], "windows": len(pairs)},
                f"{ours:.2f}; {ratio:.2f} x the tutorial's class (quartiles {low:.2f} to {high:.2f})")


def surplus_reads(expected: int) -> float:
    """Return the number of reads in 32 microbatches in windows of 4, minus one read per window."""
    network = MLP()
    step = make_train_step(mean_loss(network), plain.optimizer_of(network.trainable_params()), 4)
    x, y = Tensor(np.ones((6, 6)), ms.float32), Tensor(np.zeros(6), ms.int32)
    for _ in range(8):
        step(x, y)
    with counted_reads() as made:
        for _ in range(32):
            step(x, y)
    return abs(len(made) - expected)
