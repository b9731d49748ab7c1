"""What users of other libraries have: a limit of skips, updates of a run, samples seen, empty microbatches, other axes.

What these do in any order of calls, in every driver and resumed, is drawn in test_machine.py.
"""
import mindspore as ms
import numpy as np
import pytest
import reference
from conftest import MLP, batches, compiled_graphs, difference, mean_loss, tensors, values
from following import LOSS, run_as, sgd, step_of
from hypothesis import given
from hypothesis import strategies as st
from mindspore import Tensor, amp, nn, ops
from pages import recipe

from ms_accum import (
    TrainOneStepCell,
    check_equivalence,
    load_checkpoint,
    make_grad_cache_step,
    make_train_step,
    save_checkpoint,
    until_weight,
    updates_of,
)
from ms_accum.batch_size import AdaptiveWindow


@pytest.mark.parametrize(("error", "message", "call"), [
    (ValueError, r"until_weight\(9, .* decides during the run how long", lambda: updates_of(until_weight(9), 7)),
    (ValueError, r"AdaptiveWindow\(.* decides during the run", lambda: updates_of(AdaptiveWindow(), 7)),
    (ValueError, r"microbatches is 0, expected an int >= 1", lambda: updates_of(2, 0)),
    (TypeError, r"epochs is 1.5 of type float", lambda: updates_of(2, 7, 1.5)),
    (ValueError, r"accumulate_step is 0, expected an int >= 1", lambda: updates_of(0, 7)),
    (ValueError, "max_skips is -1, expected an int >= 0", lambda: step_of(on_nonfinite="skip_window", max_skips=-1)),
    (ValueError, 'got max_skips=3 with on_nonfinite="apply", which skips nothing; give "skip_window"',
     lambda: step_of(max_skips=3)),
])
def test_what_cannot_be_meant_is_refused(error, message, call):
    """With a loss scaler, windows are dropped in any case."""
    assert step_of(max_skips=3, loss_scaler=amp.StaticLossScaler(8.0)).accumulator.guard.max_skips == 3
    with pytest.raises(error, match=message):
        call()


# --- so many skips in a row -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("policy", "noun"), [
    ("skip_microbatch", "microbatches or pieces"), ("skip_window", "windows")])
def test_the_limit_of_skips_is_said_once_for_each_skip_and_compiles_nothing(policy, noun):
    """Also if a run that was loaded has skipped as many in all."""
    (x, y), network = tensors(*batches([4])[0]), MLP()
    step = make_train_step(mean_loss(network), sgd(network), 2, on_nonfinite=policy, max_skips=0)
    said = rf"^more than max_skips=0 {noun} in a row were skipped \(\d by now, \d in all\), .* another call goes on$"
    save_checkpoint("before.ckpt", network, step)
    for _ in range(2):
        step(x * np.nan, y)
        with pytest.raises(RuntimeError, match=said):
            step(x * np.nan, y)
        assert (step.updated, step.flush()) == (False, False)
        load_checkpoint("before.ckpt", network, step)
    graphs = compiled_graphs()
    step(x, y)
    with pytest.raises(RuntimeError, match=said):
        step(x * np.nan, y)
    assert compiled_graphs() == graphs


# --- updates made -----------------------------------------------------------------------------------------------------


def growing(update_step):
    return update_step // 3 + 1


STAGES = st.dictionaries(st.integers(1, 12), st.integers(1, 9), max_size=3).map(lambda stages: {0: 2, **stages})


@given(st.one_of(st.integers(1, 9), STAGES, st.just(growing)), st.integers(1, 40), st.integers(1, 4))
def test_the_updates_of_a_run_are_counted_as_they_happen(accumulate_step, microbatches, epochs):
    updates = 0
    for _ in range(epochs):
        held = 0
        for _ in range(microbatches):
            held += 1
            if held >= reference.window_length(accumulate_step, updates):
                updates, held = updates + 1, 0
        updates += held > 0
    assert updates_of(accumulate_step, microbatches, epochs) == updates


# --- a microbatch without rows ----------------------------------------------------------------------------------------


def test_nothing_is_compiled_for_a_microbatch_without_rows(mode_named):
    """Its loss is 0, and it counts. With a loss scaler, the cell returns the scale, too."""
    mode_named("graph")
    network, sizes, graphs = MLP(), [4, 0, 0, 4, 0, 0], []
    cell = TrainOneStepCell(nn.WithLossCell(network, LOSS), sgd(network), 2, loss_scaler=amp.StaticLossScaler(8.0))
    for x, y in batches(sizes):
        loss, dropped, scale = cell(*tensors(x, y))
        assert (float(loss) == 0, bool(dropped), float(scale)) == (len(x) == 0, False, 8)
        graphs.append(compiled_graphs())
    assert graphs[1] == graphs[-1]  # the end of a window is compiled for the host when it is first needed
    assert (int(cell.accumulator.update_step), int(cell.accumulator.seen)) == (3, 8)


