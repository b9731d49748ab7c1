"""Two ranks that exchange each window or each microbatch: one run of `msrun` for all groups."""
from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from case import Case
from harness import Group, Suite, referee_of
from workers import PATIENCE, Unavailable, report, say

RANKS = 2
RANK = Path(__file__).parents[1] / "rank.py"


def groups(quick: bool, scratch: Path) -> list[Group]:
    """Windows of 1 and 8."""
    cases = [Case("mlp-784-32-32-10" if quick else "mlp-784-512-512-10", 32, n, ranks=RANKS) for n in (1, 8)]
    return [Group(f"2 ranks, N = {case.accumulate_step}", case, ("window", "microbatch"), "microbatch",
                  microbatches=8 if quick else 24, referee=referee_of(case)) for case in cases]


def measure(groups: list[Group], rounds: int, scratch: Path) -> Iterator[dict]:
    """Records of seconds for a microbatch of the slowest rank. Rounds alternate between all contestants."""
    say(f"{RANKS} ranks of each contestant, {rounds} rounds")
    try:
        found = launch(groups, rounds, scratch / "ranks")
    except Unavailable as error:
        found = {group.name: {name: {} for name in group.contestants} for group in groups}
        for figures in found.values():
            for name in figures:
                report(name, figures[name], error)
    for group in groups:
        yield group.record(found[group.name], microbatches=group.microbatches)


def launch(groups: list[Group], rounds: int, scratch: Path) -> dict:
    """What rank 0 wrote of each group's contestants. Raises Unavailable without msrun, or if a rank fails."""
    scratch.mkdir(parents=True)
    here = Path(sys.executable).parent
    msrun = shutil.which("msrun", path=here)
    if msrun is None:
        raise Unavailable("skipped", "msrun is not installed")
    described = [{"name": group.name, "case": asdict(group.case), "contestants": group.contestants,
                  "microbatches": group.microbatches} for group in groups]
    (scratch / "job.json").write_text(json.dumps({"groups": described, "rounds": rounds}), encoding="utf-8")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [msrun, f"--worker_num={RANKS}", f"--local_worker_num={RANKS}", f"--master_port={port}", "--join=True",
               f"--log_dir={scratch / 'logs'}", RANK, scratch]
    # msrun starts whatever `python` is found first.
    environment = {**os.environ, "PATH": f"{here}{os.pathsep}{os.environ['PATH']}"}
    with (scratch / "msrun.log").open("w", encoding="utf-8") as log:
        process = subprocess.Popen(command, cwd=scratch, env=environment, stdout=log, stderr=subprocess.STDOUT)
    try:
        status = process.wait(PATIENCE)
    except subprocess.TimeoutExpired as error:
        raise Unavailable("crashed", f"no end after {PATIENCE} s") from error
    finally:
        _stop(process)
    if status:
        said = sorted(scratch.glob("error.*"), key=lambda file: file.stat().st_mtime)
        message = said[0].read_text(encoding="utf-8") if said else f"msrun ended with status {status}"
        raise Unavailable("crashed", message)
    return json.loads((scratch / "figures.json").read_text(encoding="utf-8"))


def _stop(process: subprocess.Popen) -> None:
    """End msrun and the ranks, each of which it puts into a session of its own."""
    if process.poll() is None:
        # Stopped first, so that it starts no more of them.
        process.send_signal(signal.SIGSTOP)
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text(encoding="ascii").split()
        for child in (*map(int, children), process.pid):
            with suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        process.wait()


SUITE = Suite("two ranks", groups, rounds=12, measure=measure)
