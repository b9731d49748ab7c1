"""A train step: it takes batches to graphs that add or update, and lets the boundary close the windows.

    host:    batch ─► pieces of its layout ─► boundary: begin ─► run the graphs ─► boundary: end, and close if full
                                                                     │                               │
    device:                           gather samples ─► value_and_grad ─► add       exchange, clip, optimizer, empty
"""
from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Any, NoReturn, Optional, Union

import mindspore as ms
import numpy as np
from mindspore import nn

from ..arguments import Uncopied, boolean, instance_of, one_of, require_callable, require_options, whole_number
from ..core.accumulator import REDUCTIONS, Accumulator, Options
from ..core.epoch import Epoch, warn_of_no_batch, without_first
from ..core.optimizers import next_rates, require_rates, set_rates, warn_if_idle
from ..core.precision import warn_of_lost_gradients
from ..core.stream import Stream
from ..distributed.parallel_modes import require_unsharded
from ..distributed.ranks import computes_nothing
from ..mindspore_api import PrimitiveWithInfer
from ..tensors import require_trainable
from .batch import (
    Loss,
    as_arguments,
    as_tensors,
    checked_axis,
    checked_pieces,
    columns_of,
    layout,
    named_values,
    ordered,
    positional,
    require_batched,
)
from .errors import explain, name_columns
from .pieces import Pieces
from .shapes import Shapes
from .train_mode import TrainMode, checked_networks, networks_of

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ..core.boundary import Status
    from ..core.length import AccumulateStep
    from ..core.window import Window
    from .batch import Cut


class _OutsideGraphs(PrimitiveWithInfer):
    """Raise an error while MindSpore compiles a call, and do nothing in Python."""

    def __init__(self) -> None:
        super().__init__("require_python")
        self.set_const_prim(True)
        self.add_prim_attr("constexpr_prim", True)

    def __infer__(self, called: dict[str, Any], remedy: dict[str, Any]) -> NoReturn:
        raise RuntimeError(f"{called['value']} was called inside a compiled function, expected a call from Python"
                           f"{remedy['value']}")

    def __call__(self, called: str, remedy: str) -> None:
        """Do nothing."""


# `require_python(called, remedy)` raises RuntimeError while MindSpore compiles it.
require_python = _OutsideGraphs()

COMPILES = (": it compiles its own graphs, and closes windows between them; leave out the @ms.jit around it (or the "
            "Cell in graph mode), or compute gradients there and give them to an Accumulator")


