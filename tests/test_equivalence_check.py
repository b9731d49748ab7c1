"""check_equivalence: verdicts, causes, and that it leaves no trace; batchnorm_to_groupnorm; `ms-accum check`."""
import importlib
import json
import os
import random
import re
from functools import partial
from pathlib import Path

import mindspore as ms
import numpy as np
import pytest
from conftest import MLP, Counting, compiled_graphs, run_python
from mindspore import Parameter, Tensor, nn, ops

from ms_accum import Accumulator, batchnorm_to_groupnorm, check_equivalence, make_train_step
from ms_accum.check.comparison import Division
from ms_accum.check.groupnorm import groups_for
from ms_accum.check.isolation import untouched
from ms_accum.cli import main as cli

CE = nn.CrossEntropyLoss()


@pytest.fixture(params=["pynative", "graph"])
def context(request, mode_named):
    """The mode of the script that asks."""
    return mode_named(request.param)


def normal(*shape, dtype=ms.float32, seed=0):
    return Tensor(np.random.default_rng(seed).normal(size=shape), dtype)


def labels(n, classes=3):
    return Tensor(np.random.default_rng(1).integers(0, classes, n), ms.int32)


def classifier(network):
    def forward_fn(x, y):
        return CE(network(x).astype(ms.float32), y)
    return forward_fn


def causes(report):
    """[(layer, type, first words of what)]"""
    return [(c.layer, c.type, c.what.split(":")[0]) for c in report.causes]


def cnn():
    return nn.SequentialCell(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8), nn.ReLU(),
                             nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dense(8, 3)).set_train()


# --- what is exact --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("micro_size", [2, 5, 9, 24])
def test_an_mlp_is_exact(context, micro_size):
    network = MLP()
    report = check_equivalence(classifier(network), network, (normal(12, 6), labels(12)), micro_size)
    assert report.ok
    assert report.causes == ()
    assert list(report.per_parameter) == [p.name for p in network.trainable_params()]
    assert report.max_relative_difference == max(report.per_parameter.values()) < 1e-6
    assert (report.samples, report.pieces) == (12, {2: 2, 5: 4, 9: 6, 24: 12}[micro_size])
    assert str(report).startswith("Accumulation is exact for this network, loss and batch (12 samples in ")


def random_network(rng):
    """Layers in random order, with biases whose gradient is 0 but for rounding (in front of a normalisation), and kinks."""
    layers, width = [], 12
    for _ in range(rng.integers(1, 6)):
        out = 4 * int(rng.integers(1, 12))
        layers += [nn.Dense(width, out), [nn.ReLU(), nn.Tanh(), nn.GELU(), nn.LayerNorm((out,)), nn.GroupNorm(1, out)][rng.integers(5)]]
        width = out
    network = nn.SequentialCell(*layers, nn.Dense(width, 3))
    for p in network.trainable_params():
        p.set_data(Tensor(p.asnumpy() * 2.0 ** rng.integers(-2, 3) + rng.normal(0, 0.01, p.shape), p.dtype))
    return network


@pytest.mark.parametrize(("dtype", "seeds"), [
    ("float32", 12), ("float16", 4),
    pytest.param("float32", 60, marks=pytest.mark.slow), pytest.param("float16", 60, marks=pytest.mark.slow)])
def test_no_false_alarm_on_exact_networks(dtype, seeds):
    failed = []
    for seed in range(seeds):
        rng = np.random.default_rng(seed)
        network = random_network(rng)
        if dtype == "float16":
            level = ("to_float", "O1", "O2", "O3")[seed % 4]
            network = network.to_float(ms.float16) if level == "to_float" else ms.amp.auto_mixed_precision(network, level)
        n = int(rng.integers(2, 40))
        report = check_equivalence(classifier(network), network, (normal(n, 12, seed=seed), labels(n)), int(rng.integers(2, 12)))
        if not report.ok:
            failed.append((seed, str(report)))
    assert not failed


def test_rounding_that_a_deep_network_blows_up_is_rounding():
    """Gain 4 at each of 12 layers: the sums alone explain less than a hundredth of the difference."""
    rng = np.random.default_rng(0)
    network = nn.SequentialCell(*[layer for _ in range(12) for layer in (nn.Dense(32, 32), nn.Tanh())], nn.Dense(32, 3))
    for p in network.trainable_params():
        p.set_data(Tensor(rng.normal(0, 4 / np.sqrt(32), p.shape), p.dtype))
    batch = normal(33, 32), labels(33)
    report = check_equivalence(classifier(network), network, batch, 33)
    assert report.ok
    assert 1e-5 < report.max_relative_difference < 1e-2
    with untouched(network.cells()):
        division = Division(classifier(network), network, batch, 33, None)
        division.look(network.cells())
        assert not division.compare().exact


class Shift(nn.Cell):
    """Logits, and one shift of all of them: its gradient is 0."""

    def __init__(self):
        super().__init__()
        self.shift, self.weight = Parameter(Tensor([0.5], ms.float32)), Parameter(normal(32, 3))

    def construct(self, x):
        return ops.matmul(x, self.weight) + self.shift


