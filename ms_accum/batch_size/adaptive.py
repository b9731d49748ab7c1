"""Choose the length of the next window while training, from the measured noise scale."""
from __future__ import annotations

from math import inf

import mindspore as ms
from mindspore import Tensor, ops

from ..arguments import LARGEST_INT32, number, whole_number
from ..gradients import Scalar, as_vector
from ..state import empty_parameter

SMOOTHING = 0.95  # the decay of the means, unless the accumulator was given a noise scale
_BAND = 2**0.75  # between 2**0.5, which is rounding to the nearest power of two, and 2, where both directions differ
_PATIENCE = 8
_PROBE = 8


class AdaptiveWindow:
    """Let the length of windows follow the noise scale while training: `accumulate_step=AdaptiveWindow(maximum=32)`.

        S, G^2 = the means of `GradientNoiseScale`, over windows, with decay 0.95
        m      = mean weight that the ranks add together with one microbatch each, with the same decay
        wanted = S / (G^2 * target * m)                      # microbatches

        length *= 2   if wanted > 2**0.75 * length           # once 8 windows were measured at this length, and since
                                                             # the noise scale's reset()
        length /= 2   if wanted < 2**-0.75 * length

    `target` is the ratio of noise to signal in an update's gradient, S / (batch * G^2), where batch counts samples (or
    what the weights count). A window is made longer where the noise is larger than that, and shorter where it is
    smaller, so an update's batch is about the noise scale divided by `target`. With the default of 1 it is the noise
    scale itself, the usual approximation of the critical batch size; the guide's page "Which batch size" says what
    that is worth.

    Lengths are `minimum` times a power of two, and change only between windows, by one factor of 2 at a time. A change
    has to be undone by a noise scale that is smaller by a factor of 2**0.5 than the one that caused it. With fewer than
    about 10 directions of noise, estimates are so rough that lengths still change back and forth.

    Shuffle the data: here its order changes the training, not only a number that is printed.

    A window of one microbatch on one device, not cut into pieces, measures nothing: of 8 such windows in a row, the
    last one has two microbatches, unless `maximum` is 1. All ranks compute the same length, and it is part of
    checkpoints. The accumulator measures with `GradientNoiseScale(decay=0.95)`, or with the `noise_scale` that it was
    given.

    Learning rates are left alone, and schedules count updates, of which longer windows make fewer: a schedule over the
    whole training does not come to its end.

    Args:
        minimum: Microbatches (of each rank) in the first window and in the shortest one, 1 to 2**30 - 1.
        maximum: Microbatches in the longest one, `minimum` to 2**30 - 1.
        target: Ratio of noise to signal, > 0. For a larger one, windows are shorter.

    Raises:
        TypeError: If an argument is of the wrong kind.
        ValueError: If one is out of range. When the Accumulator is made, with `reduction="sum"` or several losses,
            where no noise scale is measured.

    Source: the norm test bounds the noise of an update's gradient by a multiple of its norm, and lets the batch grow:
    Byrd et al., "Sample Size Selection in Optimization Methods for Machine Learning" (2012); Lau et al., arXiv
    2402.11215 and 2412.21124, for adaptive and distributed optimizers. Their batch never shrinks. The estimates are
    those of `GradientNoiseScale`.

    Example:
        >>> import numpy as np, mindspore as ms
        >>> from mindspore import nn
        >>> from ms_accum import AdaptiveWindow, make_train_step
        >>> rng = np.random.default_rng(0)
        >>> network = nn.Dense(64, 1, has_bias=False)
        >>> def forward_fn(x):
        ...     return network(x).mean()  # the gradient is the mean of x: true gradient 1/8 each, noise 1 each
        >>> optimizer = nn.SGD(network.trainable_params(), learning_rate=0.01)
        >>> train_step = make_train_step(forward_fn, optimizer, accumulate_step=AdaptiveWindow())
        >>> for _ in range(400):
        ...     loss = train_step(ms.Tensor(rng.normal(1 / 8, 1, (4, 64)), ms.float32))
        >>> print(train_step.accumulator.window_length)  # noise scale 64 samples, microbatches of 4
        16
    """

    def __init__(self, *, minimum: int = 1, maximum: int = 64, target: float = 1.0) -> None:
        self.minimum = whole_number("minimum", minimum, "give the microbatches of the shortest window",
                                    maximum=LARGEST_INT32 // 2)
        self.maximum = whole_number("maximum", maximum, "give the microbatches of the longest window",
                                    maximum=LARGEST_INT32 // 2)
        if self.maximum < self.minimum:
            raise ValueError(f"maximum is {self.maximum}, expected at least minimum={self.minimum}; give both")
        self.target = number("target", target, lambda ratio: 0 < ratio < inf, "a finite number > 0",
                             "1 makes an update's batch about the noise scale")

    def __repr__(self) -> str:
        return f"AdaptiveWindow(minimum={self.minimum}, maximum={self.maximum}, target={self.target:.9g})"


@ms.jit_class
class AdaptiveLength:
    """The length that an `AdaptiveWindow` has chosen. An accumulator calls the methods, also inside a graph."""

    def __init__(self, choice: AdaptiveWindow) -> None:
        self.minimum, self.maximum, self.target = choice.minimum, choice.maximum, choice.target
        self.chosen = empty_parameter("window_chosen", (), ms.int32, choice.minimum)
        # The chosen one, or 2 to measure.
        self.length = empty_parameter("window_length", (), ms.int32, choice.minimum)
        # Measured since the last change, and, of the last ones, those that measured nothing.
        self.windows = empty_parameter("window_measured", (2,), ms.int32)
        self.weights = empty_parameter("window_weights", (2,), ms.float32)  # means of weights and of microbatches
        self.parameters = (self.chosen, self.length, self.windows, self.weights)

    def follow(self, totals: Tensor, decay: float, compared: Scalar, weight: Scalar, microbatches: Scalar) -> None:
        """Choose the length of the next window.

        Args:
            totals: Of S, of G^2, and of what windows count: float32 `(3,)`, as in `noise_scale.Meter`.
            decay: Factor on earlier windows.
            compared: Gradients that the window which has just ended compared.
            weight: Its weight, of all ranks.
            microbatches: Its microbatches, of one rank.
        """
        weights = self.weights * decay + as_vector((weight, microbatches))
        ops.assign(self.weights, weights)
        chosen = self.chosen + 0
        noise = totals[0]
        allowed = totals[1] * (self.target * weights[0] / weights[1]) * chosen.astype(ms.float32)
        measured = (as_vector((compared,))[0] > 1).astype(ms.int32)
        # Totals that hold this window alone are new ones.
        earlier = (totals[2] > as_vector((compared,))[0] - 1).astype(ms.int32)
        since, idle = self.windows[0] * earlier + measured, (self.windows[1] + 1) * (1 - measured)
        # With NaN, both are false. Where noise hides the gradient (G^2 < 0), the window gets longer.
        longer = ops.logical_and(noise > _BAND * allowed, chosen * 2 <= self.maximum)
        shorter = ops.logical_and(_BAND * noise < allowed, chosen > self.minimum)
        patient = since >= _PATIENCE
        longer, shorter = ops.logical_and(patient, longer), ops.logical_and(patient, shorter)
        chosen = ops.where(longer, chosen * 2, ops.where(shorter, chosen // 2, chosen))
        since = ops.where(ops.logical_or(longer, shorter), ops.zeros_like(since), since)
        probes = ops.logical_and(chosen == 1, idle >= _PROBE - 1)
        ops.assign(self.chosen, chosen)
        ops.assign(self.length, ops.where(probes, ops.minimum(chosen * 2, self.maximum), chosen))
        ops.assign(self.windows, ops.stack((since, idle)))
