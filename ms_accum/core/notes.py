"""What a graph notes for the host, and asks of it, by the number of a window.

MindSpore runs a `constexpr` function when it compiles a graph, and at each call op by op: so a graph can check a Python
object, or tell the host something, without a kernel. MindSpore keeps what a compiled graph uses until the process ends.
A graph therefore knows only a number; the host side is found by a weak reference.
"""
from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

from mindspore.ops import constexpr

from ..distributed.parallel_modes import require_unsharded

if TYPE_CHECKING:
    from .boundary import Boundary

_numbers = count()
_boundaries: WeakValueDictionary[int, Boundary] = WeakValueDictionary()


def new_number() -> int:
    """Return a number for a window."""
    return next(_numbers)


def prefix_of(number: int, wanted: str) -> str:
    """Return the prefix for names of a window's Parameters: `wanted`, or one with its number if another one has that.

    In one graph, each name may be there once. `wanted` is equal in every process, so that a network whose Cell holds
    such a Parameter is saved under the same name whatever else was built.
    """
    taken = {boundary.window.prefix for boundary in _boundaries.values()}
    return f"accumulator{number}" if wanted in taken else wanted


def register(number: int, boundary: Boundary) -> None:
    """Let graphs find the boundary of the window with this number, as long as something else keeps it."""
    _boundaries[number] = boundary


@constexpr
def note_filled(number: int) -> bool:
    """Note that a window is filled by hand. Raise an error if it must not be; see `Boundary.note_filled`."""
    _boundaries[number].note_filled()
    return True


@constexpr
def note_called(number: int, runs_op_by_op: bool, is_done: bool) -> bool:
    """Note that a call which adds by hand begins, or is done; see `Boundary.note_called`."""
    _boundaries[number].note_called(runs_op_by_op, is_done)
    return True


@constexpr
def note_closed(number: int, is_applied: bool) -> bool:
    """Note that a window is closed by hand; see `Boundary.note_closed`."""
    _boundaries[number].note_closed(is_applied)
    return True


@constexpr
def note_use(number: int) -> bool:
    """Note that a graph holds the window's unit of weights as a constant, and give its buffers memory.

    Raise ValueError in a graph that MindSpore shards: `AutoParallel` says so only when it is compiled.
    """
    require_unsharded()
    _boundaries[number].window.is_in_use = True
    return allocate(number)


@constexpr
def allocate(number: int) -> bool:
    """Give the window's buffers memory."""
    for parameter in _boundaries[number].window.buffers:
        if parameter.has_init:
            parameter.init_data()
    return True
