"""Contestants that are several processes: each of these is one rank, with its part of every window."""
from __future__ import annotations

from functools import partial

import numpy as np
from case import Case, samples
from mindspore.communication import get_rank

from ms_accum import Accumulator, DataParallel, make_train_step

from .mindspore_ import MindSpore, Start, Way


class Rank(MindSpore):
    """Trains on every `case.ranks`-th sample."""

    def __init__(self, reducer: DataParallel | None, case: Case) -> None:
        super().__init__(partial(_ours, reducer), case)

    def samples(self, count: int) -> tuple[np.ndarray, np.ndarray]:
        inputs, labels = samples(self.case, count * self.case.ranks)
        return inputs[get_rank()::self.case.ranks], labels[get_rank()::self.case.ranks]


def _ours(reducer: DataParallel | None, start: Start) -> Way:
    acc = Accumulator(start.optimizer, start.pieces, reduction="mean", reducer=reducer)
    return Way(make_train_step(start.forward_fn, acc), tuple(acc.parameters))


CONTESTANTS = {name: partial(Rank, reducer) for name, reducer in {
    # Every rank for itself: what the ranks take from each other by being on one machine.
    "alone": None,
    "window": DataParallel(),
    "microbatch": DataParallel(sync="microbatch"),
    "shard": DataParallel(sync="microbatch", shard=True),
}.items()}
