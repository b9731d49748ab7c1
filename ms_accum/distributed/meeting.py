"""The host's side of several ranks: they meet, and each says what it is about to do.

A row of six int32 for each rank: what, for which accumulator, a number, and checksums of what ranks compare. Unless
the rows say the same, every rank raises the same `RanksDiffer`, and nothing is exchanged.
"""
from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from hashlib import sha256
from typing import Any, NoReturn, Optional
from zlib import crc32

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, ops

from ..mindspore_api import GlobalComm, create_group, get_group_size, get_rank, jit_class
from .exchange import BUILD, DOES, MICROBATCH, WINDOW, OneDevice, whole_of

_TAG, _NUMBER, _SUMS = slice(0, 2), 2, slice(3, 6)  # places in the row of a rank
_PIECE = 2**20  # int32 that travel at once; each piece has the whole time that ranks wait for a late one
_AGAIN = "start all ranks again from the last checkpoint"
_CALLS = ("ranks made different calls, so nothing was exchanged: {}; make the same calls, also those of your own "
          "collectives, on every rank, and " + _AGAIN)
_VALUES = "rank {} and rank 0 differ in {}; change values only in the same way on every rank, and " + _AGAIN
_FACTS = "rank {} and rank 0 differ in {}: {}; give every rank the same network and arguments"
_LATE = ("rank {} {}, but another rank does not come: it is late, has ended or has failed; see the messages of all "
         "ranks. A slow disk of one rank, or a new shape that it compiles, keeps the others waiting: the environment "
         "variable MS_CPU_COMM_OP_TIMEOUT (seconds) lets ranks on CPU wait longer")
_COMPUTES_NOTHING = bool(os.environ.get("MS_SIMULATION_LEVEL"))  # MindSpore's dry run: all values are 0
_names: list[str] = []  # the first parameter of each accumulator that exchanges, in the order in which they were built
_ended: list[RanksDiffer] = []  # the first difference that this process has found


class RanksDiffer(RuntimeError):
    """Report that ranks made different calls, hold different values, or do not come. The run has to end."""


def world_size() -> int:
    """Return the number of ranks; 1 without msrun. Raise RuntimeError under msrun without `communication.init()`."""
    if GlobalComm.INITED:
        return get_group_size()
    if int(os.environ.get("MS_WORKER_NUM") or 1) > 1:
        raise RuntimeError("msrun started several ranks, but communication is not initialised; call "
                           "mindspore.communication.init() first")
    return 1


@cache
def group_of(ranks: range) -> str:
    """Return the name of the group of these ranks; all of them create it."""
    if len(ranks) == world_size():
        return GlobalComm.WORLD_COMM_GROUP
    name = f"ms_accum.{ranks.start}.{ranks.stop}.{ranks.step}"
    create_group(name, list(ranks))
    return name


