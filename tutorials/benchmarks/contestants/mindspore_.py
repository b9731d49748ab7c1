"""Contestants in MindSpore: ours, and the ways in use, each written after its behaviour."""
from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import mindspore as ms
import networks
import numpy as np
from case import Case
from mindspore import Parameter, Tensor, boost, nn, ops
from mindspore.communication import get_rank
from mindspore.parallel.nn import GradAccumulation

from ms_accum import Accumulator, DataParallel, avoid_busy_waiting, make_train_step, until_weight
from ms_accum.batch_size import GradientNoiseScale

from .contract import Contestant


class Start(NamedTuple):
    """What every contestant starts from; `forward_fn(x, y)` is the mean loss."""

    network: nn.Cell
    forward_fn: Callable
    optimizer: nn.Optimizer
    pieces: int
    cut: int

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        return self.optimizer.parameters

    def grad_fn(self, divisor: int = 1) -> Callable:
        """`(x, y) -> (loss / divisor, its gradients)`."""
        forward_fn = self.forward_fn

        def divided(x: Tensor, y: Tensor) -> Tensor:
            return forward_fn(x, y) / divisor

        return ms.value_and_grad(forward_fn if divisor == 1 else divided, None, self.parameters)


class Way(NamedTuple):
    """How a contestant trains: a call `(x, y) -> loss`, what it keeps from call to call, and what a call takes.

    `close`, where the update is a graph of its own: a dry run's counters stay 0, so that no call gets to it.
    """

    call: Callable
    state: tuple[Parameter, ...] = ()
    whole_window: bool = False
    close: Callable = lambda: None


class MindSpore(Contestant):
    """A way as a contestant."""

    def __init__(self, way: Callable[[Start], Way], case: Case) -> None:
        super().__init__(case)
        avoid_busy_waiting()
        if "MS_SIMULATION_LEVEL" in os.environ:
            ms.set_device("Ascend")
            # With one thread, as MindSpore takes on two cores, Ascend's backend compiles no graph with a branch.
            ms.runtime.dispatch_threads_num(6)
        network = networks.build(case)
        loss_fn = nn.CrossEntropyLoss()

        def forward_fn(x: Tensor, y: Tensor) -> Tensor:
            return loss_fn(network(x), y)

        optimizer = getattr(nn, case.optimizer)(network.trainable_params(), case.lr)
        self.way = way(Start(network, forward_fn, optimizer, case.accumulate_step, case.cut))
        self.trained = network.trainable_params()
        self.whole_window = self.way.whole_window
        self.smallest = min(self.trained, key=lambda p: p.size)

    def batch(self, inputs: np.ndarray, labels: np.ndarray) -> tuple[Tensor, Tensor]:
        return Tensor.from_numpy(inputs), Tensor.from_numpy(labels)

    def call(self, inputs: Tensor, labels: Tensor) -> Tensor:
        return self.way.call(inputs, labels)

    def wait(self, loss: Tensor) -> None:
        loss.asnumpy()
        self.smallest.asnumpy()

    def parameters(self) -> list[np.ndarray]:
        return [p.asnumpy() for p in self.trained]

    def state_bytes(self) -> int:
        return sum(p.nbytes for p in self.way.state)

    def plan(self, batch: int) -> dict[str, int]:
        """Bytes on the device at the peak of a window, and how many parameters there are.

        Before the network, a process holds none. Of the second window, when the optimizer's state is there: a call, and
        what closes the window.
        """
        self.load(batch, distinct=False)
        for _ in range(2):
            ms.runtime.synchronize()
            ms.runtime.reset_max_memory_allocated()
            self.call(*self.batches[0])
            self.way.close()
        ms.runtime.synchronize()
        return {"peak": ms.runtime.max_memory_allocated(), "parameters": sum(p.size for p in self.trained)}


# --- ours -------------------------------------------------------------------------------------------------------------


def ms_accum(start: Start, **options: object) -> Way:
    return _ours(start, start.pieces, 1, **options)


