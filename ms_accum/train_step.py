"""Train steps: cut a batch, run value_and_grad on each piece, feed the accumulator, return the undivided loss."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any, Optional, Union

from mindspore import amp, nn

from .accumulate import make_accumulate, prepared
from .accumulator import Accumulator
from .arguments import boolean, one_of
from .batch import positional
from .compiled import CompiledStep, compiled
from .straight import SplitStep
from .window import AccumulateStep

_STRATEGIES = ("fused", "split")


def make_train_step(
    forward_fn: Callable,
    accumulator: Union[nn.Optimizer, Accumulator, None] = None,
    accumulate_step: Optional[AccumulateStep] = None,
    *,
    micro_size: int = 1,
    weight_fn: Optional[Callable] = None,
    loss_scaler: Optional[amp.LossScaler] = None,
    strategy: str = "split",
    has_aux: bool = False,
    **options: Any,
) -> CompiledStep:
    """Build a compiled train step: forward, backward, add, and the update when the window closes.

        train_step = make_train_step(forward_fn, optimizer, accumulate_step=4)
        for loss in train_step.epoch(dataset):  # the mean loss of each microbatch
            ...                                 # at the end, the incomplete last window is applied

    Each call of `train_step(data, label)` or `train_step(**batch)` is one microbatch.

    Args:
        forward_fn: `(*batch) -> loss`: the *mean* loss of its samples (or unmasked tokens), a float Tensor of shape
            `()`. With `has_aux`, `(*batch) -> (loss, aux)`. With `losses=2` (see `options`), a tuple of two such losses
            in the place of one, each a mean over what its own weight counts. A function, a Cell or a
            `functools.partial`. A batch with names (a dict, or keyword arguments) is matched to its parameters by name.
        accumulator: An optimizer, for which an `Accumulator` with `reduction="mean"` is built; or such an accumulator.
            An optimizer may also be given as `optimizer=`.
        accumulate_step: Microbatches in a window, with an optimizer: an int, `{update_step: n}`, a callable,
            `until_weight(budget)` or `AdaptiveWindow()`; see `Accumulator`.
        micro_size: Number of pieces that each microbatch is cut into (the name is that of
            `mindspore.parallel.nn.GradAccumulation`). Peak activation memory is that of one piece. The batch size n is
            the length of axis 0 of the first Tensor that has axes (of named ones, in the order of `forward_fn`'s
            parameters). Tensors whose axis 0 has length n are cut, all other arguments go to every piece whole. Pieces
            have ceil(n / micro_size) samples; if that does not divide n, the last one is shorter and weighs less.
        weight_fn: `(*piece) -> weight`, a number or a Tensor of shape `()`: what the mean in `forward_fn` divides by,
            e.g. the number of unmasked tokens. With several losses, a tuple of weights. None: the number of samples. Of
            a batch with names, it gets those that it has parameters for.
        loss_scaler: A `mindspore.amp.StaticLossScaler` or `DynamicLossScaler`, for networks that compute in float16.
            The loss is multiplied by its scale before the backward pass. When the window closes, the accumulated
            gradient is divided by the scale before it is measured, averaged or clipped, and the scaler is adjusted
            once. A window with NaN or infinity in its gradient is dropped. Return the loss in float32: a float16 loss
            overflows from a scale of 2**16 on.
        strategy: "split": the host decides when a window closes. One graph adds a microbatch or a piece of it, another
            one updates, and neither holds control flow. The host reads the device's counters when a window closes.
            "fused": one graph does everything, loops over the pieces, and the device decides.
        has_aux: Whether `forward_fn` returns `(loss, aux)`. With `micro_size > 1`, aux is a Tensor or a tuple of
            Tensors: those of shape `()` are returned as their mean (float32) by the weights of the first loss, those
            with one row per sample as the rows of the whole batch.
        **options: With an optimizer, further arguments of `Accumulator`: `clip_norm`, `on_nonfinite`, `reducer`,
            `buffer_dtype`, `after_update`, `noise_scale`, `losses`.

    Returns:
        A `CompiledStep`: `train_step(*batch) -> loss`, or `(loss, aux)`. The loss is the weighted mean over the pieces
        and is never divided by `accumulate_step`: a float32 Tensor of shape `()`, or a tuple of them.

    Raises:
        TypeError: If an argument is of the wrong kind, `accumulate_step` is missing, or a function is a lambda inside
            another expression, which MindSpore cannot compile.
        ValueError: If an argument is out of range, an accumulator comes with `accumulate_step` or other arguments of
            `Accumulator`, it has `reduction="sum"`, or a parameter was frozen since it was built.
        RuntimeError: When called, if an error left a part of a batch in the open window (see below). With "split", also
            if the device's counters differ from the host's, for example because a function that you compiled calls the
            accumulator. The window is not applied then.

    The weight multiplies the gradients, after the backward pass, so layers whose backward pass is not linear work and
    float16 does not overflow. A piece with the same weight as the first one costs no multiplication, another weight
    costs one per gradient, as does a weight that is a Tensor. Pieces of weight 0 are ignored, even if their loss is
    0/0. Numbers in a batch are constants of the graph: each new value triggers a recompilation, so give what changes as
    a Tensor.

    If an error stops a batch that is cut into pieces, the window may hold some of them. It is never applied then: the
    next call, `flush` and `save_checkpoint` raise a RuntimeError until `accumulator.reset()` drops the open window.
    (Unless `avoid_busy_waiting` was called, MindSpore may report an error only after later calls; then `flush` may be
    the first to raise. `accumulator.flush()` and `accumulator.apply()` do not check.) If an error stops the forward
    pass or the loss of a batch that is not cut, the window stays as it was.

    Source: cutting a batch inside the step is `jax.lax.scan` over microbatches; two graphs scheduled by the
    host are the scheme of RATEX.

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
        ...     print(float(loss), bool(train_step.updated), network.weight.asnumpy())
        2.0 False [[1. 1.]]
        6.0 True [[0. 0.]]
        -0.5 False [[0. 0.]]
        >>> print(network.weight.asnumpy())  # the incomplete last window was applied
        [[-1. -1.]]
    """
    one_of("strategy", strategy, _STRATEGIES)
    boolean("has_aux", has_aux, "say whether forward_fn returns (loss, aux)")
    accumulator, micro_size = prepared(
        forward_fn, accumulator, accumulate_step, options, micro_size, weight_fn, loss_scaler)

    def functions_for(count: int, names: tuple[str, ...]) -> tuple[Callable, Optional[Callable]]:
        forward = positional("forward_fn", forward_fn, count, names)
        return forward, positional("weight_fn", weight_fn, count, names)

    step = SplitStep if strategy == "split" else FusedStep
    return step(forward_fn, functions_for, accumulator, micro_size, has_aux)


class FusedStep(CompiledStep):
    """One graph for forward, backward, add and the update: the device decides when a window closes."""

    strategy = "fused"

    def __init__(
        self,
        forward_fn: Callable,
        functions_for: Callable,
        accumulator: Accumulator,
        micro_size: int,
        has_aux: bool,
    ) -> None:
        def graph_for(samples: int, cut: tuple[bool, ...], names: tuple[str, ...]) -> Callable:
            forward, weigh = functions_for(len(cut), names)
            accumulate = make_accumulate(forward, accumulator, micro_size, weigh, has_aux)

            # What says whether the window is closed is returned: graph mode can drop a branch that nothing depends on.
            def accumulate_and_update(*batch: Any) -> Any:
                result = accumulate(samples, cut, *batch)
                return result, accumulator._close_if_due()

            return compiled(accumulate_and_update)

        super().__init__(forward_fn, accumulator, micro_size, graph_for)
