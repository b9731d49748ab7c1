"""Run train steps in a separate process, which may fail in any way, and measure them, at first their memory."""
from __future__ import annotations

import os
import pickle
import re
import signal
import sys
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from tempfile import TemporaryDirectory
from time import monotonic
from typing import Any, Optional

import mindspore as ms

from . import dry_run
from .dry_run import is_dry_run

MakeStep = Callable[..., Callable[[], Any]]
_POLL_SECONDS = 0.02
_OUT_OF_MEMORY = re.compile(r"MemoryError|bad_alloc|(out of|not enough|cannot allocate) memory|memory not enough|"
                            r"alloc\w* .{0,80}fail", re.IGNORECASE)


@dataclass(frozen=True)
class Outcome:
    """How work in a separate process ended."""

    peak: Optional[int]  # bytes of memory; if it did not complete, the most that was seen; None if unknown
    ended: str  # "completed", "beyond the limit" (stopped for it), "out of memory", or "failed"
    reason: str  # why it failed, in one line
    seconds: Optional[float]  # None in a dry run
    result: Any = None  # what the work returned


def run_trial(make_step: MakeStep, microbatch: int, steps: int, device_target: str, *,
              memory_limit: Optional[int] = None, timeout: Optional[float] = None) -> Outcome:
    """Make a step for `microbatch` in a new process and call it `steps` times; see `planning.plan_micro_batch`.

    On CPU, the process is stopped once it holds more than `memory_limit` bytes. After `timeout` seconds, the trial
    counts as failed. ValueError if another process cannot import `make_step`.
    """
    work = partial(_measure, pickled(make_step), microbatch, steps, device_target)
    outcome = in_a_process(work, device_target, memory_limit, timeout)
    return replace(outcome, peak=outcome.result) if outcome.ended == "completed" else outcome


def require_ascend() -> None:
    """Raise ValueError if the Ascend backend, which a dry run needs, cannot be loaded, with what is missing."""
    outcome = in_a_process(dry_run.missing, "Ascend")
    missing = outcome.result if outcome.ended == "completed" else outcome.reason
    if missing:
        raise ValueError(f"no CANN for a dry run: {missing}; install CANN's toolkit (no device is needed) and source "
                         "its set_env.sh")


def device_memory(device_target: str) -> int:
    """Return the bytes of memory of the first GPU or NPU. ValueError if there is none. (Not run, for lack of one.)"""
    if is_dry_run(device_target):
        return dry_run.DEVICE_MEMORY
    outcome = in_a_process(partial(_device_memory, device_target), device_target)
    if outcome.ended != "completed":
        raise ValueError(f"the memory of {device_target} is unknown ({outcome.reason}); give a memory limit, or "
                         "another device")
    return outcome.result


def pickled(make_step: MakeStep) -> bytes:
    """Pickle `make_step` by its module and name. ValueError if another process would not find it."""
    name = getattr(make_step, "__qualname__", None) or f"of type {type(make_step).__name__}"
    if getattr(make_step, "__module__", None) == "__main__":
        file = getattr(sys.modules["__main__"], "__file__", None)
        if file is None or not Path(file).is_file():
            raise ValueError(f"make_step is {name}, defined in an interactive session, which the processes of the "
                             "trials cannot import; save it in a file")
    try:
        return pickle.dumps(make_step)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ValueError(f"make_step is {name}, which the processes of the trials cannot import ({error}); define it "
                         "with `def` at the top level of a module or script (functools.partial of such a function "
                         "works, too)") from error


def in_a_process(work: Callable[[], Any], device_target: str, memory_limit: Optional[int] = None,
                 timeout: Optional[float] = None) -> Outcome:
    """Call `work` in a new process, and stop it as `run_trial` does."""
    context = get_context("spawn")
    if device_target != "CPU":
        memory_limit = None  # it is not one of the memory of the process
    dry, start = is_dry_run(device_target), monotonic()
    with TemporaryDirectory() as folder:
        log = Path(folder, "output")
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=_child, args=(sender, str(log), work))
        with dry_run.environment(folder) if dry else nullcontext():
            process.start()
        sender.close()
        try:
            result, peak, ended, reason = _watch(process, receiver, memory_limit, timeout)
        finally:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)  # its children, too; before it has its own group, it has none
            process.kill()
            process.join()
            receiver.close()
        if ended == "died":
            ended, reason = _cause_of_death(process.exitcode, log)
    if dry and ended == "out of memory":
        ended, reason = "failed", "this machine ran out of memory, not the NPU that is planned for"
    # What was seen is the memory of the process.
    return Outcome(peak if device_target == "CPU" else None, ended, reason, None if dry else monotonic() - start,
                   result)