@pytest.mark.usefixtures("uncompiled")
def test_an_epoch_may_begin_without_rows_and_a_window_of_two_losses_hold_such_a_batch():
    """The unit of weights is that of the first microbatch with rows. A window without any has a gradient of 0."""
    network = MLP()

    def with_aux(x, y, counted):
        return LOSS(network(x), y), network(x)

    def pair(x, y, counted):
        return LOSS(network(x), y), (ops.square(network(x)).sum(-1) * counted).sum() / counted.sum()

    x, y = tensors(*batches([4])[0])
    ones = Tensor(np.ones(4, np.float32))
    data = [(x[:0], y[:0], ones[:0]), (x, y, ones), (x, y, ones), (x[:0], y[:0], ones[:0])]
    for step in (make_train_step(pair, sgd(network), 2, losses=2, pieces=2),
                 make_train_step(with_aux, sgd(network), 2, has_aux=True)):
        results = list(step.epoch(data))
        assert [float(first) > 0 for first, _ in results] == [False, True, True, False]
        assert (int(step.accumulator.update_step), int(step.accumulator.seen)) == (2, 8)
    assert results[0][1] is None
    encoder = nn.Dense(6, 2)

    def contrast(a):
        return ops.square(a).mean()

    cached = make_grad_cache_step(encoder, contrast, sgd(encoder), 2, pieces=2)
    assert float(cached(x[:0])) == 0 < float(cached(x))
    assert int(cached.accumulator.update_step) == 1


# --- another batch axis -----------------------------------------------------------------------------------------------


class Transposed(nn.Cell):
    """The loss of `(features, batch)` with classes `(batch,)`; or it, and 0."""

    def __init__(self, losses):
        super().__init__()
        self.network, self.losses = MLP(), losses

    def construct(self, x, y):
        loss = LOSS(self.network(x.T), y)
        return loss if self.losses == 1 else (loss, loss * 0.0)


@pytest.mark.parametrize(("mode", "axis", "options"), [
    ("pynative", 1, {}), ("pynative", 0, {}), ("jit", 1, {"pieces": 3}), ("pynative", 1, {"pieces": 3, "losses": 2}),
    ("graph", 1, {})])
def test_samples_may_be_counted_along_another_axis(mode, axis, options, mode_named):
    """By a cell in graph mode. Control: along axis 0, both microbatches weigh the same."""
    network, data = Transposed(options.get("losses", 1)), batches([7, 4])
    oracle = reference.Accumulation(values(network.trainable_params()), reference.SGD(0.5), 2, "mean")
    for x, y in data:
        oracle(reference.loss_and_gradients(oracle.parameters, x, y)[1], len(x))
    mode_named(mode)
    with run_as(mode):
        make = TrainOneStepCell if mode == "graph" else make_train_step
        step = make(network, sgd(network, 0.5), 2, batch_axis=axis, **options)
        transposed = [tensors(x.T, y) for x, y in data]
        list(step.epoch(transposed) if mode != "graph" else map(step, *zip(*transposed)))
    assert int(step.accumulator.seen) == (11 if axis else 12)
    assert (difference(values(network.trainable_params()), oracle.parameters) < 1e-5) == (axis == 1)


@pytest.mark.usefixtures("uncompiled")
def test_aux_and_the_check_have_the_samples_on_the_same_axis():
    """Control: along axis 0, the check says that it is not exact."""
    network = nn.Dense(3, 2)

    def forward_fn(x):
        y = network(x)
        return ops.square(ops.tanh(y).sum(0)).mean(), (y, y[0, :, 0], y.sum())

    def alone(x):
        return forward_fn(x)[0]

    x = Tensor(np.random.default_rng(0).normal(size=(5, 7, 3)), ms.float32)
    assert [check_equivalence(alone, network, (x,), 2, batch_axis=axis).ok for axis in (1, 0)] == [True, False]
    step = make_train_step(forward_fn, sgd(network, 0.0), 1, pieces=3, batch_axis=1, has_aux=True)
    loss, (y, first, total) = step(x)
    np.testing.assert_allclose(y.asnumpy(), network(x).asnumpy(), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(first.asnumpy(), network(x).asnumpy()[0, :, 0], rtol=1e-5, atol=1e-6)
    assert np.isfinite(float(total))
    assert float(loss) == pytest.approx(float(alone(x)), rel=1e-4, abs=1e-6)


# --- an optimizer that is careful: a recipe of the guide --------------------------------------------------------------


def test_an_optimizer_may_clip_elements_and_leave_out_updates(mode_named):
    """As without accumulation, on the undivided batch. Controls: elements are clipped, and one update is left out."""
    (x, y), plain, network, after = batches([8])[0], MLP(), MLP(), []
    expected, optimizer = (recipe("limits", "Careful")(one.trainable_params(), 0.1, 0.9) for one in (plain, network))
    cell = TrainOneStepCell(nn.WithLossCell(network, LOSS), optimizer, 2)
    for scale in (1.0, 10.0, 1.0):
        mode_named("pynative")
        gradients = ms.grad(mean_loss(plain), None, plain.trainable_params())(*tensors(x * scale, y))
        expected(gradients)
        mode_named("graph")
        for rows in (slice(4), slice(4, 8)):
            cell(*tensors(x[rows] * scale, y[rows]))
        after.append((values(plain.trainable_params()), max(float(g.abs().max()) for g in gradients)))
        assert difference(values(network.trainable_params()), after[-1][0]) < 1e-4
    assert int(cell.accumulator.update_step) == 3
    assert max(largest for _, largest in after) > 0.25
    assert difference(after[0][0], after[1][0]) == 0 < difference(after[1][0], after[2][0])
