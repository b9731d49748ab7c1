"""What tests of drivers are made of: forward functions, and an optimizer that keeps what it was given."""
import numpy as np
from conftest import MLP, Counting, mean_loss, values
from mindspore import ParameterTuple, nn

from ms_accum import Accumulator, make_train_step

LOSS = nn.CrossEntropyLoss()


def sgd(network, rate=0.1):
    return nn.SGD(network.trainable_params(), rate)


def step_of(accumulate_step=2, losses=1, **options):
    """A train step of an MLP by SGD, with one loss, or the same one twice."""
    network = MLP()
    one = mean_loss(network)

    def pair(x, y):
        return one(x, y), one(x, y)

    return make_train_step(one if losses == 1 else pair, sgd(network), accumulate_step, losses=losses, **options)


def counting(network, accumulate_step=1, **options):
    """An accumulator whose optimizer keeps the gradient it was given, and updates nothing."""
    options.setdefault("reduction", "mean")
    return Accumulator(Counting(ParameterTuple(network.trainable_params())), accumulate_step, **options)


def gradient_of(forward_fn, network, batch, **options):
    """The gradient that one call hands to the optimizer, and what the call returns."""
    acc = counting(network)
    result = make_train_step(forward_fn, acc, **options)(*batch)
    assert int(acc.optimizer.calls) == 1
    return values(acc.optimizer.seen), result


def relative(got, expected):
    """Norm of the difference over the norm, of all gradients together."""
    return np.sqrt(sum(((g - e) ** 2).sum() for g, e in zip(got, expected)) / sum((e**2).sum() for e in expected))


def warned(capfd):
    """What MindSpore warned of, but for functions of a test that two of its cases compile.

    2.7 also warns of checks that it runs while it compiles and then removes.
    """
    return [line for line in capfd.readouterr().err.splitlines()
            if "WARNING" in line.upper() and "CommManager" not in line and "PrimitivePy> require_" not in line
            and not ("has been compiled again" in line and "/tests/" in line)]
