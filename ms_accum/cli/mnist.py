"""The command `ms-accum mnist`: its options, and what it runs in which order."""
from __future__ import annotations

import argparse
import logging
import os
import sys
from dataclasses import fields, replace
from functools import partial
from importlib.util import find_spec
from math import isfinite
from pathlib import Path
from typing import Any

import mindspore as ms

from ..checkpoint import SUFFIXES, CheckpointError
from ..distributed.ranks import wait_for_all
from ..mnist import data, figures, train
from ..mnist.fetch import FetchError
from ..mnist.network import Network, largest_difference
from ..mnist.settings import APIS, MODES, OPTIMIZERS, STRATEGIES, SYNCS, Settings
from .files import require_writable, whole, write_json
from .options import number

DEVICES = ("CPU", "GPU", "Ascend")
LARGEST_COUNT = 2 ** 31 - 1

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
  ms-accum mnist --save run.ckpt --save-every 100 # then, whatever happened: the same with --resume run.ckpt
  msrun --worker_num=2 --local_worker_num=2 --join=True --log_dir=ranks --tail_worker_log=0 python -m ms_accum mnist"""


def add_parser(subcommands: argparse._SubParsersAction) -> None:
    """Add `mnist` to the commands of `ms-accum`."""
    parser = subcommands.add_parser(
        "mnist", help="train on handwritten digits with accumulated gradients", description=DESCRIPTION, epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    _add_training_options(parser)
    _add_output_options(parser)
    parser.set_defaults(run=partial(run, parser))


def _add_training_options(parser: argparse.ArgumentParser) -> None:
    training = parser.add_argument_group("training")

    def setting(name: str, text: str, **arguments: Any) -> None:
        default = getattr(Settings, name.replace("-", "_"))
        training.add_argument(f"--{name}", default=default, help=f"{text} (default: %(default)s)".lstrip(), **arguments)

    training.add_argument(
        "--data", default="embedded", metavar="{embedded,full,DIR}",
        help="embedded: 10,000 + 2,000 digits of MNIST in the package; full: all 60,000 + 10,000, fetched once into the user's "
             "cache; DIR: a folder that holds train/ and test/ with the idx files (default: %(default)s)")
    setting("batch-size", "digits in a microbatch", type=_count, metavar="N")
    setting("accumulate-step", "microbatches in a window, that is, for one update", type=_count, metavar="N")
    setting("epochs", "", type=_count, metavar="N")
    setting("lr", "learning rate", type=_learning_rate, metavar="RATE")
    training.add_argument("--momentum", type=_momentum, metavar="M",
                          help="0 <= M < 1 (default: 0 with sgd, 0.9 with momentum; adam takes none)")
    setting("optimizer", "nn.SGD, nn.Momentum or nn.Adam", choices=OPTIMIZERS)
    training.add_argument("--clip-norm", type=_clip_norm, metavar="NORM",
                          help="clip the accumulated gradient to this global norm, once an update (default: no clipping)")
    setting("seed", "of the initial weights and the order of digits", type=_seed, metavar="N")
    training.add_argument("--device-target", choices=DEVICES, default="CPU", help="(default: %(default)s)")
    setting("mode", "graph: jitted; pynative: op by op", choices=MODES)
    setting("api", "functional: a loop over make_train_step; model: mindspore.train.Model and its callbacks, the same parameters",
            choices=APIS)
    setting("strategy", "fused: one graph for all; split: a second graph for the update, invoked once per window", choices=STRATEGIES)
    setting("micro-size", "pieces that each microbatch is cut into inside the compiled function; memory is that of one piece",
            type=_count, metavar="K")
    setting("sync", "with several ranks (see the examples): exchange gradients once a window or at each microbatch", choices=SYNCS)
    training.add_argument("--shard", action="store_true",
                          help="with several ranks and --sync microbatch: each keeps a part of the accumulated gradients")
    training.add_argument("--noise-scale", action="store_true",
                          help="measure the gradient noise scale, which approximates the critical batch size: how many digits "
                               "an update can use before more of them stop helping")
    training.add_argument("--compare", action="store_true",
                          help="also train with each window as one undivided batch, from the same weights and on the same "
                               "order of digits, and print the largest difference between the parameters; both "
                               "trainings then compute gradients in float64 (float32 on Ascend), several times slower")


def _add_output_options(parser: argparse.ArgumentParser) -> None:
    output = parser.add_argument_group("output")
    output.add_argument("--json", type=Path, metavar="FILE", help="write every figure and option")
    output.add_argument("--plot", type=Path, metavar="FILE.png", help="draw loss and accuracy; needs matplotlib")
    output.add_argument("--save", type=Path, metavar="FILE.ckpt",
                        help="write a checkpoint of everything at the end; .safetensors is the other format")
    output.add_argument("--save-every", type=_count, metavar="K", help="write it after every K microbatches, too")
    output.add_argument("--resume", type=Path, metavar="FILE.ckpt",
                        help="continue from a checkpoint as if the run had never stopped; give the same options (--epochs may be more)")


_count = partial(number, int, lambda n: 1 <= n <= LARGEST_COUNT, f"a whole number from 1 to {LARGEST_COUNT}")
_seed = partial(number, int, lambda n: n >= 0, "a whole number from 0")
_learning_rate = partial(number, float, lambda x: isfinite(x) and x > 0, "a finite number > 0")
_momentum = partial(number, float, lambda x: 0 <= x < 1, "a number from 0 to below 1")
_clip_norm = partial(number, float, lambda x: x > 0, "a number > 0")


def run(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Check, train, report, write.

    Raises:
        SystemExit: With a line on stderr; status 2 for a bad value, 1 if digits cannot be fetched or a file not be written.
    """
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
    require_outputs(options)
    use_device(options.device_target)
    settings = join_ranks(settings)
    if options.compare and settings.ranks > 1:
        raise ValueError("argument --compare: several ranks do not compare, because MindSpore exchanges no float64; leave it "
                         "out, or run without msrun")
    if settings.noise_scale and settings.gradients_in_a_window == 1:
        raise ValueError("argument --noise-scale: compares the microbatches of a window, which holds only one; give "
                         "--accumulate-step 2 or more, or --micro-size 2")
    mnist = data.load(options.data)
    digits = len(mnist.train) // settings.ranks
    if settings.batch_size > digits:
        raise ValueError(f"argument --batch-size: a microbatch of {settings.batch_size} digits cannot be filled from "
                         f"{digits}; choose at most {digits}")
    return settings, mnist


