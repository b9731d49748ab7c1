"""What is drawn: one training run, as plain values that can be printed and put into a test again."""
import random
from collections import namedtuple

import numpy as np

from ms_accum import until_weight

from .networks import FEATURES, FLOAT32_LEVELS, FRONTS, LEVELS, LOSSES, NORMS, WORDS, outputs
from .optimizers import COMPILED_ONLY, LINEAR, NN, OPTIMIZERS, SCALE_FREE

COMPILED = ("hand-jit", "step", "cell-graph", "model-graph")
OP_BY_OP = ("hand-pynative", "step-pynative", "cell-pynative", "model-pynative")
DRIVERS = (*COMPILED, *OP_BY_OP)
WITH_AXIS = ("step", "cell")  # take samples along another axis
# MindSpore 2.10 on CPU fails by itself on these, or computes a gradient of 0.
BROKEN = {("mha", "O1"), *(("lstm", level) for level in ("O2", "O3", "to_float", "half"))}
WINDOWS = (1, 2, 3, ((0, 2), (1, 1), (2, 3)), ("until", 14.0, 4))
HALF_OPTIMIZERS = ("nn.SGD", "nn.Momentum", "nn.Adam", "nn.ASGD", "optim.SGD", "optim.Adam", "optim.AdamW")


# The plainest run.
PLAIN = {
    "level": "none", "front": "dense", "norm": "none", "backward_clip": False, "loss": "mean", "factor": 1.0,
    "optimizer": "nn.Momentum", "groups": False, "rates": "number", "reduction": "mean", "accumulate_step": 2,
    "clip_norm": None, "pieces": 1, "weight": "samples", "scaler": None, "on_nonfinite": "apply", "noise_scale": False,
    "event": "none", "nonfinite_at": None, "load_into": "fresh", "shapes": (6, 6), "count": 7, "seed": 1,
    "aux": False, "buffer_dtype": None, "empty_at": None, "batch_axis": 0, "loss_reduction": "mean", "declared": False,
    "evaluate_at": None, "rate_at": None, "loops": False, "logs": False, "min_weight": None}


def plain_case(driver, **changes):
    return compose(random.Random(0).choice, driver=driver, **{**PLAIN, **changes})


def near_plain(choose):
    """A Case in which a few things are drawn and the rest is plain, as in most scripts."""
    driver = choose(DRIVERS)
    free = {choose(sorted(PLAIN)) for _ in range(4)} | {"accumulate_step", "shapes", "count", "seed"}
    return compose(choose, driver=driver, **{name: value for name, value in PLAIN.items() if name not in free})


