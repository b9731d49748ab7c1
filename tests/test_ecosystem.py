"""Networks and trainers of others, run for real: accumulated windows against the undivided batch."""
import functools
import subprocess
import sys

import mindspore as ms
import numpy as np
import pytest
import reference
from conftest import MLP, batches, difference, values
from mindspore import Tensor, nn
from mindspore.dataset import GeneratorDataset
from mindspore.train import Model

from ms_accum import Accumulator, FlushCallback, TrainOneStepCell

WINDOWS, ACCUMULATE_STEP, MICROBATCH = 8, 4, 2
LOSS = nn.CrossEntropyLoss()


@functools.cache
def imported(name):
    """A module of another package; where it cannot be had, the test is skipped and says why.

    Others than MindCV are tried in a process of their own: what a package for another MindSpore has patched before it fails, stays.
    """
    if not name.startswith("mindcv"):
        tried = subprocess.run([sys.executable, "-c", f"import {name}"], capture_output=True, text=True, check=False)
        if tried.returncode:
            pytest.skip(f"{name} cannot be imported ({tried.stderr.strip().splitlines()[-1]})")
    return pytest.importorskip(name, reason="pip install '.[ecosystem]'")


# --- networks -----------------------------------------------------------------------------------------------------------------


def vit():
    return imported("mindcv.models.vit").VisionTransformer(image_size=32, patch_size=8, embed_dim=32, depth=2, num_heads=4, num_classes=10)


def resnet18():
    return imported("mindcv.models").create_model("resnet18", num_classes=10)


def mobilenet():
    return imported("mindcv.models").create_model("mobilenet_v3_small_100", num_classes=10)


class TokensToLogits(nn.Cell):
    """A classifier that gives its logits alone."""

    def __init__(self, classifier):
        super().__init__(auto_prefix=False)
        self.classifier = classifier

    def construct(self, tokens):
        return self.classifier(tokens)[0]


def bert_of_mindone():
    if ms.get_context("device_target") == "CPU":
        pytest.skip("MindONE 0.5 imports, but its layers are of mindspore.mint, whose LayerNormExt has no CPU kernel in MindSpore 2.10")
    transformers = imported("mindone.transformers")
    config = imported("transformers").BertConfig(
        vocab_size=50, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64, num_labels=10,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, return_dict=False, attn_implementation="eager")
    return TokensToLogits(transformers.BertForSequenceClassification(config))


def bert_of_mindnlp():
    transformers = imported("mindnlp.transformers")
    config = transformers.BertConfig(
        vocab_size=50, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64, num_labels=10,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, return_dict=False)
    return TokensToLogits(transformers.BertForSequenceClassification(config))


def images(rng, count):
    return rng.normal(size=(count, 3, 32, 32)).astype(np.float32)


def tokens(rng, count):
    return rng.integers(0, 50, (count, 12)).astype(np.int32)


def trained(build, start, accumulate_step, microbatch, training, inputs):
    """The parameters after WINDOWS updates, from the same weights on the same samples."""
    network = build()
    for parameter, value in zip(network.get_parameters(), start):
        parameter.set_data(Tensor(value, parameter.dtype))
    acc = Accumulator(nn.Momentum(network.trainable_params(), 0.05, 0.9), accumulate_step, 1.0, reduction="mean")
    cell = TrainOneStepCell(nn.WithLossCell(network, LOSS), acc)
    cell.set_train(training)
    rng = np.random.default_rng(0)
    samples = inputs(rng, WINDOWS * ACCUMULATE_STEP * MICROBATCH)
    labels = rng.integers(0, 10, len(samples)).astype(np.int32)
    for i in range(0, len(samples), microbatch):
        cell(Tensor(samples[i:i + microbatch]), Tensor(labels[i:i + microbatch]))
    return values(p for p in network.get_parameters() if p.requires_grad), int(acc.update_step)


def compare(build, training, inputs, accumulate_step=ACCUMULATE_STEP):
    """How far accumulated and undivided parameters part, as a share of how far training moved them."""
    network = build()
    start = values(network.get_parameters())
    before = values(p for p in network.get_parameters() if p.requires_grad)
    undivided, updates = trained(build, start, 1, ACCUMULATE_STEP * MICROBATCH, training, inputs)
    accumulated, accumulated_updates = trained(build, start, accumulate_step, MICROBATCH, training, inputs)
    assert updates == WINDOWS
    assert accumulated_updates == WINDOWS * ACCUMULATE_STEP // accumulate_step
    moved = [np.linalg.norm(a - b) for a, b in zip(undivided, before)]
    assert max(moved) > 1e-2
    return np.linalg.norm([np.linalg.norm(a - b) for a, b in zip(accumulated, undivided)]) / np.linalg.norm(moved)


