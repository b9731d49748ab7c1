"""The host's side of several ranks: they meet, and each says what it is about to do.

A row of eight int32 for each rank: what, for which accumulator, the how-manieth meeting, a number, and checksums of
what ranks compare. Unless the rows say the same, every rank raises the same `RanksDiffer`, and nothing is exchanged.
"""
from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from hashlib import sha256
from typing import Any, NoReturn
from zlib import crc32

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, ops

from ..mindspore_api import GlobalComm, create_group, get_group_size, get_rank, jit_class
from .exchange import BUILD, DOES, EVALUATE, MICROBATCH, STOP, WINDOW, OneDevice, whole_of

_TAG, _NUMBER, _SUMS = slice(0, 3), 3, slice(4, 7)  # places in the row of a rank
_PIECE = 2**22  # bytes that travel at once; each piece has the whole time that ranks wait for a late one
_AGAIN = "start all ranks again from the last checkpoint"
_CALLS = "ranks made different calls, so nothing was exchanged: {}; make the same calls on every rank, and " + _AGAIN
_VALUES = "rank {} and rank 0 differ in {}; change values only in the same way on every rank, and " + _AGAIN
_FACTS = "rank {} and rank 0 differ in {}: {}; give every rank the same network and arguments"
_MIXED = ("an exchange of ms_accum was mixed with another collective of this script; run collectives of your own only "
          "where every rank does, between the same two calls, and " + _AGAIN)
_LATE = ("rank {} {}, but another rank does not come: it is late, has ended or has failed; see the messages of all "
         "ranks. A slow disk of one rank, or a new shape that it compiles, keeps the others waiting: the environment "
         "variable MS_CPU_COMM_OP_TIMEOUT (seconds) lets ranks on CPU wait longer")
_EXCHANGE_FAILED = re.compile(r"Launch kernel failed.*(AllReduce|AllGather|ReduceScatter|Broadcast)")
_names: list[str] = []  # the first parameter of each accumulator that exchanges, in the order in which they were built
_gathering: dict[str, Callable] = {}  # graphs that gather rows, by the group of ranks
_groups: set[str] = set()
_met: dict[str, int] = {}  # how often each group has met
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


def group_of(ranks: range) -> str:
    """Return the name of the group of these ranks; all of them create it."""
    if len(ranks) == world_size():
        return GlobalComm.WORLD_COMM_GROUP
    name = f"ms_accum.{ranks.start}.{ranks.stop}.{ranks.step}"
    if name not in _groups:
        create_group(name, list(ranks))
        _groups.add(name)
    return name


