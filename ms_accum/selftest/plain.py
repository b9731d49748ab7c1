"""Train in plain MindSpore on the undivided batch of each window: accumulation has to give the same result."""
from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import NamedTuple

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn, ops

from ..arguments import one_line
from ..runtime import synchronize
from .comparing import relative, values
from .modes import recover, running

_errors: list[BaseException] = []  # that MindSpore raised since it last compiled


class Expected(NamedTuple):
    """Hold the parameters before and after plain training, and what each update and each microbatch gave.

    `norms` are those of the gradients before clipping; `losses` those of microbatches before the window's update.
    """

    start: list[np.ndarray]
    end: list[np.ndarray]
    norms: list[float]
    losses: list[float]

    def off(self, parameters: Sequence[Parameter]) -> float:
        """Return the error of parameters, relative to how far plain training moved them."""
        moved = [end - start for start, end in zip(self.start, self.end)]
        assert 0 < sum((m**2).sum() for m in moved) < np.inf, \
            "plain training did not move the parameters, or not to numbers: the device computes nothing, or wrongly"
        return relative([p - start for start, p in zip(self.start, values(parameters))], moved)


@contextmanager
def kernels_for(dtype: ms.Type) -> Iterator[None]:
    """Skip the test if plain MindSpore fails in the block: the device has no kernel for this dtype.

    In float32 that is a failure: every device computes in float32, so the reference itself is broken.
    """
    try:
        yield
    except Exception as error:
        note_error(error)
        said = f"plain MindSpore: {type(error).__name__}: {one_line(error)[:80]}".rstrip()
        if dtype == ms.float32:
            raise AssertionError(said) from error
        pytest.skip(f"no kernel: {said}")
    if _errors:
        recover()
        _errors.clear()


def note_error(error: BaseException) -> None:
    """Let MindSpore report the rest of an error now; otherwise the next test would get it."""
    with suppress(Exception):
        synchronize()
    _errors.append(error)


def optimizer_of(parameters: Sequence[Parameter]) -> nn.Optimizer:
    """Return an optimizer with state, for which Ascend has kernels, and which is nearly linear in the gradient.

    It is Momentum; for bfloat16 it is AdamWeightDecay, which is nearly linear with a large epsilon.
    """
    if parameters[0].dtype == ms.bfloat16:
        return nn.AdamWeightDecay(list(parameters), learning_rate=5.0, eps=1.0)
    return nn.Momentum(list(parameters), learning_rate=0.5, momentum=0.9)


def train(loss_fn: Callable, parameters: Sequence[Parameter], windows: Sequence[Sequence[tuple]],
          clip_norm: float = np.inf) -> Expected:
    """Train `parameters` with one update for each window. Skip the test if the device has no kernel for it."""
    norms, losses = [], []
    with kernels_for(parameters[0].dtype), running("pynative"):
        optimizer, start = optimizer_of(parameters), values(parameters)
        gradients_of = ms.grad(loss_fn, None, optimizer.parameters)
        for window in windows:
            losses += [float(loss_fn(*map(Tensor, microbatch))) for microbatch in window]
            gradients = gradients_of(*(Tensor(np.concatenate(column)) for column in zip(*window)))
            norms.append(float(ops.sqrt(sum(ops.square(g.astype(ms.float32)).sum() for g in gradients))))
            if norms[-1] > clip_norm:
                factor = clip_norm / norms[-1]
                gradients = tuple((g.astype(ms.float32) * factor).astype(g.dtype) for g in gradients)
            optimizer(gradients)
        return Expected(start, values(parameters), norms, losses)
