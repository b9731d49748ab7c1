"""Checkpoints: everything that training in the middle of a window consists of.

The network's parameters have their own names in the file, so that `mindspore.load_checkpoint` reads them. Beside them
are "optimizer:<name>" and "accumulator:<name>".
"""
from __future__ import annotations

import os
import re
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from hashlib import sha256
from pathlib import Path
from secrets import token_hex
from typing import Any, Union

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn, ops

from .accumulator import Accumulator
from .arguments import instance_of
from .checkpoint_file import (
    ABOUT,
    CheckpointError,
    checked_path,
    one_line,
    path_of_rank,
    read_file,
    remove_generations,
    rename_file,
    write_file,
)
from .distributed.ranks import gather, together
from .loss_scale import require_scale
from .optimizers import state_of
from .resharding import Arrays, Sharing, dealt, gathered, why_not_shared, why_other_lengths

_OF_OTHERS = "0" * 16  # stands for a generation
_INSTANCE = re.compile(r"^accumulator\d+\.")
_ALIKE = "build network, optimizer and accumulator alike"


def save_checkpoint(
    path: Union[str, os.PathLike],
    network: nn.Cell,
    accumulator: Accumulator,
    *,
    extra: Any = None,
) -> None:
    """Save all state, also in the middle of a window, so that resumed training is bit-identical.

    Saved are the parameters of the network, the optimizer's state (moments, update count, learning rates that are
    Parameters), the accumulator's buffers, weights and counters, its loss scaler, and `extra`. The state of random
    layers is not saved, because MindSpore 2.10 does not give access to it on CPU (`get_rng_state` covers none of its
    kernels): pass masks as arguments of the batch, drawn from a seed and the position in the data, which `extra` holds.

    The file is written beside `path`, flushed to the disk and renamed, so a process that is killed at any moment leaves
    the old file or the new one, complete. (`mindspore.save_checkpoint` removes the old file first.) The next save on
    the same host removes what a killed process left. Several processes may save to one path at once; the last one wins.
    With several ranks, every rank has to call it with the same path, and only one such run at a time may use the path.
    The files are `<stem>.rank<r>of<n>-<generation><suffix>`; they become valid together when rank 0 renames its own.

    Args:
        path: Ends in ".ckpt" or ".safetensors", MindSpore's formats.
        network: The network whose parameters the optimizer updates.
        accumulator: Its accumulator.
        extra: Any JSON value: epoch, position in the data, seed. NaN and infinity are kept.

    Raises:
        TypeError: If `network` is not a Cell or `accumulator` not an Accumulator; if `extra` cannot be written as JSON,
            or would be read back as something else (tuples, keys that are no str); if the optimizer is no `nn.Cell`, so
            that its state cannot be found.
        ValueError: If the suffix is another one, or a parameter of the network has the same name as an entry of the
            file.
        OSError: If the file cannot be written; the old one is still there. With several ranks, on all of them.

    Source: databases write beside the old file, fsync and rename; the format is MindSpore's.

    Example:
        >>> import os, tempfile, mindspore as ms
        >>> from mindspore import nn
        >>> from ms_accum import Accumulator, save_checkpoint
        >>> network = nn.Dense(2, 1, weight_init="ones")
        >>> accumulator = Accumulator(nn.SGD(network.trainable_params(), learning_rate=0.5), 2, reduction="mean")
        >>> path = os.path.join(tempfile.mkdtemp(), "run.ckpt")
        >>> save_checkpoint(path, network, accumulator)
        >>> print(ms.load_checkpoint(path)["weight"].asnumpy())  # MindSpore reads the network's weights out of it
        [[1. 1.]]
    """
    path = checked_path(path)
    _require_network_and_accumulator(network, accumulator)
    rank, ranks = accumulator.reducer.rank, accumulator.reducer.ranks
    if ranks == 1:
        write_file(path, *_contents(network, accumulator, extra, 0, ""))
        return
    generation = _generation_of_rank_0(token_hex(8))
    mine = path_of_rank(path, rank, ranks, generation)
    # Until rank 0's file has its name, the others belong to no checkpoint.
    part = path.with_name(f".{path.stem}.rank0of{ranks}-{generation}{path.suffix}") if rank == 0 else mine
    try:
        together(lambda: write_file(part, *_contents(network, accumulator, extra, rank, generation)), OSError)
    except Exception:
        _drop(part)
        raise
    try:
        together(lambda: rename_file(part, path) if rank == 0 else None, OSError)
    except OSError:  # and no other error: it is rank 0's, which has renamed nothing
        _drop(part)
        raise
    remove_generations(path, rank, ranks, mine)


