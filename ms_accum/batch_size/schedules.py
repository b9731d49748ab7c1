"""Let the batch grow during training: the lengths of the windows, and the learning rates that go with them."""
from __future__ import annotations

from collections.abc import Callable, Sequence
from math import cos, fsum, inf, pi
from numbers import Real
from typing import NamedTuple, Optional, Union

import numpy as np
from mindspore import Tensor

from ..arguments import LARGEST_INT32, instance_of, number, whole_number
from .noise_scale import scale_lr

_ROUNDING = 1 + 1e-6  # rates from float32 count as halved, too


class Schedule(NamedTuple):
    """What `seesaw` and `batch_ramp` return: `{update: microbatches in a window}`, and a rate for each update."""

    accumulate_step: dict[int, int]
    learning_rate: list[float]

    def __repr__(self) -> str:  # short: given as a whole for one of the two, it stands in the error
        return f"Schedule(accumulate_step=<{len(self.accumulate_step)}>, learning_rate=<{len(self.learning_rate)}>)"


def seesaw(updates: int, learning_rate: Union[float, Sequence[float]], *, accumulate_step: int = 1, maximum: int = 64,
           rule: str = "sqrt") -> Schedule:
    """Replace each halving of the learning rate by a window of twice the length.

        factor(p) = largest 2**k <= peak / lowest rate since the peak, at most maximum / accumulate_step
                  = 1 before the peak
        # A window that starts at the plain update p stands for n = min(factor(p), updates - p) plain updates:
        length = factor(p) * accumulate_step
        rate   = mean of their n rates * sqrt(n)    # "sqrt", for Adam: where it was halved, it is divided by sqrt(2)
               = mean of their n rates * n          # "linear", for SGD: where it was halved, it is kept

    The *plain* run makes `updates` updates with windows of `accumulate_step` microbatches. The schedule uses the same
    microbatches in fewer updates: at best 62 % as many for a cosine decay. It is meant for batches below the critical
    batch size (see `GradientNoiseScale`), which bounds `maximum`; above it, larger batches cannot replace the decay.

    The optimizers in `mindspore.nn` take the list of rates and index it by their number of updates (those in `mint` and
    `experimental` take no lists). An update past its end raises an error on CPU, so train on `updates *
    accumulate_step` microbatches, then flush: the last window may be incomplete. A flush before the end, as after each
    `train_step.epoch`, may be one more update, which shifts the schedule.

    Args:
        updates: Updates of the plain run, an int >= 1.
        learning_rate: The plain rates: a number is the peak of a cosine decay to 0, `learning_rate *
            (1 + cos(pi * p / updates)) / 2` for p from 0 to `updates` - 1; a list (or tuple, array or Tensor) holds one
            rate >= 0 for each plain update, with or without a warmup. After their peak, rates may not rise again.
        accumulate_step: Microbatches in a window of the plain run, an int >= 1.
        maximum: Microbatches in a window, at most: an int >= `accumulate_step`.
        rule: "sqrt" or "linear", as for `scale_lr`.

    Returns:
        A named tuple `(accumulate_step, learning_rate)`: `{update: n}` for `Accumulator(accumulate_step=...)`, and a
        list with the learning rate of each update for the optimizer.

    Raises:
        TypeError: If an argument is of the wrong kind.
        ValueError: If a number is out of range, the list has not `updates` rates, rates rise after their peak, or
            `rule` is unknown.

    Example:
        >>> from mindspore import nn
        >>> from ms_accum import Accumulator
        >>> from ms_accum.batch_size import seesaw
        >>> network = nn.Dense(2, 1)
        >>> schedule = seesaw(6, [0.4, 0.4, 0.2, 0.2, 0.2, 0.2], accumulate_step=8, rule="linear")
        >>> print(schedule.accumulate_step, schedule.learning_rate)
        {0: 8, 2: 16} [0.4, 0.4, 0.4, 0.4]
        >>> optimizer = nn.SGD(network.trainable_params(), schedule.learning_rate)
        >>> accumulator = Accumulator(optimizer, schedule.accumulate_step, reduction="mean")

    Source: "sqrt": Meterez et al., "Seesaw: Accelerating Training by Balancing Learning Rate and Batch Size Scheduling"
    (2025), derived for normalised SGD as a model of Adam, where noise dominates the gradients. There the rate is held
    between halvings; here it follows the plain rates. "linear": Smith et al., "Don't Decay the Learning Rate, Increase
    the Batch Size" (2017).
    """
    updates = _updates(updates)
    rates = _plain_rates(learning_rate, updates, lambda p: (1 + cos(pi * p / updates)) / 2)
    accumulate_step, largest = _lengths(accumulate_step, maximum)
    peak = max(rates)
    start, factors = rates.index(peak), []
    factor = 1
    for p, rate in enumerate(rates):
        if p > start and rate > rates[p - 1] * _ROUNDING:
            raise ValueError(f"learning_rate[{p}] is {rate:g}, more than the {rates[p - 1]:g} before it, and the peak "
                             f"was at {start}; expected rates that do not rise again: windows do not get shorter. Give "
                             "each cycle a schedule of its own")
        while p > start and 2 * factor <= largest and 2 * factor * rate <= peak * _ROUNDING:
            factor *= 2
        factors.append(factor)
    return _merge(rates, factors, accumulate_step, rule)


