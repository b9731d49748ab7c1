"""The exchange: what ranks do together. One device is the plain case, so nothing asks how many ranks there are.

    rank 0:  add ─ add ─ meet ─ close ─ add ─ meet ─ close ─ compare         sync="window"
    rank 1:  add ─ add ─ meet ─ close ─       meet ─ close ─ compare         no data left: weight 0

On the host, ranks `meet` before each exchange: each says what it is about to do. Then their graphs exchange the same.
"""
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
from mindspore import Parameter, Tensor

from ..mindspore_api import jit_class
from ..tensors import Gradients, Numbers, Scalar

# What a rank is about to do: the first number of its row in a meeting, and the words for it in messages.
BUILD, EPOCH, MICROBATCH, WINDOW, IDLE, FLUSHED, SAVE, LOAD, EVALUATE = range(1, 10)
DOES = ("exchanges values of", "builds", "begins an epoch with", "adds a microbatch to", "closes a window of",
        "flushes, with nothing trained since its last flush,", "ends a flush of", "saves", "loads a checkpoint for",
        "evaluates with")


def whole_of(parameter: Parameter) -> Parameter:
    """Return the whole parameter of a slice (ZeRO); return any other parameter unchanged."""
    return getattr(parameter, "whole", parameter)


@jit_class
class OneDevice:
    """Exchange nothing, on one device; the base of exchanges between ranks.

    Attributes:
        rank, ranks, inside: This rank, the number of ranks, and of those that sum each microbatch.
        sums_each: Whether ranks sum each microbatch (all of them, or those of a node).
        parameters: The whole parameters, in the optimizer's order.
        shapes: The shapes of the buffers.
        jit_options: Options of `ms.jit` for graphs that add microbatches.
    """

    rank, ranks, inside, sums_each = 0, 1, 1, False
    jit_options: Mapping[str, str] = MappingProxyType({})

    def __init__(self, parameters: Sequence[Parameter]) -> None:
        self.parameters = tuple(parameters)
        self.shapes = [tuple(p.shape) for p in parameters]

    # --- on the host --------------------------------------------------------------------------------------------------

    def meet(self, what: int, number: int = 0) -> int:
        """Say what comes next, and raise `RanksDiffer` on every rank unless all do the same. Return the largest number.

        `number`: the pieces of this microbatch, or 1 for a window; 0: this rank has no data left.
        """
        return number

    def require_alike(self, what: int, facts: Mapping[str, object]) -> None:
        """Meet, and raise `RanksDiffer` on every rank if facts (with equal texts) differ, naming the first."""

    def compare(self, what: int, values: Mapping[str, Sequence[Parameter]]) -> None:
        """Meet, and raise `RanksDiffer` on every rank if values differ, naming the first and what it is."""

    def gathered(self, value: Any) -> list[Any]:
        """Return a JSON value of each rank."""
        return [value]

    def together(self, what: int, do: Callable[[], Any], failure: type[Exception]) -> Any:
        """Return what `do` returns, once all ranks have called it. If it fails on one, the others raise `failure`."""
        return do()

    def sent(self, value: np.ndarray) -> np.ndarray:
        """Return rank 0's array on every rank, bit by bit. The others give one of its shape and dtype."""
        return value

    def joined(self, state: Parameter, whole: Parameter) -> np.ndarray:
        """Return a state of the optimizer for a whole parameter, given that of this rank's slice."""
        return state.asnumpy()

    def cut(self, value: np.ndarray, whole: Parameter) -> np.ndarray:
        """Return this rank's slice of such a state."""
        return value

    # --- in graphs ----------------------------------------------------------------------------------------------------

    def each(self, gradients: Gradients, factor: Scalar, numbers: Numbers) -> tuple[Gradients, Scalar, Numbers]:
        """Sum a piece. Return the gradients, the factor to add them with, and the sums of the numbers."""
        return gradients, factor, numbers

    def window(self, gradients: Gradients, unit: Scalar, numbers: Numbers) -> tuple[Gradients, Scalar, Numbers]:
        """Sum a window. Return the gradients, the unit that their weights are in, and the sums of the numbers."""
        return gradients, unit, numbers

    def apply(self, optimizer: Callable, gradients: Gradients) -> Tensor:
        """Update with these gradients. With ZeRO: each rank its slices; then all ranks' changes are added."""
        optimizer(gradients)
        return gradients[0]  # MindSpore 2.10 drops the work in place (`mint`) of a function that returns None

    def over(self, number: Tensor) -> Tensor:
        """Return the sum over ranks of a number that was computed from what `window` returns, if that are slices."""
        return number
