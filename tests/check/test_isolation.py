"""check_equivalence leaves no trace, and finds layers outside of the network."""
import importlib
import os
import random
from functools import partial

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn, ops
from support.layers import Counter, causes, drawn, labels, normal
from support.modes import compiled_graphs

from ms_accum import check_equivalence, make_train_step
from ms_accum.selftest.networks import mean_loss

BATCH = normal(12, 6), labels(12)


class Everything(nn.Cell):
    """Statistics, masks, a random primitive with a state of its own, a frozen and a shared layer."""

    def __init__(self):
        super().__init__()
        self.dense, self.norm, self.drop = nn.Dense(6, 6), nn.BatchNorm1d(6), nn.Dropout(p=0.5)
        self.frozen, self.noise = nn.BatchNorm1d(6), ops.StandardNormal(seed=5)
        self.frozen.set_train(False)
        self.out = nn.Dense(6, 3)
        self.out.bias.requires_grad = False
        self.counter = Parameter(Tensor(0, ms.int32), name="counter", requires_grad=False)
        for cell in (self, self.norm, self.drop):
            cell.training = True

    def construct(self, x):
        ops.assign_add(self.counter, 1)
        x = self.drop(self.frozen(self.norm(self.dense(x))))
        return self.out(x + 0.1 * ops.dropout(self.noise(x.shape), 0.5, True))


def taught(network, teacher, broken):
    def forward_fn(x, y):
        loss = ops.cross_entropy(network(x) + teacher(x), y) + float(np.random.rand() + random.random()) * 0
        teacher.seen = len(x)  # an attribute that it did not have
        if broken and len(x) < 12:
            raise KeyError("not with so few")
        return loss
    return forward_fn


def trace(*cells):
    """All that a check might leave behind."""
    return [(
        name, type(cell).__name__, cell.training, cell.phase, sorted(vars(cell)),
        len(cell._forward_hook), [id(p) for p in cell._primitives.values()],  # noqa: SLF001
        [(p.name, p.requires_grad, p.dtype, p.asnumpy().tobytes()) for p in cell.get_parameters(expand=False)])
            for root in cells for name, cell in root.cells_and_names()]


def draws(network):
    """Numbers from every source of randomness."""
    network.norm.set_train(False)
    ones = ops.ones((4, 4))
    return [network(normal(4, 6)).asnumpy(), network.drop(ones).asnumpy(), ops.dropout(ones, 0.5, True).asnumpy(),
            network.noise((3,)).asnumpy(), ops.standard_normal((3,)).asnumpy(), np.random.rand(3),
            np.array(random.random())]


@pytest.mark.parametrize("broken", [False, True])
def test_no_trace_is_left(mode_named, broken, monkeypatch):
    """Also if forward_fn raises, for a piece alone. Control: the numbers drawn without a check."""
    # Set below, and unset again after the test. Not by its name, which `mindspore.common` gives to a function, too.
    monkeypatch.setattr(importlib.import_module("mindspore.common.seed"), "_GLOBAL_SEED", None)
    numbers = []
    for check in (True, False):
        mode_named("pynative")
        ms.set_seed(7)
        random.seed(7)
        network, teacher = Everything(), nn.SequentialCell(nn.Dense(6, 3), nn.BatchNorm1d(3)).set_train()
        network(BATCH[0])  # randomness has begun
        optimizer = nn.Momentum(network.trainable_params(), 0.1, 0.9)
        mode_named("graph")
        before = trace(network, teacher, optimizer)
        if check and broken:
            with pytest.raises(KeyError, match="not with so few"):
                check_equivalence(taught(network, teacher, broken), network, BATCH, 3)
        elif check:
            assert not check_equivalence(taught(network, teacher, broken), network, BATCH, 3).ok
        assert trace(network, teacher, optimizer) == before
        assert (ms.get_context("mode"), "MS_JIT" in os.environ) == (ms.GRAPH_MODE, False)
        mode_named("pynative")
        numbers.append(draws(network))
    for one, other in zip(*numbers):
        np.testing.assert_array_equal(one, other)


def test_a_check_disturbs_no_training():
    """A train step that was compiled before goes on as without one, and compiles nothing."""
    network = drawn(nn.SequentialCell(nn.Dense(6, 8), nn.BatchNorm1d(8), Counter(), nn.Dense(8, 3)))
    train_step = make_train_step(mean_loss(network), nn.SGD(network.trainable_params(), 0.1), 2)
    start, trained = [p.asnumpy().copy() for p in network.get_parameters()], []
    for check in (False, True):
        for p, value in zip(network.get_parameters(), start):
            ops.assign(p, Tensor(value))
        for _ in range(2):
            train_step(*BATCH)
        compiled, before = compiled_graphs(), trace(network)
        if check:
            report = check_equivalence(mean_loss(network), network, BATCH, 3)
            assert (report.ok, [cause.type for cause in report.causes]) == (False, ["Counter", "BatchNorm1d"])
        assert trace(network) == before
        for _ in range(4):
            train_step(*BATCH)
        assert compiled_graphs() == compiled
        trained.append([p.asnumpy().copy() for p in network.get_parameters()])
    for one, other in zip(*trained):
        np.testing.assert_array_equal(one, other)
    assert (trained[0][0] != start[0]).any()


class LossCell(nn.Cell):
    def __init__(self, network, head):
        super().__init__(auto_prefix=False)
        self.inner, self.head = network, head

    def construct(self, x, y):
        return ops.cross_entropy(self.head(self.inner(x)), y)


@pytest.mark.parametrize("form", ["partial", "method", "cell", "jit"])
def test_layers_outside_of_network_are_found(form):
    """A head with BatchNorm that the checked network does not hold, behind every kind of function."""
    network, head = nn.Dense(6, 6), nn.SequentialCell(nn.BatchNorm1d(6), nn.Dense(6, 3)).set_train()

    def helper(x):
        return head(network(x))

    def closure(x, y):
        return ops.cross_entropy(helper(x), y)

    def three(_, x, y):
        return closure(x, y)
    forward_fn = {"partial": partial(three, None), "method": LossCell(network, head).construct,
                  "cell": LossCell(network, head), "jit": ms.jit(closure)}[form]
    before = trace(head)
    report = check_equivalence(forward_fn, network, BATCH, 3)
    assert [(layer.rpartition(".")[2], kind) for layer, kind, _ in causes(report)] == [("0", "BatchNorm1d")]
    assert trace(head) == before
