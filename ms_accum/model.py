"""A train step as a Cell, for `mindspore.train.Model` and whatever else takes one."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any, Optional, Union

from mindspore import ParameterTuple, Tensor, amp, nn, ops

from .accumulate import checked_micro_size, make_accumulate
from .accumulator import Accumulator
from .arguments import instance_of
from .optimizers import state_of
from .split import FLAT, layout_of, with_storage_of_its_own

_NESTED = f"a tuple, list or dict, {FLAT}"


class TrainOneStepCell(nn.Cell):
    """Trains `network` on one microbatch, and updates when the window closes; `mindspore.nn.TrainOneStepCell` with accumulation.

        cell = TrainOneStepCell(nn.WithLossCell(network, loss_fn), Accumulator(optimizer, 4, reduction="mean"))
        Model(cell).train(epochs, dataset, callbacks=[FlushCallback(), LossMonitor()])

    Compiled in graph mode, run op by op in PyNative, as any Cell. All state (the network's, the optimizer's, the accumulator's) is
    among its Parameters, so a `ModelCheckpoint` holds a window that is half full.

    Load it before the first microbatch. `Parameter.set_data`, and with it `mindspore.load_param_into_net` and the `restore_best_weights` of
    `EarlyStopping`, reach the Parameters, but neither a compiled graph with branches nor, in PyNative, an optimizer that has run (MindSpore
    2.10): the cell would go on with the old values, out of sight. `ms_accum.load_checkpoint` and `ops.assign` reach both.

    Args:
        network: Gives the *mean* loss of its samples (or unmasked tokens), a float Tensor of shape `()`; e.g. an `nn.WithLossCell`.
        acc: An accumulator with `reduction="mean"`.
        loss_scaler: A `mindspore.amp.StaticLossScaler` or `DynamicLossScaler`; see `make_train_step`.
        micro_size: Pieces that each microbatch is cut into inside the graph; see `make_train_step`.
        weight_fn: `(*piece) -> weight`, what a piece counts; see `make_train_step`.

    Inputs:
        The microbatch: Tensors, as for `make_train_step`.

    Outputs:
        The loss, never divided by anything: float32 Tensor of shape `()`. With a loss scaler, as of
        `mindspore.nn.TrainOneStepWithLossScaleCell`, `(loss, overflow, scale)`: whether a window was closed here and dropped (bool, `()`),
        and the scale that the loss was multiplied by (float32, `()`).

    Attributes:
        accumulator: The accumulator it feeds.
        optimizer: The accumulator's.

    Raises:
        TypeError: If an argument is of the wrong kind.
        ValueError: See `make_train_step`; in graph mode also if `set_inputs` gave a dynamic shape.
        RuntimeError: See `make_train_step`.

    Source: `mindspore.nn.TrainOneStepCell` and `TrainOneStepWithLossScaleCell`, whose form it has.

    Example:
        >>> import numpy as np, mindspore as ms
        >>> from mindspore import nn
        >>> from ms_accum import Accumulator, TrainOneStepCell
        >>> network = nn.Dense(2, 1, weight_init="ones", bias_init="zeros")
        >>> optimizer = nn.SGD(network.trainable_params(), learning_rate=0.5)
        >>> cell = TrainOneStepCell(nn.WithLossCell(network, nn.L1Loss()), Accumulator(optimizer, 2, reduction="mean"))
        >>> for target in (4.0, 5.0):
        ...     loss = cell(ms.Tensor(np.ones((4, 2)), ms.float32), ms.Tensor(np.full((4, 1), target), ms.float32))
        ...     print(float(loss), network.weight.asnumpy())
        2.0 [[1. 1.]]
        3.0 [[1.5 1.5]]
    """

    def __init__(
        self,
        network: nn.Cell,
        acc: Accumulator,
        *,
        loss_scaler: Optional[amp.LossScaler] = None,
        micro_size: int = 1,
        weight_fn: Optional[Callable] = None,
    ) -> None:
        # Without a prefix, the network's parameters keep their names.
        super().__init__(auto_prefix=False)
        instance_of("network", network, nn.Cell, "a Cell that gives the loss, such as nn.WithLossCell(network, loss_fn)",
                    "a function goes into make_train_step")
        self.accumulate = make_accumulate(network, acc, checked_micro_size(micro_size), weight_fn, loss_scaler, has_aux=False)
        self.network = network
        self.accumulator = acc
        self.optimizer = acc.optimizer
        self.loss_scaler = loss_scaler
        self.state = ParameterTuple([*acc.parameters, *(parameter for _, parameter in state_of(acc.optimizer))])
        self._flush = _Flush(acc)
        self._returned = False  # whether the last call came to its end

    def __call__(self, *batch: Any, **named: Any) -> Union[Tensor, tuple[Tensor, Tensor, Tensor]]:
        """See the class. RuntimeError if an error left a part of a microbatch in the open window."""
        if not self._returned:
            self.accumulator._require_whole()
        self._returned = False
        try:
            result = super().__call__(*map(with_storage_of_its_own, batch), **named)
        except Exception:
            # A graph in which a kernel failed fails in all its later calls (MindSpore 2.10): compile it again.
            self.compile_cache.clear()
            raise
        self._returned = True
        return result

    def construct(self, *batch: Any) -> Union[Tensor, tuple[Tensor, Tensor, Tensor]]:
        """See the class."""
        acc = self.accumulator
        samples, cut = layout_of(tuple([_kind(argument) for argument in batch]))
        if self.loss_scaler is None:
            loss = self.accumulate(samples, cut, *batch)
            return ops.depend(loss, acc._close_if_due())
        # Sums, for what is read here must not change with the Parameters.
        scale = self.loss_scaler.scale_value + 0.0
        skipped = acc.skipped + 0
        loss = ops.depend(self.accumulate(samples, cut, *batch), (scale, skipped))
        loss = ops.depend(loss, acc._close_if_due())
        return loss, acc.skipped > skipped, scale

    def flush(self) -> Tensor:
        """Close a short window, if one is open; whether one was: bool Tensor of shape `()`. See `FlushCallback`."""
        if not self._returned:
            self.accumulator._require_whole()
        return self._flush()


class _Flush(nn.Cell):
    """`Accumulator.flush` as a Cell: compiled in graph mode."""

    def __init__(self, acc: Accumulator) -> None:
        super().__init__(auto_prefix=False)
        self.accumulator = acc

    def construct(self) -> Tensor:
        return self.accumulator.flush()


def _kind(argument: Any) -> Any:
    """What `split.layout_of` has to know of an argument."""
    if isinstance(argument, Tensor):
        return argument.shape
    return _NESTED if isinstance(argument, (tuple, list, dict)) else None
