"""Train steps of small networks, every bit of their state, and the gradient that a step hands to its optimizer."""
import numpy as np
from mindspore import ParameterTuple, nn

from ms_accum import make_train_step
from ms_accum.selftest.comparing import values
from ms_accum.selftest.networks import MLP, mean_loss
from support.cells import Counting

LOSS = nn.CrossEntropyLoss()


def sgd(network, rate=0.1):
    return nn.SGD(network.trainable_params(), rate)


def step_of(accumulate_step=2, **options):
    """A train step of an MLP by SGD."""
    network = MLP()
    return make_train_step(mean_loss(network), sgd(network), accumulate_step, **options)


def masked_step(network, optimizer, accumulate_step, **options):
    """A train step whose loss is the mean over what a mask leaves of a batch, which is also its weight."""
    def forward_fn(x, y, mask):
        return (((network(x) - y) ** 2).mean(-1) * mask).sum() / mask.sum()

    def tokens(x, y, mask):
        return mask.sum()

    return make_train_step(forward_fn, optimizer, accumulate_step, weight_fn=tokens, **options)


def masked_batches(sizes, seed=0):
    rng = np.random.default_rng(seed)
    return [(rng.normal(size=(n, 6)).astype(np.float32), rng.normal(size=(n, 3)).astype(np.float32),
             (rng.random(n) < 0.7).astype(np.float32)) for n in sizes]


def train_epochs(step, batches, epochs=2):
    """Train to the end of so many epochs, as a script that is started again does."""
    while step.epochs < epochs:
        for _ in step.epoch(batches, skip=step.trained):
            pass


def bits(network, step):
    """Every bit of what a file holds of a run between two windows."""
    window = step.boundary.window
    held = *network.get_parameters(), *step.boundary.rates.state.values(), window.counts, window.sums
    return [p.asnumpy().tobytes() for p in (*held, *window.state.values())]


def gradient_of(forward_fn, network, batch, **options):
    """The gradient that one call hands to the optimizer, and what the call returns."""
    optimizer = Counting(ParameterTuple(network.trainable_params()))
    result = make_train_step(forward_fn, optimizer, 1, **options)(*batch)
    assert int(optimizer.calls) == 1
    return values(optimizer.seen), result
