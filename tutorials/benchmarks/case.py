"""What a contestant is given: a network by name, a window of data, initial weights. NumPy only, for every framework."""
from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from math import prod, sqrt

import numpy as np

CLASSES = 10
TOKENS = 32
IMAGE = (3, 32, 32)


@dataclass(frozen=True)
class Case:
    """What is trained.

    Attributes:
        network: "mlp-784-512-512-10": layer sizes. "cnn-64x2": channels and blocks of a first stage.
            "transformer-384x6", "vit-192x6": width and blocks. "embedding-80000x128": vocabulary and
            width.
        batch: Samples in a microbatch.
        accumulate_step: Microbatches in a window.
        lr: Learning rate.
        seed: Of the data and the initial weights.
        ranks: Processes that share a window, each with `accumulate_step` microbatches of its own.
        cut: Pieces that a microbatch is cut into, by who can; 1: who cuts gets a window as one batch.
        optimizer: Its name in `mindspore.nn`; PyTorch and JAX always take SGD.
    """

    network: str
    batch: int
    accumulate_step: int = 4
    lr: float = 1e-2
    seed: int = 0
    ranks: int = 1
    cut: int = 1
    optimizer: str = "SGD"

    @property
    def kind(self) -> str:
        """"mlp", "cnn", "transformer", "vit" or "embedding"."""
        return self.network.split("-")[0]

    @property
    def sizes(self) -> tuple[int, ...]:
        """The numbers in the network's name."""
        return tuple(int(size) for size in self.network.partition("-")[2].replace("x", "-").split("-"))

    @property
    def window(self) -> int:
        """Samples in a window."""
        return self.batch * self.accumulate_step * self.ranks

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of one sample."""
        return {"mlp": (self.sizes[0],), "embedding": (TOKENS,),
                "transformer": (TOKENS, self.sizes[0])}.get(self.kind, IMAGE)


def samples(case: Case, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Normal inputs, float32 `(count, *input_shape)`, and labels, int32 `(count,)`."""
    rng = np.random.default_rng(case.seed)
    labels = rng.integers(0, CLASSES, count).astype(np.int32)
    return rng.standard_normal((count, *case.input_shape), dtype=np.float32), labels


def mlp_shapes(case: Case) -> list[tuple[int, ...]]:
    """Shapes of an MLP's parameters: weight `(outputs, inputs)` and bias `(outputs,)` of each layer in turn."""
    return [shape for inputs, outputs in pairwise(case.sizes) for shape in ((outputs, inputs), (outputs,))]


def initial_weights(shapes: list[tuple[int, ...]], seed: int) -> list[np.ndarray]:
    """Matrices and kernels uniform in ±1/sqrt(inputs), vectors zero; float32."""
    rng = np.random.default_rng(seed)
    return [_initial(shape, rng) for shape in shapes]


def _initial(shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    if len(shape) < 2:
        return np.zeros(shape, np.float32)
    bound = 1 / sqrt(prod(shape[1:]))
    return rng.uniform(-bound, bound, shape).astype(np.float32)
