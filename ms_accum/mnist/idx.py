"""Read one idx file, the format of MNIST: a big-endian header, then the bytes of the array."""
from __future__ import annotations

import gzip
import struct
import zlib
from pathlib import Path
from typing import IO

import numpy as np

SIDE = 28
CLASSES = 10
# Above the largest of MNIST's relatives, EMNIST with 814,255 (https://arxiv.org/abs/1702.05373); images of 784 MB.
MOST_ITEMS = 1_000_000


def read_images(path: Path) -> np.ndarray:
    """Images of an idx3 file, plain or `.gz`: uint8 array `(n, 28, 28)`, 0 (background) to 255 (ink).

    Raises:
        ValueError: If the file is no complete idx3 file of images of 28 x 28.
        OSError: If it cannot be read.
    """
    return read(path, (SIDE, SIDE))


def read_labels(path: Path) -> np.ndarray:
    """Labels of an idx1 file, plain or `.gz`: int32 array `(n,)` of digits 0 to 9.

    Raises:
        ValueError: If the file is no complete idx1 file, or a label is no digit.
        OSError: If it cannot be read.
    """
    labels = read(path, ())
    if labels.max() >= CLASSES:
        raise ValueError(f"{path} holds the label {labels.max()}, expected 0 to {CLASSES - 1}; is it a file of MNIST?")
    return labels.astype(np.int32)


def read(path: Path, item_shape: tuple[int, ...]) -> np.ndarray:
    """The array in an idx file of uint8, plain or unpacked if its name ends in `.gz`; see `parse` for arguments, result and errors."""
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            return parse(file, item_shape, path)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ValueError(f"{path} is no complete gzip file ({error}); fetch it again") from error


def parse(file: IO[bytes], item_shape: tuple[int, ...], name: object) -> np.ndarray:
    """The array in an idx file of uint8. However long the file is, no more is read than its header says, and that is limited.

    Source of the format: http://yann.lecun.com/exdb/mnist/ (header: magic 0x08 and the number of dimensions, then
    the size of each dimension, all big-endian).

    Args:
        file: The whole file, from its beginning.
        item_shape: Expected shape of one item: `(28, 28)` for images, `()` for labels.
        name: What errors call the file.

    Returns:
        Read-only uint8 array `(n, *item_shape)`, 1 <= n <= `MOST_ITEMS`.

    Raises:
        ValueError: If magic, shape or number of bytes are not as expected, or there is no item or too many.
    """
    dimensions = 1 + len(item_shape)
    header_bytes = 4 * (1 + dimensions)
    header = file.read(header_bytes)
    if len(header) < header_bytes:
        raise ValueError(f"{name} holds {len(header)} bytes, but an idx{dimensions} header has {header_bytes}; fetch it again")
    magic, *shape = struct.unpack(f">{1 + dimensions}I", header)
    if magic != 0x0800 + dimensions:
        raise ValueError(f"{name} starts with the magic number {magic}, expected {0x0800 + dimensions} (idx{dimensions} of uint8)")
    if tuple(shape[1:]) != item_shape:
        raise ValueError(f"{name} holds items of shape {tuple(shape[1:])}, expected {item_shape}; is it a file of MNIST?")
    if shape[0] == 0:
        raise ValueError(f"{name} holds no digits, expected at least one")
    if shape[0] > MOST_ITEMS:
        raise ValueError(f"{name} says that it holds {shape[0]} items, expected at most {MOST_ITEMS}; is it a file of MNIST?")
    expected = shape[0] * int(np.prod(item_shape, dtype=int))
    data = file.read(expected + 1)  # one byte more shows that a file is too long, however far a .gz would unpack
    if len(data) != expected:
        size = f"more than {expected}" if len(data) > expected else str(len(data))
        raise ValueError(f"{name} holds {size} bytes behind its header, expected {expected} for {shape[0]} items; fetch it again")
    return np.frombuffer(data, np.uint8).reshape(shape)
