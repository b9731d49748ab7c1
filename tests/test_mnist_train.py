"""The reference run: network, order, windows, losses, accuracy; accumulated against undivided; graph against PyNative."""
import os
import shutil
from dataclasses import replace
from functools import partial

import mindspore as ms
import numpy as np
import pytest
from conftest import compiled_graphs
from mindspore import Tensor, nn

from ms_accum import Accumulator
from ms_accum.mnist import data, step, train
from ms_accum.mnist.data import Digits, Mnist
from ms_accum.mnist.network import Network, largest_difference
from ms_accum.mnist.settings import Settings

# 90 digits in microbatches of 16: five full ones and a ragged one of 10; with windows of 4, a short one of 2.
# Op by op where a test is not about graphs: each graph takes seconds to compile.
FEW = Settings(batch_size=16, accumulate_step=4, epochs=1, mode="pynative")


@pytest.fixture(scope="module")
def mnist():
    embedded = data.load("embedded")
    return Mnist(first(embedded.train, 90), first(embedded.test, 50))


def first(digits, count):
    return Digits(digits.images[:count], digits.labels[:count])


def trained(mnist, settings, seed=42):
    network = Network(seed)
    return network, list(train.train(mnist, network, settings))


def logits_in_numpy(network, images):
    """What the tutorial computes, in float64."""
    # By their order: another test's accumulator that still lives may have had its names.
    weights = [p.asnumpy().astype(np.float64) for p in network.get_parameters()]
    x = (images.reshape(len(images), 784) / 255 - 0.1307) / 0.3081
    for layer in range(3):
        x = x @ weights[2 * layer].T + weights[2 * layer + 1]
        if layer < 2:
            x = np.maximum(x, 0)
    return x


def losses_in_numpy(network, digits):
    logits = logits_in_numpy(network, digits.images)
    return np.log(np.exp(logits).sum(axis=1)) - logits[np.arange(len(digits)), digits.labels]


# --- network --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [ms.float32, ms.float64])
@pytest.mark.parametrize("mode", ["graph", "pynative"])
def test_the_network_is_that_of_the_tutorial(mnist, mode, dtype):
    network = Network(seed=3, dtype=dtype)
    forward = ms.jit(network) if mode == "graph" else network
    got = forward(Tensor(mnist.train.images))
    assert got.dtype == ms.float32
    assert np.abs(got.asnumpy() - logits_in_numpy(network, mnist.train.images)).max() < 2e-6
    assert {p.name: p.shape for p in network.get_parameters()} == {
        "dense_relu_sequential.0.weight": (512, 784), "dense_relu_sequential.0.bias": (512,),
        "dense_relu_sequential.2.weight": (512, 512), "dense_relu_sequential.2.bias": (512,),
        "dense_relu_sequential.4.weight": (10, 512), "dense_relu_sequential.4.bias": (10,)}


def test_the_seed_decides_the_initial_weights():
    assert largest_difference(Network(1), Network(1)) == 0
    assert largest_difference(Network(1), Network(2)) > 0.01
    for parameter in Network(1).get_parameters():
        inputs = 784 if ".0." in parameter.name else 512
        bound = inputs ** -0.5
        values = parameter.asnumpy()
        assert np.abs(values).max() <= bound
        assert abs(values.mean()) < 0.15 * bound * (10 / values.size ** 0.5 if values.size < 1000 else 1)
        assert values.std() == pytest.approx(bound / 3 ** 0.5, rel=0.5 if values.size < 100 else 0.1)


def test_largest_difference_is_of_any_parameter_and_absolute():
    one, other = Network(1), Network(1)
    bias = other.dense_relu_sequential[4].bias
    bias.set_data(Tensor(bias.asnumpy() - np.eye(10, dtype=np.float32)[3] * 0.5))
    assert largest_difference(one, other) == pytest.approx(0.5)
    assert largest_difference(other, one) == pytest.approx(0.5)
    bias.set_data(Tensor(np.full(10, np.nan, np.float32)))
    assert np.isnan(largest_difference(one, other))


# --- one epoch ------------------------------------------------------------------------------------------------------


class Recorder:
    """Stands for the train step: notes what it is given."""

    def __init__(self):
        self.rows, self.events = [], []

    def __call__(self, images, labels):
        assert images.dtype == ms.uint8
        assert labels.dtype == ms.int32
        assert (images.asnumpy()[:, 0, 0] == labels.asnumpy()).all()
        self.rows.append(labels.asnumpy().tolist())
        self.events.append("microbatch")
        return Tensor(float(len(self.rows)), ms.float32)

    def flush(self):
        self.events.append("flush")


