"""Train on digits with accumulated gradients: an example of the library in one program."""
from __future__ import annotations

from argparse import Namespace
from typing import TYPE_CHECKING

import mindspore as ms
import numpy as np
from mindspore import Tensor

from ms_accum import DataParallel, load_checkpoint, make_train_step, save_checkpoint, shard_parameters
from ms_accum.examples.program import OPTIMIZERS

from .data import load
from .network import Network, make_forward

if TYPE_CHECKING:
    from ms_accum.examples.program import Report


def train(options: Namespace, report: Report) -> Network:
    """Train as `ms-accum mnist` does, and return the network."""
    mnist = load(options.data)
    if options.compare and options.optimizer == "adam":
        raise ValueError("--compare trains in float64, which MindSpore's Adam does not take; give --optimizer sgd")
    # Float32 rounds the gradients of 2 x 32 and of 64 digits differently, so two trainings differ more and more.
    network = Network(options.seed, ms.float64 if options.compare else ms.float32)
    parameters = network.trainable_params()
    optimizer = OPTIMIZERS[options.optimizer](shard_parameters(parameters) if options.zero else parameters, options.lr)
    train_step = make_train_step(make_forward(network), optimizer, options.accumulate_step, clip_norm=options.clip_norm,
                                 reducer=DataParallel(sync=options.sync, zero=options.zero))
    resumed = None if options.resume is None else load_checkpoint(options.resume, network, train_step)
    report.begin(train_step,
                 f"{options.data}: {len(mnist.train):,} digits to train on, {len(mnist.test):,} to test on", resumed)

    exchange = train_step.accumulator.exchange  # on one device: rank 0 of 1
    logits = ms.jit(network)
    for epoch in report.epochs_left():
        # Distributed one by one, so that a window of all ranks holds the same digits as a window of one process.
        microbatches = order(len(mnist.train), options.batch_size, options.seed, epoch)[exchange.rank::exchange.ranks]
        losses = report.progress(train_step.epoch(mnist.train.batch(rows) for rows in microbatches),
                                 [len(rows) for rows in microbatches])
        labels = logits(Tensor(mnist.test.images)).asnumpy().argmax(axis=1)
        report.add(losses, 100 * np.mean(labels == mnist.test.labels))
        if options.save:
            save_checkpoint(options.save, network, train_step, extra=report.state)
    return network


def order(digits: int, batch_size: int, seed: int, epoch: int) -> list[np.ndarray]:
    """Return the digits of each microbatch of an epoch, in an order from the seed: int `(n,)` each."""
    rows = np.random.default_rng([seed, epoch]).permutation(digits)
    return [rows[start:start + batch_size] for start in range(0, digits, batch_size)]


def train_undivided(options: Namespace, report: Report) -> Network:
    """Train with each window as one batch, on the same digits in the same order."""
    size = options.batch_size * options.accumulate_step
    return train(Namespace(**{**vars(options), "batch_size": size, "accumulate_step": 1}), report)
