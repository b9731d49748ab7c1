"""Check whether accumulation is exact for a network, and report the causes if it is not."""
from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Optional, Union

import numpy as np
from mindspore import amp, nn

from ..arguments import instance_of, one_of, whole_number
from ..core.accumulator import REDUCTIONS
from ..core.stages import checked_loss_scaler
from ..steps.batch import as_arguments, checked_axis, layout, named_values, positional
from ..steps.forward import Functions
from ..steps.train_mode import evaluating
from ..steps.train_step import require_functions
from . import causes
from .causes import in_loss
from .comparison import FLOAT32, Division
from .isolation import untouched

if TYPE_CHECKING:
    from .causes import Cause as Cause
    from .comparison import Comparison

_LISTED = 5  # parameters, and names of layers, that a report spells out
_CLEAR = 1e-3  # of the gradient: a mistake of this size has to be seen
_EXACT = 1e-5  # of each parameter's gradient: no mistake is as small in float32
_ANSWERS = {True: "Accumulation is exact", False: "Accumulation is NOT exact",
            None: "Cannot tell whether accumulation is exact"}
_COMPILED = "op by op, forward_fn raises an error; it was compiled, so no layer was looked at"


@dataclass(frozen=True)
class Report:
    """Hold the result of `check_equivalence`; `str(report)` is readable text.

    Attributes:
        ok: Whether the accumulated gradient equals that of the undivided batch, up to rounding; None if the check
            cannot tell, for the reason in `causes`.
        max_relative_difference: The largest value of `per_parameter`.
        per_parameter: For each trainable parameter, by name, norm(accumulated - undivided) / norm(undivided). It is 0
            if both gradients are only rounding errors, and infinity if one of them is not finite.
        tolerances: For each parameter, the relative difference that rounding can explain.
        causes: Why the gradients differ or cannot be compared. Random layers that were switched off are also listed.
        samples, pieces: Number of samples in the batch, and of the pieces that it was cut into.
        compiled: Whether `forward_fn` runs in graph mode only, and was compiled without a look at its layers.
        in_evaluation: Whether the network is in evaluation mode and has layers that depend on the mode.
    """

    ok: Optional[bool]
    max_relative_difference: float
    per_parameter: dict[str, float]
    tolerances: dict[str, float]
    causes: tuple[Cause, ...]
    samples: int
    pieces: int
    compiled: bool = False
    in_evaluation: bool = False

    @property
    def verdict(self) -> str:
        """Return the answer in one line."""
        mode = ", in evaluation mode: call network.set_train() to check how it trains" if self.in_evaluation else ""
        return (f"{_ANSWERS[self.ok]} for this network, loss and batch ({self.samples} samples in {self.pieces} "
                f"pieces){mode}.")

    def __str__(self) -> str:
        figures, most = self.per_parameter, self.max_relative_difference
        # With a sum loss, all are almost equal, and rounding would choose a different one each time: use the first.
        worst = next(name for name, difference in figures.items() if not difference < 0.999 * most)
        lines = [self.verdict, f"largest relative difference: {most:.1e} in {worst} (rounding: up to "
                 f"{self.tolerances[worst]:.1e})", *[_COMPILED] * self.compiled]
        grouped: dict[Cause, list[str]] = {}
        for cause in self.causes:
            grouped.setdefault(replace(cause, layer=""), []).append(cause.layer)
        for cause, layers in grouped.items():
            lines += [f"- {_listed(layers)} ({cause.type}): {cause.what}", f"  remedy: {cause.remedy}"]
        return "\n".join(lines)


def _listed(names: list[str]) -> str:
    return ", ".join(names[:_LISTED]) + (f" and {len(names) - _LISTED} more" if len(names) > _LISTED else "")


