"""Graphs grow with the number of tensors, not with its square: operands are counted, in all passes of MindSpore."""
import os
import re
from functools import partial

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, amp, nn
from support.modes import compiled

from ms_accum import Accumulator
from ms_accum.batch_size import GradientNoiseScale
from ms_accum.distributed.buckets import Buckets
from ms_accum.tensors import finite_sum

SIZES = 8, 16, 32


def parameters(count):
    return [Parameter(Tensor(np.ones((2, 2), np.float32)), name=f"w{i}") for i in range(count)]


def gradients(count):
    return [Tensor(np.full((2, 2), i), ms.float32) for i in range(count)]


def stepping(count):
    """Add a microbatch whose weight is a Tensor, and update: with all that loops over gradients."""
    accumulator = Accumulator(
        nn.SGD(parameters(count), 0.1), 1, 1.0, reduction="mean", on_nonfinite="skip_window",
        stages=(GradientNoiseScale(),), loss_scaler=amp.StaticLossScaler(2.0**8))

    def step(weight, *grads):
        return accumulator(grads, weight)

    return step


def buckets_of(shapes, mixed, size):
    """Buckets of 16 bits and 32 in turn if mixed."""
    return Buckets(shapes, [(ms.float32, ms.float16)[i % 2 if mixed else 0] for i in range(len(shapes))], size)


@ms.jit_class
class Doubling:
    """In place of a group of ranks: its sums are twice what it sums."""

    def sum(self, values):
        return values + values


DOUBLING = Doubling()


def exchanging(count, mixed):
    """Sum gradients of all ranks, in units of the weight."""
    of_ranks = buckets_of([(2, 2)] * count, mixed, 2**20)

    def step(weight, *grads):
        return finite_sum(of_ranks.summed(DOUBLING, grads, weight, (weight,))[0])

    return step


def listing(count):
    """The control: a list comprehension."""
    def step(weight, *grads):
        return finite_sum(tuple([grad * weight for grad in grads]))

    return step


def operands(step, count, folder):
    """How often the graphs of a call name a node."""
    os.environ["MS_DEV_SAVE_GRAPHS_PATH"] = str(folder)
    ms.jit(step)(Tensor(2.0), *gradients(count))
    texts = [file.read_text(encoding="utf-8", errors="replace") for file in folder.rglob("*.ir")]
    return sum(len(re.findall(r"%\d+", text)) for text in texts)


def growth(make, folder):
    """What 16 of 32 tensors add, over what 8 of 16 add: 2 if each adds the same, 4 if it adds what is there already."""
    small, middle, large = (operands(make(count), count, folder / str(count)) for count in SIZES)
    assert small > 1000
    return (large - middle) / (middle - small)


# MindSpore reads at its first graph whether it writes files.
@pytest.mark.slow
@pytest.mark.fresh_process("counted")
@pytest.mark.parametrize("graphs", ["counted"])
def test_each_gradient_adds_as_many_operands(graphs, tmp_path, monkeypatch):
    """In an accumulator, and in exchanges. Control: a list comprehension."""
    monkeypatch.setenv("MS_DEV_SAVE_GRAPHS", "1")
    monkeypatch.setenv("MS_DEV_SAVE_GRAPHS_PATH", "")
    makes = {"accumulator": stepping, "exchange": partial(exchanging, mixed=False),
             "exchange of two dtypes": partial(exchanging, mixed=True), "list": listing}
    found = {name: growth(make, tmp_path / name) for name, make in makes.items()}
    assert found.pop("list") > 2.5, found
    assert [name for name, times in found.items() if abs(times - 2) > 0.2] == [], found


@pytest.mark.parametrize("mixed", [False, True])
def test_buckets_hold_each_gradient(mixed, mode):
    """In the order of the parameters. So many tensors of one bucket once had graphs too deep for MindSpore."""
    grads = [Tensor(np.random.default_rng(i).integers(999, size=shape), ms.float32)
             for i, shape in enumerate([(2, 2), (3,), (), (1, 5)] * 40)]
    of_ranks = buckets_of([grad.shape for grad in grads], mixed, 2500)

    def step(weight, *grads):
        return of_ranks.summed(DOUBLING, grads, weight, (weight, weight + 1))

    summed, numbers = compiled(step, mode)(Tensor(0.5), *grads)
    assert [one.asnumpy().tolist() for one in summed] == [one.asnumpy().tolist() for one in grads]
    assert [float(number) for number in numbers] == [1, 3]
    assert {one.dtype for one in summed} == ({ms.float16, ms.float32} if mixed else {ms.float32})
