"""check_equivalence: what is exact, what is not and why, and what is refused."""
import os
import re
from pathlib import Path

import mindspore as ms
import numpy as np
import pytest
from classifiers import causes, cnn, labels, normal
from conftest import MLP, Clip, Counting, mean_loss, run_python
from mindspore import Parameter, Tensor, nn, ops

from ms_accum import Accumulator, check_equivalence, make_train_step
from ms_accum.check.comparison import Division
from ms_accum.check.isolation import untouched

BATCH, WRONG, COUPLES = "batch statistics", "wrong normalisation", "couples samples"
IMAGES = normal(8, 3, 6, 6), labels(8)
ROWS = normal(24, 6), labels(24)


# --- what is exact --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["pynative", "graph"])
def test_in_every_mode_of_the_script(mode_named, mode):
    mode_named(mode)
    network = MLP()
    for asked, pieces in ((2, 2), (5, 4), (9, 6), (24, 12)):
        report = check_equivalence(mean_loss(network), network, (normal(12, 6), labels(12)), asked)
        assert report.ok
        assert report.causes == ()
        assert list(report.per_parameter) == [p.name for p in network.trainable_params()]
        assert report.max_relative_difference == max(report.per_parameter.values()) < 1e-6
        assert (report.samples, report.pieces) == (12, pieces)
        assert str(report).startswith("Accumulation is exact for this network, loss and batch (12 samples in ")
    network = cnn()
    report = check_equivalence(mean_loss(network), network, IMAGES, 4)
    assert (report.ok, len(report.causes)) == (False, 2)
    assert report.max_relative_difference > 0.05
    assert check_equivalence(mean_loss(network), network.set_train(False), IMAGES, 4).ok


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
    ("float32", range(8)), ("float16", range(1, 4)),
    pytest.param("float32", range(60), marks=pytest.mark.slow), pytest.param("float16", range(60), marks=pytest.mark.slow)])
def test_no_false_alarm_on_exact_networks(dtype, seeds):
    failed = []
    for seed in seeds:
        rng = np.random.default_rng(seed)
        network = random_network(rng)
        if dtype == "float16":
            level = ("to_float", "O1", "O2", "O3")[seed % 4]
            network = network.to_float(ms.float16) if level == "to_float" else ms.amp.auto_mixed_precision(network, level)
        n = int(rng.integers(2, 40))
        report = check_equivalence(mean_loss(network), network, (normal(n, 12, seed=seed), labels(n)), int(rng.integers(2, 12)))
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
    report = check_equivalence(mean_loss(network), network, batch, 11)
    assert report.ok
    assert 1e-5 < report.max_relative_difference < 1e-2
    with untouched(network.cells()):
        division = Division(mean_loss(network), network, batch, 11, None)
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
        division = Division(mean_loss(network), network, (normal(7, 32) * 3, labels(7)), 7, None)
        division.look([network])
        comparison = division.compare()
    assert comparison.exact
    assert comparison.relative[0] == 0
    assert comparison.undivided[0] < 1e-6 * comparison.undivided[1]


# --- negative controls: what the tolerance must not swallow -----------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "off"), [("float32", 1e-4), pytest.param("float16", 0.3, marks=pytest.mark.slow)])
def test_weights_that_are_off_are_no_rounding(dtype, off):
    network = MLP().to_float(getattr(ms, dtype))

    def weight_fn(x, y):
        return x.shape[0] * (1 + off * (y[0] == 0).astype(ms.float32))
    batch = normal(32, 6), labels(32)
    report = check_equivalence(mean_loss(network), network, batch, 8, weight_fn=weight_fn)
    assert not report.ok
    assert causes(report) == [("forward_fn", "function", WRONG)]
    assert "let weight_fn return" in report.causes[0].remedy
    assert check_equivalence(mean_loss(network), network, batch, 8).ok


@pytest.mark.parametrize(("activation", "tokens"), [
    (nn.ReLU, [48, 46, 46, 45]), pytest.param(nn.Tanh, [48, 48, 47, 47], marks=pytest.mark.slow)])
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
    assert causes(report) == [("masked", "function", WRONG)]
    assert check_equivalence(masked, network, batch, 4, weight_fn=lambda x, target, mask: mask.sum()).ok


