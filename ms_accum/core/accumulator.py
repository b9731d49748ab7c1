"""The accumulator: one buffer for each parameter, filled by microbatches and emptied by an update."""
from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import TYPE_CHECKING, Optional, TypedDict, Union
from warnings import warn

import mindspore as ms
from mindspore import ParameterTuple, Tensor, amp, nn

from ..arguments import Uncopied, number, one_of, require_options, whole_number
from ..distributed.data_parallel import DataParallel, exchange_of
from ..distributed.exchange import whole_of
from ..mindspore_api import jit_class
from ..tensors import FLOATS, HALF, Gradients, Scalar, as_weight, checked_gradients, require_condition, unstack
from .boundary import Boundary, Status
from .length import AccumulateStep, WindowLength
from .optimizers import Rates, checked_parameters, require_runnable
from .stages import Stage, checked_stages
from .window import END, HELD, Window

if TYPE_CHECKING:
    from typing_extensions import Unpack

REDUCTIONS = ("sum", "mean")
# A sum of n equal gradients is at least 2**p / 2 units in its last place, of p significant bits, if n is, in units of a
# gradient. So an addition is rounded by up to n / 2**p gradients, and has no effect from n = 2**p on (float16: 2,048,
# bfloat16: 256). These are a quarter of that: there, sums of equal gradients are off by 3 % of their norm, and those of
# gradients of one sign, drawn from 0.5 to 1.5 times their mean, by 0.8 % at most.
LONGEST_SUM = {ms.float16: 512, ms.bfloat16: 64}
_LOST = ("buffer_dtype is {0} and windows may hold {1} gradients, expected at most {2} in 16 bits: the sum becomes so "
         "large that later gradients are rounded up or away, without an overflow, and updates are wrong; leave out "
         "buffer_dtype, which makes float32 buffers, or give shorter windows (with until_weight, at_most={2})")


class HandOptions(TypedDict, total=False):
    """Name the options of `Accumulator`, with their types."""

    min_weight: Optional[float]
    buffer_dtype: Optional[ms.Type]
    on_nonfinite: str
    max_skips: Optional[int]
    reducer: Optional[DataParallel]
    stages: tuple[Stage, ...]
    loss_scaler: Optional[amp.LossScaler]


class Options(HandOptions, total=False):
    """Name the options that train steps and cells take over from `Accumulator`, with their types."""

    clip_norm: Optional[float]


def boundary_of(
    optimizer: Callable, accumulate_step: AccumulateStep, facts: dict[str, object], *, reduction: str = "mean",
    is_sum: bool = False, pieces: int = 1, needs_buffers: bool = False, eager: bool = False,
    clip_norm: Optional[float] = None, min_weight: Optional[float] = None, buffer_dtype: Optional[ms.Type] = None,
    on_nonfinite: str = "apply", max_skips: Optional[int] = 20, reducer: Optional[DataParallel] = None,
    stages: tuple[Stage, ...] = (), loss_scaler: Optional[amp.LossScaler] = None,
) -> Boundary:
    """Build a window and its boundary. `facts`: further settings that must be equal on all ranks."""
    parameters, length = checked_parameters(optimizer), WindowLength(accumulate_step)
    whole = tuple(map(whole_of, parameters))
    require_runnable(optimizer, False)
    if clip_norm is not None:
        clip_norm = number("clip_norm", clip_norm, lambda norm: norm > 0, "a number > 0", "None does not clip")
    if min_weight is not None:
        min_weight = number("min_weight", min_weight, lambda least: 0 < least < inf, "a finite number > 0")
    checked = checked_stages(on_nonfinite, loss_scaler, stages, is_sum)
    if max_skips is not None:
        max_skips = whole_number("max_skips", max_skips, "it is the most dropped windows in a row", minimum=0)
    dtypes = tuple(buffer_dtype_of(buffer_dtype, p.dtype) for p in whole)
    limit = LONGEST_SUM.get(buffer_dtype)
    if limit is not None and length.longest * pieces > limit:
        warn(_LOST.format(buffer_dtype, length.longest * pieces, limit), stacklevel=2)
    # A window of one microbatch in one piece needs no buffers, unless something looks at pieces or may drop it.
    has_buffers = needs_buffers or not length.is_one or pieces > 1 or bool(checked)
    rates = Rates(optimizer)
    exchange = exchange_of(reducer, optimizer, parameters, dtypes if has_buffers else (), {
        "the optimizer": type(optimizer).__name__, "learning rates and options of the optimizer": rates.described(),
        "accumulate_step": length.description, "clip_norm": clip_norm, "reduction": reduction,
        "min_weight": min_weight, "on_nonfinite": on_nonfinite, "buffer_dtype": list(map(str, dtypes)),
        "stages": [repr(stage) if type(stage).__repr__ is not object.__repr__ else type(stage).__name__
                   for stage in checked], "max_skips": max_skips,
        "loss_scaler": loss_scaler and (type(loss_scaler).__name__, loss_scaler.scale_value.asnumpy().tolist()),
        **facts})
    if length.budget is not None:  # it is that of one rank
        length.budget *= exchange.inside
    window = Window(optimizer, length, exchange, checked, reduction, is_sum, clip_norm, min_weight or 0.0,
                    dtypes if has_buffers else None)
    return Boundary(window, rates, max_skips, eager)


