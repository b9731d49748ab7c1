"""make_grad_cache_step: the gradient of the undivided contrastive batch; random encoders; evaluation; errors."""
from functools import partial

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, amp, nn, ops
from support.modes import running, warned
from support.training import gradient_of

from ms_accum import make_grad_cache_step
from ms_accum.batch_size import GradientNoiseScale
from ms_accum.selftest.comparing import difference, relative, values


class Towers(nn.Cell):
    """Two small encoders, and the logarithm of a temperature that is trained."""

    def __init__(self, dropout=0.0):
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

    def undivided(x, y):
        return loss_fn(*encode(x, y))

    return towers, encode, loss_fn, undivided


BATCHES = [pairs(7), pairs(4, 2), pairs(0), pairs(5, 3)]


def moved(accumulate_step, pieces, way="pynative", **options):
    """How one epoch moves the parameters, and its losses. If windows of NaN are dropped, one comes first."""
    towers, encode, loss_fn, _ = two_towers()
    before, optimizer = values(towers.trainable_params()), nn.SGD(towers.trainable_params(), 0.5)
    with running(way):
        step = make_grad_cache_step(encode, loss_fn, optimizer, accumulate_step, pieces=pieces, **options)
        bad = [tuple(part * np.nan for part in pairs(4))] * 3 if "on_nonfinite" in options else []
        losses = [float(loss) for loss in step.epoch(bad + BATCHES)][len(bad):]
        status = step.status()
    return [after - old for after, old in zip(values(towers.trainable_params()), before)], losses, status


def by_mindspore(clip_norm=np.inf, min_weight=0, **_):
    """The same in windows of three and one by MindSpore alone: batches weigh their samples."""
    towers, _, _, undivided = two_towers()
    before, losses = values(towers.trainable_params()), []
    optimizer = nn.SGD(towers.trainable_params(), 0.5)
    grad_fn = ms.value_and_grad(undivided, None, optimizer.parameters)
    for window in (BATCHES[:2], BATCHES[3:]):
        found = [(len(batch[0]), *grad_fn(*batch)) for batch in window]
        losses += [float(loss) * n / max(n, min_weight) for n, loss, _ in found]
        mean = [sum(n * g.asnumpy() for (n, _, _), g in zip(found, of_one)) / max(sum(n for n, *_ in found), min_weight)
                for of_one in zip(*(gradients for _, _, gradients in found))]
        norm = np.sqrt(sum((g**2).sum() for g in mean))
        optimizer(tuple(Tensor(g * min(1, clip_norm / (norm + 1e-6)), ms.float32) for g in mean))
    return [after - old for after, old in zip(values(towers.trainable_params()), before)], losses


@pytest.mark.parametrize(("pieces", "way", "options"), [
    (1, "pynative", {}), (2, "pynative", {"loss_scaler": amp.StaticLossScaler(2.0**20)}),
    (3, "pynative", {"clip_norm": 0.1, "min_weight": 6.0}), (9, "pynative", {"on_nonfinite": "skip_window"}),
    pytest.param(2, "jit", {"clip_norm": 0.1}, marks=pytest.mark.slow)])
def test_windows_are_those_of_undivided_batches(pieces, way, options):
    """Control: small batches have other negatives, and another gradient and loss."""
    found, losses, status = moved(3, pieces, way, **options)
    expected, plain = by_mindspore(**options)
    assert relative(found, expected) < 1e-5
    assert losses == pytest.approx([*plain[:2], 0, plain[2]], rel=1e-5)
    assert (status.update_step, status.seen, status.trained, status.weight) == (2, 16, 0, 5)
    assert status.skipped == ("on_nonfinite" in options)
    assert status.loss == pytest.approx(plain[2], rel=1e-5)
    if pieces == 3:
        towers, _, _, undivided = two_towers()
        with running("pynative"):
            naive, loss = gradient_of(undivided, towers, pairs(7), pieces=2)
            whole, right = gradient_of(undivided, towers, pairs(7))
        assert relative(naive, whole) > 0.1
        assert abs(float(loss) - float(right)) > 0.1


