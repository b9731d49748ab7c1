"""An epoch over digits in MindSpore: the loop of `ms-accum mnist`, and the tutorial's own."""
from __future__ import annotations

from functools import partial
from pathlib import Path
from time import perf_counter

import mindspore as ms
import numpy as np
from case import EpochCase, initial_weights, mlp_shapes
from mindspore import Tensor, dataset, nn, ops
from mindspore.dataset import transforms, vision

from ms_accum import avoid_busy_waiting, make_train_step
from ms_accum.mnist.data import Digits, load_folder
from ms_accum.mnist.network import MEAN, STD, Network, make_forward
from ms_accum.mnist.train import order
from ms_accum.step import TrainStep

from .mindspore_ import TwoBuffers


def network_of(case: EpochCase) -> Network:
    """The tutorial's network with the case's initial weights."""
    network = Network(case.seed)
    for parameter, value in zip(network.trainable_params(), initial_weights(mlp_shapes(case.mlp), case.seed)):
        parameter.set_data(Tensor(value))
    return network


class Reference:
    """The loop of `ms-accum mnist`, without its test."""

    def __init__(self, case: EpochCase) -> None:
        avoid_busy_waiting()
        self.case = case
        self.digits = load_folder(Path(case.folder)).train
        _, self.train_step = self.build()
        self.epochs = 0

    def build(self) -> tuple[Network, TrainStep]:
        """The network with its initial weights, and a train step."""
        network = network_of(self.case)
        optimizer = nn.SGD(network.trainable_params(), self.case.lr)
        return network, make_train_step(make_forward(network), optimizer, self.case.accumulate_step)

    def epoch(self, train_step: TrainStep, digits: Digits, epoch: int) -> None:
        rows = order(len(digits), self.case.batch, self.case.seed, epoch)
        for loss in list(train_step.epoch(map(digits.batch, rows))):
            loss.asnumpy()

    def agree(self, windows: int) -> list[np.ndarray]:
        """Parameters after as many epochs of one window: whatever the order within it, the update is the same."""
        one_window = Digits(self.digits.images[:self.case.window], self.digits.labels[:self.case.window])
        network, train_step = self.build()
        for epoch in range(windows):
            self.epoch(train_step, one_window, epoch)
        return [p.asnumpy() for p in network.trainable_params()]

    def time(self, microbatches: int) -> float:
        """Seconds of the next epoch; `microbatches` is how many it has."""
        start = perf_counter()
        self.epochs += 1
        self.epoch(self.train_step, self.digits, self.epochs)
        return perf_counter() - start


class TutorialLoop:
    """A pipeline of one map per transform, a compiled train step around the tutorial's accumulator, the loss divided by N."""

    def __init__(self, blocking: bool, case: EpochCase) -> None:
        if blocking:
            avoid_busy_waiting()
        self.case = case
        self.images = str(Path(case.folder) / "train")
        self.network, self.train_step = self.build()
        self.dataset = self.pipeline(None)

    def build(self) -> tuple[nn.Cell, ms.jit]:
        """The network with its initial weights, and a train step of its own: its accumulator's counter never realigns."""
        pieces = self.case.accumulate_step
        layers = [nn.Flatten(), nn.Dense(784, 512), nn.ReLU(), nn.Dense(512, 512), nn.ReLU(), nn.Dense(512, 10)]
        network = nn.SequentialCell(layers)
        for parameter, value in zip(network.trainable_params(), initial_weights(mlp_shapes(self.case.mlp), self.case.seed)):
            parameter.set_data(Tensor(value))
        loss_fn = nn.CrossEntropyLoss()
        accumulator = TwoBuffers(nn.SGD(network.trainable_params(), self.case.lr), pieces)

        def forward_fn(images: Tensor, labels: Tensor) -> Tensor:
            return loss_fn(network(images), labels) / pieces

        grad_fn = ms.value_and_grad(forward_fn, None, network.trainable_params())

        @ms.jit
        def train_step(images: Tensor, labels: Tensor) -> Tensor:
            loss, grads = grad_fn(images, labels)
            return ops.depend(loss, accumulator(grads))

        return network, train_step

    def pipeline(self, digits: int | None) -> dataset.Dataset:
        """Shuffled microbatches of all digits, or of the first `digits` in order."""
        source = dataset.MnistDataset(self.images, num_samples=digits, shuffle=digits is None)
        for transform in (vision.Rescale(1 / 255, 0), vision.Normalize(mean=(MEAN,), std=(STD,)), vision.HWC2CHW()):
            source = source.map(transform, "image")
        return source.map(transforms.TypeCast(ms.int32), "label").batch(self.case.batch)

    def epoch(self, train_step: ms.jit, source: dataset.Dataset) -> None:
        for images, labels in source.create_tuple_iterator():
            loss = train_step(images, labels)
        loss.asnumpy()

    def agree(self, windows: int) -> list[np.ndarray]:
        """As `Reference.agree`."""
        network, train_step = self.build()
        for _ in range(windows):
            self.epoch(train_step, self.pipeline(self.case.window))
        return [p.asnumpy() for p in network.trainable_params()]

    def time(self, microbatches: int) -> float:
        """Seconds of an epoch."""
        start = perf_counter()
        self.epoch(self.train_step, self.dataset)
        return perf_counter() - start


CONTESTANTS = {
    "reference": Reference,
    "tutorial-loop": partial(TutorialLoop, False),
    "tutorial-loop-blocking": partial(TutorialLoop, True),
}
