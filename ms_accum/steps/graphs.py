"""Compile functions as graphs, also after an error: value_and_grad of a piece, and checks of what functions return."""
from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import is_dataclass
from numbers import Number
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, Optional

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops
from mindspore.ops import PrimitiveWithInfer, constexpr

from ..tensors import FLOATS, after, as_tensor, as_weight
from .errors import explain

if TYPE_CHECKING:
    from ..core.way import Way
    from ..tensors import Gradients, Scalar

_PAIR = "(loss, aux) because of has_aux=True; aux may be a tuple"
_OF_A_MODEL = ("; take the loss from a tuple, in a function or in the construct of a loss cell: "
               "return model(..., return_dict=False)[0]")
_A_TENSOR = "; return the loss itself, without float(), .item() or .asnumpy()"
NETWORK = "the network"  # the name of a cell's function in messages
_WITH_LOSS = "; if it computes no loss, give TrainOneStepCell(nn.WithLossCell(network, loss_fn), ...)"
_MISSING_LOSS = {NETWORK: _WITH_LOSS, "forward_fn": "; if it computes no loss, give nn.WithLossCell(network, loss_fn)"}


class Graph(nn.Cell):
    """Wrap a function as a Cell. MindSpore warns if a second train step compiles a jitted function, but not a Cell."""

    def __init__(self, function: Callable) -> None:
        super().__init__(auto_prefix=False)
        self.function = function
        # In MindSpore's semi-auto parallel mode, a graph without a forward pass cannot be compiled, or crashes.
        self.add_flags(skip_auto_parallel_compile=True)

    def construct(self, *arguments: Any) -> Any:
        """Call the function."""
        return self.function(*arguments)


def compiled(function: Callable, **options: str) -> Callable:
    """Return `function` as a graph of its own, in graph mode and PyNative. `options` of `ms.jit`."""
    return ms.jit(Graph(function), **options)


def straight(function: Callable, way: Way) -> Callable:
    """Return `function` as a graph without control flow; on CPU, with a branch that is never taken.

    On CPU, MindSpore 2.10 runs the kernels of a graph one after the other if there are at most 100 kernels and no
    branch, and the machine has few cores (`GraphScheduler::SetActorExecutionStrategy`; no setting changes that). On 2
    cores, forward and backward of an MLP then take 1.2 times as long. The branch is on `mini_step`, which is never
    negative.
    """
    if not needs_branch():
        return compiled(function, **way.exchange.jit_options)
    mini_step = way.counters.mini_step

    def with_branch(*arguments: Any) -> Any:
        result = function(*arguments)
        if mini_step < 0:
            ops.assign(mini_step, 0)
        return result

    return compiled(with_branch)


@contextmanager
def explaining_errors(optimizer: Callable, forget_graphs: Callable[[], object]) -> Iterator[None]:
    """After an error in the block, forget all graphs, and raise an error that names the cause; see `explain`."""
    try:
        yield
    except Exception as error:
        explain(error, optimizer, forget_graphs)
        raise


def needs_branch() -> bool:
    """Return whether `straight` adds the branch."""
    return ms.get_context("device_target") == "CPU"


class _OutsideGraphs(PrimitiveWithInfer):
    """Raise an error while MindSpore compiles a call, and do nothing in Python."""

    def __init__(self) -> None:
        super().__init__("require_python")
        self.set_const_prim(True)
        self.add_prim_attr("constexpr_prim", True)

    def __infer__(self, called: dict[str, Any]) -> NoReturn:
        raise RuntimeError(f"{called['value']} was called inside a compiled function, expected a call from Python: it "
                           "compiles its own graphs, and closes windows between them; leave out the @ms.jit around it "
                           "(or the Cell in graph mode), or compute gradients there and give them to an Accumulator")

    def __call__(self, called: str) -> None:
        """Do nothing."""


require_python = _OutsideGraphs()  # `require_python(called)` raises RuntimeError while MindSpore compiles it


class Functions(NamedTuple):
    """Hold what a train step does with a piece; see `make_train_step`. Functions take arguments by position."""

    forward_fn: Callable
    weight_fn: Optional[Callable]
    has_aux: bool = False
    batch_axis: int = 0
    reduction: str = "mean"
    name: str = "forward_fn"  # its name in messages


def make_gradients_of(functions: Functions, way: Way, begin: bool = True) -> Callable:
    """Return `(rows, *piece) -> (loss, aux, gradients, weight, factor)`, uncompiled.

    The loss is the mean over the piece. The gradients are those of the value that `forward_fn` returned, times the loss
    scale. Weight and factor are for `Way.add`. `begin` says whether to mark in the journal that a piece begins, before
    its gradients are computed. If a stage looks at gradients, a sum is divided by its weight before the backward pass,
    because stages expect the gradients of a mean.
    """
    (forward_fn, weight_fn, has_aux, _, reduction, name) = functions  # a graph cannot read a named tuple
    divides = reduction == "sum" and way.looks_at_gradients
    is_sum = reduction == "sum" and not divides

    def differentiated(weight: Tensor, *piece: Any) -> tuple:
        returned, aux = parted(forward_fn(*piece), has_aux)
        loss = checked_loss(returned, name)
        total = loss.astype(ms.float32) / divisor(weight) if divides else loss
        return (way.begin(total) if begin else way.scaled(total)), loss, aux

    grad_fn = ms.value_and_grad(differentiated, None, way.weights, has_aux=True)

    def gradients_of(rows: int, *piece: Any) -> tuple[Tensor, Any, Gradients, Scalar, Optional[float]]:
        weight = weight_of(weight_fn, rows, piece)
        if isinstance(weight, Tensor):
            # The weight comes first: otherwise all gradients would wait for it, and be in memory together.
            piece = tuple([after(weight, value) if isinstance(value, Tensor) else value for value in piece])
        (scaled_loss, loss, aux), gradients = grad_fn(as_tensor(weight), *piece)
        # `depend` uses what nobody needs, or MindSpore warns of "side effect nodes eliminated by mistake".
        loss = ops.depend(loss, scaled_loss).astype(ms.float32)
        loss = loss / divisor(as_tensor(weight)) if reduction == "sum" else loss
        return mean_loss(loss, weight, is_sum), aux, gradients, weight, (1.0 if is_sum else None)

    return gradients_of


