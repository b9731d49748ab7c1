"""A train step: it takes batches to the graphs of their layout, and lets the boundary close the windows.

    host:    batch ─► layout ─► boundary: missing? meet ─► run the graphs ─► count down, and close if full
                                                              │                        │
    device:             gather samples ─► value_and_grad ─► add       exchange, clip, optimizer, clear
"""
from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple, Optional, Union

import mindspore as ms
import numpy as np
from mindspore import nn

from ..arguments import Uncopied, boolean, instance_of, one_of, require_callable, require_options, whole_number
from ..core.accumulator import REDUCTIONS, Options, boundary_of
from ..core.boundary import Boundary, Status
from ..core.stream import Stream
from ..distributed.exchange import BUILD, EVALUATE
from .batch import as_arguments, as_tensors, checked_axis, layout, named_values, positional, require_batched, starts_of
from .forward import Functions, looking_of, training_of
from .pieces import in_pieces, looked_at, whole
from .shapes import Inputs, Shapes
from .train_mode import TrainMode, checked_networks, networks_of

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ..core.length import AccumulateStep

_END = object()  # stands for a batch after the last one
EMPTY: Any = object()  # stands for the graphs of a batch without samples


class Layout(NamedTuple):
    """Hold what trains on batches of one layout."""

    train: Callable  # called with the batch
    pieces: int = 1  # that it adds
    closes: bool = False  # whether it updates with the batch as a window of one


