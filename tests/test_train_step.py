"""make_train_step: every strategy against the oracle, token-weighted exactness, memory, compilations, refusals."""
import sys
from itertools import product

import mindspore as ms
import numpy as np
import pytest
import reference
from conftest import MLP, Counting, batches, compiled_graphs, difference, in_modes, mean_loss, run_python, tensors, values
from mindspore import Parameter, Tensor, amp, nn, ops

from ms_accum import Accumulator, make_train_step

LOSS = nn.CrossEntropyLoss()
SIZES = [6, 6, 7, 6, 7, 6, 2]


@pytest.fixture(params=["jit", "pynative"])
def any_mode(mode_named, monkeypatch, request):
    """As `mode`; a train step compiles itself, so MindSpore's own switch makes it run op by op."""
    if request.param == "pynative":
        monkeypatch.setenv("MS_JIT", "0")
    return mode_named(request.param)


def follow(sizes=SIZES, accumulate_step=2, clip_norm=0.7, **options):
    """Train with the step and the oracle; compare losses and counters at every call, return the parameters' difference."""
    network = MLP()
    acc = Accumulator(nn.Momentum(network.trainable_params(), 0.1, 0.9), accumulate_step, clip_norm, reduction="mean")
    train_step = make_train_step(mean_loss(network), acc, **options)
    oracle = reference.Accumulation(values(network.trainable_params()), reference.SGD(0.1, 0.9), accumulate_step, "mean", clip_norm)
    for x, y in batches(sizes):
        loss = train_step(*tensors(x, y))
        expected, gradients = reference.loss_and_gradients(oracle.parameters, x, y)
        oracle(gradients, len(x))
        assert float(loss) == pytest.approx(expected, rel=1e-5)
        assert (int(acc.mini_step), int(acc.update_step)) == (oracle.mini_step, oracle.update_step)
    assert bool(train_step.flush()) == oracle.flush()
    assert not bool(train_step.flush())
    assert (int(acc.mini_step), int(acc.update_step)) == (0, oracle.update_step)
    assert float(acc.grad_norm) == pytest.approx(oracle.grad_norm, rel=1e-5)
    return difference(values(network.trainable_params()), oracle.parameters)


@pytest.mark.parametrize(("any_mode", "strategy", "micro_size"), in_modes(
    [*product(("fused", "split"), (1, 3))], [("fused", 3), ("split", 1)]), indirect=["any_mode"])
def test_every_strategy_follows_the_oracle(any_mode, strategy, micro_size):
    assert follow(strategy=strategy, micro_size=micro_size) <= 1e-6


@pytest.mark.parametrize("options", [pytest.param({}, marks=pytest.mark.slow), {"strategy": "split", "micro_size": 3}])
def test_strategies_follow_the_oracle_in_graph_context(mode_named, options):
    mode_named("graph")
    assert follow(**options) <= 1e-6


@pytest.mark.parametrize(("any_mode", "micro_size"), in_modes([(2,), (4,), (7,), (9,)], [(4,)]), indirect=["any_mode"])
def test_any_cut_gives_the_same(any_mode, micro_size):
    """Ragged pieces, as many pieces as samples, more pieces than samples."""
    assert follow(sizes=[7, 7, 7], micro_size=micro_size) <= 1e-6


@pytest.mark.parametrize(("any_mode", "accumulate_step"), in_modes([({0: 1, 2: 3},), (1,)], [({0: 1, 2: 3},)]), indirect=["any_mode"])
def test_schedules(any_mode, accumulate_step):
    assert follow(accumulate_step=accumulate_step, micro_size=3) <= 1e-6


def test_wrong_weights_are_seen(monkeypatch):
    """Negative control, op by op: pieces of 7 = 3 + 3 + 1 that all count the same are not the undivided batch."""
    def equal(x, y):
        return 1.0
    monkeypatch.setenv("MS_JIT", "0")
    with pytest.raises(AssertionError):
        follow(sizes=[7, 7], micro_size=3, weight_fn=equal)


