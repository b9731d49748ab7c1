"""Checkpoints: all state of a training, also in the middle of a window.

The network's parameters keep their names in the file, so that `mindspore.load_checkpoint` reads them. Other state is
called "optimizer:<name>" and "accumulator:<name>". State that only an open window needs is saved only if a window is
open. So a checkpoint of a closed window fits any number of ranks and any length of the next window.
"""
from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack
from functools import wraps
from hashlib import sha256
from pathlib import Path
from secrets import token_hex
from typing import Any, ParamSpec, TypeVar, Union

import numpy as np
from mindspore import Parameter, Tensor, nn, ops

from ..arguments import instance_of
from ..core.accumulator import Accumulator
from ..core.boundary import require_whole
from ..core.optimizers import divided_state, own_name, state_of
from ..core.stages import require_scale
from ..distributed.ranks import gather, require_alike, together
from ..distributed.tags import LOAD, SAVE
from ..runtime import synchronize
from .file import (
    RESERVED,
    CheckpointError,
    Entry,
    checked_path,
    on_disk,
    part_of,
    path_of_rank,
    path_to_load,
    read_file,
    remove_generations,
    rename_file,
    write_file,
)

P = ParamSpec("P")
T = TypeVar("T")
_OF_WINDOW = ("reducer", "accumulate_step")  # settings that a closed window does not depend on
_UNIT, _TORN, _SCALE = (f"accumulator:{name}" for name in ("weight_unit", "unfinished", "loss_scaler.scale_value"))


def _in_order(function: Callable[P, T]) -> Callable[P, T]:
    """Raise TypeError, with the right order, if the arguments are in another order or one is missing."""
    name, called = function.__name__, f"{function.__name__}(path, network, train_step)"

    @wraps(function)
    def checked(*arguments: P.args, **named: P.kwargs) -> T:
        path = arguments[0] if arguments else named.get("path", "")
        if not isinstance(path, (str, os.PathLike)):
            raise TypeError(f"path is of type {type(path).__name__}, expected a str or a path; give {called}, with the "
                            "path first, unlike mindspore.save_checkpoint")
        missing = [key for key in ("path", "network", "accumulator")[len(arguments):] if key not in named]
        if missing:
            raise TypeError(f"{name} got no {' and no '.join(missing)}; give {called}, or give only the network to "
                            f"mindspore.{name}")
        return function(*arguments, **named)

    return checked


@_in_order
def save_checkpoint(path: Union[str, os.PathLike], network: nn.Cell, accumulator: Any, *, extra: Any = None) -> None:
    """Save all state of a training, also in the middle of a window, so that a resumed run is bit-identical.

    The file holds the parameters of the network, the optimizer's state (moments, update count, learning rates that are
    Parameters), the accumulator's buffers, weights and counters, the place in the epoch, the loss scaler, and `extra`.
    It does not hold the state of random layers, because MindSpore 2.10 does not expose it on CPU. For bit-identical
    resumption, pass masks as arguments of the batch, drawn from a seed and the position in the data.

    The file is written beside `path`, flushed to the disk and renamed. So a process that is killed at any moment leaves
    the complete old file or the complete new one; the next save on the same host removes its temporary files. Several
    processes may save to one path at the same time; the last one wins.

    With several ranks, every rank has to call it with the same path, and only one such run at a time may use the path.
    Ranks other than 0 write files called `<stem>.rank<r>of<n>-<generation><suffix>`; all files become valid together
    when rank 0 renames its own.

    Args:
        path: The file to write. It ends in ".safetensors".
        network: The network whose parameters the optimizer updates.
        accumulator: The accumulator, or the train step or `TrainOneStepCell` that holds it.
        extra: Any JSON value, e.g. the seed of the data. NaN and infinity are kept. It is written into
            the header of the file, which holds 100 MB at most.

    Raises:
        TypeError: If `network` or `accumulator` is of the wrong kind; if `extra` would change when it is written to
            JSON and read again (tuples, keys that are not str); if the optimizer is not an `nn.Cell`, so that its state
            cannot be found.
        ValueError: If the path ends in another suffix, if two entries of the file would have the same name, or if
            MindSpore has cut the parameters into slices (semi-auto and auto parallel).
        RuntimeError: If an error or an interrupt stopped a batch or an update before its end.
        OSError: If the file cannot be written; the old file is kept. With several ranks, all of them raise it.

    Source: databases replace files in this way (write beside the old one, fsync, rename); the format is safetensors.

    Example:
        >>> import os, tempfile, mindspore as ms
        >>> from mindspore import nn
        >>> from ms_accum import Accumulator, save_checkpoint
        >>> network = nn.Dense(2, 1, weight_init="ones")
        >>> accumulator = Accumulator(nn.SGD(network.trainable_params(), learning_rate=0.5), 2, reduction="mean")
        >>> path = os.path.join(tempfile.mkdtemp(), "run.safetensors")
        >>> save_checkpoint(path, network, accumulator)
        >>> weights = ms.load_checkpoint(path, format="safetensors")  # MindSpore reads the weights
        >>> print(weights["weight"].asnumpy())
        [[1. 1.]]
    """
    path, accumulator = checked_path(path), _checked_accumulator(network, accumulator)
    boundary = accumulator.boundary
    exchange = accumulator.exchange
    exchange.require_whole_state()
    exchange.announce(SAVE)
    exchange.compare_parameters()
    rank, ranks = exchange.rank, exchange.ranks
    run = _together(ranks, lambda: _finished(network, accumulator), OSError)
    generation, held = _told(ranks, token_hex(8), int(accumulator.mini_step))
    mine = path_of_rank(path, rank, ranks, generation)
    with part_of(path) as part:
        joined = run.join_state(part)

        def write() -> None:
            # The window counts as open on all ranks if it is open on one.
            write_file(part, *run.contents(extra, generation, any(held), joined()))
            if rank > 0:
                rename_file(part, mine)

        try:
            _together(ranks, write, OSError)
            # Until rank 0's file has its name, the others belong to no checkpoint.
            _together(ranks, lambda: rename_file(part, path) if rank == 0 else None, OSError)
        except OSError:  # rank 0's file has no name yet; after another error, it may have it
            if rank > 0:
                mine.unlink(missing_ok=True)
            raise
    if rank > 0:
        remove_generations(path, rank, ranks, mine)
    boundary.note_saved()


