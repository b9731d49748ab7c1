"""Find by experiment why an accumulated gradient differs: in a layer first, then in the loss."""
from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import combinations
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

_DROPOUTS = ("Dropout", "Dropout1d", "Dropout2d", "Dropout3d")
# Each cause: its effect, and the remedy.
_SWITCHED_OFF = ("random: no two runs draw the same numbers, accumulated or not; compared with the layer switched off",
                 "none needed: a mask applies to each sample separately, so accumulation is exact for any mask")
_SWITCHED_OFF_BLINDLY = (
    "random: compared with the layer switched off, and also anything else that the layer does only in training",
    "use a separate nn.Dropout, whose mask applies to each sample separately, and check again")
_RANDOM = ("random: two evaluations of the same batch differ, so nothing can be compared",
          "draw random numbers only inside a layer, and only if its self.training is True, and check again")
NOT_FINITE = ("not finite: the gradient of the undivided batch is NaN or infinite, so nothing can be compared",
              "check data, loss scale and weights")
ROUNDING = ("rounding: it can change the gradient by more than a thousandth, so it could hide a mistake of that size",
            "check a float32 copy, without casts to 16 bits; in float32, check with other weights or another batch")
UNDERFLOW = ("16 bits: a float32 copy of the network is exact, but in 16 bits the gradients differ by more than "
             "rounding, e.g. because those of the batch underflow", "scale the loss, with loss_scaler=")
NO_TOKEN = ("wrong normalisation: the gradient of the batch is finite, but not that of each piece; a mean over no "
            "unmasked token is 0/0", "give weight_fn=, which returns 0 for such a piece, or divide by at least 1")
_STATE = ("moves state in its forward pass: each piece starts from the state that the previous piece left",
          "freeze the state in training, or move it outside of the forward pass, once per update")
_BATCH_STATISTICS = (
    "batch statistics: normalises by mean and variance of the microbatch, not of the batch",
    "batchnorm_to_groupnorm(network), or freeze the statistics: use_batch_statistics=False in the layer")
_COUPLING = ("couples samples: its output for one sample depends on the others in the microbatch",
             "a layer that sees one sample at a time, such as LayerNorm or GroupNorm")
_COMPARING = ("compares samples with each other: its output for one sample grows with the microbatch",
              "for a contrastive loss, make_grad_cache_step, whose encode_fn returns what this layer compares, and "
              "whose loss_fn compares it; else a layer that sees one sample at a time")
_NO_MEAN = ("no weighted mean: the gradient of the batch is not a weighted mean of the gradients of the pieces; the "
            "loss is a sum of means with different denominators, or it couples samples, as a contrastive loss does",
            "return the means as a tuple, with losses=2 and two weights from weight_fn; for a contrastive loss, use "
            "make_grad_cache_step")
_NONLINEAR = ("nonlinear backward pass: the gradient that it returns is not proportional to the one that it gets, e.g. "
              "because a bprop clips it",
              "clip relative to the norm of each sample's gradient, or clip the accumulated gradient with clip_norm=")
_ADDED = ("nonlinear backward pass: a part of the gradient does not grow with the loss, e.g. because a bprop adds it",
          "add the loss of that part to the one that forward_fn returns")
_ADDED_TO_SEVERAL = (
    _ADDED[0] + "; the weights of several losses multiply them before the backward pass, so that part is not weighted",
    "return the loss of that part as one more loss; or, if all losses divide by the same count, return their sum and "
    "leave out losses=: the weight of one loss multiplies the gradients after the backward pass")
_NOT_SCALED = ("not scaled: a part of the gradient does not grow with the loss, e.g. because a bprop adds it; with a "
               "loss scaler it vanishes, in plain MindSpore as well",
               "add its loss to the one that forward_fn returns, or let its bprop multiply the part that it adds by "
               "accumulator.scaled(Tensor(1.0))")
_MEAN = ('wrong normalisation: the loss is a mean, expected a sum because of loss_reduction="sum"',
         "return the sum, or leave loss_reduction out")
_PACKED = ("; if documents are packed, the first token of each is not a target: set its label to -100, so that "
           "(labels[:, 1:] != -100).sum() does not count it")

_FEW = 2.0 ** -12  # times the loss

# Expressions that count targets in labels or a mask, as code.
_COUNTS = ("({} != -100).sum()", "({} != -1).sum()", "({} != 0).sum()", "{}.sum()")


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
    return [Cause(division.forward_fn.__name__, "function", what, remedy)]


