"""Convert batches (Tensor, tuple, dict, keyword arguments), and call functions with them."""
from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, Optional, overload

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn
from mindspore.dataset import GeneratorDataset
from mindspore.dataset.engine.datasets import (
    BatchDataset,
    BucketBatchByLengthDataset,
    Dataset,
    PaddedBatchDataset,
    SourceDataset,
)
from mindspore.dataset.engine.iterators import Iterator

from ..arguments import LARGEST_INT32

_BATCHED = BatchDataset, BucketBatchByLengthDataset, PaddedBatchDataset
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
    return tuple(map(_as_tensor, values))


def copied(value: Any) -> Any:
    """Return a copy of a Tensor, so that the caller may fill it again, and any other value unchanged.

    On CPU, `Tensor.copy` takes 5 to 20 times as long as NumPy (2.10), and `copy.deepcopy` shares the memory.
    """
    if not isinstance(value, Tensor):
        return value
    on_host = ms.get_context("device_target") == "CPU" and value.dtype != ms.bfloat16
    return Tensor(value.asnumpy()) if on_host else value.copy()


def require_batched(batches: Any) -> None:
    """Raise ValueError for a `mindspore.dataset`, or an iterator of one, without a batch operation.

    A `GeneratorDataset` may yield batches, and raises no error. A single batch, given as a dict, raises TypeError.
    """
    if isinstance(batches, Mapping):
        raise TypeError("batches is a dict, expected an iterable of batches; for a single one call train_step(**batch)")
    dataset = batches.dataset if isinstance(batches, Iterator) else batches
    source = _source_of_samples(dataset) if isinstance(dataset, Dataset) else None
    if source is not None:
        raise ValueError(_UNBATCHED.format(type(source).__name__))


def _source_of_samples(dataset: Dataset) -> Optional[Dataset]:
    """Return a MindSpore source that no batch operation follows, or None."""
    if isinstance(dataset, _BATCHED):
        return None
    if not dataset.children:
        # A subclass of GeneratorDataset outside MindSpore is a user's own, and may yield batches.
        own = type(dataset) is GeneratorDataset or not type(dataset).__module__.startswith("mindspore.")
        return dataset if isinstance(dataset, SourceDataset) and not own else None
    return next(filter(None, map(_source_of_samples, dataset.children)), None)


def _as_tensor(value: Any) -> Any:
    return Tensor(value) if isinstance(value, np.ndarray) else value


def named_values(function: Callable, named: Mapping[str, Any]) -> dict[str, Any]:
    """Return the named arguments, without those that are None: graph mode cannot pass None by name.

    Raises:
        TypeError: If the call would change without the None, or an argument is a str.
    """
    for name, value in named.items():
        if value is None and getattr(_parameters(function).get(name), "default", None) is not None:
            raise TypeError(f"{name} is None, expected a Tensor: a compiled step cannot get None by name; give the "
                            f"parameter {name} the default None")
        if isinstance(value, str):
            raise TypeError(f"{name} is a str, expected a Tensor: a compiled step cannot get a str by name; leave it "
                            "out, or bind it with functools.partial")
    return {name: value for name, value in named.items() if value is not None}


def ordered(function: Callable, names: Iterable[str]) -> tuple[str, ...]:
    """Return names in the order of the function's parameters; those for its `**kwargs` come last, as given."""
    order = list(_parameters(function))
    return tuple(sorted(names, key=lambda name: order.index(name) if name in order else len(order)))


def _parameters(function: Callable) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(function.construct if isinstance(function, nn.Cell) else function).parameters
    except (TypeError, ValueError):  # a builtin, or a compiled function
        return {"batch": inspect.Parameter("batch", inspect.Parameter.VAR_POSITIONAL),
                "named": inspect.Parameter("named", inspect.Parameter.VAR_KEYWORD)}


def positions_of(cell: nn.Cell) -> tuple[str, int, int]:
    """Return the positional parameters of `construct` as text, their least number and their largest number."""
    parameters = _parameters(cell).values() if type(cell).__call__ is nn.Cell.__call__ else ()
    named = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    takes_all = not parameters or any(p.kind is p.VAR_POSITIONAL for p in parameters)
    return (", ".join(p.name for p in named), sum(p.default is p.empty for p in named),
            LARGEST_INT32 if takes_all else len(named))


@overload
def positional(name: str, function: None, count: int = 0, names: tuple[str, ...] = ()) -> None: ...


@overload
def positional(name: str, function: Callable, count: int = 0, names: tuple[str, ...] = ()) -> Callable: ...


def positional(
    name: str,
    function: Optional[Callable],
    count: int = 0,
    names: tuple[str, ...] = (),
) -> Optional[Callable]:
    """Wrap `function` so that graph mode can call it with the whole batch by position.

    It also unpacks a `functools.partial`: graph mode does not know what a partial returns.

    Args:
        name: Name of `function` in errors.
        function: A function, Cell or `functools.partial`. It gets the arguments of `names` that are in its signature,
            or all if it has `**kwargs`. None is returned unchanged.
        count: Number of arguments in the batch.
        names: Names of the last arguments, which were given by name.

    Raises:
        TypeError: If `count` is given, and `function` cannot be called with such a batch.
    """
    if function is None:
        return None
    taken = _taken(name, function, count - len(names), names) if count else ()
    if not (names or isinstance(function, partial)):
        return function
    arguments, fixed = (), {}
    if isinstance(function, partial):
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
    signature = inspect.Signature(list(_parameters(function).values()))
    parameters = signature.parameters
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    taken = tuple(n for n in names if takes_all or n in parameters)
    try:
        signature.bind(*[None] * positions, **dict.fromkeys(taken))
        if name != "weight_fn" and taken != names:
            raise TypeError(f"got an unexpected argument {next(n for n in names if n not in taken)!r}")
    except TypeError as error:
        given = ", ".join([*([f"{positions} by position"] if positions else []), *names])
        raise TypeError(f"{name}{signature} does not take the batch ({given}): {error}; give it parameters for "
                        "the batch, or select columns first") from None
    return taken
