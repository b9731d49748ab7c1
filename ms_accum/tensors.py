"""Functions on tensors and tuples of tensors, and checks of the arguments of graphs. Every room may use them.

The checks are `constexpr` functions: graph mode runs them while it compiles, so they cost nothing afterwards.
"""
from __future__ import annotations

from collections.abc import Callable, Iterable
from math import inf, nan
from numbers import Real
from typing import Any, Optional, Union

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn, ops
from mindspore.common.initializer import initializer
from mindspore.ops import constexpr

from .mindspore_api import isconstant

Gradients = tuple[Tensor, ...]
Scalar = Union[float, Tensor]
Numbers = tuple[Scalar, ...]  # what travels with gradients: their weight and other sums
HALF = (ms.float16, ms.bfloat16)
FLOATS = (ms.float16, ms.bfloat16, ms.float32, ms.float64)
COMPLEX = (ms.complex64, ms.complex128)
_ENLARGED = 2.0**21
multiply_no_nan = ops.MulNoNan()  # NaN * 0 is 0
divide_no_nan = ops.DivNoNan()  # x / 0 is 0
# In graphs, these primitives and loops: the method `astype` takes 6 times as long to compile, and a list comprehension
# 0.1 s (3 entries; a loop 0.02).
cast, concat, reshape, stack, unstack = ops.Cast(), ops.Concat(), ops.Reshape(), ops.Stack(), ops.Unstack()
_map, _map_backwards, _partial = ops.HyperMap(), ops.HyperMap(None, True), ops.Partial()


def state_parameter(name: str, shape: tuple[int, ...], dtype: ms.Type, value: float = 0) -> Parameter:
    """Return a Parameter that is state and not trained, filled with `value`."""
    data = initializer(value, shape, dtype) if shape else Tensor(value, dtype)
    return Parameter(data, name=name, requires_grad=False)


def buffers_of(network: nn.Cell) -> dict[str, Tensor]:
    """Return the buffers of a network (`Cell.register_buffer`) that belong to its state, by name."""
    kept = network.state_dict()
    return {name: buffer for name, buffer in network.named_buffers() if name in kept}


def mapped(function: Callable, shared: Any, *tuples: Union[tuple, list]) -> tuple:
    """Return `function(shared, *entries)` for each place of some tuples.

    MindSpore compiles this 5 times as fast as a list comprehension (98 gradients: 1.1 s instead of 5.5), but not for
    functions with free variables: give these as `shared`.
    """
    return _map(_partial(function, shared), *tuples)


def mapped_backwards(function: Callable, shared: Any, *tuples: Union[tuple, list]) -> tuple:
    """Return what `mapped` returns. In a graph, side effects begin with the last place; op by op, with the first."""
    return _map_backwards(_partial(function, shared), *tuples)


def global_norm(gradients: Gradients, factor: Scalar = 1.0) -> Tensor:
    """Return the Euclidean norm of all `factor * gradients` together: float32 `()`. See `square_sum`."""
    return norm_of(square_sum(gradients, factor))


def norm_of(squares: Tensor) -> Tensor:
    """Return the norm, given a result of `square_sum` or a sum of such results."""
    return ops.sqrt(squares) / _ENLARGED


def square_sum(gradients: Gradients, factor: Scalar = 1.0) -> Tensor:
    """Return the squared norm of `factor * gradients`, times a constant, for `norm_of`: float32 `()`.

    The norm is exact if elements of the product are at least 1e-25 and their norm is at most 8e12. Each gradient is
    read once and multiplied by a power of two, because float32 holds no squares below 1e-38.
    """
    squares = Tensor(0.0, ms.float32)
    for gradient in gradients:
        # One after the other, or the squares of all gradients would be in memory together. The factor waits, not the
        # gradient: of two reads of a buffer, MindSpore keeps the one that waits for nothing.
        gradient = cast(gradient, ms.float32) * ops.depend(as_tensor(factor * _ENLARGED), squares)
        squares = squares + _sum(gradient * gradient)  # on CPU faster than ops.square
    return squares


def clip_factor(norm: Tensor, clip_norm: float) -> Scalar:
    """Return min(1, clip_norm / (norm + 1e-6)), as `torch.nn.utils.clip_grad_norm_`; 1 for an infinite `clip_norm`."""
    if clip_norm == inf:
        return 1.0
    factor = clip_norm / (norm + 1e-6)
    return ops.where(factor >= 1, Tensor(1.0, ms.float32), factor)  # NaN stays: `minimum(NaN, 1)` is 1 on CPU