class TrainStep(Uncopied):
    """Train on one microbatch per call, and update when the window is full. Built by `make_train_step`."""

    # `make_layout(samples, cut, names, compiled, is_dynamic)` returns a `Layout`; `make_look`, called in the same way,
    # `(*batch) -> (weight * loss, weight)` for an evaluation. Neither is called for a batch without samples.
    # Slots, so that an option that is assigned later is an error: the graphs would not see it.
    __slots__ = ("__weakref__", "_axis", "_functions", "_look", "_make", "_mode", "_networks", "_shapes", "_used",
                 "boundary", "optimizer")

    def __init__(self, boundary: Boundary, functions: Functions, networks: tuple[nn.Cell, ...], batch_axis: int,
                 pieces: int, make_layout: Callable[..., Layout], make_look: Callable[..., Callable]) -> None:
        self.boundary, self.optimizer = boundary, boundary.window.optimizer
        self._functions, self._networks, self._axis = functions, networks, batch_axis
        self._make, self._look = make_layout, make_look
        # A graph that cuts a batch has to know its number of samples.
        self._shapes = Shapes(functions.forward_fn, pieces == 1 and not boundary.eager)
        self._mode: Optional[TrainMode] = None
        self._used = tuple([function for function in functions[:2] if function is not None])
        exchange = boundary.window.exchange
        trained = {id(p) for p in exchange.parameters}
        exchange.compare(BUILD, {"frozen parameters": [
            p for cell in networks or networks_of(self._used) for p in cell.get_parameters() if id(p) not in trained]})

    # --- training -----------------------------------------------------------------------------------------------------

    def __call__(self, *batch: Any, **named: Any) -> Any:
        """Train on one microbatch and return its loss, or `(loss, aux)`.

        The arguments are those of `forward_fn`, by position or by name: Tensors or NumPy arrays. Raise RuntimeError if
        an error or an interrupt left a microbatch (`reset()` drops its window) or an update half done.
        """
        self.boundary.turn += 1
        return self._train(as_tensors(batch), named)

    def epoch(self, batches: Iterable, skip: Optional[int] = None) -> Iterator[Any]:
        """Train on each batch, yield its loss, and apply the incomplete last window.

            for epoch in range(train_step.epochs, 10):
                for loss in train_step.epoch(dataset, skip=train_step.trained):
                    ...

        The last window is applied before the last loss is yielded, so one batch is read ahead: a generator sees the
        body of the loop one batch late, and `break` on an iterator that is shared loses that batch.

        The loop owns the step: after a call of the step, another loop or a load, it raises a RuntimeError at its next
        batch. In its body, read, evaluate, log, save, set the rate, `flush()`, or `reset()` a bad window. `break`
        finishes no epoch: `itertools.islice` limits one. With several ranks, the numbers of batches may differ.

        Args:
            batches: A batched `mindspore.dataset`, or any iterable of Tensors, tuples, lists or dicts: those of the
                whole epoch, in the same order as before.
            skip: How many batches of the epoch to skip: `train_step.trained` goes on where it was stopped, 0 begins it
                again. They are read, but not looked at. None: 0, and an error after `load_checkpoint` of a file that
                stops inside an epoch.
        """
        if skip is not None:
            skip = whole_number("skip", skip, "it is the number of batches to skip", minimum=0)
        require_batched(batches)
        return self._epoch(iter(batches), skip)

    def _epoch(self, batches: Iterator, given: Optional[int]) -> Iterator[Any]:
        boundary = self.boundary
        turn, skip = boundary.begin_epoch(given)
        skipped = sum(1 for _ in islice(batches, skip))
        if skipped < skip:
            raise ValueError(f"the data ended after {skipped} batches, expected the {skip} that are to be skipped; "
                             "give all batches of the epoch, in the same order as before")
        boundary.enter_epoch(skip)
        batch, number = _next(batches), 0
        while batch is not _END:
            if isinstance(batch, Exception):
                raise batch
            boundary.require_turn(turn)
            if number % 64 == 0:
                boundary.look()
            result = self._train(*as_arguments(batch))
            batch, number = _next(batches), number + 1
            if batch is _END:
                self._end_epoch()
            yield result
        if number == 0:
            self._end_epoch()

    def _end_epoch(self) -> None:
        closed = self.boundary.is_closed
        self.boundary.flush()
        self.boundary.is_closed |= closed
        self.boundary.end_epoch()

    def flush(self) -> bool:
        """Apply the incomplete window, on all ranks. Return whether one was open. `epoch` calls it at its end."""
        return self.boundary.flush()

    def reset(self) -> None:
        """Drop the open window, and a row of dropped windows.

        If an error or an interrupt left a microbatch half added, `epoch(batches, skip=train_step.trained)` trains its
        window again. Otherwise, e.g. in the body of a loop that drops a bad window, it does not.
        """
        self.boundary.reset()

    def on_update(self, function: Callable, every: int = 1) -> Callable:
        """Call `function(train_step)` after each update, to evaluate, log, save or set the rate. Return the function.

            train_step.on_update(WindowLog("windows.csv"))

            @train_step.on_update
            def save(train_step):
                save_checkpoint("run.safetensors", network, train_step)

        It is not called for a window that was dropped. What it raises is raised by the call that updated, and the
        microbatch and its update stand. It owns the step: a call of the step or a load in it raises an error, from the
        call that updated, when all functions have returned. A `WindowLog` is called first, then the others in the order
        in which they were given. `every`: call it only if the number of updates is a multiple of this.
        """
        instance_of("function", function, Callable, "a function of the train step")
        with suppress(ValueError):  # of a builtin, whose signature is not known
            signature = inspect.signature(function)
            try:
                signature.bind(None)
            except TypeError:
                raise TypeError(f"a function of on_update has the parameters {signature}, expected one: it is called "
                                "with the train step") from None
        every = whole_number("every", every, "it is a number of updates")
        place = 0 if getattr(function, "is_log", False) else len(self.boundary.functions)
        self.boundary.functions.insert(place, (every, partial(function, self)))
        return function

    # --- what it knows ------------------------------------------------------------------------------------------------

    def status(self) -> Status:
        """Return the counters in one read, which waits for the device."""
        return self.boundary.status()

    @property
    def updated(self) -> bool:
        """Return whether the last call updated, or the end of its epoch. Where windows may be dropped, it waits."""
        boundary = self.boundary
        return boundary.is_closed and (not boundary.window.drops or boundary.status().skipped_in_row == 0)

    @property
    def update_step(self) -> int:
        """Return the number of updates. It waits for the device where windows may be dropped, or after an error."""
        is_known = self.boundary.missing is not None and not self.boundary.window.drops
        return self.boundary.updates if is_known else self.status().update_step

    @property
    def trained(self) -> int:
        """Return the number of batches of this epoch that were trained or skipped: 0 after it has ended. It waits."""
        return self.boundary.added - self.boundary.place.first

    @property
    def epochs(self) -> int:
        """Return the number of epochs that were finished. It is part of a checkpoint."""
        return self.boundary.place.epochs

    @property
    def learning_rate(self) -> Union[float, tuple[float, ...]]:
        """Return the learning rate of the next update, also of a schedule or a list; or set it, at any time.

            train_step.learning_rate *= 0.1

        If groups of parameters have rates of their own, it is a tuple in the order of the groups. Set a tuple, or one
        number for all; a schedule or a list of rates cannot be set. After the last rate of a list it is NaN. It waits.
        """
        return self.boundary.rates.next()

    @learning_rate.setter
    def learning_rate(self, rate: Union[float, tuple[float, ...]]) -> None:
        """Set it, as above."""
        self.boundary.rates.set(rate)

    # --- evaluation ---------------------------------------------------------------------------------------------------

    def evaluate(self, batches: Iterable) -> float:
        """Return the mean loss over a data set: sum of weight * loss / sum of weights, without a backward pass.

        It is the loss of the undivided data, also where batches differ in size or in tokens. The networks compute in
        evaluation mode; then each layer is in its own mode again. Nothing else changes, so it may be called at any
        time, also in `on_update`. With several ranks, every rank calls it with its own part of the data, and gets the
        mean over all ranks. Raise ValueError if no network is known (give `network=`), or there is nothing to average.
        """
        require_batched(batches)
        self.boundary.require_unchanged()
        exchange = self.boundary.window.exchange
        exchange.meet(EVALUATE)
        own = exchange.together(EVALUATE, partial(self._looked_at, batches), RuntimeError)
        count, total, weight = map(sum, zip(*exchange.gathered(own.tolist())))
        divisor = max(weight, self.boundary.window.min_weight)
        if count == 0 or divisor == 0:
            raise ValueError(f"evaluate got {count:.0f} batches with weights of 0 in all, so there is no mean; give "
                             "data that was not read before (an iterator is used up), and look for a mask of zeros")
        return total / divisor

    def _looked_at(self, batches: Iterable) -> np.ndarray:
        """Return the number of batches, and their sums of weight * loss and weights: float64 `(3,)`."""
        sums = np.zeros(3)
        mode = self._mode_of_layers()
        with mode.evaluation():
            for batch in batches:
                arguments, named = as_arguments(batch)
                arguments, names = self._by_position(arguments, named)
                key = ("look", names, *_shapes_of(arguments), mode.flags)
                look = self.boundary.graphs.get(key) or self._built(key, arguments, names, self._look)
                sums[0] += 1
                if look is EMPTY:
                    continue
                try:
                    sums[1:] += look(*arguments).asnumpy()
                except Exception:
                    known = self.boundary.graphs.items()  # those of training stay
                    self.boundary.graphs = {key: graph for key, graph in known if key[0] != "look"}
                    raise
        return sums

    # --- a microbatch -------------------------------------------------------------------------------------------------

    def _train(self, batch: tuple, named: Mapping[str, Any]) -> Any:
        batch, names = self._by_position(batch, named)
        key = ("train", names, *_shapes_of(batch), (self._mode or self._mode_of_layers()).flags)
        found = self.boundary.graphs.get(key) or self._built(key, batch, names, self._make)  # type: Any
        if found is EMPTY:
            self.boundary.add_empty()
            loss = ms.Tensor(0.0, ms.float32)
            return (loss, None) if self._functions.has_aux else loss
        return self.boundary.add(found.train, batch, found.pieces, found.closes)

    def _mode_of_layers(self) -> TrainMode:
        """Return the mode of the networks. (Not when the step is built: networks may get their layers later.)"""
        if self._mode is None:
            self._mode = TrainMode(self._used, self.boundary.window.exchange.parameters, self._networks)
            if self._functions.weight_fn is None and not self._functions.has_weight:
                self._mode.warn_of_class_weights()
        return self._mode

    def _by_position(self, batch: tuple, named: Mapping[str, Any]) -> tuple[tuple, tuple[str, ...]]:
        """Return all values of a batch by position, and the names of the last ones."""
        if not named:
            return batch, ()
        values = dict(zip(named, as_tensors(named.values())))
        if not self.boundary.eager:
            values = named_values(self._functions.forward_fn, values)
        return (*batch, *values.values()), tuple(values)

    def _built(self, key: tuple, batch: tuple, names: tuple[str, ...], make: Callable) -> Any:
        """Return what `make` makes for batches of a layout; the same for all that are declared as alike."""
        boundary = self.boundary
        if boundary.eager and ms.get_context("mode") != ms.PYNATIVE_MODE:
            raise RuntimeError("a train step with eager=True was called in graph mode, expected PyNative mode; call "
                               "mindspore.set_context(mode=mindspore.PYNATIVE_MODE), or leave eager=True out")
        samples, cut = layout(batch, self._axis, boundary.eager)
        if make is self._make:
            self._mode_of_layers().warn_if_evaluating(key[-1])
        inputs: Optional[Inputs] = None
        if not boundary.eager:
            inputs = self._shapes.inputs_of(samples, cut, names)
            if inputs is not None:
                inputs(batch)
            if make is self._make:
                self._shapes.note(batch, names)
        alike = (key[0], self._shapes.key_of(samples, cut, names), key[-1])
        if alike not in boundary.graphs:
            compiled = partial(boundary.compiled, inputs=inputs)
            boundary.graphs[alike] = make(samples, cut, names, compiled, inputs is not None) if samples else EMPTY
        boundary.graphs[key] = boundary.graphs[alike]
        return boundary.graphs[key]


