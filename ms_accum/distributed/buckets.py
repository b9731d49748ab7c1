"""Buckets: tensors joined to few large ones, with a row for each part that the sum is divided into, or with one row.

    parameter 0:  a0 a1 a2 a3 a4        row 0:  a0 a1 a2 | b0
    parameter 1:  b0 b1                 row 1:  a3 a4  0 | b1
"""
from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, ops
from mindspore.ops import constexpr

from ..mindspore_api import GlobalComm, jit_class
from ..tensors import Gradients, Numbers, Scalar, as_vector, mapped, scaled, unstack
from .meeting import group_of

MEBIBYTE = 2**20
_slice, each = ops.Slice(), ops.HyperMap()


@jit_class
class Group:
    """The collectives of a group of ranks, in which this rank has a place.

    On CPU, MindSpore 2.10 lacks ReduceScatter: there, each rank keeps its part of a sum. A group of fewer than
    all ranks lacks AllGather, too: there, that is a sum with zeros in place of the rows of others.
    """

    def __init__(self, ranks: range, place: int) -> None:
        name, on_cpu = group_of(ranks), ms.get_context("device_target") == "CPU"
        self.place, self.size, self.sum = place, len(ranks), ops.AllReduce(group=name)
        self.scatter = None if on_cpu else ops.ReduceScatter(group=name)
        self.gather = None if on_cpu and name != GlobalComm.WORLD_COMM_GROUP else ops.AllGather(group=name)

    def part(self, flat: Tensor) -> Tensor:
        """Return this rank's part of the sum."""
        if self.scatter is not None:
            return self.scatter(flat)
        length = flat.shape[0] // self.size
        return _slice(self.sum(flat), (self.place * length,), (length,))

    def rows(self, row: Tensor) -> Tensor:
        """Return the rows of all ranks, `(ranks, length)`."""
        if self.gather is not None:
            return self.gather(row).reshape(self.size, -1)
        before, after = self.place * row.shape[0], (self.size - 1 - self.place) * row.shape[0]
        row = ops.concat((ops.zeros(before, row.dtype), row, ops.zeros(after, row.dtype)))
        return self.sum(row).reshape(self.size, -1)


