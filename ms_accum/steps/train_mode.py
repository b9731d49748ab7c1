"""The networks of a step, given or named by its functions: their mode, and whether they are the trained ones."""
from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from inspect import unwrap
from types import CellType
from typing import Any, Optional, Union
from warnings import warn

import numpy as np
from mindspore import Parameter, nn

from ..arguments import instance_of
from ..tensors import as_array

_EVALUATING = ("{} is in evaluation mode, so {} computes as in evaluation: no Dropout, fixed statistics of "
               "BatchNorm; call set_train() on the network before you train it. If you want evaluation mode in this "
               "layer, call set_train() on the network, then set_train(False) on the layer")
_UNSEEN = ("no network that holds {} was found in what {} names, so evaluate cannot set its evaluation mode; give the "
           "network by network= to the function that builds the step")
_FOREIGN = ("the optimizer updates {} and others, expected parameters of a network that {} names (found: {}): all "
            "gradients would be 0; build the optimizer from the parameters of that network. If the function uses the "
            "optimizer's network without naming it, give it by network=")
_SAME_NAME = ("the optimizer updates a Parameter called {}, but the network has a different Parameter with this name; "
              "if the network was built again (e.g. in a notebook), build the optimizer and the train step again, too; "
              "if there are two networks, give their parameters different names with Cell.update_parameters_name")
_BY_CLASS = ("{} has class weights, so its mean is over their sum, but batches count by their numbers of samples: "
             "several batches (windows, evaluate) are averaged wrongly; give a weight_fn that returns "
             "weight[label].sum()")
_LAYERS = ("Dropout", "BatchNorm", "SyncBatchNorm")  # names of classes, in `mindspore.nn` and `mindspore.mint`


class TrainMode:
    """Watch the mode of all layers of a step's networks: those given, or those that its functions name.

    Raise ValueError if a network holds another Parameter with the name of a trained one, or if the networks have
    trainable parameters, but none that is trained: all gradients would be 0.
    """

    def __init__(self, functions: Sequence[Callable], parameters: Sequence[Parameter],
                 networks: Sequence[nn.Cell] = ()) -> None:
        self._networks = networks or networks_of(functions)
        require_same_parameters(self._networks, parameters)
        self._trained = {id(p) for p in parameters}
        self._name = getattr(functions[0], "__name__", "forward_fn")
        held = {id(p) for network in self._networks for p in network.get_parameters()}
        unseen = [p.name for p in parameters if id(p) not in held]
        own = dict.fromkeys(type(network).__name__ for network in self._networks if network.trainable_params())
        if own and len(unseen) == len(parameters):
            raise ValueError(_FOREIGN.format(unseen[0], self._name, ", ".join(own)))
        self._unseen = None if networks else next(iter(unseen), None)
        self._seen: set[tuple[bool, ...]] = set()
        self._layers = self._all_layers()
        self._dependent = [layer for layer in self._layers if _depends_on_mode(layer)]

    @property
    def flags(self) -> tuple[bool, ...]:
        """Return the mode of each layer of Dropout or BatchNorm: if one changes, graphs must be compiled again."""
        return tuple([layer.training for layer in self._dependent])

    def _all_layers(self) -> list[nn.Cell]:
        return [layer for network in self._networks for _, layer in network.cells_and_names()]

    def warn_of_class_weights(self) -> None:
        """Warn if a mean by class weights is found, in a step whose batches are weighted by numbers of samples."""
        for layer in self._layers:
            if isinstance(layer, (nn.CrossEntropyLoss, nn.NLLLoss)) and layer.reduction == "mean" and (
                    layer.weight is not None and np.ptp(as_array(layer.weight)) > 0):
                warn(_BY_CLASS.format(type(layer).__name__), UserWarning, stacklevel=2)
                return

    def warn_if_evaluating(self, mode: tuple[bool, ...]) -> None:
        """Warn, once for each mode (see `flags`), if a trained network is in evaluation mode; not for single layers."""
        if mode in self._seen:
            return
        self._seen.add(mode)
        for network in self._networks:
            name, layer = evaluating(network, self._trained) or ("", None)
            if layer is not None and any(id(p) in self._trained for p in network.get_parameters()):
                place = f"its layer {name} ({type(layer).__name__})" if name else "it"
                warn(_EVALUATING.format(type(network).__name__, place), UserWarning, stacklevel=2)
                return

    @contextmanager
    def evaluation(self) -> Iterator[None]:
        """Set all layers to evaluation mode in the block. Raise ValueError if a network was not found."""
        if self._unseen is not None:
            raise ValueError(_UNSEEN.format(self._unseen, self._name))
        # `set_train`, and not flags alone: a `construct` under ms.jit has a graph for what it last set. Op by op, a
        # layer may have been replaced since the first call.
        modes = [network.training for network in self._networks]
        layers = [(layer, layer.training) for layer in self._all_layers()]
        try:
            for network in self._networks:
                network.set_train(False)
            yield
        finally:
            for network, mode in zip(self._networks, modes):
                network.set_train(mode)
            for layer, mode in layers:  # each one alone: `set_train` sets the layers in it, too
                layer.add_flags(training=mode)


