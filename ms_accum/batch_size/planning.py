"""Which microbatch fits: the largest whose memory, measured in trials, stays within a limit."""
from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Optional

import mindspore as ms

from ..arguments import instance_of, number, one_of, whole_number
from .trial import MakeStep, device_memory, pickled, run_trial

DEVICES = ("CPU", "GPU", "Ascend")
_USED = 0.9  # of the free memory; the rest is left to others
_UNLIMITED = 2**60  # what cgroups write for "no limit" is about 2**63


class PlanError(RuntimeError):
    """No microbatch could be found.

    Attributes:
        trials: The trials that were made.
    """

    def __init__(self, message: str, trials: tuple[Trial, ...]) -> None:
        super().__init__(message)
        self.trials = trials


@dataclass(frozen=True)
class Trial:
    """The result of a trial.

    Attributes:
        microbatch: Samples in a microbatch.
        accumulate_step: How many of them make up the batch.
        peak: Peak memory in bytes; of a trial that was stopped, the peak until then; None if unknown.
        fits: Whether it completed within the limit.
        ended: "completed", "beyond the limit", "out of memory" or "failed".
        seconds: Wall time.
    """

    microbatch: int
    accumulate_step: int
    peak: Optional[int]
    fits: bool
    ended: str
    seconds: float


@dataclass(frozen=True)
class Plan:
    """What `plan_micro_batch` found; `str(plan)` is the table.

    Attributes:
        batch_size: Samples in the batch.
        microbatch: The largest that fits.
        accumulate_step: Microbatches in a window.
        peak: Peak memory of its trial, in bytes.
        memory_limit: In bytes.
        trials: All trials, in order.
    """

    batch_size: int
    microbatch: int
    accumulate_step: int
    peak: int
    memory_limit: int
    trials: tuple[Trial, ...]

    def __str__(self) -> str:
        shorter = "" if self.microbatch * self.accumulate_step == self.batch_size else " (the last one shorter)"
        return (f"{table(self.trials)}\nbatch {self.batch_size:,} = accumulate_step {self.accumulate_step:,} x microbatch "
                f"{self.microbatch:,}{shorter}: {size(self.peak)} of {size(self.memory_limit)}")


