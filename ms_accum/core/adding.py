"""One microbatch, or a piece of it: what its gradients go through on their way into the buffers.

    guard ─► weigh ─► exchange inside ─► buffers, weight_sum
"""
from __future__ import annotations

from typing import TYPE_CHECKING, Any

import mindspore as ms
from mindspore import Parameter, ops

from ..arguments import as_weight, checked_gradients
from ..tensors import as_tensor

if TYPE_CHECKING:
    from ..distributed.exchange import OneDevice
    from ..tensors import Gradients, Numbers, Scalar
    from .buffers import Buffers
    from .loss_scale import NoLossScale
    from .observer import Observer


@ms.jit_class
class Add:
    """What an accumulator does with the gradients of a microbatch or a piece.

    Args:
        expected: Names and shapes of the parameters.
        guard: What may leave them out.
        observer: What sees them.
        loss_scale: What the loss was multiplied by.
        exchange: What sums them over the ranks that exchange each microbatch.
        buffers: Where they go.
        weight_sum: Where their weight goes.
    """

    def __init__(self, expected: tuple[tuple, tuple], guard: Any, observer: Observer, loss_scale: NoLossScale,
                 exchange: OneDevice, buffers: Buffers, weight_sum: Parameter) -> None:
        self.expected, self.guard, self.observer, self.loss_scale = expected, guard, observer, loss_scale
        self.exchange, self.buffers, self.weight_sum = exchange, buffers, weight_sum

    def __call__(self, grads: Gradients, weight: Scalar, active: int) -> Numbers:
        """Add in a graph that does not read the buffers, each gradient as soon as it is made.

        Return sums over the ranks that exchange them: the weight, how many pieces were taken, `active`, and others.
        """
        gradients, numbers = self._weighed(grads, weight, active)
        added = self.buffers.add(gradients)
        # Whatever comes later waits for this, and this for the buffers.
        ops.assign_add(self.weight_sum, ops.depend(as_tensor(numbers[0]), added))
        return numbers

    def in_turn(self, grads: Gradients, weight: Scalar, active: int) -> Numbers:
        """Add in any graph. Return the same."""
        gradients, numbers = self._weighed(grads, weight, active)
        self.buffers.add_in_turn(gradients)
        ops.assign_add(self.weight_sum, numbers[0])
        return numbers

    def _weighed(self, grads: Gradients, weight: Scalar, active: int) -> tuple[Gradients, Numbers]:
        grads, weight = checked_gradients(*self.expected, grads), as_weight(weight)
        weight, taken = self.guard.weight(grads, weight)
        numbers = (weight, taken * active, active, *self.observer.of_piece(grads, weight, self.loss_scale))
        gradients, numbers = self.exchange.microbatch(self.buffers.weighed(grads, weight), numbers)
        if len(numbers) > 3:  # what the observer measured
            self.observer.include(numbers[3:])
        return gradients, numbers
