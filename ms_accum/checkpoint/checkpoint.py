"""Checkpoints: all state of a training, also in the middle of a window.

The network's parameters keep their names in the file, so that `mindspore.load_checkpoint` reads them. Other state is
called "optimizer:<name>" and "accumulator:<name>". State that only an open window needs is saved only if a window is
open. So a checkpoint of a closed window fits any number of ranks and any length of the next window.

Rank 0 alone writes and reads the file. What differs from its own on rank 1 is called "rank1:<name>". It travels one
entry after the other.
"""
from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial, wraps
from hashlib import sha256
from itertools import compress
from pathlib import Path
from typing import Any, ParamSpec, TypeVar, Union
from warnings import warn

import numpy as np
from mindspore import Tensor, nn, ops

from ..arguments import boolean, instance_of
from ..core.accumulator import Accumulator
from ..core.boundary import require_whole
from ..core.facts import CLASS, changes, rate_texts
from ..core.optimizers import divided_state, load_options, options_of_groups, own_name, state_of
from ..core.stages import require_scale
from ..distributed.ranks import differing, gather, require_alike, sent_by, text_by, together
from ..distributed.tags import LOAD, SAVE
from ..runtime import synchronize
from ..steps.train_step import require_python
from ..tensors import buffers_of
from .file import (
    RESERVED,
    CheckpointError,
    Entry,
    bits_of,
    checked_path,
    json_of,
    on_disk,
    part_of,
    path_to_load,
    read_file,
    rename_file,
    write_file,
)

_OUTSIDE = "; call it between two calls of the train step, or in train_step.on_update"
P = ParamSpec("P")
T = TypeVar("T")
_SCALER = "accumulator:loss_scaler."
_OF_RANK = re.compile(r"rank\d+:")  # how the names of other ranks' entries begin
_UNIT, _TORN, _SCALE, _EMPTY = (f"accumulator:{name}" for name in (
    "weight_unit", "unfinished", "loss_scaler.scale_value", "empty_windows"))


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

    The file holds the network's parameters and buffers, the optimizer's state (moments, update count, learning rates
    that are Parameters), the accumulator's buffers, weights and counters, the place in the epoch, the loss scaler, what
    a `WindowLog` has seen of the open window, and `extra`. It does not hold Tensors that are plain attributes of a
    network, such as a memory bank: make these Parameters of the network. It does not hold the state of random layers
    either, because MindSpore 2.10 does not expose it on CPU. For bit-identical resumption, pass masks as arguments of
    the batch, drawn from a seed and the position in the data.

    The file is written beside `path`, flushed to the disk and renamed. So a process that is killed at any moment leaves
    the complete old file or the complete new one; the next save on the same host removes its temporary files. Several
    processes may save to one path at the same time; the last one wins.

    With several ranks, every rank has to call it with the same path, and rank 0 writes the file. What differs between
    ranks, also `extra`, is saved for each.

    Args:
        path: The file to write. It ends in ".safetensors".
        network: The network whose parameters the optimizer updates.
        accumulator: The accumulator, or the train step or `TrainOneStepCell` that holds it.
        extra: Any JSON value, e.g. the seed of the data. NaN and infinity are kept. It is written into
            the header of the file, which holds 100 MB at most.

    Warns:
        UserWarning: If a network that the train step uses has Parameters that are not in `network`, such as a teacher,
            and that no other accumulator trains.

    Raises:
        TypeError: If `network` or `accumulator` is of the wrong kind; if `extra` would change when it is written to
            JSON and read again (tuples, keys that are not str); if the optimizer is not an `nn.Cell`, so that its state
            cannot be found.
        ValueError: If the path ends in another suffix, if two entries of the file would have the same name, if ranks
            give different paths or networks.
        RuntimeError: If an error or an interrupt stopped a batch or an update before its end; if a parameter was given
            new memory (by `mindspore.load_param_into_net`), which a compiled step does not train.
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
    require_python("save_checkpoint", _OUTSIDE)
    _save(path, network, accumulator, extra)


