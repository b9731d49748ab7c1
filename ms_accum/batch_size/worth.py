"""Find the largest window that is worth it: measure the noise scale, and the time of windows of 1, 2, 4, ..."""
from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import inf, isfinite, log2
from statistics import median
from time import perf_counter
from typing import Optional

import mindspore as ms

from ..arguments import whole_number
from .dry_run import is_dry_run
from .noise_scale import GradientNoiseScale, scale_lr
from .planning import Plan, PlanError, free_memory, size
from .trial import MakeStep, in_a_process, made_step, pickled

_FORM = "def make_step(microbatch, accumulate_step=None, noise_scale=None)"
_CAPTION = """\
lr: factor on the learning rate of the planned batch; updates, samples, time: to the same loss, relative to the least
measured on one device, where a larger window saves only updates; the noise scale is that of one state, and grows"""
_LEAST_WINDOWS, _LEAST_SECONDS = 3, 1.0


@dataclass(frozen=True)
class Window:
    """What windows of one length cost, and what they are worth if the noise scale is the critical batch size."""

    accumulate_step: int  # microbatches
    batch: int  # samples
    seconds: float  # for each sample, on one device
    lr_linear: float  # factor on a learning rate that suits the plan's batch, by the linear rule (SGD)
    lr_sqrt: float  # and by the rule of the square root (Adam)
    updates: float  # to the same loss, as a multiple of those that the largest batches need
    samples: float  # to the same loss, as a multiple of those that the smallest batches need
    time: float  # to the same loss, samples * seconds, as a multiple of the fastest window's


@dataclass(frozen=True)
class Worth:
    """The result of `measure_windows`; `str(worth)` is the table and the verdict."""

    noise_scale: float  # samples; infinity if noise hides the gradient, NaN if no gradient was finite
    measured_windows: int  # it was measured over so many
    measured_accumulate_step: int  # of so many microbatches
    measured_microbatch: int  # of so many samples
    accumulate_step: Optional[int]  # the longest window, up to the plan's, within the noise scale; None if not finite
    windows: tuple[Window, ...]  # ascending, up to twice the plan's

    def __str__(self) -> str:
        lines = ["accumulate_step     batch  ms/sample  lr (SGD)  lr (Adam)  updates  samples    time"]
        for row in self.windows:
            lines.append(f"{row.accumulate_step:15,}  {row.batch:8,}  {1000 * row.seconds:9,.4g}  "
                         f"{row.lr_linear:8.3g}  {row.lr_sqrt:9.3g}  {row.updates:7.3g}  {row.samples:7.3g}  "
                         f"{row.time:6.2f}")
        return "\n".join([*lines, _CAPTION, self.verdict()])

    def verdict(self) -> str:
        """Return the answer in a sentence."""
        measured = (f"measured over {self.measured_windows:,} windows of {self.measured_accumulate_step:,} x "
                    f"{self.measured_microbatch:,} samples")
        if not isfinite(self.noise_scale):
            return (f"the noise scale is unknown, {measured}: " + (
                "noise hides the gradient, so it is probably far beyond this batch; measure more windows"
                if self.noise_scale == inf else "no window had a finite gradient"))
        measured = f"the noise scale of {self.noise_scale:,.0f} samples, {measured}"
        microbatch = self.windows[0].batch
        if self.noise_scale < microbatch:
            return (f"do not accumulate: a microbatch of {microbatch:,} samples alone is beyond {measured}; a smaller "
                    "batch learns more from each sample")
        row = next(row for row in self.windows if row.accumulate_step == self.accumulate_step)
        longest = 2 ** int(log2(self.noise_scale / microbatch))
        whole = row.lr_linear == 1
        more = f"; accumulate_step {longest:,} would not be, either" if whole and longest > row.accumulate_step else ""
        return (f"accumulate_step {row.accumulate_step:,} x microbatch {microbatch:,} = {row.batch:,} samples: "
                f"{'the planned batch, which' if whole else 'the largest window whose batch'} is not beyond {measured}"
                f"{more}")


def require_windows(make_step: MakeStep, batch_size: int, device_target: str) -> None:
    """Raise ValueError if `make_step` cannot make windows of any length, or the noise scale cannot be measured."""
    if is_dry_run(device_target):
        raise ValueError("a dry run for Ascend computes no gradients and measures no times, so it has no noise scale "
                         "and no window that is worth it; measure these on a device")
    try:
        signature = inspect.signature(make_step)
        signature.bind(1)
        signature.bind(1, accumulate_step=1, noise_scale=None)
    except (TypeError, ValueError) as error:
        name = getattr(make_step, "__name__", type(make_step).__name__)
        raise ValueError(f"{name} does not take a microbatch alone, or with accumulate_step= and noise_scale= "
                         f"({error}); write `{_FORM}`, and give both to make_train_step or Accumulator") from error
    if batch_size == 1:
        raise ValueError("the batch is 1 sample, expected at least 2; the noise scale compares parts of a batch")


