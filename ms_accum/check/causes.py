"""Why an accumulated gradient differs from that of the undivided batch: random layers, layers that couple samples, the loss."""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Optional

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn

from .comparison import CONFIDENCE, Comparison, Division, norms
from .groupnorm import BATCH_NORMS, has_batch_statistics, statistics_of
from .isolation import watched, write

DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, ms.mint.nn.Dropout, ms.mint.nn.Dropout2d)
Cells = dict[str, nn.Cell]
_LISTED = 6  # numbers that a cause lists


@dataclass(frozen=True)
class Cause:
    """A reason why accumulation is not exact, or something that was switched off to compare."""

    layer: str  # its name in the network, or the name of the loss function
    type: str  # its class, or "function"
    what: str  # what it does
    remedy: str


def switch_off_dropout(cells: Cells) -> Cells:
    """Switch off the Dropout layers that are on, and return them."""
    active = {name: cell for name, cell in cells.items() if isinstance(cell, DROPOUTS) and cell.training and _drops(cell)}
    for cell in active.values():
        cell.training = False
    return active


def _drops(layer: nn.Cell) -> bool:
    dropped = getattr(layer, "p", None)
    if dropped is None:
        dropped = layer.prob if hasattr(layer, "prob") else 1 - layer.keep_prob
    return dropped > 0


def drawing(layers: Cells) -> list[Cause]:
    """Return a cause for each of some layers that are random, and could be switched off."""
    return [Cause(name, type(cell).__name__,
                  "random: no two runs of a batch draw the same numbers, accumulated or not; compared with the layer switched off",
                  "none needed: a mask concerns one sample at a time, so accumulation is exact for whatever is drawn")
            for name, cell in layers.items()]


def random_layers(division: Division, cells: Cells) -> Optional[Cells]:
    """Return the layers whose outputs differ between two runs of a batch while their inputs agree; None if nothing differs.

    Empty if no layer is random, but `forward_fn` itself. Layers behind a random one get other inputs and are not judged.
    """
    first, second = (Record(division.forward_fn, cells, division.batch) for _ in range(2))
    # Kernels that sum up in any order differ in their last digits, random numbers from the first one on.
    limit = np.sqrt(division.roundoff)

    def differ(one: Any, other: Any) -> bool:
        return any(distance(a, b) > limit for a, b in zip(one, other))

    found = {}
    for name, cell in cells.items():
        if id(cell) in first.calls and id(cell) in second.calls:
            one, other = first.calls[id(cell)], second.calls[id(cell)]
            if differ(one.outputs, other.outputs) and not differ(one.inputs, other.inputs):
                found[name] = cell
    found = innermost(found, cells)
    return found if found or differ([first.loss], [second.loss]) else None


def switch_off_random(division: Division, cells: Cells) -> tuple[Cells, Optional[Cells]]:
    """Switch off random layers until two runs agree; return those layers, and what `random_layers` then finds."""
    off: Cells = {}
    while True:
        random = random_layers(division, cells)
        if random is None or random.keys() <= off.keys():  # found again: it cannot be switched off
            return {name: cell for name, cell in off.items() if name not in (random or ())}, random
        for cell in random.values():
            cell.training = False  # it alone: a BatchNorm inside of it stays as it is
        off.update(random)


def draws_itself(name: str, drawing: Callable) -> Cause:
    """Return the cause for a function that is random, or a layer that cannot be switched off."""
    return Cause(name, _type(drawing), "random: two evaluations of the same batch differ, so nothing can be compared",
                 "let it draw in a layer only while self.training is True, and check again")


def _type(function: Callable) -> str:
    return type(function).__name__ if isinstance(function, nn.Cell) else "function"


def batch_norms(cells: Cells, called: set[int]) -> Cells:
    """Return the BatchNorm layers that ran and normalise by their batch."""
    norms = {name: cell for name, cell in cells.items() if isinstance(cell, BATCH_NORMS)}
    wrapped = {id(statistics_of(cell)) for cell in norms.values() if statistics_of(cell) is not cell}
    return {name: cell for name, cell in norms.items()
            if id(cell) in called and id(cell) not in wrapped and _uses_batch(statistics_of(cell))}


