"""What a weight does beside the mean: no weight at all, fractions that are counted, and sums that stages look at."""
import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, amp, nn, ops
from support.modes import compiled, recorded_warnings, running
from support.training import LOSS, counting, sgd

from ms_accum import Accumulator, Stage, TrainOneStepCell, make_train_step
from ms_accum.selftest.comparing import difference, values
from ms_accum.selftest.networks import MLP, batches, tensors

MEAN, SUM = "mean", "sum"
X = Tensor(np.random.default_rng(0).normal(size=(6, 6)), ms.float32)
Y = np.array([0, 2, 1, 0, 1, 1], np.int32)
NO_TOKEN = Tensor(np.full(6, -100, np.int32))
TOKENS = Tensor(np.where(np.arange(6) < 2, -100, Y))


class TokenLoss(nn.Cell):
    """The mean over labels that are not -100, which is 0/0 without any; or the sum."""

    def __init__(self, reduction):
        super().__init__()
        self.network, self.reduction = MLP(), reduction

    def construct(self, x, y):
        return ops.cross_entropy(self.network(x), y, ignore_index=-100, reduction=self.reduction)


def tokens(x, y):
    return (y != -100).sum()


def nothing(x, y):
    return 0.0


@pytest.mark.parametrize(("make", "mode", "options", "reduction"), [
    pytest.param(make_train_step, "jit", {}, MEAN, marks=pytest.mark.slow),
    pytest.param(TrainOneStepCell, "graph", {}, SUM, marks=pytest.mark.slow),
    (make_train_step, "jit", {"pieces": 2}, SUM),
    *((make, "pynative", options, reduction) for reduction in (MEAN, SUM)
    for make, options in ((make_train_step, {}), (TrainOneStepCell, {})))])
def test_a_microbatch_without_weight_has_the_loss_0_and_changes_nothing(make, mode, options, reduction):
    """As in MaxText. Control: the loss of the same network with labels, and what MindSpore gives without any."""
    loss = TokenLoss(reduction)
    with running(mode):
        train_step = make(loss, sgd(loss), 1, weight_fn=tokens, loss_reduction=reduction, **options)
        before = values(loss.trainable_params())
        assert float(train_step(X, NO_TOKEN)) == 0
        assert difference(values(loss.trainable_params()), before) == 0
        got = train_step(X, TOKENS)
        expected = float(TokenLoss.construct(loss, X, TOKENS))
    assert np.isnan(float(ops.cross_entropy(loss.network(X), NO_TOKEN, ignore_index=-100)))
    assert np.isfinite(expected)
    assert difference(values(loss.trainable_params()), before) > 0
    assert float(got) > 0.1
    assert int(train_step.accumulator.seen) == 4


@pytest.mark.parametrize(("make", "mode"), [
    (make_train_step, "pynative"), (TrainOneStepCell, "pynative"),
    *(pytest.param(*one, marks=pytest.mark.slow) for one in ((make_train_step, "jit"), (TrainOneStepCell, "graph")))])
