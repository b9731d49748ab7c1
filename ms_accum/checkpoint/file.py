"""The file of a checkpoint: safetensors, written atomically, read only if it is complete.

Its metadata holds a description as JSON, and a SHA-256 of it and all entries. MindSpore's loader knows no complex
numbers in this format, so they are pairs of floats. Source: https://github.com/huggingface/safetensors
"""
from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from glob import escape
from hashlib import sha256
from pathlib import Path
from secrets import token_hex
from shutil import rmtree
from socket import gethostname
from typing import Any, NamedTuple, Optional, Union
from warnings import warn

import mindspore as ms
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from ..arguments import instance_of, one_line

SUFFIX = ".safetensors"
VERSION = 7  # up to 6, in ms_accum 0.3, files held gradients
_ABOUT, _DIGEST = "ms_accum", "ms_accum.sha256"  # keys of the metadata
_COMPLEX = {"float32": "complex64", "float64": "complex128"}
# This host. Containers may share the name of the host, but not the numbers of processes.
_HERE = sha256(f"{gethostname()} {Path('/proc/self/ns/pid').resolve().name}".encode()).hexdigest()[:8]


class CheckpointError(ValueError):
    """Report a file that cannot be resumed from; nothing was loaded."""


class WeightsOnlyError(CheckpointError):
    """Report a file of `mindspore.save_checkpoint`, which holds weights alone."""


def checked_path(path: Union[str, os.PathLike], called: str) -> Path:
    """Return the absolute path. Raise TypeError or ValueError unless it is one that ends in `SUFFIX`."""
    instance_of("path", path, (str, os.PathLike), "a str or a path",
                f"give {called}(path, network, train_step), with the path first, unlike mindspore.{called}")
    path = Path(path).resolve()  # a link is kept, and its target is replaced
    if path.suffix != SUFFIX:
        raise ValueError(f"{path} ends in {path.suffix!r}, expected {SUFFIX!r}; name the file {path.stem}{SUFFIX}, or "
                         "load the weights of another file alone: ms_accum.load_weights(path, network)")
    return path


# --- write ------------------------------------------------------------------------------------------------------------


@contextmanager
def part_of(path: Path) -> Iterator[Path]:
    """Yield the path of a file in a temporary folder beside `path`, which the end of the block removes.

    It is a folder because safetensors makes a temporary file beside its own. Folders of processes of this host that
    were killed are removed as well.
    """
    start = f".{path.stem.lstrip('.')}.part-{_HERE}-"
    name = re.compile(rf"{re.escape(start)}(\d{{1,7}})-[0-9a-f]{{8}}")
    for left in path.parent.glob(f"{escape(start)}*"):
        if (found := name.fullmatch(left.name)) and not Path(f"/proc/{found[1]}").exists():
            rmtree(left, ignore_errors=True)
    folder = path.with_name(f"{start}{os.getpid()}-{token_hex(4)}")
    try:
        folder.mkdir()
        yield folder / path.name
    finally:
        rmtree(folder, ignore_errors=True)


def write_file(path: Path, entries: dict[str, np.ndarray], about: dict) -> None:
    """Write a file, flush it to the disk, and give it its name. `about` holds JSON values.

    Raise OSError if it cannot be written; the old file is kept. Warn if the file system cannot flush a name.
    """
    of_complex = sorted(name for name, values in entries.items() if values.dtype.kind == "c")
    text = json.dumps({"version": VERSION, "mindspore": ms.__version__, **about, "complex": of_complex})
    stored = {name: np.asarray(values, order="C") for name, values in entries.items()}
    for name in of_complex:
        values = stored[name]
        stored[name] = values.reshape(-1).view(values.real.dtype).reshape(*values.shape, 2)
    if not path.parent.is_dir():
        raise FileNotFoundError(f"the folder {path.parent} does not exist; make it first")
    umask = os.umask(0)
    os.umask(umask)
    try:
        with part_of(path) as part:
            save_file(stored, part, {_ABOUT: text, _DIGEST: _digest(text, stored, stored.__getitem__)})
            os.chmod(part, 0o666 & ~umask)  # safetensors leaves it to its owner alone
            with part.open("rb") as file:
                os.fsync(file.fileno())
            os.replace(part, path)
    except (OSError, SafetensorError) as error:
        raise OSError(f"{path} cannot be written ({one_line(error)})") from error
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    except OSError as error:  # not an error of the save: the file has its name
        warn(f"{path} is saved, but its folder cannot be flushed to the disk ({one_line(error)}): a power cut may lose "
             "the new file", UserWarning, stacklevel=2)
    finally:
        os.close(folder)


def _digest(text: str, names: Iterable[str], stored: Callable[[str], np.ndarray]) -> str:
    """Return the SHA-256 of a description and of entries, which `stored` returns by their names."""
    digest = sha256(text.encode())
    for name in sorted(names):
        values = stored(name)
        digest.update(repr((name, values.dtype.name, values.shape)).encode())
        digest.update(np.ascontiguousarray(values).reshape(-1).view(np.uint8).data)
        del values  # or one entry would be held while the next one is read
    return digest.hexdigest()


