"""Several losses, each divided by its own count in the window; that every driver is exact is drawn in test_differential.py."""
import csv

import mindspore as ms
import numpy as np
import pytest
from conftest import MLP, Clip, compiled, difference, in_modes, recover, tensors, values
from following import op_by_op, run_as
from mindspore import Tensor, nn, ops
from mindspore.dataset import GeneratorDataset
from mindspore.train import Model

from ms_accum import (
    Accumulator,
    CheckpointError,
    FlushCallback,
    GradientNoiseScale,
    TrainOneStepCell,
    WindowLog,
    check_equivalence,
    load_checkpoint,
    make_grad_cache_step,
    make_train_step,
    save_checkpoint,
    until_weight,
)

COUNTS = (0, 20, 2, 8, 1, 12, 3)  # of the second loss in each microbatch of 20: they vary by more than 10 times
N = 3


@pytest.fixture
def uncompiled():
    with op_by_op():
        yield


def microbatches():
    """[(x (20, 6), y (20,), counted (20,))]: the first loss is a mean over all rows, the second over those that are counted."""
    rng = np.random.default_rng(5)
    return [(rng.normal(size=(20, 6)).astype(np.float32), rng.integers(0, 3, 20).astype(np.int32),
             rng.permutation(np.arange(20) < count).astype(np.float32)) for count in COUNTS]


def pair_of(network):
    cross_entropy = nn.CrossEntropyLoss()

    def forward_fn(x, y, counted):
        logits = network(x)
        return cross_entropy(logits, y), (ops.square(logits).sum(-1) * counted).sum() / counted.sum()

    return forward_fn


def counts(x, y, counted):
    return x.shape[0], counted.sum()


def rows(x, y, counted):
    return x.shape[0], x.shape[0]


def sgd(network):
    return nn.SGD(network.trainable_params(), 0.5)


def undivided():
    """Parameters after plain updates with the windows as single batches, whose sums of both losses are differentiated."""
    network = MLP()
    forward_fn, optimizer = pair_of(network), sgd(network)

    def total(*batch):
        one, other = forward_fn(*batch)
        return one + other

    grad_fn = ms.grad(total, None, optimizer.parameters)
    for start in range(0, len(COUNTS), N):
        optimizer(grad_fn(*map(Tensor, map(np.concatenate, zip(*microbatches()[start:start + N])))))
    return values(network.trainable_params())


def trained(lookahead=False, weight_fn=counts, skip_empty=False, **options):
    """The step, its network, and what it returned."""
    network = MLP()
    step = make_train_step(pair_of(network), sgd(network), N, weight_fn=weight_fn, losses=2, **options)
    batches = [batch for batch in microbatches() if not skip_empty or batch[2].any()]
    return step, network, list(step.epoch([tuple(map(Tensor, batch)) for batch in batches], lookahead=lookahead))


@pytest.mark.parametrize(("mode", "lookahead", "micro_size"), in_modes(
    [(False, 1), (False, 4), (True, 1), (True, 4)], compiled=[(False, 4), (True, 1)]))
def test_two_losses_are_those_of_the_undivided_batch(mode, lookahead, micro_size, capfd):
    """Also where the second one is a mean over nothing (0/0). Windows weighed before need one set of buffers only."""
    with run_as(mode):
        step, network, returned = trained(lookahead, micro_size=micro_size)
    assert difference(values(network.trainable_params()), undivided()) <= 1e-6
    assert len(step.accumulator.buffers) == 4 * (1 if lookahead else 2)
    assert int(step.accumulator.update_step) == 3
    assert "eliminated by mistake" not in capfd.readouterr().err
    assert step.accumulator.window_weight.asnumpy().tolist() == [20, COUNTS[-1]]
    one, other = pair_of(MLP())(*map(Tensor, microbatches()[1]))  # of the first window, like the start
    assert [float(loss) for loss in returned[1]] == pytest.approx([float(one), float(other)], rel=1e-5)


@pytest.mark.usefixtures("uncompiled")
def test_the_naive_denominator_is_wrong():
    """Control: the second loss counted by rows, as a mean of means does. Microbatches without any are left out, or it would be NaN."""
    _, exact, _ = trained(skip_empty=True)
    _, naive, _ = trained(weight_fn=rows, skip_empty=True)
    assert difference(values(naive.trainable_params()), values(exact.trainable_params())) > 1e-2


