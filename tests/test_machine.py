"""Calls in any order, by every driver, against the NumPy oracle: one state machine for all of them.

A train step counts down what its window needs, and asks the device when nothing is missing. Microbatches that are added by hand in
between are counted when it asks; `machine.Oracle.step` is the model of the host.
"""
import numpy as np
import pytest
import reference
from conftest import difference, values
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test
from machine import DRIVERS, run_of

from ms_accum import load_checkpoint, save_checkpoint

SIZES = st.sampled_from([4, 4, 4, 3])  # each size is compiled once


def microbatch(size, seed, bad):
    rng = np.random.default_rng(seed)
    x, y = rng.normal(size=(size, 6)), rng.integers(0, 3, size)
    if bad:
        x[0, 0] = np.nan
    return x, y


class Machine(RuleBasedStateMachine):
    driver = None
    runs = 0
    wrong = staticmethod(lambda weight: weight)  # what a control changes in the oracle

    def __init__(self):
        super().__init__()
        self.run = run_of(self.driver)
        self.oracle = self.run.oracle()
        self.saved = None
        type(self).runs += 1

    @rule(size=SIZES, seed=st.integers(0, 10**6), bad=st.sampled_from([False] * 7 + [True]))
    def train(self, size, seed, bad):
        if self.run.on_nonfinite == "apply":
            bad = False
        x, y = microbatch(size, seed, bad)
        self.run.train(x, y)
        if self.run.counts_down:
            rows = -(-size // self.run.pieces)
            self.oracle.step(lambda: [self._weighed(x[i:i + rows], y[i:i + rows]) for i in range(0, size, rows)], self.run.has_alone)
        else:
            self.oracle(*self._weighed(x, y))

    @rule(seed=st.integers(0, 10**6))
    def add_by_hand(self, seed):
        x, y = microbatch(4, seed, False)
        self.run.add_by_hand(x, y)
        self.oracle(*self._weighed(x, y))

    @rule()
    def flush(self):
        assert self.run.flush() == self.oracle.flush()
        self.oracle.remaining = None

    @rule()
    def reset(self):
        self.run.accumulator.reset()
        self.oracle.reset()

    @rule()
    def save(self):
        save_checkpoint("machine.ckpt", self.run.network, self.run.accumulator, extra=1)
        self.saved = self.oracle.snapshot()

    @precondition(lambda self: self.saved is not None)
    @rule()
    def load(self):
        assert load_checkpoint("machine.ckpt", self.run.network, self.run.accumulator) == 1
        self.oracle = self.saved.snapshot()

    @invariant()
    def agrees(self):
        accumulator, oracle = self.run.accumulator, self.oracle
        got = [int(p) for p in (accumulator.mini_step, accumulator.update_step, accumulator.skipped)]
        assert got == [oracle.mini_step, oracle.update_step, oracle.skipped]
        assert float(accumulator.weight_sum) == pytest.approx(sum(weight for weight, _ in oracle.window), rel=1e-6)
        assert difference(values(self.run.network.trainable_params()), oracle.parameters) <= 2e-5

    def _weighed(self, x, y):
        return reference.loss_and_gradients(self.oracle.parameters, x, y)[1], self.wrong(len(x))


@pytest.mark.parametrize("driver", DRIVERS)
def test_calls_in_any_order_equal_the_oracle(driver):
    machine = type("Run", (Machine,), {"driver": driver})
    run_state_machine_as_test(machine, settings=settings(max_examples=12, stateful_step_count=25))
    assert machine.runs >= 12


@pytest.mark.parametrize("driver", ["step", "cell-pynative"])
def test_a_wrong_weight_is_noticed(driver):
    """Negative control: the oracle weighs each microbatch alike."""
    wrong = type("Wrong", (Machine,), {"driver": driver, "wrong": staticmethod(lambda weight: 1.0)})
    with pytest.raises(AssertionError):
        run_state_machine_as_test(wrong, settings=settings(max_examples=12, stateful_step_count=25))
