"""Training with the Accumulator against the NumPy oracle: parameters and counters, after every microbatch."""
from itertools import combinations, product

import mindspore as ms
import numpy as np
import pytest
import reference
from conftest import MLP, batches, compiled, difference, values
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mindspore import Tensor, nn

from ms_accum import Accumulator

SIZES = [4, 4, 2, 4, 2, 4, 4, 4, 2, 4, 4]  # two shapes: each costs one more compilation
OPTIMIZERS = {
    "sgd": (lambda p: nn.SGD(p, 0.1), lambda: reference.SGD(0.1)),
    "momentum": (lambda p: nn.Momentum(p, 0.1, 0.9), lambda: reference.SGD(0.1, 0.9)),
    "adam": (lambda p: nn.Adam(p, 0.01), lambda: reference.Adam(0.01)),
}


def growing(update_step):
    return update_step + 2


SCHEDULES = {"int": 3, "dict": {0: 2, 1: 4, 3: 1}, "callable": growing}


def make_step(accumulator, network, mode, gradient_dtype=ms.float32, loss_divisor=1):
    """(x, y, weight) -> (loss, closed), where `gradient_dtype` is what the accumulator is given."""
    loss_fn = nn.CrossEntropyLoss()

    def forward_fn(x, y):
        return loss_fn(network(x), y) / loss_divisor

    grad_fn = ms.value_and_grad(forward_fn, None, accumulator.optimizer.parameters)

    def train_step(x, y, weight):
        loss, grads = grad_fn(x, y)
        grads = tuple([g.astype(gradient_dtype) for g in grads])
        return loss, accumulator(grads, weight)

    step = compiled(train_step, mode)
    return lambda x, y, weight: step(Tensor(x, ms.float32), Tensor(y, ms.int32), Tensor(weight, ms.float32))


def oracle_gradients(parameters, x, y, gradient_dtype):
    loss, gradients = reference.loss_and_gradients(parameters, x, y)
    if gradient_dtype == ms.float16:
        gradients = [g.astype(np.float16) for g in gradients]
    return loss, gradients


def follow(mode, optimizer, accumulate_step, reduction, clip_norm, gradient_dtype, sizes=SIZES, weights=None, oracle_reduction=None):
    """Train both; after every microbatch compare counters, return the largest parameter difference seen."""
    network = MLP()
    make_optimizer, make_oracle = OPTIMIZERS[optimizer]
    accumulator = Accumulator(make_optimizer(network.trainable_params()), accumulate_step, clip_norm, reduction=reduction)
    oracle = reference.Accumulation(
        values(network.trainable_params()), make_oracle(), accumulate_step, oracle_reduction or reduction, clip_norm)
    step = make_step(accumulator, network, mode, gradient_dtype)
    weights = sizes if weights is None else weights

    worst = 0.0
    for (x, y), weight in zip(batches(sizes), weights):
        before = values(network.trainable_params())
        loss, closed = step(x, y, weight)
        expected_loss, gradients = oracle_gradients(oracle.parameters, x, y, gradient_dtype)
        expected_closed = oracle(gradients, weight)
        assert bool(closed) == expected_closed
        assert (int(accumulator.mini_step), int(accumulator.update_step)) == (oracle.mini_step, oracle.update_step)
        moved = difference(values(network.trainable_params()), before) > 0
        assert moved == expected_closed
        worst = max(worst, difference(values(network.trainable_params()), oracle.parameters))
        if worst < 1e-3:
            assert float(loss) == pytest.approx(expected_loss, rel=2e-3)
    assert bool(accumulator.flush()) == oracle.flush()
    assert (int(accumulator.mini_step), int(accumulator.update_step)) == (0, oracle.update_step)
    if oracle_reduction is None:
        assert float(accumulator.grad_norm) == pytest.approx(oracle.grad_norm, rel=5e-3)
    return max(worst, difference(values(network.trainable_params()), oracle.parameters))


