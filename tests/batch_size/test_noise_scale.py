"""GradientNoiseScale against NumPy; a problem whose answer is known is in test_worth.py."""
from math import inf, isnan

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn
from support import reference
from support.noisy_samples import FEATURES, Position

from ms_accum import Accumulator
from ms_accum.batch_size import GradientNoiseScale

LENGTHS = {0: 4, 4: 1, 6: 3}
MASKED = np.full((2, FEATURES), np.nan, np.float32)  # of weight 0
NAN = np.full((1, FEATURES), np.nan, np.float32)


def build(**options):
    return Accumulator(nn.SGD([Position().point], 1e-30), **{
        "accumulate_step": 4, "reduction": "mean", "stages": (GradientNoiseScale(1),), **options})


def gradient_of(x):
    return -x.mean(0, dtype=np.float64)


def estimates(windows, decay=1.0):
    """Return S and |G|² from windows of microbatches of samples."""
    return tuple(reference.noise_and_signal([[(gradient_of(x), len(x)) for x in window] for window in windows], decay))


def scale_of(acc):
    return acc.boundary.window.stages[-1]


def found(acc):
    return scale_of(acc).noise, scale_of(acc).gradient_squared


def drawn(rng, policy):
    """Windows of ragged microbatches of samples, some with NaN, the last one incomplete; and what of them counts."""
    windows, counted, updates = [], [], 0
    for place in range(12):
        length = LENGTHS[max(start for start in LENGTHS if start <= updates)]
        sizes = rng.integers(1, 9, max(1, length - (place == 11)))
        window = [rng.normal(0.3, 1.0, (n, FEATURES)).astype(np.float32) for n in sizes]
        good, kind = window.copy(), rng.integers(4) if length > 1 else 0
        if kind > 1:
            window[-1] = MASKED if kind == 2 else NAN
            good.pop()
        broken = kind == 3 and policy != "skip_microbatch"
        updates += not (broken and policy == "skip_window")
        windows.append(window)
        counted += [] if broken else [good]
    return windows, counted


@pytest.mark.parametrize("seed", range(6))
def test_estimates_are_those_of_numpy(seed):
    """One microbatch says nothing, and means forget nothing for it. With train steps: test_differential.py."""
    rng, policy = np.random.default_rng(seed), ("apply", "skip_window", "skip_microbatch")[seed % 3]
    decay = (0.5, 1)[seed % 2]
    acc = build(accumulate_step=LENGTHS, clip_norm=0.1, on_nonfinite=policy, stages=(GradientNoiseScale(decay),))
    windows, counted = drawn(rng, policy)
    for x in (x for window in windows for x in window):
        acc((Tensor(gradient_of(x), ms.float32),), Tensor(0.0 if x is MASKED else float(len(x))))
    acc.flush()
    assert found(acc) == pytest.approx(estimates(counted, decay), rel=1e-4)
    assert scale_of(acc).scale() == found(acc)[0] / found(acc)[1]
    assert found(acc) != pytest.approx(estimates(counted, 0.7), rel=1e-4)  # control
    sizes = [sum(map(len, window)) for window in counted if len(window) > 1]
    discount = decay ** np.arange(len(sizes))[::-1]
    assert scale_of(acc).window_weight == pytest.approx((sizes * discount).sum() / discount.sum(), rel=1e-5)
    assert scale_of(acc).windows == pytest.approx(discount.sum(), rel=1e-5)
    assert acc.status().closed_windows == len(windows)


def test_what_noise_hides_and_what_one_microbatch_says():
    """After a reset of the accumulator, which forgets the open window, and a constant weight of 0."""
    lost, one = build(), build(accumulate_step=1)
    for acc in (lost, one):
        acc((Tensor(NAN[0]),), 0)
        acc.reset()
        for sign in (1, -1, 1, -1):
            acc((Tensor(np.full(FEATURES, sign), ms.float32),), 4.0)
    assert scale_of(lost).gradient_squared < 0
    assert scale_of(lost).scale() == inf
    assert isnan(scale_of(one).scale())


def test_it_belongs_to_one_accumulator_and_bad_arguments_are_errors():
    taken = build().window.stages
    for error, message, function, argument in (
            (ValueError, r"noise_scale belongs to another accumulator, .*; give", lambda it: build(stages=it), taken),
            (TypeError, r"decay is '1' of type str, expected a number with 0 < decay <= 1", GradientNoiseScale, "1"),
            (ValueError, r"decay is 0, expected a number with 0 < decay <= 1; 1 takes plain", GradientNoiseScale, 0)):
        with pytest.raises(error, match=message):
            function(argument)
