"""Digits on disk as MindSpore's MnistDataset wants them: plain IDX files, whatever they came from."""
from __future__ import annotations

import struct
from pathlib import Path

import numpy as np

TEST_DIGITS = 100


def unpack(source: str, folder: Path, limit: int | None) -> Path:
    """Write the digits of `source` ("embedded" or a folder), at most `limit` to train on, and a few to test on.

    Raises:
        ValueError, OSError: If there are none, see `ms_accum.mnist.data.load`.
    """
    # Here, so that only the suite that needs digits waits for MindSpore.
    from ms_accum.mnist.data import load

    mnist = load(source)
    for name, prefix, digits, count in (("train", "train", mnist.train, limit), ("test", "t10k", mnist.test, TEST_DIGITS)):
        (folder / name).mkdir(parents=True)
        write_idx(folder / name / f"{prefix}-images-idx3-ubyte", digits.images[:count])
        write_idx(folder / name / f"{prefix}-labels-idx1-ubyte", digits.labels[:count])
    return folder


def write_idx(file: Path, values: np.ndarray) -> None:
    """Write `values` as bytes behind IDX's header: the magic number of bytes, then the length of each axis."""
    header = struct.pack(f">{1 + values.ndim}I", 0x0800 + values.ndim, *values.shape)
    file.write_bytes(header + values.astype(np.uint8).tobytes())
