"""Accumulator by hand: odd values, the tutorial's script, and its state. Calls in any order: test_machine.py."""
import gc
import json
import re
from pathlib import Path

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn, ops
from support import reference
from support.modes import compiled, warned
from support.training import sgd

from ms_accum import Accumulator, DataParallel
from ms_accum.selftest.comparing import difference, values
from ms_accum.selftest.networks import MLP, batches, mean_loss, tensors

pytestmark = pytest.mark.core

NAN = float("nan")
SHAPES = ((2, 3), (2, 4))


def gradients(value):
    return tuple([Tensor(np.full(shape, value), ms.float32) for shape in SHAPES])


def descend(accumulate_step=2, clip_norm=None, **options):
    """An accumulator whose parameters are minus the sum of all gradients that its optimizer got."""
    parameters = [Parameter(Tensor(np.zeros(shape), ms.float32), f"p{i}") for i, shape in enumerate(SHAPES)]
    return Accumulator(nn.SGD(parameters, 1.0), accumulate_step, clip_norm, **{"reduction": "sum", **options})


@pytest.mark.parametrize(("policy", "calls", "applied"), [
    *[("apply", [(1, 2), (4, weight)], NAN) for weight in (-0.25, NAN)],  # a graph cannot refuse a value: it shows
    ("apply", [(NAN, 1), (4, 1)], NAN), ("apply", [(1, 0), (4, 0)], 0),
    # the gradient of a mean over no token is 0/0
    *[(policy, [(NAN, 0), (4, 1)], 4) for policy in ("apply", "skip_microbatch", "skip_window")],
    ("skip_microbatch", [(1e30, 1), (1e30, 1)], 2e30),  # their squares overflow
])
def test_values_that_a_graph_cannot_refuse(policy, calls, applied):
    accumulator = descend(2, on_nonfinite=policy)
    assert [bool(accumulator(gradients(value), Tensor(float(weight)))) for value, weight in calls] == [False, True]
    assert int(accumulator.skipped) == 0
    for p in values(accumulator.optimizer.parameters):
        np.testing.assert_allclose(p, np.full(p.shape, -applied), rtol=1e-6)


# --- drop-in ----------------------------------------------------------------------------------------------------------


def tutorial_script(mode, network, accumulate_step, digits):
    """Run the tutorial's lines, unchanged but for the network; yield the parameters after each microbatch."""
    loss_fn = nn.CrossEntropyLoss()
    optimizer = nn.SGD(network.trainable_params(), 0.1)
    accumulator = Accumulator(optimizer, accumulate_step, reduction="sum")

    def forward_fn(data, label):
        logits = network(data)
        loss = loss_fn(logits, label)
        return loss / accumulate_step

    grad_fn = ms.value_and_grad(forward_fn, None, network.trainable_params())

    def train_step(data, label):
        loss, grads = grad_fn(data, label)
        accumulator(grads)
        return loss

    train_step = compiled(train_step, mode)
    for data, label in digits:
        train_step(*tensors(data, label))
        yield values(network.trainable_params())


def test_the_tutorials_script_runs_unchanged(mode, capfd):
    """And without a warning of MindSpore."""
    network, digits, moved = MLP(), batches([8] * 22), []
    previous = values(network.trainable_params())
    oracle = reference.Accumulation(previous, reference.SGD(0.1), 4)
    for (x, y), after in zip(digits, tutorial_script(mode, network, 4, digits)):
        oracle([g / 4 for g in reference.loss_and_gradients(oracle.parameters, x, y)[1]])
        assert difference(after, oracle.parameters) <= 1e-5
        moved.append(difference(after, previous) > 1e-3)
        previous = after
    assert moved == [i % 4 == 3 for i in range(22)]  # the control: a window of 2 would move at other places
    assert warned(capfd) == []