def load_checkpoint(path: Union[str, os.PathLike], network: nn.Cell, accumulator: Accumulator) -> Any:
    """Load what `save_checkpoint` saved into a network and an accumulator that are built with the same arguments.

    Everything is checked before anything is loaded. Nothing in the file is executed.

    The number of ranks and the `DataParallel` may be others, also in the middle of a window. Give an `accumulate_step`
    such that ranks times `accumulate_step` stays: 4 on 4 ranks, 8 on 2, 16 on one. (A schedule, `until_weight` and
    `AdaptiveWindow` are scaled alike.) What the open window holds is kept: rank 0 gets the sum of its gradients in one
    unit of weights, and its microbatches are dealt out to the ranks one by one. Each rank reads the files of all ranks
    that saved, so all have to see them. What was rank 0's alone goes to every rank: `extra`, and parameters that the
    optimizer does not update, such as statistics of BatchNorm.

    Args:
        path: The file that was given to `save_checkpoint`.
        network: A network with the parameters that were saved, of any values.
        accumulator: An accumulator built with the same arguments as the one that was saved. If the train step has a
            loss scaler, build the train step first.

    Returns:
        `extra`.

    Raises:
        FileNotFoundError: If there is no such file.
        CheckpointError: If the file is truncated, damaged or no checkpoint of ms_accum, or belongs to another network,
            optimizer, `accumulate_step` (functions are compared at 0, 1, 2, 4, … 2**16 updates), `reduction`,
            `clip_norm`, `on_nonfinite` or decay of a noise scale; it names the entry. Also if these ranks cannot share
            its windows or the open one; it says which can. With several ranks, on all of them. Not compared are
            arguments of the optimizer that are not Parameters, factor and window of a loss scaler, and the train
            step's.
        TypeError: If `network` is not a Cell or `accumulator` not an Accumulator.

    Source: see `save_checkpoint`.

    Example:
        >>> import os, tempfile
        >>> from mindspore import nn
        >>> from ms_accum import Accumulator, load_checkpoint, save_checkpoint
        >>> network = nn.Dense(2, 1)
        >>> accumulator = Accumulator(nn.SGD(network.trainable_params(), learning_rate=0.5), 2, reduction="mean")
        >>> path = os.path.join(tempfile.mkdtemp(), "run.ckpt")
        >>> save_checkpoint(path, network, accumulator, extra={"epoch": 3, "position": 1200})
        >>> print(load_checkpoint(path, network, accumulator))
        {'epoch': 3, 'position': 1200}
    """
    path = checked_path(path)
    _require_network_and_accumulator(network, accumulator)
    rank, ranks = accumulator.reducer.rank, accumulator.reducer.ranks
    run = partial(together, failure=CheckpointError) if ranks > 1 else _alone
    first, generation = run(lambda: _read_first(path, accumulator) if rank == 0 else (None, ""))
    generation = _generation_of_rank_0(generation) if ranks > 1 else generation
    if generation == _OF_OTHERS:
        loaded, about = run(lambda: _resharded(path, network, accumulator))
    else:
        mine = path if rank == 0 else path_of_rank(path, rank, ranks, generation)
        loaded, about = run(lambda: _checked(mine, *(first or read_file(mine)), generation, network, accumulator))
    for name, parameter in _entries(network, accumulator).items():
        # Not set_data: a graph that is compiled already would go on with the old values (MindSpore 2.10).
        ops.assign(parameter, loaded[name] if name in loaded else ops.zeros_like(parameter))
    accumulator._settle_units()
    accumulator._count.start_over()
    accumulator._count.returned, accumulator._count.loaded = False, True
    return about["extra"]


def _drop(part: Path) -> None:
    """Remove a file that belongs to no checkpoint: it may be the last space of a full disk."""
    with suppress(OSError):  # the error that is being raised says more
        part.unlink(missing_ok=True)


def _require_network_and_accumulator(network: object, accumulator: object) -> None:
    remedy = "give path, network, accumulator"
    instance_of("network", network, nn.Cell, "a mindspore.nn.Cell", remedy)
    instance_of("accumulator", accumulator, Accumulator, "an Accumulator", remedy)


def _entries(network: nn.Cell, accumulator: Accumulator) -> dict[str, Parameter]:
    """Return all state by its name in the file."""
    parameters = list(network.get_parameters())
    entries = {p.name: p for p in parameters}
    if len(entries) < len(parameters):
        raise ValueError("two parameters of the network have the same name; build its layers as attributes of one Cell")
    known = {id(p) for p in parameters}
    others = [("optimizer", *named) for named in _optimizer_state(accumulator.optimizer)]
    others += [("accumulator", p.name, p) for p in accumulator.parameters]
    for kind, name, parameter in others:
        if id(parameter) in known:
            continue
        known.add(id(parameter))
        name = _entry_of(kind, name)
        if name in entries:
            raise ValueError(f"two entries of the checkpoint would be called {name}; rename one of the parameters")
        entries[name] = parameter
    if ABOUT in entries:
        raise ValueError(f"a parameter of the network is called {ABOUT}, which the checkpoint needs for itself; "
                         "rename it")
    return entries


