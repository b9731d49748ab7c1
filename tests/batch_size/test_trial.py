"""Trials: real processes that end in every way. Imports little, because each process imports this file."""
import os
import signal
import sys
import time
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from ms_accum.batch_size.trial import _measure, pickled, run_trial

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

MIB = 2**20


def holding(mebibytes, microbatch):
    """Each step writes to so much memory, and lets go of it."""
    return lambda: np.ones(mebibytes * MIB // 8).sum()


def growing(microbatch):
    """10 GB, unless it is stopped on its way."""
    kept = []
    return lambda: [kept.append(np.ones(50 * MIB // 8)) for _ in range(200)]


def raising(microbatch):
    raise KeyError(f"no data for {microbatch}\nsecond line")


def exhausted(microbatch):
    def step():
        raise RuntimeError("Malloc memory failed: size 123")
    return step


def hanging(microbatch):
    return partial(time.sleep, 1000)


def killed(microbatch):
    return partial(os.kill, os.getpid(), signal.SIGKILL)


def crashing(microbatch):
    def step():
        print("the last words", flush=True)
        os._exit(3)
    return step


def no_step(microbatch):
    return 7


@pytest.mark.parametrize(("make_step", "options", "ended", "reason"), [
    (killed, {}, "out of memory", ""),
    (exhausted, {}, "out of memory", "RuntimeError: Malloc memory failed: size 123"),
    (raising, {}, "failed", "KeyError: 'no data for 4\\nsecond line'"),
    (crashing, {}, "failed", "its process ended with status 3: the last words"),
    (hanging, {"timeout": 1.5}, "failed", "it was not done within 1.5 s"),
    (growing, {"memory_limit": 700 * MIB}, "beyond the limit", ""),
])
def test_a_trial_survives_whatever_happens_in_it(make_step, options, ended, reason):
    before = set(os.listdir("/proc"))
    outcome = run_trial(make_step, 4, 2, "CPU", **options)
    assert (outcome.ended, outcome.reason) == (ended, reason)
    if ended == "beyond the limit":
        assert 700 * MIB < outcome.peak < 2000 * MIB
    left = [pid for pid in set(os.listdir("/proc")) - before if pid.isdigit() and _parent(pid) == os.getpid() and not _tracker(pid)]
    assert left == []


def _parent(pid):
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])
    except OSError:
        return None


def _tracker(pid):
    return b"resource_tracker" in Path(f"/proc/{pid}/cmdline").read_bytes()  # Python's own, one for the session


def test_what_is_no_step_is_refused():
    with pytest.raises(TypeError, match=r"make_step\(4\) returned int, expected a function that runs one train step"):
        _measure(pickled(no_step), 4, 2, "CPU")


def test_a_peak_is_measured_past_all_steps():
    small, large = (run_trial(partial(holding, mebibytes), 1, 2, "CPU") for mebibytes in (10, 300))
    assert small.ended == large.ended == "completed"
    assert large.peak - small.peak == pytest.approx(290 * MIB, rel=0.1)