def _shapes_of(batch: tuple) -> tuple:
    return tuple([value.shape if isinstance(value, ms.Tensor) else type(value) for value in batch])


def _next(batches: Iterator) -> Any:
    """Return the next batch, `_END`, or the error that reading it raised. An interrupt is raised at once."""
    try:
        return next(batches, _END)
    except Exception as error:
        return error


def make_train_step(
    forward_fn: Callable, optimizer: nn.Optimizer, accumulate_step: AccumulateStep, *, pieces: int = 1,
    batch_axis: int = 0, weight_fn: Optional[Callable] = None, has_weight: bool = False, loss_reduction: str = "mean",
    has_aux: bool = False, eager: bool = False, network: Union[nn.Cell, tuple[nn.Cell, ...], None] = None,
    **options: Unpack[Options],
) -> TrainStep:
    """Build a train step that accumulates gradients and updates once per window.

        train_step = make_train_step(forward_fn, optimizer, accumulate_step=4)
        for loss in train_step.epoch(dataset):  # the mean loss of each microbatch
            ...                                 # the incomplete last window is applied, too

    Each call of `train_step(data, label)` or `train_step(**batch)` trains on one microbatch. The call that makes the
    window full also updates. The guide's page "Train steps" explains weights, pieces and precision.

    Args:
        forward_fn: `(*batch) -> loss`: the *mean* loss of its samples (or unmasked tokens), a float Tensor of shape
            `()`. A function, a Cell or a `functools.partial`. Named batches are matched to its parameters by name.
        optimizer: A MindSpore optimizer.
        accumulate_step: Number of microbatches in a window: an int, `{update_step: n}` or `until_weight(budget)`;
            see `Accumulator`.
        pieces: Number of pieces that each microbatch is cut into; peak activation memory is that of one. The batch size
            n is the length of the batch axis of the first Tensor that has axes. Tensors whose batch axis has length n
            are cut, ceil(n / pieces) samples each; all other arguments are passed whole. An empty batch (n = 0) counts
            as a microbatch with weight 0, loss 0 and aux None.
        batch_axis: The axis that counts the samples; for Tensors with fewer axes, axis 0.
        weight_fn: `(*piece) -> weight`, a number or a Tensor of shape `()`: the denominator of the mean in
            `forward_fn`, e.g. the number of unmasked tokens. None: the number of samples. Means of weight 0 are
            ignored, even if they are 0/0. A weight that is negative, NaN or infinite makes the loss NaN.
        has_weight: Whether `forward_fn` returns `(loss, weight)`, with `has_aux` `(loss, weight, aux)`, in place of a
            `weight_fn`: for models that count their own tokens.
        loss_reduction: "mean", or "sum" if `forward_fn` returns the *sum* over its samples (or unmasked tokens), in
            float32, and the weight is their number.
        has_aux: Whether `forward_fn` returns `(loss, aux)`. With `pieces > 1`, aux is a Tensor or a tuple of Tensors:
            those of shape `()` are averaged over the pieces by weight, those with one entry per sample are joined.
        eager: Whether to run your functions op by op, in PyNative mode: for networks that MindSpore cannot compile,
            and to debug. `forward_fn` may be any Python, and a batch may hold other objects, such as strings.
        network: The networks that are trained, a Cell or a tuple of Cells. Needed for `set_train` and `evaluate` if
            `forward_fn` is no Cell and does not name them itself (closure, global, default, attribute of `self`).
        **options: Options of `Accumulator`: `clip_norm`, `min_weight`, `buffer_dtype`, `on_nonfinite`, `max_skips`,
            `reducer`, `stages` and `loss_scaler`.

    Returns:
        A `TrainStep`: `train_step(*batch) -> loss`, or `(loss, aux)`. The loss is a float32 Tensor of shape `()`: the
        weighted mean over the pieces, never divided by `accumulate_step`.

    Source: `loss_reduction="sum"` is Megatron's `calculate_per_token_loss`; `eager` is Keras' `run_eagerly`.

    Example:
        >>> import numpy as np
        >>> from mindspore import nn
        >>> from ms_accum import make_train_step
        >>> network = nn.Dense(2, 1, weight_init="ones", bias_init="zeros")
        >>> def forward_fn(x):
        ...     return network(x).mean()
        >>> train_step = make_train_step(forward_fn, nn.SGD(network.trainable_params(), 0.5), accumulate_step=2)
        >>> batches = [np.full((4, 2), value, np.float32) for value in (1, 3, 2)]
        >>> for loss in train_step.epoch(batches):
        ...     print(float(loss), train_step.updated, network.weight.asnumpy())
        2.0 False [[1. 1.]]
        6.0 True [[0. 0.]]
        -0.5 True [[-1. -1.]]
    """
    require_options(make_train_step, options, Options)
    require_functions(eager, has_weight, weight_fn, forward_fn=forward_fn)
    boolean("has_aux", has_aux, "say whether forward_fn returns (loss, aux)")
    one_of("loss_reduction", loss_reduction, REDUCTIONS)
    functions = Functions(forward_fn, weight_fn, has_weight, has_aux)
    pieces, batch_axis, networks = whole_number("pieces", pieces), checked_axis(batch_axis), checked_networks(network)
    boundary = boundary_of(optimizer, accumulate_step, {
        "the kind of step": "make_train_step", "pieces": pieces, "batch_axis": batch_axis,
        "weight_fn": weight_fn is not None, "has_weight": has_weight, "loss_reduction": loss_reduction,
        "has_aux": has_aux, "eager": eager}, is_sum=loss_reduction == "sum", pieces=pieces, eager=eager, **options)
    return step_of(boundary, functions, networks, batch_axis, pieces)


