"""The choices that decide what a run on digits computes."""
from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Optional, Union

from ms_accum.reference.settings import ACCUMULATE_STEP, NOISE_SCALE, option
from ms_accum.reference.settings import Settings as AnySettings


@dataclass(frozen=True, kw_only=True)
class Settings(AnySettings):
    """The choices that decide what a run computes; the defaults are the tutorial's.

    `gradients` is "float64" to compare two runs; see `network.Float64Optimizer`.
    """

    batch_size: int = option(32, "digits in a microbatch")
    accumulate_step: Union[int, str] = option(2, ACCUMULATE_STEP)
    epochs: int = option(3, "passes over the training digits")
    lr: float = option(1e-2, "learning rate")
    momentum: Optional[float] = option(None, "0 <= M < 1 (default: 0 with sgd, 0.9 with momentum; adam takes none)")
    optimizer: str = option("sgd", "nn.SGD, nn.Momentum or nn.Adam", "sgd", "momentum", "adam")
    clip_norm: Optional[float] = option(
        None, "clip the accumulated gradient to this global norm, once per update (default: no clipping)")
    api: str = option("functional", "functional: a loop over make_train_step; model: mindspore.train.Model with "
                      "callbacks. Both train the same parameters", "functional", "model")
    noise_scale: bool = option(False, NOISE_SCALE.format("digits"))

    def undivided(self) -> Settings:
        """Return the same run with each window's digits as one batch, in one process."""
        return replace(self, batch_size=self.effective_batch, accumulate_step=1, pieces=1, ranks=1, rank=0,
                       noise_scale=False)
