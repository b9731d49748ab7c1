"""Cells for a network or an optimizer: one whose gradient is not linear, one that keeps what it was given."""
import mindspore as ms
import numpy as np
from mindspore import Parameter, ParameterTuple, Tensor, nn, ops


class Clip(nn.Cell):
    """The identity, whose backward pass is not linear: it clips gradients to ±bound."""

    def __init__(self, bound):
        super().__init__()
        self.bound = bound

    def construct(self, x):
        return x

    def bprop(self, x, out, dout):
        return (ops.clamp(dout, -self.bound, self.bound),)


class Counting(nn.Cell):
    """An optimizer that counts its calls and keeps the gradients it got, in graph mode too."""

    def __init__(self, weights):
        super().__init__()
        self.parameters = weights
        self.seen = ParameterTuple([Parameter(Tensor(np.zeros(p.shape), p.dtype), f"seen.{p.name}") for p in weights])
        self.calls = Parameter(Tensor(0, ms.int32), name="calls")

    def construct(self, grads):
        for seen, grad in zip(self.seen, grads):
            ops.assign(seen, grad)
        ops.assign_add(self.calls, 1)
        return True


class Mean(nn.Cell):
    """The mean of a network's outputs, as a loss."""

    def __init__(self, network):
        super().__init__()
        self.network = network

    def construct(self, x):
        return self.network(x).mean()
