"""Accumulator: its contract by hand, every combination of options against the oracle, its state, and what it refuses."""
import gc
import math
import sys
from itertools import combinations, count, product
from pathlib import Path
from typing import NamedTuple

import mindspore as ms
import numpy as np
import pytest
import reference
from conftest import MLP, Counting, batches, compiled, difference, mean_loss, run_python, tensors, values
from mindspore import Parameter, ParameterTuple, Tensor, nn, ops
from pair import SHAPES, Pair, tensors_of

from ms_accum import Accumulator

INF, NAN = float("inf"), float("nan")
NORM = math.sqrt(14)  # of the gradients below, for the value 1
_numbers = count()


def parameters(dtype=ms.float32):
    """Return two parameters of zeros, whose names are new: one graph takes each name once."""
    return ParameterTuple([Parameter(Tensor(np.zeros(shape), dtype), name=f"p{next(_numbers)}") for shape in ((2, 3), (2, 4))])


def gradients(value, dtype=ms.float32):
    return Tensor(np.full((2, 3), value), dtype), Tensor(np.full((2, 4), value), dtype)


def descend(accumulate_step=2, clip_norm=None, **options):
    """Return an accumulator whose parameters are minus the sum of all gradients that its optimizer got."""
    return Accumulator(nn.SGD(parameters(), 1.0), accumulate_step, clip_norm, **options)


def applied(accumulator):
    """Return the sum of the gradients that the optimizer got; all their elements are equal here."""
    elements = -np.concatenate([p.asnumpy().ravel() for p in accumulator.optimizer.parameters]).astype(np.float64)
    np.testing.assert_array_equal(elements, elements[0])
    return elements[0]


def buffers(accumulator):
    names = {p.name for p in accumulator.optimizer.parameters}
    return [p for p in accumulator.parameters if p.name.partition(".")[2] in names]


# --- the contract ------------------------------------------------------------------------------------------------------


class Row(NamedTuple):
    """Calls, and what they lead to; a call is a value, (value, weight), the name of a method, or (name, argument)."""

    options: dict
    calls: list
    closed: str  # "x" for each call that closed a window
    applied: float
    counters: tuple  # mini_step, update_step, skipped
    grad_norm: float = np.nan


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
    Row(total(), [("add", 1)] * 5, ".....", 0, (5, 0, 0)),
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
      for policy in ("apply", "skip_microbatch", "skip_window")],  # the gradient of a mean over no unmasked token is 0/0
    Row(mean(), [(1, 0), (1, 0), (1, 0), (5, 2)], ".x.x", 5, (0, 2, 0)),  # a window without weight: zero, not NaN
    Row(total(), [(1, 2), (4, -0.25)], ".x", 1, (0, 1, 0)),  # a graph cannot refuse a value: a wrong one shows
    Row(total(), [(1, 2), (4, NAN)], ".x", NAN, (0, 1, 0)),
    # clipping sees the accumulated, normalised gradient, once
    Row(mean(clip_norm=1.0), [5, -1], ".x", 2 / (2 * NORM + 1e-6), (0, 1, 0), 2 * NORM),
    Row(total(clip_norm=100.0), [1, 1], ".x", 2, (0, 1, 0), 2 * NORM),
    Row(total(clip_norm=INF), [1, 1], ".x", 2, (0, 1, 0), 2 * NORM),
    Row(total(clip_norm=None), [1, 1], ".x", 2, (0, 1, 0)),
    *[Row(total(1, clip_norm=INF), [value], "x", value, (0, 1, 0), value * NORM) for value in (1e-25, 1e-12, 1e15)],
    # gradients that are not finite
    Row(total(), [NAN, 1], ".x", NAN, (0, 1, 0)),
    Row(total(1, on_nonfinite="skip_microbatch"), [NAN, 1, INF], ".x.", 1, (0, 1, 2)),
    Row(total(1, on_nonfinite="skip_microbatch"), [1e30], "x", 1e30, (0, 1, 0)),  # its square overflows
    # a microbatch that is skipped leaves the window open for another one; the third one here opens the next window
    *[Row(mean(on_nonfinite="skip_microbatch"), with_bad(bad, place, 1, 3), ".x." if place == 2 else "..x", 2, (0, 1, 1))
      for bad in (NAN, INF, -INF) for place in range(3)],
    # a dropped window leaves nothing in the buffers of the next one
    *[Row(total(clip_norm=INF, on_nonfinite="skip_window"), with_bad(bad, place, 1, 1, 2), ".x.x", 3, (0, 1, 1), 3 * NORM)
      for bad in (NAN, INF, -INF) for place in range(2)],
]


