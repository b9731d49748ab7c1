"""The command `ms-accum` and its subcommands."""
from __future__ import annotations

import argparse
import os
import sys
import warnings
from collections.abc import Sequence
from types import ModuleType
from typing import NoReturn, Optional

from .. import __version__
from ..runtime import avoid_busy_waiting
from .interrupts import noting_interrupts


class Parser(argparse.ArgumentParser):
    """Report errors in one line without the usage."""

    def error(self, message: str) -> NoReturn:
        """Exit with status 2 and `message` in one line on stderr."""
        self.exit(2, f"{self.prog}: error: {' '.join(message.split())}\n")


def run_command(commands: Sequence[ModuleType], argv: Optional[Sequence[str]] = None) -> int:
    """Run `ms-accum` with `argv` (default: `sys.argv[1:]`) and return the exit status.

    `commands` are modules whose `add_parser` adds subcommands.

    The exit status is 0 for success, 1 if something failed or a check says no, 2 for a bad command line or wrong input,
    130 after Ctrl-C, and 141, without a message, if stdout was closed early (`| head`).
    """
    parser = Parser(prog="ms-accum", description="Gradient accumulation for MindSpore.", allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"ms_accum {__version__}")
    subcommands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in commands:
        command.add_parser(subcommands)
    try:
        with noting_interrupts():
            status = _run(parser, argv)
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


def _run(parser: Parser, argv: Optional[Sequence[str]]) -> int:
    try:
        options = parser.parse_args(argv)
        run = vars(options).pop("run")
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
