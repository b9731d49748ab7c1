"""`ms-accum plan`: the prediction against a real run, what it prints and writes, and what it refuses."""
import json
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import run_python

from ms_accum.batch_size import planning
from ms_accum.batch_size.planning import Plan
from ms_accum.batch_size.trial import Outcome
from ms_accum.batch_size.worth import Worth, rows_of
from ms_accum.cli import main as cli
from ms_accum.cli import plan as plan_command

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

TRAIN = """
import sys
import mindspore as ms, numpy as np
from mindspore import Tensor, nn
from ms_accum import Accumulator, make_train_step

def make_step(microbatch):
    network = nn.SequentialCell(nn.Dense(64, 512), *[nn.Tanh() for _ in range(7)], nn.Dense(512, 10))
    loss_fn = nn.CrossEntropyLoss()
    def forward_fn(data, label):
        return loss_fn(network(data), label)
    acc = Accumulator(nn.Adam(network.trainable_params(), 1e-3), 32768 // microbatch, reduction="mean")
    train_step = make_train_step(forward_fn, acc)
    rng = np.random.default_rng(0)
    data, label = Tensor(rng.random((microbatch, 64), np.float32)), Tensor(rng.integers(0, 10, microbatch), ms.int32)
    return lambda: train_step(data, label)

if __name__ == "__main__":
    step = make_step(int(sys.argv[1]))
    for _ in range(int(sys.argv[2])):
        float(step())
    print(next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM")) * 1024)
"""


def test_the_command_predicts_what_the_run_then_uses(capsys, monkeypatch):
    """Within 10 %, after 2 updates in a fresh process; control: that of the next microbatch would be off by more."""
    Path("planned_train.py").write_text(TRAIN)
    monkeypatch.setattr(planning, "divisors_of", lambda batch_size: [4096, 16384, 32768])  # two trials are enough here
    status = cli.main(["plan", "planned_train:make_step", "--total-batch-size", "32768", "--memory-limit", "950MiB",
                       "--json", "plan.json", "--plot", "plan.png"])
    out, err = capsys.readouterr()
    assert (status, err) == (0, "")
    plan = json.loads(Path("plan.json").read_text())
    assert (plan["microbatch"], plan["accumulate_step"], plan["worth"]) == (16384, 2, None), out
    assert [trial["ended"] for trial in plan["trials"]] == ["completed", "beyond the limit"]
    *_, last, json_line, plot_line = out.splitlines()
    assert (json_line, plot_line) == ("wrote plan.json", "wrote plan.png")
    assert last.startswith("batch 32,768 = accumulate_step 2 x microbatch 16,384: ")
    assert len([line for line in out.splitlines() if line.startswith("trial")]) == 2
    assert Path("plan.png").read_bytes().startswith(b"\x89PNG")
    used = int(run_python(TRAIN, "16384", "4"))
    assert plan["peak"] == pytest.approx(used, rel=0.1)
    assert not plan["trials"][1]["peak"] == pytest.approx(used, rel=0.1)


