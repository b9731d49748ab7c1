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

from ms_accum.mnist import data
from ms_accum.mnist import train as mnist_train
from ms_accum.mnist.data import Digits, Mnist
from ms_accum.mnist.network import CountCorrect, Network
from ms_accum.mnist.settings import Settings
from ms_accum.mnist.train import Task
from ms_accum.reference import train
from ms_accum.reference.network import largest_difference
from ms_accum.step import TrainStep
from ms_accum.update import Mean

# 90 digits in microbatches of 16: five full ones and a ragged one of 10; with windows of 4, an incomplete one of 2.
# Op by op where a test is not about graphs: each graph takes seconds to compile.
FEW = Settings(batch_size=16, accumulate_step=4, epochs=1, mode="pynative")
TWO_EPOCHS = replace(FEW, epochs=2, lr=0.1)


@pytest.fixture(scope="module")
def mnist():
    embedded = data.load("embedded")
    return Mnist(first(embedded.train, 90), first(embedded.test, 50))


@pytest.fixture(scope="module")
def accumulated(mnist):
    """TWO_EPOCHS op by op: (network, epochs)."""
    return trained(mnist, TWO_EPOCHS)


@pytest.fixture(scope="module")
def undivided(mnist):
    return trained(mnist, TWO_EPOCHS.undivided())


def first(digits, count):
    return Digits(digits.images[:count], digits.labels[:count])


def trained(mnist, settings):
    task = Task(mnist, settings)
    return task.network, list(train.train(task))


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


def assert_same_run(one, other, bound):
    """Two (network, epochs) have the same parameters, up to `bound`, losses, accuracies and counts; and they have trained."""
    assert largest_difference(one[0], Network(42)) > 1e-4
    assert largest_difference(one[0], other[0]) <= bound
    for a, b in zip(one[1], other[1], strict=True):
        assert a.loss == pytest.approx(b.loss, abs=1e-5)
        assert (a.epoch, a.score, a.update_step) == (b.epoch, b.score, b.update_step)


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


def test_largest_difference_and_the_seed_of_the_weights():
    one, other = Network(1), Network(1)
    assert largest_difference(one, other) == 0
    assert largest_difference(one, Network(2)) > 0.01
    bias = other.dense_relu_sequential[4].bias
    moved = bias.asnumpy().copy()
    moved[3] -= 0.5
    bias.set_data(Tensor(moved))
    assert largest_difference(one, other) == largest_difference(other, one) == pytest.approx(0.5)
    bias.set_data(Tensor(np.full(10, np.nan, np.float32)))
    assert np.isnan(largest_difference(one, other))


def test_accuracy_counts_every_digit_once(mnist, monkeypatch):
    monkeypatch.setattr(mnist_train, "TEST_BATCH", 7)
    network = Network(5)
    labels = logits_in_numpy(network, mnist.test.images).argmax(axis=1).astype(np.int32)
    wrong = 13
    labels[:wrong] = (labels[:wrong] + 1) % 10
    for count_correct in (CountCorrect(network), ms.jit(CountCorrect(network))):
        assert mnist_train.evaluate(count_correct, Digits(mnist.test.images, labels), FEW) == 100 * (50 - wrong) / 50


class Recorder:
    """Stands for the train step: notes what it is given."""

    def __init__(self):
        self.rows, self.events = [], []

    def __call__(self, images, labels):
        assert (images.dtype, labels.dtype) == (ms.uint8, ms.int32)
        assert (images.asnumpy()[:, 0, 0] == labels.asnumpy()).all()
        self.rows.append(labels.asnumpy().tolist())
        self.events.append(len(labels))
        return Tensor(float(len(self.rows)), ms.float32)

    def flush(self):
        self.events.append("flush")


