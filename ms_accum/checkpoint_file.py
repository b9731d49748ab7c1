"""The file of a checkpoint: written atomically, sealed with a SHA-256, read only if it is whole.

It is in one of MindSpore's own formats. The entry "ms_accum" describes the others as JSON and holds the SHA-256 of the
file. With several ranks each rank has a file, and rank 0's file names the generation of the others.
"""
from __future__ import annotations

import json
import os
import re
from hashlib import sha256
from pathlib import Path
from secrets import token_hex
from shutil import rmtree
from socket import gethostname
from typing import Any, Union

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor

from .errors import one_line

SUFFIXES = (".ckpt", ".safetensors")
ABOUT = "ms_accum"
_VERSION = 3
_MARK = b'{"ms_accum checkpoint, sha256": "'
_DIGEST = re.compile(re.escape(_MARK) + rb"([0-9a-f]{64})")
_BLANK = _MARK + b"0" * 64


# This host. Containers that share its name count processes apart.
_HERE = sha256(f"{gethostname()} {Path('/proc/self/ns/pid').resolve().name}".encode()).hexdigest()[:8]


class CheckpointError(ValueError):
    """A file that cannot be resumed from; nothing was loaded."""


def checked_path(path: Union[str, os.PathLike]) -> Path:
    """Return the absolute path. ValueError unless it ends in one of `SUFFIXES`."""
    path = Path(path).resolve()  # a link stays one, and what it points to is replaced
    if path.suffix not in SUFFIXES:
        raise ValueError(f"{path} ends in {path.suffix!r}, expected one of {', '.join(SUFFIXES)}, MindSpore's formats")
    return path


def _as_json(extra: Any) -> str:
    try:
        text = json.dumps(extra)
        same = repr(json.loads(text)) == repr(extra)  # where NaN is equal to NaN, and 1 is not to True
    except (TypeError, ValueError, RecursionError) as error:
        raise TypeError(f"extra cannot be written as JSON ({error}); give dicts, lists, str, numbers, bool and "
                        "None") from error
    if not same:
        raise TypeError("extra would come back from JSON as something else; give lists for tuples, and str for keys")
    return text


def write_file(path: Path, entries: dict[str, Parameter], about: dict) -> None:
    """Write a file beside `path` and flush it to the disk, then give it that name.

    `about` holds any JSON values. TypeError if its "extra" is none; OSError if the file cannot be written.
    """
    about = {"version": _VERSION, "mindspore": ms.__version__, **about, "extra": _as_json(about["extra"])}
    if not path.parent.is_dir():
        raise FileNotFoundError(f"the folder {path.parent} does not exist; make it first")
    _remove_dead_parts(path)
    # A folder of its own: MindSpore and safetensors write beside it first, under names that only they know.
    folder = path.with_name(f"{_parts_of(path)}{os.getpid()}-{token_hex(4)}")
    part = folder / path.name
    text = _BLANK + b'"}' + json.dumps(about).encode()
    saved = [{"name": name, "data": p} for name, p in entries.items()]
    saved.append({"name": ABOUT, "data": Tensor(np.frombuffer(text, np.uint8))})
    try:
        try:
            folder.mkdir()
            ms.save_checkpoint(saved, str(part), format=path.suffix[1:])
        except Exception as error:  # for a full disk: an OSError, a RuntimeError or a SafetensorError
            raise OSError(f"{path} cannot be written ({one_line(error)})") from error
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(part, 0o666 & ~umask)  # MindSpore leaves it read-only, and a next one could not replace it everywhere
        _seal(part)
        rename_file(part, path)
    finally:
        rmtree(folder, ignore_errors=True)


def _seal(part: Path) -> None:
    """Write the SHA-256 of a file in place of its blank, and flush it to the disk."""
    with part.open("r+b") as file:
        data = file.read()
        file.seek(data.rindex(_BLANK) + len(_MARK))
        file.write(sha256(data).hexdigest().encode())
        file.flush()
        os.fsync(file.fileno())


def rename_file(part: Path, path: Path) -> None:
    """Give a file its name, also on the disk."""
    os.replace(part, path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)  # or the name may be lost with the power
    finally:
        os.close(folder)


def _parts_of(path: Path) -> str:
    """Return how a folder of an unfinished file for `path` is called; the process and a number of the call follow."""
    return f".{path.stem.lstrip('.')}.part-{_HERE}-"


def _remove_dead_parts(path: Path) -> None:
    """Remove what processes of this host left that were killed while they wrote; others may be writing now."""
    name = re.compile(rf"{re.escape(_parts_of(path))}(\d+)-[0-9a-f]{{8}}")
    for left in path.parent.iterdir():
        found = name.fullmatch(left.name)
        if found and not _lives(int(found[1])):
            rmtree(left, ignore_errors=True)


def _lives(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # somebody else's
        pass
    return True


def read_file(path: Path) -> tuple[dict[str, Tensor], dict]:
    """Return the entries of a complete file, and what it says about them; else raise CheckpointError."""
    data = path.read_bytes()
    found = _DIGEST.search(data)
    if found is None:
        raise CheckpointError(f"{path} is truncated, or no checkpoint of ms_accum; give a file that save_checkpoint "
                              "wrote")
    blank = data[:found.start()] + _BLANK + data[found.end():]
    if sha256(blank).hexdigest().encode() != found.group(1):
        raise CheckpointError(f"{path} is damaged (SHA-256 mismatch); restore it from a copy")
    try:
        loaded = ms.load_checkpoint(str(path), format=path.suffix[1:])
        text = loaded.pop(ABOUT).asnumpy().tobytes()
        about = json.loads(text[len(_BLANK) + 2:])
        about["extra"] = json.loads(about["extra"])
        version = about["version"]
    # A file with a right checksum and wrong contents was forged, so any error refuses it.
    except Exception as error:
        raise CheckpointError(f"{path} cannot be read ({type(error).__name__}: {one_line(error)})") from error
    if version != _VERSION:
        raise CheckpointError(f"{path} is of version {version}, expected {_VERSION}; load it with the ms_accum that "
                              "wrote it")
    return loaded, about


def path_of_rank(path: Path, rank: int, ranks: int, generation: str) -> Path:
    """Return the path of the file of a rank other than 0, for a checkpoint at `path`."""
    return path.with_name(f"{path.stem}.rank{rank}of{ranks}-{generation}{path.suffix}")


def remove_generations(path: Path, rank: int, ranks: int, mine: Path) -> None:
    """Remove what this rank's earlier generations left, those of killed runs included."""
    name = re.compile(rf"\.?{re.escape(path.stem)}\.rank{rank}of{ranks}-[0-9a-f]{{16}}"
                      rf"(\.part-[0-9a-f-]+|{re.escape(path.suffix)})")
    for old in path.parent.iterdir():
        if name.fullmatch(old.name) and old.is_dir():
            rmtree(old, ignore_errors=True)
        elif name.fullmatch(old.name) and old != mine:
            old.unlink(missing_ok=True)
