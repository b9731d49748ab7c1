"""ZeRO: each rank updates its slice of every parameter, and holds the optimizer's state only for that slice.

    window of all ranks ─ scatter ─► slices of the gradients ─┐
    whole parameters ─────── cut ──► slices ──────────────────┴─► optimizer ─► slices ─ gather ─► whole parameters

The whole parameters are kept: slices are cut from them before each update, in the same graph.
"""
from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Optional

import mindspore as ms
import numpy as np
from mindspore import Parameter, ParameterTuple, Tensor, ops

from ..arguments import instance_of
from ..mindspore_api import get_rank, jit_class
from ..tensors import as_array, as_numbers, as_tensor, as_vector, multiply_no_nan, state_parameter
from .buckets import gradients_of_bucket
from .exchange import ManyRanks, group_of, new_buffers
from .ranks import gather, world_size
from .rows import Rows, width_of

if TYPE_CHECKING:
    from ..tensors import Gradients, Numbers, Scalar
    from .buckets import AccumulatedParameters


def shard_parameters(parameters: Any) -> Any:
    """Return this rank's slices of parameters, to divide the optimizer's state among the ranks (ZeRO).

        optimizer = nn.AdamWeightDecay(shard_parameters(network.trainable_params()), 1e-3)
        train_step = make_train_step(forward_fn, optimizer, accumulate_step=4, reducer=DataParallel(zero=1))

    A slice is a flat Parameter of `ceil(size / ranks)` elements, padded with 0, with the dtype of the whole parameter.
    Its attribute `whole` is the whole parameter. It has the name of the whole parameter until an Accumulator is built,
    which adds the prefix "slice.". Filters by name, weight decay and learning rates of groups work as with whole
    parameters; filter by shape before you call this function. With one rank, or without msrun, the argument is returned
    unchanged, so the same script runs on one device.

    The optimizer must treat each element by itself, as SGD, Adam and most others do. Optimizers that look at a whole
    parameter (LARS, Lamb, AdaFactor) raise an error when the Accumulator is built. Two kinds of optimizers give wrong
    results without an error: those that copy values of parameters when they are built (rank 0's values arrive later),
    and those that look at shapes (slices are flat).

    Args:
        parameters: The parameters as for an optimizer: Parameters, or groups as dicts with "params" or "order_params".

    Raises:
        TypeError: If an entry of `parameters` is anything else.
        RuntimeError: If msrun started several ranks and `init()` was not called.

    Source: ZeRO (Rajbhandari et al. 2020, https://arxiv.org/abs/1910.02054), stages 1 and 2; Colossal-AI's
    `LowLevelZeroPlugin`.

    Example:
        >>> from mindspore import nn
        >>> from ms_accum import shard_parameters
        >>> network = nn.Dense(3, 1, has_bias=False)
        >>> optimizer = nn.Adam(shard_parameters(network.trainable_params()), 1e-3)
        >>> print(sum(state.size for state in optimizer.moment1))  # 2, under msrun --worker_num=2
        3
    """
    if world_size() == 1:
        return parameters
    known: dict[int, Parameter] = {}
    if isinstance(parameters, dict):
        return _group(parameters, known)
    found = [_group(p, known) if isinstance(p, dict) else _slice(p, known) for p in parameters]
    return ParameterTuple(found) if isinstance(parameters, ParameterTuple) else found


def _group(group: dict, known: dict[int, Parameter]) -> dict:
    """Return a group with slices instead of its parameters; a parameter that is in two groups has one slice."""
    return {key: [_slice(p, known) for p in value] if key in ("params", "order_params") else value
            for key, value in group.items()}


def _slice(parameter: Any, known: dict[int, Parameter]) -> Parameter:
    instance_of("an entry of parameters", parameter, Parameter, "a Parameter, or a group as a dict",
                "give network.trainable_params()")
    if getattr(parameter, "whole", None) is not None:
        raise ValueError(f"{parameter.name} is already a slice; call shard_parameters only once, with the network's "
                         "parameters")
    if id(parameter) not in known:
        own = _part(as_array(parameter), get_rank(), world_size())
        made = Parameter(Tensor(own, parameter.dtype), name=parameter.name, requires_grad=parameter.requires_grad)
        made.whole = parameter
        known[id(parameter)] = made
    return known[id(parameter)]


def whole_of(parameter: Parameter) -> Parameter:
    """Return the whole parameter of a slice; return any other parameter unchanged."""
    return getattr(parameter, "whole", parameter)


