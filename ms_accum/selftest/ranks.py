"""Check several ranks against plain training on the samples of all ranks, and combine their rows."""
from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from ms_accum import DataParallel, shard_parameters

from ..distributed.ranks import gather
from . import plain
from .rows import FAILS, HOLDS, MEASURED, NO_KERNEL, NOT_RUN, Check, Row
from .settings import samples
from .training import BOUNDS, Phase, Setting, Training

REDUCERS = {
    "window": DataParallel(), "microbatch": DataParallel(sync="microbatch"),
    "zero 1": DataParallel(zero=1), "zero 2": DataParallel(zero=2),
}
LENGTH = 2
_RESULTS = (HOLDS, MEASURED, NOT_RUN, NO_KERNEL, FAILS)  # from the best to the worst


def checks_of_ranks(rank: int, ranks: int, quick: bool) -> Iterator[Check]:
    """Yield a check for each kind of exchange, driver and dtype. Ranks begin with different weights."""
    drivers = ("train step",) if quick else ("train step", "cell, graph mode", "by hand, op by op")
    windows = windows_of(ranks)
    for dtype in ("float32",) if quick else BOUNDS:
        for name, reducer in REDUCERS.items():
            phase = Phase(f"{ranks} ranks, {name}", windows, partial(exchanged, microbatches_of(rank)))
            trained = shard_parameters if reducer.zero else list
            setting = Setting((phase,), LENGTH, partial(dict, reducer=reducer), trained=trained)
            for driver in drivers:
                yield from Training(setting, driver, dtype, seed=rank).checks()


def microbatches_of(rank: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return a rank's own data: odd ranks have less data, in other sizes."""
    return samples((5, 2, 5, 2, 5) if rank % 2 == 0 else (2, 5, 2), 20 + rank)


def windows_of(ranks: int) -> list[list[tuple[np.ndarray, np.ndarray]]]:
    """Return the windows of all ranks together."""
    data = [microbatches_of(rank) for rank in range(ranks)]
    starts = range(0, max(map(len, data)), LENGTH)
    return [[batch for own in data for batch in own[start:start + LENGTH]] for start in starts]


def exchanged(own: Sequence[tuple], training: Training, expected: plain.Expected, _: Sequence) -> float:
    """Train on all data of this rank."""
    training.learn([own])
    training.driver.flush()
    return training.off(expected)


def of_all_ranks(row: Row, ranks: int) -> Row:
    """Return the worst row of all ranks, with the ranks in its message. Every rank has to call it."""
    if ranks == 1:
        return row
    numbers = np.array([_RESULTS.index(row.result), np.inf if row.difference is None else row.difference])
    rows = gather(numbers)
    worst = max(range(ranks), key=lambda rank: tuple(np.nan_to_num(rows[rank], nan=np.inf)))
    result, difference = rows[worst]
    if result == numbers[0] and result != _RESULTS.index(FAILS):
        return row if np.isinf(difference) else replace(row, difference=float(difference))
    failed = [rank for rank in range(ranks) if rows[rank][0] == result]
    said = row.message if row.result == _RESULTS[int(result)] else "see its output on stderr"
    message = f"rank {', '.join(map(str, failed))}{': ' * bool(said)}{said}"
    return replace(row, result=_RESULTS[int(result)], message=message,
                   difference=None if np.isinf(difference) else float(difference))
