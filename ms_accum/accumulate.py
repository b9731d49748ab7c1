"""value_and_grad over the pieces of a batch, into an accumulator; shared by all drivers."""
from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Optional

import mindspore as ms
from mindspore import Tensor, amp, ops
from mindspore.ops import constexpr

from .accumulator import Accumulator
from .arguments import as_weight, require_callable, whole_number
from .gradients import FLOATS
from .optimizers import checked_parameters, require_trainable
from .split import counted, empty_aux, join_aux, over_pieces, select_rows, whole_aux


def prepared(
    forward_fn: Callable,
    accumulator: object,
    accumulate_step: object,
    options: dict[str, Any],
    micro_size: object,
    weight_fn: Optional[Callable],
    loss_scaler: Optional[amp.LossScaler],
) -> tuple[Accumulator, int]:
    """Check a driver's arguments, and bind its loss scaler. Return its accumulator and `micro_size`.

    Arguments and errors as in `make_train_step`.
    """
    require_callable("forward_fn", forward_fn)
    if weight_fn is not None:
        require_callable("weight_fn", weight_fn)
    micro_size = checked_micro_size(micro_size)
    accumulator = averaging(accumulator, accumulate_step, options)
    if micro_size > 1 and accumulator.reducer.each_microbatch:
        raise ValueError(f'got micro_size={micro_size} with an accumulator whose ranks exchange each microbatch '
                         '(sync="microbatch", or on_nonfinite="skip_microbatch"): ranks may cut into different numbers '
                         'of pieces; give sync="window" and "skip_window", or micro_size=1 and smaller batches')
    if loss_scaler is not None:
        accumulator._attach_loss_scaler(loss_scaler)
    elif accumulator.loss_scaler is not None:
        raise ValueError("the accumulator has a loss_scaler, whose scale it divides by; give the same one here")
    accumulator._in_pieces = accumulator._in_pieces or micro_size > 1
    return accumulator, micro_size


def averaging(
    accumulator: object,
    accumulate_step: object = None,
    options: Mapping[str, Any] = MappingProxyType({}),
) -> Accumulator:
    """Return an accumulator with `reduction="mean"`: the given one, or one built for the given optimizer."""
    if not isinstance(accumulator, Accumulator):
        optimizer = () if "optimizer" in options and accumulator is None else (accumulator,)
        if optimizer:
            checked_parameters(accumulator, "accumulator")
        if accumulate_step is None:
            raise TypeError("accumulate_step is missing, expected it with an optimizer: the number of microbatches in "
                            "a window; give accumulate_step=4, say, or an Accumulator in the place of the optimizer")
        accumulator = Accumulator(*optimizer, accumulate_step=accumulate_step, **{"reduction": "mean", **options})
    elif accumulate_step is not None or options:
        given = [*(["accumulate_step"] if accumulate_step is not None else []), *options]
        raise ValueError(f"got an Accumulator and also {', '.join(given)}, which the Accumulator has already; give an "
                         "optimizer with these arguments, or the Accumulator alone")
    require_trainable(accumulator.optimizer.parameters)
    if accumulator.reduction != "mean":
        raise ValueError(f'the accumulator has reduction={accumulator.reduction!r}, expected "mean": the loss is '
                         'undivided here, and a sum of N such gradients is N times too large; give reduction="mean"')
    return accumulator


def make_accumulate(
    forward_fn: Callable,
    accumulator: Accumulator,
    micro_size: int,
    weight_fn: Optional[Callable],
    has_aux: bool,
) -> Callable:
    """Return `(samples, cut, *batch) -> loss` or `(loss, aux)`: all of a train step but the update, uncompiled.

    Functions as from `batch.positional`, the rest as from `prepared`; `samples` and `cut` as from `split.layout`.
    """
    add_piece = make_add_piece(forward_fn, accumulator, weight_fn, has_aux)
    if micro_size == 1:
        return whole(add_piece, accumulator._end_microbatch, has_aux)
    return _cut(add_piece, accumulator, micro_size, has_aux)


def make_add_piece(
    forward_fn: Callable,
    accumulator: Accumulator,
    weight_fn: Optional[Callable],
    has_aux: bool,
    add: Optional[Callable] = None,
) -> Callable:
    """Return `(samples, *piece) -> (loss, weight, what add returned, aux)`, uncompiled.

    Arguments as in `make_accumulate`. `add` is called with the gradients and the weight; without it,
    `accumulator._add_piece` is, which returns whether the piece was taken (int32, 0 or 1).
    """
    differentiated = _differentiated(forward_fn, accumulator, has_aux)
    grad_fn = ms.value_and_grad(differentiated, None, accumulator.optimizer.parameters, has_aux=True)

    def add_piece(samples: int, *piece: Any) -> tuple:
        weight = as_weight(samples if weight_fn is None else weight_fn(*piece))
        (scaled_loss, loss, aux), gradients = grad_fn(*piece)
        # `depend` uses what nobody needs, or MindSpore warns of "side effect nodes eliminated by mistake".
        loss = ops.depend(loss, scaled_loss).astype(ms.float32)
        added = accumulator._add_piece(gradients, weight, weight) if add is None else add(gradients, weight)
        return loss, weight, added, aux

    return add_piece


