"""Load the weights alone, without the rest of a training."""
from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Union

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops

from ..arguments import instance_of, one_line
from ..tensors import buffers_of
from .file import SUFFIX, CheckpointError, WeightsOnlyError, read_file


def load_weights(source: Union[str, os.PathLike, Mapping[str, Tensor]], network: nn.Cell) -> None:
    """Set the parameters of a network, and its buffers, at any time, also after its train step has begun.

    `mindspore.load_param_into_net` gives the network new memory, which a step that has begun does not see. This
    function writes into the memory that the step uses. The optimizer's state stays as it is. So does an open window,
    whose gradients are those of the old weights: call `train_step.flush()` first.

    Args:
        source: A file of `ms_accum.save_checkpoint` (also of 0.3) or `mindspore.save_checkpoint`, or a dict of Tensors
            by the names of the parameters: copies (`p.copy()`), because `Tensor(p)` and `p.asnumpy()` share the memory
            of a Parameter. Entries that the network lacks are ignored. Buffers (`Cell.register_buffer`) that `source`
            lacks keep their values.
        network: The network, or a part of it.

    Raises:
        TypeError: If an argument is of the wrong kind.
        FileNotFoundError, CheckpointError: If there is no such file, or it is damaged.
        ValueError: If a parameter is missing or has another shape. Nothing is then changed.

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
    placed, buffers = dict(network.parameters_and_names()), buffers_of(network)
    parameters = {p.name: p for p in placed.values()}
    given = source if isinstance(source, Mapping) else _read(source, {**parameters, **placed, **buffers})
    where = "source" if isinstance(source, Mapping) else str(source)
    # A part of a network has the names of the whole one. In the structure, they stay what they were if another Cell has
    # renamed the parameters.
    if any(name not in given for name in parameters) and all(name in given for name in placed):
        parameters = placed
    held = {**{name: buffer for name, buffer in buffers.items() if name in given}, **parameters}
    for name, parameter in held.items():
        if name in given:
            instance_of(name, given[name], (Tensor, np.ndarray), "a Tensor", "give a dict of Tensors")
        found = tuple(given[name].shape) if name in given else "missing"
        if found != tuple(parameter.shape):
            raise ValueError(f"{name} is {'of shape ' * (name in given)}{found} in {where}, expected shape "
                             f"{tuple(parameter.shape)}; give this network's weights, or a part of it as network")
    for name, parameter in held.items():
        ops.assign(parameter, Tensor(given[name]).astype(parameter.dtype))


def _read(path: Union[str, os.PathLike], names: Iterable[str]) -> Mapping[str, Tensor]:
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"there is no checkpoint {path}; give a file that ms_accum or MindSpore wrote")
    with suppress(WeightsOnlyError), ExitStack() as opened:
        if path.suffix == SUFFIX:
            entries, _ = read_file(path, opened)
            return {name: Tensor.from_numpy(entries[name].read()) for name in names if name in entries}
    try:
        return ms.load_checkpoint(str(path), format=SUFFIX[1:] if path.suffix == SUFFIX else "ckpt")
    except (ValueError, RuntimeError) as error:
        raise CheckpointError(f"{path} is truncated or damaged, so MindSpore cannot read it ({one_line(error)}); "
                              "restore it from a copy") from error
