"""The training mode of a network: warn if it is in evaluation mode, and detect when the mode changes."""
from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import contextmanager
from inspect import isfunction
from itertools import chain
from typing import Any, Optional
from warnings import warn

import numpy as np
from mindspore import Parameter, nn

from ..core.reach import held_by
from ..tensors import as_array

_EVALUATING = ("{} is in evaluation mode, so {} computes as in evaluation: no Dropout, fixed statistics of "
               "BatchNorm; call set_train() on the network before you train it. If you want evaluation mode in this "
               "layer, call set_train() on the network, then set_train(False) on the layer")

_UNSEEN = ("no network that holds {} was found, so set_train() of it has no effect after the first call, and an "
           "optimizer of another network is not noticed; give the network to {} where it can be found: by a name that "
           "the function uses, in a closure, or as an attribute or an argument of functools.partial")

_UNSEEN_IN_EVALUATION = ("no network that holds {} was found, so evaluate computes in the mode that it is in; give the "
                         "network to {} where it can be found: by a name that the function uses, in a closure, or as "
                         "an attribute or an argument of functools.partial")

_FOREIGN = ("the optimizer updates {} and others, expected parameters of a network that {} uses (found: {}): all "
            "gradients would be 0; build the optimizer from the parameters of that network. If the optimizer's own "
            "network is used, but is not found, give it to the function by a name, in a closure, or as an attribute or "
            "an argument of functools.partial")

_BY_CLASS = ("{} has class weights, so its mean is over their sum, but batches count by their numbers of samples: "
             "several batches (windows, evaluate) are averaged wrongly; give a weight_fn that returns "
             "weight[label].sum()")

# Attributes that hold a layer's rate of dropout: of Dropout, Dropout1d and MultiheadAttention.
_RATES = ("p", "prob", "dropout")


class TrainMode:
    """Watch the mode of all layers of a step's networks: any code may read it, also that of the functions.

    Warn if a trained parameter belongs to no network that can be found.

    Args:
        functions: What the graphs call: Cells, or functions that use Cells; the first one is that of the user.
        weights: The parameters that are trained.
        eager: Whether the functions run op by op: then a network that was not found changes its mode like any other.

    Attributes:
        layers: The layers. If `training` of one changes, graphs must be compiled again.
        parameters: Their Parameters, and others that the functions can reach.
    """

    def __init__(self, functions: Sequence[Callable], weights: Iterable[Parameter], eager: bool = False) -> None:
        self._networks, parameters = held_by(*functions)
        self.layers = [layer for network in self._networks for _, layer in network.cells_and_names()]
        self._trained = {id(p): p.name for p in weights}
        found = {id(p): p for p in chain(parameters, *(network.get_parameters() for network in self._networks))}
        self.parameters = list(found.values())
        has_own = any(p.requires_grad for network in self._networks for p in network.get_parameters())
        self._is_foreign = has_own and self._trained.keys().isdisjoint(found)
        self._unseen = next((name for key, name in self._trained.items() if key not in found), None)
        self._eager = eager
        self._name = getattr(functions[0], "__name__", "forward_fn")
        self._seen: set[tuple[bool, ...]] = set()

    def require_trained_network(self) -> None:
        """Raise ValueError if networks with trainable parameters were found, but no parameter that is trained.

        All gradients would be 0, and nothing would say so.
        """
        if self._is_foreign:
            networks = ", ".join(dict.fromkeys(type(network).__name__ for network in self._networks
                                               if any(p.requires_grad for p in network.get_parameters())))
            raise ValueError(_FOREIGN.format(next(iter(self._trained.values())), self._name, networks))

    def warn_of_class_weights(self) -> None:
        """Warn if a mean by class weights is found, in a step whose batches are weighted by numbers of samples."""
        for layer in self.layers:
            if isinstance(layer, (nn.CrossEntropyLoss, nn.NLLLoss)) and layer.reduction == "mean" and (
                    layer.weight is not None and np.ptp(as_array(layer.weight)) > 0):
                warn(_BY_CLASS.format(type(layer).__name__), UserWarning, stacklevel=2)
                return

    def warn_if_evaluating(self, mode: tuple[bool, ...]) -> None:
        """Warn, once for each mode, if a trained network is in evaluation mode (a single layer does not count).

        Warn, once, if a network was not found.

        `mode`: the `training` of each of `layers`.
        """
        if mode in self._seen:
            return
        if self._unseen is not None and not self._eager and not self._seen:
            warn(_UNSEEN.format(self._unseen, self._name), UserWarning, stacklevel=2)
        self._seen.add(mode)
        for network in self._networks:
            name, layer = evaluating(network, self._trained) or ("", None)
            if layer is not None and any(id(p) in self._trained for p in network.get_parameters()):
                place = f"its layer {name} ({type(layer).__name__})" if name else "it"
                warn(_EVALUATING.format(type(network).__name__, place), UserWarning, stacklevel=2)
                return

    @contextmanager
    def evaluation(self) -> Iterator[None]:
        """Set all layers to evaluation mode in the block. After it, each is in its own mode again.

        Warn if a network was not found.
        """
        if self._unseen is not None:
            warn(_UNSEEN_IN_EVALUATION.format(self._unseen, self._name), UserWarning, stacklevel=2)
        # `set_train`, and not flags alone: a `construct` under ms.jit has a graph for what it last set.
        networks, modes = [network.training for network in self._networks], [layer.training for layer in self.layers]
        try:
            for network in self._networks:
                network.set_train(False)
            yield
        finally:
            for network, mode in zip(self._networks, networks):
                network.set_train(mode)
            for layer, mode in zip(self.layers, modes):  # each one alone: `set_train` sets the layers in it, too
                layer.add_flags(training=mode)


