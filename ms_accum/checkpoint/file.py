"""The file of a checkpoint: written atomically, with a SHA-256 of its contents, read only if it is complete.

It is in one of MindSpore's own formats. The entry "ms_accum" holds the settings of the run and `extra` as JSON, and the
SHA-256 of the file. With several ranks, each rank has a file, and rank 0's file names the generation of the others.
"""
from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from glob import escape
from hashlib import sha256
from pathlib import Path
from secrets import token_hex
from shutil import rmtree
from socket import gethostname
from typing import Any, BinaryIO, Union
from warnings import warn

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor

from ..steps.errors import one_line
from .entries import Entry, entries_in, written_at

SUFFIXES = (".ckpt", ".safetensors")
ABOUT = "ms_accum"
_VERSION = 4
_MARK = b'{"ms_accum checkpoint, sha256": "'
_DIGEST = re.compile(re.escape(_MARK) + rb"([0-9a-f]{64})")
_ZEROED = _MARK + b"0" * 64
_CHUNK = 2**20  # bytes
# This host. Containers may share the name of the host, but not the numbers of processes.
_HERE = sha256(f"{gethostname()} {Path('/proc/self/ns/pid').resolve().name}".encode()).hexdigest()[:8]


class CheckpointError(ValueError):
    """Report a file that cannot be resumed from; nothing was loaded."""


def checked_path(path: Union[str, os.PathLike]) -> Path:
    """Return the absolute path. Raise ValueError unless it ends in one of `SUFFIXES`."""
    path = Path(path).resolve()  # a link is kept, and its target is replaced
    if path.suffix not in SUFFIXES:
        raise ValueError(f"{path} ends in {path.suffix!r}, expected one of {', '.join(SUFFIXES)}, MindSpore's formats")
    return path


def path_of_rank(path: Path, rank: int, ranks: int, generation: str) -> Path:
    """Return the path of a rank's file, for a checkpoint at `path`."""
    return path.with_name(f"{path.stem}.rank{rank}of{ranks}-{generation}{path.suffix}") if rank > 0 else path


def remove_generations(path: Path, rank: int, ranks: int, mine: Path) -> None:
    """Remove the files of this rank's earlier generations, also those of killed runs."""
    for old in path.parent.glob(f"{escape(path.stem)}.rank{rank}of{ranks}-{'[0-9a-f]' * 16}{path.suffix}"):
        if old != mine:
            old.unlink(missing_ok=True)


@contextmanager
def part_of(path: Path) -> Iterator[Path]:
    """Yield the path of a file in a temporary folder. The writer makes the folder; the end of the block removes it.

    It is a folder because MindSpore and safetensors make temporary files beside their own, and MindSpore removes an old
    file before it writes. Folders of processes of this host that were killed are removed as well.
    """
    start = f".{path.stem.lstrip('.')}.part-{_HERE}-"
    name = re.compile(rf"{re.escape(start)}(\d{{1,7}})-[0-9a-f]{{8}}")
    for left in path.parent.glob(f"{escape(start)}*"):
        found = name.fullmatch(left.name)
        if found and not _lives(int(found[1])):
            rmtree(left, ignore_errors=True)
    folder = path.with_name(f"{start}{os.getpid()}-{token_hex(4)}")
    try:
        yield folder / path.name
    finally:
        rmtree(folder, ignore_errors=True)


def _lives(process: int) -> bool:
    try:
        os.kill(process, 0)
    except OSError as error:
        return isinstance(error, PermissionError)  # it is somebody else's
    return True


def on_disk(value: np.ndarray, dtype: ms.Type, place: Path) -> Tensor:
    """Return a Tensor whose memory is a file at `place`, which `part_of` removes. Raise OSError if writing fails."""
    if dtype == ms.bfloat16:  # NumPy has none: in memory
        return Tensor(value, dtype)
    _require_folder(place.parents[1])
    place.parent.mkdir(exist_ok=True)
    with place.open("wb") as file:
        file.write(np.ascontiguousarray(value).data)
    return Tensor.from_numpy(np.memmap(place, value.dtype, "c", shape=value.shape))


def write_file(part: Path, entries: dict[str, Parameter], about: dict) -> None:
    """Write a file at the path that `part_of` yields, and flush it to the disk.

    `about` holds JSON values. Raise TypeError if its "extra" is not one, OSError if the file cannot be written.
    """
    about = {"version": _VERSION, "mindspore": ms.__version__, **about, "extra": _as_json(about["extra"])}
    text = _ZEROED + b'"}' + json.dumps(about).encode()
    saved = [{"name": name, "data": p} for name, p in entries.items()]
    saved.append({"name": ABOUT, "data": Tensor(np.frombuffer(text, np.uint8))})
    _require_folder(part.parents[1])
    try:
        part.parent.mkdir(exist_ok=True)
        ms.save_checkpoint(saved, str(part), format=part.suffix[1:])
        _seal(part)
    except Exception as error:  # for a full disk: an OSError, a RuntimeError or a SafetensorError
        raise OSError(f"{part.parents[1] / part.name} cannot be written ({one_line(error)})") from error