def article(mode, divisor, rows):
    """The weights after two epochs of the published experiment, as two microbatches each; the loss is a sum."""
    network = nn.Dense(8, 1, weight_init="ones", has_bias=False)
    accumulator = Accumulator(nn.SGD(network.trainable_params(), 0.01, 0.9), 2, reduction="sum")

    def forward_fn(x):
        return network(x).sum() / divisor

    grad_fn = ms.grad(forward_fn, None, accumulator.optimizer.parameters)

    def step(x):
        return accumulator(grad_fn(x))

    step = compiled(step, mode)
    assert [bool(step(Tensor(part))) for part in [rows[0::2], rows[1::2]] * 2] == [False, True] * 2
    return network.weight.asnumpy().reshape(-1)


def test_the_published_experiment(mode):
    published = json.loads((Path(__file__).parents[1] / "support" / "article_rand8x8.json").read_text(encoding="utf-8"))
    rows = np.array(published["rows"], np.float32)
    weights = article(mode, 2, rows)
    np.testing.assert_allclose(weights, published["pytorch_weights"], rtol=1e-6)
    np.testing.assert_allclose(weights, published["published_weights"], atol=5.1e-5)
    assert abs(article("pynative", 1, rows) - weights).max() > 1e-2  # the control: a loss that is not divided


def test_a_call_closes_what_add_has_filled_in_each_mode(mode):
    """One that a user lets grow beyond its length. Control: a call of its own closes each window of two."""
    accumulator = descend(2)

    def three(a, b, c):
        accumulator.add(a)
        accumulator.add(b)
        return accumulator(c)

    ones = tuple(Tensor(np.ones(shape), ms.float32) for shape in SHAPES)
    closed = [bool(compiled(three, mode)(ones, ones, ones)) for _ in range(2)]
    assert (closed, int(accumulator.update_step), int(accumulator.closed_windows)) == ([True, True], 2, 2)
    assert [bool(accumulator(ones)) for _ in range(2)] == [False, True]


# --- state ------------------------------------------------------------------------------------------------------------


def test_one_buffer_for_each_parameter_and_names_that_are_unique_here_and_the_same_in_a_checkpoint():
    accumulators = [descend() for _ in range(3)]
    accumulator = accumulators[0]
    assert [b.shape for b in accumulator.window.buffers] == [*SHAPES]
    assert accumulator.window.nbytes == 14 * 4
    assert sum(p.size for p in accumulator.parameters) == 14 + 16  # fourteen scalars, and the place in an epoch
    assert not any(p.requires_grad for p in accumulator.parameters)
    assert [*accumulator.state.values()] == [*accumulator.parameters]
    open_state = {id(p) for p in accumulator.window.window_state}
    of_window = {name for name, p in accumulator.state.items() if id(p) in open_state}
    assert {"sum.p0", "sum.p1", "mini_step", "weight_sum", "weight_unit"} < of_window < {*accumulator.state}
    assert not {"update_step", "skipped", "skipped_in_row", "seen", "closed_windows"} & of_window
    assert {tuple(one.state) for one in accumulators} == {tuple(accumulator.state)}
    names = [p.name for one in accumulators for p in one.parameters]
    assert len(set(names)) == len(names)
    ops.assign(accumulator.seen, 2**40 + 1)  # where float32 cannot count on
    assert accumulator(gradients(1)).dtype == ms.bool_
    assert (accumulator.flush(), int(accumulator.seen)) == (True, 2**40 + 2)


def test_one_device_does_not_look_at_the_state_of_its_optimizer(monkeypatch):
    """Which takes seconds, and a copy, of a large one. Only ranks compare it."""
    def described(optimizer):
        raise AssertionError

    monkeypatch.setattr("ms_accum.core.accumulator.describe", described)
    assert descend().exchange.ranks == 1
    with pytest.raises(AssertionError):  # control
        descend(reducer=DataParallel())


def test_a_parameter_that_is_frozen_between_calls_raises_an_error_by_hand(mode):
    """Before anything is added, and before an update. A graph of a user's own sees it when it is compiled.

    Control: with the parameter thawed, the loop continues as one in which nothing was frozen.
    """
    ended = []
    for freezes in (False, True):
        accumulator = descend(accumulate_step=2)
        weight = accumulator.weights[0]
        add, apply = (compiled(method, mode) for method in (accumulator.add, accumulator.apply))
        if freezes:
            for method, arguments in ((add, (gradients(1),)), (apply, ())):
                weight.requires_grad = False
                with pytest.raises(ValueError, match="p0 has requires_grad=False, expected trainable parameters"):
                    method(*arguments)
                weight.requires_grad = True
                assert int(accumulator.mini_step) == int(accumulator.update_step) == 0
        add(gradients(1))
        add(gradients(2))
        apply()
        ended.append(values(accumulator.weights))
    assert difference(*ended) == 0
    assert int(accumulator.update_step) == 1


