"""The command `ms-accum mnist`: its options, and what they are checked for."""
from __future__ import annotations

import argparse
from functools import partial

from ..mnist import data
from ..mnist.settings import Settings
from ..mnist.train import Task
from ..reference.settings import ADAPTIVE
from . import reference
from .options import add_command
from .reference import refuse

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
  ms-accum mnist --accumulate-step adaptive      # ... and let windows follow it
  ms-accum mnist --save run.ckpt --save-every 100 # if it stops, run the same with --resume run.ckpt
  msrun --worker_num=2 --local_worker_num=2 --join=True --log_dir=ranks --tail_worker_log=0 python -m ms_accum mnist"""

COMPARE = ("also train with each window as one undivided batch, from the same weights and on the same order of digits, "
           "and print the largest difference between the parameters; both trainings then compute gradients in float64 "
           "(float32 on Ascend), several times slower")


def add_parser(subcommands: argparse._SubParsersAction) -> None:
    """Add `mnist` to the commands of `ms-accum`."""
    parser = add_command(subcommands, "mnist", partial(reference.run, prepare),
                         "train on handwritten digits with accumulated gradients", DESCRIPTION, EXAMPLES)
    training = parser.add_argument_group("training").add_argument
    training("--data", default="embedded", metavar="{embedded,full,DIR}",
             help="embedded: 10,000 + 2,000 digits of MNIST in the package; full: all 60,000 + 10,000, downloaded once "
                  "into the user's cache; DIR: a folder that holds train/ and test/ with the idx files "
                  "(default: %(default)s)")
    reference.add_options(training, parser.add_argument_group("output").add_argument, Settings, COMPARE)


def prepare(options: argparse.Namespace) -> Task:
    """Check everything that can be checked before training. Raises ValueError, OSError or FetchError."""
    settings = reference.started(settings_of(options), options)
    mnist = data.load(options.data)
    refuse({
        "compare: cannot be used with several ranks, because MindSpore exchanges no float64; leave it out, or run "
        "without msrun": options.compare and settings.ranks > 1,
    })
    task = Task(mnist, settings, options.data)
    reference.refuse_sizes(task, mnist.train.size // settings.ranks)
    return task


def settings_of(options: argparse.Namespace) -> Settings:
    """Return the settings that the options name. Raises ValueError if options contradict each other."""
    refuse({
        "momentum: adam takes none; leave it out, or choose --optimizer sgd or momentum":
            options.optimizer == "adam" and options.momentum is not None,
        "api: a Model trains one graph, which cuts no microbatch; leave out --pieces, or train with --api functional":
            options.api == "model" and options.pieces > 1,
        f"api: a Model trains one graph, which cannot choose lengths; leave out --accumulate-step {ADAPTIVE}, or train "
        "with --api functional": options.api == "model" and options.accumulate_step == ADAPTIVE,
    })
    # No float64 on Ascend's matrix units.
    comparable = options.compare and options.device_target != "Ascend"
    return reference.settings_named(Settings, options, gradients="float64" if comparable else "float32")
