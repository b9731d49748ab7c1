"""The contract of Accumulator, line by line, on gradients given by hand; training is held against the oracle in test_oracle.py."""
import gc
import math
import sys
from itertools import product

import mindspore as ms
import numpy as np
import pytest
from conftest import MLP, Counting, batches, compiled, difference, in_modes, run_python, values
from mindspore import Parameter, ParameterTuple, Tensor, nn, ops

from ms_accum import Accumulator

INF, NAN = float("inf"), float("nan")


def parameters(dtype=ms.float32, count=2):
    return ParameterTuple([Parameter(Tensor(np.zeros((2, 3 + i)), dtype), name=f"p{i}") for i in range(count)])


def gradients(value, dtype=ms.float32, count=2):
    return tuple(Tensor(np.full((2, 3 + i), value), dtype) for i in range(count))


def descend(accumulate_step=2, clip_norm=None, dtype=ms.float32, **options):
    """An accumulator whose parameters, after an update, are minus the sum of all gradients applied (SGD, lr 1)."""
    return Accumulator(nn.SGD(parameters(dtype), 1.0), accumulate_step, clip_norm, **options)


def applied(accumulator):
    """The sum of the gradients the optimizer has been given; all elements of all gradients here are equal."""
    first = -accumulator.optimizer.parameters[0].asnumpy().astype(np.float64)
    assert all((-p.asnumpy() == first[0, 0]).all() for p in accumulator.optimizer.parameters)
    return first[0, 0]


def calling(accumulator):
    def call(grads):
        return accumulator(grads)
    return call


# --- windows -----------------------------------------------------------------------------------------------------------


def test_returns_a_bool_tensor_that_says_whether_the_window_closed(every_mode):
    accumulator = descend(3)
    step = compiled(calling(accumulator), every_mode)
    closed = [step(gradients(1.0)) for _ in range(7)]
    assert all(isinstance(c, Tensor) and c.dtype == ms.bool_ and c.shape == () for c in closed)
    assert [bool(c) for c in closed] == [False, False, True, False, False, True, False]
    assert applied(accumulator) == 6.0


def test_window_of_one_updates_every_time(mode):
    accumulator = descend(1)
    step = compiled(calling(accumulator), mode)
    assert [bool(step(gradients(2.0))) for _ in range(3)] == [True] * 3
    assert applied(accumulator) == 6.0


def test_schedule_changes_the_length_between_windows_only(mode):
    accumulator = descend({0: 1, 2: 3, 3: 2})
    step = compiled(calling(accumulator), mode)
    assert [bool(step(gradients(1.0))) for _ in range(9)] == [True, True, False, False, True, False, True, False, True]


def test_add_never_updates_and_apply_closes_by_the_scripts_own_rule(mode):
    accumulator = descend(2)

    def add(grads):
        accumulator.add(grads)
        return accumulator.mini_step + 0

    def apply():
        accumulator.apply()
        return accumulator.update_step + 0

    add, apply = compiled(add, mode), compiled(apply, mode)
    assert [int(add(gradients(1.0))) for _ in range(5)] == [1, 2, 3, 4, 5]
    assert applied(accumulator) == 0.0
    assert int(apply()) == 1
    assert applied(accumulator) == 5.0
    assert int(accumulator.mini_step) == 0


def test_apply_on_an_empty_window_hands_over_zeros(mode):
    weights = parameters()
    accumulator = Accumulator(Counting(weights), 2, reduction="mean")
    accumulator(gradients(1.0))
    accumulator(gradients(1.0))

    def apply():
        accumulator.apply()
        return accumulator.update_step + 0

    assert int(compiled(apply, mode)()) == 2
    assert int(accumulator.optimizer.calls) == 2
    assert not np.any(accumulator.optimizer.seen[0].asnumpy())


def test_close_if_on_an_empty_window_closes_none(mode):
    accumulator = Accumulator(Counting(parameters()), 2)

    def close(condition):
        return accumulator.close_if(condition)

    close = compiled(close, mode)
    assert not bool(close(Tensor(False)))
    assert int(accumulator.optimizer.calls) == 0
    assert not bool(close(Tensor(True)))  # the optimizer ran on zeros, as with apply
    assert int(accumulator.optimizer.calls) == 1


