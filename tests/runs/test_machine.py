"""Calls in any order, by every driver, against the NumPy oracle: one state machine for all of them.

With microbatches without samples or with NaN, and parameters that are halved at any time. What follows a checkpoint is
done once more in the end, from the file: it ends with the same bits.
"""
import warnings
from copy import copy
from functools import cache, partial

import mindspore as ms
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
from mindspore import Tensor, ops
from support import reference
from support.differential.accumulating import Accumulating
from support.differential.cases import plain_case
from support.differential.optimizers import state_of

from ms_accum.core.boundary import Place
from ms_accum.selftest.comparing import values

BAD = list(enumerate((np.nan, np.inf, -np.inf, np.nan)))  # in which gradient
SIZES = st.sampled_from([4, 4, 4, 4, 3, 3, 0])  # each size is compiled once
BUDGET, SHORT, ALONE = ("until", 9.0, 4), ((0, 2), (2, 3)), ((0, 1), (3, 2), (5, 1))
# How each driver trains: (its name, windows, what is not finite, pieces). Each of these occurs with each other one.
DRIVERS = {
    "step": ("step", SHORT, "skip_microbatch", 1),
    "step-alone": ("step", ALONE, "apply", 1),
    "step-pieces": ("step", 3, "skip_window", 2),
    "step-budget": ("step", BUDGET, "apply", 3),
    "step-weight": ("step", BUDGET, "apply", 1),
    "cell-graph": ("cell-graph", BUDGET, "skip_window", 1),
    "cell-pynative": ("cell-pynative", SHORT, "skip_microbatch", 1),
    "hand-jit": ("hand-jit", 3, "skip_microbatch", 1),
    "hand-pynative": ("hand-pynative", ALONE, "skip_window", 1),
    "step-eager": ("step-pynative", SHORT, "skip_window", 2),
}


class Run(Accumulating):
    """A driver, and what it trains: the network of the oracle. It can start over without compiling anything again."""

    def __init__(self, name):
        driver, windows, on_nonfinite, pieces = DRIVERS[name]
        case = plain_case(driver, accumulate_step=windows, on_nonfinite=on_nonfinite, pieces=pieces, clip_norm=0.5)
        super().__init__(case, case.seed, max_skips=None)
        self.grad_fn = ms.value_and_grad(self.loss, None, self.optimizer.parameters)
        window = self.window
        kept = [*self.loss.trainable_params(), *state_of(self.optimizer), *window.buffers, window.counts, window.sums,
                *window.state.values()]
        self._first = [(p, p.asnumpy().copy()) for p in kept]
        for size in (4, 3) * 30:  # MindSpore's CPU kernels try numbers of threads in their first calls: other last bits
            self.train_on(self.microbatch(size, 0))

    def start_over(self):
        for parameter, value in self._first:
            ops.assign(parameter, Tensor(value))
        self.boundary.missing, self.boundary.place = None, Place()

    def oracle(self):
        case = self.case
        return reference.Accumulation(values(self.loss.trainable_params()), reference.SGD(0.1, 0.9), case.schedule,
                                      "mean", case.clip_norm, case.on_nonfinite)

    def microbatch(self, size, seed):
        """A batch of the network, of which the oracle needs the first and the third part."""
        rng = np.random.default_rng(seed)
        x, y = rng.normal(size=(size, 8)).astype(np.float32), rng.integers(0, 3, size).astype(np.int32)
        return x, np.zeros((size, 3), np.int32), y, np.ones(size, np.float32)

    def train_on(self, batch):
        """One microbatch by the driver."""
        with self.driver:
            return self.driver(*batch)

    def halve(self):
        """What a user writes into the parameters at any time."""
        for parameter in self.loss.trainable_params():
            ops.assign(parameter, Tensor(parameter.asnumpy() / 2))

    def flush(self):
        with self.driver:
            return self.driver.flush()

    def add_by_hand(self, batch, weight, bad):
        """One microbatch by hand, op by op."""
        gradients = [gradient.asnumpy() for gradient in self.grad_fn(*map(Tensor, batch))[1]]
        return self.driver.accumulator(tuple(map(Tensor, spoiled(gradients, bad))), weight)

    def all_bits(self):
        return self.bits(), self.open_window()


def spoiled(gradients, bad):
    """Arrays, of which one ends with a value: `bad` is `(place, value)`, or None."""
    gradients = [gradient.copy() for gradient in gradients]
    if bad is not None:
        gradients[bad[0]].reshape(-1)[-1] = bad[1]
    return gradients


run_of = cache(Run)


