"""Check train steps with special losses: several losses, and a contrastive loss with cached representations."""
from __future__ import annotations

from collections.abc import Callable
from functools import partial

import mindspore as ms
import numpy as np
from mindspore import Tensor

from ms_accum import make_grad_cache_step, make_train_step

from . import plain
from .networks import MLP, Encoder, TwoLosses, contrastive_loss, targets
from .rows import Check, Name
from .settings import texts
from .training import BOUNDS


def checks_of_losses(dtype: str) -> tuple[Check, Check]:
    """Return a check of several losses, and one of a cached contrastive loss."""
    return (Check(Name("several losses", "train step", dtype), partial(expect_two_losses, dtype),
                  partial(two_losses, dtype), BOUNDS[dtype]),
            Check(Name("contrastive loss", "cached, 2 pieces", dtype), partial(expect_contrastive, dtype),
                  partial(contrastive, dtype), BOUNDS[dtype]))


def network_of(dtype: str) -> MLP:
    """Return the network to train."""
    return MLP(dtype=getattr(ms, dtype))


def counts(x: Tensor, y: Tensor, marked: Tensor) -> tuple[Tensor, Tensor]:
    """Return the denominators of `TwoLosses`."""
    return targets(x, y), marked.sum()


def marked_texts() -> list[list[tuple[np.ndarray, ...]]]:
    """Return windows of texts. Some texts are marked, and their shares differ from those of the targets."""
    marks = ([[1, 0, 0], [1, 1, 1]], [[1, 1, 1], [0, 1, 0]])
    return [[(x, y, np.asarray(marked, np.float32)) for (x, y), marked in zip(texts((12, 2), seed), window)]
            for seed, window in enumerate(marks)]


def expect_two_losses(dtype: str) -> plain.Expected:
    """Train on the sum of both means."""
    network = network_of(dtype)
    loss = TwoLosses(network)

    def total(*batch: Tensor) -> Tensor:
        first, second = loss(*batch)
        return first + second
    return plain.train(total, network.trainable_params(), marked_texts())


def two_losses(dtype: str, expected: plain.Expected) -> float:
    """Train with two losses, each with a weight of its own."""
    network = network_of(dtype)
    step = make_train_step(TwoLosses(network), plain.optimizer_of(network.trainable_params()), 2, losses=2,
                           weight_fn=counts)
    for _ in step.epoch(microbatch for window in marked_texts() for microbatch in window):
        pass
    return plain.off(network.trainable_params(), expected)


def pairs() -> list[list[tuple[np.ndarray, np.ndarray]]]:
    """Return windows of one batch of 5 pairs."""
    rng = np.random.default_rng(1)
    return [[(rng.normal(size=(5, 6)).astype(np.float32), rng.normal(size=(5, 6)).astype(np.float32))]
            for _ in range(2)]


def expect_contrastive(dtype: str) -> plain.Expected:
    """Train on the contrastive loss of whole batches."""
    network = network_of(dtype)
    encode: Callable = Encoder(network)
    return plain.train(lambda *batch: contrastive_loss(*encode(*batch)), network.trainable_params(), pairs())


def contrastive(dtype: str, expected: plain.Expected) -> float:
    """Train on the same loss, one piece of a batch at a time."""
    network = network_of(dtype)
    step = make_grad_cache_step(Encoder(network), contrastive_loss, plain.optimizer_of(network.trainable_params()), 1,
                                pieces=2)
    for window in pairs():
        step(*map(Tensor, window[0]))
    return plain.off(network.trainable_params(), expected)
