"""A script that trains with strategy="split" once for each "DTYPE SAMPLES" it is given, the same DTYPE with the same step.

Run it with MS_DEV_SAVE_GRAPHS=1 to read the graphs.
"""
import sys

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn

from ms_accum import Accumulator, make_train_step


def step_of(dtype):
    network = nn.SequentialCell(nn.Dense(8, 16), nn.Tanh(), nn.Dense(16, 4)).to_float(getattr(ms, dtype))

    def forward_fn(x, y):
        return ((network(x).astype(ms.float32) - y) ** 2).mean()

    accumulator = Accumulator(nn.SGD(network.trainable_params(), 0.1), 4, reduction="mean")
    return make_train_step(forward_fn, accumulator, strategy="split")


steps = {}
for argument in sys.argv[1:]:
    dtype, samples = argument.split()
    steps[dtype] = steps.get(dtype) or step_of(dtype)
    try:
        steps[dtype](Tensor(np.ones((int(samples), 8)), ms.float32), Tensor(np.ones((int(samples), 4)), ms.float32))
    except (RuntimeError, TypeError):
        assert dtype == "bfloat16"  # CPU has no kernels for it; the graph is there
