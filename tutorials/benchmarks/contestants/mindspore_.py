"""Contestants in MindSpore: ours, the floor below them, and the ways in use, each written after its behaviour."""
from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import mindspore as ms
import networks
import numpy as np
from case import Case
from mindspore import Parameter, Tensor, boost, nn, ops
from mindspore.parallel.nn import GradAccumulation

from ms_accum import Accumulator, avoid_busy_waiting, make_train_step
from ms_accum.boundary import Boundary
from ms_accum.straight import compiled

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

    `closing() -> close`, where the update is a graph of its own: a dry run's counters stay 0, so that no call gets to it.
    """

    call: Callable
    state: tuple[Parameter, ...] = ()
    whole_window: bool = False
    updates: bool = True
    closing: Callable[[], Callable] = lambda: lambda: None


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
        return [p.asnumpy() for p in self.trained] if self.way.updates else []

    def state_bytes(self) -> int:
        return sum(p.nbytes for p in self.way.state)

    def device_peak(self, batch: int) -> int:
        """Bytes on the device at the peak of a window: a call, and what closes the window. Before the network, a process holds none.

        Of the second window, when the optimizer's state is there.
        """
        self.load(batch, distinct=False)
        close = self.way.closing()
        for _ in range(2):
            ms.runtime.synchronize()
            ms.runtime.reset_max_memory_allocated()
            self.call(*self.batches[0])
            close()
        ms.runtime.synchronize()
        return ms.runtime.max_memory_allocated()


# --- the floor: what no way of accumulating can avoid ---------------------------------------------------------------------


def floor(start: Start) -> Way:
    """Forward and backward in a straight line."""
    grad_fn = start.grad_fn()

    @ms.jit
    def forward_backward(x: Tensor, y: Tensor) -> Tensor:
        loss, grads = grad_fn(x, y)
        return ops.depend(loss, grads)

    return Way(forward_backward, updates=False)


def floor_branch(start: Start) -> Way:
    """The same in a graph with a branch that is never taken: MindSpore runs such graphs in another way, at times a faster one."""
    grad_fn = start.grad_fn()
    never = Parameter(Tensor(0, ms.int32), name="never")

    @ms.jit
    def forward_backward(x: Tensor, y: Tensor) -> Tensor:
        loss, grads = grad_fn(x, y)
        loss = ops.depend(loss, grads)
        if never > 0:
            ops.assign(never, 0)
        return loss

    return Way(forward_backward, updates=False)


def forward(start: Start) -> Way:
    """Forward alone: a floor that is no dearer than this has lost its gradients."""
    forward_fn = start.forward_fn

    @ms.jit
    def forward_only(x: Tensor, y: Tensor) -> Tensor:
        return forward_fn(x, y)

    return Way(forward_only, updates=False)


# --- limits: what the framework takes for each part of accumulation, without our library -------------------------------------


def write_only(start: Start) -> Way:
    """Each gradient written over the last one, and no update."""
    return _stored(start, ops.assign)


def add_only(start: Start) -> Way:
    """Each gradient added to a buffer, and no update: no accumulation into buffers can do less."""
    return _stored(start, ops.assign_add)


def _stored(start: Start, store: Callable) -> Way:
    """In a graph with a branch, as floor_branch: in a straight line both took 1.2 x as long."""
    grad_fn, sums = start.grad_fn(), networks.zero_buffers(start.parameters, "sums")
    never = Parameter(Tensor(0, ms.int32), name="never")

    @ms.jit
    def forward_backward(x: Tensor, y: Tensor) -> Tensor:
        loss, grads = grad_fn(x, y)
        for total, grad in zip(sums, grads):
            store(total, grad)
        if never > 0:
            ops.assign(never, 0)
        return loss

    return Way(forward_backward, (*sums,), updates=False)


def update_only(start: Start) -> Way:
    """What closes a window, SGD on the buffers and emptying them in place, without any microbatch; a call is a window.

    In a graph with a branch, as floor_branch: in a straight line it took 1.2 x as long.
    """
    one_buffer = OneBuffer(start.optimizer, start.pieces)
    never = Parameter(Tensor(0, ms.int32), name="never")

    @ms.jit
    def update() -> Tensor:
        closed = one_buffer.close()
        if never > 0:
            ops.assign(never, 0)
        return ops.depend(one_buffer.zero + 0.0, closed)

    return Way(lambda x, y: update(), (*one_buffer.sums,), whole_window=True, updates=False)


def loop_add_only(start: Start) -> Way:
    """A window in one call, cut by a loop that stays one in the graph: rows gathered, each gradient added, and no update."""
    grad_fn, sums, pieces = start.grad_fn(), networks.zero_buffers(start.parameters, "sums"), start.pieces

    @ms.jit
    def forward_backward(x: Tensor, y: Tensor) -> Tensor:
        rows = x.shape[0] // pieces
        loss, piece = Tensor(0.0, ms.float32), Tensor(0, ms.int32)
        while piece < pieces:
            chosen = piece * rows + ops.arange(rows)
            piece_loss, grads = grad_fn(ops.gather(x, chosen, 0), ops.gather(y, chosen, 0))
            for total, grad in zip(sums, grads):
                ops.assign_add(total, grad)
            loss = loss + piece_loss
            piece = piece + 1
        return loss

    return Way(forward_backward, (*sums,), whole_window=True, updates=False)


@ms.jit_class
class OneBuffer:
    """The least that half of the tutorial's memory takes: sums emptied in place, a counter, one branch; the script divides its loss."""

    def __init__(self, optimizer: nn.Optimizer, pieces: int) -> None:
        self.optimizer = optimizer
        self.pieces = pieces
        self.sums = networks.zero_buffers(optimizer.parameters, "sums")
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
        return self.empty()

    def empty(self) -> bool:
        for total in self.sums:
            ops.assign(total, self.multiply(total, self.zero))
        return True


