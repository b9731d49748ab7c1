"""What to do with NaN and infinity in a gradient: apply them, or skip and count them."""
from __future__ import annotations

from typing import Union

import mindspore as ms
from mindspore import Parameter, Tensor, ops

from .gradients import Gradients, Scalar, all_finite, mapped, multiply_no_nan


@ms.jit_class
class AnyMicrobatch:
    """Take every microbatch, without looking at it."""

    def bad(self, gradients: Gradients, weight: Scalar) -> Scalar:
        """Return whether to skip a microbatch on this rank: 0, or a float32 Tensor of shape `()`."""
        return 0.0

    def take(self, bad: Scalar) -> Tensor:
        """Return whether to add it, given the sum of `bad` over all ranks: int32 Tensor of shape `()`."""
        return Tensor(1, ms.int32)

    def kept(self, taken: Tensor, values: tuple[Scalar, ...]) -> tuple[Scalar, ...]:
        """Return what to add of a microbatch: its values, or zeros if it is not taken."""
        return values


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

    def kept(self, taken: Tensor, values: tuple[Scalar, ...]) -> tuple[Tensor, ...]:
        """See `AnyMicrobatch`. Multiplied, for a branch would make every graph wait here on an accelerator."""
        return mapped(_if_taken, taken, values)


@ms.jit_class
class AnyWindow:
    """Update with every window, without looking at it."""

    judges = False

    def accepts(self, gradients: Gradients) -> Union[bool, Tensor]:
        """Return whether a window's gradient makes an update: True, or, if it `judges`, a bool Tensor of shape `()`."""
        return True

    def count(self, finite: Union[bool, Tensor]) -> None:
        """Count the window if it is dropped."""


@ms.jit_class
class FiniteWindow:
    """Drop a window whose gradient is not finite; see `AnyWindow` for the methods."""

    judges = True

    def __init__(self, skipped: Parameter) -> None:
        self.skipped = skipped

    def accepts(self, gradients: Gradients) -> Tensor:
        """See `AnyWindow`."""
        return all_finite(gradients)

    def count(self, finite: Union[bool, Tensor]) -> None:
        """See `AnyWindow`."""
        ops.assign_add(self.skipped, 1 - finite.astype(ms.int32) if isinstance(finite, Tensor) else 1 - int(finite))


def _if_taken(taken: Tensor, value: Scalar) -> Tensor:
    value = value if isinstance(value, Tensor) else Tensor(value, ms.float32)
    return multiply_no_nan(value, taken.astype(value.dtype))