def _save(path: Union[str, os.PathLike], network: nn.Cell, accumulator: Any, extra: Any) -> None:
    # Not in `save_checkpoint`: MindSpore could not parse it, and would say so before `require_python` does.
    accumulator = _checked_accumulator(network, accumulator)
    boundary = accumulator.boundary
    exchange = accumulator.exchange
    exchange.announce(SAVE)
    exchange.compare_parameters()
    _require_one_path(path, exchange.ranks)
    path = checked_path(path)
    run = _together(exchange.ranks, lambda: _finished(network, accumulator, extra), OSError)
    with part_of(path) as part:
        contents = run.contents(part, int(accumulator.mini_step), extra)

        def write() -> None:
            if exchange.rank == 0:
                write_file(part, *contents)
                rename_file(part, path)

        _together(exchange.ranks, write, OSError)
    boundary.note_saved()


@_in_order
def load_checkpoint(path: Union[str, os.PathLike], network: nn.Cell, accumulator: Any, *,
                    keep_rates: bool = False) -> Any:
    """Load a file of `save_checkpoint` into a network and an accumulator.

    With the same arguments, in a run that has not trained yet, the resumed training is bit-identical. A run that has
    trained keeps its unit of microbatch weights, so results differ by rounding. Everything is checked before anything
    is loaded. Nothing in the file is executed.

    Learning rates, momentum, weight decay and schedules are those that the script gives now, not those of the file. A
    list of rates is read from the update that the file has reached; it may be longer or shorter. A rate that was
    changed in training, or a number in `param_groups`, is loaded from the file, unless the script gives another initial
    one. One warning says what differs.
    In an optimizer of your own, only Parameters called `learning_rate` or `lr` are known as rates.

    If the window was closed (saved when `train_step.updated` is true, or after a flush), the accumulator may have other
    arguments, too; the same warning names them. A loss scaler, a noise scale or a stage that the file lacks, and a loss
    scaler with other arguments, begin as the script gives them. Such state that only the file holds is dropped. With a
    different number of ranks or `DataParallel`, every rank gets rank 0's values of `extra` and of
    BatchNorm's statistics.

    With several ranks, every rank has to call it with the same path. Only rank 0 reads the file.

    An open window in this run is dropped. Buffers that this run has not needed yet (windows of one microbatch) are
    allocated only if the file holds an open window.

    Args:
        path: The path that was given to `save_checkpoint`.
        network: A network with the same parameters as the saved one; their values are replaced.
        accumulator: As in `save_checkpoint`.
        keep_rates: Whether to load learning rates and momentum from the file if the script gives others. The list of
            rates must have the same length. Schedules and weight decay are always the script's.

    Returns:
        `extra`.

    Raises:
        FileNotFoundError: If there is no such file.
        CheckpointError: If the file is truncated, damaged or not a checkpoint of ms_accum, or was saved with a
            different network or optimizer; the message names the entry. With an open window, the number
            of ranks and all arguments of the accumulator must be equal, too (functions are compared at 0, 1, 2, 4, …
            2**16 updates). With several ranks, all of them raise it. Of the arguments of the train step, only what
            weights count is compared: samples, or what a function says.
        OSError: If other code wrote to the file while it was read (a save of ms_accum never does). Later calls then
            raise RuntimeError, until a whole file is loaded.
        TypeError, ValueError: As in `save_checkpoint`; RuntimeError if a parameter was given new memory.

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
    accumulator = _checked_accumulator(network, accumulator)
    boolean("keep_rates", keep_rates, "say whether learning rates stay those of the file")
    boundary, exchange = accumulator.boundary, accumulator.exchange
    exchange.announce(LOAD)
    rank, ranks = exchange.rank, exchange.ranks
    _require_one_path(path, ranks)
    path = path_to_load(path)
    run = _together(ranks, lambda: _State(network, accumulator), CheckpointError)
    with ExitStack() as opened:
        entries, about = _together(ranks, lambda: read_file(path, opened) if rank == 0 else ({}, {}), CheckpointError)
        if ranks > 1:
            entries, about = _described_by_rank_0(entries, about)
        found, notes = _together(ranks, lambda: run.checked(path, entries, about, keep_rates), CheckpointError)
        own = partial(_own, about, rank if run.exchanged_alike(about) else 0)
        has_place = run.exchanged_alike(about) and about.get("has_place", True)  # older files do not say it
        with boundary.loading(about["open"], has_place, own("logged"), about.get("loops", False), own("samples")):
            for name, entry in found.items():
                run.take(name, _value(entry, ranks))
                # Otherwise MindSpore queues the entries, and holds several. Operations run in order, so that the entry
                # is freed before the next one has a value (measured on CPU, where there is nothing to synchronize).
                synchronize()
                (Tensor(0) + 1).asnumpy()
    notes += load_options(accumulator.optimizer, run.first_options, *about.get("options", ([], [])))
    if keep_rates:
        boundary.given = {**run.given, **{name: about["given"][name] for name in run.kept(about, entries)}}
    if notes and rank == 0:
        warn(f"{path} was saved by a run that differs from this one: {', '.join(notes)}", UserWarning, stacklevel=3)
    return own("extra")


def _own(about: dict, rank: int, name: str) -> Any:
    """Return a rank's value of `name` in the description of a file."""
    return about.get(f"rank{rank}:{name}", about.get(name, ()))


