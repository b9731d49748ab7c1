"""Narrow draws, each around one defect that ms_accum has had.

`python -m differential.defects FOLDER NAME` exits with 1 if a draw finds a defect in the ms_accum of FOLDER, or with 0.
"""
import random
import sys
import tempfile
from itertools import cycle
from pathlib import Path

import pytest

import ms_accum

from .cases import compose
from .follow import follow

_QUIET = {"event": "none", "nonfinite_at": None, "noise_scale": False, "weight": "samples"}
_PLAIN_NETWORK = {"front": "dense", "norm": "none", "backward_clip": False}
_STEPS = ("step-pynative", "cell-pynative", "hand-pynative", "step")
# What is fixed for every Case, and what goes round.
NARROW = {
    # The number of samples multiplied the loss before the backward pass, which then overflowed in float16.
    "weight in the loss, 16 bits": (
        {**_PLAIN_NETWORK, **_QUIET, "loss": "mse", "large": True, "scaler": None, "on_nonfinite": "apply",
         "pieces": 1},
        {"driver": _STEPS, "level": ("O1", "O2", "O3", "auto")}),
    # The same, for a layer whose gradient is not linear in that of the layer above it.
    "weight in the loss, a bprop": (
        {**_QUIET, "front": "dense", "loss": "mean", "backward_clip": True, "level": "none"}, {"driver": _STEPS}),
    # The norm of gradients that still had the loss scale, and the number of samples, in them.
    "norm of scaled gradients": (
        {**_PLAIN_NETWORK, **_QUIET, "loss": "mean", "level": "none", "clip_norm": 0.1, "factor": 1.0, "on_nonfinite": "apply"},
        {"driver": _STEPS, "scaler": (("static", 70), ("static", 100), ("static", 120))}),
    "noise of scaled gradients": (
        {**_PLAIN_NETWORK, **_QUIET, "loss": "mean", "level": "none", "noise_scale": True, "factor": 1.0, "on_nonfinite": "apply",
         "accumulate_step": 2, "clip_norm": None},
        {"driver": _STEPS, "scaler": (("static", 62), ("static", 70), ("static", 100))}),
    # State of an optimizer in Python lists was not in the checkpoint.
    "optimizer state in lists": (
        {**_PLAIN_NETWORK, "loss": "mean", "level": "none", "clip_norm": None, "factor": 1.0, "nonfinite_at": None,
         "event": "save", "save_at": 4, "accumulate_step": 2, "groups": False, "weight": "samples"},
        {"driver": _STEPS, "optimizer": ("optim.NAdam", "optim.ASGD")}),
    "weights": (
        {**_QUIET, "loss": "mean", "level": "none", "event": "shapes", "accumulate_step": 3},
        {"driver": _STEPS, "weight": ("samples", "number", "tensor")}),
    "numbers and Tensors as weights": (
        {**_QUIET, **_PLAIN_NETWORK, "loss": "mean", "level": "none", "weight": "mixed", "accumulate_step": 3},
        {"driver": ("hand-pynative", "step-pynative", "hand-jit", "step")}),
    "unit of the buffers": (
        {**_PLAIN_NETWORK, **_QUIET, "loss": "mean", "level": "none", "event": "save", "save_at": 4, "load_into": "used", "factor": 1.0,
         "accumulate_step": 3, "sizes": (9, 5, 9, 9, 5, 9)},
        {"driver": ("step-pynative", "cell-pynative", "step"), "weight": ("samples", "number")}),
    "clipping": (
        {**_PLAIN_NETWORK, **_QUIET, "loss": "mean", "level": "none", "clip_norm": 0.1, "factor": 1.0, "accumulate_step": 2},
        {"driver": _STEPS}),
    "nonfinite": (
        {**_QUIET, "loss": "mean", "level": "none", "nonfinite_at": 1, "accumulate_step": 2, "pieces": 1,
         "on_nonfinite": "skip_microbatch"},
        {"driver": _STEPS}),
    "pieces": (
        {**_QUIET, "loss": "mean", "level": "none", "accumulate_step": 2, "backward_clip": False, "shapes": (7, 7)},
        {"driver": ("step-pynative", "step"), "pieces": (2, 3)}),
    "two losses": (
        {**_PLAIN_NETWORK, **_QUIET, "level": "none", "scaler": None, "weight": "tensor", "accumulate_step": 3},
        {"driver": ("ahead-pynative",), "pieces": (1, 2)}),
    # The pieces before the one that raised stayed in the window.
    "pieces before an error": (
        {**_PLAIN_NETWORK, "loss": "mean", "level": "none", "nonfinite_at": None, "event": "error", "accumulate_step": 3,
         "weight": "samples"},
        {"driver": ("step-pynative", "step"), "pieces": (2, 3)}),
}