def test_a_gradient_of_0_is_compared_with_what_it_is_made_of():
    network = Shift()
    with untouched([network]):
        division = Division(classifier(network), network, (normal(7, 32) * 3, labels(7)), 7, None)
        division.look([network])
        comparison = division.compare()
    assert comparison.exact
    assert comparison.relative[0] == 0
    assert comparison.undivided[0] < 1e-6 * comparison.undivided[1]


@pytest.mark.parametrize(("dtype", "off"), [("float32", 1e-4), ("float16", 0.3)])
def test_weights_that_are_off_are_no_rounding(dtype, off):
    """Negative control: what the tolerance must not swallow."""
    network = MLP()
    if dtype == "float16":
        network.to_float(ms.float16)

    def weight_fn(x, y):
        return x.shape[0] * (1 + off * (y[0] == 0).astype(ms.float32))
    batch = normal(32, 6), labels(32)
    report = check_equivalence(classifier(network), network, batch, 8, weight_fn=weight_fn)
    assert not report.ok
    assert causes(report) == [("forward_fn", "function", "wrong normalisation")]
    assert "let weight_fn return" in report.causes[0].remedy
    assert check_equivalence(classifier(network), network, batch, 8).ok


@pytest.mark.parametrize(("activation", "tokens"), [(nn.ReLU, [48, 46, 46, 45]), (nn.Tanh, [48, 48, 47, 47])])
def test_a_wrong_mean_is_no_rounding_in_16_bits(activation, tokens):
    """Off by 1e-2 and 2e-2: more than rounding, and less than 4 times what weights that are off by rounding change in the gradient."""
    network = nn.SequentialCell(*[layer for i in range(6) for layer in (nn.Dense(64 if i else 16, 64), activation())], nn.Dense(64, 8))
    for seed, p in enumerate(network.trainable_params()):
        p.set_data(normal(*p.shape, seed=seed) / np.sqrt(3 * p.shape[-1]))
    network = ms.amp.auto_mixed_precision(network, "O3")
    mask = (np.arange(48) < np.array(tokens)[:, None]).reshape(16, 12)

    def masked(x, target, mask):
        return (((network(x) - target) ** 2).mean(-1) * mask).sum() / mask.sum()
    batch = normal(16, 12, 16), normal(16, 12, 8, seed=1), Tensor(mask, ms.float32)
    report = check_equivalence(masked, network, batch, 4)
    assert not report.ok
    assert causes(report) == [("masked", "function", "wrong normalisation")]
    assert check_equivalence(masked, network, batch, 4, weight_fn=lambda x, target, mask: mask.sum()).ok


def test_float16_parameters_are_exact():
    network = nn.SequentialCell(nn.Dense(6, 64, dtype=ms.float16), nn.ReLU(), nn.Dense(64, 3, dtype=ms.float16))
    report = check_equivalence(classifier(network), network, (normal(24, 6, dtype=ms.float16), labels(24)), 4)
    assert report.ok
    assert 1e-6 < report.max_relative_difference < 1e-2


def test_the_differences_are_those_of_the_train_step():
    """The report's figure, from the gradients that make_train_step hands to an optimizer."""
    network = cnn()
    for p in network.get_parameters():
        p.set_data(Tensor(p.asnumpy() + 0.1, p.dtype))
    batch = normal(8, 3, 6, 6), labels(8)

    def gradient(micro_size):
        acc = Accumulator(Counting(ms.ParameterTuple(network.trainable_params())), 1, reduction="mean")
        make_train_step(classifier(network), acc, micro_size=micro_size)(*batch)
        return [g.asnumpy() for g in acc.optimizer.seen]
    report = check_equivalence(classifier(network), network, batch, 3)
    os.environ["MS_JIT"] = "0"
    try:
        expected = [np.linalg.norm(a - g) / np.linalg.norm(g) for a, g in zip(gradient(3), gradient(1))]
    finally:
        del os.environ["MS_JIT"]
    assert list(report.per_parameter.values()) == pytest.approx(expected, rel=1e-3)
    assert report.max_relative_difference > 0.1


# --- what is not, and why -------------------------------------------------------------------------------------------------


def test_batch_statistics_are_named(context):
    network = cnn()
    batch = normal(8, 3, 6, 6), labels(8)
    report = check_equivalence(classifier(network), network, batch, 4)
    assert not report.ok
    assert causes(report) == [(name, "BatchNorm2d", "batch statistics") for name in ("1", "4")]
    assert "batchnorm_to_groupnorm(network)" in str(report)
    assert report.max_relative_difference > 0.05
    network.set_train(False)
    assert check_equivalence(classifier(network), network, batch, 4).ok


def test_a_second_cause_is_found_behind_batch_statistics():
    network = cnn()

    def sum_loss(x, y):
        return ops.cross_entropy(network(x), y, reduction="sum")
    report = check_equivalence(sum_loss, network, (normal(8, 3, 6, 6), labels(8)), 4)
    assert causes(report) == [("1", "BatchNorm2d", "batch statistics"), ("4", "BatchNorm2d", "batch statistics"),
                              ("sum_loss", "function", "wrong normalisation")]


