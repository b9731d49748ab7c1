"""Defects that ms_accum has had, narrow draws around them, and what puts each of them back.

A defect is put back by functions that replace methods, or functions of a module. Most call what they replace: then a
change inside of that needs no change here. Functions for graphs are compiled from here.
"""
import random
import sys
from typing import NamedTuple

import numpy as np
from mindspore import Tensor, ops

from ms_accum.core import optimizers
from ms_accum.core import window as window_of_core
from ms_accum.core.boundary import require_whole
from ms_accum.core.stages import SkipMicrobatch
from ms_accum.core.window import Window
from ms_accum.steps import train_step
from ms_accum.steps.batch import Loss, starts_of
from ms_accum.steps.pieces import End, Pieces
from ms_accum.tensors import square_sum

from .cases import compose


class Replaced(NamedTuple):
    """A method of a class, or a function of a module and of all modules that import it, and what takes its place."""

    owner: object
    name: str
    function: object


def everywhere(function, other):
    """Replace a function in every module of ms_accum that has it."""
    modules = [module for name, module in sorted(sys.modules.items()) if name.split(".")[0] == "ms_accum"]
    return tuple(Replaced(module, function.__name__, other) for module in modules
                 if getattr(module, function.__name__, None) is function)


# What is replaced. Names of their own: a method that calls a function of its own name recurses without end in a graph.
_add, _alone, _apply, _empty, _adopt = Window.add, Window.update_alone, Window.update_with, Window.empty, Window.adopt
_restored, _judged = vars(Window)["_restored"], vars(Window)["_judged"]
_scaled, _gradients_of, _end = Loss.scaled, Loss.gradients_of, End.__call__
_placed, _weigh = vars(optimizers)["_placed_state"], SkipMicrobatch.weigh
_evaluated, _set_rates, _differentiated = Pieces.evaluated, optimizers.set_rates, Loss.differentiated
_options = optimizers.options_of_groups


# The number of samples multiplies the loss, and gradients are not weighted a second time.

def loss_times_samples(self, weight, *piece):
    value, loss, aux = _scaled(self, weight, *piece)
    return value * piece[0].shape[0], loss, aux


def added_without_weight(self, gradients, weight, factor=None, active=1, ends=0, begun=True):
    return _add(self, gradients, weight, 1.0, active, ends, begun)


def updated_in_unit_one(self, gradients, weight, factor=None):
    return _alone(self, gradients, weight, 1.0)


_WEIGHT_IN_LOSS = (Replaced(Loss, "scaled", loss_times_samples), Replaced(Window, "add", added_without_weight),
                   Replaced(Window, "update_alone", updated_in_unit_one))


# The loss scale.

def as_they_are(self, gradients):
    return gradients


def divided_in_the_unit(self, window):
    window["unit"] = window["unit"] / self.stages[0].scaler.scale_value
    _apply(self, window)


def restored_once(self, gradients, unit, numbers, measured, own, buffered):
    return _judged(self, _restored(self, gradients), unit, numbers, measured, own, buffered)


# Windows.

def divided_by_microbatches(self, window):
    window["weight"] = window["microbatches"]
    _apply(self, window)


def emptied_but_for_the_weight(self, buffers=True):
    kept = self.weight_sum + 0.0
    _empty(self, buffers)
    ops.assign(self.weight_sum, kept)


def adopted_as_they_are(self, loaded):
    _adopt(self, self.unit if self.unit_is_fixed or self.is_in_use else loaded)


def square_sum_of_the_sum(gradients, factor=1.0):
    return square_sum(gradients, 1.0)


def taken_in_any_case(self, gradients, weight):
    return _weigh(self, gradients, weight)[0], 1


def counted_under_a_name(self, window):
    """What `Window.update_with` does with a window of one microbatch; not every branch uses the name of the count."""
    factor = window["unit"] / window["weight"]
    step = ops.assign_add(self.update_step, 1)
    if isinstance(factor, Tensor):
        factor = ops.depend(factor, step)
    self.count_seen(window["weight"])
    self.optimizer(self.of_copies.scale(factor, window["gradients"], self.dtypes))
    ops.assign_add(self.closed_windows, 1)