class Case(namedtuple("Case", (
        "driver", "level", "front", "norm", "backward_clip", "loss", "factor", "optimizer", "groups", "rates",
        "reduction", "accumulate_step", "clip_norm", "pieces", "weight", "scaler", "on_nonfinite", "noise_scale",
        "sizes", "nonfinite_at", "error_at", "save_at", "load_into", "seed", "aux", "buffer_dtype", "batch_axis",
        "loss_reduction", "declared", "evaluate_at", "rate_at", "loops", "logs", "min_weight"))):
    """One run. Everything random in it comes from `seed`.

    `declared`: whether the number of rows is declared as dynamic. `evaluate_at`, `rate_at`: after which microbatch the
    step evaluates, and the learning rate is set. `loops`: whether a step loops over `epoch`, or is called. `logs`:
    whether a step or a model has logs.
    """

    __slots__ = ()

    @property
    def compiled(self):
        return self.driver in COMPILED

    @property
    def by_hand(self):
        return self.driver.startswith("hand")

    @property
    def exact(self):
        return self.level in FLOAT32_LEVELS

    @property
    def schedule(self):
        """`accumulate_step` as the Accumulator takes it."""
        step = self.accumulate_step
        if isinstance(step, tuple):
            return until_weight(step[1], at_most=step[2]) if step[0] == "until" else dict(step)
        return step

    def batches(self, failing_at=None):
        """The microbatches. The kernel of the loss raises an error for the one at `failing_at`."""
        return [self.batch(i, failing=i == failing_at) for i in range(len(self.sizes))]

    def batch(self, position, spoil=True, failing=False):
        """The microbatch at `position` as NumPy arrays `(x, ids, target, mask)`."""
        rng = np.random.default_rng((self.seed, position))
        n = self.sizes[position]
        x = rng.normal(size=(n, FEATURES)).astype(np.float32)
        ids = rng.integers(0, WORDS, (n, 3)).astype(np.int32)
        classes = outputs(self.front, self.loss)
        if self.loss == "mse":
            target = (20 + rng.normal(size=(n, classes))).astype(np.float32)
        else:
            target = rng.integers(0, classes, n).astype(np.int32)
        # A mask is 0 as a whole now and then: then there is nothing to learn from a piece.
        mask = (rng.random(n) < rng.choice([0.0, 0.6, 0.9], p=[0.2, 0.4, 0.4])).astype(np.float32)
        if position == 0:
            mask[:] = 1
        if spoil and position == self.nonfinite_at and n:
            x[rng.integers(n), 0] = np.nan
        if failing:
            target[-1] = 99  # in the last piece
        return x, ids, target, mask

    def evaluation(self):
        """Batches to evaluate: the first, the second and the last microbatch, of which one may be without rows."""
        return [self.batch(i, spoil=False) for i in (0, 1, len(self.sizes) - 1)]

    def pieces_of(self, batch):
        """[(piece, weight)] of a microbatch; without rows, itself with the weight 0."""
        rows = -(-len(batch[0]) // self.pieces)
        if not rows:
            return [(batch, 0.0)]
        pieces = [tuple(part[i:i + rows] for part in batch) for i in range(0, len(batch[0]), rows)]
        return [(piece, self.weight_of(piece)) for piece in pieces]

    def weight_of(self, piece):
        if self.loss == "masked":
            return float(piece[3].sum())
        if self.reduction == "sum":
            return 1.0
        return len(piece[0]) * self.row_weight

    @property
    def row_weight(self):
        """What each row counts, if there is no mask."""
        return 2.5 if self.weight == "number" else 1.0


def compose(choose, **fixed):
    """A Case from `choose(name, options)`, which picks one of a sequence; what `fixed` holds is not drawn."""
    values = {}

    def pick(name, options):
        options = tuple(options)
        if name in fixed:
            values[name] = fixed[name]
        else:
            values[name] = options[0] if len(options) == 1 else choose(options)
        return values[name]

    driver = pick("driver", DRIVERS)
    level = pick("level", LEVELS)
    compiled, by_hand = driver in COMPILED, driver.startswith("hand")
    exact = level in FLOAT32_LEVELS
    optimizer = pick("optimizer", _optimizers(level, compiled))
    is_free = optimizer in SCALE_FREE
    # The gradient of a bias of keys is 0 but for its rounding.
    front = pick("front", [f for f in FRONTS if (f, level) not in BROKEN and not (f == "mha" and is_free)])
    loss = pick("loss", [kind for kind in LOSSES if not (front == "tied" and kind == "mse")])
    pick("norm", NORMS)
    backward_clip = pick("backward_clip", (False, False, True) if loss in ("mean", "smoothed") else (False,))
    extreme = exact and optimizer in LINEAR and loss != "mse"
    factor = pick("factor", (1.0, 1.0, 1.0, 1e-12, 1e12) if extreme else (1.0,))
    pick("groups", (False, False, True) if optimizer != "nn.FTRL" else (False,))
    pick("rates", ("number", "number", "list", "cell") if optimizer in NN and optimizer != "nn.FTRL" else ("number",))
    reduction = pick("reduction", ("mean", "mean", "sum") if by_hand and loss in ("mean", "mse") else ("mean",))
    pick("accumulate_step", WINDOWS if reduction == "mean" else (2, 3))
    unit = factor * (40.0 if loss == "mse" else 1.0)
    # The 1e-6 in the clip formula is not small beside a tiny norm.
    small = 1.0 if factor < 1 else unit * (0.5 if level == "half" else 0.1)
    pick("clip_norm", (None, small, 100.0 * unit if factor >= 1 else 1e-6, float("inf")))
    pieces = pick("pieces", (1, 2, 3) if driver.startswith("step") else (1,))
    returned = () if by_hand else ("returned",)  # by forward_fn
    own = ("tensor",) if loss == "masked" else ("samples", "number", "tensor")
    pick("weight", (*own, *returned))
    on_nonfinite = pick("on_nonfinite", ("apply", "skip_microbatch", "skip_window"))
    pick("scaler", _scalers(exact, backward_clip or on_nonfinite == "skip_microbatch" or factor > 1))
    narrow = front == "dense" and loss == "mse" and not backward_clip
    least = 4 * pieces if backward_clip else 2
    large = pick("large", (False, True) if narrow else (False,))
    # A sum has larger gradients than a mean: a layer clips others, and 16 bits overflow elsewhere.
    summable = not (by_hand or backward_clip or large or (not exact and values["scaler"]))
    pick("loss_reduction", ("mean", "sum") if summable else ("mean",))
    # Each graph takes seconds to compile: anew for each shape, after a load and after an error.
    events = ("none", "save", "error", "shapes") if compiled else ("none", "save", "error", "both")
    event = pick("event", events)
    nonfinite_at = pick("nonfinite_at", (None, None, None, None, 1, 2, 3))
    measurable = reduction == "mean" and exact and nonfinite_at is None and not large
    pick("noise_scale", (False, True) if measurable else (False,))
    pick("error_at", (2, 3) if event in ("error", "both") and loss != "mse" else (None,))
    pick("save_at", (1, 3, 4, 5) if event in ("save", "both") else (None,))
    pick("load_into", ("fresh", "used"))
    others = (least + 1, 4 * least) if event == "shapes" or not compiled else ()
    shapes = [(n, m) for n in (least + 4, least + 5) for m in (n, *others)]
    if large:
        shapes = [(4096, 1000 if others else 4096)]
    if backward_clip:  # a piece of fewer than 4 rows may have a gradient that the layer clips
        shapes = [pair for pair in shapes if min(_last_piece(n, pieces) for n in pair) >= 4]
    one, other = pick("shapes", shapes)
    count = pick("count", (6, 7, 8))
    pick("seed", range(1000))
    pick("aux", (False, True) if driver.startswith("step") else (False,))
    narrower = () if exact or loss == "mse" else ("float16",)
    pick("buffer_dtype", (None, None, "float32", "float64", *narrower))
    # Without rows.
    empty_at = pick("empty_at", (None, None, 0, 5) if not driver.startswith("model") else (None,))
    sizes = [other if reduction == "mean" and i % 3 == 1 else one for i in range(count)]
    pick("sizes", [tuple(0 if i == empty_at else size for i, size in enumerate(sizes))])
    pick("batch_axis", (0, 0, 1) if driver.startswith(WITH_AXIS) else (0,))
    declarable = driver in ("step", "cell-graph") and sizes.count(sizes[0]) < len(sizes)
    pick("declared", (False, True) if declarable else (False,))
    steps = driver.startswith("step")  # which evaluate, and set a rate
    pick("loops", (False, True) if steps else (False,))
    pick("evaluate_at", (None, 0, 3) if steps else (None,))
    # What a load sets again is set before the save.
    places = range(4 if values["save_at"] is None else values["save_at"])
    pick("rate_at", (None, None, *places) if steps and values["rates"] == "number" else (None,))
    sunk = driver.startswith("model") and values["seed"] % 2  # which hides the updates
    pick("logs", (False, True) if driver.startswith(("step", "model")) and not sunk else (False,))
    # Windows weigh up to 100.
    pick("min_weight", (None, None, 15.0, 40.0) if reduction == "mean" else (None,))
    return Case(**{name: values[name] for name in Case._fields})


def _last_piece(samples, pieces):
    rows = -(-samples // pieces)
    return samples % rows or rows


def _optimizers(level, compiled):
    if level == "half":
        return HALF_OPTIMIZERS
    unfit = {*(() if compiled else COMPILED_ONLY), *(() if level in FLOAT32_LEVELS else SCALE_FREE)}
    return [name for name in OPTIMIZERS if name not in unfit]


def _scalers(exact, unfit):
    if unfit:
        return (None,)
    static = (0, 3, 10, 40, 62, 70, 100, 120) if exact else (0, 3, 8)
    return (None, None, *(("static", exponent) for exponent in static), ("dynamic", 8, 2), ("dynamic", 6, 1))

