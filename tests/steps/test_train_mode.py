"""Training mode: a warning of a network in evaluation mode, and graphs of the mode that the network is in."""
from functools import partial
from weakref import ref

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, mint, nn
from support.modes import compiled_graphs, recorded_warnings, running
from support.training import LOSS, sgd

from ms_accum import TrainOneStepCell, make_grad_cache_step, make_train_step
from ms_accum.selftest.networks import MLP, mean_loss, tensors
from ms_accum.steps.train_mode import TrainMode, networks_of

BATCH = tensors(np.random.default_rng(0).normal(size=(6, 6)), np.arange(6) % 3)


def with_layer(layer):
    weights = Tensor(np.linspace(-1, 1, 9, dtype=np.float32).reshape(3, 3))
    return nn.SequentialCell(MLP(hidden=3), layer, nn.Dense(3, 3, weight_init=weights, bias_init="zeros"))


def cell_call(network, optimizer, **options):
    return TrainOneStepCell(nn.WithLossCell(network, LOSS), optimizer, 1, **options)


def step_call(network, optimizer, **options):
    return make_train_step(mean_loss(network), optimizer, 1, **options)


def of_a_cell(network, optimizer):
    return make_train_step(nn.WithLossCell(network, LOSS), optimizer, 1)


def cached(network, optimizer):
    def loss_fn(representations):
        return (representations ** 2).mean()

    def encode(x, y):
        return network(x)
    return make_grad_cache_step(encode, loss_fn, optimizer, 1, pieces=2)


DRIVERS = [step_call, of_a_cell, cached, cell_call]


@pytest.mark.parametrize(("layer", "name"), [
    (nn.BatchNorm1d(3), "1 (BatchNorm1d)"), (mint.nn.BatchNorm1d(3), "1 (BatchNorm1d)"),
    (nn.Dropout(p=0.5), "1 (Dropout)")])
@pytest.mark.parametrize("driver", DRIVERS)
@pytest.mark.filterwarnings("error:.*is in evaluation mode")
def test_evaluation_mode_is_warned_of_before_anything_is_compiled(driver, layer, name):
    """By each driver. Here the warning is an error, behind which nothing runs."""
    network = with_layer(layer).set_train(False)
    step, graphs = driver(network, sgd(network)), compiled_graphs()
    with pytest.raises(UserWarning) as warned:
        step(*BATCH)
    assert f"is in evaluation mode, so its layer {name}" in str(warned.value).replace("_backbone.", "")
    assert compiled_graphs() == graphs


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize("driver", [step_call, of_a_cell, cell_call])
def test_a_network_that_stays_in_evaluation_mode_after_an_evaluation_is_warned_of_once(driver):
    """As when `set_train()` is forgotten after it, also where a Cell with the loss stays in training mode, as it does
    in a `Model`. Control: in training mode, and at a second call, nothing is said."""
    network = with_layer(nn.BatchNorm1d(3)).set_train()
    step, said = driver(network, sgd(network)), []
    if driver is cell_call:
        step.set_train()
    for mode in (True, True, False, False, True, False):
        network.set_train(mode)
        with recorded_warnings() as caught:
            step(*BATCH)
        said.append(sum("is in evaluation mode" in str(one.message) for one in caught))
    assert said == [0, 0, 1, 0, 0, 0]


class Normed(nn.Cell):
    """A network whose BatchNorm uses the batch in training, and its statistics in evaluation."""

    def __init__(self):
        super().__init__()
        self.dense, self.norm = nn.Dense(6, 3), nn.BatchNorm1d(3)

    def construct(self, x):
        return self.norm(self.dense(x))


@pytest.mark.parametrize(("driver", "way"), [
    (step_call, "pynative"), (cached, "pynative"), (cell_call, "pynative"),
    *(pytest.param(driver, way, marks=pytest.mark.slow) for driver, way in (
        (step_call, "jit"), (cell_call, "graph"), (cached, "jit")))])
@pytest.mark.filterwarnings("ignore:.*is in evaluation mode")
def test_a_mode_that_changes_between_calls_counts(driver, way):
    """Control: the two modes differ."""
    network = Normed()
    with running(way):
        step, found = driver(network, nn.SGD(network.trainable_params(), 0.0)), []
        for mode in (True, False, True):
            network.set_train(mode)
            found.append(float(step(*BATCH)))
    assert abs(found[0] - found[1]) > 1e-2
    assert found[2] == pytest.approx(found[0], rel=1e-4)


NETWORK = MLP()


def in_a_global(x):
    return NETWORK(x).mean()


def in_an_argument(network, x):
    return network(x).mean()


