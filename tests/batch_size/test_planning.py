"""plan_micro_batch: the search against a model of memory, the table, refusals."""
from itertools import pairwise
from math import ceil, log2

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ms_accum.batch_size import PlanError, plan_micro_batch, planning
from ms_accum.batch_size.planning import Plan
from ms_accum.batch_size.trial import Trial

MIB = 2**20


def modelled(base, slope):
    """A `run_trial` whose peak is base + slope * microbatch."""
    def run(make_step, microbatch, accumulate_step, device_target, memory_limit, timeout):
        peak = base + slope * microbatch
        fits = peak <= memory_limit
        return Trial(microbatch, accumulate_step, peak, fits, "completed" if fits else "out of memory", 0.1)
    return run


@given(batch_size=st.integers(1, 5000), base=st.integers(1, 100), slope=st.integers(1, 5), limit=st.integers(1, 3000))
def test_the_largest_that_fits_is_found_in_few_trials(batch_size, base, slope, limit):
    def fits(microbatch):
        return base + slope * microbatch <= limit

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planning, "run_trial", modelled(base, slope))
        patch.setattr(planning, "idle_memory", lambda make_step: base)
        if not fits(1):
            said = (r"^memory_limit is \d+ MiB, but a process .* takes \d+ MiB without a step; give a limit above that"
                    if base >= limit else
                    r"^not even a microbatch of 1 fits into \d+ MiB, of which the process takes \d+ MiB without")
            with pytest.raises(PlanError, match=said) as refused:
                plan_micro_batch(min, batch_size, memory_limit=limit)
            assert refused.value.trials[-1].microbatch == 1
            return
        plan = plan_micro_batch(min, batch_size, memory_limit=limit)
    divisors = [d for d in range(1, batch_size + 1) if batch_size % d == 0]
    best = max(filter(fits, divisors))
    larger = next((d for d in divisors if d > best), best)
    if larger <= 2 * best:
        assert plan.microbatch == best
    else:  # not one microbatch fewer could make up the batch
        assert plan.microbatch >= best
        assert plan.accumulate_step == 1 or not fits(ceil(batch_size / (plan.accumulate_step - 1)))
    assert all(b <= 2 * a for a, b in pairwise(divisors)) <= (len(plan.trials) <= ceil(log2(len(divisors) + 1)))
    assert len(plan.trials) <= log2(batch_size + 1) + 2
    assert plan.accumulate_step == ceil(batch_size / plan.microbatch)
    assert plan.peak == base + slope * plan.microbatch <= limit
    assert len({trial.microbatch for trial in plan.trials}) == len(plan.trials)


def test_the_plan_reads_well(monkeypatch):
    monkeypatch.setattr(planning, "run_trial", modelled(0, 1))
    plan = plan_micro_batch(min, 127, memory_limit=50)
    assert "batch 127 = accumulate_step 3 x microbatch 43 (the last one smaller): 0 MiB" in str(plan)
    trials = (Trial(4, 2, 300 * MIB, True, "completed", 1.25), Trial(8, 1, 3 * 2**29, False, "beyond the limit", 2.0),
              Trial(2, 4, None, False, "out of memory", 0.5))
    assert str(Plan(8, 4, 2, 300 * MIB, 500 * MIB, trials)).splitlines() == [
        "microbatch  accumulate_step        peak   seconds",
        "         2                4           ?       0.5  out of memory",
        "         4                2     300 MiB       1.2  fits",
        "         8                1  > 1.50 GiB       2.0  beyond the limit",
        "batch 8 = accumulate_step 2 x microbatch 4: 300 MiB of 500 MiB"]
    assert str(plan_micro_batch(min, 8, memory_limit=50)).splitlines()[-2:] == [
        "batch 8 = accumulate_step 1 x microbatch 8: 0 MiB of 0 MiB",
        "the batch fits as a whole: you need no accumulation"]


def test_what_a_process_takes_is_known_on_cpu_alone(monkeypatch):
    monkeypatch.setattr(planning, "run_trial", modelled(9 * MIB, 1))
    monkeypatch.setattr(planning, "idle_memory", lambda make_step: pytest.fail("it is of this machine"))
    with pytest.raises(PlanError, match="not even a microbatch of 1 fits into 8 MiB; allow more memory, or"):
        plan_micro_batch(min, 4, memory_limit=8 * MIB, device_target="GPU")


def test_a_failing_trial_ends_the_planning_with_its_error(monkeypatch):
    monkeypatch.setattr(planning, "run_trial", lambda *_: Trial(4, 4, None, False, "failed", 0.1, "KeyError: 'x'"))
    with pytest.raises(PlanError, match=r"the trial of a microbatch of 4 failed: KeyError: 'x'") as failed:
        plan_micro_batch(min, 16, memory_limit=10)
    assert len(failed.value.trials) == 1


@pytest.mark.parametrize(("error", "message", "arguments", "options"), [
    (TypeError, r"make_step is of type int, expected a function `\(microbatch\) -> step`", (3, 4), {}),
    (TypeError, r"batch_size is 4\.0 of type float, expected an int >= 1; give the samples", (min, 4.0), {}),
    (ValueError, r"memory_limit is -1, expected an int >= 1; give bytes", (min, 4), {"memory_limit": -1}),
    (ValueError, r"device_target is 'TPU', expected one of 'CPU', 'GPU'", (min, 4), {"device_target": "TPU"}),
    (TypeError, r"timeout is '5' of type str, expected a number of seconds", (min, 4), {"timeout": "5"}),
    (ValueError, r"timeout is 0, expected a number of seconds > 0", (min, 4), {"timeout": 0})])
def test_bad_arguments_are_refused(error, message, arguments, options):
    with pytest.raises(error, match=message):
        plan_micro_batch(*arguments, **options)