def require_functions(eager: object, has_weight: object, weight_fn: object, **function: object) -> None:
    """Raise TypeError or ValueError for functions that cannot be called or compiled, or that both give weights."""
    name, used = next(iter(function.items()))
    boolean("eager", eager, "say whether to run op by op")
    boolean("has_weight", has_weight, f"say whether {name} returns (loss, weight)")
    require_callable(name, used, is_compiled=not eager)
    if weight_fn is not None:
        require_callable("weight_fn", weight_fn, is_compiled=not eager)
    if has_weight and weight_fn is not None:
        raise ValueError(f"got has_weight=True and a weight_fn, expected one of them; leave weight_fn out if {name} "
                         "returns (loss, weight)")


def step_of(boundary: Boundary, functions: Functions, networks: tuple[nn.Cell, ...], batch_axis: int, pieces: int
            ) -> TrainStep:
    """Return a train step of these functions."""
    window = boundary.window
    looks = bool(window.called.weighing or window.called.measuring) or window.exchange.sums_each
    stream = Stream(window) if boundary.eager and len(window.buffers) > 0 and not looks else None

    def placed(cut: tuple, names: tuple[str, ...]) -> Functions:
        return functions._replace(forward_fn=positional(functions.name, functions.forward_fn, len(cut), names),
                                  weight_fn=positional("weight_fn", functions.weight_fn, len(cut), names))

    def make_layout(samples: int, cut: tuple, names: tuple[str, ...], compiled: Callable, is_dynamic: bool) -> Layout:
        window.unit = window.unit or float(-(-samples // pieces))  # the first piece's number of samples
        closes = len(window.buffers) == 0
        train = training_of(window, placed(cut, names), stream, closes)
        if pieces == 1:
            return Layout(whole(train, window, compiled, samples, functions.has_aux, batch_axis, is_dynamic), 1, closes)
        return Layout(in_pieces(train, window, compiled, samples, cut, pieces, functions.has_aux, batch_axis),
                      len(starts_of(samples, pieces)))

    def make_look(samples: int, cut: tuple, names: tuple[str, ...], compiled: Callable, is_dynamic: bool) -> Callable:
        return looked_at(looking_of(placed(cut, names)), window, compiled, samples, cut, pieces, batch_axis, is_dynamic)

    return TrainStep(boundary, functions, networks, batch_axis, pieces, make_layout, make_look)
