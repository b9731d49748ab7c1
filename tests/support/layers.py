"""Layers, losses and batches for check_equivalence."""
import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, lazy_inline, nn, ops
from mindspore.common.initializer import Normal


def normal(*shape, dtype=ms.float32, seed=0):
    return Tensor(np.random.default_rng(seed).normal(size=shape), dtype)


def labels(n, classes=3):
    return Tensor(np.random.default_rng(1).integers(0, classes, n), ms.int32)


def drawn(network):
    """The network with weights that keep the size of the activations."""
    for seed, p in enumerate(network.trainable_params()):
        p.set_data(Tensor(normal(*p.shape, seed=seed).asnumpy() / np.sqrt(p.shape[-1]), p.dtype))
    return network.set_train()


def amp_at(network, level):
    """The network in 16 bits."""
    if level == "float16":
        for p in network.get_parameters():
            p.set_dtype(ms.float16)
    elif level == "to_float":
        network.to_float(ms.float16)
    return ms.amp.auto_mixed_precision(network, level) if level[0] in "Oa" else network


def around(*layers):
    return drawn(nn.SequentialCell(nn.Dense(6, 16), *layers, nn.Dense(16, 3)))


def cnn():
    return nn.SequentialCell(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dense(8, 3)).set_train()


def causes(report):
    """[(layer, type, first words of what)]"""
    return [(c.layer, c.type, c.what.split(":")[0]) for c in report.causes]


class Held(nn.Cell):
    """A layer with one Parameter that is not trained, and that moves in the forward pass unless the layer is frozen."""

    def __init__(self, start=1.0, frozen=False):
        super().__init__()
        self.frozen = frozen
        self.state = Parameter(Tensor(start, ms.float32), requires_grad=False)

    def construct(self, x):
        used, after = self.step(x)
        if not self.frozen:
            ops.assign(self.state, ops.stop_gradient(after))
        return used


class SpectralNorm(Held):
    """Its power iteration moves a vector by the weights alone."""

    def __init__(self, frozen=False):
        super().__init__(np.random.default_rng(6).normal(size=16), frozen)
        self.weight = Parameter(normal(16, 16, seed=5))

    def step(self, x):
        v = self.state @ self.weight
        v = ops.stop_gradient(v / (v * v).sum().sqrt())
        u = self.weight @ v
        u = ops.stop_gradient(self.state if self.frozen else u / (u * u).sum().sqrt())
        return x @ self.weight / (u @ self.weight @ v), u


class ScaleBefore(Held):
    """A scale that is used before its update."""

    def step(self, x):
        return x * (self.state * 1.0), 0.5 * (self.state + x.abs().mean())


class RunningMaximum(Held):
    """It divides by the largest input that it has seen, which stays as it is once all samples were seen."""

    def __init__(self, frozen=False):
        super().__init__(0.1, frozen)

    def step(self, x):
        largest = self.state * 1.0 if self.frozen else ops.maximum(self.state, ops.stop_gradient(x.abs().max()))
        return x / largest, largest


class Counter(Held):
    """It counts its calls, and divides by their number."""

    def step(self, x):
        return x / (self.state * 1.0), self.state + 1.0


class Queue(Held):
    """It shifts by the mean of what the last calls left, as a memory bank does."""

    def __init__(self, frozen=False):
        super().__init__(np.zeros(3), frozen)

    def step(self, x):
        return x + self.state.mean(), ops.concat((self.state[1:], x.mean().reshape(1)))


class Depending(nn.Cell):
    """Its state is changed by what its output depends on."""

    def __init__(self, frozen=False):
        super().__init__()
        self.frozen, self.state = frozen, Parameter(Tensor(1.0, ms.float32), requires_grad=False)

    def construct(self, x):
        used = x / (self.state * 1.0)
        return used if self.frozen else ops.depend(used, ops.assign_add(self.state, Tensor(0.5)))


class Unused(Held):
    """It counts its calls, and does nothing with their number."""

    def step(self, x):
        return x, self.state + 1.0


class PythonCounter(nn.Cell):
    """The number is an attribute."""

    def __init__(self, frozen=False):
        super().__init__()
        self.calls, self.frozen = 1, frozen

    def construct(self, x):
        x = x / self.calls
        self.calls += 0 if self.frozen else 1
        return x


class Drop(nn.Cell):
    """Random by a function, which no list of types knows; and what it holds."""

    def __init__(self, inside=None):
        super().__init__()
        self.inside = inside

    def construct(self, x):
        return ops.dropout(self.inside(x) if self.inside else x, 0.5, self.training)


class Gumbel(nn.Cell):
    """Random for ever."""

    def construct(self, x):
        return x * ops.gumbel_softmax(x)


class Centred(nn.Cell):
    def construct(self, x):
        return x - x.mean(0)


def attention():
    """Random layers behind each other, which only an experiment finds."""
    encoders = [nn.TransformerEncoderLayer(8, 2, 8, dropout=0.1, batch_first=True) for _ in range(2)]
    return drawn(nn.SequentialCell(*encoders, nn.Dropout(p=0.5), nn.Flatten(), nn.Dense(24, 3)))


def sum_loss(network):
    def total(x, y):
        return ops.cross_entropy(network(x).astype(ms.float32), y, reduction="sum")
    return total


def noisy_loss(network):
    def noisy(x, y):
        return ops.cross_entropy(ops.dropout(network(x), 0.5, True), y)
    return noisy


def info_nce(network):
    def contrastive(a, b):
        u, v = (z / ops.sqrt((z * z).sum(-1, keepdims=True)) for z in (network(a), network(b)))
        return ops.cross_entropy(ops.matmul(u, v.T) / 0.1, ops.arange(a.shape[0]).astype(ms.int32))
    return contrastive


class Adds(nn.Cell):
    """A layer whose backward pass adds to the gradient, as the balancing loss of a mixture of experts does."""

    def __init__(self, added, mean=True):
        super().__init__()
        self.added, self.mean = added, mean

    def construct(self, x):
        return x + 0

    def bprop(self, x, out, dout):
        return (dout + (self.added / x.shape[0] if self.mean else self.added),)


class Block(nn.Cell):
    """What a transformer repeats, without attention."""

    def __init__(self, width):
        super().__init__()
        self.up, self.down = nn.Dense(width, 4 * width), nn.Dense(4 * width, width)

    def construct(self, x):
        return x + self.down(ops.gelu(self.up(x)))


class LazyBlock(Block):
    """The same, compiled once for all."""

    @lazy_inline
    def __init__(self, width):
        super().__init__(width)


class Tied(nn.Cell):
    """A language model whose head is its embedding; the loss is the sum over the tokens that are not masked."""

    def __init__(self, made, recomputed, width, words, blocks):
        super().__init__()
        self.embedding = nn.Embedding(words, width, embedding_table=Normal(0.5))
        self.blocks = nn.CellList([made(width) for _ in range(blocks)])
        for block in self.blocks if recomputed else ():
            block.recompute()

    def construct(self, tokens, targets):
        states = self.embedding(tokens)
        for block in self.blocks:
            states = block(states)
        table = self.embedding.embedding_table
        logits = ops.MatMul(transpose_b=True)(states.reshape(-1, table.shape[1]), table)
        return ops.cross_entropy(logits, targets.reshape(-1), ignore_index=-100, reduction="sum")
