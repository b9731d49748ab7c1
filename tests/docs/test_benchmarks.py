"""tutorials/benchmarks: quick runs of the suites, who is caught, skipped or reported, records and their reports."""
import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from statistics import mean, median

import numpy as np
import pytest
from support.ascend.stand_ins import missing

sys.path.append(str(Path(__file__).parents[2] / "tutorials" / "benchmarks"))
import harness
import oracle
import records
import report
import run
from case import Case, initial_weights, mlp_shapes, samples
from suites import ascend, distributed, options

BENCHMARKS = Path(run.__file__).parent
ABSOLUTE_PATH = re.compile(r"""(?:^|[\s"'=:(])/[\w.]""")
CASE = Case("mlp-784-32-32-10", 8)
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="peak RSS is read from /proc")


def quick(suite, folder, *arguments, before=""):
    """A quick run of a suite in a process of its own: what its last line says, and its record."""
    command = [sys.executable, BENCHMARKS / "run.py", "--suite", suite, "--quick", "--output", folder, *arguments]
    path = os.pathsep.join(filter(None, [before, os.environ.get("PYTHONPATH")]))
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False,
                          env={**os.environ, "PYTHONPATH": path})
    assert done.returncode == 0, done.stderr
    text = (folder / f"{suite}.json").read_text(encoding="utf-8")
    assert not ABSOLUTE_PATH.search(text)
    return json.loads(done.stdout.splitlines()[-1]), json.loads(text)


def buffers(figures):
    """What accumulation keeps, in sizes of the parameters."""
    return figures["state_bytes"] / figures["parameter_bytes"]


# --- whole suites -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_all_ways_agree_and_who_does_not_is_reported(tmp_path):
    """One contestant disagrees, one has no package, one brings its process down; the report is whole."""
    (tmp_path / "torch.py").write_text("raise ModuleNotFoundError('No torch', name='torch')", encoding="utf-8")
    crashing = "import os, sys\nprint('jax went /some/where/wrong.so', file=sys.stderr, flush=True)\nos._exit(7)"
    (tmp_path / "jax.py").write_text(crashing, encoding="utf-8")
    agreeing = {"ms_accum", "ms_accum-by-hand", "ms_accum-pieces", "undivided", "tutorial", "boost", "parallel-nn"}
    failing = {"wrong-denominator", "pytorch-eager", "jax-scan"}
    names = ",".join(agreeing | failing)
    summary, record = quick("strategies", tmp_path, "--contestants", names, before=str(tmp_path))
    first, cut = summary["groups"].values()
    assert first["base"] == cut["base"] == "tutorial"
    assert {name for name, status in (first["status"] | cut["status"]).items() if status == "agreed"} == agreeing
    assert {name: first["status"][name] for name in failing} == {
        "wrong-denominator": "disagreed", "pytorch-eager": "skipped", "jax-scan": "crashed"}
    assert re.search(r"parameters differ by \S+ after 3 windows, allowed 1e-05", first["messages"]["wrong-denominator"])
    assert first["messages"]["pytorch-eager"] == "package torch is not installed"
    assert first["messages"]["jax-scan"] == "jax went wrong.so (exit status 7)"
    small, large = (group["contestants"] for group in record["groups"])
    assert small["ms_accum"]["difference"] <= 1e-5
    assert len(small["ms_accum"]["samples"]) == 1
    assert [buffers(small[name]) for name in ("ms_accum", "tutorial")] == pytest.approx([1, 2], abs=0.01)
    assert "samples" not in small["wrong-denominator"]
    assert all(large[name]["first_window"] > large[name]["samples"][0] > 0 for name in agreeing & large.keys())
    assert large["undivided"]["growth"] > large["undivided"]["data_bytes"] == 4 * 512 * 784 * 4

    assert {"date", "commit", "cores", "memory_gib", "versions", "command", "groups"} <= record.keys()
    assert record["versions"].keys() >= {"python", "mindspore", "numpy", "ms_accum"}
    assert record["command"].startswith("python tutorials/benchmarks/run.py --suite strategies --quick")
    report.main([str(tmp_path / "strategies.json"), "--output", str(tmp_path)])
    table = (tmp_path / "report.md").read_text(encoding="utf-8")
    assert re.search(r"^\|\*\*ms_accum\*\*\|[\d.]+\|", table, re.MULTILINE)
    assert "wrong-denominator: disagreed: parameters differ" in table


