"""GradientNoiseScale against a problem whose answer is known and against NumPy; scale_lr."""
from math import inf, isnan

import mindspore as ms
import numpy as np
import pytest
import reference
from conftest import compiled
from mindspore import Parameter, ParameterTuple, Tensor, amp, nn

from ms_accum import Accumulator, GradientNoiseScale, load_checkpoint, make_train_step, save_checkpoint, scale_lr

FEATURES = 100
MEAN = np.full(FEATURES, 0.3)             # |G|² = 9
SPREAD = np.linspace(0.5, 1.5, FEATURES)  # S = sum of its squares
NOISE, SQUARED = (SPREAD**2).sum(), (MEAN**2).sum()
RAGGED = [3, 9, 1, 5]


def samples(n, rng):
    """Samples whose gradients (below) have the mean MEAN and the variance NOISE: float32 (n, FEATURES)."""
    return (MEAN + SPREAD * rng.normal(size=(n, FEATURES))).astype(np.float32)


class Position(nn.Cell):
    """Half the mean squared distance of the samples from a point: the gradient of a sample is point - sample. It stands at 0."""

    def __init__(self):
        super().__init__()
        self.point = Parameter(Tensor(np.zeros(FEATURES), ms.float32), name="point")

    def construct(self, x):
        return ((self.point - x) ** 2).sum(-1).mean() / 2


def build(accumulate_step=4, clip_norm=None, noise_scale=None, optimizer=nn.SGD, **options):
    network = Position()
    acc = Accumulator(optimizer([network.point], 1e-30), accumulate_step, clip_norm, reduction="mean",
                      noise_scale=noise_scale or GradientNoiseScale(decay=1), **options)
    return network, acc


def estimates(windows, decay=1.0):
    """S and |G|² from windows of microbatches of samples."""
    return reference.noise_and_signal([[(-x.mean(0, dtype=np.float64), len(x)) for x in window] for window in windows], decay)


def drive(acc, windows, mode="pynative", weight_of=len):
    def train_step(gradient, weight):
        return acc((gradient,), weight)

    train_step = compiled(train_step, mode)
    for window in windows:
        for x in window:
            train_step(Tensor(-x.mean(0)), Tensor(weight_of(x), ms.float32))
    acc.flush()


def windows_of(sizes, count, seed=0):
    rng = np.random.default_rng(seed)
    return [[samples(n, rng) for n in sizes] for _ in range(count)]


# --- right -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("mode", "clip_norm"), [("jit", None), ("graph", 0.1), ("pynative", None)])
def test_the_known_answer_is_found(mode_named, mode, clip_norm):
    """S = 108.5, |G|² = 9, from windows of ragged microbatches and a short last one; clipping changes nothing."""
    windows = [*windows_of(RAGGED, 150), *windows_of(RAGGED[:2], 1, seed=1)]
    _, acc = build(clip_norm=clip_norm)
    drive(acc, windows, mode_named(mode))
    found = acc.noise_scale
    assert found.noise == pytest.approx(NOISE, rel=0.1)
    assert found.gradient_squared == pytest.approx(SQUARED, rel=0.1)
    assert found.scale() == pytest.approx(NOISE / SQUARED, rel=0.1)
    assert (found.noise, found.gradient_squared) == pytest.approx(tuple(estimates(windows)), rel=1e-4)
    assert int(acc.update_step) == 151


def test_what_is_wrong_is_seen():
    """Controls: microbatches that all count the same, and a norm that is not cleared of noise, miss the answer by far."""
    windows = windows_of(RAGGED, 150)
    _, acc = build()
    drive(acc, windows, weight_of=lambda x: 1.0)
    assert not acc.noise_scale.noise * np.mean(RAGGED) == pytest.approx(NOISE, rel=0.1)
    biased = np.mean([(np.concatenate(window).mean(0) ** 2).sum() for window in windows])
    assert not biased == pytest.approx(SQUARED, rel=0.1)


@pytest.mark.parametrize("options", [{}, {"strategy": "split"}, {"loss_scaler": 2.0**12}])
def test_pieces_are_the_small_batches(monkeypatch, options):
    """micro_size=3 cuts 13 samples into 5 + 5 + 3; a loss scale drops out."""
    if "loss_scaler" in options:
        options = {"loss_scaler": amp.StaticLossScaler(options["loss_scaler"])}
        monkeypatch.setenv("MS_JIT", "0")
    network, acc = build(accumulate_step=2)
    train_step = make_train_step(network, acc, micro_size=3, **options)
    rng = np.random.default_rng(0)
    windows = []
    for _ in range(6):
        batches = [samples(13, rng) for _ in range(2)]
        windows.append([piece for x in batches for piece in np.split(x, [5, 10])])
        for x in batches:
            train_step(Tensor(x))
    found = acc.noise_scale
    assert (found.noise, found.gradient_squared) == pytest.approx(tuple(estimates(windows)), rel=1e-4)
    if not options:  # control: of two gradients of 13 samples, it is another estimate
        coarse = estimates([[np.concatenate(window[:3]), np.concatenate(window[3:])] for window in windows])
        assert not found.noise == pytest.approx(coarse[0], rel=0.003)


