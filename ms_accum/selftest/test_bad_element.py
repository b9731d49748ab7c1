"""Gradients with one bad element, NaN or infinity: the window or the microbatch has to be left out."""
from __future__ import annotations

from collections.abc import Callable
from itertools import product

import mindspore as ms
import numpy as np
from mindspore import Tensor

from ms_accum import Accumulator

from . import plain
from .comparing import values
from .networks import MLP, TargetLoss
from .training import rows, samples

OPTIONS = {"bad element, window": "skip_window", "bad element, microbatch": "skip_microbatch"}


@rows(drivers=["by hand, compiled"], checks=OPTIONS)
def test_bad_element(check: str, dtype: str, holds: Callable) -> None:
    """Each parameter gets each bad number once, and nothing changes. Finite gradients do change it."""
    network = MLP(dtype=getattr(ms, dtype))
    parameters = network.trainable_params()
    plain.train(TargetLoss(network), parameters, [samples((5,), 2)])
    accumulator = Accumulator(plain.optimizer_of(parameters), 1, reduction="sum", on_nonfinite=OPTIONS[check],
                              max_skips=None)

    @ms.jit
    def add(*gradients: Tensor) -> Tensor:
        return accumulator(gradients)

    def gradients(bad: str = "1", place: int = 0) -> list[Tensor]:
        ones = [np.ones(p.shape, np.float32) for p in parameters]
        ones[place].flat[-1] = float(bad)
        return [Tensor(one, p.dtype) for one, p in zip(ones, parameters)]

    cases, passed = list(product(("nan", "inf", "-inf"), range(len(parameters)))), 0
    for bad, place in cases:
        before, skipped = values(parameters), accumulator.status().skipped
        add(*gradients(bad, place))
        same = all(np.array_equal(a, b, equal_nan=True) for a, b in zip(before, values(parameters)))
        passed += not same or accumulator.status().skipped != skipped + 1
    before = values(parameters)
    add(*gradients())
    assert passed > 0 or not np.array_equal(before[0], values(parameters)[0]), "finite gradients were left out, too"
    holds(passed, limit=0, message=f"{len(cases) - passed} of {len(cases)} bad gradients were left out")