def test_the_differences_are_those_of_the_train_step(monkeypatch):
    """The report's figure, from the gradients that make_train_step hands to an optimizer."""
    network = cnn()
    for p in network.get_parameters():
        p.set_data(Tensor(p.asnumpy() + 0.1, p.dtype))

    def gradient(pieces):
        acc = Accumulator(Counting(ms.ParameterTuple(network.trainable_params())), 1, reduction="mean")
        make_train_step(mean_loss(network), acc, pieces=pieces)(*IMAGES)
        return [g.asnumpy() for g in acc.optimizer.seen]
    report = check_equivalence(mean_loss(network), network, IMAGES, 3)
    monkeypatch.setenv("MS_JIT", "0")
    expected = [np.linalg.norm(a - g) / np.linalg.norm(g) for a, g in zip(gradient(3), gradient(1))]
    assert list(report.per_parameter.values()) == pytest.approx(expected, rel=1e-3)
    assert report.max_relative_difference > 0.1


# --- what is not exact, and why -------------------------------------------------------------------------------------------


class Mixed(nn.Cell):
    """Every BatchNorm: three that normalise by the batch, and one that never does."""

    def __init__(self):
        super().__init__()
        self.flat, self.deep = nn.BatchNorm1d(6), nn.BatchNorm3d(2)
        self.always = nn.BatchNorm1d(6, use_batch_statistics=True)
        self.never = nn.BatchNorm1d(6, use_batch_statistics=False)
        self.dense = nn.Dense(6, 3)

    def construct(self, x):
        x = x + self.deep(x.reshape(-1, 2, 3, 1, 1)).reshape(-1, 6)
        return self.dense(self.flat(self.never(x)) * self.always(x))


class Drop(nn.Cell):
    """Random by a function, which no list of types knows."""

    def construct(self, x):
        return ops.dropout(x, 0.5, self.training)


class Noise(nn.Cell):
    def construct(self, x):
        return ops.dropout(x, 0.5, True)


class NormAndDrop(nn.Cell):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(16)

    def construct(self, x):
        return ops.dropout(self.norm(x), 0.5, self.training)


class Centre(nn.Cell):
    def construct(self, x):
        return x - x.mean(0)


def around(*layers):
    return nn.SequentialCell(nn.Dense(6, 16), *layers, nn.Dense(16, 3)).set_train()


def clipping(bound):
    return around(nn.SequentialCell(nn.Dense(16, 16), Clip(bound)), nn.Tanh())


def sum_loss(network):
    def total(x, y):
        return ops.cross_entropy(network(x), y, reduction="sum")
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


def attention_loss(network):
    def attended(x, y):
        return ops.cross_entropy(network(x.reshape(-1, 3, 8)).mean(1), y)
    return attended


def attention():
    """Random layers behind each other, three of which only an experiment finds."""
    return nn.SequentialCell(*[nn.TransformerEncoderLayer(8, 2, 8, dropout=0.1, batch_first=True) for _ in range(2)], Drop(),
                             nn.Dense(8, 3)).set_train()


