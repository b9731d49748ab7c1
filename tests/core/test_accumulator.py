"""An accumulator by hand against an oracle in NumPy, drawn: weights, NaN, windows, clipping, skipping, loss scales."""
import random
from types import SimpleNamespace

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, ParameterTuple, Tensor, amp, nn
from support.cells import Counting
from support.modes import compiled, recorded_warnings

from ms_accum import Accumulator, make_train_step, until_weight
from ms_accum.core import kernels
from ms_accum.core.accumulator import LONGEST_SUM

pytestmark = pytest.mark.core

RATE = 0.5


def drawn(seed):
    """What is trained: each microbatch is (gradient, weight). `on_host`: whether the host closes windows."""
    choose = random.Random(seed)
    rng = np.random.default_rng(seed)
    policy = choose.choice(["apply", "skip_window", "skip_microbatch"])
    weights = [(1.0,), (3.0, 5.0, 0.5), (4.0, 0.0, 2.0), (0.25,), (3.0, np.nan)]
    weights = choose.choice(weights[:4] if policy == "apply" else weights)
    microbatches = [(rng.normal(size=3).astype(np.float32), choose.choice(weights)) for _ in range(11)]
    if policy != "apply":
        for place in choose.sample(range(11), choose.choice([0, 2, 5])):
            microbatches[place][0][1] = choose.choice([np.nan, np.inf])
    return SimpleNamespace(
        microbatches=microbatches, policy=policy, as_tensors=choose.random() < 0.5 or np.nan in weights,
        on_host=choose.random() < 0.3, min_weight=choose.choice([None, None, 3.0, 9.0]),
        length=choose.choice([1, 2, 4, {0: 1, 2: 3}, until_weight(6.0, at_most=5)]),
        reduction=choose.choice(["mean", "mean", "sum"]), clip_norm=choose.choice([None, 0.7, float("inf")]),
        scale=choose.choice([None, 2.0**10, "dynamic"]) if policy != "skip_microbatch" else None)


def length_of(case, updates):
    if isinstance(case.length, dict):
        return max((start, n) for start, n in case.length.items() if start <= updates)[1]
    return getattr(case.length, "at_most", case.length)


def trained(case, until=11, divides=None):
    """The parameter, and what is counted, after so many microbatches and a flush. `divides`: another denominator."""
    w, n = np.ones(3), SimpleNamespace(update_step=0, closed_windows=0, skipped=0, skipped_in_row=0, empty_windows=0,
                                       seen=0.0, weight=0.0, grad_norm=np.nan, closed=[])
    window, least = [], case.min_weight or 0.0

    def is_skipped(g, weight):
        return bool(case.policy == "skip_microbatch" and weight and not np.isfinite(weight * g).all())

    def close():
        nonlocal w
        taken = [(g, weight) for g, weight in window if not is_skipped(g, weight)]
        total = sum((np.float64(weight) * g for g, weight in taken if weight), np.zeros(3))
        n.weight = sum(weight for _, weight in taken)
        divisor = {"mean": max(n.weight, least), "sum": 1.0}[case.reduction] if divides is None else divides
        gradient = total / divisor if divisor else np.zeros(3)
        drops = case.policy != "apply" or case.scale is not None
        dropped = drops and (not (taken if least else n.weight) or not np.isfinite(gradient).all())
        norm = np.linalg.norm(gradient)
        n.grad_norm = norm if case.clip_norm is not None else np.nan
        if not dropped:
            factor = 1.0 if case.clip_norm is None else min(1.0, case.clip_norm / (norm + 1e-6))
            w = w - RATE * factor * gradient
            n.seen += n.weight
        n.update_step, n.closed_windows = n.update_step + (not dropped), n.closed_windows + 1
        n.skipped += max(len(window) - len(taken), int(dropped))
        n.skipped_in_row = (n.skipped_in_row + 1) * dropped
        n.empty_windows += n.weight == 0
        window.clear()

    for pair in case.microbatches[:until]:
        window.append(pair)
        budget = getattr(case.length, "budget", None)
        held = sum(weight for g, weight in window if not is_skipped(g, weight))
        n.closed.append(int(len(window) >= length_of(case, n.update_step) or (budget and held >= budget) or 0))
        if n.closed[-1]:
            close()
    if window:
        close()
    return w, n


def ours(case, mode):
    parameter = Parameter(Tensor(np.ones(3, np.float32)), name="w")
    scaler = amp.DynamicLossScaler(2.0**12, 2, 2) if case.scale == "dynamic" else None
    if isinstance(case.scale, float):
        scaler = amp.StaticLossScaler(case.scale)
    accumulator = Accumulator(nn.SGD([parameter], RATE), case.length, case.clip_norm, reduction=case.reduction,
                              on_nonfinite=case.policy, max_skips=None, loss_scaler=scaler, min_weight=case.min_weight)
    closed = []

    def step(gradient, weight):
        scaled = gradient * accumulator.scaled(Tensor(1.0))  # as a backward pass does
        return (accumulator.add if case.on_host else accumulator)((scaled,), weight)

    step = compiled(step, mode)
    for gradient, weight in case.microbatches:
        result = step(Tensor(gradient), Tensor(weight, ms.float32) if case.as_tensors else weight)
        closed.append(int(accumulator.close() if case.on_host else result))
    accumulator.flush()
    return parameter.asnumpy(), accumulator.status(), closed


