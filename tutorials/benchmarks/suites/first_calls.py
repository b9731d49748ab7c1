"""What the first calls take, which compile: processor time and growth of peak RSS, against the number of tensors."""
from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

from case import Case
from harness import REFEREE, Group, Suite, ask_fresh, judged
from workers import Team, say

CONTESTANTS = ("tutorial", "ms_accum", "ms_accum-by-hand")
WIDTH = 16
# Both graphs of a step are compiled in the first one.
WINDOWS = 2


def groups(quick: bool, scratch: Path) -> list[Group]:
    """Networks of 100, 200 and 400 tensors, windows of 2."""
    found = []
    for tensors in (4,) if quick else (100, 200, 400):
        case = Case(f"heads-{WIDTH}x{tensors // 2}", 4, 2)  # a layer has two
        found.append(Group(f"{tensors} tensors", case, CONTESTANTS, ("tutorial",)))
    return found


def measure(groups: list[Group], rounds: int, scratch: Path) -> Iterator[dict]:
    """Records of two windows in a new process, in which all graphs are compiled: samples are seconds of the processor.

    Who disagrees with the undivided batch after them cannot go on. One process at a time, in random order: what else
    runs on this machine changes the wall clock, which is kept, more than the processor's time.
    """
    for i, group in enumerate(groups):
        figures: dict[str, dict] = {name: {} for name in group.contestants}
        order, alone = list(group.contestants), {REFEREE: {}}
        start, expected = (ask_fresh(group, REFEREE, scratch / f"{i}-{windows}", alone, "agree", windows=windows)
                           for windows in (0, WINDOWS))
        for turn in range(rounds):
            random.Random(turn).shuffle(order)
            for name in order:
                say(f"{group.name}: {name}: round {turn + 1} of {rounds}")
                if "message" not in figures[name]:
                    weigh_first_calls(group, name, figures, scratch / f"{i}-{turn}-{name}", start, expected)
        yield group.record(figures)


def weigh_first_calls(group: Group, name: str, figures: dict[str, dict], scratch: Path, start: list | None,
                      expected: list | None) -> None:
    """Add what a new process takes to a contestant's figures, if it agrees with the referee."""
    with Team([name], group.case, scratch, figures) as team:
        taken = team.ask(name, "first_calls", windows=WINDOWS) if name in team.names else None
        parameters = team.ask(name, "parameters") if taken else None
    if parameters:
        figures[name].update(judged(parameters, expected, start))
        for key in ("samples", "growth", "wall") if figures[name]["status"] == "agreed" else ():
            figures[name].setdefault(key, []).append(taken[key])


SUITE = Suite("first calls, which compile", groups, rounds=5, quick_rounds=1, measure=measure)