@pytest.mark.parametrize(("done", "save_at", "saves"), [(0, range(0), []), (2, range(3, 7, 2), [[7, 7, 1], [7, 7, 1, 2, 3]])])
def test_an_epoch_takes_every_row_once_from_where_it_stopped_and_flushes_at_the_end(done, save_at, saves):
    recorder, progress, losses, saved = Recorder(), [], [7.0] * done, []
    order = np.random.default_rng(0).permutation(90)
    images = np.zeros((90, 28, 28), np.uint8)
    images[:, 0, 0] = np.arange(90)
    digits = Digits(images, np.arange(90, dtype=np.int32))
    train.train_epoch(recorder, digits, train.cut(order, 16), lambda done, loss: progress.append((done, float(loss))), losses,
                      save_at, lambda: saved.append(list(losses)))
    assert [row for rows in recorder.rows for row in rows] == order[16 * done:].tolist()
    assert recorder.events == [16, 16, 16, 16, 16, 10, "flush"][done:]
    assert losses == [7] * done + [1, 2, 3, 4, 5, 6][:6 - done]
    assert progress == [(seen, loss + 1) for loss, seen in enumerate([16, 32, 48, 64, 80, 90][done:])]
    assert saved == saves


def test_each_epoch_has_its_seeded_order_dealt_out_to_the_ranks(mnist, monkeypatch):
    def order(epoch, settings):
        return np.concatenate(Task(mnist, settings).order(epoch)).tolist()

    orders = [order(epoch, settings) for settings in (FEW, replace(FEW, seed=7)) for epoch in (1, 2)]
    assert all(sorted(rows) == list(range(90)) for rows in orders)
    assert len({tuple(rows) for rows in orders}) == 4
    assert order(2, FEW.undivided()) == orders[1]
    alone, dealt = Task(mnist, FEW).order(1), []
    monkeypatch.setattr(train, "train_epoch", lambda step, data, microbatches, *_: dealt.append(microbatches))
    monkeypatch.setattr(train, "_mean_loss", lambda *_: 0.0)
    for rank in range(2):
        task = Task(mnist, replace(FEW, ranks=2, rank=rank))
        monkeypatch.setattr(task, "make_step", lambda: Task(mnist, FEW).make_step())
        monkeypatch.setattr(task, "make_test", lambda: lambda: 0.0)
        list(train.train(task))
        assert [rows.tolist() for rows in dealt[rank]] == [rows.tolist() for rows in alone[rank::2]]


@pytest.mark.parametrize("settings", [FEW, FEW.undivided(), replace(FEW, gradients="float64")], ids=["few", "undivided", "float64"])
def test_the_loss_is_the_mean_over_digits(mnist, settings):
    # At this rate no parameter moves: the loss of every digit is that of the initial network, in ragged microbatches too.
    network, (epoch,) = trained(mnist, replace(settings, lr=1e-30))
    assert largest_difference(network, Network(42)) == 0
    losses = losses_in_numpy(network, mnist.train)
    assert epoch.loss == pytest.approx(losses.mean(), abs=2e-6)
    order = np.random.default_rng([42, 1]).permutation(90)
    expected = [losses[rows].mean() for rows in train.cut(order, settings.batch_size)]
    assert np.abs(epoch.microbatch_losses - expected).max() < 2e-6
    # Control: the mean of the microbatches' means, and what the tutorial logs, are something else.
    assert abs(np.mean(expected) - losses.mean()) > 1e-5 or settings == FEW.undivided()


def test_accumulated_is_undivided_and_runs_are_reproducible(mnist, accumulated, undivided):
    assert [epoch.update_step for epoch in accumulated[1]] == [2, 4]
    assert all(epoch.train_seconds > 0 and epoch.test_seconds > 0 for epoch in accumulated[1])
    assert largest_difference(accumulated[0], Network(42)) > 0.01
    assert_same_run(accumulated, undivided, 1e-6)
    assert_same_run(accumulated, trained(mnist, TWO_EPOCHS), 0)


@pytest.mark.parametrize(("optimizer", "bound"), [("sgd", 1e-8), ("momentum", 1e-6), ("adam", 1e-6)])
def test_accumulated_is_undivided_in_float64_with_any_optimizer_and_clipping(mnist, optimizer, bound):
    """In graph mode: test_compare_agrees_with_the_undivided_batch."""
    settings = replace(FEW, optimizer=optimizer, clip_norm=0.5, gradients="float64")
    clipped = trained(mnist, settings)
    assert_same_run(clipped, trained(mnist, settings.undivided()), bound)
    unclipped, _ = trained(mnist, replace(settings, clip_norm=None))
    assert largest_difference(clipped[0], unclipped) > 1e-4


def all_equal(images, labels):
    """The weight of a microbatch, however few digits are in it."""
    return 1.0


