"""Is accumulation exact for my network? The check and its report."""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Optional

import numpy as np
from mindspore import nn

from ..arguments import instance_of, whole_number
from ..split import layout
from . import causes
from .causes import Cause as Cause
from .comparison import Comparison, Division
from .isolation import cells_of, untouched

_LISTED = 5  # parameters, and names of layers, that a report spells out


@dataclass(frozen=True)
class Report:
    """The result of `check_equivalence`; `str(report)` is readable text.

    Attributes:
        ok: Whether the accumulated gradient equals that of the undivided batch, up to rounding.
        max_relative_difference: The largest value of `per_parameter`.
        per_parameter: For each trainable parameter, by name, norm(accumulated - undivided) / norm(undivided); 0 for a gradient
            that is nothing but rounding, infinity if one is not finite.
        tolerances: What rounding explains of each of these.
        causes: Why the two differ; also random layers, which were switched off to compare and do not affect `ok`.
        samples: Samples in the batch.
        pieces: Pieces that it was cut into.
    """

    ok: bool
    max_relative_difference: float
    per_parameter: dict[str, float]
    tolerances: dict[str, float]
    causes: tuple[Cause, ...]
    samples: int
    pieces: int

    @property
    def verdict(self) -> str:
        """The answer in one line."""
        answer = "exact" if self.ok else "NOT exact"
        return f"Accumulation is {answer} for this network, loss and batch ({self.samples} samples in {self.pieces} pieces)."

    def __str__(self) -> str:
        # The first of those that are almost equal, as all are with a sum loss, or rounding would choose another one each time.
        worst = next(n for n, difference in self.per_parameter.items() if not difference < 0.999 * self.max_relative_difference)
        rounding = f"rounding: up to {self.tolerances[worst]:.1e}"
        lines = [self.verdict, f"largest relative difference: {self.max_relative_difference:.1e} in {worst} ({rounding})"]
        beyond = sorted((n for n in self.per_parameter if not self.per_parameter[n] <= self.tolerances[n]), key=self.per_parameter.get)
        if beyond:
            shown = ", ".join(f"{n} {self.per_parameter[n]:.1e}" for n in reversed(beyond[-_LISTED:]))
            lines.append(f"beyond rounding: {len(beyond)} of {len(self.per_parameter)} parameters: {_shortened(shown, len(beyond))}")
        grouped: dict[tuple, list[str]] = {}
        for cause in self.causes:
            grouped.setdefault((cause.type, cause.what, cause.remedy), []).append(cause.layer)
        for (kind, what, remedy), layers in grouped.items():
            lines += [f"- {_shortened(', '.join(layers[:_LISTED]), len(layers))} ({kind}): {what}", f"  remedy: {remedy}"]
        return "\n".join(lines)


def _shortened(shown: str, count: int) -> str:
    return shown if count <= _LISTED else f"{shown} and {count - _LISTED} more"


def check_equivalence(forward_fn: Callable, network: nn.Cell, batch: tuple, micro_size: int, *,
                      weight_fn: Optional[Callable] = None) -> Report:
    """Compare the gradient of a batch with the one accumulated over its pieces, and name what keeps them apart.

        report = check_equivalence(forward_fn, network, (data, label), 4)
        print(report)  # a verdict, the largest difference, and each cause with its remedy
        assert report.ok

    Args:
        forward_fn: `(*batch) -> loss`, a float Tensor of shape `()`, as given to `make_train_step`.
        network: The cell whose `trainable_params()` are trained. Its training flag says what is checked: call `set_train()` first.
        batch: The arguments of `forward_fn`, as given to a train step: a tuple that holds at least one Tensor with two rows.
        micro_size: Number of pieces that the batch is cut into, as by `make_train_step`; at least 2. More than samples: one each.
        weight_fn: `(*piece) -> weight`, as given to `make_train_step`. None: the samples.

    Returns:
        The report. `report.ok` is False if, in any parameter, the two differ by more than rounding explains (the bound is derived in
        `ms_accum/check/comparison.py`). Causes are found by experiment: random layers are switched off until two runs agree,
        BatchNorm layers are frozen at the statistics of the batch, other layers are run again on a part of their input, weights are
        fitted that turn the gradients of the pieces into that of the batch, and the loss is scaled to see whether the gradient follows.

    Raises:
        TypeError: If an argument is of the wrong kind, or `forward_fn` returns no float Tensor.
        ValueError: If there is nothing to compare: one piece, one sample, no trainable parameter, a loss that does not depend on them.

    It computes op by op in every mode: an exact network costs two forward and backward passes of the batch, another one about 7 to
    16, and two forward passes more for each random layer behind another (other than Dropout layers). Parameters, statistics, flags,
    random state and mode are restored, also if `forward_fn` raises; its other side effects (files, prints, counters of its own)
    remain. Layers that are neither in `network` nor in what `forward_fn` refers to are noticed, but not named. Memory is that of the
    undivided batch; if the network is inexact, all activations are kept for a moment.

    Source: the rounding bounds are those of Higham and Mary, "A New Approach to Probabilistic Rounding Error Analysis", 2019
    (https://doi.org/10.1137/18M1226312).

    Example:
        >>> import numpy as np, mindspore as ms
        >>> from mindspore import nn
        >>> from ms_accum import check_equivalence
        >>> network = nn.SequentialCell(nn.Dense(4, 8), nn.BatchNorm1d(8), nn.Dense(8, 1))
        >>> data = ms.Tensor(np.random.default_rng(0).normal(size=(8, 4)), ms.float32)
        >>> def forward_fn(x):
        ...     return (network(x) ** 2).mean()
        >>> report = check_equivalence(forward_fn, network.set_train(), (data,), 4)
        >>> print(report.ok, [(cause.layer, cause.type) for cause in report.causes])
        False [('1', 'BatchNorm1d')]
    """
    _require_valid(forward_fn, network, batch, weight_fn)
    micro_size = whole_number("micro_size", micro_size, "give the number of pieces to cut the batch into", minimum=2)
    cells = cells_of(network, forward_fn, weight_fn)
    with untouched(cells.values()):
        dropout = causes.switch_off_dropout(cells)
        division = Division(forward_fn, network, batch, micro_size, weight_fn)
        called = division.look(cells.values())
        found = causes.drawing({name: cell for name, cell in dropout.items() if id(cell) in called})
        comparison = division.compare()
        _require_gradient(comparison)
        ok = comparison.exact
        if not ok:
            ok, comparison, more = _diagnose(division, comparison, cells, called, weight_fn is not None)
            found += more
    return _report(ok, division, comparison, found)


