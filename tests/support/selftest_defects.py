"""Defects of the package, put back to see whether the selftest finds them. What is patched of the core is only here.

Graph mode compiles these functions from their source.
"""
from types import SimpleNamespace
from typing import NamedTuple

import mindspore as ms
import numpy as np
from mindspore import Tensor, ops

from ms_accum.checkpoint import checkpoint
from ms_accum.core import accumulator, kernels, stages
from ms_accum.core import window as windows
from ms_accum.core.boundary import Boundary
from ms_accum.core.kernels import Portable
from ms_accum.core.stages import AdjustedLossScale, SkipWindow
from ms_accum.core.window import WEIGHT, Window
from ms_accum.model import cell
from ms_accum.selftest import checks
from ms_accum.steps import pieces, train_step
from ms_accum.steps.train_step import TrainStep
from ms_accum.tensors import finite_sum, square_sum


class Defect(NamedTuple):
    """A defect, and what the selftest says of it."""

    patches: list  # (owner, attribute, what it becomes)
    fails: set  # the checks that fail, with each driver that is run
    rows: str = "cell, PyNative, float32"  # `--rows`: the rows that are run; all others of them hold
    op_by_op: bool = False  # whether compiled functions run op by op, which is faster
    quick: bool = False  # whether `--quick` finds it
    says: str = ""  # what each row that fails says
    slow: bool = False  # whether other defects let its rows fail, too, or it takes seconds


_add, _alone, _apply, _built = Window.add, Window.alone, Window.update_with, accumulator.boundary_of
_call_cell, _call_step, _load = cell.TrainOneStepCell.__call__, TrainStep.__call__, Boundary.load


def unweighted(self, weight):
    return 1.0


def undivided(self, gradients, unit, numbers, applied):
    return _apply(self, gradients, unit * numbers[WEIGHT], numbers, applied)


def averaged(self, gradients, unit, numbers, applied):
    return _apply(self, gradients, unit / numbers[WEIGHT], numbers, applied)


def accepted(self, window):
    return True


def not_restored(self, gradients, unit, numbers, applied):
    for stage in self.called.scaling:
        unit = unit * stage.loss_scale()
    return _apply(self, gradients, unit, numbers, applied)


def nothing(*arguments):
    pass


def failing(self, *arguments, **options):
    raise RuntimeError("\n----\nno kernel for this\nmore")


def weighed_again(self, weight):
    return weight / self.unit


def weighed_equally(self, gradients, weight, loss, after):
    return _add(self, gradients, 1.0, loss, after)


def thrice(self, gradients, weight, loss):
    return _alone(self, tuple([3 * gradient for gradient in gradients]), weight, loss)


def twice_the_loss(self, *batch):
    loss = _call_cell(self, *batch)
    return tuple([2 * loss[0], *loss[1:]]) if isinstance(loss, tuple) else 2 * loss


def with_means(*arguments, reduction="mean", is_sum=False, **options):
    """Build a boundary that ignores `reduction` and `loss_reduction`."""
    return _built(*arguments, **options)


def reading(self, *batch):
    return _call_step(self, *batch), int(self.boundary.window.seen)


def loading_all_but(*ends):
    """MindSpore's operators as a load uses them, but for Parameters whose names end so."""
    def assign(parameter, value):
        return parameter if parameter.name.endswith(ends) else ops.assign(parameter, value)
    return [(checkpoint, "ops", SimpleNamespace(**{**vars(ops), "assign": assign}))]


def without_counts(self, counts, *others):
    return _load(self, self.window.counts.asnumpy().copy(), *others)


def uncounted(self, *arguments):
    mean = _apply(self, *arguments)
    ops.assign(self.seen, self.seen * 0)
    return mean


def nan_alone(gradients):
    found = [ops.isnan(gradient.astype(ms.float32)).any() for gradient in gradients]
    return ops.where(sum(flag.astype(ms.float32) for flag in found) > 0, Tensor(np.nan), Tensor(1.0))


def seeing(broken):
    """A patch of the test whether gradients are finite."""
    return [(stages, "finite_sum", broken)]


class Halves(Portable):
    def scale(self, factor, gradients, dtypes):
        return super().scale(factor / 2, gradients, dtypes)


def in_place(kind=None):
    """Patches that test these kernels, or Ascend's own, on CPU."""
    return [(checks, "IN_PLACE", ("CPU",)), *([(kernels, "InPlace", kind)] if kind else [])]


RAGGED, SAVE, ONE, MEANS, SUMS = ALL = (
    "ragged windows", "save and resume", "windows of one", "token weights, means", "token weights, sums")
