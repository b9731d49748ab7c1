"""Every contestant on one MLP."""
from __future__ import annotations

from pathlib import Path

from case import Case
from harness import FLOOR, Group, Suite, referee_of

CONTESTANTS = (*FLOOR, "ms_accum", "ms_accum-pieces", "ms_accum-by-hand", "undivided", "tutorial", "one-buffer",
               "boost", "parallel-nn", "mindcv", "pytorch-eager", "pytorch-compiled", "jax-multisteps", "jax-scan")


def groups(quick: bool, scratch: Path) -> list[Group]:
    """Window as four microbatches of 32."""
    case = Case("mlp-784-32-32-10" if quick else "mlp-784-512-512-10", 32)
    return [Group("MLP, N = 4", case, CONTESTANTS, FLOOR, 0.02 if quick else 0.25, referee=referee_of(case))]


SUITE = Suite("every contestant on one MLP", groups, rounds=30, quick_rounds=3)