def checked_networks(network: Union[nn.Cell, tuple[nn.Cell, ...], None]) -> tuple[nn.Cell, ...]:
    """Return the argument `network` as a tuple, or raise TypeError."""
    if network is None:
        return ()
    return tuple(instance_of("network", each, nn.Cell, "a Cell or a tuple of Cells", "give the network that is trained")
                 for each in (network if isinstance(network, tuple) else (network,)))


def networks_of(functions: Iterable[Callable]) -> list[nn.Cell]:
    """Return the Cells that functions are, or name: in a closure, a global, a default, `self` or a `partial`."""
    found = {id(value): value for function in functions for value in _named_by(function) if isinstance(value, nn.Cell)}
    return [*found.values()]


def _named_by(function: Any) -> list[object]:
    """Return the values that a function names; none if it is not a Python function."""
    if isinstance(function, nn.Cell):
        return [function]
    if isinstance(function, partial):
        return [*function.args, *function.keywords.values(), *_named_by(function.func)]
    method = function if hasattr(function, "__code__") else function.__call__
    owner, plain = getattr(method, "__self__", None), unwrap(method)
    if not hasattr(plain, "__code__"):
        return []
    closure = [cell.cell_contents for cell in plain.__closure__ or () if cell != CellType()]  # which is not set yet
    # `co_names` has names of globals and of attributes: `self.network` is not a global `network`.
    named = {**plain.__globals__, **getattr(owner, "__dict__", {})}
    values = [named[name] for name in plain.__code__.co_names if name in named]
    return [owner, *closure, *(plain.__defaults__ or ()), *(plain.__kwdefaults__ or {}).values(), *values]


def require_same_parameters(networks: Iterable[nn.Cell], parameters: Iterable[Parameter]) -> None:
    """Raise ValueError if another network is trained that has the same names: this one would get no gradient."""
    trained = {p.name: p for p in parameters}
    for parameter in (p for network in networks for p in network.get_parameters()):
        if trained.get(parameter.name, parameter) is not parameter:
            raise ValueError(_SAME_NAME.format(parameter.name))


def evaluating(network: nn.Cell, trained: Container[int] = ()) -> Optional[tuple[str, nn.Cell]]:
    """Return the first layer of Dropout or BatchNorm, with its name, if the network and all such layers evaluate."""
    # A Cell with the loss stays in training mode if a script sets the network in it: then all layers that hold
    # `trained` parameters, given by `id`, evaluate.
    layers = [(name, cell) for name, cell in network.cells_and_names() if _depends_on_mode(cell)]
    holders = [cell for _, cell in network.cells_and_names()
               if any(id(p) in trained for _, p in cell.parameters_and_names(expand=False))]
    is_training = network.training and (not holders or any(cell.training for cell in holders))
    if not layers or is_training or any(layer.training for _, layer in layers):
        return None
    return layers[0]


def _depends_on_mode(layer: nn.Cell) -> bool:
    """Return whether a layer is Dropout, whose rate is not 0, or BatchNorm."""
    return getattr(layer, "p", 1) != 0 and any(kind.__name__.startswith(_LAYERS) for kind in type(layer).__mro__)
