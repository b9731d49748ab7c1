"""What watches microbatches and updates without changing them; `batch_size.noise_scale` has one that measures."""
from __future__ import annotations

from typing import TYPE_CHECKING

import mindspore as ms
from mindspore import Parameter

from ..arguments import instance_of

if TYPE_CHECKING:
    from ..tensors import Gradients, Numbers, Scalar
    from .loss_scale import NoLossScale


@ms.jit_class
class Observer:
    """Watch nothing. The plain case, and the base of all others.

    Attributes:
        of_window: Its state that belongs to the open window.
        parameters: Its other state.
        watches: Whether it needs to see every microbatch: there are no windows without buffers then.
    """

    of_window: tuple[Parameter, ...] = ()
    parameters: tuple[Parameter, ...] = ()
    watches = False

    def bind(self, prefix: str) -> Observer:
        """Name the state after an accumulator's `prefix`, and return the observer. ValueError if it has another one."""
        return self

    def of_piece(self, gradients: Gradients, weight: Scalar, loss_scale: NoLossScale) -> Numbers:
        """Return what to sum over the ranks that exchange microbatches: numbers or float32 Tensors of shape `()`.

        `gradients` are those of this rank, multiplied by the loss scale; `weight` is 0 for what is ignored.
        """
        return ()

    def include(self, numbers: Numbers) -> None:
        """Add to the open window what `of_piece` returned, summed."""

    def open_window(self) -> Numbers:
        """Return what the open window holds, to be summed over the ranks that exchange windows."""
        return ()

    def of_update(self, gradients: Gradients, unit: Scalar, weight: Scalar, numbers: Numbers) -> None:
        """See an update before clipping: the mean gradient is `unit / weight * gradients`.

        `numbers` are sums over the window of all ranks: microbatches, ranks that ask, and what `open_window` returned.
        """

    def empty(self) -> None:
        """Forget the open window."""


def checked_observer(noise_scale: object) -> Observer:
    """Return `noise_scale`, or what watches nothing for None. TypeError if it is something else."""
    return Observer() if noise_scale is None else instance_of(
        "noise_scale", noise_scale, Observer, "a GradientNoiseScale, or None")
