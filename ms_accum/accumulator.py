"""The accumulator: one buffer for each parameter, filled by microbatches and emptied by an update."""
from __future__ import annotations

from collections.abc import Callable
from itertools import count
from math import nan
from typing import Optional, Union

import mindspore as ms
from mindspore import Parameter, ParameterTuple, Tensor, amp, nn, ops

from .arguments import (
    as_weight,
    as_weights,
    instance_of,
    number,
    one_of,
    require_condition,
    require_entries,
    require_gradients,
    whole_number,
)
from .batch_size.adaptive import SMOOTHING
from .batch_size.noise_scale import GradientNoiseScale, meters_of
from .distributed.buckets import Layout
from .distributed.local import LocalUpdates
from .distributed.reducers import DataParallel, OneDevice
from .gradients import (
    FLOATS,
    Gradients,
    Header,
    Scalar,
    as_vector,
    clip_factor,
    combined,
    global_norm,
    mapped,
    multiply_no_nan,
    scaled,
    weighted,
)
from .host_count import HostCount, keep_apart, recount
from .loss_scale import LossScale, NoLossScale, owner_of, require_loss_scaler, take_ownership
from .nonfinite import AnyMicrobatch, AnyWindow, FiniteMicrobatch, FiniteWindow
from .optimizers import checked_parameters, describe, name_state, state_of
from .state import empty_parameter
from .unit import FirstWeight, One
from .window import AccumulateStep, Window

_REDUCTIONS = ("sum", "mean")
_ON_NONFINITE = ("apply", "skip_microbatch", "skip_window")
_instances = count()


