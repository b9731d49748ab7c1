"""When a window closes: an int, a schedule `{update_step: n}`, or a callable of the update count."""
from __future__ import annotations

from collections.abc import Callable, Mapping
from operator import index
from typing import Union

import mindspore as ms
import numpy as np
from mindspore import Tensor, ops

AccumulateStep = Union[int, Mapping[int, int], Callable[[Tensor], Union[int, Tensor]]]

_LARGEST = 2**31 - 1  # counters are int32, and a larger constant would wrap around in the comparison with them
_COMPARED = (0, *(2**i for i in range(17)))
_CHECKED = sorted({*range(1001), *(2**i for i in range(31))})
_REMEDY = "give an int >= 1, a dict {update_step: n} that holds 0, or a function of the update count"


@ms.jit_class
class Window:
    """The length of the window that leads to the next update.

        length(update_step) = accumulate_step                                    # int
                            = n of the largest start <= update_step              # {start: n}, piecewise constant
                            = max(accumulate_step(update_step), 1)               # callable

    `update_step` only changes when a window closes, so a window keeps its length from its first
    microbatch to its last. The dict form is Lightning's `GradientAccumulationScheduler`, counted in updates
    instead of epochs; the callable is that of `optax.MultiSteps(every_k_schedule=...)`.

    Args:
        accumulate_step: Microbatches in a window, each >= 1. A callable takes the number of updates done
            (int32 Tensor of shape `()`) and returns an int or an integer Tensor of shape `()`. It is compiled here, to
            refuse what graph mode cannot run, and called with 0 to 1000 and the powers of two up to 2**30, to refuse
            lengths below 1. Elsewhere a length below 1 counts as 1.

    Raises:
        TypeError: If `accumulate_step`, or a key or value of it, is no integer (bool and float included), or the
            callable cannot be compiled or returns no integer.
        ValueError: If a length is below 1, a key is negative, either is above 2**31 - 1, or a dict is empty or lacks the key 0.
    """

    def __init__(self, accumulate_step: AccumulateStep) -> None:
        self.schedule, self.samples = None, ()
        self.stages = ((0, 1),)
        if isinstance(accumulate_step, Mapping):
            self.stages = _stages(accumulate_step)
        elif callable(accumulate_step):
            self.schedule, self.samples = _checked_schedule(accumulate_step)
        else:
            self.stages = ((0, _length(accumulate_step, "accumulate_step")),)

    def describe(self) -> str:
        """The same text for the same lengths; of a function, those at 0, 1, 2, 4, 8, … 2**16 updates are compared."""
        if self.schedule is not None:
            return f"a function with lengths {self.samples}"
        return str(dict(self.stages) if len(self.stages) > 1 else self.stages[0][1])

    def length(self, update_step: Tensor) -> Union[int, Tensor]:
        """Microbatches in the window that starts after `update_step` updates (int32 Tensor of shape `()`)."""
        if self.schedule is not None:
            return ops.maximum(self.schedule(update_step), ops.ones_like(update_step))
        length = self.stages[0][1]
        for start, stage_length in self.stages[1:]:
            length = ops.where(update_step >= start, stage_length, length)
        return length


def by_epoch(schedule: Mapping[int, int], microbatches: int) -> dict[int, int]:
    """A schedule of epochs as one of updates, for `Accumulator(accumulate_step=...)`.

        accumulate_step = by_epoch({0: 1, 5: 4}, microbatches=1875)  # from the sixth epoch on, 4 microbatches in a window

    Exact if every epoch has `microbatches` microbatches on each rank and ends in a
    flush, and as long as no window is skipped: a skipped window does not count as an update.

    Args:
        schedule: `{epoch: n}`: from this epoch on (counted from 0), n microbatches in a window; holds 0.
        microbatches: Microbatches in an epoch.

    Returns:
        `{update_step: n}`.

    Raises:
        TypeError: If `schedule` is no dict of integers, or `microbatches` no integer.
        ValueError: If a number is out of range, or `schedule` lacks the key 0.

    Source: Lightning's `GradientAccumulationScheduler`, which counts epochs.

    Example:
        >>> from ms_accum import by_epoch
        >>> print(by_epoch({0: 1, 2: 4}, microbatches=10))
        {0: 1, 20: 4}
    """
    if not isinstance(schedule, Mapping):
        raise TypeError(f"schedule is of type {type(schedule).__name__}, expected a dict {{epoch: n}}")
    stages = _stages(schedule, "schedule", "epochs")
    microbatches = _length(microbatches, "microbatches")
    updates, previous, lengths = 0, stages[0], {}
    for epoch, length in stages:
        updates += (epoch - previous[0]) * -(-microbatches // previous[1])
        lengths[updates] = length
        previous = epoch, length
    return lengths


def _integer(value: object, name: str) -> int:
    try:
        if isinstance(value, (bool, np.bool_)):
            raise TypeError
        integer = index(value)
    except (TypeError, ValueError):  # ValueError: a Tensor of several elements
        raise TypeError(f"{name} is {value!r} of type {type(value).__name__}, expected an integer; {_REMEDY}") from None
    if integer > _LARGEST:
        raise ValueError(f"{name} is {integer}, expected at most {_LARGEST}: counters are int32; {_REMEDY}")
    return integer


def _length(value: object, name: str) -> int:
    length = _integer(value, name)
    if length < 1:
        raise ValueError(f"{name} is {length}, but a window holds at least 1 microbatch; {_REMEDY}")
    return length


def _stages(schedule: Mapping[int, int], name: str = "accumulate_step", counted: str = "updates") -> tuple[tuple[int, int], ...]:
    stages = {}
    for start, length in schedule.items():
        start = _integer(start, f"a key of {name}")
        if start < 0:
            raise ValueError(f"{name} has the key {start}, but {counted} are counted from 0; {_REMEDY}")
        stages[start] = _length(length, f"{name}[{start}]")
    if 0 not in stages:
        raise ValueError(f"{name} is {dict(schedule)!r}, which says nothing about {counted[:-1]} 0; {_REMEDY}")
    return tuple(sorted(stages.items()))


def _checked_schedule(schedule: Callable) -> tuple[Callable, tuple[int, ...]]:
    """The schedule, and what it says at some numbers of updates."""
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
    return schedule, tuple(_scheduled(compiled, update, name) for update in _COMPARED)


def _scheduled(schedule: Callable, update: int, name: str) -> int:
    length, name = schedule(Tensor(update, ms.int32)), f"{name} at update {update}"
    length = _integer(length.asnumpy().item() if isinstance(length, Tensor) else length, name)
    if length < 1:
        raise ValueError(f"{name} is {length}, but a window holds at least 1 microbatch; return ops.maximum(..., 1)")
    return length
