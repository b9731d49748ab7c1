"""What to do with NaN and infinity in a gradient: apply them, leave out a microbatch, or drop a window."""
from __future__ import annotations

from typing import Union

import mindspore as ms
from mindspore import Parameter, Tensor, ops

from .gradients import Gradients, Scalar, all_finite


@ms.jit_class
class ApplyAll:
    """Apply everything, without looking at it. The plain case, and the base of the others.

    Attributes:
        judges: Whether `accepts` may refuse a window.
        judges_pieces: Whether `weight` may leave out a piece.
    """

    judges = judges_pieces = False

    def __init__(self, skipped: Parameter) -> None:
        self.skipped = skipped

    def weight(self, gradients: Gradients, weight: Scalar) -> tuple[Scalar, Scalar]:
        """Return the weight that a piece of a microbatch counts with, and whether it is taken: 1 or 0."""
        return weight, 1

    def accepts(self, gradients: Gradients) -> Union[bool, Tensor]:
        """Return whether a window's gradient makes an update: True, or, if it `judges`, a bool Tensor of shape `()`."""
        return True


@ms.jit_class
class SkipMicrobatch(ApplyAll):
    """Give a microbatch (or a piece of one) that is not finite the weight 0, and count it in `skipped`.

    A microbatch of which nothing is taken does not count in the window.
    """

    judges_pieces = True

    def weight(self, gradients: Gradients, weight: Scalar) -> tuple[Tensor, Tensor]:
        """See `ApplyAll`. What has the weight 0 already is ignored in any case, and is not looked at."""
        weight = weight * ops.ones_like(self.skipped).astype(ms.float32)  # a Tensor, also of a number
        taken = ops.logical_or(all_finite((*gradients, weight)), weight == 0)
        ops.assign_add(self.skipped, 1 - taken.astype(ms.int32))
        return ops.where(taken, weight, ops.zeros_like(weight)), taken.astype(ms.int32)


@ms.jit_class
class SkipWindow(ApplyAll):
    """Drop a window whose gradient is not finite. A loss scaler needs it, too."""

    judges = True

    def accepts(self, gradients: Gradients) -> Tensor:
        """See `ApplyAll`."""
        return all_finite(gradients)


GUARDS = {"apply": ApplyAll, "skip_microbatch": SkipMicrobatch, "skip_window": SkipWindow}
