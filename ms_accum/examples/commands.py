"""The commands `ms-accum mnist` and `ms-accum lm`: their help, and their own options."""
from __future__ import annotations

import argparse
from functools import partial

from ..cli.options import add_command, count
from .lm import train as lm
from .mnist import train as mnist
from .program import Program, add_options, run

MNIST = Program("mnist", {"accumulated": mnist.train, "undivided": mnist.train_undivided}, rows="digits", unit="digits",
                score="accuracy", score_format="accuracy {:.2f} %")
MNIST_TEXTS = ("train on handwritten digits with accumulated gradients", """\
Train the network of MindSpore's gradient accumulation tutorial (784-512-512-10,
ReLU, cross entropy) on handwritten digits, with accumulated gradients, and test
it after each epoch. The program is ms_accum/examples/mnist/train.py.""", """\
examples:
  ms-accum mnist                         # the digits in the package
  ms-accum mnist --compare               # is accumulation exact?
  ms-accum mnist --save run.safetensors  # to resume, add --resume run.safetensors
  ms-accum mnist --data full --json run.json --plot run.png
  msrun --worker_num=2 --local_worker_num=2 --join=True --log_dir=ranks \\
      --tail_worker_log=0 python -m ms_accum mnist""")
LM = Program("lm", {"token mean": lm.train, "mean of means": lm.train_mean_of_means}, rows="rows", unit="bytes",
             score="validation", score_format="validation {:.4f} bits per byte")
LM_TEXTS = ("train a small language model on documents of different lengths", """\
Train a byte-level transformer of 1 M parameters on the documentation that comes
with Python, or on a file. Microbatches have different numbers of bytes and are
weighted by them, so the update equals that of the undivided batch. After each
epoch, the bits per byte of other documents are measured. The last line is text
that the network generates: after a minute of training, words are only beginning
to form. The program is ms_accum/examples/lm/train.py.""", """\
examples:
  ms-accum lm                      # about a minute on 2 cores
  ms-accum lm --compare            # what does the mean of means cost?
  ms-accum lm --text book.txt --epochs 10 --save book.safetensors
  msrun --worker_num=2 --local_worker_num=2 --join=True --log_dir=ranks \\
      --tail_worker_log=0 python -m ms_accum lm""")


def add_parser(subcommands: argparse._SubParsersAction) -> None:
    """Add `mnist` and `lm` to the commands of `ms-accum`."""
    parser = add_command(subcommands, "mnist", partial(run, MNIST), *MNIST_TEXTS)
    parser.add_argument("--data", default="embedded", metavar="{embedded,full,DIR}",
                        help="embedded: 10,000 + 2,000 digits of MNIST, in the package; full: all 60,000 + 10,000, "
                             "downloaded once; DIR: a folder that holds train/ and test/ with the idx files (default: "
                             "%(default)s)")
    parser.add_argument("--batch-size", type=count, default=32, metavar="N",
                        help="digits in a microbatch (default: %(default)s)")
    add_options(parser, "also train with each window as one undivided batch, from the same weights and with the same "
                "digits, and print the largest difference between the parameters; both trainings compute in float64, "
                "several times slower; not with adam or several ranks", optimizer="sgd", lr=0.01)

    parser = add_command(subcommands, "lm", partial(run, LM), *LM_TEXTS)
    parser.add_argument("--text", default="excerpt", metavar="{excerpt,topics,FILE}",
                        help="topics: pydoc_data.topics, which is part of Python; excerpt: a quarter of its documents; "
                             "FILE: documents separated by empty lines (default: %(default)s)")
    parser.add_argument("--batch-size", type=count, default=16, metavar="N",
                        help="samples in a microbatch: documents, or parts of 64 bytes (default: %(default)s)")
    add_options(parser, "also train with the mean of means, in which all microbatches have the same weight, from the "
                "same initial weights and in the same order", optimizer="adam", lr=0.001, clip_norm=1.0)
