"""Compute the expected result: plain MindSpore on the undivided batch of each window, without code of ms_accum."""
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Optional

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn, ops

from .comparing import relative, values
from .modes import running
from .rows import require


class Expected(NamedTuple):
    """Hold the result of plain training.

    Attributes:
        start, end: The parameters before and after.
        norms: The norm of each gradient before clipping.
        losses: The loss of each microbatch, before the update of its window.
    """

    start: list[np.ndarray]
    end: list[np.ndarray]
    norms: list[float]
    losses: list[float]


def optimizer_of(parameters: Sequence[Parameter]) -> nn.Optimizer:
    """Return an optimizer with state, for which Ascend has kernels, and which is nearly linear in the gradient.

    It is Momentum; for bfloat16 it is AdamWeightDecay, which is nearly linear with a large epsilon.
    """
    if parameters[0].dtype == ms.bfloat16:
        return nn.AdamWeightDecay(list(parameters), learning_rate=5.0, eps=1.0)
    return nn.Momentum(list(parameters), learning_rate=0.5, momentum=0.9)


def undivided(microbatches: Sequence[tuple]) -> tuple[np.ndarray, ...]:
    """Return the batch of a window."""
    return tuple(np.concatenate(column) for column in zip(*microbatches))


def train(loss_fn: Callable, parameters: Sequence[Parameter], windows: Sequence[Sequence[tuple]],
          clip_norm: Optional[float] = None) -> Expected:
    """Train `parameters` with one update for each window, on its undivided batch."""
    optimizer, norms, losses = optimizer_of(parameters), [], []
    gradients_of = ms.grad(loss_fn, None, optimizer.parameters)
    start = values(parameters)
    with running("pynative"):
        for window in windows:
            losses += [float(loss_fn(*map(Tensor, microbatch))) for microbatch in window]
            gradients = gradients_of(*map(Tensor, undivided(window)))
            norms.append(float(_norm(gradients)))
            if clip_norm is not None and norms[-1] > clip_norm:
                factor = clip_norm / norms[-1]
                gradients = tuple((g.astype(ms.float32) * factor).astype(g.dtype) for g in gradients)
            optimizer(gradients)
    return Expected(start, values(parameters), norms, losses)


def off(parameters: Sequence[Parameter], expected: Expected) -> float:
    """Return the error of parameters, relative to how far plain training moved them."""
    moved = [end - start for start, end in zip(expected.start, expected.end)]
    require(0 < sum((m**2).sum() for m in moved) < np.inf, "plain training did not move the parameters, or not to "
            "numbers: the device computes nothing, or wrongly")
    return relative([p - start for start, p in zip(expected.start, values(parameters))], moved)


def _norm(gradients: Sequence[Tensor]) -> Tensor:
    return ops.sqrt(sum(ops.square(g.astype(ms.float32)).sum() for g in gradients))