def _checked_accumulator(network: object, accumulator: object) -> Accumulator:
    """Return the accumulator, or that of a train step or cell. Raise TypeError if an argument is of the wrong kind."""
    remedy = "give path, network, accumulator"
    instance_of("network", network, nn.Cell, "a mindspore.nn.Cell", remedy)
    return instance_of("accumulator", getattr(accumulator, "accumulator", accumulator), Accumulator,
                       "an Accumulator, a train step or a TrainOneStepCell", remedy)


def _together(ranks: int, do: Callable[[], Any], failure: type[Exception]) -> Any:
    return together(do, failure) if ranks > 1 else do()


def _require_one_path(path: Union[str, os.PathLike], ranks: int) -> None:
    """Raise ValueError on every rank if the ranks give different paths."""
    if ranks > 1 and differing([str(path).encode()]).any():
        given = ", ".join(f"{text_by(rank, str(path))} on rank {rank}" for rank in range(ranks))
        raise ValueError(f"the path is {given}; give every rank the same; rank 0 reads and writes the file")


def _described_by_rank_0(entries: dict[str, Entry], about: dict) -> tuple[dict[str, Entry], dict]:
    """Return, on every rank, the entries of the file that rank 0 has opened, and its description."""
    listed = [(entry.name, entry.dtype.name, entry.shape) for entry in entries.values()]
    listed, about = json.loads(text_by(0, json.dumps([listed, about])))
    return entries or {name: Entry(None, name, np.dtype(dtype), tuple(shape)) for name, dtype, shape in listed}, about


def _value(entry: Entry, ranks: int) -> Tensor:
    """Return, on every rank, the value of an entry that rank 0 reads."""
    value = _together(ranks, entry.read, OSError)
    return Tensor.from_numpy(sent_by(0, value.asnumpy())) if ranks > 1 else value


# --- what a file holds ------------------------------------------------------------------------------------------------


