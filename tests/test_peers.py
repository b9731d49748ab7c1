"""What users of other libraries have: a limit of skips, updates of a run, samples seen, empty microbatches, another batch axis.

Each by hand, in a train step and in a cell; what is state is resumed.
"""
import importlib
import math
import re
import sys
from pathlib import Path

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
from model_runs import make_cell, train
from pages import PAGES

from ms_accum import (
    Accumulator,
    FlushCallback,
    TrainOneStepCell,
    WindowLog,
    check_equivalence,
    load_checkpoint,
    make_grad_cache_step,
    make_train_step,
    save_checkpoint,
    until_weight,
    updates_of,
)
from ms_accum.batch_size import AdaptiveWindow

DRIVERS = ("step", "step pieces", "cell graph", "cell pynative", "hand jit", "hand pynative")


@pytest.fixture(params=DRIVERS)
def built(request, mode_named):
    """`(accumulate_step, **options) -> network, accumulator, (x, y) -> result`: by each driver."""
    name, _, how = request.param.partition(" ")
    mode_named("graph" if how == "graph" else "pynative")

    def build(accumulate_step=2, hook=None, optimizer_of=None, **options):
        network = MLP()
        optimizer = optimizer_of(network) if optimizer_of else nn.SGD(network.trainable_params(), 0.1)
        acc = Accumulator(optimizer, accumulate_step, reduction="mean", after_update=hook and hook(network), **options)
        if name == "step":
            step = make_train_step(mean_loss(network), acc, pieces=2 if how else 1)
        elif name == "cell":
            step = TrainOneStepCell(nn.WithLossCell(network, LOSS), acc)
        else:
            grad_fn = ms.value_and_grad(mean_loss(network), None, acc.optimizer.parameters)

            def added(x, y):
                loss, grads = grad_fn(x, y)
                acc(grads, x.shape[0])
                return loss

            graph = ms.jit(added) if how == "jit" else added

            def step(x, y):
                result = graph(x, y)
                acc.guard.require_progress()
                return result
        return network, acc, lambda x, y: step(*tensors(x, y))

    build.pieces = 2 if request.param == "step pieces" else 1
    return build


# --- so many skips in a row ---------------------------------------------------------------------------------------------------

STUCK = r"^{} .* in a row were skipped, because their gradients were not finite, after update {} \({} skipped in all\), "


@pytest.mark.parametrize("policy", ["skip_microbatch", "skip_window"])
def test_a_run_ends_after_too_many_skips_in_a_row(built, policy):
    """Also if the first of them was before a checkpoint. Control: a good one in between, and no limit."""
    x, y = batches([4])[0]
    bad = x * np.nan
    each = built.pieces if policy == "skip_microbatch" else 1  # skips of a bad microbatch

    def run(data, max_skips=2 * each - 1, load=False):
        network, acc, step = built(1, on_nonfinite=policy, max_skips=max_skips)
        if load:
            load_checkpoint("skips.ckpt", network, acc)
        for batch in data:
            step(batch, y)
        save_checkpoint("skips.ckpt", network, acc)
        return acc

    assert int(run([bad] * 3, max_skips=None).skipped_in_row) == 3 * each
    acc = run([x, bad, x, bad])
    assert [int(p) for p in (acc.update_step, acc.skipped, acc.skipped_in_row)] == [2, 2 * each, each]
    assert int(run([x, bad], load=True).skipped_in_row) == each
    with pytest.raises(RuntimeError, match=STUCK.format(2 * each, 3, 4 * each)):
        run([bad], load=True)


def test_the_limit_of_skips_is_seen_at_the_end_of_a_window_and_in_a_flush():
    x, y = tensors(*batches([4])[0])
    bad = x * np.nan
    network = MLP()
    for policy, noun in (("skip_microbatch", "3 microbatches or pieces"), ("skip_window", "1 windows")):
        optimizer = nn.SGD(network.trainable_params(), 0.1)
        train_step = make_train_step(mean_loss(network), optimizer, 3, on_nonfinite=policy, max_skips=0)
        for _ in range(2):
            train_step(bad, y)
        with pytest.raises(RuntimeError, match=f"^{noun} in a row .* at most max_skips=0; .* another call goes on"):
            train_step(bad, y)
        assert not train_step.updated
        train_step(x, y)  # another call goes on
        train_step(bad, y)
        with pytest.raises(RuntimeError, match="in a row were skipped"):
            train_step.flush()
    with pytest.raises(ValueError, match=r"max_skips is -1, expected an int >= 0"):
        make_train_step(mean_loss(network), optimizer, 3, max_skips=-1)


