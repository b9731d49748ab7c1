"""Hostile use: wrong arguments of every kind, calls in every order, a command line of junk, and a very long run.

Each call either agrees with the oracle or is refused in words, and after a refusal every bit of state is what it was. What hypothesis
makes up runs op by op, a millisecond a call; a few sequences run compiled. `pytest -m slow` runs more of both, see RECORDS.md.
"""
import os
import re
import sys
from decimal import Decimal
from fractions import Fraction
from pathlib import Path

import mindspore as ms
import numpy as np
import pytest
import reference
from conftest import MLP, batches, difference, mean_loss, run_python, tensors, values
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test
from mindspore import Parameter, ParameterTuple, Tensor, nn, ops
from mnist_files import embedded_set, write

from ms_accum import Accumulator, DataParallel, cli, make_train_step
from ms_accum.mnist import fetch, train
from ms_accum.window import Window

INF, NAN = float("inf"), float("nan")
LOSS = nn.CrossEntropyLoss()


def examples(count):
    """Settings for `count` examples; conftest.py has the others."""
    return settings(max_examples=count, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])


def bits(*holders):
    """Every bit of the state of accumulators and optimizers."""
    parameters = [p for holder in holders for p in (holder.parameters if isinstance(holder, Accumulator) else holder.get_parameters())]
    return [(p.name, p.asnumpy().tobytes()) for p in parameters]


def refusal(function, *arguments, **options):
    """What it says when it refuses its arguments, None if it takes them; any other error is a failure."""
    try:
        function(*arguments, **options)
    except (TypeError, ValueError) as error:
        return str(error)
    return None


# --- arguments ---------------------------------------------------------------------------------------------------------


class Thing:
    """Nothing that any argument can be."""


JUNK = {
    "None": None, "True": True, "0": 0, "-1": -1, "2": 2, "2.5": 2.5, "nan": NAN, "inf": INF, "1e-300": 1e-300, "2**31": 2**31,
    "2**40": 2**40, "10**400": 10**400, "1j": 1j, "1/3": Fraction(1, 3), "Decimal": Decimal(2), "text": "x", "bytes": b"x", "list": [],
    "list of int": [1], "dict": {}, "tuple": (1,), "set": {1}, "array": np.array([1, 2]), "array()": np.array(3),
    "np.bool": np.bool_(True), "np.float32": np.float32(2), "Tensor": Tensor([1, 2]), "Tensor()": Tensor(3), "dtype": ms.float32,
    "Thing": Thing(), "class": Thing, "function": len,
}
WHOLE = {"2", "array()", "Tensor()"}
ACCEPTED = {
    (Accumulator, "optimizer"): set(),
    (Accumulator, "accumulate_step"): WHOLE,
    (Accumulator, "clip_norm"): {"None", "2", "2.5", "inf", "1e-300", "2**31", "2**40", "10**400", "1/3", "np.float32"},
    (Accumulator, "reduction"): set(),
    (Accumulator, "buffer_dtype"): {"None", "dtype"},
    (Accumulator, "on_nonfinite"): set(),
    (Accumulator, "reducer"): {"None"},
    (make_train_step, "forward_fn"): {"class", "function"},
    (make_train_step, "acc"): set(),
    (make_train_step, "micro_size"): WHOLE | {"2**31", "2**40", "10**400"},
    (make_train_step, "weight_fn"): {"None", "class", "function"},
    (make_train_step, "loss_scaler"): {"None"},
    (make_train_step, "strategy"): set(),
    (make_train_step, "has_aux"): {"True"},
    (DataParallel, "sync"): set(),
    (DataParallel, "shard"): set(),
    (DataParallel, "broadcast"): {"True"},
    (DataParallel, "bucket_mib"): {"2", "2.5", "1e-300", "2**31", "2**40", "10**400"},
}


def weights(shapes=((2, 3), (2, 4)), dtype=ms.float32):
    return ParameterTuple([Parameter(Tensor(np.zeros(shape), dtype), name=f"p{i}") for i, shape in enumerate(shapes)])


