"""The accumulator: one buffer for each parameter, filled by microbatches and emptied by an update."""
from __future__ import annotations

from collections.abc import Callable
from itertools import count
from math import inf
from numbers import Real
from sys import float_info
from typing import Optional
from weakref import WeakKeyDictionary, ref

import mindspore as ms
from mindspore import Parameter, ParameterTuple, Tensor, amp, nn, ops
from mindspore.ops import constexpr

from .batch_size.noise_scale import GradientNoiseScale, Spread
from .distributed.buckets import Layout
from .distributed.ranks import require_alike
from .distributed.reducers import DataParallel, OneDevice
from .gradients import (
    FLOATS,
    Gradients,
    Scalar,
    all_finite,
    as_weight,
    clip_factor,
    global_norm,
    require_condition,
    require_gradients,
    scaled,
    unscaled,
)
from .optimizers import checked_parameters, describe, name_state, state_of
from .state import empty_parameter
from .window import AccumulateStep, Window

_REDUCTIONS = ("sum", "mean")
_ON_NONFINITE = ("apply", "skip_microbatch", "skip_window")
_multiply_no_nan = ops.MulNoNan()
_instances = count()
_unscaled_by: WeakKeyDictionary[amp.LossScaler, ref] = WeakKeyDictionary()


def _nobody() -> None:
    return None


class _Unit:
    """What the buffers of an accumulator count in.

    Attributes:
        parameter: The unit on the device, 0 until there is one.
        number: The same as a constant of the compiled graphs; 0 where only the device knows it, None until a graph needs it.
    """

    def __init__(self, parameter: Parameter) -> None:
        self.parameter = parameter
        self.number: Optional[float] = None


_units: dict[str, _Unit] = {}


@constexpr
def unit_of(prefix: str, weight: Optional[float]) -> float:
    """The unit of the accumulator whose state is named after `prefix`; 0 if only the device knows it.

    A `constexpr`: graph mode runs it while it compiles, so that a weight divided by it is a constant of the graph, too. The first call
    decides, by what a checkpoint brought or by `weight`.

    Args:
        prefix: As the accumulator's.
        weight: A weight, or None for one that is a Tensor.
    """
    unit = _units[prefix]
    if unit.number is None and weight != 0:
        unit.number = float(unit.parameter.asnumpy()) or weight or 0.0
    return unit.number or 0.0


