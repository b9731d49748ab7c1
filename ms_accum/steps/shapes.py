"""The shapes of batches: those that a script declares as dynamic, and a hint if many are compiled one by one."""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Optional
from warnings import warn

from mindspore import Tensor

from ..mindspore_api import dynamic_inputs, with_length
from .batch import columns_of

if TYPE_CHECKING:
    from .batch import Cut

_MANY = 8
_HINT = (f"graphs are compiled for {_MANY} shapes of batches by now, and for each further shape; pad batches to a few "
         "lengths (with a weight_fn that counts tokens, padding changes nothing), or let one graph take all lengths: "
         "declare each that changes, by mindspore.enable_dynamic or set_inputs of a Cell; the guide's page on language "
         "models shows both")


@dataclass(frozen=True)
class Inputs:
    """Hold what is declared of the columns of a batch, and their names (or places)."""

    declared: tuple[Optional[Tensor], ...]  # Tensors with dynamic shapes; None where nothing is declared
    columns: tuple

    def __call__(self, arguments: tuple) -> tuple:
        """Return what a graph is compiled for, given its arguments, of which the last are a batch that has to fit."""
        first, batch = len(arguments) - len(self.declared), []
        for value, declared, column in zip(arguments[first:], self.declared, self.columns):
            batch.append(value if declared is None else declared)
            if declared is None:
                continue
            shape, is_typed = declared.shape, isinstance(value, Tensor) and value.dtype == declared.dtype
            if not is_typed or len(shape) != value.ndim or any(n not in (-1, m) for n, m in zip(shape, value.shape)):
                got = type(value).__name__
                if isinstance(value, Tensor):
                    got = f"{str(value.dtype).lower()} {tuple(value.shape)}"
                raise (ValueError if is_typed else TypeError)(
                    f"column {column} of the batch is {got}, expected the declared {str(declared.dtype).lower()} of "
                    f"shape ({', '.join('None' if n < 0 else str(n) for n in shape)}); declare the dtype and lengths "
                    "that batches have, None for each length that changes, or leave the column out")
        return (*arguments[:first], *batch)


class Shapes:
    """Take the shapes that `function` declares as dynamic, by `enable_dynamic` or `set_inputs`; count the others."""

    # `takes_any`: no graph has to know how many samples there are.
    def __init__(self, function: Callable, takes_any: bool) -> None:
        self.function, self.takes_any = function, takes_any
        self._compiled: set[object] = set()
        self._inputs: dict[tuple, Inputs] = {}

    def declared(self, columns: int, names: tuple[str, ...] = ()) -> Inputs:
        """Return what is declared of a batch of so many columns, the last of which have these names."""
        if (columns, names) not in self._inputs:
            given = {column: value for column, value in dynamic_inputs(self.function).items()
                     if isinstance(value, Tensor) and any(length < 0 for length in value.shape)}
            placed = columns_of(self.function, columns, names)
            self._inputs[columns, names] = Inputs(tuple([given.get(column) for column in placed]), placed)
        return self._inputs[columns, names]

    def key_of(self, samples: int, cut: Cut, names: tuple[str, ...]) -> tuple:
        """Return the key of the graphs for batches of this layout: one for all numbers of samples, if that is open."""
        if self.takes_any and samples:
            place = next(place for place, axis in enumerate(cut) if axis is not None)  # what gives the samples
            given = self.declared(len(cut), names).declared[place]
            if given is not None and given.shape[cut[place]] < 0:
                return True, len(cut), names
        return samples, cut, names

    def inputs_of(self, samples: int, cut: Cut, names: tuple[str, ...]) -> Optional[Inputs]:
        """Return what is declared of batches of this layout, for its graphs; None if nothing is."""
        inputs = self.declared(len(cut), names)
        if inputs.declared.count(None) == len(cut):
            return None
        if self.takes_any:
            return inputs
        # The number of samples is known in them.
        return Inputs(tuple([
            with_length(given, axis, samples) if given is not None and axis is not None and given.shape[axis] < 0
            else given for given, axis in zip(inputs.declared, cut)]), inputs.columns)

    def note(self, batch: tuple, names: tuple[str, ...]) -> None:
        """Note that graphs are compiled for a batch. Warn when there are many."""
        declared = self.declared(len(batch), names).declared
        self._compiled.add((names, *[getattr(value, "shape", None) for value, given in zip(batch, declared)
                                     if given is None]))
        if len(self._compiled) == _MANY:
            warn(_HINT, UserWarning, stacklevel=2)
