"""Measure how large a batch is worth it, and scale the learning rate to a larger batch."""
from __future__ import annotations

from math import inf, nan, sqrt

import mindspore as ms
from mindspore import Tensor, ops

from ..arguments import instance_of, number, one_of
from ..buffers import empty_parameter
from ..gradients import Gradients, Numbers, Scalar, as_vector, global_norm
from ..loss_scale import NoLossScale
from ..observer import Observer

_RULES = ("linear", "sqrt")


@ms.jit_class
class GradientNoiseScale(Observer):
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

    A microbatch is what the accumulator is given at once: with `make_train_step(pieces=...)`, one piece. Skipped
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
        >>> from ms_accum import Accumulator
        >>> from ms_accum.batch_size import GradientNoiseScale
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

    watches = True

    def __init__(self, decay: float = 0.99) -> None:
        self.decay = number("decay", decay, lambda decay: 0 < decay <= 1, "a number with 0 < decay <= 1",
                            "1 takes plain means")
        self._window = empty_parameter("noise_scale.window", (2,), ms.float32)  # the open one's spread and microbatches
        self._totals = empty_parameter("noise_scale.totals", (3,), ms.float32)  # of S, of G^2, of what windows count
        self._sizes = empty_parameter("noise_scale.sizes", (2,), ms.float32)  # weight, and microbatches of one rank
        self._counts = empty_parameter("noise_scale.counts", (2,), ms.int32)  # windows measured; since then, others
        self.of_window, self.parameters = (self._window,), (self._totals, self._sizes, self._counts)

    def __repr__(self) -> str:
        return f"GradientNoiseScale(decay={self.decay:.9g})"

    @property
    def noise(self) -> float:
        """S, the variance of one sample's gradient, summed over all parameters; NaN before the first window."""
        return self._mean(0)

    @property
    def gradient_squared(self) -> float:
        """|G|², the squared norm of the true gradient; below 0 if noise hides it, NaN before the first window."""
        return self._mean(1)

    @property
    def microbatch_weight(self) -> float:
        """Mean weight that the ranks add with one microbatch each; NaN before the first window."""
        weight, microbatches = self._sizes.asnumpy().tolist()
        return weight / microbatches if microbatches else nan

    @property
    def windows(self) -> tuple[int, int]:
        """How many windows were measured, and how many since the last one had a single microbatch."""
        measured, others = self._counts.asnumpy().tolist()
        return measured, others

    def scale(self) -> float:
        """Return S / |G|², the critical batch size; infinity if noise hides |G|², NaN before the first window."""
        gradient_squared = self.gradient_squared
        return inf if gradient_squared <= 0 else max(self.noise, 0.0) / gradient_squared

    def reset(self) -> None:
        """Forget all closed windows; the open one goes on."""
        for parameter in self.parameters:
            ops.assign(parameter, ops.zeros_like(parameter))

    def _mean(self, index: int) -> float:
        totals = self._totals.asnumpy().tolist()
        return totals[index] / totals[2] if totals[2] else nan

    # --- what an accumulator calls, also inside a graph ---------------------------------------------------------------

    def bind(self, prefix: str) -> GradientNoiseScale:
        """See `Observer`."""
        if self._window.name != "noise_scale.window":
            raise ValueError("the noise_scale is another accumulator's, whose windows it measures; give each "
                             "accumulator its own")
        for parameter in (*self.of_window, *self.parameters):
            parameter.name = f"{prefix}.{parameter.name}"
        return self

    def of_piece(self, gradients: Gradients, weight: Scalar, loss_scale: NoLossScale) -> Numbers:
        """See `Observer`: the spread, and 1 or, if the weight is 0, 0."""
        if not isinstance(weight, Tensor) and weight == 0:
            return 0.0, 0.0
        spread = ops.square(global_norm(loss_scale.divide(gradients))) * weight
        if not isinstance(weight, Tensor):
            return spread, 1.0
        present = weight != 0
        return ops.where(present, spread, Tensor(0.0, ms.float32)), present.astype(ms.float32)

    def include(self, numbers: Numbers) -> None:
        """See `Observer`."""
        ops.assign_add(self._window, as_vector(numbers))

    def open_window(self) -> Numbers:
        """See `Observer`: spread, microbatches, and 1, which becomes the number of those that count microbatches."""
        window = self._window + 0.0
        return window[0], window[1], 1.0

    def of_update(self, gradients: Gradients, unit: Scalar, weight: Scalar, numbers: Numbers) -> None:
        """See `Observer`."""
        spread, count = numbers[2], numbers[3]
        others = count - 1.0
        squared = ops.square(global_norm(gradients) * (unit / weight))
        noise = spread - weight * squared
        window = as_vector((noise, others * squared - noise / weight, others))
        # A NaN would stay in the means for ever.
        informative = ops.logical_and(others > 0, ops.isfinite(window.sum()))
        ops.assign(self._totals, ops.where(informative, self._totals * self.decay + window, self._totals))
        ops.assign(self._sizes, self._sizes * self.decay + as_vector((weight, numbers[0] / numbers[4])))
        measured = (others > 0).astype(ms.int32)
        counts = self._counts + 0
        ops.assign(self._counts, ops.stack((counts[0] + measured, (counts[1] + 1) * (1 - measured))))

    def empty(self) -> None:
        """See `Observer`."""
        ops.assign(self._window, ops.zeros(2, ms.float32))


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
        >>> from ms_accum.batch_size import scale_lr
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
        >>> from ms_accum.batch_size import scale_adam
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
