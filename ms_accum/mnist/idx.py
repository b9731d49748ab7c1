"""Read one idx file, the format of MNIST: a big-endian header, then the bytes of the array."""
from __future__ import annotations

import gzip
import struct
import zlib
from pathlib import Path

import numpy as np

SIDE = 28
CLASSES = 10


def read_images(path: Path) -> np.ndarray:
    """Images of an idx3 file, plain or `.gz`: uint8 array `(n, 28, 28)`, 0 (background) to 255 (ink).

    Raises:
        ValueError: If the file is no complete idx3 file of images of 28 x 28.
        OSError: If it cannot be read.
    """
    return parse(content(path), (SIDE, SIDE), path)


def read_labels(path: Path) -> np.ndarray:
    """Labels of an idx1 file, plain or `.gz`: int32 array `(n,)` of digits 0 to 9.

    Raises:
        ValueError: If the file is no complete idx1 file, or a label is no digit.
        OSError: If it cannot be read.
    """
    labels = parse(content(path), (), path)
    if labels.max() >= CLASSES:
        raise ValueError(f"{path} holds the label {labels.max()}, expected 0 to {CLASSES - 1}; is it a file of MNIST?")
    return labels.astype(np.int32)


def content(path: Path) -> bytes:
    """The bytes of a file, unpacked if its name ends in `.gz`. Raises ValueError if it cannot be unpacked."""
    if path.suffix != ".gz":
        return path.read_bytes()
    try:
        with gzip.open(path) as file:
            return file.read()
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ValueError(f"{path} is no complete gzip file ({error}); fetch it again") from error


def parse(data: bytes, item_shape: tuple[int, ...], name: object) -> np.ndarray:
    """The array in `data`, the bytes of an idx file of uint8.

    Source of the format: http://yann.lecun.com/exdb/mnist/ (header: magic 0x08 and the number of dimensions, then
    the size of each dimension, all big-endian).

    Args:
        data: The whole file.
        item_shape: Expected shape of one item: `(28, 28)` for images, `()` for labels.
        name: What errors call the file.

    Returns:
        Read-only uint8 array `(n, *item_shape)`, n >= 1.

    Raises:
        ValueError: If magic, shape or number of bytes are not as expected, or there is no item.
    """
    dimensions = 1 + len(item_shape)
    header_bytes = 4 * (1 + dimensions)
    if len(data) < header_bytes:
        raise ValueError(f"{name} holds {len(data)} bytes, but an idx{dimensions} header has {header_bytes}; fetch it again")
    magic, *shape = struct.unpack_from(f">{1 + dimensions}I", data)
    if magic != 0x0800 + dimensions:
        raise ValueError(f"{name} starts with the magic number {magic}, expected {0x0800 + dimensions} (idx{dimensions} of uint8)")
    if tuple(shape[1:]) != item_shape:
        raise ValueError(f"{name} holds items of shape {tuple(shape[1:])}, expected {item_shape}; is it a file of MNIST?")
    if shape[0] == 0:
        raise ValueError(f"{name} holds no digits, expected at least one")
    expected = header_bytes + shape[0] * int(np.prod(item_shape, dtype=int))
    if len(data) != expected:
        raise ValueError(f"{name} holds {len(data)} bytes, expected {expected} for {shape[0]} items; fetch it again")
    return np.frombuffer(data, np.uint8, offset=header_bytes).reshape(shape)
