"""Compare the undivided and the accumulated gradient of a batch, and bound what rounding explains of their difference.

Two ways to compute the same gradient differ by rounding. Three facts bound that difference, each with a probability of
at least 1 - 2 exp(-CONFIDENCE ** 2 / 2) = 0.9993 (Higham and Mary, 2019). Let u be the unit roundoff.

- Inside the network: a computed inner product of m terms is the exact one for weights that are off by up to
  CONFIDENCE * sqrt(m) * u each. So the network is evaluated PROBES times with every weight w replaced by
  w * (1 +- sqrt(m) * u), with random signs and m the longest inner product of a layer. The perturbation propagates as
  rounding errors do, through every layer and over every kink of a ReLU. CONFIDENCE times the largest change of a
  gradient is a bound. In 16 bits this bound can be far too wide. But perturbed weights have other rounding errors,
  while a real difference between the two gradients stays. So CONFIDENCE times the change of this *difference* is a
  bound, too, and the smaller one is used. The factor is 1 instead of CONFIDENCE if the difference is steady: over all
  gradients, each in units of its other bounds, it is at least STEADY times its change in every probe. (Errors of the
  same size do that with a correlation of 0.94; in 115 comparisons of exact float16 networks the correlation was below
  0.9.)
- In the sum over n samples: the error is at most CONFIDENCE * sqrt(n) * u times the norms of the terms.
- After cancellation: a gradient in which larger numbers cancel (to 0, for a bias in front of a normalisation) keeps
  their rounding errors, which can exceed the gradient itself. They are at most CONFIDENCE * u times the norm of all
  gradients in the layer.

A layer counts as 16-bit if its parameters or outputs are, or if `mindspore.amp` casts inside it. Such layers are
assumed to round each result to 16 bits and to sum in 32 bits: u is that of 16 bits, but next to sqrt(m) or sqrt(n) it
is that of 32.
"""
from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Optional

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops

from ..arguments import as_weight
from ..differentiate import require_loss
from ..gradients import FLOATS
from ..pieces import layout, select_rows
from .isolation import watched, write

CONFIDENCE = 4.0
PROBES = 2
STEADY = 3.0
_ROUNDOFF = {ms.float16: 2.0 ** -11, ms.bfloat16: 2.0 ** -8, ms.float32: 2.0 ** -24, ms.float64: 2.0 ** -53}
_SKETCHED = 4096  # elements of a gradient that tell the pieces apart