class _State:
    """Hold what a run saves and loads.

    Attributes:
        entries: All state by its name in the file: Parameters, and the network's buffers.
        buffers: These. Older files do not hold them.
        divided: For each entry of which this rank holds only a slice (ZeRO), the whole parameter.
        of_window: The names of entries that are only needed while a window is open.
        of_stages: The names of entries that may be missing if no window is open.
        settings: Settings that must be equal in the run that resumes if a window is open.
        given: What the script gave the optimizer; see `given_to`.
        reached: Of these, the rates that differ now.
        losses: Those of the open window that a `WindowLog` has seen.
        samples, has_place, first_options: See `Boundary`.
        options: What these are now.
    """

    def __init__(self, network: nn.Cell, accumulator: Accumulator) -> None:
        optimizer = instance_of("the optimizer", accumulator.optimizer, nn.Cell, "an nn.Cell, whose state can be found")
        self.buffers = buffers_of(network)
        named: list[tuple[str, Tensor]] = [*((p.name, p) for p in network.get_parameters()), *self.buffers.items()]
        # An accumulator's number counts those that were built before it, which may be others in the next process.
        named += [(f"optimizer:{own_name(optimizer, name)}", p)
                  for name, p in (*((p.name, p) for p in accumulator.weights), *state_of(optimizer))]
        named += [(f"accumulator:{name}", p) for name, p in accumulator.state.items()]
        self.entries: dict[str, Tensor] = {}
        once = {id(p): (name, p) for name, p in reversed(named)}  # the first name wins
        for name, parameter in reversed(once.values()):
            if name in (*RESERVED, *self.entries) or _OF_RANK.match(name):
                raise ValueError(f"two entries of the checkpoint would be called {name}; rename one of the parameters")
            self.entries[name] = parameter
        boundary, window = accumulator.boundary, accumulator.window
        boundary.require_same_memory()
        boundary.follow_groups()
        boundary.keep_place()
        self.settings = dict(boundary.settings)
        exchange = self.exchange = accumulator.exchange
        divided = divided_state(optimizer)
        self.divided = {name: divided[id(p)] for name, p in self.entries.items() if id(p) in divided}
        self.copied = {id(p) for _, p in state_of(optimizer)} - set(divided)
        if exchange.divides_buffers:  # a slice of a bucket fits only the same parameters in the same order
            order = repr([(p.name, p.shape) for p in accumulator.weights]).encode()
            self.settings["reducer"] += f", parameters {sha256(order).hexdigest()[:16]}"
        open_state = {id(p) for p in window.window_state}
        self.of_window = {f"accumulator:{name}" for name, p in accumulator.state.items() if id(p) in open_state}
        of_stages = {id(p) for stage in window.stages for p in stage.run_state}
        self.of_stages = [f"accumulator:{name}" for name, p in accumulator.state.items() if id(p) in of_stages]
        boundary.note_given()
        self.given = boundary.given
        self.reached = {name: text for name, text in rate_texts(optimizer).items()
                        if self.given.get(name, {}).get(name, text) != text}
        self.losses, self.samples = boundary.losses(), boundary.samples
        self.loops, self.has_place = boundary.has_epochs, boundary.has_place
        self.first_options, self.options = boundary.first_options, options_of_groups(optimizer)

    def exchanged_alike(self, about: dict) -> bool:
        """Return whether the checkpoint has the same ranks and exchange, so that it holds each rank's own entries."""
        return about.get("reducer") == self.settings["reducer"]

    def take(self, name: str, value: Tensor) -> None:
        """Set an entry to this rank's part of a loaded value, if it is not another rank's."""
        name = name.removeprefix(f"rank{self.exchange.rank}:")
        if name in self.entries:
            part = self.exchange.cut(value, self.divided[name]) if name in self.divided else value
            # Not set_data: a graph that is compiled already would keep the old values (MindSpore 2.10).
            ops.assign(self.entries[name], part)

    def contents(self, part: Path, held: int, extra: Any) -> tuple[dict[str, np.ndarray], dict]:
        """Return, for rank 0, the entries of the file and their description. All ranks have to call it.

        `held`: the number of microbatches in the open window. Rank 0 puts what others send on its disk, beside `part`.
        """
        ranks = self.exchange.ranks
        is_open = bool(gather(np.array([held], np.int32)).any() if ranks > 1 else held)  # on all ranks if it is on one
        left_out = self.divided.keys() | (set() if is_open else self.of_window - {_UNIT})
        entries = {name: p.asnumpy() for name, p in self.entries.items() if name not in left_out}
        about = {**self.settings, "open": is_open, "extra": extra, "given": self.given, "reached": self.reached,
                 "of_stages": self.of_stages, "logged": self.losses if is_open else (), "loops": self.loops,
                 "has_place": self.has_place, "samples": self.samples,
                 "options": [self.first_options, self.options]}
        if ranks > 1:
            self._gather(part, entries, about)
        return entries, about

    def _gather(self, part: Path, entries: dict[str, np.ndarray], about: dict) -> None:
        """Add divided state, and what differs on other ranks, one entry after the other.

        Raise ValueError if ranks have other entries, or if state of a divided optimizer that is not divided differs,
        because another number of ranks would get only rank 0's.
        """
        def keep(name: str, value: np.ndarray) -> None:
            place = part.with_name(f"{len(entries)}.state")
            entries[name] = together(lambda: on_disk(value, place) if self.exchange.rank == 0 else np.empty(0), OSError)

        names = ("extra", "logged", "samples")
        own, described = dict(entries), json.dumps([about[name] for name in names])
        require_alike({"what a checkpoint holds": repr([(name, p.dtype, p.shape) for name, p in self.entries.items()])},
                      "give every rank the same network and arguments")
        if self.exchange.divides_parameters:
            require_alike({name: p.asnumpy().tobytes() for name, p in self.entries.items() if id(p) in self.copied},
                          "ms_accum finds state of slices by its name, which has to end in the parameter's")
        for name, whole in self.divided.items():
            state = self.entries[name]
            keep(name, self.exchange.joined(state, whole).astype(state.asnumpy().dtype, copy=False))  # bfloat16
        for rank, (other, *differs) in enumerate(differing([described.encode(), *map(bits_of, own.values())])):
            if other:
                values = json.loads(text_by(rank, described))
                about |= {f"rank{rank}:{name}": value for name, value in zip(names, values)}
            for name in compress(own, differs):
                keep(f"rank{rank}:{name}", sent_by(rank, own[name]))

    def kept(self, about: dict, found: dict[str, Entry]) -> list[str]:
        """Return the names of the rates that differ from the file's, and that both hold as Parameters."""
        return [name for name, given in about.get("given", {}).items() if given != self.given.get(name)
                and f"optimizer:{name}" in found and f"optimizer:{name}" in self.entries]

    def checked(self, path: Path, found: dict[str, Entry], about: dict, keep_rates: bool
                ) -> tuple[dict[str, Entry], list[str]]:
        """Return the entries to load, and texts of what differs. First rank 0's, which those of other ranks replace.

        Raise CheckpointError if a file with this description does not fit this run.
        """
        changed = [name for name, value in self.settings.items() if about.get(name, value) != value]
        if about["open"] and changed:
            name, value = changed[0], self.settings[changed[0]]
            raise CheckpointError(f"{path} was saved in an open window with {name} {about[name]}, but this run has "
                                  f"{value}; load it with the old settings, train to the end of the window or "
                                  "call flush(), save, and load that file with the new ones")
        notes = [f"{name} {about[name]} -> {self.settings[name]}" for name in changed]
        # Older files do not know it, or not the class.
        given: dict[str, dict[str, str]] = {CLASS: self.given.get(CLASS, {}), **about.get("given", self.given)}
        of_script = [name for name in {**given, **self.given}
                     if given.get(name) != self.given.get(name) and name != "initial_lr"]  # of a scheduler
        # A rate that was lowered in training: "0.1 -> 0.05" alone would not say that the run had reached 0.01.
        reached = {name: {name: f"{given[name].get(name)} ({text} when it was saved)"}
                   for name, text in about.get("reached", {}).items() if name in given}
        notes += [note for name in of_script
                  for note in changes(name, reached.get(name, given.get(name, {})), self.given.get(name, {}))]
        # A rate lowered before a return to the best file: the file's holds again.
        notes += [f"{name} {text} -> {value} (set it again after the load)" for name, text in self.reached.items()
                  if name not in of_script and f"optimizer:{name}" in found
                  and text != (value := about.get("reached", {}).get(name, given[name].get(name)))]
        alike = self.exchanged_alike(about)
        ignored = {_TORN} if alike else {_TORN, _UNIT}
        if keep_rates:
            kept = self.kept(about, found)
            others = [name for name in of_script if name not in kept and name != CLASS]
            notes += [f"keep_rates=True keeps {' and '.join(kept)} of the file"] if kept else []
            notes += [f"keep_rates=True does not keep {' and '.join(others)}"] if others else []
            for name in kept:
                old, new = found[f"optimizer:{name}"].shape, self.entries[f"optimizer:{name}"].shape
                if tuple(old) != tuple(new):
                    raise CheckpointError(f"{path}: keep_rates=True cannot keep {name}, which has the shape "
                                          f"{tuple(old)} in the file and {tuple(new)} in this run; give as many rates "
                                          "as before, or leave keep_rates out")
        else:
            ignored |= {f"optimizer:{name}" for name in of_script}
        if not about["open"]:
            of_stages = {*about.get("of_stages", ()), *self.of_stages}
            fresh = {name for name in of_stages if (name in found) != (name in self.entries)
                     or ("loss_scaler" in changed and name.startswith(_SCALER))}
            notes += [f"{name} {'starts afresh' if name in self.entries else 'is dropped'}" for name in sorted(fresh)]
            ignored |= fresh
        of_rank_0 = {name: e for name, e in found.items() if name not in ignored and not _OF_RANK.match(name)}
        of_others = {name: e for name, e in found.items()
                     if alike and _OF_RANK.match(name) and _OF_RANK.sub("", name) not in ignored}
        start = f"rank{self.exchange.rank}:"
        own = {name.removeprefix(start): e for name, e in of_others.items() if name.startswith(start)}
        # Older files do not count empty windows.
        missing = self.buffers.keys() - found.keys()
        notes += [f"buffer {name} starts afresh" for name in sorted(missing)]
        unneeded = {*ignored, *missing, _EMPTY, *(() if about["open"] else self.of_window)}
        classes = "".join(f" ({text})" for text in changes(CLASS, given[CLASS], self.given.get(CLASS, {})))
        remedy = ("build network, optimizer and accumulator with the same arguments, or load the weights alone, with "
                  f"ms_accum.load_weights{classes}")
        _require_entries(path, {**of_rank_0, **own}, unneeded, {**self.entries, **self.divided}, self.entries, remedy)
        return {**of_rank_0, **of_others}, notes


