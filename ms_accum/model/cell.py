"""A train step as a Cell, for `mindspore.train.Model` and other code that takes a train-step Cell."""
from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import TYPE_CHECKING, Any, NoReturn, Optional, Union
from warnings import warn

import mindspore as ms
from mindspore import ParameterTuple, Tensor, nn, ops
from mindspore.ops import constexpr

from ..arguments import Uncopied, fix_options, instance_of, one_of, require_options
from ..core.accumulator import REDUCTIONS, Accumulator, Options
from ..core.optimizers import INSTANCE, cell_prefix, own_name, state_of, warn_if_idle
from ..core.stream import Stream
from ..distributed.parallel_modes import require_unsharded
from ..steps.batch import NETWORK, Loss, checked_axis, columns_of, layout, positional, positions_of, samples_in_graph
from ..steps.errors import explain, name_columns
from ..steps.pieces import Pieces
from ..steps.shapes import Shapes
from ..steps.train_mode import TrainMode, require_same_parameters
from ..steps.train_step import (
    averaging,
    fix_unit_of_sums,
    require_functions,
    require_one_weight_source,
    weights_count,
)

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ..core.boundary import Status
    from ..core.length import AccumulateStep

_AGAIN = ("an option in the optimizer's param_groups was changed, so the cell is compiled again, as after each such "
          "change, and Dropout begins with its first masks again; make_train_step compiles only the update again")


