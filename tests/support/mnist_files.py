"""Small sets of digits, written by code that shares nothing with tutorials/mnist/data.py."""
import gzip
import struct
from pathlib import Path

import numpy as np

NAMES = (
    "train/train-images-idx3-ubyte",
    "train/train-labels-idx1-ubyte",
    "test/t10k-images-idx3-ubyte",
    "test/t10k-labels-idx1-ubyte",
)


def idx(array):
    """The bytes of an idx file that holds a uint8 array."""
    return struct.pack(f">I{array.ndim}I", 0x0800 + array.ndim, *array.shape) + array.astype(np.uint8).tobytes()


def random_set(train=7, test=3, seed=0):
    """{name: bytes} of a set of random digits."""
    rng = np.random.default_rng(seed)
    contents = []
    for count in (train, test):
        contents.append(idx(rng.integers(0, 256, (count, 28, 28))))
        contents.append(idx(rng.integers(0, 10, count)))
    return dict(zip(NAMES, contents, strict=True))


def embedded_set(train, test):
    """{name: bytes} of the first digits of the set in tutorials/mnist."""
    folder = Path(__file__).parents[2] / "tutorials" / "mnist" / "digits"
    files = {}
    for name, count in zip(NAMES, (train, train, test, test), strict=True):
        header, item = (16, 784) if "images" in name else (8, 1)
        with gzip.open(folder / f"{name}.gz") as file:
            content = file.read(header + count * item)
        files[name] = content[:4] + struct.pack(">I", count) + content[8:]
    return files


def write(folder, files, packed=False):
    """Write {name: bytes} into a folder, as .gz if packed; returns the folder."""
    for name, content in files.items():
        path = folder / (f"{name}.gz" if packed else name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(gzip.compress(content) if packed else content)
    return folder