# State and errors.

def placed_outside_of_lists(optimizer):
    return [(place, parameter) for place, parameter in _placed(optimizer) if "[" not in place]


def never_required(unfinished):
    pass


# Pieces and sums.

def summed_over_pieces(self, totals, *results):
    joined = _end(self, totals, *results)
    return (joined[0] * self.pieces, *joined[1:])


def full_pieces(samples, pieces):
    spans = starts_of(samples, pieces)
    return [(min(start, samples - spans[0][1]), spans[0][1]) for start, _ in spans]


def sums_that_are_weighed(self, rows, piece, begins):
    found = _gradients_of(self, rows, piece, begins)
    return {"loss": found["loss"], "aux": found["aux"], "gradients": found["gradients"], "weight": found["weight"],
            "factor": None}


def streamed_by_weight(self, grad_fn, factor, *arguments):
    return _differentiated(self, grad_fn, arguments[0], *arguments)


def weight_is_one(self, rows, piece, begins):
    found = _gradients_of(self, rows, piece, begins)
    if self.has_weight:
        found["weight"] = ops.ones_like(found["weight"])
    return found


# Evaluation and rates.

def mean_of_batches(self, *batch):
    total, count = _evaluated(self, *batch)
    return np.array([total / (count or 1.0), count != 0])


def first_rate_for_all(optimizer, given):
    return _set_rates(optimizer, given[0] if isinstance(given, (list, tuple)) else given)


def options_without_rates(optimizer):
    return [{name: value for name, value in group.items() if "lr" not in name} for group in _options(optimizer)]


_STEPS = ["step-pynative", "cell-pynative", "hand-pynative", "step"]
# What is fixed where a draw does not say otherwise.
_NARROW = {
    "driver": _STEPS, "level": "none", "front": "dense", "norm": "none", "backward_clip": False, "loss": "mean",
    "factor": 1.0, "event": "none", "nonfinite_at": None, "noise_scale": False, "weight": "samples",
    "on_nonfinite": "apply", "empty_at": None, "batch_axis": 0, "loss_reduction": "mean"}
