"""Counters of the open window and of the run, on the device; and the journal, which shows what was not finished."""
from __future__ import annotations

from math import nan
from typing import TYPE_CHECKING, Optional

import mindspore as ms
from mindspore import Parameter, Tensor, ops

from ..tensors import as_tensor, as_vector, state_parameter

if TYPE_CHECKING:
    from ..tensors import Numbers, Scalar

_UPDATING = -2**30
_FRACTION = 2.0**36  # fractions of weights are counted in units of 2**-36
_TORN_BATCH = ("the open window may hold only some pieces of a batch, because an error or an interrupt stopped the "
               "others; call accumulator.reset(), which drops the open window, and continue with the next batch")
_TORN_UPDATE = ("an error or an interrupt stopped an update, so it may have changed only some of the parameters; load "
                "a checkpoint, on all ranks, or, on one device, call accumulator.reset(), which drops the window")


@ms.jit_class
class Journal:
    """Mark on the device that a microbatch or an update was begun and has not ended.

    The sum of open marks is a small number for a microbatch, and a large negative one for an update. MindSpore may
    report an error only after later calls. So each piece marks its begin and its end, and the end of the microbatch
    subtracts all of these marks: a missing piece leaves a sum that is not 0.

    Attributes:
        unfinished: The sum of all marks, 0 if nothing is unfinished: int32 Parameter of shape `()`.
    """

    def __init__(self, prefix: str) -> None:
        self.unfinished = state_parameter(f"{prefix}.unfinished", (), ms.int32)

    def mark(self, change: Scalar) -> Tensor:
        """Add to the marks. Return a Tensor that later operators can depend on."""
        return ops.assign_add(self.unfinished, change)

    def begin(self, loss: Tensor) -> Tensor:
        """Mark that a piece begins, once `loss` is computed: an error before that has changed nothing.

        Return the loss. None of its gradients is added before the mark, because additions come later in the program.
        """
        return ops.depend(loss, self.mark(ops.depend(Tensor(1, ms.int32), loss)))

    def updating(self, after: Tensor) -> None:
        """Mark that an update, or a load, is about to change parameters, once `after` is computed.

        An error before that has changed nothing. An error message is better than a window that is applied twice.
        """
        ops.assign(self.unfinished, ops.depend(Tensor(_UPDATING, ms.int32), after))

    def done(self) -> None:
        """Set the marks to 0: the parameters are changed, or the window was dropped."""
        ops.assign(self.unfinished, 0)


class NoProgress(RuntimeError):
    """Report that more than `max_skips` were skipped in a row. No graph has failed."""


