"""Facts: texts of what all ranks must share, which are equal in every process that builds the same.

    optimizer, stage, loss scaler ─► every number that it holds, at any depth ─► texts by name ─► compared by `ranks.py`
"""
from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from functools import cache, partial
from hashlib import sha256
from inspect import isfunction, isroutine, signature
from numbers import Number
from typing import Any, NamedTuple, Optional

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn, ops
from mindspore.nn.learning_rate_schedule import LearningRateSchedule

from ..distributed.zero import whole_of
from ..tensors import as_array
from .optimizers import divided_state
from .stages import Stage

# Schedules are compared by their values after so many updates: 0, 1, 2, 3, 4, 6, 8, 12, ... 2**16.
UPDATES = (0, *sorted({2**i for i in range(17)} | {3 * 2**i for i in range(15)}))
_OF_A_RUN = {"current_phase", "sequence_modified", "_mutable_flags", "_func_graph_flags"}  # set when a Cell has run
_LIBRARIES = {"builtins", "mindspore", "numpy", *sys.stdlib_module_names} - {"__main__"}
_SIMPLE = (type(None), Number, str, bytes, np.dtype, ms.Type)


class Fact(NamedTuple):
    """Hold one number or other value.

    Attributes:
        word: What a user calls the argument that it belongs to, e.g. "weight_decay".
        text: Its place and value.
        of: "number", "member" for a parameter that the optimizer updates, "state" for another Parameter.
    """

    word: str
    text: str
    of: str = "number"


def describe(optimizer: Any) -> dict[str, str]:
    """Return texts by name of all that an optimizer holds. They are equal for optimizers that were built alike.

    These are its class; each number, bool, text and array in its attributes, at any depth; the values of its schedules;
    the names of its parameters, with their groups; and "state": the values of its other Parameters, except of those
    that ZeRO divides. The names are those of attributes. An attribute such as `exec_weight_decay` counts to
    `weight_decay`. What MindSpore sets in every Cell, or when it runs one, is left out: it differs between processes.
    """
    divided = divided_state(optimizer)  # differs from rank to rank
    members = {id(p) for p in getattr(optimizer, "parameters", ())}

    def described(parameter: Parameter) -> tuple[str, str]:
        if id(parameter) in members:
            return whole_of(parameter).name, "member"
        return "divided" if id(parameter) in divided else _array(parameter), "state"

    arguments = _arguments_of(optimizer)
    found: dict[str, list[str]] = {"class": [_name_of(type(optimizer))]}
    last: dict[str, list[str]] = {"parameters": [], "state": []}
    for fact in Walk(described).inside(optimizer):
        name = "parameters" if fact.of == "member" else _argument_of(fact.word, arguments)
        if fact.of == "state" and fact.word not in arguments and name not in (*last, "learning_rate", "lr"):
            name = "state"  # `beta1_power` is no argument `beta1`
        (last if name in last else found).setdefault(name, []).append(fact.text)
    return {name: "\n".join(texts) for name, texts in (*found.items(), *last.items())}


def text_of(value: Any) -> str:
    """Return a text of all numbers in an object, at any depth, with the values of its Parameters."""
    return _text(value, lambda parameter: (_array(parameter), "state"))


def texts_of_stages(stages: Iterable[Stage]) -> str:
    """Return a text of the classes of stages and their numbers. Values of Parameters may differ between ranks."""
    return "\n".join(_text(stage, lambda parameter: (f"{parameter.dtype}{tuple(parameter.shape)}", "state"),
                           without=set(Stage.__annotations__)) for stage in stages)


def _text(value: Any, described: Callable, without: Iterable[str] = ()) -> str:
    walk = Walk(described, without)
    return "\n".join([_name_of(type(value)), *(fact.text for fact in walk.inside(value))])


