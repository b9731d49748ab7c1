"""Facts: texts of what all ranks must share, which are equal in every process that builds the same.

    optimizer, stage, loss scaler ─► every number that it holds, at any depth ─► texts by name ─► compared by `ranks.py`
"""
from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from hashlib import sha256
from numbers import Number
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any, Optional

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn, ops

from ..distributed.zero import whole_of
from ..mindspore_api import is_a
from ..tensors import as_array
from .optimizers import divided_state, numbers_of, rates_of
from .stages import Stage

# Schedules are compared by their values after so many updates: 0, 1, 2, 3, 4, 6, 8, 12, ... 2**16.
UPDATES = (0, *sorted({2**i for i in range(17)} | {3 * 2**i for i in range(15)}))
_OF_A_RUN = {"current_phase", "sequence_modified", "_mutable_flags", "_func_graph_flags"}  # set when a Cell has run
_LIBRARIES = {"builtins", "mindspore", "numpy", *sys.stdlib_module_names} - {"__main__"}
_NAMED = (type, FunctionType, MethodType, BuiltinFunctionType)
_SIMPLE = (type(None), Number, str, bytes, np.dtype, ms.Type)
# What stands in a place before the name of an argument: where MindSpore's optimizers hold it, and prefixes of its name.
_HOLDERS = r"(init_args|(init_)?params|param_groups|defaults|_buffers|opt|optimizer)\]?(\[\d+\])?(\.|\[(?!\d))"
_BEFORE_NAME = re.compile(rf"^\.?({_HOLDERS})*((init|exec|group)_(?=learning_rate|lr|weight_decay))?")
# Where they hold arguments, also inside a wrapper.
_ARGUMENT = re.compile(r"\.(opt\.|optimizer\.)*(init_args\[|param_groups\[|(group_)?(learning_rate|lr|weight_decay)\b|"
                       r"(beta[12]|eps)$|init_params\[params\]\[\d+\]\[(lr|weight_decay)\]\.)")
_ONE_NUMBER = re.compile(r"^Float32\(1,\) \[(\S+)\]$")

CLASS = "optimizer"


def describe(optimizer: Any) -> dict[str, str]:
    """Return texts by name of all that an optimizer holds. They are equal for optimizers that were built alike.

    These are its class; each number, bool, text and array in its attributes, at any depth; the values of its schedules;
    the names of its parameters, with their groups; and the values of its other Parameters, except of those that ZeRO
    divides. The names are those of its arguments and attributes; an argument's comes first. What MindSpore sets in
    every Cell, or when it runs one, is left out: it differs between processes.
    """
    divided = divided_state(optimizer)  # differs from rank to rank
    members = {id(p) for p in optimizer.parameters}

    def described(parameter: Parameter) -> str:
        if id(parameter) in members:
            return whole_of(parameter).name
        return "divided" if id(parameter) in divided else _array(parameter)

    found: dict[str, list[str]] = {}
    for place, text in _Walk(described).texts(optimizer):
        found.setdefault(_name_of(place), []).append(f"{place}: {text}")
    return {name: "\n".join(texts) for name, texts in found.items()}


def _name_of(place: str) -> str:
    return re.split(r"[][.]", _BEFORE_NAME.sub("", place))[0]


