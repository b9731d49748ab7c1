"""A problem whose noise scale is known."""
from itertools import count

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn

FEATURES = 100
_numbers = count()


class Position(nn.Cell):
    """Half the mean squared distance of the samples from a point: the gradient of a sample is point - sample."""

    def __init__(self, name=None):
        super().__init__()
        self.point = Parameter(Tensor(np.zeros(FEATURES), ms.float32), name=name or f"point{next(_numbers)}")

    def construct(self, x):
        return ((self.point - x) ** 2).sum(-1).mean() / 2


def noisy(sizes, scale, seed=0):
    """Microbatches of samples whose noise scale at the point 0 is `scale` samples: float32 `(n, FEATURES)` each."""
    rng = np.random.default_rng(seed)
    return [rng.normal(scale**-0.5, 1.0, (n, FEATURES)).astype(np.float32) for n in sizes]
