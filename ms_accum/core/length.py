"""Decide when a window closes: after a number of microbatches, by a schedule of updates, or by its weight."""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil, inf
from typing import Optional, Union

import numpy as np
from mindspore import Tensor, ops

from ..arguments import LARGEST_INT32, instance_of, number, whole_number
from ..mindspore_api import jit_class


@dataclass(frozen=True)
class UntilWeight:
    """Hold the weight that closes a window; `until_weight` returns it."""

    budget: float
    at_most: int


AccumulateStep = Union[int, Mapping[int, int], UntilWeight]

_REMEDY = "give an int >= 1, a dict {update_step: n} that holds 0, or until_weight(65_536)"
_UNKNOWN = ("the lengths of windows are not known before the run with {}; give an int or a dict {{update_step: n}}, or "
            "divide the weight of the run by the budget plus half a microbatch")


@jit_class
class WindowLength:
    """Decide when a window is full: after `length(update_step)` microbatches, or when its weight reaches the budget.

        length(update_step) = accumulate_step                                    # int
                            = n of the largest start <= update_step              # {start: n}, piecewise constant
                            = at_most                                            # until_weight(budget, at_most)

    Attributes:
        description: A text that is equal for equal lengths.
        constant: What `missing` returns for no microbatch, if that is the same after each update; else None.
        is_one: Whether each window holds one microbatch.
        longest: Largest number of microbatches in a window; for `until_weight`, if each weighs at least 1.
    """

    def __init__(self, accumulate_step: AccumulateStep) -> None:
        self.budget: Optional[float] = None
        self.lengths: tuple[tuple[int, int], ...] = ((0, 1),)
        if isinstance(accumulate_step, UntilWeight):
            self.lengths, self.budget = ((0, accumulate_step.at_most),), accumulate_step.budget
            self.description = f"until_weight({accumulate_step.budget:.9g}, at_most={accumulate_step.at_most})"
        elif isinstance(accumulate_step, Mapping):
            self.lengths = _stages("accumulate_step", accumulate_step, _REMEDY)
            self.description = str(dict(self.lengths))
        else:
            self.lengths = ((0, _length("accumulate_step", accumulate_step, _REMEDY)),)
            self.description = str(self.lengths[0][1])
        self.constant = None if len(self.lengths) > 1 else self.missing(0, 0)
        self.is_one = self.lengths == ((0, 1),)
        longest = max(length for _, length in self.lengths)
        self.longest = longest if self.budget is None or longest < LARGEST_INT32 else ceil(self.budget)

    def length(self, update_step: Tensor) -> Union[int, Tensor]:
        """Return the length of the window that starts after `update_step` updates (int32 `()`)."""
        length = self.lengths[0][1]
        if len(self.lengths) > 1:  # in a graph, to compile the slice takes time
            for start, longer in self.lengths[1:]:
                length = ops.where(update_step >= start, longer, length)
        return length

    def is_full(self, mini_step: Tensor, update_step: Tensor, weight_sum: Tensor) -> Tensor:
        """Return whether a window with these microbatches and this weight is full: bool Tensor of shape `()`."""
        full = mini_step >= self.length(update_step)
        if self.budget is not None:
            full = ops.logical_or(full, weight_sum >= self.budget)
        return full

    def host_length(self, update_step: int) -> int:
        """Return the result of `length` as an int."""
        return next(length for start, length in reversed(self.lengths) if start <= update_step)

    def missing(self, microbatches: int, update_step: int, weight: float = 0.0) -> int:
        """Return the least number of microbatches that a window still needs: 0 where `is_full` is true."""
        left = max(self.host_length(update_step) - microbatches, 0)
        if self.budget is None:
            return left
        return int(left > 0 and not np.float32(weight) >= np.float32(self.budget))  # any one may bring the weight