def gradient_of(forward_fn, network, batch, **options):
    """The gradient that one call hands to the optimizer, and the call's loss."""
    acc = Accumulator(Counting(ms.ParameterTuple(network.trainable_params())), 1, reduction="mean")
    loss = make_train_step(forward_fn, acc, **options)(*batch)
    assert int(acc.optimizer.calls) == 1
    return values(acc.optimizer.seen), loss


# --- what is cut ---------------------------------------------------------------------------------------------------------


def test_tensors_with_one_row_per_sample_are_cut_and_all_else_passes_through(any_mode):
    network, (x, y) = MLP(), batches([6])[0]
    class_weights = Tensor([1.0, 2.0, 0.5], ms.float32)  # 3 rows: no batch
    temperature = Tensor(2.0)                            # no axes

    def forward_fn(x, y, class_weights, temperature, scale, use_scale):
        logits = network(x) / temperature
        if use_scale:
            logits = logits * scale
        return (ops.log_softmax(logits, 1) * ops.one_hot(y, 3) * class_weights).sum() / -len(x)

    batch = (*tensors(x, y), class_weights, temperature, 1.5, True)
    whole, loss = gradient_of(forward_fn, network, batch)
    cut, cut_loss = gradient_of(forward_fn, network, batch, micro_size=3)
    assert difference(cut, whole) <= 1e-6
    assert float(cut_loss) == pytest.approx(float(loss), rel=1e-6)


def test_pieces_really_are_pieces():
    """A loss that is not a mean over samples shows the cut: here, the number of rows the forward function sees."""
    network, (x, y) = MLP(), batches([8])[0]

    def forward_fn(x, y):
        return LOSS(network(x), y) * 0 + len(x)

    assert float(gradient_of(forward_fn, network, tensors(x, y), micro_size=4)[1]) == 2.0
    assert float(gradient_of(forward_fn, network, tensors(x, y))[1]) == 8.0


def test_has_aux(any_mode):
    network, (x, y) = MLP(), batches([6])[0]

    def forward_fn(x, y):
        logits = network(x)
        return LOSS(logits, y), logits

    for strategy in ("fused", "split"):
        _, (loss, logits) = gradient_of_aux(forward_fn, network, tensors(x, y), strategy=strategy)
        expected_loss, _ = reference.loss_and_gradients(values(MLP().trainable_params()), x, y)
        _, expected_logits = reference.network(values(MLP().trainable_params()), x)
        assert float(loss) == pytest.approx(expected_loss, rel=1e-5)
        np.testing.assert_allclose(logits.asnumpy(), expected_logits, rtol=1e-5, atol=1e-6)


def gradient_of_aux(forward_fn, network, batch, **options):
    acc = Accumulator(Counting(ms.ParameterTuple(network.trainable_params())), 1, reduction="mean")
    result = make_train_step(forward_fn, acc, has_aux=True, **options)(*batch)
    assert int(acc.optimizer.calls) == 1
    return acc, result


@pytest.mark.parametrize(("any_mode", "micro_size"), in_modes([(2,), (3,), (7,)], [(3,)]), indirect=["any_mode"])
def test_aux_of_pieces_is_that_of_the_batch(any_mode, micro_size):
    """Rows in the order of the batch, scalars as weighted means; the shape of a piece's aux, tuple or not."""
    network, (x, y) = MLP(), batches([7])[0]
    weights = values(network.trainable_params())

    def forward_fn(x, y):
        logits = network(x)
        right = logits.argmax(1) == y
        return LOSS(logits, y), (logits, right.astype(ms.float32).mean(), y, right)

    def logits_only(x, y):
        logits = network(x)
        return LOSS(logits, y), logits

    _, logits = reference.network(weights, x)
    expected_loss, _ = reference.loss_and_gradients(weights, x, y)
    acc, (loss, (rows, accuracy, labels, right)) = gradient_of_aux(forward_fn, network, tensors(x, y), micro_size=micro_size)
    assert float(loss) == pytest.approx(expected_loss, rel=1e-5)
    np.testing.assert_allclose(rows.asnumpy(), logits, rtol=1e-5, atol=1e-6)
    assert float(accuracy) == pytest.approx((logits.argmax(1) == y).mean(), rel=1e-6)
    assert labels.asnumpy().tolist() == y.tolist()
    assert labels.dtype == ms.int32
    assert right.asnumpy().tolist() == (logits.argmax(1) == y).tolist()
    assert relative(values(acc.optimizer.seen), reference.loss_and_gradients(weights, x, y)[1]) <= 1e-5

    _, (_, rows) = gradient_of_aux(logits_only, network, tensors(x, y), micro_size=micro_size)
    np.testing.assert_allclose(rows.asnumpy(), logits, rtol=1e-5, atol=1e-6)


