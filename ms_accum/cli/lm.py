"""The command `ms-accum lm`: its options, and what they are checked for."""
from __future__ import annotations

import argparse
from functools import partial

from ..lm import data
from ..lm.settings import Settings
from ..lm.train import Task
from ..reference.settings import ADAPTIVE
from . import reference
from .options import add_command
from .reference import refuse

DESCRIPTION = """\
Train a byte-level transformer of 1 M parameters on the documentation that comes with Python, or on a file. Documents
keep their lengths, so the microbatches of a window hold different numbers of bytes: each weighs as many as it holds,
and the update is that of the undivided batch. After each epoch, the bits per byte of other documents are measured."""

EXAMPLES = """\
examples:
  ms-accum lm                                    # less than a minute on 2 cores, no network needed
  ms-accum lm --compare --plot run.png           # what does it cost to count microbatches alike?
  ms-accum lm --text book.txt --epochs 10 --save book.ckpt
  ms-accum lm --accumulate-step adaptive         # windows as long as the noise scale asks
  ms-accum lm --budget 8192                      # close a window at 8,192 bytes instead of 2 microbatches
  msrun --worker_num=2 --local_worker_num=2 --join=True --log_dir=ranks --tail_worker_log=0 python -m ms_accum lm"""

COMPARE = ("also train with the mean of means, in which each microbatch weighs the same however many bytes it holds, "
           "from the same weights and in the same order, and print how the bits per byte differ; not with --budget")


def add_parser(subcommands: argparse._SubParsersAction) -> None:
    """Add `lm` to the commands of `ms-accum`."""
    parser = add_command(subcommands, "lm", partial(reference.run, prepare),
                         "train a small language model on documents of different lengths", DESCRIPTION, EXAMPLES)
    training = parser.add_argument_group("training").add_argument
    training("--text", default="excerpt", metavar="{excerpt,topics,FILE}",
             help="topics: pydoc_data.topics, which is part of Python; excerpt: a quarter of its documents; FILE: a "
                  "file whose documents are separated by empty lines (default: %(default)s)")
    reference.add_options(training, parser.add_argument_group("output").add_argument, Settings, COMPARE)


def prepare(options: argparse.Namespace) -> Task:
    """Check everything that can be checked before training. Raises ValueError or OSError."""
    refuse({
        "budget: closes windows by their weight, and the noise scale would by their length; leave out one of --budget "
        "and --accumulate-step adaptive": options.budget and options.accumulate_step == ADAPTIVE,
        "compare: the mean of means gives each microbatch the weight 1, which counts no bytes; leave out --budget":
            options.compare and options.budget,
    })
    settings = reference.settings_named(Settings, options)
    text = data.load(options.text, settings.seed)
    settings = reference.started(settings, options)
    task = Task(text, settings, options.text)
    reference.refuse_sizes(task, len(text.train) // settings.ranks)
    return task
