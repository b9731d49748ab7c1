"""The open window: the dtypes of its buffers, their unit of weights, how they are emptied, and who gets them next."""
import gc
import sys
import warnings
from contextlib import nullcontext

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, ParameterTuple, Tensor, nn
from support.cells import Counting
from support.modes import compiled, recorded_warnings
from support.processes import MEMORY, run_python

from ms_accum import Accumulator, load_checkpoint, make_train_step, save_checkpoint, until_weight
from ms_accum.core import kernels
from ms_accum.core.precision import LONGEST_SUM, warn_of_lost_gradients
from ms_accum.distributed import exchange

pytestmark = pytest.mark.core

INF, NAN = float("inf"), float("nan")


@pytest.mark.parametrize(("switch", "device", "chosen"), [
    ("1", "Ascend", "InPlace"), ("0", "Ascend", "Portable"), (None, "Ascend", "Portable"), ("1", "CPU", "Portable")])
def test_kernels_in_place_run_only_where_they_are_asked_for(monkeypatch, switch, device, chosen):
    monkeypatch.setattr(kernels.ms, "get_context", lambda _: device)
    monkeypatch.delenv(kernels.SWITCH, raising=False)
    if switch is not None:
        monkeypatch.setenv(kernels.SWITCH, switch)
    assert type(kernels.kernels()).__name__ == chosen
    assert type(kernels.kernels(in_buffers=False)).__name__ == "Portable"


@pytest.mark.parametrize("mode", [pytest.param("jit", marks=pytest.mark.slow), "pynative"], indirect=True)
def test_dtypes_of_parameters_and_buffers(mode):
    """Several microbatches in one function, which 16 bits must not lose; gradients in their parameters' dtypes."""
    def parameters(prefix):
        kinds = ((ms.float16, [0.0]), (ms.float32, 0.0), (ms.float64, [0.0]))
        return ParameterTuple([Parameter(Tensor(value, dtype), name=f"{prefix}{dtype}") for dtype, value in kinds])

    asked_for = (None, ms.float16, ms.float32, ms.float64)
    accumulators = tuple([Accumulator(Counting(parameters(f"{i}.")), 9, INF, reduction="mean", buffer_dtype=dtype)
                          for i, dtype in enumerate(asked_for)])
    expected = [[ms.float32, ms.float32, ms.float64], *([dtype] * 3 for dtype in asked_for[1:])]
    assert [[b.dtype for b in accumulator.window.buffers] for accumulator in accumulators] == expected

    def step(*gradients):
        for accumulator in accumulators:
            for factor in (1, 0.25, 0.25):
                accumulator.add(tuple([gradient * factor for gradient in gradients]))
        return accumulators[0].mini_step + 0

    assert int(compiled(step, mode)(Tensor([0.1], ms.float16), Tensor(0.1, ms.float32), Tensor([0.1], ms.float64))) == 3
    for accumulator in accumulators:
        assert accumulator.flush()
        seen = accumulator.optimizer.seen
        assert [s.dtype for s in seen] == [ms.float16, ms.float32, ms.float64]
        assert [s.asnumpy().item() for s in seen] == pytest.approx([0.05] * 3, rel=2e-3)
    for accumulator in (accumulators[0], accumulators[3]):
        assert accumulator.optimizer.seen[2].asnumpy().item() == pytest.approx(0.05, rel=1e-7)


def test_buffers_that_the_cpu_cannot_add_to_are_refused():
    """By the name of the argument. Control: float16, and parameters in bfloat16 with buffers in float32."""
    def built(dtype, **options):
        parameters = ParameterTuple([Parameter(Tensor([1.0], dtype), name="w")])
        return Accumulator(Counting(parameters), 2, reduction="sum", **options)

    with pytest.raises(ValueError, match=r"^buffer_dtype is BFloat16, .*; leave buffer_dtype out$"):
        built(ms.float32, buffer_dtype=ms.bfloat16)
    built(ms.float32, buffer_dtype=ms.float16)
    assert built(ms.bfloat16).window.buffers[0].dtype == ms.float32


