"""Train without a name of MindSpore: a program for a process of its own.

    python without_names.py CASE ...

Each runs in a fork of this process, which has imported MindSpore but not ms_accum: it takes a name away, imports
ms_accum, and trains.

    module:name           this name is absent
    mindspore:unmarked    `jit_class` marks nothing
"""
import importlib
import os
import sys
import traceback
import warnings

import mindspore as ms
import numpy as np
from mindspore import nn

RATE = 0.5


def batches():
    """Two windows of two microbatches, of 3 and 1 samples."""
    random = np.random.default_rng(0)
    return [(random.normal(size=(samples, 4)).astype(np.float32), random.normal(size=(samples, 2)).astype(np.float32))
            for samples in (3, 1, 3, 1)]


def by_hand(weight, data):
    """The weight after an update for each two microbatches, in NumPy."""
    for window in zip(data[::2], data[1::2]):
        x, y = map(np.concatenate, zip(*window))
        weight = weight - RATE * 2 * (x @ weight.T - y).T @ x / y.size
    return weight


class Training:
    """A network of one matrix, and its optimizer."""

    def __init__(self):
        self.network = nn.Dense(4, 2, has_bias=False)
        self.optimizer = nn.SGD(self.network.trainable_params(), RATE)
        self.before = self.network.weight.asnumpy().astype(np.float64)

    def forward(self, x, y):
        """The mean loss."""
        return ((self.network(x) - y) ** 2).mean()

    def off(self):
        """How far the weight is from what NumPy gives, and how far it moved."""
        after = self.network.weight.asnumpy()
        return np.abs(after - by_hand(self.before, batches())).max(), np.abs(after - self.before).max()


def with_a_step():
    from ms_accum import make_train_step
    training = Training()
    step = make_train_step(training.forward, training.optimizer, 2)
    for _ in step.epoch(batches()):
        pass
    return training.off()


def with_a_cell():
    from ms_accum import TrainOneStepCell
    training = Training()
    cell = TrainOneStepCell(nn.WithLossCell(training.network, nn.MSELoss()), training.optimizer, 2)
    for batch in batches():
        cell(*map(ms.Tensor, batch))
    return training.off()


def with_an_accumulator():
    from ms_accum import Accumulator
    training = Training()
    accumulator = Accumulator(training.optimizer, 2, reduction="mean")
    grad_fn = ms.value_and_grad(training.forward, None, training.optimizer.parameters)

    def step(x, y):
        _, gradients = grad_fn(x, y)
        return accumulator(gradients, float(x.shape[0]))

    run = step if "MS_JIT" in os.environ else ms.jit(step)
    for batch in batches():
        run(*map(ms.Tensor, batch))
    return training.off()


def train():
    """Train in each way, compiled and op by op."""
    for way in (with_a_step, with_a_cell, with_an_accumulator):
        for op_by_op in (False, True):
            os.environ.pop("MS_JIT", None)
            if op_by_op:
                os.environ["MS_JIT"] = "0"
            ms.set_context(mode=ms.PYNATIVE_MODE if op_by_op else ms.GRAPH_MODE)
            off, moved = way()
            assert moved > 0.1
            assert off < 1e-6, (way.__name__, op_by_op, off)
    os.environ.pop("MS_JIT", None)
    ms.set_context(mode=ms.PYNATIVE_MODE)


def main():
    """Run each case in a fork."""
    for case in sys.argv[1:]:
        module, _, name = case.partition(":")
        if (child := os.fork()) == 0:
            status = 1
            try:
                place = importlib.import_module(module)
                held = vars(place).pop(name) if name != "unmarked" else vars(place).update(jit_class=lambda cls: cls)
                with warnings.catch_warnings():
                    warnings.simplefilter("error", UserWarning)
                    importlib.import_module("ms_accum")
                if held is not None:
                    setattr(place, name, held)  # MindSpore itself needs some names
                warnings.simplefilter("ignore")
                train()
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(status)
        if os.waitpid(child, 0)[1]:
            sys.exit(f"{case}: failed")


main()
