"""Plans for Ascend by dry runs: their bytes against those counted by hand, what they say, and what they refuse."""
import json
import os
import signal
import sys
from functools import partial
from pathlib import Path

import mindspore as ms
import numpy as np
import pytest
from ascend.stand_ins import build, missing
from conftest import run_python
from mindspore import Tensor, nn, ops

from ms_accum import Accumulator, make_train_step
from ms_accum.batch_size import planning
from ms_accum.batch_size.dry_run import is_dry_run
from ms_accum.batch_size.trial import in_a_process, run_trial
from ms_accum.batch_size.worth import measure_windows
from ms_accum.cli import main as cli

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
with_stand_ins = pytest.mark.skipif(bool(missing()), reason=str(missing()))

WIDTH, LAYERS, BATCH = 256, 3, 8192
PARAMETERS = LAYERS * (WIDTH * WIDTH + WIDTH)
MOMENTS = 2 * 4 * PARAMETERS  # Adam's, which are there from the first update on


def counted(microbatch):
    """Bytes: weights, buffers and moments; the data, what each layer keeps, and two gradients of such in the backward pass."""
    return 4 * PARAMETERS + 4 * PARAMETERS + MOMENTS + (1 + LAYERS + 2) * 4 * microbatch * WIDTH


class Network(nn.Cell):
    def __init__(self):
        super().__init__()
        self.layers = nn.CellList([nn.Dense(WIDTH, WIDTH) for _ in range(LAYERS)])

    def construct(self, x):
        for layer in self.layers:
            x = ops.relu(layer(x))
        return x.mean()


def made(microbatch):
    network = Network()
    return network, nn.Adam(network.trainable_params(), 1e-3), Tensor(np.ones((microbatch, WIDTH)), ms.float32)


