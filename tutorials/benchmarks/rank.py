"""One rank, started by `msrun` from suites/distributed.py: `rank.py FOLDER`, with the groups in FOLDER/job.json.

All ranks go through all contestants in the same order. Each contestant's exchanges are counted op by op, then its
parameters after a few windows are held against NumPy's on every rank, and whoever agrees is timed in alternating
rounds. Rank 0 leaves FOLDER/figures.json, a rank that fails FOLDER/error.<rank>.
"""
from __future__ import annotations

import json
import os
import random
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

import contestants
import numpy as np
import oracle
from case import Case, samples
from harness import WINDOWS, verdict
from mindspore import Tensor, ops
from mindspore.communication import get_rank, init
from workers import unavailable

from ms_accum import avoid_busy_waiting

COLLECTIVES = (ops.AllReduce, ops.AllGather, ops.ReduceScatter)


def main(folder: Path) -> None:
    """Measure, write, and leave together with the others: who ends earlier makes those fail that still communicate."""
    avoid_busy_waiting()
    init()
    try:
        figures = measure(**json.loads((folder / "job.json").read_text(encoding="utf-8")))
        if get_rank() == 0:
            (folder / "figures.json").write_text(json.dumps(figures), encoding="utf-8")
        largest(0.0)
    except Exception as error:
        (folder / f"error.{get_rank()}").write_text(unavailable(error).message, encoding="utf-8")
        raise


def measure(groups: list[dict], rounds: int) -> dict[str, dict[str, dict]]:
    """Figures by group and contestant."""
    figures: dict[str, dict[str, dict]] = {group["name"]: {} for group in groups}
    timed = []
    for group in groups:
        case = Case(**group["case"])
        for name in group["contestants"]:
            found = figures[group["name"]][name] = exchanges(name, case)
            contestant = contestants.builder(name)(case)
            start, end = (oracle.trained(case, *samples(case, case.window), windows) for windows in (0, WINDOWS))
            trained = contestant.agree(WINDOWS)
            difference, drift = largest(oracle.difference(trained, end)), largest(oracle.drift(trained, end, start))
            found.update(difference=difference, drift=drift, **contestant.state(), **verdict(difference, drift))
            if found["status"] == "agreed":
                timed.append((contestant, group["microbatches"], found.setdefault("samples", [])))
    # Round 0 warms up.
    for i in range(rounds + 1):
        random.Random(i).shuffle(timed)
        for contestant, microbatches, seconds in timed:
            largest(0.0)  # waits for all
            sample = largest(contestant.time(microbatches)) / microbatches
            if i:
                seconds.append(sample)
    return figures


def exchanges(name: str, case: Case) -> dict[str, int]:
    """Collectives of a window and the bytes that a rank hands to them, counted where they are called, op by op."""
    contestant = contestants.builder(name)(case)
    contestant.load(case.batch, distinct=True)
    handed: list[int] = []

    def counted(call: Callable) -> Callable:
        def count_and_call(collective: Any, x: Any) -> Any:
            handed.append(x.nbytes)
            return call(collective, x)
        return count_and_call

    with ExitStack() as patches:
        patches.enter_context(patch.dict(os.environ, MS_JIT="0"))
        for collective in COLLECTIVES:
            patches.enter_context(patch.object(collective, "__call__", counted(collective.__call__)))
        contestant.run(case.accumulate_step)
    return {"collectives": len(handed), "collective_bytes": sum(handed)}


def largest(number: float) -> float:
    """The largest of all ranks' numbers."""
    gathered = ops.AllGather()(Tensor(np.array([number]).view(np.int32))).asnumpy()
    return float(gathered.view(np.float64).max())


if __name__ == "__main__":
    main(Path(sys.argv[1]))
