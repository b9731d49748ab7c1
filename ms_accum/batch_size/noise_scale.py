"""Estimate which batch size is useful: the gradient noise scale."""
from __future__ import annotations

from math import inf, nan
from typing import TYPE_CHECKING, Any

import mindspore as ms
import numpy as np
from mindspore import Tensor, ops

from ..arguments import number
from ..core.stages import Stage
from ..mindspore_api import jit_class
from ..tensors import as_vector, global_norm, norm_of, square_sum, state_parameter

if TYPE_CHECKING:
    from ..tensors import Gradients, Numbers, Scalar


@jit_class
class GradientNoiseScale(Stage):
    """Estimate the critical batch size, beyond which more samples in an update help little.

        spread = sum of w_i * |g_i|^2                     # over the k microbatches of a window, each with weight w_i
        S   = (spread - W * |g|^2) / (k - 1)              # g: the window's gradient before clipping, W: sum of the w_i
        G^2 = |g|^2 - S / W
        scale() = mean of S / mean of G^2                 # means over windows, each of which counts k - 1 times

    Pass it as `stages=(noise_scale,)`, and call `scale()` after some windows. S is the variance of one sample's
    gradient, summed over all parameters, and G^2 is the squared norm of the true gradient. If microbatch i holds w_i
    independent samples (shuffle the data), both estimates are unbiased for any weights: E(spread) = W G^2 + k S and
    E|g|^2 = G^2 + S / W. Their ratio, the *simple noise scale*, approximates the critical batch size: far below it,
    doubling the batch halves the number of updates; far above it, more samples change almost nothing. Its unit is that
    of the weights: samples or tokens. Tokens are treated as independent of the others in their sequence.

    Here, a microbatch is what the accumulator adds at once: with `make_train_step(pieces=...)`, one piece. With several
    ranks, the microbatches of all ranks count. Skipped microbatches, those of weight 0, and windows of one microbatch
    are ignored: a single microbatch cannot be compared. It costs one norm per microbatch.

    Args:
        decay: Factor on all earlier windows in the means when a window closes, 0 < decay <= 1. With 1, the means are
            plain means.

    Raises:
        TypeError, ValueError: If `decay` is not a number, or out of range.

    Example:
        >>> import mindspore as ms
        >>> from mindspore import Parameter, ParameterTuple, Tensor, nn
        >>> from ms_accum import Accumulator
        >>> from ms_accum.batch_size import GradientNoiseScale
        >>> weight = Parameter(Tensor([0.0, 0.0]), name="weight")
        >>> noise_scale = GradientNoiseScale()
        >>> accumulator = Accumulator(nn.SGD([weight], 0.1), 2, reduction="mean", stages=(noise_scale,))
        >>> for gradient in ([3.0, 1.0], [3.0, -1.0]):
        ...     closed = accumulator((Tensor(gradient),), weight=4)
        >>> print(noise_scale.noise, noise_scale.gradient_squared, noise_scale.scale())
        8.0 8.0 1.0

    Source: McCandlish, Kaplan, Amodei et al., "An Empirical Model of Large-Batch Training" (2018), section 2.2 and
    appendix A.1, there for two batch sizes.
    """

    measures = 2

    def __init__(self, decay: float = 0.99) -> None:
        self.decay = number("decay", decay, lambda decay: 0 < decay <= 1, "a number with 0 < decay <= 1",
                            "1 takes plain means")
        # Sums over windows: of S, of G^2, and of what both count; of the weight, and of 1.
        self._totals = state_parameter("noise_scale.totals", (5,), ms.float32)
        self.state = (self._totals,)

    @property
    def noise(self) -> float:
        """Return S, the variance of one sample's gradient, summed over all parameters; NaN before the first window."""
        return _ratio(self._totals.asnumpy()[[0, 2]])

    @property
    def gradient_squared(self) -> float:
        """Return |G|², the squared norm of the true gradient; < 0 if noise hides it, NaN before the first window."""
        return _ratio(self._totals.asnumpy()[[1, 2]])

    @property
    def window_weight(self) -> float:
        """Return the mean weight of a measured window, summed over the ranks; NaN before the first one."""
        return _ratio(self._totals.asnumpy()[[3, 4]])

    @property
    def windows(self) -> float:
        """Return the number of windows that were measured, if `decay` is 1; else, of those that still count."""
        return float(self._totals.asnumpy()[4])

    def scale(self) -> float:
        """Return S / |G|², the critical batch size; infinity if noise hides |G|², NaN before the first window."""
        gradient_squared = self.gradient_squared
        return inf if gradient_squared <= 0 else max(self.noise, 0.0) / gradient_squared

    def bind(self, prefix: str) -> None:
        """See `Stage`. Raise ValueError if it belongs to another accumulator."""
        if self._totals.name != "noise_scale.totals":
            raise ValueError("the noise_scale belongs to another accumulator, whose windows it measures; give each "
                             "accumulator its own")
        super().bind(prefix)

    def measure(self, gradients: Gradients, factor: Scalar, weight: Scalar) -> Numbers:
        """See `Stage`. Return the spread, and 1, or 0 if the weight is 0."""
        if not isinstance(weight, Tensor) and weight == 0:
            return 0.0, 0.0
        spread = ops.square(global_norm(gradients, factor)) * weight
        if not isinstance(weight, Tensor):
            return spread, 1.0
        present = weight != 0
        return ops.where(present, spread, Tensor(0.0, ms.float32)), present.astype(ms.float32)

    def on_update(self, window: dict[str, Any]) -> None:
        """See `Stage`."""
        spread, count, weight = window["measured"][0], window["measured"][1], window["weight"]
        others = count - 1.0  # type: Tensor
        squares = square_sum(window["gradients"], window["unit"] / weight)
        squared = ops.square(norm_of(self.exchange.over(squares)))
        noise = spread - weight * squared
        estimates = as_vector((noise, others * squared - noise / weight, others, weight, 1.0))
        # A NaN would stay in the means for ever.
        informative = ops.logical_and(others > 0, ops.isfinite(estimates.sum()))
        ops.assign(self._totals, ops.where(informative, self._totals * self.decay + estimates, self._totals))


def _ratio(numbers: np.ndarray) -> float:
    above, below = numbers.tolist()
    return above / below if below else nan