def settings_of(options: argparse.Namespace) -> Settings:
    """Return the settings that the options name. Raises ValueError if they contradict each other."""
    if options.optimizer == "adam" and options.momentum is not None:
        raise ValueError("argument --momentum: adam takes none; leave it out, or choose --optimizer sgd or momentum")
    if options.shard and options.sync == "window":
        raise ValueError("argument --shard: gradients of a rank are whole until they are exchanged; add --sync microbatch")
    if options.micro_size > 1 and options.sync == "microbatch":
        raise ValueError("argument --micro-size: ranks that exchange each microbatch cannot cut it; leave out "
                         "--sync microbatch, or choose a smaller --batch-size")
    if options.api == "model" and options.strategy == "split":
        raise ValueError("argument --strategy: a Model trains one Cell, which is one graph; leave out --strategy split or "
                         "--api model")
    # No float64 on Ascend's matrix units.
    comparable = options.compare and options.device_target != "Ascend"
    named = {field.name: getattr(options, field.name) for field in fields(Settings) if field.name in options}
    return Settings(**named, gradients="float64" if comparable else "float32")


def require_outputs(options: argparse.Namespace) -> None:
    """Raise ValueError unless every file that is to be written can be."""
    if options.save_every and not options.save:
        raise ValueError("argument --save-every: requires --save FILE.ckpt")
    if options.compare and (options.resume or options.save_every):
        raise ValueError("argument --compare: a comparison trains twice and cannot be resumed; leave out --save-every and "
                         "--resume")
    if options.resume and not options.resume.is_file():
        raise ValueError(f"argument --resume: there is no file {options.resume}; give one that --save wrote")
    if options.resume and options.resume.suffix not in SUFFIXES:
        raise ValueError(f"argument --resume: {options.resume} ends in none of {', '.join(SUFFIXES)}; give a file that "
                         "--save wrote")
    if options.plot and find_spec("matplotlib") is None:
        raise ValueError("argument --plot: matplotlib is not installed; install it, e.g. with "
                         f"{sys.executable} -m pip install matplotlib")
    named = [path.resolve() for path in (options.json, options.plot, options.save) if path is not None]
    if len(set(named)) < len(named):
        raise ValueError("arguments --json, --plot and --save: two of them name the same file; name each another one")
    for name, suffixes in (("json", ("",)), ("plot", (".png",)), ("save", SUFFIXES)):
        path = getattr(options, name)
        if path is not None:
            try:
                require_writable(path, *suffixes)
            except ValueError as error:
                raise ValueError(f"argument --{name}: {error}") from error


