"""The accumulator: one buffer for each parameter, filled by microbatches and emptied by an update."""
from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import TYPE_CHECKING, Optional

import mindspore as ms
from mindspore import Parameter, ParameterTuple, Tensor, amp, ops

from ..arguments import as_weight, checked_gradients, instance_of, one_of, require_condition, spelled
from ..distributed.buckets import Accumulated
from ..distributed.exchange import DataParallel, OneDevice
from ..tensors import after, mapped, weighted
from .adding import Add
from .boundary import Boundary
from .buffers import Buffers, buffer_dtype_of
from .counters import Countdown, Counters
from .length import length_of
from .loss_scale import LossScale, NoLossScale, checked_loss_scaler
from .lost_window import watched
from .nonfinite import guard_of
from .observer import checked_observer
from .optimizers import checked_parameters, describe, name_state
from .update import REDUCTIONS, Reduce, Update, checked_clip_norm, checked_hook, normaliser_of

if TYPE_CHECKING:
    from ..tensors import Gradients, Scalar
    from .length import AccumulateStep
    from .observer import Observer
    from .update import Reduced

_instances = count()


@ms.jit_class
class Accumulator:
    """Add up the gradients of microbatches and update once per window; inside `ms.jit` and in PyNative.

        buffer += weight * gradient                              # every microbatch
        gradient = buffer                                        # reduction="sum", at the boundary
                 = buffer / sum of the weights                   # reduction="mean", at the boundary
        gradient *= min(1, clip_norm / (norm(gradient) + 1e-6))  # if clip_norm is given
        optimizer(gradient); buffer = 0

    A drop-in replacement for the class of MindSpore's tutorial, with half its memory. With "sum", the default and the
    tutorial's contract, *the script divides its loss by `accumulate_step`*: an undivided loss makes updates N times too
    large without an error. `make_train_step` and `TrainOneStepCell` take the undivided loss, and build an accumulator
    with "mean"; prefer them in a new script.

    With "mean", mean losses, and the number of samples (or unmasked tokens) as weights, the update equals the
    full-batch update up to rounding, also for ragged microbatches and an incomplete last window.

    Args:
        optimizer: A MindSpore optimizer of float parameters, none of them frozen (`requires_grad=False`) or without
            elements, and without a `loss_scale` of its own. Gradients come in the order of `optimizer.parameters`.
            State with the same name as that of another accumulator's optimizer (`global_step`) is renamed, so that
            both fit into one graph.
        accumulate_step: Microbatches in a window: an int; `{update_step: n}`, piecewise constant, with the key 0; or a
            function of the update count (int32 Tensor of shape `()`) that graph mode can compile and that returns an
            int or an integer Tensor >= 1. A window keeps its length from its first microbatch to its last. Or
            `until_weight(budget)`: a window closes with the microbatch that brings its weight to the budget.
        clip_norm: Largest global norm (> 0) of the accumulated, normalised gradient. `float("inf")` measures
            `grad_norm` and clips nothing; None computes no norm.
        reduction: "sum" or "mean".
        buffer_dtype: dtype of the buffers. None: the parameter's own, but float32 for float16 and bfloat16. A float16
            buffer overflows if the sum of weight * gradient exceeds 65504; a driver divides the weights by the rows of
            its first piece.
        on_nonfinite: What to do with NaN and infinity. "apply": apply them like other values. "skip_microbatch": give
            the microbatch (in pieces: the piece) the weight 0, and do not count a microbatch of which nothing is left,
            so that the window stays open for another one (`optax.skip_not_finite`). "skip_window": drop the window when
            it closes, without an update. A gradient is finite if the sum of its elements is.
        max_skips: How many windows ("skip_microbatch": microbatches or pieces of this rank) may be skipped one after
            the other; after one more, a RuntimeError: in a train step or `flush` at the end of a window, in a cell at
            once, by hand in `guard.require_progress()`, for a graph cannot raise it. None: no limit.
        reducer: A `DataParallel`, which makes the ranks of a run started with `msrun` update as one. None: one device.
        after_update: A function without arguments that is called after each update, never for what is skipped; for a
            moving average of the weights, say. In graph mode it is part of the graph: it has to change Parameters, and
            what it does in Python alone never runs. The Parameters of a Cell, or of a Cell whose method it is, are
            state of the accumulator; those of other functions are not saved in checkpoints.
        noise_scale: A `ms_accum.batch_size.GradientNoiseScale`, which measures up to which batch size more samples
            help. It costs one norm per microbatch. The weights have to be numbers of samples or tokens.
        loss_scaler: A `mindspore.amp.StaticLossScaler` or `DynamicLossScaler`, for networks that compute in float16.
            `scaled(loss)` is what to differentiate. When the window closes, the accumulated gradient is divided by the
            scale before it is measured, averaged or clipped, and the scaler is adjusted once. A window with NaN or
            infinity in its gradient is dropped. The scaler's Parameters become state of the accumulator.

    Attributes:
        mini_step: Microbatches in the open window: int32 Parameter of shape `()`.
        update_step: Updates done: int32 Parameter of shape `()`.
        closed_windows: Windows closed, with an update or dropped: int32 Parameter of shape `()`.
        skipped: Gradients of this rank ignored because they were not finite, each of a microbatch or piece
            ("skip_microbatch") or of a window ("skip_window", or with a loss scaler): int32 Parameter of shape `()`.
        skipped_in_row: How many of them followed one another, up to now.
        seen: Sum of the weights in all updates of all ranks, each rounded: samples, or what `weight_fn` counts, tokens
            for example: int64 Parameter of shape `()`.
        grad_norm: Norm of the last update's gradient before clipping: float32 Parameter of shape `()`. NaN until it has
            been measured, and always without `clip_norm`.
        weight_sum: Sum of the weights in the open window: float32 Parameter of shape `()`.
        window_weight: `weight_sum` of the last window that was closed. On several ranks, both are those of this rank,
            or of the ranks that exchange each microbatch.
        parameters: ParameterTuple of all state. Names are unique in the process.
        state: All state by its name in a checkpoint, which is the same in the next process.
        open_state: Names in `state` of what is only needed while a window is open.
        countdown: What the host of train steps knows of the open window. `countdown.claim()` makes it ask the device.
        length, buffers, exchange, guard, loss_scale, observer, updating: The values that it is made of.

    Raises:
        TypeError: If an argument is of the wrong kind.
        ValueError: If an argument is out of range, or a loss scaler comes with "skip_microbatch".

    Source: https://www.mindspore.cn/tutorials/experts/en/r2.2/optimize/gradient_accumulation.html (the class);
    schedules and skipping are those of `optax.MultiSteps`; the clip factor is that of `torch.nn.utils.clip_grad_norm_`.

    Example:
        >>> import numpy as np, mindspore as ms
        >>> from mindspore import nn
        >>> from ms_accum import Accumulator
        >>> network = nn.Dense(2, 1, weight_init="ones", bias_init="zeros")
        >>> optimizer = nn.SGD(network.trainable_params(), learning_rate=0.5)
        >>> accumulator = Accumulator(optimizer, accumulate_step=2, reduction="mean")
        >>> def forward_fn(x):
        ...     return network(x).mean()
        >>> grad_fn = ms.value_and_grad(forward_fn, None, optimizer.parameters)
        >>> @ms.jit
        ... def train_step(x):
        ...     loss, grads = grad_fn(x)
        ...     return loss, accumulator(grads)
        >>> for value in (1.0, 3.0):
        ...     loss, updated = train_step(ms.Tensor(np.full((4, 2), value), ms.float32))
        ...     print(float(loss), bool(updated), network.weight.asnumpy())
        2.0 False [[1. 1.]]
        6.0 True [[0. 0.]]
    """

    @spelled
    def __init__(
        self,
        optimizer: Callable,
        accumulate_step: AccumulateStep,
        clip_norm: Optional[float] = None,
        *,
        reduction: str = "sum",
        buffer_dtype: Optional[ms.Type] = None,
        on_nonfinite: str = "apply",
        max_skips: Optional[int] = None,
        reducer: Optional[DataParallel] = None,
        after_update: Optional[Callable] = None,
        noise_scale: Optional[Observer] = None,
        loss_scaler: Optional[amp.LossScaler] = None,
    ) -> None:
        parameters = checked_parameters(optimizer)
        names, shapes, dtypes = zip(*((p.name, tuple(p.shape), p.dtype) for p in parameters))
        clip_norm, guard = checked_clip_norm(clip_norm), guard_of(on_nonfinite, max_skips, loss_scaler is not None)
        self.optimizer, self.countdown, after_update = optimizer, Countdown(), checked_hook(after_update)
        self.reduction = one_of("reduction", reduction, REDUCTIONS)
        self.buffer_dtypes = tuple(buffer_dtype_of(buffer_dtype, dtype) for dtype in dtypes)
        prefix = f"accumulator{next(_instances)}"
        self.length, self.observer = length_of(accumulate_step), checked_observer(noise_scale)
        self._settings = {"accumulate_step": self.length.description, "clip_norm": repr(clip_norm),
                          "reduction": reduction, "on_nonfinite": on_nonfinite, "noise_scale": repr(noise_scale)}
        self.exchange = _exchange_of(reducer, optimizer, self.buffer_dtypes, self._settings)
        self.loss_scaler = checked_loss_scaler(loss_scaler, on_nonfinite, self.exchange.ranks)
        name_state(optimizer, prefix)
        self.length.share(self.exchange.inside)
        self.observer.bind(prefix)
        self.noise_scale = self.observer if self.observer.watches else None
        self.buffers = Buffers(prefix, *self.exchange.buffers(), self.buffer_dtypes, self.exchange.shared_unit)
        self.counters = counters = watched(Counters(prefix), self, f"{type(optimizer).__name__} of {names[0]}")
        self.updating = Update(optimizer, dtypes, normaliser_of(reduction, self.exchange.ranks), clip_norm,
                               after_update, self.observer, self.exchange.ranks == 1 and loss_scaler is None, prefix)
        self.mini_step, self.skipped, self.weight_sum = counters.mini_step, counters.skipped, counters.weight_sum
        self.closed_windows, self.window_weight = counters.closed_windows, counters.window_weight
        self.update_step, self.seen, self.grad_norm = self.updating.step, self.updating.seen, self.updating.grad_norm
        self.loss_scale = NoLossScale() if loss_scaler is None else LossScale(loss_scaler, self, prefix)
        self.guard, self.skipped_in_row = guard(counters, self.update_step), counters.skipped_in_row
        self._add = Add((names, shapes), self.guard, self.observer, self.loss_scale, self.exchange, self.buffers,
                        self.weight_sum)
        self._reduce = Reduce(self.exchange, self.loss_scale, self.guard)
        self.parameters, self.state, self.open_state = _named_state(
            prefix, self.buffers, counters, self.observer, self.updating, self.loss_scale)

    # --- by hand ------------------------------------------------------------------------------------------------------

    def __call__(self, grads: Gradients, weight: Scalar = 1.0) -> Tensor:
        """Add one microbatch and, if it closes the window, update.

        Args:
            grads: A gradient for each of `optimizer.parameters`, in their order and shapes.
            weight: A number >= 0 or a Tensor of shape `()`. With 0, the microbatch counts, but its gradient is ignored.

        Returns:
            Whether this microbatch closed the window: bool Tensor of shape `()`.

        Raises:
            TypeError, ValueError: If `grads` or `weight` do not fit (in graph mode: when the graph is compiled). The
                state is unchanged then.
        """
        self.add(grads, weight)
        return self.close_if(self.is_full())

    def add(self, grads: Gradients, weight: Scalar = 1.0) -> None:
        """Add one microbatch to the open window, without an update. Arguments and errors as in a call."""
        grads, weight = checked_gradients(*self._add.expected, grads), as_weight(weight)
        # Without the dependency, Ascend would make the gradient that `begin` waits for in its buffer, before the note.
        grads = mapped(after, self.counters.begin(grads[-1]), grads)
        self.counters.end_uncut(self._add.in_turn(grads, weight, 1)[1])

    def apply(self) -> None:
        """Close the window now, whatever it holds: exchange, normalise, clip, optimizer, clear.

        For an empty window, the optimizer runs on a gradient of zero; `flush` does nothing then.
        """
        reduced = self.reduced()
        finite = reduced[3]
        if finite:
            self.update_with(reduced)
        else:
            self.drop()

    def flush(self) -> bool:
        """Apply the incomplete window, if one is open, with "mean" divided by the weights that it holds. For the host.

        A train step has a `flush` of its own, which knows in how many pieces it adds. With several ranks, each has to
        call it, and it returns when all have: until then, this rank takes part with weight 0 in the windows of ranks
        that have more microbatches. Return whether a window was closed: applied, or dropped because it is not finite.
        RuntimeError if an error left a part of a batch in it, or stopped an update.
        """
        return Boundary(self).flush()

    def reset(self) -> None:
        """Drop the open window, also after an error: set the buffers, `mini_step` and `weight_sum` to 0."""
        ops.assign(self.weight_sum, 0.0)
        self.buffers.empty(self.weight_sum)
        self.observer.empty()
        self.counters.empty()

    # --- the protocol: all that drivers, checkpoints, callbacks and the check use -------------------------------------

    def scaled(self, loss: Tensor) -> Tensor:
        """Return what to differentiate: the loss, times the loss scale if there is one."""
        return self.loss_scale.multiply(loss)

    def begun(self, loss: Tensor) -> Tensor:
        """Note that a microbatch or piece begins. Return the loss: no gradient of it is added before the note.

        So an error in the forward pass changes nothing, and one after it shows. Not the gradients are tied to the note:
        a dependency between a gradient and its buffer would keep Ascend from adding a matrix product in place.
        """
        return self.buffers.behind(self.counters.begin(loss), loss)

    def add_microbatch(self, grads: Gradients, weight: Scalar = 1.0) -> None:
        """Add a microbatch whose loss went through `begun`, in a graph that does not close the window.

        Arguments and errors as in a call.
        """
        self.counters.end_uncut(self._add(grads, weight, 1)[1])

    def add_piece(self, grads: Gradients, weight: Scalar = 1.0, active: int = 1) -> Scalar:
        """Add a piece of a microbatch: see `add_microbatch`. `end_microbatch` follows the last one.

        Return the sum of `active` over the ranks that exchange microbatches: how many of them have data.
        """
        numbers = self._add(grads, weight, active)
        self.counters.take(numbers[1])
        self.counters.note(1)
        return numbers[2]

    def end_microbatch(self, pieces: int) -> None:
        """Count a microbatch of so many pieces, if one of them was taken."""
        self.counters.end_microbatch(pieces)

    def is_full(self) -> Tensor:
        """Return whether the open window holds all its microbatches: bool Tensor of shape `()`."""
        return self.length.is_full(self.mini_step, self.update_step, self.weight_sum)

    def close_if(self, condition: Tensor) -> Tensor:
        """Close the window by your own rule: update if `condition`, a bool Tensor of shape `()`, is true.

        Inside `ms.jit`, prefer it to an `if` of your own around `apply`: graph mode drops a branch that nothing depends
        on without an error, as in `if done: acc.apply()` before `return done`.

        Return whether a window with microbatches in it was closed: bool Tensor of shape `()`. TypeError if `condition`
        is neither a Tensor nor a bool, ValueError if it is a Tensor of more than one element.
        """
        require_condition(isinstance(condition, bool), condition.shape if isinstance(condition, Tensor) else None)
        mini_step = self.mini_step + 0
        if condition:
            self.apply()
        return self.mini_step < mini_step  # from the state after the branch, which keeps the branch

    def reduced(self, active: Scalar = 1.0) -> Reduced:
        """Return the window of all ranks, for `update_with` or `drop`. `active`: 1 from a rank that has data."""
        numbers = (self.weight_sum, self.mini_step + 0, active, *self.observer.open_window())
        return self._reduce(self.buffers.parameters, self.buffers.weight_unit, numbers)

    def update_alone(self, grads: Gradients, weight: Scalar) -> None:
        """Update with a window of one microbatch, without buffers: for an empty window, where nothing is left out.

        Only if the guard is `ApplyAll`, the observer does not watch, no weight decides when a window is full, and ranks
        do not sum each microbatch. Its gradients are in units of its own weight.
        """
        grads, weight = checked_gradients(*self._add.expected, grads), as_weight(weight)
        if isinstance(weight, Tensor) or weight == 0:  # what has no weight is ignored, NaN included
            grads = mapped(weighted, weight != 0, grads, self.buffer_dtypes)
        self.counters.begin_update(grads[-1])
        self.updating(self._reduce(grads, weight, (weight, 1, 1.0)), False)
        self.counters.close(weight)
        self.counters.end_update()

    def update_with(self, reduced: Reduced) -> None:
        """Update with a window: normalise, clip, optimizer, hooks; see `update.py`. Then clear."""
        self.counters.begin_update(reduced[0][-1])
        self.updating(reduced, True)
        self.guard.applied()
        self.loss_scale.adjust(True)
        self.counters.close(self.weight_sum)
        self.reset()

    def drop(self) -> None:
        """Clear without an update, and count in `skipped`."""
        self.guard.dropped()
        self.loss_scale.adjust(False)
        self.counters.close(self.weight_sum)
        self.reset()

    def position(self) -> tuple[int, int]:
        """Return how many microbatches the open window holds, and how many it needs, at least. For the host: it waits.
        """
        held = int(self.mini_step)
        return held, self.length.missing(held, int(self.update_step), self.weight_sum)

    def require_whole(self) -> None:
        """Raise RuntimeError if an error left a part of a batch in the open window, or stopped an update."""
        self.counters.require_whole()

    def fingerprint(self) -> dict[str, str]:
        """Return what has to be alike in a run that resumes in the middle of a window."""
        return {**self._settings, "reducer": self.exchange.describe()}


def _named_state(prefix: str, buffers: Buffers, counters: Counters, observer: Observer, update: Update,
                 loss_scale: NoLossScale) -> tuple[ParameterTuple, dict[str, Parameter], set[str]]:
    """Return all state, the same by name, and the names of what belongs to the open window."""
    of_window = (*buffers.state, *counters.of_window, *observer.of_window)
    kept = (*update.parameters, *counters.kept, *loss_scale.parameters, *observer.parameters)
    state, open_state = ({p.name.removeprefix(f"{prefix}."): p for p in some} for some in (of_window + kept, of_window))
    return ParameterTuple(of_window + kept), state, set(open_state)


def _exchange_of(reducer: Optional[DataParallel], optimizer: Callable, dtypes: tuple, settings: dict) -> OneDevice:
    if reducer is None:
        return OneDevice(Accumulated(tuple(optimizer.parameters), dtypes, settings))
    reducer = instance_of("reducer", reducer, DataParallel, "a DataParallel, or None", "give e.g. DataParallel()")
    alike = {**settings, "the optimizer, its learning rate or state": describe(optimizer)}
    return reducer.bind(Accumulated(tuple(optimizer.parameters), dtypes, alike))
