"""The drivers: all ways to give microbatches to an accumulator. The tests also compare whole runs with them."""
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Optional

import mindspore as ms
import numpy as np
from mindspore import Tensor, ops

from ms_accum import Accumulator, TrainOneStepCell, make_train_step

from ..distributed.ranks import world_size
from .modes import running


class Driver:
    """Drive an accumulator. A driver is a context manager, in which its calls are made.

    Args:
        name: "hand", "step" or "cell" (or "model", a cell); then how
            it runs: "-jit" or nothing, "-graph" (in graph mode) or "-pynative".
        accumulator: The accumulator that it drives.
        forward_fn: Function that returns the loss of a batch; a Cell for "cell".
        weight_fns: Functions that return the weight of a microbatch, used in turn. None: its number of samples.
        divisor: By hand, the divisor of gradients, as `reduction="sum"` requires it.
        options: Options of `make_train_step`.
    """

    def __init__(self, name: str, accumulator: Accumulator, forward_fn: Callable,
                 weight_fns: Sequence[Optional[Callable]] = (None,), divisor: float = 1.0, **options: Any) -> None:
        self.kind, self.mode = name.split("-") if "-" in name else (name, "jit")
        self.accumulator, self.forward_fn, self.divisor, self.options = accumulator, forward_fn, divisor, options
        self.weight_fns, self.calls, self.is_by_hand = weight_fns, 0, self.kind == "hand"
        self.build()

    def build(self) -> None:
        """Build the step again, so that later calls compile again."""
        self.steps: list[Any] = [self._step(weight_fn) for weight_fn in self.weight_fns]
        self._flush_by_hand = self._as_it_runs(self._close)
        self._empty_by_hand = self._as_it_runs(self._add_nothing)

    def __enter__(self) -> Driver:
        self._context = running(self.mode)
        self._context.__enter__()
        return self

    def __exit__(self, *raised: Any) -> Optional[bool]:
        return self._context.__exit__(*raised)

    def __call__(self, *batch: np.ndarray) -> Any:
        """Train on a microbatch of arrays. By hand, nothing is differentiated if it is empty."""
        self.calls += 1
        if self.is_by_hand and not len(batch[0]):
            loss = self._empty_by_hand()
        else:
            loss = self.steps[self.calls % len(self.steps)](*map(Tensor, batch))
        if self.is_by_hand:
            self.accumulator.require_progress()
        return loss

    def flush(self) -> bool:
        """Apply the incomplete window if one is open. Return whether a window was closed."""
        if not self.is_by_hand:
            return bool(self.steps[0].flush())
        if self.mode == "pynative" or world_size() > 1:
            return self.accumulator.flush()
        closed = bool(self._flush_by_hand())
        self.accumulator.require_progress()
        return closed

    def _close(self) -> Tensor:
        return self.accumulator.close_if(self.accumulator.mini_step > 0)

    def _add_nothing(self) -> Tensor:
        return ops.depend(Tensor(0.0), self.accumulator(self.accumulator.weights, 0.0))

    def _step(self, weight_fn: Optional[Callable]) -> Callable:
        if self.is_by_hand:
            return self._as_it_runs(self._by_hand(weight_fn))
        if self.kind in ("cell", "model"):
            return TrainOneStepCell(self.forward_fn, self.accumulator, batch_axis=self.options.get("batch_axis", 0),
                                    weight_fn=weight_fn, has_weight=self.options.get("has_weight", False),
                                    loss_reduction=self.options.get("loss_reduction", "mean"))
        return make_train_step(self.forward_fn, self.accumulator, weight_fn=weight_fn, eager=self.mode == "pynative",
                               **self.options)

    def _as_it_runs(self, function: Callable) -> Callable:
        return function if self.mode == "pynative" else ms.jit(function)

    def _by_hand(self, weight_fn: Optional[Callable]) -> Callable:
        accumulator, forward_fn, divisor = self.accumulator, self.forward_fn, self.divisor

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