def test_every_batchnorm_is_known():
    class Mixed(nn.Cell):
        def __init__(self):
            super().__init__()
            self.flat, self.deep = nn.BatchNorm1d(4), nn.BatchNorm3d(2)
            self.always = nn.BatchNorm1d(4, use_batch_statistics=True)
            self.never = nn.BatchNorm1d(4, use_batch_statistics=False)
            self.dense = nn.Dense(4, 3)

        def construct(self, x):
            x = x + self.deep(x.reshape(-1, 2, 2, 1, 1)).reshape(-1, 4)
            return self.dense(self.flat(self.never(x)) * self.always(x))
    network = Mixed().set_train()
    report = check_equivalence(classifier(network), network, (normal(12, 4), labels(12)), 3)
    assert causes(report) == [("flat", "BatchNorm1d", "batch statistics"), ("deep", "BatchNorm3d", "batch statistics"),
                              ("always", "BatchNorm1d", "batch statistics")]
    assert network.always.use_batch_statistics is True


def test_dropout_is_declared_and_compared(context):
    network = nn.SequentialCell(nn.Dense(6, 16), nn.Dropout(p=0.5), nn.ReLU(), nn.Dropout(p=0.0), nn.Dense(16, 3)).set_train()
    batch = normal(24, 6), labels(24)
    report = check_equivalence(classifier(network), network, batch, 4)
    assert report.ok
    assert causes(report) == [("1", "Dropout", "random")]
    assert report.max_relative_difference < 1e-6
    network.set_train(False)
    assert check_equivalence(classifier(network), network, batch, 4).causes == ()


def test_dropout_hides_no_other_cause():
    network = nn.SequentialCell(nn.Dense(6, 16), nn.Dropout(p=0.5), nn.Dense(16, 3)).set_train()

    def sum_loss(x, y):
        return CE(network(x), y) * len(x)
    report = check_equivalence(sum_loss, network, (normal(24, 6), labels(24)), 4)
    assert not report.ok
    assert causes(report) == [("1", "Dropout", "random"), ("sum_loss", "function", "wrong normalisation")]


class Drop(nn.Cell):
    """Random by a function, which no list of types knows."""

    def construct(self, x):
        return ops.dropout(x, 0.5, self.training)


def test_a_layer_that_draws_is_found_by_what_it_does():
    network = nn.SequentialCell(nn.Dense(6, 16), nn.SequentialCell(nn.ReLU(), Drop()), nn.Dense(16, 3)).set_train()
    report = check_equivalence(classifier(network), network, (normal(24, 6), labels(24)), 4)
    assert report.ok
    assert causes(report) == [("1.1", "Drop", "random")]
    assert network[1][1].training


def test_a_layer_that_draws_keeps_the_batchnorm_in_it():
    class Block(nn.Cell):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(16)

        def construct(self, x):
            return ops.dropout(self.norm(x), 0.5, self.training)
    network = nn.SequentialCell(nn.Dense(6, 16), Block(), nn.Dense(16, 3)).set_train()
    report = check_equivalence(classifier(network), network, (normal(24, 6), labels(24)), 4)
    assert not report.ok
    assert causes(report) == [("1", "Block", "random"), ("1.norm", "BatchNorm1d", "batch statistics")]


@pytest.mark.parametrize("count", [2, 3])
def test_random_layers_behind_each_other(count):
    network = nn.SequentialCell(*[nn.TransformerEncoderLayer(8, 2, 8, dropout=0.1, batch_first=True) for _ in range(count)], Drop(),
                                nn.Dense(8, 3)).set_train()

    def forward_fn(x, y):
        return CE(network(x).mean(1), y)
    report = check_equivalence(forward_fn, network, (normal(6, 3, 8), labels(6)), 3)
    assert report.ok
    assert [c.layer for c in report.causes if c.type != "Dropout"] == [*(f"{i}.self_attn" for i in range(count)), f"{count}"]
    assert network[0].self_attn.training


def test_what_cannot_be_switched_off_is_named_behind_what_can():
    class Noise(nn.Cell):
        def construct(self, x):
            return ops.dropout(x, 0.5, True)
    network = nn.SequentialCell(nn.Dense(6, 16), Drop(), nn.Tanh(), Noise(), Drop(), nn.Dense(16, 3)).set_train()
    report = check_equivalence(classifier(network), network, (normal(24, 6), labels(24)), 4)
    assert not report.ok
    assert [(c.layer, "compared with the layer switched off" in c.what) for c in report.causes] == [("1", True), ("3", False)]
    assert "nothing can be compared" in report.causes[1].what


class Clip(nn.Cell):
    """The identity, but for a gradient that it clips."""

    def __init__(self, bound):
        super().__init__()
        self.bound = bound

    def construct(self, x):
        return x

    def bprop(self, x, out, dout):
        return (ops.clamp(dout, -self.bound, self.bound),)


