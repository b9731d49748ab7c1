"""A batch: convert it (Tensor, tuple, dict, keyword arguments), find its samples, and differentiate its loss."""
from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Optional, Union

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops
from mindspore.dataset import GeneratorDataset
from mindspore.ops import constexpr

from ..arguments import LARGEST_INT32, whole_number
from ..mindspore_api import is_a
from ..tensors import FLOATS, as_weight

if TYPE_CHECKING:
    from ..tensors import Scalar

_UNBATCHED = ("the dataset yields samples of {} one by one, expected batches: a sample would be taken for a "
              "microbatch, and the length of its first axis for the number of samples; give e.g. dataset.batch(32), "
              "or, if each item is already a batch, a generator (for Model a GeneratorDataset)")


def as_arguments(batch: Any) -> tuple[tuple, dict[str, Any]]:
    """Return a batch that an iterable yielded as positional and keyword arguments; see `as_tensors`."""
    if isinstance(batch, Mapping):
        return (), dict(zip(batch, as_tensors(batch.values())))
    return as_tensors(batch if isinstance(batch, (tuple, list)) else (batch,)), {}


def as_tensors(values: Iterable) -> tuple:
    """Return the values of a batch. NumPy arrays are copied to Tensors, so that the caller may fill them again."""
    return tuple([Tensor(value) if isinstance(value, np.ndarray) and value.dtype.kind not in "OSU" else value
                  for value in values])


def require_batched(batches: Any) -> None:
    """Raise an error for a dict, and for a `mindspore.dataset`, or an iterator of one, without a batch operation."""
    if isinstance(batches, Mapping):
        raise TypeError("batches is a dict, expected an iterable of batches; for a single one call train_step(**batch)")
    dataset = batches.dataset if is_a(batches, "Iterator") else batches
    source = _source_of_samples(dataset) if is_a(dataset, "Dataset") else None
    if source is not None:
        raise ValueError(_UNBATCHED.format(type(source).__name__))


def _source_of_samples(dataset: Any) -> Any:
    """Return a MindSpore source that no batch operation follows, or None."""
    if is_a(dataset, "BatchDataset", "BucketBatchByLengthDataset", "PaddedBatchDataset"):
        return None
    if not dataset.children:
        # A subclass of GeneratorDataset outside MindSpore is a user's own, and may yield batches.
        own = type(dataset) is GeneratorDataset or not type(dataset).__module__.startswith("mindspore.")
        return dataset if is_a(dataset, "SourceDataset") and not own else None
    return next(filter(None, map(_source_of_samples, dataset.children)), None)


def named_values(function: Callable, named: Mapping[str, Any]) -> dict[str, Any]:
    """Return the named arguments for graphs, without None, in the order of the parameters: each order is compiled.

    Those for `**kwargs` come last, as given. Raise TypeError if the call would change without those that are None.
    """
    parameters = _parameters(function)
    for name, value in named.items():  # graph mode cannot pass None or str by name
        default = getattr(parameters.get(name), "default", None)
        if isinstance(value, str) or (value is None and default is not None):
            raise TypeError(f"{name} is {value!r}, expected a Tensor: a compiled step cannot get it by name; give the "
                            "parameter this default and leave it out, or bind it with functools.partial")
    names = dict.fromkeys((*(name for name in parameters if name in named), *named))
    return {name: named[name] for name in names if named[name] is not None}


def _parameters(function: Callable) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(function.construct if isinstance(function, nn.Cell) else function).parameters
    except (TypeError, ValueError):  # a builtin, or a compiled function
        return {"batch": inspect.Parameter("batch", inspect.Parameter.VAR_POSITIONAL),
                "named": inspect.Parameter("named", inspect.Parameter.VAR_KEYWORD)}


