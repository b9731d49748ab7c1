"""Argument checks. Each returns the checked value, or raises an error: what is wrong, got, expected, and remedy."""
from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Iterable
from difflib import get_close_matches
from math import inf
from numbers import Real
from operator import index
from textwrap import dedent
from typing import Any, NoReturn, Optional, SupportsIndex, TypeVar, overload

import mindspore as ms
import numpy as np

T = TypeVar("T")
LARGEST_INT32 = 2**31 - 1  # counters are int32, and a larger constant would wrap around in a comparison with them
_OTHERS = {"gradient_accumulation_steps": "accumulate_step", "max_grad_norm": "clip_norm", "scale_sense": "loss_scaler"}


def whole_number(name: str, value: Any, remedy: str = "", *, minimum: int = 1, maximum: Optional[int] = None) -> int:
    """Return an int, a NumPy integer or a Tensor of one element as an int. Raise an error for bools and floats."""
    expected = f"an int >= {minimum}"
    try:
        if isinstance(value, bool) or getattr(value, "dtype", None) in (np.bool_, ms.bool_):
            raise TypeError
        number = index(value)
    except (TypeError, ValueError):  # ValueError: a Tensor of several elements, or of floats
        raise TypeError(_message(name, _typed(value), expected, remedy)) from None
    if number < minimum:
        raise ValueError(_message(name, number, expected, remedy))
    if maximum is not None and number > maximum:
        raise ValueError(_message(name, number, f"at most {maximum}", remedy))
    return number


def number(name: str, value: object, accepts: Callable[[float], bool], expected: str, remedy: str = "") -> float:
    """Return a real number as a float (infinity if it is too large). Raise an error for bools and if not `accepts`."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(_message(name, _typed(value), expected, remedy))
    try:
        converted = float(value)
    except OverflowError:
        converted = -inf if value < 0 else inf
    if not accepts(converted):
        raise ValueError(_message(name, value, expected, remedy))
    return converted


def boolean(name: str, value: object, remedy: str = "") -> bool:
    """Return `value`. Raise TypeError unless it is True or False."""
    if not isinstance(value, bool):
        raise TypeError(_message(name, _typed(value), "True or False", remedy))
    return value


def one_of(name: str, value: object, choices: tuple[Optional[str], ...]) -> Any:
    """Return `value`. Raise ValueError unless it is one of `choices`."""
    if not (value is None or isinstance(value, str)) or value not in choices:
        raise ValueError(_message(name, repr(value), f"one of {', '.join(map(repr, choices))}"))
    return value


@overload
def instance_of(name: str, value: object, kinds: type[T], expected: str, remedy: str = "") -> T: ...


@overload
def instance_of(name: str, value: object, kinds: Any, expected: str, remedy: str = "") -> Any: ...


def instance_of(name: str, value: object, kinds: Any, expected: str, remedy: str = "") -> Any:
    """Return `value`. Raise TypeError unless it is an instance of `kinds` (or can be called, for `abc.Callable`)."""
    if not isinstance(value, kinds):
        raise TypeError(_message(name, f"of type {type(value).__name__}", expected, remedy))
    return value


def require_options(function: Any, given: Iterable[str], options: type) -> None:
    """Raise TypeError for an unknown option, and name the one that was probably meant.

    `function`: what was called, with a parameter `**options`; `given`: the names in these; `options`: a TypedDict.
    """
    own = [name for name in inspect.signature(function).parameters if name not in ("self", "options")]
    known = (*own, *options.__annotations__)
    for name in given:
        if name not in options.__annotations__:
            close = [_OTHERS[name]] if name in _OTHERS else get_close_matches(name, known, 1)  # in other libraries
            hint = f"did you mean {close[0]}?" if close else f"expected one of {', '.join(known)}"
            called = function.__qualname__.removesuffix(".__init__")
            raise TypeError(f"{called}() got an unexpected argument {name}; {hint}")


def fix_options(built: Any, *options: str) -> None:
    """Raise AttributeError where an option of a class is assigned later: compiled graphs would not see it."""
    assign = built.__setattr__

    def checked(self: object, name: str, value: object) -> None:
        if name in options:
            raise AttributeError(f"{name} of {built.__name__} was assigned, but compiled graphs keep what it was built "
                                 f"with; build a new {built.__name__}")
        assign(self, name, value)

    built.__setattr__ = checked


def require_callable(name: str, function: object, is_compiled: bool = True) -> None:
    """Raise TypeError if a function cannot be called, or is compiled and a lambda whose source cannot be read."""
    instance_of(name, function, Callable, "a function of the batch")
    made_by = f"{getattr(function, '__module__', '')}.{getattr(function, '__qualname__', '')}"
    if made_by.startswith("mindspore.") and "grad" in made_by.rpartition(".")[2]:
        raise TypeError(f"{name} computes gradients (the result of mindspore.value_and_grad or grad), expected the "
                        "function itself, which the step differentiates; give what was given to value_and_grad")
    if is_compiled and getattr(function, "__name__", "") == "<lambda>" and not _is_readable(function):
        raise TypeError(f"{name} is a lambda whose source MindSpore cannot read, expected a function; "
                        "define it with def, or write `name = lambda ...` as a statement of its own")


class Uncopied:
    """Prevent copying and pickling: a base class. A copy would share compiled graphs and Parameters."""

    __slots__ = ()

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        """Raise TypeError; `copy` and `pickle` call this method."""
        name = type(self).__name__
        raise TypeError(f"{name} holds compiled graphs and Parameters of its own, and cannot be copied or pickled; "
                        f"keep its state with save_checkpoint, and build a new {name} for another network")


def _is_readable(function: Any) -> bool:
    """Return whether the lambda is the whole right-hand side of its statement."""
    try:
        statement = ast.parse(dedent(inspect.getsource(function))).body[0]
    except (OSError, SyntaxError):
        return False
    return isinstance(getattr(statement, "value", None), ast.Lambda)


def one_line(error: Exception) -> str:
    """Return the message of an error in one line of at most 200 characters."""
    return " ".join(str(error).split()).strip("- ")[:200]


def _typed(value: object) -> str:
    return f"{value!r} of type {type(value).__name__}"


def _message(name: str, got: object, expected: str, remedy: str = "") -> str:
    return f"{name} is {got}, expected {expected}" + (f"; {remedy}" if remedy else "")