def test_aux_of_a_masked_piece_counts_nothing(any_mode):
    network, (x, y) = MLP(), batches([6])[0]
    y[2:] = IGNORE
    loss_fn = nn.CrossEntropyLoss(ignore_index=IGNORE)

    def forward_fn(x, y):
        loss = loss_fn(network(x), y)
        return loss, loss

    _, (loss, aux) = gradient_of_aux(forward_fn, network, tensors(x, y), micro_size=3, weight_fn=token_count)
    assert float(aux) == float(loss)
    assert np.isfinite(float(aux))


# --- loss scaling ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("any_mode", "options"), in_modes([({},), ({"strategy": "split"},), ({"micro_size": 3},)], [({"micro_size": 3},)]),
                         indirect=["any_mode"])
def test_a_static_scale_changes_nothing(any_mode, options):
    """Losses, clipping, norms and parameters are those of the oracle, which knows no scale."""
    assert follow(loss_scaler=amp.StaticLossScaler(1024), **options) <= 1e-6


class Overflowing(nn.Cell):
    """y = w x, where a float16 gradient of 2**15 x 2 overflows on the way back and 2**15 x 0.5 does not."""

    def __init__(self):
        super().__init__()
        self.w = ms.Parameter(Tensor([1.0], ms.float32), name="w")

    def construct(self, x):
        return (self.w.astype(ms.float16) * x.astype(ms.float16)).astype(ms.float32).mean()


@pytest.mark.parametrize(("any_mode", "strategy", "on_nonfinite"), in_modes(
    [*product(("fused", "split"), ("apply", "skip_window"))], [("fused", "skip_window"), ("split", "apply")]), indirect=["any_mode"])
def test_an_overflow_drops_the_window_and_halves_the_scale_once(any_mode, strategy, on_nonfinite):
    network = Overflowing()
    scaler = amp.DynamicLossScaler(2**15, 2, 2)
    acc = Accumulator(nn.Momentum(network.trainable_params(), 0.5, 0.9), 3, reduction="mean", on_nonfinite=on_nonfinite)
    train_step = make_train_step(network, acc, loss_scaler=scaler, strategy=strategy)
    seen = []
    for x in [0.25, 2.0, 0.25] + [0.5] * 3 + [0.25] * 7:
        loss = train_step(Tensor([x], ms.float32))
        assert float(loss) == pytest.approx(float(network.w.asnumpy()[0]) * x, rel=2e-3) or int(acc.mini_step) == 0
        seen.append((float(scaler.scale_value), int(scaler.counter), int(acc.update_step), int(acc.skipped)))
    start = (2**15, 0, 0, 0)       # the second microbatch overflows: its gradient is 2 * 2**15
    dropped = (2**14, 0, 0, 1)
    assert seen == [start] * 2 + [dropped] * 3 + [(2**14, 1, 1, 1)] * 3 + [(2**15, 0, 2, 1)] * 3 + [(2**15, 1, 3, 1)] * 2
    assert int(acc.mini_step) == 1
    velocity, w = 0.0, 1.0
    for gradient in (0.5, 0.25, 0.25):
        velocity = 0.9 * velocity + gradient
        w -= 0.5 * velocity
    assert float(network.w.asnumpy()[0]) == pytest.approx(w, rel=1e-6)


def test_without_a_scaler_the_overflow_reaches_the_parameters():
    """Control for the test above."""
    network = Overflowing()
    acc = Accumulator(nn.SGD(network.trainable_params(), 0.5), 1, reduction="mean")

    def forward_fn(x):
        return network(x) * 2**16

    make_train_step(forward_fn, acc)(Tensor([2.0], ms.float32))
    assert not np.isfinite(network.w.asnumpy()).all()


