"""Run a user's network op by op, watch its layers, and restore everything afterwards."""
from __future__ import annotations

import inspect
import os
import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from functools import partial
from types import FunctionType, MethodType
from typing import Any, Optional

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn, ops
from mindspore.common.seed import _KERNEL_SEED as KERNEL_SEEDS  # functional random ops take their seeds from it


def cells_of(network: nn.Cell, *functions: Optional[Callable]) -> dict[str, nn.Cell]:
    """Return the cells that a computation may run, by name: those of `network`, then others in `functions`."""
    visited: set[int] = set()
    named: dict[int, tuple[str, nn.Cell]] = {}
    for prefix, root in [("", network), *(found for function in functions for found in _cells_in(function, visited))]:
        for name, cell in root.cells_and_names():
            named.setdefault(id(cell), (".".join(filter(None, (prefix, name))) or "network", cell))
    return dict(named.values())


def _cells_in(function: object, visited: set[int]) -> Iterator[tuple[str, nn.Cell]]:
    """Yield the cells among a function's variables and globals, or among the attributes of its object."""
    if isinstance(function, nn.Cell):
        yield type(function).__name__, function
    elif isinstance(function, partial):
        yield from _cells_in(function.func, visited)
    elif isinstance(function, MethodType):
        yield from _cells_in(function.__self__, visited)
        yield from _cells_in(function.__func__, visited)
    elif id(function) not in visited:
        visited.add(id(function))
        function = inspect.unwrap(function) if callable(function) else function
        values = _variables(function) if isinstance(function, FunctionType) else getattr(function, "__dict__", {})
        module = getattr(function, "__module__", None)
        for name, value in values.items():
            if isinstance(value, nn.Cell):
                yield name, value
            elif isinstance(value, FunctionType) and value.__module__ == module:  # other files are libraries
                yield from _cells_in(value, visited)


def _variables(function: FunctionType) -> dict[str, object]:
    """Return what a function refers to. (`inspect.getclosurevars` fails on variables that have no value yet.)"""
    names = function.__code__.co_names
    variables = {name: function.__globals__[name] for name in names if name in function.__globals__}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or ()):
        try:
            variables[name] = cell.cell_contents
        except ValueError:  # no value yet
            continue
    return variables


@contextmanager
def untouched(cells: Iterable[nn.Cell]) -> Iterator[None]:
    """Run the block op by op, then restore parameters, statistics, training flags, random state and mode."""
    cells = list(cells)
    with in_mode(ms.PYNATIVE_MODE), ExitStack() as afterwards:
        _keep_random_state(cells, afterwards)
        for cell in cells:
            for name in vars(cell).keys() & {"training", "_phase", "use_batch_statistics"}:
                afterwards.callback(_restore_flag, cell, name, vars(cell)[name])
        for parameter in {id(p): p for cell in cells for p in cell.get_parameters(expand=False)}.values():
            afterwards.callback(_restore_value, parameter, parameter.asnumpy().copy())
        yield


@contextmanager
def in_mode(mode: int) -> Iterator[None]:
    """Run the block in graph mode or PyNative. In PyNative, jitted functions run op by op, too."""
    before, jit = ms.get_context("mode"), os.environ.get("MS_JIT")
    ms.set_context(mode=mode)
    if mode == ms.PYNATIVE_MODE:
        os.environ["MS_JIT"] = "0"
    try:
        yield
    finally:
        ms.set_context(mode=before)
        os.environ.pop("MS_JIT", None)
        if jit is not None:
            os.environ["MS_JIT"] = jit


def _keep_random_state(cells: list[nn.Cell], afterwards: ExitStack) -> None:
    afterwards.callback(KERNEL_SEEDS.update, dict(KERNEL_SEEDS))
    afterwards.callback(KERNEL_SEEDS.clear)  # callbacks run in reverse order
    afterwards.callback(ms.set_rng_state, ms.get_rng_state())
    afterwards.callback(np.random.set_state, np.random.get_state())
    afterwards.callback(random.setstate, random.getstate())
    for cell in cells:
        for name, value in list(vars(cell).items()):
            if isinstance(value, ops.Primitive) and any(key.lower().startswith("seed") for key in value.attrs):
                afterwards.callback(setattr, cell, name, value)
                setattr(cell, name, deepcopy(value))  # a random primitive has its own state, so a copy of it draws


def _restore_flag(cell: nn.Cell, name: str, value: object) -> None:
    if vars(cell)[name] is not value:
        setattr(cell, name, value)


def _restore_value(parameter: Parameter, value: np.ndarray) -> None:
    if parameter.asnumpy().tobytes() != value.tobytes():
        write(parameter, value)


def write(parameter: Parameter, value: np.ndarray) -> None:
    """Write a parameter with `assign`: a graph that is already compiled does not see what `set_data` writes."""
    ops.assign(parameter, Tensor(value, parameter.dtype))


@contextmanager
def watched(cells: Iterable[nn.Cell], visit: Callable[[nn.Cell, tuple, dict, Any], None]) -> Iterator[None]:
    """Within the block, call `visit(cell, arguments, keywords, output)` whenever one of the cells has run."""
    with ExitStack() as afterwards:
        for cell in cells:
            afterwards.callback(cell.register_forward_hook(visit, with_kwargs=True).remove)
        yield
