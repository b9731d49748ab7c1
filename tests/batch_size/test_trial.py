"""Trials: what is called; and dry runs for Ascend, whose bytes are those counted by hand."""
import json
import pickle
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
from ms_accum.batch_size.process import Outcome
from ms_accum.batch_size.trial import made_step, run_trial

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

WIDTH, LAYERS, BATCH, MICROBATCH = 256, 3, 8192, 2048
PARAMETERS = LAYERS * (WIDTH * WIDTH + WIDTH)
MOMENTS = 2 * 4 * PARAMETERS  # Adam's, which are there from the first update on
# Weights, buffers and moments; the data and what each layer keeps, the gradient of the mean, which is a constant that
# is there from the start, and two gradients in between.
COUNTED = 4 * PARAMETERS + 4 * PARAMETERS + MOMENTS + (1 + LAYERS + 1 + 2) * 4 * MICROBATCH * WIDTH


def guarded(microbatch):
    """With updates that values of 0 would leave out."""
    network = nn.SequentialCell(*[layer for _ in range(LAYERS) for layer in (nn.Dense(WIDTH, WIDTH), nn.ReLU())])

    def forward_fn(x):
        return network(x).mean()

    optimizer = nn.Adam(network.trainable_params(), 1e-3)
    data = Tensor(np.ones((microbatch, WIDTH)), ms.float32)
    train_step = make_train_step(forward_fn, optimizer, BATCH // microbatch, on_nonfinite="skip_window")
    return lambda: train_step(data), train_step


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


def test_a_step_that_chooses_a_device_is_an_error(monkeypatch):
    devices = iter(["GPU", "CPU", "CPU"])  # before the step is made, and after
    monkeypatch.setattr(ms, "get_context", lambda name: next(devices))
    with pytest.raises(ValueError, match=r"make_step, or its module, set the device CPU, expected GPU; leave"):
        made_step(pickle.dumps(no_accumulator), "GPU", 4)


@pytest.mark.parametrize(("outcome", "dry", "ended", "reason"), [
    (Outcome("completed", result=5), True, "completed", ""),
    (Outcome("completed", result=11), True, "beyond the limit", ""),
    (Outcome("out of memory"), False, "out of memory", ""),
    (Outcome("out of memory"), True, "failed", "this machine ran out of memory, not the planned NPU"),
    (Outcome("failed", "x"), True, "failed",
     "x (a dry run needs CANN, with its set_env.sh sourced, and reads all values as 0)")])
def test_a_dry_run_blames_this_machine(outcome, dry, ended, reason, monkeypatch):
    monkeypatch.setattr(trial, "in_a_process", lambda *_, **__: outcome)
    monkeypatch.setattr(trial, "is_dry_run", lambda device: dry)
    found = run_trial(no_accumulator, 4, 2, "Ascend", memory_limit=10)
    assert found == trial.Trial(4, 2, outcome.result, ended == "completed", ended, reason)


@pytest.mark.skipif(bool(missing()), reason=str(missing()))
@pytest.mark.slow
def test_a_plan_for_ascend_counts_the_bytes_without_a_device(tmp_path_factory, capsys, monkeypatch):
    """With the stand-ins, within 2 % of the sum by hand. Control: without moments, it is not that sum."""
    for name, value in variables(built_once(tmp_path_factory)).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(planning, "candidates", lambda batch_size: [MICROBATCH])
    assert cli.main(["plan", f"{__name__}:guarded", "--total-batch-size", str(BATCH), "--memory-limit", "20MB",
                     "--device", "ascend", "--json", "plan.json"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    plan = json.loads(Path("plan.json").read_text())
    assert (plan["microbatch"], plan["accumulate_step"], plan["device"], plan["dry_run"]) == (2048, 4, "Ascend", True)
    assert out.startswith("dry run: memory is planned by MindSpore's Ascend backend; nothing is launched\n")
    assert plan["peak"] == pytest.approx(COUNTED, rel=0.02)
    assert not plan["peak"] == pytest.approx(COUNTED - MOMENTS, rel=0.02)


@pytest.fixture
def dry_on_cpu(uncompiled, monkeypatch):
    """What a dry run does, with values."""
    monkeypatch.setattr(trial, "is_dry_run", lambda device: True)
    monkeypatch.setattr(ms.runtime, "dispatch_threads_num", lambda threads: None)
    monkeypatch.setattr(ms.runtime, "max_memory_allocated", lambda: 0)


@pytest.mark.usefixtures("dry_on_cpu")
@pytest.mark.parametrize(("kind", "accumulate_step", "updates"), [
    ("step", 1, 3), ("step", 2, 2), ("cell", 2, 2), ("hand", 2, 2)])
def test_a_dry_run_updates_after_the_first_step(kind, accumulate_step, updates, monkeypatch):
    """Not a train step that has updated, in a window of one microbatch: it has no use for buffers.

    Of windows of two, the first update is that of one microbatch, and the second that of the other two. Control: on a
    device, there is no update that the step does not make itself, and it may come alone.
    """
    for dry, pair in ((True, True), (False, True), (False, False)):
        monkeypatch.setattr(trial, "is_dry_run", lambda device, dry=dry: dry)
        trial.peak_of(pickle.dumps(partial(counted_step, kind, accumulate_step, pair)), "CPU", 4, 3)
        status = BUILT["status"]()
        closed = 3 if dry or accumulate_step == 1 else 2
        assert (status.update_step, status.mini_step) == (updates if closed == 3 else 1, 3 - closed)
        assert status.seen == closed * (1 if kind == "hand" else 4)


@pytest.mark.usefixtures("dry_on_cpu")
def test_a_dry_run_of_a_step_alone_is_an_error_with_the_remedy():
    """Before it runs. Control: what it built is nothing that updates."""
    for built, found in ((partial(counted_step, "step", 2, False), "NoneType"), (no_accumulator, "int")):
        said = (f"what make_step returns after the step is of type {found}, expected the train step, cell or "
                "Accumulator that it built; for a dry run, return step, train_step")
        with pytest.raises(TypeError, match=said):
            trial.peak_of(pickle.dumps(built), "CPU", 4, 3)
    assert BUILT["status"]().mini_step == 0
