"""Defects that ms_accum has had, narrow draws around them, and what puts each of them back.

A defect is put back by functions that replace methods, or functions of a module. Most call what they replace: then a
change inside of that needs no change here. Functions for graphs are compiled from here.
"""
import random
import sys
from typing import NamedTuple

from mindspore import Tensor, ops

from ms_accum.core import optimizers
from ms_accum.core.buffers import Buffers
from ms_accum.core.counters import Counters, require_whole
from ms_accum.core.stages import COUNTED, TAKEN, WEIGHT, SkipMicrobatch
from ms_accum.core.way import Way, clipping, normalising
from ms_accum.steps import several_losses
from ms_accum.steps.graphs import divisor, make_gradients_of, mean_loss, parted
from ms_accum.steps.pieces import counted, starts_of
from ms_accum.steps.program import Program
from ms_accum.steps.several_losses import WeighedProgram

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
_weighed, _empty_buffers, _adopt = Buffers.weighed, Buffers.empty, Buffers.adopt
_restored, _judged, _update_with, _update_alone = Way.restored, vars(Way)["_judged"], Way.update_with, Way.update_alone
_empty_counters, _placed, _weigh = Counters.empty, vars(optimizers)["_placed_state"], SkipMicrobatch.weigh
_ended, _train_weighed = vars(Program)["_ended"], WeighedProgram.__call__


# The number of samples multiplies the loss, and gradients are not weighted a second time.

def loss_times_samples(functions, way, begin=True):
    forward_fn, has_aux = functions.forward_fn, functions.has_aux

    def multiplied(*piece):
        returned, aux = parted(forward_fn(*piece), has_aux)
        return returned * piece[0].shape[0], (returned, aux)

    gradients_of_product = make_gradients_of(functions._replace(forward_fn=multiplied, has_aux=True), way, begin)

    def gradients_of(rows, *piece):
        product, both, gradients, weight, factor = gradients_of_product(rows, *piece)
        loss = ops.depend(both[0], product).astype(product.dtype)
        return mean_loss(loss, weight, False), both[1], gradients, weight, factor

    return gradients_of


def weighed_by_one(self, gradients, weight):
    return _weighed(self, gradients, 1.0)


def updated_in_unit_one(self, gradients, weight, factor=None):
    _update_alone(self, gradients, weight, 1.0)


_WEIGHT_IN_LOSS = (*everywhere(make_gradients_of, loss_times_samples), Replaced(Buffers, "weighed", weighed_by_one),
                   Replaced(Way, "update_alone", updated_in_unit_one))


# The loss scale.

def as_they_are(self, gradients):
    return gradients


def divided_in_the_unit(self, window):
    scale = self.stages[0].scaler.scale_value
    _update_with(self, (window[0], window[1] / scale, window[2], window[3]))


def restored_once(self, window):
    return _judged(self, (_restored(self, window[0]), window[1], window[2]))


# Windows.

def divided_by_microbatches(self, window):
    sums = window[2]
    _update_with(self, (window[0], window[1], (sums[TAKEN], *sums[1:]), window[3]))


def emptied_but_for_the_weight(self):
    kept = self.weight_sum + 0.0
    _empty_counters(self)
    ops.assign(self.weight_sum, kept)


def emptied_by_zero(self, zero):
    _empty_buffers(self, zero * 0.0)


def adopted_as_they_are(self, loaded):
    _adopt(self, self.unit if self.settled or self.is_compiled else loaded)


def clipped_by_the_sum(clip_norm, grad_norm, exchange, gradients, factor):
    return factor * clipping(clip_norm, grad_norm, exchange, gradients, 1.0)


def taken_in_any_case(self, gradients, weight):
    return _weigh(self, gradients, weight)[0], 1


def counted_under_a_name(self, window, kernels):
    """Way._step, whose count of updates has a name that not every branch uses."""
    gradients, unit, sums = window[0], window[1], window[2]
    self.journal.updating(gradients[-1])
    for stage, start, end in self.watching:
        stage.on_update(gradients, unit, sums, sums[start:end])
    factor = normalising(self.contributors, unit, sums[WEIGHT])
    factor = clipping(self.clip_norm, self.counters.grad_norm, self.exchange, gradients, factor)
    step = ops.assign_add(self.counters.update_step, 1)
    if isinstance(factor, Tensor):
        factor = ops.depend(factor, step)
    self.counters.see(sums[COUNTED])
    self.exchange.cut_parameters()
    self.optimizer(kernels.scale(factor, gradients, self.dtypes))
    self.exchange.gather_parameters()
    for hook in self.hooks:
        hook()


# State and errors.

def placed_outside_of_lists(optimizer):
    return [(place, parameter) for place, parameter in _placed(optimizer) if "[" not in place]


def never_required(unfinished):
    pass


# Pieces and sums.

