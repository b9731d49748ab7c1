"""The accumulator: one buffer for each parameter, filled by microbatches and emptied by an update."""
from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import TYPE_CHECKING, NamedTuple, Optional

import mindspore as ms
from mindspore import Parameter, ParameterTuple, Tensor, amp, nn, ops

from ..arguments import Uncopied, instance_of, number, one_of, spelled
from ..distributed.buckets import Accumulated
from ..distributed.data_parallel import DataParallel
from ..distributed.exchange import OneDevice
from ..distributed.parallel_modes import may_shard, require_whole_gradients, warn_if_alone
from ..distributed.slices import Slices
from ..distributed.zero import slices_among, whole_parameters
from ..tensors import as_weight, require_condition
from .buffers import Buffers, buffer_dtype_of, warn_of_lost_gradients
from .counters import Counters, Journal
from .elementwise import require_divisible
from .keeper import Keeper
from .length import length_of
from .lost_window import watched
from .optimizers import INSTANCE, cell_prefix, checked_parameters, describe, name_state, state_of
from .probe import kernels
from .stages import bound, checked_loss_scaler, checked_nonfinite, checked_stages, needing_whole_gradients, stages_of
from .way import Way, note_closed, note_filled

if TYPE_CHECKING:
    from ..tensors import Gradients, Scalar
    from .length import AccumulateStep, WindowLength
    from .stages import Stage

REDUCTIONS = ("sum", "mean")
_instances = count()


class Status(NamedTuple):
    """Where an accumulator stands; see `Accumulator` for what each number means."""

    update_step: int
    mini_step: int
    needed: int  # microbatches that the open window still needs, at least
    seen: int
    skipped: int
    closed_windows: int
    window_weight: float
    grad_norm: float


