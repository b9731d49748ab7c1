"""value_and_grad over the pieces of a batch, into an accumulator; shared by all drivers."""
from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Optional

import mindspore as ms
from mindspore import Tensor, amp, ops
from mindspore.ops import constexpr

from .accumulator import Accumulator
from .arguments import as_weights, require_callable, whole_number
from .gradients import FLOATS, Scalar
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
    """Return `(samples, *piece) -> (losses, weights, what add returned, aux)`, uncompiled.

    Arguments as in `make_accumulate`. `add` is called with the gradients, the factors on them and the weights, each a
    tuple with an entry for each loss; without it, `accumulator._add_piece` is, which returns whether the piece was
    taken (int32, 0 or 1).
    """
    gradients_of = _gradients_of(forward_fn, accumulator, has_aux)
    add = accumulator._add_piece if add is None else add

    def add_piece(samples: int, *piece: Any) -> tuple:
        weights = weights_of(weight_fn, accumulator.losses, samples, piece)
        losses, aux, gradients = gradients_of(*piece)
        return losses, weights, add(gradients, weights, weights), aux

    return add_piece


def _gradients_of(forward_fn: Callable, accumulator: Accumulator, has_aux: bool) -> Callable:
    """Return `(*piece) -> (losses, aux, gradients of each loss)`.

    Each loss is differentiated by itself: with a cotangent of 0, a mean over nothing (0/0) would still make the
    gradients of the others NaN. The forward pass is written down for each, and MindSpore merges what is the same.
    """
    grad_fns = tuple([
        ms.value_and_grad(_differentiated(forward_fn, accumulator, has_aux, t), None, accumulator.optimizer.parameters,
                          has_aux=True) for t in range(accumulator.losses)])

    def gradients_of(*piece: Any) -> tuple:
        losses, aux, gradients = (), (), ()
        for t, grad_fn in enumerate(grad_fns):
            (scaled_loss, loss, extra), of_loss = grad_fn(*piece)
            # `depend` uses what nobody needs, or MindSpore warns of "side effect nodes eliminated by mistake".
            losses = (*losses, ops.depend(loss, scaled_loss).astype(ms.float32))
            aux = extra if t == 0 else aux
            gradients = (*gradients, of_loss)
        return losses, aux, gradients

    return gradients_of


def _differentiated(forward_fn: Callable, accumulator: Accumulator, has_aux: bool, t: int) -> Callable:
    """Return `(*piece) -> (loss to differentiate, loss, aux)` for the loss numbered `t`."""
    loss_scale, losses_of = accumulator._loss_scale, _losses_of(forward_fn, accumulator.losses, has_aux, t)

    def differentiated(*piece: Any) -> tuple:
        losses, aux = losses_of(*piece)
        return loss_scale.multiply(losses[0]), losses[0], aux

    return differentiated


def _losses_of(forward_fn: Callable, count: int, has_aux: bool, t: Optional[int] = None) -> Callable:
    """Return `(*piece) -> (tuple of losses, aux)`, which checks what `forward_fn` returns; of the loss `t` alone."""
    def losses_of(*piece: Any) -> tuple:
        result = forward_fn(*piece)
        returned, aux = result, ()
        if has_aux:
            # In branches of their own: graph mode would look into what is not a tuple before it asks.
            if isinstance(result, tuple):
                require_aux(len(result))
                returned, aux = result[0], result[1]
            else:
                require_aux(None)
        losses = (returned,)
        if count > 1:
            if isinstance(returned, tuple):
                require_losses(len(returned), count)
                losses = returned if t is None else (returned[t],)
            else:
                require_losses(None, count)
        for loss in losses:
            if isinstance(loss, Tensor):
                require_loss(loss.shape, loss.dtype)
            else:
                require_loss(None, None)
        return losses, aux

    return losses_of


def make_add_known(
    forward_fn: Callable,
    accumulator: Accumulator,
    weight_fn: Optional[Callable],
    has_aux: bool,
    counts: tuple[bool, ...],
) -> Callable:
    """As `make_add_piece`, for `(samples, window, *piece)`, if the weights of the whole window are known.

    One backward pass gives the gradient of all losses together, each times its share of the window, relative to the
    largest share: what is differentiated is not made smaller than it is in a window of one microbatch.

    Args:
        counts: Which losses have a weight in the piece. A mean over nothing would make all gradients NaN.

    `window` is the sum of each loss's weights in the window: float32 `(losses,)`.
    """
    loss_scale, losses_of = accumulator._loss_scale, _losses_of(forward_fn, accumulator.losses, has_aux)
    counted_losses = tuple([t for t, counted_here in enumerate(counts) if counted_here])

    def differentiated(shares: tuple[Tensor, ...], *piece: Any) -> tuple:
        losses, aux = losses_of(*piece)
        total = 0.0
        for t in counted_losses:
            total = total + loss_scale.multiply(losses[t]).astype(ms.float32) * shares[t]
        return total, losses, aux

    grad_fn = ms.value_and_grad(differentiated, None, accumulator.optimizer.parameters, has_aux=True)

    def add_known(samples: int, window: Tensor, *piece: Any) -> tuple:
        weights = weights_of(weight_fn, accumulator.losses, samples, piece)
        taken = Tensor(1, ms.int32)
        if counted_losses:
            shares = tuple([weight / window[t] for t, weight in enumerate(weights)])
            largest = shares[counted_losses[0]]
            for t in counted_losses:
                largest = ops.maximum(largest, shares[t])
            (total, losses, aux), gradients = grad_fn(tuple([share / largest for share in shares]), *piece)
            taken = ops.depend(accumulator._add_known(gradients, largest, weights), total)
        else:
            losses, aux = losses_of(*piece)
        return tuple([loss.astype(ms.float32) for loss in losses]), weights, taken, aux

    return add_known


