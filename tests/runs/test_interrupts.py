"""Interrupts between any two host statements, or while one is recovered from: no update is lost or made twice.

A KeyboardInterrupt (from a signal handler, say) is raised by a trace function before a line of ms_accum that is drawn.
The gradient of every microbatch is 1 and the learning rate 1, so the weight says how many updates were made, and the
counters how many were counted.
"""
import random
import sys
from pathlib import Path

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn, ops

import ms_accum
from ms_accum import Accumulator, TrainOneStepCell, make_train_step
from ms_accum.core.boundary import require_whole

N, RUNS, CALLS = 3, 500, 9
NEVER = 10**9
FOLDER = str(Path(ms_accum.__file__).parent)
BATCH = Tensor(np.ones((4, 1)), ms.float32)
KINDS = ("step", "alone", "pieces", "judged", "cell-graph", "cell-pynative")


class Linear(nn.Cell):
    def __init__(self):
        super().__init__()
        self.weight = Parameter(Tensor([0.0]), name="weight")

    def construct(self, x):
        return (x * self.weight).mean()


def interrupted(function, after=NEVER):
    """Call a function, and raise KeyboardInterrupt before the line of ms_accum numbered `after`.

    Return the lines run, and whether it was raised.
    """
    lines = [0]

    def local(frame, event, argument):
        if event == "line":
            lines[0] += 1
            if lines[0] == after:
                raise KeyboardInterrupt
        return local

    def trace(frame, event, argument):
        return local if frame.f_code.co_filename.startswith(FOLDER) and lines[0] < after else None

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        function()
    except KeyboardInterrupt:
        return lines[0], True
    finally:
        sys.settrace(before)
    return lines[0], False


class Run:
    """A driver whose updates can be counted, who is interrupted, and what must be true of it whatever interrupts it."""

    def __init__(self, kind):
        self.network = Linear()
        optimizer = nn.SGD(self.network.trainable_params(), learning_rate=1.0)
        guard = "skip_window" if kind == "judged" else "apply"
        self.length = 1 if kind == "alone" else N
        self.accumulator = Accumulator(optimizer, self.length, reduction="mean", on_nonfinite=guard)
        self.mode = ms.GRAPH_MODE if kind == "cell-graph" else ms.PYNATIVE_MODE
        if kind.startswith("cell"):
            self.step = TrainOneStepCell(self.network, self.accumulator)
        else:
            self.step = make_train_step(self.network, self.accumulator, pieces=2 if kind == "pieces" else 1)
        lines = [interrupted(self.call)[0] for _ in range(4 * N)]
        self.lines = max(lines[2 * N:])  # everything is compiled by then

    def call(self):
        ms.set_context(mode=self.mode)
        try:
            self.step(BATCH)
        finally:
            ms.set_context(mode=ms.PYNATIVE_MODE)

    def start_over(self):
        self.accumulator.reset()
        for parameter in (self.network.weight, self.accumulator.update_step, self.accumulator.closed_windows):
            ops.assign(parameter, ops.zeros_like(parameter))
        self.accumulator.boundary.forget()  # as a load does
        self.refused = self.caught = 0
        self.started = self.ended = 0  # microbatches since the last reset: that were begun, and whose call returned
        self.made = 0  # updates before the last reset

    @property
    def updates(self):
        """As the weight says."""
        return round(-float(self.network.weight.asnumpy()[0]))

    def microbatch(self, after=NEVER):
        """One that may be interrupted."""
        self.started += 1
        raised, said = True, ""
        try:
            raised = interrupted(self.call, after)[1]
        except RuntimeError as error:
            said = str(error)
        self.caught, self.ended = self.caught + raised, self.ended + (not raised)
        if said:
            assert "call accumulator.reset()" in said
            self.refused += 1
            self.accumulator.reset()
            self.made = self.updates
            ops.assign(self.accumulator.update_step, Tensor(self.made, ms.int32))
            self.started = self.ended = 0
        self.check()

    def check(self):
        """Also after interrupts that nothing has recovered from: what is torn is refused."""
        try:
            require_whole(int(self.accumulator.window.unfinished))
        except RuntimeError:
            return
        assert int(self.accumulator.update_step) == self.updates
        held = int(self.accumulator.mini_step) + (self.updates - self.made) * self.length
        assert self.ended <= held <= self.started


@pytest.mark.parametrize("kind", KINDS)
def test_each_update_happens_once_or_is_refused(kind):
    run, rng = Run(kind), random.Random(kind)
    caught = refused = 0
    for _ in range(RUNS // len(KINDS) + 1):
        run.start_over()
        for _ in range(CALLS):
            run.microbatch(rng.randint(1, int(1.5 * run.lines)) if rng.random() < 0.7 else NEVER)
        caught, refused = caught + run.caught, refused + run.refused
    assert caught > CALLS * RUNS // len(KINDS) / 5, "hardly any interrupt came"
    assert refused > 0 if kind in ("pieces", "cell-pynative") else refused == 0


def test_an_update_that_is_applied_twice_is_noticed(monkeypatch):
    """Negative control: the window is emptied by another statement of the host, after the update."""
    run = Run("step")

    def apply_then_reset(self, *accepted):
        self.window.optimizer((Tensor([1.0]),))
        ops.assign_add(self.window.update_step, 1)
        self.window.reset()
        return True

    code = apply_then_reset.__code__.replace(co_filename=str(Path(FOLDER) / "core" / "boundary.py"))
    monkeypatch.setattr("ms_accum.core.boundary.Boundary._close", type(apply_then_reset)(code, globals()))

    def interrupt_each_line_of_a_closing_call():
        for after in range(1, 100):
            run.start_over()
            for i in range(2 * N):
                run.microbatch(after if i == N - 1 else NEVER)

    with pytest.raises(AssertionError):
        interrupt_each_line_of_a_closing_call()
