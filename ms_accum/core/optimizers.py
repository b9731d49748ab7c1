"""Read from an optimizer the parameters to accumulate gradients for, and its own state."""
from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from math import inf, nan, prod
from numbers import Real
from typing import Any, Union
from warnings import warn
from weakref import WeakKeyDictionary, ref

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn, ops

from ..arguments import number
from ..distributed.zero import whole_of
from ..mindspore_api import is_a
from ..tensors import FLOATS, require_trainable

INSTANCE = re.compile(r"^accumulator\d+\.")  # the prefix of an accumulator's Parameters, if `cell_prefix` is taken
_PLACE = re.compile(r"\[(\d+)\]$")
_RATE = re.compile(r"(^|[.[])(learning_rate|lr)(_group_\d+|\[\d+\]|\])*$")  # names of `rates_of`
_GROUP = re.compile(r"_group_(\d+)$")
_IN_SCHEDULE = re.compile(r"(group_)?(learning_rate|lr)[.[]")  # places
_GENERATED = re.compile(r"Parameter([#$]\d+)?")  # numbered in the order in which a process creates them
_CONSTANT = (Real, str, type(None))
_NO_OPTIONS = ("lr", "initial_lr")  # a Parameter, unless a script has just replaced it; what only a scheduler reads
# Of MindSpore 2.10: each element is updated without looking at others, or at shapes.
_ELEMENTWISE = {"ASGD", "AdaMax", "Adadelta", "Adagrad", "Adam", "AdamOffload", "AdamW", "AdamWeightDecay", "Adamax",
                "FTRL", "FusedAdamW", "LazyAdam", "Momentum", "NAdam", "ProximalAdagrad", "RAdam", "RMSProp", "RMSprop",
                "Rprop", "SGD"}
_named_by: dict[str, ref] = {}
_prefixes: WeakKeyDictionary[Any, set[str]] = WeakKeyDictionary()  # of the names of accumulators' Parameters
_UNKNOWN = ("{} has no learning rate that can be read, expected an attribute learning_rate, a Parameter of shape (), "
            "or param_groups; build nn.AdaFactor with relative_step=False")
_FIXED = ("the learning rate of {} is no Parameter, so compiled graphs keep it; make it a Parameter of shape ()")
_SCHEDULED = ("the learning rate of {} is a {}: each update computes it from the update count, so it cannot be set; "
              "build the optimizer with a number, e.g. learning_rate={:g}, and set that; or save_checkpoint, build the "
              "optimizer with another schedule or list, and load_checkpoint")


def checked_parameters(optimizer: object) -> tuple[Parameter, ...]:
    """Return the parameters of `optimizer`. Raise TypeError or ValueError if it cannot use accumulated gradients."""
    parameters = getattr(optimizer, "parameters", None)
    listed = isinstance(parameters, (tuple, list)) and all(isinstance(p, Parameter) for p in parameters)
    if not callable(optimizer) or not listed:
        raise TypeError(f"optimizer is of type {type(optimizer).__name__}, expected a MindSpore optimizer; "
                        "give e.g. nn.SGD(network.trainable_params(), learning_rate=0.01)")
    if not parameters:
        raise ValueError("optimizer holds no parameters, expected at least one; give it network.trainable_params()")
    for parameter in parameters:
        _require_accumulable(parameter)
    require_trainable(parameters)
    twice = next((name for name, times in Counter(p.name for p in parameters).items() if times > 1), None)
    if twice is not None:
        raise ValueError(f"optimizer holds two parameters called {twice}, expected each one once; "
                         "give it network.trainable_params()")
    _require_unscaled(optimizer)
    return tuple(parameters)


