"""When a window closes: after a number of microbatches, by a schedule of updates, or by the weight that it holds."""
from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import inf
from typing import Union

import mindspore as ms
from mindspore import Tensor, ops

from .arguments import LARGEST_INT32, instance_of, number, whole_number
from .batch_size.adaptive import AdaptiveLength, AdaptiveWindow
from .batch_size.schedules import Schedule


@dataclass(frozen=True)
class UntilWeight:
    """What `until_weight` returns."""

    budget: float
    at_most: int


AccumulateStep = Union[int, Mapping[int, int], Callable[[Tensor], Union[int, Tensor]], UntilWeight, AdaptiveWindow]

_FEW = 4  # more stages are looked up: a kernel for each would cost more
_COMPARED = (0, *(2**i for i in range(17)))
_CHECKED = sorted({*range(1001), *(2**i for i in range(31))})
_REMEDY = ("give an int >= 1, a dict {update_step: n} that holds 0, a function of the update count, "
           "until_weight(65_536) or AdaptiveWindow()")


@ms.jit_class
class Window:
    """The length of the window that leads to the next update, and the weight that closes it before.

        length(update_step) = accumulate_step                                    # int
                            = n of the largest start <= update_step              # {start: n}, piecewise constant
                            = max(accumulate_step(update_step), 1)               # callable
                            = at_most                                            # until_weight(budget, at_most)
                            = what the noise scale asked for                     # AdaptiveWindow()

    `update_step` only changes when a window closes, so a window keeps its length from its first
    microbatch to its last. The dict form is Lightning's `GradientAccumulationScheduler`, counted in updates
    instead of epochs; the callable is that of `optax.MultiSteps(every_k_schedule=...)`.

    Args:
        accumulate_step: Microbatches in a window, each >= 1. A callable takes the number of updates done
            (int32 Tensor of shape `()`) and returns an int or an integer Tensor of shape `()`. It is compiled here, to
            refuse what graph mode cannot run, and called with 0 to 1000 and the powers of two up to 2**30, to refuse
            lengths below 1. Elsewhere a length below 1 counts as 1.

    Attributes:
        budget: The weight on each rank that closes the window before it has its length; None: no weight does.
        adaptive: The state of an `AdaptiveWindow`; None without one.

    Raises:
        TypeError: If `accumulate_step`, or a key or value of it, is not an integer (bool and float included), or the
            callable cannot be compiled or returns no integer.
        ValueError: If a length is below 1, a key is negative, either is above 2**31 - 1, or a dict lacks the key 0.
    """

    def __init__(self, accumulate_step: AccumulateStep) -> None:
        self.schedule, self.samples = None, ()
        self.stages, self.budget, self.adaptive = ((0, 1),), None, None
        if accumulate_step is until_weight or accumulate_step is AdaptiveWindow:
            raise TypeError(f"accumulate_step is {accumulate_step.__name__} itself, expected what it returns; give "
                            f"{'until_weight(65_536)' if accumulate_step is until_weight else 'AdaptiveWindow()'}, say")
        if isinstance(accumulate_step, Schedule):
            raise TypeError("accumulate_step is a whole schedule, expected its lengths; give schedule.accumulate_step, "
                            "and schedule.learning_rate to the optimizer")
        if isinstance(accumulate_step, UntilWeight):
            self.stages, self.budget = ((0, accumulate_step.at_most),), accumulate_step.budget
        elif isinstance(accumulate_step, AdaptiveWindow):
            self.adaptive, self._choice = AdaptiveLength(accumulate_step), repr(accumulate_step)
        elif isinstance(accumulate_step, Mapping):
            self.stages = _stages("accumulate_step", accumulate_step, _REMEDY)
        elif callable(accumulate_step):
            self.schedule, self.samples = accumulate_step, _sampled(accumulate_step)
        else:
            self.stages = ((0, _length("accumulate_step", accumulate_step, _REMEDY)),)

    def describe(self) -> str:
        """Return the same text for the same lengths; functions are compared at 0, 1, 2, 4, 8, … 2**16 updates."""
        if self.schedule is not None:
            return f"a function with lengths {self.samples}"
        if self.adaptive is not None:
            return self._choice
        if self.budget is not None:
            return f"until_weight({self.budget:.9g}, at_most={self.stages[0][1]})"
        return str(dict(self.stages) if len(self.stages) > 1 else self.stages[0][1])

    @property
    def is_one(self) -> bool:
        """Whether each window holds one microbatch."""
        return self.schedule is None and self.adaptive is None and self.stages == ((0, 1),)

    def length(self, update_step: Tensor) -> Union[int, Tensor]:
        """Return the length of the window that starts after `update_step` updates (int32 Tensor of shape `()`)."""
        if self.schedule is not None:
            return ops.maximum(self.schedule(update_step), ops.ones_like(update_step))
        if self.adaptive is not None:
            return self.adaptive.length + 0
        if len(self.stages) > _FEW:
            starts, lengths = zip(*self.stages)
            begun = (Tensor(starts, ms.int32) <= update_step).astype(ms.int32).sum(-1)
            return ops.gather(Tensor(lengths, ms.int32), begun - 1, 0)
        length = self.stages[0][1]
        for start, stage_length in self.stages[1:]:
            length = ops.where(update_step >= start, stage_length, length)
        return length

    def host_length(self, update_step: int) -> int:
        """Return what `length` returns, as an int; a schedule is run op by op, and `adaptive` waits for the device."""
        if self.schedule is not None or self.adaptive is not None:
            return int(self.length(Tensor(update_step, ms.int32)))
        return next(length for start, length in reversed(self.stages) if start <= update_step)


