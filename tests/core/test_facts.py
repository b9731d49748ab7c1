"""What ranks compare of an optimizer: equal in every process that builds the same, and different for each number.

What ranks say of it, and which settings they compare, is in runs/test_ranks.py.
"""
import inspect
import os
from functools import partial

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, amp, mint, nn, ops
from mindspore.experimental import optim
from support.differential.optimizers import OPTIMIZERS
from support.modes import compiled
from support.processes import run_python

from ms_accum import Stage
from ms_accum.core.facts import UPDATES, describe, text_of, texts_of_stages
from ms_accum.selftest.comparing import values
from ms_accum.selftest.networks import MLP

pytestmark = pytest.mark.core

NETWORK = MLP(seed=0)
WEIGHTS = NETWORK.trainable_params()
RATE = 0.05
NEEDED = {"nn.Momentum": {"momentum": 0.9}, "nn.AdaFactor": {"scale_parameter": False, "relative_step": False}}
LIBRARIES = {"nn": nn, "optim": optim, "mint": mint.optim}
# A loss_scale is refused; MindSpore does nothing with `foreach`.
LEFT_OUT = {"params", "learning_rate", "lr", "loss_scale", "self", "foreach", "kwargs", "args"}


def make(name, parameters=WEIGHTS, rate=RATE, **options):
    """An optimizer, e.g. "nn.SGD"."""
    options = {**NEEDED.get(name, {}), **options}
    library, name = name.split(".")
    rate = {"learning_rate" if library == "nn" else "lr": rate}
    return getattr(LIBRARIES[library], name)(parameters, **rate, **options)


def differing(one, other):
    """The names of the texts that differ."""
    return [name for name in {**one, **other} if one.get(name) != other.get(name)]


def arguments_of(name):
    """The arguments of an optimizer with the numbers that they have if they are not given."""
    optimizer = make(name)
    named = {**getattr(optimizer, "defaults", {}), **getattr(optimizer, "init_args", {})}
    signature = inspect.signature(type(optimizer).__init__).parameters.values()
    named.update((p.name, p.default) for p in signature if p.default is not p.empty)
    return {argument: value for argument, value in named.items() if argument not in LEFT_OUT}


def others(value):
    """Values that an argument may have instead."""
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, tuple):
        return [(*value[:-1], other) for other in others(value[-1])]
    return [0.5, 0.25, 3.0, 5, -0.3] if isinstance(value, (int, float)) else []


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_each_number_of_an_optimizer_is_compared(name):
    """By the argument's own name. Control: optimizers with equal arguments have equal texts."""
    plain, compared = describe(make(name)), []
    assert describe(make(name)) == plain
    for argument, value in arguments_of(name).items():
        for other in others(value):
            try:
                made = make(name, **{argument: other})
            except (TypeError, ValueError):  # not a value of this argument
                continue
            assert argument in differing(describe(made), plain)
            assert describe(make(name, **{argument: other})) == describe(made)
            compared.append(argument)
            break
    assert compared


class Cosine(nn.Cell):
    """A weight decay of a user's own."""

    def __init__(self, steps):
        super().__init__()
        self.schedule = nn.CosineDecayLR(0.001, 0.1, steps)

    def construct(self, global_step):
        return self.schedule(global_step)


class Late(nn.learning_rate_schedule.LearningRateSchedule):
    """A schedule whose number no attribute holds."""

    def __init__(self, start):
        super().__init__()
        self.rate = lambda step: RATE if step < start else 2 * RATE

    def construct(self, global_step):
        return self.rate(int(global_step.asnumpy()[0]))


def grouped(place, **options):
    return [{"params": WEIGHTS[:place], **options}, {"params": WEIGHTS[place:]}]


RATES = [lambda n: nn.CosineDecayLR(0.01, 0.1, n), lambda n: nn.cosine_decay_lr(0.01, 0.1, n, 1, n), Late,
         lambda n: nn.WarmUpLR(0.1, n), lambda n: nn.ExponentialDecayLR(0.1, 0.9, n), lambda n: 0.1 / n]
