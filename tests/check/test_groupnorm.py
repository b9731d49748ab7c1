"""batchnorm_to_groupnorm: what it replaces, what it keeps, what the new layers compute."""
import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn
from support.layers import labels, normal

from ms_accum import batchnorm_to_groupnorm, check_equivalence
from ms_accum.check.groupnorm import groups_for
from ms_accum.selftest.networks import mean_loss


class Tree(nn.Cell):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm2d(6)
        self.blocks = nn.CellList([nn.SequentialCell(nn.Conv2d(6, 6, 1), nn.BatchNorm2d(6)) for _ in range(2)])
        self.again, self.named = self.norm, nn.CellDict({"norm": nn.BatchNorm2d(6)})
        self.deep, self.flat, self.out = nn.BatchNorm3d(6), nn.BatchNorm1d(6), nn.Dense(6, 3)
        self.kept = nn.BatchNorm1d(6, use_batch_statistics=False)

    def construct(self, x):
        x = self.named["norm"](self.norm(x))
        for block in self.blocks:
            x = x + block(x)
        x = self.deep(self.again(x).expand_dims(2)).mean((2, 3, 4))
        return self.out(self.kept(self.flat(x)))


def test_every_place_gets_a_groupnorm():
    network = Tree().set_train()
    for seed, p in enumerate(network.trainable_params()):
        p.set_data(normal(*p.shape, seed=seed))
    network.blocks[0][1].beta.requires_grad = False
    network.flat.training = False
    before = [(p.name, id(p), p.asnumpy().tobytes()) for p in network.trainable_params()]
    batch = normal(8, 6, 4, 4), labels(8)
    assert not check_equivalence(mean_loss(network), network, batch, 4).ok
    assert sorted(batchnorm_to_groupnorm(network, num_groups=4)) == [
        "again", "blocks.0.1", "blocks.1.1", "deep", "flat", "named.norm", "norm"]
    assert sorted((p.name, id(p), p.asnumpy().tobytes()) for p in network.trainable_params()) == sorted(before)
    assert network.again is network.norm
    assert not network.blocks[0][1].beta.requires_grad
    assert [network.norm.num_groups, network.flat.num_groups] == [3, 1]
    assert (network.norm.training, network.flat.training) == (True, False)
    assert isinstance(network.kept, nn.BatchNorm1d)
    assert not any("moving" in p.name for p in network.get_parameters() if "kept" not in p.name)
    assert check_equivalence(mean_loss(network), network, batch, 4).ok
    assert batchnorm_to_groupnorm(network) == []

    def forward(x):
        return network(x)
    np.testing.assert_allclose(ms.jit(forward)(batch[0]).asnumpy(), forward(batch[0]).asnumpy(), atol=1e-5)


@pytest.mark.parametrize(("layer", "shape"), [
    (nn.BatchNorm1d, (3, 16)), (nn.BatchNorm1d, (3, 16, 5)), (nn.BatchNorm2d, (3, 6, 2, 2)),
    (nn.BatchNorm3d, (3, 6, 2, 2, 2))])
def test_a_groupnorm_computes_what_numpy_does(layer, shape):
    network = nn.SequentialCell(layer(shape[1]))
    gamma, beta = network.trainable_params()
    gamma.set_data(normal(shape[1], seed=3))
    beta.set_data(normal(shape[1], seed=4))
    assert batchnorm_to_groupnorm(network, 2) == ["0"]
    x = normal(*shape).asnumpy().astype(np.float64)
    grouped = x.reshape(3, 2, -1)
    centred = grouped - grouped.mean(-1, keepdims=True)
    plain = (centred / np.sqrt(grouped.var(-1, keepdims=True) + 1e-5)).reshape(shape)
    by_channel = (1, shape[1]) + (1,) * (len(shape) - 2)
    expected = plain * gamma.asnumpy().reshape(by_channel) + beta.asnumpy().reshape(by_channel)
    np.testing.assert_allclose(network(Tensor(x.astype(np.float32))).asnumpy(), expected, atol=1e-5)


def test_groups_fit_the_channels_and_bad_replacements_are_refused():
    for channels, num_groups, alone, groups in (
            (64, 32, False, 32), (64, 32, True, 8), (256, 32, True, 32), (32, 32, False, 32), (32, 32, True, 4),
            (32, 2, True, 2), (48, 32, False, 24), (24, 32, False, 12), (10, 32, False, 5), (7, 32, False, 1),
            (7, 7, False, 7), (1, 32, False, 1), (6, 4, False, 3), (2, 32, True, 1)):
        assert groups_for(channels, num_groups, alone) == groups
    network, last = nn.SequentialCell(nn.BatchNorm2d(4), nn.BatchNorm1d(1)), nn.SequentialCell(nn.BatchNorm2d(4))
    last[0].format = "NHWC"  # which MindSpore builds on GPU only
    for arguments, error, message in (
            ((3,), TypeError, "network is of type int, expected a mindspore.nn.Cell"),
            ((nn.BatchNorm1d(4),), ValueError, "network is itself a BatchNorm1d"),
            ((network, 0), ValueError, "num_groups is 0, expected an int >= 1"),
            ((last,), ValueError, "0 has data_format='NHWC', expected 'NCHW'"),
            ((network,), ValueError, "1 is a BatchNorm1d of 1 channel")):
        with pytest.raises(error, match=message):
            batchnorm_to_groupnorm(*arguments)
    assert isinstance(network[0], nn.BatchNorm2d)  # an error replaces nothing
