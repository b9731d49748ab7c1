"""The ranks of a run: their number, checks that they are equal, and exchanges outside of training."""
from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from hashlib import sha256
from typing import Any, Union
from zlib import crc32

import numpy as np
from mindspore import Parameter, Tensor, ops

from ..mindspore_api import GlobalComm, get_group_size, get_rank

ALIKE = "give every rank the same network and arguments"
_EXCHANGE_FAILED = re.compile(r"Launch kernel failed.*(AllReduce|AllGather|ReduceScatter|Broadcast)")
_LEFT_ALONE = ("another rank does not take part in an exchange: it left its epoch early, ended, or is late; call "
               "flush() on all ranks after a loop that only some leave early; see their messages. MindSpore "
               "says:")
_PIECE = 2**22  # bytes that travel at once; each piece has the whole time that ranks wait for a late one


def world_size() -> int:
    """Return the number of ranks; 1 without msrun. Raise RuntimeError under msrun without `communication.init()`."""
    if GlobalComm.INITED:
        return get_group_size()
    if int(os.environ.get("MS_WORKER_NUM") or 1) > 1:
        raise RuntimeError("msrun started several ranks, but communication is not initialised; call "
                           "mindspore.communication.init() first")
    return 1


def computes_nothing() -> bool:
    """Return whether this is MindSpore's dry run, in which all values are 0, so that tags cannot be compared."""
    return bool(os.environ.get("MS_SIMULATION_LEVEL"))


def require_alike(facts: Mapping[str, Union[str, bytes]], remedy: str = ALIKE) -> None:
    """Raise ValueError on every rank if the facts differ between ranks, and name those that differ.

    A rank may have facts of other names, which then differ, too.
    """
    own = json.dumps({name: _digest(fact).hex() for name, fact in facts.items()}).encode()
    rows = gather(np.frombuffer(_digest(own), np.int32))
    if (rows == rows[0]).all():
        return
    digests = [json.loads(text) for text in _gather_bytes(own)]
    names = dict.fromkeys(name for of_rank in digests for name in of_rank)
    what = [name for name in names if any(of_rank.get(name) != digests[0].get(name) for of_rank in digests)]
    others = [rank for rank, of_rank in enumerate(digests) if of_rank != digests[0]]
    raise ValueError(f"{_differ(others)} in {_some(what)}; {remedy}")


def require_equal(parameters: Mapping[str, Parameter]) -> None:
    """Raise RuntimeError on every rank if values of Parameters differ between ranks, and name the first that differs.

    Their bits are compared by checksums, which all ranks gather once. All ranks have to give the same names. It waits
    for the device.
    """
    if not parameters:
        return
    rows = gather(np.array([crc32(_bits(p)) for p in parameters.values()], np.uint32))
    differs = rows != rows[0]
    if differs.any():
        what = [name for name, column in zip(parameters, differs.T) if column.any()]
        raise RuntimeError(f"{_differ(np.flatnonzero(differs.any(1)))} in the values of {_some(what, 1)}, so the ranks "
                           "made different updates; start again from the last checkpoint, and change parameters, "
                           "learning rate and state only in the same way on all ranks")


def differing(facts: Iterable[Union[bytes, memoryview]]) -> np.ndarray:
    """Return which facts of which rank differ from rank 0's: bool `(ranks, facts)`. All ranks give as many."""
    digests = b"".join(sha256(fact).digest() for fact in facts)
    rows = gather(np.frombuffer(digests, np.int32)).reshape(world_size(), -1, 8)
    return (rows != rows[0]).any(-1)


def sent_by(rank: int, values: np.ndarray) -> np.ndarray:
    """Return one rank's values, bit by bit, on all ranks. The others give any of its shape and dtype."""
    broadcast, own = ops.Broadcast(rank), np.ascontiguousarray(values).reshape(-1).view(np.uint8)
    found = np.empty_like(own)
    for start in range(0, own.size, _PIECE):
        piece = own[start:start + _PIECE]
        # Bits: on CPU, Broadcast makes float32 of float16.
        bits = np.concatenate((piece, np.zeros(-piece.size % 4, np.uint8))).view(np.int32)
        found[start:start + _PIECE] = broadcast((Tensor(bits),))[0].asnumpy().view(np.uint8)[:piece.size]
    return found.view(values.dtype).reshape(values.shape)


