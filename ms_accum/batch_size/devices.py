"""Find out whether a device is available, and how much of its memory is free."""
from __future__ import annotations

import os
import re
from contextlib import suppress
from pathlib import Path

import mindspore as ms
import psutil

from .process import in_a_process, is_dry_run

DEVICES = ("CPU", "GPU", "Ascend")
_USED = 0.9  # of the free memory; the rest is left to other processes
_SIMULATED = 2**36  # bytes: the memory of the device that MindSpore simulates, and of an NPU of 64 GB
# For both versions of cgroups: a line of a process's membership; files of its limit, usage and droppable memory.
_CGROUPS = ((r"0::/(.*)", "", "memory.max", "memory.current", "inactive_file"),
            (r"\d+:memory:/(.*)", "memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"))


def require_cann() -> None:
    """Raise ValueError, and name what is missing, if the Ascend backend, which a dry run needs, cannot be loaded."""
    outcome = in_a_process("Ascend", _missing_cann)
    missing = outcome.reason or outcome.result
    if missing:
        raise ValueError(f"a dry run needs CANN: {missing}; install CANN's toolkit (no device is needed) and source "
                         "its set_env.sh")


def _missing_cann() -> str:
    try:
        ms.set_device("Ascend")
    except RuntimeError as error:
        library = re.search(r"(\S+\.so\S*): cannot open", str(error))
        reason = f"{library[1]} is not found" if library else str(error).strip().split("\n")[0]
        return f"ASCEND_HOME_PATH is {os.environ.get('ASCEND_HOME_PATH') or 'not set'}, and {reason}"
    return ""


def free_memory(device_target: str) -> int:
    """Return 90 % of a device's memory in bytes; on CPU, of the memory that is free here and left to this cgroup."""
    if device_target == "CPU":
        available = psutil.virtual_memory().available  # psutil knows no cgroups
        return int(_USED * min([available, *cgroups_leave(Path("/proc/self/cgroup"), Path("/sys/fs/cgroup"))]))
    if is_dry_run(device_target):
        return int(_USED * _SIMULATED)
    outcome = in_a_process(device_target, _total_memory, device_target)  # not run, for lack of a GPU or an NPU
    if outcome.ended != "completed":
        raise ValueError(f"the memory of {device_target} is unknown ({outcome.reason}); give a memory limit, or "
                         "another device")
    return int(_USED * outcome.result)


def _total_memory(device_target: str) -> int:
    ms.set_device(device_target)
    return ms.hal.get_device_properties(0).total_memory


def cgroups_leave(membership: Path, root: Path) -> list[int]:
    """Return the bytes left in each limited cgroup of this process and in each one above."""
    left, groups = [], membership.read_text(encoding="utf-8") if membership.exists() else ""
    for line, controller, *names, inactive in _CGROUPS:
        for path in re.findall(f"^{line}$", groups, re.MULTILINE):
            folder = root / controller / path
            # In a container, its own cgroup is the root, but its path is the one outside.
            for group in (folder, *folder.parents):
                with suppress(OSError, ValueError):  # it is not a cgroup, or one without a limit
                    limit, used = [int((group / name).read_text(encoding="ascii")) for name in names]
                    # The kernel drops inactive files from memory before it kills a process.
                    files = re.findall(rf"^{inactive} (\d+)$", (group / "memory.stat").read_text(), re.MULTILINE)
                    left.append(max(limit - used + int(files[0]), 0))
    return left
