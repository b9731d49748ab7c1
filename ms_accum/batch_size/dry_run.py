"""A dry run for Ascend: MindSpore compiles a step and plans its memory. Nothing is launched, and values read as 0."""
from __future__ import annotations

import gc
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import mindspore as ms

from ..accumulator import Accumulator
from ..step import TrainStep
from ..straight import compiled

DEVICE_MEMORY = 2**36  # bytes: that of the device which MindSpore simulates, and of an NPU of 64 GB
_LEVEL = "MS_SIMULATION_LEVEL"  # MindSpore's own; 1 plans memory, without a device


def is_dry_run(device_target: str) -> bool:
    """Return whether trials are dry runs: for Ascend, if no NPU is here or the environment asks MindSpore for one."""
    return device_target == "Ascend" and bool(os.environ.get(_LEVEL) or not any(Path("/dev").glob("davinci[0-9]*")))


@contextmanager
def environment(folder: str) -> Iterator[None]:
    """Let MindSpore make a dry run in the processes that are started inside, and write what it writes to a folder."""
    variables = {_LEVEL: "1", "MS_DEV_SAVE_GRAPHS_PATH": folder}
    kept = {name: os.environ[name] for name in variables if name in os.environ}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name in variables:
            del os.environ[name]
        os.environ.update(kept)


def missing() -> str:
    """Return in one line why MindSpore's Ascend backend cannot be loaded, or ""."""
    try:
        ms.set_device("Ascend")
    except RuntimeError as error:
        library = re.search(r"(\S+\.so\S*): cannot open", str(error))
        reason = f"{library[1]} is not found" if library else str(error).strip().split("\n")[0]
        return f"ASCEND_HOME_PATH is {os.environ.get('ASCEND_HOME_PATH') or 'not set'}, and {reason}"
    return ""


def update_all() -> None:
    """Update with every accumulator of this process, unless its train step has, as in windows of one microbatch.

    The count of microbatches reads as 0, so no window would ever be full.
    """
    alive = gc.get_objects()
    updated = [id(step.accumulator) for step in alive if issubclass(type(step), TrainStep) and step.updated]
    for accumulator in alive:
        if issubclass(type(accumulator), Accumulator) and id(accumulator) not in updated:
            compiled(_update_of(accumulator))()


def _update_of(accumulator: Accumulator) -> Callable[[], ms.Tensor]:
    def update() -> ms.Tensor:
        accumulator.update_with(accumulator.reduced())
        return accumulator.update_step + 0

    return update