def test_decay_weighs_the_latest_windows_most():
    windows = [*windows_of(RAGGED, 5), *windows_of(RAGGED[:3], 5, seed=1)]
    _, acc = build(accumulate_step={0: 4, 5: 3}, noise_scale=GradientNoiseScale(decay=0.5))
    drive(acc, windows)
    expected = estimates(windows, decay=0.5)
    assert (acc.noise_scale.noise, acc.noise_scale.gradient_squared) == pytest.approx(tuple(expected), rel=1e-4)
    assert not expected[0] == pytest.approx(estimates(windows)[0], rel=0.01)


# --- what counts nothing -----------------------------------------------------------------------------------------------


def test_windows_of_one_microbatch_say_nothing(mode):
    _, acc = build(accumulate_step=1)
    drive(acc, windows_of([4], 3), mode)
    acc.apply()  # and an empty one
    assert int(acc.update_step) == 4
    assert isnan(acc.noise_scale.scale())
    assert isnan(acc.noise_scale.noise)
    assert isnan(acc.noise_scale.gradient_squared)


def test_a_window_of_one_microbatch_leaves_the_means_alone():
    _, acc = build(accumulate_step={0: 4, 1: 1}, noise_scale=GradientNoiseScale(decay=0.5))
    drive(acc, windows_of(RAGGED, 1))
    totals = acc.noise_scale.totals.asnumpy().copy()
    assert totals[2] == 3
    drive(acc, windows_of([4], 2))
    assert int(acc.update_step) == 3
    assert acc.noise_scale.totals.asnumpy().tolist() == totals.tolist()


def test_a_microbatch_of_weight_zero_measures_nothing_be_it_nan():
    """As one rank's part of a microbatch that others have, too."""
    gradients = (Tensor([np.nan, 1.0], ms.float32),)
    for weight in (0.0, Tensor(0.0, ms.float32)):
        assert [float(value) for value in GradientNoiseScale().measure(gradients, weight)] == [0.0, 0.0]
    assert np.isnan(float(GradientNoiseScale().measure(gradients, Tensor(2.0, ms.float32))[0]))


@pytest.mark.parametrize(("mode", "on_nonfinite"), [
    ("jit", "skip_microbatch"), ("jit", "skip_window"),
    ("pynative", "skip_microbatch"), ("pynative", "skip_window"), ("pynative", "apply")])
def test_weight_zero_and_nan_count_nothing(mode_named, mode, on_nonfinite):
    """A NaN of weight 0 in the first window, a NaN that is skipped in the second."""
    first, second, third = windows_of(RAGGED, 3)
    mode_named(mode)
    _, acc = build(accumulate_step=4, on_nonfinite=on_nonfinite)
    spoilt = np.full((2, FEATURES), np.nan, np.float32)

    def weight_of(x):
        return 0.0 if len(x) == 2 else len(x)

    drive(acc, [[*first[:3], spoilt]], mode, weight_of)
    assert acc.noise_scale.noise == pytest.approx(estimates([first[:3]])[0], rel=1e-4)
    bad = np.full((3, FEATURES), np.nan, np.float32)
    if on_nonfinite == "skip_microbatch":
        drive(acc, [[bad, *second]], mode)
        kept = [first[:3], second]
    else:  # with "apply", the network is lost, the means are not
        drive(acc, [[bad, *second[1:]]], mode)
        kept = [first[:3]]
    drive(acc, [third], mode)
    assert acc.noise_scale.noise == pytest.approx(estimates([*kept, third])[0], rel=1e-4)


def test_resets():
    """The accumulator's forgets the open window, its own forgets the means."""
    first, second = windows_of(RAGGED, 2)
    _, acc = build()
    acc((Tensor(-first[0].mean(0)),), 3.0)
    acc.reset()
    drive(acc, [second])
    assert acc.noise_scale.noise == pytest.approx(estimates([second])[0], rel=1e-4)
    acc.noise_scale.reset()
    assert isnan(acc.noise_scale.scale())
    drive(acc, [first])
    assert acc.noise_scale.noise == pytest.approx(estimates([first])[0], rel=1e-4)


