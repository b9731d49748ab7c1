"""Networks of MindCV: accumulated windows against the undivided batch, and what check_equivalence says."""
import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn

from ms_accum import TrainOneStepCell, batchnorm_to_groupnorm, check_equivalence
from ms_accum.selftest.comparing import values
from ms_accum.selftest.networks import mean_loss

mindcv = pytest.importorskip("mindcv", reason="needs MindCV: pip install '.[test]'")
WINDOWS, ACCUMULATE_STEP, MICROBATCH = 3, 4, 2
LOSS = nn.CrossEntropyLoss()


def vit(patch_size=8, embed_dim=32, depth=1, num_heads=4, **dropout):
    from mindcv.models.vit import VisionTransformer
    return VisionTransformer(image_size=32, patch_size=patch_size, embed_dim=embed_dim, depth=depth,
                             num_heads=num_heads, num_classes=10, **dropout)


def resnet18():
    return mindcv.create_model("resnet18", num_classes=10)


def mobilenet():
    return mindcv.create_model("mobilenet_v3_small_100", num_classes=10)


def trained(build, start, accumulate_step, microbatch, training):
    """The parameters after some updates, from the same weights on the same samples."""
    network = build()
    for parameter, value in zip(network.get_parameters(), start):
        parameter.set_data(Tensor(value, parameter.dtype))
    cell = TrainOneStepCell(nn.WithLossCell(network, LOSS), nn.Momentum(network.trainable_params(), 0.05, 0.9),
                            accumulate_step, clip_norm=1.0)
    cell.set_train(training)
    rng = np.random.default_rng(0)
    samples = rng.normal(size=(WINDOWS * ACCUMULATE_STEP * MICROBATCH, 3, 32, 32)).astype(np.float32)
    labels = rng.integers(0, 10, len(samples)).astype(np.int32)
    for i in range(0, len(samples), microbatch):
        cell(Tensor(samples[i:i + microbatch]), Tensor(labels[i:i + microbatch]))
    assert cell.status().update_step == WINDOWS
    return np.concatenate([value.ravel() for value in values(network.trainable_params())])


@pytest.mark.slow  # the suite's fast sample: the block of MindCV in test_other_libraries.py
@pytest.mark.parametrize(("build", "training", "exact"), [
    (vit, True, True),
    # In inference mode, with frozen statistics, as one fine-tunes them: of batch statistics, no part equals the whole.
    (resnet18, False, True), (mobilenet, False, True), (resnet18, True, False)])
def test_windows_are_undivided_batches(mode_named, build, training, exact):
    """By the error as a share of how far training moves the parameters. Negative control: batch statistics."""
    mode_named("graph")
    ms.set_seed(1)  # with other weights, a rounding error may put an activation on the other side of ReLU's kink
    network = build()
    start = values(network.get_parameters())
    before = np.concatenate([value.ravel() for value in values(network.trainable_params())])
    undivided = trained(build, start, 1, ACCUMULATE_STEP * MICROBATCH, training)
    accumulated = trained(build, start, ACCUMULATE_STEP, MICROBATCH, training)
    moved = np.linalg.norm(undivided - before)
    assert moved > 1e-2
    error = np.linalg.norm(accumulated - undivided) / moved
    assert (error <= 1e-5, error > 1e-2) == (exact, not exact)


# --- check_equivalence ------------------------------------------------------------------------------------------------

BATCH = Tensor(np.random.default_rng(0).normal(size=(4, 3, 32, 32)), ms.float32), Tensor([1, 2, 3, 4], ms.int32)


@pytest.mark.parametrize("dtype", ["float32", pytest.param("float16", marks=pytest.mark.slow)])
def test_a_vit_is_exact_but_for_its_masks(dtype):
    ms.set_seed(3)
    network = vit(patch_size=16, embed_dim=24, depth=2, num_heads=3,
                  drop_rate=0.1, attn_drop_rate=0.1, drop_path_rate=0.2)
    network.set_train()
    if dtype == "float16":
        network.to_float(ms.float16)
    forward_fn = mean_loss(network)
    report = check_equivalence(forward_fn, network, BATCH, 2)
    rounded = {("function", "rounding")} if dtype == "float16" else set()  # then it cannot tell
    assert report.ok is (None if rounded else True)
    assert {(c.type, c.what.split(":")[0]) for c in report.causes} == {("Dropout", "random"), *rounded}
    assert {"head_drop", "blocks.1.drop_path1.dropout"} <= {c.layer for c in report.causes}

    def sum_loss(x, y):
        return forward_fn(x, y) * len(x)
    assert check_equivalence(sum_loss, network, BATCH, 2).ok is False  # negative control


@pytest.mark.slow  # the suite's fast sample: small networks with BatchNorm in tests/check
def test_a_resnet_has_batch_statistics_until_they_are_replaced():
    ms.set_seed(2)  # with seeds 1 and 3, the check with GroupNorm asks for other weights
    network = resnet18().set_train()
    parameters = {p.name: id(p) for p in network.trainable_params()}
    layers = [name for name, cell in network.cells_and_names() if isinstance(cell, nn.BatchNorm2d)]
    assert len(layers) == 20
    report = check_equivalence(mean_loss(network), network, BATCH, 2)
    assert not report.ok
    assert sorted((c.layer, c.type, c.what.split(":")[0]) for c in report.causes) == [
        (name, "BatchNorm2d", "batch statistics") for name in sorted(layers)]
    assert sorted(batchnorm_to_groupnorm(network)) == sorted(layers)
    assert {p.name: id(p) for p in network.trainable_params()} == parameters
    report = check_equivalence(mean_loss(network), network, BATCH, 2)
    assert report.ok
    assert report.causes == ()