@pytest.mark.usefixtures("compiled_if_slow")
def test_windows_of_one_microbatch_have_no_buffers(tmp_path, monkeypatch):
    """Not in training, not in a checkpoint, not after it was loaded; a longer window makes them."""
    monkeypatch.setattr(exchange, "_unused", {})  # buffers of other tests, which have memory

    def trained(schedule, calls, path=None):
        network = nn.Dense(3, 2, "ones", "zeros")

        def forward_fn(x):
            return (network(x) ** 2).mean()

        train_step = make_train_step(forward_fn, nn.Momentum(network.trainable_params(), 0.1, 0.9), schedule)
        if path is not None:
            load_checkpoint(path, network, train_step)
        for i in calls:
            train_step(Tensor(np.full((4, 3), 1 + i / 8), ms.float32))
        return network, train_step, train_step.window

    network, train_step, window = trained(1, range(4))
    assert not window.is_allocated
    assert not train_step.flush()
    assert not window.is_allocated
    assert not any(buffer.asnumpy().any() for buffer in window.buffers)
    path = tmp_path / "closed.safetensors"
    save_checkpoint(path, network, train_step)
    resumed, _, again = trained({0: 1, 7: 2}, range(4, 7), path)
    assert not again.is_allocated
    plain, _, needed = trained({0: 1, 7: 2}, range(8))
    assert needed.is_allocated  # the control
    resumed, train_step, again = trained({0: 1, 7: 2}, range(4, 8), path)
    assert again.is_allocated
    assert int(train_step.accumulator.mini_step) == 1
    assert resumed.weight.asnumpy().tolist() == plain.weight.asnumpy().tolist()
    save_checkpoint(path, resumed, train_step)
    _, train_step, again = trained({0: 1, 7: 2}, (), path)  # the open window of a file makes them, too
    assert again.is_allocated
    assert again.buffers[0].asnumpy().any()


# --- long sums --------------------------------------------------------------------------------------------------------

BITS = {ms.float16: 11, ms.bfloat16: 8}  # significant ones


def rounded(values, bits):
    """float64 values with so many significant bits; half to even."""
    mantissa, exponent = np.frexp(values)
    return np.ldexp(np.round(np.ldexp(mantissa, bits)), exponent - bits)


def sums(dtype, count, spread, add=lambda gradient: None):
    """The sum of gradients of one sign, each 1 - spread to 1 + spread times their mean: in this dtype, and exact."""
    rng = np.random.default_rng(1)
    mean, total, exact = rng.uniform(0.01, 0.02, 500), np.zeros(500), np.zeros(500)
    for _ in range(count):
        gradient = rounded(mean * rng.uniform(1 - spread, 1 + spread, 500), BITS[dtype])
        total, exact = rounded(total + gradient, BITS[dtype]), exact + gradient
        add(gradient)
    return total, exact


def off(total, exact):
    return np.linalg.norm(total - exact) / np.linalg.norm(exact)


@pytest.mark.parametrize(("count", "least"), [(800, 0.003), pytest.param(3000, 0.03, marks=pytest.mark.slow)])
def test_a_float16_buffer_stops_growing_as_numpys_sum_does(count, least):
    """And a float32 buffer does not."""
    parameter = Parameter(Tensor(np.zeros(500), ms.float32), name="w")
    accumulators = [Accumulator(nn.SGD([parameter], 0.1), 9999, reduction="sum", buffer_dtype=dtype)
                    for dtype in (None, ms.float16)]

    def add(gradient):
        for accumulator in accumulators:
            accumulator.add((Tensor(gradient, ms.float32),))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of windows that are too long, and of those that are lost
        total, exact = sums(ms.float16, count, 0.5, add)
    good, short = (accumulator.window.buffers[0].asnumpy().astype(np.float64) for accumulator in accumulators)
    assert short.tolist() == total.tolist()
    assert off(good, exact) < 1e-5
    assert off(short, exact) > least


@pytest.mark.parametrize("dtype", BITS)
def test_windows_that_are_warned_of_lose_gradients(dtype):
    """The figures at `LONGEST_SUM`, equal gradients first; from eight times as many on, sums are much too small."""
    limit = LONGEST_SUM[dtype]
    assert limit == 2 ** BITS[dtype] / 4
    for spread, most in ((0, 0.035), (0.5, 0.008)):
        assert off(*sums(dtype, limit, spread)) < most
        total, exact = sums(dtype, 8 * limit, spread)
        assert np.linalg.norm(total) < 0.9 * np.linalg.norm(exact)


