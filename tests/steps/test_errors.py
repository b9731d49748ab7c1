"""What a step says first when its functions or their results do not fit: what was wrong, got, expected, the remedy."""
from dataclasses import dataclass

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn, ops
from support.modes import running

from ms_accum import TrainOneStepCell, make_train_step
from ms_accum.selftest.comparing import difference, values
from ms_accum.selftest.networks import MLP, batches, mean_loss, tensors

NETWORK = nn.Dense(8, 3)
LOSS = nn.CrossEntropyLoss()
DATA, LABEL = np.ones((4, 8), np.float32), np.zeros(4, np.int32)


def forward_fn(data, label):
    return LOSS(NETWORK(data), label)


def sgd():
    return nn.SGD(NETWORK.trainable_params(), 0.1)


@dataclass
class Output:
    loss: Tensor


def returns(make):
    def returning(data, label):
        return make(LOSS(NETWORK(data), label))
    return returning


NAMED = {"none": lambda loss: None, "number": lambda loss: float(loss.asnumpy()), "two": lambda loss: (loss, loss),
         "three": lambda loss: (loss, loss, loss), "dict": lambda loss: {"loss": loss}, "output": Output,
         "axes": lambda loss: ops.stack((loss, loss)),
         "whole": lambda loss: loss.astype(ms.int32), "plain": lambda loss: loss, "weights": lambda loss: (
             loss, Tensor([1.0, 2.0])), "no aux": lambda loss: (loss, ()), "text": lambda loss: (loss, "aux"),
         "rows": lambda loss: (loss, ops.ones(3))}
WRONG = [
    ("none", TypeError, r"^forward_fn returned None, expected the loss alone; is its `return` missing\?", {}),
    ("number", TypeError, r"returned a value of type float, .*return the loss itself, without float\(\)", {}),
    ("two", TypeError, r"returned 2 values, expected the loss alone; give has_aux=True .* has_weight=True if", {}),
    ("dict", TypeError, r"returned a value of type dict.*of a dict its entry", {}),
    ("output", TypeError, r"of type Output.*of a model model\(.*return_dict=False", {}),
    ("axes", ValueError, r"returned a loss of shape \(2,\), expected shape \(\); return the mean over the samples", {}),
    ("whole", TypeError, r"returned a loss of Int32, expected a float dtype; do not cast", {}),
    ("plain", TypeError, r"returned a value of type Tensor, expected \(loss, aux\) because of has_aux=True",
     {"has_aux": True}),
    ("three", TypeError, r"returned 3 values, expected \(loss, weight\) because of has_weight=True$",
     {"has_weight": True}),
    ("two", TypeError, r"returned 2 values, expected \(loss, weight, aux\) because of has_weight=True and has_aux",
     {"has_weight": True, "has_aux": True}),
    ("weights", ValueError, r"weight is a Tensor of shape \(2,\), expected shape \(\)", {"has_weight": True}),
    *[(name, TypeError, "forward_fn returned aux that is neither a Tensor nor a tuple", {"has_aux": True, "pieces": 2})
      for name in ("no aux", "text")],
    ("rows", ValueError, r"returned aux of shape \(3,\) for a piece of 2 samples; return Tensors of shape \(\) or with",
     {"has_aux": True, "pieces": 2}),
]


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize(("name", "error", "message", "options"), WRONG)
def test_a_result_that_cannot_be_used_is_named_and_changes_nothing(name, error, message, options):
    step = make_train_step(returns(NAMED[name]), sgd(), 2, eager=True, **options)
    with pytest.raises(error, match=message):
        step(DATA, LABEL)
    step.reset()
    assert not any(buffer.asnumpy().any() for buffer in step.boundary.window.buffers)


def without_return(data, label):
    LOSS(NETWORK(data), label)


