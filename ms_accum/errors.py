"""Errors of MindSpore that say less than they mean: what they mean here, for all who run graphs."""
from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from .distributed.ranks import raise_if_left_alone
from .optimizers import require_rates

_REBUILT = ("forward_fn and the optimizer use different Parameters of the same name, expected those of one network; if "
            "the network was built again (in a notebook, say), build the optimizer and the train step again, too, and "
            "give two networks names of their own with Cell.update_parameters_name")
_BFLOAT16 = ("something in the step takes no bfloat16 ({}), expected operators and an optimizer that do, unlike nn.SGD "
             "and nn.Adam (here: {}); give nn.AdamWeightDecay, nn.ASGD or mint.optim.AdamW, or keep the parameters in "
             "float32")


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
