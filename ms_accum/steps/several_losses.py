"""Several losses, each with a denominator of its own. The totals of a window are computed before it is trained.

    batches of a window ─ weigh each piece ─► totals of all ranks: W_t for each loss t, with the mean W
                                                   │
    each piece: value_and_grad of  sum over t of  (w_t * W / W_t) * loss_t  (of sums: W / W_t * loss_t), in units of the
                first piece's weight; the weight of the piece is the mean of its w_t
                                                   │
    the accumulator divides by the sum W of these:  sum over t of  (sum of w_t * loss_t) / W_t
"""
from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple, Optional

import mindspore as ms
import numpy as np
from mindspore import Tensor, ops
from mindspore.ops import constexpr

from ..distributed.tags import STOP
from ..mindspore_api import jit_class
from ..tensors import after, as_numbers, as_vector, as_weight, cast, concat, stack
from .batch import (
    Loss,
    checked_loss,
    copied,
    divisor,
    parted,
    places_of,
    raise_wrong_result,
    require_readable,
    select_rows,
)
from .pieces import Pieces, checked_aux, counted
from .train_step import COMPILES, TrainStep, next_or_error, require_python

if TYPE_CHECKING:
    from ..core.accumulator import Accumulator
    from ..core.boundary import Boundary
    from ..core.stream import Stream
    from ..core.window import Window
    from ..tensors import Scalar
    from .batch import Cut
    from .shapes import Inputs, Shapes

_SINGLE = ("a train step with losses={} needs all batches of a window before it trains, and cannot train single calls "
           "with accumulate_step={}; train with train_step.epoch(batches), which reads a window ahead, or give "
           "accumulate_step=1 and cut the batch into pieces")
_OPEN = ("the open window was not trained to its end, but the weights of all its batches were already summed; call "
         "accumulator.reset(), which drops it. Next time, leave the loop when train_step.updated is true")
_CHANGED = ("the open window was closed or dropped inside the loop, but its weights were already summed for all of its "
            "batches; leave the loop and call accumulator.reset(). Call flush(), apply() and reset() only outside of "
            "the loop")


class KnownWindow(NamedTuple):
    """Hold a window that is known before it is trained.

    Attributes:
        batches: Layout and arguments of each microbatch.
        weights: For each microbatch, the weights of its pieces: float64 `(pieces, losses)`.
    """

    batches: list[tuple]
    weights: list[np.ndarray]


