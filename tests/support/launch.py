"""Start ranks once for all tests: a launch costs more than all that the ranks do in it."""
import fcntl
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from support import rank_cases


@pytest.fixture
def folder_of(tmp_path_factory):
    """`folder_of(launch)`: what the launch left; the processes of pytest share it."""
    base = tmp_path_factory.getbasetemp()

    def folder_of(launch):
        folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / f"ranks-{launch}"
        folder.mkdir(exist_ok=True)
        with (folder / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not (folder / "end.json").exists():
                _launch(folder, *rank_cases.LAUNCHES[launch])
        return folder
    return folder_of


def msrun(folder, count, script, *arguments):
    """The command that runs a script of tests/support on so many ranks, and its environment."""
    programs = Path(sys.executable).parent
    if shutil.which("msrun", path=programs) is None:
        pytest.skip("MindSpore without msrun")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [programs / "msrun", f"--worker_num={count}", f"--local_worker_num={count}", f"--master_port={port}",
               "--join=True", f"--log_dir={folder / 'logs'}", script, folder, *arguments]
    path = os.pathsep.join([str(Path(script).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])])
    return list(map(str, command)), {**os.environ, "PYTHONPATH": path, "PATH": f"{programs}:{os.environ['PATH']}"}


def _launch(folder, count, cases):
    command, environment = msrun(folder, count, rank_cases.__file__, *cases)
    if cases[-1] == "failing":  # for that rank, nobody waits for more than 30 s
        environment["MS_NODE_TIMEOUT"] = "30"
    if len(cases) > 1:  # ranks are late on busy cores, above all if they compile
        environment["MS_CPU_COMM_OP_TIMEOUT"] = "300"
    with _all_cores():
        process = subprocess.Popen(command, cwd=folder, env=environment, text=True,
                                   stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    output = "stopped by the test"
    try:
        output, _ = process.communicate(timeout=1200)
    finally:
        alive = _processes_with(str(folder))
        for number in alive:
            os.kill(number, signal.SIGKILL)
        end = {"status": process.returncode, "alive": alive, "output": output}
        (folder / "end.json").write_text(json.dumps(end), encoding="utf-8")


@contextmanager
def _all_cores():
    """What is started inside may use the cores of pytest's first process, not only this worker's."""
    if "PYTEST_XDIST_WORKER" not in os.environ or not hasattr(os, "sched_setaffinity"):
        yield
        return
    own = os.sched_getaffinity(0)
    os.sched_setaffinity(0, os.sched_getaffinity(os.getppid()))
    try:
        yield
    finally:
        os.sched_setaffinity(0, own)


def _processes_with(argument):
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            if argument in path.read_text(encoding="utf-8", errors="replace").split("\0"):
                found.append(int(path.parent.name))
    return found


@pytest.fixture
def left_by(folder_of):
    """`left_by(case, launch)`: what a case left on each rank; by itself, of the fast launch that has it."""
    def left_by(case, launch=None):
        launch = launch or next(name for name in rank_cases.FAST if case in rank_cases.LAUNCHES[name][1])
        folder, ranks = folder_of(launch), range(rank_cases.LAUNCHES[launch][0])
        results = [json.loads((folder / f"rank{rank}.json").read_text(encoding="utf-8")) for rank in ranks]
        assert all(case in result for result in results), (folder / "end.json").read_text(encoding="utf-8")[-3000:]
        return [result[case] for result in results]
    return left_by
