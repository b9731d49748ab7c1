"""Checkpoints: the state of the last update, without gradients, and the place where the next window begins.

    network:   <name in the network's structure>     parameters and buffers, which mindspore.load_checkpoint reads
    optimizer: optimizer:<name>                      without what is inside a schedule or a list of rates
    window:    accumulator:counts, sums, <name>      as they were when the open window began

Parameters change only in updates. So a file that is saved in an open window is right, too: the resumed run trains that
window again. Rank 0 alone writes and reads. Other ranks give their places; slices (ZeRO) are joined.
"""
from __future__ import annotations

import os
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, Union
from warnings import warn

import numpy as np
from mindspore import Tensor, nn, ops

from ..arguments import instance_of, one_of
from ..core.accumulator import Accumulator
from ..core.boundary import Boundary
from ..core.window import ADDED
from ..distributed.exchange import LOAD, SAVE
from ..runtime import synchronize
from ..tensors import buffers_of
from .file import VERSION, CheckpointError, Entry, checked_path, read_file, require_json, write_file

_AGAIN = ("{} holds the state of the last update: {} of the open window {} trained again: {} after the load, not a "
          "count of your own; save in `{}` to lose nothing")
_BY_STEP = "skip `train_step.trained` batches", "on_update"
_BY_MODEL = "call model.train(1, dataset.skip(cell.status().trained), ...)", "PerUpdate"
_BY_HAND = ("{} of the open window would be lost: an Accumulator by hand has no place where its window began; save "
            "when a window was closed, or call flush() first, or use make_train_step")
_RATES = ("this script was given other rates than the one that saved {}: {}; those of the file were loaded; set "
          'train_step.learning_rate after the load, or give load_checkpoint(..., rates="script")')
_OLD = ("{} is of version {}, which ms_accum 0.3 or an older one wrote, expected {}; load its weights alone: "
        "ms_accum.load_weights(path, network), or load it with the ms_accum that wrote it")
_REMEDY = ("build network, optimizer and step with the same arguments, or load the weights alone, with "
           "ms_accum.load_weights")


def save_checkpoint(path: Union[str, os.PathLike], network: nn.Cell, step: Any, *, extra: Any = None) -> None:
    """Save the state of the last update, at any time, so that a resumed run is bit-identical.

    The file holds parameters and buffers of the network, the state of the optimizer, the loss scaler and stages,
    counters, the place in the epoch, and `extra`. It holds no gradients: a window that is open is trained again after
    the load, and BatchNorm's statistics have then seen its microbatches twice. Save in `on_update` to lose nothing.
    It does not hold Tensors that are plain attributes of a network, such as a memory bank: make these Parameters. Nor
    does it hold the state of random layers, which MindSpore 2.10 does not expose on CPU: for bit-identical resumption,
    pass masks as arguments of the batch, drawn from a seed and the position in the data.

    The file is written beside `path`, flushed to the disk and renamed: a process that is killed at any moment leaves
    the complete old file or the complete new one. Several processes may save to one path; the last one wins. With
    several ranks, every rank calls it with the same path. Rank 0 writes the file, with its own buffers and `extra`, and
    the place of each rank.

    Args:
        path: The file to write. It ends in ".safetensors".
        network: The network that holds all parameters that are trained.
        step: The train step, `TrainOneStepCell` or `Accumulator`.
        extra: Any JSON value, e.g. the seed of the data; NaN and infinity are kept. The file's header, which it is
            written into, holds 100 MB at most.

    Warns:
        UserWarning: If a window is open: how many microbatches are trained again, and how to go on.

    Raises:
        TypeError: If an argument is of the wrong kind, or `extra` would change when it is written to JSON and read
            again (tuples, keys that are not str).
        ValueError: If the path ends in another suffix, or a trained parameter is not in `network`.
        RuntimeError: If an error or an interrupt stopped an update; if an `Accumulator` holds an open window; if a
            parameter was given new memory (by `mindspore.load_param_into_net`), which a compiled step does not train.
        OSError: If the file cannot be written; the old file is kept. With several ranks, all of them raise it.

    Source: databases replace files in this way (write beside the old one, fsync, rename); the format is safetensors.

    Example:
        >>> import os, tempfile, mindspore as ms
        >>> from mindspore import nn
        >>> from ms_accum import make_train_step, save_checkpoint
        >>> network = nn.Dense(2, 1, weight_init="ones")
        >>> def forward_fn(x):
        ...     return network(x).mean()
        >>> train_step = make_train_step(forward_fn, nn.SGD(network.trainable_params(), learning_rate=0.5), 2)
        >>> path = os.path.join(tempfile.mkdtemp(), "run.safetensors")
        >>> save_checkpoint(path, network, train_step)
        >>> weights = ms.load_checkpoint(path, format="safetensors")  # MindSpore reads the weights
        >>> print(weights["weight"].asnumpy())
        [[1. 1.]]
    """
    boundary = _boundary_of(network, step)
    exchange, file = boundary.window.exchange, checked_path(path, "save_checkpoint")
    exchange.require_alike(SAVE, {"path": str(path)})

    def state() -> tuple[dict[str, Tensor], np.ndarray, np.ndarray, int]:
        require_json(extra)
        counts, sums, held = boundary.of_last_update()
        if held and isinstance(step, Accumulator):
            raise RuntimeError(_BY_HAND.format(_counted(held)))
        return _entries(network, boundary), counts, sums, held

    entries, counts, sums, held = exchange.together(SAVE, state, RuntimeError)
    exchange.compare(SAVE, boundary.compared())
    place = [boundary.place.epochs, int(counts[ADDED]) - boundary.place.first]
    about = {"places": exchange.gathered([*place, boundary.window.unit]), "given": boundary.rates.given, "extra": extra}
    values = {"accumulator:counts": counts, "accumulator:sums": sums}
    for name, entry in entries.items():
        whole = _whole(boundary, name)
        if whole is not None:  # of bfloat16, float32 is exchanged
            values[name] = exchange.joined(entry, whole).astype(entry.asnumpy().dtype, copy=False)
        elif exchange.rank == 0:
            values[name] = entry.asnumpy()
    exchange.together(SAVE, lambda: write_file(file, values, about) if exchange.rank == 0 else None, OSError)
    boundary.saved[0] = boundary.added
    if held:
        ways = _BY_MODEL if isinstance(step, nn.Cell) else _BY_STEP
        warn(_AGAIN.format(path, _counted(held), "is" if held == 1 else "are", *ways), UserWarning, stacklevel=2)