def off(case, mode, **changes):
    """How far a training is from the oracle's, in its parameter and in all that is counted."""
    (w, status, closed), (expected, n) = ours(case, mode), trained(case, **changes)
    wrong = {name: (getattr(status, name), value) for name, value in vars(n).items()
             if name not in ("grad_norm", "seen", "closed")
             and getattr(status, name) != pytest.approx(value, rel=1e-6, nan_ok=True)}
    assert (status.mini_step, closed[:len(n.closed)]) == (0, n.closed)
    wrong |= {} if abs(status.seen - n.seen) <= 0.5 + 1e-6 * n.seen else {"seen": (status.seen, n.seen)}
    if np.isfinite(n.grad_norm):
        wrong |= {} if status.grad_norm == pytest.approx(n.grad_norm, rel=1e-5) else {"norm": status.grad_norm}
    return np.abs(w - expected).max() if np.isfinite(expected).all() else 0.0, wrong


@pytest.mark.parametrize("seed", range(24))
def test_any_run_by_hand_is_that_of_the_oracle(seed):
    case = drawn(seed)
    print(vars(case))
    difference, wrong = off(case, "pynative")
    assert wrong == {}
    assert difference < 2e-6


@pytest.mark.parametrize("seed", [*range(24, 27), *(pytest.param(i, marks=pytest.mark.slow) for i in range(27, 90))])
def test_any_run_in_a_graph_is_that_of_the_oracle(seed):
    case = drawn(seed)
    case.as_tensors = True  # one graph
    print(vars(case))
    difference, wrong = off(case, "jit")
    assert wrong == {}
    assert difference < 2e-6


def test_the_oracle_finds_a_wrong_denominator_and_a_lost_window():
    """Negative control of both."""
    case = drawn(0)
    case.policy, case.scale, case.reduction, case.clip_norm, case.length = "apply", None, "mean", None, 4
    case.min_weight = None
    case.microbatches = [(np.float32([1, 2, 3]), 2.0)] * 11
    assert off(case, "pynative")[0] < 1e-6
    assert off(case, "pynative", divides=4.0)[0] > 0.1
    difference, wrong = off(case, "pynative", until=8)
    assert difference > 0.1
    assert {"update_step", "closed_windows", "weight"} <= {*wrong}


# --- a loop by hand ---------------------------------------------------------------------------------------------------


def by_hand(accumulate_step=2, **options):
    parameter = Parameter(Tensor(np.zeros(2, np.float32)), name="w")
    return Accumulator(nn.SGD([parameter], 1.0), accumulate_step, reduction="mean", **options)


ONE = (Tensor(np.ones(2, np.float32)),)


def test_close_flush_and_reset_on_the_host():
    """`close` closes a full window and says so; `flush` one that is not full; `reset` drops it and counts nothing."""
    accumulator = by_hand()
    assert int(accumulator.add(ONE)) == 1
    assert not accumulator.close()
    assert int(accumulator.add(ONE, 3.0)) == 2
    assert accumulator.close()
    accumulator.add(ONE)
    assert accumulator.flush()
    assert not accumulator.flush()
    accumulator.add(ONE)
    accumulator.reset()
    status = accumulator.status()
    assert (status.update_step, status.mini_step, status.seen) == (2, 0, 5)
    assert accumulator.weights[0].asnumpy().tolist() == [-2, -2]


def test_close_if_keeps_its_branch(mode):
    accumulator = by_hand(9)

    def step(condition):
        accumulator.add(ONE)
        return accumulator.close_if(condition)

    step = compiled(step, mode)
    assert [bool(step(Tensor(value))) for value in (False, True, False)] == [False, True, False]
    assert accumulator.status()[:2] == (1, 1)
    accumulator.reset()


def test_how_a_loss_is_divided_must_be_said_and_options_by_their_names():
    """Junk, and bad calls: test_arguments.py."""
    with pytest.raises(TypeError, match="reduction"):
        Accumulator(nn.SGD([Parameter(Tensor([0.0]), name="w")]), 4)
    with pytest.raises(TypeError, match=r"unexpected argument clipnorm; did you mean clip_norm\?"):
        by_hand(clipnorm=3)


# --- buffers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("switch", "device", "dtype", "chosen"), [
    ("1", "Ascend", ms.float32, "InPlace"), (None, "Ascend", ms.bfloat16, "OneByOne"),
    (None, "Ascend", ms.float32, "Portable"), (None, "CPU", ms.float16, "Portable")])
def test_kernels_in_place_run_only_where_they_are_asked_for(monkeypatch, switch, device, dtype, chosen):
    monkeypatch.setattr(kernels.ms, "get_context", lambda _: device)
    monkeypatch.delenv(kernels.SWITCH, raising=False)
    if switch is not None:
        monkeypatch.setenv(kernels.SWITCH, switch)
    assert type(kernels.kernels_for([SimpleNamespace(dtype=dtype, size=1)])).__name__ == chosen


