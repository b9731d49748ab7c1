"""`ms-accum plan`: its options, progress, and the files it leaves."""
from __future__ import annotations

import argparse
import re
import sys
from dataclasses import asdict
from functools import partial
from math import ceil, inf, log2
from pathlib import Path
from typing import Any, Optional

from tqdm import tqdm

from ..arguments import LARGEST_INT32
from ..batch_size.planning import DEVICES, Plan, PlanError, Trial, divisors_of, plan_micro_batch, size
from .files import require_outputs, whole, write_json
from .options import imported, number

DESCRIPTION = """\
Find the largest microbatch whose memory fits. FUNCTION takes a microbatch and returns a function that runs one train step
on so many samples. Each trial calls that in a process of its own, past an update, and measures its peak; one that runs out
of memory costs nothing. Few trials: they bisect the divisors of the batch."""

EXAMPLES = """\
examples:
  ms-accum plan train:make_step --batch-size 1024                       # what fits into this machine's free memory
  ms-accum plan train:make_step --batch-size 1024 --memory-limit 4GiB --plot memory.png --json plan.json

exit status: 0 if a microbatch was found, 1 if none fits or a trial fails, 2 for a bad command line"""

_count = partial(number, int, lambda n: 1 <= n <= LARGEST_INT32, f"a whole number from 1 to {LARGEST_INT32}")
_seconds = partial(number, float, lambda seconds: 0 < seconds < inf, "a number of seconds > 0")
_UNITS = {"": 1, "k": 1000, "m": 1000**2, "g": 1000**3, "t": 1000**4, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


def add_parser(subcommands: argparse._SubParsersAction) -> None:
    """Add `plan` to the commands of `ms-accum`."""
    parser = subcommands.add_parser(
        "plan", help="find the largest microbatch that fits into memory", description=DESCRIPTION, epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.add_argument("function", metavar="MODULE:FUNCTION",
                        help="the function `make_step(microbatch)`; MODULE is found from the current folder, too")
    parser.add_argument("--batch-size", type=_count, required=True, metavar="N", help="samples that one update is made of")
    parser.add_argument("--memory-limit", type=_bytes, metavar="SIZE",
                        help="e.g. 4GiB, 500MB or a number of bytes (default: 90 %% of the free memory)")
    parser.add_argument("--device-target", choices=DEVICES, default="CPU", help="(default: %(default)s)")
    parser.add_argument("--timeout", type=_seconds, metavar="SECONDS", help="stop with an error if a trial takes longer (default: never)")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw memory against the microbatch; needs matplotlib")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the plan and every trial")
    parser.set_defaults(run=partial(run, parser))


def _bytes(text: str) -> int:
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([kmgt]?i?)b?", text.strip(), re.IGNORECASE)
    unit = _UNITS.get(match[2].lower()) if match else None
    if unit is None or float(match[1]) * unit < 1:
        raise argparse.ArgumentTypeError(f"expected a size such as 4GiB, 500MB or a number of bytes, got {text!r}")
    return int(float(match[1]) * unit)


def run(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Check, plan, print, write.

    Raises:
        SystemExit: With a line on stderr and status 2 for a bad value; with status 1 if nothing fits or a trial fails.
    """
    try:
        require_outputs(options, {"json": ("",), "plot": (".png",)})
        make_step = imported(options.function, "train:make_step")
        progress = Progress(options.batch_size)
        try:
            plan = plan_micro_batch(make_step, options.batch_size, memory_limit=options.memory_limit,
                                    device_target=options.device_target, timeout=options.timeout, on_trial=progress)
        finally:
            progress.close()
    except (ValueError, TypeError) as error:
        parser.error(str(error))
    except PlanError as error:
        write_all(options, error.trials, None)
        parser.exit(1, f"{parser.prog}: error: {error}\n")
    print(plan)
    write_all(options, plan.trials, plan)


class Progress:
    """A bar on a terminal, elsewhere a line for each trial."""

    def __init__(self, batch_size: int) -> None:
        most = ceil(log2(len(divisors_of(batch_size)) + 1))
        self.bar = tqdm(total=most, desc="trials", unit="trial", leave=False, dynamic_ncols=True, mininterval=0, file=sys.stdout,
                        disable=not sys.stdout.isatty())

    def __call__(self, trial: Trial) -> None:
        word = "fits" if trial.fits else trial.ended
        if self.bar.disable:
            self.bar.n += 1
            print(f"trial {self.bar.n}: microbatch {trial.microbatch:,} {word}", flush=True)
        else:
            self.bar.set_postfix_str(f"microbatch {trial.microbatch:,} {word}", refresh=False)
            self.bar.total = max(self.bar.total, self.bar.n + 1)  # a gap between divisors takes more
            self.bar.update()

    def close(self) -> None:
        """Take the bar away."""
        self.bar.close()


def write_all(options: argparse.Namespace, trials: tuple[Trial, ...], plan: Optional[Plan]) -> None:
    """Write the files that the options name, also where nothing was found."""
    if options.json:
        write_json(options.json, figures(options, trials, plan))
    if options.plot:
        write_plot(options.plot, trials, plan)


def figures(options: argparse.Namespace, trials: tuple[Trial, ...], plan: Optional[Plan]) -> dict[str, Any]:
    """Everything as JSON can hold it; None for what was not found."""
    return {
        "function": options.function,
        "batch_size": options.batch_size,
        "microbatch": plan and plan.microbatch,
        "accumulate_step": plan and plan.accumulate_step,
        "peak": plan and plan.peak,
        "memory_limit": plan.memory_limit if plan else options.memory_limit,
        "device": options.device_target,
        "trials": [asdict(trial) for trial in trials],
    }


def write_plot(path: Path, trials: tuple[Trial, ...], plan: Optional[Plan]) -> None:
    """Draw the memory of each trial against its microbatch; writes a PNG."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for fits, style, label in ((True, "o-C0", "fits"), (False, "xC3", "does not fit (what was seen before it ended)")):
        points = sorted((trial.microbatch, (trial.peak or 0) / 2**20) for trial in trials if trial.fits == fits)
        if points:
            axes.plot(*zip(*points), style, label=label)
    if plan is not None:
        axes.axhline(plan.memory_limit / 2**20, color="C3", linestyle=":", label=f"limit: {size(plan.memory_limit)}")
        axes.plot([plan.microbatch], [plan.peak / 2**20], "o", color="C0", markersize=14, fillstyle="none", label="the plan")
    axes.set_xscale("log", base=2)
    axes.set_xticks([trial.microbatch for trial in trials], [f"{trial.microbatch:,}" for trial in trials])
    axes.set(xlabel="samples in a microbatch", ylabel="peak memory in MiB", ylim=(0, None), title="Which microbatch fits")
    axes.grid(alpha=0.3)
    axes.legend()
    with whole(path) as part:
        figure.savefig(part, format="png", dpi=120)