@pytest.mark.parametrize("where", ["host", "jitted"])
def test_flush_closes_a_short_window_and_does_nothing_on_an_empty_one(every_mode, where):
    accumulator = Accumulator(Counting(parameters()), 4, reduction="mean")

    def flush():
        return accumulator.flush()

    flush = compiled(flush, every_mode) if where == "jitted" else flush
    assert not bool(flush())
    assert int(accumulator.optimizer.calls) == 0
    for value in (1.0, 2.0, 6.0):
        accumulator(gradients(value))
    assert bool(flush())
    assert int(accumulator.optimizer.calls) == 1
    np.testing.assert_allclose(accumulator.optimizer.seen[0].asnumpy(), 3.0)  # divided by 3, not by 4
    assert not bool(flush())
    assert (int(accumulator.optimizer.calls), int(accumulator.mini_step), int(accumulator.update_step)) == (1, 0, 1)
    for _ in range(4):
        accumulator(gradients(7.0))
    np.testing.assert_allclose(accumulator.optimizer.seen[0].asnumpy(), 7.0)  # realigned, nothing left over


@pytest.mark.parametrize("where", ["host", "jitted"])
def test_reset_forgets_the_open_window(every_mode, where):
    accumulator = Accumulator(Counting(parameters()), 2, reduction="mean")

    def reset():
        accumulator.reset()
        return accumulator.mini_step + 0

    reset = compiled(reset, every_mode) if where == "jitted" else reset
    assert int(reset()) == 0
    accumulator(gradients(5.0), 3.0)
    assert int(reset()) == 0
    assert (int(accumulator.optimizer.calls), int(accumulator.update_step)) == (0, 0)
    assert [bool(accumulator(gradients(1.0))) for _ in range(2)] == [False, True]
    np.testing.assert_allclose(accumulator.optimizer.seen[0].asnumpy(), 1.0)


# --- what the optimizer is given ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("reduction", "expected"), [("sum", 2 * 1.0 + 0.5 * 4.0), ("mean", (2 * 1.0 + 0.5 * 4.0) / 2.5)])
@pytest.mark.parametrize("as_tensor", [False, True], ids=["number", "tensor"])
def test_weights(mode, reduction, expected, as_tensor):
    accumulator = descend(2, reduction=reduction)

    def twice(first, second, weights):
        accumulator(first, weights[0])
        return accumulator(second, weights[1])

    if as_tensor:
        assert bool(compiled(twice, mode)(gradients(1.0), gradients(4.0), (Tensor(2.0), Tensor(0.5))))
    else:
        def twice_by_numbers(first, second):
            accumulator(first, 2)
            return accumulator(second, 0.5)
        assert bool(compiled(twice_by_numbers, mode)(gradients(1.0), gradients(4.0)))
    assert applied(accumulator) == pytest.approx(expected, rel=1e-6)


def test_integer_tensor_weights_count_tokens(mode):
    accumulator = descend(2, reduction="mean")

    def step(grads, tokens):
        return accumulator(grads, tokens)

    step = compiled(step, mode)
    step(gradients(1.0), Tensor(30, ms.int32))
    step(gradients(3.0), Tensor(10, ms.int32))
    assert applied(accumulator) == pytest.approx(1.5, rel=1e-6)


@pytest.mark.parametrize("dtype", [ms.float16, ms.float64, ms.int64])
def test_tensor_weights_of_any_dtype(mode, dtype):
    accumulator = descend(2, reduction="mean")

    def step(grads, weight):
        return accumulator(grads, weight)

    step = compiled(step, mode)
    step(gradients(1.0), Tensor(3, dtype))
    step(gradients(5.0), Tensor([1], dtype))
    assert applied(accumulator) == pytest.approx(2.0, rel=1e-6)


def test_a_large_int_weight_does_not_wrap_around(mode):
    accumulator = descend(1, reduction="mean")

    def step(grads):
        return accumulator(grads, 10**12)

    compiled(step, mode)(gradients(2.0))
    assert applied(accumulator) == pytest.approx(2.0, rel=1e-6)


@pytest.mark.parametrize("on_nonfinite", ["apply", "skip_microbatch", "skip_window"])
def test_a_weight_of_zero_counts_nothing_even_if_the_gradient_is_nan(mode, on_nonfinite):
    """The gradient of a mean over no unmasked token is 0/0."""
    accumulator = descend(3, reduction="mean", on_nonfinite=on_nonfinite)

    def step(grads, weight):
        return accumulator(grads, weight)

    step = compiled(step, mode)
    closed = [bool(step(gradients(g), Tensor(w))) for g, w in ((1.0, 2.0), (NAN, 0.0), (4.0, 1.0))]
    assert closed == [False, False, True]
    assert applied(accumulator) == pytest.approx(2.0, rel=1e-6)
    assert int(accumulator.skipped) == 0


