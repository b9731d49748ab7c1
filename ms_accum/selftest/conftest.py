"""What all tests of the selftest share."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any, Optional

import numpy as np
import pytest

from ..distributed.meeting import world_size
from .plain import note_error
from .training import BOUNDS

collect_ignore = [] if world_size() > 1 else ["test_ranks.py"]


def pytest_configure(config: pytest.Config) -> None:
    """Name the marker."""
    config.addinivalue_line("markers", "quick: rows of `ms-accum selftest --quick`")


def pytest_exception_interact(call: pytest.CallInfo[Any]) -> None:
    """Note an error of MindSpore: its next compilation may fail."""
    if call.excinfo is not None and not call.excinfo.errisinstance(AssertionError):
        note_error(call.excinfo.value)


@pytest.fixture(autouse=True)
def holds(record_property: Callable[[str, object], None], driver: str, dtype: str) -> Callable[..., None]:
    """Return a function that fails if an error is larger than its limit, and writes both into the row.

    `limit` is that of the dtype if it is None; if it is 0, `message` says what was found.
    """
    def within(*errors: float, limit: Optional[float] = None, message: str = "") -> None:
        difference, bound = float(np.max(errors)), BOUNDS[dtype] if limit is None else limit
        for name, value in {"difference": difference, "bound": bound, "message": message}.items():
            record_property(name, value)
        assert difference <= bound, message
    return within