@ms.jit_class
class Accumulator:
    """Adds up the gradients of microbatches and updates once per window; inside `ms.jit` and in PyNative.

        buffer += weight * gradient                              # every microbatch
        gradient = buffer                                        # reduction="sum", at the boundary
                 = buffer / sum of the weights                   # reduction="mean", at the boundary
        gradient *= min(1, clip_norm / (norm(gradient) + 1e-6))  # if clip_norm is given
        optimizer(gradient); buffer = 0

    A drop-in for the class of MindSpore's gradient accumulation tutorial, with half its memory. With "sum" (the
    tutorial's contract) the script divides its loss by `accumulate_step`. With "mean", mean losses and the number of
    samples (or unmasked tokens) as weights, the update is that of the undivided batch, also for ragged microbatches
    and a short last window.

    With "mean", a buffer holds the sum of weight / unit * gradient, and is multiplied by unit / sum of the weights at the
    boundary. The unit is the first weight that is not 0; it stays the same for the life of the accumulator. So microbatches of
    equal weight are added as they are, without a multiplication, and a window of one of them gives the optimizer the very
    bits of its gradient.

    Args:
        optimizer: A MindSpore optimizer of float parameters, none of them frozen (`requires_grad=False`) or without elements,
            and without a `loss_scale` of its own (give a `loss_scaler` to the train step).
            Gradients come in the order of `optimizer.parameters`. State that it names like another accumulator's living
            optimizer (`global_step`) is renamed, so that both fit into one graph.
        accumulate_step: Microbatches in a window: an int, `{update_step: n}` or a callable; see `window.Window`.
        clip_norm: Largest global norm (> 0) of the accumulated, normalised gradient. `float("inf")` measures
            `grad_norm` and clips nothing; None computes no norm.
        reduction: "sum" or "mean".
        buffer_dtype: dtype of the buffers. None: the parameter's own, but float32 for float16 and bfloat16. A float16 buffer overflows
            where the sum of weight / first weight * gradient exceeds 65504.
        on_nonfinite: What NaN and infinity do. "apply": nothing special. "skip_microbatch": that microbatch adds nothing
            and the window stays open for another one (`optax.skip_not_finite`). "skip_window": the window is dropped
            when it closes, the optimizer untouched. See `gradients.all_finite` for what counts as finite.
        reducer: A `DataParallel`, which makes the ranks of a run started with `msrun` update as one. None: one device.
        after_update: Called without arguments after each update, never for a microbatch or a window that is skipped; for a moving average
            of the weights, say. Part of the graph in graph mode, so it has to work on Parameters. If it is a Cell or a
            method of one, the Cell's Parameters are state of the accumulator; those of other hooks no checkpoint knows.
        noise_scale: A `GradientNoiseScale`, which then measures what the windows say about the batch size that is worth it, for one norm
            at each microbatch. With `reduction="mean"` only.

    Attributes:
        mini_step: Microbatches in the open window: int32 Parameter of shape `()`.
        update_step: Updates done: int32 Parameter of shape `()`.
        buffer_dtypes: dtype of each parameter's accumulated gradient.
        skipped: Microbatches or windows skipped by `on_nonfinite` or a loss scaler: int32 Parameter of shape `()`.
        grad_norm: Norm of the last update's gradient before clipping: float32 Parameter of shape `()`; stays 0 while
            `clip_norm` is None.
        weight_sum: Sum of the weights in the open window, with `reduction="mean"`: float32 Parameter of shape `()`.
        weight_unit: What the buffers count in: the first weight that was not 0, float32 Parameter of shape `()`.
        unfinished: Not 0 while pieces of a batch are being added, or if an error stopped them (then call `reset`): int32 Parameter of
            shape `()`.
        window_weight: The same as `weight_sum`, of the last window that was closed. On several ranks `weight_sum` and
            `window_weight` are of this rank, or of all of them where
            gradients are exchanged at each microbatch.
        parameters: ParameterTuple of all state, for checkpoints. Names are unique in the process and the same
            in the next process that builds its accumulators in the same order.

    Raises:
        TypeError: If an argument is of the wrong kind.
        ValueError: If an argument is out of range.

    Source: the tutorial's class (https://www.mindspore.cn/tutorials/experts/en/r2.2/optimize/gradient_accumulation.html); schedules
    and skipping are those of `optax.MultiSteps`; the clip factor is that of `torch.nn.utils.clip_grad_norm_`.

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
        reducer: Optional[DataParallel] = None,
        after_update: Optional[Callable] = None,
        noise_scale: Optional[GradientNoiseScale] = None,
    ) -> None:
        parameters = checked_parameters(optimizer)
        self.optimizer = optimizer
        self.window = Window(accumulate_step)
        self.clip_norm = _checked_clip_norm(clip_norm)
        self.reduction = _one_of("reduction", reduction, _REDUCTIONS)
        self.on_nonfinite = _one_of("on_nonfinite", on_nonfinite, _ON_NONFINITE)
        self.after_update = _checked_hook(after_update)
        self.noise_scale = _checked_noise_scale(noise_scale, reduction)
        self.loss_scaler = None
        self.guarded = False  # whether a driver notes in `unfinished` that the pieces of a batch are being added
        self.accumulate_step = accumulate_step
        self._names = tuple(p.name for p in parameters)
        self._shapes = tuple(tuple(p.shape) for p in parameters)
        self._dtypes = tuple(p.dtype for p in parameters)

        self.buffer_dtypes = tuple(_buffer_dtype(buffer_dtype, p.dtype) for p in parameters)
        settings = {"accumulate_step": self.window.describe(), "clip_norm": repr(self.clip_norm), "reduction": reduction,
                    "on_nonfinite": on_nonfinite, "noise_scale": "None" if noise_scale is None else f"decay {noise_scale.decay}",
                    "the optimizer, its learning rate or state": describe(optimizer)}
        layout = Layout(parameters, self.buffer_dtypes, on_nonfinite == "skip_microbatch", settings)
        self.reducer = OneDevice(layout) if reducer is None else _checked_reducer(reducer).bind(layout)
        self._prefix = prefix = f"accumulator{next(_instances)}"
        name_state(optimizer, prefix)
        self.buffers = ParameterTuple(self.reducer.new_buffers(prefix))
        self.weight_sum = empty_parameter(f"{prefix}.weight_sum", (), ms.float32)
        self.weight_unit = empty_parameter(f"{prefix}.weight_unit", (), ms.float32)
        self._in_unit = reduction == "mean" and not self.reducer.sums_microbatches
        _units[prefix] = _Unit(self.weight_unit)
        self.mini_step = empty_parameter(f"{prefix}.mini_step", (), ms.int32)
        self.unfinished = empty_parameter(f"{prefix}.unfinished", (), ms.int32)
        self.update_step = empty_parameter(f"{prefix}.update_step", (), ms.int32)
        self.skipped = empty_parameter(f"{prefix}.skipped", (), ms.int32)
        self.grad_norm = empty_parameter(f"{prefix}.grad_norm", (), ms.float32)
        self.window_weight = empty_parameter(f"{prefix}.window_weight", (), ms.float32)
        self.parameters = ParameterTuple(
            [*self.buffers, self.weight_sum, self.weight_unit, self.mini_step, self.unfinished, self.update_step, self.skipped,
             self.grad_norm, self.window_weight,
             *_state_of(after_update, optimizer, parameters)])
        if noise_scale is not None:
            noise_scale.bind(prefix)
            self.parameters = ParameterTuple([*self.parameters, noise_scale.window, noise_scale.totals])

    def __call__(self, grads: Gradients, weight: Scalar = 1.0) -> Tensor:
        """Add one microbatch and, if it closes the window, update.

        Args:
            grads: A gradient for each of `optimizer.parameters`, in their order and shapes.
            weight: What the microbatch counts: a number >= 0 or a Tensor of shape `()`.

        Returns:
            Whether this microbatch closed the window: bool Tensor of shape `()`.

        Raises:
            TypeError, ValueError: If `grads` or `weight` do not fit (in graph mode: when the graph is compiled).
                Nothing is changed then.
        """
        self.add(grads, weight)
        return self.close_if(self.due())

    def add(self, grads: Gradients, weight: Scalar = 1.0) -> None:
        """Add one microbatch to the open window; never updates. Arguments and errors as in a call, `close_if` to go on."""
        self._require(grads)
        weight = as_weight(weight)
        ops.assign_add(self.mini_step, self.take(grads, weight, weight))

    def take(self, grads: Gradients, factor: Scalar, weight: Scalar) -> Tensor:
        """Add `factor * grads` and count `weight`; leave `mini_step` alone.

        For code that cuts a microbatch further, such as `make_train_step`. A microbatch of weight 0 is ignored, even if its
        gradient is NaN, as that of a mean over no unmasked token is.

        Args:
            grads: As in `add`, unchecked.
            factor: What the gradients are multiplied by, as from `gradients.as_weight`; of a mean loss, `weight`.
            weight: What is counted, as from `gradients.as_weight`.

        Returns:
            Whether they were taken: int32 Tensor of shape `()`, 1 unless `on_nonfinite="skip_microbatch"` made it 0.
        """
        taken, present = self._take(grads, factor, weight, 1.0)
        return ops.depend(taken, present)  # uses what nobody needs, or MindSpore warns of "side effect nodes eliminated by mistake"

    def due(self) -> Tensor:
        """Whether the open window holds all its microbatches: bool Tensor of shape `()`."""
        return self.mini_step >= self.window.length(self.update_step)

    def close_if(self, condition: Tensor) -> Tensor:
        """Close the window by your own rule: update if `condition`, a bool Tensor of shape `()`, is true.

        Inside `ms.jit`, prefer it to an `if` of your own around `apply`: graph mode silently drops a branch that
        nothing depends on, as in `if done: acc.apply()` before `return done`.

        Returns:
            Whether a window with microbatches in it was closed: bool Tensor of shape `()`.

        Raises:
            TypeError: If `condition` is no Tensor and no bool.
            ValueError: If it is a Tensor of more than one element.
        """
        require_condition(isinstance(condition, bool), condition.shape if isinstance(condition, Tensor) else None)
        mini_step = self.mini_step + 0
        if condition:
            self.apply()
        return self.mini_step < mini_step  # from the state after the branch, which keeps the branch

    def apply(self) -> None:
        """Close the window now, whatever it holds: reduce, normalise, clip, optimizer, reset.

        Of an empty window the gradient is zero, and the optimizer runs on it; `flush` is the form that asks first.
        """
        self._close(1.0)

    def flush(self) -> Tensor:
        """Close a short window, if one is open: with "mean" it is divided by the weights that are really in it.

        With several ranks, each has to call it, and it returns when all have: a rank that has more microbatches goes on, and this
        one takes part in its windows with weight 0.

        Returns:
            Whether a window was closed: bool Tensor of shape `()`.
        """
        windows = self._windows()
        others = 1.0
        if self.reducer.each_microbatch:
            while others > 0:
                # Of weight 0, any tensors of the right shapes count nothing.
                taken, others = self._take(self.optimizer.parameters, 0.0, 0.0, 0.0)
                ops.assign_add(self.mini_step, taken * (others > 0))
                self.close_if(ops.logical_or(self.due(), ops.logical_and(others == 0, self.mini_step > 0)))
        else:
            while others > 0:
                others = self._close(0.0)
        return self._windows() > windows  # from the state after the branches, which keeps them

    def reset(self) -> None:
        """Forget the open window, also after an error: empty the buffers and `mini_step`; the counts of the past stay."""
        ops.assign(self.mini_step, 0)
        if self.guarded:
            ops.assign(self.unfinished, 0)
        ops.assign(self.weight_sum, 0.0)
        for buffer in self.buffers:
            # buffer * 0, where NaN * 0 is 0. Of 258 MB of buffers, graph mode keeps a second copy for zeros_like(buffer)
            # (a constant) and for a broadcast 0 (all at once, and 3 x slower); this takes two temporary parameters.
            ops.assign(buffer, _multiply_no_nan(buffer, self.weight_sum.astype(buffer.dtype)))
        if self.noise_scale is not None:
            self.noise_scale.forget_window()

    def require_whole(self) -> None:
        """Raise RuntimeError if the open window holds a part of a batch, because of an error in a later piece of it. For the host."""
        if int(self.unfinished) != 0:
            raise RuntimeError("the open window may hold only some pieces of a batch, because an error stopped the others; expected "
                               "whole batches: call accumulator.reset(), which drops the open window, and go on with the next batch")

    def unscale_by(self, loss_scaler: amp.LossScaler) -> None:
        """Expect gradients of losses multiplied by `loss_scaler.scale_value`; for drivers, which multiply them.

        When a window closes, the accumulated gradient is divided by the scale, before anything is measured, averaged or clipped. Then the
        scaler is adjusted, also once: if a gradient of the window overflowed, the window is dropped and counted in `skipped`. The
        scaler's Parameters become state of the accumulator, under its names.

        Args:
            loss_scaler: A `mindspore.amp.StaticLossScaler`, `DynamicLossScaler` or other `LossScaler` with a `scale_value`.

        Raises:
            TypeError: If it is no such loss scaler.
            ValueError: If its scale is no finite number > 0, there is another one already, it is another accumulator's, a window is
                open, ranks give different ones, or `on_nonfinite` is "skip_microbatch": an overflowing microbatch would be skipped, and
                skipped again, because the scale only changes when a window closes.
        """
        if not isinstance(loss_scaler, amp.LossScaler) or not isinstance(getattr(loss_scaler, "scale_value", None), Tensor):
            raise TypeError(f"loss_scaler is of type {type(loss_scaler).__name__}, expected a mindspore.amp.LossScaler; "
                            "give e.g. amp.DynamicLossScaler(2**16, 2, 1000)")
        if self.loss_scaler is loss_scaler:
            return
        if self.loss_scaler is not None:
            raise ValueError("the accumulator already has another loss_scaler, whose scale its buffers carry; give that one")
        if _unscaled_by.get(loss_scaler, _nobody)() is not None:
            raise ValueError("the loss_scaler is another accumulator's, which would adjust it in the middle of this one's windows; "
                             "give each accumulator its own")
        if int(self.mini_step) > 0:
            raise ValueError("there are gradients without a loss scale in the open window; give the loss_scaler before, or reset()")
        if self.reducer.ranks > 1:
            require_alike({"the loss_scaler": repr([type(loss_scaler).__name__, *map(_value, vars(loss_scaler).values())])},
                          "give every rank the same one")
        require_scale(loss_scaler.scale_value)
        if self.on_nonfinite == "skip_microbatch":
            raise ValueError('loss_scaler with on_nonfinite="skip_microbatch": the scale only changes when a window closes, so that an '
                             'overflowing microbatch would be skipped for ever; give "apply" or "skip_window", which both drop the window')
        self.loss_scaler = loss_scaler
        _unscaled_by[loss_scaler] = ref(self)
        state = {name: value for name, value in vars(loss_scaler).items() if isinstance(value, Parameter)}
        for name, parameter in state.items():
            # In one graph, the Parameters of two scalers would have the same names.
            parameter.name = f"{self._prefix}.loss_scaler.{name}"
        self.parameters = ParameterTuple([*self.parameters, *state.values()])

    def _require(self, grads: Gradients) -> None:
        if isinstance(grads, (tuple, list)):
            shapes = tuple([g.shape if isinstance(g, Tensor) else None for g in grads])
            dtypes = tuple([g.dtype if isinstance(g, Tensor) else None for g in grads])
            require_gradients(self._names, self._shapes, shapes, dtypes)
        else:
            require_gradients(self._names, self._shapes, None, ())

    def _take(self, grads: Gradients, factor: Scalar, weight: Scalar, present: float) -> tuple[Tensor, Scalar]:
        """Add a microbatch of all ranks: whether it was taken (int32 0 or 1), and how many ranks had one (`present`: 1 of this one)."""
        # Before the exchange: afterwards, these are gradients of all ranks together.
        spread = () if self.noise_scale is None else self.noise_scale.measure(self._unscaled(grads), weight)
        unit = self._unit(factor)
        gradients = tuple([scaled(g, factor / unit, dtype) for g, dtype in zip(grads, self.buffer_dtypes)])
        bad = 0.0
        if self.on_nonfinite == "skip_microbatch":
            bad = ops.logical_and(ops.logical_not(all_finite(gradients)), weight != 0).astype(ms.float32)
        gradients, header = self.reducer.microbatch(gradients, (weight, bad, present, *spread))
        weight, bad, present = header[:3]
        if self.on_nonfinite == "skip_microbatch":
            taken = (bad == 0).astype(ms.int32)
            ops.assign_add(self.skipped, 1 - taken)
            if ops.logical_and(taken > 0, weight != 0):
                self._store(gradients, unit, weight, header[3:])
            return taken, present
        if weight != 0:
            self._store(gradients, unit, weight, header[3:])
        return Tensor(1, ms.int32), present

    def _unit(self, factor: Scalar) -> Scalar:
        """What the buffers count in: a number, so that a number divided by it is a constant of the graph, unless the device decides."""
        if not self._in_unit:
            return 1.0
        unit = unit_of(self._prefix, None if isinstance(factor, Tensor) else factor)
        if unit == 0:
            # The first weight is known to the device alone.
            first = factor * ops.ones_like(self.weight_unit)
            unit = ops.where(ops.logical_and(self.weight_unit == 0, ops.isfinite(first)), first, self.weight_unit)
        return unit

    def settle_unit(self) -> None:
        """Bring buffers that were loaded into the unit that compiled graphs of this process count in; for `load_checkpoint`."""
        unit, loaded = _units[self._prefix].number, float(self.weight_unit)
        if unit and loaded and unit != loaded:
            for buffer in self.buffers:
                ops.assign(buffer, scaled(buffer, loaded / unit, buffer.dtype))
            ops.assign(self.weight_unit, unit)

    def _unscaled(self, gradients: Gradients) -> Gradients:
        return gradients if self.loss_scaler is None else unscaled(gradients, self.loss_scaler.scale_value)

    def _close(self, asked: float) -> Scalar:
        """Close the window of all ranks if one of them asked for it or there is anything in it; how many ranks asked."""
        spread = () if self.noise_scale is None else self.noise_scale.open_window()
        unit = self.weight_unit + 0.0 if self._in_unit else 1.0
        gradients, unit, header = self.reducer.window(self.buffers, unit, (self.weight_sum, self.mini_step, asked, *spread))
        weight, microbatches, asked = header[:3]
        if asked > 0 or microbatches > 0:
            # First of all: norms and sums of scaled gradients would overflow where the gradients themselves do not.
            gradients = self._unscaled(gradients)
            if self.on_nonfinite == "skip_window" or self.loss_scaler is not None:
                self._update_finite(gradients, unit, weight, header[3:])
            else:
                self._update(gradients, unit, weight, header[3:])
            ops.assign(self.window_weight, self.weight_sum)
        self.reset()
        return asked

    def _windows(self) -> Tensor:
        return self.update_step + self.skipped if self.on_nonfinite != "skip_microbatch" else self.update_step + 0

    def _store(self, weighted_grads: Gradients, unit: Scalar, weight: Scalar, spread: Spread) -> None:
        for buffer, gradient in zip(self.buffers, weighted_grads):
            _add_to(buffer, gradient.astype(buffer.dtype))
        if self.reduction == "mean":
            ops.assign_add(self.weight_sum, weight)
        if self._in_unit:
            ops.assign(self.weight_unit, unit)
        if self.noise_scale is not None:
            self.noise_scale.include(spread)

    def _update_finite(self, gradients: Gradients, unit: Scalar, weight: Tensor, spread: Spread) -> None:
        finite = all_finite(gradients)
        ops.assign_add(self.skipped, ops.logical_not(finite).astype(ms.int32))
        if finite:
            self._update(gradients, unit, weight, spread)
        if self.loss_scaler is not None:
            self.loss_scaler.adjust(finite)

    def _update(self, gradients: Gradients, unit: Scalar, weight: Tensor, spread: Spread) -> None:
        factor = self._normaliser(unit, weight)
        if self.clip_norm is not None or self.noise_scale is not None:
            norm = global_norm(gradients) * abs(factor)  # negative weights can make the factor negative
        if self.noise_scale is not None:
            self.noise_scale.conclude(spread, weight, norm)
        if self.clip_norm is not None:
            ops.assign(self.grad_norm, norm)
            factor = factor * clip_factor(norm, self.clip_norm)
        self.optimizer(tuple([scaled(g, factor, dtype) for g, dtype in zip(gradients, self._dtypes)]))
        ops.assign_add(self.update_step, 1)
        if self.after_update is not None:
            self.after_update()

    def _normaliser(self, unit: Scalar, weight: Tensor) -> Scalar:
        if self.reduction == "sum":
            return 1.0 / self.reducer.ranks
        # A window without weight (every token masked) has the gradient 0, not 0/0.
        return unit / ops.where(weight == 0, Tensor(1.0, ms.float32), weight)


def _add_to(buffer: Parameter, gradient: Tensor) -> None:
    if buffer.dtype in (ms.float16, ms.bfloat16):
        # MindSpore 2.10 on CPU: of two float16 AssignAdd on one Parameter in one graph, the first is lost.
        ops.assign(buffer, buffer + gradient)
    else:
        ops.assign_add(buffer, gradient)


def require_scale(scale: Tensor) -> None:
    """Refuse a loss scale that gradients cannot be divided by; MindSpore's own scalers let NaN and infinity through."""
    value = scale.asnumpy().astype(float)
    if value.size != 1 or not 0 < value.item() < inf:
        raise ValueError(f"the loss scale is {value}, expected one finite number > 0; give e.g. amp.DynamicLossScaler(2**16, 2, 1000)")