@pytest.mark.parametrize(("scale", "expected"), [(None, 0.0), (2**14, 1e-8)])
def test_a_scale_saves_what_float16_would_flush_to_zero(any_mode, scale, expected):
    """A gradient of 1e-8 is 0 in float16, and is there with a scale of 2**14."""
    network = Overflowing()
    acc = Accumulator(Counting(ms.ParameterTuple(network.trainable_params())), 2, reduction="mean")
    scaler = amp.StaticLossScaler(scale) if scale else None

    def forward_fn(x):
        return network(x) * 1e-8

    train_step = make_train_step(forward_fn, acc, loss_scaler=scaler)
    for _ in range(2):
        train_step(Tensor([1.0], ms.float32))
    assert float(acc.optimizer.seen[0].asnumpy()[0]) == pytest.approx(expected, rel=2e-3)


class AnyScaler(amp.StaticLossScaler):
    """With a scale that MindSpore's own refuse to be built with."""

    def __init__(self, scale):
        super().__init__(1.0)
        self.scale_value = Parameter(Tensor(scale, ms.float32), name="scale_value")


@pytest.mark.parametrize("scaler", [
    amp.StaticLossScaler(float("nan")), amp.DynamicLossScaler(float("inf"), 2, 5), AnyScaler(float("-inf")), AnyScaler(0.0),
    AnyScaler(-2.0), AnyScaler([2.0, 2.0])], ids=["nan", "inf", "-inf", "0", "-2", "two"])
def test_a_loss_scale_that_nothing_can_be_divided_by_is_refused(scaler):
    acc = Accumulator(nn.SGD(MLP().trainable_params(), 0.1), 2, reduction="mean")
    with pytest.raises(ValueError, match=r"the loss scale is .*, expected one finite number > 0; give e\.g\. amp\.DynamicLossScaler"):
        make_train_step(LOSS, acc, loss_scaler=scaler)
    assert acc.loss_scaler is None
    make_train_step(LOSS, acc, loss_scaler=AnyScaler(0.5))


def test_a_scaler_is_state_of_the_accumulator():
    scalers = amp.DynamicLossScaler(8, 2, 5), amp.DynamicLossScaler(8, 2, 5)
    accumulators = [Accumulator(nn.SGD(MLP().trainable_params(), 0.1), 2, reduction="mean") for _ in scalers]
    for acc, scaler in zip(accumulators, scalers):
        make_train_step(LOSS, acc, loss_scaler=scaler)
        make_train_step(LOSS, acc, loss_scaler=scaler, strategy="split")
        assert [p.name.split(".", 1)[1] for p in acc.parameters[-2:]] == ["loss_scaler.scale_value", "loss_scaler.counter"]
        assert acc.parameters[-2] is scaler.scale_value
    names = [p.name for acc in accumulators for p in acc.parameters]
    assert len(set(names)) == len(names)


# --- token-weighted exactness ------------------------------------------------------------------------------------------

IGNORE = -100


class TinyTransformer(nn.Cell):
    """Causal language model: one attention block, one feed-forward block, logits of shape (n, t, vocabulary)."""

    def __init__(self, vocabulary=11, width=8, length=7):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.query, self.key, self.value = (nn.Dense(width, width) for _ in range(3))
        self.norm = nn.LayerNorm((width,))
        self.up, self.down = nn.Dense(width, 4 * width), nn.Dense(4 * width, width)
        self.head = nn.Dense(width, vocabulary)
        self.mask = Tensor(np.triu(np.full((length, length), -1e9), 1), ms.float32)
        rng = np.random.default_rng(3)
        for parameter in self.trainable_params():
            parameter.set_data(Tensor(rng.normal(0, 0.4, parameter.shape), ms.float32))

    def construct(self, tokens):
        x = self.embedding(tokens)
        scores = ops.matmul(self.query(x), self.key(x).swapaxes(1, 2)) / 8**0.5 + self.mask
        x = x + ops.matmul(ops.softmax(scores, -1), self.value(x))
        x = x + self.down(ops.tanh(self.up(self.norm(x))))
        return self.head(x)


