"""Several losses: what is refused. That they are exact is drawn in test_differential.py."""
import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn, ops
from support.layers import Adds
from support.modes import recorded_warnings
from support.training import LOSS, sgd

from ms_accum import Accumulator, WindowLog, check_equivalence, load_checkpoint, make_train_step, save_checkpoint
from ms_accum.selftest.comparing import difference, relative, values
from ms_accum.selftest.modes import running
from ms_accum.selftest.networks import MLP, batches, mean_loss, tensors

pytestmark = pytest.mark.core

COUNTS = (0, 20, 2, 8, 1, 12, 3)  # of the second loss in each microbatch of 20: they vary by more than 10 times
OPEN = r"was not trained to its end, .* call accumulator\.reset\(\)"


def microbatches():
    """[(x (20, 6), y (20,), counted (20,))]: the first loss is a mean over all rows, the second over those counted."""
    rng = np.random.default_rng(5)
    return [(Tensor(rng.normal(size=(20, 6)).astype(np.float32)), Tensor(rng.integers(0, 3, 20).astype(np.int32)),
             Tensor(rng.permutation(np.arange(20) < count).astype(np.float32))) for count in COUNTS]


def pair_of(network):
    def forward_fn(x, y, counted):
        logits = network(x)
        return LOSS(logits, y), (ops.square(logits).sum(-1) * counted).sum() / counted.sum()

    return forward_fn


def counts(x, y, counted):
    return x.shape[0], counted.sum()


def step_of(**options):
    network = MLP()
    return make_train_step(pair_of(network), sgd(network), 3, weight_fn=counts, losses=2, **options)


@pytest.mark.parametrize("left", [2, 3])
def test_statistics_of_a_window_that_is_trained_again_move_twice_and_a_warning_says_so(left, tmp_path):
    """Parameters are right. Control: a closed window."""
    runs = []
    for stops in (False, True):
        network = nn.SequentialCell(nn.BatchNorm1d(6), MLP())
        step = make_train_step(pair_of(network.set_train()), sgd(network), 3, weight_fn=counts, losses=2)
        epoch, again = step.epoch(microbatches()), []
        for _ in range(left * stops):
            next(epoch)
        if stops:
            save_checkpoint(tmp_path / "run.safetensors", network, step)
            step.accumulator.reset()
            network = nn.SequentialCell(nn.BatchNorm1d(6), MLP(seed=1))
            step = make_train_step(pair_of(network.set_train()), sgd(network), 3, weight_fn=counts, losses=2)
            load_checkpoint(tmp_path / "run.safetensors", network, step)
            epoch = step.epoch(microbatches(), resume=True)
        with recorded_warnings() as caught:
            list(epoch)
        again = [str(warning.message) for warning in caught if "move twice" in str(warning.message)]
        assert [text[:60] for text in again] == (stops and left == 2) * [
            "2 microbatches of the open window are trained again, so stat"]
        runs.append((values(step.accumulator.optimizer.parameters), network[0].moving_mean.asnumpy()))
    assert difference(runs[0][0], runs[1][0]) == 0
    assert (difference([runs[0][1]], [runs[1][1]]) == 0) == (left == 3)


@pytest.mark.usefixtures("uncompiled")
def test_a_window_that_was_not_weighed_or_not_trained_as_a_whole_is_refused():
    """A single call, a loop that is left, and microbatches of others. After a reset, all is as if it had not been."""
    step = step_of()
    with pytest.raises(RuntimeError, match=r"losses=2 needs all batches .* accumulate_step=3; train with train_step"):
        step(*microbatches()[0])
    assert int(step.accumulator.mini_step) == 0
    trained = []
    for leave in (lambda step: next(step.epoch(microbatches())),
                  lambda step: step.window.add(step.window.weights, 1.0, ends=1, begun=False)):
        step = step_of()
        leave(step)
        for refused in (step.flush, lambda step=step: next(step.epoch(microbatches())), step.flush):
            with pytest.raises(RuntimeError, match=OPEN):
                refused()
        step.accumulator.reset()
        list(step.epoch(microbatches()))
        trained.append(values(step.accumulator.optimizer.parameters))
    never_left = step_of()
    list(never_left.epoch(microbatches()))
    left, filled = [difference(one, values(never_left.accumulator.optimizer.parameters)) for one in trained]
    assert left == 0
    assert filled < 1e-6  # the other's microbatch has made 1 the unit of weights


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize("method", ["reset", "flush", "apply"])
def test_a_window_that_is_closed_inside_the_loop_ends_it(method):
    step = step_of()
    epoch = step.epoch(microbatches())
    for _ in range(4):
        next(epoch)
    getattr(step.accumulator, method)()
    with pytest.raises(RuntimeError, match=r"closed or dropped inside the loop, .*leave the loop and call"):
        list(epoch)


