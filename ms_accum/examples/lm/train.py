"""Train a language model on microbatches with different numbers of bytes: an example of the token mean."""
from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from typing import TYPE_CHECKING

import mindspore as ms
import numpy as np
from mindspore import Tensor

from ms_accum import DataParallel, load_checkpoint, make_train_step, save_checkpoint, shard_parameters
from ms_accum.examples.program import OPTIMIZERS

from .data import load, microbatches
from .network import BitsPerByte, Network, count_bytes, count_one, generate

if TYPE_CHECKING:
    from ms_accum.examples.program import Report

    from .data import Documents

GENERATED = 80


def train(options: Namespace, report: Report, weight_fn: Callable[[Tensor], Tensor] = count_bytes) -> Network:
    """Train as `ms-accum lm` does, and return the network."""
    text, validation = load(options.text, options.seed)
    network = Network(options.seed)
    parameters = network.trainable_params()
    optimizer = OPTIMIZERS[options.optimizer](shard_parameters(parameters) if options.zero else parameters, options.lr)
    # The loss is a mean over bytes, so the weight of a microbatch is its number of bytes.
    train_step = make_train_step(BitsPerByte(network), optimizer, options.accumulate_step, weight_fn=weight_fn,
                                 clip_norm=options.clip_norm,
                                 reducer=DataParallel(sync=options.sync, zero=options.zero))
    resumed = None if options.resume is None else load_checkpoint(options.resume, network, train_step)
    report.begin(train_step,
                 f"{options.text}: {text.size:,} bytes to train on, {validation.size:,} to validate on; "
                 f"{text.entropy():.2f} bits for a byte by itself", resumed)

    exchange = train_step.accumulator.exchange  # on one device: rank 0 of 1
    bits = ms.jit(BitsPerByte(network))
    for epoch in report.epochs_left():
        taken = order(text, options.batch_size, options.seed, epoch)[exchange.rank::exchange.ranks]
        losses = report.progress(train_step.epoch(text.batch(rows) for rows in taken),
                                 [text.count(rows) for rows in taken])
        report.add(losses, evaluate(bits, validation, options.batch_size))
        if options.save:
            save_checkpoint(options.save, network, train_step, extra=report.state)
    seconds = sum(epoch["train_seconds"] for epoch in report.epochs)
    written = generate(ms.jit(network), GENERATED, options.seed)
    print(f"text that the network generates after {seconds:.0f} s of training: {written}", flush=True)
    return network


def order(documents: Documents, batch_size: int, seed: int, epoch: int) -> list[np.ndarray]:
    """Return the rows of each microbatch of an epoch, of one width each, in an order from the seed: int `(n,)` each."""
    rng = np.random.default_rng([seed, epoch])
    found = microbatches(documents, rng.permutation(len(documents)), batch_size)
    return [found[i] for i in rng.permutation(len(found))]


def evaluate(bits: Callable[[Tensor], Tensor], documents: Documents, batch_size: int) -> float:
    """Return the bits per byte of all documents, as measured by a `BitsPerByte`."""
    batches = microbatches(documents, np.arange(len(documents)), batch_size)
    total = sum(float(bits(*map(Tensor, documents.batch(rows)))) * documents.count(rows) for rows in batches)
    return total / documents.size


def train_mean_of_means(options: Namespace, report: Report) -> Network:
    """Train with a common mistake: all microbatches weigh the same, whatever their number of bytes."""
    return train(options, report, count_one)
