"""Check gradients with one bad element, NaN or infinity: the window or the microbatch has to be left out."""
from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import product

import mindspore as ms
import numpy as np
from mindspore import Tensor, ops

from ms_accum import Accumulator

from . import plain
from .comparing import values
from .networks import MLP, TargetLoss
from .rows import Check, Name, require
from .settings import samples

BAD = ("nan", "inf", "-inf")


def checks_of_nonfinite(dtype: str) -> Iterator[Check]:
    """Yield a check for each way to leave out gradients."""
    for what in ("window", "microbatch"):
        yield Check(Name(f"bad element, {what}", "by hand, compiled", dtype), partial(expect, dtype),
                    partial(missed, dtype, f"skip_{what}"), 0.0)


def expect(dtype: str) -> plain.Expected:
    """Train on one window, to find out whether the device has the kernels."""
    network = MLP(dtype=getattr(ms, dtype))
    return plain.train(TargetLoss(network), network.trainable_params(), [samples((5,), 2)])


def missed(dtype: str, on_nonfinite: str, _: plain.Expected) -> float:
    """Return the number of bad gradients that were not left out. Each parameter gets each bad number once."""
    parameters = MLP(dtype=getattr(ms, dtype)).trainable_params()
    accumulator = Accumulator(plain.optimizer_of(parameters), 1, on_nonfinite=on_nonfinite)

    @ms.jit
    def add(*gradients: Tensor) -> Tensor:
        return ops.depend(accumulator.skipped + 0, accumulator(gradients))

    def gradients(bad: str = "1", place: int = -1) -> list[Tensor]:
        ones = [np.ones(p.shape, np.float32) for p in parameters]
        if place >= 0:
            ones[place].flat[-1] = float(bad)
        return [Tensor(one, p.dtype) for one, p in zip(ones, parameters)]

    passed = 0
    for bad, place in product(BAD, range(len(parameters))):
        before, skipped = values(parameters), int(accumulator.skipped)
        add(*gradients(bad, place))
        same = all(np.array_equal(a, b, equal_nan=True) for a, b in zip(before, values(parameters)))
        passed += not same or int(accumulator.skipped) != skipped + 1
    before = values(parameters)
    add(*gradients())
    require(passed > 0 or not np.array_equal(before[0], values(parameters)[0]), "finite gradients were left out, too")
    return float(passed)
