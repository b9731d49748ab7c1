"""A group's way through a suite: agree, then be timed in alternating rounds, or have its peak memory taken."""
from __future__ import annotations

import os
import random
import sys
from concurrent.futures import ThreadPoolExecutor
from math import inf
from pathlib import Path

import numpy as np
import oracle
import plan
from fleet import Unavailable, Worker, fleet
from suites import REFEREE, WINDOWS, Group

TOLERANCE = 1e-5
# Of the drift: for windows that have samples at a kink.
DRIFT = 1e-2
PEAK_WINDOWS = 2
# Rounds of memory beside a measurement of time.
WEIGHINGS = 3


class Results(dict):
    """Figures of each contestant by name; `status` is "agreed" until a measurement or a failure replaces it."""

    def of(self, name: str) -> dict:
        return self.setdefault(name, {})

    def unavailable(self, name: str, error: Unavailable) -> None:
        """Report a contestant that cannot go on."""
        self.of(name).update(status=error.reason, message=str(error))
        say(f"  {name}: {error.reason}: {error}")


def time_group(group: Group, rounds: int, scratch: Path) -> dict:
    """The group's record: seconds for a microbatch of each contestant, round by round.

    With `group.piece`, also how much peak RSS grows, as in `weigh_group`.
    """
    results = Results()
    say(f"{group.name}: building {len(group.contestants)} contestants")
    with fleet(group.contestants, group.case, scratch, results.unavailable) as workers:
        agreed = agree(group, workers, results, scratch)
        if not group.microbatches:
            for name, worker in agreed.items():
                _ask(results, name, lambda name=name, worker=worker: results.of(name).update(worker.ask("state")))
        microbatches = group.microbatches or _microbatches(group, agreed, results)
        _alternate(agreed, results, rounds, microbatches, group.name)
    what = {"microbatches": microbatches, "base": list(group.base)}
    if group.piece:
        what.update(small=group.small, piece=group.piece)
        _weigh(group, list(agreed), results, min(rounds, WEIGHINGS), scratch / "memory", "growth")
    return record_of(group, results, **what)


def weigh_group(group: Group, rounds: int, scratch: Path) -> dict:
    """The group's record: how much peak RSS grows from microbatches of the case's size to those of `group.piece` samples.

    Each peak is a fresh process that trains on one size only, so that what compiling a graph takes is on both sides.
    """
    results = Results()
    with fleet(group.contestants, group.case, scratch / "agree", results.unavailable) as workers:
        agreed = agree(group, workers, results, scratch)
        for name, worker in agreed.items():
            _ask(results, name, lambda name=name, worker=worker: results.of(name).update(worker.ask("state")))
    _weigh(group, list(agreed), results, rounds, scratch, "samples")
    return record_of(group, results, piece=group.piece, base=list(group.base))


def plan_group(group: Group, rounds: int, scratch: Path) -> dict:
    """The group's record: what a window takes on Ascend, planned in a dry run.

    A process for each size, as a compiled graph keeps its constants. One at a time, as a network may take half of this machine's
    memory. The figures are exact: more rounds would give the same.
    """
    results = Results()
    for name in group.contestants:
        say(f"{group.name}: {name}")
        answers = {}
        for size in group.sizes:
            if "message" not in results.of(name):
                answers[size] = _peak(group, name, scratch / f"{name}-{size}", results, do="plan", batch=size)
        if "message" not in results.of(name):
            peaks = {size: answer["peak"] for size, answer in answers.items()}
            parameters = answers[group.sizes[0]]["parameters"]
            results.of(name).update(status="measured", parameters=parameters, peaks=peaks,
                                    **plan.figures(peaks, parameters, group.case["accumulate_step"]))
    return record_of(group, results, base=[])


def _weigh(group: Group, names: list[str], results: Results, rounds: int, scratch: Path, key: str) -> None:
    """Leave the growth of each in its figures."""
    sizes = (group.small or group.case["batch"], group.piece)
    for i in range(rounds):
        say(f"{group.name}: memory: round {i + 1} of {rounds}")
        jobs = [(name, size) for name in names for size in sizes if "message" not in results.of(name)]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            answers = pool.map(lambda job, i=i: _peak(group, job[0], scratch / f"{i}-{job[0]}-{job[1]}", results,
                                                            do="peak", batch=job[1], windows=PEAK_WINDOWS), jobs)
            peaks = {job: answer for job, answer in zip(jobs, answers) if answer}
        for name in names:
            if all((name, size) in peaks for size in sizes):
                small, large = (peaks[name, size] for size in sizes)
                results.of(name)["data_bytes"] = large["data"]
                results.of(name).setdefault(key, []).append(large["peak"] - small["peak"])