@_in_order
def load_checkpoint(path: Union[str, os.PathLike], network: nn.Cell, accumulator: Any) -> Any:
    """Load a file of `save_checkpoint` into a network and an accumulator that are built with the same arguments.

    If this run has not trained yet, the resumed training is bit-identical; otherwise it keeps its own unit of weights,
    and results differ by rounding. Everything is checked before anything is loaded. Nothing in the file is executed.

    A checkpoint of a closed window (saved when `train_step.updated` is true, or after a flush) can be loaded with a
    different number of ranks, `DataParallel` or `accumulate_step`. With a different number of ranks or `DataParallel`,
    every rank reads rank 0's file, so the file must be on a shared file system, and every rank gets rank 0's values of
    `extra` and of BatchNorm's statistics.

    An open window in this run is dropped. Buffers that this run has not needed yet (windows of one microbatch) are
    allocated only if the file holds an open window.

    Args:
        path: The path that was given to `save_checkpoint`.
        network: A network with the same parameters as the saved one; their values are replaced.
        accumulator: As in `save_checkpoint`, built with the same arguments.

    Returns:
        `extra`.

    Raises:
        FileNotFoundError: If there is no such file.
        CheckpointError: If the file is truncated, damaged or not a checkpoint of ms_accum, or was saved with a
            different network, optimizer, `reduction`, `clip_norm`, `on_nonfinite` or noise scale; the message names the
            entry. With an open window, the number of ranks, `DataParallel` and `accumulate_step` must be equal, too
            (functions are compared at 0, 1, 2, 4, … 2**16 updates). With several ranks, all of them raise it. It does
            not compare arguments of the optimizer that are not Parameters, the factor and window of a loss scaler, or
            arguments of the train step.
        OSError: If other code wrote to the file while it was read (a save of ms_accum never does). Later calls then
            raise RuntimeError, until a whole file is loaded.
        TypeError, ValueError: As in `save_checkpoint`.

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
    path, accumulator = path_to_load(path), _checked_accumulator(network, accumulator)
    exchange = accumulator.exchange
    exchange.require_whole_state()
    exchange.forgive()
    exchange.announce(LOAD)
    rank, ranks = exchange.rank, exchange.ranks
    run = _together(ranks, lambda: _State(network, accumulator), CheckpointError)
    with ExitStack() as opened:
        first = _together(ranks, lambda: read_file(path, opened) if rank == 0 else ({}, {"generation": "0" * 16}),
                          CheckpointError)
        generation, has_own = _told(ranks, first[1]["generation"], run.exchanged_alike(first[1]))
        mine = path_of_rank(path, rank if has_own[0] else 0, ranks, generation)

        def read() -> tuple[dict[str, Entry], dict]:
            entries, about = first if rank == 0 else read_file(mine, opened)
            _require_generation(mine, about, generation)
            if run.divided and mine != path:  # rank 0's file holds them
                others, of_others = read_file(path, opened)
                _require_generation(path, of_others, generation)
                entries.update({name: others[name] for name in run.divided if name in others})
            return run.checked(mine, entries, about), about

        found, about = _together(ranks, read, CheckpointError)
        with accumulator.boundary.loading(about["open"], run.exchanged_alike(about)):
            for name, entry in found.items():
                # Not set_data: a graph that is compiled already would keep the old values (MindSpore 2.10).
                ops.assign(run.entries[name], run.cut(name, entry.read()))
                # Otherwise MindSpore queues the entries, and holds several. Operations run in order, so that the entry
                # is freed before the next one has a value (measured on CPU, where there is nothing to synchronize).
                synchronize()
                (Tensor(0) + 1).asnumpy()
    return about["extra"]


def _checked_accumulator(network: object, accumulator: object) -> Accumulator:
    """Return the accumulator, or that of a train step or cell. Raise TypeError if an argument is of the wrong kind."""
    remedy = "give path, network, accumulator"
    instance_of("network", network, nn.Cell, "a mindspore.nn.Cell", remedy)
    return instance_of("accumulator", getattr(accumulator, "accumulator", accumulator), Accumulator,
                       "an Accumulator, a train step or a TrainOneStepCell", remedy)


def _together(ranks: int, do: Callable[[], Any], failure: type[Exception]) -> Any:
    return together(do, failure) if ranks > 1 else do()


def _told(ranks: int, generation: str, number: int) -> tuple[str, list[int]]:
    """Return, on every rank, rank 0's generation (16 hexadecimal digits) and the numbers of all ranks."""
    row = np.array([*generation.encode(), number], np.int32)
    rows = gather(row) if ranks > 1 else row[None]
    return bytes(rows[0, :-1].tolist()).decode(), rows[:, -1].tolist()