@jit_class
class Meeting(OneDevice):
    """Meet with the other ranks; the base of what exchanges.

    Args:
        parameters: The optimizer's parameters: whole ones, or slices.
        inside: Number of consecutive ranks that sum each microbatch; 1: none.

    Attributes:
        number: How many accumulators that exchange were built before this one.
    """

    def __init__(self, parameters: Sequence[Parameter], inside: int) -> None:
        super().__init__([whole_of(p) for p in parameters])
        self.rank, self.ranks, self.inside = get_rank(), world_size(), inside
        self.number, self.sums_each = len(_names), inside > 1
        _names.append(self.parameters[0].name)

    def meet(self, what: int, number: int = 0) -> int:
        """See `OneDevice`. What ranks do not exchange, they need not agree on."""
        if what == (MICROBATCH if self.inside == 1 else WINDOW if self.inside == self.ranks else 0):
            return number
        return int(self._meet(what, number)[:, _NUMBER].max())

    def require_alike(self, what: int, facts: Mapping[str, object]) -> None:
        """See `OneDevice`."""
        self._require_alike(what, {name: str(fact) for name, fact in facts.items()}, _FACTS)

    def compare(self, what: int, values: Mapping[str, Sequence[Parameter]]) -> None:
        """See `OneDevice`. Checksums of bits are compared, which waits for the device."""
        self._require_alike(what, {f"{kind}: {p.name}": crc32(np.ascontiguousarray(p.asnumpy()).tobytes())
                                   for kind, several in values.items() for p in several}, _VALUES)

    def gathered(self, value: Any) -> list[Any]:
        """See `OneDevice`."""
        data = json.dumps(value).encode()
        lengths = self._collected(np.array([len(data)], np.int32))[:, 0]
        rows = self._collected(np.frombuffer(data.ljust(-(-max(lengths) // 4) * 4), np.int32))
        return [json.loads(row.tobytes()[:length]) for row, length in zip(rows, lengths)]

    def together(self, what: int, do: Callable[[], Any], failure: type[Exception]) -> Any:
        """See `OneDevice`."""
        result, error = None, None
        try:
            result = do()
        # The other ranks wait, so they must be told of any error before it is raised.
        except Exception as caught:
            error = caught
        failed = np.flatnonzero(self._collected(np.array([error is not None], np.int32), what)[:, 0])
        if error is not None:
            raise error
        if len(failed):
            raise failure(f"rank {_listed(failed)} failed; see its message")
        return result

    def sent(self, value: np.ndarray) -> np.ndarray:
        """See `OneDevice`."""
        if _COMPUTES_NOTHING:
            return value
        bits = as_int32(value)  # on CPU, Broadcast makes float32 of float16
        for start in range(0, bits.size, _PIECE):
            piece = bits[start:start + _PIECE]
            piece[:] = self._exchanged(0, ops.Broadcast(0), (Tensor(piece),))
        return bits.view(np.uint8)[:value.nbytes].view(value.dtype).reshape(value.shape)

    # --- how they meet ------------------------------------------------------------------------------------------------

    def _meet(self, what: int, number: int = 0, sums: Sequence[int] = (0, 0, 0)) -> np.ndarray:
        """Return the rows of the ranks. Raise `RanksDiffer` on all of them if they do different things."""
        if _ended:
            raise _ended[0]
        row = np.array([what, self.number, number, *sums], np.int32)
        # Those of a node first, but not before all know their nodes. If they differ, they meet the other nodes, too, so
        # that all ranks raise the same error.
        if 1 < self.inside < self.ranks and what != BUILD:
            first = self.rank - self.rank % self.inside
            rows = self._rows(row, range(first, first + self.inside))
            row[_NUMBER] = rows[:, _NUMBER].max()
            if what == MICROBATCH and (rows[:, _TAG] == row[_TAG]).all():
                return rows
        rows = self._rows(row, range(self.ranks))
        if (rows[:, _TAG] != row[_TAG]).any():
            said: dict[str, list[int]] = {}
            for rank, other in enumerate(rows):
                said.setdefault(_said(*other[_TAG].tolist()), []).append(rank)
            _end(_CALLS.format("; ".join(f"rank {_listed(ranks)} {does}" for does, ranks in said.items())))
        return rows

    def _rows(self, row: np.ndarray, members: range) -> np.ndarray:
        if _COMPUTES_NOTHING:
            return np.stack([row] * len(members))
        # A sum with zeros in place of the rows of the others, in digits of 16 bits: of a part of the ranks, MindSpore
        # 2.10 gathers nothing on CPU. In a graph: graphs run one after the other, but an operator may overtake one.
        digits = np.zeros((len(members), 2 * row.size), np.float32)
        digits[members.index(self.rank)] = row.view(np.uint16)
        found = self._exchanged(int(row[0]), _sum_in_a_graph(group_of(members)), Tensor(digits))
        return np.nan_to_num(found).astype(np.uint16).view(np.int32)  # not numbers: another collective of the script

    def _require_alike(self, what: int, facts: Mapping[str, Any], message: str) -> None:
        text = json.dumps(facts)
        rows = self._meet(what, 0, np.frombuffer(sha256(text.encode()).digest()[:12], np.int32).tolist())
        if (rows[:, _SUMS] == rows[0, _SUMS]).all():
            return
        found = self.gathered(facts)
        names = dict.fromkeys(name for of_rank in found for name in of_rank)
        name = next((name for name in names if any(of_rank.get(name) != found[0].get(name) for of_rank in found)),
                    "the order of what they hold")
        others = [rank for rank, of_rank in enumerate(found) if of_rank.get(name) != found[0].get(name)]
        values = [f"rank {rank} has {str(found[rank].get(name))[:200]}" for rank in (0, *others[:1])]
        _end(message.format(_listed(others), name, ", ".join(values)))

    def _collected(self, numbers: np.ndarray, what: int = 0) -> np.ndarray:
        """Return int32 numbers of all ranks, `(ranks, length)`: as many of each."""
        if _COMPUTES_NOTHING:
            return np.stack([numbers] * self.ranks)
        return self._exchanged(what, ops.AllGather(), Tensor(numbers)).reshape(self.ranks, -1)

    def _exchanged(self, what: int, exchange: Callable, values: Any) -> np.ndarray:
        try:
            found = exchange(values)
            return (found[0] if isinstance(found, tuple) else found).asnumpy()
        except RuntimeError as error:
            _end(_LATE.format(self.rank, _said(what, self.number)), error)


def _end(message: str, cause: Optional[Exception] = None) -> NoReturn:
    """Raise `RanksDiffer`, also in each later meeting: collectives of this process no longer match those of others."""
    _ended.append(RanksDiffer(message))
    raise _ended[0] from cause


def _said(what: int, number: int) -> str:
    name = f" ({_names[number]})" if 0 <= number < len(_names) else ""
    return f"{DOES[what] if 0 <= what < len(DOES) else what} accumulator {number}{name}"


def _listed(ranks: Any) -> str:
    return ", ".join(map(str, ranks[:8])) + f" and {len(ranks) - 8} more" * (len(ranks) > 8)


def as_int32(value: np.ndarray) -> np.ndarray:
    """Return a copy of an array's bits, filled up with zeros."""
    bits = np.zeros(-(-value.nbytes // 4), np.int32)
    bits.view(np.uint8)[:value.nbytes] = np.ascontiguousarray(value).reshape(-1).view(np.uint8)
    return bits


@cache
def _sum_in_a_graph(group: str) -> Callable:
    add = ops.AllReduce(group=group)

    def rows(digits: Tensor) -> Tensor:
        return add(digits)

    rows.__name__ = f"rows_{group.replace('.', '_')}"  # MindSpore warns when two functions of one name are compiled
    return ms.jit(rows)
