"""Accumulator by hand: its contract, line by line and compiled, the tutorial's script, its state, and what it refuses."""
import json
import math
from pathlib import Path
from typing import NamedTuple

import mindspore as ms
import numpy as np
import pytest
import reference
from conftest import MLP, compiled, difference, tensors, values
from following import warned
from mindspore import Parameter, ParameterTuple, Tensor, nn

from ms_accum import Accumulator

pytestmark = pytest.mark.core

INF, NAN = float("inf"), float("nan")
NORM = math.sqrt(14)  # of the gradients below, for the value 1
SHAPES = ((2, 3), (2, 4))


def parameters(prefix="p"):
    return ParameterTuple([Parameter(Tensor(np.zeros(s), ms.float32), f"{prefix}{i}") for i, s in enumerate(SHAPES)])


def gradients(value):
    return tuple([Tensor(np.full(shape, value), ms.float32) for shape in SHAPES])


def arrays(value):
    return [np.full(shape, value) for shape in SHAPES]


def descend(accumulate_step=2, clip_norm=None, prefix="p", **options):
    """An accumulator whose parameters are minus the sum of all gradients that its optimizer got."""
    return Accumulator(nn.SGD(parameters(prefix), 1.0), accumulate_step, clip_norm, **options)


def oracle_of(options):
    return reference.Accumulation([np.zeros(shape) for shape in SHAPES], reference.SGD(1.0), **options)


# --- the contract -----------------------------------------------------------------------------------------------------


class Row(NamedTuple):
    """Calls, and what they lead to; a call is a value, (value, weight), the name of a method, or (name, argument)."""

    options: dict
    calls: list
    closed: str  # "x" for each call that closed a window
    applied: float  # the sum of the gradients that the optimizer got
    counters: tuple  # mini_step, update_step, skipped
    grad_norm: float = NAN


def mean(accumulate_step=2, **options):
    return {"accumulate_step": accumulate_step, "reduction": "mean", **options}


def total(accumulate_step=2, **options):
    return {"accumulate_step": accumulate_step, **options}


def with_bad(bad, place, *calls):
    return [*calls[:place], bad, *calls[place:]]


CONTRACT = [
    Row(total(3), [1] * 7, "..x..x.", 6, (1, 2, 0)),
    Row(total(1), [2] * 3, "xxx", 6, (0, 3, 0)),
    Row(total({0: 1, 2: 3, 3: 2}), [1] * 9, "xx..x.x.x", 9, (0, 5, 0)),  # its length changes between windows only
    # by the script's own rule
    Row(total(), [*[("add", 1)] * 5, "apply"], "......", 5, (0, 1, 0)),
    Row(mean(), [1, 3, "apply"], ".x.", 2, (0, 2, 0)),  # the optimizer runs on zeros
    Row(total(9), [("close_if", False), 1, 2, ("close_if", False), ("close_if", True)], "....x", 3, (0, 1, 0)),
    Row(total(9), [("close_if", True)], ".", 0, (0, 1, 0)),  # as "apply" does
    Row(mean(4), ["flush"], ".", 0, (0, 0, 0)),
    Row(mean(4), [1, 2, 6, "flush", "flush", 7, 7, 7, 7], "...x....x", 3 + 7, (0, 2, 0)),  # divided by 3, then realigned
    Row(mean(), ["reset", (5, 3), "reset", 1, 1], "....x", 1, (0, 1, 0)),
    # weights
    Row(total(), [(1, 2), (4, 0.5)], ".x", 4, (0, 1, 0)),
    Row(mean(), [(1, 2), (4, 0.5)], ".x", 1.6, (0, 1, 0)),
    *[Row(mean(3, on_nonfinite=policy), [(1, 2), (NAN, 0), (4, 1)], "..x", 2, (0, 1, 0))
      for policy in ("apply", "skip_microbatch", "skip_window")],  # the gradient of a mean over no token is 0/0
    Row(mean(), [(1, 0), (1, 0), (1, 0), (5, 2)], ".x.x", 5, (0, 2, 0)),  # a window without weight: zero, not NaN
    Row(total(), [(1, 2), (4, -0.25)], ".x", 1, (0, 1, 0)),  # a graph cannot refuse a value: a wrong one shows
    Row(total(), [(1, 2), (4, NAN)], ".x", NAN, (0, 1, 0)),
    # clipping sees the accumulated, normalised gradient, once
    Row(mean(clip_norm=1.0), [5, -1], ".x", 2 / (2 * NORM + 1e-6), (0, 1, 0), 2 * NORM),
    Row(total(clip_norm=100.0), [1, 1], ".x", 2, (0, 1, 0), 2 * NORM),
    *[Row(total(1, clip_norm=INF), [value], "x", value, (0, 1, 0), value * NORM) for value in (1e-25, 1e-12, 1e15)],
    # gradients that are not finite
    Row(total(), [NAN, 1], ".x", NAN, (0, 1, 0)),
    Row(total(1, on_nonfinite="skip_microbatch"), [NAN, 1, INF], ".x.", 1, (0, 1, 2)),
    Row(total(1, on_nonfinite="skip_microbatch"), [1e30], "x", 1e30, (0, 1, 0)),  # its square overflows
    # a microbatch that is skipped leaves the window open for another one; the third one here opens the next window
    *[Row(mean(on_nonfinite="skip_microbatch"), with_bad(INF, i, 1, 3), ".x." if i == 2 else "..x", 2, (0, 1, 1))
      for i in range(3)],
    # a dropped window leaves nothing in the buffers of the next one
    *[Row(total(clip_norm=INF, on_nonfinite="skip_window"), with_bad(bad, i, 1, 1, 2), ".x.x", 3, (0, 1, 1), 3 * NORM)
      for bad in (NAN, -INF) for i in range(2)],
]


