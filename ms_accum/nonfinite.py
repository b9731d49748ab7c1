"""What to do with NaN and infinity in a gradient: apply them, or skip and count them."""
from __future__ import annotations

from typing import Union

import mindspore as ms
from mindspore import Parameter, Tensor, ops

from .gradients import Gradients, Scalar, all_finite


@ms.jit_class
class AnyMicrobatch:
    """Take every microbatch, without looking at it."""

    def bad(self, gradients: Gradients, weight: Scalar) -> Scalar:
        """Return whether to skip a microbatch on this rank: 0, or a float32 Tensor of shape `()`."""
        return 0.0

    def take(self, bad: Scalar) -> Tensor:
        """Return whether to add it, given the sum of `bad` over all ranks: int32 Tensor of shape `()`."""
        return Tensor(1, ms.int32)

    def stores(self, taken: Tensor, weight: Scalar) -> Union[bool, Tensor]:
        """Return whether its gradient is added to the buffers."""
        return weight != 0


@ms.jit_class
class FiniteMicrobatch:
    """Skip a microbatch whose gradient is not finite; see `AnyMicrobatch` for the methods."""

    def __init__(self, skipped: Parameter) -> None:
        self.skipped = skipped

    def bad(self, gradients: Gradients, weight: Scalar) -> Tensor:
        """See `AnyMicrobatch`."""
        return ops.logical_and(ops.logical_not(all_finite(gradients)), weight != 0).astype(ms.float32)

    def take(self, bad: Tensor) -> Tensor:
        """See `AnyMicrobatch`."""
        taken = (bad == 0).astype(ms.int32)
        ops.assign_add(self.skipped, 1 - taken)
        return taken

    def stores(self, taken: Tensor, weight: Scalar) -> Tensor:
        """See `AnyMicrobatch`."""
        return ops.logical_and(taken > 0, weight != 0)


@ms.jit_class
class AnyWindow:
    """Update with every window, without looking at it."""

    def accepts(self, gradients: Gradients) -> Union[bool, Tensor]:
        """Return whether a window's gradient makes an update: True, or a bool Tensor of shape `()`."""
        return True


@ms.jit_class
class FiniteWindow:
    """Drop a window whose gradient is not finite; see `AnyWindow` for the method."""

    def __init__(self, skipped: Parameter) -> None:
        self.skipped = skipped

    def accepts(self, gradients: Gradients) -> Tensor:
        """See `AnyWindow`."""
        finite = all_finite(gradients)
        ops.assign_add(self.skipped, ops.logical_not(finite).astype(ms.int32))
        return finite