def asked(target, call, make_gradients, number):
    """Make one call of a row on the accumulator or the oracle; return what it returned."""
    name, *arguments = call if isinstance(call, tuple) else (call,)
    if isinstance(name, str):
        return getattr(target, name)(*map(make_gradients if name == "add" else number, arguments))
    return target(make_gradients(name), *map(number, arguments))


@pytest.mark.parametrize("context", ["pynative", "graph"])
def test_the_contract_line_by_line(mode_named, context):
    """Called from the host; compiled, the same follows from the tests against the oracle."""
    mode_named(context)
    for row in CONTRACT if context == "pynative" else CONTRACT[:11]:
        accumulator = descend(**row.options)
        results = [asked(accumulator, call, gradients, Tensor) for call in row.calls]
        assert all(r is None or (isinstance(r, Tensor) and r.dtype == ms.bool_ and r.shape == ()) for r in results)
        assert "".join(".x"[bool(r)] for r in results) == row.closed, row
        np.testing.assert_allclose(applied(accumulator), row.applied, rtol=1e-6, err_msg=str(row))
        assert (int(accumulator.mini_step), int(accumulator.update_step), int(accumulator.skipped)) == row.counters, row
        assert float(accumulator.grad_norm) == pytest.approx(row.grad_norm, rel=1e-6, abs=0, nan_ok=True), row


@pytest.mark.filterwarnings("ignore:invalid value")
def test_the_oracle_keeps_the_contract():
    for row in CONTRACT:
        oracle = reference.Accumulation([np.zeros((2, 3)), np.zeros((2, 4))], reference.SGD(1.0), **row.options)
        results = [asked(oracle, call, lambda value: [np.full((2, 3), value), np.full((2, 4), value)], float) for call in row.calls]
        assert "".join(".x"[bool(r)] for r in results) == row.closed, row
        np.testing.assert_allclose(-oracle.parameters[1], np.full((2, 4), row.applied), rtol=1e-6, err_msg=str(row))
        assert (oracle.mini_step, oracle.update_step, oracle.skipped) == row.counters, row
        assert oracle.grad_norm == pytest.approx(row.grad_norm, rel=1e-6, abs=0, nan_ok=True), row


# --- every combination of options, against the oracle ------------------------------------------------------------------


def growing(update_step):
    return update_step + 2


SCHEDULES = {"int": 3, "dict": {0: 2, 1: 4, 3: 1}, "callable": growing}
COLUMNS = (("mean", "sum"), tuple(SCHEDULES), (None, 2.0), ("sgd", "momentum", "adam"), (ms.float32, ms.float16),
           ("apply", "skip_microbatch", "skip_window"))
# Each two values of any two columns meet in one of these.
PAIRWISE = [
    ("sum", "int", 2.0, "adam", ms.float32, "skip_window"), ("sum", "callable", None, "momentum", ms.float16, "apply"),
    ("mean", "dict", 2.0, "sgd", ms.float16, "skip_microbatch"), ("mean", "dict", None, "adam", ms.float32, "apply"),
    ("mean", "callable", None, "sgd", ms.float32, "skip_window"), ("mean", "int", None, "momentum", ms.float32, "skip_microbatch"),
    ("sum", "callable", 2.0, "adam", ms.float16, "skip_microbatch"), ("sum", "int", 2.0, "sgd", ms.float16, "apply"),
    ("sum", "dict", 2.0, "momentum", ms.float16, "skip_window"),
]


def test_each_two_values_of_the_combinations_meet():
    for (i, one), (j, other) in combinations(enumerate(COLUMNS), 2):
        assert {(row[i], row[j]) for row in PAIRWISE} == set(product(one, other))


