"""What options of a train step cost, against the tutorial's class; ours twice, to show how equal processes differ."""
from __future__ import annotations

from pathlib import Path

from case import Case
from harness import REFEREE, Group, Suite

CONTESTANTS = ("tutorial", "ms_accum", "ms_accum-again", "ms_accum-sums", "ms_accum-weights", "ms_accum-budget",
               "ms_accum-noise-scale", "ms_accum-clip", "ms_accum-skip-window",
               "ms_accum-skip-microbatch")


def groups(quick: bool, scratch: Path) -> list[Group]:
    """A network that computes little for each parameter, and one that computes much; windows of 4."""
    cases = [("embedding", "embedding-100x8", 4)] if quick else [
        ("embedding", "embedding-80000x128", 32), ("transformer", "transformer-384x6", 4)]
    seconds, found = 0.02 if quick else 0.25, []
    for label, network, batch in cases:
        case = Case(network, batch)
        found.append(Group(f"{label}, N = 4", case, (REFEREE, *CONTESTANTS), "tutorial", seconds))
    return found


SUITE = Suite("the options of a train step", groups, rounds=7)
