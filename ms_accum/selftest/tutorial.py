"""An accumulator that behaves like that of MindSpore's tutorial, to compare ms_accum with."""
from __future__ import annotations

from collections.abc import Callable

import mindspore as ms
from mindspore import Parameter, Tensor, nn, ops

from ..mindspore_api import jit_class


@jit_class
class TwoBuffers:
    """Accumulate in sums, with zeros to clear them and a counter that only grows. The script divides its loss."""

    def __init__(self, optimizer: nn.Optimizer, length: int) -> None:
        self.optimizer, self.length = optimizer, length
        self.sums = optimizer.parameters.clone("sums", init="zeros")
        self.zeros = optimizer.parameters.clone("zeros", init="zeros")
        self.counter = Parameter(Tensor(1, ms.int32), name="counter")

    def __call__(self, grads: tuple) -> bool:
        """Add the gradients of a microbatch, and update when the window is full."""
        for total, grad in zip(self.sums, grads):
            ops.assign_add(total, grad)
        if self.counter % self.length == 0:
            self.optimizer(self.sums)
            for total, zero in zip(self.sums, self.zeros):
                ops.assign(total, zero)
        ops.assign_add(self.counter, 1)
        return True


def train_step_with(accumulator: Callable, grad_fn: Callable) -> Callable:
    """Return the compiled train step `(x, y) -> loss` of a script that adds its gradients by hand."""
    @ms.jit
    def train_step(x: Tensor, y: Tensor) -> Tensor:
        loss, grads = grad_fn(x, y)
        return ops.depend(loss, accumulator(grads))

    return train_step
