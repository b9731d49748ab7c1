"""The learning rate of the next update: read and set, for each optimizer of MindSpore that runs on CPU."""
from functools import partial
from itertools import product
from types import SimpleNamespace

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, mint, nn, ops
from mindspore.experimental import optim
from support.differential.optimizers import COMPILED_ONLY, OPTIMIZERS, SCALE_FREE, build_optimizer
from support.modes import running

from ms_accum import load_checkpoint, make_train_step, save_checkpoint
from ms_accum.selftest.comparing import relative, values
from ms_accum.selftest.networks import MLP, batches, mean_loss, tensors

pytestmark = pytest.mark.core

DATA = [tensors(x, y) for x, y in batches([6, 4, 5, 6])]
FAST = {("graph", "mint.SGD"), ("graph", "nn.AdamWeightDecay"), ("pynative", "optim.AdamW"), ("eager", "nn.Momentum")}


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


def assign_by_hand(optimizer, factor):
    """What MindSpore offers: another way for each kind."""
    groups = getattr(optimizer, "param_groups", None)
    rates = optimizer.learning_rate if groups is None else [group["lr"] for group in groups]
    for rate in {id(rate): rate for rate in (rates if isinstance(rates, (list, tuple)) else [rates])}.values():
        ops.assign(rate, Tensor(float(rate) * factor, ms.float32))
    for group in groups or ():
        if "lr_float" in group:
            group["lr_float"] *= factor


def named(way, name):
    return pytest.param(way, name, marks=[] if (way, name) in FAST else [pytest.mark.slow])


@pytest.mark.parametrize(("way", "name"), [
    named(way, name) for way, name in product(("graph", "pynative", "eager"), OPTIMIZERS)
    if way == "graph" or name not in COMPILED_ONLY])
def test_a_rate_that_is_set_in_mid_training_is_the_one_of_the_next_update(way, name):
    """Against MindSpore alone, whose rate is assigned before a new graph is compiled; also with groups. Windows of one
    and of two. Control: the rate of before.
    """
    mode = "pynative" if way == "eager" else way
    for groups, accumulate_step in ((False, 1), (name != "nn.AdaFactor", 2)):
        ends = []
        with running(mode):
            for changes in (True, False):
                network = MLP()
                step = make_train_step(mean_loss(network), optimizer_of(name, network, groups), accumulate_step,
                                       eager=way == "eager")
                first = step.learning_rate
                assert isinstance(first, tuple) is groups
                for place, batch in enumerate(DATA[:3]):
                    if changes and place == 1:
                        step.learning_rate = tuple(0.3 * rate for rate in first) if groups else 0.3 * first
                        assert step.learning_rate == pytest.approx(np.multiply(first, 0.3).tolist(), rel=1e-6)
                    for _ in range(accumulate_step):  # the same microbatch again: its gradient is the window's
                        step(*batch)
                ends.append(values(network.trainable_params()))
            network = MLP()
            start, optimizer = values(network.trainable_params()), optimizer_of(name, network, groups)
            plain_update(network, optimizer)(*DATA[0])
            assign_by_hand(optimizer, 0.3)
            update = plain_update(network, optimizer)
            for batch in DATA[1:3]:
                update(*batch)
        motion = [one - other for one, other in zip(values(network.trainable_params()), start)]
        off, control = (relative([one - other for one, other in zip(end, start)], motion) for end in ends)
        assert off < 1e-5
        assert control > 0.05 or name in SCALE_FREE
        if groups:  # one number for all
            step.learning_rate = 0.125
            assert step.learning_rate == (0.125, 0.125)


