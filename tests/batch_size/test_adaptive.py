"""AdaptiveWindow: the lengths are those of the formula in NumPy, and end where the noise scale is."""
import random

import mindspore as ms
import numpy as np
import pytest
from conftest import difference
from mindspore import Tensor, nn
from noisy_samples import Expected, Position, noisy

from ms_accum import Accumulator, CheckpointError, TrainOneStepCell, load_checkpoint, make_train_step, save_checkpoint
from ms_accum.batch_size import AdaptiveWindow, GradientNoiseScale


def build(window, rate=1e-30, pieces=1, name=None, **options):
    """(network, accumulator, `(x) -> None` that trains on a microbatch)."""
    network = Position(name)
    acc = Accumulator(nn.SGD([network.point], rate), window, reduction="mean", **options)
    step = make_train_step(network, acc, pieces=pieces)
    return network, acc, lambda x: step(Tensor(x))


@pytest.mark.parametrize(("seed", "skips"), [(0, ""), (1, ""), (2, "skip_window"), (3, "skip_microbatch")])
def test_lengths_and_updates_are_those_of_the_formula(seed, skips):
    """Ragged microbatches, pieces, NaN, windows closed early and dropped by hand; microbatches grow, the noise scale falls, and
    lengths follow it down.
    """
    draw = random.Random(seed)
    minimum, maximum = draw.choice([(1, 4), (1, 8), (2, 16), (3, 13)])
    target, rate = draw.choice([0.5, 1.0, 2.0]), draw.choice([1e-3, 3e-3])
    pieces = draw.choice([1, 2])
    data = [x for scale, sizes in ((150, (4, 8)), (1, (8, 32))) for x in noisy([draw.choice(sizes) for _ in range(180)], scale, seed)]
    if skips:
        data[40][0, 0] = np.nan
    expected = Expected(minimum, maximum, target, rate, skips)
    _, acc, step = build(AdaptiveWindow(minimum=minimum, maximum=maximum, target=target), rate, pieces, on_nonfinite=skips or "apply")
    lengths = []
    for i, x in enumerate(data):
        step(x)
        expected.microbatch(*np.split(x, pieces))
        if i in (70, 100, 359):
            expected.flush()
            acc.apply() if i == 70 and int(acc.mini_step) else acc.flush()
        if i == 120:
            expected.window, expected.mini_step, expected.of_a_rank = [], 0, 0
            acc.reset()
        if len(expected.lengths) > len(lengths):
            assert acc.window.length == acc.window.host_length(int(acc.update_step))
            lengths.append(acc.window.length)
            assert int(acc.update_step) == len(lengths)
    assert lengths == expected.lengths
    assert difference([acc.optimizer.parameters[0].asnumpy()], [expected.point]) < 1e-5
    assert lengths[0] < max(lengths) > lengths[-2], "nothing was adapted"


def ends(scale, target, begin=1):
    """The lengths in NumPy, for microbatches of 4 samples."""
    expected = Expected(1, 64, target, rate=0.0)
    expected.adaptive.length = expected.adaptive.chosen = begin
    for x in noisy([4] * 3200, scale):
        expected.microbatch(x)
    return expected.lengths


