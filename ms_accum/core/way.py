"""The way of a gradient, from top to bottom: add a piece, combine the windows of all ranks, update, close.

    add:     weigh ─► measure ─► exchange inside ─► buffers, sums
    window:  exchange across ─► restore ─► accepts?
    update:  normalise ─► clip ─► [cut slices] ─► optimizer ─► [gather] ─► hooks ─► close ─► empty

Ranks *inside* sum each microbatch; ranks *across* sum each window: see `distributed.exchange`. On one device, both
change nothing. Steps in brackets are only for ZeRO.
"""
from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING, Optional
from weakref import WeakValueDictionary

import mindspore as ms
from mindspore import Parameter, Tensor, ops
from mindspore.ops import constexpr

from ..tensors import after, checked_gradients, clip_factor, mapped, norm_of, require_trainable, square_sum, weighted
from .stages import ACTIVE, COUNTED, MEASURED, TAKEN, WEIGHT, empty_stages, overrides

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..distributed.exchange import OneDevice
    from ..tensors import Gradients, Numbers, Scalar
    from .buffers import Buffers
    from .counters import Counters, Journal
    from .kernels import Portable
    from .length import WindowLength
    from .stages import Stage

_numbers = count()
_ways: WeakValueDictionary[int, Way] = WeakValueDictionary()
# The numbers of the ways that were filled by hand, that were closed by hand, and that a graph may close by hand: a
# `constexpr` function notes them, which runs at each call op by op, but in a graph only when it is compiled.
_by_hand: set[int] = set()
_closed_by_hand: set[int] = set()
_closed_in_graphs: set[int] = set()

# A window of all ranks, as a plain tuple (gradients, unit, sums, accepted):
#   gradients: sums, divided by the unit;
#   unit: usually the number of samples in the first piece, so that equal pieces need no multiplication;
#   sums: of the window, with the places in stages.py;
#   accepted: True, or a bool Tensor of shape () if a stage may drop the window.
Window = tuple


