"""A step over a batch as compiled graphs, and what has to hold before one is called."""
from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import mindspore as ms
from mindspore import Tensor, nn

from .accumulator import Accumulator
from .batch import as_arguments, named_values, ordered
from .split import layout, with_storage_of_its_own

_REBUILT = ("forward_fn and the optimizer use different Parameters of the same name, expected those of one network; if "
            "the network was built again (in a notebook, say), build the optimizer and the train step again, too, and "
            "give two networks names of their own with Cell.update_parameters_name")


class CompiledStep:
    """A step over a batch: one compiled graph for each layout of a batch, and what has to hold before it is called.

    Attributes:
        accumulator: The accumulator that it feeds.
        micro_size: Number of pieces that a batch is cut into.
        updated: Whether the last call closed a window: bool Tensor of shape `()`. Reading it waits for the device.
            After an epoch, it tells of the incomplete last window.
    """

    def __init__(self, function: Callable, accumulator: Accumulator, micro_size: int, graph_for: Callable) -> None:
        self.accumulator = accumulator
        self.micro_size = micro_size
        self.updated = self._not_updated = Tensor(False)
        self._function = function
        self._graph_for = graph_for
        self._graphs: dict[tuple, Callable] = {}
        self._orders: dict[frozenset, tuple[str, ...]] = {}
        self._make_flush()

    def _make_flush(self) -> None:
        accumulator = self.accumulator

        def flush() -> Tensor:
            return accumulator.flush()

        self._flush = compiled(flush)

    def epoch(self, batches: Iterable, lookahead: bool = False) -> Iterator[Any]:
        """Train on each of `batches`, yield what each call returns, and apply the incomplete last window at the end.

        Leaving the loop early (`break`, an error) leaves the window open: the next epoch goes on with it, `flush()`
        applies it, `accumulator.reset()` drops it (with `lookahead`, only the last). With several ranks, the data may
        be uneven: a rank at its end takes part in the windows of the others with weight 0.

        Args:
            batches: A batched `mindspore.dataset`, or any iterable of Tensors, tuples, lists or dicts (such as
                `dataset.create_dict_iterator()`). NumPy arrays become Tensors.
            lookahead: With several losses: take the batches of a window together and count their weights before any of
                them is trained. The losses then share one set of buffers and one backward pass. It holds the batches of
                a window in memory, and needs `strategy="split"`. It cannot be switched on after calls without it, nor
                off again, for the same accumulator. Save checkpoints only when `updated` is true. After `break`, the
                open window can only be dropped. With one loss, it changes nothing.

        Yields:
            The loss, or `(loss, aux)`, of each microbatch.

        Raises:
            ValueError: If `lookahead` is given with another strategy.
            RuntimeError: If `lookahead` comes after calls without it, after a loop that left a window open, or with
                `on_nonfinite="skip_microbatch"`; or if the window is closed or dropped inside the loop.
        """
        if lookahead and self.accumulator.losses > 1:
            raise ValueError('lookahead=True needs the host to schedule windows; give strategy="split"')
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
        self.updated = self._not_updated
        return self._call(*self._prepared(batch, named))

    def _prepared(self, batch: tuple, named: dict[str, Any]) -> tuple[tuple, tuple]:
        """Return the key of the graph that a batch needs, which exists then, and its arguments by position."""
        names = ()
        if named:
            # One order for each set of names, so that it is compiled once.
            named = named_values(self._function, named)
            if frozenset(named) not in self._orders:
                self._orders[frozenset(named)] = ordered(self._function, named)
            names = self._orders[frozenset(named)]
            batch = (*batch, *[named[name] for name in names])
        # One graph for each layout: as arguments, samples and cut would cost 16 us a call.
        key = (*layout(batch), names)
        if key not in self._graphs:
            self._graphs[key] = self._graph_for(*key)
        return key, tuple(map(with_storage_of_its_own, batch)) if self.micro_size > 1 else batch

    def _call(self, key: tuple, batch: tuple) -> Any:
        self.updated = self._not_updated
        count = self.accumulator._count
        if not count.returned:
            self.accumulator._prepare()
        count.returned = False
        if key not in self._graphs:  # discarded since, after an error
            self._graphs[key] = self._graph_for(*key)
        try:
            result = self._run(self._graphs[key], batch)
        except BaseException as error:
            count.forget()
            # A graph in which a kernel failed fails in all its later calls (MindSpore 2.10).
            if isinstance(error, Exception):
                self._discard(key)
            if "already exists. Please set a unique name" in str(error):
                raise ValueError(_REBUILT) from error
            raise
        count.returned = True
        return result

    def _discard(self, key: tuple) -> None:
        del self._graphs[key]

    def _run(self, graph: Callable, batch: tuple) -> Any:
        self.accumulator._count.forget()
        result, self.updated = graph(*batch)
        return result

    def flush(self) -> Tensor:
        """Apply the incomplete window, if one is open. Return whether one was: bool Tensor of shape `()`."""
        finished = self.accumulator._prepare()
        self.accumulator._count.forget()
        flushed = self._flush()
        self.updated = Tensor(True) if finished else flushed
        return self.updated


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