def padded_sequences():
    """8 sequences of 2 to 7 tokens, padded to 7: tokens and next tokens, int32 (8, 7)."""
    rng = np.random.default_rng(5)
    tokens, targets = rng.integers(1, 11, (8, 7)), rng.integers(1, 11, (8, 7))
    for row, length in enumerate([7, 2, 3, 2, 7, 6, 2, 4]):
        tokens[row, length:], targets[row, length:] = 0, IGNORE
    return Tensor(tokens, ms.int32), Tensor(targets, ms.int32)


def token_count(tokens, targets):
    return (targets != IGNORE).astype(ms.int32).sum()


@pytest.mark.parametrize("micro_size", [4, 3])
def test_accumulated_token_mean_is_that_of_the_undivided_batch(any_mode, micro_size):
    network, batch = TinyTransformer(), padded_sequences()

    def forward_fn(tokens, targets):
        logits = network(tokens)
        return ops.cross_entropy(logits.reshape(-1, 11), targets.reshape(-1), ignore_index=IGNORE)

    whole, loss = gradient_of(forward_fn, network, batch)
    exact, exact_loss = gradient_of(forward_fn, network, batch, micro_size=micro_size, weight_fn=token_count)
    mean_of_means, wrong_loss = gradient_of(forward_fn, network, batch, micro_size=micro_size)
    assert relative(exact, whole) <= 1e-6
    assert float(exact_loss) == pytest.approx(float(loss), rel=1e-6)
    assert relative(mean_of_means, whole) > 1e-2  # what transformers did until #34191
    assert abs(float(wrong_loss) - float(loss)) > 1e-3


def test_a_fully_masked_piece_counts_nothing(any_mode):
    """Its mean loss is 0/0, and so is its gradient."""
    network, (x, y) = MLP(), batches([6])[0]
    y = np.where(np.arange(6) < 2, y, IGNORE)  # pieces of 2: one with labels, two without
    loss_fn = nn.CrossEntropyLoss(ignore_index=IGNORE)

    def forward_fn(x, y):
        return loss_fn(network(x), y)

    whole, loss = gradient_of(forward_fn, network, tensors(x, y))
    cut, cut_loss = gradient_of(forward_fn, network, tensors(x, y), micro_size=3, weight_fn=token_count)
    assert np.isfinite(float(loss))
    assert float(cut_loss) == pytest.approx(float(loss), rel=1e-6)
    assert relative(cut, whole) <= 1e-6
    assert np.isnan(float(forward_fn(*tensors(x[2:], y[2:]))))  # control: there is something to guard against


@pytest.mark.parametrize("scale", [1.0, 70000.0])
def test_large_weights_do_not_overflow_float16_parameters(any_mode, scale):
    weights = ms.ParameterTuple([ms.Parameter(Tensor([[1.0, 2.0, 3.0]], ms.float16), name="w")])
    acc = Accumulator(Counting(weights), 1, reduction="mean")

    def forward_fn(x):
        return (weights[0] * x).mean()

    def weight(x):
        return len(x) * scale

    train_step = make_train_step(forward_fn, acc, micro_size=2, weight_fn=weight)
    train_step(Tensor([[1.0, 0.0, 2.0], [3.0, 0.0, 0.0], [2.0, 0.0, 4.0]], ms.float16))
    np.testing.assert_allclose(acc.optimizer.seen[0].asnumpy(), [[2 / 3, 0.0, 2 / 3]], rtol=2e-3)


def relative(got, expected):
    """Norm of the difference over the norm, of all gradients together."""
    return np.sqrt(sum(((g - e) ** 2).sum() for g, e in zip(got, expected)) / sum((e**2).sum() for e in expected))


# --- non-finite pieces -------------------------------------------------------------------------------------------------


def test_a_bad_piece_is_skipped_alone(any_mode):
    network, (x, y) = MLP(), batches([6])[0]
    x[2] = np.nan  # in the second of three pieces
    acc = Accumulator(Counting(ms.ParameterTuple(network.trainable_params())), 1, reduction="mean", on_nonfinite="skip_microbatch")
    train_step = make_train_step(mean_loss(network), acc, micro_size=3)
    train_step(*tensors(x, y))
    kept = [0, 1, 4, 5]
    _, expected = reference.loss_and_gradients(values(network.trainable_params()), x[kept], y[kept])
    assert (int(acc.skipped), int(acc.update_step)) == (1, 1)
    assert relative(values(acc.optimizer.seen), expected) <= 1e-5  # a gradient of 4 samples, in float32 against float64

    train_step(*tensors(np.full_like(x, np.nan), y))
    assert (int(acc.skipped), int(acc.mini_step), int(acc.update_step)) == (4, 0, 1)


