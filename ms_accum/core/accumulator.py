"""The accumulator: one buffer for each parameter, filled by microbatches and emptied by an update."""
from __future__ import annotations

from typing import TYPE_CHECKING, Optional, TypedDict

import mindspore as ms
from mindspore import ParameterTuple, Tensor, amp, nn

from ..arguments import Uncopied, fix_options, instance_of, number, one_of
from ..distributed.buckets import AccumulatedParameters
from ..distributed.data_parallel import DataParallel
from ..distributed.exchange import OneDevice
from ..distributed.parallel_modes import require_unsharded, warn_if_alone
from ..distributed.zero import slices_among, whole_parameters
from ..mindspore_api import isconstant, jit_class
from ..tensors import as_weight, require_condition
from .boundary import Boundary, Status
from .facts import describe, short_text_of, text_of, texts_of_stages
from .length import length_of
from .notes import note_called, note_closed, note_filled
from .optimizers import checked_parameters, name_state, own_name, require_elementwise
from .precision import buffer_dtype_of, warn_of_lost_gradients
from .stages import (
    checked_loss_scaler,
    checked_nonfinite,
    checked_stages,
    require_scale,
    require_slices_suffice,
    stages_of,
)
from .window import Window

if TYPE_CHECKING:
    from mindspore import Parameter

    from ..tensors import Gradients, Scalar
    from .length import AccumulateStep, WindowLength
    from .stages import Stage

REDUCTIONS = ("sum", "mean")


class Options(TypedDict, total=False):
    """Name the options of `Accumulator` that train steps and cells pass on, with their types."""

    clip_norm: Optional[float]
    buffer_dtype: Optional[ms.Type]
    on_nonfinite: str
    max_skips: int
    reducer: Optional[DataParallel]
    stages: tuple[Stage, ...]
    loss_scaler: Optional[amp.LossScaler]


