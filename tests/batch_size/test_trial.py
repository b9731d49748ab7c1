"""Trials: peaks on CPU; and dry runs for Ascend, whose bytes are those counted by hand."""
import json
import os
import sys
from functools import partial
from pathlib import Path

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn
from support.ascend.stand_ins import built_once, missing, variables
from support.noisy_samples import FEATURES, Position

from ms_accum import Accumulator, TrainOneStepCell, make_train_step
from ms_accum import __main__ as cli
from ms_accum.batch_size import planning, trial
from ms_accum.batch_size.process import Outcome, is_dry_run, pickled
from ms_accum.batch_size.trial import idle_memory, made_step, run_trial

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
with_stand_ins = pytest.mark.skipif(bool(missing()), reason=str(missing()))

MIB = 2**20
WIDTH, LAYERS, BATCH = 256, 3, 8192
PARAMETERS = LAYERS * (WIDTH * WIDTH + WIDTH)
MOMENTS = 2 * 4 * PARAMETERS  # Adam's, which are there from the first update on


def counted(microbatch, between=2):
    """Bytes of weights, buffers and moments, of the data and what each layer keeps, of the gradient of the mean, which
    is a constant that is there from the start, and of so many gradients in between.
    """
    return 4 * PARAMETERS + 4 * PARAMETERS + MOMENTS + (1 + LAYERS + 1 + between) * 4 * microbatch * WIDTH


def made(microbatch):
    network = nn.SequentialCell(*[layer for _ in range(LAYERS) for layer in (nn.Dense(WIDTH, WIDTH), nn.ReLU())])

    def forward_fn(x):
        return network(x).mean()
    return forward_fn, nn.Adam(network.trainable_params(), 1e-3), Tensor(np.ones((microbatch, WIDTH)), ms.float32)


