"""The reference run on text: the network, its loss, windows of ragged microbatches, and validation."""
from dataclasses import replace

import mindspore as ms
import numpy as np
import pytest
import tiny
from mindspore import Tensor

from ms_accum.lm import network
from ms_accum.lm.data import PADDING, WIDTHS
from ms_accum.lm.network import BitsPerByte, Network, count_bytes, count_one, generate
from ms_accum.lm.train import evaluate
from ms_accum.reference import train
from ms_accum.reference.network import largest_difference


def test_the_network_has_about_a_million_parameters():
    sizes = {p.name: int(p.size) for p in Network(0).get_parameters()}
    assert 0.9e6 < sum(sizes.values()) < 1.1e6
    assert sizes["blocks.0.attention.in_proj_weight"] == 3 * network.FEATURES**2


@pytest.fixture
def tokens(monkeypatch):
    """Four rows of 17, 64, 40 and 0 bytes, and small networks."""
    tiny.shrink(monkeypatch)
    tokens = np.random.default_rng(0).integers(0, 256, (4, 64)).astype(np.int32)
    for row, length in enumerate((17, 64, 40, 0)):
        tokens[row, length:] = PADDING
    return tokens


def test_a_byte_is_predicted_from_the_bytes_before_it_alone(tokens):
    one = Network(3)
    logits = one(Tensor(tokens)).asnumpy()
    assert (logits.shape, logits.dtype) == ((4, 64, 256), np.float32)
    changed = tokens.copy()
    changed[:, 20] = 65
    moved = np.abs(one(Tensor(changed)).asnumpy() - logits).max(axis=(0, 2))
    assert moved[:21].max() < 1e-6
    assert moved[21:].min() > 1e-5
    assert np.abs(one(Tensor(tokens[:, :32])).asnumpy() - logits[:, :32]).max() < 1e-5, "a row may be padded more or less"
    assert largest_difference(one, Network(3)) == 0
    assert largest_difference(one, Network(4)) > 0.01


def bits_in_numpy(logits, tokens):
    """-log2 p of every byte, in float64."""
    logits = logits.astype(np.float64)
    log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    rows, places = np.nonzero(tokens != PADDING)
    return -log_p[rows, places, tokens[rows, places]] / np.log(2)


def test_the_loss_is_the_mean_over_bytes_in_bits_and_the_weight_counts_them(tokens):
    one = Network(3)
    bits = bits_in_numpy(one(Tensor(tokens)).asnumpy(), tokens)
    assert float(BitsPerByte(one)(Tensor(tokens))) == pytest.approx(bits.mean(), abs=1e-5)
    assert int(count_bytes(Tensor(tokens))) == len(bits) == 17 + 64 + 40
    assert (int(count_one(Tensor(tokens))), int(count_one(Tensor(tokens[3:])))) == (1, 0)


def parameters_after(steps, task):
    train_step = task.make_step()
    for rows in steps:
        train_step(*map(Tensor, task.data.batch(rows)))
    train_step.flush()
    assert int(train_step.accumulator.update_step) == 1
    return task.network


@pytest.mark.parametrize("mode", ["graph", "pynative"])
def test_a_window_of_ragged_microbatches_is_one_undivided_batch_and_the_mean_of_means_is_not(mode, monkeypatch):
    """The other two op by op, because each graph takes seconds to compile."""
    tiny.shrink(monkeypatch)
    tiny.with_sgd(monkeypatch)
    # In SGD's first step, 1 is the learning rate of the gradient itself.
    settings = {"lr": 1.0, "clip_norm": None}
    task = tiny.task(**settings)
    smallest, *_, larger, largest = sorted(task.order(1), key=task.data.count)
    window = [larger, np.append(smallest[:2], [-1, -1]), largest]  # in two pieces, one of them is padding alone
    assert [task.data.batch(rows)[0].shape for rows in window] == [(4, 64), (4, 32), (4, 64)]
    with monkeypatch.context() as patch:
        patch.setenv("MS_JIT", "0")
        undivided = parameters_after([np.concatenate(window)], task)
        means = parameters_after(window, tiny.task(**settings, weigh_bytes=False))
        if mode == "pynative":
            accumulated = parameters_after(window, tiny.task(**settings))
            pieces = parameters_after(window, tiny.task(**settings, pieces=2))
            assert largest_difference(pieces, undivided) < 1e-5
    if mode == "graph":
        accumulated = parameters_after(window, tiny.task(**settings))
    assert largest_difference(accumulated, Network(42)) > 1e-2
    assert largest_difference(accumulated, undivided) < 1e-5
    assert largest_difference(means, undivided) > 1e-3


