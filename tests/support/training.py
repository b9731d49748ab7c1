"""Train steps of small networks, and the gradient that a step hands to its optimizer."""
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


def counting(network):
    """An optimizer that keeps the gradient it was given, and updates nothing."""
    return Counting(ParameterTuple(network.trainable_params()))


def gradient_of(forward_fn, network, batch, **options):
    """The gradient that one call hands to the optimizer, and what the call returns."""
    optimizer = Counting(ParameterTuple(network.trainable_params()))
    result = make_train_step(forward_fn, optimizer, 1, **options)(*batch)
    assert int(optimizer.calls) == 1
    return values(optimizer.seen), result