def _checked_hook(after_update: object) -> Optional[Callable]:
    if after_update is not None and not callable(after_update):
        raise TypeError(f"after_update is of type {type(after_update).__name__}, expected a function without arguments or a Cell")
    return after_update


def _state_of(after_update: Optional[Callable], optimizer: Callable, parameters: tuple[Parameter, ...]) -> list[Parameter]:
    """The Parameters of a hook that is a Cell or a method of one, but for the network's and the optimizer's."""
    cell = getattr(after_update, "__self__", after_update)
    if not isinstance(cell, nn.Cell):
        return []
    others = {id(p) for p in (*parameters, *(p for _, p in state_of(optimizer)))}
    return [p for p in cell.get_parameters() if id(p) not in others]


def _value(value: object) -> object:
    return value.asnumpy().tolist() if isinstance(value, Tensor) else value


def _checked_clip_norm(clip_norm: object) -> Optional[float]:
    remedy = 'give a norm > 0, float("inf") to measure without clipping, or None'
    if clip_norm is None:
        return None
    if isinstance(clip_norm, bool) or not isinstance(clip_norm, Real):
        raise TypeError(f"clip_norm is {clip_norm!r} of type {type(clip_norm).__name__}, expected a number; {remedy}")
    if not clip_norm > 0:
        raise ValueError(f"clip_norm is {clip_norm}, expected a number > 0; {remedy}")
    return float(clip_norm) if clip_norm <= float_info.max else inf


