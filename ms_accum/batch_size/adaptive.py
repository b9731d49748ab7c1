"""Choose the length of the next window while training, from the measured noise scale."""
from __future__ import annotations

from copy import copy
from math import inf
from typing import Optional

import mindspore as ms
from mindspore import ops

from ..arguments import LARGEST_INT32, number, whole_number
from ..buffers import state_parameter
from ..window import HostLength
from .noise_scale import GradientNoiseScale

_SMOOTHING = 0.95  # the decay of the means, unless the accumulator was given a noise scale
_BAND = 2**0.75  # between 2**0.5, which is rounding to the nearest power of two, and 2, where both directions differ
_PATIENCE = 8
_PROBE = 8


@ms.jit_class
class AdaptiveWindow(HostLength):
    """Let the length of windows follow the noise scale while training: `accumulate_step=AdaptiveWindow(maximum=32)`.

        S, G^2 = the means of `GradientNoiseScale`, over windows, with decay 0.95
        m      = mean weight that the ranks add together with one microbatch each, with the same decay
        wanted = S / (G^2 * target * m)                      # microbatches

        length *= 2   if wanted > 2**0.75 * length           # once 8 windows were measured at this length, and since
                                                             # the noise scale's reset()
        length /= 2   if wanted < 2**-0.75 * length

    `target` is the ratio of noise to signal in an update's gradient, S / (batch * G^2), where batch counts samples (or
    what the weights count). So an update's batch is about the noise scale divided by `target`: by default the noise
    scale itself, the usual approximation of the critical batch size. With fewer than about 10 directions of noise,
    estimates are so rough that lengths change back and forth. Shuffle the data: its order changes the training here.

    A window of one microbatch on one device, not cut into pieces, measures nothing: of 8 such windows in a row, the
    last one has two microbatches, unless `maximum` is 1. The accumulator measures with `GradientNoiseScale(decay=0.95)`
    or the `noise_scale` that it was given. `train_step.accumulator.window.length` is the length of the open window, or
    of the next one; checkpoints hold it.

    The host chooses, between windows, so this is for `make_train_step`; by hand and in a `TrainOneStepCell`, where the
    device closes windows, it raises a RuntimeError. Learning rates are left alone, and schedules count updates, of
    which longer windows make fewer: a schedule over the whole training does not come to its end.

    Args:
        minimum: Microbatches (of each rank) in the first window and in the shortest one, 1 to 2**30 - 1.
        maximum: Microbatches in the longest one, `minimum` to 2**30 - 1.
        target: Ratio of noise to signal, > 0. For a larger one, windows are shorter.

    Raises:
        TypeError, ValueError: If an argument is of the wrong kind, or out of range.

    Source: the norm test, which bounds the noise of an update's gradient by a multiple of its norm: Byrd et al.,
    "Sample Size Selection in Optimization Methods for Machine Learning" (2012); Lau et al., arXiv 2402.11215 and
    2412.21124, for adaptive and distributed optimizers. Their batch never shrinks.

    Example:
        >>> import numpy as np, mindspore as ms
        >>> from mindspore import nn
        >>> from ms_accum import make_train_step
        >>> from ms_accum.batch_size import AdaptiveWindow
        >>> rng = np.random.default_rng(0)
        >>> network = nn.Dense(64, 1, has_bias=False)
        >>> def forward_fn(x):
        ...     return network(x).mean()  # the gradient is the mean of x: true gradient 1/8 each, noise 1 each
        >>> optimizer = nn.SGD(network.trainable_params(), learning_rate=0.01)
        >>> train_step = make_train_step(forward_fn, optimizer, accumulate_step=AdaptiveWindow())
        >>> for _ in range(200):
        ...     loss = train_step(ms.Tensor(rng.normal(1 / 8, 1, (4, 64)), ms.float32))
        >>> print(train_step.accumulator.window.length)  # noise scale 64 samples, microbatches of 4
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
        self.description = repr(self)

    def __repr__(self) -> str:
        return f"AdaptiveWindow(minimum={self.minimum}, maximum={self.maximum}, target={self.target:.9g})"

    def bind(self, noise_scale: Optional[GradientNoiseScale], prefix: str) -> tuple[AdaptiveWindow, GradientNoiseScale]:
        """See `HostLength`. The window is a copy with state of its own: several accumulators may be given one."""
        window = copy(self)
        window.noise_scale = noise_scale or GradientNoiseScale(_SMOOTHING)
        window.chosen = state_parameter(f"{prefix}.window_chosen", (), ms.int32, self.minimum)
        window.measured = state_parameter(f"{prefix}.window_measured", (), ms.int32)  # windows until the last change
        window.parameters = (window.chosen, window.measured)
        return window, window.noise_scale

    @property
    def length(self) -> int:
        """Microbatches of the open window, or of the next one, which is chosen now: an int.

        What was measured only changes with an update, so a window keeps its length, and all ranks choose the same.
        """
        chosen, before = int(self.chosen), int(self.measured)
        measured, unmeasured = self.noise_scale.windows
        if measured < before:  # the noise scale was reset
            ops.assign(self.measured, 0)
            before = 0
        better = self._better(chosen) if measured - before >= _PATIENCE else chosen
        if better != chosen:
            chosen = better
            ops.assign(self.chosen, chosen)
            ops.assign(self.measured, measured)
        return min(2, self.maximum) if chosen == 1 and unmeasured >= _PROBE - 1 else chosen

    def host_length(self, update_step: int) -> int:
        """See `Window`. That of another update is not known."""
        return self.length

    def _better(self, chosen: int) -> int:
        noise = self.noise_scale.noise
        allowed = self.noise_scale.gradient_squared * self.target * self.noise_scale.microbatch_weight * chosen
        # With NaN, both are false. Where noise hides the gradient (G^2 < 0), the window gets longer.
        if noise > _BAND * allowed and 2 * chosen <= self.maximum:
            return 2 * chosen
        if _BAND * noise < allowed and chosen > self.minimum:
            return chosen // 2
        return chosen
