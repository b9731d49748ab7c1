"""What ranks compare of an optimizer: equal in every process that builds the same, and different for each number.

What ranks say of it, and which settings they compare, is in runs/test_ranks.py.
"""
import inspect
from contextlib import suppress
from functools import partial
from pathlib import Path

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, amp, mint, nn, ops
from mindspore.experimental import optim
from support.differential.optimizers import OPTIMIZERS
from support.modes import compiled
from support.processes import run_python

from ms_accum import Stage
from ms_accum.core.facts import changes, describe, given_to, text_of, texts_of_stages
from ms_accum.core.optimizers import state_of
from ms_accum.selftest.comparing import values
from ms_accum.selftest.networks import MLP

pytestmark = pytest.mark.core

WEIGHTS = MLP(seed=0).trainable_params()
MOMENTUM = {"momentum": 0.9}
NEEDED = {"nn.Momentum": MOMENTUM, "nn.SGD": MOMENTUM, "optim.SGD": MOMENTUM, "mint.SGD": MOMENTUM,
          "nn.AdaFactor": {"scale_parameter": False, "relative_step": False}}


def make(name, parameters=WEIGHTS, group=None, place=1, **options):
    """An optimizer, e.g. "nn.SGD", or one with two groups, the first of which has the options of `group`."""
    library, kind = name.split(".")
    if group is not None:
        parameters = [{"params": parameters[:place], **group}, {"params": parameters[place:]}]
    return getattr({"nn": nn, "optim": optim, "mint": mint.optim}[library], kind)(parameters, **{
        "learning_rate" if library == "nn" else "lr": 0.05, **NEEDED.get(name, {}), **options})


def differing(one, other):
    """The names of the texts that differ."""
    return [name for name in {**one, **other} if one.get(name) != other.get(name)]


def other_than(value):
    """Another value of the same kind; None and text as they are."""
    if isinstance(value, tuple):
        return (other_than(value[0]), *value[1:])
    return not value if isinstance(value, bool) else value / 2 or 0.25 if isinstance(value, (int, float)) else value


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_each_number_of_an_optimizer_is_compared(name):
    """By the argument's own name. Control: optimizers with equal arguments have equal texts."""
    optimizer, compared = make(name), []
    plain, signature = describe(optimizer), inspect.signature(type(optimizer).__init__).parameters.values()
    arguments = {p.name: p.default for p in signature} | getattr(optimizer, "init_args", {}) | NEEDED.get(name, {})
    arguments["learning_rate" if name[:2] == "nn" else "lr"] = 0.05
    for argument, value in arguments.items():
        with suppress(TypeError, ValueError):  # not a value of this argument
            if (other := other_than(value)) is not value and argument != "foreach":  # MindSpore does nothing with it
                compared.append((argument, *(make(name, **{argument: other}) for _ in range(2))))
    for argument, *made in compared:
        first, same = map(describe, made)
        assert argument in differing(plain, first)[:3]
        assert first == same
    assert len(compared) > 1
    for place, state in state_of(optimizer):
        before = describe(optimizer)
        ops.assign(state, state + 1)
        assert differing(before, describe(optimizer)), place


class Decay(nn.Cell):
    """A weight decay of a user's own. If its function is a lambda, no attribute holds its numbers."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def construct(self, global_step):
        return self.function(int(global_step.asnumpy()[0]))


class Rate(Decay, nn.learning_rate_schedule.LearningRateSchedule):
    """A learning rate of a user's own."""


class Limit(Stage):
    """A stage of a user's own, which is no Cell, and holds itself."""

    def __init__(self, limit, largest=0.0, exchange=None):
        self.limit, self.largest, self.exchange = limit, Parameter(Tensor(largest), name="largest"), exchange
        self.run_state, self.itself, self.library, self.kind = (self.largest,), self, object(), ms.float16


def holding(value, name="held"):
    optimizer = make("nn.SGD")
    (optimizer.register_buffer if type(value) is Tensor else partial(setattr, optimizer))(name, value)
    return optimizer


