"""Processes that end in every way. Imports little, because each process imports this file."""
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil
import pytest

from ms_accum.batch_size import process
from ms_accum.batch_size.process import Outcome, _child, in_a_process, pickled

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

MIB = 2**20


def growing():
    """10 GB, unless it is stopped on its way."""
    return [np.ones(50 * MIB // 8) for _ in range(200)]


def raising(error, message):
    raise error(message)


def outcomes(*errors):
    """What a process sends that ends with each of these errors; and a variable."""
    sent = []
    for error in errors:
        _child(SimpleNamespace(send=sent.append), Path(os.devnull), {}, raising, error)
    return sent, os.getenv("MS_SIMULATION_LEVEL")


def crashing():
    subprocess.Popen(["sleep", "1000"])
    print("the last words", flush=True)
    os._exit(3)


def processes():
    """The numbers of all processes that belong to this one, or whose parent was one that has ended."""
    found = set()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            command = (folder / "cmdline").read_bytes()
            parent = int((folder / "stat").read_text().rsplit(")", 1)[1].split()[1])
        except OSError:
            continue
        ours = parent == os.getpid() or command == b"sleep\x001000\x00"
        if ours and b"resource_tracker" not in command:  # Python's own tracker stays
            found.add(folder.name)
    return found


def held_most():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def spike():
    """For a moment, this process holds 200 MiB more than it or the process that started it ever did."""
    np.ones((held_most() + 200 * MIB - psutil.Process().memory_info().rss) // 8)


def at_rest():
    return psutil.Process().memory_info().rss, held_most()


@pytest.mark.slow
def test_the_peak_is_that_of_the_process_and_not_of_the_one_that_started_it(monkeypatch):
    """Also of a moment that no sample sees. Control: what Linux calls the peak is that of the larger parent."""
    monkeypatch.setattr(process, "_POLL_SECONDS", 60)  # one sample, when the process starts
    found = in_a_process("CPU", spike)
    assert found.peak > held_most() + 195 * MIB
    parent = np.ones(800 * MIB // 8)
    found = in_a_process("CPU", at_rest)
    resident, inherited = found.result
    assert inherited >= parent.nbytes
    assert found.peak == pytest.approx(resident, rel=0.1)
    assert found.peak < parent.nbytes


@pytest.mark.parametrize(("call", "limits", "ended", "reason"), [
    pytest.param((signal.raise_signal, signal.SIGKILL), {}, "out of memory", "", marks=pytest.mark.slow),
    ((crashing,), {}, "failed", "its process ended with status 3: the last words"),
    ((time.sleep, 1000), {"timeout": 0.1}, "failed", "it did not finish within 0.1 s"),
    pytest.param((growing,), {"memory_limit": 700 * MIB}, "beyond the limit", "", marks=pytest.mark.slow)])
def test_whatever_happens_is_named_and_leaves_no_process(call, limits, ended, reason):
    before = processes()
    outcome = in_a_process("CPU", *call, **limits)
    assert (outcome.ended, outcome.reason, outcome.result) == (ended, reason, None)
    assert ended != "beyond the limit" or 700 * MIB < outcome.peak < 2000 * MIB
    end = time.monotonic() + 10
    while processes() - before and time.monotonic() < end:
        time.sleep(0.01)  # until the kernel has ended them
    assert processes() - before == set()


@pytest.mark.slow
def test_errors_are_told_apart_and_a_dry_run_is_told_so(monkeypatch):
    """In a dry run, the memory of the process is not the device's."""
    monkeypatch.setenv("MS_SIMULATION_LEVEL", "0")
    before = dict(os.environ)
    full = [(RuntimeError, "Malloc memory failed: size 123"), (MemoryError, ""), (RuntimeError, "std::bad_alloc")]
    reasons = "RuntimeError: Malloc memory failed: size 123", "MemoryError", "RuntimeError: std::bad_alloc"
    expected = [*(Outcome("out of memory", reason) for reason in reasons), Outcome("failed", "ValueError: no data")]
    outcome = in_a_process("CPU", outcomes, *full, (ValueError, "no data\nsecond line"), memory_limit=2**40)
    sent, level = outcome.result
    assert all(found.peak > 0 for found in (outcome, *sent))
    assert ([found._replace(peak=None) for found in sent], level) == (expected, "0")
    dry = in_a_process("Ascend", os.getenv, "MS_SIMULATION_LEVEL", memory_limit=1)
    assert dry == Outcome("completed", "", "1", None)
    assert dict(os.environ) == before


def test_functions_that_cannot_be_imported_are_refused(monkeypatch):
    def closure(microbatch):
        return None

    for function in (closure, lambda microbatch: None):
        with pytest.raises(ValueError, match=r"make_step is .*<locals>.* cannot import .*; define it with `def` at"):
            pickled(function)
    monkeypatch.setattr(growing, "__module__", "__main__")
    monkeypatch.delattr(sys.modules["__main__"], "__file__", raising=False)  # pytest-xdist has none
    with pytest.raises(ValueError, match=r"make_step is growing, which the processes of the trials cannot import"):
        pickled(growing)


@pytest.mark.slow
def test_functions_of_a_script_need_a_guard():
    """With one, they work: as a script runs the docstring's example in test_guide.py."""
    Path("unguarded.py").write_text("""
from ms_accum.batch_size import plan_micro_batch
def make_step(microbatch):
    return int
plan_micro_batch(make_step, 2, memory_limit=2**40)
""")
    done = subprocess.run([sys.executable, "unguarded.py"], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    said = done.stderr.splitlines()[-1]
    assert 'a script needs `if __name__ == "__main__":` around code that must not run in each trial' in said