class Compiled:
    """An accumulator whose methods are graphs."""

    def __init__(self, accumulator):
        def call(weight, *grads):  # Tensors inside a tuple argument would be constants
            return accumulator(grads, weight)

        def apply():
            accumulator.apply()
            return accumulator.mini_step < 0

        def reset():
            accumulator.reset()
            return accumulator.mini_step < 0

        def close_if(condition):
            return accumulator.close_if(condition)

        self.add, self.flush, self._call = accumulator.add, accumulator.flush, ms.jit(call)
        self.apply, self.reset, self.close_if = map(ms.jit, (apply, reset, close_if))

    def __call__(self, grads, weight=1.0):
        return self._call(weight, *grads)


def asked(target, call, make_gradients, number):
    """Make one call of a row on the accumulator or the oracle; return whether it closed a window."""
    name, *arguments = call if isinstance(call, tuple) else (call,)
    if isinstance(name, str):
        return bool(getattr(target, name)(*map(make_gradients if name == "add" else number, arguments)))
    return bool(target(make_gradients(name), *map(number, arguments)))


@pytest.mark.filterwarnings("ignore:invalid value")
@pytest.mark.parametrize("context", ["pynative", "graph", "jit"])
def test_the_contract_line_by_line(mode_named, context):
    """Called from the host, op by op or as a graph for each method; and the oracle keeps it, too."""
    mode_named(context)
    for row in {"pynative": CONTRACT, "graph": CONTRACT[:11], "jit": CONTRACT[2:10] + CONTRACT[-3:]}[context]:
        accumulator, oracle = descend(**row.options), oracle_of(row.options)
        for target, make_gradients, number in ((accumulator, gradients, Tensor), (oracle, arrays, float)):
            asks = Compiled(target) if context == "jit" and target is accumulator else target
            closed = [asked(asks, call, make_gradients, number) for call in row.calls]
            assert "".join(".x"[flag] for flag in closed) == row.closed, row
            assert tuple(int(getattr(target, name)) for name in ("mini_step", "update_step", "skipped")) == row.counters, row
            assert float(target.grad_norm) == pytest.approx(row.grad_norm, rel=1e-6, abs=0, nan_ok=True), row
        for p in (*values(accumulator.optimizer.parameters), *oracle.parameters):
            np.testing.assert_allclose(p, np.full(p.shape, -row.applied), rtol=1e-6, err_msg=str(row))
    assert accumulator(gradients(1)).dtype == ms.bool_
    assert accumulator.flush() is True


