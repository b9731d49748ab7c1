"""Local updates: every rank trains on its own, and now and then all take one step along the mean of their changes.

    rank 0:  update, update, ... ─┐
    rank 1:  update, update, ... ─┼─ outer step ─► the same parameters on every rank ─► update, update, ...
    rank 2:  update ──── flush ───┘

An exchange carries the difference of each parameter, and two numbers: whether this rank made an update in the round,
and whether it still has data. In `flush`, a rank takes part in exchanges until no rank has data.
"""
from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf

import mindspore as ms
from mindspore import Parameter, ParameterTuple, Tensor, ops
from mindspore.communication import get_rank

from ..arguments import LARGEST_INT32, number, whole_number
from ..gradients import Scalar, mapped, scaled
from ..state import empty_parameter
from .buckets import MEBIBYTE, Buckets, Layout
from .ranks import world_size
from .reducers import OneDevice, make_alike


@dataclass(frozen=True)
class LocalUpdates:
    """Let every rank make updates of its own, and average what they changed after each `every` of them (DiLoCo).

        difference = mean over the ranks of (anchor - parameter)             # after `every` updates
        momentum = outer_momentum * momentum + difference
        anchor -= outer_learning_rate * (difference + outer_momentum * momentum)
        parameter = anchor                                                   # the same on every rank

    This is *not* data parallelism: gradients stay on their rank, and between two exchanges the ranks hold different
    parameters. In return, they exchange `every` times less. Start the script as for `DataParallel`.

    A round is what happens between two exchanges. The mean counts each rank that made an update in the round once,
    however many updates, samples or tokens it had; a rank without an update does not count. `flush` at the end of an
    epoch ends the round: ranks that have run out of data take part in the exchanges of the others, and when no rank has
    data left, a last exchange of what was changed since makes all parameters the same. Every rank has to call it.
    Evaluate and save after it: in a round, the parameters are those of one rank.

    All else is decided by each rank alone: normalisation, clipping, skipping, loss scale, noise scale, the lengths of
    windows, and the state of the optimizer, which no exchange changes. `after_update` runs before the exchange. A
    single rank takes the outer steps, too, along its own differences: it is DiLoCo with one worker, not plain training.

    With `every=1`, `outer_learning_rate=1`, `outer_momentum=0` and SGD without momentum or clipping, it is
    `DataParallel()`, as long as the windows of all ranks have the same weight; else `DataParallel` weighs them, and the
    mean here counts each rank once.

    The parameters at the last exchange (`anchor`) and the momentum take the memory of two more copies of the
    parameters; one with `outer_momentum=0`. An exchange holds the differences and their sums beside them. The first
    anchor is made with the Accumulator: load pretrained weights before. Checkpoints hold both, a file for each rank;
    every rank has to save after the same number of its updates, or after a flush.

    Args:
        every: Updates of a rank between two exchanges. DiLoCo makes 500.
        outer_learning_rate: How far to go along the mean difference: a finite number > 0. With 1 and without momentum,
            parameters are averaged.
        outer_momentum: Nesterov momentum of the outer step, at least 0 and below 1.

    Raises:
        TypeError: If an argument is of the wrong kind.
        ValueError: If an argument is out of range, or, when the Accumulator is made, ranks hold different settings or
            optimizers. Parameters start from rank 0's.
        RuntimeError: If msrun started several ranks and `init()` was not called.

    Source: DiLoCo (Douillard et al. 2023, https://arxiv.org/abs/2311.08105), with the momentum of
    `torch.optim.SGD(nesterov=True)`; without an outer step, it is local SGD (Stich 2018,
    https://arxiv.org/abs/1805.09767).

    Example:
        >>> import mindspore as ms, numpy as np
        >>> from mindspore import nn
        >>> from ms_accum import LocalUpdates, make_train_step
        >>> network = nn.Dense(2, 1, weight_init="ones", bias_init="zeros")
        >>> def forward_fn(x):
        ...     return network(x).mean()
        >>> optimizer = nn.SGD(network.trainable_params(), learning_rate=0.5)
        >>> reducer = LocalUpdates(every=2, outer_learning_rate=0.75, outer_momentum=0)
        >>> train_step = make_train_step(forward_fn, optimizer, accumulate_step=1, reducer=reducer)
        >>> for _ in range(2):  # two updates from 1 to 0, and the outer step, which goes three quarters of that way
        ...     loss = train_step(ms.Tensor(np.ones((4, 2), np.float32)))
        ...     print(float(loss), network.weight.asnumpy())
        2.0 [[0.5 0.5]]
        0.5 [[0.25 0.25]]
    """

    every: int = 50
    outer_learning_rate: float = 0.7
    outer_momentum: float = 0.9

    def __post_init__(self) -> None:
        checked = {
            "every": whole_number("every", self.every, "give the updates of a rank between two exchanges",
                                  maximum=LARGEST_INT32),
            "outer_learning_rate": number("outer_learning_rate", self.outer_learning_rate, lambda rate: 0 < rate < inf,
                                          "a finite number > 0", "give 1 to go all the way"),
            "outer_momentum": number("outer_momentum", self.outer_momentum, lambda momentum: 0 <= momentum < 1,
                                     "a number >= 0 and < 1", "give 0 for none"),
        }
        for name, value in checked.items():
            object.__setattr__(self, name, value)

    def bind(self, layout: Layout) -> LocalSync:
        """Return the reducer of one accumulator. Raises ValueError if ranks are not alike."""
        ranks = world_size()
        if ranks > 1:
            make_alike(layout, repr(self))
        return LocalSync(self, layout, ranks)


