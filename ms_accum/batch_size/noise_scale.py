"""Measure how large a batch is worth it, and scale the learning rate to a larger batch."""
from __future__ import annotations

from math import inf, nan, sqrt
from typing import Optional

import mindspore as ms
import numpy as np
from mindspore import Tensor, ops

from ..arguments import instance_of, number, one_of
from ..gradients import Gradients, Header, Scalar, as_vector, global_norm
from ..loss_scale import LossScale
from ..state import empty_parameter

_RULES = ("linear", "sqrt")


class GradientNoiseScale:
    """Estimate how many samples an update can use before more of them stop helping.

        spread = sum of w_i * |g_i|^2                     # over the k microbatches of a window, each with weight w_i
        S   = (spread - W * |g|^2) / (k - 1)              # g: the window's gradient before clipping, W: sum of the w_i
        G^2 = |g|^2 - S / W
        scale() = mean of S / mean of G^2                 # means over windows, each of which counts k - 1 times

    Pass it as `Accumulator(noise_scale=...)`. S is the variance of one sample's gradient, summed over all parameters,
    and G^2 the squared norm of the true gradient. With w_i independent samples (so shuffle them),
    E|g_i|^2 = G^2 + S / w_i and E|g|^2 = G^2 + S / W, so E(spread) = W G^2 + k S, and both estimates are unbiased for
    any weights. Their ratio, the *simple noise scale*, approximates the critical batch size: far below it, doubling the
    batch halves the number of updates; far above it, more samples change almost nothing. Its unit is that of the
    weights (samples, or tokens, treated as if each were independent of the others in its sequence). It grows while the
    loss falls.

    A microbatch is what the accumulator is given at once: with `make_train_step(micro_size=...)`, one piece. Skipped
    microbatches and those of weight 0 are ignored, and so is a window of one microbatch, which has nothing to compare
    with. The microbatches of all ranks count alike, and every rank gets the same result.

    Args:
        decay: Factor on all earlier windows in the means when a window closes, 0 < decay <= 1; 1 takes plain means.

    Raises:
        TypeError: If `decay` is not a number.
        ValueError: If `decay` is out of range.

    Example:
        >>> import mindspore as ms
        >>> from mindspore import Parameter, ParameterTuple, Tensor, nn
        >>> from ms_accum import Accumulator, GradientNoiseScale
        >>> weight = Parameter(Tensor([0.0, 0.0]), name="weight")
        >>> noise_scale = GradientNoiseScale()
        >>> accumulator = Accumulator(nn.SGD([weight], 0.1), 2, reduction="mean", noise_scale=noise_scale)
        >>> for gradient in ([3.0, 1.0], [3.0, -1.0]):
        ...     closed = accumulator((Tensor(gradient),), weight=4)
        >>> print(noise_scale.noise, noise_scale.gradient_squared, noise_scale.scale())
        8.0 8.0 1.0

    Source: McCandlish, Kaplan, Amodei et al., "An Empirical Model of Large-Batch Training" (2018), section 2.2 and
    appendix A.1. They use two batch sizes; here there may be any number of weights.
    """

    def __init__(self, decay: float = 0.99) -> None:
        self.decay = number("decay", decay, lambda decay: 0 < decay <= 1, "a number with 0 < decay <= 1",
                            "1 takes plain means")
        self.meter = Meter(self.decay)

    @property
    def noise(self) -> float:
        """S, the variance of one sample's gradient, summed over all parameters; NaN before the first window."""
        return self._means()[0]

    @property
    def gradient_squared(self) -> float:
        """|G|², the squared norm of the true gradient; below 0 if noise hides it, NaN before the first window."""
        return self._means()[1]

    def scale(self) -> float:
        """Return S / |G|², the critical batch size; infinity if noise hides |G|², NaN before the first window."""
        noise, gradient_squared = self._means()
        return inf if gradient_squared <= 0 else max(noise, 0.0) / gradient_squared

    def reset(self) -> None:
        """Forget all closed windows; the open one goes on."""
        ops.assign(self.meter.totals, ops.zeros(3, ms.float32))

    def _means(self) -> tuple[float, float]:
        noise, gradient_squared, count = self.meter.totals.asnumpy().astype(np.float64).tolist()
        return (noise / count, gradient_squared / count) if count else (nan, nan)


@ms.jit_class
class Meter:
    """Measure what `GradientNoiseScale` describes. An accumulator calls the methods, also inside a graph."""

    def __init__(self, decay: float) -> None:
        self.decay = decay
        self.window = empty_parameter("noise_scale.window", (2,), ms.float32)  # the open one's spread and microbatches
        self.totals = empty_parameter("noise_scale.totals", (3,), ms.float32)  # of S, of G^2, and of what windows count
        self.parameters = (self.window, self.totals)

    def measure(self, gradients: Gradients, loss_scale: LossScale, weight: Scalar) -> Header:
        """Return what one microbatch adds to a window: its spread, and 1 or, if its weight is 0, 0."""
        if not isinstance(weight, Tensor) and weight == 0:
            return 0.0, 0.0
        spread = ops.square(global_norm(loss_scale.divide(gradients))) * weight
        if not isinstance(weight, Tensor):
            return spread, 1.0
        present = weight != 0
        return ops.where(present, spread, Tensor(0.0, ms.float32)), present.astype(ms.float32)

    def include(self, spread: Header) -> None:
        """Add to the open window what `measure` returned."""
        ops.assign_add(self.window, as_vector(spread))

    def open_window(self) -> Header:
        """Return what the open window holds."""
        window = self.window + 0.0
        return window[0], window[1]

    def conclude(self, spread: Header, weight: Tensor, norm: Tensor) -> None:
        """Add a window to the means: the spread of all ranks, the sum of the weights, the norm before clipping."""
        total, count = spread
        others = count - 1.0
        squared = ops.square(norm)
        noise = total - weight * squared
        window = as_vector((noise, others * squared - noise / weight, others))
        # A NaN would stay in the means for ever.
        informative = ops.logical_and(others > 0, ops.isfinite(window.sum()))
        ops.assign(self.totals, ops.where(informative, self.totals * self.decay + window, self.totals))

    def forget_window(self) -> None:
        """Empty the open window."""
        ops.assign(self.window, ops.zeros(2, ms.float32))


