"""The window that is worth it: noise of a known scale, in real processes and modelled; what is refused, and what fails."""
import sys
from functools import partial
from math import inf, isnan, nan, sqrt

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn

from ms_accum import Accumulator, make_train_step
from ms_accum.batch_size import PlanError, worth
from ms_accum.batch_size.planning import Plan
from ms_accum.batch_size.trial import Outcome, pickled
from ms_accum.batch_size.worth import measure_noise, measure_windows, time_window

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

FEATURES, MEAN = 100, 0.3
PLAN = Plan(16, 4, 4, 1, 2**40, ())


class Position(nn.Cell):
    """The gradient of a sample is point - sample."""

    def __init__(self):
        super().__init__()
        self.point = Parameter(Tensor(np.zeros(FEATURES), ms.float32), name="point")

    def construct(self, x):
        return ((self.point - x) ** 2).sum(-1).mean() / 2


def seven_tokens(x):
    return 7 * x.shape[0]


def make_step(microbatch, accumulate_step=None, noise_scale=None, spread=1.0, **options):
    """Its noise scale is (spread / MEAN)², and stays."""
    network = Position()
    train_step = make_train_step(network, nn.SGD([network.point], 1e-30), accumulate_step or 16 // microbatch,
                                 noise_scale=noise_scale, **options)
    rng = np.random.default_rng(0)
    return lambda: train_step(Tensor(rng.normal(MEAN, spread, (microbatch, FEATURES)), ms.float32))


def unweighted(microbatch, accumulate_step=None, noise_scale=None):
    """Counts microbatches, not samples."""
    point, rng = Parameter(Tensor(np.zeros(FEATURES), ms.float32), name="point"), np.random.default_rng(0)
    accumulator = Accumulator(nn.SGD([point], 1e-30), accumulate_step, reduction="mean", noise_scale=noise_scale)
    return lambda: accumulator((Tensor(rng.normal(MEAN, 1, (microbatch, FEATURES)).mean(0), ms.float32),))


def forgetful(microbatch, accumulate_step=None, noise_scale=None):
    return make_step(microbatch, accumulate_step)


def of_its_own(microbatch, accumulate_step=None, noise_scale=None):
    return make_step(microbatch, 2, noise_scale)


def raising(microbatch, accumulate_step=None, noise_scale=None):
    raise KeyError("no data")


def test_a_known_noise_scale_is_found_in_samples_whatever_the_weights_count():
    for function, spread in ((make_step, 1.0), (partial(make_step, spread=0.5), 0.5), (partial(make_step, weight_fn=seven_tokens), 1.0),
                             (partial(make_step, pieces=2), 1.0), (unweighted, 1.0)):
        noise = measure_noise(pickled(function), "CPU", 4, 2, 200)
        assert noise == pytest.approx((spread / MEAN)**2, rel=0.1), function
        assert not noise == pytest.approx((1.5 * spread / MEAN)**2, rel=0.1), "control"
    for function, closed in ((forgetful, 0), (of_its_own, 16)):
        with pytest.raises(ValueError, match=rf"^{closed} windows were measured in 8 \* 4 microbatches, expected 8; make_step has to give"):
            measure_noise(pickled(function), "CPU", 4, 4, 8)


def test_windows_are_timed_past_an_update(monkeypatch):
    """Each of them whole, and with a clock that counts calls of the step: 2 seconds each."""
    made = []

    def counting(make_step, microbatch, device_target, accumulate_step, noise_scale):
        made.append((microbatch, accumulate_step, noise_scale))
        return lambda: calls.append(0)
    calls = []
    monkeypatch.setattr(worth, "made_step", counting)
    monkeypatch.setattr(worth, "perf_counter", lambda: 2.0 * len(calls))
    assert time_window(b"", "CPU", 5, 3) == 2.0 / 5
    assert made == [(5, 3, None)]
    assert len(calls) == 3 + 1 + 3 * 3


def test_another_noise_makes_another_window_the_best(monkeypatch):
    monkeypatch.setattr(worth, "in_a_process", lambda work, *_: Outcome(
        None, "completed", "", 0.1, work() if work.func is measure_noise else 0.001))
    for spread, best in ((0.5, 1), (1.0, 2)):
        said = []
        found = measure_windows(partial(make_step, spread=spread), PLAN, 100, on_result=said.append)
        assert found.noise_scale == pytest.approx((spread / MEAN)**2, rel=0.15)
        assert (found.measured_windows, found.measured_accumulate_step, found.measured_microbatch) == (100, 8, 2)
        assert found.accumulate_step == best
        assert [row.accumulate_step for row in found.windows] == [1, 2, 4, 8]
        assert len(said) == 5


def test_failures_are_named():
    with pytest.raises(PlanError, match="measuring the noise scale failed: KeyError: 'no data'"):
        measure_windows(raising, PLAN)
    with pytest.raises(PlanError, match=r"measuring the noise scale failed: it was not done within 0\.1 s"):
        measure_windows(make_step, PLAN, timeout=0.1)
    with pytest.raises(PlanError, match=r"measuring a window of 1 failed: beyond the limit \(1 MiB\); give a larger memory limit"):
        measure_windows(make_step, Plan(16, 2, 8, 1, 2**20, ()), 1)


def in_little_memory(largest, longest, work, *_):
    """Fits the noise scale of so many samples, and windows of so many microbatches."""
    fits = work.args[-1] <= longest if work.func is time_window else work.args[-3] <= largest
    return Outcome(None, "completed" if fits else "out of memory", "", 0.1, 9.0 if fits else None)


