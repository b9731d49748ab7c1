"""Losses that couple samples, with the memory of one piece: gradient caching for contrastive training.

    pieces ─ encode ─► representations of the batch ─ loss_fn ─► loss and its gradient at each representation
                                                                        │ of each piece's samples
    pieces ─ encode again, this time backward from ◄───────────────────┘ ─► add ─► ... (as any microbatch)
"""
from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Optional, Union

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops
from mindspore.ops import constexpr

from ..arguments import require_callable, require_options
from ..core.accumulator import Options
from ..mindspore_api import jit_class
from ..tensors import FLOATS, after, cast, reshape
from .batch import Loss, checked_loss, checked_pieces, places_of, positional, select_rows
from .pieces import Pieces
from .shapes import Inputs, Shapes
from .train_mode import checked_networks
from .train_step import TrainStep, averaging

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ..core.boundary import Boundary
    from ..core.length import AccumulateStep
    from .batch import Cut


def make_grad_cache_step(
    encode_fn: Callable,
    loss_fn: Callable,
    optimizer: nn.Optimizer,
    accumulate_step: AccumulateStep,
    *,
    pieces: int,
    network: Union[nn.Cell, tuple[nn.Cell, ...], None] = None,
    **options: Unpack[Options],
) -> TrainStep:
    """Build a compiled train step for a loss over a whole batch, such as InfoNCE, that needs the memory of one piece.

        representations = encode_fn(piece) for each piece             # forward only
        loss = loss_fn(representations of the batch)                  # and d = its gradient at each representation
        gradient = sum of the gradients of sum(d[piece] * encode_fn(piece))

    Plain accumulation cuts a contrastive batch into small batches with fewer negatives, which is a different loss. Here
    the loss sees the whole batch, and by the chain rule the gradient equals that of the undivided batch. It costs one
    more forward pass. The memory holds the activations of one piece, the representations (in float32), and what
    `loss_fn` computes from them (for InfoNCE the n x n similarities).

    Args:
        encode_fn: `(*piece) -> representations`: a Tensor of shape `(m, ...)` with one representation per sample, or a
            tuple of such Tensors of one float dtype. A representation may depend on its own sample only, and both
            passes must compute the same values: random layers (Dropout) raise an error when the step runs. BatchNorm in
            training mode normalises each piece, not the batch, and its moving statistics are updated twice.
        loss_fn: `(*representations) -> loss` of the whole batch: float Tensor of shape `()`.
        optimizer: An optimizer. A batch is one microbatch, and its weight is its number of samples. The optimizer may
            also hold parameters of `loss_fn` (e.g. a temperature). With several ranks, each rank uses the negatives of
            its own batch.
        accumulate_step: Number of batches in a window.
        pieces: Number of pieces that a batch is cut into, as in `make_train_step`; the last one may be shorter.
        network: The networks that the functions use, as in `make_train_step`.
        **options: Options of `Accumulator`, as in `make_train_step`.

    Returns:
        `train_step(*batch) -> loss`, a float32 Tensor of shape `()`. `epoch`, `flush`, `updated` and named batches work
        as in `make_train_step`.

    Raises:
        TypeError: If an argument is of the wrong kind.
        ValueError: If `pieces` is out of range, or an option looks at single pieces (a noise scale,
            `on_nonfinite="skip_microbatch"`) or exchanges them between ranks (`sync="microbatch"`): here, the gradient
            of a piece is not an estimate of the batch's gradient.

    Source: Gao, Zhang, Han, Callan, "Scaling Deep Contrastive Learning Batch Size under Memory Limited Setup", 2021
    (https://arxiv.org/abs/2101.06983).

    Example:
        >>> import numpy as np, mindspore as ms
        >>> from mindspore import nn, ops
        >>> from ms_accum import make_grad_cache_step
        >>> towers = nn.CellList([nn.Dense(3, 2, "ones"), nn.Dense(2, 2, "ones")])
        >>> left, right = towers
        >>> def encode(x, y):
        ...     return left(x), right(y)
        >>> def info_nce(x, y):
        ...     return ops.cross_entropy(ops.matmul(x, y.T), ops.arange(len(x)))
        >>> train_step = make_grad_cache_step(encode, info_nce, nn.SGD(towers.trainable_params(), 0.1), 1, pieces=2)
        >>> loss = train_step(ms.Tensor(np.zeros((4, 3)), ms.float32), ms.Tensor(np.zeros((4, 2)), ms.float32))
        >>> print(f"{float(loss):.4f}", int(train_step.accumulator.update_step))  # ln 4
        1.3863 1
    """
    require_callable("encode_fn", encode_fn)
    require_callable("loss_fn", loss_fn)
    require_options(make_grad_cache_step, options, Options)
    accumulator, pieces = averaging(optimizer, accumulate_step, **options), checked_pieces(pieces)
    window = accumulator.window
    window.exchange.require_alike({"the kind of step": "make_grad_cache_step", "pieces": pieces})
    if window.exchange.inside > 1 or window.looks_at_gradients:
        raise ValueError('an option looks at single pieces (stages, "skip_microbatch", or sync="microbatch" '
                         'or "node"), but here the gradient of a piece is not an estimate of that of the batch; give '
                         '"skip_window" or sync="window"')

    shapes = Shapes(encode_fn, "encode_fn")

    def graphs_for(samples: int, cut: Cut, names: tuple[str, ...]) -> Pieces:
        encode = Loss(window, positional("encode_fn", encode_fn, len(cut), names))
        return CachedPieces(accumulator.boundary, encode, positional("loss_fn", loss_fn), samples, cut, pieces,
                            shapes.inputs_of(samples, cut, names))

    return TrainStep((encode_fn, loss_fn), accumulator, pieces, graphs_for, shapes,
                     networks=checked_networks(network))


