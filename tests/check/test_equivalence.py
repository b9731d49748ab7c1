"""check_equivalence: what is exact, what is not and why, what it cannot tell, and what is refused."""
import os
import re
from functools import partial
from typing import Any, NamedTuple

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, amp, nn, ops
from support import layers
from support.cells import Clip, Counting, Sign
from support.layers import amp_at, around, attention, causes, cnn, drawn, info_nce, labels, noisy_loss, normal, sum_loss

from ms_accum import check_equivalence, make_train_step
from ms_accum.selftest.networks import MLP, mean_loss

STATISTICS, WRONG, COUPLES = "batch statistics", "wrong normalisation", "couples samples"
STATE = "moves state in its forward pass"
VERDICTS = {True: "Accumulation is exact for", False: "Accumulation is NOT exact for",
            None: "Cannot tell whether accumulation is"}
COPY = ("the network computes in 16 bits; the verdict is that of a float32 copy of it",)
IMAGES = normal(8, 3, 6, 6), labels(8)
ROWS = normal(24, 6), labels(24)
LOUD = Tensor(np.where(np.arange(24) == 23, 9.0, 1.0)[:, None] * ROWS[0].asnumpy(), ms.float32), ROWS[1]
NAN = Tensor(np.where(np.arange(24) == 3, np.nan, 1.0)[:, None] * ROWS[0].asnumpy(), ms.float32), ROWS[1]


# --- exact networks, drawn from a space -------------------------------------------------------------------------------


def drawn_case(seed, level):
    """A network of random layers, a batch for it, and a number of pieces.

    It has kinks, and biases whose gradient is 0 but for rounding (in front of a normalisation).
    """
    rng = np.random.default_rng(seed)
    layers, width = [], 12
    for _ in range(rng.integers(1, 5)):
        out = 4 * int(rng.integers(1, 7))
        layers += [nn.Dense(width, out), [nn.ReLU(), nn.Tanh(), nn.GELU(), nn.LayerNorm((out,)), nn.GroupNorm(1, out),
                                          nn.Dropout(p=0.5)][rng.integers(6)]]
        width = out
    network = nn.SequentialCell(*layers, nn.Dense(width, 3)).set_train()
    for p in network.trainable_params():
        p.set_data(Tensor(p.asnumpy() * 2.0 ** rng.integers(-2, 3) + rng.normal(0, 0.01, p.shape), p.dtype))
    n = int(rng.integers(2, 24))
    x = normal(n, 12, dtype=ms.float16 if level == "float16" else ms.float32, seed=seed)
    return amp_at(network, level), (x, labels(n)), int(rng.integers(2, 8))


@pytest.mark.parametrize(("level", "seeds"), [
    ("float32", range(3)), *((level, [i]) for i, level in enumerate(("to_float", "float16", "O2", "O3"))),
    *(pytest.param(level, range(30), marks=pytest.mark.slow) for level in ("float32", "to_float", "O2", "O3"))])
