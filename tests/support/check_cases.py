"""Cases for `ms-accum check`, which test_check_command.py imports by name."""
from functools import partial

import numpy as np
from mindspore import Tensor, int32, nn, ops

network = nn.Dense(6, 3)
batch = Tensor(np.random.default_rng(0).normal(size=(8, 6)).astype(np.float32)), Tensor(np.arange(8) % 3, int32)
number = 3


def mean(x, y):
    return ops.cross_entropy(network(x), y)


def total(x, y):
    return ops.cross_entropy(network(x), y, reduction="sum")


def noisy(x, y):
    return ops.cross_entropy(ops.dropout(network(x), 0.5, True), y)


def fails(x, y):
    raise RuntimeError("as it does")


exact, inexact, unclear, failing = (partial(tuple, (loss, network, batch)) for loss in (mean, total, noisy, fails))
weighted = partial(tuple, (mean, network, batch, lambda x, y: 1.0))
short, single = partial(tuple, (mean, network)), partial(tuple, (mean, network, 3))


def raising():
    return 1 / 0