class TrainOneStepCell(Uncopied, nn.Cell):
    """Train with gradient accumulation in a Cell that replaces `mindspore.nn.TrainOneStepCell`, e.g. in a `Model`.

        cell = TrainOneStepCell(nn.WithLossCell(network, loss_fn), optimizer, accumulate_step=4)
        Model(cell).train(epochs, dataset, callbacks=[FlushCallback(), LossMonitor()])

    A window that is open at the end of an epoch continues in the next epoch; give `FlushCallback` to apply it.

    Each call trains on one microbatch, and updates when the window is full. Like any Cell, it is compiled in graph mode
    and runs op by op in PyNative. Its Parameters include all state of the network, the optimizer and the accumulator,
    so `ModelCheckpoint` also saves an open window.

    Load such a checkpoint before the first microbatch. Later, `Parameter.set_data` does not change the values in a
    compiled graph with branches or, in PyNative, in an optimizer that has run (MindSpore 2.10): the cell continues with
    the old values, without an error. This includes `mindspore.load_param_into_net` and
    `EarlyStopping(restore_best_weights=True)`. `ms_accum.load_checkpoint` and `ops.assign` work at any time.

    Args:
        network: A Cell that returns the *mean* loss of its samples (or unmasked tokens), a float Tensor of shape `()`;
            e.g. an `nn.WithLossCell`.
        optimizer: A MindSpore optimizer; see `Accumulator`. The cell builds an accumulator of its own for it.
        accumulate_step: Number of microbatches in a window; see `Accumulator`.
        batch_axis: The axis that counts the samples; see `make_train_step`.
        weight_fn: `(*batch) -> weight`: the denominator of the network's mean; see `make_train_step`.
        has_weight: Whether the network returns `(loss, weight)`; see `make_train_step`.
        loss_reduction: "sum" if the network returns a sum; see `make_train_step`.
        **options: Options of `Accumulator`: `clip_norm`, `loss_scaler`, `on_nonfinite`, `max_skips`, `reducer`,
            `stages` and `buffer_dtype`.

    Inputs:
        The microbatch: Tensors, as for `make_train_step`.

    Outputs:
        The undivided loss: float32 Tensor of shape `()`. With a loss scaler, `(loss, overflow, scale)`, as from
        `mindspore.nn.TrainOneStepWithLossScaleCell`: `overflow` is whether this microbatch closed a window that was
        dropped (bool, `()`), `scale` is the factor that the loss was multiplied by (float32, `()`).

    Attributes:
        accumulator: The accumulator that collects the gradients.
        optimizer: The optimizer of the accumulator.

    Raises:
        TypeError: If an argument is of the wrong kind.
        ValueError: See `make_train_step`. Also if the optimizer holds Parameters of another network with the same
            names, and if `Model` also gets `optimizer=`.
        RuntimeError: See `make_train_step`.

    Source: the interface is that of `mindspore.nn.TrainOneStepCell` and `TrainOneStepWithLossScaleCell`.

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
        # Without a prefix, the network's parameters keep their names.
        super().__init__(auto_prefix=False)
        require_options(TrainOneStepCell.__init__, options, Options)
        instance_of("network", network, nn.Cell, "a Cell that returns the loss",
                    "give nn.WithLossCell(network, loss_fn), or a function to make_train_step")
        require_functions(network=network, weight_fn=weight_fn)
        require_one_weight_source(has_weight, weight_fn, NETWORK)
        require_unsharded([network])
        accumulator = averaging(optimizer, accumulate_step, **options)
        require_same_parameters([network], accumulator.weights)
        _name_for_a_cell(accumulator)
        self.network, self.accumulator, self.optimizer = network, accumulator, accumulator.optimizer
        self.state = ParameterTuple([*accumulator.parameters, *(p for _, p in state_of(accumulator.optimizer))])
        self._batch_axis = checked_axis(batch_axis)
        one_of("loss_reduction", loss_reduction, REDUCTIONS)
        self.window, self._boundary, self.scaler = accumulator.window, accumulator.boundary, accumulator.loss_scaler
        self.window.exchange.require_alike({
            "the kind of step": "TrainOneStepCell", "batch_axis": self._batch_axis, "weight_fn": weight_fn is not None,
            "has_weight": has_weight, "loss_reduction": loss_reduction})
        fix_unit_of_sums(self.window, loss_reduction)
        self._boundary.settings["weights"] = weights_count(NETWORK, has_weight, weight_fn)
        self._weight_fn = weight_fn
        self._loss = Loss(self.window, network, positional("weight_fn", weight_fn), False, loss_reduction, name=NETWORK,
                          has_weight=has_weight)
        self._stream = Stream(self.window)
        self._shapes = Shapes(network, type(self).__name__)
        self._takes = (type(network).__name__, *positions_of(network))
        self._nothing = Pieces(accumulator.boundary, self._loss, 0, (), 1)
        self._context = ms.get_context("mode")
        self._mode: Optional[TrainMode] = None
        self._train_flags: Optional[tuple[bool, ...]] = None
        self._changes: Optional[int] = None  # of options of the optimizer, in the last call; see `Boundary`

    def __call__(self, *batch: Any, **named: Any) -> Union[Tensor, tuple[Tensor, Tensor, Tensor]]:
        """See the class. RuntimeError if an error left a part of a batch in the open window, or stopped an update."""
        if named:
            raise TypeError(f"got keyword arguments ({', '.join(named)}), expected arguments by position; give them in "
                            "the order of the network's, or use make_train_step")
        require_arguments(*self._takes, len(batch))
        samples = self._settle_unit(batch)
        self._settle_mode(len(batch))
        try:
            self._settle_driver()
            if samples == 0:
                return self._count_nothing(batch)
            self._boundary.begin(on_device=True)
            changes, self._changes = self._changes, self._boundary.changes
            if changes not in (None, self._changes):  # perhaps in a flush or a save
                self.compile_cache.clear()
                if not self._boundary.eager:
                    warn(_AGAIN, UserWarning, stacklevel=2)
            began = perf_counter()
            result = super().__call__(*batch)
            shapes = self._shapes.declared(len(batch)).undeclared(batch)
            if shapes not in self._shapes.compiled and not self._boundary.eager:
                self._shapes.note(shapes, perf_counter() - began)
            self._boundary.end_on_device()
            return result
        except Exception as error:
            name_columns(error, batch, columns_of(self.network, len(batch), ()), self.accumulator.weights)
            self._explain(error)
            raise

    def _count_nothing(self, batch: tuple) -> Union[Tensor, tuple[Tensor, Tensor, Tensor]]:
        """Count an empty batch (a filter may leave one). The host closes the window after it."""
        accumulator, scaler = self.accumulator, self.accumulator.loss_scaler
        scale = None if scaler is None else scaler.scale_value + 0.0
        skipped = 0 if scale is None else int(accumulator.skipped)
        self._boundary.forget()
        missing = self._boundary.begin()
        loss = self._nothing(*batch)
        self._boundary.end(missing)
        self._boundary.forget()
        return loss if scale is None else (loss, Tensor(int(accumulator.skipped) > skipped), scale)

    def compile(self, *batch: Any, **named: Any) -> Any:
        """Compile the cell for a microbatch, as any Cell."""
        self._settle_unit(batch)
        return super().compile(*batch, **named)

    def set_inputs(self, *inputs: Any, **named: Any) -> None:
        """Declare dynamic shapes of a batch, before the first call: set the inputs of the network, also by name."""
        self.network.set_inputs(*inputs, **named)
        self._shapes = Shapes(self.network, type(self).__name__)

    def _settle_mode(self, columns: int) -> None:
        """Warn if the network is in evaluation mode, and compile again if the mode has changed."""
        if self._mode is None:
            positional("weight_fn", self._weight_fn, columns)  # raises an error if it does not take them
            self._mode = TrainMode((self.network,), self.accumulator.weights)
            self._boundary.layers += self._mode.layers
            if self._boundary.settings["weights"] == "samples":
                self._mode.warn_of_class_weights()
            if ms.get_context("mode") == ms.PYNATIVE_MODE:
                warn_if_idle(self.optimizer)
            else:
                self._shapes.warn_if_ignored(self._mode.layers, columns)
        flags = tuple([layer.training for layer in self._mode.layers])
        if flags != self._train_flags:
            self._mode.warn_if_evaluating(flags)
            if self._train_flags is not None:
                self.compile_cache.clear()
            self._train_flags = flags

    def _settle_unit(self, batch: tuple) -> int:
        """Return the number of samples. That of the first batch becomes the unit of weights, which graphs hold.

        In graph mode, take what the network declares of dynamic shapes.
        """
        declared = self._shapes.declared(len(batch))
        if ms.get_context("mode") == ms.GRAPH_MODE and any(given is not None for given in declared.declared):
            super().set_inputs(*declared(batch))
        samples = layout(batch, self._batch_axis)[0]
        if samples > 0:
            self.window.fix_unit(float(samples))
        return samples

    def construct(self, *batch: Any) -> Union[Tensor, tuple[Tensor, Tensor, Tensor]]:
        """See the class."""
        require_arguments(*self._takes, len(batch))  # another Cell's graph does not run `__call__`
        window = self.window
        if self.scaler is None:
            loss = self._add(batch)
            return ops.depend(loss, window.close_if(window.is_full()))
        # `+ 0` copies: the Parameters change before these are read.
        scale = self.scaler.scale_value + 0.0
        skipped = window.skipped + 0
        loss = ops.depend(self._add(batch), (scale, skipped))
        loss = ops.depend(loss, window.close_if(window.is_full()))
        return loss, window.skipped > skipped, scale

    def _add(self, batch: tuple) -> Tensor:
        """Add a microbatch. Return its loss."""
        found = self._loss.gradients_of(samples_in_graph(batch, self._batch_axis), batch, True)
        self.window.add(found["gradients"], found["weight"], found["factor"], ends=1)
        return found["loss"]

    def set_grad(self, requires_grad: bool = True) -> nn.Cell:
        """Raise ValueError: a `Model` with `optimizer=` would differentiate the cell and update again each time."""
        if requires_grad:
            raise ValueError("a TrainOneStepCell of ms_accum computes the gradients and updates itself, and cannot be "
                             "trained by another step; give Model(TrainOneStepCell(...)) without an optimizer")
        return super().set_grad(False)

    def to_float(self, dst_type: ms.Type) -> NoReturn:
        """Raise ValueError: it would also cast the optimizer and the buffers. Use mixed precision on the network."""
        raise ValueError("a TrainOneStepCell of ms_accum was given to auto_mixed_precision or to_float, or to a Model "
                         f"with amp_level, expected its network: the optimizer would compute in {dst_type}, too; "
                         'call network = auto_mixed_precision(network, "O2") before you build the cell')

    def status(self) -> Status:
        """Return the accumulator's counters (see `Accumulator`) in one read, which waits for the device."""
        return self.accumulator.status()

    def reset(self) -> None:
        """Drop the open window, also after an error."""
        self.accumulator.reset()

    def flush(self) -> bool:
        """Apply the incomplete window if one is open. Return whether a window was closed (applied or dropped)."""
        try:
            self._settle_driver()
            return self._boundary.flush()[0]
        except Exception as error:
            self._explain(error)
            raise

    def _settle_driver(self) -> None:
        """Run op by op in PyNative mode, where gradients stream into their buffers, and by graphs in graph mode."""
        context = ms.get_context("mode")
        if context != self._context:
            self._context = context
            self._loss.differentiate()
        eager = context == ms.PYNATIVE_MODE
        self._boundary.run_as(eager)
        self._loss.stream = self._stream if eager else None

    def _explain(self, error: Exception) -> None:
        """Forget all graphs, and raise an error that names the cause, if it is known; see `explain`."""
        explain(error, self.optimizer, self._forget_graphs, self.window.exchange)

    def _forget_graphs(self) -> None:
        self.compile_cache.clear()
        self._boundary.forget_graphs()


