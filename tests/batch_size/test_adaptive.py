"""AdaptiveWindow: the lengths are those of the formula in NumPy, with each driver; they end where the noise scale is."""
import random

import mindspore as ms
import numpy as np
import pytest
from conftest import difference
from mindspore import Tensor, nn, ops
from mindspore.dataset import GeneratorDataset
from mindspore.train import Model
from noisy_samples import Expected, Position, noisy

from ms_accum import (
    Accumulator,
    AdaptiveWindow,
    CheckpointError,
    FlushCallback,
    GradientNoiseScale,
    TrainOneStepCell,
    WindowLog,
    load_checkpoint,
    make_train_step,
    save_checkpoint,
)

DRIVERS = ("split", "fused", "hand-jit", "hand-pynative", "cell-graph", "cell-pynative")


def build(driver, window, rate, micro_size=1, name=None, **options):
    """(network, accumulator, `(x) -> None` that trains on a microbatch)."""
    network = Position(name)
    acc = Accumulator(nn.SGD([network.point], rate), window, reduction="mean", **options)
    kind, _, how = driver.partition("-")
    if kind in ("split", "fused"):
        return network, acc, make_train_step(network, acc, strategy=kind, micro_size=micro_size)
    if kind == "cell":
        ms.set_context(mode=ms.GRAPH_MODE if how == "graph" else ms.PYNATIVE_MODE)
        return network, acc, TrainOneStepCell(network, acc, micro_size=micro_size)
    grad_fn = ms.value_and_grad(network, None, acc.optimizer.parameters)

    def train_step(x):
        loss, grads = grad_fn(x)
        return ops.depend(loss, acc(grads, x.shape[0]))

    return network, acc, ms.jit(train_step) if how == "jit" else train_step


@pytest.fixture(autouse=True)
def _mode():
    yield
    ms.set_context(mode=ms.PYNATIVE_MODE)


@pytest.mark.parametrize("driver", DRIVERS)
def test_lengths_and_updates_are_those_of_the_formula(driver):
    """Ragged microbatches, pieces, NaN, flushes in the middle, a point that moves; the noise scale falls, and lengths follow it down."""
    draw = random.Random(driver)
    minimum, maximum = draw.choice([(1, 4), (1, 8), (2, 16), (3, 13)])
    target, rate = draw.choice([0.5, 1.0, 2.0]), draw.choice([1e-3, 3e-3])
    skips = draw.choice(["", "skip_window", "skip_microbatch"])
    micro_size = draw.choice([1, 2]) if not driver.startswith("hand") else 1
    data = [x for i, scale in enumerate((150, 1)) for x in noisy([draw.choice([4, 8]) for _ in range(180)], scale, i)]
    if skips:
        data[40][0, 0] = np.nan
    expected = Expected(minimum, maximum, target, rate, skips)
    window = AdaptiveWindow(minimum=minimum, maximum=maximum, target=target)
    _, acc, step = build(driver, window, rate, micro_size, on_nonfinite=skips or "apply")
    lengths = []
    for i, x in enumerate(data):
        step(Tensor(x))
        expected.microbatch(*np.split(x, micro_size))
        if i in (100, 359):
            acc.flush()
            expected.flush()
        if len(expected.lengths) > len(lengths):
            lengths.append(acc.window_length)
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


def test_the_accumulator_ends_there_too():
    """The same as the first row above, on the device; control: the other target."""
    found = []
    for target in (1.0, 4.0):
        _, acc, step = build("fused", AdaptiveWindow(target=target), 1e-30)
        for x in noisy([4] * 1200, 128):
            step(Tensor(x))
        found.append(acc.window_length)
    assert found[0] == 32 != found[1]


def test_the_first_change_comes_when_eight_windows_were_measured():
    """Of windows of one microbatch, each eighth has two; pieces are compared in each."""
    for micro_size, first in ((1, 72), (2, 8)):
        _, acc, step = build("fused", AdaptiveWindow(), 1e-30, micro_size)
        data, changed = noisy([4] * 80, 1e6), None
        for i, x in enumerate(data):
            step(Tensor(x))
            if changed is None and int(acc.window.adaptive.chosen) > 1:
                changed = i + 1
        assert changed == first