def buffer_dtype_of(buffer_dtype: Optional[ms.Type], parameter_dtype: ms.Type) -> ms.Type:
    """Return the dtype of a parameter's buffer: `buffer_dtype`, or the parameter's dtype, but float32 for 16 bits."""
    if buffer_dtype is None:
        return ms.float32 if parameter_dtype in HALF else parameter_dtype
    if buffer_dtype not in FLOATS:
        raise ValueError(f"buffer_dtype is {buffer_dtype}, expected a float dtype such as ms.float32, or None")
    if buffer_dtype == ms.bfloat16 and ms.get_context("device_target") == "CPU":
        raise ValueError("buffer_dtype is BFloat16, expected ms.float32 or None on CPU: MindSpore's CPU backend cannot "
                         "add in BFloat16 (2.10); leave buffer_dtype out")
    return buffer_dtype


@jit_class
class Accumulator(Uncopied):
    """Add up the gradients of microbatches in a hand-written loop, and update once per window.

        buffer += weight * gradient                              # every microbatch
        gradient = buffer                                        # reduction="sum", at the boundary
                 = buffer / sum of the weights                   # reduction="mean", at the boundary
        gradient *= min(1, clip_norm / (norm(gradient) + 1e-6))  # if clip_norm is given
        optimizer(gradient); buffer = 0

    It works inside `ms.jit` and in PyNative. With `reduction="mean"`, give undivided mean losses, and the number of
    samples (or unmasked tokens) as weights: the update then equals the full-batch update up to rounding. With "sum",
    *the script divides its loss by `accumulate_step`*, as in MindSpore's tutorial. New scripts use `make_train_step`.

    Args:
        optimizer: A MindSpore optimizer without a `loss_scale` of its own.
        accumulate_step: Number of microbatches in a window: an int; a dict `{update_step: n}`, piecewise constant, with
            the key 0; or `until_weight(budget)`.
        clip_norm: Largest global norm (> 0) of the accumulated, normalised gradient. `float("inf")` measures
            `grad_norm` without clipping. None computes no norm. Norms above 8e12 count as infinite.
        reduction: "mean" or "sum", as above. Required: the wrong one makes updates N times too large, or too small.
        min_weight: With "mean", the least number (> 0) to divide a window by, also where all weights are 0. None: any.
        buffer_dtype: dtype of the buffers. None: the parameter's dtype, but float32 for float16 and bfloat16.
        on_nonfinite: What to do with gradients that hold NaN or infinity. "apply": apply them like other values.
            "skip_microbatch": give the microbatch (or the piece, if it is cut) the weight 0; it still counts in its
            window. "skip_window": drop the window when it closes, without an update. Both also drop a window of weight
            0, unless `min_weight` is set; otherwise it updates with a gradient of 0.
        max_skips: Largest number of windows that may be dropped in a row; one more raises a RuntimeError, at a flush or
            in each 64th microbatch of an epoch. None: no limit.
        reducer: A `DataParallel` of `sync="window"`, for several ranks; `add` in the graph, then call `close()`.
        stages: A tuple of stages, such as a `ms_accum.batch_size.GradientNoiseScale`; see `ms_accum.Stage`.
        loss_scaler: A `mindspore.amp.StaticLossScaler` or `DynamicLossScaler`, for networks that compute in float16;
            differentiate `scaled(loss)`. The gradient is divided by the scale, and the scaler adjusted, once for each
            window. A window whose gradient holds NaN or infinity, or whose weight is 0, is dropped.

    Attributes:
        weights: The parameters to give gradients for, in the optimizer's order: ParameterTuple.

    Source: https://www.mindspore.cn/tutorials/experts/en/r2.2/optimize/gradient_accumulation.html; `optax.MultiSteps`.

    Example:
        >>> import numpy as np, mindspore as ms
        >>> from mindspore import nn
        >>> from ms_accum import Accumulator
        >>> network = nn.Dense(2, 1, weight_init="ones", bias_init="zeros")
        >>> accumulator = Accumulator(nn.SGD(network.trainable_params(), 0.5), accumulate_step=2, reduction="mean")
        >>> def forward_fn(x):
        ...     return network(x).mean()
        >>> grad_fn = ms.value_and_grad(forward_fn, None, accumulator.weights)
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

    def __init__(self, optimizer: nn.Optimizer, accumulate_step: AccumulateStep, clip_norm: Optional[float] = None, *,
                 reduction: str, **options: Unpack[HandOptions]) -> None:
        require_options(Accumulator.__init__, options, HandOptions)
        one_of("reduction", reduction, REDUCTIONS)
        self.boundary = boundary_of(optimizer, accumulate_step, {"the kind of step": "Accumulator"},
                                    reduction=reduction, needs_buffers=True, eager=True, clip_norm=clip_norm,
                                    **options)
        self.window = window = self.boundary.window
        if window.exchange.sums_each:
            raise ValueError('by hand, ranks meet only where a window closes; give sync="window", or make_train_step')
        window.unit = window.unit or 1.0
        self.weights = ParameterTuple(window.exchange.parameters)
        self.names, self.shapes = tuple(p.name for p in self.weights), tuple(tuple(p.shape) for p in self.weights)

    def __call__(self, grads: Gradients, weight: Scalar = 1.0) -> Tensor:
        """Add the gradients of one microbatch, and update if the window is full. Return whether it closed: bool `()`.

        Args:
            grads: A gradient for each of `weights`, in their order and shapes.
            weight: A number >= 0 or a Tensor of shape `()`. With 0, the microbatch counts, but its gradient is ignored.
        """
        self.add(grads, weight)
        return self.close_if(self.window.is_full())

    def add(self, grads: Gradients, weight: Scalar = 1.0) -> Tensor:
        """Add the gradients of one microbatch, without an update. Return how many the window holds: int32 `()`."""
        grads, weight = checked_gradients(self.names, self.shapes, grads), as_weight(weight)
        self.window.begin(grads[-1])
        self.window.add(grads, weight, None, END)
        return unstack(self.window.counts)[HELD] + 0

    def close_if(self, condition: Union[bool, Tensor]) -> Tensor:
        """Close the open window if `condition` is true. Return whether one with microbatches was closed: bool `()`."""
        require_condition(isinstance(condition, bool), condition.shape if isinstance(condition, Tensor) else None)
        if self.window.exchange.ranks > 1:
            raise ValueError("with several ranks, a window is not closed in a graph, because ranks have to meet first; "
                             "call accumulator.add(grads, weight) in the graph, and accumulator.close() after it")
        held = unstack(self.window.counts)[HELD] + 0
        if condition:
            self.window.close()
        return unstack(self.window.counts)[HELD] < held  # from the state after the branch, which keeps the branch

    def scaled(self, loss: Tensor) -> Tensor:
        """Return the loss times the scale of the loss scaler, and of stages: differentiate this."""
        return self.window.scale_loss(loss)

    def close(self) -> bool:
        """Close the window if it is full, on all ranks: call it after each `add`. Return whether it was closed."""
        self.boundary.missing, self.boundary.is_closed, self.boundary.is_idle = None, False, False
        self.boundary.known()
        return self.boundary.is_closed

    def flush(self) -> bool:
        """Apply the incomplete window after the last microbatch. Return whether one was open."""
        return self.boundary.flush()

    def reset(self) -> None:
        """Drop the open window, also after an error, and a row of dropped windows."""
        self.boundary.reset()

    def status(self) -> Status:
        """Return the counters in one read, which waits for the device."""
        return self.boundary.status()
