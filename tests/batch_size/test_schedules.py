"""seesaw and batch_ramp: closed forms, what they conserve; sample_ramp."""
from fractions import Fraction
from functools import partial
from math import ceil, cos, inf, pi, sqrt

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mindspore import Tensor

from ms_accum.batch_size import batch_ramp, sample_ramp, seesaw
from ms_accum.core.length import WindowLength


def expected(build, rates, length, maximum, rule, ramp=None):
    """The lengths and rates of the formulas in the docstrings, one plain update after the other."""
    start, lengths, merged, p = rates.index(max(rates)), [], [], 0
    while p < len(rates):
        if build is seesaw:
            lowest = min(rates[start:p + 1], default=max(rates))
            factor = max(2**k for k in range(7) if k == 0 or (p > start and 2**k * lowest <= max(rates) * (1 + 1e-6)
                                                             and 2**k * length <= maximum))
        else:
            factor = min(1 + (maximum // length - 1) * p // (ramp or len(rates)), maximum // length)
        n = min(factor, len(rates) - p)
        lengths.append(factor * length)
        merged.append(sum(rates[p:p + n]) / n * (n if rule == "linear" else sqrt(n)))
        p += factor
    return lengths, merged


@given(rates=st.lists(st.floats(0, 10), min_size=1, max_size=300), length=st.integers(1, 5), more=st.integers(0, 60),
       rule=st.sampled_from(["sqrt", "linear"]), ramp=st.sampled_from([None, 1, 7]),
       build=st.sampled_from([seesaw, batch_ramp]))
def test_lengths_and_rates_are_those_of_the_formulas(build, rule, rates, length, more, ramp):
    """Any warmup; from the peak on, rates fall. Microbatches and the sum of linear rates are conserved."""
    if build is seesaw:
        peak, ramp = rates.index(max(rates)), None
        rates = rates[:peak] + sorted(rates[peak:], reverse=True)
    schedule = (build if ramp is None else partial(build, ramp=ramp))(
        len(rates), rates, accumulate_step=length, maximum=length + more, rule=rule)
    lengths, merged = expected(build, rates, length, length + more, rule, ramp)
    window = WindowLength(schedule.accumulate_step)
    assert [window.host_length(update) for update in range(len(merged))] == lengths
    assert schedule.learning_rate == pytest.approx(merged)
    assert lengths == sorted(lengths)
    assert lengths[0] == length
    assert sum(lengths[:-1]) < len(rates) * length <= sum(lengths)  # only the last window may be incomplete
    assert rule == "sqrt" or sum(schedule.learning_rate) == pytest.approx(sum(rates))


def test_forms_of_rates():
    """A number is a cosine, or constant. A rate that float32 rounds counts as halved; no window gets shorter again."""
    assert seesaw(900, 0.1) == seesaw(900, [0.1 * (1 + cos(pi * (p / 900))) / 2 for p in range(900)])
    assert 0.62 < len(seesaw(30_000, 0.1).learning_rate) / 30_000 < 0.625
    halving = (0.08 / 2 ** np.repeat(range(4), 24)).astype(np.float32) * np.float32(1.0000002)
    assert seesaw(96, halving, accumulate_step=3).accumulate_step == {0: 3, 24: 6, 36: 12, 42: 24}
    assert seesaw(4, [1, 0.5000004, 0.5000008, 0.5000008]).accumulate_step == {0: 1, 1: 2}
    assert seesaw(3, Tensor([0.5, 0.5, 0.25])) == seesaw(3, np.array([0.5, 0.5, 0.25])) == seesaw(3, (0.5, 0.5, 0.25))
    assert seesaw(3, np.array(0.5)) == seesaw(3, 0.5)
    assert batch_ramp(9, 0.1, maximum=4, ramp=1) == ({0: 1, 1: 4}, pytest.approx([0.1, 0.2, 0.2]))
    assert seesaw(1, 0.5) == batch_ramp(1, 0.5) == ({0: 1}, [0.5])


def counted(start, increment, samples, batch_size, microbatch, updates):
    """The microbatches of each update, counting samples one update after the other, and the samples before the last."""
    steps, seen, lengths = (batch_size - start) // increment, 0, []
    for _ in range(updates):
        done = sum(Fraction(samples * step, steps) <= seen for step in range(1, steps + 1))
        lengths.append((start + done * increment) // microbatch)
        seen += lengths[-1] * microbatch
    return lengths, seen - lengths[-1] * microbatch


def counted_from_each_step(start, increment, samples, batch_size, microbatch):
    """A mistake: each size gets its samples anew, whatever the last window of the size before has seen of them."""
    steps, update, lengths = (batch_size - start) // increment, 0, {}
    for batch in range(start, batch_size, increment):
        lengths[update] = batch // microbatch
        update += ceil(Fraction(samples, steps) / batch)
    return {**lengths, update: batch_size // microbatch}


@given(microbatch=st.integers(1, 6), start=st.integers(1, 5), increment=st.integers(1, 5), steps=st.integers(0, 6),
       samples=st.integers(1, 1500))
def test_a_ramp_by_samples_is_what_counting_them_gives(microbatch, start, increment, steps, samples):
    """From the last key on, the batch is full, and `samples` were seen before it."""
    start, increment = start * microbatch, increment * microbatch
    arguments = (start, increment, samples, start + steps * increment)
    schedule = sample_ramp(*arguments, microbatch=microbatch)
    last = max(schedule)
    lengths, seen = counted(*arguments, microbatch, last + 1)
    window = WindowLength(schedule)
    assert [window.host_length(update) for update in range(last + 1)] == lengths
    assert lengths[-1] * microbatch == arguments[3]
    assert steps == 0 or seen >= samples > seen - lengths[-2] * microbatch
    assert [*schedule.values()] == sorted({*schedule.values()})


def test_a_ramp_by_samples_skips_sizes_and_counts_on_between_them():
    assert sample_ramp(8, 8, 16, 64, microbatch=8) == {0: 1, 1: 4, 2: 8}  # 8, then 32 of the 16 samples
    assert sample_ramp(32, 8, 1000, 32, microbatch=8) == {0: 4}
    assert sample_ramp(np.int64(16), 16, 10**12, 2048, microbatch=16)[0] == 1
    arguments = (16, 8, 300, 48)
    schedule = sample_ramp(*arguments, microbatch=4)
    lengths, _ = counted(*arguments, 4, 30)
    assert [WindowLength(schedule).host_length(update) for update in range(30)] == lengths
    wrong = WindowLength(counted_from_each_step(*arguments, 4))  # control
    assert [wrong.host_length(update) for update in range(30)] != lengths


REFUSED = [
    (TypeError, r"updates is 9\.0 of type float, expected an int >= 1; give the number of updates", (9.0, 0.1), {}),
    (TypeError, r"learning_rate is of type NoneType, expected a number or a list of rates", (9, None), {}),
    (TypeError, r"learning_rate is True of type bool, expected a finite number > 0", (9, True), {}),
    (ValueError, r"learning_rate is 0, expected a finite number > 0", (9, 0), {}),
    (ValueError, r"learning_rate holds 2 rates, expected 3: one for each update of the plain run;", (3, [1, 1]), {}),
    (ValueError, r"learning_rate\[1\] is -0\.1, expected a finite number >= 0", (2, [0.1, -0.1]), {}),
    (ValueError, r"learning_rate\[0\] is inf", (1, (inf,)), {}),
    (TypeError, r"learning_rate\[0\] is '1' of type str", (1, "1"), {}),
    (ValueError, r"accumulate_step is 0, expected an int >= 1; give the length", (9, 0.1), {"accumulate_step": 0}),
    (ValueError, r"maximum is 3, expected an int >= 4; give", (9, 0.1), {"accumulate_step": 4, "maximum": 3}),
    (ValueError, r"maximum is 2147483648, expected at most 2147483647", (9, 0.1), {"maximum": 2**31}),
    (ValueError, r"rule is 'cubic', expected one of 'linear', 'sqrt'", (9, 0.1), {"rule": "cubic"}),
]
REFUSED_RAMPS = [
    (TypeError, r"samples is '1e6' of type str, expected an int >= 1; give the samples after",
     (16, 8, "1e6", 32, 4)),
    (TypeError, r"microbatch is 4\.0 of type float, expected an int >= 1; give the samples of", (16, 8, 9, 32, 4.0)),
    (ValueError, r"samples is 0, expected an int >= 1", (16, 8, 0, 32, 4)),
    (ValueError, r"start is 18 samples, expected a multiple of microbatch=4; give 20, or", (18, 8, 9, 34, 4)),
    (ValueError, r"increment is 6 samples, expected a multiple of microbatch=4; give 8, or", (16, 6, 9, 34, 4)),
    (ValueError, r"batch_size is 12, expected an int >= 16; give the full batch, at least start", (16, 8, 9, 12, 4)),
    (ValueError, r"batch_size is 36, expected start=16 plus a multiple of increment=8; give 32 or 40, or another incr",
     (16, 8, 9, 36, 4)),
]


def test_bad_arguments_are_refused():
    for error, message, arguments, options in REFUSED:
        for build in (seesaw, batch_ramp):
            with pytest.raises(error, match=message):
                build(*arguments, **options)
    with pytest.raises(ValueError, match=r"ramp is 0, expected an int >= 1; None takes all updates"):
        batch_ramp(9, 0.1, ramp=0)
    for rates in ([1, 1, 0.5, 1], [0, 1, 0, 0.1]):  # restarts, and a pause
        with pytest.raises(ValueError, match=r"learning_rate\[3\] is .*, more than the .* before it, .*; give each"):
            seesaw(4, rates)
    with pytest.raises(TypeError, match=r"accumulate_step is Schedule\(accumulate_step=<63>, .* of type Schedule, exp"):
        WindowLength(batch_ramp(100_000, 0.1))
    for error, message, arguments in REFUSED_RAMPS:
        with pytest.raises(error, match=message):
            sample_ramp(*arguments[:4], microbatch=arguments[4])