@pytest.mark.parametrize(("accumulate_step", "pieces", "most"), [
    (513, 1, "513"), ({0: 2, 9: 600, 12: 4}, 1, "600"), ({0: 1, 64: 1024}, 1, "1024"),
    (until_weight(9, at_most=700), 1, "700"), (200, 3, "200 x 3"), (512, 1, None), (until_weight(512), 1, None),
    (until_weight(512.5), 1, "513"), (until_weight(5000, at_most=512), 1, None),
    (128, 4, None), (600, 2, "600")])
def test_windows_too_long_for_16_bits_are_warned_of_once(accumulate_step, pieces, most):
    """Once also in pieces. Control: float32 buffers."""
    def forward_fn(x):
        return x.mean()

    for dtype in (ms.float16, None, ms.float32):
        optimizer = nn.SGD(nn.Dense(2, 1).trainable_params(), 0.1)
        with recorded_warnings() as caught:
            make_train_step(forward_fn, optimizer, accumulate_step, pieces=pieces, buffer_dtype=dtype)
        said = [str(one.message) for one in caught if issubclass(one.category, UserWarning)]
        assert len(said) == (dtype == ms.float16 and most is not None)
        assert all(f"buffer_dtype is Float16 and windows may hold {most} gradients, expected at most 512" in text
                   and "leave out buffer_dtype" in text for text in said)


def test_windows_too_long_for_bfloat16_are_warned_of():
    """The function alone: CPU has no such buffers."""
    for longest, warns in ((65, pytest.warns(UserWarning, match="may hold 65 gradients, expected at most 64")),
                           (64, nullcontext())):
        with warns, warnings.catch_warnings() if longest == 64 else nullcontext():
            if longest == 64:
                warnings.simplefilter("error")
            warn_of_lost_gradients(ms.bfloat16, longest)


# --- the unit of weights ----------------------------------------------------------------------------------------------


def window_of(unit, dtype=ms.float32):
    """The window of an accumulator by hand, which keeps it."""
    parameter = Parameter(Tensor(np.zeros(2), ms.float32), name="w")
    accumulator = Accumulator(nn.SGD([parameter], 0.1), 9, reduction="sum", buffer_dtype=dtype)
    if unit is not None:
        accumulator.window.fix_unit(unit)
    return accumulator


def added(accumulator, *pairs):
    for value, weight in pairs:
        accumulator.add((Tensor([value, value], ms.float32),), weight)
    window = accumulator.window
    found = window.buffers[0].asnumpy().tolist(), float(window.weight_unit)
    accumulator.boundary.saved = int(window.closed_windows), int(window.mini_step)  # it is lost on purpose
    return found


def test_the_unit_is_fixed_once_and_makes_large_weights_small():
    assert added(window_of(None), (1.0, 6), (2.0, Tensor(2.0))) == ([10, 10], 1)
    assert added(window_of(2.0), (1.0, 6), (2.0, Tensor(2.0)), (NAN, 0)) == ([5, 5], 2)
    assert added(window_of(70_000.0, ms.float16), (1.0, 70_000), (1.0, 70_000)) == ([2, 2], 70_000)
    assert added(window_of(None, ms.float16), (1.0, 70_000))[0] == [INF, INF]  # the control
    accumulator = window_of(None)
    added(accumulator, (1.0, 6))
    accumulator.window.fix_unit(4.0)  # a graph that was compiled without a driver holds the unit 1: it stays
    assert (accumulator.window.unit, added(accumulator, (1.0, 2))) == (1.0, ([8, 8], 1))
    for before in (2.0, 4.0, None):  # loaded buffers are converted to the unit that graphs hold, if there is one
        accumulator = window_of(before)
        window = accumulator.window
        window.buffers[0].init_data()
        ms.ops.assign(window.buffers[0], Tensor([12.0, 12.0]))
        window.adopt(4.0)
        unit = before or 4.0
        assert (window.unit, float(window.weight_unit)) == (unit, unit)
        assert added(accumulator, (1.0, 8)) == ([48 / unit + 8 / unit] * 2, unit)


def test_a_graph_that_was_compiled_but_never_ran_holds_the_unit():
    """Control: without it, the unit is that of the first driver."""
    for compiles, unit in ((True, 1.0), (False, 4.0)):
        accumulator = window_of(None)

        def add(gradient, accumulator=accumulator):
            accumulator.add((gradient,), 2.0)
            return gradient

        if compiles:
            function = ms.jit(add)
            (function.compile if hasattr(function, "compile") else function)(Tensor([1.0, 1.0]))
            accumulator.reset()
        accumulator.window.fix_unit(4.0)
        assert (accumulator.window.unit, float(accumulator.window.weight_unit)) == (unit, unit)


