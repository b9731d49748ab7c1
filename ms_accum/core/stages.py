"""Stages: loss scale, skipping of NaN and infinity, and the base class of other optional stations of a gradient."""
from __future__ import annotations

from typing import Any, Union

import mindspore as ms
from mindspore import Parameter, Tensor, amp, ops

from ..arguments import instance_of, one_of
from ..distributed.exchange import OneDevice
from ..mindspore_api import jit_class
from ..tensors import Gradients, Numbers, Scalar, as_tensor, cast, finite_sum


@jit_class
class Stage:
    """Change or observe gradients on their way from the loss to the optimizer: a base class. Override what you need.

        loss * loss_scale ─► backward ─ weigh, measure ─► buffers           # each piece of a microbatch
        exchange ─ accepts ─► on_update ─► optimizer ─ on_close             # each window

    By default, no method changes anything. All methods except `bind` are compiled in graph mode. Give it by `stages=`.

    Attributes:
        measures: Number of values that `measure` returns; `measured`: where they are among a window's numbers.
        state: Its Parameters, which change only when a window closes. They are part of checkpoints.
        exchange: That of the accumulator, once the stage is part of one.

    Source: a chain of gradient transformations, as in optax.

    Example:
        >>> import mindspore as ms, numpy as np
        >>> from mindspore import nn, ops
        >>> from ms_accum import Stage, make_train_step
        >>> @ms.jit_class
        ... class Largest(Stage):
        ...     def __init__(self):
        ...         self.value = ms.Parameter(ms.Tensor(0.0), name="largest", requires_grad=False)
        ...         self.state = (self.value,)
        ...     def on_update(self, window):
        ...         gradients = window["gradients"]
        ...         ops.assign(self.value, gradients[0].max() * window["unit"] / window["weight"])
        >>> network, stage = nn.Dense(2, 1), Largest()
        >>> def forward_fn(x):
        ...     return network(x).mean()
        >>> train_step = make_train_step(forward_fn, nn.SGD(network.trainable_params(), 0.5), 2, stages=(stage,))
        >>> losses = list(train_step.epoch([np.full((4, 2), value, np.float32) for value in (1, 3)]))
        >>> print(float(stage.value))
        2.0
    """

    measures = 0
    measured = (0, 0)
    exchange: OneDevice
    state: tuple[Parameter, ...] = ()

    def bind(self, prefix: str) -> None:
        """Join an accumulator, the names of whose state begin with `prefix`: rename the stage's Parameters."""
        for parameter in self.state:
            parameter.name = f"{prefix}.{parameter.name}"

    def loss_scale(self) -> Scalar:
        """Return what the loss is multiplied by before the backward pass. A window's gradients are divided by it."""
        return 1.0

    def weigh(self, gradients: Gradients, weight: Scalar) -> tuple[Scalar, Scalar]:
        """Return the weight of a piece, and 1 if it is taken or 0 if it is skipped: then its weight is 0.

        `gradients` are those of this rank, of the scaled loss; any values if the weight is 0.
        """
        return weight, 1.0

    def measure(self, gradients: Gradients, factor: Scalar, weight: Scalar) -> Numbers:
        """Return `measures` values to be summed over pieces and ranks: numbers or float32 Tensors of shape `()`.

        The gradient of the piece's mean loss is `factor * gradients`; `weight` is 0 for a piece that is ignored.
        """
        return ()

    def accepts(self, window: dict[str, Any]) -> Union[bool, Tensor]:
        """Return whether a window makes an update: a bool, or a bool Tensor of shape `()`.

        The window is a dict, equal on all ranks: `gradients`, sums in an internal unit (with ZeRO 2, this rank's
        slices: sums over elements must then go through `exchange.over`); `unit`; `weight`, the sum of the weights;
        `measured`, the sums of the values that `measure` returned. The mean gradient is `unit / weight * gradients`.
        """
        return True

    def on_update(self, window: dict[str, Any]) -> None:
        """Observe an update before clipping. The window is that of `accepts`."""

    def on_close(self, applied: Union[bool, Tensor]) -> None:
        """Observe that a window was applied or dropped: a bool, or a bool Tensor of shape `()`."""