@dataclass
class Comparison:
    """The undivided and the accumulated gradient of a batch. Arrays hold one norm for each parameter.

    Attributes:
        whole: Gradients of the undivided batch.
        gap: Accumulated minus undivided gradients.
        accumulated: Norms of the accumulated gradients.
        explained: Norms of the differences that rounding explains.
        loss, losses: Of the batch; of its pieces.
        sketch, sketches: Some elements of the gradients of the batch; of its pieces.
    """

    whole: list[np.ndarray]
    gap: list[np.ndarray]
    accumulated: np.ndarray
    explained: np.ndarray
    loss: float
    losses: list[float]
    sketch: np.ndarray
    sketches: list[np.ndarray]

    @cached_property
    def undivided(self) -> np.ndarray:
        """Norms of the undivided gradients."""
        return norms(self.whole)

    @cached_property
    def difference(self) -> np.ndarray:
        """Norms of accumulated minus undivided gradients."""
        return norms(self.gap)

    @property
    def exact(self) -> bool:
        """Whether rounding explains all differences."""
        return bool((self.difference <= self.explained).all())

    @property
    def relative(self) -> np.ndarray:
        """difference / undivided; 0 where both gradients are only rounding, infinite where one is not finite."""
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

    def __init__(self, forward_fn: Callable, network: nn.Cell, batch: tuple, pieces: int,
                 weight_fn: Optional[Callable]) -> None:
        self.forward_fn, self.weight_fn, self.batch = forward_fn, weight_fn, batch
        self.parameters = network.trainable_params()
        self.samples, cut = layout(batch)
        rows = -(-self.samples // pieces)
        spans = [range(start, min(start + rows, self.samples)) for start in range(0, self.samples, rows)]
        self.pieces = [select_rows(ops.arange(span.start, span.stop), cut, batch) for span in spans]
        weights = [float(as_weight(len(span) if weight_fn is None else weight_fn(*piece)))
                   for span, piece in zip(spans, self.pieces)]
        if not sum(weights) > 0:
            raise ValueError(f"weight_fn gave the pieces the weights {weights}, expected a finite sum > 0; return what "
                             "the mean in forward_fn divides by, e.g. the number of unmasked tokens")
        self.shares = np.array(weights) / sum(weights)  # the weights of the pieces in the accumulated gradient
        self._network = network
        self._dtypes = {p.dtype for p in network.get_parameters()}

    def look(self, cells: Iterable[nn.Cell]) -> set[int]:
        """Run forward on the batch and on a piece of each size, and return the ids of the cells that ran.

        An error in `forward_fn` surfaces here, not in a backward pass, after which MindSpore's next compilation may
        fail.
        """
        called = set()
        self._dtypes.update(_amp_dtypes(self.forward_fn))

        def visit(cell: nn.Cell, arguments: tuple, keywords: dict, output: Any) -> None:
            called.add(id(cell))
            self._dtypes.update([t.dtype for t in tensors_in(output)] + _amp_dtypes(cell))

        with watched(cells, visit):
            for inputs in (self.batch, self.pieces[0], self.pieces[-1]):
                self._dtypes.add(self._forward(inputs).dtype)
        return called

    def _forward(self, inputs: tuple) -> Tensor:
        loss = self.forward_fn(*inputs)
        if isinstance(loss, (tuple, list)):
            raise TypeError(f"forward_fn returned a {type(loss).__name__}, expected the loss alone; return no aux, or "
                            f"give losses={len(loss)} (in a shell: --losses {len(loss)}) if these are losses")
        if not isinstance(loss, Tensor):
            raise TypeError(f"forward_fn returned {type(loss).__name__}, expected the loss: a float Tensor of shape ()")
        require_loss(loss.shape, loss.dtype, "forward_fn")
        return loss

    @cached_property
    def roundoff(self) -> float:
        """Unit roundoff of the coarsest float dtype among parameters, outputs of layers and the loss."""
        return max(_ROUNDOFF[dtype] for dtype in self._dtypes if dtype in _ROUNDOFF)

    @cached_property
    def perturbation(self) -> float:
        """Relative error of a weight that stands for rounding in this network's inner products (standard deviation)."""
        lengths = [p.size // min(p.shape[:2]) for p in self._network.get_parameters() if p.ndim >= 2]
        return self._accumulated_roundoff(max(lengths, default=1))

    def _accumulated_roundoff(self, terms: int) -> float:
        return self.roundoff + np.sqrt(terms) * min(self.roundoff, _ROUNDOFF[ms.float32])

    def gradients(self, inputs: tuple, scale: float = 1.0) -> tuple[float, list[np.ndarray]]:
        """Return the loss times `scale`, and its gradients."""
        def forward(*inputs: Any) -> Tensor:  # value_and_grad needs a function with a name, which a partial has not
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
        explained = CONFIDENCE * (self._accumulated_roundoff(self.samples) * magnitudes
                                  + self.roundoff * self._of_layers(norms(whole)))
        gap = [(t - g).astype(g.dtype) for t, g in zip(total, whole)]
        return Comparison(whole, gap, norms(total), explained, loss, losses, _sketch(whole), sketches)

    def _of_layers(self, undivided: np.ndarray) -> np.ndarray:
        """Return for each parameter the norm of all gradients in its layer: names that differ in the last part only."""
        _, layer = np.unique([p.name.rpartition(".")[0] for p in self.parameters], return_inverse=True)
        return np.sqrt(np.bincount(layer, undivided ** 2)[layer])

    def perturb(self, comparison: Comparison) -> None:
        """Add what rounding inside the network can change to `explained`: compare with perturbed weights."""
        floats = [(p, p.asnumpy().copy()) for p in self._network.get_parameters() if p.dtype in FLOATS]
        response, motion = np.zeros((2, len(comparison.whole)))
        steady, unit = True, np.maximum(comparison.explained, np.finfo(np.float64).tiny)
        for seed in range(PROBES):
            signs = np.random.default_rng(seed)
            for parameter, value in floats:
                off = 1 + self.perturbation * signs.choice((-1.0, 1.0), value.shape)
                write(parameter, (value.astype(np.float64) * off).astype(value.dtype))
            moved = self.compare()
            change = _apart(moved.whole, comparison.whole)
            # Where a perturbed network overflows, it gives no bound.
            response = np.maximum(response, np.where(np.isfinite(change), change, 0.0))
            change = _apart(moved.gap, comparison.gap)
            motion = np.maximum(motion, np.where(np.isfinite(change), change, np.inf))
            steady &= bool(np.linalg.norm(moved.difference / unit) >= STEADY * np.linalg.norm(change / unit))
        for parameter, value in floats:
            write(parameter, value)
        comparison.explained = comparison.explained + (1 if steady else CONFIDENCE) * np.minimum(response, motion)


def norms(gradients: list[np.ndarray]) -> np.ndarray:
    """Return the Euclidean norm of each."""
    return np.array([np.linalg.norm(g.astype(np.float64).ravel()) for g in gradients])


def tensors_in(values: Any) -> list[Tensor]:
    """Return the Tensors among `values`, which may be a single one."""
    values = values if isinstance(values, (tuple, list)) else (values,)
    return [value for value in values if isinstance(value, Tensor)]


def _apart(some: list[np.ndarray], others: list[np.ndarray]) -> np.ndarray:
    return norms([a - b for a, b in zip(some, others)])


def _amp_dtypes(function: Callable) -> list[ms.Type]:
    """Return what `mindspore.amp.auto_mixed_precision` casts to inside a cell or function; no output shows it."""
    level = getattr(function, "_amp_level", None)
    if level == "auto":
        return [function.amp_strategy.get_amp_dtype()]
    return [ms.float16] if level == "O1" else []  # O1 keeps no record of its dtype


def _sketch(gradients: list[np.ndarray]) -> np.ndarray:
    return np.concatenate([g.ravel()[::-(-g.size // _SKETCHED)] for g in gradients]).astype(np.float64)


def _array(tensor: Tensor) -> np.ndarray:
    if not isinstance(tensor, Tensor):
        raise TypeError(f"a gradient is a {type(tensor).__name__}, expected a Tensor; sparse ones are not supported")
    return (tensor if tensor.dtype == ms.float64 else tensor.astype(ms.float32)).asnumpy()