@pytest.mark.slow
def test_options_agree(tmp_path):
    (group,) = quick("options", tmp_path)[0]["groups"].values()
    assert set(group["status"].values()) == {"agreed"}
    assert group["ratios"].keys() == {"undivided", *options.CONTESTANTS}


@pytest.mark.slow
def test_ranks_exchange_a_window_once(tmp_path):
    """Ranks meet, then exchange gradients. Who divides wrongly disagrees."""
    summary, record = quick("distributed", tmp_path, "--contestants", "window,microbatch,wrong-denominator")
    for group in summary["groups"].values():
        assert group["status"] == {"window": "agreed", "microbatch": "agreed", "wrong-denominator": "disagreed"}
    each, eight = (group["contestants"] for group in record["groups"])
    sizes = [group[name]["collective_bytes"] for group in (each, eight) for name in ("window", "microbatch")]
    counts = [group[name]["collectives"] for group in (each, eight) for name in ("window", "microbatch")]
    assert (counts, sizes) == ([2, 2, 2, 2 * 8], [sizes[0], sizes[0], sizes[0], 8 * sizes[0]])
    rows = 2 * 12 * 4  # of each rank, 6 numbers, each as two of float32; a few sums travel with the gradients
    assert 0 < sizes[0] - eight["window"]["parameter_bytes"] - rows <= 32


@pytest.mark.slow
@pytest.mark.skipif(bool(missing()), reason=str(missing()))
def test_memory_on_ascend_is_planned(tmp_path):
    """As in the record. Beside parameters, buffers and Adam's state, the control holds all gradients.

    Ours holds the largest one, and those of less than 1/64 of its elements, which are added last.
    """
    summary, _ = quick("ascend", tmp_path, "--contestants", "ms_accum,one-buffer")
    found = summary["groups"]["MLP"]["bytes"]
    recorded = records.read(BENCHMARKS / "records" / "ascend.json")["groups"][0]["contestants"]
    assert found.keys() == {"undivided", "ms_accum", "one-buffer"}
    for name, (per_parameter, per_sample) in found.items():
        wanted = [recorded[name]["per_parameter"], recorded[name]["per_sample"]]
        assert [per_parameter, per_sample] == pytest.approx(wanted, rel=0.01)
    sizes = [784 * 512, 512, 512 * 512, 512, 512 * 10, 10]
    at_once = max(sizes) + sum(size for size in sizes if size < max(sizes) // 64)
    wanted = [16 + 4 * at_once / sum(sizes), 16 + 4]
    assert [found["ms_accum"][0], found["one-buffer"][0]] == pytest.approx(wanted, abs=0.1)
    assert found["undivided"][1] == pytest.approx(8 * found["ms_accum"][1], rel=0.01)


# --- parts ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("module", "arguments", "message"), [
    (run, "--suite options --rounds 0", r"run\.py: error: argument --rounds: expected a whole number from 1, .*\n"),
    (run, "--suite options --contestants boost",
     r"run\.py: error: argument --contestants: 'boost' is not in suite options; choose from undivided, .*\n"),
    (run, "--suite ascend --quick", r"run\.py: error: suite ascend needs CANN \(.*\), or .*/stand_ins\.py\n"),
    (report, "notes.json", r"report\.py: error: \S*notes\.json is no record of run\.py .*\n")])
def test_what_cannot_be_run_is_refused_in_one_line(monkeypatch, capsys, module, arguments, message):
    Path("notes.json").write_text("[]", encoding="utf-8")
    monkeypatch.setattr(ascend, "STAND_INS", Path("none.py"))
    monkeypatch.delenv("ASCEND_TOOLKIT_HOME", raising=False)
    with pytest.raises(SystemExit) as stop:
        module.main(arguments.split())
    assert stop.value.code == 2
    assert re.fullmatch(message, capsys.readouterr().err)