def _one_of(name: str, value: object, choices: tuple[str, ...]) -> str:
    if not isinstance(value, str) or value not in choices:
        raise ValueError(f"{name} is {value!r}, expected one of {', '.join(map(repr, choices))}")
    return value


def _checked_reducer(reducer: object) -> DataParallel:
    if not isinstance(reducer, DataParallel):
        raise TypeError(f"reducer is of type {type(reducer).__name__}, expected a DataParallel, or None for one device; "
                        "give e.g. DataParallel()")
    return reducer


def _checked_noise_scale(noise_scale: object, reduction: str) -> Optional[GradientNoiseScale]:
    if noise_scale is not None and not isinstance(noise_scale, GradientNoiseScale):
        raise TypeError(f"noise_scale is of type {type(noise_scale).__name__}, expected a GradientNoiseScale, or None; "
                        "give GradientNoiseScale()")
    if noise_scale is not None and reduction != "mean":
        raise ValueError(f'noise_scale with reduction={reduction!r}: only with "mean" is it known how many samples a gradient stands '
                         'for; give reduction="mean" and the number of samples as weight')
    return noise_scale


def _buffer_dtype(buffer_dtype: Optional[ms.Type], parameter_dtype: ms.Type) -> ms.Type:
    if buffer_dtype is None:
        return ms.float32 if parameter_dtype in (ms.float16, ms.bfloat16) else parameter_dtype
    if buffer_dtype not in FLOATS:
        raise ValueError(f"buffer_dtype is {buffer_dtype}, expected a float dtype such as ms.float32, or None")
    return buffer_dtype
