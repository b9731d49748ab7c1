"""Find out whether an optimizer treats each element by itself, so that it can update slices of parameters."""
from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import numpy as np
from mindspore import Parameter, Tensor, nn, ops

from ..distributed.ranks import together
from ..distributed.zero import whole_of
from ..tensors import as_array
from .optimizers import state_of
from .stages import overrides

if TYPE_CHECKING:
    from .stages import Stage

# Optimizers of MindSpore 2.10 that use norms, factors or sums of a whole parameter.
_LOOKS_AT_WHOLES = ("LARS", "Lamb", "AdaFactor", "ThorGpu", "ThorAscend", "AdaSumByGradWrapCell",
                    "AdaSumByDeltaWeightWrapCell")
_REMEDY = "give an elementwise optimizer such as nn.AdamWeightDecay, or zero=0 with the whole parameters"


def require_divisible(optimizer: Callable, stages: tuple[Stage, ...], divides: bool) -> None:
    """Raise ValueError for an optimizer or stage that needs whole parameters or gradients, if ranks divide them.

    Optimizers that are not MindSpore's own are tried by `require_elementwise`.
    """
    if not divides:
        return
    for stage in stages:
        if overrides(stage, "accepts", "on_update") and not stage.takes_slices:
            raise ValueError(f"{type(stage).__name__} looks at the gradients of a window, but with zero > 0 a rank has "
                             "only slices of them; sum over elements by self.exchange.over_slices and set takes_slices "
                             "= True, or give zero=0")
    for held in _optimizers_in(optimizer):
        name = next((kind.__name__ for kind in type(held).__mro__ if _is_of_mindspore(kind)
                     and kind.__name__ in _LOOKS_AT_WHOLES), None)
        if name is not None:
            raise ValueError(f"{name} looks at whole parameters, but with zero > 0 a rank updates only slices; "
                             f"{_REMEDY}")
        if any(getattr(held, "grad_centralization_flags", ())) or getattr(held, "grad_centralization", False):
            raise ValueError("the optimizer has grad_centralization=True, a mean over whole gradients, but with zero > "
                             "0 a rank has only slices of them; leave it out, or give zero=0")
    if not _is_of_mindspore(type(optimizer)):
        together(lambda: require_elementwise(optimizer), ValueError)


def require_elementwise(optimizer: Callable) -> None:
    """Raise ValueError for an optimizer whose update of some elements depends on the gradients of others.

    It makes two updates with random gradients, then two from the same start, in which half of the elements have
    gradients 10,000 times as large. The other half must move as before. Gradients from 1e-6 to 1e7 are tried, to cross
    the threshold of an optimizer that uses a norm. The trial does not find what an optimizer does only in later
    updates, or what depends on the shape of a parameter. Parameters and plain numbers are restored afterwards.
    """
    restore, rng = _restoring(optimizer), np.random.default_rng(0)
    try:
        has_moved = [_moves_alone(optimizer, restore, scale, rng) for scale in (1e-6, 1e-3, 1.0, 1e3)]
    finally:
        restore()
    if not any(has_moved):
        raise ValueError(f"{type(optimizer).__name__} moved nothing in two updates, so ms_accum cannot tell whether it "
                         "is elementwise, as zero > 0 requires; begin with a learning rate above 0, or give zero=0")


def _moves_alone(optimizer: nn.Optimizer, restore: Callable[[], None], scale: float, rng: np.random.Generator) -> bool:
    """Return whether gradients of this scale move anything. Raise ValueError if an element moves by those of others."""
    slices, has_moved = tuple(optimizer.parameters), False
    gradients = [np.asarray(scale * rng.normal(size=p.shape), np.float32) for p in slices]
    chosen = [rng.random(p.shape) < 0.5 for p in slices]
    changed = [np.where(mask, np.float32(1e4) * g, g) for mask, g in zip(chosen, gradients)]
    restore()
    before = _values(slices)
    one, other = (_moved(optimizer, slices, restore, of) for of in (gradients, changed))
    for parameter, mask, a, b, start in zip(slices, chosen, one, other, before):
        rounding = 1e-5 * np.abs(a - start).max(initial=0)
        if not np.allclose(a[~mask], b[~mask], rtol=0, atol=rounding, equal_nan=True):
            name = whole_of(parameter).name
            raise ValueError(f"{type(optimizer).__name__} updates elements of {name} by the gradients of others, but "
                             f"with zero > 0 a rank has only slices of them; {_REMEDY}")
        has_moved = has_moved or rounding > 0
    return has_moved


def _moved(optimizer: nn.Optimizer, slices: tuple[Parameter, ...], restore: Callable[[], None],
           gradients: list[np.ndarray]) -> list[np.ndarray]:
    """Return the slices after two updates from the start (two, because the first rate of a warmup may be 0)."""
    restore()
    for _ in range(2):
        optimizer(tuple(Tensor(g, p.dtype) for g, p in zip(gradients, slices)))
    return _values(slices)


def _restoring(optimizer: nn.Optimizer) -> Callable[[], None]:
    """Return a function that restores an optimizer's Parameters and plain numbers."""
    held = (*optimizer.parameters, *(p for _, p in state_of(optimizer)))
    values = _values(held)
    numbers = [(vars(holder), {name: value for name, value in vars(holder).items() if isinstance(value, (int, float))})
               for holder in _optimizers_in(optimizer) if hasattr(holder, "__dict__")]

    def restore() -> None:
        for parameter, value in zip(held, values):
            # Not set_data: a graph that is compiled already would keep the old values (MindSpore 2.10).
            ops.assign(parameter, Tensor(value, parameter.dtype))
        for attributes, before in numbers:
            attributes.update(before)

    return restore


def _values(parameters: tuple[Parameter, ...]) -> list[np.ndarray]:
    """Return copies of the values."""
    return [as_array(p).copy() for p in parameters]


def _optimizers_in(optimizer: Callable) -> Iterator[object]:
    """Yield an optimizer and the Cells in it."""
    yield optimizer
    if isinstance(optimizer, nn.Cell):
        yield from (cell for _, cell in optimizer.cells_and_names() if cell is not optimizer)


def _is_of_mindspore(kind: type) -> bool:
    return kind.__module__.split(".")[0] == "mindspore"
