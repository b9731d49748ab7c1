"""Where the digits come from: the package itself, a folder, or the network."""
from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from pathlib import Path

import numpy as np

from . import fetch
from .idx import read_images, read_labels

EMBEDDED = Path(__file__).with_name("digits")


@dataclass(frozen=True)
class Digits:
    """Handwritten digits: `images` uint8 `(n, 28, 28)`, 0 to 255, and `labels` int32 `(n,)`, 0 to 9."""

    images: np.ndarray
    labels: np.ndarray

    def __len__(self) -> int:
        return len(self.labels)


@dataclass(frozen=True)
class Mnist:
    """Digits to train on and digits to test on."""

    train: Digits
    test: Digits

    @cached_property
    def identity(self) -> str:
        """How many digits, and the SHA-256 of all of them."""
        digest = sha256()
        for array in (self.train.images, self.train.labels, self.test.images, self.test.labels):
            digest.update(np.ascontiguousarray(array))
        return f"{len(self.train)} + {len(self.test)} with the SHA-256 {digest.hexdigest()}"


def load(source: str) -> Mnist:
    """The digits that `--data` names.

    Args:
        source: "embedded": the 10,000 + 2,000 digits in the package. "full": all 60,000 + 10,000, fetched once into
            `fetch.cache_folder()`. Anything else: a folder, see `load_folder`.

    Raises:
        fetch.FetchError: If "full" is neither in the cache nor to be had from a mirror.
        ValueError, OSError: See `load_folder`.
    """
    if source == "embedded":
        return load_folder(EMBEDDED)
    if source == "full":
        return load_folder(fetch.full_set(fetch.cache_folder(), fetch.MIRRORS))
    return load_folder(Path(os.path.expanduser(source)))  # of an unknown user, pathlib would raise RuntimeError


def load_folder(folder: Path) -> Mnist:
    """The digits in a folder in the layout of MindSpore's tutorials.

    `train/train-images-idx3-ubyte`, `train/train-labels-idx1-ubyte`, `test/t10k-images-idx3-ubyte`,
    `test/t10k-labels-idx1-ubyte`, each plain or with `.gz`, in `folder` or in `folder/MNIST_Data`.

    Raises:
        ValueError: If a file is missing or is not what its name says, or images and labels differ in number.
        OSError: If a file cannot be read.
    """
    nested = folder / "MNIST_Data"
    root = nested if nested.is_dir() else folder
    return Mnist(_read_split(root / "train", "train"), _read_split(root / "test", "t10k"))


def _read_split(folder: Path, prefix: str) -> Digits:
    images = _existing(folder / f"{prefix}-images-idx3-ubyte")
    labels = _existing(folder / f"{prefix}-labels-idx1-ubyte")
    digits = Digits(read_images(images), read_labels(labels))
    if len(digits.images) != len(digits.labels):
        raise ValueError(f"{images} holds {len(digits.images)} images, but {labels} holds {len(digits.labels)} labels; "
                         "take both files from the same set")
    return digits


def _existing(path: Path) -> Path:
    packed = path.with_name(f"{path.name}.gz")
    for candidate in (path, packed):
        if candidate.is_file():
            return candidate
    raise ValueError(f"{path} (or {packed.name}) is missing; expected a folder that holds "
                     "train/train-images-idx3-ubyte, train/train-labels-idx1-ubyte, "
                     "test/t10k-images-idx3-ubyte and test/t10k-labels-idx1-ubyte")