def test_no_false_alarm_on_exact_networks(mode_named, level, seeds):
    """In graph mode, too; the report has its figures. Control: the sum instead of the mean."""
    for seed in seeds:
        mode_named("graph" if seed % 2 else "pynative")
        network, batch, asked = drawn_case(seed, level)
        exact = check_equivalence(mean_loss(network), network, batch, asked)
        assert (exact.ok, exact.notes) == (True, () if level == "float32" else COPY), (seed, str(exact))
        assert {what for _, _, what in causes(exact)} <= {"random"}
        rows = -(-len(batch[0]) // asked)
        assert (exact.samples, exact.pieces) == (len(batch[0]), -(-len(batch[0]) // rows))
        assert [*exact.per_parameter] == [*exact.tolerances] == [p.name for p in network.trainable_params()]
        assert all(exact.per_parameter[name] <= explained for name, explained in exact.tolerances.items())
        assert exact.max_relative_difference == max(exact.per_parameter.values())
        wrong = check_equivalence(sum_loss(network), network, batch, asked)
        assert (wrong.ok, causes(wrong)[-1][2]) == (False, WRONG), (seed, str(wrong))


@pytest.mark.parametrize("level", [pytest.param("O1", marks=pytest.mark.slow), "auto"])
def test_casts_that_amp_has_written_into_the_code_may_hide_a_mistake(level):
    """Control: the network before it, and a mistake that is larger."""
    network, batch, pieces = drawn_case(3, "float32")
    assert check_equivalence(mean_loss(network), network, batch, pieces).ok
    network = amp_at(network, level)
    report = check_equivalence(mean_loss(network), network, batch, pieces)
    assert (report.ok, causes(report)[-1][2]) == (None, "rounding")
    assert "before auto_mixed_precision" in report.causes[-1].remedy
    assert check_equivalence(sum_loss(network), network, batch, pieces).ok is False


def drawn_images(seed):
    """Convolutions, each with a GroupNorm, whose bound of rounding may be large although nothing differs."""
    rng = np.random.default_rng(seed)
    layers, channels = [], 3
    for _ in range(rng.integers(1, 4)):
        out = 4 * int(rng.integers(1, 5))
        layers += [nn.Conv2d(channels, out, 3), nn.GroupNorm(int(rng.choice([1, 2, 4])), out), nn.ReLU()]
        channels = out
    network = nn.SequentialCell(*layers, nn.Flatten(), nn.Dense(channels * 36, 3)).set_train()
    for p in network.trainable_params():
        p.set_data(Tensor(p.asnumpy() * 2.0 ** rng.integers(-3, 4), p.dtype))
    n = int(rng.integers(2, 16))
    return network, (normal(n, 3, 6, 6, seed=seed), labels(n)), int(rng.integers(2, 8))


@pytest.mark.parametrize("seeds", [range(3), pytest.param(range(3, 200), marks=pytest.mark.slow)])
def test_exact_networks_of_convolutions_are_said_to_be_exact(seeds):
    """Control: the sum instead of the mean."""
    verdicts = {seed: check_equivalence(mean_loss(network), network, batch, pieces).ok
                for seed in seeds for network, batch, pieces in [drawn_images(seed)]}
    assert [seed for seed, ok in verdicts.items() if ok is not True] == []
    network, batch, pieces = drawn_images(seeds[0])
    assert check_equivalence(sum_loss(network), network, batch, pieces).ok is False


def test_the_differences_are_those_of_the_train_step(monkeypatch):
    """The report's figure, from the gradients that make_train_step hands to an optimizer."""
    network = cnn()
    for p in network.get_parameters():
        p.set_data(Tensor(p.asnumpy() + 0.1, p.dtype))

    def gradient(pieces):
        optimizer = Counting(ms.ParameterTuple(network.trainable_params()))
        make_train_step(mean_loss(network), optimizer, 1, pieces=pieces)(*IMAGES)
        return [g.asnumpy() for g in optimizer.seen]
    report = check_equivalence(mean_loss(network), network, IMAGES, 3)
    monkeypatch.setenv("MS_JIT", "0")
    expected = [np.linalg.norm(a - g) / np.linalg.norm(g) for a, g in zip(gradient(3), gradient(1))]
    assert list(report.per_parameter.values()) == pytest.approx(expected, rel=1e-3)
    assert report.max_relative_difference > 0.1
    assert (report.ok, causes(report)) == (False, [("1", "BatchNorm2d", STATISTICS), ("4", "BatchNorm2d", STATISTICS)])
    assert check_equivalence(mean_loss(network), network.set_train(False), IMAGES, 4).ok


# --- a verdict and its cause: each beside its control -----------------------------------------------------------------


class Case(NamedTuple):
    build: Any  # makes the network
    loss: Any  # makes forward_fn of it
    ok: Any
    causes: list
    said: tuple = ()  # texts of the report
    batch: tuple = ROWS
    weight_fn: Any = None
    pieces: int = 4
    options: Any = None


def at_rest(network, layer):
    network[layer].set_train(False)
    return network


def exploding(gain):
    """Gain 4 at each of 12 layers: float32 gives gradients that are off by a hundredth."""
    hidden = [layer for _ in range(12) for layer in (nn.Dense(32, 32), nn.Tanh())]
    network, rng = nn.SequentialCell(*hidden, nn.Dense(32, 3)), np.random.default_rng(0)
    for p in network.trainable_params():
        p.set_data(Tensor(rng.normal(0, gain / np.sqrt(32), p.shape), p.dtype))
    return network


def on_kinks():
    """Every ReLU gets 0 for some samples, so rounding might change the gradient, but does not where rows are cut."""
    network = nn.SequentialCell(nn.Dense(2, 8, has_bias=False), nn.ReLU(), nn.Dense(8, 3))
    network[0].weight.set_data(Tensor(np.tile([1.0, -1.0], (8, 1)), ms.float32))
    return network


def shifted():
    """One shift of all logits, whose gradient is 0, and is compared with what it is made of."""
    network = drawn(nn.Dense(32, 3))
    network.shift = Parameter(Tensor([0.5], ms.float32), name="shift")
    return network


def shift_loss(reduction):
    def made(network):
        def forward_fn(x, y):
            return ops.cross_entropy(network(x) + network.shift, y, reduction=reduction)
        return forward_fn
    return made


def small_loss(network):
    def small(x, y):
        return ops.cross_entropy(network(x).astype(ms.float32), y) * 1e-6
    return small


def token_mean(network, reduction="mean"):
    def tokens(x, y):
        return ops.cross_entropy(network(x), y, ignore_index=-100, reduction=reduction)
    return tokens


def tokens_and_squares(network):
    def added(x, y):
        return token_mean(network)(x, y) + ops.square(network(x)).mean()
    return added


class Lifted(nn.Cell):
    """A mask that changes a thousandth."""

    def __init__(self):
        super().__init__()
        self.drop = nn.Dropout(p=0.5)

    def construct(self, x):
        return 100 + 0.1 * self.drop(x)


def off_by(off):
    """Weights that are off, of the pieces that begin with the label 0."""
    return lambda x, y: x.shape[0] * (1 + off * (y[0] == 0).astype(ms.float32))


class Similarities(nn.Cell):
    """Logits of a contrastive loss: as many as there are samples, for each sample."""

    def __init__(self):
        super().__init__()
        self.left, self.right = MLP(), MLP(seed=1)

    def construct(self, x, y):
        return ops.matmul(self.left(x), self.right(y).T)


def matrix_loss(network):
    def forward_fn(x, y):
        logits = network(x, y)
        return ops.cross_entropy(logits, ops.arange(len(logits)))
    return forward_fn


# Two equal columns in the first six rows.
KINKS = Tensor(np.where(np.arange(24)[:, None] < 6, normal(24, 1).asnumpy(), normal(24, 2, seed=1).asnumpy()))
MOVING = layers.SpectralNorm, layers.ScaleBefore, layers.RunningMaximum, layers.Counter, layers.PythonCounter
CASTING = partial(nn.SequentialCell, nn.Dense(6, 16), layers.Half(nn.Dense(16, 3)))
WITHOUT_TOKENS = Tensor(np.where(np.arange(24) < 7, -100, ROWS[1].asnumpy()), ms.int32)
CONTRASTIVE = [("contrastive", "function", "no weighted mean")]
CLIPPED = [("1.1", "Clip", "nonlinear backward pass")]
SUM, SCALED = {"loss_reduction": "sum"}, {"loss_scaler": amp.StaticLossScaler(2.0**16)}
NOT_A_MEAN, ROUNDING = [("forward_fn", "function", WRONG)], [("forward_fn", "function", "rounding")]
CASES = {
    "BatchNorm, and a sum": Case(lambda: drawn(layers.Mixed()), sum_loss, False, [
        ("flat", "BatchNorm1d", STATISTICS), ("deep.bn2d", "BatchNorm2d", STATISTICS),
        ("always", "BatchNorm1d", STATISTICS), ("total", "function", WRONG)],
        ("remedy: batchnorm_to_groupnorm(network), or freeze", "return the mean over the samples")),
    "a layer that couples, and one that does not": Case(
        lambda: around(nn.SequentialCell(nn.Tanh(), layers.Beside([layers.Centred(), nn.LayerNorm((16,))]))),
        mean_loss, False, [("1.1.0", "Centred", COUPLES)], ("a layer that sees one sample at a time",)),
    **{f"clipped to {bound}": Case(
        lambda bound=bound: around(nn.SequentialCell(nn.Dense(16, 16), Clip(bound)), nn.Tanh()),
        mean_loss, not clipped, clipped, ("a bprop clips", "each sample's gradient", "clip_norm=") * bool(clipped))
       for bound, clipped in ((0.02, CLIPPED), (1e-4, CLIPPED), (0.5, []))},
    "the sign of a gradient": Case(
        lambda: around(nn.SequentialCell(nn.Dense(16, 16), Sign()), nn.Tanh()), mean_loss, False,
        [("1.1", "Sign", "nonlinear backward pass")]),
    "a clip, with a scaler": Case(
        lambda: around(nn.SequentialCell(nn.Dense(16, 16), Clip(0.5)), nn.Tanh()), mean_loss, False, CLIPPED,
        ("a bprop clips",), options=SCALED),
    **{f"{samples} samples of a contrastive loss": Case(
        MLP, info_nce, False, CONTRASTIVE, ("make_grad_cache_step",),
        (normal(samples, 6).abs(), normal(samples, 6, seed=1).abs()), pieces=2) for samples in (2, 3, 24)},
    "a network that compares two views": Case(
        Similarities, matrix_loss, False, [("network", "Similarities", COUPLES)],
        ("(contrastive, load-balancing, batch Dice), make_grad_cache_step",), (normal(8, 6), normal(8, 6, seed=1))),
    # Random layers: those of MindSpore are switched off, and leave the rest to be judged.
    "Dropout": Case(
        lambda: at_rest(around(nn.Dropout(p=0.5), nn.ReLU(), nn.Dropout(p=0.0), nn.Dropout(p=0.5)), 4),
        mean_loss, True, [("1", "Dropout", "random")], ("compared with the layer switched off",)),
    "LayerNorm behind a mask that changes little": Case(
        lambda: amp_at(around(Lifted(), nn.LayerNorm((16,))), "to_float"), mean_loss, True,
        [("1.drop", "Dropout", "random")]),
    "a random layer of one's own": Case(
        lambda: around(nn.Dropout(p=0.5), nn.SequentialCell(nn.ReLU(), layers.Drop())), mean_loss, None,
        [("1", "Dropout", "random"), ("2.1", "Drop", "random")], ("nothing can be compared", "only in nn.Dropout")),
    "a sum behind a random layer": Case(lambda: around(nn.Dropout(p=0.5)), sum_loss, False, [
        ("1", "Dropout", "random"), ("total", "function", WRONG)],
        ("is a sum over samples, but accumulation over 4 pieces takes the mean",)),
    "attention": Case(attention, mean_loss, True, [
        ("0.self_attn", "MultiheadAttention", "random"), ("1.self_attn", "MultiheadAttention", "random")], (),
        (normal(6, 3, 8), labels(6))),
    "noise for ever": Case(
        lambda: around(nn.BatchNorm1d(16), layers.Gumbel(), nn.Tanh()), mean_loss, None, [("2", "Gumbel", "random")],
        ("2 (Gumbel): random: two evaluations of the same batch differ, so nothing can be compared",)),
    "a loss that draws": Case(MLP, noisy_loss, None, [("noisy", "function", "random")], ("nothing can be compared",)),
    # State that moves in the forward pass, and the same layers at rest.
    "state": Case(lambda: around(layers.Beside([layer() for layer in MOVING])), mean_loss, False, [
        (f"1.{i}", layer.__name__, STATE) for i, layer in enumerate(MOVING)], ("freeze the state",)),
    "state at rest, or without effect": Case(
        lambda: around(layers.Beside([*(layer(frozen=True) for layer in MOVING), layers.Unused()])), mean_loss, True,
        []),
    "state that the last piece moves as far as it goes": Case(
        lambda: around(layers.RunningMaximum()), mean_loss, False, [("1", "RunningMaximum", STATE)], (), LOUD),
    "a sum behind state": Case(lambda: around(layers.SpectralNorm()), sum_loss, False, [
        ("1", "SpectralNorm", STATE), ("total", "function", WRONG)]),
    # What rounding explains, and what it must not swallow; 16 bits that no copy turns into 32.
    "NaN": Case(MLP, mean_loss, None, [("forward_fn", "function", "not finite")], ("nothing can be compared",), NAN),
    "casts of its own": Case(lambda: drawn(CASTING()), mean_loss, None, ROUNDING, ("without its casts",)),
    "BatchNorm in float32 at level O2": Case(lambda: amp_at(around(nn.BatchNorm1d(16)), "O2"), mean_loss, False,
                                             [("_backbone.1._backbone", "BatchNorm1d", STATISTICS)], COPY),
    "casts of its own behind 16-bit BatchNorm": Case(
        lambda: amp_at(around(nn.BatchNorm1d(16), layers.Half(nn.Tanh())), "float16"), mean_loss, False,
        [("1", "BatchNorm1d", STATISTICS)], (), (normal(24, 6, dtype=ms.float16), ROWS[1])),
    "casts of its own, and a sum": Case(lambda: drawn(CASTING()), sum_loss, False, [("total", "function", WRONG)]),
    **{f"gain {gain}": Case(partial(exploding, gain), mean_loss, ok, ROUNDING * (ok is None), (),
                            (normal(33, 32), labels(33)), pieces=11) for gain, ok in ((4, None), (1, True))},
    "kinks": Case(on_kinks, mean_loss, True, [], (), (KINKS, ROWS[1])),
    **{f"{reduction} of a gradient of 0": Case(
        shifted, shift_loss(reduction), not wrong, wrong, (), (normal(7, 32) * 3, labels(7)), pieces=7)
       for reduction, wrong in (("mean", []), ("sum", NOT_A_MEAN))},
    "gradients that are too small for 16 bits": Case(
        lambda: amp_at(around(nn.Tanh()), "to_float"), small_loss, True, [], COPY),
    **{f"weights off by {off} in {level}": Case(
        lambda level=level: amp_at(MLP(), level), mean_loss, not wrong, wrong, ("let weight_fn return",) * len(wrong),
        (normal(32, 6), labels(32)), off_by(off), 8)
       for level, off, wrong in (("float32", 1e-4, NOT_A_MEAN), ("to_float", 1e-3, NOT_A_MEAN), ("to_float", 0.0, []))},
    # The loss of a piece without tokens is NaN, and its gradient is 0, or not with another mean beside it.
    "no token in a piece": Case(MLP, token_mean, False, [("tokens", "function", WRONG)], (), (ROWS[0], WITHOUT_TOKENS)),
    "no token, and weights": Case(
        MLP, token_mean, True, [], (), (ROWS[0], WITHOUT_TOKENS), lambda x, y: (y != -100).sum()),
    # A sum, and what is none.
    "a sum that is said to be one": Case(MLP, sum_loss, True, [], options=SUM),
    "a mean that is said to be a sum": Case(MLP, mean_loss, False, NOT_A_MEAN, ("expected a sum", "return the sum"),
                                            options=SUM),
    "a sum over no token": Case(MLP, partial(token_mean, reduction="sum"), True, [], (), (ROWS[0], WITHOUT_TOKENS),
                                lambda x, y: (y != -100).sum(), options=SUM),
    # With a loss scaler, what a bprop adds vanishes.
    **{f"{added} added by a bprop, {'with' if options else 'without'} a scaler": Case(
        lambda added=added: around(layers.Adds(added)), mean_loss, not found, found,
        ("accumulator.scaled",) * len(found), options=options)
       for added, options, found in (
           (0.01, SCALED, [("1", "Adds", "nonlinear backward pass")]), (0.01, {}, []), (0.0, SCALED, []))},
    # A sum over the samples, where a mean is expected.
    "a sum added by a bprop": Case(lambda: around(layers.Adds(0.01, mean=False)), mean_loss, False, [
        ("1", "Adds", "nonlinear backward pass")], ("because a bprop adds it", "add its loss to the one")),
    "no token, and another mean": Case(
        MLP, tokens_and_squares, False, [("added", "function", "no weighted mean")], ("Two losses",),
        (ROWS[0], WITHOUT_TOKENS)),
}


@pytest.mark.parametrize("name", CASES)
def test_verdict_and_causes(name):
    case = CASES[name]
    network = case.build()
    flags = [cell.training for _, cell in network.cells_and_names()]
    report = check_equivalence(case.loss(network), network, case.batch, case.pieces, weight_fn=case.weight_fn,
                               **(case.options or {}))
    found = [cause for cause in causes(report) if name != "attention" or cause[1] != "Dropout"]
    assert (report.ok, found) == (case.ok, case.causes), str(report)
    assert str(report).startswith(VERDICTS[case.ok])
    assert all(text in str(report) for text in case.said)
    assert case.ok is None or report.notes or (report.max_relative_difference < 1e-5) == case.ok
    assert [cell.training for _, cell in network.cells_and_names()] == flags


# --- the weights of the pieces ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("axis", [0, 1])
def test_a_shifted_loss_needs_the_shifted_weights(axis):
    """`(labels != -100).sum()`, which everybody writes, is wrong where the model shifts the labels.

    A named batch leaves out an optional argument in between, and time may come first.
    """
    rng, network = np.random.default_rng(0), nn.Dense(6, 20)
    counted = rng.random((12, 9)) < np.repeat([0.2, 0.5, 0.7, 0.9], 3)[:, None]
    target = np.where(counted, rng.integers(1, 20, (12, 9)), -100)
    target[:3, 0], target[3:, 0] = 3, -100
    batch = {"x": Tensor(np.swapaxes(rng.normal(size=(12, 9, 6)), 0, axis), ms.float32),
             "labels": Tensor(np.swapaxes(target, 0, axis), ms.int32)}

    def shifted(x, mask=None, labels=None):
        logits, targets = (network(x)[:, :-1], labels[:, 1:]) if axis == 0 else (network(x)[:-1], labels[1:])
        return ops.cross_entropy(logits.reshape(-1, 20), targets.reshape(-1), ignore_index=-100)

    def right(labels):
        return ((labels[:, 1:] if axis == 0 else labels[1:]) != -100).sum()

    for weight_fn in (None, lambda labels: (labels != -100).sum()):
        report = check_equivalence(shifted, network, batch, 4, batch_axis=axis, weight_fn=weight_fn)
        assert (report.ok, causes(report)) == (False, [("shifted", "function", WRONG)])
        assert "(labels[:, 1:] != -100).sum() if the model shifts the labels" in report.causes[0].remedy
        assert ("give weight_fn=, a function of a piece" in report.causes[0].remedy) == (weight_fn is None)
    assert check_equivalence(shifted, network, batch, 4, batch_axis=axis, weight_fn=right).ok


@pytest.mark.parametrize(("level", "activation", "hidden", "counts", "said"), [
    ("float32", nn.Tanh, 1, [8, 4, 3, 1], "weights 0.5, 0.25, 0.1875, 0.0625, but accumulation used 0.25, 0.25"),
    ("float32", nn.Tanh, 1, [8, 0, 5, 3], "is finite, but not that of each piece; a mean over no unmasked token is"),
    ("O3", nn.ReLU, 6, [48, 46, 46, 45], "the pieces have the weights 0.2595"),
    ("O3", nn.Tanh, 5, [15, 14, 13, 13], "the pieces have the weights 0.2727")])
def test_a_mean_over_a_mask_needs_its_weights(level, activation, hidden, counts, said):
    """Also where a piece has no token, and its gradient is NaN.

    16 bits would be off by 1e-2 to 3e-2, where rounding explains 5e-2: the check takes a float32 copy.
    """
    stack = [layer for _ in range(hidden - 1) for layer in (nn.Dense(64, 64), activation())]
    network = nn.SequentialCell(nn.Dense(16, 64), activation(), *stack, nn.Dense(64, 8))
    for seed, p in enumerate(network.trainable_params()):
        p.set_data(normal(*p.shape, seed=seed) / np.sqrt(3 * p.shape[-1]))
    network = amp_at(network, level)

    def masked(x, target, mask):
        return (((network(x) - target) ** 2).mean(-1) * mask).sum() / mask.sum()
    mask = (np.arange(max(counts)) < np.array(counts)[:, None]).reshape(-1)
    batch = normal(mask.size, 16), normal(mask.size, 8, seed=1), Tensor(mask, ms.float32)
    report = check_equivalence(masked, network, batch, 4)
    assert (report.ok, causes(report)) == (False, [("masked", "function", WRONG)])
    assert (report.max_relative_difference == float("inf")) == (0 in counts)
    assert said in report.causes[0].what
    assert "weight_fn=" in report.causes[0].remedy
    report = check_equivalence(masked, network, batch, 4, weight_fn=lambda x, target, mask: mask.sum())
    assert (report.ok, report.notes) == (True, COPY if level == "O3" else ())
    assert report.max_relative_difference < 1e-5


def test_a_random_loss_may_be_equal_twice_by_chance():
    """In the two evaluations that are compared first. Control: a loss that does not change."""
    for values, found in (((1.0,) * 5 + (1.5, 1.2), [("lucky", "function", "random")]), ((1.0,), [])):
        network, drawn = MLP(), iter(values)

        def lucky(x, y, network=network, drawn=drawn):  # the batch and two pieces are run before
            return ops.cross_entropy(network(x), y) * next(drawn, 1.0)

        report = check_equivalence(lucky, network, ROWS, 4)
        assert (report.ok, causes(report)) == (None if found else True, found)


def test_a_sum_of_two_means_asks_for_factors():
    """Boxes per target, and objectness per cell: with a factor on each sum, as on the page, it is exact."""
    network = MLP(classes=4)
    batch = normal(16, 6), normal(16, 3), Tensor(np.arange(16) % 5 < np.repeat([1, 4, 2, 3], 4), ms.float32)

    def sums(x, boxes, targets):
        out = network(x)
        box = (((out[:, :3] - boxes) ** 2).mean(-1) * targets).sum()
        return box, (ops.softplus(out[:, 3]) - out[:, 3] * targets).sum()

    def added(x, boxes, targets):
        box, cell = sums(x, boxes, targets)
        return box / targets.sum() + cell / len(x)

    def with_factor(x, boxes, targets, factor):
        box, cell = sums(x, boxes, targets)
        return factor * box + cell, x.shape[0]

    report = check_equivalence(added, network, batch, 4)
    assert (report.ok, causes(report)) == (False, [("added", "function", "no weighted mean")])
    assert 'give each mean a factor, as under "Two losses"' in report.causes[0].remedy
    factor = Tensor(16 / float(batch[2].sum()), ms.float32)
    assert check_equivalence(with_factor, network, (*batch, factor), 4, has_weight=True, loss_reduction="sum").ok


# --- how it computes, and what it refuses -----------------------------------------------------------------------------


@pytest.mark.parametrize(("wrong", "asked"), [("places", True), ("length", True), ("labels", False)])
def test_an_error_in_a_piece_alone_asks_for_row_numbers(wrong, asked):
    """Rows picked by their place in the batch, a loss built for 24 rows; and an error of the whole batch, too."""
    network, target = MLP(), Tensor(np.arange(24) % 3 + (wrong == "labels"), ms.int32)

    def forward_fn(x, places):
        if wrong == "places":
            return ops.gather_elements(network(x).mean(1), 0, places).mean()
        return ops.cross_entropy(network(x), target if wrong == "length" else target[:len(x)])
    with pytest.raises((RuntimeError, ValueError)) as raised:
        check_equivalence(forward_fn, network, (ROWS[0], Tensor(np.arange(24), ms.int32)), 4)
    question = r"on piece [14] of 4 and runs on the whole batch: does it use row numbers or the batch's length\?$"
    assert len(re.findall(question, str(raised.value))) == asked


def stranger(x, y):
    return (x * x).mean()


GOOD = {"forward_fn": stranger, "network": MLP(), "batch": (normal(8, 6), labels(8)), "pieces": 2}


@pytest.mark.parametrize(("wrong", "error", "message"), [
    ({"forward_fn": 3}, TypeError, "forward_fn is of type int, expected a function of the batch"),
    ({"weight_fn": 3}, TypeError, "weight_fn is of type int, expected a function of the batch"),
    ({"network": stranger}, TypeError, "network is of type function, expected a mindspore.nn.Cell"),
    ({"network": nn.BatchNorm1d(6, affine=False)}, ValueError, "network has no trainable parameters"),
    ({"batch": normal(8, 6)}, TypeError, "batch is of type Tensor, expected a tuple"),
    ({"batch": (normal(1, 6), labels(1))}, ValueError, "the batch has 1 sample, expected at least 2"),
    ({"pieces": 1}, ValueError, "pieces is 1, expected an int >= 2; give the number of pieces"),
    ({"weight_fn": lambda x, y: 0}, ValueError, "weight_fn gave the pieces the weights"),
    ({"weight_fn": lambda x, y: -1}, ValueError, "weight is -1, expected a finite number >= 0"),
    ({}, ValueError, "the gradient is 0 in all parameters of network"),
    ({"forward_fn": lambda x, y: x}, ValueError, r"forward_fn returned a loss of shape \(8, 6\), expected shape \(\)"),
    ({"forward_fn": lambda x, y: (x.mean(), x)}, TypeError, "forward_fn returned 2 values, expected the loss alone"),
    ({"forward_fn": lambda x, y: 1.0}, TypeError, "forward_fn returned a value of type float, expected the loss alone"),
    ({"forward_fn": lambda x: x}, TypeError, "positional argument"),
])
def test_bad_arguments_are_refused(wrong, error, message):
    with pytest.raises(error, match=message):
        check_equivalence(**{**GOOD, **wrong})
    assert "MS_JIT" not in os.environ


def test_a_weight_that_forward_fn_returns_and_declared_lengths_are_known():
    """Of means and of sums. Control: the number of samples in place of the tokens."""
    network = drawn(MLP())
    x, y = normal(24, 6), Tensor(np.where(np.arange(24) % 5 < 2, -100, np.arange(24) % 3), ms.int32)

    def returning(reduction, count):
        @ms.enable_dynamic(x=Tensor(shape=[None, 6], dtype=ms.float32), y=Tensor(shape=[None], dtype=ms.int32))
        def forward_fn(x, y):
            return ops.cross_entropy(network(x), y, ignore_index=-100, reduction=reduction), count(y)
        return forward_fn

    def check(reduction, count):
        report = check_equivalence(returning(reduction, count), network, (x, y), has_weight=True,
                                   loss_reduction=reduction)
        return report.ok

    def tokens(y):
        return (y != -100).sum()

    assert [check("mean", tokens), check("sum", tokens)] == [True, True]
    assert check("mean", len) is False
    with pytest.raises(ValueError, match="expected one of them"):
        check_equivalence(returning("mean", tokens), network, (x, y), has_weight=True, weight_fn=lambda x, y: 1.0)
    with pytest.raises(TypeError, match=r"expected .loss, weight. because of has_weight=True"):
        check_equivalence(lambda x, y: ops.cross_entropy(network(x), y), network, (x, y), has_weight=True)
