"""A stream of gradients: op by op, the backward pass adds each gradient to its buffer the moment it is computed.

    backward pass ─► gradient of the last parameter ─► hook: weigh, add to its buffer ─► forgotten
                  ─► gradient of the one before     ─► hook ...

So the gradients of two parameters are never in memory together, as in a graph on Ascend.
"""
from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import mindspore as ms
from mindspore import Parameter, Tensor

from .kernels import add_one
from .notes import note_use

if TYPE_CHECKING:
    from ..tensors import Scalar
    from .window import Window

Result = TypeVar("Result")
_TWICE = ("the gradient of {} was computed more than once in one backward pass, so it was added more than once; leave "
          "backward passes inside the loss out (or give recomputed layers to a train step without eager=True), call "
          "accumulator.reset(), which drops the open window, and continue with the next batch")


class Stream:
    """Add gradients to a window's buffers during a backward pass. Call it only if `window.streams`.

    Hooks are on the parameters for this backward pass alone: others, also those of the script, see none.

    Args:
        window: The open window.
    """

    def __init__(self, window: Window) -> None:
        self.window = window
        self._nothing = Tensor(0.0, ms.float32)  # in place of a gradient, whose memory is then free

    def __call__(self, factor: Scalar, backward: Callable[[], Result]) -> Result:
        """Return the result of `backward()`, a backward pass. In it, each gradient is replaced by 0 of shape `()`.

        Then call `Window.add` with the gradients None. If `backward` raises an error, the window may hold some of its
        gradients: call `Window.begin` before, which marks that.

        Args:
            factor: The factor on each gradient: the weight of the piece, or 1 for a sum.
            backward: A function without arguments that runs one backward pass.

        Raises:
            RuntimeError: If a gradient came twice.
        """
        window = self.window
        note_use(window.number)  # buffers need memory
        added: list[str] = []
        hooks = [weight.register_hook(partial(self._add, factor / window.unit, buffer, weight.name, added))
                 for weight, buffer in zip(window.weights, window.buffers)]
        try:
            result = backward()
        finally:
            for hook in hooks:
                hook.remove()
        # Not in the hook: MindSpore 2.10 raises an error of a hook again in a later call.
        twice = next((name for name, times in Counter(added).items() if times > 1), None)
        if twice is not None:
            raise RuntimeError(_TWICE.format(twice))
        return result

    def _add(self, factor: Scalar, buffer: Parameter, name: str, added: list[str], gradient: Tensor) -> Tensor:
        added.append(name)
        add_one(factor, buffer, gradient)
        return self._nothing