@pytest.mark.parametrize("mode", ["jit", "pynative"])
def test_by_hand(mode):
    network = MLP()
    accumulator, forward_fn = Accumulator(sgd(network), N, reduction="mean", losses=2), pair_of(network)

    def one(*batch):
        return forward_fn(*batch)[0]

    def other(*batch):
        return forward_fn(*batch)[1]

    grad_fns = [ms.grad(loss, None, accumulator.optimizer.parameters) for loss in (one, other)]

    def train_step(x, y, counted):
        gradients = (grad_fns[0](x, y, counted), grad_fns[1](x, y, counted))
        return accumulator(gradients, counts(x, y, counted))

    train_step = compiled(train_step, mode)
    closed = [bool(train_step(*map(Tensor, batch))) for batch in microbatches()]
    assert closed == [False, False, True, False, False, True, False]
    assert accumulator.flush()
    assert difference(values(network.trainable_params()), undivided()) <= 1e-6


def test_a_log_of_windows_has_both(tmp_path):
    network = MLP()
    forward_fn = pair_of(network)

    class Losses(nn.Cell):
        def __init__(self):
            super().__init__(auto_prefix=False)
            self.network = network

        def construct(self, x, y, counted):
            return forward_fn(x, y, counted)

    cell = TrainOneStepCell(Losses(), sgd(network), N, weight_fn=counts, losses=2)
    dataset = GeneratorDataset(microbatches(), ["x", "y", "counted"], shuffle=False)
    Model(cell).train(1, dataset, callbacks=[FlushCallback(), WindowLog("log.csv")], dataset_sink_mode=False)
    with open("log.csv", newline="", encoding="utf-8") as file:
        logged = list(csv.DictReader(file))
    assert list(logged[0])[3:7] == ["loss_1", "loss_2", "weight_1", "weight_2"]
    assert [(float(row["weight_1"]), float(row["weight_2"])) for row in logged] == [(60, 22), (60, 21), (20, 3)]
    first = pair_of(MLP())(*map(Tensor, map(np.concatenate, zip(*microbatches()[:N]))))
    assert [float(logged[0][f"loss_{i}"]) for i in (1, 2)] == pytest.approx([float(loss) for loss in first], rel=1e-5)
    assert difference(values(network.trainable_params()), undivided()) <= 1e-6


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize(("saved", "loaded", "used"), [(4, False, False), (6, True, False), (6, True, True), (6, False, False)])
def test_resumed_bit_identically(saved, loaded, used, tmp_path):
    """In the middle of a window, and, where it is closed, also by a run that looks ahead (`loaded`), and has done so before (`used`)."""
    def start():
        network = MLP()
        return network, make_train_step(pair_of(network), sgd(network), N, weight_fn=counts, losses=2)

    def go_on(step, batches):
        for _ in step.epoch(batches, lookahead=loaded and step is not first):
            pass

    batches = [tuple(map(Tensor, batch)) for batch in microbatches()]
    network, first = start()
    for batch in batches[:saved]:
        first(*batch)
    save_checkpoint(tmp_path / "run.ckpt", network, first.accumulator)
    go_on(first, batches[saved:])
    other, second = start()
    if used:
        go_on(second, batches[:2])
    load_checkpoint(tmp_path / "run.ckpt", other, second.accumulator)
    go_on(second, batches[saved:])
    one, other = values(network.trainable_params()), values(other.trainable_params())
    assert difference(one, other) <= (1e-6 if loaded else 0)
    assert difference(one, values(MLP().trainable_params())) > 0.1
    assert len(second.accumulator.buffers) == (4 if loaded else 8)


@pytest.mark.usefixtures("uncompiled")
def test_an_open_window_does_not_go_on_where_windows_are_weighed_before(tmp_path):
    first, second = (MLP() for _ in range(2))
    step = make_train_step(pair_of(first), sgd(first), N, weight_fn=counts, losses=2)
    step(*map(Tensor, microbatches()[0]))
    save_checkpoint(tmp_path / "run.ckpt", first, step.accumulator)
    other = make_train_step(pair_of(second), sgd(second), N, weight_fn=counts, losses=2)
    for _ in other.epoch((tuple(map(Tensor, batch)) for batch in microbatches()[:N]), lookahead=True):
        pass
    with pytest.raises(CheckpointError, match=r"kept apart, .* expected a closed window: save when train_step\.updated"):
        load_checkpoint(tmp_path / "run.ckpt", second, other.accumulator)


