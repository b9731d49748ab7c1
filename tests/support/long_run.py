"""Train on as many microbatches as asked for; print growth after 1,500 of them, and the counters."""
import resource
import sys
from pathlib import Path

import numpy as np
from mindspore import Tensor, nn

try:
    from mindspore.graph.api import ms_compile_cache
except ImportError:  # before MindSpore 2.9
    from mindspore.common.api import ms_compile_cache
from ms_accum import avoid_busy_waiting, make_train_step

avoid_busy_waiting()

network = nn.Dense(3, 1, weight_init="zeros")


def forward_fn(x):
    return (network(x) ** 2).mean()


optimizer = nn.SGD(network.trainable_params(), 1e-3)
train_step = make_train_step(forward_fn, optimizer, {0: 3, 300: 7}, clip_norm=1.0)
data = np.random.default_rng(0).normal(size=(64, 4, 3)).astype(np.float32)


def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


for i in range(int(sys.argv[1])):
    if i == 1500:
        memory, graphs = resident(), len(ms_compile_cache)
    loss = train_step(Tensor(data[i % 64]))
grown, counters = resident() - memory, train_step.accumulator
graphs = len(ms_compile_cache) - graphs
print(grown, graphs, int(counters.mini_step), int(counters.update_step), np.isfinite(float(loss)))
