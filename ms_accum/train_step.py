"""Train steps: cut a batch, run value_and_grad on each piece, feed the accumulator, give back the loss itself."""
from __future__ import annotations

import ast
import inspect
from collections.abc import Callable
from functools import partial
from operator import index
from textwrap import dedent
from typing import Any, Optional, Union

import mindspore as ms
import numpy as np
from mindspore import Tensor, amp, nn, ops
from mindspore.ops import constexpr

from .accumulator import Accumulator
from .gradients import FLOATS, as_weight
from .optimizers import require_trainable
from .pieces import counted, empty_aux, join_aux, layout, select_rows, whole_aux, with_storage_of_its_own

_STRATEGIES = ("fused", "split")


def make_train_step(
    forward_fn: Callable,
    acc: Accumulator,
    *,
    micro_size: int = 1,
    weight_fn: Optional[Callable] = None,
    loss_scaler: Optional[amp.LossScaler] = None,
    strategy: str = "fused",
    has_aux: bool = False,
) -> TrainStep:
    """A compiled train step over a batch: forward, backward, add, and the update when the window closes.

        train_step = make_train_step(forward_fn, Accumulator(optimizer, 4, reduction="mean"))
        for data, label in dataset:
            loss = train_step(data, label)  # the mean loss of this batch, never loss / 4
        train_step.flush()                  # closes a short last window

    Args:
        forward_fn: `(*batch) -> loss`: the *mean* loss of its samples (or unmasked tokens), a float Tensor of shape `()`.
            With `has_aux`, `(*batch) -> (loss, aux)`.
        acc: An accumulator with `reduction="mean"`.
        micro_size: Pieces that one call's batch is cut into, inside the compiled function; the activations in memory are
            those of one piece. The batch size n is the length of axis 0 of the first Tensor that has axes. Tensors
            whose axis 0 has length n are cut, all other arguments go to every piece whole. Pieces have ceil(n / micro_size)
            samples; where that does not divide n, the last one is shorter and weighs less. One call is one microbatch of
            the accumulator, however it is cut: a window holds `accumulate_step` calls.
        weight_fn: `(*piece) -> weight`: what a piece counts, a number or a Tensor of shape `()`; it has to be what the mean in
            `forward_fn` divides by, e.g. the unmasked tokens. None: the samples.
        loss_scaler: A `mindspore.amp.StaticLossScaler` or `DynamicLossScaler`, for networks that compute in float16. Its scale
            multiplies the loss before the backward pass; when the window closes, the accumulated gradient is divided by it, before it is
            measured, averaged or clipped. A window with NaN or infinity in its gradient is dropped. The scaler is adjusted once per window.
            Return the loss in float32: a float16 loss overflows from a scale of 2**16 on. See `Accumulator.unscale_by`.
        strategy: "fused": one graph holds forward, backward, add and the update at the boundary. "split": one graph for
            forward, backward and add, a second one for the update, invoked once per window (RATEX's scheme); the host
            reads one flag after each call to know when.
        has_aux: Whether `forward_fn` returns `(loss, aux)`. With `micro_size > 1`, aux is a Tensor or a tuple of Tensors; those of
            shape `()` come back as their weighted mean (float32), those with one row for each sample of the piece as the rows of
            the whole batch.

    Returns:
        `train_step(*batch) -> loss` or `(loss, aux)`; the loss is the weighted mean over the pieces, a float32 Tensor of shape `()`.
        `train_step.flush()` closes a short window, `train_step.accumulator` is `acc`.

    Raises:
        TypeError: If an argument is of the wrong kind, or a function is a lambda inside another expression, which MindSpore cannot compile.
        ValueError: If `acc` sums up instead of averaging, a parameter was frozen since, or an argument is out of range.

    The weight multiplies the gradients, after the backward pass. What is differentiated is your loss, times the loss scale if there is one,
    so layers whose backward pass is not linear work, and float16 does not overflow. A piece that weighs as much as the first one costs no
    multiplication, any other one for each gradient; a weight that is a Tensor always costs one. Pieces of weight 0 are ignored, even if
    their loss is 0/0.
    If an error stops a batch that is cut into pieces, the window may hold some of them. The next call, `flush` and `save_checkpoint` then
    raise a RuntimeError until `accumulator.reset()` drops the open window; `accumulator.flush()` and `accumulator.apply()` do not check.
    If an error stops the forward pass or the loss of a batch that is not cut, the window stays as it was.
    Numbers among the batch are constants of the graph: each new value compiles anew, so give what changes as a Tensor.

    Source: "split" is RATEX's scheme of two graphs; cutting a batch inside the step is `jax.lax.scan` over microbatches.

    Example:
        >>> import numpy as np, mindspore as ms
        >>> from mindspore import nn
        >>> from ms_accum import Accumulator, make_train_step
        >>> network = nn.Dense(2, 1, weight_init="ones", bias_init="zeros")
        >>> accumulator = Accumulator(nn.SGD(network.trainable_params(), learning_rate=0.5), 2, reduction="mean")
        >>> def forward_fn(x):
        ...     return network(x).mean()
        >>> train_step = make_train_step(forward_fn, accumulator)
        >>> for value in (1.0, 3.0, 2.0):
        ...     loss = train_step(ms.Tensor(np.full((4, 2), value), ms.float32))
        ...     print(float(loss), network.weight.asnumpy())
        2.0 [[1. 1.]]
        6.0 [[0. 0.]]
        -0.5 [[0. 0.]]
        >>> print(bool(train_step.flush()), network.weight.asnumpy())
        True [[-1. -1.]]
    """
    if not isinstance(strategy, str) or strategy not in _STRATEGIES:
        raise ValueError(f"strategy is {strategy!r}, expected one of {', '.join(map(repr, _STRATEGIES))}")
    if not isinstance(has_aux, bool):
        raise TypeError(f"has_aux is {has_aux!r}, expected True or False: whether forward_fn returns (loss, aux)")
    micro_size = checked_micro_size(micro_size)
    accumulate = make_accumulate(forward_fn, acc, micro_size, weight_fn, loss_scaler, has_aux)
    return TrainStep(accumulate, acc, micro_size, strategy, has_aux)


