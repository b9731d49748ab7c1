"""Several networks and optimizers in one compiled step, and parameter groups, against the oracle."""
import mindspore as ms
import numpy as np
import pytest
import reference
from conftest import MLP, batches, compiled, difference, mean_loss, tensors, values
from mindspore import Tensor, nn, ops

from ms_accum import Accumulator, make_train_step


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def softplus(x):
    return ops.maximum(x, 0.0) + ops.log1p(ops.exp(-ops.abs(x)))


def gan_gradients(generator, discriminator, z, real):
    """Of a linear generator and a linear discriminator with the softplus losses, by hand."""
    (w_g, b_g), (w_d, b_d) = generator, discriminator
    fake = z @ w_g.T + b_g
    real_score, fake_score = real @ w_d.T + b_d, fake @ w_d.T + b_d
    d_real, d_fake = -sigmoid(-real_score) / len(z), sigmoid(fake_score) / len(z)
    of_discriminator = [d_real.T @ real + d_fake.T @ fake, (d_real + d_fake).sum(0)]
    d_generated = -sigmoid(-fake_score) / len(z) @ w_d
    return [d_generated.T @ z, d_generated.sum(0)], of_discriminator


def dense(inputs, outputs, seed):
    weights = np.random.default_rng(seed).normal(size=(outputs, inputs)).astype(np.float32)
    return nn.Dense(inputs, outputs, weight_init=Tensor(weights), bias_init="zeros")


def train_gan(mode, n_generator, n_discriminator, expected_n_generator=None):
    """Eleven microbatches with the library and with two oracles; the largest difference, the counters."""
    generator, discriminator = dense(2, 3, 0), dense(3, 1, 1)
    generator.update_parameters_name("generator.")
    discriminator.update_parameters_name("discriminator.")
    of_generator = Accumulator(nn.Momentum(generator.trainable_params(), 0.05, 0.9), n_generator, reduction="mean")
    of_discriminator = Accumulator(nn.Adam(discriminator.trainable_params(), 0.02), n_discriminator, 0.5, reduction="mean")
    oracles = [
        reference.Accumulation(values(generator.trainable_params()), reference.SGD(0.05, 0.9), expected_n_generator or n_generator, "mean"),
        reference.Accumulation(values(discriminator.trainable_params()), reference.Adam(0.02), n_discriminator, "mean", 0.5)]

    def generator_loss(z):
        return softplus(-discriminator(generator(z))).mean()

    def discriminator_loss(z, real):
        return (softplus(-discriminator(real)) + softplus(discriminator(generator(z)))).mean()

    generator_grad = ms.value_and_grad(generator_loss, None, of_generator.optimizer.parameters)
    discriminator_grad = ms.value_and_grad(discriminator_loss, None, of_discriminator.optimizer.parameters)

    def step(z, real, samples):
        loss_g, grads_g = generator_grad(z)
        loss_d, grads_d = discriminator_grad(z, real)
        return loss_g, loss_d, of_generator(grads_g, samples), of_discriminator(grads_d, samples)

    step = compiled(step, mode)
    rng = np.random.default_rng(2)
    for samples in [4, 4, 4, 3] * 3:
        z, real = rng.normal(size=(samples, 2)), rng.normal(size=(samples, 3)) + 1
        results = step(Tensor(z, ms.float32), Tensor(real, ms.float32), Tensor(samples, ms.float32))
        gradients = gan_gradients(oracles[0].parameters, oracles[1].parameters, z, real)
        closed = [oracle(g, samples) for oracle, g in zip(oracles, gradients)]
        assert [bool(c) for c in results[2:]] == closed
    updates = [int(acc.update_step) for acc in (of_generator, of_discriminator)]
    assert updates == [oracle.update_step for oracle in oracles]
    return max(difference(values(n.trainable_params()), o.parameters) for n, o in zip((generator, discriminator), oracles)), updates


def test_a_gan_with_two_window_lengths_in_one_step(mode):
    error, updates = train_gan(mode, n_generator=3, n_discriminator=2)
    assert error <= 1e-5  # Adam divides by the square root of small squares; SGD alone agrees to 1e-6
    assert updates == [4, 6]


def test_the_two_windows_are_told_apart(mode_named):
    """Negative control: an oracle whose generator has the discriminator's window sees it at once."""
    with pytest.raises(AssertionError):
        train_gan(mode_named("pynative"), n_generator=3, n_discriminator=2, expected_n_generator=2)


class Groups:
    """An optimizer for each group of parameters."""

    def __init__(self, *groups):
        self.groups = groups

    def __call__(self, parameters, gradients):
        parameters = list(parameters)
        for indices, optimizer in self.groups:
            for i, updated in zip(indices, optimizer([parameters[i] for i in indices], [gradients[i] for i in indices])):
                parameters[i] = updated
        return parameters


@pytest.mark.parametrize(("decay", "follows"), [(0.1, True), (0.0, False)])
def test_a_frozen_backbone_and_groups_with_rates_and_decay_of_their_own(monkeypatch, decay, follows):
    """The oracle of another weight decay is the negative control; the backbone keeps its bits."""
    monkeypatch.setenv("MS_JIT", "0")
    network = MLP()
    for parameter in network.first.trainable_params():
        parameter.requires_grad = False
    before = values(network.first.get_parameters())
    optimizer = nn.Momentum([{"params": [network.second.bias], "lr": 0.5}, {"params": [network.second.weight], "weight_decay": 0.1}],
                            learning_rate=0.05, momentum=0.9)
    acc = Accumulator(optimizer, 2, reduction="mean")
    train_step = make_train_step(mean_loss(network), acc)
    whole = values(network.get_parameters())
    trained = [list(p.name for p in network.get_parameters()).index(p.name) for p in optimizer.parameters]
    oracle = reference.Accumulation([whole[i] for i in trained], Groups(([0], reference.SGD(0.5, 0.9)),
                                    ([1], reference.SGD(0.05, 0.9, decay))), 2, "mean")
    for x, y in batches([5, 5, 4, 5, 2]):
        train_step(*tensors(x, y))
        for i, value in zip(trained, oracle.parameters):
            whole[i] = value
        gradients = reference.loss_and_gradients(whole, x, y)[1]
        oracle([gradients[i] for i in trained], len(x))
    train_step.flush()
    oracle.flush()
    assert (difference(values(optimizer.parameters), oracle.parameters) <= 1e-6) == follows
    assert all((a == b).all() for a, b in zip(values(network.first.get_parameters()), before))
    assert int(acc.update_step) == 3