# --- what a file holds ------------------------------------------------------------------------------------------------


class _State:
    """Hold what a run saves and loads.

    Attributes:
        entries: All state by its name in the file.
        divided: For each entry of which this rank holds only a slice (ZeRO), the whole parameter.
        of_window: The names of entries that are only needed while a window is open.
        settings: Settings that must be equal in the run that resumes; those in `_OF_WINDOW` only if a window is open.
    """

    def __init__(self, network: nn.Cell, accumulator: Accumulator) -> None:
        optimizer = instance_of("the optimizer", accumulator.optimizer, nn.Cell, "an nn.Cell, whose state can be found")
        named = [(p.name, p) for p in network.get_parameters()]
        # An accumulator's number counts those that were built before it, which may be others in the next process.
        named += [(f"optimizer:{own_name(optimizer, name)}", p)
                  for name, p in (*((p.name, p) for p in accumulator.weights), *state_of(optimizer))]
        named += [(f"accumulator:{name}", p) for name, p in accumulator.state.items()]
        self.entries: dict[str, Parameter] = {}
        once = {id(p): (name, p) for name, p in reversed(named)}  # the first name wins
        for name, parameter in reversed(once.values()):
            if name in (*RESERVED, *self.entries):
                raise ValueError(f"two entries of the checkpoint would be called {name}; rename one of the parameters")
            self.entries[name] = parameter
        if len(accumulator.state) < len(accumulator.parameters):
            raise ValueError("two Parameters of the accumulator's state have the same name; rename those of "
                             "after_update")
        self.settings = dict(accumulator.boundary.settings)
        exchange = self.exchange = accumulator.exchange
        divided = divided_state(optimizer)
        self.divided = {name: divided[id(p)] for name, p in self.entries.items() if id(p) in divided}
        self.copied = {id(p) for _, p in state_of(optimizer)} - set(divided)
        if exchange.divides_buffers:  # a slice of a bucket fits only the same parameters in the same order
            order = repr([(p.name, p.shape) for p in accumulator.weights]).encode()
            self.settings["reducer"] += f", parameters {sha256(order).hexdigest()[:16]}"
        open_state = {id(p) for p in accumulator.window.window_state}
        self.of_window = {f"accumulator:{name}" for name, p in accumulator.state.items() if id(p) in open_state}

    def exchanged_alike(self, about: dict) -> bool:
        """Return whether the checkpoint has the same ranks and exchange, so that each rank has its own file."""
        return about.get("reducer") == self.settings["reducer"]

    def join_state(self, part: Path) -> Callable[[], dict[str, np.ndarray]]:
        """Gather divided state, one entry after the other, on rank 0's disk. All ranks have to call it.

        Return a function that returns the entries, or raises the error that stopped this rank, so that the others do
        not wait for it. Raise ValueError if other state of the optimizer differs among ranks, because only rank 0's is
        saved.
        """
        if self.exchange.divides_parameters:
            require_alike({name: p.asnumpy().tobytes() for name, p in self.entries.items() if id(p) in self.copied},
                          "ms_accum finds state of slices by its name, which has to end in the parameter's")
        found: dict[str, np.ndarray] = {}
        errors: list[Exception] = []
        for name, whole in self.divided.items():
            value = self.exchange.joined(self.entries[name], whole)
            if self.exchange.rank == 0 and not errors:
                try:
                    found[name] = on_disk(value, self.entries[name].dtype, part.with_name(f"{len(found)}.state"))
                except OSError as error:
                    errors.append(error)

        def joined() -> dict[str, np.ndarray]:
            if errors:
                raise errors[0]
            return found

        return joined

    def cut(self, name: str, value: Tensor) -> Tensor:
        """Return this rank's part of a loaded entry."""
        return self.exchange.cut(value, self.divided[name]) if name in self.divided else value

    def contents(self, extra: Any, generation: str, is_open: bool,
                 joined: dict[str, np.ndarray]) -> tuple[dict[str, np.ndarray], dict]:
        """Return the entries of a rank's file, and their description. Rank 0's file also holds the `joined` state."""
        left_out = set() if is_open else self.of_window - {_UNIT}
        entries = {name: joined[name] if name in joined else p.asnumpy() for name, p in self.entries.items()
                   if name not in left_out and (name in joined or name not in self.divided)}
        return entries, {**self.settings, "open": is_open, "generation": generation, "extra": extra}

    def checked(self, path: Path, found: dict[str, Entry], about: dict) -> dict[str, Entry]:
        """Return the entries to load. Raise CheckpointError if a file with this description does not fit this run."""
        for name, expected in self.settings.items():
            if about.get(name) != expected and (about["open"] or name not in _OF_WINDOW):
                remedy = ("save when train_step.updated is true: a closed window loads on any number of ranks and with "
                          "any accumulate_step") if name in _OF_WINDOW else "build it with the same arguments"
                raise CheckpointError(f"{path} was saved with {name} {about.get(name)}, but this run has {expected}; "
                                      f"{remedy}")
        ignored = {_TORN} if self.exchanged_alike(about) else {_TORN, _UNIT}
        found = {name: entry for name, entry in found.items() if name not in ignored}
        unneeded = {_TORN} if about["open"] else self.of_window
        _require_entries(path, found, unneeded, {**self.entries, **self.divided}, self.entries)
        return found


