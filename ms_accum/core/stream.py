"""Op by op, the backward pass adds each gradient to its buffer the moment it is computed, and forgets it."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mindspore as ms
from mindspore import Tensor

from ..mindspore_api import add_hook
from ..tensors import Scalar, add_one
from .window import Window


class Stream:
    """Put hooks on the parameters from the end of a forward pass to that of its backward pass."""

    def __init__(self, window: Window) -> None:
        self.window, self.nothing = window, Tensor(0.0, ms.float32)
        self.handles, self.times = [], []  # type: list[Any], list[int]

    def start(self, factor: Scalar) -> None:
        """Add the gradients that come from now on, times `factor`: the forward pass has ended."""
        self.times = times = [0] * len(self.window.buffers)

        def hook_of(place: int, buffer: ms.Parameter) -> Callable:
            def add(gradient: Tensor) -> Tensor:
                if self.times is not times:  # of a pass that has failed: MindSpore 2.10 does not remove its hooks
                    return gradient
                times[place] += 1
                add_one(factor, buffer, gradient)
                return self.nothing  # in place of the gradient, whose memory is then free
            return add

        pairs = zip(self.window.exchange.parameters, self.window.buffers)
        self.handles = [add_hook(p, hook_of(place, buffer)) for place, (p, buffer) in enumerate(pairs)]

    def around(self, grad_fn: Callable) -> Callable:
        """Return `grad_fn`, which then returns None in place of the gradients: they were added."""
        def streamed(*arguments: Any) -> tuple[Any, None]:
            try:
                values, _ = grad_fn(*arguments)
            finally:
                for handle in self.handles:
                    handle.remove()
                self.handles, times, self.times = [], self.times, []
            if max(times) > 1:  # the mark of the piece stays
                raise RuntimeError("a gradient came twice in one backward pass, so it was added twice; compute the "
                                   "gradients of forward_fn once, without a gradient inside it")
            return values, None
        return streamed