def meters_of(noise_scale: Optional[GradientNoiseScale], prefix: str) -> tuple[Meter, ...]:
    """Name a meter's state after an accumulator's `prefix`, and return it, if any. ValueError if it has another one."""
    if noise_scale is None:
        return ()
    if noise_scale.meter.window.name != "noise_scale.window":
        raise ValueError("the noise_scale is another accumulator's, whose windows it measures; give each accumulator "
                         "its own")
    for parameter in noise_scale.meter.parameters:
        parameter.name = f"{prefix}.{parameter.name}"
    return (noise_scale.meter,)


def scale_lr(lr: float, accumulate_step: float, rule: str = "linear") -> float:
    """Scale a learning rate to a batch `accumulate_step` times as large.

        "linear": lr * accumulate_step         # SGD, and only up to the critical batch size; needs a warmup
        "sqrt":   lr * sqrt(accumulate_step)   # keeps the size of the update's noise; the usual choice for Adam

    Args:
        lr: Learning rate that suits one microbatch, > 0.
        accumulate_step: Factor by which the batch of an update is larger, a finite number > 0; below 1, it is smaller.
        rule: "linear" or "sqrt".

    Returns:
        The learning rate, a float.

    Raises:
        TypeError: If `lr` or `accumulate_step` is not a number.
        ValueError: If one of them is out of range, or `rule` is unknown.

    Example:
        >>> from ms_accum import scale_lr
        >>> print(scale_lr(0.1, 4), scale_lr(0.1, 4, rule="sqrt"))
        0.4 0.2

    Source: "linear": Goyal et al., "Accurate, Large Minibatch SGD" (2017). "sqrt": for SGD, Krizhevsky, "One weird
    trick for parallelizing convolutional neural networks" (2014), section 5; Hoffer et al., "Train longer, generalize
    better" (2017); for Adam, Malladi et al., "On the SDEs and Scaling Rules for Adaptive Gradient Algorithms" (2022),
    who also multiply 1 - beta1 and 1 - beta2 by the factor (see `scale_adam`) and divide epsilon by its square root.
    """
    lr = number("lr", lr, lambda rate: 0 < rate < inf, "a finite number > 0", "scale each rate of a schedule")
    times = number("accumulate_step", accumulate_step, lambda factor: 0 < factor < inf, "a finite number > 0",
                   "of a schedule, scale the rate for each of its lengths")
    return lr * (times if one_of("rule", rule, _RULES) == "linear" else sqrt(times))


def scale_adam(betas: tuple[float, float], factor: float) -> tuple[float, float]:
    """Scale Adam's decay rates to a batch `factor` times as large.

        (beta1, beta2**factor)    # beta2's half-life, log(1/2) / log(beta2) updates, is the same in samples or tokens

    beta1 stays as it is, because the rule is one for the second moment. To first order, beta2**factor is
    1 - factor * (1 - beta2), which Malladi et al. (see `scale_lr`) use for beta1 as well.

    Args:
        betas: Adam's decay rates `(beta1, beta2)`, each >= 0 and < 1, that suit one batch.
        factor: How many times as large the batch is, a number > 0; below 1 for a smaller one.

    Returns:
        `(beta1, beta2)`, floats.

    Raises:
        TypeError: If `betas` is not a tuple or list of numbers, or `factor` not a number.
        ValueError: If a number is out of range, or `betas` does not hold two.

    Example:
        >>> from ms_accum import scale_adam
        >>> beta1, beta2 = scale_adam((0.9, 0.999), 8)
        >>> print(f"{beta1} {beta2:.6f}")
        0.9 0.992028

    Source: Marek et al., "Small Batch Size Training for Language Models: When Vanilla SGD Works, and Why Gradient
    Accumulation Is Wasteful" (2025).
    """
    remedy = "give Adam's (beta1, beta2)"
    if len(instance_of("betas", betas, (tuple, list), "a tuple of two numbers", remedy)) != 2:
        raise ValueError(f"betas holds {len(betas)} numbers, expected 2; {remedy}")
    beta1, beta2 = [number(f"betas[{i}]", beta, lambda beta: 0 <= beta < 1, "a number with 0 <= beta < 1", remedy)
                    for i, beta in enumerate(betas)]
    factor = number("factor", factor, lambda times: 0 < times < inf, "a finite number > 0",
                    "give the new batch size divided by the old one")
    return beta1, beta2**factor
