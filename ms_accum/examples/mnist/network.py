"""Define the tutorial's network and its loss."""
from __future__ import annotations

from math import sqrt

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops

from .data import CLASSES, SIDE

# Mean and standard deviation of the training pixels after division by 255, as in the tutorial.
MEAN = 0.1307
STD = 0.3081
# (pixel / 255 - MEAN) / STD as one product and one difference; folded here, because graph mode folds in float32.
SCALE = 1 / (255 * STD)
SHIFT = MEAN / STD


class Network(nn.Cell):
    """The network of MindSpore's gradient accumulation tutorial: 784-512-512-10 with ReLU.

    It normalises the pixels itself, so digits travel to the device as bytes. The parameters have the names of the
    tutorial's network, so a checkpoint of one loads into the other. The weights are uniform in ±1/sqrt(inputs), which
    is the default of `nn.Dense`, but drawn by NumPy from `seed` and thus the same on every device. `dtype` is that of
    the parameters and of everything between pixels and logits.
    """

    def __init__(self, seed: int, dtype: ms.Type = ms.float32) -> None:
        super().__init__()
        self.dtype = dtype
        rng = np.random.default_rng(seed)
        self.flatten = nn.Flatten()
        first, second, last = (_dense(*shape, rng, dtype) for shape in ((SIDE * SIDE, 512), (512, 512), (512, CLASSES)))
        self.dense_relu_sequential = nn.SequentialCell(first, nn.ReLU(), second, nn.ReLU(), last)

    def construct(self, images: Tensor) -> Tensor:
        """Return logits, float32 `(n, 10)`, of images, uint8 `(n, 28, 28)`."""
        pixels = self.flatten(images).astype(self.dtype)
        return self.dense_relu_sequential(pixels * SCALE - SHIFT).astype(ms.float32)


def _dense(inputs: int, outputs: int, rng: np.random.Generator, dtype: ms.Type) -> nn.Dense:
    bound = 1 / sqrt(inputs)
    weight, bias = (Tensor(rng.uniform(-bound, bound, shape).astype(np.float32), dtype)
                    for shape in ((outputs, inputs), outputs))
    return nn.Dense(inputs, outputs, weight_init=weight, bias_init=bias, dtype=dtype)


class MeanCrossEntropy(nn.Cell):
    """Return the mean cross entropy, float32 `()`, of logits, float32 `(n, 10)`, and labels, int32 `(n,)`.

    Not nn.CrossEntropyLoss: MindSpore 2.10 splits its logarithm among as many CPU threads as it finds fastest, and the
    last bit of the loss depends on the split. LogSoftmax goes row by row.
    """

    def __init__(self) -> None:
        super().__init__()
        self.log_softmax, self.nll = ops.LogSoftmax(), nn.NLLLoss()

    def construct(self, logits: Tensor, labels: Tensor) -> Tensor:
        """See the class."""
        return self.nll(self.log_softmax(logits), labels)


def make_forward(network: Network) -> nn.Cell:
    """Return the function from images, uint8 `(n, 28, 28)`, and labels, int32 `(n,)`, to the loss, float32 `()`."""
    return nn.WithLossCell(network, MeanCrossEntropy())
