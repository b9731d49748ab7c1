"""Several losses, each with a denominator of its own. The totals of a window are computed before it is trained.

    batches of a window ─ weigh each piece ─► totals of all ranks: W_t for each loss t, P pieces
                                                   │
    each piece: value_and_grad of  sum over t of  (w_t / W_t) * P * loss_t,  added with weight 1 (of sums: P / W_t)
                                                   │
    the accumulator's mean over P pieces is the gradient of  sum over t of  (sum of w_t * loss_t) / W_t
"""
from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Optional

import mindspore as ms
import numpy as np
from mindspore import Tensor, ops
from mindspore.ops import constexpr

from ..core.counters import require_whole
from ..core.stages import overrides
from ..tensors import as_vector, as_weight
from .batch import copied
from .graphs import checked_loss, compiled, divisor, parted, raise_wrong_result, require_python, require_readable
from .pieces import checked_aux, counted, select_rows, starts_of
from .program import Program
from .step import TrainStep, next_or_error

if TYPE_CHECKING:
    from ..core.accumulator import Accumulator
    from ..tensors import Numbers
    from .graphs import Functions
    from .pieces import Cut

_SINGLE = ("a train step with losses={} needs all batches of a window before it trains, and cannot train single calls "
           "with accumulate_step={}; train with train_step.epoch(batches), which reads a window ahead, or give "
           "accumulate_step=1 and cut the batch into pieces")
_OPEN = ("the open window was not trained to its end, but the weights of all its batches were already summed; call "
         "accumulator.reset(), which drops it. Next time, leave the loop when train_step.updated is true")


class KnownWindow(NamedTuple):
    """Hold a window that is known before it is trained.

    Attributes:
        batches: Key of the graphs and arguments of each microbatch.
        weights: For each microbatch, the weights of its pieces: float64 `(pieces, losses)`.
        updates: Number of updates before it.
    """

    batches: list[tuple]
    weights: list[np.ndarray]
    updates: int


class SeveralLossesStep(TrainStep):
    """Train with a `forward_fn` that returns several losses; see `make_train_step`.

    Attributes:
        loss_weights: Of the last microbatch: the weight of each loss, a tuple of floats.
    """

    def __init__(self, function: Callable, accumulator: Accumulator, pieces: int, functions_for: Callable,
                 losses: int, batch_axis: int, counts: str) -> None:
        way = accumulator.way
        if way.exchange.inside > 1:
            raise ValueError(f'got losses={losses} with a DataParallel whose ranks sum each microbatch, so the weights '
                             'of a window cannot be summed before it is trained; give sync="window"')
        if any(overrides(stage, "weigh") for stage in way.stages):
            raise ValueError(f'got losses={losses} with on_nonfinite="skip_microbatch", which changes the weight of a '
                             'window while it is trained; give "skip_window"')

        if way.buffers.is_compiled and not way.counters.apart:
            raise ValueError(f"got losses={losses} with an Accumulator that another train step has already used with "
                             "one loss; give each step its own Accumulator, or build this step before the other one "
                             "runs")

        def program_for(samples: int, cut: Cut, names: tuple[str, ...]) -> WeighedProgram:
            return WeighedProgram(functions_for(len(cut), names), accumulator, losses, samples, cut, pieces)

        way.counters.count_apart()  # `seen` counts the weights of the first loss
        way.buffers.fix_unit(1.0)
        super().__init__(function, accumulator, pieces, program_for, batch_axis, counts)
        self._way, self._losses = way, losses

    def _epoch(self, batches: Iterable) -> Iterator[Any]:
        """See `TrainStep.epoch`. It reads all batches of a window, after the previous update, before it trains.

        If reading a batch raises an error, the batches of the same window that were read before are not trained.
        """
        self._require_closed()
        yield from super()._epoch(batches)

    def _train_each(self, batches: Iterator) -> Iterator[tuple[Any, bool]]:
        """See `TrainStep`."""
        batch = next_or_error(batches)
        while batch is not None:
            window, full = self._new_window(), False
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
        require_python("a train step")
        if not self._way.length.is_one:
            step = self.accumulator.fingerprint()["accumulate_step"]
            raise RuntimeError(_SINGLE.format(self._losses, step))
        self._require_closed()
        window = self._new_window()
        self._read(window, batch, named)
        result, = self._train_window(window)
        return result

    def flush(self) -> bool:
        """See `TrainStep`. Raise RuntimeError if a window is open."""
        require_python("flush of a train step")
        self._require_closed()
        return super().flush()

    def forget_graphs(self) -> None:
        """See `TrainStep`."""
        exchange = self.accumulator.exchange

        def total(weights: Tensor) -> Tensor:
            return as_vector(exchange.total(_numbers(weights)))

        super().forget_graphs()
        self.keeper.before_exchange = self._weigh_with_others
        self._total = compiled(total)

    def _weigh_with_others(self) -> None:
        """Take part in summing the weights of windows of the ranks that still have data."""
        self._total(Tensor(np.zeros(self._losses + 1), ms.float32))

    def _require_closed(self) -> None:
        """Raise RuntimeError if a window is open: its weights were summed for all of its batches."""
        facts = self.keeper.facts()
        require_whole(facts.unfinished)
        if facts.mini_step > 0:
            raise RuntimeError(_OPEN)

    def _new_window(self) -> KnownWindow:
        return KnownWindow([], [], int(self.accumulator.update_step))

    def _read(self, window: KnownWindow, batch: tuple, named: dict) -> bool:
        """Add a batch and its weights to a window, without training. Return whether the window is full."""
        key, arguments = self.prepared(batch, named)
        # Copies, which `weigh` waits for: the caller may fill the same Tensors again.
        arguments = tuple(map(copied, arguments))
        window.batches.append((key, arguments))
        with self.forgetting_graphs():
            program = self.program(key)
            assert isinstance(program, WeighedProgram)
            window.weights.append(program.weigh(*arguments))
        first = np.add.accumulate(np.concatenate(window.weights)[:, 0], dtype=np.float32)  # as the device adds
        return self._way.length.is_full_of(len(window.batches), window.updates, first[-1])

    def _train_window(self, window: KnownWindow) -> Iterator[Any]:
        """Train on the microbatches of a window, and close it with the last one."""
        own = np.concatenate(window.weights)
        with self.forgetting_graphs():
            totals = self._total(Tensor([*own.sum(0), (own != 0).any(1).sum()], ms.float32))
        self.keeper.open(len(window.batches))
        for (key, batch), weights in zip(window.batches, window.weights):
            self.keeper.require_open()
            self.loss_weights = tuple(weights.sum(0).tolist())
            yield self.train(key, (totals, weights, *batch))


