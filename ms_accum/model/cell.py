"""A train step as a Cell, for `mindspore.train.Model` and other code that takes a train-step Cell."""
from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn, Optional

import mindspore as ms
from mindspore import Tensor, nn, ops
from mindspore.ops import constexpr

from ..arguments import Uncopied, fix_options, instance_of, one_of, require_options
from ..core.accumulator import REDUCTIONS, Options, boundary_of
from ..core.boundary import Status
from ..core.length import AccumulateStep
from ..core.window import END, HELD, IN_ROW
from ..steps.batch import NETWORK, checked_axis, positional, positions_of, samples_in_graph
from ..steps.forward import Functions, reported, training_of
from ..steps.train_mode import require_same_parameters
from ..steps.train_step import require_functions, step_of
from ..tensors import unstack

if TYPE_CHECKING:
    from typing_extensions import Unpack


class TrainOneStepCell(Uncopied, nn.Cell):
    """Train with gradient accumulation in a Cell that replaces `mindspore.nn.TrainOneStepCell`, e.g. in a `Model`.

        cell = TrainOneStepCell(nn.WithLossCell(network, loss_fn), optimizer, accumulate_step=4)
        Model(cell).train(epochs, dataset, callbacks=[FlushCallback(), LossMonitor()])

    Each call trains on one microbatch, and updates when the window is full: in graph mode by compiled graphs, in
    PyNative mode op by op. Give `FlushCallback` to count epochs, and to apply the window that is open at their end.
    In the graph of another Cell, as in data sink mode, windows are closed on the device, and one device trains.

    Its Parameters are those of the network and of the optimizer: so much `ModelCheckpoint` saves.
    `ms_accum.save_checkpoint` also saves the counters and the place in the data. Load with `ms_accum.load_checkpoint`
    or `ops.assign`: compiled graphs do not see what `mindspore.load_param_into_net` loads after the first call.

    Args:
        network: A Cell that returns the *mean* loss of its samples (or unmasked tokens), a float Tensor of shape `()`;
            e.g. an `nn.WithLossCell`.
        optimizer: An optimizer. The cell builds an accumulator for it, with `reduction="mean"`.
        accumulate_step: Number of microbatches in a window; see `Accumulator`.
        batch_axis, weight_fn, has_weight, loss_reduction: See `make_train_step`; the network is its `forward_fn`.
        **options: Options of `Accumulator`: `clip_norm`, `min_weight`, `buffer_dtype`, `on_nonfinite`, `max_skips`,
            `reducer`, `stages` and `loss_scaler`.

    Outputs:
        The undivided loss: float32 Tensor of shape `()`. With a loss scaler, `(loss, overflow, scale)`, as from
        `mindspore.nn.TrainOneStepWithLossScaleCell`: `overflow` is whether this microbatch closed a window that was
        dropped (bool, `()`), `scale` is the factor that the loss was multiplied by (float32, `()`).

    Attributes:
        network, optimizer: What was given; `boundary`: the host's side of the window, for checkpoints.

    Raises:
        TypeError, ValueError, RuntimeError: See `make_train_step`. ValueError also if `Model` gets `optimizer=`, too.

    Source: the interface of `mindspore.nn.TrainOneStepCell` and `TrainOneStepWithLossScaleCell`.

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
        optimizer: nn.Optimizer,
        accumulate_step: AccumulateStep,
        *,
        batch_axis: int = 0,
        weight_fn: Optional[Callable] = None,
        has_weight: bool = False,
        loss_reduction: str = "mean",
        **options: Unpack[Options],
    ) -> None:
        super().__init__(auto_prefix=False)  # so that the network's parameters keep their names
        require_options(TrainOneStepCell.__init__, options, Options)
        instance_of("network", network, nn.Cell, "a Cell that returns the loss",
                    "give nn.WithLossCell(network, loss_fn), or a function to make_train_step")
        require_functions(False, has_weight, weight_fn, network=network)
        one_of("loss_reduction", loss_reduction, REDUCTIONS)
        self.network, self.optimizer = network, optimizer
        self._axis, self._scaler = checked_axis(batch_axis), options.get("loss_scaler")
        self.boundary = boundary_of(optimizer, accumulate_step, {
            "the kind of step": "TrainOneStepCell", "batch_axis": self._axis, "weight_fn": weight_fn is not None,
            "has_weight": has_weight, "loss_reduction": loss_reduction}, is_sum=loss_reduction == "sum",
            eager=ms.get_context("mode") == ms.PYNATIVE_MODE, **options)
        self._window = window = self.boundary.window
        require_same_parameters([network], window.exchange.parameters)
        self._functions = Functions(network, positional("weight_fn", weight_fn), has_weight, name=NETWORK)
        self._step = step_of(self.boundary, self._functions, (network,), self._axis, 1)
        self._train = training_of(window, self._functions, None, len(window.buffers) == 0)
        self._takes = (type(network).__name__, *positions_of(network))
        self._inside: Optional[float] = None  # the unit in the graph of another Cell, which closes without the host

        def entered(given: int) -> bool:
            require_arguments(*self._takes, given)
            if window.exchange.ranks > 1:
                raise ValueError("a TrainOneStepCell is in data sink mode or another Cell's graph, but ranks meet on "
                                 "the host before they exchange; give dataset_sink_mode=False, or call the cell alone")
            self._inside = window.unit = window.unit or 1.0  # what is not known yet is 1 in this graph
            return True

        self._enter = constexpr(entered)  # runs when that graph is compiled

    def __call__(self, *batch: Any, **named: Any) -> Any:
        """See the class. RuntimeError if an error left a part of a batch in the open window, or stopped an update."""
        if named:
            raise TypeError(f"got keyword arguments ({', '.join(named)}), expected arguments by position")
        require_arguments(*self._takes, len(batch))
        self._follow_mode()
        scale = None if self._scaler is None else self._scaler.scale_value + 0.0  # a copy: the close adjusts it
        loss = self._step(*batch)
        if scale is None:
            return loss
        dropped = unstack(self._window.counts)[IN_ROW] > 0 if self.boundary.is_closed else Tensor(False)
        return loss, dropped, scale

    def construct(self, *batch: Any) -> Any:
        """Train on a microbatch in the graph of another Cell, which does not run `__call__`."""
        self._enter(len(batch))
        scale = None if self._scaler is None else self._scaler.scale_value + 0.0
        trained = self._train(samples_in_graph(batch, self._axis), batch, END)
        loss = reported(self._window, trained[0], trained[1])
        if len(self._window.buffers) == 0:  # it has updated
            return loss
        held = unstack(self._window.counts)[HELD] + 0
        if self._window.is_full():
            self._window.close()
        counts = unstack(self._window.counts)  # of the state after the branch, which keeps the branch
        closed = counts[HELD] < held
        loss = ops.depend(loss, closed)
        if scale is None:
            return loss
        return loss, ops.logical_and(closed, counts[IN_ROW] > 0), scale

    def set_inputs(self, *inputs: Any, **named: Any) -> None:
        """Declare dynamic shapes of a batch, before the first call: set the inputs of the network."""
        self.network.set_inputs(*inputs, **named)

    def set_grad(self, requires_grad: bool = True) -> nn.Cell:
        """Raise ValueError: a `Model` with `optimizer=` would differentiate the cell and update again each time."""
        if requires_grad:
            raise ValueError("a TrainOneStepCell of ms_accum updates itself, and cannot be trained by another step; "
                             "give Model(TrainOneStepCell(...)) without an optimizer")
        return super().set_grad(False)

    def to_float(self, dst_type: ms.Type) -> NoReturn:
        """Raise ValueError: it would also cast the optimizer. Use mixed precision on the network."""
        raise ValueError("a TrainOneStepCell of ms_accum was given to auto_mixed_precision, to_float or a Model with "
                         f"amp_level, expected its network: the optimizer would compute in {dst_type}, too; "
                         'call network = auto_mixed_precision(network, "O2") before you build the cell')

    def status(self) -> Status:
        """Return the counters in one read, which waits for the device."""
        return self.boundary.status()

    @property
    def update_step(self) -> int:
        """Return the number of updates. It waits for the device where windows may be dropped, or after an error."""
        return self._step.update_step

    def flush(self) -> bool:
        """Apply the incomplete window if one is open. Return whether there was one."""
        self._follow_mode()
        return self.boundary.flush()

    def reset(self) -> None:
        """Drop the open window, and a row of dropped windows; see `TrainStep.reset`."""
        self.boundary.reset()

    def _follow_mode(self) -> None:
        """Take over from another Cell's graph; build the step again if the mode of the context has changed."""
        boundary, eager = self.boundary, ms.get_context("mode") == ms.PYNATIVE_MODE
        if self._inside is not None:
            boundary.missing = None
            if self._window.unit != self._inside:  # it was loaded
                boundary.graphs, self._window.unit = {}, self._inside
        if eager is not boundary.eager:
            boundary.eager, boundary.graphs = eager, {}
            self._step = step_of(boundary, self._functions, (self.network,), self._axis, 1)


fix_options(TrainOneStepCell, "accumulate_step", "batch_axis", "weight_fn", "has_weight", "loss_reduction",
            "learning_rate", *Options.__annotations__)


def require_arguments(network: str, names: str, least: int, most: int, given: int) -> None:
    """Raise TypeError if the network does not take the microbatch, before MindSpore raises an error."""
    if not least <= given <= most:
        remedy = ("leave loss_fn out of Model(TrainOneStepCell(...), loss_fn)" if given < least else
                  "if it computes no loss, give TrainOneStepCell(nn.WithLossCell(network, loss_fn), ...)")
        limit = most if least == most else f"at least {least}" if given < least else f"at most {most}"
        raise TypeError(f"the network {network} does not take the microbatch: it got {given} argument"
                        f"{'s' * (given != 1)}, expected {limit} ({names}); {remedy}")