def weights_of(weight_fn: Optional[Callable], count: int, samples: int, piece: tuple) -> tuple[Scalar, ...]:
    """Return what a piece weighs for each of `count` losses: as from `weight_fn`, or its samples."""
    return (float(samples),) * count if weight_fn is None else as_weights(weight_fn(*piece), count)


def whole(add_piece: Callable, end: Callable, has_aux: bool) -> Callable:
    """As `make_accumulate`, for a batch that is not cut; `end` takes what `add_piece` returned from `add`."""
    def accumulate(samples: int, cut: tuple[bool, ...], *batch: Any) -> Any:
        losses, weights, taken, aux = add_piece(samples, *batch)
        end(taken)
        means = ()
        for loss, weight in zip(losses, weights):
            # A weight that is not finite shows in the loss.
            means = (*means, loss + weight * 0.0 if isinstance(weight, Tensor) else loss)
        return (alone_or_all(means), aux) if has_aux else alone_or_all(means)

    return accumulate


def alone_or_all(losses: tuple[Tensor, ...]) -> Any:
    """Return what a step returns: the loss, or a tuple of several."""
    return losses[0] if len(losses) == 1 else losses


def _cut(add_piece: Callable, accumulator: Accumulator, micro_size: int, has_aux: bool) -> Callable:
    count = accumulator.losses

    # Totals: of each loss times its weight, of each weight, of the pieces that were taken, and the aux.
    def turn(totals: tuple, indices: Tensor, piece: tuple) -> tuple:
        losses, weights, taken, aux = add_piece(indices.shape[0], *piece)
        joined = join_aux(totals[2 * count + 1:], aux, indices, weights[0])
        sums = ()
        for t in range(count):
            sums = (*sums, totals[t] + counted(ops.depend(losses[t], aux), weights[t]))
        for t in range(count):
            sums = (*sums, totals[count + t] + weights[t])
        return *sums, totals[2 * count] + taken, *joined

    def pieces(samples: int, cut: tuple[bool, ...], *batch: Any) -> Any:
        # Not the constant 0.0: MindSpore would try to fold 0 / 0 while it compiles, and warn.
        zero = accumulator.mini_step.astype(ms.float32) * 0.0
        totals = (*(zero,) * (2 * count), Tensor(0, ms.int32))
        first = 0
        aux = ()
        accumulator._note_piece()
        if has_aux:
            # The first piece shows what is to be joined. Without aux, it is a turn of the loop like any other.
            indices = ops.arange(-(-samples // micro_size))
            losses, weights, taken, aux = add_piece(indices.shape[0], *select_rows(indices, cut, batch))
            joined = join_aux(empty_aux(aux, samples, indices.shape[0]), aux, indices, weights[0])
            sums = tuple([counted(ops.depend(loss, aux), weight) for loss, weight in zip(losses, weights)])
            totals = (*sums, *[zero + weight for weight in weights], taken, *joined)
            first = 1
        totals = over_pieces(turn, totals, first, samples, micro_size, cut, batch)
        accumulator._end_microbatch(totals[2 * count], notes=1)
        means, divisors = means_of(totals[:2 * count], count)
        if has_aux:
            return alone_or_all(means), whole_aux(totals[2 * count + 1:], aux, divisors[0])
        return alone_or_all(means)

    return pieces


def means_of(totals: tuple[Tensor, ...], count: int) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Return the mean of each of `count` losses and what it was divided by, from their sums and those of the weights.
    """
    means, divisors = (), ()
    for t in range(count):
        weight = totals[count + t]
        divisor = ops.where(weight == 0, Tensor(1.0, ms.float32), weight)
        means, divisors = (*means, totals[t] / divisor), (*divisors, divisor)
    return means, divisors


@constexpr
def require_losses(length: Optional[int], count: int) -> bool:
    """Refuse what is not a tuple of as many losses as the accumulator has."""
    if length != count:
        got = "no tuple of losses" if length is None else f"{length} losses"
        raise TypeError(f"forward_fn returned {got}, expected a tuple of {count} because of losses={count}; with "
                        "has_aux=True, ((loss, loss), aux)")
    return True


@constexpr
def require_loss(shape: Optional[tuple], dtype: Optional[ms.Type], name: str = "forward_fn") -> bool:
    """Refuse a loss that is not a float scalar: value_and_grad would differentiate a sum of its elements, or a cast."""
    if shape is None:
        remedy = ("; give has_aux=True if it returns (loss, aux), losses=2 if it returns two losses"
                  if name == "forward_fn" else "")
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
