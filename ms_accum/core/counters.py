"""What is known of a window: on the device how many microbatches it holds, their weight, whether it is whole; on the
host, what follows from that without asking.
"""
from __future__ import annotations

from typing import TYPE_CHECKING, Optional

import mindspore as ms
from mindspore import Tensor, ops

from .buffers import state_parameter

if TYPE_CHECKING:
    from ..tensors import Scalar

_UPDATING = -2**30
_TORN_BATCH = ("the open window may hold only some pieces of a batch, because an error or an interrupt stopped the "
               "others; expected whole batches: call accumulator.reset(), which drops the open window, and go on with "
               "the next batch")
_TORN_UPDATE = ("an error or an interrupt stopped an update, of which the parameters may hold a part; expected whole "
                "updates: load a checkpoint, or call accumulator.reset(), which drops the window, and go on")


@ms.jit_class
class Counters:
    """The Parameters that say what the window holds; see `Accumulator` for what is public.

    A microbatch or an update that is stopped in the middle leaves a trace in `unfinished`: a small number for a
    microbatch, a large negative one for an update. MindSpore may report an error after later calls, so each piece notes
    its begin and its end, and the end of the microbatch takes all of these back: what is missing in between shows.

    Attributes:
        saved: For the host: closed windows, and microbatches in the open one, when the last checkpoint was saved.
        reported: For the host: `skipped` when a guard last raised an error about it.
    """

    def __init__(self, prefix: str) -> None:
        self.saved: Optional[tuple[int, int]] = None
        self.reported: Optional[int] = None
        self.mini_step, self.closed_windows, self.skipped, self.skipped_in_row, self.unfinished, self.taken = (
            state_parameter(f"{prefix}.{name}", (), ms.int32)
            for name in ("mini_step", "closed_windows", "skipped", "skipped_in_row", "unfinished", "taken"))
        self.weight_sum, self.window_weight = (
            state_parameter(f"{prefix}.{name}", (), ms.float32) for name in ("weight_sum", "window_weight"))
        self.of_window = (self.mini_step, self.unfinished, self.taken, self.weight_sum)
        self.kept = (self.closed_windows, self.skipped, self.skipped_in_row, self.window_weight)

    def note(self, change: Scalar) -> Tensor:
        """Note the begin or the end of something that must not be stopped in the middle. Return what to wait for."""
        return ops.assign_add(self.unfinished, change)

    def begin(self, after: Tensor) -> Tensor:
        """Note that a microbatch begins, once `after` is known: an error before that has changed nothing."""
        return self.note(ops.depend(Tensor(1, ms.int32), after))

    def begin_update(self, after: Tensor) -> None:
        """Note that an update, or a load, is about to change parameters, once `after` is known.

        An error before that has changed nothing. A window that is applied twice is worse than one that is refused.
        """
        ops.assign(self.unfinished, ops.depend(Tensor(_UPDATING, ms.int32), after))

    def end_update(self) -> None:
        """Note that the parameters are changed, all of them. `empty` says so, too."""
        ops.assign(self.unfinished, 0)

    def count(self, taken: Scalar) -> None:
        """Count a microbatch, if a piece of it was taken on this rank or on one that it exchanges microbatches with."""
        ops.assign_add(self.mini_step, ops.minimum(taken, 1).astype(ms.int32) if isinstance(taken, Tensor) else taken)

    def take(self, taken: Scalar) -> None:
        """Count a piece, if it was taken."""
        ops.assign_add(self.taken, taken.astype(ms.int32) if isinstance(taken, Tensor) else taken)

    def end_uncut(self, taken: Scalar) -> None:
        """Count a microbatch that is not cut, and take its note back."""
        self.count(taken)
        self.note(-1)

    def end_microbatch(self, pieces: int) -> None:
        """Count a microbatch of so many pieces, and take their notes back."""
        self.count(self.taken + 0)
        ops.assign(self.taken, 0)
        self.note(-2 * pieces)

    def close(self, weight: Scalar) -> None:
        """Count a window of this weight that was applied or dropped."""
        ops.assign(self.window_weight, weight)
        ops.assign_add(self.closed_windows, 1)

    def empty(self) -> None:
        """Empty the open window, and forget what was stopped."""
        ops.assign(self.mini_step, 0)
        ops.assign(self.taken, 0)
        ops.assign(self.unfinished, 0)

    def note_saved(self) -> None:
        """Note that a checkpoint holds all this: the open window is not lost if the run ends here. For the host."""
        self.saved = self.closed_and_held()

    def note_loaded(self) -> None:
        """Note that all this came from a checkpoint. For the host."""
        self.note_saved()
        self.reported = None

    def closed_and_held(self) -> tuple[int, int]:
        """Return the windows closed, and the microbatches in the open one. For the host."""
        return int(self.closed_windows), int(self.mini_step)

    def require_whole(self) -> None:
        """Raise RuntimeError if something was stopped in the middle. For the host."""
        unfinished = int(self.unfinished)
        if unfinished:
            raise RuntimeError(_TORN_UPDATE if unfinished <= _UPDATING // 2 else _TORN_BATCH)


class Countdown:
    """What the host knows of the open window without asking the device; shared by all who close windows on the host.

    Attributes:
        held: Microbatches in the open window, if somebody counted them; 0 from a cell, which does not look.
        remaining: How many the window needs, at least, until it is full; None: ask the device.
    """

    def __init__(self) -> None:
        self.held, self.remaining = 0, None

    def set(self, held: int, remaining: Optional[int]) -> None:
        """Remember what the device said, or what follows from it."""
        self.held, self.remaining = held, remaining

    def claim(self) -> tuple[int, Optional[int]]:
        """Return `(held, remaining)`, and forget it until somebody sets it again: whatever happens, it is not stale."""
        remaining, self.remaining = self.remaining, None
        return self.held, remaining
