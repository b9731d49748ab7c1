"""Checks of parts of tutorials/benchmarks, whose modules are on the path of this process: `benchmark_parts.py floors | others`."""
import json
import re
import sys
from contextlib import redirect_stderr
from dataclasses import asdict, replace
from io import StringIO
from pathlib import Path
from unittest.mock import patch

import contestants
import harness
import numpy as np
import oracle
import pytest
import records
import report
import run
from case import Case, initial_weights, mlp_shapes, samples
from suites import ascend, distributed

CASE = Case("mlp-784-32-32-10", 8)


def floors():
    """What MindSpore executes for three layers: 3 products forward, 3 for the weights' gradients and 2 for the activations'."""
    seen = set()
    for name in ("floor", "floor-branch"):
        contestants.builder(name)(CASE).agree(1)
        saved = set(Path("graphs").glob("*_execute_*.ir")) - seen  # beside the graph there are some of single operations
        seen |= saved
        counts = [len(re.findall(r" = PrimFunc_MatMul\(", file.read_text(encoding="utf-8"))) for file in saved]
        assert max(counts) == 8, (name, counts)


def states():
    """One buffer is as large as the parameters, the tutorial's two are twice as large; all train as the oracle."""
    for name, buffers in (("one-buffer", 1), ("tutorial", 2)):
        contestant = contestants.builder(name)(CASE)
        assert oracle.difference(contestant.agree(3), oracle.trained(CASE, *samples(CASE, CASE.window), 3)) <= 1e-5, name
        state = contestant.state()
        assert abs(state["state_bytes"] / state["parameter_bytes"] - buffers) < 0.01, name
    weighed = contestant.peak(batch=16, windows=1)
    assert weighed["peak"] > 2**26
    assert weighed["data"] == 16 * 784 * 4


def kinks():
    """A few samples on the other side of a kink are no disagreement; a wrong divisor is one."""
    start = [p.astype(np.float64) for p in initial_weights(mlp_shapes(CASE), CASE.seed)]
    expected = oracle.trained(CASE, *samples(CASE, CASE.window), 3)
    one = [p.copy() for p in expected]
    one[0][0, 0] += 1e-2 * abs(expected[0] - start[0]).max()
    wrong = [s + 4 * (p - s) for s, p in zip(start, expected)]
    for got, status in ((expected, "agreed"), (one, "agreed"), (wrong, "disagreed")):
        found = harness.verdict(oracle.difference(got, expected), oracle.drift(got, expected, start))
        assert found["status"] == status, found
    assert oracle.difference(one, expected) > harness.TOLERANCE


def growth():
    """Growth is between processes that trained on one size only; who crashes has no figure."""
    asked, broken = [], []

    def ask_fresh(group, name, scratch, figures, do, batch, windows):
        asked.append((name, do, batch))
        if batch == 512 and name in broken:
            figures[name].update(status="crashed", message="out of memory")
            return None
        return {"peak": {2: 100, 512: 350}[batch], "data": 7}

    group = harness.Group("a group", Case("mlp-6-5", 2), ("whole", "cut"), piece=512)
    figures = {"whole": {}, "cut": {}}
    with patch.object(harness, "ask_fresh", ask_fresh):
        harness.weigh(group, figures, 3, Path(), "growth")
        assert figures == {name: {"growth": [250] * 3, "data_bytes": 7} for name in ("whole", "cut")}
        assert sorted(asked) == sorted([(name, "peak", batch) for name in ("whole", "cut") for batch in (2, 512)] * 3)
        broken.append("cut")
        harness.weigh(group, figures, 2, Path(), "growth")
    assert len(figures["whole"]["growth"]) == 5
    assert len(figures["cut"]["growth"]) == 3
    assert figures["cut"]["status"] == "crashed"


def late_ranks():
    """Without msrun ranks are skipped, and late ones are ended."""
    group = harness.Group("a group", replace(CASE, ranks=2), ("window",), ("window",), microbatches=4)

    def said(folder):
        (record,) = distributed.measure([group], 10**9, Path.cwd() / folder)
        return record["contestants"]["window"]["status"], record["contestants"]["window"]["message"]

    with patch.object(distributed, "PATIENCE", 2):
        assert said("slow") == ("crashed", "no end after 2 s")
    assert not [file for file in Path("/proc").glob("[0-9]*/cmdline") if str(Path.cwd()).encode() in file.read_bytes()]
    with patch.object(distributed.shutil, "which", lambda *arguments, **options: None):
        assert said("missing") == ("skipped", "msrun is not installed")


