"""What grows in a process, printed: `memory.py long MICROBATCHES`, `emptying`, `layers WAY LAYERS`, or
`undivided|cut|cached SAMPLES`."""
import re
import resource
import sys
from pathlib import Path

import mindspore as ms
import numpy as np
from mindspore import Parameter, ParameterTuple, Tensor, nn, ops

try:
    from mindspore.graph.api import ms_compile_cache
except ImportError:  # before MindSpore 2.9
    from mindspore.common.api import ms_compile_cache
from ms_accum import Accumulator, TrainOneStepCell, avoid_busy_waiting, make_grad_cache_step, make_train_step

avoid_busy_waiting()


def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def long(microbatches):
    """By how much memory and the number of graphs have grown since the first 1,000 microbatches; and the counters."""
    network = nn.Dense(3, 1, weight_init="zeros")

    def forward_fn(x):
        return (network(x) ** 2).mean()

    train_step = make_train_step(forward_fn, nn.SGD(network.trainable_params(), 1e-3), {0: 3, 300: 7}, clip_norm=1.0)
    data = np.random.default_rng(0).normal(size=(64, 4, 3)).astype(np.float32)
    for i in range(int(microbatches)):
        if i == 1000:
            memory, graphs = resident(), len(ms_compile_cache)
        loss = train_step(Tensor(data[i % 64]))
    grown, counters = resident() - memory, train_step.accumulator
    graphs = len(ms_compile_cache) - graphs
    print(grown, graphs, int(counters.mini_step), int(counters.update_step), np.isfinite(float(loss)))


def emptying():
    """The growth when buffers are emptied, over their size: by `reset`, by `zeros_like`; then names."""
    small = nn.SGD([Parameter(Tensor([0.0]), name=f"w{i}") for i in range(2)], 0.1)
    equal = [Accumulator(small, 2, reduction="sum") for _ in range(2)]
    names = [p.name for accumulator in equal for p in accumulator.parameters]
    weights = [Parameter(Tensor(np.ones((16 + i) * 2**18), ms.float32), name=f"p{i}") for i in range(12)]
    accumulator = Accumulator(nn.SGD(ParameterTuple(weights), 0.1), 2, reduction="sum")
    buffers = accumulator.window.buffers
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

    for empty in (reset, zeros_like):
        before = resident()
        for _ in range(4):
            empty().asnumpy()
        print((resident() - before) / accumulator.window.nbytes)
    print(*names)


def layers(way, count):
    """The peak, in weights of a layer, of adding microbatches to the buffers of Dense 1536."""
    width = 1536
    network = nn.SequentialCell(*[nn.Dense(width, width, "zeros", has_bias=False) for _ in range(int(count))],
                                Mean())
    optimizer, x = nn.SGD(network.trainable_params(), 1e-3), Tensor(np.ones((4, width)), ms.float32)

    def tokens(x):
        return (x[:, 0] * 2).sum()

    if way in ("eager", "eager tokens", "compiled"):
        weight_fn = tokens if way == "eager tokens" else None
        run = make_train_step(network, optimizer, 100, eager=way != "compiled", weight_fn=weight_fn)
    elif way == "cell":
        run = TrainOneStepCell(network, optimizer, 100)
    else:
        accumulator = Accumulator(optimizer, 100, reduction="mean")
        grad_fn = ms.value_and_grad(network, None, accumulator.weights)

        def run(x):
            return accumulator(grad_fn(x)[1], Tensor(8.0))

    for _ in range(8):
        run(x).asnumpy()
    print(peak() * 1024 / (width * width * 4))


class Mean(nn.Cell):
    def construct(self, x):
        return x.mean()


def peak():
    """In KiB. ru_maxrss would be inherited from the process that started this one."""
    return int(re.search(r"VmHWM:\s*(\d+)", Path("/proc/self/status").read_text(encoding="utf-8"))[1])


def contrastive(kind, samples):
    """The peak, in KiB, of training an encoder of sequences of 64 tokens: 64 x 512 floats a layer for each sample."""
    token = nn.SequentialCell(nn.Dense(32, 512), nn.ReLU(), nn.Dense(512, 512), nn.ReLU(), nn.Dense(512, 16))

    def encode(x):
        return token(x).mean(1)

    def contrast(z):
        return ops.cross_entropy(ops.matmul(z, z.T), ops.arange(len(z)))

    def contrast_of(x):
        return contrast(encode(x))

    optimizer = nn.SGD(token.trainable_params(), 0.1)
    pieces = 1 if kind == "undivided" else int(samples) // 16
    step = (make_grad_cache_step(encode, contrast, optimizer, 1, pieces=pieces) if kind == "cached" else
            make_train_step(contrast_of, optimizer, 1, pieces=pieces))
    for _ in range(3):
        float(step(Tensor(np.random.default_rng(0).random((int(samples), 64, 32), np.float32))))
    print(peak())


if sys.argv[1] in ("long", "emptying", "layers"):
    {"long": long, "emptying": emptying, "layers": layers}[sys.argv[1]](*sys.argv[2:])
else:
    contrastive(*sys.argv[1:])
