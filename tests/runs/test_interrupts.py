"""An interrupt before any line of the host, and real signals: the run goes on, or is saved and loaded, exactly.

A trace function raises KeyboardInterrupt before a line of the files that change state. Then the run goes on in the
process (after `reset()`, if a microbatch was torn), or is saved, loaded into another run, and goes on there. Either way
all state must end as without an interrupt, bit for bit.
"""
import random
import signal
import sys
from functools import cache
from pathlib import Path
from time import perf_counter

import pytest
from mindspore import nn
from support.modes import recorded_warnings
from support.training import bits, masked_batches, masked_step, train_epochs

import ms_accum
from ms_accum import load_checkpoint, save_checkpoint
from ms_accum.core.boundary import Boundary
from ms_accum.selftest.networks import MLP

FOLDER = Path(ms_accum.__file__).parent
FILES = {str(FOLDER / name) for name in ("core/boundary.py", "steps/train_step.py", "checkpoint/checkpoint.py")}
WINDOW = str(FOLDER / "core" / "window.py")
BATCHES = masked_batches([8] * 5)
KINDS = {"step": {}, "pieces": {"pieces": 3}, "eager": {"eager": True}, "alone": {"accumulate_step": 1},
         "dropping": {"on_nonfinite": "skip_window"}, "budget": {"accumulate_step": ms_accum.until_weight(15.0)}}


class Run:
    """A run of two epochs, with a function of `on_update` that notes the updates."""

    def __init__(self, accumulate_step=3, **options):
        self.start = Path("start.safetensors").resolve()
        self.network, self.noted = MLP(), []
        self.step = masked_step(self.network, nn.Adam(self.network.trainable_params(), 0.01), accumulate_step,
                                **options)
        self.step.on_update(lambda step: self.noted.append(step.update_step))
        save_checkpoint(self.start, self.network, self.step)
        self.train()  # compiles everything

    def train(self):
        train_epochs(self.step, BATCHES)

    def load(self, path=None):
        load_checkpoint(path or self.start, self.network, self.step)
        self.noted.clear()

    def save(self, path):
        with recorded_warnings():
            save_checkpoint(path, self.network, self.step)

    def state(self):
        return bits(self.network, self.step)


@cache
def run_of(kind, number=0):
    """Runs are compiled once, and begin with a load."""
    return Run(**KINDS[kind])


def interrupted(function, after):
    """Call a function, and raise KeyboardInterrupt before its line numbered `after`. Return the place, or None."""
    left, place = after, None

    def local(frame, event, argument):
        nonlocal left, place
        if event == "line":
            left -= 1
            if left == 0:
                place = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
                sys.settrace(None)
                raise KeyboardInterrupt
        return local

    def trace(frame, event, argument):
        code = frame.f_code
        return local if code.co_filename in FILES or (code.co_filename, code.co_name) == (WINDOW, "empty") else None

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        function()
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(before)
    return place


def interrupts(kind, every):
    """Interrupt a run at each line numbered a multiple of `every`, plus one. Yield where, how it went on, and whether
    it ended exactly."""
    one, other = run_of(kind), run_of(kind, 1)
    one.load()
    one.train()
    end, noted, line = one.state(), len(one.noted), 1
    assert noted > 3
    while True:
        one.load()
        place = interrupted(one.train, line)
        if place is None:
            return
        line += every
        if line % 2:
            try:
                one.train()
            except RuntimeError as error:
                assert "stopped a microbatch" in str(error)  # noqa: PT017
                one.step.reset()
                one.train()
            assert noted - 1 <= len(one.noted) <= noted  # the functions of one update may be missing
            yield place, "process", one.state() == end
        else:
            one.save("middle.safetensors")
            other.load("middle.safetensors")
            other.train()
            yield place, "file", other.state() == end


@pytest.mark.parametrize(("kind", "every"), [
    ("step", 97), ("eager", 101), *(pytest.param(kind, 3, marks=pytest.mark.slow) for kind in KINDS)])
def test_a_run_that_was_interrupted_ends_exactly(kind, every):
    found = list(interrupts(kind, every))
    assert [(place, way) for place, way, is_exact in found if not is_exact] == []
    assert len(found) > 8


def test_a_countdown_that_is_not_forgotten_is_noticed(monkeypatch):
    """Negative control: the host's countdown keeps its number while the device counts."""
    def keep(self, name, value):
        if (name, value) != ("missing", None):
            object.__setattr__(self, name, value)

    monkeypatch.setattr(Boundary, "__setattr__", keep, raising=False)
    with pytest.raises(AssertionError):  # or too many updates, which `interrupts` looks at
        assert all(is_exact for *_, is_exact in interrupts("eager", 13))


@pytest.mark.parametrize("every", [29, pytest.param(1, marks=pytest.mark.slow)])
def test_a_load_that_was_interrupted_is_whole_or_an_error(every):
    """Whole: as before the load, or after it. Else the run raises an error, until a file is loaded."""
    run, begun, line = run_of("eager"), 0, 1
    run.load()
    run.train()
    end = run.state()
    run.load()
    next(iter(run.step.epoch(BATCHES)))
    run.save("other.safetensors")
    while True:
        run.load("other.safetensors")
        if interrupted(run.load, line) is None:
            break
        begun, line = begun + 1, line + every
        try:
            run.train()
        except RuntimeError:
            with pytest.raises(RuntimeError, match="stopped a load"):
                run.step(*BATCHES[0])
            run.load()
            run.train()
        assert run.state() == end
    assert begun > 3


# --- signals ----------------------------------------------------------------------------------------------------------

def signalled(function, seconds):
    """Call a function, and send this process a real signal after so many seconds. Return whether it was stopped."""
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        signal.setitimer(signal.ITIMER_REAL, seconds)
        function()
        signal.setitimer(signal.ITIMER_REAL, 0)
    except KeyboardInterrupt:
        return True
    finally:
        signal.signal(signal.SIGALRM, before)
    return False


@pytest.mark.parametrize(("kind", "signals"), [("eager", 8), *(
    pytest.param(kind, 200, marks=pytest.mark.slow) for kind in KINDS)])
def test_a_run_that_got_a_signal_is_saved_and_ends_exactly(kind, signals):
    """Wherever MindSpore is. Only an update that was torn cannot be saved, and only op by op; then the error says so.
    """
    one, other, rng = run_of(kind), run_of(kind, 1), random.Random(kind)

    def timed():
        one.load()
        begin = perf_counter()
        one.train()
        return perf_counter() - begin

    seconds, end, stopped, refused = min(timed() for _ in range(3)), one.state(), 0, 0
    for _ in range(signals):
        one.load()
        stopped += signalled(one.train, rng.uniform(0.05, 0.8) * seconds)
        try:
            one.save("middle.safetensors")
        except RuntimeError as error:
            if "stopped an update" not in str(error):
                raise
            refused += 1
            continue
        other.load("middle.safetensors")
        other.train()
        assert other.state() == end
    assert stopped > signals / 2
    assert refused == 0 or kind == "eager"