@jit_class
class Accumulator(Uncopied):
    """Add up the gradients of microbatches in a hand-written loop, and update once per window.

        buffer += weight * gradient                              # every microbatch
        gradient = buffer                                        # reduction="sum", at the boundary
                 = buffer / sum of the weights                   # reduction="mean", at the boundary
        gradient *= min(1, clip_norm / (norm(gradient) + 1e-6))  # if clip_norm is given
        optimizer(gradient); buffer = 0

    It works inside `ms.jit` and in PyNative. With `reduction="mean"`, give undivided mean losses, and the number of
    samples (or unmasked tokens) as weights: the update then equals the full-batch update up to rounding, also for
    microbatches of different sizes and an incomplete last window. With "sum", *the script divides its loss by
    `accumulate_step`*, as in MindSpore's tutorial, whose class this one replaces, with half its memory. In a new
    script, prefer `make_train_step` or `TrainOneStepCell`, which build an accumulator with "mean".

    Args:
        optimizer: A MindSpore optimizer without a `loss_scale` of its own. Its parameters must have a float dtype and
            at least one element, and must not be frozen. If they are slices (see `shard_parameters`), give gradients of
            the whole parameters, `weights`.
        accumulate_step: Number of microbatches in a window. One of: an int; a dict `{update_step: n}`, piecewise
            constant, with the key 0; or `until_weight(budget)`, which closes a window with the microbatch that brings
            its weight to the budget. The length of a window does not change while it is open.
        clip_norm: Largest global norm (> 0) of the accumulated, normalised gradient. `float("inf")` measures
            `grad_norm` without clipping. None computes no norm. Norms above 8e12 count as infinite.
        reduction: "mean" or "sum", as above. Required: the wrong one makes updates N times too large, or too small.
        buffer_dtype: dtype of the buffers. None: the parameter's dtype, but float32 for float16 and bfloat16. Sums in
            16 bits overflow, or stop growing; a warning is given for windows that are too long (see the guide's page on
            language models).
        on_nonfinite: What to do with gradients that hold NaN or infinity. "apply": apply them like other values.
            "skip_microbatch": give the microbatch (or the piece, if it is cut) the weight 0; a microbatch whose pieces
            are all skipped is not counted, so the window waits for one more. "skip_window": drop the window when it
            closes, without an update. A gradient counts as finite if the sum of its elements is finite. Both also drop
            a window of weight 0, whose mean is 0/0; with "apply", it updates with a gradient of 0.
        max_skips: Largest number of windows ("skip_microbatch": microbatches or pieces of this rank) that may be
            skipped in a row; one more raises a RuntimeError, at the end of a window. In a hand-written loop, call
            `require_progress()`, because a graph cannot raise it.
        reducer: A `DataParallel`, which gives all ranks of a run started with `msrun` the same update. None: one
            device.
        stages: A tuple of a `ms_accum.batch_size.GradientNoiseScale`, which estimates up to which batch size more
            samples help, and of stages of your own; see `ms_accum.Stage`.
        loss_scaler: A `mindspore.amp.StaticLossScaler` or `DynamicLossScaler`, for networks that compute in float16.
            Differentiate `scaled(loss)`. When the window closes, the gradient is divided by the scale before it is
            averaged or clipped, and the scaler is adjusted once. A window whose gradient holds NaN or infinity, or
            whose weight is 0, is dropped. The scaler's Parameters become state of the accumulator.

    Attributes:
        mini_step: Number of microbatches in the open window: int32 Parameter of shape `()`.
        update_step: Number of updates done: int32 Parameter of shape `()`.
        closed_windows: Number of windows closed, with an update or dropped: int32 Parameter of shape `()`.
        skipped: Number of gradients of this rank that were ignored because they were not finite: of microbatches or
            pieces ("skip_microbatch"), or of windows; and of windows dropped for their weight 0: int32 Parameter of
            shape `()`.
        skipped_in_row: Number of the latest skips in a row, without a finite gradient between them.
        seen: Sum of the weights in all updates of all ranks, rounded: the number of samples, or of what `weight_fn`
            counts, e.g. tokens: int64 Parameter of shape `()`. Rounding errors do not add up from window to window.
        grad_norm: Norm of the last update's gradient before clipping: float32 Parameter of shape `()`. NaN before the
            first update, and always without `clip_norm`.
        weight_sum: Sum of the weights in the open window: float32 Parameter of shape `()`.
        window_weight: `weight_sum` of the last closed window. With several ranks, both cover this rank only, or the
            ranks that exchange each microbatch.
        parameters: ParameterTuple of all state. Names are unique in the process.
        weights: The parameters to give gradients for, in the optimizer's order: ParameterTuple.
        optimizer, loss_scaler: As given.
        exchange: The exchange that the reducer built; it has the attributes `rank` and `ranks`.
        window, boundary: The open window on the device, and the host's side of it, for steps, cells and checkpoints.

    Raises:
        TypeError: If an argument is of the wrong kind, or `reduction` is missing.
        ValueError: If an argument is out of range, or a loss scaler is given with "skip_microbatch".

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

    def __init__(
        self,
        optimizer: nn.Optimizer,
        accumulate_step: AccumulateStep,
        clip_norm: Optional[float] = None,
        *,
        reduction: str,
        buffer_dtype: Optional[ms.Type] = None,
        on_nonfinite: str = "apply",
        max_skips: int = 20,
        reducer: Optional[DataParallel] = None,
        stages: tuple[Stage, ...] = (),
        loss_scaler: Optional[amp.LossScaler] = None,
    ) -> None:
        weights = whole_parameters(checked_parameters(optimizer))
        clip_norm = checked_clip_norm(clip_norm)
        max_skips, stages = checked_nonfinite(on_nonfinite, loss_scaler, max_skips), checked_stages(stages)
        one_of("reduction", reduction, REDUCTIONS)
        length, loss_scaler = _warned_length(accumulate_step, buffer_dtype), checked_loss_scaler(loss_scaler)
        dtypes = tuple(buffer_dtype_of(buffer_dtype, p.dtype) for p in weights)
        settings = {"accumulate_step": length.description, "clip_norm": repr(clip_norm), "reduction": reduction,
                    "on_nonfinite": on_nonfinite, "max_skips": repr(max_skips),
                    "stages": ", ".join(type(stage).__name__ for stage in stages) or "none",
                    "buffer_dtype": ", ".join(sorted({str(dtype) for dtype in dtypes})),
                    "loss_scaler": "None" if loss_scaler is None else short_text_of(loss_scaler)}
        self._loss_scaler = loss_scaler
        accumulated = AccumulatedParameters(weights, dtypes, dict(settings), slices_among(optimizer.parameters))
        if reducer is not None:
            accumulated.settings.update({
                "max_skips": repr(max_skips), "buffer_dtype": repr(list(map(str, dtypes))),
                "stages": texts_of_stages(stages),
                "loss_scaler": "None" if loss_scaler is None else text_of(loss_scaler),
                **{f"the optimizer's {name}": text for name, text in (
                    describe(optimizer).items() if getattr(reducer, "compare", False) else ())}})
        self.exchange = exchange = _exchange_of(reducer, optimizer, accumulated, stages)
        settings["reducer"] = exchange.describe()
        self._optimizer = optimizer
        if loss_scaler is not None:
            require_scale(loss_scaler.scale_value)
        length.share(exchange.inside)
        stages = stages_of(loss_scaler, on_nonfinite, stages, self)
        self.window = window = Window(optimizer, length, stages, exchange, reduction, clip_norm)
        name_state(optimizer, window.prefix)
        self.boundary = Boundary(window, settings, max_skips)
        self.boundary.watch(self, f"{type(optimizer).__name__} of {weights[0].name}")
        self._kept = (*window.run_state, *(p for stage in stages for p in stage.run_state))
        self.weights = window.weights
        self.mini_step, self.update_step, self.seen = window.mini_step, window.update_step, window.seen
        self.closed_windows, self.weight_sum = window.closed_windows, window.weight_sum
        self.skipped, self.skipped_in_row = window.skipped, window.skipped_in_row
        self.window_weight, self.grad_norm = window.window_weight, window.grad_norm

    # --- by hand ------------------------------------------------------------------------------------------------------

    def __call__(self, grads: Gradients, weight: Scalar = 1.0) -> Tensor:
        """Add the gradients of one microbatch, and update if the window is full.

        Args:
            grads: A gradient for each of `weights`, in their order and shapes.
            weight: A number >= 0 or a Tensor of shape `()`. With 0, the microbatch counts, but its gradient is ignored.
                A Tensor that is negative or infinite counts as NaN, which makes the accumulated gradient NaN.

        Returns:
            Whether this microbatch closed the window: bool Tensor of shape `()`.

        Raises:
            TypeError, ValueError: If `grads` or `weight` does not fit (in graph mode: when the graph is compiled). The
                state is then unchanged.
            ValueError: If a parameter is frozen (in graph mode: when the graph is compiled; not later).
        """
        note_called(self.window.number, isconstant(self.mini_step), False)
        self.add(grads, weight)
        closed = self.close_if(self.window.is_full())
        note_called(self.window.number, isconstant(self.mini_step), True)
        return closed

    def add(self, grads: Gradients, weight: Scalar = 1.0) -> None:
        """Add one microbatch to the open window, without an update. Arguments and errors are those of a call."""
        note_filled(self.window.number)
        self.window.add(grads, as_weight(weight), ends=1, begun=False)

    def close_if(self, condition: Tensor) -> Tensor:
        """Close the window by a rule of your own: update if `condition`, a bool Tensor of shape `()`, is true.

        Inside `ms.jit`, use it instead of an `if` around `apply`: graph mode drops a branch that nothing depends on,
        without an error, as in `if done: acc.apply()` before `return done`.

        Return whether a window that held microbatches was closed: bool Tensor of shape `()`. Raise TypeError if
        `condition` is neither a Tensor nor a bool, ValueError if it is a Tensor of more than one element.
        """
        require_condition(isinstance(condition, bool), condition.shape if isinstance(condition, Tensor) else None)
        note_closed(self.window.number, True)  # in a graph, no value is known
        return self.window.close_if(condition)

    def apply(self) -> None:
        """Close the window now, even if it is not full: exchange, normalise, clip, run the optimizer, clear.

        For an empty window, the optimizer runs with a gradient of 0, unless `on_nonfinite` or a loss scaler drops it;
        `flush` does nothing in this case.
        """
        note_closed(self.window.number, True)
        self.window.close()

    def flush(self) -> bool:
        """Apply the incomplete window if one is open; with "mean", divided by the weights in it. Call it from Python.

        Call the `flush` of a train step if you have one: it knows the number of pieces. With several ranks, every rank
        has to call it, and it returns when all have called it. Until then, this rank takes part with weight 0 in the
        windows of ranks that have more microbatches. Return whether a window was closed: applied, or dropped because it
        is not finite. Raise RuntimeError if an error left a part of a batch in it, or stopped an update.
        """
        return self.boundary.flush()[0]

    def reset(self) -> None:
        """Drop the open window, also after an error: set the buffers, `mini_step` and `weight_sum` to 0."""
        note_closed(self.window.number, False)
        self.window.reset()

    def scaled(self, loss: Tensor) -> Tensor:
        """Return the value to differentiate: the loss, times the loss scale if there is one."""
        return self.window.scaled_loss(loss)

    def require_progress(self) -> None:
        """Raise RuntimeError if more than `max_skips` were skipped in a row. Not for graphs: it waits for the device.
        """
        self.boundary.require_progress()

    def status(self) -> Status:
        """Return all counters in one read, which waits for the device."""
        return self.boundary.status()

    # While MindSpore compiles, it takes `repr` of all globals, and `str` of those in use without a `__name__` (2.10).
    # Neither may read the device there.
    __name__ = "accumulator"

    def __str__(self) -> str:
        """Return the settings and counters as text. It waits for the device."""
        return self.boundary.described(type(self).__name__, "of weight")

    @property
    def optimizer(self) -> nn.Optimizer:
        """Return it as given."""
        return self._optimizer

    @property
    def loss_scaler(self) -> Optional[amp.LossScaler]:
        """Return it as given."""
        return self._loss_scaler

    # --- for steps, cells and checkpoints -----------------------------------------------------------------------------

    @property
    def parameters(self) -> ParameterTuple:
        """Return all state. Names are unique in the process."""
        return ParameterTuple([*self.window.window_state, *self._kept])

    @property
    def state(self) -> dict[str, Parameter]:
        """Return all state by its name in a checkpoint, which is the same in the next process.

        It includes buffers that no window has needed yet; these take no memory, and are 0.
        """
        return {own_name(self.optimizer, p.name): p for p in self.parameters}


fix_options(Accumulator, "optimizer", "accumulate_step", "reduction", "learning_rate", *Options.__annotations__)


def _exchange_of(reducer: Optional[DataParallel], optimizer: nn.Optimizer, accumulated: AccumulatedParameters,
                 stages: tuple[Stage, ...]) -> OneDevice:
    require_unsharded()
    if reducer is not None:
        reducer = instance_of("reducer", reducer, DataParallel, "a DataParallel, or None", "give e.g. DataParallel()")
        exchange = reducer.bind(accumulated)
        if exchange.divides_parameters:
            require_slices_suffice(stages)
            require_elementwise(optimizer, reducer.elementwise)
        return exchange
    if accumulated.slices:
        raise ValueError("the optimizer updates this rank's slices, but there is no reducer to gather them; give "
                         "reducer=DataParallel(zero=1), or build the optimizer from network.trainable_params()")
    warn_if_alone()
    return OneDevice(accumulated)


def _warned_length(accumulate_step: AccumulateStep, buffer_dtype: Optional[ms.Type]) -> WindowLength:
    """Return the length of windows, and warn if windows are too long for the buffers."""
    length = length_of(accumulate_step)
    buffer_dtype_of(buffer_dtype, ms.float32)  # raises, if it is no dtype of a buffer
    warn_of_lost_gradients(buffer_dtype, length.longest)
    return length


def checked_clip_norm(clip_norm: object) -> Optional[float]:
    """Return `clip_norm` as a float, or None. Raise TypeError or ValueError if it is not a number > 0."""
    if clip_norm is None:
        return None
    return number("clip_norm", clip_norm, lambda norm: norm > 0, "a number > 0",
                  'give a norm > 0, float("inf") to measure without clipping, or None')
