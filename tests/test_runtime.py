"""The one setting, and that importing the package changes nothing."""
import os
import subprocess
import sys

from ms_accum import avoid_busy_waiting


def test_avoid_busy_waiting_sets_the_variable_and_respects_the_user(monkeypatch):
    monkeypatch.delenv("MS_DEV_HOST_BLOCKING_RUN", raising=False)
    avoid_busy_waiting()
    assert os.environ["MS_DEV_HOST_BLOCKING_RUN"] == "1"
    monkeypatch.setenv("MS_DEV_HOST_BLOCKING_RUN", "0")
    avoid_busy_waiting()
    assert os.environ["MS_DEV_HOST_BLOCKING_RUN"] == "0"


IMPORT = """
import os, mindspore as ms
before = dict(os.environ), ms.get_context("mode"), ms.get_context("device_target"), ms.get_seed()
import ms_accum
assert (dict(os.environ), ms.get_context("mode"), ms.get_context("device_target"), ms.get_seed()) == before
"""


def test_importing_changes_no_global_state():
    environment = {k: v for k, v in os.environ.items() if k != "MS_DEV_HOST_BLOCKING_RUN"}
    done = subprocess.run([sys.executable, "-c", IMPORT], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