def ms_accum_weights(start: Start, is_sum: bool) -> Way:
    """With the number of labels as weight; `is_sum`: of the sum over the labels."""
    forward_fn = start.forward_fn

    def count(x: Tensor, y: Tensor) -> Tensor:
        return (y >= 0).sum()

    def summed(x: Tensor, y: Tensor) -> Tensor:
        return forward_fn(x, y) * count(x, y)

    step = make_train_step(summed if is_sum else forward_fn, start.optimizer, start.pieces, weight_fn=count,
                           loss_reduction="sum" if is_sum else "mean")
    return Way(step, state_of(step))


def ms_accum_budget(start: Start) -> Way:
    """Windows by their number of samples."""
    forward_fn, optimizer = start.forward_fn, start.optimizer
    steps: list[Callable] = []

    def call(x: Tensor, y: Tensor) -> Tensor:
        if not steps:
            steps.append(make_train_step(forward_fn, optimizer, until_weight(start.pieces * len(x))))
        return steps[0](x, y)

    return Way(call)


def ms_accum_pieces(start: Start) -> Way:
    """Cut each microbatch if the case says into how many pieces, or else the window as one batch."""
    return _ours(start, start.pieces, start.cut) if start.cut > 1 else _ours(start, 1, start.pieces, whole_window=True)


def _ours(start: Start, accumulate_step: int, pieces: int, whole_window: bool = False, **options: object) -> Way:
    step = make_train_step(start.forward_fn, start.optimizer, accumulate_step, pieces=pieces, **options)
    return Way(step, state_of(step), whole_window, close=step.boundary.close)


def state_of(step: Any) -> tuple[Parameter, ...]:
    """What a train step or an accumulator keeps from call to call."""
    window = step.boundary.window
    return (*window.buffers, window.counts, window.sums, window.zero, *window.state.values())


def by_hand(start: Start) -> Way:
    """The accumulator alone, as in a script of the tutorial."""
    acc = Accumulator(start.optimizer, start.pieces, reduction="sum")
    return Way(train_step_with(acc, start.grad_fn(start.pieces)), state_of(acc))


class Rank(MindSpore):
    """One of several processes, each with its part of every window: every `case.ranks`-th sample."""

    def __init__(self, reducer: DataParallel, case: Case) -> None:
        super().__init__(partial(ms_accum, reducer=reducer), case)

    def samples(self, count: int) -> tuple[np.ndarray, np.ndarray]:
        return tuple(array[get_rank()::self.case.ranks] for array in super().samples(count * self.case.ranks))


# --- the ways in use --------------------------------------------------------------------------------------------------


def undivided(start: Start) -> Way:
    """No accumulation: the window as one batch."""
    return Way(train_step_with(start.optimizer, start.grad_fn()), whole_window=True)


def train_step_with(accumulator: Callable, grad_fn: Callable) -> Callable:
    """The compiled train step `(x, y) -> loss` of a script that adds its gradients by hand."""
    @ms.jit
    def train_step(x: Tensor, y: Tensor) -> Tensor:
        loss, grads = grad_fn(x, y)
        return ops.depend(loss, accumulator(grads))

    return train_step


@ms.jit_class
class TwoBuffers:
    """As in MindSpore's tutorial: sums, zeros to clear them, a counter that only grows; the script divides its loss."""

    def __init__(self, optimizer: nn.Optimizer, length: int) -> None:
        self.optimizer, self.length = optimizer, length
        self.sums = optimizer.parameters.clone("sums", init="zeros")
        self.zeros = optimizer.parameters.clone("zeros", init="zeros")
        self.counter = Parameter(Tensor(1, ms.int32), name="counter")

    def __call__(self, grads: tuple) -> bool:
        for total, grad in zip(self.sums, grads):
            ops.assign_add(total, grad)
        if self.counter % self.length == 0:
            self.optimizer(self.sums)
            for total, zero in zip(self.sums, self.zeros):
                ops.assign(total, zero)
        ops.assign_add(self.counter, 1)
        return True


@ms.jit_class
class OneBuffer:
    """The least that half of the tutorial's memory takes: sums emptied in place; the script divides its loss."""

    def __init__(self, optimizer: nn.Optimizer, pieces: int) -> None:
        self.optimizer = optimizer
        self.pieces = pieces
        self.sums = optimizer.parameters.clone("sums", init="zeros")
        self.zero = Parameter(Tensor(0.0, ms.float32), name="zero")
        self.counter = Parameter(Tensor(1, ms.int32), name="counter")
        self.multiply = ops.MulNoNan()

    def __call__(self, grads: tuple) -> bool:
        for total, grad in zip(self.sums, grads):
            ops.assign_add(total, grad)
        if self.counter % self.pieces == 0:
            self.close()
        ops.assign_add(self.counter, 1)
        return True

    def close(self) -> bool:
        self.optimizer(self.sums)
        for total in self.sums:
            ops.assign(total, self.multiply(total, self.zero))
        return True


