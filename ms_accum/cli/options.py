"""Define commands, and read the values of their options: numbers, and functions by name."""
from __future__ import annotations

import argparse
import os
import pkgutil
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from ..arguments import LARGEST_INT32, instance_of

# Sources of errors that are not the user's code: this package, and Python's imports.
_OURS = os.path.dirname(os.path.dirname(__file__)), "<frozen importlib", pkgutil.__file__


def add_command(subcommands: argparse._SubParsersAction, name: str, run: Callable, summary: str, description: str,
                epilog: str) -> argparse.ArgumentParser:
    """Add a command to `ms-accum`. `run(options)` returns its exit status, and raises ValueError for wrong input."""
    parser = subcommands.add_parser(name, help=summary, description=description, epilog=epilog, allow_abbrev=False,
                                    formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.set_defaults(run=run, parser=parser)
    return parser


def whole_number(least: int) -> Callable[[str], int]:
    """Return the type of an option for a whole number from `least`; it raises ArgumentTypeError for others."""
    def number(text: str) -> int:
        with suppress(ValueError):
            if least <= int(text) <= LARGEST_INT32:
                return int(text)
        raise argparse.ArgumentTypeError(f"expected a whole number from {least} to {LARGEST_INT32}, got {text!r}")
    return number


def imported(name: str, example: str) -> Callable:
    """Return the function with the name `MODULE:FUNCTION`. Raise ValueError if there is none."""
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    with reporting(f"argument MODULE:FUNCTION: cannot import {name}, expected e.g. {example} in the current folder"):
        return instance_of("it", pkgutil.resolve_name(name), Callable, "a function")


@contextmanager
def reporting(what: str) -> Iterator[None]:
    """Raise ValueError for any error in the block; first print a traceback if it was raised in the user's code."""
    try:
        yield
    except BrokenPipeError:
        raise
    except Exception as error:
        if not traceback.extract_tb(error.__traceback__)[-1].filename.startswith(_OURS):
            traceback.print_exc()
        raise ValueError(f"{what}: {type(error).__name__}: {error}") from error
