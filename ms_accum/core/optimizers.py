"""The learning rates and the state of an optimizer: the only place that knows how those of MindSpore hold theirs."""
from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from math import inf, nan
from numbers import Real
from typing import Any, Union

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn, ops
from mindspore.ops import constexpr

from ..arguments import number
from ..distributed.exchange import whole_of
from ..tensors import FLOATS, require_trainable

_GENERATED = re.compile(r"Parameter([#$]\d+)?")  # numbered in the order in which a process creates them
_GROUP = re.compile(r"_group_(\d+)$")
_UNKNOWN = ("{} has no learning rate that can be read, expected an attribute learning_rate, a Parameter of shape (), "
            "or param_groups; build nn.AdaFactor with relative_step=False")
_FIXED = ("the learning rate of {} is a {}, which each update computes or graphs hold, so it cannot be set; build the "
          "optimizer with a number, e.g. learning_rate={:g}, and set that")
_CHANGED = ("param_groups was given another {}, which compiled graphs do not see; set train_step.learning_rate, or "
            "give other options when the optimizer is built")


class Rates:
    """Read and set the rates of `nn`, `experimental` and `mint` optimizers, and of a Cell that calls several of them.

    State whose name is not unique (of several optimizers in one Cell) is renamed by its path: a graph would raise an
    error for it. So build it before anything is compiled.

    Attributes:
        state: All Parameters of the optimizer by name, but for those that are trained, and those inside a schedule or a
            list of rates.
        divided: The whole parameter of each state that is cut as its slice is (ZeRO), by name.
        parameters: The state that a script gives as a number: learning rates and momentum, by name.
        given: The values of these when this was built.
    """

    def __init__(self, optimizer: Any) -> None:
        self._name, self._rates = type(optimizer).__name__, []  # type: str, list[tuple[Any, Any]]
        self._groups: list[tuple[dict, dict]] = []
        found = list(_inside(optimizer if isinstance(optimizer, nn.Cell) else dict(vars(optimizer)), set()))
        fixed = {id(p) for p in optimizer.parameters}
        for each in [optimizer, *(held for _, held in found if hasattr(held, "parameters"))]:
            for group in getattr(each, "param_groups", ()):
                if isinstance(group.get("lr_float"), Real):  # `mint.optim.SGD` updates with this number, not with "lr"
                    group["lr_float"] = group["lr"]
                self._groups.append((group, dict(group)))
            self._rates += [(each, rate) for rate in _rates_in(each) if all(rate is not r for _, r in self._rates)]
        inside = {id(p) for _, rate in self._rates if isinstance(rate, nn.Cell) for p in rate.get_parameters()}
        held = [(place, p) for place, p in found if isinstance(p, Parameter) and id(p) not in fixed]
        times = Counter(p.name for _, p in held)
        for place, parameter in held:
            if times[parameter.name] > 1:
                parameter.name = place
        self.state = {place if _GENERATED.fullmatch(p.name) else p.name: p for place, p in held if id(p) not in inside}
        rates = {id(rate) for _, rate in self._rates}
        self.parameters = {name: p for name, p in self.state.items()
                           if id(p) in rates or (name.rpartition(".")[2] == "momentum" and p.ndim == 0)}
        self.given = {name: float(p) for name, p in self.parameters.items()}
        self.divided = _divided(optimizer, self.state)

    def read(self, offset: int = 0) -> tuple[float, ...]:
        """Return the rates of the next update; with `offset` -1 those of the last one. NaN where there is none."""
        # They are float32, and given in their shortest form: 0.1, not 0.10000000149011612.
        return tuple(float(str(np.float32(_rate_at(rate, optimizer, offset)))) for optimizer, rate in self._rates)

    def next(self) -> Union[float, tuple[float, ...]]:
        """Return the rate of the next update; several in a tuple. Raise ValueError if it is unknown."""
        if not self._rates:
            raise ValueError(_UNKNOWN.format(self._name))
        rates = self.read()
        return rates if len(rates) > 1 else rates[0]

    def set(self, given: Any) -> None:
        """Set the rates: one number for all, or one for each. An error changes none of them."""
        before = np.ravel(self.next())
        fixed = next((rate for _, rate in self._rates if not isinstance(rate, Parameter)), None)
        if fixed is not None:
            kind = getattr(fixed, "cls_name", type(fixed).__name__).replace("_IteratorLearningRate", "list of rates")
            raise ValueError(_FIXED.format(self._name, kind, before[0]))
        values = [*given] if isinstance(given, (list, tuple)) else [given] * len(self._rates)
        if len(values) != len(self._rates):
            raise ValueError(f"learning_rate is {len(values)} numbers, expected one for each of the {len(self._rates)} "
                             f"rates of {self._name}, or one number for all")
        values = [number("learning_rate", v, lambda rate: 0 <= rate < inf, "a finite number >= 0") for v in values]
        for (_, rate), value in zip(self._rates, values):
            ops.assign(rate, Tensor(value, rate.dtype))

    def described(self) -> str:
        """Return the rates and the plain options of all groups as text, to compare ranks."""
        plain = [{name: value for name, value in given.items() if isinstance(value, (Real, str, tuple))}
                 for _, given in self._groups]
        return f"{self.given} {self.read()} {plain}"

    def require_unchanged(self) -> None:
        """Raise RuntimeError if a script has put something into `param_groups`."""
        for group, given in self._groups:
            for name, value in given.items():
                now = group.get(name)
                if now is not value and (isinstance(value, (Tensor, list)) or now != value):
                    raise RuntimeError(_CHANGED.format(name))

    def require_next(self) -> None:
        """Raise ValueError if a list has no rate for the next update."""
        if any(np.isnan(rate) for (_, cell), rate in zip(self._rates, self.read()) if isinstance(cell, nn.Cell)):
            raise ValueError("the optimizer's list of learning rates is used up, expected a rate for each update; "
                             "ms_accum.updates_of(accumulate_step, microbatches, epochs) counts them")


