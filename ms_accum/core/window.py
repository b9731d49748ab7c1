"""The open window on the device: the way of a gradient, from top to bottom.

    add:          weigh ─► measure ─► exchange inside ─► buffers, counters      # each piece of a microbatch
    meet:         do all ranks close this window? ─ no ─► it stays open         # when the window closes
    total:        exchange across ─► restore ─► accepted? ─ no ─► drop
    update_with:  normalise ─► clip ─► count ─► [cut slices] ─► optimizer ─► [gather] ─► empty

A window holds several microbatches. A microbatch is one piece, or is cut into several, each with a backward pass of its
own; `begin` marks that a piece begins, and `end` ends a microbatch of several pieces. A window of a single microbatch
needs no buffers: `update_alone` takes the place of `add`, `total` and `update_with`. Groups of ranks sum each
microbatch *inside*, and each window *across* groups: see `distributed.exchange`. On one device, both change nothing.
Steps in brackets are only for ZeRO.

Who closes a window: for a train step, `boundary.py` on the host, which counts down, then runs `close_with_update`; in a
cell and by hand, the device, which runs `close_if(is_full())` after each microbatch (`model/cell.py`, and a call of
`Accumulator`); at the end of the data, `flush` of `boundary.py`. If ranks do not agree in `meet`, each rank raises an
error at its next read of the device.

What marks that something was begun and not finished is one number, `unfinished`: + 1 where a piece begins, + 1 where it
ends, - 2 for each piece where its microbatch ends; `UPDATING` where an update, a reset or a load begins, and 0 again
where it ends. So it is 0 between two calls, unless an error or an interrupt has come between.
"""
from __future__ import annotations

from math import nan, prod
from typing import TYPE_CHECKING, Any, Optional, Union

import mindspore as ms
from mindspore import Parameter, ParameterTuple, Tensor, ops

from ..mindspore_api import jit_class
from ..tensors import (
    after,
    as_numbers,
    as_tensor,
    as_vector,
    cast,
    checked_gradients,
    clip_factor,
    concat,
    divide_no_nan,
    mapped,
    norm_of,
    reshape,
    scaled,
    square_sum,
    stack,
    state_parameter,
    weighted,
)
from .kernels import add_each, kernels
from .notes import allocate, new_number, note_use, prefix_of
from .optimizers import cell_prefix
from .stages import overrides

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..distributed.exchange import OneDevice
    from ..tensors import Gradients, Numbers, Scalar
    from .length import WindowLength
    from .stages import Stage

UPDATING = -2**30  # the mark of an update, a reset or a load; those of pieces are small numbers, >= 0


