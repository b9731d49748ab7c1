"""tutorials/benchmarks: a smoke run of every suite, who is caught, skipped or reported, records and their report."""
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


def run(script, *arguments, env=None):
    """A script of the benchmarks in a process of its own."""
    return subprocess.run([sys.executable, BENCHMARKS / script, *map(str, arguments)], capture_output=True, text=True, check=False,
                          env={**os.environ, **(env or {})})


def run_here(code, **options):
    """Python code that imports from the benchmarks, in a process of its own."""
    path = os.pathsep.join([str(BENCHMARKS), os.environ.get("PYTHONPATH", "")])
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False,
                          env={**os.environ, "PYTHONPATH": path}, **options)


def quick(suite, folder, *arguments, env=None):
    """A quick run of a suite: what its last line says, and its record."""
    done = run("run.py", "--suite", suite, "--quick", "--output", folder, *arguments, env=env)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1]), json.loads((folder / f"{suite}.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def mlp(tmp_path_factory):
    """A quick run of the suite mlp in which torch is missing and jax brings its process down: (summary, record, record's file)."""
    packages = tmp_path_factory.mktemp("packages")
    (packages / "torch.py").write_text("raise ModuleNotFoundError(\"No module named 'torch'\", name='torch')", encoding="utf-8")
    (packages / "jax.py").write_text("import os, sys\nprint('jax went /some/where/wrong.so', file=sys.stderr, flush=True)\nos._exit(7)",
                                     encoding="utf-8")
    folder = tmp_path_factory.mktemp("records")
    names = "fused,one-buffer,one-buffer-mean,tutorial,wrong-denominator,pytorch-eager,jax-scan"
    return *quick("mlp", folder, "--contestants", names, env={"PYTHONPATH": str(packages)}), folder / "mlp.json"


def test_mlp_agrees_and_is_timed(mlp):
    summary, record, _ = mlp
    group, = summary["groups"].values()
    assert group["base"] in ("floor", "floor-branch")
    for name in ("fused", "one-buffer", "one-buffer-mean", "tutorial"):
        assert group["status"][name] == "agreed"
        assert group["ratios"][name] > 0
    contestants = record["groups"][0]["contestants"]
    assert contestants["fused"]["difference"] <= 1e-5
    assert len(contestants["fused"]["samples"]) == 3
    assert contestants["fused"]["state_bytes"] / contestants["fused"]["parameter_bytes"] == pytest.approx(1, abs=0.01)
    assert contestants["tutorial"]["state_bytes"] / contestants["tutorial"]["parameter_bytes"] == pytest.approx(2, abs=0.01)
    for name in ("one-buffer", "one-buffer-mean"):
        assert contestants[name]["state_bytes"] / contestants[name]["parameter_bytes"] == pytest.approx(1, abs=0.01)


def test_wrong_contestant_is_caught(mlp):
    """Negative control: a contestant that forgets to divide is reported and not timed."""
    summary, record, _ = mlp
    group, = summary["groups"].values()
    assert group["status"]["wrong-denominator"] == "disagreed"
    assert re.search(r"parameters differ by \S+ after 3 windows, allowed 1e-05", group["messages"]["wrong-denominator"])
    assert "samples" not in record["groups"][0]["contestants"]["wrong-denominator"]


@pytest.mark.parametrize(("contestant", "products"), [("floor", 8), ("floor-branch", 8), ("forward", 3)])
def test_floors_compute_their_gradients(contestant, products, tmp_path):
    """What MindSpore executes for three layers: 3 products forward, 3 for the weights' gradients and 2 for the activations'."""
    job = {"contestant": contestant, "case": {"network": "mlp-784-32-32-10", "batch": 32}}
    command = {"do": "agree", "windows": 1, "file": str(tmp_path / "parameters.npz")}
    done = subprocess.run([sys.executable, BENCHMARKS / "worker.py", json.dumps(job)], input=json.dumps(command) + "\n", text=True,
                          capture_output=True, check=False, cwd=tmp_path,
                          env={**os.environ, "MS_DEV_SAVE_GRAPHS": "3", "MS_DEV_SAVE_GRAPHS_PATH": str(tmp_path / "graphs")})
    assert '"digest"' in done.stdout, done.stderr
    # Beside the graph there are some of single operations.
    executed = [file.read_text(encoding="utf-8") for file in (tmp_path / "graphs").glob("*_execute_*.ir")]
    assert max(len(re.findall(r" = PrimFunc_MatMul\(", graph)) for graph in executed) == products


LIMITS = """
import numpy as np, contestants, oracle
from case import Case, initial_weights, mlp_shapes, samples
from mindspore import Tensor
case = Case("mlp-784-32-32-10", 8)
start = [p.astype(np.float64) for p in initial_weights(mlp_shapes(case), case.seed)]
inputs, labels = samples(case, 32)
gradients = [oracle.mean_gradients(start, inputs[i:i + 8].astype(np.float64), labels[i:i + 8]) for i in range(0, 32, 8)]
def built(name):
    contestant = contestants.builder(name)(case)
    contestant.load(8, distinct=True)
    return contestant
def sums_after_a_window(name):
    contestant = built(name)
    contestant.run(4)
    assert contestant.parameters() == [] and all((p.asnumpy() == q).all() for p, q in zip(contestant.trained, start))
    return [p.asnumpy() for p in contestant.way.state]
total = [sum(g) for g in zip(*gradients)]
assert oracle.difference(sums_after_a_window("write-only"), gradients[-1]) < 1e-5 < oracle.difference(gradients[0], gradients[-1])
assert oracle.difference(sums_after_a_window("add-only"), total) < 1e-5
assert oracle.difference(sums_after_a_window("loop-add-only"), total) < 1e-5
update = built("update-only")
for sums in update.way.state:
    sums.set_data(Tensor(np.ones(sums.shape, np.float32)))
update.run(4)
assert oracle.difference([p.asnumpy() for p in update.trained], [p - case.lr for p in start]) < 1e-6
assert not any(sums.asnumpy().any() for sums in update.way.state)
"""


def test_limits_do_what_they_say(tmp_path):
    """Buffers hold the last gradient, or the window's sum; an update moves the parameters by it and leaves zeros."""
    done = run_here(LIMITS, cwd=tmp_path)
    assert done.returncode == 0, done.stderr


def test_missing_package_is_skipped_by_name(mlp):
    group, = mlp[0]["groups"].values()
    assert group["status"]["pytorch-eager"] == "skipped"
    assert group["messages"]["pytorch-eager"] == "package torch is not installed"


def test_crash_is_reported_by_name_with_its_last_line(mlp):
    group, = mlp[0]["groups"].values()
    assert group["status"]["jax-scan"] == "crashed"
    assert group["messages"]["jax-scan"] == "jax went wrong.so (exit status 7)"


def test_record_tells_circumstances_but_no_paths(mlp):
    _, record, file = mlp
    assert {"date", "commit", "cores", "memory_gib", "versions", "command", "groups"} <= record.keys()
    assert record["versions"].keys() >= {"python", "mindspore", "numpy", "ms_accum"}
    assert record["command"].startswith("python tutorials/benchmarks/run.py --suite mlp --quick")
    assert not ABSOLUTE_PATH.search(file.read_text(encoding="utf-8"))


def test_report_needs_nothing_but_records(mlp, tmp_path):
    done = run("report.py", mlp[2], "--output", tmp_path)
    assert done.returncode == 0, done.stderr
    table = (tmp_path / "report.md").read_text(encoding="utf-8")
    assert done.stdout.strip() == table.strip()
    assert re.search(r"^\|\*\*fused\*\*\|[\d.]+\|", table, re.MULTILINE)
    assert "wrong-denominator: disagreed: parameters differ" in table
    assert (tmp_path / "report.png").read_bytes().startswith(b"\x89PNG")


def test_memory(tmp_path):
    summary, record = quick("memory", tmp_path, "--contestants", "fused")
    assert {group["status"]["fused"] for group in summary["groups"].values()} == {"agreed"}
    assert summary["groups"]["8 pieces"]["base"] == "undivided"
    assert all(group["contestants"]["fused"]["samples"][0] > 0 for group in record["groups"])
    # A window as one batch grows the process at least by that batch.
    undivided = record["groups"][0]["contestants"]["undivided"]
    assert undivided["samples"][0] > undivided["data_bytes"] == 8 * 1024 * 784 * 4


GROWTH = """
from contextlib import contextmanager
from pathlib import Path
import rounds
from suites import Group
asked, broken = [], []
class Worker:
    def __init__(self, name):
        self.name, self.asked = name, []
        asked.append(self.asked)
    def ask(self, do, **arguments):
        self.asked.append((self.name, do, arguments.get("batch")))
        if do == "peak" and arguments["batch"] == 512 and self.name in broken:
            raise rounds.Unavailable("crashed", "out of memory")
        return {"peak": {2: 100, 512: 350}[arguments["batch"]], "data": 7} if do == "peak" else {}
@contextmanager
def fleet(names, case, scratch, unavailable):
    yield {name: Worker(name) for name in names}
rounds.fleet, rounds.agree = fleet, lambda group, workers, results, scratch: workers
group = Group("a group", {"batch": 2}, ("whole", "cut"), (), piece=512)
figures = rounds.weigh_group(group, 3, Path())["contestants"]
assert all(figures[name]["samples"] == [250] * 3 and figures[name]["data_bytes"] == 7 for name in ("whole", "cut")), figures
trained = [commands for commands in asked if ("peak" in str(commands))]
assert sorted(trained) == sorted([[(name, "peak", batch)] for name in ("whole", "cut") for batch in (2, 512)] * 3), trained
broken.append("cut")
figures = rounds.weigh_group(group, 2, Path())["contestants"]
assert figures["whole"]["samples"] == [250] * 2 and "samples" not in figures["cut"] and figures["cut"]["status"] == "crashed"
"""


def test_growth_is_between_processes_that_trained_on_one_size_only():
    done = run_here(GROWTH)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow  # the suites mlp and memory run the same contestants through the same rounds
def test_scaling(tmp_path):
    summary, record = quick("scaling", tmp_path, "--rounds", "1", "--contestants", "fused,update-only")
    assert {group["status"]["fused"] for group in summary["groups"].values()} == {"agreed"}
    assert {group["case"]["network"].split("-")[0] for group in record["groups"]} == {"mlp", "cnn", "transformer"}
    done = run("report.py", tmp_path / "scaling.json", "--output", tmp_path)
    assert done.returncode == 0, done.stderr
    without_update = []
    for group in record["groups"][:2]:
        fused, update, base = (group["contestants"][name]["samples"][0] for name in ("fused", "update-only", group["base"]))
        without_update.append(f"{(fused - update) / base:.2f}")
    assert f"|fused less update-only|{'|'.join(without_update)}|" in done.stdout


@pytest.mark.slow  # what its contestants compute is in test_precision.py
def test_skipping(tmp_path):
    summary, record = quick("skipping", tmp_path, "--rounds", "1", "--contestants", "skip-window,skip-microbatch")
    assert [group["case"]["network"].split("-")[0] for group in record["groups"]] == ["mlp", "cnn"]
    for group in summary["groups"].values():
        assert group["base"] == "fused"
        assert {group["status"][name] for name in ("fused", "skip-window", "skip-microbatch")} == {"agreed"}
        assert group["ratios"]["skip-window"] > 0


SEEDS = """
import numpy as np, oracle
from dataclasses import replace
from case import Case, initial_weights, mlp_shapes, samples
case, windows = Case("mlp-6-5-4-10", 4, 2, lr=0.5), 3
def obvious_margin(case):
    inputs, labels = samples(case, 8)
    margins = []
    for trained in range(windows):
        w0, b0, w1, b1, _, _ = oracle.trained(case, inputs, labels, trained)
        for row in inputs.astype(np.float64):
            first = [row @ w + b for w, b in zip(w0, b0)]
            second = [np.maximum(first, 0) @ w + b for w, b in zip(w1, b1)]
            margins += [abs(value) for value in first + second]
    return min(margins)
margins = {seed: obvious_margin(replace(case, seed=seed)) for seed in range(4)}
assert all(abs(oracle.kink_margin(replace(case, seed=seed), windows) - margin) < 1e-12 for seed, margin in margins.items())
best = max(margins, key=margins.get)
assert oracle.clearest(case, range(4), windows) == replace(case, seed=best)
others = [seed for seed in margins if seed != best]
assert oracle.clearest(case, others, windows).seed == max(others, key=margins.get) and len(set(margins.values())) == 4
"""


def test_seed_with_the_widest_margin_is_taken():
    """The oracle's margin is that of a loop over samples and units; the chosen seed has the largest, and without it the next."""
    done = run_here(SEEDS)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow  # what ranks compute is in tests/distributed; without msrun, below
def test_ranks_agree_with_the_joint_batch_or_are_caught(tmp_path):
    """The shortened form of the test below: one way to exchange, and the wrong divisor."""
    summary, record = quick("distributed", tmp_path, "--contestants", "window,wrong-denominator")
    for name, group in summary["groups"].items():
        assert group["status"]["wrong-denominator"] == ("agreed" if name == "1 rank, N = 1" else "disagreed")
        assert group["status"].get("window", "agreed") == group["status"]["alone"] == "agreed"
    window = record["groups"][-1]["contestants"]["window"]
    assert window["collectives"] == 1
    assert window["collective_bytes"] == window["parameter_bytes"] + 12


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


LAUNCH = """
import launch, sys
from dataclasses import asdict
from pathlib import Path
from case import Case
from suites import Group
group = Group("a group", asdict(Case("mlp-784-32-32-10", 8, ranks=2)), ("window",), ("window",), microbatches=4)
def said(folder):
    record, = launch.time_launch([group], 10**9, Path.cwd() / folder)
    return record["contestants"]["window"]["status"], record["contestants"]["window"]["message"]
launch.PATIENCE = 2
assert said("slow") == ("crashed", "no end after 2 s")
launch.shutil.which = lambda *arguments, **options: None
assert said("missing") == ("skipped", "msrun is not installed")
"""


def test_ranks_without_msrun_are_skipped_and_late_ones_ended(tmp_path):
    done = run_here(LAUNCH, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for command in Path("/proc").glob("[0-9]*/cmdline"):
        assert str(tmp_path).encode() not in command.read_bytes()


COST_MODEL = """
import cost_model
from cost_model import Costs, Run, fitted, relative_errors, seconds
true = Costs(1e-3, 7e-4, 2e-4, 2e-9, 1.5)
runs = [Run(mode, ranks, n, 2.7e6, one_machine=True, scatters=False)
        for ranks in (1, 2, 4) for n in (1, 8) for mode in (("alone", "window", "microbatch", "shard") if ranks > 1 else ("alone",))]
rows = [(run, seconds(true, run)) for run in runs]
found = fitted(rows)
assert max(map(abs, relative_errors(found, rows))) < 1e-9, found
assert all(abs(a - b) <= 1e-6 * b for a, b in zip(vars(found).values(), vars(true).values())), found
assert fitted([(run, seconds(Costs(1e-3, 0.0, 0.0, 2e-9), run)) for run in runs]).latency < 1e-9
# Control: with more ranks faster, which the model cannot be.
faster = [(run, 1 / run.ranks) for run in runs]
assert max(map(abs, relative_errors(fitted(faster), faster))) > 0.1

def close(a, b):
    return abs(a - b) <= 1e-9 * b
for mode in cost_model.MODES:
    assert close(seconds(true, Run(mode, 1, 4, 2.7e6)), 1e-3 + 7e-4 / 4), "one rank exchanges nothing"
long = 10**9
assert abs(seconds(true, Run("window", 64, long, 2.7e6)) - 1e-3) < 1e-9, "a long window leaves compute and add"
ring = 2 * 63 * 2e-4 + 2 * 63 / 64 * 2.7e6 * 2e-9
assert close(seconds(true, Run("window", 64, 1, 2.7e6)), 1e-3 + 7e-4 + ring)
assert close(seconds(true, Run("microbatch", 64, 8, 2.7e6)), 1e-3 + 7e-4 / 8 + ring)
assert close(seconds(true, Run("window", 64, 8, 2.7e6)), 1e-3 + 7e-4 / 8 + ring / 8)
header = 2 * 63 * 2e-4 + 2 * 63 / 64 * 12 * 2e-9
assert close(seconds(true, Run("shard", 64, 8, 2.7e6)), 1e-3 + 7e-4 / 8 + header + ring / 2 + ring / 2 / 8)
"""


def test_cost_model_finds_the_costs_a_record_was_made_from():
    """And its limits: one rank, a long window, a ring's AllReduce."""
    done = run_here(COST_MODEL)
    assert done.returncode == 0, done.stderr


def test_cost_model_prints_its_tables(tmp_path):
    done = run("cost_model.py", "--ranks", "512", "--n", "4")
    assert done.returncode == 0, done.stderr
    assert re.search(r"^\|2\|8\|window\|[\d.]+\|[\d.]+\|[+-]\d+%\|$", done.stdout, re.MULTILINE)
    assert re.search(r"^\|10 M\|512\|4\|", done.stdout, re.MULTILINE)


@pytest.mark.parametrize(("arguments", "message"), [
    ([BENCHMARKS / "records" / "mlp.json"], r"cost_model\.py: error: the record is of suite mlp, expected distributed"),
    (["--latency-us", "0"], r"argument --latency-us: expected a number > 0, got '0'"),
])
def test_cost_model_refuses(arguments, message):
    done = run("cost_model.py", *arguments)
    assert done.returncode == 2
    assert re.search(message, done.stderr)


def test_mnist(tmp_path):
    summary, record = quick("mnist", tmp_path, "--contestants", "reference,tutorial-loop")
    group, = summary["groups"].values()
    assert group["status"] == {"reference": "agreed", "tutorial-loop": "agreed"}
    assert group["ratios"]["tutorial-loop"] > 0
    assert not ABSOLUTE_PATH.search(json.dumps(record))


@pytest.mark.parametrize(("arguments", "message"), [
    (["--suite", "speed"], r"argument --suite: invalid choice: 'speed'"),
    (["--suite", "mlp", "--rounds", "0"], r"argument --rounds: expected a whole number from 1, got '0'"),
    (["--suite", "mlp", "--contestants", "fused,fast"], r"argument --contestants: unknown contestant 'fast'; choose from floor, "),
    (["--suite", "memory", "--contestants", "boost"], r"argument --contestants: 'boost' is not in suite memory; choose from undivided, "),
])
def test_bad_arguments_are_refused_in_one_line(arguments, message):
    done = run("run.py", *arguments)
    assert done.returncode == 2
    assert re.fullmatch(rf"run\.py: error: {message}.*\n", done.stderr)


def test_report_refuses_what_is_no_record(tmp_path):
    (tmp_path / "notes.json").write_text("[]", encoding="utf-8")
    done = run("report.py", tmp_path / "notes.json", "--output", tmp_path)
    assert done.returncode == 2
    assert re.fullmatch(r"report\.py: error: \S+notes\.json is no record of run\.py .*\n", done.stderr)
