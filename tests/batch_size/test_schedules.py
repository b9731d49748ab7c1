"""seesaw and batch_ramp: closed forms, what they conserve, and a training run against NumPy; scale_lr, scale_adam."""
from functools import partial
from math import acos, cos, inf, log, nan, pi, sqrt

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mindspore import Parameter, Tensor, nn, ops

from ms_accum import make_train_step
from ms_accum.batch_size import batch_ramp, scale_adam, scale_lr, seesaw
from ms_accum.window import Window


def windows(schedule, accumulate_step=1):
    """Return the plain update at which each window starts, and how many its length stands for."""
    window = Window(schedule.accumulate_step)
    lengths = np.array([window.host_length(update) for update in range(len(schedule.learning_rate))])
    assert (lengths % accumulate_step == 0).all()
    factors = lengths // accumulate_step
    return np.cumsum(factors) - factors, factors


@pytest.mark.parametrize(("rule", "decay"), [("sqrt", sqrt(2)), ("linear", 1)])
def test_where_the_rate_is_halved_the_window_doubles(rule, decay):
    halving = 0.8 / 2 ** np.repeat(range(4), 24)
    schedule = seesaw(96, halving, accumulate_step=3, rule=rule)
    assert schedule.accumulate_step == {0: 3, 24: 6, 36: 12, 42: 24}
    expected = 0.8 / decay ** np.repeat(range(4), [24, 12, 6, 3])
    assert schedule.learning_rate == pytest.approx(expected, rel=1e-12)
    rounded = (halving * 0.1).astype(np.float32) * np.float32(1.0000002)
    assert seesaw(96, rounded, accumulate_step=3).accumulate_step == schedule.accumulate_step
    other = seesaw(96, halving, rule="linear" if rule == "sqrt" else "sqrt").learning_rate
    assert not other == pytest.approx(expected, rel=0.1)  # control