def called(function, **changed):
    """`function` with arguments that fit, but for those that are given."""
    fitting = {
        Accumulator: {"optimizer": nn.SGD(weights(), 0.1), "accumulate_step": 2},
        make_train_step: {"forward_fn": LOSS, "acc": Accumulator(nn.SGD(weights(), 0.1), 2, reduction="mean")},
        DataParallel: {},
    }
    return function(**{**fitting[function], **changed})


@pytest.mark.parametrize(("function", "argument"), list(ACCEPTED), ids=lambda x: getattr(x, "__name__", x))
def test_an_argument_is_taken_or_refused_by_its_name(function, argument):
    """Refused are exactly those that cannot be meant: "<argument> is ..., expected ..."."""
    accepted = set()
    for name, junk in JUNK.items():
        message = refusal(called, function, **{argument: junk})
        if message is None:
            accepted.add(name)
        else:
            assert message.startswith(argument), name
            assert any(remedy in message for remedy in ("expected", "give", "define it")), name
    assert accepted == ACCEPTED[function, argument]


@examples(100)
@given(st.dictionaries(st.integers(0, 2**31 - 1), st.integers(1, 2**31 - 1), max_size=4), st.integers(1, 2**31 - 1),
       st.lists(st.integers(0, 2**31 - 1), max_size=5))
def test_a_schedule_says_what_the_oracle_says(later, first, updates):
    """Also where a length or a key is as large as int32 can hold, and at the keys themselves."""
    schedule = {**later, 0: first}
    window = Window(schedule)
    for update_step in {*updates, *schedule, *(start - 1 for start in later if start)}:
        assert int(window.length(Tensor(update_step, ms.int32))) == reference.window_length(schedule, update_step)


def whole(value, smallest):
    """Whether it is an integer of int32 from `smallest`; the 0 and 2 of JUNK, not True and not Tensor([1, 2])."""
    return not isinstance(value, (bool, np.bool_, float)) and np.size(value) == 1 and smallest <= int(value) < 2**31


@examples(100)
@given(st.dictionaries(st.sampled_from([0, 1, 7, -1, 2**31, 2**40]), st.sampled_from([-1, 0, 1, 2, 2**31, 10**400, True]), max_size=3))
def test_a_schedule_is_refused_exactly_if_a_number_does_not_fit(schedule):
    if 0 in schedule and all(whole(start, 0) and whole(length, 1) for start, length in schedule.items()):
        Window(schedule)
    else:
        with pytest.raises((TypeError, ValueError), match="accumulate_step"):
            Window(schedule)


@pytest.mark.parametrize("junk", [name for name, junk in JUNK.items() if name not in WHOLE])
def test_a_schedule_that_holds_junk_is_refused(junk):
    with pytest.raises((TypeError, ValueError), match=r"^accumulate_step\[0\] is .*; give an int >= 1"):
        Window({0: JUNK[junk]})


LARGEST_WINDOW = 2**31 - 1


def test_a_window_of_the_largest_length_stays_open():
    """A larger one would wrap around in int32, and close at once."""
    accumulator = Accumulator(nn.SGD(weights(), 0.1), LARGEST_WINDOW)
    grads = tuple(ops.ones_like(p) for p in accumulator.optimizer.parameters)

    @ms.jit
    def step(grads):
        return accumulator(grads)

    assert not any(bool(step(grads)) for _ in range(5))
    assert int(accumulator.mini_step) == 5
    with pytest.raises(ValueError, match=r"accumulate_step is 2147483648, expected at most 2147483647: counters are int32"):
        Accumulator(nn.SGD(weights(), 0.1), LARGEST_WINDOW + 1)
    with pytest.raises(ValueError, match=r"a key of accumulate_step is 2147483648, expected at most"):
        Accumulator(nn.SGD(weights(), 0.1), {0: 1, LARGEST_WINDOW + 1: 2})


# --- calls in every order ----------------------------------------------------------------------------------------------

SHAPES = ((2, 3), (), (4,))