def test_a_model_ends_after_too_many_skips(mode_named):
    """With a loss scaler, whose overflows count, too."""
    mode_named("graph")
    rows = [(np.full((4, 6), np.nan, np.float32), np.zeros(4, np.int32))] * 6
    for limit, ends in ((1, True), (3, False)):
        _, cell = make_cell(max_skips=limit, loss_scaler=ms.amp.DynamicLossScaler(2.0**10, 2, 2))
        model = Model(cell)
        data = GeneratorDataset(rows, ["x", "y"], shuffle=False)
        if ends:
            with pytest.raises(RuntimeError, match=r"2 windows in a row were skipped"):
                model.train(1, data, dataset_sink_mode=False)
        else:
            model.train(1, data, dataset_sink_mode=False)
        assert int(cell.accumulator.skipped_in_row) == (2 if ends else 3)


# --- samples or tokens seen ---------------------------------------------------------------------------------------------------


def test_samples_seen_are_those_of_all_updates(built):
    """Not those of an open or a dropped window; resumed from a checkpoint. They count on where float32 cannot."""
    network, acc, step = built(2, on_nonfinite="skip_window")
    sizes = [4, 6, 4, 4, 6]
    for i, (x, y) in enumerate(batches(sizes)):
        step(x * (np.nan if i == 2 else 1), y)
    assert int(acc.seen) == 4 + 6
    save_checkpoint("seen.ckpt", network, acc)
    network, acc, step = built(2, on_nonfinite="skip_window")
    load_checkpoint("seen.ckpt", network, acc)
    assert int(acc.seen) == 10
    ops.assign(acc.seen, 2**40 + 1)
    step(*batches([6])[0])
    assert int(acc.seen) == 2**40 + 1 + 6 + 6


@pytest.mark.parametrize("pieces", [1, 2])
def test_tokens_seen_are_the_weights_of_weight_fn_and_of_the_first_loss(pieces):
    network = MLP()

    def pair(x, y, counted):
        logits = network(x)
        return LOSS(logits, y), (ops.square(logits).sum(-1) * counted).sum() / counted.sum()

    def first(x, y, counted):
        return pair(x, y, counted)[0]

    def weights(x, y, counted):
        return 2.0 * x.shape[0], counted.sum()

    rng = np.random.default_rng(0)
    data = [(rng.normal(size=(n, 6)).astype(np.float32), rng.integers(0, 3, n).astype(np.int32), np.ones(n, np.float32)) for n in (4, 6, 4)]
    several = make_train_step(pair, nn.SGD(network.trainable_params(), 0.1), 2, pieces=pieces, losses=2, weight_fn=weights)
    one = make_train_step(first, nn.SGD(network.trainable_params(), 0.1), 2, pieces=pieces)
    for step, seen in ((several, [20, 28]), (one, [10, 14])):
        after = [int(step.accumulator.seen) for _ in step.epoch(data) if step.updated]
        assert after == seen
        assert f"{seen[-1]} seen" in repr(step)


def test_a_window_log_has_what_was_seen(mode_named):
    mode_named("graph")
    rows = []
    train(make_cell()[1], FlushCallback(), WindowLog(rows.append))
    assert [row["seen"] for row in rows] == [12, 24, 26]


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


@pytest.mark.parametrize("driver", ["step", "step pieces", "cell graph", "cell pynative", "scaled"])
@pytest.mark.parametrize("accumulate_step", [1, 2, until_weight(9, at_most=3)])
def test_a_microbatch_without_rows_counts_and_weighs_nothing(driver, accumulate_step, mode_named):
    """Nothing is compiled for it, and its loss is 0."""
    mode_named("graph" if driver in ("cell graph", "scaled") else "pynative")
    network = MLP()
    options = {"loss_scaler": ms.amp.StaticLossScaler(8.0)} if driver == "scaled" else {}
    acc = Accumulator(nn.Momentum(network.trainable_params(), 0.1, 0.9), accumulate_step, 0.3, reduction="mean", **options)
    step = (make_train_step(mean_loss(network), acc, pieces=2 if "pieces" in driver else 1) if "step" in driver
            else TrainOneStepCell(nn.WithLossCell(network, LOSS), acc))
    oracle = reference.Accumulation(values(network.trainable_params()), reference.SGD(0.1, 0.9), accumulate_step, "mean", 0.3)
    for i, (x, y) in enumerate(batches([4, 0, 4, 4, 4, 0, 0, 0, 4])):
        before = compiled_graphs()
        result = step(*tensors(x, y))
        loss = result[0] if driver == "scaled" else result
        if len(x):
            oracle(reference.loss_and_gradients(oracle.parameters, x, y)[1], len(x))
            assert float(loss) > 0.1
        else:
            oracle([np.zeros_like(p) for p in oracle.parameters], 0.0)
            assert float(loss) == 0
            # The end of a window is compiled when it is first needed; so is a cell's in graph mode, for the host.
            assert compiled_graphs() <= before + 4 * (i < 6)
    assert step.flush() == oracle.flush()
    assert int(acc.update_step) == oracle.update_step
    assert difference(values(network.trainable_params()), oracle.parameters) <= 1e-5