def agree(group: Group, workers: dict[str, Worker], results: Results, scratch: Path) -> dict[str, Worker]:
    """The workers whose parameters are the referee's after a few windows, and those that have no update to judge."""
    def train(name: str, windows: int = WINDOWS) -> list[np.ndarray] | None:
        file = scratch / f"{name}.npz"
        try:
            results.of(name)["digest"] = workers[name].ask("agree", windows=windows, file=str(file))["digest"]
        except Unavailable as error:
            results.unavailable(name, error)
            return None
        with np.load(file) as arrays:
            return [arrays[key] for key in arrays.files]

    start = expected = None
    if group.referee:
        start, expected = (group.referee(windows) for windows in (0, WINDOWS))
    elif REFEREE in workers:
        start = train(REFEREE, 0)
    # Nothing is timed yet, and most of it is compiling.
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        trained = {name: parameters for name, parameters in zip(workers, pool.map(train, workers)) if parameters is not None}
    if not group.referee:
        expected = trained.get(REFEREE)
    return {name: workers[name] for name, parameters in trained.items() if _judge(name, parameters, expected, start, results)}


def _judge(name: str, parameters: list[np.ndarray], expected: list[np.ndarray] | None, start: list[np.ndarray] | None,
           results: Results) -> bool:
    figures = results.of(name)
    if not parameters:
        figures["status"] = "no update"
        return True
    if expected is None or start is None:
        figures.update(status="crashed", message=f"no referee: {REFEREE} is not there")
        return False
    difference, drift = oracle.difference(parameters, expected), oracle.drift(parameters, expected, start)
    figures.update(difference=difference, drift=drift, **verdict(difference, drift))
    if figures["status"] == "disagreed":
        say(f"  {name}: disagreed: {figures['message']}")
    return figures["status"] == "agreed"


def verdict(difference: float, drift: float = inf) -> dict[str, str]:
    """`status`, and a message if it is "disagreed"."""
    if difference <= TOLERANCE or drift <= DRIFT:
        return {"status": "agreed"}
    return {"status": "disagreed",
            "message": f"parameters differ by {difference:.1e} after {WINDOWS} windows, allowed {TOLERANCE:.0e}"
                       + (f" (all together by {drift:.1e} of their motion, allowed {DRIFT:.0e})" if drift < inf else "")}


def _microbatches(group: Group, workers: dict[str, Worker], results: Results) -> int:
    """Whole windows that take the base about `group.seconds`, measured once everybody is warm."""
    pieces = group.case["accumulate_step"]
    probe = pieces * max(1, 8 // pieces)
    for worker in (workers[name] for name in group.base if name in workers):
        try:
            worker.ask("time", microbatches=probe)
            seconds = worker.ask("time", microbatches=probe)["seconds"]
            return pieces * max(1, round(group.seconds / seconds * probe / pieces))
        except Unavailable as error:
            results.unavailable(worker.contestant, error)
    return probe


def _alternate(workers: dict[str, Worker], results: Results, rounds: int, microbatches: int, title: str) -> None:
    order = list(workers)
    for name in order:
        results.of(name)["samples"] = []
    # Round 0 warms up.
    for i in range(rounds + 1):
        say(f"{title}: round {i} of {rounds}")
        random.Random(i).shuffle(order)
        for name in order:
            if "message" not in results.of(name):
                _ask(results, name, lambda name=name, i=i: _sample(workers[name], results.of(name), microbatches, warm_up=i == 0))


def _sample(worker: Worker, figures: dict, microbatches: int, warm_up: bool) -> None:
    seconds = worker.ask("time", microbatches=microbatches)["seconds"]
    if not warm_up:
        figures["samples"].append(seconds / microbatches)


def _peak(group: Group, name: str, scratch: Path, results: Results, **question: object) -> dict:
    """A new worker's answer, empty if it fails."""
    answer: dict = {}
    with fleet([name], group.case, scratch, results.unavailable) as workers:
        for worker in workers.values():
            _ask(results, name, lambda worker=worker: answer.update(worker.ask(**question)))
    return answer


def _ask(results: Results, name: str, question: object) -> None:
    try:
        question()
    except Unavailable as error:
        results.unavailable(name, error)


def record_of(group: Group, results: Results, **what: object) -> dict:
    """What is kept of a group."""
    # An epoch's case holds the folder that the digits were unpacked into, which is gone by now.
    case = {key: value for key, value in group.case.items() if key != "folder"}
    return {"name": group.name, "case": case, **what, "contestants": {name: results.of(name) for name in group.contestants}}


def say(line: str) -> None:
    """Progress, on stderr."""
    print(line, file=sys.stderr, flush=True)