@pytest.mark.parametrize(("weight", "expected"), [(-0.5, 2 * 1.0 - 0.5 * 4.0), (NAN, NAN)])
def test_a_wrong_tensor_weight_is_not_dropped_in_silence(mode, weight, expected):
    """A graph cannot refuse a value: a negative weight subtracts, as the formula says, and NaN shows."""
    accumulator = descend(2)

    def step(grads, weight):
        return accumulator(grads, weight)

    step = compiled(step, mode)
    step(gradients(1.0), Tensor(2.0))
    assert bool(step(gradients(4.0), Tensor(weight)))
    np.testing.assert_allclose(-accumulator.optimizer.parameters[0].asnumpy(), np.full((2, 3), expected), atol=1e-6)


def test_a_constant_weight_of_zero_counts_nothing(mode):
    accumulator = descend(2)

    def step(bad, good):
        accumulator(bad, 0)
        return accumulator(good)

    assert bool(compiled(step, mode)(gradients(NAN), gradients(3.0)))
    assert applied(accumulator) == 3.0


def test_close_if_closes_by_the_scripts_own_rule_inside_a_graph(every_mode):
    """Update once the gradients seen so far are large enough; the flag is what an `if` of the script's own would lose."""
    accumulator = descend(100)

    def step(grads):
        accumulator.add(grads)
        enough = accumulator.buffers[0].sum() > 20.0
        closed = accumulator.close_if(enough)
        return enough, closed

    step = compiled(step, every_mode)
    assert [tuple(map(bool, step(gradients(2.0)))) for _ in range(4)] == [(False, False), (True, True)] * 2
    assert applied(accumulator) == 8.0
    assert int(accumulator.update_step) == 2


def test_a_window_without_weight_is_a_zero_gradient_not_nan(mode):
    accumulator = descend(2, reduction="mean")

    def step(grads, weight):
        return accumulator(grads, weight)

    step = compiled(step, mode)
    step(gradients(1.0), Tensor(0.0))
    assert bool(step(gradients(1.0), Tensor(0.0)))
    assert applied(accumulator) == 0.0
    step(gradients(1.0), Tensor(0.0))
    step(gradients(5.0), Tensor(2.0))
    assert applied(accumulator) == 5.0


def test_clipping_sees_the_accumulated_normalised_gradient_once(mode):
    accumulator = descend(2, clip_norm=1.0, reduction="mean")
    step = compiled(calling(accumulator), mode)
    step(gradients(3.0))
    step(gradients(1.0))
    norm = math.sqrt(14 * 2.0**2)  # 2 x 3 and 2 x 4 elements of the mean, 2.0
    assert float(accumulator.grad_norm) == pytest.approx(norm, rel=1e-6)
    assert applied(accumulator) == pytest.approx(2.0 / (norm + 1e-6), rel=1e-6)


def test_a_small_gradient_is_not_clipped(mode):
    accumulator = descend(2, clip_norm=100.0)
    step = compiled(calling(accumulator), mode)
    step(gradients(1.0))
    step(gradients(1.0))
    assert applied(accumulator) == 2.0


@pytest.mark.parametrize(("clip_norm", "norm"), [(INF, math.sqrt(14 * 4.0)), (None, 0.0)])
def test_infinite_clip_norm_measures_and_none_does_not(mode, clip_norm, norm):
    accumulator = descend(2, clip_norm=clip_norm)
    step = compiled(calling(accumulator), mode)
    step(gradients(1.0))
    step(gradients(1.0))
    assert float(accumulator.grad_norm) == pytest.approx(norm, rel=1e-6)
    assert applied(accumulator) == 2.0


@pytest.mark.parametrize("dtype", [ms.float16, ms.float32, ms.float64])
def test_optimizer_receives_each_gradient_in_its_parameters_dtype(mode, dtype):
    weights = ParameterTuple([Parameter(Tensor([0.0], dtype), name="a"), Parameter(Tensor([0.0], ms.float32), name="b")])
    accumulator = Accumulator(Counting(weights), 2, clip_norm=INF, reduction="mean")
    step = compiled(calling(accumulator), mode)
    for value in (1.0, 2.0):
        step((Tensor([value], ms.float16), Tensor([value], ms.float16)))
    assert [s.dtype for s in accumulator.optimizer.seen] == [dtype, ms.float32]
    assert [float(s.asnumpy()[0]) for s in accumulator.optimizer.seen] == [1.5, 1.5]


