"""Find by experiment why an accumulated gradient differs: random layers, layers that couple samples, the loss."""
from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, NamedTuple, Optional

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn

from .comparison import CONFIDENCE, Comparison, Division, norms, tensors_in
from .groupnorm import BATCH_NORMS, statistics_of
from .isolation import watched, write

DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, ms.mint.nn.Dropout, ms.mint.nn.Dropout2d)
_KEEPS_ALL = (("p", 0), ("prob", 0), ("keep_prob", 1))  # each class names its probability in another way
Cells = dict[str, nn.Cell]
_LISTED = 6  # numbers that a cause lists

# What a cause does, and the remedy.
SWITCHED_OFF = (
    "random: no two runs of a batch draw the same numbers, accumulated or not; compared with the layer switched off",
    "none needed: a mask concerns one sample at a time, so accumulation is exact for whatever is drawn")
RANDOM = (
    "random: two evaluations of the same batch differ, so nothing can be compared",
    "draw random numbers only in a layer, while its self.training is True, and check again")
BATCH_STATISTICS = (
    "batch statistics: normalises by mean and variance of the microbatch, not of the batch",
    "batchnorm_to_groupnorm(network), or freeze the statistics: use_batch_statistics=False in the layer")
COUPLING_LAYER = (
    "couples samples: its output for one sample depends on the others in the microbatch",
    "a layer that sees one sample at a time, such as LayerNorm or GroupNorm")
COUPLING_LOSS = (
    "couples samples: no weights make the gradients of the pieces into that of the batch, as with a contrastive loss",
    "none for plain accumulation: cut into fewer pieces, or train it with make_grad_cache_step")
NONLINEAR = (
    "nonlinear backward pass: the gradient it returns is not proportional to the one it gets, as where a bprop clips "
    "it or 16 bits underflow; the mean over a piece gives larger gradients than the mean over the batch",
    "treat gradients of any scale alike: clip relative to their norm, or clip the accumulated gradient with "
    "clip_norm=; if 16 bits underflow, scale the loss")
ROUNDING = (
    "rounding: it can change the gradient by more than its size, so nothing can be compared",
    "check in float32, or with weights for which the gradient is not close to 0")


@dataclass(frozen=True)
class Cause:
    """A reason why accumulation is not exact, or something that was switched off for the comparison."""

    layer: str  # its name in the network, or the name of the loss function
    type: str  # its class, or "function"
    what: str  # what it does
    remedy: str


def named(functions: Mapping[str, Callable], what: str, remedy: str) -> list[Cause]:
    """Return a cause for each of some layers or functions."""
    return [Cause(name, type(function).__name__ if isinstance(function, nn.Cell) else "function", what, remedy)
            for name, function in functions.items()]


def of_loss(division: Division, what: str, remedy: str) -> list[Cause]:
    """Return a cause that lies in the loss function."""
    function = division.forward_fn
    return [Cause(getattr(function, "__name__", type(function).__name__), "function", what, remedy)]


def switch_off_dropout(cells: Cells) -> Cells:
    """Switch off the Dropout layers that are on, and return them."""
    active = {name: cell for name, cell in cells.items() if isinstance(cell, DROPOUTS) and cell.training
              and not any(getattr(cell, key, None) == value for key, value in _KEEPS_ALL)}
    for cell in active.values():
        cell.training = False
    return active


def switch_off_random(division: Division, cells: Cells) -> tuple[Cells, Optional[Cells]]:
    """Switch off random layers until two runs agree; return those layers, and what `_random_layers` then finds."""
    off: Cells = {}
    while True:
        random = _random_layers(division, cells)
        if random is None or random.keys() <= off.keys():  # found again: it cannot be switched off
            return {name: cell for name, cell in off.items() if name not in (random or ())}, random
        for cell in random.values():
            cell.training = False  # it alone: a BatchNorm inside it stays as it is
        off.update(random)


def _random_layers(division: Division, cells: Cells) -> Optional[Cells]:
    """Return the layers whose outputs differ between two runs while their inputs agree; None if nothing differs.

    Empty if no layer is random, but `forward_fn` itself. Layers behind a random one get other inputs and are not
    judged.
    """
    (loss, first), (other_loss, second) = (_run(division, cells, division.batch) for _ in range(2))
    # Kernels that sum in any order differ in their last digits, random numbers from the first digit on.
    limit = np.sqrt(division.roundoff)

    def differ(some: Any, others: Any) -> bool:
        return any(distance(a, b) > limit for a, b in zip(tensors_in(some), tensors_in(others)))

    found = innermost({name: cells[name] for name, one, other in _both(cells, first, second)
                       if differ(one.output, other.output) and not differ(one.inputs, other.inputs)})
    return found if found or differ(loss, other_loss) else None


class Call(NamedTuple):
    """One call of a cell."""

    cell: nn.Cell
    arguments: tuple
    keywords: dict
    output: Any

    @property
    def inputs(self) -> list[Tensor]:
        """The Tensors that it was given."""
        return tensors_in((*self.arguments, *self.keywords.values()))


