"""The choices that decide what a run computes."""
from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Optional

OPTIMIZERS = ("sgd", "momentum", "adam")
MODES = ("graph", "pynative")
APIS = ("functional", "model")
STRATEGIES = ("fused", "split")
SYNCS = ("window", "microbatch")


@dataclass(frozen=True)
class Settings:
    """The choices that decide what a run computes; the defaults are the tutorial's.

    Attributes:
        batch_size: Digits in a microbatch.
        accumulate_step: Microbatches in a window.
        epochs: Passes over the training digits.
        lr: Learning rate.
        optimizer: One of `OPTIMIZERS`.
        momentum: Of the optimizer; None: 0 with "sgd", 0.9 with "momentum". "adam" takes none.
        clip_norm: Largest global norm of the accumulated gradient; None: no clipping.
        seed: Of the initial weights and of the order of digits.
        mode: "graph": jitted functions. "pynative": op by op.
        api: "functional": a loop over `make_train_step`. "model": `mindspore.train.Model` with a `TrainOneStepCell`.
        strategy: "fused" or "split"; see `make_train_step`.
        micro_size: Pieces that each microbatch is cut into inside the compiled function; see `make_train_step`.
        ranks: Processes that train together, each on its own microbatches.
        rank: Which of them this is.
        sync: When ranks exchange gradients, "window" or "microbatch"; see `DataParallel`.
        shard: Whether each rank keeps a part of the accumulated gradients; see `DataParallel`.
        noise_scale: Whether the gradient noise scale is measured; see `GradientNoiseScale`.
        gradients: "float32", or "float64" to compare two runs; see `network.Float64Optimizer`.
    """

    batch_size: int = 32
    accumulate_step: int = 2
    epochs: int = 3
    lr: float = 1e-2
    optimizer: str = "sgd"
    momentum: Optional[float] = None
    clip_norm: Optional[float] = None
    seed: int = 42
    mode: str = "graph"
    api: str = "functional"
    strategy: str = "fused"
    micro_size: int = 1
    ranks: int = 1
    rank: int = 0
    sync: str = "window"
    shard: bool = False
    noise_scale: bool = False
    gradients: str = "float32"

    @property
    def effective_batch(self) -> int:
        """Digits in a full window, of all ranks."""
        return self.batch_size * self.accumulate_step * self.ranks

    @property
    def gradients_in_a_window(self) -> int:
        """Gradients that a full window is made of: pieces of its microbatches, of all ranks."""
        return self.accumulate_step * self.micro_size * self.ranks

    def undivided(self) -> Settings:
        """The same run with each window's digits as one batch, in one process."""
        return replace(self, batch_size=self.effective_batch, accumulate_step=1, micro_size=1, strategy="fused", ranks=1, rank=0,
                       noise_scale=False)
