"""Start ranks once for all tests: a launch costs more than all that the ranks do in it."""
import fcntl
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
import rank_cases
from rank_cases import OPTIMIZERS, SYNCS

MATRIX = [f"trained:{sync}:{sizes}:{optimizer}"
          for sync in SYNCS for sizes in ("equal", "unequal", "uneven") for optimizer in OPTIMIZERS]
BAD = [f"trained:{sync}:{sizes}:SGD:{what}" for sync, sizes, what in (
    ("window", "uneven", "nan:skip_window"), ("shard", "uneven", "nan:skip_microbatch"),
    ("microbatch", "uneven", "nan:skip_window"), ("window", "equal", "overflow"), ("window", "uneven", "nan"))]
NOISE = [f"trained:{sync}:uneven:still:noise{skip}"
         for sync, skip in (("window", ""), ("microbatch", ""), ("shard", ""), ("window", ":skip_microbatch"))]
RESUME = ["resume:window:ckpt", "resume:microbatch:ckpt", "resume:shard:safetensors"]
LAUNCHES = {  # ranks, cases
    # Every sync with each kind of sizes and each optimizer.
    "fast": (2, [*(case for i, case in enumerate(MATRIX) if (i + i // 3 + i // 9) % 3 == 0), *BAD, *NOISE, *RESUME,
                 "together:jit", "by_hand", "traffic:window", "traffic:microbatch", "refusals", "compiled_before:jit", "mnist",
                 "killed"]),
    "compiled": (2, [*MATRIX, *(f"{case}:jit" for case in [*MATRIX[2::3], *BAD[:4], *NOISE, *RESUME, "mnist"]),
                     "trained:window:uneven:SGD:nan:skip_microbatch:jit", "trained:microbatch:unequal:SGD:split:jit",
                     "trained:shard:uneven:Adam:split:jit", *(f"trained:{sync}:uneven:SGD:graph" for sync in SYNCS)]),
    "four": (4, [*MATRIX[2::3], "trained:window:uneven:Adam", "trained:window:uneven:SGD:nan:skip_microbatch",
                 *(f"trained:{sync}:uneven:Adam:jit" for sync in SYNCS)]),
}


def of_cases(kind, feature=None):
    """Parametrize a test with `(launch, case)` of each case of a kind and a feature; all but the fast ones are slow."""
    found = [pytest.param(launch, case, marks=[] if launch == "fast" else [pytest.mark.slow])
             for launch, (_, cases) in LAUNCHES.items() for case in cases
             if case.split(":")[0] == kind and (feature is None or feature in case.split(":"))]
    return pytest.mark.parametrize(("launch", "case"), found)


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
                _launch(folder, *LAUNCHES[launch])
        return folder
    return folder_of


def _launch(folder, count, cases):
    programs = Path(sys.executable).parent
    if shutil.which("msrun", path=programs) is None:
        pytest.skip("MindSpore without msrun")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    script = Path(rank_cases.__file__)
    command = [programs / "msrun", f"--worker_num={count}", f"--local_worker_num={count}", f"--master_port={port}",
               "--join=True", f"--log_dir={folder / 'logs'}", script, folder, *cases]
    path = [script.parents[1], *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}", "PYTHONPATH": os.pathsep.join(map(str, path))}
    process = subprocess.Popen(list(map(str, command)), cwd=folder, env=environment, text=True,
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


def _processes_with(argument):
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            if argument in path.read_text(encoding="utf-8", errors="replace").split("\0"):
                found.append(int(path.parent.name))
    return found


@pytest.fixture
def left_by(folder_of):
    """`left_by(case, launch)`: what a case left on each rank."""
    def left_by(case, launch="fast"):
        folder = folder_of(launch)
        results = [json.loads((folder / f"rank{rank}.json").read_text(encoding="utf-8")) for rank in range(LAUNCHES[launch][0])]
        assert all(case in result for result in results), (folder / "end.json").read_text(encoding="utf-8")[-3000:]
        return [result[case] for result in results]
    return left_by
