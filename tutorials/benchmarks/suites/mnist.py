"""A whole epoch of the reference run against the tutorial's own loop and PyTorch."""
from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import oracle
from case import Case
from harness import Group, Suite

CONTESTANTS = ("ms_accum-epoch", "tutorial-loop", "tutorial-loop-blocking", "pytorch-dataset", "pytorch-tensors")
QUICK_DIGITS, TEST_DIGITS = 640, 100


def groups(quick: bool, data: str, scratch: Path) -> list[Group]:
    """Digits of `data` ("embedded" or a folder). Raises ValueError or OSError if there are none, see `ms_accum.mnist.data.load`."""
    # Here, so that only the suite that needs digits waits for MindSpore.
    from ms_accum.mnist.data import load

    mnist, folder = load(data), scratch / "digits"
    for name, prefix, digits, count in (("train", "train", mnist.train, QUICK_DIGITS if quick else None),
                                        ("test", "t10k", mnist.test, TEST_DIGITS)):
        (folder / name).mkdir(parents=True)
        write_idx(folder / name / f"{prefix}-images-idx3-ubyte", digits.images[:count])
        write_idx(folder / name / f"{prefix}-labels-idx1-ubyte", digits.labels[:count])
    case = Case("mlp-784-512-512-10", 32, 2, folder=str(folder))
    images, labels = mnist.train.images[:case.window], mnist.train.labels[:case.window]
    window = (images.reshape(-1, 784) / 255 - 0.1307) / 0.3081

    def referee(windows: int) -> list[np.ndarray]:
        return oracle.trained(case, window, labels, windows)

    count = QUICK_DIGITS if quick else len(mnist.train)
    return [Group("an epoch, N = 2", case, CONTESTANTS, ("ms_accum-epoch",), microbatches=-(-count // case.batch), referee=referee)]


def write_idx(file: Path, values: np.ndarray) -> None:
    """Write `values` as bytes behind IDX's header: the magic number of bytes, then the length of each axis."""
    header = struct.pack(f">{1 + values.ndim}I", 0x0800 + values.ndim, *values.shape)
    file.write_bytes(header + values.astype(np.uint8).tobytes())


SUITE = Suite("a whole epoch", groups, rounds=7, quick_rounds=1)
