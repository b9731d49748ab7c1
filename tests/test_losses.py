"""Several losses, each divided by its own count in the window: exact in epochs, by single calls, and refused otherwise."""
import mindspore as ms
import numpy as np
import pytest
from conftest import MLP, difference, values
from following import run_as
from mindspore import Tensor, nn, ops

from ms_accum import check_equivalence, make_train_step, until_weight

pytestmark = pytest.mark.core

COUNTS = (0, 20, 2, 8, 1, 12, 3)  # of the second loss in each microbatch of 20: they vary by more than 10 times
N = 3


def microbatches():
    """[(x (20, 6), y (20,), counted (20,))]: the first loss is a mean over all rows, the second over those counted."""
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


def undivided(windows):
    """Parameters after plain updates with the windows as single batches, whose sums of both losses are differentiated."""
    network = MLP()
    forward_fn, optimizer = pair_of(network), nn.SGD(network.trainable_params(), 0.5)

    def total(*batch):
        one, other = forward_fn(*batch)
        return one + other

    grad_fn = ms.grad(total, None, optimizer.parameters)
    for window in windows:
        optimizer(grad_fn(*map(Tensor, map(np.concatenate, zip(*window)))))
    return values(network.trainable_params())


def windows_of(batches, n=N):
    return [batches[start:start + n] for start in range(0, len(batches), n)]


def step_of(accumulate_step=N, weight_fn=counts, forward_of=pair_of, **options):
    network = MLP()
    optimizer = nn.SGD(network.trainable_params(), 0.5)
    return network, make_train_step(forward_of(network), optimizer, accumulate_step, weight_fn=weight_fn, losses=2, **options)


@pytest.mark.parametrize(("mode", "pieces"), [("jit", 4), ("pynative", 1), ("pynative", 3)])
def test_two_losses_are_those_of_the_undivided_batch(mode, pieces, capfd):
    """Also where the second one is a mean over nothing (0/0), in a piece, a microbatch, or the loss that is returned."""
    network, step = step_of(pieces=pieces)
    with run_as(mode):
        returned = list(step.epoch(microbatches()))
    assert difference(values(network.trainable_params()), undivided(windows_of(microbatches()))) <= 1e-6
    assert len(step.accumulator.buffers.parameters) == 4  # one set
    assert (int(step.accumulator.update_step), step.updated) == (3, True)
    assert "eliminated by mistake" not in capfd.readouterr().err
    one, other = pair_of(MLP())(*map(Tensor, microbatches()[1]))  # of the first window, like the start
    assert [float(loss) for loss in returned[1]] == pytest.approx([float(one), float(other)], rel=1e-5)
    assert float(returned[0][1]) == 0 or pieces == 1


@pytest.mark.usefixtures("uncompiled")
def test_the_naive_denominator_is_wrong():
    """Negative control: the second loss counted by rows, as a mean of means does."""
    batches = [batch for batch in microbatches() if batch[2].any()]  # without these it would be NaN
    results = []
    for weight_fn in (counts, rows):
        network, step = step_of(weight_fn=weight_fn)
        list(step.epoch(batches))
        results.append(values(network.trainable_params()))
    exact = undivided(windows_of(batches))
    assert difference(results[0], exact) <= 1e-6
    assert difference(results[1], exact) > 1e-2


def test_a_single_call_is_a_window_of_its_own():
    """In pieces, with aux: the rows of the batch, and a scalar as the mean by the first loss's weights."""
    def with_aux(network):
        forward_fn = pair_of(network)

        def both(x, y, counted):
            return forward_fn(x, y, counted), (x, y.astype(ms.float32).mean())

        return both

    network, step = step_of(1, forward_of=with_aux, pieces=4, has_aux=True)
    for batch in microbatches()[1:3]:
        _, (x, y_mean) = step(*map(Tensor, batch))
        assert step.updated
        assert (x.asnumpy() == batch[0]).all()
        assert float(y_mean) == pytest.approx(batch[1].mean(), rel=1e-6)
    assert difference(values(network.trainable_params()), undivided(windows_of(microbatches()[1:3], 1))) <= 1e-6
    assert step.flush() is False


@pytest.mark.usefixtures("uncompiled")
def test_windows_by_the_weight_of_the_first_loss():
    network, step = step_of(until_weight(50))
    closed = [step.updated for _ in step.epoch(microbatches())]
    assert closed == [False, False, True, False, False, True, True]  # the end of the data is known, too
    assert difference(values(network.trainable_params()), undivided(windows_of(microbatches()))) <= 1e-6


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("uncompiled")
def test_a_single_call_in_a_longer_window_is_refused():
    _, step = step_of()
    with pytest.raises(RuntimeError, match=r"losses=2 has to know .* accumulate_step=3; train with train_step\.epoch"):
        step(*map(Tensor, microbatches()[0]))
    assert int(step.accumulator.mini_step) == 0


@pytest.mark.usefixtures("uncompiled")
def test_a_loop_that_is_left_needs_a_reset():
    """The weights of its window are those of microbatches that were never trained."""
    network, step = step_of()
    for _ in step.epoch(microbatches()):
        break
    for refused in (step.flush, lambda: next(step.epoch(microbatches())), step.flush):
        with pytest.raises(RuntimeError, match=r"was weighed as a whole, .* call accumulator\.reset\(\)"):
            refused()
    step.accumulator.reset()
    list(step.epoch(microbatches()))
    assert difference(values(network.trainable_params()), undivided(windows_of(microbatches()))) <= 1e-6


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize("method", ["reset", "flush", "apply"])
def test_a_window_that_is_closed_inside_the_loop_ends_it(method):
    _, step = step_of()
    epoch = step.epoch(microbatches())
    for _ in range(4):
        next(epoch)
    with pytest.raises(RuntimeError, match="was weighed as a whole"):
        step.flush()
    getattr(step.accumulator, method)()
    with pytest.raises(RuntimeError, match=r"closed or dropped in the middle of an epoch .*leave the loop first"):
        list(epoch)


def test_what_does_not_compose_is_refused():
    with pytest.raises(ValueError, match=r'losses=2 with on_nonfinite="skip_microbatch", .*; give "skip_window"'):
        step_of(on_nonfinite="skip_microbatch")


@pytest.mark.usefixtures("uncompiled")
def test_a_window_that_others_have_opened_is_refused():
    network, step = step_of()
    step.accumulator.add(tuple([Tensor(p.asnumpy()) for p in network.trainable_params()]))
    with pytest.raises(RuntimeError, match="was weighed as a whole"):
        next(step.epoch(microbatches()))
    assert step.accumulator.flush()
    assert len(list(step.epoch(microbatches()[:2]))) == 2


def test_the_check_names_the_loss_that_is_no_mean():
    """A router's loss is a product of two means over the batch; the control is a pair of means."""
    network, batch = MLP().set_train(), tuple(map(Tensor, microbatches()[1]))

    def forward_fn(x, y, counted):
        share = ops.softmax(network(x)).mean(0)
        return pair_of(network)(x, y, counted)[0], (share * share).sum()

    for function, expected in ((pair_of(network), [True, True]), (forward_fn, [True, False])):
        report = check_equivalence(function, network, batch, 4, weight_fn=counts, losses=2)
        assert [one.ok for one in report.losses] == expected
    assert [cause.layer for cause in report.causes] == ["forward_fn, loss 2"]
    with pytest.raises(ValueError, match="loss 2: weight_fn gave the pieces the weights"):
        check_equivalence(pair_of(network), network, tuple(map(Tensor, microbatches()[0])), 4, weight_fn=counts, losses=2)