class Trainer:
    def __init__(self, network):
        self.network = network

    def forward_fn(self, x):
        return self.network(x).mean()

    def __call__(self, x):
        return self.network(x).mean()


network = MLP()  # no method of Trainer means this one


def by_a_default(given):
    def forward_fn(x, network=given):
        return network(x).mean()

    return forward_fn


@pytest.mark.parametrize("use", [
    mean_loss, lambda network: in_a_global, lambda network: partial(mean_loss(network), y=None),
    lambda network: ms.jit(mean_loss(network)), lambda network: partial(in_an_argument, network), by_a_default,
    lambda network: network, lambda network: network.construct, lambda network: Trainer(network).forward_fn, Trainer],
    ids=["closure", "global", "partial", "jit", "argument", "default", "cell", "method", "trainer", "object"])
def test_a_network_that_a_function_names_is_found(use):
    """An optimizer of another network with the same names is an error."""
    function, other = use(NETWORK), MLP()
    assert NETWORK in networks_of([function])
    TrainMode((function,), NETWORK.trainable_params())
    with pytest.raises(ValueError, match=r"called first\.weight, but the network has a different .*built again .*, b"):
        TrainMode((function,), other.trainable_params())


def trained_by_a_helper(network):
    """A function that names no network itself."""
    hidden = ref(network)
    return lambda x, y: LOSS(hidden()(x), y)


@pytest.mark.usefixtures("uncompiled")
def test_evaluate_asks_for_a_network_that_the_function_does_not_name():
    """Training works. Control: with `network=`, also of several Cells, Dropout is off in `evaluate`."""
    network = with_layer(nn.Dropout(p=0.9)).set_train()
    options = {"optimizer": sgd(network), "accumulate_step": 1, "eager": True}
    step = make_train_step(trained_by_a_helper(network), **options)
    step(*BATCH)
    with pytest.raises(ValueError, match=r"^no network that holds \S+ was found in what <lambda> names, .* network="):
        step.evaluate([BATCH])
    for given in (network, tuple(network)):
        step = make_train_step(trained_by_a_helper(network), **options, network=given)
        assert step.evaluate([BATCH]) == step.evaluate([BATCH])
        assert network[1].training
    with pytest.raises(TypeError, match=r"^network is of type list, expected a Cell or a tuple of Cells; give the"):
        make_train_step(trained_by_a_helper(network), **options, network=[network])


def foreign(network):
    """An optimizer of another network, whose parameters have other names."""
    other = nn.SequentialCell(nn.Dense(6, 3), nn.Dense(3, 2))
    return other, nn.SGD(other.trainable_params(), 0.1)


FOREIGN = {
    "step": lambda network, optimizer: make_train_step(mean_loss(network), optimizer, 2),
    "eager": lambda network, optimizer: make_train_step(mean_loss(network), optimizer, 2, eager=True),
    "cell": lambda network, optimizer: TrainOneStepCell(nn.WithLossCell(network, LOSS), optimizer, 2),
}


@pytest.mark.parametrize("driver", FOREIGN)
def test_an_optimizer_of_another_network_is_an_error_before_anything_is_compiled(driver):
    """Control: not if the function also uses the optimizer's network, or only other networks that are frozen."""
    network = MLP()
    other, optimizer = foreign(network)
    step, graphs = FOREIGN[driver](network, optimizer), compiled_graphs()
    with pytest.raises(ValueError, match=(
            r"^the optimizer updates 0\.weight and others, expected parameters of a network that \w+ names \(found: \w+"
            r"\): all gradients would be 0; build the optimizer from the parameters of that network")):
        step(*BATCH)
    assert compiled_graphs() == graphs
    FOREIGN[driver](network, sgd(network))(*BATCH)
    both = nn.CellList([network, other])
    made = make_train_step(lambda x, y: LOSS(both[0](x), y) + both[1](x).mean(), optimizer, 2, eager=True)
    made(*BATCH)


def test_an_evaluation_that_fails_leaves_the_graphs_of_the_training(mode_named):
    """Otherwise, Dropout would draw its first masks again. Control: the evaluation itself is compiled again."""
    mode_named("jit")
    network = nn.Dense(6, 3)

    def forward_fn(x, y):
        return LOSS(network(x), y)

    step = make_train_step(forward_fn, sgd(network), 2)
    step(*BATCH)
    step(*BATCH)
    good = step.evaluate([BATCH])
    with pytest.raises(ValueError, match=r"Dense|MatMul|forward_fn"):
        step.evaluate([tensors(np.ones((6, 5), np.float32), np.arange(6) % 3)])
    before = compiled_graphs()
    step(*BATCH)
    step(*BATCH)
    assert compiled_graphs() == before
    assert step.evaluate([BATCH]) < good
    assert compiled_graphs() == before + 1