def text_by(rank: int, text: str) -> str:
    """Return one rank's text on all ranks."""
    data = text.encode()
    length = int(gather(np.array([len(data)], np.int32))[rank, 0])
    return sent_by(rank, np.frombuffer(data[:length].ljust(length), np.uint8)).tobytes().decode()


def broadcast_parameters(parameters: tuple[Parameter, ...]) -> None:
    """Copy the values of rank 0 to every rank."""
    broadcast = ops.Broadcast(0)
    for parameter in parameters:
        # Not set_data: a graph that is compiled already would keep the old values (MindSpore 2.10). On CPU,
        # Broadcast makes float32 of float16.
        ops.assign(parameter, broadcast((parameter.value(),))[0].astype(parameter.dtype))


def together(do: Callable[[], Any], failure: type[Exception]) -> Any:
    """Return the result of `do` once every rank has called it. If a rank fails, the others raise `failure`."""
    result, error = None, None
    try:
        result = do()
    # The other ranks wait, so they must be told of any error before it is raised.
    except Exception as caught:
        error = caught
    failed = np.flatnonzero(gather(np.array([error is not None], np.int32))[:, 0])
    if error is not None:
        raise error
    if len(failed):
        raise failure(f"rank {', '.join(map(str, failed))} failed; see its message")
    return result


def raise_if_left_alone(error: Exception) -> None:
    """Raise RuntimeError with an explanation if `error` means that another rank is missing in an exchange."""
    if _EXCHANGE_FAILED.search(str(error)):
        raise RuntimeError(f"{_LEFT_ALONE}\n{error}") from None


@contextmanager
def left_alone(does: str) -> Iterator[None]:
    """Raise RuntimeError that says what this rank does if another rank does not take part in an exchange."""
    try:
        yield
    except RuntimeError as error:
        if not _EXCHANGE_FAILED.search(str(error)):
            raise
        rank, ranks = get_rank(), get_group_size()
        others = "another rank did" if ranks > 2 else f"rank {1 - rank} did"
        raise RuntimeError(f"rank {rank} {does}, but {others} not come: it has ended, failed or waits elsewhere, or is "
                           "late; every rank has to make this call, at the same place; see the messages of the other "
                           f"ranks. MindSpore says:\n{error}") from None


def gather(numbers: np.ndarray) -> np.ndarray:
    """Return the numbers of all ranks, `(ranks, length)`, given this rank's: `(length,)`, equal on all ranks."""
    bits = np.ascontiguousarray(numbers).view(np.int32)
    return ops.AllGather()(Tensor(bits)).asnumpy().reshape(world_size(), -1).view(numbers.dtype)


def _gather_bytes(data: bytes) -> list[bytes]:
    """Return the bytes of all ranks, which may be of different lengths."""
    lengths = gather(np.array([len(data)], np.int32))[:, 0]
    rows = gather(np.frombuffer(data.ljust(-(-lengths.max() // 4) * 4, b"\0"), np.int32))
    return [row.tobytes()[:length] for row, length in zip(rows, lengths)]


def _bits(parameter: Parameter) -> memoryview:
    return np.ascontiguousarray(parameter.asnumpy()).reshape(-1).view(np.uint8).data


def _differ(ranks: Iterable[int]) -> str:
    return f"rank {', '.join(map(str, ranks))} and rank 0 differ"


def _some(names: list[str], most: int = 4) -> str:
    """Return the names as text, and the number of those that are left out."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def _digest(fact: Union[str, bytes]) -> bytes:
    return sha256(fact if isinstance(fact, bytes) else fact.encode()).digest()
