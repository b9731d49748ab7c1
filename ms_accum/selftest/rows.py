"""Rows of the table: checks and their results."""
from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from time import perf_counter
from typing import Any, NamedTuple, Optional, Union

from ..runtime import synchronize
from ..steps.errors import one_line
from .modes import recover

HOLDS, FAILS, NO_KERNEL, NOT_RUN, MEASURED = "holds", "FAILS", "no kernel", "not run", "measured"


class Name(NamedTuple):
    """Name a row: what it checks, with which driver, in which dtype."""

    check: str
    driver: str = ""
    dtype: str = ""

    def __str__(self) -> str:
        return ", ".join(part for part in self if part)


@dataclass(frozen=True)
class Row:
    """Hold a row of the table.

    Attributes:
        name: The name of the check.
        result: HOLDS, FAILS, NO_KERNEL (plain MindSpore cannot do it on this device), NOT_RUN, or MEASURED.
        difference: The relative error of the result; None if it was not compared.
        bound: The largest accepted difference.
        value: The measured value.
        message: The failure, or a remark.
        seconds: Time of the row in seconds.
    """

    name: Name
    result: str
    difference: Optional[float] = None
    bound: Optional[float] = None
    value: Any = None
    message: str = ""
    seconds: float = 0.0


class Wrong(Exception):
    """Report what a check found to be wrong, in a sentence."""


class NotRun(Exception):
    """Report why a row is not run, in a sentence."""


def require(condition: object, wrong: str) -> None:
    """Raise Wrong unless the condition is true."""
    if not condition:
        raise Wrong(wrong)


@dataclass(frozen=True)
class Check:
    """Make a row that compares the result of ms_accum with that of plain MindSpore on this device.

    Attributes:
        name: The name of the check.
        plain: Function that returns the expected result. If it raises an error, the device has no kernel for it; in
            float32, that is a failure.
        ours: Function that takes the expected result, and returns the error of ms_accum's result.
        bound: The largest accepted difference.
    """

    name: Name
    plain: Callable[[], Any]
    ours: Callable[[Any], float]
    bound: float

    def run(self) -> Row:
        """Return the row."""
        try:
            expected = self.plain()
        except NotRun as error:
            return Row(self.name, NOT_RUN, message=str(error))
        except Exception as error:
            # Every device computes in float32, so in float32 the reference itself is broken.
            result = FAILS if self.name.dtype == "float32" else NO_KERNEL
            return Row(self.name, result, message=f"plain MindSpore: {said(error)}".rstrip())
        try:
            _recover_from_errors()
            difference = float(self.ours(expected))
        except Exception as error:
            return Row(self.name, FAILS, bound=self.bound, message=said(error))
        return Row(self.name, HOLDS if difference <= self.bound else FAILS, difference, self.bound)


@dataclass(frozen=True)
class Figure:
    """Make a row that measures.

    Attributes:
        name: The name of the measurement.
        plain: Function that does the same in plain MindSpore. If it raises an error, the device has no kernel for it.
        measure: Function that returns the value, and a remark.
    """

    name: Name
    plain: Callable[[], Any]
    measure: Callable[[], tuple[Any, str]]

    def run(self) -> Row:
        """Return the row."""
        row = Check(self.name, self.plain, lambda expected: 0.0, 0.0).run()
        if row.result != HOLDS:
            return row
        try:
            value, message = self.measure()
        except Exception as error:
            return Row(self.name, FAILS, message=said(error))
        return Row(self.name, MEASURED, value=value, message=message)


def row_of(check: Union[Check, Figure]) -> Row:
    """Run a check, without warnings, and recover MindSpore after an error."""
    start, logged = perf_counter(), logging.root.manager.disable
    logging.disable(logging.CRITICAL)  # MindSpore logs that it compiles a function again
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            row = check.run()
            if row.difference is None and row.result in (FAILS, NO_KERNEL):
                _note_error()
    finally:
        logging.disable(logged)
    return Row(**{**vars(row), "seconds": perf_counter() - start})


def said(error: Exception) -> str:
    """Return the first line of an error."""
    text = one_line(Exception(next((line for line in str(error).splitlines() if line.strip("- ")), "")))
    return text if isinstance(error, Wrong) else f"{type(error).__name__}: {text}"


_errors: list[bool] = []  # whether MindSpore raised one since it last compiled


def _note_error() -> None:
    """Let MindSpore report the rest of an error now; otherwise the next row would get it."""
    with suppress(Exception):
        synchronize()
    _errors.append(True)


def _recover_from_errors() -> None:
    if _errors:
        recover()
        _errors.clear()
