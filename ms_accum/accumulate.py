"""value_and_grad over the pieces of a batch, into an accumulator; shared by all drivers."""
from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Optional

import mindspore as ms
from mindspore import Tensor, amp, ops
from mindspore.ops import constexpr

from .accumulator import Accumulator
from .arguments import as_weight, instance_of, require_callable, whole_number
from .gradients import FLOATS
from .optimizers import require_trainable
from .split import counted, empty_aux, join_aux, over_pieces, select_rows, whole_aux


def plain(function: Optional[Callable]) -> Optional[Callable]:
    """A function that graph mode can call in another one: of a `functools.partial` it would not know what comes out."""
    if not isinstance(function, partial):
        return function
    inner, arguments, named = function.func, function.args, function.keywords

    def completed(*batch: Any) -> Any:
        return inner(*arguments, *batch, **named)

    return completed


def make_accumulate(
    forward_fn: Callable,
    acc: Accumulator,
    micro_size: int,
    weight_fn: Optional[Callable],
    loss_scaler: Optional[amp.LossScaler],
    has_aux: bool,
) -> Callable:
    """`(samples, cut, *batch) -> loss` or `(loss, aux)`: all of a train step but the update, uncompiled.

    Arguments and errors as in `make_train_step`; `samples` and `cut` as from `split.layout`.
    """
    _require_fitting(forward_fn, acc, micro_size, weight_fn)
    _bind_loss_scaler(acc, loss_scaler)
    weight_fn = plain(weight_fn)
    differentiated = _differentiated(plain(forward_fn), acc, has_aux)
    grad_fn = ms.value_and_grad(differentiated, None, acc.optimizer.parameters, has_aux=True)

    def add_piece(samples: int, *piece: Any) -> tuple:
        """The loss of a piece, its weight, whether it was taken (int32, 0 or 1), and its aux."""
        weight = as_weight(samples if weight_fn is None else weight_fn(*piece))
        (scaled_loss, loss, aux), gradients = grad_fn(*piece)
        # `depend` uses what nobody needs, or MindSpore warns of "side effect nodes eliminated by mistake".
        return ops.depend(loss, scaled_loss).astype(ms.float32), weight, acc._add_piece(gradients, weight, weight), aux

    return _whole(add_piece, acc, has_aux) if micro_size == 1 else _cut(add_piece, acc, micro_size, has_aux)


def _differentiated(forward_fn: Callable, acc: Accumulator, has_aux: bool) -> Callable:
    """`(*piece) -> (loss to differentiate, loss, aux)`."""
    loss_scale = acc._loss_scale

    def differentiated(*piece: Any) -> tuple:
        result = forward_fn(*piece)
        loss, aux = result, ()
        if has_aux:
            # In branches of their own: graph mode would look into what is no tuple before it asks.
            if isinstance(result, tuple):
                require_aux(len(result))
                loss, aux = result[0], result[1]
            else:
                require_aux(None)
        if isinstance(loss, Tensor):
            require_loss(loss.shape, loss.dtype)
        else:
            require_loss(None, None)
        return loss_scale.multiply(loss), loss, aux

    return differentiated


def _whole(add_piece: Callable, acc: Accumulator, has_aux: bool) -> Callable:
    def whole(samples: int, cut: tuple[bool, ...], *batch: Any) -> Any:
        loss, weight, taken, aux = add_piece(samples, *batch)
        acc._end_microbatch(taken)
        if isinstance(weight, Tensor):
            loss = loss + weight * 0.0  # a weight that is not finite shows in the loss
        return (loss, aux) if has_aux else loss

    return whole


