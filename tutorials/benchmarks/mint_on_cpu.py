"""Replace the operators of `mindspore.mint` that have no CPU kernel (MindSpore 2.10), so that MindONE's networks run on a CPU.

Call `install()` before MindONE is imported. Not a part of ms_accum: on Ascend nothing has to be replaced.
"""
from __future__ import annotations

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, mint, nn, ops
from mindspore.common.initializer import Normal, initializer


def arange(start, end=None, step=1, *, dtype=ms.int64):
    """`mint.arange` of Python numbers, whose result is a constant."""
    start, end = (0, start) if end is None else (start, end)
    return ops.arange(start, end, step).astype(dtype)


def addmm(bias, left, right):
    return ops.matmul(left, right) + bias


def pad(x, padding, mode="constant", value=0.0):
    """Of the last axis, on the right, by a constant."""
    ends = ops.zeros((*x.shape[:-1], padding[1]), x.dtype) + value
    return ops.cat((x, ends.astype(x.dtype)), axis=-1)


def gelu(x, *, approximate="none"):
    return ops.gelu(x, approximate)


def zeros_like(x, *, dtype=None):
    return ops.zeros(x.shape, dtype or x.dtype)


def full(size, value, *, dtype=ms.float32):
    return ops.zeros(size, dtype) + value


class CrossEntropyLoss(nn.Cell):
    """The mean, or the sum, over the targets that are not ignored."""

    def __init__(self, weight=None, ignore_index=-100, reduction="mean", label_smoothing=0.0):
        super().__init__()
        self.ignore_index, self.reduction = ignore_index, reduction

    def construct(self, logits, labels):
        return ops.cross_entropy(logits, labels.astype(ms.int32), ignore_index=self.ignore_index, reduction=self.reduction)


class Embedding(nn.Cell):
    """`mint.nn.Embedding`; the gradient of a padding row is not masked."""

    def __init__(self, num_embeddings, embedding_dim, padding_idx=None, *_, dtype=ms.float32, **__):
        super().__init__()
        self.weight = Parameter(initializer(Normal(1.0), (num_embeddings, embedding_dim), dtype), name="weight")
        self.padding_idx = padding_idx

    def construct(self, ids):
        return ops.gather(self.weight, ids, 0)


class LayerNorm(nn.Cell):
    def __init__(self, normalized_shape, eps=1e-5, elementwise_affine=True, bias=True, dtype=ms.float32):
        super().__init__()
        shape = (normalized_shape,) if isinstance(normalized_shape, int) else tuple(normalized_shape)
        self.axes, self.eps = tuple(range(-len(shape), 0)), eps
        self.weight = Parameter(Tensor(np.ones(shape), dtype), name="weight")
        self.bias = Parameter(Tensor(np.zeros(shape), dtype), name="bias")

    def construct(self, x):
        centred = x - x.mean(self.axes, keep_dims=True)
        variance = centred.square().mean(self.axes, keep_dims=True)
        return centred * ops.rsqrt(variance + self.eps) * self.weight + self.bias


def install() -> None:
    for function in (arange, addmm, zeros_like, full):
        setattr(mint, function.__name__, function)
    for function in (pad, gelu):
        setattr(mint.nn.functional, function.__name__, function)
    for cell in (CrossEntropyLoss, Embedding, LayerNorm):
        setattr(mint.nn, cell.__name__, cell)