def switch_off_random(division: Division) -> tuple[list[Cause], list[Cause], list[Cause]]:
    """Switch off random layers, and other layers of the same class, until two runs agree.

    Return MindSpore's layers, which only draw masks; other layers, which may do more in training; what stays random.
    """
    off: list[nn.Cell] = []
    while True:
        (loss, first), (other_loss, second) = (division.run(division.batch) for _ in range(2))
        # Kernels that sum in any order differ in the last digits, random numbers in the first digit.
        limit = np.sqrt(division.roundoff)
        # A LayerNorm after a Dropout that changes little may enlarge the change: it is not random.
        random = _differing(division, first, second, limit, 0.0) or _differing(division, first, second, limit)
        if {*random} <= {*off}:  # none, or found again
            break
        kinds = {type(cell) for cell in random}
        similar = [cell for cell in division.layers.names
                 if type(cell) in kinds and cell in first and cell.training and getattr(cell, "p", None) != 0]
        off = [*dict.fromkeys([*off, *random, *similar])]
        for cell in off:
            cell.training = False  # only this Cell: a BatchNorm inside it does not change
        division.layers.keep()
    masks, blindly = ([cell for cell in off if cell not in random and _is_mindspores(cell) == ours]
                      for ours in (True, False))
    in_function = in_loss(division, *_RANDOM) if _distance([(loss, other_loss)]) > limit else []
    return (in_layers(division, masks, *_SWITCHED_OFF), in_layers(division, blindly, *_SWITCHED_OFF_BLINDLY),
            in_layers(division, random, *_RANDOM) or in_function)


def _is_mindspores(cell: nn.Cell) -> bool:
    """Return whether a layer is MindSpore's own, or a Dropout that O1 has derived from a copy of the module `basic`."""
    return type(cell).__module__.startswith("mindspore.") or any(
        base.__module__.split(".")[-1] == "basic" and base.__name__ in _DROPOUTS for base in type(cell).__mro__)


def causes_of(division: Division, comparison: Comparison) -> list[Cause]:
    """Return the causes of a difference."""
    _, before = division.run(division.pieces[0])
    division.run(division.batch)
    _, after = division.run(division.pieces[0], restored=False)
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
        (_, batch), (_, piece) = division.run(division.batch), division.run(division.pieces[0])
        coupled = _differing(division, batch, piece, np.sqrt(division.roundoff))
        for cell in [cell for cell in coupled if cell not in moved]:
            found += in_layers(division, [cell], *(_COMPARING if _grows(batch[cell], piece[cell]) else _COUPLING))
        found += [] if coupled else (_wrong_normalisation(division, rest)
                                     or _not_scaled(division, rest, called)
                                     or _nonlinear_backward(division, rest, called) or _two_means(division, rest))
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


def _grows(batch: tuple, piece: tuple) -> bool:
    """Return whether an output has several axes of samples, given a layer's calls on the batch and on a piece."""
    return any(sum(m != n for m, n in zip(a.shape, b.shape)) > 1 for a, b in zip(batch[1], piece[1]))


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

    if explains(np.ones(len(rows))):
        return in_loss(division, "wrong normalisation: the loss is a sum over samples, but accumulation over "
                       f"{len(rows)} pieces takes the mean",
                       'return the mean over the samples, or give loss_reduction="sum"')
    if division.is_sum and explains(division.shares ** 2):
        return in_loss(division, *_MEAN)
    fitted = np.linalg.lstsq((rows[:-1] - rows[-1]).T, batch - rows[-1], rcond=1e-12)[0]
    fitted = np.clip(np.append(fitted, 1 - fitted.sum()), 0, None) * rows.any(1)  # as weights whose sum is 1
    by_hand = "the denominator of the mean in the loss, e.g. the number of unmasked tokens" + _packing(division, fitted)
    for code, weight in [*_usual_weights(division, division.pieces), (by_hand, fitted)]:
        if weight.sum() > 0 and explains(weight / weight.sum()):
            got, used = (", ".join(f"{share:.4g}" for share in shares)
                         for shares in (weight / weight.sum(), division.shares))
            give = "give weight_fn=, a function of a piece, and " if division.weight_fn is None else ""
            return in_loss(division, f"wrong normalisation: in the batch, the pieces have the weights {got}, but "
                           f"accumulation used {used}", f"{give}let weight_fn return {code}")
    return []