def batch_ramp(updates: int, learning_rate: Union[float, Sequence[float]], *, accumulate_step: int = 1,
               maximum: int = 64, rule: str = "sqrt", ramp: Optional[int] = None) -> Schedule:
    """Let the windows grow linearly with the microbatches seen, and scale the learning rate with them.

        factor(p) = min(1 + (largest - 1) * p // ramp, largest)    # largest = maximum // accumulate_step
        # A window that starts at the plain update p stands for n = min(factor(p), updates - p) plain updates:
        length = factor(p) * accumulate_step
        rate   = mean of their n rates * sqrt(n)    # "sqrt", for Adam; "linear", for SGD: * n

    The *plain* run makes `updates` updates with windows of `accumulate_step` microbatches. The schedule uses the same
    microbatches in fewer updates.

    The critical batch size is small early in training, where small batches reach the same loss with fewer samples.
    See `seesaw` for what MindSpore's optimizers require.

    Args:
        updates: Updates of the plain run, an int >= 1.
        learning_rate: The plain rates: a number is the rate of each update, a list (or tuple, array or Tensor) holds
            one rate >= 0 for each of them.
        accumulate_step: Microbatches in a window of the plain run, and in the first one here: an int >= 1.
        maximum: Microbatches in a window, at most: an int >= `accumulate_step`.
        rule: "sqrt" or "linear", as for `scale_lr`.
        ramp: Plain updates after which the windows have their full length, an int >= 1; None: `updates`.

    Returns:
        A named tuple `(accumulate_step, learning_rate)`, as from `seesaw`.

    Raises:
        TypeError: If an argument is of the wrong kind.
        ValueError: If a number is out of range, the list has not `updates` rates, or `rule` is unknown.

    Example:
        >>> from ms_accum.batch_size import batch_ramp
        >>> schedule = batch_ramp(12, 0.1, accumulate_step=2, maximum=8, ramp=9, rule="linear")
        >>> print(schedule.accumulate_step)
        {0: 2, 3: 4, 5: 6, 6: 8}
        >>> print([round(rate, 3) for rate in schedule.learning_rate])
        [0.1, 0.1, 0.1, 0.2, 0.2, 0.3, 0.2]

    Source: Megatron-LM's `--rampup-batch-size`, which also grows linearly in samples, but does not scale the learning
    rate; Brown et al., "Language Models are Few-Shot Learners" (2020), who train GPT-3 so. On the critical batch size:
    Merrill et al., "Critical Batch Size Revisited" (2025).
    """
    updates = _updates(updates)
    rates = _plain_rates(learning_rate, updates, lambda p: 1.0)
    accumulate_step, largest = _lengths(accumulate_step, maximum)
    ramp = updates if ramp is None else whole_number("ramp", ramp, "None takes all updates")
    factors = [min(1 + (largest - 1) * p // ramp, largest) for p in range(updates)]
    return _merge(rates, factors, accumulate_step, rule)


def _merge(rates: list[float], factors: list[int], accumulate_step: int, rule: str) -> Schedule:
    """Walk over the plain updates, and merge as many at a time as their factors say."""
    lengths, merged, p, previous = {}, [], 0, None
    while p < len(rates):
        factor = factors[p]
        if factor != previous:
            lengths[len(merged)] = factor * accumulate_step
        replaced = rates[p:p + factor]
        merged.append(fsum(replaced) / len(replaced) * scale_lr(1.0, len(replaced), rule))
        p, previous = p + factor, factor
    return Schedule(lengths, merged)


def _updates(updates: int) -> int:
    return whole_number("updates", updates, "give the number of updates of the plain run")


def _plain_rates(learning_rate: object, updates: int, shape: Callable[[int], float]) -> list[float]:
    """Return a list as floats, or a number times `shape(p)` for each plain update p."""
    if isinstance(learning_rate, (np.ndarray, Tensor)):
        learning_rate = learning_rate.tolist()
    if isinstance(learning_rate, Real):
        peak = number("learning_rate", learning_rate, lambda rate: 0 < rate < inf, "a finite number > 0")
        return [peak * shape(p) for p in range(updates)]
    instance_of("learning_rate", learning_rate, Sequence, "a number or a list of rates")
    if len(learning_rate) != updates:
        raise ValueError(f"learning_rate holds {len(learning_rate)} rates, expected {updates}: one for each update of "
                         "the plain run; give a list of that length, or another number of updates")
    return [number(f"learning_rate[{p}]", rate, lambda rate: 0 <= rate < inf, "a finite number >= 0")
            for p, rate in enumerate(learning_rate)]


def _lengths(accumulate_step: int, maximum: int) -> tuple[int, int]:
    """Return the microbatches in a plain window, and how many plain windows fit into one."""
    accumulate_step = whole_number("accumulate_step", accumulate_step, "give the length of a window of the plain run")
    maximum = whole_number("maximum", maximum, "give the largest length of a window, at least accumulate_step",
                           minimum=accumulate_step, maximum=LARGEST_INT32)
    return accumulate_step, maximum // accumulate_step