class TrainStep(Uncopied):
    """Train on one microbatch per call, and update when the window is full. Built by `make_train_step`.

    Args:
        functions: What its graphs call. The parameters of the first one define the order of a named batch.
        accumulator: The accumulator that it feeds.
        pieces: Number of pieces that a batch is cut into.
        graphs_for: Called as `graphs_for(samples, cut, names)`, once for each layout of a batch; returns `Pieces`.
        shapes: The shapes of its batches.
        batch_axis: Which axis counts the samples.
        counts: Plural noun for the unit of `seen`, e.g. "samples".
        eager: Whether it runs op by op, without graphs.
        networks: The networks, if they are given; else they are those that the functions name.

    Attributes:
        accumulator: The accumulator that it feeds.
    """

    # So that an option that is assigned later is an error: the graphs would not see it.
    __slots__ = (
        "__weakref__",
        "_batch_axis",
        "_before",
        "_counts",
        "_eager",
        "_functions",
        "_graphs",
        "_graphs_for",
        "_mode",
        "_networks",
        "_orders",
        "_pieces",
        "_shapes",
        "_updated",
        "accumulator",
        "boundary",
        "window",
    )

    def __init__(self, functions: tuple[Callable, ...], accumulator: Accumulator, pieces: int,
                 graphs_for: Callable[..., Pieces], shapes: Shapes, batch_axis: int = 0, counts: str = "samples",
                 eager: bool = False, networks: tuple[nn.Cell, ...] = ()) -> None:
        require_unsharded(networks or networks_of(functions))
        self.accumulator, self.window, self.boundary = accumulator, accumulator.window, accumulator.boundary
        self.boundary.has_own_graphs, self._eager = True, eager
        self.boundary.settings["weights"] = counts
        if eager:
            warn_if_idle(accumulator.optimizer)
        if pieces > 1:
            warn_of_lost_gradients(self.window.buffers[0].dtype, self.window.length.longest, pieces)
        self._pieces, self._batch_axis = pieces, batch_axis
        self._updated: Optional[bool] = False  # None: a call is under way, or was interrupted
        self._before = 0  # updates before the last call
        self._functions, self._graphs_for, self._shapes, self._counts = functions, graphs_for, shapes, counts
        self._networks = networks
        self._orders: dict[frozenset, tuple[str, ...]] = {}
        self._mode: Optional[TrainMode] = None
        self._graphs: dict[tuple, Pieces] = {}

    @property
    def updated(self) -> bool:
        """Return whether the last call closed its window with an update, so that no window is open.

        After the last loss of an epoch, this includes the update of the incomplete last window. After an error or an
        interrupt, it is read from the device.
        """
        if self._updated is None:
            status = self.status()
            return status.mini_step == 0 and status.update_step > self._before
        # After a load, a window of the file may be open.
        return self._updated and (self.boundary.is_known or self.status().mini_step == 0)

    @property
    def trained(self) -> int:
        """Return the number of microbatches trained since the epoch began; without epochs, by all calls.

        Once there was a loop over `epoch`, calls beside it do not count, e.g. of a batch that is trained again. It is
        part of a checkpoint. After an error or an interrupt it is read from the device: it may be one more than the
        number of losses yielded.
        """
        return self.boundary.trained if self.boundary.is_known else self.status().trained

    @property
    def epochs(self) -> int:
        """Return the number of epochs that were finished, or left early before the next. It is part of a checkpoint.

        Each loop over `epoch` is one, also over a few batches. If yours has other loops, too, save a count of your own
        as `extra`.
        """
        return self.status().epochs

    @property
    def learning_rate(self) -> Union[float, tuple[float, ...]]:
        """Return the learning rate of the next update, also of a schedule or a list; or set it, at any time.

        After the last rate of a list it is NaN.

            train_step.learning_rate *= 0.1

        If groups of parameters have rates of their own, it is a tuple in the order of the groups. (In MindSpore's `nn`
        optimizers, groups without one share a rate.) Set a tuple, or one number for all. A rate that was set is part of
        a checkpoint. With several ranks, set the same on all of them. It waits for the device.

        Raises:
            TypeError, ValueError: If what is set is not a number >= 0, or a tuple of as many; if it is set for a
                schedule or a list of rates; if the optimizer has none.
        """
        return next_rates(self.accumulator.optimizer)

    @learning_rate.setter
    def learning_rate(self, rate: Union[float, tuple[float, ...]]) -> None:
        """Set it, as above."""
        self.boundary.note_used_rates()
        self.boundary.follow_groups()
        set_rates(self.accumulator.optimizer, rate)

    def epoch(self, batches: Iterable, resume: Optional[bool] = None) -> Iterator[Any]:
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

        After `load_checkpoint` in the loop's body, the loop goes on with its next batch, and from then on `trained` is
        again that of the loop. A save before that holds the place that the file had.

        Leaving the loop early (`break`, an error) leaves the window open: the next epoch continues it, `flush()`
        applies it, `reset()` drops it. With several ranks, the numbers of batches may differ: a rank that
        runs out of data takes part in the windows of the others with weight 0, and yields its last loss when all ranks
        have finished.

        Args:
            batches: A batched `mindspore.dataset`, or any iterable of Tensors, tuples, lists or dicts (such as
                `dataset.create_dict_iterator()`). NumPy arrays are copied, so a generator may fill them again.
            resume: What to do in the middle of an epoch: after `load_checkpoint`, or after an error or an interrupt
                while a batch was read or trained (one in the loop's body is as `break`). True: skip the batches that
                were trained before; `batches` are those of the whole epoch, in the same order. False: `batches` are
                only the others. None: begin a new epoch, unless that of a loaded file is unfinished.

        Warns:
            UserWarning: If nobody iterates over it, because then nothing is trained; if there is no batch.

        Yields:
            The loss, or `(loss, aux)`, of each microbatch: Tensors, so that the host need not wait for the device.
            `float(loss)` waits, and formats. `tqdm(train_step.epoch(batches))` shows a progress bar: the epoch has a
            length if `batches` has one; with `resume=True`, that of the rest.

        Raises:
            ValueError: If a `mindspore.dataset` of samples has no batch operation, if a parameter was frozen after the
                optimizer was built, if the optimizer's list of learning rates has no rate for the next update, or if
                there are fewer batches than were trained before.
            RuntimeError: After `load_checkpoint` in the middle of an epoch, if `resume` is not given; with
                `resume=True`, if the last loop was left by `break`, or by an error in its body. If this loop is to go
                on after another one has begun. Also if called in a compiled function.
        """
        require_python("epoch of a train step", COMPILES)
        return Epoch(self._epoch(batches, resume), batches, partial(self._skips, resume))

    def _skips(self, resume: Optional[bool]) -> int:
        """Return the number of batches that an epoch skips."""
        return self.boundary.skips() if resume else 0

    def _epoch(self, batches: Iterable, resume: Optional[bool]) -> Generator[Any, None, None]:
        require_batched(batches)
        require_trainable(self.accumulator.weights)
        if not resume:
            require_rates(self.accumulator.optimizer)
        skip, boundary = self.boundary.begin_epoch(resume), self.boundary
        loop, last, skipped = boundary.loop, False, []  # type: int, bool, list[Any]
        batches = without_first(skip, batches, lambda batch: skipped.append(self._samples_in(batch)))
        if skipped and None not in skipped:
            boundary.warn_of_other_samples(skip, sum(skipped))
        try:
            for result, last in self._train_each(map(as_arguments, self._with_rates(batches))):
                if last:
                    self._flush_after_last()
                place = boundary.epochs, boundary.trained
                yield result
                boundary.go_on(loop, place)
            if not last:  # there was no batch: take part in the windows of other ranks
                if skip == 0:
                    warn_of_no_batch()
                self._flush(ends_epoch=True)
            boundary.end_epoch(is_empty=not last)
        except GeneratorExit:  # the loop was left
            raise
        except BaseException:
            boundary.note_interrupted(loop)
            raise

    def _with_rates(self, batches: Iterable) -> Iterator:
        """Yield the batches. Raise ValueError before the first one if its update has no rate; see `require_rates`.

        A resumed epoch may have none: its list of rates is then used up, which is no error.
        """
        for place, batch in enumerate(batches):
            if place == 0:
                require_rates(self.accumulator.optimizer)
            yield batch

    def _samples_in(self, batch: Any) -> Optional[int]:
        """Return the number of samples in a batch that is skipped; None if it is no batch that could be trained."""
        try:
            return self._prepared(*as_arguments(batch))[0][0]
        except (TypeError, ValueError):
            return None

    def _train_each(self, batches: Iterator) -> Iterator[tuple[Any, bool]]:
        """Train on each batch. Yield the result, and whether the batch was the last one."""
        batch = next_or_error(batches)
        while batch is not None:
            if isinstance(batch, Exception):
                raise batch
            arguments, named = batch
            result = self._train(*self._prepared(arguments, named))
            batch = next_or_error(batches)
            yield result, batch is None

    def _flush_after_last(self) -> None:
        """Flush, and set `updated` if the last batch or the flush made an update."""
        updated = self._updated
        self._flush(ends_epoch=True)
        self._updated = self._updated or updated

    def __call__(self, *batch: Any, **named: Any) -> Any:
        """Train on one microbatch and return its loss, or `(loss, aux)`.

        The arguments are those of `forward_fn`, by position or by name: Tensors or NumPy arrays.

        Raises:
            TypeError: If an argument is a tuple, list or dict, or `forward_fn` has no parameter of that name.
            ValueError: If no argument is a Tensor with axes, or (when the graph is compiled) the loss has axes.
            RuntimeError: If an error left a part of a batch in the open window, or stopped an update. Also if called in
                a compiled function (`ms.jit`).
        """
        require_python("a train step", COMPILES)
        return self._train(*self._prepared(batch, named), in_epoch=False)

    def evaluate(self, batches: Iterable) -> float:
        """Return the mean loss over a data set: sum of weight * loss / sum of weights, without a backward pass.

            for epoch in range(10):
                for loss in train_step.epoch(training_data):
                    ...
                print(train_step.evaluate(validation_data))

        It is the loss of the undivided data, also where batches differ in size or in tokens: a mean of the batches'
        means is not. The networks compute in evaluation mode (no Dropout, fixed statistics of BatchNorm); then each
        layer is in its own mode again. Nothing else changes: an open window, counters and the place in an epoch stay.
        A batch is cut into as many pieces as in training. It may be called at any time, also in `on_update`.

        With several ranks, every rank has to call it, with its own part of the data, and gets the mean over all ranks.
        The numbers of batches may differ.

        Args:
            batches: As in `epoch`.

        Returns:
            The mean. Aux is left out. Of `make_grad_cache_step`, it is the mean of the batches' losses, weighted by
            their samples.

        Raises:
            TypeError, ValueError: As in a call; ValueError if there is no batch, if all weights are 0, or if a trained
                network is neither named by a function nor given by `network`.
            RuntimeError: If a parameter was given new memory; if another rank failed, or called something else.
        """
        require_python("evaluate of a train step", COMPILES)
        require_batched(batches)
        self.boundary.require_same_memory()
        count, total, weight = self.window.exchange.evaluated(partial(self._evaluated, batches)).tolist()
        if not computes_nothing():
            require_weight(int(count), weight)
        return total / (weight or 1.0)

    def _evaluated(self, batches: Iterable) -> np.ndarray:
        """Return the number of batches, and their sums; see `Pieces.evaluated`."""
        sums = np.zeros(3)
        with self._watched().evaluation():
            for arguments, named in map(as_arguments, batches):
                key, batch = self._prepared(arguments, named)
                try:
                    graphs, began = self._graphs_of(key, True), perf_counter()
                    shapes = self._shapes_of(graphs, batch)
                    sums += [1.0, *graphs.evaluated(*batch)]
                except Exception as error:
                    self._name_columns(error, key, batch)
                    # A graph that has failed fails again (MindSpore 2.10). Those of training stay.
                    self._graphs = {
                        (layout, flags, evaluates, generation): kept
                        for (layout, flags, evaluates, generation), kept in self._graphs.items() if not evaluates}
                    raise
                if shapes not in self._shapes.compiled and not self._eager:
                    self._shapes.note(shapes, perf_counter() - began)
        return sums

    def status(self) -> Status:
        """Return the accumulator's counters in one read, which waits for the device."""
        return self.boundary.status()

    def __repr__(self) -> str:
        """Return the settings, counters and the number of compiled shapes as text. It waits for the device."""
        return self.boundary.described(type(self).__name__, self._counts, self._pieces, len(self._shapes.compiled))

    def on_update(self, function: Callable[[], object], every: int = 1) -> None:
        """Call a Python function after each update whose count is a multiple of `every`: to save, evaluate or log.

        With several ranks, all of them call it after the same update, also while they flush: so `save_checkpoint` is
        right in it, however uneven the data are. It must not train or flush. Functions are called in the order in which
        they were given; give one that saves last, so that the file holds what the others set, e.g. a learning rate.

            train_step.on_update(lambda: save_checkpoint("run.safetensors", network, train_step), every=100)

        Args:
            function: Called without arguments. An error that it raises is raised by the call that updated.
            every: A number of updates, >= 1.
        """
        instance_of("function", function, Callable, "a function without arguments")
        self.boundary.call_after_updates(whole_number("every", every, "it is a number of updates"), function)

    def flush(self) -> bool:
        """Apply the incomplete window if one is open. Return whether a window was closed (applied or dropped).

        With several ranks, every rank that left its epoch early has to call it, and in a loop of single calls every
        rank: each takes part in the windows of the others until no rank has data. After an epoch that was trained to
        its end, which flushes by itself, it does nothing.
        """
        require_python("flush of a train step", COMPILES)
        return self._flush()

    def reset(self) -> None:
        """Drop the open window, also after an error."""
        self.accumulator.reset()

    def _flush(self, ends_epoch: bool = False) -> bool:
        self._updated = None
        self.boundary.run_as(self._eager)
        try:
            closed, self._updated = self.boundary.flush(self._pieces, ends_epoch)
        except Exception as error:
            self._explain(error)
            raise
        return closed

    def _prepared(self, batch: tuple, named: dict[str, Any]) -> tuple[tuple, tuple]:
        """Return the layout of a batch, `(samples, cut, names)`, and its arguments by position."""
        batch = as_tensors(batch)
        names: tuple[str, ...] = ()
        if named:
            # One order for each set of names, so that it is compiled once.
            named = dict(zip(named, as_tensors(named.values())))
            named = named if self._eager else named_values(self._functions[0], named)
            if frozenset(named) not in self._orders:
                self._orders[frozenset(named)] = ordered(self._functions[0], named)
            names = self._orders[frozenset(named)]
            batch = (*batch, *[named[name] for name in names])
        # One graph for each layout: to pass samples and cut as arguments would cost 16 us a call.
        return (*layout(batch, self._batch_axis, self._eager), names), batch

    def _watched(self) -> TrainMode:
        """Return the mode of the networks that the functions use."""
        if self._mode is None:
            self._mode = TrainMode(self._functions, self.window.weights, self._networks)
            self.boundary.layers += self._mode.layers
            if self._counts == "samples":
                self._mode.warn_of_class_weights()
        return self._mode

    def _graphs_of(self, key: tuple, evaluates: bool = False) -> Pieces:
        """Return the graphs for batches of this layout, in the network's mode. The first sets the unit of weights.

        `evaluates`: whether they are for an evaluation, which sets nothing.
        """
        if self.boundary.eager != self._eager:  # not earlier: `repr` must compile nothing while MindSpore compiles
            self.boundary.run_as(self._eager)
        if self._eager:
            require_op_by_op()
        watched = self._mode or self._watched()
        mode = tuple([layer.training for layer in watched.layers])
        compiled_for = key, mode, evaluates, self.boundary.generation
        if compiled_for not in self._graphs:
            if not evaluates:
                watched.warn_if_evaluating(mode)
            if not (self._eager or self._graphs):
                self._shapes.warn_if_ignored(watched.layers, len(key[1]), key[2])
            if key[0] and not evaluates:
                self.window.fix_unit(float(-(-key[0] // self._pieces)))  # the samples of the first piece
            # Of all numbers of samples, if that is declared as dynamic.
            alike = (self._shapes.key_of(*key), *compiled_for[1:])
            if alike not in self._graphs:
                self._graphs[alike] = self._graphs_for(*key)
            self._graphs[compiled_for] = self._graphs[alike]
        return self._graphs[compiled_for]

    def _train(self, key: tuple, batch: tuple, in_epoch: bool = True) -> Any:
        """Train on a microbatch of this layout. `in_epoch`: see `Boundary.begin`."""
        self._updated = False
        try:
            graphs = self._graphs_of(key)
            shapes = self._shapes_of(graphs, batch)
            known = self.boundary.begin(in_epoch)
            self._updated, self._before = None, self.boundary.updates
            # A window of one microbatch needs no buffers. But once an option of the optimizer has changed, its graph
            # would have to be compiled after each change, and Dropout would begin again. For longer windows, one graph
            # that adds the last microbatch and updates was measured: no faster, and one more backward pass to compile.
            is_alone = (graphs.alone is not None and known == 1 and self.boundary.held == 0
                        and not self.boundary.changes)
            if is_alone:  # it updates before the boundary could ask whether ranks agreed in the last window
                self.window.exchange.require_agreement()
            began = perf_counter()
            result = (graphs.alone if is_alone else graphs)(*batch)  # type: ignore[misc]
            if key[0] and shapes not in self._shapes.compiled and not self._eager:  # an empty batch compiles nothing
                self._shapes.note(shapes, perf_counter() - began)
            self._updated = self.boundary.end(known, is_alone, key[0])
        except Exception as error:
            self._name_columns(error, key, batch)
            self._explain(error)
            raise
        return result

    def _shapes_of(self, graphs: Pieces, batch: tuple) -> object:
        """Return what graphs are compiled for: each shape of a batch, unless it is declared as dynamic.

        Raise TypeError or ValueError if the batch contradicts what is declared, before a microbatch begins.
        """
        if graphs.inputs is None:
            return tuple([getattr(value, "shape", None) for value in batch])
        graphs.inputs(batch)
        return id(graphs), graphs.inputs.undeclared(batch)

    def _name_columns(self, error: Exception, key: tuple, batch: tuple) -> None:
        """See `name_columns`."""
        columns = len(key[1])
        name_columns(error, batch, columns_of(self._functions[0], columns, key[2]), self.window.weights)

    def _explain(self, error: Exception) -> None:
        """Forget all graphs, and raise an error that names the cause, if it is known; see `explain`."""
        explain(error, self.window.optimizer, self._forget_graphs, self.window.exchange)

    def _forget_graphs(self) -> None:
        """Let later calls compile again."""
        self._graphs = {}
        self.boundary.forget_graphs()


def make_train_step(
    forward_fn: Callable,
    optimizer: nn.Optimizer,
    accumulate_step: AccumulateStep,
    *,
    pieces: int = 1,
    batch_axis: int = 0,
    weight_fn: Optional[Callable] = None,
    has_weight: bool = False,
    loss_reduction: str = "mean",
    has_aux: bool = False,
    eager: bool = False,
    network: Union[nn.Cell, tuple[nn.Cell, ...], None] = None,
    **options: Unpack[Options],
) -> TrainStep:
    """Build a train step that accumulates gradients and updates once per window.

        train_step = make_train_step(forward_fn, optimizer, accumulate_step=4)
        for loss in train_step.epoch(dataset):  # the mean loss of each microbatch
            ...                                 # the incomplete last window is applied, too

    Each call of `train_step(data, label)` or `train_step(**batch)` trains on one microbatch. The call that makes the
    window full also updates. The guide's page "Train steps" explains weights, pieces, errors and interrupts.

    Args:
        forward_fn: `(*batch) -> loss`: the *mean* loss of its samples (or unmasked tokens), a float Tensor of shape
            `()`. With `has_aux`, `(*batch) -> (loss, aux)`; see also `has_weight`. A function, a Cell or a
            `functools.partial`. The arguments of a named batch (a dict, or keyword arguments) are matched to its
            parameters by name. Unless `eager` is true, it is compiled: Python side effects (`seen.append(...)`) have no
            effect, and changing an argument in place (`labels.mul_(mask)`) changes the caller's Tensor, for all later
            epochs.
        optimizer: A MindSpore optimizer; see `Accumulator`. The step builds an accumulator of its own for it.
        accumulate_step: Number of microbatches in a window: an int, `{update_step: n}` or `until_weight(budget)`;
            see `Accumulator`.
        pieces: Number of pieces that each microbatch is cut into; peak activation memory is that of one. The batch size
            n is the length of the batch axis of the first Tensor that has axes. Tensors whose batch axis has length n
            are cut, ceil(n / pieces) samples each; all other arguments are passed whole. An empty batch (n = 0) counts
            as a microbatch with weight 0, loss 0 and aux None.
        batch_axis: The axis that counts the samples, e.g. 1 for `(time, batch, features)`. For Tensors with fewer axes,
            axis 0.
        weight_fn: `(*piece) -> weight`, a number or a Tensor of shape `()`: the denominator of the mean in
            `forward_fn`, e.g. the number of unmasked tokens, or `class_weights[label].sum()`. None: the number of
            samples. Pieces of weight 0 are ignored, even if their loss is 0/0. A weight that is negative, NaN or
            infinite makes the loss NaN.
        has_weight: Whether `forward_fn` returns `(loss, weight)`, with `has_aux` `(loss, weight, aux)`, in place of a
            `weight_fn`: for models that count their own tokens. The weight is not differentiated.
        loss_reduction: "mean", or "sum" if `forward_fn` returns the *sum* over its samples (or unmasked tokens) and
            the weight is their number. For weights that change, a sum takes less time and memory. Return it in
            float32: a sum of float16 losses overflows.
        has_aux: Whether `forward_fn` returns `(loss, aux)`. With `pieces > 1`, aux is a Tensor or a tuple of Tensors:
            those of shape `()` are averaged over the pieces by weight, those with one entry per sample are joined.
            Return `parameter.copy()` of a Parameter: the Parameter itself may have its next value by then.
        eager: Whether to run op by op, without graphs, in PyNative mode: for networks that MindSpore cannot compile,
            and to debug. `forward_fn` may be any Python, a lambda included, and a batch may hold other objects, such as
            strings. Each gradient is added to its buffer during the backward pass, and then forgotten, unless a stage
            looks at gradients, ranks sum each microbatch, or the window is a single microbatch: these hold all
            gradients at once.
        network: The networks that are trained, a Cell or a tuple of Cells, so that `set_train` and `evaluate` work with
            them. Needed only if `forward_fn` is no Cell and does not name them itself: in a closure, as a global, as a
            default, or as an attribute of its `self`.
        **options: Options of `Accumulator`: `clip_norm`, `buffer_dtype`, `on_nonfinite`, `max_skips`, `reducer`,
            `stages` and `loss_scaler`.

    Returns:
        A `TrainStep`: `train_step(*batch) -> loss`, or `(loss, aux)`. The loss is a float32 Tensor of shape `()`: the
        weighted mean over the pieces, never divided by `accumulate_step`.

    Raises:
        TypeError: If an argument is of the wrong kind, or a function is a lambda inside another expression, which
            MindSpore cannot compile.
        ValueError: If an argument is out of range, if `has_weight` is given with a `weight_fn`, or if a parameter was
            frozen after the optimizer was built.
        RuntimeError: When the step is called, if an error or an interrupt left only some pieces of a batch in the open
            window; `train_step.reset()` drops it.

    Source: `jax.lax.scan` over microbatches cuts a batch inside the step; RATEX schedules two graphs on the host;
    `loss_reduction="sum"` is Megatron's `calculate_per_token_loss`; `eager` is Keras' `run_eagerly`.

    Example:
        >>> import numpy as np
        >>> from mindspore import nn
        >>> from ms_accum import make_train_step
        >>> network = nn.Dense(2, 1, weight_init="ones", bias_init="zeros")
        >>> optimizer = nn.SGD(network.trainable_params(), learning_rate=0.5)
        >>> def forward_fn(x):
        ...     return network(x).mean()
        >>> train_step = make_train_step(forward_fn, optimizer, accumulate_step=2)
        >>> batches = [np.full((4, 2), value, np.float32) for value in (1, 3, 2)]
        >>> for loss in train_step.epoch(batches):
        ...     print(float(loss), train_step.updated, network.weight.asnumpy())
        2.0 False [[1. 1.]]
        6.0 True [[0. 0.]]
        -0.5 True [[-1. -1.]]
    """
    require_options(make_train_step, options, Options)
    boolean("has_aux", has_aux, "say whether forward_fn returns (loss, aux)")
    require_one_weight_source(has_weight, weight_fn, "forward_fn")
    boolean("eager", eager, "say whether to run op by op, without graphs")
    require_functions(eager, forward_fn=forward_fn, weight_fn=weight_fn)
    pieces, batch_axis = checked_pieces(pieces), checked_axis(batch_axis)
    one_of("loss_reduction", loss_reduction, REDUCTIONS)
    accumulator = averaging(optimizer, accumulate_step, **options)
    window = accumulator.window
    window.exchange.require_alike({
        "the kind of step": "make_train_step", "pieces": pieces, "batch_axis": batch_axis,
        "weight_fn": weight_fn is not None, "has_weight": has_weight, "loss_reduction": loss_reduction,
        "has_aux": has_aux, "eager": eager})
    fix_unit_of_sums(window, loss_reduction)
    counts = weights_count("forward_fn", has_weight, weight_fn)
    stream = Stream(window) if eager else None
    # A graph that cuts a batch has to know its number of samples.
    shapes = Shapes(forward_fn, "forward_fn", takes_any=pieces == 1 and not eager)

    def graphs_for(samples: int, cut: Cut, names: tuple[str, ...]) -> Pieces:
        functions = (positional("forward_fn", forward_fn, len(cut), names),
                     positional("weight_fn", weight_fn, len(cut), names), has_aux, loss_reduction, batch_axis)
        inputs = None if eager else shapes.inputs_of(samples, cut, names)
        loss = Loss(window, *functions, stream=stream, has_weight=has_weight)
        return Pieces(accumulator.boundary, loss, samples, cut, pieces, inputs=inputs)

    functions = tuple(function for function in (forward_fn, weight_fn) if function is not None)
    return TrainStep(functions, accumulator, pieces, graphs_for, shapes, batch_axis, counts, eager,
                     checked_networks(network))


def require_one_weight_source(has_weight: object, weight_fn: object, name: str) -> None:
    """Raise TypeError or ValueError unless weights come from one function. `name`: of what returns the loss."""
    boolean("has_weight", has_weight, f"say whether {name} returns (loss, weight)")
    if has_weight and weight_fn is not None:
        raise ValueError(f"got has_weight=True and a weight_fn, expected one of them; leave weight_fn out if {name} "
                         "returns (loss, weight)")


def weights_count(name: str, has_weight: bool, weight_fn: object) -> str:
    """Return what weights count, a plural. `name`: of what returns the loss."""
    return f"counted by {name}" if has_weight else "samples" if weight_fn is None else "counted by weight_fn"


def fix_unit_of_sums(window: Window, loss_reduction: str) -> None:
    """Set the unit of weights to 1 for a loss that is a sum: its gradients are added without a multiplication."""
    if loss_reduction == "sum" and not window.looks_at_gradients:
        window.fix_unit(1.0)


def require_functions(eager: bool = False, **functions: Optional[Callable]) -> None:
    """Raise TypeError if a function cannot be called or, unless it runs op by op (`eager`), compiled."""
    for name, function in functions.items():
        if function is not None or name != "weight_fn":
            require_callable(name, function, is_compiled=not eager)


def require_op_by_op() -> None:
    """Raise RuntimeError for a step that runs op by op in MindSpore's graph mode, which compiles each optimizer."""
    if ms.get_context("mode") != ms.PYNATIVE_MODE:
        raise RuntimeError("a train step with eager=True was called in graph mode, expected PyNative mode; call "
                           "mindspore.set_context(mode=mindspore.PYNATIVE_MODE), or leave eager=True out")


def averaging(optimizer: nn.Optimizer, accumulate_step: AccumulateStep, **options: Unpack[Options]) -> Accumulator:
    """Return an accumulator with `reduction="mean"` for an optimizer."""
    if isinstance(optimizer, Accumulator):
        raise TypeError("optimizer is an Accumulator, which is for loops by hand, expected an optimizer; give the "
                        "optimizer, accumulate_step and its options, for an accumulator of the step's own")
    return Accumulator(optimizer, accumulate_step, reduction="mean", **options)


def require_weight(batches: int, weight: float) -> None:
    """Raise ValueError if there is no mean over so many batches with this sum of weights."""
    if batches == 0:
        raise ValueError("evaluate got no batch, expected at least one; give batches again for each evaluation: an "
                         "iterator or a generator that was read before is used up")
    if weight == 0:
        raise ValueError(f"the weights in all {batches} batches are 0, so there is no mean; look for a mask or an "
                         "ignore index that leaves nothing to count")


def next_or_error(batches: Iterator) -> Any:
    """Return the next batch, None at the end, or the error that reading it raised.

    An interrupt (KeyboardInterrupt, SystemExit) is raised at once.
    """
    try:
        return next(batches, None)
    except Exception as error:
        return error
