"""The host's count of an open window, which lets it schedule graphs that hold no control flow."""
from __future__ import annotations

from typing import Optional
from weakref import WeakValueDictionary

from mindspore import Parameter
from mindspore.ops import constexpr

from .window import Window


class HostCount:
    """Count the microbatches of an accumulator's open window on the host, without waiting for the device.

    The device counts, too. Its counter is read before the first call, after everything that may have changed the window
    behind the host's back, and at each boundary, where the two counts are compared.

    Args:
        name: A name that no other accumulator of the process has.
        window: When a window closes.
        mini_step, update_step: The counters on the device.

    Attributes:
        microbatches: Microbatches in the open window.
        length: How many it holds when it is full.
        closing: Whether a train step is about to fill the window and to close it.
    """

    def __init__(self, name: str, window: Window, mini_step: Parameter, update_step: Parameter) -> None:
        self.microbatches = self.length = self._updates = 0
        self._window, self._mini_step, self._update_step = window, mini_step, update_step
        self.closing = False
        self._known = False
        self._refused: Optional[int] = None  # what the device's counter was when it was refused
        _counts[name] = self

    @property
    def full(self) -> bool:
        """Whether the open window holds all its microbatches."""
        return self.microbatches >= self.length

    def forget(self) -> None:
        """Read the device's counters before the next use."""
        self._known = False

    def settle(self, refuse: bool = True) -> None:
        """Read the device's counters if they may have changed. RuntimeError if they were refused before."""
        if self._known:
            return
        self.microbatches, self._updates = int(self._mini_step), int(self._update_step)
        if refuse and self.microbatches == self._refused:
            self._refuse(self.microbatches)
        self._refused = None
        self.length = self._window.host_length(self._updates)
        self._known = True
        self.closing = self.closing and self.full

    def compare(self, fewer_allowed: bool) -> None:
        """Take over the device's count if it may be lower (of skipped microbatches). RuntimeError if it differs."""
        counted = int(self._mini_step)
        if counted != self.microbatches and not (fewer_allowed and counted < self.microbatches):
            self.forget()
            self._refused = counted
            self._refuse(self.microbatches)
        self.microbatches = counted
        self.closing = self.closing and self.full

    def close(self, updated: bool) -> None:
        """Note that the window was closed, with an update or without one."""
        self.closing = False
        self.microbatches = 0
        self._updates += updated
        self.length = self._window.host_length(self._updates)

    def _refuse(self, expected: int) -> None:
        raise RuntimeError(
            f"the open window holds {self._refused} microbatches on the device, but the train step counted {expected}: "
            "a function that you compiled calls the accumulator, a counter was assigned, or a call failed after it "
            'returned; expected strategy="split" to be told of each microbatch; call accumulator.reset(), which drops '
            'the open window, or accumulator.flush(), which applies it, and give strategy="fused" if this is meant')


# By name, because a `constexpr` is given values only.
_counts: WeakValueDictionary[str, HostCount] = WeakValueDictionary()


@constexpr
def recount(name: str) -> bool:
    """Tell the host that the accumulator of that name is called by hand. Op by op; a compiled function runs it once."""
    _counts[name].forget()
    return True