def _cut(add_piece: Callable, acc: Accumulator, micro_size: int, has_aux: bool) -> Callable:
    acc._in_pieces = True

    def turn(totals: tuple, indices: Tensor, piece: tuple) -> tuple:
        loss, weight, taken, aux = add_piece(indices.shape[0], *piece)
        joined = join_aux(totals[3:], aux, indices, weight)
        return totals[0] + counted(ops.depend(loss, aux), weight), totals[1] + weight, totals[2] + taken, *joined

    def pieces(samples: int, cut: tuple[bool, ...], *batch: Any) -> Any:
        # Not the constant 0.0: MindSpore would try to fold 0 / 0 while it compiles, and warn.
        zero = acc.weight_sum * 0.0
        totals = (zero, zero, Tensor(0, ms.int32))
        first = 0
        aux = ()
        acc._begin_pieces()
        if has_aux:
            # The first piece shows what is to be joined. Without aux, it is a turn of the loop like any other.
            indices = ops.arange(-(-samples // micro_size))
            loss, weight, taken, aux = add_piece(indices.shape[0], *select_rows(indices, cut, batch))
            joined = join_aux(empty_aux(aux, samples, indices.shape[0]), aux, indices, weight)
            totals = (counted(ops.depend(loss, aux), weight), zero + weight, taken, *joined)
            first = 1
        totals = over_pieces(turn, totals, first, samples, micro_size, cut, batch)
        acc._end_microbatch(totals[2], in_pieces=True)
        divisor = ops.where(totals[1] == 0, Tensor(1.0, ms.float32), totals[1])
        loss = totals[0] / divisor
        return (loss, whole_aux(totals[3:], aux, divisor)) if has_aux else loss

    return pieces


def _require_fitting(forward_fn: object, acc: object, micro_size: int, weight_fn: object) -> None:
    require_callable("forward_fn", forward_fn)
    if weight_fn is not None:
        require_callable("weight_fn", weight_fn)
    require_mean(acc)
    if micro_size > 1 and acc.reducer.each_microbatch:
        raise ValueError(f'micro_size={micro_size} with an accumulator whose ranks exchange each microbatch (sync="microbatch", or '
                         'on_nonfinite="skip_microbatch"): ranks may cut into different numbers of pieces; give sync="window" and '
                         '"skip_window", or micro_size=1 and smaller batches')


def _bind_loss_scaler(acc: Accumulator, loss_scaler: Optional[amp.LossScaler]) -> None:
    if loss_scaler is not None:
        acc._attach_loss_scaler(loss_scaler)
    elif acc.loss_scaler is not None:
        raise ValueError("acc has a loss_scaler, whose scale it divides by; give the same one here")


@constexpr
def require_loss(shape: Optional[tuple], dtype: Optional[ms.Type], name: str = "forward_fn") -> bool:
    """Refuse a loss that is no float scalar: value_and_grad would silently differentiate the sum of its elements, or through a cast."""
    if shape is None:
        remedy = "; give has_aux=True if it returns (loss, aux)" if name == "forward_fn" else ""
        raise TypeError(f"{name} returned no Tensor, expected the loss alone{remedy}")
    if tuple(shape) != ():
        raise ValueError(f"{name} returned a loss of shape {tuple(shape)}, expected shape (); give the mean over the samples")
    if dtype not in FLOATS:
        raise TypeError(f"{name} returned a loss of {dtype}, expected a float dtype; leave the loss as the network computed it")
    return True


@constexpr
def require_aux(length: Optional[int]) -> bool:
    """Refuse what is no pair: graph mode would silently drop a third value."""
    if length != 2:
        got = "no tuple" if length is None else f"{length} values"
        raise TypeError(f"forward_fn returned {got}, expected (loss, aux), as has_aux=True says; aux may be a tuple")
    return True


def require_mean(acc: object) -> None:
    """Refuse what is no accumulator (TypeError), or one that sums up or has frozen parameters (ValueError)."""
    instance_of("acc", acc, Accumulator, "an Accumulator", 'give Accumulator(optimizer, accumulate_step, reduction="mean")')
    require_trainable(acc.optimizer.parameters)
    if acc.reduction != "mean":
        raise ValueError(f'acc has reduction={acc.reduction!r}, expected "mean": a train step hands over the loss undivided, and the '
                         'sum of N such gradients is N times too large; give Accumulator(..., reduction="mean")')


def checked_micro_size(micro_size: object) -> int:
    """`micro_size` as an int >= 1. Raises TypeError or ValueError if it is none."""
    return whole_number("micro_size", micro_size, "it is the number of pieces that a batch is cut into")
