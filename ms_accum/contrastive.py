"""Losses that couple samples, at the memory of one microbatch: gradient caching for contrastive training.

    pieces ─ encode ─► representations of the batch ─ loss_fn ─► loss and its gradient at each representation
                                                                        │ of each piece's rows
    pieces ─ encode again, this time backward from ◄───────────────────┘ ─► add ─► ... (as any microbatch)
"""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mindspore as ms
from mindspore import Tensor, ops
from mindspore.ops import constexpr

from .accumulate import averaging, checked_micro_size, require_loss
from .accumulator import Accumulator
from .arguments import require_callable
from .batch import positional
from .compiled import CompiledStep, compiled
from .gradients import FLOATS, Gradients
from .split import over_pieces, select_rows


def make_grad_cache_step(
    encode_fn: Callable,
    loss_fn: Callable,
    accumulator: Accumulator,
    *,
    micro_size: int,
) -> GradCacheStep:
    """Build a compiled train step for a loss over a whole batch, such as InfoNCE, with the memory of one piece.

        representations = encode_fn(piece) for each piece             # forward only
        loss = loss_fn(representations of the batch)                  # and d = its gradient at each representation
        gradient = sum of the gradients of sum(d[piece] * encode_fn(piece))

    Accumulation cuts a contrastive batch into small ones with fewer negatives, which is another loss. Here the loss
    sees the whole batch, and by the chain rule the gradient equals that of the undivided batch, for one more forward
    pass. In memory are the activations of one piece, the representations (in float32), and what `loss_fn` computes from
    them (for InfoNCE the n x n similarities).

    Args:
        encode_fn: `(*piece) -> representations`: a Tensor with a row per sample, `(m, ...)`, or a tuple of such Tensors
            of one float dtype. Each row may depend on its own sample only, and both passes have to compute the same:
            layers that draw random numbers (Dropout) are refused when the step runs. BatchNorm in training mode sees
            pieces, so the gradient is that of a network that normalises each piece, and moving statistics move twice.
        loss_fn: `(*representations) -> loss` of the whole batch: float Tensor of shape `()`.
        accumulator: An accumulator with `reduction="mean"`. A batch is one microbatch, with its samples as weight. The
            optimizer may hold parameters of `loss_fn`, too (a temperature). With several ranks, each rank has the
            negatives of its own batch.
        micro_size: Number of pieces that a batch is cut into, as in `make_train_step`; the last one may be shorter.

    Returns:
        `train_step(*batch) -> loss`, a float32 Tensor of shape `()`, with `epoch`, `flush`, `updated` and batches with
        names as in `make_train_step`.

    Raises:
        TypeError: If an argument is of the wrong kind.
        ValueError: If the accumulator has `reduction="sum"`, a loss scaler or a noise scale (a piece's gradient is no
            estimate of the batch's), or may leave out single pieces (`on_nonfinite="skip_microbatch"`,
            `sync="microbatch"`); or `micro_size` is out of range.

    Source: Gao, Zhang, Han, Callan, "Scaling Deep Contrastive Learning Batch Size under Memory Limited Setup", 2021
    (https://arxiv.org/abs/2101.06983).

    Example:
        >>> import numpy as np, mindspore as ms
        >>> from mindspore import nn, ops
        >>> from ms_accum import Accumulator, make_grad_cache_step
        >>> towers = nn.CellList([nn.Dense(3, 2, "ones"), nn.Dense(2, 2, "ones")])
        >>> left, right = towers
        >>> def encode(x, y):
        ...     return left(x), right(y)
        >>> def info_nce(x, y):
        ...     return ops.cross_entropy(ops.matmul(x, y.T), ops.arange(len(x)))
        >>> accumulator = Accumulator(nn.SGD(towers.trainable_params(), 0.1), 1, reduction="mean")
        >>> train_step = make_grad_cache_step(encode, info_nce, accumulator, micro_size=2)
        >>> loss = train_step(ms.Tensor(np.zeros((4, 3)), ms.float32), ms.Tensor(np.zeros((4, 2)), ms.float32))
        >>> print(f"{float(loss):.4f}", int(accumulator.update_step))  # ln 4
        1.3863 1
    """
    require_callable("encode_fn", encode_fn)
    require_callable("loss_fn", loss_fn)
    averaging(accumulator)
    micro_size = checked_micro_size(micro_size)
    skips = accumulator.reducer.each_microbatch or accumulator.on_nonfinite == "skip_microbatch"
    for given, what, remedy in (
            (accumulator.loss_scaler, "a loss_scaler", "leave it out: representations in float32 need none"),
            (accumulator.window.adaptive, "an AdaptiveWindow", "give a number: the noise scale needs gradients of "
             "independent microbatches"),
            (accumulator.noise_scale, "a noise_scale", "leave it out: it needs gradients of independent microbatches"),
            (True if accumulator.losses > 1 else None, "several losses", "give losses=1: loss_fn returns one"),
            (skips or None, 'sync="microbatch" or on_nonfinite="skip_microbatch"',
             'give sync="window" and "skip_window"')):
        if given is not None:
            raise ValueError(f"the accumulator has {what}, which a loss over a whole batch does not allow; {remedy}")
    return GradCacheStep(encode_fn, loss_fn, accumulator, micro_size)


