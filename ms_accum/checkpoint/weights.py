"""Load the weights alone, without the rest of a training."""
from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from typing import Union

import mindspore as ms
from mindspore import Parameter, Tensor, nn, ops

from ..arguments import instance_of
from .file import SUFFIX, OfMindSpore, path_to_load, read_file


def load_weights(source: Union[str, os.PathLike, Mapping[str, Tensor]], network: nn.Cell) -> None:
    """Set the parameters of a network, also after its train step has begun; `mindspore.load_param_into_net` cannot.

    A compiled step keeps the memory of the parameters that it has begun with. So MindSpore's loader, which gives the
    network new memory, has no effect on it; this function writes into the memory that is there. The optimizer's state
    and an open window stay as they are: call `flush()` of the train step before.

    Args:
        source: A file of `ms_accum.save_checkpoint` or `mindspore.save_checkpoint`, or a dict of Tensors by the names
            of the parameters. It may hold more than the network.
        network: The network, or a part of it.

    Raises:
        TypeError: If an argument is of the wrong kind.
        FileNotFoundError, CheckpointError: If there is no such file, or it is damaged.
        ValueError: If a parameter of the network is missing, or has another shape. Nothing is then changed.

    Source: `mindspore.load_param_into_net`.

    Example:
        >>> from mindspore import Tensor, nn
        >>> from ms_accum import load_weights
        >>> network = nn.Dense(2, 1)
        >>> load_weights({"weight": Tensor([[1.0, 2.0]]), "bias": Tensor([0.0])}, network)
        >>> print(network.weight.asnumpy())
        [[1. 2.]]
    """
    instance_of("network", network, nn.Cell, "a mindspore.nn.Cell", "give source, network")
    instance_of("source", source, (str, os.PathLike, Mapping), "a path or a dict of Tensors", "give source, network")
    parameters = {p.name: p for p in network.get_parameters()}
    given = source if isinstance(source, Mapping) else _read(source, parameters)
    where = "source" if isinstance(source, Mapping) else str(source)
    for name, parameter in parameters.items():
        found = tuple(given[name].shape) if name in given else "missing"
        if found != tuple(parameter.shape):
            raise ValueError(f"{name} is {'' if name not in given else 'of shape '}{found} in {where}, expected shape "
                             f"{tuple(parameter.shape)}; give the weights of this network, or only a part of it as "
                             "network")
    for name, parameter in parameters.items():
        ops.assign(parameter, Tensor(given[name]).astype(parameter.dtype))


def _read(path: Union[str, os.PathLike], names: Iterable[str]) -> Mapping[str, Union[Parameter, Tensor]]:
    try:
        with ExitStack() as opened:
            entries, _ = read_file(path_to_load(path), opened)
            return {name: entries[name].read() for name in names if name in entries}
    except OfMindSpore:
        return ms.load_checkpoint(str(path), format=SUFFIX[1:] if str(path).endswith(SUFFIX) else "ckpt")
