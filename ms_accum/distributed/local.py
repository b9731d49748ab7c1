"""Local updates: every rank trains on its own, and now and then all take one step along the mean of their changes.

    rank 0:  update, update, ... ─┐
    rank 1:  update ──── finish ──┴─ outer step ─► the same parameters on every rank ─► update, update, ...
"""
from __future__ import annotations

from collections.abc import Iterable
from math import inf
from typing import TYPE_CHECKING

import mindspore as ms
from mindspore import Parameter, ParameterTuple, Tensor, nn, ops
from mindspore.communication import get_rank

from ..arguments import LARGEST_INT32, number, whole_number
from ..buffers import state_parameter
from ..gradients import mapped, scaled
from .buckets import MEBIBYTE, Buckets
from .ranks import broadcast_parameters, require_alike, world_size

if TYPE_CHECKING:
    from ..gradients import Gradients, Numbers


class LocalUpdates(nn.Cell):
    """Let every rank make updates of its own, and average what they changed after each `every` of them (DiLoCo).

        difference = mean over the ranks of (anchor - parameter)             # after `every` updates
        momentum = outer_momentum * momentum + difference
        anchor -= outer_learning_rate * (difference + outer_momentum * momentum)
        parameter = anchor                                                   # the same on every rank

    Give it as `after_update`, without a reducer, and call `finish` on every rank at the end of each epoch.

    This is *not* data parallelism: gradients stay on their rank, and between two exchanges the ranks hold different
    parameters. The mean counts each rank that made an update since the last exchange once, however many updates or
    samples it had. All else, the state of the optimizer included, stays on its rank. A single rank takes the outer
    steps, too: it is DiLoCo with one worker, not plain training. With `every=1`, `outer_learning_rate=1`,
    `outer_momentum=0` and SGD without momentum or clipping, it equals `DataParallel()`, as long as the windows of all
    ranks have the same weight.

    The anchors and the momenta take the memory of two more copies of the parameters, one with `outer_momentum=0`. They
    are in the accumulator's checkpoints, of which each rank saves one to a path of its own: after `finish`, or after
    the same number of updates on every rank.

    Args:
        parameters: The optimizer's parameters. They start from rank 0's: load pretrained weights before.
        every: Updates of a rank between two exchanges; 500 in the paper.
        outer_learning_rate: A finite number > 0. With 1 and without momentum, parameters are averaged.
        outer_momentum: Nesterov momentum of the outer step, at least 0 and below 1.

    Raises:
        TypeError: If an argument is of the wrong kind.
        ValueError: If an argument is out of range, or ranks hold different parameters or arguments.
        RuntimeError: If msrun started several ranks and `init()` was not called.

    Source: DiLoCo (Douillard et al. 2023, https://arxiv.org/abs/2311.08105), with the momentum of
    `torch.optim.SGD(nesterov=True)`; without an outer step, local SGD (Stich 2018, https://arxiv.org/abs/1805.09767).

    Example:
        >>> import mindspore as ms, numpy as np
        >>> from mindspore import nn
        >>> from ms_accum import make_train_step
        >>> from ms_accum.distributed import LocalUpdates
        >>> network = nn.Dense(2, 1, weight_init="ones", bias_init="zeros")
        >>> def forward_fn(x):
        ...     return network(x).mean()
        >>> optimizer = nn.SGD(network.trainable_params(), learning_rate=0.5)
        >>> local = LocalUpdates(optimizer.parameters, every=2, outer_learning_rate=0.75, outer_momentum=0)
        >>> train_step = make_train_step(forward_fn, optimizer, accumulate_step=1, after_update=local)
        >>> for _ in range(2):  # two updates from 1 to 0, and the outer step, which goes three quarters of that way
        ...     loss = train_step(ms.Tensor(np.ones((4, 2), np.float32)))
        ...     print(float(loss), network.weight.asnumpy())
        2.0 [[0.5 0.5]]
        0.5 [[0.25 0.25]]
        >>> local.finish()
    """

    def __init__(self, parameters: Iterable[Parameter], every: int = 50, outer_learning_rate: float = 0.7,
                 outer_momentum: float = 0.9) -> None:
        super().__init__(auto_prefix=False)
        self.every = whole_number("every", every, "it counts a rank's updates between exchanges", maximum=LARGEST_INT32)
        self.rate = number("outer_learning_rate", outer_learning_rate, lambda rate: 0 < rate < inf,
                           "a finite number > 0", "give 1 to go all the way")
        self.momentum = number("outer_momentum", outer_momentum, lambda momentum: 0 <= momentum < 1,
                               "a number >= 0 and < 1", "give 0 for none")
        self.trained = ParameterTuple(list(parameters))
        self.dtypes = (ms.float32,) * len(self.trained)  # of what travels: as float16, differences would be rounded
        self.buckets, ranks = None, world_size()
        if ranks > 1:
            require_alike({
                "parameters (names, shapes, dtypes)": repr([(p.name, p.shape, p.dtype) for p in self.trained]),
                "the arguments of LocalUpdates": repr((self.every, self.rate, self.momentum))
            }, "give every rank the same network and arguments")
            broadcast_parameters(self.trained)
            self.buckets = Buckets(self.trained, self.dtypes, 32 * MEBIBYTE, get_rank(), ranks)
        self.updates = state_parameter("outer_updates", (), ms.int32)
        self.anchors = ParameterTuple([state_parameter(f"anchor.{p.name}", p.shape, p.dtype) for p in self.trained])
        self.momenta = ParameterTuple([state_parameter(f"outer_momentum.{p.name}", p.shape, ms.float32)
                                       for p in self.trained if self.momentum > 0])
        for anchor, parameter in zip(self.anchors, self.trained):
            ops.assign(anchor, parameter)

    def construct(self) -> Tensor:
        """Count an update, and take the outer step if it is due. Return the updates in this round: int32 `()`."""
        ops.assign_add(self.updates, 1)
        if self.updates >= self.every:
            self._step(*self._exchanged(1.0))
        return self.updates + 0  # read after the branch: graph mode drops a branch that nothing depends on

    def finish(self) -> None:
        """Take part in the exchanges of the others until no rank has data; then, all parameters are the same.

        For the host: at the end of an epoch, after the train step's own `flush` (which `epoch` calls), on every rank.
        """
        others = 1.0
        while others > 0:
            differences, numbers = self._exchanged(0.0)
            if numbers[0] > 0:
                self._step(differences, numbers)
            others = float(numbers[1])

    def _exchanged(self, present: float) -> tuple[Gradients, Numbers]:
        """Return sums over the ranks: of the differences; of who made an update in this round, and who has data."""
        numbers = ((self.updates > 0).astype(ms.float32), present)
        differences = mapped(_difference, None, self.anchors, self.trained)
        if self.buckets is None:
            return differences, numbers
        return self.buckets.all_reduce(differences, numbers)

    def _step(self, differences: Gradients, numbers: Numbers) -> None:
        steps = mapped(scaled, 1.0 / numbers[0], differences, self.dtypes)
        if self.momentum > 0:
            steps = mapped(_accelerated, self.momentum, self.momenta, steps)
        mapped(_move, self.rate, self.anchors, self.trained, steps)
        ops.assign(self.updates, 0)


def _difference(_: None, anchor: Parameter, parameter: Parameter) -> Tensor:
    return (anchor - parameter).astype(ms.float32)


def _accelerated(decay: float, momentum: Parameter, difference: Tensor) -> Tensor:
    """Return Nesterov's step."""
    moved = decay * momentum + difference
    ops.assign(momentum, moved)
    return difference + decay * moved


def _move(rate: float, anchor: Parameter, parameter: Parameter, step: Tensor) -> None:
    moved = (anchor - rate * step).astype(anchor.dtype)
    ops.assign(anchor, moved)
    ops.assign(parameter, moved)
