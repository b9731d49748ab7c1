"""GradientNoiseScale against a problem whose answer is known and against NumPy."""
from math import inf, isnan

import mindspore as ms
import numpy as np
import pytest
import reference
from conftest import compiled
from mindspore import Parameter, Tensor, amp, nn
from noisy_samples import FEATURES, Position

from ms_accum import Accumulator, make_train_step
from ms_accum.batch_size import GradientNoiseScale

MEAN = np.full(FEATURES, 0.3)             # |G|² = 9
SPREAD = np.linspace(0.5, 1.5, FEATURES)  # S = sum of its squares
NOISE, SQUARED = (SPREAD**2).sum(), (MEAN**2).sum()
RAGGED = [3, 9, 1, 5]
NAN = np.full((2, FEATURES), np.nan, np.float32)


def windows_of(sizes, number, seed=0):
    """Microbatches of samples whose gradients (below) have the mean MEAN and the variance NOISE: float32 (n, FEATURES) each."""
    rng = np.random.default_rng(seed)
    return [[(MEAN + SPREAD * rng.normal(size=(n, FEATURES))).astype(np.float32) for n in sizes] for _ in range(number)]


def build(accumulate_step=4, clip_norm=None, decay=1, **options):
    network = Position()
    acc = Accumulator(nn.SGD([network.point], 1e-30), accumulate_step, clip_norm, reduction="mean",
                      noise_scale=GradientNoiseScale(decay), **options)
    return network, acc


def gradient_of(x):
    return -x.mean(0, dtype=np.float64)


def estimates(windows, decay=1.0, weight_of=len):
    """Return S and |G|² from windows of microbatches of samples."""
    return tuple(reference.noise_and_signal([[(gradient_of(x), weight_of(x)) for x in window] for window in windows], decay))


def found(acc):
    return acc.noise_scale.noise, acc.noise_scale.gradient_squared


def rows(long):
    """Return (options, windows that are fed, windows that count)."""
    known = [*windows_of(RAGGED, long), *windows_of(RAGGED[:2], 1, seed=1)]  # with an incomplete last window
    growing = [*windows_of(RAGGED, 5), *windows_of(RAGGED[:3], 5, seed=1)]
    first, second, third = windows_of(RAGGED, 3)
    masked = [*first[:3], NAN]
    return [
        ({"clip_norm": 0.1}, known, known),
        # One microbatch says nothing, and means forget nothing for it.
        ({"accumulate_step": {0: 4, 5: 1, 7: 3}, "decay": 0.5}, [*growing[:5], *windows_of([4], 2), *growing[5:]], growing),
        ({"on_nonfinite": "skip_microbatch"}, [masked, [NAN[:1], *second], third], [first[:3], second, third]),
        ({"on_nonfinite": "skip_window"}, [masked, [NAN[:1], *second[1:]], third], [first[:3], third]),
        ({"on_nonfinite": "apply"}, [masked, [NAN[:1], *second[1:]], third], [first[:3], third]),  # the means are not lost
    ]


def test_estimates_are_those_of_numpy(mode):
    """All in one graph. NaN has weight 0 where it is of two samples; compiled, the windows are enough for the known answer."""
    cases = rows(60 if mode == "jit" else 3)
    accumulators = tuple([build(**options)[1] for options, _, _ in cases])

    def train_step(gradients, weights):
        return tuple([acc((gradients[i],), weights[i]) for i, acc in enumerate(accumulators)])

    train_step = compiled(train_step, mode)
    streams = [[x for window in windows for x in window] for _, windows, _ in cases]
    for i in range(max(map(len, streams))):
        row = [stream[i] if i < len(stream) else np.zeros((1, FEATURES)) for stream in streams]
        weights = [0 if x.shape == NAN.shape and np.isnan(x).any() else len(x) for x in row]
        train_step(Tensor(np.stack([gradient_of(x) for x in row]), ms.float32), Tensor(weights, ms.float32))
        for acc, stream, (options, windows, kept) in zip(accumulators, streams, cases):
            if len(stream) == i + 1:
                acc.flush()
                expected = estimates(kept, options.get("decay", 1.0))
                assert found(acc) == pytest.approx(expected, rel=1e-4), options
                assert int(acc.update_step) + int(acc.skipped) == len(windows) + (options.get("on_nonfinite") == "skip_microbatch")
                if len(windows) > 60:
                    assert found(acc) == pytest.approx((NOISE, SQUARED), rel=0.1)
                    assert acc.noise_scale.scale() == pytest.approx(NOISE / SQUARED, rel=0.1)


