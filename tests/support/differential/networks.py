"""Tiny networks for the differential runs: a front, a norm, a head and a loss, which take `(x, ids, target, mask)`."""
import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops

from support.cells import Clip
from support.layers import amp_at

FEATURES, HIDDEN, WORDS = 8, 8, 6
FRONTS = ("dense", "conv", "lstm", "attention", "mha", "tied")
NORMS = ("none", "layer", "group", "batch")
LOSSES = ("mean", "smoothed", "masked", "mse")
FLOAT32_LEVELS = ("none", "O0")
AMP_LEVELS = ("O0", "O1", "O2", "O3", "auto")
LEVELS = ("none", *AMP_LEVELS, "to_float", "half")


class Reshape(nn.Cell):
    def __init__(self, *shape):
        super().__init__()
        self.shape = shape

    def construct(self, x):
        return x.reshape(self.shape)


def dense_front():
    return nn.SequentialCell(nn.Dense(FEATURES, HIDDEN), nn.Tanh())


def conv_front():
    conv = nn.Conv2d(1, 4, 2, pad_mode="valid", has_bias=True)
    return nn.SequentialCell(Reshape(-1, 1, 2, 4), conv, nn.Tanh(), Reshape(-1, 12), nn.Dense(12, HIDDEN))


class LSTMFront(nn.Cell):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(2, HIDDEN, batch_first=True)

    def construct(self, x):
        sequence, _ = self.lstm(x.reshape(-1, 4, 2))
        return sequence[:, -1]


class AttentionFront(nn.Cell):
    def __init__(self):
        super().__init__()
        self.query, self.key, self.value = (nn.Dense(2, HIDDEN, has_bias=False) for _ in range(3))

    def construct(self, x):
        x = x.reshape(-1, 4, 2)
        query, key, value = self.query(x), self.key(x), self.value(x)
        attention = ops.softmax(ops.matmul(query, key.transpose(0, 2, 1)) * 0.35)
        return ops.matmul(attention, value)[:, 0]


class MHAFront(nn.Cell):
    def __init__(self):
        super().__init__()
        self.dense = nn.Dense(2, HIDDEN)
        self.attention = nn.MultiheadAttention(HIDDEN, 2, batch_first=True)

    def construct(self, x):
        x = self.dense(x.reshape(-1, 4, 2))
        attended, _ = self.attention(x, x, x)
        return attended.mean(1)


FRONT_OF = {"dense": dense_front, "conv": conv_front, "lstm": LSTMFront, "attention": AttentionFront, "mha": MHAFront}


class TiedNetwork(nn.Cell):
    """One weight as the embedding and as the output layer."""

    def __init__(self, norm, last):
        super().__init__()
        self.embedding = nn.Embedding(WORDS, HIDDEN)
        self.dense = nn.Dense(FEATURES, HIDDEN)
        self.norm, self.last = norm, last

    def construct(self, x, ids):
        hidden = self.norm(ops.tanh(self.embedding(ids).mean(1) + self.dense(x)))
        return self.last(ops.matmul(hidden, self.embedding.embedding_table.T.astype(hidden.dtype)))


class Network(nn.Cell):
    def __init__(self, front, norm, last, outputs):
        super().__init__()
        self.front, self.norm, self.last = front, norm, last
        self.head = nn.Dense(HIDDEN, outputs)

    def construct(self, x, ids):
        return self.last(self.head(self.norm(self.front(x))))


class GroupNorm(nn.Cell):
    def __init__(self):
        super().__init__()
        self.norm = nn.GroupNorm(2, 4)

    def construct(self, x):
        return self.norm(x.reshape(-1, 4, 2, 1)).reshape(-1, 8)  # level O1 rewrites this, and knows no global names


class Loss(nn.Cell):
    """The mean loss of a batch, times `factor`; what is trained. Or, with `per_row`, the sum: each row counts so much.
    """

    def __init__(self, network, kind, factor, dtype, per_row=None):
        super().__init__()
        self.network, self.kind, self.factor, self.dtype, self.per_row = network, kind, factor, dtype, per_row
        self.mean = nn.CrossEntropyLoss(label_smoothing=0.1 if kind == "smoothed" else 0.0)
        self.each = nn.CrossEntropyLoss(reduction="none")

    def construct(self, x, ids, target, mask):
        output = self.network(x.astype(self.dtype), ids).astype(ms.float32)
        if self.kind == "mse":
            loss = ops.square(output - target).mean()
        elif self.kind == "masked":
            loss = (self.each(output, target) * mask).sum()
            loss = loss / mask.sum() if self.per_row is None else loss
        else:
            loss = self.mean(output, target)
        if self.per_row is not None and self.kind != "masked":
            loss = loss * (self.per_row * mask.shape[0])
        return loss * self.factor


class Transposed(nn.Cell):
    """A loss of arrays whose samples are along axis 1, where there is one. Its parameters keep their names."""

    def __init__(self, loss):
        super().__init__(auto_prefix=False)
        self.loss = loss

    def construct(self, x, ids, target, mask):
        return self.loss(x.T, ids.T, target.T, mask)


class Weighed(nn.Cell):
    """A loss that returns its own weight. Its parameters keep their names."""

    def __init__(self, loss, weigh):
        super().__init__(auto_prefix=False)
        self.loss, self.weigh = loss, weigh

    def construct(self, x, ids, target, mask):
        return self.loss(x, ids, target, mask), self.weigh(x, ids, target, mask)


def outputs(front, loss):
    """Values per row that the network gives: classes, or what a regression predicts."""
    return WORDS if front == "tied" else 2 if loss == "mse" else 3


def _norm(name, statistics):
    if name == "batch":
        return nn.BatchNorm1d(HIDDEN, use_batch_statistics=statistics)
    return {"none": nn.Identity, "layer": lambda: nn.LayerNorm((HIDDEN,)), "group": GroupNorm}[name]()


def _draw(network, seed):
    rng = np.random.default_rng(seed)
    for parameter in network.get_parameters():
        low = 0.5 if parameter.name.endswith("moving_variance") else None
        value = rng.normal(0, 0.5, parameter.shape) if low is None else rng.uniform(low, 1.5, parameter.shape)
        parameter.set_data(Tensor(value, ms.float32))


def build_loss(case, seed, per_row=None):
    """The loss of the case's network as a Cell, with initial values drawn from `seed`. `per_row`: see `Loss`."""
    # Model calls set_train on the whole cell, which would thaw a layer that is frozen by set_train(False).
    norm = _norm(case.norm, False if case.driver.startswith("model") else None)
    last = Clip(0.3 * case.factor) if case.backward_clip else nn.Identity()
    if case.front == "tied":
        network = TiedNetwork(norm, last)
    else:
        network = Network(FRONT_OF[case.front](), norm, last, outputs(case.front, case.loss))
    _draw(network, seed)
    network = amp_at(network, "float16" if case.level == "half" else case.level)
    dtype = ms.float16 if case.level == "half" else ms.float32
    loss = Loss(network, case.loss, case.factor, dtype, per_row)
    loss.set_train(True)
    for _, cell in loss.cells_and_names():
        if "BatchNorm" in type(cell).__name__:  # level O1 makes a class of its own of it
            cell.set_train(False)
    return loss