def test_functions_of_a_script_need_a_guard():
    """With one, they work: as a script runs the docstring's example in test_package.py."""
    Path("unguarded.py").write_text("""
from ms_accum.batch_size import plan_micro_batch
def make_step(microbatch):
    return int
plan_micro_batch(make_step, 2, memory_limit=2**40)
""")
    done = subprocess.run([sys.executable, "unguarded.py"], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert 'a script needs `if __name__ == "__main__":` around what is not to run in each trial' in done.stderr.splitlines()[-1]


NOISY = """
import mindspore as ms, numpy as np
from mindspore import Parameter, Tensor, nn
from ms_accum import Accumulator

def make_step(microbatch, accumulate_step=None, noise_scale=None):
    point, rng = Parameter(Tensor(np.zeros(100), ms.float32), name="point"), np.random.default_rng(0)
    accumulator = Accumulator(nn.SGD([point], 1e-30), accumulate_step or 1, reduction="mean", noise_scale=noise_scale)
    gradients = lambda: rng.normal(0.3, 1, (microbatch, 100)).mean(0)
    return lambda: accumulator((Tensor(gradients(), ms.float32),), microbatch)

def two_names(microbatch, accumulate_step=None):
    return int

def failing(microbatch, accumulate_step=None, noise_scale=None):
    return int if accumulate_step is None else 1 / 0
"""


def test_the_command_ends_with_the_window_that_is_worth_it(capsys, monkeypatch):
    """The noise scale is 1 / 0.3² = 11.1 samples. Control: with the wrong noise scale it would not be 2 x 4 samples."""
    Path("noisy.py").write_text(NOISY)
    monkeypatch.setattr(planning, "run_trial", lambda make_step, microbatch, *_, **__: Outcome(
        2**20, "completed" if microbatch <= 4 else "out of memory", "", 0.1))
    status = cli.main(["plan", "noisy:make_step", "--total-batch-size", "16", "--memory-limit", "4GiB", "--noise-scale", "200",
                       "--json", "plan.json", "--plot", "plan.png"])
    out, err = capsys.readouterr()
    assert (status, err) == (0, "")
    worth = json.loads(Path("plan.json").read_text())["worth"]
    assert worth["noise_scale"] == pytest.approx(1 / 0.3**2, rel=0.15)
    assert (worth["accumulate_step"], worth["measured_windows"]) == (2, 200)
    assert [row["batch"] for row in worth["windows"]] == [4, 8, 16, 32]
    assert all(row["seconds"] > 0 for row in worth["windows"])
    assert Path("plan.png").read_bytes().startswith(b"\x89PNG")
    lines = [line for line in out.splitlines() if line.startswith("measurement")]
    assert len(lines) == 5
    assert lines[0].startswith("measurement 1: noise scale 1")
    assert "accumulate_step 2 x microbatch 4 = 8 samples: the largest window whose batch is not beyond" in out


def test_the_panel_of_windows_shows_their_cost_and_the_noise_scale():
    plan, windows = Plan(16, 4, 4, 1, 2**40, ()), {1: 0.003, 2: 0.002, 4: 0.001}
    for noise, lines in ((8.0, 4), (float("inf"), 1), (float("nan"), 1)):
        _, panel, steps = plan_command.draw((), plan, Worth(noise, 32, 8, 2, 2, rows_of(plan, noise, windows))).axes
        assert len([*panel.lines, *steps.lines]) == lines
        assert [*panel.lines[0].get_xdata()] == [4, 8, 16]
        assert [*panel.lines[0].get_ydata()] == [3.0, 2.0, 1.0]
    assert len(plan_command.draw((), plan).axes) == 1


def test_windows_that_cannot_be_measured_are_refused_before_a_trial_or_named_after_all(capsys, modelled):
    Path("noisy2.py").write_text(NOISY)
    for function, batch, message in (("two_names", "8", "two_names does not take a microbatch alone, or with accumulate_step= and noise_"),
                                     ("make_step", "1", "the batch is 1 sample, expected at least 2")):
        assert cli.main(["plan", f"noisy2:{function}", "--total-batch-size", batch, "--noise-scale"]) == 2
        out, err = capsys.readouterr()
        assert err.startswith(f"ms-accum plan: error: {message}")
        assert out == ""
    assert cli.main(["plan", "noisy2:failing", "--total-batch-size", "8", "--memory-limit", "4GiB", "--json", "p.json",
                     "--noise-scale"]) == 1
    out, err = capsys.readouterr()
    assert "measuring the noise scale failed: ZeroDivisionError" in err
    assert "batch 8 = accumulate_step 1 x microbatch 8" in out
    figures = json.loads(Path("p.json").read_text())
    assert (figures["microbatch"], figures["worth"]) == (8, None)


@pytest.fixture
def modelled(monkeypatch):
    """A model of memory in place of trials, in bytes: 100 MiB, and one for each sample."""
    def run(make_step, microbatch, steps, device_target, memory_limit, timeout):
        peak = 100 * 2**20 + microbatch
        return Outcome(peak, "completed" if peak <= memory_limit else "out of memory", "", 0.1)
    monkeypatch.setattr(planning, "run_trial", run)


def test_the_command_says_when_nothing_fits(capsys, modelled):
    status = cli.main(["plan", "json:loads", "--total-batch-size", "8", "--memory-limit", "50MiB", "--json", "p.json", "--plot", "p.png"])
    err = capsys.readouterr().err.splitlines()
    assert status == 1
    assert err[0] == ("ms-accum plan: error: not even a microbatch of 1 fits into 50 MiB; "
                      "allow more memory, or make the network smaller")
    assert err[2].endswith("out of memory")
    figures = json.loads(Path("p.json").read_text())
    assert figures["microbatch"] is None
    assert [trial["microbatch"] for trial in figures["trials"]] == [2, 1]
    assert Path("p.png").read_bytes().startswith(b"\x89PNG")


def test_a_terminal_sees_a_bar(capsys, monkeypatch, modelled):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    assert cli.main(["plan", "json:loads", "--total-batch-size", "127", "--memory-limit", str(100 * 2**20 + 50)]) == 0
    out = capsys.readouterr().out
    assert "trials:" in out
    assert "microbatch 43 fits" in out
    assert "\ntrial " not in out


@pytest.mark.parametrize(("arguments", "message"), [
    (["train"], "argument MODULE:FUNCTION: got 'train', expected e.g. train:make_step"),
    (["json:loads", "--memory-limit", "4XB"],
     "argument --memory-limit: expected a size such as 4GiB, 500MB or a number of bytes, got '4XB'"),
    (["json:loads", "--memory-limit", "0"], "argument --memory-limit: expected a size"),
    (["json:loads", "--timeout", "-1"], "argument --timeout: expected a number of seconds > 0, got '-1'"),
    (["json:loads", "--noise-scale", "0"], "argument --noise-scale: expected a whole number from 1"),
    (["json:loads", "--total-batch-size", "0"], "argument --total-batch-size: expected a whole number from 1"),
    (["json:loads", "--plot", "x.jpg"], "argument --plot: x.jpg does not end in .png"),
    (["json:loads", "--json", "x.png", "--plot", "x.png"], "arguments --json and --plot name the same file"),
])
def test_a_bad_plan_is_refused_in_one_line(arguments, message, capsys):
    assert cli.main(["plan", "--total-batch-size", "8", *arguments]) == 2
    err = capsys.readouterr().err.splitlines()
    assert len(err) == 1
    assert err[0].startswith(f"ms-accum plan: error: {message}")


def test_the_batch_size_of_a_plan_is_the_total_one(capsys):
    """In `ms-accum mnist`, --batch-size is a microbatch."""
    assert cli.main(["plan", "json:loads", "--batch-size", "8"]) == 2
    assert "arguments are required: --total-batch-size" in capsys.readouterr().err


def test_sizes():
    for text, size in (("4GiB", 2**32), ("500MB", 5 * 10**8), ("1.5g", 15 * 10**8), ("12", 12), ("2 kib", 2048)):
        assert plan_command._bytes(text) == size
