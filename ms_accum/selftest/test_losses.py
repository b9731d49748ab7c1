"""A contrastive loss with cached representations."""
from __future__ import annotations

from collections.abc import Callable

import mindspore as ms
import numpy as np
from mindspore import Tensor

from ms_accum import make_grad_cache_step

from . import plain
from .networks import MLP, Encoder, contrastive_loss
from .training import rows


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