class SeveralLossesStep(TrainStep):
    """Train with a `forward_fn` that returns several losses; see `make_train_step`.

    An epoch reads all batches of a window, after the previous update, before it trains. If reading one raises an error,
    those of the same window that were read before are not trained. If an epoch goes on with an open window, the whole
    window is trained again.

    Attributes:
        loss_weights: Of the last microbatch: the weight of each loss, a tuple of floats.
    """

    __slots__ = ("_total", "loss_weights")

    def __init__(self, functions: tuple[Callable, ...], accumulator: Accumulator, pieces: int,
                 graphs_for: Callable[..., Pieces], shapes: Shapes, losses: int, batch_axis: int, counts: str,
                 eager: bool) -> None:
        if accumulator.exchange.inside > 1:
            raise ValueError(f'got losses={losses} with a DataParallel whose ranks sum each microbatch, so the weights '
                             'of a window cannot be summed before it is trained; give sync="window"')
        super().__init__(functions, accumulator, pieces, graphs_for, shapes, batch_axis, counts, eager)
        self._losses, self._total = losses, None  # type: int, Optional[Callable]
        self.boundary.settings["number of losses"] = str(losses)

    def _begin_epoch(self, resume: Optional[bool]) -> int:
        """See `TrainStep`."""
        self._watched()  # for its layers
        skip = self.boundary.begin_epoch(resume, closed=True)
        self._require_closed()
        return skip

    def _train_each(self, batches: Iterator) -> Iterator[tuple[Any, bool]]:
        """See `TrainStep`."""
        batch = next_or_error(batches)
        while batch is not None:
            window, full = KnownWindow([], []), False
            while batch is not None and not full:
                if isinstance(batch, Exception):
                    raise batch
                full = self._read(window, *batch)
                batch = None if full else next_or_error(batches)
            for left, result in zip(range(len(window.batches))[::-1], self._train_window(window)):
                if full and left == 0:  # after the update: the next batch may be made with the new weights
                    batch = next_or_error(batches)
                yield result, batch is None and left == 0

    def __call__(self, *batch: Any, **named: Any) -> Any:
        """See `TrainStep`. The batch is a window of its own. Raise RuntimeError unless `accumulate_step=1`."""
        require_python("a train step", COMPILES)
        if not self.window.length.is_one:
            step = self.boundary.settings["accumulate_step"]
            raise RuntimeError(_SINGLE.format(self._losses, step))
        window = KnownWindow([], [])
        self._read(window, batch, named)
        result, = self._train_window(window, in_epoch=False)
        return result

    def flush(self) -> bool:
        """See `TrainStep`. Raise RuntimeError if a window is open."""
        require_python("flush of a train step", COMPILES)
        self._require_closed()
        return super().flush()

    def _forget_graphs(self) -> None:
        """See `TrainStep`."""
        super()._forget_graphs()
        self._total = None

    def _fix_unit(self, samples: int) -> None:
        """See `TrainStep`. Here, the unit is the weight of the first piece, which is not known yet."""

    def _before_exchange(self) -> None:
        """Take part in summing the weights of windows of the ranks that still have data."""
        self._summed(np.zeros(self._losses), 0.0)

    def _summed(self, weights: np.ndarray, active: float) -> np.ndarray:
        """Return the sums of a window's weights over all ranks: float32 `(losses,)`.

        `active`: 1 on a rank that still has data.
        """
        exchange = self.window.exchange
        if exchange.ranks == 1:
            return weights.astype(np.float32)
        if self._total is None:
            self._total = self.boundary.compiled(Total(self.window))
        exchange.require_agreement()  # the last update did not read whether ranks agreed, and nobody may answer now
        totals = self._total(Tensor(weights, ms.float32), Tensor(active, ms.float32))
        exchange.require_agreement()
        return totals.asnumpy()

    def _require_closed(self) -> None:
        """Raise RuntimeError if a window is open: its weights were summed for all of its batches. Tell other ranks."""
        self.boundary.ask()
        if self.boundary.held > 0:
            self.window.exchange.announce(STOP)
            raise RuntimeError(_OPEN)

    def _read(self, window: KnownWindow, batch: tuple, named: dict) -> bool:
        """Add a batch and its weights to a window, without training. Return whether the window is full."""
        key, arguments = self._prepared(batch, named)
        # Copies, which `weigh` waits for: the caller may fill the same Tensors again.
        arguments = tuple(map(copied, arguments))
        if not window.batches:
            self._require_closed()
        window.batches.append((key, arguments))
        try:
            graphs = self._graphs_of(key)
            assert isinstance(graphs, WeighedPieces)
            window.weights.append(graphs.weigh(*arguments))
        except Exception as error:
            self._explain(error)
            raise
        weights = np.concatenate(window.weights).mean(1, dtype=np.float32)
        if weights.any():  # gradients are in this unit, or those of many tokens would overflow in float16
            self.window.fix_unit(float(weights[weights > 0][0]))
        total = np.add.accumulate(weights, dtype=np.float32)[-1]  # as the device adds
        return self.window.length.missing(len(window.batches), self.boundary.updates, total) == 0

    def _train_window(self, window: KnownWindow, in_epoch: bool = True) -> Iterator[Any]:
        """Train on the microbatches of a window, and close it with the last one."""
        try:
            totals = self._summed(np.concatenate(window.weights).sum(0), 1.0)
        except Exception as error:
            self._explain(error)
            raise
        for place, ((key, batch), weights) in enumerate(zip(window.batches, window.weights)):
            if place > 0 and not self.boundary.is_known:
                raise RuntimeError(_CHANGED)
            self.loss_weights = tuple(weights.sum(0).tolist())
            yield self._train(key, (totals, weights, *batch), len(window.batches) - place, in_epoch)


@jit_class
class Total:
    """Sum the weights of a window over all ranks."""

    def __init__(self, window: Window) -> None:
        self.exchange = window.exchange

    def __call__(self, weights: Tensor, active: Tensor) -> Tensor:
        """Return the sums of weights: float32 `(losses,)`."""
        return as_vector(self.exchange.total(as_numbers(weights, weights.shape[0]), active))


