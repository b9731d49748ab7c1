"""Several losses, each with a weight of its own, and a contrastive loss with cached representations."""
from __future__ import annotations

from collections.abc import Callable

import mindspore as ms
import numpy as np
from mindspore import Tensor, ops

from ms_accum import make_grad_cache_step, make_train_step

from . import plain
from .networks import MLP, Encoder, TargetLoss, contrastive_loss, targets
from .training import rows, texts


def two_losses(network: MLP) -> Callable:
    """Return `(x, y, marked) -> losses`: `TargetLoss`, and the mean square of the logits of the marked samples."""
    first, dtype = TargetLoss(network), network.first.weight.dtype

    def forward_fn(x: Tensor, y: Tensor, marked: Tensor) -> tuple[Tensor, Tensor]:
        squares = ops.square(network(x.astype(dtype)).astype(ms.float32)).mean((1, 2))
        return first(x, y), (squares * marked).sum() / marked.sum()
    return forward_fn


def counts(x: Tensor, y: Tensor, marked: Tensor) -> tuple[Tensor, Tensor]:
    """Return the denominators of both losses."""
    return targets(x, y), marked.sum()


@rows(drivers=["train step"])
def test_several_losses(dtype: str, holds: Callable) -> None:
    """Some texts are marked, and their shares differ from those of the targets."""
    plainly, network = (MLP(dtype=getattr(ms, dtype)) for _ in range(2))
    marks = ([[1, 0, 0], [1, 1, 1]], [[1, 1, 1], [0, 1, 0]])
    windows = [[(*text, np.asarray(marked, np.float32)) for text, marked in zip(texts((12, 2), seed), window)]
               for seed, window in enumerate(marks)]
    both = two_losses(plainly)
    expected = plain.train(lambda *batch: sum(both(*batch)), plainly.trainable_params(), windows)
    step = make_train_step(two_losses(network), plain.optimizer_of(network.trainable_params()), 2, losses=2,
                           weight_fn=counts)
    for _ in step.epoch(microbatch for window in windows for microbatch in window):
        pass
    holds(expected.off(network.trainable_params()))


@rows(drivers=["cached, 2 pieces"])
def test_contrastive_loss(dtype: str, holds: Callable) -> None:
    """The loss compares all pairs of a batch, whose representations are computed one piece at a time."""
    plainly, network = (MLP(dtype=getattr(ms, dtype)) for _ in range(2))
    random, encode = np.random.default_rng(1), Encoder(plainly)
    windows = [[tuple(random.normal(size=(2, 5, 6)).astype(np.float32))] for _ in range(2)]
    expected = plain.train(lambda *batch: contrastive_loss(*encode(*batch)), plainly.trainable_params(), windows)
    step = make_grad_cache_step(Encoder(network), contrastive_loss, plain.optimizer_of(network.trainable_params()), 1,
                                pieces=2)
    for window in windows:
        step(*map(Tensor, window[0]))
    holds(expected.off(network.trainable_params()))