def test_a_graph_says_the_same_when_it_is_compiled():
    step = make_train_step(without_return, sgd(), 2)
    with pytest.raises(TypeError, match="forward_fn returned None, expected the loss alone; is its `return` mis"):
        step(DATA, LABEL)
    assert step.status().trained == 0


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize("error", [RuntimeError("For 'Gather', the index is too large"), ValueError("no such label")])
def test_other_errors_are_left_alone(error):
    def fails(data, label):
        raise error

    with pytest.raises(type(error)) as raised:
        make_train_step(fails, sgd(), 2, eager=True, network=NETWORK)(DATA, LABEL)
    assert str(raised.value) == str(error)


@pytest.mark.parametrize("function", [
    ms.value_and_grad(forward_fn, None, NETWORK.trainable_params()), ms.grad(forward_fn)])
def test_a_function_that_computes_gradients_is_an_error(function):
    for options in ({"forward_fn": function}, {"forward_fn": function, "eager": True}, {"weight_fn": function}):
        with pytest.raises(TypeError, match=r"_fn computes gradients .*, expected the function itself.*; give what wa"):
            make_train_step(**{"forward_fn": forward_fn, "optimizer": sgd(), "accumulate_step": 2, **options})


@pytest.mark.parametrize("build", [make_train_step, TrainOneStepCell])
def test_a_loss_function_beside_the_network_is_named(build):
    """As `Model` takes it. Control: in a cell."""
    with pytest.raises(TypeError, match=r"^accumulate_step is .*CrossEntropyLoss"):
        build(NETWORK, sgd(), LOSS)
    with pytest.raises(TypeError, match=r"^optimizer is of type CrossEntropyLoss, expected a MindSpore optimizer"):
        build(NETWORK, LOSS, sgd())
    build(nn.WithLossCell(NETWORK, LOSS), sgd(), 4)


@pytest.mark.usefixtures("uncompiled")
def test_a_network_without_loss_is_named():
    """Control: a function that does not take the columns is not told about a loss."""
    step = make_train_step(NETWORK, sgd(), 2, eager=True)
    with pytest.raises(ValueError, match=r"loss of shape \(4, 3\).*; if it computes no loss, give nn.WithLossCell\("):
        step(DATA)
    with pytest.raises(TypeError, match=r"does not take the batch \(2 by position\).*; if it computes no loss"):
        step(DATA, LABEL)
    with pytest.raises(TypeError, match=r"columns first$"):
        make_train_step(forward_fn, sgd(), 2, eager=True)(DATA)


X, Y = batches([16])[0]
BAD = np.where(np.arange(16) == 6, 9, Y)  # a label that is out of range raises


@pytest.mark.parametrize("mode", ["pynative", pytest.param("jit", marks=pytest.mark.slow)])
@pytest.mark.parametrize("pieces", [1, 8])
def test_after_an_error_a_batch_counts_as_a_whole_or_not_at_all(mode, pieces):
    """An error in a batch that is not cut adds nothing. Between two pieces, it needs a reset, whatever is called.

    Then training goes on, in graphs that are compiled again. Control: the parameters of a run without the error.
    """
    network, plain = MLP(), MLP()
    with running(mode):
        step = make_train_step(mean_loss(network), nn.SGD(network.trainable_params(), 0.1), 2, pieces=pieces)
        step(*tensors(X, Y))
        with pytest.raises(RuntimeError, match="must be in"):
            step(*tensors(X, BAD))
        if pieces == 8:
            for refused in (lambda: step(*tensors(X, Y)), step.flush, step.status, lambda: next(step.epoch([]))):
                with pytest.raises(RuntimeError, match=r"stopped a microbatch, .* call reset\(\), which drops"):
                    refused()
            assert step.trained == 1
            step.reset()
            assert step.trained == 0
            step(*tensors(X, Y))
        step(*tensors(X, Y))
        assert step.status()[:2] == (1, 0)
        whole = make_train_step(mean_loss(plain), nn.SGD(plain.trainable_params(), 0.1), 2, pieces=pieces)
        for _ in range(2):
            whole(*tensors(X, Y))
    assert difference(values(network.trainable_params()), values(plain.trainable_params())) == 0
    assert difference(values(plain.trainable_params()), values(MLP().trainable_params())) > 1e-3
