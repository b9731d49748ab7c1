"""Find the largest microbatch whose memory, measured in trials, stays within a limit."""
from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Optional

import mindspore as ms

from ..arguments import instance_of, number, one_of, whole_number
from .dry_run import is_dry_run
from .trial import MakeStep, device_memory, pickled, require_ascend, run_trial

DEVICES = ("CPU", "GPU", "Ascend")
_USED = 0.9  # of the free memory; the rest is left to other processes
_UNLIMITED = 2**60  # what cgroups write for "no limit" is about 2**63
_DRY_RUN = "dry run: memory is planned by MindSpore's Ascend backend; nothing was launched, times are not measured"


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
    """The result of a trial."""

    microbatch: int  # samples
    accumulate_step: int  # microbatches in a window
    peak: Optional[int]  # bytes of memory; of a trial that was stopped, the peak until then; None if unknown
    fits: bool
    ended: str  # "completed", "beyond the limit", "out of memory" or "failed"
    seconds: Optional[float]  # None in a dry run


@dataclass(frozen=True)
class Plan:
    """The result of `plan_micro_batch`; `str(plan)` is the table."""

    batch_size: int  # samples
    microbatch: int  # the most samples that fit
    accumulate_step: int  # microbatches in a window
    peak: int  # bytes of memory
    memory_limit: int  # bytes
    trials: tuple[Trial, ...]  # all of them, in order

    def __str__(self) -> str:
        smaller = "" if self.microbatch * self.accumulate_step == self.batch_size else " (the last one smaller)"
        return (f"{table(self.trials)}\nbatch {self.batch_size:,} = accumulate_step {self.accumulate_step:,} x "
                f"microbatch {self.microbatch:,}{smaller}: {size(self.peak)} of {size(self.memory_limit)}")