@pytest.mark.parametrize("mistake", ["weight", "divisor", "no flush"])
def test_a_mistake_shows_in_the_comparison(mnist, undivided, monkeypatch, mistake):
    if mistake == "weight":
        monkeypatch.setattr(mnist_train, "make_train_step", partial(mnist_train.make_train_step, weight_fn=all_equal))
    elif mistake == "divisor":
        monkeypatch.setattr(Mean, "factor", lambda self, unit, weight: unit)
    else:
        monkeypatch.setattr(TrainStep, "flush", lambda self: False)
    wrong, _ = trained(mnist, TWO_EPOCHS)
    assert largest_difference(wrong, undivided[0]) > 1e-4


@pytest.mark.parametrize(("optimizer", "momentum", "kind", "expected"), [
    ("sgd", None, nn.SGD, 0.0),
    ("sgd", 0.5, nn.SGD, 0.5),
    ("momentum", None, nn.Momentum, 0.9),
    ("momentum", 0.5, nn.Momentum, 0.5),
    ("adam", None, nn.Adam, None),
])
def test_optimizers(optimizer, momentum, kind, expected):
    made = mnist_train.make_optimizer(Network(0), Settings(optimizer=optimizer, momentum=momentum, lr=0.25))
    assert type(made) is kind
    assert float(made.get_lr().asnumpy()) == 0.25
    if expected is not None:
        assert float(made.momentum.asnumpy()) == pytest.approx(expected)


def test_graph_mode_compiles_and_a_model_trains_bit_identically(mnist, accumulated, monkeypatch):
    """The loop and a Model, compiled; op by op nothing is compiled, and the numbers are the same."""
    monkeypatch.delenv("MS_JIT", raising=False)
    before = compiled_graphs()
    trained(mnist, FEW)
    assert compiled_graphs() == before
    assert "MS_JIT" not in os.environ
    loop = trained(mnist, replace(TWO_EPOCHS, mode="graph"))
    assert compiled_graphs() > before
    assert_same_run(loop, accumulated, 1e-6)
    model = trained(mnist, replace(TWO_EPOCHS, mode="graph", api="model"))
    assert_same_run(model, loop, 0)
    assert [e.microbatch_losses.tolist() for e in model[1]] == [e.microbatch_losses.tolist() for e in loop[1]]
    assert ms.get_context("mode") == ms.PYNATIVE_MODE


@pytest.mark.parametrize(("mode", "changes"), [
    ("pynative", {"pieces": 3}), ("pynative", {"api": "model"}), ("pynative", {"gradients": "float64"}),
    pytest.param("graph", {"pieces": 3}, marks=pytest.mark.slow)], ids=str)
def test_pieces_float64_and_a_model_give_the_same_numbers(mnist, accumulated, mode, changes):
    changed = trained(mnist, replace(TWO_EPOCHS, mode=mode, **changes))
    assert_same_run(changed, accumulated, 0 if changes == {"api": "model"} else 1e-6)
    other, _ = trained(mnist, replace(TWO_EPOCHS, **changes, accumulate_step=3))
    assert largest_difference(other, accumulated[0]) > 1e-4, "control: windows of another length"


@pytest.mark.parametrize("saved_at", [2, 6])
def test_a_model_resumes_where_it_was_saved(mnist, tmp_path, saved_at):
    """In mid-window, and after an epoch's last microbatch, before its flush."""
    settings = replace(FEW, api="model")
    path, copy = tmp_path / "run.ckpt", tmp_path / "copy.ckpt"

    def keep_the_first(*_):
        if path.exists() and not copy.exists():
            shutil.copy(path, copy)

    whole = Task(mnist, settings)
    epochs = train.train(whole, keep_the_first, train.Checkpoints(path, saved_at))
    (expected,) = (keep_the_first() or epoch for epoch in epochs)
    resumed, task = [], Task(mnist, settings)
    task.network = Network(1)
    (epoch,) = train.train(task, checkpoints=train.Checkpoints(resume=copy, resumed=lambda *done: resumed.append(done)))
    assert resumed == [(0, saved_at)]
    assert largest_difference(task.network, whole.network) == 0
    assert epoch.microbatch_losses.tolist() == expected.microbatch_losses.tolist()