@pytest.mark.parametrize(("bound", "exact"), [(0.3, True), (0.02, False), (1e-4, False)])
def test_a_bprop_that_clips_is_named(bound, exact):
    """Where it never clips, where it clips in the pieces alone, and where it always does."""
    network = nn.SequentialCell(nn.Dense(6, 8), nn.SequentialCell(nn.Dense(8, 8), Clip(bound)), nn.Tanh(), nn.Dense(8, 3))
    for seed, p in enumerate(network.trainable_params()):
        p.set_data(normal(*p.shape, seed=seed) / 3)
    report = check_equivalence(classifier(network), network, (normal(24, 6), labels(24)), 4)
    assert report.ok == exact
    assert causes(report) == ([] if exact else [("1.1", "Clip", "not linear backwards")])


def test_a_loss_that_draws_cannot_be_compared():
    network = MLP()

    def noisy(x, y):
        return CE(ops.dropout(network(x), 0.5, True), y)
    report = check_equivalence(noisy, network, (normal(24, 6), labels(24)), 4)
    assert not report.ok
    assert causes(report) == [("noisy", "function", "random")]


def info_nce(network):
    def contrastive(a, b):
        u, v = (z / ops.sqrt((z * z).sum(-1, keepdims=True)) for z in (network(a), network(b)))
        return ops.cross_entropy(ops.matmul(u, v.T) / 0.1, ops.arange(a.shape[0]).astype(ms.int32))
    return contrastive


def test_a_contrastive_loss_couples_samples(context):
    network = MLP()
    report = check_equivalence(info_nce(network), network, (normal(24, 6), normal(24, 6, seed=1)), 4)
    assert not report.ok
    assert causes(report) == [("contrastive", "function", "couples samples")]


def test_a_layer_that_couples_samples_is_found_by_what_it_does():
    class Centre(nn.Cell):
        def construct(self, x):
            return x - x.mean(0)
    network = nn.SequentialCell(nn.Dense(6, 16), nn.SequentialCell(nn.Tanh(), Centre()), nn.Dense(16, 3))
    report = check_equivalence(classifier(network), network, (normal(24, 6), labels(24)), 4)
    assert not report.ok
    assert causes(report) == [("1.1", "Centre", "couples samples")]


@pytest.mark.parametrize("micro_size", [4, 5])
def test_a_sum_is_no_mean(context, micro_size):
    network = MLP()

    def sum_loss(x, y):
        return ops.cross_entropy(network(x), y, reduction="sum")
    report = check_equivalence(sum_loss, network, (normal(24, 6), labels(24)), micro_size)
    assert not report.ok
    assert causes(report) == [("sum_loss", "function", "wrong normalisation")]
    assert f"is a sum over samples, of which accumulation over {micro_size} pieces takes the mean" in report.causes[0].what
    assert "return the mean" in report.causes[0].remedy
    assert report.max_relative_difference == pytest.approx(1 - 1 / micro_size, rel=0.1)


class Tokens(nn.Cell):
    def __init__(self):
        super().__init__()
        self.embed, self.out = nn.Embedding(20, 8), nn.Dense(8, 20)

    def construct(self, ids):
        return self.out(ops.tanh(self.embed(ids)))


def token_case(lengths):
    network = Tokens()
    ids = Tensor(np.random.default_rng(0).integers(1, 20, (12, 9)), ms.int32)
    mask = Tensor(np.arange(9) < np.array(lengths)[:, None], ms.float32)

    def token_loss(ids, mask):
        loss = ops.cross_entropy(network(ids).reshape(-1, 20), ids.reshape(-1), reduction="none").reshape(ids.shape)
        return (loss * mask).sum() / mask.sum()

    def tokens(ids, mask):
        return mask.sum()
    return token_loss, network, (ids, mask), tokens


def test_ragged_tokens_need_their_weights(context):
    forward_fn, network, batch, weight_fn = token_case([9, 1, 2, 6, 9, 9, 4, 4, 1, 1, 1, 1])
    report = check_equivalence(forward_fn, network, batch, 4)
    assert not report.ok
    assert causes(report) == [("token_loss", "function", "wrong normalisation")]
    assert "the batch counts its pieces 0.25, 0.5, 0.1875, 0.0625, but they were weighted 0.25, 0.25, 0.25, 0.25" in report.causes[0].what
    assert "weight_fn=" in report.causes[0].remedy
    assert check_equivalence(forward_fn, network, batch, 4, weight_fn=weight_fn).ok


def test_a_piece_without_tokens():
    forward_fn, network, batch, weight_fn = token_case([9, 1, 2, 0, 0, 0, 4, 4, 4, 1, 1, 1])
    report = check_equivalence(forward_fn, network, batch, 4)
    assert not report.ok
    assert report.max_relative_difference == float("inf")
    assert causes(report) == [("token_loss", "function", "wrong normalisation")]
    assert "but 1 of 4 pieces (number 2 first) have not" in report.causes[0].what
    assert check_equivalence(forward_fn, network, batch, 4, weight_fn=weight_fn).ok