DEFECTS = {
    # A cell, op by op.
    "weights are ignored": Defect([(Window, "factor_of", unweighted)], {RAGGED, MEANS}, slow=True),
    "the sum is not divided": Defect([(Window, "update_with", undivided)], {*ALL}),
    "nothing is clipped": Defect([(windows, "clip_factor", lambda norm, clip_norm: 1.0)], {RAGGED}, slow=True),
    "the norm is that of the sum": Defect(
        [(windows, "square_sum", lambda gradients, factor=1.0: square_sum(gradients))], {RAGGED, SAVE}, slow=True),
    "NaN is applied": Defect(
        [(SkipWindow, "accepts", accepted)], {SAVE}, says="a window with NaN changed parameters or state", slow=True),
    "the loss scale stays in the gradient": Defect(
        [(Window, "update_with", not_restored)], {RAGGED, SAVE}, slow=True),
    "the loss scale stays as it is": Defect(
        [(AdjustedLossScale, "on_close", nothing)], {SAVE}, says="the loss scale is 64 after an overflow, expected 32",
        slow=True),
    "buffers are not emptied": Defect([(Portable, "clear", nothing)], {*ALL} - {ONE}, slow=True),
    "flush does nothing": Defect(
        [(Boundary, "flush", lambda self: False)], {RAGGED}, says="flush() closed no window"),
    "gradients of a sum are weighed again": Defect([(Window, "factor_of", weighed_again)], {SUMS}, slow=True),
    "a counter is not loaded": Defect(
        [(Boundary, "load", without_counts)], {SAVE}, says="tensors differ after resuming", slow=True),
    "the optimizer's state is not loaded": Defect(
        loading_all_but("moments.first.bias"), {SAVE}, says="tensors differ after resuming", slow=True),
    "losses are doubled": Defect([(cell.TrainOneStepCell, "__call__", twice_the_loss)], {RAGGED, ONE}, slow=True),
    "samples are not counted": Defect(
        [(Window, "update_with", uncounted)], {RAGGED, ONE}, says="0 samples were counted", slow=True),
    "an error of MindSpore": Defect(
        [(Window, "begin", failing)], {*ALL}, says="RuntimeError: no kernel for this", slow=True),
    # By hand, in pieces and with other losses, op by op.
    "reductions are ignored": Defect(
        [(owner, "boundary_of", with_means) for owner in (accumulator, train_step, cell)], {SUMS}, SUMS, op_by_op=True,
        quick=True),
    "sums by hand are averaged": Defect(
        [(Window, "update_with", averaged)], {SUMS}, f"{SUMS}, by hand, op by op, float32", quick=True),
    "the last piece counts as a full one": Defect(
        [(pieces, "starts_of", lambda samples, pieces: [(0, 3), (2, 3)] if samples == 5 else [(0, 2)])],
        {RAGGED}, f"{RAGGED}, train step, 2 pieces, float32", op_by_op=True,
        says="50 samples were counted, expected 43"),
    "pieces of a loss of a batch weigh the same": Defect(
        [(Window, "add", weighed_equally)], {"loss of a batch"}, "loss of a batch, cached, 2 pieces, float32",
        op_by_op=True),
    "infinity is not seen": Defect(
        seeing(nan_alone), {"bad element"}, "bad element", op_by_op=True, quick=True,
        says="3 of 9 bad elements were seen"),
    "only the first gradient is looked at": Defect(
        seeing(lambda gradients: finite_sum(gradients[:1])), {"bad element"}, "bad element", op_by_op=True, quick=True,
        says="3 of 9 bad elements were seen", slow=True),
    "finite gradients are left out": Defect(
        seeing(lambda gradients: Tensor(np.nan)), {"bad element"}, "bad element", op_by_op=True, quick=True,
        says="finite gradients were left out"),
    "kernels in place are wrong": Defect(
        in_place(Halves), {"kernels in place"}, "kernels in place", op_by_op=True, quick=True),
    # Compiled.
    "the sum is not divided, compiled": Defect(
        [(Window, "update_with", undivided)], {SUMS}, f"{SUMS}, train step, float32", slow=True),
    "the loss scale stays in the gradient, compiled": Defect(
        [(Window, "update_with", not_restored)], {RAGGED}, f"{RAGGED}, by hand, compiled, float32", slow=True),
    "NaN is applied, in graph mode": Defect(
        [(SkipWindow, "accepts", accepted)], {SAVE}, f"{SAVE}, cell, graph mode, float32", slow=True),
    "windows of one are wrong": Defect(
        [(Window, "alone", thrice)], {ONE}, f"{ONE}, train step, float32", slow=True),
    "the device is read in each microbatch": Defect(
        [(TrainStep, "__call__", reading)], {"reads of the device"}, "reads of the device",
        says="24 reads in 8 windows, expected 0", slow=True),
    "kernels in place do not exist": Defect(
        in_place(), {"kernels in place"}, "kernels in place, train step, float32", says="RuntimeError: The pointer"),
}