def require_whole(unfinished: int) -> None:
    """Raise RuntimeError if a batch or an update was not finished, given the marks of a journal."""
    if unfinished:
        raise RuntimeError(_TORN_UPDATE if unfinished <= _UPDATING // 2 else _TORN_BATCH)


@ms.jit_class
class Counters:
    """Hold the counters, as Parameters; `Accumulator` explains those that are public.

    Attributes:
        seen_rest: The remainder of `seen`, in units of 2**-36.
        measured: Sums of the values that the stages measured in the open window: float32 `(measures,)`; empty if no
            stage measures.
        counted_sum: The part of the open window that `seen` counts: `weight_sum`, unless `count_apart` was called.
        saved: For the host: the numbers of closed windows, and of microbatches in the open one, at the last checkpoint.
        reported: For the host: the value of `skipped` when an error about it was last raised.
        warned: For the host: whether the warning about many skips was given.
        loads: For the host: the number of checkpoints loaded.
        max_skips: For the host: the number of skips in a row that raise no error; None: any number.
    """

    def __init__(self, prefix: str, max_skips: Optional[int] = None) -> None:
        self.max_skips = max_skips
        self.saved: Optional[tuple[int, int]] = None
        self.reported: Optional[int] = None
        self.warned = False
        self.loads, self.prefix = 0, prefix
        self.mini_step, self.update_step, self.closed_windows, self.skipped, self.skipped_in_row, self.taken = (
            state_parameter(f"{prefix}.{name}", (), ms.int32)
            for name in ("mini_step", "update_step", "closed_windows", "skipped", "skipped_in_row", "taken"))
        self.weight_sum, self.window_weight = (
            state_parameter(f"{prefix}.{name}", (), ms.float32) for name in ("weight_sum", "window_weight"))
        self.seen, self.seen_rest = (state_parameter(f"{prefix}.{name}", (), ms.int64)
                                     for name in ("seen", "seen_rest"))
        self.grad_norm = state_parameter(f"{prefix}.grad_norm", (), ms.float32, nan)
        self.counted_sum = self.weight_sum
        self.apart: tuple[Parameter, ...] = ()
        self.measured: tuple[Parameter, ...] = ()
        self.run_state = (self.update_step, self.seen, self.seen_rest, self.grad_norm, self.closed_windows,
                          self.skipped, self.skipped_in_row, self.window_weight)

    @property
    def window_state(self) -> tuple:
        """Return the Parameters that belong to the open window."""
        return self.mini_step, self.taken, self.weight_sum, *self.apart, *self.measured

    def measure(self, numbers: int) -> None:
        """Make room for the values that stages measure. For the host, before anything is compiled."""
        if numbers:
            self.measured = (state_parameter(f"{self.prefix}.measured", (numbers,), ms.float32),)

    def count_apart(self) -> None:
        """Let `seen` count values other than the weights from now on. For the host, before anything is compiled."""
        if not self.apart:
            self.apart = (state_parameter(f"{self.prefix}.counted_sum", (), ms.float32),)
            self.counted_sum = self.apart[0]

    def include(self, weight: Scalar, counted: Scalar, measured: Numbers) -> None:
        """Add a piece to the open window."""
        ops.assign_add(self.weight_sum, as_tensor(weight))
        for counted_sum in self.apart:
            ops.assign_add(counted_sum, as_tensor(counted))
        for sums in self.measured:
            ops.assign_add(sums, as_vector(measured))

    def take(self, taken: Scalar) -> None:
        """Count a piece, if it was taken."""
        ops.assign_add(self.taken, taken.astype(ms.int32) if isinstance(taken, Tensor) else taken)

    def count(self, taken: Scalar) -> None:
        """Count a microbatch, if a piece of it was taken on this rank or a rank that it exchanges microbatches with."""
        ops.assign_add(self.mini_step, ops.minimum(taken, 1).astype(ms.int32) if isinstance(taken, Tensor) else taken)

    def count_taken(self) -> None:
        """Count a microbatch in pieces, if one of them was taken."""
        self.count(self.taken + 0)
        ops.assign(self.taken, 0)

    def see(self, counted: Scalar) -> None:
        """Add the count of an update to `seen`. Fractions are kept: five updates of weight 0.6 add 3.

        NaN and infinity add nothing.
        """
        if isinstance(counted, Tensor):
            counted = ops.where(ops.isfinite(counted), counted, Tensor(0.0, ms.float32))
        whole = ops.round(as_tensor(counted))
        if not isinstance(counted, Tensor) and counted % 1 == 0:
            ops.assign_add(self.seen, whole.astype(ms.int64))
        else:
            rest = self.seen_rest + ((counted - whole) * _FRACTION).astype(ms.int64)
            carry = ops.round(rest.astype(ms.float32) / _FRACTION)
            ops.assign(self.seen_rest, rest - (carry * _FRACTION).astype(ms.int64))
            ops.assign_add(self.seen, (whole + carry).astype(ms.int64))

    def close(self, weight: Scalar) -> None:
        """Count a window of this weight that was applied or dropped."""
        ops.assign(self.window_weight, weight)
        ops.assign_add(self.closed_windows, 1)

    def empty(self) -> None:
        """Empty the open window."""
        ops.assign(self.mini_step, 0)
        ops.assign(self.taken, 0)
        ops.assign(self.weight_sum, 0.0)
        for counted_sum in self.apart:
            ops.assign(counted_sum, 0.0)
        for sums in self.measured:
            ops.assign(sums, ops.zeros_like(sums))

    def note_saved(self) -> None:
        """Note that a checkpoint holds all state: the open window is not lost if the run ends here. For the host."""
        self.saved = self.closed_and_held()

    def note_loaded(self) -> None:
        """Note that all state came from a checkpoint: counts on the host must be read again. For the host."""
        self.note_saved()
        self.reported, self.loads = None, self.loads + 1

    def closed_and_held(self) -> tuple[int, int]:
        """Return the number of closed windows, and of microbatches in the open one. For the host."""
        return int(self.closed_windows), int(self.mini_step)