def finite_sum(gradients: Gradients) -> Tensor:
    """Return a number that is finite if all elements of all gradients are: float32 `()`.

    It is the sum of all elements, in float32 at least: one NaN or infinity makes the sum NaN or infinite. Finite
    gradients give an infinite sum only if the sum overflows (elements of about 1e35, with which no update is useful).
    On CPU this takes 3 % of the time of a test of each element.
    """
    total = 0.0
    for gradient in gradients:
        total = total + cast(_sum(cast(gradient, wider(gradient.dtype, ms.float32))), ms.float32)
    return total


def _sum(values: Tensor) -> Tensor:
    """Return the sum of all elements: rows first, where MindSpore's CPU kernel is up to 50 times as fast."""
    if values.ndim < 2:
        return values.sum()
    return values.reshape(values.shape[0], -1).sum(-1).sum()


def scaled(factor: Scalar, gradient: Tensor, dtype: ms.Type) -> Tensor:
    """Return `factor * gradient` in `dtype`, multiplied in the wider dtype. The constant 1 costs no kernel.

    A factor of 0 gives 0, also where the gradient is NaN (a mean over no token).
    """
    gradient = cast(gradient, wider(gradient.dtype, dtype))
    if isinstance(factor, Tensor) or factor == 0:
        if gradient.dtype in HALF:  # where a factor may be too small
            gradient = cast(gradient, ms.float32)
        gradient = multiply_no_nan(gradient, cast(as_tensor(factor), gradient.dtype))
    elif factor != 1:
        gradient = ops.mul(gradient, factor)
    return cast(gradient, dtype)


def add_one(factor: Scalar, buffer: Parameter, gradient: Tensor) -> None:
    """Add `factor * gradient` to a buffer."""
    gradient = scaled(factor, gradient, buffer.dtype)
    if buffer.dtype == ms.float16:
        # MindSpore 2.10 on CPU: of two float16 AssignAdd on one Parameter in one graph, the first is lost.
        ops.assign(buffer, buffer + gradient)
    else:
        ops.assign_add(buffer, gradient)


def cleared(zero: Tensor, like: Tensor) -> Tensor:
    """Return zeros, NaN or not, given a float32 Tensor that is 0.

    A constant `zeros_like(buffer)` would be a hidden second copy of it in a graph (258 MB measured).
    """
    return multiply_no_nan(like, cast(zero, like.dtype))


def wider(one: ms.Type, other: ms.Type) -> ms.Type:
    """Return the wider of two float dtypes; `other` if both have 16 bits."""
    return other if one in HALF or other == ms.float64 else one


def as_tensor(scalar: Scalar) -> Tensor:
    """Return a number as a float32 Tensor of shape `()`; return a Tensor unchanged."""
    return scalar if isinstance(scalar, Tensor) else Tensor(scalar, ms.float32)


def as_vector(scalars: Numbers) -> Tensor:
    """Return numbers and Tensors of one element as one float32 Tensor of shape `(n,)`."""
    elements = ()  # type: Gradients
    for scalar in scalars:
        scalar = scalar if isinstance(scalar, Tensor) else Tensor([scalar], ms.float32)
        elements = (*elements, cast(reshape(scalar, (1,)), ms.float32))
    return concat(elements)


def as_array(value: Tensor) -> np.ndarray:
    """Return the values as an array; bfloat16, which NumPy lacks, becomes float32. For the host."""
    return (value.astype(ms.float32) if value.dtype == ms.bfloat16 else value).asnumpy()


def checked_gradients(names: tuple[str, ...], expected: tuple, grads: Any) -> Any:
    """Return `grads`. Raise TypeError or ValueError unless they fit parameters of these names and shapes."""
    if isinstance(grads, (tuple, list)):
        # Not list comprehensions: in a graph, the time to compile them grows with the square of their length.
        require_gradients(names, expected, mapped(_kind_of, None, grads))
    else:
        require_gradients(names, expected, None)
    return grads


def _kind_of(_: None, gradient: Any) -> Any:
    return (gradient.shape, gradient.dtype) if isinstance(gradient, Tensor) else (None, None)


# Of others, a graph gets a sparse gradient, and PyNative the rows that were looked up.
_DENSE = ', and build an nn.EmbeddingLookup with target="DEVICE" and sparse=False'


