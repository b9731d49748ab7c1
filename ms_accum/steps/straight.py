"""Compile functions: as a graph of its own, and as one without control flow."""
from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import mindspore as ms
from mindspore import nn, ops

if TYPE_CHECKING:
    from ..core.accumulator import Accumulator


class Graph(nn.Cell):
    """A function as a Cell. MindSpore warns when a second train step compiles a jitted function, but not a Cell."""

    def __init__(self, function: Callable) -> None:
        super().__init__(auto_prefix=False)
        self.function = function

    def construct(self, *arguments: Any) -> Any:
        """Return what the function returns."""
        return self.function(*arguments)


def compiled(function: Callable) -> Callable:
    """Return `function` as a graph of its own, in graph mode and PyNative."""
    return ms.jit(Graph(function))


def straight(function: Callable, accumulator: Accumulator) -> Callable:
    """Return `function` as a graph without control flow; on CPU with a branch that is never taken.

    On CPU, MindSpore 2.10 runs the kernels of a graph one after the other if they are at most 100, there is no branch,
    and the machine has few cores (`GraphScheduler::SetActorExecutionStrategy`; no setting changes that). On 2 cores,
    forward and backward of an MLP take 1.2 times as long then.
    """
    if not needs_branch():
        return compiled(function)

    def with_branch(*arguments: Any) -> Any:
        result = function(*arguments)
        if accumulator.mini_step < 0:
            ops.assign(accumulator.mini_step, 0)
        return result

    return compiled(with_branch)


def needs_branch() -> bool:
    """Return whether `straight` adds the branch."""
    return ms.get_context("device_target") == "CPU"