@ms.jit_class
class Way:
    """Pass gradients through an accumulator, for steps, cells and checkpoints. Hand-written loops use `Accumulator`.

    Marks in the journal: a piece adds 1 when it begins and 1 when it is added, and the end of the microbatch subtracts
    both. A microbatch that is not cut adds 1 and subtracts it. 0 means that nothing is unfinished.

    Args:
        expected: Names and shapes of the parameters.
        optimizer: The optimizer.
        dtypes: dtypes of its parameters.
        length: The `WindowLength`, which decides when a window is full.
        stages: The stages that are switched on: objects that may change, observe or drop what passes (see `Stage`).
        exchange: The exchange that sums over ranks.
        buffers, counters, journal: The objects in which pieces are added, counted and marked.
        kernels: Kernels that scale buffers, and kernels that scale gradients that are not buffers.
        contributors: With `reduction="sum"`, the number of ranks, which divides the sum. None: the weights divide it.
        clip_norm: As in `Accumulator`.
        hooks: Functions that are called after an update.

    Attributes:
        may_drop: Whether a stage may drop a window.
        looks_at_gradients: Whether a stage weighs or measures the gradient of each piece.
        looks_at_pieces: Whether single pieces matter: a stage looks at the gradient of each, ranks sum each, or the
            weight of one may close the window.
        measuring, judging, closing: The stages that override `measure`, `accepts`, `on_close`.
        watching: The stages that override `on_update`, each with the places of its values in the sums.
        weights: The whole parameters to give gradients for, in the optimizer's order.
        is_driven: Whether a train step or a cell fills the accumulator; then nothing can be added by hand.
    """

    def __init__(self, expected: tuple[tuple, tuple], optimizer: Callable, dtypes: tuple[ms.Type, ...],
                 length: WindowLength, stages: tuple[Stage, ...], exchange: OneDevice, buffers: Buffers,
                 counters: Counters, journal: Journal, kernels: tuple[Portable, Portable], contributors: Optional[int],
                 clip_norm: Optional[float], hooks: tuple[Callable, ...]) -> None:
        self.expected, self.optimizer, self.dtypes, self.stages = expected, optimizer, dtypes, stages
        self.length, self.exchange, self.buffers, self.weights = length, exchange, buffers, exchange.weights
        self.counters, self.journal, self.is_driven = counters, journal, False
        self.buffered, self.copied = kernels
        self.contributors, self.clip_norm, self.hooks = contributors, clip_norm, hooks
        self._driver: Optional[tuple[object, int]] = None
        self.measuring, self.judging, self.closing = (
            tuple(stage for stage in stages if overrides(stage, method))
            for method in ("measure", "accepts", "on_close"))
        self.looks_at_gradients = any(overrides(stage, "weigh", "measure") for stage in stages)
        self.looks_at_pieces = self.looks_at_gradients or exchange.inside > 1 or length.budget is not None
        self.may_drop, self.number = len(self.judging) > 0, next(_numbers)
        _ways[self.number] = self
        ends = [MEASURED]
        for stage in stages:
            ends.append(ends[-1] + stage.measures)
        self.watching = tuple((stage, start, end) for stage, start, end in zip(stages, ends, ends[1:])
                              if overrides(stage, "on_update"))

    # --- a piece ------------------------------------------------------------------------------------------------------

    def scaled(self, loss: Tensor) -> Tensor:
        """Return the value to differentiate."""
        for stage in self.stages:
            loss = stage.scale_loss(loss)
        return loss

    def begin(self, loss: Tensor) -> Tensor:
        """Return the value to differentiate, and mark that a piece begins; its gradients are added only after the mark.

        So an error in the forward pass changes nothing, and a later error leaves a mark. The mark depends on the loss,
        not on the gradients: with a dependency between a gradient and its buffer, Ascend could not add a matrix product
        in place.
        """
        return self.journal.begin(self.scaled(loss))

    def add(self, gradients: Gradients, weight: Scalar, counted: Optional[Scalar] = None, active: int = 1,
            factor: Optional[Scalar] = None) -> Numbers:
        """Add the gradients of a piece's scaled loss. Return its sums over the ranks that exchange each microbatch.

        `weight` comes from `as_weight`. `counted` is the number that `seen` counts, if it is not the weight. `factor`
        is the factor on the gradients, if it is not the weight: 1 for gradients of a sum, if no stage looks at
        gradients.
        """
        gradients = checked_gradients(*self.expected, gradients)
        taken = 1  # type: Scalar
        for stage in self.stages:
            weight, took = stage.weigh(gradients, weight)
            taken = taken * took
        sums = (weight, taken * active, active, weight if counted is None else counted)  # type: Numbers
        if self.measuring:
            restored = self.restored(gradients)
            for stage in self.measuring:
                sums = (*sums, *stage.measure(restored, weight))
        gradients, sums = self.exchange.microbatch(
            self.buffers.weighed(gradients, weight if factor is None else factor), sums)
        self.buffers.add(gradients)
        self.counters.include(sums[WEIGHT], sums[COUNTED], sums[MEASURED:])
        return sums

    def add_microbatch(self, gradients: Gradients, weight: Scalar, factor: Optional[Scalar] = None) -> None:
        """Add a microbatch that is not cut, after `begin`; see `add` for the arguments."""
        self.counters.count(self.add(gradients, weight, factor=factor)[TAKEN])
        self.journal.mark(-1)

    def add_unmarked(self, gradients: Gradients, weight: Scalar, factor: Optional[Scalar] = None) -> None:
        """Mark and add a microbatch in one call, without `begin`. The graph may also read the buffers.

        See `add` for the arguments.
        """
        gradients = checked_gradients(*self.expected, gradients)
        begun = self.journal.mark(ops.depend(Tensor(1, ms.int32), gradients[-1]))
        # Otherwise, Ascend would add the last gradient to its buffer before the mark.
        self.add_microbatch(mapped(after, begun, gradients), weight, factor)

    def add_piece(self, gradients: Gradients, weight: Scalar, counted: Optional[Scalar] = None, active: int = 1,
                  factor: Optional[Scalar] = None) -> Scalar:
        """Add a piece of a microbatch, after `begin`; call `end_microbatch` after the last one. Arguments: see `add`.

        Return the sum of `active` over the ranks that exchange microbatches: the number of them that still have data.
        """
        sums = self.add(gradients, weight, counted, active, factor)
        self.counters.take(sums[TAKEN])
        self.journal.mark(1)
        return sums[ACTIVE]

    def end_microbatch(self, pieces: Scalar) -> None:
        """Count a microbatch of `pieces` pieces, if one of them was taken, and subtract their marks."""
        self.counters.count_taken()
        self.journal.mark(-2 * pieces)

    def is_full(self) -> Tensor:
        """Return whether the open window holds all its microbatches: bool Tensor of shape `()`."""
        counters = self.counters
        return self.length.is_full(counters.mini_step, counters.update_step, counters.counted_sum)

    # --- a window -----------------------------------------------------------------------------------------------------
    # No method is named as one of dict: in a graph, `x.update()` and `x.clear()` of a local name are taken for dict's.

    def window(self, active: Scalar = 1.0) -> Window:
        """Return the window of all ranks, for `update_with`. `active`: 1 on a rank that still has data."""
        counters, measured = self.counters, ()  # type: Counters, Numbers
        for sums in counters.measured:
            for i in range(sums.shape[0]):
                measured = (*measured, sums[i])
        sums = (counters.weight_sum, counters.mini_step + 0, active, counters.counted_sum, *measured)
        return self._judged(self.exchange.window(self.buffers.allocated(), self.buffers.weight_unit, sums))

    def update_with(self, window: Window) -> None:
        """Update with the result of `window`, or a copy of it, and close."""
        self._step(window, self.buffered)
        self.close(True)

    def update_alone(self, gradients: Gradients, weight: Scalar, factor: Optional[Scalar] = None) -> None:
        """Update with a window of one microbatch, without buffers, if no window is open.

        Arguments are those of `add`. This method applies the factor itself.

        Call it only if `looks_at_pieces` and `may_drop` are false.
        """
        gradients, unit = checked_gradients(*self.expected, gradients), weight if factor is None else factor
        if isinstance(unit, Tensor) or unit == 0:  # a microbatch of weight 0 is ignored, NaN included
            gradients = mapped(weighted, unit != 0, gradients, self.buffers.gradient_dtypes)
        self._step(self._judged(self.exchange.window(gradients, unit, (weight, 1, 1.0, weight))), self.copied)
        for stage in self.closing:
            stage.on_close(True)
        self.counters.close(weight)
        empty_stages(self.stages)
        self.journal.done()

    def close(self, applied: bool) -> None:
        """Close the open window, which was applied or is dropped now."""
        if not applied:
            self.journal.updating(self.counters.mini_step)  # an interrupt may leave the buffers full
        for stage in self.closing:
            stage.on_close(applied)
        self.counters.close(self.counters.weight_sum)
        self.empty()

    def empty(self) -> None:
        """Empty the open window, also after an error."""
        self.counters.empty()
        self.buffers.empty(self.counters.weight_sum)
        empty_stages(self.stages)
        self.journal.done()

    def restored(self, gradients: Gradients) -> Gradients:
        """Return the gradients of the loss itself."""
        for stage in self.stages:
            gradients = stage.restore(gradients)
        return gradients

    def _judged(self, window: Window) -> Window:
        # Restored before anything is measured: norms of scaled gradients may overflow where true ones do not.
        gradients, accepted = self.restored(window[0]), True
        for stage in self.judging:
            verdict = stage.accepts(gradients, window[2])
            accepted = ops.logical_and(accepted, verdict) if isinstance(accepted, Tensor) else verdict
        return gradients, window[1], window[2], accepted

    def _step(self, window: Window, kernels: Portable) -> None:
        """Normalise, clip, and change the parameters."""
        gradients, unit, sums = window[0], window[1], window[2]  # MindSpore warns of an unpacked, unused value
        self.journal.updating(gradients[-1])
        for stage, start, end in self.watching:
            stage.on_update(gradients, unit, sums, sums[start:end])
        factor = normalising(self.contributors, unit, sums[WEIGHT])
        factor = clipping(self.clip_norm, self.counters.grad_norm, self.exchange, gradients, factor)
        if isinstance(factor, Tensor):  # scale in place only after all that reads the buffers
            factor = ops.depend(factor, ops.assign_add(self.counters.update_step, 1))
        else:  # not assigned: a graph drops a named result that nobody uses
            ops.assign_add(self.counters.update_step, 1)
        self.counters.see(sums[COUNTED])
        self.exchange.cut_parameters()
        self.optimizer(kernels.scale(factor, gradients, self.dtypes))
        self.exchange.gather_parameters()
        for hook in self.hooks:
            hook()

    # --- for the host -------------------------------------------------------------------------------------------------

    @property
    def window_state(self) -> tuple[Parameter, ...]:
        """Return the Parameters that belong to the open window."""
        return (*self.buffers.state, self.journal.unfinished, *self.counters.window_state,
                *(p for stage in self.stages for p in stage.window_state))

    def take_over(self, driver: object) -> bool:
        """Let `driver` fill the accumulator. Return whether it must read the device first.

        It must if another driver has filled the accumulator, a checkpoint was loaded, a window was closed by hand, or a
        graph may close one by hand.
        Raise RuntimeError if the accumulator was filled by hand.
        """
        if self.number in _by_hand:
            raise RuntimeError("microbatches were added to this accumulator by hand, so a train step or cell cannot "
                               "use it; give the step an Accumulator of its own")
        before, self._driver = self._driver, (driver, self.counters.loads)
        self.is_driven = True
        if self.number in _closed_by_hand:
            _closed_by_hand.remove(self.number)
            return True
        return before != self._driver or self.number in _closed_in_graphs

    def release(self) -> None:
        """Let the next driver of the accumulator read the device first."""
        self._driver = None


