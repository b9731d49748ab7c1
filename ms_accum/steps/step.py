"""A train step made of graphs without control flow: one adds a microbatch or a piece, one updates. The host calls them.

    host:    keeper: count down ─► program of the batch's layout ─► keeper: full? close the window
                                             │                                        │
    device:                    gather samples, value_and_grad, add     exchange, clip, optimizer, empty
"""
from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING, Any, Optional

from ..arguments import Uncopied
from ..core.buffers import warn_of_lost_gradients
from ..core.keeper import Keeper
from ..core.optimizers import cells_of, require_rates, require_same_parameters
from ..distributed.parallel_modes import require_plain, require_unsharded
from ..tensors import require_trainable
from .batch import as_arguments, as_tensors, named_values, ordered, require_batched
from .graphs import explaining_errors, require_python, straight
from .pieces import layout
from .train_mode import TrainMode

if TYPE_CHECKING:
    from ..core.accumulator import Accumulator, Status
    from .program import Program


_INSIDE = "train it with a TrainOneStepCell in AutoParallel(cell), or without AutoParallel and with DataParallel()"


class TrainStep(Uncopied):
    """Train on one microbatch per call, and update when the window is full. Built by `make_train_step`.

    Args:
        function: The function whose parameters define the order of a named batch.
        accumulator: The accumulator that it feeds.
        pieces: Number of pieces that a batch is cut into.
        program_for: Called as `program_for(samples, cut, names)`, once for each layout of a batch; returns a `Program`.
        batch_axis: Which axis counts the samples.
        counts: Plural noun for the unit of `seen`, e.g. "samples".

    Attributes:
        accumulator: The accumulator that it feeds.
        pieces: Number of pieces that a batch is cut into.
        updated: Whether the last call closed its window with an update, so that no window is open: a bool. After the
            last loss of an epoch, this includes the update of the incomplete last window.
        trained: Number of microbatches trained since the last epoch began (without epochs: by all calls), an int. After
            an interrupt it may be one more than the number of losses yielded; `trained` is the correct number.
    """

    def __init__(self, function: Callable, accumulator: Accumulator, pieces: int, program_for: Callable,
                 batch_axis: int = 0, counts: str = "samples") -> None:
        require_unsharded()
        require_plain(cells_of(function), _INSIDE)
        way = accumulator.way
        if pieces > 1:
            warn_of_lost_gradients(way.buffers.parameters[0].dtype, way.length.longest, pieces)
        self.accumulator, self.pieces, self.batch_axis, self.updated = accumulator, pieces, batch_axis, False
        self.trained = 0
        self._function, self._program_for, self._counts = function, program_for, counts
        self._orders: dict[frozenset, tuple[str, ...]] = {}
        self._mode: Optional[TrainMode] = None
        self.forget_graphs()

    def forget_graphs(self) -> None:
        """Forget all compiled graphs, so that later calls compile again."""
        self._programs: dict[tuple, Program] = {}
        self.keeper = Keeper(self.accumulator, partial(straight, way=self.accumulator.way))

    def epoch(self, batches: Iterable) -> Iterator[Any]:
        """Train on each batch, yield its loss, and apply the incomplete last window.

        The incomplete last window is applied before the last loss is yielded, so that it also happens in
        `zip(data, train_step.epoch(data))`, and `updated` is true then.

        Batches are read one ahead: when a microbatch is trained, the next batch is read *before* the loss is yielded,
        to know which batch is the last. So a batch may be made with the current weights, but not with results of the
        loop body; a generator must not wait for these. If batches depend on the loop body (reinforcement learning),
        call the step directly, and `flush()` at the end. If you leave the loop early, the iterator has been read one
        batch further; use `islice(iterator, n)` to train on n batches. The position of a data loader is one ahead, too.
        An error while reading a batch is raised after the loss of the previous batch was yielded. If you leave the loop
        at that loss, it is not raised.

        Leaving the loop early (`break`, an error) leaves the window open: the next epoch continues it, `flush()`
        applies it, `accumulator.reset()` drops it. With several ranks, the numbers of batches may differ: a rank that
        runs out of data takes part in the windows of the others with weight 0, and yields its last loss when all ranks
        have finished.

        Args:
            batches: A batched `mindspore.dataset`, or any iterable of Tensors, tuples, lists or dicts (such as
                `dataset.create_dict_iterator()`). NumPy arrays are copied, so a generator may fill them again.

        Yields:
            The loss, or `(loss, aux)`, of each microbatch.

        Raises:
            ValueError: If a `mindspore.dataset` of samples has no batch operation, if a parameter was frozen after the
                optimizer was built, or if the optimizer's list of learning rates has no rate for the next update.
            RuntimeError: With several losses, if the last loop left a window open. Also if called in a compiled
                function.
        """
        require_python("epoch of a train step")
        return self._epoch(batches)

    def _epoch(self, batches: Iterable) -> Iterator[Any]:
        optimizer = self.accumulator.optimizer
        require_batched(batches)
        require_trainable(self.accumulator.weights)
        require_rates(optimizer)
        last, self.trained = False, 0
        for result, last in self._train_each(map(as_arguments, batches)):
            if last:
                self._flush_after_last()
            yield result
        if not last:  # there was no batch: take part in the windows of other ranks
            self.flush()

    def _train_each(self, batches: Iterator) -> Iterator[tuple[Any, bool]]:
        """Train on each batch. Yield the result, and whether the batch was the last one."""
        batch = next_or_error(batches)
        while batch is not None:
            if isinstance(batch, Exception):
                raise batch
            arguments, named = batch
            result = self(*arguments, **named)
            batch = next_or_error(batches)
            yield result, batch is None

    def _flush_after_last(self) -> None:
        """Flush, and set `updated` if the last batch or the flush made an update."""
        updated = self.updated
        self.flush()
        self.updated = self.updated or updated

    def __call__(self, *batch: Any, **named: Any) -> Any:
        """Train on one microbatch and return its loss, or `(loss, aux)`.

        The arguments are those of `forward_fn`, by position or by name: Tensors or NumPy arrays.

        Raises:
            TypeError: If an argument is a tuple, list or dict, or `forward_fn` has no parameter of that name.
            ValueError: If no argument is a Tensor with axes, or (when the graph is compiled) the loss has axes.
            RuntimeError: If an error left a part of a batch in the open window, or stopped an update. Also if called in
                a compiled function (`ms.jit`).
        """
        require_python("a train step")
        key, batch = self.prepared(batch, named)
        return self.train(key, batch)

    def status(self) -> Status:
        """Return the accumulator's counters (see `Accumulator`) in one read, which waits for the device."""
        return self.accumulator.status()

    def __repr__(self) -> str:
        """Return the settings and counters as text. It waits for the device."""
        accumulator, status = self.accumulator, self.status()
        length, held = accumulator.fingerprint()["accumulate_step"], str(status.mini_step)
        if accumulator.way.length.budget is None:
            held += f" of {status.mini_step + status.needed}"
        length = f"{length} microbatch{'es' * (length != '1')} a window" if length.isdecimal() else length
        pieces = [f"{self.pieces} pieces"] if self.pieces > 1 else []
        return "{}({})".format(type(self).__name__, ", ".join([
            length, *pieces, type(accumulator.optimizer).__name__,
            f"{held} in the open window", f"{status.update_step:,} update{'s' * (status.update_step != 1)}",
            f"{status.seen:,} {self._counts}"]))

    def flush(self) -> bool:
        """Apply the incomplete window if one is open. Return whether a window was closed (applied or dropped).

        With several ranks, every rank has to call it: each takes part in the windows of the others until no rank has
        data.
        """
        require_python("flush of a train step")
        with self.forgetting_graphs():
            closed, self.updated = self.keeper.flush(self.pieces)
        return closed

    def prepared(self, batch: tuple, named: dict[str, Any]) -> tuple[tuple, tuple]:
        """Return the key `(samples, cut, names)` of the graphs for a batch, and its arguments by position."""
        batch = as_tensors(batch)
        names: tuple[str, ...] = ()
        if named:
            # One order for each set of names, so that it is compiled once.
            named = named_values(self._function, dict(zip(named, as_tensors(named.values()))))
            if frozenset(named) not in self._orders:
                self._orders[frozenset(named)] = ordered(self._function, named)
            names = self._orders[frozenset(named)]
            batch = (*batch, *[named[name] for name in names])
        # One graph for each layout: to pass samples and cut as arguments would cost 16 us a call.
        return (*layout(batch, self.batch_axis), names), batch

    def program(self, key: tuple) -> Program:
        """Return the program for batches with this key, in the network's mode. The first sets the unit of weights."""
        if self._mode is None:
            self._mode = TrainMode(self._function, self.accumulator.weights)
        mode = tuple([layer.training for layer in self._mode.layers])
        compiled_for = key, mode
        if compiled_for not in self._programs:
            self._mode.warn_if_evaluating(mode)
            require_unsharded()
            way, samples = self.accumulator.way, key[0]
            require_same_parameters(self._function, way.optimizer)
            if samples:
                way.buffers.fix_unit(float(-(-samples // self.pieces)))
            self._programs[compiled_for] = self._program_for(*key)
        return self._programs[compiled_for]

    def train(self, key: tuple, batch: tuple) -> Any:
        """Train on a microbatch, and close the window if it is full. Return the result of the program."""
        self.updated = False
        with self.forgetting_graphs():
            program = self.program(key)
            run: Callable = program
            with self.keeper.microbatch() as turn:
                if turn.is_alone and program.alone is not None:
                    turn.updated = True
                    run = program.alone
                result = run(*batch)
                self.trained += 1
        self.updated = turn.updated
        return result

    def forgetting_graphs(self) -> AbstractContextManager:
        """Forget all graphs after an error in the block, and explain the error."""
        return explaining_errors(self.accumulator.optimizer, self.forget_graphs)


def next_or_error(batches: Iterator) -> Any:
    """Return the next batch, None at the end, or the error that reading it raised.

    An interrupt (KeyboardInterrupt, SystemExit) is raised at once.
    """
    try:
        return next(batches, None)
    except Exception as error:
        return error
