"""`ms-accum mnist`: its options, and what it runs in which order."""
from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING

from ..mnist.settings import APIS, MODES, OPTIMIZERS, STRATEGIES, SYNCS, Settings

if TYPE_CHECKING:
    from ..mnist.data import Mnist
    from ..mnist.network import Network
    from ..mnist.train import Checkpoints, Epoch

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
    training.add_argument(
        "--data", default="embedded", metavar="{embedded,full,DIR}",
        help="embedded: 10,000 + 2,000 digits of MNIST in the package; full: all 60,000 + 10,000, fetched once into the "
             "user's cache; DIR: a folder that holds train/ and test/ with the idx files (default: %(default)s)")
    training.add_argument("--batch-size", type=_count, default=Settings.batch_size, metavar="N",
                          help="digits in a microbatch (default: %(default)s)")
    training.add_argument("--accumulate-step", type=_count, default=Settings.accumulate_step, metavar="N",
                          help="microbatches in a window, that is, for one update (default: %(default)s)")
    training.add_argument("--epochs", type=_count, default=Settings.epochs, metavar="N", help="(default: %(default)s)")
    training.add_argument("--lr", type=_learning_rate, default=Settings.lr, metavar="RATE",
                          help="learning rate (default: %(default)s)")
    training.add_argument("--momentum", type=_momentum, metavar="M",
                          help="0 <= M < 1 (default: 0 with sgd, 0.9 with momentum; adam takes none)")
    training.add_argument("--optimizer", choices=OPTIMIZERS, default=Settings.optimizer,
                          help="nn.SGD, nn.Momentum or nn.Adam (default: %(default)s)")
    training.add_argument("--clip-norm", type=_clip_norm, metavar="NORM",
                          help="clip the accumulated gradient to this global norm, once an update (default: no clipping)")
    training.add_argument("--seed", type=_seed, default=Settings.seed, metavar="N",
                          help="of the initial weights and the order of digits (default: %(default)s)")
    training.add_argument("--device-target", choices=DEVICES, default="CPU", help="(default: %(default)s)")
    training.add_argument("--mode", choices=MODES, default=Settings.mode,
                          help="graph: jitted; pynative: op by op (default: %(default)s)")
    training.add_argument("--api", choices=APIS, default=Settings.api,
                          help="functional: a loop over make_train_step; model: mindspore.train.Model and its callbacks, the same "
                               "parameters (default: %(default)s)")
    training.add_argument("--strategy", choices=STRATEGIES, default=Settings.strategy,
                          help="fused: one graph for all; split: a second graph for the update, invoked once per window "
                               "(default: %(default)s)")
    training.add_argument("--micro-size", type=_count, default=Settings.micro_size, metavar="K",
                          help="pieces that each microbatch is cut into inside the compiled function; memory is that of one "
                               "piece (default: %(default)s)")
    training.add_argument("--sync", choices=SYNCS, default=Settings.sync,
                          help="with several ranks (see the examples): exchange gradients once a window or at each microbatch "
                               "(default: %(default)s)")
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
                        help="go on from a checkpoint, with the same options (--epochs may be more), as if it had never stopped")


def _number(convert: Callable[[str], float], accepted: Callable[[float], bool], expected: str, text: str) -> float:
    try:
        value = convert(text)
    except ValueError:
        value = None
    if value is None or not accepted(value):
        raise argparse.ArgumentTypeError(f"expected {expected}, got {text!r}")
    return value


_count = partial(_number, int, lambda n: 1 <= n <= LARGEST_COUNT, f"a whole number from 1 to {LARGEST_COUNT}")
_seed = partial(_number, int, lambda n: n >= 0, "a whole number from 0")
_learning_rate = partial(_number, float, lambda x: isfinite(x) and x > 0, "a finite number > 0")
_momentum = partial(_number, float, lambda x: 0 <= x < 1, "a number from 0 to below 1")
_clip_norm = partial(_number, float, lambda x: x > 0, "a number > 0")


