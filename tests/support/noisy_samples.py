"""A problem whose noise scale is known, trained with windows that follow it; and the same in NumPy."""
from itertools import count

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn

from support import reference

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


class Expected:
    """What happens to a Position, in float64, with SGD.

    `microbatch` takes what all ranks have next, each cut into pieces. Those with NaN are skipped.
    """

    def __init__(self, minimum, maximum, target, rate):
        self.adaptive, self.rate = reference.AdaptiveLength(minimum, maximum, target), rate
        self.point = np.zeros(FEATURES)
        self.lengths, self.window, self.mini_step, self.of_a_rank = [], [], 0, 0

    def microbatch(self, *pieces, of_a_rank=1):
        pieces = [piece for piece in pieces if not np.isnan(piece).any()]
        if not pieces:
            return
        self.window += [(self.point - piece.mean(0, dtype=np.float64), len(piece)) for piece in pieces]
        self.mini_step += 1
        self.of_a_rank += of_a_rank
        if self.mini_step == self.adaptive.length:
            self.flush()

    def flush(self):
        if self.window:
            self.adaptive.close(self.window, self.of_a_rank)
            self.point = self.point - self.rate * sum(g * w for g, w in self.window) / sum(w for _, w in self.window)
            self.lengths.append(self.adaptive.length)
        self.window, self.mini_step, self.of_a_rank = [], 0, 0
