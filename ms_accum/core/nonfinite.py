"""What to do with NaN and infinity in a gradient: apply them, leave out a microbatch, or drop a window."""
from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Optional, Union

import mindspore as ms
from mindspore import Parameter, Tensor, ops

from ..arguments import one_of, whole_number
from ..tensors import all_finite

if TYPE_CHECKING:
    from ..tensors import Gradients, Scalar
    from .counters import Counters

_STUCK = ("more than max_skips={} {} in a row were skipped ({} by now, {} in all), because their gradients were not "
          "finite, after update {}; look for NaN in the batches since then, lower the learning rate, or load a "
          "checkpoint; another call goes on")


class NoProgress(RuntimeError):
    """More was skipped in a row than `max_skips`. No graph has failed."""


@ms.jit_class
class ApplyAll:
    """Apply everything, without looking at it. The plain case, and the base of the others.

    Args:
        counters: Where it counts what it skips.
        update_step: Updates done.
        max_skips: See `Accumulator`.

    Attributes:
        noun: What is skipped.
        judges: Whether `accepts` may refuse a window.
        judges_pieces: Whether `weight` may leave out a piece.
    """

    judges = judges_pieces = False
    noun = "windows"

    def __init__(self, counters: Counters, update_step: Parameter, max_skips: Optional[int]) -> None:
        self.skipped, self.in_row, self.update_step = counters.skipped, counters.skipped_in_row, update_step
        self.counters, self.max_skips = counters, max_skips

    def weight(self, gradients: Gradients, weight: Scalar) -> tuple[Scalar, Scalar]:
        """Return the weight that a piece of a microbatch counts with, and whether it is taken: 1 or 0."""
        return weight, 1

    def accepts(self, gradients: Gradients) -> Union[bool, Tensor]:
        """Return whether a window's gradient makes an update: True, or, if it `judges`, a bool Tensor of shape `()`."""
        return True

    def applied(self) -> None:
        """Note that a window was applied."""

    def dropped(self) -> None:
        """Note that a window was dropped."""
        ops.assign_add(self.skipped, 1)
        ops.assign_add(self.in_row, 1)

    def require_progress(self) -> None:
        """Raise RuntimeError if more than `max_skips` were skipped in a row, and some of them since it was last raised.

        For the host: it waits for the device.
        """
        if self.max_skips is None:
            return
        in_row, skipped = int(self.in_row), int(self.skipped)
        if in_row > self.max_skips and skipped != self.counters.reported:
            self.counters.reported = skipped
            raise NoProgress(_STUCK.format(self.max_skips, self.noun, in_row, skipped, int(self.update_step)))


@ms.jit_class
class SkipMicrobatch(ApplyAll):
    """Give a microbatch (or a piece of one) that is not finite the weight 0, and count it in `skipped`.

    A microbatch of which nothing is taken does not count in the window.
    """

    judges_pieces = True
    noun = "microbatches or pieces"

    def weight(self, gradients: Gradients, weight: Scalar) -> tuple[Tensor, Tensor]:
        """See `ApplyAll`. What has the weight 0 already is ignored in any case, and is not looked at."""
        weight = weight * ops.ones_like(self.skipped).astype(ms.float32)  # a Tensor, also of a number
        ignored = weight == 0
        taken = ops.logical_or(all_finite((*gradients, weight)), ignored)
        missed = 1 - taken.astype(ms.int32)
        ops.assign_add(self.skipped, missed)
        ops.assign(self.in_row, (self.in_row + 1) * missed + self.in_row * ignored.astype(ms.int32))
        return ops.where(taken, weight, ops.zeros_like(weight)), taken.astype(ms.int32)


@ms.jit_class
class SkipWindow(ApplyAll):
    """Drop a window whose gradient is not finite. A loss scaler needs it, too."""

    judges = True

    def accepts(self, gradients: Gradients) -> Tensor:
        """See `ApplyAll`."""
        return all_finite(gradients)

    def applied(self) -> None:
        """See `ApplyAll`."""
        ops.assign(self.in_row, 0)


def guard_of(on_nonfinite: object, max_skips: object, scaled: bool) -> Callable[[Counters, Parameter], ApplyAll]:
    """Return what makes the guard of an accumulator, `scaled` if it has a loss scaler. TypeError or ValueError if one
    of the other arguments is invalid.
    """
    guards = {"apply": ApplyAll, "skip_microbatch": SkipMicrobatch, "skip_window": SkipWindow}
    guard = guards[one_of("on_nonfinite", on_nonfinite, tuple(guards))]
    if max_skips is not None and guard is ApplyAll and not scaled:
        raise ValueError(f'got max_skips={max_skips} with on_nonfinite="apply", which skips nothing; give '
                         '"skip_window" or "skip_microbatch"')
    if max_skips is not None:
        max_skips = whole_number("max_skips", max_skips, "it is the most skips in a row", minimum=0)
    return partial(SkipWindow if scaled else guard, max_skips=max_skips)
