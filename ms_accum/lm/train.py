"""The reference run on text: its train step, its order, and its validation."""
from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn

from ms_accum.reference import train
from ms_accum.reference.train import AnyStep, Epoch, Words, make_accumulator, make_adam, of_all_ranks
from ms_accum.train_step import make_train_step
from ms_accum.window import until_weight

from .data import Documents, Text, microbatches
from .network import BitsPerByte, Network, count_bytes, count_one, generate
from .settings import AT_MOST, Settings

GENERATED = 80


class Task(train.Task):
    """Train a transformer on documents; test how many bits it needs for each byte of the others.

    Args:
        text: The documents.
        settings: What to compute.
        source: The name of the text.
    """

    command = "lm"
    words = Words(
        rows="rows",
        unit="bytes",
        score="validation",
        score_format="validation {:.4f} bits per byte",
        score_axis="bits per byte",
        score_title="Validation documents",
        loss_axis="bits per byte",
        loss_title="Training: each microbatch, and mean of an epoch",
    )

    def __init__(self, text: Text, settings: Settings, source: str = "") -> None:
        self.text, self.settings, self.source = text, settings, source
        self.label = "token mean" if settings.weigh_bytes else "mean of means"
        self.network = Network(settings.seed)
        self.data, self.identity = text.train, text.identity

    def make_step(self) -> AnyStep:
        """Make the train step that the settings describe."""
        settings = self.settings
        optimizer = make_adam(self.network, settings.lr)
        length = until_weight(settings.budget, at_most=AT_MOST) if settings.budget else settings.accumulate_step
        return make_train_step(
            BitsPerByte(self.network), make_accumulator(optimizer, settings, length), pieces=settings.pieces,
            weight_fn=count_bytes if settings.weigh_bytes else count_one)

    def order(self, epoch: int) -> list[np.ndarray]:
        """Return the rows of each microbatch of an epoch: of one width each, in seeded order."""
        rng = np.random.default_rng([self.settings.seed, epoch])
        found = microbatches(self.data, rng.permutation(len(self.data)), self.settings.batch_size)
        return [found[i] for i in rng.permutation(len(found))]

    def make_test(self) -> Callable[[], float]:
        """Return `() -> bits per byte of the validation documents`."""
        return partial(evaluate, self._as_run(BitsPerByte(self.network)), self.text.validation, self.settings)

    def _as_run(self, cell: nn.Cell) -> Callable[[Tensor], Tensor]:
        return ms.jit(cell) if self.settings.mode == "graph" else cell

    def counterpart(self) -> Task:
        """Return the same run as a mean of means."""
        return Task(self.text, self.settings.mean_of_means(), self.source)

    def describe_data(self) -> str:
        """Name the text, count its documents and bytes, and say how far single bytes go."""
        (documents, held_out), validation = self.text.documents, self.text.validation
        return (f"{self.source}: {documents:,} documents of {self.data.size:,} bytes to train on, {held_out:,} of "
                f"{validation.size:,} to validate on; {self.data.entropy():.2f} bits for a byte by itself")

    def data_figures(self) -> dict[str, Any]:
        """Count documents and bytes."""
        documents, held_out = self.text.documents
        return {"source": self.source, "train_documents": documents, "train_bytes": self.data.size,
                "validation_documents": held_out, "validation_bytes": self.text.validation.size,
                "entropy": self.data.entropy()}

    def describe_batch(self) -> str:
        """Say how large the batch of an update is."""
        settings = self.settings
        if settings.budget is None:
            return super().describe_batch()
        ranks = "" if settings.ranks == 1 else f" on each of {settings.ranks} ranks"
        return f"microbatches of {settings.batch_size:,} rows until they hold {settings.budget:,} bytes{ranks}"

    def update_size(self, epochs: list[Epoch]) -> int:
        """Return the bytes of an update, on average."""
        return round(self.data.size * len(epochs) / epochs[-1].update_step)

    def describe_difference(self, score: float, other: float) -> list[str]:
        """Say what the wrong denominator costs, or gains by chance."""
        return [f"the mean of means needs {abs(other - score):.4f} bits per byte "
                f"{'more' if other >= score else 'fewer'} on the validation documents"]

    def closing(self) -> dict[str, str]:
        """Generate text."""
        return {"generated": generate(self._as_run(self.network), GENERATED, self.settings.seed)}


def evaluate(bits: Callable[[Tensor], Tensor], documents: Documents, settings: Settings) -> float:
    """Return the bits per byte of all documents, as a `BitsPerByte` measures them; each rank measures its part."""
    mine = microbatches(documents, np.arange(len(documents)), settings.batch_size)[settings.rank::settings.ranks]
    total = sum(float(bits(*map(Tensor, documents.batch(rows))).asnumpy()) * documents.count(rows) for rows in mine)
    return float(of_all_ranks(np.array([total]), settings).sum()) / documents.size
