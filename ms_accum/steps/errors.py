"""After an error: forget the graphs, and say which rank is missing, which piece failed, or that rates are used up."""
from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from os import environ

from ..core.counters import NoProgress
from ..core.optimizers import require_rates
from ..distributed.ranks import raise_if_left_alone

# About what a function returned: the same for every piece.
_REFUSALS = ("forward_fn returned", "weight_fn returned", "weight is")


@contextmanager
def explaining_errors(optimizer: Callable, forget_graphs: Callable[[], object]) -> Iterator[None]:
    """Within the block, forget all graphs after an error, and raise what it means, if that can be told.

    A graph in which a kernel failed fails in all its later calls (MindSpore 2.10).

    Args:
        optimizer: The optimizer whose update may have failed.
        forget_graphs: Is called after an error, to compile everything again.
    """
    try:
        yield
    except NoProgress:
        raise
    except Exception as error:
        forget_graphs()
        raise_if_left_alone(error)
        with suppress(RuntimeError):  # of a device that cannot be read any more
            require_rates(optimizer)
        raise


def ask_about_piece(error: Exception, place: int, pieces: int, runs_whole: bool = False) -> None:
    """Add a last line to an error: which piece of a batch failed, and a question about the usual reason.

    Args:
        error: The error. One of an exchange, or one that refuses what a function returned, stays as it is.
        place: The piece, from 0. MindSpore may report a kernel's error too late, unless its host waits for kernels.
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
    """Return what an error says, in one line of at most 200 characters."""
    return " ".join(str(error).split()).strip("- ")[:200]