@pytest.mark.parametrize("driver", ["split", "fused", "cell-graph", "cell-pynative"])
def test_resume_across_a_change_is_bit_identical(driver, tmp_path):
    """Saved in the middle of the last window before a change, and of the first one after it."""
    data = noisy([4] * 60, 1e6)
    window = AdaptiveWindow(minimum=2, maximum=32)

    def state(acc):
        return [p.asnumpy().tobytes() for p in (*acc.optimizer.parameters, *acc.parameters)]

    _, acc, step = build(driver, window, 1e-2, name="resumed")
    lengths = []
    for i, x in enumerate(data):
        step(Tensor(x))
        lengths.append(acc.window_length)
        if i in (14, 18):
            assert int(acc.mini_step) > 0
            save_checkpoint(tmp_path / f"{i}.ckpt", Holder(acc), acc, extra=i)
    assert lengths[14] == 2 < lengths[18] == 4 < lengths[-1]
    for saved in (14, 18):
        _, again, step = build(driver, window, 1e-2, name="resumed")
        if saved == 18:
            step(Tensor(data[3]))  # a graph that is compiled already
        assert load_checkpoint(tmp_path / f"{saved}.ckpt", Holder(again), again) == saved
        assert again.window_length == lengths[saved]
        for i, x in enumerate(data[saved + 1:]):
            step(Tensor(x))
            assert again.window_length == lengths[saved + 1 + i]
        assert state(again) == state(acc)
    _, other, _ = build("split", AdaptiveWindow(minimum=2, maximum=16), 1e-2, name="resumed")
    with pytest.raises(CheckpointError, match=r"accumulate_step AdaptiveWindow\(minimum=2, maximum=32, target=1\), but this run"):
        load_checkpoint(tmp_path / "14.ckpt", Holder(other), other)


class Holder(nn.Cell):
    """A network that holds what an accumulator's optimizer updates."""

    def __init__(self, acc):
        super().__init__(auto_prefix=False)
        self.point = acc.optimizer.parameters[0]


def test_microbatches_that_become_larger_make_windows_shorter():
    """From 4 samples to 32. The mean of their weights forgets those of old, as the formula says."""
    expected = Expected(1, 32, 1.0, 1e-30)
    _, acc, step = build("fused", AdaptiveWindow(maximum=32), 1e-30)
    lengths = []
    for x in noisy([4] * 200 + [32] * 100, 40):
        step(Tensor(x))
        expected.microbatch(x)
        lengths.append(acc.window_length)
        assert lengths[-1] == expected.adaptive.length
    assert max(lengths[:200]) == 8 > 2 >= lengths[-1]


def test_after_a_reset_of_the_noise_scale_eight_windows_are_measured_again():
    """Control: without the reset, the first of them would change the length."""
    for resets in (True, False):
        _, acc, step = build("fused", AdaptiveWindow(minimum=2), 1e-30)
        data, lengths = noisy([4] * 32, 1e6), []
        for i, x in enumerate(data):
            if resets and i == 14:
                acc.noise_scale.reset()
            step(Tensor(x))
            lengths.append(acc.window_length)
        assert lengths.index(4) == (29 if resets else 15)


def test_what_several_accumulators_share_and_what_is_closed_by_hand():
    """One AdaptiveWindow for two accumulators: each has its own length. Windows that are closed early count, dropped ones do not."""
    window = AdaptiveWindow(minimum=2)
    (_, one, step), (_, other, _) = (build("split", window, 1e-30) for _ in range(2))
    data = noisy([4] * 60, 1e6)
    for x in data[:32]:
        step(Tensor(x))
    assert (one.window_length, other.window_length) == (4, 2)
    expected = Expected(2, 64, 1.0, 0.0)
    _, acc, step = build("split", window, 1e-30)
    for i, x in enumerate(data):
        step(Tensor(x))
        expected.microbatch(x)
        if i % 5 == 0:
            expected.flush()
            acc.apply() if int(acc.mini_step) and i % 2 else acc.flush()
        if i % 11 == 7:
            expected.window, expected.mini_step, expected.of_a_rank = [], 0, 0
            acc.reset()
        assert acc.window_length == expected.adaptive.length
    assert acc.window_length > 2


