"""Growth of peak RSS from 16 samples to 16,384, in 8 pieces, and of ever more pieces of the same size."""
from __future__ import annotations

from pathlib import Path

from case import Case
from harness import REFEREE, Group, Suite, referee_of

OURS = ("ms_accum", "ms_accum-pieces")
EIGHT = (REFEREE, *OURS, "parallel-nn", "tutorial")


def groups(quick: bool, scratch: Path) -> list[Group]:
    """Eight pieces of everybody, and other numbers of ours."""
    network, piece = ("mlp-784-32-32-32-10", 1024) if quick else ("mlp-784-512-512-512-10", 2048)
    cases = {"8 pieces": Case(network, 2, 8)}
    cases |= {f"N = {n}": Case(network, 2, n) for n in ((16,) if quick else (1, 4, 16, 64))}
    return [Group(name, case, EIGHT if name == "8 pieces" else OURS, (REFEREE,) if name == "8 pieces" else (),
                  seconds=0, piece=piece, referee=referee_of(case)) for name, case in cases.items()]


SUITE = Suite("growth of peak memory", groups, rounds=3, quick_rounds=1)