def _uses_batch(layer: nn.Cell) -> bool:
    return has_batch_statistics(layer) and (layer.training or layer.use_batch_statistics is True)


def statistics_of_batch(layers: Cells) -> list[Cause]:
    """Return a cause for each BatchNorm."""
    return [Cause(name, type(cell).__name__, "batch statistics: normalises by mean and variance of the microbatch, not of the batch",
                  "batchnorm_to_groupnorm(network), or freeze the statistics: set_train(False) on the layer")
            for name, cell in layers.items()]


def freeze(division: Division, layers: Cells) -> None:
    """Let BatchNorm layers normalise every piece by the statistics of the undivided batch."""
    inner = {name: statistics_of(cell) for name, cell in layers.items()}
    record = Record(division.forward_fn, inner, division.batch)
    for cell in inner.values():
        x = record.calls[id(cell)].inputs[0].astype(ms.float32).asnumpy().astype(np.float64)
        axes = tuple(axis for axis in range(x.ndim) if axis != 1)
        write(cell.moving_mean, x.mean(axes).astype(np.float32))
        write(cell.moving_variance, x.var(axes).astype(np.float32))
        cell.training = False
        if cell.use_batch_statistics is not None:
            cell.use_batch_statistics = None


def coupling_layers(division: Division, cells: Cells) -> list[Cause]:
    """Return a cause for each innermost layer whose output for some samples changes when the others are removed.

    Each layer that ran is run again on a part of its input, along the axis in which the batch and a piece of it differ.
    """
    batch = Record(division.forward_fn, cells, division.batch)
    piece = Record(division.forward_fn, cells, division.pieces[0])
    limit = CONFIDENCE * division.perturbation
    found = {}
    for name, cell in cells.items():
        if id(cell) in batch.calls and id(cell) in piece.calls:
            depth = 1 + sum(1 for _ in cell.cells_and_names())
            whole, part = batch.calls[id(cell)], piece.calls[id(cell)]
            expected = whole.cut_outputs(part)
            try:
                got = whole.run_on(part) if expected else []
            except Exception:  # a layer that runs only inside of another one cannot be judged
                continue
            if any(distance(a, b) > limit * depth for a, b in zip(got, expected) if b is not None):
                found[name] = cell
    return [Cause(name, type(cell).__name__, "couples samples: its output for one sample depends on the others in the microbatch",
                  "a layer that sees one sample at a time, such as LayerNorm or GroupNorm")
            for name, cell in innermost(found, cells).items()]


def innermost(found: Cells, cells: Cells) -> Cells:
    """Return those that contain no other one of them."""
    def holds_another(cell: nn.Cell) -> bool:
        inner = {id(c) for _, c in cell.cells_and_names()} - {id(cell)}
        return any(id(other) in inner for other in found.values())

    return {name: cell for name, cell in found.items() if not holds_another(cell)}


class Call:
    """One call of a cell: the cell, its arguments, its outputs."""

    def __init__(self, cell: nn.Cell, arguments: tuple, keywords: dict, output: Any) -> None:
        self.cell, self.arguments, self.keywords = cell, arguments, keywords
        self.inputs = [a for a in (*arguments, *keywords.values()) if isinstance(a, Tensor)]
        self.outputs = [o for o in (output if isinstance(output, (tuple, list)) else (output,)) if isinstance(o, Tensor)]

    def run_on(self, part: Call) -> list[Tensor]:
        """Return the outputs of the cell for this call's arguments, cut to those of `part`, a call on a piece."""
        arguments = [_cut(a, b) for a, b in zip(self.arguments, part.arguments)]
        keywords = {name: _cut(a, part.keywords.get(name)) for name, a in self.keywords.items()}
        return Call(self.cell, (), {}, self.cell(*arguments, **keywords)).outputs

    def cut_outputs(self, part: Call) -> list[Optional[Tensor]]:
        """Return this call's outputs, cut to those of `part`; None where they are no rows of samples; empty if not comparable."""
        pairs = list(zip(self.outputs, part.outputs))
        inputs = zip(self.inputs, part.inputs)
        if any(_axis(a, b) is None and a.shape != b.shape for a, b in inputs):
            return []
        return [_cut(a, b) if _axis(a, b) is not None else None for a, b in pairs]