@pytest.mark.parametrize("buffer_dtype", [ms.float16, ms.float32, ms.float64])
def test_several_microbatches_in_one_function(mode, buffer_dtype):
    accumulator = descend(8, buffer_dtype=buffer_dtype)

    def step(first, second):
        accumulator(first)
        accumulator(second)
        accumulator(second)
        return accumulator.mini_step + 0

    assert int(compiled(step, mode)(gradients(1.0), gradients(0.25))) == 3
    assert bool(accumulator.flush())
    assert applied(accumulator) == 1.5


def test_small_float16_gradients_add_up_in_float32_and_stall_in_float16(mode):
    def total(**options):
        weights = ParameterTuple([Parameter(Tensor([0.0], ms.float16), name="a")])
        accumulator = Accumulator(Counting(weights), 1001, **options)

        def thousand(first, small):
            accumulator.add((first,))
            for _ in range(50):
                accumulator.add((small,))
            return accumulator.mini_step + 0

        compiled(thousand, mode)(Tensor([1.0], ms.float16), Tensor([0.0004], ms.float16))
        return float(accumulator.buffers[0].asnumpy()[0])

    assert total() == pytest.approx(1 + 50 * float(np.float16(0.0004)), rel=1e-6)
    assert total(buffer_dtype=ms.float16) == 1.0  # each 0.0004 is below half a unit of float16 at 1.0


@pytest.mark.parametrize(("parameter", "asked", "expected"), [
    (ms.float16, None, ms.float32), (ms.bfloat16, None, ms.float32), (ms.float32, None, ms.float32),
    (ms.float64, None, ms.float64), (ms.float32, ms.float64, ms.float64), (ms.float32, ms.float16, ms.float16)])
def test_buffer_dtype(parameter, asked, expected):
    weights = ParameterTuple([Parameter(Tensor([0.0], parameter), name="a")])
    accumulator = Accumulator(Counting(weights), 2, buffer_dtype=asked)
    assert accumulator.buffers[0].dtype == expected


def test_scalar_and_float64_parameters(mode):
    weights = ParameterTuple([Parameter(Tensor(1.0, ms.float32), name="scalar"), Parameter(Tensor([1.0], ms.float64), name="double")])
    accumulator = Accumulator(Counting(weights), 2, reduction="mean")
    step = compiled(calling(accumulator), mode)
    for value in (1.0, 2.0):
        step((Tensor(value, ms.float32), Tensor([value / 3], ms.float64)))
    assert float(accumulator.optimizer.seen[0]) == 1.5
    assert float(accumulator.optimizer.seen[1].asnumpy()[0]) == pytest.approx(0.5, rel=1e-7)


# --- the optimizer advances once per update ----------------------------------------------------------------------------


def test_learning_rate_momentum_and_weight_decay_advance_once_per_update(mode):
    rates = [0.5, 0.25, 0.125, 0.0625]
    weights = ParameterTuple([Parameter(Tensor([1.0], ms.float32), name="a")])
    optimizer = nn.Momentum(weights, learning_rate=rates, momentum=0.5, weight_decay=0.1)
    accumulator = Accumulator(optimizer, 3, reduction="mean")
    step = compiled(calling(accumulator), mode)

    weight, velocity = 1.0, 0.0
    for update in range(4):
        for value in (1.0, 2.0, 6.0):
            step((Tensor([value], ms.float32),))
        velocity = 0.5 * velocity + 3.0 + 0.1 * weight
        weight -= rates[update] * velocity
        assert int(optimizer.global_step.asnumpy().item()) == update + 1
        assert float(weights[0].asnumpy()[0]) == pytest.approx(weight, rel=1e-5)


def test_parameter_groups_keep_their_own_learning_rates(mode):
    first, second = parameters()
    optimizer = nn.SGD([{"params": [first], "lr": 1.0}, {"params": [second], "lr": 0.5}], 0.1)
    accumulator = Accumulator(optimizer, 2, reduction="mean")
    step = compiled(calling(accumulator), mode)
    step(gradients(1.0))
    step(gradients(3.0))
    np.testing.assert_allclose(first.asnumpy(), -2.0)
    np.testing.assert_allclose(second.asnumpy(), -1.0)


