"""What users of other libraries have: a limit of skips, updates of a run, samples seen, empty microbatches, another batch axis.

What these do in any order of calls, in every driver and resumed, is drawn in test_machine.py.
"""
import math

import mindspore as ms
import numpy as np
import pytest
import reference
from conftest import MLP, batches, compiled_graphs, difference, mean_loss, tensors, values
from following import LOSS
from hypothesis import given
from hypothesis import strategies as st
from mindspore import Tensor, nn, ops
from mindspore.dataset import GeneratorDataset
from mindspore.train import Model
from model_runs import make_cell
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

# --- so many skips in a row ---------------------------------------------------------------------------------------------------


def test_the_limit_of_skips_is_seen_at_the_end_of_a_window_and_in_a_flush():
    """Once for each skip. Another call goes on, and compiles nothing."""
    x, y = tensors(*batches([4])[0])
    bad = x * np.nan
    network = MLP()
    for policy, noun in (("skip_microbatch", "microbatches or pieces"), ("skip_window", "windows")):
        optimizer = nn.SGD(network.trainable_params(), 0.1)
        train_step = make_train_step(mean_loss(network), optimizer, 3, on_nonfinite=policy, max_skips=0)
        for _ in range(2):
            train_step(bad, y)
        message = rf"^more than max_skips=0 {noun} in a row were skipped \(\d by now, \d in all\), .* another call goes on$"
        with pytest.raises(RuntimeError, match=message):
            train_step(bad, y)
        assert not train_step.updated
        assert not train_step.flush()  # it was said already
        graphs = compiled_graphs()
        train_step(x, y)
        save_checkpoint("before.ckpt", network, train_step)
        train_step(bad, y)
        assert compiled_graphs() == graphs
        with pytest.raises(RuntimeError, match="in a row were skipped"):
            train_step.flush()
        skipped = int(train_step.accumulator.skipped)
        load_checkpoint("before.ckpt", network, train_step)
        train_step(bad, y)
        with pytest.raises(RuntimeError, match="in a row were skipped"):  # as many in all, in a run that was loaded
            train_step.flush()
        assert int(train_step.accumulator.skipped) == skipped
    for options, message in ((dict(on_nonfinite="skip_window", max_skips=-1), "max_skips is -1, expected an int >= 0"),
                             (dict(max_skips=3), 'got max_skips=3 with on_nonfinite="apply", which skips nothing; give "skip_window"')):
        with pytest.raises(ValueError, match=message):
            make_train_step(mean_loss(network), optimizer, 3, **options)


def test_a_model_ends_after_too_many_skips(mode_named):
    """With a loss scaler, whose overflows count, too. Control: a limit that is not reached."""
    mode_named("graph")
    _, cell = make_cell(max_skips=3, loss_scaler=ms.amp.DynamicLossScaler(2.0**10, 2, 2))
    rows = [(np.full((4, 6), np.nan, np.float32), np.zeros(4, np.int32))] * 6
    train, data = Model(cell).train, GeneratorDataset(rows, ["x", "y"], shuffle=False)
    train(1, data, dataset_sink_mode=False)
    assert int(cell.accumulator.skipped_in_row) == 3
    with pytest.raises(RuntimeError, match=r"more than max_skips=3 windows in a row were skipped \(4 by now, 4 in all\)"):
        train(1, data, dataset_sink_mode=False)


# --- samples or tokens seen ---------------------------------------------------------------------------------------------------


def pair_of(network):
    def pair(x, y, counted):
        logits = network(x)
        return LOSS(logits, y), (ops.square(logits).sum(-1) * counted).sum() / counted.sum()

    return pair