@ms.jit_class
class Accumulator(Uncopied):
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
            elements, and without a `loss_scale` of its own. Gradients come in the order of `optimizer.parameters`;
            if these are slices (see `shard_parameters`), they are those of the whole parameters, `weights`.
            State with the same name as that of another accumulator's optimizer (`global_step`) is renamed, so that
            both fit into one graph.
        accumulate_step: Microbatches in a window: an int; `{update_step: n}`, piecewise constant, with the key 0; or a
            function of the update count (int32 Tensor of shape `()`) that graph mode can compile and that returns an
            int or an integer Tensor >= 1. A window keeps its length from its first microbatch to its last. Or
            `until_weight(budget)`: a window closes with the microbatch that brings its weight to the budget.
        clip_norm: Largest global norm (> 0) of the accumulated, normalised gradient. `float("inf")` measures
            `grad_norm` and clips nothing; None computes no norm. Norms above 8e12 count as infinite.
        reduction: "sum" or "mean".
        buffer_dtype: dtype of the buffers. None: the parameter's own, but float32 for float16 and bfloat16. A float16
            buffer overflows if the sum of weight * gradient exceeds 65504; a train step or a cell divides the weights
            by the samples of its first piece, except with `loss_reduction="sum"`. In long windows, 16-bit buffers stop
            growing without an overflow: with gradients of one sign, the update is 0.04 % too small after 1,000
            microbatches in float16, 24 % after 5,000 and 60 % after 10,000; in bfloat16 50 % after 1,000 and 95 % after
            10,000. Windows that may hold more than 512 (bfloat16: 64) are warned of.
        on_nonfinite: What to do with NaN and infinity. "apply": apply them like other values. "skip_microbatch": give
            the microbatch (in pieces: the piece) the weight 0, and do not count a microbatch of which nothing is left
            (a piece whose own weight is 0 counts as left), so that the window stays open for another one
            (`optax.skip_not_finite`). "skip_window": drop the window when it closes, without an update. A gradient is
            finite if the sum of its elements is.
        max_skips: How many windows ("skip_microbatch": microbatches or pieces of this rank) may be skipped one after
            the other; after one more, a RuntimeError: in a train step or `flush` at the end of a window, in a cell at
            once, by hand in `require_progress()`, for a graph cannot raise it. None: no limit.
        reducer: A `DataParallel`, which makes the ranks of a run started with `msrun` update as one. None: one device.
        after_update: A function without arguments that is called after each update, never for what is skipped; for a
            moving average of the weights, say. In graph mode it is part of the graph: it has to change Parameters, and
            what it does in Python alone never runs. The Parameters of a Cell, or of a Cell whose method it is, are
            state of the accumulator; those of other functions are not saved in checkpoints.
        noise_scale: A `ms_accum.batch_size.GradientNoiseScale`, which measures up to which batch size more samples
            help. It costs one norm per microbatch. The weights have to be numbers of samples or tokens.
        stages: Stages of your own, a tuple of `ms_accum.Stage`: see there.
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
        seen: Sum of the weights in all updates of all ranks, rounded: samples, or what `weight_fn` counts, tokens for
            example: int64 Parameter of shape `()`. The remainder is kept in units of 2**-36, so rounding errors do not
            add up; the weights of one window are summed in float32.
        grad_norm: Norm of the last update's gradient before clipping: float32 Parameter of shape `()`. NaN until it has
            been measured, and always without `clip_norm`.
        weight_sum: Sum of the weights in the open window: float32 Parameter of shape `()`.
        window_weight: `weight_sum` of the last window that was closed. On several ranks, both are those of this rank,
            or of the ranks that exchange each microbatch.
        parameters: ParameterTuple of all state. Names are unique in the process.
        weights: The parameters that gradients are for, in the optimizer's order: ParameterTuple.
        optimizer, noise_scale, loss_scaler: As given.
        exchange: What the reducer became: `exchange.rank` of `exchange.ranks`.

    Steps, cells and checkpoints also use `way`, which is what gradients go through (see `Way`); `looks_at_pieces`,
    whether each piece counts by itself; `state`, all state by its names in a checkpoint; and `fingerprint()`.

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
        optimizer: nn.Optimizer,
        accumulate_step: AccumulateStep,
        clip_norm: Optional[float] = None,
        *,
        reduction: str = "sum",
        buffer_dtype: Optional[ms.Type] = None,
        on_nonfinite: str = "apply",
        max_skips: Optional[int] = None,
        reducer: Optional[DataParallel] = None,
        after_update: Optional[Callable] = None,
        noise_scale: Optional[Stage] = None,
        stages: tuple[Stage, ...] = (),
        loss_scaler: Optional[amp.LossScaler] = None,
    ) -> None:
        weights = whole_parameters(checked_parameters(optimizer))
        names, shapes, dtypes = zip(*((p.name, tuple(p.shape), p.dtype) for p in weights))
        clip_norm, after_update = checked_clip_norm(clip_norm), checked_hook(after_update)
        max_skips, stages = checked_nonfinite(on_nonfinite, loss_scaler, max_skips), checked_stages(stages, noise_scale)
        one_of("reduction", reduction, REDUCTIONS)
        length = _warned_length(accumulate_step, buffer_dtype)
        self._settings = {"accumulate_step": length.description, "clip_norm": repr(clip_norm), "reduction": reduction,
                          "on_nonfinite": on_nonfinite, "noise_scale": repr(noise_scale)}
        layout = Accumulated(weights, tuple(buffer_dtype_of(buffer_dtype, dtype) for dtype in dtypes),
                             dict(self._settings), slices_among(optimizer.parameters))
        self.exchange = exchange = _exchange_of(reducer, optimizer, layout, needing_whole_gradients(
            clip_norm=clip_norm, on_nonfinite=on_nonfinite, loss_scaler=loss_scaler, noise_scale=noise_scale,
            stages=stages), stages if noise_scale is None else (*stages, noise_scale))
        self._settings["reducer"] = exchange.describe()
        self.optimizer, self.noise_scale, self.loss_scaler = optimizer, noise_scale, checked_loss_scaler(
            loss_scaler, exchange.ranks)
        prefix = f"accumulator{next(_instances)}"
        name_state(optimizer, prefix)
        length.share(exchange.inside)
        counters = watched(Counters(prefix, max_skips), self, f"{type(optimizer).__name__} of {names[0]}")
        own = exchange.ranks == 1 and loss_scaler is None and not stages  # buffers, not copies, reach the optimizer
        stages = bound(stages_of(loss_scaler, on_nonfinite, noise_scale, stages, counters, self), prefix, exchange,
                       counters)
        self.way = Way((names, shapes), optimizer, dtypes, length, stages, exchange,
                       Buffers(prefix, exchange.buffers(prefix), layout.dtypes, exchange.shared_unit), counters,
                       Journal(prefix), (kernels(own), kernels(False)), None if reduction == "mean" else exchange.ranks,
                       clip_norm, () if after_update is None else (after_update,))
        self._kept = (*counters.run_state, *_state_of_hook(after_update, optimizer),
                      *(p for stage in stages for p in stage.run_state))
        self._publish(counters)

    def _publish(self, counters: Counters) -> None:
        """Offer what others may read."""
        way = self.way
        self.weights = way.weights
        self.looks_at_pieces = way.exchange.inside > 1 or way.length.budget is not None or way.looks_at_gradients
        self.mini_step, self.update_step, self.seen = counters.mini_step, counters.update_step, counters.seen
        self.closed_windows, self.weight_sum = counters.closed_windows, counters.weight_sum
        self.skipped, self.skipped_in_row = counters.skipped, counters.skipped_in_row
        self.window_weight, self.grad_norm = counters.window_weight, counters.grad_norm

    # --- by hand ------------------------------------------------------------------------------------------------------

    def __call__(self, grads: Gradients, weight: Scalar = 1.0) -> Tensor:
        """Add one microbatch and, if it closes the window, update.

        Args:
            grads: A gradient for each of `weights`, in their order and shapes.
            weight: A number >= 0 or a Tensor of shape `()`. With 0, the microbatch counts, but its gradient is ignored.
                A negative or infinite Tensor counts as NaN, which makes the accumulated gradient NaN.

        Returns:
            Whether this microbatch closed the window: bool Tensor of shape `()`.

        Raises:
            TypeError, ValueError: If `grads` or `weight` do not fit (in graph mode: when the graph is compiled). The
                state is unchanged then.
            RuntimeError: If a train step or a cell fills this accumulator (in graph mode: when the graph is compiled).
        """
        self.add(grads, weight)
        return self.close_if(self.way.is_full())

    def add(self, grads: Gradients, weight: Scalar = 1.0) -> None:
        """Add one microbatch to the open window, without an update. Arguments and errors as in a call."""
        note_filled(self.way.number, self.way.is_driven)
        self.way.add_unmarked(grads, as_weight(weight))

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

    def apply(self) -> None:
        """Close the window now, whatever it holds: exchange, normalise, clip, optimizer, clear.

        For an empty window, the optimizer runs on a gradient of zero; `flush` does nothing then.
        """
        note_closed(self.way.number)
        window = self.way.window()
        accepted = window[3]
        if accepted:
            self.way.update_with(window)
        else:
            self.way.close(False)

    def flush(self) -> bool:
        """Apply the incomplete window, if one is open, with "mean" divided by the weights that it holds. For the host.

        A train step has a `flush` of its own, which knows in how many pieces it adds. With several ranks, each has to
        call it, and it returns when all have: until then, this rank takes part with weight 0 in the windows of ranks
        that have more microbatches. Return whether a window was closed: applied, or dropped because it is not finite.
        RuntimeError if an error left a part of a batch in it, or stopped an update.
        """
        return Keeper(self).flush()[0]

    def reset(self) -> None:
        """Drop the open window, also after an error: set the buffers, `mini_step` and `weight_sum` to 0."""
        note_closed(self.way.number)
        self.way.journal.updating(self.mini_step)  # an interrupt may leave the buffers full
        self.way.empty()

    def scaled(self, loss: Tensor) -> Tensor:
        """Return what to differentiate: the loss, times the loss scale if there is one."""
        return self.way.scaled(loss)

    def require_progress(self) -> None:
        """Raise RuntimeError if more than `max_skips` were skipped in a row. For the host: it waits for the device."""
        Keeper(self).require_progress()

    def status(self) -> Status:
        """Return where the accumulator stands, in one read, which waits for the device."""
        numbers = ops.stack([p.astype(ms.float64) for p in (
            self.update_step, self.mini_step, self.way.is_full(), self.seen, self.skipped, self.closed_windows,
            self.window_weight, self.grad_norm)]).asnumpy().tolist()
        update_step, mini_step, full, *counts = map(int, numbers[:6])
        return Status(update_step, mini_step, self.way.length.missing(mini_step, update_step, bool(full)), *counts,
                      *numbers[6:])

    # --- for steps, cells and checkpoints -----------------------------------------------------------------------------

    @property
    def parameters(self) -> ParameterTuple:
        """All state. Names are unique in the process."""
        return ParameterTuple([*self.way.window_state, *self._kept])

    @property
    def state(self) -> dict[str, Parameter]:
        """All state by its name in a checkpoint, which is the same in the next process. Buffers that no window has
        needed yet are among it; they take no memory, and are 0.
        """
        return {INSTANCE.sub("", p.name).removeprefix(cell_prefix(self.optimizer)): p for p in self.parameters}

    def fingerprint(self) -> dict[str, str]:
        """Return what has to be equal in a run that resumes in the middle of a window."""
        return dict(self._settings)


