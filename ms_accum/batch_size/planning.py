"""Find the largest microbatch whose memory, measured in trials, stays within a limit."""
from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Optional

import mindspore as ms

from ..arguments import instance_of, one_of, whole_number
from .process import DEVICES, free_memory
from .trial import run_trial

if TYPE_CHECKING:
    from .trial import MakeStep, Trial


class PlanError(RuntimeError):
    """Report that no microbatch was found.

    Attributes:
        trials: The trials that were run.
    """

    def __init__(self, message: str, trials: Sequence[Trial]) -> None:
        super().__init__(message)
        self.trials = tuple(trials)


@dataclass(frozen=True)
class Plan:
    """Hold the result of `plan_micro_batch`; `str(plan)` is a table of the trials."""

    batch_size: int  # samples
    microbatch: int  # the most samples that fit
    accumulate_step: int  # microbatches in a window
    peak: int  # bytes of memory
    memory_limit: int  # bytes
    trials: tuple[Trial, ...]  # all of them, in order

    def __str__(self) -> str:
        alone = "\nthe batch fits as a whole: you need no accumulation" if self.accumulate_step == 1 else ""
        return (f"{table(self.trials)}\nbatch {self.batch_size:,} = accumulate_step {self.accumulate_step:,} x "
                f"microbatch {self.microbatch:,}: {size(self.peak)} of {size(self.memory_limit)}{alone}")


def plan_micro_batch(make_step: MakeStep, batch_size: int, *, memory_limit: Optional[int] = None,
                     device_target: Optional[str] = None,
                     on_trial: Callable[[Trial], None] = lambda trial: None) -> Plan:
    """Find the largest microbatch that fits into memory, in a few trials, each in a separate process.

        plan = plan_micro_batch(make_step, 1024, memory_limit=4 * 2**30)
        plan.microbatch, plan.accumulate_step  # 256, 4

    A trial builds a step and calls it `accumulate_step + 1` times, past an update, so that all memory that training
    needs is allocated. Trials bisect the divisors of the batch size. A trial that runs out of memory does no harm; on
    CPU, a trial that exceeds the limit is stopped at once. Memory of processes that a trial starts (workers of a
    dataset) is not counted.

    Args:
        make_step: `(microbatch) -> step`: builds network, optimizer, accumulator and data for microbatches of
            `microbatch` samples; `step()` trains on one of them. For a dry run, `(microbatch) -> (step, train_step)`:
            also returns the train step, cell or Accumulator that it built, so that the memory of its update is planned.
            Other processes import the function, so define it at the top level of a module, or of a script that runs its
            own work below `if __name__ == "__main__":`.
        batch_size: Number of samples in the batch of one update.
        memory_limit: Limit in bytes. None: on CPU, 90 % of the memory that is free on this machine and allowed to this
            container; on another device, 90 % of 64 GiB.
        device_target: "CPU", "GPU" or "Ascend". On "CPU", the peak resident memory of the process is measured,
            including MindSpore itself; on "GPU" and "Ascend", `mindspore.runtime.max_memory_reserved` (not tested, for
            lack of the hardware). "Ascend" on a machine without an NPU, or with MindSpore's variable
            `MS_SIMULATION_LEVEL` set, is a dry run, which needs CANN but no device: the step is compiled and its memory
            planned, and all values read as 0. None: MindSpore's current device.
        on_trial: Function that is called with each finished trial, e.g. to show progress.

    Raises:
        TypeError, ValueError: If an argument is of the wrong kind or out of range.
        PlanError: If not even one sample fits, or a trial fails for a reason other than memory.

    Source: PyTorch Lightning's batch size finder and HF Accelerate's `find_executable_batch_size`, which try sizes in
    the training process until one raises an error.

    Example:
        >>> import numpy as np
        >>> from ms_accum.batch_size import plan_micro_batch
        >>> def make_step(microbatch):
        ...     return lambda: np.ones(microbatch * 2**27).sum()  # 1 GiB for each sample
        >>> if __name__ == "__main__":
        ...     plan = plan_micro_batch(make_step, 2, memory_limit=2**31)
        ...     print(plan.microbatch, plan.accumulate_step)
        1 2
    """
    instance_of("make_step", make_step, Callable, "a function `(microbatch) -> step`")
    device_target = one_of("device_target", device_target, (*DEVICES, None)) or ms.get_context("device_target")
    batch_size = whole_number("batch_size", batch_size, "give the samples of an update")
    memory_limit = (free_memory(device_target) if memory_limit is None
                    else whole_number("memory_limit", memory_limit, "give bytes, e.g. 4 * 2**30, or None"))
    trials: list[Trial] = []

    def fits(microbatch: int) -> bool:
        trial = run_trial(make_step, microbatch, batch_size // microbatch, device_target, memory_limit)
        trials.append(trial)
        on_trial(trial)
        if trial.ended == "failed":
            raise PlanError(f"the trial of a microbatch of {microbatch:,} failed: {trial.reason}", trials)
        return trial.fits

    descending = candidates(batch_size)
    index = bisect_left(descending, True, key=fits)
    if index == len(descending):
        raise PlanError(f"not even a microbatch of 1 fits into {size(memory_limit)}; allow more memory, or make the "
                        f"network smaller\n{table(trials)}", trials)
    found = next(trial for trial in trials if trial.microbatch == descending[index])
    assert found.peak is not None  # it was completed
    return Plan(batch_size, found.microbatch, found.accumulate_step, found.peak, memory_limit, tuple(trials))


def candidates(batch_size: int) -> list[int]:
    """Return the divisors of a batch size, the largest first."""
    small = [d for d in range(1, int(batch_size**0.5) + 1) if batch_size % d == 0]
    return sorted({*small, *(batch_size // d for d in small)}, reverse=True)


def table(trials: Sequence[Trial]) -> str:
    """Return a table with a line for each trial."""
    lines = ["microbatch  accumulate_step        peak"]
    for trial in sorted(trials, key=lambda trial: trial.microbatch):
        peak = "?" if trial.peak is None else f"{'' if trial.fits else '> '}{size(trial.peak)}"
        lines.append(f"{trial.microbatch:10,}  {trial.accumulate_step:15,}  {peak:>10}  "
                     f"{'fits' if trial.fits else trial.ended}")
    return "\n".join(lines)


def size(number: int) -> str:
    """Return bytes as text, in MiB or GiB."""
    return f"{number / 2**30:.2f} GiB" if number >= 2**30 else f"{number / 2**20:.0f} MiB"