def plan_micro_batch(
    make_step: MakeStep,
    batch_size: int,
    *,
    memory_limit: Optional[int] = None,
    device_target: Optional[str] = None,
    timeout: Optional[float] = None,
    on_trial: Callable[[Trial], None] = lambda trial: None,
) -> Plan:
    """Find the largest microbatch whose measured memory fits; few trials, each in a process of its own.

        plan = plan_micro_batch(make_step, 1024, memory_limit=4 * 2**30)
        plan.microbatch, plan.accumulate_step  # 256, 4

    A trial makes a step and calls it `accumulate_step + 1` times, past an update, so that everything that training needs has been
    allocated. Trials bisect the divisors of the batch, for memory grows with the microbatch. Where the divisors leave a gap of more
    than a factor of 2 (a prime batch), microbatches in between are tried, which leave the last one of each window shorter.

    A process that runs out of memory, or is killed for it, costs nothing but its time. On CPU one that exceeds the limit is stopped
    at once. Memory of processes that a trial starts (workers of a dataset) is not counted.

    Args:
        make_step: `(microbatch) -> step`: makes network, optimizer, accumulator and data for microbatches of so many samples;
            `step()` trains on one. Other processes import it, so it has to be a function at the top level of a module, or of a
            script that runs its own work below `if __name__ == "__main__":`. It may return any callable.
        batch_size: Samples in the batch that one update is made of.
        memory_limit: Bytes. None: 90 % of the memory that is free on this machine and allowed to this process (its cgroup), or of
            the memory of another device.
        device_target: "CPU" (measures the peak resident memory of the process, compiler included), "GPU" or "Ascend"
            (`mindspore.runtime.max_memory_reserved`; not run, for lack of the hardware). None: what MindSpore is set to.
        timeout: Seconds for a trial. None: as long as it takes.
        on_trial: Called after each trial, for progress.

    Returns:
        A `Plan`.

    Raises:
        TypeError: If an argument is of the wrong kind.
        ValueError: If one is out of range, `make_step` cannot be imported, or the device is not there.
        PlanError: If not even one sample fits, with the table; or if a trial fails for another reason than memory, or takes longer
            than `timeout`, with its error.

    Source: PyTorch Lightning's batch size finder and HF Accelerate's `find_executable_batch_size` try sizes in the training process
    itself until one raises, so they do not survive a kill, and keep what a failed trial leaves in memory.

    Example:
        >>> import numpy as np
        >>> from ms_accum import plan_micro_batch
        >>> def make_step(microbatch):
        ...     return lambda: np.ones(microbatch * 2**27).sum()  # 1 GiB for each sample
        >>> if __name__ == "__main__":
        ...     plan = plan_micro_batch(make_step, 2, memory_limit=2**31)
        ...     print(plan.microbatch, plan.accumulate_step)
        1 2
    """
    _require_valid(make_step, device_target, timeout)
    batch_size = whole_number("batch_size", batch_size, "give the samples of an update")
    device_target = device_target or ms.get_context("device_target")
    if memory_limit is not None:
        memory_limit = whole_number("memory_limit", memory_limit, "give bytes, e.g. 4 * 2**30, or None")
    else:
        memory_limit = free_memory(device_target)
    trials: list[Trial] = []

    def fits(microbatch: int) -> bool:
        accumulate_step = -(-batch_size // microbatch)
        outcome = run_trial(make_step, microbatch, accumulate_step + 1, device_target, memory_limit=memory_limit, timeout=timeout)
        fitting = outcome.ended == "completed" and outcome.peak <= memory_limit
        ended = "beyond the limit" if outcome.ended == "completed" and not fitting else outcome.ended
        trials.append(Trial(microbatch, accumulate_step, outcome.peak, fitting, ended, outcome.seconds))
        on_trial(trials[-1])
        if outcome.ended == "failed":
            raise PlanError(f"the trial of a microbatch of {microbatch:,} failed: {outcome.reason}", tuple(trials))
        return fitting

    divisors = divisors_of(batch_size)
    found = _largest(divisors, fits)
    if found is None:
        raise PlanError(f"not even a microbatch of 1 fits into {size(memory_limit)}; allow more memory, or make the network smaller\n"
                        f"{table(trials)}", tuple(trials))
    found = _largest(_between(batch_size, found, divisors), fits) or found
    trial = next(trial for trial in trials if trial.microbatch == found)
    return Plan(batch_size, found, trial.accumulate_step, trial.peak, memory_limit, tuple(trials))


# --- what to try ----------------------------------------------------------------------------------------------------------------


def divisors_of(number: int) -> list[int]:
    """Return the divisors of `number`, ascending."""
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


def _between(batch_size: int, found: int, divisors: list[int]) -> list[int]:
    """Return microbatches between `found` and a next divisor that is more than twice as large: for each number of them the smallest."""
    larger = next((d for d in divisors if d > found), found)
    if larger <= 2 * found:
        return []
    sizes = {-(-batch_size // pieces) for pieces in range(batch_size // larger + 1, batch_size // found)}
    return sorted(n for n in sizes if found < n < larger)


def _largest(candidates: Sequence[int], fits: Callable[[int], bool]) -> Optional[int]:
    """Return the largest of ascending candidates that fits, by bisection; None if none does."""
    known, beyond = -1, len(candidates)
    while beyond - known > 1:
        middle = (known + beyond) // 2
        if fits(candidates[middle]):
            known = middle
        else:
            beyond = middle
    return candidates[known] if known >= 0 else None


# --- how much there is ------------------------------------------------------------------------------------------------------------


def free_memory(device_target: str) -> int:
    """Return 90 % of the bytes that a device has, or that are free on this machine and allowed to this process's cgroup."""
    if device_target != "CPU":
        return int(device_memory(device_target) * _USED)
    meminfo = Path("/proc/meminfo").read_text(encoding="ascii")
    free = 1024 * int(re.search(r"^MemAvailable:\s+(\d+)", meminfo, re.MULTILINE)[1])
    return int(min(free, *_cgroups_leave(Path("/proc/self/cgroup"), Path("/sys/fs/cgroup"))) * _USED)


def _cgroups_leave(membership: Path, root: Path) -> list[int]:
    """Return the bytes that each cgroup of this process, and each one above, has left."""
    left = [_UNLIMITED]
    for line in membership.read_text(encoding="utf-8").splitlines() if membership.exists() else ():
        _, controllers, path = line.split(":", 2)
        if controllers not in ("", "memory"):
            continue
        names = ("memory.max", "memory.current") if not controllers else ("memory.limit_in_bytes", "memory.usage_in_bytes")
        folder = root / controllers / path.lstrip("/")
        # A container sees its own cgroup as the root, under the path that it has outside.
        for group in (folder, *folder.parents):
            if group.is_relative_to(root):
                limit, used = (_number(group / name) for name in names)
                if limit is not None and limit < _UNLIMITED:
                    left.append(max(limit - (used or 0) + _reclaimable(group), 0))
    return left


def _reclaimable(group: Path) -> int:
    """Return the bytes of files that the kernel drops from memory before it ends a process."""
    try:
        statistics = dict(line.split() for line in (group / "memory.stat").read_text(encoding="ascii").splitlines())
    except (OSError, ValueError):
        return 0
    return int(statistics.get("total_inactive_file", statistics.get("inactive_file", 0)))


def _number(file: Path) -> Optional[int]:
    try:
        return int(file.read_text(encoding="ascii"))
    except (OSError, ValueError):  # no such file, or "max"
        return None


# --- words --------------------------------------------------------------------------------------------------------------------------


def table(trials: Sequence[Trial]) -> str:
    """Return a table of the trials, a line for each."""
    lines = [_line(trial) for trial in sorted(trials, key=lambda trial: trial.microbatch)]
    return "\n".join(["microbatch  accumulate_step        peak   seconds", *lines])


def _line(trial: Trial) -> str:
    peak = "?" if trial.peak is None else f"{'' if trial.ended == 'completed' else '> '}{size(trial.peak)}"
    return (f"{trial.microbatch:10,}  {trial.accumulate_step:15,}  {peak:>10}  {trial.seconds:8.1f}  "
            f"{'fits' if trial.fits else trial.ended}")


def size(number: int) -> str:
    """Return bytes as text, in MiB or GiB."""
    return f"{number / 2**30:.2f} GiB" if number >= 2**30 else f"{number / 2**20:.0f} MiB"


# --- arguments ----------------------------------------------------------------------------------------------------------------------


def _require_valid(make_step: object, device_target: object, timeout: object) -> None:
    instance_of("make_step", make_step, Callable, "a function `(microbatch) -> step`")
    pickled(make_step)
    one_of("device_target", device_target, (*DEVICES, None))
    if timeout is not None:
        number("timeout", timeout, lambda seconds: seconds > 0, "a number of seconds > 0, or None")