def numbered(count):
    """Digits whose label and first pixel are their number."""
    numbers = np.arange(count)
    images = np.zeros((count, 28, 28), np.uint8)
    images[:, 0, 0] = numbers
    return Digits(images, numbers.astype(np.int32))


def test_an_epoch_takes_every_row_once_and_flushes_at_the_end():
    recorder, progress = Recorder(), []
    order = np.random.default_rng(0).permutation(90)
    losses = []
    train.train_epoch(
        recorder, numbered(90), train.cut(order, 16), lambda done, loss: progress.append((done, float(loss))), losses)
    assert [row for rows in recorder.rows for row in rows] == order.tolist()
    assert [len(rows) for rows in recorder.rows] == [16] * 5 + [10]
    assert recorder.events == ["microbatch"] * 6 + ["flush"]
    assert losses == [1, 2, 3, 4, 5, 6]
    assert progress == [(16, 1), (32, 2), (48, 3), (64, 4), (80, 5), (90, 6)]


def test_an_epoch_goes_on_where_it_stopped_and_saves_on_the_way():
    recorder, progress, losses, saved = Recorder(), [], [7.0, 7.0], []
    train.train_epoch(recorder, numbered(90), train.cut(np.arange(90), 16), lambda done, loss: progress.append(done), losses,
                      range(3, 7, 2), lambda: saved.append(list(losses)))
    assert [row for rows in recorder.rows for row in rows] == list(range(32, 90))
    assert losses == [7, 7, 1, 2, 3, 4]
    assert saved == [[7, 7, 1], [7, 7, 1, 2, 3]]
    assert progress == [48, 64, 80, 90]


@pytest.mark.parametrize(("count", "size", "sizes"), [(7, 3, [3, 3, 1]), (6, 3, [3, 3]), (2, 5, [2]), (1, 1, [1])])
def test_cut(count, size, sizes):
    pieces = train.cut(np.arange(count), size)
    assert [len(piece) for piece in pieces] == sizes
    assert np.concatenate(pieces).tolist() == list(range(count))


def test_each_epoch_has_its_seeded_order(mnist, monkeypatch):
    orders = []
    monkeypatch.setattr(train, "train_epoch", lambda step, digits, microbatches, call, losses, *_: (
        orders.append(np.concatenate(microbatches).tolist()), losses.extend([0.0] * len(microbatches))))
    for settings in (replace(FEW, epochs=2), replace(FEW, epochs=2).undivided(), replace(FEW, epochs=2, seed=7)):
        list(train.train(mnist, Network(0), settings))
    assert all(sorted(order) == list(range(90)) for order in orders)
    assert orders[0] == orders[2]
    assert orders[1] == orders[3]
    assert len({tuple(order) for order in orders}) == 4


# --- windows and losses ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("batch_size", "accumulate_step", "updates"), [(16, 4, 2), (16, 2, 3), (30, 2, 2), (90, 3, 1), (16, 50, 1)])
def test_the_last_window_of_each_epoch_is_flushed(mnist, batch_size, accumulate_step, updates):
    settings = replace(FEW, batch_size=batch_size, accumulate_step=accumulate_step, epochs=2)
    network, epochs = trained(mnist, settings)
    assert [epoch.update_step for epoch in epochs] == [updates, 2 * updates]
    assert largest_difference(network, Network(42)) > 1e-4


@pytest.mark.parametrize("settings", [
    FEW, FEW.undivided(), replace(FEW, mode="graph"), replace(FEW, gradients="float64")], ids=["few", "undivided", "graph", "float64"])
def test_the_loss_is_the_mean_over_digits(mnist, settings):
    # At this rate no parameter moves: the loss of every digit is that of the initial network, in ragged microbatches too.
    network, (epoch,) = trained(mnist, replace(settings, lr=1e-30))
    assert largest_difference(network, Network(42)) == 0
    losses = losses_in_numpy(network, mnist.train)
    assert epoch.loss == pytest.approx(losses.mean(), abs=2e-6)
    order = np.random.default_rng([42, 1]).permutation(90)
    expected = [losses[rows].mean() for rows in train.cut(order, settings.batch_size)]
    assert np.abs(epoch.microbatch_losses - expected).max() < 2e-6
    # Control: neither the mean of the microbatches' means nor what the tutorial logs passes for it.
    assert abs(np.mean(expected) - losses.mean()) > 1e-5 or settings == FEW.undivided()