class CachedPieces(Pieces):
    """Encode the pieces of a batch twice: for the loss of the batch, and backward from its gradient.

    Args:
        encode: Its `forward_fn` is `encode_fn`.
        loss_fn: The loss of the batch, given its representations.
    """

    def __init__(self, boundary: Boundary, encode: Loss, loss_fn: Callable, samples: int, cut: Cut,
                 pieces: int, inputs: Optional[Inputs] = None) -> None:
        super().__init__(boundary, encode, samples, cut, pieces, inputs=inputs)
        self._whole = self.alone = None
        if samples:
            self._starts = [(Tensor(start, ms.int32), rows) for start, rows in self.starts]
            cached = {rows: CachedPiece(encode, loss_fn, samples, cut, rows) for _, rows in self.starts}
            self._encoders = {rows: boundary.straight(piece.encode, inputs) for rows, piece in cached.items()}
            self._first = boundary.straight(cached[self._starts[0][1]].first, inputs)
            self._loss = boundary.straight(cached[self._starts[0][1]].evaluated, inputs)
            self._backward = {rows: piece.backward for rows, piece in cached.items()}

    def __call__(self, *batch: Any) -> Tensor:
        """Add a microbatch, and return its loss.

        Raise ValueError if `encode_fn` returned other representations in the second pass. The batch is then ignored.
        """
        if not self.starts:
            return super().__call__(*batch)
        representations = self._represented(batch)
        loss, same, cotangents = self._first(representations[0], ops.concat(representations), *batch)
        if not same:
            self.boundary.end_pieces(1)
            raise ValueError("encode_fn returned two different representations of the same samples, so the gradient "
                             "would be wrong; the batch was ignored. If it draws random numbers, switch Dropout off "
                             "(p=0, or network.set_train(False))")
        for start, rows in self._starts[1:]:
            self.graph(rows)(start, cotangents, *batch)
        self.boundary.end_pieces(len(self._starts))
        return loss

    def evaluated(self, *batch: Any) -> np.ndarray:
        """See `Pieces`. The loss of the whole batch weighs its number of samples."""
        if not self.starts:
            return super().evaluated(*batch)
        return np.array([self.samples * float(self._loss(ops.concat(self._represented(batch)), *batch)), self.samples])

    def _represented(self, batch: tuple) -> tuple[Tensor, ...]:
        return tuple([self._encoders[rows](start, *batch) for start, rows in self._starts])

    def piece(self, rows: int) -> Callable:
        """See `Pieces`."""
        return self._backward[rows]


