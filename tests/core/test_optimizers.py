"""What an optimizer holds: its rates and its state, at any depth, also of a Cell that calls several optimizers."""
import inspect
from functools import partial

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, ParameterTuple, Tensor, mint, nn, ops
from mindspore.experimental import optim
from support.cells import Counting
from support.differential.optimizers import OPTIMIZERS
from support.processes import run_python

from ms_accum import Accumulator, make_train_step
from ms_accum.core.optimizers import Rates

pytestmark = pytest.mark.core

# Base classes, and wrappers and kernels that CPU has not (MindSpore 2.10). MindSpore 2.7 has no mint.FusedAdamW.
OUT_OF_REACH = {"nn.Optimizer", "optim.Optimizer", "nn.OptTFTWrapper", "nn.Lamb", "nn.LARS", "mint.AdamW"}


def test_no_optimizer_is_forgotten_by_the_fuzzer():
    found = {f"{module}.{name}" for module, of in (("nn", nn), ("optim", optim), ("mint", mint.optim))
             for name, made in vars(of).items()
             if inspect.isclass(made) and issubclass(made, (nn.Optimizer, optim.Optimizer))}
    assert found - {"mint.FusedAdamW"} == {*OPTIMIZERS} | OUT_OF_REACH


class Hoarder(nn.Cell):
    """An optimizer that descends by `rate`, and keeps it and others wherever Python can, without a name."""

    def __init__(self, parameters):
        super().__init__(auto_prefix=False)
        self.parameters = parameters
        self.slots = {"first": Parameter(Tensor(0.5)), "others": ({"deep": [Parameter(Tensor(2.0)), 3, None]},)}
        self.cells = [Counting(parameters)]
        self.itself = [self, self.slots, parameters]
        self.twins = [[Parameter(Tensor(1.0), name="twin")], [Parameter(Tensor(1.0), name="twin")]]

    def construct(self, grads):
        for parameter, grad in zip(self.parameters, grads):
            ops.assign_sub(parameter, self.slots["first"] * grad)
        return True


def test_state_is_found_at_any_depth_and_has_a_name_of_its_own():
    network = nn.Dense(3, 2)
    optimizer = Hoarder(network.trainable_params())
    state = Rates(optimizer).state
    assert list(state) == ["slots[first]", "slots[others][0][deep][0]", "seen.weight", "seen.bias", "calls",
                           "twins[0][0]", "twins[1][0]"]
    assert state["slots[first]"] is optimizer.slots["first"]
    assert list(Rates(optimizer).state) == list(Rates(Hoarder(network.trainable_params())).state) == list(state)


def mean_square(network):
    def forward_fn(x):
        return (network(x) ** 2).mean()

    return forward_fn


class Both(nn.Cell):
    """Two optimizers: one for matrices, one for the rest, as Muon and AdamW."""

    def __init__(self, parameters, rate=0.1):
        super().__init__(auto_prefix=False)
        self.parameters = ParameterTuple(parameters)
        self.matrices, self.others = nn.Momentum(parameters[:1], rate, 0.9), nn.Adam(parameters[1:], 0.01)

    def construct(self, gradients):
        self.matrices(gradients[:1])
        self.others(gradients[1:])
        return True


@pytest.mark.parametrize("eager", [True, False])
def test_a_composite_optimizer_trains_and_shows_its_rates(eager):
    """In a graph, two `global_step` would be an error of MindSpore. Control: each optimizer by itself."""
    x = Tensor(np.ones((4, 3), np.float32))
    ended = []
    for composite in (True, False):
        network = nn.Dense(3, 2, "ones", "zeros")
        forward_fn = mean_square(network)
        if composite:
            train_step = make_train_step(forward_fn, Both(network.trainable_params()), 2, eager=eager)
            assert train_step.learning_rate == (0.1, 0.01)
            train_step.learning_rate = (0.2, 0.02)
            assert train_step.learning_rate == (0.2, 0.02)
            for _ in range(4):
                train_step(x)
        else:
            both = nn.Momentum([network.weight], 0.2, 0.9), nn.Adam([network.bias], 0.02)
            grad_fn = ms.value_and_grad(forward_fn, None, [network.weight, network.bias])
            for _ in range(2):
                _, gradients = grad_fn(x)
                for optimizer, gradient in zip(both, gradients):
                    optimizer((gradient,))
        ended.append([p.asnumpy() for p in network.trainable_params()])
    np.testing.assert_allclose(ended[0][0], ended[1][0], rtol=1e-5)
    np.testing.assert_allclose(ended[0][1], ended[1][1], rtol=1e-5)
    assert np.abs(ended[0][0] - 1).max() > 0.1


