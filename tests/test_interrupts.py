"""Interrupts between any two host statements, the next one while the first is recovered from: each update happens once or is refused.

A KeyboardInterrupt (from a signal handler, say) is raised by a trace function before a line of ms_accum that is drawn. The gradient of
every microbatch is 1 and the learning rate 1, so the weight says how many updates were made, and the counters how many were counted.
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

N, RUNS, CALLS = 3, 500, 9
FOLDER = str(Path(ms_accum.__file__).parent)
BATCH = Tensor(np.ones((4, 1)), ms.float32)


class Linear(nn.Cell):
    def __init__(self):
        super().__init__()
        self.weight = Parameter(Tensor([0.0]), name="weight")

    def construct(self, x):
        return (x * self.weight).mean()


class Run:
    """A driver whose updates can be counted, and who is interrupted."""

    def __init__(self, kind):
        self.network = Linear()
        optimizer = nn.SGD(self.network.trainable_params(), learning_rate=1.0)
        guard = "skip_window" if kind == "judged" else "apply"
        self.accumulator = Accumulator(optimizer, 1 if kind == "alone" else N, reduction="mean", on_nonfinite=guard)
        self.length = 1 if kind == "alone" else N
        self.mode = ms.GRAPH_MODE if kind == "cell-graph" else ms.PYNATIVE_MODE
        if kind.startswith("cell"):
            self.step = TrainOneStepCell(self.network, self.accumulator)
        else:
            self.step = make_train_step(self.network, self.accumulator, pieces=2 if kind == "pieces" else 1)
        for _ in range(2 * N):  # everything is compiled
            self.call()
        self.flush()

    def call(self):
        ms.set_context(mode=self.mode)
        try:
            self.step(BATCH)
        finally:
            ms.set_context(mode=ms.PYNATIVE_MODE)

    def flush(self):
        ms.set_context(mode=self.mode)
        try:
            self.step.flush()
        finally:
            ms.set_context(mode=ms.PYNATIVE_MODE)

    def start_over(self):
        self.accumulator.reset()
        for parameter in (self.network.weight, self.accumulator.update_step, self.accumulator.closed_windows):
            ops.assign(parameter, ops.zeros_like(parameter))
        self.accumulator.countdown.take()

    @property
    def updates(self):
        """As the weight says."""
        return round(-float(self.network.weight.asnumpy()[0]))


def interrupted(function, after):
    """Call a function, and raise KeyboardInterrupt before the line of ms_accum numbered `after`. Return whether it was raised."""
    left = [after]

    def local(frame, event, argument):
        if event == "line":
            left[0] -= 1
            if left[0] == 0:
                raise KeyboardInterrupt
        return local

    def trace(frame, event, argument):
        return local if frame.f_code.co_filename.startswith(FOLDER) and left[0] > 0 else None

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        function()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


def lines_of(function):
    """How many lines of ms_accum a call runs."""
    count = [0]

    def local(frame, event, argument):
        count[0] += event == "line"
        return local

    before = sys.gettrace()
    sys.settrace(lambda frame, event, argument: local if frame.f_code.co_filename.startswith(FOLDER) else None)
    try:
        function()
    finally:
        sys.settrace(before)
    return count[0]


class Ledger:
    """What must be true of a run, whatever interrupts it."""

    def __init__(self, run):
        self.run, self.refused = run, 0
        self.started = self.ended = 0  # microbatches since the last reset: that were begun, and whose call returned
        self.made = 0  # updates before the last reset

    def call(self, function, after):
        """A microbatch (or a flush) that may be interrupted."""
        self.started += 1
        said = ""
        try:
            if not interrupted(function, after):
                self.ended += 1
        except RuntimeError as error:
            said = str(error)
        if said:
            assert "call accumulator.reset()" in said
            self.refused += 1
            self.run.accumulator.reset()
            self.made = self.run.updates
            ops.assign(self.run.accumulator.update_step, Tensor(self.made, ms.int32))
            self.started = self.ended = 0

    def check(self):
        """Also after interrupts that nothing has recovered from: what is torn is refused."""
        accumulator = self.run.accumulator
        try:
            accumulator.require_whole()
        except RuntimeError:
            return
        assert int(accumulator.update_step) == self.run.updates
        held = int(accumulator.mini_step) + (self.run.updates - self.made) * self.run.length
        assert self.ended <= held <= self.started


KINDS = ("step", "alone", "pieces", "judged", "cell-graph", "cell-pynative")


@pytest.mark.parametrize("kind", KINDS)
def test_each_update_happens_once_or_is_refused(kind):
    run, rng = Run(kind), random.Random(kind)
    lines = max(lines_of(run.call) for _ in range(2 * N))
    caught = refused = 0
    for _ in range(RUNS // len(KINDS) + 1):
        run.start_over()
        ledger = Ledger(run)
        for _ in range(CALLS):
            after = rng.randint(1, int(1.5 * lines)) if rng.random() < 0.7 else 10**9
            ended = ledger.ended
            ledger.call(run.call, after)
            caught += ledger.ended == ended
            ledger.check()
        refused += ledger.refused
    assert caught > CALLS * RUNS // len(KINDS) / 5, "hardly any interrupt came"
    assert refused > 0 if kind in ("pieces", "cell-pynative") else refused == 0


def test_an_update_that_is_applied_twice_is_noticed(monkeypatch):
    """Negative control: the window is emptied by another statement of the host, after the update."""
    run = Run("step")

    def apply_then_reset(self):
        self.accumulator.optimizer((Tensor([1.0]),))
        ops.assign_add(self.accumulator.update_step, 1)
        self.accumulator.reset()
        return True

    code = apply_then_reset.__code__.replace(co_filename=str(Path(FOLDER) / "boundary.py"))
    monkeypatch.setattr("ms_accum.boundary.Boundary.close", type(apply_then_reset)(code, globals()))
    with pytest.raises(AssertionError):
        _interrupt_each_line_of_a_closing_call(run)


def _interrupt_each_line_of_a_closing_call(run):
    for after in range(1, 100):
        run.start_over()
        ledger = Ledger(run)
        for i in range(2 * N):
            ledger.call(run.call, after if i == N - 1 else 10**9)
            ledger.check()
