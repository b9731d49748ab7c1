"""The command `ms-accum check`: run `check_equivalence` from a shell."""
from __future__ import annotations

import argparse
from dataclasses import asdict

from ..check.equivalence import check_equivalence
from .files import file_to_write, write_json
from .options import add_command, imported, reporting, whole_number

DESCRIPTION = """\
Compute the gradient of a batch twice, undivided and accumulated over its pieces, and print the largest difference and
each layer or loss that causes it, with a remedy.

FUNCTION returns (forward_fn, network, batch) or (forward_fn, network, batch, weight_fn), as for make_train_step; batch
is a tuple or a dict of Tensors.

Exit status: 0 if accumulation is exact, 1 if it is not, 2 if the check cannot tell or could not run"""

EXAMPLES = """\
examples:
  ms-accum check train:make_case        # train.py holds def make_case(): return forward_fn, network, (data, label)
  ms-accum check my_package.models:resnet --pieces 8 --json report.json"""


def add_parser(subcommands: argparse._SubParsersAction) -> None:
    """Add `check` to the commands of `ms-accum`."""
    add = add_command(subcommands, "check", run, "check whether accumulation is exact for your network", DESCRIPTION,
                      EXAMPLES).add_argument
    add("case", metavar="MODULE:FUNCTION", help="e.g. train:make_case for train.py")
    add("--pieces", type=whole_number(2), default=4, metavar="K",
        help="pieces of the batch (default: %(default)s)")
    add("--has-weight", action="store_true", help="forward_fn returns (loss, weight)")
    add("--json", type=file_to_write, metavar="FILE", help="write the report")


def run(options: argparse.Namespace) -> int:
    """Check, print and write. Return 0 if accumulation is exact, 1 if it is not, 2 if the check cannot tell."""
    function = imported(options.case, "train:make_case")
    with reporting(options.case):
        case = function()
    if not isinstance(case, tuple) or len(case) not in (3, 4):
        got = f"{len(case)} values" if isinstance(case, tuple) else f"a {type(case).__name__}"
        raise ValueError(f"{options.case} returned {got}, expected (forward_fn, network, batch) or "
                         "(forward_fn, network, batch, weight_fn)")
    with reporting(options.case):
        forward_fn, network, batch, *weight_fn = case
        report = check_equivalence(forward_fn, network, batch, options.pieces,
                                   weight_fn=weight_fn[0] if weight_fn else None, has_weight=options.has_weight)
    print(report, flush=True)
    if options.json:
        write_json(options.json, {"case": options.case, "verdict": report.verdict, **asdict(report)})
    return {True: 0, False: 1, None: 2}[report.ok]
