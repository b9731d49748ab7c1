"""What runs on the device: the loss of a microbatch, the comparison's float64 gradients, a batch of testing."""
from __future__ import annotations

import mindspore as ms
from mindspore import ParameterTuple, Tensor, nn, ops

from .network import Network


class MeanCrossEntropy(nn.Cell):
    """Mean cross entropy, float32 `()`, of logits, float32 `(n, 10)`, and labels, int32 `(n,)`.

    nn.CrossEntropyLoss takes the logarithm in a kernel of its own, which MindSpore 2.10 splits among as many CPU threads as turn out
    to be fastest, and whose last bit depends on the split: one process in 30 reported other losses. LogSoftmax goes row by row.
    """

    def __init__(self) -> None:
        super().__init__()
        self.log_softmax = ops.LogSoftmax(axis=-1)
        self.nll = nn.NLLLoss()

    def construct(self, logits: Tensor, labels: Tensor) -> Tensor:
        """The loss, see the class."""
        return self.nll(self.log_softmax(logits), labels)


def make_forward(network: Network) -> nn.Cell:
    """The loss of images, uint8 `(n, 28, 28)`, and labels, int32 `(n,)`: float32 `()`."""
    return nn.WithLossCell(network, MeanCrossEntropy())


class Float64Optimizer(nn.Cell):
    """`optimizer`, fed by the float64 gradients of a float64 copy of its network.

    For comparing two runs. In float32 two orders of summation round differently, which now and then puts an activation
    on the other side of ReLU's kink, and from there the parameters part: by 3e-4 to 1e-3 after 3 epochs of the full
    MNIST (6 seeds, 32 x 2 against 64), as between any two correct runs. In float64 that does not happen, so that
    whatever difference is left comes from a wrong weight, divisor or window.

    Parameters and optimizer stay in float32, which is what MindSpore's SGD and Adam have kernels for.

    Attributes:
        parameters: The copy's.
    """

    def __init__(self, optimizer: nn.Optimizer, copy: Network) -> None:
        super().__init__(auto_prefix=False)
        # Names must be unique in one graph, and the network's own are in it.
        copy.update_parameters_name("float64.")
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


class CountCorrect(nn.Cell):
    """How many of the images, uint8 `(n, 28, 28)`, the network labels as in labels, int32 `(n,)`: int `()`."""

    def __init__(self, network: Network) -> None:
        super().__init__(auto_prefix=False)
        self.network = network

    def construct(self, images: Tensor, labels: Tensor) -> Tensor:
        """The count, see the class."""
        return (self.network(images).argmax(axis=1) == labels).astype(ms.int32).sum()
