"""The ranks of a run: their number, checks that they are equal, and exchanges outside of training."""
from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from hashlib import sha256
from typing import Any, Union

import numpy as np
from mindspore import Parameter, Tensor, ops
from mindspore.communication import GlobalComm, get_group_size, get_rank

_EXCHANGE_FAILED = re.compile(r"Launch kernel failed.*(AllReduce|AllGather|ReduceScatter|Broadcast)")
_LEFT_ALONE = ("another rank does not take part in an exchange: it left its epoch early, ended, or is late; let every "
               "rank train to the end of its epoch, or let all leave it at the same update; see the messages of the "
               "other ranks. MindSpore says:")


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
    rows = gather(np.array([_digest(fact) for fact in facts.values()], np.int32))
    differs = rows != rows[0]
    if differs.any():
        what = ", ".join(name for name, column in zip(facts, differs.T) if column.any())
        others = ", ".join(str(rank) for rank, row in enumerate(differs) if row.any())
        raise ValueError(f"rank {others} and rank 0 differ in {what}; {remedy}")


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
        raise failure(f"rank {', '.join(map(str, failed))} failed, so nothing was done on this rank; see its message")
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


def _digest(fact: Union[str, bytes]) -> int:
    data = fact if isinstance(fact, bytes) else fact.encode()
    return int.from_bytes(sha256(data).digest()[:4], "little", signed=True)
