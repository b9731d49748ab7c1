"""The gradient of a batch, undivided and accumulated, and how much of their difference rounding explains.

Two ways to compute the same gradient differ by rounding. Three facts bound it, each with a probability of at least
1 - 2 exp(-CONFIDENCE ** 2 / 2), that is 0.9993 (Higham and Mary, 2019), with u the unit roundoff:

- A computed inner product of m terms is the exact one of weights that are off by up to CONFIDENCE * sqrt(m) * u each. So the
  network is evaluated again with every weight w replaced by w * (1 +- sqrt(m) * u), with random signs and m the longest inner
  product of a layer. CONFIDENCE times the change of a gradient bounds what rounding inside the network can change: the move
  propagates as rounding errors do, through every layer and over every kink of a ReLU. (The largest of PROBES changes counts.)
  In 16 bits, that bound can be far too wide. But moved weights have other rounding errors, while a real difference between the
  two gradients stays. So CONFIDENCE times the change of this *difference* is a bound, too, and the smaller one counts. It counts
  once instead of CONFIDENCE times if the difference of all gradients together, each in units of its other bounds, is STEADY times
  the change by each move. (Errors of the same size do that with a correlation of 0.94; in 115 comparisons of exact float16
  networks it was below 0.9.)
- The sum over n samples is off by up to CONFIDENCE * sqrt(n) * u times the norms of the terms.
- A gradient in which larger numbers cancelled (to 0, for that of a bias in front of a normalisation) keeps their rounding,
  which can be larger than the gradient itself: CONFIDENCE * u times the norm of all gradients in its layer.

16-bit layers are those whose parameters or outputs are of 16 bits, or that `mindspore.amp` casts inside. They are assumed to
round each result to 16 bits and sum in 32, so u is that of 16 bits, but with sqrt(m) or sqrt(n) that of 32.
"""
from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Optional

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops

from ..accumulate import require_loss
from ..arguments import as_weight
from ..gradients import FLOATS
from ..split import layout, select_rows
from .isolation import watched, write

CONFIDENCE = 4.0
PROBES = 2
STEADY = 3.0
_ROUNDOFF = {ms.float16: 2.0 ** -11, ms.bfloat16: 2.0 ** -8, ms.float32: 2.0 ** -24, ms.float64: 2.0 ** -53}
_SKETCHED = 4096  # elements of a gradient by which the pieces are told apart


@dataclass
class Comparison:
    """The gradients of a batch, undivided and accumulated; arrays hold a norm for each parameter.

    Attributes:
        whole: Gradients of the undivided batch.
        gap: Accumulated minus undivided gradients.
        undivided, accumulated: Norms of the two.
        explained: Norm of the difference that rounding explains.
        loss, losses: Of the batch, of its pieces.
        sketch, sketches: Some elements of the gradients of the batch, of its pieces.
    """

    whole: list[np.ndarray]
    gap: list[np.ndarray]
    undivided: np.ndarray
    accumulated: np.ndarray
    explained: np.ndarray
    loss: float
    losses: list[float]
    sketch: np.ndarray
    sketches: list[np.ndarray]

    @cached_property
    def difference(self) -> np.ndarray:
        """Norm of accumulated minus undivided."""
        return norms(self.gap)

    @property
    def beyond(self) -> np.ndarray:
        """Whether each parameter's difference is more than rounding: bool (parameters,)."""
        return ~(self.difference <= self.explained)

    @property
    def exact(self) -> bool:
        """Whether rounding explains all differences."""
        return not self.beyond.any()

    @property
    def relative(self) -> np.ndarray:
        """difference / undivided; 0 where both gradients are nothing but rounding, infinite where one is not finite."""
        silent = (self.undivided <= self.explained) & (self.accumulated <= self.explained)
        with np.errstate(divide="ignore", invalid="ignore"):
            ratio = self.difference / self.undivided
        return np.where(silent, 0.0, np.where(np.isnan(ratio), np.inf, ratio))

    @property
    def rounding(self) -> float:
        """What rounding explains, relative to all gradients together."""
        return float(np.linalg.norm(self.explained) / np.linalg.norm(self.undivided))


