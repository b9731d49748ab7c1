"""The drivers: all ways to give microbatches to an accumulator. The tests also compare whole runs with them."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any, Optional

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops

from ms_accum import Accumulator, TrainOneStepCell, make_train_step

from ..distributed.ranks import world_size
from .modes import running


class Driver:
    """Build an accumulator and drive it. A driver is a context manager, in which its calls are made.

    Args:
        name: "hand", "step" or "cell" (or "model", a cell); then how it runs: "-jit" or nothing, "-graph" (in graph
            mode) or "-pynative".
        forward_fn: Function that returns the loss of a batch; a Cell for "cell".
        optimizer, accumulate_step, reduction, settings: Of the accumulator; `settings` are its options by name.
        weight_fn: Function that returns the weight of a microbatch. None: its number of samples.
        divisor: By hand, the divisor of gradients, as `reduction="sum"` requires it.
        options: Options of `make_train_step`.
    """

    def __init__(self, name: str, forward_fn: Callable, optimizer: nn.Optimizer, accumulate_step: Any,
                 weight_fn: Optional[Callable] = None, divisor: float = 1.0, reduction: str = "mean",
                 settings: Optional[dict[str, Any]] = None, **options: Any) -> None:
        self.kind, self.mode = name.split("-") if "-" in name else (name, "jit")
        self.forward_fn, self.weight_fn, self.divisor = forward_fn, weight_fn, divisor
        self.is_by_hand, settings = self.kind == "hand", settings or {}
        if self.is_by_hand:
            self.accumulator = Accumulator(optimizer, accumulate_step, reduction=reduction, **settings)
        elif self.kind in ("cell", "model"):
            taken = {key: options[key] for key in ("batch_axis", "has_weight", "loss_reduction") if key in options}
            self.step: Any = TrainOneStepCell(forward_fn, optimizer, accumulate_step, weight_fn=weight_fn, **taken,
                                              **settings)
        else:
            self.step = make_train_step(forward_fn, optimizer, accumulate_step, weight_fn=weight_fn,
                                        eager=self.mode == "pynative", **options, **settings)
        self.build()

    def build(self) -> None:
        """By hand, let later calls compile again. A step or a cell does that by itself."""
        if self.is_by_hand:
            self.step, self._flush_by_hand, self._empty_by_hand = map(
                self._as_it_runs, (self._by_hand(), self._close, self._add_nothing))
        else:
            self.accumulator = self.step.accumulator

    def __enter__(self) -> Driver:
        self._context = running(self.mode)
        self._context.__enter__()
        return self

    def __exit__(self, *raised: Any) -> Optional[bool]:
        return self._context.__exit__(*raised)

    def __call__(self, *batch: np.ndarray) -> Any:
        """Train on a microbatch of arrays. By hand, nothing is differentiated if it is empty."""
        if self.is_by_hand and not len(batch[0]):
            loss = self._empty_by_hand()
        else:
            loss = self.step(*map(Tensor, batch))
        if self.is_by_hand:
            self.accumulator.require_progress()
        return loss

    def flush(self) -> bool:
        """Apply the incomplete window if one is open. Return whether a window was closed."""
        if not self.is_by_hand:
            return bool(self.step.flush())
        if self.mode == "pynative" or world_size() > 1:
            return self.accumulator.flush()
        closed = bool(self._flush_by_hand())
        self.accumulator.require_progress()
        return closed

    def _close(self) -> Tensor:
        return self.accumulator.close_if(self.accumulator.mini_step > 0)

    def _add_nothing(self) -> Tensor:
        return ops.depend(Tensor(0.0), self.accumulator(self.accumulator.weights, 0.0))

    def _as_it_runs(self, function: Callable) -> Callable:
        return function if self.mode == "pynative" else ms.jit(function)

    def _by_hand(self) -> Callable:
        accumulator, forward_fn, divisor = self.accumulator, self.forward_fn, self.divisor
        weight_fn = self.weight_fn

        def scaled(*batch: Tensor) -> tuple[Tensor, Tensor]:
            loss = forward_fn(*batch)
            return accumulator.scaled(loss), loss

        grad_fn = ms.value_and_grad(scaled, None, accumulator.weights, has_aux=True)

        def train_step(*batch: Tensor) -> Tensor:
            (_, loss), grads = grad_fn(*batch)
            if divisor != 1:
                grads = tuple([g / divisor for g in grads])
            weight = batch[0].shape[0] if weight_fn is None else weight_fn(*batch)
            return ops.depend(loss, accumulator(grads, weight))

        return train_step