def summed_over_pieces(self, totals, *results):
    joined = _ended(self, totals, *results)
    return (*[loss * len(self.starts) for loss in joined[:self.losses]], *joined[self.losses:])


def full_pieces(samples, pieces):
    spans = starts_of(samples, pieces)
    return [(min(start, samples - spans[0][1]), spans[0][1]) for start, _ in spans]


def sums_that_are_weighed(functions, way, begin=True):
    gradients_of_sum = make_gradients_of(functions, way, begin)

    def gradients_of(rows, *piece):
        loss, aux, gradients, weight, _ = gradients_of_sum(rows, *piece)
        return loss, aux, gradients, weight, None

    return gradients_of


def counted_undivided(value, weight):
    return counted(value * divisor(weight), weight)


def divided_by_the_first(self, window, weights, *batch):
    of_window = ops.zeros_like(window[:-1]) + window[0]
    return _train_weighed(self, ops.concat((of_window, window[-1:])), weights, *batch)


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
        (Replaced(Way, "restored", as_they_are), Replaced(Way, "update_with", divided_in_the_unit))),
    "the spread is squared before the loss scale is divided out": (
        {"noise_scale": True, "accumulate_step": 2, "clip_norm": None,
         "scaler": [("static", 62), ("static", 70), ("static", 100)]},
        (Replaced(Way, "restored", as_they_are), Replaced(Way, "_judged", restored_once))),
    "state in lists is not in a checkpoint": (
        {"optimizer": ["optim.NAdam", "optim.ASGD"], "event": "save", "save_at": 4, "accumulate_step": 2,
         "groups": False, "clip_norm": None},
        (Replaced(optimizers, "_placed_state", placed_outside_of_lists),)),
    "pieces before an error stay": (
        {"driver": ["step-pynative", "step"], "pieces": [2, 3], "event": "error", "accumulate_step": 3},
        everywhere(require_whole, never_required)),
    "the window is divided by its microbatches": (
        {"event": "shapes", "accumulate_step": 3, "weight": ["samples", "number", "tensor"]},
        (Replaced(Way, "update_with", divided_by_microbatches),)),
    "the weight sum is not emptied": (
        {"event": "shapes", "accumulate_step": 3, "weight": ["samples", "number", "tensor"]},
        (Replaced(Counters, "empty", emptied_but_for_the_weight), Replaced(Buffers, "empty", emptied_by_zero))),
    "numbers and Tensors as weights do not fit each other": (
        {"driver": ["hand-pynative", "step-pynative", "hand-jit", "step"], "weight": "mixed", "accumulate_step": 3},
        ()),
    "loaded buffers keep the unit of another run": (
        {"driver": ["step-pynative", "cell-pynative", "step"], "weight": ["samples", "number"], "event": "save",
         "save_at": 4, "load_into": "used", "accumulate_step": 3, "sizes": (9, 5, 9, 9, 5, 9)},
        (Replaced(Buffers, "adopt", adopted_as_they_are),)),
    "the norm is that of the sum": (
        {"clip_norm": 0.1, "accumulate_step": 2},
        everywhere(clipping, clipped_by_the_sum)),
    "a skipped microbatch counts": (
        {"nonfinite_at": 1, "accumulate_step": 2, "pieces": 1, "on_nonfinite": "skip_microbatch"},
        (Replaced(SkipMicrobatch, "weigh", taken_in_any_case),)),
    "the loss of a batch is the sum of its pieces'": (
        {"driver": ["step-pynative", "step"], "pieces": [2, 3], "accumulate_step": 2, "shapes": (7, 7)},
        (Replaced(Program, "_ended", summed_over_pieces),)),
    "the short last piece counts as a full one": (
        {"driver": ["step-pynative", "step"], "pieces": [2, 3], "accumulate_step": 2, "shapes": (7, 7)},
        everywhere(starts_of, full_pieces)),
    "the gradient of a sum is weighed": (
        {"driver": ["step-pynative", "cell-pynative", "step"], "loss_reduction": "sum", "event": "shapes",
         "accumulate_step": [1, 3], "weight": "tensor", "loss": "mean"},
        everywhere(make_gradients_of, sums_that_are_weighed)),
    "the losses of a sum are not divided by their counts": (
        {"driver": "ahead-pynative", "loss": "pair", "scaler": None, "weight": "tensor", "loss_reduction": "sum"},
        (Replaced(several_losses, "counted", counted_undivided),)),
    "a graph drops the count of updates": (
        {"driver": "step", "accumulate_step": 1, "clip_norm": None, "scaler": None, "pieces": 1},
        (Replaced(Way, "_step", counted_under_a_name),)),
    "all losses are divided by the count of the first": (
        {"driver": "ahead-pynative", "loss": "pair", "pieces": [1, 2], "scaler": None, "weight": "tensor",
         "accumulate_step": 3},
        (Replaced(WeighedProgram, "__call__", divided_by_the_first),)),
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