@pytest.mark.parametrize(("scale", "target", "right"), [(128, 1.0, 32), (32, 1.0, 8), (32, 0.5, 16), (4, 1.0, 1), (1e6, 1.0, 64)])
def test_it_ends_at_the_right_power_of_two_and_stays(scale, target, right):
    """Noise scale / target / 4 microbatches, from below and above. Control: with a wrong target it ends elsewhere."""
    for begin in (1, 64):
        lengths = ends(scale, target, begin)
        late = set(lengths[-max(len(lengths) // 4, 4):])
        assert late == {right} or (right == 1 and late == {1, 2}), lengths  # of 1, some are 2 to measure
    assert ends(scale, 4 * target)[-1] != right or right in (1, 64)


def test_the_first_change_comes_when_eight_windows_were_measured():
    """Of windows of one microbatch, each eighth has two; pieces are compared in each."""
    for pieces, first in ((1, 72), (2, 8)):
        _, acc, step = build(AdaptiveWindow(), pieces=pieces)
        chosen = []
        for x in noisy([4] * 80, 1e6):
            step(x)
            assert acc.window.length >= int(acc.window.chosen)  # more to measure
            chosen.append(int(acc.window.chosen))
        assert chosen.index(2) + 1 == first


def test_resume_across_a_change_is_bit_identical(tmp_path):
    """Saved in the middle of the last window before a change, before the first one after it, and in the middle of that."""
    data = noisy([4] * 60, 1e6)
    window = AdaptiveWindow(minimum=2, maximum=32)

    def state(acc):
        return [p.asnumpy().tobytes() for p in (*acc.optimizer.parameters, *acc.parameters)]

    network, acc, step = build(window, 1e-2, name="resumed")
    lengths = []
    for i, x in enumerate(data):
        step(x)
        if i in (14, 15, 18):
            save_checkpoint(tmp_path / f"{i}.ckpt", network, acc, extra=i)
        lengths.append(acc.window.length)
    assert lengths[14] == 2 < lengths[15] == lengths[18] == 4 < lengths[-1]
    for saved in (14, 15, 18):
        network, again, step = build(window, 1e-2, name="resumed")
        if saved == 18:
            step(data[3])  # a graph that is compiled already
        assert load_checkpoint(tmp_path / f"{saved}.ckpt", network, again) == saved
        assert again.window.length == lengths[saved]
        for i, x in enumerate(data[saved + 1:]):
            step(x)
            assert again.window.length == lengths[saved + 1 + i]
        assert state(again) == state(acc)
    network, other, _ = build(AdaptiveWindow(minimum=2, maximum=16), 1e-2, name="resumed")
    with pytest.raises(CheckpointError, match=r"accumulate_step AdaptiveWindow\(minimum=2, maximum=32, target=1\), but this run"):
        load_checkpoint(tmp_path / "14.ckpt", network, other)


def test_after_a_reset_of_the_noise_scale_eight_windows_are_measured_again():
    """Before and after a change. Control: without the reset, the first of them would change the length."""
    for reset_at, changes in ((14, [29, 61]), (None, [15, 47]), (40, [15, 71])):
        _, acc, step = build(AdaptiveWindow(minimum=2, maximum=8))
        lengths = []
        for i, x in enumerate(noisy([4] * 80, 1e6)):
            if i == reset_at:
                acc.noise_scale.reset()
            step(x)
            lengths.append(acc.window.length)
        assert [lengths.index(4), lengths.index(8)] == changes


def test_one_for_two_accumulators_and_a_noise_scale_of_the_users():
    """Each accumulator has its own length, and its own noise scale, or the one that was given."""
    window, noise_scale = AdaptiveWindow(minimum=2), GradientNoiseScale(0.5)
    _, one, step = build(window)
    _, other, _ = build(window, noise_scale=noise_scale)
    for x in noisy([4] * 32, 1e6):
        step(x)
    assert (one.window.length, other.window.length) == (4, 2)
    assert one.noise_scale.decay == 0.95
    assert other.noise_scale is noise_scale


def test_gradients_without_noise_and_without_signal():
    """All alike: windows get short. All zero: they stay."""
    for value, lengths in ((1.0, {1, 2}), (0.0, {4})):
        _, acc, step = build(AdaptiveWindow(maximum=4))
        for x in noisy([4] * 100, 1e6):
            step(x)
        assert acc.window.length == 4
        found = []
        for _ in range(200):
            step(np.full((4, 100), value, np.float32))
            found.append(acc.window.length)
        assert set(found[-20:]) == lengths


@pytest.mark.parametrize(("error", "message", "arguments"), [
    (TypeError, r"minimum is 1.5 of type float, expected an int >= 1", {"minimum": 1.5}),
    (ValueError, r"maximum is 3, expected at least minimum=4; give both", {"minimum": 4, "maximum": 3}),
    (ValueError, r"maximum is 4294967296, expected at most", {"maximum": 2**32}),
    (ValueError, r"target is inf, expected a finite number > 0", {"target": float("inf")}),
])
def test_bad_arguments_are_refused(error, message, arguments):
    with pytest.raises(error, match=message):
        AdaptiveWindow(**arguments)


def test_where_the_device_closes_windows_it_is_refused(mode):
    """By hand, compiled or not, and in a cell."""
    network = Position()
    by_hand, inside = (Accumulator(nn.SGD([network.point], 0.1), AdaptiveWindow(), reduction="mean") for _ in range(2))
    x, cell = Tensor(noisy([4], 1.0)[0]), TrainOneStepCell(network, inside)

    def full():
        return by_hand.is_full()

    message = r"AdaptiveWindow\(minimum=1, maximum=64, target=1\) lets the host choose .*; give it to make_train_step"
    for function, arguments in ((ms.jit(full) if mode == "jit" else full, ()), (cell, (x,))):
        with pytest.raises(RuntimeError, match=message):
            function(*arguments)
