"""The referee: an MLP trained on undivided windows in slow, obvious NumPy and float64."""
from __future__ import annotations

import numpy as np
from case import Case, initial_weights, mlp_shapes


def trained(case: Case, inputs: np.ndarray, labels: np.ndarray, windows: int) -> list[np.ndarray]:
    """Parameters of the case's MLP after `windows` updates, each on the same window as one batch; float64."""
    parameters = [p.astype(np.float64) for p in initial_weights(mlp_shapes(case), case.seed)]
    for _ in range(windows):
        gradients = mean_gradients(parameters, inputs.astype(np.float64), labels)
        parameters = [p - case.lr * g for p, g in zip(parameters, gradients)]
    return parameters


def mean_gradients(parameters: list[np.ndarray], inputs: np.ndarray, labels: np.ndarray) -> list[np.ndarray]:
    """Gradients of the mean cross entropy over the rows of `inputs`."""
    *hidden, logits = _layers(parameters, inputs)
    activations = [inputs, *(np.maximum(layer, 0) for layer in hidden)]
    upstream = _probabilities(logits)
    upstream[np.arange(len(labels)), labels] -= 1
    upstream /= len(labels)
    gradients = []
    for weight, activation in zip(parameters[-2::-2], reversed(activations)):
        gradients = [upstream.T @ activation, upstream.sum(axis=0), *gradients]
        upstream = (upstream @ weight) * (activation > 0)
    return gradients


def difference(got: list[np.ndarray], expected: list[np.ndarray]) -> float:
    """Largest difference, relative to the largest magnitude of each array; infinite where shapes differ."""
    if [g.shape for g in got] != [e.shape for e in expected]:
        return float("inf")
    return max(float(np.abs(g - e).max() / np.abs(e).max()) for g, e in zip(got, expected))


def drift(got: list[np.ndarray], expected: list[np.ndarray], start: list[np.ndarray]) -> float:
    """Norm of the difference of all parameters together, relative to how far training has moved them from `start`.

    A sample at ReLU's kink can change single weights by 1e-2, but hardly the whole: in a window of millions of
    activations there are always some, and rounding decides about them. A wrong denominator gives some 0.1 or more.
    """
    def norm(some: list[np.ndarray], others: list[np.ndarray]) -> float:
        return float(np.sqrt(sum(((a.astype(np.float64) - b) ** 2).sum() for a, b in zip(some, others))))

    return norm(got, expected) / norm(expected, start)


def _layers(parameters: list[np.ndarray], inputs: np.ndarray) -> list[np.ndarray]:
    """What each layer gives, before its ReLU; at last the logits."""
    layers = []
    for weight, bias in zip(parameters[::2], parameters[1::2]):
        below = np.maximum(layers[-1], 0) if layers else inputs
        layers.append(below @ weight.T + bias)
    return layers


def _probabilities(logits: np.ndarray) -> np.ndarray:
    shifted = np.exp(logits - logits.max(axis=1, keepdims=True))
    return shifted / shifted.sum(axis=1, keepdims=True)
