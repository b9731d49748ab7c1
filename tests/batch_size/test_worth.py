"""The window that is worth it: noise of a known scale, and the table."""
import pickle
from functools import partial
from math import inf, nan

import mindspore as ms
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mindspore import Tensor, nn
from support.noisy_samples import Position

from ms_accum import make_train_step
from ms_accum.batch_size import worth
from ms_accum.batch_size.planning import Plan
from ms_accum.batch_size.process import Outcome
from ms_accum.batch_size.worth import longest_within, measure_noise, noise_of, table

MEAN = 0.3
PLAN = Plan(16, 4, 4, 1, 2**40, ())


def seven_tokens(x):
    return 7 * x.shape[0]


def make_step(microbatch, accumulate_step=None, stages=(), **options):
    """Its noise scale is 1 / MEAN², and stays."""
    network, rng = Position(), np.random.default_rng(0)
    optimizer = nn.SGD([network.point], 1e-30)
    train_step = make_train_step(network, optimizer, accumulate_step or 1, stages=stages, **options)
    return lambda: train_step(Tensor(rng.normal(MEAN, 1, (microbatch, 100)), ms.float32))


def of_its_own(microbatch, accumulate_step=None, stages=()):
    return make_step(microbatch, 2, stages)


@pytest.mark.slow
@pytest.mark.usefixtures("uncompiled")
def test_a_known_noise_scale_is_found_in_samples_whatever_the_weights_count():
    for function in (partial(make_step, weight_fn=seven_tokens, pieces=2), make_step):
        assert noise_of(pickle.dumps(function), "CPU", 4, 2, 50) == pytest.approx(1 / MEAN**2, rel=0.1), function
    with pytest.raises(ValueError, match=r"^16 windows were measured in 8 \* 4 microbatches, expected 8"):
        noise_of(pickle.dumps(of_its_own), "CPU", 4, 4, 8)


def test_it_is_measured_in_a_process_of_half_the_microbatch_and_no_less_memory(monkeypatch):
    """If that is possible. That its failure is named is tested in tests/cli/test_plan_command.py."""
    asked = []
    monkeypatch.setattr(worth, "free_memory", lambda device: 7)
    monkeypatch.setattr(worth, "in_a_process", lambda *call, **limits: asked.append((call[2:], limits)) or Outcome(
        "completed", result=5.0))
    for plan, parts in ((PLAN, (2, 8)), (Plan(3, 1, 3, 1, 2**40, ()), (1, 3))):
        assert measure_noise(make_step, plan, 60) == 5.0
        assert asked.pop() == ((pickle.dumps(make_step), "CPU", *parts, 60), {"memory_limit": 2**40})


@given(noise=st.floats(0, 2000), microbatch=st.integers(1, 50), length=st.integers(1, 40))
def test_the_window_is_the_longest_within_the_noise_scale(noise, microbatch, length):
    """Of the powers of 2 up to the planned one, and this one; the answer says so."""
    plan = Plan(microbatch * length, microbatch, length, 1, 2**40, ())
    lengths = [n for n in range(1, length + 1) if n == length or n & (n - 1) == 0]
    best = max([1, *(n for n in lengths if n * microbatch <= noise)])
    assert longest_within(plan, noise) == best
    answer = table(plan, noise).splitlines()[-1]
    assert answer.startswith(f"accumulate_step {best:,} x microbatch {microbatch:,} = {best * microbatch:,} samples: "
                             if noise >= microbatch else f"do not accumulate: a microbatch of {microbatch:,} samples ")
    assert answer.endswith("you need no accumulation") == (best == 1 and noise >= microbatch)


def test_the_table_follows_from_the_equations():
    """Of noise scale B and batch b: 1 + B / b times the fewest updates, 1 + b / B times the fewest samples."""
    assert table(PLAN, 8.0).splitlines()[:3] == [
        "accumulate_step     batch  updates  samples",
        "              1         4        3      1.5",
        "              2         8        2        2"]
    for noise, reason in ((inf, "noise hides the gradient"), (nan, "nan")):
        assert longest_within(PLAN, noise) is None
        assert table(PLAN, noise).endswith(f"the noise scale is unknown ({reason}): measure more")
