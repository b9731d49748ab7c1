"""Build a train step, with pieces, several losses and all options of an accumulator."""
from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Optional, Union

import mindspore as ms
from mindspore import amp, nn

from ..arguments import boolean, one_of, require_callable, spelled, whole_number
from ..core.accumulator import REDUCTIONS, Accumulator
from ..core.optimizers import checked_parameters
from ..tensors import require_trainable
from .batch import positional
from .graphs import Functions
from .pieces import checked_axis, checked_pieces
from .program import Program, program_of
from .step import TrainStep

if TYPE_CHECKING:
    from ..core.length import AccumulateStep
    from ..core.stages import Stage
    from ..core.way import Way
    from ..distributed.data_parallel import DataParallel
    from .pieces import Cut


@spelled
def make_train_step(
    forward_fn: Callable,
    optimizer: Union[nn.Optimizer, Accumulator],
    accumulate_step: Optional[AccumulateStep] = None,
    *,
    pieces: int = 1,
    batch_axis: int = 0,
    weight_fn: Optional[Callable] = None,
    loss_reduction: str = "mean",
    has_aux: bool = False,
    losses: int = 1,
    clip_norm: Optional[float] = None,
    loss_scaler: Optional[amp.LossScaler] = None,
    on_nonfinite: str = "apply",
    max_skips: Optional[int] = None,
    reducer: Optional[DataParallel] = None,
    after_update: Optional[Callable] = None,
    noise_scale: Optional[Stage] = None,
    stages: tuple[Stage, ...] = (),
    buffer_dtype: Optional[ms.Type] = None,
) -> TrainStep:
    """Build a compiled train step that accumulates gradients and updates once per window.

        train_step = make_train_step(forward_fn, optimizer, accumulate_step=4)
        for loss in train_step.epoch(dataset):  # the mean loss of each microbatch
            ...                                 # the incomplete last window is applied, too

    Each call of `train_step(data, label)` or `train_step(**batch)` trains on one microbatch: it runs forward and
    backward and adds the gradients. The call that makes the window full also updates.

    Args:
        forward_fn: `(*batch) -> loss`: the *mean* loss of its samples (or unmasked tokens), a float Tensor of shape
            `()`. With `has_aux`, `(*batch) -> (loss, aux)`. It may be a function, a Cell or a `functools.partial`. The
            arguments of a named batch (a dict, or keyword arguments) are matched to its parameters by name.
        optimizer: An optimizer, or an `Accumulator` with `reduction="mean"`. For an optimizer, such an accumulator is
            built.
        accumulate_step: Number of microbatches in a window: an int, `{update_step: n}`, a callable or
            `until_weight(budget)`; see `Accumulator`. Required with an optimizer, not allowed with an Accumulator.
        pieces: Number of pieces that each microbatch is cut into. Peak activation memory is that of one piece. The
            batch size n is the length of the batch axis of the first Tensor that has axes; named arguments are taken in
            the order of `forward_fn`'s parameters. Tensors whose batch axis has length n are cut; all other arguments
            are passed whole to every piece. A piece has ceil(n / pieces) samples. If that does not divide n, the last
            piece is shorter and weighs less. An empty batch (n = 0) counts as a microbatch with weight 0, loss 0 and
            aux None.
        batch_axis: The axis that counts the samples, e.g. 1 for `(time, batch, features)`. For Tensors with fewer axes,
            axis 0.
        weight_fn: `(*piece) -> weight`, a number or a Tensor of shape `()`: the denominator of the mean in
            `forward_fn`, e.g. the number of unmasked tokens. None: the number of samples. With a named batch, only the
            arguments that appear in its signature are passed.
        loss_reduction: "mean", or "sum" if `forward_fn` returns the *sum* over its samples (or unmasked tokens) and
            `weight_fn` returns their number. With "sum", gradients are added without a multiplication, and the window
            is divided once by the weights of all ranks. For weights that change, such as numbers of tokens, this takes
            less time and memory than a mean (see the page on language models). A sum of float16 losses overflows:
            return it in float32. Float16 buffers may overflow as well.
        has_aux: Whether `forward_fn` returns `(loss, aux)`. With `pieces > 1`, aux is a Tensor or a tuple of Tensors.
            Tensors of shape `()` are averaged over the pieces by weight, in float32. Tensors with one entry per sample
            on the batch axis are joined to those of the whole batch.
        losses: Number of losses that `forward_fn` returns in a tuple. Each is a mean over a count of its own, e.g. text
            tokens, images or routed tokens. `weight_fn` returns a tuple of as many weights. The gradient is that of the
            sum of the losses' means over the window, on all ranks. The weights of a window are computed before it is
            trained, so `epoch` reads its batches ahead, and single calls need `accumulate_step=1`. The losses are
            multiplied by the weights before the backward pass, so the backward pass must be linear: gradients that a
            `bprop` adds or clips are wrong if microbatches differ. Return the loss of an added gradient as one more
            loss (see the page on language models).
        clip_norm: See `Accumulator`. This and the following arguments require an optimizer.
        loss_scaler: See `Accumulator`. With a loss scaler, return the loss in float32: a float16 loss overflows at
            scales of 2**16 and above.
        on_nonfinite: See `Accumulator`.
        max_skips: See `Accumulator`.
        reducer: See `Accumulator`.
        after_update: See `Accumulator`.
        noise_scale: See `Accumulator`.
        stages: See `Accumulator`.
        buffer_dtype: See `Accumulator`.

    Returns:
        A `TrainStep`: `train_step(*batch) -> loss`, or `(loss, aux)`. The loss is a float32 Tensor of shape `()`, or a
        tuple of them: the weighted mean over the pieces, or 0 if all weights are 0. It is never divided by
        `accumulate_step`.

    Raises:
        TypeError: If an argument is of the wrong kind, `accumulate_step` is missing, or a function is a lambda inside
            another expression, which MindSpore cannot compile.
        ValueError: If an argument is out of range, if an accumulator is given together with `accumulate_step` or other
            arguments of `Accumulator` or has `reduction="sum"`, or if a parameter was frozen after the optimizer was
            built.
        RuntimeError: When the step is called, if an error left a part of a batch in the open window (see below).

    If the loss is a mean, the gradients are multiplied by the weight after the backward pass, so layers whose backward
    pass is not linear work and float16 does not overflow. A piece with as many samples as the first one needs no
    multiplication; any other weight, and a weight that is a Tensor, needs one per gradient. Pieces of weight 0 are
    ignored, even if their loss is 0/0. A weight that is negative, NaN or infinite makes the loss NaN. Python numbers in
    a batch are constants of the graph: each new value triggers a recompilation, so pass values that change as Tensors.

    The window is kept on the device. The host counts the remaining microbatches, and reads the device's counters when
    the window should be full and after every error, load or flush. An accumulator is filled by train steps or by hand,
    not both: adding by hand to a step's accumulator raises a RuntimeError. Two steps may take turns; each reads the
    state of the window when it continues.

    If an error or an interrupt stops a batch that is cut into pieces, the window may hold some of the pieces. Such a
    window is never applied: the next call, `flush` and `save_checkpoint` raise a RuntimeError until
    `accumulator.reset()` drops the open window. (Unless `avoid_busy_waiting` was called, MindSpore may report an error
    only after later calls; then `flush` may be the first to raise. `accumulator.apply()` does not check.) An error in
    the forward pass or the loss of a batch that is not cut leaves the window unchanged.

    Source: cutting a batch inside the step corresponds to `jax.lax.scan` over microbatches; two graphs scheduled by the
    host are the scheme of RATEX; `loss_reduction="sum"` is Megatron's `calculate_per_token_loss`.

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
    boolean("has_aux", has_aux, "say whether forward_fn returns (loss, aux)")
    losses = whole_number("losses", losses, "it is the number of losses that forward_fn returns")
    require_functions(forward_fn=forward_fn, weight_fn=weight_fn)
    pieces, batch_axis = checked_pieces(pieces), checked_axis(batch_axis)
    one_of("loss_reduction", loss_reduction, REDUCTIONS)
    accumulator = averaging(
        optimizer, accumulate_step, clip_norm=clip_norm, loss_scaler=loss_scaler, on_nonfinite=on_nonfinite,
        max_skips=max_skips, reducer=reducer, after_update=after_update, noise_scale=noise_scale,
        stages=stages, buffer_dtype=buffer_dtype)

    fix_unit_of_sums(accumulator.way, loss_reduction)
    counts = "samples" if weight_fn is None else "counted by weight_fn"

    def functions_for(count: int, names: tuple[str, ...]) -> Functions:
        return Functions(positional("forward_fn", forward_fn, count, names),
                         positional("weight_fn", weight_fn, count, names), has_aux, batch_axis, loss_reduction)

    if losses > 1:
        from .several_losses import SeveralLossesStep  # an optional kind of step, which imports from this room

        return SeveralLossesStep(forward_fn, accumulator, pieces, functions_for, losses, batch_axis, counts)

    def program_for(samples: int, cut: Cut, names: tuple[str, ...]) -> Program:
        return program_of(functions_for(len(cut), names), accumulator, samples, cut, pieces)

    return TrainStep(forward_fn, accumulator, pieces, program_for, batch_axis, counts)


def fix_unit_of_sums(way: Way, loss_reduction: str) -> None:
    """Set the unit of weights to 1 for a loss that is a sum: its gradients are added without a multiplication."""
    if loss_reduction == "sum" and not way.looks_at_gradients:
        way.buffers.fix_unit(1.0)


def require_functions(**functions: Optional[Callable]) -> None:
    """Raise TypeError if a function cannot be called or compiled."""
    for name, function in functions.items():
        if function is not None or name != "weight_fn":
            require_callable(name, function)


def averaging(optimizer: Any, accumulate_step: Optional[AccumulateStep] = None, **options: Any) -> Accumulator:
    """Return an accumulator with `reduction="mean"`: the given one, or one built for the given optimizer."""
    given = {name: value for name, value in options.items() if value not in (None, "apply", ())}
    if not isinstance(optimizer, Accumulator):
        checked_parameters(optimizer)
        if accumulate_step is None:
            raise TypeError("accumulate_step is missing, expected the number of microbatches in a window; give e.g. "
                            "accumulate_step=4, or an Accumulator instead of the optimizer")
        return Accumulator(optimizer, accumulate_step, reduction="mean", **options)
    if accumulate_step is not None or given:
        names = ", ".join([*(["accumulate_step"] if accumulate_step is not None else []), *given])
        raise ValueError(f"got an Accumulator and also {names}, which the Accumulator already has; give an "
                         "optimizer with these arguments, or only the Accumulator")
    require_trainable(optimizer.weights)
    reduction = optimizer.fingerprint()["reduction"]
    if reduction != "mean":
        raise ValueError(f'the accumulator has reduction={reduction!r}, expected "mean": a train step and a cell do '
                         'not divide the loss, so a sum of N gradients is N times too large; give reduction="mean"')
    return optimizer
