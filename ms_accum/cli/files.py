"""Write the files of a command: replace them atomically, and print their names."""
from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any


def write_json(path: Path, figures: dict[str, Any]) -> None:
    """Write `figures`, with null for NaN and infinity, and text for values that JSON does not support."""
    figures = json.loads(json.dumps(figures, default=str), parse_constant=lambda constant: None)
    write_file(path, lambda part: part.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8"))


def write_file(path: Path, write: Callable[[Path], Any]) -> None:
    """Let `write` write a file, then replace `path` by it."""
    with TemporaryDirectory(dir=path.parent, prefix=f".{path.name}-") as folder:
        part = Path(folder) / path.name
        write(part)
        os.replace(part, path)
    say_written(path)


def say_written(path: Path) -> None:
    """Print the name of a file that was written."""
    print(f"wrote {printable(path)}", flush=True)


def printable(path: object) -> str:
    """Return a path as text that stdout can encode; a file name need not be UTF-8."""
    return str(path).encode(errors="backslashreplace").decode()
