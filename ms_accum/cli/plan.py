"""The command `ms-accum plan`: run `plan_micro_batch`, and `measure_windows`, from a shell."""
from __future__ import annotations

import argparse
import re
import sys
from dataclasses import asdict
from functools import partial
from math import ceil, inf, isfinite, log2
from pathlib import Path
from typing import TYPE_CHECKING, Optional

from tqdm import tqdm

from ..batch_size.dry_run import is_dry_run
from ..batch_size.planning import DEVICES, Plan, PlanError, Trial, divisors_of, plan_micro_batch, size
from ..batch_size.worth import Worth, lengths, measure_windows, require_windows
from .files import require_outputs, write_json, write_png
from .options import add_command, count, imported, number

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DESCRIPTION = """\
Find the largest microbatch whose memory fits. FUNCTION takes the size of a microbatch and returns a function that runs
one train step on it. Each trial runs in its own process, past an update, and measures the peak memory; a trial that
runs out of memory does no harm. Few trials are needed: they bisect the divisors of the batch.

--device ascend on a machine without an NPU (a login node, a laptop) is a dry run: MindSpore's Ascend backend compiles
the step and plans its memory, and launches nothing. It needs CANN, but no device. Times are not measured.

With --noise-scale, FUNCTION also takes accumulate_step= and noise_scale=, and gives them to make_train_step. Windows of
1, 2, 4, ... microbatches are timed, and the largest one is named whose batch is not beyond the noise scale. That is
measured while FUNCTION's network trains on FUNCTION's data. A network that was just initialised has a small noise
scale, which grows while the loss falls, so FUNCTION may load a checkpoint. One device is measured, in one state; the
noise scale is an approximation, and whether it is the critical batch size is disputed (arXiv 2505.23971)."""

EXAMPLES = """\
examples:
  ms-accum plan train:make_step --total-batch-size 1024                # what fits into the free memory of this machine
  ms-accum plan train:make_step --total-batch-size 1024 --memory-limit 4GiB --plot memory.png --json plan.json
  ms-accum plan train:make_step --total-batch-size 1024 --noise-scale  # and which window is worth it
  ms-accum plan train:make_step --total-batch-size 1024 --device ascend  # without an NPU: what fits into one of 64 GB

exit status: 0 if a microbatch was found, 1 if none fits or a process fails, 2 for a bad command line"""

_seconds = partial(number, float, lambda seconds: 0 < seconds < inf, "a number of seconds > 0")


def add_parser(subcommands: argparse._SubParsersAction) -> None:
    """Add `plan` to the commands of `ms-accum`."""
    parser = add_command(subcommands, "plan", run, "find the largest microbatch that fits into memory", DESCRIPTION,
                         EXAMPLES)
    parser.add_argument("function", metavar="MODULE:FUNCTION",
                        help="the function make_step(microbatch), in a module that can be imported from here")
    parser.add_argument("--total-batch-size", type=count, required=True, metavar="N",
                        help="samples that one update is made of: those of all microbatches of a window")
    parser.add_argument("--memory-limit", type=_bytes, metavar="SIZE",
                        help="e.g. 4GiB, 500MB or a number of bytes (default: 90 %% of the free memory, or in a dry "
                             "run of 64 GiB)")
    parser.add_argument("--device", "--device-target", type=_device, choices=DEVICES, default="CPU",
                        help="in any case of letters (default: %(default)s)")
    parser.add_argument("--timeout", type=_seconds, metavar="SECONDS",
                        help="stop with an error if a trial, or another process, takes longer (default: never)")
    parser.add_argument("--noise-scale", type=count, nargs="?", const=32, metavar="WINDOWS",
                        help="also find the window that is worth it, from the noise scale of so many windows "
                             "(default: %(const)s)")
    parser.add_argument("--plot", type=Path, metavar="FILE.png",
                        help="draw peak memory, and what windows are worth; needs matplotlib")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the plan, every trial and every window")


def _bytes(text: str) -> int:
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*(?:([kmgt])(i?))?b?", text.strip().lower())
    unit = (1024 if match[3] else 1000) ** " kmgt".index(match[2] or " ") if match else 0
    if not match or float(match[1]) * unit < 1:
        raise argparse.ArgumentTypeError(f"expected a size such as 4GiB, 500MB or a number of bytes, got {text!r}")
    return int(float(match[1]) * unit)


def _device(text: str) -> str:
    return {device.lower(): device for device in DEVICES}.get(text.lower(), text)


