"""AdaptiveWindow: the rule against any measurements, and a whole run against the formula in NumPy."""
import random
from types import SimpleNamespace

import mindspore as ms
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mindspore import Tensor, nn, ops
from support.comparing import difference
from support.noisy_samples import Expected, Position, noisy

from ms_accum import Accumulator, CheckpointError, TrainOneStepCell, load_checkpoint, make_train_step, save_checkpoint
from ms_accum.batch_size import AdaptiveWindow, GradientNoiseScale


def build(window, rate=1e-30, pieces=1, name=None, **options):
    """(network, accumulator, `(x) -> None` that trains on a microbatch)."""
    network = Position(name)
    acc = Accumulator(nn.SGD([network.point], rate), window, reduction="mean", **options)
    step = make_train_step(network, acc, pieces=pieces)
    return network, acc, lambda x: step(Tensor(x))


def measuring(chosen, window):
    """What a noise scale has measured, as the test says, and the length that follows it from `chosen` on."""
    measured = SimpleNamespace(noise=1e9, gradient_squared=1.0, microbatch_weight=1.0, windows=(0, 0))
    length = window.bind(measured, "measuring")[0]
    ops.assign(length.chosen, chosen)
    return measured, length


POSITIVE = st.floats(1e-6, 1e6)


@given(noise=st.floats(0, 1e6), signal=st.floats(-10, 1e4), weight=POSITIVE, target=POSITIVE, power=st.integers(0, 6),
       most=st.integers(1, 64))
def test_a_length_is_doubled_or_halved_where_the_noise_scale_asks_for_it(noise, signal, weight, target, power, most):
    chosen = min(2**power, 2 ** (most.bit_length() - 1))
    measured, length = measuring(chosen, AdaptiveWindow(maximum=most, target=target))
    measured.noise, measured.gradient_squared = noise, signal
    measured.microbatch_weight, measured.windows = weight, (8, 0)
    allowed = signal * target * weight * chosen
    longer, shorter = noise > 2**0.75 * allowed, 2**0.75 * noise < allowed
    expected = chosen
    if longer or shorter:
        expected = min(2 * chosen, 2 ** (most.bit_length() - 1)) if longer else max(chosen // 2, 1)
    assert length.length == length.host_length(3) == int(length.chosen) == expected
    measured.noise, measured.windows = np.nan, (16, 0)
    assert length.length == expected


def test_a_change_needs_eight_windows_and_each_eighth_window_of_one_microbatch_measures():
    """Since the last change, and since a reset of the noise scale."""
    measured, length = measuring(2, AdaptiveWindow(maximum=64))
    for windows, expected in ((0, 2), (7, 2), (8, 4), (15, 4), (16, 8), (3, 8), (7, 8), (8, 16), (9, 16), (16, 32),
                              (99, 64), (199, 64)):
        measured.windows = (windows, 0)
        assert length.length == expected
    for maximum, eighth in ((64, 2), (1, 1)):
        measured, length = measuring(1, AdaptiveWindow(maximum=maximum))
        for unmeasured in range(9):
            measured.windows = (0, unmeasured)
            assert (length.length, int(length.chosen)) == (eighth if unmeasured >= 7 else 1, 1)


def test_lengths_and_updates_are_those_of_the_formula():
    """Ragged microbatches, pieces, NaN, windows closed early and dropped by hand; the noise scale and lengths fall."""
    draw, pieces, rate = random.Random(2), 2, 1e-3
    data = [x for scale in (150, 1) for x in noisy([draw.choice((4, 16)) for _ in range(180)], scale)]
    data[40][0, 0] = np.nan
    expected = Expected(1, 4, 0.5, rate)
    _, acc, step = build(AdaptiveWindow(maximum=4, target=0.5), rate, pieces, on_nonfinite="skip_microbatch")
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
    noise, signal, count = expected.adaptive.totals
    measured = [acc.noise_scale.noise, acc.noise_scale.gradient_squared]
    assert measured == pytest.approx([noise / count, signal / count], rel=1e-4)
    assert acc.noise_scale.microbatch_weight == pytest.approx(np.divide(*expected.adaptive.sizes), rel=1e-5)
    assert lengths[0] < max(lengths) > lengths[-2], "nothing was adapted"


def test_each_accumulator_has_its_own_length_which_a_checkpoint_holds():
    """And the noise scale that it was given. In an open window, other bounds are refused."""
    window, noise_scale = AdaptiveWindow(minimum=2, maximum=32), GradientNoiseScale(0.5)
    (network, one, _), (_, other, _) = build(window, name="saved"), build(window, noise_scale=noise_scale)
    ops.assign(one.window.chosen, 4)
    ops.assign(one.window.measured, 7)
    ops.assign(one.noise_scale.parameters[-1], Tensor([9, 0], ms.int32))  # windows that it has measured
    assert (one.window.length, other.window.length) == (4, 2)
    assert (one.noise_scale.decay, other.noise_scale) == (0.95, noise_scale)
    ops.assign(one.mini_step, 1)
    save_checkpoint("c.ckpt", network, one)
    network, again, _ = build(window, name="saved")
    load_checkpoint("c.ckpt", network, again)
    assert (again.window.length, int(again.window.measured)) == (4, 7)
    network, wrong, _ = build(AdaptiveWindow(minimum=2, maximum=16), name="saved")
    with pytest.raises(CheckpointError, match=r"accumulate_step AdaptiveWindow\(minimum=2, maximum=32, target=1\)"):
        load_checkpoint("c.ckpt", network, wrong)


@pytest.mark.parametrize(("error", "message", "arguments"), [
    (TypeError, r"minimum is 1.5 of type float, expected an int >= 1", {"minimum": 1.5}),
    (ValueError, r"maximum is 3, expected at least minimum=4; give both", {"minimum": 4, "maximum": 3}),
    (ValueError, r"maximum is 4294967296, expected at most", {"maximum": 2**32}),
    (ValueError, r"target is inf, expected a finite number > 0", {"target": float("inf")}),
])
def test_bad_arguments_are_refused(error, message, arguments):
    with pytest.raises(error, match=message):
        AdaptiveWindow(**arguments)


def test_where_the_device_closes_windows_it_is_refused():
    """By hand, compiled or not, and in a cell."""
    network = Position()
    by_hand, inside = (Accumulator(nn.SGD([network.point], 0.1), AdaptiveWindow(), reduction="mean") for _ in range(2))
    x, cell = Tensor(noisy([4], 1.0)[0]), TrainOneStepCell(network, inside)

    def full():
        return by_hand.is_full()

    message = r"AdaptiveWindow\(minimum=1, maximum=64, target=1\) lets the host choose .*; give it to make_train_step"
    for function, arguments in ((full, ()), (ms.jit(full), ()), (cell, (x,))):
        with pytest.raises(RuntimeError, match=message):
            function(*arguments)
