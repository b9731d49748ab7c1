"""Networks, losses and batches for check_equivalence."""
import mindspore as ms
import numpy as np
from mindspore import Tensor, nn


def normal(*shape, dtype=ms.float32, seed=0):
    return Tensor(np.random.default_rng(seed).normal(size=shape), dtype)


def labels(n, classes=3):
    return Tensor(np.random.default_rng(1).integers(0, classes, n), ms.int32)


def cnn():
    return nn.SequentialCell(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8), nn.ReLU(),
                             nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dense(8, 3)).set_train()


def causes(report):
    """[(layer, type, first words of what)]"""
    return [(c.layer, c.type, c.what.split(":")[0]) for c in report.causes]
