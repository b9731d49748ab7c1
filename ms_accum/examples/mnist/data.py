"""Read digits from the package, from a folder, or from the complete MNIST, which is downloaded once."""
from __future__ import annotations

import gzip
import os
import struct
import zlib
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import IO, Union

import numpy as np

from . import fetch

EMBEDDED = Path(__file__).with_name("digits")
SIDE = 28
CLASSES = 10
# Above the largest relative of MNIST, EMNIST with 814,255 digits (https://arxiv.org/abs/1702.05373); images of 784 MB.
MOST_ITEMS = 1_000_000


@dataclass(frozen=True)
class Digits:
    """Handwritten digits: `images` uint8 `(n, 28, 28)`, 0 to 255, and `labels` int32 `(n,)`, 0 to 9."""

    images: np.ndarray
    labels: np.ndarray

    def __len__(self) -> int:
        return len(self.labels)

    def batch(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return images and labels of the digits `rows`, int `(m,)`."""
        return self.images[rows], self.labels[rows]


@dataclass(frozen=True)
class Mnist:
    """Digits to train on, and digits to test on."""

    train: Digits
    test: Digits


def load(source: str) -> Mnist:
    """Load the digits of `--data`.

    "embedded": the 10,000 + 2,000 digits in the package. "full": all 60,000 + 10,000, downloaded once into
    `fetch.cache_folder()`; for errors see `fetch.full_set`. Anything else is a folder in the layout of MindSpore's
    tutorials: it, or `MNIST_Data` in it, holds `train/train-images-idx3-ubyte`, `train/train-labels-idx1-ubyte`,
    `test/t10k-images-idx3-ubyte` and `test/t10k-labels-idx1-ubyte`, each plain or with `.gz`. ValueError if a file is
    missing or is not what its name says, or images and labels differ in number; OSError if a file cannot be read.
    """
    if source == "full":
        folder = fetch.full_set(fetch.cache_folder())
    else:
        # Not Path.expanduser, which raises RuntimeError if the user is unknown.
        folder = EMBEDDED if source == "embedded" else Path(os.path.expanduser(source))
    nested = folder / "MNIST_Data"
    root = nested if nested.is_dir() else folder
    return Mnist(_read_split(root / "train", "train"), _read_split(root / "test", "t10k"))


def _read_split(folder: Path, prefix: str) -> Digits:
    images_path = _existing(folder / f"{prefix}-images-idx3-ubyte")
    labels_path = _existing(folder / f"{prefix}-labels-idx1-ubyte")
    images, labels = read_idx(images_path, (SIDE, SIDE)), read_idx(labels_path, ())
    if labels.max() >= CLASSES:
        raise ValueError(f"{labels_path} holds the label {labels.max()}, expected 0 to {CLASSES - 1}; "
                         "is it an MNIST file?")
    if len(images) != len(labels):
        raise ValueError(f"{images_path} holds {len(images)} images, but {labels_path} holds {len(labels)} labels; "
                         "take both files from the same set")
    return Digits(images, labels.astype(np.int32))


def _existing(path: Path) -> Path:
    for candidate in (path, path.with_name(f"{path.name}.gz")):
        if candidate.is_file():
            return candidate
    raise ValueError(f"{path} (or {path.name}.gz) is missing; expected a folder that holds {', '.join(fetch.MD5)}")


def read_idx(path: Path, item_shape: tuple[int, ...]) -> np.ndarray:
    """Read the array in an idx file of uint8, unpacked if its name ends in `.gz`; see `parse_idx` for the rest."""
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            return parse_idx(file, item_shape, path)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ValueError(f"{path} is not a complete gzip file ({error}); fetch it again") from error


def parse_idx(file: Union[IO[bytes], gzip.GzipFile], item_shape: tuple[int, ...], name: object) -> np.ndarray:
    """Parse an idx file of uint8 into an array `(n, *item_shape)`, 1 <= n <= `MOST_ITEMS`; ValueError if it is damaged.

    No more of the file is read than its header says. Source of the format: http://yann.lecun.com/exdb/mnist/ (header:
    magic 0x08 and the number of dimensions, then the size of each dimension, all big-endian).
    """
    size = 8 + 4 * len(item_shape)
    magic, count, *shape = struct.unpack(f">{size // 4}I", file.read(size).ljust(size, b"\0"))
    expected = 0x0801 + len(item_shape), *item_shape
    if (magic, *shape) != expected or not 1 <= count <= MOST_ITEMS:
        raise ValueError(f"{name} has the idx header {(magic, count, *shape)}, expected 1 to {MOST_ITEMS} items and, "
                         f"beside their number, {expected}; is it an MNIST file?")
    expected = count * prod(item_shape)
    data = file.read(expected + 1)  # one more byte shows that the file is too long, without unpacking the rest
    if len(data) != expected:
        held = f"more than {expected}" if len(data) > expected else str(len(data))
        raise ValueError(f"{name} holds {held} bytes after its header, expected {expected} for {count} items; fetch it "
                         "again")
    return np.frombuffer(data, np.uint8).reshape(count, *item_shape)
