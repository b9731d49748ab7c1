"""Non-finite gradients leave no trace; float16 and bfloat16 gradients lose nothing in float32 buffers; amp networks train."""
import mindspore as ms
import numpy as np
import pytest
import reference
from conftest import MLP, Counting, batches, compiled, difference, values
from mindspore import Parameter, ParameterTuple, Tensor, amp, nn, ops

from ms_accum import Accumulator, make_train_step

NAN, INF = float("nan"), float("inf")
SHAPES = ((2, 3), (4,), (), (1, 2, 2))


def parameters():
    return ParameterTuple([Parameter(Tensor(np.full(shape, 0.5), ms.float32), name=f"p{i}") for i, shape in enumerate(SHAPES)])


def fed_by(optimizer, on_nonfinite, mode):
    """An accumulator with clipping, and a function that feeds it gradients."""
    acc = Accumulator(optimizer, 3, 0.5, reduction="mean", on_nonfinite=on_nonfinite)

    def step(*grads):
        return acc(grads, 2.0)

    return acc, compiled(step, mode)


def optimizer_of(weights):
    """With moments and a learning rate that changes at every update."""
    return nn.Momentum(weights, nn.exponential_decay_lr(0.5, 0.9, 100, 1, 1), 0.9, weight_decay=0.01)


def clean(count, seed=0):
    rng = np.random.default_rng(seed)
    return [[rng.normal(size=shape) for shape in SHAPES] for _ in range(count)]


def spoiled(grads, parameter, value):
    """The same with one bad element, the last one, in one parameter's gradient."""
    grads = [g.copy() for g in grads]
    grads[parameter].reshape(-1)[-1] = value
    return grads


def state(acc):
    trained = {id(p) for p in acc.optimizer.parameters}
    optimizer = [p for p in acc.optimizer.get_parameters() if id(p) not in trained]
    kept = [p for p in acc.parameters if not p.name.endswith("skipped")]
    return [p.asnumpy().tobytes() for p in (*acc.optimizer.parameters, *optimizer, *kept)]


def run(on_nonfinite, mode, sequence):
    acc, step = fed_by(optimizer_of(parameters()), on_nonfinite, mode)
    for grads in sequence:
        step(*[Tensor(g, ms.float32) for g in grads])
    return acc


BAD = [(parameter, value) for parameter in range(len(SHAPES)) for value in (NAN, INF, -INF)]


def test_skipped_microbatches_leave_no_trace(mode):
    """A bad microbatch at every place of a window, in every parameter, of every kind: state is that of a run that never saw one."""
    good = clean(10)
    sequence, bad = [], 0
    for i, grads in enumerate(good):
        for parameter, value in BAD[i % 3::3]:  # first, between and last: at each of a window's places come several bad ones
            sequence.append(spoiled(grads, parameter, value))
            bad += 1
        sequence.append(grads)
    acc = run("skip_microbatch", mode, sequence)
    assert int(acc.skipped) == bad == 40
    assert (int(acc.update_step), int(acc.mini_step)) == (3, 1)
    assert state(acc) == state(run("skip_microbatch", mode, good))


def test_dropped_windows_leave_no_trace(mode):
    """A bad microbatch at each place of a window in turn: its window is dropped, the optimizer and its schedule untouched."""
    good = clean(9)
    sequence, dropped = [], 0
    for window in (good[0:3], good[3:6], good[6:9]):
        for i, (parameter, value) in enumerate(BAD):
            spoiled_window = list(window)
            spoiled_window[i % 3] = spoiled(window[i % 3], parameter, value)
            sequence += spoiled_window
            dropped += 1
        sequence += window
    acc = run("skip_window", mode, [*sequence, good[0]])
    assert int(acc.skipped) == dropped == 36
    assert (int(acc.update_step), int(acc.mini_step)) == (3, 1)
    assert state(acc) == state(run("skip_window", mode, [*good, good[0]]))


def test_apply_lets_them_through(mode):
    """Control: there is something to skip."""
    acc = run("apply", mode, [spoiled(clean(1)[0], 3, NAN), *clean(2)])
    assert np.isnan(acc.optimizer.parameters[3].asnumpy()).any()


@pytest.mark.parametrize(("value", "skipped"), [(1e30, 0), (1e38, 3)])
def test_large_finite_gradients_are_skipped_only_if_their_sum_overflows(mode, value, skipped):
    """As `all_finite` says. The squares of both overflow float32."""
    acc, step = fed_by(Counting(parameters()), "skip_microbatch", mode)
    for _ in range(3):
        step(*[Tensor(np.full(shape, value), ms.float32) for shape in SHAPES])
        acc.reset()
    assert int(acc.skipped) == skipped


