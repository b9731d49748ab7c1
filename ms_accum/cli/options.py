"""Commands and the values of their options: numbers, and functions by their names."""
from __future__ import annotations

import argparse
import importlib
import os
import sys
import traceback
from collections.abc import Callable
from functools import partial

from ..arguments import LARGEST_INT32, instance_of


def add_command(subcommands: argparse._SubParsersAction, name: str, run: Callable, summary: str, description: str,
                epilog: str) -> argparse.ArgumentParser:
    """Add a command to `ms-accum`; `run(parser, options)` runs it."""
    parser = subcommands.add_parser(name, help=summary, description=description, epilog=epilog, allow_abbrev=False,
                                    formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.set_defaults(run=partial(run, parser))
    return parser


def renamed(new: str, text: str) -> None:
    """Refuse the old name of an option with the new one. ArgumentTypeError."""
    raise argparse.ArgumentTypeError(f"is now called {new}")


def number(convert: Callable[[str], float], accepts: Callable[[float], bool], expected: str, text: str) -> float:
    """Return the number that `text` spells. ArgumentTypeError unless `convert` and `accepts` take it."""
    try:
        if accepts(value := convert(text)):
            return value
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"expected {expected}, got {text!r}")


count = partial(number, int, lambda n: 1 <= n <= LARGEST_INT32, f"a whole number from 1 to {LARGEST_INT32}")


def imported(name: str, example: str) -> Callable:
    """Return the function that is called `MODULE:FUNCTION`. ValueError or TypeError if there is none."""
    argument = "argument MODULE:FUNCTION"
    module_name, _, function = name.partition(":")
    if not all(part.isidentifier() for part in (*module_name.split("."), function)) or module_name.endswith(".py"):
        raise ValueError(f"{argument}: got {name!r}, expected e.g. {example}")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except BrokenPipeError:
        raise
    except Exception as error:
        if not isinstance(error, ModuleNotFoundError) or not f"{module_name}.".startswith(f"{error.name}."):
            traceback.print_exc()  # an error inside that module
        raise ValueError(f"{argument}: cannot import {module_name} ({type(error).__name__}: {error}); "
                         "run ms-accum in the folder that holds it") from error
    if not hasattr(module, function):
        raise ValueError(f"{argument}: {module_name} has no function {function}, expected e.g. {example}")
    return instance_of(f"{argument}: {name}", getattr(module, function), Callable, f"a function, e.g. {example}")
