"""A train step as a Cell, for `mindspore.train.Model` and whatever else takes one."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any, Optional, Union

from mindspore import ParameterTuple, Tensor, amp, nn, ops

from .accumulate import make_accumulate, prepared
from .accumulator import Accumulator
from .arguments import instance_of
from .batch import positional
from .optimizers import require_same_parameters, state_of
from .split import FLAT, layout, layout_of, with_storage_of_its_own
from .window import AccumulateStep

_NESTED = f"a tuple, list or dict, {FLAT}"


class TrainOneStepCell(nn.Cell):
    """Train `network` on one microbatch, and update when the window closes: `mindspore.nn.TrainOneStepCell` with
    accumulation.

        cell = TrainOneStepCell(nn.WithLossCell(network, loss_fn), optimizer, accumulate_step=4)
        Model(cell).train(epochs, dataset, callbacks=[FlushCallback(), LossMonitor()])

    Compiled in graph mode, run op by op in PyNative, like any Cell. All state (of the network, the optimizer and the
    accumulator) is among its Parameters, so a `ModelCheckpoint` saves an open window, too.

    Load such a checkpoint before the first microbatch. `Parameter.set_data`, and with it
    `mindspore.load_param_into_net` and `EarlyStopping(restore_best_weights=True)`, reach neither a compiled graph with
    branches nor, in PyNative, an optimizer that has run (MindSpore 2.10): the cell would go on with the old values
    without an error. `ms_accum.load_checkpoint` and `ops.assign` reach both.

    Args:
        network: Returns the *mean* loss of its samples (or unmasked tokens), a float Tensor of shape `()`; e.g. an
            `nn.WithLossCell`. With `losses=2`, a tuple of two; see `make_train_step`.
        accumulator: An optimizer, for which an `Accumulator` with `reduction="mean"` is built; or such an accumulator.
            An optimizer may also be given as `optimizer=`.
        accumulate_step: Microbatches in a window, with an optimizer; see `Accumulator`.
        loss_scaler: A `mindspore.amp.StaticLossScaler` or `DynamicLossScaler`; see `make_train_step`.
        micro_size: Number of pieces that each microbatch is cut into, inside the graph; see `make_train_step`.
        weight_fn: `(*piece) -> weight`: what the network's mean divides by; see `make_train_step`.
        **options: With an optimizer, further arguments of `Accumulator`, such as `clip_norm`.

    Inputs:
        The microbatch: Tensors, as for `make_train_step`.

    Outputs:
        The undivided loss: float32 Tensor of shape `()`; with several losses, a tuple of them. With a loss scaler,
        `(loss, overflow, scale)`, or `(loss, loss, ..., overflow, scale)`, as from
        `mindspore.nn.TrainOneStepWithLossScaleCell`: whether a window was closed and dropped here (bool, `()`), and the
        scale that the loss was multiplied by (float32, `()`).

    Attributes:
        accumulator: The accumulator that it feeds.
        optimizer: The accumulator's.

    Raises:
        TypeError: If an argument is of the wrong kind.
        ValueError: See `make_train_step`. Also if the optimizer holds Parameters of another network with the same
            names, if `Model` gets an `optimizer=` besides the cell, and in graph mode if `set_inputs` gave a dynamic
            shape.
        RuntimeError: See `make_train_step`.

    Source: `mindspore.nn.TrainOneStepCell` and `TrainOneStepWithLossScaleCell`, whose interface it has.

    Example:
        >>> import numpy as np, mindspore as ms
        >>> from mindspore import nn
        >>> from ms_accum import TrainOneStepCell
        >>> network = nn.Dense(2, 1, weight_init="ones", bias_init="zeros")
        >>> optimizer = nn.SGD(network.trainable_params(), learning_rate=0.5)
        >>> cell = TrainOneStepCell(nn.WithLossCell(network, nn.L1Loss()), optimizer, accumulate_step=2)
        >>> for target in (4.0, 5.0):
        ...     loss = cell(ms.Tensor(np.ones((4, 2)), ms.float32), ms.Tensor(np.full((4, 1), target), ms.float32))
        ...     print(float(loss), network.weight.asnumpy())
        2.0 [[1. 1.]]
        3.0 [[1.5 1.5]]
    """

    def __init__(
        self,
        network: nn.Cell,
        accumulator: Union[nn.Optimizer, Accumulator, None] = None,
        accumulate_step: Optional[AccumulateStep] = None,
        *,
        loss_scaler: Optional[amp.LossScaler] = None,
        micro_size: int = 1,
        weight_fn: Optional[Callable] = None,
        **options: Any,
    ) -> None:
        # Without a prefix, the network's parameters keep their names.
        super().__init__(auto_prefix=False)
        instance_of("network", network, nn.Cell, "a Cell that returns the loss",
                    "give nn.WithLossCell(network, loss_fn), or a function to make_train_step")
        accumulator, micro_size = prepared(
            network, accumulator, accumulate_step, options, micro_size, weight_fn, loss_scaler)
        require_same_parameters(network, accumulator.optimizer)
        weigh = positional("weight_fn", weight_fn)
        self.accumulate = make_accumulate(network, accumulator, micro_size, weigh, has_aux=False)
        self.network = network
        self.accumulator = accumulator
        self.optimizer = accumulator.optimizer
        self.loss_scaler = loss_scaler
        self.state = ParameterTuple([*accumulator.parameters, *(p for _, p in state_of(accumulator.optimizer))])
        self._flush = _Flush(accumulator)
        self._before_flush: list[Callable[[], None]] = []  # what callbacks do first

    def __call__(self, *batch: Any, **named: Any) -> Union[Tensor, tuple[Tensor, Tensor, Tensor]]:
        """See the class. RuntimeError if an error left a part of a microbatch in the open window."""
        if named:
            raise TypeError(f"the microbatch has arguments with names ({', '.join(named)}), expected none; give them "
                            "in the order of the network's, or use make_train_step")
        layout(batch)
        count = self.accumulator._count
        if not count.returned:
            self.accumulator._prepare()
        count.forget()
        count.returned = False
        try:
            result = super().__call__(*map(with_storage_of_its_own, batch))
        except Exception:
            # A graph in which a kernel failed fails in all its later calls (MindSpore 2.10): compile it again.
            self.compile_cache.clear()
            raise
        count.returned = True
        return result

    def construct(self, *batch: Any) -> Union[Tensor, tuple[Tensor, Tensor, Tensor]]:
        """See the class."""
        accumulator = self.accumulator
        samples, cut = layout_of(tuple([_kind(argument) for argument in batch]))
        if self.loss_scaler is None:
            loss = self.accumulate(samples, cut, *batch)
            return ops.depend(loss, accumulator._close_if_due())
        # Sums, for what is read here must not change with the Parameters.
        scale = self.loss_scaler.scale_value + 0.0
        skipped = accumulator.skipped + 0
        loss = ops.depend(self.accumulate(samples, cut, *batch), (scale, skipped))
        loss = ops.depend(loss, accumulator._close_if_due())
        losses = loss if accumulator.losses > 1 else (loss,)
        return *losses, accumulator.skipped > skipped, scale

    def set_grad(self, requires_grad: bool = True) -> nn.Cell:
        """Refuse to be differentiated: a `Model` with an `optimizer=` would update once more at each microbatch."""
        if requires_grad:
            raise ValueError("a TrainOneStepCell of ms_accum computes the gradients and updates itself, and cannot be "
                             "trained by another step; give Model(TrainOneStepCell(...)) without an optimizer")
        return super().set_grad(False)

    def flush(self) -> Tensor:
        """Apply the incomplete window, if one is open. Return whether one was: bool Tensor of shape `()`."""
        for do in self._before_flush:
            do()
        finished = self.accumulator._prepare()
        self.accumulator._count.forget()
        flushed = self._flush()
        return Tensor(True) if finished else flushed


class _Flush(nn.Cell):
    """`Accumulator.flush` as a Cell: compiled in graph mode."""

    def __init__(self, accumulator: Accumulator) -> None:
        super().__init__(auto_prefix=False)
        self.accumulator = accumulator

    def construct(self) -> Tensor:
        return self.accumulator.flush()


def _kind(argument: Any) -> Any:
    """What `split.layout_of` has to know of an argument."""
    if isinstance(argument, Tensor):
        return argument.shape
    return _NESTED if isinstance(argument, (tuple, list, dict)) else None
