"""What the commands of the reference runs share: options, checks, training, and the files that they write."""
from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from dataclasses import Field, fields, replace
from functools import partial
from glob import escape
from math import isfinite
from pathlib import Path
from typing import Any, NoReturn, Union

import mindspore as ms

from ..arguments import LARGEST_INT32
from ..batch_size.planning import DEVICES
from ..checkpoint_file import SUFFIXES, CheckpointError
from ..distributed.ranks import wait_for_all
from ..mnist.fetch import FetchError
from ..reference import figures, train
from ..reference.network import largest_difference
from ..reference.settings import ADAPTIVE, Settings
from ..reference.train import Checkpoints, Epoch, Task, nothing_logged
from .files import printable, require_outputs, say_written, write_json, write_png
from .options import add_renamed, count, number


def _length(text: str) -> Union[int, str]:
    return ADAPTIVE if text == ADAPTIVE else number(
        int, lambda n: 1 <= n <= LARGEST_INT32, f"a whole number from 1 to {LARGEST_INT32}, or {ADAPTIVE}", text)


# The type and the placeholder of each number that is not a count, or not written N.
_NUMBERS = {
    "seed": (partial(number, int, lambda n: n >= 0, "a whole number from 0"), "N"),
    "lr": (partial(number, float, lambda x: isfinite(x) and x > 0, "a finite number > 0"), "RATE"),
    "momentum": (partial(number, float, lambda x: 0 <= x < 1, "a number from 0 to below 1"), "M"),
    "clip_norm": (partial(number, float, lambda x: x > 0, "a number > 0"), "NORM"),
    "budget": (count, "TOKENS"),
    "accumulate_step": (_length, f"N|{ADAPTIVE}"),
}

_SCHEDULER_PATIENCE = "20"  # seconds


def add_options(training: Callable, output: Callable, settings: type[Settings], compare: str) -> None:
    """Add the options of a reference run. The first two arguments add one to its group; `compare` is a help text."""
    for setting in fields(settings):
        if setting.metadata:
            training(f"--{setting.name.replace('_', '-')}", **_described(setting))
    add_renamed(training, "--micro-size", "--pieces")
    training("--device-target", choices=DEVICES, default="CPU", help="(default: %(default)s)")
    training("--compare", action="store_true", help=compare)
    output("--json", type=Path, metavar="FILE", help="write all figures and options")
    output("--plot", type=Path, metavar="FILE.png", help="draw the curves of training and test; needs matplotlib")
    output("--save", type=Path, metavar="FILE.ckpt",
           help="write a checkpoint of the complete state at the end; .safetensors is the other format")
    output("--save-every", type=count, metavar="K", help="also write it after every K microbatches")
    output("--resume", type=Path, metavar="FILE.ckpt",
           help="continue from a checkpoint as if the run had never stopped; give the same options (--epochs may be "
                "larger). On another number of ranks, with any --accumulate-step, if it was saved between two windows: "
                "at the end, or with K a multiple of --accumulate-step")


def _described(setting: Field) -> dict[str, Any]:
    """Return what argparse needs to know of a setting."""
    text, choices, default = setting.metadata["help"], setting.metadata["choices"], setting.default
    if default is False:
        return {"action": "store_true", "help": text}
    described = {"default": default, "help": text if default is None else f"{text} (default: %(default)s)"}
    if choices:
        return {**described, "choices": choices}
    convert, metavar = _NUMBERS.get(setting.name, (count, "N"))
    return {**described, "type": convert, "metavar": metavar}


def run(prepare: Callable[[argparse.Namespace], Task], parser: argparse.ArgumentParser,
        options: argparse.Namespace) -> None:
    """Check, train, report, write. Exit with status 2 for a bad value, with 1 if a download or a file fails.

    `prepare` checks everything that can be checked before training. It raises ValueError, OSError or FetchError.
    """
    try:
        task = prepare(options)
    except FetchError as error:
        parser.exit(1, f"{parser.prog}: error: {error}\n")
    except (ValueError, OSError) as error:
        parser.error(str(error))
    try:
        runs, results = train_all(task, options)
        if task.settings.rank == 0:
            write_all(options, runs, results)
        if task.settings.ranks > 1:
            wait_for_all()  # where one exits, others that still communicate fail
    except BrokenPipeError:
        raise  # `main` handles a closed stdout
    except (CheckpointError, OSError) as error:
        parser.exit(1, f"{parser.prog}: error: {error}\n")


def _is_saved(path: Path) -> bool:
    """Return whether there is a checkpoint, or the part of one that a rank has on a disk of its own."""
    return path.is_file() or any(path.parent.glob(f"{escape(path.stem)}.rank*of*{escape(path.suffix)}"))


def settings_named(kind: type[Settings], options: argparse.Namespace, **others: Any) -> Settings:
    """Return the settings that the options name. Raises ValueError if options contradict each other."""
    resume = options.resume
    refuse({
        f"compare: needs windows of one length; leave out --accumulate-step {ADAPTIVE}":
            options.compare and options.accumulate_step == ADAPTIVE,
        "shard: requires --sync microbatch or node, because a rank keeps whole gradients until they are exchanged":
            options.shard and options.sync == "window",
        "ranks-per-node: requires --sync node": options.ranks_per_node and options.sync != "node",
        "save-every: requires --save FILE.ckpt": options.save_every and not options.save,
        "compare: trains twice and cannot be resumed; leave out --save-every and --resume":
            options.compare and (resume or options.save_every),
        f"resume: there is no file {resume}; give one that --save wrote": resume and not _is_saved(resume),
        f"resume: {resume} does not end in {' or '.join(SUFFIXES)}; give a file that --save wrote":
            resume and resume.suffix not in SUFFIXES,
    })
    named = {field.name: getattr(options, field.name) for field in fields(kind) if field.name in options}
    return kind(**named, **others)


