"""Runs of several ranks: what is drawn for one of them, each rank's data, and what all of them should do, in one process and float64."""
import numpy as np
import reference
from conftest import MLP, values

from ms_accum import until_weight

# How many ranks sum each microbatch. Of two ranks, each is a node of its own; of four, two are in each of two nodes.
SYNCS = {"window": lambda ranks: 1, "nodes": lambda ranks: ranks // 2, "nodes-shard": lambda ranks: ranks // 2,
         "microbatch": lambda ranks: ranks, "shard": lambda ranks: ranks, "one-node-shard": lambda ranks: ranks, "local": lambda ranks: 1}
LOCAL = {"twice": (2, 0.7, 0.9), "averaged": (2, 1, 0), "thrice": (3, 0.7, 0.9), "each": (1, 1, 0)}  # every, rate, momentum
ORACLES = {"SGD": lambda: reference.SGD(0.1), "Adam": lambda: reference.Adam(0.01), "Momentum": lambda: reference.SGD(0.1, 0.9)}
SIZES = {  # samples in the microbatches of rank r; those of one size are compiled once
    "equal": lambda r: [4] * 5,
    "unequal": lambda r: [3 + r, 4, 5 - r % 2, 2, 1 + r],
    "uneven": lambda r: [3 + r, 4, 2, 5, 3, 4, 1][:7 - 3 * (r % 2)],  # ranks 1 and 3 run out of data
    "alike": lambda r: [4] * (6 - 2 * (r % 2)),  # one window less, all of the same weight
}
WINDOWS = {"two": 2, "one": 1, "schedule": {0: 1, 1: 3}, "budget": 7}  # of one rank
CHOICES = {
    "sizes": ("uneven", "unequal", "alike"), "optimizer": tuple(ORACLES), "windows": tuple(WINDOWS), "noise": (False, True),
    # Of the first epoch and of the second, with pieces (of 1 to 6 rows).
    "drivers": (("step 1", "cell"), ("hand", "step 4"), ("cell", "step 3"), ("hand sum", "hand sum")),
    "nan": ("", "skip_microbatch", "skip_window", "scaler", "zero"), "local": ("twice", "thrice", "averaged"), "save": (False, False, True)}
DRAWN, KIND = 3 * len(SYNCS), 9  # nine runs each whose ranks sum windows or microbatches (if they are two), three with local updates
NAMED = {
    "each": {"sync": "local", "local": "each", "sizes": "alike", "optimizer": "SGD", "windows": "two", "drivers": ("step 1",)},
    "local": {"sync": "local", "sizes": "alike", "optimizer": "SGD", "windows": "two", "drivers": ("step 1",)},
    "window": {"sync": "window", "sizes": "alike", "windows": "two", "drivers": ("step 1",), "optimizer": "Adam", "nan": "skip_window"},
    "pair": {"sync": "window", "sizes": "uneven", "windows": "two", "drivers": ("ahead 1", "ahead 2"), "nan": "scaler", "optimizer": "SGD"}}
_PLAIN = {"nan": "", "save": False, "noise": False, "local": "twice", "optimizer": "SGD", "windows": "two", "drivers": ("step 1",)}


