"""GradientNoiseScale against NumPy; a problem whose answer is known is in test_worth.py."""
from math import inf, isnan

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn
from support import reference
from support.noisy_samples import FEATURES, Position, noisy

from ms_accum import Accumulator, make_train_step
from ms_accum.batch_size import GradientNoiseScale

RAGGED = [3, 9, 1, 5]
NAN = np.full((2, FEATURES), np.nan, np.float32)


def windows_of(sizes, number, seed=0):
    """Microbatches of samples: float32 (n, FEATURES) each."""
    rng = np.random.default_rng(seed)
    return [[rng.normal(0.3, 1.0, (n, FEATURES)).astype(np.float32) for n in sizes] for _ in range(number)]


def build(accumulate_step=4, clip_norm=None, decay=1, **options):
    return Accumulator(nn.SGD([Position().point], 1e-30), accumulate_step, clip_norm, reduction="mean",
                       stages=(GradientNoiseScale(decay),), **options)


def gradient_of(x):
    return -x.mean(0, dtype=np.float64)


def estimates(windows, decay=1.0):
    """Return S and |G|² from windows of microbatches of samples."""
    return tuple(reference.noise_and_signal([[(gradient_of(x), len(x)) for x in window] for window in windows], decay))


def scale_of(acc):
    return acc.boundary.window.stages[-1]


def found(acc):
    return scale_of(acc).noise, scale_of(acc).gradient_squared


def rows():
    """Return (options, windows that are fed, windows that count)."""
    known = [*windows_of(RAGGED, 3), *windows_of(RAGGED[:2], 1, seed=1)]  # with an incomplete last window
    growing = [*windows_of(RAGGED, 5), *windows_of(RAGGED[:3], 5, seed=1)]
    first, second, third = windows_of(RAGGED, 3)
    masked = [*first[:3], NAN]
    return [
        ({"clip_norm": 0.1}, known, known),
        # One microbatch says nothing, and means forget nothing for it.
        ({"accumulate_step": {0: 4, 5: 1, 7: 3}, "decay": 0.5},
         [*growing[:5], *windows_of([4], 2), *growing[5:]], growing),
        ({"on_nonfinite": "skip_microbatch"}, [masked, [NAN[:1], *second[1:]], third], [first[:3], second[1:], third]),
        ({"on_nonfinite": "skip_window"}, [masked, [NAN[:1], *second[1:]], third], [first[:3], third]),
        # The means are not lost.
        ({"on_nonfinite": "apply"}, [masked, [NAN[:1], *second[1:]], third], [first[:3], third]),
    ]


@pytest.mark.parametrize("case", range(5))
def test_estimates_are_those_of_numpy(case):
    """NaN has weight 0 where it is of two samples. Pieces: below; they and graphs: test_differential.py."""
    options, windows, kept = rows()[case]
    acc = build(**options)
    for x in (x for window in windows for x in window):
        acc((Tensor(gradient_of(x), ms.float32),), Tensor(0.0 if x is NAN else float(len(x))))
    acc.flush()
    assert found(acc) == pytest.approx(estimates(kept, options.get("decay", 1.0)), rel=1e-4)
    assert acc.status().closed_windows == len(windows)


@pytest.mark.usefixtures("uncompiled")
def test_a_run_of_ragged_microbatches_in_pieces_is_measured():
    """With updates that move, NaN in a piece, and windows that are closed early and dropped by hand."""
    pieces, rate, decay, network = 2, 1e-3, 0.9, Position()
    data = noisy([(4, 16)[i % 3 == 1] for i in range(24)], 30)
    data[4][0, 0] = np.nan
    step = make_train_step(network, nn.SGD([network.point], rate), {0: 1, 2: 3}, on_nonfinite="skip_microbatch",
                           stages=(GradientNoiseScale(decay),), pieces=pieces)
    ends = [1, 2, 5, 7, 10, 11, 14, 17, 20, 23, 24]  # of the windows; early are the fourth and the last
    dropped, point, windows, sizes = 11, np.zeros(FEATURES), [], np.zeros(2)
    for start, end in zip([0, *ends], ends):
        window = [(point - part.mean(0, dtype=np.float64), len(part)) for x in data[start:end]
                  for part in np.split(x, pieces) if not np.isnan(part).any()]
        for x in data[start:end]:
            step(Tensor(x))
        if end == dropped:
            step.reset()
            continue
        step.flush()
        windows.append(window)
        weight = sum(w for _, w in window)
        sizes = decay * sizes + [weight, 1]
        point = point - rate * sum(g * w for g, w in window) / weight
    assert (step.update_step, step.status().skipped) == (len(windows), 1)
    assert found(step) == pytest.approx(reference.noise_and_signal(windows, decay), rel=1e-4)
    assert scale_of(step).window_weight == pytest.approx(sizes[0] / sizes[1], rel=1e-5)
    np.testing.assert_allclose(network.point.asnumpy(), point, atol=1e-6)


def test_resets_a_constant_weight_of_zero_and_a_gradient_lost_in_noise():
    """The accumulator's reset forgets the open window, its own the means. A window of one microbatch says nothing."""
    (first, second), acc, one = windows_of(RAGGED, 2), build(), build(accumulate_step=1)
    acc((Tensor(gradient_of(first[0]), ms.float32),), 3.0)
    acc.reset()
    for x in second:
        acc((Tensor(gradient_of(x), ms.float32),), float(len(x)))
    assert found(acc) == pytest.approx(estimates([second]), rel=1e-4)
    assert scale_of(acc).scale() == found(acc)[0] / found(acc)[1]
    scale_of(acc).reset()
    assert isnan(scale_of(acc).scale())
    assert isnan(scale_of(acc).window_weight)
    acc((Tensor(NAN[0]),), 0)
    for x in first[:3]:
        acc((Tensor(gradient_of(x), ms.float32),), float(len(x)))
    acc.flush()
    assert found(acc) == pytest.approx(estimates([first[:3]]), rel=1e-4)
    scale_of(acc).reset()
    for sign in (1, -1, 1, -1):
        for accumulator in (acc, one):
            accumulator((Tensor(np.full(FEATURES, sign), ms.float32),), 4.0)
    assert scale_of(acc).gradient_squared < 0
    assert scale_of(acc).scale() == inf
    assert isnan(scale_of(one).scale())


def accumulator_with(*stages):
    return Accumulator(nn.SGD([Parameter(Tensor([1.0]), name="w")], 0.1), 2, reduction="mean", stages=stages)


def test_it_belongs_to_one_accumulator_and_bad_arguments_are_refused():
    taken = GradientNoiseScale(0.5)
    assert len(accumulator_with(taken).window.state) - len(accumulator_with().window.state) == 3
    for error, message, function, argument in (
            (ValueError, r"noise_scale belongs to another accumulator, .*; give each", accumulator_with, taken),
            (TypeError, r"decay is '1' of type str, expected a number with 0 < decay <= 1", GradientNoiseScale, "1"),
            (ValueError, r"decay is 0, expected a number with 0 < decay <= 1; 1 takes plain", GradientNoiseScale, 0)):
        with pytest.raises(error, match=message):
            function(argument)
