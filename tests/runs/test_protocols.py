"""Ranks that make different calls: each draw trains as plain MindSpore would, or every rank raises an error."""
import json
import os
import shutil
import socket
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from support import protocols
from support.protocols import drawn, expected


def launched(folder, ranks, first, count, *options, timeout=60):
    """`[[what each rank found] of each draw]`, and msrun's exit status."""
    programs = Path(sys.executable).parent
    if shutil.which("msrun", path=programs) is None:
        pytest.skip("MindSpore without msrun")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    script = Path(protocols.__file__)
    command = [programs / "msrun", f"--worker_num={ranks}", f"--local_worker_num={ranks}", f"--master_port={port}",
               "--join=True", f"--log_dir={folder / 'logs'}", script, folder, first, count, *options]
    path = os.pathsep.join([str(script.parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path, "PATH": f"{programs}:{os.environ['PATH']}",
                   "MS_CPU_COMM_OP_TIMEOUT": str(timeout)}
    done = subprocess.run(list(map(str, command)), cwd=folder, env=environment, text=True, capture_output=True,
                          timeout=1200, check=False)
    found = []
    for rank in range(ranks):
        with (folder / f"rank{rank}.jsonl").open(encoding="utf-8") as file:
            found.append([json.loads(line) for line in file])
    return list(zip(*found)), done.returncode


def result_of(draw):
    """"right", "errors", or what is wrong; and whether the draw is legal."""
    mode, programs, is_legal = drawn(draw[0]["number"], len(draw))
    said = [of_rank["said"] for of_rank in draw]
    if any(said):
        return ("errors" if all(said) else "an error on some ranks"), is_legal
    off = [np.abs(np.concatenate(of_rank["parameters"][2 * which:2 * which + 2]) - plain).max()
           for of_rank in draw for which, plain in enumerate(expected(mode, programs))]
    return ("right" if max(off) < 1e-5 else "a difference"), is_legal


@pytest.mark.parametrize(("ranks", "first", "count"), [
    (2, 0, 12), *(pytest.param(2, first, 100, marks=pytest.mark.slow) for first in range(100, 600, 100)),
    pytest.param(4, 600, 100, marks=pytest.mark.slow)])
def test_each_draw_trains_as_one_process_or_raises_on_every_rank(tmp_path, ranks, first, count):
    """Control: without the comparison of tags, below."""
    found, status = launched(tmp_path, ranks, first, count)
    results = Counter(map(result_of, found))
    assert status == 0
    assert len(found) == count
    assert set(results) <= {("right", True), ("right", False), ("errors", False)}, results
    assert results["right", True] > count // 4
    assert results["errors", False] > count // 12


@pytest.mark.slow
def test_without_tags_ranks_differ_or_wait(tmp_path):
    """Control. Draws that raise on every rank above (12 of the first 60); here some do not."""
    found, status = launched(tmp_path, 2, 0, 60, "untagged", timeout=5)
    results = Counter(result for result, _ in map(result_of, found))
    assert status != 0 or results["a difference"] + results["an error on some ranks"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("first", [*range(1000, 1006)])
def test_where_ranks_sum_each_microbatch_a_disagreement_ends_the_run(tmp_path, first):
    """A graph goes on after it, so ranks end one after the other; each has an error."""
    found, status = launched(tmp_path, 2, first, 1, "microbatch", timeout=10)
    assert (status, found) == (1, [])