def _run(division: Division, cells: Cells, inputs: tuple) -> tuple[Tensor, dict[int, Call]]:
    """Return the loss, and the first call of each of some cells, by the cell's id."""
    calls: dict[int, Call] = {}

    def visit(cell: nn.Cell, *call: Any) -> None:
        calls.setdefault(id(cell), Call(cell, *call))

    with watched(cells.values(), visit):
        return division.forward_fn(*inputs), calls


def _both(cells: Cells, some: dict[int, Any], others: dict[int, Any]) -> list[tuple[str, Any, Any]]:
    """Return `(name, its entry in some, its entry in others)` of each cell that is in both."""
    return [(name, some[id(cell)], others[id(cell)]) for name, cell in cells.items()
            if id(cell) in some and id(cell) in others]


def innermost(found: Cells) -> Cells:
    """Return the cells that contain no other one of them."""
    ids = {id(cell) for cell in found.values()}
    return {name: cell for name, cell in found.items()
            if not any(id(inner) in ids and inner is not cell for _, inner in cell.cells_and_names())}


def distance(one: Tensor, other: Tensor) -> float:
    """Return the norm of the difference, relative to the larger norm; infinite for different shapes or finiteness."""
    if one.shape != other.shape:
        return np.inf
    a, b = (np.nan_to_num(t.astype(ms.float32).asnumpy().astype(np.float64), nan=1e30) for t in (one, other))
    return float(np.linalg.norm(a - b) / (max(np.linalg.norm(a), np.linalg.norm(b)) or 1.0))


def batch_norms(cells: Cells, called: set[int]) -> Cells:
    """Return the BatchNorm layers that ran and normalise by their batch."""
    layers = {name: cell for name, cell in cells.items() if isinstance(cell, BATCH_NORMS)}
    wrapped = {id(statistics_of(cell)) for cell in layers.values() if statistics_of(cell) is not cell}
    inner = {name: statistics_of(cell) for name, cell in layers.items() if id(cell) in called - wrapped}
    return {name: layers[name] for name, cell in inner.items()
            if (cell.training if cell.use_batch_statistics is None else cell.use_batch_statistics)}


def freeze(division: Division, layers: Cells) -> None:
    """Let BatchNorm layers normalise every piece by the statistics of the undivided batch."""
    inner = {name: statistics_of(cell) for name, cell in layers.items()}
    _, calls = _run(division, inner, division.batch)
    for cell in inner.values():
        x = calls[id(cell)].inputs[0].astype(ms.float32).asnumpy().astype(np.float64)
        axes = tuple(axis for axis in range(x.ndim) if axis != 1)
        write(cell.moving_mean, x.mean(axes).astype(np.float32))
        write(cell.moving_variance, x.var(axes).astype(np.float32))
        cell.training, cell.use_batch_statistics = False, None


def coupling_layers(division: Division, cells: Cells) -> list[Cause]:
    """Return a cause for each innermost layer whose output for some samples changes when the others are removed."""
    (_, batch), (_, piece) = (_run(division, cells, inputs) for inputs in (division.batch, division.pieces[0]))
    found = {}
    for name, whole, part in _both(cells, batch, piece):
        limit = CONFIDENCE * division.perturbation * (1 + sum(1 for _ in whole.cell.cells_and_names()))
        try:
            couples = any(distance(got, expected) > limit for got, expected in _on_a_part(whole, part))
        except Exception:  # a layer that runs only inside another one cannot be judged
            continue
        if couples:
            found[name] = whole.cell
    return named(innermost(found), *COUPLING_LAYER)


def _on_a_part(whole: Call, part: Call) -> list[tuple[Tensor, Tensor]]:
    """Run a layer on a part of its input, that of a piece; pair each output with the same part of the whole output."""
    if any(_axis(a, b) is None and a.shape != b.shape for a, b in zip(whole.inputs, part.inputs)):
        return []
    arguments = [_cut(a, b) for a, b in zip(whole.arguments, part.arguments)]
    keywords = {name: _cut(a, part.keywords.get(name)) for name, a in whole.keywords.items()}
    outputs = zip(*map(tensors_in, (whole.cell(*arguments, **keywords), whole.output, part.output)))
    return [(got, _cut(a, b)) for got, a, b in outputs if _axis(a, b) is not None]


def _axis(whole: Tensor, part: Tensor) -> Optional[int]:
    """Return the only axis in which a part differs, if it is shorter there."""
    axes = [axis for axis, (a, b) in enumerate(zip(whole.shape, part.shape)) if a != b]
    cut = whole.ndim == part.ndim and len(axes) == 1 and part.shape[axes[0]] < whole.shape[axes[0]]
    return axes[0] if cut else None


def _cut(whole: Any, part: Any) -> Any:
    if not (isinstance(whole, Tensor) and isinstance(part, Tensor)):
        return part
    axis = _axis(whole, part)
    return whole if axis is None else whole[(slice(None),) * axis + (slice(0, part.shape[axis]),)]


