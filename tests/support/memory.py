"""Train a small encoder on contrastive batches and print the peak memory: `memory.py undivided|cut|cached SAMPLES`."""
import re
import sys
from pathlib import Path

import numpy as np
from mindspore import Tensor, nn, ops

from ms_accum import Accumulator, make_grad_cache_step, make_train_step

TOKEN = nn.SequentialCell(nn.Dense(32, 512), nn.ReLU(), nn.Dense(512, 512), nn.ReLU(), nn.Dense(512, 16))


def encode(x):
    """Of sequences of 64 tokens: 64 x 512 floats a layer for each sample."""
    return TOKEN(x).mean(1)


def contrast(z):
    return ops.cross_entropy(ops.matmul(z, z.T), ops.arange(len(z)))


def contrast_of(x):
    return contrast(encode(x))


def peak():
    """Of this program, in KiB; ru_maxrss would be inherited from the process that started it."""
    return int(re.search(r"VmHWM:\s*(\d+)", Path("/proc/self/status").read_text(encoding="utf-8"))[1])


def growth(kind, samples, pieces, steps=1):
    """By how much training raises the peak."""
    before = peak()
    acc = Accumulator(nn.SGD(TOKEN.trainable_params(), 0.1), 1, reduction="mean")
    if kind == "cached":
        step = make_grad_cache_step(encode, contrast, acc, pieces=pieces)
    else:
        step = make_train_step(contrast_of, acc, pieces=pieces)
    for _ in range(steps):
        float(step(Tensor(np.random.default_rng(0).random((samples, 64, 32), np.float32))))
    return peak() - before


if __name__ == "__main__":
    kind, samples = sys.argv[1], int(sys.argv[2])
    growth(kind, samples, 1 if kind == "undivided" else samples // 16, steps=3)
    print(peak())