def test_a_budget_closes_windows_by_bytes(monkeypatch):
    tiny.shrink(monkeypatch)
    monkeypatch.setenv("MS_JIT", "0")
    task = tiny.task(budget=400)
    train_step, held, closed = task.make_step(), 0, []
    for rows in task.order(1):
        train_step(*map(Tensor, task.data.batch(rows)))
        held += task.data.count(rows)
        assert bool(train_step.updated) == (held >= 400)
        if held >= 400:
            closed.append(held)
            held = 0
    assert len(closed) >= 2
    assert len(set(closed)) > 1, "the windows differ in bytes"
    assert task.describe_batch() == "microbatches of 4 rows until they hold 400 bytes"


def test_validation_counts_every_byte_once(tokens):
    task = tiny.task()
    bits = evaluate(BitsPerByte(task.network), task.text.validation, task.settings)
    rows = task.text.validation
    expected = []
    for i in range(len(rows)):
        (tokens,) = rows.batch(np.array([i]))
        expected += bits_in_numpy(task.network(Tensor(tokens)).asnumpy(), tokens).tolist()
    assert len(expected) == rows.size
    assert bits == pytest.approx(np.mean(expected), abs=1e-5)


def test_the_loss_of_an_epoch_is_the_mean_over_bytes_and_runs_are_reproducible(monkeypatch):
    tiny.shrink(monkeypatch)
    one, other, still = tiny.task(), tiny.task(), tiny.task(lr=1e-30, epochs=1)
    epochs, again, (unmoved,) = (list(train.train(task)) for task in (one, other, still))
    assert [epoch.loss for epoch in epochs] == [epoch.loss for epoch in again]
    assert epochs[1].loss < epochs[0].loss
    assert largest_difference(one.network, other.network) == 0 < largest_difference(one.network, still.network)
    # At this rate no parameter moves: the loss of every byte is that of the initial network.
    assert unmoved.loss == pytest.approx(evaluate(BitsPerByte(Network(42)), still.data, still.settings), abs=1e-5)
    assert abs(unmoved.microbatch_losses.mean() - unmoved.loss) > 1e-6, "control: the mean of means"
    assert one.update_size(epochs) == round(2 * one.data.size / epochs[-1].update_step)


def test_each_epoch_has_its_seeded_order():
    def taken(epoch, **settings):
        return [rows.tolist() for rows in tiny.task(**settings).order(epoch)]

    orders = [taken(1), taken(2), taken(1, seed=7)]
    assert orders[0] == taken(1)
    assert all(one != other for i, one in enumerate(orders) for other in orders[:i])
    assert len({len(order) for order in orders}) == 1


def test_text_is_generated_by_the_seed_from_one_shape_and_printable(tokens):
    shapes = []

    def logits(tokens):
        shapes.append(tokens.shape)
        # Most likely what follows the byte before in the alphabet.
        follows = np.zeros((1, WIDTHS[-1], 256), np.float32)
        for place in range(WIDTHS[-1]):
            before = int(tokens[0, place - 1]) if place else 64
            follows[0, place, before + 1 if before < 90 else 10] = 99
        return Tensor(follows)

    assert generate(logits, 80, seed=0).startswith("ABCDEFGHIJKLMNOPQRSTUVWXYZ ")
    assert shapes == [(1, WIDTHS[-1])] * 80
    one = Network(0)
    assert generate(one, 5, 1) == generate(one, 5, 1)
    assert len(generate(one, 5, 1)) <= 5
    assert generate(one, 5, 1).isprintable()


def test_the_counterpart_weighs_microbatches_alike_from_the_same_weights(monkeypatch):
    tiny.shrink(monkeypatch)
    task = tiny.task(noise_scale=True)
    other = task.counterpart()
    assert other.settings == replace(task.settings, weigh_bytes=False, noise_scale=False)
    assert (task.label, other.label) == ("token mean", "mean of means")
    assert largest_difference(task.network, other.network) == 0
    assert task.describe_difference(3.0, 3.25) == ["the mean of means needs 0.2500 bits per byte more on the validation documents"]
    assert task.describe_difference(3.0, 2.5) == ["the mean of means needs 0.5000 bits per byte fewer on the validation documents"]
    assert ms.get_context("mode") == ms.PYNATIVE_MODE
