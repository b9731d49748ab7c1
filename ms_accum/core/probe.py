"""Choose the kernels: those that work in place only if a test on this device gave what the portable ones give.

They were written without an Ascend to run on. So once in each process, two small buffers go through two windows,
compiled and op by op, with both kinds of kernels. `MS_ACCUM_IN_PLACE=1` or `0` in the environment chooses without it.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from os import environ
from warnings import warn

import mindspore as ms
import numpy as np
from mindspore import ParameterTuple, Tensor, nn, ops

from ..tensors import state_parameter
from .kernels import InPlace, Portable, add_each

SWITCH = "MS_ACCUM_IN_PLACE"
_SIZES = (5, 640)  # elements: small ones are added last
_FACTOR = 0.375
_WINDOWS = 2  # the second one shows what the first one left in the buffers
_FAILED = ("the kernels that work in place failed their test on this device ({}), so portable ones run: an update "
           "takes up to 4 bytes per parameter more (16 instead of 12 with Momentum in float32); run `ms-accum selftest "
           f"--json FILE` and report the file; {SWITCH}=0 in the environment hides this warning")


def kernels(in_buffers: bool = True) -> Portable:
    """Return the kernels that suit this device.

    Args:
        in_buffers: Whether they scale and clear the buffers themselves, and not copies of them.
    """
    return choice() if in_buffers and ms.get_context("device_target") == "Ascend" else Portable()


def largest_difference(special: Portable, sizes: Sequence[int]) -> float:
    """Return by how much results of `special` and of the portable kernels differ, relative to the largest element.

    Each scales and clears float32 buffers of these sizes, compiled and op by op.

    Raises what the device raises, and RuntimeError if the portable kernels give wrong results, as in a dry run, where
    all values are 0.
    """
    random = np.random.default_rng(0)
    gradients = [random.uniform(0.5, 1, size).astype(np.float32) for size in sizes]
    expected = [*(-_FACTOR * _WINDOWS * gradient for gradient in gradients), *map(np.zeros_like, gradients)]
    worst = 0.0
    for compiling in (ms.jit, _op_by_op):
        portable = _trained(Portable(), gradients, compiling)
        if not all(np.allclose(got, wanted) for got, wanted in zip(portable, expected)):
            raise RuntimeError("the portable kernels gave wrong results, as they do in a dry run; elsewhere, do not "
                               "train on this device")
        for got, wanted in zip(_trained(special, gradients, compiling), portable):
            difference = float(np.abs(got - wanted).max() / (np.abs(wanted).max() or 1.0))
            worst = max(worst, float("inf") if np.isnan(difference) else difference)
    return worst


@cache
def choice() -> Portable:
    """Return the kernels for buffers on an Ascend. ValueError if MS_ACCUM_IN_PLACE is neither 0 nor 1."""
    forced = environ.get(SWITCH)
    if forced not in (None, "0", "1"):
        raise ValueError(f"{SWITCH} in the environment has to be 0 or 1, not {forced!r}")
    return InPlace() if forced == "1" or (forced is None and _passes(InPlace())) else Portable()


def _passes(special: Portable) -> bool:
    """Return whether `special` gives what the portable kernels give. Warn if it does not."""
    try:
        difference = largest_difference(special, _SIZES)
    except Exception as error:  # whatever it is, training goes on without these kernels
        reason = f"{type(error).__name__}: {' '.join(str(error).split()).strip('- ')[:200]}"
    else:
        if difference <= 1e-6:
            return True
        reason = f"their results differ by {difference:.2g}"
    warn(_FAILED.format(reason), UserWarning, stacklevel=2)
    return False


class _Windows(nn.Cell):
    """Windows of one microbatch, each with an update as SGD makes it.

    Args:
        kind: The kernels.
        sizes: How many elements each parameter has.
    """

    def __init__(self, kind: Portable, sizes: Sequence[int]) -> None:
        super().__init__(auto_prefix=False)
        self.kind, self.dtypes, self.small = kind, (ms.float32,) * len(sizes), max(sizes) // 64
        self.parameters, self.buffers = (
            ParameterTuple([state_parameter(f"probe.{name}{i}", (size,), ms.float32) for i, size in enumerate(sizes)])
            for name in ("parameter", "buffer"))
        self.updates = state_parameter("probe.updates", (), ms.int32)

    def construct(self, zero: Tensor, *gradients: Tensor) -> Tensor:
        """Add, scale and clear, in the order and with the dependency of `Way`."""
        add_each(self.small, self.buffers, gradients)
        factor = ops.depend(zero + _FACTOR, ops.assign_add(self.updates, 1))
        for parameter, scaled in zip(self.parameters, self.kind.scale(factor, self.buffers, self.dtypes)):
            ops.assign_sub(parameter, scaled)
        self.kind.clear(zero, self.buffers)
        return zero


def _trained(kind: Portable, gradients: list[np.ndarray], compiling: Callable) -> list[np.ndarray]:
    """Return parameters and buffers after some windows of these gradients."""
    windows = _Windows(kind, [gradient.size for gradient in gradients])
    run = compiling(windows)
    for _ in range(_WINDOWS):
        run(Tensor(0.0, ms.float32), *map(Tensor, gradients))
    return [p.asnumpy() for p in (*windows.parameters, *windows.buffers)]


def _op_by_op(cell: nn.Cell) -> Callable:
    return cell.construct
