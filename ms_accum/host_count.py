"""The host's count of an open window, which lets it schedule graphs that hold no control flow."""
from __future__ import annotations

from typing import Optional
from weakref import WeakValueDictionary

import numpy as np
from mindspore import Parameter
from mindspore.ops import constexpr

from .window import Window


class HostCount:
    """Count the microbatches of an accumulator's open window on the host, without waiting for the device.

    The device counts, too. Its counters are read before the first call, after everything that may have changed the
    window without the host, and at each boundary, where both sides are compared.

    Args:
        name: A name that no other accumulator of the process has.
        window: When a window closes.
        budget: The weight that closes it before; None: no weight does. It is read on the device whenever it is needed.
        mini_step, update_step, weight_sum: The counters on the device.

    Attributes:
        microbatches: Microbatches in the open window.
        length: How many it holds when it is full.
        closing: Whether a train step is about to fill the window and to close it.
        updates: Updates done.
        returned: Whether the last call of a train step came to its end. False at first: a checkpoint may hold anything.
        ahead: Whether the open window was weighed as a whole, and not all of it was trained yet.
        loaded: Whether a checkpoint was loaded. If it is of other ranks, this one's share may be a full window.
        apart: Whether gradients of several losses are kept apart; None before the first one was added.
    """

    def __init__(
        self,
        name: str,
        window: Window,
        budget: Optional[float],
        mini_step: Parameter,
        update_step: Parameter,
        weight_sum: Parameter,
    ) -> None:
        self.microbatches = self.length = self.updates = 0
        self._window, self._budget = window, budget
        self._mini_step, self._update_step, self._weight_sum = mini_step, update_step, weight_sum
        self.closing = self.returned = self.ahead = self.loaded = self._known = False
        self.apart: Optional[bool] = None
        self._refusal: Optional[tuple[tuple[int, int], str]] = None  # the device's counters, and what was said
        _counts[name] = self

    @property
    def full(self) -> bool:
        """Whether the open window holds all its microbatches, or the weight that closes it."""
        if self.microbatches < self.length and self._budget is not None:
            return self._weight_sum.asnumpy().reshape(-1)[0] >= np.float32(self._budget)  # as the device compares
        return self.microbatches >= self.length

    @property
    def may_close(self) -> bool:
        """Whether the next microbatch can be the window's last one."""
        return self.microbatches + 1 >= self.length or self._budget is not None

    def forget(self) -> None:
        """Read the device's counters before the next use."""
        self._known = False

    def start_over(self) -> None:
        """Forget, after a call by hand or a checkpoint, also what was refused and what was interrupted."""
        self._known = self.closing = self.ahead = self.loaded = False
        self._refusal = None

    def settle(self, refuse: bool = True) -> None:
        """Read the device's counters if they may have changed. RuntimeError if they were refused before."""
        if self._known:
            return
        counters = self._on_device()
        if refuse and self._refusal is not None and counters == self._refusal[0]:
            raise RuntimeError(self._refusal[1])
        self.microbatches, self.updates = counters
        self._refusal = None
        self.length = self._window.host_length(self.updates)
        self._known = True
        self.closing = self.closing and self.full

    def compare(self, fewer_allowed: bool) -> None:
        """Take over the device's count if it may be lower (of skipped microbatches). RuntimeError if it differs."""
        microbatches, updates = self._on_device()
        fewer = fewer_allowed and microbatches < self.microbatches
        if updates != self.updates or (microbatches != self.microbatches and not fewer):
            self.forget()
            self._refusal = (microbatches, updates), (
                f"the open window holds {microbatches} microbatches after {updates} updates, expected "
                f"{self.microbatches} after {self.updates}; it was not applied. Either a function that you compiled "
                "calls the accumulator, or a counter was assigned, or MindSpore reported the error of an earlier call "
                "late. Call accumulator.reset(), which drops the window, or flush(), which applies it. If your "
                'compiled function has to call the accumulator, build the train step with strategy="fused"')
            raise RuntimeError(self._refusal[1])
        self.microbatches = microbatches
        self.closing = self.closing and self.full

    def close(self, updated: bool) -> None:
        """Note that the window was closed, with an update or without one."""
        self.closing = self.ahead = False
        self.microbatches = 0
        self.updates += updated
        if self._window.adaptive is None:
            self.length = self._window.host_length(self.updates)
        else:
            self.forget()  # the device has just chosen; to ask it now would wait for the update

    def _on_device(self) -> tuple[int, int]:
        return int(self._mini_step), int(self._update_step)


# By name, because a `constexpr` is given values only.
_counts: WeakValueDictionary[str, HostCount] = WeakValueDictionary()


@constexpr
def recount(name: str) -> bool:
    """Tell the host that the accumulator of that name is called by hand. Op by op; a compiled function runs it once."""
    _counts[name].start_over()
    return True


@constexpr
def keep_apart(name: str) -> bool:
    """Note that the accumulator of that name keeps several losses apart. RuntimeError if it keeps their sum."""
    if _counts[name].apart is False:
        raise RuntimeError("the accumulator keeps one set of buffers for all losses, because a train step weighs whole "
                           "windows before it trains on them (lookahead=True, or accumulate_step=1); expected no other "
                           "train step and no calls by hand: build another accumulator for those")
    _counts[name].apart = True
    return True
