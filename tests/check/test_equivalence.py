"""check_equivalence: its verdict is that of a training; it names what is not exact, and what it cannot tell."""
import os

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, amp, nn, ops
from support import layers
from support.cells import Clip, Counting
from support.layers import amp_at, around, attention, causes, cnn, info_nce, labels, noisy_loss, normal, sum_loss

from ms_accum import check_equivalence, make_train_step
from ms_accum.check.isolation import Layers
from ms_accum.selftest.comparing import difference, values
from ms_accum.selftest.networks import MLP, mean_loss

STATISTICS, WRONG, COUPLES = "batch statistics", "wrong normalisation", "couples samples"
STATE, NONLINEAR, NO_MEAN = "moves state in its forward pass", "nonlinear backward pass", "no weighted mean"
VERDICTS = {True: "Accumulation is exact for", False: "Accumulation is NOT exact for",
            None: "Cannot tell whether accumulation is"}
ROWS = normal(24, 6), labels(24)
WITHOUT_TOKENS = ROWS[0], Tensor(np.where(np.arange(24) < 7, -100, labels(24).asnumpy()), ms.int32)  # in a piece


def off(build, loss, batch, pieces, **options):
    """How far a training in pieces ends from plain MindSpore's on the undivided batch, relative to its motion."""
    ends, rate = [], 0.5
    for cut in (False, True):
        network = build()
        start, optimizer = values(network.trainable_params()), nn.SGD(network.trainable_params(), rate)
        forward_fn = loss(network)
        if cut:
            make_train_step(forward_fn, optimizer, 1, pieces=pieces, eager=True, network=network, **options)(*batch)
        else:
            weight_fn = options.get("weight_fn", lambda *batch: len(batch[0]))

            def undivided(*batch, forward_fn=forward_fn, weight_fn=weight_fn):
                result = forward_fn(*batch)
                loss, weight = result if options.get("has_weight") else (result, weight_fn(*batch))
                return loss / weight if "loss_reduction" in options else loss
            optimizer(ms.grad(undivided, None, optimizer.parameters)(*batch))
        ends.append([(p - old) / rate for p, old in zip(values(network.trainable_params()), start)])
    return difference(*ends)


def checked(build, loss, batch=ROWS, pieces=4, **options):
    """The report of a network that is drawn anew, which has to say what a training does."""
    network = build()
    report = check_equivalence(loss(network), network, batch, pieces, **options)
    moved = off(build, loss, batch, pieces, **options)
    assert report.ok == (moved < 1e-5), (moved, str(report))
    assert str(report).startswith(VERDICTS[report.ok])
    assert (report.max_relative_difference < 1e-5) == report.ok
    return report


# --- state ------------------------------------------------------------------------------------------------------------

STATES = (layers.SpectralNorm, layers.ScaleBefore, layers.RunningMaximum, layers.Counter, layers.PythonCounter,
          layers.Queue, layers.Depending, layers.Unused)


def with_state(seed):
    """What builds a network of random layers with state, some of them frozen; a batch, one row of it loud; pieces."""
    rng = np.random.default_rng(seed)
    kinds = [(STATES[i], bool(rng.random() < 0.4)) for i in rng.integers(0, len(STATES), rng.integers(1, 4))]
    n = int(rng.integers(4, 20))
    x = normal(n, 6, seed=seed) * Tensor(np.where(np.arange(n) == rng.integers(n), 6.0, 1.0)[:, None], ms.float32)
    return lambda: around(*[kind(frozen=frozen) for kind, frozen in kinds]), (x, labels(n)), int(rng.integers(2, 6))


@pytest.mark.parametrize("seeds", [range(10), pytest.param(range(10, 100), marks=pytest.mark.slow)])
def test_the_verdict_for_layers_with_state_is_that_of_a_training(seeds, monkeypatch):
    """Control: state that is not put back between the runs that are compared."""
    def reports():
        for seed in seeds:
            build, batch, pieces = with_state(seed)
            yield checked(build, mean_loss, batch, pieces)

    found = [(report.ok, {what for _, _, what in causes(report)}) for report in reports()]
    assert all(what == (set() if ok else {STATE}) for ok, what in found), found
    assert {ok for ok, _ in found} == {True, False}
    monkeypatch.setattr(Layers, "restore", lambda self, as_found=False: None)
    with pytest.raises(AssertionError, match="ccumulation is"):
        list(reports())