def microbatch_of(pair, dtype):
    """Return `(weight, *gradients, *the same with bad elements)` -> closed; "apply" gets the good ones."""
    call, good = pair.ask["__call__"], pair.ours.on_nonfinite == "apply"

    def microbatch(weight, *grads):
        grads = grads[:len(SHAPES)] if good else grads[len(SHAPES):]
        return call(weight, *[g.astype(dtype) for g in grads])
    return microbatch


def random_microbatches(number):
    """Yield (weight, gradients in float16's precision, the same, often with an element that is not finite)."""
    rng = np.random.default_rng(3)
    for _ in range(number):
        weight = float(rng.choice([0.0, 0.5, 1.0, 3.0]))
        good = [rng.normal(size=shape).astype(np.float16).astype(np.float64) for shape in SHAPES]
        bad = [g.copy() for g in good]
        if rng.random() < 0.3:
            bad[rng.integers(3)].reshape(-1)[-1:] = rng.choice([NAN, INF, -INF])
        yield weight, bad if weight == 0 else good, bad


@pytest.mark.filterwarnings("ignore:invalid value")  # the oracle adds infinity and -infinity
@pytest.mark.parametrize("combinations", [
    PAIRWISE, *[pytest.param([*product(*COLUMNS)][i::18], marks=pytest.mark.slow) for i in range(18)]])
def test_compiled_accumulators_follow_the_oracle(combinations):
    """All in one graph, with parameters and counters compared after every microbatch."""
    pairs = [Pair(SCHEDULES[schedule], reduction, clip_norm, on_nonfinite, optimizer, prefix=f"pair{i}.")
             for i, (reduction, schedule, clip_norm, optimizer, _, on_nonfinite) in enumerate(combinations)]
    calls = tuple([microbatch_of(pair, row[4]) for pair, row in zip(pairs, combinations)])

    @ms.jit
    def step(weight, *grads):
        return tuple([call(weight, *grads) for call in calls])

    for weight, good, bad in random_microbatches(24):
        closed = step(Tensor(weight, ms.float32), *[Tensor(g, ms.float32) for g in (*good, *bad)])
        for pair, flag in zip(pairs, closed):
            pair.check("__call__", flag, good if pair.ours.on_nonfinite == "apply" else bad, weight)
    for pair in pairs:
        pair.close("flush")
        assert pair.oracle.update_step > 3
        assert pair.ours.on_nonfinite == "apply" or pair.oracle.skipped > 0
    # Negative control: with another denominator the parameters are far off.
    wrong = next(pair for pair in pairs if pair.oracle.reduction == "mean")
    wrong.oracle.reduction = "sum"
    for weight in (1.0, 3.0, 3.0):
        wrong.ours.add(tensors_of(good), Tensor(weight))
        wrong.oracle.add(good, weight)
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        wrong.close("flush")


def test_accumulated_gradient_is_that_of_the_undivided_batch(mode):
    """Ragged microbatches to 1e-6; without the weights it is not."""
    network, (x, y) = MLP(), batches([13])[0]
    weighted, unweighted = (Accumulator(Counting(network.trainable_params()), 3, reduction="mean") for _ in range(2))
    grad_fn = ms.value_and_grad(mean_loss(network), None, network.trainable_params())

    def step(x, y, weight):
        return weighted(grad_fn(x, y)[1], weight)

    step = compiled(step, mode)
    for rows in (slice(0, 5), slice(5, 10), slice(10, 13)):
        batch = tensors(x[rows], y[rows])
        assert bool(step(*batch, Tensor(len(y[rows]), ms.float32))) == bool(unweighted(grad_fn(*batch)[1])) == (rows.stop == 13)
    undivided = values(grad_fn(*tensors(x, y))[1])
    assert difference(values(weighted.optimizer.seen), undivided) <= 1e-6
    assert difference(values(unweighted.optimizer.seen), undivided) > 1e-2


# --- gradients that are not finite -------------------------------------------------------------------------------------

BAD = [(parameter, value) for parameter in range(len(SHAPES)) for value in (NAN, INF, -INF)]


def spoiled(grads, parameter, value):
    """Return the same with one bad element, the last one, in one parameter's gradient."""
    grads = [g.copy() for g in grads]
    grads[parameter].reshape(-1)[-1:] = value
    return grads