def _finished(network: nn.Cell, accumulator: Accumulator) -> _State:
    """Return what to save. Raise RuntimeError if an error or an interrupt stopped a batch or an update."""
    require_whole(int(accumulator.window.unfinished))
    return _State(network, accumulator)


def _require_generation(path: Path, about: dict, generation: str) -> None:
    """Raise CheckpointError if another call saved this file than rank 0's."""
    if about["generation"] != generation:
        raise CheckpointError(f"{path} does not belong to the file of rank 0; restore both from one copy")


def _require_entries(path: Path, found: dict[str, Entry], unneeded: set[str], shaped: dict[str, Parameter],
                     entries: dict[str, Parameter]) -> None:
    """Raise CheckpointError unless the file holds all entries, in the shapes of `shaped`."""
    for name in {**entries, **found}:
        held = _described(found.get(name), found.get(name))
        wanted = _described(entries.get(name), shaped.get(name))
        if held != wanted and (name in found or name not in unneeded):
            raise CheckpointError(f"{path}: {name} is {held} in the file, but {wanted} in this run; build network, "
                                  "optimizer and accumulator with the same arguments")
    if _SCALE in found:
        try:
            require_scale(found[_SCALE].read())
        except ValueError as error:
            raise CheckpointError(f"{path}: in {_SCALE}, {error}") from error


def _described(entry: Any, shaped: Any) -> str:
    return "missing" if entry is None else f"of {str(entry.dtype).lower()} {tuple(shaped.shape)}"
