"""The command `ms-accum plan`: run `plan_micro_batch` from a shell."""
from __future__ import annotations

import argparse
import re
import sys
from dataclasses import asdict
from functools import partial
from math import ceil, inf, log2
from pathlib import Path
from typing import TYPE_CHECKING, Optional

from tqdm import tqdm

from ..batch_size.planning import DEVICES, Plan, PlanError, Trial, divisors_of, plan_micro_batch, size
from .files import require_outputs, write_json, write_png
from .options import add_command, count, imported, number

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DESCRIPTION = """\
Find the largest microbatch whose memory fits. FUNCTION takes the size of a microbatch and returns a function that runs
one train step on it. Each trial runs in its own process, past an update, and measures the peak memory; a trial that
runs out of memory does no harm. Few trials are needed: they bisect the divisors of the batch."""

EXAMPLES = """\
examples:
  ms-accum plan train:make_step --total-batch-size 1024                # what fits into the free memory of this machine
  ms-accum plan train:make_step --total-batch-size 1024 --memory-limit 4GiB --plot memory.png --json plan.json

exit status: 0 if a microbatch was found, 1 if none fits or a trial fails, 2 for a bad command line"""

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
                        help="e.g. 4GiB, 500MB or a number of bytes (default: 90 %% of the free memory)")
    parser.add_argument("--device-target", choices=DEVICES, default="CPU", help="(default: %(default)s)")
    parser.add_argument("--timeout", type=_seconds, metavar="SECONDS",
                        help="stop with an error if a trial takes longer (default: never)")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw peak memory; needs matplotlib")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the plan and every trial")


def _bytes(text: str) -> int:
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*(?:([kmgt])(i?))?b?", text.strip().lower())
    unit = (1024 if match[3] else 1000) ** " kmgt".index(match[2] or " ") if match else 0
    if not match or float(match[1]) * unit < 1:
        raise argparse.ArgumentTypeError(f"expected a size such as 4GiB, 500MB or a number of bytes, got {text!r}")
    return int(float(match[1]) * unit)


def run(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Check, plan, print, write. Exit with status 2 for a bad value, with 1 if nothing fits or a trial fails."""
    most = ceil(log2(len(divisors_of(options.total_batch_size)) + 1))
    try:
        require_outputs(options, json=("",), plot=(".png",))
        make_step = imported(options.function, "train:make_step")
        with tqdm(total=most, desc="trials", unit="trial", leave=False, dynamic_ncols=True, mininterval=0,
                  file=sys.stdout, disable=not sys.stdout.isatty()) as bar:
            plan = plan_micro_batch(make_step, options.total_batch_size, memory_limit=options.memory_limit,
                                    device_target=options.device_target, timeout=options.timeout,
                                    on_trial=partial(_show, bar))
    except (ValueError, TypeError) as error:
        parser.error(str(error))
    except PlanError as error:
        write_all(options, error.trials, None)
        parser.exit(1, f"{parser.prog}: error: {error}\n")
    print(plan)
    write_all(options, plan.trials, plan)


def _show(bar: tqdm, trial: Trial) -> None:
    """Show a trial in the bar, or without a terminal in a line."""
    result = f"microbatch {trial.microbatch:,} {'fits' if trial.fits else trial.ended}"
    if bar.disable:
        bar.n += 1
        print(f"trial {bar.n}: {result}", flush=True)
    else:
        bar.set_postfix_str(result, refresh=False)
        bar.total = max(bar.total, bar.n + 1)  # a gap between divisors takes more
        bar.update()


def write_all(options: argparse.Namespace, trials: tuple[Trial, ...], plan: Optional[Plan]) -> None:
    """Write the files that the options name, even if no microbatch was found."""
    if options.json:
        write_json(options.json, {
            "function": options.function,
            "batch_size": options.total_batch_size,
            "microbatch": plan and plan.microbatch,
            "accumulate_step": plan and plan.accumulate_step,
            "peak": plan and plan.peak,
            "memory_limit": plan.memory_limit if plan else options.memory_limit,
            "device": options.device_target,
            "trials": [asdict(trial) for trial in trials],
        })
    if options.plot:
        write_png(options.plot, draw(trials, plan))


def draw(trials: tuple[Trial, ...], plan: Optional[Plan]) -> Figure:
    """Draw the memory of each trial against its microbatch."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
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
    return figure