def test_a_gradient_that_is_not_finite_is_said_so():
    network = MLP()
    x = normal(8, 6).asnumpy()
    x[3] = np.nan
    report = check_equivalence(classifier(network), network, (Tensor(x), labels(8)), 4)
    assert not report.ok
    assert causes(report) == [("forward_fn", "function", "not finite")]
    assert "nothing can be compared" in str(report)


def test_a_gradient_that_is_nothing_but_rounding_is_said_so():
    network = nn.Dense(4, 1, has_bias=False)
    x = normal(8, 4)

    def cancelled(x):  # its gradient is 0 for the batch, but for rounding
        return (network(x - x.mean(0)) * 1e6).mean()
    report = check_equivalence(cancelled, network, (Tensor(x.asnumpy() + 1000.0),), 2)
    assert not report.ok
    assert causes(report)[0][1:] in (("function", "rounding"), ("function", "couples samples"))


def test_the_readmes_report_is_a_real_one():
    readme = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
    code, printed = re.search(r"```python\n([^`]*check_equivalence[^`]*)```\n\n```\n(.*?)```", readme, re.DOTALL).groups()
    ending = """
batchnorm_to_groupnorm(network)
def mean_loss(data, label):
    return ops.cross_entropy(network(data), label)
print(check_equivalence(mean_loss, network, batch, micro_size=4).verdict)
"""

    def without_figures(text):
        return [re.sub(r"\d\.\de-\d\d", "#", line) for line in text.splitlines() if not line.startswith(("largest", "beyond"))]
    *report, after = run_python(code + ending).splitlines()
    assert without_figures("\n".join(report)) == without_figures(printed)
    assert after.startswith("Accumulation is exact")


@pytest.mark.parametrize("form", ["closure", "partial", "object", "method", "cell", "jit"])
def test_layers_outside_of_network_are_found(form):
    """A head with BatchNorm that the checked network does not hold, behind every kind of function."""
    network, head = nn.Dense(6, 6), nn.SequentialCell(nn.BatchNorm1d(6), nn.Dense(6, 3)).set_train()

    class Loss:
        def __init__(self):
            self.head = head

        def __call__(self, x, y):
            return CE(self.head(network(x)), y)

        def method(self, x, y):
            return self(x, y)

    class LossCell(nn.Cell):
        def __init__(self):
            super().__init__(auto_prefix=False)
            self.head = head

        def construct(self, x, y):
            return CE(self.head(network(x)), y)

    def helper(x):
        return head(network(x))

    def closure(x, y):
        return CE(helper(x), y)

    def three(_, x, y):
        return closure(x, y)
    forward_fn = {"closure": closure, "partial": partial(three, None), "object": Loss(), "method": Loss().method, "cell": LossCell(),
                  "jit": ms.jit(closure)}[form]
    before = trace(head)
    report = check_equivalence(forward_fn, network, (normal(12, 6), labels(12)), 3)
    assert [(layer.rpartition("head.")[2], kind) for layer, kind, _ in causes(report)] == [("0", "BatchNorm1d")]
    assert trace(head) == before


# --- no trace -------------------------------------------------------------------------------------------------------------


class Everything(nn.Cell):
    """Statistics, masks, a random primitive with a state of its own, a frozen and a shared layer."""

    def __init__(self):
        super().__init__()
        self.dense, self.norm, self.drop = nn.Dense(6, 6), nn.BatchNorm1d(6), nn.Dropout(p=0.5)
        self.frozen, self.noise = nn.BatchNorm1d(6), ops.StandardNormal(seed=5)
        self.frozen.set_train(False)
        self.out = nn.Dense(6, 3)
        self.out.bias.requires_grad = False
        self.counter = Parameter(Tensor(0, ms.int32), name="counter", requires_grad=False)

    def construct(self, x):
        ops.assign_add(self.counter, 1)
        x = self.drop(self.frozen(self.norm(self.dense(x))))
        return self.out(x + 0.1 * ops.dropout(self.noise(x.shape), 0.5, True))


class Broken(Exception):
    pass


def everything(broken):
    ms.set_seed(7)
    random.seed(7)
    network = Everything()
    for cell in (network, network.norm, network.drop):
        cell.training = True
    teacher = nn.SequentialCell(nn.Dense(6, 3), nn.BatchNorm1d(3)).set_train()

    def forward_fn(x, y):
        loss = CE(network(x) + teacher(x), y) + float(np.random.rand() + random.random()) * 0
        if broken and len(x) < 12:
            raise Broken
        return loss
    return network, teacher, forward_fn


def trace(*cells):
    """All that a check might leave behind."""
    return [(name, type(cell).__name__, cell.training, cell.phase, len(cell._forward_hook), [id(p) for p in cell._primitives.values()],
             [(p.name, p.requires_grad, p.dtype, p.asnumpy().tobytes()) for p in cell.get_parameters(expand=False)])
            for root in cells for name, cell in root.cells_and_names()]


def drawn(network):
    """Numbers from every source of randomness."""
    network.norm.set_train(False)
    x = normal(4, 6)
    ones = ops.ones((4, 4))
    return [network(x).asnumpy(), network.drop(ones).asnumpy(), ops.dropout(ones, 0.5, True).asnumpy(), network.noise((3,)).asnumpy(),
            ops.standard_normal((3,)).asnumpy(), np.random.rand(3), np.array(random.random())]


