"""The command `ms-accum mnist`: its options, and what it runs in which order."""
from __future__ import annotations

import argparse
import logging
import os
import sys
from dataclasses import Field, fields, replace
from functools import partial
from math import isfinite
from pathlib import Path
from typing import Any

import mindspore as ms

from ..batch_size.planning import DEVICES
from ..checkpoint import SUFFIXES, CheckpointError
from ..distributed.ranks import wait_for_all
from ..mnist import data, figures, train
from ..mnist.fetch import FetchError
from ..mnist.network import Network, largest_difference
from ..mnist.settings import Settings
from .files import printable, require_outputs, say_written, write_json, write_png
from .options import add_command, count, number

DESCRIPTION = """\
Train the network of MindSpore's gradient accumulation tutorial (784-512-512-10, ReLU, cross entropy) on handwritten
digits, in microbatches whose gradients are accumulated, and test it after each epoch. The last window of an epoch is
flushed: no gradient is lost and none leaks into the next epoch."""

EXAMPLES = """\
examples:
  ms-accum mnist                                 # the digits in the package, no network needed
  ms-accum mnist --data full --compare           # all of MNIST, against the undivided batch
  ms-accum mnist --batch-size 16 --accumulate-step 4 --json run.json --plot run.png
  ms-accum mnist --noise-scale --plot run.png    # how large a batch is worth it?
  ms-accum mnist --save run.ckpt --save-every 100 # if it stops, run the same with --resume run.ckpt
  msrun --worker_num=2 --local_worker_num=2 --join=True --log_dir=ranks --tail_worker_log=0 python -m ms_accum mnist"""

# The type and the placeholder of each number that is not a count.
_NUMBERS = {
    "seed": (partial(number, int, lambda n: n >= 0, "a whole number from 0"), "N"),
    "lr": (partial(number, float, lambda x: isfinite(x) and x > 0, "a finite number > 0"), "RATE"),
    "momentum": (partial(number, float, lambda x: 0 <= x < 1, "a number from 0 to below 1"), "M"),
    "clip_norm": (partial(number, float, lambda x: x > 0, "a number > 0"), "NORM"),
}


def add_parser(subcommands: argparse._SubParsersAction) -> None:
    """Add `mnist` to the commands of `ms-accum`."""
    parser = add_command(subcommands, "mnist", run, "train on handwritten digits with accumulated gradients",
                         DESCRIPTION, EXAMPLES)
    training = parser.add_argument_group("training").add_argument
    training("--data", default="embedded", metavar="{embedded,full,DIR}",
             help="embedded: 10,000 + 2,000 digits of MNIST in the package; full: all 60,000 + 10,000, downloaded once "
                  "into the user's cache; DIR: a folder that holds train/ and test/ with the idx files "
                  "(default: %(default)s)")
    for setting in fields(Settings):
        if setting.metadata:
            training(f"--{setting.name.replace('_', '-')}", **_described(setting))
    training("--device-target", choices=DEVICES, default="CPU", help="(default: %(default)s)")
    training("--compare", action="store_true",
             help="also train with each window as one undivided batch, from the same weights and on the same order of "
                  "digits, and print the largest difference between the parameters; both trainings then compute "
                  "gradients in float64 (float32 on Ascend), several times slower")
    output = parser.add_argument_group("output").add_argument
    output("--json", type=Path, metavar="FILE", help="write all figures and options")
    output("--plot", type=Path, metavar="FILE.png", help="draw loss and accuracy; needs matplotlib")
    output("--save", type=Path, metavar="FILE.ckpt",
           help="write a checkpoint of the complete state at the end; .safetensors is the other format")
    output("--save-every", type=count, metavar="K", help="also write it after every K microbatches")
    output("--resume", type=Path, metavar="FILE.ckpt",
           help="continue from a checkpoint as if the run had never stopped; give the same options (--epochs may be "
                "larger)")


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