def run(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Check, train, report, write.

    Raises:
        SystemExit: With a line on stderr; status 2 for a bad value, 1 if digits cannot be fetched or a file not be written.
    """
    from ..mnist.data import load
    from ..mnist.fetch import FetchError

    try:
        settings = settings_of(options)
        require_outputs(options)
        use_device(options.device_target)
        settings = join_ranks(settings)
        if options.compare and settings.ranks > 1:
            raise ValueError("argument --compare: several ranks do not compare, for MindSpore exchanges no float64; leave it out, or run "
                             "without msrun")
        if settings.noise_scale and settings.gradients_in_a_window == 1:
            raise ValueError("argument --noise-scale: compares the microbatches of a window, which holds only one; give "
                             "--accumulate-step 2 or more, or --micro-size 2")
        mnist = load(options.data)
        require_microbatch(settings, mnist)
    except FetchError as error:
        parser.exit(1, f"{parser.prog}: error: {error}\n")
    except (ValueError, OSError) as error:
        parser.error(str(error))
    from ms_accum.checkpoint import CheckpointError

    try:
        runs, figures = train_all(settings, mnist, options)
        if settings.rank == 0:
            write_all(options, runs, figures)
    except BrokenPipeError:
        raise  # whoever read stdout is gone, which main knows
    except (CheckpointError, OSError) as error:
        parser.exit(1, f"{parser.prog}: error: {error}\n")
    finally:
        part_ranks(settings)


def settings_of(options: argparse.Namespace) -> Settings:
    """The settings that the options name. Raises ValueError if they contradict each other."""
    if options.optimizer == "adam" and options.momentum is not None:
        raise ValueError("argument --momentum: adam takes none; leave it out, or choose --optimizer sgd or momentum")
    if options.shard and options.sync == "window":
        raise ValueError("argument --shard: gradients of a rank are whole until they are exchanged; add --sync microbatch")
    if options.micro_size > 1 and options.sync == "microbatch":
        raise ValueError("argument --micro-size: ranks that exchange each microbatch cannot cut it; leave out --sync microbatch, "
                         "or choose a smaller --batch-size")
    if options.api == "model" and options.strategy == "split":
        raise ValueError("argument --strategy: a Model trains one Cell, which is one graph; leave out --strategy split or --api model")
    # No float64 on Ascend's matrix units.
    comparable = options.compare and options.device_target != "Ascend"
    return Settings(
        batch_size=options.batch_size,
        accumulate_step=options.accumulate_step,
        epochs=options.epochs,
        lr=options.lr,
        optimizer=options.optimizer,
        momentum=options.momentum,
        clip_norm=options.clip_norm,
        seed=options.seed,
        mode=options.mode,
        api=options.api,
        strategy=options.strategy,
        micro_size=options.micro_size,
        sync=options.sync,
        shard=options.shard,
        noise_scale=options.noise_scale,
        gradients="float64" if comparable else "float32",
    )


def require_outputs(options: argparse.Namespace) -> None:
    """Raise ValueError unless every file that is to be written can be."""
    from ms_accum.checkpoint import SUFFIXES

    from .files import require_writable

    if options.save_every and not options.save:
        raise ValueError("argument --save-every: says when, but not where; add --save FILE.ckpt")
    if options.compare and (options.resume or options.save_every):
        raise ValueError("argument --compare: a comparison trains twice and cannot be resumed; leave out --save-every and --resume")
    if options.resume and not options.resume.is_file():
        raise ValueError(f"argument --resume: there is no file {options.resume}; give one that --save wrote")
    if options.resume and options.resume.suffix not in SUFFIXES:
        raise ValueError(f"argument --resume: {options.resume} ends in none of {', '.join(SUFFIXES)}; give a file that --save wrote")
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
    """Make `target` MindSpore's device. Raises ValueError if this build of MindSpore or this machine has none."""
    import mindspore as ms

    if ms.get_context("device_target") == target:
        return  # MindSpore refuses even the same device once it has run something.
    # On refusal MindSpore also logs a line for every library that it misses.
    logged = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        ms.set_device(target)
    except RuntimeError as error:
        reason = str(error).split("Please")[0].strip()
        raise ValueError(f"argument --device-target: {target} cannot be used here ({reason}); try --device-target CPU") from error
    finally:
        logging.disable(logged)


def join_ranks(settings: Settings) -> Settings:
    """Under msrun, join the other ranks; the settings of this one. Only rank 0 goes on printing."""
    if "MS_ROLE" not in os.environ:
        return settings
    from mindspore.communication import get_group_size, get_rank, init

    init()
    settings = replace(settings, ranks=get_group_size(), rank=get_rank())
    if settings.rank > 0:
        sys.stdout = open(os.devnull, "w", encoding="utf-8")
    return settings


def part_ranks(settings: Settings) -> None:
    """Wait for all ranks, if there are several."""
    if settings.ranks > 1:
        from ms_accum.distributed.ranks import wait_for_all

        wait_for_all()


def require_microbatch(settings: Settings, mnist: Mnist) -> None:
    """Raise ValueError if there are too few digits for one microbatch on each rank."""
    digits = len(mnist.train) // settings.ranks
    if settings.batch_size > digits:
        raise ValueError(f"argument --batch-size: a microbatch of {settings.batch_size} digits cannot be filled from "
                         f"{digits}; choose at most {digits}")


def train_all(settings: Settings, mnist: Mnist, options: argparse.Namespace) -> tuple[dict[str, list[Epoch]], dict]:
    """Train, with --compare both ways, and print; the epochs of each run by name, and every figure."""
    from ..mnist import report
    from ..mnist.network import largest_difference
    from ..mnist.train import Checkpoints

    print(report.header(settings, mnist, options.data, options.device_target), flush=True)
    network, epochs = _train(settings, mnist, Checkpoints(
        options.save, options.save_every, options.resume,
        lambda epochs, microbatches: print(f"resumed    {options.resume}: {epochs} epochs and {microbatches:,} microbatches done")))
    runs = {"accumulated": epochs}
    figures = report.figures(settings, epochs)
    if settings.noise_scale:
        print(report.critical_batch(settings, epochs), flush=True)
    if options.compare:
        print(f"undivided: {report.batch(settings.undivided())}", flush=True)
        other, runs["undivided"] = _train(settings.undivided(), mnist, Checkpoints())
        difference = largest_difference(network, other)
        print(report.comparison(settings, epochs, runs["undivided"], difference), flush=True)
        figures["max_parameter_difference"] = difference
        figures["undivided"] = report.figures(settings.undivided(), runs["undivided"])
    return runs, {**figures, **_circumstances(settings, mnist, options)}


def write_all(options: argparse.Namespace, runs: dict[str, list[Epoch]], figures: dict) -> None:
    """Write the files that the options name. Raises OSError if one cannot be written after all."""
    from .files import write_json

    if options.json:
        write_json(options.json, figures)
    if options.plot:
        from ..mnist.plot import write_plot
        write_plot(options.plot, runs, figures["effective_batch"])


def _train(settings: Settings, mnist: Mnist, checkpoints: Checkpoints) -> tuple[Network, list[Epoch]]:
    from ..mnist import report
    from ..mnist.network import Network
    from ..mnist.train import train

    network = Network(settings.seed)
    epochs = []
    progress = report.progress(settings, mnist)
    try:
        for epoch in train(mnist, network, settings, progress, checkpoints):
            print(report.epoch_line(epoch, settings), flush=True)
            epochs.append(epoch)
    finally:
        progress.close()
    return network, epochs


def _circumstances(settings: Settings, mnist: Mnist, options: argparse.Namespace) -> dict:
    from ..mnist import report

    named = {name: str(value) if isinstance(value, Path) else value for name, value in vars(options).items() if name != "run"}
    return {
        "options": named,
        "gradients": settings.gradients,
        "device": options.device_target,
        "data": {"source": options.data, "train_digits": len(mnist.train), "test_digits": len(mnist.test)},
        "versions": report.versions(),
    }