def test_parts_get_smaller_until_they_fit_and_longer_windows_need_not(monkeypatch):
    """The noise scale needs memory for norms, and windows of one microbatch need no buffers."""
    for *memory, measured, rows in ((2, 4, (2, 2), 3), (1, 2, (4, 1), 2), (1, 1, (4, 1), 1)):
        monkeypatch.setattr(worth, "in_a_process", partial(in_little_memory, *memory))
        found = measure_windows(make_step, Plan(4, 4, 1, 1, 9, ()))
        assert (found.measured_accumulate_step, found.measured_microbatch) == measured
        assert len(found.windows) == rows
    for *memory, what in ((1, 1, "a window of 2"), (0, 1, "the noise scale")):
        monkeypatch.setattr(worth, "in_a_process", partial(in_little_memory, *memory))
        with pytest.raises(PlanError, match=rf"measuring {what} failed: out of memory \(.*\); give a larger memory limit"):
            measure_windows(make_step, PLAN)


def modelled(monkeypatch, noise, plan=PLAN):
    """Measure windows with this noise scale, that take 8 ms for each update and 1 ms for each sample."""
    def run(work, device_target, memory_limit, timeout):
        if work.func is measure_noise:
            return Outcome(None, "completed", "", 0.1, noise)
        *_, microbatch, length = work.args
        return Outcome(None, "completed", "", 0.1, 0.001 + 0.008 / (microbatch * length))
    monkeypatch.setattr(worth, "in_a_process", run)
    return measure_windows(make_step, plan)


@pytest.mark.parametrize(("noise", "plan", "best", "verdict"), [
    (7.9, PLAN, 1, "accumulate_step 1 x microbatch 4 = 4 samples: the largest window whose batch is not beyond the noise scale of 8 "),
    (8.0, PLAN, 2, "accumulate_step 2 x microbatch 4 = 8 samples: the largest window whose batch is not beyond the noise scale of 8 "),
    (16.0, PLAN, 4, "accumulate_step 4 x microbatch 4 = 16 samples: the planned batch, which is not beyond the noise scale of 16 samples, "
                    "measured over 32 windows of 8 x 2 samples"),
    (1000, PLAN, 4, "measured over 32 windows of 8 x 2 samples; accumulate_step 128 would not be, either"),
    (3.9, PLAN, 1, "do not accumulate: a microbatch of 4 samples alone is beyond the noise scale of 4 samples"),
    (0.0, PLAN, 1, "do not accumulate"),
    (inf, PLAN, None, "the noise scale is unknown, measured over 32 windows of 8 x 2 samples: noise hides the gradient"),
    (nan, PLAN, None, "no window had a finite gradient"),
    (130, Plan(127, 43, 3, 1, 9, ()), 3, "the planned batch, which is not beyond"),
    (90, Plan(127, 43, 3, 1, 9, ()), 2, "the largest window"),
    (20, Plan(8, 8, 1, 1, 9, ()), 1, "measured over 32 windows of 2 x 4 samples; accumulate_step 2 would not be, either"),
    (20, Plan(3, 1, 3, 1, 9, ()), 3, "measured over 32 windows of 3 x 1 samples"),
])
def test_the_window_is_the_largest_within_the_noise_scale(noise, plan, best, verdict, monkeypatch):
    found = modelled(monkeypatch, noise, plan)
    assert found.accumulate_step == best
    assert verdict in str(found).splitlines()[-1]
    if not isnan(noise):
        assert min(row.time for row in found.windows) == 1


def test_the_table_follows_from_the_equations(monkeypatch):
    found = modelled(monkeypatch, 8.0)
    times = [(1 + batch / 8) * (0.001 + 0.008 / batch) for batch in (4, 8, 16, 32)]
    for row, time, batch in zip(found.windows, times, (4, 8, 16, 32)):
        assert (row.batch, row.lr_linear, row.lr_sqrt) == (batch, batch / 16, pytest.approx(sqrt(batch / 16)))
        assert (row.updates - 1) * (row.samples - 1) == pytest.approx(1)
        assert (row.updates, row.time) == (pytest.approx(1 + 8 / batch), pytest.approx(time / min(times)))
    assert str(found).splitlines()[:3] == [
        "accumulate_step     batch  ms/sample  lr (SGD)  lr (Adam)  updates  samples    time",
        "              1         4          3      0.25        0.5        3      1.5    1.12",
        "              2         8          2       0.5      0.707        2        2    1.00"]


@pytest.mark.parametrize(("error", "message", "call"), [
    (ValueError, r"<lambda> does not take a microbatch alone, or with accumulate_step= and noise_scale= \(.*'accumulate_step'\); write "
                 r"`def make_step\(microbatch, accumulate_step=None, noise_scale=None\)`", partial(measure_windows, lambda n: int, PLAN)),
    (ValueError, "does not take a microbatch alone", partial(measure_windows, lambda n, accumulate_step, noise_scale: int, PLAN)),
    (ValueError, "the batch is 1 sample, expected at least 2", partial(measure_windows, make_step, Plan(1, 1, 1, 1, 9, ()))),
    (TypeError, r"windows is 2\.5 of type float, expected an int >= 1", partial(measure_windows, make_step, PLAN, 2.5)),
])
def test_what_cannot_be_measured_is_refused(error, message, call):
    with pytest.raises(error, match=message):
        call()
