"""Add the likely cause to errors of MindSpore that do not name it."""
from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from os import environ

from .distributed.ranks import raise_if_left_alone
from .nonfinite import NoProgress
from .optimizers import require_rates

_REBUILT = ("forward_fn and the optimizer use different Parameters of the same name, expected those of one network; if "
            "the network was built again (in a notebook, say), build the optimizer and the train step again, too, and "
            "give two networks names of their own with Cell.update_parameters_name")
_BFLOAT16 = ("something in the step takes no bfloat16 ({}), expected operators and an optimizer that do, unlike nn.SGD "
             "and nn.Adam (here: {}); give nn.AdamWeightDecay, nn.ASGD or mint.optim.AdamW, or keep the parameters in "
             "float32")
# About what a function returned: the same for every piece.
_REFUSALS = ("forward_fn returned", "weight_fn returned", "weight is")


@contextmanager
def explaining_errors(optimizer: Callable, forget_graphs: Callable[[], object]) -> Iterator[None]:
    """Within the block, forget all graphs after an error, and raise it with what it means, if that is known.

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
        said = str(error)
        if "already exists. Please set a unique name" in said:
            raise ValueError(_REBUILT) from error
        if isinstance(error, TypeError) and "BFloat16" in said:
            raise TypeError(_BFLOAT16.format(said.strip().split("\n")[0][:160], type(optimizer).__name__)) from error
        raise_if_left_alone(error)
        if "'Gather'" in said:
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