@jit_class
class CachedPiece:
    """Encode a piece of `rows` samples, and add the gradient of it."""

    def __init__(self, encode: Loss, loss_fn: Callable, samples: int, cut: Cut, rows: int) -> None:
        self.encode_fn, self.loss_fn, self.window = encode.forward_fn, loss_fn, encode.window
        self.samples, self.cut, self.rows, self.places = samples, cut, rows, places_of(rows)
        self.first_grad_fn = ms.value_and_grad(self.loss_of_batch, 0, self.window.weights, has_aux=True)
        self.grad_fn = ms.value_and_grad(self.product, None, self.window.weights)

    def representations(self, piece: tuple) -> tuple[Tensor, ...]:
        """Return the representations, always as a tuple."""
        returned = self.encode_fn(*piece)
        return returned if isinstance(returned, tuple) else (returned,)

    def encode(self, start: Tensor, *batch: Any) -> Tensor:
        """Return the representations of the piece that begins with sample `start`, side by side."""
        representations = self.representations(select_rows(start + self.places, self.cut, batch))
        shapes = tuple([r.shape if isinstance(r, Tensor) else None for r in representations])
        dtypes = tuple([r.dtype if isinstance(r, Tensor) else None for r in representations])
        require_representations(self.rows, shapes, dtypes)
        return _side_by_side(representations)

    def first(self, once: Tensor, cached: Tensor, *batch: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Add the first piece. Return the loss, whether both passes agreed, and its gradient at the representations.

        The first piece is encoded again, the representations of the others are cached. One backward pass gives the
        gradients of the first piece, of `loss_fn`'s own parameters, and at the representations. Gradients of pieces
        must add up to that of the batch, but each is weighted by its samples. So the loss is multiplied by samples /
        rows.
        """
        piece = select_rows(self.places, self.cut, batch)
        (total, loss, again), (cotangents, gradients) = self.first_grad_fn(cached, *piece)
        same = _same(once, again)
        weight = ops.where(same, Tensor(self.rows, ms.float32), Tensor(0.0, ms.float32))
        taken = self.window.add(gradients, weight, None, cast(same, ms.int32))
        loss = cast(ops.depend(loss, (total, taken)), ms.float32)
        return loss, same, cotangents * (self.rows / self.samples)

    def loss_of_batch(self, cached: Tensor, *piece: Any) -> tuple:
        """Return the value to differentiate, the loss, and the representations of the first piece."""
        loss, fresh = self.loss_and_first(cached, piece)
        scaled = self.window.scaled_loss(loss)
        return after(self.window.begin(scaled), scaled) * (self.samples / self.rows), loss, fresh

    def loss_and_first(self, cached: Tensor, piece: tuple) -> tuple[Tensor, Tensor]:
        """Return the loss of the batch, and the representations of the first piece, which is encoded again."""
        representations = self.representations(piece)
        fresh = _side_by_side(representations)
        whole = ops.concat((fresh, cached[self.rows:])) if self.rows < self.samples else fresh
        return checked_loss(self.loss_fn(*_apart(whole, representations)), "loss_fn"), fresh

    def evaluated(self, cached: Tensor, *batch: Any) -> Tensor:
        """Return the loss of the batch, given the representations of all pieces."""
        return cast(self.loss_and_first(cached, select_rows(self.places, self.cut, batch))[0], ms.float32)

    def backward(self, start: Tensor, cotangents: Tensor, *batch: Any) -> Tensor:
        """Add the gradient of the piece that begins with sample `start`."""
        indices = start + self.places
        product, gradients = self.grad_fn(ops.gather(cotangents, indices, 0),
                                          *select_rows(indices, self.cut, batch))
        return ops.depend(product, self.window.add(gradients, float(self.rows)))

    def product(self, cotangents: Tensor, *piece: Any) -> Tensor:
        """Return the value to differentiate. It is not scaled again: the loss that the cotangents come from was."""
        representations = self.representations(piece)
        total = (cotangents * _side_by_side(representations)).sum(-1).sum() * (self.samples / self.rows)
        return after(self.window.begin(total), total)


def _side_by_side(representations: tuple[Tensor, ...]) -> Tensor:
    """Return the representations as columns of one float32 Tensor, `(m, columns)`."""
    columns = ()  # type: tuple[Tensor, ...]
    for representation in representations:
        columns = (*columns, cast(reshape(representation, (representation.shape[0], -1)), ms.float32))
    return ops.concat(columns, 1)


def _apart(whole: Tensor, like: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Undo `_side_by_side`: return Tensors with the dtypes of `like`, and its shapes except for the number of rows."""
    parts = ()  # type: tuple[Tensor, ...]
    start = 0
    for representation in like:
        columns = representation.size // representation.shape[0]
        part = whole[:, start:start + columns]
        parts = (*parts, part.reshape(whole.shape[0], *representation.shape[1:]).astype(representation.dtype))
        start += columns
    return parts


def _same(once: Tensor, again: Tensor) -> Tensor:
    """Return whether two Tensors agree up to rounding in 16 bits: bool Tensor of shape `()`. NaN always agrees."""
    return ops.logical_not((once - again).abs().max() > 2e-2 * once.abs().max())


@constexpr
def require_representations(rows: int, shapes: tuple, dtypes: tuple) -> bool:
    """Raise an error for representations without one row per sample, or of several dtypes."""
    remedy = "return a Tensor with one row per sample, or a tuple of such Tensors of one float dtype"
    if not shapes or None in shapes:
        raise TypeError(f"encode_fn returned neither a Tensor nor a tuple of Tensors; {remedy}")
    for shape in shapes:
        if not shape or shape[0] != rows:
            raise ValueError(f"encode_fn returned a Tensor of shape {tuple(shape)} for {rows} samples; {remedy}")
    if dtypes[0] not in FLOATS or any(dtype != dtypes[0] for dtype in dtypes):
        raise TypeError(f"encode_fn returned Tensors of {', '.join(map(str, dtypes))}; {remedy}")
    return True
