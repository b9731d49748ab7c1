"""Convert parameters to arrays, and measure differences of arrays."""
from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from mindspore import Tensor


def values(parameters: Iterable[Tensor]) -> list[np.ndarray]:
    """Return Parameters or Tensors as float64 arrays."""
    return [np.array(p.asnumpy(), np.float64) for p in parameters]


def difference(got: Iterable[np.ndarray], expected: Iterable[np.ndarray]) -> float:
    """Return the largest difference, relative to the largest magnitude of each array (absolute if that is 0)."""
    return float(np.max([np.abs(g - e).max() / (np.abs(e).max() or 1.0) for g, e in zip(got, expected)]))


def relative(got: Iterable[np.ndarray], expected: Iterable[np.ndarray]) -> float:
    """Return the norm of the difference, divided by the norm, of all arrays together."""
    squares = [(((g - e) ** 2).sum(), (e**2).sum()) for g, e in zip(got, expected)]
    return float(np.sqrt(sum(d for d, _ in squares) / sum(e for _, e in squares)))
