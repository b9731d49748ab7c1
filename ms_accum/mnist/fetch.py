"""Fetch the complete MNIST into a cache: mirrors in turn, every file checked, never a half-written one."""
from __future__ import annotations

import gzip
import hashlib
import os
import sys
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from math import ceil
from pathlib import Path
from subprocess import PIPE, Popen, TimeoutExpired
from tempfile import TemporaryDirectory
from time import monotonic
from typing import IO, NamedTuple, Union
from urllib.parse import urlsplit


class Known(NamedTuple):
    """What an unpacked file must be: its size in bytes and its md5."""

    size: int
    md5: str


FILES = {
    "train/train-images-idx3-ubyte": Known(47040016, "6bbc9ace898e44ae57da46a324031adb"),
    "train/train-labels-idx1-ubyte": Known(60008, "a25bea736e30d166cdddb491f175f624"),
    "test/t10k-images-idx3-ubyte": Known(7840016, "2646ac647ad5339dbf082846283269ea"),
    "test/t10k-labels-idx1-ubyte": Known(10008, "27ae3e4e09519cfbb04c329615203637"),
}

# An address that ends in .zip is an archive in the tutorial's layout; one that ends in / holds the four files as .gz.
MIRRORS = (
    "https://mindspore-website.obs.cn-north-4.myhuaweicloud.com/notebook/datasets/MNIST_Data.zip",
    "https://ossci-datasets.s3.amazonaws.com/mnist/",
    "https://storage.googleapis.com/cvdf-datasets/mnist/",
)

CONNECT_SECONDS = 10.0
# A mirror may take this long, and another second for each of so many bytes that it has sent.
PATIENCE_SECONDS = 30.0
SLOWEST_BYTES_PER_SECOND = 10_000
# What a packed file may be longer than the unpacked one, for bytes that cannot be packed: headers, names, 5 bytes for each 16 KiB or more.
PACKING_BYTES = 65_536


class FetchError(OSError):
    """No mirror gave the digits."""