def run(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Plan, measure, print, write. Exit with status 2 for a bad value, with 1 if nothing fits or a process fails."""
    most = ceil(log2(len(divisors_of(options.total_batch_size)) + 1))
    plan = worth = None
    try:
        require_outputs(options, json=("",), plot=(".png",))
        make_step = imported(options.function, "train:make_step")
        if options.noise_scale:
            require_windows(make_step, options.total_batch_size, options.device)
        with _progress("trial", most) as bar:
            plan = plan_micro_batch(make_step, options.total_batch_size, memory_limit=options.memory_limit,
                                    device_target=options.device, timeout=options.timeout,
                                    on_trial=partial(_show_trial, bar))
        print(plan, flush=True)
        if options.noise_scale:
            with _progress("measurement", 1 + len(lengths(plan.accumulate_step))) as bar:
                worth = measure_windows(make_step, plan, options.noise_scale, device_target=options.device,
                                        timeout=options.timeout, on_result=partial(_show, bar, "measurement"))
            print(worth)
    except (ValueError, TypeError) as error:
        parser.error(str(error))
    except PlanError as error:
        write_all(options, error.trials, plan, worth)
        parser.exit(1, f"{parser.prog}: error: {error}\n")
    write_all(options, plan.trials, plan, worth)


def _progress(unit: str, total: int) -> tqdm:
    return tqdm(total=total, desc=f"{unit}s", unit=unit, leave=False, dynamic_ncols=True, mininterval=0,
                file=sys.stdout, disable=not sys.stdout.isatty())


def _show_trial(bar: tqdm, trial: Trial) -> None:
    _show(bar, "trial", f"microbatch {trial.microbatch:,} {'fits' if trial.fits else trial.ended}")


def _show(bar: tqdm, unit: str, result: str) -> None:
    """Show a result in the bar, or without a terminal in a line."""
    if bar.disable:
        bar.n += 1
        print(f"{unit} {bar.n}: {result}", flush=True)
    else:
        bar.set_postfix_str(result, refresh=False)
        bar.total = max(bar.total, bar.n + 1)  # a gap between divisors takes more
        bar.update()


def write_all(options: argparse.Namespace, trials: tuple[Trial, ...], plan: Optional[Plan],
              worth: Optional[Worth]) -> None:
    """Write the files that the options name, even if no microbatch was found."""
    if options.json:
        write_json(options.json, {
            "function": options.function,
            "batch_size": options.total_batch_size,
            "microbatch": plan and plan.microbatch,
            "accumulate_step": plan and plan.accumulate_step,
            "peak": plan and plan.peak,
            "memory_limit": plan.memory_limit if plan else options.memory_limit,
            "device": options.device,
            "dry_run": is_dry_run(options.device),
            "trials": [asdict(trial) for trial in trials],
            "worth": worth and asdict(worth),
        })
    if options.plot:
        write_png(options.plot, draw(trials, plan, worth))


def draw(trials: tuple[Trial, ...], plan: Optional[Plan], worth: Optional[Worth] = None) -> Figure:
    """Draw the memory of each trial against its microbatch, and beside it, what windows cost and are worth."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7 if worth is None else 14, 4), layout="constrained")
    axes, *others = figure.subplots(1, 1 if worth is None else 2, squeeze=False)[0]
    _draw_memory(axes, trials, plan)
    for beside in others:
        _draw_windows(beside, worth)
    return figure


def _draw_memory(axes: Axes, trials: tuple[Trial, ...], plan: Optional[Plan]) -> None:
    for fits, style, label in ((True, "o-C0", "fits"), (False, "xC3", "does not fit (what was seen before it ended)")):
        points = sorted((trial.microbatch, (trial.peak or 0) / 2**20) for trial in trials if trial.fits == fits)
        if points:
            axes.plot(*zip(*points), style, label=label)
    if plan is not None:
        axes.axhline(plan.memory_limit / 2**20, color="C3", linestyle=":", label=f"limit: {size(plan.memory_limit)}")
        axes.plot([plan.microbatch], [plan.peak / 2**20], "o", color="C0", markersize=14, fillstyle="none",
                  label="the plan")
    axes.set_xscale("log", base=2)
    axes.set_xticks([trial.microbatch for trial in trials], [f"{trial.microbatch:,}" for trial in trials])
    axes.set(xlabel="samples in a microbatch", ylabel="peak memory in MiB", ylim=(0, None),
             title="Which microbatch fits")
    axes.grid(alpha=0.3)
    axes.legend()


def _draw_windows(axes: Axes, worth: Worth) -> None:
    batches = [row.batch for row in worth.windows]
    axes.plot(batches, [1000 * row.seconds for row in worth.windows], "o-C0", label="ms for each sample")
    steps = axes.twinx()
    for name, style in (("updates", "s--C1"), ("samples", "^--C2")) if isfinite(worth.noise_scale) else ():
        steps.plot(batches, [getattr(row, name) for row in worth.windows], style, label=f"{name} to the same loss")
    axes.set_xscale("log", base=2)
    if 0 < worth.noise_scale < inf:
        axes.axvline(worth.noise_scale, color="C3", linestyle=":", label=f"noise scale: {worth.noise_scale:,.0f}")
    axes.set_xticks(batches, [f"{row.accumulate_step:,} x\n{batches[0]:,}" for row in worth.windows])
    axes.set(xlabel="samples in a window", ylabel="ms for each sample", ylim=(0, None),
             title="Which window is worth it")
    steps.set(ylabel="relative to the least", ylim=(0, None))
    axes.grid(alpha=0.3)
    steps.legend(*[a + b for a, b in zip(axes.get_legend_handles_labels(), steps.get_legend_handles_labels())])
