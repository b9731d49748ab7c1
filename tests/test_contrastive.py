"""make_grad_cache_step: the gradient of the undivided contrastive batch, against NumPy and MindSpore; random layers; refusals."""
from functools import partial

import mindspore as ms
import numpy as np
import pytest
from conftest import values
from following import counting, gradient_of, op_by_op, relative, run_as, warned
from mindspore import Parameter, Tensor, amp, nn, ops

from ms_accum import GradientNoiseScale, make_grad_cache_step, make_train_step


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


def two_towers(**options):
    towers = Towers(**options)
    return towers, towers, info_nce(towers)


def one_tower(**options):
    """Representations (m, 2, 2), of which neighbours are pairs; an argument that is not cut; a loss without parameters."""
    towers = Towers(**options)

    def encode(x, y, scale):
        return towers.dropout(towers.left(x) * scale).reshape(-1, 2, 2)

    def loss_fn(z, hidden):
        z = unit(z.reshape(len(z), -1))
        logits = ops.matmul(z, z.T) - hidden * ops.eye(len(z))
        return ops.cross_entropy(logits, ops.arange(len(z)).reshape(-1, 2).flip((1,)).reshape(-1))

    return towers, encode, partial(loss_fn, hidden=1e3)


def forward_of(encode, loss_fn):
    def forward_fn(*batch):
        representations = encode(*batch)
        return loss_fn(*representations) if isinstance(representations, tuple) else loss_fn(representations)
    return forward_fn


def check_one_batch(made, batch, micro_size, acc=None):
    """The loss and the gradient are those of the undivided batch. Control: small batches have other negatives, and another gradient."""
    towers, encode, loss_fn = made
    forward_fn = forward_of(encode, loss_fn)
    with op_by_op():
        undivided, expected = gradient_of(forward_fn, towers, batch)
        naive, naive_loss = gradient_of(forward_fn, towers, batch, micro_size=2)
    acc = acc or counting(towers)
    loss = make_grad_cache_step(encode, loss_fn, acc, micro_size=micro_size)(*batch)
    assert (int(acc.optimizer.calls), int(acc.mini_step), int(acc.update_step)) == (1, 0, 1)
    assert float(loss) == pytest.approx(float(expected), rel=1e-6)
    assert relative(values(acc.optimizer.seen), undivided) <= 1e-5
    assert relative(naive, undivided) > 0.1
    assert abs(float(naive_loss) - float(expected)) > 0.1


def check_windows(second):
    """Batches of 10 = 3 + 3 + 3 + 1 and `second` weigh so much; a short last window is flushed; clipping sees the whole gradient."""
    towers, encode, loss_fn = two_towers()
    with op_by_op():
        single = [gradient_of(forward_of(encode, loss_fn), towers, pairs(n, seed))[0] for n, seed in ((10, 1), (second, 2))]
    expected = [(10 * a + second * b) / (10 + second) for a, b in zip(*single)]
    acc = counting(towers, 2, clip_norm=float("inf"))
    train_step = make_grad_cache_step(encode, loss_fn, acc, micro_size=4)
    train_step(*pairs(10, 1))
    assert (int(acc.mini_step), int(acc.update_step)) == (1, 0)
    train_step(*pairs(second, 2))
    assert (int(acc.mini_step), int(acc.update_step)) == (0, 1)
    assert relative(values(acc.optimizer.seen), expected) <= 1e-5
    assert abs(expected[0]) > 1e-3  # the temperature is trained, too
    assert float(acc.optimizer.seen[0]) == pytest.approx(expected[0], rel=1e-5)
    assert float(acc.grad_norm) == pytest.approx(np.sqrt(sum((g**2).sum() for g in expected)), rel=1e-5)
    train_step(*pairs(10, 1))
    assert bool(train_step.flush())
    assert not bool(train_step.flush())
    assert relative(values(acc.optimizer.seen), single[0]) <= 1e-5


def check_dropout():
    """It is refused and changes nothing; without it, the same accumulator takes representations of any shape."""
    towers, encode, loss_fn = one_tower(dropout=0.5)  # with 0.1, two masks of these few elements are alike in one run of five
    towers.set_train()
    acc, batch = counting(towers), (*pairs(8), Tensor(1.5))
    with pytest.raises(ValueError, match=r"encode_fn returned two different .* does it draw random numbers\? Switch Dropout off"):
        make_grad_cache_step(encode, loss_fn, acc, micro_size=2)(*batch)
    assert (int(acc.mini_step), int(acc.update_step), float(acc.weight_sum), int(acc.optimizer.calls)) == (0, 0, 0.0, 0)
    assert all(not b.asnumpy().any() for b in acc.buffers)
    towers.set_train(False)
    with op_by_op():
        check_one_batch((towers, encode, loss_fn), batch, 2, acc)


