"""Rows: each parameter is cut into one flat slice per rank, and the slices of a rank are joined to its row.

    parameter 0:  a0 a1 a2 a3 a4        row 0:  a0 a1 a2 | b0
    parameter 1:  b0 b1                 row 1:  a3 a4  0 | b1

Such rows are scattered and gathered, one bucket after the other: each rank keeps, or gives, one row.
"""
from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

import mindspore as ms
from mindspore import Parameter, Tensor, ops

from ..mindspore_api import jit_class
from .buckets import filled

if TYPE_CHECKING:
    from ..tensors import Gradients


def width_of(size: int, ranks: int) -> int:
    """Return the number of elements in each slice of a parameter."""
    return -(-size // ranks)


@jit_class
class Rows:
    """Lay out parameters as rows, in buckets of one dtype.

    Args:
        parameters: The whole parameters.
        dtypes: dtypes of the tensors that are laid out.
        size: Largest number of bytes in a bucket.
        ranks: Number of rows.

    Attributes:
        members: The parameters of each bucket, by index.
        lengths: Number of elements in one row of each bucket.
        bucket_dtypes: dtype of each bucket.
    """

    def __init__(self, parameters: tuple[Parameter, ...], dtypes: tuple[ms.Type, ...], size: int, ranks: int) -> None:
        self.ranks, self.dtypes = ranks, dtypes
        self.shapes = tuple(tuple(p.shape) for p in parameters)
        self.sizes = tuple(prod(shape) for shape in self.shapes)
        self.widths = tuple(width_of(size_, ranks) for size_ in self.sizes)
        self.members = filled(self.sizes, dtypes, size)
        places = [i for members in self.members for i in members]
        self.order = tuple(places.index(i) for i in range(len(places)))
        self.bucket_dtypes = tuple(dtypes[members[0]] for members in self.members)
        self.lengths = tuple(sum(self.widths[i] for i in members) for members in self.members)

    def laid_out(self, gradients: Gradients, members: tuple[int, ...]) -> Tensor:
        """Return all rows of a bucket as one flat Tensor, given the gradients of its members."""
        columns = ()  # type: Gradients
        for i, gradient in zip(members, gradients):
            flat, padding = gradient.reshape(-1), self.widths[i] * self.ranks - self.sizes[i]
            if padding > 0:
                flat = ops.concat((flat, ops.zeros(padding, self.dtypes[i])))
            columns = (*columns, flat.reshape(self.ranks, self.widths[i]))
        return (ops.concat(columns, 1) if len(members) > 1 else columns[0]).reshape(-1)

    def slices(self, rows: Gradients) -> Gradients:
        """Return the slices of the parameters, in their order, given one row of each bucket."""
        found = ()  # type: Gradients
        for members, row in zip(self.members, rows):
            start = 0
            for i in members:
                found = (*found, row[start:start + self.widths[i]] if len(members) > 1 else row)
                start += self.widths[i]
        return tuple([found[i] for i in self.order])

    def wholes(self, rows: Tensor, members: tuple[int, ...]) -> Gradients:
        """Return the parameters of a bucket, given all of its rows, `(ranks, length)`."""
        found = ()  # type: Gradients
        start = 0
        for i in members:
            flat = (rows[:, start:start + self.widths[i]] if len(members) > 1 else rows).reshape(-1)
            if self.sizes[i] < self.widths[i] * self.ranks:
                flat = flat[:self.sizes[i]]
            found = (*found, flat.reshape(self.shapes[i]))
            start += self.widths[i]
        return found
