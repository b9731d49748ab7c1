"""The learning rate of the next update: read and set, at any time. What `Rates` finds is in core/test_optimizers.py."""
from types import SimpleNamespace

import mindspore as ms
import numpy as np
import pytest
from mindspore import nn, ops
from mindspore.experimental import optim
from support.differential.optimizers import build_optimizer, multiply_rates
from support.modes import running

from ms_accum import make_train_step
from ms_accum.selftest.comparing import relative, values
from ms_accum.selftest.networks import MLP, batches, mean_loss, tensors

pytestmark = pytest.mark.core

DATA = [tensors(x, y) for x, y in batches([6] * 4)]


def optimizer_of(name, network, groups=False):
    case = SimpleNamespace(loss="ce", factor=1.0, optimizer=name, level="O0", rates="fixed", groups=groups)
    return build_optimizer(case, network.trainable_params())


def plain_update(network, optimizer):
    """An update by MindSpore alone, compiled anew."""
    grad_fn = ms.value_and_grad(mean_loss(network), None, optimizer.parameters)

    @ms.jit
    def update(x, y):
        loss, gradients = grad_fn(x, y)
        return ops.depend(loss, optimizer(gradients))

    return update


@pytest.mark.parametrize(("way", "name", "groups", "accumulate_step"), [
    pytest.param("graph", "mint.SGD", False, 1, marks=pytest.mark.slow),
    pytest.param("jit", "nn.Momentum", True, 2, marks=pytest.mark.slow),
    ("pynative", "optim.AdamW", True, 2), ("eager", "nn.Momentum", True, 2)])
def test_a_rate_that_is_set_in_mid_training_is_the_one_of_the_next_update(way, name, groups, accumulate_step):
    """Against MindSpore alone, whose rate is assigned before a new graph is compiled. Control: the rate of before."""
    with running("pynative" if way == "eager" else way):
        network = MLP()
        step = make_train_step(mean_loss(network), optimizer_of(name, network, groups), accumulate_step,
                               eager=way == "eager")
        first = step.learning_rate
        assert isinstance(first, tuple) is groups
        for place, batch in enumerate(DATA[:3]):
            if place == 1:
                step.learning_rate = tuple(0.3 * rate for rate in first) if groups else 0.3 * first
                assert step.learning_rate == pytest.approx(np.multiply(first, 0.3).tolist(), rel=1e-6)
            for _ in range(accumulate_step):  # the same microbatch again: its gradient is the window's
                step(*batch)
        off, control = (relative(values(network.trainable_params()), plain(name, groups, way, factor))
                        for factor in (0.3, 1.0))
    assert off < 1e-5
    assert control > 0.01
    if groups:  # one number for all
        step.learning_rate = 0.125
        assert step.learning_rate == (0.125, 0.125)


def plain(name, groups, way, factor):
    """The parameters after three updates by MindSpore alone; after the first, the rate is multiplied."""
    network = MLP()
    optimizer = optimizer_of(name, network, groups)
    if factor != 1.0:
        plain_update(network, optimizer)(*DATA[0])
        multiply_rates(optimizer, factor)
    update = plain_update(network, optimizer)
    for batch in DATA[factor != 1.0:3]:
        update(*batch)
    return values(network.trainable_params())


SCHEDULES = {
    "list of rates": lambda weights: nn.SGD(weights, [0.5, 0.25, 0.125, 0.0625]),
    "CosineDecayLR": lambda weights: nn.SGD(
        [{"params": weights[:1], "lr": nn.CosineDecayLR(0.1, 0.5, 3)}, {"params": weights[1:], "lr": 0.25}], 0.5)}


@pytest.mark.parametrize("kind", SCHEDULES)
def test_the_rate_of_a_schedule_is_that_of_the_next_update_and_cannot_be_set(kind):
    """As the change of a parameter shows. Control: the rate of the last update."""
    network = MLP()
    weight = network.first.weight
    with running("pynative"):
        step = make_train_step(mean_loss(network), SCHEDULES[kind](network.trainable_params()), 1)
        for batch in DATA[:3]:
            gradient = ms.grad(mean_loss(network), None, [weight])(*batch)[0].asnumpy().copy()
            rate, before = np.ravel(step.learning_rate)[0], weight.asnumpy().copy()
            step(*batch)
            assert np.linalg.norm(before - weight.asnumpy()) == pytest.approx(rate * np.linalg.norm(gradient), rel=1e-3)
            assert np.ravel(step.learning_rate)[0] < 0.9 * rate
        before = step.learning_rate
        with pytest.raises(ValueError, match=rf"rate of SGD is a {kind}, which .* learning_rate=0\.\d+, and set that"):
            step.learning_rate = 0.1
        assert step.learning_rate == before


@pytest.mark.usefixtures("uncompiled")
def test_what_a_script_puts_into_param_groups_is_an_error_that_names_learning_rate():
    """At the next epoch and flush. Control: a rate that is set there by `learning_rate`."""
    network = MLP()
    optimizer = optim.SGD(network.trainable_params(), lr=0.1)
    step = make_train_step(mean_loss(network), optimizer, 2)
    step.learning_rate = 0.2
    assert len(list(step.epoch(DATA))) == 4
    optimizer.param_groups[0]["weight_decay"] = 0.5
    for refused in (lambda: next(step.epoch(DATA)), step.flush):
        with pytest.raises(RuntimeError, match=r"param_groups was given another weight_decay, .*step\.learning_rate"):
            refused()


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize(("rate", "error", "message"), [
    (-1.0, ValueError, r"learning_rate is -1\.0, expected a finite number >= 0"),
    (float("nan"), ValueError, "expected a finite number"), ("0.1", TypeError, "'0.1' of type str, expected a finite"),
    ((0.1, 0.2, 0.3), ValueError, "is 3 numbers, expected one for each of the 2 rates of SGD, or one number for all"),
    ((0.1, None), TypeError, "learning_rate is None")])
def test_what_is_no_rate_is_an_error_before_anything_is_set(rate, error, message):
    network = MLP()
    weights = network.trainable_params()
    optimizer = optim.SGD([{"params": weights[:1], "lr": 0.5}, {"params": weights[1:]}], lr=0.25)
    step = make_train_step(mean_loss(network), optimizer, 2)
    with pytest.raises(error, match=message):
        step.learning_rate = rate
    assert step.learning_rate == (0.5, 0.25)