def whole_parameters(parameters: Iterable[Parameter]) -> tuple[Parameter, ...]:
    """Return the whole parameters of slices."""
    return tuple(map(whole_of, parameters))


def slices_among(parameters: Iterable[Parameter]) -> tuple[Parameter, ...]:
    """Return an optimizer's parameters if they are slices, () if none is. Raise ValueError if only some are."""
    parameters = tuple(parameters)
    missing = [p.name for p in parameters if whole_of(p) is p]
    if 0 < len(missing) < len(parameters):
        raise ValueError(f"{missing[0]} is not a slice, but other parameters of the optimizer are slices; give all of "
                         "them to shard_parameters, or none")
    return () if missing else parameters


@jit_class
class Scatter:
    """Sum over a group, and keep one of equal parts on each rank: ReduceScatter.

    MindSpore 2.10 has no ReduceScatter on CPU: there, each rank keeps its part of an AllReduce.
    """

    def __init__(self, group: str, place: int, parts: int) -> None:
        self.place, self.parts, self.sum = place, parts, ops.AllReduce(group=group)
        self.op = ops.ReduceScatter(group=group) if ms.get_context("device_target") != "CPU" else None

    def __call__(self, flat: Tensor) -> Tensor:
        """Return this rank's part of the sum."""
        if self.op is not None:
            return self.op(flat)
        length = flat.shape[0] // self.parts
        return self.sum(flat)[self.place * length:(self.place + 1) * length]


