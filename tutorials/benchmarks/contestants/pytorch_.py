"""Contestants in PyTorch: gradients add up in `.grad`, eager and compiled."""
from __future__ import annotations

from functools import partial
from itertools import pairwise

import numpy as np
import torch
from case import Case, initial_weights, mlp_shapes
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from .contract import Contestant


def mlp(case: Case) -> nn.Module:
    """The case's MLP with its initial weights."""
    layers = [layer for inputs, outputs in pairwise(case.sizes) for layer in (nn.Linear(inputs, outputs), nn.ReLU())]
    network = nn.Sequential(*layers[:-1])
    with torch.no_grad():
        for parameter, value in zip(network.parameters(), initial_weights(mlp_shapes(case), case.seed)):
            parameter.copy_(torch.from_numpy(value))
    return network


class PyTorch(Contestant):
    """`loss.backward()` at each microbatch, optimizer and `zero_grad` at the boundary."""

    def __init__(self, compiled: bool, case: Case) -> None:
        super().__init__(case)
        self.network = mlp(case)
        self.optimizer = torch.optim.SGD(self.network.parameters(), case.lr)
        self.forward_fn = torch.compile(self.divided_loss) if compiled else self.divided_loss
        self.filled = 0

    def divided_loss(self, inputs: Tensor, labels: Tensor) -> Tensor:
        return cross_entropy(self.network(inputs), labels) / self.case.accumulate_step

    def batch(self, inputs: np.ndarray, labels: np.ndarray) -> tuple[Tensor, Tensor]:
        return torch.from_numpy(inputs), torch.from_numpy(labels).long()

    def call(self, inputs: Tensor, labels: Tensor) -> Tensor:
        loss = self.forward_fn(inputs, labels)
        loss.backward()
        self.filled += 1
        if self.filled == self.case.accumulate_step:
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.filled = 0
        return loss

    def wait(self, loss: Tensor) -> None:
        loss.item()

    def parameters(self) -> list[np.ndarray]:
        return [p.detach().numpy().copy() for p in self.network.parameters()]

    def state_bytes(self) -> int:
        # `.grad` is there from a window's first microbatch to its update.
        return sum(p.nbytes for p in self.network.parameters())


CONTESTANTS = {"pytorch-eager": partial(PyTorch, False), "pytorch-compiled": partial(PyTorch, True)}
