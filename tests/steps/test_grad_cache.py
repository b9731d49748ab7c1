"""make_grad_cache_step: the gradient of the undivided contrastive batch; random encoders; refusals."""
from functools import partial

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, amp, nn, ops
from support.modes import running, warned
from support.training import counting, gradient_of

from ms_accum import check_equivalence, make_grad_cache_step
from ms_accum.batch_size import GradientNoiseScale
from ms_accum.selftest.comparing import relative, values


class Towers(nn.Cell):
    """Two small encoders, and the logarithm of a temperature that is trained (the first of the parameters)."""

    def __init__(self, dropout):
        super().__init__()
        self.left, self.right = nn.Dense(5, 4, has_bias=False), nn.Dense(3, 4, has_bias=False)
        self.dropout = nn.Dropout(p=dropout)
        self.log_scale = Parameter(Tensor(1.0), name="log_scale")
        rng = np.random.default_rng(0)
        for dense in (self.left, self.right):
            dense.weight.set_data(Tensor(rng.normal(0, 0.7, dense.weight.shape), ms.float32))

    def construct(self, x, y):
        return self.dropout(unit(ops.tanh(self.left(x)))), unit(ops.tanh(self.right(y)))


def unit(x):
    return x / ops.sqrt((x * x).sum(-1, keepdims=True))


def pairs(n, seed=1):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, 5))
    return Tensor(x, ms.float32), Tensor(x[:, :3] + 0.5 * rng.normal(size=(n, 3)), ms.float32)


def two_towers(dropout=0.0):
    """The encoders, of which one representation has three axes; their loss, a partial function; the undivided loss."""
    towers = Towers(dropout)

    def encode(x, y):
        left, right = towers(x, y)
        return left.reshape(-1, 2, 2), right

    def info_nce(left, right, hidden):
        logits = ops.matmul(left.reshape(len(left), -1), right.T) * towers.log_scale.exp() + hidden
        return ops.cross_entropy(logits, ops.arange(len(left)))

    loss_fn = partial(info_nce, hidden=0.0)

    def undivided(*batch):
        return loss_fn(*encode(*batch))

    return towers, encode, loss_fn, undivided


class Router(nn.Cell):
    """A network whose gates choose between two experts for each sample, and one that marks pixels."""

    def __init__(self):
        super().__init__()
        self.gates, self.experts, self.mask = nn.Dense(5, 3), nn.Dense(5, 3), nn.Dense(5, 4)

    def construct(self, x):
        gates = ops.softmax(self.gates(x))
        return self.experts(x) * gates, gates, ops.sigmoid(self.mask(x))


def load_balancing(output, gates, mask):
    """Of the Switch Transformer: the mean gate of each expert, times the share of samples that it gets."""
    share = (gates == gates.max(-1, keepdims=True)).astype(ms.float32).mean(0)
    return (output**2).mean() + 0.5 * (ops.stop_gradient(share) * gates.mean(0)).sum() * 3


def batch_dice(output, gates, mask):
    target = (output > 0).astype(ms.float32)
    return 1 - 2 * (mask[:, :3] * target).sum() / (mask[:, :3].sum() + target.sum())