def measure_windows(make_step: MakeStep, plan: Plan, windows: int = 32, *, device_target: str = "CPU",
                    timeout: Optional[float] = None, on_result: Callable[[str], None] = lambda result: None) -> Worth:
    """Measure the noise scale and the time of windows at the planned microbatch, each in a separate process.

        plan = plan_micro_batch(make_step, 1024)
        measure_windows(make_step, plan).accumulate_step  # 2

    `make_step(microbatch, accumulate_step=..., noise_scale=...)` gives the last two to `make_train_step` or
    `Accumulator`. The step that it returns trains on one microbatch of shuffled data, and never runs out of it. The
    noise scale is measured over `windows` windows of the planned batch while that network trains, in halves of the
    planned microbatch, or down to eighths where these do not fit into the free memory. It is converted into samples,
    whatever the weights count. `timeout` seconds are for each process; `on_result` is called after each, to show
    progress.

    Raises:
        TypeError: If `windows` is not an integer.
        ValueError: If it is out of range, `make_step` does not take the two arguments, the batch is one sample, or the
            device is only there for a dry run.
        PlanError: If a process fails, exceeds the memory limit or takes longer than `timeout`.

    Source: McCandlish et al., "An Empirical Model of Large-Batch Training" (2018), sections 2.2 and 2.3.
    """
    require_windows(make_step, plan.batch_size, device_target)
    windows = whole_number("windows", windows, "give the windows to measure the noise scale over")

    def run(what: str, work: Callable, *arguments: int, limit: int = plan.memory_limit,
            optional: bool = False) -> Optional[float]:
        outcome = in_a_process(partial(work, pickled(make_step), device_target, *arguments), device_target, limit,
                               timeout)
        if outcome.ended != "completed" and not (optional and outcome.ended in ("beyond the limit", "out of memory")):
            reason = outcome.reason or f"{outcome.ended} ({size(limit)}); give a larger memory limit"
            raise PlanError(f"measuring {what} failed: {reason}", plan.trials)
        return outcome.result

    microbatch, accumulate_step, noise = plan.microbatch, plan.accumulate_step, None
    while noise is None:
        # A window of one microbatch has nothing to compare. Norms need memory that the trials did not, even more than
        # the limit: it is for the training, in which nothing is measured.
        if microbatch > 1:
            microbatch, accumulate_step = microbatch // 2, 2 * accumulate_step
        noise = run("the noise scale", measure_noise, microbatch, accumulate_step, windows,
                    limit=max(plan.memory_limit, free_memory("CPU")),
                    optional=microbatch > max(1, plan.microbatch // 8))
    on_result(f"noise scale {noise:,.0f} samples")
    seconds = {}
    for length in lengths(plan.accumulate_step):
        # Longer windows than one microbatch need buffers.
        found = run(f"a window of {length:,}", time_window, plan.microbatch, length,
                    optional=length > plan.accumulate_step)
        if found is None:
            on_result(f"accumulate_step {length:,} does not fit")
            break
        seconds[length] = found
        on_result(f"accumulate_step {length:,} takes {1000 * seconds[length]:,.4g} ms for each sample")
    rows = rows_of(plan, noise, seconds)
    within = [1, *(row.accumulate_step for row in rows
                   if row.accumulate_step <= plan.accumulate_step and row.batch <= noise)]
    return Worth(noise, windows, accumulate_step, microbatch, within[-1] if isfinite(noise) else None, rows)


def lengths(accumulate_step: int) -> list[int]:
    """Return the powers of 2 up to twice `accumulate_step`, at least up to 4, and `accumulate_step`."""
    powers = (2**i for i in range(max(2, int(log2(2 * accumulate_step))) + 1))
    return sorted({*powers, accumulate_step})


def rows_of(plan: Plan, noise: float, seconds: dict[int, float]) -> tuple[Window, ...]:
    """Return the rows of a `Worth` from the seconds for each sample by the length of the window."""
    batches = {length: length * plan.microbatch for length in seconds}
    own = plan.microbatch * plan.accumulate_step
    # Not samples * seconds: samples are infinitely many if there is no noise.
    times = {n: seconds[n] * (1 if noise == inf else noise + batch) for n, batch in batches.items()}
    return tuple(Window(n, batch, seconds[n], *[scale_lr(1.0, batch, rule) / scale_lr(1.0, own, rule)
                                                for rule in ("linear", "sqrt")],
                        1 + noise / batch, 1 + batch / noise if noise else inf, times[n] / min(times.values()))
                 for n, batch in batches.items())


# --- what the separate processes do -----------------------------------------------------------------------------------


def time_window(make_step: bytes, device_target: str, microbatch: int, accumulate_step: int) -> float:
    """Return the seconds that a window takes for each sample, the median of several."""
    step = made_step(make_step, microbatch, device_target, accumulate_step=accumulate_step, noise_scale=None)

    def run(steps: int) -> float:
        start = perf_counter()
        for _ in range(steps):
            step()
        ms.runtime.synchronize()
        return perf_counter() - start

    run(accumulate_step + 1)  # compiles; from here on, so many steps hold one update, wherever they start
    seconds: list[float] = []
    while len(seconds) < _LEAST_WINDOWS or sum(seconds) < _LEAST_SECONDS:
        seconds.append(run(accumulate_step))
    return median(seconds) / (accumulate_step * microbatch)


def measure_noise(make_step: bytes, device_target: str, microbatch: int, accumulate_step: int, windows: int) -> float:
    """Return the noise scale in samples. ValueError if not as many windows closed as should have."""
    noise_scale = GradientNoiseScale(decay=1)
    step = made_step(make_step, microbatch, device_target, accumulate_step=accumulate_step, noise_scale=noise_scale)
    for _ in range(windows * accumulate_step):
        step()
    closed = noise_scale.windows[0]
    # A loss scaler may have dropped some.
    if not windows / 2 <= closed <= windows:
        raise ValueError(f"{closed} windows were measured in {windows} * {accumulate_step} microbatches, expected "
                         f"{windows}; make_step has to give accumulate_step and noise_scale to make_train_step or "
                         "Accumulator")
    return noise_scale.scale() * microbatch / noise_scale.microbatch_weight  # what weights count need not be samples
