"""Checks of parts of tutorials/benchmarks, whose modules are on the path of this process: `benchmark_parts.py floors | others`."""
import re
import sys
from contextlib import contextmanager, redirect_stderr
from dataclasses import asdict, replace
from io import StringIO
from pathlib import Path
from unittest.mock import patch

import contestants
import digits
import launch
import numpy as np
import oracle
import plan
import pytest
import records
import report
import rounds
import run
import suites
import worker
from case import Case, EpochCase, initial_weights, mlp_shapes, samples
from mindspore import Tensor

CASE = Case("mlp-784-32-32-10", 8)


def floors():
    """What MindSpore executes for three layers: 3 products forward, 3 for the weights' gradients and 2 for the activations'."""
    seen = set()
    for name, products in (("floor", 8), ("floor-branch", 8), ("forward", 3)):
        contestants.builder(name)(CASE).agree(1)
        saved = set(Path("graphs").glob("*_execute_*.ir")) - seen  # beside the graph there are some of single operations
        seen |= saved
        counts = [len(re.findall(r" = PrimFunc_MatMul\(", file.read_text(encoding="utf-8"))) for file in saved]
        assert max(counts) == products, (name, counts)


def limits():
    """Buffers hold the last gradient, or the window's sum; an update moves the parameters by it and leaves zeros."""
    start = [p.astype(np.float64) for p in initial_weights(mlp_shapes(CASE), CASE.seed)]
    inputs, labels = samples(CASE, 32)
    gradients = [oracle.mean_gradients(start, inputs[i:i + 8].astype(np.float64), labels[i:i + 8]) for i in range(0, 32, 8)]

    def built(name):
        contestant = contestants.builder(name)(CASE)
        contestant.load(8, distinct=True)
        return contestant

    def sums_after_a_window(name):
        contestant = built(name)
        contestant.run(4)
        assert contestant.parameters() == []
        assert all((p.asnumpy() == q).all() for p, q in zip(contestant.trained, start))
        return [p.asnumpy() for p in contestant.way.state]

    total = [sum(g) for g in zip(*gradients)]
    assert oracle.difference(sums_after_a_window("write-only"), gradients[-1]) < 1e-5 < oracle.difference(gradients[0], gradients[-1])
    assert oracle.difference(sums_after_a_window("add-only"), total) < 1e-5
    assert oracle.difference(sums_after_a_window("loop-add-only"), total) < 1e-5
    update = built("update-only")
    for sums in update.way.state:
        sums.set_data(Tensor(np.ones(sums.shape, np.float32)))
    update.run(4)
    assert oracle.difference([p.asnumpy() for p in update.trained], [p - CASE.lr for p in start]) < 1e-6
    assert not any(sums.asnumpy().any() for sums in update.way.state)


def states():
    """One buffer is as large as the parameters, the tutorial's two are twice as large; all train as the oracle."""
    for name, buffers in (("one-buffer", 1), ("one-buffer-mean", 1), ("tutorial", 2)):
        contestant = contestants.builder(name)(CASE)
        assert oracle.difference(contestant.agree(3), oracle.trained(CASE, *samples(CASE, CASE.window), 3)) <= 1e-5, name
        state = worker.state(contestant)
        assert abs(state["state_bytes"] / state["parameter_bytes"] - buffers) < 0.01, name
    weighed = worker.peak(contestant, batch=16, windows=1)
    assert weighed["peak"] > 2**26
    assert weighed["data"] == 16 * 784 * 4


def reference():
    """The reference run's contestant trains as the oracle."""
    folder = digits.unpack("embedded", Path("digits"), 640)
    (group,) = suites.mnist(True, folder)
    trained = contestants.builder("reference")(EpochCase(str(folder))).agree(2)
    assert rounds.verdict(oracle.difference(trained, group.referee(2))) == {"status": "agreed"}
    assert rounds.verdict(oracle.difference(trained, group.referee(1)))["status"] == "disagreed"


def growth():
    """Growth is between processes that trained on one size only; who crashes has no figure."""
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

    group = suites.Group("a group", {"batch": 2}, ("whole", "cut"), (), piece=512)
    with patch.object(rounds, "fleet", fleet), patch.object(rounds, "agree", lambda group, workers, results, scratch: workers):
        figures = rounds.weigh_group(group, 3, Path())["contestants"]
        assert all(figures[name]["samples"] == [250] * 3 and figures[name]["data_bytes"] == 7 for name in ("whole", "cut")), figures
        trained = [commands for commands in asked if "peak" in str(commands)]
        assert sorted(trained) == sorted([[(name, "peak", batch)] for name in ("whole", "cut") for batch in (2, 512)] * 3), trained
        broken.append("cut")
        figures = rounds.weigh_group(group, 2, Path())["contestants"]
    assert figures["whole"]["samples"] == [250] * 2
    assert "samples" not in figures["cut"]
    assert figures["cut"]["status"] == "crashed"


def seeds():
    """The oracle's margin is that of a loop over samples and units; the chosen seed has the largest, and without it the next."""
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
    assert len(set(margins.values())) == 4
    assert all(abs(oracle.kink_margin(replace(case, seed=seed), windows) - margin) < 1e-12 for seed, margin in margins.items())
    best = max(margins, key=margins.get)
    assert oracle.clearest(case, range(4), windows) == replace(case, seed=best)
    others = [seed for seed in margins if seed != best]
    assert oracle.clearest(case, others, windows).seed == max(others, key=margins.get)


