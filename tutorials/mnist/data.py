"""Load digits of MNIST: those in the folder `digits` beside this file, of another folder, or all, downloaded once.

    train, test = load("embedded")
"""
from __future__ import annotations

import gzip
import os
import zlib
from dataclasses import dataclass
from math import prod
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from download import download

EMBEDDED = Path(__file__).with_name("digits")
URL = "https://mindspore-website.obs.cn-north-4.myhuaweicloud.com/notebook/datasets/MNIST_Data.zip"


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

    def epoch(self, size: int, seed: int, number: int) -> list[np.ndarray]:
        """Return the rows of an epoch's batches, in an order from the seed: int `(size,)`. The last may be smaller."""
        order = np.random.default_rng([seed, number]).permutation(len(self))
        return [order[start:start + size] for start in range(0, len(self), size)]


def load(source: str) -> tuple[Digits, Digits]:
    """Return digits to train on, and digits to test on.

    "embedded": the first 10,000 + 2,000 of MNIST. "full": all 60,000 + 10,000, in the folder MNIST_Data. Anything else
    is a folder in the layout of MindSpore's tutorials: it, or MNIST_Data in it, holds train/train-images-idx3-ubyte,
    train/train-labels-idx1-ubyte, test/t10k-images-idx3-ubyte and test/t10k-labels-idx1-ubyte, plain or with ".gz".
    Raise ValueError if a file is missing or damaged, OSError if it cannot be read or downloaded.
    """
    folder = EMBEDDED if source == "embedded" else full_set() if source == "full" else Path(source)
    if (folder / "MNIST_Data").is_dir():
        folder = folder / "MNIST_Data"
    return read_digits(folder / "train", "train"), read_digits(folder / "test", "t10k")


def full_set() -> Path:
    """Download the complete MNIST into the current folder, as MindSpore's tutorial does, unless it is there."""
    folder = Path("MNIST_Data")
    if not folder.exists():
        # In a temporary folder, so that an interrupt leaves no half of it, and several ranks do not disturb each other.
        with TemporaryDirectory(dir=".") as part:
            try:
                download(URL, f"{part}/new", kind="zip", progressbar=False)
            except Exception as error:  # `download` raises many kinds
                raise OSError(f"could not download {URL} ({' '.join(str(error).split())}); use --data embedded, which "
                              "needs no network, or --data DIR") from error
            if not folder.exists():
                os.replace(f"{part}/new/MNIST_Data", folder)
    return folder


def read_digits(folder: Path, prefix: str) -> Digits:
    """Read the digits in the files of a folder whose names begin with `prefix`."""
    images = read_idx(folder / f"{prefix}-images-idx3-ubyte", (28, 28))
    labels = read_idx(folder / f"{prefix}-labels-idx1-ubyte", ())
    if not 0 < len(images) == len(labels) or labels.max() > 9:
        raise ValueError(f"{folder} holds {len(images)} images and {len(labels)} labels from 0 to "
                         f"{max(labels, default=0)}, expected a label from 0 to 9 for each image")
    return Digits(images, labels.astype(np.int32))


def read_idx(path: Path, shape: tuple[int, ...]) -> np.ndarray:
    """Read an array, uint8 `(n, *shape)`, from a file in the format of http://yann.lecun.com/exdb/mnist/."""
    packed = path.with_name(f"{path.name}.gz")
    if not path.exists() and not packed.exists():
        raise ValueError(f"{path} (or {packed.name}) is missing; give a folder that holds train/ and test/ of MNIST")
    try:
        content = path.read_bytes() if path.exists() else gzip.decompress(packed.read_bytes())
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ValueError(f"{packed} is not a complete gzip file ({error}); fetch it again") from error
    # The header: a magic number with the number of dimensions, then the size of each, big-endian.
    header = 8 + 4 * len(shape)
    sizes = np.frombuffer(content[4:header], ">u4").tolist() if len(content) >= header else []
    if content[:4] != bytes([0, 0, 8, 1 + len(shape)]) or sizes[1:] != [*shape] or len(content) != header + prod(sizes):
        raise ValueError(f"{path} is not a complete idx file of {' x '.join(map(str, ('n', *shape)))} bytes: it holds "
                         f"{len(content)} bytes, and its header says {sizes}; fetch it again")
    return np.frombuffer(content, np.uint8, offset=header).reshape(sizes)
