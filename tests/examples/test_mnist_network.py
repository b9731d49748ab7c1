"""The tutorial's network, its loss, and the order of the digits, against NumPy."""
import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor

from ms_accum.examples.mnist import data
from ms_accum.examples.mnist.network import Network, make_forward
from ms_accum.examples.mnist.train import order
from ms_accum.examples.program import largest_difference


def logits_in_numpy(network, images):
    """What the tutorial computes, in float64."""
    # By their order: another test's accumulator that still lives may have had its names.
    weights = [p.asnumpy().astype(np.float64) for p in network.get_parameters()]
    x = (images.reshape(len(images), 784) / 255 - 0.1307) / 0.3081
    for layer in range(3):
        x = x @ weights[2 * layer].T + weights[2 * layer + 1]
        if layer < 2:
            x = np.maximum(x, 0)
    return x


@pytest.mark.parametrize("dtype", [ms.float32, ms.float64])
def test_network_and_loss_are_those_of_the_tutorial(dtype):
    images, labels = data.load("embedded").test.batch(np.arange(90))
    network = Network(3, dtype)
    expected = logits_in_numpy(network, images)
    assert np.abs(ms.jit(network)(Tensor(images)).asnumpy() - expected).max() < 2e-6
    losses = np.log(np.exp(expected).sum(axis=1)) - expected[np.arange(90), labels]
    loss = ms.jit(make_forward(network))(Tensor(images), Tensor(labels))
    assert float(loss) == pytest.approx(losses.mean(), abs=2e-6)
    assert {p.name: p.shape for p in network.get_parameters()} == {
        "dense_relu_sequential.0.weight": (512, 784), "dense_relu_sequential.0.bias": (512,),
        "dense_relu_sequential.2.weight": (512, 512), "dense_relu_sequential.2.bias": (512,),
        "dense_relu_sequential.4.weight": (10, 512), "dense_relu_sequential.4.bias": (10,)}


def test_the_weights_have_a_seed_and_networks_a_distance():
    one, other = Network(1), Network(1)
    assert largest_difference(one, other) == 0 < 0.01 < largest_difference(one, Network(2))
    bias = other.dense_relu_sequential[4].bias
    bias.set_data(Tensor(np.where(np.arange(10) == 3, bias.asnumpy() - 0.5, bias.asnumpy())))
    assert largest_difference(one, other) == largest_difference(other, one) == pytest.approx(0.5)
    bias.set_data(Tensor(np.full(10, np.nan, np.float32)))
    assert np.isnan(largest_difference(one, other))


def test_each_epoch_takes_every_digit_once_in_its_seeded_order():
    taken = [order(90, 16, seed, epoch) for seed, epoch in ((42, 1), (42, 2), (7, 1))]
    assert [[len(rows) for rows in microbatches] for microbatches in taken] == [[16] * 5 + [10]] * 3
    orders = [np.concatenate(microbatches).tolist() for microbatches in taken]
    assert all(sorted(rows) == list(range(90)) for rows in orders)
    assert len({tuple(rows) for rows in orders}) == 3
    assert np.concatenate(order(90, 64, 42, 1)).tolist() == orders[0]
