"""A stream of gradients: op by op, the backward pass adds each gradient to its buffer the moment it is computed.

    forward pass ─► loss ─► start ─► backward pass ─► gradient of the last parameter ─► hook: weigh, add, forget
                                                  ─► gradient of the one before     ─► hook ...

So the gradients of two layers are never in memory together.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import mindspore as ms
from mindspore import Parameter, Tensor

from ..mindspore_api import abandon, add_hook, enable, is_enabled
from ..tensors import COMPLEX, checked_gradients
from .kernels import add_one
from .notes import note_use

if TYPE_CHECKING:
    from ..tensors import Scalar
    from .window import Window

Result = TypeVar("Result")
_TWICE = ("the gradient of {} came more than once in one backward pass, so it was added more than once; train this "
          "network with a compiled step; or call reset(), which drops the open window, and continue with "
          "the next batch")


class Stream:
    """Run backward passes op by op, and add gradients to a window's buffers in them if `window.streams`.

    Hooks are on the parameters from the end of the forward pass to that of the backward pass: other backward passes,
    also inside the forward pass, see none.

    Args:
        window: The open window.
    """

    def __init__(self, window: Window) -> None:
        self.window, self.passes, self.current = window, 0, 0  # backward passes; the one that runs, or 0
        self.nothing = Tensor(0.0, ms.float32)  # in place of a gradient, whose memory is then free
        self._factor: Any = None
        self._hooks: list[Hook] = []
        self._handles: list[Any] = []

    def __call__(self, factor: Any, backward: Callable[[], Result]) -> Result:
        """Return the result of `backward()`, a backward pass. If it streams, each gradient in it is 0, of shape `()`.

        Then call `Window.add` with the gradients None. If `backward` raises an error, the window may hold some of its
        gradients: call `Window.begin` before, which marks that.

        Args:
            factor: The factor on each gradient: the weight of the piece, or 1 for a sum. `start` may get another one.
            backward: A function without arguments that runs one backward pass. It calls `start` when the loss is known.

        Raises:
            TypeError, ValueError: If a gradient does not fit its parameter (e.g. a sparse one).
            RuntimeError: If a gradient came twice.
        """
        window, was_enabled = self.window, is_enabled()
        note_use(window.number)  # buffers need memory
        self._factor, self._hooks, self._handles = factor, [], []
        try:
            result = backward()
        except BaseException:
            enable(was_enabled)  # MindSpore 2.10 leaves it off, and then refuses all later gradients
            abandon()
            raise
        finally:
            self.current = 0
            for handle in self._handles:
                handle.remove()
        # Not in a hook: MindSpore 2.10 raises an error of a hook again in a later call.
        hooks, self._hooks, self._handles = self._hooks, [], []
        if any(hook.other is not None for hook in hooks):
            checked_gradients(window.names, window.shapes, [
                weight if hook.other is None else hook.other for weight, hook in zip(window.weights, hooks)])
        twice = next((name for name, hook in zip(window.names, hooks) if hook.times > 1), None)
        if twice is not None:
            raise RuntimeError(_TWICE.format(twice))
        return result

    def start(self, factor: Any = None) -> None:
        """Say that the forward pass has ended: add the gradients that come from now on.

        `factor`: that on each gradient, if it is known only now.
        """
        window = self.window
        self._factor = self._factor if factor is None else factor
        if window.streams:
            self.passes += 1
            self.current = self.passes
            for weight, buffer in zip(window.weights, window.buffers):
                self._hooks.append(Hook(self, self._factor / window.unit, buffer))
                self._handles.append(add_hook(weight, self._hooks[-1]))


class Hook:
    """Add the gradient of a parameter to its buffer, during one backward pass.

    After an error in a backward pass, MindSpore 2.10 removes no hook of it. They stay on the parameters, and do
    nothing; a graph that is compiled later may hold them.

    Args:
        stream: The stream.
        factor: The factor on the gradient.
        buffer: The parameter's buffer.

    Attributes:
        times: How many gradients it has added.
        other: A gradient that does not fit the parameter.
    """

    def __init__(self, stream: Stream, factor: Scalar, buffer: Parameter) -> None:
        self.stream, self.of_pass, self.factor, self.buffer = stream, stream.current, factor, buffer
        self.times, self.other = 0, None  # type: int, Any

    def __call__(self, gradient: Any) -> Any:
        """Add a gradient. Return 0 in its place."""
        if self.of_pass != self.stream.current:
            return gradient
        if not isinstance(gradient, Tensor) or gradient.shape != self.buffer.shape or gradient.dtype in COMPLEX:
            self.other = gradient
            return gradient
        self.times += 1
        add_one(self.factor, self.buffer, gradient)
        return self.stream.nothing
