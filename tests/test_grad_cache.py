"""make_grad_cache_step: the gradient of the undivided contrastive batch, against NumPy and MindSpore; memory; refusals."""
import sys

import mindspore as ms
import numpy as np
import pytest
from conftest import Counting, run_python, values
from mindspore import Parameter, ParameterTuple, Tensor, amp, nn, ops
from test_train_step import any_mode, relative  # noqa: F401

from ms_accum import Accumulator, GradientNoiseScale, make_grad_cache_step, make_train_step


class Towers(nn.Cell):
    """Two small encoders, and the logarithm of a temperature that is trained (the first of the parameters)."""

    def __init__(self, dropout=0.0):
        super().__init__()
        self.left, self.right = nn.Dense(5, 4), nn.Dense(3, 4)
        self.dropout = nn.Dropout(p=dropout)
        self.log_scale = Parameter(Tensor(1.0), name="log_scale")
        rng = np.random.default_rng(0)
        for parameter in (*self.left.trainable_params(), *self.right.trainable_params()):
            parameter.set_data(Tensor(rng.normal(0, 0.7, parameter.shape), ms.float32))

    def construct(self, x, y):
        return self.dropout(unit(ops.tanh(self.left(x)))), unit(ops.tanh(self.right(y)))


def unit(x):
    return x / ops.sqrt((x * x).sum(-1, keepdims=True))


def info_nce(towers):
    def loss_fn(left, right):
        logits = ops.matmul(left, right.T) * towers.log_scale.exp()
        return ops.cross_entropy(logits, ops.arange(len(left)))
    return loss_fn


def pairs(n, seed=1):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, 5))
    return Tensor(x, ms.float32), Tensor(x[:, :3] + 0.5 * rng.normal(size=(n, 3)), ms.float32)


def counting(network, accumulate_step=1, **options):
    options.setdefault("reduction", "mean")
    return Accumulator(Counting(ParameterTuple(network.trainable_params())), accumulate_step, **options)


def two_towers(**options):
    towers = Towers(**options)
    return towers, towers, info_nce(towers)


def one_tower():
    """Representations (m, 2, 2), of which neighbours are pairs; an argument that is not cut; a loss without parameters."""
    towers = Towers()

    def encode(x, y, scale):
        return (towers.left(x) * scale).reshape(-1, 2, 2)

    def loss_fn(z):
        z = unit(z.reshape(len(z), -1))
        logits = ops.matmul(z, z.T) - 1e3 * ops.eye(len(z))
        return ops.cross_entropy(logits, ops.arange(len(z)).reshape(-1, 2).flip((1,)).reshape(-1))

    return towers, encode, loss_fn


def gradients(kind, n, micro_size):
    """Of a batch of n: the loss and the gradients, cached, undivided and naively accumulated."""
    towers, encode, loss_fn = kind()
    batch = (*pairs(n), *((Tensor(1.5),) if kind is one_tower else ()))

    def forward_fn(*batch):
        representations = encode(*batch)
        return loss_fn(*representations) if isinstance(representations, tuple) else loss_fn(representations)

    found = []
    for make in (lambda acc: make_grad_cache_step(encode, loss_fn, acc, micro_size=micro_size),
                 lambda acc: make_train_step(forward_fn, acc), lambda acc: make_train_step(forward_fn, acc, micro_size=2)):
        acc = counting(towers)
        loss = float(make(acc)(*batch))
        assert (int(acc.optimizer.calls), int(acc.mini_step), int(acc.update_step)) == (1, 0, 1)
        found.append((loss, values(acc.optimizer.seen)))
    return found