# --- drop-in ----------------------------------------------------------------------------------------------------------


def tutorial_script(mode, network, accumulate_step, digits):
    """Run the tutorial's lines, unchanged but for the network; yield the parameters after each microbatch."""
    loss_fn = nn.CrossEntropyLoss()
    optimizer = nn.SGD(network.trainable_params(), 0.1)
    accumulator = Accumulator(optimizer, accumulate_step)

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


def test_the_tutorials_script_runs_unchanged(mode, mnist_microbatches, capfd):
    """And without a warning of MindSpore."""
    network, digits = MLP(784, 16, 10), mnist_microbatches[:22]
    previous, moved = values(network.trainable_params()), []
    oracle = reference.Accumulation(previous, reference.SGD(0.1), 4)
    for (x, y), after in zip(digits, tutorial_script(mode, network, 4, digits)):
        oracle([g / 4 for g in reference.loss_and_gradients(oracle.parameters, x, y)[1]])
        assert difference(after, oracle.parameters) <= 1e-5
        moved.append(difference(after, previous) > 1e-3)
        previous = after
    assert moved == [i % 4 == 3 for i in range(22)]  # the control: a window of 2 would move at other places
    assert warned(capfd) == []


def article(mode, divisor, rows):
    """Two epochs of the published experiment, as two microbatches each; the loss is the sum of the outputs."""
    network = nn.Dense(8, 1, weight_init="ones", has_bias=False)
    accumulator = Accumulator(nn.SGD(network.trainable_params(), 0.01, 0.9), 2)

    def forward_fn(x):
        return network(x).sum() / divisor

    grad_fn = ms.grad(forward_fn, None, accumulator.optimizer.parameters)

    def step(x):
        return accumulator(grad_fn(x))

    step = compiled(step, mode)
    oracle = reference.Accumulation([np.ones((1, 8))], reference.SGD(0.01, 0.9), 2)
    for part in [rows[0::2], rows[1::2]] * 2:
        assert bool(step(Tensor(part))) == oracle([part.sum(0, keepdims=True) / divisor])
    assert difference(values([network.weight]), oracle.parameters) < 1e-6
    return network.weight.asnumpy().reshape(-1)


def test_the_published_experiment(mode):
    published = json.loads((Path(__file__).parent / "article_rand8x8.json").read_text(encoding="utf-8"))
    rows = np.array(published["rows"], np.float32)
    weights, undivided = article(mode, 2, rows), article(mode, 1, rows)
    np.testing.assert_allclose(weights, published["pytorch_weights"], rtol=1e-6)
    np.testing.assert_allclose(weights, published["published_weights"], atol=5.1e-5)
    assert abs(undivided - weights).max() > 1e-2  # the control: a loss that the script does not divide


# --- state ------------------------------------------------------------------------------------------------------------


def test_one_buffer_for_each_parameter_and_names_that_are_unique_here_and_the_same_in_a_checkpoint():
    accumulators = [descend(2) for _ in range(3)]
    accumulator = accumulators[0]
    assert [b.shape for b in accumulator.buffers.parameters] == [*SHAPES]
    assert accumulator.buffers.nbytes == 14 * 4
    assert sum(p.size for p in accumulator.parameters) == 14 + 12  # twelve scalars
    assert not any(p.requires_grad for p in accumulator.parameters)
    assert [*accumulator.state.values()] == [*accumulator.parameters]
    assert {"p0", "p1", "mini_step", "weight_sum", "weight_unit"} < accumulator.open_state < {*accumulator.state}
    assert not {"update_step", "skipped", "skipped_in_row", "seen", "closed_windows"} & accumulator.open_state
    assert {tuple(one.state) for one in accumulators} == {tuple(accumulator.state)}
    names = [p.name for one in accumulators for p in one.parameters]
    assert len(set(names)) == len(names)