@jit_class
class Zero(ManyRanks):
    """Scatter gradients, and gather parameters; see `Exchange` for `inside` and `across`.

    If each rank is alone inside (stage 1), buffers are whole. If ranks inside sum (stage 2), each rank keeps `across`
    rows of each bucket: its own, and one for each rank with the same place in another node. With 4 ranks in 2 nodes,
    rank 2 has row 1.

    Args:
        accumulated: The parameters that are accumulated, with this rank's slices.
        inside: Number of consecutive ranks that sum each microbatch.
        ranks: Number of ranks.
        size: Largest number of bytes in a bucket.
    """

    divides_parameters = True

    def __init__(self, accumulated: AccumulatedParameters, inside: int, ranks: int, size: int) -> None:
        super().__init__(accumulated, inside, ranks)
        self.divides_buffers = inside > 1
        node, place = divmod(self.rank, inside)
        self.inner: Any = None  # a Scatter, if ranks inside sum
        self.outer: Any = None  # a Scatter, if ranks across do
        if inside > 1:
            self.inner = Scatter(group_of(self.members_inside), place, inside)
        if self.across > 1:
            self.outer = Scatter(group_of(self.members_across), node, self.across)
        self.row_number = place * self.across + node
        self.rows = Rows(accumulated.parameters, accumulated.dtypes, size, ranks)
        self.backwards = self.rows.members[::-1]
        self.gathered_rows = Rows(accumulated.parameters, tuple(p.dtype for p in accumulated.parameters), size, ranks)
        self.slices = ParameterTuple(accumulated.slices)
        for part, whole in zip(accumulated.slices, accumulated.parameters):
            part.name = f"slice.{whole.name}"  # two Parameters in one graph must have different names
        self.cuts = tuple(_cut(whole.size, self.row_number, ranks) for whole in accumulated.parameters)
        self.gather = ops.AllGather()
        # Always 0. `over_slices` reads and writes it, and `gather_parameters` reads it, so that all ranks run these
        # collectives in one order.
        self.order_token = state_parameter(f"zero{self.number}.order_token", (1,), ms.float32)

    def buffers(self, prefix: str) -> tuple[Parameter, ...]:
        """See `OneDevice`. If ranks inside sum, return some rows of each bucket."""
        if not self.divides_buffers:
            return super().buffers(prefix)
        rows = [(f"rows{i}", (length * self.across,)) for i, length in enumerate(self.rows.lengths)]
        return new_buffers(prefix, rows, self.rows.bucket_dtypes)

    def microbatch(self, gradients: Gradients, numbers: Numbers, measured: Numbers, held: Any
                   ) -> tuple[Gradients, Numbers, Numbers]:
        """See `OneDevice`."""
        if not self.divides_buffers:
            return gradients, numbers, measured
        sums, numbers = self._meet_inside(numbers, held)
        if measured:
            sums = self.inner.sum(ops.depend(as_vector(measured), sums))
            measured = as_numbers(sums, len(measured))
        return self._scattered(self.inner, gradients, sums), numbers, measured

    def window(self, buffers: Gradients, unit: Scalar, numbers: Numbers, measured: Numbers
               ) -> tuple[Gradients, Scalar, Numbers]:
        """See `OneDevice`. The gradients are this rank's slices, in the unit 1."""
        rows = buffers
        if self.across > 1:
            sums = as_vector(numbers)
            if measured:
                sums = self.outer.sum(ops.depend(as_vector(measured), sums))
                measured = as_numbers(sums, len(measured))
            if self.divides_buffers:
                rows = ()
                for row in buffers:
                    sums = self.outer(ops.depend(row, sums))
                    rows = (*rows, sums)
            else:
                rows = self._scattered(self.outer, buffers, sums, unit)
        return self.rows.slices(rows), ops.ones_like(as_tensor(numbers[0])), measured

    def _scattered(self, scatter: Scatter, gradients: Gradients, previous: Tensor, unit: Optional[Scalar] = None
                   ) -> Gradients:
        """Return this rank's rows of each bucket of `unit * gradients`, summed over a group, after `previous`.

        The last bucket is scattered first, because the backward pass computes its gradients first.
        """
        rows = ()  # type: Gradients
        for members in self.backwards:
            own = gradients_of_bucket(members, gradients, self.dtypes, previous, unit)
            row = scatter(ops.depend(self.rows.laid_out(own, members), previous))
            # Ascend frees the sent tensor once a kernel has read the sum. Waiting for the sum itself would not free it.
            previous = row[:1]
            rows = (row, *rows)
        return rows

    def over_slices(self, number: Tensor) -> Tensor:
        """See `OneDevice`."""
        sums = self.sum(number.reshape(1).astype(ms.float32) + self.order_token)
        ops.assign(self.order_token, multiply_no_nan(sums, ops.zeros_like(sums)))
        return sums.reshape(())

    def cut_parameters(self) -> None:
        """See `OneDevice`."""
        for i in range(len(self.slices)):
            start, stop, padding = self.cuts[i]
            if start == stop:
                part = ops.zeros(padding, self.slices[i].dtype)
            else:
                part = self.weights[i].reshape(-1)[start:stop]
                if padding > 0:
                    part = ops.concat((part, ops.zeros(padding, part.dtype)))
            ops.assign(self.slices[i], part)

    def gather_parameters(self) -> None:
        """See `OneDevice`. Rows are gathered by rank; if nodes divide them, they are in another order."""
        gathered = self.order_token + 0.0
        for members in self.gathered_rows.members:
            row = ()  # type: Gradients
            for i in members:
                row = (*row, self.slices[i] + 0.0)
            gathered = self.gather(ops.depend(ops.concat(row), gathered))
            rows = gathered.reshape(self.ranks, -1)
            if self.across > 1 and self.inside > 1:
                rows = gathered.reshape(self.across, self.inside, -1).swapaxes(0, 1).reshape(self.ranks, -1)
            wholes = self.gathered_rows.wholes(rows, members)
            for place in range(len(members)):
                ops.assign(self.weights[members[place]], wholes[place])

    def joined(self, state: Parameter, whole: Parameter) -> np.ndarray:
        """See `OneDevice`. All ranks have to call it. bfloat16, which NumPy lacks, becomes float32."""
        own = as_array(state)
        data = np.frombuffer(own.tobytes() + bytes(-own.nbytes % 4), np.int32)
        rows = np.ascontiguousarray(gather(data)).view(np.uint8)[:, :own.nbytes]
        by_node = np.ascontiguousarray(rows).reshape(self.across, self.inside, -1)
        flat = np.ascontiguousarray(by_node.swapaxes(0, 1)).reshape(-1).view(own.dtype)
        return flat[:whole.size].reshape(whole.shape)

    def cut(self, value: Tensor, whole: Parameter) -> Tensor:
        """See `OneDevice`."""
        return Tensor(_part(as_array(value), self.row_number, self.ranks), value.dtype)

    def describe(self) -> str:
        """See `OneDevice`."""
        return f"{super().describe()}, ZeRO"


def _cut(size: int, row: int, ranks: int) -> tuple[int, int, int]:
    """Return the begin and end of a slice in a flat parameter, and the number of zeros that pad it."""
    width = width_of(size, ranks)
    start, stop = min(row * width, size), min((row + 1) * width, size)
    return start, stop, width - (stop - start)


def _part(value: np.ndarray, row: int, ranks: int) -> np.ndarray:
    """Return a slice of a parameter's values."""
    start, stop, padding = _cut(value.size, row, ranks)
    return np.concatenate((value.reshape(-1)[start:stop], np.zeros(padding, value.dtype)))
