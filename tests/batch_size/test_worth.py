"""The window that is worth it: noise of a known scale, the table, what cannot be measured."""
import sys
from functools import partial
from math import inf, nan

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn
from support.noisy_samples import Position

from ms_accum import Accumulator, make_train_step
from ms_accum.batch_size import PlanError, worth
from ms_accum.batch_size.planning import Plan
from ms_accum.batch_size.process import Outcome, pickled
from ms_accum.batch_size.worth import longest_within, measure_noise, noise_of, require_measurable, table

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

MEAN = 0.3
PLAN = Plan(16, 4, 4, 1, 2**40, ())
PRIME = Plan(127, 43, 3, 1, 2**40, ())


def seven_tokens(x):
    return 7 * x.shape[0]


def make_step(microbatch, accumulate_step=None, stages=(), **options):
    """Its noise scale is 1 / MEAN², and stays."""
    network, rng = Position(), np.random.default_rng(0)
    optimizer = nn.SGD([network.point], 1e-30)
    train_step = make_train_step(network, optimizer, accumulate_step or 1, stages=stages, **options)
    return lambda: train_step(Tensor(rng.normal(MEAN, 1, (microbatch, 100)), ms.float32))


def unweighted(microbatch, accumulate_step=None, stages=()):
    """Counts microbatches, not samples."""
    network, rng = Position(), np.random.default_rng(0)
    optimizer = nn.SGD([network.point], 1e-30)
    accumulator = Accumulator(optimizer, accumulate_step, reduction="mean", stages=stages)
    return lambda: accumulator((Tensor(rng.normal(MEAN, 1, (microbatch, 100)).mean(0), ms.float32),))


def forgetful(microbatch, accumulate_step=None, stages=()):
    return unweighted(microbatch, accumulate_step)


def of_its_own(microbatch, accumulate_step=None, stages=()):
    return unweighted(microbatch, 2, stages)


@pytest.mark.slow
@pytest.mark.usefixtures("uncompiled")
def test_a_known_noise_scale_is_found_in_samples_whatever_the_weights_count():
    for function in (partial(make_step, weight_fn=seven_tokens, pieces=2), unweighted):
        assert noise_of(pickled(function), "CPU", 4, 2, 50) == pytest.approx(1 / MEAN**2, rel=0.1), function
    for function, closed in ((forgetful, 0), (of_its_own, 16)):
        with pytest.raises(ValueError, match=rf"^{closed} windows were measured in 8 \* 4 microbatches, expected 8"):
            noise_of(pickled(function), "CPU", 4, 4, 8)


def test_it_is_measured_in_a_process_of_half_the_microbatch_and_no_less_memory(monkeypatch):
    """What such a process answers, and that its failure is named, is tested in tests/cli/test_plan_command.py."""
    asked = []
    monkeypatch.setattr(worth, "free_memory", lambda device: 7)
    def too_late(*call, **limits):
        asked.append((call, limits))
        return Outcome("failed", "too late")

    monkeypatch.setattr(worth, "in_a_process", too_late)
    for plan, parts in ((PLAN, (2, 8)), (Plan(3, 1, 3, 1, 2**40, ()), (1, 3))):
        with pytest.raises(PlanError, match=r"measuring the noise scale failed: too late"):
            measure_noise(make_step, plan, 60, timeout=0.1)
        call, limits = asked.pop()
        assert call == ("CPU", noise_of, pickled(make_step), "CPU", *parts, 60)
        assert limits == {"timeout": 0.1, "memory_limit": 2**40}


@pytest.mark.parametrize(("noise", "plan", "best", "answer"), [
    (7.9, PLAN, 1, "accumulate_step 1 x microbatch 4 = 4 samples: the largest window, up to the planned one, within"),
    (8.0, PLAN, 2, "accumulate_step 2 x microbatch 4 = 8 samples"),
    (1000, PLAN, 4, "accumulate_step 4 x microbatch 4 = 16 samples"),
    (3.9, PLAN, 1, "do not accumulate: a microbatch of 4 samples is beyond the noise scale of 4"),
    (0.0, PLAN, 1, "do not accumulate"),
    (inf, PLAN, None, "the noise scale is unknown (noise hides the gradient): measure more"),
    (nan, PLAN, None, "the noise scale is unknown (nan)"),
    (130, PRIME, 3, "accumulate_step 3 x microbatch 43 = 129 samples"),
    (90, PRIME, 2, "accumulate_step 2 x microbatch 43 = 86 samples"),
    (20, Plan(8, 8, 1, 1, 9, ()), 1, "accumulate_step 1 x microbatch 8 = 8 samples")])
def test_the_window_is_the_largest_within_the_noise_scale(noise, plan, best, answer):
    assert longest_within(plan, noise) == best
    assert table(plan, noise).splitlines()[-1].startswith(answer)


def test_the_table_follows_from_the_equations():
    """Of noise scale B and batch b: 1 + B / b times the fewest updates, 1 + b / B times the fewest samples."""
    assert table(PLAN, 8.0).splitlines()[:5] == [
        "accumulate_step     batch  lr (SGD)  lr (Adam)  updates  samples",
        "              1         4      0.25        0.5        3      1.5",
        "              2         8       0.5      0.707        2        2",
        "              4        16         1          1      1.5        3",
        "              8        32         2       1.41     1.25        5"]


@pytest.mark.parametrize(("message", "call"), [
    (r"the noise scale cannot be measured: got an unexpected keyword argument 'accumulate_step'; write `def make_step",
     (lambda n: int, 16, "CPU")),
    ("the batch has 1 sample, expected at least 2", (make_step, 1, "CPU")),
    ("a dry run for Ascend computes no gradients, so it has no noise scale", (make_step, 16, "Ascend"))])
def test_what_cannot_be_measured_is_refused(message, call, monkeypatch):
    monkeypatch.setenv("MS_SIMULATION_LEVEL", "1")
    with pytest.raises(ValueError, match=message):
        require_measurable(*call)
