"""Files that a command writes: checked before it starts, replaced atomically, and named when they are written."""
from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def require_outputs(options: argparse.Namespace, **suffixes: tuple[str, ...]) -> None:
    """Raise ValueError unless each file that an option of `suffixes` names has one of these and can be written."""
    option_of: dict[Path, str] = {}
    for name, endings in suffixes.items():
        path = getattr(options, name)
        if path is None:
            continue
        if name == "plot" and find_spec("matplotlib") is None:
            raise ValueError("argument --plot: matplotlib is not installed; install it, e.g. with "
                             f"{sys.executable} -m pip install matplotlib")
        if path.resolve() in option_of:
            raise ValueError(f"arguments --{option_of[path.resolve()]} and --{name} name the same file; give each its "
                             "own")
        option_of[path.resolve()] = name
        if not path.name.endswith(endings):
            raise ValueError(f"argument --{name}: {path} does not end in {' or '.join(endings)}; name the file "
                             f"{path.stem or 'name'}{endings[0]}")
        if path.exists() and not path.is_file():
            raise ValueError(f"argument --{name}: {path} is not a regular file; name a new file or one to overwrite")
        try:
            with TemporaryDirectory(dir=path.parent):
                pass
        except OSError as error:
            raise ValueError(f"argument --{name}: cannot write {path}: {path.parent}: {error.strerror}; name a file in "
                             "a folder that exists and can be written") from error


def write_json(path: Path, figures: dict) -> None:
    """Write `figures`, with null for NaN and infinity."""
    figures = json.loads(json.dumps(figures), parse_constant=lambda constant: None)
    with replacing(path) as part:
        part.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


def write_png(path: Path, figure: Figure) -> None:
    """Write a figure."""
    with replacing(path) as part:
        figure.savefig(part, format="png", dpi=120)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a path to write to. It replaces `path` at the end of the block, and is removed after an error."""
    with TemporaryDirectory(dir=path.parent, prefix=f".{path.name}-") as folder:
        part = Path(folder) / path.name
        yield part
        os.replace(part, path)
    say_written(path)


def say_written(path: Path) -> None:
    """Name a file that was written."""
    print(f"wrote {printable(path)}", flush=True)


def printable(path: object) -> str:
    """Return a path as text that stdout can encode: a name need not be UTF-8."""
    return str(path).encode(errors="backslashreplace").decode()