def test_experimental_optimizers_work(mode):
    from mindspore.experimental import optim

    weights = parameters()
    accumulator = Accumulator(optim.SGD(weights, lr=1.0, momentum=0.5), 2)
    step = compiled(calling(accumulator), mode)
    for _ in range(4):
        step(gradients(1.0))
    np.testing.assert_allclose(weights[0].asnumpy(), -(2.0 + 3.0))


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
    """The tutorial's lines, unchanged but for the import; the parameters after each of 200 microbatches."""
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

    trajectory = []
    for data, label in digits:
        train_step(Tensor(data, ms.float32), Tensor(label, ms.int32))
        trajectory.append([p.asnumpy().copy() for p in network.trainable_params()])
    return trajectory


def largest_difference(one, other):
    return max(np.abs(a - b).max() for left, right in zip(one, other) for a, b in zip(left, right))


@pytest.mark.parametrize("context", [ms.PYNATIVE_MODE, ms.GRAPH_MODE], ids=["jit", "graph"])
def test_tutorial_script_runs_unchanged_on_the_same_trajectory(mnist_microbatches, context):
    ms.set_context(mode=context)
    try:
        ours = tutorial_script(Accumulator, mnist_microbatches, 4)
        theirs = tutorial_script(TutorialAccumulator, mnist_microbatches, 4)
    finally:
        ms.set_context(mode=ms.PYNATIVE_MODE)
    assert len(ours) == 200
    assert largest_difference(ours, theirs) <= 1e-7
    assert largest_difference(ours[3:4], ours[:1]) > 1e-4  # they moved at all
    assert largest_difference(ours[:1], ours[2:3]) == 0  # and not inside a window


def test_a_different_window_is_seen_as_a_different_trajectory(mnist_microbatches):
    """Negative control of the drop-in comparison."""
    short = mnist_microbatches[:8]
    assert largest_difference(tutorial_script(Accumulator, short, 4), tutorial_script(TutorialAccumulator, short, 2)) > 1e-4


def test_without_the_accumulator_the_parameters_differ(mode):
    data = batches([4] * 6)

    def train(accumulate_step):
        network = MLP()
        accumulator = Accumulator(nn.SGD(network.trainable_params(), 0.5), accumulate_step, reduction="mean")
        loss_fn = nn.CrossEntropyLoss()

        def forward_fn(x, y):
            return loss_fn(network(x), y)

        grad_fn = ms.value_and_grad(forward_fn, None, accumulator.optimizer.parameters)

        def train_step(x, y):
            loss, grads = grad_fn(x, y)
            return loss, accumulator(grads)

        step = compiled(train_step, mode)
        for x, y in data:
            step(Tensor(x, ms.float32), Tensor(y, ms.int32))
        return values(network.trainable_params())

    assert difference(train(3), train(1)) > 1e-2


# --- state -------------------------------------------------------------------------------------------------------------


def test_one_buffer_for_each_parameter_and_nothing_else_of_its_size():
    accumulator = descend(2)
    weights = accumulator.optimizer.parameters
    assert [b.shape for b in accumulator.buffers] == [p.shape for p in weights]
    state = sum(p.asnumpy().nbytes for p in accumulator.parameters)
    assert state == sum(p.asnumpy().nbytes for p in weights) + 8 * 4  # eight scalars
    assert not any(p.requires_grad for p in accumulator.parameters)
    held = [v for v in vars(accumulator).values() if isinstance(v, (Parameter, ParameterTuple))]
    assert {id(p) for v in held for p in (v if isinstance(v, ParameterTuple) else [v])} == {
        id(p) for p in accumulator.parameters}


def test_counters_are_int32_and_the_norm_float32():
    accumulator = descend(2)
    assert [p.dtype for p in (accumulator.mini_step, accumulator.update_step, accumulator.skipped)] == [ms.int32] * 3
    assert accumulator.grad_norm.dtype == ms.float32
    assert {p.name for p in (accumulator.mini_step, accumulator.update_step, accumulator.skipped, accumulator.grad_norm)} <= {
        p.name for p in accumulator.parameters}


def test_names_are_unique_in_the_process():
    names = [p.name for _ in range(3) for p in descend(2).parameters]
    assert len(set(names)) == len(names)


PRINT_NAMES = """
from mindspore import nn
from ms_accum import Accumulator
network = nn.Dense(2, 2)
for _ in range(2):
    print([p.name for p in Accumulator(nn.SGD(network.trainable_params(), 0.1), 2).parameters])
"""


def test_names_are_the_same_in_a_new_process():
    first, second = (run_python(PRINT_NAMES) for _ in range(2))
    assert first == second
    assert "accumulator0.weight" in first
    assert "accumulator1.weight" in first


