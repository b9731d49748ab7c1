"""An epoch over digits in MindSpore: the loop of `ms-accum mnist`, and the tutorial's own."""
from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np
from case import Case, initial_weights, mlp_shapes
from mindspore import Tensor, dataset, nn, ops
from mindspore.dataset import transforms, vision

from ms_accum import avoid_busy_waiting, make_train_step
from ms_accum.mnist.data import Digits, load_folder
from ms_accum.mnist.network import MEAN, STD, Network, make_forward
from ms_accum.mnist.train import order

from .contract import Epochs
from .mindspore_ import TwoBuffers


def initialised(network: nn.Cell, case: Case) -> nn.Cell:
    """The network with the case's initial weights."""
    for parameter, value in zip(network.trainable_params(), initial_weights(mlp_shapes(case), case.seed)):
        parameter.set_data(Tensor(value))
    return network


class MindSporeEpochs(Epochs):
    """Trains a network and its train step, `(network, train_step)`."""

    def parameters(self, trained: Any) -> list[np.ndarray]:
        return [p.asnumpy() for p in trained[0].trainable_params()]


class Reference(MindSporeEpochs):
    """The loop of `ms-accum mnist`, without its test."""

    def __init__(self, case: Case) -> None:
        avoid_busy_waiting()
        self.digits = load_folder(Path(case.folder)).train
        self.epochs = 0
        super().__init__(case)

    def build(self) -> Any:
        network = initialised(Network(self.case.seed), self.case)
        optimizer = nn.SGD(network.trainable_params(), self.case.lr)
        return network, make_train_step(make_forward(network), optimizer, self.case.accumulate_step)

    def epoch(self, trained: Any, digits: int | None) -> None:
        some = Digits(self.digits.images[:digits], self.digits.labels[:digits])
        self.epochs += 1
        rows = order(len(some), self.case.batch, self.case.seed, self.epochs)
        for loss in list(trained[1].epoch(map(some.batch, rows))):
            loss.asnumpy()


class TutorialLoop(MindSporeEpochs):
    """A pipeline of one map per transform, a compiled train step around the tutorial's accumulator, the loss divided by N."""

    def __init__(self, blocking: bool, case: Case) -> None:
        if blocking:
            avoid_busy_waiting()
        self.images = str(Path(case.folder) / "train")
        self.pipelines: dict[int | None, dataset.Dataset] = {}
        super().__init__(case)

    def build(self) -> Any:
        """With a train step of its own: its accumulator's counter never realigns."""
        pieces = self.case.accumulate_step
        layers = [nn.Flatten(), nn.Dense(784, 512), nn.ReLU(), nn.Dense(512, 512), nn.ReLU(), nn.Dense(512, 10)]
        network = initialised(nn.SequentialCell(layers), self.case)
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

    def epoch(self, trained: Any, digits: int | None) -> None:
        if digits not in self.pipelines:
            self.pipelines[digits] = self.pipeline(digits)
        for images, labels in self.pipelines[digits].create_tuple_iterator():
            loss = trained[1](images, labels)
        loss.asnumpy()


CONTESTANTS = {
    "ms_accum-epoch": Reference,
    "tutorial-loop": partial(TutorialLoop, False),
    "tutorial-loop-blocking": partial(TutorialLoop, True),
}
