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


def printed_by(*command, before="", **environment):
    """What a script prints, run in a process of its own with all benchmarks on its path."""
    path = os.pathsep.join([before, str(BENCHMARKS), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run([sys.executable, *map(str, command)], capture_output=True, text=True, check=False,
                          env={**os.environ, "PYTHONPATH": path.strip(os.pathsep), **environment})
    assert done.returncode == 0, done.stderr
    return done.stdout


def quick(suite, folder, *arguments, **environment):
    """A quick run of a suite: what its last line says, and its record."""
    command = BENCHMARKS / "run.py", "--suite", suite, "--quick", "--output", folder, *arguments
    printed = printed_by(*command, **environment)
    text = (folder / f"{suite}.json").read_text(encoding="utf-8")
    assert not ABSOLUTE_PATH.search(text)
    return json.loads(printed.splitlines()[-1]), json.loads(text)


# --- whole suites -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_suite_and_its_report(tmp_path):
    """One contestant agrees, one disagrees, one has no package, one brings its process down; the report is whole."""
    (tmp_path / "torch.py").write_text("raise ModuleNotFoundError('No torch', name='torch')", encoding="utf-8")
    crashing = "import os, sys\nprint('jax went /some/where/wrong.so', file=sys.stderr, flush=True)\nos._exit(7)"
    (tmp_path / "jax.py").write_text(crashing, encoding="utf-8")
    names = "ms_accum,wrong-denominator,pytorch-eager,jax-scan"
    summary, record = quick("mlp", tmp_path, "--contestants", names, before=str(tmp_path))
    (group,) = summary["groups"].values()
    assert group["base"] in ("floor", "floor-branch")
    assert group["ratios"]["ms_accum"] > 0
    assert {name: group["status"][name] for name in names.split(",")} == {
        "ms_accum": "agreed", "wrong-denominator": "disagreed", "pytorch-eager": "skipped", "jax-scan": "crashed"}
    assert re.search(r"parameters differ by \S+ after 3 windows, allowed 1e-05", group["messages"]["wrong-denominator"])
    assert group["messages"]["pytorch-eager"] == "package torch is not installed"
    assert group["messages"]["jax-scan"] == "jax went wrong.so (exit status 7)"
    contestants = record["groups"][0]["contestants"]
    assert contestants["ms_accum"]["difference"] <= 1e-5
    assert len(contestants["ms_accum"]["samples"]) == 3
    assert buffers(contestants["ms_accum"]) == pytest.approx(1, abs=0.01)
    assert "samples" not in contestants["wrong-denominator"]

    assert {"date", "commit", "cores", "memory_gib", "versions", "command", "groups"} <= record.keys()
    assert record["versions"].keys() >= {"python", "mindspore", "numpy", "ms_accum"}
    assert record["command"].startswith("python tutorials/benchmarks/run.py --suite mlp --quick")

    report.main([str(tmp_path / "mlp.json"), "--output", str(tmp_path)])
    table = (tmp_path / "report.md").read_text(encoding="utf-8")
    assert re.search(r"^\|\*\*ms_accum\*\*\|[\d.]+\|", table, re.MULTILINE)
    assert "wrong-denominator: disagreed: parameters differ" in table
    assert not (tmp_path / "report.png").exists()


def buffers(figures):
    """What accumulation keeps, in sizes of the parameters."""
    return figures["state_bytes"] / figures["parameter_bytes"]


@pytest.mark.slow
@pytest.mark.parametrize(("suite", "names"), [
    ("mlp", "ms_accum-pieces,ms_accum-by-hand,undivided,tutorial,one-buffer,boost,parallel-nn"),
    ("memory", "ms_accum"), ("strategies", "undivided,ms_accum,ms_accum-pieces"), ("scaling", "ms_accum"),
    ("options", "ms_accum-skip-window"), ("first_calls", "ms_accum,wrong-denominator"),
    ("distributed", "window,microbatch,zero2,wrong-denominator")])
def test_every_suite(tmp_path, suite, names):
    """All agree, but for a wrong divisor; the parts of the other suites are tested above."""
    summary, record = quick(suite, tmp_path, "--rounds", "1", "--contestants", names)
    for name, group in summary["groups"].items():
        wrong = group["status"].pop("wrong-denominator", None)
        assert wrong in (None, "agreed" if name == "1 rank, N = 1" else "disagreed")
        assert set(group["status"].values()) <= {"agreed", "no update"}
    first, *_, each, last = [group["contestants"] for group in [*record["groups"][:1] * 2, *record["groups"]]]
    if suite == "mlp":
        assert [buffers(last[name]) for name in ("one-buffer", "tutorial")] == pytest.approx([1, 2], abs=0.01)
    elif suite == "memory":  # a window as one batch grows the process at least by that batch
        undivided = first["undivided"]
        assert undivided["samples"][0] > undivided["data_bytes"] == 8 * 1024 * 784 * 4
        assert all(group["contestants"]["ms_accum"]["samples"][0] > 0 for group in record["groups"])
    elif suite == "strategies":
        weighed = next(group["contestants"] for group in record["groups"] if "piece" in group)
        assert weighed.keys() == {"undivided", "ms_accum", "ms_accum-pieces", "tutorial"}
        assert all(figures["first_window"] > figures["samples"][0] > 0 for figures in weighed.values())
        assert all(figures["growth_spread"]["median"] == figures["growth"][0] for figures in weighed.values())
        assert weighed["undivided"]["growth"][0] > weighed["undivided"]["data_bytes"] == 4 * 512 * 784 * 4
    elif suite == "first_calls":
        ours = last["ms_accum"]
        assert len(ours["samples"]) == len(ours["wall"]) == len(ours["growth"]) == 1
        assert ours["samples"][0] > 0.1
        assert ours["growth_spread"]["median"] == ours["growth"][0] > 2**20
        assert "|processor time, s|" in report.section(record)
    elif suite == "scaling":
        ratios = "|".join(f"{group['contestants']['ms_accum']['ratio']['median']:.2f}" for group in record["groups"])
        assert f"|ms_accum|{ratios}|" in report.section(record)
    elif suite == "distributed":  # ranks meet, then exchange gradients; a window has one of N; zero2 keeps a half
        assert first["alone"]["collectives"] == 0
        window, microbatch, zero2 = (last[name] for name in ("window", "microbatch", "zero2"))
        rows = 2 * 12 * 4  # of each rank, 6 numbers, each as two of float32; a few sums travel with the gradients
        assert window["collectives"] == each["microbatch"]["collectives"] == 2
        assert 0 < window["collective_bytes"] - window["parameter_bytes"] - rows <= 32
        assert microbatch["collectives"] == 4 * 2
        assert microbatch["collective_bytes"] == 4 * window["collective_bytes"]
        assert zero2["collectives"] == 4 * 2 + 1
        # The sums travel with each part.
        assert 0 < zero2["collective_bytes"] - microbatch["collective_bytes"] - window["parameter_bytes"] // 2 <= 4 * 32
        assert buffers(zero2) == pytest.approx(1 / 2, abs=0.01)


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


@pytest.mark.slow
def test_floors_compute_their_gradients():
    """Of three layers: 3 products forward, 3 for the weights' gradients and 2 for the activations'."""
    for name in ("floor", "floor-branch"):
        train = f"import contestants, case; contestants.builder({name!r})(case.{CASE!r}).agree(1)"
        printed_by("-c", train, MS_DEV_SAVE_GRAPHS="3", MS_DEV_SAVE_GRAPHS_PATH=name)
        # Files with fewer products are of single operations.
        texts = [file.read_text(encoding="utf-8") for file in Path(name).glob("*_execute_*.ir")]
        assert max(len(re.findall(r" = PrimFunc_MatMul\(", text)) for text in texts) == 8


# --- parts ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("module", "arguments", "message"), [
    (run, "--suite speed", r"run\.py: error: argument --suite: invalid choice: 'speed'.*\n"),
    (run, "--suite mlp --rounds 0", r"run\.py: error: argument --rounds: expected a whole number from 1, got '0'\n"),
    (run, "--suite mlp --contestants ms_accum,fast",
     r"run\.py: error: argument --contestants: unknown contestant 'fast'; choose from floor, .*\n"),
    (run, "--suite memory --contestants boost",
     r"run\.py: error: argument --contestants: 'boost' is not in suite memory; choose from undivided, .*\n"),
    (run, "--suite scaling --groups fast",
     r"run\.py: error: argument --groups: 'fast' is not in suite scaling; choose from MLP, .*\n"),
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


def test_growth_is_between_processes_and_who_crashes_has_none(monkeypatch):
    peaks = {("whole", 2): {"peak": 100}, ("whole", 512): {"peak": 350, "data": 7}, ("cut", 2): {"peak": 100}}
    monkeypatch.setattr(harness, "ask_fresh", answering(peaks))
    figures = {"whole": {}, "cut": {}}
    group = harness.Group("a group", Case("mlp-6-5", 2), ("whole", "cut"), piece=512)
    harness.weigh(group, figures, 3, Path(), "growth")
    assert figures == {"whole": {"growth": [250] * 3, "data_bytes": 7},
                       "cut": {"status": "crashed", "message": "out of memory"}}


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
    table = report.ascend_table(record, "ascend")
    assert re.search(r"^\|undivided\|16\.0\|12\.0\|", table, re.MULTILINE)
    assert "- tutorial: crashed: out of memory" in table
    monkeypatch.setenv("ASCEND_TOOLKIT_HOME", "installed")
    dry = {"MS_SIMULATION_LEVEL", "RANK_SIZE", "RANK_ID", "MS_ACCUM_IN_PLACE"}
    assert ascend.environment(Path("none")).keys() == dry


@pytest.mark.slow
def test_late_ranks_are_ended(monkeypatch):
    """And without msrun they are skipped."""
    group = harness.Group("a group", replace(CASE, ranks=2), ("window",), ("window",), microbatches=4)

    def said(folder):
        (record,) = distributed.measure([group], 10**9, Path.cwd() / folder)
        return record["contestants"]["window"]["status"], record["contestants"]["window"]["message"]

    monkeypatch.setattr(distributed, "PATIENCE", 2)
    assert said("slow") == ("crashed", "no end after 2 s")
    assert not [file for file in Path("/proc").glob("[0-9]*/cmdline") if str(Path.cwd()).encode() in file.read_bytes()]
    monkeypatch.setattr(distributed.shutil, "which", lambda *_, **__: None)
    assert said("missing") == ("skipped", "msrun is not installed")


# --- what is made of the records --------------------------------------------------------------------------------------


def read(record):
    return json.loads((BENCHMARKS / "records" / f"{record}.json").read_text(encoding="utf-8"))


def row_of_notes(start):
    """The cells of the row that starts so."""
    text = (BENCHMARKS / "NOTES.md").read_text(encoding="utf-8")
    (row,) = (line for line in text.splitlines() if line.startswith(start))
    return row.strip("| ").split(" | ")


def test_the_report_is_made_of_the_records(tmp_path):
    """And of them alone. Ours are there with today's names; contestants that are gone are left out."""
    report.main(["--output", str(tmp_path)])
    text = (tmp_path / "report.md").read_text(encoding="utf-8")
    assert text == (BENCHMARKS / "records" / "report.md").read_text(encoding="utf-8")
    assert (tmp_path / "report.png").stat().st_size > 10_000
    assert re.search(r"^\|\*\*ms_accum\*\*\|[\d.]+\|", text, re.MULTILINE)
    assert "fused" not in text


def test_readme_the_page_and_the_notes_have_the_records_figures():
    """README and the table of memory: those of the picture. The notes: the memory of the dry run."""
    groups = records.read(BENCHMARKS / "records" / "strategies.json")["groups"]
    panels = [panel for panel in map(report.points, groups) if panel]
    readme = " ".join((BENCHMARKS.parents[1] / "README.md").read_text(encoding="utf-8").replace("\u00d7", "x").split())

    def shown(name, i):
        return [f"{panel[name][i]['median']:.2f}" for panel in panels]

    assert "{} x (MLP), {} x (CNN) and {} x (transformer)".format(*shown("ms_accum", 0)) in readme
    assert "{} x (MLP), {} x (CNN) and {} x (transformer) the time".format(*shown("ms_accum-pieces", 0)) in readme
    page = (BENCHMARKS.parent / "guide" / "benchmarks.md").read_text(encoding="utf-8")
    for network in ("MLP", "CNN", "transformer"):
        ways = next(group["contestants"] for group in groups if group["name"] == f"{network}, N = 4, cut in 8")
        cells = [f"{way['growth_spread']['median'] / 2**20:,.0f} MiB, {way['ratio']['median']:.2f} \u00d7"
                 for way in (ways["undivided"], ways["ms_accum"], ways["ms_accum-pieces"])]
        assert f"| {network} | {' | '.join(cells)} |" in page
    names = "undivided", "tutorial", "boost", "parallel-nn", "split", "split-in-step"
    starts = "| MLP, 0.7 M", "| CNN, 11 M", "| ViT, 2.7 M", "| transformer, 11 M", "| transformer, 353 M"
    for start, group in zip(starts, read("ascend")["groups"], strict=True):
        found = [group["contestants"][name] for name in names]
        shares = [f"{of['per_sample'] / found[0]['per_sample']:.2f}" for of in found[1:]]
        expected = [f"{of['per_parameter']:.1f}, {share}" for of, share in zip(found, ["1", *shares])]
        assert row_of_notes(start)[1:] == expected, start


def test_first_calls_take_at_most_half_as_much_again_as_the_tutorials_class():
    """In the record, with every number of tensors; the page has its figures: time round by round, memory by medians."""
    groups = read("first_calls")["groups"]
    page = (BENCHMARKS.parent / "guide" / "benchmarks.md").read_text(encoding="utf-8")
    assert [group["name"] for group in groups] == ["100 tensors", "200 tensors", "400 tensors"]
    for name, label in (("ms_accum", "train step"), ("ms_accum-by-hand", "by hand")):
        ours = [(group["contestants"][name], group["contestants"]["tutorial"]) for group in groups]
        assert {figures["status"] for pair in ours for figures in pair} == {"agreed"}
        times = [mine["ratio"]["median"] for mine, _ in ours]
        sizes = [mine["growth_spread"]["median"] / tutorials["growth_spread"]["median"] for mine, tutorials in ours]
        assert max(*times, *sizes) <= 1.5
        cells = [" / ".join(f"{ratio:.2f}" for ratio in ratios) for ratios in (times, sizes)]
        assert f"| {label} | {' | '.join(cells)} |" in page


def test_the_table_of_options_has_the_records_figures():
    """Time of each contestant of the suite, but for the second copy of the first one, which differs by noise alone."""
    page = (BENCHMARKS.parent / "guide" / "benchmarks.md").read_text(encoding="utf-8")
    groups = [group["contestants"] for group in read("options")["groups"]]
    assert {figures["status"] for group in groups for figures in group.values()} == {"agreed"}
    table = re.search(r"^\| option \|.*\n((?:\|.*\n)+)", page, re.MULTILINE)[1].splitlines()[1:]
    for name in {*options.CONTESTANTS} - {"tutorial", "ms_accum-again"}:
        cells = " | ".join(f"{group[name]['ratio']['median']:.2f}" for group in groups)
        assert len([row for row in table if f" | {cells} | " in row]) == 1, name
    assert len(table) == len(options.CONTESTANTS) - 2


def test_the_notes_on_batch_sizes_have_the_records_figures():
    for problem in read("batch_size")["problems"].values():
        for name, found in problem["contestants"].items():
            if not name.isdigit():  # is gone
                continue
            ends, peak = [run["curve"][-1] for run in found["runs"]], found["runs"][0]["peak"]
            losses = [end[2] for end in ends]
            label = f"| N = {name} | {peak:g} | "
            _, _, updates, _, told = row_of_notes(label)
            assert updates.split()[0] == f"{mean(end[1] for end in ends):.0f}"
            assert told == f"{mean(losses):.3f} ({min(losses):.3f}\u2013{max(losses):.3f})"


def test_the_notes_on_many_ranks_have_the_records_figures():
    rows = read("hosts")["rows"]
    ways = dict.fromkeys(row[1] for row in rows)
    assert len(rows) == 3 * len(ways)
    for way in ways:
        mine = [row for row in rows if row[1] == way]
        _, sent, *times = row_of_notes(f"| {way} | ")
        assert sent == f"{median(row[5] for row in mine) / 1e6:.1f}"
        assert times == [f"{1e6 * row[2]:,.0f}" for row in mine]