def given_to(optimizer: Any) -> dict[str, dict[str, str]]:
    """Return what a script gives an optimizer (rates, weight decay, schedules, other numbers): texts by name and place.

    And its class, as "optimizer".

    Call it before the training begins: then the rates are those of the script, not what a callback has made of them.
    """
    given = {CLASS: {CLASS: f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"}}
    for place, text in _Walk(lambda _: "").texts(optimizer, in_schedule=True):  # schedules by their numbers
        if _ARGUMENT.match(place) and text and not text.startswith(("as .", "builtins.", "mindspore.ops.")):
            given.setdefault(_name_of(place), {})[place.removeprefix(".")] = _ONE_NUMBER.sub(
                lambda found: str(np.float32(found[1])), text.removeprefix("Float32() "))
    for name, places in given.items():  # `nn.AdamWeightDecay` holds its betas in attributes alone
        if f"init_args[{name}]" in places and name != "weight_decay":
            places.pop(name, None)
    own = {name: {name: str(held)} for name, held in numbers_of(optimizer).items()}
    return own | given | {name: {name: text} for name, text in rate_texts(optimizer).items()}


def rate_texts(optimizer: Any) -> dict[str, str]:
    """Return the values that the rates of an optimizer have now, as texts by name."""
    return {name: _short(parameter) for name, parameter in rates_of(optimizer).items()}


def changes(name: str, old: dict[str, str], new: dict[str, str]) -> list[str]:
    """Return what differs between two results of `given_to` under a name, e.g. "learning_rate.decay_steps 10 -> 20".

    Of what only one of them holds, only the first place; of one number in several places, only one.
    """
    differ = [place for place in {**old, **new} if old.get(place) != new.get(place)]
    in_both = [place for place in differ if place in old and place in new]
    lost, found = ([each[place] for place in differ if place in each] for each in (old, new))
    if lost and found and not in_both:  # such as one weight decay, then one for each group
        return [f"{name} {lost[0]} -> {found[0]}"]
    texts: dict[str, str] = {}
    for place in in_both or differ[:1]:
        shown = name if place == name else _BEFORE_NAME.sub("", f".{place}")
        if shown.count("]") > shown.count("["):  # of what is not shown
            shown = shown.replace("]", "", 1)
        texts.setdefault(shown, f"{shown} {old.get(place, 'none')} -> {new.get(place, 'none')}")
    return list(texts.values())


def _short(parameter: Parameter) -> str:
    values = as_array(parameter)
    if values.size == 1:
        return str(values.reshape(-1)[0])
    ends = f" from {float(values.flat[0]):g} to {float(values.flat[-1]):g}" if values.size else ""
    return f"{values.size}{ends} ({sha256(values.tobytes()).hexdigest()[:8]})"


def text_of(value: Any) -> str:
    """Return a text of all numbers in an object, at any depth, with the values of its Parameters."""
    return repr([*_Walk(_array).texts(value)])


def short_text_of(value: Any) -> str:
    """Return the class of an object, and the numbers in its attributes, with the values of its Parameters."""
    held = {place: text for place, text in _Walk(_short).texts(value) if place[0] == "."}
    return f"{type(value).__name__}({', '.join(f'{place[1:]}={text}' for place, text in held.items())})"


def texts_of_stages(stages: Iterable[Stage]) -> str:
    """Return a text of the classes of stages and their numbers. Values of Parameters may differ between ranks."""
    return repr([[*_Walk(lambda p: f"{p.dtype}{p.shape}", Stage.__annotations__).texts(stage)] for stage in stages])


class _Walk:
    """Find the values in an object. `described` gives texts of Parameters. Attributes `without` are left out."""

    def __init__(self, described: Callable[[Parameter], str], without: Iterable[str] = ()) -> None:
        self.described, self.without = described, {*without, *_OF_A_RUN}
        self.of_every_cell = {*vars(nn.Cell())} - {"_buffers"}
        self.seen: dict[int, tuple[str, Any]] = {}  # by `id`: the place, and the value, which keeps its `id`

    def texts(self, value: Any, place: str = "", in_schedule: bool = False) -> Iterator[tuple[str, str]]:
        """Yield the places of all that a value holds, e.g. ".learning_rate.decay_steps", with texts."""
        text = self.described(value) if isinstance(value, Parameter) else _plain(value)
        if text is None and id(value) in self.seen:
            text = f"as {self.seen[id(value)][0]}"
        self.seen.setdefault(id(value), (place, value))
        if text is not None:
            yield place, text
            return
        named = value if isinstance(value, _NAMED) else list if isinstance(value, tuple) else type(value)
        yield place or "class", f"{getattr(named, '__module__', '')}.{named.__qualname__}"
        if isinstance(value, nn.Cell) and not in_schedule and _is_schedule(value, place):
            in_schedule = True
            yield place, _values_of(value)
        if isinstance(value, (partial, ops.Primitive)):
            value = value.attrs if isinstance(value, ops.Primitive) else [value.func, value.args, value.keywords]
        if isinstance(value, dict):  # not by a key that prints its address
            held = ((f"[{key if isinstance(key, (str, Number)) else i}]", value[key]) for i, key in enumerate(value))
        elif isinstance(value, (list, tuple)):
            held = ((f"[{i}]", entry) for i, entry in enumerate(value))
        else:
            held = ((f".{name}", attribute) for name, attribute in self._attributes_of(value))
        for part, inner in held:
            yield from self.texts(inner, place + part, in_schedule)

    def _attributes_of(self, value: Any) -> Iterator[tuple[str, Any]]:
        """Yield the attributes of an object with their names. A library's objects hide them, except Cells."""
        is_cell, is_first = isinstance(value, nn.Cell), len(self.seen) == 1
        is_own = type(value).__module__.partition(".")[0] not in _LIBRARIES and not isinstance(value, type)
        if not (is_cell or is_first or is_own):
            return
        without = self.without | (self.of_every_cell if is_cell else set())
        for name, held in getattr(value, "__dict__", {}).items():
            if name not in without and not name.startswith("__"):
                yield name, held
        if is_cell:  # it keeps these elsewhere, and also the Parameters of its tuples, which have been seen above
            yield from value.name_cells().items()
            yield from (named for named in value.parameters_and_names(expand=False) if id(named[1]) not in self.seen)


def _plain(value: Any) -> Optional[str]:
    """Return the text of a value that holds nothing else; None for others. A number has one text in all its kinds."""
    if isinstance(value, (np.generic, np.ndarray, Tensor)) and not isinstance(value, Parameter):
        if value.shape != ():
            return _array(value)
        value = as_array(value).item() if isinstance(value, Tensor) else value.item()
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return repr(int(value)) if value == value // 1 else str(np.float32(value))  # kernels compute in float32
    is_list = isinstance(value, (list, tuple))
    if isinstance(value, _SIMPLE) or (is_list and all(isinstance(held, _SIMPLE) for held in value)):
        return f"[{', '.join(map(str, map(_plain, value)))}]" if is_list else repr(value)  # a tuple is as a list
    if isinstance(value, (set, frozenset)):
        return f"{sorted(map(repr, value))}"  # in an order that does not depend on the process
    return None


def _array(value: Any) -> str:
    array = as_array(value) if isinstance(value, Tensor) else np.asarray(value)
    return f"{value.dtype}{array.shape} {array.tolist() if array.size == 1 else sha256(array.tobytes()).hexdigest()}"


def _is_schedule(cell: nn.Cell, place: str) -> bool:
    """Return whether a Cell computes a value from the update count. MindSpore's wrappers only return what they hold."""
    is_wrapper = type(cell).__module__.startswith("mindspore.") and type(cell).__name__.startswith("_")
    is_named = is_a(cell, "LearningRateSchedule") or "weight_decay" in place
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
