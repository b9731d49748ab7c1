"""Let the batch grow during training, and adapt the learning rate to it."""
from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from math import cos, fsum, inf, log2, pi, sqrt
from numbers import Real
from typing import NamedTuple, Optional, Union

from ..arguments import LARGEST_INT32, instance_of, number, one_of, whole_number

_ROUNDING = 1 + 1e-6  # so that rates from float32 also count as halved


class Schedule(NamedTuple):
    """Hold the result of `seesaw` or `batch_ramp`: `{update: microbatches in a window}`, and a rate for each update."""

    accumulate_step: dict[int, int]
    learning_rate: list[float]

    def __repr__(self) -> str:  # short, because errors show it if it is given as a whole for one of its two fields
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
    microbatches in fewer updates: at best 62 % as many for a cosine decay. Use it for batches below the critical batch
    size (see `GradientNoiseScale`), which bounds `maximum`.

    The optimizers in `mindspore.nn` index the list of rates by their number of updates (those in `mint` and
    `experimental` take no lists). An update past its end raises an error on CPU, so train on
    `updates * accumulate_step` microbatches, then flush. An earlier flush, as at the end of each `train_step.epoch`,
    shifts the schedule.

    Args:
        updates: Number of updates of the plain run, an int >= 1.
        learning_rate: The plain rates: a number is the peak of a cosine decay to 0,
            `learning_rate * (1 + cos(pi * p / updates)) / 2` for the update p; a list (or tuple, array or Tensor) holds
            one rate >= 0 for each update, with or without a warmup. After their peak, rates may not rise again.
        accumulate_step: Number of microbatches in a window of the plain run, an int >= 1.
        maximum: Largest number of microbatches in a window, an int >= `accumulate_step`.
        rule: "sqrt" for Adam, "linear" for SGD: how the rate of a window grows with its length.

    Returns:
        A named tuple: `accumulate_step` for the accumulator, `{update: n}`, and `learning_rate` for the optimizer, a
        list with the rate of each update.

    Raises:
        TypeError: If an argument is of the wrong kind.
        ValueError: If a number is out of range, the list does not hold `updates` rates, rates rise after their peak, or
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
    (2025), derived for normalised SGD as a model of Adam; there the rate is held between halvings. "linear": Smith et
    al., "Don't Decay the Learning Rate, Increase the Batch Size" (2017).
    """
    def factors(rates: list[float], largest: int) -> list[int]:
        start, peak = rates.index(max(rates)), max(rates)
        for p in range(start + 1, len(rates)):
            if rates[p] > rates[p - 1] * _ROUNDING:
                raise ValueError(f"learning_rate[{p}] is {rates[p]:g}, more than the {rates[p - 1]:g} before it, but "
                                 f"after the peak at {start}, rates must not rise again, because windows do not get "
                                 "shorter; give each cycle a schedule of its own")
        halved = [2 ** int(log2(min(peak * _ROUNDING / rate if rate else inf, largest))) for rate in rates[start + 1:]]
        return [1] * (start + 1) + list(accumulate(halved, max))

    return _schedule(updates, learning_rate, accumulate_step, maximum, rule, lambda done: (1 + cos(pi * done)) / 2,
                     factors)


def batch_ramp(updates: int, learning_rate: Union[float, Sequence[float]], *, accumulate_step: int = 1,
               maximum: int = 64, rule: str = "sqrt", ramp: Optional[int] = None) -> Schedule:
    """Return a schedule whose windows grow linearly with the microbatches seen, with learning rates scaled to them.

        factor(p) = min(1 + (largest - 1) * p // ramp, largest)    # largest = maximum // accumulate_step
        # length and rate of a window follow from factor(p) as in `seesaw`; everything else is as in `seesaw`, too

    The critical batch size is small early in training: there, small batches reach the same loss with fewer samples.

    Args:
        updates: See `seesaw`.
        learning_rate: The plain rates: a number is the rate of each update; or a list of them, which may rise.
        accumulate_step: See `seesaw`.
        maximum: See `seesaw`.
        rule: See `seesaw`.
        ramp: Number of plain updates after which windows have their full length, an int >= 1. None: `updates`.

    Returns:
        See `seesaw`.

    Raises:
        TypeError, ValueError: See `seesaw`.

    Example:
        >>> from ms_accum.batch_size import batch_ramp
        >>> schedule = batch_ramp(12, 0.1, accumulate_step=2, maximum=8, ramp=9, rule="linear")
        >>> print(schedule.accumulate_step)
        {0: 2, 3: 4, 5: 6, 6: 8}
        >>> print([round(rate, 3) for rate in schedule.learning_rate])
        [0.1, 0.1, 0.1, 0.2, 0.2, 0.3, 0.2]

    Source: Megatron-LM's `--rampup-batch-size`, which does not scale the learning rate; Brown et al., "Language Models
    are Few-Shot Learners" (2020); on the critical batch size, Merrill et al., "Critical Batch Size Revisited" (2025).
    """
    def factors(rates: list[float], largest: int) -> list[int]:
        length = len(rates) if ramp is None else whole_number("ramp", ramp, "None takes all updates")
        return [min(1 + (largest - 1) * p // length, largest) for p in range(len(rates))]

    return _schedule(updates, learning_rate, accumulate_step, maximum, rule, lambda done: 1.0, factors)


def sample_ramp(start: int, increment: int, samples: int, batch_size: int, *, microbatch: int) -> dict[int, int]:
    """Return the lengths of windows for a batch that grows in equal steps with the samples seen.

        steps = (batch_size - start) / increment
        batch = start + increment * min(seen * steps // samples, steps)    # `seen` samples before the window
        length = batch / microbatch

    A batch size is skipped if the window before it passes all of its samples. The learning rate is not scaled (see
    `batch_ramp`). All sizes are in samples of all ranks together. Windows are assumed to be full: a flush before the
    end of the ramp shifts it.

    Args:
        start: Number of samples in the first batch, an int >= 1.
        increment: Number of samples by which the batch grows each time, an int >= 1.
        samples: Number of samples after which the batch has its full size, an int >= 1.
        batch_size: Number of samples in the full batch, an int >= `start`.
        microbatch: Number of samples in one microbatch of all ranks: that of one rank times the number of ranks.

    Returns:
        `{update: microbatches}`, for `accumulate_step`.

    Raises:
        TypeError: If an argument is not an int.
        ValueError: If a number is out of range, `start` or `increment` is not a multiple of `microbatch`, or
            `batch_size - start` is not a multiple of `increment`.

    Example:
        >>> from ms_accum.batch_size import sample_ramp
        >>> print(sample_ramp(16, 8, 300, 32, microbatch=4))  # 10 updates of 16 samples, then 6 of 24
        {0: 4, 10: 6, 16: 8}

    Source: Megatron-LM's `--rampup-batch-size start increment samples`, with its `--global-batch-size`. Megatron-LM
    computes the samples of each size as floats; here they are exact fractions.
    """
    microbatch = whole_number("microbatch", microbatch, "give the samples of one microbatch of all ranks together")
    start = _multiple("start", start, microbatch)
    increment = _multiple("increment", increment, microbatch)
    samples = whole_number("samples", samples, "give the samples after which the batch has its full size")
    batch_size = whole_number("batch_size", batch_size, "give the full batch, at least start", minimum=start)
    steps, rest = divmod(batch_size - start, increment)
    if rest:
        raise ValueError(f"batch_size is {batch_size}, expected start={start} plus a multiple of increment={increment};"
                         f" give {batch_size - rest} or {batch_size - rest + increment}, or another increment")
    update, seen, lengths = 0, 0, {}
    for step in range(steps):
        batch = start + step * increment
        needed = -(-samples * (step + 1) // steps)  # rounded up, as are the updates
        updates = -((seen - needed) // batch)  # at least 0: a smaller window has passed the sum before by less than it
        lengths[update] = batch // microbatch  # after 0 updates, the next size replaces it
        update, seen = update + updates, seen + updates * batch
    return {**lengths, update: batch_size // microbatch}


def _multiple(name: str, value: int, microbatch: int) -> int:
    """Return `value` as an int >= 1. Raise ValueError unless it is a multiple of `microbatch`."""
    value = whole_number(name, value, "give a number of samples of all ranks together")
    if value % microbatch:
        raise ValueError(f"{name} is {value} samples, expected a multiple of microbatch={microbatch}; give "
                         f"{-(-value // microbatch) * microbatch}, or another microbatch")
    return value


def _schedule(updates: int, learning_rate: object, accumulate_step: int, maximum: int, rule: str,
              shape: Callable[[float], float], factors: Callable[[list[float], int], list[int]]) -> Schedule:
    """Go through the plain updates, and merge the number of updates that their factors give.

    `shape(done)` is the factor on a single rate, given the finished part; `factors(rates, largest)` returns one factor
    for each update.
    """
    updates = whole_number("updates", updates, "give the number of updates of the plain run")
    given = getattr(learning_rate, "tolist", lambda: learning_rate)()
    if isinstance(given, Real):
        peak = number("learning_rate", given, lambda rate: 0 < rate < inf, "a finite number > 0")
        rates = [peak * shape(p / updates) for p in range(updates)]
    else:
        rates = [number(f"learning_rate[{p}]", rate, lambda rate: 0 <= rate < inf, "a finite number >= 0")
                 for p, rate in enumerate(instance_of("learning_rate", given, Sequence, "a number or a list of rates"))]
    if len(rates) != updates:
        raise ValueError(f"learning_rate holds {len(rates)} rates, expected {updates}: one for each update of the "
                         "plain run; give a list of that length, or another number of updates")
    length = whole_number("accumulate_step", accumulate_step, "give the length of a window of the plain run")
    maximum = whole_number("maximum", maximum, "give the largest length of a window, at least accumulate_step",
                           minimum=length, maximum=LARGEST_INT32)
    linear = one_of("rule", rule, ("linear", "sqrt")) == "linear"
    times, p = factors(rates, maximum // length), 0
    lengths: dict[int, int] = {}
    merged: list[float] = []
    while p < updates:
        if not merged or times[p] != lengths[max(lengths)] // length:
            lengths[len(merged)] = times[p] * length
        replaced = rates[p:p + times[p]]
        n = len(replaced)
        merged.append(fsum(replaced) / n * (n if linear else sqrt(n)))
        p += times[p]
    return Schedule(lengths, merged)
