"""Local updates in real processes, and in one, against NumPy; the resume of several ranks is in test_ranks.py."""
import re

import mindspore as ms
import numpy as np
import pytest
import reference
from conftest import MLP, difference, mean_loss, tensors, values
from mindspore import amp, nn
from rank_cases import EVERY_LAUNCH, LAUNCHES, LOCAL, N, accumulator, cases_of, losses_of, microbatches
from test_reducers import ORACLES, arrays_of

from ms_accum import (
    Accumulator,
    AdaptiveWindow,
    LocalUpdates,
    load_checkpoint,
    make_train_step,
    save_checkpoint,
)
from ms_accum.checkpoint import CheckpointError

pytest_plugins = ["launch"]


class Uphill(reference.LocalUpdates):
    def step(self, moved):
        self.rate = -abs(self.rate)
        return super().step(moved)


class HeavyBall(reference.LocalUpdates):
    """Without Nesterov's look ahead."""
    def step(self, moved):
        super().step(moved)
        return [p - self.rate * v for p, v in zip(self.parameters, self.velocity)]


class Averaged(reference.LocalUpdates):
    """Without an outer step."""
    def step(self, moved):
        return [np.mean(each, axis=0) for each in zip(*[rank.parameters for rank in moved])]


class EveryRank(reference.LocalUpdates):
    """Where ranks without an update count, too."""
    def step(self, moved):
        return super().step(self.ranks)


def simulated(count, sizes, reducer, optimizer, features=(), kind=reference.LocalUpdates):
    """The same runs in float64, each window as one batch."""
    start = values(MLP(seed=0).trainable_params())
    ranks = [reference.Accumulation(start, ORACLES[optimizer](), 1, "mean", 0.5, "skip_window") for _ in range(count)]
    settings = LOCAL[reducer]
    run = kind(ranks, settings.every, settings.outer_learning_rate, settings.outer_momentum)
    for epoch in range(1 + ("twice" in features)):
        batches = [microbatches(sizes, rank) for rank in range(count)]
        if "nan" in features:
            batches[1][0][0][0, 0] = np.nan if epoch == 0 else 0
        run.epoch([[tuple(map(np.concatenate, zip(*mine[i:i + N]))) for i in range(0, len(mine), N)] for mine in batches])
    return run


@EVERY_LAUNCH
def test_local_updates_of_ranks_follow_the_simulation(left_by, launch):
    """{SGD, Momentum, Adam} x even and uneven data x a dropped window x two epochs. All hold the same bits after a flush, and
    different ones before an exchange."""
    count = LAUNCHES[launch][0]
    for case in cases_of(launch, "outer"):
        sizes, reducer, optimizer, *features = case.split(":")[1:]
        run, results = simulated(count, sizes, reducer, optimizer, features), left_by(case, launch)
        for rank, (left, expected) in enumerate(zip(results, run.ranks)):
            assert difference(arrays_of(left), run.parameters) <= 1e-6, f"{case}, rank {rank}"
            assert left["counters"] == [expected.update_step, 0, expected.skipped], case
            assert left["parameters"] == results[0]["parameters"], f"{case}: ranks hold different parameters"
        assert results[0]["spread"] != results[1]["spread"]


@pytest.mark.parametrize("wrong", [Uphill, HeavyBall, Averaged, EveryRank])
def test_wrong_outer_steps_are_seen(wrong):
    """Negative control of the simulation."""
    right, other = (simulated(2, "halved", "local", "SGD", kind=kind) for kind in (reference.LocalUpdates, wrong))
    assert difference(other.parameters, right.parameters) > 1e-3


@EVERY_LAUNCH
def test_averaging_after_each_update_is_data_parallel(left_by, launch):
    """With SGD and equal weights, also where one rank has fewer windows. Control: after each second update it is not."""
    cases = cases_of(launch, "as_data_parallel")
    assert len(cases) == 2
    for case in cases:
        for left in left_by(case, launch):
            expected, each, second = (list(map(np.array, left[name])) for name in ("window", "each", "averaged"))
            assert difference(each, expected) <= 1e-6, case
            assert difference(second, expected) > 1e-4, case
