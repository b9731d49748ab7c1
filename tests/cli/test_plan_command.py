"""`ms-accum plan`: the prediction against a real run, what it prints and writes, and what it refuses."""
import json
from pathlib import Path

import pytest
from support.processes import run_python

from ms_accum import __main__ as cli
from ms_accum.batch_size import planning, worth
from ms_accum.batch_size.planning import Plan
from ms_accum.batch_size.process import Outcome
from ms_accum.batch_size.trial import Trial
from ms_accum.cli import plan as plan_command

TRAIN = """
import sys
import numpy as np
from mindspore import Tensor, nn
from ms_accum import make_train_step

def make_step(microbatch):
    network, data = nn.Dense(64, 1024, activation="tanh"), Tensor(np.ones((microbatch, 64), np.float32))
    def forward_fn(x):
        return (network(x) ** 2).tanh().mean()
    train_step = make_train_step(forward_fn, nn.SGD(network.trainable_params(), 1e-3), 32768 // microbatch)
    return lambda: train_step(data)

if __name__ == "__main__":
    step = make_step(int(sys.argv[1]))
    for _ in range(int(sys.argv[2])):
        float(step())
    print(next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM")) * 1024)
"""


@pytest.mark.slow
def test_the_command_predicts_what_the_run_then_uses(capsys, monkeypatch):
    """Within 10 %, after an update in a fresh process; control: that of the next microbatch would be off by more."""
    Path("planned_train.py").write_text(TRAIN)
    monkeypatch.setattr(planning, "candidates", lambda batch_size: [4096, 16384, 32768])  # two trials are enough here
    assert cli.main(["plan", "planned_train:make_step", "--total-batch-size", "32768", "--memory-limit", "950MiB",
                     "--json", "plan.json"]) == 0
    plan = json.loads(Path("plan.json").read_text())
    assert (plan["microbatch"], plan["accumulate_step"]) == (16384, 2), capsys.readouterr().out
    used = int(run_python(TRAIN, "16384", "3"))
    assert plan["peak"] == pytest.approx(used, rel=0.1)
    assert not plan["trials"][1]["peak"] == pytest.approx(used, rel=0.1)


@pytest.fixture
def plan(capsys, monkeypatch):
    """Plan a batch of 16 by a model of memory, 100 MiB and a byte per sample: (status, stdout, stderr, figures)."""
    def run_trial(make_step, microbatch, accumulate_step, device_target, memory_limit, timeout):
        peak = 100 * 2**20 + microbatch
        fits = peak <= memory_limit
        return Trial(microbatch, accumulate_step, peak, fits, "completed" if fits else "out of memory", 0.1)

    def run(*arguments, limit=100 * 2**20 + 4):
        status = cli.main(["plan", "--total-batch-size", "16", "--memory-limit", str(limit), "--json", "plan.json",
                           *arguments])
        written = Path("plan.json")
        return status, *capsys.readouterr(), json.loads(written.read_text()) if written.exists() else None
    monkeypatch.setattr(planning, "run_trial", run_trial)
    monkeypatch.setattr(planning, "idle_memory", lambda make_step: 90 * 2**20)
    return run


def test_the_command_prints_and_writes_the_plan(plan):
    status, out, err, figures = plan("json:loads", "--plot", "plan.png")
    assert (status, err) == (0, "")
    wanted = {"microbatch": 4, "accumulate_step": 4, "batch_size": 16, "worth": None, "dry_run": False}
    assert figures | wanted == figures
    assert [(trial["microbatch"], trial["ended"]) for trial in figures["trials"]] == [
        (4, "completed"), (8, "out of memory")]
    trial, other, *_, last, json_line, plot_line = out.splitlines()
    assert (trial, other) == ("trial: microbatch 4 fits", "trial: microbatch 8 out of memory")
    assert last.startswith("batch 16 = accumulate_step 4 x microbatch 4: ")
    assert (json_line, plot_line) == ("wrote plan.json", "wrote plan.png")
    assert Path("plan.png").read_bytes().startswith(b"\x89PNG")