MEASURE_MEMORY = """
import resource, sys
import mindspore as ms, numpy as np
from mindspore import Parameter, ParameterTuple, Tensor, nn, ops
from ms_accum import Accumulator, avoid_busy_waiting
avoid_busy_waiting()
weights = ParameterTuple([Parameter(Tensor(np.ones((16 + i) * 2**18), ms.float32), name=f"p{i}") for i in range(12)])
accumulator = Accumulator(nn.SGD(weights, 0.1), 2)
def clear():
    if sys.argv[1] == "reset":
        accumulator.reset()
    else:
        for b in accumulator.buffers:
            ops.assign(b, ops.zeros_like(b))
for b in accumulator.buffers:
    b.set_data(Tensor(np.ones(b.shape), b.dtype))  # touched: resident from here on
@ms.jit
def step():
    clear()
    return accumulator.mini_step + 0
def resident():
    return int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize()
before = resident()
for _ in range(4):
    step().asnumpy()
print((resident() - before) / sum(p.size * 4 for p in weights))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/statm")
def test_emptying_the_buffers_holds_no_second_copy_of_them():
    """Growth over the buffers' size; the control is the obvious `zeros_like`, which graph mode turns into constants."""
    ours = float(run_python(MEASURE_MEMORY, "reset"))
    zeros_like = float(run_python(MEASURE_MEMORY, "zeros_like"))
    assert ours < 0.5
    assert zeros_like > ours + 0.5


def test_two_accumulators_in_one_function(every_mode):
    """A GAN's two optimizers: different windows, one jitted function."""
    one, two = parameters(count=1), ParameterTuple([Parameter(Tensor(np.zeros((2, 3)), ms.float32), name="q")])
    first, second = Accumulator(nn.SGD(one, 1.0), 2), Accumulator(nn.SGD(two, 1.0), 3, reduction="mean")

    def both(grads):
        return first(grads), second(grads)

    step = compiled(both, every_mode)
    flags = [tuple(map(bool, step(gradients(1.0, count=1)))) for _ in range(6)]
    assert flags == [(False, False), (True, False), (False, True), (True, False), (False, False), (True, True)]
    np.testing.assert_allclose(one[0].asnumpy(), -6.0)
    np.testing.assert_allclose(two[0].asnumpy(), -2.0)


def test_optimizer_state_is_renamed_only_where_it_would_collide():
    first, second = (nn.Momentum(parameters(), 0.1, 0.9) for _ in range(2))
    for optimizer in (first, second):
        optimizer.global_step.name = "unheard_of_step"
    Accumulator(first, 2)
    accumulator = Accumulator(second, 2)
    prefix = accumulator.mini_step.name.removesuffix("mini_step")
    assert first.global_step.name == "unheard_of_step"
    assert second.global_step.name == f"{prefix}unheard_of_step"
    Accumulator(first, 2)
    assert first.global_step.name == "unheard_of_step"
    assert [p.name for p in first.parameters] == ["p0", "p1"]


def test_a_dead_optimizer_gives_its_names_back():
    for _ in range(2):
        optimizer = nn.Momentum(parameters(), 0.1, 0.9)
        optimizer.global_step.name = "step_of_a_notebook_cell"
        Accumulator(optimizer, 2)
        assert optimizer.global_step.name == "step_of_a_notebook_cell"
        del optimizer
        gc.collect()


def test_a_refused_accumulator_takes_no_number_and_renames_nothing():
    optimizer = nn.SGD(parameters(), 0.1)
    number = int(descend(2).mini_step.name.removeprefix("accumulator").removesuffix(".mini_step"))
    names = [p.name for p in optimizer.get_parameters()]
    with pytest.raises(ValueError, match="buffer_dtype is Int32"):
        Accumulator(optimizer, 2, buffer_dtype=ms.int32)
    assert [p.name for p in optimizer.get_parameters()] == names
    assert descend(2).mini_step.name == f"accumulator{number + 1}.mini_step"


def test_one_accumulator_in_two_jitted_functions(mode):
    accumulator = descend(2)
    one, other = compiled(calling(accumulator), mode), compiled(calling(accumulator), mode)
    assert [bool(one(gradients(1.0))), bool(other(gradients(2.0)))] == [False, True]
    assert applied(accumulator) == 3.0


# --- non-finite gradients ----------------------------------------------------------------------------------------------


