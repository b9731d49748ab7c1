"""One update: normalise, clip, optimizer, hooks. What a window's gradient goes through, from top to bottom.

    gradient = sum of weight * gradient / contributors          # reduction="sum"
             = sum of weight * gradient / sum of the weights    # reduction="mean"
    gradient *= min(1, clip_norm / (norm + 1e-6))               # if clip_norm is given
    optimizer(gradient)
"""
from __future__ import annotations

from collections.abc import Callable
from math import nan
from typing import TYPE_CHECKING, Any, Optional, Union

import mindspore as ms
from mindspore import Parameter, Tensor, nn, ops

from ..arguments import instance_of, number
from ..tensors import Gradients, Numbers, Scalar, as_tensor, clip_factor, global_norm
from .buffers import state_parameter
from .kernels import Copying, in_place
from .optimizers import state_of

if TYPE_CHECKING:
    from ..distributed.exchange import OneDevice
    from .loss_scale import NoLossScale
    from .observer import Observer

REDUCTIONS = ("sum", "mean")


# A window of all ranks, exchanged and without a loss scale. A plain tuple: graph mode runs a named one in Python.
#   gradients: a Tensor for each parameter
#   unit:      what they count in
#   numbers:   sums over the ranks: the weight, the microbatches, how many ranks still have data, and the observer's
#   finite:    whether the guard accepts them: True, or a bool Tensor of shape () if it judges
Reduced = tuple[Gradients, Scalar, Numbers, Union[bool, Tensor]]


@ms.jit_class
class Mean:
    """Divide by the weights."""

    def factor(self, unit: Scalar, weight: Scalar) -> Scalar:
        """Return what makes a sum in this unit of weights the gradient. A window without weight is 0, not 0/0."""
        if not isinstance(weight, Tensor):
            return unit / weight if weight else 0.0
        return unit / ops.where(weight == 0, Tensor(1.0, ms.float32), weight)


@ms.jit_class
class Sum:
    """Divide by the ranks alone, as PyTorch's DistributedDataParallel does: the script divides its loss."""

    def __init__(self, contributors: int) -> None:
        self.contributors = contributors

    def factor(self, unit: Scalar, weight: Scalar) -> Scalar:
        """See `Mean`."""
        return unit / self.contributors


@ms.jit_class
class NoClip:
    """Leave the gradient as it is."""

    def clipped(self, gradients: Gradients, factor: Scalar) -> Scalar:
        """Return the factor on the gradients after clipping."""
        return factor


@ms.jit_class
class Clip:
    """Clip the norm of the gradient, and keep what it was in `grad_norm`."""

    def __init__(self, clip_norm: float, grad_norm: Parameter) -> None:
        self.clip_norm, self.grad_norm = clip_norm, grad_norm

    def clipped(self, gradients: Gradients, factor: Scalar) -> Scalar:
        """See `NoClip`."""
        norm = global_norm(gradients) * abs(factor)  # negative weights can make the factor negative
        ops.assign(self.grad_norm, norm)
        return factor * clip_factor(norm, self.clip_norm)


@ms.jit_class
class Reduce:
    """What makes one window out of the windows of all ranks: exchange, divide by the loss scale, judge."""

    def __init__(self, exchange: OneDevice, loss_scale: NoLossScale, guard: Any) -> None:
        self.exchange, self.loss_scale, self.guard = exchange, loss_scale, guard

    def __call__(self, gradients: Gradients, unit: Scalar, numbers: Numbers) -> Reduced:
        """Return the window of all ranks, given that of this one."""
        gradients, unit, numbers = self.exchange.window(gradients, unit, numbers)
        # Before anything is measured: norms and sums of scaled gradients would overflow where the gradients do not.
        gradients = self.loss_scale.divide(gradients)
        return gradients, unit, numbers, self.guard.accepts(gradients)


