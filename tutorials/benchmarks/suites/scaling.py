"""The cost of a microbatch against the length of the window."""
from __future__ import annotations

from pathlib import Path

from case import Case
from harness import FLOOR, Group, Suite, referee_of

CONTESTANTS = (*FLOOR, "ms_accum", "ms_accum-pieces", "tutorial")


def groups(quick: bool, scratch: Path) -> list[Group]:
    """Windows of 1 to 64 microbatches."""
    network = "mlp-784-32-32-10" if quick else "mlp-784-512-512-10"
    seconds, lengths = (0.02, (1, 4)) if quick else (0.25, (1, 2, 4, 8, 16, 32, 64))
    cases = [Case(network, 32, n) for n in lengths]
    return [Group(f"MLP, N = {case.accumulate_step}", case, CONTESTANTS, FLOOR, seconds, referee=referee_of(case))
            for case in cases]


SUITE = Suite("lengths of the window", groups, rounds=12, quick_rounds=2)