# --- layers and losses ------------------------------------------------------------------------------------------------


def token_mean(network):
    def tokens(x, y):
        return ops.cross_entropy(network(x), y, ignore_index=-100)
    return tokens


def token_sum(network):
    def tokens(x, y):
        return ops.cross_entropy(network(x), y, ignore_index=-100, reduction="sum")
    return tokens


def returning(network):
    def returned(x, y):
        return token_mean(network)(x, y), count(x, y)
    return returned


def tokens_and_squares(network):
    def added(x, y):
        return token_mean(network)(x, y) + ops.square(network(x)).mean()
    return added


def detector_sum(network):
    def objects(x, y):
        return ops.square(network(x)).sum() + token_sum(network)(x, y)
    return objects


def detector_mean(network):
    def objects(x, y):
        return detector_sum(network)(x, y) / ops.maximum(count(x, y), 1)
    return objects


def count(x, y):
    return (y != -100).sum()


SUM, COUNTED = {"loss_reduction": "sum"}, {"weight_fn": count}
LAYERS = {  # what is wrong with each; the type that is named
    "Tanh": (nn.Tanh, None), "LayerNorm": (lambda: nn.LayerNorm((16,)), None),
    "BatchNorm1d": (lambda: nn.BatchNorm1d(16), STATISTICS), "Centred": (layers.Centred, COUPLES),
    "Clip": (lambda: Clip(0.02), NONLINEAR), "Counter": (layers.Counter, STATE)}
LOSSES = {  # forward_fn, options, what is wrong, what the report says, batch
    "a mean": (mean_loss, {}, None, "", ROWS), "a sum": (sum_loss, {}, WRONG, "return the mean over the samples", ROWS),
    "a sum that is said to be one": (sum_loss, SUM, None, "", ROWS),
    "a mean that is said to be a sum": (mean_loss, SUM, WRONG, "expected a sum", ROWS),
    "tokens": (token_mean, {}, WRONG, "let weight_fn= return", WITHOUT_TOKENS),
    "weighed tokens": (token_mean, COUNTED, None, "", WITHOUT_TOKENS),
    "returned tokens": (returning, {"has_weight": True}, None, "", WITHOUT_TOKENS),
    "a sum over tokens": (token_sum, {**SUM, **COUNTED}, None, "", WITHOUT_TOKENS),
    "objects and background": (detector_sum, {**SUM, **COUNTED}, None, "", WITHOUT_TOKENS),
    "a background without objects": (detector_mean, COUNTED, WRONG, "min_weight", WITHOUT_TOKENS),
    "two means": (tokens_and_squares, {}, NO_MEAN, "Several losses", WITHOUT_TOKENS),
    "two views": (info_nce, {}, NO_MEAN, "make_grad_cache_step", (normal(24, 6).abs(), normal(24, 6, seed=1).abs()))}


@pytest.mark.parametrize(("layer", "loss"), [
    *((layer, "a mean") for layer in LAYERS), *(("Tanh", loss) for loss in list(LOSSES)[1:]),
    ("BatchNorm1d", "a sum"), ("Counter", "a sum")])
def test_what_is_wrong_is_named(layer, loss):
    """And no more: each is the control of the others."""
    (build, wrong_layer), (made, options, wrong_loss, said, batch) = LAYERS[layer], LOSSES[loss]
    report = checked(lambda: around(build()), made, batch, **options)
    name = made(None).__name__
    found = [("1", layer, wrong_layer)] * bool(wrong_layer) + [(name, "function", wrong_loss)] * bool(wrong_loss)
    assert causes(report) == found, str(report)
    assert said in str(report)


def test_the_differences_are_those_of_the_train_step(monkeypatch):
    """The report's figure, from the gradients that make_train_step hands to an optimizer."""
    network, images = cnn(), (normal(8, 3, 6, 6), labels(8))
    for p in network.get_parameters():
        p.set_data(Tensor(p.asnumpy() + 0.1, p.dtype))

    def gradient(pieces):
        optimizer = Counting(ms.ParameterTuple(network.trainable_params()))
        make_train_step(mean_loss(network), optimizer, 1, pieces=pieces)(*images)
        return [g.asnumpy() for g in optimizer.seen]
    report = check_equivalence(mean_loss(network), network, images, 3)
    monkeypatch.setenv("MS_JIT", "0")
    expected = [np.linalg.norm(a - g) / np.linalg.norm(g) for a, g in zip(gradient(3), gradient(1))]
    assert list(report.per_parameter.values()) == pytest.approx(expected, rel=1e-3)
    assert (report.ok, causes(report)) == (False, [("1", "BatchNorm2d", STATISTICS), ("4", "BatchNorm2d", STATISTICS)])
    assert check_equivalence(mean_loss(network), network.set_train(False), images, 4).ok