class CompiledStep:
    """A step over a batch: one compiled graph for each layout of a batch, and what has to hold before it is called.

    Attributes:
        accumulator: The accumulator it feeds.
        micro_size: Number of pieces that a batch is cut into.
    """

    def __init__(self, acc: Accumulator, micro_size: int, graph_for: Callable) -> None:
        def flush() -> Tensor:
            return acc.flush()

        self.accumulator = acc
        self.micro_size = micro_size
        self._graph_for = graph_for
        self._graphs: dict[tuple, Callable] = {}
        self._flush = compiled(flush)
        self._returned = False  # whether the last call came to its end; until there was one, nobody knows

    def _call(self, batch: tuple, named: dict[str, Any]) -> Any:
        if named:
            refuse_named(named)
        # One graph for each layout: as arguments, samples and cut would cost 16 us a call.
        key = layout(batch)
        if not self._returned:
            self._recover()
        self._returned = False
        if key not in self._graphs:
            self._graphs[key] = self._graph_for(*key)
        if self.micro_size > 1:
            batch = tuple(map(with_storage_of_its_own, batch))
        try:
            result = self._run(self._graphs[key], batch)
        except Exception:
            # A graph in which a kernel failed fails in all its later calls (MindSpore 2.10).
            del self._graphs[key]
            raise
        self._returned = True
        return result

    def _recover(self) -> None:
        self.accumulator.require_whole()

    def _run(self, graph: Callable, batch: tuple) -> Any:
        return graph(*batch)

    def flush(self) -> Tensor:
        """Close a short window, if one is open; whether one was: bool Tensor of shape `()`."""
        if not self._returned:
            self.accumulator.require_whole()
        return self._flush()