def test_skipped_microbatches_and_dropped_windows_leave_no_trace(mode):
    """A bad element of every kind in every parameter at every place of a window: state is that of a run that never saw one."""
    accumulators = []
    for i, policy in enumerate(("skip_microbatch", "skip_window")):
        weights = [Parameter(Tensor(np.full(shape, 0.5), ms.float32), name=f"trace{i}.{j}") for j, shape in enumerate(SHAPES)]
        optimizer = nn.Momentum(weights, nn.exponential_decay_lr(0.5, 0.9, 100, 1, 1), 0.9, weight_decay=0.01)
        accumulators.append(Accumulator(optimizer, 3, 0.5, reduction="mean", on_nonfinite=policy))
    counts = "skipped", "closed_windows"
    held = [[p for p in (*acc.optimizer.get_parameters(), *acc.parameters) if not p.name.endswith(counts)] for acc in accumulators]
    start = [p.asnumpy().copy() for p in (*held[0], *held[1])]
    accumulators = tuple(accumulators)

    def step(*grads):
        return tuple([acc(grads, 2.0) for acc in accumulators])

    step = compiled(step, mode)

    def run(sequence):
        """Return the bits of both accumulators after a sequence, from the start."""
        for parameter, value in zip((*held[0], *held[1]), start):
            ops.assign(parameter, Tensor(value))
        for grads in sequence:
            step(*tensors_of(grads))
        return [[p.asnumpy().tobytes() for p in state] for state in held]

    rng = np.random.default_rng(0)
    good = [[[rng.normal(size=shape) for shape in SHAPES] for _ in range(3)] for _ in range(3)]
    sequence, finite = [], []
    for place, window in enumerate(good):
        for i, (parameter, value) in enumerate(BAD):
            window_of_bad = list(window)
            window_of_bad[(i + place) % 3] = spoiled(window[(i + place) % 3], parameter, value)
            sequence += window_of_bad
            finite += [grads for j, grads in enumerate(window) if j != (i + place) % 3]
        sequence += window
        finite += window
    seen = run([*sequence, good[0][0]])
    assert [int(acc.skipped) for acc in accumulators] == [27, 27]
    assert [int(acc.update_step) for acc in accumulators] == [21, 3]
    assert seen[0] == run([*finite, good[0][0]])[0]
    assert seen[1] == run([*good[0], *good[1], *good[2], good[0][0]])[1]
    assert seen[1] != run([*good[0], *good[1], good[0][0]])[1]  # the negative control


def test_finite_gradients_whose_sum_overflows_are_skipped():
    """No update would survive them; see `gradients.all_finite`."""
    accumulator = descend(1, on_nonfinite="skip_microbatch")
    assert not bool(accumulator(gradients(1e38)))
    assert (int(accumulator.skipped), int(accumulator.mini_step)) == (1, 0)


# --- dtypes --------------------------------------------------------------------------------------------------------


def mixed(prefix):
    """Return parameters of every float dtype, one of them a scalar."""
    kinds = ((ms.float16, [0.0]), (ms.float32, 0.0), (ms.float64, [0.0]))
    return ParameterTuple([Parameter(Tensor(value, dtype), name=f"{prefix}{dtype}") for dtype, value in kinds])