def _require_folder(folder: Path) -> None:
    if not folder.is_dir():
        raise FileNotFoundError(f"the folder {folder} does not exist; make it first")


def _as_json(extra: Any) -> str:
    try:
        text = json.dumps(extra)
        if repr(json.loads(text)) != repr(extra):  # as text, NaN equals NaN, and 1 differs from True
            raise TypeError("it would come back as something else")
        return text
    except (TypeError, ValueError, RecursionError) as error:
        raise TypeError(f"extra cannot be written as JSON ({error}); give dicts with str as keys, lists, str, numbers, "
                        "bool and None") from error


def _digest_in(file: BinaryIO) -> tuple[int, bytes]:
    """Return the position of the SHA-256 in a file, and the SHA-256; -1 if there is none.

    A checkpoint is as large as the network, so it is read in chunks.
    """
    start, before = 0, b""
    file.seek(0)
    while chunk := file.read(_CHUNK):
        chunk = before + chunk
        if found := _DIGEST.search(chunk):
            return start + found.start(1), found[1]
        before = chunk[-len(_ZEROED):]
        start += len(chunk) - len(before)
    return -1, b""


def _digest_of(file: BinaryIO, place: int) -> bytes:
    """Return the SHA-256 of a file in which the SHA-256 at `place` is replaced by zeros."""
    digest, left = sha256(), place
    file.seek(0)
    while left > 0:
        chunk = file.read(min(_CHUNK, left))
        digest.update(chunk)
        left -= len(chunk)
    digest.update(_ZEROED[len(_MARK):])
    file.seek(place + len(_ZEROED) - len(_MARK))
    while chunk := file.read(_CHUNK):
        digest.update(chunk)
    return digest.hexdigest().encode()


def _seal(part: Path) -> None:
    """Write the SHA-256 of a file over the zeros in its place, and flush it to the disk."""
    umask = os.umask(0)
    os.umask(umask)
    os.chmod(part, 0o666 & ~umask)  # MindSpore leaves it read-only, and a next one could not replace it everywhere
    with part.open("r+b") as file:
        place, _ = _digest_in(file)
        digest = _digest_of(file, place)
        file.seek(place)
        file.write(digest)
        file.flush()
        os.fsync(file.fileno())


def rename_file(part: Path, path: Path) -> None:
    """Rename a file to its final name, and flush the name to the disk. Warn if the file system cannot flush a name."""
    os.replace(part, path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    except OSError as error:  # not an error of the save: the file has its name
        warn(f"{path} is saved, but its folder cannot be flushed to the disk ({one_line(error)}): a power cut may lose "
             "the new file", UserWarning, stacklevel=2)
    finally:
        os.close(folder)


def _require_complete(file: BinaryIO, path: Path) -> None:
    place, digest = _digest_in(file)
    if place < 0:
        raise CheckpointError(f"{path} is truncated, or not a checkpoint of ms_accum; give a file that save_checkpoint "
                              "wrote")
    if _digest_of(file, place) != digest:
        raise CheckpointError(f"{path} is damaged (SHA-256 mismatch); restore it from a copy")


def read_file(path: Path, opened: ExitStack) -> tuple[dict[str, Entry], dict]:
    """Return the entries of a complete file, and their description. Raise CheckpointError if it is not complete.

    The file stays open until `opened` closes it, so that entries come from the file that was checked, even if another
    process saves to this path. Raise FileNotFoundError if there is no such file.
    """
    if not path.exists():
        raise FileNotFoundError(f"there is no checkpoint {path}; give a file that save_checkpoint (in a shell: --save) "
                                "wrote, or begin without one")
    if not path.is_file():
        raise CheckpointError(f"{path} is not a file; give a file that save_checkpoint wrote")
    file = opened.enter_context(path.open("rb"))
    written = written_at(file)
    _require_complete(file, path)
    try:
        entries = entries_in(file, path.suffix)
        if written_at(file) != written:
            raise OSError("it was written while it was read")
        text = entries.pop(ABOUT).read().asnumpy().tobytes()
        about = json.loads(text[len(_ZEROED) + 2:])
        about["extra"] = json.loads(about["extra"])
        version, about["open"] = about["version"], bool(about["open"])
        if not re.fullmatch("[0-9a-f]{16}", about["generation"]):
            raise ValueError("the generation is not a hexadecimal number")
    # A file with a right checksum and wrong contents was forged, so any error means that it cannot be read.
    except Exception as error:
        raise CheckpointError(f"{path} cannot be read ({type(error).__name__}: {one_line(error)})") from error
    if version != _VERSION:
        raise CheckpointError(f"{path} is of version {version}, expected {_VERSION}; load it with the ms_accum that "
                              "wrote it")
    return entries, about
