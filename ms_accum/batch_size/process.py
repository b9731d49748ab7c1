"""Call a function in a new process, which may fail in any way."""
from __future__ import annotations

import os
import pickle
import re
import resource
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from math import inf
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from time import monotonic
from typing import Any, NamedTuple, Optional

import psutil

_POLL_SECONDS = 0.02
_OUT_OF_MEMORY = re.compile(r"MemoryError|bad_alloc|(out of|not enough|cannot allocate) memory|memory not enough|"
                            r"alloc\w* .{0,80}fail", re.IGNORECASE)
_LEVEL = "MS_SIMULATION_LEVEL"  # MindSpore's own; 1 compiles and plans memory, without a device


class Outcome(NamedTuple):
    """Describe how a process ended."""

    ended: str  # "completed", "beyond the limit" (stopped for it), "out of memory" or "failed"
    reason: str = ""  # why it failed, in one line
    result: Any = None  # what the function returned
    peak: Optional[int] = None  # bytes: on CPU, the most memory that it held; for a stopped one, that was seen


def is_dry_run(device_target: str) -> bool:
    """Return whether trials are dry runs: for Ascend, without an NPU or if the environment requests a dry run."""
    return device_target == "Ascend" and bool(os.environ.get(_LEVEL) or not any(Path("/dev").glob("davinci[0-9]*")))


def in_a_process(device_target: str, function: Callable, *arguments: Any, memory_limit: float = inf,
                 timeout: Optional[float] = None) -> Outcome:
    """Call a function in a new process; it makes a dry run if `is_dry_run` says so.

    On CPU, the process is stopped when it holds more than `memory_limit` bytes. After `timeout` seconds, it fails.
    """
    receiver, sender = get_context("spawn").Pipe(duplex=False)
    with TemporaryDirectory() as folder:
        log = Path(folder, "output")
        dry = {_LEVEL: "1", "MS_DEV_SAVE_GRAPHS_PATH": folder}
        variables = dry if is_dry_run(device_target) else {}
        process: Any = get_context("spawn").Process(target=_child, args=(sender, log, variables, function, arguments))
        process.start()
        sender.close()
        seen, end = None, monotonic() + (timeout or inf)
        try:
            while not receiver.poll(_POLL_SECONDS) and process.is_alive():
                if device_target == "CPU":
                    seen = max(_resident(process.pid), seen or 0)
                if (seen or 0) > memory_limit:
                    return Outcome("beyond the limit", peak=seen)
                if monotonic() > end:
                    return Outcome("failed", f"it did not finish within {timeout:g} s", peak=seen)
            with suppress(EOFError):
                if receiver.poll():
                    outcome: Outcome = receiver.recv()
                    return outcome._replace(peak=max(seen or 0, outcome.peak or 0) if device_target == "CPU" else None)
            process.join()
            return _cause_of_death(process.exitcode, log)._replace(peak=seen)
        finally:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)  # also its children; before it has its own group, it has none
            process.kill()
            process.join()
            receiver.close()


def _resident(pid: int) -> int:
    with suppress(psutil.Error):  # it may just have ended
        return psutil.Process(pid).memory_info().rss
    return 0


def _most_resident() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _cause_of_death(status: int, log: Path) -> Outcome:
    lines = [line.strip() for line in log.read_text(errors="replace").split("\n")] if log.exists() else []
    if status == -signal.SIGKILL or (status < 0 and any(map(_OUT_OF_MEMORY.search, lines[-20:]))):
        return Outcome("out of memory")
    how = f"its process ended with {signal.Signals(-status).name if status < 0 else f'status {status}'}"
    last = next(filter(None, reversed(lines)), "")
    return Outcome("failed", f"{how}: {last}" if last else (
        f'{how} before it began; a script needs `if __name__ == "__main__":` around code that must not run in each '
        'trial'))


def _child(sender: Connection, log: Path, variables: dict[str, str], function: Callable, arguments: tuple) -> None:
    # Linux starts the peak of a new program with that of the process that started it (here the planning one), and
    # psutil has no peak on Linux. If this process outgrows the start, `ru_maxrss` is exact. If not, memory at the end
    # and the samples of `in_a_process` count: MindSpore keeps what it has allocated, so little can be missed.
    inherited = _most_resident()
    os.environ.update(variables)
    with suppress(PermissionError):
        os.setsid()
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(output, stream)
    with suppress(OSError):  # if the machine still runs out of memory, the kernel ends this process and no other
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")
    try:
        outcome = Outcome("completed", result=function(*arguments))
    except BaseException as error:
        lines = [line.strip() for line in str(error).split("\n") if line.strip()]
        reason = ": ".join([type(error).__name__, *lines[:1]])
        outcome = Outcome("out of memory" if _OUT_OF_MEMORY.search(reason) else "failed", reason)
    most = _most_resident()
    sender.send(outcome._replace(peak=most if most > inherited else _resident(os.getpid())))


def pickled(make_step: Callable) -> bytes:
    """Pickle `make_step` by its module and name. Raise ValueError if another process would not find it."""
    script = getattr(sys.modules["__main__"], "__file__", None) or ""
    try:
        if getattr(make_step, "__module__", None) == "__main__" and not Path(script).is_file():
            raise AttributeError("it was defined in an interactive session")
        return pickle.dumps(make_step)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        name = getattr(make_step, "__qualname__", None) or f"of type {type(make_step).__name__}"
        raise ValueError(f"make_step is {name}, which the processes of the trials cannot import ({error}); define it "
                         "with `def` at the top level of a module or script (functools.partial of such a function "
                         "works, too)") from error