@pytest.mark.parametrize("mode", [pytest.param("jit", marks=pytest.mark.slow), "pynative"])
def test_a_skipped_microbatch_leaves_the_update_of_the_others(mode):
    """If the losses weigh the same. With none left, nothing is updated. Control: with "apply", the update is NaN."""
    def trained(kept, **options):
        network, data = MLP(), batches([6, 4, 6])
        data[1][0][:] = np.nan
        step = make_train_step(both_means_of(network), sgd(network), len(kept), losses=2, **options)
        losses = list(step.epoch([tensors(*data[i]) for i in kept]))
        assert len(losses) == len(kept)
        return values(network.trainable_params()), step.status()

    with running(mode):
        expected, before = trained((0, 2))
        found, status = trained((0, 1, 2), on_nonfinite="skip_microbatch")
        assert difference(found, expected) < 1e-6
        assert (status.update_step, status.mini_step, status.skipped, status.seen) == (1, 0, 1, 12)
        unmoved, status = trained((1,), on_nonfinite="skip_microbatch")
        assert (status.update_step, status.skipped, status.closed_windows) == (0, 1, 0)
        assert difference(unmoved, values(MLP().trainable_params())) == 0
        assert np.isnan(trained((0, 1, 2))[0][0]).any()
    assert before.update_step == 1


