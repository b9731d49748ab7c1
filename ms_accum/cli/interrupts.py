"""Handle Ctrl-C, also while MindSpore compiles: MindSpore 2.10 drops errors raised then, so interrupts are noted."""
from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_noted: list[int] = []


@contextmanager
def noting_interrupts() -> Iterator[None]:
    """Raise KeyboardInterrupt for SIGINT and SIGTERM in the block, and note it for `raise_if_interrupted`."""
    _noted.clear()
    # When MindSpore 2.10 runs a graph, it installs a handler that turns SIGINT into SIGTERM, whose handler it keeps.
    before = {number: signal.signal(number, _note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def raise_if_interrupted() -> None:
    """Raise KeyboardInterrupt if there was an interrupt: MindSpore may have dropped it."""
    if _noted:
        raise KeyboardInterrupt


def _note(number: int, frame: Any) -> None:
    _noted.append(number)
    signal.default_int_handler(number, frame)
