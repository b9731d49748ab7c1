"""plan_micro_batch: the search against a model of memory, free memory, refusals."""
import subprocess
import sys
from functools import partial
from math import ceil, log2
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ms_accum.batch_size import PlanError, plan_micro_batch, planning
from ms_accum.batch_size.planning import Plan, Trial
from ms_accum.batch_size.trial import Outcome

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

MIB = 2**20


def modelled(base, slope, limit, asked):
    """A `run_trial` whose peak is base + slope * microbatch."""
    def run(make_step, microbatch, steps, device_target, memory_limit, timeout):
        asked.append((microbatch, steps))
        peak = base + slope * microbatch
        return Outcome(peak, "completed" if peak <= limit else "out of memory", "", 0.1)
    return run


def nothing(microbatch):
    return int


@given(batch_size=st.integers(1, 5000), base=st.integers(1, 100), slope=st.integers(1, 5), limit=st.integers(1, 3000))
def test_the_largest_that_fits_is_found_in_few_trials(batch_size, base, slope, limit):
    asked = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planning, "run_trial", modelled(base, slope, limit, asked))
        if base + slope > limit:
            with pytest.raises(PlanError, match=r"not even a microbatch of 1 fits into \d+ MiB; allow more memory") as refused:
                plan_micro_batch(nothing, batch_size, memory_limit=limit)
            assert [trial.microbatch for trial in refused.value.trials] == [microbatch for microbatch, _ in asked]
            return
        plan = plan_micro_batch(nothing, batch_size, memory_limit=limit)
    divisors = [d for d in range(1, batch_size + 1) if batch_size % d == 0]
    best = max(d for d in divisors if base + slope * d <= limit)
    larger = next((d for d in divisors if d > best), best)
    assert plan.microbatch >= best
    if larger <= 2 * best:
        assert plan.microbatch == best
        assert len(asked) <= ceil(log2(len(divisors) + 1))
    else:  # not one microbatch fewer could make up the batch
        fewer = ceil(batch_size / max(plan.accumulate_step - 1, 1))
        assert plan.accumulate_step == ceil(batch_size / best) or base + slope * plan.microbatch <= limit
        assert plan.accumulate_step == 1 or base + slope * fewer > limit
        assert len(asked) <= 2 * ceil(log2(batch_size + 1)) + 2
    assert plan.accumulate_step == ceil(batch_size / plan.microbatch)
    assert plan.peak == base + slope * plan.microbatch <= limit
    assert all(steps == ceil(batch_size / microbatch) + 1 for microbatch, steps in asked)  # past an update
    assert len({microbatch for microbatch, _ in asked}) == len(asked) == len(plan.trials)


def test_a_prime_batch_is_cut_into_microbatches_that_do_not_divide_it(monkeypatch):
    monkeypatch.setattr(planning, "run_trial", modelled(0, 1, 50, []))
    plan = plan_micro_batch(nothing, 127, memory_limit=50)
    assert (plan.microbatch, plan.accumulate_step) == (43, 3)
    assert "batch 127 = accumulate_step 3 x microbatch 43 (the last one smaller)" in str(plan)


def test_the_plan_reads_well():
    trials = (Trial(4, 2, 300 * MIB, True, "completed", 1.25), Trial(8, 1, 501 * MIB, False, "beyond the limit", 2.0),
              Trial(2, 4, None, False, "out of memory", 0.5))
    assert str(Plan(8, 4, 2, 300 * MIB, 500 * MIB, trials)).splitlines() == [
        "microbatch  accumulate_step        peak   seconds",
        "         2                4           ?       0.5  out of memory",
        "         4                2     300 MiB       1.2  fits",
        "         8                1   > 501 MiB       2.0  beyond the limit",
        "batch 8 = accumulate_step 2 x microbatch 4: 300 MiB of 500 MiB"]
    assert planning.size(3 * 2**29) == "1.50 GiB"


def test_free_memory_minds_cgroups(tmp_path):
    """Of a group and those above it the tightest, in both versions; files that can be dropped count as free."""
    for name, text in {
            "a/b/memory.max": "max", "a/b/memory.current": "5",
            "a/memory.max": "1000", "a/memory.current": "300", "a/memory.stat": "anon 100\ninactive_file 200",
            "memory/c/memory.limit_in_bytes": str(2**63 - 4096), "memory/c/memory.usage_in_bytes": "5",
            "memory/memory.limit_in_bytes": "700", "memory/memory.usage_in_bytes": "100",
            "cgroup": "4:memory:/c\n3:cpuset:/\n0::/a/b\n"}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert sorted(planning._cgroups_leave(tmp_path / "cgroup", tmp_path))[:2] == [600, 900]
    assert planning._cgroups_leave(tmp_path / "none", tmp_path) == [planning._UNLIMITED]
    available = next(int(line.split()[1]) for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemAvailable"))
    assert 0 < planning.free_memory("CPU") <= 0.95 * 1024 * available


def test_a_failing_trial_ends_the_planning_with_its_error(monkeypatch):
    monkeypatch.setattr(planning, "run_trial", lambda *_, **__: Outcome(None, "failed", "KeyError: 'x'", 0.1))
    with pytest.raises(PlanError, match=r"the trial of a microbatch of 4 failed: KeyError: 'x'"):
        plan_micro_batch(nothing, 16, memory_limit=10)


def test_functions_that_cannot_be_imported_are_refused():
    def closure(microbatch):
        return None

    for function in (closure, lambda microbatch: None):
        with pytest.raises(ValueError, match=r"make_step is .*<locals>.* cannot import .*; define it with `def` at the top level"):
            plan_micro_batch(function, 4)
    typed = subprocess.run([sys.executable, "-"], capture_output=True, text=True, check=False, input=(
        "from ms_accum.batch_size import plan_micro_batch\ndef make_step(n):\n    return int\nplan_micro_batch(make_step, 4)\n"))
    assert "ValueError: make_step is make_step, defined in an interactive session, which the processes of the trials" in typed.stderr


@pytest.mark.parametrize(("error", "message", "call"), [
    (TypeError, r"make_step is of type int, expected a function `\(microbatch\) -> step`", partial(plan_micro_batch, 3, 4)),
    (TypeError, r"batch_size is 4\.0 of type float, expected an int >= 1; give the samples of an update",
     partial(plan_micro_batch, nothing, 4.0)),
    (ValueError, r"memory_limit is -1, expected an int >= 1; give bytes", partial(plan_micro_batch, nothing, 4, memory_limit=-1)),
    (ValueError, r"device_target is 'TPU', expected one of 'CPU', 'GPU', 'Ascend', None",
     partial(plan_micro_batch, nothing, 4, device_target="TPU")),
    (TypeError, r"timeout is '5' of type str, expected a number of seconds", partial(plan_micro_batch, nothing, 4, timeout="5")),
    (ValueError, r"timeout is 0, expected a number of seconds > 0", partial(plan_micro_batch, nothing, 4, timeout=0)),
    (ValueError, r"the memory of GPU is unknown \(.+\); give a memory limit, or another device",
     partial(plan_micro_batch, nothing, 4, device_target="GPU")),
])
def test_bad_arguments_and_missing_devices_are_refused(error, message, call):
    with pytest.raises(error, match=message):
        call()
