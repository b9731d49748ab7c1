"""A byte-level transformer, its loss in bits per byte, and a function that generates text."""
from __future__ import annotations

from collections.abc import Callable
from math import log, sqrt

import mindspore as ms
import numpy as np
from data import PADDING, WIDTHS
from mindspore import Parameter, Tensor, nn, ops

FEATURES = 192
LAYERS = 2
HEADS = 4
BYTES = 256


class Network(nn.Cell):
    """A causal transformer over bytes: learned positions, pre-norm blocks of attention and ReLU, a final LayerNorm.

    Weights are normal with standard deviation 0.02, those that add to the residual stream 1 / sqrt(2 layers) of it, as
    in GPT-2; drawn by NumPy from `seed`, and thus the same on every device.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(BYTES + 1, FEATURES)
        self.positions = Parameter(Tensor(np.zeros((WIDTHS[-1], FEATURES)), ms.float32), name="positions")
        self.blocks = nn.SequentialCell(*[Block() for _ in range(LAYERS)])
        self.norm = nn.LayerNorm((FEATURES,))
        self.head = nn.Dense(FEATURES, BYTES, has_bias=False)
        rng = np.random.default_rng(seed)
        for parameter in self.get_parameters():
            if parameter.ndim == 2:
                spread = 0.02 / sqrt(2 * LAYERS) if "out" in parameter.name else 0.02
                parameter.set_data(Tensor(rng.normal(0, spread, parameter.shape), ms.float32))

    def construct(self, tokens: Tensor) -> Tensor:
        """Return logits, float32 `(n, width, 256)`, of each byte of tokens, int32 `(n, width)`, given those before it.

        A row begins at the start of a document, or inside one that is longer than the context.
        """
        start = ops.full((tokens.shape[0], 1), PADDING, dtype=ms.int32)
        x = self.embedding(ops.cat((start, tokens[:, :-1]), 1)) + self.positions[:tokens.shape[1]]
        return self.head(self.norm(self.blocks(x)))


class Block(nn.Cell):
    """Add attention over the bytes before, then a hidden layer of four times the width: `(n, width, features)`."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_attention, self.norm_hidden = nn.LayerNorm((FEATURES,)), nn.LayerNorm((FEATURES,))
        self.attention = nn.MultiheadAttention(FEATURES, HEADS, has_bias=False, batch_first=True)
        # Not GELU, whose kernels take as long as attention (MindSpore 2.10 on CPU).
        self.hidden = nn.Dense(FEATURES, 4 * FEATURES, has_bias=False, activation=nn.ReLU())
        self.out = nn.Dense(4 * FEATURES, FEATURES, has_bias=False)
        # Finite: in a row of -inf alone, softmax is NaN.
        self.future = Tensor(np.triu(np.full((WIDTHS[-1], WIDTHS[-1]), -1e9), 1), ms.float32)

    def construct(self, x: Tensor) -> Tensor:
        """See the class."""
        width = x.shape[1]
        normed = self.norm_attention(x)
        attended = self.attention(normed, normed, normed, need_weights=False, attn_mask=self.future[:width, :width],
                                  average_attn_weights=False)
        x = x + attended[0]
        return x + self.out(self.hidden(self.norm_hidden(x)))


class BitsPerByte(nn.Cell):
    """Return the mean of -log2 p over all bytes of tokens, int32 `(n, width)`: float32 `()`. `PADDING` is ignored."""

    def __init__(self, network: Network) -> None:
        super().__init__(auto_prefix=False)
        self.network = network
        self.log_softmax, self.nll = ops.LogSoftmax(), nn.NLLLoss(ignore_index=PADDING)

    def construct(self, tokens: Tensor) -> Tensor:
        """See the class."""
        log_p = self.log_softmax(self.network(tokens).reshape(-1, BYTES))
        return self.nll(log_p, tokens.reshape(-1)) / log(2)


def count_bytes(tokens: Tensor) -> Tensor:
    """Return the number of bytes that the mean of `BitsPerByte` divides by: int32 `()`."""
    return (tokens != PADDING).astype(ms.int32).sum(-1).sum()


def generate(logits: Callable[[Tensor], Tensor], length: int, seed: int, temperature: float = 0.7) -> str:
    """Return `length` bytes that a network generates without a prompt, as printable text.

    `logits` is a `Network`, compiled or not. It is always called with one row of the same shape.
    """
    rng = np.random.default_rng(seed)
    generated: list[int] = []
    for _ in range(length):
        recent = generated[1 - WIDTHS[-1]:]
        tokens = np.full((1, WIDTHS[-1]), PADDING, np.int32)
        tokens[0, :len(recent)] = recent
        scores = logits(Tensor(tokens)).asnumpy()[0, len(recent)].astype(np.float64) / temperature
        # The largest of scores with Gumbel noise is a sample of their softmax.
        generated.append(int((scores + rng.gumbel(size=BYTES)).argmax()))
    return "".join(letter if letter.isprintable() else " " for letter in bytes(generated).decode(errors="replace"))