def columns_of(function: Callable, count: int, names: tuple[str, ...]) -> tuple[Union[str, int], ...]:
    """Return the names of `count` columns, of which the last were given by `names`; the place of one without a name."""
    placed = [p.name for p in _parameters(function).values() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    first = count - len(names)
    return (*placed[:first], *range(len(placed), first), *names)


def positions_of(cell: nn.Cell) -> tuple[str, int, int]:
    """Return the positional parameters of `construct` as text, their least number and their largest number."""
    parameters = _parameters(cell).values() if type(cell).__call__ is nn.Cell.__call__ else ()
    named = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    takes_all = not parameters or any(p.kind is p.VAR_POSITIONAL for p in parameters)
    return (", ".join(p.name for p in named), sum(p.default is p.empty for p in named),
            LARGEST_INT32 if takes_all else len(named))


def positional(name: str, function: Any, count: int = 0, names: tuple[str, ...] = ()) -> Any:
    """Wrap `function` so that graph mode can call it with `count` arguments by position, the last of them `names`.

    A `weight_fn` gets those of `names` that are in its signature. Raise TypeError if it does not take such a batch.
    """
    if function is None:
        return None
    taken = _taken(name, function, count - len(names), names) if count else ()
    if not (names or isinstance(function, partial)):
        return function
    arguments, fixed = (), {}
    if isinstance(function, partial):  # graph mode does not know what it returns
        arguments, fixed, function = function.args, function.keywords, function.func

    def call(*batch: Any) -> Any:
        first = len(batch) - len(names)
        keywords = {}
        for i, key in enumerate(names):
            if key in taken:
                keywords[key] = batch[first + i]
        return function(*arguments, *batch[:first], **fixed, **keywords)

    return call


def _taken(name: str, function: Callable, positions: int, names: tuple[str, ...]) -> tuple[str, ...]:
    """Return the `names` that are in the signature of `function`. Raise TypeError if the batch does not fit."""
    signature = inspect.Signature([*_parameters(function).values()])
    takes_all = any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())
    taken = tuple(n for n in names if takes_all or n in signature.parameters)
    try:
        signature.bind(*[None] * positions, **dict.fromkeys(taken if name == "weight_fn" else names))
    except TypeError as error:
        loss = _MISSING_LOSS["forward_fn"] if name == "forward_fn" and isinstance(function, nn.Cell) else ""
        given = ", ".join([*([f"{positions} by position"] if positions else []), *names])
        raise TypeError(f"{name}{signature} does not take the batch ({given}): {error}; give it parameters for "
                        f"the batch, or select columns first{loss}") from None
    return taken


# --- samples ----------------------------------------------------------------------------------------------------------

Cut = tuple[Optional[int], ...]  # the axis along which each argument is cut; None: it is passed whole to every piece


def layout(batch: tuple, batch_axis: int = 0, eager: bool = False) -> tuple[int, Cut]:
    """Return the number of samples in a batch, and for each argument the axis that counts them, or None."""
    ranks = tuple([_rank(argument) for argument in batch])
    if eager:  # then a batch may hold any object
        ranks = tuple([rank if isinstance(argument, Tensor) and argument.dtype != ms.string else None
                       for rank, argument in zip(ranks, batch)])
    place = place_of(ranks, batch_axis, tuple(map(str, map(type, batch))))
    axes = [axis_of(argument.ndim, batch_axis) if rank else None for rank, argument in zip(ranks, batch)]
    lengths = [None if axis is None else argument.shape[axis] for argument, axis in zip(batch, axes)]
    samples: Any = lengths[place]
    return samples, tuple([axis if length == samples else None for axis, length in zip(axes, lengths)])


def samples_in_graph(batch: tuple, batch_axis: int = 0) -> Scalar:
    """Return the number of samples in a graph: a float, or a float32 Tensor `()` if it is dynamic."""
    first = batch[_place(tuple([_rank(argument) for argument in batch]), batch_axis)]
    return as_weight(first.shape[axis_of(first.ndim, batch_axis)])


def _rank(argument: Any) -> Optional[int]:
    """Return the number of axes of a Tensor, -1 for what may hold some, or None for a plain value."""
    if isinstance(argument, Tensor):
        return argument.ndim
    return -1 if isinstance(argument, (tuple, list, dict)) else None


def place_of(ranks: tuple, batch_axis: int, kinds: tuple[str, ...] = ()) -> int:
    """Return the place of the first Tensor with axes. `ranks`: of arguments of these `kinds`, by `_rank`."""
    if -1 in ranks:  # graph mode would take the Tensors inside a tuple for constants, and compile again for each batch
        raise TypeError("the batch holds a tuple, list or dict, expected Tensors and plain values; give each Tensor as "
                        "an argument of its own (a dict as **batch)")
    place = next((place for place, rank in enumerate(ranks) if rank), None)
    if place is None:
        kinds = kinds or ("no Tensor",) * len(ranks)
        given = [kind if rank is None else "a Tensor of shape ()" for rank, kind in zip(ranks, kinds)]
        raise ValueError(f"the batch is {', '.join(given) or 'empty'}, expected at least one Tensor of MindSpore or "
                         f"NumPy array with axes; axis {batch_axis} of the first one is the batch")
    return place


_place = constexpr(place_of)  # in a graph


def checked_axis(batch_axis: object) -> int:
    """Return `batch_axis` as an int >= 0. Raise TypeError or ValueError if it is invalid."""
    return whole_number("batch_axis", batch_axis, "it is the axis that counts the samples", minimum=0)


def axis_of(axes: int, batch_axis: int) -> int:
    """Return the axis that counts the samples: `batch_axis`, or 0 if there are too few axes."""
    return batch_axis if batch_axis < axes else 0