def test_class_weights_are_the_denominator(make, mode):
    """The guide's `w[label].sum()`, with microbatches of equal sizes. Control: numbers of samples are far off, and a
    warning says so."""
    weights = Tensor([10.0, 1.0, 0.1], ms.float32)

    class ClassLoss(nn.Cell):
        def __init__(self):
            super().__init__()
            self.network, self.loss_fn = MLP(), nn.CrossEntropyLoss(weight=weights)

        def construct(self, x, y):
            return self.loss_fn(self.network(x), y)

    def by_class(x, y):
        return weights[y].sum()

    def moved(samples, **options):
        loss = ClassLoss()
        step = make(loss, sgd(loss), 6 // samples, **options)
        for start in range(0, 6, samples):
            step(X[start:start + samples], Tensor(Y[start:start + samples]))
        return values(loss.trainable_params())

    with running(mode):
        with recorded_warnings() as caught:
            whole = moved(6, weight_fn=by_class)
            assert difference(moved(2, weight_fn=by_class), whole) <= 1e-6
        assert not [str(each.message) for each in caught if "class weights" in str(each.message)]
        with pytest.warns(UserWarning, match="^CrossEntropyLoss has class weights, so its mean is over their sum"):
            assert difference(moved(2), whole) > 1e-3


@pytest.mark.parametrize("mode", ["jit", "pynative"], indirect=True)
def test_aux_of_a_batch_that_is_not_cut_is_returned_as_it_is(mode):
    """Also where it weighs nothing: there is nothing to average."""
    loss = TokenLoss(SUM)

    def forward_fn(x, y):
        return loss(x, y), x.max()

    with running(mode):
        train_step = make_train_step(forward_fn, sgd(loss), 1, weight_fn=tokens, loss_reduction=SUM, has_aux=True)
        for labels in (TOKENS, NO_TOKEN):
            assert float(train_step(X, labels)[1]) == float(X.max())


@pytest.mark.parametrize("eager", [False, True])
def test_a_copy_of_a_parameter_in_aux_has_the_value_of_the_forward_pass(eager):
    """Control: the Parameter itself, which the update has changed."""
    for is_copied in (True, False):
        network, scale = MLP(), Parameter(Tensor(1.0), name="scale")

        def forward_fn(x, y):
            return LOSS(network(x) * scale, y), scale.copy() if is_copied else scale  # noqa: B023

        step = make_train_step(forward_fn, nn.SGD([scale], 0.5), 1, has_aux=True, eager=eager)
        for batch in batches([6, 6]):
            before = float(scale)
            _, found = step(*tensors(*batch))
            assert float(scale) != before
            assert (float(found) == before) is is_copied


@pytest.mark.parametrize("make", [make_train_step, TrainOneStepCell])
def test_a_number_may_be_0_as_well(make):
    loss = TokenLoss(MEAN)
    with running("pynative"):
        train_step = make(loss, sgd(loss), 2, weight_fn=nothing)
        assert [float(train_step(X, labels)) for labels in (NO_TOKEN, TOKENS)] == [0.0, 0.0]
    assert int(train_step.accumulator.seen) == 0


@pytest.mark.parametrize(("make", "mode", "options"), [
    (make_train_step, "pynative", {"pieces": 2}), (TrainOneStepCell, "pynative", {}),
    *(pytest.param(*one, {}, marks=pytest.mark.slow) for one in (
        (make_train_step, "jit"), (TrainOneStepCell, "graph")))])
def test_a_sum_whose_weight_is_0_or_not_finite_is_treated_like_a_mean(make, mode, options):
    """What is not finite drops the window. But a weight of 0 does not hide a sum that is not 0: the loss shows it."""
    def weight_fn(x, counted):
        return counted[:1].sum()

    got = {}
    for reduction in (MEAN, SUM):
        network = nn.Dense(1, 1, "ones", "zeros", has_bias=False)

        class Total(nn.Cell):
            def __init__(self, network, reduction):
                super().__init__()
                self.network, self.reduction = network, reduction

            def construct(self, x, counted):
                total = self.network(x).sum()
                return total if self.reduction == "sum" else total / counted[:1].sum()

        with running(mode):
            train_step = make(Total(network, reduction), sgd(network), 2, weight_fn=weight_fn, loss_reduction=reduction,
                              on_nonfinite="skip_window", **options)
            for second in (3.0, np.nan, np.inf, -1.0):
                losses = [float(train_step(Tensor(np.full((2, 1), x, np.float32)), Tensor(np.full(2, w, np.float32))))
                          for x, w in ((1.0, 2.0), (5.0, second))]
                accumulator = train_step.accumulator
                got.setdefault(second, []).append([
                    float(network.weight.asnumpy().item()), int(accumulator.seen), int(accumulator.skipped),
                    int(accumulator.update_step), np.isfinite(losses).tolist()])
            shown = float(train_step(Tensor(np.full((2, 1), 5.0, np.float32)), Tensor(np.zeros(2, np.float32))))
        assert (shown != 0) == (reduction == SUM)
    for means, sums in got.values():
        assert sums[1:] == means[1:]
        assert sums[0] == pytest.approx(means[0], rel=1e-6)
    assert [sums[2] for _, sums in got.values()] == [0, 1, 2, 3]


def test_a_negative_weight_by_hand_makes_nan_of_what_it_weighs_and_a_number_is_refused(mode):
    """A graph cannot refuse a value."""
    accumulator = Accumulator(counting(MLP()), 2, reduction="mean")
    gradients = tuple(Tensor(np.ones(p.shape), ms.float32) for p in accumulator.optimizer.parameters)

    def add(weight):
        return accumulator(gradients, weight)

    step = compiled(add, mode)
    step(Tensor(1.0))
    step(Tensor(-0.25))
    assert np.isnan(values(accumulator.optimizer.seen)[0]).all()
    with pytest.raises(ValueError, match="expected a finite number >= 0"):
        accumulator(gradients, -0.25)
    step(Tensor(1.0))
    step(Tensor(0.25))
    assert values(accumulator.optimizer.seen)[0] == pytest.approx(1.0)  # the control


@pytest.mark.parametrize("drawn", [
    lambda rng: rng.uniform(0, 1), lambda rng: 0.6, lambda rng: 6e-6, lambda rng: rng.uniform(0, 2**20),
    lambda rng: 7.0, lambda rng: rng.choice([0.5, 1.5, 2**20 + 0.5])])
def test_fractions_are_counted(drawn, mode):
    """Far from 0, where a float32 sum stands still, and NaN counts nothing. Control: the sum of rounded weights."""
    accumulator, rng, start = Accumulator(sgd(MLP()), 2, reduction="sum"), np.random.default_rng(1), 2**40
    window = accumulator.window
    weights = np.array([drawn(rng) for _ in range(400 if mode == "jit" else 100)], np.float32)
    ops.assign(window.seen, start)

    def see(counted):
        window.count_seen(counted)
        return window.seen + 0

    step = compiled(see, mode)
    for weight in (np.float32(np.nan), *weights):
        step(Tensor(weight))
    exact = weights.astype(np.float64).sum()
    assert abs(int(window.seen) - start - exact) <= 0.5 + 1e-6
    assert int(window.seen) - start + float(window.seen_rest) == pytest.approx(
        exact, abs=len(weights) / 2**25)
    rounded = np.round(weights).astype(np.float64).sum()
    assert (abs(rounded - exact) > 0.5) == bool((weights % 1).any() and exact > 1)


@ms.jit_class
class LastNorm(Stage):
    """Keep the norm of the last gradient that was weighed."""

    def __init__(self):
        self.norm = Parameter(Tensor(0.0, ms.float32), name="last_norm", requires_grad=False)
        self.run_state = (self.norm,)

    def weigh(self, gradients, weight):
        squares = Tensor(0.0, ms.float32)
        for gradient in gradients:
            squares = squares + ops.square(gradient).sum()
        ops.assign(self.norm, ops.sqrt(squares))
        return weight, 1


@pytest.mark.parametrize(("make", "mode"), [
    (make_train_step, "pynative"), (TrainOneStepCell, "pynative"),
    pytest.param(make_train_step, "jit", marks=pytest.mark.slow)])
def test_a_stage_sees_the_gradient_of_the_mean_loss_also_of_a_sum(make, mode):
    """And the update is the same. Control: a sum that is not said to be one."""
    seen = {}
    start = values(TokenLoss(MEAN).trainable_params())
    for reduction, said in ((MEAN, MEAN), (SUM, SUM), (SUM, MEAN)):
        loss, stage = TokenLoss(reduction), LastNorm()
        for p, value in zip(loss.trainable_params(), start):
            p.set_data(Tensor(value))
        with running(mode):
            make(loss, sgd(loss), 1, weight_fn=tokens, loss_reduction=said, stages=(stage,))(X, TOKENS)
        seen[reduction, said] = float(stage.norm), values(loss.trainable_params())
    norm, parameters = seen[MEAN, MEAN]
    assert seen[SUM, SUM][0] == pytest.approx(norm, rel=1e-5)
    assert difference(seen[SUM, SUM][1], parameters) < 1e-5
    assert seen[SUM, MEAN][0] == pytest.approx(4 * norm, rel=1e-5)
    assert difference(seen[SUM, MEAN][1], parameters) > 1e-3


class Adds(nn.Cell):
    """A layer whose backward pass adds to the gradient, as the balancing loss of a mixture of experts does."""

    def construct(self, x, scale):
        return x + 0

    def bprop(self, x, scale, out, dout):
        return dout + 0.5 * scale / x.shape[0], ops.zeros_like(scale)


@pytest.mark.parametrize("mode", [pytest.param("jit", marks=pytest.mark.slow), "pynative"], indirect=True)
def test_what_a_backward_pass_adds_has_to_be_scaled(mode):
    """The scale goes in as an argument: a backward pass of its own may read no Parameter. Control: it vanishes."""
    def trained(scaler, scales):
        dense, adds = nn.Dense(6, 3, "ones", "zeros"), Adds()

        def forward_fn(x, y):
            one = Tensor(1.0, ms.float32)
            return ops.cross_entropy(adds(dense(x), one * scaler.scale_value if scales and scaler else one), y)

        with running(mode):
            train_step = make_train_step(forward_fn, nn.SGD(dense.trainable_params(), 0.5), 2, loss_scaler=scaler)
            for _ in range(2):
                train_step(X, Tensor(Y))
        assert train_step.status().update_step == 1
        return values(dense.trainable_params())

    expected = trained(None, False)
    assert difference(trained(None, True), expected) == 0
    assert difference(trained(amp.StaticLossScaler(2.0**10), True), expected) < 1e-5
    assert difference(trained(amp.StaticLossScaler(2.0**10), False), expected) > 0.1
