"""Warn about a lost window: one that still holds microbatches when its accumulator is deleted or the process ends."""
from __future__ import annotations

import atexit
import os
from contextlib import suppress
from typing import TYPE_CHECKING
from warnings import warn
from weakref import finalize

if TYPE_CHECKING:
    from .counters import Counters

_LOST = ("a window of the accumulator for {} that holds {} is lost: it was neither applied, saved (by save_checkpoint) "
         "nor reset; train with train_step.epoch(batches), which applies the incomplete last window, call flush(), "
         "give Model the callback FlushCallback(), or call accumulator.reset() to drop it")


def watched(counters: Counters, accumulator: object, name: str) -> Counters:
    """Warn if microbatches are neither applied nor saved when the accumulator or the process ends. Return `counters`.

    Only `save_checkpoint` of ms_accum counts as saving, not MindSpore's own checkpoints. `name` identifies the
    accumulator in the warning.
    """
    lost = finalize(accumulator, _warn, counters, os.getpid(), name)
    # Not in the finalizer itself, which may run after MindSpore has ended.
    lost.atexit = False
    atexit.register(lost)
    return counters


def _warn(counters: Counters, process: int, name: str) -> None:
    if os.getpid() != process:  # a child that was forked must not touch the device
        return
    closed = held = 0
    with suppress(Exception):  # an error that MindSpore reports late
        closed, held = counters.closed_and_held()
    if held and counters.saved != (closed, held):
        warn(_LOST.format(name, f"{held} microbatch{'es' * (held > 1)}"), UserWarning, stacklevel=2)
