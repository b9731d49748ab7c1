"""Recipes: factors of losses are exact, and so is the order in which two networks train. Sentences of other pages."""

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn, ops
from mindspore.dataset import NumpySlicesDataset, config
from support.pages import PAGES, Block, blocks_of, run_blocks

from ms_accum import check_equivalence, make_train_step
from ms_accum.selftest.comparing import difference, values

RNG = np.random.default_rng(0)
WINDOWS = [[tuple(Tensor(RNG.random((n, width)), ms.float32) for width in (8, 4)) for n in (3, 5, 2)] for _ in range(3)]


def trained_gan(order, accumulate_step):
    """Both networks after training with the calls of `order`: pairs of a step's number and a microbatch."""
    ms.set_seed(1)
    generator, discriminator = nn.CellList([
        nn.SequentialCell(nn.Dense(4, 8), nn.Tanh()), nn.SequentialCell(nn.Dense(8, 8), nn.Tanh(), nn.Dense(8, 1))])

    def discriminator_loss(real, noise):
        false = discriminator(ops.stop_gradient(generator(noise)))
        return ops.softplus(false).mean() + ops.softplus(-discriminator(real)).mean()

    def generator_loss(real, noise):
        return ops.softplus(-discriminator(generator(noise))).mean()

    steps = [make_train_step(loss, nn.SGD(network.trainable_params(), 0.5), accumulate_step, eager=True)
             for loss, network in ((discriminator_loss, discriminator), (generator_loss, generator))]
    for number, batch in order:
        steps[number](*batch)
    assert all(step.updated for step in steps)
    return values([*generator.trainable_params(), *discriminator.trainable_params()])


@pytest.mark.usefixtures("uncompiled")
def test_a_gan_trains_exactly_if_each_window_is_trained_by_one_step_and_then_the_other():
    """As on undivided batches. Control: in turns at each microbatch, it does not."""
    undivided = [[tuple(ops.concat(column) for column in zip(*window))] for window in WINDOWS]
    one_by_one = [(number, batch) for window in WINDOWS for number in (0, 1) for batch in window]
    in_turns = [(number, batch) for window in WINDOWS for batch in window for number in (0, 1)]
    expected = trained_gan([(number, batch) for window in undivided for number in (0, 1) for batch in window], 1)
    assert difference(trained_gan(one_by_one, 3), expected) < 1e-5
    assert difference(trained_gan(in_turns, 3), expected) > 1e-3


def test_a_seed_repeats_the_order_of_a_shuffled_dataset():
    """Also behind what is skipped. Control: the seed of another epoch."""
    def shuffled(epoch, skipped=0):
        config.set_seed(42 + epoch)
        dataset = NumpySlicesDataset({"data": np.arange(40)}, shuffle=True).batch(4).skip(skipped)
        return [data.tolist() for data, in dataset.create_tuple_iterator(num_epochs=1, output_numpy=True)]

    assert shuffled(0)[3:] == shuffled(0, 3)
    assert shuffled(0) != shuffled(1)


def test_a_sum_that_is_divided_by_at_least_1_is_no_weighted_mean_of_pieces_without_objects():
    """As the page on checks says. Control: the sum."""
    network, data = nn.Dense(8, 3), Tensor(RNG.normal(size=(8, 8)), ms.float32)
    label = Tensor([0, 2, 2, 2, 0, 1, 1, 0], ms.int32)

    def objects(data, label):
        return (label == 2).sum()

    def loss_sum(data, label):
        return ops.cross_entropy(network(data), label, reduction="sum")

    def divided(data, label):
        return loss_sum(data, label) / ops.maximum(objects(data, label), 1)

    assert "no weighted mean" in str(check_equivalence(divided, network, (data, label)))
    assert '"no weighted mean"' in PAGES["check"]
    assert check_equivalence(loss_sum, network, (data, label), weight_fn=objects, loss_reduction="sum").ok


# After the page's blocks, on a window of uneven microbatches, one of them without positives.
COMPARED = """
rng = np.random.default_rng(1)
window = [(rng.normal(size=(n, 8)).astype(np.float32), rng.integers(0, 3, n).astype(np.int32),
           (np.arange(n) < positives).astype(np.float32)) for n, positives in ((6, 3), (3, 1), (3, 0), (9, 9))]
batches = [tuple(map(Tensor, batch)) for batch in window]
weights = ms.ParameterTuple(detector.trainable_params())

def both_means(data, label, positive):
    return class_sum(data, label) / len(data) + size_sum(data, positive) / ops.maximum(positive.sum(), 1)

def gradient_of(*batch):
    found = ms.value_and_grad(both_means, None, weights)(*batch)[1]
    return np.concatenate([gradient.asnumpy().ravel() for gradient in found])

def accumulated(**options):
    start = [weight.asnumpy().copy() for weight in weights]
    step = make_train_step(both_sums, nn.SGD(list(weights), 1.0), 4, has_weight=True, loss_reduction="sum", **options)
    for loss in step.epoch(list(with_factors(batches, 4))):
        ...
    moved = np.concatenate([(old - new.asnumpy()).ravel() for old, new in zip(start, weights)])
    for weight, value in zip(weights, start):
        ops.assign(weight, Tensor(value))
    return moved

wanted = gradient_of(*map(ops.cat, zip(*batches)))
each = [gradient_of(*batch) for batch in batches]
for found in (np.mean(each, axis=0), np.average(each, axis=0, weights=[len(data) for data, *_ in window]),
              accumulated(), accumulated(pieces=3), accumulated(eager=True)):
    print(np.linalg.norm(found - wanted) / np.linalg.norm(wanted))
"""


@pytest.mark.usefixtures("compiled_if_slow")
def test_the_factors_of_two_losses_make_windows_exact():
    """Whole, in pieces and op by op, against plain MindSpore. Controls: one weight for both losses."""
    blocks = blocks_of(PAGES["recipes"])
    place = next(place for place, block in enumerate(blocks) if "def with_factors" in block.code)
    *_, (printed, _) = run_blocks({"losses": [blocks[0], blocks[place], Block(COMPARED)]})["losses"]
    errors = [float(line) for line in printed.splitlines()]
    assert len(errors) == 5
    assert min(errors[:2]) > 0.01
    assert max(errors[2:]) < 2e-6