def _differentiated(forward_fn: Callable, accumulator: Accumulator, has_aux: bool) -> Callable:
    """Return `(*piece) -> (loss to differentiate, loss, aux)`."""
    loss_scale = accumulator._loss_scale

    def differentiated(*piece: Any) -> tuple:
        result = forward_fn(*piece)
        loss, aux = result, ()
        if has_aux:
            # In branches of their own: graph mode would look into what is not a tuple before it asks.
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


def whole(add_piece: Callable, end: Callable, has_aux: bool) -> Callable:
    """As `make_accumulate`, for a batch that is not cut; `end` takes what `add_piece` returned from `add`."""
    def accumulate(samples: int, cut: tuple[bool, ...], *batch: Any) -> Any:
        loss, weight, taken, aux = add_piece(samples, *batch)
        end(taken)
        if isinstance(weight, Tensor):
            loss = loss + weight * 0.0  # a weight that is not finite shows in the loss
        return (loss, aux) if has_aux else loss

    return accumulate


def _cut(add_piece: Callable, accumulator: Accumulator, micro_size: int, has_aux: bool) -> Callable:
    def turn(totals: tuple, indices: Tensor, piece: tuple) -> tuple:
        loss, weight, taken, aux = add_piece(indices.shape[0], *piece)
        joined = join_aux(totals[3:], aux, indices, weight)
        return totals[0] + counted(ops.depend(loss, aux), weight), totals[1] + weight, totals[2] + taken, *joined

    def pieces(samples: int, cut: tuple[bool, ...], *batch: Any) -> Any:
        # Not the constant 0.0: MindSpore would try to fold 0 / 0 while it compiles, and warn.
        zero = accumulator.weight_sum * 0.0
        totals = (zero, zero, Tensor(0, ms.int32))
        first = 0
        aux = ()
        accumulator._note_piece()
        if has_aux:
            # The first piece shows what is to be joined. Without aux, it is a turn of the loop like any other.
            indices = ops.arange(-(-samples // micro_size))
            loss, weight, taken, aux = add_piece(indices.shape[0], *select_rows(indices, cut, batch))
            joined = join_aux(empty_aux(aux, samples, indices.shape[0]), aux, indices, weight)
            totals = (counted(ops.depend(loss, aux), weight), zero + weight, taken, *joined)
            first = 1
        totals = over_pieces(turn, totals, first, samples, micro_size, cut, batch)
        accumulator._end_microbatch(totals[2], notes=1)
        divisor = ops.where(totals[1] == 0, Tensor(1.0, ms.float32), totals[1])
        loss = totals[0] / divisor
        return (loss, whole_aux(totals[3:], aux, divisor)) if has_aux else loss

    return pieces


@constexpr
def require_loss(shape: Optional[tuple], dtype: Optional[ms.Type], name: str = "forward_fn") -> bool:
    """Refuse a loss that is not a float scalar: value_and_grad would differentiate a sum of its elements, or a cast."""
    if shape is None:
        remedy = "; give has_aux=True if it returns (loss, aux)" if name == "forward_fn" else ""
        raise TypeError(f"{name} returned no Tensor, expected the loss alone{remedy}")
    if tuple(shape) != ():
        raise ValueError(f"{name} returned a loss of shape {tuple(shape)}, expected shape (); return the mean over the "
                         "samples")
    if dtype not in FLOATS:
        raise TypeError(f"{name} returned a loss of {dtype}, expected a float dtype; do not cast the network's loss")
    return True


@constexpr
def require_aux(length: Optional[int]) -> bool:
    """Refuse what is not a pair: graph mode would drop a third value without an error."""
    if length != 2:
        got = "no tuple" if length is None else f"{length} values"
        raise TypeError(f"forward_fn returned {got}, expected (loss, aux) because of has_aux=True; aux may be a tuple")
    return True


def checked_micro_size(micro_size: object) -> int:
    """Return `micro_size` as an int >= 1. TypeError or ValueError if it is none."""
    return whole_number("micro_size", micro_size, "it is the number of pieces that a batch is cut into")
