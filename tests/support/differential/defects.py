"""Defects that ms_accum has had, narrow draws around them, and what puts each of them back.

A defect is put back by functions that replace methods, or functions of a module. Most call what they replace: then a
change inside of that needs no change here. Functions for graphs are compiled from here.
"""
import random
import sys
from typing import NamedTuple

import mindspore as ms
from mindspore import Tensor, ops

from ms_accum.batch_size.noise_scale import GradientNoiseScale
from ms_accum.core import boundary, optimizers
from ms_accum.core import window as window_of_core
from ms_accum.core.boundary import Boundary
from ms_accum.core.optimizers import Rates
from ms_accum.core.stages import SkipMicrobatch
from ms_accum.core.window import ADDED, ALONE, HELD, IN_ROW, Window
from ms_accum.steps import train_step
from ms_accum.steps.batch import starts_of
from ms_accum.steps.forward import forward_of, training_of
from ms_accum.tensors import cast, square_sum, unstack

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
_numbers, _of_last_update = vars(Window)["_numbers"], Boundary.of_last_update
_weigh, _measure, _held = SkipMicrobatch.weigh, GradientNoiseScale.measure, vars(optimizers)["_held"]
_looked_at, _set_rates, _init_rates = train_step.looked_at, Rates.set, Rates.__init__


# The number of samples multiplies the loss, and gradients are not weighted a second time.

def training_on_a_sum(window, functions, stream, closes):
    def times_samples(*piece):
        return functions.forward_fn(*piece) * piece[0].shape[0]

    train = training_of(window, functions._replace(forward_fn=times_samples), stream, closes)

    def train_on_a_sum(rows, piece, after):
        found = train(rows, piece, after)
        return found[0] / piece[0].shape[0], found[1], found[2]

    return train_on_a_sum


def factor_without_weight(self, weight):
    return 1.0 / (self.unit or 1.0)


def numbers_of_a_sum(self, weight, loss, factor, taken):
    return weight, cast(loss, ms.float32) / (self.unit or 1.0), 1.0, 0.0


def alone_in_unit_one(self, gradients, weight, loss):
    return self.update_with(gradients, 1.0, (weight, cast(loss, ms.float32), 1.0, 0.0), ALONE)


_WEIGHT_IN_LOSS = (Replaced(Window, "factor_of", factor_without_weight), Replaced(Window, "alone", alone_in_unit_one),
                   Replaced(Window, "_numbers", numbers_of_a_sum))


# Windows.

def spread_of_the_scaled_loss(self, gradients, factor, weight):
    spread, one = _measure(self, gradients, 1.0, weight)
    return spread * factor * factor, one


def divided_by_microbatches(self, unit, weight):
    return unit / cast(unstack(self.counts)[HELD], ms.float32)


def weight_itself(self, weight):
    return weight


def square_sum_of_the_sum(gradients, factor=1.0):
    return square_sum(gradients, 1.0)


def taken_in_any_case(self, gradients, weight):
    return weight, _weigh(self, gradients, weight)[1]


def sum_of_means(self, weight, loss, factor, taken):
    numbers = _numbers(self, weight, loss, factor, taken)
    return (weight, cast(loss, ms.float32), *numbers[2:]) if loss is not None else numbers


# State, places and errors.

def held_outside_of_lists(value):
    return [] if isinstance(value, list) else _held(value)


def never_required(mark):
    pass


def of_this_moment(self):
    counts, sums, held = _of_last_update(self)
    counts[ADDED] += held
    return counts, sums, held


def reset_where_it_is(self):
    self.missing, self.is_closed = None, False
    counts, sums = self._copies()
    counts[IN_ROW] = 0
    self.window.empty(counts, sums, 1)


# Pieces and sums.

def full_pieces(samples, pieces):
    spans = starts_of(samples, pieces)
    return [(min(start, samples - spans[0][1]), spans[0][1]) for start, _ in spans]


def factor_by_weight(self, weight):
    return weight / (self.unit or 1.0)


def alone_by_weight(self, gradients, weight, loss):
    return self.update_with(gradients, weight, (weight, cast(loss, ms.float32), 1.0, 0.0), ALONE)


def forward_of_weight_one(functions):
    forward = forward_of(functions)

    def forward_with_weight_one(weight, *piece):
        found = forward(weight, *piece)
        return found[0], ops.ones_like(found[1]) if functions.has_weight else found[1], found[2]

    return forward_with_weight_one


# Evaluation and rates.

def look_at_means(look, window, compiled, samples, cut, pieces, batch_axis, is_dynamic):
    looked = _looked_at(look, window, compiled, samples, cut, pieces, batch_axis, is_dynamic)

    def mean_of_a_batch(*batch):
        total, weight = looked(*batch).asnumpy()
        return Tensor([total / (weight or 1.0), weight != 0], ms.float32)

    return mean_of_a_batch


def first_rate_for_all(self, given):
    _set_rates(self, given[0] if isinstance(given, (list, tuple)) else given)


def rates_as_numbers(self, optimizer):
    _init_rates(self, optimizer)
    for group, given in self._groups:
        if "lr_float" in group:
            group["lr_float"] = given["lr_float"] = float(group["lr"])


_STEPS = ["step-pynative", "cell-pynative", "hand-pynative", "step"]
_CUT = ["step-pynative", "step"]
# What is fixed where a draw does not say otherwise.
_NARROW = {
    "driver": _STEPS, "level": "none", "front": "dense", "norm": "none", "backward_clip": False, "loss": "mean",
    "factor": 1.0, "event": "none", "nonfinite_at": None, "noise_scale": False, "weight": "samples",
    "on_nonfinite": "apply", "empty_at": None, "batch_axis": 0, "loss_reduction": "mean", "min_weight": None}
