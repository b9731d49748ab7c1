"""Files that a run leaves: checked before it starts, and either written whole or not at all."""
from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from ..mnist.report import as_json


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


@contextmanager
def whole(path: Path) -> Iterator[Path]:
    """A path to write to, which replaces `path` at the end of the `with` block, or vanishes if that is left by an error."""
    with TemporaryDirectory(dir=path.parent, prefix=f".{path.name}-") as folder:
        part = Path(folder) / path.name
        yield part
        os.replace(part, path)