def load_checkpoint(path: Union[str, os.PathLike], network: nn.Cell, step: Any, *, rates: str = "file") -> Any:
    """Load a file of `save_checkpoint` into a network and a step with the same arguments, and return its `extra`.

    Everything is checked before anything is loaded; nothing in the file is executed. All values are the file's, but for
    what is inside a schedule or a list of learning rates, and plain numbers of the optimizer (betas, weight decay):
    these are the script's. A list of rates is read from the update that the file has reached. A file fits any
    `accumulate_step`.

    An open window in this run is dropped, and a loop over `train_step.epoch` that is going on ends with an error. If
    the file stops inside an epoch, go on with `epoch(batches, skip=train_step.trained)`. With several ranks, every rank
    calls it with the same path, and rank 0 reads the file. If it was saved with another number of ranks, `trained`
    counts rank 0's batches of the former split.

    Args:
        path: The path that was given to `save_checkpoint`.
        network: A network with the same parameters as the saved one; their values are replaced.
        step: As in `save_checkpoint`.
        rates: "file", or "script" to keep this run's learning rates and momentum.

    Returns:
        `extra`, on all ranks that of rank 0.

    Warns:
        UserWarning: If this script gives other rates than the one that saved the file.

    Raises:
        FileNotFoundError: If there is no such file.
        CheckpointError: If the file is truncated, damaged or not a checkpoint of ms_accum, or was saved with a
            different network, optimizer or stages; the message names the entry. With several ranks, all raise it.
        OSError: If other code wrote to the file while it was read (a save of ms_accum never does). Later calls then
            raise RuntimeError, until a whole file is loaded.
        TypeError, ValueError, RuntimeError: As in `save_checkpoint`.

    Source: see `save_checkpoint`.

    Example:
        >>> import os, tempfile
        >>> from mindspore import nn
        >>> from ms_accum import Accumulator, load_checkpoint, save_checkpoint
        >>> network = nn.Dense(2, 1)
        >>> accumulator = Accumulator(nn.SGD(network.trainable_params(), learning_rate=0.5), 2, reduction="mean")
        >>> path = os.path.join(tempfile.mkdtemp(), "run.safetensors")
        >>> save_checkpoint(path, network, accumulator, extra={"seed": 42, "losses": [0.5]})
        >>> print(load_checkpoint(path, network, accumulator))
        {'seed': 42, 'losses': [0.5]}
    """
    boundary = _boundary_of(network, step)
    exchange, window = boundary.window.exchange, boundary.window
    one_of("rates", rates, ("file", "script"))
    file = checked_path(path, "load_checkpoint")
    exchange.require_alike(LOAD, {"path": str(path), "rates": rates})
    with ExitStack() as opened:
        found, about = exchange.together(LOAD, lambda: read_file(file, opened) if exchange.rank == 0 else ({}, {}),
                                         CheckpointError)
        listed = [(entry.name, entry.dtype.name, entry.shape) for entry in found.values()]
        listed, about = exchange.gathered([listed, about])[0]
        found = found or {name: Entry(None, name, np.dtype(dtype), tuple(shape)) for name, dtype, shape in listed}
        entries = exchange.together(LOAD, partial(_fitting, file, network, boundary, found, about), CheckpointError)

        def value_of(name: str) -> np.ndarray:
            return exchange.sent(exchange.together(LOAD, found[name].read, OSError))

        def assign() -> None:
            for name, entry in entries.items():
                if rates == "script" and name.removeprefix("optimizer:") in boundary.rates.parameters:
                    continue
                value, whole = value_of(name), _whole(boundary, name)
                # Not set_data: a graph that is compiled already would keep the old values (MindSpore 2.10).
                ops.assign(entry, Tensor.from_numpy(value if whole is None else exchange.cut(value, whole)))
                # Otherwise MindSpore queues the entries, and holds several. Operations run in order, so that the entry
                # is freed before the next one has a value (measured on CPU, where there is nothing to synchronize).
                del value
                synchronize()
                (Tensor(0) + 1).asnumpy()
            # The unit of weights is a constant of graphs. A user's own graph keeps its own.
            fixed = window.is_sum or exchange.sums_each or isinstance(step, Accumulator)
            if window.unit != unit and (window.unit is None or not fixed):
                boundary.graphs, window.unit = {}, unit  # in this order, for an interrupt between them

        places = about["places"]
        is_split, is_inside = len(places) != exchange.ranks, any(trained > 0 for _, trained, _ in places)
        epochs, trained, unit = places[0 if is_split else exchange.rank]
        boundary.load(value_of("accumulator:counts"), value_of("accumulator:sums"), assign, (epochs, trained),
                      is_inside, is_split)
    differ = [f"{name} is {now:g} here, was {about['given'][name]:g} there, and is "
              f"{float(boundary.rates.parameters[name]):g} in the file"
              for name, now in boundary.rates.given.items() if now != about["given"][name]]
    if differ and rates == "file" and exchange.rank == 0:
        warn(_RATES.format(path, "; ".join(differ)), UserWarning, stacklevel=2)
    return about["extra"]