@ms.jit_class
class Update:
    """What an accumulator does with the gradient of a window.

    Args:
        optimizer: The optimizer.
        dtypes: dtypes of its parameters.
        normaliser: `Mean` or `Sum`.
        clip_norm: As in `Accumulator`.
        after_update: As in `Accumulator`.
        observer: What sees each update.
        own: Whether a window's gradients are the buffers themselves, not copies, and may be scaled in place.
        prefix: What the names of its state begin with.

    Attributes:
        step: Updates done: int32 Parameter of shape `()`.
        seen: Sum of their weights, rounded: int64 Parameter of shape `()`.
        announced: Nothing, or a Parameter: see `announcing`.
        grad_norm: Norm of the last gradient before clipping: float32 Parameter of shape `()`; NaN if not measured.
        parameters: Its state, that of a hook included.
    """

    def __init__(self, optimizer: Callable, dtypes: tuple[ms.Type, ...], normaliser: Any, clip_norm: Optional[float],
                 after_update: Optional[Callable], observer: Observer, own: bool, prefix: str) -> None:
        self.optimizer, self.dtypes, self.normaliser, self.observer = optimizer, dtypes, normaliser, observer
        self.scaling, self.copying = in_place(own), Copying()
        self.hooks, self.announced = () if after_update is None else (after_update,), ()
        self.step = state_parameter(f"{prefix}.update_step", (), ms.int32)
        self.seen = state_parameter(f"{prefix}.seen", (), ms.int64)
        self.grad_norm = state_parameter(f"{prefix}.grad_norm", (), ms.float32, nan)
        self.clip = NoClip() if clip_norm is None else Clip(clip_norm, self.grad_norm)
        self.parameters = (self.step, self.seen, self.grad_norm, *_state_of_hook(after_update, optimizer))

    def __call__(self, reduced: Reduced, buffered: bool) -> None:
        """Update once. `buffered`: whether the window comes out of the buffers."""
        gradients, unit, numbers = reduced[0], reduced[1], reduced[2]  # MindSpore warns of an unpacked, unused value
        weight = numbers[0]
        factor = self.normaliser.factor(unit, weight)
        self.observer.of_update(gradients, unit, weight, numbers[1:])
        factor = self.clip.clipped(gradients, factor)
        if isinstance(factor, Tensor):  # what scales in place has to wait until the observer has read the buffers
            factor = ops.depend(factor, ops.assign_add(self.step, 1))
        else:  # a statement of its own: a graph drops a result that has a name and no use
            ops.assign_add(self.step, 1)
        ops.assign_add(self.seen, ops.round(self._counted(weight)).astype(ms.int64))
        scaling = self.scaling if buffered else self.copying
        self.optimizer(scaling.scale(factor, gradients, self.dtypes))
        for hook in self.hooks:
            hook()

    def announcing(self) -> Parameter:
        """Return a Parameter that the next update counts in `seen` instead of its weight; negative: count the weight.

        For several losses, whose pieces all have weight 1. float32 of shape `()`. An update makes it negative again.
        Graphs that were compiled before do not read it. For the host.
        """
        if not self.announced:
            name = self.seen.name.removesuffix("seen") + "announced"
            self.announced = (state_parameter(name, (), ms.float32, -1.0),)
        return self.announced[0]

    def _counted(self, weight: Scalar) -> Tensor:
        counted = as_tensor(weight)
        for announced in self.announced:
            known = announced + 0.0
            counted = ops.where(known < 0, counted, known)
            ops.assign(announced, ops.depend(Tensor(-1.0, ms.float32), known))
        return counted


def normaliser_of(reduction: str, contributors: int) -> Any:
    """Return the normaliser for `reduction`, one of `REDUCTIONS`."""
    return Mean() if reduction == "mean" else Sum(contributors)


def checked_clip_norm(clip_norm: object) -> Optional[float]:
    """Return `clip_norm` as a float, or None. TypeError or ValueError if it is no number > 0."""
    if clip_norm is None:
        return None
    return number("clip_norm", clip_norm, lambda norm: norm > 0, "a number > 0",
                  'give a norm > 0, float("inf") to measure without clipping, or None')


def checked_hook(after_update: object) -> Optional[Callable]:
    """Return `after_update`. TypeError if it cannot be called."""
    if after_update is None:
        return None
    return instance_of("after_update", after_update, Callable, "a function without arguments, a Cell, or None")


def _state_of_hook(hook: Optional[Callable], optimizer: Callable) -> tuple[Parameter, ...]:
    """Return the Parameters of a hook that is a Cell or a method of one, without the network's and the optimizer's."""
    cell = getattr(hook, "__self__", hook)
    if not isinstance(cell, nn.Cell):
        return ()
    others = {id(p) for p in (*optimizer.parameters, *(p for _, p in state_of(optimizer)))}
    return tuple(p for p in cell.get_parameters() if id(p) not in others)