class Plain:
    """An optimizer that is no Cell and does nothing."""

    def __init__(self, *parameters):
        self.parameters = parameters

    def __call__(self, grads):
        return True


@pytest.mark.parametrize("named", ["", "moment.{}"])
@pytest.mark.parametrize("of", ["cell", "plain"])
def test_state_of_slices_is_found_by_name_or_place(named, of):
    """Counters are not, also where a slice has one element as they have, nor state of another shape."""
    wholes = [Parameter(ops.zeros(shape), name=name) for name, shape in (
        ("weight", (4, 3)), ("first.weight", (6, 2)), ("scale", (3,)))]
    slices = [Parameter(ops.zeros(-(-p.size // 2)), name=p.name) for p in wholes]
    for made, whole in zip(slices, wholes):
        made.whole = whole
    optimizer = nn.SGD(slices, 0.1) if of == "cell" else Plain(*slices)
    optimizer.mine = [Parameter(ops.zeros(p.shape), name=named.format(p.name) or f"m{i}") for i, p in enumerate(slices)]
    if not named:
        for i, state in enumerate(optimizer.mine):
            state.name = f"Parameter${i}"  # found by its place
    optimizer.norms = [Parameter(ops.zeros(5), name=f"norm.{p.name}") for p in slices[:2]]
    rates = Rates(optimizer)
    divided = {id(rates.state[name]): whole for name, whole in rates.divided.items()}
    assert [divided.get(id(state)) for state in optimizer.mine] == wholes
    assert not {id(state) for state in optimizer.norms} & set(divided)


def odd(value=(0.0, 0.0), dtype=ms.float32, requires_grad=True):
    return Parameter(Tensor(value, dtype), name="odd", requires_grad=requires_grad)


def scaled(wrap, loss_scale=1024):
    """An optimizer that divides gradients once more, by its own loss scale."""
    return wrap(nn.Momentum(nn.Dense(3, 2).trainable_params(), 1.0, 0.9, loss_scale=loss_scale))


@pytest.mark.parametrize(("error", "message", "optimizer"), [
    *[(TypeError, r"optimizer is of type \w+, expected a MindSpore optimizer; give e\.g\. nn\.SGD", junk)
      for junk in (nn.Dense(2, 2), ParameterTuple([odd()]))],
    (ValueError, r"optimizer holds no parameters, expected at least one", Plain()),
    *[(TypeError, rf"odd is a parameter of {dtype}, expected a float dtype; leave it out", Plain(odd((1, 0), dtype)))
      for dtype in (ms.int32, ms.complex64)],
    (ValueError, r"odd has requires_grad=False, expected trainable parameters .* after freezing",
     Plain(odd(requires_grad=False))),
    (ValueError, r"optimizer holds two parameters called odd, expected each one once", Plain(odd(), odd())),
    *[(ValueError, r"has loss_scale=1024, expected 1: .*amp\.StaticLossScaler\(1024\) to make", scaled(wrap))
      for wrap in (lambda made: made, nn.LARS)],
])
def test_what_is_no_optimizer_or_cannot_accumulate_is_refused(error, message, optimizer):
    """Control: what differs in one thing."""
    for fitting in (Plain(odd()), *(scaled(wrap, 1) for wrap in (lambda made: made, nn.LARS))):
        assert Accumulator(fitting, 2, reduction="sum").weights
    with pytest.raises(error, match=message):
        Accumulator(optimizer, 2, reduction="sum")


@pytest.mark.parametrize("order", [None, "reversed"])
def test_rates_are_in_the_order_of_the_groups(order):
    """Also if "order_params" gives the parameters another order; the second group has the common rate. Control: in the
    optimizer's own list, rates are then in the order of the parameters."""
    one, two, three = (Parameter(Tensor(np.ones(2, np.float32)), name=name) for name in "abc")
    groups = [{"params": [one], "lr": 0.1}, {"params": [two]}, {"params": [three], "lr": 0.3}]
    ordered = [{"order_params": [three, two, one]}] if order else []
    optimizer = nn.SGD(groups + ordered, learning_rate=0.2)
    rates = Rates(optimizer)
    assert rates.next() == (0.1, 0.2, 0.3)
    own = [float(rate) for rate in optimizer.learning_rate]
    assert own == pytest.approx([0.3, 0.2, 0.1] if order else [0.1, 0.2, 0.3])
    rates.set((1.0, 2.0, 3.0))
    optimizer((Tensor(np.ones(2, np.float32)),) * 3)
    assert [float(p.asnumpy()[0]) for p in (one, two, three)] == [0.0, -1.0, -2.0]


@pytest.mark.parametrize(("build", "rate", "later", "error"), [
    (lambda p: nn.Adam(p, [0.1, 0.2]), 0.1, 0.2, "is a list of rates"),
    (lambda p: nn.Momentum(p, nn.ExponentialDecayLR(0.1, 0.5, 1), 0.9), 0.1, 0.05, "is a ExponentialDecayLR"),
    (lambda p: nn.SGD(p, 0.1), 0.1, 0.1, None), (lambda p: optim.AdamW(p, 0.1), 0.1, 0.1, None),
    (lambda p: nn.AdaFactor(p, 0.5, relative_step=False, scale_parameter=False), 0.5, 0.5, None),
    (nn.AdaFactor, None, None, "has no learning rate")])
def test_the_rate_of_the_next_update_is_read_and_set(build, rate, later, error):
    """One that is computed cannot be set; after the last one of a list there is none."""
    parameters = [Parameter(Tensor(np.ones((2, 2), np.float32)), name="a")]
    optimizer = build(parameters)
    rates = Rates(optimizer)
    if rate is None:
        with pytest.raises(ValueError, match=error):
            rates.next()
        return
    assert rates.next() == pytest.approx(rate)
    optimizer((Tensor(np.ones((2, 2), np.float32)),))
    assert (rates.next(), rates.read(-1)[0]) == pytest.approx((later, rate))
    if error is None:
        rates.set(0.25)
        assert rates.next() == 0.25
        for wrong, kind in ((-1, ValueError), ("1", TypeError), ((0.1, 0.2), ValueError)):
            with pytest.raises(kind, match="learning_rate is"):
                rates.set(wrong)
    else:
        with pytest.raises(ValueError, match=error):
            rates.set(0.25)
    if "list" in (error or ""):
        optimizer((Tensor(np.ones((2, 2), np.float32)),))
        assert np.isnan(rates.next())
        with pytest.raises(ValueError, match="list of learning rates is used up"):
            rates.require_next()


def test_what_a_script_puts_into_param_groups_is_an_error():
    """Control: a rate that is assigned, as a scheduler does."""
    optimizer = optim.AdamW([Parameter(Tensor(np.ones(2, np.float32)), name="a")], 0.1, weight_decay=0.0)
    rates = Rates(optimizer)
    ops.assign(optimizer.param_groups[0]["lr"], Tensor(0.5))
    rates.require_unchanged()
    assert rates.next() == 0.5
    for name, value in (("weight_decay", 0.1), ("lr", 0.2)):
        before, optimizer.param_groups[0][name] = optimizer.param_groups[0][name], value
        with pytest.raises(RuntimeError, match=f"param_groups was given another {name}, .*train_step.learning_rate"):
            rates.require_unchanged()
        optimizer.param_groups[0][name] = before


def derived(base):
    """A class that counts its updates and leaves them to the class it derives from."""
    class Derived(base):
        def __init__(self, parameters, rate):
            super().__init__(parameters, rate)
            self.calls = Parameter(Tensor(0, ms.int32), name="calls", requires_grad=False)

        def construct(self, gradients):
            ops.assign_add(self.calls, Tensor(1, ms.int32))
            return super().construct(gradients)

    return Derived


class Holder(nn.Cell):
    """What to write in its place."""

    def __init__(self, parameters, rate):
        super().__init__(auto_prefix=False)
        self.parameters, self.optimizer = ParameterTuple(parameters), nn.SGD(parameters, rate)
        self.calls = Parameter(Tensor(0, ms.int32), name="calls", requires_grad=False)

    def construct(self, gradients):
        ops.assign_add(self.calls, Tensor(1, ms.int32))
        return self.optimizer(gradients)


@pytest.mark.parametrize("where", ["graph", "op by op", "flush"])
@pytest.mark.parametrize(("build", "message"), [
    *((derived(base), "Derived derives .* runs twice .* derive from nn.Optimizer, or from a Cell that holds")
      for base in (nn.SGD, nn.Adam)), (derived(optim.AdamW), None), (Holder, None)])
def test_an_optimizer_updates_once_or_an_error_names_a_right_one(where, build, message):
    """Also where the host flushes what was added. If the first two are right everywhere, MindSpore has changed."""
    network = nn.Dense(3, 2)
    optimizer, x = build(network.trainable_params(), 0.1), Tensor(np.ones((4, 3), np.float32))
    before = network.weight.asnumpy().copy()
    if where == "flush":
        accumulator = Accumulator(optimizer, 9, reduction="mean")
        accumulator.add((ops.ones((2, 3)), ops.ones(2)))
        update = accumulator.flush
    else:
        update = partial(make_train_step(mean_square(network), optimizer, 1, eager=where == "op by op"), x)
    if message and where != "graph":
        with pytest.raises(ValueError, match=message):
            update()
    else:
        update()
        assert optimizer.calls == 1
    assert (network.weight.asnumpy() == before).all() == bool(message and where != "graph")


def test_an_optimizer_without_a_kernel_is_named():
    """Those of mint that graphs can hold: before they update op by op, which would change nothing (MindSpore 2.10)."""
    with pytest.raises(ValueError, match="the optimizer AdamW of mint has no kernel on CPU"):
        Accumulator(mint.optim.AdamW([odd()], 0.1), 2, reduction="sum")
    accumulator = Accumulator(mint.optim.SGD([odd()], 0.1), 2, reduction="sum")
    accumulator.add((ops.ones(2),))
    with pytest.raises(ValueError, match="the optimizer SGD of mint has no kernel on CPU"):
        accumulator.flush()


MINT = """
import mindspore as ms, numpy as np, sys
from mindspore import mint, nn
from ms_accum import make_train_step

network = nn.Dense(4, 2)
parameters, x = network.trainable_params(), ms.Tensor(np.ones((3, 4)), ms.float32)

def forward_fn(x):
    return (network(x) ** 2).mean()

def values():
    return np.concatenate([p.asnumpy().ravel() for p in parameters])

first, n = values(), int(sys.argv[1])
train_step = make_train_step(forward_fn, mint.optim.SGD(parameters, lr=0.1), n)
for _ in range(2 * n):
    train_step(x)
ours = values()
start = 0
for parameter in parameters:
    ms.ops.assign(parameter, ms.Tensor(first[start:start + parameter.size].reshape(parameter.shape)))
    start += parameter.size
optimizer, grad_fn = nn.SGD(parameters, 0.1), ms.value_and_grad(forward_fn, None, parameters)
for _ in range(2):
    optimizer(grad_fn(x)[1])
print(abs(ours - values()).max() < 1e-6, abs(ours - first).max() > 1e-3)
"""


@pytest.mark.parametrize("accumulate_step", ["2", pytest.param("1", marks=pytest.mark.slow)])
def test_the_first_network_of_a_process_is_trained_by_mint(accumulate_step):
    """In graphs. (Work in place was dropped from a function that returned None, without an error.)"""
    assert run_python(MINT, accumulate_step).split() == ["True", "True"]
