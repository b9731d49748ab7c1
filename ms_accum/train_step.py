"""Train steps: cut a batch, run value_and_grad on each piece, feed the accumulator, return the undivided loss."""
from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Optional, Union

import mindspore as ms
from mindspore import Tensor, amp, nn

from .accumulate import make_accumulate, prepared
from .accumulator import Accumulator
from .arguments import boolean, one_of
from .batch import as_arguments, named_values, ordered, positional
from .split import layout, with_storage_of_its_own
from .window import AccumulateStep

_STRATEGIES = ("fused", "split")
_REBUILT = ("forward_fn and the optimizer use different Parameters of the same name, expected those of one network; if "
            "the network was built again (in a notebook, say), build the optimizer and the train step again, too, and "
            "give two networks names of their own with Cell.update_parameters_name")


def make_train_step(
    forward_fn: Callable,
    accumulator: Union[nn.Optimizer, Accumulator, None] = None,
    accumulate_step: Optional[AccumulateStep] = None,
    *,
    micro_size: int = 1,
    weight_fn: Optional[Callable] = None,
    loss_scaler: Optional[amp.LossScaler] = None,
    strategy: str = "fused",
    has_aux: bool = False,
    **options: Any,
) -> TrainStep:
    """Build a compiled train step: forward, backward, add, and the update when the window closes.

        train_step = make_train_step(forward_fn, optimizer, accumulate_step=4)
        for loss in train_step.epoch(dataset):  # the mean loss of each microbatch
            ...                                 # at the end, the incomplete last window is applied

    Each call of `train_step(data, label)` or `train_step(**batch)` is one microbatch.

    Args:
        forward_fn: `(*batch) -> loss`: the *mean* loss of its samples (or unmasked tokens), a float Tensor of shape
            `()`. With `has_aux`, `(*batch) -> (loss, aux)`. A function, a Cell or a `functools.partial`. A batch with
            names (a dict, or keyword arguments) is matched to its parameters by name.
        accumulator: An optimizer, for which an `Accumulator` with `reduction="mean"` is built; or such an accumulator.
            An optimizer may also be given as `optimizer=`.
        accumulate_step: Microbatches in a window, with an optimizer: an int, `{update_step: n}` or a callable; see
            `Accumulator`.
        micro_size: Number of pieces that each microbatch is cut into, inside the graph (the name is that of
            `mindspore.parallel.nn.GradAccumulation`). Peak activation memory is that of one piece. The batch size n is
            the length of axis 0 of the first Tensor that has axes (of named ones, in the order of `forward_fn`'s
            parameters). Tensors whose axis 0 has length n are cut, all other
            arguments go to every piece whole. Pieces have ceil(n / micro_size) samples; if that does not divide n, the
            last one is shorter and weighs less.
        weight_fn: `(*piece) -> weight`, a number or a Tensor of shape `()`: what the mean in `forward_fn` divides by,
            e.g. the number of unmasked tokens. None: the number of samples. Of a batch with names, it gets those that
            it has parameters for.
        loss_scaler: A `mindspore.amp.StaticLossScaler` or `DynamicLossScaler`, for networks that compute in float16.
            The loss is multiplied by its scale before the backward pass. When the window closes, the accumulated
            gradient is divided by the scale before it is measured, averaged or clipped, and the scaler is adjusted
            once. A window with NaN or infinity in its gradient is dropped. Return the loss in float32: a float16 loss
            overflows from a scale of 2**16 on.
        strategy: "fused": one graph holds forward, backward, add and the update. "split": one graph for forward,
            backward and add, and one for the update, which the host runs once per window (RATEX's scheme); the host
            reads one flag after each call.
        has_aux: Whether `forward_fn` returns `(loss, aux)`. With `micro_size > 1`, aux is a Tensor or a tuple of
            Tensors: those of shape `()` are returned as their weighted mean (float32), those with one row per sample as
            the rows of the whole batch.
        **options: With an optimizer, further arguments of `Accumulator`: `clip_norm`, `on_nonfinite`, `reducer`,
            `buffer_dtype`, `after_update`, `noise_scale`.

    Returns:
        A `TrainStep`: `train_step(*batch) -> loss`, or `(loss, aux)`. The loss is the weighted mean over the pieces and
        is never divided by `accumulate_step`: a float32 Tensor of shape `()`.

    Raises:
        TypeError: If an argument is of the wrong kind, `accumulate_step` is missing, or a function is a lambda inside
            another expression, which MindSpore cannot compile.
        ValueError: If an argument is out of range, an accumulator comes with `accumulate_step` or other arguments of
            `Accumulator`, it has `reduction="sum"`, or a parameter was frozen since it was built.
        RuntimeError: When called, if an error left a part of a batch in the open window (see below).

    The weight multiplies the gradients, after the backward pass, so layers whose backward pass is not linear work and
    float16 does not overflow. A piece with the same weight as the first one costs no multiplication, another weight
    costs one per gradient, as does a weight that is a Tensor. Pieces of weight 0 are ignored, even if their loss is
    0/0. Numbers in a batch are constants of the graph: each new value triggers a recompilation, so give what changes as
    a Tensor.

    If an error stops a batch that is cut into pieces, the window may hold some of them. It is never applied then: the
    next call, `flush` and `save_checkpoint` raise a RuntimeError until `accumulator.reset()` drops the open window.
    (Unless `avoid_busy_waiting` was called, MindSpore may report an error only after later calls; then `flush` may be
    the first to raise. `accumulator.flush()` and `accumulator.apply()` do not check.) If an error stops the forward
    pass or the loss of a batch that is not cut, the window stays as it was.

    Source: cutting a batch inside the step is `jax.lax.scan` over microbatches; "split" is RATEX's scheme of two
    graphs.

    Example:
        >>> import numpy as np
        >>> from mindspore import nn
        >>> from ms_accum import make_train_step
        >>> network = nn.Dense(2, 1, weight_init="ones", bias_init="zeros")
        >>> optimizer = nn.SGD(network.trainable_params(), learning_rate=0.5)
        >>> def forward_fn(x):
        ...     return network(x).mean()
        >>> train_step = make_train_step(forward_fn, optimizer, accumulate_step=2)
        >>> batches = [np.full((4, 2), value, np.float32) for value in (1, 3, 2)]
        >>> for loss in train_step.epoch(batches):
        ...     print(float(loss), bool(train_step.updated), network.weight.asnumpy())
        2.0 False [[1. 1.]]
        6.0 True [[0. 0.]]
        -0.5 False [[0. 0.]]
        >>> print(network.weight.asnumpy())  # the incomplete last window was applied
        [[-1. -1.]]
    """
    one_of("strategy", strategy, _STRATEGIES)
    boolean("has_aux", has_aux, "say whether forward_fn returns (loss, aux)")
    accumulator, micro_size = prepared(
        forward_fn, accumulator, accumulate_step, options, micro_size, weight_fn, loss_scaler)

    def accumulate_for(count: int, names: tuple[str, ...]) -> Callable:
        forward = positional("forward_fn", forward_fn, count, names)
        weigh = positional("weight_fn", weight_fn, count, names)
        return make_accumulate(forward, accumulator, micro_size, weigh, has_aux)

    return TrainStep(forward_fn, accumulate_for, accumulator, micro_size, strategy)