def until_weight(budget: float, at_most: int = LARGEST_INT32) -> UntilWeight:
    """Let the weight of a window decide when it closes, not the number of its microbatches: `accumulate_step=...`.

        train_step = make_train_step(forward_fn, optimizer, until_weight(65_536), weight_fn=count_tokens)

    A window closes with the microbatch that brings its weight (of `weight_fn`, or the number of samples) to `budget`, a
    finite number > 0, or with the microbatch number `at_most`. Microbatches are not cut, so it may exceed the budget.
    The budget is that of one rank: if ranks exchange each microbatch, a window closes at `budget` times the number of
    these ranks. A train step reads the window's weight after each microbatch, which waits for the device. Source:
    fairseq's `--max-tokens`.

    Example:
        >>> from ms_accum import until_weight
        >>> print(until_weight(65_536, at_most=16))
        UntilWeight(budget=65536.0, at_most=16)
    """
    budget = number("budget", budget, lambda weight: 0 < weight < inf, "a finite number > 0", "give a weight")
    return UntilWeight(budget, _length("at_most", at_most, "give the most microbatches that a window may hold"))


def by_epoch(schedule: Mapping[int, int], microbatches: int) -> dict[int, int]:
    """Convert a schedule of epochs, `{epoch: n}` with the key 0, to one of updates, for `accumulate_step`.

    It is exact if every epoch has `microbatches` microbatches on each rank and ends with a flush, and no window is
    dropped. Source: Lightning's `GradientAccumulationScheduler`.

    Example:
        >>> from ms_accum import by_epoch
        >>> print(by_epoch({0: 1, 2: 4}, microbatches=10))  # windows of 4 from the third epoch on
        {0: 1, 20: 4}
    """
    instance_of("schedule", schedule, Mapping, "a dict {epoch: n}")
    stages = _stages("schedule", schedule, "give a dict {epoch: n} that holds 0")
    microbatches = _length("microbatches", microbatches, "give the microbatches of an epoch")
    updates, previous, lengths = 0, stages[0], {}
    for epoch, length in stages:
        updates += (epoch - previous[0]) * -(-microbatches // previous[1])
        lengths[updates] = length
        previous = epoch, length
    return lengths


def updates_of(accumulate_step: AccumulateStep, microbatches: int, epochs: int = 1) -> int:
    """Return the number of updates of a run, e.g. for a learning rate schedule.

        total = updates_of(4, len(dataset), epochs=10)
        optimizer = nn.Momentum(parameters, nn.cosine_decay_lr(0.0, 0.1, total, 1, total), 0.9)

    It is exact if every epoch ends with a flush and nothing is dropped. `microbatches`: of an epoch on each rank; if
    ranks have different numbers, the largest. Raise ValueError for `until_weight`. Source: Lightning's
    `Trainer.estimated_stepping_batches`.

    Example:
        >>> from ms_accum import updates_of
        >>> print(updates_of(4, microbatches=10, epochs=2), updates_of({0: 1, 5: 4}, microbatches=10, epochs=2))
        6 10
    """
    length = WindowLength(accumulate_step)
    microbatches = _length("microbatches", microbatches, "give the microbatches of an epoch")
    if length.budget is not None:
        raise ValueError(_UNKNOWN.format(length.description))
    updates = 0
    for _ in range(whole_number("epochs", epochs, "give the epochs of a run")):
        left = microbatches
        while left > 0:
            n, ends = length.host_length(updates), [start for start, _ in length.lengths if start > updates]
            windows = min(-(-left // n), min(ends, default=updates + left) - updates)
            updates, left = updates + windows, left - windows * n
    return updates


def _length(name: str, value: object, remedy: str) -> int:
    return whole_number(name, value, remedy, maximum=LARGEST_INT32)


def _stages(name: str, schedule: Mapping[int, int], remedy: str) -> tuple[tuple[int, int], ...]:
    stages = {}
    for start, length in schedule.items():
        start = whole_number(f"a key of {name}", start, remedy, minimum=0, maximum=LARGEST_INT32)
        stages[start] = _length(f"{name}[{start}]", length, remedy)
    if 0 not in stages:
        raise ValueError(f"{name} is {dict(schedule)!r}, expected a dict that holds 0; {remedy}")
    return tuple(sorted(stages.items()))