# --- cost --------------------------------------------------------------------------------------------------------------


def test_split_invokes_the_update_once_per_window(any_mode, monkeypatch):
    network = MLP()
    acc = Accumulator(Counting(ms.ParameterTuple(network.trainable_params())), 4, reduction="mean")
    train_step = make_train_step(mean_loss(network), acc, strategy="split")
    calls = []
    update = train_step._update
    monkeypatch.setattr(train_step, "_update", lambda: calls.append(int(acc.mini_step)) or update())
    for x, y in batches([4] * 12):
        train_step(*tensors(x, y))
    assert calls == [4, 4, 4]
    assert int(acc.optimizer.calls) == 3


@pytest.mark.parametrize(("strategy", "micro_size", "graphs"), [("fused", 1, 2), ("split", 1, 3), ("fused", 2, 2)])
def test_compilations_stay_constant(strategy, micro_size, graphs):
    """A graph for the step and one for flush ("split": and one for the update), whatever the epochs; one more for a ragged batch."""
    network = MLP()
    acc = Accumulator(nn.SGD(network.trainable_params(), 0.1), 2, reduction="mean")
    train_step = make_train_step(mean_loss(network), acc, strategy=strategy, micro_size=micro_size)

    def epoch(sizes):
        before = compiled_graphs()
        for x, y in batches(sizes):
            train_step(*tensors(x, y))
        train_step.flush()
        return compiled_graphs() - before

    assert epoch([4] * 5) == graphs
    assert [epoch([4] * 5) for _ in range(3)] == [0, 0, 0]
    assert epoch([4] * 4 + [3]) == 1
    assert epoch([4] * 4 + [3]) == 0