def test_a_few_samples_at_a_kink_are_no_disagreement():
    """A wrong divisor is one."""
    start = [p.astype(np.float64) for p in initial_weights(mlp_shapes(CASE), CASE.seed)]
    expected = oracle.trained(CASE, *samples(CASE, CASE.window), 3)
    one = [p.copy() for p in expected]
    one[0][0, 0] += 1e-2 * abs(expected[0] - start[0]).max()
    wrong = [s + 4 * (p - s) for s, p in zip(start, expected)]
    verdicts = [harness.judged(got, expected, start)["status"] for got in (expected, one, wrong)]
    assert verdicts == ["agreed", "agreed", "disagreed"]
    assert oracle.difference(one, expected) > harness.TOLERANCE


def answering(answers):
    """In place of `ask_fresh`: an answer by (name, batch); who has none crashes."""
    def ask_fresh(group, name, scratch, figures, do, batch, **_):
        if (name, batch) not in answers:
            figures[name].update(status="crashed", message="out of memory")
        return answers.get((name, batch))
    return ask_fresh


def test_peaks_on_a_line_give_back_its_slope_and_start(monkeypatch):
    """One off the line shows; who crashes at one size has no figures."""
    line = {size: 12_000 + 8 * 5 * size for size in (10, 15, 20)}
    found = ascend.figures({1: 16_000, **line}, 1000, 8)
    assert found == {"per_parameter": 16, "held": 12, "per_sample": 5, "deviation": 0}
    assert ascend.figures({1: 16_000, **line, 15: 12_600 * 1.1}, 1000, 8)["deviation"] == pytest.approx(0.1)

    plans = {("undivided", size): {"peak": peak, "parameters": 1000} for size, peak in {1: 16_000, **line}.items()}
    monkeypatch.setattr(ascend, "ask_fresh", answering(plans))
    case = Case("mlp", 1, 8, optimizer="Adam")
    group = harness.Group("a group", case, ("undivided", "tutorial"), sizes=(1, 10, 15, 20))
    (record,) = ascend.measure([group], 1, Path())
    assert record["contestants"]["undivided"]["per_sample"] == 5
    assert record["contestants"]["tutorial"] == {"status": "crashed", "message": "out of memory"}
    table = report.ascend_table(record)
    assert re.search(r"^\|undivided\|16\.0\|12\.0\|", table, re.MULTILINE)
    assert "- tutorial: crashed: out of memory" in table
    monkeypatch.setenv("ASCEND_TOOLKIT_HOME", "installed")
    dry = {"MS_SIMULATION_LEVEL", "RANK_SIZE", "RANK_ID", "MS_ACCUM_IN_PLACE"}
    assert ascend.environment(Path("none")).keys() == dry


@pytest.mark.slow
def test_late_ranks_are_ended(monkeypatch):
    """And without msrun they are skipped."""
    group = harness.Group("a group", replace(CASE, ranks=2), ("window",), "window", microbatches=4)

    def said(folder):
        (record,) = distributed.measure([group], 10**9, Path.cwd() / folder)
        return record["contestants"]["window"]["status"], record["contestants"]["window"]["message"]

    monkeypatch.setattr(distributed, "PATIENCE", 2)
    assert said("slow") == ("crashed", "no end after 2 s")
    assert not [file for file in Path("/proc").glob("[0-9]*/cmdline") if str(Path.cwd()).encode() in file.read_bytes()]
    monkeypatch.setattr(distributed.shutil, "which", lambda *_, **__: None)
    assert said("missing") == ("skipped", "msrun is not installed")


# --- what is made of the records --------------------------------------------------------------------------------------

PAGE = (BENCHMARKS.parent / "guide" / "benchmarks.md").read_text(encoding="utf-8")


def read(record):
    return json.loads((BENCHMARKS / "records" / f"{record}.json").read_text(encoding="utf-8"))


def row_of_notes(start):
    """The cells of the row that starts so."""
    text = (BENCHMARKS / "NOTES.md").read_text(encoding="utf-8")
    (row,) = (line for line in text.splitlines() if line.startswith(start))
    return row.strip("| ").split(" | ")


