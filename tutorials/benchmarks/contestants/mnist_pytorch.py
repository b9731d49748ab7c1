"""An epoch over digits in PyTorch: a Dataset that transforms each digit on its way, and a TensorDataset."""
from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import torch
from case import Case
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset

from .contract import Epochs
from .pytorch_ import PyTorch

MEAN = 0.1307
STD = 0.3081
IMAGE_HEADER = 16
LABEL_HEADER = 8


class PerSample(Dataset):
    """Digits that become float and normalised one at a time, as with torchvision's transforms."""

    def __init__(self, images: Tensor, labels: Tensor) -> None:
        self.images = images
        self.labels = labels

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return _normalised(self.images[index]), int(self.labels[index])


class PyTorchEpochs(Epochs):
    """DataLoader, eager forward and backward, optimizer at the boundary."""

    def __init__(self, dataset: type[Dataset], case: Case) -> None:
        images, labels = _digits(Path(case.folder) / "train")
        self.dataset = dataset(images if dataset is PerSample else _normalised(images), labels)
        super().__init__(case)

    def build(self) -> PyTorch:
        return PyTorch(False, self.case)

    def epoch(self, trained: PyTorch, digits: int | None) -> None:
        some = self.dataset if digits is None else Subset(self.dataset, range(digits))
        for images, labels in DataLoader(some, batch_size=self.case.batch, shuffle=True):
            loss = trained.call(images, labels)
        trained.wait(loss)

    def parameters(self, trained: PyTorch) -> list[np.ndarray]:
        return trained.parameters()


def _normalised(images: Tensor) -> Tensor:
    return (images.float() / 255 - MEAN) / STD


def _digits(folder: Path) -> tuple[Tensor, Tensor]:
    """Images, uint8 `(n, 784)`, and labels, int64 `(n,)`."""
    images = np.fromfile(folder / "train-images-idx3-ubyte", np.uint8, offset=IMAGE_HEADER).reshape(-1, 784)
    labels = np.fromfile(folder / "train-labels-idx1-ubyte", np.uint8, offset=LABEL_HEADER)
    return torch.from_numpy(images), torch.from_numpy(labels).long()


CONTESTANTS = {"pytorch-dataset": partial(PyTorchEpochs, PerSample), "pytorch-tensors": partial(PyTorchEpochs, TensorDataset)}
