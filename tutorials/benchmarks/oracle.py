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
    activations = _activations(parameters, inputs)
    upstream = _probabilities(activations.pop())
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


def _activations(parameters: list[np.ndarray], inputs: np.ndarray) -> list[np.ndarray]:
    """Inputs of each layer in turn, then the logits."""
    activations = [inputs]
    for weight, bias in zip(parameters[::2], parameters[1::2]):
        activations.append(np.maximum(activations[-1] @ weight.T + bias, 0))
    activations[-1] = activations[-2] @ parameters[-2].T + parameters[-1]
    return activations


def _probabilities(logits: np.ndarray) -> np.ndarray:
    shifted = np.exp(logits - logits.max(axis=1, keepdims=True))
    return shifted / shifted.sum(axis=1, keepdims=True)
