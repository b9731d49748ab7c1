"""plan_micro_batch: the search against a model of memory, real processes that end in every way, the prediction against a real run."""
import json
import os
import signal
import subprocess
import sys
import time
from functools import partial
from math import ceil, log2
from pathlib import Path

import numpy as np
import pytest
from conftest import run_python
from hypothesis import given
from hypothesis import strategies as st

from ms_accum import plan_micro_batch
from ms_accum.batch_size import planning
from ms_accum.batch_size.planning import Plan, PlanError, Trial
from ms_accum.batch_size.trial import Outcome, run_trial
from ms_accum.cli import main as cli
from ms_accum.cli import plan as plan_command

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

MIB = 2**20


# --- the search, against a model of memory ------------------------------------------------------------------------------


def modelled(base, slope, limit, asked):
    """A `run_trial` whose peak is base + slope * microbatch."""
    def run(make_step, microbatch, steps, device_target, memory_limit, timeout):
        asked.append((microbatch, steps))
        peak = base + slope * microbatch
        return Outcome(peak, "completed" if peak <= limit else "out of memory", "", 0.1)
    return run


def nothing(microbatch):
    return int


@given(batch_size=st.integers(1, 5000), base=st.integers(1, 100), slope=st.integers(1, 5), limit=st.integers(1, 3000))
def test_the_largest_that_fits_is_found_in_few_trials(batch_size, base, slope, limit):
    asked = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planning, "run_trial", modelled(base, slope, limit, asked))
        if base + slope > limit:
            with pytest.raises(PlanError, match=r"not even a microbatch of 1 fits into \d+ MiB; allow more memory") as refused:
                plan_micro_batch(nothing, batch_size, memory_limit=limit)
            assert [trial.microbatch for trial in refused.value.trials] == [microbatch for microbatch, _ in asked]
            return
        plan = plan_micro_batch(nothing, batch_size, memory_limit=limit)
    divisors = [d for d in range(1, batch_size + 1) if batch_size % d == 0]
    best = max(d for d in divisors if base + slope * d <= limit)
    larger = next((d for d in divisors if d > best), best)
    assert plan.microbatch >= best
    if larger <= 2 * best:
        assert plan.microbatch == best
        assert len(asked) <= ceil(log2(len(divisors) + 1))
    else:  # not one microbatch fewer could make up the batch
        fewer = ceil(batch_size / max(plan.accumulate_step - 1, 1))
        assert plan.accumulate_step == ceil(batch_size / best) or base + slope * plan.microbatch <= limit
        assert plan.accumulate_step == 1 or base + slope * fewer > limit
        assert len(asked) <= 2 * ceil(log2(batch_size + 1)) + 2
    assert plan.accumulate_step == ceil(batch_size / plan.microbatch)
    assert plan.peak == base + slope * plan.microbatch <= limit
    assert all(steps == ceil(batch_size / microbatch) + 1 for microbatch, steps in asked)  # past an update
    assert len({microbatch for microbatch, _ in asked}) == len(asked) == len(plan.trials)


def test_a_prime_batch_is_cut_into_microbatches_that_do_not_divide_it(monkeypatch):
    monkeypatch.setattr(planning, "run_trial", modelled(0, 1, 50, []))
    plan = plan_micro_batch(nothing, 127, memory_limit=50)
    assert (plan.microbatch, plan.accumulate_step) == (43, 3)
    assert "batch 127 = accumulate_step 3 x microbatch 43 (the last one shorter)" in str(plan)


def test_the_plan_reads_well():
    trials = (Trial(4, 2, 300 * MIB, True, "completed", 1.25), Trial(8, 1, 501 * MIB, False, "beyond the limit", 2.0),
              Trial(2, 4, None, False, "out of memory", 0.5))
    assert str(Plan(8, 4, 2, 300 * MIB, 500 * MIB, trials)).splitlines() == [
        "microbatch  accumulate_step        peak   seconds",
        "         2                4           ?       0.5  out of memory",
        "         4                2     300 MiB       1.2  fits",
        "         8                1   > 501 MiB       2.0  beyond the limit",
        "batch 8 = accumulate_step 2 x microbatch 4: 300 MiB of 500 MiB"]
    assert planning.size(3 * 2**29) == "1.50 GiB"