INEXACT = {
    "BatchNorm": (cnn, mean_loss, IMAGES, [("1", "BatchNorm2d", BATCH), ("4", "BatchNorm2d", BATCH)],
                  "remedy: batchnorm_to_groupnorm(network), or freeze"),
    "a sum behind BatchNorm": (cnn, sum_loss, IMAGES, [("1", "BatchNorm2d", BATCH), ("4", "BatchNorm2d", BATCH),
                                                       ("total", "function", WRONG)], "return the mean over the samples"),
    "every BatchNorm": (lambda: Mixed().set_train(), mean_loss, ROWS, [
        ("flat", "BatchNorm1d", BATCH), ("deep", "BatchNorm3d", BATCH), ("always", "BatchNorm1d", BATCH)], "NOT exact"),
    "a sum behind Dropout": (lambda: around(nn.Dropout(p=0.5)), sum_loss, ROWS, [("1", "Dropout", "random"), ("total", "function", WRONG)],
                             "is a sum over samples, of which accumulation over 4 pieces takes the mean"),
    "BatchNorm in a random layer": (lambda: around(NormAndDrop()), mean_loss, ROWS, [
        ("1", "NormAndDrop", "random"), ("1.norm", "BatchNorm1d", BATCH)], "compared with the layer switched off"),
    "noise for ever": (lambda: around(Drop(), nn.Tanh(), Noise(), Drop()), mean_loss, ROWS, [
        ("1", "Drop", "random"), ("3", "Noise", "random")], "3 (Noise): random: two evaluations of the same batch differ, so nothing can"),
    "clipped in the pieces": (lambda: clipping(0.02), mean_loss, ROWS, [("1.1", "Clip", "nonlinear backward pass")], "a bprop clips it"),
    "clipped always": (lambda: clipping(1e-4), mean_loss, ROWS, [("1.1", "Clip", "nonlinear backward pass")], "clip_norm="),
    "a loss that draws": (MLP, noisy_loss, ROWS, [("noisy", "function", "random")], "nothing can be compared"),
    "a contrastive loss": (MLP, info_nce, (normal(24, 6), normal(24, 6, seed=1)), [("contrastive", "function", COUPLES)],
                           "train it with make_grad_cache_step"),
    "a layer that couples": (lambda: around(nn.SequentialCell(nn.Tanh(), Centre())), mean_loss, ROWS, [("1.1", "Centre", COUPLES)],
                             "a layer that sees one sample at a time"),
    "NaN": (MLP, mean_loss, (Tensor(np.where(np.arange(24) == 3, np.nan, 1.0)[:, None] * ROWS[0].asnumpy(), ms.float32), ROWS[1]),
            [("forward_fn", "function", "not finite")], "nothing can be compared"),
}
EXACT = {
    "Dropout": (lambda: around(nn.Dropout(p=0.5), nn.ReLU(), nn.Dropout(p=0.0)), mean_loss, ROWS, [("1", "Dropout", "random")]),
    "no Dropout": (lambda: around(nn.Dropout(p=0.5)).set_train(False), mean_loss, ROWS, []),
    "a random layer": (lambda: around(nn.SequentialCell(nn.ReLU(), Drop())), mean_loss, ROWS, [("1.1", "Drop", "random")]),
    "never clipped": (lambda: clipping(0.5), mean_loss, ROWS, []),
    "attention": (attention, attention_loss, (normal(6, 24), labels(6)), [
        ("0.self_attn", "MultiheadAttention", "random"), ("1.self_attn", "MultiheadAttention", "random"), ("2", "Drop", "random")]),
}


@pytest.mark.parametrize("name", [*INEXACT, *EXACT])
def test_causes_are_named(name):
    build, loss, batch, expected, *said = (INEXACT | EXACT)[name]
    network = build()
    for seed, p in enumerate(network.trainable_params()):
        p.set_data(normal(*p.shape, seed=seed) / np.sqrt(p.shape[-1]))
    flags = [cell.training for _, cell in network.cells_and_names()]
    report = check_equivalence(loss(network), network, batch, 4)
    found = causes(report)
    assert [cause for cause in found if name != "attention" or cause[1] != "Dropout"] == expected
    assert report.ok == (name in EXACT)
    assert (report.max_relative_difference < 1e-5) == (name in EXACT)
    assert name != "Dropout" or report.max_relative_difference < 1e-6
    assert all(text in str(report) for text in said)
    assert [cell.training for _, cell in network.cells_and_names()] == flags


def test_a_gradient_that_is_nothing_but_rounding_is_said_so():
    network = nn.Dense(4, 1, has_bias=False)

    def cancelled(x):  # its gradient is 0 for the batch, but for rounding
        return (network(x - x.mean(0)) * 1e6).mean()
    report = check_equivalence(cancelled, network, (normal(8, 4) + 1000.0,), 2)
    assert not report.ok
    assert causes(report)[0][1:] in (("function", "rounding"), ("function", COUPLES))


class Tokens(nn.Cell):
    def __init__(self):
        super().__init__()
        self.embed, self.out = nn.Embedding(20, 8), nn.Dense(8, 20)

    def construct(self, ids):
        return self.out(ops.tanh(self.embed(ids)))


@pytest.mark.parametrize(("lengths", "said"), [
    ([9, 1, 2, 6, 9, 9, 4, 4, 1, 1, 1, 1], "counts its pieces 0.25, 0.5, 0.1875, 0.0625, but they were weighted 0.25, 0.25, 0.25, 0.25"),
    ([9, 1, 2, 0, 0, 0, 4, 4, 4, 1, 1, 1], "but not that of 1 of 4 pieces, the first of which is number 2; a mean over no")])
