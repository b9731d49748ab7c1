"""Runs that can be started over without compiling anything again: each driver once, with all of its state written back."""
from copy import copy

import mindspore as ms
import numpy as np
import reference
from conftest import MLP, mean_loss, tensors, values
from mindspore import Tensor, nn, ops
from pages import recipe

from ms_accum import Accumulator, TrainOneStepCell, make_train_step, until_weight

MAX_SKIPS = {"apply": None, "skip_microbatch": 1, "skip_window": 1}
# How each driver trains: (context, windows, what is not finite, pieces). Between them, each of these occurs with each other one.
DRIVERS = {
    "step": (ms.PYNATIVE_MODE, {0: 2, 2: 3}, "skip_microbatch", 1),
    "step-alone": (ms.PYNATIVE_MODE, {0: 1, 3: 2, 5: 1}, "apply", 1),
    "step-pieces": (ms.PYNATIVE_MODE, 3, "skip_window", 2),
    "step-budget": (ms.PYNATIVE_MODE, until_weight(9, at_most=4), "apply", 3),
    "step-weight": (ms.PYNATIVE_MODE, until_weight(9, at_most=4), "apply", 1),
    "cell-graph": (ms.GRAPH_MODE, until_weight(9, at_most=4), "skip_window", 1),
    "cell-pynative": (ms.PYNATIVE_MODE, {0: 2, 2: 3}, "skip_microbatch", 1),
    "hand-jit": (ms.PYNATIVE_MODE, 3, "skip_microbatch", 1),
    "hand-pynative": (ms.PYNATIVE_MODE, {0: 1, 3: 2, 5: 1}, "skip_window", 1),
}
_made = {}


def run_of(name):
    """The run of a driver, started over."""
    if name not in _made:
        _made[name] = Run(name)
    _made[name].start_over()
    return _made[name]


class Oracle(reference.Accumulation):
    """The NumPy oracle, for microbatches of several pieces, with what a host that counts down knows of the window."""

    counted = held = seen = skipped_in_row = 0
    remaining = reported = None

    def __init__(self, *arguments, max_skips=None):
        super().__init__(*arguments)
        self.max_skips, self.averages = max_skips, self.parameters

    @property
    def mini_step(self):
        return self.counted

    @property
    def missing(self):
        full = getattr(self.accumulate_step, "budget", np.inf) <= sum(weight for weight, _ in self.window)
        longest = getattr(self.accumulate_step, "at_most", None) or reference.window_length(self.accumulate_step, self.update_step)
        short = 1 if hasattr(self.accumulate_step, "budget") else longest
        return 0 if full else max(min(longest - self.counted, short), 0)

    @property
    def full(self):
        return self.missing == 0

    def add(self, gradients, weight=1.0):
        self.add_pieces([(gradients, weight)])

    def add_pieces(self, pieces):
        before = len(self.window)
        for gradients, weight in pieces:
            skipped = self.skipped
            super().add(gradients, weight)
            if self.on_nonfinite == "skip_microbatch" and weight != 0:
                self.skipped_in_row = (self.skipped_in_row + 1) * (self.skipped - skipped)
        self.counted += len(self.window) > before

    def add_nothing(self):
        """A microbatch without rows: it counts, and nothing looks at it."""
        self.window.append((0.0, [np.zeros_like(p) for p in self.parameters]))
        self.counted += 1

    def apply(self):
        weight, updates = sum(weight for weight, _ in self.window), self.update_step
        super().apply()
        if self.update_step > updates:
            self.seen += weight
            self.averages = [(a + p) / 2 for a, p in zip(self.averages, self.parameters)]
        if self.on_nonfinite == "skip_window":
            self.skipped_in_row = (self.skipped_in_row + 1) * (self.update_step == updates)

    def swap(self):
        self.parameters, self.averages = self.averages, self.parameters

    def require_progress(self):
        if self.max_skips is not None and self.skipped_in_row > self.max_skips and self.reported != self.skipped:
            self.reported = self.skipped
            raise RuntimeError(f"{self.skipped_in_row} skipped")

    def reset(self):
        super().reset()
        self.counted = 0

    def snapshot(self):
        kept = copy(self)
        kept.window, kept.optimizer, kept.remaining, kept.reported = list(self.window), copy(self.optimizer), None, None
        return kept

    def step(self, add, alone):
        """A microbatch by a train step, which `add()` adds. `alone`: whether it has a graph for windows of one."""
        if self.remaining is None or ((self.remaining, self.held) == (1, 0) and alone):
            self.close_if(self.full)
            self.held, self.remaining = self.counted, self.missing
        one = (self.remaining, self.held) == (1, 0) and alone
        add()  # with the parameters after a late update
        held, remaining, self.remaining = self.held + 1, self.remaining - 1, None
        if one:
            self.apply()
            held, remaining = 0, 1 if self.accumulate_step == 1 else None
        elif remaining == 0:
            held, remaining, updates = self.counted, self.missing, self.update_step
            if remaining == 0:
                self.apply()
                held, remaining = 0, self.missing
            if self.update_step == updates:
                self.require_progress()
        self.held, self.remaining = held, remaining