def require_json(extra: Any) -> None:
    """Raise TypeError for a value that would come back from JSON as something else."""
    try:
        if repr(json.loads(json.dumps(extra))) != repr(extra):  # as text, NaN equals NaN, and 1 differs from True
            raise TypeError("it would come back as something else")
    except (TypeError, ValueError, RecursionError) as error:
        raise TypeError(f"extra cannot be written as JSON ({error}); give dicts with str as keys, lists, str, numbers, "
                        "bool and None") from error


# --- read -------------------------------------------------------------------------------------------------------------


class _Reader:
    """Read entries of a file that is open. `opened` closes it."""

    def __init__(self, path: Path, opened: ExitStack) -> None:
        self.path, self.file = path, opened.enter_context(path.open("rb"))
        self.written = os.fstat(self.file.fileno()).st_mtime_ns
        # The library opens the same file, even if another process has just saved to this path. Its other backend maps
        # the file, so that memory would grow by the whole file, and a file that is cut would end the process.
        self.held = opened.enter_context(safe_open(f"/proc/self/fd/{self.file.fileno()}", "np", backend="pread"))
        self.metadata: dict[str, str] = self.held.metadata() or {}

    def stored(self, name: str) -> np.ndarray:
        """Return the values of an entry as they are stored, in memory of their own."""
        try:
            values = self.held.get_tensor(name)
            if os.fstat(self.file.fileno()).st_mtime_ns != self.written:
                raise SafetensorError("it was written while it was read")
        except SafetensorError as error:
            raise OSError(f"{self.path} cannot be read ({one_line(error)}); load another file") from error
        return values


class Entry(NamedTuple):
    """Describe an entry of a file that is open; the reader is None on a rank that did not open it."""

    reader: Optional[_Reader]
    name: str
    dtype: np.dtype
    shape: tuple[int, ...]

    def read(self) -> np.ndarray:
        """Return the values, in memory of their own; 0 without a reader.

        Raise OSError if the file was written since it was opened.
        """
        if self.reader is None:
            return np.zeros(self.shape, self.dtype)
        return self.reader.stored(self.name).view(self.dtype).reshape(self.shape)


def read_file(path: Path, opened: ExitStack) -> tuple[dict[str, Entry], dict]:
    """Return the entries of a complete file, and their description. Raise CheckpointError if it is not complete.

    The file stays open until `opened` closes it, so that entries come from the file that was checked, even if another
    process saves to this path. Raise FileNotFoundError if there is no such file.
    """
    if not path.is_file():
        raise FileNotFoundError(f"there is no checkpoint {path}; give a file that save_checkpoint wrote, or begin "
                                "without one")
    try:
        reader = _Reader(path, opened)
    except SafetensorError as error:
        raise CheckpointError(f"{path} is truncated, damaged or not in the format safetensors ({one_line(error)}); "
                              "restore it from a copy") from error
    if reader.metadata.get("format") == "ms":
        raise WeightsOnlyError(f"{path} was written by mindspore.save_checkpoint, so no training can resume from it; "
                               "load its weights alone: ms_accum.load_weights(path, network)")
    if _ABOUT not in reader.metadata:
        raise CheckpointError(f"{path} is not a checkpoint of ms_accum; give a file that save_checkpoint wrote")
    try:
        return _checked(reader)
    except Exception as error:
        if isinstance(error, CheckpointError):
            raise
        # A file with a right checksum and wrong contents was forged, so any error means that it cannot be read.
        raise CheckpointError(f"{path} cannot be read ({type(error).__name__}: {one_line(error)})") from error


def _checked(reader: _Reader) -> tuple[dict[str, Entry], dict]:
    """Return what `read_file` returns, of a file with a description."""
    text, entries = reader.metadata[_ABOUT], {}

    def stored(name: str) -> np.ndarray:
        values = reader.stored(name)
        entries[name] = Entry(reader, name, values.dtype, values.shape)
        return values

    if _digest(text, reader.held.keys(), stored) != reader.metadata.get(_DIGEST):
        raise CheckpointError(f"{reader.path} is damaged (SHA-256 mismatch); restore it from a copy")
    about = json.loads(text)
    if about["version"] > VERSION:
        raise CheckpointError(f"{reader.path} is of version {about['version']}, expected {VERSION}; load it with the "
                              "ms_accum that wrote it")
    for name in about.get("complex", ()):
        entry = entries[name]
        *shape, pair = entry.shape
        if pair != 2:
            raise ValueError(f"{name} has {pair} numbers in place of a complex one, expected 2")
        entries[name] = entry._replace(dtype=np.dtype(_COMPLEX[entry.dtype.name]), shape=tuple(shape))
    return entries, about
