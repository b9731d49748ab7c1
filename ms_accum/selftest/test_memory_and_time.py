"""The cost of accumulation on this device: memory against the plan, time, and reads of the device."""
from __future__ import annotations

import gc
import os
from collections.abc import Callable
from functools import partial
from statistics import median, quantiles
from time import perf_counter

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn

from ms_accum import make_train_step

from ..core.kernels import SWITCH
from ..runtime import synchronize
from . import plain
from .networks import MLP, TargetLoss, mean_loss
from .reads import counted_reads
from .test_kernels import fusion_is_switched_on
from .training import rows, samples
from .tutorial import TwoBuffers, train_step_with

LAYERS, WIDTH, BATCH = 13, 2048, 16
# Bytes per parameter at the peak of an add and of an update, as the dry run planned them with kernels in place: see
# "On Ascend and GPU".
PLAN = {"float32": {"add": 8.34, "update": 12.0}, "bfloat16": {"add": 6.48, "update": 14.0}}
FUSED_ADD = 6.02
LENGTH, WINDOWS = 4, 40


@pytest.fixture(scope="module")
def peaks(dtype: str) -> dict[str, float]:
    """Return the peak bytes per parameter in the first microbatch of a window, and in the second one, its last."""
    if ms.get_context("device_target") == "CPU":
        pytest.skip("MindSpore does not count bytes on CPU")
    network = MLP(dtype=getattr(ms, dtype))
    plain.train(TargetLoss(network), network.trainable_params(), [samples((5,), 2)])
    return measured_peaks(Tensor(np.ones((BATCH, WIDTH)), getattr(ms, dtype)))


def measured_peaks(batch: Tensor) -> dict[str, float]:
    """Return the peaks of a window of two microbatches, in the layers that the plan was made for."""
    gc.collect()
    synchronize()
    before = ms.runtime.memory_allocated()
    network = nn.SequentialCell([nn.Dense(WIDTH, WIDTH, dtype=batch.dtype) for _ in range(LAYERS)])

    def forward_fn(x: Tensor) -> Tensor:
        return network(x).astype(ms.float32).mean()

    step = make_train_step(forward_fn, plain.optimizer_of(network.trainable_params()), 2)
    parameters, found = sum(p.size for p in network.trainable_params()), {}
    for call in ("add", "update"):
        ms.runtime.reset_max_memory_allocated()
        step(batch)
        synchronize()
        found[call] = (ms.runtime.max_memory_allocated() - before) / parameters
    return found


@rows(drivers=PLAN["float32"], dtypes=PLAN)
def test_bytes_per_parameter(peaks: dict[str, float], driver: str, dtype: str, record_property: Callable) -> None:
    """Only measured: kernels and MindSpore's own memory differ between devices."""
    planned = FUSED_ADD if (driver, dtype) == ("add", "bfloat16") and fusion_is_switched_on() else PLAN[dtype][driver]
    plan = f"planned {planned:.2f}" if os.environ.get(SWITCH) == "1" else "the plan is for kernels in place only"
    record_property("value", peaks[driver])
    record_property("message", f"{peaks[driver]:.2f} bytes per parameter at the peak; {plan}")


Window = Callable[[int], float]


@pytest.fixture(scope="module")
def windows() -> tuple[Window, Window]:
    """Return functions that train windows with ms_accum, and with the tutorial's class. They return the seconds."""
    networks = [MLP(784, 512, 10) for _ in range(2)]
    ours, other = (nn.Momentum(network.trainable_params(), 0.01, 0.9) for network in networks)
    loss_fn, rng = mean_loss(networks[1]), np.random.default_rng(0)

    def divided(x: Tensor, y: Tensor) -> Tensor:
        return loss_fn(x, y) / LENGTH

    grad_fn = ms.value_and_grad(divided, None, other.parameters)
    steps: list[Callable] = [make_train_step(mean_loss(networks[0]), ours, LENGTH),
                             train_step_with(TwoBuffers(other, LENGTH), grad_fn)]
    batch = Tensor(rng.normal(size=(32, 784)), ms.float32), Tensor(rng.integers(0, 10, 32), ms.int32)

    def trained(step: Callable, network: MLP, count: int) -> float:
        start = perf_counter()
        for _ in range(count * LENGTH):
            step(*batch)
        network.second.bias.asnumpy()  # waits for the device
        return perf_counter() - start

    both = [partial(trained, step, network) for step, network in zip(steps, networks)]
    for way in both:
        way(5)  # the first windows compile and warm up
    return both[0], both[1]


@rows(drivers=["train step"], dtypes=["float32"])
def test_milliseconds(windows: tuple[Window, Window], record_property: Callable) -> None:
    """Only measured, in pairs of windows that take turns."""
    ours, tutorial = windows
    pairs = [(ours(1), tutorial(1)) if number % 2 else (tutorial(1), ours(1))[::-1] for number in range(WINDOWS)]
    medians = [median(column) / LENGTH * 1e3 for column in zip(*pairs)]
    low, ratio, high = quantiles([a / b for a, b in pairs], n=4)
    record_property("value", {"ours": medians[0], "tutorial": medians[1], "ratio": ratio, "quartiles": [low, high],
                              "windows": WINDOWS})
    record_property("message", f"{medians[0]:.2f} ms per microbatch, {ratio:.2f} x the time of the tutorial's class "
                               f"(quartiles {low:.2f} to {high:.2f})")


@rows(drivers=["train step"], dtypes=["float32"])
def test_reads_of_the_device(windows: tuple[Window, Window], holds: Callable) -> None:
    """The host reads nothing from the device while it trains: each read would wait for it."""
    with counted_reads() as made:
        windows[0](8)
    reads = len(made) - 1  # one waits for the end
    holds(reads, limit=0, message=f"{reads} reads in 8 windows, expected 0")
