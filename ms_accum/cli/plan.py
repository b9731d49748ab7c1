"""The command `ms-accum plan`: run `plan_micro_batch`, and measure the noise scale, from a shell."""
from __future__ import annotations

import argparse
import re
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING

from ..batch_size.planning import PlanError, plan_micro_batch
from ..batch_size.process import DEVICES, is_dry_run
from ..batch_size.worth import longest_within, measure_noise, table
from .files import file_to_write, write_json
from .options import add_command, imported, whole_number

if TYPE_CHECKING:
    from ..batch_size.trial import Trial

DESCRIPTION = """\
Find the largest microbatch that fits in memory, in a few trials, each a process of its own.

FUNCTION takes the size of a microbatch, and returns a function that trains on one. For a dry run (--device ascend
without an NPU), it also returns the train step that it built. For --noise-scale, it also takes accumulate_step= and
stages=, and passes them to make_train_step.

Exit status: 0 if one was found, 1 if none fits or a process fails, 2 for a bad command line"""

EXAMPLES = """\
examples:
  ms-accum plan train:make_step --total-batch-size 1024                # what fits into the free memory of this machine
  ms-accum plan train:make_step --total-batch-size 1024 --memory-limit 4GiB --noise-scale
  ms-accum plan train:make_step --total-batch-size 1024 --device ascend"""


def add_parser(subcommands: argparse._SubParsersAction) -> None:
    """Add `plan` to the commands of `ms-accum`."""
    add = add_command(subcommands, "plan", run, "find the largest microbatch that fits into memory", DESCRIPTION,
                      EXAMPLES).add_argument
    add("function", metavar="MODULE:FUNCTION", help="make_step(microbatch), e.g. train:make_step for train.py")
    add("--total-batch-size", type=whole_number(1), required=True, metavar="N",
        help="samples in an update")
    add("--memory-limit", type=size_in_bytes, metavar="SIZE",
        help="e.g. 4GiB (default: 90 %% of the free memory, or of 64 GiB of a device)")
    add("--device", choices=DEVICES, default="CPU", help="upper or lower case (default: %(default)s)",
        type=lambda text: {device.lower(): device for device in DEVICES}.get(text.lower(), text))
    add("--noise-scale", type=whole_number(1), nargs="?", const=32, metavar="WINDOWS",
        help="also recommend a window length, measured in so many windows (default: %(const)s)")
    add("--json", type=file_to_write, metavar="FILE", help="write all figures")


def size_in_bytes(text: str) -> int:
    """Return the number of bytes in a text such as 8GiB or 500 MB. Raise ArgumentTypeError for other texts."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*(?:([kmgt])(i?))?b?", text.strip().lower())
    unit = (1024 if match[3] else 1000) ** " kmgt".index(match[2] or " ") if match else 0
    if not match or float(match[1]) * unit < 1:
        raise argparse.ArgumentTypeError(f"expected a size such as 4GiB, 500MB or a number of bytes, got {text!r}")
    return int(float(match[1]) * unit)


def run(options: argparse.Namespace) -> int:
    """Plan, measure, print and write. Return 1 if nothing fits or a process fails."""
    device, dry = options.device, is_dry_run(options.device)
    make_step = imported(options.function, "train:make_step")
    if dry and options.noise_scale:
        raise ValueError("a dry run computes no gradients, so it has no noise scale; measure it on a device")
    if dry:
        print("dry run: memory is planned by MindSpore's Ascend backend; nothing is launched")
    figures = {"function": options.function, "batch_size": options.total_batch_size, "device": device, "dry_run": dry,
               **dict.fromkeys(("microbatch", "accumulate_step", "peak", "memory_limit", "noise_scale", "worth"))}
    failed = None
    try:
        plan = plan_micro_batch(make_step, options.total_batch_size, memory_limit=options.memory_limit,
                                device_target=device, on_trial=_show)
        print(plan, flush=True)
        figures |= asdict(plan)
        if options.noise_scale:
            noise = measure_noise(make_step, plan, options.noise_scale, device)
            print(table(plan, noise))
            figures |= {"noise_scale": noise, "worth": longest_within(plan, noise)}
    except PlanError as error:
        failed = error
        figures["trials"] = [asdict(trial) for trial in error.trials]
    if options.json:
        write_json(options.json, figures)
    if failed:
        print(f"ms-accum plan: error: {failed}", file=sys.stderr)
    return 1 if failed else 0


def _show(trial: Trial) -> None:
    print(f"trial: microbatch {trial.microbatch:,} {'fits' if trial.fits else trial.ended}", flush=True)