class CompiledStep:
    """A step over a batch: one compiled graph for each layout of a batch, and what has to hold before it is called.

    Attributes:
        accumulator: The accumulator that it feeds.
        micro_size: Number of pieces that a batch is cut into.
        updated: Whether the last call closed a window: bool Tensor of shape `()`. Reading it waits for the device.
            After an epoch, it tells of the incomplete last window.
    """

    def __init__(self, function: Callable, accumulator: Accumulator, micro_size: int, graph_for: Callable) -> None:
        def flush() -> Tensor:
            return accumulator.flush()

        self.accumulator = accumulator
        self.micro_size = micro_size
        self.updated = self._not_updated = Tensor(False)
        self._function = function
        self._graph_for = graph_for
        self._graphs: dict[tuple, Callable] = {}
        self._orders: dict[frozenset, tuple[str, ...]] = {}
        self._flush = compiled(flush)
        # Whether the last call came to its end. Before the first call, a loaded checkpoint may hold a torn window.
        self._returned = False

    def epoch(self, batches: Iterable) -> Iterator[Any]:
        """Train on each of `batches`, yield what each call returns, and apply the incomplete last window at the end.

        Leaving the loop early (`break`, an error) leaves the window open: the next epoch goes on with it, `flush()`
        applies it, `accumulator.reset()` drops it. With several ranks, the data may be uneven: a rank at its end takes
        part in the windows of the others with weight 0.

        Args:
            batches: A batched `mindspore.dataset`, or any iterable of Tensors, tuples, lists or dicts (such as
                `dataset.create_dict_iterator()`). NumPy arrays become Tensors.

        Yields:
            The loss, or `(loss, aux)`, of each microbatch.
        """
        for batch in batches:
            arguments, named = as_arguments(batch)
            yield self(*arguments, **named)
        self.flush()

    def __call__(self, *batch: Any, **named: Any) -> Any:
        """Train on one microbatch, given by position or by name. Return the loss, or `(loss, aux)`.

        Raises:
            TypeError: If an argument is a tuple, list or dict, or `forward_fn` has no parameter of that name.
            ValueError: If no argument is a Tensor with axes, or (when the graph is compiled) the loss has axes.
            RuntimeError: If an error left a part of a batch in the open window.
        """
        self.updated, names = self._not_updated, ()
        if named:
            # One order for each set of names, so that it is compiled once.
            named = named_values(self._function, named)
            if frozenset(named) not in self._orders:
                self._orders[frozenset(named)] = ordered(self._function, named)
            names = self._orders[frozenset(named)]
            batch = (*batch, *[named[name] for name in names])
        # One graph for each layout: as arguments, samples and cut would cost 16 us a call.
        key = (*layout(batch), names)
        if not self._returned:
            self._recover()
        self._returned = False
        if key not in self._graphs:
            self._graphs[key] = self._graph_for(*key)
        if self.micro_size > 1:
            batch = tuple(map(with_storage_of_its_own, batch))
        try:
            result = self._run(self._graphs[key], batch)
        except Exception as error:
            # A graph in which a kernel failed fails in all its later calls (MindSpore 2.10).
            del self._graphs[key]
            if "already exists. Please set a unique name" in str(error):
                raise ValueError(_REBUILT) from error
            raise
        self._returned = True
        return result

    def _recover(self) -> None:
        self.accumulator._require_whole()

    def _run(self, graph: Callable, batch: tuple) -> Any:
        result, self.updated = graph(*batch)
        return result

    def flush(self) -> Tensor:
        """Apply the incomplete window, if one is open. Return whether one was: bool Tensor of shape `()`."""
        self.accumulator._require_whole()
        self.updated = self._flush()
        return self.updated


