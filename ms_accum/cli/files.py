"""The file that a command writes: check its name before, replace it atomically, and print its name."""
from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any


def file_to_write(text: str) -> Path:
    """Return the path of a file to write, as the type of an option. Raise ArgumentTypeError if it cannot be written."""
    path = Path(text)
    try:
        if path.exists() and not path.is_file():
            raise OSError(None, "it is not a regular file")
        with TemporaryDirectory(dir=path.parent, prefix=path.name):
            return path
    except OSError as error:
        raise argparse.ArgumentTypeError(f"cannot write {path} ({error.strerror}); name a new file, or one to "
                                         "overwrite, in a folder that exists") from error


def write_json(path: Path, figures: dict[str, Any]) -> None:
    """Replace the file by `figures`, with null for NaN and infinity, and text for values that JSON does not support."""
    figures = json.loads(json.dumps(figures, default=str), parse_constant=lambda constant: None)
    with TemporaryDirectory(dir=path.parent, prefix=f".{path.name}-") as folder:
        part = Path(folder) / path.name
        part.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
        os.replace(part, path)
    # A file name need not be UTF-8.
    print(f"wrote {str(path).encode(errors='backslashreplace').decode()}", flush=True)