# The names of what differs for two numbers. Schedules of 33 and 49 updates differ at 48, which is no power of two.
CHANGED = [
    *[("learning_rate", lambda n, rate=rate: make("nn.Momentum", learning_rate=rate(n))) for rate in (
        lambda n: nn.CosineDecayLR(0.01, 0.1, n), lambda n: nn.cosine_decay_lr(0.01, 0.1, n, 1, n),
        lambda n: Rate(lambda step: 0.1 if step < n else 0.2), lambda n: Rate(partial(divmod, n, 0)))],  # which fails
    ("lr, learning_rate", lambda n: make("nn.SGD", group={"lr": 0.1 / n})),
    ("lr", lambda n: make("nn.SGD", group={"lr": nn.CosineDecayLR(0.01, 0.1, n)})),
    ("params, weight_decay, decay_flags", lambda n: make("nn.SGD", group={"weight_decay": 0.1}, place=n % 3 + 1)),
    ("params, group_start_id", lambda n: make("optim.SGD", group={"weight_decay": 0.1}, place=n % 3 + 1)),
    ("weight_decay", lambda n: make("nn.AdamWeightDecay", weight_decay=Decay(lambda step: step < n))),
    *[("weight_decay", lambda n, decay=decay: make("nn.AdamWeightDecay", group={"weight_decay": decay(n)}))
      for decay in (lambda n: 0.1 / n, lambda n: Decay(lambda step: step < n), lambda n: nn.WarmUpLR(0.1, n))],
    ("lr, lrs", lambda n: make("optim.AdamW", group={"lr": 0.1 / n})),
    ("betas", lambda n: make("optim.AdamW", group={"betas": (0.9, 1 - 1 / n)})),
    ("weight_decay", lambda n: holding(make("nn.AdamWeightDecay", weight_decay=0.1 / n), "optimizer")),
    *[("held", lambda n, held=held: holding(held(n))) for held in (
        int, Limit, np.arange, Tensor, lambda n: partial(max, n), lambda n: Parameter(Tensor(n), name="held"),
        lambda n: {"deep": [{n}, {"b", "a", "c"}]}, lambda n: ops.LARSUpdate(n / 50),
        lambda n: max if n == 33 else min, lambda n: int if n == 33 else float)]]


def test_rates_decays_groups_and_objects_of_a_users_own_are_compared():
    """Controls: equal ones; nothing holds an address."""
    for names, build in CHANGED:
        first, other = (describe(build(n)) for n in (33, 49))
        assert ", ".join(differing(first, other)) == names
        assert describe(build(33)) == first
        assert "0x" not in "".join(first.values())