class TrainStep(CompiledStep):
    """What `make_train_step` returns: see there.

    Attributes:
        accumulator: The accumulator that it feeds.
        micro_size: Number of pieces that a batch is cut into.
        updated: Whether the last call closed a window: bool Tensor of shape `()`. Reading it waits for the device.
            After an epoch, it tells of the incomplete last window.
        strategy: "fused" or "split".
    """

    def __init__(
        self,
        forward_fn: Callable,
        accumulate_for: Callable,
        accumulator: Accumulator,
        micro_size: int,
        strategy: str,
    ) -> None:
        self.strategy = strategy

        def graph_for(samples: int, cut: tuple[bool, ...], names: tuple[str, ...]) -> Callable:
            accumulate = accumulate_for(len(cut), names)

            # What says whether the window is closed is returned: graph mode can drop a branch that nothing depends on.
            def accumulate_and_update(*batch: Any) -> Any:
                result = accumulate(samples, cut, *batch)
                return result, accumulator._close_if_due()

            def accumulate_only(*batch: Any) -> Any:
                result = accumulate(samples, cut, *batch)
                return result, accumulator._due()

            return compiled(accumulate_and_update if strategy == "fused" else accumulate_only)

        def update() -> Tensor:
            accumulator.apply()
            return accumulator.update_step + 0  # a graph has to return something

        super().__init__(forward_fn, accumulator, micro_size, graph_for)
        self._update = compiled(update)

    def _recover(self) -> None:
        super()._recover()
        if self.strategy == "split" and self.accumulator._due():
            self._update()  # a call was interrupted between its two graphs

    def _run(self, graph: Callable, batch: tuple) -> Any:
        result = super()._run(graph, batch)
        if self.strategy == "split" and self.updated:
            self._update()
        return result


class _Graph(nn.Cell):
    """A function as a Cell. MindSpore warns when a second train step compiles a jitted function, but not a Cell."""

    def __init__(self, function: Callable) -> None:
        super().__init__(auto_prefix=False)
        self.function = function

    def construct(self, *arguments: Any) -> Any:
        return self.function(*arguments)


def compiled(function: Callable) -> Callable:
    """Return `function` as a graph of its own, in graph mode and PyNative."""
    return ms.jit(_Graph(function))