def weight_of(weight_fn: Optional[Callable], rows: int, piece: tuple) -> Scalar:
    """Return the weight of a piece: the result of `weight_fn`, or its number of samples."""
    if weight_fn is None:
        return float(rows)
    weight = weight_fn(*piece)
    require_one_weight(len(weight) if isinstance(weight, (tuple, list)) else None)
    return as_weight(weight)


def mean_loss(loss: Tensor, weight: Scalar, is_added: bool) -> Tensor:
    """Return the mean loss to report: 0 for a weight of 0, and NaN for a weight that is NaN or infinite.

    `is_added`: its gradient was added without the weight; then a loss that is not 0 is reported also for a weight of 0.
    """
    if is_added:
        return loss + weight * 0.0
    if isinstance(weight, Tensor):
        return ops.where(weight == 0, Tensor(0.0, ms.float32), loss) + weight * 0.0
    return loss if weight else ops.depend(Tensor(0.0, ms.float32), loss)


def divisor(weight: Tensor) -> Tensor:
    """Return the divisor of a sum with this weight: 1 for a weight of 0, so that 0/0 is 0."""
    return ops.where(weight == 0, Tensor(1.0, ms.float32), weight)


def parted(result: Any, has_aux: bool) -> tuple:
    """Return the result of `forward_fn` as `(loss, aux)`; aux is () without `has_aux`."""
    if not has_aux:
        return result, ()
    # In separate branches: graph mode would unpack a result that is not a tuple before it tests the condition.
    if isinstance(result, tuple):
        require_aux(len(result))
        return result[0], result[1]
    raise_wrong_result(result, result is None, "forward_fn", _PAIR)
    return result, ()


def checked_loss(loss: Any, name: str = "forward_fn") -> Tensor:
    """Return the loss. Raise TypeError or ValueError unless it is a float scalar."""
    if isinstance(loss, Tensor):
        require_loss(loss.shape, loss.dtype, name)
    else:
        raise_wrong_result(loss, loss is None, name, "the loss alone")
    return loss


@constexpr
def require_loss(shape: tuple, dtype: ms.Type, name: str) -> bool:
    """Raise an error unless the loss is a float scalar: value_and_grad would differentiate a sum or a cast of it."""
    require_readable(shape, name, "the loss alone")
    if tuple(shape) != ():
        raise ValueError(f"{name} returned a loss of shape {tuple(shape)}, expected shape (); return the mean over the "
                         f"samples{_MISSING_LOSS.get(name, '')}")
    if dtype not in FLOATS:
        raise TypeError(f"{name} returned a loss of {dtype}, expected a float dtype; do not cast the network's loss")
    return True


@constexpr
def require_aux(length: int) -> bool:
    """Raise TypeError unless there are two values: graph mode would drop a third value without an error."""
    require_readable(length, "forward_fn", _PAIR)
    if length != 2:
        raise TypeError(f"forward_fn returned {length} values, expected {_PAIR}")
    return True


def require_readable(fact: Any, name: str, expected: str) -> None:
    """Raise TypeError for a Python object that a graph cannot read: MindSpore gives its shape or length as a Tensor."""
    if isinstance(fact, Tensor):
        raise TypeError(f"{name} returned a Python object that a graph cannot read, expected {expected}{_A_TENSOR}; "
                        f"for a ModelOutput or a dataclass{_OF_A_MODEL.replace(';', ',', 1)}")


@constexpr
def raise_wrong_result(returned: Any, is_none: bool, name: str, expected: str) -> None:
    """Raise TypeError for a result that is not a Tensor or not a tuple, and say what it is.

    `is_none`: whether it is None; a number that is computed in a graph is None here, too.
    """
    kind, remedy = type(returned).__name__, ""
    got = "None" if is_none else "a number" if returned is None else f"a value of type {kind}"
    if isinstance(returned, tuple):
        got, remedy = f"{len(returned)} values", _WITH_LOSS
        if name != NETWORK:
            remedy = "; give has_aux=True if it returns (loss, aux), losses=2 if it returns two losses"
    elif type(returned) is dict:
        remedy = '; return its entry for the loss, e.g. outputs["loss"]'
    elif isinstance(returned, Mapping) or is_dataclass(returned):
        remedy = _OF_A_MODEL
    elif not is_none and (returned is None or isinstance(returned, (Number, np.ndarray))):
        remedy = _A_TENSOR
    raise TypeError(f"{name} returned {got}, expected {expected}{remedy if name in ('forward_fn', NETWORK) else ''}")


@constexpr
def require_one_weight(length: Optional[int]) -> bool:
    """Raise ValueError for a tuple of weights."""
    if length is not None:
        raise ValueError(f"weight_fn returned a tuple of {length}, expected one number or Tensor; give losses={length} "
                         f"to make_train_step if forward_fn returns {length} losses, each with a weight of its own")
    return True
