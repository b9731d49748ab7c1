"""Blocks that are recomputed in the backward pass, and compiled once for all (`lazy_inline`), with each driver."""
from functools import cache

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn, ops
from support.drivers import Driver
from support.layers import Block, LazyBlock, Tied

from ms_accum.selftest.comparing import relative, values

WORDS, WIDTH, RATE = 16, 8, 0.5
DRIVERS = {"step": ("step", {}), "step in pieces": ("step", {"pieces": 2}), "cell": ("cell-graph", {}),
           "by hand in ms.jit": ("hand-jit", {}), "by hand in PyNative": ("hand-pynative", {})}

class Counted(Block):
    """It counts how often PyNative runs it."""

    passes = 0

    def construct(self, x):
        Counted.passes += 1
        return super().construct(x)


class Forgetful(Block):
    """Each pass computes something else, so recomputing it is wrong."""

    def __init__(self, width):
        super().__init__(width)
        self.passes = 0

    def construct(self, x):
        self.passes += 1
        return super().construct(x) * self.passes


def tied(made, recomputed):
    """The network of this file, with the same values each time."""
    ms.set_seed(0)
    return Tied(made, recomputed, WIDTH, WORDS, blocks=2)


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


def trained(name, made=Block, recomputed=True):
    """How far a driver moves the parameters in both windows. The one by hand takes means."""
    driver, options = DRIVERS[name]
    network = tied(made, recomputed)
    start = values(network.trainable_params())
    optimizer = nn.SGD(network.trainable_params(), RATE)

    def mean(tokens, targets):
        return network(tokens, targets) / unmasked(tokens, targets)

    by_hand = driver.startswith("hand")
    options = options if by_hand else {**options, "loss_reduction": "sum"}
    with Driver(driver, mean if by_hand else network, optimizer, 2, unmasked, **options) as train:
        for batch in microbatches():
            train(*batch)
        assert train.accumulator.status().update_step == 2
    return moved(start, network)


def moved(start, network):
    return [after - before for before, after in zip(start, values(network.trainable_params()))]


@cache
def plain(weighted=True):
    """The same by MindSpore alone: each window undivided, nothing recomputed; unweighted, the mean of the means."""
    network, batches = tied(Block, recomputed=False), microbatches()
    parameters = network.trainable_params()
    start = values(parameters)
    grad_fn = ms.value_and_grad(network, None, ms.ParameterTuple(parameters))
    for window in (batches[:2], batches[2:]):
        parts = [tuple(map(np.concatenate, zip(*window)))] if weighted else window
        means = [[gradient / unmasked(*part) for gradient in values(grad_fn(*map(Tensor, part))[1])] for part in parts]
        for parameter, gradients in zip(parameters, zip(*means)):
            ops.assign(parameter, Tensor(parameter.asnumpy() - RATE * np.mean(gradients, axis=0), ms.float32))
    return moved(start, network)


@pytest.mark.parametrize("name", [
    pytest.param(name, marks=[pytest.mark.slow] * (name != "step in pieces")) for name in DRIVERS])
def test_recomputed_blocks_with_tied_embeddings_train_as_plain_mindspore(name):
    assert relative(trained(name), plain()) < 1e-5
    assert relative(plain(weighted=False), plain()) > 0.1  # negative control


def test_in_pynative_a_block_runs_again_and_lazy_inline_is_ignored():
    passes = []
    for recomputed in (False, True):
        Counted.passes = 0
        trained("by hand in PyNative", Counted, recomputed)
        passes.append(Counted.passes)
    assert passes == [8, 16]  # 4 microbatches, 2 blocks
    assert relative(trained("by hand in PyNative", LazyBlock), plain()) < 1e-5


def test_a_block_that_computes_something_else_when_it_is_recomputed_is_noticed():
    """Negative control: the comparison sees what recomputation does."""
    kept, recomputed = [trained("by hand in PyNative", Forgetful, recomputed) for recomputed in (False, True)]
    assert relative(recomputed, kept) > 0.1


@pytest.mark.parametrize("mode", ["jit", "pynative"])
def test_in_pynative_on_cpu_a_recomputed_dropout_draws_another_mask(mode):
    """A limit of MindSpore 2.10, which the guide names."""
    scale, dropout = ms.Parameter(np.ones(256, np.float32), name="scale"), nn.Dropout(p=0.5)

    class Scaled(nn.Cell):
        def construct(self, x):
            return dropout(x) * scale

    block = Scaled().set_train()
    block.recompute()

    def forward_fn(x):
        result = block(x)
        return result.sum(), result

    grad_fn = ms.value_and_grad(forward_fn, None, ms.ParameterTuple([scale]), has_aux=True)
    (_, masked), (gradient,) = (ms.jit(grad_fn) if mode == "jit" else grad_fn)(Tensor(np.ones(256, np.float32)))
    assert (masked.asnumpy() == gradient.asnumpy()).all() == (mode == "jit")