@pytest.mark.parametrize("mode", ["graph", "pynative"])
def test_the_rate_of_a_schedule_a_list_and_groups_is_that_of_the_next_update(mode):
    """As the change of a parameter shows. Control: the rate of the last update. It cannot be set, and the error says
    what can be done."""
    schedules = {
        "list of rates": lambda weights: nn.SGD(weights, [0.5, 0.25, 0.125, 0.0625]),
        r"schedule \(ExponentialDecayLR\)": lambda weights: nn.SGD(weights, nn.ExponentialDecayLR(0.5, 0.5, 1)),
        r"schedule \(CosineDecayLR\)": lambda weights: nn.SGD(
            [{"params": weights[:1], "lr": nn.CosineDecayLR(0.1, 0.5, 3)}, {"params": weights[1:], "lr": 0.25}], 0.5)}
    with running(mode):
        for kind, build in schedules.items():
            network = MLP()
            step = make_train_step(mean_loss(network), build(network.trainable_params()), 1)
            for batch in DATA[:3]:
                rate, weight = np.ravel(step.learning_rate)[0], network.first.weight
                before = weight.asnumpy().copy()
                gradient = ms.grad(mean_loss(network), None, [weight])(*batch)[0].asnumpy().copy()
                step(*batch)
                assert np.linalg.norm(before - weight.asnumpy()) == pytest.approx(
                    rate * np.linalg.norm(gradient), rel=1e-3)
                assert np.ravel(step.learning_rate)[0] < 0.9 * rate
            before = step.learning_rate
            with pytest.raises(ValueError, match=rf"rate of SGD is a {kind}: each .* learning_rate=0\.\d+, and set that"
                                                 "; or save_checkpoint, .* another schedule or list, and load_check"):
                step.learning_rate = 0.1
            assert step.learning_rate == before
        step = make_train_step(mean_loss(network), nn.SGD(network.trainable_params(), [0.5, 0.1]), 1)
        assert step.learning_rate == 0.5
        for batch in DATA[:2]:
            step(*batch)
        assert np.isnan(step.learning_rate)  # there is no next update


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize(("rate", "error", "message"), [
    (-1.0, ValueError, r"learning_rate is -1\.0, expected a finite number >= 0"),
    (float("nan"), ValueError, "expected a finite number"), (float("inf"), ValueError, "expected a finite number"),
    ("0.1", TypeError, "learning_rate is '0.1' of type str, expected a finite number >= 0"),
    ((0.1, 0.2, 0.3), ValueError, "is 3 numbers, expected one for each of the 2 rates of SGD, or one number for all"),
    ((0.1, None), TypeError, "learning_rate is None")])
def test_what_is_no_rate_is_refused_before_anything_is_set(rate, error, message):
    network = MLP()
    weights = network.trainable_params()
    optimizer = optim.SGD([{"params": weights[:1], "lr": 0.5}, {"params": weights[1:]}], lr=0.25)
    step = make_train_step(mean_loss(network), optimizer, 2)
    with pytest.raises(error, match=message):
        step.learning_rate = rate
    assert step.learning_rate == (0.5, 0.25)


@pytest.mark.usefixtures("uncompiled")
def test_an_optimizer_without_a_known_rate_says_so():
    class Own(nn.Cell):
        def __init__(self, parameters):
            super().__init__()
            self.parameters = ms.ParameterTuple(parameters)

        def construct(self, gradients):
            return True

    network = MLP()
    optimizer = Own(network.trainable_params())
    step = make_train_step(mean_loss(network), optimizer, 1)
    for use in (lambda: step.learning_rate, lambda: setattr(step, "learning_rate", 0.1)):
        with pytest.raises(ValueError, match="Own has no learning rate that can be read"):
            use()
    optimizer.learning_rate = 0.1
    assert step.learning_rate == 0.1
    with pytest.raises(ValueError, match="rate of Own is no Parameter, so compiled graphs keep it; make it a Param"):
        step.learning_rate = 0.2
    assert step.learning_rate == 0.1
    optimizer.learning_rate = ms.Parameter(Tensor(0.1), name="own_rate")
    step.learning_rate = 0.2
    assert step.learning_rate == 0.2  # as it was given, though it is a float32


@pytest.mark.parametrize("build", [
    pytest.param(partial(nn.Momentum, momentum=0.9), marks=pytest.mark.slow),
    pytest.param(optim.AdamW, marks=pytest.mark.slow), mint.optim.SGD])
def test_a_rate_that_was_set_is_part_of_a_checkpoint(build, tmp_path):
    """In the middle of a window. Control: a run without the file."""
    with running("jit"):
        ends = []
        for stops in (False, True):
            network = MLP()
            step = make_train_step(mean_loss(network), build(network.trainable_params(), 0.5), 2)
            for place, batch in enumerate(DATA):
                if place == 1:
                    step.learning_rate *= 0.1
                if place == 1 and stops:
                    save_checkpoint(tmp_path / "run.safetensors", network, step)
                    network = MLP(seed=1)
                    step = make_train_step(mean_loss(network), build(network.trainable_params(), 0.5), 2)
                    assert step.learning_rate == 0.5
                    step(*batch)
                    step(*batch)  # graphs are compiled
                    load_checkpoint(tmp_path / "run.safetensors", network, step)
                assert step.learning_rate == pytest.approx(0.05 if place else 0.5)
                step(*batch)
            ends.append(values(network.trainable_params()))
        assert relative(*ends) < 1e-6
        assert step.status().update_step == 2
        assert relative(values(MLP().trainable_params()), ends[0]) > 1e-3