@pytest.mark.parametrize("on_nonfinite", ["skip_microbatch", "skip_window"])
def test_a_float16_overflow_in_the_backward_is_skipped(mode, on_nonfinite, monkeypatch):
    """The forward pass is finite; the gradient, 300 * 300, is not."""
    if mode == "pynative":
        monkeypatch.setenv("MS_JIT", "0")
    weight = Parameter(Tensor([0.001], ms.float32), name="w")
    acc = Accumulator(nn.SGD(ParameterTuple([weight]), 0.1), 1, reduction="mean", on_nonfinite=on_nonfinite)

    def forward_fn(x):
        y = (weight.astype(ms.float16) * x) * x
        return y.astype(ms.float32).mean()

    train_step = make_train_step(forward_fn, acc)
    assert np.isfinite(float(train_step(Tensor([300.0], ms.float16))))
    assert (int(acc.skipped), int(acc.update_step)) == (1, 0)
    assert float(weight.asnumpy()[0]) == pytest.approx(0.001)
    train_step(Tensor([1.0], ms.float16))
    assert float(weight.asnumpy()[0]) == pytest.approx(0.001 - 0.1, rel=1e-3)


# --- float16 and bfloat16 --------------------------------------------------------------------------------------------------


def accumulated(dtype, buffer_dtype, first, mode):
    """The sum of a first gradient and of 1,000 of 1e-4, as the optimizer gets it."""
    weights = ParameterTuple([Parameter(Tensor([0.0], ms.float32), name="w")])
    acc = Accumulator(Counting(weights), 1001, buffer_dtype=buffer_dtype)

    def step(grad):
        return acc((grad,))

    step = compiled(step, mode)
    for value in [first] + [1e-4] * 1000:
        step(Tensor([value], dtype))
    assert int(acc.optimizer.calls) == 1
    return float(acc.optimizer.seen[0].asnumpy()[0])


@pytest.mark.parametrize("dtype", [ms.float16, ms.bfloat16])
def test_small_gradients_accumulate_without_loss_in_float32(mode, dtype):
    """bfloat16 gradients only: MindSpore's CPU backend has no bfloat16 MatMul or SGD."""
    rounded = float(Tensor([1e-4], dtype).astype(ms.float32).asnumpy()[0])
    assert accumulated(dtype, None, 1.0, mode) == pytest.approx(1 + 1000 * rounded, rel=1e-5)


def test_float16_buffers_stall(mode):
    """Control: 1 + 1e-4 is 1 in float16, a thousand times."""
    assert accumulated(ms.float16, ms.float16, 1.0, mode) == 1.0


def test_float16_parameters_get_float32_buffers():
    network = MLP()
    for parameter in network.trainable_params():
        parameter.set_dtype(ms.float16)
    acc = Accumulator(nn.SGD(network.trainable_params(), 0.1), 2)
    assert {b.dtype for b in acc.buffers} == {ms.float32}


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_amp_networks_train(level, mode, monkeypatch):
    """`auto_mixed_precision` in float16 with a dynamic loss scale: the oracle's parameters to float16's precision."""
    if mode == "pynative":
        monkeypatch.setenv("MS_JIT", "0")
    network = MLP()
    start = values(network.trainable_params())
    network = amp.auto_mixed_precision(network, level, ms.float16)
    loss_fn = nn.CrossEntropyLoss()

    def forward_fn(x, y):
        return loss_fn(ops.cast(network(x), ms.float32), y)

    acc = Accumulator(nn.SGD(network.trainable_params(), 0.1), 2, reduction="mean")
    scaler = amp.DynamicLossScaler(2**10, 2, 2)
    train_step = make_train_step(forward_fn, acc, loss_scaler=scaler)
    oracle = reference.Accumulation(start, reference.SGD(0.1), 2, "mean")
    for x, y in batches([6] * 8):
        train_step(Tensor(x, ms.float32), Tensor(y, ms.int32))
        oracle(reference.loss_and_gradients(oracle.parameters, x, y)[1], len(x))
    assert float(scaler.scale_value) == 2**12
    assert int(acc.update_step) == 4
    assert 0 < difference(values(network.trainable_params()), oracle.parameters) <= 5e-3
