"""Contestants that are several processes: one run of MindSpore's `msrun` measures all groups of as many ranks."""
from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from fleet import PATIENCE, Unavailable, without_paths
from rounds import Results, record_of, say
from suites import Group

RANK = Path(__file__).with_name("rank.py")


def time_launch(groups: list[Group], rounds: int, scratch: Path) -> list[dict]:
    """The groups' records: seconds for a microbatch of the slowest rank, in rounds that alternate between all contestants of all groups."""
    scratch.mkdir(parents=True)
    ranks = groups[0].case["ranks"]
    say(f"{', '.join(group.name for group in groups)}: {ranks} of each contestant, {rounds} rounds")
    everyone = {group.name: Results() for group in groups}
    try:
        figures = launch(ranks, groups, rounds, scratch)
        for name, results in everyone.items():
            results.update(figures[name])
    except Unavailable as error:
        for group in groups:
            for name in group.contestants:
                everyone[group.name].unavailable(name, error)
    return [record_of(group, everyone[group.name], microbatches=group.microbatches, base=list(group.base)) for group in groups]


def launch(ranks: int, groups: list[Group], rounds: int, scratch: Path) -> dict:
    """What rank 0 wrote of each group's contestants. Raises Unavailable without msrun, or if a rank fails."""
    here = Path(sys.executable).parent
    msrun = shutil.which("msrun", path=here)
    if msrun is None:
        raise Unavailable("skipped", "msrun is not installed")
    described = [{"name": group.name, "case": group.case, "contestants": group.contestants, "microbatches": group.microbatches}
                 for group in groups]
    (scratch / "job.json").write_text(json.dumps({"groups": described, "rounds": rounds}), encoding="utf-8")
    command = [msrun, f"--worker_num={ranks}", f"--local_worker_num={ranks}", f"--master_port={_free_port()}", "--join=True",
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
        raise Unavailable("crashed", _first_error(scratch) or f"msrun ended with status {status}")
    return json.loads((scratch / "figures.json").read_text(encoding="utf-8"))


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


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


def _first_error(scratch: Path) -> str | None:
    """What the first rank that failed said."""
    errors = sorted(scratch.glob("error.*"), key=lambda file: file.stat().st_mtime)
    return without_paths(errors[0].read_text(encoding="utf-8")) if errors else None
