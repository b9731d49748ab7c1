"""The networks in MindSpore: an MLP, a CNN in ResNet-18's shape, transformer blocks, MindCV's ViT, an embedding."""
from __future__ import annotations

from itertools import pairwise
from math import sqrt

import mindspore as ms
import numpy as np
from case import CLASSES, IMAGE, Case, initial_weights
from mindspore import Tensor, nn, ops

GROUPS = 8
HEAD = 64
PATCH = 8


def build(case: Case) -> nn.Cell:
    """The case's network with its initial weights."""
    kinds = {"mlp": _mlp, "cnn": _cnn, "transformer": _transformer, "vit": _vit, "embedding": Embedding}
    network = kinds[case.kind](*case.sizes)
    parameters = network.trainable_params()
    for parameter, value in zip(parameters, initial_weights([p.shape for p in parameters], case.seed)):
        # A norm's scale starts at one; every other vector at zero.
        parameter.set_data(Tensor(np.ones_like(value) if parameter.name.endswith("gamma") else value))
    return network


def _mlp(*sizes: int) -> nn.Cell:
    layers = [layer for inputs, outputs in pairwise(sizes) for layer in (nn.Dense(inputs, outputs), nn.ReLU())]
    return nn.SequentialCell(layers[:-1])


class Embedding(nn.Cell):
    """The mean of the embeddings of tokens, and a linear layer: many parameters, little to compute."""

    def __init__(self, vocabulary: int, width: int) -> None:
        super().__init__()
        self.vocabulary = vocabulary
        self.table, self.head = nn.Embedding(vocabulary, width), nn.Dense(width, CLASSES)

    def construct(self, x: Tensor) -> Tensor:
        # The case's inputs are normal numbers.
        tokens = (ops.abs(x) * 1e6).astype(ms.int32) % self.vocabulary
        return self.head(self.table(tokens).mean(1))


def _cnn(width: int, blocks: int) -> nn.Cell:
    stages = [(width, 1), (2 * width, 2), (4 * width, 2), (8 * width, 2)]
    layers, channels = [_conv(3, width, 3, 1), nn.GroupNorm(GROUPS, width), nn.ReLU()], width
    for outputs, stride in stages:
        layers += [Residual(channels, outputs, stride), *(Residual(outputs, outputs, 1) for _ in range(blocks - 1))]
        channels = outputs
    return nn.SequentialCell([*layers, MeanOver((2, 3)), nn.Dense(channels, CLASSES)])


def _transformer(width: int, blocks: int) -> nn.Cell:
    return nn.SequentialCell([*(Block(width) for _ in range(blocks)), MeanOver((1,)), nn.Dense(width, CLASSES)])


def _vit(width: int, blocks: int) -> nn.Cell:
    # The ones that MindCV has a name for start at 86 M parameters and 224 x 224 pixels.
    from mindcv.models.vit import VisionTransformer

    # Without biases in query, key and value: see Block.
    return VisionTransformer(
        image_size=IMAGE[1], patch_size=PATCH, embed_dim=width, depth=blocks, num_heads=max(width // HEAD, 1),
        qkv_bias=False, num_classes=CLASSES)


def _conv(inputs: int, outputs: int, kernel: int, stride: int) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, kernel, stride, pad_mode="pad", padding=kernel // 2, has_bias=False)


class MeanOver(nn.Cell):
    """Mean over axes."""

    def __init__(self, axes: tuple[int, ...]) -> None:
        super().__init__()
        self.axes = axes

    def construct(self, x: Tensor) -> Tensor:
        return x.mean(self.axes)


class Residual(nn.Cell):
    """ResNet's basic block, with GroupNorm: BatchNorm's statistics would differ between a batch and its pieces."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.branch = nn.SequentialCell(
            _conv(inputs, outputs, 3, stride), nn.GroupNorm(GROUPS, outputs), nn.ReLU(),
            _conv(outputs, outputs, 3, 1), nn.GroupNorm(GROUPS, outputs))
        self.shortcut = nn.Identity() if inputs == outputs else _conv(inputs, outputs, 1, stride)
        self.relu = nn.ReLU()

    def construct(self, x: Tensor) -> Tensor:
        return self.relu(self.branch(x) + self.shortcut(x))


class Block(nn.Cell):
    """A transformer block: self-attention and an MLP 4 times as wide, each after a LayerNorm and around a shortcut."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = max(width // HEAD, 1)
        self.scale = 1 / sqrt(width // self.heads)
        self.norm_attention, self.norm_mlp = nn.LayerNorm((width,)), nn.LayerNorm((width,))
        self.query, self.value, self.project = (nn.Dense(width, width) for _ in range(3))
        # The gradient of a key's bias is zero but for rounding, and no two contestants agree on rounding.
        self.key = nn.Dense(width, width, has_bias=False)
        self.mlp = nn.SequentialCell(nn.Dense(width, 4 * width), nn.ReLU(), nn.Dense(4 * width, width))

    def construct(self, x: Tensor) -> Tensor:
        x = x + self.attend(self.norm_attention(x))
        return x + self.mlp(self.norm_mlp(x))

    def attend(self, x: Tensor) -> Tensor:
        """Self-attention over axis 1 of x, `(batch, tokens, width)`."""
        scores = ops.matmul(self.by_head(self.query(x)), self.by_head(self.key(x)).swapaxes(2, 3)) * self.scale
        mixed = ops.matmul(ops.softmax(scores, axis=-1), self.by_head(self.value(x)))
        return self.project(mixed.swapaxes(1, 2).reshape(x.shape))

    def by_head(self, x: Tensor) -> Tensor:
        """`(batch, tokens, width)` to `(batch, heads, tokens, width / heads)`."""
        return x.reshape(x.shape[0], x.shape[1], self.heads, -1).swapaxes(1, 2)
