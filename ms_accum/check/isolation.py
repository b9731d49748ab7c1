"""Run a user's network op by op, restore everything afterwards, and let a 16-bit network compute in float32."""
from __future__ import annotations

import os
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from operator import setitem
from typing import Any
from unittest.mock import patch

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn, ops
from mindspore.common.seed import _KERNEL_SEED as KERNEL_SEEDS  # functional random ops take their seeds from it
from mindspore.train import amp

from ..gradients import HALF

_KINDS = (Tensor, ops.Primitive, int, float, str, type(None))  # of state: what is inside of lists is not seen
_TO_FLOAT = ("fp16", "bf16", "fp32")  # the flags of `to_float`


class Layers:
    """The cells of a network, and others that run, by name, with their state: Parameters, Tensors, numbers, flags."""

    def __init__(self, network: nn.Cell) -> None:
        self.cells: dict[str, nn.Cell] = {}
        self._names: dict[int, str] = {}
        self._found, self._kept = [], []  # their state as they were found, and as it is restored during the check
        self._add("", network)

    def _add(self, prefix: str, root: nn.Cell) -> None:
        for name, cell in root.cells_and_names():
            if id(cell) not in self._names:
                name = self._names[id(cell)] = ".".join(filter(None, (prefix, name))) or "network"
                self.cells[name] = cell
                self._found += _state(cell)
                for attribute, value in list(vars(cell)["_primitives"].items()):
                    if any(key.lower().startswith("seed") for key in value.attrs):
                        setattr(cell, attribute, deepcopy(value))  # it has a random state of its own: a copy draws
                self._kept += _state(cell)

    def keep(self) -> None:
        """Take the present state for the one to restore."""
        self._kept = [entry for cell in self.cells.values() for entry in _state(cell)]

    def restore(self, as_found: bool = False) -> None:
        """Write back what has changed."""
        for holder, name, value, content in self._found if as_found else self._kept:
            if holder.get(name) is not value:
                holder[name] = value
            if content is not None and content != value.asnumpy().tobytes():
                array = np.frombuffer(content, value.asnumpy().dtype).reshape(value.shape)
                ops.assign(value, Tensor(array, value.dtype))  # `set_data` would not reach a compiled graph

    @contextmanager
    def watched(self, visit: Callable[[str, tuple, Any], None]) -> Iterator[None]:
        """Within the block, call `visit(name, inputs, output)` for each cell that has run, also outside the network."""
        call = nn.Cell.__call__

        def watching(cell: nn.Cell, *arguments: Any, **keywords: Any) -> Any:
            self._add(type(cell).__name__, cell)
            output = call(cell, *arguments, **keywords)
            visit(self._names[id(cell)], (*arguments, *keywords.values()), output)
            return output

        with patch.object(nn.Cell, "__call__", watching):
            yield


def _state(cell: nn.Cell) -> list[tuple]:
    """Return `(dict of the cell, name, value, bytes of a Tensor)` of what a cell holds."""
    attributes, usual = vars(cell), vars(nn.Cell()).keys() - {"training", "_phase"}
    holders = [(attributes, attributes.keys() - usual)]
    holders += [(attributes[name], attributes[name]) for name in ("_params", "_buffers", "_primitives")]
    return [(holder, name, holder[name], holder[name].asnumpy().tobytes() if isinstance(holder[name], Tensor) else None)
            for holder, names in holders for name in names if isinstance(holder[name], _KINDS)]


@contextmanager
def untouched(network: nn.Cell) -> Iterator[Layers]:
    """Run the block op by op, then restore parameters and other state, flags, random state and mode."""
    with in_mode(ms.PYNATIVE_MODE), ExitStack() as afterwards:
        for restore, *state in ((KERNEL_SEEDS.update, dict(KERNEL_SEEDS)), (KERNEL_SEEDS.clear,),  # in reverse order
                                (ms.set_rng_state, ms.get_rng_state()), (random.setstate, random.getstate()),
                                (np.random.set_state, np.random.get_state())):
            afterwards.callback(restore, *state)
        layers = Layers(network)
        afterwards.callback(layers.restore, as_found=True)
        yield layers


@contextmanager
def in_mode(mode: int) -> Iterator[None]:
    """Run the block in graph mode or PyNative. In PyNative, jitted functions run op by op, too."""
    before, jit = ms.get_context("mode"), os.environ.get("MS_JIT")
    ms.set_context(mode=mode)
    if mode == ms.PYNATIVE_MODE:
        os.environ["MS_JIT"] = "0"
    try:
        yield
    finally:
        ms.set_context(mode=before)
        os.environ.pop("MS_JIT", None)
        os.environ.update({} if jit is None else {"MS_JIT": jit})


def casts_inside(function: object) -> bool:
    """Whether `mindspore.amp.auto_mixed_precision` casts inside a cell or function, which no output shows."""
    return getattr(function, "_amp_level", None) in ("O1", "auto")


@contextmanager
def in_float32(layers: Layers, forward_fn: Callable, batch: tuple) -> Iterator[tuple]:
    """Within the block, compute in float32 what `to_float`, `amp` or parameters make 16 bits; yield the batch.

    What the code of a layer casts by itself stays.
    """
    copies: dict[int, Parameter] = {}
    with ExitStack() as afterwards:
        for cell in layers.cells.values():
            _layer_in_float32(cell, copies, afterwards)
        for function in filter(casts_inside, (forward_fn, *layers.cells.values())):
            module = sys.modules[type(function).__module__]
            if hasattr(module, "amp_cast"):  # which O1 has written
                afterwards.enter_context(patch.object(module, "amp_cast", lambda value, _: value))
            afterwards.enter_context(patch.object(function, "_amp_level", "O0"))
        for name in ("push_amp_strategy", "pop_amp_strategy"):  # of the level "auto"
            afterwards.enter_context(patch.object(amp, name, lambda *strategy: None))
        layers.keep()
        yield tuple([t.astype(ms.float32) if isinstance(t, Tensor) and t.dtype in HALF else t for t in batch])


def _layer_in_float32(cell: nn.Cell, copies: dict[int, Parameter], afterwards: ExitStack) -> None:
    flags = {flag: cell.get_flags().get(flag, False) for flag in _TO_FLOAT}
    if flags["fp16"] or flags["bf16"]:
        afterwards.callback(cell.add_flags, **flags)
        cell.add_flags(fp16=False, bf16=False, fp32=True)
    parameters = vars(cell)["_params"]
    for name, p in parameters.items():
        if p is not None and p.dtype in HALF:  # `set_dtype`, there and back, would not reach a compiled graph
            afterwards.callback(setitem, parameters, name, p)
            copy = Parameter(p.astype(ms.float32), name=p.name, requires_grad=p.requires_grad)
            parameters[name] = copies.setdefault(id(p), copy)
    if type(cell).__name__ == "_OutputTo16":  # which O2 wraps around a float32 layer
        afterwards.enter_context(patch.object(cell, "dtype", ms.float32))