def test_an_epoch_may_begin_without_rows_and_a_window_of_two_losses_hold_such_a_batch():
    """The unit of weights is that of the first microbatch with rows."""
    network = MLP()

    def pair(x, y):
        logits = network(x)
        return LOSS(logits, y), ops.square(logits).mean()

    def with_aux(x, y):
        return LOSS(network(x), y), network(x)

    x, y = batches([4])[0]
    none = tensors(x[:0], y[:0])
    for step in (make_train_step(pair, nn.SGD(network.trainable_params(), 0.1), 2, losses=2, pieces=2),
                 make_train_step(with_aux, nn.SGD(network.trainable_params(), 0.1), 2, has_aux=True)):
        results = list(step.epoch([none, tensors(x, y), tensors(x, y), none]))
        assert [float(first) for first, _ in (results[0], results[-1])] == [0, 0]
        assert float(results[1][0]) > 0
        assert (int(step.accumulator.update_step), int(step.accumulator.seen)) == (2, 8)
    assert results[0][1] is None
    encoders = nn.Dense(6, 2)

    def contrast(a):
        return ops.square(a).mean()

    cached = make_grad_cache_step(encoders, contrast, nn.SGD(encoders.trainable_params(), 0.1), 2, pieces=2)
    assert float(cached(none[0])) == 0 < float(cached(tensors(x, y)[0]))
    assert int(cached.accumulator.update_step) == 1


# --- another batch axis ---------------------------------------------------------------------------------------------------------


class Recurrent(nn.Cell):
    """Sequences `(time, batch, features)`, lengths `(batch,)`, a class for each."""

    def __init__(self):
        super().__init__()
        self.cell, self.head = nn.Dense(7, 4), nn.Dense(4, 3)
        rng = np.random.default_rng(2)
        for parameter in self.trainable_params():
            parameter.set_data(Tensor(rng.normal(0, 0.5, parameter.shape), ms.float32))

    def construct(self, x, lengths):
        state = ops.zeros((x.shape[1], 4), ms.float32)
        for t in range(x.shape[0]):
            new = ops.tanh(self.cell(ops.concat((x[t], state), 1)))
            state = ops.where((lengths > t).reshape(-1, 1), new, state)
        return self.head(state)


def sequences():
    """Of 7 and of 4 samples, with their lengths and classes."""
    rng = np.random.default_rng(0)
    return [(Tensor(rng.normal(size=(5, n, 3)), ms.float32), *(Tensor(rng.integers(low, low + 3, n), ms.int32) for low in (2, 0)))
            for n in (7, 4)]


class LossCell(nn.Cell):
    def __init__(self, network, twice=False):
        super().__init__(auto_prefix=False)
        self.network, self.twice = network, twice

    def construct(self, x, lengths, y):
        loss = LOSS(self.network(x, lengths), y)
        return (loss, loss * 0.0) if self.twice else loss


def accumulated(driver, axis=1):
    """The parameters after a window of both batches, and the samples that were seen."""
    network = Recurrent()
    optimizer = nn.SGD(network.trainable_params(), 0.5)
    if driver == "cell":
        step = TrainOneStepCell(LossCell(network), optimizer, 2, batch_axis=axis)
        for batch in sequences():
            step(*batch)
    else:
        losses = 2 if driver == "losses" else 1
        step = make_train_step(LossCell(network, losses > 1), optimizer, 2, pieces=1 if driver == "step" else 3, losses=losses,
                               batch_axis=axis)
        assert len(list(step.epoch(sequences()))) == 2
    return values(network.trainable_params()), int(step.accumulator.seen)