class Run:
    """A driver, and what it trains."""

    def __init__(self, name):
        self.mode, self.windows, self.on_nonfinite, self.pieces = DRIVERS[name]
        self.network = MLP(seed=1)
        optimizer = nn.Momentum(self.network.trainable_params(), 0.1, 0.9)
        self.average = recipe("train-step", "MovingAverage")(self.network.trainable_params(), 0.5)
        self.accumulator = accumulator = Accumulator(
            optimizer, self.windows, 0.5, reduction="mean", on_nonfinite=self.on_nonfinite, max_skips=MAX_SKIPS[self.on_nonfinite],
            after_update=self.average)
        forward_fn = mean_loss(self.network)
        self.grad_fn = ms.value_and_grad(forward_fn, None, optimizer.parameters)
        if name.startswith("step"):
            self.step = make_train_step(forward_fn, accumulator, pieces=self.pieces)
            self.flush = self.step.flush
        elif name.startswith("cell"):
            self.step = TrainOneStepCell(nn.WithLossCell(self.network, nn.CrossEntropyLoss()), accumulator)
            self.flush = self.step.flush
        else:
            self._graph = ms.jit(self._by_hand) if name.endswith("jit") else self._by_hand
            self.step, self.flush = self._with_limit, accumulator.flush
        self.counts_down, self.takes_nothing = name.startswith("step"), not name.startswith("hand")
        self.has_alone = self.pieces == 1 and self.on_nonfinite == "apply" and not hasattr(self.windows, "budget")
        kept = [*self.network.trainable_params(), *optimizer.moments, *accumulator.parameters]
        # The unit of weights is fixed by now or never: compiled graphs hold it.
        self._first = [(p, p.asnumpy().copy()) for p in kept if p is not accumulator.buffers.held_unit]

    def _by_hand(self, x, y):
        loss, gradients = self.grad_fn(x, y)
        return ops.depend(loss, self.accumulator(gradients, x.shape[0]))

    def _with_limit(self, x, y):
        """As a script does by hand."""
        loss = self._graph(x, y)
        self.accumulator.guard.require_progress()
        return loss

    def bits(self):
        return [p.asnumpy().tobytes() for p, _ in self._first]

    def start_over(self):
        for parameter, value in self._first:
            ops.assign(parameter, Tensor(value))
        self.accumulator.countdown.take()
        self.accumulator.counters.reported = None

    def oracle(self):
        return Oracle(values(self.network.trainable_params()), reference.SGD(0.1, 0.9), self.windows, "mean", 0.5, self.on_nonfinite,
                      max_skips=MAX_SKIPS[self.on_nonfinite])

    def train(self, x, y):
        """One microbatch by the driver."""
        ms.set_context(mode=self.mode)
        try:
            return self.step(*tensors(x, y))
        finally:
            ms.set_context(mode=ms.PYNATIVE_MODE)

    def add_by_hand(self, x, y, weight):
        """One microbatch without the driver, op by op."""
        return self.accumulator(self.grad_fn(*tensors(x, y))[1], weight)
