"""What an optimizer holds: its state at any depth, with names of its own, in one graph, too; which ones are refused.

That each optimizer of MindSpore trains and goes on from a checkpoint exactly is drawn in test_differential.py.
"""
import inspect
from functools import partial

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, ParameterTuple, Tensor, mint, nn, ops
from mindspore.experimental import optim
from support.cells import Counting
from support.differential.optimizers import OPTIMIZERS

from ms_accum import Accumulator, load_checkpoint, save_checkpoint
from ms_accum.core.facts import describe
from ms_accum.core.optimizers import divided_state, next_rates, set_rates, state_of

# Base classes, and wrappers and kernels that CPU has not (MindSpore 2.10). MindSpore 2.7 has no mint.FusedAdamW.
OUT_OF_REACH = {"nn.Optimizer", "optim.Optimizer", "nn.OptTFTWrapper", "nn.Lamb", "nn.LARS", "mint.AdamW"}


def test_no_optimizer_is_forgotten_by_the_fuzzer():
    found = {f"{module}.{name}" for module, of in (("nn", nn), ("optim", optim), ("mint", mint.optim))
             for name, made in vars(of).items()
             if inspect.isclass(made) and issubclass(made, (nn.Optimizer, optim.Optimizer))}
    assert found - {"mint.FusedAdamW"} == {*OPTIMIZERS} | OUT_OF_REACH


class Hoarder(nn.Cell):
    """An optimizer that descends by `rate`, and keeps it and others wherever Python can, without a name."""

    def __init__(self, parameters, inner=None):
        super().__init__(auto_prefix=False)
        self.parameters = parameters
        self.slots = {"first": Parameter(Tensor(0.5)), "others": ({"deep": [Parameter(Tensor(2.0)), 3, None]},)}
        self.by_parameter = {parameter: Parameter(Tensor(3.0)) for parameter in parameters}
        self.cells = [Counting(parameters)]
        self.itself = [self, self.slots, parameters]
        self.twins = [[Parameter(Tensor(1.0), name="twin")], [Parameter(Tensor(1.0), name="twin")]]
        self.inner = inner

    def construct(self, grads):
        for parameter, grad in zip(self.parameters, grads):
            ops.assign_sub(parameter, self.slots["first"] * grad)
        return True


def test_state_is_found_at_any_depth_and_has_a_name_of_its_own():
    network = nn.Dense(3, 2)
    optimizer = Hoarder(network.trainable_params())
    named = dict(state_of(optimizer))
    deep = optimizer.slots["others"][0]["deep"][0]
    assert list(named) == ["slots[first]", "slots[others][0][deep][0]", "by_parameter[0]", "by_parameter[1]",
                           "seen.weight", "seen.bias", "calls", "twins[0][0]", "twins[1][0]"]
    assert named["slots[first]"] is optimizer.slots["first"]
    assert named["slots[others][0][deep][0]"] is deep
    before = describe(optimizer)
    deep.set_data(Tensor(5.0))
    assert describe(optimizer) != before
    assert list(dict(state_of(Hoarder(network.trainable_params())))) == list(named)
    assert state_of(lambda grads: True) == []


def test_state_with_the_same_name_is_saved_and_compiled():
    """In one graph each name may be there once. All of mindspore.experimental call theirs learning_rate_group_0."""
    def build():
        network = nn.Dense(3, 2, weight_init="zeros", bias_init="zeros")
        network.extra, network.other = (Parameter(Tensor([0.0]), name=name) for name in ("extra", "other"))
        weight, bias, extra, other = network.weight, network.bias, network.extra, network.other
        optimizers = Hoarder([weight]), Hoarder([bias]), optim.SGD([extra], lr=1.0), optim.SGD([other], lr=2.0)
        accs = [Accumulator(optimizer, 1, reduction="sum") for optimizer in optimizers]

        @ms.jit
        def step(weight, one):
            return accs[0]((weight,)), accs[1]((one[:2],)), accs[2]((one[:1],)), accs[3]((one[:1],))
        return network, accs, step

    network, accs, step = build()
    accs[0].optimizer.slots["first"].set_data(Tensor(0.25))
    save_checkpoint("c.safetensors", network, accs[0])
    network, accs, step = build()
    load_checkpoint("c.safetensors", network, accs[0])
    step(ops.ones_like(network.weight), ops.ones(3))
    for parameter, expected in zip(network.trainable_params(), (-0.25, -0.5, -1, -2)):
        np.testing.assert_allclose(parameter.asnumpy(), expected, atol=1e-6)


class Plain:
    """An optimizer that is no Cell and does nothing."""

    def __init__(self, *parameters):
        self.parameters = parameters

    def __call__(self, grads):
        return True


