"""A classifier to train, its loss, and data for it."""
import mindspore as ms
import numpy as np
from mindspore import Tensor, nn


class MLP(nn.Cell):
    """The network of tests/support/reference.py, with the same initial weights for the same seed."""

    def __init__(self, features=6, hidden=5, classes=3, seed=0):
        super().__init__()
        self.first = nn.Dense(features, hidden)
        self.second = nn.Dense(hidden, classes)
        rng = np.random.default_rng(seed)
        for parameter in self.trainable_params():
            parameter.set_data(ms.Tensor(rng.normal(0, 0.5, parameter.shape), ms.float32))

    def construct(self, x):
        return self.second(ms.ops.tanh(self.first(x)))


def mean_loss(network):
    """Return the forward function `(x, y) -> loss` of a classifier, whose loss is float32 in any case."""
    loss_fn = nn.CrossEntropyLoss()

    def forward_fn(x, y):
        return loss_fn(network(x).astype(ms.float32), y)
    return forward_fn


def batches(sizes, features=6, classes=3, seed=1):
    """Return [(x float64 (n, features), y int (n,))] for each n in sizes."""
    rng = np.random.default_rng(seed)
    return [(rng.normal(size=(n, features)), rng.integers(0, classes, n)) for n in sizes]


def tensors(x, y):
    """Return a batch of `batches` as Tensors."""
    return Tensor(x, ms.float32), Tensor(y, ms.int32)
