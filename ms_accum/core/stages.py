"""Stages: loss scale, skipping of NaN and infinity, and the base class of other optional stations of a gradient."""
from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING, Any, Optional, Union
from weakref import WeakKeyDictionary, ref

import mindspore as ms
from mindspore import Parameter, Tensor, amp, ops

from ..arguments import instance_of, one_of, whole_number
from ..mindspore_api import jit_class
from ..tensors import all_finite, as_tensor, cast, finite_sum, mapped, wider

if TYPE_CHECKING:
    from ..distributed.exchange import OneDevice
    from ..tensors import Gradients, Numbers, Scalar

_owners: WeakKeyDictionary[amp.LossScaler, ref] = WeakKeyDictionary()


@jit_class
class Stage:
    """Change or observe gradients on their way from the loss to the optimizer: a base class. Override what you need.

        loss ─ scale_loss ─► backward ─ weigh, measure ─► buffers          # each piece of a microbatch
        exchange ─ restore ─ accepts ─► on_update ─► on_close               # each window

    By default, no method changes anything. All methods except `bind` are compiled in graph mode. Give a stage of your
    own as `Accumulator(stages=(stage,))`, or to any function that takes the options of an accumulator.

    Attributes:
        measures: Number of values that `measure` returns.
        takes_slices: Whether `accepts` and `on_update` also work if the gradients are slices of this rank (ZeRO): sums
            over elements must then go through `exchange.over_slices`.
        drops_empty: Whether windows are dropped whose weight is 0, also without a call of `accepts`: a mean over
            nothing is 0/0.
        exchange, skipped, skipped_in_row: Those of the accumulator, once the stage is part of one.
        window_state: Its Parameters that belong to the open window: they are 0 when a window begins.
        run_state: Its other Parameters.

    Source: a chain of gradient transformations, as in optax. The loss scale, the skipping of `optax.skip_not_finite`
    and the noise scale of McCandlish et al. (2018) are stages.

    Example:
        >>> import mindspore as ms, numpy as np
        >>> from mindspore import nn, ops
        >>> from ms_accum import Stage, make_train_step
        >>> @ms.jit_class
        ... class Largest(Stage):
        ...     def __init__(self):
        ...         self.value = ms.Parameter(ms.Tensor(0.0), name="largest", requires_grad=False)
        ...         self.run_state = (self.value,)
        ...     def weigh(self, gradients, weight):
        ...         ops.assign(self.value, gradients[0].max())
        ...         return weight, 1
        >>> network, stage = nn.Dense(2, 1), Largest()
        >>> def forward_fn(x):
        ...     return network(x).mean()
        >>> train_step = make_train_step(forward_fn, nn.SGD(network.trainable_params(), 0.5), 2, stages=(stage,))
        >>> for value in (1.0, 3.0):
        ...     loss = train_step(ms.Tensor(np.full((4, 2), value), ms.float32))
        ...     print(float(stage.value))
        1.0
        3.0
    """

    measures = 0
    takes_slices = drops_empty = False
    exchange: OneDevice
    skipped: Parameter
    skipped_in_row: Parameter
    window_state: tuple[Parameter, ...] = ()
    run_state: tuple[Parameter, ...] = ()

    def bind(self, prefix: str, groups: int) -> None:
        """Join an accumulator; called once, on the host. By default, rename the stage's Parameters.

        The names of the accumulator's state begin with `prefix`. Its windows are sums over `groups` groups of ranks.
        """
        for parameter in (*self.window_state, *self.run_state):
            parameter.name = f"{prefix}.{parameter.name}"

    def scale_loss(self, loss: Tensor) -> Tensor:
        """Return the loss to differentiate."""
        return loss

    def weigh(self, gradients: Gradients, weight: Scalar) -> tuple[Scalar, Scalar]:
        """Return the weight of a piece, and 1 if it is taken or 0 if it is skipped.

        A piece that a user masked has weight 0 and is taken. A piece that is not finite has weight 0 and is not taken.
        `gradients` are those of this rank, of the scaled loss. If the weight is 0, they may hold any values.
        """
        return weight, 1

    def measure(self, gradients: Gradients, weight: Scalar) -> Numbers:
        """Return `measures` values to be summed over pieces and ranks: numbers or float32 Tensors of shape `()`.

        `gradients` are restored; `weight` is 0 for a piece that is ignored.
        """
        return ()

    def restore(self, gradients: Gradients) -> Gradients:
        """Undo `scale_loss`: for a window after its exchange, for a piece before it is measured."""
        return gradients

    def accepts(self, window: dict[str, Any]) -> Union[bool, Tensor]:
        """Return whether a window makes an update: a bool, or a bool Tensor of shape `()`.

        The window is a dict, equal on all ranks: `gradients`, sums in an internal unit (use them to test for finite
        values, not for their size); `unit`; `weight`, the sum of the weights; `microbatches`, their number.
        """
        return True

    def on_update(self, window: dict[str, Any], measured: Numbers) -> None:
        """Observe an update before clipping: the mean gradient is `unit / weight * gradients`, of the window.

        `window` is that of `accepts`; `measured` holds the sums of the values that `measure` of this stage returned.
        """

    def on_close(self, applied: bool) -> None:
        """Observe that a window was applied or dropped.

        What the forward passes of a dropped window have changed (a count, the statistics of BatchNorm) stays: put it
        back here if `applied` is false, from a copy that you keep when it is true.
        """


