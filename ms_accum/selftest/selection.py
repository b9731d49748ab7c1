"""Select the rows of the table."""
from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, cycle
from typing import Union

from .figures import figures
from .kernels import checks_of_kernels
from .losses import checks_of_losses
from .nonfinite import checks_of_nonfinite
from .ranks import checks_of_ranks
from .rows import Check, Figure
from .settings import MEANS, ONES, SAMPLES, SUMS
from .training import BOUNDS, DRIVERS, Training


def rows_to_be(quick: bool, rank: int = 0, ranks: int = 1) -> Iterator[Union[Check, Figure]]:
    """Yield the checks of the table, on one of several ranks. `quick`: only float32, and each check with one driver."""
    yield from chain(quick_checks() if quick else all_checks(),
                     checks_of_ranks(rank, ranks, quick) if ranks > 1 else (), checks_of_kernels(), figures(quick))


def all_checks() -> Iterator[Check]:
    """Yield each check, for each driver and dtype."""
    for dtype in BOUNDS:
        for driver in DRIVERS:
            for setting in (SAMPLES, MEANS, SUMS, ONES):
                yield from Training(setting, driver, dtype).checks()
        yield from checks_of_losses(dtype)
        yield from checks_of_nonfinite(dtype)


def quick_checks() -> Iterator[Check]:
    """Yield each check once; the drivers take turns."""
    parts = [SAMPLES._replace(phases=(phase,)) for phase in SAMPLES.phases] + [MEANS, SUMS, ONES]
    for setting, driver in zip(parts, cycle(DRIVERS)):
        yield from Training(setting, driver, "float32").checks()
    yield from checks_of_losses("float32")
    yield from checks_of_nonfinite("float32")