def until_weight(budget: float, at_most: int = LARGEST_INT32) -> UntilWeight:
    """Close each window with the microbatch that brings its weight to `budget`: `accumulate_step=until_weight(65_536)`.

    For microbatches of uneven weight (tokens, say): updates then stand for about the same number of tokens each, not of
    microbatches. The weights are those of `weight_fn`, or the numbers of samples; with several losses, those of the
    first one. A window holds at least one microbatch, and it is not cut: it may exceed the budget by less than its last
    microbatch. Learning rates count updates, as always.

    With several ranks, the budget is that of one rank. With `sync="window"`, each rank closes a window when its own
    share is full, and the exchange makes one update of all; ranks may differ in their numbers of microbatches. With
    `sync="microbatch"`, it closes when the weights of all ranks reach `budget` times their number; with `sync="node"`,
    the same for the ranks of each node.

    With `strategy="split"`, the host reads the window's weight after each microbatch, which waits for the device.

    Args:
        budget: Weight > 0.
        at_most: Microbatches in a window, at most; it bounds windows of little weight.

    Raises:
        TypeError: If an argument is of the wrong kind.
        ValueError: If an argument is out of range. When the Accumulator is made, with `reduction="sum"`, which does not
            add up weights, or on several ranks with `sync="window"` and `on_nonfinite="skip_microbatch"`, where ranks
            have to close their windows after the same number of microbatches.

    Example:
        >>> import numpy as np, mindspore as ms
        >>> from mindspore import nn
        >>> from ms_accum import make_train_step, until_weight
        >>> network = nn.Dense(2, 1)
        >>> def forward_fn(x):
        ...     return network(x).mean()
        >>> optimizer = nn.SGD(network.trainable_params(), learning_rate=0.5)
        >>> train_step = make_train_step(forward_fn, optimizer, accumulate_step=until_weight(10))
        >>> for samples in (4, 4, 4, 12, 3):
        ...     loss = train_step(ms.Tensor(np.ones((samples, 2), np.float32)))
        ...     print(samples, bool(train_step.updated))
        4 False
        4 False
        4 True
        12 True
        3 False

    Source: budgets of tokens in place of numbers of rows are common in training language models; fairseq's
    `--max-tokens` bounds a batch so.
    """
    budget = number("budget", budget, lambda weight: 0 < weight < inf, "a finite number > 0", "give a weight")
    return UntilWeight(budget, _length("at_most", at_most, "give the most microbatches that a window may hold"))


def by_epoch(schedule: Mapping[int, int], microbatches: int) -> dict[int, int]:
    """Convert a schedule of epochs to one of updates, for `Accumulator(accumulate_step=...)`.

        accumulate_step = by_epoch({0: 1, 5: 4}, microbatches=1875)  # from the sixth epoch on, 4 microbatches in a
        window

    It is exact if every epoch has `microbatches` microbatches on each rank and ends in a
    flush, and as long as no window is skipped: a skipped window does not count as an update.

    Args:
        schedule: `{epoch: n}`: from this epoch on (counted from 0), n microbatches in a window; holds 0.
        microbatches: Microbatches in an epoch.

    Returns:
        `{update_step: n}`.

    Raises:
        TypeError: If `schedule` is not a dict of integers, or `microbatches` not an integer.
        ValueError: If a number is out of range, or `schedule` lacks the key 0.

    Source: Lightning's `GradientAccumulationScheduler`, which counts epochs.

    Example:
        >>> from ms_accum import by_epoch
        >>> print(by_epoch({0: 1, 2: 4}, microbatches=10))
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


def _sampled(schedule: Callable) -> tuple[int, ...]:
    """Check a schedule, and return its lengths at `_COMPARED` updates."""
    name = f"accumulate_step={getattr(schedule, '__name__', schedule)!r}"
    try:
        compiled = ms.jit(schedule)
        first = compiled(Tensor(0, ms.int32))
    except Exception as error:
        reason = str(error).strip().split("\n")[0]
        raise TypeError(f"{name} cannot be compiled in graph mode ({reason}); "
                        "define it with `def`, on tensors, without NumPy or print") from error
    if isinstance(first, Tensor) and first.shape != ():
        raise TypeError(f"{name} returned a Tensor of shape {first.shape} for update 0, expected shape (); {_REMEDY}")
    for update in _CHECKED:  # op by op: a compiled branch takes 0.3 ms, on a busy machine 7
        _scheduled(schedule, update, name)
    return tuple(_scheduled(compiled, update, name) for update in _COMPARED)


def _scheduled(schedule: Callable, update: int, name: str) -> int:
    length = schedule(Tensor(update, ms.int32))
    length = length.asnumpy().item() if isinstance(length, Tensor) else length
    return _length(f"{name} at update {update}", length, "return an int of at least 1, e.g. ops.maximum(..., 1)")
