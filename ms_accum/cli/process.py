"""The process of a command: its versions, and the other ranks."""
from __future__ import annotations

import os
import platform
import sys

import mindspore as ms
import numpy as np

import ms_accum

from ..arguments import one_line
from ..mindspore_api import get_rank, init


def versions() -> dict[str, str]:
    """Return the versions of the packages, and the device."""
    packages = {package.__name__: package.__version__ for package in (ms_accum, ms, np)}
    return {**packages, "python": platform.python_version(), "device": ms.get_context("device_target")}


def join_ranks() -> None:
    """Join the other ranks if started by msrun. After it, only rank 0 prints. The scheduler process ends here."""
    if "MS_ROLE" not in os.environ:
        return
    if os.environ["MS_ROLE"] == "MS_SCHED":
        os.environ.setdefault("MS_NODE_TIMEOUT", "20")  # seconds; if all ranks were killed, nothing else ends it
        try:
            init()
        except RuntimeError as error:
            raise OSError(f"the scheduler stopped: {one_line(error)}") from error
        sys.exit(0)
    init()
    if get_rank() > 0:
        sys.stdout = open(os.devnull, "w", encoding="utf-8")