@pytest.mark.parametrize("broken", [False, True])
def test_no_trace_is_left(context, broken, monkeypatch):
    # Set below, and unset again after the test. Not by its name, which `mindspore.common` gives to a function, too.
    monkeypatch.setattr(importlib.import_module("mindspore.common.seed"), "_GLOBAL_SEED", None)
    batch = normal(12, 6), labels(12)
    numbers = []
    for check in (True, False):
        ms.set_context(mode=ms.PYNATIVE_MODE)
        network, teacher, forward_fn = everything(broken)
        network(batch[0])  # randomness has begun
        optimizer = nn.Momentum(network.trainable_params(), 0.1, 0.9)
        if context == "graph":
            ms.set_context(mode=ms.GRAPH_MODE)
        before = trace(network, teacher, optimizer)
        if check:
            if broken:
                with pytest.raises(Broken):
                    check_equivalence(forward_fn, network, batch, 3)
            else:
                assert not check_equivalence(forward_fn, network, batch, 3).ok
            assert trace(network, teacher, optimizer) == before
            assert ms.get_context("mode") == (ms.GRAPH_MODE if context == "graph" else ms.PYNATIVE_MODE)
            assert "MS_JIT" not in os.environ
        ms.set_context(mode=ms.PYNATIVE_MODE)
        numbers.append(drawn(network))
    for one, other in zip(*numbers):
        np.testing.assert_array_equal(one, other)


def test_a_check_disturbs_no_training():
    """A train step that was compiled before goes on with the parameters, and compiles nothing again."""
    trained = []
    for check in (False, True):
        network = nn.SequentialCell(nn.Dense(6, 8), nn.BatchNorm1d(8), nn.Dense(8, 3)).set_train()
        for seed, p in enumerate(network.trainable_params()):
            p.set_data(normal(*p.shape, seed=seed))
        train_step = make_train_step(classifier(network), Accumulator(nn.SGD(network.trainable_params(), 0.1), 2, reduction="mean"))
        batch = normal(12, 6), labels(12)
        train_step(*batch)
        compiled = compiled_graphs()
        if check:
            assert not check_equivalence(classifier(network), network, batch, 3).ok
        for _ in range(3):
            train_step(*batch)
        assert compiled_graphs() == compiled
        trained.append([p.asnumpy() for p in network.get_parameters()])
    for one, other in zip(*trained):
        np.testing.assert_array_equal(one, other)


# --- refusals -------------------------------------------------------------------------------------------------------------


def frozen():
    network = MLP()
    for p in network.trainable_params():
        p.requires_grad = False
    return network


def stranger(x, y):
    return (x * x).mean()


GOOD = {"forward_fn": stranger, "network": MLP(), "batch": (normal(8, 6), labels(8)), "micro_size": 2}


@pytest.mark.parametrize(("wrong", "error", "message"), [
    ({"forward_fn": 3}, TypeError, "forward_fn is of type int, expected a function of the batch"),
    ({"weight_fn": 3}, TypeError, "weight_fn is of type int, expected a function of the batch"),
    ({"network": stranger}, TypeError, "network is of type function, expected a mindspore.nn.Cell"),
    ({"network": nn.ReLU()}, ValueError, "network has no trainable parameters"),
    ({"network": frozen()}, ValueError, "network has no trainable parameters"),
    ({"batch": normal(8, 6)}, TypeError, "batch is of type Tensor, expected a tuple"),
    ({"batch": ()}, ValueError, "expected at least one Tensor with axes"),
    ({"batch": (np.ones((8, 6)),)}, TypeError, "the batch holds a NumPy array"),
    ({"batch": (normal(1, 6), labels(1))}, ValueError, "the batch has 1 sample, which cannot be cut"),
    ({"micro_size": 1}, ValueError, "micro_size is 1, expected an int >= 2: one piece is the undivided batch"),
    ({"micro_size": 2.0}, TypeError, "micro_size is 2.0, expected an int >= 2"),
    ({"micro_size": True}, TypeError, "micro_size is True, expected an int >= 2"),
    ({"weight_fn": lambda x, y: 0}, ValueError, "weight_fn gave the pieces the weights"),
    ({"weight_fn": lambda x, y: -1}, ValueError, "weight is -1, expected a finite number >= 0"),
    ({}, ValueError, "the gradient is 0 in all parameters of network"),
    ({"forward_fn": lambda x, y: x}, ValueError, r"forward_fn returned a loss of shape \(8, 6\), expected shape \(\)"),
    ({"forward_fn": lambda x, y: (x.mean(), x)}, TypeError, "forward_fn returned a tuple, expected the loss alone"),
    ({"forward_fn": lambda x, y: 1.0}, TypeError, "forward_fn returned float, expected the loss: a float Tensor"),
    ({"forward_fn": lambda x, y: y.sum()}, TypeError, "forward_fn returned a loss of Int"),
    ({"forward_fn": lambda x: x}, TypeError, "positional argument"),
])
def test_bad_arguments_are_refused(wrong, error, message):
    arguments = {**GOOD, **wrong}
    weight_fn = arguments.pop("weight_fn", None)
    with pytest.raises(error, match=message):
        check_equivalence(*arguments.values(), weight_fn=weight_fn)


