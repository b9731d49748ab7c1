"""Runs of `mindspore.train.Model` with a TrainOneStepCell, and what a file holds of one."""
import mindspore as ms
import numpy as np
from mindspore import nn, ops
from mindspore.dataset import GeneratorDataset
from mindspore.train import Model

from ms_accum import TrainOneStepCell
from ms_accum.core.window import ADDED
from ms_accum.selftest.networks import MLP, batches
from support.training import LOSS

SIZES = [6, 6, 6, 6, 2]


def dataset(sizes=SIZES):
    """The microbatches of `mlp.batches`, ragged as they are."""
    return dataset_of(batches(sizes))


def dataset_of(rows):
    """Microbatches as a dataset."""
    rows = [(x.astype(np.float32), y.astype(np.int32)) for x, y in rows]
    return GeneratorDataset(rows, ["x", "y"], shuffle=False)


def train(cell, *callbacks, epochs=1, data=None):
    Model(cell).train(epochs, data or dataset(), callbacks=list(callbacks), dataset_sink_mode=False)


def momentum(parameters, rate=0.1):
    return nn.Momentum(parameters, rate, 0.9)


def make_cell(accumulate_step=2, clip_norm=0.7, optimizer=momentum, **options):
    network = MLP()
    cell = TrainOneStepCell(nn.WithLossCell(network, LOSS), optimizer(network.trainable_params()), accumulate_step,
                            clip_norm=clip_norm, **options)
    return network, cell


class TwoCells(nn.Cell):
    """Trains two networks on the same microbatch."""

    def __init__(self, one, other):
        super().__init__()
        self.one, self.other = one, other

    def construct(self, x, y):
        return self.one(x, y) + self.other(x, y)


def saved(step):
    """What a file holds of a step or a cell: its numbers and place, the parameters and the optimizer."""
    boundary = step.boundary
    counts, sums, _ = boundary.of_last_update()
    held = [p.asnumpy().copy() for p in (*step.optimizer.parameters, *boundary.rates.state.values())]
    return counts, sums, held, (boundary.place.epochs, int(counts[ADDED]) - boundary.place.first)


def load(step, file):
    """Load what `saved` returned."""
    counts, sums, held, place = file

    def assign():
        for p, value in zip((*step.optimizer.parameters, *step.boundary.rates.state.values()), held):
            ops.assign(p, ms.Tensor(value))

    step.boundary.load(counts, sums, assign, place)
