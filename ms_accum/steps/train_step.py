"""Build a train step: the door to straight graphs, pieces, several losses, and all options of an accumulator."""
from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Optional, Union

import mindspore as ms
from mindspore import amp, nn

from ..arguments import boolean, one_of, require_callable, spelled, whole_number
from ..core.accumulator import REDUCTIONS, Accumulator
from ..core.optimizers import checked_parameters, require_trainable
from .batch import positional
from .graphs import Functions
from .pieces import checked_axis, checked_pieces
from .program import Program, program_of
from .step import TrainStep

if TYPE_CHECKING:
    from ..core.length import AccumulateStep
    from ..core.stages import Stage
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
    """Build a compiled train step: forward, backward, add, and the update when the window closes.

        train_step = make_train_step(forward_fn, optimizer, accumulate_step=4)
        for loss in train_step.epoch(dataset):  # the mean loss of each microbatch
            ...                                 # with the last one, the incomplete window is applied, too

    Each call of `train_step(data, label)` or `train_step(**batch)` is one microbatch.

    Args:
        forward_fn: `(*batch) -> loss`: the *mean* loss of its samples (or unmasked tokens), a float Tensor of shape
            `()`. With `has_aux`, `(*batch) -> (loss, aux)`. A function, a Cell or a `functools.partial`. A batch with
            names (a dict, or keyword arguments) is matched to its parameters by name.
        optimizer: An optimizer, for which an `Accumulator` with `reduction="mean"` is built; or such an accumulator.
        accumulate_step: Microbatches in a window, with an optimizer: an int, `{update_step: n}`, a callable or
            `until_weight(budget)`, see `Accumulator`.
        pieces: Number of pieces that each microbatch is cut into. Peak activation memory is that of one piece. The
            batch size n is the length of the batch axis of the first Tensor that has axes (of named ones, in the order
            of `forward_fn`'s parameters). Tensors whose batch axis has length n are cut, all other arguments go to
            every piece whole. Pieces have ceil(n / pieces) samples; if that does not divide n, the last one is shorter
            and weighs less. A batch with n = 0 counts as a microbatch of weight 0 and loss 0 (aux None).
        batch_axis: The axis that counts the samples, e.g. 1 for `(time, batch, features)`. Of a Tensor that has no such
            axis, it is axis 0.
        weight_fn: `(*piece) -> weight`, a number or a Tensor of shape `()`: what the mean in `forward_fn` divides by,
            e.g. the number of unmasked tokens. None: the number of samples. Of a batch with names, it gets those that
            it has parameters for.
        loss_reduction: "mean", or "sum" if `forward_fn` returns the *sum* over its samples (or unmasked tokens) instead
            of their mean, and `weight_fn` how many they are. The gradients go into the buffers as they are, and a
            window divides once by the weights of all ranks: with weights that change, as numbers of tokens do, that
            takes less time and memory than a mean (see the page on language models). A sum of float16 losses overflows:
            return it in float32. Float16 buffers may overflow as well.
        has_aux: Whether `forward_fn` returns `(loss, aux)`. With `pieces > 1`, aux is a Tensor or a tuple of Tensors:
            those of shape `()` are returned as their mean (float32) by the weights, those with one row per sample (on
            the batch axis) as those of the whole batch.
        losses: How many losses `forward_fn` returns, in a tuple, each a mean over a count of its own: tokens for one,
            images or routed tokens for another. `weight_fn` returns a tuple of as many weights. The gradient is that of
            the sum of their means over the window, on all ranks. A window is weighed before it is trained: `epoch`
            reads its batches ahead, and a single call has to be a window (`accumulate_step=1`). The weights multiply
            the losses, before the backward pass, so this has to be linear: what a `bprop` adds or clips is wrong where
            microbatches differ. Return the loss of what it adds as one more loss (see the page on language models).
        clip_norm: With an optimizer; see `Accumulator`. So are the following.
        loss_scaler: See `Accumulator`. Return the loss in float32 then: a float16 loss overflows from a scale
            of 2**16 on.
        on_nonfinite: See `Accumulator`.
        max_skips: See `Accumulator`.
        reducer: See `Accumulator`.
        after_update: See `Accumulator`.
        noise_scale: See `Accumulator`.
        stages: See `Accumulator`.
        buffer_dtype: See `Accumulator`.

    Returns:
        A `TrainStep`: `train_step(*batch) -> loss`, or `(loss, aux)`. The loss is the weighted mean over the pieces, 0
        if they weigh nothing, and is never divided by `accumulate_step`: a float32 Tensor of shape `()`, or a tuple of
        them.

    Raises:
        TypeError: If an argument is of the wrong kind, `accumulate_step` is missing, or a function is a lambda inside
            another expression, which MindSpore cannot compile.
        ValueError: If an argument is out of range, an accumulator comes with `accumulate_step` or other arguments of
            `Accumulator`, it has `reduction="sum"`, or a parameter was frozen since it was built.
        RuntimeError: When called, if an error left a part of a batch in the open window (see below).

    If the loss is a mean, the weight multiplies the gradients, after the backward pass, so layers whose backward pass
    is not linear work and float16 does not overflow. A piece with the same number of samples as the first one costs no
    multiplication, another weight costs one per gradient, as does a weight that is a Tensor. Pieces of weight 0 are
    ignored, even if their loss is 0/0; a weight that is negative, NaN or infinite makes the loss NaN. Numbers in a
    batch are constants of the graph: each new value triggers a recompilation, so give what changes as a Tensor.

    The device owns the window. The host counts down the microbatches that it needs, and reads the device's counters
    when none is missing, after every error, load or flush. An accumulator is filled by one train step, or by hand:
    adding by hand to a step's accumulator raises a RuntimeError. Two steps may take turns; each reads where the window
    stands when it goes on.

    If an error or an interrupt stops a batch that is cut into pieces, the window may hold some of them. It is never
    applied then: the next call, `flush` and `save_checkpoint` raise a RuntimeError until `accumulator.reset()` drops
    the open window. (Unless `avoid_busy_waiting` was called, MindSpore may report an error only after later calls; then
    `flush` may be the first to raise. `accumulator.apply()` does not check.) If an error stops the forward pass or the
    loss of a batch that is not cut, the window stays as it was.

    Source: cutting a batch inside the step is `jax.lax.scan` over microbatches; two graphs scheduled by the host are
    the scheme of RATEX; `loss_reduction="sum"` is Megatron's `calculate_per_token_loss`.

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

    fix_unit_of_sums(accumulator, loss_reduction)
    counts = "samples" if weight_fn is None else "counted by weight_fn"

    def functions_for(count: int, names: tuple[str, ...]) -> Functions:
        return Functions(positional("forward_fn", forward_fn, count, names),
                         positional("weight_fn", weight_fn, count, names), has_aux, batch_axis, loss_reduction)

    if losses > 1:
        from .several_losses import SeveralLossesStep  # an optional kind of step, which imports what is below this

        return SeveralLossesStep(forward_fn, accumulator, pieces, functions_for, losses, batch_axis, counts)

    def program_for(samples: int, cut: Cut, names: tuple[str, ...]) -> Program:
        return program_of(functions_for(len(cut), names), accumulator, samples, cut, pieces)

    return TrainStep(forward_fn, accumulator, pieces, program_for, batch_axis, counts)


def fix_unit_of_sums(accumulator: Accumulator, loss_reduction: str) -> None:
    """Count gradients of sums in the unit 1: they go into the buffers as they are."""
    if loss_reduction == "sum" and not accumulator.way.looks_at_gradients:
        accumulator.way.buffers.fix_unit(1.0)


def require_functions(**functions: Optional[Callable]) -> None:
    """Refuse what cannot be called or compiled. TypeError."""
    for name, function in functions.items():
        if function is not None or name != "weight_fn":
            require_callable(name, function)


def averaging(optimizer: Any, accumulate_step: Optional[AccumulateStep] = None, **options: Any) -> Accumulator:
    """Return an accumulator with `reduction="mean"`: the given one, or one built for the given optimizer."""
    given = {name: value for name, value in options.items() if value not in (None, "apply", ())}
    if not isinstance(optimizer, Accumulator):
        checked_parameters(optimizer)
        if accumulate_step is None:
            raise TypeError("accumulate_step is missing, expected it with an optimizer: the number of microbatches in "
                            "a window; give accumulate_step=4, say, or an Accumulator in the place of the optimizer")
        return Accumulator(optimizer, accumulate_step, reduction="mean", **options)
    if accumulate_step is not None or given:
        names = ", ".join([*(["accumulate_step"] if accumulate_step is not None else []), *given])
        raise ValueError(f"got an Accumulator and also {names}, which the Accumulator has already; give an optimizer "
                         "with these arguments, or the Accumulator alone")
    require_trainable(optimizer.weights)
    reduction = optimizer.fingerprint()["reduction"]
    if reduction != "mean":
        raise ValueError(f'the accumulator has reduction={reduction!r}, expected "mean": the loss is '
                         'undivided here, and a sum of N such gradients is N times too large; give reduction="mean"')
    return optimizer