def _exchange_of(reducer: Optional[DataParallel], optimizer: nn.Optimizer, layout: Accumulated,
                 features: tuple[str, ...], stages: tuple[Stage, ...]) -> OneDevice:
    if reducer is not None:
        reducer = instance_of("reducer", reducer, DataParallel, "a DataParallel, or None", "give e.g. DataParallel()")
        layout.settings["the optimizer, its learning rate or state"] = describe(optimizer)
        exchange = reducer.bind(layout)
        require_divisible(optimizer, stages, exchange.divides_parameters)
        return exchange
    if layout.slices:
        raise ValueError("the optimizer updates this rank's slices, but there is no reducer to gather them; give "
                         "reducer=DataParallel(zero=1), or the optimizer network.trainable_params()")
    warn_if_alone()
    if not may_shard():
        return OneDevice(layout)
    require_whole_gradients(features)
    return Slices(layout, features)


def _warned_length(accumulate_step: AccumulateStep, buffer_dtype: Optional[ms.Type]) -> WindowLength:
    """Return the length of windows. Warn if they are too long for the buffers."""
    length = length_of(accumulate_step)
    warn_of_lost_gradients(buffer_dtype, length.longest)
    return length


def checked_clip_norm(clip_norm: object) -> Optional[float]:
    """Return `clip_norm` as a float, or None. TypeError or ValueError if it is no number > 0."""
    if clip_norm is None:
        return None
    return number("clip_norm", clip_norm, lambda norm: norm > 0, "a number > 0",
                  'give a norm > 0, float("inf") to measure without clipping, or None')


def checked_hook(after_update: object) -> Optional[Callable]:
    """Return `after_update`. TypeError if it cannot be called."""
    if after_update is None:
        return None
    return instance_of("after_update", after_update, Callable, "a function without arguments, a Cell, or None")


def _state_of_hook(hook: Optional[Callable], optimizer: nn.Optimizer) -> tuple[Parameter, ...]:
    """Return the Parameters of a hook that is a Cell or a method of one, without the network's and the optimizer's."""
    cell = getattr(hook, "__self__", hook)
    if not isinstance(cell, nn.Cell):
        return ()
    updated = (*optimizer.parameters, *whole_parameters(optimizer.parameters))
    others = {id(p) for p in (*updated, *(p for _, p in state_of(optimizer)))}
    return tuple(p for p in cell.get_parameters() if id(p) not in others)