def test_print_says_where_an_accumulator_stands_but_not_while_it_is_compiled(monkeypatch):
    """MindSpore takes `str` of what a graph uses. Control: without its `__name__`, an accumulator is read then."""
    network = MLP()
    made = Accumulator(nn.SGD(network.trainable_params(), 0.1), 4, reduction="mean")
    read, said = [], Accumulator.__str__
    monkeypatch.setattr(Accumulator, "__str__", lambda self: read.append(self) or said(self))

    def compiled():
        @ms.jit
        def microbatch(x):
            gradients = ()
            for parameter in made.weights:
                gradients = (*gradients, ops.ones_like(parameter))
            return made(gradients, x.shape[0])

        microbatch(Tensor(np.ones((3, 2), np.float32)))

    compiled()
    compiled()
    assert read == []
    assert str(made) == f"{made}" == ("Accumulator(4 microbatches a window, SGD, 2 of 4 in the open window, 0 updates, "
                                      "0 of weight)")
    made.flush()
    assert str(made).endswith("0 of 4 in the open window, 1 update, 6 of weight)")


def trained_by_hand(divided, **options):
    """Parameters after four microbatches of two samples."""
    network = MLP(seed=0)
    accumulator = Accumulator(nn.SGD(network.trainable_params(), 0.1), 4, **options)
    loss = mean_loss(network)

    def forward_fn(x, y):
        return loss(x, y) / divided

    grad_fn = ms.value_and_grad(forward_fn, None, accumulator.weights)
    for x, y in batches([2] * 4):
        accumulator(grad_fn(*tensors(x, y))[1], len(x) if options["reduction"] == "mean" else 1.0)
    return values(network.trainable_params())


@pytest.mark.usefixtures("uncompiled")
def test_how_a_loss_is_divided_must_be_said():
    """The two forms train equally. Control: the wrong one makes an update four times as large."""
    start = values(MLP(seed=0).trainable_params())
    with pytest.raises(TypeError, match="reduction"):
        Accumulator(sgd(MLP()), 4)
    mean, tutorial, wrong = (trained_by_hand(4, reduction="sum"), trained_by_hand(1, reduction="mean"),
                             trained_by_hand(1, reduction="sum"))
    assert difference(mean, tutorial) < 1e-6
    moved = [[b - a for a, b in zip(start, after)] for after in (mean, wrong)]
    assert difference([4 * one for one in moved[0]], moved[1]) < 1e-5


class Counted(nn.Cell):
    """A network that holds an accumulator's counter."""

    def __init__(self, network):
        super().__init__()
        self.network = network
        self.accumulator = (Accumulator(sgd(network), 2, reduction="mean"),)
        self.updates = self.accumulator[0].update_step


def test_a_counter_in_a_network_has_one_name_in_every_process():
    """Whatever else was built. Control: beside a living accumulator of the same parameters, names have a number."""
    others = [Accumulator(sgd(nn.Dense(3, 2)), 2, reduction="mean") for _ in range(3)]
    first = Counted(MLP())
    ms.save_checkpoint(first, "counted.ckpt")
    beside = Counted(MLP())
    assert re.fullmatch(r"accumulator\d+\.update_step", beside.updates.name)
    assert len({accumulator.update_step.name for accumulator in (*others, *first.accumulator)}) == 4
    del first, beside
    gc.collect()
    others.append(Accumulator(sgd(nn.Dense(3, 2)), 2, reduction="mean"))
    network = Counted(MLP(seed=5))
    assert ms.load_param_into_net(network, ms.load_checkpoint("counted.ckpt")) == ([], [])