def test_ragged_tokens_need_their_weights(lengths, said):
    """Also where a piece has none, whose gradient is NaN."""
    network = Tokens()
    ids = Tensor(np.random.default_rng(0).integers(1, 20, (12, 9)), ms.int32)
    batch = ids, Tensor(np.arange(9) < np.array(lengths)[:, None], ms.float32)

    def token_loss(ids, mask):
        loss = ops.cross_entropy(network(ids).reshape(-1, 20), ids.reshape(-1), reduction="none").reshape(ids.shape)
        return (loss * mask).sum() / mask.sum()
    report = check_equivalence(token_loss, network, batch, 4)
    assert not report.ok
    assert (report.max_relative_difference == float("inf")) == (0 in lengths)
    assert causes(report) == [("token_loss", "function", WRONG)]
    assert said in report.causes[0].what
    assert "weight_fn=" in report.causes[0].remedy
    assert check_equivalence(token_loss, network, batch, 4, weight_fn=lambda ids, mask: mask.sum()).ok


def test_a_piece_without_tokens_whose_gradient_is_zero():
    """With nn.CrossEntropyLoss(ignore_index=...), the loss is NaN and the gradient 0; before MindSpore 2.8, it is NaN, too."""
    network, loss_fn = MLP(), nn.CrossEntropyLoss(ignore_index=-100)

    def token_loss(x, y):
        return loss_fn(network(x), y)
    batch = normal(8, 6), Tensor([1, -100, -100, -100, 0, 2, 1, 0], ms.int32)
    report = check_equivalence(token_loss, network, batch, 4)
    assert causes(report) == [("token_loss", "function", WRONG)]
    (gradient,) = ms.grad(token_loss, None, network.trainable_params()[-1:])(batch[0][2:4], batch[1][2:4])
    zero = "counts its pieces 0.2, 0, 0.4, 0.4"
    assert (zero if ops.isfinite(gradient).all() else "a mean over no unmasked token is 0/0") in report.causes[0].what
    assert check_equivalence(token_loss, network, batch, 4, weight_fn=lambda x, y: (y != -100).sum()).ok


def test_the_guides_report_is_a_real_one():
    page = (Path(__file__).parents[2] / "tutorials" / "guide" / "check.md").read_text(encoding="utf-8")
    code, printed = re.search(r"```python\n([^`]*check_equivalence[^`]*)```\n\n[^`]*```text\n(.*?)```", page, re.DOTALL).groups()

    def without_figures(text):
        return [re.sub(r"\d\.\de-\d\d", "#", line) for line in text.splitlines() if not line.startswith(("largest", "beyond"))]
    assert without_figures(run_python(code)) == without_figures(printed)


def frozen():
    network = MLP()
    for p in network.trainable_params():
        p.requires_grad = False
    return network


def stranger(x, y):
    return (x * x).mean()


GOOD = {"forward_fn": stranger, "network": MLP(), "batch": (normal(8, 6), labels(8)), "pieces": 2}


@pytest.mark.parametrize(("wrong", "error", "message"), [
    ({"forward_fn": 3}, TypeError, "forward_fn is of type int, expected a function of the batch"),
    ({"weight_fn": 3}, TypeError, "weight_fn is of type int, expected a function of the batch"),
    ({"network": stranger}, TypeError, "network is of type function, expected a mindspore.nn.Cell"),
    ({"network": nn.ReLU()}, ValueError, "network has no trainable parameters"),
    ({"network": frozen()}, ValueError, "network has no trainable parameters"),
    ({"batch": normal(8, 6)}, TypeError, "batch is of type Tensor, expected a tuple"),
    ({"batch": ()}, ValueError, "expected at least one Tensor with axes"),
    ({"batch": (normal(1, 6), labels(1))}, ValueError, "the batch has 1 sample, which cannot be cut"),
    ({"pieces": 1}, ValueError, "pieces is 1, expected an int >= 2; give the number of pieces"),
    ({"pieces": 2.0}, TypeError, "pieces is 2.0 of type float, expected an int >= 2"),
    ({"micro_size": 2}, TypeError, "micro_size is now called pieces"),
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
    with pytest.raises(error, match=message):
        check_equivalence(**{**GOOD, **wrong})
    assert "MS_JIT" not in os.environ
