"""Buckets: gradients joined to large tensors, so that few collectives carry many parameters."""
from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Optional

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, ops
from mindspore.ops import constexpr

from ..mindspore_api import GlobalComm, jit_class
from ..tensors import after, as_numbers, as_vector, mapped, scaled

if TYPE_CHECKING:
    from ..tensors import Gradients, Numbers, Scalar

MEBIBYTE = 2**20


@dataclass(frozen=True)
class AccumulatedParameters:
    """Describe what is accumulated: the whole parameters in the optimizer's order, and the dtypes of their buffers."""

    parameters: tuple[Parameter, ...]
    dtypes: tuple[ms.Type, ...]  # of the buffers
    settings: dict[str, str]  # settings that must be equal on every rank, by name
    slices: tuple[Parameter, ...] = ()  # the optimizer's parameters, if they are slices of these
    number: int = 0  # of the accumulator, if ranks exchange
    compares: bool = True  # whether ranks compare their parameters


@jit_class
class Buckets:
    """Join and exchange gradients of one dtype, padded to a multiple of the number of ranks.

    Args:
        parameters: The parameters of the gradients.
        dtypes: Their dtypes.
        size: Largest number of bytes in a bucket.
        rank, ranks: This rank in the group, and the number of ranks in it.
        group: Name of the group of ranks that exchange; "" stands for all ranks.
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
        before = {i: sum(self.sizes[j] for j in members[:k]) for members in self.members for k, i in enumerate(members)}
        self.starts = tuple(before[i] for i in range(len(places)))  # in their buckets
        self.backwards = self.members[::-1]  # in the order of the backward pass: an exchanged bucket can be freed first
        self.carries_numbers = dtypes[self.members[-1][0]] == ms.float32
        self.totals = tuple(sum(self.sizes[i] for i in members) for members in self.members)
        self.lengths = tuple(-(-total // ranks) * ranks for total in self.totals)
        self.padding = tuple(length - total for length, total in zip(self.lengths, self.totals))
        group = group or GlobalComm.WORLD_COMM_GROUP
        self.sum = ops.AllReduce(group=group)
        # On CPU, MindSpore 2.10 has an AllGather for all ranks together only.
        gathers = ms.get_context("device_target") != "CPU" or group == GlobalComm.WORLD_COMM_GROUP
        self.gather = ops.AllGather(group=group) if gathers else None

    # Each collective waits for the one before: otherwise those of one graph may start in a different order on
    # another rank.

    def all_reduce(self, gradients: Gradients, numbers: Numbers, before: Tensor, unit: Optional[Scalar] = None
                   ) -> tuple[Gradients, Numbers]:
        """Return the sums over all ranks of `unit * gradients`, and of numbers, exchanged after `before`.

        The last bucket is exchanged first, because the backward pass computes its gradients first. The numbers, if
        there are any, are appended to it if it is of float32.
        """
        sums, summed, others = before, (), self.backwards
        if numbers and self.carries_numbers:
            last, others = others[0], others[1:]
            own = gradients_of_bucket(last, gradients, self.dtypes, sums, unit)
            sums = self.sum(ops.depend(ops.concat((self._flat(own, last, 0), as_vector(numbers))), sums))
            numbers = as_numbers(sums[self.totals[-1]:], len(numbers))
            summed = self._split(sums, last)
        elif numbers:
            sums = self.sum(ops.depend(as_vector(numbers), sums))
            numbers = as_numbers(sums, len(numbers))
        for members in others:
            own = gradients_of_bucket(members, gradients, self.dtypes, sums, unit)
            sums = self.sum(ops.depend(self._flat(own, members, 0), sums))
            summed = (*self._split(sums, members), *summed)
        return taken(summed, self.order), numbers

    def all_gather(self, parts: Gradients) -> Gradients:
        """Return whole gradients from the parts of all ranks."""
        gathered = ()
        whole = parts[0]
        for members, part in zip(self.members, parts):
            whole = self._gathered(ops.depend(part, whole))
            gathered = (*gathered, *self._split(whole, members))
        return taken(gathered, self.order)

    def parts(self, gradients: Gradients) -> Gradients:
        """Return this rank's part of gradients that all ranks hold, without an exchange."""
        found = ()  # type: Gradients
        for members, length, padding in zip(self.members, self.lengths, self.padding):
            share = length // self.ranks
            flat = self._flat(taken(gradients, members), members, padding)
            found = (*found, flat[self.rank * share:(self.rank + 1) * share])
        return found

    def _gathered(self, part: Tensor) -> Tensor:
        if self.gather is not None:
            return self.gather(part)
        size = part.shape[0]
        before, after = self.rank * size, (self.ranks - 1 - self.rank) * size
        # A sum with the zeros of the other ranks.
        return self.sum(ops.concat((ops.zeros(before, part.dtype), part, ops.zeros(after, part.dtype))))

    def _flat(self, gradients: Gradients, members: tuple[int, ...], padding: int) -> Tensor:
        parts = mapped(_flattened, None, gradients)
        if padding:
            parts = (*parts, ops.zeros(padding, self.dtypes[members[0]]))
        return ops.concat(parts)

    def _split(self, flat: Tensor, members: tuple[int, ...]) -> Gradients:
        return mapped(_member, (flat, self.starts, self.sizes, self.shapes), members)


def gradients_of_bucket(members: tuple[int, ...], gradients: Gradients, dtypes: tuple[ms.Type, ...], before: Tensor,
                        unit: Optional[Scalar] = None) -> Gradients:
    """Return the gradients of a bucket, times `unit`.

    The products are computed after `before`. Otherwise those of all buckets would be in memory together.
    """
    own = taken(gradients, members)
    if unit is None:
        return own
    return mapped(scaled, unit, mapped(after, before, own), (dtypes[members[0]],) * len(members))


def taken(items: tuple, places: tuple[int, ...]) -> tuple:
    """Return the items at some places. Not a list comprehension: its graph grows with the square of its length."""
    return items[places[0]:places[-1] + 1] if in_order(places) else mapped(_item, items, places)


@constexpr
def in_order(places: tuple[int, ...]) -> bool:
    """Return whether places follow one another."""
    return places == tuple(range(places[0], places[0] + len(places)))


def _item(items: tuple, place: int) -> Tensor:
    return items[place]


def _flattened(_: None, gradient: Tensor) -> Tensor:
    return gradient.reshape(-1)


def _member(bucket: tuple, i: int) -> Tensor:
    flat, starts, sizes, shapes = bucket[0], bucket[1], bucket[2], bucket[3]
    return flat[starts[i]:starts[i] + sizes[i]].reshape(shapes[i])


def filled(sizes: tuple[int, ...], dtypes: tuple[ms.Type, ...], limit: int) -> tuple[tuple[int, ...], ...]:
    """Return the parameters of each bucket of at most `limit` bytes. Larger ones get their own; float32 comes last."""
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
