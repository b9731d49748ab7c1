"""tutorials/benchmarks: quick runs of the suites, who is caught, skipped or reported, records and their report."""
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[1] / "tutorials" / "benchmarks"
ABSOLUTE_PATH = re.compile(r"""(?:^|[\s"'=:(])/[\w.]""")

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="peak RSS is read from /proc")


def run(script, *arguments, **environment):
    """What a script prints, run in a process of its own with all benchmarks on its path."""
    path = os.pathsep.join([environment.pop("before", ""), str(BENCHMARKS), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run([sys.executable, BENCHMARKS / script, *map(str, arguments)], capture_output=True, text=True, check=False,
                          env={**os.environ, "PYTHONPATH": path.strip(os.pathsep), **environment})
    assert done.returncode == 0, done.stderr
    return done.stdout


def quick(suite, folder, *arguments, **environment):
    """A quick run of a suite: what its last line says, and its record."""
    printed = run("run.py", "--suite", suite, "--quick", "--output", folder, *arguments, **environment)
    return json.loads(printed.splitlines()[-1]), json.loads((folder / f"{suite}.json").read_text(encoding="utf-8"))


def test_parts_compute_what_they_say():
    """See tests/benchmark_parts.py."""
    assert run(Path(__file__).with_name("benchmark_parts.py"), "others").split() == [
        "refusals", "costs", "seeds", "growth", "late_ranks", "limits", "states", "reference"]


def test_floors_compute_their_gradients():
    saving = {"MS_DEV_SAVE_GRAPHS": "3", "MS_DEV_SAVE_GRAPHS_PATH": "graphs"}
    assert run(Path(__file__).with_name("benchmark_parts.py"), "floors", **saving) == "floors\n"


def test_a_suite_and_its_report(tmp_path):
    """One contestant agrees, one disagrees, one has no package, and one brings its process down; the report needs the record alone."""
    (tmp_path / "torch.py").write_text("raise ModuleNotFoundError(\"No module named 'torch'\", name='torch')", encoding="utf-8")
    (tmp_path / "jax.py").write_text("import os, sys\nprint('jax went /some/where/wrong.so', file=sys.stderr, flush=True)\nos._exit(7)",
                                     encoding="utf-8")
    names = "fused,wrong-denominator,pytorch-eager,jax-scan"
    summary, record = quick("mlp", tmp_path, "--contestants", names, before=str(tmp_path))
    (group,) = summary["groups"].values()
    assert group["base"] in ("floor", "floor-branch")
    assert group["ratios"]["fused"] > 0
    assert {name: group["status"][name] for name in names.split(",")} == {
        "fused": "agreed", "wrong-denominator": "disagreed", "pytorch-eager": "skipped", "jax-scan": "crashed"}
    assert re.search(r"parameters differ by \S+ after 3 windows, allowed 1e-05", group["messages"]["wrong-denominator"])
    assert group["messages"]["pytorch-eager"] == "package torch is not installed"
    assert group["messages"]["jax-scan"] == "jax went wrong.so (exit status 7)"
    contestants = record["groups"][0]["contestants"]
    assert contestants["fused"]["difference"] <= 1e-5
    assert len(contestants["fused"]["samples"]) == 3
    assert contestants["fused"]["state_bytes"] / contestants["fused"]["parameter_bytes"] == pytest.approx(1, abs=0.01)
    assert "samples" not in contestants["wrong-denominator"]

    assert {"date", "commit", "cores", "memory_gib", "versions", "command", "groups"} <= record.keys()
    assert record["versions"].keys() >= {"python", "mindspore", "numpy", "ms_accum"}
    assert record["command"].startswith("python tutorials/benchmarks/run.py --suite mlp --quick")
    assert not ABSOLUTE_PATH.search((tmp_path / "mlp.json").read_text(encoding="utf-8"))

    printed = run("report.py", tmp_path / "mlp.json", "--output", tmp_path)
    table = (tmp_path / "report.md").read_text(encoding="utf-8")
    assert printed.strip() == table.strip()
    assert re.search(r"^\|\*\*fused\*\*\|[\d.]+\|", table, re.MULTILINE)
    assert "wrong-denominator: disagreed: parameters differ" in table
    assert (tmp_path / "report.png").read_bytes().startswith(b"\x89PNG")


# --- slow: quick runs of the other suites, whose parts are tested above ---------------------------------------------------


@pytest.mark.slow
def test_memory(tmp_path):
    summary, record = quick("memory", tmp_path, "--contestants", "fused")
    assert {group["status"]["fused"] for group in summary["groups"].values()} == {"agreed"}
    assert summary["groups"]["8 pieces"]["base"] == "undivided"
    assert all(group["contestants"]["fused"]["samples"][0] > 0 for group in record["groups"])
    # A window as one batch grows the process at least by that batch.
    undivided = record["groups"][0]["contestants"]["undivided"]
    assert undivided["samples"][0] > undivided["data_bytes"] == 8 * 1024 * 784 * 4


@pytest.mark.slow
def test_mnist(tmp_path):
    summary, record = quick("mnist", tmp_path, "--contestants", "reference,tutorial-loop")
    (group,) = summary["groups"].values()
    assert group["status"] == {"reference": "agreed", "tutorial-loop": "agreed"}
    assert group["ratios"]["tutorial-loop"] > 0
    assert not ABSOLUTE_PATH.search(json.dumps(record))


@pytest.mark.slow
def test_scaling(tmp_path):
    summary, record = quick("scaling", tmp_path, "--rounds", "1", "--contestants", "fused,update-only")
    assert {group["status"]["fused"] for group in summary["groups"].values()} == {"agreed"}
    assert {group["case"]["network"].split("-")[0] for group in record["groups"]} == {"mlp", "cnn", "transformer"}
    printed = run("report.py", tmp_path / "scaling.json", "--output", tmp_path)
    without_update = []
    for group in record["groups"][:2]:
        fused, update, base = (group["contestants"][name]["samples"][0] for name in ("fused", "update-only", group["base"]))
        without_update.append(f"{(fused - update) / base:.2f}")
    assert f"|fused less update-only|{'|'.join(without_update)}|" in printed


@pytest.mark.slow
def test_skipping(tmp_path):
    summary, record = quick("skipping", tmp_path, "--rounds", "1", "--contestants", "skip-window,skip-microbatch")
    assert [group["case"]["network"].split("-")[0] for group in record["groups"]] == ["mlp", "cnn"]
    for group in summary["groups"].values():
        assert group["base"] == "fused"
        assert {group["status"][name] for name in ("fused", "skip-window", "skip-microbatch")} == {"agreed"}
        assert group["ratios"]["skip-window"] > 0


@pytest.mark.slow
def test_distributed(tmp_path):
    """Ranks agree with the joint batch, a wrong divisor does not; a window's exchange is one of N; a shard is a half."""
    summary, record = quick("distributed", tmp_path, "--contestants", "window,microbatch,shard,wrong-denominator")
    for name, group in summary["groups"].items():
        status = group["status"]
        assert status.pop("wrong-denominator") == ("agreed" if name == "1 rank, N = 1" else "disagreed")
        assert status == dict.fromkeys(("alone",) if name.startswith("1") else ("alone", "window", "microbatch", "shard"), "agreed")
    one, _, each, whole = record["groups"]
    assert one["contestants"]["alone"]["collectives"] == 0
    assert len(whole["contestants"]["shard"]["samples"]) == 1
    window, microbatch, shard = (whole["contestants"][name] for name in ("window", "microbatch", "shard"))
    assert window["collectives"] == each["contestants"]["microbatch"]["collectives"] == 1
    assert microbatch["collectives"] == 4
    assert 4 * window["collective_bytes"] == microbatch["collective_bytes"] == 4 * (window["parameter_bytes"] + 12)
    assert shard["state_bytes"] / shard["parameter_bytes"] == pytest.approx(1 / 2, abs=0.01)
    assert not ABSOLUTE_PATH.search(json.dumps(record))
