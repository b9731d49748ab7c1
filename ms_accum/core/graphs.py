"""Compile what the host calls: graphs without control flow, each of its own."""
from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import Any, Optional

import mindspore as ms
from mindspore import nn, ops

from .window import Window

_numbers = count()


def straight(function: Callable, window: Window, inputs: Optional[Callable] = None) -> Callable:
    """Return `function` as a graph. `inputs`: returns what a call is compiled for, if arguments have dynamic shapes."""
    graph, zero = function, window.zero
    if ms.get_context("device_target") == "CPU":
        # MindSpore 2.10 runs the kernels of a graph one after the other if there are at most 100 and no branch, and the
        # machine has few cores (`GraphScheduler::SetActorExecutionStrategy`; no setting changes that). On 2 cores,
        # forward and backward of an MLP then take 1.2 times as long. So there is a branch, which is never taken.
        def graph(*arguments: Any) -> Any:
            result = function(*arguments)
            if zero < 0:
                ops.assign(zero, 0.0)
            return result
    if inputs is not None:
        cell = _Graph(graph)
        run = ms.jit(cell)

        def call(*arguments: Any) -> Any:
            cell.set_inputs(*inputs(arguments))  # in each call: arguments without a declaration may change their shapes
            return run(*arguments)

        return call

    def named(*arguments: Any) -> Any:
        return graph(*arguments)

    named.__name__ = f"graph{next(_numbers)}"  # MindSpore warns when a second function of one name is compiled
    return ms.jit(named, **window.exchange.jit_options)


class _Graph(nn.Cell):
    """Call a function, with dynamic shapes that `set_inputs` declares. A call costs 25 us more than a function's."""

    def __init__(self, function: Callable) -> None:
        super().__init__(auto_prefix=False)
        self.function = function

    def construct(self, *arguments: Any) -> Any:
        """Return `function(*arguments)`."""
        return self.function(*arguments)
