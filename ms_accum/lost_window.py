"""Warn of a window that is lost: one that still holds microbatches when its accumulator or the process ends."""
from __future__ import annotations

import atexit
import os
from contextlib import suppress
from inspect import currentframe
from typing import TYPE_CHECKING
from warnings import warn_explicit
from weakref import finalize

if TYPE_CHECKING:
    from .counters import Counters

_LOST = ("a window that holds {} is lost: it was neither applied, saved (by save_checkpoint) nor reset, expected none "
         "at the end; train with train_step.epoch(batches), which applies the incomplete last window, call flush(), "
         "give Model the callback FlushCallback(), or call accumulator.reset() to drop it")
_INSIDE = __name__.partition(".")[0], "mindspore"


def watched(counters: Counters, accumulator: object) -> Counters:
    """Warn if the accumulator or the process ends with microbatches neither applied nor saved. Return `counters`.

    MindSpore's own checkpoints are not seen: only what `save_checkpoint` saved counts as saved. The warning names the
    line that built the accumulator.
    """
    lost = finalize(accumulator, _warn, counters, os.getpid(), *_builder())
    # Not by the finalizer itself, which may run after MindSpore has ended.
    lost.atexit = False
    atexit.register(lost)
    return counters


def _builder() -> tuple[str, int]:
    """Return file and line of the user's code that is running."""
    frame = currentframe()
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _INSIDE:
        frame = frame.f_back
    return frame.f_code.co_filename, frame.f_lineno


def _warn(counters: Counters, process: int, file: str, line: int) -> None:
    if os.getpid() != process:  # a child that was forked must not touch the device
        return
    closed = held = 0
    with suppress(Exception):  # an error that MindSpore reports late
        closed, held = counters.closed_and_held()
    if held and counters.saved != (closed, held):
        warn_explicit(_LOST.format(f"{held} microbatch{'es' * (held > 1)}"), UserWarning, file, line)
