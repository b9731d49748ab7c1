"""What runs on the device: one microbatch of training, one batch of testing. Cells, for MindSpore to compile or not."""
from __future__ import annotations

import mindspore as ms
from mindspore import ParameterTuple, Tensor, nn, ops

from ms_accum.accumulator import Accumulator

from .network import Network


class TrainStep(nn.Cell):
    """One microbatch: forward, backward, accumulate; returns its mean loss, float32 `()`.

    A Cell, since MindSpore warns of a jitted function that it compiles for a second run, but not of a Cell.
    """

    def __init__(self, network: Network, accumulator: Accumulator) -> None:
        super().__init__(auto_prefix=False)
        self.accumulator = accumulator
        loss_fn = nn.CrossEntropyLoss()

        def forward_fn(images: Tensor, labels: Tensor) -> Tensor:
            return loss_fn(network(images), labels)

        self.value_and_grad = ms.value_and_grad(forward_fn, None, network.trainable_params())

    def construct(self, images: Tensor, labels: Tensor, weight: float) -> Tensor:
        loss, gradients = self.value_and_grad(images, labels)
        self.accumulator(gradients, weight)
        return loss


class Float64TrainStep(TrainStep):
    """As `TrainStep`, with gradients in float64; parameters and optimizer stay in float32.

    For comparing two runs. In float32 two orders of summation round differently, which now and then puts an activation
    on the other side of ReLU's kink, and from there the parameters part: by 3e-4 to 1e-3 after 3 epochs of the full
    MNIST (6 seeds, 32 x 2 against 64), as between any two correct runs. In float64 that does not happen, so that
    whatever difference is left comes from a wrong weight, divisor or window.

    The gradients are those of a float64 copy of the network, brought up to date before each microbatch.
    """

    def __init__(self, network: Network, accumulator: Accumulator) -> None:
        copy = Network(seed=0, dtype=ms.float64)
        # Names must be unique in one graph, and through the optimizer the network's own are in it.
        copy.update_parameters_name("float64.")
        super().__init__(copy, accumulator)
        self.parameters_float32 = ParameterTuple(network.trainable_params())
        self.parameters_float64 = ParameterTuple(copy.trainable_params())

    def construct(self, images: Tensor, labels: Tensor, weight: float) -> Tensor:
        for copy, parameter in zip(self.parameters_float64, self.parameters_float32):
            ops.assign(copy, parameter.astype(ms.float64))
        loss, gradients = self.value_and_grad(images, labels)
        self.accumulator(gradients, weight)
        return loss


class CountCorrect(nn.Cell):
    """How many of the images, uint8 `(n, 28, 28)`, the network labels as in labels, int32 `(n,)`: int `()`."""

    def __init__(self, network: Network) -> None:
        super().__init__(auto_prefix=False)
        self.network = network

    def construct(self, images: Tensor, labels: Tensor) -> Tensor:
        return (self.network(images).argmax(axis=1) == labels).astype(ms.int32).sum()