def test_scaling_one_by_one_is_scaling(mode):
    """The kernels for 16 bits on Ascend, on CPU. NaN times 0 is 0."""
    gradients, dtypes = (Tensor([3.0, np.nan]), Tensor([5.0, 7.0])), (ms.float32, ms.float32)
    one_by_one, portable = kernels.OneByOne(), kernels.Portable()

    def scaled(factor):
        return (*one_by_one.scale(factor, gradients, dtypes), *portable.scale(factor, gradients, dtypes))

    for factor in (2.0, 0.0):
        found = [value.asnumpy().tolist() for value in compiled(scaled, mode)(Tensor(factor))]
        assert str(found[:2]) == str(found[2:])
        assert str(found[1]) == str([5 * factor, 7 * factor])
    assert found[0] == [0, 0]


@pytest.mark.parametrize("mode", [pytest.param("jit", marks=pytest.mark.slow), "pynative"], indirect=True)
def test_dtypes_of_parameters_and_buffers(mode):
    """Several microbatches in one function, which 16 bits must not lose; gradients in their parameters' dtypes."""
    kinds = (ms.float16, [0.0]), (ms.float32, 0.0), (ms.float64, [0.0])
    for asked_for, expected in ((None, [ms.float32, ms.float32, ms.float64]), (ms.float16, [ms.float16] * 3)):
        parameters = [Parameter(Tensor(value, dtype), name=f"{asked_for}.{dtype}") for dtype, value in kinds]
        optimizer = Counting(ParameterTuple(parameters))
        accumulator = Accumulator(optimizer, 9, reduction="mean", buffer_dtype=asked_for)
        assert [b.dtype for b in accumulator.window.buffers] == expected

        def step(*gradients, accumulator=accumulator):
            for factor in (1, 0.25):
                accumulator.add(tuple([gradient * factor for gradient in gradients]))
            return accumulator.add(tuple([gradient * 0.25 for gradient in gradients]))

        ones = Tensor([0.1], ms.float16), Tensor(0.1, ms.float32), Tensor([0.1], ms.float64)
        assert int(compiled(step, mode)(*ones)) == 3
        assert accumulator.flush()
        assert [seen.dtype for seen in optimizer.seen] == [dtype for dtype, _ in kinds]
        assert [float(seen.asnumpy().item()) for seen in optimizer.seen] == pytest.approx([0.05] * 3, rel=2e-3)


def test_buffers_that_the_cpu_cannot_add_to_are_refused():
    """By the name of the argument. Control: parameters in bfloat16 with buffers in float32."""
    def built(dtype, **options):
        return Accumulator(nn.Momentum([Parameter(Tensor([1.0], dtype), name="w")], 0.1, 0.9), 2, reduction="sum",
                           **options)

    with pytest.raises(ValueError, match=r"^buffer_dtype is BFloat16, .*; leave buffer_dtype out$"):
        built(ms.float32, buffer_dtype=ms.bfloat16)
    assert built(ms.bfloat16).window.buffers[0].dtype == ms.float32


@pytest.mark.parametrize(("accumulate_step", "pieces", "most"), [
    (513, 1, 513), ({0: 2, 9: 600, 12: 4}, 1, 600), (until_weight(9, at_most=700), 1, 700), (200, 3, 600),
    (512, 1, None), (until_weight(512), 1, None), (128, 4, None)])
def test_windows_too_long_for_16_bits_are_warned_of_once(accumulate_step, pieces, most):
    """Control: float32 buffers."""
    for dtype in (ms.float16, None):
        optimizer = nn.SGD(nn.Dense(2, 1).trainable_params(), 0.1)
        with recorded_warnings() as caught:
            make_train_step(lambda x: x.mean(), optimizer, accumulate_step, pieces=pieces, buffer_dtype=dtype,
                            eager=True)
        said = [str(one.message) for one in caught if "buffer_dtype" in str(one.message)]
        assert len(said) == (dtype == ms.float16 and most is not None)
        assert all(f"windows may hold {most} gradients, expected at most 512 in 16 bits" in text for text in said)


def test_sums_of_the_longest_window_are_not_far_off():
    """The figure at `LONGEST_SUM`: 3 % for equal gradients; eight times as many lose more than a tenth."""
    for dtype, bits in ((ms.float16, 11), (ms.bfloat16, 8)):
        def rounded(value, bits=bits):
            mantissa, exponent = np.frexp(value)
            return np.ldexp(np.round(np.ldexp(mantissa, bits)), exponent - bits)

        for times, least, most in ((1, 0.0, 0.035), (8, 0.1, 1.0)):
            count, squares = times * LONGEST_SUM[dtype], []
            for value in map(rounded, np.linspace(0.01, 0.02, 40)):
                total = 0.0
                for _ in range(count):
                    total = rounded(total + value)
                squares.append((total / (count * value) - 1) ** 2)
            assert least <= np.sqrt(np.mean(squares)) < most
