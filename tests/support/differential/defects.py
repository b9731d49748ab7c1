"""Defects that ms_accum has had, and narrow draws around them.

`python -m support.differential.defects FOLDER NAME` exits with 1 if the draws find a defect in FOLDER/ms_accum, or
with 0.
"""
import random
import sys
import tempfile
from pathlib import Path

import pytest

import ms_accum

from .cases import compose
from .follow import follow

_STEPS = ["step-pynative", "cell-pynative", "hand-pynative", "step"]
# What is fixed where a draw does not say otherwise.
_NARROW = {
    "driver": _STEPS, "level": "none", "front": "dense", "norm": "none", "backward_clip": False, "loss": "mean",
    "factor": 1.0, "event": "none", "nonfinite_at": None, "noise_scale": False, "weight": "samples",
    "on_nonfinite": "apply", "empty_at": None, "batch_axis": 0, "loss_reduction": "mean"}
_WEIGHT_IN_LOSS = [
    ("steps/graphs.py", "divisor(weight) if divides else loss",
     "divisor(weight) if divides else loss * piece[0].shape[0]"),
    # The gradients are not weighted a second time, in windows of one microbatch neither.
    ("core/buffers.py", "mapped(weighted, weight / self.unit", "mapped(weighted, 1.0 / self.unit"),
    ("core/way.py", "self.exchange.window(gradients, unit, (weight,",
     "self.exchange.window(gradients, 1.0, (weight,")]
