"""The choices that decide what a run computes."""
from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Optional


def _option(default: Any, text: str, *choices: str) -> Any:
    """Make a field that is also an option of `ms-accum mnist`."""
    return field(default=default, metadata={"help": text, "choices": choices})


@dataclass(frozen=True)
class Settings:
    """The choices that decide what a run computes; the defaults are the tutorial's."""

    batch_size: int = _option(32, "digits in a microbatch")
    accumulate_step: int = _option(2, "microbatches in a window; one update follows the last of them")
    epochs: int = _option(3, "passes over the training digits")
    lr: float = _option(1e-2, "learning rate")
    momentum: Optional[float] = _option(None, "0 <= M < 1 (default: 0 with sgd, 0.9 with momentum; adam takes none)")
    optimizer: str = _option("sgd", "nn.SGD, nn.Momentum or nn.Adam", "sgd", "momentum", "adam")
    clip_norm: Optional[float] = _option(
        None, "clip the accumulated gradient to this global norm, once per update (default: no clipping)")
    seed: int = _option(42, "seed of the initial weights and the order of digits")
    mode: str = _option("graph", "graph: jitted functions; pynative: op by op", "graph", "pynative")
    api: str = _option("functional", "functional: a loop over make_train_step; model: mindspore.train.Model with "
                       "callbacks. Both train the same parameters", "functional", "model")
    strategy: str = _option("fused", "split: graphs without branches, scheduled by the host; fused: one graph",
                            "fused", "split")
    micro_size: int = _option(1, "number of pieces that each microbatch is cut into inside the compiled function; peak "
                              "activation memory is that of one piece")
    sync: str = _option("window", "with several ranks (see the examples), exchange gradients once per window or at "
                        "each microbatch", "window", "microbatch")
    shard: bool = _option(False, "with several ranks and --sync microbatch, each keeps a part of the gradients")
    noise_scale: bool = _option(False, "measure the gradient noise scale, which approximates the critical batch size: "
                                "how many digits an update can use before more of them stop helping")
    ranks: int = 1  # processes that train together, each on its own microbatches
    rank: int = 0  # which of them this is
    gradients: str = "float32"  # "float64" to compare two runs; see `network.Float64Optimizer`

    @property
    def effective_batch(self) -> int:
        """Digits in a full window, of all ranks."""
        return self.batch_size * self.accumulate_step * self.ranks

    def undivided(self) -> Settings:
        """Return the same run with each window's digits as one batch, in one process."""
        return replace(self, batch_size=self.effective_batch, accumulate_step=1, micro_size=1, strategy="fused",
                       ranks=1, rank=0, noise_scale=False)