def plan_micro_batch(make_step: MakeStep, batch_size: int, *, memory_limit: Optional[int] = None,
                     device_target: Optional[str] = None, timeout: Optional[float] = None,
                     on_trial: Callable[[Trial], None] = lambda trial: None) -> Plan:
    """Find the largest microbatch whose measured memory fits, in few trials, each in a separate process.

        plan = plan_micro_batch(make_step, 1024, memory_limit=4 * 2**30)
        plan.microbatch, plan.accumulate_step  # 256, 4

    A trial makes a step and calls it `accumulate_step + 1` times, past an update, so that everything that training
    needs has been allocated. Memory grows with the microbatch, so trials bisect the divisors of the batch. Where the
    divisors leave a gap of more than a factor of 2 (a prime batch), microbatches in between are tried; they leave a
    smaller last one in each window. A process that runs out of memory, or is killed for it, costs nothing but its time.
    On CPU, a process that exceeds the limit is stopped at once. Memory of processes that a trial starts (workers of a
    dataset) is not counted.

    Args:
        make_step: `(microbatch) -> step`: makes network, optimizer, accumulator and data for microbatches of that many
            samples; `step()` trains on one. Other processes import it, so it has to be a function at the top level of a
            module, or of a script that runs its own work below `if __name__ == "__main__":`. It may return any
            callable.
        batch_size: Samples in the batch that one update is made of.
        memory_limit: Bytes. None: 90 % of the memory that is free on this machine and allowed to this process (its
            cgroup), or of the memory of another device: of 64 GiB in a dry run.
        device_target: "CPU" (measures the peak resident memory of the process, compiler included), "GPU" or "Ascend"
            (`mindspore.runtime.max_memory_reserved`; not run, for lack of the hardware). "Ascend" on a machine without
            an NPU, or with MindSpore's variable `MS_SIMULATION_LEVEL` set, is a dry run: its Ascend backend compiles
            the step and plans its memory, but launches nothing, so values read as 0, and there are no times. That
            needs CANN, but no device. None: MindSpore's current device.
        timeout: Seconds for a trial. None: no limit.
        on_trial: Called after each trial, to show progress.

    Returns:
        A `Plan`.

    Raises:
        TypeError: If an argument is of the wrong kind.
        ValueError: If one is out of range, `make_step` cannot be imported, or the device (in a dry run, CANN) is not
            there.
        PlanError: If not even one sample fits, with the table; or with the trial's error, if a trial takes longer than
            `timeout` or fails for another reason than memory.

    Source: PyTorch Lightning's batch size finder and HF Accelerate's `find_executable_batch_size` try sizes in the
    training process itself until one raises, so they do not survive a kill, and keep what a failed trial leaves in
    memory.

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
    pickled(make_step)
    device_target = one_of("device_target", device_target, (*DEVICES, None)) or ms.get_context("device_target")
    if timeout is not None:
        number("timeout", timeout, lambda seconds: seconds > 0, "a number of seconds > 0, or None")
    batch_size = whole_number("batch_size", batch_size, "give the samples of an update")
    memory_limit = (free_memory(device_target) if memory_limit is None
                    else whole_number("memory_limit", memory_limit, "give bytes, e.g. 4 * 2**30, or None"))
    if is_dry_run(device_target):
        require_ascend()
    trials: list[Trial] = []

    def fits(microbatch: int) -> bool:
        accumulate_step = -(-batch_size // microbatch)
        outcome = run_trial(make_step, microbatch, accumulate_step + 1, device_target, memory_limit=memory_limit,
                            timeout=timeout)
        ended = outcome.ended
        if ended == "completed" and outcome.peak > memory_limit:
            ended = "beyond the limit"
        trials.append(Trial(microbatch, accumulate_step, outcome.peak, ended == "completed", ended, outcome.seconds))
        on_trial(trials[-1])
        if ended == "failed":
            zeros = " (in a dry run, every value that the step reads is 0)" if is_dry_run(device_target) else ""
            raise PlanError(f"the trial of a microbatch of {microbatch:,} failed: {outcome.reason}{zeros}",
                            tuple(trials))
        return trials[-1].fits

    divisors = divisors_of(batch_size)
    found = _largest(divisors, fits)
    if found is None:
        raise PlanError(f"not even a microbatch of 1 fits into {size(memory_limit)}; allow more memory, or make the "
                        f"network smaller\n{table(trials)}", tuple(trials))
    found = _largest(_between(batch_size, found, divisors), fits) or found
    trial = next(trial for trial in trials if trial.microbatch == found)
    return Plan(batch_size, found, trial.accumulate_step, trial.peak, memory_limit, tuple(trials))


def divisors_of(number: int) -> list[int]:
    """Return the divisors of `number`, ascending."""
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


def _between(batch_size: int, found: int, divisors: list[int]) -> list[int]:
    """Return microbatches, one for each window length, between `found` and a next divisor more than twice as large."""
    larger = next((d for d in divisors if d > found), found)
    if larger <= 2 * found:
        return []
    sizes = {-(-batch_size // pieces) for pieces in range(batch_size // larger + 1, batch_size // found)}
    return sorted(n for n in sizes if found < n < larger)


def _largest(candidates: Sequence[int], fits: Callable[[int], bool]) -> Optional[int]:
    """Return the largest of ascending candidates that fits, by bisection; None if none does."""
    descending = candidates[::-1]
    index = bisect_left(descending, True, key=fits)
    return descending[index] if index < len(descending) else None


def free_memory(device_target: str) -> int:
    """Return 90 % of the bytes that a device has, or that are free on this machine and left to this cgroup."""
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
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes") if controllers else ("memory.max", "memory.current")
        folder = root / controllers / path.lstrip("/")
        # A container sees its own cgroup as the root, under the path that it has outside.
        for group in (folder, *folder.parents):
            limit, used = (_numbers(group / name).get("", default) for name, default in zip(names, (_UNLIMITED, 0)))
            if group.is_relative_to(root) and limit < _UNLIMITED:
                # The kernel drops inactive files from memory before it ends a process.
                files = _numbers(group / "memory.stat")
                left.append(max(limit - used + files.get("total_inactive_file", files.get("inactive_file", 0)), 0))
    return left


def _numbers(file: Path) -> dict[str, int]:
    """Return the numbers in a file of a cgroup by the names before them; none if there is no such file."""
    try:
        lines = file.read_text(encoding="ascii")
    except OSError:
        return {}
    return {name: int(value) for name, value in re.findall(r"^(?:([a-z]\w*) )?(\d+)$", lines, re.MULTILINE)}


def table(trials: Sequence[Trial]) -> str:
    """Return a table of the trials, a line for each."""
    lines = ["microbatch  accumulate_step        peak   seconds"]
    for trial in sorted(trials, key=lambda trial: trial.microbatch):
        at_least = "" if trial.ended == "completed" or trial.seconds is None else "> "
        peak = "?" if trial.peak is None else f"{at_least}{size(trial.peak)}"
        seconds = "-" if trial.seconds is None else f"{trial.seconds:.1f}"
        lines.append(f"{trial.microbatch:10,}  {trial.accumulate_step:15,}  {peak:>10}  {seconds:>8}  "
                     f"{'fits' if trial.fits else trial.ended}")
    return "\n".join([*lines, _DRY_RUN] if any(trial.seconds is None for trial in trials) else lines)


def size(number: int) -> str:
    """Return bytes as text, in MiB or GiB."""
    return f"{number / 2**30:.2f} GiB" if number >= 2**30 else f"{number / 2**20:.0f} MiB"
