"""The learning rate of the next update: read and set. Rates of other optimizers are set in test_differential.py."""
import warnings
from types import SimpleNamespace

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, mint, nn, ops
from mindspore.experimental import optim
from support.differential.optimizers import build_optimizer, multiply_rates
from support.modes import recorded_warnings, running

from ms_accum import TrainOneStepCell, load_checkpoint, make_train_step, save_checkpoint
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
    r"schedule \(ExponentialDecayLR\)": lambda weights: nn.SGD(weights, nn.ExponentialDecayLR(0.5, 0.5, 1)),
    r"schedule \(CosineDecayLR\)": lambda weights: nn.SGD(
        [{"params": weights[:1], "lr": nn.CosineDecayLR(0.1, 0.5, 3)}, {"params": weights[1:], "lr": 0.25}], 0.5)}


@pytest.mark.parametrize(("mode", "kind"), [
    *(("pynative", kind) for kind in SCHEDULES), ("graph", r"schedule \(CosineDecayLR\)")])
def test_the_rate_of_a_schedule_a_list_and_groups_is_that_of_the_next_update(mode, kind):
    """As the change of a parameter shows. Control: the rate of the last update. It cannot be set, and the error says
    what can be done."""
    network = MLP()
    weight = network.first.weight
    step = make_train_step(mean_loss(network), SCHEDULES[kind](network.trainable_params()), 1)
    for batch in DATA[:3]:
        with running("pynative"):
            gradient = ms.grad(mean_loss(network), None, [weight])(*batch)[0].asnumpy().copy()
        with running(mode):
            rate, before = np.ravel(step.learning_rate)[0], weight.asnumpy().copy()
            step(*batch)
            assert np.linalg.norm(before - weight.asnumpy()) == pytest.approx(rate * np.linalg.norm(gradient), rel=1e-3)
            assert np.ravel(step.learning_rate)[0] < 0.9 * rate
    before = step.learning_rate
    with pytest.raises(ValueError, match=rf"rate of SGD is a {kind}: each .* learning_rate=0\.\d+, and set that"
                                         "; or save_checkpoint, .* another schedule or list, and load_check"):
        step.learning_rate = 0.1
    assert step.learning_rate == before


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize("way", ["step", "graph", "eager", "cell", "cell in a graph"])
@pytest.mark.parametrize("option", ["lr", "weight_decay", "lr_decay"])
def test_what_a_script_puts_into_param_groups_counts_as_in_pytorch(option, way, tmp_path):
    """Against MindSpore alone, op by op. Control: what it was before. A group that is added is refused."""
    values_of = {"lr": (0.1, 0.05, 0.02), "weight_decay": (0.0, 0.5, 0.1), "lr_decay": (0.0, 1.0, 0.5)}[option]

    def build():
        network = MLP()
        return network, (optim.Adagrad if option == "lr_decay" else optim.SGD)(network.trainable_params(), lr=0.1)

    def plain(changes):
        network, optimizer = build()
        grad_fn = ms.value_and_grad(mean_loss(network), None, optimizer.parameters)
        for value, batch in zip(values_of, DATA):
            if changes:
                optimizer.param_groups[0][option] = value
            optimizer(grad_fn(*batch)[1])
        return values(network.trainable_params())

    expected, control = plain(True), plain(False)
    with running("graph" if "graph" in way else "pynative"):
        network, optimizer = build()
        if "cell" in way:
            step = TrainOneStepCell(nn.WithLossCell(network, nn.CrossEntropyLoss()), optimizer, 2)
        else:
            step = make_train_step(mean_loss(network), optimizer, 2, eager=way == "eager")
        for value, batch in zip(values_of, DATA):
            optimizer.param_groups[0][option] = value
            for _ in range(2):
                step(*batch)
        assert relative(values(network.trainable_params()), expected) < 1e-5
        assert relative(values(network.trainable_params()), control) > 1e-3
        if option == "lr" and "cell" not in way:
            optimizer.param_groups[0]["lr"] = 0.25
            save_checkpoint(tmp_path / "a.safetensors", network, step)
            assert step.learning_rate == 0.25
            network, optimizer = build()
            step = make_train_step(mean_loss(network), optimizer, 2, eager=way == "eager")
            with warnings.catch_warnings():
                warnings.simplefilter("error")  # the script gave both the rate 0.1
                load_checkpoint(tmp_path / "a.safetensors", network, step)
            assert step.learning_rate == 0.25
            step.learning_rate *= 2
            assert step.learning_rate == 0.5
        optimizer.add_param_group({"params": [ms.Parameter(Tensor([1.0]), name="more")]})
        with pytest.raises(ValueError, match=r"^a group of parameters was added to the optimizer"):
            step(*DATA[0])