def make_step(microbatch, **options):
    forward_fn, optimizer, data = made(microbatch)
    train_step = make_train_step(forward_fn, optimizer, BATCH // microbatch, **options)
    return lambda: train_step(data), train_step


def guarded(microbatch):
    """With updates that values of 0 would leave out."""
    return make_step(microbatch, on_nonfinite="skip_window")


def op_by_op(microbatch):
    ms.set_context(mode=ms.PYNATIVE_MODE)
    forward_fn, optimizer, data = made(microbatch)
    accumulator = Accumulator(optimizer, BATCH // microbatch, reduction="mean")
    grad_fn = ms.value_and_grad(forward_fn, None, optimizer.parameters)
    return lambda: accumulator(grad_fn(data)[1]), accumulator


def holding(mebibytes, file, microbatch):
    """Holds more at its last step, the one after an update; the file says how much the process held just before."""
    kept = []

    def step():
        if len(kept) == 2:
            Path(file).write_text(Path("/proc/self/status").read_text())
        kept.append(np.ones((mebibytes if len(kept) == 2 else 1) * MIB // 8))
    return step


def no_step(microbatch):
    return 7


def alone(microbatch):
    """A step without what it built."""
    return make_step(microbatch)[0]


def no_accumulator(microbatch):
    return int, 3


BUILT = {}  # by `counted_step`


def counted_step(kind, accumulate_step, pair, microbatch):
    """A step of a train step, cell or accumulator, of which BUILT keeps the method `status`."""
    network, x = Position(), Tensor(np.ones((microbatch, FEATURES)), ms.float32)
    optimizer = nn.SGD([network.point], 1e-3)
    if kind == "hand":
        built, grad_fn = Accumulator(optimizer, accumulate_step, reduction="mean"), ms.value_and_grad(
            network, None, optimizer.parameters)
    else:
        built = {"step": make_train_step, "cell": TrainOneStepCell}[kind](network, optimizer, accumulate_step)
    BUILT["status"] = built.status

    def step():
        return built(grad_fn(x)[1]) if kind == "hand" else built(x)
    return (step, built) if pair else step


@pytest.mark.slow
def test_a_peak_is_measured_past_an_update():
    """Past what is held then, not past the highest before: imports may have held more for a moment."""
    found = run_trial(partial(holding, 600, str(Path("status").absolute())), 1, 2, "CPU")
    (line,) = (line for line in Path("status").read_text().splitlines() if line.startswith("VmRSS"))
    before = int(line.split()[1]) * 1024
    assert found.ended == "completed"
    assert found.peak - before == pytest.approx(600 * MIB, rel=0.1)


@pytest.mark.slow
def test_what_a_process_takes_without_a_step_is_less_than_with_one():
    """And most of a small one's. Control: a module that ends the process; then it is not known."""
    idle, peak = idle_memory(partial(holding, 300, os.devnull)), run_trial(op_by_op, 1, 1, "CPU").peak
    assert 50 * MIB < peak / 2 < idle < peak
    assert idle_memory(Unreadable()) == 0


class Unreadable:
    """Ends the process that unpickles it."""

    def __reduce__(self):
        return os._exit, (3,)


def test_what_is_no_step_or_chooses_a_device_is_refused(monkeypatch):
    with pytest.raises(TypeError, match=r"make_step\(4\) returned int, expected a function that runs one train step"):
        made_step(pickled(no_step), "CPU", 4)
    devices = iter(["GPU", "CPU", "CPU"])  # before the step is made, and after
    monkeypatch.setattr(ms, "get_context", lambda name: next(devices))
    with pytest.raises(ValueError, match=r"make_step, or its module, set the device CPU, expected GPU; leave"):
        made_step(pickled(no_step), "GPU", 4)


@pytest.mark.parametrize(("outcome", "on_a_device", "in_a_dry_run"), [
    (Outcome("completed", result=5), "completed", "completed"),
    (Outcome("completed", result=11), "beyond the limit", "beyond the limit"),
    (Outcome("out of memory"), "out of memory",
     "failed: this machine ran out of memory, not the planned NPU"),
    (Outcome("failed", "why"), "failed: why", "failed: why (if the step reads values: in a dry run, all are 0)")])
def test_a_dry_run_has_no_times_and_blames_this_machine(outcome, on_a_device, in_a_dry_run, monkeypatch):
    monkeypatch.setattr(trial, "in_a_process", lambda *_, **__: outcome)
    for dry, expected in ((False, on_a_device), (True, in_a_dry_run)):
        monkeypatch.setattr(trial, "is_dry_run", lambda device, dry=dry: dry)
        found = run_trial(no_step, 4, 2, "Ascend", memory_limit=10)
        assert ": ".join(filter(None, (found.ended, found.reason))) == expected
        assert (found.fits, found.peak, found.seconds is None) == (expected == "completed", outcome.result, dry)


def test_a_dry_run_is_for_ascend_without_an_npu_or_if_it_is_asked_for(monkeypatch):
    monkeypatch.delenv("MS_SIMULATION_LEVEL", raising=False)
    for devices, asked, dry in (([], None, True), (["davinci0"], None, False), (["davinci0"], "1", True)):
        monkeypatch.setattr(Path, "glob", lambda self, pattern, devices=devices: iter(devices))
        if asked:
            monkeypatch.setenv("MS_SIMULATION_LEVEL", asked)
        assert [is_dry_run(device) for device in ("Ascend", "CPU", "GPU")] == [dry, False, False]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return built_once(tmp_path_factory)


@pytest.fixture
def cann(folder, monkeypatch):
    """The stand-ins, for processes that are started."""
    for name, value in variables(folder).items():
        monkeypatch.setenv(name, value)


@with_stand_ins
@pytest.mark.slow
def test_a_plan_for_ascend_counts_the_bytes_without_a_device(cann, capsys, monkeypatch):
    """Within 2 % of the sum by hand. Control: without moments, it is not that sum."""
    monkeypatch.setattr(planning, "candidates", lambda batch_size: [2048])
    assert cli.main(["plan", f"{__name__}:guarded", "--total-batch-size", str(BATCH), "--memory-limit", "20MB",
                     "--device", "ascend", "--json", "plan.json"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    plan = json.loads(Path("plan.json").read_text())
    assert (plan["microbatch"], plan["accumulate_step"], plan["device"], plan["dry_run"]) == (2048, 4, "Ascend", True)
    assert out.count("         -  ") == 1
    assert planning.DRY_RUN in out.splitlines()
    (tried,) = plan["trials"]
    assert tried["seconds"] is None
    assert tried["peak"] == pytest.approx(counted(2048), rel=0.02)
    assert not tried["peak"] == pytest.approx(counted(2048) - MOMENTS, rel=0.02)


@with_stand_ins
@pytest.mark.slow
@pytest.mark.parametrize(("made_by", "microbatch", "between"), [(op_by_op, 2048, 1), (make_step, 4096, 2)])
def test_updates_are_planned_that_values_of_0_would_leave_out(cann, made_by, microbatch, between):
    found = run_trial(made_by, microbatch, BATCH // microbatch, "Ascend")
    assert (found.ended, found.reason) == ("completed", "")
    assert found.peak == pytest.approx(counted(microbatch, between), rel=0.02)
    assert not found.peak == pytest.approx(counted(microbatch, between) - MOMENTS, rel=0.02)


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize("pair", [False, True])
def test_on_cpu_a_step_may_come_with_what_it_built(pair):
    """And is called as often as it is told, without an update that it does not make itself."""
    for kind in ("step", "hand"):
        assert trial.peak_of(pickled(partial(counted_step, kind, 2, pair)), "CPU", 4, 3) is None
        status = BUILT["status"]()
        assert (status.mini_step, status.update_step) == (1, 1)


@pytest.fixture
def dry_on_cpu(uncompiled, monkeypatch):
    """What a dry run does, with values."""
    monkeypatch.setattr(trial, "is_dry_run", lambda device: True)
    monkeypatch.setattr(ms.runtime, "dispatch_threads_num", lambda threads: None)
    monkeypatch.setattr(ms.runtime, "max_memory_allocated", lambda: 0)


@pytest.mark.usefixtures("dry_on_cpu")
@pytest.mark.parametrize(("kind", "accumulate_step", "updates"), [
    ("step", 1, 3), ("step", 2, 2), ("cell", 2, 2), ("hand", 2, 2)])
def test_a_dry_run_updates_after_the_first_step(kind, accumulate_step, updates):
    """Not a train step that has updated, in a window of one microbatch: it has no use for buffers.

    Of windows of two, the first update is that of one microbatch, and the second that of the other two.
    """
    trial.peak_of(pickled(partial(counted_step, kind, accumulate_step, True)), "CPU", 4, 3)
    status = BUILT["status"]()
    assert (status.update_step, status.mini_step, status.seen) == (updates, 0, 3 if kind == "hand" else 12)


@pytest.mark.usefixtures("dry_on_cpu")
def test_a_dry_run_of_a_step_alone_is_refused_with_the_remedy():
    """Before it runs. Control: what it built is nothing that updates."""
    for built, found in ((partial(counted_step, "step", 2, False), "NoneType"), (no_accumulator, "int")):
        said = (f"what make_step returns after the step is of type {found}, expected the train step, cell or "
                "Accumulator that it built; for a dry run, return step, train_step")
        with pytest.raises(TypeError, match=said):
            trial.peak_of(pickled(built), "CPU", 4, 3)
    assert BUILT["status"]().mini_step == 0


@with_stand_ins
@pytest.mark.slow
def test_a_plan_for_ascend_says_what_make_step_has_to_return(cann):
    found = run_trial(alone, 4096, 2, "Ascend")
    assert found.ended == "failed"
    assert "for a dry run, return step, train_step" in found.reason