def run_of(name):
    """The settings of a run: one that has a name, or the number of a drawn one, so that each kind meets each choice.

    In the first epoch, rank 1's second microbatch holds a NaN unless `nan` is ""; in the second one, it is empty.
    """
    if name in NAMED:
        return {**_PLAIN, **NAMED[name]}
    kind, place = divmod(int(name), KIND)
    run = {"sync": list(SYNCS)[int(name) // 3]}
    for i, (choice, options) in enumerate(CHOICES.items()):
        order = np.random.default_rng([kind, i]).permutation(min(KIND, DRAWN - kind * KIND))
        run[choice] = options[order[place] % len(options)]
    return run


def microbatches(sizes, rank, trouble="", seed=100):
    """[(x float32 (n, 6), y int32 (n,))] of a rank. `trouble`: what is wrong with the second one of rank 1: a NaN, or no rows."""
    rng = np.random.default_rng(seed + rank)
    batches = [(rng.normal(size=(n, 6)).astype(np.float32), rng.integers(0, 3, n).astype(np.int32)) for n in SIZES[sizes](rank)]
    if trouble == "empty" and rank == 1:
        batches[1] = tuple(rows[:0] for rows in batches[1])
    elif trouble and rank == 1:
        batches[1][0][0, 0] = np.nan
    return batches


def epochs_of(run, rank):
    """[(driver, pieces, microbatches)] of a rank. The second epoch is shorter, and uneven."""
    found = []
    for epoch, driver in enumerate(run["drivers"]):
        kind, detail = [*driver.split(), "1"][:2]
        batches = microbatches(run["sizes"], rank, "empty" if epoch else run["nan"], 100 + 100 * epoch)
        found.append((kind, int(detail) if detail.isdigit() else 1, batches[:4 - 2 * (rank % 2)] if epoch else batches))
    return found


def reduction_of(run):
    return "sum" if "hand sum" in run["drivers"] else "mean"


def pair_gradients(parameters, x, y):
    """Of the mean cross entropy plus the mean of the squared outputs for the rows of two classes."""
    hidden, outputs = reference.network(parameters, x)
    chosen = (y < 2)[:, None]
    other = reference.backward(parameters, x, hidden, 2 * outputs * chosen / chosen.sum())
    return [g + h for g, h in zip(reference.loss_and_gradients(parameters, x, y)[1], other)]


class Oracle(reference.Undivided):
    """One process that has the data of all ranks, of those that sum each microbatch, or of one."""

    def __init__(self, run, windows, on_nonfinite, divisor=1):
        clip_norm = None if run["local"] == "each" else 0.5
        super().__init__(values(MLP(seed=0).trainable_params()), ORACLES[run["optimizer"]](), windows, reduction_of(run), clip_norm,
                         on_nonfinite)
        self.measures, self.divisor, self.pair = run["noise"], divisor, run["drivers"][0].startswith("ahead")

    def gradients_of(self, piece):
        return pair_gradients(self.parameters, *piece) if self.pair else super().gradients_of(piece)


def pieces_of(run, batch, pieces):
    """[((x, y), weight)] of a microbatch."""
    x, y = batch
    rows = -(-len(x) // pieces)
    if not rows:
        return [(batch, 0.0)]
    parts = [(x[i:i + rows], y[i:i + rows]) for i in range(0, len(x), rows)]
    return [(part, 0.0 if run["nan"] == "zero" and np.isnan(part[0]).any() else len(part[0])) for part in parts]


def window_of(run, together):
    """The length of windows, as `together` ranks have it that sum each microbatch."""
    windows = WINDOWS.get(run["windows"], run["windows"])
    return until_weight(windows * together) if run["windows"] == "budget" else windows


def simulated(run, ranks, together=None, kind=reference.LocalUpdates):
    """What each rank of a run ends with: an oracle for each, of which some are the same."""
    skips = run["nan"] if run["nan"] == "skip_microbatch" else "skip_window"
    epochs = [[[pieces_of(run, batch, pieces) for batch in batches] for _, pieces, batches in epochs_of(run, rank)]
              for rank in range(ranks)]
    if run["sync"] == "local":
        outer = kind([Oracle(run, window_of(run, 1), skips) for _ in range(ranks)], *LOCAL[run["local"]])
        for epoch in zip(*epochs):
            outer.epoch(epoch)
        return outer.ranks
    oracle, together = Oracle(run, 1, "skip_window", ranks), together or SYNCS[run["sync"]](ranks)
    for epoch in zip(*epochs):
        groups = [Group(run, skips, epoch[start:start + together]) for start in range(0, ranks, together)]
        while any(group.left for group in groups):
            oracle.window = [piece for group in groups for piece in group.next_window(oracle.update_step)]
            if any(weight for weight, _ in oracle.window):
                oracle.apply()
    return [oracle] * ranks


class Group(Oracle):
    """Ranks that sum each microbatch, and those that they have not trained on yet: the pieces of all of them."""

    def __init__(self, run, skips, microbatches_of_ranks):
        super().__init__(run, window_of(run, len(microbatches_of_ranks)), skips)
        longest = max(map(len, microbatches_of_ranks))
        self.left = [[piece for mine in microbatches_of_ranks for piece in (mine[i] if i < len(mine) else [])] for i in range(longest)]

    def next_window(self, update_step):
        self.update_step = update_step
        self.reset()
        while self.left and not self.full:
            self.add_pieces(self.left.pop(0))
        return self.window
