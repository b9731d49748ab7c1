"""Check whether accumulation is exact for a network, and report why it is not."""
from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import update_wrapper
from typing import Any, Optional, Union

import numpy as np
from mindspore import nn

from ..arguments import instance_of, spelled, whole_number
from ..batch import as_arguments, named_values, ordered, positional
from ..pieces import layout
from ..train_step import PIECES
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
        per_parameter: For each trainable parameter, by name, norm(accumulated - undivided) / norm(undivided); 0 for a
            gradient that is only rounding, infinity if one is not finite.
        tolerances: How much of each of these rounding explains.
        causes: Why the two differ. Random layers are listed too: they were switched off to compare and do not affect
            `ok`.
        samples: Samples in the batch.
        pieces: Pieces that the batch was cut into.
        losses: With several losses, the report of each; the figures above are then the largest of them.
    """

    ok: bool
    max_relative_difference: float
    per_parameter: dict[str, float]
    tolerances: dict[str, float]
    causes: tuple[Cause, ...]
    samples: int
    pieces: int
    losses: tuple[Report, ...] = ()

    @property
    def verdict(self) -> str:
        """The answer in one line."""
        return (f"Accumulation is {'exact' if self.ok else 'NOT exact'} for this network, loss and batch "
                f"({self.samples} samples in {self.pieces} pieces).")

    def __str__(self) -> str:
        if self.losses:
            return "\n".join([self.verdict, *(f"loss {i}: {report}" for i, report in enumerate(self.losses, 1))])
        figures = self.per_parameter
        # With a sum loss, all differences are almost equal, and rounding would choose another one each time: the first
        # counts.
        worst = next(n for n, difference in figures.items() if not difference < 0.999 * self.max_relative_difference)
        lines = [self.verdict, f"largest relative difference: {self.max_relative_difference:.1e} in {worst} "
                 f"(rounding: up to {self.tolerances[worst]:.1e})"]
        beyond = sorted((n for n in figures if not figures[n] <= self.tolerances[n]), key=figures.get)[::-1]
        if beyond:
            shown = _listed([f"{n} {figures[n]:.1e}" for n in beyond])
            lines.append(f"beyond rounding: {len(beyond)} of {len(figures)} parameters: {shown}")
        grouped: dict[tuple, list[str]] = {}
        for cause in self.causes:
            grouped.setdefault((cause.type, cause.what, cause.remedy), []).append(cause.layer)
        for (kind, what, remedy), layers in grouped.items():
            lines += [f"- {_listed(layers)} ({kind}): {what}", f"  remedy: {remedy}"]
        return "\n".join(lines)


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return ", ".join(names[:_LISTED]) + more


@spelled(PIECES)
def check_equivalence(
    forward_fn: Callable,
    network: nn.Cell,
    batch: Union[tuple, dict[str, Any]],
    pieces: int = 4,
    *,
    weight_fn: Optional[Callable] = None,
    losses: int = 1,
) -> Report:
    """Compare the gradient of a batch with the one accumulated over its pieces, and name the causes of a difference.

        report = check_equivalence(forward_fn, network, (data, label), pieces=4)
        print(report)  # a verdict, the largest difference, and each cause with its remedy
        assert report.ok

    The check computes op by op in every mode. An exact network costs two forward and backward passes of the batch, an
    inexact one about 7 to 16, plus two forward passes for each random layer behind another one (other than Dropout
    layers). Peak memory is that of the undivided batch; for an inexact network, all activations are kept for a moment.
    Afterwards, parameters, statistics, flags, random state and mode are restored, even if `forward_fn` raises. Its
    other side effects (files, prints, its own counters) remain. Layers that are neither in `network` nor in what
    `forward_fn` refers to affect the result, but are not named.

    Args:
        forward_fn: `(*batch) -> loss`, a float Tensor of shape `()`, as for `make_train_step`.
        network: The cell whose `trainable_params()` are trained. It is checked in its current training mode: call
            `set_train()` first.
        batch: The arguments of `forward_fn`, as for a train step: a tuple, or a dict that is matched by name, with at
            least one Tensor of two rows. NumPy arrays become Tensors.
        pieces: Number of pieces that the batch is cut into, as in `make_train_step`; at least 2. If it exceeds the
            number of samples, each piece is one sample.
        weight_fn: `(*piece) -> weight`, as for `make_train_step`. None: the number of samples.
        losses: Number of losses that `forward_fn` returns, as for `make_train_step`; each is checked by itself, with
            its own weights, and a cause that lies in one names it ("forward_fn, loss 2"). One that does not add up is a
            router's loss, for example: a product of two means over a batch is no mean over its pieces.

    Returns:
        The report. `report.ok` is False if, in any parameter, the two gradients differ by more than rounding explains
        (`ms_accum/check/comparison.py` derives the bound). Causes are found by experiment: random layers are switched
        off until two runs agree, BatchNorm layers are frozen at the statistics of the batch, other layers are run again
        on a part of their input, weights are fitted that turn the gradients of the pieces into that of the batch, and
        the loss is scaled to see whether the gradient follows.

    Raises:
        TypeError: If an argument is of the wrong kind, or `forward_fn` does not return a float Tensor.
        ValueError: If there is nothing to compare: one piece, one sample, no trainable parameter, or a loss that does
            not depend on the parameters.

    Source: the rounding bounds are those of Higham and Mary, "A New Approach to Probabilistic Rounding Error Analysis",
    2019 (https://doi.org/10.1137/18M1226312).

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
    _require_valid(forward_fn, network, weight_fn)
    instance_of("batch", batch, (tuple, list, Mapping), "a tuple or dict of forward_fn's arguments, e.g. (data, label)")
    arguments, named = as_arguments(batch)
    named = named_values(forward_fn, named)
    names = ordered(forward_fn, named)
    batch = (*arguments, *[named[name] for name in names])
    if layout(batch)[0] < 2:
        raise ValueError("the batch has 1 sample, which cannot be cut; give at least 2")
    pieces = whole_number("pieces", pieces, "give the number of pieces to cut the batch into", minimum=2)
    cells = cells_of(network, forward_fn, weight_fn)
    if named:
        forward_fn = _by_position("forward_fn", forward_fn, batch, names)
        weight_fn = weight_fn and _by_position("weight_fn", weight_fn, batch, names)
    losses = whole_number("losses", losses, "it is the number of losses that forward_fn returns")
    if losses == 1:
        return _checked(forward_fn, network, batch, pieces, weight_fn, cells)
    reports = []
    for t in range(losses):
        forward, weigh = (function and _entry(name, function, t, losses)
                          for name, function in (("forward_fn", forward_fn), ("weight_fn", weight_fn)))
        try:
            reports.append(_checked(forward, network, batch, pieces, weigh, cells))
        except ValueError as error:
            raise ValueError(f"loss {t + 1}: {error}") from error
    return _together(reports)


def _checked(forward_fn: Callable, network: nn.Cell, batch: tuple, pieces: int, weight_fn: Optional[Callable],
             cells: dict[str, nn.Cell]) -> Report:
    with untouched(cells.values()):
        dropout = causes.switch_off_dropout(cells)
        division = Division(forward_fn, network, batch, pieces, weight_fn)
        called = division.look(cells.values())
        found = causes.named({n: cell for n, cell in dropout.items() if id(cell) in called}, *causes.SWITCHED_OFF)
        comparison = division.compare()
        if not comparison.undivided.any() and not comparison.accumulated.any():
            raise ValueError("the gradient is 0 in all parameters of network, so there is nothing to compare; does "
                             "forward_fn call this network, and does its loss depend on it?")
        ok = comparison.exact
        if not ok:
            ok, comparison, more = _diagnose(division, comparison, cells, called)
            found += more
    return _report(ok, division, comparison, found)


def _diagnose(division: Division, comparison: Comparison, cells: dict[str, nn.Cell],
              called: set[int]) -> tuple[bool, Comparison, list[Cause]]:
    """Return whether it is exact with random layers switched off, the comparison to report, and the causes."""
    off, random = causes.switch_off_random(division, cells)
    found = causes.named(off, *causes.SWITCHED_OFF)
    if random is not None:
        return False, comparison, (
            found + (causes.named(random, *causes.RANDOM) or causes.of_loss(division, *causes.RANDOM)))
    if off:
        comparison = division.compare()
    if not np.isfinite(comparison.difference).all():
        return False, comparison, found + causes.not_finite(division, comparison)
    # Only now: with random layers on, perturbed weights would make rounding explain any difference.
    division.perturb(comparison)
    if comparison.rounding >= 1:
        return False, comparison, found + causes.of_loss(division, *causes.ROUNDING)
    if comparison.exact:
        return True, comparison, found
    norms, rest = causes.batch_norms(cells, called), comparison
    if norms:
        causes.freeze(division, norms)
        found += causes.named(norms, *causes.BATCH_STATISTICS)
        rest = division.compare()
        if not rest.exact:
            division.perturb(rest)
    if not rest.exact:
        found += (causes.coupling_layers(division, cells) or causes.wrong_normalisation(division, rest)
                  or causes.nonlinear_backward(division, rest, cells)
                  or causes.of_loss(division, *causes.COUPLING_LOSS))
    return False, comparison, found


def _report(ok: bool, division: Division, comparison: Comparison, found: list[Cause]) -> Report:
    names = [p.name for p in division.parameters]
    relative = comparison.relative.tolist()
    with np.errstate(divide="ignore", invalid="ignore"):
        tolerances = np.nan_to_num(comparison.explained / comparison.undivided, posinf=np.inf).tolist()
    return Report(ok, max(relative), dict(zip(names, relative)), dict(zip(names, tolerances)), tuple(found),
                  division.samples, len(division.pieces))


def _together(reports: list[Report]) -> Report:
    """Return the report on several losses: the figures of the one that is furthest beyond its tolerance."""
    def beyond(name: str) -> Callable[[Report], float]:
        return lambda report: report.per_parameter[name] / (report.tolerances[name] or 1.0)

    names = reports[0].per_parameter
    worst = {name: max(reports, key=beyond(name)) for name in names}
    return Report(all(report.ok for report in reports), max(report.max_relative_difference for report in reports),
                  {name: worst[name].per_parameter[name] for name in names},
                  {name: worst[name].tolerances[name] for name in names},
                  tuple([cause for report in reports for cause in report.causes]),
                  reports[0].samples, reports[0].pieces, tuple(reports))


def _entry(name: str, function: Callable, t: int, losses: int) -> Callable:
    """Return the function that returns one entry of what `function` returns, under a name that says which."""
    def entry(*batch: Any) -> Any:
        entries = function(*batch)
        if not isinstance(entries, tuple) or len(entries) != losses:
            got = f"{len(entries)} values" if isinstance(entries, tuple) else f"a {type(entries).__name__}"
            raise TypeError(f"{name} returned {got}, expected a tuple of {losses} because of losses={losses}")
        return entries[t]

    called = update_wrapper(entry, function)
    called.__name__ = f"{getattr(function, '__name__', type(function).__name__)}, loss {t + 1}"
    return called


def _by_position(name: str, function: Callable, batch: tuple, names: tuple[str, ...]) -> Callable:
    """Return a function of the whole batch that looks to the check like the given one (its name, its amp level)."""
    called = update_wrapper(positional(name, function, len(batch), names), function)
    called.__name__ = getattr(function, "__name__", type(function).__name__)
    return called


def _require_valid(forward_fn: object, network: object, weight_fn: object) -> None:
    instance_of("forward_fn", forward_fn, Callable, "a function of the batch")
    if weight_fn is not None:
        instance_of("weight_fn", weight_fn, Callable, "a function of the batch")
    if not instance_of("network", network, nn.Cell, "a mindspore.nn.Cell").trainable_params():
        raise ValueError("network has no trainable parameters, so there is no gradient to compare; is requires_grad "
                         "False in all of them?")
