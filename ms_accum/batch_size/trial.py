"""A trial: run some train steps in a process of their own, and measure their memory. This process survives whatever happens."""
from __future__ import annotations

import os
import pickle
import re
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from time import monotonic
from typing import Any, Optional

import mindspore as ms

MakeStep = Callable[[int], Callable[[], Any]]
_POLL_SECONDS = 0.02
_OUT_OF_MEMORY = re.compile(
    r"MemoryError|bad_alloc|(out of|not enough|cannot allocate) memory|memory not enough|alloc\w* .{0,80}fail", re.IGNORECASE)


@dataclass(frozen=True)
class Outcome:
    """The outcome of a trial.

    Attributes:
        peak: Peak memory in bytes, as far as it was seen; None if unknown.
        ended: "completed", "beyond the limit" (stopped for it), "out of memory", or "failed".
        reason: Why it failed, in one line.
        seconds: Wall time.
    """

    peak: Optional[int]
    ended: str
    reason: str
    seconds: float


def run_trial(make_step: MakeStep, microbatch: int, steps: int, device_target: str, *, memory_limit: Optional[int] = None,
              timeout: Optional[float] = None) -> Outcome:
    """Make a step for `microbatch` in a new process and call it `steps` times.

    See `planning.plan_micro_batch`. On CPU, the process is stopped once it holds more than `memory_limit` bytes. After `timeout`
    seconds, the trial counts as failed. ValueError if another process cannot import `make_step`.
    """
    # On other devices, the memory of the process is not what is limited.
    watched = memory_limit if device_target == "CPU" else None
    return _in_a_process(partial(_measure, pickled(make_step), microbatch, steps, device_target), watched, timeout)


def device_memory(device_target: str) -> int:
    """Return the bytes of memory of the first GPU or NPU. ValueError if there is none. (Not run: it needs the hardware.)"""
    outcome = _in_a_process(partial(_device_memory, device_target), None, None)
    if outcome.ended != "completed":
        raise ValueError(f"the memory of {device_target} is unknown ({outcome.reason}); give a memory limit, or another device")
    return outcome.peak


def pickled(make_step: MakeStep) -> bytes:
    """Pickle `make_step` by its module and name. ValueError if another process would not find it."""
    remedy = "define it with `def` at the top level of a module or script (functools.partial of such a function works, too)"
    if getattr(make_step, "__module__", None) == "__main__":
        file = getattr(sys.modules["__main__"], "__file__", None)
        if file is None or not Path(file).is_file():
            raise ValueError(f"make_step is {_name(make_step)}, defined in an interactive session, which the processes of the trials "
                             "cannot import; save it in a file")
    try:
        return pickle.dumps(make_step)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ValueError(f"make_step is {_name(make_step)}, which the processes of the trials cannot import ({error}); {remedy}") from error


def _name(function: object) -> str:
    return getattr(function, "__qualname__", None) or f"of type {type(function).__name__}"


# --- this side: start, watch, stop --------------------------------------------------------------------------------------------


def _in_a_process(work: Callable[[], int], memory_limit: Optional[int], timeout: Optional[float]) -> Outcome:
    context = get_context("spawn")
    start = monotonic()
    with TemporaryDirectory() as folder:
        log = Path(folder) / "output"
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=_child, args=(sender, str(log), work))
        process.start()
        sender.close()
        try:
            peak, ended, reason = _watch(process, receiver, memory_limit, timeout)
        finally:
            _stop(process)
            receiver.close()
        if ended == "died":
            ended, reason = _cause_of_death(process.exitcode, log)
    return Outcome(peak, ended, reason, monotonic() - start)


def _watch(process: Any, receiver: Connection, memory_limit: Optional[int], timeout: Optional[float]) -> tuple[Optional[int], str, str]:
    """Return peak, how it ended and why, as soon as that is known."""
    seen, start = None, monotonic()
    while not receiver.poll(_POLL_SECONDS):
        resident = _resident(process.pid)
        seen = max(filter(None, (seen, resident)), default=None)
        if memory_limit is not None and seen is not None and seen > memory_limit:
            return seen, "beyond the limit", ""
        if timeout is not None and monotonic() - start > timeout:
            return seen, "failed", f"it was not done within {timeout:g} s"
        if not process.is_alive() and not receiver.poll(0):
            return seen, "died", ""
    try:
        peak, error = receiver.recv()
    except EOFError:
        process.join()
        return seen, "died", ""
    if error is None:
        beyond = memory_limit is not None and peak > memory_limit
        return peak, "beyond the limit" if beyond else "completed", ""
    return seen, "out of memory" if _OUT_OF_MEMORY.search(error) else "failed", error


def _stop(process: Any) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)  # its children, too; if it has no group of its own yet, it has none
    process.kill()
    process.join()


def _cause_of_death(status: int, log: Path) -> tuple[str, str]:
    if status == -signal.SIGKILL:
        return "out of memory", ""
    lines = log.read_text(encoding="utf-8", errors="replace").split("\n") if log.exists() else []
    last = next((line.strip() for line in reversed(lines) if line.strip()), "")
    ended = "out of memory" if status < 0 and any(map(_OUT_OF_MEMORY.search, lines[-20:])) else "failed"
    how = f"signal {signal.Signals(-status).name}" if status < 0 else f"status {status}"
    hint = last or 'before it began; a script needs `if __name__ == "__main__":` around what is not to run in each trial'
    return ended, f"its process ended with {how}: {hint}" if last else f"its process ended with {how} {hint}"


def _resident(pid: int) -> Optional[int]:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError):
        return None  # it has just ended


# --- the other side -----------------------------------------------------------------------------------------------------------


def _child(sender: Connection, log: str, work: Callable[[], int]) -> None:
    with suppress(PermissionError):
        os.setsid()
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(output, stream)
    with suppress(OSError):
        # If the machine runs out of memory all the same, the kernel ends this process and no other.
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")
    try:
        answer = work(), None
    except BaseException as error:
        answer = None, _one_line(error)
    sender.send(answer)


def _measure(make_step: bytes, microbatch: int, steps: int, device_target: str) -> int:
    if ms.get_context("device_target") != device_target:
        ms.set_device(device_target)
    step = pickle.loads(make_step)(microbatch)
    if not callable(step):
        raise TypeError(f"make_step({microbatch}) returned {type(step).__name__}, expected a function that runs one train step")
    for _ in range(steps):
        step()
    ms.runtime.synchronize()
    return _peak_rss() if device_target == "CPU" else ms.runtime.max_memory_reserved()


def _peak_rss() -> int:
    # Not resource.ru_maxrss, which starts from what the process that started this one had.
    lines = Path("/proc/self/status").read_text(encoding="ascii", errors="replace").split("\n")
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


def _device_memory(device_target: str) -> int:
    ms.set_device(device_target)
    return ms.hal.get_device_properties(0).total_memory


def _one_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).split("\n") if line.strip()]
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