# Each defect: the draw that has to find it, in which what a list holds takes turns, and what is replaced.
DEFECTS = {
    # The backward pass overflowed in float16.
    "the number of samples multiplies the loss": (
        {"level": ["O1", "O2", "O3", "auto"], "loss": "mse", "large": True, "scaler": None, "pieces": 1},
        _WEIGHT_IN_LOSS),
    # A layer's gradient was not linear in that of the layer above it.
    "the number of samples reaches a bprop": ({"backward_clip": True}, _WEIGHT_IN_LOSS),
    "the loss scale is divided out after the norm": (
        {"clip_norm": 0.1, "scaler": [("static", 70), ("static", 100), ("static", 120)]},
        (Replaced(Window, "_restored", as_they_are), Replaced(Window, "update_with", divided_in_the_unit))),
    "the spread is squared before the loss scale is divided out": (
        {"noise_scale": True, "accumulate_step": 2, "clip_norm": None,
         "scaler": [("static", 62), ("static", 70), ("static", 100)]},
        (Replaced(Window, "_restored", as_they_are), Replaced(Window, "_judged", restored_once))),
    "state in lists is not in a checkpoint": (
        {"optimizer": ["optim.NAdam", "optim.ASGD"], "event": "save", "save_at": 4, "accumulate_step": 2,
         "groups": False, "clip_norm": None},
        (Replaced(optimizers, "_placed_state", placed_outside_of_lists),)),
    "pieces before an error stay": (
        {"driver": ["step-pynative", "step"], "pieces": [2, 3], "event": "error", "accumulate_step": 3},
        everywhere(require_whole, never_required)),
    "the window is divided by its microbatches": (
        {"event": "shapes", "accumulate_step": 3, "weight": ["samples", "number", "tensor"]},
        (Replaced(Window, "update_with", divided_by_microbatches),)),
    "the weight sum is not emptied": (
        {"event": "shapes", "accumulate_step": 3, "weight": ["samples", "number", "tensor"]},
        (Replaced(Window, "empty", emptied_but_for_the_weight),)),
    "loaded buffers keep the unit of another run": (
        {"driver": ["step-pynative", "cell-pynative", "step"], "weight": ["samples", "number"], "event": "save",
         "save_at": 4, "load_into": "used", "accumulate_step": 3, "sizes": (9, 5, 9, 9, 5, 9)},
        (Replaced(Window, "adopt", adopted_as_they_are),)),
    "the norm is that of the sum": (
        {"clip_norm": 0.1, "accumulate_step": 2},
        (Replaced(window_of_core, "square_sum", square_sum_of_the_sum),)),
    "a skipped microbatch counts": (
        {"nonfinite_at": 1, "accumulate_step": 2, "pieces": 1, "on_nonfinite": "skip_microbatch"},
        (Replaced(SkipMicrobatch, "weigh", taken_in_any_case),)),
    "the loss of a batch is the sum of its pieces'": (
        {"driver": ["step-pynative", "step"], "pieces": [2, 3], "accumulate_step": 2, "shapes": (7, 7)},
        (Replaced(End, "__call__", summed_over_pieces),)),
    "the short last piece counts as a full one": (
        {"driver": ["step-pynative", "step"], "pieces": [2, 3], "accumulate_step": 2, "shapes": (7, 7)},
        everywhere(starts_of, full_pieces)),
    "the gradient of a sum is weighed": (
        {"driver": ["step-pynative", "cell-pynative", "step"], "loss_reduction": "sum", "event": "shapes",
         "accumulate_step": [3, 1], "weight": "tensor", "loss": "mean"},
        (Replaced(Loss, "gradients_of", sums_that_are_weighed),
         Replaced(Loss, "differentiated", streamed_by_weight))),
    "the weight that is returned does not count": (
        {"driver": ["step-pynative", "cell-pynative", "step"], "weight": "returned", "event": "shapes",
         "accumulate_step": 3, "pieces": 1},
        (Replaced(Loss, "gradients_of", weight_is_one),)),
    "a graph drops the count of updates": (
        {"driver": "step", "accumulate_step": 1, "clip_norm": None, "scaler": None, "pieces": 1},
        (Replaced(Window, "update_with", counted_under_a_name),)),
    "an evaluation is the mean of its batches' means": (
        {"driver": ["step-pynative", "step"], "evaluate_at": [0, 3], "event": "shapes",
         "weight": "tensor"},
        (Replaced(Pieces, "evaluated", mean_of_batches),)),
    "the first group's rate is set for all": (
        {"driver": ["step-pynative", "step"], "groups": True, "rates": "number", "rate_at": [0, 1],
         "optimizer": ["optim.SGD", "nn.Adam", "optim.AdamW"]},
        (Replaced(train_step, "set_rates", first_rate_for_all),)),
    "a graph keeps the rate": (
        {"driver": "step", "optimizer": "mint.SGD", "rate_at": 1, "accumulate_step": 2},
        everywhere(optimizers.options_of_groups, options_without_rates)),
}
PUT_BACK = [name for name, (_, changes) in DEFECTS.items() if changes]


def put_back(defect, monkeypatch):
    """Replace what brings a defect back. AttributeError if something of that name is not there."""
    for owner, name, function in DEFECTS[defect][1]:
        monkeypatch.setattr(owner, name, function)


def cases(defect, count=4):
    drawn = {**_NARROW, **DEFECTS[defect][0]}
    return [compose(random.Random(i).choice, **{key: value[i % len(value)] if isinstance(value, list) else value
                                                for key, value in drawn.items()}) for i in range(count)]
