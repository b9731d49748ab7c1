"""Choose the kernels: those that work in place only if they pass a test on this device against portable ones.

They were written without an Ascend to run on. So once in each process, two small buffers go through two windows,
compiled and op by op, with both kinds of kernels. `MS_ACCUM_IN_PLACE=1` or `0` in the environment chooses without this
test.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from os import environ
from warnings import warn

import mindspore as ms
import numpy as np
from mindspore import Parameter, ParameterTuple, Tensor, nn, ops

from ..tensors import state_parameter
from .kernels import InPlace, Portable, add_each

SWITCH = "MS_ACCUM_IN_PLACE"
_SIZES = (5, 640)  # elements: small ones are added last
_FACTOR = 0.375
_WINDOWS = 2  # the second one shows whether the first one left anything in the buffers
_FAILED = ("the kernels that work in place failed their test on this device ({}), so portable ones run: an update "
           "takes up to 4 bytes per parameter more (16 instead of 12 with Momentum in float32); run `ms-accum selftest "
           f"--json FILE` and report the file; {SWITCH}=0 in the environment hides this warning")


def kernels(in_buffers: bool = True) -> Portable:
    """Return the kernels that suit this device.

    Args:
        in_buffers: Whether they scale and clear the buffers themselves, not copies of them.
    """
    return choice() if in_buffers and ms.get_context("device_target") == "Ascend" else Portable()


def largest_difference(special: Portable, sizes: Sequence[int]) -> float:
    """Return the difference between results of `special` and of the portable kernels, relative to the largest element.

    Each scales and clears float32 buffers of these sizes, compiled and op by op.

    Raise the errors of the device, and RuntimeError if the portable kernels give wrong results, as in a dry run, where
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
    """Return the kernels for buffers on an Ascend. Raise ValueError if MS_ACCUM_IN_PLACE is neither 0 nor 1."""
    forced = environ.get(SWITCH)
    if forced not in (None, "0", "1"):
        raise ValueError(f"{SWITCH} in the environment is {forced!r}, expected 0 or 1")
    return InPlace() if forced == "1" or (forced is None and _passes(InPlace())) else Portable()


def _passes(special: Portable) -> bool:
    """Return whether `special` gives the results of the portable kernels. Warn if it does not."""
    try:
        difference = largest_difference(special, _SIZES)
    except Exception as error:  # after any error, training continues without these kernels
        reason = f"{type(error).__name__}: {' '.join(str(error).split()).strip('- ')[:200]}"
    else:
        if difference <= 1e-6:
            return True
        reason = f"their results differ by {difference:.2g}"
    warn(_FAILED.format(reason), UserWarning, stacklevel=2)
    return False


class _Windows(nn.Cell):
    """Run windows of one microbatch, each with an update of SGD.

    Args:
        kind: The kernels.
        sizes: Number of elements of each parameter.
    """

    def __init__(self, kind: Portable, sizes: Sequence[int]) -> None:
        super().__init__(auto_prefix=False)
        # In its semi-auto parallel mode, MindSpore would cut these parameters, too, and crash; and it would give those
        # of an initializer no data.
        self.add_flags(skip_auto_parallel_compile=True)
        self.kind, self.dtypes, self.small = kind, (ms.float32,) * len(sizes), max(sizes) // 64
        self.parameters, self.buffers = (
            ParameterTuple([Parameter(np.zeros(size, np.float32), f"probe.{name}{i}") for i, size in enumerate(sizes)])
            for name in ("parameter", "buffer"))
        self.updates = state_parameter("probe.updates", (), ms.int32)

    def construct(self, zero: Tensor, *gradients: Tensor) -> Tensor:
        """Add, scale and clear, in the order and with the dependencies of `Window`."""
        add_each(self.small, self.buffers, gradients, 1.0)
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
