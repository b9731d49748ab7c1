"""Buckets: gradients one after another, so that few large collectives carry many parameters."""
from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, ops
from mindspore.communication import GlobalComm

from ..tensors import as_vector

if TYPE_CHECKING:
    from ..tensors import Gradients, Numbers

MEBIBYTE = 2**20


@dataclass(frozen=True)
class Accumulated:
    """What is accumulated: the whole parameters in the optimizer's order, and the dtypes of their buffers."""

    parameters: tuple[Parameter, ...]
    dtypes: tuple[ms.Type, ...]  # of the buffers
    settings: dict[str, str]  # what has to be the same on every rank, by name
    slices: tuple[Parameter, ...] = ()  # the optimizer's parameters, if they are slices of these


@ms.jit_class
class Buckets:
    """Gradients of one dtype one after another, padded to a multiple of the ranks, and their exchange.

    Args:
        parameters: What the gradients belong to.
        dtypes: Their dtypes.
        size: Bytes in a bucket, at most.
        rank, ranks: Which rank of the group this is, of how many.
        group: Those that exchange; "" stands for all.
    """

    def __init__(self, parameters: tuple[Parameter, ...], dtypes: tuple[ms.Type, ...], size: int, rank: int, ranks: int,
                 group: str = "") -> None:
        self.rank, self.ranks = rank, ranks
        self.shapes = tuple(tuple(p.shape) for p in parameters)
        self.dtypes = dtypes
        self.sizes = tuple(prod(shape) for shape in self.shapes)
        self.members = filled(self.sizes, dtypes, size)
        places = [i for members in self.members for i in members]
        self.order = tuple(places.index(i) for i in range(len(places)))
        self.carries_numbers = dtypes[self.members[0][0]] == ms.float32
        self.totals = tuple(sum(self.sizes[i] for i in members) for members in self.members)
        self.lengths = tuple(-(-total // ranks) * ranks for total in self.totals)
        self.padding = tuple(length - total for length, total in zip(self.lengths, self.totals))
        group = group or GlobalComm.WORLD_COMM_GROUP
        self.sum = ops.AllReduce(group=group)
        # On CPU, MindSpore 2.10 has an AllGather for all ranks together only.
        gathers = ms.get_context("device_target") != "CPU" or group == GlobalComm.WORLD_COMM_GROUP
        self.gather = ops.AllGather(group=group) if gathers else None

    # Each collective waits for the one before: left to themselves, those of one graph may start in another order on
    # another rank.

    def all_reduce(self, gradients: Gradients, numbers: Numbers) -> tuple[Gradients, Numbers]:
        """Return the sums over all ranks. The numbers travel behind the first bucket, if that is of float32."""
        if self.carries_numbers:
            first = self.members[0]
            sums = self.sum(ops.concat((self._flat(gradients, first, 0), as_vector(numbers))))
            numbers = _as_numbers(sums[self.totals[0]:], len(numbers))
            summed = self._split(sums, first)
            others = self.members[1:]
        else:
            sums = self.sum(as_vector(numbers))
            numbers = _as_numbers(sums, len(numbers))
            summed = ()
            others = self.members
        for members in others:
            sums = self.sum(ops.depend(self._flat(gradients, members, 0), sums))
            summed = (*summed, *self._split(sums, members))
        return tuple([summed[i] for i in self.order]), numbers

    def all_gather(self, parts: Gradients) -> Gradients:
        """Return whole gradients from the parts of all ranks."""
        gathered = ()
        whole = parts[0]
        for members, part in zip(self.members, parts):
            whole = self._gathered(ops.depend(part, whole))
            gathered = (*gathered, *self._split(whole, members))
        return tuple([gathered[i] for i in self.order])

    def parts(self, gradients: Gradients) -> Gradients:
        """Return this rank's part of gradients that all ranks hold, without an exchange."""
        found = ()
        for members, length, padding in zip(self.members, self.lengths, self.padding):
            share = length // self.ranks
            found = (*found, self._flat(gradients, members, padding)[self.rank * share:(self.rank + 1) * share])
        return found

    def sum_numbers(self, numbers: Numbers) -> Numbers:
        """Return the sums over all ranks of numbers alone."""
        return _as_numbers(self.sum(as_vector(numbers)), len(numbers))

    def _gathered(self, part: Tensor) -> Tensor:
        if self.gather is not None:
            return self.gather(part)
        size = part.shape[0]
        before, after = self.rank * size, (self.ranks - 1 - self.rank) * size
        # A sum with the zeros of the others.
        return self.sum(ops.concat((ops.zeros(before, part.dtype), part, ops.zeros(after, part.dtype))))

    def _flat(self, gradients: Gradients, members: tuple[int, ...], padding: int) -> Tensor:
        parts = [gradients[i].reshape(-1) for i in members]
        if padding:
            parts.append(ops.zeros(padding, self.dtypes[members[0]]))
        return ops.concat(tuple(parts))

    def _split(self, flat: Tensor, members: tuple[int, ...]) -> Gradients:
        gradients = ()
        start = 0
        for i in members:
            gradients = (*gradients, flat[start:start + self.sizes[i]].reshape(self.shapes[i]))
            start += self.sizes[i]
        return gradients


def filled(sizes: tuple[int, ...], dtypes: tuple[ms.Type, ...], limit: int) -> tuple[tuple[int, ...], ...]:
    """Return the parameters of each bucket of at most `limit` bytes, larger ones alone; float32 first."""
    buckets: list[list[int]] = []
    for dtype in sorted(set(dtypes), key=lambda dtype: (dtype != ms.float32, str(dtype))):
        itemsize = np.dtype(ms.dtype_to_nptype(dtype)).itemsize
        room = 0
        for i in (i for i, other in enumerate(dtypes) if other == dtype):
            if not buckets or room < sizes[i] * itemsize or dtypes[buckets[-1][0]] != dtype:
                buckets.append([])
                room = limit
            buckets[-1].append(i)
            room -= sizes[i] * itemsize
    return tuple(map(tuple, buckets))


def _as_numbers(sums: Tensor, length: int) -> Numbers:
    return tuple([sums[i] for i in range(length)])
