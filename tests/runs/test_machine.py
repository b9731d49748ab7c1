"""Calls in any order, by every driver, against the NumPy oracle: one state machine for all of them.

An accumulator is filled by one driver, or by hand. A train step counts down what its window needs, and reads the device
when nothing is missing: so it may notice later than the oracle that too much was skipped, but never earlier. With
microbatches without rows, a limit of skips in a row, samples seen, and parameters that are halved at any time.
What follows a checkpoint is done once more in the end, from the file: it ends with the same bits.
"""
from functools import partial

import numpy as np
import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from support import reference
from support.drivers import counters
from support.machine import DRIVERS, run_of, spoiled

from ms_accum import load_checkpoint, save_checkpoint
from ms_accum.selftest.comparing import difference, values

BAD = list(enumerate((np.nan, np.inf, -np.inf, np.nan)))  # in which gradient
SIZES = st.sampled_from([4, 4, 4, 4, 3, 3, 0])  # each size is compiled once


STUCK = object()
FEW = 2


def stuck(call):
    """What a call returns; STUCK if it says that too much was skipped in a row."""
    try:
        return call()
    except RuntimeError as error:
        if "skipped" not in str(error):
            raise
        return STUCK


class Machine(RuleBasedStateMachine):
    driver = None
    runs = resumed = stuck = 0
    wrong = staticmethod(lambda weight: weight)  # what a control changes in the oracle

    def __init__(self):
        super().__init__()
        self.run = run_of(self.driver)
        self.run.start_over()
        self.oracle = self.run.oracle()
        self.saved = self.since = None
        type(self).runs += 1

    @initialize(seed=st.integers(0, 10**6))
    def begin(self, seed):
        """In the middle of most windows."""
        self.train(4, seed)
        self.save(True)

    @rule(size=SIZES, seed=st.integers(0, 10**6))
    def train(self, size, seed):
        if size or not self.run.by_hand:
            self._train(self.run.microbatch(size, seed))

    @precondition(lambda self: self.run.case.on_nonfinite != "apply")
    @rule(seed=st.integers(0, 10**6))
    def train_on_nan(self, seed):
        batch = self.run.microbatch(4, seed)
        batch[0][0, 0] = np.nan
        self._train(batch)

    @precondition(lambda self: self.run.by_hand)
    @rule(seed=st.integers(0, 10**6), masked=st.booleans(), bad=st.sampled_from([None, *BAD]))
    def add_by_hand(self, seed, masked, bad):
        """One element of one gradient may be `bad`, where such a microbatch or window is skipped."""
        batch, weight = self.run.microbatch(4, seed), 0.0 if masked else 4.0
        bad = None if self.run.case.on_nonfinite == "apply" else bad
        self._both(partial(self.run.add_by_hand, batch, weight, bad), partial(self._added, batch, weight, bad))

    @rule()
    def flush(self):
        closed, expected = self._both(self.run.flush, self._flushed)
        assert closed == expected

    @precondition(lambda self: self.run.by_hand)
    @rule()
    def apply(self):
        self._both(self.run.accumulator.apply, lambda: self.oracle.apply())

    @precondition(lambda self: self.run.by_hand)
    @rule(condition=st.booleans())
    def close_if(self, condition):
        closed, expected = self._both(partial(self.run.accumulator.close_if, condition),
                                      lambda: self.oracle.close_if(condition))
        assert bool(closed) == expected

    @rule()
    def reset(self):
        self._both(self.run.accumulator.reset, lambda: self.oracle.reset())

    @rule()
    def halve(self):
        self._both(self.run.halve, lambda: self.oracle.halve())

    @rule(asks=st.booleans())
    def save(self, asks):
        save_checkpoint("machine.safetensors", self.run.loss, self.run.accumulator, extra=1)
        self.since = None  # a host that goes on counting may add to buffers where one that asks updates alone
        if asks:
            self.run.ask()
            self.oracle.reported, self.since = None, []
        self.saved = self.oracle.snapshot()

    @precondition(lambda self: self.saved is not None)
    @rule()
    def load(self):
        assert load_checkpoint("machine.safetensors", self.run.loss, self.run.accumulator) == 1
        self.oracle, self.since = self.saved.snapshot(), []

    @invariant()
    def agrees(self):
        run, oracle = self.run, self.oracle
        assert counters(run.accumulator) == pytest.approx(oracle.counters(), rel=1e-6)
        assert difference(values(run.loss.trainable_params()), oracle.parameters) <= 2e-5

    def teardown(self):
        if self.since:
            type(self).resumed += 1
            ended = self.run.bits()
            self.run.start_over()
            load_checkpoint("machine.safetensors", self.run.loss, self.run.accumulator)
            for call in self.since:
                stuck(call)
            assert self.run.bits() == ended

    def _both(self, call, model):
        """Make the same call of the run and of the oracle. Both go on, or both are stuck."""
        if self.since is not None:
            self.since.append(call)
        got, expected = stuck(call), stuck(model)
        if got is STUCK and expected is not STUCK:
            assert self.run.counts_down
            assert self.oracle.is_stuck
            self.oracle.reported = self.oracle.skipped
        assert got is STUCK or expected is not STUCK
        type(self).stuck += got is STUCK
        return got, expected

    def _train(self, batch):
        self._both(partial(self.run.train_on, batch), partial(self._trained, batch))

    def _trained(self, batch):
        self.oracle.add_pieces([self._weighed(piece, weight) for piece, weight in self.run.case.pieces_of(batch)])
        closed = self.oracle.close_if(self.oracle.full)
        if not self.run.counts_down or (closed and self.run.case.on_nonfinite == "skip_window"):
            self.oracle.require_progress()

    def _added(self, batch, weight, bad):
        gradients, weight = self._weighed(batch, weight)
        self.oracle(spoiled(gradients, bad), weight)

    def _flushed(self):
        closed = self.oracle.flush()
        self.oracle.require_progress()
        return closed

    def _weighed(self, piece, weight):
        x, _, y, _ = piece
        gradients = reference.loss_and_gradients(self.oracle.parameters, x, y)[1] if len(x) else self.oracle.zeros
        return gradients, weight and self.wrong(weight)


@pytest.mark.parametrize(("driver", "examples"), [
    *((driver, FEW) for driver in ("step", "cell-graph", "hand-pynative")),
    *(pytest.param(driver, 50, marks=pytest.mark.slow) for driver in DRIVERS)])
def test_calls_in_any_order_equal_the_oracle(driver, examples):
    machine = type("Run", (Machine,), {"driver": driver})
    run_state_machine_as_test(machine, settings=settings(max_examples=examples, stateful_step_count=25))
    assert machine.runs >= examples
    assert machine.resumed >= examples / 4
    skips = DRIVERS[driver][2] != "apply"
    assert machine.stuck == 0 or skips
    assert machine.stuck > 0 or not skips or examples == FEW  # few runs need not come to it


@pytest.mark.parametrize("driver", ["step", "cell-pynative"])
def test_a_wrong_weight_is_noticed(driver):
    """Negative control: the oracle weighs each microbatch alike."""
    wrong = type("Wrong", (Machine,), {"driver": driver, "wrong": staticmethod(lambda weight: 1.0)})
    without_shrinking = settings(max_examples=12, phases=[Phase.generate], report_multiple_bugs=False)
    with pytest.raises(AssertionError):
        run_state_machine_as_test(wrong, settings=without_shrinking)
