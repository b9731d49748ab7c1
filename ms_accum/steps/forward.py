"""What a piece of a batch computes: its weight, its loss, and the gradients that the window adds."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Optional

import mindspore as ms
from mindspore import Tensor, ops

from ..core.stream import Stream
from ..core.window import Window
from ..tensors import Scalar, as_tensor, as_weight, cast, divide_no_nan, multiply_no_nan, scaled, stack
from .batch import RETURNS, checked_loss, parted


class Functions(NamedTuple):
    """Hold what users give a step. Functions take the batch by position; see `batch.positional`."""

    forward_fn: Callable
    weight_fn: Optional[Callable] = None
    has_weight: bool = False
    has_aux: bool = False
    name: str = "forward_fn"  # in messages


def forward_of(functions: Functions) -> Callable:
    """Return `(weight, *piece) -> (loss, weight, aux)`: the loss as it is returned, and the weight that counts."""
    forward_fn, _, has_weight, has_aux, name = functions
    returns = RETURNS[has_weight, has_aux]

    def forward(weight: Scalar, *piece: Any) -> tuple:
        loss, own, aux = parted(forward_fn(*piece), has_weight, has_aux, returns, name)
        loss = checked_loss(loss, name)
        if has_weight:
            weight = ops.stop_gradient(as_tensor(as_weight(own)))
        return loss, weight, aux

    return forward


def weighed(functions: Functions) -> Callable:
    """Return `(rows, piece) -> (weight, piece)`, where the piece comes after its weight."""
    # Otherwise all gradients would wait for the weight, and be in memory together (Ascend, bfloat16: 10.3 bytes per
    # parameter in place of 6.7).
    weight_fn, has_weight = functions.weight_fn, functions.has_weight

    def weigh(rows: Scalar, piece: tuple) -> tuple:
        if weight_fn is None:  # with `has_weight`, the forward pass returns the weight
            return 1.0 if has_weight else as_weight(rows), piece
        weight, later = as_weight(weight_fn(*piece)), ()  # type: Any, tuple
        for value in piece:
            later = (*later, ops.depend(value, weight) if isinstance(value, Tensor) and isinstance(weight, Tensor)
                     else value)
        return weight, later

    return weigh


def reported(window: Window, loss: Tensor, weight: Scalar) -> Tensor:
    """Return the loss of a window of this piece: 0 for a mean over nothing, NaN for a weight that is NaN."""
    divisor = window.divisor(weight)
    if window.is_sum:
        return divide_no_nan(loss, as_tensor(divisor))
    share = divide_no_nan(as_tensor(weight), divisor) if isinstance(divisor, Tensor) else float(divisor != 0)
    return scaled(share, loss, ms.float32)


def summed(window: Window, loss: Tensor, weight: Scalar) -> Tensor:
    """Return what a piece adds to a microbatch or an evaluation, weight * loss and weight: float32 `(2,)`."""
    weight = as_tensor(weight)
    return stack((loss if window.is_sum else multiply_no_nan(loss, weight), weight))


def training_of(window: Window, functions: Functions, stream: Optional[Stream], closes: bool) -> Callable:
    """Return `(rows, piece, after) -> (loss, weight, aux)`, which differentiates a piece of `rows` samples and adds it.

    `stream` adds each gradient during the backward pass. `closes`: whether to update with the piece as a window of one.
    Gradients are weighed, not the loss, or a layer whose own backward pass is not linear would be wrong.
    """
    forward, weigh, has_weight = forward_of(functions), weighed(functions), functions.has_weight

    def forward_scaled(weight: Scalar, *piece: Any) -> tuple:
        results = forward(weight, *piece)
        loss, weight, aux = results[0], results[1], results[2]
        mark = window.begin(loss)
        if stream is not None:
            stream.start(window.factor_of(weight))
        value = ops.depend(window.scale_loss(loss), mark)
        if has_weight:  # not otherwise: a number would not stay a constant
            return ops.depend(value, weight), loss, aux, weight
        return value, loss, aux

    grad_fn = ms.value_and_grad(forward_scaled, None, window.exchange.parameters, has_aux=True)
    differentiated = grad_fn if stream is None else stream.around(grad_fn)

    def train(rows: Scalar, piece: tuple, after: Tensor) -> tuple:
        weight, piece = weigh(rows, piece)
        values, gradients = differentiated(weight, *piece)
        # `depend` uses what nobody needs, or MindSpore warns of "side effect nodes eliminated by mistake".
        loss = cast(ops.depend(values[1], values[0]), ms.float32)
        if has_weight:
            weight = values[3]
        if closes:
            loss = ops.depend(loss, window.alone(gradients, weight, loss))
        elif stream is None:
            window.add(gradients, weight, loss, after)
            if window.exchange.sums_each:  # see `jit_options`; on one device, gradients would wait in memory together
                loss = ops.depend(loss, gradients)
        else:
            window.count_piece(weight, loss, after)
        return loss, weight, values[2]

    return train


def looking_of(functions: Functions) -> Callable:
    """Return what `training_of` does, without a backward pass: for an evaluation."""
    forward, weigh = forward_of(functions), weighed(functions)

    def look(rows: Scalar, piece: tuple, after: Tensor) -> tuple:
        weight, piece = weigh(rows, piece)
        results = forward(weight, *piece)
        return cast(results[0], ms.float32), results[1], ()

    return look