@pytest.mark.parametrize(("build", "context", "training", "inputs"), [
    pytest.param(vit, "graph", True, images, id="MindCV-ViT-graph"),
    pytest.param(vit, "pynative", True, images, id="MindCV-ViT-pynative"),
    # In inference mode, their statistics frozen as one fine-tunes them: with statistics of a batch, no part of it is equal to the whole.
    pytest.param(resnet18, "graph", False, images, id="MindCV-ResNet-18-graph", marks=pytest.mark.slow),
    pytest.param(mobilenet, "graph", False, images, id="MindCV-MobileNetV3-graph", marks=pytest.mark.slow),
    pytest.param(bert_of_mindone, "graph", True, tokens, id="MindONE-BERT-graph", marks=pytest.mark.slow),
    pytest.param(bert_of_mindnlp, "graph", True, tokens, id="MindNLP-BERT-graph", marks=pytest.mark.slow),
])
def test_eight_windows_are_eight_undivided_batches(mode_named, build, context, training, inputs):
    mode_named(context)
    assert compare(build, training, inputs) <= 1e-5


def test_windows_of_half_the_length_are_not(mode_named):
    """Negative control."""
    mode_named("pynative")
    assert compare(vit, True, images, accumulate_step=ACCUMULATE_STEP // 2) > 1e-2


@pytest.mark.slow
def test_batch_statistics_are_not_those_of_the_undivided_batch(mode_named):
    """Negative control for the networks with BatchNorm: in training mode they part."""
    mode_named("graph")
    assert compare(resnet18, True, images) > 1e-2


# --- MindCV's trainer -----------------------------------------------------------------------------------------------------------


def train_mindcv(make_model):
    """An MLP by a Model of MindCV's scripts and by the oracle, N = 2, clipped: the difference of the parameters."""
    microbatches = [(x.astype(np.float32) * 3, y.astype(np.int32)) for x, y in batches([6] * 8)]
    network = MLP()
    oracle = reference.Accumulation(values(network.trainable_params()), reference.SGD(0.1, 0.9), 2, "mean", 0.3)
    for x, y in microbatches:
        oracle(reference.loss_and_gradients(oracle.parameters, x, y)[1], len(x))
    model, callbacks = make_model(network, nn.Momentum(network.trainable_params(), 0.1, 0.9))
    model.train(1, GeneratorDataset(microbatches, ["x", "y"], shuffle=False), callbacks=callbacks, dataset_sink_mode=False)
    evaluated = model.eval(GeneratorDataset(microbatches[:1], ["x", "y"], shuffle=False), dataset_sink_mode=False)
    weights = values(network.trainable_params())
    assert evaluated["loss"] == pytest.approx(reference.loss_and_gradients(weights, *microbatches[0])[0], rel=1e-4)
    return difference(weights, oracle.parameters)


def mindcvs_own(network, optimizer):
    """As `create_trainer` is called by MindCV's train.py with gradient_accumulation_steps: 2 and clip_grad: True."""
    return imported("mindcv.utils").create_trainer(
        network, LOSS, optimizer, {"loss"}, amp_level="O0", amp_cast_list=None, loss_scale_type="fixed", loss_scale=1.0,
        drop_overflow_update=False, clip_grad=True, clip_value=0.3, gradient_accumulation_steps=2), []


def mindcv_with_ms_accum(network, optimizer):
    """The lines that replace it."""
    accumulator = Accumulator(optimizer, accumulate_step=2, clip_norm=0.3, reduction="mean")
    train_cell = TrainOneStepCell(nn.WithLossCell(network, LOSS), accumulator)
    model = Model(train_cell, eval_network=nn.WithEvalCell(network, LOSS), metrics={"loss"}, eval_indexes=[0, 1, 2])
    return model, [FlushCallback()]


@pytest.mark.parametrize(("make_model", "exact"), [(mindcv_with_ms_accum, True), (mindcvs_own, False)])
def test_mindcvs_trainer_clips_each_microbatch_and_its_replacement_the_window(mode_named, make_model, exact):
    """MindCV's own is the negative control: a clipped sum of clipped gradients is another update."""
    mode_named("graph")
    error = train_mindcv(make_model)
    assert (error <= 1e-5) == exact
    assert exact or error > 1e-3
    assert ms.get_context("mode") == ms.GRAPH_MODE