def require_elementwise(optimizer: Any, declared: bool) -> None:
    """Raise ValueError for an optimizer that may need whole parameters, where ranks divide them.

    `declared`: whether the user says that it does not.
    """
    kind, centralizes = type(optimizer), getattr(optimizer, "grad_centralization", False) or any(
        getattr(optimizer, "grad_centralization_flags", ()))
    is_known = kind.__module__.startswith("mindspore.") and kind.__name__ in _ELEMENTWISE
    if centralizes or not (declared or is_known):
        raise ValueError(f"{kind.__name__}{' with grad_centralization=True' * bool(centralizes)} may look at whole "
                         "parameters, but with zero > 0 a rank updates only slices; give an elementwise optimizer of "
                         "MindSpore, or zero=0; or elementwise=True, if yours looks neither at other elements nor at "
                         "shapes")


def warn_if_idle(optimizer: nn.Optimizer) -> None:
    """Warn of an optimizer of `mindspore.mint` that runs op by op on CPU: it changes no parameter (MindSpore 2.10)."""
    if type(optimizer).__module__.startswith("mindspore.mint.") and ms.get_context("device_target") == "CPU":
        warn(f"mint.optim.{type(optimizer).__name__} changes no parameter op by op on CPU (MindSpore 2.10); call "
             "set_context(mode=GRAPH_MODE), or use make_train_step without eager=True, or an optimizer of "
             "mindspore.nn", UserWarning, stacklevel=2)


def require_rates(optimizer: nn.Optimizer) -> None:
    """Raise ValueError if a list of learning rates has no rate for the next update. It waits for the device."""
    for _, cell in optimizer.cells_and_names() if isinstance(optimizer, nn.Cell) else ():
        rates = getattr(cell, "learning_rate", None) if is_a(cell, "LearningRateSchedule") else None
        if isinstance(rates, Parameter) and rates.ndim == 1:
            if int(optimizer.global_step) >= rates.size:
                raise ValueError(f"the optimizer's list of {rates.size} learning rates is used up, expected a rate for "
                                 "each update; ms_accum.updates_of(accumulate_step, microbatches, epochs) counts them")


def state_of(optimizer: object) -> list[tuple[str, Parameter]]:
    """Return all state of an optimizer with names: moments, counts and learning rates, but not the trained parameters.

    State is every Parameter of a Cell, also in lists, tuples and dicts at any depth, where MindSpore does not find it
    (e.g. the learning rates in `param_groups`). The name is the Parameter's own, or its place (`slots[0].first`) if its
    name is missing or not unique; both are equal in the next process. Plain Python numbers are not found; MindSpore's
    optimizers that run on CPU keep none (2.10).
    """
    found = _placed_state(optimizer)
    times = Counter(p.name for _, p in found)
    return [(place if times[p.name] > 1 or _GENERATED.fullmatch(p.name) else p.name, p) for place, p in found]


def _placed_state(optimizer: object) -> list[tuple[str, Parameter]]:
    """Return the state with its places. An optimizer that is not a Cell holds it in its attributes."""
    holder = optimizer if isinstance(optimizer, nn.Cell) else dict(getattr(optimizer, "__dict__", {}))
    trained = {id(p) for p in getattr(optimizer, "parameters", ())}
    return [(place, held) for place, held in _inside(holder, trained) if isinstance(held, Parameter)]


def numbers_of(optimizer: object) -> dict[str, Union[int, float]]:
    """Return the numbers that a user's own optimizer holds as attributes."""
    if type(optimizer).__module__.startswith("mindspore."):
        return {}
    attributes = getattr(optimizer, "__dict__", {})
    return {name: held for name, held in attributes.items() if type(held) in (int, float) and name[0] != "_"}


def rates_of(optimizer: object) -> dict[str, Parameter]:
    """Return the Parameters whose values a script gives, by name: learning rates, all in schedules, and momentum."""
    found = {}
    for (name, parameter), (place, _) in zip(state_of(optimizer), _placed_state(optimizer)):
        name = own_name(optimizer, name)
        # Other Parameters called momentum are buffers.
        if (_RATE.search(name) and parameter.ndim <= 1) or (name == "momentum" and parameter.ndim == 0) or (
                _IN_SCHEDULE.match(place)):
            found[name] = parameter
    return found