def test_the_command_ends_with_the_window_that_is_worth_it(plan, monkeypatch):
    asked = []
    with monkeypatch.context() as patch:
        patch.setattr(plan_command, "measure_noise", lambda make_step, plan, *how: asked.append(how) or 11.1)
        status, out, err, figures = plan("json:loads", "--noise-scale", "25", "--timeout", "9")
    assert (status, err, asked) == (0, "", [(25, "CPU", 9.0)])
    assert (figures["noise_scale"], figures["worth"], figures["microbatch"]) == (11.1, 2, 4)
    assert "\naccumulate_step 2 x microbatch 4 = 8 samples: the largest window, up to the planned one, within" in out
    monkeypatch.setattr(worth, "in_a_process", lambda *call, **limits: Outcome("failed", "ZeroDivisionError"))
    status, out, err, figures = plan("json:loads", "--noise-scale")
    assert status == 1
    assert err.startswith("ms-accum plan: error: measuring the noise scale failed: ZeroDivisionError")
    assert "batch 16 = accumulate_step 4 x microbatch 4" in out
    assert (figures["microbatch"], figures["noise_scale"], figures["worth"]) == (4, None, None)


def test_the_command_says_when_nothing_fits(plan):
    status, _, err, figures = plan("json:loads", "--plot", "p.png", limit=50 * 2**20)
    said, _, trial, *_ = err.splitlines()
    assert (status, figures["microbatch"]) == (1, None)
    assert said == ("ms-accum plan: error: memory_limit is 50 MiB, but a process that has imported MindSpore and the "
                    "module of make_step takes 90 MiB without a step; give a limit above that")
    assert trial.endswith("out of memory")
    assert [trial["microbatch"] for trial in figures["trials"]] == [4, 1]
    assert Path("p.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(("peaks", "entries"), [
    ([551, 558, 555], ["fits", "does not fit (what was seen before it ended)", "limit: 555 MiB"]),
    ([51, 52, 53], ["fits", "limit: 555 MiB"]),
    ([None, None, None], [])])
def test_the_plot_shows_each_known_peak_and_names_what_it_shows(peaks, entries):
    trials = tuple(Trial(2**i, 4 // 2**i, peak and peak * 2**20, peak is not None and peak < 555, "", 0.1)
                   for i, peak in enumerate(peaks))
    axes = plan_command.draw(trials, Plan(4, 1, 4, 51 * 2**20, 555 * 2**20, trials) if entries else None).axes[0]
    legend, (low, high) = axes.get_legend(), axes.get_ylim()
    assert ([text.get_text() for text in legend.get_texts()] if legend else []) == entries
    points = [y for line in axes.lines if line.get_marker() != "None" for y in line.get_ydata()]
    assert sorted(points) == sorted(peak for peak in peaks if peak is not None)
    assert all(low < y < high for y in points)


@pytest.mark.parametrize(("arguments", "message"), [
    ("json:loads --memory-limit 4XB",
     "argument --memory-limit: expected a size such as 4GiB, 500MB or a number of bytes, got '4XB'"),
    ("json:loads --memory-limit 0", "argument --memory-limit: expected a size"),
    ("json:loads --timeout -1", "argument --timeout: expected a number of seconds > 0, got '-1'"),
    ("operator:neg --noise-scale 2", "the noise scale cannot be measured: "),
    ("json:loads --total-batch-size 0", "argument --total-batch-size: expected a whole number from 1"),
    ("json:loads --plot x.jpg", "argument --plot: x.jpg does not end in .png"),
])
def test_a_bad_plan_is_refused_in_one_line_before_a_trial(arguments, message, plan):
    status, out, err, _ = plan(*arguments.split())
    assert (status, out, len(err.splitlines())) == (2, "", 1)
    assert err.startswith(f"ms-accum plan: error: {message}")


def test_the_batch_of_a_plan_is_the_total_one(capsys):
    """In tutorials/mnist/train.py, --batch-size is a microbatch."""
    assert cli.main(["plan", "json:loads", "--batch-size", "8"]) == 2
    assert "arguments are required: --total-batch-size" in capsys.readouterr().err


def test_sizes():
    for text, size in (("4GiB", 2**32), ("500MB", 5 * 10**8), ("1.5g", 15 * 10**8), ("12", 12), ("2 kib", 2048)):
        assert plan_command.size_in_bytes(text) == size