def check_equivalence(
    forward_fn: Callable,
    network: nn.Cell,
    batch: Union[tuple, dict[str, Any]],
    pieces: int = 4,
    *,
    batch_axis: int = 0,
    weight_fn: Optional[Callable] = None,
    has_weight: bool = False,
    loss_reduction: str = "mean",
    loss_scaler: Optional[amp.LossScaler] = None,
) -> Report:
    """Check whether accumulation is exact for a network, and name the causes and remedies if it is not.

    It compares the gradient of a batch with the one accumulated over its pieces. It runs op by op in every mode, or
    compiled if `forward_fn` fails op by op: then it looks at no layer. It takes about four forward and backward passes
    of the batch, and to find a cause two to three times as many. It needs memory for all activations of the batch.
    Check a network in float32, before it is given 16 bits.

    Afterwards, parameters, other state, flags, random state and mode are restored, even if `forward_fn` raises an
    error. Other side effects of `forward_fn` (files, prints) remain.

    Args:
        forward_fn: `(*batch) -> loss`, a float Tensor of shape `()`, as for `make_train_step`.
        network: The Cell whose `trainable_params()` are trained. It is checked in its current mode: call `set_train()`
            first.
        batch: The arguments of `forward_fn`: a tuple, or a dict that is matched by name. NumPy arrays become Tensors.
        pieces: Number of pieces that the batch is cut into, as in `make_train_step`; at least 2. If it exceeds the
            number of samples, each piece is one sample.
        batch_axis: The axis that counts the samples, as for `make_train_step`.
        weight_fn: `(*piece) -> weight`, as for `make_train_step`. None: the number of samples.
        has_weight: Whether `forward_fn` returns `(loss, weight)`, as for `make_train_step`.
        loss_reduction: "sum" if `forward_fn` returns a sum, as for `make_train_step`.
        loss_scaler: As for `make_train_step`. The accumulated gradients are then those of the scaled loss, divided by
            the scale; they must equal the gradients of the undivided batch without a scale.

    Returns:
        A `Report`. `report.ok` is False if the two gradients of any parameter differ by more than rounding can explain
        (`ms_accum/check/comparison.py` states the bound). It is None if the check cannot tell: if other layers than
        MindSpore's draw random numbers; if the gradient is not finite; or if rounding could hide a difference of a
        thousandth. In float32, differences below 1e-5 in all parameters count as exact.

    Raises:
        TypeError: If an argument is of the wrong kind, or `forward_fn` does not return a float Tensor.
        ValueError: If `has_weight` is given with a `weight_fn`. If there is nothing to compare: only one piece or one
            sample, no trainable parameter, or a loss that does not depend on the parameters.

    Source: the bound is that of Higham and Mary, 2019 (https://doi.org/10.1137/18M1226312).

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
    require_functions(True, has_weight, weight_fn, forward_fn=forward_fn)
    if not instance_of("network", network, nn.Cell, "a mindspore.nn.Cell").trainable_params():
        raise ValueError("network has no trainable parameters, so there is no gradient to compare; set "
                         "requires_grad=True in the parameters to train")
    instance_of("batch", batch, (tuple, list, Mapping), "a tuple or dict of forward_fn's arguments, e.g. (data, label)")
    arguments, named = as_arguments(batch)
    named = named_values(forward_fn, named)
    names = tuple(named)
    batch = (*arguments, *[named[name] for name in names])
    samples, _ = layout(batch, checked_axis(batch_axis))
    if samples < 2:
        raise ValueError(f"the batch has {samples} sample{'s' * (samples != 1)}, expected at least 2, which can be cut")
    pieces = whole_number("pieces", pieces, "give the number of pieces to cut the batch into", minimum=2)
    one_of("loss_reduction", loss_reduction, REDUCTIONS)
    loss_scale = 1.0 if loss_scaler is None else float(checked_loss_scaler(loss_scaler).scale_value)
    functions = Functions(positional("forward_fn", forward_fn, len(batch), names),
                          positional("weight_fn", weight_fn, len(batch), names), has_weight)
    name = getattr(forward_fn, "__name__", type(forward_fn).__name__)
    with untouched(network) as layers:
        division = Division(functions, name, network, layers, batch, pieces, batch_axis, loss_scale,
                            loss_reduction == "sum")
        off, random = causes.switch_off_random(division)
        comparison = division.compare()
        ok, found = (None, random) if random else _judged(division, comparison)
        figures, relative = [p.name for p in division.parameters], comparison.relative.tolist()
        return Report(ok, max(relative), dict(zip(figures, relative)),
                      dict(zip(figures, comparison.tolerances.tolist())), (*off, *found), samples,
                      len(division.pieces), division.compiles, in_evaluation=evaluating(network) is not None)


def _judged(division: Division, comparison: Comparison) -> tuple[Optional[bool], list[Cause]]:
    """Return the verdict and the causes."""
    close = division.roundoff <= FLOAT32 and comparison.relative.max() < _EXACT
    if close or comparison.exact:
        clear = close or comparison.rounding <= _CLEAR
        return (True, []) if clear else (None, in_loss(division, *causes.ROUNDING))
    if not comparison.finite:
        return None, in_loss(division, *causes.NOT_FINITE)
    if not np.isfinite(comparison.explained).all():
        return False, in_loss(division, *causes.NO_TOKEN)
    return False, causes.causes_of(division, comparison)
