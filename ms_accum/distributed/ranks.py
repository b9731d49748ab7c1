"""What ranks exchange, in graphs.

    rank 0:  add, add, ... ─┐
    rank 1:  add, add, ... ─┼─ one exchange for each window ─► the same update on every rank       sync="window"
    rank 2:  add, add, ... ─┘

    node 0:  rank 0 ─┬─ sum at each microbatch ─┐
             rank 1 ─┘                          ├─ one exchange between nodes for each window       sync="node"
    node 1:  rank 2 ─┬─ sum at each microbatch ─┘
             rank 3 ─┘

Two groups describe every exchange: the ranks *inside* sum each microbatch ("window": each rank alone; "microbatch":
all), and their counterparts *across* sum each window ("window": all; "microbatch": nobody).

    ZeRO:  window ─ scatter ─► slices of the gradients ─┐
           whole parameters ─── cut ──► slices ─────────┴─► optimizer ─► changes ─ gather ─► added to whole parameters

Changes are gathered, not values: a parameter that differs between ranks stays different, so a comparison finds it.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence

import mindspore as ms
import numpy as np
from mindspore import Parameter, ParameterTuple, Tensor, ops

from ..mindspore_api import jit_class
from ..tensors import Gradients, Numbers, Scalar, as_array, mapped, multiply_no_nan, state_parameter
from .buckets import Buckets, Group, changed, cut, each, joined, taken
from .meeting import Meeting, as_int32


@jit_class
class ManyRanks(Meeting):
    """Exchange whole gradients."""

    def connect(self, dtypes: Sequence[ms.Type], limit: int) -> None:
        """Prepare the exchange of gradients of some dtypes, in buckets of `limit` bytes. All ranks call it."""
        node, self.place = divmod(self.rank, self.inside)
        self.across = self.ranks // self.inside
        self.row = self.place * self.across + node
        self.inner = Group(range(node * self.inside, (node + 1) * self.inside), self.place)
        self.outer = Group(range(self.place, self.ranks, self.inside), node)
        self.all = Group(range(self.ranks), self.rank)
        if self.inside > 1 and ms.get_context("device_target") == "Ascend":
            # By default, MindSpore 2.10 orders kernels breadth first, and collectives last, when all gradients are in
            # memory. What the graph returns has to depend on the gradients (12 x Dense 2048 with biases in float32,
            # zero=2, buckets of 16 MiB: 9.0 bytes per parameter at the peak in place of 6.7).
            self.jit_options = {"exec_order": "dfs"}
        self._fill(tuple(dtypes), limit)

    def _fill(self, dtypes: tuple[ms.Type, ...], limit: int) -> None:
        self.buckets = Buckets(self.shapes, dtypes, limit)
        # Across nodes, each rank sums a part of the gradients, which those inside then gather.
        self.part_buckets = Buckets(self.shapes, dtypes, limit, self.inside, self.inside)
        self.parts = Buckets([(width,) for width in self.part_buckets.widths], dtypes, limit)

    def each(self, gradients: Gradients, factor: Scalar, numbers: Numbers) -> tuple[Gradients, Scalar, Numbers]:
        """See `OneDevice`."""
        if self.inside > 1:
            gradients, numbers = self.buckets.summed(self.inner, gradients, factor, numbers)
            factor = 1.0
        return gradients, factor, numbers

    def window(self, gradients: Gradients, unit: Scalar, numbers: Numbers) -> tuple[Gradients, Scalar, Numbers]:
        """See `OneDevice`."""
        if self.inside == 1:
            gradients, numbers = self.buckets.summed(self.outer, gradients, unit, numbers)
            unit = 1.0
        elif self.across > 1:
            parts = mapped(cut, (self.place, self.inside), gradients)
            parts, numbers = self.parts.summed(self.outer, parts, unit, numbers)
            gradients = self.part_buckets.gathered(self.inner, parts, numbers[0])
            unit = 1.0
        return gradients, unit, numbers


@jit_class
class Zero(ManyRanks):
    """Divide the optimizer's state, and with ranks inside also the buffers.

    The slices of rank `node * inside + place` are row `place * across + node` of a parameter, so that ranks inside
    keep rows that follow one another: their own, and those of their counterparts in other nodes.
    """

    def __init__(self, parameters: Sequence[Parameter], inside: int) -> None:
        super().__init__(parameters, inside)
        self.slices = ParameterTuple(parameters)
        self.token = state_parameter(f"exchange{self.number}.token", (1,), ms.float32)

    def _fill(self, dtypes: tuple[ms.Type, ...], limit: int) -> None:
        n, shapes = self.ranks, self.shapes
        for part, whole in zip(self.slices, self.parameters):
            part.name = f"slice.{whole.name}"  # two Parameters in one graph must have different names
        self.buckets = Buckets(shapes, dtypes, limit, self.inside if self.inside > 1 else n, n)
        if self.inside > 1:
            self.shapes = [(width,) for width in self.buckets.widths]
        self.rows = Buckets(self.shapes, dtypes, limit, self.across)
        self.changes = Buckets(shapes, [p.dtype for p in self.parameters], limit, n, n)

    def window(self, gradients: Gradients, unit: Scalar, numbers: Numbers) -> tuple[Gradients, Scalar, Numbers]:
        """See `OneDevice`. The gradients are this rank's slices."""
        if self.across > 1:
            buckets = self.rows if self.inside > 1 else self.buckets
            gradients, numbers = buckets.summed(self.outer, gradients, unit, numbers)
            unit = 1.0
        return gradients, unit, numbers

    def over(self, number: Tensor) -> Tensor:
        """See `OneDevice`. The token, which is always 0, keeps such sums in one order on all ranks."""
        sums = self.all.sum(number.reshape(1).astype(ms.float32) + self.token)
        ops.assign(self.token, multiply_no_nan(sums, ops.zeros_like(sums)))
        return sums.reshape(())

    def apply(self, optimizer: Callable, gradients: Gradients) -> Tensor:
        """See `OneDevice`."""
        before = mapped(cut, (self.row, self.ranks), self.parameters)
        each(ops.assign, self.slices, before)
        optimizer(gradients)
        token = self.token + 0.0
        for members in self.changes.members:
            changes = mapped(changed, token, taken(self.slices, members), taken(before, members))
            rows = self.all.rows(joined(changes))
            token = rows
            if self.inside > 1 and self.across > 1:  # by rank, which is not the order of their rows
                rows = rows.reshape(self.across, self.inside, -1).swapaxes(0, 1).reshape(self.ranks, -1)
            each(ops.assign_add, taken(self.parameters, members), self.changes.wholes(rows, members))
        return token

    # --- on the host --------------------------------------------------------------------------------------------------

    def joined(self, state: Parameter, whole: Parameter) -> np.ndarray:
        """See `OneDevice`. All ranks have to call it. bfloat16, which NumPy lacks, becomes float32."""
        own = as_array(state)
        rows = np.ascontiguousarray(self._collected(as_int32(own))).view(np.uint8)[:, :own.nbytes]
        by_node = rows.reshape(self.across, self.inside, -1)
        flat = np.ascontiguousarray(by_node.swapaxes(0, 1)).reshape(-1).view(own.dtype)
        return flat[:whole.size].reshape(whole.shape)

    def cut(self, value: np.ndarray, whole: Parameter) -> np.ndarray:
        """See `OneDevice`."""
        return part_of(value, self.row, self.ranks)


def part_of(value: np.ndarray, row: int, ranks: int) -> np.ndarray:
    """Return a slice of a parameter's values, filled up with zeros."""
    width = -(-value.size // ranks)
    part = value.reshape(-1)[row * width:(row + 1) * width]
    return np.concatenate((part, np.zeros(width - part.size, value.dtype)))