# Every kind at every place, compiled in one graph: test_skipped_microbatches_leave_no_trace.
@pytest.mark.parametrize(("mode", "bad", "place"), in_modes([*product((NAN, INF, -INF), range(3))], [(NAN, 0), (INF, 1), (-INF, 2)]),
                         indirect=["mode"])
def test_skip_microbatch_leaves_the_window_open_for_another_one(mode, bad, place):
    accumulator = descend(2, reduction="mean", on_nonfinite="skip_microbatch")
    step = compiled(calling(accumulator), mode)
    fed = [1.0, 3.0]
    fed.insert(place, bad)
    closed = [bool(step(gradients(value))) for value in fed]
    if place == 2:  # the bad one opens the next window, which stays empty
        assert closed == [False, True, False]
    else:
        assert closed == [False, False, True]
    assert applied(accumulator) == 2.0
    assert (int(accumulator.skipped), int(accumulator.mini_step), int(accumulator.update_step)) == (1, 0, 1)


def test_skip_microbatch_with_a_window_of_one(mode):
    accumulator = descend(1, on_nonfinite="skip_microbatch")
    step = compiled(calling(accumulator), mode)
    assert [bool(step(gradients(value))) for value in (NAN, 1.0, INF)] == [False, True, False]
    assert (applied(accumulator), int(accumulator.skipped)) == (1.0, 2)


@pytest.mark.parametrize(("mode", "bad", "place"), in_modes([*product((NAN, INF, -INF), range(2))], [(NAN, 0), (-INF, 1)]),
                         indirect=["mode"])
def test_skip_window_drops_the_window_and_leaves_the_optimizer_alone(mode, bad, place):
    accumulator = Accumulator(Counting(parameters()), 2, clip_norm=INF, on_nonfinite="skip_window")
    step = compiled(calling(accumulator), mode)
    fed = [1.0]
    fed.insert(place, bad)
    assert [bool(step(gradients(value))) for value in fed] == [False, True]
    assert (int(accumulator.optimizer.calls), int(accumulator.update_step), int(accumulator.skipped)) == (0, 0, 1)
    assert [bool(step(gradients(value))) for value in (1.0, 2.0)] == [False, True]
    np.testing.assert_allclose(accumulator.optimizer.seen[0].asnumpy(), 3.0)  # no NaN survives in a buffer
    assert float(accumulator.grad_norm) == pytest.approx(3 * math.sqrt(14), rel=1e-6)


@pytest.mark.parametrize(("mode", "bad", "dtype"), in_modes(
    [*product((NAN, INF, -INF), (ms.float16, ms.float32, ms.float64))], [(NAN, ms.float32), (INF, ms.float16), (-INF, ms.float64)]),
    indirect=["mode"])
def test_reset_also_forgets_nan(mode, bad, dtype):
    accumulator = Accumulator(Counting(parameters(dtype)), 2, buffer_dtype=dtype)
    accumulator.add(gradients(bad, dtype))

    def reset():
        accumulator.reset()
        return accumulator.mini_step + 0

    compiled(reset, mode)()
    assert not any(np.any(b.asnumpy()) for b in accumulator.buffers)


def test_one_bad_element_in_the_last_gradient_is_enough(mode):
    accumulator = descend(2, on_nonfinite="skip_microbatch")
    step = compiled(calling(accumulator), mode)
    last = np.ones((2, 4))
    last[1, 3] = NAN
    step((gradients(1.0)[0], Tensor(last, ms.float32)))
    assert (int(accumulator.skipped), int(accumulator.mini_step)) == (1, 0)


def test_apply_mode_passes_nan_on(mode):
    """Negative control of the two above: without them the parameters are lost."""
    accumulator = descend(2)
    step = compiled(calling(accumulator), mode)
    step(gradients(NAN))
    step(gradients(1.0))
    assert np.isnan(accumulator.optimizer.parameters[0].asnumpy()).all()