def one_buffer(start: Start) -> Way:
    accumulator = OneBuffer(start.optimizer, start.pieces)
    call = _called_with_gradients(start.grad_fn(start.pieces), accumulator)
    return Way(call, (*accumulator.sums, accumulator.zero, accumulator.counter))


@ms.jit_class
class OneBufferMean(OneBuffer):
    """The same with exact means: the weights are added up, and one factor is multiplied in on the way into the optimizer."""

    def __init__(self, optimizer: nn.Optimizer, pieces: int) -> None:
        super().__init__(optimizer, pieces)
        self.weight = Parameter(Tensor(0.0, ms.float32), name="weight")

    def close(self) -> bool:
        factor = 1.0 / self.weight
        means = ()
        for total in self.sums:
            means = (*means, total * factor)
        self.optimizer(means)
        ops.assign(self.weight, 0.0)
        return self.empty()


def one_buffer_mean(start: Start) -> Way:
    """Each loss counts the samples it is the mean of, before the backward pass."""
    accumulator = OneBufferMean(start.optimizer, start.pieces)
    forward_fn = start.forward_fn

    def weighted(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        loss = forward_fn(x, y)
        return loss * x.shape[0], loss

    grad_fn = ms.value_and_grad(weighted, None, start.parameters, has_aux=True)

    @ms.jit
    def train_step(x: Tensor, y: Tensor) -> Tensor:
        (_, loss), grads = grad_fn(x, y)
        ops.assign_add(accumulator.weight, float(x.shape[0]))
        return ops.depend(loss, accumulator(grads))

    return Way(train_step, (*accumulator.sums, accumulator.zero, accumulator.counter, accumulator.weight))


# --- ours ------------------------------------------------------------------------------------------------------------------


def split(start: Start, on_nonfinite: str = "apply") -> Way:
    acc = Accumulator(start.optimizer, start.pieces, reduction="mean", on_nonfinite=on_nonfinite)
    return Way(make_train_step(start.forward_fn, acc), tuple(acc.parameters), closing=lambda: Boundary(acc, compiled).close)


def split_in_step(start: Start) -> Way:
    """Cut each microbatch if the case says into how many pieces, or else the window as one batch."""
    whole_window = start.cut == 1
    accumulate_step, pieces = (1, start.pieces) if whole_window else (start.pieces, start.cut)
    acc = Accumulator(start.optimizer, accumulate_step, reduction="mean")
    return Way(make_train_step(start.forward_fn, acc, pieces=pieces), tuple(acc.parameters), whole_window,
               closing=lambda: Boundary(acc, compiled).close)


def bare(start: Start) -> Way:
    """The accumulator alone, as in a script of the tutorial."""
    acc = Accumulator(start.optimizer, start.pieces)
    return Way(_called_with_gradients(start.grad_fn(start.pieces), acc), tuple(acc.parameters))


def _called_with_gradients(grad_fn: Callable, accumulator: Callable) -> Callable:
    @ms.jit
    def train_step(x: Tensor, y: Tensor) -> Tensor:
        loss, grads = grad_fn(x, y)
        return ops.depend(loss, accumulator(grads))

    return train_step


# --- the ways in use -------------------------------------------------------------------------------------------------------


def undivided(start: Start) -> Way:
    """No accumulation: the window as one batch."""
    return Way(_called_with_gradients(start.grad_fn(), start.optimizer), whole_window=True)


def unrolled(start: Start) -> Way:
    """The naive loop inside the compiled function: Python's `for`, which the compiler unrolls."""
    grad_fn, optimizer, pieces = start.grad_fn(), start.optimizer, start.pieces

    @ms.jit
    def train_step(x: Tensor, y: Tensor) -> Tensor:
        rows = x.shape[0] // pieces
        loss, sums = grad_fn(x[:rows], y[:rows])
        for i in range(1, pieces):
            piece_loss, grads = grad_fn(x[i * rows:(i + 1) * rows], y[i * rows:(i + 1) * rows])
            loss = loss + piece_loss
            added = ()
            for total, grad in zip(sums, grads):
                added = (*added, total + grad)
            sums = added
        means = ()
        for total in sums:
            means = (*means, total / pieces)
        return ops.depend(loss, optimizer(means))

    return Way(train_step, whole_window=True)


@ms.jit_class
class TwoBuffers:
    """The tutorial's accumulator in behaviour: sums, and as many zeros to clear them with; a counter that only grows."""

    def __init__(self, optimizer: nn.Optimizer, pieces: int) -> None:
        self.optimizer = optimizer
        self.pieces = pieces
        self.sums = networks.zero_buffers(optimizer.parameters, "sums")
        self.zeros = networks.zero_buffers(optimizer.parameters, "zeros")
        self.counter = Parameter(Tensor(1, ms.int32), name="counter")

    def __call__(self, grads: tuple) -> bool:
        for total, grad in zip(self.sums, grads):
            ops.assign_add(total, grad)
        if self.counter % self.pieces == 0:
            self.optimizer(self.sums)
            for total, zero in zip(self.sums, self.zeros):
                ops.assign(total, zero)
        ops.assign_add(self.counter, 1)
        return True


def tutorial(start: Start) -> Way:
    two_buffers = TwoBuffers(start.optimizer, start.pieces)
    call = _called_with_gradients(start.grad_fn(start.pieces), two_buffers)
    return Way(call, (*two_buffers.sums, *two_buffers.zeros, two_buffers.counter))


def wrong_denominator(start: Start) -> Way:
    """A negative control for the agreement check: the tutorial's accumulator, in a script that forgets to divide its loss."""
    two_buffers = TwoBuffers(start.optimizer, start.pieces)
    return Way(_called_with_gradients(start.grad_fn(), two_buffers), (*two_buffers.sums, *two_buffers.zeros, two_buffers.counter))


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
    """`mindspore.parallel.nn.GradAccumulation` in a TrainOneStepCell; it sums the pieces' losses, so that they are divided here."""
    network = GradAccumulation(MeanLoss(start.network, start.pieces), start.pieces)
    return Way(ms.jit(nn.TrainOneStepCell(network, start.optimizer)), whole_window=True)


class ScaledTrainStep(nn.Cell):
    """What MindCV's and MindONE's cells have in common: a loss scale, each gradient unscaled and divided, flags for the rest.

    Their clipping is off here: MindCV clips each microbatch, which no undivided batch agrees with.
    """

    def __init__(self, start: Start, prefix: str) -> None:
        super().__init__(auto_prefix=False)
        self.network = MeanLoss(start.network)
        self.optimizer = start.optimizer
        self.weights = start.parameters
        self.pieces = start.pieces
        self.grad = ops.GradOperation(get_by_list=True, sens_param=True)
        self.scale = Parameter(Tensor(1.0, ms.float32), name=f"{prefix}.scale")
        self.sums = networks.zero_buffers(start.parameters, f"{prefix}.sums")
        self.filled = Parameter(Tensor(0, ms.int32), name=f"{prefix}.filled")
        self.clip = False
        self.ema = False

    def unscaled_gradients(self, loss: Tensor, x: Tensor, y: Tensor) -> tuple:
        grads = self.grad(self.network, self.weights)(x, y, ops.ones_like(loss) * self.scale)
        unscaled = ()
        for grad in grads:
            unscaled = (*unscaled, grad * ops.reciprocal(self.scale))
        return unscaled

    def add(self, grads: tuple) -> bool:
        for total, grad in zip(self.sums, grads):
            ops.assign_add(total, grad / self.pieces)
        return True

    def clear(self) -> bool:
        for total in self.sums:
            ops.assign(total, ops.zeros_like(total))
        return True


class MindCVStyle(ScaledTrainStep):
    """Clip each microbatch if asked, add, update at the boundary; the learning rate is looked up at every microbatch."""

    def construct(self, x: Tensor, y: Tensor) -> Tensor:
        loss = self.network(x, y)
        grads = self.unscaled_gradients(loss, x, y)
        if self.clip:
            grads = ops.clip_by_global_norm(grads, 15.0)
        loss = ops.depend(loss, self.add(grads))
        self.filled += 1
        if self.filled >= self.pieces:
            loss = ops.depend(loss, self.optimizer(self.sums))
            loss = ops.depend(loss, self.clear())
            self.filled = 0
        else:
            loss = ops.depend(loss, self.optimizer.get_lr())
        return loss


class MindONEStyle(ScaledTrainStep):
    """Add unless gradients overflow (unchecked on CPU), clip the window's gradient if asked, update at the boundary."""

    def construct(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        loss = self.network(x, y)
        grads = self.unscaled_gradients(loss, x, y)
        overflow = Tensor(False)
        if not overflow:
            loss = ops.depend(loss, self.add(grads))
            loss = ops.depend(loss, ops.assign_add(self.filled, Tensor(1, ms.int32)))
            if self.filled >= self.pieces:
                grads = self.sums
                if self.clip:
                    grads = ops.clip_by_global_norm(grads, 1.0)
                loss = ops.depend(loss, self.optimizer(grads))
                loss = ops.depend(loss, self.clear())
                loss = ops.depend(loss, ops.assign(self.filled, Tensor(0, ms.int32)))
            else:
                loss = ops.depend(loss, self.optimizer.get_lr())
        return loss, overflow, self.scale


def mindcv_style(start: Start) -> Way:
    cell = MindCVStyle(start, "mindcv")
    return Way(ms.jit(cell), (*cell.sums, cell.filled))


def mindone_style(start: Start) -> Way:
    cell = MindONEStyle(start, "mindone")
    compiled = ms.jit(cell)

    def train_step(x: Tensor, y: Tensor) -> Tensor:
        return compiled(x, y)[0]

    return Way(train_step, (*cell.sums, cell.filled))


CONTESTANTS = {name: partial(MindSpore, way) for name, way in {
    "floor": floor,
    "floor-branch": floor_branch,
    "forward": forward,
    "write-only": write_only,
    "add-only": add_only,
    "update-only": update_only,
    "loop-add-only": loop_add_only,
    "one-buffer": one_buffer,
    "one-buffer-mean": one_buffer_mean,
    "split": split,
    "split-again": split,
    "skip-window": partial(split, on_nonfinite="skip_window"),
    "skip-microbatch": partial(split, on_nonfinite="skip_microbatch"),
    "split-in-step": split_in_step,
    "bare": bare,
    "undivided": undivided,
    "unrolled": unrolled,
    "tutorial": tutorial,
    "boost": boost_accumulation,
    "parallel-nn": parallel_nn,
    "mindcv-style": mindcv_style,
    "mindone-style": mindone_style,
    "wrong-denominator": wrong_denominator,
}.items()}
