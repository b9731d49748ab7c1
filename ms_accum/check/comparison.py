"""Compare the undivided gradient of a batch with the accumulated one, and bound the effect of rounding.

For each parameter, let g be the gradient of the batch, g_i the gradients of the pieces, and s_i their shares of the
weight. With a probability of 0.9993, rounding explains a difference up to this bound (Higham and Mary):

    |sum of s_i g_i - g|  <=  4 (change + eps (sum of s_i |g_i| + |layer|)),    eps = u + sqrt(m) 2^-24

- eps is the relative error of a sum: u is the unit roundoff of the coarsest dtype in the network, m the length of the
  longest sum, over the samples or in an inner product. 16-bit layers round results to 16 bits and sum in 32.
- change is how far g moves if each weight w becomes w (1 +- eps): rounding errors propagate so, through every layer and
  over every kink of a ReLU. It is the larger one of two draws of the signs.
- |layer| is the norm of all gradients in the parameter's layer. Where they cancel (to 0, for a bias in front of a
  normalisation), their rounding errors remain.
"""
from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops

from ..steps.batch import layout, places_of, select_rows, starts_of
from ..steps.forward import Functions, forward_of, weighed
from ..tensors import FLOATS, HALF, as_tensor
from .isolation import casts_inside

if TYPE_CHECKING:
    from .isolation import Calls, Layers

FLOAT32 = 2.0 ** -24  # its unit roundoff
_ROUNDOFF = {ms.float16: 2.0 ** -11, ms.bfloat16: 2.0 ** -8}
CONFIDENCE = 4.0
_SKETCHED = 4096  # elements of a gradient that tell the pieces apart


class Comparison(NamedTuple):
    """Hold the comparison of the undivided and the accumulated gradient. Arrays hold a number for each parameter."""

    relative: np.ndarray  # norm of the difference, relative to the undivided gradient; 0 if both are only rounding
    tolerances: np.ndarray  # the part that rounding explains
    explained: np.ndarray  # the same, as a norm
    exact: bool  # whether rounding explains all differences
    rounding: float  # the part that rounding explains, relative to all gradients together
    finite: bool  # whether the undivided gradients are finite
    whole: np.ndarray  # the undivided gradient, and the loss
    sketches: np.ndarray  # some of their elements, the loss last: of the batch, then of its pieces


