"""The command `ms-accum` and its subcommands."""
from __future__ import annotations

import argparse
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn, Optional

from .. import __version__
from ..runtime import avoid_busy_waiting
from .interrupts import noting_interrupts


class Parser(argparse.ArgumentParser):
    """Parse arguments, and report errors in one line without the usage."""

    def error(self, message: str) -> NoReturn:
        """Exit with status 2 and `message` in one line on stderr."""
        self.exit(2, f"{self.prog}: error: {' '.join(message.split())}\n")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse as argparse does, but report an error for "--" as a value, and for one file in two options."""
        options, others = super().parse_known_args(args, namespace)
        written: dict[Path, str] = {}
        for name, value in vars(options).items():
            if value == []:  # up to Python 3.12, argparse drops "--" from "--json=--" and gives an empty list
                self.error(f"argument --{name.replace('_', '-')}: expected one argument, got '--'")
            if isinstance(value, Path) and written.setdefault(value.resolve(), name) != name:
                self.error(f"arguments --{written[value.resolve()]} and --{name} name the same file; give each its own")
        return options, others


def run_command(commands: Sequence[ModuleType], argv: Optional[Sequence[str]] = None) -> int:
    """Run `ms-accum` with `argv` (default: `sys.argv[1:]`) and return the exit status.

    `commands` are modules whose `add_parser` adds subcommands.

    The exit status is 0 for success, 1 if something failed or a check says no, 2 for a bad command line or wrong input,
    130 after Ctrl-C, and 141, without a message, if stdout was closed early (`| head`).
    """
    try:
        with noting_interrupts():
            status = _run(commands, argv)
        print(end="", flush=True)  # so that an error in writing the rest is raised here
        return status
    except KeyboardInterrupt:
        warnings.filterwarnings("ignore", "a window of the accumulator", UserWarning)  # the user has stopped it
        print("ms-accum: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # Otherwise Python reports the error again when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except OSError as error:  # e.g. stdout is a file on a full disk
        print(f"ms-accum: error: {error}", file=sys.stderr)
        return 1


def _run(commands: Sequence[ModuleType], argv: Optional[Sequence[str]]) -> int:
    parser = Parser(prog="ms-accum", description="Gradient accumulation for MindSpore.", allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"ms_accum {__version__}")
    subcommands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in commands:
        command.add_parser(subcommands)
    try:
        options = parser.parse_args(argv)
        run: Callable[[argparse.Namespace], Optional[int]] = vars(options).pop("run")
        chosen: Parser = vars(options).pop("parser")
        avoid_busy_waiting()
        try:
            return run(options) or 0
        except BrokenPipeError:
            raise
        except (ValueError, OSError) as error:
            chosen.error(str(error))
    except SystemExit as stop:
        if isinstance(stop.code, str):  # as Python does: a user's module may end the process in this way
            print(stop.code, file=sys.stderr)
            return 1
        return int(stop.code or 0)
