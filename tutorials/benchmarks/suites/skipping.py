"""What it costs to look for NaN and infinity; ours twice, to show what two processes of the same code differ by."""
from __future__ import annotations

from pathlib import Path

from case import Case
from harness import REFEREE, Group, Suite, referee_of

CONTESTANTS = ("ms_accum", "ms_accum-again", "ms_accum-skip-window", "ms_accum-skip-microbatch")


def groups(quick: bool, scratch: Path) -> list[Group]:
    """Three networks, windows of 4."""
    cases = [("MLP", "mlp-784-32-32-10", 32), ("CNN", "cnn-8x1", 1)] if quick else [
        ("MLP", "mlp-784-512-512-10", 32), ("CNN", "cnn-16x2", 2), ("transformer", "transformer-384x6", 4)]
    seconds, found = 0.02 if quick else 0.25, []
    for label, network, batch in cases:
        case = Case(network, batch)
        names = CONTESTANTS if label == "MLP" else (REFEREE, *CONTESTANTS)
        found.append(Group(f"{label}, N = 4", case, names, ("ms_accum",), seconds, referee=referee_of(case)))
    return found


SUITE = Suite("on_nonfinite", groups, rounds=30, quick_rounds=2)