class Division:
    """Hold a batch, its pieces and their shares of the weight, and run the functions of a train step on them.

    Attributes:
        name: That of `forward_fn`.
        whole, pieces: Number of samples and arguments: of the batch, and of each piece.
        loss_scale: The factor on the loss before the backward pass.
        is_sum: Whether the loss should be a sum, whose gradients a train step adds without their weights.
        weights, shares: Of the pieces; a share is what a train step multiplies a gradient by, in all.
        ignores: Whether a step ignores a piece, because its weight is 0, although its mean loss is finite and not 0.
        compiles: Whether `forward_fn` runs in graph mode only, so that no layer is seen.
        roundoff: Unit roundoff of the coarsest dtype among parameters, outputs of layers and the loss.
        eps: Relative error of a sum.
    """

    def __init__(self, functions: Functions, name: str, network: nn.Cell, layers: Layers, batch: tuple, pieces: int,
                 batch_axis: int, loss_scale: float, is_sum: bool) -> None:
        self.name, self.layers, self.loss_scale, self.is_sum = name, layers, loss_scale, is_sum
        self.parameters = network.trainable_params()
        self._floats = [p for p in network.get_parameters() if p.dtype in FLOATS]
        self._ends = np.cumsum([p.size for p in self.parameters])
        samples, cut = layout(batch, batch_axis)
        self.whole = samples, *batch
        self.pieces = [(rows, *select_rows(places_of(rows, start), cut, batch))
                       for start, rows in starts_of(samples, pieces)]
        forward, weigh, self.compiles = forward_of(functions), weighed(functions), False

        def weighed_forward(rows: int, *piece: Any) -> tuple:
            weight, piece = weigh(rows, piece)
            results = forward(weight, *piece)
            return results[0], as_tensor(results[1])

        def scaled(scale: float, *piece: Any) -> tuple:
            loss, weight = self._forward(*piece)
            return loss * scale, weight

        self._forward: Callable = weighed_forward
        self._differentiated = ms.value_and_grad(scaled, None, self.parameters, has_aux=True)
        try:
            runs = [self._facts(self.whole)]
        except (TypeError, AttributeError) as error:
            os.environ.pop("MS_JIT", None)  # until `untouched` ends
            self._forward, self.compiles = ms.jit(weighed_forward), True
            try:
                runs = [self._facts(self.whole)]
            except Exception:
                raise error from None
        runs += map(self._facts, self.pieces)  # before any gradient: after an error in one, nothing may compile again
        casts = any(map(casts_inside, (functions.forward_fn, *layers.names)))  # to bfloat16, or to what is finer
        dtypes = {p.dtype for p in self._floats}.union({ms.bfloat16} if casts else (), *[found for *_, found in runs])
        self.roundoff = max([FLOAT32, *(_ROUNDOFF[dtype] for dtype in dtypes if dtype in HALF)])
        lengths = [p.size // min(p.shape[:2]) for p in self._floats if p.ndim >= 2]
        self.eps = self.roundoff + np.sqrt(max([samples, *lengths])) * FLOAT32
        self.weights = np.array([weight for _, weight, _ in runs[1:]])
        total = self.weights.sum()
        if not total > 0:
            raise ValueError(f"weight_fn gave the pieces the weights {self.weights.tolist()}, expected a finite sum > "
                             "0; return the denominator of the mean in forward_fn, e.g. the number of unmasked tokens")
        self.shares = (np.ones_like(self.weights) if is_sum else self.weights) / total
        self._divisor = runs[0][1] if is_sum else 1.0
        self.ignores = not is_sum and any(not weight and loss and np.isfinite(loss) for loss, weight, _ in runs[1:])

    def _facts(self, piece: tuple) -> tuple[float, float, set]:
        loss, weight, calls = self.run(piece)
        dtypes = {t.dtype for t in (loss, *[t for _, outputs in calls.values() for t in outputs])}
        return float(loss.astype(ms.float32)), float(weight), dtypes  # kernels report errors late: when these are read

    def run(self, piece: tuple, restored: bool = True) -> tuple[Tensor, Tensor, Calls]:
        """Run forward. Return the loss, the weight, and the calls of the layers."""
        if restored:
            self.layers.restore()
        with self.layers.watched() as calls:
            loss, weight = self._forward(*piece)
        return loss, weight, calls

    def gradients(self, piece: tuple, restored: bool = True, times: float = 1.0) -> np.ndarray:
        """Return the gradients, followed by the loss, as one float32 array.

        The loss is multiplied by its scale and `times` before the backward pass, and the gradients are divided by both.
        """
        if restored:
            self.layers.restore()
        scale = self.loss_scale * times
        (loss, _), gradients = self._differentiated(scale, *piece)
        return np.concatenate([t.astype(ms.float32).asnumpy().ravel() for t in (*gradients, loss)]) / np.float32(scale)

    def undivided(self, restored: bool = True, times: float = 1.0) -> np.ndarray:
        """Return the gradients of the batch, of a mean.

        In float32 without the loss scale, in 16 bits with it, or they would be 0.
        """
        if self.roundoff <= FLOAT32:
            times /= self.loss_scale
        return self.gradients(self.whole, restored, times) / np.float32(self._divisor)

    def norms(self, gradients: np.ndarray) -> np.ndarray:
        """Return the Euclidean norm of each parameter's gradient."""
        return np.array([np.linalg.norm(g.astype(np.float64)) for g in np.split(gradients, self._ends)[:-1]])

    def _sketch(self, gradients: np.ndarray) -> np.ndarray:
        """Return some elements of each parameter's gradient, and the loss: float64."""
        return np.concatenate([g[::-(-g.size // _SKETCHED)] for g in np.split(gradients, self._ends)], dtype=float)

    def compare(self, restored: bool = False) -> Comparison:
        """Compare the gradients. State is kept from piece to piece, as in training, unless it is `restored`."""
        whole = self.undivided()
        total, magnitudes, sketches = np.zeros(whole.shape), np.zeros(len(self.parameters)), [self._sketch(whole)]
        for place, (piece, share) in enumerate(zip(self.pieces, self.shares)):
            gradients = self.gradients(piece, restored or place == 0)
            sketches.append(self._sketch(gradients))
            if share > 0:  # a train step ignores a mean of weight 0, even if it is NaN
                magnitudes += share * self.norms(gradients)
                total += share * gradients
        undivided, accumulated, difference = map(self.norms, (whole, total, total - whole))
        if not undivided.any() and not accumulated.any():
            raise ValueError("the gradient is 0 in all parameters of network, so there is nothing to compare; check "
                             "that forward_fn calls this network, and that the loss depends on it")
        # A layer's parameters have names that differ in the last part only.
        _, layer = np.unique([p.name.rpartition(".")[0] for p in self.parameters], return_inverse=True)
        of_layer = np.sqrt(np.bincount(layer, undivided ** 2)[layer])
        change = np.maximum(*(self._change(whole, seed) for seed in (0, 1)))
        explained = CONFIDENCE * (change + self.eps * (magnitudes + of_layer))
        silent = (undivided <= explained) & (accumulated <= explained)
        with np.errstate(divide="ignore", invalid="ignore"):
            relative, tolerances = (np.nan_to_num(norm / undivided, nan=np.inf, posinf=np.inf)
                                    for norm in (difference, explained))
            rounding = float(np.linalg.norm(explained) / np.linalg.norm(undivided))
        return Comparison(np.where(silent, 0.0, relative), tolerances, explained, bool((difference <= explained).all()),
                          rounding, bool(np.isfinite(undivided).all()), whole, np.array(sketches))

    def _change(self, whole: np.ndarray, seed: int) -> np.ndarray:
        """Return how far the gradients of the batch move if the weights change by rounding."""
        signs = np.random.default_rng(seed)
        self.layers.restore()
        for parameter in self._floats:
            value = parameter.asnumpy()
            off = value.astype(np.float64) * (1 + self.eps * signs.choice((-1.0, 1.0), value.shape))
            ops.assign(parameter, Tensor(off.astype(value.dtype), parameter.dtype))
        change = self.norms(self.undivided(restored=False) - whole)
        self.layers.restore()
        return np.where(np.isfinite(change), change, 0.0)  # a perturbed network that overflows gives no bound
