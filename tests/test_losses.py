"""Several losses: what is compiled and what is refused. That they are exact is drawn in test_differential.py."""
import numpy as np
import pytest
from conftest import MLP, compiled_graphs, difference, values
from following import warned
from mindspore import Tensor, nn, ops

from ms_accum import check_equivalence, make_train_step

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


def step_of(**options):
    network = MLP()
    optimizer = nn.SGD(network.trainable_params(), 0.5)
    return network, make_train_step(pair_of(network), optimizer, N, weight_fn=counts, losses=2, **options)


def test_they_compile_once_and_warn_of_nothing(capfd):
    """Weigh, announce, a piece with and without tokens for the second loss, end, apply."""
    _, step = step_of()
    counted = [compiled_graphs()]
    for _ in range(3):
        assert len(list(step.epoch(microbatches()))) == len(COUNTS)
        counted.append(compiled_graphs())
    assert 0 < counted[1] - counted[0] <= 6
    assert counted[1] == counted[2] == counted[3]
    assert warned(capfd) == []


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
    never_left, step = step_of()
    list(step.epoch(microbatches()))
    assert difference(values(network.trainable_params()), values(never_left.trainable_params())) == 0


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
