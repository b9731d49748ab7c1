"""Download the complete MNIST into a cache: try the mirrors in turn, check every file, then move all into place."""
from __future__ import annotations

import gzip
import hashlib
import os
import socket
import sys
from contextlib import redirect_stdout
from pathlib import Path
from tempfile import TemporaryDirectory
from urllib.parse import urlsplit
from zipfile import ZipFile

from download import download

MD5 = {
    "train/train-images-idx3-ubyte": "6bbc9ace898e44ae57da46a324031adb",
    "train/train-labels-idx1-ubyte": "a25bea736e30d166cdddb491f175f624",
    "test/t10k-images-idx3-ubyte": "2646ac647ad5339dbf082846283269ea",
    "test/t10k-labels-idx1-ubyte": "27ae3e4e09519cfbb04c329615203637",
}
# A .zip is an archive in the tutorial's layout; an address that ends in / holds the four files as .gz.
MIRRORS = (
    "https://mindspore-website.obs.cn-north-4.myhuaweicloud.com/notebook/datasets/MNIST_Data.zip",
    "https://ossci-datasets.s3.amazonaws.com/mnist/",
    "https://storage.googleapis.com/cvdf-datasets/mnist/",
)
SILENT_SECONDS = 10.0


def cache_folder() -> Path:
    """Return the user's cache: `$XDG_CACHE_HOME/ms_accum/mnist`, by default `~/.cache/ms_accum/mnist`."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    # The specification ignores a relative path: https://specifications.freedesktop.org/basedir-spec/latest/
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "ms_accum" / "mnist"


def full_set(folder: Path) -> Path:
    """Download the complete MNIST into `folder` if it is not there yet. Return `folder`.

    Raise OSError if no mirror delivered files with the right md5 (the message names each answer), or `folder` is not
    writable.
    """
    if all((folder / name).is_file() and _md5((folder / name).read_bytes()) == md5 for name, md5 in MD5.items()):
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        temporary = TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent)
    except OSError as error:
        raise OSError(f"cannot write to the cache {folder.parent} ({error.strerror}); set XDG_CACHE_HOME to a "
                      "writable folder, or use --data embedded or --data DIR") from error
    answers = []
    with temporary:
        for number, mirror in enumerate(MIRRORS):
            unpacked = Path(temporary.name, str(number))
            try:
                _fetch_from(mirror, unpacked)
            except Exception as error:  # `download` and the decoders raise many kinds
                reason = str(error).split("\nError: ")[-1]  # `download` puts the reason on a second line
                answers.append(f"{urlsplit(mirror).netloc}: {' '.join(reason.split()) or type(error).__name__}")
                continue
            for name in MD5:
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                os.replace(unpacked / name, folder / name)
            return folder
    raise OSError(f"could not fetch MNIST ({'; '.join(answers)}); use --data embedded, which needs no network, "
                  "or --data DIR with a folder that holds train/ and test/")


def _fetch_from(mirror: str, folder: Path) -> None:
    for name, expected in MD5.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if mirror.endswith(".zip"):
            # Only known names are read and written, so an archive cannot choose where it writes.
            with ZipFile(_download(mirror, folder / "archive.zip")) as archive:
                content = archive.read(f"MNIST_Data/{name}")
        else:
            content = gzip.decompress(_download(f"{mirror}{path.name}.gz", folder / f"{path.name}.gz").read_bytes())
        if _md5(content) != expected:
            raise ValueError(f"{path.name} has the md5 {_md5(content)}, expected {expected}")
        path.write_bytes(content)


def _download(url: str, path: Path) -> Path:
    shown, before = sys.stderr.isatty(), socket.getdefaulttimeout()
    socket.setdefaulttimeout(SILENT_SECONDS)  # that of `download` covers only the connection
    try:
        with redirect_stdout(sys.stderr):  # where `download` draws its progress bar
            download(url, str(path), progressbar=shown, verbose=shown, timeout=SILENT_SECONDS)
    finally:
        socket.setdefaulttimeout(before)
    return path


def _md5(content: bytes) -> str:
    return hashlib.md5(content, usedforsecurity=False).hexdigest()
