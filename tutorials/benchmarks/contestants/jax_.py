"""Contestants in JAX: `optax.MultiSteps` over microbatches, and `lax.scan` over a window in one compiled function."""
from __future__ import annotations

from typing import Any

import jax
import numpy as np
import optax
from case import Case, initial_weights, mlp_shapes
from jax import Array
from jax import numpy as jnp

from .contract import Contestant

Parameters = list[Array]


def mean_loss(parameters: Parameters, inputs: Array, labels: Array) -> Array:
    """Mean cross entropy of an MLP, float32 `()`."""
    hidden = inputs
    for weight, bias in zip(parameters[:-2:2], parameters[1:-2:2]):
        hidden = jax.nn.relu(hidden @ weight.T + bias)
    logits = hidden @ parameters[-2].T + parameters[-1]
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


class Jax(Contestant):
    """An MLP whose parameters and optimizer state are handed from call to call."""

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self.trained = [jnp.asarray(value) for value in initial_weights(mlp_shapes(case), case.seed)]
        self.optimizer = self.make_optimizer()
        self.optimizer_state = self.optimizer.init(self.trained)
        self.train_step = jax.jit(self.step, donate_argnums=(0, 1))

    def make_optimizer(self) -> Any:
        return optax.sgd(self.case.lr)

    def batch(self, inputs: np.ndarray, labels: np.ndarray) -> tuple[Array, Array]:
        return jnp.asarray(inputs), jnp.asarray(labels)

    def call(self, inputs: Array, labels: Array) -> Array:
        self.trained, self.optimizer_state, loss = self.train_step(self.trained, self.optimizer_state, inputs, labels)
        return loss

    def wait(self, loss: Array) -> None:
        jax.block_until_ready((loss, self.trained, self.optimizer_state))
        float(loss)

    def parameters(self) -> list[np.ndarray]:
        return [np.asarray(p) for p in self.trained]

    def state_bytes(self) -> int:
        return sum(leaf.nbytes for leaf in jax.tree_util.tree_leaves(self.optimizer_state))


class MultiSteps(Jax):
    """One call for a microbatch; the optimizer runs in each and is masked until the boundary."""

    def make_optimizer(self) -> optax.MultiSteps:
        return optax.MultiSteps(optax.sgd(self.case.lr), self.case.accumulate_step)

    def step(self, parameters: Parameters, state: Any, inputs: Array, labels: Array) -> tuple[Parameters, Any, Array]:
        loss, grads = jax.value_and_grad(mean_loss)(parameters, inputs, labels)
        updates, state = self.optimizer.update(grads, state, parameters)
        return optax.apply_updates(parameters, updates), state, loss


class Scan(Jax):
    """One call for a window; the sums are carried from piece to piece."""

    whole_window = True

    def step(self, parameters: Parameters, state: Any, inputs: Array, labels: Array) -> tuple[Parameters, Any, Array]:
        pieces = self.case.accumulate_step

        def add(sums: Parameters, piece: tuple[Array, Array]) -> tuple[Parameters, Array]:
            loss, grads = jax.value_and_grad(mean_loss)(parameters, *piece)
            return jax.tree_util.tree_map(jnp.add, sums, grads), loss

        cut = (inputs.reshape(pieces, -1, *inputs.shape[1:]), labels.reshape(pieces, -1))
        sums, losses = jax.lax.scan(add, jax.tree_util.tree_map(jnp.zeros_like, parameters), cut)
        means = jax.tree_util.tree_map(lambda total: total / pieces, sums)
        updates, state = self.optimizer.update(means, state, parameters)
        return optax.apply_updates(parameters, updates), state, losses.mean()


CONTESTANTS = {"jax-multisteps": MultiSteps, "jax-scan": Scan}
