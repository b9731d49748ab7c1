"""What a loss scaler does to a window: the loss is multiplied, the gradient divided, the scale adjusted once."""
from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING, Optional, Union
from weakref import WeakKeyDictionary, ref

import mindspore as ms
from mindspore import Parameter, Tensor, amp

from ..distributed.ranks import require_alike
from ..tensors import mapped, wider

if TYPE_CHECKING:
    from ..tensors import Gradients

_owners: WeakKeyDictionary[amp.LossScaler, ref] = WeakKeyDictionary()


@ms.jit_class
class NoLossScale:
    """Leave everything as it is. The plain case, and the base of the other one.

    Attributes:
        parameters: Its state.
    """

    parameters: tuple[Parameter, ...] = ()

    def multiply(self, loss: Tensor) -> Tensor:
        """Return the loss to differentiate."""
        return loss

    def divide(self, gradients: Gradients) -> Gradients:
        """Return the gradients of the loss itself."""
        return gradients

    def adjust(self, finite: Union[bool, Tensor]) -> None:
        """Adjust the scale at the end of a window."""


@ms.jit_class
class LossScale(NoLossScale):
    """The scale of a `mindspore.amp.LossScaler`, which only one accumulator may adjust.

    Args:
        scaler: The loss scaler.
        owner: The accumulator.
        prefix: What the names of the scaler's Parameters begin with from now on: two scalers have the same names.

    Raises:
        ValueError: If the scaler belongs to another accumulator.
    """

    def __init__(self, scaler: amp.LossScaler, owner: object, prefix: str) -> None:
        other = _owners.get(scaler)
        if other is not None and other() is not None:
            raise ValueError("the loss_scaler belongs to another accumulator, which would adjust it in the middle of "
                             "this one's windows; give each accumulator its own")
        _owners[scaler] = ref(owner)
        self.scaler = scaler
        # A static one adjusts nothing, which makes MindSpore warn.
        self.adjusted = () if type(scaler).adjust is amp.StaticLossScaler.adjust else (scaler,)
        state = {name: value for name, value in vars(scaler).items() if isinstance(value, Parameter)}
        for name, parameter in state.items():
            parameter.name = f"{prefix}.loss_scaler.{name}"
        self.parameters = tuple(state.values())

    def multiply(self, loss: Tensor) -> Tensor:
        """See `NoLossScale`."""
        return loss.astype(ms.float32) * self.scaler.scale_value

    def divide(self, gradients: Gradients) -> Gradients:
        """See `NoLossScale`: in float32 at least. Divided, because 1 / scale may be too small for float32."""
        return mapped(_divided, self.scaler.scale_value + 0.0, gradients)

    def adjust(self, finite: Union[bool, Tensor]) -> None:
        """See `NoLossScale`."""
        for scaler in self.adjusted:
            scaler.adjust(finite if isinstance(finite, Tensor) else Tensor(finite))


def _divided(scale: Tensor, gradient: Tensor) -> Tensor:
    return gradient.astype(wider(gradient.dtype, ms.float32)) / scale


def checked_loss_scaler(scaler: object, on_nonfinite: str, ranks: int) -> Optional[amp.LossScaler]:
    """Return a loss scaler with a usable scale, alike on all ranks, or None. TypeError or ValueError otherwise."""
    if scaler is None:
        return None
    if on_nonfinite == "skip_microbatch":
        raise ValueError('got a loss_scaler with on_nonfinite="skip_microbatch": the scale changes only when a window '
                         'closes, so an overflowing microbatch would be skipped every time; give "apply" or '
                         '"skip_window", which both drop the window')
    if not isinstance(scaler, amp.LossScaler) or not isinstance(getattr(scaler, "scale_value", None), Tensor):
        raise TypeError(f"loss_scaler is of type {type(scaler).__name__}, expected a mindspore.amp.LossScaler; "
                        "give e.g. amp.DynamicLossScaler(2**16, 2, 1000)")
    if ranks > 1:
        settings = repr([type(scaler).__name__, *map(_value, vars(scaler).values())])
        require_alike({"the loss_scaler": settings}, "give every rank the same one")
    require_scale(scaler.scale_value)
    return scaler


def require_scale(scale: Tensor) -> None:
    """Refuse a scale that gradients cannot be divided by; MindSpore's own scalers accept NaN and infinity."""
    value = scale.asnumpy().astype(float)
    if value.size != 1 or not 0 < value.item() < inf:
        raise ValueError(f"the loss scale is {value}, expected one finite number > 0; "
                         "give e.g. amp.DynamicLossScaler(2**16, 2, 1000)")


def _value(value: object) -> object:
    return value.asnumpy().tolist() if isinstance(value, Tensor) else value
