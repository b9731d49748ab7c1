"""An epoch over digits in PyTorch: a Dataset that transforms each digit on its way, and a TensorDataset."""
from __future__ import annotations

from functools import partial
from pathlib import Path
from time import perf_counter

import numpy as np
import torch
from case import EpochCase
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset

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


class PyTorchEpoch:
    """DataLoader, eager forward and backward, optimizer at the boundary."""

    def __init__(self, dataset: type[Dataset], case: EpochCase) -> None:
        self.case = case
        images, labels = _digits(Path(case.folder) / "train")
        self.dataset = dataset(images if dataset is PerSample else _normalised(images), labels)
        self.trained = PyTorch(False, case.mlp)

    def epoch(self, trained: PyTorch, dataset: Dataset) -> None:
        for images, labels in DataLoader(dataset, batch_size=self.case.batch, shuffle=True):
            loss = trained.call(images, labels)
        trained.wait(loss)

    def agree(self, windows: int) -> list[np.ndarray]:
        """Parameters after as many epochs of one window: whatever the order within it, the update is the same."""
        trained = PyTorch(False, self.case.mlp)
        for _ in range(windows):
            self.epoch(trained, Subset(self.dataset, range(self.case.window)))
        return trained.parameters()

    def time(self, microbatches: int) -> float:
        """Seconds of an epoch."""
        start = perf_counter()
        self.epoch(self.trained, self.dataset)
        return perf_counter() - start


def _normalised(images: Tensor) -> Tensor:
    return (images.float() / 255 - MEAN) / STD


def _digits(folder: Path) -> tuple[Tensor, Tensor]:
    """Images, uint8 `(n, 784)`, and labels, int64 `(n,)`."""
    images = np.fromfile(folder / "train-images-idx3-ubyte", np.uint8, offset=IMAGE_HEADER).reshape(-1, 784)
    labels = np.fromfile(folder / "train-labels-idx1-ubyte", np.uint8, offset=LABEL_HEADER)
    return torch.from_numpy(images), torch.from_numpy(labels).long()


CONTESTANTS = {"pytorch-dataset": partial(PyTorchEpoch, PerSample), "pytorch-tensors": partial(PyTorchEpoch, TensorDataset)}