class Record:
    """One evaluation of `forward_fn`: the loss, and the first call of each of some cells, by the cell's id."""

    def __init__(self, forward_fn: Callable, cells: Cells, inputs: tuple) -> None:
        self.calls: dict[int, Call] = {}

        def visit(cell: nn.Cell, *call: Any) -> None:
            self.calls.setdefault(id(cell), Call(cell, *call))

        with watched(cells.values(), visit):
            self.loss = forward_fn(*inputs)


def _axis(whole: Tensor, part: Tensor) -> Optional[int]:
    """Return the only axis in which a part differs, if it is shorter there."""
    if whole.ndim != part.ndim:
        return None
    axes = [axis for axis in range(whole.ndim) if whole.shape[axis] != part.shape[axis]]
    return axes[0] if len(axes) == 1 and part.shape[axes[0]] < whole.shape[axes[0]] else None


def _cut(whole: Any, part: Any) -> Any:
    if not (isinstance(whole, Tensor) and isinstance(part, Tensor)):
        return part
    axis = _axis(whole, part)
    return whole if axis is None else whole[(slice(None),) * axis + (slice(0, part.shape[axis]),)]


def distance(one: Tensor, other: Tensor) -> float:
    """Return the norm of the difference, relative to the larger norm; infinite for different shapes or finiteness."""
    if one.shape != other.shape:
        return np.inf
    a, b = (np.nan_to_num(t.astype(ms.float32).asnumpy().astype(np.float64), nan=1e30) for t in (one, other))
    return float(np.linalg.norm(a - b) / (max(np.linalg.norm(a), np.linalg.norm(b)) or 1.0))


def wrong_normalisation(name: str, division: Division, comparison: Comparison, weighted: bool) -> list[Cause]:
    """Return the cause if some weights turn the gradients of the pieces into that of the batch: a sum, or a wrong denominator."""
    counted = [i for i, share in enumerate(division.shares) if share > 0 or np.isfinite(comparison.sketches[i]).all()]
    pieces = np.array([comparison.sketches[i] for i in counted])
    # A piece without tokens has loss NaN and gradient 0 with nn.CrossEntropyLoss(ignore_index=...).
    losses = np.array([comparison.losses[i] if comparison.sketches[i].any() else 0.0 for i in counted])

    def explains(counts: np.ndarray) -> bool:
        """Whether these weights of the pieces give the batch's gradient and loss."""
        terms = np.abs(counts) * np.linalg.norm(pieces, axis=1)
        gradient = np.linalg.norm(comparison.sketch - counts @ pieces) <= comparison.rounding * (
            np.linalg.norm(comparison.sketch) + terms.sum())
        loss = abs(comparison.loss - counts @ losses) <= comparison.rounding * (abs(comparison.loss) + np.abs(counts * losses).sum())
        return bool(gradient and loss)

    if explains(np.ones(len(counted))):
        return [Cause(name, "function", "wrong normalisation: the loss is a sum over samples, of which accumulation over "
                      f"{len(counted)} pieces takes the mean", "return the mean over the samples")]
    counts = _convex(comparison.sketch, pieces) * pieces.any(1)
    if explains(counts):
        what = (f"wrong normalisation: the batch counts its pieces {_numbers(counts)}, but they were weighted "
                f"{_numbers(division.shares[counted])}")
        remedy = "let weight_fn" if weighted else "give weight_fn=, a function of a piece, and let it"
        return [Cause(name, "function", what, f"{remedy} return what the mean in the loss divides by, e.g. the number of unmasked tokens")]
    return []


def couples_samples(name: str) -> Cause:
    """Return the cause where no other is found: a loss that couples samples."""
    return Cause(name, "function", "couples samples: no weights make the gradients of the pieces into that of the batch, as with a "
                 "contrastive loss", "none for plain accumulation: cut into fewer pieces, or train it with make_grad_cache_step")