def overrides(stage: Stage, *methods: str) -> bool:
    """Return whether a stage overrides one of these methods.

    Methods that are not overridden are not called in a graph. A window of one microbatch needs no buffers if no stage
    weighs, measures or may drop it.
    """
    return any(getattr(type(stage), method) is not getattr(Stage, method) for method in methods)


@jit_class
class SkipMicrobatch(Stage):
    """Give a microbatch or piece that is not finite the weight 0, and count it in `skipped`.

    A microbatch of which no piece is taken does not count in the window. A window of weight 0 is dropped and counted.
    """

    drops_empty = True

    def weigh(self, gradients: Gradients, weight: Scalar) -> tuple[Tensor, Tensor]:
        """See `Stage`. A piece that already has the weight 0 is ignored in any case, and is not tested."""
        weight = weight * cast(ops.ones_like(self.skipped), ms.float32)  # a Tensor, also of a number
        ignored = weight == 0
        taken = ops.logical_or(all_finite((*gradients, weight)), ignored)
        missed = 1 - cast(taken, ms.int32)
        ops.assign_add(self.skipped, missed)
        ops.assign(self.skipped_in_row,
                   (self.skipped_in_row + 1) * missed + self.skipped_in_row * cast(ignored, ms.int32))
        return ops.where(taken, weight, ops.zeros_like(weight)), cast(taken, ms.int32)

    def on_close(self, applied: bool) -> None:
        """See `Stage`."""
        missed = 0 if applied else 1
        ops.assign_add(self.skipped, missed)
        ops.assign_add(self.skipped_in_row, missed)


@jit_class
class SkipWindow(Stage):
    """Drop a window whose gradient is not finite, or whose weight is 0, and count it in `skipped`."""

    takes_slices = drops_empty = True

    def accepts(self, window: dict[str, Any]) -> Tensor:
        """See `Stage`. Also test the weight: the gradients of a sum do not show that it is not finite."""
        total = finite_sum((*window["gradients"], as_tensor(window["weight"])))
        return ops.isfinite(self.exchange.over_slices(total))

    def on_close(self, applied: bool) -> None:
        """See `Stage`."""
        if applied:
            ops.assign(self.skipped_in_row, 0)
        else:
            ops.assign_add(self.skipped, 1)
            ops.assign_add(self.skipped_in_row, 1)


@jit_class
class LossScale(Stage):
    """Multiply the loss by the scale of a `LossScaler`, and divide gradients by it.

    Only one accumulator may adjust a scaler. A `SkipWindow` drops the windows that overflow.

    Args:
        scaler: The loss scaler, whose Parameters become state of the accumulator.
        owner: The accumulator.

    Raises:
        ValueError: If the scaler belongs to another accumulator.
    """

    def __init__(self, scaler: amp.LossScaler, owner: object) -> None:
        other = _owners.get(scaler)
        if other is not None and other() is not None:
            raise ValueError("the loss_scaler belongs to another accumulator, which would adjust it while windows of "
                             "this one are open; give each accumulator its own")
        _owners[scaler] = ref(owner)
        self.scaler = scaler
        self.named = {name: value for name, value in vars(scaler).items() if isinstance(value, Parameter)}
        self.run_state = tuple(self.named.values())

    def bind(self, prefix: str, groups: int) -> None:
        """See `Stage`. Parameters of two scalers have equal names, and a scaler may have been another accumulator's."""
        for name, parameter in self.named.items():
            parameter.name = f"{prefix}.loss_scaler.{name}"

    def scale_loss(self, loss: Tensor) -> Tensor:
        """See `Stage`."""
        return cast(loss, ms.float32) * self.scaler.scale_value

    def restore(self, gradients: Gradients) -> Gradients:
        """See `Stage`. Compute in float32 at least, and divide, because 1 / scale may be too small for float32."""
        return mapped(_divided, self.scaler.scale_value + 0.0, gradients)


