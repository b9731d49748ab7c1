"""A train step of straight graphs, scheduled by the host: one adds a microbatch or a piece of it, one updates.

    host:    count down what the window needs            at 0: ask the device; full? close it, and count anew
                     │                                                  │
    device:  add, straight: gather rows,                 update, straight: exchange, normalise, clip, optimizer, clear
             value_and_grad, add
"""
from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING, Any, Optional

from ..core.boundary import Boundary
from ..core.optimizers import require_rates, require_same_parameters, require_trainable
from .batch import as_arguments, as_tensors, named_values, ordered, require_batched
from .errors import explaining_errors
from .pieces import layout
from .program import Empty
from .straight import straight

if TYPE_CHECKING:
    from ..core.accumulator import Accumulator


class TrainStep:
    """A step over a batch, scheduled by the host. What `make_train_step` returns.

    Args:
        function: The function whose parameters order a batch with names.
        accumulator: The accumulator that it feeds.
        pieces: Number of pieces that a batch is cut into.
        microbatch_for: Called as `microbatch_for(samples, cut, names)`, once for each layout of a batch; returns what
            adds one microbatch when it is called, such as `microbatch.Uncut`.
        batch_axis: Which axis counts the samples.
        losses: How many losses a batch has.
        has_aux: Whether calls return `(loss, aux)`.

    Attributes:
        accumulator: The accumulator that it feeds.
        pieces: Number of pieces that a batch is cut into.
        updated: Whether the microbatch of the last call closed a window with an update, so that none is open: a bool.
            When an epoch yields its last loss, and after it: whether that one or the incomplete window made an update.
    """

    def __init__(self, function: Callable, accumulator: Accumulator, pieces: int, microbatch_for: Callable,
                 batch_axis: int = 0, losses: int = 1, has_aux: bool = False) -> None:
        self.accumulator, self.pieces, self.batch_axis, self.updated = accumulator, pieces, batch_axis, False
        self._function, self._microbatch_for, self._losses, self._has_aux = function, microbatch_for, losses, has_aux
        self._orders: dict[frozenset, tuple[str, ...]] = {}
        self.forget_graphs()

    def forget_graphs(self) -> None:
        """Compile everything again from now on."""
        self._microbatches: dict[tuple, Any] = {}
        self._boundary = Boundary(self.accumulator, partial(straight, accumulator=self.accumulator))

    def epoch(self, batches: Iterable) -> Iterator[Any]:
        """Train on each of `batches`, and yield what each call returns. Apply the incomplete last window.

        That is done before the last loss is yielded, so it happens in `zip(data, train_step.epoch(data))`, too, and
        `updated` is true then. To know which batch is the last, each is read before the loss of the one before it is
        yielded. So an iterator whose loop is left early has been read one batch further: give `islice(iterator, n)` to
        train on n of its batches. A generator must not wait for what the loop does, and the position of a loader is one
        ahead. An error of reading a batch is raised after the loss of the one before it, and not at all if the loop is
        left with that loss.

        Leaving the loop early (`break`, an error) leaves the window open: the next epoch goes on with it, `flush()`
        applies it, `accumulator.reset()` drops it. With several ranks, the data may be uneven: a rank at its end takes
        part in the windows of the others with weight 0, and gets its last loss when all have ended.

        Args:
            batches: A batched `mindspore.dataset`, or any iterable of Tensors, tuples, lists or dicts (such as
                `dataset.create_dict_iterator()`). NumPy arrays are copied, so a generator may fill them again.

        Yields:
            The loss, or `(loss, aux)`, of each microbatch.

        Raises:
            ValueError: If a `mindspore.dataset` of samples has no batch operation, if a parameter was frozen since the
                optimizer was built, or if its list of learning rates has no rate for the next update.
            RuntimeError: With several losses, if the last loop left a window open.
        """
        optimizer = self.accumulator.optimizer
        require_batched(batches)
        require_trainable(optimizer.parameters)
        require_rates(optimizer)
        last = False
        for result, last in self._train_each(map(as_arguments, batches)):
            if last:
                self._flush_after_last()
            yield result
        if not last:  # there was no batch: take part in the windows of other ranks
            self.flush()

    def _train_each(self, batches: Iterator) -> Iterator[tuple[Any, bool]]:
        """Train on each batch. Yield what that returned, and whether it was the last one."""
        batch = next_or_error(batches)
        while batch is not None:
            if isinstance(batch, Exception):
                raise batch
            arguments, named = batch
            result = self(*arguments, **named)
            batch = next_or_error(batches)
            yield result, batch is None

    def _flush_after_last(self) -> None:
        """Flush, and let `updated` tell of the last batch, too."""
        updated = self.updated
        self.flush()
        self.updated = self.updated or updated

    def __call__(self, *batch: Any, **named: Any) -> Any:
        """Train on one microbatch, given by position or by name: Tensors or NumPy arrays. Return the loss, or
        `(loss, aux)`.

        Raises:
            TypeError: If an argument is a tuple, list or dict, or `forward_fn` has no parameter of that name.
            ValueError: If no argument is a Tensor with axes, or (when the graph is compiled) the loss has axes.
            RuntimeError: If an error left a part of a batch in the open window, or stopped an update.
        """
        key, batch = self.prepared(batch, named)
        return self.train(lambda: self.microbatch(key), batch)

    def __repr__(self) -> str:
        """Return what it does and where it stands. It waits for the device."""
        accumulator = self.accumulator
        (held, remaining), length = accumulator.position(), accumulator.fingerprint()["accumulate_step"]
        length = f"{length} microbatch{'es' * (length != '1')} a window" if length.isdecimal() else length
        pieces = [f"{self.pieces} pieces"] if self.pieces > 1 else []
        return "{}({})".format(type(self).__name__, ", ".join([
            length, *pieces, type(accumulator.optimizer).__name__, f"{held} of {held + remaining} in the open window",
            f"{int(accumulator.update_step)} updates", f"{int(accumulator.seen)} seen"]))

    def flush(self) -> bool:
        """Apply the incomplete window, if one is open. Return whether a window was closed: applied or dropped.

        On several ranks, take part in the windows of the others until none has data: every rank has to call it.
        """
        updates = int(self.accumulator.update_step)
        with self.forgetting_graphs():
            closed = self._boundary.flush(self.pieces, self.before_exchange)
        self.updated = int(self.accumulator.update_step) > updates
        return closed

    def before_exchange(self) -> None:
        """Do what the ranks do together before they exchange windows."""

    def prepared(self, batch: tuple, named: dict[str, Any]) -> tuple[tuple, tuple]:
        """Return the key of the graphs that a batch needs, and its arguments by position."""
        batch, names = as_tensors(batch), ()
        if named:
            # One order for each set of names, so that it is compiled once.
            named = named_values(self._function, dict(zip(named, as_tensors(named.values()))))
            if frozenset(named) not in self._orders:
                self._orders[frozenset(named)] = ordered(self._function, named)
            names = self._orders[frozenset(named)]
            batch = (*batch, *[named[name] for name in names])
        # One graph for each layout: as arguments, samples and cut would cost 16 us a call.
        return (*layout(batch, self.batch_axis), names), batch

    def microbatch(self, key: tuple) -> Any:
        """Return what adds a microbatch with this key. The first one fixes the unit of weights."""
        if key not in self._microbatches:
            require_same_parameters(self._function, self.accumulator.optimizer)
            if key[0]:
                self.accumulator.buffers.fix_unit(float(-(-key[0] // self.pieces)))
            self._microbatches[key] = self._microbatch_for(*key) if key[0] else Empty(
                self.accumulator, self.pieces, self._losses, self._has_aux)
        return self._microbatches[key]

    def train(self, graphs: Callable, batch: tuple) -> Any:
        """Add a microbatch by what `graphs()` returns, and close the window if it is full. Return what that returned.

        If anything stops this call, the countdown stays unset, and the next call asks the device.
        """
        self.updated = False
        held, remaining = self.accumulator.countdown.claim()
        if remaining is None:
            self.accumulator.require_whole()
        with self.forgetting_graphs():
            microbatch = graphs()
            # `alone` leaves the buffers out, so the device has to say that they are empty: a cell has not looked.
            if remaining is None or (remaining == 1 and held == 0 and microbatch.alone):
                held, remaining = self._boundary.settle()
            if remaining == 1 and held == 0 and microbatch.alone:
                result, updated = microbatch.alone(*batch), True
                known = 0, 1 if self.accumulator.length.is_one else None  # else the next one's length is not known
            else:
                result = microbatch(*batch)
                *known, updated = self._after_microbatch(held + 1, remaining - 1)
        self.accumulator.countdown.set(*known)
        self.updated = updated
        return result

    def forgetting_graphs(self) -> AbstractContextManager:
        """Forget all graphs after an error within the block, and explain it."""
        return explaining_errors(self.accumulator.optimizer, self.forget_graphs)

    def _after_microbatch(self, held: int, remaining: int) -> tuple[int, Optional[int], bool]:
        """Close the window if it is full. Return what the open one holds and needs, and whether one was applied."""
        if remaining > 0:
            return held, remaining, False
        accumulator = self.accumulator
        accumulator.require_whole()
        held, remaining = accumulator.position()
        if remaining > 0:  # one was skipped, or the window waits for its weight
            accumulator.guard.require_progress()
            return held, remaining, False
        updates = int(accumulator.update_step)
        updated = self._boundary.close()
        if not updated:
            accumulator.guard.require_progress()
        return 0, accumulator.length.length_after(updates + updated), updated


def next_or_error(batches: Iterator) -> Any:
    """Return the next batch, None at the end, or the error of reading it. What was trained before stays valid.

    An interrupt (KeyboardInterrupt, SystemExit) is raised at once.
    """
    try:
        return next(batches, None)
    except Exception as error:
        return error