def test_tokens_seen_are_the_weights_of_weight_fn_and_of_the_first_loss():
    """Control: without weight_fn, samples. They count on where float32 cannot."""
    network = MLP()

    def weights(x, y, counted):
        return 2.0 * x.shape[0], counted.sum()

    def first(x, y, counted):
        return LOSS(network(x), y)

    data = [(*tensors(*batch), Tensor(np.ones(len(batch[0]), np.float32))) for batch in batches((4, 4, 4))]
    several = make_train_step(pair_of(network), nn.SGD(network.trainable_params(), 0.1), 2, pieces=2, losses=2, weight_fn=weights)
    one = make_train_step(first, nn.SGD(network.trainable_params(), 0.1), 2)
    for step, seen in ((several, [16, 24]), (one, [8, 12])):
        after = [int(step.accumulator.seen) for _ in step.epoch(data) if step.updated]
        assert after == seen
        assert f"{seen[-1]} seen" in repr(step)
        ops.assign(step.accumulator.seen, 2**40 + 1)
        list(step.epoch(data))
        assert int(step.accumulator.seen) == 2**40 + 1 + seen[-1]


# --- the number of updates of a run -------------------------------------------------------------------------------------------


def growing(update_step):
    return update_step // 3 + 1


STAGES = st.dictionaries(st.integers(1, 12), st.integers(1, 9), max_size=3).map(lambda stages: {0: 2, **stages})


@given(st.one_of(st.integers(1, 9), STAGES), st.integers(1, 40), st.integers(1, 4))
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


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize("accumulate_step", [3, {0: 1, 4: 3}, growing])
def test_a_run_makes_as_many_updates_as_was_said(accumulate_step):
    network = MLP()
    train_step = make_train_step(mean_loss(network), nn.SGD(network.trainable_params(), 0.1), accumulate_step)
    said = train_step.updates_of(7, epochs=2)
    data = [tensors(*batch) for batch in batches([4] * 7)]
    for _ in range(2):
        for _ in train_step.epoch(data):
            pass
    assert int(train_step.accumulator.update_step) == said == updates_of(accumulate_step, 7, 2)
    assert said != updates_of(accumulate_step, 7, 3)


@pytest.mark.parametrize(("error", "message", "arguments"), [
    (ValueError, r"until_weight\(9, .* decides during the run how long windows are", (until_weight(9), 7)),
    (ValueError, r"AdaptiveWindow\(.* decides during the run", (AdaptiveWindow(), 7)),
    (ValueError, r"microbatches is 0, expected an int >= 1", (2, 0)),
    (TypeError, r"epochs is 1.5 of type float", (2, 7, 1.5)),
    (ValueError, r"accumulate_step is 0, expected an int >= 1", (0, 7)),
])
def test_what_cannot_be_known_before_is_refused(error, message, arguments):
    with pytest.raises(error, match=message):
        updates_of(*arguments)


# --- a microbatch without rows --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("driver", ["step", "scaled cell"])
def test_nothing_is_compiled_for_a_microbatch_without_rows(driver, mode_named):
    """Its loss is 0, and it counts. With a loss scaler, the cell returns the scale, too."""
    mode_named("graph" if driver == "scaled cell" else "pynative")
    network = MLP()
    optimizer = nn.Momentum(network.trainable_params(), 0.1, 0.9)
    step = (make_train_step(mean_loss(network), optimizer, 2) if driver == "step" else
            TrainOneStepCell(nn.WithLossCell(network, LOSS), optimizer, 2, loss_scaler=ms.amp.StaticLossScaler(8.0)))
    oracle = reference.Accumulation(values(network.trainable_params()), reference.SGD(0.1, 0.9), 2, "mean")
    for i, (x, y) in enumerate(batches([4, 0, 4, 4, 0, 0, 0, 4])):
        before = compiled_graphs()
        result = step(*tensors(x, y))
        gradients = reference.loss_and_gradients(oracle.parameters, x, y)[1] if len(x) else oracle.parameters
        oracle(gradients, len(x))
        assert (float(result if driver == "step" else result[0]) == 0) == (len(x) == 0)
        assert driver == "step" or float(result[2]) == 8
        # The end of a window is compiled when it is first needed; so is a cell's in graph mode, for the host.
        assert compiled_graphs() <= before + 4 * (i < 5)
    assert step.flush() == oracle.flush()
    assert int(step.accumulator.update_step) == oracle.update_step == 4
    assert difference(values(network.trainable_params()), oracle.parameters) <= 1e-5