def test_accuracy_counts_every_digit_once(mnist, monkeypatch):
    monkeypatch.setattr(train, "TEST_BATCH", 7)
    network = Network(5)
    labels = logits_in_numpy(network, mnist.test.images).argmax(axis=1).astype(np.int32)
    wrong = 13
    labels[:wrong] = (labels[:wrong] + 1) % 10
    for count_correct in (step.CountCorrect(network), ms.jit(step.CountCorrect(network))):
        assert train.evaluate(count_correct, Digits(mnist.test.images, labels), FEW) == 100 * (50 - wrong) / 50


def test_epochs_report_times_and_learn(mnist):
    embedded = data.load("embedded")
    settings = Settings(epochs=2, optimizer="momentum")
    _, epochs = trained(Mnist(first(embedded.train, 2000), first(embedded.test, 500)), settings)
    assert [epoch.epoch for epoch in epochs] == [1, 2]
    assert all(epoch.train_seconds > 0 and epoch.test_seconds > 0 for epoch in epochs)
    assert epochs[1].loss < epochs[0].loss
    assert epochs[1].accuracy > 80


def test_the_same_settings_give_the_same_numbers(mnist):
    one, (first_epoch,) = trained(mnist, FEW)
    other, (second_epoch,) = trained(mnist, FEW)
    assert largest_difference(one, other) == 0
    assert first_epoch.loss == second_epoch.loss


# --- accumulated = undivided ----------------------------------------------------------------------------------------


# In graph mode and float64: test_compare_agrees_with_the_undivided_batch, and with -m slow here, too.
@pytest.mark.parametrize(("mode", "gradients", "bound"), [
    ("graph", "float32", 1e-6), ("pynative", "float32", 1e-6), ("pynative", "float64", 1e-8),
    pytest.param("graph", "float64", 1e-8, marks=pytest.mark.slow)])
def test_accumulated_is_undivided(mnist, gradients, bound, mode):
    settings = replace(FEW, epochs=2, lr=0.1, mode=mode, gradients=gradients)
    accumulated, epochs = trained(mnist, settings)
    undivided, epochs_of_one = trained(mnist, settings.undivided())
    assert epochs[-1].update_step == epochs_of_one[-1].update_step == 4
    assert largest_difference(accumulated, undivided) <= bound
    assert largest_difference(accumulated, Network(42)) > 0.01
    assert [epoch.accuracy for epoch in epochs] == [epoch.accuracy for epoch in epochs_of_one]


@pytest.mark.parametrize("optimizer", ["momentum", "adam"])
def test_accumulated_is_undivided_with_momentum_adam_and_clipping(mnist, optimizer):
    settings = replace(FEW, optimizer=optimizer, clip_norm=0.5, gradients="float64")
    accumulated, _ = trained(mnist, settings)
    undivided, _ = trained(mnist, settings.undivided())
    assert largest_difference(accumulated, undivided) <= 1e-6
    unclipped, _ = trained(mnist, replace(settings, clip_norm=None))
    assert largest_difference(accumulated, unclipped) > 1e-4


def all_equal(images, labels):
    """The weight of a microbatch, however few digits are in it."""
    return 1.0


@pytest.mark.parametrize("mistake", ["weight", "divisor", "no flush"])
def test_a_mistake_shows_in_the_comparison(mnist, monkeypatch, mistake):
    settings = replace(FEW, lr=0.1)
    right, _ = trained(mnist, settings.undivided())
    if mistake == "weight":
        monkeypatch.setattr(train, "make_train_step", partial(train.make_train_step, weight_fn=all_equal))
    elif mistake == "divisor":
        monkeypatch.setattr(Accumulator, "_normaliser", lambda self, unit, weight: 1.0)
    else:
        monkeypatch.setattr(Accumulator, "flush", lambda self: Tensor(False))
    wrong, _ = trained(mnist, settings)
    assert largest_difference(wrong, right) > 1e-4


# --- optimizers and modes -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("optimizer", "momentum", "kind", "expected"), [
    ("sgd", None, nn.SGD, 0.0),
    ("sgd", 0.5, nn.SGD, 0.5),
    ("momentum", None, nn.Momentum, 0.9),
    ("momentum", 0.5, nn.Momentum, 0.5),
    ("adam", None, nn.Adam, None),
])
def test_optimizers(optimizer, momentum, kind, expected):
    made = train.make_optimizer(Network(0), Settings(optimizer=optimizer, momentum=momentum, lr=0.25))
    assert type(made) is kind
    assert float(made.get_lr().asnumpy()) == 0.25
    if expected is not None:
        assert float(made.momentum.asnumpy()) == pytest.approx(expected)