@pytest.mark.parametrize(("maximum", "updates"), [(1, 3000), (2, 3000), (64, 30000), (100, 30000), (64, 999)])
def test_a_cosine_doubles_the_window_where_the_formula_says(maximum, updates):
    schedule = seesaw(updates, 0.1, maximum=maximum)
    begins, factors = windows(schedule)
    levels = int(log(maximum, 2))
    assert [factors[update] for update in schedule.accumulate_step] == [2**k for k in range(levels + 1)]
    bounds = [0, *(updates * acos(2 ** (1 - k) - 1) / pi for k in range(1, levels + 1)), updates]
    for k, update in enumerate(schedule.accumulate_step):  # the first window that starts at its bound or later
        assert bounds[k] - 1e-2 <= begins[update] < bounds[k] + max(factors[update] // 2, 1)
    assert len(factors) == pytest.approx(sum(np.diff(bounds) / 2 ** np.arange(levels + 1)), abs=levels + 1)
    assert maximum < 64 or 0.62 < len(factors) / updates < 0.625
    at = [(0.1 + 0.1 * cos(pi * p / updates)) / 2 for p in range(updates)]
    assert schedule.learning_rate[:updates // 2] == pytest.approx(at[:updates // 2])
    if maximum > 1:
        first = np.argmax(factors == 2)
        assert schedule.learning_rate[first] == pytest.approx(sum(at[begins[first]:][:2]) / sqrt(2))


def test_warmup():
    """Low rates before the peak do not count, and the last rate is that of what is left."""
    assert seesaw(8, [0, 1, 2, 4, 4, 1, 1, 1]) == ({0: 1, 5: 4}, [0, 1, 2, 4, 4, sqrt(3)])
    assert seesaw(6, (4, 2, 2, 2, 0, 0), maximum=3, rule="linear") == ({0: 1, 1: 2}, [4, 4, 2, 0])
    assert seesaw(3, Tensor([0.5, 0.5, 0.25])) == seesaw(3, np.array([0.5, 0.5, 0.25])) == seesaw(3, [0.5, 0.5, 0.25])
    assert seesaw(3, np.array(0.5)) == seesaw(3, 0.5)
    assert seesaw(1, 0.5) == batch_ramp(1, 0.5) == ({0: 1}, [0.5])


def test_a_ramp_is_linear_in_the_microbatches():
    """Windows of each length take the same number of them: 12 / 1 + 12 / 2 + 12 / 3 updates, then the largest."""
    schedule = batch_ramp(48, 0.1, accumulate_step=2, maximum=9, ramp=36)
    assert schedule.accumulate_step == {0: 2, 12: 4, 18: 6, 22: 8}
    assert schedule.learning_rate == pytest.approx(0.1 * np.sqrt(np.repeat([1, 2, 3, 4], [12, 6, 4, 3])))
    assert batch_ramp(36, 0.1, accumulate_step=2, maximum=9).accumulate_step == {0: 2, 12: 4, 18: 6}
    assert batch_ramp(9, [0.1] * 9, maximum=4, ramp=1) == ({0: 1, 1: 4}, pytest.approx([0.1, 0.2, 0.2]))
    begins, factors = windows(batch_ramp(100_000, 1.0, maximum=32))
    assert np.abs(factors - (1 + 31 * begins / 100_000)).max() <= 1


@given(rates=st.lists(st.floats(0, 10), min_size=1, max_size=300), decays=st.booleans(), length=st.integers(1, 5),
       more=st.integers(0, 60), rule=st.sampled_from(["sqrt", "linear"]),
       build=st.sampled_from([seesaw, batch_ramp, partial(batch_ramp, ramp=7)]))
def test_microbatches_and_the_sum_of_linear_rates_are_conserved(build, rule, rates, decays, length, more):
    rates = sorted(rates, reverse=True) if decays else rates
    if build is seesaw:  # any warmup; from the peak on, rates fall
        peak = rates.index(max(rates))
        rates = rates[:peak] + sorted(rates[peak:], reverse=True)
    schedule = build(len(rates), rates, accumulate_step=length, maximum=length + more, rule=rule)
    begins, factors = windows(schedule, length)
    assert begins[-1] < len(rates) <= begins[-1] + factors[-1]  # only the last window may be incomplete
    assert factors[0] == 1
    assert (np.diff(factors) >= 0).all()
    assert factors[-1] * length <= length + more
    held = np.minimum(factors, len(rates) - begins)
    means = [np.mean(rates[p:p + n]) for p, n in zip(begins, held)]
    assert schedule.learning_rate == pytest.approx([m * scale_lr(1.0, n, rule) for m, n in zip(means, held)])
    assert rule == "sqrt" or sum(schedule.learning_rate) == pytest.approx(sum(rates))


def test_training_equals_numpy():
    """Linear regression on 12 microbatches of 2 samples. The optimizer refuses an update past the end of the list."""
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(12, 2, 3)).astype(np.float32), rng.normal(size=(12, 2)).astype(np.float32)
    plain = [0.02] * 3 + [0.01] * 4 + [0.005] * 5
    schedule = seesaw(12, plain, maximum=4, rule="linear")
    assert schedule == ({0: 1, 3: 2, 5: 4}, pytest.approx([0.02] * 6 + [0.005]))  # the last window holds 1 of 4
    weight = Parameter(Tensor(np.zeros(3, np.float32)), name="weight")

    def forward_fn(x, y):
        return ops.square(ops.matmul(x, weight) - y).mean()

    train_step = make_train_step(forward_fn, nn.SGD([weight], schedule.learning_rate), schedule.accumulate_step)
    closed = []
    for microbatch in zip(x, y):
        train_step(*map(Tensor, microbatch))
        closed.append(bool(train_step.updated))
    assert closed == [True] * 3 + [False, True] * 2 + [False] * 3 + [True, False]
    assert bool(train_step.flush())

    def descend(ends, rates):
        w = np.zeros(3)
        for start, end, rate in zip([0, *ends], ends, rates):
            rows, target = x[start:end].reshape(-1, 3), y[start:end].reshape(-1)
            w = w - rate * 2 * rows.T @ (rows @ w - target) / len(rows)
        return w

    one_by_one = descend(range(1, 13), plain)
    expected = descend([1, 2, 3, 5, 7, 11, 12], schedule.learning_rate)
    assert weight.asnumpy() == pytest.approx(expected, rel=1e-5)
    assert np.abs(one_by_one - expected).max() < 0.05 * np.abs(one_by_one).max()
    assert not weight.asnumpy() == pytest.approx(one_by_one, rel=1e-5)  # controls
    assert np.abs(descend([1, 2, 3, 5, 7, 11, 12], plain) - one_by_one).max() > 0.1 * np.abs(one_by_one).max()
    for _ in range(3):
        train_step(Tensor(x[0]), Tensor(y[0]))
    with pytest.raises(ValueError, match=r"learning rate"):
        train_step(Tensor(x[0]), Tensor(y[0]))


def test_scale_lr():
    for times, linear, root in ((16, 1.6, 0.4), (1, 0.1, 0.1), (1 / 4, 0.025, 0.05)):
        assert (scale_lr(0.1, times), scale_lr(0.1, times, rule="sqrt")) == (pytest.approx(linear), pytest.approx(root))


def test_scale_adam_keeps_the_half_life():
    for beta2, factor in [(0.999, 8), (0.95, 0.25), (0.9, 3.5)]:
        beta1, scaled = scale_adam((0.9, beta2), factor)
        assert (beta1, factor / log(scaled)) == (0.9, pytest.approx(1 / log(beta2)))
    assert scale_adam([0, 0.9999], 4) == pytest.approx((0, 1 - 4 * 0.0001), abs=1e-7)
    assert not scale_adam((0.9, 0.9), 4)[1] == pytest.approx(1 - 4 * 0.1, rel=0.01)  # control: to first order only


REFUSED = [
    (TypeError, r"updates is 9\.0 of type float, expected an int >= 1; give the number of updates", (9.0, 0.1), {}),
    (ValueError, r"updates is 0, expected an int >= 1", (0, 0.1), {}),
    (TypeError, r"learning_rate is of type NoneType, expected a number or a list of rates", (9, None), {}),
    (TypeError, r"learning_rate is True of type bool, expected a finite number > 0", (9, True), {}),
    (ValueError, r"learning_rate is 0, expected a finite number > 0", (9, 0), {}),
    (ValueError, r"learning_rate holds 2 rates, expected 3: one for each update of the plain run;", (3, [1, 1]), {}),
    (ValueError, r"learning_rate\[1\] is -0\.1, expected a finite number >= 0", (2, [0.1, -0.1]), {}),
    (ValueError, r"learning_rate\[0\] is nan", (1, [nan]), {}),
    (ValueError, r"learning_rate\[0\] is inf", (1, (inf,)), {}),
    (TypeError, r"learning_rate\[0\] is '1' of type str", (1, "1"), {}),
    (ValueError, r"accumulate_step is 0, expected an int >= 1; give the length", (9, 0.1), {"accumulate_step": 0}),
    (ValueError, r"maximum is 3, expected an int >= 4; give", (9, 0.1), {"accumulate_step": 4, "maximum": 3}),
    (ValueError, r"maximum is 2147483648, expected at most 2147483647", (9, 0.1), {"maximum": 2**31}),
    (ValueError, r"rule is 'cubic', expected one of 'linear', 'sqrt'", (9, 0.1), {"rule": "cubic"}),
]
REFUSED_SCALES = [
    (TypeError, r"lr is \[0\.1\] of type list, expected a finite number > 0; scale each rate", scale_lr, ([0.1], 2)),
    (ValueError, r"lr is 0, expected a finite number > 0", scale_lr, (0, 2)),
    (TypeError, r"accumulate_step is \{0: 2\} of type dict, expected a finite number > 0; of a schedule", scale_lr, (0.1, {0: 2})),
    (ValueError, r"accumulate_step is 0, expected a finite number > 0", scale_lr, (0.1, 0)),
    (ValueError, r"rule is 'cubic', expected one of 'linear', 'sqrt'", scale_lr, (0.1, 2, "cubic")),
    (TypeError, r"betas is of type float, expected a tuple of two numbers; give Adam's \(beta1, beta2\)", scale_adam, (0.9, 2)),
    (ValueError, r"betas holds 3 numbers, expected 2; give Adam's", scale_adam, ((0.9, 0.99, 0.999), 2)),
    (ValueError, r"betas\[1\] is 1, expected a number with 0 <= beta < 1", scale_adam, ((0.9, 1), 2)),
    (TypeError, r"betas\[0\] is None of type NoneType", scale_adam, ((None, 0.9), 2)),
    (ValueError, r"factor is 0, expected a finite number > 0; give the new batch size divided by", scale_adam, ((0.9, 0.99), 0)),
    (TypeError, r"factor is '2' of type str", scale_adam, ((0.9, 0.99), "2")),
]


def test_bad_arguments_are_refused():
    for error, message, arguments, options in REFUSED:
        for build in (seesaw, batch_ramp):
            with pytest.raises(error, match=message):
                build(*arguments, **options)
    with pytest.raises(ValueError, match=r"ramp is 0, expected an int >= 1; None takes all updates"):
        batch_ramp(9, 0.1, ramp=0)
    for rates in ([1, 1, 0.5, 1], [0, 1, 0, 0.1]):  # restarts, and a pause
        with pytest.raises(ValueError, match=r"learning_rate\[3\] is .*, more than the .* before it, .* Give each cycle a schedule"):
            seesaw(4, rates)
    with pytest.raises(TypeError, match=r"accumulate_step is Schedule\(accumulate_step=<63>, .* of type Schedule, expected"):
        Window(batch_ramp(100_000, 0.1))
    for error, message, function, arguments in REFUSED_SCALES:
        with pytest.raises(error, match=message):
            function(*arguments)
