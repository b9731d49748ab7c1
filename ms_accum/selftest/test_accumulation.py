"""Windows of samples and of tokens: ragged, incomplete, clipped, skipped, weighed, saved, and of one microbatch."""
from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from mindspore import amp

from ms_accum import load_checkpoint, save_checkpoint

from ..core.stages import LossScale
from .comparing import values
from .networks import targets
from .training import BOUNDS, Training, rows, samples, texts

CLIP_NORM = 0.8
# Windows have microbatches of two sizes: each size is compiled.
RAGGED = [samples((5, 2, 5), 2), samples((2, 5, 5), 12)]


@pytest.fixture(scope="module")
def training(driver: str, dtype: str) -> Training:
    """Return a training on samples."""
    return Training(driver, dtype, 3, clip_norm=CLIP_NORM, on_nonfinite="skip_window")


@pytest.fixture(scope="module")
def means(driver: str, dtype: str) -> Training:
    """Return a training whose loss is a mean over tokens."""
    return Training(driver, dtype, 2, weight_fn=targets, loss_scaler=amp.DynamicLossScaler(64, 2, 1000))


@pytest.fixture(scope="module")
def sums(driver: str, dtype: str) -> Training:
    """Return a training whose loss is a sum over tokens. By hand, each window divides by the same number of them."""
    return Training(driver, dtype, 2, reduction="sum", weight_fn=targets, divisor=14.0)


def learned(training: Training, windows: Sequence[Sequence[tuple]]) -> float:
    """Train on windows. Return the error."""
    expected = training.expect(windows)
    training.learn(windows)
    return training.off(expected)


@rows(quick="by hand, compiled")
def test_ragged_windows(training: Training, holds: Callable) -> None:
    """Parameters, the returned losses and the number of samples are those of the undivided batch."""
    expected = training.expect(RAGGED)
    seen = training.boundary.status().seen
    losses = [float(loss) for loss in training.learn(RAGGED)]
    seen = training.boundary.status().seen - seen
    assert seen == 24, f"{seen} samples were counted, expected 24"
    holds(training.off(expected), *np.abs(np.divide(losses, expected.losses) - 1))


@rows(quick="by hand, op by op")
def test_incomplete_window(training: Training, holds: Callable) -> None:
    """A window that ends early is divided by what it holds."""
    windows = [samples((5, 2), 0)]
    expected = training.expect(windows)
    training.learn(windows)
    assert training.flush(), "flush() closed no window"
    holds(training.off(expected))


@rows(quick="cell, PyNative")
def test_clipping(training: Training, holds: Callable) -> None:
    """The gradient of the whole window is clipped, and its norm before that is known."""
    windows = [samples((5, 2, 5), 2, loud=True), samples((2, 5, 5), 12, loud=True)]
    expected = training.expect(windows, clipped=True)
    training.learn(windows)
    holds(training.off(expected), abs(training.boundary.status().grad_norm / expected.norms[-1] - 1))


def spoilt(window: Sequence[tuple]) -> list[tuple]:
    """Return a window whose first microbatch holds only NaN."""
    (x, *others), *rest = window
    return [(np.full_like(x, np.nan), *others), *rest]


def after_nan(training: Training, windows: Sequence[Sequence[tuple]]) -> float:
    """Train on a window with NaN, which only halves the loss scale, and on good ones. Return the error."""
    expected, boundary = training.expect(windows), training.boundary

    def scale() -> float:
        return next((float(stage.scaler.scale_value) for stage in boundary.window.stages
                     if isinstance(stage, LossScale)), 0.0)

    before, skipped, half = values(training.state), boundary.status().skipped, scale() / 2
    training.learn([spoilt(windows[0])])
    same = all(np.array_equal(a, b) for a, b in zip(before, values(training.state)))
    assert same, "a window with NaN changed the parameters or the optimizer's state"
    assert boundary.status().skipped == skipped + 1, "a window with NaN was not counted as skipped"
    assert scale() == half, f"the loss scale is {scale():g} after an overflow, expected {half:g}"
    training.learn(windows)
    return training.off(expected)


@rows(quick="train step, 2 pieces")
def test_skipping(training: Training, holds: Callable) -> None:
    """A window with NaN changes nothing, and the next one is right."""
    holds(after_nan(training, [samples((5, 5, 5), 7)]))


@rows(quick="by hand, op by op")
def test_save_and_resume(training: Training, holds: Callable, tmp_path: Path, dtype: str) -> None:
    """Saved after an update and loaded, a training goes on bit-identically.

    A window with NaN comes first, so that the counters of skips are not 0.
    """
    windows, window = [samples((5, 5, 5), 2), samples((5, 5, 5), 12)], training.boundary.window
    expected = training.expect(windows)
    training.learn([spoilt(windows[1]), windows[0]])
    save_checkpoint(tmp_path / "selftest.safetensors", training.network, training.driver.accumulator)
    training.learn([windows[1]])
    assert training.off(expected) <= BOUNDS[dtype], "the training that was saved is off itself"
    saved = values((*training.state, window.counts, window.sums, window.seen))
    load_checkpoint(tmp_path / "selftest.safetensors", training.network, training.driver.accumulator)
    training.learn([windows[1]])
    resumed = values((*training.state, window.counts, window.sums, window.seen))
    differing = sum(not np.array_equal(a, b, equal_nan=True) for a, b in zip(saved, resumed))
    holds(differing, limit=0, message=f"{differing} of {len(saved)} tensors differ after resuming")


@rows(quick="train step")
def test_windows_of_one(driver: str, dtype: str, holds: Callable) -> None:
    """Windows of one microbatch, which have an update of their own."""
    holds(learned(Training(driver, dtype, 1), [samples((5,), 2), samples((5,), 12)]))


@rows(quick="cell, graph mode")
def test_token_weights__means(means: Training, holds: Callable) -> None:
    """Means over tokens are weighed by their number, which may be 0."""
    holds(learned(means, [texts((12, 2), 1), texts((7, 0), 2)]))


@rows(quick="cell, graph mode")
def test_loss_scale(means: Training, holds: Callable) -> None:
    """A window with NaN halves the scale and changes nothing else, and the next one is right."""
    holds(after_nan(means, [texts((12, 2), 3)]))


@rows(quick=("by hand, op by op", "train step"))
def test_token_weights__sums(sums: Training, holds: Callable) -> None:
    """Sums over tokens are divided once."""
    holds(learned(sums, [texts((12, 2), 1), texts((5, 9), 2)]))