def nonlinear_backward(name: str, division: Division, comparison: Comparison, cells: Cells) -> list[Cause]:
    """Return the causes if the gradient does not scale with the loss: layers with such a backward pass, or else the function.

    In the mean over a piece, samples get larger gradients than in the mean over the batch, by about the number of pieces.
    """
    scale = 2.0 ** np.ceil(np.log2(len(division.pieces)))  # by a power of two: exact in any dtype
    _, gradients = division.gradients(division.batch, scale)
    change = norms([g / scale - whole for g, whole in zip(gradients, comparison.whole)])
    if not (change > comparison.explained).any():
        return []
    found = _nonlinear_layers(division, cells, scale) or {name: division.forward_fn}
    return [Cause(layer, _type(cell), "not linear backwards: the gradient it returns is not proportional to the one it gets, as where "
                  "a bprop clips it or 16 bits underflow; the mean over a piece gives larger ones than the mean over the batch",
                  "let the layer treat gradients of any scale alike (clip relative to their norm, or clip the accumulated gradient with "
                  "clip_norm=); if 16 bits underflow, scale the loss") for layer, cell in found.items()]


def _nonlinear_layers(division: Division, cells: Cells, scale: float) -> Cells:
    """Return the innermost layers that get a scaled gradient, but return none, if the loss is scaled."""
    first, second = (_backward_passes(division, cells, s) for s in (1.0, scale))
    limit = CONFIDENCE * division.perturbation

    def proportional(some: tuple, others: tuple) -> bool:
        return all(distance(a.astype(ms.float32) * scale, b) <= limit for a, b in zip(some, others)
                   if isinstance(a, Tensor) and isinstance(b, Tensor))

    found = {n: cell for n, cell in cells.items() for one, other in zip(first.get(id(cell), ()), second.get(id(cell), ()))
             if proportional(one[1], other[1]) and not proportional(one[0], other[0])}
    return innermost(found, cells)


def _backward_passes(division: Division, cells: Cells, scale: float) -> dict[int, list[tuple]]:
    """Return the gradients of inputs and outputs of each call of a cell, by its id, of the loss times `scale`."""
    passes: dict[int, list[tuple]] = {}

    def hook(cell: nn.Cell, inputs: Any, outputs: Any) -> None:
        passes.setdefault(id(cell), []).append(tuple(t if isinstance(t, tuple) else (t,) for t in (inputs, outputs)))

    handles = [cell.register_backward_hook(hook) for cell in cells.values()]
    try:
        division.gradients(division.batch, scale)
    finally:
        for handle in handles:
            handle.remove()
    return passes


def _convex(target: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Return weights >= 0 with sum 1 that combine the rows to the target, exactly if that is possible."""
    others = rows[:-1] - rows[-1]
    counts = np.linalg.lstsq(others @ others.T, others @ (target - rows[-1]), rcond=1e-12)[0]
    counts = np.clip(np.append(counts, 1 - counts.sum()), 0, None)
    return counts / counts.sum()


def not_finite(name: str, division: Division, comparison: Comparison, names: list[str]) -> Cause:
    """Return the cause where a gradient is NaN or infinite: of the batch, or of some pieces alone."""
    if not np.isfinite(comparison.undivided).all():
        bad = [n for n, norm in zip(names, comparison.undivided) if not np.isfinite(norm)]
        return Cause(name, "function", f"not finite: the gradient of the undivided batch is NaN or infinite in {len(bad)} parameters, "
                     f"{bad[0]} first", "check data, loss scale and weights; nothing can be compared")
    bad = [i + 1 for i, sketch in enumerate(comparison.sketches) if division.shares[i] > 0 and not np.isfinite(sketch).all()]
    return Cause(name, "function", f"wrong normalisation: the batch has a finite gradient, but {len(bad)} of {len(division.pieces)} pieces "
                 f"(number {bad[0]} first) have not; a mean over no unmasked token is 0/0",
                 "give weight_fn=, which returns 0 for such a piece, or let the loss divide by at least 1")


def nothing_but_rounding(name: str) -> Cause:
    """Return the cause where any difference may be rounding."""
    return Cause(name, "function", "rounding: it can change the gradient by as much as there is, so nothing can be compared",
                 "check in float32, or with weights for which the gradient is not close to 0")


def _numbers(values: np.ndarray) -> str:
    shown = ", ".join(f"{value:.4g}" for value in values[:_LISTED])
    return shown if len(values) <= _LISTED else f"{shown}, ..."