def tolerance(optimizer, gradient_dtype):
    """Float32 rounding over 11 microbatches; one unit of float16's 10-bit mantissa where gradients go through it.

    Adam divides by sqrt(v): where a gradient is near 0, its relative error becomes a difference of up to lr in the update.
    """
    if gradient_dtype == ms.float16:
        return 2e-2 if optimizer == "adam" else 2e-3
    return 2e-5 if optimizer == "adam" else 2e-6


# Each two values of any two columns meet in one of these: pairwise, what is wrong with a combination shows.
COMPILED = {
    ("sum", "int", None, "sgd", ms.float32), ("mean", "int", 0.7, "momentum", ms.float32), ("sum", "int", 0.7, "adam", ms.float16),
    ("mean", "dict", 0.7, "sgd", ms.float16), ("sum", "dict", None, "momentum", ms.float16), ("mean", "dict", None, "adam", ms.float32),
    ("sum", "callable", 0.7, "sgd", ms.float32), ("mean", "callable", None, "momentum", ms.float16),
    ("mean", "callable", None, "adam", ms.float32),
}


def matrix():
    """Everything times everything; compiled, which takes 3 s each, the pairs in COMPILED, and the rest with `pytest -m slow`."""
    for mode, reduction, schedule, clip_norm, optimizer, dtype in product(
            ("jit", "pynative"), ("sum", "mean"), SCHEDULES, (None, 0.7), OPTIMIZERS, (ms.float32, ms.float16)):
        slow = mode == "jit" and (reduction, schedule, clip_norm, optimizer, dtype) not in COMPILED
        name = f"{mode}-{reduction}-{schedule}-{'clipped' if clip_norm else 'unclipped'}-{optimizer}-{dtype}"
        yield pytest.param(mode, reduction, schedule, clip_norm, optimizer, dtype, id=name, marks=[pytest.mark.slow] if slow else [])


@pytest.mark.parametrize(("mode", "reduction", "schedule", "clip_norm", "optimizer", "gradient_dtype"), matrix())
def test_training_follows_the_oracle(mode_named, mode, reduction, schedule, clip_norm, optimizer, gradient_dtype):
    mode_named(mode)
    worst = follow(mode, optimizer, SCHEDULES[schedule], reduction, clip_norm, gradient_dtype)
    assert worst <= tolerance(optimizer, gradient_dtype)


@pytest.mark.parametrize("schedule", [pytest.param(name, marks=[] if name == "dict" else pytest.mark.slow) for name in SCHEDULES])
def test_training_follows_the_oracle_in_graph_context(mode_named, schedule):
    assert follow(mode_named("graph"), "momentum", SCHEDULES[schedule], "mean", 0.7, ms.float32) <= 2e-6


def test_wrong_denominator_is_seen(mode):
    """Negative control: the same run held against an oracle that does not divide must be far off."""
    assert follow(mode, "sgd", 3, "mean", None, ms.float32, oracle_reduction="sum") > 1e-2


def test_clipping_each_microbatch_is_seen(mode):
    """Negative control: clipped gradients summed up are not the summed gradients clipped."""
    network, data = MLP(), batches([4, 4, 4])
    accumulator = Accumulator(nn.SGD(network.trainable_params(), 0.1), 3, clip_norm=0.1, reduction="mean")
    step = make_step(accumulator, network, mode)
    parameters = values(network.trainable_params())
    clipped = []
    for x, y in data:
        step(x, y, 1.0)
        gradients = reference.loss_and_gradients(parameters, x, y)[1]
        norm = np.sqrt(sum((g ** 2).sum() for g in gradients))
        clipped.append([g * min(1, 0.1 / norm) for g in gradients])
    wrong = [p - 0.1 * np.mean([g[i] for g in clipped], axis=0) for i, p in enumerate(parameters)]
    assert difference(values(network.trainable_params()), wrong) > 1e-4