# After MindCV's networks were in the process, MindSpore 2.10 does not compile it ("Illegal AnfNode for evaluating").
@pytest.mark.fresh_process("jit")
@pytest.mark.parametrize("mode", [pytest.param("jit", marks=pytest.mark.slow), "pynative"])
def test_a_batch_that_is_encoded_at_random_is_ignored(mode, capfd):
    """The window stays as it is. Control: without Dropout, the batch is trained."""
    towers, encode, loss_fn, _ = two_towers(dropout=0.5)
    with running(mode):
        step = make_grad_cache_step(encode, loss_fn, nn.SGD(towers.trainable_params(), 0.5), 3, pieces=2,
                                    network=towers)
        towers.set_train(False)
        with pytest.warns(UserWarning, match="is in evaluation mode"):
            step(*pairs(16))
        assert warned(capfd) == []
        held, buffers = step.status(), values(step.boundary.window.buffers)
        towers.set_train()
        with pytest.raises(ValueError, match=r"encode_fn returned two different .* was ignored. If it draws random"):
            step(*pairs(16))  # two draws agree in 1 of 2^32
        assert str(step.status()) == str(held)
        assert difference(values(step.boundary.window.buffers), buffers) == 0
        towers.set_train(False)
        step(*pairs(16))
        assert step.status().mini_step == 2
        assert difference(values(step.boundary.window.buffers), buffers) > 0.1
        step.reset()


@pytest.mark.parametrize("mode", ["pynative", pytest.param("jit", marks=pytest.mark.slow)])
def test_an_evaluation_is_the_loss_of_whole_batches(mode):
    """Control: halves have fewer negatives; op by op."""
    towers, encode, loss_fn, undivided = two_towers(dropout=0.5)
    towers.set_train(False)
    losses = [float(undivided(*pairs(n))) for n in (6, 4)]
    towers.set_train()
    with running(mode):
        step = make_grad_cache_step(encode, loss_fn, nn.SGD(towers.trainable_params(), 0.5), 2, pieces=2,
                                    network=towers)
        found = step.evaluate([pairs(6), pairs(4), pairs(0)])
        assert found == pytest.approx(np.average(losses, weights=(6, 4)), rel=1e-5)
        assert (towers.dropout.training, step.status().trained) == (True, 0)
        if mode == "pynative":
            halves = step.evaluate([tuple(part[i:i + 3] for part in pairs(6)) for i in (0, 3)])
            assert abs(halves - losses[0]) > 1e-2


ROW = Tensor(np.ones((4, 5), np.float32))


@pytest.mark.parametrize(("error", "message", "returned"), [
    (TypeError, "encode_fn returned neither a Tensor nor a tuple of Tensors", ()),
    (TypeError, "encode_fn returned neither a Tensor nor", (ROW, 1.0)),
    (ValueError, r"encode_fn returned a Tensor of shape \(3, 5\) for 2 samples; return a Tensor with one", ROW[:3]),
    (TypeError, "encode_fn returned Tensors of Float32, Float16; return", (ROW[:2], ROW[:2].astype(ms.float16)))])
def test_what_is_no_representation_is_an_error(error, message, returned):
    towers = Towers()

    def encode(x):
        return returned

    with running("pynative"):
        step = make_grad_cache_step(encode, unit, nn.SGD(towers.trainable_params(), 0.5), 2, pieces=2, network=towers)
        with pytest.raises(error, match=message):
            step(ROW)
        assert step.status().mini_step == 0


@pytest.mark.parametrize(("error", "message", "options"), [
    (TypeError, r"encode_fn is of type int, expected a function", {"encode_fn": 3}),
    (TypeError, r"loss_fn is of type str, expected a function", {"loss_fn": "nce"}),
    (ValueError, r"pieces is 0, expected an int >= 1", {"pieces": 0}),
    (TypeError, r"unexpected argument clipnorm; did you mean clip_norm\?", {"clipnorm": 2}),
    (ValueError, "^SkipMicrobatch looks at single pieces, .* give .skip_window.", {"on_nonfinite": "skip_microbatch"}),
    (ValueError, "^GradientNoiseScale looks at single pieces", {"stages": (GradientNoiseScale(),)}),
])
def test_bad_arguments_are_errors(error, message, options):
    towers, encode_fn, loss_fn, _ = two_towers()
    given = {"encode_fn": encode_fn, "loss_fn": loss_fn, "optimizer": nn.SGD(towers.trainable_params(), 0.5),
             "accumulate_step": 2, "pieces": 2}
    with pytest.raises(error, match=message):
        make_grad_cache_step(**{**given, **options})