def refusals():
    """Bad arguments end in one line and status 2."""
    Path("notes.json").write_text("[]", encoding="utf-8")
    for module, arguments, message in [
        (run, "--suite speed", r"run\.py: error: argument --suite: invalid choice: 'speed'.*\n"),
        (run, "--suite mlp --rounds 0", r"run\.py: error: argument --rounds: expected a whole number from 1, got '0'\n"),
        (run, "--suite mlp --contestants ms_accum,fast",
         r"run\.py: error: argument --contestants: unknown contestant 'fast'; choose from floor, .*\n"),
        (run, "--suite memory --contestants boost",
         r"run\.py: error: argument --contestants: 'boost' is not in suite memory; choose from undivided, .*\n"),
        (run, "--suite scaling --groups fast", r"run\.py: error: argument --groups: 'fast' is not in suite scaling; choose from MLP, .*\n"),
        (report, "notes.json", r"report\.py: error: \S*notes\.json is no record of run\.py .*\n"),
    ]:
        assert re.fullmatch(message, refused(module, arguments.split()))


def refused(module, arguments):
    with redirect_stderr(StringIO()) as said, pytest.raises(SystemExit) as stop:
        module.main(arguments)
    assert stop.value.code == 2
    return said.getvalue()


def figure():
    """Points are time against the tutorial's and memory against the undivided batch's; without these there is no figure."""
    seconds = {"tutorial": [2.0, 4.0], "undivided": [1.0, 2.0], "ms_accum": [1.5, 3.0], "boost": []}
    growth = {"tutorial": [50, 50], "undivided": [100, 100], "ms_accum": [20, 30], "boost": []}
    figures = {name: {"samples": seconds[name], "growth": growth[name]} for name in seconds}
    group = records.summarised({"name": "MLP", "case": asdict(CASE), "base": ["tutorial"], "contestants": figures})
    found = {name: [spread["median"] for spread in spreads] for name, spreads in report.points(group).items()}
    assert found == {"tutorial": [1, 0.5], "undivided": [0.5, 1], "ms_accum": [0.75, 0.25]}, found
    assert report.draw([{"suite": "strategies", "groups": [group] * 3}], Path("figure.png"))
    assert Path("figure.png").read_bytes().startswith(b"\x89PNG")
    del figures["undivided"]
    assert not report.draw([{"suite": "strategies", "groups": [group]}, {"suite": "mlp"}], Path("none.png"))
    assert not Path("none.png").exists()


def old_names():
    """Contestants get today's names; those that are gone are left out, and groups in which nobody is left."""
    groups = [{"base": "split", "contestants": {"split": {}, "fused": {}, "tutorial": {}}}, {"base": None, "contestants": {"fused": {}}}]
    Path("old.json").write_text(json.dumps({"suite": "mlp", "versions": {}, "groups": groups}), encoding="utf-8")
    read = records.read(Path("old.json"))
    assert [list(group["contestants"]) for group in read["groups"]] == [["ms_accum", "fused", "tutorial"], ["fused"]]
    (group,) = report.without_gone(read)["groups"]
    assert group == {"base": "ms_accum", "contestants": {"ms_accum": {}, "tutorial": {}}}


def planned():
    """Peaks on a line give back its slope and start; one off it shows; who crashes at one size has no figures; CANN may be missing."""
    line = {size: 12_000 + 8 * 5 * size for size in (10, 15, 20)}
    found = ascend.figures({1: 16_000, **line}, 1000, 8)
    assert found == {"per_parameter": 16, "held": 12, "per_sample": 5, "deviation": 0}, found
    assert abs(ascend.figures({1: 16_000, **line, 15: 12_600 * 1.1}, 1000, 8)["deviation"] - 0.1) < 1e-9

    def ask_fresh(group, name, scratch, figures, do, batch):
        if name == "tutorial" and batch == 15:
            figures[name].update(status="crashed", message="out of memory")
            return None
        return {"peak": line.get(batch, 16_000), "parameters": 1000}

    group = harness.Group("a group", Case("mlp", 1, 8, optimizer="Adam"), ("undivided", "tutorial"), sizes=(1, 10, 15, 20))
    with patch.object(ascend, "ask_fresh", ask_fresh):
        (record,) = ascend.measure([group], 1, Path())
    assert record["contestants"]["undivided"]["per_sample"] == 5
    assert record["contestants"]["tutorial"] == {"status": "crashed", "message": "out of memory"}
    table = report.ascend_table(record, "ascend")
    assert re.search(r"^\|undivided\|16\.0\|12\.0\|", table, re.MULTILINE)
    assert "- tutorial: crashed: out of memory" in table
    with patch.object(ascend, "STAND_INS", Path("none.py")), patch.dict("os.environ", {"ASCEND_TOOLKIT_HOME": ""}):
        said = refused(run, ["--suite", "ascend", "--quick"])
        assert re.fullmatch(r"run\.py: error: suite ascend needs CANN \(.*\), or .* tests/ascend/stand_ins\.py\n", said)
    with patch.dict("os.environ", {"ASCEND_TOOLKIT_HOME": "installed"}):
        assert ascend.environment(Path("none")).keys() == {"MS_SIMULATION_LEVEL", "RANK_SIZE", "RANK_ID"}


if __name__ == "__main__":
    for check in (floors,) if sys.argv[1] == "floors" else (refusals, kinks, growth, late_ranks, states, figure, old_names, planned):
        check()
        print(check.__name__)
