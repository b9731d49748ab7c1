"""Files that a command writes: checked before it starts, and replaced atomically."""
from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from math import isfinite
from pathlib import Path
from tempfile import TemporaryDirectory


def require_outputs(options: argparse.Namespace, suffixes: dict[str, tuple[str, ...]]) -> None:
    """Raise ValueError unless every file can be written that an option of `suffixes` names, with one of these suffixes."""
    paths = {name: getattr(options, name) for name in suffixes if getattr(options, name)}
    if "plot" in paths and find_spec("matplotlib") is None:
        raise ValueError("argument --plot: matplotlib is not installed; install it, e.g. with "
                         f"{sys.executable} -m pip install matplotlib")
    for name, path in paths.items():
        same = next((other for other in paths if other < name and paths[other].resolve() == path.resolve()), None)
        if same:
            raise ValueError(f"arguments --{same} and --{name} name the same file; name each another one")
        try:
            require_writable(path, *suffixes[name])
        except ValueError as error:
            raise ValueError(f"argument --{name}: {error}") from error


def require_writable(path: Path, *suffixes: str) -> None:
    """Raise ValueError unless a file named `path`, ending in one of `suffixes`, can be written."""
    if not path.name.endswith(suffixes):
        raise ValueError(f"{path} does not end in {' or '.join(suffixes)}; name the file {path.stem or 'name'}{suffixes[0]}")
    if path.exists() and not path.is_file():
        raise ValueError(f"{path} is no regular file; name a new file or one to overwrite")
    try:
        with TemporaryDirectory(dir=path.parent):
            pass
    except OSError as error:
        raise ValueError(f"cannot write {path}: {path.parent}: {error.strerror}; name a file in a folder that exists "
                         "and can be written") from error


def write_json(path: Path, figures: dict) -> None:
    """Write `figures`, with null for NaN and infinity."""
    with whole(path) as part:
        part.write_text(json.dumps(as_json(figures), indent=2, allow_nan=False) + "\n", encoding="utf-8")


def as_json(value: object) -> object:
    """Return `value` with None for every float that JSON cannot hold: NaN and infinity."""
    if isinstance(value, dict):
        return {key: as_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [as_json(item) for item in value]
    return None if isinstance(value, float) and not isfinite(value) else value


@contextmanager
def whole(path: Path) -> Iterator[Path]:
    """Yield a path to write to. It replaces `path` at the end of the `with` block, and is removed after an error."""
    with TemporaryDirectory(dir=path.parent, prefix=f".{path.name}-") as folder:
        part = Path(folder) / path.name
        yield part
        os.replace(part, path)
