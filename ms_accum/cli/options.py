"""Define commands, and read the values of their options: numbers, files to write, and functions by name."""
from __future__ import annotations

import argparse
import os
import pkgutil
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

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


def number(convert: Callable[[str], float], accepts: Callable[[float], bool], expected: str, text: str) -> float:
    """Return the number in `text`. Raise ArgumentTypeError unless `convert` and `accepts` accept it."""
    with suppress(ValueError):
        if accepts(value := convert(text)):
            return value
    raise argparse.ArgumentTypeError(f"expected {expected}, got {text!r}")


count = partial(number, int, lambda n: 1 <= n <= LARGEST_INT32, f"a whole number from 1 to {LARGEST_INT32}")


def output(*suffixes: str) -> Callable[[str], Path]:
    """Return the type of an option for a file to write; it raises ArgumentTypeError if the file cannot be written."""
    def file(text: str) -> Path:
        path = Path(text)
        if suffixes == (".png",) and find_spec("matplotlib") is None:
            raise argparse.ArgumentTypeError("matplotlib is not installed; install it, e.g. with "
                                             f"{sys.executable} -m pip install matplotlib")
        if suffixes and path.suffix not in suffixes:
            raise argparse.ArgumentTypeError(f"{path} does not end in {' or '.join(suffixes)}; name the file "
                                             f"{path.stem or 'name'}{suffixes[0]}")
        try:
            if path.exists() and not path.is_file():
                raise OSError(None, "it is not a regular file")
            with TemporaryDirectory(dir=path.parent, prefix=path.name):
                return path
        except OSError as error:
            raise argparse.ArgumentTypeError(f"cannot write {path} ({error.strerror}); name a new file, or one to "
                                             "overwrite, in a folder that exists") from error
    return file


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
