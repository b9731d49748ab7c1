"""float16 networks: an overflow in the backward pass, and training with a dynamic loss scale."""
import mindspore as ms
import numpy as np
import pytest
import reference
from conftest import MLP, batches, compiled, difference, in_modes, tensors, values
from mindspore import Parameter, Tensor, amp, nn, ops

from ms_accum import Accumulator, make_train_step


def test_a_float16_overflow_in_the_backward_is_skipped(mode):
    """The forward pass is finite; the gradient, 300 * 300, is not."""
    weights = [Parameter(Tensor([0.001], ms.float32), name=f"w{i}") for i in range(2)]
    accumulators = tuple([Accumulator(nn.SGD([weight], 0.1), 1, reduction="mean", on_nonfinite=policy)
                          for weight, policy in zip(weights, ("skip_microbatch", "skip_window"))])
    weight = weights[0]

    def forward_fn(x):
        y = (weight.astype(ms.float16) * x) * x
        return y.astype(ms.float32).mean()

    grad_fn = ms.value_and_grad(forward_fn, None, (weight,))

    def step(x):
        loss, grads = grad_fn(x)
        return loss, tuple([accumulator(grads) for accumulator in accumulators])

    step = compiled(step, mode)
    assert np.isfinite(float(step(Tensor([300.0], ms.float16))[0]))
    assert [(int(accumulator.skipped), int(accumulator.update_step)) for accumulator in accumulators] == [(1, 0)] * 2
    assert [float(w.asnumpy()[0]) for w in weights] == pytest.approx([0.001] * 2)
    step(Tensor([1.0], ms.float16))
    assert [float(w.asnumpy()[0]) for w in weights] == pytest.approx([0.001 - 0.1] * 2, rel=1e-3)


@pytest.mark.parametrize(("mode", "level"), in_modes([("O1",), ("O2",), ("O3",)], [("O2",)]))
def test_amp_networks_train(level, mode, monkeypatch):
    """`auto_mixed_precision` in float16 with a dynamic loss scale: the oracle's parameters to float16's precision."""
    monkeypatch.setenv("MS_JIT", "0" if mode == "pynative" else "1")
    network = MLP()
    start = values(network.trainable_params())
    network = amp.auto_mixed_precision(network, level, ms.float16)
    loss_fn = nn.CrossEntropyLoss()

    def forward_fn(x, y):
        return loss_fn(ops.cast(network(x), ms.float32), y)

    acc = Accumulator(nn.SGD(network.trainable_params(), 0.1), 2, reduction="mean")
    scaler = amp.DynamicLossScaler(2**10, 2, 2)
    train_step = make_train_step(forward_fn, acc, loss_scaler=scaler)
    oracle = reference.Accumulation(start, reference.SGD(0.1), 2, "mean")
    for x, y in batches([6] * 8):
        train_step(*tensors(x, y))
        oracle(reference.loss_and_gradients(oracle.parameters, x, y)[1], len(x))
    assert float(scaler.scale_value) == 2**12
    assert int(acc.update_step) == 4
    assert 0 < difference(values(network.trainable_params()), oracle.parameters) <= 5e-3