def make_step(microbatch, **options):
    network, optimizer, data = made(microbatch)
    train_step = make_train_step(network, optimizer, BATCH // microbatch, **options)
    return lambda: train_step(data)


def op_by_op(microbatch):
    ms.set_context(mode=ms.PYNATIVE_MODE)
    network, optimizer, data = made(microbatch)
    accumulator = Accumulator(optimizer, BATCH // microbatch, reduction="mean")
    grad_fn = ms.value_and_grad(network, None, optimizer.parameters)
    return lambda: accumulator(grad_fn(data)[1])


def on_cpu(microbatch):
    ms.set_device("CPU")
    return make_step(microbatch)


def plain(microbatch, accumulate_step=None, noise_scale=None):
    return int


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return build(tmp_path_factory.mktemp("stand_ins"))


@pytest.fixture
def cann(folder, monkeypatch):
    """The stand-ins, for processes that are started."""
    for name, path in {"LD_LIBRARY_PATH": folder / "lib64", "ASCEND_HOME_PATH": folder, "ASCEND_TOOLKIT_HOME": folder,
                       "ASCEND_OPP_PATH": folder / "opp", "PYTHONPATH": f"{folder / 'python'}:{os.environ.get('PYTHONPATH', '')}"}.items():
        monkeypatch.setenv(name, str(path))
    monkeypatch.setenv("MS_SIMULATION_LEVEL", "1")  # also where an NPU is


@with_stand_ins
def test_a_plan_for_ascend_counts_the_bytes_without_a_device(cann, capsys, monkeypatch):
    """Within 2 % of the sum by hand. Controls: a smaller limit gives a smaller microbatch; without moments, it is not that sum."""
    monkeypatch.setattr(planning, "divisors_of", lambda batch_size: [2048, 4096])
    seen = {}

    def once(make_step, microbatch, *arguments, **options):
        if microbatch not in seen:
            seen[microbatch] = run_trial(make_step, microbatch, *arguments, **options)
        return seen[microbatch]

    monkeypatch.setattr(planning, "run_trial", once)
    for limit, found in ((30_000_000, 4096), (20_000_000, 2048)):
        assert cli.main(["plan", f"{__name__}:make_step", "--total-batch-size", str(BATCH), "--memory-limit", str(limit),
                         "--device", "ascend", "--json", "plan.json"]) == 0
        out, err = capsys.readouterr()
        assert err == ""
        plan = json.loads(Path("plan.json").read_text())
        assert (plan["microbatch"], plan["accumulate_step"], plan["device"], plan["dry_run"]) == (found, BATCH // found, "Ascend", True)
        assert [trial["seconds"] for trial in plan["trials"]] == [None, None]
        assert out.count("         -  ") == 2
        assert planning._DRY_RUN in out.splitlines()
        for trial in plan["trials"]:
            assert trial["peak"] == pytest.approx(counted(trial["microbatch"]), rel=0.02)
            assert not trial["peak"] == pytest.approx(counted(trial["microbatch"]) - MOMENTS, rel=0.02)


@with_stand_ins
@pytest.mark.parametrize("function", [
    partial(make_step, on_nonfinite="skip_window"), pytest.param(op_by_op, marks=pytest.mark.slow)], ids=["guarded", "op_by_op"])
def test_updates_are_planned_that_values_of_0_would_leave_out(cann, function):
    outcome = run_trial(function, 2048, 3, "Ascend")
    assert (outcome.ended, outcome.reason, outcome.seconds) == ("completed", "", None)
    assert outcome.peak == pytest.approx(counted(2048), rel=0.02)


@with_stand_ins
def test_a_step_for_another_device_is_refused(cann):
    outcome = run_trial(on_cpu, 2048, 2, "Ascend")
    assert outcome.reason == "ValueError: make_step, or its module, chose the device CPU, expected Ascend; leave that to the plan"


def test_missing_cann_is_one_line(capsys, monkeypatch):
    for name in ("LD_LIBRARY_PATH", "ASCEND_HOME_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MS_SIMULATION_LEVEL", "1")
    assert cli.main(["plan", f"{__name__}:plain", "--total-batch-size", "8", "--device", "ASCEND"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("ms-accum plan: error: no CANN for a dry run: ASCEND_HOME_PATH is not set, and ")
    assert err.endswith("; install CANN's toolkit (no device is needed) and source its set_env.sh\n")
    assert len(err.splitlines()) == 1


def test_a_dry_run_has_no_noise_scale(capsys, monkeypatch):
    monkeypatch.setenv("MS_SIMULATION_LEVEL", "1")
    with pytest.raises(ValueError, match="a dry run for Ascend computes no gradients and measures no times, so it has no noise scale"):
        measure_windows(plain, planning.Plan(8, 4, 2, 1, 2**40, ()), device_target="Ascend")
    assert cli.main(["plan", f"{__name__}:plain", "--total-batch-size", "8", "--device", "ascend", "--noise-scale"]) == 2
    assert "a dry run for Ascend computes no gradients" in capsys.readouterr().err


def test_a_dry_run_is_for_ascend_without_an_npu_or_if_it_is_asked_for(monkeypatch):
    monkeypatch.delenv("MS_SIMULATION_LEVEL", raising=False)
    for devices, asked, dry in (([], None, True), (["davinci0"], None, False), (["davinci0"], "1", True)):
        monkeypatch.setattr(Path, "glob", lambda self, pattern, devices=devices: iter(devices))
        if asked:
            monkeypatch.setenv("MS_SIMULATION_LEVEL", asked)
        assert is_dry_run("Ascend") is dry
        assert not is_dry_run("CPU")
        assert not is_dry_run("GPU")
    assert planning.free_memory("Ascend") == int(0.9 * 64 * 2**30)


def test_processes_of_a_dry_run_are_told_so_and_blame_this_machine(monkeypatch):
    monkeypatch.setenv("MS_SIMULATION_LEVEL", "0")
    before = dict(os.environ)
    assert in_a_process(partial(os.getenv, "MS_SIMULATION_LEVEL"), "Ascend").result == "1"
    assert in_a_process(partial(os.getenv, "MS_SIMULATION_LEVEL"), "CPU").result == "0"
    assert dict(os.environ) == before
    for device, ended in (("Ascend", "failed"), ("CPU", "out of memory")):
        outcome = in_a_process(partial(signal.raise_signal, signal.SIGKILL), device)
        assert outcome.ended == ended
        assert (outcome.seconds is None) == (outcome.peak is None) == (device == "Ascend")
        assert ("this machine ran out of memory" in outcome.reason) == (device == "Ascend")


UPDATING = """
import mindspore as ms, numpy as np
from mindspore import Parameter, Tensor, nn
from ms_accum import Accumulator, make_train_step
from ms_accum.batch_size.dry_run import update_all

def made(name):
    network = nn.Dense(2, 1)
    network.update_parameters_name(name)
    return network, nn.SGD(network.trainable_params(), 1e-3)

def trained(length):
    network, optimizer = made(f"n{length}.")
    def forward_fn(x):
        return network(x).mean()
    return make_train_step(forward_fn, optimizer, length)

data = Tensor(np.ones((4, 2)), ms.float32)
one, two = trained(1), trained(2)
one(data), two(data)
by_hand = Accumulator(made("hand.")[1], 2)
update_all()
print([int(accumulator.update_step) for accumulator in (one.accumulator, two.accumulator, by_hand)])
"""


def test_every_accumulator_updates_once():
    """The one whose train step has updated, in a window of one microbatch, is left alone: it has no use for buffers."""
    assert run_python(UPDATING).split("\n")[-2] == "[1, 1, 1]"
