"""Pure functions on tuples of tensors: what happens to gradients on their way in and out of the buffers."""
from __future__ import annotations

from math import inf
from numbers import Real
from typing import Optional, Union

import mindspore as ms
from mindspore import Tensor, ops
from mindspore.ops import constexpr

Gradients = tuple[Tensor, ...]
Scalar = Union[float, Tensor]
FLOATS = (ms.float16, ms.bfloat16, ms.float32, ms.float64)
_COMPLEX = (ms.complex64, ms.complex128)
_ENLARGED = 2.0**40


def global_norm(gradients: Gradients) -> Tensor:
    """The Euclidean norm of all gradients together, 1e-26 to 1e19: float32 Tensor of shape `()`, summed up in float32."""
    norm = _norm(gradients)
    # Squares below 1e-38 leave float32. No `if`: MindSpore 2.10 does not compile one here for an optimizer of a single parameter.
    enlarged = _norm(tuple([g.astype(ms.float32) * _ENLARGED for g in gradients]))
    return ops.where(norm > 1e-12, norm, enlarged / _ENLARGED)


def _norm(gradients: Gradients) -> Tensor:
    squares = 0.0
    for gradient in gradients:
        squares = squares + _sum(ops.square(gradient.astype(ms.float32)))
    return ops.sqrt(squares)


def clip_factor(norm: Tensor, clip_norm: float) -> Scalar:
    """min(1, clip_norm / (norm + 1e-6)), as `torch.nn.utils.clip_grad_norm_`; the constant 1 for infinite `clip_norm`."""
    if clip_norm == inf:
        return 1.0
    return ops.minimum(clip_norm / (norm + 1e-6), Tensor(1.0, ms.float32))


def all_finite(gradients: Gradients) -> Tensor:
    """Whether no element of any gradient is NaN or infinite: bool Tensor of shape `()`.

    Judged by the sum, in float32 at least: one NaN or infinity makes it so. Finite gradients fail only if their sum overflows (they
    are of about 1e35 then, and no update survives them). On CPU that takes 3 % of the time of testing each element.
    """
    total = 0.0
    for gradient in gradients:
        total = total + _sum(gradient.astype(ms.float64 if gradient.dtype == ms.float64 else ms.float32)).astype(ms.float32)
    return ops.isfinite(total)


def _sum(values: Tensor) -> Tensor:
    """The sum of all elements: rows first, for which MindSpore's CPU kernel is up to 50 times as fast as for all at once."""
    if values.ndim < 2:
        return values.sum()
    return values.reshape(values.shape[0], -1).sum(-1).sum()


def scaled(gradient: Tensor, factor: Scalar, dtype: ms.Type) -> Tensor:
    """`gradient * factor` in `dtype`, multiplied in the wider of the two dtypes; the constant 1 costs no kernel."""
    if isinstance(factor, Tensor) or factor != 1:
        gradient = ops.mul(gradient.astype(wider(gradient.dtype, dtype)), factor)
    return gradient.astype(dtype)


def wider(one: ms.Type, other: ms.Type) -> ms.Type:
    """The wider of two float dtypes; `other` if both have 16 bits."""
    if one in (ms.float16, ms.bfloat16):
        return other
    return one


@constexpr
def require_gradients(names: tuple[str, ...], expected: tuple, got: Optional[tuple], dtypes: tuple) -> bool:
    """Refuse gradients that do not belong to the optimizer's parameters, on the host, before anything is changed.

    A `constexpr`: graph mode runs it while it compiles, so it costs nothing afterwards.

    Args:
        names: Names of the parameters.
        expected: Their shapes.
        got: Shapes of the gradients, None in the place of an entry that is no Tensor; None for no tuple at all.
        dtypes: Their dtypes, with None in the same places.
    """
    if got is None:
        raise TypeError("grads is no tuple of Tensors, expected one gradient for each of the optimizer's "
                        f"{len(names)} parameters; take them from `value_and_grad(forward_fn, None, optimizer.parameters)`")
    if len(got) != len(expected):
        raise ValueError(f"grads holds {len(got)} gradients, expected {len(expected)}: one for each parameter of the "
                         "optimizer; take them from `value_and_grad(forward_fn, None, optimizer.parameters)`")
    for name, parameter_shape, shape, dtype in zip(names, expected, got, dtypes):
        if shape is None:
            raise TypeError(f"the gradient of {name} is no Tensor, expected one of shape {parameter_shape}; "
                            "is the parameter part of the loss?")
        if tuple(shape) != tuple(parameter_shape):
            raise ValueError(f"the gradient of {name} has shape {tuple(shape)}, expected {tuple(parameter_shape)}; "
                             "give the gradients in the order of `optimizer.parameters`")
        if dtype in _COMPLEX:
            raise TypeError(f"the gradient of {name} is of {dtype}, expected real numbers; its imaginary part would be lost")
    return True


def as_weight(weight: Scalar) -> Scalar:
    """The weight of a microbatch as a float, or as a float32 Tensor of shape `()`.

    Raises:
        TypeError: If it is no number and no Tensor.
        ValueError: If a number is negative, NaN or more than float32 can hold, or a Tensor has more than one element.
    """
    if isinstance(weight, Tensor):
        require_weight_tensor(weight.shape, weight.dtype)
        return weight.reshape(()).astype(ms.float32)
    require_weight_number(weight is None, weight)
    # A large int would become an int32 of the graph, and wrap around.
    return float(weight)


_LARGEST_WEIGHT = 3.4028234e38  # of float32
_WEIGHT_REMEDY = "give the number of samples or unmasked tokens in the microbatch"


@constexpr
def require_weight_tensor(shape: tuple, dtype: ms.Type) -> bool:
    """Refuse a Tensor of more than one element or of complex numbers as a weight; see `require_gradients`."""
    if tuple(shape) not in ((), (1,)):
        raise ValueError(f"weight is a Tensor of shape {tuple(shape)}, expected shape (); {_WEIGHT_REMEDY}")
    if dtype in _COMPLEX:
        raise TypeError(f"weight is a Tensor of {dtype}, expected a real number; {_WEIGHT_REMEDY}")
    return True


@constexpr
def require_weight_number(is_none: bool, weight: object) -> bool:
    """Refuse a weight that is no finite number >= 0 in float32; see `require_gradients`.

    Args:
        is_none: Whether it is None, which is also what a constexpr sees of a number that changes from call to call.
        weight: The weight.
    """
    if weight is None and not is_none:
        return True
    if isinstance(weight, bool) or not isinstance(weight, Real):
        raise TypeError(f"weight is {weight!r}, expected a number or a Tensor of shape (); {_WEIGHT_REMEDY}")
    if not 0 <= weight <= _LARGEST_WEIGHT:
        raise ValueError(f"weight is {weight}, expected a finite number >= 0 (float32); {_WEIGHT_REMEDY}")
    return True


@constexpr
def require_condition(is_bool: bool, shape: Optional[tuple]) -> bool:
    """Refuse what is neither a bool nor a Tensor of one element, of which MindSpore would take any for true; see `require_gradients`."""
    remedy = "give a bool Tensor of shape (), e.g. loss < 1"
    if not is_bool and shape is None:
        raise TypeError(f"condition is no Tensor and no bool; {remedy}")
    if not is_bool and tuple(shape) not in ((), (1,)):
        raise ValueError(f"condition is a Tensor of shape {tuple(shape)}, expected shape (); {remedy}")
    return True