@jit_class
class Buckets:
    """Exchange tensors of some shapes, one bucket after the other.

    Args:
        shapes: Their shapes.
        dtypes: Their dtypes.
        limit: Largest number of bytes in a bucket. A larger tensor travels alone.
        parts: Number of rows.
        multiple: Sizes are filled up with zeros to a multiple of it.
    """

    def __init__(self, shapes: Sequence[tuple[int, ...]], dtypes: Sequence[ms.Type], limit: int, parts: int = 1,
                 multiple: int = 1) -> None:
        self.dtypes, self.parts = tuple(dtypes), parts
        kinds = [(prod(shape), tuple(shape)) for shape in shapes]
        self.lengths = tuple(-(-size // multiple) * multiple for size, _ in kinds)
        self.widths = tuple(length // parts for length in self.lengths)
        self.members = filled([size for size, _ in kinds], self.dtypes, limit)
        # Where each tensor begins in the rows of its bucket.
        starts = {i: sum(self.widths[j] for j in members if j < i) for members in self.members for i in members}
        # A kind: a size and a shape. To map over shapes takes MindSpore time that grows with the cube of their number.
        self.starts, self.kinds = tuple(starts[i] for i in range(len(kinds))), tuple(dict.fromkeys(kinds))
        self.kind_of = tuple(map(self.kinds.index, kinds))
        self.backwards = self.members[::-1]  # the backward pass computes the gradients of the last bucket first
        places = [i for members in self.members for i in members]
        self.order = tuple(places.index(i) for i in range(len(places)))
        self.carries = self.dtypes[self.members[-1][0]] == ms.float32

    def summed(self, group: Group, gradients: Gradients, factor: Scalar, numbers: Numbers) -> tuple[Gradients, Numbers]:
        """Return the sums of `factor * gradients` over a group, or this rank's rows of them, flat, and of numbers.

        The numbers travel with the bucket that is sent first, if it is of float32. Each collective waits for the one
        before: all ranks have one order. So do the products, or those of all buckets would be in memory together.
        """
        token, summed, carried = as_vector(numbers), (), len(numbers) * self.carries
        sums = token
        if not carried:
            token = sums = group.sum(token)
        for members in self.backwards:
            rows = mapped(_row, (factor, token, self.dtypes[members[0]], self.parts), taken(gradients, members),
                          taken(self.lengths, members))
            if carried:
                rows = (*rows, ops.broadcast_to(sums, (self.parts, carried)))
            flat = (ops.concat(rows, 1) if len(rows) > 1 else rows[0]).reshape(-1)
            flat = ops.depend(flat, token)
            flat = group.sum(flat) if self.parts == 1 else group.part(flat)
            # Ascend frees what was sent once a kernel has read the sum. To wait for the sum itself would not free it.
            token = _slice(flat, (0,), (1,))
            if carried:
                sums = _slice(flat, (flat.shape[0] - carried,), (carried,))
            row = flat.reshape(1, -1)
            found = self.wholes(row, members) if self.parts == 1 else self.columns(row, members)
            summed, carried = (*found, *summed), 0
        return taken(summed, self.order), unstack(sums)

    def gathered(self, group: Group, rows: Gradients, token: Tensor) -> Gradients:
        """Return whole tensors, given this rank's rows of them, exchanged after `token`."""
        found = ()  # type: Gradients
        for members in self.members:
            row = ops.depend(joined(taken(rows, members)), token)
            row = group.rows(row)
            token = row
            found = (*found, *self.wholes(row, members))
        return taken(found, self.order)

    def wholes(self, rows: Tensor, members: tuple[int, ...]) -> Gradients:
        """Return the tensors of a bucket, given all rows, `(parts, length)`."""
        return mapped(_shaped, self.kinds, self.columns(rows, members), taken(self.kind_of, members))

    def columns(self, rows: Tensor, members: tuple[int, ...]) -> Gradients:
        """Return each tensor's columns of a bucket's rows, flat. With `ops.split`, 200 tensors would not compile."""
        return mapped(_columns, rows, taken(self.starts, members), taken(self.widths, members))


def joined(rows: Gradients) -> Tensor:
    """Return flat tensors as one."""
    return ops.concat(rows) if len(rows) > 1 else rows[0]


def taken(items: tuple, places: tuple[int, ...]) -> tuple:
    """Return the items at some places. Not a list comprehension: its graph grows with the square of its length."""
    return items[places[0]:places[-1] + 1] if in_order(places) else mapped(_item, items, places)


@constexpr
def in_order(places: tuple[int, ...]) -> bool:
    """Return whether places follow one another."""
    return places == tuple(range(places[0], places[0] + len(places)))


def filled(sizes: Sequence[int], dtypes: tuple[ms.Type, ...], limit: int) -> tuple[tuple[int, ...], ...]:
    """Return the tensors of each bucket of at most `limit` bytes. Larger ones get their own; float32 comes last."""
    buckets: list[list[int]] = []
    for dtype in sorted(set(dtypes), key=lambda dtype: (dtype == ms.float32, str(dtype))):
        itemsize = np.dtype(ms.dtype_to_nptype(dtype)).itemsize
        room = 0
        for i in (i for i, other in enumerate(dtypes) if other == dtype):
            if not buckets or room < sizes[i] * itemsize or dtypes[buckets[-1][0]] != dtype:
                buckets.append([])
                room = limit
            buckets[-1].append(i)
            room -= sizes[i] * itemsize
    return tuple(map(tuple, buckets))


# --- for HyperMap -----------------------------------------------------------------------------------------------------

def _item(items: tuple, place: int) -> Any:
    return items[place]


def _row(shared: tuple, gradient: Tensor, length: int) -> Tensor:
    """Return `factor * gradient` as rows. `shared`: the factor, what to wait for, the dtype, the number of rows."""
    flat = scaled(shared[0], ops.depend(gradient, shared[1]), shared[2]).reshape(-1)
    return padded(flat, length).reshape(shared[3], -1)


def padded(flat: Tensor, length: int) -> Tensor:
    """Return a flat tensor, filled up with zeros."""
    return flat if flat.shape[0] == length else ops.concat((flat, ops.zeros(length - flat.shape[0], flat.dtype)))


def _columns(rows: Tensor, start: int, width: int) -> Tensor:
    return (rows if width == rows.shape[1] else _slice(rows, (0, start), (rows.shape[0], width))).reshape(-1)


def _shaped(kinds: tuple, flat: Tensor, kind: int) -> Tensor:
    size, shape = kinds[kind]
    return (flat if flat.shape[0] == size else _slice(flat, (0,), (size,))).reshape(shape)


def cut(place: tuple[int, int], whole: Tensor) -> Tensor:
    """Return one of equal parts of a tensor, flat, filled up with zeros. `place`: which one, and of how many."""
    part, parts = place[0], place[1]
    width = -(-whole.size // parts)
    return _slice(padded(whole.reshape(-1), width * parts), (part * width,), (width,))


def changed(after: Tensor, part: Parameter, before: Tensor) -> Tensor:
    """Return the change of a slice, computed after `after`."""
    return part - ops.depend(before, after)