# --- bad input ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("error", "message", "arguments"), [
    (ValueError, r"accumulate_step is 0, but a window holds at least 1 microbatch; give an int >= 1", {"accumulate_step": 0}),
    (ValueError, r"accumulate_step is -3", {"accumulate_step": -3}),
    (TypeError, r"accumulate_step is True of type bool, expected an integer", {"accumulate_step": True}),
    (TypeError, r"accumulate_step is 2\.0 of type float", {"accumulate_step": 2.0}),
    (TypeError, r"accumulate_step is None", {"accumulate_step": None}),
    (TypeError, r"accumulate_step is '4'", {"accumulate_step": "4"}),
    (ValueError, r"accumulate_step is \{\}, which says nothing about update 0", {"accumulate_step": {}}),
    (ValueError, r"says nothing about update 0", {"accumulate_step": {1: 2}}),
    (ValueError, r"clip_norm is 0, expected a number > 0", {"clip_norm": 0}),
    (ValueError, r"clip_norm is -1\.0", {"clip_norm": -1.0}),
    (ValueError, r"clip_norm is nan", {"clip_norm": NAN}),
    (TypeError, r"clip_norm is '1' of type str, expected a number; give a norm > 0", {"clip_norm": "1"}),
    (TypeError, r"clip_norm is True", {"clip_norm": True}),
    (ValueError, r"reduction is 'avg', expected one of 'sum', 'mean'", {"reduction": "avg"}),
    (ValueError, r"on_nonfinite is 'skip', expected one of 'apply', 'skip_microbatch', 'skip_window'", {"on_nonfinite": "skip"}),
    (ValueError, r"buffer_dtype is Int32, expected a float dtype", {"buffer_dtype": ms.int32}),
    (ValueError, r"buffer_dtype is float32, expected a float dtype", {"buffer_dtype": "float32"}),
    (TypeError, r"reducer is of type str, expected a DataParallel, or None for one device", {"reducer": "mean"}),
])
def test_bad_arguments_are_refused_by_the_host(error, message, arguments):
    with pytest.raises(error, match=message):
        Accumulator(nn.SGD(parameters(), 0.1), **{"accumulate_step": 2, **arguments})


@pytest.mark.parametrize("optimizer", [None, "sgd", nn.Dense(2, 2), lambda grads: None, parameters()])
def test_an_optimizer_that_is_none_is_refused(optimizer):
    with pytest.raises(TypeError, match=r"optimizer is of type \w+, expected a MindSpore optimizer; give e\.g\. nn\.SGD"):
        Accumulator(optimizer, 2)


def test_an_optimizer_without_parameters_is_refused():
    optimizer = Counting(parameters())
    optimizer.parameters = ()
    with pytest.raises(ValueError, match="optimizer holds no parameters, expected at least one"):
        Accumulator(optimizer, 2)


BAD_CALLS = {
    "too few": (ValueError, r"grads holds 1 gradients, expected 2", gradients(1.0, count=1), 1.0),
    "too many": (ValueError, r"grads holds 3 gradients, expected 2", gradients(1.0, count=3), 1.0),
    "swapped": (ValueError, r"the gradient of p0 has shape \(2, 4\), expected \(2, 3\)", gradients(1.0)[::-1], 1.0),
    "a Tensor": (TypeError, r"grads is no tuple of Tensors", gradients(1.0)[0], 1.0),
    "None inside": (TypeError, r"the gradient of p1 is no Tensor", (gradients(1.0)[0], None), 1.0),
    "vector weight": (ValueError, r"weight is a Tensor of shape \(3,\), expected shape \(\)", gradients(1.0), Tensor([1.0] * 3)),
    "negative weight": (ValueError, r"weight is -1.*, expected a finite number >= 0", gradients(1.0), -1.0),
    "nan weight": (ValueError, r"weight is nan", gradients(1.0), NAN),
    "no weight": (TypeError, r"weight is None, expected a number", gradients(1.0), None),
    "bool weight": (TypeError, r"weight is True, expected a number", gradients(1.0), True),
    "text weight": (TypeError, r"weight is '1', expected a number", gradients(1.0), "1"),
}


@pytest.mark.parametrize("method", ["__call__", "add"])
@pytest.mark.parametrize("case", list(BAD_CALLS))
def test_a_bad_call_is_refused_and_changes_nothing(mode, method, case):
    error, message, grads, weight = BAD_CALLS[case]
    accumulator = Accumulator(Counting(parameters()), 2, reduction="mean")
    accumulator(gradients(1.0), 2.0)
    before = [p.asnumpy().copy() for p in accumulator.parameters]

    def step(grads, weight):
        if method == "add":
            accumulator.add(grads, weight)
            return accumulator.mini_step + 0
        return accumulator(grads, weight)

    with pytest.raises(error, match=message):
        compiled(step, mode)(grads, weight)
    assert all((p.asnumpy() == b).all() for p, b in zip(accumulator.parameters, before))
    assert bool(accumulator(gradients(3.0), 2.0))
    np.testing.assert_allclose(accumulator.optimizer.seen[0].asnumpy(), 2.0)