class Division:
    """A batch, its pieces and their weights; evaluates `forward_fn` on them, op by op."""

    def __init__(self, forward_fn: Callable, network: nn.Cell, batch: tuple, micro_size: int, weight_fn: Optional[Callable]) -> None:
        self.forward_fn = forward_fn
        self.parameters = network.trainable_params()
        self.batch = batch
        self.samples, cut = layout(batch)
        self.rows = -(-self.samples // micro_size)
        starts = range(0, self.samples, self.rows)
        self.pieces = [select_rows(ops.arange(s, min(s + self.rows, self.samples)), cut, batch) for s in starts]
        counts = [min(self.rows, self.samples - s) for s in starts]
        self.weights = np.array([float(as_weight(n if weight_fn is None else weight_fn(*piece))) for n, piece in zip(counts, self.pieces)])
        if not self.weights.sum() > 0:
            raise ValueError(f"weight_fn gave the pieces the weights {self.weights.tolist()}, expected a finite sum > 0; give what the "
                             "mean in forward_fn divides by, e.g. the unmasked tokens")
        self._network = network
        self._dtypes = {p.dtype for p in network.get_parameters()}

    @property
    def shares(self) -> np.ndarray:
        """The weights of the pieces in the accumulated gradient; they sum up to 1."""
        return self.weights / self.weights.sum()

    def look(self, cells: Iterable[nn.Cell]) -> set[int]:
        """Run forward on the batch and on a piece of each size, and return the ids of the cells that ran.

        An error in `forward_fn` surfaces here, and not in a backward pass, after which MindSpore's next compilation may fail.
        """
        called = set()
        self._dtypes.update(_amp_dtypes(self.forward_fn))

        def visit(cell: nn.Cell, arguments: tuple, keywords: dict, output: Any) -> None:
            called.add(id(cell))
            self._dtypes.update([t.dtype for t in _tensors(output)] + _amp_dtypes(cell))

        with watched(cells, visit):
            for inputs in (self.batch, self.pieces[0], self.pieces[-1]):
                self._dtypes.add(self._forward(inputs).dtype)
        return called

    def _forward(self, inputs: tuple) -> Tensor:
        loss = self.forward_fn(*inputs)
        if isinstance(loss, (tuple, list)):
            raise TypeError(f"forward_fn returned a {type(loss).__name__}, expected the loss alone; give a function that returns no aux")
        if not isinstance(loss, Tensor):
            raise TypeError(f"forward_fn returned {type(loss).__name__}, expected the loss: a float Tensor of shape ()")
        require_loss(loss.shape, loss.dtype)
        return loss

    @cached_property
    def roundoff(self) -> float:
        """Unit roundoff of the coarsest float dtype among parameters, outputs of layers and the loss."""
        return max(_ROUNDOFF[dtype] for dtype in self._dtypes if dtype in _ROUNDOFF)

    @cached_property
    def perturbation(self) -> float:
        """What rounding does to an inner product of this network, as a relative error of each weight (one standard deviation)."""
        lengths = [p.size // min(p.shape[:2]) for p in self._network.get_parameters() if p.ndim >= 2]
        return self._accumulated_roundoff(max(lengths, default=1))

    def _accumulated_roundoff(self, terms: int) -> float:
        return self.roundoff + np.sqrt(terms) * min(self.roundoff, _ROUNDOFF[ms.float32])

    def gradients(self, inputs: tuple, scale: float = 1.0) -> tuple[float, list[np.ndarray]]:
        """Return the loss times `scale`, and its gradients."""
        def forward(*inputs: Any) -> Tensor:  # value_and_grad takes no callable without a name, such as a partial
            return self.forward_fn(*inputs) * scale

        loss, gradients = ms.value_and_grad(forward, None, self.parameters)(*inputs)
        return float(_array(loss)), [_array(g) for g in gradients]

    def compare(self) -> Comparison:
        """Compare undivided and accumulated gradients, with the rounding in the sums; `perturb` adds the rest."""
        loss, whole = self.gradients(self.batch)
        total = [np.zeros(g.shape) for g in whole]
        magnitudes = np.zeros(len(whole))
        losses, sketches = [], []
        for share, piece in zip(self.shares, self.pieces):
            piece_loss, gradients = self.gradients(piece)
            losses.append(piece_loss)
            sketches.append(_sketch(gradients))
            if share > 0:  # a train step ignores a piece of weight 0, even if it is NaN
                magnitudes += share * norms(gradients)
                for t, g in zip(total, gradients):
                    t += share * g
        undivided = norms(whole)
        explained = CONFIDENCE * (self._accumulated_roundoff(self.samples) * magnitudes + self.roundoff * self._of_layers(undivided))
        gap = [(t - g).astype(g.dtype) for t, g in zip(total, whole)]
        return Comparison(whole, gap, undivided, norms(total), explained, loss, losses, _sketch(whole), sketches)

    def _of_layers(self, undivided: np.ndarray) -> np.ndarray:
        """Return for each parameter the norm of all gradients in its layer, whose names differ in the last part only."""
        layers = [p.name.rpartition(".")[0] for p in self.parameters]
        squares = {layer: 0.0 for layer in layers}
        for layer, norm in zip(layers, undivided):
            squares[layer] += norm ** 2
        return np.sqrt([squares[layer] for layer in layers])

    def perturb(self, comparison: Comparison) -> None:
        """Add to `explained` what rounding inside the network can change: compare with weights off by `perturbation`."""
        floats = [p for p in self._network.get_parameters() if p.dtype in FLOATS]
        before = [p.asnumpy().copy() for p in floats]
        response, motion = np.zeros((2, len(comparison.whole)))
        steady, unit = True, np.maximum(comparison.explained, np.finfo(np.float64).tiny)
        for seed in range(PROBES):
            signs = np.random.default_rng(seed)
            for parameter, value in zip(floats, before):
                off = 1 + self.perturbation * signs.choice((-1.0, 1.0), value.shape)
                write(parameter, (value.astype(np.float64) * off).astype(value.dtype))
            moved = self.compare()
            change = _apart(moved.whole, comparison.whole)
            # Where a perturbed network overflows, it gives no bound.
            response = np.maximum(response, np.where(np.isfinite(change), change, 0.0))
            change = _apart(moved.gap, comparison.gap)
            motion = np.maximum(motion, np.where(np.isfinite(change), change, np.inf))
            steady &= bool(np.linalg.norm(moved.difference / unit) >= STEADY * np.linalg.norm(change / unit))
        for parameter, value in zip(floats, before):
            write(parameter, value)
        comparison.explained = comparison.explained + (1 if steady else CONFIDENCE) * np.minimum(response, motion)


def _apart(some: list[np.ndarray], others: list[np.ndarray]) -> np.ndarray:
    return norms([a - b for a, b in zip(some, others)])


def _amp_dtypes(function: Callable) -> list[ms.Type]:
    """Return what `mindspore.amp.auto_mixed_precision` casts to inside a cell or function, which no output shows."""
    level = getattr(function, "_amp_level", None)
    if level == "auto":
        return [function.amp_strategy.get_amp_dtype()]
    return [ms.float16] if level == "O1" else []  # O1 keeps no record of its dtype


def norms(gradients: list[np.ndarray]) -> np.ndarray:
    """Return the Euclidean norm of each."""
    return np.array([np.linalg.norm(g.astype(np.float64).ravel()) for g in gradients])


def _sketch(gradients: list[np.ndarray]) -> np.ndarray:
    return np.concatenate([g.ravel()[::-(-g.size // _SKETCHED)] for g in gradients]).astype(np.float64)


def _array(tensor: Tensor) -> np.ndarray:
    if not isinstance(tensor, Tensor):
        raise TypeError(f"a gradient is a {type(tensor).__name__}, expected a Tensor; sparse gradients are not supported")
    return (tensor if tensor.dtype == ms.float64 else tensor.astype(ms.float32)).asnumpy()


def _tensors(output: Any) -> list[Tensor]:
    values = output if isinstance(output, (tuple, list)) else (output,)
    return [value for value in values if isinstance(value, Tensor)]