def run(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Check, train, report, write. Exit with status 2 for a bad value, with 1 if a download or a file fails."""
    try:
        settings, mnist = prepare(options)
    except FetchError as error:
        parser.exit(1, f"{parser.prog}: error: {error}\n")
    except (ValueError, OSError) as error:
        parser.error(str(error))
    try:
        runs, results = train_all(settings, mnist, options)
        if settings.rank == 0:
            write_all(options, runs, results)
    except BrokenPipeError:
        raise  # `main` handles a closed stdout
    except (CheckpointError, OSError) as error:
        parser.exit(1, f"{parser.prog}: error: {error}\n")
    finally:
        if settings.ranks > 1:
            wait_for_all()


def prepare(options: argparse.Namespace) -> tuple[Settings, data.Mnist]:
    """Check everything that can be checked before training. Raises ValueError, OSError or FetchError."""
    settings = settings_of(options)
    require_outputs(options, json=("",), plot=(".png",), save=SUFFIXES)
    use_device(options.device_target)
    settings = join_ranks(settings)
    mnist = data.load(options.data)
    digits = len(mnist.train) // settings.ranks
    _refuse({
        "compare: cannot be used with several ranks, because MindSpore exchanges no float64; leave it out, or run "
        "without msrun": options.compare and settings.ranks > 1,
        "noise-scale: compares the microbatches of a window, which holds only one; give --accumulate-step 2 or more, "
        "or --micro-size 2":
            settings.noise_scale and settings.accumulate_step * settings.micro_size * settings.ranks == 1,
        f"batch-size: a microbatch of {settings.batch_size} digits cannot be filled from {digits}; choose at most "
        f"{digits}": settings.batch_size > digits,
    })
    return settings, mnist


def settings_of(options: argparse.Namespace) -> Settings:
    """Return the settings that the options name. Raises ValueError if options contradict each other."""
    resume = options.resume
    _refuse({
        "momentum: adam takes none; leave it out, or choose --optimizer sgd or momentum":
            options.optimizer == "adam" and options.momentum is not None,
        "shard: requires --sync microbatch, because a rank keeps whole gradients until they are exchanged":
            options.shard and options.sync == "window",
        "micro-size: ranks that exchange each microbatch cannot cut it; leave out --sync microbatch, or choose a "
        "smaller --batch-size": options.micro_size > 1 and options.sync == "microbatch",
        "strategy: a Model trains one Cell, which is one graph; leave out --strategy split or --api model":
            options.api == "model" and options.strategy == "split",
        "save-every: requires --save FILE.ckpt": options.save_every and not options.save,
        "compare: trains twice and cannot be resumed; leave out --save-every and --resume":
            options.compare and (resume or options.save_every),
        f"resume: there is no file {resume}; give one that --save wrote": resume and not resume.is_file(),
        f"resume: {resume} does not end in {' or '.join(SUFFIXES)}; give a file that --save wrote":
            resume and resume.suffix not in SUFFIXES,
    })
    # No float64 on Ascend's matrix units.
    comparable = options.compare and options.device_target != "Ascend"
    named = {field.name: getattr(options, field.name) for field in fields(Settings) if field.name in options}
    return Settings(**named, gradients="float64" if comparable else "float32")


def _refuse(reasons: dict[str, object]) -> None:
    """Raise ValueError with the first argument and reason that are true."""
    for reason, applies in reasons.items():
        if applies:
            raise ValueError(f"argument --{reason}")


def use_device(target: str) -> None:
    """Make `target` MindSpore's device. Raises ValueError if MindSpore or this machine does not have it."""
    if ms.get_context("device_target") == target:
        return  # once it has run something, MindSpore refuses even the same device
    # On refusal MindSpore also logs a line for every missing library.
    logged = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        ms.set_device(target)
    except RuntimeError as error:
        reason = str(error).split("Please")[0].strip()
        raise ValueError(f"argument --device-target: {target} cannot be used here ({reason}); try --device-target "
                         "CPU") from error
    finally:
        logging.disable(logged)


def join_ranks(settings: Settings) -> Settings:
    """Join the other ranks if started by msrun, and return this rank's settings. Only rank 0 still prints."""
    if "MS_ROLE" not in os.environ:
        return settings
    from mindspore.communication import get_group_size, get_rank, init

    init()
    settings = replace(settings, ranks=get_group_size(), rank=get_rank())
    if settings.rank > 0:
        sys.stdout = open(os.devnull, "w", encoding="utf-8")
    return settings


def train_all(settings: Settings, mnist: data.Mnist, options: argparse.Namespace) -> tuple[figures.Runs, dict]:
    """Train, with --compare both ways, and print; return the epochs of each run by name, and all figures."""
    print(figures.header(settings, mnist, printable(options.data), options.device_target), flush=True)

    def resumed(epochs: int, microbatches: int) -> None:
        print(f"resumed    {printable(options.resume)}: {epochs} epochs and {microbatches:,} microbatches done")

    checkpoints = train.Checkpoints(options.save, options.save_every, options.resume, resumed)
    network, epochs = _train(settings, mnist, checkpoints)
    runs, results = {"accumulated": epochs}, figures.figures(settings, epochs)
    if settings.noise_scale:
        print(figures.critical_batch(settings, epochs), flush=True)
    if options.compare:
        undivided = settings.undivided()
        print(f"undivided: {figures.batch(undivided)}", flush=True)
        other, runs["undivided"] = _train(undivided, mnist, train.Checkpoints())
        difference = largest_difference(network, other)
        print(figures.comparison(settings, epochs, runs["undivided"], difference), flush=True)
        results["max_parameter_difference"] = difference
        results["undivided"] = figures.figures(undivided, runs["undivided"])
    return runs, {
        **results,
        "options": {name: str(value) if isinstance(value, Path) else value
                    for name, value in vars(options).items() if name != "run"},
        "gradients": settings.gradients,
        "device": options.device_target,
        "data": {"source": options.data, "train_digits": len(mnist.train), "test_digits": len(mnist.test)},
        "versions": figures.versions(),
    }


def _train(settings: Settings, mnist: data.Mnist, checkpoints: train.Checkpoints) -> tuple[Network, list[train.Epoch]]:
    network, epochs = Network(settings.seed), []
    progress = figures.Progress(settings, mnist)
    try:
        for epoch in train.train(mnist, network, settings, progress, checkpoints):
            print(figures.epoch_line(epoch, settings), flush=True)
            epochs.append(epoch)
    finally:
        progress.close()
    return network, epochs


def write_all(options: argparse.Namespace, runs: figures.Runs, results: dict) -> None:
    """Write the files that the options name. Raises OSError if one cannot be written after all."""
    if options.save:
        say_written(options.save)
    if options.json:
        write_json(options.json, results)
    if options.plot:
        write_png(options.plot, figures.plot(runs, results["effective_batch"]))