def cache_folder() -> Path:
    """The user's cache: `$XDG_CACHE_HOME/ms_accum/mnist`, by default `~/.cache/ms_accum/mnist`."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    # A relative path is to be ignored: https://specifications.freedesktop.org/basedir-spec/latest/
    root = Path(base) if os.path.isabs(base) else Path.home() / ".cache"
    return root / "ms_accum" / "mnist"


def full_set(folder: Path, mirrors: Sequence[str], files: Mapping[str, Known] = FILES) -> Path:
    """`folder`, after every one of `files` is in it: at once if they are, else from the first mirror that has them.

    Args:
        folder: Where the files are kept, in the tutorial's layout (`train/`, `test/`).
        mirrors: Addresses, tried in turn; see `MIRRORS`.
        files: Name inside `folder` -> what the file must be.

    Raises:
        FetchError: If no mirror gave files of the right md5, or `folder` cannot be written. Says what each mirror answered.
    """
    if is_complete(folder, files):
        return folder
    answers = []
    with _temporary_folder_beside(folder) as temporary:
        for number, mirror in enumerate(mirrors):
            unpacked = temporary / str(number)
            try:
                _fetch_from(mirror, unpacked, files)
            except Exception as error:  # a foreign package and two decoders: whatever fails here, the next mirror is tried
                answers.append(f"{urlsplit(mirror).netloc}: {_one_line(error)}")
            else:
                _publish(unpacked, folder, files)
                return folder
    raise FetchError(f"could not fetch MNIST ({'; '.join(answers)}); use --data embedded, which needs no network, "
                     "or --data DIR with a folder that holds train/ and test/")


def is_complete(folder: Path, files: Mapping[str, Known] = FILES) -> bool:
    """Whether `folder` holds every one of `files`, each with the right md5."""
    return all((folder / name).is_file() and _md5(folder / name) == known.md5 for name, known in files.items())


@contextmanager
def _temporary_folder_beside(folder: Path) -> Iterator[Path]:
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        temporary = TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent)
    except OSError as error:
        raise FetchError(f"cannot write to the cache {folder.parent} ({error.strerror}); set XDG_CACHE_HOME to a folder "
                         "that can be written, or use --data embedded or --data DIR") from error
    with temporary as path:
        yield Path(path)


def _fetch_from(mirror: str, unpacked: Path, files: Mapping[str, Known]) -> None:
    for name in files:
        (unpacked / name).parent.mkdir(parents=True, exist_ok=True)
    if mirror.endswith(".zip"):
        _fetch_archive(mirror, unpacked, files)
    else:
        _fetch_packed_files(mirror, unpacked, files)


def _fetch_archive(url: str, unpacked: Path, files: Mapping[str, Known]) -> None:
    archive_path = unpacked / "archive.zip"
    _download(url, archive_path, sum(map(_most_packed, files.values())))
    with zipfile.ZipFile(archive_path) as archive:
        members = archive.namelist()
        for name, known in files.items():
            # Only known names are taken out, and only to known places: the archive has no say in where it writes.
            nested = f"MNIST_Data/{name}"
            with archive.open(nested if nested in members else name) as source:
                _unpack(source, unpacked / name, known)


def _fetch_packed_files(base_url: str, unpacked: Path, files: Mapping[str, Known]) -> None:
    for name, known in files.items():
        packed = unpacked / f"{name}.gz"
        _download(base_url + packed.name, packed, _most_packed(known))
        with gzip.open(packed) as source:
            _unpack(source, unpacked / name, known)


def _unpack(source: Union[IO[bytes], gzip.GzipFile], target: Path, known: Known) -> None:
    # One byte more than expected is enough to see that a file is too long, however far it would unpack.
    data = source.read(known.size + 1)
    md5 = hashlib.md5(data, usedforsecurity=False).hexdigest()
    if len(data) != known.size or md5 != known.md5:
        size = f"more than {known.size}" if len(data) > known.size else str(len(data))
        raise ValueError(f"{target.name} has {size} bytes and md5 {md5}, expected {known.size} and {known.md5}")
    target.write_bytes(data)


def _publish(unpacked: Path, folder: Path, files: Mapping[str, Known]) -> None:
    for name in files:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        os.replace(unpacked / name, folder / name)


def _most_packed(known: Known) -> int:
    return known.size + PACKING_BYTES


def _download(url: str, path: Path, most_bytes: int) -> None:
    """Fetch `url` to `path`; raises OSError if it is longer than `most_bytes`, too slow, or cannot be had."""
    # The package `download` reads as much and as long as a server sends; only another process can be limited and stopped.
    most_seconds = PATIENCE_SECONDS + most_bytes / SLOWEST_BYTES_PER_SECOND
    limits = [CONNECT_SECONDS, most_bytes + 1, ceil(most_seconds) + 1, int(sys.stderr.isatty())]
    command = [sys.executable, "-I", Path(__file__).with_name("transfer.py"), url, path, *limits, *sys.path]
    with Popen([*map(str, command)], stdout=PIPE, encoding="utf-8", errors="replace") as process:
        try:
            _wait(process, path.with_name(f"{path.name}.part"), most_bytes)
            if process.returncode != 0:
                raise OSError(process.stdout.read() or f"the download ended with status {process.returncode}")
        finally:
            process.kill()


def _wait(process: Popen, part: Path, most_bytes: int) -> None:
    """Return when a download has ended; raises OSError if `part`, where it writes, stays behind the slowest rate or gets too long."""
    start = monotonic()
    received = 0
    while True:
        with suppress(TimeoutExpired):
            process.wait(timeout=0.2)
        with suppress(FileNotFoundError):  # not there yet, or already renamed
            received = part.stat().st_size
        if received > most_bytes:
            raise OSError(f"sends more than the {most_bytes} bytes that it may have")
        if process.returncode is not None:
            return
        seconds = monotonic() - start
        if seconds > PATIENCE_SECONDS + received / SLOWEST_BYTES_PER_SECOND:
            raise TimeoutError(f"has sent {received} bytes in {seconds:.0f} s, which is too slow")


def _md5(path: Path) -> str:
    return hashlib.md5(path.read_bytes(), usedforsecurity=False).hexdigest()


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