@pytest.mark.usefixtures("uncompiled")
def test_looking_ahead_makes_what_is_differentiated_no_smaller():
    """A layer that clips gradients (or 16 bits, where they underflow) sees those of a microbatch by itself, as without lookahead."""
    def run(lookahead, bound):
        network, clip, cross_entropy = MLP(), Clip(bound), nn.CrossEntropyLoss()

        def forward_fn(x, y, counted):
            return cross_entropy(clip(network(x)), y), ops.square(network.first.weight).mean()

        step = make_train_step(forward_fn, sgd(network), N, weight_fn=rows, losses=2)
        for _ in step.epoch([tuple(map(Tensor, batch)) for batch in microbatches()], lookahead=lookahead):
            pass
        return values(network.trainable_params())

    assert difference(run(True, 0.01), run(False, 0.01)) <= 1e-6
    assert difference(run(False, 0.01), run(False, 1.0)) > 1e-3  # it does clip


@pytest.mark.usefixtures("uncompiled")
def test_windows_by_the_weight_of_the_first_loss():
    network, closed = MLP(), []
    step = make_train_step(pair_of(network), sgd(network), until_weight(50), weight_fn=counts, losses=2)
    for _ in step.epoch([tuple(map(Tensor, batch)) for batch in microbatches()], lookahead=True):
        closed.append(bool(step.updated))
    assert closed == [False, False, True, False, False, True, True]  # the end of the data is known, too
    assert step.updated
    assert difference(values(network.trainable_params()), undivided()) <= 1e-6


@pytest.mark.usefixtures("uncompiled")
def test_a_loop_that_is_left_ahead_needs_a_reset(tmp_path):
    """The weights of its window are those of microbatches that were never trained."""
    network = MLP()
    step = make_train_step(pair_of(network), sgd(network), N, weight_fn=counts, losses=2)
    batches = [tuple(map(Tensor, batch)) for batch in microbatches()]
    for _ in step.epoch(batches, lookahead=True):
        break
    for refused in (step.flush, lambda: next(step.epoch(batches, lookahead=True)),
                    lambda: save_checkpoint(tmp_path / "open.ckpt", network, step.accumulator)):
        with pytest.raises(RuntimeError, match=r"was weighed as a whole by epoch\(lookahead=True\).*call accumulator.reset\(\)"):
            refused()
    step.accumulator.reset()
    with pytest.raises(RuntimeError, match="weighs windows before it trains on them"):
        step(*batches[0])
    for _ in step.epoch(batches, lookahead=True):
        pass
    assert difference(values(network.trainable_params()), undivided()) <= 1e-6


@pytest.mark.usefixtures("uncompiled")
def test_a_window_that_was_opened_before_is_not_taken_for_a_whole(tmp_path):
    """Loaded in the middle of a window; after a flush, and after one that was compiled before, the windows are whole ones."""
    def start():
        network = MLP()
        return network, make_train_step(pair_of(network), sgd(network), N, weight_fn=counts, losses=2)

    batches = [tuple(map(Tensor, batch)) for batch in microbatches()]
    network, step = start()
    for batch in batches[:4]:
        step(*batch)
    save_checkpoint(tmp_path / "open.ckpt", network, step.accumulator)
    assert step.flush()
    expected = values(network.trainable_params())
    other, ahead = start()
    assert not ahead.flush()
    load_checkpoint(tmp_path / "open.ckpt", other, ahead.accumulator)
    with pytest.raises(RuntimeError, match="the open window holds microbatches already"):
        next(ahead.epoch(batches, lookahead=True))
    assert ahead.flush()
    assert difference(values(other.trainable_params()), expected) == 0
    for one, lookahead in ((step, False), (ahead, True)):
        for _ in one.epoch(batches[4:], lookahead=lookahead):
            pass
    assert difference(values(other.trainable_params()), values(network.trainable_params())) <= 1e-6


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize("method", ["reset", "flush", "apply"])
def test_a_window_that_is_closed_inside_the_loop_ends_it(method):
    step = make_train_step(pair_of(network := MLP()), sgd(network), N, weight_fn=counts, losses=2)
    epoch = step.epoch([tuple(map(Tensor, batch)) for batch in microbatches()], lookahead=True)
    for _ in range(4):
        next(epoch)
    getattr(step.accumulator, method)()
    with pytest.raises(RuntimeError, match=r"closed or dropped in the middle of epoch\(lookahead=True\)"):
        next(epoch)


@pytest.mark.usefixtures("uncompiled")
def test_an_accumulator_that_looks_ahead_takes_nothing_else():
    step, _, _ = trained(lookahead=True)
    parameters = step.accumulator.optimizer.parameters
    with pytest.raises(RuntimeError, match="keeps one set of buffers for all losses, because a train step weighs whole windows"):
        step.accumulator((parameters, parameters), (1.0, 1.0))
    step, _, _ = trained()
    with pytest.raises(RuntimeError, match=r"cannot be weighed before .*: the accumulator keeps the losses apart"):
        next(step.epoch(microbatches(), lookahead=True))