MEASURE_PEAK = """
import sys
import mindspore as ms, numpy as np
from mindspore import Tensor, nn
from ms_accum import Accumulator, avoid_busy_waiting, make_train_step
avoid_busy_waiting()
layers = [nn.Dense(784, 512), nn.ReLU(), nn.Dense(512, 512), nn.ReLU(), nn.Dense(512, 512), nn.ReLU(), nn.Dense(512, 10)]
network, loss_fn = nn.SequentialCell(*layers), nn.CrossEntropyLoss()
def forward_fn(x, y):
    return loss_fn(network(x), y)
acc = Accumulator(nn.SGD(network.trainable_params(), 0.01), 2, reduction="mean")
train_step = make_train_step(forward_fn, acc, micro_size=int(sys.argv[1]))
rng = np.random.default_rng(0)
def train(n):
    data, label = Tensor(rng.random((n, 784), np.float32)), Tensor(rng.integers(0, 10, n), ms.int32)
    for _ in range(4):
        loss = float(train_step(data, label))
def peak():  # of this program: ru_maxrss would be inherited from the process that started it
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM"))
train(int(sys.argv[2]))
print(peak())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/status")
def test_peak_memory_is_that_of_one_piece():
    """Growth of peak RSS from 16 samples to 16,384, MLP 784-512x3-10, cut in 8: <= 0.65 x undivided.

    Each peak is a process of its own that compiles one graph, so that the compiler's memory is on both sides.
    """
    def growth(micro_size):
        small, large = (int(run_python(MEASURE_PEAK, micro_size, samples)) for samples in ("16", "16384"))
        return large - small

    undivided = growth("1")
    assert undivided > 120_000  # KiB: a batch of 51 MB, and activations of about 1,500 floats a sample
    assert growth("8") <= 0.65 * undivided


# --- bad input ---------------------------------------------------------------------------------------------------------


def build(**options):
    network = MLP()
    options.setdefault("acc", Accumulator(nn.SGD(network.trainable_params(), 0.1), 2, reduction="mean"))
    options.setdefault("forward_fn", mean_loss(network))
    return make_train_step(options.pop("forward_fn"), options.pop("acc"), **options)


@pytest.mark.parametrize(("error", "message", "options"), [
    (TypeError, r"forward_fn is of type int, expected a function", {"forward_fn": 3}),
    (TypeError, r"weight_fn is of type float, expected a function", {"weight_fn": 2.0}),
    (TypeError, r"acc is of type NoneType, expected an Accumulator; give Accumulator\(optimizer", {"acc": None}),
    (ValueError, r"micro_size is 0, expected an int >= 1", {"micro_size": 0}),
    (TypeError, r"micro_size is True, expected an int >= 1", {"micro_size": True}),
    (TypeError, r"micro_size is 2\.0, expected an int >= 1", {"micro_size": 2.0}),
    (ValueError, r"strategy is 'lazy', expected one of 'fused', 'split'", {"strategy": "lazy"}),
])
def test_bad_arguments_are_refused(error, message, options):
    with pytest.raises(error, match=message):
        build(**options)


def test_an_accumulator_that_sums_is_refused():
    acc = Accumulator(nn.SGD(MLP().trainable_params(), 0.1), 2)
    with pytest.raises(ValueError, match=r"acc has reduction='sum', expected \"mean\": .* N times too large"):
        build(acc=acc)


@pytest.mark.parametrize("batch", [(), (3, "x"), (Tensor(1.0),), (Tensor(np.zeros((0, 6)), ms.float32),)])
def test_a_batch_without_samples_is_refused(batch):
    with pytest.raises(ValueError, match=r"expected at least one Tensor with axes and one row"):
        build()(*batch)


@pytest.mark.parametrize("nested", [(Tensor(1.0),), [Tensor(1.0)], {"x": Tensor(1.0)}])
def test_tensors_in_a_container_are_refused(nested):
    with pytest.raises(TypeError, match=rf"the batch holds a {type(nested).__name__}, expected Tensors .* as an argument of its own"):
        build()(Tensor(np.zeros((4, 6)), ms.float32), nested)


def test_numpy_arrays_are_refused():
    with pytest.raises(TypeError, match=r"the batch holds a NumPy array of shape \(4,\), expected Tensors; wrap it"):
        build()(Tensor(np.zeros((4, 6)), ms.float32), np.zeros(4))


def test_arguments_with_names_are_refused():
    data = Tensor(np.zeros((4, 6)), ms.float32)
    for batch, named in (((), {"data": data, "label": data}), ((data,), {"label": data})):
        with pytest.raises(TypeError, match=rf"arguments with names \({', '.join(named)}\), expected none: .* in the order"):
            build()(*batch, **named)


WRONG_RESULTS = """
import mindspore as ms, numpy as np
from mindspore import Tensor, nn
from ms_accum import Accumulator, make_train_step
network = nn.Dense(2, 1)
def one_value(x):
    return network(x).mean()
def three_values(x):
    return network(x).mean(), x, x
for forward_fn, has_aux in ((one_value, True), (three_values, True), (three_values, False)):
    acc = Accumulator(nn.SGD(network.trainable_params(), 0.1), 2, reduction="mean")
    try:
        make_train_step(forward_fn, acc, has_aux=has_aux)(Tensor(np.ones((4, 2)), ms.float32))
        print("accepted")
    except TypeError as error:
        print(str(error).splitlines()[0])
"""


@pytest.mark.parametrize("jit", ["1", "0"])
def test_what_forward_fn_returns_is_checked(monkeypatch, jit):
    """In a process of its own: after such an error, MindSpore 2.10 now and then cannot compile another gradient."""
    monkeypatch.setenv("MS_JIT", jit)
    assert run_python(WRONG_RESULTS).splitlines() == [
        "forward_fn returned no tuple, expected (loss, aux), as has_aux=True says; aux may be a tuple",
        "forward_fn returned 3 values, expected (loss, aux), as has_aux=True says; aux may be a tuple",
        "forward_fn returned no Tensor, expected the loss alone; give has_aux=True if it returns (loss, aux)"]


def test_nothing_is_warned_of(capfd):
    """Neither a second train step, nor pieces, nor a ragged batch makes MindSpore warn."""
    for options in ({}, {}, {"micro_size": 2}, {"micro_size": 2, "weight_fn": rows}, {"strategy": "split"}):
        train_step = build(**options)
        for x, y in batches([4, 4, 3]):
            train_step(*tensors(x, y))
        train_step.flush()
    warned = [line for line in capfd.readouterr().err.splitlines() if "WARNING" in line.upper() and "CommManager" not in line]
    assert warned == []


def rows(x, y):
    return ops.ones(len(x)).sum()


BAD_AUX = """
import mindspore as ms, numpy as np
from mindspore import Tensor, nn
from ms_accum import Accumulator, make_train_step
network = nn.Dense(2, 1)
def vector(x):
    y = network(x)
    return y.mean(), y.mean(0)
