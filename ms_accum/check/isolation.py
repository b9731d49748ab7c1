"""Isolation: run a user's network op by op, watch its layers, and restore everything afterwards."""
from __future__ import annotations

import importlib
import inspect
import os
import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from types import FunctionType, MethodType
from typing import Any, Optional

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn, ops


def cells_of(network: nn.Cell, *functions: Optional[Callable]) -> dict[str, nn.Cell]:
    """Return the cells that a computation may run, by name: those of `network`, then others that `functions` refer to."""
    named, seen = {}, set()

    def add(prefix: str, root: nn.Cell) -> None:
        for name, cell in root.cells_and_names():
            if id(cell) not in seen:
                seen.add(id(cell))
                named[".".join(filter(None, (prefix, name))) or "network"] = cell

    add("", network)
    for function in functions:
        for name, cell in _cells_in(function, set()):
            add(name, cell)
    return named


def _cells_in(function: object, visited: set[int]) -> Iterator[tuple[str, nn.Cell]]:
    """Yield the cells in a function's closure, among its globals, or in the object it is a method of."""
    if isinstance(function, nn.Cell):
        yield type(function).__name__, function
        return
    function = inspect.unwrap(function) if callable(function) else function
    if isinstance(function, partial):
        yield from _cells_in(function.func, visited)
        return
    owner = function.__self__ if isinstance(function, MethodType) else function
    if isinstance(owner, nn.Cell):
        yield type(owner).__name__, owner
    values = {} if isinstance(owner, FunctionType) else dict(getattr(owner, "__dict__", {}))
    function = function.__func__ if isinstance(function, MethodType) else function
    if isinstance(function, FunctionType) and id(function) not in visited:
        visited.add(id(function))
        values.update(_variables(function))
        for value in list(values.values()):
            # Only functions of the same file, because others are libraries.
            if isinstance(value, FunctionType) and inspect.unwrap(value).__globals__ is function.__globals__:
                yield from _cells_in(value, visited)
    for name, value in values.items():
        if isinstance(value, nn.Cell):
            yield name, value


def _variables(function: FunctionType) -> dict[str, object]:
    """Return what a function refers to, by name. (`inspect.getclosurevars` fails on variables that have no value yet.)"""
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
    with ExitStack() as stack:
        stack.enter_context(_op_by_op())
        stack.enter_context(_same_random_state(cells))
        stack.enter_context(_same_flags(cells))
        stack.enter_context(_same_parameters(cells))
        yield


@contextmanager
def _op_by_op() -> Iterator[None]:
    # Compiled graphs would not see a layer that is switched off, and take seconds for each shape.
    mode, jit = ms.get_context("mode"), os.environ.get("MS_JIT")
    os.environ["MS_JIT"] = "0"
    ms.set_context(mode=ms.PYNATIVE_MODE)
    try:
        yield
    finally:
        ms.set_context(mode=mode)
        os.environ.pop("MS_JIT")
        if jit is not None:
            os.environ["MS_JIT"] = jit


@contextmanager
def _same_parameters(cells: list[nn.Cell]) -> Iterator[None]:
    parameters = {id(p): p for cell in cells for p in cell.get_parameters(expand=False)}.values()
    before = [(p, p.asnumpy().copy()) for p in parameters]
    try:
        yield
    finally:
        for parameter, value in before:
            if parameter.asnumpy().tobytes() != value.tobytes():
                write(parameter, value)


def write(parameter: Parameter, value: np.ndarray) -> None:
    """Write a parameter by `assign`, because a graph that is already compiled does not see what `set_data` writes."""
    ops.assign(parameter, Tensor(value, parameter.dtype))


@contextmanager
def _same_flags(cells: list[nn.Cell]) -> Iterator[None]:
    names = ("training", "_phase", "use_batch_statistics")
    before = [(cell, {name: vars(cell)[name] for name in names if name in vars(cell)}) for cell in cells]
    try:
        yield
    finally:
        for cell, flags in before:
            for name, value in flags.items():
                if vars(cell)[name] is not value:
                    setattr(cell, name, value)


@contextmanager
def _same_random_state(cells: list[nn.Cell]) -> Iterator[None]:
    # Functional random ops take their seeds from this table; a random primitive keeps a state of its own, so a copy of it draws.
    seeds = importlib.import_module("mindspore.common.seed")._KERNEL_SEED
    state = dict(seeds), ms.get_rng_state(), np.random.get_state(), random.getstate()
    primitives = [(cell, name, primitive) for cell in cells for name, primitive in cell._primitives.items()
                  if primitive is not None and any(attribute.lower().startswith("seed") for attribute in primitive.attrs)]
    for cell, name, primitive in primitives:
        setattr(cell, name, primitive._clone())
    try:
        yield
    finally:
        for cell, name, primitive in primitives:
            setattr(cell, name, primitive)
        seeds.clear()
        seeds.update(state[0])
        ms.set_rng_state(state[1])
        np.random.set_state(state[2])
        random.setstate(state[3])


@contextmanager
def watched(cells: Iterable[nn.Cell], visit: Callable[[nn.Cell, tuple, dict, Any], None]) -> Iterator[None]:
    """Within the block, call `visit(cell, arguments, keywords, output)` whenever one of the cells has run."""
    handles = [cell.register_forward_hook(visit, with_kwargs=True) for cell in cells]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
