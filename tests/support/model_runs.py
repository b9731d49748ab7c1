"""Runs of `mindspore.train.Model` with a TrainOneStepCell, and the oracle after the same run."""
import numpy as np
import reference
from conftest import MLP, batches, values
from following import LOSS
from mindspore import nn
from mindspore.dataset import GeneratorDataset
from mindspore.train import Callback, Model

from ms_accum import TrainOneStepCell

SIZES = [6, 6, 6, 6, 2]
RATES = [0.3, 0.1, 0.05, 0.02, 0.01, 0.005, 0.001]


def rate_of(updates):
    return RATES[updates]


def dataset(sizes=SIZES, broken=None):
    """The microbatches of `conftest.batches`, ragged as they are; the one numbered `broken` is NaN."""
    rows = batches(sizes)
    if broken is not None:
        rows[broken][0][:] = np.nan
    return dataset_of(rows)


def dataset_of(rows):
    """Microbatches as a dataset."""
    rows = [(x.astype(np.float32), y.astype(np.int32)) for x, y in rows]
    return GeneratorDataset(rows, ["x", "y"], shuffle=False)


def train(cell, *callbacks, epochs=1, data=None, sink=False):
    Model(cell).train(epochs, data or dataset(), callbacks=list(callbacks), dataset_sink_mode=sink)


class Recorder(Callback):
    """What the model gave after each microbatch, and the events it saw."""

    def __init__(self):
        self.outputs, self.steps, self.events = [], [], []

    def on_train_begin(self, run_context):
        self.events.append("begin")

    def on_train_epoch_begin(self, run_context):
        self.events.append("epoch begin")

    def on_train_step_end(self, run_context):
        context = run_context.original_args()
        self.outputs.append(context.net_outputs)
        self.steps.append(context.cur_step_num)

    def on_train_epoch_end(self, run_context):
        self.events.append("epoch end")

    def on_train_end(self, run_context):
        self.events.append("end")


def make_cell(accumulate_step=2, clip_norm=0.7, learning_rate=0.1, on_nonfinite="apply", after_update=None, **options):
    network = MLP()
    optimizer = nn.Momentum(network.trainable_params(), learning_rate, 0.9)
    hook = None if after_update is None else after_update(network)
    return network, TrainOneStepCell(nn.WithLossCell(network, LOSS), optimizer, accumulate_step, clip_norm=clip_norm,
                                     on_nonfinite=on_nonfinite, after_update=hook, **options)


def trained_oracle(network, epochs, sizes=SIZES, accumulate_step=2, clip_norm=0.7, learning_rate=0.1):
    """The oracle after the same epochs, and the losses of its microbatches."""
    optimizer = reference.SGD(learning_rate, 0.9)
    oracle = reference.Accumulation(values(network.trainable_params()), optimizer, accumulate_step, "mean", clip_norm)
    losses = []
    for _ in range(epochs):
        for x, y in batches(sizes):
            loss, gradients = reference.loss_and_gradients(oracle.parameters, x, y)
            losses.append(loss)
            oracle(gradients, len(x))
        oracle.flush()
    return oracle, losses


class TwoCells(nn.Cell):
    """Trains two networks on the same microbatch."""

    def __init__(self, one, other):
        super().__init__(auto_prefix=False)
        self.one, self.other = one, other

    def construct(self, x, y):
        return self.one(x, y) + self.other(x, y)