@pytest.mark.parametrize("as_cell", [False, True])
def test_a_loss_that_only_graph_mode_runs_is_compiled(as_cell):
    """`Tensor.max(1)` is a tuple op by op. Control: a sum."""
    network = MLP()

    class Peaks(nn.Cell):
        def __init__(self, reduction):
            super().__init__()
            self.network, self.reduction = network, reduction

        def construct(self, x, y):
            peaks = self.network(x).max(1).reshape(-1)
            return peaks.sum() if self.reduction == "sum" else ops.square(peaks).mean()

    for reduction, ok in (("mean", True), ("sum", False)):
        cell = Peaks(reduction)
        report = check_equivalence(cell if as_cell else cell.construct, network, ROWS, 4)
        assert (report.ok, report.compiled, "it was compiled" in str(report)) == (ok, True, True)
    with pytest.raises(AttributeError, match="no_such"):  # what fails in both is raised as it is op by op
        check_equivalence(lambda x, y: network(x).no_such, network, ROWS, 4)


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
    assert check_equivalence(shifted, network, batch, 4, batch_axis=axis, weight_fn=right).ok


def test_the_weights_that_the_batch_needs_are_told():
    """Also where the gradient of a piece is NaN. Control: with these weights."""
    for counts, said in (([8, 4, 3, 1], "weights 0.5, 0.25, 0.1875, 0.0625, but accumulation used 0.25, 0.25"),
                         ([8, 0, 5, 3], "is finite, but not that of each piece; a mean over no unmasked token is")):
        network = MLP(classes=6)
        mask = Tensor((np.arange(8) < np.array(counts)[:, None]).reshape(-1), ms.float32)

        def masked(x, mask, network=network):
            return (ops.square(network(x) - x).mean(-1) * mask).sum() / mask.sum()

        report = check_equivalence(masked, network, (normal(32, 6), mask), 4)
        assert (report.ok, causes(report)) == (False, [("masked", "function", WRONG)])
        assert said in report.causes[0].what
        assert check_equivalence(masked, network, (normal(32, 6), mask), 4, weight_fn=lambda x, mask: mask.sum()).ok


# --- what it cannot tell ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("build", "loss", "ok", "found"), [
    (lambda: around(nn.Dropout(p=0.5), nn.ReLU(), nn.Dropout(p=0.0)), mean_loss, True, [("1", "Dropout", "random")]),
    (lambda: around(nn.Dropout(p=0.5)), sum_loss, False,
     [("1", "Dropout", "random"), ("total", "function", WRONG)]),
    (lambda: around(nn.Dropout(p=0.5), nn.SequentialCell(nn.ReLU(), layers.Drop())), mean_loss, None,
     [("1", "Dropout", "random"), ("2.1", "Drop", "random")]),
    (lambda: around(nn.BatchNorm1d(16), layers.Gumbel(), nn.Tanh()), mean_loss, None, [("2", "Gumbel", "random")]),
    (MLP, noisy_loss, None, [("noisy", "function", "random")])])
def test_random_layers_of_mindspore_are_switched_off_and_others_prevent_a_verdict(build, loss, ok, found):
    network = build()
    flags = [cell.training for _, cell in network.cells_and_names()]
    report = check_equivalence(loss(network), network, ROWS, 4)
    assert (report.ok, causes(report)) == (ok, found), str(report)
    assert [cell.training for _, cell in network.cells_and_names()] == flags


def test_random_layers_behind_each_other_are_found():
    network = attention()
    report = check_equivalence(mean_loss(network), network, (normal(6, 3, 8), labels(6)), 4)
    assert report.ok
    assert {(kind, what) for _, kind, what in causes(report)} == {("MultiheadAttention", "random"),
                                                                  ("Dropout", "random")}


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


