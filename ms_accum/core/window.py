"""The open window on the device: the way of a gradient, from top to bottom.

    add:     weigh ─► exchange of each microbatch ─► buffers ─► sums ─► counts
    close:   exchange of the window ─► mean, clip ─► accepted? ─► scale ─► optimizer ─► clear ─► sums ─► counts

    buffer  += weight / unit * gradient                  # for equal microbatches 1 * gradient, without a product
    gradient = unit / max(sum of weights, min_weight) * buffer

All counts but `seen` are one int32 vector, and one assignment changes them together: an interrupt finds all of a
window's numbers or none. Once a gradient is computed, and before anything changes, a piece or a close adds a mark to
them; the last operation takes the mark away. So a mark that stays says what was begun and not finished.
"""
from __future__ import annotations

from collections.abc import Callable
from itertools import count
from math import nan
from typing import Any, Optional

import mindspore as ms
import numpy as np
from mindspore import Parameter, ParameterTuple, Tensor, ops

from ..distributed.exchange import OneDevice
from ..mindspore_api import isconstant, jit_class
from ..tensors import (
    Gradients,
    Numbers,
    Scalar,
    as_tensor,
    cast,
    cleared,
    clip_factor,
    divide_no_nan,
    mapped,
    norm_of,
    scaled,
    square_sum,
    stack,
    state_parameter,
    unstack,
)
from .kernels import kernels_for
from .length import WindowLength
from .optimizers import require_runnable
from .stages import Called, Stage

# Places in `counts`: the mark; microbatches in the open window, those of them that are this rank's, and this rank's in
# all; updates; windows closed; microbatches or windows skipped; windows dropped in a row; windows of weight 0.
COUNTS = "MARK", "HELD", "OWN", "ADDED", "UPDATES", "WINDOWS", "SKIPPED", "IN_ROW", "EMPTY"
MARK, HELD, OWN, ADDED, UPDATES, WINDOWS, SKIPPED, IN_ROW, EMPTY = range(9)
# Places in `sums`: of the open window its weight, weight / unit * loss, and pieces taken and skipped; of the last one
# its weight, mean loss and gradient norm; the fraction that `seen` lacks; then what stages measure of the open window.
WEIGHT, LOSS, TAKEN, SKIPS, LAST, MEAN, NORM, REST, MEASURED = range(9)
CLOSING, LOADING = -2**20, -2**22  # the marks of a close and of a load; those of pieces are small and positive
_numbers = count()


def change(**by: int) -> Tensor:
    """Return a constant to add to `counts`, e.g. `change(HELD=1)`."""
    return Tensor([by.get(name, 0) for name in COUNTS], ms.int32)


BEGIN, CLOSE = change(MARK=1), change(MARK=CLOSING)
END = change(MARK=-1, HELD=1, OWN=1, ADDED=1)  # of a microbatch in one piece
PART, HOLD = change(MARK=-1), change(MARK=-1, HELD=1)  # of a piece of other ranks; of their microbatch
# What a close keeps of the counts. (If an operator ran when the package is imported, no device could be set later.)
KEPT = change(MARK=1, ADDED=1, UPDATES=1, WINDOWS=1, SKIPPED=1, EMPTY=1)
APPLIED = change(MARK=-CLOSING, UPDATES=1, WINDOWS=1)
ALONE = change(MARK=-CLOSING - 1, ADDED=1, UPDATES=1, WINDOWS=1)  # with the mark of its piece
DROPPED = change(MARK=-CLOSING, WINDOWS=1, SKIPPED=1, IN_ROW=1)
NOTHING = Tensor(0.0, ms.float32)
NONE = (NOTHING,) * 4  # as many as there are sums of the open window, and of the last one
ONE_IN_ROW, ONE_SKIPPED, ONE_EMPTY = change(IN_ROW=1), change(SKIPPED=1), change(EMPTY=1)