def test_dtypes_of_parameters_and_buffers(mode):
    """Several microbatches in one function; each gradient in its parameter's dtype; a reset also clears NaN."""
    asked_for = (None, ms.float16, ms.float32, ms.float64)
    accumulators = tuple([Accumulator(Counting(mixed(f"{i}.")), 9, INF, reduction="mean", buffer_dtype=dtype)
                          for i, dtype in enumerate(asked_for)])
    assert [b.dtype for b in buffers(accumulators[0])] == [ms.float32, ms.float32, ms.float64]
    for accumulator, dtype in zip(accumulators[1:], asked_for[1:]):
        assert {b.dtype for b in buffers(accumulator)} == {dtype}

    def step(half, single, double):
        for accumulator in accumulators:
            for factor in (1, 0.25, 0.25):
                accumulator.add((half * factor, single * factor, double * factor))
        return accumulators[0].mini_step + 0

    def reset():
        for accumulator in accumulators:
            accumulator.reset()
        return accumulators[0].mini_step + 0

    step, reset = compiled(step, mode), compiled(reset, mode)
    for value in (NAN, INF, -INF, 0.1):
        assert int(step(Tensor([value], ms.float16), Tensor(value, ms.float32), Tensor([value], ms.float64))) == 3
        if value != 0.1:
            assert int(reset()) == 0
            assert not any(np.any(b.asnumpy()) for accumulator in accumulators for b in buffers(accumulator))
    for accumulator in accumulators:
        assert bool(accumulator.flush())
        seen = accumulator.optimizer.seen
        assert [s.dtype for s in seen] == [ms.float16, ms.float32, ms.float64]
        assert [s.asnumpy().item() for s in seen] == pytest.approx([0.05] * 3, rel=2e-3)
    for accumulator in (accumulators[0], accumulators[3]):
        assert accumulator.optimizer.seen[2].asnumpy().item() == pytest.approx(0.05, rel=1e-7)


def test_small_gradients_accumulate_without_loss_in_float32_and_stall_in_float16(mode):
    """bfloat16 gradients only: MindSpore's CPU backend has no bfloat16 MatMul or SGD."""
    accumulators = tuple([Accumulator(Counting(ParameterTuple([Parameter(Tensor([0.0]), name=f"stall{i}")])), 999, buffer_dtype=buffer)
                          for i, buffer in enumerate((None, None, ms.float16))])

    def add(half, brain):
        accumulators[0].add((half,))
        accumulators[1].add((brain,))
        accumulators[2].add((half,))
        return accumulators[0].mini_step + 0

    add = compiled(add, mode)
    for value in [1.0] + [1e-4] * 200:
        add(Tensor([value], ms.float16), Tensor([value], ms.bfloat16))
    half, brain = (Tensor(1e-4, dtype).astype(ms.float32).asnumpy().item() for dtype in (ms.float16, ms.bfloat16))
    for accumulator, expected in zip(accumulators, (1 + 200 * half, 1 + 200 * brain, 1)):
        assert bool(accumulator.flush())
        assert accumulator.optimizer.seen[0].asnumpy().item() == pytest.approx(expected, rel=1e-6)


# --- drop-in -----------------------------------------------------------------------------------------------------------


@ms.jit_class
class TutorialAccumulator:
    """What MindSpore's tutorial shows, written after its behaviour: two buffers, a counter from 1, never realigned."""

    def __init__(self, optimizer, accumulate_step):
        self.optimizer, self.accumulate_step = optimizer, accumulate_step
        self.sums = optimizer.parameters.clone(prefix="tutorial_sum", init="zeros")
        self.zeros = optimizer.parameters.clone(prefix="tutorial_zero", init="zeros")
        self.counter = Parameter(Tensor(1, ms.int32), name="tutorial_counter")

    def __call__(self, grads):
        for total, grad in zip(self.sums, grads):
            ops.assign_add(total, grad)
        if self.counter % self.accumulate_step == 0:
            self.optimizer(self.sums)
            for total, zero in zip(self.sums, self.zeros):
                ops.assign(total, zero)
        ops.assign_add(self.counter, 1)
        return True


def tutorial_script(make_accumulator, digits, accumulate_step):
    """Run the tutorial's lines, unchanged but for the import; yield the parameters after each microbatch."""
    network = nn.SequentialCell(nn.Dense(784, 512), nn.ReLU(), nn.Dense(512, 512), nn.ReLU(), nn.Dense(512, 10))
    rng = np.random.default_rng(0)
    for parameter in network.trainable_params():
        parameter.set_data(Tensor(rng.uniform(-1, 1, parameter.shape) / math.sqrt(parameter.shape[-1]), ms.float32))
    loss_fn = nn.CrossEntropyLoss()
    optimizer = nn.SGD(network.trainable_params(), 1e-2)
    accumulator = make_accumulator(optimizer, accumulate_step)

    def forward_fn(data, label):
        logits = network(data)
        loss = loss_fn(logits, label)
        return loss / accumulate_step

    grad_fn = ms.value_and_grad(forward_fn, None, network.trainable_params())

    @ms.jit
    def train_step(data, label):
        loss, grads = grad_fn(data, label)
        accumulator(grads)
        return loss

    for data, label in digits:
        train_step(Tensor(data, ms.float32), Tensor(label, ms.int32))
        yield [p.asnumpy().copy() for p in network.trainable_params()]