@jit_class
class AdjustedLossScale(LossScale):
    """Also adjust the scale, once per window. (A method that adjusts nothing would make MindSpore warn.)"""

    def on_close(self, applied: bool) -> None:
        """See `Stage`."""
        self.scaler.adjust(Tensor(applied))


def _divided(scale: Tensor, gradient: Tensor) -> Tensor:
    return cast(gradient, wider(gradient.dtype, ms.float32)) / scale


# --- which stages are switched on -------------------------------------------------------------------------------------


def checked_nonfinite(on_nonfinite: object, scaler: object, max_skips: object) -> int:
    """Return `max_skips` as an int. Raise TypeError or ValueError if one of the arguments is invalid."""
    one_of("on_nonfinite", on_nonfinite, ("apply", "skip_microbatch", "skip_window"))
    if scaler is not None and on_nonfinite == "skip_microbatch":
        raise ValueError('got a loss_scaler with on_nonfinite="skip_microbatch": the scale changes only when a window '
                         'closes, so an overflowing microbatch would be skipped every time; give "apply" or '
                         '"skip_window", which both drop the window')
    return whole_number("max_skips", max_skips, "it is the most skips in a row", minimum=0)


def stages_of(scaler: Optional[amp.LossScaler], on_nonfinite: str, others: tuple[Stage, ...],
              owner: object) -> tuple[Stage, ...]:
    """Return the stages of an accumulator, in the order in which gradients pass them."""
    scaling: tuple[Stage, ...] = ()
    if scaler is not None:
        is_static = type(scaler).adjust is amp.StaticLossScaler.adjust
        scaling = ((LossScale if is_static else AdjustedLossScale)(scaler, owner),)
    skipping: tuple[Stage, ...] = ()
    if on_nonfinite == "skip_microbatch":
        skipping = (SkipMicrobatch(),)
    elif on_nonfinite == "skip_window" or scaler is not None:
        skipping = (SkipWindow(),)
    return (*scaling, *skipping, *others)


def require_slices_suffice(stages: tuple[Stage, ...]) -> None:
    """Raise ValueError for a stage that looks at gradients, and does not say that their slices will do."""
    for stage in stages:
        if overrides(stage, "accepts", "on_update") and not stage.takes_slices:
            raise ValueError(f"{type(stage).__name__} looks at the gradients of a window, but with zero > 0 a rank has "
                             "only slices of them; sum over elements by self.exchange.over_slices and set takes_slices "
                             "= True, or give zero=0")


def checked_stages(stages: object) -> tuple[Stage, ...]:
    """Return `stages` as a tuple. Raise TypeError if one of them is not a stage."""
    given = instance_of("stages", stages, (tuple, list), "a tuple of stages")
    return tuple(instance_of(f"stages[{i}]", stage, Stage, "a ms_accum.core.stages.Stage")
                 for i, stage in enumerate(given))


def checked_loss_scaler(scaler: object) -> Optional[amp.LossScaler]:
    """Return the loss scaler or None. Raise TypeError if it is neither."""
    if scaler is None:
        return None
    if not isinstance(scaler, amp.LossScaler) or not isinstance(getattr(scaler, "scale_value", None), Tensor):
        raise TypeError(f"loss_scaler is of type {type(scaler).__name__}, expected a mindspore.amp.LossScaler; "
                        "give e.g. amp.DynamicLossScaler(2**16, 2, 1000)")
    return scaler


def require_scale(scale: Tensor) -> None:
    """Raise ValueError for a scale that gradients cannot be divided by; MindSpore's scalers accept NaN and infinity."""
    value = scale.asnumpy().astype(float)
    if value.size != 1 or not 0 < value.item() < inf:
        raise ValueError(f"the loss scale is {value}, expected one finite number > 0; "
                         "give e.g. amp.DynamicLossScaler(2**16, 2, 1000)")
