"""What a loss scaler does to a window: the loss is multiplied, the gradient divided, the scale adjusted once."""
from __future__ import annotations

from math import inf
from typing import Optional
from weakref import WeakKeyDictionary, ref

import mindspore as ms
from mindspore import Parameter, Tensor, amp

from .distributed.ranks import require_alike
from .gradients import Gradients, mapped, wider

_owners: WeakKeyDictionary[amp.LossScaler, ref] = WeakKeyDictionary()


@ms.jit_class
class NoLossScale:
    """Leave everything as it is. Every loss scale has these methods."""

    def multiply(self, loss: Tensor) -> Tensor:
        """Return the loss to differentiate."""
        return loss

    def divide(self, gradients: Gradients) -> Gradients:
        """Return the gradients of the loss itself."""
        return gradients


@ms.jit_class
class LossScale:
    """The scale of a `mindspore.amp.LossScaler`; see `NoLossScale` for the methods."""

    def __init__(self, scaler: amp.LossScaler) -> None:
        self.scaler = scaler

    def multiply(self, loss: Tensor) -> Tensor:
        """See `NoLossScale`."""
        return loss.astype(ms.float32) * self.scaler.scale_value

    def divide(self, gradients: Gradients) -> Gradients:
        """See `NoLossScale`: in float32 at least. Divided, because 1 / scale may be too small for float32."""
        return mapped(_divided, self.scaler.scale_value + 0.0, gradients)


def _divided(scale: Tensor, gradient: Tensor) -> Tensor:
    return gradient.astype(wider(gradient.dtype, ms.float32)) / scale


def require_loss_scaler(scaler: object, ranks: int) -> None:
    """Refuse what is not a loss scaler (TypeError), or has no usable scale or differs between ranks (ValueError)."""
    if not isinstance(scaler, amp.LossScaler) or not isinstance(getattr(scaler, "scale_value", None), Tensor):
        raise TypeError(f"loss_scaler is of type {type(scaler).__name__}, expected a mindspore.amp.LossScaler; "
                        "give e.g. amp.DynamicLossScaler(2**16, 2, 1000)")
    if ranks > 1:
        settings = repr([type(scaler).__name__, *map(_value, vars(scaler).values())])
        require_alike({"the loss_scaler": settings}, "give every rank the same one")
    require_scale(scaler.scale_value)


def require_scale(scale: Tensor) -> None:
    """Refuse a scale that gradients cannot be divided by; MindSpore's own scalers accept NaN and infinity."""
    value = scale.asnumpy().astype(float)
    if value.size != 1 or not 0 < value.item() < inf:
        raise ValueError(f"the loss scale is {value}, expected one finite number > 0; "
                         "give e.g. amp.DynamicLossScaler(2**16, 2, 1000)")


def owner_of(scaler: amp.LossScaler) -> Optional[object]:
    """Return the living accumulator that adjusts `scaler`, if there is one."""
    owner = _owners.get(scaler)
    return owner and owner()


def take_ownership(scaler: amp.LossScaler, owner: object, prefix: str) -> list[Parameter]:
    """Note that `owner` adjusts `scaler`. Return the scaler's Parameters, renamed: two scalers have the same names."""
    _owners[scaler] = ref(owner)
    state = {name: value for name, value in vars(scaler).items() if isinstance(value, Parameter)}
    for name, parameter in state.items():
        parameter.name = f"{prefix}.loss_scaler.{name}"
    return list(state.values())


def _value(value: object) -> object:
    return value.asnumpy().tolist() if isinstance(value, Tensor) else value
