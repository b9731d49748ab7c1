"""The network of MindSpore's gradient accumulation tutorial: 784-512-512-10 with ReLU."""
from __future__ import annotations

from math import sqrt

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn

from .idx import CLASSES, SIDE

# Mean and standard deviation of the training pixels after division by 255, as in the tutorial.
MEAN = 0.1307
STD = 0.3081
# (pixel / 255 - MEAN) / STD as one product and one difference. Folded here: graph mode folds constants in float32.
SCALE = 1 / (255 * STD)
SHIFT = MEAN / STD


class Network(nn.Cell):
    """Logits for digits; normalises them itself, so that digits travel to the device as bytes.

    Its parameters have the names of the tutorial's network: a checkpoint of the one loads into the other.

    Args:
        seed: Of the initial weights: uniform in ±1/sqrt(inputs), which is the default of `nn.Dense`, but drawn by NumPy
            and thus the same on every device, without a global seed.
        dtype: Of the parameters and of everything between pixels and logits.
    """

    def __init__(self, seed: int, dtype: ms.Type = ms.float32) -> None:
        super().__init__()
        self.dtype = dtype
        rng = np.random.default_rng(seed)
        self.flatten = nn.Flatten()
        self.dense_relu_sequential = nn.SequentialCell(
            _dense(SIDE * SIDE, 512, rng, dtype),
            nn.ReLU(),
            _dense(512, 512, rng, dtype),
            nn.ReLU(),
            _dense(512, CLASSES, rng, dtype),
        )

    def construct(self, images: Tensor) -> Tensor:
        """Logits, float32 `(n, 10)`, of images, uint8 `(n, 28, 28)`."""
        pixels = self.flatten(images).astype(self.dtype)
        return self.dense_relu_sequential(pixels * SCALE - SHIFT).astype(ms.float32)


def largest_difference(one: Network, other: Network) -> float:
    """Largest absolute difference between the parameters of two networks; NaN if there is one anywhere."""
    pairs = zip(one.get_parameters(), other.get_parameters())
    return float(np.max([np.abs(a.asnumpy() - b.asnumpy()).max() for a, b in pairs]))


def _dense(inputs: int, outputs: int, rng: np.random.Generator, dtype: ms.Type) -> nn.Dense:
    bound = 1 / sqrt(inputs)
    weight = rng.uniform(-bound, bound, (outputs, inputs)).astype(np.float32)
    bias = rng.uniform(-bound, bound, outputs).astype(np.float32)
    return nn.Dense(inputs, outputs, weight_init=Tensor(weight, dtype), bias_init=Tensor(bias, dtype), dtype=dtype)
