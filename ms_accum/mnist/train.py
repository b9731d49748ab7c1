"""The reference run on digits: its train step, its order, and its test."""
from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn

from ms_accum.model import TrainOneStepCell
from ms_accum.reference import train
from ms_accum.reference.train import AnyStep, Words, cut, make_accumulator, make_adam, of_all_ranks
from ms_accum.train_step import make_train_step

from .data import Digits, Mnist
from .network import CountCorrect, Float64Optimizer, Network, make_forward
from .settings import Settings

TEST_BATCH = 1000


class Task(train.Task):
    """Train the tutorial's network on digits; test how many of the others it labels correctly.

    Args:
        mnist: The digits.
        settings: What to compute.
        source: The name of the digits.
        label: What sets this run apart from its counterpart.
    """

    command = "mnist"
    words = Words(
        rows="digits",
        unit="digits",
        score="accuracy",
        score_format="accuracy {:.2f} %",
        score_axis="accuracy in %",
        score_title="Test digits labelled correctly",
        loss_axis="loss",
        loss_title="Cross entropy: each microbatch, and mean of an epoch",
    )

    def __init__(self, mnist: Mnist, settings: Settings, source: str = "", label: str = "accumulated") -> None:
        self.mnist, self.settings, self.source, self.label = mnist, settings, source, label
        self.network = Network(settings.seed)
        self.data, self.identity = mnist.train, mnist.identity

    def make_step(self) -> AnyStep:
        """Make the train step that the settings describe."""
        settings, network = self.settings, self.network
        optimizer = make_optimizer(network, settings)
        if settings.gradients == "float64":
            network = Network(seed=0, dtype=ms.float64)
            optimizer = Float64Optimizer(optimizer, network)
        accumulator = make_accumulator(optimizer, settings, settings.accumulate_step)
        if settings.api == "model":
            return TrainOneStepCell(make_forward(network), accumulator)
        return make_train_step(make_forward(network), accumulator, pieces=settings.pieces)

    def order(self, epoch: int) -> list[np.ndarray]:
        """Return the rows of each microbatch of an epoch, in seeded order; the last one may be smaller.

        They are dealt out to the ranks one by one, so a window of all ranks holds the same digits as a window of a
        single process.
        """
        order = np.random.default_rng([self.settings.seed, epoch]).permutation(self.data.size)
        return cut(order, self.settings.batch_size)

    def make_test(self) -> Callable[[], float]:
        """Return `() -> accuracy in per cent`."""
        count_correct = CountCorrect(self.network)
        if self.settings.mode == "graph":
            count_correct = ms.jit(count_correct)
        return partial(evaluate, count_correct, self.mnist.test, self.settings)

    def counterpart(self) -> Task:
        """Return the same run with each window's digits as one batch."""
        return Task(self.mnist, self.settings.undivided(), self.source, "undivided")

    def describe_data(self) -> str:
        """Name the digits and count them."""
        return f"{self.source}: {self.data.size:,} digits to train on, {self.mnist.test.size:,} to test on"

    def data_figures(self) -> dict[str, Any]:
        """Count the digits."""
        return {"source": self.source, "train_digits": self.data.size, "test_digits": self.mnist.test.size}


def make_optimizer(network: Network, settings: Settings) -> nn.Optimizer:
    """Make the optimizer that the settings name."""
    parameters, lr, momentum = network.trainable_params(), settings.lr, settings.momentum
    if settings.optimizer == "adam":
        return make_adam(network, lr)
    if settings.optimizer == "momentum":
        return nn.Momentum(parameters, lr, 0.9 if momentum is None else momentum)
    return nn.SGD(parameters, lr, momentum or 0.0)


def evaluate(count_correct: Callable[..., Tensor], digits: Digits, settings: Settings) -> float:
    """Return the accuracy on all digits, in per cent, counted by a `CountCorrect`; each rank counts its part."""
    correct = [count_correct(*map(Tensor, digits.batch(rows)))
               for rows in cut(np.arange(digits.size), TEST_BATCH)[settings.rank::settings.ranks]]
    count = np.array([sum(int(count.asnumpy()) for count in correct)], np.int32)
    return 100 * int(of_all_ranks(count, settings).sum()) / digits.size
