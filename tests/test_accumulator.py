"""Accumulator by hand: its contract, line by line and compiled, the tutorial's script, and its state."""
import json
import math
from pathlib import Path
from typing import NamedTuple

import mindspore as ms
import numpy as np
import pytest
import reference
from conftest import MLP, batches, compiled, difference, tensors, values
from following import warned
from mindspore import Parameter, Tensor, nn

from ms_accum import Accumulator

pytestmark = pytest.mark.core

INF, NAN = float("inf"), float("nan")
SHAPES = ((2, 3), (2, 4))
NORM = math.sqrt(14)  # of the gradients below, for the value 1


def gradients(value):
    return tuple([Tensor(np.full(shape, value), ms.float32) for shape in SHAPES])


def descend(accumulate_step=2, clip_norm=None, **options):
    """An accumulator whose parameters are minus the sum of all gradients that its optimizer got."""
    parameters = [Parameter(Tensor(np.zeros(shape), ms.float32), f"p{i}") for i, shape in enumerate(SHAPES)]
    return Accumulator(nn.SGD(parameters, 1.0), accumulate_step, clip_norm, **options)


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


CONTRACT = [
    Row(total(3), [1] * 7, "..x..x.", 6, (1, 2, 0)),
    Row(mean(4), [1, 2, 6, "flush", "flush", 7, 7, 7, 7], "...x....x", 3 + 7, (0, 2, 0)),  # by 3, then realigned
    # by the script's own rule
    Row(total(), [*[("add", 1)] * 5, "apply"], "......", 5, (0, 1, 0)),
    Row(mean(), [1, 3, "apply"], ".x.", 2, (0, 2, 0)),  # the optimizer runs on zeros
    Row(total(9), [("close_if", False), 1, 2, ("close_if", True)], "...x", 3, (0, 1, 0)),
    Row(total(9), [("close_if", True)], ".", 0, (0, 1, 0)),  # as "apply" does
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
    # gradients that are not finite
    Row(total(), [NAN, 1], ".x", NAN, (0, 1, 0)),
    Row(total(1, on_nonfinite="skip_microbatch"), [NAN, 1, INF], ".x.", 1, (0, 1, 2)),
    Row(total(1, on_nonfinite="skip_microbatch"), [1e30], "x", 1e30, (0, 1, 0)),  # its square overflows
    Row(total(clip_norm=INF, on_nonfinite="skip_window"), [1, -INF, 1, 2], ".x.x", 3, (0, 1, 1), 3 * NORM),
]


def asked(accumulator, call):
    """Make one call of a row; return whether it closed a window."""
    name, *arguments = call if isinstance(call, tuple) else (call,)
    if not isinstance(name, str):
        return bool(accumulator(gradients(name), *map(Tensor, map(float, arguments))))
    return bool(getattr(accumulator, name)(*map(gradients if name == "add" else Tensor, arguments)))


@pytest.mark.parametrize("context", ["pynative", "graph"])
def test_the_contract_line_by_line(mode_named, context):
    """Called from the host. In a graph, by hand and in any order: test_machine.py."""
    mode_named(context)
    for row in CONTRACT if context == "pynative" else CONTRACT[:6]:
        accumulator = descend(**row.options)
        assert "".join(".x"[asked(accumulator, call)] for call in row.calls) == row.closed, row
        counters = accumulator.mini_step, accumulator.update_step, accumulator.skipped
        assert tuple(map(int, counters)) == row.counters, row
        assert float(accumulator.grad_norm) == pytest.approx(row.grad_norm, rel=1e-6, abs=0, nan_ok=True), row
        for p in values(accumulator.optimizer.parameters):
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
    accumulator = Accumulator(nn.SGD(network.trainable_params(), 0.01, 0.9), 2)

    def forward_fn(x):
        return network(x).sum() / divisor

    grad_fn = ms.grad(forward_fn, None, accumulator.optimizer.parameters)

    def step(x):
        return accumulator(grad_fn(x))

    step = compiled(step, mode)
    assert [bool(step(Tensor(part))) for part in [rows[0::2], rows[1::2]] * 2] == [False, True] * 2
    return network.weight.asnumpy().reshape(-1)


def test_the_published_experiment(mode):
    published = json.loads((Path(__file__).parent / "article_rand8x8.json").read_text(encoding="utf-8"))
    rows = np.array(published["rows"], np.float32)
    weights = article(mode, 2, rows)
    np.testing.assert_allclose(weights, published["pytorch_weights"], rtol=1e-6)
    np.testing.assert_allclose(weights, published["published_weights"], atol=5.1e-5)
    assert abs(article("pynative", 1, rows) - weights).max() > 1e-2  # the control: a loss that is not divided


# --- state ------------------------------------------------------------------------------------------------------------


def test_one_buffer_for_each_parameter_and_names_that_are_unique_here_and_the_same_in_a_checkpoint():
    accumulators = [descend() for _ in range(3)]
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