@constexpr
def require_gradients(names: tuple[str, ...], expected: tuple, got: Optional[tuple]) -> bool:
    """Raise an error for gradients that do not fit the optimizer's parameters, before anything is changed.

    Args:
        names: Names of the parameters.
        expected: Their shapes.
        got: Shape and dtype of each gradient, both None for an entry that is not a Tensor; None if `grads` is not a
            tuple.
    """
    if got is None:
        raise TypeError("grads is not a tuple of Tensors, expected one gradient for each of the optimizer's "
                        f"{len(names)} parameters; take them from `value_and_grad(forward_fn, None, "
                        "optimizer.parameters)`")
    if len(got) != len(expected):
        raise ValueError(f"grads holds {len(got)} gradients, expected {len(expected)}: one for each parameter of the "
                         "optimizer; take them from `value_and_grad(forward_fn, None, optimizer.parameters)`")
    for name, parameter_shape, (shape, dtype) in zip(names, expected, got):
        if shape is None:
            raise TypeError(f"the gradient of {name} is not a Tensor, expected one of shape {parameter_shape}; take it "
                            f"from `value_and_grad(forward_fn, None, optimizer.parameters)`{_DENSE}")
        if tuple(shape) != tuple(parameter_shape):
            rows = len(shape) > 1 and shape[1:] == parameter_shape[1:]
            raise ValueError(f"the gradient of {name} has shape {tuple(shape)}, expected {tuple(parameter_shape)}; "
                             "give the gradients in the order of `optimizer.parameters`, with ZeRO those of "
                             f"`accumulator.weights`{_DENSE * rows}")
        if dtype in COMPLEX:
            raise TypeError(f"the gradient of {name} is of {dtype}, expected a real dtype; its imaginary part would be "
                            "lost")
    return True


# --- what a graph is given --------------------------------------------------------------------------------------------


def require_trainable(parameters: Iterable[Parameter]) -> None:
    """Raise ValueError for frozen parameters: graph mode would update them, PyNative would not (MindSpore 2.10)."""
    frozen = next((p for p in parameters if not p.requires_grad), None)
    if frozen is not None:
        raise ValueError(f"{frozen.name} has requires_grad=False, expected trainable parameters in the optimizer: "
                         "graph mode would still update it; build the optimizer from network.trainable_params() after "
                         "freezing")


def as_weight(weight: Scalar) -> Scalar:
    """Return a weight as a float, or as a float32 Tensor of shape `()` that is NaN if the weight is < 0 or infinite.

    A number that a graph computes becomes a Tensor, too, and is NaN from 2**53 on.

    Raises:
        TypeError: If it is neither a number nor a Tensor.
        ValueError: If a number is negative, NaN or more than float32 can hold, or a Tensor has more than one element.
    """
    if isinstance(weight, Tensor):
        require_weight_tensor(weight.shape, weight.dtype)
        weight = cast(reshape(weight, ()), ms.float32)
        return ops.where(ops.logical_and(weight >= 0, weight < inf), weight, Tensor(nan, ms.float32))
    require_weight_number(weight is None, weight)
    if not isconstant(weight):  # a number that a graph computes, such as a length of a dynamic shape
        weight = ops.scalar_to_tensor(weight, ms.float32)
        # `len(x)` of a dynamic shape is a random number in MindSpore 2.10, most often about 1e18.
        return ops.where(ops.logical_and(weight >= 0, weight < _LARGEST_COUNT), weight, Tensor(nan, ms.float32))
    # A large int would become an int32 of the graph, and wrap around.
    return float(weight)


_LARGEST_WEIGHT = 3.4028234e38  # of float32
_LARGEST_COUNT = 2.0**53
_WEIGHT_REMEDY = "give the number of samples or unmasked tokens in the microbatch"


@constexpr
def require_weight_tensor(shape: tuple, dtype: ms.Type) -> bool:
    """Raise an error for a weight that is a Tensor of more than one element or of complex numbers."""
    if tuple(shape) not in ((), (1,)):
        raise ValueError(f"weight is a Tensor of shape {tuple(shape)}, expected shape (); {_WEIGHT_REMEDY}")
    if dtype in COMPLEX:
        raise TypeError(f"weight is a Tensor of {dtype}, expected a real number; {_WEIGHT_REMEDY}")
    return True


@constexpr
def require_weight_number(is_none: bool, weight: object) -> bool:
    """Raise an error for a weight that is not a finite number >= 0 in float32.

    Args:
        is_none: Whether it is None. A constexpr also gets None for a number that changes from call to call.
        weight: The weight.
    """
    if weight is None and not is_none:
        return True
    if isinstance(weight, bool) or not isinstance(weight, Real):
        raise TypeError(f"weight is {weight!r}, expected a number or a Tensor of shape (); {_WEIGHT_REMEDY}")
    if weight < 0 or not weight <= _LARGEST_WEIGHT:
        raise ValueError(f"weight is {weight}, expected a finite number >= 0 (float32); {_WEIGHT_REMEDY}")
    return True


@constexpr
def require_condition(is_bool: bool, shape: Optional[tuple]) -> bool:
    """Raise an error unless `condition` is a bool or a Tensor of one element; MindSpore takes other values for true."""
    remedy = "give a bool Tensor of shape (), e.g. loss < 1"
    if is_bool:
        return True
    if shape is None:
        raise TypeError(f"condition is neither a Tensor nor a bool; {remedy}")
    if tuple(shape) not in ((), (1,)):
        raise ValueError(f"condition is a Tensor of shape {tuple(shape)}, expected shape (); {remedy}")
    return True
