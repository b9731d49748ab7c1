"""tutorials/benchmarks: quick runs of the suites, who is caught, skipped or reported, records and their report."""
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from statistics import mean, median

import pytest
from ascend.stand_ins import missing

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


@pytest.mark.slow
def test_parts_compute_what_they_say():
    """See tests/support/benchmark_parts.py."""
    assert run(Path(__file__).with_name("support") / "benchmark_parts.py", "others").split() == [
        "refusals", "kinks", "growth", "late_ranks", "states", "figure", "old_names", "planned"]


@pytest.mark.slow
def test_floors_compute_their_gradients():
    saving = {"MS_DEV_SAVE_GRAPHS": "3", "MS_DEV_SAVE_GRAPHS_PATH": "graphs"}
    assert run(Path(__file__).with_name("support") / "benchmark_parts.py", "floors", **saving) == "floors\n"


def read(record):
    return json.loads((BENCHMARKS / "records" / f"{record}.json").read_text(encoding="utf-8"))


def row_of(page, start):
    """The cells of the row of a page that starts so."""
    text = (BENCHMARKS.parent / "guide" / page).read_text(encoding="utf-8")
    (row,) = (line for line in text.splitlines() if line.startswith(start))
    return row.strip("| ").split(" | ")


@pytest.fixture
def report(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    import report
    return report


def test_readme_and_the_page_on_ascend_have_the_records_figures(report):
    """README: those that its figure shows. The page: the memory of the dry run."""
    panels = [panel for panel in map(report.points, report.records.read(BENCHMARKS / "records" / "strategies.json")["groups"]) if panel]
    readme = " ".join((BENCHMARKS.parents[1] / "README.md").read_text(encoding="utf-8").replace("\u00d7", "x").split())

    def shown(name, i):
        return [f"{panel[name][i]['median']:.2f}" for panel in panels]

    assert "{} x (MLP), {} x (CNN) and {} x (transformer)".format(*shown("ms_accum", 0)) in readme
    assert "{}, {} and {} x the extra memory".format(*shown("ms_accum-pieces", 1)) in readme
    assert "{}, {} and {} x its time".format(*shown("ms_accum-pieces", 0)) in readme
    names = "undivided", "tutorial", "boost", "parallel-nn", "split", "split-in-step"
    starts = "| MLP, 0.7 M", "| CNN, 11 M", "| ViT, 2.7 M", "| transformer, 11 M", "| transformer, 353 M"
    for start, group in zip(starts, read("ascend")["groups"], strict=True):
        found = [group["contestants"][name] for name in names]
        shares = [f"{of['per_sample'] / found[0]['per_sample']:.2f}" for of in found[1:]]
        expected = [f"{of['per_parameter']:.1f}, {share}" for of, share in zip(found, ["1", *shares])]
        assert row_of("accelerators.md", start)[1:] == expected, start
    ours, tutorials = (f"{found[i]['per_parameter']:.1f}" for i in (4, 1))
    assert f"takes {ours} bytes per parameter, with the tutorial's class {tutorials}." in readme


def test_the_page_on_batch_sizes_has_the_records_figures():
    for problem in read("batch_size")["problems"].values():
        for name, found in problem["contestants"].items():
            ends, peak = [run["curve"][-1] for run in found["runs"]], found["runs"][0]["peak"]
            losses = [end[2] for end in ends]
            label = f"| {f'N = {name}' if name.isdigit() else name} | {peak:g} | "
            _, _, _, updates, _, told = row_of("batch-size.md", label)
            assert updates.split()[0] == f"{mean(end[1] for end in ends):.0f}"
            assert told == f"{mean(losses):.3f} ({min(losses):.3f}\u2013{max(losses):.3f})"


def test_the_page_on_many_ranks_has_the_records_figures():
    rows = read("hosts")["rows"]
    assert len(rows) == 3 * 6
    for way in dict.fromkeys(row[1] for row in rows):
        mine = [row for row in rows if row[1] == way]
        _, sent, *times = row_of("many-ranks.md", f"| {way} | ")
        assert sent == f"{median(row[5] for row in mine) / 1e6:.1f}"
        assert times[::2] == ["{:,.0f} ({:,.0f}\u2013{:,.0f})".format(*(1e6 * seconds for seconds in row[2:5])) for row in mine]


def test_the_report_is_made_of_the_records(report, tmp_path):
    """And of them alone. Ours are there with today's names."""
    report.main(["--output", str(tmp_path)])
    text = (tmp_path / "report.md").read_text(encoding="utf-8")
    assert text == (BENCHMARKS / "records" / "report.md").read_text(encoding="utf-8")
    assert (tmp_path / "report.png").stat().st_size > 10_000
    found = read("strategies")["groups"][0]["contestants"]
    median = found.get("ms_accum", found.get("split"))["spread"]["median"]
    assert f"|**ms_accum**|{1e3 * median:.3f}|" in text


@pytest.mark.slow
@pytest.mark.skipif(bool(missing()), reason=str(missing()))
def test_memory_on_ascend_is_planned(tmp_path):
    """It is exact: as in the record. Beside parameters, buffers and Adam's state (16 bytes) ours has one gradient, the control all."""
    summary, _ = quick("ascend", tmp_path, "--contestants", "ms_accum,one-buffer")
    found = summary["groups"]["MLP"]["bytes"]
    recorded = read("ascend")["groups"][0]["contestants"]
    assert found.keys() == {"undivided", "ms_accum", "one-buffer"}
    for name, (per_parameter, per_sample) in found.items():
        before = recorded.get(name) or recorded["split"]  # as ms_accum was called
        assert [per_parameter, per_sample] == pytest.approx([before["per_parameter"], before["per_sample"]], rel=0.01)
    largest = 784 * 512 / (784 * 512 + 512 + 512 * 512 + 512 + 512 * 10 + 10)
    assert [found["ms_accum"][0], found["one-buffer"][0]] == pytest.approx([16 + 4 * largest, 16 + 4], abs=0.1)
    assert found["undivided"][1] == pytest.approx(8 * found["ms_accum"][1], rel=0.01)


def test_a_suite_and_its_report(tmp_path):
    """One contestant agrees, one disagrees, one has no package, and one brings its process down; the report needs the record alone."""
    (tmp_path / "torch.py").write_text("raise ModuleNotFoundError(\"No module named 'torch'\", name='torch')", encoding="utf-8")
    (tmp_path / "jax.py").write_text("import os, sys\nprint('jax went /some/where/wrong.so', file=sys.stderr, flush=True)\nos._exit(7)",
                                     encoding="utf-8")
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
    assert contestants["ms_accum"]["state_bytes"] / contestants["ms_accum"]["parameter_bytes"] == pytest.approx(1, abs=0.01)
    assert "samples" not in contestants["wrong-denominator"]

    assert {"date", "commit", "cores", "memory_gib", "versions", "command", "groups"} <= record.keys()
    assert record["versions"].keys() >= {"python", "mindspore", "numpy", "ms_accum"}
    assert record["command"].startswith("python tutorials/benchmarks/run.py --suite mlp --quick")
    assert not ABSOLUTE_PATH.search((tmp_path / "mlp.json").read_text(encoding="utf-8"))

    printed = run("report.py", tmp_path / "mlp.json", "--output", tmp_path)
    table = (tmp_path / "report.md").read_text(encoding="utf-8")
    assert printed.strip() == table.strip()
    assert re.search(r"^\|\*\*ms_accum\*\*\|[\d.]+\|", table, re.MULTILINE)
    assert "wrong-denominator: disagreed: parameters differ" in table
    assert not (tmp_path / "report.png").exists()


@pytest.mark.slow
@pytest.mark.parametrize(("suite", "names"), [
    ("memory", "ms_accum"), ("strategies", "undivided,ms_accum,ms_accum-pieces"), ("mnist", "ms_accum-epoch,tutorial-loop"),
    ("scaling", "ms_accum"), ("skipping", "ms_accum-skip-window,ms_accum-skip-microbatch"),
    ("distributed", "window,microbatch,shard,wrong-denominator")])
def test_every_suite(tmp_path, suite, names):
    """All agree, but for a wrong divisor; the parts of the other suites are tested above."""
    summary, record = quick(suite, tmp_path, "--rounds", "1", "--contestants", names)
    assert not ABSOLUTE_PATH.search(json.dumps(record))
    for name, group in summary["groups"].items():
        wrong = group["status"].pop("wrong-denominator", None)
        assert wrong in (None, "agreed" if name == "1 rank, N = 1" else "disagreed")
        assert set(group["status"].values()) <= {"agreed", "no update"}
    first, *_, each, last = [group["contestants"] for group in [*record["groups"][:1] * 2, *record["groups"]]]
    if suite == "memory":  # a window as one batch grows the process at least by that batch
        undivided = first["undivided"]
        assert undivided["samples"][0] > undivided["data_bytes"] == 8 * 1024 * 784 * 4
        assert all(group["contestants"]["ms_accum"]["samples"][0] > 0 for group in record["groups"])
    elif suite == "strategies":
        weighed = next(group["contestants"] for group in record["groups"] if "piece" in group)
        assert weighed.keys() == {"undivided", "ms_accum", "ms_accum-pieces", "tutorial"}
        assert all(figures["first_window"] > figures["samples"][0] > 0 for figures in weighed.values())
        assert all(figures["growth_spread"]["median"] == figures["growth"][0] for figures in weighed.values())
        assert weighed["undivided"]["growth"][0] > weighed["undivided"]["data_bytes"] == 4 * 512 * 784 * 4
    elif suite == "scaling":
        printed = run("report.py", tmp_path / "scaling.json", "--output", tmp_path)
        ratios = "|".join(f"{group['contestants']['ms_accum']['ratio']['median']:.2f}" for group in record["groups"])
        assert f"|ms_accum|{ratios}|" in printed
    elif suite == "distributed":  # a window's exchange is one of N; a shard is a half
        assert first["alone"]["collectives"] == 0
        window, microbatch, shard = (last[name] for name in ("window", "microbatch", "shard"))
        assert window["collectives"] == each["microbatch"]["collectives"] == 1
        assert microbatch["collectives"] == 4
        assert 4 * window["collective_bytes"] == microbatch["collective_bytes"] == 4 * (window["parameter_bytes"] + 12)
        assert shard["state_bytes"] / shard["parameter_bytes"] == pytest.approx(1 / 2, abs=0.01)
