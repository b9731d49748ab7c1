"""Print by how much emptying the buffers makes memory grow, over their size: by `reset`, `zeros_like`; then names."""
import resource
from pathlib import Path

import mindspore as ms
import numpy as np
from mindspore import Parameter, ParameterTuple, Tensor, nn, ops

from ms_accum import Accumulator, avoid_busy_waiting

avoid_busy_waiting()
small = nn.SGD([Parameter(Tensor([0.0]), name=f"w{i}") for i in range(2)], 0.1)
names = [p.name for _ in range(2) for p in Accumulator(small, 2).parameters]
weights = ParameterTuple([Parameter(Tensor(np.ones((16 + i) * 2**18), ms.float32), name=f"p{i}") for i in range(12)])
accumulator = Accumulator(nn.SGD(weights, 0.1), 2)
buffers = accumulator.buffers.parameters
for buffer in buffers:
    buffer.set_data(Tensor(np.ones(buffer.shape), buffer.dtype))  # touched: resident from here on


@ms.jit
def reset():
    accumulator.reset()
    return accumulator.mini_step + 0


@ms.jit
def zeros_like():
    for buffer in buffers:
        ops.assign(buffer, ops.zeros_like(buffer))
    return accumulator.mini_step + 0


def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


for empty in (reset, zeros_like):
    before = resident()
    for _ in range(4):
        empty().asnumpy()
    print((resident() - before) / accumulator.buffers.nbytes)
print(*names)
