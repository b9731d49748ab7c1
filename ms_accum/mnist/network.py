"""Define what runs on the device: the tutorial's network, its test, and float64 gradients to compare runs."""
from __future__ import annotations

from math import sqrt

import mindspore as ms
import numpy as np
from mindspore import ParameterTuple, Tensor, nn, ops

from ms_accum.reference.network import MeanCrossEntropy

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
        layers = [_dense(*shape, rng, dtype) for shape in ((SIDE * SIDE, 512), (512, 512), (512, CLASSES))]
        self.dense_relu_sequential = nn.SequentialCell(layers[0], nn.ReLU(), layers[1], nn.ReLU(), layers[2])

    def construct(self, images: Tensor) -> Tensor:
        """Return logits, float32 `(n, 10)`, of images, uint8 `(n, 28, 28)`."""
        pixels = self.flatten(images).astype(self.dtype)
        return self.dense_relu_sequential(pixels * SCALE - SHIFT).astype(ms.float32)


def _dense(inputs: int, outputs: int, rng: np.random.Generator, dtype: ms.Type) -> nn.Dense:
    bound = 1 / sqrt(inputs)
    weight, bias = (Tensor(rng.uniform(-bound, bound, shape).astype(np.float32), dtype)
                    for shape in ((outputs, inputs), outputs))
    return nn.Dense(inputs, outputs, weight_init=weight, bias_init=bias, dtype=dtype)


def make_forward(network: Network) -> nn.Cell:
    """Return the function from images, uint8 `(n, 28, 28)`, and labels, int32 `(n,)`, to the loss, float32 `()`."""
    return nn.WithLossCell(network, MeanCrossEntropy())


class CountCorrect(nn.Cell):
    """Count the images, uint8 `(n, 28, 28)`, that the network labels as in labels, int32 `(n,)`: int `()`."""

    def __init__(self, network: Network) -> None:
        super().__init__(auto_prefix=False)
        self.network = network

    def construct(self, images: Tensor, labels: Tensor) -> Tensor:
        """See the class."""
        return (self.network(images).argmax(axis=1) == labels).astype(ms.int32).sum()


class Float64Optimizer(nn.Cell):
    """Run `optimizer` on the float64 gradients of a float64 copy of its network.

    This makes two runs comparable. In float32, two orders of summation round differently, and now and then that puts an
    activation on the other side of ReLU's kink. From there the parameters drift apart: by 3e-4 to 1e-3 after 3 epochs
    of the full MNIST (6 seeds, 32 x 2 against 64), as between any two correct runs. In float64 that does not happen, so
    any difference that is left comes from a wrong weight, divisor or window. Parameters and optimizer stay in float32,
    because MindSpore's SGD and Adam have kernels only for that. `parameters` are those of the copy.
    """

    def __init__(self, optimizer: nn.Optimizer, copy: Network) -> None:
        super().__init__(auto_prefix=False)
        copy.update_parameters_name("float64.")  # names must be unique in a graph
        self.optimizer = optimizer
        self.originals = optimizer.parameters
        self.parameters = ParameterTuple(copy.trainable_params())
        for parameter, original in zip(self.parameters, self.originals):
            parameter.set_data(original.value().astype(ms.float64))

    def construct(self, gradients: tuple[Tensor, ...]) -> bool:
        """Update the originals by `gradients`, float64, and bring the copy up to date."""
        self.optimizer(tuple([gradient.astype(ms.float32) for gradient in gradients]))
        for parameter, original in zip(self.parameters, self.originals):
            ops.assign(parameter, original.astype(ms.float64))
        return True
