"""Find by experiment why an accumulated gradient differs: in a layer first, then in the loss."""
from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain
from math import inf
from typing import TYPE_CHECKING

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn

from .comparison import CONFIDENCE
from .groupnorm import BATCH_NORMS, statistics_of

if TYPE_CHECKING:
    from .comparison import Comparison, Division
    from .isolation import Calls

_MASKS = ("Dropout", "Dropout1d", "Dropout2d", "Dropout3d", "MultiheadAttention")
# Each cause: its effect, and the remedy.
_SWITCHED_OFF = ("random: no two runs draw the same numbers, accumulated or not; compared with the layer switched off",
                 "none needed: a mask applies to each sample separately, so accumulation is exact for any mask")
_RANDOM = ("random: two evaluations of the same batch differ, so nothing can be compared",
           "draw random numbers only in nn.Dropout, whose mask applies to each sample separately, and check again")
NOT_FINITE = ("not finite: the gradient of the undivided batch is NaN or infinite, so nothing can be compared",
              "check data, loss scale and weights")
ROUNDING = ("rounding: it can change the gradient by more than a thousandth, so it could hide a mistake of that size",
            "check the network in float32, before auto_mixed_precision; in float32, check with other weights "
            "or another batch")
NO_TOKEN = ("wrong normalisation: the gradient of the batch is finite, but not that of each piece; a mean over no "
            "unmasked token is 0/0", "give weight_fn=, which returns 0 for such a piece, or divide by at least 1")
_IGNORED = ("wrong normalisation: a piece whose loss is finite and not 0 has the weight 0, so a train step ignores it",
            'return the sum, and give loss_reduction="sum" and min_weight= (the least denominator, 1.0 for a detector)')
_STATE = ("moves state in its forward pass: each piece starts from the state that the previous piece left",
          "freeze the state in training, or move it outside of the forward pass, once per update")
_BATCH_STATISTICS = (
    "batch statistics: normalises by mean and variance of the microbatch, not of the batch",
    "batchnorm_to_groupnorm(network), or freeze the statistics: use_batch_statistics=False in the layer")
_COUPLING = ("couples samples: its output for one sample depends on the others in the microbatch",
             "a layer that sees one sample at a time, such as LayerNorm or GroupNorm; for a loss of the whole batch "
             "(contrastive, load-balancing, batch Dice), make_grad_cache_step, whose encode_fn returns what this layer "
             "compares, and whose loss_fn compares it")
_NO_MEAN = ("no weighted mean: the gradient of the batch is not a weighted mean of the gradients of the pieces; the "
            "loss is a sum of means with different denominators, or it couples samples, as contrastive, load-balancing "
            "and batch Dice losses do",
            'give each mean a factor, as under "Several losses" on the guide\'s page "Recipes"; if it couples '
            "samples, use make_grad_cache_step, whose encode_fn returns values for each sample, and whose loss_fn "
            "compares them")
_NONLINEAR = ("nonlinear backward pass: a part of the gradient does not grow with the loss, because a bprop clips it, "
              "or because a bprop adds it")
_CLIP_OR_ADD = (
    "for a clip, clip relative to the norm of each sample's gradient, or the accumulated gradient with clip_norm=; for "
    "what is added, add its loss to the one that forward_fn returns, or, with a loss scaler, let the bprop multiply it "
    "by accumulator.scaled(Tensor(1.0))")
_MEAN = ('wrong normalisation: the loss is a mean, expected a sum because of loss_reduction="sum"',
         "return the sum, or leave loss_reduction out")
_WEIGHT = ("let weight_fn= return the denominator of the mean in the loss, e.g. (labels != -100).sum() for unmasked "
           "tokens, or (labels[:, 1:] != -100).sum() if the model shifts the labels")


@dataclass(frozen=True)
class Cause:
    """Describe why accumulation is not exact or cannot be checked, or a layer that was switched off for the check."""

    layer: str  # its name in the network, or the name of the loss function
    type: str  # its class, or "function"
    what: str  # its effect
    remedy: str