class Machine(RuleBasedStateMachine):
    driver = None
    runs = resumed = 0
    wrong = staticmethod(lambda weight: weight)  # what a control changes in the oracle

    def __init__(self):
        super().__init__()
        self.run = run_of(self.driver)
        self.run.start_over()
        self.oracle = self.run.oracle()
        self.saved = self.since = None  # the oracle, and the calls since the window began that was open at the save
        self.opened = []  # those of the open window; None: parameters were halved among them
        type(self).runs += 1

    @initialize(seed=st.integers(0, 10**6))
    def begin(self, seed):
        """In the middle of most windows."""
        self.train(4, seed)
        self.save()

    @rule(size=SIZES, seed=st.integers(0, 10**6))
    def train(self, size, seed):
        if size or not self.run.case.by_hand:
            self._train(self.run.microbatch(size, seed))

    @precondition(lambda self: self.run.case.on_nonfinite != "apply")
    @rule(seed=st.integers(0, 10**6))
    def train_on_nan(self, seed):
        batch = self.run.microbatch(4, seed)
        batch[0][0, 0] = np.nan
        self._train(batch)

    @precondition(lambda self: self.run.case.by_hand)
    @rule(seed=st.integers(0, 10**6), masked=st.booleans(), bad=st.sampled_from([None, *BAD]))
    def add_by_hand(self, seed, masked, bad):
        """One element of one gradient may be `bad`, where such a microbatch or window is skipped."""
        batch, weight = self.run.microbatch(4, seed), 0.0 if masked else 4.0
        bad = None if self.run.case.on_nonfinite == "apply" else bad
        self._both(partial(self.run.add_by_hand, batch, weight, bad),
                   partial(self._added, self._weighed(batch, weight), bad))

    @rule()
    def flush(self):
        closed, expected = self._both(self.run.flush, lambda: self.oracle.flush())
        assert closed == expected

    @precondition(lambda self: self.run.case.by_hand and self.oracle.mini_step)
    @rule(condition=st.booleans())
    def close_if(self, condition):
        closed, expected = self._both(partial(self.run.driver.accumulator.close_if, condition),
                                      lambda: self.oracle.close_if(condition))
        assert bool(closed) == expected

    @rule()
    def reset(self):
        self._both(self.run.driver.accumulator.reset, lambda: self.oracle.reset())

    @rule()
    def halve(self):
        self._both(self.run.halve, self._halved)
        self.opened = None if self.oracle.mini_step else []

    @rule()
    def save(self):
        """A file holds the state of the last update. By hand, an open window would be lost."""
        if self.run.case.by_hand and self.oracle.mini_step:
            with pytest.raises(RuntimeError, match="open window would be lost"):
                self.run.save("machine.safetensors", 1)
            return
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "machine.safetensors")
            self.run.save("machine.safetensors", 1)
        self.saved = self._copied()
        self.saved.begin()
        self.since = None if self.opened is None else list(self.opened)

    @precondition(lambda self: self.saved is not None)
    @rule()
    def load(self):
        assert self.run.load("machine.safetensors") == 1
        self.oracle = self.saved
        self.saved = self._copied()
        self.since, self.opened = [], []

    @invariant()
    def agrees(self):
        oracle, status = self.oracle, self.run.boundary.status()
        assert {name: getattr(status, name) for name in reference.COUNTERS} == oracle.counters()
        assert status.weight == pytest.approx(oracle.window_weight, rel=1e-6)
        # Absolute: halved parameters are small, and the updates before were not.
        assert all(np.abs(one - other).max() <= 5e-6 for one, other in zip(
            values(self.run.loss.trainable_params()), oracle.parameters))

    def teardown(self):
        if self.since:
            type(self).resumed += 1
            ended = self.run.all_bits()
            self.run.start_over()
            self.run.load("machine.safetensors")
            for call in self.since:
                call()
            assert self.run.all_bits() == ended

    def _both(self, call, model):
        """Make the same call of the run and of the oracle."""
        for calls in (self.since, self.opened):
            if calls is not None:
                calls.append(call)
        got, expected = call(), model()
        if not self.oracle.mini_step:
            self.opened = []
        return got, expected

    def _copied(self):
        kept = copy(self.oracle)
        kept.window, kept.optimizer = list(kept.window), copy(kept.optimizer)
        return kept

    def _train(self, batch):
        pieces = [self._weighed(piece, weight) for piece, weight in self.run.case.pieces_of(batch)]
        self._both(partial(self.run.train_on, batch), partial(self._trained, pieces))

    def _trained(self, pieces):
        self.oracle.add_pieces(pieces)
        self.oracle.close_if(self.oracle.full)

    def _added(self, weighed, bad):
        self.oracle(spoiled(weighed[0], bad), weighed[1])

    def _halved(self):
        self.oracle.parameters = [p / 2 for p in self.oracle.parameters]

    def _weighed(self, piece, weight):
        """The gradients by plain MindSpore, before a call that may update: its tanh on CPU is up to 8e-5 off."""
        gradients = values(self.run.grad_fn(*map(Tensor, piece))[1]) if len(piece[0]) else self.oracle.zeros
        return gradients, weight and self.wrong(weight)


@pytest.mark.parametrize(("driver", "examples"), [
    *((driver, 2) for driver in ("step", "cell-graph", "hand-pynative")),
    *(pytest.param(driver, 50, marks=pytest.mark.slow) for driver in DRIVERS)])
def test_calls_in_any_order_equal_the_oracle(driver, examples):
    machine = type("Run", (Machine,), {"driver": driver})
    run_state_machine_as_test(machine, settings=settings(max_examples=examples, stateful_step_count=25))
    assert machine.runs >= examples
    assert machine.resumed >= examples / 4


@pytest.mark.parametrize("driver", ["step", "cell-pynative"])
def test_a_wrong_weight_is_noticed(driver):
    """Negative control: the oracle weighs each microbatch alike."""
    wrong = type("Wrong", (Machine,), {"driver": driver, "wrong": staticmethod(lambda weight: 1.0)})
    without_shrinking = settings(max_examples=12, phases=[Phase.generate], report_multiple_bugs=False)
    with pytest.raises(AssertionError):
        run_state_machine_as_test(wrong, settings=without_shrinking)
