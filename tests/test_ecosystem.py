"""Networks of MindCV: accumulated windows against the undivided batch, and what check_equivalence says."""
import mindspore as ms
import numpy as np
import pytest
from conftest import mean_loss, values
from mindspore import Tensor, nn

from ms_accum import Accumulator, TrainOneStepCell, batchnorm_to_groupnorm, check_equivalence

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


def trained(build, start, accumulate_step, microbatch, training, windows):
    """The parameters after so many updates, or more of shorter windows, from the same weights on the same samples."""
    network = build()
    for parameter, value in zip(network.get_parameters(), start):
        parameter.set_data(Tensor(value, parameter.dtype))
    acc = Accumulator(nn.Momentum(network.trainable_params(), 0.05, 0.9), accumulate_step, 1.0, reduction="mean")
    cell = TrainOneStepCell(nn.WithLossCell(network, LOSS), acc)
    cell.set_train(training)
    rng = np.random.default_rng(0)
    samples = rng.normal(size=(windows * ACCUMULATE_STEP * MICROBATCH, 3, 32, 32)).astype(np.float32)
    labels = rng.integers(0, 10, len(samples)).astype(np.int32)
    for i in range(0, len(samples), microbatch):
        cell(Tensor(samples[i:i + microbatch]), Tensor(labels[i:i + microbatch]))
    assert int(acc.update_step) * accumulate_step * microbatch == len(samples)
    return values(p for p in network.get_parameters() if p.requires_grad)


def errors(build, training, *accumulate_steps, windows=WINDOWS):
    """How far accumulated and undivided parameters part, as a share of how far training moved them."""
    ms.set_seed(1)  # with other weights, a rounding error may put an activation on the other side of ReLU's kink
    network = build()
    start = values(network.get_parameters())
    before = values(p for p in network.get_parameters() if p.requires_grad)
    undivided = trained(build, start, 1, ACCUMULATE_STEP * MICROBATCH, training, windows)
    moved = [np.linalg.norm(a - b) for a, b in zip(undivided, before)]
    assert max(moved) > 1e-2

    def parted(accumulate_step):
        accumulated = trained(build, start, accumulate_step, MICROBATCH, training, windows)
        return np.linalg.norm([np.linalg.norm(a - b) for a, b in zip(accumulated, undivided)]) / np.linalg.norm(moved)
    return [parted(accumulate_step) for accumulate_step in accumulate_steps]


@pytest.mark.slow  # the suite's fast sample: the block of MindCV in test_other_libraries.py
@pytest.mark.parametrize(("build", "training", "exact"), [
    (vit, True, True),
    # In inference mode, with frozen statistics, as one fine-tunes them: of batch statistics, no part equals the whole.
    (resnet18, False, True), (mobilenet, False, True), (resnet18, True, False)])
def test_windows_are_undivided_batches(mode_named, build, training, exact):
    """Negative control: batch statistics in training mode."""
    mode_named("graph")
    (error,) = errors(build, training, ACCUMULATE_STEP)
    assert (error <= 1e-5, error > 1e-2) == (exact, not exact)


def test_op_by_op_too_but_not_with_windows_of_half_the_length(mode_named):
    mode_named("pynative")
    error, of_half = errors(vit, True, ACCUMULATE_STEP, ACCUMULATE_STEP // 2, windows=2)
    assert error <= 1e-5
    assert of_half > 1e-2


# --- check_equivalence ------------------------------------------------------------------------------------------------

BATCH = Tensor(np.random.default_rng(0).normal(size=(4, 3, 32, 32)), ms.float32), Tensor([1, 2, 3, 4], ms.int32)


@pytest.mark.parametrize("dtype", ["float32", pytest.param("float16", marks=pytest.mark.slow)])
def test_a_vit_is_exact_but_for_its_masks(dtype):
    ms.set_seed(3)  # with seeds 1 and 2, a LayerNorm is named, too, in float16
    network = vit(patch_size=16, embed_dim=24, depth=2, num_heads=3,
                  drop_rate=0.1, attn_drop_rate=0.1, drop_path_rate=0.2)
    network.set_train()
    if dtype == "float16":
        network.to_float(ms.float16)

    forward_fn = mean_loss(network)
    report = check_equivalence(forward_fn, network, BATCH, 2)
    assert report.ok
    assert {(c.type, c.what.split(":")[0]) for c in report.causes} == {("Dropout", "random")}
    assert {"head_drop", "blocks.1.drop_path1.dropout"} <= {c.layer for c in report.causes}

    def sum_loss(x, y):
        return forward_fn(x, y) * len(x)
    assert not check_equivalence(sum_loss, network, BATCH, 2).ok  # negative control


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