def in_layers(division: Division, cells: Iterable[nn.Cell], what: str, remedy: str) -> list[Cause]:
    """Return a cause for each of the layers."""
    return [Cause(division.layers.names[cell], type(cell).__name__, what, remedy) for cell in cells]


def in_loss(division: Division, what: str, remedy: str) -> list[Cause]:
    """Return a cause that lies in the loss function."""
    return [Cause(division.name, "function", what, remedy)]


def switch_off_random(division: Division) -> tuple[list[Cause], list[Cause]]:
    """Switch off MindSpore's layers that draw masks. Return them, and what is random all the same."""
    off = [cell for cell in division.layers.names if cell.training and getattr(cell, "p", None) != 0
           and any(base.__name__ in _MASKS for base in type(cell).__mro__)]  # O1 derives classes of its own from them
    division.layers.restore()  # of the runs before: otherwise all that follows would begin with their state
    for cell in off:
        cell.training = False
    division.layers.keep()
    (loss, _, first), (other_loss, _, second) = (division.run(division.whole) for _ in range(2))
    # Kernels that sum in any order differ in the last digits, random numbers in the first digit. Inputs are equal up to
    # the last bit: a LayerNorm after a layer that is random, but changes little, may enlarge the change.
    limit = np.sqrt(division.roundoff)
    random = _differing(division, first, second, limit, 0.0) or _differing(division, first, second, limit)
    # Two losses with other masks are equal to the limit in one of some hundred pairs.
    losses = chain([other_loss], (division.run(division.whole)[0] for _ in range(2)))
    in_function = in_loss(division, *_RANDOM) if any(_distance([(loss, other)]) > limit for other in losses) else []
    return (in_layers(division, [cell for cell in off if cell in first], *_SWITCHED_OFF),
            in_layers(division, random, *_RANDOM) or in_function)


def causes_of(division: Division, comparison: Comparison) -> list[Cause]:
    """Return the causes of a difference."""
    *_, before = division.run(division.pieces[0])
    division.run(division.whole)
    *_, after = division.run(division.pieces[0], restored=False)
    moved = _differing(division, before, after, CONFIDENCE * division.eps)
    called = [cell for cell in division.layers.names if cell in before]
    frozen = [cell for cell in called if isinstance(cell, BATCH_NORMS) and statistics_of(cell) is cell
              and (cell.training if cell.use_batch_statistics is None else cell.use_batch_statistics)]
    division.layers.restore()
    for cell in frozen:
        cell.training, cell.use_batch_statistics = False, None
    division.layers.keep()
    found = in_layers(division, moved, *_STATE) + in_layers(division, frozen, *_BATCH_STATISTICS)
    rest = division.compare(restored=bool(moved)) if found else comparison
    if not rest.exact:
        (*_, batch), (*_, piece) = division.run(division.whole), division.run(division.pieces[0])
        coupled = _differing(division, batch, piece, np.sqrt(division.roundoff))
        found += in_layers(division, [cell for cell in coupled if cell not in moved], *_COUPLING)
        if division.ignores:
            found += in_loss(division, *_IGNORED)
        elif not coupled:
            found += _wrong_normalisation(division, rest) or _nonlinear_backward(division, rest, called)
    return found or in_loss(division, *_NO_MEAN)


def _differing(division: Division, some: Calls, others: Calls, limit: float, agree: float = inf) -> list[nn.Cell]:
    """Return the innermost layers whose outputs differ between two runs, although their inputs `agree` up to rounding.

    Layers after such a layer get other inputs and are not judged. If the second run used a part of the batch, it is
    compared with that part of the first run.
    """
    found = []
    for cell in [cell for cell in some if cell in others]:
        inputs, outputs = (list(zip(*both)) for both in zip(some[cell], others[cell]))
        if any(a.shape != b.shape for a, b in inputs):  # then an output that is not cut does not hold values per sample
            outputs = [(a, b) for a, b in outputs if a.shape != b.shape]
        if _distance(outputs) > limit and _distance(inputs) <= min(agree, CONFIDENCE * division.eps):
            found.append(cell)
    return [cell for cell in found if not division.layers.inside.get(cell, set()) & {*found} - {cell}]


