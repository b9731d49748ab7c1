"""A batch as people have it: a Tensor, a tuple, a dict or keyword arguments, and functions that take one."""
from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any, Optional

import numpy as np
from mindspore import Tensor, nn


def as_arguments(batch: Any) -> tuple[tuple, dict[str, Any]]:
    """Return what an iterable of batches yields as positional and keyword arguments; NumPy arrays become Tensors."""
    if isinstance(batch, dict):
        return (), {name: _as_tensor(value) for name, value in batch.items()}
    return tuple(map(_as_tensor, batch if isinstance(batch, (tuple, list)) else (batch,))), {}


def _as_tensor(value: Any) -> Any:
    return Tensor(value) if isinstance(value, np.ndarray) else value


def positional(
    name: str,
    function: Optional[Callable],
    count: int = 0,
    names: tuple[str, ...] = (),
) -> Optional[Callable]:
    """Return `function` as one that graph mode can call with the whole batch by position.

    Of a `functools.partial`, graph mode would not know what comes out.

    Args:
        name: What an error calls `function`.
        function: A function, Cell or `functools.partial`; it gets those of `names` that it takes, or all for
            `**kwargs`. None is returned as it is.
        count: Number of arguments in the batch.
        names: Names of the last of them.

    Raises:
        TypeError: If there are `names`, and `function` does not take such a batch.
    """
    if function is None or not (names or isinstance(function, partial)):
        return function
    taken = _taken(name, function, count - len(names), names) if names else ()
    arguments, fixed = (), {}
    if isinstance(function, partial):
        function, arguments, fixed = function.func, function.args, function.keywords

    def call(*batch: Any) -> Any:
        first = len(batch) - len(names)
        keywords = {}
        for i, key in enumerate(names):
            if key in taken:
                keywords[key] = batch[first + i]
        return function(*arguments, *batch[:first], **fixed, **keywords)

    return call


def _taken(name: str, function: Callable, positions: int, names: tuple[str, ...]) -> tuple[str, ...]:
    """Return those of `names` that `function` takes. TypeError if the batch does not fit."""
    signature = inspect.signature(function.construct if isinstance(function, nn.Cell) else function)
    parameters = signature.parameters
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    taken = tuple(n for n in names if takes_all or n in parameters)
    try:
        signature.bind(*[None] * positions, **dict.fromkeys(taken))
        if name != "weight_fn" and taken != names:
            raise TypeError(f"got an unexpected argument {next(n for n in names if n not in taken)!r}")
    except TypeError as error:
        given = ", ".join([*["a positional argument"] * positions, *names])
        raise TypeError(f"{name}{signature} does not take a batch of {given}: {error}; name its parameters after the "
                        "batch, or select columns before") from None
    return taken