def largest(one, other):
    return max(np.abs(a - b).max() for a, b in zip(one, other))


@pytest.mark.parametrize("context", [pytest.param("jit", marks=pytest.mark.slow), "graph"])
def test_tutorial_script_runs_unchanged_on_the_same_trajectory(mnist_microbatches, mode_named, context):
    mode_named(context)
    ours = tutorial_script(Accumulator, mnist_microbatches, 4)
    theirs = tutorial_script(TutorialAccumulator, mnist_microbatches, 4)
    previous, moved = next(ours), []
    assert largest(previous, next(theirs)) <= 1e-7
    for mine, other in zip(ours, theirs):
        assert largest(mine, other) <= 1e-7
        moved.append(largest(mine, previous) > 1e-4)
        previous = mine
    assert moved == [i % 4 == 3 for i in range(1, 200)]  # the negative control: a window of 2 would move at other places


# --- state -------------------------------------------------------------------------------------------------------------


def test_one_buffer_for_each_parameter_and_nothing_else_of_its_size_and_no_name_twice():
    accumulators = [descend(2) for _ in range(3)]
    accumulator, weights = accumulators[0], accumulators[0].optimizer.parameters
    assert [b.shape for b in buffers(accumulator)] == [p.shape for p in weights]
    state = sum(p.asnumpy().nbytes for p in accumulator.parameters)
    assert state - sum(p.asnumpy().nbytes for p in weights) == 9 * 4  # nine scalars
    assert not any(p.requires_grad for p in accumulator.parameters)
    held = [v for v in vars(accumulator).values() if isinstance(v, (Parameter, ParameterTuple))]
    assert {id(p) for v in held for p in (v if isinstance(v, ParameterTuple) else [v])} == {id(p) for p in accumulator.parameters}
    counters = [getattr(accumulator, name) for name in ("mini_step", "update_step", "skipped", "grad_norm")]
    assert [p.dtype for p in counters] == [ms.int32] * 3 + [ms.float32]
    assert {id(p) for p in counters} < {id(p) for p in accumulator.parameters}
    names = [p.name for accumulator in accumulators for p in accumulator.parameters]
    assert len(set(names)) == len(names)


def test_optimizer_state_is_renamed_only_where_it_would_collide():
    """A dead optimizer gives its names back."""
    first, second = (nn.Momentum(parameters(), 0.1, 0.9) for _ in range(2))
    names = [p.name for p in first.parameters]
    for optimizer in (first, second, first):
        if "unheard_of_step" not in optimizer.global_step.name:
            optimizer.global_step.name = "unheard_of_step"
        accumulator = Accumulator(optimizer, 2)
        prefix = "" if optimizer is first else accumulator.mini_step.name.removesuffix("mini_step")
        assert optimizer.global_step.name == f"{prefix}unheard_of_step"
    assert [p.name for p in first.parameters] == names
    del first, second, optimizer, accumulator
    gc.collect()
    third = nn.Momentum(parameters(), 0.1, 0.9)
    third.global_step.name = "unheard_of_step"
    Accumulator(third, 2)
    assert third.global_step.name == "unheard_of_step"


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/statm")
def test_emptying_the_buffers_holds_no_second_copy_of_them():
    """Growth over the buffers' size; the control is `zeros_like`, which graph mode turns into constants.

    In the same new process: names start at accumulator0, in this one too when it began.
    """
    ours, zeros_like, names = run_python((Path(__file__).parent / "buffers.py").read_text(encoding="utf-8")).splitlines()
    assert float(ours) < 0.5
    assert float(zeros_like) > float(ours) + 0.5
    accumulator = Accumulator(nn.SGD([Parameter(Tensor([0.0]), name=f"w{i}") for i in range(2)], 0.1), 2)
    prefix = accumulator.mini_step.name.partition(".")[0]
    assert names.split() == [p.name.replace(prefix, f"accumulator{i}") for i in range(2) for p in accumulator.parameters]


