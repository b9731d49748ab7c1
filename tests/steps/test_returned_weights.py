"""`has_weight=True`: forward_fn returns its own weight. Whole runs are in test_differential.py."""
import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn, ops
from support.modes import running
from support.rank_cases import every
from support.training import gradient_of, sgd

from ms_accum import DataParallel, TrainOneStepCell, make_train_step
from ms_accum.selftest.comparing import difference
from ms_accum.selftest.networks import MLP, NO_TARGET, TargetLoss, batches, targets, tensors

pytest_plugins = ["support.launch"]
MEAN, SUM = "mean", "sum"


def microbatches(sizes=(6, 4, 6, 5)):
    """Half of the labels count, in one microbatch none, in one a single one."""
    data = [tensors(x, np.where(np.arange(len(y)) % 2, NO_TARGET, y)) for x, y in batches(sizes)]
    data[1][1][:] = NO_TARGET
    data[2][1][1:] = NO_TARGET
    return data


DATA = microbatches()


class Returning(nn.Cell):
    """Return the loss, and the weight or what stands for it."""

    def __init__(self, loss, weigh):
        super().__init__(auto_prefix=False)
        self.loss, self.weigh = loss, weigh

    def construct(self, x, y):
        return self.loss(x, y), self.weigh(x, y)


def rows(x, y):
    return x.shape[0]


@pytest.mark.parametrize(("reduction", "pieces", "mode"), [
    (SUM, 3, "jit"), (MEAN, 1, "pynative"), (MEAN, 3, "pynative"), (SUM, 1, "pynative")])
def test_it_is_the_gradient_of_the_undivided_batch(reduction, pieces, mode):
    """By plain MindSpore. Control: with numbers of samples returned, it is not."""
    whole = tuple(map(ops.concat, zip(*DATA)))
    loss = TargetLoss(MLP(), MEAN)
    grads = ms.value_and_grad(loss, None, ms.ParameterTuple(loss.trainable_params()))(*whole)[1]
    expected = [g.asnumpy() for g in grads]
    got = []
    for weigh, way in ((targets, mode), (rows, "pynative")):
        with running(way):
            found = TargetLoss(MLP(), reduction)
            gradient, value = gradient_of(Returning(found, weigh), found, whole, has_weight=True, pieces=pieces,
                                          loss_reduction=reduction, eager=way == "pynative")
        got.append(difference(gradient, expected))
        if weigh is targets:
            assert float(value) == pytest.approx(float(loss(*whole)), rel=1e-5)
    assert got[0] <= 1e-6
    assert got[1] > 1e-3 or (pieces, reduction) == (1, MEAN)


@pytest.mark.parametrize(("reduction", "options", "mode"), [
    (SUM, {"on_nonfinite": "skip_microbatch"}, "jit"), (MEAN, {}, "jit"),
    (SUM, {"eager": True}, "pynative"), (MEAN, {"eager": True, "on_nonfinite": "skip_microbatch"}, "pynative")])
def test_a_weight_that_depends_on_parameters_is_not_differentiated(reduction, options, mode):
    """Also where a stage looks at the gradient of a sum, which is then divided first. Control: that of a quotient."""
    network, x = nn.Dense(6, 1, "ones", "ones"), DATA[0][0]

    def weigh(x):
        return ops.exp(network.bias).sum() * 2

    def returning(x):
        loss = ops.square(network(x)).sum()
        return loss / (1 if reduction == SUM else 6), weigh(x)

    def quotient(x):
        return ops.square(network(x)).sum() / weigh(x)

    weights = ms.ParameterTuple(network.trainable_params())
    plain = [g.asnumpy() for g in ms.grad(lambda x: ops.square(network(x)).sum(), None, weights)(x)]
    constant = float(weigh(x)) if reduction == SUM else 6
    differentiated = [g.asnumpy() for g in ms.grad(quotient, None, weights)(x)]
    with running(mode):
        step = make_train_step(returning, nn.SGD(weights, 1.0), 1, has_weight=True, loss_reduction=reduction, **options)
        before = [p.asnumpy().copy() for p in weights]
        step(x)
    moved = [old - p.asnumpy() for old, p in zip(before, weights)]
    assert difference(moved, [g / constant for g in plain]) < 1e-5
    assert difference(moved, differentiated) > 1e-3


def returns(*values):
    def forward_fn(x, y):
        loss = x.mean()
        return tuple([loss if value is None else value for value in values])
    return forward_fn


@pytest.mark.parametrize(("error", "message", "forward_fn", "options"), [
    (TypeError, r"forward_fn returned 3 values, expected \(loss, weight\) because of has_weight=True$",
     returns(None, 2.0, 3.0), {}),
    (TypeError, r"forward_fn returned 2 values, expected \(loss, weight, aux\) because of has_weight=True and has_aux",
     returns(None, 2.0), {"has_aux": True}),
    (TypeError, r"forward_fn returned .*, expected \(loss, weight\) because of has_weight=True", targets, {}),
    (ValueError, r"weight is a Tensor of shape \(2,\), expected shape \(\)", returns(None, Tensor([1.0, 2.0])), {}),
    (TypeError, r"returned 2 values, expected the loss alone; .* has_weight=True if it returns \(loss, weight\)",
     returns(None, 2.0), {"has_weight": False}),
    (ValueError, "got has_weight=True and a weight_fn, expected one of them; leave weight_fn out if forward_fn returns",
     returns(None, 2.0), {"weight_fn": targets}),
    (TypeError, r"has_weight is 1 of type int, expected True or False; say whether forward_fn returns \(loss, weight\)",
     returns(None, 2.0), {"has_weight": 1})])
def test_what_does_not_fit_is_refused(error, message, forward_fn, options, compiled_if_slow):
    with pytest.raises(error, match=message):
        make_train_step(forward_fn, sgd(MLP()), 2, **{"has_weight": True, **options})(*DATA[0])


@pytest.mark.usefixtures("compiled_if_slow")
def test_a_cell_says_it_of_the_network_and_numbers_are_weights_too():
    loss = TargetLoss(MLP())
    with pytest.raises(TypeError, match=r"the network returned .*, expected \(loss, weight\) because of has_weight"):
        TrainOneStepCell(loss, sgd(loss), 2, has_weight=True)(*DATA[0])
    with pytest.raises(ValueError, match="leave weight_fn out if the network returns"):
        TrainOneStepCell(loss, sgd(loss), 2, has_weight=True, weight_fn=targets)
    cell = TrainOneStepCell(Returning(loss, rows), sgd(loss), 2, has_weight=True)
    cell(*DATA[0])
    assert float(cell.accumulator.weight_sum) == 6
    step = make_train_step(Returning(loss, rows), sgd(loss), 2, has_weight=True, reducer=DataParallel())
    step(*DATA[0])
    assert "6 counted by forward_fn" in (step.flush() and repr(step))


@every("returned")
def test_on_ranks_it_is_that_of_a_weight_fn(left_by, launch, case):
    for result in left_by(case, launch):
        for name, (same, control) in result.items():
            assert same <= 1e-6, name
            assert control > 1e-3, name
