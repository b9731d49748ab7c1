"""Train without a name of MindSpore: a program for a process of its own.

    python without_names.py CASE ...

Each runs in a fork of this process, which has imported MindSpore but not ms_accum: it takes a name away, imports
ms_accum, trains, and prints a line of JSON: the case, warnings of the import, and what is done where the name counts.

    module:name     this name is absent
    module:*name    it is absent, and several ranks were started: nothing is trained
    unmarked        `jit_class` marks nothing
    all             nothing is absent
    2.11.0          nothing is absent, in this version of MindSpore: nothing is trained
"""
import importlib
import json
import os
import sys
import traceback
import warnings

import mindspore as ms
import numpy as np
from mindspore import nn, ops
from mindspore.dataset import NumpySlicesDataset

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
    for way in (with_a_step, with_an_accumulator):
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


# --- where a name counts ----------------------------------------------------------------------------------------------


def in_a_cell():
    from ms_accum import TrainOneStepCell
    training = Training()
    cell = TrainOneStepCell(nn.WithLossCell(training.network, nn.MSELoss()), training.optimizer, 2)
    ms.set_context(mode=ms.GRAPH_MODE)
    for batch in batches():
        cell(*map(ms.Tensor, batch))
    ms.set_context(mode=ms.PYNATIVE_MODE)
    return training.off()[0] < 1e-6


def called(step, x, y):
    return step(x, y)


def in_jit():
    from ms_accum import make_train_step
    training = Training()
    step = make_train_step(training.forward, training.optimizer, 2)

    @ms.jit
    def compiled(x, y):
        return called(step, x, y)

    compiled(*map(ms.Tensor, batches()[0]))


def known_op_by_op():
    from ms_accum.mindspore_api import isconstant
    parameter = ms.Parameter(ms.Tensor(1.0), "parameter")

    def known():
        return isconstant(parameter)

    return known(), ms.jit(known)()


def has_memory():
    from ms_accum import Accumulator
    return not Accumulator(Training().optimizer, 2, reduction="sum").window.buffers[0].has_init


def cleared():
    from ms_accum.core.kernels import InPlace
    from ms_accum.mindspore_api import InplaceZero
    buffer = ms.Parameter(ms.Tensor([1.0, 2.0]), "buffer")
    if InplaceZero is None:
        InPlace().clear(ms.Tensor(0.0), (buffer,))
    return buffer.asnumpy().tolist()


def of_samples(iterates=False):
    from ms_accum.steps.batch import require_batched
    dataset = NumpySlicesDataset({"x": np.zeros((4, 2), np.float32)})
    require_batched(dataset.create_tuple_iterator() if iterates else dataset)
    require_batched(dataset.batch(2))


def used_up():
    from ms_accum.core.optimizers import require_rates
    optimizer = nn.SGD(Training().network.trainable_params(), [0.1])
    ops.assign(optimizer.global_step, ms.Tensor([1], ms.int32))
    require_rates(optimizer)


def sharded():
    from ms_accum.distributed.parallel_modes import require_unsharded
    ms.set_auto_parallel_context(parallel_mode="semi_auto_parallel")
    try:
        return require_unsharded()
    finally:
        ms.reset_auto_parallel_context()


def checked():
    from ms_accum import check_equivalence
    training = Training()
    return bool(check_equivalence(training.forward, training.network, batches()[0], pieces=3))


def ranks():
    from ms_accum import Accumulator, DataParallel
    Accumulator(Training().optimizer, 2, reduction="sum", reducer=DataParallel())


WHERE = {
    "jit_class": in_a_cell, "isconstant": known_op_by_op, "PrimitiveWithInfer": in_jit, "InplaceZero": cleared,
    "no_init_parameters": has_memory, "LearningRateSchedule": used_up, "BatchDataset": of_samples,
    "SourceDataset": of_samples, "Iterator": lambda: of_samples(True), "_KERNEL_SEED": checked,
    "get_auto_parallel_context": sharded, "get_rank": ranks, "*get_rank": ranks}


def run(case):
    """Return the warnings of the import, and by name what is done where the name counts."""
    module, colon, name = case.partition(":")
    if is_many := name.startswith("*"):
        os.environ["MS_WORKER_NUM"] = "2"
    if case[0].isdigit():
        ms.__version__ = case
    if case == "unmarked":
        ms.jit_class, name = lambda cls: cls, "jit_class"
    place = importlib.import_module(module) if colon else None
    held = vars(place).pop(name.strip("*")) if place else None
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        importlib.import_module("ms_accum")
    if place:
        setattr(place, name.strip("*"), held)  # MindSpore itself needs some names
    if not is_many and not case[0].isdigit():
        train()
    where = {at: done(place) for at, place in WHERE.items() if at == name or (case == "all" and at != "*get_rank")}
    return [str(warning.message) for warning in said if warning.category is UserWarning], where


def done(place):
    """What a function returns or raises, as text."""
    try:
        return repr(place())
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def main():
    """Run each case in a fork."""
    for case in sys.argv[1:]:
        sys.stdout.flush()
        if (child := os.fork()) == 0:
            warnings.simplefilter("ignore")
            status = 1
            try:
                print(json.dumps([case, *run(case)]), flush=True)
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(status)
        if os.waitpid(child, 0)[1]:
            sys.exit(f"{case}: failed")


main()
