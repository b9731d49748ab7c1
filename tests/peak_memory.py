"""A script that prints by how many KiB the process's peak grows with each of: a cached batch, a cut batch, the same batch undivided.

One network of tokens for all, so that activations are many times the batch.
"""
import numpy as np
from mindspore import Tensor, nn, ops

from ms_accum import Accumulator, avoid_busy_waiting, make_grad_cache_step, make_train_step

avoid_busy_waiting()
token = nn.SequentialCell(nn.Dense(32, 512), nn.ReLU(), nn.Dense(512, 512), nn.ReLU(), nn.Dense(512, 16))


def encoder(x):
    """Of sequences of 64 tokens: 64 x 512 floats a layer for each sample."""
    return token(x).mean(1)


def loss_fn(z):
    return ops.cross_entropy(ops.matmul(z, z.T), ops.arange(len(z)))


def forward_fn(x):
    return loss_fn(encoder(x))


def train(make, samples, **options):
    """What one step adds to this program's peak; ru_maxrss would be inherited from the process that started it."""
    before = peak()
    step = make(acc=Accumulator(nn.SGD(token.trainable_params(), 0.01), 1, reduction="mean"), **options)
    float(step(Tensor(np.random.default_rng(0).random((samples, 64, 32), np.float32))))
    return peak() - before


def peak():
    with open("/proc/self/status", encoding="utf-8") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmHWM"))


train(make_train_step, 16, forward_fn=forward_fn)  # the compiler's own memory
print(train(make_grad_cache_step, 768, encode_fn=encoder, loss_fn=loss_fn, micro_size=48),
      train(make_train_step, 768, forward_fn=forward_fn, micro_size=48), train(make_train_step, 768, forward_fn=forward_fn))
