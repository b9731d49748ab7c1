"""Settings of the trainings: samples, tokens whose loss is a mean, and tokens whose loss is a sum."""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from mindspore import amp

from . import phases
from .networks import NO_TARGET, targets
from .training import Phase, Setting


def samples(sizes: Sequence[int], seed: int, loud: bool = False) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return microbatches of these sizes. `loud`: all samples are of one class, which makes a large gradient."""
    rng, microbatches = np.random.default_rng(seed), []
    for size in sizes:
        x, y = rng.normal(size=(size, 6)), rng.integers(0, 3, size)
        microbatches.append(((2 * x if loud else x).astype(np.float32), (0 * y + 1 if loud else y).astype(np.int32)))
    return microbatches


def texts(counts: Sequence[int], seed: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return microbatches of 3 texts of 4 tokens, with these numbers of targets."""
    rng, microbatches = np.random.default_rng(seed), []
    for count in counts:
        y = rng.integers(0, 3, 12)
        y[rng.permutation(12)[count:]] = NO_TARGET
        microbatches.append((rng.normal(size=(3, 4, 6)).astype(np.float32), y.reshape(3, 4).astype(np.int32)))
    return microbatches


def options_of_samples() -> dict[str, Any]:
    """Return the options of the accumulator for samples."""
    return {"clip_norm": 0.8, "on_nonfinite": "skip_window"}


def options_of_means() -> dict[str, Any]:
    """Return the options of the accumulator for means over tokens."""
    return {"loss_scaler": amp.DynamicLossScaler(64, 2, 1000)}


# Windows of one phase have microbatches of two sizes: each size must be compiled.
SAMPLES = Setting((
    Phase("ragged windows", [samples((5, 2, 5), 2), samples((2, 5, 5), 12)], phases.reported),
    Phase("incomplete window", [samples((5, 2), 0)], phases.incomplete),
    Phase("clipping", [samples((5, 2, 5), 2, loud=True), samples((2, 5, 5), 12, loud=True)], phases.clipped),
    Phase("skipping", [samples((5, 5, 5), 7)], phases.dropped),
    Phase("save and resume", [samples((5, 5, 5), 2), samples((5, 5, 5), 12)], phases.resumed, exact=True),
), 3, options_of_samples)
MEANS = Setting((
    Phase("token weights, means", [texts((12, 2), 1), texts((7, 0), 2)], phases.windows),
    Phase("loss scale", [texts((12, 2), 3)], phases.dropped),
), 2, options_of_means, weight_fn=targets)
# By hand, each window divides by the same number of tokens.
ONES = Setting((Phase("windows of one", [samples((5,), 2), samples((5,), 12)], phases.windows),), 1)
SUMS = Setting((
    Phase("token weights, sums", [texts((12, 2), 1), texts((5, 9), 2)], phases.windows),
), 2, reduction="sum", weight_fn=targets, by_hand=14.0)
