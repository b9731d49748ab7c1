"""plan_micro_batch: the search against a model of memory, the table, bad arguments."""
from functools import partial
from math import ceil, log2

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ms_accum.batch_size import PlanError, plan_micro_batch, planning
from ms_accum.batch_size.planning import Plan
from ms_accum.batch_size.trial import Trial

MIB = 2**20


def modelled(base, slope, make_step, microbatch, accumulate_step, device_target, memory_limit):
    """As `run_trial`, with a peak of base + slope * microbatch."""
    peak = base + slope * microbatch
    return Trial(microbatch, accumulate_step, peak, peak <= memory_limit,
                 "completed" if peak <= memory_limit else "out of memory")


@given(batch_size=st.integers(1, 5000), base=st.integers(1, 100), slope=st.integers(1, 5), limit=st.integers(1, 3000))
def test_the_largest_divisor_that_fits_is_found_in_few_trials(batch_size, base, slope, limit):
    fitting = [d for d in range(1, batch_size + 1) if batch_size % d == 0 and base + slope * d <= limit]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planning, "run_trial", partial(modelled, base, slope))
        if not fitting:
            with pytest.raises(PlanError, match=r"^not even a microbatch of 1 fits into \d+ MiB; .*\nmicro") as said:
                plan_micro_batch(min, batch_size, memory_limit=limit)
            assert said.value.trials[-1].microbatch == 1
            return
        plan = plan_micro_batch(min, batch_size, memory_limit=limit)
    assert (plan.microbatch, plan.accumulate_step) == (fitting[-1], batch_size // fitting[-1])
    assert plan.peak == base + slope * plan.microbatch
    assert len(plan.trials) <= ceil(log2(len(planning.candidates(batch_size)) + 1))


def test_the_plan_reads_well():
    trials = (Trial(4, 2, 300 * MIB, True, "completed"), Trial(8, 1, 3 * 2**29, False, "beyond the limit"),
              Trial(2, 4, None, False, "out of memory"))
    assert str(Plan(8, 4, 2, 300 * MIB, 500 * MIB, trials)).splitlines() == [
        "microbatch  accumulate_step        peak",
        "         2                4           ?  out of memory",
        "         4                2     300 MiB  fits",
        "         8                1  > 1.50 GiB  beyond the limit",
        "batch 8 = accumulate_step 2 x microbatch 4: 300 MiB of 500 MiB"]
    assert str(Plan(8, 8, 1, MIB, MIB, ())).endswith("\nthe batch fits as a whole: you need no accumulation")


def test_a_failing_trial_ends_the_planning_with_its_error(monkeypatch):
    monkeypatch.setattr(planning, "run_trial", lambda *_: Trial(4, 4, None, False, "failed", "KeyError: 'x'"))
    with pytest.raises(PlanError, match=r"the trial of a microbatch of 4 failed: KeyError: 'x'"):
        plan_micro_batch(min, 16, memory_limit=10)


def test_bad_arguments_are_errors():
    for error, message, arguments, options in (
            (TypeError, r"make_step is of type int, expected a function `\(microbatch\) -> step`", (3, 4), {}),
            (TypeError, r"batch_size is 4\.0 of type float, expected an int >= 1; give the samples", (min, 4.0), {}),
            (ValueError, r"memory_limit is -1, expected an int >= 1; give", (min, 4), {"memory_limit": -1}),
            (ValueError, r"device_target is 'TPU', expected one of 'CPU'", (min, 4), {"device_target": "TPU"})):
        with pytest.raises(error, match=message):
            plan_micro_batch(*arguments, **options)