class Walk:
    """Find the values in an object.

    Args:
        described: Called as `described(parameter)`; returns the text of a Parameter, and what it is; see `Fact`.
        without: Names of attributes that are left out.
    """

    def __init__(self, described: Callable[[Parameter], tuple[str, str]], without: Iterable[str] = ()) -> None:
        self.described, self.without = described, {*without, *_OF_A_RUN}
        self.seen: dict[int, tuple[str, Any]] = {}  # by `id`: the place, and the value, which keeps its `id`

    def inside(self, value: Any) -> Iterator[Fact]:
        """Yield the values in the attributes of an optimizer, a stage or a loss scaler."""
        self.seen[id(value)] = "", value
        for name, held in self._attributes_of(value):
            yield from self._facts(held, name, name.removeprefix("init_"))

    def _facts(self, value: Any, place: str, word: str, is_named: bool = False, in_schedule: bool = False
               ) -> Iterator[Fact]:
        """Yield the values in `value`, which is found at `place` and belongs to the argument `word`.

        `is_named`: whether the word stands for all that is inside, so that keys of dicts are not names of arguments.
        """
        is_parameter = isinstance(value, Parameter)
        text = None if is_parameter else _plain(value)
        if text is not None:
            yield Fact(word, f"{place}: {text}")
            return
        of = self.described(value) if is_parameter else ("", "state")
        if of[1] != "member" and id(value) in self.seen:
            yield Fact(word, f"{place}: as {self.seen[id(value)][0]}", "state")
            return
        self.seen[id(value)] = place, value
        if is_parameter:
            yield Fact(word, f"{place}: {of[0]}", of[1])
        elif isinstance(value, dict):
            for i, (key, held) in enumerate(value.items()):
                name = key if isinstance(key, (str, Number)) else i  # not a key that prints its address
                of_key = key if isinstance(key, str) and not is_named else word
                yield from self._facts(held, f"{place}[{name}]", of_key, is_named, in_schedule)
        elif isinstance(value, (list, tuple)):
            yield Fact(word, f"{place}: {len(value)}", "state")
            for i, held in enumerate(value):
                yield from self._facts(held, f"{place}[{i}]", word, is_named, in_schedule)
        elif isinstance(value, partial):
            for name in ("func", "args", "keywords"):
                yield from self._facts(getattr(value, name), f"{place}.{name}", word, True, in_schedule)
        else:
            yield Fact(word, f"{place}: {_name_of(value if isroutine(value) else type(value))}", "state")
            if isinstance(value, nn.Cell) and not in_schedule and _is_schedule(value, place):
                in_schedule = True
                yield Fact(word, f"{place}: {_values_of(value)}")
            is_inner = isinstance(getattr(value, "parameters", None), (tuple, list))  # an optimizer in another
            is_named = is_named or not (is_inner or isinstance(value, ops.Primitive))
            for name, held in self._attributes_of(value) if _shows(value) else ():
                yield from self._facts(held, f"{place}.{name}", word if is_named else name, is_named, in_schedule)

    def _attributes_of(self, value: Any) -> Iterator[tuple[str, Any]]:
        """Yield the attributes of an object with their names."""
        without = self.without
        if isinstance(value, ops.Primitive):
            yield from value.attrs.items()
            return
        if isinstance(value, nn.Cell):
            # Also what a Cell keeps elsewhere.
            yield from value.parameters_and_names(expand=False)
            yield from value.name_cells().items()
            without = without | _of_every_cell()
        for name, held in getattr(value, "__dict__", {}).items():
            if name not in without and not name.startswith("__"):
                yield name, held


@cache
def _of_every_cell() -> frozenset[str]:
    return frozenset(vars(nn.Cell()))


def _plain(value: Any) -> Optional[str]:
    """Return the text of a value that holds nothing else; None for others."""
    if isinstance(value, (np.generic, np.ndarray, Tensor)):
        return _array(value)
    is_list = isinstance(value, (list, tuple))
    if isinstance(value, _SIMPLE) or (is_list and all(isinstance(held, _SIMPLE) for held in value)):
        return f"{value!r}"
    if isinstance(value, (set, frozenset)):
        return f"{sorted(map(repr, value))}"  # in an order that does not depend on the process
    return None


def _array(value: Any) -> str:
    array = as_array(value) if isinstance(value, Tensor) else np.asarray(value)
    return f"{value.dtype}{array.shape} {array.tolist() if array.size == 1 else sha256(array.tobytes()).hexdigest()}"


def _is_schedule(cell: nn.Cell, place: str) -> bool:
    """Return whether a Cell computes a value from the update count. MindSpore's wrappers only return what they hold."""
    is_wrapper = type(cell).__module__.startswith("mindspore.") and type(cell).__name__.startswith("_")
    is_named = isinstance(cell, LearningRateSchedule) or "weight_decay" in place
    return is_named and not is_wrapper and not isinstance(cell, nn.CellList) and not list(cell.get_parameters())


def _values_of(schedule: nn.Cell) -> str:
    """Return a text of the values after `UPDATES`, up to the first at which the schedule raises an error."""
    values: list[str] = []
    for updates in UPDATES:
        try:
            value = schedule.construct(Tensor([updates], ms.int32))  # op by op, which changes nothing in the Cell
            values.append(_array(value) if isinstance(value, Tensor) else repr(value))
        except Exception as error:  # it cannot run op by op, or ends here
            values.append(type(error).__name__)
            break
    return ", ".join(values)


def _shows(value: Any) -> bool:
    """Return whether the attributes of an object are compared: of Cells, and of objects of a user's own classes."""
    is_own = type(value).__module__.partition(".")[0] not in _LIBRARIES
    return isinstance(value, (nn.Cell, ops.Primitive)) or (is_own and not isinstance(value, type))


def _name_of(named: Any) -> str:
    return f"{getattr(named, '__module__', '')}.{getattr(named, '__qualname__', type(named).__qualname__)}"


def _arguments_of(optimizer: Any) -> set[str]:
    """Return the names of the arguments of an optimizer's classes."""
    made = filter(isfunction, (vars(kind).get("__init__") for kind in type(optimizer).__mro__))
    # MindSpore's decorator of `__init__` hides its arguments, but keeps them.
    kept = getattr(optimizer, "init_args", {})
    return {name for function in made for name in signature(function).parameters} | {*kept} - {"self", "args", "kwargs"}


def _holds(word: str, part: str) -> bool:
    """Return whether the parts of a name, divided by "_", hold those of another in a row."""
    return f"_{part}_" in f"_{word}_"


def _argument_of(word: str, arguments: set[str]) -> str:
    """Return the argument that an attribute belongs to, e.g. "weight_decay" for `exec_weight_decay`, or its name."""
    if any(_holds(word, name) for name in ("parameters", "params")):
        return "parameters"
    if word not in arguments and "learning_rate" in arguments and _holds(word, "lr"):
        return "learning_rate"
    return word if word in arguments else max((name for name in arguments if _holds(word, name)), key=len, default=word)