# After MindCV's networks were in the process, MindSpore 2.10 does not compile it ("Illegal AnfNode for evaluating").
@pytest.mark.fresh_process("jit")
@pytest.mark.parametrize(("mode", "second"), [("jit", 10), ("pynative", 4), pytest.param("jit", 4, marks=pytest.mark.slow)])
def test_windows_and_dropout(mode, second, capfd):
    with run_as(mode):
        check_windows(second)
        assert warned(capfd) == []
        check_dropout()


@pytest.mark.parametrize("micro_size", [1, 2, 7, 9])
def test_any_cut_gives_the_same(micro_size):
    with op_by_op():
        check_one_batch(two_towers(), pairs(7), micro_size)


def test_the_gradient_is_numpys():
    """InfoNCE of two linear towers and its gradient, written out in float64."""
    towers = Towers()

    def encode(x, y):
        return towers.left(x), towers.right(y)

    acc = counting(towers)
    x, y = pairs(6)
    with op_by_op():
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


def test_float16_towers_do_not_overflow():
    towers, encode, loss_fn = two_towers()
    with op_by_op():
        exact, _ = gradient_of(forward_of(encode, loss_fn), towers, pairs(64))
    for parameter in towers.trainable_params()[1:]:
        parameter.set_dtype(ms.float16)
    acc = counting(towers)

    def halves(x, y):
        return encode(x.astype(ms.float16), y.astype(ms.float16))

    def in_float32(left, right):
        return loss_fn(left.astype(ms.float32), right.astype(ms.float32)) * 2000

    assert acc.buffer_dtypes[1] == ms.float32
    with op_by_op():
        make_grad_cache_step(halves, in_float32, acc, micro_size=4)(*pairs(64))
    assert relative(values(acc.optimizer.seen), [2000 * g for g in exact]) <= 1e-2


def test_nan_is_no_random_layer():
    towers, encode, loss_fn = two_towers()
    acc = counting(towers, on_nonfinite="skip_window")
    x, y = pairs(6)
    x[0, 0] = float("nan")
    with op_by_op():
        assert np.isnan(float(make_grad_cache_step(encode, loss_fn, acc, micro_size=2)(x, y)))
    assert (int(acc.skipped), int(acc.update_step)) == (1, 0)


@pytest.mark.parametrize(("error", "message", "options"), [
    (TypeError, r"encode_fn is of type int, expected a function", {"encode_fn": 3}),
    (TypeError, r"encode_fn is a lambda", {"encode_fn": lambda x: x}),
    (TypeError, r"loss_fn is of type str, expected a function", {"loss_fn": "nce"}),
    (TypeError, r"accumulator is of type NoneType, expected a MindSpore optimizer", {"acc": None}),
    (ValueError, r"micro_size is 0, expected an int >= 1", {"micro_size": 0}),
    (ValueError, r"the accumulator has reduction='sum', expected \"mean\"", {"acc": {"reduction": "sum"}}),
    (ValueError, r"the accumulator has a loss_scaler, which a loss over a whole batch does not allow; leave it out", {"loss_scaler": True}),
    (ValueError, r"the accumulator has a noise_scale, which a loss over a whole batch .*; leave it out: it needs gradients of independent",
     {"acc": {"noise_scale": GradientNoiseScale()}}),
    (ValueError, r'the accumulator has sync="microbatch" or on_nonfinite="skip_microbatch", .*; give sync="window" and "skip_window"',
     {"acc": {"on_nonfinite": "skip_microbatch"}}),
])
def test_bad_arguments_are_refused(error, message, options):
    towers, encode_fn, loss_fn = two_towers()
    made = options.pop("acc", {})
    acc = made if made is None else counting(towers, **made)
    if options.pop("loss_scaler", False):
        make_train_step(loss_fn, acc, loss_scaler=amp.StaticLossScaler(8))
    with pytest.raises(error, match=message):
        make_grad_cache_step(**{"encode_fn": encode_fn, "loss_fn": loss_fn, "accumulator": acc, "micro_size": 2, **options})
