"""The one setting. That importing the package changes nothing is in test_guide.py."""
import os

from ms_accum import avoid_busy_waiting


def test_avoid_busy_waiting_sets_the_variable_and_respects_the_user(monkeypatch):
    monkeypatch.delenv("MS_DEV_HOST_BLOCKING_RUN", raising=False)
    for setting in ("1", "0"):
        avoid_busy_waiting()
        assert os.environ["MS_DEV_HOST_BLOCKING_RUN"] == setting
        monkeypatch.setenv("MS_DEV_HOST_BLOCKING_RUN", "0")