# After MindCV's networks were in the process, MindSpore 2.10 does not compile it ("Illegal AnfNode for evaluating").
@pytest.mark.fresh_process("jit", "1")
@pytest.mark.parametrize(("kind", "n", "micro_size"), [(two_towers, 10, 4), (one_tower, 8, 2)])
def test_the_gradient_is_that_of_the_undivided_batch(any_mode, kind, n, micro_size):  # noqa: F811
    """10 = 3 + 3 + 3 + 1; control: two small batches have other negatives, and another gradient."""
    (loss, cached), (expected, undivided), (naive_loss, naive) = gradients(kind, n, micro_size)
    assert loss == pytest.approx(expected, rel=1e-6)
    assert relative(cached, undivided) <= 1e-5
    assert relative(naive, undivided) > 0.1
    assert abs(naive_loss - expected) > 0.1
    if kind is two_towers:
        assert abs(undivided[0]) > 1e-3  # the temperature is trained, too
        assert cached[0] == pytest.approx(undivided[0], rel=1e-5)


@pytest.mark.parametrize("micro_size", [1, 2, 7, 9])
def test_any_cut_gives_the_same(monkeypatch, micro_size):
    monkeypatch.setenv("MS_JIT", "0")
    (loss, cached), (expected, undivided), _ = gradients(two_towers, 7, micro_size)
    assert loss == pytest.approx(expected, rel=1e-6)
    assert relative(cached, undivided) <= 1e-5


def test_the_gradient_is_numpys(monkeypatch):
    """InfoNCE of two linear towers and its gradient, written out in float64."""
    monkeypatch.setenv("MS_JIT", "0")
    towers = Towers()

    def encode(x, y):
        return towers.left(x), towers.right(y)

    acc = counting(towers)
    x, y = pairs(6)
    loss = make_grad_cache_step(encode, info_nce(towers), acc, micro_size=3)(x, y)
    (log_scale, w, b, v, c), (x, y) = values(towers.trainable_params()), values((x, y))
    left, right, scale = x @ w.T + b, y @ v.T + c, np.exp(log_scale)
    logits = scale * left @ right.T
    softmax = np.exp(logits - logits.max(1, keepdims=True))
    softmax /= softmax.sum(1, keepdims=True)
    d = (softmax - np.eye(6)) / 6
    d_left, d_right = scale * d @ right, scale * d.T @ left
    assert float(loss) == pytest.approx(-np.log(np.diag(softmax)).mean(), rel=1e-5)
    expected = [(d * logits).sum(), d_left.T @ x, d_left.sum(0), d_right.T @ y, d_right.sum(0)]
    assert relative(values(acc.optimizer.seen), expected) <= 1e-5


@pytest.mark.fresh_process("jit", "1")
def test_windows_of_several_batches(any_mode, capfd):  # noqa: F811
    """Batches of 6 and 4 in a window weigh 6 and 4; a short last window is flushed; clipping sees the whole gradient; no warnings."""
    towers, encode, loss_fn = two_towers()

    def forward_fn(x, y):
        return loss_fn(*encode(x, y))

    single = []
    for n, seed in ((6, 1), (4, 2)):
        acc = counting(towers)
        make_train_step(forward_fn, acc)(*pairs(n, seed))
        single.append(values(acc.optimizer.seen))
    expected = [0.6 * a + 0.4 * b for a, b in zip(*single)]
    acc = counting(towers, 2, clip_norm=float("inf"))
    train_step = make_grad_cache_step(encode, loss_fn, acc, micro_size=2)
    train_step(*pairs(6, 1))
    assert (int(acc.mini_step), int(acc.update_step)) == (1, 0)
    train_step(*pairs(4, 2))
    assert (int(acc.mini_step), int(acc.update_step)) == (0, 1)
    assert relative(values(acc.optimizer.seen), expected) <= 1e-5
    assert float(acc.grad_norm) == pytest.approx(np.sqrt(sum((g**2).sum() for g in expected)), rel=1e-5)
    train_step(*pairs(4, 2))
    assert bool(train_step.flush())
    assert not bool(train_step.flush())
    assert relative(values(acc.optimizer.seen), single[1]) <= 1e-5
    assert [line for line in capfd.readouterr().err.splitlines() if "WARNING" in line.upper() and "CommManager" not in line] == []