@jit_class
class Window:
    """Hold the open window, add gradients to it, and update with it. It holds no reference to the host's side.

        buffer += weight / unit * gradient    # for gradients of summed losses, 1 / unit * gradient
        gradient = buffer * (unit / sum of the weights)

    The unit is usually the first piece's number of samples: then the factor is the constant 1, and nothing is
    multiplied.

    A window of all ranks is a dict, which `total` returns (a graph cannot read a named tuple):

    - gradients: sums, divided by the unit, without the loss scale;
    - unit: of the weights, usually the number of samples in the first piece;
    - weight: sum of the weights;
    - microbatches: their number, summed over the groups of ranks across;
    - active: number of ranks (across) that still have data;
    - measured: sums of the values that stages measured, one stage after the other;
    - accepted: True, or a bool Tensor of shape () if a stage may drop the window;
    - buffered: whether it came from the buffers, which must then be emptied; the gradients may be copies of them;
    - own: sum of the weights of this rank (of the ranks inside).

    Args:
        optimizer: The optimizer.
        length: The `WindowLength`, which decides when the window is full.
        stages: The stages that are switched on; see `Stage`.
        exchange: The exchange that sums over ranks.
        reduction: "mean": the sum is divided by the weights. "sum": the script has divided each loss by the length of a
            window, so only the mean over the ranks remains: the sum is divided by their number.
        clip_norm: As in `Accumulator`.

    Attributes:
        number: Of this window; graphs find its `Boundary` by it, see `notes.py`.
        prefix: Of the names of all Parameters.
        weights: The whole parameters to give gradients for, in the optimizer's order.
        buffers: One for each parameter (with ZeRO, rows of buckets). They take no memory before a graph holds them or a
            gradient is added: windows of one microbatch never need them.
        unit: The unit of weights, a constant of graphs: 1, until the host sets it to the first piece's number of
            samples.
        weight_unit: The same as a Parameter, for checkpoints and for windows that are exchanged: float32 `()`.
        is_in_use: Whether a graph holds the unit, or something was added op by op; see `note_use`.
        unfinished: The sum of all marks, 0 if nothing is unfinished; see the top of this file: int32 `()`.
        taken: Pieces of an unfinished microbatch that no stage has skipped: int32 `()`.
        place: Number of finished epochs, and of microbatches trained since: int32 `(2,)`. One Parameter, so that an
            interrupt cannot come between the two.
        measured: Sums of what stages have measured in the open window: one Parameter of shape `(measures,)`, or none.
        empty_windows: Number of windows closed whose weight, over all ranks, was 0: int32 `()`.
        may_skip, may_drop: Whether a stage may skip a piece, or drop a window.
        drops_empty: Whether a window of weight 0 is dropped.
        looks_at_gradients: Whether a stage weighs or measures the gradient of each piece.
        streams: Whether a gradient may be added alone, without those of the other parameters; see `Stream`.
        looks_at_pieces: Whether single pieces matter: for a stage, for ranks that sum each, or because the weight of
            one may close the window.
        window_state, run_state: Parameters that belong to the open window, and the others.

        The other Parameters are those of `Accumulator`.
    """

    def __init__(self, optimizer: Callable, length: WindowLength, stages: tuple[Stage, ...], exchange: OneDevice,
                 reduction: str, clip_norm: Optional[float]) -> None:
        self.number = new_number()
        self.prefix = prefix = prefix_of(self.number, cell_prefix(optimizer).removesuffix("."))
        self.optimizer, self.length, self.stages, self.exchange = optimizer, length, stages, exchange
        self.clip_norm, self.weights = clip_norm, exchange.weights
        self.divides_by_ranks = reduction == "sum"
        self.names, self.shapes, self.dtypes = zip(*((p.name, tuple(p.shape), p.dtype) for p in exchange.weights))

        self.buffers, self.buffer_dtypes = ParameterTuple(exchange.buffers(f"{prefix}.sum")), exchange.dtypes
        sizes = [prod(p.shape) for p in self.buffers]
        self.small = max(sizes) // 64 if min(sizes) < max(sizes) // 64 else 0  # elements; see `add_each`
        self.unit = exchange.shared_unit or 1.0
        self.unit_is_fixed, self.is_in_use = exchange.shared_unit is not None, False
        self.weight_unit = state_parameter(f"{prefix}.weight_unit", (), ms.float32, self.unit)
        (self.unfinished, self.mini_step, self.update_step, self.closed_windows, self.skipped, self.skipped_in_row,
         self.taken, self.empty_windows) = (state_parameter(f"{prefix}.{name}", (), ms.int32) for name in (
             "unfinished", "mini_step", "update_step", "closed_windows", "skipped", "skipped_in_row", "taken",
             "empty_windows"))
        self.weight_sum, self.window_weight, self.seen_rest = (state_parameter(f"{prefix}.{name}", (), ms.float32)
                                                               for name in ("weight_sum", "window_weight", "seen_rest"))
        self.seen = state_parameter(f"{prefix}.seen", (), ms.int64)
        self.place = state_parameter(f"{prefix}.place", (2,), ms.int32)
        self.one_trained = Tensor([0, 1], ms.int32)
        self.grad_norm = state_parameter(f"{prefix}.grad_norm", (), ms.float32, nan)

        self.weighing, self.measuring, self.judging, self.closing = (
            tuple(stage for stage in stages if overrides(stage, method))
            for method in ("weigh", "measure", "accepts", "on_close"))
        watching, count = [], 0
        for stage in stages:
            stage.exchange, stage.skipped, stage.skipped_in_row = exchange, self.skipped, self.skipped_in_row
            stage.bind(prefix, exchange.across)
            if overrides(stage, "on_update"):  # with the places of what it measures, in `measured`
                watching.append((stage, count, count + stage.measures))
            count += stage.measures
        self.of_stages = tuple(parameter for stage in stages for parameter in stage.window_state)
        self.watching = tuple(watching)
        self.measured: tuple[Parameter, ...] = ()
        if count:
            self.measured = (state_parameter(f"{prefix}.measured", (count,), ms.float32),)
        self.drops_empty = any(stage.drops_empty for stage in stages)
        self.may_skip, self.may_drop = len(self.weighing) > 0, self.drops_empty or len(self.judging) > 0
        self.looks_at_gradients = self.may_skip or len(self.measuring) > 0
        self.looks_at_pieces = self.looks_at_gradients or exchange.inside > 1 or length.budget is not None
        self.streams = not self.looks_at_gradients and exchange.inside == 1
        self.kernels = kernels()
        # Those that scale the gradients for the optimizer: in place, where it gets the buffers themselves, which are
        # emptied next; not where an exchange or a stage has made copies, or without buffers.
        copies = exchange.ranks > 1 or any(overrides(stage, "restore") for stage in stages)
        self.of_buffers, self.of_copies = kernels(not copies), kernels(False)

    # --- a piece ------------------------------------------------------------------------------------------------------

    def scaled_loss(self, loss: Tensor) -> Tensor:
        """Return the value to differentiate."""
        for stage in self.stages:
            loss = stage.scale_loss(loss)
        return loss

    def begin(self, computed: Tensor) -> Tensor:
        """Mark that a piece begins, once `computed` is. Return a token: what follows the mark must depend on it.

        An error before the mark has changed nothing; a later error leaves the mark. MindSpore may report an error only
        after later calls: if a piece is then missing in a microbatch that has ended, the sum of the marks is not 0.
        """
        return ops.assign_add(self.unfinished, ops.depend(Tensor(1, ms.int32), computed))

    def add(self, gradients: Any, weight: Scalar, factor: Optional[Scalar] = None, active: Scalar = 1,
            ends: int = 0, begun: bool = True) -> Scalar:
        """Add the gradients of a piece's scaled loss. Return how many of the ranks inside still have data.

        What the graph returns has to depend on the result; see `depth_first`.

        Args:
            gradients: A gradient for each of `weights`. None, op by op: a `Stream` has added them already.
            weight: Of the piece, from `as_weight`.
            factor: The factor on the gradients, in place of the weight. Gradients of a summed loss use 1; only if no
                stage looks at gradients, because a stage may change the weight to 0.
            active: 1 if this rank has data, else 0.
            ends: 1 if the piece is a whole microbatch; else call `end` after the last piece.
            begun: Whether `begin` was called before the backward pass, with the loss. By hand, it cannot be. Then this
                marks, and the addition waits for the mark, so that Ascend does not fuse the last matrix product with
                its addition.
        """
        if gradients is not None:
            gradients = checked_gradients(self.names, self.shapes, gradients)
            if not begun:  # a fused product would be added to its buffer before the mark
                gradients = mapped(after, self.begin(gradients[-1]), gradients)
        counted = 1  # type: Scalar  # 0 if a stage skips the piece
        for stage in self.weighing:
            weight, is_taken = stage.weigh(gradients, weight)
            counted = counted * is_taken
        measured = ()  # type: Numbers
        if self.measuring:
            restored = self._restored(gradients)
            for stage in self.measuring:
                measured = (*measured, *stage.measure(restored, weight))
        # A factor of 0 makes the gradient 0, NaN included.
        factor = (weight if factor is None else factor) / self.unit
        if self.exchange.inside > 1:  # weighted before ranks sum them
            gradients, factor = mapped(weighted, factor, gradients, self.buffer_dtypes), 1.0
        exchanged, sums, measured = self.exchange.microbatch(
            gradients, (weight, counted * active, active), measured, self.mini_step)
        if not self.is_in_use:  # when the first graph is compiled, or at the first call op by op
            note_use(self.number)
        if exchanged is not None:
            # It is not called `add`: a graph would take a function of that name for this method.
            add_each(self.small, self.buffers, exchanged, factor)
        weight, counted, active = sums
        ops.assign_add(self.weight_sum, weight)
        for each in self.measured:
            ops.assign_add(each, as_vector(measured))
        if ends:  # a microbatch counts if one of the ranks inside has not skipped it
            counted = ops.minimum(counted, 1) if isinstance(counted, Tensor) else counted
        ops.assign_add(self.mini_step if ends else self.taken,
                       cast(counted, ms.int32) if isinstance(counted, Tensor) else counted)
        if ends:
            self.count_trained(1)
        ops.assign_add(self.unfinished, 1 - 2 * ends)  # + 1 for this end, - 2 if the microbatch ends with it
        # Where ranks exchange each piece, the graph's value has to wait for all gradients; see `depth_first` in
        # `distributed.exchange`. On one device, it would keep them in memory together.
        return ops.depend(active, gradients) if self.exchange.inside > 1 else active

    def end(self, pieces: Scalar, trained: Scalar = 1) -> None:
        """End a microbatch of `pieces` pieces. It counts if one of them was taken on one of the ranks inside.

        `trained`: 0 if this rank only takes part in the microbatch of others, else 1.
        """
        ops.assign_add(self.mini_step, cast(ops.minimum(self.taken + 0, 1), ms.int32))
        ops.assign(self.taken, 0)
        self.count_trained(trained)
        ops.assign_add(self.unfinished, -2 * pieces)

    def count_trained(self, microbatches: Scalar) -> None:
        """Add to the microbatches of the epoch, skipped ones included."""
        # Op by op, to make a Tensor and to multiply it take 0.07 ms.
        is_one = not isinstance(microbatches, Tensor) and microbatches == 1
        ops.assign_add(self.place, self.one_trained if is_one else self.one_trained * microbatches)

    # --- a window -----------------------------------------------------------------------------------------------------
    # No method is named as one of dict: in a graph, `x.update()` and `x.clear()` of a local name are taken for dict's.

    def is_full(self) -> Tensor:
        """Return whether the open window holds all its microbatches: bool Tensor of shape `()`."""
        return self.length.is_full(self.mini_step, self.update_step, self.weight_sum)

    def meet(self, numbers: Numbers) -> tuple[Any, Numbers]:
        """Return whether all ranks are about to close this window (True, or a bool Tensor), and the sums of numbers.

        If ranks do not agree, nothing may follow. `numbers`: the weight, the number of microbatches, and 1 if this rank
        still has data, else 0.
        """
        # One device saves the call.
        return self.exchange.meet(numbers) if self.exchange.ranks > 1 else (True, numbers)

    def own_numbers(self, active: Scalar = 1.0) -> Numbers:
        """Return the numbers of the open window, for `meet`. `active`: 1 if this rank still has data."""
        # `+ 0` copies: the counter changes before the copy is used.
        return self.weight_sum, self.mini_step + 0, active

    def total(self, numbers: Numbers) -> dict[str, Any]:
        """Return the open window of all ranks, given the numbers of `meet`."""
        if not self.is_in_use:
            allocate(self.number)
        measured = ()  # type: Numbers
        for sums in self.measured:  # not in a function: MindSpore warns of a call whose value a graph does not need
            for i in range(sums.shape[0]):
                measured = (*measured, sums[i])
        return self._judged(self.buffers, self.weight_unit, numbers, measured, self.weight_sum, True)

    def update_alone(self, gradients: Gradients, weight: Scalar, factor: Optional[Scalar] = None) -> None:
        """Update with a microbatch as a window of its own, which needs no buffers. Arguments: see `add`.

        Call it only if no window is open and `looks_at_pieces` and `may_drop` are false.
        """
        # The gradient g of a mean of weight w stands for the sum w * g. In the unit w, that sum is g itself, so nothing
        # is multiplied. The gradient of a sum is one in the unit 1, its factor.
        gradients, unit = checked_gradients(self.names, self.shapes, gradients), weight if factor is None else factor
        if isinstance(unit, Tensor) or unit == 0:  # a mean of weight 0 is ignored, NaN included: times False or True
            gradients = mapped(weighted, unit != 0, gradients, self.buffer_dtypes)
        agreed, numbers = self.meet((weight, 1, 1.0))
        if agreed:
            self.update_with(self._judged(gradients, unit, numbers, (), weight, False))

    def update_with(self, window: dict[str, Any]) -> None:
        """Update with a window of `total`, or of `update_alone`, and close it."""
        gradients, unit, weight = window["gradients"], window["unit"], window["weight"]
        # An error before this mark has changed nothing. After it, an error message is better than a window that is
        # applied twice. It is added and subtracted, so that a mark of an unfinished piece is not lost.
        ops.assign_add(self.unfinished, ops.depend(Tensor(UPDATING, ms.int32), gradients[-1]))
        for stage, first, last in self.watching:
            stage.on_update(window, window["measured"][first:last])
        # Normalise: the factor turns a sum in this unit into the gradient; 0 if the weight is 0.
        if self.divides_by_ranks:
            factor = unit / self.exchange.ranks
        elif isinstance(weight, Tensor):
            factor = divide_no_nan(as_tensor(unit), weight)
        else:
            factor = unit / weight if weight else 0.0
        if self.clip_norm is not None:
            norm = norm_of(self.exchange.over_slices(square_sum(gradients, factor)))
            ops.assign(self.grad_norm, norm)
            factor = factor * clip_factor(norm, self.clip_norm)
        if isinstance(factor, Tensor):
            # The kernels that scale in place wait for the count, and so for all side effects before it, because
            # MindSpore keeps their order: the norm was computed, and stages have read the gradients.
            factor = ops.depend(factor, ops.assign_add(self.update_step, 1))
        else:  # not assigned: a graph drops a named result that nobody uses
            ops.assign_add(self.update_step, 1)
        self.count_seen(weight)
        self.exchange.cut_parameters()
        kind = self.of_buffers if window["buffered"] else self.of_copies
        self.optimizer(kind.scale(factor, gradients, self.dtypes))
        self.exchange.gather_parameters()
        self._count_closing(True, window["own"], weight)
        if window["buffered"]:
            self.empty()
        else:
            self.count_trained(1)
            for parameter in self.of_stages:
                ops.assign(parameter, ops.zeros_like(parameter))
        ops.assign_add(self.unfinished, -UPDATING)

    def close(self) -> None:
        """Update with the open window, or drop it if a stage does not accept it: a branch in a graph.

        If ranks do not agree, do nothing.
        """
        agreed, numbers = self.meet(self.own_numbers())
        if agreed:
            total = self.total(numbers)
            accepted = total["accepted"]
            if accepted:
                self.update_with(total)
            else:
                self.drop(total["weight"])

    def close_if(self, condition: Union[bool, Tensor]) -> Tensor:
        """Close the open window if `condition` is true. Return whether one with microbatches was closed: bool `()`."""
        mini_step = self.mini_step + 0
        if condition:
            self.close()
        return self.mini_step < mini_step  # from the state after the branch, which keeps the branch

    def drop(self, weight: Scalar) -> None:
        """Close the open window without an update. Pieces of an unfinished microbatch are dropped, too.

        `weight`: of the window of all ranks.
        """
        self.mark_emptying()
        self._count_closing(False, self.weight_sum, weight)
        self.empty()
        ops.assign(self.unfinished, 0)

    def reset(self) -> None:
        """Empty the open window, also after an error, and count nothing."""
        self.mark_emptying()
        self.empty()
        ops.assign(self.unfinished, 0)

    def mark_emptying(self) -> None:
        """Mark that an emptying or a load begins: it must be done to the end, or be done again."""
        ops.assign(self.unfinished, ops.depend(Tensor(UPDATING, ms.int32), self.mini_step))

    def empty(self, buffers: bool = True) -> None:
        """Set to 0 what belongs to the open window, but for the marks; `buffers`: also the buffers."""
        ops.assign(self.mini_step, 0)
        ops.assign(self.taken, 0)
        ops.assign(self.weight_sum, 0.0)
        for sums in self.measured:
            ops.assign(sums, ops.zeros_like(sums))
        if buffers:
            if not self.is_in_use:
                allocate(self.number)
            self.kernels.clear(self.weight_sum, self.buffers)  # the sum is 0 by now; a constant 0 would be folded
        for parameter in self.of_stages:
            ops.assign(parameter, ops.zeros_like(parameter))

    def _count_closing(self, applied: bool, own: Scalar, weight: Scalar) -> None:
        for stage in self.closing:
            stage.on_close(applied)
        ops.assign(self.window_weight, own)
        ops.assign_add(self.closed_windows, 1)
        if isinstance(weight, Tensor):
            # `window_weight` was just assigned. On Ascend, MindSpore would copy `weight_sum`, which is emptied next.
            weight = self.window_weight if self.exchange.ranks == 1 else weight
            ops.assign_add(self.empty_windows, cast(weight == 0, ms.int32))
        elif weight == 0:
            ops.assign_add(self.empty_windows, 1)

    def _restored(self, gradients: Gradients) -> Gradients:
        for stage in self.stages:
            gradients = stage.restore(gradients)
        return gradients

    def _judged(self, gradients: Gradients, unit: Scalar, numbers: Numbers, measured: Numbers, own: Scalar,
                buffered: bool) -> dict[str, Any]:
        """Exchange a window of this rank, and ask the stages whether they accept the result."""
        weight, microbatches, active = numbers
        gradients, unit, measured = self.exchange.window(gradients, unit, numbers, measured)
        # Restored before anything is measured: norms of scaled gradients may overflow where true ones do not.
        window = {"gradients": self._restored(gradients), "unit": unit, "weight": weight, "microbatches": microbatches,
                  "active": active, "measured": measured, "accepted": True, "buffered": buffered, "own": own}
        accepted = as_tensor(weight) != 0 if self.drops_empty else True  # type: Any
        for stage in self.judging:
            verdict = stage.accepts(window)  # bool Tensors, or Python's
            if isinstance(accepted, Tensor):
                accepted = ops.logical_and(accepted, verdict)
            elif accepted:
                accepted = verdict
        window["accepted"] = accepted
        return window

    def count_seen(self, counted: Scalar) -> None:
        """Add the weight of an update to `seen`. Fractions are kept: five updates of weight 0.6 add 3.

        NaN and infinity add nothing.
        """
        if isinstance(counted, Tensor) or counted % 1:
            counted = counted if isinstance(counted, Tensor) else Tensor(counted, ms.float32)
            counted = ops.where(ops.isfinite(counted), counted, Tensor(0.0, ms.float32))
            whole = ops.round(counted)
            rest = self.seen_rest + (counted - whole)  # at most 1, so it keeps fractions down to 2**-25
            carry = ops.round(rest)
            ops.assign(self.seen_rest, rest - carry)
            ops.assign_add(self.seen, cast(whole + carry, ms.int64))
        else:  # a number of samples that a graph knows
            ops.assign_add(self.seen, cast(Tensor(counted, ms.float32), ms.int64))

    # --- graphs of the host, or its calls op by op: a graph has to return something -----------------------------------

    def counts(self) -> Tensor:
        """Return what the host makes a `Status` of, in its own order: float64 `(13,)`."""
        # Primitives, one cast for all of a dtype, and no list comprehension: else, to compile it takes 0.3 s, not 0.06.
        whole = stack((self.update_step, self.mini_step, self.skipped, self.closed_windows, self.skipped_in_row,
                       self.unfinished, self.empty_windows))
        parts = stack((self.weight_sum, self.window_weight, self.grad_norm))
        return concat((cast(self.place, ms.float64), cast(whole, ms.float64), cast(parts, ms.float64),
                       cast(reshape(self.seen, (1,)), ms.float64)))

    def counts_and_verdict(self) -> Tensor:
        """Return `counts`, and 1 or 0 for whether the stages accept the open window: float64 `(14,)`."""
        window = self.total(self.own_numbers())
        # `depend` uses the unit, which nobody needs; otherwise MindSpore warns of "nodes eliminated by mistake".
        accepted = ops.depend(as_tensor(window["accepted"]), window["unit"])
        return concat((self.counts(), reshape(cast(accepted, ms.float64), (1,))))

    def close_with_update(self) -> Tensor:
        """Update with the open window, if all ranks agree. The host has asked the stages before, if there are any."""
        agreed, numbers = self.meet(self.own_numbers())
        if agreed:
            self.update_with(self.total(numbers))
        return self.update_step + 0

    def close_without_update(self) -> Tensor:
        """Drop the open window of one device."""
        self.drop(self.weight_sum)
        return self.update_step + 0

    def met(self, active: Tensor) -> Tensor:
        """Return what `meet` does: 1 or 0 for whether ranks agree, and the numbers; float32 `(4,)`."""
        agreed, numbers = self.meet(self.own_numbers(active))
        return as_vector((as_tensor(agreed), *numbers))

    def close_with_met(self, numbers: Tensor) -> Tensor:
        """Update with the open window of several ranks, given the numbers of `met`, `(3,)`."""
        self.update_with(self.total(as_numbers(numbers, 3)))
        return self.update_step + 0

    def drop_with_met(self, numbers: Tensor) -> Tensor:
        """Drop the open window of several ranks, given the numbers of `met`, `(3,)`."""
        self.drop(numbers[0])
        return self.update_step + 0

    def exchanged(self, numbers: Tensor) -> tuple:
        """Exchange the open window of several ranks, for `close_with_exchanged`, if the host then decides for it.

        `numbers`: those of `met`, `(3,)`. Return whether it is accepted, 0 and what was measured, `(1 + n,)` (a vector
        may not be empty), and the gradients.
        """
        window = self.total(as_numbers(numbers, 3))
        accepted = ops.depend(as_tensor(window["accepted"]), window["unit"])  # see `counts_and_verdict`
        return accepted, as_vector((0.0, *window["measured"])), *window["gradients"]

    def close_with_exchanged(self, numbers: Tensor, measured: Tensor, *gradients: Tensor) -> Tensor:
        """Update with what `met` and `exchanged` returned, in the unit 1 of several ranks."""
        weight, microbatches, active = as_numbers(numbers, 3)
        self.update_with({"gradients": gradients, "unit": 1.0, "weight": weight, "microbatches": microbatches,
                    "active": active, "measured": as_numbers(measured, measured.shape[0])[1:], "accepted": True,
                    "buffered": True, "own": self.weight_sum})
        return self.update_step + 0

    def add_nothing(self, active: Tensor) -> Tensor:
        """Take part in the exchange of a piece without data. Return how many of the ranks inside still have data.

        `active`: 1 if this rank still has data, and the piece stands for an empty microbatch; float32 `()`.
        """
        # With weight 0, any Tensors of the right shapes are ignored. This loss has no gradient.
        begun = self.begin(Tensor(0.0, ms.float32))
        return ops.depend(as_tensor(self.add(self.weights, 0.0, active=active)), begun)

    def end_and_count(self, pieces: Tensor, trained: Tensor) -> Tensor:
        """End a microbatch; see `end`. Return the number of microbatches in the window."""
        self.end(pieces, trained)
        return self.mini_step + 0

    # --- for the host -------------------------------------------------------------------------------------------------

    @property
    def window_state(self) -> tuple[Parameter, ...]:
        """Return the Parameters that belong to the open window."""
        return (*self.buffers, self.weight_unit, self.unfinished, self.mini_step, self.taken, self.weight_sum,
                *self.measured, *self.of_stages)

    @property
    def run_state(self) -> tuple[Parameter, ...]:
        """Return the other Parameters, but those of stages."""
        return (self.update_step, self.seen, self.seen_rest, self.grad_norm, self.closed_windows, self.skipped,
                self.skipped_in_row, self.window_weight, self.place, self.empty_windows)

    @property
    def nbytes(self) -> int:
        """Return the number of bytes of all buffers, also before they have memory."""
        return sum(prod(p.shape) * p.itemsize for p in self.buffers)

    @property
    def is_allocated(self) -> bool:
        """Return whether the buffers have memory; before that, they are 0."""
        return not self.buffers[0].has_init

    def fix_unit(self, weight: float) -> None:
        """Set the unit to `weight`, unless it is given, or a graph holds it."""
        if not self.unit_is_fixed:
            self.unit_is_fixed = True
            if not self.is_in_use:
                self.unit = weight
                ops.assign(self.weight_unit, weight)

    def adopt(self, loaded: float) -> None:
        """Convert loaded buffers, whose unit is `loaded`, to the unit of this run, if compiled graphs may hold it.

        A unit of 1 in a run that has weighed nothing was not set yet: then the first piece sets it, as in that run.
        """
        if self.unit_is_fixed or self.is_in_use:
            for buffer in self.buffers if loaded != self.unit and self.is_allocated else ():
                ops.assign(buffer, scaled(loaded / self.unit, buffer, buffer.dtype))
        elif loaded != 1 or any(float(number) != 0 for number in (
                self.weight_sum, self.window_weight, self.seen, self.seen_rest, self.skipped)):
            self.unit_is_fixed, self.unit = True, loaded
        ops.assign(self.weight_unit, self.unit)