class GradCacheStep(CompiledStep):
    """What `make_grad_cache_step` returns: see there.

    Attributes:
        accumulator: The accumulator it feeds.
        micro_size: Number of pieces that a batch is cut into.
    """

    def __init__(self, encode_fn: Callable, loss_fn: Callable, accumulator: Accumulator, micro_size: int) -> None:
        accumulator._in_pieces = True

        def graph_for(samples: int, cut: tuple[bool, ...], names: tuple[str, ...]) -> Callable:
            encode = positional("encode_fn", encode_fn, len(cut), names)
            accumulate = _accumulate_fn(encode, positional("loss_fn", loss_fn), accumulator, micro_size)

            def accumulate_and_update(*batch: Any) -> tuple[tuple[Tensor, Tensor], Tensor]:
                result = accumulate(samples, cut, *batch)
                return result, accumulator._close_if_due()

            return compiled(accumulate_and_update)

        super().__init__(encode_fn, accumulator, micro_size, graph_for)

    def __call__(self, *batch: Any, **named: Any) -> Tensor:
        """Train on a batch, and return its loss.

        Raises:
            TypeError, ValueError: If the batch, or what `encode_fn` and `loss_fn` return, does not fit.
            ValueError: If `encode_fn` returned other representations in the second pass. The batch is ignored then.
            RuntimeError: If an error left a part of a batch in the open window.
        """
        loss, same = super().__call__(*batch, **named)
        if not same:
            raise ValueError("encode_fn returned two different representations of the same rows, so the gradient would "
                             "be wrong: does it draw random numbers? Switch Dropout off (p=0, or "
                             "network.set_train(False)); the batch was ignored")
        return loss