def one_buffer(start: Start) -> Way:
    accumulator = OneBuffer(start.optimizer, start.pieces)
    call = train_step_with(accumulator, start.grad_fn(start.pieces))
    return Way(call, (*accumulator.sums, accumulator.zero, accumulator.counter))


def tutorial(start: Start, divided: bool = True) -> Way:
    """If not divided, a negative control for the agreement check: the script forgets to divide its loss."""
    two_buffers = TwoBuffers(start.optimizer, start.pieces)
    call = train_step_with(two_buffers, start.grad_fn(start.pieces if divided else 1))
    return Way(call, (*two_buffers.sums, *two_buffers.zeros, two_buffers.counter))


def boost_accumulation(start: Start) -> Way:
    """`mindspore.boost.GradientAccumulation`, which divides each microbatch itself."""
    grad_fn = start.grad_fn()
    accumulation = boost.GradientAccumulation(start.pieces, start.optimizer)

    @ms.jit
    def train_step(x: Tensor, y: Tensor) -> Tensor:
        loss, grads = grad_fn(x, y)
        return accumulation(loss, grads)

    return Way(train_step, tuple(p for p in accumulation.get_parameters() if "accumulation" in p.name))


class MeanLoss(nn.Cell):
    """A network and its loss as one Cell, for wrappers that want a Cell; divided, for those that only sum up."""

    def __init__(self, network: nn.Cell, divisor: int = 1) -> None:
        super().__init__(auto_prefix=False)
        self.network = network
        self.loss_fn = nn.CrossEntropyLoss()
        self.divisor = divisor

    def construct(self, x: Tensor, y: Tensor) -> Tensor:
        return self.loss_fn(self.network(x), y) / self.divisor


def parallel_nn(start: Start) -> Way:
    """`mindspore.parallel.nn.GradAccumulation` in a TrainOneStepCell; it sums the losses, which are divided here."""
    network = GradAccumulation(MeanLoss(start.network, start.pieces), start.pieces)
    return Way(ms.jit(nn.TrainOneStepCell(network, start.optimizer)), whole_window=True)


def mindcv(start: Start) -> Way:
    """MindCV's cell, without clipping: it clips each microbatch, which no undivided batch agrees with."""
    from mindcv.utils import TrainStep

    network, scale = MeanLoss(start.network), Tensor(1.0, ms.float32)
    cell = TrainStep(network, start.optimizer, scale, gradient_accumulation_steps=start.pieces)
    return Way(ms.jit(cell), tuple(p for p in cell.get_parameters() if "accumulation" in p.name))


CONTESTANTS = {name: partial(MindSpore, way) for name, way in {
    "one-buffer": one_buffer,
    "ms_accum": ms_accum,
    "ms_accum-again": ms_accum,
    "ms_accum-sums": partial(ms_accum_weights, is_sum=True),
    "ms_accum-weights": partial(ms_accum_weights, is_sum=False),
    "ms_accum-budget": ms_accum_budget,
    "ms_accum-noise-scale": lambda start: ms_accum(start, stages=(GradientNoiseScale(),)),
    "ms_accum-clip": partial(ms_accum, clip_norm=1e9),
    "ms_accum-skip-window": partial(ms_accum, on_nonfinite="skip_window"),
    "ms_accum-skip-microbatch": partial(ms_accum, on_nonfinite="skip_microbatch"),
    "ms_accum-pieces": ms_accum_pieces,
    "ms_accum-by-hand": by_hand,
    "undivided": undivided,
    "tutorial": tutorial,
    "boost": boost_accumulation,
    "parallel-nn": parallel_nn,
    "mindcv": mindcv,
    "wrong-denominator": partial(tutorial, divided=False),
}.items()} | {name: partial(Rank, reducer) for name, reducer in {
    "window": DataParallel(),
    "microbatch": DataParallel(sync="microbatch"),
}.items()}
