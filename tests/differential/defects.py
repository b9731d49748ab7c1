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
_STEPS = ("fused-pynative", "split-pynative", "cell-pynative", "fused")
# What is fixed for every Case, and what goes round.
NARROW = {
    # The number of samples multiplied the loss before the backward pass, which then overflowed in float16.
    "weight in the loss, 16 bits": (
        {**_PLAIN_NETWORK, **_QUIET, "loss": "mse", "large": True, "scaler": None, "on_nonfinite": "apply",
         "micro_size": 1},
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
        {"driver": ("hand-pynative", *_STEPS), "optimizer": ("optim.NAdam", "optim.ASGD")}),
    "weights": (
        {**_QUIET, "loss": "mean", "level": "none", "event": "shapes", "accumulate_step": 3},
        {"driver": _STEPS, "weight": ("samples", "number", "tensor")}),
    "numbers and Tensors as weights": (
        {**_QUIET, **_PLAIN_NETWORK, "loss": "mean", "level": "none", "weight": "mixed", "accumulate_step": 3},
        {"driver": ("hand-pynative", "split-pynative", "hand-jit", "fused")}),
    "unit of the buffers": (
        {**_PLAIN_NETWORK, **_QUIET, "loss": "mean", "level": "none", "event": "save", "save_at": 4, "load_into": "used", "factor": 1.0,
         "accumulate_step": 3, "sizes": (9, 5, 9, 9, 5, 9)},
        {"driver": _STEPS, "weight": ("samples", "number")}),
    "clipping": (
        {**_PLAIN_NETWORK, **_QUIET, "loss": "mean", "level": "none", "clip_norm": 0.1, "factor": 1.0, "accumulate_step": 2},
        {"driver": _STEPS}),
    "nonfinite": (
        {**_QUIET, "loss": "mean", "level": "none", "nonfinite_at": 1, "accumulate_step": 2, "micro_size": 1,
         "on_nonfinite": "skip_microbatch"},
        {"driver": _STEPS}),
    "pieces": (
        {**_QUIET, "loss": "mean", "level": "none", "accumulate_step": 2, "backward_clip": False, "shapes": (7, 7)},
        {"driver": _STEPS, "micro_size": (2, 3)}),
    # The pieces before the one that raised stayed in the window.
    "pieces before an error": (
        {**_PLAIN_NETWORK, "loss": "mean", "level": "none", "nonfinite_at": None, "event": "error", "accumulate_step": 3,
         "weight": "samples"},
        {"driver": _STEPS, "micro_size": (2, 3)}),
}


# Each defect: the draw that has to find it, and how it is put back: (file of ms_accum, text, what it becomes).
_WEIGHT_IN_LOSS = [
    ("accumulate.py", "return loss_scale.multiply(losses[0]), losses[0], aux",
     "return loss_scale.multiply(losses[0] * piece[0].shape[0]), losses[0], aux"),
    ("accumulate.py", "add(gradients, weights, weights), aux", "add(gradients, (1.0,), weights), aux"),
    # A window of one microbatch in the graph that needs no buffers.
    ("accumulator.py", "self._weighed(grads, weights, weights, 1.0)", "self._weighed(grads, (1.0,), weights, 1.0)")]
PUT_BACK = {
    "the number of samples multiplies the loss": ("weight in the loss, 16 bits", _WEIGHT_IN_LOSS),
    "the number of samples reaches a bprop": ("weight in the loss, a bprop", _WEIGHT_IN_LOSS),
    "the loss scale is divided out after the norm": (
        "norm of scaled gradients",
        [("accumulator.py", "return self._loss_scale.divide(gradients), unit, header", "return gradients, unit, header"),
         ("accumulator.py", "self._normaliser(unit, weight)\n",
          "self._normaliser(unit, weight) / (1.0 if self.loss_scaler is None else self.loss_scaler.scale_value)\n")]),
    "the spread is squared before the loss scale is divided out": (
        "noise of scaled gradients",
        [("batch_size/noise_scale.py", "global_norm(loss_scale.divide(gradients))", "global_norm(gradients)")]),
    "state in lists is not found": (
        "optimizer state in lists",
        [("optimizers.py", "if isinstance(held, Parameter)]", "if isinstance(held, Parameter) and '[' not in place]")]),
    "pieces before an error stay": ("pieces before an error", [("accumulator.py", "if int(self._unfinished) != 0:", "if False:")]),
    "the window is divided by its microbatches": (
        "weights", [("accumulator.py", "self._normaliser(unit, weight)\n", "unit / self.mini_step\n")]),
    # `reset` also multiplies the buffers by the sum that it has emptied; they become 0 all the same.
    "the weight sum is not emptied": (
        "weights",
        [("accumulator.py", "self._set_weight_sum((0.0,) * self.losses)\n        zero = self._each(self.weight_sum)[0]\n",
          "zero = self._each(self.weight_sum)[0] * 0.0\n")]),
    "loaded buffers keep the unit of another run": (
        "unit of the buffers", [("unit.py", "if unit and loaded and unit != loaded:", "if False:")]),
    "the norm is that of the sum": ("clipping", [("accumulator.py", "global_norm(gradients) * abs(factor)", "global_norm(gradients)")]),
    "a skipped microbatch counts": ("nonfinite", [("nonfinite.py", "        return taken\n", "        return Tensor(1, ms.int32)\n")]),
    "the loss of a batch is the sum of its pieces'": (
        "pieces",
        [("accumulate.py", "means, divisors = means_of(totals[:2 * count], count)\n",
          "means, divisors = means_of(totals[:2 * count], count)\n        means = tuple([mean * micro_size for mean in means])\n"),
         ("straight.py", "return (*means, *join_aux_of_all(", "return (*[mean * len(starts) for mean in means], *join_aux_of_all(")]),
    "the short last piece counts as a full one": (
        "pieces", [("split.py", "indices = ops.arange(full * rows, samples)", "indices = ops.arange(samples - rows, samples)")]),
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