@pytest.mark.parametrize("driver", ["step", "pieces", "losses", "cell"])
def test_samples_may_be_counted_along_another_axis(driver):
    """The undivided batch by plain MindSpore. Control: along axis 0, both microbatches weigh the same, and pieces are cuts of time."""
    network = Recurrent()
    start, optimizer = values(network.trainable_params()), nn.SGD(network.trainable_params(), 0.5)
    one, other = sequences()
    whole = [ops.concat(both, 1 if both[0].ndim == 3 else 0) for both in zip(one, other)]
    optimizer(ms.grad(LossCell(network), None, optimizer.parameters)(*whole))
    plain = values(network.trainable_params())
    moved = max(np.abs(p - s).max() for p, s in zip(plain, start))
    got, seen = accumulated(driver)
    assert seen == 11
    assert max(np.abs(a - p).max() for a, p in zip(got, plain)) < 1e-5 * moved
    if driver in ("step", "cell"):
        wrong, seen = accumulated(driver, axis=0)
        assert seen == 10
        assert max(np.abs(a - p).max() for a, p in zip(wrong, plain)) > 1e-3 * moved


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


# --- a moving average of the weights, and an optimizer that is careful: the recipes of the guide ------------------------------------


@pytest.fixture
def recipe(tmp_path, monkeypatch):
    """`(page, name)`: a class of the guide, in a module of its own, because graph mode reads the source and imports it."""
    monkeypatch.syspath_prepend(tmp_path)

    def found(page, name):
        code = re.search(rf"^class {name}.*?(?=^\S|^```)", PAGES[page], re.MULTILINE | re.DOTALL)[0]
        module = f"recipe_of_{name}"
        Path(f"{module}.py").write_text(f"import mindspore as ms\nfrom mindspore import Tensor, nn, ops\n\n{code}", encoding="utf-8")
        monkeypatch.delitem(sys.modules, module, raising=False)
        return getattr(importlib.import_module(module), name)

    return found


def test_averages_of_weights_are_swapped_in_and_resumed(built, recipe):
    """After each update of windows of two. A run that was saved in the middle of a window, between two swaps, ends with the same bits."""
    made, data = recipe("train-step", "MovingAverage"), batches([4] * 7)

    def run(stop=None, load=False):
        average = None

        def averaging(network):
            nonlocal average
            average = made(network.trainable_params(), 0.5)
            return average

        network, acc, step = built(2, hook=averaging)
        done = load_checkpoint("ema.ckpt", network, acc) if load else 0
        expected = values(average.averages)
        for i, (x, y) in enumerate(data[done:stop], done):
            step(x, y)
            if i % 2:
                expected = [(a + p) / 2 for a, p in zip(expected, values(network.trainable_params()))]
        assert difference(values(average.averages), expected) < 1e-5
        trained = [p.asnumpy().tobytes() for p in (*average.originals, *average.averages)]
        average.swap()
        assert [p.asnumpy().tobytes() for p in network.trainable_params()] == trained[len(trained) // 2:] != trained[:len(trained) // 2]
        average.swap()
        save_checkpoint("ema.ckpt", network, acc, extra=stop)
        assert [p.asnumpy().tobytes() for p in (*average.originals, *average.averages)] == trained
        return trained

    whole = run(7)
    assert run(3) != whole
    assert run(7, load=True) == whole


def test_an_optimizer_may_clip_elements_and_leave_out_updates(built, recipe):
    """As it does without accumulation, on the undivided batch. Controls: some elements are clipped, one update of three is left out."""
    careful = recipe("limits", "Careful")
    x, y = batches([8])[0]

    def optimizer_of(network):
        return careful(network.trainable_params(), 0.1, 0.9)

    plain = MLP()
    optimizer, grad_fn = optimizer_of(plain), ms.grad(mean_loss(plain), None, plain.trainable_params())
    network, acc, step = built(2, optimizer_of=optimizer_of)
    after = []
    for scale in (1.0, 10.0, 1.0):
        gradients = grad_fn(*tensors(x * scale, y))
        optimizer(gradients)
        for rows in (slice(4), slice(4, 8)):
            step(x[rows] * scale, y[rows])
        after.append((values(plain.trainable_params()), max(float(g.abs().max()) for g in gradients)))
        assert difference(values(network.trainable_params()), after[-1][0]) < 1e-4
    assert int(acc.update_step) == 3
    assert max(largest for _, largest in after) > 0.25
    assert difference(after[0][0], after[1][0]) == 0 < difference(after[1][0], after[2][0])