@jit_class
class Meeting(OneDevice):
    """Meet with the other ranks; the base of what exchanges.

    Args:
        parameters: The optimizer's parameters: whole ones, or slices.
        inside: Number of consecutive ranks that sum each microbatch; 1: none.
        compares: Whether ranks compare values.

    Attributes:
        number: How many accumulators that exchange were built before this one.
    """

    def __init__(self, parameters: Sequence[Parameter], inside: int, compares: bool) -> None:
        super().__init__([whole_of(p) for p in parameters])
        self.rank, self.ranks, self.inside, self.compares = get_rank(), world_size(), inside, compares
        self.number, self.sums_each = len(_names), inside > 1
        _names.append(self.parameters[0].name)

    def meet(self, what: int, number: int = 0) -> int:
        """See `OneDevice`. What ranks do not exchange, they need not agree on."""
        if what == (MICROBATCH if self.inside == 1 else WINDOW if self.inside == self.ranks else 0):
            return number
        return int(self._meet(what, number)[:, _NUMBER].max())

    def stop(self) -> None:
        """See `OneDevice`."""
        with suppress(RanksDiffer):
            self._meet(STOP)

    def require_alike(self, what: int, facts: Mapping[str, object]) -> None:
        """See `OneDevice`."""
        self._require_alike(what, {name: str(fact) for name, fact in facts.items()}, _FACTS)

    def compare(self, what: int, values: Mapping[str, Sequence[Parameter]]) -> None:
        """See `OneDevice`. Checksums of bits are compared, which waits for the device."""
        compared = values if self.compares else {}
        self._require_alike(what, {f"{kind}: {p.name}": crc32(_bits(p)) for kind, several in compared.items()
                                   for p in several}, _VALUES)

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

    def summed(self, count: Callable[[], np.ndarray]) -> np.ndarray:
        """See `OneDevice`."""
        self._meet(EVALUATE)
        own = np.ascontiguousarray(self.together(EVALUATE, count, RuntimeError), np.float64)
        return self._collected(own.view(np.int32)).view(np.float64).sum(0)

    def sent(self, value: np.ndarray) -> np.ndarray:
        """See `OneDevice`."""
        broadcast, own = ops.Broadcast(0), np.ascontiguousarray(value).reshape(-1).view(np.uint8)
        found = np.empty_like(own)

        def from_rank_0(bits: Tensor) -> Tensor:
            return broadcast((bits,))[0]

        for start in range(0, own.size, _PIECE):
            piece = own[start:start + _PIECE]
            # Bits: on CPU, Broadcast makes float32 of float16.
            bits = Tensor(np.concatenate((piece, np.zeros(-piece.size % 4, np.uint8))).view(np.int32))
            sent = self._exchanged(partial(from_rank_0, bits), 0)
            found[start:start + _PIECE] = sent.view(np.uint8)[:piece.size]
        return found.view(value.dtype).reshape(value.shape)

    # --- how they meet ------------------------------------------------------------------------------------------------

    def _meet(self, what: int, number: int = 0, sums: Sequence[int] = (0, 0, 0)) -> np.ndarray:
        """Return the rows of the ranks. Raise `RanksDiffer` on all of them if they do different things."""
        if _ended:
            raise _ended[0]
        row = np.array([what, self.number, 0, number, *sums, 0], np.int32)
        # Those of a node first, so that they find their own differences at once; but not before all know their nodes.
        if 1 < self.inside < self.ranks and what != BUILD:
            first = self.rank - self.rank % self.inside
            rows = self._rows(row, range(first, first + self.inside))
            row[_NUMBER] = rows[:, _NUMBER].max()
            if what == MICROBATCH:
                return rows
        return self._rows(row, range(self.ranks))

    def _rows(self, row: np.ndarray, members: range) -> np.ndarray:
        group = group_of(members)
        _met[group] = row[2] = _met.get(group, 0) + 1
        if _computes_nothing():
            return np.stack([row] * len(members))
        # A sum with zeros in place of the rows of the others, in digits of 16 bits: of a part of the ranks, MindSpore
        # 2.10 gathers nothing on CPU. In a graph: graphs run one after the other, but an operator may overtake one.
        digits = np.zeros((len(members), 16), np.float32)
        digits[members.index(self.rank)] = row.view(np.uint16)
        if group not in _gathering:
            _gathering[group] = _sum_in_a_graph(group)
        found = self._exchanged(lambda: _gathering[group](Tensor(digits)), int(row[0]))
        rows = np.nan_to_num(found).astype(np.uint16).view(np.int32)
        if (rows[members.index(self.rank)] != row).any():
            _end(_MIXED)
        if (rows[:, _TAG] != rows[0, _TAG]).any():
            said: dict[str, list[int]] = {}
            for rank, other in zip(members, rows):
                said.setdefault(_said(*other[:3].tolist()), []).append(rank)
            _end(_CALLS.format("; ".join(f"rank {_listed(ranks)} {does}" for does, ranks in said.items())))
        return rows

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
        if _computes_nothing():
            return np.stack([numbers] * self.ranks)
        return self._exchanged(lambda: ops.AllGather()(Tensor(numbers)), what).reshape(self.ranks, -1)

    def _exchanged(self, exchange: Callable[[], Tensor], what: int) -> np.ndarray:
        try:
            return exchange().asnumpy()
        except RuntimeError as error:
            if not _EXCHANGE_FAILED.search(str(error)):
                raise
            _end(_LATE.format(self.rank, _said(what, self.number)))


def _end(message: str) -> NoReturn:
    """Raise `RanksDiffer`, also in each later meeting: collectives of this process no longer match those of others."""
    _ended.append(RanksDiffer(message))
    raise _ended[0] from None


def _said(what: int, number: int, met: int = 0) -> str:
    name = f" ({_names[number]})" if 0 <= number < len(_names) else ""
    does = DOES[what] if 0 <= what < len(DOES) else what
    return f"{does} accumulator {number}{name}{f' in meeting {met}' * bool(met)}"


def _listed(ranks: Any) -> str:
    return ", ".join(map(str, ranks[:8])) + f" and {len(ranks) - 8} more" * (len(ranks) > 8)


def _computes_nothing() -> bool:
    """Return whether this is MindSpore's dry run, in which all values are 0."""
    return bool(os.environ.get("MS_SIMULATION_LEVEL"))


def _bits(parameter: Parameter) -> memoryview:
    return np.ascontiguousarray(parameter.asnumpy()).reshape(-1).view(np.uint8).data


def _sum_in_a_graph(group: str) -> Callable:
    add = ops.AllReduce(group=group)

    def rows(digits: Tensor) -> Tensor:
        return add(digits)

    rows.__name__ = f"rows{len(_gathering)}"  # MindSpore warns when a second function of one name is compiled
    return ms.jit(rows)
