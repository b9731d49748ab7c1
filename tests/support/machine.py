"""Runs that can be started over without compiling anything again: each driver once, with all of its state written back."""
from copy import copy

import mindspore as ms
import numpy as np
import reference
from conftest import MLP, mean_loss, tensors, values
from mindspore import Tensor, nn, ops

from ms_accum import Accumulator, TrainOneStepCell, make_train_step, until_weight

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

    counted = held = 0
    remaining = None

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
            super().add(gradients, weight)
        self.counted += len(self.window) > before

    def reset(self):
        super().reset()
        self.counted = 0

    def snapshot(self):
        kept = copy(self)
        kept.window, kept.optimizer, kept.remaining = list(self.window), copy(self.optimizer), None
        return kept

    def step(self, pieces_of, alone):
        """A microbatch by a train step. `alone`: whether it has a graph for windows of one."""
        if self.remaining is None or ((self.remaining, self.held) == (1, 0) and alone):
            self.close_if(self.full)
            self.held, self.remaining = self.counted, self.missing
        one = (self.remaining, self.held) == (1, 0) and alone
        self.add_pieces(pieces_of())  # with the parameters after a late update
        self.held, self.remaining = self.held + 1, self.remaining - 1
        if one:
            self.apply()
            self.held, self.remaining = 0, 1 if self.accumulate_step == 1 else None
        elif self.remaining == 0:
            self.held, self.remaining = self.counted, self.missing
            if self.remaining == 0:
                self.apply()
                self.held, self.remaining = 0, self.missing


class Run:
    """A driver, and what it trains."""

    def __init__(self, name):
        self.mode, self.windows, self.on_nonfinite, self.pieces = DRIVERS[name]
        self.network = MLP(seed=1)
        optimizer = nn.Momentum(self.network.trainable_params(), 0.1, 0.9)
        self.accumulator = accumulator = Accumulator(optimizer, self.windows, 0.5, reduction="mean", on_nonfinite=self.on_nonfinite)
        forward_fn = mean_loss(self.network)
        self.grad_fn = ms.value_and_grad(forward_fn, None, optimizer.parameters)
        if name.startswith("step"):
            self.step = make_train_step(forward_fn, accumulator, pieces=self.pieces)
            self.flush = self.step.flush
        elif name.startswith("cell"):
            self.step = TrainOneStepCell(nn.WithLossCell(self.network, nn.CrossEntropyLoss()), accumulator)
            self.flush = self.step.flush
        else:
            self.step = ms.jit(self._by_hand) if name.endswith("jit") else self._by_hand
            self.flush = accumulator.flush
        self.counts_down = name.startswith("step")
        self.has_alone = self.pieces == 1 and self.on_nonfinite == "apply" and not hasattr(self.windows, "budget")
        kept = [*self.network.trainable_params(), *optimizer.moments, *accumulator.parameters]
        # The unit of weights is fixed by now or never: compiled graphs hold it.
        self._first = [(p, p.asnumpy().copy()) for p in kept if p is not accumulator.buffers.held_unit]

    def _by_hand(self, x, y):
        loss, gradients = self.grad_fn(x, y)
        return ops.depend(loss, self.accumulator(gradients, x.shape[0]))

    def start_over(self):
        for parameter, value in self._first:
            ops.assign(parameter, Tensor(value))
        self.accumulator.countdown.take()

    def oracle(self):
        return Oracle(values(self.network.trainable_params()), reference.SGD(0.1, 0.9), self.windows, "mean", 0.5, self.on_nonfinite)

    def train(self, x, y):
        """One microbatch by the driver."""
        ms.set_context(mode=self.mode)
        try:
            return self.step(*tensors(x, y))
        finally:
            ms.set_context(mode=ms.PYNATIVE_MODE)

    def add_by_hand(self, x, y):
        """One microbatch without the driver, op by op."""
        return self.accumulator(self.grad_fn(*tensors(x, y))[1], float(len(x)))