class TrainStep(CompiledStep):
    """What `make_train_step` returns: see there.

    Attributes:
        accumulator: The accumulator it feeds.
        micro_size: Number of pieces that a batch is cut into.
        strategy: "fused" or "split".
    """

    def __init__(self, accumulate: Callable, acc: Accumulator, micro_size: int, strategy: str, has_aux: bool) -> None:
        self.strategy = strategy

        def depend(result: Any, closed: Tensor) -> Any:
            # Graph mode can drop a branch that nothing returned depends on: `close_if` guards against it, this makes sure.
            if has_aux:
                return ops.depend(result[0], closed), result[1]
            return ops.depend(result, closed)

        def graph_for(samples: int, cut: tuple[bool, ...]) -> Callable:
            def accumulate_and_update(*batch: Any) -> Any:
                result = accumulate(samples, cut, *batch)
                closed = acc.close_if(acc.due())
                return depend(result, closed)

            def accumulate_only(*batch: Any) -> Any:
                result = accumulate(samples, cut, *batch)
                return result, acc.due()

            return compiled(accumulate_and_update if strategy == "fused" else accumulate_only)

        def update() -> Tensor:
            acc.apply()
            return acc.update_step + 0

        super().__init__(acc, micro_size, graph_for)
        self._update = compiled(update)

    def __call__(self, *batch: Any, **named: Any) -> Union[Tensor, tuple[Tensor, Any]]:
        """Train on a batch: the loss, or `(loss, aux)`.

        Raises:
            TypeError: If an argument is a tuple, list or dict, or has a name.
            ValueError: If no argument is a Tensor with axes, or (when the graph is compiled) the loss has axes.
            RuntimeError: If an error left a part of a batch in the open window.
        """
        return self._call(batch, named)

    def _recover(self) -> None:
        super()._recover()
        if self.strategy == "split" and self.accumulator.due():
            self._update()  # a call was interrupted between its two graphs

    def _run(self, graph: Callable, batch: tuple) -> Any:
        if self.strategy == "fused":
            return graph(*batch)
        result, due = graph(*batch)
        if due:
            self._update()
        return result


class _Graph(nn.Cell):
    """A function as a Cell: of a jitted function MindSpore warns when a second train step compiles it, of a Cell it does not."""

    def __init__(self, function: Callable) -> None:
        super().__init__(auto_prefix=False)
        self.function = function

    def construct(self, *arguments: Any) -> Any:
        return self.function(*arguments)


def compiled(function: Callable) -> Callable:
    """`function` as a graph of its own, in graph mode and PyNative."""
    return ms.jit(_Graph(function))


def plain(function: Optional[Callable]) -> Optional[Callable]:
    """A function that graph mode can call in another one: of a `functools.partial` it would not know what comes out."""
    if not isinstance(function, partial):
        return function
    inner, arguments, named = function.func, function.args, function.keywords

    def completed(*batch: Any) -> Any:
        return inner(*arguments, *batch, **named)

    return completed


