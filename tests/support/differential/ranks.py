"""Runs of several ranks: what is drawn, and what each rank ends with, in one process of plain MindSpore.

Each rank has data of its own. Rank 1 has a NaN, a microbatch without rows, and now and then fewer microbatches.
"""
import random
from itertools import chain, zip_longest

import numpy as np

from ms_accum import until_weight
from support import reference

from .cases import WINDOWS, compose, plain_case
from .optimizers import COMPILED_ONLY, OPTIMIZERS, SCALE_FREE
from .plain import Plain

# How many ranks sum each microbatch. Of two ranks, each is a node of its own; of four, two are in each of two nodes.
SYNCS = {"window": lambda ranks: 1, "zero1": lambda ranks: 1, "nodes": lambda ranks: ranks // 2,
         "nodes-zero2": lambda ranks: ranks // 2, "microbatch": lambda ranks: ranks, "zero2": lambda ranks: ranks,
         "zero2-large": lambda ranks: ranks, "one-node-zero2": lambda ranks: ranks}
# Twelve runs each in which (two) ranks sum windows or microbatches.
KIND, DRAWN = 12, 3 * len(SYNCS)
# What each kind meets; the rest is drawn.
DRIVERS = ("hand", "hand sum", "step", "cell", "model")
NONFINITE = (("apply", None), ("skip_microbatch", None), ("skip_window", None), ("apply", ("static", 10)),
             ("skip_window", ("dynamic", 8, 2)))
# Ranks add in another order, and the sign of a gradient near 0 decides about the steps of the others.
STEADY = [name for name in OPTIMIZERS if name not in (*COMPILED_ONLY, *SCALE_FREE)]
_FIXED = {"event": "none", "backward_clip": False, "factor": 1.0, "large": False, "load_into": "fresh", "save_at": None,
          "level": "none", "reduction": "mean", "buffer_dtype": None, "empty_at": None, "batch_axis": 0,
          "evaluate_at": None, "rate_at": None}
_NAMED = {"clip_norm": 0.1, "on_nonfinite": "skip_window", "nonfinite_at": 1}
_SUM = {"sync": "window", "reduction": "sum", "clip_norm": float("inf")}
_HALF = {"level": "O2", "buffer_dtype": "float16"}
# One for each reduction and dtype of buffers, which are compiled.
NAMED = {"window": plain_case("step", sync="window", **_NAMED), "sum": plain_case("hand-pynative", **_SUM, **_HALF),
         "window16": plain_case("step", sync="window", **_NAMED, **_HALF), "sum32": plain_case("hand-pynative", **_SUM)}


def case_of(name):
    """The Case of a run: one that has a name, or the number of a drawn one."""
    if name in NAMED:
        return NAMED[name]
    sync, (kind, place) = list(SYNCS)[int(name) // 3], divmod(int(name), KIND)
    choice, fixed = random.Random(int(name) + DRAWN).choice, _fixed(kind, place)
    return compose(choice, **{**fixed, "sync": sync, "optimizer": choice(STEADY)})


def _fixed(kind, place):
    """What is not left to chance, so that each kind meets each choice."""
    def turn(number, options):
        order = np.random.default_rng([2, kind, number]).permutation(KIND)
        return options[order[place] % len(options)]

    driver, *summed = turn(0, DRIVERS).split()
    on_nonfinite, scaler = turn(1, NONFINITE)
    harmless = (on_nonfinite, scaler) == NONFINITE[0]
    fixed = {**_FIXED, "driver": f"{driver}-pynative", "on_nonfinite": on_nonfinite, "scaler": scaler,
             "nonfinite_at": None if harmless else 1, "accumulate_step": turn(2, WINDOWS)}
    if summed:
        fixed.update(loss="mean", reduction="sum", accumulate_step=2)
    if place % 3 == 0:
        fixed.update(loss="smoothed" if not summed else "mean", level="O2", buffer_dtype="float16")
    elif not summed:
        fixed["noise_scale"] = harmless
    if place % 3 == 1 and fixed["accumulate_step"] != WINDOWS[-1]:
        fixed["save_at"] = 1
    return fixed


def simulated(case, ranks, together=None):
    """What each rank of a run ends with: a `Plain`, the same for all. Its `skips`: what ranks skipped alone."""
    left = [[case.pieces_of(batch) for batch in case.batches(rank)] for rank in range(ranks)]
    plain, together = Plain(case), together or SYNCS[case.sync](ranks)
    plain.divisor = ranks * case.accumulate_step if case.reduction == "sum" else 1.0
    groups = [Group(case, left[start:start + together]) for start in range(0, ranks, together)]
    while any(group.left for group in groups):
        plain.window = [piece for group in groups for piece in group.next_window(plain.update_step)]
        if any(np.any(weight) for weight, _ in plain.window):
            plain.apply()
    plain.skips = sum(group.skipped for group in groups)
    return plain


class Group(reference.Undivided):
    """Ranks that sum each microbatch, and those that they have not trained on yet: the pieces of all of them."""

    def __init__(self, case, left):
        schedule = case.schedule
        if case.budget is not None:
            schedule = until_weight(case.budget * len(left), at_most=schedule.at_most)
        super().__init__([], None, schedule, on_nonfinite=case.on_nonfinite)
        self.left = [list(chain(*pieces)) for pieces in zip_longest(*left, fillvalue=[])]

    def next_window(self, update_step):
        self.update_step = update_step
        self.reset()
        while self.left and not self.full:
            self.add_pieces(self.left.pop(0))
        return self.window