# Each defect: the draw that has to find it, and how it is put back: (file of ms_accum, text, what it becomes).
_WEIGHT_IN_LOSS = [
    ("differentiate.py", "accumulator.scaled(loss)", "accumulator.scaled(loss * piece[0].shape[0])"),
    # The gradients are not weighted a second time, in windows of one microbatch neither.
    ("buffers.py", "factor = weight / self.unit", "factor = 1.0 / self.unit"),
    ("accumulator.py", "self._reduce(grads, weight, (weight, 1, 1.0))", "self._reduce(grads, 1.0, (weight, 1, 1.0))")]
PUT_BACK = {
    "the number of samples multiplies the loss": ("weight in the loss, 16 bits", _WEIGHT_IN_LOSS),
    "the number of samples reaches a bprop": ("weight in the loss, a bprop", _WEIGHT_IN_LOSS),
    "the loss scale is divided out after the norm": (
        "norm of scaled gradients",
        [("update.py", "        gradients = self.loss_scale.divide(gradients)\n", ""),
         ("accumulator.py", "self._update(reduced, True)",
          "self._update((reduced[0], reduced[1] / (self.loss_scaler.scale_value if self.loss_scaler else 1.0), *reduced[2:]), True)")]),
    "the spread is squared before the loss scale is divided out": (
        "noise of scaled gradients",
        [("batch_size/noise_scale.py", "global_norm(loss_scale.divide(gradients))", "global_norm(gradients)")]),
    "state in lists is not found": (
        "optimizer state in lists",
        [("optimizers.py", "if isinstance(held, Parameter)]", "if isinstance(held, Parameter) and '[' not in place]")]),
    "pieces before an error stay": ("pieces before an error", [("counters.py", "        if torn:", "        if False:")]),
    "the window is divided by its microbatches": (
        "weights", [("update.py", "factor = self.normaliser.factor(unit, weight)", "factor = unit / numbers[1]")]),
    "the weight sum is not emptied": (
        "weights", [("accumulator.py", "        ops.assign(self.weight_sum, 0.0)\n        self.buffers.empty(self.weight_sum)",
                     "        self.buffers.empty(self.weight_sum * 0.0)")]),
    "loaded buffers keep the unit of another run": (
        "unit of the buffers", [("buffers.py", "if before and loaded and before != loaded:", "if False:")]),
    "the norm is that of the sum": ("clipping", [("update.py", "global_norm(gradients) * abs(factor)", "global_norm(gradients)")]),
    "a skipped microbatch counts": (
        "nonfinite", [("nonfinite.py", "ops.zeros_like(weight)), taken.astype(ms.int32)", "ops.zeros_like(weight)), 1")]),
    "the loss of a batch is the sum of its pieces'": (
        "pieces", [("microbatch.py", "totals[t] / _divisor(", "totals[t] * pieces / _divisor(")]),
    "all losses are divided by the count of the first": (
        "two losses", [("losses.py", "of_window = window[:count]", "of_window = ops.zeros_like(window[:count]) + window[0]")]),
    "the short last piece counts as a full one": (
        "pieces", [("pieces.py", "[(start, min(rows, samples - start))", "[(min(start, samples - rows), rows)")]),
}


def put_back(package, defect):
    """Change a copy of ms_accum; each text has to be in it exactly once."""
    for name, text, other in PUT_BACK[defect][1]:
        source = (package / name).read_text(encoding="utf-8")
        if source.count(text) != 1:
            raise ValueError(f"{name} has {text!r} {source.count(text)} times, expected once")
        (package / name).write_text(source.replace(text, other), encoding="utf-8")


def cases(name, count=4):
    fixed, varied = NARROW[name]
    turns = {key: cycle(values) for key, values in varied.items()}
    return [compose(random.Random(i).choice, **{**fixed, **{key: next(turn) for key, turn in turns.items()}}) for i in range(count)]


def main(folder, name):
    if not Path(ms_accum.__file__).is_relative_to(folder):
        return f"ms_accum is imported from {ms_accum.__file__}, expected {folder}"
    for case in cases(name):
        print(case, flush=True)
        try:
            follow(case, Path(tempfile.mkdtemp(dir=".")))
        except (AssertionError, pytest.fail.Exception) as found:
            print(f"found: {found}")
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