def _packing(division: Division, fitted: np.ndarray) -> str:
    """Return advice about packed documents, if the loss may divide by fewer tokens than `weight_fn` counts.

    A document of n tokens has n - 1 targets. Fitted weights are known up to a factor: search a factor that makes each a
    whole number, at least two thirds of the count (documents of three tokens).
    """
    counted, fitted = division.weights, fitted / (fitted.sum() or 1.0)
    sums = np.arange(counted.sum() // 2, min(counted.sum(), 10_000))  # with more, rounding hides whole numbers
    targets = np.outer(sums, fitted)
    fits = (abs(targets - targets.round()) < 0.01) & (counted / 1.5 < targets + 0.01) & (targets < counted + 0.01)
    return _PACKED if division.weight_fn is not None and fits.all(axis=1).any() else ""


def _usual_weights(division: Division, pieces: list[tuple]) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the usual denominators of means: their code, and its values for some pieces."""
    function = inspect.unwrap(division.forward_fn)
    parameters = inspect.signature(getattr(function, "construct", function)).parameters.values()
    first = [p.name for p in parameters if p.kind != p.VAR_POSITIONAL][:len(pieces[0]) - len(division.names)]
    for argument, axis, *values in zip((*first, *division.names), division.cut, *pieces):
        if isinstance(values[0], Tensor) and values[0].ndim:
            sizes = [f"{{}}.shape[{axis}]" if axis else "len({})"] * (axis is not None)
            parts = ("{}", "{}[1:]" if axis == 1 else "{}[:, 1:]")[:values[0].ndim]  # whole, and shifted along time
            for form in [*sizes, *(count.format(part) for part in parts for count in _COUNTS)]:
                counts = [float(eval(form.format("a"), {"a": value.asnumpy()})) for value in values]
                yield form.format(argument), np.array(counts)


def _two_means(division: Division, comparison: Comparison) -> list[Cause]:
    """Return the cause if the loss is a sum of two means, over counts a and b of the arguments.

    Let a part i of the batch have the gradient A_i + B_i. Some parts together have mean_a(A) + mean_b(B), which is
    mean_a(A + B) + mean_b(B) - mean_a(B): for 4 parts, 11 equations for 3 differences of the B_i. With 2 parts, any two
    counts solve the only equation.
    """
    if division.samples < 3:
        return []
    parts = np.array_split(np.arange(division.samples), min(4, division.samples))
    sets = [some for size in range(len(parts)) for some in combinations(range(len(parts)), size + 1)]
    inputs = [division.rows(np.concatenate([parts[i] for i in some])) for some in sets]
    gradients = np.array([division.sketch(division.gradients(rows)) for rows in inputs])
    if not np.isfinite(gradients).all():  # a part has no token: counts of tokens explain nothing
        return []
    split = np.split(gradients, [-1], axis=1)  # gradients, losses
    split = [np.asarray(np.linalg.qr(values.T, mode="r")).T for values in split]  # enough for norms and sums
    inside = np.array([[part in some for part in range(len(parts))] for some in sets[len(parts):]])
    means: dict[bytes, tuple[str, np.ndarray]] = {}
    for code, weight in _usual_weights(division, inputs[:len(parts)]):
        if (weight > 0).all():
            shares = inside * weight / (inside @ weight)[:, None]
            means.setdefault(shares.round(9).tobytes(), (code, shares))
    for (one, a), (other, b) in combinations(means.values(), 2):
        left = [values[len(parts):] - a @ values[:len(parts)] for values in split]
        left = [rest - (b - a) @ np.linalg.lstsq(b - a, rest, rcond=1e-9)[0] for rest in left]
        if all(np.linalg.norm(rest) <= comparison.rounding * np.linalg.norm(of) for rest, of in zip(left, split)):
            return in_loss(division, f"wrong normalisation: the loss is a sum of two means, over {one} and {other}",
                           "return the means as a tuple, with losses=2, and let weight_fn return their counts, "
                           f"({one}, {other}) in the order of the means")
    return []


def _nonlinear_backward(division: Division, comparison: Comparison, called: list[nn.Cell]) -> list[Cause]:
    """Return the causes if the gradient does not scale with the loss: layers with their own bprop, or the loss.

    In the mean over a piece, samples get larger gradients than in the mean over the batch.
    """
    scale = float(2.0 ** np.ceil(np.log2(len(division.pieces))))  # by a power of two: exact in any dtype
    if _scales(division, comparison, scale):
        return []
    added = _ADDED_TO_SEVERAL if division.several else _ADDED
    return _backward_of(division, called, added if _adds(division, comparison) else _NONLINEAR)


def _not_scaled(division: Division, comparison: Comparison, called: list[nn.Cell]) -> list[Cause]:
    """Return the causes if a part of the gradient does not scale with the loss, given a loss scaler."""
    if division.loss_scale == 1 or _scales(division, comparison, 1.0):
        return []
    return _backward_of(division, called, _NOT_SCALED if _adds(division, comparison) else _NONLINEAR)


def _scales(division: Division, comparison: Comparison, times: float) -> bool:
    other = division.gradients(division.batch, times=times)
    return bool((division.norms(other - comparison.whole) <= comparison.explained).all())


def _adds(division: Division, comparison: Comparison) -> bool:
    """Return whether the gradient of t times the loss is a * t + b.

    Between the positive t, a clip begins to bind. At t = -1, a clip that always binds is -b, not b.
    """
    small, one, large, minus = (
        division.gradients(division.batch, times=t) for t in (_FEW, 1.0, 1 / _FEW, -1.0))  # a + b / t
    left = _FEW * small - (1 + _FEW) * one + large, minus - one + 2 * (large - one) / (_FEW - 1)
    return all((division.norms(rest) <= 4 * comparison.explained).all() for rest in left)


def _backward_of(division: Division, cells: Iterable[nn.Cell], cause: tuple[str, str]) -> list[Cause]:
    own = [cell for cell in cells if cell.has_bprop]
    return in_layers(division, own, *cause) or in_loss(division, *cause)
