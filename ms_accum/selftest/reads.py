"""Count how often the host reads from the device, and so waits for it."""
from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any
from unittest.mock import patch

from mindspore import Tensor

READERS = ("asnumpy", "__int__", "__bool__", "__float__")


@contextmanager
def counted_reads() -> Iterator[list[str]]:
    """Yield a list that gets an entry for each value that the host reads in the block."""
    made: list[str] = []
    inside: list[str] = []

    def noted(reader: Callable) -> Callable:
        @wraps(reader)
        def read(self: Tensor, *arguments: Any) -> Any:
            inside.append(reader.__name__)
            try:
                return reader(self, *arguments)
            finally:
                inside.pop()
                made.extend([reader.__name__] * (not inside))  # `int()` reads by `asnumpy()`
        return read

    with ExitStack() as stack:
        for name in READERS:
            stack.enter_context(patch.object(Tensor, name, noted(getattr(Tensor, name))))
        yield made
