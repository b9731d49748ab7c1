"""What several ranks exchange, against plain training on the samples of all ranks. Each has other data and weights."""
from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from ms_accum import DataParallel, shard_parameters

from ..distributed.meeting import world_size
from ..mindspore_api import get_rank
from .training import Training, rows, samples

LENGTH = 2
REDUCERS = {f"{world_size()} ranks, {name}": reducer for name, reducer in {
    "window": DataParallel(), "microbatch": DataParallel(sync="microbatch"),
    "zero 1": DataParallel(zero=1), "zero 2": DataParallel(zero=2)}.items()}


@pytest.fixture(scope="module")
def training(check: str, driver: str, dtype: str) -> Training:
    """Return the training of this rank."""
    reducer = REDUCERS[check]
    return Training(driver, dtype, LENGTH, reducer=reducer, trained=shard_parameters if reducer.zero else list,
                    seed=get_rank())


def microbatches_of(rank: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return a rank's own data: odd ranks have less data, in other sizes."""
    return samples((5, 2, 5, 2, 5) if rank % 2 == 0 else (2, 5, 2), 20 + rank)


@rows("train step", ("train step", "cell, graph mode"), checks=REDUCERS)
def test_exchange(training: Training, holds: Callable) -> None:
    """Train on all data of this rank."""
    data = [microbatches_of(rank) for rank in range(world_size())]
    starts = range(0, max(map(len, data)), LENGTH)
    expected = training.expect([[batch for own in data for batch in own[start:start + LENGTH]] for start in starts])
    training.learn([data[get_rank()]])
    training.flush()
    holds(training.off(expected))