def router(network):
    def forward_fn(x, y, counted):
        one, _ = pair_of(network)(x, y, counted)
        share = ops.softmax(network(x)).mean(0)
        return one, (share * share).sum()

    return forward_fn


def test_the_check_names_the_loss_that_is_no_mean():
    """A router's loss is a product of two means over the batch; the control is a pair of means."""
    network, batch = MLP().set_train(), tuple(map(Tensor, microbatches()[1]))
    report = check_equivalence(pair_of(network), network, batch, 4, weight_fn=counts, losses=2)
    assert report.ok
    assert [one.ok for one in report.losses] == [True, True]
    report = check_equivalence(router(network), network, batch, 4, weight_fn=counts, losses=2)
    assert [one.ok for one in report.losses] == [True, False]
    assert not report.ok
    assert [cause.layer for cause in report.causes] == ["forward_fn, loss 2"]
    assert "couples samples" in str(report)
    report = check_equivalence(pair_of(network), network, tuple(map(Tensor, microbatches()[3])), 4, weight_fn=rows, losses=2)
    assert [(cause.layer, cause.what[:19]) for cause in report.causes] == [("forward_fn, loss 2", "wrong normalisation")]


def test_the_check_says_which_loss_it_cannot_check():
    network, batch = MLP().set_train(), tuple(map(Tensor, microbatches()[0]))
    with pytest.raises(ValueError, match="loss 2: weight_fn gave the pieces the weights"):
        check_equivalence(pair_of(network), network, batch, 4, weight_fn=counts, losses=2)
    with pytest.raises(ValueError, match="the weight is a tuple of 2, expected one number or Tensor because of losses=1"):
        check_equivalence(pair_of(network), network, batch, 4, weight_fn=counts)
    with pytest.raises(TypeError, match=r"forward_fn returned a tuple, .*, or give losses=2 \(in a shell: --losses 2\)"):
        check_equivalence(pair_of(network), network, batch, 4)


def one_loss(x, y):
    return x.mean()


def two_losses(x, y):
    return x.mean(), x.mean()


def three_losses(x, y):
    return x.mean(), x.mean(), x.mean()


def one_weight(x, y):
    return y.sum()


@pytest.mark.parametrize(("error", "message", "forward_fn", "options"), [
    (TypeError, "forward_fn returned no tuple of losses, expected a tuple of 2 because of losses=2", one_loss, {"losses": 2}),
    (TypeError, "forward_fn returned 3 losses, expected a tuple of 2 because of losses=2", three_losses, {"losses": 2}),
    (TypeError, "expected the loss alone; give has_aux=True .*, losses=2 if it returns two losses", two_losses, {}),
    (ValueError, "the weight is no tuple, expected a tuple of 2 because of losses=2", two_losses, {"losses": 2, "weight_fn": one_weight}),
    (ValueError, r'lookahead=True needs the host .*; give strategy="split"', two_losses, {"losses": 2, "strategy": "fused"}),
    (RuntimeError, 'on_nonfinite="skip_microbatch", what is skipped is not known', two_losses,
     {"losses": 2, "on_nonfinite": "skip_microbatch"}),
])
def test_what_does_not_fit_is_refused(error, message, forward_fn, options):
    network = MLP()

    def called(x, y):
        return forward_fn(network(x), y)

    batch = tensors(*[part[:4] for part in microbatches()[0][:2]])
    lookahead = options.get("strategy") == "fused" or "on_nonfinite" in options
    step = make_train_step(called, sgd(network), 2, **options)
    try:
        with pytest.raises(error, match=message):
            next(step.epoch([batch], lookahead=lookahead))
    finally:
        recover()


@pytest.mark.parametrize(("message", "options"), [
    ("losses is 0, expected an int >= 1", {"losses": 0}),
    ("losses=2 with reduction='sum'", {"losses": 2, "reduction": "sum"}),
    ("noise_scale with losses=2", {"losses": 2, "noise_scale": GradientNoiseScale()}),
])
def test_accumulators_that_cannot_be(message, options):
    with pytest.raises(ValueError, match=message):
        Accumulator(sgd(MLP()), 2, **{"reduction": "mean", **options})


def test_a_loss_over_a_whole_batch_is_one():
    with pytest.raises(ValueError, match="has several losses, which a loss over a whole batch does not allow"):
        make_grad_cache_step(one_loss, one_loss, Accumulator(sgd(MLP()), 1, reduction="mean", losses=2), micro_size=2)