@ms.jit_class
class Accumulator:
    """Add up the gradients of microbatches and update once per window; inside `ms.jit` and in PyNative.

        buffer += weight * gradient                              # every microbatch
        gradient = buffer                                        # reduction="sum", at the boundary
                 = buffer / sum of the weights                   # reduction="mean", at the boundary
                 = sum over t of (buffer[t] / sum of weights[t]) # with several losses t, each by its own weights
        gradient *= min(1, clip_norm / (norm(gradient) + 1e-6))  # if clip_norm is given
        optimizer(gradient); buffer = 0

    A drop-in replacement for the class of MindSpore's gradient accumulation tutorial, with half its memory. With "sum",
    the default and the tutorial's contract, *the script divides its loss by `accumulate_step`*: an undivided loss makes
    updates N times too large without an error. `make_train_step` and `TrainOneStepCell` build an accumulator with
    "mean" and take the undivided loss; prefer them in a new script.

    With "mean", mean losses, and the number of samples (or unmasked tokens) as weights, the update equals the
    full-batch update up to rounding, also for ragged microbatches and an incomplete last window. Buffers count in units
    of the first weight: microbatches of equal weight are added without a multiplication, and in a window of one
    microbatch the optimizer gets a gradient that is bit-identical to the microbatch's.

    Args:
        optimizer: A MindSpore optimizer of float parameters, none of them frozen (`requires_grad=False`) or without
            elements, and without a `loss_scale` of its own (give a `loss_scaler` to the train step). Gradients come in
            the order of `optimizer.parameters`. State with the same name as that of another accumulator's optimizer
            (`global_step`) is renamed, so that both fit into one graph.
        accumulate_step: Microbatches in a window: an int; `{update_step: n}`, piecewise constant, which holds 0; or a
            function of the update count (int32 Tensor of shape `()`) that graph mode can compile and that returns an
            int or an integer Tensor >= 1. A window keeps its length from its first microbatch to its last. Or
            `until_weight(budget)`: a window closes with the microbatch that brings its weight to the budget. Or
            `AdaptiveWindow()`: lengths follow the noise scale.
        clip_norm: Largest global norm (> 0) of the accumulated, normalised gradient. `float("inf")` measures
            `grad_norm` and clips nothing; None computes no norm.
        reduction: "sum" or "mean".
        buffer_dtype: dtype of the buffers. None: the parameter's own, but float32 for float16 and bfloat16. A float16
            buffer overflows if the sum of weight / first weight * gradient exceeds 65504.
        on_nonfinite: What to do with NaN and infinity. "apply": apply them like other values. "skip_microbatch": ignore
            the microbatch; the window stays open for another one (`optax.skip_not_finite`). "skip_window": drop the
            window when it closes, without an update. A gradient is finite if the sum of its elements is.
        reducer: A `DataParallel`, which makes the ranks of a run started with `msrun` update as one; or a
            `LocalUpdates`, with which each updates alone and all exchange parameters now and then. None: one device.
        after_update: A function without arguments that is called after each update, never for a microbatch or a window
            that is skipped; for a moving average of the weights, say. In graph mode it is part of the graph: it has to
            change Parameters, and what it does in Python alone (appending to a list, say) never runs. The Parameters of
            a Cell, or of a Cell whose method it is, are state of the accumulator; those of other functions are not
            saved in checkpoints.
        losses: How many losses there are, each a mean over a count of its own: tokens for one, images or routed tokens
            for another. The accumulated gradient is that of the sum of their means over the window, on all ranks. Each
            has buffers of its own, and `grads` and `weight` are tuples with an entry for each. It requires
            `reduction="mean"`. A train step runs the forward pass once for each loss, so a BatchNorm layer updates its
            moving statistics as often; `CompiledStep.epoch` with `lookahead=True` runs it once.
        noise_scale: A `GradientNoiseScale`, which measures up to which batch size more samples help. It costs one norm
            per microbatch. With `reduction="mean"` and one loss only. An `AdaptiveWindow` brings one, if none is given.

    Attributes:
        mini_step: Microbatches in the open window: int32 Parameter of shape `()`.
        update_step: Updates done: int32 Parameter of shape `()`.
        closed_windows: Windows closed, with an update or dropped: int32 Parameter of shape `()`.
        window_length: Microbatches that the open window will hold on each rank, unless it is cut short: an int. With
            `until_weight`, the most that it may hold. Reading it waits for the device.
        noise_scale: The `GradientNoiseScale` that was given, or that an `AdaptiveWindow` brought; None without one.
        buffer_dtypes: dtype of each parameter's accumulated gradient.
        skipped: Gradients ignored because they were not finite, each of a microbatch ("skip_microbatch") or of a window
            ("skip_window", or with a loss scaler): int32 Parameter of shape `()`. Of all ranks alike, but with
            `sync="node"` and "skip_microbatch", of this rank's node.
        grad_norm: Norm of the last update's gradient before clipping: float32 Parameter of shape `()`. NaN until it has
            been measured, and always without `clip_norm`.
        weight_sum: Sum of the weights in the open window, with `reduction="mean"`: float32 Parameter of shape `()`, or
            `(losses,)` if there are several.
        window_weight: `weight_sum` of the last window that was closed. On several ranks, `weight_sum` and
            `window_weight` are those of this rank, or of all ranks if gradients are exchanged at each microbatch.
        parameters: ParameterTuple of all state, for checkpoints. Names are unique in the process and the same in the
            next process that builds its accumulators in the same order.

    Raises:
        TypeError: If an argument is of the wrong kind.
        ValueError: If an argument is out of range.

    Source: the tutorial's class
        (https://www.mindspore.cn/tutorials/experts/en/r2.2/optimize/gradient_accumulation.html);
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

    def __init__(
        self,
        optimizer: Callable,
        accumulate_step: AccumulateStep,
        clip_norm: Optional[float] = None,
        *,
        reduction: str = "sum",
        buffer_dtype: Optional[ms.Type] = None,
        on_nonfinite: str = "apply",
        reducer: Union[DataParallel, LocalUpdates, None] = None,
        after_update: Optional[Callable] = None,
        noise_scale: Optional[GradientNoiseScale] = None,
        losses: int = 1,
    ) -> None:
        parameters = checked_parameters(optimizer)
        self.optimizer = optimizer
        self.accumulate_step = accumulate_step
        self.window = Window(accumulate_step)
        self.clip_norm = _checked_clip_norm(clip_norm)
        self.reduction = one_of("reduction", reduction, _REDUCTIONS)
        self.on_nonfinite = one_of("on_nonfinite", on_nonfinite, _ON_NONFINITE)
        self.after_update = None
        if after_update is not None:
            self.after_update = instance_of("after_update", after_update, Callable,
                                            "a function without arguments, a Cell, or None")
        self.losses = _checked_losses(losses, reduction)
        name = "noise_scale"
        if self.window.adaptive is not None and noise_scale is None:
            name, noise_scale = "an AdaptiveWindow", GradientNoiseScale(SMOOTHING)
        self.noise_scale = _checked_noise_scale(name, noise_scale, reduction, self.losses)
        self.loss_scaler = None
        self._names = tuple(p.name for p in parameters)
        self._shapes = tuple(tuple(p.shape) for p in parameters)
        self._dtypes = tuple(p.dtype for p in parameters)
        self.buffer_dtypes = tuple(_buffer_dtype(buffer_dtype, p.dtype) for p in parameters)

        alike = {**self._settings(), "the optimizer, its learning rate or state": describe(optimizer)}
        layout = Layout(parameters, self.buffer_dtypes, on_nonfinite == "skip_microbatch", alike, self.losses)
        self.reducer = OneDevice(layout)
        if reducer is not None:
            instance_of("reducer", reducer, (DataParallel, LocalUpdates), "a DataParallel, a LocalUpdates, or None",
                        "give e.g. DataParallel()")
            self.reducer = reducer.bind(layout)
        self._prefix = prefix = f"accumulator{next(_instances)}"
        name_state(optimizer, prefix)
        if self.losses > 1 and self.reducer.sums_microbatches:
            raise ValueError(f'got losses={losses} with a DataParallel that would exchange the gradients of each loss '
                             'at each microbatch; give sync="window"')
        # Those of the first loss, of the second one, and so on.
        prefixes = [f"{prefix}.loss{t + 1}" if t else prefix for t in range(self.losses)]
        self.buffers = ParameterTuple([buffer for name in prefixes for buffer in self.reducer.new_buffers(name)])
        self._make_counters(prefix)

        self._budget = self._weight_that_closes()
        counts_in_first = reduction == "mean" and not self.reducer.sums_microbatches
        self._units = tuple([FirstWeight(p.name, p) if counts_in_first else One() for p in self._weight_units])
        skips_microbatch, skips_window = on_nonfinite == "skip_microbatch", on_nonfinite == "skip_window"
        self._microbatch_guard = FiniteMicrobatch(self.skipped) if skips_microbatch else AnyMicrobatch()
        self._window_guard = FiniteWindow(self.skipped) if skips_window else AnyWindow()
        self._loss_scale = NoLossScale()
        self._meters = meters_of(noise_scale, prefix)
        self._adaptive = () if self.window.adaptive is None else (self.window.adaptive,)
        self._hooks = () if after_update is None else (after_update,)
        self._scalers = ()
        self._count = HostCount(prefix, self.window, self._budget, self.mini_step, self.update_step, self.weight_sum)
        self._in_pieces = False  # whether a driver adds microbatches in pieces, which it notes in `_unfinished`
        self._known = False  # whether windows are weighed before they are trained: the losses share one set of buffers
        self._state = [*self._counters, *self.reducer.new_state(prefix),
                       *_state_of(after_update, optimizer, parameters),
                       *(parameter for meter in self._meters for parameter in meter.parameters),
                       *(parameter for adaptive in self._adaptive for parameter in adaptive.parameters)]
        for adaptive in self._adaptive:
            for parameter in adaptive.parameters:
                parameter.name = f"{prefix}.{parameter.name}"
        self.parameters = ParameterTuple([*self.buffers, *self._state])

    def _weight_that_closes(self) -> Optional[float]:
        """Return the `weight_sum` that closes a window, or None. ValueError if weights cannot decide that here."""
        if self.window.budget is None:
            return None
        if self.reduction != "mean":
            raise ValueError(f'got until_weight with reduction={self.reduction!r}, which does not add up weights; give '
                             'reduction="mean"')
        if self.reducer.each_microbatch and not self.reducer.sums_microbatches:
            raise ValueError('got until_weight on several ranks with sync="window" and on_nonfinite="skip_microbatch", '
                             'where all ranks close their windows after the same number of microbatches; give '
                             '"skip_window", or DataParallel(sync="microbatch")')
        return self.window.budget * self.reducer.summed

    def _make_counters(self, prefix: str) -> None:
        def counter(name: str, dtype: ms.Type, value: float = 0, shape: tuple[int, ...] = ()) -> Parameter:
            return empty_parameter(f"{prefix}.{name}", shape, dtype, value)

        one_each = () if self.losses == 1 else (self.losses,)

        self.mini_step = counter("mini_step", ms.int32)
        self._unfinished = counter("unfinished", ms.int32)
        self.update_step = counter("update_step", ms.int32)
        self.closed_windows = counter("closed_windows", ms.int32)
        self.skipped = counter("skipped", ms.int32)
        self.weight_sum = counter("weight_sum", ms.float32, shape=one_each)
        self._weight_units = [counter(f"weight_unit{t + 1 if t else ''}", ms.float32) for t in range(self.losses)]
        self.grad_norm = counter("grad_norm", ms.float32, nan)
        self.window_weight = counter("window_weight", ms.float32, shape=one_each)
        self._counters = [self.mini_step, self._unfinished, self.update_step, self.closed_windows, self.skipped,
                          self.weight_sum, *self._weight_units, self.grad_norm, self.window_weight]

    @property
    def window_length(self) -> int:
        """See the class."""
        return self.window.host_length(int(self.update_step))

    def __call__(self, grads: Gradients, weight: Scalar = 1.0) -> Tensor:
        """Add one microbatch and, if it closes the window, update.

        Args:
            grads: A gradient for each of `optimizer.parameters`, in their order and shapes. With several losses, a
                tuple of such tuples.
            weight: Weight of the microbatch: a number >= 0 or a Tensor of shape `()`; with several losses, a tuple.

        Returns:
            Whether this microbatch closed the window: bool Tensor of shape `()`.

        Raises:
            TypeError, ValueError: If `grads` or `weight` do not fit (in graph mode: when the graph is compiled). The
                state is unchanged then.
        """
        self.add(grads, weight)
        return self._close_if_due()

    def add(self, grads: Gradients, weight: Scalar = 1.0) -> None:
        """Add one microbatch to the open window, without an update. Arguments and errors as in a call."""
        recount(self._prefix)
        grads, weights = self._per_loss(grads, weight)
        for gradients in grads:
            self._require(gradients)
        self._end_microbatch(self._add_piece(grads, weights, weights))

    def close_if(self, condition: Tensor) -> Tensor:
        """Close the window by your own rule: update if `condition`, a bool Tensor of shape `()`, is true.

        Inside `ms.jit`, prefer it to an `if` of your own around `apply`: graph mode drops a branch that nothing depends
        on without an error, as in `if done: acc.apply()` before `return done`.

        Returns:
            Whether a window with microbatches in it was closed: bool Tensor of shape `()`.

        Raises:
            TypeError: If `condition` is neither a Tensor nor a bool.
            ValueError: If it is a Tensor of more than one element.
        """
        require_condition(isinstance(condition, bool), condition.shape if isinstance(condition, Tensor) else None)
        mini_step = self.mini_step + 0
        if condition:
            self.apply()
        return self.mini_step < mini_step  # from the state after the branch, which keeps the branch

    def apply(self) -> None:
        """Close the window now, whatever it holds: reduce, normalise, clip, optimizer, reset.

        For an empty window, the optimizer runs on a gradient of zero; `flush` does nothing then.
        """
        self._apply(1.0)

    def _apply(self, asked: float) -> Scalar:
        """Close the window, and do what is left after it. Return how many ranks still have data or close a window."""
        return self.reducer.conclude(self._close(asked), self.update_step)

    def _close(self, asked: float) -> Scalar:
        """Close the window of all ranks if one of them asks for it (1.0) or has microbatches. Return how many ask."""
        gradients, unit, header = self._reduced(asked)
        microbatches, asking = header[self.losses:self.losses + 2]
        if asked > 0 or asking > 0 or microbatches > 0:
            finite = self._window_guard.accepts(gradients)
            if finite:
                self._update(gradients, unit, header)
            self._conclude(finite)
        self.reset()
        return asking

    # The steps of `_close`, which `straight` calls one by one, from graphs without branches.

    def _reduced(self, asked: float) -> tuple[Gradients, Scalar, Header]:
        """Return the window's gradients of all ranks, the unit of weights that they count in, and sums over all ranks:
        weights, microbatches, `asked`, and what the meters measured.
        """
        header = (*self._each(self.weight_sum), self.mini_step, asked)
        for meter in self._meters:
            header = (*header, *meter.open_window())
        return self._summed(self.buffers, tuple([unit.current() for unit in self._units]), header)

    def _summed(
        self, buffers: Gradients, units: tuple[Scalar, ...], header: Header,
    ) -> tuple[Gradients, Scalar, Header]:
        if self.losses > 1 and not self._known:
            # Each loss is divided by what all ranks have of it, so that only the sum has to be exchanged.
            header = self.reducer.header(header)
            factors = tuple([_share(unit, weight) for unit, weight in zip(units, header)])
            # Unpacked, what is not used makes MindSpore warn of "side effect nodes eliminated by mistake".
            gradients = self.reducer.window(combined(buffers, factors, self.buffer_dtypes), 1.0, (1.0,))[0]
            unit = 1.0
        else:
            gradients, unit, header = self.reducer.window(buffers, 1.0 if self._known else units[0], header)
        # Before anything is measured: norms and sums of scaled gradients would overflow where the gradients do not.
        return self._loss_scale.divide(gradients), unit, header

    def _update(self, gradients: Gradients, unit: Scalar, header: Header) -> None:
        # normalise
        weight = header[0]
        factor = self._normaliser(unit, weight)
        norm = self._norm(gradients, factor)
        for meter in self._meters:
            meter.conclude(header[3:], weight, norm)
            for adaptive in self._adaptive:
                parties = self.reducer.contributors // self.reducer.summed  # that count microbatches of their own
                adaptive.follow(meter.totals + 0.0, meter.decay, header[4], weight, header[1] / parties)
        # clip
        factor = self._clipped(factor, norm)
        # optimizer
        self.optimizer(mapped(scaled, factor, gradients, self._dtypes))
        ops.assign_add(self.update_step, 1)
        for hook in self._hooks:
            hook()

    def _conclude(self, finite: Union[bool, Tensor]) -> None:
        """Count a window that was applied, or, if it is not finite, dropped."""
        self._window_guard.count(finite)
        for scaler in self._scalers:
            scaler.adjust(finite if isinstance(finite, Tensor) else Tensor(finite))
        ops.assign(self.window_weight, self.weight_sum)
        ops.assign_add(self.closed_windows, 1)

    def _normaliser(self, unit: Scalar, weight: Scalar) -> Scalar:
        if self.reduction == "sum":
            return 1.0 / self.reducer.contributors
        return _share(unit, weight) if self.losses == 1 else 1.0

    def _norm(self, gradients: Gradients, factor: Scalar) -> Scalar:
        if self.clip_norm is None and self.noise_scale is None:
            return 0.0
        return global_norm(gradients) * abs(factor)  # negative weights can make the factor negative

    def _clipped(self, factor: Scalar, norm: Scalar) -> Scalar:
        if self.clip_norm is None:
            return factor
        ops.assign(self.grad_norm, norm)
        return factor * clip_factor(norm, self.clip_norm)

    def flush(self) -> Tensor:
        """Apply the incomplete window, if one is open, with "mean" divided by the weights that it holds.

        With several ranks, each has to call it, and it returns when all have: until then, this rank takes part with
        weight 0 in the windows of ranks that have more microbatches.

        Returns:
            Whether a window was closed: bool Tensor of shape `()`.
        """
        windows = self.closed_windows + 0
        others = 1.0  # ranks that have data or close a window: on one device, none after the first turn
        if self.reducer.each_microbatch:
            while others > 0:
                # With weight 0, any tensors of the right shapes are ignored.
                nothing = (0.0,) * self.losses
                taken, others = self._add_on_all_ranks(
                    (self.optimizer.parameters,) * self.losses, nothing, nothing, 0.0)
                ops.assign_add(self.mini_step, taken * (others > 0))
                self.close_if(ops.logical_or(self._due(), ops.logical_and(others == 0, self.mini_step > 0)))
        if self.reducer.windows_apart:
            others = 1.0
            while others > 0:
                # Ranks that weigh a window before they train on it do so together.
                asked = self.reducer.header((0.0,) * self.losses)[0] * 0.0 if self._known else 0.0
                others = self._apply(asked)
        return self.closed_windows > windows  # from the state after the branches, which keeps them

    def reset(self) -> None:
        """Drop the open window, also after an error: set the buffers, `mini_step` and `weight_sum` to 0."""
        recount(self._prefix)
        ops.assign(self.mini_step, 0)
        if self._in_pieces:
            ops.assign(self._unfinished, 0)
        self._set_weight_sum((0.0,) * self.losses)
        zero = self._each(self.weight_sum)[0]
        for buffer in self.buffers:
            # buffer * 0, where NaN * 0 is 0. For zeros_like(buffer), a constant, graph mode keeps a second copy of all
            # buffers (258 MB measured), and so it does for a broadcast 0, which is also 3 x slower.
            ops.assign(buffer, multiply_no_nan(buffer, zero.astype(buffer.dtype)))
        for meter in self._meters:
            meter.forget_window()

    # --- for drivers --------------------------------------------------------------------------------------------------

    def _due(self) -> Tensor:
        """Return whether the open window holds all its microbatches: bool Tensor of shape `()`."""
        due = self.mini_step >= self.window.length(self.update_step)
        if self._budget is not None:
            due = ops.logical_or(due, self._each(self.weight_sum)[0] >= self._budget)
        if self._in_pieces:
            # MindSpore may report an error in a piece after later calls: a window with a part of a batch stays open.
            due = ops.logical_and(due, self._unfinished == 0)
        return due

    def _close_if_due(self) -> Tensor:
        """Close the window if it holds all its microbatches. Return whether it did: bool Tensor of shape `()`."""
        return self.close_if(self._due())

    def _note_piece(self) -> None:
        """Note that a microbatch is added in pieces: until `_end_microbatch`, an error in a piece leaves a trace."""
        ops.assign_add(self._unfinished, 1)

    def _per_loss(self, grads: Gradients, weight: Scalar) -> tuple[tuple[Gradients, ...], tuple[Scalar, ...]]:
        """Return what `add` was given as a tuple with an entry for each loss. Raise if there are not as many."""
        if self.losses == 1:
            return (grads,), (as_weight(weight),)
        require_entries("grads", self.losses, len(grads) if isinstance(grads, (tuple, list)) else None)
        return grads, as_weights(weight, self.losses)

    def _add_piece(
        self, grads: tuple[Gradients, ...], factors: tuple[Scalar, ...], weights: tuple[Scalar, ...],
    ) -> Tensor:
        """Add `factor * gradients` to the buffers and `weight` to `weight_sum`, of each loss.

        A piece of weight 0 is ignored, even if its gradient is NaN, as for a mean over no unmasked token.

        Args:
            grads: As in `add`, unchecked, a tuple for each loss.
            factors: What the gradients are multiplied by, as from `arguments.as_weight`; for mean losses, `weights`.
            weights: As from `arguments.as_weight`.

        Returns:
            Whether they were added: int32 Tensor of shape `()`, 0 if `on_nonfinite="skip_microbatch"` skipped them,
                else 1.
        """
        taken, present = self._add_on_all_ranks(grads, factors, weights, 1.0)
        # `depend` uses what nobody needs, or MindSpore warns of "side effect nodes eliminated by mistake".
        return ops.depend(taken, present)

    def _apply_alone(self, grads: tuple[Gradients, ...], weights: tuple[Scalar, ...]) -> None:
        """Do what `_add_piece` and `_close` do for a window of this microbatch alone, without writing to the buffers.

        Only for an empty window, without meters, and if neither microbatches nor windows can be skipped.
        """
        if self.losses == 1 and not isinstance(weights[0], Tensor) and weights[0] == 0:
            self._add_piece(grads, weights, weights)
            self._close(1.0)
        else:
            gradients, units, header = self._weighed(grads, weights, weights, 1.0)
            weights = header[:self.losses]
            gradients, unit, header = self._summed(gradients, units, (*weights, 1.0, 1.0))
            self._update(gradients, unit, header)
            self._set_weight_sum(weights)
            self._conclude(True)
            self._set_weight_sum((0.0,) * self.losses)

    def _add_known(self, grads: Gradients, factor: Tensor, weights: tuple[Scalar, ...]) -> Tensor:
        """Add `factor * grads` to the only set of buffers, and the weights of all losses to `weight_sum`. Return 1.

        For windows whose weights are known before: the gradients are of each loss times its share of the window.
        """
        mapped(_add_to, None, self.buffers, mapped(weighted, factor, grads, self.buffer_dtypes))
        ops.assign_add(self.weight_sum, as_vector(weights))
        return Tensor(1, ms.int32)

    def _know_totals(self) -> None:
        """Keep one set of buffers for all losses from now on. RuntimeError if they were kept apart. For the host."""
        if self._known:
            return
        reason = self._why_apart()
        if reason:
            raise RuntimeError(f"windows cannot be weighed before they are trained: {reason}")
        self._count.apart, self._known, self._in_pieces = False, True, True
        self.buffers = ParameterTuple(self.buffers[:len(self._names)])
        self.parameters = ParameterTuple([*self.buffers, *self._state])

    def _why_apart(self) -> str:
        """Return why the losses have to be kept apart; "" if they need not be. For the host."""
        if self.on_nonfinite == "skip_microbatch":
            return 'with on_nonfinite="skip_microbatch", what is skipped is not known before; give "skip_window"'
        if int(self.mini_step) > 0:
            return ("the open window holds microbatches already, of a checkpoint, say; call flush() or reset() first, "
                    "or train on without lookahead until it is closed")
        if self._count.apart:
            return ("the accumulator keeps the losses apart, because it was used without lookahead; build another "
                    "accumulator for lookahead=True")
        return ""

    def _end_microbatch(self, taken: Tensor, notes: int = 0) -> None:
        """Count a microbatch of which `taken` pieces (int32 Tensor of shape `()`) were added, and undo its `notes`."""
        ops.assign_add(self.mini_step, ops.minimum(taken, 1) if notes else taken)
        if notes:
            ops.assign_add(self._unfinished, -notes)

    def _settle_units(self) -> None:
        """Rescale loaded buffers to the units that compiled graphs hold. For the host."""
        size = len(self.buffers) // self.losses
        for t, unit in enumerate(self._units):
            unit.settle(self.buffers[t * size:(t + 1) * size])

    def _require_whole(self) -> None:
        """Raise RuntimeError if an error left a part of a microbatch in the open window. For the host."""
        if self._count.ahead:
            raise RuntimeError("the open window was weighed as a whole by epoch(lookahead=True), and not all of it is "
                               "trained yet; expected whole windows: save when train_step.updated is true; or, if the "
                               "loop was left, call accumulator.reset(), which drops the open window")
        if int(self._unfinished) != 0:
            raise RuntimeError("the open window may hold only some pieces of a batch, because an error stopped the "
                               "others; expected whole batches: call accumulator.reset(), which drops the open window, "
                               "and go on with the next batch")

    def _prepare(self) -> bool:
        """Finish what came before a train step or its flush: an error, an interrupted call, a checkpoint. For the host.

        Return whether that closed a window.
        """
        self._require_whole()
        self._count.closing = self._count.closing or self._count.loaded
        self._count.loaded = False
        return self._finish_interrupted()

    def _finish_interrupted(self) -> bool:
        """Close the window if a train step was interrupted after it had filled it. Return whether it was."""
        if self._count.closing:
            self._count.forget()
            self._count.settle()
        full = self._count.closing
        if full:
            self.apply()
        return full

    def _attach_loss_scaler(self, loss_scaler: amp.LossScaler) -> None:
        """Expect gradients of losses that are multiplied by the scale of `loss_scaler`, a `mindspore.amp.LossScaler`.

        When a window closes, the accumulated gradient is divided by the scale before it is measured, averaged or
        clipped, and the scaler is adjusted once. If a gradient of the window overflowed, the window is dropped and
        counted in `skipped`. The scaler's Parameters become state of the accumulator, under its names.

        Raises:
            TypeError: If it is not such a loss scaler.
            ValueError: If its scale is not a finite number > 0, there is another one already, it belongs to another
                accumulator, a window is open, ranks give different ones, or `on_nonfinite` is "skip_microbatch".
        """
        if loss_scaler is self.loss_scaler:
            return
        require_loss_scaler(loss_scaler, self.reducer.ranks)
        if self.loss_scaler is not None:
            raise ValueError("the accumulator already has another loss_scaler, whose scale its buffers carry; give "
                             "that one")
        if owner_of(loss_scaler) is not None:
            raise ValueError("the loss_scaler belongs to another accumulator, which would adjust it in the middle of "
                             "this one's windows; give each accumulator its own")
        if int(self.mini_step) > 0:
            raise ValueError("the open window holds gradients without a loss scale; give the loss_scaler before, or "
                             "reset()")
        if self.on_nonfinite == "skip_microbatch":
            raise ValueError('got a loss_scaler with on_nonfinite="skip_microbatch": the scale changes only when a '
                             'window closes, so an overflowing microbatch would be skipped every time; give "apply" or '
                             '"skip_window", which both drop the window')
        self.loss_scaler = loss_scaler
        self._loss_scale = LossScale(loss_scaler)
        if type(loss_scaler).adjust is not amp.StaticLossScaler.adjust:  # it does nothing, which makes MindSpore warn
            self._scalers = (loss_scaler,)
        self._window_guard = FiniteWindow(self.skipped)
        self._state += take_ownership(loss_scaler, self, self._prefix)
        self.parameters = ParameterTuple([*self.buffers, *self._state])

    # --- one microbatch -----------------------------------------------------------------------------------------------

    def _require(self, grads: Gradients) -> None:
        if isinstance(grads, (tuple, list)):
            shapes = tuple([g.shape if isinstance(g, Tensor) else None for g in grads])
            dtypes = tuple([g.dtype if isinstance(g, Tensor) else None for g in grads])
            require_gradients(self._names, self._shapes, shapes, dtypes)
        else:
            require_gradients(self._names, self._shapes, None, ())

    def _add_on_all_ranks(
        self, grads: tuple[Gradients, ...], factors: tuple[Scalar, ...], weights: tuple[Scalar, ...], present: float,
    ) -> tuple[Tensor, Scalar]:
        """Add a microbatch of each rank. Return whether it was added (int32, 0 or 1), and the sum of `present`."""
        gradients, units, header = self._weighed(grads, factors, weights, present)
        weights, others = header[:self.losses], header[self.losses + 2:]
        bad, present = header[self.losses:self.losses + 2]
        taken = self._microbatch_guard.take(bad)
        if self.losses > 1 or isinstance(weights[0], Tensor) or weights[0] != 0:
            self._store(taken, gradients, units, (*weights, *others))
        return taken, present

    def _weighed(
        self, grads: tuple[Gradients, ...], factors: tuple[Scalar, ...], weights: tuple[Scalar, ...], present: float,
    ) -> tuple[Gradients, tuple[Scalar, ...], Header]:
        """Return what a microbatch of each rank adds to the buffers, their units of weights, and sums over the ranks
        that exchange microbatches: weights, whether to skip it, `present`, and what the meters measured.
        """
        if self.losses > 1:
            keep_apart(self._prefix)
        # Before the exchange: afterwards, these are gradients of all ranks together.
        spread = ()
        for meter in self._meters:
            spread = (*spread, *meter.measure(grads[0], self._loss_scale, weights[0]))
        gradients, units = (), ()
        for of_loss, factor, weight, counted_in in zip(grads, factors, weights, self._units):
            if self.losses > 1 and not isinstance(factor, Tensor) and factor == 0:
                unit = counted_in.current()
            else:
                unit = counted_in.of(factor)
                factor = factor / unit
            # What has no weight becomes 0, also where it is NaN: ranks may exchange it.
            if isinstance(weight, Tensor):
                factor = ops.where(weight == 0, Tensor(0.0, ms.float32), factor)
            units = (*units, unit)
            gradients = (*gradients, *mapped(weighted, factor, of_loss, self.buffer_dtypes))
        # Of several losses, what has no weight is 0 by now.
        bad = self._microbatch_guard.bad(gradients, weights[0] if self.losses == 1 else 1.0)
        gradients, header = self.reducer.microbatch(gradients, (*weights, bad, present, *spread))
        return gradients, units, header

    def _store(self, taken: Tensor, gradients: Gradients, units: tuple[Scalar, ...], header: Header) -> None:
        gradients = self._microbatch_guard.kept(taken, gradients)
        header = self._microbatch_guard.kept(taken, header)
        mapped(_add_to, None, self.buffers, gradients)
        if self.losses > 1:
            ops.assign_add(self.weight_sum, as_vector(header[:self.losses]))
        elif self.reduction == "mean":
            ops.assign_add(self.weight_sum, header[0])
        for counted_in, unit in zip(self._units, units):
            if counted_in.is_state:
                counted_in.keep(unit)
        for meter in self._meters:
            meter.include(header[1:])

    def _each(self, weights: Tensor) -> tuple[Tensor, ...]:
        """Return `weight_sum`, or another such Tensor, as a scalar for each loss."""
        return (weights,) if self.losses == 1 else tuple([weights[t] for t in range(self.losses)])

    def _set_weight_sum(self, weights: tuple[Scalar, ...]) -> None:
        ops.assign(self.weight_sum, weights[0] if self.losses == 1 else as_vector(weights))

    def _settings(self) -> dict[str, str]:
        """Return what has to be the same on every rank, and in a run that resumes."""
        return {"accumulate_step": self.window.describe(), "clip_norm": repr(self.clip_norm),
                "reduction": self.reduction, "on_nonfinite": self.on_nonfinite,
                "noise_scale": repr(self.noise_scale and self.noise_scale.decay)}


def _share(unit: Scalar, weight: Scalar) -> Scalar:
    """Return what makes a sum in this unit a mean. A window without weight (every token masked) is not 0/0, but 0."""
    if not isinstance(weight, Tensor):
        return unit / weight
    return unit / ops.where(weight == 0, Tensor(1.0, ms.float32), weight)


def _add_to(_: None, buffer: Parameter, gradient: Tensor) -> None:
    gradient = gradient.astype(buffer.dtype)
    if buffer.dtype in (ms.float16, ms.bfloat16):
        # MindSpore 2.10 on CPU: of two float16 AssignAdd on one Parameter in one graph, the first is lost.
        ops.assign(buffer, buffer + gradient)
    else:
        ops.assign_add(buffer, gradient)


def _state_of(hook: Optional[Callable], optimizer: Callable, parameters: tuple[Parameter, ...]) -> list[Parameter]:
    """Return the Parameters of a hook that is a Cell or a method of one, without the network's and the optimizer's."""
    cell = getattr(hook, "__self__", hook)
    if not isinstance(cell, nn.Cell):
        return []
    others = {id(p) for p in (*parameters, *(p for _, p in state_of(optimizer)))}
    return [p for p in cell.get_parameters() if id(p) not in others]


def _checked_clip_norm(clip_norm: object) -> Optional[float]:
    if clip_norm is None:
        return None
    return number("clip_norm", clip_norm, lambda norm: norm > 0, "a number > 0",
                  'give a norm > 0, float("inf") to measure without clipping, or None')


def _checked_losses(losses: object, reduction: str) -> int:
    losses = whole_number("losses", losses, "it is the number of losses that forward_fn returns")
    if losses > 1 and reduction != "mean":
        raise ValueError(f'got losses={losses} with reduction={reduction!r}, which divides none of them; give '
                         'reduction="mean"')
    return losses


def _checked_noise_scale(
    name: str, noise_scale: object, reduction: str, losses: int,
) -> Optional[GradientNoiseScale]:
    if noise_scale is None:
        return None
    if losses > 1:
        raise ValueError(f"got {name} with losses={losses}: a microbatch has a weight for each; give one loss")
    if reduction != "mean":
        raise ValueError(f'got {name} with reduction={reduction!r}, which does not tell how many samples a gradient '
                         'stands for; give reduction="mean" and the number of samples as weight')
    return instance_of("noise_scale", noise_scale, GradientNoiseScale, "a GradientNoiseScale, or None")


def _buffer_dtype(buffer_dtype: Optional[ms.Type], parameter_dtype: ms.Type) -> ms.Type:
    if buffer_dtype is None:
        return ms.float32 if parameter_dtype in (ms.float16, ms.bfloat16) else parameter_dtype
    if buffer_dtype not in FLOATS:
        raise ValueError(f"buffer_dtype is {buffer_dtype}, expected a float dtype such as ms.float32, or None")
    return buffer_dtype