class Pair:
    """An accumulator and the oracle, which are asked the same."""

    def __init__(self, accumulate_step, reduction, clip_norm, on_nonfinite, momentum, jit=False):
        self.weights = ParameterTuple([Parameter(Tensor(np.ones(shape), ms.float32), name=f"p{i}") for i, shape in enumerate(SHAPES)])
        self.optimizer = nn.Momentum(self.weights, 0.125, momentum)
        self.ours = Accumulator(self.optimizer, accumulate_step, clip_norm, reduction=reduction, on_nonfinite=on_nonfinite)
        self.oracle = reference.Accumulation(
            values(self.weights), reference.SGD(0.125, momentum), accumulate_step, reduction, clip_norm, on_nonfinite)
        self.largest = 1.0
        self.ask = {name: ms.jit(function) if jit else function for name, function in self.functions().items()}

    def functions(self):
        ours = self.ours

        def call(weight, *grads):
            return ours(grads, weight)

        def add(weight, *grads):
            ours.add(grads, weight)
            return ours.mini_step < 0  # nothing closes

        def apply():
            ours.apply()
            return ours.mini_step < 0

        def flush():
            return ours.flush()

        def reset():
            ours.reset()
            return ours.mini_step < 0

        def close_if(condition):
            return ours.close_if(condition)

        return {"__call__": call, "add": add, "apply": apply, "flush": flush, "reset": reset, "close_if": close_if}

    def microbatch(self, method, gradients, weight, given):
        """`given` is the weight in the form that ours gets it."""
        tensors = tuple(Tensor(g, ms.float32) for g in gradients)
        closed = bool(self.ask[method](given, *tensors))
        assert closed == bool(getattr(self.oracle, method)(gradients, weight))
        self.agree()

    def close(self, method, *condition):
        closed = bool(self.ask[method](*map(Tensor, condition)))
        assert closed == bool(getattr(self.oracle, method)(*condition))
        self.agree()

    def refuse(self, name):
        function, arguments = BAD[name]
        before = bits(self.ours, self.optimizer)
        with pytest.raises((TypeError, ValueError), match=r"grads|gradient of p\d|weight|condition"):
            getattr(self.ours, function)(*arguments)
        assert bits(self.ours, self.optimizer) == before

    def agree(self):
        ours, oracle = self.ours, self.oracle
        assert (int(ours.mini_step), int(ours.update_step), int(ours.skipped)) == (oracle.mini_step, oracle.update_step, oracle.skipped)
        assert int(self.optimizer.global_step.asnumpy().item()) == oracle.optimizer.calls
        np.testing.assert_allclose(float(ours.grad_norm), oracle.grad_norm, rtol=1e-5, atol=1e-6)
        self.largest = max(self.largest, *(np.abs(p).max() for p in oracle.parameters))
        for got, expected in zip(values(self.weights), oracle.parameters):
            np.testing.assert_allclose(got, expected, rtol=0, atol=1e-5 * self.largest)


def gradients_of(seed, bad=None):
    """Small whole numbers; with `bad`, one element is NaN or infinite."""
    rng = np.random.default_rng(seed)
    gradients = [rng.integers(-3, 4, shape).astype(np.float64) for shape in SHAPES]
    if bad is not None:
        gradients[seed % 3].reshape(-1)[-1:] = bad
    return gradients


def good(value=1.0):
    return tuple(Tensor(np.full(shape, value), ms.float32) for shape in SHAPES)


BAD = {
    "no gradients": ("__call__", ((),)),
    "one too many": ("add", ((*good(), good()[0]),)),
    "other order": ("__call__", (good()[::-1],)),
    "NumPy": ("__call__", (tuple(g.asnumpy() for g in good()),)),
    "a dict": ("add", (dict(enumerate(good())),)),
    "a generator": ("add", (iter(good()),)),
    "None": ("__call__", (None,)),
    "a hole": ("add", ((*good()[:2], None),)),
    "empty": ("add", (tuple(Tensor(np.zeros((0, *shape)), ms.float32) for shape in SHAPES),)),
    "flat": ("__call__", (tuple(g.reshape(-1) for g in good()),)),
    "complex": ("__call__", (tuple(g.astype(ms.complex64) for g in good()),)),
    "weight -1": ("add", (good(), -1)),
    "weight NaN": ("__call__", (good(), NAN)),
    "weight beyond float32": ("__call__", (good(), 1e39)),
    "weight beyond float": ("add", (good(), 10**400)),
    "weight text": ("add", (good(), "1")),
    "weight vector": ("__call__", (good(), Tensor([1.0, 2.0]))),
    "weight empty": ("add", (good(), Tensor(np.zeros(0), ms.float32))),
    "weight complex": ("__call__", (good(), Tensor(1j, ms.complex64))),
    "condition None": ("close_if", (None,)),
    "condition text": ("close_if", ("no",)),
    "condition NumPy": ("close_if", (np.array([True, False]),)),
    "condition vector": ("close_if", (Tensor([True, True]),)),
    "condition empty": ("close_if", (Tensor(np.zeros(0), ms.bool_),)),
}
WEIGHTS = st.sampled_from([
    (1.0, 1.0), (0.0, 0), (0.0, Tensor(0.0)), (2.0, 2), (0.5, np.float32(0.5)), (0.25, Fraction(1, 4)), (3.0, Tensor([3], ms.int64)),
    (1.5, Tensor(1.5, ms.float16)), (1.0, Tensor(True)), (-1.0, Tensor(-1.0)), (64.0, Tensor(64.0)),
    (4.0, Parameter(Tensor(4.0), name="weight"))])