CHANGED = [
    *[("learning_rate", lambda n, rate=rate: make("nn.Momentum", rate=rate(n))) for rate in RATES],
    ("learning_rate", lambda n: make("nn.SGD", grouped(1, lr=0.1 / n))),
    ("learning_rate", lambda n: make("nn.SGD", grouped(1, lr=nn.CosineDecayLR(0.01, 0.1, n)))),
    ("learning_rate", lambda n: make("nn.AdamWeightDecay", rate=0.1 / n)),
    ("weight_decay", lambda n: make("nn.AdamWeightDecay", weight_decay=Cosine(n))),
    ("weight_decay", lambda n: make("nn.AdamWeightDecay", grouped(1, weight_decay=Cosine(n)))),
    ("weight_decay", lambda n: make("nn.AdamWeightDecay", grouped(1, weight_decay=0.1 / n))),
    ("lr", lambda n: make("optim.AdamW", grouped(1, lr=0.1 / n))),
    ("betas", lambda n: make("optim.AdamW", grouped(1, betas=(0.9, 1 - 1 / n)))),
]


@pytest.mark.parametrize(("name", "build"), CHANGED)
def test_rates_and_decays_are_compared_alone_scheduled_and_in_groups(name, build):
    """For numbers of updates of 20 and 12. Control: for equal ones."""
    texts = [describe(build(n)) for n in (20, 12, 20)]
    assert differing(texts[0], texts[1]) == [name]
    assert texts[0] == texts[2]


@pytest.mark.parametrize("name", ["nn.SGD", "optim.SGD"])
def test_members_of_groups_are_compared(name):
    assert "parameters" in differing(*(describe(make(name, grouped(place, weight_decay=0.1))) for place in (1, 2)))


def test_a_schedule_is_compared_between_the_powers_of_two():
    assert {0, 1, 2, 4, 6, 48, 2**16} < {*UPDATES}
    assert differing(*(describe(make("nn.SGD", rate=Late(start))) for start in (33, 49))) == ["learning_rate"]


def test_a_schedule_that_cannot_run_op_by_op_is_compared_by_its_numbers():
    class Broken(Late):
        def construct(self, global_step):
            raise RuntimeError

    schedules = [Broken(3) for _ in range(3)]
    schedules[0].number = 7
    first, *same = (describe(make("nn.SGD", rate=schedule)) for schedule in schedules)
    assert same[0] == same[1] != first


class Bag:
    """An object of a user's own: not a Cell, with a set, a dict, itself and a library's object."""

    def __init__(self, number):
        self.numbers, self.named, self.itself = {"b", "a", "c"}, {"deep": [{"number": number}]}, self
        self.function, self.library = partial(max, number), inspect.signature(make)
        self.array, self.kind = np.arange(number), ms.float16


class Wrapper(nn.Cell):
    """An optimizer in an optimizer."""

    def __init__(self, optimizer, **held):
        super().__init__(auto_prefix=False)
        self.optimizer, self.parameters = optimizer, optimizer.parameters
        for name, value in held.items():
            setattr(self, name, value)

    def construct(self, grads):
        return self.optimizer(grads)


def test_what_an_optimizer_of_a_users_own_holds_is_compared():
    def texts(number=2, decay=0.1, **held):
        return describe(Wrapper(make("nn.AdamWeightDecay", weight_decay=decay), bag=Bag(number), **held))

    assert texts() == texts()
    assert "0x" not in "".join(texts().values())
    assert differing(texts(), texts(3)) == ["bag"]
    assert differing(texts(), texts(decay=0.2)) == ["weight_decay"]
    assert differing(texts(), texts(extra=0)) == ["extra"]
    assert differing(texts(slot=Parameter(Tensor(0.0))), texts(slot=Parameter(Tensor(1.0)))) == ["state"]