def _diagnose(division: Division, comparison: Comparison, cells: dict[str, nn.Cell], called: set[int],
              weighted: bool) -> tuple[bool, Comparison, list[Cause]]:
    """Return whether it is exact with random layers switched off, the comparison to report, and the causes."""
    name = getattr(division.forward_fn, "__name__", type(division.forward_fn).__name__)
    names = [p.name for p in division.parameters]
    off, random = causes.switch_off_random(division, cells)
    found = causes.drawing(off)
    if random is not None:
        return False, comparison, [*found, *(causes.draws_itself(n, c) for n, c in (random or {name: division.forward_fn}).items())]
    if off:
        comparison = division.compare()
    if not np.isfinite(comparison.difference).all():
        return False, comparison, [*found, causes.not_finite(name, division, comparison, names)]
    # Only now: of random layers, perturbed weights would say that rounding explains anything.
    division.perturb(comparison)
    if comparison.rounding >= 1:
        return False, comparison, [*found, causes.nothing_but_rounding(name)]
    if comparison.exact:
        return True, comparison, found
    norms = causes.batch_norms(cells, called)
    rest = comparison
    if norms:
        causes.freeze(division, norms)
        found += causes.statistics_of_batch(norms)
        rest = division.compare()
        if not rest.exact:
            division.perturb(rest)
    if not rest.exact:
        found += (causes.coupling_layers(division, cells) or causes.wrong_normalisation(name, division, rest, weighted)
                  or causes.nonlinear_backward(name, division, rest, cells) or [causes.couples_samples(name)])
    return False, comparison, found


def _report(ok: bool, division: Division, comparison: Comparison, found: list[Cause]) -> Report:
    names = [p.name for p in division.parameters]
    relative = [float(r) for r in comparison.relative]
    with np.errstate(divide="ignore", invalid="ignore"):
        tolerances = np.nan_to_num(comparison.explained / comparison.undivided, posinf=np.inf)
    return Report(ok, max(relative), dict(zip(names, relative)), dict(zip(names, map(float, tolerances))), tuple(found),
                  division.samples, len(division.pieces))


def _require_valid(forward_fn: object, network: object, batch: object, weight_fn: object) -> None:
    instance_of("forward_fn", forward_fn, Callable, "a function of the batch")
    if weight_fn is not None:
        instance_of("weight_fn", weight_fn, Callable, "a function of the batch")
    if not instance_of("network", network, nn.Cell, "a mindspore.nn.Cell").trainable_params():
        raise ValueError("network has no trainable parameters, so there is no gradient to compare; is requires_grad False in all of them?")
    instance_of("batch", batch, (tuple, list), "a tuple of the arguments of forward_fn, e.g. (data, label)")
    samples, _ = layout(tuple(batch))
    if samples < 2:
        raise ValueError("the batch has 1 sample, which cannot be cut; give at least 2")


def _require_gradient(comparison: Comparison) -> None:
    if not comparison.undivided.any() and not comparison.accumulated.any():
        raise ValueError("the gradient is 0 in all parameters of network, so there is nothing to compare; does forward_fn call this "
                         "network, and does its loss depend on it?")
