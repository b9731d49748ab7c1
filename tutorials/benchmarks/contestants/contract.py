"""What every contestant can do: the harness knows no more of it."""
from __future__ import annotations

from abc import ABC, abstractmethod
from time import perf_counter
from typing import Any

import numpy as np
from case import Case, samples

# Seconds beside which cold caches do not count.
LONG = 0.5


class Contestant(ABC):
    """Trains a network on windows.

    Attributes:
        whole_window: Whether a call takes a window as one batch; otherwise a call takes one microbatch.
        first_window: Seconds that the first window of `agree` took, compiling included.
        last_window: Seconds of its last one.
    """

    whole_window = False
    first_window = last_window = 0.0

    def __init__(self, case: Case) -> None:
        self.case = case
        self.batches: list[tuple[Any, Any]] = []

    @abstractmethod
    def batch(self, inputs: np.ndarray, labels: np.ndarray) -> tuple[Any, Any]:
        """The framework's tensors of a batch."""

    @abstractmethod
    def call(self, inputs: Any, labels: Any) -> Any:
        """Train on one batch; a loss of any scale."""

    @abstractmethod
    def wait(self, loss: Any) -> None:
        """Return when all that was asked for is done: read the loss, and an updated parameter."""

    @abstractmethod
    def parameters(self) -> list[np.ndarray]:
        """In the order of `case.initial_weights`."""

    @abstractmethod
    def state_bytes(self) -> int:
        """Bytes of accumulated gradients and all that lives beside them from call to call; without the optimizer's."""

    def samples(self, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Inputs and labels of `count` samples to train on."""
        return samples(self.case, count)

    def load(self, batch: int, distinct: bool) -> None:
        """Take microbatches of `batch` samples: a window of them, or (as from a data loader) one, again and again."""
        pieces = self.case.accumulate_step if self.whole_window or distinct else 1
        rows = batch * pieces if self.whole_window else batch
        inputs, labels = self.samples(batch * pieces)
        self.batches = [self.batch(inputs[i:i + rows], labels[i:i + rows]) for i in range(0, len(labels), rows)]

    def run(self, microbatches: int) -> float:
        """Train on whole windows and wait for the end. Return the seconds that it took."""
        calls = microbatches // self.case.accumulate_step if self.whole_window else microbatches
        start = perf_counter()
        for i in range(calls):
            loss = self.call(*self.batches[i % len(self.batches)])
        self.wait(loss)
        return perf_counter() - start

    # --- what the harness asks for ---

    def agree(self, windows: int) -> list[np.ndarray]:
        """Parameters after the first `windows` windows; empty if this contestant never updates."""
        self.load(self.case.batch, distinct=True)
        seconds = [self.run(self.case.accumulate_step) for _ in range(windows)]
        if seconds:
            self.first_window, self.last_window = seconds[0], seconds[-1]
        return self.parameters()

    def time(self, microbatches: int) -> float:
        """Seconds that `microbatches` take, caches being warm: a short window goes before them."""
        if self.last_window < LONG:
            self.run(self.case.accumulate_step)
        return self.run(microbatches)

    def state(self) -> dict[str, float]:
        """Bytes that accumulation keeps from call to call, bytes of the parameters, seconds of the first window."""
        return {"state_bytes": self.state_bytes(), "parameter_bytes": sum(p.nbytes for p in self.parameters()),
                "first_window": self.first_window}

    def peak(self, batch: int, windows: int) -> dict[str, int]:
        """Bytes of peak RSS of this process after training on microbatches of `batch` samples, and of its data."""
        self.load(batch, distinct=False)
        self.run(windows * self.case.accumulate_step)
        pieces = self.case.accumulate_step if self.whole_window else 1
        return {"peak": peak_rss(), "data": pieces * batch * int(np.prod(self.case.input_shape)) * 4}


def peak_rss() -> int:
    """Bytes, of this program alone; `ru_maxrss` starts with the peak of the process that launched it."""
    with open("/proc/self/status", encoding="ascii") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM:"))
