"""Compare ways of accumulating gradients; each contestant in a process of its own.

Contestants first agree on the parameters after three windows (with a float64 NumPy network, or with the undivided batch); who does
not is reported and not measured. Then they are timed in rounds that alternate between them, and ratios are taken within a round.
A contestant whose package is missing is skipped, one that crashes is reported; both by name. The last line printed is one JSON object.
"""
from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from tempfile import TemporaryDirectory

import plan
import records
from contestants import MODULES
from digits import unpack
from launch import time_launch
from rounds import plan_group, time_group, weigh_group
from suites import QUICK_ROUNDS, REFEREE, ROUNDS, SUITES, Group

RECORDS = Path(__file__).with_name("records")
QUICK_DIGITS = 640


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, with status 2."""

    def error(self, message: str) -> None:
        self.exit(2, f"{self.prog}: error: {message}\n")


def main(arguments: list[str]) -> None:
    """Run a suite, write its record, print its summary."""
    parser = make_parser()
    options = parser.parse_args(arguments)
    with TemporaryDirectory(prefix="benchmarks-") as scratch:
        try:
            groups = chosen_groups(options, Path(scratch) / "digits")
            if options.suite == "ascend":
                os.environ.update(plan.environment(Path(scratch)))
        except (ValueError, OSError) as error:
            parser.error(str(error))
        rounds = options.rounds or (QUICK_ROUNDS if options.quick else ROUNDS)[options.suite]
        file = record_file(options)
        kept = records.read(file)["groups"] if options.groups and file and file.exists() else []
        done = {group["name"]: group for group in kept}
        # Written after each group: a run that is interrupted keeps what it has.
        for group in measure(options.suite, groups, rounds, Path(scratch)):
            done[group["name"]] = group
            record = records.make(options.suite, options.quick, command_line(arguments), list(done.values()))
            if file:
                records.write(record, file)
    print(json.dumps(records.summary(record, file and file.name)))


def make_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = Parser(prog="run.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                    epilog="contestants: " + ", ".join(MODULES) + "\n\nThen: python tutorials/benchmarks/report.py")
    parser.add_argument("--suite", required=True, choices=SUITES,
                        help="mlp: every contestant on one MLP; memory: growth of peak memory; scaling: window lengths and networks; "
                             "strategies: ours and the ways in use, microbatches whole and cut; "
                             "skipping: on_nonfinite; distributed: 1, 2 and 4 ranks; mnist: a whole epoch; "
                             "ascend: peak memory on Ascend in a dry run, on any Linux machine")
    parser.add_argument("--quick", action="store_true", help="tiny networks and few rounds: does everything work? Its figures say nothing")
    parser.add_argument("--rounds", type=_count, metavar="N",
                        help=f"rounds to take medians over (default: {', '.join(f'{n} for {suite}' for suite, n in ROUNDS.items())})")
    parser.add_argument("--contestants", type=_names, metavar="A,B,...",
                        help="only these (default: all of the suite's); what ratios are held against always runs")
    parser.add_argument("--groups", metavar="A;B;...",
                        help="only the groups of these names; the record keeps what it has of the others")
    parser.add_argument("--data", default="embedded", metavar="DIR",
                        help="mnist: a folder with MNIST, as `ms-accum mnist` takes it, or 'embedded' (default)")
    parser.add_argument("--output", type=Path, metavar="DIR",
                        help="folder of the record, <suite>.json (default: records/ beside this file; with --quick: not written)")
    return parser


def chosen_groups(options: argparse.Namespace, digits: Path) -> list[Group]:
    """The suite's groups with who was asked for. Raises ValueError if one of them is not in the suite, or digits are bad."""
    if options.suite == "mnist":
        unpack(options.data, digits, QUICK_DIGITS if options.quick else None)
    groups = SUITES[options.suite](options.quick, digits)
    names = [group.name for group in groups]
    wanted = names if options.groups is None else [name.strip() for name in options.groups.split(";")]
    for name in wanted:
        if name not in names:
            raise ValueError(f"argument --groups: {name!r} is not in suite {options.suite}; choose from {'; '.join(names)}")
    groups = [group for group in groups if group.name in wanted]
    chosen = [restricted(group, options.contestants) for group in groups]
    there = {name for group in chosen for name in group.contestants}
    for name in options.contestants or ():
        if name not in there:
            known = dict.fromkeys(name for group in groups for name in group.contestants)
            raise ValueError(f"argument --contestants: {name!r} is not in suite {options.suite}; choose from {', '.join(known)}")
    return chosen


def restricted(group: Group, names: tuple[str, ...] | None) -> Group:
    """The group with the contestants that were asked for, its base and its referee."""
    if names is None:
        return group
    needed = (*group.base, *(() if group.referee else (REFEREE,)))
    kept = tuple(name for name in group.contestants if name in needed or name in names)
    # A control belongs to no suite, but can be asked for in any that trains windows.
    controls = tuple(name for name in names if name == "wrong-denominator" and "folder" not in group.case)
    return replace(group, contestants=kept + controls)


def measure(suite: str, groups: list[Group], rounds: int, scratch: Path) -> Iterator[dict]:
    """The groups' records, one by one; groups of as many ranks are measured together."""
    if suite == "distributed":
        launches = groupby(groups, key=lambda group: group.case["ranks"])
        for ranks, together in launches:
            yield from time_launch(list(together), rounds, scratch / f"{ranks}-ranks")
        return
    one = {"memory": weigh_group, "ascend": plan_group}.get(suite, time_group)
    for i, group in enumerate(groups):
        yield one(group, rounds, scratch / str(i))


def record_file(options: argparse.Namespace) -> Path | None:
    """Where the record goes: a quick run is none unless a folder is named."""
    if options.output is None and options.quick:
        return None
    return (options.output or RECORDS) / f"{options.suite}.json"


def command_line(arguments: list[str]) -> str:
    """The command without the folders of this machine."""
    return shlex.join(["python", "tutorials/benchmarks/run.py", *(Path(a).name if a.startswith("/") else a for a in arguments)])


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number from 1, got {text!r}")
    return int(text)


def _names(text: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    if not names:
        raise argparse.ArgumentTypeError(f"expected names with commas between them, got {text!r}")
    for name in names:
        if name not in MODULES:
            raise argparse.ArgumentTypeError(f"unknown contestant {name!r}; choose from {', '.join(MODULES)}")
    return names


if __name__ == "__main__":
    # As Ctrl-C: the workers must not outlive the runner.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        main(sys.argv[1:])
    except KeyboardInterrupt:
        sys.exit("run.py: interrupted")