def starts_of(samples: int, pieces: int) -> list[tuple[int, int]]:
    """Return the first sample and the number of samples of each piece; there may be fewer than `pieces`."""
    rows = max(-(-samples // pieces), 1)
    return [(start, min(rows, samples - start)) for start in range(0, samples, rows)]


def places_of(rows: int, start: int = 0) -> Tensor:
    """Return the places of `rows` samples from `start` on, for `select_rows`: int32 `(rows,)`."""
    return Tensor(np.arange(start, start + rows), ms.int32)  # in a graph, `ops.arange` takes 0.3 s to compile


def select_rows(rows: Tensor, cut: Cut, batch: tuple) -> tuple:
    """Return the arguments of one piece: samples `rows` (int Tensor) of those that are cut, the others whole."""
    inputs = ()  # type: tuple
    for argument, axis in zip(batch, cut):
        inputs = (*inputs, argument if axis is None else ops.gather(argument, rows, axis))
    return inputs


# --- what is differentiated -------------------------------------------------------------------------------------------

# What a function returns, by `has_weight` and `has_aux`.
RETURNS = {(False, False): "the loss alone", (True, False): "(loss, weight) because of has_weight=True",
           (False, True): "(loss, aux) because of has_aux=True; aux may be a tuple",
           (True, True): "(loss, weight, aux) because of has_weight=True and has_aux=True; aux may be a tuple"}
_ITSELF = ('; return the loss itself, without float() or .item(): of a dict its entry, outputs["loss"], and of a model '
           "model(..., return_dict=False)[0]")
NETWORK = "the network"  # the name of a cell's function in messages
_WITH_LOSS = "; if it computes no loss, give TrainOneStepCell(nn.WithLossCell(network, loss_fn), ...)"
_MISSING_LOSS = {NETWORK: _WITH_LOSS, "forward_fn": "; if it computes no loss, give nn.WithLossCell(network, loss_fn)"}


def parted(result: Any, has_weight: bool, has_aux: bool, expected: str, name: str = "forward_fn") -> tuple:
    """Return the result of `forward_fn` as `(loss, weight, aux)`; what it does not return is ()."""
    if not (has_weight or has_aux):
        return result, (), ()
    # In separate branches: graph mode would unpack a result that is not a tuple before it tests the condition.
    if isinstance(result, tuple):
        require_parts(len(result), 1 + has_weight + has_aux, name, expected)
        return result[0], result[1] if has_weight else (), result[-1] if has_aux else ()
    raise_wrong_result(result, result is None, name, expected)
    return result, (), ()


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
def require_parts(length: int, count: int, name: str, expected: str) -> bool:
    """Raise TypeError unless there are `count` values: graph mode would drop one more without an error."""
    require_readable(length, name, expected)
    if length != count:
        raise TypeError(f"{name} returned {length} values, expected {expected}")
    return True


def require_readable(fact: Any, name: str, expected: str) -> None:
    """Raise TypeError for a Python object that a graph cannot read: MindSpore gives its shape or length as a Tensor."""
    if isinstance(fact, Tensor):
        raise TypeError(f"{name} returned a Python object that a graph cannot read, expected {expected}{_ITSELF}")


@constexpr
def raise_wrong_result(returned: Any, is_none: bool, name: str, expected: str) -> None:
    """Raise TypeError for a result that is not a Tensor or not a tuple: a number that a graph computes is None here."""
    got, remedy = "a number" if returned is None else f"a value of type {type(returned).__name__}", _ITSELF
    if is_none:
        got, remedy = "None", "; is its `return` missing?"
    elif isinstance(returned, tuple):
        got, remedy = f"{len(returned)} values", _WITH_LOSS if name == NETWORK else (
            "; give has_aux=True if it returns (loss, aux), has_weight=True if it returns (loss, weight)")
    raise TypeError(f"{name} returned {got}, expected {expected}{remedy}")


def checked_aux(aux: Any, rows: int, batch_axis: int) -> Any:
    """Return the aux of a piece. Raise TypeError or ValueError if it cannot be joined to that of other pieces."""
    shapes = ()  # type: tuple
    for value in aux if isinstance(aux, tuple) else (aux,):
        shapes = (*shapes, value.shape if isinstance(value, Tensor) else None)
    require_aux(shapes, rows, batch_axis)
    return aux


@constexpr
def require_aux(shapes: tuple, rows: int, batch_axis: int) -> bool:
    """Raise an error for aux that is neither scalars nor values per sample."""
    remedy = "return Tensors of shape () or with one row for each sample, or give pieces=1"
    if not shapes or None in shapes:
        raise TypeError(f"forward_fn returned aux that is neither a Tensor nor a tuple of Tensors; {remedy}")
    for shape in shapes:
        if len(shape) and shape[axis_of(len(shape), batch_axis)] != rows:
            raise ValueError(f"forward_fn returned aux of shape {tuple(shape)} for a piece of {rows} samples; {remedy}")
    return True
