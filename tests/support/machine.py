"""Runs that can be started over without compiling anything again: each driver once, with its state written back."""
from copy import copy
from functools import cache

import mindspore as ms
import numpy as np
from mindspore import Tensor, ops

from ms_accum.selftest.comparing import values
from support import reference
from support.differential.accumulating import Accumulating
from support.differential.cases import plain_case
from support.differential.optimizers import state_of

MAX_SKIPS = {"apply": 20, "skip_microbatch": 1, "skip_window": 1}
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


class Oracle(reference.Accumulation):
    """The NumPy oracle, with a limit of skips in a row."""

    reported = None

    def __init__(self, *arguments, max_skips):
        super().__init__(*arguments)
        self.max_skips = max_skips

    def halve(self):
        self.parameters = [p / 2 for p in self.parameters]

    def require_progress(self):
        if self.is_stuck:
            self.reported = self.skipped
            raise RuntimeError(f"{self.skipped_in_row} skipped")

    @property
    def is_stuck(self):
        return (self.skipped_in_row > self.max_skips
                and self.reported != self.skipped)

    def snapshot(self):
        kept = copy(self)
        kept.window, kept.optimizer, kept.reported = list(self.window), copy(self.optimizer), None
        return kept


class Run(Accumulating):
    """A driver, and what it trains: the network of the oracle."""

    def __init__(self, name):
        driver, windows, on_nonfinite, pieces = DRIVERS[name]
        case = plain_case(driver, accumulate_step=windows, on_nonfinite=on_nonfinite, pieces=pieces, clip_norm=0.5)
        super().__init__(case, case.seed, max_skips=MAX_SKIPS[on_nonfinite])
        self.grad_fn = ms.value_and_grad(self.loss, None, self.optimizer.parameters)
        self.counts_down, self.by_hand = driver == "step", case.by_hand
        kept = [*self.loss.trainable_params(), *state_of(self.optimizer), *self.accumulator.parameters]
        # The unit of weights is fixed by now or never: compiled graphs hold it.
        self._first = [(p, p.asnumpy().copy()) for p in kept if p is not self.accumulator.window.weight_unit]

    def start_over(self):
        for parameter, value in self._first:
            ops.assign(parameter, Tensor(value))
        self.ask()

    def ask(self):
        """Let the host forget what it knows."""
        boundary = self.accumulator.boundary
        boundary.forget()
        boundary.reported = None

    def oracle(self):
        case = self.case
        return Oracle(values(self.loss.trainable_params()), reference.SGD(0.1, 0.9), case.schedule, "mean",
                      case.clip_norm, case.on_nonfinite, max_skips=MAX_SKIPS[case.on_nonfinite])

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
            ops.assign(parameter, parameter / 2)

    def flush(self):
        with self.driver:
            return self.driver.flush()

    def add_by_hand(self, batch, weight, bad):
        """One microbatch by hand, op by op."""
        gradients = [gradient.asnumpy() for gradient in self.grad_fn(*map(Tensor, batch))[1]]
        return self.accumulator(tuple(map(Tensor, spoiled(gradients, bad))), weight)


def spoiled(gradients, bad):
    """Arrays, of which one ends with a value: `bad` is `(place, value)`, or None."""
    gradients = [gradient.copy() for gradient in gradients]
    if bad is not None:
        place, value = bad
        gradients[place].reshape(-1)[-1] = value
    return gradients


run_of = cache(Run)