def test_gradients_without_noise_and_without_signal():
    """All alike: windows get short. All zero: they stay."""
    for value, length in ((1.0, 1), (0.0, 4)):
        _, acc, step = build("fused", AdaptiveWindow(maximum=4), 1e-30)
        for x in noisy([4] * 100, 1e6):
            step(Tensor(x))
        assert acc.window_length == 4
        for _ in range(200):
            step(Tensor(np.full((4, 100), value, np.float32)))
        assert int(acc.window.adaptive.chosen) == length


def test_the_log_shows_each_length(tmp_path):
    network = Position()
    cell = TrainOneStepCell(network, nn.SGD([network.point], 1e-30), AdaptiveWindow(minimum=2, maximum=8))
    rows = []
    data = GeneratorDataset([(x,) for x in noisy([4] * 61, 1e6)], ["x"], shuffle=False)
    Model(cell).train(1, data, callbacks=[FlushCallback(), WindowLog(rows.append)], dataset_sink_mode=False)
    held = np.diff([0, *(row["microbatch"] for row in rows)])
    assert [2, *(row["next_length"] for row in rows[:-1])] == [*held[:-1], rows[-2]["next_length"]]
    assert sorted(set(held[:-1])) == [2, 4, 8]
    assert held[-1] < 8  # the incomplete one
    assert np.isnan(rows[0]["noise_scale"]) or rows[0]["noise_scale"] > 0
    assert rows[-1]["noise_scale"] == pytest.approx(cell.accumulator.noise_scale.scale())


def test_its_own_measure_is_used_if_one_is_given():
    noise_scale = GradientNoiseScale(0.5)
    _, acc, _ = build("split", AdaptiveWindow(), 0.1, noise_scale=noise_scale)
    assert acc.noise_scale is noise_scale
    _, acc, _ = build("split", AdaptiveWindow(), 0.1)
    assert acc.noise_scale.decay == 0.95


@pytest.mark.parametrize(("error", "message", "arguments"), [
    (TypeError, r"minimum is 1.5 of type float, expected an int >= 1", {"minimum": 1.5}),
    (ValueError, r"minimum is 0, expected an int >= 1", {"minimum": 0}),
    (TypeError, r"maximum is True of type bool, expected an int >= 1", {"maximum": True}),
    (ValueError, r"maximum is 3, expected at least minimum=4; give both", {"minimum": 4, "maximum": 3}),
    (ValueError, r"maximum is 4294967296, expected at most", {"maximum": 2**32}),
    (ValueError, r"target is 0, expected a finite number > 0", {"target": 0}),
    (ValueError, r"target is inf, expected a finite number > 0", {"target": float("inf")}),
    (TypeError, r"target is '1' of type str, expected", {"target": "1"}),
])
def test_bad_arguments_are_refused(error, message, arguments):
    with pytest.raises(error, match=message):
        AdaptiveWindow(**arguments)


def test_what_cannot_be_measured_is_refused():
    optimizer = nn.SGD([Position().point], 0.1)
    with pytest.raises(ValueError, match=r"got an AdaptiveWindow with reduction='sum'"):
        Accumulator(optimizer, AdaptiveWindow())
    with pytest.raises(ValueError, match=r"got an AdaptiveWindow with losses=2"):
        Accumulator(optimizer, AdaptiveWindow(), reduction="mean", losses=2)
    with pytest.raises(TypeError, match=r"accumulate_step is AdaptiveWindow itself, expected what it returns; give AdaptiveWindow\(\)"):
        Accumulator(optimizer, AdaptiveWindow, reduction="mean")
