"""The command `ms-accum plan`: run `plan_micro_batch`, and measure the noise scale, from a shell."""
from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from math import inf
from typing import TYPE_CHECKING, Optional

from ..batch_size.devices import DEVICES
from ..batch_size.planning import PlanError, plan_micro_batch, size
from ..batch_size.process import is_dry_run
from ..batch_size.worth import longest_within, measure_noise, require_measurable, table
from .files import write_file, write_json
from .options import add_command, count, imported, number, output

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from ..batch_size.planning import Plan
    from ..batch_size.trial import Trial

DESCRIPTION = """\
Find the largest microbatch that fits in memory. FUNCTION takes the size of a microbatch, and returns a function that
trains on one microbatch of this size. Each trial runs in its own process, includes an update, and measures the peak
memory. A trial that runs out of memory does no harm. Only a few divisors of the batch are tried, by bisection.

On a machine without an NPU (a login node, a laptop), --device ascend starts a dry run: MindSpore's Ascend backend
compiles the step and plans its memory, but runs nothing. This needs CANN, but no device, and measures no times. For a
dry run, FUNCTION returns (step, train_step); the second is the train step, cell or Accumulator that it built.

With --noise-scale, FUNCTION also takes accumulate_step= and stages=, and passes them to make_train_step. A table
compares windows of 1, 2, 4, ... microbatches. The last line names the largest window whose batch is within the noise
scale. The noise scale is measured while FUNCTION's network trains on FUNCTION's data. It is small for a new network
and grows while the loss falls, so FUNCTION may load a checkpoint. It only approximates the critical batch size, and
whether it does so is disputed (arXiv 2505.23971)."""

EXAMPLES = """\
examples:
  ms-accum plan train:make_step --total-batch-size 1024                # what fits into the free memory of this machine
  ms-accum plan train:make_step --total-batch-size 1024 --memory-limit 4GiB --plot memory.png --json plan.json
  ms-accum plan train:make_step --total-batch-size 1024 --noise-scale  # and how long windows should be
  ms-accum plan train:make_step --total-batch-size 1024 --device ascend  # without an NPU: what fits into 64 GB

exit status: 0 if a microbatch was found, 1 if none fits or a process fails, 2 for a bad command line"""


def add_parser(subcommands: argparse._SubParsersAction) -> None:
    """Add `plan` to the commands of `ms-accum`."""
    add = add_command(subcommands, "plan", run, "find the largest microbatch that fits into memory", DESCRIPTION,
                      EXAMPLES).add_argument
    add("function", metavar="MODULE:FUNCTION",
        help="the function make_step(microbatch), in a module that can be imported from the current folder")
    add("--total-batch-size", type=count, required=True, metavar="N",
        help="samples in an update: those of all microbatches of a window")
    add("--memory-limit", type=size_in_bytes, metavar="SIZE",
        help="e.g. 4GiB, 500MB or a number of bytes (default: 90 %% of the free memory, or in a dry run of 64 GiB)")
    add("--device", "--device-target", choices=DEVICES, default="CPU",
        type=lambda text: {device.lower(): device for device in DEVICES}.get(text.lower(), text),
        help="upper or lower case (default: %(default)s)")
    add("--timeout", metavar="SECONDS", help="stop with an error if a trial takes longer (default: never)",
        type=partial(number, float, lambda seconds: 0 < seconds < inf, "a number of seconds > 0"))
    add("--noise-scale", type=count, nargs="?", const=32, metavar="WINDOWS",
        help="also recommend a window length, from the noise scale of this many windows (default: %(const)s)")
    add("--plot", type=output(".png"), metavar="FILE.png", help="draw the peak memory of each trial; needs matplotlib")
    add("--json", type=output(), metavar="FILE", help="write the plan, every trial and the noise scale")


def size_in_bytes(text: str) -> int:
    """Return the number of bytes in a text such as 8GiB or 500 MB. Raise ArgumentTypeError for other texts."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*(?:([kmgt])(i?))?b?", text.strip().lower())
    unit = (1024 if match[3] else 1000) ** " kmgt".index(match[2] or " ") if match else 0
    if not match or float(match[1]) * unit < 1:
        raise argparse.ArgumentTypeError(f"expected a size such as 4GiB, 500MB or a number of bytes, got {text!r}")
    return int(float(match[1]) * unit)


def run(options: argparse.Namespace) -> int:
    """Plan, measure, print and write. Return 1 if nothing fits or a process fails."""
    batch_size, device, timeout = options.total_batch_size, options.device, options.timeout
    make_step = imported(options.function, "train:make_step")
    if options.noise_scale:
        require_measurable(make_step, batch_size, device)
    plan, noise, failed, planned = None, None, None, dict.fromkeys(("microbatch", "accumulate_step", "peak"))
    try:
        plan = plan_micro_batch(make_step, batch_size, memory_limit=options.memory_limit, device_target=device,
                                timeout=timeout, on_trial=_show)
        print(plan, flush=True)
        planned, trials = asdict(plan), plan.trials
        if options.noise_scale:
            noise = measure_noise(make_step, plan, options.noise_scale, device, timeout)
            print(table(plan, noise))
    except PlanError as error:
        failed, trials = error, error.trials
    if options.json:
        write_json(options.json, {
            "function": options.function, "batch_size": batch_size, "device": device, "dry_run": is_dry_run(device),
            "memory_limit": options.memory_limit, "noise_scale": noise,
            "worth": None if plan is None or noise is None else longest_within(plan, noise), **planned,
            "trials": [asdict(trial) for trial in trials]})
    if options.plot:
        write_file(options.plot, draw(trials, plan).savefig)
    if failed:
        print(f"ms-accum plan: error: {failed}", file=sys.stderr)
    return 1 if failed else 0


def _show(trial: Trial) -> None:
    print(f"trial: microbatch {trial.microbatch:,} {'fits' if trial.fits else trial.ended}", flush=True)


def draw(trials: Sequence[Trial], plan: Optional[Plan]) -> Figure:
    """Draw the memory of each trial against its microbatch."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), dpi=120, layout="constrained")
    axes = figure.subplots()
    for fits, style, label in ((True, "oC0", "fits"), (False, "xC3", "does not fit (what was seen before it ended)")):
        tried = [(t.microbatch, t.peak / 2**20) for t in trials if t.fits == fits and t.peak is not None]
        if tried:
            axes.plot(*zip(*tried), style, label=label)
    if plan is not None:
        axes.axhline(plan.memory_limit / 2**20, color="C3", linestyle=":", label=f"limit: {size(plan.memory_limit)}")
    axes.set_xscale("log", base=2)
    axes.set_xticks([trial.microbatch for trial in trials], [f"{trial.microbatch:,}" for trial in trials])
    axes.margins(y=0.2)  # not from 0: what a step adds may be a few percent of what its process takes
    axes.set_ylim(max(0, axes.get_ylim()[0]))
    axes.set(xlabel="samples in a microbatch", ylabel="peak memory in MiB")
    if axes.lines:
        axes.legend()
    return figure