def test_parameters_may_have_the_names_of_counters():
    """In a graph, names are unique. Control: a parameter that has the whole name of a counter."""
    counters = [name for name in accumulator_of(["w"]).state if not name.startswith("sum.")]
    assert {"mini_step", "weight_unit"} <= {*counters}

    def step(accumulator):
        compiled(accumulator.__call__, "graph")((Tensor([1.0]),) * len(accumulator.weights))
        return [float(weight.asnumpy()[0]) for weight in accumulator.weights]

    assert step(accumulator_of(counters)) == [-1] * len(counters)
    with pytest.raises(RuntimeError, match="already exist"):
        step(accumulator_of(["only_here", "accumulator.only_here.mini_step"]))


def accumulator_of(names):
    return Accumulator(nn.SGD([Parameter(Tensor([0.0]), name=name) for name in names], 1.0), 1, reduction="sum")


# --- emptying ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/statm")
def test_emptying_the_buffers_holds_no_second_copy_of_them():
    """Growth over the buffers' size; the control is `zeros_like`, which graph mode turns into constants.

    In the same new process: the second of two equal accumulators has its number in its names.
    """
    ours, zeros_like, names = run_python(MEMORY, "emptying").splitlines()
    assert float(ours) < 0.5
    assert float(zeros_like) > float(ours) + 0.5
    parameters = [Parameter(Tensor([0.0]), name=f"w{i}") for i in range(2)]
    accumulator = Accumulator(nn.SGD(parameters, 0.1), 2, reduction="sum")
    prefix = accumulator.mini_step.name.removesuffix(".mini_step")
    expected = [p.name.replace(f"{prefix}.", f"{other}.") for other in ("accumulator.w0", "accumulator1")
                for p in accumulator.parameters]
    assert names.split() == expected


@pytest.mark.usefixtures("compiled_if_slow")
def test_the_next_accumulator_gets_the_buffers_of_one_that_is_gone():
    """MindSpore never frees what a compiled graph has read. Control: not while the first one lives."""
    def built():
        network = nn.Dense(3, 2)

        def forward_fn(x):
            return network(x).mean()

        train_step = make_train_step(forward_fn, nn.SGD(network.trainable_params(), 0.1), 2)
        train_step(Tensor(np.ones((4, 3), np.float32)))
        return train_step

    first = built()
    buffers = {id(buffer) for buffer in first.window.buffers}
    second = built()
    assert not buffers & {id(buffer) for buffer in second.window.buffers}
    first.accumulator.reset()
    del first
    gc.collect()
    third = built()
    assert buffers == {id(buffer) for buffer in third.window.buffers}
    names = [p.name for step in (second, third) for p in step.accumulator.parameters]
    assert len(set(names)) == len(names)
    for step in (second, third):  # the gradient of one microbatch: the same, whatever the buffers held
        assert step.window.buffers[1].asnumpy().tolist() == [0.5, 0.5]
        step.accumulator.reset()


def test_buffers_in_a_users_graph_are_not_given_to_others():
    """It goes on with them, although its accumulator is gone. Control: the buffers of a step of the same shapes are."""
    network, other = nn.Dense(3, 2), nn.Dense(3, 2)
    optimizer = nn.SGD(network.trainable_params(), 0.1)
    accumulator = Accumulator(optimizer, 9, reduction="mean")
    gradients = [Tensor(np.ones(p.shape), ms.float32) for p in accumulator.weights]

    @ms.jit
    def add(*gradients):
        accumulator.add(gradients)
        return gradients[0]

    add(*gradients)
    accumulator.boundary.note_saved()  # it is lost on purpose
    held = {id(buffer) for buffer in accumulator.window.buffers}
    accumulator = None
    gc.collect()

    def built():
        return make_train_step(nn.WithLossCell(other, nn.MSELoss()), nn.SGD(other.trainable_params(), 0.1), 2)

    first = built()
    assert not held & {id(buffer) for buffer in first.window.buffers}
    first(Tensor(np.ones((4, 3)), ms.float32), Tensor(np.ones((4, 2)), ms.float32))
    first.accumulator.reset()
    held = {id(buffer) for buffer in first.window.buffers}
    del first
    gc.collect()
    assert held == {id(buffer) for buffer in built().window.buffers}