@pytest.mark.usefixtures("uncompiled")
def test_an_epoch_may_begin_without_rows_and_a_window_of_two_losses_hold_such_a_batch():
    """The unit of weights is that of the first microbatch with rows. A window without any updates with a gradient of 0."""
    network = MLP()

    def with_aux(x, y, counted):
        return LOSS(network(x), y), network(x)

    x, y = tensors(*batches([4])[0])
    ones = Tensor(np.ones(4, np.float32))
    data = [(x[:0], y[:0], ones[:0]), (x, y, ones), (x, y, ones), (x[:0], y[:0], ones[:0])]
    for step in (make_train_step(pair_of(network), nn.SGD(network.trainable_params(), 0.1), 2, losses=2, pieces=2),
                 make_train_step(with_aux, nn.SGD(network.trainable_params(), 0.1), 2, has_aux=True)):
        results = list(step.epoch(data))
        assert [float(first) for first, _ in (results[0], results[-1])] == [0, 0]
        assert float(results[1][0]) > 0
        assert (int(step.accumulator.update_step), int(step.accumulator.seen)) == (2, 8)
    assert results[0][1] is None
    encoder = nn.Dense(6, 2)

    def contrast(a):
        return ops.square(a).mean()

    cached = make_grad_cache_step(encoder, contrast, nn.SGD(encoder.trainable_params(), 0.1), 2, pieces=2)
    assert float(cached(x[:0])) == 0 < float(cached(x))
    assert int(cached.accumulator.update_step) == 1


# --- another batch axis ---------------------------------------------------------------------------------------------------------


class Sequences(nn.Cell):
    """The loss of sequences `(time, batch, features)` with lengths `(batch,)` and classes `(batch,)`; or it, and a half of it."""

    def __init__(self, twice=False):
        super().__init__()
        self.first, self.second, self.twice = nn.Dense(3, 4), nn.Dense(4, 3), twice
        rng = np.random.default_rng(2)
        for parameter in self.trainable_params():
            parameter.set_data(Tensor(rng.normal(0, 0.5, parameter.shape), ms.float32))

    def construct(self, x, lengths, y):
        present = (ops.arange(x.shape[0]).reshape(-1, 1) < lengths).astype(ms.float32).expand_dims(2)
        loss = LOSS(self.second((ops.tanh(self.first(x)) * present).sum(0)), y)
        return (loss, loss * 0.0) if self.twice else loss


def sequences():
    """Of 7 and of 4 samples, with their lengths and classes."""
    rng = np.random.default_rng(0)
    return [(Tensor(rng.normal(size=(5, n, 3)), ms.float32), *(Tensor(rng.integers(low, low + 3, n), ms.int32) for low in (2, 0)))
            for n in (7, 4)]


@pytest.mark.parametrize(("driver", "axis"), [("step", 1), ("step", 0), ("pieces", 1), ("losses", 1), ("cell", 1)])
def test_samples_may_be_counted_along_another_axis(driver, axis, mode_named, monkeypatch):
    """The undivided batch by plain MindSpore. Control: along axis 0, both microbatches weigh the same."""
    monkeypatch.setenv("MS_JIT", str(axis))
    plain = Sequences()
    start, optimizer = values(plain.trainable_params()), nn.SGD(plain.trainable_params(), 0.5)
    whole = [ops.concat(both, 1 if both[0].ndim == 3 else 0) for both in zip(*sequences())]
    optimizer(ms.grad(plain, None, optimizer.parameters)(*whole))
    mode_named("graph" if driver == "cell" else "pynative")
    network = Sequences(driver == "losses")
    optimizer = nn.SGD(network.trainable_params(), 0.5)
    if driver == "cell":
        step = TrainOneStepCell(network, optimizer, 2, batch_axis=axis)
        for batch in sequences():
            step(*batch)
    else:
        pieces, losses = 1 if driver == "step" else 3, 2 if driver == "losses" else 1
        step = make_train_step(network, optimizer, 2, pieces=pieces, losses=losses, batch_axis=axis)
        assert len(list(step.epoch(sequences()))) == 2
    assert int(step.accumulator.seen) == (11 if axis else 10)
    moved = max(np.abs(p - s).max() for p, s in zip(values(plain.trainable_params()), start))
    error = max(np.abs(p - q).max() for p, q in zip(values(plain.trainable_params()), values(network.trainable_params())))
    assert (error < 1e-5 * moved) if axis else (error > 1e-3 * moved)