def test_accumulated_gradient_is_that_of_the_undivided_batch(mode):
    """Relative difference <= 1e-6 in float32, for ragged microbatches; without the weights it is not."""
    x, y = batches([13])[0]
    cuts = [slice(0, 4), slice(4, 8), slice(8, 10), slice(10, 13)]

    def gradient(pieces, weighted):
        network = MLP()
        before = values(network.trainable_params())
        accumulator = Accumulator(nn.SGD(network.trainable_params(), 1.0), len(pieces), reduction="mean")
        step = make_step(accumulator, network, mode)
        for piece in pieces:
            step(x[piece], y[piece], len(y[piece]) if weighted else 1)
        assert int(accumulator.update_step) == 1
        return [b - a for a, b in zip(values(network.trainable_params()), before)]

    # An update of SGD with lr 1 is read back from parameters of size ~1: 1e-7 of rounding is theirs.
    undivided = gradient([slice(0, 13)], True)
    assert difference(gradient(cuts, True), undivided) <= 1e-6
    assert difference(gradient(cuts, False), undivided) > 1e-2


def test_adam_equals_full_batch_adam(mode):
    """N microbatches and one update = Adam on the undivided batch, over several updates."""
    sizes, n = [4, 2, 3] * 4, 3
    data = batches(sizes)

    def train(pieces, accumulate_step):
        network = MLP()
        accumulator = Accumulator(nn.Adam(network.trainable_params(), 0.01), accumulate_step, reduction="mean")
        step = make_step(accumulator, network, mode)
        for x, y in pieces:
            step(x, y, len(y))
        return values(network.trainable_params())

    whole = [tuple(np.concatenate(part) for part in zip(*data[i:i + n])) for i in range(0, len(data), n)]
    assert difference(train(data, n), train(whole, 1)) <= 1e-5
    assert difference(train(data, 1), train(whole, 1)) > 1e-3


@settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    accumulate_step=st.integers(1, 7),
    microbatches=st.lists(st.tuples(st.integers(1, 5), st.floats(0.01, 100.0)), min_size=1, max_size=9),
    reduction=st.sampled_from(["sum", "mean"]),
)
def test_any_window_sizes_and_weights(accumulate_step, microbatches, reduction):
    sizes, weights = map(list, zip(*microbatches))
    total = 1.0 if reduction == "mean" else sum(weights)
    weights = [w / total for w in weights]
    assert follow("pynative", "sgd", accumulate_step, reduction, None, ms.float32, sizes, weights) <= 5e-6


@settings(max_examples=6, deadline=None, derandomize=True)
@given(accumulate_step=st.integers(1, 5), weights=st.lists(st.floats(0.01, 100.0), min_size=1, max_size=9))
def test_any_window_and_weights_in_graph_mode(accumulate_step, weights):
    assert follow("jit", "momentum", accumulate_step, "mean", None, ms.float32, [4] * len(weights), weights) <= 5e-6


def test_oracle_gradients_are_right():
    """The oracle itself, against finite differences of its own loss."""
    parameters, (x, y) = values(MLP().trainable_params()), batches([5])[0]
    _, gradients = reference.loss_and_gradients(parameters, x, y)
    for parameter, gradient in zip(parameters, gradients):
        for position in np.ndindex(parameter.shape):
            original = parameter[position]
            parameter[position] = original + 1e-6
            above, _ = reference.loss_and_gradients(parameters, x, y)
            parameter[position] = original - 1e-6
            below, _ = reference.loss_and_gradients(parameters, x, y)
            parameter[position] = original
            assert gradient[position] == pytest.approx((above - below) / 2e-6, abs=1e-8)


def test_each_two_values_of_the_matrix_meet_in_a_compiled_run():
    columns = ("sum", "mean"), tuple(SCHEDULES), (None, 0.7), tuple(OPTIMIZERS), (ms.float32, ms.float16)
    for (i, one), (j, other) in combinations(enumerate(columns), 2):
        assert {(case[i], case[j]) for case in COMPILED} == set(product(one, other))