# Two equal columns in the first six rows.
KINKS = Tensor(np.where(np.arange(24)[:, None] < 6, normal(24, 1).asnumpy(), normal(24, 2, seed=1).asnumpy()))
NAN = Tensor(np.where(np.arange(24) == 3, np.nan, 1.0)[:, None] * ROWS[0].asnumpy(), ms.float32)


@pytest.mark.parametrize(("build", "x", "ok", "what"), [
    (MLP, NAN, None, "not finite"), (lambda: exploding(4), normal(24, 32), None, "rounding"),
    (lambda: exploding(1), normal(24, 32), True, None), (on_kinks, KINKS, True, None),
    (lambda: amp_at(around(nn.Tanh()), "to_float"), ROWS[0], None, "rounding"),
    (lambda: amp_at(around(nn.Tanh()), "O2"), ROWS[0], None, "rounding"),
    pytest.param(lambda: amp_at(around(nn.Tanh()), "O1"), ROWS[0], None, "rounding", marks=pytest.mark.slow),
    (lambda: amp_at(around(nn.Tanh()), "auto"), ROWS[0], None, "rounding")])
def test_what_rounding_explains_is_no_mistake_and_may_hide_one(build, x, ok, what):
    """Control: the sum, which no rounding hides."""
    network = build()
    report = check_equivalence(mean_loss(network), network, (x, ROWS[1]), 4)
    assert (report.ok, [cause.what.split(":")[0] for cause in report.causes]) == (ok, [what] * bool(what))
    if what != "not finite":
        assert check_equivalence(sum_loss(network), network, (x, ROWS[1]), 4).ok is False


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


@pytest.mark.parametrize(("off_by", "ok"), [(1e-4, False), (0.0, True)])
def test_weights_that_are_a_little_off_are_found(off_by, ok):
    """Those of the pieces that begin with the label 0."""
    def weigh(x, y):
        return x.shape[0] * (1 + off_by * (y[0] == 0).astype(ms.float32))

    assert checked(MLP, mean_loss, (normal(32, 6), labels(32)), 8, weight_fn=weigh).ok is ok


def test_with_a_loss_scaler_what_a_bprop_adds_vanishes():
    """Control: without one; and a layer that adds nothing."""
    network, scaler = around(layers.Adds(0.01)), amp.StaticLossScaler(2.0**16)
    report = check_equivalence(mean_loss(network), network, ROWS, 4, loss_scaler=scaler)
    assert (report.ok, causes(report)) == (False, [("1", "Adds", NONLINEAR)])
    assert "accumulator.scaled" in report.causes[0].remedy
    assert check_equivalence(mean_loss(network), network, ROWS, 4).ok
    network = around(layers.Adds(0.0))
    assert check_equivalence(mean_loss(network), network, ROWS, 4, loss_scaler=scaler).ok


# --- what it is given -------------------------------------------------------------------------------------------------


def stranger(x, y):
    return (x * x).mean()


GOOD = {"forward_fn": stranger, "network": MLP(), "batch": (normal(8, 6), labels(8)), "pieces": 2}


@pytest.mark.parametrize(("wrong", "error", "message"), [
    ({"forward_fn": 3}, TypeError, "forward_fn is of type int, expected a function of the batch"),
    ({"network": stranger}, TypeError, "network is of type function, expected a mindspore.nn.Cell"),
    ({"network": nn.BatchNorm1d(6, affine=False)}, ValueError, "network has no trainable parameters"),
    ({"batch": normal(8, 6)}, TypeError, "batch is of type Tensor, expected a tuple"),
    ({"batch": (normal(1, 6), labels(1))}, ValueError, "the batch has 1 sample, expected at least 2"),
    ({"pieces": 1}, ValueError, "pieces is 1, expected an int >= 2; give the number of pieces"),
    ({"weight_fn": lambda x, y: 0}, ValueError, "weight_fn gave the pieces the weights"),
    ({"weight_fn": lambda x, y: -1}, ValueError, "weight is -1, expected a finite number >= 0"),
    ({}, ValueError, "the gradient is 0 in all parameters of network"),
    ({"forward_fn": lambda x, y: (x.mean(), x)}, TypeError, "forward_fn returned 2 values, expected the loss alone"),
    ({"forward_fn": lambda x: x}, TypeError, "does not take the batch"),
])
def test_bad_arguments_are_refused(wrong, error, message):
    with pytest.raises(error, match=message):
        check_equivalence(**{**GOOD, **wrong})
    assert "MS_JIT" not in os.environ