@pytest.mark.parametrize(("axis", "ok"), [(1, True), (0, False)])
def test_the_check_cuts_along_the_same_axis(axis, ok):
    network = nn.Dense(3, 2)

    def forward_fn(x):
        return ops.square(ops.tanh(network(x)).sum(0)).mean()

    assert check_equivalence(forward_fn, network, (sequences()[0][0],), 2, batch_axis=axis).ok is ok


def test_aux_has_its_rows_on_the_same_axis_and_a_wrong_axis_is_refused():
    network = nn.Dense(3, 2)

    def forward_fn(x):
        y = network(x)
        return y.mean(), (y, y[0, :, 0], y.sum())

    x = Tensor(np.random.default_rng(0).normal(size=(5, 7, 3)), ms.float32)
    step = make_train_step(forward_fn, nn.SGD(network.trainable_params(), 0.0), 1, pieces=3, batch_axis=1, has_aux=True)
    loss, (y, first, total) = step(x)
    np.testing.assert_allclose(y.asnumpy(), network(x).asnumpy(), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(first.asnumpy(), network(x).asnumpy()[0, :, 0], rtol=1e-5, atol=1e-6)
    assert math.isfinite(float(total))
    assert float(loss) == pytest.approx(float(network(x).mean()), rel=1e-4, abs=1e-6)
    with pytest.raises(ValueError, match=r"batch_axis is -1, expected an int >= 0"):
        make_train_step(forward_fn, nn.SGD(network.trainable_params(), 0.1), 1, batch_axis=-1)


# --- an optimizer that is careful: a recipe of the guide --------------------------------------------------------------------------


@pytest.mark.parametrize("driver", ["step", "cell"])
def test_an_optimizer_may_clip_elements_and_leave_out_updates(driver, mode_named):
    """As it does without accumulation, on the undivided batch. Controls: some elements are clipped, one update of three is left out."""
    mode_named("graph" if driver == "cell" else "pynative")
    x, y = batches([8])[0]
    plain, network = MLP(), MLP()
    expected, optimizer = (recipe("limits", "Careful")(one.trainable_params(), 0.1, 0.9) for one in (plain, network))
    step = (make_train_step(mean_loss(network), optimizer, 2) if driver == "step" else
            TrainOneStepCell(nn.WithLossCell(network, LOSS), optimizer, 2))
    after = []
    for scale in (1.0, 10.0, 1.0):
        ms.set_context(mode=ms.PYNATIVE_MODE)
        gradients = ms.grad(mean_loss(plain), None, plain.trainable_params())(*tensors(x * scale, y))
        expected(gradients)
        mode_named("graph" if driver == "cell" else "pynative")
        for rows in (slice(4), slice(4, 8)):
            step(*tensors(x[rows] * scale, y[rows]))
        after.append((values(plain.trainable_params()), max(float(g.abs().max()) for g in gradients)))
        assert difference(values(network.trainable_params()), after[-1][0]) < 1e-4
    assert int(step.accumulator.update_step) == 3
    assert max(largest for _, largest in after) > 0.25
    assert difference(after[0][0], after[1][0]) == 0 < difference(after[1][0], after[2][0])