@jit_class
class SeveralLosses(Loss):
    """Differentiate a function of a piece that returns several losses; see `Loss`."""

    def __init__(self, window: Window, forward_fn: Callable, weight_fn: Optional[Callable], has_aux: bool,
                 reduction: str, batch_axis: int, losses: int, stream: Optional[Stream] = None) -> None:
        super().__init__(window, forward_fn, weight_fn, has_aux, reduction, batch_axis, stream=stream)
        self.losses = losses

    def evaluated(self, rows: Scalar, piece: tuple) -> tuple[Tensor, Tensor]:
        """See `Loss`."""
        losses = checked_losses(parted(self.forward_fn(*piece), False, self.has_aux, self.returns)[0], self.losses)
        return as_vector(losses), weights_of(self.weight_fn, self.losses, rows, piece)


class WeighedPieces(Pieces):
    """Add batches of a window whose totals are known. A batch that is not cut is a single piece."""

    def __init__(self, boundary: Boundary, loss: SeveralLosses, samples: int, cut: Cut, pieces: int,
                 inputs: Optional[Inputs] = None) -> None:
        super().__init__(boundary, loss, samples, cut, pieces, loss.losses, inputs)
        self._weigh: Optional[Callable] = None
        if loss.weight_fn is not None:
            self._weigh = boundary.compiled(Weights(loss, cut, self.starts), inputs)

    def weigh(self, *batch: Any) -> np.ndarray:
        """Return the weights of the pieces, without training: float64 `(pieces, losses)`. It waits for the device."""
        if not self.starts:
            return np.zeros((1, self.losses))
        if self._weigh is None:  # known without the device; but wait for the copies, which are made one by one
            for last in [value for value in batch if isinstance(value, Tensor)][-1:]:
                last.asnumpy()
            return np.repeat([[float(rows)] for _, rows in self.starts], self.losses, axis=1)
        return self._weigh(*batch).asnumpy().astype(np.float64)

    def __call__(self, totals: np.ndarray, weights: np.ndarray, *batch: Any) -> Any:
        """Add a microbatch of a window with these totals. Return the losses, or `(losses, aux)`."""
        keys = [(rows, *(of_piece != 0).tolist()) for (_, rows), of_piece in zip(self.starts, weights)]
        numbers = [(Tensor(numbers_of(self.loss, of_piece.astype(np.float32), totals)),) for of_piece in weights]
        return self.run(keys, numbers, batch)

    def piece(self, rows: int, *present: bool) -> Callable:
        """Return what adds a piece of `rows` samples in which these losses have a weight."""
        return WeighedPiece(self.loss, self.cut if len(self.starts) > 1 else None, rows, present)


def numbers_of(loss: Loss, weights: np.ndarray, totals: np.ndarray) -> np.ndarray:
    """Return what a piece with these weights takes: the factors on its losses, its weights, and their mean.

    All are known before it is trained, so the host computes them: as kernels, they cost more than the copy.
    """
    # A stage that looks at gradients gets those of a mean; otherwise, they are added as they are.
    weight, window = weights.mean(), loss.window
    unit = (weight or 1.0) if window.looks_at_gradients else window.unit
    numerators = np.ones_like(weights) if loss.is_sum else weights
    shares = numerators * totals.mean() / (np.where(totals == 0, 1, totals) * unit)
    return np.concatenate((shares, weights, weight), axis=None, dtype=np.float32)


