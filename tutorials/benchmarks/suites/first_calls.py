"""What the first calls take, which compile: processor time and growth of peak RSS, against the number of tensors."""
from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

from case import CLASSES, Case
from harness import Group, Suite, judged, referee_of
from workers import Team, say

CONTESTANTS = ("tutorial", "ms_accum", "ms_accum-by-hand")
WIDTH = 16
WINDOWS = 2


def groups(quick: bool, scratch: Path) -> list[Group]:
    """Networks of 100, 200 and 400 tensors, windows of 2."""
    found = []
    for tensors in (4,) if quick else (100, 200, 400):
        widths = [WIDTH] * (tensors // 2)  # a layer has two
        case = Case("-".join(map(str, ["mlp", *widths, CLASSES])), 4, 2)
        found.append(Group(f"{tensors} tensors", case, CONTESTANTS, ("tutorial",), referee=referee_of(case)))
    return found


def measure(groups: list[Group], rounds: int, scratch: Path) -> Iterator[dict]:
    """Records of two windows in a new process, in which all graphs are compiled: samples are seconds of the processor.

    Who disagrees with the referee after them cannot go on. One process at a time, in random order: what else runs on
    this machine changes the wall clock, which is kept, more than the processor's time.
    """
    for i, group in enumerate(groups):
        figures: dict[str, dict] = {name: {} for name in group.contestants}
        order = list(group.contestants)
        for turn in range(rounds):
            random.Random(turn).shuffle(order)
            for name in order:
                say(f"{group.name}: {name}: round {turn + 1} of {rounds}")
                if "message" not in figures[name]:
                    weigh_first_calls(group, name, figures, scratch / f"{i}-{turn}-{name}")
        yield group.record(figures)


def weigh_first_calls(group: Group, name: str, figures: dict[str, dict], scratch: Path) -> None:
    """Add what a new process takes to a contestant's figures, if it agrees with the referee."""
    with Team([name], group.case, scratch, figures) as team:
        taken = team.ask(name, "first_calls", windows=WINDOWS) if name in team.names else None
        parameters = team.ask(name, "parameters") if taken else None
    if parameters:
        start, expected = (group.referee(windows) for windows in (0, WINDOWS))
        figures[name].update(judged(parameters, expected, start))
        for key in ("samples", "growth", "wall") if figures[name]["status"] == "agreed" else ():
            figures[name].setdefault(key, []).append(taken[key])


SUITE = Suite("first calls, which compile", groups, rounds=5, quick_rounds=1, measure=measure)