@pytest.mark.usefixtures("compiled_if_slow")
@pytest.mark.parametrize("saved", range(3, 7))
def test_a_log_does_not_count_a_window_twice_that_is_trained_again(saved, tmp_path):
    """An open window of a file is dropped, and what the log had seen of it. Control: the latter is kept."""
    data, path = [tensors(*batch) for batch in batches([6, 2, 4, 5, 3, 6, 1])], tmp_path / "run.safetensors"

    def rows_of(stops=False, loads=False, keeps=False):
        network, rows = MLP(), []
        step, log = make_train_step(both_means_of(network), sgd(network), 3, losses=2), WindowLog(rows.append)
        if loads:
            load_checkpoint(path, network, step)
        held = step.boundary.recalled
        for loss in step.epoch(data, resume=loads or None):
            if keeps:
                step.boundary.recalled = held
            log(step, loss)
            if stops and step.trained == saved:
                save_checkpoint(path, network, step)
                break
        step.accumulator.reset()
        return np.array([[row["update_step"], row["weight"], row["loss"]] for row in rows])

    whole = rows_of()[saved // 3:]
    rows_of(stops=True)
    assert rows_of(loads=True) == pytest.approx(whole, rel=1e-6)
    if saved == 4:  # if the file held more, the log notices
        assert rows_of(loads=True, keeps=True) != pytest.approx(whole, rel=1e-2)


@pytest.mark.usefixtures("compiled_if_slow")
def test_an_accumulator_may_go_on_with_several_losses():
    """After a step with one loss, in another unit of weights. Control: a step of its own."""
    moved = []
    for one_before in (True, False):
        network = MLP()
        accumulator = Accumulator(sgd(network), 1, reduction="mean")
        if one_before:
            make_train_step(mean_loss(network), accumulator)(*microbatches()[0][:2])
            assign_from(network, MLP())
        make_train_step(pair_of(network), accumulator, losses=2, weight_fn=counts)(*microbatches()[0])
        moved.append(values(network.trainable_params()))
    assert difference(*moved) < 1e-6


def assign_from(network, other):
    for parameter, value in zip(network.trainable_params(), other.trainable_params()):
        ops.assign(parameter, value.value())


def both_means_of(network):
    def forward_fn(x, y):
        logits = network(x)
        return ops.cross_entropy(logits, y), ops.square(logits).mean()

    return forward_fn


def test_the_check_names_the_loss_that_is_no_mean():
    """A router's loss is a product of two means over the batch; the control is a pair of means."""
    network = MLP().set_train()

    def forward_fn(x, y, counted):
        share = ops.softmax(network(x)).mean(0)
        return pair_of(network)(x, y, counted)[0], (share * share).sum()

    for function, expected in ((pair_of(network), [True, True]), (forward_fn, [True, False])):
        report = check_equivalence(function, network, microbatches()[1], 4, weight_fn=counts, losses=2)
        assert [one.ok for one in report.losses] == expected
    assert [cause.layer for cause in report.causes] == ["forward_fn, loss 2"]
    with pytest.raises(ValueError, match="loss 2: weight_fn gave the pieces the weights"):
        check_equivalence(pair_of(network), network, microbatches()[0], 4, weight_fn=counts, losses=2)


# --- what a bprop adds ------------------------------------------------------------------------------------------------


ADDED = 0.3
RAGGED = [tensors(*batch) for batch in batches((6, 2, 4, 1))]


class OnTheLoss(nn.Cell):
    """The loss, whose backward pass adds a multiple of the gradient that it gets."""

    def construct(self, loss, other):
        return loss + 0

    def bprop(self, loss, other, out, dout):
        return dout, dout * ADDED


class Hidden(MLP):
    """What is added to the gradient of the hidden layer, by a bprop or by a loss."""

    def __init__(self, added):
        super().__init__()
        self.adds, self.on_the_loss = Adds(added), OnTheLoss()

    def construct(self, x, y):
        hidden = self.adds(ops.tanh(self.first(x)))
        logits = self.second(hidden)
        return LOSS(logits, y), ops.square(logits).mean(), hidden.sum(-1).mean()


def moved(way, data):
    """How an update moves the parameters."""
    network = Hidden(ADDED if way.startswith("bprop") else 0.0)

    def forward_fn(x, y):
        one, two, added = network(x, y)
        if way == "bprop, their sum":
            return one + two
        if way == "one more loss":
            return one, two, added * ADDED
        return (network.on_the_loss(one, added) if way == "on the loss" else one), two

    losses = {"bprop, their sum": 1, "one more loss": 3}.get(way, 2)

    def weight_fn(x, y):
        return x.shape[0] if losses == 1 else (x.shape[0],) * losses

    before = values(network.trainable_params())
    step = make_train_step(forward_fn, sgd(network, 1.0), len(data), losses=losses, weight_fn=weight_fn)
    assert len(list(step.epoch(data))) == len(data)
    return [new - old for new, old in zip(values(network.trainable_params()), before)]


@pytest.mark.parametrize("mode", [pytest.param("jit", marks=pytest.mark.slow), "pynative"])
def test_what_a_bprop_adds_has_to_be_a_loss(mode):
    """Against the undivided batch in plain training. Control: a bprop, of which the weights know nothing."""
    with running(mode):
        expected = moved("bprop, their sum", [tuple(ops.cat(column) for column in zip(*RAGGED))])
        for way in ("one more loss", "on the loss", "bprop, their sum"):
            assert relative(moved(way, RAGGED), expected) < 1e-6, way
        assert relative(moved("bprop", RAGGED), expected) > 0.05


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize("samples", [10, 8])
def test_the_check_finds_what_a_bprop_adds_where_pieces_differ(samples):
    """10 samples are 3, 3, 3 and 1. Control: a loss instead of a bprop, and equal pieces."""
    data, = [tensors(*batch) for batch in batches((samples,))]
    for added, options in ((ADDED, {}), (0.0, {}), (ADDED, {"losses": 1})):
        network = Hidden(added).set_train()

        def forward_fn(x, y, network=network, options=options):
            one, two, _ = network(x, y)
            return one + two if options else (one, two)

        report = check_equivalence(forward_fn, network, data, 4, **(options or {"losses": 2}))
        wrong = samples == 10 and added > 0 and not options
        assert report.ok is not wrong
        assert {cause.layer for cause in report.causes} == ({"adds"} if wrong else set())
        assert ("because a bprop adds it; the weights of several losses" in str(report)) is wrong
        assert ("return the loss of that part as one more loss" in str(report)) is wrong


def weighing(first):
    def weight_fn(x, y):
        return (y >= 0).sum() * first, (y >= 0).sum()

    return weight_fn


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize(("first", "seen"), [(1, 12), (0, 6), (3, 24)])
def test_what_the_losses_weigh_on_average_is_what_was_seen(first, seen):
    """The number of samples, if all losses weigh that. An update of another driver counts its own weight again."""
    network, (x, y) = MLP(), tensors(*batches([6])[0])
    loss = mean_loss(network)

    def pair(x, y):
        return loss(x, y), loss(x, y)

    accumulator = Accumulator(nn.SGD(network.trainable_params(), 0.1), 1, reduction="mean")
    step = make_train_step(pair, accumulator, losses=2, pieces=2, weight_fn=weighing(first))
    for _ in range(2):
        step(x, y)
    assert (int(accumulator.update_step), int(accumulator.seen)) == (2, seen)
    make_train_step(loss, accumulator)(x, y)
    assert int(accumulator.seen) == seen + 6


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize("filled", [
    lambda tensor, value: ops.assign(tensor, value),
    lambda tensor, value: np.copyto(tensor.asnumpy(), value.asnumpy()),  # on CPU, a view
], ids=["assign", "numpy"])
def test_a_generator_may_fill_the_same_tensors_again(filled):
    """Without weights and with them. Control: windows of the last batch."""
    def again():
        held = [Parameter(value.copy()) for value in microbatches()[0]]
        for batch in microbatches():
            for tensor, value in zip(held, batch):
                filled(tensor, value)
            yield tuple(held)

    def run(data, weight_fn):
        network = MLP()
        step = make_train_step(means_of(network), sgd(network), 7, weight_fn=weight_fn, losses=2)
        list(step.epoch(data))
        return values(network.trainable_params())

    for weight_fn in (None, counts):
        expected = run(microbatches(), weight_fn)
        assert difference(run(again(), weight_fn), expected) == 0
        assert difference(run(microbatches()[-1:] * 7, weight_fn), expected) > 1e-4


def means_of(network):
    """Two means over all samples: never NaN, also without weights."""
    def forward_fn(x, y, counted):
        logits = network(x)
        return LOSS(logits, y), (ops.square(logits).sum(-1) * counted).mean()

    return forward_fn