def test_free_memory_minds_cgroups(tmp_path):
    """Of a group and those above it the tightest, in both versions; files that can be dropped count as free."""
    def write(name, **files):
        folder = tmp_path / name
        folder.mkdir(parents=True, exist_ok=True)
        for file, text in files.items():
            (folder / file.replace("_", ".", 1)).write_text(str(text))

    write("a/b", memory_max="max", memory_current=5)
    write("a", memory_max=1000, memory_current=300, memory_stat="anon 100\ninactive_file 200")
    write("memory/c", memory_limit_in_bytes=2**63 - 4096, memory_usage_in_bytes=5)
    write("memory", memory_limit_in_bytes=700, memory_usage_in_bytes=100)
    membership = tmp_path / "cgroup"
    membership.write_text("4:memory:/c\n3:cpuset:/\n0::/a/b\n")
    assert sorted(planning._cgroups_leave(membership, tmp_path))[:2] == [600, 900]
    assert planning._cgroups_leave(tmp_path / "none", tmp_path) == [planning._UNLIMITED]
    available = next(int(line.split()[1]) for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemAvailable"))
    assert 0 < planning.free_memory("CPU") <= 0.95 * 1024 * available


# --- processes that end in every way --------------------------------------------------------------------------------------


def holding(mebibytes, microbatch):
    """Each step writes to so much memory, and lets go of it."""
    return lambda: np.ones(mebibytes * MIB // 8).sum()


def growing(microbatch):
    kept = []
    return lambda: [kept.append(np.ones(50 * MIB // 8)) for _ in range(200)]


def raising(microbatch):
    raise KeyError(f"no data for {microbatch}\nsecond line")


def exhausted(microbatch):
    def step():
        raise RuntimeError("Malloc memory failed: size 123")
    return step


def hanging(microbatch):
    return partial(time.sleep, 1000)


def killed(microbatch):
    return partial(os.kill, os.getpid(), signal.SIGKILL)


def crashing(microbatch):
    def step():
        print("the last words", flush=True)
        os._exit(3)
    return step


def no_step(microbatch):
    return 7


@pytest.mark.parametrize(("make_step", "options", "ended", "reason"), [
    (killed, {}, "out of memory", ""),
    (exhausted, {}, "out of memory", "RuntimeError: Malloc memory failed: size 123"),
    (raising, {}, "failed", "KeyError: 'no data for 4\\nsecond line'"),
    (no_step, {}, "failed", "TypeError: make_step(4) returned int, expected a function that runs one train step"),
    (crashing, {}, "failed", "its process ended with status 3: the last words"),
    (hanging, {"timeout": 2.5}, "failed", "it was not done within 2.5 s"),
    (growing, {"memory_limit": 700 * MIB}, "beyond the limit", ""),
])
def test_a_trial_survives_whatever_happens_in_it(make_step, options, ended, reason):
    """The last one would write to 10 GB: it is stopped on its way."""
    before = set(os.listdir("/proc"))
    outcome = run_trial(make_step, 4, 2, "CPU", **options)
    assert (outcome.ended, outcome.reason) == (ended, reason)
    if ended == "beyond the limit":
        assert 700 * MIB < outcome.peak < 2000 * MIB
    left = [pid for pid in set(os.listdir("/proc")) - before if pid.isdigit() and _parent(pid) == os.getpid() and not _tracker(pid)]
    assert left == []


def _parent(pid):
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])
    except OSError:
        return None


def _tracker(pid):
    return b"resource_tracker" in Path(f"/proc/{pid}/cmdline").read_bytes()  # Python's own, one for the session


def test_a_peak_is_measured_past_all_steps():
    small, large = (run_trial(partial(holding, mebibytes), 1, 2, "CPU") for mebibytes in (10, 300))
    assert small.ended == large.ended == "completed"
    assert large.peak - small.peak == pytest.approx(290 * MIB, rel=0.1)


def test_a_failing_trial_ends_the_planning_with_its_error(monkeypatch):
    monkeypatch.setattr(planning, "run_trial", lambda *_, **__: Outcome(None, "failed", "KeyError: 'x'", 0.1))
    with pytest.raises(PlanError, match=r"the trial of a microbatch of 4 failed: KeyError: 'x'"):
        plan_micro_batch(nothing, 16, memory_limit=10)


SCRIPT = """
from functools import partial
import numpy as np
from ms_accum import plan_micro_batch

def make_step(microbatch):
    return lambda: np.ones(microbatch * 2**17).sum()
{guard}
plan = plan_micro_batch(make_step, 2, memory_limit=2**40)
print(plan.microbatch, len(plan.trials))
"""


def test_functions_of_a_script_work_if_it_has_a_guard():
    guarded = SCRIPT.format(guard='if __name__ == "__main__":').replace("\nplan =", "\n    plan =").replace("\nprint", "\n    print")
    assert run_python(guarded).split() == ["2", "2"]
    Path("unguarded.py").write_text(SCRIPT.format(guard=""))
    done = subprocess.run([sys.executable, "unguarded.py"], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert 'a script needs `if __name__ == "__main__":` around what is not to run in each trial' in done.stderr.splitlines()[-1]


def test_functions_that_cannot_be_imported_are_refused():
    def closure(microbatch):
        return None

    for function in (closure, lambda microbatch: None):
        with pytest.raises(ValueError, match=r"make_step is .*<locals>.* cannot import .*; define it with `def` at the top level"):
            plan_micro_batch(function, 4)
    typed = subprocess.run([sys.executable, "-"], capture_output=True, text=True, check=False, input=(
        "from ms_accum import plan_micro_batch\ndef make_step(n):\n    return int\nplan_micro_batch(make_step, 4)\n"))
    assert "ValueError: make_step is make_step, defined in an interactive session, which the processes of the trials" in typed.stderr


@pytest.mark.parametrize(("error", "message", "arguments", "options"), [
    (TypeError, r"make_step is of type int, expected a function `\(microbatch\) -> step`", (3, 4), {}),
    (TypeError, r"batch_size is 4\.0 of type float, expected an int >= 1: the samples of an update", (nothing, 4.0), {}),
    (ValueError, r"batch_size is 0, expected an int >= 1", (nothing, 0), {}),
    (TypeError, r"memory_limit is '4GiB' of type str, expected an int >= 1: bytes, e\.g\. 4 \* 2\*\*30",
     (nothing, 4), {"memory_limit": "4GiB"}),
    (ValueError, r"memory_limit is -1, expected", (nothing, 4), {"memory_limit": -1}),
    (ValueError, r"device_target is 'TPU', expected one of 'CPU', 'GPU', 'Ascend', or None", (nothing, 4), {"device_target": "TPU"}),
    (TypeError, r"timeout is '5', expected a number of seconds", (nothing, 4), {"timeout": "5"}),
    (ValueError, r"timeout is 0, expected a number of seconds > 0", (nothing, 4), {"timeout": 0}),
])
def test_bad_arguments_are_refused(error, message, arguments, options):
    with pytest.raises(error, match=message):
        plan_micro_batch(*arguments, **options)


def test_a_device_that_is_not_there_is_refused():
    with pytest.raises(ValueError, match=r"the memory of GPU cannot be told \(.+\); give a memory limit, or another device"):
        plan_micro_batch(nothing, 4, device_target="GPU")


# --- ms-accum plan, and the prediction ------------------------------------------------------------------------------------

TRAIN = """
import sys
import mindspore as ms, numpy as np
from mindspore import Tensor, nn
from ms_accum import Accumulator, make_train_step

def make_step(microbatch):
    network = nn.SequentialCell(nn.Dense(784, 512), nn.ReLU(), nn.Dense(512, 512), nn.ReLU(), nn.Dense(512, 10))
    loss_fn = nn.CrossEntropyLoss()
    def forward_fn(data, label):
        return loss_fn(network(data), label)
    acc = Accumulator(nn.Adam(network.trainable_params(), 1e-3), 32768 // microbatch, reduction="mean")
    train_step = make_train_step(forward_fn, acc)
    rng = np.random.default_rng(0)
    data, label = Tensor(rng.random((microbatch, 784), np.float32)), Tensor(rng.integers(0, 10, microbatch), ms.int32)
    return lambda: train_step(data, label)

if __name__ == "__main__":
    step = make_step(int(sys.argv[1]))
    for _ in range(int(sys.argv[2])):
        float(step())
    print(next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM")) * 1024)
"""


def test_the_command_predicts_what_the_run_then_uses(capsys, monkeypatch):
    """Within 10 %, after 4 updates in a fresh process; control: that of the next microbatch would be off by more."""
    Path("planned_train.py").write_text(TRAIN)
    monkeypatch.setattr(planning, "divisors_of", lambda batch_size: [4096, 16384, 32768])  # two trials are enough here
    status = cli.main(["plan", "planned_train:make_step", "--batch-size", "32768", "--memory-limit", "800MiB",
                       "--json", "plan.json", "--plot", "plan.png"])
    out, err = capsys.readouterr()
    assert (status, err) == (0, "")
    plan = json.loads(Path("plan.json").read_text())
    assert (plan["microbatch"], plan["accumulate_step"]) == (16384, 2), out
    assert [trial["ended"] for trial in plan["trials"]] == ["completed", "beyond the limit"]
    assert out.splitlines()[-1].startswith("batch 32,768 = accumulate_step 2 x microbatch 16,384: ")
    assert len([line for line in out.splitlines() if line.startswith("trial")]) == 2
    assert Path("plan.png").read_bytes().startswith(b"\x89PNG")
    used = int(run_python(TRAIN, "16384", "8"))
    assert plan["peak"] == pytest.approx(used, rel=0.1)
    assert not plan["trials"][1]["peak"] == pytest.approx(used, rel=0.1)


def test_the_command_says_when_nothing_fits(capsys, monkeypatch):
    monkeypatch.setattr(planning, "run_trial", modelled(100 * MIB, MIB, 50 * MIB, []))
    status = cli.main(["plan", "test_planning:nothing", "--batch-size", "8", "--memory-limit", "50MiB",
                       "--json", "p.json", "--plot", "p.png"])
    err = capsys.readouterr().err.splitlines()
    assert status == 1
    assert err[0] == ("ms-accum plan: error: not even a microbatch of 1 fits into 50 MiB; "
                      "allow more memory, or make the network smaller")
    assert err[2].endswith("out of memory")
    figures = json.loads(Path("p.json").read_text())
    assert figures["microbatch"] is None
    assert [trial["microbatch"] for trial in figures["trials"]] == [2, 1]
    assert Path("p.png").read_bytes().startswith(b"\x89PNG")


def test_a_terminal_sees_a_bar(capsys, monkeypatch):
    monkeypatch.setattr(planning, "run_trial", modelled(0, 1, 50, []))
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    assert cli.main(["plan", "test_planning:nothing", "--batch-size", "127", "--memory-limit", "50"]) == 0
    out = capsys.readouterr().out
    assert "trials:" in out
    assert "microbatch 43 fits" in out
    assert "\ntrial " not in out


@pytest.mark.parametrize(("arguments", "message"), [
    (["train"], "argument MODULE:FUNCTION: got 'train', expected e.g. train:make_step"),
    (["train.py:make_step"], "argument MODULE:FUNCTION: got 'train.py:make_step', expected e.g. train:make_step"),
    (["no_such:f"], "argument MODULE:FUNCTION: no_such:f cannot be imported (ModuleNotFoundError: No module named 'no_such')"),
    (["json:nothing"], "argument MODULE:FUNCTION: json:nothing cannot be imported (AttributeError: "),
    (["json:__name__"], "make_step is of type str, expected a function"),
    (["json:loads", "--memory-limit", "4XB"],
     "argument --memory-limit: expected a size such as 4GiB, 500MB or a number of bytes, got '4XB'"),
    (["json:loads", "--memory-limit", "0"], "argument --memory-limit: expected a size"),
    (["json:loads", "--timeout", "-1"], "argument --timeout: expected a number of seconds > 0, got '-1'"),
    (["json:loads", "--batch-size", "0"], "argument --batch-size: expected a whole number from 1"),
    (["json:loads", "--plot", "x.jpg"], "argument --plot: x.jpg does not end in .png"),
    (["json:loads", "--json", "x.png", "--plot", "x.png"], "arguments --json and --plot name the same file"),
])
def test_a_bad_command_line_is_refused_in_one_line(arguments, message, capsys):
    assert cli.main(["plan", "--batch-size", "8", *arguments]) == 2
    err = capsys.readouterr().err.splitlines()
    assert len(err) == 1
    assert err[0].startswith(f"ms-accum plan: error: {message}")


@pytest.mark.parametrize(("text", "size"), [("4GiB", 2**32), ("500MB", 5 * 10**8), ("1.5g", 15 * 10**8), ("12", 12), ("2 kib", 2048)])
def test_sizes(text, size):
    assert plan_command._bytes(text) == size