def sliced(parameters):
    """What `shard_parameters` makes of them on two ranks."""
    made = []
    for parameter in parameters:
        made.append(Parameter(ops.zeros(-(-parameter.size // 2)), name=parameter.name))
        made[-1].whole = parameter
    return made


@pytest.mark.parametrize("named", ["", "moment.{}"])
@pytest.mark.parametrize("of", ["cell", "plain"])
def test_state_of_slices_is_found_by_name_or_place(named, of):
    """Counters are not, also where a slice has one element as they have, nor state of another shape."""
    wholes = [Parameter(ops.zeros(shape), name=name) for name, shape in (
        ("weight", (4, 3)), ("first.weight", (6, 2)), ("scale", (1,)))]
    slices = sliced(wholes)
    optimizer = nn.SGD(slices, 0.1) if of == "cell" else Plain(*slices)
    optimizer.mine = [Parameter(ops.zeros(p.shape), name=named.format(p.name) or f"m{i}") for i, p in enumerate(slices)]
    optimizer.counts = [Parameter(ops.zeros(1), name=f"count{i}") for i in range(3)]
    optimizer.norms = [Parameter(ops.zeros(2), name=f"norm.{p.name}") for p in slices[:2]]
    found = divided_state(optimizer)
    assert [found.get(id(state)) for state in optimizer.mine] == wholes
    assert not {id(state) for state in (*optimizer.counts, *optimizer.norms)} & set(found)


def test_state_of_an_optimizer_that_is_no_cell_is_found():
    optimizer = Plain(*nn.Dense(3, 2).trainable_params())
    optimizer.slots, optimizer.count = [odd(), odd()], Parameter(Tensor(0.0), name="count")
    assert [name for name, _ in state_of(optimizer)] == ["[slots][0]", "[slots][1]", "count"]


def odd(value=(0.0, 0.0), dtype=ms.float32, requires_grad=True):
    return Parameter(Tensor(value, dtype), name="odd", requires_grad=requires_grad)


def scaled(wrap, loss_scale=1024):
    """An optimizer that divides gradients once more, by its own loss scale."""
    return wrap(nn.Momentum(nn.Dense(3, 2).trainable_params(), 1.0, 0.9, loss_scale=loss_scale))


WRAPPED = [lambda made: made, nn.LARS, lambda made: Hoarder(made.parameters, [made])]


@pytest.mark.parametrize(("error", "message", "optimizer"), [
    *[(TypeError, r"optimizer is of type \w+, expected a MindSpore optimizer; give e\.g\. nn\.SGD", junk)
      for junk in (nn.Dense(2, 2), ParameterTuple([odd()]))],
    (ValueError, r"optimizer holds no parameters, expected at least one", Plain()),
    (ValueError, r"odd has shape \(0, 3\), expected at least one element", Plain(odd(np.zeros((0, 3))))),
    *[(TypeError, rf"odd is a parameter of {dtype}, expected a float dtype; leave it out", Plain(odd((1, 0), dtype)))
      for dtype in (ms.int32, ms.bool_, ms.complex64)],
    (ValueError, r"odd has requires_grad=False, expected trainable parameters .* after freezing",
     Plain(odd(requires_grad=False))),
    (ValueError, r"optimizer holds two parameters called odd, expected each one once", Plain(odd(), odd())),
    *[(ValueError, r"has loss_scale=1024, expected 1: .*amp\.StaticLossScaler\(1024\) to make", scaled(wrap))
      for wrap in WRAPPED],
])
def test_what_is_no_optimizer_or_cannot_accumulate_is_refused(error, message, optimizer):
    """Control: what differs in one thing."""
    for fitting in (Plain(odd()), *(scaled(wrap, 1) for wrap in WRAPPED)):
        assert Accumulator(fitting, 2, reduction="sum").loss_scaler is None
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
    assert next_rates(optimizer) == (0.1, 0.2, 0.3)
    own = [float(rate) for rate in optimizer.learning_rate]
    assert own == pytest.approx([0.3, 0.2, 0.1] if order else [0.1, 0.2, 0.3])
    set_rates(optimizer, (1.0, 2.0, 3.0))
    optimizer((Tensor(np.ones(2, np.float32)),) * 3)
    assert [float(p.asnumpy()[0]) for p in (one, two, three)] == [0.0, -1.0, -2.0]


def test_a_rate_that_the_optimizer_computes_itself_is_not_shown():
    """Control: with `relative_step=False`, it uses the one that it is given."""
    parameters = [Parameter(Tensor(np.ones((2, 2), np.float32)), name="a")]
    given = nn.AdaFactor(parameters, 0.5, relative_step=False, scale_parameter=False)
    assert next_rates(given) == 0.5
    for use in (next_rates, partial(set_rates, given=0.5)):
        with pytest.raises(ValueError, match=r"AdaFactor has no learning rate .* relative_step=False"):
            use(nn.AdaFactor(parameters))