def _distance(pairs: list[tuple[Tensor, Tensor]]) -> float:
    """Return the largest relative difference of a pair; of its first rows if the second Tensor has fewer."""
    distances = [0.0]
    for one, other in pairs:
        for axis in [axis for axis, (a, b) in enumerate(zip(one.shape, other.shape)) if a > b][:1]:
            one = one[(slice(None),) * axis + (slice(0, other.shape[axis]),)]
        if one.shape != other.shape:
            return np.inf
        a, b = (np.nan_to_num(t.astype(ms.float32).asnumpy().astype(np.float64), nan=1e30) for t in (one, other))
        distances.append(float(np.linalg.norm(a - b) / (max(np.linalg.norm(a), np.linalg.norm(b)) or 1.0)))
    return max(distances)


def _wrong_normalisation(division: Division, comparison: Comparison) -> list[Cause]:
    """Return the cause if the gradient of the batch is a mean of those of the pieces with other weights."""
    # A piece without tokens has loss NaN and gradient 0 with nn.CrossEntropyLoss(ignore_index=...).
    sketches = np.nan_to_num(comparison.sketches, posinf=0.0, neginf=0.0)
    batch, rows = sketches[0], sketches[1:]

    def explains(shares: np.ndarray) -> bool:
        """Return whether these weights of the pieces give the batch's gradient and loss."""
        return all(np.linalg.norm(whole - shares @ part) <= comparison.rounding * (
            np.linalg.norm(whole) + np.abs(shares) @ np.linalg.norm(part, axis=1))
            for whole, part in ((batch[:-1], rows[:, :-1]), (batch[-1:], rows[:, -1:])))

    if division.is_sum:
        is_mean = explains(division.weights / division.weights.sum()**2)
        return in_loss(division, *_MEAN) if is_mean else []
    if explains(np.ones(len(rows))):
        return in_loss(division, "wrong normalisation: the loss is a sum over samples, but accumulation over "
                       f"{len(rows)} pieces takes the mean",
                       'return the mean over the samples, or give loss_reduction="sum"')
    fitted = np.linalg.lstsq((rows[:-1] - rows[-1]).T, batch - rows[-1], rcond=1e-12)[0]
    fitted = np.clip(np.append(fitted, 1 - fitted.sum()), 0, None) * rows.any(1)  # as weights whose sum is 1
    if fitted.sum() == 0 or not explains(fitted / fitted.sum()):
        return []
    got, used = (", ".join(f"{share:.4g}" for share in shares)
                 for shares in (fitted / fitted.sum(), division.shares))
    return in_loss(division, f"wrong normalisation: in the batch, the pieces have the weights {got}, but accumulation "
                   f"used {used}", _WEIGHT)


def _nonlinear_backward(division: Division, comparison: Comparison, called: list[nn.Cell]) -> list[Cause]:
    """Return the causes if the gradient does not scale with the loss: layers with their own bprop, or the loss.

    In the mean over a piece, samples get larger gradients than in the mean over the batch.
    """
    scale = float(2.0 ** np.ceil(np.log2(len(division.pieces))))  # by a power of two: exact in any dtype
    other = division.undivided(times=scale)
    if (division.norms(other - comparison.whole) <= comparison.explained).all():
        return []
    own = [cell for cell in called if cell.has_bprop]
    return in_layers(division, own, _NONLINEAR, _CLIP_OR_ADD) or in_loss(division, _NONLINEAR, _CLIP_OR_ADD)
