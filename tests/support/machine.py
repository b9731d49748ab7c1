"""Runs that can be started over without compiling anything again: each driver once, with all of its state written back."""
from copy import copy
from functools import cache

import mindspore as ms
import reference
from conftest import MLP, values
from drivers import Driver, LossOf
from mindspore import Tensor, nn, ops
from pages import recipe

from ms_accum import Accumulator, until_weight

MAX_SKIPS = {"apply": None, "skip_microbatch": 1, "skip_window": 1}
BUDGET = until_weight(9, at_most=4)
# How each driver trains: (its name, windows, what is not finite, pieces). Between them, each of these occurs with each other one.
DRIVERS = {
    "step": ("step", {0: 2, 2: 3}, "skip_microbatch", 1),
    "step-alone": ("step", {0: 1, 3: 2, 5: 1}, "apply", 1),
    "step-pieces": ("step", 3, "skip_window", 2),
    "step-budget": ("step", BUDGET, "apply", 3),
    "step-weight": ("step", BUDGET, "apply", 1),
    "cell-graph": ("cell-graph", BUDGET, "skip_window", 1),
    "cell-pynative": ("cell-pynative", {0: 2, 2: 3}, "skip_microbatch", 1),
    "hand-jit": ("hand-jit", 3, "skip_microbatch", 1),
    "hand-pynative": ("hand-pynative", {0: 1, 3: 2, 5: 1}, "skip_window", 1),
}


class Oracle(reference.Accumulation):
    """The NumPy oracle, with a limit of skips in a row, and with what a host that counts down knows of the window."""

    held, remaining, reported = 0, None, None

    def __init__(self, *arguments, max_skips):
        super().__init__(*arguments)
        self.max_skips = max_skips

    def swap(self):
        self.parameters, self.averages = self.averages, self.parameters

    def require_progress(self):
        if self.max_skips is not None and self.skipped_in_row > self.max_skips and self.reported != self.skipped:
            self.reported = self.skipped
            raise RuntimeError(f"{self.skipped_in_row} skipped")

    def snapshot(self):
        kept = copy(self)
        kept.window, kept.optimizer, kept.remaining, kept.reported = list(self.window), copy(self.optimizer), None, None
        return kept

    def step(self, add, alone):
        """A microbatch by a train step, which `add()` adds. `alone`: whether it has a graph for windows of one."""
        if self.remaining is None or ((self.remaining, self.held) == (1, 0) and alone):
            self.close_if(self.full)
            self.held, self.remaining = self.mini_step, self.missing
        one = (self.remaining, self.held) == (1, 0) and alone
        add()  # with the parameters after a late update
        held, remaining, self.remaining = self.held + 1, self.remaining - 1, None
        if one:
            self.apply()
            held, remaining = 0, 1 if self.accumulate_step == 1 else None
        elif remaining == 0:
            held, remaining, updates = self.mini_step, self.missing, self.update_step
            if remaining == 0:
                self.apply()
                held, remaining = 0, self.missing
            if self.update_step == updates:
                self.require_progress()
        self.held, self.remaining = held, remaining


class Run:
    """A driver, and what it trains."""

    def __init__(self, name):
        driver, self.windows, self.on_nonfinite, self.pieces = DRIVERS[name]
        self.network = MLP(seed=1)
        optimizer = nn.Momentum(self.network.trainable_params(), 0.1, 0.9)
        self.average = recipe("train-step", "MovingAverage")(self.network.trainable_params(), 0.5)
        self.accumulator = accumulator = Accumulator(
            optimizer, self.windows, 0.5, reduction="mean", on_nonfinite=self.on_nonfinite, max_skips=MAX_SKIPS[self.on_nonfinite],
            after_update=self.average)
        loss = LossOf(self.network)
        self.driver = Driver(driver, accumulator, loss, pieces=self.pieces)
        self.grad_fn = ms.value_and_grad(loss, None, optimizer.parameters)
        self.counts_down, self.takes_nothing = driver == "step", not driver.startswith("hand")
        self.has_alone = self.pieces == 1 and self.on_nonfinite == "apply" and self.windows is not BUDGET
        kept = [*self.network.trainable_params(), *optimizer.moments, *accumulator.parameters]
        # The unit of weights is fixed by now or never: compiled graphs hold it.
        self._first = [(p, p.asnumpy().copy()) for p in kept if p is not accumulator.buffers.held_unit]

    def bits(self):
        return [p.asnumpy().tobytes() for p, _ in self._first]

    def start_over(self):
        for parameter, value in self._first:
            ops.assign(parameter, Tensor(value))
        self.ask()

    def ask(self):
        """Let the host forget what it knows."""
        self.accumulator.countdown.take()
        self.accumulator.counters.reported = None

    def oracle(self):
        return Oracle(values(self.network.trainable_params()), reference.SGD(0.1, 0.9), self.windows, "mean", 0.5, self.on_nonfinite,
                      max_skips=MAX_SKIPS[self.on_nonfinite])

    def train(self, x, y):
        """One microbatch by the driver."""
        with self.driver:
            return self.driver(x, y)

    def flush(self):
        with self.driver:
            return self.driver.flush()

    def add_by_hand(self, x, y, weight):
        """One microbatch without the driver, op by op."""
        return self.accumulator(self.grad_fn(Tensor(x), Tensor(y))[1], weight)


run_of = cache(Run)