def test_after_an_error_in_forward_fn_all_goes_on():
    network = MLP()
    batch = normal(8, 6), labels(8)

    def broken(x, y):
        if len(x) < 8:
            raise Broken("not with so few")
        return CE(network(x), y)
    with pytest.raises(Broken, match="not with so few"):
        check_equivalence(broken, network, batch, 2)
    assert check_equivalence(classifier(network), network, batch, 2).ok


# --- BatchNorm becomes GroupNorm ------------------------------------------------------------------------------------------


class Tree(nn.Cell):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm2d(6)
        self.blocks = nn.CellList([nn.SequentialCell(nn.Conv2d(6, 6, 1), nn.BatchNorm2d(6)) for _ in range(2)])
        self.again = self.norm
        self.deep, self.flat, self.out = nn.BatchNorm3d(6), nn.BatchNorm1d(6), nn.Dense(6, 3)
        self.kept = nn.BatchNorm1d(6, use_batch_statistics=False)

    def construct(self, x):
        x = self.norm(x)
        for block in self.blocks:
            x = x + block(x)
        x = self.deep(self.again(x).expand_dims(2)).mean((2, 3, 4))
        return self.out(self.kept(self.flat(x)))


def test_every_place_gets_a_groupnorm(context):
    network = Tree().set_train()
    for seed, p in enumerate(network.trainable_params()):
        p.set_data(normal(*p.shape, seed=seed))
    network.blocks[0][1].beta.requires_grad = False
    network.flat.training = False
    optimizer = nn.SGD(network.trainable_params(), 0.1)
    before = [(p.name, id(p), p.asnumpy().tobytes()) for p in network.trainable_params()]
    names = batchnorm_to_groupnorm(network, num_groups=4)
    assert sorted(names) == ["again", "blocks.0.1", "blocks.1.1", "deep", "flat", "norm"]
    assert sorted((p.name, id(p), p.asnumpy().tobytes()) for p in network.trainable_params()) == sorted(before)
    assert [id(p) for p in optimizer.parameters] == [i for _, i, _ in before]
    assert network.again is network.norm
    assert not network.blocks[0][1].beta.requires_grad
    assert [network.norm.num_groups, network.flat.num_groups] == [3, 1]
    assert network.norm.training
    assert not network.flat.training
    assert isinstance(network.kept, nn.BatchNorm1d)
    assert not any("moving" in p.name for p in network.get_parameters() if "kept" not in p.name)
    batch = normal(8, 6, 4, 4), labels(8)
    assert check_equivalence(classifier(network), network, batch, 4).ok
    assert batchnorm_to_groupnorm(network) == []


def test_a_groupnorm_computes_what_it_should():
    """Against NumPy, for each number of axes."""
    for layer, shape in ((nn.BatchNorm1d, (3, 16)), (nn.BatchNorm1d, (3, 16, 5)), (nn.BatchNorm2d, (3, 6, 2, 2)),
                         (nn.BatchNorm3d, (3, 6, 2, 2, 2))):
        network = nn.SequentialCell(layer(shape[1]))
        gamma, beta = network.trainable_params()
        gamma.set_data(normal(shape[1], seed=3))
        beta.set_data(normal(shape[1], seed=4))
        assert batchnorm_to_groupnorm(network, 2) == ["0"]
        x = normal(*shape).asnumpy().astype(np.float64)
        grouped = x.reshape(3, 2, -1)
        plain = ((grouped - grouped.mean(-1, keepdims=True)) / np.sqrt(grouped.var(-1, keepdims=True) + 1e-5)).reshape(shape)
        by_channel = (1, shape[1]) + (1,) * (len(shape) - 2)
        expected = plain * gamma.asnumpy().reshape(by_channel) + beta.asnumpy().reshape(by_channel)
        np.testing.assert_allclose(network(Tensor(x, ms.float32)).asnumpy(), expected, atol=1e-5)


def test_a_replaced_network_trains_in_a_graph():
    network = nn.SequentialCell(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.Flatten(), nn.Dense(96, 6), nn.BatchNorm1d(6)).set_train()
    batchnorm_to_groupnorm(network)
    train_step = make_train_step(classifier(network), Accumulator(nn.SGD(network.trainable_params(), 0.1), 1, reduction="mean"),
                                 micro_size=2)
    losses = [float(train_step(normal(8, 3, 4, 4), labels(8))) for _ in range(5)]
    assert losses[-1] < losses[0]


@pytest.mark.parametrize(("channels", "num_groups", "alone", "groups"), [
    (64, 32, False, 32), (64, 32, True, 8), (256, 32, True, 32), (32, 32, False, 32), (32, 32, True, 4), (32, 2, True, 2),
    (48, 32, False, 24), (24, 32, False, 12),
    (10, 32, False, 5), (7, 32, False, 1), (7, 7, False, 7), (1, 32, False, 1), (6, 4, False, 3), (2, 32, True, 1)])