def test_a_gradient_lost_in_noise_has_an_infinite_scale():
    _, acc = build(accumulate_step=2)
    gradient = np.ones(FEATURES, np.float32)
    for sign in (1, -1):
        acc((Tensor(sign * gradient),), 4.0)
    assert acc.noise_scale.gradient_squared < 0
    assert acc.noise_scale.scale() == inf


# --- state -------------------------------------------------------------------------------------------------------------


def test_checkpoints_carry_it(tmp_path):
    windows = windows_of(RAGGED, 2)
    results = []
    for resumed in (False, True):
        network, acc = build()
        drive(acc, windows[:1])
        acc((Tensor(-windows[1][0].mean(0)),), 3.0)
        if resumed:
            save_checkpoint(tmp_path / "run.ckpt", network, acc)
            network, acc = build()
            load_checkpoint(tmp_path / "run.ckpt", network, acc)
        for x in windows[1][1:]:
            acc((Tensor(-x.mean(0)),), float(len(x)))
        results.append((acc.noise_scale.noise, acc.noise_scale.gradient_squared))
    assert results[0] == results[1] == pytest.approx(tuple(estimates(windows)), rel=1e-4)
    names = [p.name for p in acc.parameters]
    assert [name.split(".", 1)[1] for name in names[-2:]] == ["noise_scale.window", "noise_scale.totals"]
    assert len({name.split(".")[0] for name in names}) == 1


def test_without_it_nothing_is_added():
    weights = ParameterTuple([Parameter(Tensor([1.0]), name="w")])
    off = Accumulator(nn.SGD(weights, 0.1), 2, reduction="mean")
    on = Accumulator(nn.SGD(weights, 0.1), 2, reduction="mean", noise_scale=GradientNoiseScale())
    assert len(on.parameters) - len(off.parameters) == 2
    assert float(on.grad_norm) == 0.0


# --- bad input ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("error", "message", "decay"), [
    (TypeError, r"decay is '1' of type str, expected a number; give 0 < decay <= 1", "1"),
    (TypeError, r"decay is True", True),
    (ValueError, r"decay is 0, expected 0 < decay <= 1; 1 takes plain means", 0),
    (ValueError, r"decay is 1\.5", 1.5),
    (ValueError, r"decay is nan", float("nan")),
])
def test_bad_decays_are_refused(error, message, decay):
    with pytest.raises(error, match=message):
        GradientNoiseScale(decay)


def test_accumulators_it_does_not_fit_are_refused():
    weights = [Parameter(Tensor([1.0]), name="w")]
    with pytest.raises(TypeError, match=r"noise_scale is of type bool, expected a GradientNoiseScale, or None; give Gradient"):
        Accumulator(nn.SGD(weights, 0.1), 2, reduction="mean", noise_scale=True)
    noise_scale = GradientNoiseScale()
    with pytest.raises(ValueError, match=r"noise_scale with reduction='sum': .* give reduction=\"mean\" and the number of samples"):
        Accumulator(nn.SGD(weights, 0.1), 2, noise_scale=noise_scale)
    Accumulator(nn.SGD(weights, 0.1), 2, reduction="mean", noise_scale=noise_scale)
    with pytest.raises(ValueError, match=r"noise_scale is another accumulator's, .* give each accumulator its own"):
        Accumulator(nn.SGD(weights, 0.1), 2, reduction="mean", noise_scale=noise_scale)


# --- scale_lr ----------------------------------------------------------------------------------------------------------


def test_scale_lr():
    assert scale_lr(0.1, 8) == pytest.approx(0.8)
    assert scale_lr(0.1, 16, rule="sqrt") == pytest.approx(0.4)
    assert scale_lr(0.1, 1, rule="sqrt") == scale_lr(0.1, 1) == 0.1


@pytest.mark.parametrize(("error", "message", "arguments"), [
    (TypeError, r"lr is \[0\.1\] of type list, expected a number; scale each rate", ([0.1], 2)),
    (TypeError, r"lr is True", (True, 2)),
    (ValueError, r"lr is 0, expected a finite number > 0", (0, 2)),
    (ValueError, r"lr is inf", (inf, 2)),
    (TypeError, r"accumulate_step is 2\.0 of type float, expected an int >= 1; of a schedule", (0.1, 2.0)),
    (TypeError, r"accumulate_step is True", (0.1, True)),
    (ValueError, r"accumulate_step is 0, expected an int >= 1", (0.1, 0)),
    (ValueError, r"rule is 'cubic', expected one of 'linear', 'sqrt'", (0.1, 2, "cubic")),
    (ValueError, r"rule is 2, expected one of", (0.1, 2, 2)),
])
def test_scale_lr_refuses(error, message, arguments):
    with pytest.raises(error, match=message):
        scale_lr(*arguments)