@pytest.mark.parametrize("optimizer", ["sgd", pytest.param("adam", marks=pytest.mark.slow)])
def test_graph_and_pynative_give_the_same_numbers(mnist, optimizer):
    settings = replace(FEW, optimizer=optimizer, epochs=2)
    graph, in_graph = trained(mnist, replace(settings, mode="graph"))
    pynative, in_pynative = trained(mnist, settings)
    assert largest_difference(graph, Network(42)) > 1e-4
    # Adam divides a gradient near 0 by its own size: rounding of a tiny gradient turns into a part of the rate.
    assert largest_difference(graph, pynative) <= (1e-6 if optimizer == "sgd" else 1e-3)
    for one, other in zip(in_graph, in_pynative, strict=True):
        assert one.loss == pytest.approx(other.loss, abs=1e-5)
        assert one.accuracy == other.accuracy
        assert one.update_step == other.update_step


def test_graph_mode_compiles_and_pynative_does_not(mnist, monkeypatch):
    monkeypatch.delenv("MS_JIT", raising=False)
    before = compiled_graphs()
    trained(mnist, FEW)
    assert compiled_graphs() == before
    assert "MS_JIT" not in os.environ
    trained(mnist, replace(FEW, mode="graph"))
    assert compiled_graphs() > before


@pytest.mark.parametrize(("mode", "strategy", "micro_size"), [
    *(("pynative", *way) for way in (("split", 1), ("fused", 3), ("split", 3))), ("graph", "split", 3),
    *(pytest.param("graph", *way, marks=pytest.mark.slow) for way in (("split", 1), ("fused", 3)))])
def test_strategies_and_pieces_give_the_same_numbers(mnist, mode, strategy, micro_size):
    plain, (expected,) = trained(mnist, FEW)
    network, (epoch,) = trained(mnist, replace(FEW, mode=mode, strategy=strategy, micro_size=micro_size))
    assert largest_difference(plain, Network(42)) > 1e-4
    assert largest_difference(network, plain) <= 1e-6
    assert epoch.loss == pytest.approx(expected.loss, abs=1e-5)
    assert epoch.update_step == expected.update_step


@pytest.mark.parametrize(("mode", "micro_size"), [("graph", 1), ("pynative", 1), ("pynative", 3)])
def test_a_model_gives_the_same_parameters_as_the_loop(mnist, mode, micro_size):
    """To the bit, with the same losses; after a window of another length they would part."""
    settings = replace(FEW, epochs=2, mode=mode, micro_size=micro_size)
    loop, expected = trained(mnist, settings)
    network, epochs = trained(mnist, replace(settings, api="model"))
    assert largest_difference(network, loop) == 0
    assert [e.microbatch_losses.tolist() for e in epochs] == [e.microbatch_losses.tolist() for e in expected]
    assert [e.update_step for e in epochs] == [2, 4]
    assert ms.get_context("mode") == ms.PYNATIVE_MODE
    if mode == "pynative":
        other, _ = trained(mnist, replace(settings, api="model", accumulate_step=3))
        assert largest_difference(other, loop) > 1e-4


@pytest.mark.parametrize("saved_at", [2, 6])
def test_a_model_resumes_where_it_was_saved(mnist, tmp_path, saved_at):
    """In mid-window, and after an epoch's last microbatch, before its flush."""
    settings = replace(FEW, api="model")
    whole, (expected,) = trained(mnist, settings)
    path, copy = tmp_path / "run.ckpt", tmp_path / "copy.ckpt"

    def on_microbatch(epoch, done, loss):
        if path.exists() and not copy.exists():
            shutil.copy(path, copy)  # the first one, whatever is saved later

    for _ in train.train(mnist, Network(42), settings, on_microbatch, train.Checkpoints(path, saved_at)):
        if not copy.exists():
            shutil.copy(path, copy)
    resumed = []
    network = Network(1)
    (epoch,) = train.train(mnist, network, settings, checkpoints=train.Checkpoints(resume=copy, resumed=lambda *done: resumed.append(done)))
    assert resumed == [(0, saved_at)]
    assert largest_difference(network, whole) == 0
    assert epoch.microbatch_losses.tolist() == expected.microbatch_losses.tolist()


def test_settings():
    settings = Settings(batch_size=48, accumulate_step=3, lr=0.5)
    assert settings.effective_batch == 144
    assert settings.undivided() == Settings(batch_size=144, accumulate_step=1, lr=0.5)
