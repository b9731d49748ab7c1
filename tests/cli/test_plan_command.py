"""`ms-accum plan`: the prediction against a real run, what it prints and writes, and what it refuses."""
import json
import sys
from pathlib import Path

import pytest
from conftest import run_python

from ms_accum.batch_size import planning, worth
from ms_accum.batch_size.process import Outcome
from ms_accum.batch_size.trial import Trial
from ms_accum.cli import main as cli
from ms_accum.cli import plan as plan_command

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

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


def test_the_command_predicts_what_the_run_then_uses(capsys, monkeypatch):
    """Within 10 %, after an update in a fresh process; control: that of the next microbatch would be off by more."""
    Path("planned_train.py").write_text(TRAIN)
    monkeypatch.setattr(planning, "candidates", lambda batch_size: [4096, 16384, 32768])  # two trials are enough here
    status = cli.main(["plan", "planned_train:make_step", "--total-batch-size", "32768", "--memory-limit", "950MiB",
                       "--json", "plan.json", "--plot", "plan.png"])
    out, err = capsys.readouterr()
    assert (status, err) == (0, "")
    plan = json.loads(Path("plan.json").read_text())
    assert (plan["microbatch"], plan["accumulate_step"], plan["worth"], plan["batch_size"]) == (16384, 2, None, 32768), out
    assert [trial["ended"] for trial in plan["trials"]] == ["completed", "beyond the limit"]
    *_, last, json_line, plot_line = out.splitlines()
    assert (json_line, plot_line) == ("wrote plan.json", "wrote plan.png")
    assert last.startswith("batch 32,768 = accumulate_step 2 x microbatch 16,384: ")
    assert len([line for line in out.splitlines() if line.startswith("trial")]) == 2
    assert Path("plan.png").read_bytes().startswith(b"\x89PNG")
    used = int(run_python(TRAIN, "16384", "3"))
    assert plan["peak"] == pytest.approx(used, rel=0.1)
    assert not plan["trials"][1]["peak"] == pytest.approx(used, rel=0.1)


NOISY = """
import mindspore as ms, numpy as np
from mindspore import Parameter, Tensor, nn
from ms_accum import Accumulator

def make_step(microbatch, accumulate_step=None, noise_scale=None):
    point, rng = Parameter(Tensor(np.zeros(400), ms.float32), name="point"), np.random.default_rng(0)
    accumulator = Accumulator(nn.SGD([point], 1e-30), accumulate_step or 1, reduction="mean", noise_scale=noise_scale)
    gradients = lambda: rng.normal(0.3, 1, (microbatch, 400)).mean(0)
    return lambda: accumulator((Tensor(gradients(), ms.float32),), microbatch)

def two_names(microbatch, accumulate_step=None):
    return int
"""


def test_the_command_ends_with_the_window_that_is_worth_it(capsys, modelled, monkeypatch):
    """The noise scale is 1 / 0.3² = 11.1 samples. Control: with twice or half of that it would not be 2 x 4 samples."""
    Path("noisy.py").write_text(NOISY)
    plan = ("plan", "--total-batch-size", "16", "--memory-limit", str(100 * 2**20 + 4), "--json", "plan.json", "--noise-scale")
    assert cli.main([*plan, "25", "noisy:make_step"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    figures = json.loads(Path("plan.json").read_text())
    assert figures["noise_scale"] == pytest.approx(1 / 0.3**2, rel=0.2)
    assert (figures["worth"], figures["microbatch"]) == (2, 4)
    assert "\naccumulate_step 2 x microbatch 4 = 8 samples: the largest window, up to the planned one, within the noise scale" in out
    monkeypatch.setattr(worth, "in_a_process", lambda *call, **limits: Outcome("failed", "ZeroDivisionError"))
    assert cli.main([*plan, "2", "noisy:make_step"]) == 1
    out, err = capsys.readouterr()
    assert "measuring the noise scale failed: ZeroDivisionError" in err
    assert "batch 16 = accumulate_step 4 x microbatch 4" in out
    figures = json.loads(Path("plan.json").read_text())
    assert (figures["microbatch"], figures["noise_scale"], figures["worth"]) == (4, None, None)
    assert cli.main([*plan, "2", "noisy:two_names"]) == 2
    out, err = capsys.readouterr()
    assert err.startswith("ms-accum plan: error: the noise scale cannot be measured: got an unexpected keyword argument 'noise_scale'")
    assert out == "", "refused before a trial"


@pytest.fixture
def modelled(monkeypatch):
    """A model of memory in place of trials, in bytes: 100 MiB, and one for each sample."""
    def run(make_step, microbatch, accumulate_step, device_target, memory_limit, timeout):
        peak = 100 * 2**20 + microbatch
        return Trial(microbatch, accumulate_step, peak, peak <= memory_limit, "completed" if peak <= memory_limit else "out of memory", 0.1)
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
    """The batch of a plan is the total one: in `ms-accum mnist`, --batch-size is a microbatch."""
    assert cli.main(["plan", "json:loads", "--batch-size", "8"]) == 2
    assert "arguments are required: --total-batch-size" in capsys.readouterr().err
    assert cli.main(["plan", "--total-batch-size", "8", *arguments]) == 2
    err = capsys.readouterr().err.splitlines()
    assert len(err) == 1
    assert err[0].startswith(f"ms-accum plan: error: {message}")


def test_sizes():
    for text, size in (("4GiB", 2**32), ("500MB", 5 * 10**8), ("1.5g", 15 * 10**8), ("12", 12), ("2 kib", 2048)):
        assert plan_command.size_in_bytes(text) == size