def _accumulate_fn(encode_fn: Callable, loss_fn: Callable, accumulator: Accumulator, micro_size: int) -> Callable:
    """Return `(samples, cut, *batch) -> (loss, whether both passes agreed)`: all of the step but the update."""
    encode = _encoder(encode_fn)
    first_grad_fn = ms.value_and_grad(_first_loss(encode, loss_fn), 0, accumulator.optimizer.parameters, has_aux=True)

    def other_loss(cotangents: Tensor, *piece: Any) -> Tensor:
        return (cotangents * _side_by_side(encode(*piece))).sum(-1).sum()

    other_grad_fn = ms.value_and_grad(other_loss, None, accumulator.optimizer.parameters)

    def accumulate(samples: int, cut: tuple[bool, ...], *batch: Any) -> tuple[Tensor, Tensor]:
        def cache_piece(cached: Tensor, indices: Tensor, piece: tuple) -> Tensor:
            return _with_rows(cached, indices, _side_by_side(encode(*piece)))

        rows = ops.arange(-(-samples // micro_size))
        first_piece = select_rows(rows, cut, batch)
        # The first piece shows what is to be cached.
        representations = encode(*first_piece)
        shapes = tuple([r.shape if isinstance(r, Tensor) else None for r in representations])
        dtypes = tuple([r.dtype if isinstance(r, Tensor) else None for r in representations])
        require_representations(rows.shape[0], shapes, dtypes)
        once = _side_by_side(representations)
        cached = _with_rows(ops.zeros((samples, once.shape[1]), ms.float32), rows, once)
        cached = over_pieces(cache_piece, cached, 1, samples, micro_size, cut, batch)

        accumulator._note_piece()
        (loss, again), (cotangents, gradients) = first_grad_fn(cached, *first_piece)
        same = _same(once, again, representations[0].dtype)
        # If the two passes differ, the batch is ignored.
        weight = ops.where(same, Tensor(rows.shape[0], ms.float32), Tensor(0.0, ms.float32))

        def add(gradients: Gradients, weight: Tensor) -> Tensor:
            # The gradients of the pieces add up to that of the batch, so each is multiplied by the weight of the batch.
            return accumulator._add_piece((gradients,), (float(samples),), (weight,))

        def add_piece(taken: Tensor, indices: Tensor, piece: tuple) -> Tensor:
            partial, gradients = other_grad_fn(ops.gather(cotangents, indices, 0), *piece)
            weight_of_piece = weight * (indices.shape[0] / rows.shape[0])
            # `depend` uses what nobody needs, or MindSpore warns of "side effect nodes eliminated by mistake".
            return taken + ops.depend(add(gradients, weight_of_piece), partial)

        taken = add(gradients, weight)
        taken = over_pieces(add_piece, taken, 1, samples, micro_size, cut, batch)
        accumulator._end_microbatch(taken * same.astype(ms.int32), notes=1)
        return loss.astype(ms.float32), same

    return accumulate


def _encoder(encode_fn: Callable) -> Callable:
    """Return `encode_fn` as a function that always returns a tuple of representations."""
    def encode(*piece: Any) -> tuple[Tensor, ...]:
        representations = encode_fn(*piece)
        return representations if isinstance(representations, tuple) else (representations,)

    return encode


def _first_loss(encode: Callable, loss_fn: Callable) -> Callable:
    """Return `(cached, *first piece) -> (loss of the batch, representations of the piece)`.

    Rows of the first piece are encoded again, the others are cached: one backward pass gives the gradients of both.
    """
    def first_loss(cached: Tensor, *piece: Any) -> tuple[Tensor, Tensor]:
        representations = encode(*piece)
        fresh = _side_by_side(representations)
        whole = ops.concat((fresh, cached[fresh.shape[0]:])) if fresh.shape[0] < cached.shape[0] else fresh
        loss = loss_fn(*_apart(whole, representations))
        if isinstance(loss, Tensor):
            require_loss(loss.shape, loss.dtype, "loss_fn")
        else:
            require_loss(None, None, "loss_fn")
        return loss, fresh

    return first_loss


def _side_by_side(representations: tuple[Tensor, ...]) -> Tensor:
    """Return them as columns of one float32 Tensor, `(m, columns)`."""
    columns = ()
    for representation in representations:
        columns = (*columns, representation.reshape(representation.shape[0], -1).astype(ms.float32))
    return ops.concat(columns, 1)


def _apart(whole: Tensor, like: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Return what `_side_by_side` joined, with the shapes (but for the rows) and dtypes of `like`."""
    parts = ()
    start = 0
    for representation in like:
        columns = representation.size // representation.shape[0]
        part = whole[:, start:start + columns]
        parts = (*parts, part.reshape(whole.shape[0], *representation.shape[1:]).astype(representation.dtype))
        start += columns
    return parts


def _with_rows(cached: Tensor, indices: Tensor, fresh: Tensor) -> Tensor:
    return ops.tensor_scatter_update(cached, indices.reshape(-1, 1), fresh)


def _same(once: Tensor, again: Tensor, dtype: ms.Type) -> Tensor:
    """Return whether they agree up to rounding: bool Tensor of shape `()`. NaN agrees with anything."""
    tolerance = 1e-3 if dtype in (ms.float32, ms.float64) else 2e-2
    return ops.logical_not((once - again).abs().max() > tolerance * once.abs().max())


@constexpr
def require_representations(rows: int, shapes: tuple, dtypes: tuple) -> bool:
    """Refuse representations without a row per sample, or of several dtypes."""
    remedy = "return a Tensor with a row per sample, or a tuple of such Tensors of one float dtype"
    if not shapes or None in shapes:
        raise TypeError(f"encode_fn returned neither a Tensor nor a tuple of Tensors; {remedy}")
    for shape in shapes:
        if not shape or shape[0] != rows:
            raise ValueError(f"encode_fn returned a Tensor of shape {tuple(shape)} for {rows} samples; {remedy}")
    if dtypes[0] not in FLOATS or any(dtype != dtypes[0] for dtype in dtypes):
        raise TypeError(f"encode_fn returned Tensors of {', '.join(map(str, dtypes))}; {remedy}")
    return True