def _of_further_losses(accumulator: Accumulator) -> list[str]:
    """Return the names of the buffers of all losses but the first."""
    return [_entry_of("accumulator", buffer.name) for buffer in accumulator.buffers[len(accumulator.buffer_dtypes):]]


def _entry_of(kind: str, name: str) -> str:
    # An accumulator's number counts those that were built before it, which may be others in the next process.
    return f"{kind}:{_INSTANCE.sub('', name)}"


def _optimizer_state(optimizer: Any) -> list[tuple[str, Parameter]]:
    instance_of("the optimizer", optimizer, nn.Cell, "an nn.Cell, whose state can be found")
    return [*((p.name, p) for p in optimizer.parameters), *state_of(optimizer)]


def _contents(
    network: nn.Cell, accumulator: Accumulator, extra: Any, rank: int, generation: str,
) -> tuple[dict[str, Parameter], dict]:
    """Return the entries of a rank's file, and what it says about them."""
    accumulator._require_whole()
    accumulator._finish_interrupted()
    entries = _entries(network, accumulator)
    if int(accumulator.mini_step) == 0:
        # They are empty, and a run that looks ahead has none.
        empty = _of_further_losses(accumulator)
        entries = {name: p for name, p in entries.items() if name not in empty}
    return entries, {
        **_settings(accumulator),
        "rank": rank,
        "generation": generation,
        "sharing": _described(_sharing(accumulator)),
        "entries": {name: [list(p.shape), str(p.dtype)] for name, p in entries.items()},
        "extra": extra,
    }


def _settings(accumulator: Accumulator) -> dict[str, Union[str, int]]:
    """Return what has to be the same in the run that resumes."""
    return {
        **accumulator._settings(),
        "ranks": accumulator.reducer.ranks,
        "reducer": accumulator.reducer.describe(),
        # A shard holds parts of parameters by their order alone.
        "parameters": _order(accumulator) if accumulator.reducer.sharded else "by name",
    }


def _order(accumulator: Accumulator) -> str:
    order = repr([(p.name, p.shape) for p in accumulator.optimizer.parameters]).encode()
    return sha256(order).hexdigest()[:16]


def _sharing(accumulator: Accumulator) -> Sharing:
    reducer = accumulator.reducer
    return Sharing(reducer.ranks, reducer.summed, [*map(list, reducer.buckets.members)] if reducer.sharded else [],
                   reducer.windows_apart, accumulator._units[0].is_state, accumulator.reduction == "sum")


def _described(sharing: Sharing) -> dict[str, Any]:
    return {"party": sharing.party, "buckets": sharing.buckets}


def _resharded(path: Path, network: nn.Cell, accumulator: Accumulator) -> tuple[dict[str, Tensor], dict]:
    """Read the files of all ranks of another run. Return the entries of this rank, and what rank 0's file says."""
    _require_seen(path)
    loaded, about = read_file(path)
    ranks, reducer = about["ranks"], accumulator.reducer
    kinds = (about["reducer"], reducer.describe())
    if any(kind.startswith("LocalUpdates") for kind in kinds):
        raise CheckpointError(f"{path} was saved with reducer {kinds[0]} and ranks {ranks}, but this run has "
                              f"{kinds[1]} and {reducer.ranks}; local updates need the same reducer and ranks")
    expected = accumulator._settings()
    lengths = expected.pop("accumulate_step")
    if about["parameters"] != "by name":
        expected["parameters"] = _order(accumulator)
    _require_settings(path, about, expected)
    refusal = why_other_lengths(about["accumulate_step"], ranks, lengths, reducer.ranks)
    if refusal:
        raise CheckpointError(f"{path} {refusal}")

    sharing = _sharing(accumulator)
    shapes = {p.name: tuple(p.shape) for p in accumulator.optimizer.parameters}
    files = (_as_arrays(loaded if rank == 0 else _read_of_rank(path, rank, about)) for rank in range(ranks))
    try:
        saved = Sharing(ranks, **about["sharing"])
        entries, window = gathered(files, saved, shapes, accumulator.losses)
    except CheckpointError:
        raise
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path} can only be resumed on {ranks} ranks as they were ({one_line(error)}); start "
                              "as many") from error
    refusal = why_not_shared(window, sharing, lengths)
    if refusal:
        raise CheckpointError(f"{path}: {refusal}")
    dtypes = {name: p.dtype for name, p in _entries(network, accumulator).items()}
    mine = {name: loaded[name] if value is entries.get(name) else Tensor(value, dtypes.get(name))
            for name, value in dealt(entries, window, saved, sharing, reducer.rank).items()}
    _require_entries(path, mine, network, accumulator)
    return mine, about


