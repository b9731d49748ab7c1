"""How microbatches reach the network: a loop over a train step, or `mindspore.train.Model`."""
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from mindspore import Tensor
from mindspore.dataset import GeneratorDataset
from mindspore.train import Callback, Model, RunContext

from ms_accum.callbacks import FlushCallback
from ms_accum.model import TrainOneStepCell
from ms_accum.train_step import TrainStep

from .data import Digits

Took = Callable[[Tensor], None]


def in_a_loop(train_step: TrainStep, digits: Digits, microbatches: Sequence[np.ndarray], took: Took) -> None:
    """Train on the rows of each microbatch in turn, hand each loss to `took`, and close the last window."""
    for rows in microbatches:
        took(train_step(Tensor(digits.images[rows]), Tensor(digits.labels[rows])))
    train_step.flush()


def with_model(cell: TrainOneStepCell, digits: Digits, microbatches: Sequence[np.ndarray], took: Took) -> None:
    """The same by a `Model` and its callbacks."""
    if len(microbatches) == 0:  # of an epoch that was saved at its end, only the flush is left
        cell.flush()
        return
    dataset = GeneratorDataset(_Source(digits, microbatches), ["images", "labels"], shuffle=False)
    Model(cell).train(1, dataset, callbacks=[_Took(took), FlushCallback()], dataset_sink_mode=False)


FEEDS = {"functional": in_a_loop, "model": with_model}


class _Source:
    """Microbatches as rows of a dataset."""

    def __init__(self, digits: Digits, microbatches: Sequence[np.ndarray]) -> None:
        self.digits, self.microbatches = digits, microbatches

    def __getitem__(self, i: int) -> tuple[np.ndarray, np.ndarray]:
        rows = self.microbatches[i]
        return self.digits.images[rows], self.digits.labels[rows]

    def __len__(self) -> int:
        return len(self.microbatches)


class _Took(Callback):
    """Hands over the loss of each microbatch, before the last window is closed, as the loop does."""

    def __init__(self, took: Took) -> None:
        super().__init__()
        self.took = took

    def on_train_step_end(self, run_context: RunContext) -> Any:
        self.took(run_context.original_args().net_outputs)