def ratio(figures):
    return f"{figures['ratio']['median']:.2f}"


def test_the_report_is_made_of_the_records(tmp_path):
    report.main(["--output", str(tmp_path)])
    text = (tmp_path / "report.md").read_text(encoding="utf-8")
    assert text == (BENCHMARKS / "records" / "report.md").read_text(encoding="utf-8")
    assert (tmp_path / "ascend.png").stat().st_size > 10_000


def test_readme_and_the_page_have_the_records_figures():
    small, *large = (group["contestants"] for group in read("strategies")["groups"])
    shown = ("undivided", "pytorch-eager", "pytorch-compiled", "jax-scan", "jax-multisteps", "parallel-nn", "boost",
             "mindcv", "ms_accum-by-hand", "ms_accum")
    assert f"| {' | '.join(ratio(small[name]) for name in shown)} |" in PAGE
    shown = "undivided", "tutorial", "boost", "parallel-nn", "ms_accum", "ms_accum-pieces"
    for network, ways in zip(("MLP", "CNN", "transformer"), large, strict=True):
        cells = [f"{ways[name]['growth'] / 2**20:,.0f} MiB, {ratio(ways[name])} \u00d7" for name in shown]
        assert f"| {network} | {' | '.join(cells)} |" in PAGE
        ours, theirs = (ways[name]["first_window"] for name in ("ms_accum", "tutorial"))
        assert re.search(rf"{ours:.1f} s \({network}; .*{theirs:.1f} s\)", PAGE)
    readme = (BENCHMARKS.parents[1] / "README.md").read_text(encoding="utf-8").replace("\u00d7", "x")
    for name in ("ms_accum", "ms_accum-pieces"):
        assert "{} x (MLP), {} x (CNN) and {} x (transformer)".format(*(ratio(ways[name]) for ways in large)) in readme
    groups = [group["contestants"] for group in read("options")["groups"]]
    table = re.search(r"^\| option \|.*\n((?:\|.*\n)+)", PAGE, re.MULTILINE)[1].splitlines()[1:]
    for name in {*options.CONTESTANTS} - {"tutorial", "ms_accum-again"}:  # a second copy, which differs by noise alone
        cells = " | ".join(ratio(group[name]) for group in groups)
        assert [row for row in table if row.endswith(f" | {cells} |")] != [], name
    assert len(table) == len(options.CONTESTANTS) - 2
    window = read("distributed")["groups"][1]["contestants"]["window"]
    assert f"take {ratio(window)} \u00d7 the time" in PAGE


def test_the_notes_have_the_records_figures():
    names = "undivided", "tutorial", "boost", "parallel-nn", "ms_accum", "ms_accum-pieces"
    starts = "| MLP, 0.7 M", "| CNN, 11 M", "| ViT, 2.7 M", "| transformer, 11 M", "| transformer, 353 M"
    for start, group in zip(starts, read("ascend")["groups"], strict=True):
        found = [group["contestants"][name] for name in names]
        shares = [f"{of['per_sample'] / found[0]['per_sample']:.2f}" for of in found[1:]]
        expected = [f"{of['per_parameter']:.1f}, {share}" for of, share in zip(found, ["1", *shares])]
        assert row_of_notes(start)[1:] == expected, start
    for problem in read("batch_size")["problems"].values():
        for name, found in problem["contestants"].items():
            ends, peak = [run["curve"][-1] for run in found["runs"]], found["runs"][0]["peak"]
            losses = [end[2] for end in ends]
            _, _, updates, _, told = row_of_notes(f"| N = {name} | {peak:g} | ")
            assert updates == f"{mean(end[1] for end in ends):.0f}"
            assert told == f"{mean(losses):.3f} ({min(losses):.3f}\u2013{max(losses):.3f})"
    rows = read("hosts")["rows"]
    for way in dict.fromkeys(row[1] for row in rows):
        mine = [row for row in rows if row[1] == way]
        _, sent, *times = row_of_notes(f"| {way} | ")
        assert sent == f"{median(row[5] for row in mine) / 1e6:.1f}"
        assert times == [f"{1e6 * row[2]:,.0f}" for row in mine]
