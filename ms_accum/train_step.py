"""Train steps: cut a batch, run value_and_grad on each piece, feed the accumulator, give back the loss itself."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any, Optional, Union

import mindspore as ms
from mindspore import Tensor, amp, nn, ops

from .accumulate import checked_micro_size, make_accumulate
from .accumulator import Accumulator
from .arguments import boolean, one_of
from .split import layout, with_storage_of_its_own

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
            Return the loss in float32: a float16 loss overflows from a scale of 2**16 on.
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
    one_of("strategy", strategy, _STRATEGIES)
    boolean("has_aux", has_aux, "say whether forward_fn returns (loss, aux)")
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
        self._returned = False  # whether the last call came to its end; before the first one, a checkpoint may hold a torn window

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
        self.accumulator._require_whole()

    def _run(self, graph: Callable, batch: tuple) -> Any:
        return graph(*batch)

    def flush(self) -> Tensor:
        """Close a short window, if one is open; whether one was: bool Tensor of shape `()`."""
        if not self._returned:
            self.accumulator._require_whole()
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
                closed = acc._close_if_due()
                return depend(result, closed)

            def accumulate_only(*batch: Any) -> Any:
                result = accumulate(samples, cut, *batch)
                return result, acc._due()

            return compiled(accumulate_and_update if strategy == "fused" else accumulate_only)

        def update() -> Tensor:
            acc.apply()
            return acc.update_step + 0  # a graph has to return something

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
        if self.strategy == "split" and self.accumulator._due():
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


def refuse_named(named: dict[str, Any]) -> None:
    """Raise TypeError about the arguments that a step was given by name."""
    raise TypeError(f"the batch has arguments with names ({', '.join(named)}), expected none: a compiled step tells its arguments by "
                    "their order; give them in the order of the function's, without names")
