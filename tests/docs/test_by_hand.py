"""The page on loops by hand: the order in which two networks train is exact, and copied moments go on."""
import re

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn, ops
from support.pages import PAGES

from ms_accum import make_train_step
from ms_accum.selftest.comparing import difference, values
from ms_accum.selftest.networks import MLP, batches, mean_loss, tensors

pytestmark = pytest.mark.usefixtures("uncompiled")
RNG = np.random.default_rng(0)
WINDOWS = [[tuple(Tensor(RNG.random((n, width)), ms.float32) for width in (8, 4)) for n in (3, 5, 2)] for _ in range(3)]


def of_the_page(name):
    """A function of the page."""
    named = {"ops": ops}
    exec(re.search(rf"^def {name}\(.*?(?=^\S|^```)", PAGES["by-hand"], re.MULTILINE | re.DOTALL)[0], named)
    return named[name]


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


def test_a_gan_trains_exactly_if_each_window_is_trained_by_one_step_and_then_the_other():
    """As on undivided batches. Control: in turns at each microbatch, it does not."""
    undivided = [[tuple(ops.concat(column) for column in zip(*window))] for window in WINDOWS]
    one_by_one = [(number, batch) for window in WINDOWS for number in (0, 1) for batch in window]
    in_turns = [(number, batch) for window in WINDOWS for batch in window for number in (0, 1)]
    expected = trained_gan([(number, batch) for window in undivided for number in (0, 1) for batch in window], 1)
    assert difference(trained_gan(one_by_one, 3), expected) < 1e-5
    assert difference(trained_gan(in_turns, 3), expected) > 1e-3


@pytest.mark.parametrize("copied", [True, False])
def test_moments_that_are_copied_by_their_parameters_go_on(copied):
    """As if the optimizer had not been replaced. Control: without a copy."""
    network, other = MLP(seed=0), MLP(seed=0)
    given = [tensors(x, y) for x, y in batches([4] * 4)]
    one = make_train_step(mean_loss(network), nn.Adam(network.trainable_params(), 0.1), 2, eager=True)
    first, second = (make_train_step(mean_loss(other), nn.Adam(other.trainable_params(), 0.1), 2, eager=True)
                     for _ in range(2))
    for batch in given * 2:
        one(*batch)
    for batch in given:
        first(*batch)
    old, new = first.optimizer, second.optimizer
    if copied:
        of_the_page("continue_from")(old, new)
    for batch in given:
        second(*batch)
    off = difference(values(other.trainable_params()), values(network.trainable_params()))
    assert off == 0 if copied else off > 1e-2
