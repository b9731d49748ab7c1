"""The choices that decide what a run on text computes."""
from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Optional, Union

from ms_accum.reference.settings import ACCUMULATE_STEP, NOISE_SCALE, option
from ms_accum.reference.settings import Settings as AnySettings

AT_MOST = 64


@dataclass(frozen=True, kw_only=True)
class Settings(AnySettings):
    """The choices that decide what a run computes. `weigh_bytes` is False for the mean of means."""

    batch_size: int = option(16, "rows in a microbatch: documents, or parts of 64 bytes of longer ones")
    accumulate_step: Union[int, str] = option(2, ACCUMULATE_STEP)
    budget: Optional[int] = option(
        None, "close a window once its microbatches hold this many tokens, which are bytes here, or after "
        f"{AT_MOST} microbatches; --accumulate-step is not used then")
    epochs: int = option(3, "passes over the training documents")
    lr: float = option(1e-3, "learning rate of Adam")
    optimizer: str = "adam"
    clip_norm: Optional[float] = option(1.0, "clip the accumulated gradient to this global norm, once per update")
    noise_scale: bool = option(False, NOISE_SCALE.format("bytes"))
    weigh_bytes: bool = True

    @property
    def effective_batch(self) -> Optional[int]:
        """Rows in a full window, of all ranks; None with a budget, where windows differ."""
        return None if self.budget else super().effective_batch

    def mean_of_means(self) -> Settings:
        """Return the same run with each microbatch counted alike, however many bytes it holds."""
        return replace(self, weigh_bytes=False, noise_scale=False)
