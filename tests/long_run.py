"""Train on as many microbatches as asked for; print growth of memory and of graphs after 1,500 of them, and the counters."""
import resource
import sys
from pathlib import Path

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn

try:
    from mindspore.graph import api
except ImportError:  # before MindSpore 2.8
    from mindspore.common import api

from ms_accum import Accumulator, avoid_busy_waiting, make_train_step

avoid_busy_waiting()
network = nn.Dense(3, 1, weight_init="zeros")
acc = Accumulator(nn.SGD(network.trainable_params(), 1e-3), {0: 3, 300: 7}, 1.0, reduction="mean")


def forward_fn(x):
    return (network(x) ** 2).mean()


train_step = make_train_step(forward_fn, acc)
data = np.random.default_rng(0).normal(size=(64, 4, 3)).astype(np.float32)


def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


for i in range(int(sys.argv[1])):
    if i == 1500:
        memory, graphs = resident(), len(api.ms_compile_cache)
    loss = train_step(Tensor(data[i % 64], ms.float32))
grown = resident() - memory
print(grown, len(api.ms_compile_cache) - graphs, int(acc.mini_step), int(acc.update_step), np.isfinite(float(loss)))