def _finished(network: nn.Cell, accumulator: Accumulator, extra: Any) -> _State:
    """Return what to save. Raise RuntimeError if an error or an interrupt stopped a batch or an update.

    Raise TypeError if `extra` is not a JSON value.
    """
    json_of(extra)
    require_whole(int(accumulator.window.unfinished))
    return _State(network, accumulator)


def _require_entries(path: Path, found: dict[str, Entry], unneeded: set[str], shaped: dict[str, Tensor],
                     entries: dict[str, Tensor], remedy: str) -> None:
    """Raise CheckpointError unless the file holds all entries, in the shapes of `shaped`."""
    for name in {**entries, **found}:
        held = _described(found.get(name), found.get(name))
        wanted = _described(entries.get(name), shaped.get(name))
        if held != wanted and (name in found or name not in unneeded):
            raise CheckpointError(f"{path}: {name} is {held} in the file, but {wanted} in this run; {remedy}")
    if _SCALE in found and found[_SCALE].reader is not None:
        try:
            require_scale(found[_SCALE].read())
        except ValueError as error:
            raise CheckpointError(f"{path}: in {_SCALE}, {error}") from error


def _described(entry: Any, shaped: Any) -> str:
    return "missing" if entry is None else f"of {str(entry.dtype).lower()} {tuple(shaped.shape)}"
