"""Measure the memory of a train step in a separate process: on its device, or in a dry run (see `planning`)."""
from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from typing import Any, Optional

import mindspore as ms

from ..arguments import instance_of
from ..core.boundary import Boundary
from ..core.graphs import straight
from ..runtime import synchronize
from .process import in_a_process, is_dry_run

MakeStep = Callable[..., Any]  # returns a step, or a step and the train step, cell or Accumulator that it built


@dataclass(frozen=True)
class Trial:
    """Hold the result of a trial."""

    microbatch: int  # samples
    accumulate_step: int  # microbatches in a window
    peak: Optional[int]  # bytes of memory (for a stopped trial, the peak until then); None if unknown
    fits: bool
    ended: str  # "completed", "beyond the limit", "out of memory" or "failed"
    reason: str = ""  # why it did not complete


def run_trial(make_step: MakeStep, microbatch: int, accumulate_step: int, device_target: str,
              memory_limit: float = inf) -> Trial:
    """Build a step and call it `accumulate_step + 1` times, past an update; see `planning.plan_micro_batch`."""
    dry = is_dry_run(device_target)
    ended, reason, of_device, of_process = in_a_process(
        device_target, peak_of, pickle.dumps(make_step), device_target, microbatch, accumulate_step + 1,
        memory_limit=memory_limit)
    peak = of_process if device_target == "CPU" else of_device
    if dry and ended == "out of memory":
        ended, reason = "failed", "this machine ran out of memory, not the planned NPU"
    elif dry and ended == "failed":
        reason += " (a dry run needs CANN, with its set_env.sh sourced, and reads all values as 0)"
    elif ended == "completed" and (peak or 0) > memory_limit:
        ended = "beyond the limit"
    return Trial(microbatch, accumulate_step, peak, ended == "completed", ended, reason)


def made_step(make_step: bytes, device_target: str, microbatch: int, **options: Any) -> tuple[Callable[[], Any], Any]:
    """Call the pickled `make_step` for a device. Return the step, and the object that it built or None."""
    if ms.get_context("device_target") != device_target:
        ms.set_device(device_target)
    if is_dry_run(device_target):
        # With one thread, MindSpore's default on a machine of two cores, a graph with a branch does not compile.
        ms.runtime.dispatch_threads_num(6)
    made = pickle.loads(make_step)(microbatch, **options)
    step, built = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if ms.get_context("device_target") != device_target:
        raise ValueError(f"make_step, or its module, set the device {ms.get_context('device_target')}, expected "
                         f"{device_target}; leave the choice of the device to the plan")
    return step, built


def peak_of(make_step: bytes, device_target: str, microbatch: int, steps: int) -> Optional[int]:
    """Return the peak memory of the device in bytes after `steps` steps; None on CPU, where the process is measured.

    Raise TypeError if `make_step` does not return the object that a dry run needs.
    """
    (step, built), dry = made_step(make_step, device_target, microbatch), is_dry_run(device_target)
    if dry:
        instance_of("what make_step returns after the step", getattr(built, "boundary", built), Boundary,
                    "the train step, cell or Accumulator that it built", "for a dry run, return step, train_step")
    step()
    if dry and not built.boundary.is_closed:
        # Before the other steps: the optimizer's state is in memory from the first update on. In a dry run, the count
        # of microbatches reads as 0, so no window is ever full.
        straight(built.boundary.window.close, built.boundary.window)()
        built.boundary.missing = None
    for _ in range(steps - 1):
        step()
    synchronize()
    if device_target == "CPU":
        return None
    return ms.runtime.max_memory_allocated() if dry else ms.runtime.max_memory_reserved()