STEPS = st.one_of(
    st.integers(1, 5), st.just(2**31 - 1),
    st.dictionaries(st.integers(1, 6), st.integers(1, 4), max_size=3).map(lambda later: {0: 2, **later}))


class AnyOrder(RuleBasedStateMachine):
    """Each call on the accumulator, the same on the oracle; where they differ, hypothesis shrinks the calls to the fewest."""

    @initialize(accumulate_step=STEPS, reduction=st.sampled_from(["sum", "mean"]), clip_norm=st.sampled_from([None, INF, 2.0, 0.01]),
                on_nonfinite=st.sampled_from(["apply", "skip_microbatch", "skip_window"]), momentum=st.sampled_from([0.0, 0.5]))
    def build(self, **options):
        self.pair = Pair(**options)

    @rule(method=st.sampled_from(["__call__", "__call__", "add"]), seed=st.integers(0, 99), weight=WEIGHTS)
    def microbatch(self, method, seed, weight):
        self.pair.microbatch(method, gradients_of(seed), *weight)

    @precondition(lambda self: self.pair.oracle.on_nonfinite != "apply")
    @rule(method=st.sampled_from(["__call__", "add"]), seed=st.integers(0, 99), bad=st.sampled_from([NAN, INF, -INF]), weight=WEIGHTS)
    def bad_microbatch(self, method, seed, bad, weight):
        self.pair.microbatch(method, gradients_of(seed, bad), *weight)

    @rule(seed=st.integers(0, 99))
    def masked_microbatch(self, seed):
        self.pair.microbatch("__call__", gradients_of(seed, NAN), 0.0, Tensor(0.0))

    @rule(method=st.sampled_from(["apply", "flush", "reset"]))
    def close(self, method):
        self.pair.close(method)

    @rule(condition=st.booleans())
    def close_if(self, condition):
        self.pair.close("close_if", condition)

    @rule(name=st.sampled_from(sorted(BAD)))
    def refuse(self, name):
        self.pair.refuse(name)


@pytest.mark.filterwarnings("ignore:invalid value")  # the oracle adds infinity and -infinity
@pytest.mark.parametrize("count", [30, pytest.param(1000, marks=pytest.mark.slow)])
def test_calls_in_any_order_follow_the_oracle(count):
    run_state_machine_as_test(AnyOrder, settings=settings(examples(count), stateful_step_count=30))


@pytest.mark.parametrize("name", sorted(BAD))
def test_each_bad_call_is_refused_and_changes_no_bit(name):
    pair = Pair(3, "mean", INF, "skip_window", 0.5)
    for seed in range(4):
        pair.microbatch("__call__", gradients_of(seed), 2.0, 2.0)
    pair.refuse(name)
    pair.microbatch("__call__", gradients_of(7), 2.0, 2.0)


CONFIGURATIONS = [
    ({0: 2, 2: 3, 5: 1}, "mean", 2.0, "skip_window", 0.5),
    (3, "sum", None, "skip_microbatch", 0.0),
]


