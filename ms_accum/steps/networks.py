"""The networks that a step uses: their mode in training and evaluation, and the state that files and checks need."""
from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any
from warnings import warn

from mindspore import Parameter, nn

_EVALUATING = ("{} is in evaluation mode, so {} computes as in evaluation: no Dropout, fixed statistics of "
               "BatchNorm; call set_train() on the network before you train it. If you want evaluation mode in this "
               "layer, call set_train() on the network, then set_train(False) on the layer")
_UNKNOWN = ("no network was found in {}, so it cannot be set to evaluation mode; give it as network= (a Cell or a "
            "tuple of Cells)")
_FOREIGN = ("the optimizer updates {}, expected parameters of a network that the step uses (found: {}): all "
            "gradients would be 0; build the optimizer from the parameters of that network, or give its network as network=")
_DEPENDENT = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm, nn.Dropout, nn.Dropout1d, nn.Dropout2d,
              nn.Dropout3d)


class Networks:
    """Find and hold the networks of a step.

    Args:
        given: Cells that the user named; if there is none, those that functions name directly are taken.
        functions: A Cell, or functions: their closure, globals, defaults and own object are searched.

    Attributes:
        cells: The networks.
        layers: Their layers that depend on the mode: BatchNorm and Dropout.
    """

    def __init__(self, given: Sequence[nn.Cell], functions: Sequence[Callable]) -> None:
        found = given or [cell for function in functions for cell in _named_by(function)]
        self.cells = tuple({id(cell): cell for cell in found}.values())
        self.layers = [layer for cell in self.cells for _, layer in cell.cells_and_names()
                       if isinstance(layer, _DEPENDENT)]

    @property
    def flags(self) -> tuple[bool, ...]:
        """Return the mode of each layer that depends on it."""
        return tuple([layer.training for layer in self.layers])

    @property
    def parameters(self) -> dict[int, Parameter]:
        """Return all Parameters, by their id."""
        return {id(p): p for cell in self.cells for _, p in cell.parameters_and_names()}

    def require_trained(self, parameters: Sequence[Parameter]) -> None:
        """Raise ValueError if networks were found, and none of them holds any of the trained parameters."""
        known = self.parameters
        if known and not any(id(p) in known for p in parameters):
            names = ", ".join(type(cell).__name__ for cell in self.cells)
            raise ValueError(_FOREIGN.format(parameters[0].name, names))

    def warn_if_evaluating(self) -> None:
        """Warn if all layers that depend on the mode are in evaluation mode, and so is their network."""
        if self.layers and not any(self.flags) and not any(cell.training for cell in self.cells):
            warn(_EVALUATING.format(type(self.cells[0]).__name__, type(self.layers[0]).__name__), UserWarning,
                 stacklevel=2)

    @contextmanager
    def evaluating(self, name: str) -> Iterator[None]:
        """Set all networks to evaluation mode, and each layer back to its own. Raise ValueError if there is none."""
        if not self.cells:
            raise ValueError(_UNKNOWN.format(name))
        before = [(layer, layer.training) for cell in self.cells for _, layer in cell.cells_and_names()]
        try:
            for cell in self.cells:
                cell.set_train(False)
            yield
        finally:
            for layer, mode in before:  # each one alone: `set_train` sets the layers in it, too
                layer.add_flags(training=mode)


def _named_by(function: Any) -> Iterator[nn.Cell]:
    """Yield the Cells that a function is, or names: in its closure, globals, defaults, or as `self` or an argument."""
    if isinstance(function, partial):
        used = [*function.args, *function.keywords.values()]
        yield from _named_by(function.func)
    else:
        function = getattr(function, "__wrapped__", function)
        used = [function, getattr(function, "__self__", None)]
        function = getattr(function, "__func__", function)
        code, names = getattr(function, "__code__", None), getattr(function, "__globals__", {})
        used += [names[name] for name in (code.co_names if code else ()) if name in names]
        used += getattr(function, "__defaults__", None) or ()
        for cell in getattr(function, "__closure__", None) or ():
            try:
                used.append(cell.cell_contents)
            except ValueError:  # a name that has no value yet
                pass
    yield from (each for each in used if isinstance(each, nn.Cell) and not isinstance(each, nn.Optimizer))