def test_float16_towers_do_not_overflow(monkeypatch):
    monkeypatch.setenv("MS_JIT", "0")
    towers, encode, loss_fn = two_towers()
    for parameter in towers.trainable_params()[1:]:
        parameter.set_dtype(ms.float16)
    acc = counting(towers)

    def halves(x, y):
        return encode(x.astype(ms.float16), y.astype(ms.float16))

    def in_float32(left, right):
        return loss_fn(left.astype(ms.float32), right.astype(ms.float32)) * 2000

    assert acc.buffer_dtypes[1] == ms.float32
    make_grad_cache_step(halves, in_float32, acc, micro_size=4)(*pairs(64))
    exact = gradients(two_towers, 64, 4)[1][1]
    assert relative(values(acc.optimizer.seen), [2000 * g for g in exact]) <= 1e-2


# --- layers that compute something else each time ------------------------------------------------------------------------


@pytest.mark.fresh_process("jit", "1")
@pytest.mark.parametrize("jit", ["1", "0"])
def test_dropout_is_refused_and_counts_nothing(monkeypatch, jit):
    monkeypatch.setenv("MS_JIT", jit)
    towers, encode, loss_fn = two_towers(dropout=0.5)  # with 0.1, two masks of these few elements are alike in one run of five
    towers.set_train()
    acc = counting(towers)
    train_step = make_grad_cache_step(encode, loss_fn, acc, micro_size=2)
    with pytest.raises(ValueError, match=r"encode_fn gave the same rows two different .* does it draw random numbers\? Take Dropout out"):
        train_step(*pairs(8))
    assert (int(acc.mini_step), int(acc.update_step), float(acc.weight_sum), int(acc.optimizer.calls)) == (0, 0, 0.0, 0)
    assert all(not b.asnumpy().any() for b in acc.buffers)
    towers.set_train(False)
    make_grad_cache_step(encode, loss_fn, acc, micro_size=2)(*pairs(8))
    assert int(acc.update_step) == 1


def test_nan_is_no_random_layer(monkeypatch):
    monkeypatch.setenv("MS_JIT", "0")
    towers, encode, loss_fn = two_towers()
    acc = counting(towers, on_nonfinite="skip_window")
    x, y = pairs(6)
    x[0, 0] = float("nan")
    assert np.isnan(float(make_grad_cache_step(encode, loss_fn, acc, micro_size=2)(x, y)))
    assert (int(acc.skipped), int(acc.update_step)) == (1, 0)


# --- cost ------------------------------------------------------------------------------------------------------------------