def test_what_is_wrong_is_seen():
    """Controls: microbatches that all count the same, a norm with its noise, and other means miss the answer by far."""
    windows = windows_of(RAGGED, 150)
    assert estimates(windows) == pytest.approx((NOISE, SQUARED), rel=0.1)
    assert not estimates(windows, weight_of=lambda x: 1)[0] * np.mean(RAGGED) == pytest.approx(NOISE, rel=0.1)
    biased = np.mean([(np.concatenate(window).mean(0) ** 2).sum() for window in windows])
    assert not biased == pytest.approx(SQUARED, rel=0.1)
    growing = rows(1)[1][2]
    assert not estimates(growing, 0.5)[0] == pytest.approx(estimates(growing)[0], rel=0.01)


@pytest.mark.usefixtures("uncompiled")  # compiled in test_adaptive.py
def test_pieces_are_the_small_batches():
    """pieces=3 cuts 13 samples into 5 + 5 + 3; a loss scale drops out."""
    network, acc = build(accumulate_step=2, loss_scaler=amp.StaticLossScaler(2.0**12))
    train_step = make_train_step(network, acc, pieces=3)
    coarse = windows_of([13, 13], 6)
    for x in (x for pair in coarse for x in pair):
        train_step(Tensor(x))
    windows = [[piece for x in pair for piece in np.split(x, [5, 10])] for pair in coarse]
    assert found(acc) == pytest.approx(estimates(windows), rel=1e-4)
    assert not found(acc)[0] == pytest.approx(estimates(coarse)[0], rel=0.003)  # control: of two gradients of 13 samples
    assert acc.noise_scale.microbatch_weight == 13
    assert acc.noise_scale.windows == (6, 0)


def test_resets_and_a_constant_weight_of_zero():
    """The accumulator's reset forgets the open window, its own the means."""
    first, second = windows_of(RAGGED, 2)
    _, acc = build()
    acc((Tensor(gradient_of(first[0]), ms.float32),), 3.0)
    acc.reset()
    for x in second:
        acc((Tensor(gradient_of(x), ms.float32),), float(len(x)))
    assert found(acc) == pytest.approx(estimates([second]), rel=1e-4)
    acc.noise_scale.reset()
    assert isnan(acc.noise_scale.scale())
    assert isnan(acc.noise_scale.microbatch_weight)
    acc((Tensor(NAN[0]),), 0)
    for x in first[:3]:
        acc((Tensor(gradient_of(x), ms.float32),), float(len(x)))
    acc.flush()
    assert found(acc) == pytest.approx(estimates([first[:3]]), rel=1e-4)


def test_a_gradient_lost_in_noise_has_an_infinite_scale():
    """Control: a window of one microbatch says nothing."""
    (_, acc), (_, one) = build(accumulate_step=2), build(accumulate_step=1)
    for sign in (1, -1):
        for accumulator in (acc, one):
            accumulator((Tensor(np.full(FEATURES, sign), ms.float32),), 4.0)
    assert acc.noise_scale.gradient_squared < 0
    assert acc.noise_scale.scale() == inf
    assert isnan(one.noise_scale.scale())


def accumulator_with(noise_scale):
    return Accumulator(nn.SGD([Parameter(Tensor([1.0]), name="w")], 0.1), 2, reduction="mean", noise_scale=noise_scale)


def test_it_belongs_to_one_accumulator_and_is_seen_in_its_fingerprint():
    assert len(accumulator_with(GradientNoiseScale()).parameters) - len(accumulator_with(None).parameters) == 4
    taken = GradientNoiseScale(0.5)
    assert accumulator_with(taken).fingerprint()["noise_scale"] == "GradientNoiseScale(decay=0.5)"
    with pytest.raises(ValueError, match=r"noise_scale is another accumulator's, .* give each accumulator its own"):
        accumulator_with(taken)


REFUSED = [
    (TypeError, r"decay is '1' of type str, expected a number with 0 < decay <= 1", GradientNoiseScale, ("1",)),
    (ValueError, r"decay is 0, expected a number with 0 < decay <= 1; 1 takes plain means", GradientNoiseScale, (0,)),
    (TypeError, r"noise_scale is of type bool, expected a GradientNoiseScale, or None", accumulator_with, (True,)),
]


def test_bad_arguments_are_refused():
    for error, message, function, arguments in REFUSED:
        with pytest.raises(error, match=message):
            function(*arguments)