def use_device(target: str) -> None:
    """Make `target` MindSpore's device. Raises ValueError if MindSpore or this machine does not have it."""
    if ms.get_context("device_target") == target:
        return  # MindSpore refuses even the same device once it has run something.
    # On refusal MindSpore also logs a line for every missing library.
    logged = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        ms.set_device(target)
    except RuntimeError as error:
        reason = str(error).split("Please")[0].strip()
        message = f"argument --device-target: {target} cannot be used here ({reason}); try --device-target CPU"
        raise ValueError(message) from error
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
    """Train, with --compare both ways, and print; return the epochs of each run by name, and every figure."""
    print(figures.header(settings, mnist, options.data, options.device_target), flush=True)

    def resumed(epochs: int, microbatches: int) -> None:
        print(f"resumed    {options.resume}: {epochs} epochs and {microbatches:,} microbatches done")

    network, epochs = _train(settings, mnist, train.Checkpoints(options.save, options.save_every, options.resume, resumed))
    runs = {"accumulated": epochs}
    results = figures.figures(settings, epochs)
    if settings.noise_scale:
        print(figures.critical_batch(settings, epochs), flush=True)
    if options.compare:
        print(f"undivided: {figures.batch(settings.undivided())}", flush=True)
        other, runs["undivided"] = _train(settings.undivided(), mnist, train.Checkpoints())
        difference = largest_difference(network, other)
        print(figures.comparison(settings, epochs, runs["undivided"], difference), flush=True)
        results["max_parameter_difference"] = difference
        results["undivided"] = figures.figures(settings.undivided(), runs["undivided"])
    named = {name: value for name, value in vars(options).items() if name != "run"}
    return runs, {
        **results,
        "options": {name: str(value) if isinstance(value, Path) else value for name, value in named.items()},
        "gradients": settings.gradients,
        "device": options.device_target,
        "data": {"source": options.data, "train_digits": len(mnist.train), "test_digits": len(mnist.test)},
        "versions": figures.versions(),
    }


def _train(settings: Settings, mnist: data.Mnist, checkpoints: train.Checkpoints) -> tuple[Network, list[train.Epoch]]:
    network = Network(settings.seed)
    epochs = []
    progress = figures.progress(settings, mnist)
    try:
        for epoch in train.train(mnist, network, settings, progress, checkpoints):
            print(figures.epoch_line(epoch, settings), flush=True)
            epochs.append(epoch)
    finally:
        progress.close()
    return network, epochs


def write_all(options: argparse.Namespace, runs: figures.Runs, results: dict) -> None:
    """Write the files that the options name. Raises OSError if one cannot be written after all."""
    if options.json:
        write_json(options.json, results)
    if options.plot:
        with whole(options.plot) as part:
            figures.plot(runs, results["effective_batch"]).savefig(part, format="png", dpi=120)