def options_of_groups(optimizer: Any) -> list[dict[str, Any]]:
    """Return the plain values in `param_groups`, which graphs hold as constants, as JSON has them: tuples as lists."""
    return [{name: _as_in_json(value) for name, value in group.items()
             if name not in _NO_OPTIONS and all(isinstance(each, _CONSTANT) for each in
                                                (value if isinstance(value, tuple) else (value,)))}
            for group in getattr(optimizer, "param_groups", ())]


def _as_in_json(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_as_in_json(each) for each in value]
    return value.item() if isinstance(value, np.generic) else value


def load_options(optimizer: Any, own: list[dict[str, Any]], first: list[dict[str, Any]], saved: list[dict[str, Any]]
                 ) -> list[str]:
    """Set values in `param_groups` to those of a checkpoint, where its script gave the same ones as this one.

    Return texts of what this takes back.

    Args:
        optimizer: The optimizer.
        own, first: What this script gave, and that of the checkpoint. See `options_of_groups`.
        saved: The values when it was saved.
    """
    taken_back, groups = [], getattr(optimizer, "param_groups", ())
    for group, now, mine, theirs, values in zip(groups, options_of_groups(optimizer), own, first, saved):
        for name in now.keys() & mine.keys() & theirs.keys() & values.keys():
            if mine[name] == theirs[name] and now[name] != values[name]:
                if now[name] != mine[name]:
                    taken_back.append(f"{name} {now[name]} -> {values[name]} (set it again after the load)")
                group[name] = tuple(values[name]) if isinstance(values[name], list) else values[name]
    return sorted(taken_back)


def assign_rates_of_groups(optimizer: Any) -> None:
    """Assign learning rates that a script has put into `param_groups`, as in PyTorch, to the Parameters of graphs."""
    for group, rate in zip(getattr(optimizer, "param_groups", ()), getattr(optimizer, "lrs", ())):
        if isinstance(rate, Parameter) and group["lr"] is not rate:
            ops.assign(rate, Tensor(float(group["lr"]), rate.dtype))
            group["lr"] = rate
            follow_rates(optimizer)


def rates_in(optimizer: Any) -> list[Any]:
    """Return the learning rates of an optimizer in the order of its groups: Parameters, numbers or schedules.

    Of MindSpore's `nn` optimizers, all groups without a rate of their own have one together. With "order_params",
    schedules are in the order of the parameters. There is none if the optimizer computes its own rate (`nn.AdaFactor`).
    """
    optimizer = optimizer.opt if isinstance(optimizer, nn.LARS) else optimizer
    groups = getattr(optimizer, "param_groups", None)  # of `mindspore.experimental.optim` and `mindspore.mint.optim`
    if groups:  # `mint.optim.SGD` updates with "lr_float", a number, and a new value of "lr" has no effect (2.10)
        return [group.get("lr_float", group["lr"]) for group in groups]
    rates = () if getattr(optimizer, "relative_step", False) else getattr(optimizer, "learning_rate", ())
    rates = rates if isinstance(rates, (list, tuple, nn.CellList)) else [rates]
    rates = [*{id(rate): rate for rate in rates}.values()]  # a group's rate is listed once for each of its parameters
    if getattr(optimizer, "is_group_params_ordered", False) and all(isinstance(rate, Parameter) for rate in rates):
        numbers = [_GROUP.search(rate.name) for rate in rates]  # of their groups; the common rate has none
        used = {int(number[1]) for number in numbers if number}
        common = next(i for i in range(len(rates) + 1) if i not in used)
        rates = [rate for _, _, rate in sorted(
            (int(number[1]) if number else common, i, rate) for i, (number, rate) in enumerate(zip(numbers, rates)))]
    return rates


def rates_at(optimizer: Any, offset: int = 0) -> tuple[float, ...]:
    """Return the learning rates of the next update; with `offset` -1 those of the last one.

    They are NaN where there is none: before the first update, or after the last rate of a list.
    """
    return tuple(_rate_at(rate, optimizer, offset) for rate in rates_in(optimizer))


