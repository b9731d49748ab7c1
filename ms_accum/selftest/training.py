"""Train a small network in each way of ms_accum, and in plain MindSpore on the undivided batch of each window."""
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Optional

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, amp, nn, ops

from ms_accum import Accumulator, TrainOneStepCell, make_train_step

from .comparing import relative, values
from .modes import running
from .networks import MLP, NO_TARGET, TargetLoss, batches

Windows = Sequence[Sequence[tuple]]  # of microbatches, which are arrays

# The ways to train, and how each runs: see `modes`.
DRIVERS = {"by hand, compiled": "jit", "by hand, op by op": "pynative", "train step": "jit",
           "train step, 2 pieces": "jit", "cell, graph mode": "graph", "cell, PyNative": "pynative"}
TOKENS = 14  # in each window of a sum, by which a script by hand divides its loss


class Plain:
    """Train parameters in plain MindSpore, op by op, with one update for each window. `losses`: of microbatches."""

    def __init__(self, loss_fn: Callable, parameters: Sequence[Parameter], windows: Windows,
                 clip_norm: float = np.inf) -> None:
        self.losses: list[float] = []
        with running("pynative"):
            optimizer, self.start = optimizer_of(parameters), values(parameters)
            gradients_of = ms.grad(loss_fn, None, optimizer.parameters)
            for window in windows:
                self.losses += [float(loss_fn(*map(Tensor, microbatch))) for microbatch in window]
                gradients = gradients_of(*(Tensor(np.concatenate(column)) for column in zip(*window)))
                norm = float(ops.sqrt(sum(ops.square(g.astype(ms.float32)).sum() for g in gradients)))
                factor = clip_norm / max(norm, clip_norm) if clip_norm < np.inf else 1.0
                optimizer(tuple((g.astype(ms.float32) * factor).astype(g.dtype) for g in gradients))
            self.end = values(parameters)

    def off(self, network: nn.Cell) -> float:
        """Return the error of a network's parameters, relative to how far plain training moved them."""
        moved = [end - start for start, end in zip(self.start, self.end)]
        assert 0 < sum((m**2).sum() for m in moved) < np.inf, \
            "plain training did not move the parameters, or not to numbers: the device computes nothing, or wrongly"
        return relative([p - start for start, p in zip(self.start, values(network.trainable_params()))], moved)


def optimizer_of(parameters: Sequence[Parameter]) -> nn.Optimizer:
    """Return Momentum, or for bfloat16 AdamWeightDecay, which a large epsilon makes nearly linear in the gradient."""
    if parameters[0].dtype == ms.bfloat16:
        return nn.AdamWeightDecay(list(parameters), learning_rate=5.0, eps=1.0)
    return nn.Momentum(list(parameters), learning_rate=0.5, momentum=0.9)


class Training:
    """Train with one of DRIVERS, in a dtype. For arguments that are not those of `make_train_step`, see below.

    Args:
        reduction, scale: Of the loss over its targets; the first value of a loss scaler, if any.
        trained, seed: What returns the parameters to train, given the network's; of the initial weights (plainly: 0).
    """

    def __init__(self, driver: str, dtype: str, length: int, reduction: str = "mean",
                 weight_fn: Optional[Callable] = None, scale: Optional[float] = None, trained: Callable = list,
                 seed: int = 0, **options: Any) -> None:
        self.length, self.mode, self.clip_norm = length, DRIVERS[driver], options.get("clip_norm", np.inf)
        self.network = MLP(seed=seed, dtype=getattr(ms, dtype))
        self.optimizer = optimizer = optimizer_of(trained(self.network.trainable_params()))
        self.scaler: Any = scale and amp.DynamicLossScaler(scale, 2, 1000)
        options["loss_scaler"], loss_fn = self.scaler, TargetLoss(self.network, reduction)
        own: dict[str, Any] = {"weight_fn": weight_fn, "loss_reduction": reduction, **options}
        with running(self.mode):
            if driver.startswith("by hand"):
                self.accumulator: Any = Accumulator(optimizer, length, reduction=reduction, **options)
                step = by_hand(self.accumulator, loss_fn, reduction == "sum", weight_fn)
                self.step = step if self.mode == "pynative" else ms.jit(step)
            elif driver.startswith("cell"):
                self.step = self.accumulator = TrainOneStepCell(loss_fn, optimizer, length, **own)
            else:
                self.step = self.accumulator = make_train_step(
                    loss_fn, optimizer, length, pieces=1 + ("2 pieces" in driver), eager=self.mode == "pynative", **own)
        self.window, self.status = self.accumulator.boundary.window, self.accumulator.boundary.status

    def learn(self, windows: Windows) -> list[Tensor]:
        """Train on microbatches, and apply a window that is incomplete. Return their losses."""
        with running(self.mode):
            returned = [self.step(*map(Tensor, microbatch)) for window in windows for microbatch in window]
            if len(returned) % self.length:
                assert self.accumulator.flush(), "flush() closed no window"
        return [loss[0] if isinstance(loss, tuple) else loss for loss in returned]  # a cell may also return an overflow

    def plainly(self, windows: Windows) -> Plain:
        """Train in plain MindSpore."""
        network = MLP(dtype=self.network.first.weight.dtype)
        return Plain(TargetLoss(network), network.trainable_params(), windows, self.clip_norm)


def by_hand(accumulator: Accumulator, loss_fn: Callable, is_sum: bool, weight_fn: Optional[Callable]) -> Callable:
    """Return the train step of a script that differentiates and adds by itself, and divides a sum."""
    def scaled(*batch: Tensor) -> tuple[Tensor, Tensor]:
        loss = loss_fn(*batch)
        return accumulator.scaled(loss / TOKENS if is_sum else loss), loss

    grad_fn = ms.value_and_grad(scaled, None, accumulator.weights, has_aux=True)

    def train_step(*batch: Tensor) -> Tensor:
        (_, loss), gradients = grad_fn(*batch)
        weight = 1.0 if is_sum else batch[0].shape[0] if weight_fn is None else weight_fn(*batch)
        return ops.depend(loss, accumulator(gradients, weight))

    train_step.__name__ += str(id(accumulator))  # MindSpore warns when a second function of one name is compiled
    return train_step


def samples(sizes: Sequence[int], seed: int, factor: int = 1) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return microbatches of these sizes, whose inputs are multiplied by `factor`."""
    return [((factor * x).astype(np.float32), y.astype(np.int32)) for x, y in batches(sizes, seed=seed)]


def texts(counts: Sequence[int], seed: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return microbatches of 3 texts of 4 tokens, with these numbers of targets."""
    return [(x.reshape(3, 4, 6), np.where(np.arange(12) < count, y, NO_TARGET).astype(np.int32).reshape(3, 4))
            for count, (x, y) in zip(counts, samples([12] * len(counts), seed))]


def spoilt(window: Sequence[tuple]) -> list[tuple]:
    """Return a window whose first microbatch holds only NaN."""
    (x, y), *rest = window
    return [(np.full_like(x, np.nan), y), *rest]
