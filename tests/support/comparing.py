"""Parameters as arrays, and how far arrays are apart."""
import numpy as np


def values(parameters):
    """Return Parameters or Tensors as float64 arrays."""
    return [np.array(p.asnumpy(), np.float64) for p in parameters]


def difference(got, expected):
    """Return the largest difference, relative to the largest magnitude of each array, or absolute where that is 0."""
    return max(np.abs(g - e).max() / (np.abs(e).max() or 1.0) for g, e in zip(got, expected))


def relative(got, expected):
    """Norm of the difference over the norm, of all gradients together."""
    return np.sqrt(sum(((g - e) ** 2).sum() for g, e in zip(got, expected)) / sum((e**2).sum() for e in expected))