def normalising(contributors: Optional[int], unit: Scalar, weight: Scalar) -> Scalar:
    """Return the factor that turns a sum in this unit of weights into the gradient; 0 if the weight is 0."""
    if contributors is not None:
        return unit / contributors
    if not isinstance(weight, Tensor):
        return unit / weight if weight else 0.0
    return unit / ops.where(weight == 0, Tensor(1.0, ms.float32), weight)


def clipping(clip_norm: Optional[float], grad_norm: Parameter, exchange: OneDevice, gradients: Gradients,
             factor: Scalar) -> Scalar:
    """Return the factor on the gradients that includes clipping, and store their norm before clipping."""
    if clip_norm is None:
        return factor
    norm = norm_of(exchange.over_slices(square_sum(gradients, factor)))
    ops.assign(grad_norm, norm)
    return factor * clip_factor(norm, clip_norm)


@constexpr
def note_filled(number: int, is_driven: bool) -> bool:
    """Note that a way is filled by hand.

    Raise RuntimeError if a train step, which sets the unit, fills it; ValueError if a parameter is frozen.
    """
    if is_driven:
        raise RuntimeError("a train step or a cell fills this accumulator, so nothing can be added by hand; give the "
                           "hand-written loop an Accumulator of its own")
    require_trainable(_ways[number].weights)
    _by_hand.add(number)
    return True


@constexpr
def note_closed(number: int, runs_op_by_op: bool, is_applied: bool) -> bool:
    """Note that a window was closed or dropped by hand, so that a keeper that counts down reads the device again.

    A graph calls this only when it is compiled, so a keeper then reads the device before each microbatch. Raise
    ValueError if the window is applied and a parameter is frozen.
    """
    if is_applied:
        require_trainable(_ways[number].weights)
    (_closed_by_hand if runs_op_by_op else _closed_in_graphs).add(number)
    return True
