"""Train and test: microbatches in seeded order, dealt out to the ranks, one update per window, the last one of an epoch flushed."""
from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn

from ms_accum.accumulator import Accumulator
from ms_accum.distributed import DataParallel, gather
from ms_accum.train_step import TrainStep, make_train_step

from .data import Digits, Mnist
from .network import Network
from .settings import Settings
from .step import CountCorrect, Float64Optimizer, make_forward

TEST_BATCH = 1000
DEFAULT_MOMENTUM = {"sgd": 0.0, "momentum": 0.9}


@dataclass(frozen=True)
class Epoch:
    """What one epoch gave.

    Attributes:
        epoch: Number of the epoch, from 1.
        loss: Mean loss of the digits of all ranks, each at the moment it was trained on.
        accuracy: Of the test digits, per cent.
        train_seconds, test_seconds: Wall time, with the compilation of what ran for the first time.
        update_step: Updates since the start of the run.
        microbatch_losses: Mean loss of each microbatch of this rank, float64 `(microbatches,)`.
    """

    epoch: int
    loss: float
    accuracy: float
    train_seconds: float
    test_seconds: float
    update_step: int
    microbatch_losses: np.ndarray = field(repr=False)


OnMicrobatch = Callable[[int, int, Tensor], None]


def train(mnist: Mnist, network: Network, settings: Settings, on_microbatch: OnMicrobatch = lambda *_: None) -> Iterator[Epoch]:
    """Train `network` in place; yields after each epoch.

    Args:
        mnist: Digits to train on and to test on.
        network: With its initial weights.
        settings: The run.
        on_microbatch: Called after each microbatch: `(epoch, digits trained on in this epoch by all ranks, loss of the microbatch)`.
    """
    train_step = make_step(network, settings)
    count_correct = CountCorrect(network)
    if settings.mode == "graph":
        count_correct = ms.jit(count_correct)
    for epoch in range(1, settings.epochs + 1):
        order = np.random.default_rng([settings.seed, epoch]).permutation(len(mnist.train))
        # Dealt out one by one, so that a window of all ranks holds the same digits as one of a single process.
        microbatches = cut(order, settings.batch_size)[settings.rank::settings.ranks]

        start = perf_counter()
        with _jit(settings.mode):
            losses = train_epoch(train_step, mnist.train, microbatches, partial(on_microbatch, epoch), settings.ranks)
        trained = perf_counter()
        accuracy = evaluate(count_correct, mnist.test, settings)
        tested = perf_counter()

        yield Epoch(
            epoch=epoch,
            loss=_mean_loss(losses, microbatches, settings),
            accuracy=accuracy,
            train_seconds=trained - start,
            test_seconds=tested - trained,
            update_step=int(train_step.accumulator.update_step.asnumpy()),
            microbatch_losses=losses,
        )


def make_step(network: Network, settings: Settings) -> TrainStep:
    """The train step that the settings describe."""
    optimizer = make_optimizer(network, settings)
    if settings.gradients == "float64":
        network = Network(seed=0, dtype=ms.float64)
        optimizer = Float64Optimizer(optimizer, network)
    reducer = DataParallel(sync=settings.sync, shard=settings.shard) if settings.ranks > 1 else None
    accumulator = Accumulator(optimizer, settings.accumulate_step, settings.clip_norm, reduction="mean", reducer=reducer)
    return make_train_step(make_forward(network), accumulator, micro_size=settings.micro_size, strategy=settings.strategy)


def make_optimizer(network: Network, settings: Settings) -> nn.Optimizer:
    """The optimizer that the settings name."""
    parameters = network.trainable_params()
    if settings.optimizer == "adam":
        return nn.Adam(parameters, settings.lr)
    momentum = DEFAULT_MOMENTUM[settings.optimizer] if settings.momentum is None else settings.momentum
    if settings.optimizer == "momentum":
        return nn.Momentum(parameters, settings.lr, momentum)
    return nn.SGD(parameters, settings.lr, momentum)


def cut(order: np.ndarray, batch_size: int) -> list[np.ndarray]:
    """`order`, int `(n,)`, in pieces of `batch_size`; the last one may be shorter."""
    return [order[start:start + batch_size] for start in range(0, len(order), batch_size)]


def train_epoch(
    train_step: TrainStep,
    digits: Digits,
    microbatches: list[np.ndarray],
    on_microbatch: Callable[[int, Tensor], None],
    ranks: int = 1,
) -> np.ndarray:
    """Train on the rows of each microbatch in turn and close the last window.

    Args:
        train_step: As from `make_step`.
        digits: Digits to train on.
        microbatches: Rows of `digits`, as from `cut`.
        on_microbatch: Called after each microbatch: `(digits trained on by all ranks, loss of the microbatch)`.
        ranks: How many train; the others are taken to be as far as this one.

    Returns:
        Mean loss of each microbatch, float64 `(microbatches,)`.
    """
    losses = []
    done = 0
    for i, rows in enumerate(microbatches):
        # The losses stay on the device until the end of the epoch: reading one here would wait for it.
        losses.append(train_step(Tensor(digits.images[rows]), Tensor(digits.labels[rows])))
        done = len(digits) if i == len(microbatches) - 1 else min(done + ranks * len(rows), len(digits) - 1)
        on_microbatch(done, losses[-1])
    train_step.flush()
    return np.array([loss.asnumpy() for loss in losses], np.float64)


def evaluate(count_correct: Callable[..., Tensor], digits: Digits, settings: Settings) -> float:
    """Accuracy on all digits, per cent, counted by a `step.CountCorrect`, compiled or not; each rank counts its part."""
    correct = [
        count_correct(Tensor(digits.images[rows]), Tensor(digits.labels[rows]))
        for rows in cut(np.arange(len(digits)), TEST_BATCH)[settings.rank::settings.ranks]]
    count = np.array([sum(int(count.asnumpy()) for count in correct)], np.int32)
    return 100 * int(_of_all_ranks(count, settings).sum()) / len(digits)


def _mean_loss(losses: np.ndarray, microbatches: list[np.ndarray], settings: Settings) -> float:
    digits = [len(rows) for rows in microbatches]
    total, count = _of_all_ranks(np.array([losses @ digits, sum(digits)], np.float64), settings).sum(axis=0)
    return float(total / count)


def _of_all_ranks(numbers: np.ndarray, settings: Settings) -> np.ndarray:
    """A row from each rank."""
    return gather(numbers) if settings.ranks > 1 else numbers[None]


@contextmanager
def _jit(mode: str) -> Iterator[None]:
    """In "pynative" mode, jitted functions run op by op, by MindSpore's own switch for that."""
    before = os.environ.get("MS_JIT")
    if mode == "pynative":
        os.environ["MS_JIT"] = "0"
    try:
        yield
    finally:
        if before is None:
            os.environ.pop("MS_JIT", None)
        else:
            os.environ["MS_JIT"] = before
