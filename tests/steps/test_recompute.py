"""Blocks that are recomputed in the backward pass, in a step, in pieces, and op by op."""
import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn, ops
from support.layers import Block, Tied
from support.modes import running

from ms_accum import make_train_step
from ms_accum.selftest.comparing import relative, values

WORDS, WIDTH, RATE = 16, 8, 0.5


def network_of(recomputed):
    """A network with tied embeddings, with the same values each time."""
    ms.set_seed(0)
    return Tied(Block, recomputed, WIDTH, WORDS, blocks=2)


def unmasked(tokens, targets):
    return (targets != -100).sum()


def microbatches():
    """Two windows of two microbatches; 20, 2, 12 and 3 tokens count."""
    rng, made = np.random.default_rng(0), []
    for count in (20, 2, 12, 3):
        tokens, targets = rng.integers(0, WORDS, (2, 4, 6)).astype(np.int32)
        targets.ravel()[rng.permutation(targets.size)[count:]] = -100
        made.append((tokens, targets))
    return made


def moved(train, recomputed):
    """How far `train(network, optimizer)` moves the parameters."""
    network = network_of(recomputed)
    start = values(network.trainable_params())
    train(network, nn.SGD(network.trainable_params(), RATE))
    return [after - before for before, after in zip(start, values(network.trainable_params()))]


def by_mindspore(network, optimizer):
    """Each window undivided, nothing recomputed."""
    grad_fn, batches = ms.value_and_grad(network, None, optimizer.parameters), microbatches()
    for window in (batches[:2], batches[2:]):
        whole = tuple(map(np.concatenate, zip(*window)))
        gradients = values(grad_fn(*map(Tensor, whole))[1])
        for parameter, gradient in zip(optimizer.parameters, gradients):
            ops.assign(parameter, Tensor(parameter.asnumpy() - RATE * gradient / unmasked(*whole), ms.float32))


@pytest.mark.parametrize(("way", "pieces"), [
    ("jit", 2), ("pynative", 1), ("eager", 1), pytest.param("jit", 1, marks=pytest.mark.slow)])
def test_recomputed_blocks_train_as_plain_mindspore(way, pieces):
    """Control: with numbers of samples as weights, which are equal."""
    def step_by(weight_fn):
        def train(network, optimizer):
            step = make_train_step(network, optimizer, 2, pieces=pieces, weight_fn=weight_fn, loss_reduction="sum",
                                   eager=way == "eager")
            list(step.epoch(microbatches()))
        return train

    with running("pynative" if way == "eager" else way):
        expected = moved(by_mindspore, recomputed=False)
        assert relative(moved(step_by(unmasked), recomputed=True), expected) < 1e-5
        if way != "jit":
            assert relative(moved(step_by(None), recomputed=True), expected) > 0.1