def _rate_at(rate: Any, optimizer: Any, offset: int) -> float:
    if not isinstance(rate, nn.Cell):
        return float(rate)
    updates = int(optimizer.global_step) + offset
    listed = getattr(rate, "learning_rate", None)
    is_past = isinstance(listed, Parameter) and listed.ndim == 1 and updates >= listed.size
    return nan if updates < 0 or is_past else float(rate(Tensor([updates], ms.int32)).reshape(()))


def next_rates(optimizer: Any) -> Union[float, tuple[float, ...]]:
    """Return the learning rate of the next update; several in a tuple. Raise ValueError if it is unknown.

    Rates are float32, and given in their shortest form: 0.1, not 0.10000000149011612.
    """
    rates = tuple(float(str(np.float32(rate))) for rate in rates_at(optimizer))
    if not rates:
        raise ValueError(_UNKNOWN.format(type(optimizer).__name__))
    return rates if len(rates) > 1 else rates[0]


def set_rates(optimizer: Any, given: Any) -> None:
    """Set the learning rates: one number for all, or one for each.

    Raise TypeError or ValueError, before anything is set, if there is a schedule or a list of rates, or numbers do not
    fit.
    """
    rates, before = rates_in(optimizer), next_rates(optimizer)
    name, scheduled = type(optimizer).__name__, [rate.cls_name for rate in rates if isinstance(rate, nn.Cell)]
    if scheduled:  # `_ConvertToCell` wraps a number beside schedules of other groups
        kind = next((each for each in scheduled if each != "_ConvertToCell"), "")
        kind = "list of rates" if kind == "_IteratorLearningRate" else f"schedule ({kind})"
        raise ValueError(_SCHEDULED.format(name, kind, np.ravel(before)[0]))
    values = [*given] if isinstance(given, (list, tuple)) else [given] * len(rates)
    if len(values) != len(rates):
        raise ValueError(f"learning_rate is {len(values)} numbers, expected one for each of the {len(rates)} rates "
                         f"of {name}, or one number for all")
    values = [number("learning_rate", value, lambda rate: 0 <= rate < inf, "a finite number >= 0") for value in values]
    follow_rates(optimizer, always=True)
    rates = rates_in(optimizer)
    if not all(isinstance(rate, Parameter) for rate in rates):
        raise ValueError(_FIXED.format(name))
    for rate, value in zip(rates, values):
        ops.assign(rate, Tensor(value, rate.dtype))


def follow_rates(optimizer: Any, always: bool = False) -> None:
    """Let `mint.optim.SGD` update with its Parameter "lr" where it has another value than the constant in its graphs.

    `always`: also if the values are equal. Graphs must then be compiled again; see `options_of_groups`.
    """
    for group in getattr(optimizer, "param_groups", ()):
        constant = group.get("lr_float")
        if isinstance(constant, Real) and (always or np.float32(constant) != group["lr"].asnumpy()):
            group["lr_float"] = group["lr"]


def divided_state(optimizer: object) -> dict[int, Parameter]:
    """Return, by `id` of each Parameter of the state that is cut like a slice, the whole parameter of that slice.

    Such state is a clone of the slice; or it has the slice's shape, and its name ends in the slice's name; or it is in
    a list that has one entry for each slice, in the slice's shape.
    """
    slices = [p for p in getattr(optimizer, "parameters", ()) if whole_of(p) is not p]
    clones = {id(clone): part for part in slices for clone in getattr(part.param_info, "cloned_obj", ())}
    found: dict[int, Parameter] = {}
    lists: dict[str, list[tuple[int, Parameter]]] = {}
    for place, state in _placed_state(optimizer) if slices else ():
        named = [p for p in slices if state.name.endswith(f".{whole_of(p).name}")]
        part = clones.get(id(state), max(named, key=lambda p: len(whole_of(p).name), default=None))
        number = _PLACE.search(place)
        if part is None and number is not None:
            lists.setdefault(place[:number.start()], []).append((int(number[1]), state))
        elif part is not None and tuple(part.shape) == tuple(state.shape):
            found[id(state)] = whole_of(part)
    for members in lists.values():
        if {i: tuple(state.shape) for i, state in members} == {i: tuple(p.shape) for i, p in enumerate(slices)}:
            found.update((id(state), whole_of(slices[i])) for i, state in members)
    return found


