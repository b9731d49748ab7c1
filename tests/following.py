"""A run of a driver that is held against the oracle at every call, and the small pieces that tests of drivers are made of."""
import os
from contextlib import contextmanager, nullcontext

import mindspore as ms
import numpy as np
import pytest
import reference
from conftest import MLP, Counting, batches, difference, tensors, values
from mindspore import ParameterTuple, Tensor, nn

from ms_accum import Accumulator, TrainOneStepCell, make_train_step

SIZES = [6, 6, 7, 6, 7, 6, 2]
IGNORE = -100
LOSS = nn.CrossEntropyLoss(ignore_index=IGNORE)


@contextmanager
def op_by_op():
    """A train step compiles itself; MindSpore's own switch makes it run without a graph."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MS_JIT", "0")
        yield


def run_as(mode):
    """Compiled or not, for the names in `conftest.MODES`; "graph" is GRAPH_MODE, for Cells too."""
    assert mode == "pynative" or "MS_JIT" not in os.environ
    return op_by_op() if mode == "pynative" else nullcontext()


def forward_of(network, aux=None):
    """The forward function of a classifier: the loss, and with `aux` ("rows" or "tuple") something besides."""
    def forward_fn(x, y):
        logits = network(x)
        loss, right = LOSS(logits, y), logits.argmax(1) == y
        if aux == "tuple":
            return loss, (logits, right.astype(ms.float32).mean(), x * 2, y, right)
        return loss if aux is None else (loss, logits)

    return forward_fn


def make_driver(driver, network, acc, aux=None, **options):
    """A train step of the strategy `driver`, or a TrainOneStepCell."""
    if driver == "cell":
        return TrainOneStepCell(nn.WithLossCell(network, LOSS), acc, **options)
    return make_train_step(forward_of(network, aux), acc, strategy=driver, has_aux=aux is not None, **options)


def require_aux(aux, parameters, x, y):
    """Rows in the order of the batch, scalars as the mean over it, in the form and dtypes of a piece's aux."""
    rows = aux if isinstance(aux, Tensor) else aux[0]
    _, logits = reference.network(parameters, x)
    np.testing.assert_allclose(rows.asnumpy(), logits, rtol=1e-5, atol=1e-5)  # MindSpore's tanh is off by up to 7e-6
    if isinstance(aux, tuple):
        expected = logits.argmax(1) == y
        assert float(aux[1]) == pytest.approx(expected.mean(), rel=1e-6)
        assert (aux[2].asnumpy() == x.astype(np.float32) * 2).all()
        assert (aux[3].asnumpy().tolist(), aux[3].dtype) == (y.tolist(), ms.int32)
        assert (aux[4].asnumpy().tolist(), aux[4].dtype) == (expected.tolist(), ms.bool_)


def follow(driver="fused", sizes=SIZES, accumulate_step=2, clip_norm=0.7, epochs=1, aux=None, after_epoch=None, **options):
    """Train with a driver and the oracle; compare losses, aux and counters at every call, return the parameters' difference."""
    network = MLP()
    acc = Accumulator(nn.Momentum(network.trainable_params(), 0.1, 0.9), accumulate_step, clip_norm, reduction="mean")
    train_step = make_driver(driver, network, acc, aux, **options)
    oracle = reference.Accumulation(values(network.trainable_params()), reference.SGD(0.1, 0.9), accumulate_step, "mean", clip_norm)
    for _ in range(epochs):
        for x, y in batches(sizes):
            before = values(network.trainable_params())
            result = train_step(*tensors(x, y))
            loss = result[0] if isinstance(result, tuple) else result
            if aux is not None:
                require_aux(result[1], before, x, y)
            expected, gradients = reference.loss_and_gradients(oracle.parameters, x, y)
            oracle(gradients, len(x))
            assert float(loss) == pytest.approx(expected, rel=1e-5)
            assert (int(acc.mini_step), int(acc.update_step)) == (oracle.mini_step, oracle.update_step)
        assert bool(train_step.flush()) == oracle.flush()
        assert not bool(train_step.flush())
        assert (int(acc.mini_step), int(acc.update_step)) == (0, oracle.update_step)
        if after_epoch is not None:
            after_epoch()
    if clip_norm is not None:
        assert float(acc.grad_norm) == pytest.approx(oracle.grad_norm, rel=1e-5, nan_ok=True)
    return difference(values(network.trainable_params()), oracle.parameters)


def counting(network, accumulate_step=1, **options):
    """An accumulator whose optimizer keeps the gradient it was given."""
    options.setdefault("reduction", "mean")
    return Accumulator(Counting(ParameterTuple(network.trainable_params())), accumulate_step, **options)


def gradient_of(forward_fn, network, batch, **options):
    """The gradient that one call hands to the optimizer, and what the call returns."""
    acc = counting(network)
    result = make_train_step(forward_fn, acc, **options)(*batch)
    assert int(acc.optimizer.calls) == 1
    return values(acc.optimizer.seen), result


def relative(got, expected):
    """Norm of the difference over the norm, of all gradients together."""
    return np.sqrt(sum(((g - e) ** 2).sum() for g, e in zip(got, expected)) / sum((e**2).sum() for e in expected))


def warned(capfd):
    """What MindSpore warned of. (2.7 also does of checks that it runs while it compiles and then removes.)"""
    return [line for line in capfd.readouterr().err.splitlines()
            if "WARNING" in line.upper() and "CommManager" not in line and "PrimitivePy> require_" not in line]