# Each defect: the draw that has to find it, in which what a list holds takes turns, and how the defect is put back:
# (file of ms_accum, a text that is in it once, what the text becomes).
DEFECTS = {
    # The backward pass overflowed in float16.
    "the number of samples multiplies the loss": (
        {"level": ["O1", "O2", "O3", "auto"], "loss": "mse", "large": True, "scaler": None, "pieces": 1},
        _WEIGHT_IN_LOSS),
    # A layer's gradient was not linear in that of the layer above it.
    "the number of samples reaches a bprop": ({"backward_clip": True}, _WEIGHT_IN_LOSS),
    "the loss scale is divided out after the norm": (
        {"clip_norm": 0.1, "scaler": [("static", 70), ("static", 100), ("static", 120)]},
        [("core/way.py", "gradients, accepted = self.restored(window[0]), True",
          "gradients, accepted = window[0], True"),
         ("core/way.py", "self._step(window, self.buffered)",
          "self._step((window[0], window[1] / self.stages[0].scaler.scale_value, *window[2:]), self.buffered)")]),
    "the spread is squared before the loss scale is divided out": (
        {"noise_scale": True, "accumulate_step": 2, "clip_norm": None,
         "scaler": [("static", 62), ("static", 70), ("static", 100)]},
        [("core/way.py", "restored = self.restored(gradients)", "restored = gradients")]),
    "state in lists is not in a checkpoint": (
        {"optimizer": ["optim.NAdam", "optim.ASGD"], "event": "save", "save_at": 4, "accumulate_step": 2,
         "groups": False, "clip_norm": None},
        [("core/optimizers.py", "if isinstance(held, Parameter)]",
          "if isinstance(held, Parameter) and '[' not in place]")]),
    "pieces before an error stay": (
        {"driver": ["step-pynative", "step"], "pieces": [2, 3], "event": "error", "accumulate_step": 3},
        [("core/counters.py", "    if unfinished:", "    if False:")]),
    "the window is divided by its microbatches": (
        {"event": "shapes", "accumulate_step": 3, "weight": ["samples", "number", "tensor"]},
        [("core/way.py", "normalising(self.contributors, unit, sums[WEIGHT])", "unit / sums[TAKEN]")]),
    "the weight sum is not emptied": (
        {"event": "shapes", "accumulate_step": 3, "weight": ["samples", "number", "tensor"]},
        [("core/counters.py", "        ops.assign(self.weight_sum, 0.0)\n", ""),
         ("core/way.py", "self.buffers.empty(self.counters.weight_sum)",
          "self.buffers.empty(self.counters.weight_sum * 0.0)")]),
    "numbers and Tensors as weights do not fit each other": (
        {"driver": ["hand-pynative", "step-pynative", "hand-jit", "step"], "weight": "mixed", "accumulate_step": 3},
        []),
    "loaded buffers keep the unit of another run": (
        {"driver": ["step-pynative", "cell-pynative", "step"], "weight": ["samples", "number"], "event": "save",
         "save_at": 4, "load_into": "used", "accumulate_step": 3, "sizes": (9, 5, 9, 9, 5, 9)},
        [("core/buffers.py", "if loaded != self.unit and self.is_allocated else ()", "if False else ()")]),
    "the norm is that of the sum": (
        {"clip_norm": 0.1, "accumulate_step": 2},
        [("core/way.py", "square_sum(gradients, factor)", "square_sum(gradients)")]),
    "a skipped microbatch counts": (
        {"nonfinite_at": 1, "accumulate_step": 2, "pieces": 1, "on_nonfinite": "skip_microbatch"},
        [("core/stages.py", "ops.zeros_like(weight)), taken.astype(ms.int32)", "ops.zeros_like(weight)), 1")]),
    "the loss of a batch is the sum of its pieces'": (
        {"driver": ["step-pynative", "step"], "pieces": [2, 3], "accumulate_step": 2, "shapes": (7, 7)},
        [("steps/program.py", "totals[t] / divisor(", "totals[t] * pieces / divisor(")]),
    "the short last piece counts as a full one": (
        {"driver": ["step-pynative", "step"], "pieces": [2, 3], "accumulate_step": 2, "shapes": (7, 7)},
        [("steps/pieces.py", "[(start, min(rows, samples - start))", "[(min(start, samples - rows), rows)")]),
    "the gradient of a sum is weighed": (
        {"driver": ["step-pynative", "cell-pynative", "step"], "loss_reduction": "sum", "event": "shapes",
         "accumulate_step": [1, 3], "weight": "tensor", "loss": "mean"},
        [("steps/graphs.py", "(1.0 if is_sum else None)", "None")]),
    "the losses of a sum are not divided by their counts": (
        {"driver": "ahead-pynative", "loss": "pair", "scaler": None, "weight": "tensor", "loss_reduction": "sum"},
        [("steps/several_losses.py", "losses / divisor(weights) if is_sum", "losses if is_sum")]),
    "a graph drops the count of updates": (
        {"driver": "step", "accumulate_step": 1, "clip_norm": None, "scaler": None, "pieces": 1},
        [("core/way.py", "        if isinstance(factor, Tensor):  # what",
          "        step = ops.assign_add(self.counters.update_step, 1)\n"
          "        if isinstance(factor, Tensor):  # what"),
         ("core/way.py", "ops.depend(factor, ops.assign_add(self.counters.update_step, 1))",
          "ops.depend(factor, step)"),
         ("core/way.py",
          "a result that has a name and no use\n            ops.assign_add(self.counters.update_step, 1)",
          "a result that has a name and no use\n            factor = factor * 1.0")]),
    "all losses are divided by the count of the first": (
        {"driver": "ahead-pynative", "loss": "pair", "pieces": [1, 2], "scaler": None, "weight": "tensor",
         "accumulate_step": 3},
        [("steps/several_losses.py", "of_window = window[:count]",
          "of_window = ops.zeros_like(window[:count]) + window[0]")]),
}
PUT_BACK = [name for name, (_, changes) in DEFECTS.items() if changes]


def put_back(package, defect):
    """Change a copy of ms_accum; each text has to be in it exactly once."""
    for name, text, other in DEFECTS[defect][1]:
        source = (package / name).read_text(encoding="utf-8")
        if source.count(text) != 1:
            raise ValueError(f"{name} has {text!r} {source.count(text)} times, expected once")
        (package / name).write_text(source.replace(text, other), encoding="utf-8")


def cases(defect, count=4):
    drawn = {**_NARROW, **DEFECTS[defect][0]}
    return [compose(random.Random(i).choice, **{key: value[i % len(value)] if isinstance(value, list) else value
                                                for key, value in drawn.items()}) for i in range(count)]


def main(folder, defect):
    if not Path(ms_accum.__file__).is_relative_to(folder):
        return f"ms_accum is imported from {ms_accum.__file__}, expected {folder}"
    for case in cases(defect):
        print(case, flush=True)
        try:
            follow(case, Path(tempfile.mkdtemp(dir=".")))
        except (AssertionError, pytest.fail.Exception) as found:
            print(f"found: {found}")
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