MEASURE_PEAK = """
import sys
import mindspore as ms, numpy as np
from mindspore import Tensor, nn, ops
from ms_accum import Accumulator, avoid_busy_waiting, make_grad_cache_step, make_train_step
avoid_busy_waiting()
token = nn.SequentialCell(nn.Dense(32, 512), nn.ReLU(), nn.Dense(512, 512), nn.ReLU(), nn.Dense(512, 16))
def encoder(x):  # of sequences of 64 tokens: 64 x 512 floats a layer for each sample
    return token(x).mean(1)
def loss_fn(z):
    return ops.cross_entropy(ops.matmul(z, z.T), ops.arange(len(z)))
def forward_fn(x):
    return loss_fn(encoder(x))
acc = Accumulator(nn.SGD(token.trainable_params(), 0.01), 1, reduction="mean")
kind, n = sys.argv[1], int(sys.argv[2])
cut = {"undivided": 1, "cached": n // 16}[kind]
train_step = make_train_step(forward_fn, acc) if cut == 1 else make_grad_cache_step(encoder, loss_fn, acc, micro_size=cut)
x = Tensor(np.random.default_rng(0).random((n, 64, 32), np.float32))
for _ in range(3):
    float(train_step(x))
print(next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM")))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/status")
def test_memory_is_flat_in_the_batch():
    """Growth of peak RSS from 32 samples to 512 in pieces of 16: <= 0.2 x undivided. What still grows are data and similarities."""
    def growth(kind):
        small, large = (int(run_python(MEASURE_PEAK, kind, samples)) for samples in ("32", "512"))
        return large - small

    undivided = growth("undivided")
    assert undivided > 120_000  # KiB
    assert growth("cached") <= 0.2 * undivided


# --- bad input -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("error", "message", "options"), [
    (TypeError, r"encode_fn is of type int, expected a function", {"encode_fn": 3}),
    (TypeError, r"loss_fn is of type str, expected a function", {"loss_fn": "nce"}),
    (TypeError, r"acc is of type NoneType, expected an Accumulator", {"acc": None}),
    (ValueError, r"micro_size is 0, expected an int >= 1", {"micro_size": 0}),
    (ValueError, r"acc has reduction='sum', expected \"mean\"", {"reduction": "sum"}),
    (ValueError, r"acc has a noise_scale, which a loss over a whole batch does not allow; leave it out: the gradient of a piece",
     {"noise_scale": GradientNoiseScale}),
    (ValueError, r"acc has sync=\"microbatch\" or on_nonfinite=\"skip_microbatch\", which .*; give sync=\"window\" and \"skip_window\"",
     {"on_nonfinite": "skip_microbatch"}),
])
def test_bad_arguments_are_refused(error, message, options):
    towers, encode_fn, loss_fn = two_towers()
    made = {name: options.pop(name) for name in ("reduction", "noise_scale", "on_nonfinite") if name in options}
    if "noise_scale" in made:
        made["noise_scale"] = made["noise_scale"]()
    arguments = {"encode_fn": encode_fn, "loss_fn": loss_fn, "acc": counting(towers, **made), "micro_size": 2, **options}
    with pytest.raises(error, match=message):
        make_grad_cache_step(**arguments)


def test_arguments_with_names_are_refused():
    towers, encode, loss_fn = two_towers()
    train_step = make_grad_cache_step(encode, loss_fn, counting(towers), micro_size=2)
    x, y = pairs(4, 1)
    with pytest.raises(TypeError, match=r"arguments with names \(y\), expected none: .* in the order"):
        train_step(x, y=y)


def test_a_loss_scaler_is_refused():
    towers, encode_fn, loss_fn = two_towers()
    acc = counting(towers)
    acc.unscale_by(amp.StaticLossScaler(8))
    with pytest.raises(ValueError, match=r"acc has a loss_scaler, which a loss over a whole batch does not allow; leave it out"):
        make_grad_cache_step(encode_fn, loss_fn, acc, micro_size=2)


WRONG_RESULTS = """
import mindspore as ms, numpy as np
from mindspore import Tensor, nn
from ms_accum import Accumulator, make_grad_cache_step
network = nn.Dense(2, 3)
def nothing(x):
    network(x)
def mean(x):
    return network(x).mean(0)
def mixed(x):
    return network(x), network(x).astype(ms.float16)
def rows(x):
    return network(x)
def vector(z):
    return z.mean(0)
def pair(z):
    return z.mean(), z
def scalar(*z):
    return z[0].mean()
for encode_fn, loss_fn in ((nothing, scalar), (mean, scalar), (mixed, scalar), (rows, vector), (rows, pair)):
    acc = Accumulator(nn.SGD(network.trainable_params(), 0.1), 2, reduction="mean")
    try:
        make_grad_cache_step(encode_fn, loss_fn, acc, micro_size=2)(Tensor(np.ones((4, 2)), ms.float32))
        print("accepted")
    except (TypeError, ValueError) as error:
        print(type(error).__name__, str(error).splitlines()[0])
"""


@pytest.mark.fresh_process("jit", "1")
@pytest.mark.parametrize("jit", ["1", "0"])
def test_what_the_functions_return_is_checked(monkeypatch, jit):
    monkeypatch.setenv("MS_JIT", jit)
    remedy = "return a Tensor with a row for each sample, or a tuple of such Tensors of one float dtype"
    assert run_python(WRONG_RESULTS).splitlines() == [
        f"TypeError encode_fn returned what is no Tensor and no tuple of Tensors; {remedy}",
        f"ValueError encode_fn returned a Tensor of shape (3,) for a piece of 2 samples; {remedy}",
        f"TypeError encode_fn returned Tensors of Float32, Float16; {remedy}",
        "ValueError loss_fn returned a loss of shape (3,), expected shape (); give the mean over the samples",
        "TypeError loss_fn returned no Tensor, expected the loss alone"]