def late_ranks():
    """Without msrun ranks are skipped, and late ones are ended."""
    group = suites.Group("a group", asdict(replace(CASE, ranks=2)), ("window",), ("window",), microbatches=4)

    def said(folder):
        (record,) = launch.time_launch([group], 10**9, Path.cwd() / folder)
        return record["contestants"]["window"]["status"], record["contestants"]["window"]["message"]

    with patch.object(launch, "PATIENCE", 2):
        assert said("slow") == ("crashed", "no end after 2 s")
    assert not [file for file in Path("/proc").glob("[0-9]*/cmdline") if str(Path.cwd()).encode() in file.read_bytes()]
    with patch.object(launch.shutil, "which", lambda *arguments, **options: None):
        assert said("missing") == ("skipped", "msrun is not installed")


def refusals():
    """Bad arguments end in one line and status 2."""
    Path("notes.json").write_text("[]", encoding="utf-8")
    for module, arguments, message in [
        (run, "--suite speed", r"run\.py: error: argument --suite: invalid choice: 'speed'.*\n"),
        (run, "--suite mlp --rounds 0", r"run\.py: error: argument --rounds: expected a whole number from 1, got '0'\n"),
        (run, "--suite mlp --contestants split,fast",
         r"run\.py: error: argument --contestants: unknown contestant 'fast'; choose from floor, .*\n"),
        (run, "--suite memory --contestants boost",
         r"run\.py: error: argument --contestants: 'boost' is not in suite memory; choose from undivided, .*\n"),
        (report, "notes.json", r"report\.py: error: \S*notes\.json is no record of run\.py .*\n"),
    ]:
        with redirect_stderr(StringIO()) as said, pytest.raises(SystemExit) as stop:
            module.main(arguments.split())
        assert stop.value.code == 2
        assert re.fullmatch(message, said.getvalue()), said.getvalue()


def figure():
    """Points are time against the tutorial's and memory against the undivided batch's; without these there is no figure."""
    seconds = {"tutorial": [2.0, 4.0], "undivided": [1.0, 2.0], "split": [1.5, 3.0], "boost": []}
    growth = {"tutorial": [50, 50], "undivided": [100, 100], "split": [20, 30], "boost": []}
    figures = {name: {"samples": seconds[name], "growth": growth[name]} for name in seconds}
    group = records.summarised({"name": "MLP", "base": ["tutorial"], "contestants": figures})
    found = {name: [spread["median"] for spread in spreads] for name, spreads in report.points(group).items()}
    assert found == {"tutorial": [1, 0.5], "undivided": [0.5, 1], "split": [0.75, 0.25]}, found
    assert report.draw([{"suite": "strategies", "groups": [group] * 3}], Path("figure.png"))
    assert Path("figure.png").read_bytes().startswith(b"\x89PNG")
    del figures["undivided"]
    assert not report.draw([{"suite": "strategies", "groups": [group]}, {"suite": "mlp"}], Path("none.png"))
    assert not Path("none.png").exists()


def planned():
    """Peaks on a line give back its slope and start; one off it shows; who crashes at one size has no figures; CANN may be missing."""
    line = {size: 12_000 + 8 * 5 * size for size in (10, 15, 20)}
    found = plan.figures({1: 16_000, **line}, 1000, 8)
    assert found == {"per_parameter": 16, "held": 12, "per_sample": 5, "deviation": 0}, found
    assert abs(plan.figures({1: 16_000, **line, 15: 12_600 * 1.1}, 1000, 8)["deviation"] - 0.1) < 1e-9

    def peak(group, name, scratch, results, do, batch):
        if name == "cut" and batch == 15:
            results.unavailable(name, rounds.Unavailable("crashed", "out of memory"))
            return {}
        return {"peak": line.get(batch, 16_000), "parameters": 1000}

    case = {"accumulate_step": 8, "network": "mlp", "optimizer": "Adam"}
    group = suites.Group("a group", case, ("whole", "cut"), (), sizes=(1, 10, 15, 20))
    with patch.object(rounds, "_peak", peak):
        record = rounds.plan_group(group, 1, Path())
    assert record["contestants"]["whole"]["per_sample"] == 5
    assert record["contestants"]["cut"] == {"status": "crashed", "message": "out of memory"}
    table = report.ascend_table(record)
    assert re.search(r"^\|whole\|16\.0\|12\.0\|", table, re.MULTILINE)
    assert "- cut: out of memory" in table
    with patch.object(plan, "STAND_INS", Path("none.py")), patch.dict("os.environ", {"ASCEND_TOOLKIT_HOME": ""}):
        with redirect_stderr(StringIO()) as said, pytest.raises(SystemExit) as stop:
            run.main(["--suite", "ascend", "--quick"])
        assert stop.value.code == 2
        assert re.fullmatch(r"run\.py: error: suite ascend needs CANN \(.*\), or .* tests/ascend/stand_ins\.py\n", said.getvalue())
    with patch.dict("os.environ", {"ASCEND_TOOLKIT_HOME": "installed"}):
        assert plan.environment(Path("none")).keys() == {"MS_SIMULATION_LEVEL", "RANK_SIZE", "RANK_ID"}


OTHERS = (refusals, seeds, growth, late_ranks, limits, states, reference, figure, planned)

if __name__ == "__main__":
    for check in (floors,) if sys.argv[1] == "floors" else OTHERS:
        check()
        print(check.__name__)
