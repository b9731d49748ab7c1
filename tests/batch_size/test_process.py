"""Processes that end in every way. Imports little, because each process imports this file."""
import os
import resource
import signal
import subprocess
import sys
import time
from multiprocessing import active_children
from pathlib import Path

import numpy as np
import pytest

from ms_accum.batch_size import process
from ms_accum.batch_size.process import Outcome, free_memory, in_a_process, is_dry_run, most_held

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

MIB = 2**20
SLEEPING = ["sleep", "1000.83"]


def growing():
    """10 GB, unless it is stopped on its way."""
    return [np.ones(50 * MIB // 8) for _ in range(200)]


def raising(error):
    raise error


def crashing():
    subprocess.Popen(SLEEPING)
    print("the last words", flush=True)
    os._exit(3)


def spike():
    """For a moment, this process holds 200 MiB more; return what it held before, and what Linux calls its peak."""
    before = most_held()
    np.ones(200 * MIB // 8)
    return before, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@pytest.mark.slow
def test_the_peak_is_that_of_the_process_and_not_of_the_one_that_started_it(monkeypatch):
    """Also of a moment that no sample sees. Control: what Linux calls the peak is that of the larger parent."""
    monkeypatch.setattr(process, "_POLL_SECONDS", 60)  # one sample, when the process starts
    parent = np.ones(1200 * MIB // 8)
    found = in_a_process("CPU", spike)
    before, inherited = found.result
    assert found.peak == pytest.approx(before + 200 * MIB, rel=0.1)
    assert found.peak < parent.nbytes <= inherited


@pytest.mark.parametrize(("call", "limits", "outcome"), [
    ((crashing,), {}, Outcome("failed", "its process ended with status 3: the last words")),
    *(pytest.param(*row, marks=pytest.mark.slow) for row in (
        ((signal.raise_signal, signal.SIGKILL), {}, Outcome("out of memory")),
        ((growing,), {"memory_limit": 700 * MIB}, Outcome("beyond the limit")),
        ((os._exit, 1), {}, Outcome(
            "failed", 'its process ended with status 1 before it began; a script needs `if __name__ == "__main__":` '
            "around code that must not run in each trial")),
        ((raising, RuntimeError("Malloc memory failed: size 123")), {},
         Outcome("out of memory", "RuntimeError: Malloc memory failed: size 123")),
        ((raising, ValueError("no data\nsecond line")), {}, Outcome("failed", "ValueError: no data"))))])
def test_whatever_happens_is_named_and_leaves_no_process(call, limits, outcome):
    found = in_a_process("CPU", *call, **limits)
    assert found._replace(peak=None) == outcome
    assert outcome.ended != "beyond the limit" or 700 * MIB < found.peak < 2000 * MIB
    assert active_children() == []
    end = time.monotonic() + 10  # until the kernel has ended them
    while (left := subprocess.run(["pgrep", "-fx", " ".join(SLEEPING)], capture_output=True, check=False).stdout):
        assert time.monotonic() < end, left
        time.sleep(0.01)


def test_a_dry_run_is_for_ascend_without_an_npu_or_if_it_is_asked_for(monkeypatch):
    monkeypatch.delenv("MS_SIMULATION_LEVEL", raising=False)
    for devices, asked, dry in (([], None, True), (["davinci0"], None, False), (["davinci0"], "1", True)):
        monkeypatch.setattr(Path, "glob", lambda self, pattern, devices=devices: iter(devices))
        if asked:
            monkeypatch.setenv("MS_SIMULATION_LEVEL", asked)
        assert [is_dry_run(device) for device in ("Ascend", "CPU", "GPU")] == [dry, False, False]


def test_free_memory_is_that_of_the_machine_or_of_the_container(tmp_path, monkeypatch):
    ours, limit = free_memory("CPU"), tmp_path / "limit"
    monkeypatch.setattr(process, "_LIMITS", [tmp_path / "none", limit])
    for text, expected in (("1000\n", 900), ("max\n", ours)):
        limit.write_text(text)
        assert free_memory("CPU") == pytest.approx(expected, rel=0.1)
    assert free_memory("Ascend") == int(0.9 * 64 * 2**30)
