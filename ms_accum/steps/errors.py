"""After an error: forget the graphs, and name the missing rank, the failed piece or the used-up learning rates."""
from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from os import environ
from typing import TYPE_CHECKING, Union

import mindspore as ms
from mindspore import Parameter, Tensor

from ..core.boundary import NoProgress
from ..core.optimizers import require_rates
from ..distributed.ranks import raise_if_left_alone
from ..distributed.tags import RanksDiffer
from ..tensors import FLOATS

if TYPE_CHECKING:
    from ..distributed.exchange import OneDevice

# Errors about what a function returned are the same for every piece.
_REFUSALS = ("forward_fn returned", "weight_fn returned", "weight is")
_OR_THE_NETWORK = (" If so, look into the network: shapes that do not fit, or layers of several dtypes (to_float), "
                   "which no graph mixes")
# MindSpore's errors about the dtype or the shape that an operator got, which it finds before it runs a kernel.
_OF_AN_OPERATOR = re.compile(r"For '(\w+)'|For primitive\[(\w+)\]|Failed calling (\w+)")
_INTEGERS = (ms.int8, ms.int16, ms.int64, ms.uint8, ms.uint16, ms.uint32, ms.uint64, ms.bool_)


def explain(error: Exception, optimizer: Callable, forget_graphs: Callable[[], object], exchange: OneDevice) -> None:
    """Forget all graphs after an error, and raise an error that names the cause, if it is known.

    A graph in which a kernel has failed fails in all later calls (MindSpore 2.10).

    Args:
        error: The error. After `NoProgress` and `RanksDiffer`, which no kernel raised, nothing is done.
        optimizer: The optimizer whose update may have failed.
        forget_graphs: Function that is called, so that everything is compiled again.
        exchange: Of the accumulator. If ranks have disagreed, their collectives may have failed.
    """
    if isinstance(error, (NoProgress, RanksDiffer)):
        return
    forget_graphs()
    try:
        exchange.require_agreement()
    except RanksDiffer as differ:
        raise differ from error
    except RuntimeError:  # the device may be unreadable by now
        pass
    raise_if_left_alone(error)
    with suppress(RuntimeError):  # the device may be unreadable by now
        require_rates(optimizer)


def name_columns(error: Exception, batch: Sequence, names: Sequence[Union[str, int]], weights: Iterable[Parameter]
                 ) -> None:
    """Add a first line to MindSpore's error that an operator does not take a dtype or shape: the columns of the batch.

    Args:
        error: The error. All others than these, which MindSpore raises while it compiles, are not changed.
        batch: The columns.
        names: The parameters of the function that takes the columns, in their order; the place of one without a name.
        weights: The parameters that are trained.
    """
    found = _OF_AN_OPERATOR.match(str(error).lstrip("- \n"))
    if found is None or not isinstance(error, (TypeError, ValueError)):
        return
    dtypes = sorted({str(weight.dtype).lower() for weight in weights})
    columns = [f"column {i}" + f" ({name})" * (name != i) for i, name in enumerate(names)]
    tensors = [(place, value) for place, value in zip(columns, batch) if isinstance(value, Tensor)]
    wrong = [place for place, value in tensors
             if value.dtype in (ms.float16, ms.float64, ms.bfloat16) and str(value.dtype).lower() not in dtypes]
    whole = [place for place, value in tensors if value.dtype in _INTEGERS]
    kinds = [value.dtype in FLOATS for _, value in tensors]
    remedies = [f"give {' and '.join(wrong)} as {dtypes[0]}"] if wrong else []
    if whole:
        remedies.append(f"give {' and '.join(whole)} as int32 (labels, tokens) or {dtypes[0]} (data)")
    is_swapped = kinds != sorted(kinds, reverse=True)  # perhaps: an integer before a float
    seems_right = not remedies and not is_swapped
    if seems_right or is_swapped:
        is_named = not any(isinstance(name, int) for name in names)
        order = f"order of ({', '.join(map(str, names))})" if is_named else "right order"
        remedies.append(f"are the columns in the {order}?" + _OR_THE_NETWORK * seems_right)
    told = ", ".join(f"{place} is {str(value.dtype).lower()} {tuple(value.shape)}" for place, value in tensors)
    operator = next(filter(None, found.groups()))
    error.args = (f"{operator} does not take the batch: {told}, the parameters are {' and '.join(dtypes)}; "
                  f"{'; '.join(remedies)}\n{error}", *error.args[1:])


def ask_about_piece(error: Exception, place: int, pieces: int, runs_whole: bool = False) -> None:
    """Add a last line to an error: the piece of a batch that failed, and the usual reason.

    Args:
        error: The error. Errors of an exchange, and errors about what a function returned, are not changed.
        place: The piece, from 0. MindSpore may report a kernel's error during a later piece, unless its host waits for
            kernels.
        pieces: Number of pieces in the batch.
        runs_whole: Whether the function ran on the whole batch.
    """
    try:
        raise_if_left_alone(error)
    except RuntimeError:
        return
    if not str(error).startswith(_REFUSALS):
        late = isinstance(error, RuntimeError) and not runs_whole and environ.get("MS_DEV_HOST_BLOCKING_RUN") != "1"
        question = " and runs on the whole batch: does" if runs_whole else "; if it runs on the whole batch, does"
        said = f"forward_fn failed on piece {place + 1} of {pieces}{' or before it' * late}{question} it use row " \
               "numbers or the batch's length?"
        error.args = (f"{error}\n{said}", *error.args[1:])


def one_line(error: Exception) -> str:
    """Return the message of an error in one line of at most 200 characters."""
    return " ".join(str(error).split()).strip("- ")[:200]
