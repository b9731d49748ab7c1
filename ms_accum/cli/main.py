"""The command `ms-accum`: one subcommand for each thing it does."""
from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn, Optional

from .. import __version__
from ..runtime import avoid_busy_waiting
from . import check as check_command
from . import mnist
from . import plan as plan_command


class Parser(argparse.ArgumentParser):
    """An argument parser that reports errors in one line, without the usage."""

    def error(self, message: str) -> NoReturn:
        """Exit with status 2 and `message` in one line on stderr."""
        self.exit(2, f"{self.prog}: error: {' '.join(message.split())}\n")

    def parse_known_args(self, *arguments: Any) -> tuple[argparse.Namespace, list[str]]:
        """Parse as argparse does, but refuse "--" as a value."""
        options, others = super().parse_known_args(*arguments)
        empty = next((name for name, value in vars(options).items() if value == []), None)
        if empty is not None:  # up to Python 3.12, argparse drops "--" from "--json=--" and gives an empty list
            self.error(f"argument --{empty.replace('_', '-')}: expected one argument, got '--'")
        return options, others


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Run `ms-accum` with `argv` (default: `sys.argv[1:]`).

    Returns:
        Exit status: 0; 1 if something failed on the way, or a check says no; 2 for a bad command line; 130 after Ctrl-C;
        141, without a message, if stdout was closed early (`| head`).
    """
    try:
        status = _run(argv)
        print(end="", flush=True)  # so that an error in writing the rest is caught here
        return status
    except KeyboardInterrupt:
        print("ms-accum: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # Or Python reports the error again when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except OSError as error:  # a full disk behind stdout, say
        print(f"ms-accum: error: {error}", file=sys.stderr)
        return 1


def _run(argv: Optional[Sequence[str]]) -> int:
    try:
        options = _parser().parse_args(argv)
        avoid_busy_waiting()
        with _termination_as_interrupt():
            options.run(options)
    except SystemExit as stop:
        return int(stop.code or 0)
    return 0


@contextmanager
def _termination_as_interrupt() -> Iterator[None]:
    # Whenever MindSpore runs a graph it installs a handler that turns SIGINT into SIGTERM (seen in 2.10); SIGTERM's stays.
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _parser() -> Parser:
    parser = Parser(prog="ms-accum", description="Gradient accumulation for MindSpore.", allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"ms_accum {__version__}")
    subcommands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    mnist.add_parser(subcommands)
    check_command.add_parser(subcommands)
    plan_command.add_parser(subcommands)
    return parser