def _boundary_of(network: object, step: object) -> Boundary:
    """Return the boundary of a step. Raise TypeError if an argument is of the wrong kind."""
    remedy = "give path, network, train_step"
    instance_of("network", network, nn.Cell, "a mindspore.nn.Cell", remedy)
    return instance_of("step", getattr(step, "boundary", step), Boundary,
                       "a train step, a TrainOneStepCell or an Accumulator", remedy)


def _whole(boundary: Boundary, name: str) -> Any:
    """Return the whole parameter, if an entry is the state of a slice."""
    return boundary.rates.divided.get(name.removeprefix("optimizer:")) if name.startswith("optimizer:") else None


def _entries(network: nn.Cell, boundary: Boundary) -> dict[str, Tensor]:
    """Return what a file holds beside counts and sums, by name. Raise ValueError if the network lacks a part."""
    # Names in the structure: those of Parameters may change, e.g. when another Cell takes the network.
    entries = {**dict(network.parameters_and_names()), **buffers_of(network)}
    held = {id(p) for p in entries.values()}
    missing = next((p.name for p in boundary.window.exchange.parameters if id(p) not in held), None)
    if missing is not None:
        raise ValueError(f"{missing} is trained, but it is not in the network, expected one that holds all trained "
                         "parameters; give a Cell around them, e.g. nn.CellList([a, b], auto_prefix=False)")
    entries |= {f"optimizer:{name}": p for name, p in boundary.rates.state.items()}
    return entries | {f"accumulator:{name}": p for name, p in boundary.window.state.items()}


def _fitting(path: Path, network: nn.Cell, boundary: Boundary, found: dict[str, Entry], about: dict
             ) -> dict[str, Tensor]:
    """Return the entries to load. Raise CheckpointError if a file does not fit; RuntimeError after new memory."""
    if about["version"] != VERSION:
        raise CheckpointError(_OLD.format(path, about["version"], VERSION))
    boundary.require_unchanged()
    entries = _entries(network, boundary)
    numbers = {"accumulator:counts": boundary.window.counts, "accumulator:sums": boundary.window.sums}
    for name in {**entries, **numbers, **found}:
        held = _kind_of(found.get(name))
        wanted = _kind_of(entries.get(name, numbers.get(name)), _whole(boundary, name))
        if held != wanted:
            raise CheckpointError(f"{path}: {name} is {held} in the file, but {wanted} in this run; {_REMEDY}")
    return entries


def _kind_of(entry: Any, whole: Any = None) -> str:
    shaped = entry if whole is None else whole
    return "missing" if entry is None else f"of {str(entry.dtype).lower()} {tuple(shaped.shape)}"


def _counted(held: int) -> str:
    return "1 microbatch" if held == 1 else f"{held} microbatches"
