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

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, Optional

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops

from ..steps.batch import checked_loss, layout, select_rows, starts_of
from ..tensors import FLOATS, HALF, as_weight
from .isolation import casts_inside, tensors_in

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
    """Hold a batch, its pieces and their shares of the weight, and evaluate `forward_fn` on them.

    Attributes:
        loss_scale: The factor on the loss before the backward pass.
        is_sum: Whether the loss should be a sum, so that `forward_fn` divides it by the weight.
        roundoff: Unit roundoff of the coarsest dtype among parameters, outputs of layers and the loss.
        eps: Relative error of a sum.
    """

    def __init__(self, forward_fn: Callable, network: nn.Cell, layers: Layers, batch: tuple, pieces: int,
                 weight_fn: Optional[Callable], batch_axis: int = 0, loss_scale: float = 1.0,
                 is_sum: bool = False) -> None:
        self.forward_fn, self.weight_fn, self.layers, self.batch = forward_fn, weight_fn, layers, batch
        self.loss_scale, self.is_sum = loss_scale, is_sum
        self.parameters = network.trainable_params()
        self._floats = [p for p in network.get_parameters() if p.dtype in FLOATS]
        self._ends = np.cumsum([p.size for p in self.parameters])

        def scaled(scale: float, *inputs: Any) -> Tensor:  # a function, also if `forward_fn` is a Cell or a partial
            return forward_fn(*inputs) * scale

        self._differentiated = ms.value_and_grad(scaled, None, self.parameters)
        self.samples, cut = layout(batch, batch_axis)
        spans = starts_of(self.samples, pieces)
        self.pieces = [select_rows(Tensor([*range(start, start + rows)], ms.int32), cut, batch)
                       for start, rows in spans]
        runs = [self.run(batch)]
        # A piece of each size: after an error in a gradient, MindSpore may not compile again.
        runs += [self._on_piece(place, self.run) for place in (0, len(self.pieces) - 1)]
        if isinstance(runs[0][0], (tuple, list)):
            raise TypeError(f"forward_fn returned {len(runs[0][0])} values, expected the loss alone; return no aux")
        tensors = [checked_loss(loss, "forward_fn") for loss, _ in runs]
        tensors += [t for _, calls in runs for _, outputs in calls.values() for t in outputs]
        casts = any(map(casts_inside, (forward_fn, *layers.names)))  # to bfloat16, or to what is finer
        dtypes = {t.dtype for t in (*tensors, *self._floats)} | ({ms.bfloat16} if casts else set())
        self.roundoff = max([FLOAT32, *(_ROUNDOFF[dtype] for dtype in dtypes if dtype in HALF)])
        lengths = [p.size // min(p.shape[:2]) for p in self._floats if p.ndim >= 2]
        self.eps = self.roundoff + np.sqrt(max([self.samples, *lengths])) * FLOAT32
        with layers.watched():
            weights = [float(as_weight(rows if weight_fn is None else weight_fn(*piece)))
                       for (_, rows), piece in zip(spans, self.pieces)]
        if not sum(weights) > 0:
            raise ValueError(f"weight_fn gave the pieces the weights {weights}, expected a finite sum > 0; return the "
                             "denominator of the mean in forward_fn, e.g. the number of unmasked tokens")
        self.shares = np.array(weights) / sum(weights)

    def _on_piece(self, place: int, function: Callable, restored: bool = True) -> Any:
        """Return the result of `run` or `gradients` for a piece. The batch was run before."""
        try:
            return function(self.pieces[place], restored)
        except Exception as error:
            error.args = (f"{error}\nforward_fn failed on piece {place + 1} of {len(self.pieces)} and runs on the "
                          "whole batch: does it use row numbers or the batch's length?", *error.args[1:])
            raise

    def run(self, inputs: tuple, restored: bool = True) -> tuple[Any, Calls]:
        """Run forward. Return the loss, and the calls of the layers."""
        if restored:
            self.layers.restore()
        with self.layers.watched() as calls:
            loss = self.forward_fn(*inputs)
        [t.asnumpy() for t in tensors_in(loss)]  # kernels report errors late
        return loss, calls

    def gradients(self, inputs: tuple, restored: bool = True, times: float = 1.0) -> np.ndarray:
        """Return the gradients, followed by the loss, as one float32 array.

        The loss is multiplied by its scale and `times` before the backward pass, and the gradients are divided by both.
        """
        if restored:
            self.layers.restore()
        scale = self.loss_scale * times
        loss, gradients = self._differentiated(scale, *inputs)
        return np.concatenate([t.astype(ms.float32).asnumpy().ravel() for t in (*gradients, loss)]) / np.float32(scale)

    def _undivided(self, restored: bool = True) -> np.ndarray:
        """Return the gradients of the batch: in float32 without the loss scale, in 16 bits with it (underflow)."""
        return self.gradients(self.batch, restored, 1 / self.loss_scale if self.roundoff <= FLOAT32 else 1.0)

    def norms(self, gradients: np.ndarray) -> np.ndarray:
        """Return the Euclidean norm of each parameter's gradient."""
        return np.array([np.linalg.norm(g.astype(np.float64)) for g in np.split(gradients, self._ends)[:-1]])

    def _sketch(self, gradients: np.ndarray) -> np.ndarray:
        """Return some elements of each parameter's gradient, and the loss: float64."""
        return np.concatenate([g[::-(-g.size // _SKETCHED)] for g in np.split(gradients, self._ends)], dtype=float)

    def compare(self, restored: bool = False) -> Comparison:
        """Compare the gradients. State is kept from piece to piece, as in training, unless it is `restored`."""
        whole = self._undivided()
        total, magnitudes, sketches = np.zeros(whole.shape), np.zeros(len(self.parameters)), [self._sketch(whole)]
        for place, share in enumerate(self.shares):
            gradients = self._on_piece(place, self.gradients, restored or place == 0)
            sketches.append(self._sketch(gradients))
            if share > 0:  # a train step ignores a piece of weight 0, even if it is NaN
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
        change = self.norms(self._undivided(restored=False) - whole)
        self.layers.restore()
        return np.where(np.isfinite(change), change, 0.0)  # a perturbed network that overflows gives no bound
