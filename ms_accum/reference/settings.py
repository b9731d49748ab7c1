"""The settings that every reference run has, and how a setting becomes an option."""
from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Optional, Union

ADAPTIVE = "adaptive"
ACCUMULATE_STEP = ("microbatches in a window; one update follows the last of them. "
                   f"{ADAPTIVE}: from 1 to 64, as the noise scale asks while training")
NOISE_SCALE = ("measure the gradient noise scale, which approximates the critical batch size: how many {} an update "
               "can use before more of them stop helping")


def option(default: Any, text: str, *choices: str) -> Any:
    """Make a field that is also an option of the run's command."""
    return field(default=default, metadata={"help": text, "choices": choices})


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The choices that decide what a run computes. Each run gives those without a value its own default and help."""

    batch_size: int
    accumulate_step: Union[int, str]  # or ADAPTIVE
    epochs: int
    lr: float
    optimizer: str
    clip_norm: Optional[float]
    seed: int = option(42, "seed of the initial weights and the order of the data")
    mode: str = option("graph", "graph: jitted functions; pynative: op by op", "graph", "pynative")
    api: str = "functional"  # a loop over make_train_step, or "model": mindspore.train.Model
    pieces: int = option(1, "number of pieces that each microbatch is cut into; peak activation memory is that of one "
                         "piece")
    sync: str = option("window", "with several ranks (see the examples), exchange gradients once per window, at each "
                       "microbatch, or at each microbatch inside a node and once per window between nodes", "window",
                       "microbatch", "node")
    shard: bool = option(False, "with several ranks and --sync microbatch or node, each keeps a part of the gradients")
    ranks_per_node: Optional[int] = option(None, "with --sync node: ranks in each node (default: those on this host)")
    noise_scale: bool
    gradients: str = "float32"  # or "float64"
    ranks: int = 1  # processes that train together, each on its own microbatches
    rank: int = 0  # which of them this is

    @property
    def adaptive(self) -> bool:
        """Whether windows follow the noise scale."""
        return self.accumulate_step == ADAPTIVE

    @property
    def effective_batch(self) -> Optional[int]:
        """Rows of the data in a full window, of all ranks; None where windows differ."""
        return None if self.adaptive else self.batch_size * self.accumulate_step * self.ranks
