"""Evaluation: the loss of the undivided data, in evaluation mode, and nothing else changes."""
import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn, ops
from support.modes import running
from support.training import LOSS

from ms_accum import make_train_step
from ms_accum.selftest.networks import MLP, NO_TARGET, batches, targets, tensors

pytestmark = pytest.mark.core

SIZES = (6, 4, 0, 7)  # of batches; one is empty


def network_with_modes(dropout=0.5):
    """One with Dropout, and two BatchNorms, one of which is in evaluation mode in training, too."""
    network = nn.SequentialCell(MLP(hidden=6, classes=8), nn.BatchNorm1d(8), nn.Dropout(p=dropout),
                                nn.BatchNorm1d(8),
                                nn.Dense(8, 3, weight_init=Tensor(np.eye(3, 8), ms.float32), bias_init="zeros"))
    network[1].moving_mean.set_data(Tensor(np.arange(8) / 8, ms.float32))
    return set_modes(network)


def set_modes(network):
    """Those of training."""
    network.set_train()
    network[3].set_train(False)
    return network


def data_of(sizes=SIZES, seed=1):
    """Batches of which some targets do not count; the data as a whole."""
    data = [(x.astype(np.float32), y.astype(np.int32)) for x, y in batches(sizes, seed=seed)]
    for i, (_, y) in enumerate(data):
        y[:i] = NO_TARGET
    return data, tensors(*map(np.concatenate, zip(*data)))


def mean(network):
    def forward_fn(x, y):
        return LOSS(network(x), ops.maximum(y, 0))
    return forward_fn, {}


def in_pieces(network):
    return mean(network)[0], {"pieces": 3}


def with_aux(network):
    def forward_fn(x, y):
        return LOSS(network(x), ops.maximum(y, 0)), x.sum(-1)
    return forward_fn, {"has_aux": True, "pieces": 2}


def tokens(network):
    def forward_fn(x, y):
        return ops.cross_entropy(network(x), y, ignore_index=NO_TARGET)
    return forward_fn, {"weight_fn": targets}


def summed(network):
    def forward_fn(x, y):
        return ops.cross_entropy(network(x), y, ignore_index=NO_TARGET, reduction="sum")
    return forward_fn, {"weight_fn": targets, "loss_reduction": "sum", "pieces": 2}


CASES = [mean, in_pieces, with_aux, tokens, summed]


def step_for(case, network, way="jit", accumulate_step=2, **options):
    forward_fn, given = case(network)
    return make_train_step(forward_fn, nn.Momentum(network.trainable_params(), 0.1, 0.9), accumulate_step,
                           eager=way == "eager", **given, **options)


def loss_of(case, network, batch):
    """What the case returns for a batch, in the network's mode."""
    loss = case(network)[0](*batch)
    return float(loss[0] if case is with_aux else loss)


def expected_of(case, network, whole):
    """The loss of the whole data, by MindSpore alone, in evaluation mode."""
    network.set_train(False)
    loss = loss_of(case, network, whole)
    set_modes(network)
    return loss / int(targets(*whole)) if case is summed else loss


def state_in(network, step):
    """All that training changes, to be compared bit by bit."""
    window = step.boundary.window
    return [p.asnumpy().tobytes() for p in (*network.get_parameters(), *window.buffers, window.counts, window.sums,
                                            window.seen, *step.boundary.rates.state.values())]


@pytest.mark.parametrize(("case", "way"), [*((case, "eager") for case in CASES), (summed, "graph")])
def test_it_is_the_loss_of_the_undivided_data_in_evaluation_mode(case, way):
    """By MindSpore alone; nothing changes. Controls: the mean of the batches' means, and the loss of the same data in
    training mode.
    """
    with running("pynative" if way == "eager" else way):
        network, (data, whole) = network_with_modes(), data_of((4, 6, 0, 6) if way == "graph" else SIZES)
        step = step_for(case, network, way)
        before = state_in(network, step)
        modes = [layer.training for _, layer in network.cells_and_names()]
        expected = expected_of(case, network, whole)
        loss = step.evaluate(data)
        assert type(loss) is float
        assert abs(loss - expected) < 1e-6 * expected
        assert state_in(network, step) == before
        assert [layer.training for _, layer in network.cells_and_names()] == modes
        means = [step.evaluate([batch]) for batch in data if len(batch[0])]
        assert abs(np.mean(means) - expected) > 1e-3 * expected
        second = tensors(*data[1])
        in_training = loss_of(case, network, second) / (int(targets(*second)) if case is summed else 1)
        assert abs(in_training - means[1]) > 1e-3 * expected


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize("case", [mean, summed])
def test_nothing_else_changes(case):
    """Bit by bit: an open window, its unit, counters, state; then training goes on as if nothing had been. Also before
    the first microbatch, and in `on_update`. Control: one more microbatch, and statistics that training moves.
    """
    ends, (data, _) = [], data_of((6, 4, 6, 8, 4))
    for evaluates in (False, True):
        network = network_with_modes(dropout=0.0)  # it draws what nobody can repeat
        step = step_for(case, network, "eager", clip_norm=1.0)
        losses = []

        def evaluate(step, losses=losses):
            losses.append(step.evaluate(data_of(seed=2)[0]))

        if evaluates:
            step.on_update(evaluate)
            evaluate(step)
        for _ in step.epoch(data):
            if evaluates:
                before, status, updated = state_in(network, step), step.status(), step.updated
                evaluate(step)
                assert state_in(network, step) == before
                assert (repr(step.status()), step.updated, step.trained) == (repr(status), updated, status.trained)
        assert step.status().update_step == 3
        ends.append(state_in(network, step))
        assert len(losses) == 9 * evaluates
        assert np.isfinite(losses).all()
        assert (losses[:1] != losses[-1:]) is evaluates
        moved = state_in(network, step)
        step(*data[0])
        assert moved != state_in(network, step)
    assert ends[0] == ends[1]


@pytest.mark.usefixtures("uncompiled")
def test_no_batch_and_no_weight_are_errors():
    """Control: with `min_weight`, it is a mean of 0."""
    data = data_of((4, 3))[0]
    nothing = [(x, np.full_like(y, NO_TARGET)) for x, y in data]
    assert step_for(tokens, MLP(), min_weight=1.0).evaluate(nothing) == 0
    step, used = step_for(tokens, MLP()), iter(data)
    assert step.evaluate(used) > 0
    for empty in (used, []):
        with pytest.raises(ValueError, match=r"evaluate got 0 batches .* used up"):
            step.evaluate(empty)
    with pytest.raises(ValueError, match=r"evaluate got 2 batches with weights of 0 in all, .*look for a mask"):
        step.evaluate(nothing)
    assert step.status().trained == 0