def make_accumulate(
    forward_fn: Callable,
    acc: Accumulator,
    micro_size: int,
    weight_fn: Optional[Callable],
    loss_scaler: Optional[amp.LossScaler],
    has_aux: bool,
) -> Callable:
    """`(samples, cut, *batch) -> loss` or `(loss, aux)`: all of a train step but the update, uncompiled.

    Arguments and errors as in `make_train_step`; `samples` and `cut` as from `pieces.layout`.
    """
    _require_fitting(forward_fn, acc, micro_size, weight_fn)
    _bind_loss_scaler(acc, loss_scaler)
    forward_fn, weight_fn = plain(forward_fn), plain(weight_fn)
    scaler = acc.loss_scaler
    acc.guarded = acc.guarded or micro_size > 1

    def differentiated(*piece: Any) -> tuple:
        if has_aux:
            result = forward_fn(*piece)
            if isinstance(result, tuple):
                require_aux(len(result))
                loss, aux = result[0], result[1]
            else:
                require_aux(None)
                loss, aux = result, result
        else:
            loss = forward_fn(*piece)
            aux = loss
        if isinstance(loss, Tensor):
            require_loss(loss.shape, loss.dtype)
        else:
            require_loss(None, None)
        if scaler is not None:
            return loss.astype(ms.float32) * scaler.scale_value, loss, aux
        return loss, loss, aux

    grad_fn = ms.value_and_grad(differentiated, None, acc.optimizer.parameters, has_aux=True)

    def take(samples: int, *piece: Any) -> tuple:
        weight = as_weight(samples if weight_fn is None else weight_fn(*piece))
        (scaled_loss, loss, aux), gradients = grad_fn(*piece)
        return ops.depend(loss, scaled_loss).astype(ms.float32), weight, acc.take(gradients, weight, weight), aux

    # Below, `depend` uses what take returns and nobody needs, or MindSpore warns of "side effect nodes eliminated by mistake".
    def whole(samples: int, cut: tuple[bool, ...], *batch: Any) -> Any:
        loss, weight, taken, aux = take(samples, *batch)
        ops.assign_add(acc.mini_step, taken)
        if isinstance(weight, Tensor):
            loss = loss + weight * 0.0  # a weight that is not finite shows in the loss
        return (loss, aux) if has_aux else loss

    def pieces(samples: int, cut: tuple[bool, ...], *batch: Any) -> Any:
        rows = -(-samples // micro_size)
        full = samples // rows
        # Not the constant 0.0: MindSpore would try to fold 0 / 0 while it compiles, and warn.
        zero = acc.weight_sum * 0.0
        totals = (zero, zero, Tensor(0, ms.int32))
        aux, aux_totals = (), ()
        piece = Tensor(0, ms.int32)
        ops.assign_add(acc.unfinished, 1)
        if has_aux:
            # The first piece shows what is to be joined. Without aux, it is a turn of the loop like any other.
            indices = ops.arange(rows)
            totals, aux, weight = add_piece(totals, rows, select_rows(indices, cut, batch))
            aux_totals = join_aux(empty_aux(aux, samples, rows), aux, indices, weight)
            piece = piece + 1
        # A loop over a tensor stays a loop in the graph. Unrolled, all pieces' activations are alive at once.
        while piece < full:
            indices = piece * rows + ops.arange(rows)
            totals, piece_aux, weight = add_piece(totals, rows, select_rows(indices, cut, batch))
            if has_aux:
                aux_totals = join_aux(aux_totals, piece_aux, indices, weight)
            piece = piece + 1
        if full * rows < samples:
            indices = ops.arange(full * rows, samples)
            totals, piece_aux, weight = add_piece(totals, samples - full * rows, select_rows(indices, cut, batch))
            if has_aux:
                aux_totals = join_aux(aux_totals, piece_aux, indices, weight)
        loss, weight, taken = totals
        ops.assign_add(acc.mini_step, ops.minimum(taken, 1))
        ops.assign_add(acc.unfinished, -1)
        divisor = ops.where(weight == 0, Tensor(1.0, ms.float32), weight)
        return (loss / divisor, whole_aux(aux_totals, aux, divisor)) if has_aux else loss / divisor

    def add_piece(totals: tuple, samples: int, inputs: tuple) -> tuple:
        loss, weight, taken = totals
        piece_loss, piece_weight, piece_taken, aux = take(samples, *inputs)
        piece_loss = counted(ops.depend(piece_loss, aux), piece_weight)
        return (loss + piece_loss, weight + piece_weight, taken + piece_taken), aux, piece_weight

    return whole if micro_size == 1 else pieces


def _require_fitting(forward_fn: object, acc: object, micro_size: int, weight_fn: object) -> None:
    require_callable("forward_fn", forward_fn)
    if weight_fn is not None:
        require_callable("weight_fn", weight_fn)
    require_mean(acc)
    if micro_size > 1 and acc.reducer.each_microbatch:
        raise ValueError(f'micro_size={micro_size} with an accumulator whose ranks exchange each microbatch (sync="microbatch", or '
                         'on_nonfinite="skip_microbatch"): ranks may cut into different numbers of pieces; give sync="window" and '
                         '"skip_window", or micro_size=1 and smaller batches')


def _bind_loss_scaler(acc: Accumulator, loss_scaler: Optional[amp.LossScaler]) -> None:
    if loss_scaler is not None:
        acc.unscale_by(loss_scaler)
    elif acc.loss_scaler is not None:
        raise ValueError("acc has a loss_scaler, whose scale it divides by; give the same one here")


@constexpr
def require_loss(shape: Optional[tuple], dtype: Optional[ms.Type], name: str = "forward_fn") -> bool:
    """Refuse a loss that is no float scalar: value_and_grad would silently differentiate the sum of its elements, or through a cast."""
    if shape is None:
        remedy = "; give has_aux=True if it returns (loss, aux)" if name == "forward_fn" else ""
        raise TypeError(f"{name} returned no Tensor, expected the loss alone{remedy}")
    if tuple(shape) != ():
        raise ValueError(f"{name} returned a loss of shape {tuple(shape)}, expected shape (); give the mean over the samples")
    if dtype not in FLOATS:
        raise TypeError(f"{name} returned a loss of {dtype}, expected a float dtype; leave the loss as the network computed it")
    return True


@constexpr
def require_aux(length: Optional[int]) -> bool:
    """Refuse what is no pair: graph mode would silently drop a third value."""
    if length != 2:
        got = "no tuple" if length is None else f"{length} values"
        raise TypeError(f"forward_fn returned {got}, expected (loss, aux), as has_aux=True says; aux may be a tuple")
    return True


def require_callable(name: str, function: object) -> None:
    """Raise TypeError unless `function`, the argument called `name`, can be called and compiled."""
    if not callable(function):
        raise TypeError(f"{name} is of type {type(function).__name__}, expected a function of the batch")
    if getattr(function, "__name__", "") == "<lambda>" and not _is_readable(function):
        raise TypeError(f"{name} is a lambda whose source MindSpore cannot read, expected a function: "
                        "define it with def, or write `name = lambda ...` as a statement of its own")


def _is_readable(function: Callable) -> bool:
    """Whether a lambda is all there is on the right-hand side of its statement."""
    try:
        statement = ast.parse(dedent(inspect.getsource(function))).body[0]
    except (OSError, SyntaxError):
        return False
    return isinstance(getattr(statement, "value", None), ast.Lambda)


def require_mean(acc: object) -> None:
    """Refuse what is no accumulator (TypeError), or one that sums up or has frozen parameters (ValueError)."""
    if not isinstance(acc, Accumulator):
        raise TypeError(f"acc is of type {type(acc).__name__}, expected an Accumulator; "
                        'give Accumulator(optimizer, accumulate_step, reduction="mean")')
    require_trainable(acc.optimizer.parameters)
    if acc.reduction != "mean":
        raise ValueError(f'acc has reduction={acc.reduction!r}, expected "mean": a train step hands over the loss undivided, and the '
                         'sum of N such gradients is N times too large; give Accumulator(..., reduction="mean")')


def refuse_named(named: dict[str, Any]) -> None:
    """Raise TypeError about the arguments that a step was given by name."""
    raise TypeError(f"the batch has arguments with names ({', '.join(named)}), expected none: a compiled step tells its arguments by "
                    "their order; give them in the order of the function's, without names")


def checked_micro_size(micro_size: object) -> int:
    """`micro_size` as an int >= 1. Raises TypeError or ValueError if it is none."""
    try:
        if isinstance(micro_size, (bool, np.bool_)):
            raise TypeError
        micro_size = index(micro_size)
    except (TypeError, ValueError):  # ValueError: a Tensor of several elements
        raise TypeError(f"micro_size is {micro_size!r}, expected an int >= 1: the pieces a batch is cut into") from None
    if micro_size < 1:
        raise ValueError(f"micro_size is {micro_size}, expected an int >= 1: the pieces a batch is cut into")
    return micro_size