@pytest.mark.parametrize("loss_fn", [load_balancing, batch_dice])
@pytest.mark.parametrize("jit", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_losses_of_the_whole_batch_are_exact(loss_fn, jit):
    """Control: with pieces of a plain step, they are not; the check says so, and what is exact."""
    ms.set_seed(3)
    router, x = Router(), pairs(7)[0]

    def undivided(x):
        return loss_fn(*router(x))

    with running("pynative"):
        expected, loss = gradient_of(undivided, router, (x,))
        naive, _ = gradient_of(undivided, router, (x,), pieces=3)
        report = check_equivalence(undivided, router, (x,), pieces=3)
    with running("jit" if jit else "pynative"):
        optimizer = counting(router)
        got = make_grad_cache_step(router, loss_fn, optimizer, 1, pieces=3)(x)
    assert float(got) == pytest.approx(float(loss), rel=1e-6)
    assert relative(values(optimizer.seen), expected) <= 1e-6
    assert relative(naive, expected) > 1e-3
    assert not report.ok
    assert "make_grad_cache_step" in str(report)


@pytest.mark.usefixtures("uncompiled")
def test_the_gradient_is_that_of_the_undivided_batch():
    """Also with a loss scale. Control: small batches have other negatives, and another gradient and loss."""
    towers, encode, loss_fn, undivided = two_towers()
    expected, loss = gradient_of(undivided, towers, pairs(7))
    naive, naive_loss = gradient_of(undivided, towers, pairs(7), pieces=2)
    for pieces, scale in ((1, 1.0), (2, 2.0**20), (7, 1.0), (9, 2.0**20)):
        train_step = make_grad_cache_step(encode, loss_fn, counting(towers), 1, pieces=pieces,
                                          loss_scaler=amp.StaticLossScaler(scale))
        acc = train_step.accumulator
        got = train_step(*pairs(7))
        assert (int(acc.optimizer.calls), int(acc.mini_step), int(acc.update_step)) == (1, 0, 1)
        assert float(got) == pytest.approx(float(loss), rel=1e-6)
        assert relative(values(acc.optimizer.seen), expected) <= 1e-5
    assert relative(naive, expected) > 0.1
    assert abs(float(naive_loss) - float(loss)) > 0.1
    assert float(train_step(*pairs(0))) == 0, "a batch without rows"
    assert (int(acc.optimizer.calls), acc.status().empty_windows) == (1, 1), "dropped, because there is a loss scaler"


# After MindCV's networks were in the process, MindSpore 2.10 does not compile it ("Illegal AnfNode for evaluating").
@pytest.mark.fresh_process("jit")
@pytest.mark.parametrize("mode", [pytest.param("jit", marks=pytest.mark.slow), "pynative"])
def test_windows_and_a_random_encoder(mode, capfd):
    """Batches of 5 = 3 + 2 and 2 = 1 + 1 weigh so much, clipping sees the whole; a randomly encoded one is ignored."""
    towers, encode, loss_fn, undivided = two_towers(dropout=0.5)
    towers.set_train(False)
    with running("pynative"):
        one, other = (gradient_of(undivided, towers, pairs(n, n))[0] for n in (5, 2))
    expected = [(5 * a + 2 * b) / 7 for a, b in zip(one, other)]
    with running(mode):
        train_step = make_grad_cache_step(encode, loss_fn, counting(towers), 2, pieces=2, clip_norm=float("inf"))
        acc = train_step.accumulator
        for n, held in ((5, 1), (2, 0)):
            train_step(*pairs(n, n))
            assert (int(acc.mini_step), train_step.updated) == (held, held == 0)
        assert relative(values(acc.optimizer.seen), expected) <= 1e-5
        assert float(acc.optimizer.seen[0]) == pytest.approx(expected[0], rel=1e-5)  # the temperature
        assert float(acc.grad_norm) == pytest.approx(np.sqrt(sum((g**2).sum() for g in expected)), rel=1e-5)
        train_step(*pairs(5, 5))
        assert train_step.flush() is True
        assert relative(values(acc.optimizer.seen), one) <= 1e-5
        assert warned(capfd) == []
        towers.set_train()
        with pytest.raises(ValueError, match=r"encode_fn returned two different .* was ignored. If it draws random"):
            train_step(*pairs(16))  # two draws agree in 1 of 2^32
        assert (int(acc.mini_step), int(acc.update_step), float(acc.weight_sum)) == (0, 2, 0)
        assert all(not b.asnumpy().any() for b in acc.window.buffers)
        towers.set_train(False)  # control
        train_step(*pairs(2))
        assert int(acc.mini_step) == 1


SINGLE = r'an option looks at single pieces .* give "skip_window" or sync="window"'


@pytest.mark.parametrize(("error", "message", "options"), [
    (TypeError, r"encode_fn is of type int, expected a function", {"encode_fn": 3}),
    (TypeError, r"loss_fn is of type str, expected a function", {"loss_fn": "nce"}),
    (TypeError, r"optimizer is of type NoneType, expected a MindSpore optimizer", {"optimizer": None}),
    (ValueError, r"pieces is 0, expected an int >= 1", {"pieces": 0}),
    (ValueError, SINGLE, {"stages": (GradientNoiseScale(),)}),
    (ValueError, SINGLE, {"on_nonfinite": "skip_microbatch"}),
])
def test_bad_arguments_are_refused(error, message, options):
    towers, encode_fn, loss_fn, _ = two_towers()
    given = {"encode_fn": encode_fn, "loss_fn": loss_fn, "optimizer": counting(towers), "accumulate_step": 1,
             "pieces": 2}
    with pytest.raises(error, match=message):
        make_grad_cache_step(**{**given, **options})
