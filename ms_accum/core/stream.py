"""A stream of gradients: op by op, the backward pass adds each gradient to its buffer the moment it is computed.

    backward pass ─► gradient of the last parameter ─► hook: weigh, add to its buffer ─► forgotten
                  ─► gradient of the one before     ─► hook ...

So the gradients of two parameters are never in memory together, as in a graph on Ascend.
"""
from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import mindspore as ms
from mindspore import Parameter, Tensor

from ..mindspore_api import executor, gradient_of, is_recorded, run_backward
from ..tensors import FLOATS
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


def require_backward() -> None:
    """Raise RuntimeError if MindSpore has no backward pass of a recorded loss."""
    if run_backward is None or executor is None:
        raise RuntimeError("this MindSpore lacks a private function that accumulator.backward needs; train with "
                           "make_train_step(forward_fn, optimizer, accumulate_step, eager=True)")


def require_scalar_loss(loss: Any) -> None:
    """Raise an error unless a loss is a float scalar that was recorded."""
    if not isinstance(loss, Tensor):
        raise TypeError(f"loss is of type {type(loss).__name__}, expected a Tensor; give the loss itself, without "
                        "float(), .item() or .asnumpy()")
    if loss.shape != ():
        raise ValueError(f"loss has shape {tuple(loss.shape)}, expected shape (); give the mean over the samples")
    if loss.dtype not in FLOATS:
        raise TypeError(f"loss is of {loss.dtype}, expected a float dtype; do not cast the network's loss")
    if not is_recorded(loss):
        raise RuntimeError("loss was computed while nothing was recorded, so it has no gradients, expected one of a "
                           "loop over accumulator.epoch(batches), in PyNative mode; also look for stop_gradient")


def require_no_gradients(parameters: Iterable[Parameter]) -> None:
    """Raise RuntimeError for parameters that hold a gradient already, or are sharded by another library."""
    for parameter in parameters:
        if gradient_of(parameter) is not None:
            raise RuntimeError(f"{parameter.name} holds a gradient of another backward pass, expected none; leave out "
                               "loss.backward() and hooks of other frameworks that accumulate gradients, or clear them")
        if hasattr(parameter, "to_local"):
            raise RuntimeError(f"{parameter.name} is sharded (a DTensor), expected a whole parameter; train without "
                               "fully_shard, with reducer=DataParallel()")