def test_groups_fit_the_channels(channels, num_groups, alone, groups):
    assert groups_for(channels, num_groups, alone) == groups


def test_bad_replacements_are_refused():
    network = nn.SequentialCell(nn.BatchNorm2d(4), nn.BatchNorm1d(1))
    for arguments, error, message in (
            ((3,), TypeError, "network is of type int, expected a mindspore.nn.Cell"),
            ((nn.BatchNorm1d(4),), ValueError, "network is itself a BatchNorm1d"),
            ((network, 0), ValueError, "num_groups is 0, expected an int >= 1"),
            ((network, 2.0), TypeError, "num_groups is 2.0, expected an int >= 1"),
            ((network, True), TypeError, "num_groups is True, expected an int >= 1"),
            ((network,), ValueError, "1 is a BatchNorm1d of 1 channel")):
        with pytest.raises(error, match=message):
            batchnorm_to_groupnorm(*arguments)
    assert isinstance(network[0], nn.BatchNorm2d)  # an error replaces nothing


# --- the command ----------------------------------------------------------------------------------------------------------


CASES = """
import numpy as np
import mindspore as ms
from mindspore import Tensor, nn, ops

network = nn.Dense(6, 3)
batch = Tensor(np.random.default_rng(0).normal(size=(8, 6)), ms.float32), Tensor(np.arange(8) % 3, ms.int32)

def mean(x, y):
    return ops.cross_entropy(network(x), y)

def total(x, y):
    return ops.cross_entropy(network(x), y, reduction="sum")

def fails(x, y):
    raise RuntimeError("as it does")

def exact(): return mean, network, batch
def inexact(): return total, network, batch
def weighted(): return mean, network, batch, lambda x, y: 1.0
def failing(): return fails, network, batch
def raising(): return 1 / 0
def short(): return mean, network
def single(): return mean, network, 3
number = 3
"""


@pytest.fixture
def check(capsys, monkeypatch):
    """Run `ms-accum check` in this process: (status, stdout, stderr)."""
    name = f"cases_{random.randrange(10 ** 9)}"
    Path(f"{name}.py").write_text(CASES, encoding="utf-8")
    monkeypatch.syspath_prepend(os.getcwd())

    def run(function, *options):
        status = cli.main(["check", f"{name}:{function}", *options])
        return status, *capsys.readouterr()
    return run


def test_the_command_answers_by_its_status(check):
    status, out, err = check("exact")
    assert (status, err) == (0, "")
    assert out.startswith("Accumulation is exact for this network, loss and batch (8 samples in 4 pieces).")
    status, out, err = check("inexact", "--micro-size", "3", "--json", "report.json")
    assert (status, err) == (1, "")
    assert "NOT exact" in out
    assert "total (function): wrong normalisation" in out
    report = json.loads(Path("report.json").read_text())
    assert (report["ok"], report["pieces"], report["micro_size"]) == (False, 3, 3)
    assert report["causes"][0].keys() == {"layer", "type", "what", "remedy"}
    assert report["max_relative_difference"] == max(report["per_parameter"].values())
    assert check("weighted")[0] == 0
    assert check("weighted", "--micro-size", "3")[0] == 1


@pytest.mark.parametrize(("function", "message"), [
    ("nothing", "has no function nothing"), ("number", "is of type int, expected a function without arguments"),
    ("short", "returned 2 values, expected (forward_fn, network, batch)"), ("number", "number"),
    ("single", "batch is of type int, expected a tuple"), ("raising", "raised ZeroDivisionError: division by zero"),
    ("failing", "as it does"), ("", "expected MODULE:FUNCTION, got")])
def test_the_command_refuses_in_one_line(check, function, message):
    status, out, err = check(function)
    assert (status, out) == (2, "")
    assert message in err.splitlines()[-1]
    assert err.splitlines()[-1].startswith("ms-accum check: error: ")
    assert (len(err.splitlines()) == 1) == (function not in ("raising", "failing"))


@pytest.mark.parametrize(("arguments", "message"), [
    (["no_such_module:f"], "cannot import no_such_module: ModuleNotFoundError"),
    (["train.py:make_case"], "got 'train.py:make_case'; e.g. train:make_case for make_case in train.py"),
    (["json"], "expected MODULE:FUNCTION, got 'json'"),
    (["json:loads", "--micro-size", "1"], "expected a whole number from 2, got '1'"),
    (["json:loads", "--json", "no/such/folder.json"], "cannot write"), ([], "required: MODULE:FUNCTION")])
def test_a_bad_command_line(capsys, arguments, message):
    assert cli.main(["check", *arguments]) == 2
    err = capsys.readouterr().err
    assert message in err
    assert len(err.splitlines()) == 1


def test_the_command_has_help(capsys):
    assert cli.main(["check", "--help"]) == 0
    out = capsys.readouterr().out
    for word in ("MODULE:FUNCTION", "--micro-size K", "--json FILE", "Exit status: 0", "examples:"):
        assert word in out
