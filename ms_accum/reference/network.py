"""A loss that is the same in every run, and the distance between two networks."""
from __future__ import annotations

import numpy as np
from mindspore import Tensor, nn, ops


class MeanCrossEntropy(nn.Cell):
    """Return the mean cross entropy, float32 `()`, of logits, float32 `(n, classes)`, and labels, int32 `(n,)`.

    Rows with the label `ignore_index` are not counted.

    nn.CrossEntropyLoss computes the logarithm in a separate kernel. MindSpore 2.10 splits that among as many CPU
    threads as it finds fastest, and the last bit depends on the split: one process in 30 reported other losses.
    LogSoftmax goes row by row.
    """

    def __init__(self, ignore_index: int = -100) -> None:
        super().__init__()
        self.log_softmax = ops.LogSoftmax(axis=-1)
        self.nll = nn.NLLLoss(ignore_index=ignore_index)

    def construct(self, logits: Tensor, labels: Tensor) -> Tensor:
        """See the class."""
        return self.nll(self.log_softmax(logits), labels)


def largest_difference(one: nn.Cell, other: nn.Cell) -> float:
    """Return the largest absolute difference between the parameters of two networks; NaN if either holds one."""
    pairs = zip(one.get_parameters(), other.get_parameters())
    return float(np.max([np.abs(a.asnumpy() - b.asnumpy()).max() for a, b in pairs]))