class WeighedProgram(Program):
    """Add batches of a window whose totals are known. A batch that is not cut is a single piece."""

    def __init__(self, functions: Functions, accumulator: Accumulator, losses: int, samples: int,
                 cut: Cut, pieces: int) -> None:
        super().__init__(accumulator, starts_of(samples, pieces),
                         partial(_piece_fn, functions, accumulator, cut, losses), losses=losses,
                         has_aux=functions.has_aux, batch_axis=functions.batch_axis)
        self._weigh = None if functions.weight_fn is None else compiled(
            _weigh_fn(functions.weight_fn, self.starts, cut, losses))

    def weigh(self, *batch: Any) -> np.ndarray:
        """Return the weights of the pieces, without training: float64 `(pieces, losses)`. It waits for the device."""
        if not self.starts:
            return np.zeros((1, self.losses))
        if self._weigh is None:  # known without the device; but wait for the copies, which are made one by one
            for last in [value for value in batch if isinstance(value, Tensor)][-1:]:
                last.asnumpy()
            return np.repeat([[float(rows)] for _, rows in self.starts], self.losses, axis=1)
        return self._weigh(*batch).asnumpy().astype(np.float64)

    def __call__(self, window: Tensor, weights: np.ndarray, *batch: Any) -> Any:
        """Add a microbatch of a window with these totals. Return the losses, or `(losses, aux)`."""
        keys = [(rows, tuple((of_piece != 0).tolist())) for (_, rows), of_piece in zip(self.starts, weights)]
        return self.run(keys, [(Tensor(of_piece, ms.float32), window) for of_piece in weights], batch)


def _piece_fn(functions: Functions, accumulator: Accumulator, cut: Cut, count: int, rows: int,
              present: tuple[bool, ...]) -> Callable:
    """Return a function that adds a piece. A loss of weight 0 in it is left out: a mean over nothing is 0/0."""
    (forward_fn, _, has_aux, axis, reduction, _), way = functions, accumulator.way
    is_sum = reduction == "sum"
    counts = [t for t in range(count) if present[t]]

    def differentiated(shares: Tensor, *piece: Any) -> tuple:
        returned, aux = parted(forward_fn(*piece), has_aux)
        losses = _checked_losses(returned, count)
        total = Tensor(0.0, ms.float32)
        for t in counts:
            total = total + shares[t] * losses[t].astype(ms.float32)
        return way.begin(total), as_vector(losses), aux

    # The shares are no parameters.
    grad_fn = ms.value_and_grad(differentiated, None, way.weights, has_aux=True)

    def piece(start: Tensor, totals: Tensor, weights: Tensor, window: Tensor, *batch: Any) -> Any:
        inputs = select_rows(start + ops.arange(rows), cut, batch)
        of_window = window[:count]
        numerators = ops.ones_like(weights) if is_sum else weights
        shares = numerators * window[count] / divisor(of_window)
        (total, losses, aux), gradients = grad_fn(shares, *inputs)
        losses = losses / divisor(weights) if is_sum else losses
        aux = checked_aux(aux, rows, axis) if has_aux else aux
        taken = way.add_piece(gradients, 1.0 if counts else 0.0, weights[0])
        losses = ops.depend(counted(losses, weights), (total, taken))
        totals = totals + ops.concat((losses, weights))
        return (totals, weights[:1], aux) if has_aux else totals

    return piece


def _weigh_fn(weight_fn: Callable, starts: list[tuple[int, int]], cut: Cut, losses: int) -> Callable:
    """Return `(*batch) -> weights`, float32 `(pieces, losses)`."""
    def weigh(*batch: Any) -> Tensor:
        weights = ()  # type: tuple[Tensor, ...]
        for start, rows in starts:
            inputs = select_rows(ops.arange(start, start + rows), cut, batch)
            of_piece = weight_fn(*inputs)
            require_entries("weight", losses, len(of_piece) if isinstance(of_piece, tuple) else None)
            weights = (*weights, as_vector(tuple([as_weight(weight) for weight in of_piece])))
        return ops.stack(weights)

    return weigh


def _numbers(vector: Tensor) -> Numbers:
    return tuple([vector[i] for i in range(vector.shape[0])])


def _checked_losses(returned: Any, count: int) -> tuple[Tensor, ...]:
    if isinstance(returned, tuple):
        require_losses(len(returned), count)
        return tuple([checked_loss(loss) for loss in returned])
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