def _watch(process: BaseProcess, receiver: Connection, memory_limit: Optional[int],
           timeout: Optional[float]) -> tuple[Any, Optional[int], str, str]:
    """Return result, peak, how it ended and why, as soon as that is known."""
    seen, start = None, monotonic()
    while not receiver.poll(_POLL_SECONDS):
        seen = max(filter(None, (seen, _resident(process.pid))), default=None)
        if memory_limit is not None and (seen or 0) > memory_limit:
            return None, seen, "beyond the limit", ""
        if timeout is not None and monotonic() - start > timeout:
            return None, seen, "failed", f"it was not done within {timeout:g} s"
        if not process.is_alive() and not receiver.poll(0):
            return None, seen, "died", ""
    try:
        result, error = receiver.recv()
    except EOFError:
        process.join()
        return None, seen, "died", ""
    if error is None:
        return result, seen, "completed", ""
    return None, seen, "out of memory" if _OUT_OF_MEMORY.search(error) else "failed", error


def _cause_of_death(status: int, log: Path) -> tuple[str, str]:
    if status == -signal.SIGKILL:
        return "out of memory", ""
    lines = log.read_text(encoding="utf-8", errors="replace").split("\n") if log.exists() else []
    ended = "out of memory" if status < 0 and any(map(_OUT_OF_MEMORY.search, lines[-20:])) else "failed"
    how = f"its process ended with {f'signal {signal.Signals(-status).name}' if status < 0 else f'status {status}'}"
    last = next((line.strip() for line in reversed(lines) if line.strip()), "")
    return ended, f"{how}: {last}" if last else (
        f'{how} before it began; a script needs `if __name__ == "__main__":` around what is not to run in each trial')


def _resident(pid: int) -> Optional[int]:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError):
        return None  # it has just ended


def _child(sender: Connection, log: str, work: Callable[[], Any]) -> None:
    with suppress(PermissionError):
        os.setsid()
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(output, stream)
    with suppress(OSError):
        # If the machine still runs out of memory, the kernel ends this process and no other.
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")
    try:
        sender.send((work(), None))
    except BaseException as error:
        lines = [line.strip() for line in str(error).split("\n") if line.strip()]
        sender.send((None, ": ".join([type(error).__name__, *lines[:1]])))


def _measure(make_step: bytes, microbatch: int, steps: int, device_target: str) -> int:
    step = made_step(make_step, microbatch, device_target)
    step()
    if is_dry_run(device_target):
        dry_run.update_all()  # before the other steps: what an optimizer keeps is in memory from the first update on
    for _ in range(steps - 1):
        step()
    ms.runtime.synchronize()
    if is_dry_run(device_target):
        return ms.runtime.max_memory_allocated()
    if device_target != "CPU":
        return ms.runtime.max_memory_reserved()
    # Not resource.ru_maxrss, which starts from the value of the process that started this one.
    status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
    return 1024 * int(re.search(r"^VmHWM:\s+(\d+)", status, re.MULTILINE)[1])


def made_step(make_step: bytes, microbatch: int, device_target: str, **options: Any) -> Callable[[], Any]:
    """Return what the pickled `make_step` makes for a device. TypeError if that cannot be called."""
    if ms.get_context("device_target") != device_target:
        ms.set_device(device_target)
    if is_dry_run(device_target):
        # With one thread, which MindSpore takes on a machine of two cores, a graph with a branch does not compile.
        ms.runtime.dispatch_threads_num(6)
    step = pickle.loads(make_step)(microbatch, **options)
    if ms.get_context("device_target") != device_target:
        raise ValueError(f"make_step, or its module, chose the device {ms.get_context('device_target')}, expected "
                         f"{device_target}; leave that to the plan")
    if not callable(step):
        raise TypeError(f"make_step({microbatch}) returned {type(step).__name__}, expected a function that runs one "
                        "train step")
    return step


def _device_memory(device_target: str) -> int:
    ms.set_device(device_target)
    return ms.hal.get_device_properties(0).total_memory
