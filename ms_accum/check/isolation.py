"""Run a user's network op by op, and restore everything afterwards."""
from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from typing import Any, Optional
from unittest.mock import patch

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops

from ..mindspore_api import KERNEL_SEEDS

Calls = dict[nn.Cell, tuple[list[Tensor], list[Tensor]]]  # inputs and outputs of each layer in its first call


class Layers:
    """Keep and restore the attributes of the Cells of a network, and of other Cells that run."""

    def __init__(self, network: nn.Cell) -> None:
        self.names: dict[nn.Cell, str] = {}
        self.inside: dict[nn.Cell, set[nn.Cell]] = {}  # the Cells that each has called
        # Their state at the begin, and the state to restore during the check.
        self._found: list[Any] = []
        self._kept: list[Any] = []
        self._add("", network)

    def _add(self, prefix: str, root: nn.Cell) -> None:
        for name, cell in root.cells_and_names():
            if cell not in self.names:
                name = ".".join(filter(None, (prefix, name))) or "network"
                self.names[cell] = f"{name} ({len(self.names)})" if name in self.names.values() else name
                self._found += _state(cell)
                for attribute, value in list(vars(cell)["_primitives"].items()):
                    if any(key.lower().startswith("seed") for key in value.attrs):
                        setattr(cell, attribute, deepcopy(value))  # it has a random state of its own: a copy draws
                self._kept += _state(cell)

    def keep(self) -> None:
        """Keep the present state as the one to restore."""
        self._kept = [entry for cell in self.names for entry in _state(cell)]

    def restore(self, as_found: bool = False) -> None:
        """Restore attributes that have changed."""
        for holder, values, contents in self._found if as_found else self._kept:
            for name in holder.keys() - values.keys():
                del holder[name]
            for name, value in values.items():
                if holder.get(name, holder) is not value:  # a frozen dict raises an error even if nothing changes
                    holder[name] = value
            for value, content in contents:
                if content != value.asnumpy().tobytes():
                    array = np.frombuffer(content, value.asnumpy().dtype).reshape(value.shape)
                    ops.assign(value, Tensor(array, value.dtype))  # `set_data` would not reach a compiled graph

    @contextmanager
    def watched(self) -> Iterator[Calls]:
        """Yield the inputs and outputs of each Cell that runs in the block, also outside of the network."""
        call = nn.Cell.__call__
        calls: Calls = {}
        running: list[nn.Cell] = []

        def watching(cell: nn.Cell, *arguments: Any, **keywords: Any) -> Any:
            self._add(type(cell).__name__, cell)
            for outer in running:
                self.inside.setdefault(outer, set()).add(cell)
            running.append(cell)
            try:
                output = call(cell, *arguments, **keywords)
            finally:
                running.pop()
            calls.setdefault(cell, (tensors_in((*arguments, *keywords.values())), tensors_in(output)))
            return output

        with patch.object(nn.Cell, "__call__", watching):
            yield calls


def _state(cell: nn.Cell) -> list[tuple]:
    """Return `(dict, its contents, bytes of each Tensor in it)` for a Cell's attributes and each dict among them."""
    return [(holder, dict(holder), [(value, value.asnumpy().tobytes()) for value in holder.values()
                                    if isinstance(value, Tensor)])
            for holder in (vars(cell), *vars(cell).values()) if isinstance(holder, dict)]


def tensors_in(values: Any) -> list[Tensor]:
    """Return the Tensors among `values`, which may be a single one."""
    values = values if isinstance(values, (tuple, list)) else (values,)
    return [value for value in values if isinstance(value, Tensor)]


def casts_inside(function: object) -> bool:
    """Return whether `mindspore.amp.auto_mixed_precision` casts inside a Cell or function; no output shows it."""
    return getattr(function, "_amp_level", None) in ("O1", "auto")


@contextmanager
def untouched(network: nn.Cell) -> Iterator[Layers]:
    """Run the block op by op, also jitted functions; then restore state, flags, random state and mode."""
    with ExitStack() as afterwards:
        afterwards.enter_context(patch.dict(KERNEL_SEEDS))
        afterwards.callback(ms.set_context, mode=ms.get_context("mode"))
        kept: tuple[tuple[Callable, Any], ...] = (
            (_set_jit, os.environ.get("MS_JIT")), (ms.set_rng_state, ms.get_rng_state()),
            (random.setstate, random.getstate()), (np.random.set_state, np.random.get_state()))
        for restore, state in kept:
            afterwards.callback(restore, state)
        ms.set_context(mode=ms.PYNATIVE_MODE)
        _set_jit("0")
        layers = Layers(network)
        afterwards.callback(layers.restore, as_found=True)
        yield layers


def _set_jit(value: Optional[str]) -> None:
    os.environ.pop("MS_JIT", None)
    if value is not None:
        os.environ["MS_JIT"] = value