@pytest.mark.parametrize("configuration", CONFIGURATIONS, ids=["mean", "sum"])
def test_compiled_calls_in_a_random_order_follow_the_oracle(configuration):
    """Each method in a jitted function of its own: one accumulator in six graphs, and called from the host between them."""
    pair = Pair(*configuration, jit=True)
    rng = np.random.default_rng(11)
    for i in range(200):
        method = rng.choice(["__call__", "add", "apply", "flush", "reset", "close_if"], p=[0.5, 0.2, 0.05, 0.1, 0.05, 0.1])
        if method in ("__call__", "add"):
            weight = float(rng.choice([0.0, 0.5, 1.0, 3.0]))
            gradients = gradients_of(i, rng.choice([NAN, INF]) if rng.random() < 0.1 else None)
            pair.microbatch(method, gradients, weight, Tensor(weight, ms.float32))
        else:
            pair.close(method, *([bool(rng.random() < 0.5)] if method == "close_if" else []))
        if i % 20 == 0:
            pair.refuse(sorted(BAD)[i // 20])
            host = gradients_of(i)
            assert bool(pair.ours(tuple(Tensor(g, ms.float32) for g in host))) == bool(pair.oracle(host))
            pair.agree()
    assert pair.oracle.update_step > 20
    assert pair.oracle.skipped > 5


# --- parameters of every kind ------------------------------------------------------------------------------------------


def parameter(value=(0.0, 0.0), dtype=ms.float32, name="odd", requires_grad=True):
    return Parameter(Tensor(value, dtype), name=name, requires_grad=requires_grad)


class Plain:
    """An optimizer that is no Cell and looks at nothing."""

    def __init__(self, *parameters):
        self.parameters = parameters

    def __call__(self, grads):
        return True


@pytest.mark.parametrize(("error", "message", "odd"), [
    (ValueError, r"odd has shape \(0, 3\), expected at least one element", [parameter(np.zeros((0, 3)))]),
    (TypeError, r"odd is a parameter of Int32, expected a float dtype; leave it out", [parameter((1, 2), ms.int32)]),
    (TypeError, r"odd is a parameter of Bool, expected a float dtype", [parameter((True, False), ms.bool_)]),
    (TypeError, r"odd is a parameter of Complex64, expected a float dtype", [parameter((1j, 2), ms.complex64)]),
    (ValueError, r"odd has requires_grad=False, expected trainable parameters .* after freezing", [parameter(requires_grad=False)]),
    (ValueError, r"optimizer holds two parameters called odd, expected each one once", [parameter(), parameter()]),
    (ValueError, r"optimizer holds two parameters called odd", [parameter()] * 2),
], ids=["empty", "int", "bool", "complex", "frozen", "same name", "twice"])
def test_parameters_that_cannot_be_accumulated_are_refused(error, message, odd):
    number = int(Accumulator(Plain(parameter()), 2).mini_step.name.removeprefix("accumulator").removesuffix(".mini_step"))
    with pytest.raises(error, match=message):
        Accumulator(Plain(parameter(name="even"), *odd), 2)
    assert Accumulator(Plain(parameter()), 2).mini_step.name == f"accumulator{number + 1}.mini_step"


def test_a_parameter_frozen_after_the_optimizer_was_made_is_refused():
    network = MLP()
    acc = Accumulator(nn.SGD(network.trainable_params(), 0.1), 2, reduction="mean")
    network.first.weight.requires_grad = False
    with pytest.raises(ValueError, match=r"first\.weight has requires_grad=False"):
        make_train_step(mean_loss(network), acc)


@pytest.mark.parametrize("jit", ["1", "0"])
def test_a_frozen_parameter_stays_and_the_others_follow_the_oracle(monkeypatch, jit):
    monkeypatch.setenv("MS_JIT", jit)
    network = MLP()
    frozen = network.first.weight
    frozen.requires_grad = False
    before, start = frozen.asnumpy(), values(network.get_parameters())
    acc = Accumulator(nn.SGD(network.trainable_params(), 0.5), 2, reduction="mean")
    train_step = make_train_step(mean_loss(network), acc)
    oracle = reference.Accumulation(start[1:], reference.SGD(0.5), 2, "mean")
    for x, y in batches([4] * 4):
        train_step(*tensors(x, y))
        oracle(reference.loss_and_gradients([start[0], *oracle.parameters], x, y)[1][1:], len(x))
    assert (frozen.asnumpy() == before).all()
    assert difference(values(network.trainable_params()), oracle.parameters) <= 1e-6
    assert difference(start[1:], oracle.parameters) > 1e-2


class Tied(nn.Cell):
    """Two layers that share one weight, and a temperature of shape ()."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Dense(3, 3, has_bias=False), nn.Dense(3, 3, has_bias=False)
        self.first.weight.set_data(Tensor(np.arange(9).reshape(3, 3) / 9, ms.float32))
        self.second.weight = self.first.weight
        self.temperature = Parameter(Tensor(2.0, ms.float32), name="temperature")

    def construct(self, x):
        return (self.second(self.first(x)) * self.temperature).mean()


@pytest.mark.parametrize("jit", ["1", "0"])
def test_a_parameter_that_two_cells_share_gets_both_gradients_once(monkeypatch, jit):
    """mean(t x W' W'): the gradient of W is that of both places, of t the mean without it."""
    monkeypatch.setenv("MS_JIT", jit)
    network = Tied()
    assert len(network.trainable_params()) == 2
    acc = Accumulator(nn.SGD(network.trainable_params(), 0.1), 2, reduction="mean")
    assert len(acc.buffers) == 2
    train_step = make_train_step(network, acc)
    by_name = {p.name.rpartition(".")[2]: i for i, p in enumerate(network.trainable_params())}
    start = values(network.trainable_params())
    oracle = reference.Accumulation(start, reference.SGD(0.1), 2, "mean")
    rng = np.random.default_rng(0)
    for _ in range(4):
        x = rng.normal(size=(3, 3))
        w, t = oracle.parameters[by_name["weight"]], oracle.parameters[by_name["temperature"]]
        ones = np.full((3, 3), 1 / 9)
        gradients = {"weight": t * (ones.T @ (x @ w.T) + (ones @ w).T @ x), "temperature": (x @ w.T @ w.T).mean()}
        train_step(Tensor(x, ms.float32))
        oracle([gradients[name] for name in sorted(by_name, key=by_name.get)])
    assert difference(values(network.trainable_params()), oracle.parameters) <= 1e-6
    assert difference(start, oracle.parameters) > 1e-2


# --- train steps -------------------------------------------------------------------------------------------------------

WRONG_BATCHES = [
    (), (None,), (3, "x"), (Tensor(1.0),), tensors(np.zeros((0, 6)), np.zeros(0)), (np.zeros((4, 6)), np.zeros(4)),
    ((Tensor(np.zeros((4, 6)), ms.float32),),), ({"x": Tensor(1.0)},),
]


@pytest.mark.parametrize("count", [15, pytest.param(300, marks=pytest.mark.slow)])
def test_batches_of_any_shape_follow_the_oracle(monkeypatch, count):
    """Sizes that change from call to call, more pieces than rows, masked rows; between them batches that are refused."""
    monkeypatch.setenv("MS_JIT", "0")

    @examples(count)
    @given(sizes=st.lists(st.integers(1, 7), min_size=1, max_size=6), micro_size=st.sampled_from([1, 2, 3, 8, 10**9]),
           strategy=st.sampled_from(["fused", "split"]), accumulate_step=STEPS, masked=st.booleans(),
           wrong=st.lists(st.integers(0, len(WRONG_BATCHES) - 1), max_size=3), seed=st.integers(0, 99))
    def follow(sizes, micro_size, strategy, accumulate_step, masked, wrong, seed):
        network = MLP()
        optimizer = nn.Momentum(network.trainable_params(), 0.1, 0.9)
        acc = Accumulator(optimizer, accumulate_step, 0.7, reduction="mean")
        weight_fn = counted if masked else None
        train_step = make_train_step(mean_loss(network), acc, micro_size=micro_size, strategy=strategy, weight_fn=weight_fn)
        oracle = reference.Accumulation(values(network.trainable_params()), reference.SGD(0.1, 0.9), accumulate_step, "mean", 0.7)
        for i, (x, y) in enumerate(batches(sizes, seed=seed)):
            if i < len(wrong):
                before = bits(acc, optimizer)
                with pytest.raises((TypeError, ValueError)):
                    train_step(*WRONG_BATCHES[wrong[i]])
                assert bits(acc, optimizer) == before
            if masked:
                y[seed % 3::3] = IGNORE
            train_step(*tensors(x, y))
            kept = y != IGNORE
            gradients = reference.loss_and_gradients(oracle.parameters, x[kept], y[kept])[1] if kept.any() else oracle.parameters
            oracle(gradients, kept.sum())
            assert (int(acc.mini_step), int(acc.update_step)) == (oracle.mini_step, oracle.update_step)
        assert bool(train_step.flush()) == oracle.flush()
        assert difference(values(network.trainable_params()), oracle.parameters) <= 1e-5

    follow()


IGNORE = -100  # of nn.CrossEntropyLoss


def counted(x, y):
    return (y != IGNORE).astype(ms.int32).sum()


LOSSES = """
import mindspore as ms, numpy as np
from mindspore import Tensor, nn
from ms_accum import Accumulator, make_train_step
network = nn.Dense(2, 1)
def whole(x):
    return network(x).mean().astype(ms.int32)
def complex_number(x):
    return network(x).mean().astype(ms.complex64)
def one_element(x):
    return network(x).mean().reshape(1)
def nothing(x):
    network(x)
def wrong_shape(x):
    return network(x[:, :1]).mean()
for forward_fn in (whole, complex_number, one_element, nothing, wrong_shape):
    acc = Accumulator(nn.SGD(network.trainable_params(), 0.1), 2, reduction="mean")
    before = [p.asnumpy().tobytes() for p in acc.parameters]
    try:
        make_train_step(forward_fn, acc)(Tensor(np.ones((4, 2)), ms.float32))
        print("accepted")
    except (TypeError, ValueError) as error:
        print(type(error).__name__, str(error).splitlines()[0], before == [p.asnumpy().tobytes() for p in acc.parameters])
"""


@pytest.mark.parametrize("jit", ["1", "0"])
def test_a_forward_function_that_fails_changes_no_bit(monkeypatch, jit):
    """MindSpore would differentiate through a cast: a loss of 0 with a gradient. The last error is the network's own.

    In a process of its own: after an error inside a gradient, MindSpore 2.10 fails to compile the next cross entropy ("GatherDGradV2").
    """
    monkeypatch.setenv("MS_JIT", jit)
    *refused, of_the_network = run_python(LOSSES).splitlines()
    assert re.fullmatch(r"\w+Error .*MatMul.* True", of_the_network)
    assert refused == [
        "TypeError forward_fn returned a loss of Int32, expected a float dtype; leave the loss as the network computed it True",
        "TypeError forward_fn returned a loss of Complex64, expected a float dtype; leave the loss as the network computed it True",
        "ValueError forward_fn returned a loss of shape (1,), expected shape (); give the mean over the samples True",
        "TypeError forward_fn returned no Tensor, expected the loss alone; give has_aux=True if it returns (loss, aux) True"]


# --- the command line --------------------------------------------------------------------------------------------------

OPTIONS = ["--data", "--batch-size", "--accumulate-step", "--epochs", "--lr", "--momentum", "--optimizer", "--clip-norm", "--seed",
           "--device-target", "--mode", "--strategy", "--micro-size", "--sync", "--json", "--plot", "--save"]
TEXTS = st.one_of(
    st.sampled_from([
        "", "0", "1", "-1", "nan", "inf", "-inf", "1e400", "1e-400", "1e-300", "1e308", "9" * 30, "9" * 5000, "1_0", "0x10", "2147483648",
        "~", "~nobody-of-that-name", "/", ".", "/dev/null", "run.json", "run.png", "run.ckpt", "a/b", "a\0b", "\udcff", "%s", "%(prog)s",
        "--", "-", "--lr", "a" * 300, "\x1b[31m", "sgd", "adam", "graph", "pynative", "split", "microbatch", "CPU", "GPU", "full"]),
    st.text(st.characters(codec=None, exclude_characters="/"), max_size=8))  # writes into the scratch folder only


@pytest.fixture
def stubbed(monkeypatch, tmp_path):
    """The command without its training; the digits are few, the cache is empty and there are no mirrors."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(fetch, "MIRRORS", ())
    monkeypatch.setattr(train, "train", lambda *_: iter([train.Epoch(1, 0.5, 50.0, 1.0, 1.0, 1, np.zeros(1))]))
    return str(write(tmp_path / "digits", embedded_set(9, 5)))


@pytest.mark.parametrize("count", [300, pytest.param(5000, marks=pytest.mark.slow)])
def test_any_command_line_runs_or_is_refused_in_one_line(stubbed, capfd, count):
    """capfd, as it writes what is no UTF-8 to stderr in other words, as Python itself does."""
    @examples(count)
    @given(st.lists(st.one_of(
        st.tuples(st.sampled_from(OPTIONS), TEXTS).map("=".join), st.sampled_from(["--shard", "--compare"]), TEXTS), max_size=4))
    def run(arguments):
        assume(not any(argument.startswith("-h") for argument in arguments))
        status = cli.main(["mnist", "--data", stubbed, "--batch-size", "3", *arguments])
        captured = capfd.readouterr()
        if status == 0:
            assert "epoch 1/" in captured.out
            assert captured.err == ""
        else:
            assert (status, captured.out) in ((2, ""), (1, ""))
            assert re.fullmatch(r"ms-accum( mnist)?: error: .+\n", captured.err)

    run()


@pytest.mark.parametrize(("arguments", "message"), [
    (["--json=--"], "argument --json: expected one argument, got '--'"),
    (["--batch-size=--"], "argument --batch-size: expected one argument, got '--'"),
    (["--data=~nobody-of-that-name"], "~nobody-of-that-name/train/train-images-idx3-ubyte (or train-images-idx3-ubyte.gz) is missing"),
])
def test_what_once_ended_in_a_traceback_is_refused(stubbed, capsys, arguments, message):
    assert cli.main(["mnist", *arguments]) == 2
    assert capsys.readouterr().err.startswith(f"ms-accum mnist: error: {message}")


def test_a_folder_whose_name_is_no_utf_8(stubbed, capsys):
    folder = os.fsdecode(b"digits\xff")
    Path(stubbed).rename(folder)
    assert cli.main(["mnist", "--data", folder, "--batch-size", "3"]) == 0
    assert "data       digits\\udcff: 9 digits" in capsys.readouterr().out


# --- a very long run ---------------------------------------------------------------------------------------------------

SOAK = """
import resource, sys
import mindspore as ms, numpy as np
from mindspore import Tensor, nn
try:
    from mindspore.graph.api import ms_compile_cache
except ImportError:  # MindSpore 2.8 and older
    from mindspore.common.api import ms_compile_cache
from ms_accum import Accumulator, avoid_busy_waiting, make_train_step
avoid_busy_waiting()
microbatches, warm_up = map(int, sys.argv[1:])
network = nn.Dense(3, 1, weight_init="zeros")
acc = Accumulator(nn.SGD(network.trainable_params(), 1e-3), {0: 3, 1000: 7}, 1.0, reduction="mean")
def forward_fn(x):
    return (network(x) ** 2).mean()
train_step = make_train_step(forward_fn, acc)
rng = np.random.default_rng(0)
data = rng.normal(size=(64, 4, 3)).astype(np.float32)
def resident():
    return int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize()
for i in range(microbatches):
    if i == warm_up:
        memory, graphs = resident(), len(ms_compile_cache)
    loss = train_step(Tensor(data[i % 64]))
grown = resident() - memory
print(grown, len(ms_compile_cache) - graphs, int(acc.mini_step), int(acc.update_step), np.isfinite(float(loss)))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/statm")
@pytest.mark.parametrize("microbatches", [6_000, pytest.param(200_000, marks=pytest.mark.slow)])
def test_a_very_long_run_grows_by_nothing_and_counts_right(microbatches):
    grown, compiled, mini_step, update_step, finite = run_python(SOAK, str(microbatches), "3000").split()
    print(f"{microbatches} microbatches: memory grew by {int(grown) / 2**20:.2f} MiB after the first 3,000")
    assert int(grown) <= 5e6
    assert int(compiled) == 0
    assert int(update_step) == 1000 + (microbatches - 3000) // 7  # 1,000 windows of 3, then windows of 7
    assert int(mini_step) == (microbatches - 3000) % 7
    assert finite == "True"