@jit_class
class Called:
    """Hold the stages that override each method, and tell each where its measures are, from place `first` on."""

    def __init__(self, stages: tuple[Stage, ...], first: int) -> None:
        def among(method: str) -> tuple[Stage, ...]:
            # Not others: a method that does nothing makes MindSpore warn of eliminated side effects.
            return tuple(stage for stage in stages if getattr(type(stage), method) is not getattr(Stage, method))

        self.scaling, self.weighing, self.measuring = among("loss_scale"), among("weigh"), among("measure")
        self.judging, self.watching, self.closing = among("accepts"), among("on_update"), among("on_close")
        for stage in stages:
            stage.measured, first = (first, first + stage.measures), first + stage.measures


@jit_class
class SkipMicrobatch(Stage):
    """Give a microbatch or piece that is not finite the weight 0."""

    def __init__(self, is_sum: bool) -> None:
        self.is_sum = is_sum

    def weigh(self, gradients: Gradients, weight: Scalar) -> tuple[Scalar, Scalar]:
        """See `Stage`. A mean that already has the weight 0 is ignored in any case, and is not tested."""
        weight = as_tensor(weight)
        taken = ops.isfinite(finite_sum((*gradients, weight)))
        if not self.is_sum:
            taken = ops.logical_or(taken, weight == 0)
        return ops.where(taken, weight, ops.zeros_like(weight)), cast(taken, ms.float32)


@jit_class
class SkipWindow(Stage):
    """Drop a window whose gradient is not finite."""

    def accepts(self, window: dict[str, Any]) -> Tensor:
        """See `Stage`. Also test the weight: the gradients of a sum do not show that it is not finite."""
        return ops.isfinite(self.exchange.over(finite_sum((*window["gradients"], as_tensor(window["weight"])))))


@jit_class
class LossScale(Stage):
    """Multiply the loss by the scale of a `LossScaler`. A `SkipWindow` drops the windows that overflow."""

    def __init__(self, scaler: amp.LossScaler) -> None:
        self.scaler = scaler
        self.state = tuple(value for value in vars(scaler).values() if isinstance(value, Parameter))

    def loss_scale(self) -> Scalar:
        """See `Stage`."""
        return self.scaler.scale_value + 0.0


@jit_class
class AdjustedLossScale(LossScale):
    """Also adjust the scale, once per window."""

    def on_close(self, applied: Union[bool, Tensor]) -> None:
        """See `Stage`."""
        self.scaler.adjust(applied)


def checked_stages(on_nonfinite: object, scaler: object, stages: object, is_sum: bool) -> tuple[Stage, ...]:
    """Return the stages in the order in which gradients pass them. Raise TypeError or ValueError if one is invalid."""
    one_of("on_nonfinite", on_nonfinite, ("apply", "skip_microbatch", "skip_window"))
    if scaler is not None and on_nonfinite == "skip_microbatch":
        raise ValueError('got a loss_scaler with on_nonfinite="skip_microbatch": the scale changes only when a window '
                         'closes, so an overflowing microbatch would be skipped every time; give "apply" or '
                         '"skip_window", which both drop the window')
    given = instance_of("stages", stages, (tuple, list), "a tuple of stages")
    own = tuple(instance_of(f"stages[{i}]", stage, Stage, "a ms_accum.Stage") for i, stage in enumerate(given))
    if on_nonfinite == "skip_microbatch":
        return (SkipMicrobatch(is_sum), *own)
    if scaler is None:
        return (SkipWindow(), *own) if on_nonfinite == "skip_window" else own
    is_static = type(checked_loss_scaler(scaler)).adjust is amp.StaticLossScaler.adjust
    scaling = (LossScale if is_static else AdjustedLossScale)(scaler)
    return (scaling, SkipWindow(), *own)


def checked_loss_scaler(scaler: object) -> amp.LossScaler:
    """Return the loss scaler. Raise TypeError if it is none. (With a scale of NaN or infinity, windows are dropped.)"""
    if not isinstance(scaler, amp.LossScaler) or not isinstance(getattr(scaler, "scale_value", None), Tensor):
        raise TypeError(f"loss_scaler is of type {type(scaler).__name__}, expected a mindspore.amp.LossScaler; "
                        "give e.g. amp.DynamicLossScaler(2**16, 2, 1000)")
    return scaler