@jit_class
class Window:
    """Add up gradients, and update. All methods but those for the host are compiled in graph mode.

    `is_sum`: whether the loss is a sum, so that gradients are added without their weight. `min_weight`: the least
    weight to divide by. `dtypes`: of the buffers; None: no buffers, for windows of one microbatch.

    Attributes:
        counts, sums: See above: int32 `(9,)` and float32 `(8 + measured,)`.
        seen: Sum of the weights of all updates, rounded: int64 `()`.
        zero: Always 0, which no graph knows: to clear buffers, and for a branch that is never taken.
        buffers: One for each parameter, in the optimizer's order.
        unit: The unit of weights, a constant of graphs: 1, or the samples of the first piece. None: not known yet.
        called: The stages that override each method.
        drops: Whether a window may be dropped.
        record: What clears the buffers and assigns a window's numbers, compiled also if all else runs op by op.
    """

    def __init__(self, optimizer: Callable, length: WindowLength, exchange: OneDevice, stages: tuple[Stage, ...],
                 reduction: str, is_sum: bool, clip_norm: Optional[float], min_weight: float,
                 dtypes: Optional[tuple[ms.Type, ...]]) -> None:
        self.optimizer, self.length, self.exchange, self.stages = optimizer, length, exchange, stages
        self.reduction, self.is_sum, self.clip_norm, self.min_weight = reduction, is_sum, clip_norm, min_weight
        prefix = f"accumulator{next(_numbers)}"  # in a graph, each name may be there once
        self.buffers = ParameterTuple([
            state_parameter(f"{prefix}.{p.name}", shape, dtype)
            for p, shape, dtype in zip(exchange.parameters, exchange.shapes, dtypes or ())])
        self.dtypes = tuple(p.dtype for p in exchange.parameters)
        self.kernels = kernels_for(exchange.parameters)
        measured = sum(stage.measures for stage in stages)
        self.counts = state_parameter(f"{prefix}.counts", (len(COUNTS),), ms.int32)
        self.sums = state_parameter(f"{prefix}.sums", (MEASURED + measured,), ms.float32)
        self.seen = state_parameter(f"{prefix}.seen", (), ms.int64)
        self.zero = state_parameter(f"{prefix}.zero", (), ms.float32)
        self.no_measures = (NOTHING,) * measured
        self.unit = 1.0 if reduction == "sum" or is_sum or exchange.sums_each else None  # type: Optional[float]
        for i, stage in enumerate(stages):
            stage.exchange = exchange
            stage.bind(f"{prefix}.stage{i}")
        self.called = Called(stages, LAST)
        self.drops = bool(self.called.weighing or self.called.judging)
        self.record = self._record  # type: Callable[..., Tensor]

    # --- a piece of a microbatch --------------------------------------------------------------------------------------

    def scale_loss(self, loss: Tensor) -> Tensor:
        """Return the value to differentiate."""
        for stage in self.called.scaling:
            loss = cast(loss, ms.float32) * stage.loss_scale()
        return loss

    def begin(self, computed: Tensor) -> Tensor:
        """Mark, once `computed` is, that a piece begins. What changes the window depends on the result."""
        return ops.assign_add(self.counts, ops.depend(BEGIN, computed))

    def factor_of(self, weight: Scalar) -> Scalar:
        """Return the factor of a piece's gradients in the buffers."""
        return 1.0 if self.is_sum else weight / (self.unit or 1.0)

    def add(self, gradients: Gradients, weight: Scalar, loss: Optional[Tensor], after: Tensor) -> None:
        """Add the gradients of a piece, then `after` to the counts. `loss`: the mean; with `is_sum`, the sum."""
        taken = 1.0  # type: Scalar
        for stage in self.called.weighing:
            weight, is_taken = stage.weigh(gradients, weight)
            taken = taken * is_taken
        factor = self.factor_of(weight) * taken
        numbers = (*self._numbers(weight, loss, factor, taken), *self._measured(gradients, weight))
        gradients, factor, numbers = self.exchange.each(gradients, factor, numbers)
        self.kernels.add(factor, self.buffers, gradients)
        self._count(numbers, after)

    def count_piece(self, weight: Scalar, loss: Tensor, after: Tensor) -> None:
        """Count a piece whose gradients are in the buffers."""
        self._count((*self._numbers(weight, loss, self.factor_of(weight), 1.0), *self.no_measures), after)

    def add_nothing(self, after: Tensor) -> Tensor:
        """Take part in a piece of other ranks, without data. Return the counts."""
        self.begin(self.zero)
        nothing = self.zero + 0
        numbers = (nothing, nothing, nothing, nothing, *self.no_measures)
        gradients, factor, numbers = self.exchange.each(self.nothing_of_parameters(), nothing, numbers)
        self.kernels.add(factor, self.buffers, gradients)
        self._count(numbers, after)
        return self.counts + 0

    def nothing_of_parameters(self) -> Gradients:
        """Return gradients of 0 for all parameters."""
        return mapped(cleared, self.zero, self.exchange.parameters)

    def _numbers(self, weight: Scalar, loss: Optional[Tensor], factor: Scalar, taken: Scalar) -> Numbers:
        total = NOTHING + nan if loss is None else cast(loss, ms.float32)  # by hand, the loop has the loss
        return weight, scaled(factor, total, ms.float32), taken, 1.0 - taken

    def _measured(self, gradients: Gradients, weight: Scalar) -> Numbers:
        measured, factor = (), 1.0  # type: tuple, Scalar
        for stage in self.called.scaling:
            factor = factor / stage.loss_scale()
        if self.is_sum:
            factor = divide_no_nan(as_tensor(factor), as_tensor(weight))
        for stage in self.called.measuring:
            measured = (*measured, *stage.measure(gradients, factor, weight))
        return measured

    def _count(self, numbers: Numbers, after: Tensor) -> None:
        entries = ()  # type: tuple
        for number in numbers:
            entries = (*entries, as_tensor(number))
        ops.assign_add(self.sums, stack((*entries[:LAST], *NONE, *entries[LAST:])))
        ops.assign_add(self.counts, after)

    # --- a window -----------------------------------------------------------------------------------------------------

    def is_full(self) -> Tensor:
        """Return whether the open window is full: bool `()`."""
        counts, sums = unstack(self.counts), unstack(self.sums)
        return self.length.is_full(counts[HELD], counts[UPDATES], sums[WEIGHT])

    def close(self) -> Tensor:
        """Update with the open window, or drop it if it is not accepted. Return a Tensor."""
        sums, gradients, unit = unstack(self.sums), self.buffers, self.unit or 1.0
        if len(gradients) == 0:  # of one microbatch, which is empty, or is another rank's
            gradients = self.nothing_of_parameters()
        numbers = (sums[WEIGHT], scaled(unit, sums[LOSS], ms.float32), sums[TAKEN], sums[SKIPS], *sums[MEASURED:])
        return self.update_with(gradients, unit, numbers, APPLIED)

    def alone(self, gradients: Gradients, weight: Scalar, loss: Tensor) -> Tensor:
        """Update with one microbatch, without buffers: in the unit `weight`, the factor is 1. Return a Tensor."""
        unit = 1.0 if self.is_sum else weight
        return self.update_with(gradients, unit, (weight, scaled(unit, loss, ms.float32), 1.0, 0.0), ALONE)

    def update_with(self, gradients: Gradients, unit: Scalar, numbers: Numbers, applied: Tensor) -> Tensor:
        """Exchange, normalise, clip, judge, update, clear and count. Return a Tensor.

        `applied`: the change of the counts by an update.
        """
        if isconstant(self.zero):  # op by op; `record` would be compiled for each number
            require_runnable(self.optimizer, True)
            numbers = tuple([as_tensor(number) for number in numbers])
        ops.assign_add(self.counts, ops.depend(CLOSE, gradients[-1]))
        gradients, unit, numbers = self.exchange.window(gradients, unit, numbers)
        weight = numbers[WEIGHT]  # not unpacked: MindSpore warns of a part that is not used
        # The loss scale goes into the factor: to divide each gradient first would need a copy of all of them.
        for stage in self.called.scaling:
            unit = unit / stage.loss_scale()
        factor = self._normalised(unit, weight)
        window = {"gradients": gradients, "unit": unit, "weight": weight}  # type: dict[str, Any]
        norm = NOTHING + nan
        if self.clip_norm is not None:
            norm = norm_of(self.exchange.over(square_sum(gradients, factor)))
            norm = ops.where(as_tensor(factor) == 0, NOTHING, norm)  # of a mean that is ignored, NaN or not
            factor = factor * clip_factor(norm, self.clip_norm)
        accepted = self._accepted(window, numbers) if self.drops else True  # type: Any
        # What is computed before the branch and used in it is moved on Ascend, so gradients are scaled inside it.
        if accepted:
            self._update(factor, window, numbers)
        for stage in self.called.closing:
            stage.on_close(accepted)
        return self.record(weight, numbers[LOSS], numbers[SKIPS], norm, accepted, applied)

    def _record(self, weight: Scalar, loss: Tensor, skips: Scalar, norm: Tensor, accepted: Any, by: Tensor) -> Tensor:
        """Clear the buffers, and assign the numbers of a window that was closed. Return its mean loss."""
        if len(self.buffers) > 0:
            self.kernels.clear(self.zero, self.buffers)
        if self.drops:
            skips = ops.maximum(cast(as_tensor(skips), ms.int32), 1 - cast(accepted, ms.int32))
            by = ops.where(accepted, by, DROPPED - ONE_SKIPPED + self.counts * ONE_IN_ROW) + ONE_SKIPPED * skips
        if isinstance(weight, Tensor):
            by = ops.where(weight == 0, by + ONE_EMPTY, by)
        mean = divide_no_nan(as_tensor(loss), as_tensor(self.divisor(weight)))
        rest = unstack(self.sums)[REST]
        if not isinstance(weight, Tensor) and weight % 1 == 0:
            ops.assign_add(self.seen, Tensor(int(weight), ms.int64))  # a number of samples that a graph knows
        else:
            counted = as_tensor(weight)
            if self.drops:
                counted = counted * cast(accepted, ms.float32)
            counted = rest + ops.where(ops.isfinite(counted), counted, NOTHING)
            whole = ops.round(counted)
            ops.assign_add(self.seen, cast(whole, ms.int64))
            rest = counted - whole
        ops.assign(self.sums, stack((*NONE, as_tensor(weight), mean, norm, rest, *self.no_measures)))
        ops.assign(self.counts, self.counts * KEPT + by)  # last: it takes the mark away
        # A Tensor: if a function with an `if` returns None, MindSpore cannot compile what follows for Ascend.
        return mean

    def divisor(self, weight: Scalar) -> Scalar:
        """Return what a sum of this weight is divided by, for its mean; a mean over nothing is 0."""
        if self.min_weight == 0:
            return weight
        weight = as_tensor(weight)
        return ops.where(weight < self.min_weight, as_tensor(self.min_weight), weight)  # `maximum` loses NaN on CPU

    def _normalised(self, unit: Scalar, weight: Scalar) -> Scalar:
        """Return the factor that makes a mean of sums in this unit."""
        if self.reduction == "sum":
            return unit / self.exchange.ranks
        divisor = self.divisor(weight)
        if isinstance(unit, Tensor) or isinstance(divisor, Tensor):
            return divide_no_nan(as_tensor(unit), as_tensor(divisor))
        return unit / divisor

    def _accepted(self, window: dict[str, Any], numbers: Numbers) -> Tensor:
        # A mean over nothing is 0/0; with `min_weight`, it is 0, and a window is dropped only if all of it was skipped.
        accepted = as_tensor(numbers[TAKEN if self.min_weight > 0 else WEIGHT]) != 0
        for stage in self.called.judging:
            accepted = ops.logical_and(accepted, stage.accepts(_seen_by(stage, window, numbers)))
        return accepted

    def _update(self, factor: Scalar, window: dict[str, Any], numbers: Numbers) -> Tensor:
        for stage in self.called.watching:
            stage.on_update(_seen_by(stage, window, numbers))
        self.exchange.apply(self.optimizer, self.kernels.scale(factor, window["gradients"], self.dtypes))
        return self.counts + 0

    # --- for the host -------------------------------------------------------------------------------------------------

    @property
    def state(self) -> dict[str, Parameter]:
        """Return what a file holds beside the counts and sums, by name. It changes only when a window closes."""
        return {"seen": self.seen, **{f"stage{i}.{type(stage).__name__}.{j}": parameter for i, stage
                                      in enumerate(self.stages) for j, parameter in enumerate(stage.state)}}

    def empty(self, counts: np.ndarray, sums: np.ndarray, mark: int) -> None:
        """Drop what the buffers hold, and assign these numbers. `mark`: what an interrupt leaves."""
        counts, sums = np.array(counts), np.array(sums)
        counts[HELD], counts[OWN], counts[MARK] = 0, 0, mark
        ops.assign(self.counts, Tensor(counts))
        for buffer in self.buffers:
            ops.assign(buffer, ops.zeros(buffer.shape, buffer.dtype))
        counts[MARK] = sums[:LAST] = sums[MEASURED:] = 0
        ops.assign(self.sums, Tensor(sums))
        ops.assign(self.counts, Tensor(counts))


def _seen_by(stage: Stage, window: dict[str, Any], numbers: Numbers) -> dict[str, Any]:
    """Return a window with what this stage has measured."""
    return {"gradients": window["gradients"], "unit": window["unit"], "weight": window["weight"],
            "measured": numbers[stage.measured[0]:stage.measured[1]]}
