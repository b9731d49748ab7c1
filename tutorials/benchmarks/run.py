"""Compare ways of accumulating gradients; each contestant in a process of its own.

Contestants first agree on the parameters after three windows (with a float64 NumPy network, or with the undivided
batch); who does not is reported and not measured. Then they are timed in rounds that alternate between them, and ratios
are taken within a round. A contestant whose package is missing is skipped, one that crashes is reported; both by name.
The last line printed is one JSON object.
"""
from __future__ import annotations

import argparse
import json
import shlex
import signal
import sys
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import records
from contestants import MODULES
from harness import REFEREE, Group, time_each
from suites import SUITES


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, with status 2."""

    def error(self, message: str) -> None:
        self.exit(2, f"{self.prog}: error: {message}\n")


def main(arguments: list[str]) -> None:
    """Run a suite, write its record, print its summary."""
    parser = make_parser()
    options = parser.parse_args(arguments)
    suite = SUITES[options.suite]
    with TemporaryDirectory(prefix="benchmarks-") as scratch:
        try:
            groups = chosen(suite.groups(options.quick, Path(scratch)), options)
        except (ValueError, OSError) as error:
            parser.error(str(error))
        rounds = options.rounds or (1 if options.quick else suite.rounds)
        # A quick run leaves no record unless a folder is named.
        folder = options.output or (None if options.quick else records.FOLDER)
        file = folder and folder / f"{options.suite}.json"
        done: list[dict] = []
        # Written after each group: a run that is interrupted keeps what it has.
        for group in (suite.measure or time_each)(groups, rounds, Path(scratch)):
            done.append(records.summarised(group))
            record = records.make(options.suite, options.quick, command_line(arguments), done)
            if file:
                records.write(record, file)
    print(json.dumps(records.summary(record, file and file.name)))


def make_parser() -> argparse.ArgumentParser:
    """The command line."""
    rounds = ", ".join(f"{suite.rounds} for {name}" for name, suite in SUITES.items())
    suites = "; ".join(f"{name}: {suite.help}" for name, suite in SUITES.items())
    parser = Parser(prog="run.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                    epilog="contestants: " + ", ".join(MODULES) + "\n\nThen: python tutorials/benchmarks/report.py")
    parser.add_argument("--suite", required=True, choices=SUITES, help=suites)
    parser.add_argument("--quick", action="store_true",
                        help="tiny networks and few rounds: does everything work? Its figures say nothing")
    parser.add_argument("--rounds", type=_count, metavar="N", help=f"rounds to take medians over (default: {rounds})")
    parser.add_argument("--contestants", type=_names, metavar="A,B,...",
                        help="only these (default: all of the suite's); what ratios are held against always runs")
    parser.add_argument("--output", type=Path, metavar="DIR", help=(
        "folder of the record, <suite>.json (default: records/ beside this file; with --quick: not written)"))
    return parser


def chosen(groups: list[Group], options: argparse.Namespace) -> list[Group]:
    """The contestants that were asked for, with bases and referees. Raises ValueError if one is unknown."""
    if options.contestants is None:
        return groups
    found = []
    for group in groups:
        needed = {group.base, *(() if group.referee else (REFEREE,)), *options.contestants}
        kept = [name for name in group.contestants if name in needed]
        # A control belongs to no suite, but can be asked for in any.
        control = ["wrong-denominator"] if "wrong-denominator" in options.contestants else []
        found.append(replace(group, contestants=(*kept, *control)))
    for name in options.contestants:
        if not any(name in group.contestants for group in found):
            known = dict.fromkeys(name for group in groups for name in group.contestants)
            raise ValueError(f"argument --contestants: {name!r} is not in suite {options.suite}; choose from "
                             f"{', '.join(known)}")
    return found


def command_line(arguments: list[str]) -> str:
    """The command without the folders of this machine."""
    named = [Path(argument).name if argument.startswith("/") else argument for argument in arguments]
    return shlex.join(["python", "tutorials/benchmarks/run.py", *named])


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number from 1, got {text!r}")
    return int(text)


def _names(text: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    for name in names or [""]:
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