def evaluating(network: nn.Cell, trained: Container[int] = ()) -> Optional[tuple[str, nn.Cell]]:
    """Return the first layer that depends on the mode, with its name, if the network and all such layers evaluate.

    The network may be inside a Cell with the loss, which stays in training mode if a script sets the network alone:
    then all layers that hold `trained` parameters, given by `id`, evaluate.
    """
    layers = list(_dependent_layers(network))
    holders = [cell for _, cell in network.cells_and_names()
               if any(id(p) in trained for _, p in cell.parameters_and_names(expand=False))]
    is_training = network.training and (not holders or any(cell.training for cell in holders))
    if not layers or is_training or any(layer.training for _, layer in layers):
        return None
    return layers[0]


def _dependent_layers(network: nn.Cell) -> Iterator[tuple[str, nn.Cell]]:
    """Yield the layers whose own code reads `self.training`, with their names.

    Leave out those of MindSpore's that compute the same in both modes: layers whose rate of dropout is 0, such as
    `nn.MultiheadAttention` by default, and BatchNorm with `use_batch_statistics`.
    """
    for name, cell in network.cells_and_names():
        if _reads_training(type(cell)) and not (type(cell).__module__.startswith("mindspore.") and _is_fixed(cell)):
            yield name, cell


def _is_fixed(layer: nn.Cell) -> bool:
    """Return whether one of MindSpore's layers computes the same in both modes."""
    values = vars(layer)
    return (any(values.get(rate) == 0 for rate in _RATES) or values.get("keep_prob") == 1
            or values.get("use_batch_statistics") is not None)


def _reads_training(kind: type) -> bool:
    """Return whether a method of the class reads `training`, or a function that the method calls by its name."""
    # It is only in the code: `training` is a plain attribute, whose reads nothing records. To run the layer in both
    # modes would need a batch and move state, but the warning has to come before anything is compiled.
    return any("training" in function.__code__.co_names for method in _own_methods(kind)
               for function in (method, *filter(isfunction, map(method.__globals__.get, method.__code__.co_names))))


def _own_methods(kind: type) -> Iterator[Any]:
    """Yield the methods that a class does not inherit from Cell."""
    for base in kind.__mro__[:kind.__mro__.index(nn.Cell)]:
        yield from filter(isfunction, vars(base).values())