def _read_of_rank(path: Path, rank: int, about: dict) -> dict[str, Tensor]:
    """Return the entries of a rank's file, of which rank 0's says this."""
    found = path_of_rank(path, rank, about["ranks"], about["generation"])
    _require_seen(found)
    loaded, of_rank = read_file(found)
    if any(of_rank.get(name) != value for name, value in
           {"rank": rank, "ranks": about["ranks"], "generation": about["generation"]}.items()):
        raise CheckpointError(f"{found} does not belong to {path.name}; restore both from one copy")
    return loaded


def _require_seen(path: Path) -> None:
    if not path.exists():
        raise CheckpointError(f"there is no {path}, but with another number of ranks each reads the files of all ranks "
                              "that saved; put them where every rank sees them")


def _as_arrays(loaded: dict[str, Tensor]) -> Arrays:
    return {name: (value.astype(ms.float32) if value.dtype == ms.bfloat16 else value).asnumpy()
            for name, value in loaded.items()}


def _checked(path: Path, loaded: dict[str, Tensor], about: dict, generation: str, network: nn.Cell,
             accumulator: Accumulator) -> tuple[dict[str, Tensor], dict]:
    """Return what was read. CheckpointError unless it is of this network, this accumulator and this rank."""
    _require_settings(path, about, {**_settings(accumulator), "rank": accumulator.reducer.rank})
    if about.get("generation") != generation:
        raise CheckpointError(f"{path} does not belong to the file of rank 0; restore both from one copy")
    _require_entries(path, loaded, network, accumulator)
    return loaded, about


def _require_settings(path: Path, about: dict, settings: dict) -> None:
    for name, expected in settings.items():
        if about.get(name) != expected:
            raise CheckpointError(f"{path} was saved with {name} {about.get(name)}, but this run has {expected}; build "
                                  "it alike")


def _require_entries(path: Path, loaded: dict[str, Tensor], network: nn.Cell, accumulator: Accumulator) -> None:
    entries = _entries(network, accumulator)
    window_is_open = int(loaded.get("accumulator:mini_step", 1)) > 0
    left_out = [] if window_is_open else _of_further_losses(accumulator)
    for name in entries:
        if name not in loaded and name not in left_out:
            raise CheckpointError(f"{path} has no entry {name}, which this run needs; {_ALIKE}")
    for name, value in loaded.items():
        if name not in entries and accumulator._known:
            raise CheckpointError(f"{path} holds an open window of losses that are kept apart, but this run weighs its "
                                  "windows before it trains on them (accumulate_step=1, or lookahead=True); expected a "
                                  "closed window: save when train_step.updated is true")
        if name not in entries:
            raise CheckpointError(f"{path} has the entry {name}, which this run does not know; {_ALIKE}")
        _require_fitting(f"{path}: {name}", value, entries[name])
        if accumulator.loss_scaler is not None and entries[name] is accumulator.loss_scaler.scale_value:
            try:
                require_scale(value)
            except ValueError as error:
                raise CheckpointError(f"{path}: in {name}, {error}") from error


def _require_fitting(what: str, value: Tensor, wanted: Parameter) -> None:
    if tuple(value.shape) != tuple(wanted.shape):
        raise CheckpointError(f"{what} has shape {tuple(value.shape)}, but this run's has {tuple(wanted.shape)}; "
                              f"{_ALIKE}")
    if value.dtype != wanted.dtype:
        raise CheckpointError(f"{what} is of {value.dtype}, but this run's of {wanted.dtype}; {_ALIKE}")


def _read_first(path: Path, accumulator: Accumulator) -> tuple[tuple[dict[str, Tensor], dict], str]:
    """Read rank 0's file. Return it and its generation: `_OF_OTHERS` if this run's ranks share windows otherwise."""
    loaded, about = read_file(path)
    mine = {**_settings(accumulator), "sharing": _described(_sharing(accumulator))}
    same = all(about.get(name, mine[name]) == mine[name] for name in ("ranks", "reducer", "sharing"))
    return (loaded, about), about["generation"] if same else _OF_OTHERS


def _alone(do: Callable[[], Any]) -> Any:
    """Return the result of `do`."""
    return do()


def _generation_of_rank_0(mine: str) -> str:
    """Return rank 0's generation on every rank: 16 hexadecimal digits."""
    return gather(np.frombuffer((mine or "0" * 16).encode(), np.int32).copy())[0].tobytes().decode()