def name_state(optimizer: object, prefix: str) -> None:
    """Rename state whose name is not unique (`global_step` of two optimizers): graph mode raises an error for it.

    Note the prefix, because the parameter that it is made of may get another name, e.g. in an `nn.CellList`.
    """
    _prefixes.setdefault(optimizer, set()).add(f"{prefix}.")
    for name, state in state_of(optimizer):
        owner = _named_by.get(state.name, ref(optimizer))()
        if name == state.name and (owner is None or owner is optimizer):
            _named_by[name] = ref(optimizer)
        else:
            state.name = f"{prefix}.{name}"


def cell_prefix(optimizer: Any) -> str:
    """Return the prefix of the names of an accumulator's Parameters, equal in every process; see `prefix_of`."""
    return f"accumulator.{whole_of(optimizer.parameters[0]).name}."


def own_name(optimizer: Any, name: str) -> str:
    """Return the name of an optimizer's state without the prefixes of accumulators and cells that were built for it."""
    before = ""
    while name != before:  # each one may have added its own; see `name_state`
        before, name = name, INSTANCE.sub("", name).removeprefix(cell_prefix(optimizer))
        for prefix in _prefixes.get(optimizer, ()):
            name = name.removeprefix(prefix)
    return name


def _require_accumulable(parameter: Parameter) -> None:
    if parameter.dtype not in FLOATS:
        raise TypeError(f"{parameter.name} is a parameter of {parameter.dtype}, expected a float dtype; "
                        "leave it out of the optimizer")
    if prod(parameter.shape) == 0:
        raise ValueError(f"{parameter.name} has shape {tuple(parameter.shape)}, expected at least one element; "
                         "leave it out of the optimizer")


def _require_unscaled(optimizer: Callable) -> None:
    """Raise ValueError for an optimizer with a loss scale of its own, also inside a wrapper such as `nn.LARS`."""
    for _, holder in (("", optimizer), *_inside(optimizer, set())):
        scale = getattr(holder, "loss_scale", 1)
        if isinstance(scale, Real) and scale != 1:
            raise ValueError(f"the optimizer has loss_scale={scale:g}, expected 1: it would divide gradients that were "
                             "not multiplied by it, or were already divided; leave loss_scale out of the optimizer and "
                             f"give loss_scaler=amp.StaticLossScaler({scale:g}) to make_train_step or TrainOneStepCell")


def _inside(value: object, seen: set[int], place: str = "") -> Iterator[tuple[str, Union[Tensor, nn.Cell]]]:
    """Yield each Tensor and Cell in `value`, at any depth, once, with its place; skip those in `seen`."""
    seen.add(id(value))
    for name, held in _held(value):
        if isinstance(held, (Tensor, nn.Cell, list, tuple, dict)) and id(held) not in seen:
            if isinstance(held, (Tensor, nn.Cell)):
                yield (place + name).lstrip("."), held
            yield from _inside(held, seen, place + name)


def _held(value: object) -> list[tuple[str, object]]:
    if isinstance(value, nn.Cell):
        # First the Parameters that the Cell itself finds, by the shortest names.
        held = [*value.parameters_and_names(expand=False), *value.name_cells().items(), *vars(value).items()]
        return [(f".{name}", inside) for name, inside in held]
    if isinstance(value, dict):
        # Not a key that prints its address.
        return [(f"[{key if isinstance(key, (str, int)) else i}]", held) for i, (key, held) in enumerate(value.items())]
    return [(f"[{i}]", inside) for i, inside in enumerate(value)] if isinstance(value, (list, tuple)) else []
