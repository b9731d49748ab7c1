"""Find the networks that a user's functions use, by the names in their code."""
from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dis import get_instructions
from functools import partial
from inspect import isfunction, unwrap
from itertools import chain
from numbers import Number
from types import CodeType, MethodType, ModuleType
from typing import Any

import numpy as np
from mindspore import Parameter, Tensor, nn

from ..distributed.zero import whole_parameters

_DEEPEST = 4  # attributes of attributes: self.a.b.c.network
_MOST = 100_000  # values that are looked into
_PLAIN = (type(None), str, bytes, Number, np.ndarray, Tensor)  # which hold nothing


def require_same_parameters(functions: Iterable[Callable], optimizer: nn.Optimizer) -> None:
    """Raise ValueError for an optimizer of another network with the same names: its parameters would get no gradient.

    Args:
        functions: Cells, or functions whose Cells are searched.
        optimizer: The optimizer.
    """
    optimized = {p.name: p for p in whole_parameters(optimizer.parameters)}
    for parameter in (p for cell in cells_of(*functions) for p in cell.get_parameters()):
        if optimized.get(parameter.name, parameter) is not parameter:
            raise ValueError(f"the optimizer updates a Parameter called {parameter.name}, but the network has a "
                             "different Parameter with this name; if the network was built again (e.g. in a notebook), "
                             "build the optimizer and the train step again, too; if there are two networks, give their "
                             "parameters different names with Cell.update_parameters_name")


def cells_of(*functions: Callable) -> list[nn.Cell]:
    """Return the Cells that functions use, or the functions themselves if they are Cells.

    They are found by the names in the code: variables, attributes of objects and modules, defaults, arguments of a
    `partial`. Functions and methods that it names are searched, too, except MindSpore's.
    """
    return _reached(functions, False)[0]


def held_by(*functions: Callable) -> tuple[list[nn.Cell], list[Parameter]]:
    """Return the Cells and Parameters that functions can reach, of which they may use only some.

    These are those of `cells_of`, and all in lists, tuples, dicts and attributes of objects.
    """
    return _reached(functions, True)


def _reached(functions: Iterable[Callable], anywhere: bool) -> tuple[list[nn.Cell], list[Parameter]]:
    cells: list[nn.Cell] = []
    parameters: list[Parameter] = []
    waiting: list[object] = [*functions]
    seen: dict[tuple[int, ...], object] = {}
    for value in waiting:
        key = (id(value.__self__), id(value.__func__)) if isinstance(value, MethodType) else (id(value),)
        if key in seen or len(seen) == _MOST:
            continue
        if isinstance(value, Parameter):
            parameters.append(value)
        if isinstance(value, _PLAIN):
            continue
        seen[key] = value  # which keeps it, and its id
        if isinstance(value, nn.Cell):
            cells.append(value)
            inside = [cell for _, cell in value.cells_and_names()]
            seen.update({(id(cell),): cell for cell in inside})
            waiting += chain.from_iterable(map(_attributes_of, inside)) if anywhere else ()
        elif isinstance(value, partial):
            waiting += [*value.args, *value.keywords.values(), value.func]
        elif isinstance(value, MethodType) and isinstance(value.__self__, nn.Cell):
            waiting.append(value.__self__)
        elif isinstance(value, (list, tuple, dict, set, deque)):
            waiting += [] if not anywhere else value.values() if isinstance(value, dict) else value
        elif callable(value) and not str(getattr(value, "__module__", "")).startswith("mindspore."):
            waiting += _named_in(value)
        if anywhere and not isinstance(value, nn.Cell):
            waiting += _attributes_of(value)
    return cells, parameters


def _attributes_of(value: object) -> Iterator[object]:
    """Yield the attributes of a Cell, or of an object or class of a user's own: also of its classes, and in slots."""
    if not isinstance(value, nn.Cell) and (isinstance(value, ModuleType) or _is_of_a_library(value)):
        return
    yield from getattr(value, "__dict__", {}).values()
    for kind in (value if isinstance(value, type) else type(value)).__mro__[:-1]:
        if kind is nn.Cell:
            return
        yield from (held for held in vars(kind).values() if not isfunction(held))  # methods are found by their names
        slots = vars(kind).get("__slots__", ())
        yield from (getattr(value, name, None) for name in ([slots] if isinstance(slots, str) else slots))


def _named_in(function: Any) -> list[object]:
    """Return the values that a function names; none if it is not a Python function, or a value is not set yet."""
    owner = getattr(function, "__self__", None)
    if isinstance(owner, nn.Cell):
        return [owner]
    if not isinstance(function, type) and not hasattr(function, "__code__") and owner is None:
        owner, function = function, function.__call__  # an object that is called
    with suppress(AttributeError, TypeError, ValueError):
        plain = unwrap(getattr(function, "__func__", function))
        # Only LOAD_GLOBAL tells a global `network` from the attribute `self.network`. `inspect.getclosurevars` mixes
        # them up, and skips inner functions; source for `ast` may be missing. To record which Cells run would need a
        # batch and a forward pass, but the error has to come when the step is built.
        codes = list(codes_in(plain.__code__))
        names = {name for code in codes for name in code.co_names}
        loaded = {found.argval for code in codes for found in get_instructions(code) if found.opname == "LOAD_GLOBAL"}
        values = [*(cell.cell_contents for cell in plain.__closure__ or ()), *(plain.__defaults__ or ()),
                  *(plain.__kwdefaults__ or {}).values(),
                  *(plain.__globals__[name] for name in sorted(loaded & plain.__globals__.keys()))]
        held = [owner, *values]
        for _ in range(_DEEPEST):
            held = [found for value in held for found in _held_by(value, names)]
            values += held
        return values
    return []


def codes_in(code: CodeType) -> Iterator[CodeType]:
    """Yield the code of a function, and that of the functions in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from codes_in(constant)


def _held_by(value: object, names: Iterable[str]) -> list[object]:
    """Return the attributes and methods with these names, if it is a module, or an object of a user's own class.

    For a property, return what computes it, as a method.
    """
    if isinstance(value, nn.Cell) or _is_of_a_library(value):
        return []
    kind, held = type(value), getattr(value, "__dict__", {})
    members = {name: getattr(kind, name, None) for name in names}
    computed = [MethodType(member.fget, value) for member in members.values()
                if isinstance(member, property) and member.fget is not None]
    return computed + [getattr(value, name) for name, member in members.items() if name in held or isfunction(member)]


def _is_of_a_library(value: object) -> bool:
    """Return whether a module, a class or an object is built in, or NumPy's or MindSpore's."""
    owner = value.__name__ if isinstance(value, ModuleType) else (
        value if isinstance(value, type) else type(value)).__module__
    return owner.partition(".")[0] in ("builtins", "mindspore", "numpy")