def test_a_rate_put_into_param_groups_of_an_optimizer_whose_graphs_hold_a_number():
    """`mint.optim.SGD` in a graph. Control: the rate before."""
    with running("graph"):
        network = MLP()
        optimizer = mint.optim.SGD(network.trainable_params(), lr=0.1)
        step, moved = make_train_step(mean_loss(network), optimizer, 1), []
        for rate in (0.1, 0.05):
            optimizer.param_groups[0]["lr"] = rate
            before = values(network.trainable_params())
            step(*DATA[0])
            after = values(network.trainable_params())
            moved.append(max(np.abs(one - other).max() for one, other in zip(after, before)))
            assert step.learning_rate == rate
        assert moved[1] < 0.7 * moved[0]


class Masked(nn.Cell):
    """The loss depends only on which inputs a Dropout keeps."""

    def __init__(self):
        super().__init__()
        self.dense, self.dropout = nn.Dense(6, 1), nn.Dropout(p=0.5)
        self.factors = Tensor(np.random.default_rng(0).random((8, 6)), ms.float32)

    def construct(self, x):
        return (self.dropout(x) * self.factors).mean() + 0.0 * self.dense(x).mean()


@pytest.mark.parametrize("way", ["step", "cell"])
@pytest.mark.parametrize("length", [1, 2])
def test_dropout_goes_on_where_an_option_of_the_optimizer_changes(way, length):
    """The masks of windows differ. In a cell they repeat, and a warning says so. Control: nothing is changed.

    The first change of a step with windows of one microbatch compiles another graph, once.
    """
    x = Tensor(np.ones((8, 6)), ms.float32)
    for changes in (True, False):
        ms.set_seed(3)
        network, losses = Masked().set_train(), []
        optimizer = optim.SGD(network.trainable_params(), 0.1)
        with running("graph"), recorded_warnings() as caught:
            step = (make_train_step if way == "step" else TrainOneStepCell)(network, optimizer, length)
            for i in range(4):
                optimizer.param_groups[0]["weight_decay"] = 0.1 * i * changes
                losses.append([float(step(x)) for _ in range(length)])
        repeats = changes and way == "cell"
        once = changes and way == "step" and length == 1
        assert [losses[0] == later for later in losses[1:]] == [repeats or once, repeats, repeats]
        said = [str(each.message) for each in caught if "param_groups" in str(each.message)]
        assert [text.partition(",")[0] for text in said] == 3 * repeats * [
            "an option in the optimizer's param_groups was changed"]


@pytest.mark.parametrize("by", ["step", "groups", "load"])
def test_two_steps_share_an_optimizer_whose_graphs_hold_a_number(by, tmp_path):
    """A rate that one of them sets, or loads, counts for the other. Control: the rate before."""
    with running("graph"):
        network = MLP()
        optimizer = mint.optim.SGD(network.trainable_params(), lr=0.5)
        one, other = (make_train_step(mean_loss(network), optimizer, 1) for _ in range(2))

        def moved():
            before = values(network.trainable_params())
            other(*DATA[0])
            return max(np.abs(x - y).max() for x, y in zip(before, values(network.trainable_params())))

        one(*DATA[0])
        before = moved()
        if by == "groups":
            optimizer.param_groups[0]["lr"] = 0.05
            one(*DATA[0])
        else:
            one.learning_rate = 0.05
        if by == "load":  # into a network and steps whose graphs hold 0.5
            save_checkpoint(tmp_path / "run.safetensors", network, one)
            network = MLP()
            optimizer = mint.optim.SGD(network.trainable_params(), lr=0.5)
            one, other = (make_train_step(mean_loss(network), optimizer, 1) for _ in range(2))
            one(*DATA[0])
            before = moved()
            load_checkpoint(tmp_path / "run.safetensors", network, one)
        assert other.learning_rate == pytest.approx(0.05)
        assert moved() < 0.2 * before


def test_a_list_that_is_used_up_has_no_rate():
    network = MLP()
    step = make_train_step(mean_loss(network), nn.SGD(network.trainable_params(), [0.5, 0.1]), 1)
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


@pytest.mark.slow
def test_a_rate_that_was_set_is_part_of_a_checkpoint(tmp_path):
    """Also where graphs hold it as a constant. Control: a run without the file."""
    def built(seed=0):
        network = MLP(seed=seed)
        return network, make_train_step(mean_loss(network), mint.optim.SGD(network.trainable_params(), 0.5), 1)

    ends = []
    for stops in (False, True):
        network, step = built()
        with running("pynative"):
            step(*DATA[0])
            step.learning_rate *= 0.1
        with running("jit"):
            if stops:
                save_checkpoint(tmp_path / "run.safetensors", network, step)
                network, step = built(seed=1)
                step(*DATA[0])  # compiled with 0.5
                load_checkpoint(tmp_path / "run.safetensors", network, step)
            assert step.learning_rate == pytest.approx(0.05)
            for batch in DATA[:2]:
                step(*batch)
        ends.append(values(network.trainable_params()))
    assert relative(*ends) < 1e-6
    assert relative(values(MLP().trainable_params()), ends[0]) > 1e-3
