"""Train and test: microbatches in seeded order, one update per window, the last window of an epoch flushed."""
from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn

from ms_accum.accumulator import Accumulator

from .data import Digits, Mnist
from .network import Network
from .settings import Settings
from .step import CountCorrect, Float64TrainStep, TrainStep

TEST_BATCH = 1000
DEFAULT_MOMENTUM = {"sgd": 0.0, "momentum": 0.9}


@dataclass(frozen=True)
class Epoch:
    """What one epoch gave.

    Attributes:
        epoch: Number of the epoch, from 1.
        loss: Mean loss of the digits, each at the moment it was trained on.
        accuracy: Of the test digits, per cent.
        train_seconds, test_seconds: Wall time, with the compilation of what ran for the first time.
        update_step: Updates since the start of the run.
        microbatch_losses: Mean loss of each microbatch, float64 `(microbatches,)`.
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
        on_microbatch: Called after each microbatch: `(epoch, digits trained on in this epoch, loss of the microbatch)`.
    """
    accumulator = make_accumulator(make_optimizer(network, settings), settings)
    step_type = Float64TrainStep if settings.gradients == "float64" else TrainStep
    train_step = _compiled(step_type(network, accumulator), settings.mode)
    count_correct = _compiled(CountCorrect(network), settings.mode)
    for epoch in range(1, settings.epochs + 1):
        order = np.random.default_rng([settings.seed, epoch]).permutation(len(mnist.train))
        microbatches = cut(order, settings.batch_size)

        start = perf_counter()
        losses = train_epoch(train_step, accumulator, mnist.train, microbatches, partial(on_microbatch, epoch))
        trained = perf_counter()
        accuracy = evaluate(count_correct, mnist.test)
        tested = perf_counter()

        yield Epoch(
            epoch=epoch,
            loss=float(np.average(losses, weights=[len(rows) for rows in microbatches])),
            accuracy=accuracy,
            train_seconds=trained - start,
            test_seconds=tested - trained,
            update_step=int(accumulator.update_step.asnumpy()),
            microbatch_losses=losses,
        )


def make_optimizer(network: Network, settings: Settings) -> nn.Optimizer:
    """The optimizer that the settings name."""
    parameters = network.trainable_params()
    if settings.optimizer == "adam":
        return nn.Adam(parameters, settings.lr)
    momentum = DEFAULT_MOMENTUM[settings.optimizer] if settings.momentum is None else settings.momentum
    if settings.optimizer == "momentum":
        return nn.Momentum(parameters, settings.lr, momentum)
    return nn.SGD(parameters, settings.lr, momentum)


def make_accumulator(optimizer: nn.Optimizer, settings: Settings) -> Accumulator:
    """The accumulator that the settings describe, for mean losses and weights relative to a full microbatch."""
    return Accumulator(
        optimizer,
        settings.accumulate_step,
        settings.clip_norm,
        reduction="mean",
        buffer_dtype=ms.float64 if settings.gradients == "float64" else None,
    )


def cut(order: np.ndarray, batch_size: int) -> list[np.ndarray]:
    """`order`, int `(n,)`, in pieces of `batch_size`; the last one may be shorter."""
    return [order[start:start + batch_size] for start in range(0, len(order), batch_size)]


def train_epoch(
    train_step: Callable[..., Tensor],
    accumulator: Accumulator,
    digits: Digits,
    microbatches: list[np.ndarray],
    on_microbatch: Callable[[int, Tensor], None],
) -> np.ndarray:
    """Train on the rows of each microbatch in turn and close the last window.

    Args:
        train_step: See `step.TrainStep`, compiled or not.
        accumulator: The one that `train_step` fills.
        digits: Digits to train on.
        microbatches: Rows of `digits`, as from `cut`.
        on_microbatch: Called after each microbatch: `(digits trained on, loss of the microbatch)`.

    Returns:
        Mean loss of each microbatch, float64 `(microbatches,)`.
    """
    # Relative to a full microbatch, whose weight is the constant 1: it costs no multiplication.
    full = len(microbatches[0])
    losses = []
    done = 0
    for rows in microbatches:
        # The losses stay on the device until the end of the epoch: reading one here would wait for it.
        losses.append(train_step(Tensor(digits.images[rows]), Tensor(digits.labels[rows]), len(rows) / full))
        done += len(rows)
        on_microbatch(done, losses[-1])
    accumulator.flush()
    return np.array([loss.asnumpy() for loss in losses], np.float64)


def evaluate(count_correct: Callable[..., Tensor], digits: Digits) -> float:
    """Accuracy on all digits, per cent, counted by a `step.CountCorrect`, compiled or not."""
    correct = [
        count_correct(Tensor(digits.images[rows]), Tensor(digits.labels[rows]))
        for rows in cut(np.arange(len(digits)), TEST_BATCH)]
    return 100 * sum(int(count.asnumpy()) for count in correct) / len(digits)


def _compiled(cell: nn.Cell, mode: str) -> Callable[..., Tensor]:
    return ms.jit(cell) if mode == "graph" else cell
