"""The phases of a training: each trains, and returns the difference to the result of plain MindSpore."""
from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from ms_accum import load_checkpoint, save_checkpoint

from .comparing import values
from .plain import Expected
from .rows import require
from .training import BOUNDS, Training


def require_small(training: Training, expected: Expected) -> None:
    """Raise Wrong if the gradients of plain training are so large that they would be clipped."""
    clip_norm = training.setting.options().get("clip_norm", np.inf)
    require(max(expected.norms) < clip_norm, "the gradient of plain training is too large for this row")


def windows(training: Training, expected: Expected, windows: Sequence) -> float:
    """Train on whole windows, whose gradients are not clipped."""
    require_small(training, expected)
    training.learn(windows)
    return training.off(expected)


def reported(training: Training, expected: Expected, windows: Sequence) -> float:
    """Train on whole windows of samples, and compare the returned losses and the number of samples counted."""
    require_small(training, expected)
    seen, samples = int(training.accumulator.seen), sum(len(batch[0]) for window in windows for batch in window)
    losses = [float(loss) for loss in training.learn(windows)]
    counted = int(training.accumulator.seen) - seen
    require(counted == samples, f"{counted} samples were counted, expected {samples}")
    return float(np.max([training.off(expected), *np.abs(np.divide(losses, expected.losses) - 1)]))


def incomplete(training: Training, expected: Expected, windows: Sequence) -> float:
    """Train on windows, and apply the last one before it is full."""
    require_small(training, expected)
    training.learn(windows)
    require(training.driver.flush(), "flush() closed no window")
    return training.off(expected)


def clipped(training: Training, expected: Expected, windows: Sequence) -> float:
    """Train on windows whose gradients are clipped, and also compare their norm before clipping."""
    clip_norm = training.setting.options()["clip_norm"]
    require(min(expected.norms) > clip_norm, "the gradient of plain training is too small to be clipped")
    training.learn(windows)
    norm = float(training.accumulator.grad_norm)
    return float(np.max([training.off(expected), abs(norm / expected.norms[-1] - 1)]))


def spoilt(window: Sequence[tuple]) -> list[tuple]:
    """Return a window whose first microbatch holds only NaN."""
    (x, *others), *rest = window
    return [(np.full_like(x, np.nan), *others), *rest]


def dropped(training: Training, expected: Expected, windows: Sequence) -> float:
    """Train on a window with NaN, which must change nothing, and on a good one."""
    accumulator = training.accumulator
    before, scaler, skipped = values(training.state), accumulator.loss_scaler, int(accumulator.skipped)
    scale = None if scaler is None else float(scaler.scale_value)
    training.learn([spoilt(windows[0])])
    same = all(np.array_equal(a, b) for a, b in zip(before, values(training.state)))
    require(same, "a window with NaN changed the parameters or the optimizer's state")
    require(int(accumulator.skipped) == skipped + 1, "a window with NaN was not counted as skipped")
    if scaler is not None and scale is not None:
        require(float(scaler.scale_value) == scale / 2, f"the loss scale is {float(scaler.scale_value):g} after an "
                f"overflow, expected {scale / 2:g}")
    training.learn(windows)
    return training.off(expected)


def resumed(training: Training, expected: Expected, windows: Sequence) -> float:
    """Save in the middle of the last window, continue, and resume from the file in a training with other weights.

    A window with NaN comes first, so that the counters of skips are not 0.
    """
    *whole, last = windows
    training.learn([spoilt(last), *whole, last[:1]])
    other = Training(training.setting, training.name, training.dtype, seed=1)
    with TemporaryDirectory(prefix="ms_accum-") as folder:
        path = Path(folder) / "selftest.safetensors"
        save_checkpoint(path, training.network, training.accumulator)
        training.learn([last[1:]])
        require(training.off(expected) <= BOUNDS[training.dtype], "the training that was saved is off itself")
        with other.driver:
            load_checkpoint(path, other.network, other.accumulator)
            other.learn([last[1:]])
    pairs = [(a.astype(np.float64), b.astype(np.float64)) for a, b in zip(training.bits(), other.bits())]
    return max(float(np.max(np.where((a == b) | (np.isnan(a) & np.isnan(b)), 0.0, np.abs(a - b)), initial=0.0))
               for a, b in pairs)