fix_options(TrainOneStepCell, "accumulate_step", "batch_axis", "weight_fn", "has_weight", "loss_reduction",
            "learning_rate", *Options.__annotations__)


@constexpr
def require_arguments(network: str, names: str, least: int, most: int, given: int) -> bool:
    """Raise TypeError if the network does not take the microbatch, before MindSpore raises an error."""
    if not least <= given <= most:
        remedy = ("leave loss_fn out of Model(TrainOneStepCell(...), loss_fn), which gives the cell the data alone"
                  if given < least else
                  "if it computes no loss, give TrainOneStepCell(nn.WithLossCell(network, loss_fn), ...)")
        limit = f"at least {least}" if given < least else f"at most {most}"
        raise TypeError(f"the network {network} does not take the microbatch: it got {given} argument"
                        f"{'s' * (given != 1)}, expected {most if least == most else limit} ({names}); {remedy}")
    return True


def _name_for_a_cell(accumulator: Accumulator) -> None:
    """Name all state after the network, so that names do not depend on what else the process has built.

    So MindSpore's checkpoints can be loaded in the next process, and two cells whose networks have different names can
    be in one graph. State of the optimizer whose name ends in a parameter's name is unique already.
    """
    optimizer = accumulator.optimizer
    names, prefix = tuple(parameter.name for parameter in accumulator.weights), cell_prefix(optimizer)
    for parameter in accumulator.parameters:
        parameter.name = INSTANCE.sub(prefix, parameter.name)
    for _, parameter in state_of(optimizer):
        name = own_name(optimizer, parameter.name)
        parameter.name = name if name.endswith(names) else prefix + name
