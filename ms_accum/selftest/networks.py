"""A classifier to train, its losses, and data for it."""
from __future__ import annotations

from collections.abc import Callable, Iterable

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops

NO_TARGET = -100


class MLP(nn.Cell):
    """Classify with two layers; the initial weights depend only on the seed."""

    def __init__(self, features: int = 6, hidden: int = 5, classes: int = 3, seed: int = 0,
                 dtype: ms.Type = ms.float32) -> None:
        super().__init__()
        self.first = nn.Dense(features, hidden, dtype=dtype)
        self.second = nn.Dense(hidden, classes, dtype=dtype)
        rng = np.random.default_rng(seed)
        for parameter in self.trainable_params():
            parameter.set_data(Tensor(rng.normal(0, 0.5, parameter.shape), dtype))

    def construct(self, x: Tensor) -> Tensor:
        """Return the logits."""
        return self.second(ops.tanh(self.first(x)))


def mean_loss(network: nn.Cell) -> Callable:
    """Return the forward function `(x, y) -> loss` of a classifier; the loss is always float32."""
    loss_fn = nn.CrossEntropyLoss()

    def forward_fn(x: Tensor, y: Tensor) -> Tensor:
        return loss_fn(network(x).astype(ms.float32), y)
    return forward_fn


class TargetLoss(nn.Cell):
    """Return the mean or sum of the cross entropy over the targets that are not `NO_TARGET`, in float32."""

    def __init__(self, network: MLP, reduction: str = "mean") -> None:
        super().__init__(auto_prefix=False)
        self.network, self.reduction, self.dtype = network, reduction, network.first.weight.dtype

    def construct(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the loss of x (..., features), float32, and y (...), int32."""
        logits = self.network(x.astype(self.dtype)).astype(ms.float32)
        return ops.cross_entropy(logits.reshape(-1, logits.shape[-1]), y.reshape(-1), ignore_index=NO_TARGET,
                                 reduction=self.reduction)


def targets(x: Tensor, y: Tensor) -> Tensor:
    """Return the number of targets: int Tensor of shape `()`."""
    return (y != NO_TARGET).sum()


def batches(sizes: Iterable[int], features: int = 6, classes: int = 3, seed: int = 1) -> list[tuple]:
    """Return [(x float64 (n, features), y int (n,))] for each n in sizes."""
    rng = np.random.default_rng(seed)
    return [(rng.normal(size=(n, features)), rng.integers(0, classes, n)) for n in sizes]


def tensors(x: np.ndarray, y: np.ndarray) -> tuple[Tensor, Tensor]:
    """Return a batch of `batches` as Tensors."""
    return Tensor(x, ms.float32), Tensor(y, ms.int32)