def _rates_in(optimizer: Any) -> list[Any]:
    """Return the rates of one optimizer in the order of its groups: Parameters, numbers or schedules."""
    if isinstance(optimizer, nn.LARS):
        return []  # those of the optimizer that it holds
    if groups := getattr(optimizer, "param_groups", None):
        return [group["lr"] for group in groups]
    rates = () if getattr(optimizer, "relative_step", False) else getattr(optimizer, "learning_rate", ())
    rates = rates if isinstance(rates, (list, tuple, nn.CellList)) else [rates]
    rates = [*{id(rate): rate for rate in rates}.values()]  # a group's rate is listed once for each of its parameters
    if getattr(optimizer, "is_group_params_ordered", False) and all(isinstance(rate, Parameter) for rate in rates):
        numbers = [_GROUP.search(rate.name) for rate in rates]  # of their groups; the common rate has none
        used = {int(found[1]) for found in numbers if found}
        common = next(i for i in range(len(rates) + 1) if i not in used)
        rates = [rate for _, _, rate in sorted(
            (int(found[1]) if found else common, i, rate) for i, (found, rate) in enumerate(zip(numbers, rates)))]
    return rates


def _rate_at(rate: Any, optimizer: Any, offset: int) -> float:
    if not isinstance(rate, nn.Cell):
        return float(rate)
    updates = int(optimizer.global_step) + offset
    listed = getattr(rate, "learning_rate", None)
    is_past = isinstance(listed, Parameter) and listed.ndim == 1 and updates >= listed.size
    return nan if updates < 0 or is_past else float(rate(Tensor([updates], ms.int32)).reshape(()))


def _divided(optimizer: Any, state: dict[str, Parameter]) -> dict[str, Parameter]:
    """Return the whole parameter of each state that has the shape of its slice, by name."""
    # The state's name ends in that of the parameter, or it is in a list that has one entry for each slice.
    slices, found = [p for p in optimizer.parameters if whole_of(p) is not p], {}
    for name, parameter in state.items():
        own = [p for p in slices if parameter.name.endswith(f".{whole_of(p).name}")]
        listed = re.search(r"\[(\d+)\]$", name)
        if listed is not None and not own:
            own = slices[int(listed[1]):][:1]
        whole = max(own, key=lambda p: len(whole_of(p).name), default=None)
        if whole is not None and tuple(whole.shape) == tuple(parameter.shape):
            found[name] = whole_of(whole)
    return found


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
        if parameter.dtype not in FLOATS:
            raise TypeError(f"{parameter.name} is a parameter of {parameter.dtype}, expected a float dtype; "
                            "leave it out of the optimizer")
    require_trainable(parameters)
    twice, times = Counter(p.name for p in parameters).most_common(1)[0]
    if times > 1:
        raise ValueError(f"optimizer holds two parameters called {twice}, expected each one once; "
                         "give it network.trainable_params()")
    for _, holder in (("", optimizer), *_inside(optimizer, set())):
        scale = getattr(holder, "loss_scale", 1)
        if isinstance(scale, Real) and scale != 1:
            raise ValueError(f"the optimizer has loss_scale={scale:g}, expected 1: it would divide gradients that were "
                             "not multiplied by it, or were already divided; leave loss_scale out of the optimizer and "
                             f"give loss_scaler=amp.StaticLossScaler({scale:g}) to make_train_step or TrainOneStepCell")
    return tuple(parameters)


@constexpr
def require_runnable(optimizer: Any, op_by_op: bool) -> None:
    """Raise ValueError for an optimizer that MindSpore 2.10 does not run, or runs wrongly without an error."""
    on_cpu, op_by_op = ms.get_context("device_target") == "CPU", op_by_op and ms.get_context("mode") == ms.PYNATIVE_MODE
    for kind in [type(holder) for _, holder in (("", optimizer), *_inside(optimizer, set()))]:
        compiled = [hasattr(getattr(base, "construct", None), "__wrapped__") for base in kind.__mro__]  # by `ms.jit`
        if on_cpu and kind.__module__.startswith("mindspore.mint.") and (op_by_op or kind.__name__.endswith("AdamW")):
            wrong = "of mint has no kernel on CPU (op by op, none has); give one of mindspore.nn or experimental.optim"
        elif op_by_op and any(compiled) and not compiled[0]:
            wrong = ("derives from one that compiles itself, so op by op its own construct runs twice in each update; "
                     "derive from nn.Optimizer, or from a Cell that holds an optimizer")
        else:
            continue
        raise ValueError(f"the optimizer {kind.__name__} {wrong}")


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