@jit_class
class WeighedPiece:
    """Add a piece. A loss of weight 0 in it is left out: a mean over nothing is 0/0. `cut`: see `Evaluated`."""

    def __init__(self, loss: Loss, cut: Optional[Cut], rows: int, present: tuple[bool, ...]) -> None:
        self.loss, self.window, self.cut, self.rows, self.count = loss, loss.window, cut, rows, len(present)
        self.places = places_of(rows)
        self.counts = [t for t in range(len(present)) if present[t]]
        # The shares are no parameters.
        self.grad_fn = ms.value_and_grad(self.begun, None, loss.window.weights, has_aux=True)

    def begun(self, shares: Tensor, *piece: Any) -> tuple:
        """Return the value to differentiate, after a mark (see `Loss.begun`), the losses and aux."""
        returned, _, aux = parted(self.loss.forward_fn(*piece), False, self.loss.has_aux, self.loss.returns)
        losses = checked_losses(returned, self.count)
        total = Tensor(0.0, ms.float32)
        for t in self.counts:
            total = total + shares[t] * cast(losses[t], ms.float32)
        total = self.window.scaled_loss(total)
        if self.loss.stream is not None:
            self.loss.stream.start()
        return after(self.window.begin(total), total), as_vector(losses), aux

    def __call__(self, start: Tensor, totals: Tensor, numbers: Tensor, *batch: Any) -> Any:
        """Add a piece, given its numbers. See `Piece`."""
        piece = batch if self.cut is None else select_rows(start + self.places, self.cut, batch)
        weights = numbers[self.count:2 * self.count]
        unit = None if self.window.looks_at_gradients else self.window.unit if self.counts else 0.0  # see `Window.add`
        (total, losses, aux), gradients = self.loss.differentiated(self.grad_fn, unit, numbers[:self.count], *piece)
        losses = losses / divisor(weights) if self.loss.is_sum else losses
        if self.loss.has_aux:
            aux = checked_aux(aux, self.rows, self.loss.batch_axis)
        active = self.window.add(gradients, numbers[2 * self.count], unit)
        losses = ops.depend(counted(losses, weights), total)
        totals = ops.depend(totals + concat((losses, weights)), active)
        return (totals, weights[:1], aux) if self.loss.has_aux else totals


@jit_class
class Weights:
    """Weigh the pieces of a batch, without training."""

    def __init__(self, loss: SeveralLosses, cut: Cut, starts: list[tuple[int, int]]) -> None:
        self.weight_fn: Any = loss.weight_fn
        self.losses, self.cut = loss.losses, cut
        self.places = tuple([places_of(rows, start) for start, rows in starts])

    def __call__(self, *batch: Any) -> Tensor:
        """Return the weights of the pieces: float32 `(pieces, losses)`."""
        weights = ()  # type: tuple[Tensor, ...]
        for places in self.places:
            piece = select_rows(places, self.cut, batch)
            weights = (*weights, weights_of(self.weight_fn, self.losses, places.shape[0], piece))
        return stack(weights)


def weights_of(weight_fn: Optional[Callable], losses: int, rows: Scalar, piece: tuple) -> Tensor:
    """Return the weights of the losses of a piece: float32 `(losses,)`."""
    if weight_fn is None:
        return as_vector((float(rows),) * losses)
    weights = weight_fn(*piece)
    require_entries("weight", losses, len(weights) if isinstance(weights, tuple) else None)
    checked = ()  # type: tuple[Any, ...]
    for weight in weights:
        checked = (*checked, as_weight(weight))
    return as_vector(checked)


def checked_losses(returned: Any, count: int) -> tuple[Tensor, ...]:
    """Return the losses. Raise TypeError unless there are `count` of them."""
    if isinstance(returned, tuple):
        require_losses(len(returned), count)
        losses = ()  # type: tuple[Tensor, ...]
        for loss in returned:
            losses = (*losses, checked_loss(loss))
        return losses
    raise_wrong_result(returned, returned is None, "forward_fn", f"a tuple of {count} because of losses={count}")
    return (returned,)


@constexpr
def require_losses(length: int, count: int) -> bool:
    """Raise TypeError unless there is a tuple of `count` losses."""
    require_readable(length, "forward_fn", f"a tuple of {count} because of losses={count}")
    if length != count:
        raise TypeError(f"forward_fn returned {length} losses, expected a tuple of {count} because of losses={count}; "
                        "with has_aux=True, ((loss, loss), aux)")
    return True


@constexpr
def require_entries(name: str, losses: int, entries: Optional[int]) -> bool:
    """Raise ValueError unless there is a tuple with an entry for each loss."""
    if entries != losses:
        got = "no tuple" if entries is None else f"a tuple of {entries}"
        raise ValueError(f"{name} is {got}, expected a tuple of {losses} because of losses={losses}; let weight_fn "
                         "return one weight for each loss, or change losses= (in a shell: --losses)")
    return True