def test_state_of_slices_is_not_compared():
    """Control: a count, which is equal on all ranks."""
    slices = [Parameter(ops.zeros(-(-p.size // 2)), name=p.name) for p in WEIGHTS]
    for part, whole in zip(slices, WEIGHTS):
        part.whole = whole
    optimizer = make("nn.Adam", slices)
    before = describe(optimizer)
    ops.assign(optimizer.moment1[0], ops.ones_like(optimizer.moment1[0]))
    assert describe(optimizer) == before
    ops.assign(optimizer.global_step, Tensor([3], ms.int32))
    assert differing(describe(optimizer), before) == ["state"]


@pytest.mark.parametrize("name", ["nn.Adam", "optim.AdamW", "mint.SGD"])
def test_what_mindspore_sets_when_an_optimizer_runs_is_not_compared(name, mode):
    """It differs between processes. Only the state changes, but for mint, which does nothing op by op."""
    network = MLP(seed=0)
    rate = nn.CosineDecayLR(0.01, 0.1, 9) if name == "nn.Adam" else RATE
    optimizer = make(name, network.trainable_params(), rate)
    before = describe(optimizer)
    compiled(optimizer, mode)(tuple(ops.ones_like(p) for p in optimizer.parameters))
    assert differing(describe(optimizer), before) == (["state"] if (name, mode) != ("mint.SGD", "pynative") else [])


def test_to_describe_an_optimizer_changes_nothing(mode):
    """Its schedules run op by op before they are compiled. Control: another schedule."""
    ended = []
    for describes, steps in ((False, 5), (True, 5), (True, 3)):
        network = MLP(seed=0)
        optimizer = make("nn.AdamWeightDecay", network.trainable_params(), nn.CosineDecayLR(0.01, 0.1, steps),
                         weight_decay=Cosine(steps))
        update = compiled(optimizer, mode)
        for _ in range(3):
            if describes:
                describe(optimizer)
            update(tuple(ops.ones_like(p) for p in optimizer.parameters))
        ended.append(np.concatenate([value.ravel() for value in values(network.trainable_params())]))
    assert (ended[0] == ended[1]).all()
    assert (ended[0] != ended[2]).any()


DESCRIBE = """
import sys
sys.path[:0] = {paths}
from core.test_facts import CHANGED, OPTIMIZERS, Bag, Wrapper, describe, make, text_of, texts_of_stages
from core.test_facts import SCALERS, Limit
optimizers = [*map(make, OPTIMIZERS), *(build(5) for _, build in CHANGED), Wrapper(make("nn.SGD"), bag=Bag(3))]
print(list(map(describe, optimizers)), list(map(text_of, SCALERS)), texts_of_stages([Limit(2)]))
"""


def test_texts_are_equal_in_two_processes(monkeypatch):
    """Although hashes, and so the order of sets, differ."""
    tests = os.path.dirname(os.path.dirname(__file__))
    code = DESCRIBE.format(paths=[tests, os.path.dirname(tests)])
    told = []
    for seed in ("1", "2"):
        monkeypatch.setenv("PYTHONHASHSEED", seed)
        told.append(run_python(code + "print(list({'b', 'a', 'c'}))\n").splitlines())
    (first, order), (second, other_order) = (lines[-2:] for lines in told)
    assert first == second
    assert order != other_order


class Limit(Stage):
    """A stage of a user's own."""

    def __init__(self, limit):
        self.limit, self.largest = limit, Parameter(Tensor(0.0), name="largest")
        self.run_state = (self.largest,)


SCALERS = [amp.StaticLossScaler(2), amp.StaticLossScaler(4), amp.DynamicLossScaler(2, 2, 5),
           amp.DynamicLossScaler(2, 2, 6), amp.DynamicLossScaler(2, 3, 5)]


def test_scalers_and_stages_are_compared_by_class_and_numbers():
    """A stage's Parameters may differ between ranks, and so may the number of this rank."""
    assert len({text_of(scaler) for scaler in SCALERS}) == len(SCALERS)
    assert text_of(amp.StaticLossScaler(2)) == text_of(SCALERS[0])
    stages = [Limit(2) for _ in range(2)]
    ops.assign(stages[0].largest, Tensor(3.0))
    stages[0].exchange = np.arange(3)
    assert texts_of_stages(stages[:1]) == texts_of_stages(stages[1:]) != texts_of_stages([Limit(3)])
