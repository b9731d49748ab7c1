"""Recommend a window length: measure the noise scale, and compare windows of 1, 2, 4, ... microbatches."""
from __future__ import annotations

import pickle
from math import inf, isfinite, log2
from typing import TYPE_CHECKING, Optional

from .noise_scale import GradientNoiseScale
from .planning import PlanError
from .process import free_memory, in_a_process
from .trial import made_step

if TYPE_CHECKING:
    from .planning import Plan
    from .trial import MakeStep

_CAPTION = """\
updates, samples: to the same loss, relative to the least
measured on one device, in one state: the noise scale grows while the loss falls"""


def measure_noise(make_step: MakeStep, plan: Plan, windows: int, device_target: str = "CPU") -> float:
    """Measure the noise scale in samples over windows of the planned batch, while the network trains in a new process.

    The step of `make_step(microbatch, accumulate_step=..., stages=...)` trains on one microbatch of shuffled data,
    and must not run out of data. Microbatches have half the planned size, because a window of one microbatch cannot be
    compared, and norms need memory. The result is infinity if noise hides the gradient, and NaN if no window was
    finite.

    Raise PlanError if the process fails or runs out of memory.
    """
    parts = 2 if plan.microbatch > 1 else 1
    outcome = in_a_process(device_target, noise_of, pickle.dumps(make_step), device_target,
                           plan.microbatch // parts, plan.accumulate_step * parts, windows,
                           memory_limit=max(plan.memory_limit, free_memory("CPU")))
    if outcome.ended != "completed":
        raise PlanError(f"measuring the noise scale failed: {outcome.reason or outcome.ended}", plan.trials)
    return outcome.result


def noise_of(make_step: bytes, device_target: str, microbatch: int, accumulate_step: int, windows: int) -> float:
    """Return the noise scale in samples. Raise ValueError if the number of closed windows is wrong."""
    noise_scale = GradientNoiseScale(decay=1)
    step, _ = made_step(make_step, device_target, microbatch, accumulate_step=accumulate_step, stages=(noise_scale,))
    for _ in range(windows * accumulate_step):
        step()
    closed = round(noise_scale.windows)
    if not windows / 2 <= closed <= windows:  # a loss scaler may have dropped some
        raise ValueError(f"{closed} windows were measured in {windows} * {accumulate_step} microbatches, expected "
                         f"{windows}; let make_step give accumulate_step and stages to make_train_step or "
                         "Accumulator")
    # The unit of weights need not be samples.
    return noise_scale.scale() * accumulate_step * microbatch / noise_scale.window_weight


def lengths_of(plan: Plan) -> list[int]:
    """Return the lengths to compare: powers of 2 up to twice the planned window, at least 4, and the planned one."""
    return sorted({plan.accumulate_step, *(2**i for i in range(max(3, int(log2(4 * plan.accumulate_step)))))})


def longest_within(plan: Plan, noise: float) -> Optional[int]:
    """Return the longest of these lengths, up to the planned one, whose batch is within the noise scale, or 1."""
    within = [n for n in lengths_of(plan) if n <= plan.accumulate_step and n * plan.microbatch <= noise]
    return max([1, *within]) if isfinite(noise) else None


def table(plan: Plan, noise: float) -> str:
    """Return a table of windows and a recommendation, assuming that the noise scale is the critical batch size.

    Source: McCandlish et al., "An Empirical Model of Large-Batch Training" (2018), sections 2.2 and 2.3.
    """
    lines = ["accumulate_step     batch  updates  samples"]
    for n in lengths_of(plan):
        batch = n * plan.microbatch
        lines.append(f"{n:15,}  {batch:8,}  {1 + noise / batch:7.3g}  {1 + batch / noise if noise else inf:7.3g}")
    best, microbatch = longest_within(plan, noise), plan.microbatch
    if best is None:
        answer = f"the noise scale is unknown ({'noise hides the gradient' if noise == inf else noise}): measure more"
    elif noise < microbatch:
        answer = f"do not accumulate: a microbatch of {microbatch:,} samples is beyond the noise scale of {noise:,.0f}"
    else:
        answer = (f"accumulate_step {best:,} x microbatch {microbatch:,} = {best * microbatch:,} samples: the largest "
                  f"window, up to the planned one, within the noise scale of {noise:,.0f} samples"
                  f"{': you need no accumulation' if best == 1 else ''}")
    return "\n".join([*lines, _CAPTION, answer])