def parameter(value=(0.0, 0.0), dtype=ms.float32, name="odd", requires_grad=True):
    return Parameter(Tensor(value, dtype), name=name, requires_grad=requires_grad)


class Plain:
    """An optimizer that is no Cell and does nothing."""

    def __init__(self, *parameters):
        self.parameters = parameters

    def __call__(self, grads):
        return True


def with_odd(*odd):
    return {"optimizer": Plain(parameter(name="even"), *odd)}


NO_OPTIMIZER = r"optimizer is of type \w+, expected a MindSpore optimizer; give e\.g\. nn\.SGD"
BAD_ARGUMENTS = [  # the numbers are checked in test_arguments.py and test_window.py, too
    (ValueError, r"accumulate_step is 0, expected an int >= 1; give an int >= 1", {"accumulate_step": 0}),
    (TypeError, r"accumulate_step is True of type bool, expected an int", {"accumulate_step": True}),
    (ValueError, r"accumulate_step is \{1: 2\}, expected a dict that holds 0", {"accumulate_step": {1: 2}}),
    (ValueError, r"accumulate_step is 2147483648, expected at most 2147483647", {"accumulate_step": 2**31}),
    (ValueError, r"clip_norm is 0, expected a number > 0", {"clip_norm": 0}),
    (ValueError, r"clip_norm is nan", {"clip_norm": NAN}),
    (TypeError, r"clip_norm is '1' of type str, expected a number > 0; give a norm > 0", {"clip_norm": "1"}),
    (ValueError, r"reduction is 'avg', expected one of 'sum', 'mean'", {"reduction": "avg"}),
    (ValueError, r"on_nonfinite is 'skip', expected one of 'apply', 'skip_microbatch', 'skip_window'", {"on_nonfinite": "skip"}),
    (ValueError, r"buffer_dtype is Int32, expected a float dtype", {"buffer_dtype": ms.int32}),
    (ValueError, r"buffer_dtype is float32, expected a float dtype", {"buffer_dtype": "float32"}),
    (TypeError, r"reducer is of type str, expected a DataParallel, a LocalUpdates, or None", {"reducer": "mean"}),
    *[(TypeError, NO_OPTIMIZER, {"optimizer": junk}) for junk in (None, "sgd", nn.Dense(2, 2), lambda grads: None, parameters())],
    (ValueError, r"optimizer holds no parameters, expected at least one", {"optimizer": Plain()}),
    (ValueError, r"odd has shape \(0, 3\), expected at least one element", with_odd(parameter(np.zeros((0, 3))))),
    (TypeError, r"odd is a parameter of Int32, expected a float dtype; leave it out", with_odd(parameter((1, 2), ms.int32))),
    (TypeError, r"odd is a parameter of Bool, expected a float dtype", with_odd(parameter((True, False), ms.bool_))),
    (TypeError, r"odd is a parameter of Complex64, expected a float dtype", with_odd(parameter((1j, 2), ms.complex64))),
    (ValueError, r"odd has requires_grad=False, expected trainable parameters .* after freezing", with_odd(parameter(requires_grad=False))),
    (ValueError, r"optimizer holds two parameters called odd, expected each one once", with_odd(parameter(), parameter())),
    (ValueError, r"optimizer holds two parameters called odd", with_odd(*[parameter()] * 2)),
]


def test_bad_arguments_are_refused_by_the_host():
    """A refused accumulator takes no number and renames nothing."""
    optimizer = nn.SGD(parameters(), 0.1)
    names = [p.name for p in optimizer.get_parameters()]
    number = int(descend(2).mini_step.name.removeprefix("accumulator").removesuffix(".mini_step"))
    for error, message, arguments in BAD_ARGUMENTS:
        with pytest.raises(error, match=message):
            Accumulator(**{"optimizer": optimizer, "accumulate_step": 2, **arguments})
    assert [p.name for p in optimizer.get_parameters()] == names
    assert descend(2).mini_step.name == f"accumulator{number + 1}.mini_step"
