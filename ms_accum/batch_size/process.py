"""Call a function in a new process, which may fail in any way."""
from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable
from contextlib import suppress
from math import inf
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple, Optional

DEVICES = ("CPU", "GPU", "Ascend")
_POLL_SECONDS = 0.02
_OUT_OF_MEMORY = re.compile(r"MemoryError|bad_alloc|(out of|not enough|cannot allocate) memory|memory not enough|"
                            r"alloc\w* .{0,80}fail", re.IGNORECASE)
_LEVEL = "MS_SIMULATION_LEVEL"  # MindSpore's own; 1 compiles and plans memory, without a device
_USED = 0.9  # of the free memory; the rest is left to other processes
_LIMITS = "memory.max", "memory/memory.limit_in_bytes"  # of the memory of a container, in both versions of cgroups
_UNGUARDED = ('before it began; a script needs `if __name__ == "__main__":` around code that must not run in each '
              "trial")


class Outcome(NamedTuple):
    """Describe how a process ended."""

    ended: str  # "completed", "beyond the limit" (stopped for it), "out of memory" or "failed"
    reason: str = ""  # why it failed, in one line
    result: Any = None  # what the function returned
    peak: Optional[int] = None  # bytes: the most memory that it held; for a stopped one, that was seen


def is_dry_run(device_target: str) -> bool:
    """Return whether trials are dry runs: for Ascend, without an NPU or if the environment requests a dry run."""
    return device_target == "Ascend" and bool(os.environ.get(_LEVEL) or not any(Path("/dev").glob("davinci[0-9]*")))


def free_memory(device_target: str) -> int:
    """Return 90 % of the memory in bytes that is free here and allowed to this container; of a device, of 64 GiB."""
    if device_target != "CPU":
        return int(_USED * 2**36)
    free = [_bytes_of("/proc/meminfo", "MemAvailable")]
    for limit in _LIMITS:
        with suppress(OSError, ValueError):  # there is none
            free.append(int(Path("/sys/fs/cgroup", limit).read_text(encoding="ascii")))
    return int(_USED * min(free))


def in_a_process(device_target: str, function: Callable, *arguments: Any, memory_limit: float = inf) -> Outcome:
    """Call a function in a new process; it makes a dry run if `is_dry_run` says so.

    On CPU, the process is stopped when it holds more than `memory_limit` bytes.
    """
    receiver, sender = get_context("spawn").Pipe(duplex=False)
    with TemporaryDirectory() as folder:
        log, peak = Path(folder, "output"), None
        dry = {_LEVEL: "1", "MS_DEV_SAVE_GRAPHS_PATH": folder}
        variables = dry if is_dry_run(device_target) else {}
        process: Any = get_context("spawn").Process(target=_child, args=(sender, log, variables, function, arguments))
        process.start()
        sender.close()
        try:
            while not receiver.poll(_POLL_SECONDS) and process.is_alive():
                with suppress(OSError, TypeError):  # it may just have ended
                    peak = most_held(process.pid)
                if device_target == "CPU" and (peak or 0) > memory_limit:
                    return Outcome("beyond the limit", peak=peak)
            with suppress(EOFError):
                if receiver.poll():
                    return receiver.recv()
            process.join()
            return _cause_of_death(process.exitcode, log)._replace(peak=peak)
        finally:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)  # also its children; before it has its own group, it has none
            process.kill()
            process.join()
            receiver.close()


def most_held(pid: object = "self") -> int:
    """Return the most memory in bytes that a process has held since it began."""
    return _bytes_of(f"/proc/{pid}/status", "VmHWM")  # not `ru_maxrss`, which begins with that of its parent


def _bytes_of(file: str, name: str) -> int:
    kibibytes: Any = re.search(rf"^{name}:\s+(\d+) kB$", Path(file).read_text(encoding="utf-8"), re.MULTILINE)
    return int(kibibytes[1]) * 1024


def _cause_of_death(status: int, log: Path) -> Outcome:
    lines = [line.strip() for line in log.read_text(errors="replace").split("\n")] if log.exists() else []
    if status == -signal.SIGKILL or (status < 0 and any(map(_OUT_OF_MEMORY.search, lines[-20:]))):
        return Outcome("out of memory")
    last = next(filter(None, reversed(lines)), "")
    return Outcome("failed", f"its process ended with status {status}{f': {last}' if last else f' {_UNGUARDED}'}")


def _child(sender: Connection, log: Path, variables: dict[str, str], function: Callable, arguments: tuple) -> None:
    os.environ.update(variables)
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
    sender.send(outcome._replace(peak=most_held()))
