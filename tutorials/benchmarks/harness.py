"""A group's way through a suite: contestants agree with the referee, then are timed in turn, or weighed."""
from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import oracle
from case import Case, samples
from workers import Team, say

TOLERANCE = 1e-5
# Of the drift: for windows that have samples at a kink.
DRIFT = 1e-2
# What contestants train on before their parameters are compared.
WINDOWS = 3
PEAK_WINDOWS = 2
# Who judges a network that NumPy's oracle does not know.
REFEREE = "undivided"

Referee = Callable[[int], list[np.ndarray]]


@dataclass(frozen=True)
class Group:
    """Contestants that are compared with each other.

    Attributes:
        name: Unique in its suite.
        case: What they train.
        contestants: By name.
        base: What the others are held against.
        seconds: How long the base shall take for a round's microbatches.
        microbatches: Of ranks: in a round.
        piece: For memory: samples in a large microbatch; 0: memory is not taken.
        small: For memory: samples in a small microbatch.
        sizes: For the dry run: samples in a microbatch, the smallest and three on a line.
        referee: `(windows) -> parameters`; None: the contestant `REFEREE` is.
    """

    name: str
    case: Case
    contestants: tuple[str, ...]
    base: str = ""
    seconds: float = 0.25
    microbatches: int = 0
    piece: int = 0
    small: int = 0
    sizes: tuple[int, ...] = ()
    referee: Referee | None = None

    def record(self, figures: dict[str, dict], **what: object) -> dict:
        """What is kept of it."""
        return {"name": self.name, "case": asdict(self.case), **what, "base": self.base, "contestants": figures}


@dataclass(frozen=True)
class Suite:
    """Groups, and a way to measure them.

    Attributes:
        help: What it compares.
        groups: `(quick, scratch) -> groups`, with tiny networks if quick. Raises ValueError or OSError if it cannot.
        rounds: To take medians over.
        measure: `(groups, rounds, scratch) -> records`, one by one; None: `time_each`.
    """

    help: str
    groups: Callable[[bool, Path], list[Group]]
    rounds: int
    measure: Callable[[list[Group], int, Path], Iterator[dict]] | None = None


def referee_of(case: Case) -> Referee | None:
    """The oracle for an MLP."""
    return (lambda windows: oracle.trained(case, *samples(case, case.window), windows)) if case.kind == "mlp" else None


def time_each(groups: list[Group], rounds: int, scratch: Path) -> Iterator[dict]:
    """Records of seconds for a microbatch of each contestant, by rounds; with `piece`, of the growth of peak RSS."""
    for i, group in enumerate(groups):
        figures: dict[str, dict] = {name: {} for name in group.contestants}
        say(f"{group.name}: building {len(group.contestants)} contestants")
        with Team(group.contestants, group.case, scratch / str(i), figures) as team:
            agree(group, team)
            microbatches = calibrated(group, team)
            alternate(team, rounds, microbatches, group.name)
        if group.piece:
            weigh(group, figures, scratch / f"{i}-memory")
        sizes = {"small": group.small, "piece": group.piece} if group.piece else {}
        yield group.record(figures, microbatches=microbatches, **sizes)


def agree(group: Group, team: Team) -> None:
    """Compare everybody's parameters with the referee's after a few windows. Who differs cannot go on."""
    start = expected = None
    if group.referee:
        start, expected = (group.referee(windows) for windows in (0, WINDOWS))
    elif REFEREE in team.names:
        start = team.ask(REFEREE, "agree", windows=0)
    # Nothing is timed yet, and most of it is compiling.
    trained = team.ask_all("agree", windows=WINDOWS)
    if not group.referee:
        expected = trained.get(REFEREE)
    for name, parameters in trained.items():
        figures = team.figures[name]
        figures.update(judged(parameters, expected, start))
        if figures["status"] == "disagreed":
            say(f"  {name}: disagreed: {figures['message']}")
    for name in team.names:
        team.figures[name].update(team.ask(name, "state") or {})


def judged(parameters: list, expected: list | None, start: list | None) -> dict:
    """`verdict` of what was trained, with what it is about."""
    if expected is None or start is None:
        return {"status": "crashed", "message": f"no referee: {REFEREE} is not there"}
    difference, drift = oracle.difference(parameters, expected), oracle.drift(parameters, expected, start)
    return {"difference": difference, "drift": drift, **verdict(difference, drift)}


def verdict(difference: float, drift: float) -> dict[str, str]:
    """`status`, and a message if it is "disagreed"."""
    if difference <= TOLERANCE or drift <= DRIFT:
        return {"status": "agreed"}
    return {"status": "disagreed",
            "message": f"parameters differ by {difference:.1e} after {WINDOWS} windows, allowed {TOLERANCE:.0e} "
                       f"(all together by {drift:.1e} of their motion, allowed {DRIFT:.0e})"}


def calibrated(group: Group, team: Team) -> int:
    """Whole windows that take the base about `group.seconds`, measured once everybody is warm."""
    pieces = group.case.accumulate_step
    probe = pieces * max(1, 8 // pieces)
    if group.base in team.names:
        team.ask(group.base, "time", microbatches=probe)
        if seconds := team.ask(group.base, "time", microbatches=probe):
            return pieces * max(1, round(group.seconds / seconds * probe / pieces))
    return probe


def alternate(team: Team, rounds: int, microbatches: int, title: str) -> None:
    """Time all who go on, in random order, round by round. Round 0 warms up."""
    order = team.names
    for name in order:
        team.figures[name]["samples"] = []
    for i in range(rounds + 1):
        say(f"{title}: round {i} of {rounds}")
        random.Random(i).shuffle(order)
        for name in order:
            if name in team.names:
                seconds = team.ask(name, "time", microbatches=microbatches)
                if i and seconds is not None:
                    team.figures[name]["samples"].append(seconds / microbatches)


def weigh(group: Group, figures: dict[str, dict], scratch: Path) -> None:
    """Leave under `growth` how much peak RSS grows to microbatches of `piece` samples, from `small`. Once: it repeats.

    Each peak is a fresh process that trains on one size only, so that what compiling a graph takes is on both sides.
    """
    say(f"{group.name}: memory")
    sizes = (group.small, group.piece)
    names = [name for name in group.contestants if "message" not in figures[name]]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        jobs = {(name, size): pool.submit(ask_fresh, group, name, scratch / f"{name}-{size}", figures, "peak",
                                          batch=size, windows=PEAK_WINDOWS) for name in names for size in sizes}
    for name in names:
        small, large = (jobs[name, size].result() for size in sizes)
        if small and large:
            figures[name].update(growth=large["peak"] - small["peak"], data_bytes=large["data"])


def ask_fresh(
        group: Group, name: str, scratch: Path, figures: dict[str, dict], do: str, **arguments: object) -> dict | None:
    """A new process's answer; None if the contestant cannot go on."""
    with Team([name], group.case, scratch, figures) as team:
        return team.ask(name, do, **arguments) if name in team.names else None