def started(settings: Settings, options: argparse.Namespace) -> Settings:
    """Check the files to write, choose the device, join the other ranks; return this rank's settings."""
    require_outputs(options, json=("",), plot=(".png",), save=SUFFIXES)
    use_device(options.device_target)
    return join_ranks(settings)


def refuse(reasons: dict[str, object]) -> None:
    """Raise ValueError with the first argument and reason that are true."""
    for reason, applies in reasons.items():
        if applies:
            raise ValueError(f"argument --{reason}")


def refuse_sizes(task: Task, rows: int) -> None:
    """Raise ValueError if a rank's `rows` do not fill a microbatch, or a window is too short for the noise scale."""
    settings, of = task.settings, task.words.rows
    refuse({
        "noise-scale: compares the microbatches of a window, which holds only one; give --accumulate-step 2 or more, "
        "or --pieces 2":
            settings.noise_scale and settings.accumulate_step == settings.pieces == settings.ranks == 1,
        f"batch-size: a microbatch of {settings.batch_size} {of} cannot be filled from {rows}; choose at most {rows}":
            settings.batch_size > rows,
    })


def use_device(target: str) -> None:
    """Make `target` MindSpore's device. Raises ValueError if MindSpore or this machine does not have it."""
    if ms.get_context("device_target") == target:
        return  # once it has run something, MindSpore refuses even the same device
    try:
        with nothing_logged():  # on refusal MindSpore also logs a line for every missing library
            ms.set_device(target)
    except RuntimeError as error:
        reason = str(error).split("Please")[0].strip()
        raise ValueError(f"argument --device-target: {target} cannot be used here ({reason}); try --device-target "
                         "CPU") from error


def join_ranks(settings: Settings) -> Settings:
    """Join the other ranks if started by msrun, and return this rank's settings. Only rank 0 still prints."""
    if "MS_ROLE" not in os.environ:
        return settings
    from mindspore.communication import get_group_size, get_rank, init

    if os.environ["MS_ROLE"] == "MS_SCHED":
        _schedule(init)
    init()
    settings = replace(settings, ranks=get_group_size(), rank=get_rank())
    if settings.rank > 0:
        sys.stdout = open(os.devnull, "w", encoding="utf-8")
    return settings


def _schedule(init: Callable[[], None]) -> NoReturn:
    """Be the scheduler until all ranks have ended. Where they were killed, nobody but itself ends it."""
    os.environ.setdefault("MS_NODE_TIMEOUT", _SCHEDULER_PATIENCE)
    try:
        init()
    except RuntimeError as error:
        said = " ".join(str(error).split("\n\n")[0].split())  # MindSpore's call stack follows
        print(f"ms-accum: the scheduler stops: {said}", file=sys.stderr, flush=True)
        sys.exit(1)
    sys.exit(0)


def train_all(task: Task, options: argparse.Namespace) -> tuple[figures.Runs, dict]:
    """Train, with --compare both ways, and print; return the epochs of each run, and all figures."""
    print(printable(figures.header(task, options.device_target)), flush=True)

    def resumed(epochs: int, microbatches: int) -> None:
        print(f"resumed    {printable(options.resume)}: {epochs} epochs and {microbatches:,} microbatches done")

    epochs = _train(task, Checkpoints(options.save, options.save_every, options.resume, resumed))
    runs, results = [(task, epochs)], figures.figures(task, epochs)
    if task.settings.noise_scale:
        print(figures.critical_batch(task, epochs), flush=True)
    if options.compare:
        other = task.counterpart()
        print(f"{other.label}: {other.describe_batch()}", flush=True)
        runs.append((other, _train(other, Checkpoints())))
        difference = largest_difference(task.network, other.network)
        print(figures.comparison(runs, difference), flush=True)
        results["max_parameter_difference"] = difference
        results[other.label.replace(" ", "_")] = figures.figures(*runs[1])
    for name, text in task.closing().items():
        print(f"{name:<9}  {text}", flush=True)
        results[name] = text
    return runs, {
        **results,
        "options": {name: str(value) if isinstance(value, Path) else value
                    for name, value in vars(options).items() if name != "run"},
        "gradients": task.settings.gradients,
        "device": options.device_target,
        "data": task.data_figures(),
        "versions": figures.versions(),
    }


def _train(task: Task, checkpoints: Checkpoints) -> list[Epoch]:
    epochs = []
    progress = figures.Progress(task)
    try:
        for epoch in train.train(task, progress, checkpoints):
            print(figures.epoch_line(epoch, task), flush=True)
            epochs.append(epoch)
    finally:
        progress.close()
    return epochs


def write_all(options: argparse.Namespace, runs: figures.Runs, results: dict) -> None:
    """Write the files that the options name. Raises OSError if one cannot be written after all."""
    if options.save:
        say_written(options.save)
    if options.json:
        write_json(options.json, results)
    if options.plot:
        write_png(options.plot, figures.plot(runs))