def wrong_normalisation(division: Division, comparison: Comparison) -> list[Cause]:
    """Return the cause if some weights turn the gradients of the pieces into that of the batch."""
    counted = [i for i, share in enumerate(division.shares) if share > 0 or np.isfinite(comparison.sketches[i]).all()]
    pieces = np.array([comparison.sketches[i] for i in counted])
    # A piece without tokens has loss NaN and gradient 0 with nn.CrossEntropyLoss(ignore_index=...).
    losses = np.array([comparison.losses[i] if comparison.sketches[i].any() else 0.0 for i in counted])

    def explains(counts: np.ndarray) -> bool:
        """Return whether these weights of the pieces give the batch's gradient and loss."""
        terms = np.abs(counts) @ np.linalg.norm(pieces, axis=1), np.abs(counts) @ np.abs(losses)
        differences = np.linalg.norm(comparison.sketch - counts @ pieces), abs(comparison.loss - counts @ losses)
        sizes = np.linalg.norm(comparison.sketch), abs(comparison.loss)
        return all(d <= comparison.rounding * (size + term) for d, size, term in zip(differences, sizes, terms))

    if explains(np.ones(len(counted))):
        return of_loss(division, "wrong normalisation: the loss is a sum over samples, of which accumulation over "
                       f"{len(counted)} pieces takes the mean", "return the mean over the samples")
    counts = _convex(comparison.sketch, pieces) * pieces.any(1)
    if not explains(counts):
        return []
    remedy = "give weight_fn=, a function of a piece, and let it" if division.weight_fn is None else "let weight_fn"
    return of_loss(division, f"wrong normalisation: the batch counts its pieces {_numbers(counts)}, but they were "
                   f"weighted {_numbers(division.shares[counted])}",
                   f"{remedy} return what the mean in the loss divides by, e.g. the number of unmasked tokens")


def _convex(target: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Return weights >= 0 with sum 1 that combine the rows to the target, exactly if that is possible."""
    others = rows[:-1] - rows[-1]
    counts = np.linalg.lstsq(others @ others.T, others @ (target - rows[-1]), rcond=1e-12)[0]
    counts = np.clip(np.append(counts, 1 - counts.sum()), 0, None)
    return counts / counts.sum()


def _numbers(values: np.ndarray) -> str:
    return ", ".join([f"{value:.4g}" for value in values[:_LISTED]] + ["..."] * (len(values) > _LISTED))


def not_finite(division: Division, comparison: Comparison) -> list[Cause]:
    """Return the cause where a gradient is NaN or infinite: that of the batch, or only those of some pieces."""
    bad = [p.name for p, norm in zip(division.parameters, comparison.undivided) if not np.isfinite(norm)]
    if bad:
        return of_loss(division, "not finite: the gradient of the undivided batch is NaN or infinite in "
                       f"{len(bad)} parameters, the first of which is {bad[0]}; nothing can be compared",
                       "check data, loss scale and weights")
    pieces = [i for i, (share, sketch) in enumerate(zip(division.shares, comparison.sketches), 1)
              if share > 0 and not np.isfinite(sketch).all()]
    return of_loss(division, "wrong normalisation: the gradient of the batch is finite, but not that of "
                   f"{len(pieces)} of {len(division.pieces)} pieces, the first of which is number {pieces[0]}; a mean "
                   "over no unmasked token is 0/0",
                   "give weight_fn=, which returns 0 for such a piece, or divide by at least 1")


def nonlinear_backward(division: Division, comparison: Comparison, cells: Cells) -> list[Cause]:
    """Return the causes if the gradient does not scale with the loss: layers with such a backward pass, or the loss.

    In the mean over a piece, samples get larger gradients than in the mean over the batch, by about the number of
    pieces.
    """
    scale = 2.0 ** np.ceil(np.log2(len(division.pieces)))  # by a power of two: exact in any dtype
    _, gradients = division.gradients(division.batch, scale)
    change = norms([g / scale - whole for g, whole in zip(gradients, comparison.whole)])
    if not (change > comparison.explained).any():
        return []
    limit = CONFIDENCE * division.perturbation

    def proportional(some: tuple, others: tuple) -> bool:
        return all(distance(a.astype(ms.float32) * scale, b) <= limit for a, b in zip(some, others)
                   if isinstance(a, Tensor) and isinstance(b, Tensor))

    passes = (_backward_passes(division, cells, loss_scale) for loss_scale in (1.0, scale))
    found = {name: cells[name] for name, some, others in _both(cells, *passes)
             if any(proportional(one[1], other[1]) and not proportional(one[0], other[0])
                    for one, other in zip(some, others))}
    return named(innermost(found), *NONLINEAR) or of_loss(division, *NONLINEAR)


def _backward_passes(division: Division, cells: Cells, scale: float) -> dict[int, list[list[tuple]]]:
    """Return the gradients of inputs and outputs of each call of a cell, by its id, of the loss times `scale`."""
    passes = defaultdict(list)

    def hook(cell: nn.Cell, inputs: Any, outputs: Any) -> None:
        passes[id(cell)].append([t if isinstance(t, tuple) else (t,) for t in (inputs, outputs)])

    with ExitStack() as afterwards:
        for cell in cells.values():
            afterwards.callback(cell.register_backward_hook(hook).remove)
        division.gradients(division.batch, scale)
    return passes