@ms.jit_class
class LocalSync(OneDevice):
    """Windows of each rank alone, and one exchange of parameters for many of them."""

    flushes_alone = False

    def __init__(self, settings: LocalUpdates, layout: Layout, ranks: int) -> None:
        super().__init__(layout)
        self.description = repr(settings)
        self.every, self.rate, self.outer_momentum = (
            settings.every, settings.outer_learning_rate, settings.outer_momentum)
        self.trained = ParameterTuple(layout.parameters)
        # As float16, differences would be rounded; float64 does not travel between CPU ranks.
        self.dtypes = (ms.float32,) * len(layout.parameters)
        self.buckets = None
        if ranks > 1:
            self.rank, self.ranks = get_rank(), ranks
            self.buckets = Buckets(replace(layout, dtypes=self.dtypes), 32 * MEBIBYTE, self.rank, ranks)

    def describe(self) -> str:
        """See `OneDevice`."""
        return self.description

    def new_state(self, prefix: str) -> list[Parameter]:
        """Create the state of the outer step, which starts from the present parameters."""
        def like(kind: str, dtypes: tuple[ms.Type, ...]) -> ParameterTuple:
            return ParameterTuple([empty_parameter(f"{prefix}.outer_{kind}.{p.name}", p.shape, dtype)
                                   for p, dtype in zip(self.trained, dtypes)])

        self.anchors = like("anchor", tuple(p.dtype for p in self.trained))
        self.momenta = like("momentum", self.dtypes) if self.outer_momentum > 0 else ()
        self.exchanged = empty_parameter(f"{prefix}.exchanged", (), ms.int32)  # the updates done at the last exchange
        for anchor, parameter in zip(self.anchors, self.trained):
            ops.assign(anchor, parameter)
        return [*self.anchors, *self.momenta, self.exchanged]

    def due(self, updates: int) -> bool:
        """See `OneDevice`."""
        return updates - int(self.exchanged) >= self.every

    def conclude(self, asking: Scalar, updates: Tensor) -> Scalar:
        """Exchange after `every` updates and in a flush, where this returns how many ranks still have data."""
        if asking == 0:
            return self.exchange(0.0, updates)
        if updates - self.exchanged >= self.every:
            self.exchange(1.0, updates)
        return asking

    def exchange(self, present: float, updates: Tensor) -> Scalar:
        """See `OneDevice`. Without an update on any rank, nothing changes."""
        active = (updates > self.exchanged).astype(ms.float32)
        differences = mapped(_difference, None, self.anchors, self.trained)
        others = present
        if self.ranks > 1:
            differences, header = self.buckets.all_reduce(differences, (active, present))
            active, others = header
        # A rank that is not at its end has made updates: no branch then.
        if present > 0 or active > 0:
            steps = mapped(scaled, 1.0 / active, differences, self.dtypes)
            if self.outer_momentum > 0:
                steps = mapped(_accelerated, self.outer_momentum, self.momenta, steps)
            mapped(_move, self.rate, self.anchors, self.trained, steps)
            ops.assign(self.exchanged, updates)
        return others


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