def number(x):
    return network(x).mean(), (network(x), 3)
for forward_fn in (vector, number):
    acc = Accumulator(nn.SGD(network.trainable_params(), 0.1), 2, reduction="mean")
    try:
        make_train_step(forward_fn, acc, micro_size=2, has_aux=True)(Tensor(np.ones((4, 2)), ms.float32))
        print("accepted")
    except (TypeError, ValueError) as error:
        print(type(error).__name__, str(error).splitlines()[0])
"""


def test_aux_that_cannot_be_joined_is_refused():
    remedy = "return Tensors of shape () or with one row for each sample, or give micro_size=1"
    assert run_python(BAD_AUX).splitlines() == [
        f"ValueError forward_fn returned aux of shape (1,) for a piece of 2 samples; {remedy}",
        f"TypeError forward_fn returned aux that is no Tensor and no tuple of Tensors, which cannot be joined; {remedy}"]


def test_bad_loss_scalers_are_refused():
    scaler = amp.StaticLossScaler(8)
    with pytest.raises(TypeError, match=r"loss_scaler is of type int, expected a mindspore.amp.LossScaler; give e.g. amp"):
        build(loss_scaler=1024)
    acc = Accumulator(nn.SGD(MLP().trainable_params(), 0.1), 2, reduction="mean")
    build(acc=acc, loss_scaler=scaler)
    with pytest.raises(ValueError, match=r"already has another loss_scaler"):
        build(acc=acc, loss_scaler=amp.StaticLossScaler(8))
    other = Accumulator(nn.SGD(MLP().trainable_params(), 0.1), 2, reduction="mean")
    with pytest.raises(ValueError, match=r"the loss_scaler is another accumulator's, .* give each accumulator its own"):
        build(acc=other, loss_scaler=scaler)
    other.add(tuple([p * 0 for p in other.optimizer.parameters]))
    with pytest.raises(ValueError, match=r"gradients without a loss scale in the open window; give the loss_scaler before, or reset"):
        build(acc=other, loss_scaler=amp.StaticLossScaler(8))
    with pytest.raises(ValueError, match=r"acc has a loss_scaler, .* give the same one here"):
        build(acc=acc)
    acc = Accumulator(nn.SGD(MLP().trainable_params(), 0.1), 2, reduction="mean", on_nonfinite="skip_microbatch")
    scaler = amp.StaticLossScaler(8)
    with pytest.raises(ValueError, match=r"loss_scaler with on_nonfinite=\"skip_microbatch\": .* skipped for ever"):
        build(acc=acc, loss_scaler=scaler)


def test_a_loss_with_axes_is_refused_and_changes_nothing(any_mode):
    network, (x, y) = MLP(), batches([4])[0]

    def forward_fn(x, y):
        return ops.cross_entropy(network(x), y, reduction="none")

    acc = Accumulator(nn.SGD(network.trainable_params(), 0.1), 2, reduction="mean")
    with pytest.raises(ValueError, match=r"forward_fn returned a loss of shape \(4,\), expected shape \(\)"):
        make_train_step(forward_fn, acc)(*tensors(x, y))
    assert int(acc.mini_step) == 0


def test_a_bad_weight_is_refused():
    def negative(x, y):
        return -1.0

    def vector(x, y):
        return ops.ones(4)

    for weight_fn, message in ((negative, "weight is -1"), (vector, r"weight is a Tensor of shape \(4,\)")):
        with pytest.raises(ValueError, match=message):
            build(weight_fn=weight_fn)(*tensors(*batches([4])[0]))
