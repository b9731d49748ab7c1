"""Losses that couple samples, with the memory of one piece: gradient caching for contrastive training."""
from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any, Union

import mindspore as ms
from mindspore import Tensor, nn, ops
from mindspore.ops import constexpr

from ..arguments import require_callable, require_options, whole_number
from ..core.accumulator import Options, boundary_of
from ..core.window import PART, Window
from ..tensors import FLOATS, cast, reshape, stack
from .batch import Cut, checked_loss, places_of, positional, select_rows, starts_of
from .forward import Functions, reported
from .pieces import ends_of
from .train_mode import checked_networks
from .train_step import Layout, TrainStep

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ..core.length import AccumulateStep

_SINGLE = ('{} looks at single pieces, or sums each microbatch over ranks, but here the gradient of a piece is not an '
           'estimate of that of the batch; give "skip_window" or sync="window"')
_DIFFER = ("encode_fn returned two different representations of the same samples, so the gradient would be wrong; the "
           "batch was ignored. If it draws random numbers, switch Dropout off (p=0, or network.set_train(False))")


def make_grad_cache_step(
    encode_fn: Callable, loss_fn: Callable, optimizer: nn.Optimizer, accumulate_step: AccumulateStep, *, pieces: int,
    network: Union[nn.Cell, tuple[nn.Cell, ...], None] = None, **options: Unpack[Options],
) -> TrainStep:
    """Build a compiled train step for a loss over a whole batch, such as InfoNCE, that needs the memory of one piece.

        representations = encode_fn(piece) for each piece             # forward only
        loss = loss_fn(representations of the batch)                  # and d = its gradient at each representation
        gradient = sum of the gradients of sum(d[piece] * encode_fn(piece))

    The gradient equals that of the undivided batch, with all its negatives, for one more forward pass.

    Args:
        encode_fn: `(*piece) -> representations`: a Tensor of shape `(m, ...)` with one representation per sample, or a
            tuple of such Tensors of one float dtype. A representation may depend on its own sample only, and both
            passes must compute the same values: no Dropout. BatchNorm normalises each piece, not the batch.
        loss_fn: `(*representations) -> loss` of the whole batch, a float Tensor of shape `()`. It may have parameters.
        optimizer, accumulate_step, network, **options: As in `make_train_step`. A batch is one microbatch, weighted by
            its number of samples. With several ranks, each rank uses the negatives of its own batch.
        pieces: Number of pieces that a batch is cut into; the last one may be shorter.

    Source: Gao et al., 2021 (https://arxiv.org/abs/2101.06983).

    Example:
        >>> import numpy as np
        >>> from mindspore import nn, ops
        >>> from ms_accum import make_grad_cache_step
        >>> network = nn.Dense(3, 2, "ones")
        >>> def encode(x, y):
        ...     return network(x), network(y)
        >>> def info_nce(x, y):
        ...     return ops.cross_entropy(ops.matmul(x, y.T), ops.arange(len(x)))
        >>> train_step = make_grad_cache_step(encode, info_nce, nn.SGD(network.trainable_params(), 0.1), 1, pieces=2)
        >>> loss = train_step(np.zeros((4, 3), np.float32), np.zeros((4, 3), np.float32))
        >>> print(f"{float(loss):.4f}", train_step.update_step)  # ln 4
        1.3863 1
    """
    require_options(make_grad_cache_step, options, Options)
    require_callable("encode_fn", encode_fn)
    require_callable("loss_fn", loss_fn)
    pieces, networks = whole_number("pieces", pieces), checked_networks(network)
    boundary = boundary_of(optimizer, accumulate_step, {"the kind of step": "make_grad_cache_step", "pieces": pieces},
                           pieces=pieces, needs_buffers=True, **options)
    window = boundary.window
    looking = [type(stage).__name__ for stage in (*window.called.weighing, *window.called.measuring)]
    if looking or window.exchange.sums_each:
        raise ValueError(_SINGLE.format(looking[0] if looking else "the reducer"))

    def both(samples: int, cut: Cut, names: tuple[str, ...], compiled: Callable, _: bool) -> tuple[Layout, Callable]:
        window.unit, starts = window.unit or float(-(-samples // pieces)), starts_of(samples, pieces)
        train, look = in_cached_pieces(window, positional("encode_fn", encode_fn, len(cut), names),
                                       positional("loss_fn", loss_fn), compiled, samples, cut, starts)
        return Layout(train, len(starts)), look

    # The second function is there for its networks. Two pieces at least: a graph has to know the number of samples.
    return TrainStep(boundary, Functions(encode_fn, loss_fn, name="encode_fn"), networks, 0, max(pieces, 2),
                     lambda *layout: both(*layout)[0], lambda *layout: both(*layout)[1])


def in_cached_pieces(  # noqa: C901 - one algorithm, in the order in which it runs
    window: Window, encode_fn: Callable, loss_fn: Callable, compiled: Callable, samples: int, cut: Cut,
    starts: list[tuple[int, int]],
) -> tuple[Callable, Callable]:
    """Return `(*batch) -> loss`, which trains, and `(*batch) -> (weight * loss, weight)`, which only looks."""
    places = {rows: places_of(rows) for _, rows in starts}
    first_rows, ends = starts[0][1], ends_of(len(starts))

    @cache
    def encoder_of(rows: int) -> Callable:
        def encode(start: Tensor, *batch: Any) -> Tensor:
            return _represented(encode_fn, rows, select_rows(start + places[rows], cut, batch))[1]
        return compiled(encode)

    def coupled(cached: Tensor, piece: tuple) -> tuple[Tensor, Tensor]:
        """Return the loss of the batch, and the representations of the first piece, which is encoded again."""
        representations, fresh = _represented(encode_fn, first_rows, piece)
        whole = ops.concat((fresh, cached[first_rows:])) if first_rows < samples else fresh
        return checked_loss(loss_fn(*_apart(whole, representations)), "loss_fn"), fresh

    def first_loss(cached: Tensor, *piece: Any) -> tuple:
        loss, fresh = coupled(cached, piece)
        # Gradients of pieces must add up to that of the batch, but each is weighted by its samples.
        return ops.depend(window.scale_loss(loss), window.begin(loss)) * (samples / first_rows), loss, fresh

    first_grad_fn = ms.value_and_grad(first_loss, 0, window.exchange.parameters, has_aux=True)

    def first(once: Tensor, cached: Tensor, *batch: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Add the first piece. Return the loss, whether both passes agree, and the gradient at the representations."""
        values, found = first_grad_fn(cached, *select_rows(places[first_rows], cut, batch))
        # They agree up to rounding in 16 bits; NaN always agrees.
        same = ops.logical_not((once - values[2]).abs().max() > 2e-2 * once.abs().max())
        weight = ops.where(same, Tensor(first_rows, ms.float32), Tensor(0.0, ms.float32))
        loss = cast(ops.depend(values[1], values[0]), ms.float32)
        window.add(found[1], weight, loss, ops.where(same, ends[0], PART))
        return loss, same, found[0] * (first_rows / samples)

    @cache
    def backward_of(rows: int) -> Callable:
        def product(cotangents: Tensor, *piece: Any) -> Tensor:
            # Not scaled again: the loss that the cotangents come from was.
            total = (cotangents * _represented(encode_fn, rows, piece)[1]).sum(-1).sum() * (samples / rows)
            return ops.depend(total, window.begin(total))

        grad_fn = ms.value_and_grad(product, None, window.exchange.parameters)

        def add(start: Tensor, end: Tensor, loss: Tensor, cotangents: Tensor, *batch: Any) -> Tensor:
            chosen = start + places[rows]
            found = grad_fn(ops.gather(cotangents, chosen, 0), *select_rows(chosen, cut, batch))
            window.add(found[1], float(rows), loss, end)
            return ops.depend(loss, found[0])
        return compiled(add)

    def look(cached: Tensor, *batch: Any) -> Tensor:
        loss = cast(coupled(cached, select_rows(places[first_rows], cut, batch))[0], ms.float32)
        return stack((loss * samples, Tensor(samples, ms.float32)))

    begin, looked, calls = compiled(first), compiled(look), [(Tensor(start, ms.int32), rows) for start, rows in starts]

    def represent(batch: tuple) -> list[Tensor]:
        return [encoder_of(rows)(start, *batch) for start, rows in calls]

    def train(*batch: Any) -> Tensor:
        cached = represent(batch)
        loss, same, cotangents = begin(cached[0], ops.concat(cached), *batch)
        if not same:
            raise ValueError(_DIFFER)
        for (start, rows), end in [*zip(calls, ends)][1:]:
            loss = backward_of(rows)(start, end, loss, cotangents, *batch)
        return reported(window, loss, float(samples))

    return train, lambda *batch: looked(ops.concat(represent(batch)), *batch)


def _represented(encode_fn: Callable, rows: int, piece: tuple) -> tuple[tuple[Tensor, ...], Tensor]:
    """Return the representations of `rows` samples as a tuple, and side by side in one float32 Tensor `(rows, n)`."""
    found, kinds, columns = encode_fn(*piece), (), ()  # type: Any, tuple, tuple
    found = found if isinstance(found, tuple) else (found,)
    for one in found:
        kinds = (*kinds, (one.shape, one.dtype) if isinstance(one, Tensor) else None)
    require_representations(rows, kinds)
    for one in found:
        columns = (*columns, cast(reshape(one, (rows, -1)), ms.float32))
    return found, ops.concat(columns, 1)


def _apart(whole: Tensor, like: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Return Tensors with the dtypes of `like`, and its shapes except for the number of rows."""
    parts, start = (), 0  # type: tuple[Tensor, ...], int
    for one in like:
        columns = one.size // one.shape[0]
        part = whole[:, start:start + columns].reshape(whole.shape[0], *one.shape[1:])
        parts = (*parts, cast(part, one.dtype))
        start += columns
    return parts


@constexpr
def require_representations(rows: int, kinds: tuple) -> bool:
    """Raise an error unless `kinds` are shapes with one row per sample, and one float dtype."""
    remedy = "return a Tensor with one row per sample, or a tuple of such Tensors of one float dtype"
    if not kinds or None in kinds:
        raise TypeError(f"encode_fn returned neither a Tensor nor a tuple of Tensors; {remedy}")
    for shape, dtype in kinds:
        if not shape or shape[0] != rows:
            raise ValueError(f"encode_fn returned a Tensor of shape {tuple(shape)} for {rows} samples; {remedy}")
        if dtype not in FLOATS or dtype != kinds[0][1]:
            raise TypeError(f"encode_fn returned Tensors of {', '.join(str(each) for _, each in kinds)}; {remedy}")
    return True
