"""The command `ms-accum check`: run `check_equivalence` from a shell."""
from __future__ import annotations

import argparse
import os
import traceback
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path

from ..check.equivalence import Report, check_equivalence
from .files import require_outputs, write_json
from .options import add_command, count, imported, number, renamed

_PACKAGE = os.path.dirname(os.path.dirname(__file__))
DESCRIPTION = """\
Is accumulation exact for a network? Computes the gradient of a batch, undivided and accumulated over its pieces, prints
the largest difference, and names each layer or loss that makes the two differ, with a remedy.

MODULE:FUNCTION names a function without arguments in a module that can be imported from the current folder. It returns
(forward_fn, network, batch) or (forward_fn, network, batch, weight_fn), as for ms_accum.make_train_step; batch is a
tuple or a dict of Tensors.

Exit status: 0 if accumulation is exact up to rounding, 1 if it is not, 2 if the check cannot tell or could not run."""

EXAMPLES = """\
examples:
  ms-accum check train:make_case        # train.py holds def make_case(): return forward_fn, network, (data, label)
  ms-accum check my_package.models:resnet --pieces 8 --json report.json"""


def add_parser(subcommands: argparse._SubParsersAction) -> None:
    """Add `check` to the commands of `ms-accum`."""
    add = add_command(subcommands, "check", run, "is accumulation exact for your network?", DESCRIPTION,
                      EXAMPLES).add_argument
    add("case", metavar="MODULE:FUNCTION", help="a function that returns forward_fn, network and batch")
    add("--pieces", type=partial(number, int, lambda n: n >= 2, "a whole number from 2"), default=4, metavar="K",
        help="number of pieces that the batch is cut into (default: %(default)s)")
    add("--micro-size", type=partial(renamed, "--pieces"), default=argparse.SUPPRESS, help=argparse.SUPPRESS)
    add("--losses", type=count, default=1, metavar="N",
        help="number of losses that forward_fn returns, each with a weight of its own (default: 1)")
    add("--json", type=Path, metavar="FILE", help="write the report")


def run(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Check, print, write. Exit with status 1 if accumulation is not exact, with 2 if the check cannot tell."""
    try:
        require_outputs(options, json=("",))
        function = imported(options.case, "train:make_case")
    except (ValueError, TypeError) as error:
        parser.error(str(error))
    report = _report(parser, options, function)
    print(report, flush=True)
    if options.json:
        write_json(options.json, {"case": options.case, "verdict": report.verdict, **asdict(report)})
    if not report.ok:
        parser.exit(2 if report.ok is None else 1)


def _report(parser: argparse.ArgumentParser, options: argparse.Namespace, function: Callable) -> Report:
    try:
        case = function()
    except BrokenPipeError:
        raise
    except Exception as error:
        traceback.print_exc()  # the error is in the user's code
        parser.error(f"{options.case} raised {type(error).__name__}: {error}")
    if not isinstance(case, tuple) or len(case) not in (3, 4):
        got = f"{len(case)} values" if isinstance(case, tuple) else f"a {type(case).__name__}"
        parser.error(f"{options.case} returned {got}, expected (forward_fn, network, batch) or "
                     "(forward_fn, network, batch, weight_fn)")
    try:
        return check_equivalence(*case[:3], options.pieces, weight_fn=case[3] if len(case) == 4 else None,
                                 losses=options.losses)
    except BrokenPipeError:
        raise
    except Exception as error:
        if not traceback.extract_tb(error.__traceback__)[-1].filename.startswith(_PACKAGE):
            traceback.print_exc()
        parser.error(f"{options.case}: {error}")
