"""The ranks of a run: their number, checks that they are equal, and exchanges outside of training."""
from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping
from hashlib import sha256
from typing import Any, Union

import numpy as np
from mindspore import Parameter, Tensor, ops
from mindspore.communication import GlobalComm, get_group_size

_EXCHANGE_FAILED = re.compile(r"Launch kernel failed.*(AllReduce|AllGather|ReduceScatter|Broadcast)")
_LEFT_ALONE = ("another rank does not take part in an exchange: it left its epoch early, ended, or is late; let every "
               "rank train to the end of its epoch, or let all leave it at the same update; see the messages of the "
               "other ranks. MindSpore says:")
_PIECE = 2**22  # bytes that travel at once; each piece has the whole time that ranks wait for a late one


def world_size() -> int:
    """Return the number of ranks; 1 without msrun. Raise RuntimeError under msrun without `communication.init()`."""
    if GlobalComm.INITED:
        return get_group_size()
    if int(os.environ.get("MS_WORKER_NUM") or 1) > 1:
        raise RuntimeError("msrun started several ranks, but communication is not initialised; call "
                           "mindspore.communication.init() first")
    return 1


def require_alike(facts: Mapping[str, Union[str, bytes]], remedy: str) -> None:
    """Raise ValueError on every rank if the facts differ between ranks, and name those that differ."""
    differs = differing(fact if isinstance(fact, bytes) else fact.encode() for fact in facts.values())
    if differs.any():
        what = ", ".join(name for name, column in zip(facts, differs.T) if column.any())
        others = ", ".join(str(rank) for rank, row in enumerate(differs) if row.any())
        raise ValueError(f"rank {others} and rank 0 differ in {what}; {remedy}")


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


def wait_for_all() -> None:
    """Wait for every rank: a rank that still communicates fails if another one ends."""
    gather(np.zeros(1, np.int32))


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
        raise failure(f"rank {', '.join(map(str, failed))} failed, so nothing was done on this rank; see its message")
    return result


def raise_if_left_alone(error: Exception) -> None:
    """Raise RuntimeError with an explanation if `error` means that another rank is missing in an exchange."""
    if _EXCHANGE_FAILED.search(str(error)):
        raise RuntimeError(f"{_LEFT_ALONE}\n{error}") from None


def gather(numbers: np.ndarray) -> np.ndarray:
    """Return the numbers of all ranks, `(ranks, length)`, given this rank's: `(length,)`, equal on all ranks."""
    bits = np.ascontiguousarray(numbers).view(np.int32)
    return ops.AllGather()(Tensor(bits)).asnumpy().reshape(world_size(), -1).view(numbers.dtype)
