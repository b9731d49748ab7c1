"""What pytest needs: settings of the process, fixtures for the modes and a scratch folder, processes for single tests.

Helpers are in tests/support. Its plugin `recovering` says what happens after an error of MindSpore.
"""
import fcntl
import gc
import os
import subprocess
import sys

import mindspore as ms
import pytest
from hypothesis import settings
from support.modes import MODES, running

from ms_accum import avoid_busy_waiting

pytest_plugins = ["support.recovering"]

avoid_busy_waiting()
gc.freeze()  # tests that collect garbage need not look at MindSpore's 160,000 objects
if "PYTEST_XDIST_WORKER" in os.environ and hasattr(os, "sched_setaffinity"):
    # Each worker has its share of the cores: threads of MindSpore spin while they wait, and take time from others.
    cores, number = sorted(os.sched_getaffinity(0)), int(os.environ["PYTEST_XDIST_WORKER"].removeprefix("gw"))
    os.sched_setaffinity(0, cores[number % len(cores)::int(os.environ["PYTEST_XDIST_WORKER_COUNT"])])
# The same examples in every run, however slow the machine.
settings.register_profile("suite", derandomize=True, deadline=None, database=None)
settings.load_profile("suite")


@pytest.fixture(autouse=True)
def _scratch_folder(tmp_path, monkeypatch):
    """Let MindSpore write what it writes into the current folder."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture(autouse=True)
def _after_ranks(tmp_path_factory):
    """Wait while another worker runs ranks: beside tests, ranks wait for each other, three times as long."""
    for lock in tmp_path_factory.getbasetemp().parent.glob("ranks-*/lock"):
        with lock.open() as held:
            fcntl.flock(held, fcntl.LOCK_SH)


@pytest.fixture
def mode_named():
    """Set the context to a name in MODES until the test ends."""
    def set_mode(mode):
        ms.set_context(mode=MODES[mode])
        return mode

    yield set_mode
    ms.set_context(mode=ms.PYNATIVE_MODE)


@pytest.fixture(params=["jit", "pynative"])
def mode(request):
    with running(request.param):
        yield request.param


@pytest.fixture
def uncompiled():
    with running("pynative"):
        yield


@pytest.fixture(params=[pytest.param("jit", marks=pytest.mark.slow), "pynative"])
def compiled_if_slow(request):
    """Run a test op by op; what it compiles otherwise, others compile that are fast."""
    with running(request.param):
        yield


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem):
    """Run tests marked `fresh_process` in a process of their own, without what other tests imported and compiled."""
    marker = pyfuncitem.get_closest_marker("fresh_process")
    if marker is None or "FRESH_PROCESS" in os.environ or not set(marker.args) & set(pyfuncitem.callspec.id.split("-")):
        return None
    command = [sys.executable, "-m", "pytest", "-n", "0", "-q", "-m", "", "-p", "no:cacheprovider", pyfuncitem.nodeid]
    environment = {**os.environ, "FRESH_PROCESS": "1"}
    folder = pyfuncitem.config.rootpath
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert "1 passed" in done.stdout, done.stdout
    return True
