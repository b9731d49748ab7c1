"""check_equivalence on networks that others wrote: MindCV's ResNet-18 and a ViT."""
import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn

from ms_accum import batchnorm_to_groupnorm, check_equivalence

mindcv = pytest.importorskip("mindcv", reason="needs MindCV: pip install '.[ecosystem]'")
CE = nn.CrossEntropyLoss()
BATCH = Tensor(np.random.default_rng(0).normal(size=(4, 3, 32, 32)), ms.float32), Tensor([1, 2, 3, 4], ms.int32)


def vit():
    from mindcv.models.vit import VisionTransformer
    return VisionTransformer(image_size=32, patch_size=16, embed_dim=24, depth=2, num_heads=3, num_classes=10, drop_rate=0.1,
                             attn_drop_rate=0.1, drop_path_rate=0.2).set_train()


@pytest.mark.parametrize("dtype", ["float32", pytest.param("float16", marks=pytest.mark.slow)])
def test_a_vit_is_exact_but_for_its_masks(dtype):
    network = vit()
    if dtype == "float16":
        network.to_float(ms.float16)

    def forward_fn(x, y):
        return CE(network(x).astype(ms.float32), y)
    report = check_equivalence(forward_fn, network, BATCH, 2)
    assert report.ok
    assert {(c.type, c.what.split(":")[0]) for c in report.causes} == {("Dropout", "random")}
    assert {"head_drop", "blocks.1.drop_path1.dropout"} <= {c.layer for c in report.causes}

    def sum_loss(x, y):
        return CE(network(x).astype(ms.float32), y) * len(x)
    assert not check_equivalence(sum_loss, network, BATCH, 2).ok  # negative control


@pytest.mark.slow  # the suite's fast sample: small networks with BatchNorm in tests/check
def test_a_resnet_has_batch_statistics_until_they_are_replaced():
    network = mindcv.create_model("resnet18", num_classes=10).set_train()
    parameters = {p.name: id(p) for p in network.trainable_params()}
    layers = [name for name, cell in network.cells_and_names() if isinstance(cell, nn.BatchNorm2d)]
    assert len(layers) == 20

    def forward_fn(x, y):
        return CE(network(x), y)
    report = check_equivalence(forward_fn, network, BATCH, 2)
    assert not report.ok
    assert sorted((c.layer, c.type, c.what.split(":")[0]) for c in report.causes) == [
        (name, "BatchNorm2d", "batch statistics") for name in sorted(layers)]
    assert sorted(batchnorm_to_groupnorm(network)) == sorted(layers)
    assert {p.name: id(p) for p in network.trainable_params()} == parameters
    report = check_equivalence(forward_fn, network, BATCH, 2)
    assert report.ok
    assert report.causes == ()