def test_slices_are_compared_by_the_names_of_the_whole_without_their_state():
    """Control: a count, which is equal on all ranks."""
    slices = [Parameter(ops.zeros(-(-p.size // 2)), name=f"slice.{p.name}") for p in WEIGHTS]
    for part, whole in zip(slices, WEIGHTS):
        part.whole = whole
    optimizer = make("nn.Adam", slices)
    before = describe(optimizer)
    assert f"[3]: {WEIGHTS[3].name}" in before["params"]
    ops.assign(optimizer.moment1[0], ops.ones_like(optimizer.moment1[0]))
    assert describe(optimizer) == before
    ops.assign(optimizer.global_step, Tensor([3], ms.int32))
    assert differing(describe(optimizer), before) == ["global_step"]


@pytest.mark.parametrize(("optimizer", "shown"), [
    ("nn.SGD", "lr.decay_rate 0.5 -> 0.25"), ("nn.AdamWeightDecay", "lr[0].decay_rate 0.5 -> 0.25")])
def test_the_schedule_of_a_group_that_changes_is_named(optimizer, shown):
    old, new = (given_to(make(optimizer, group={"lr": nn.ExponentialDecayLR(0.1, rate, 1), "weight_decay": 0.1}))
                for rate in (0.5, 0.25))
    assert [text for key in new for text in changes(key, old[key], new[key])] == [shown]


def test_a_weight_decay_that_becomes_one_for_each_group_is_named():
    """Both ways. Control: equal ones."""
    whole, groups = (given_to(make("nn.SGD", group=group)) for group in (None, {"weight_decay": 0.25}))
    assert changes("weight_decay", whole["weight_decay"], whole["weight_decay"]) == []
    for old, new in ((whole, groups), (groups, whole)):
        (text,) = changes("weight_decay", old["weight_decay"], new["weight_decay"])
        assert text.startswith("weight_decay ")
        assert "none" not in text
        assert "0.25" in text


@pytest.mark.parametrize(("name", "state"), [
    ("nn.AdamWeightDecay", {"moments1", "moments2", "global_step"}), ("mint.SGD", {"momentum_buf", "step_t"}),
    ("optim.AdamW", {"exp_avg", "exp_avg_sq", "state_step"})])
def test_only_state_changes_when_an_optimizer_runs(name, state, mode):
    """Not what MindSpore sets. To describe it changes nothing, although its schedules run op by op before they are
    compiled. Control: another schedule. mint's optimizers do not count their steps op by op."""
    ended, scheduled = [], name[:2] == "nn"
    for describes, steps in ((False, 5), (True, 5), (True, 3)):
        parameters, schedule = MLP(seed=0).trainable_params(), nn.CosineDecayLR(0.01, 0.1, steps)
        optimizer = make(name, parameters, **{"learning_rate": schedule, "weight_decay": schedule} if scheduled else {})
        before, update = describe(optimizer) if describes else {}, compiled(optimizer, mode)
        for _ in range(3):
            update(tuple(ops.ones_like(p) for p in optimizer.parameters))
            names = differing(before, describe(optimizer)) if describes else []
        ended.append(np.concatenate([value.ravel() for value in values(parameters)]))
    assert {*names} == state - ({"step_t"} if mode == "pynative" else set())
    assert (ended[0] == ended[1]).all()
    assert (ended[0] != ended[2]).any() == scheduled


SCALERS = [amp.StaticLossScaler(2), amp.StaticLossScaler(4), *(
    amp.DynamicLossScaler(2, factor, window) for factor, window in ((2, 5), (2, 6), (3, 5)))]
DESCRIBE = """
import sys
sys.path[:0] = sys.argv[1:]
from core.test_facts import CHANGED, OPTIMIZERS, SCALERS, Limit, describe, make, text_of, texts_of_stages
print([describe(optimizer) for optimizer in (*map(make, OPTIMIZERS), *(build(5) for _, build in CHANGED))],
      list(map(text_of, SCALERS)), texts_of_stages([Limit(2)]))
print(list({'b', 'a', 'c'}))
"""


@pytest.mark.slow
def test_texts_are_equal_in_two_processes(monkeypatch):
    """Although hashes, and so the order of sets, differ."""
    told = []
    for seed in ("1", "2"):
        monkeypatch.setenv("PYTHONHASHSEED", seed)
        told.append(run_python(DESCRIBE, *map(str, Path(__file__).parents[1:3])).splitlines()[-2:])
    assert [one == other for one, other in zip(*told)] == [True, False]


def test_scalers_and_stages_are_compared_by_class_and_numbers():
    """A stage's Parameters may differ between ranks, and so may the number of this rank."""
    assert len({*map(text_of, SCALERS), text_of(amp.StaticLossScaler(2))}) == len(SCALERS)
    assert texts_of_stages([Limit(2)]) == texts_of_stages([Limit(2, 3.0, np.arange(3))]) != texts_of_stages([Limit(3)])


def test_a_tuple_of_rates_is_as_good_as_a_list():
    """Control: another rate."""
    def text(rates):
        return describe(nn.SGD(MLP().trainable_params(), rates))

    assert text([0.3, 0.2]) == text((0.3, 0.2)) != text((0.3, 0.1))


@pytest.mark.parametrize(("name", "argument"), [
    ("nn.SGD", "learning_rate"), ("nn.Adam", "learning_rate"), ("nn.AdamWeightDecay", "learning_rate"),
    ("optim.AdamW", "lr"), ("mint.SGD", "lr")])
def test_a_number_is_equal_in_all_its_kinds(name, argument):
    """Controls: another number, and the same one rounded to float16."""
    def text(value):
        return describe(make(name, **{argument: value}))

    assert text(0.01) == text(Tensor(0.01)) == text(np.float64(0.01))
    assert text(0.01) != text(Tensor(0.02))
    assert text(0.01) != text(float(np.float16(0.01)))
    assert text_of([32, (1, 2)]) == text_of([32.0, (1.0, 2)]) != text_of([32.5, (1, 2)])
    assert text_of([True]) != text_of([1])