# Each defect: the draw that has to find it, in which what a list holds takes turns, and what is replaced.
DEFECTS = {
    # The backward pass overflowed in float16.
    "the number of samples multiplies the loss": (
        {"driver": [*_CUT, "cell-pynative"], "level": ["O1", "O2", "O3", "auto"], "loss": "mse", "large": True,
         "scaler": None, "pieces": 1, "aux": False},
        (*_WEIGHT_IN_LOSS, *everywhere(training_of, training_on_a_sum))),
    # A layer's gradient was not linear in that of the layer above it.
    "the number of samples reaches a bprop": (
        {"driver": [*_CUT, "cell-pynative"], "backward_clip": True, "aux": False},
        (*_WEIGHT_IN_LOSS, *everywhere(training_of, training_on_a_sum))),
    "the spread is squared before the loss scale is divided out": (
        {"noise_scale": True, "accumulate_step": 2, "clip_norm": None,
         "scaler": [("static", 62), ("static", 70), ("static", 100)]},
        (Replaced(GradientNoiseScale, "measure", spread_of_the_scaled_loss),)),
    "state in lists is not in a checkpoint": (
        {"optimizer": ["optim.NAdam", "optim.ASGD"], "event": "save", "save_at": 4, "accumulate_step": 2,
         "groups": False, "clip_norm": None},
        (Replaced(optimizers, "_held", held_outside_of_lists),)),
    "a file holds the place of this moment": (
        {"driver": [*_CUT, "cell-pynative"], "event": "save", "save_at": 4, "accumulate_step": 3},
        (Replaced(Boundary, "of_last_update", of_this_moment),)),
    "pieces before an error stay": (
        {"driver": _CUT, "pieces": [2, 3], "event": "error", "error_at": 2, "accumulate_step": 3},
        (Replaced(boundary, "_require_whole", never_required),)),
    "a reset after an error leaves the place": (
        {"driver": _CUT, "pieces": [2, 3], "event": "error", "error_at": 2, "accumulate_step": 3},
        (Replaced(Boundary, "reset", reset_where_it_is),)),
    "the window is divided by its microbatches": (
        {"event": "shapes", "accumulate_step": 3, "weight": ["samples", "number", "tensor"]},
        (Replaced(Window, "_normalised", divided_by_microbatches),)),
    "the loss of a window is the sum of its microbatches'": (
        {"driver": [*_CUT, "cell-pynative"], "event": "shapes", "accumulate_step": 3},
        (Replaced(Window, "_numbers", sum_of_means),)),
    "a window may be divided by less than min_weight": (
        {"min_weight": 40.0, "accumulate_step": [2, 1], "loss": ["mean", "masked"]},
        (Replaced(Window, "divisor", weight_itself),)),
    "the norm is that of the sum": (
        {"clip_norm": 0.1, "accumulate_step": 2},
        (Replaced(window_of_core, "square_sum", square_sum_of_the_sum),)),
    "a skipped microbatch counts": (
        {"nonfinite_at": 1, "accumulate_step": 2, "pieces": 1, "on_nonfinite": "skip_microbatch"},
        (Replaced(SkipMicrobatch, "weigh", taken_in_any_case),)),
    "the short last piece counts as a full one": (
        {"driver": _CUT, "pieces": [2, 3], "accumulate_step": 2, "shapes": (7, 7)},
        everywhere(starts_of, full_pieces)),
    "the gradient of a sum is weighed": (
        {"driver": ["step-pynative", "cell-pynative", "step"], "loss_reduction": "sum", "event": "shapes",
         "accumulate_step": [3, 1], "weight": "tensor", "loss": "mean"},
        (Replaced(Window, "factor_of", factor_by_weight), Replaced(Window, "alone", alone_by_weight))),
    "the weight that is returned does not count": (
        {"driver": ["step-pynative", "cell-pynative", "step"], "weight": "returned", "event": "shapes",
         "accumulate_step": 3, "pieces": 1},
        everywhere(forward_of, forward_of_weight_one)),
    "an evaluation is the mean of its batches' means": (
        {"driver": _CUT, "evaluate_at": [0, 3], "event": "shapes", "weight": "tensor"},
        (Replaced(train_step, "looked_at", look_at_means),)),
    "the first group's rate is set for all": (
        {"driver": _CUT, "groups": True, "rates": "number", "rate_at": [0, 1],
         "optimizer": ["optim.SGD", "nn.Adam", "optim.AdamW"]},
        (Replaced(Rates, "set", first_rate_for_all),)),
    "a graph keeps the rate": (
        {"driver": "step", "optimizer": "mint.SGD", "rate_at": 1, "accumulate_step": 2},
        (Replaced(Rates, "__init__", rates_as_numbers),)),
}


def put_back(defect, monkeypatch):
    """Replace what brings a defect back. AttributeError if something of that name is not there."""
    for owner, name, function in DEFECTS[defect][1]:
        monkeypatch.setattr(owner, name, function)


def cases(defect, count=4):
    drawn = {**_NARROW, **DEFECTS[defect][0]}
    return [compose(random.Random(i).choice, **{key: value[i % len(value)] if isinstance(value, list) else value
                                                for key, value in drawn.items()}) for i in range(count)]
