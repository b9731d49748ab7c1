"""What ranks should do, in one process and float64."""
import numpy as np
import reference
from conftest import MLP, values
from rank_cases import WINDOWS, microbatches

ORACLES = {"SGD": lambda: reference.SGD(0.1), "Adam": lambda: reference.Adam(0.01), "Momentum": lambda: reference.SGD(0.1, 0.9)}


def inside(sync, count):
    """How many ranks exchange each microbatch."""
    return {"window": 1, "nodes": count // 2, "nodes-shard": count // 2}.get(sync, count)


class Group:
    """Ranks that exchange each microbatch, and the pieces of these that they have not trained on yet."""

    def __init__(self, run, ranks):
        self.run, self.ranks = run, ranks
        batches = [microbatches(run["sizes"], rank, run["nan"]) for rank in ranks]
        self.left = [[piece for batch in batches if i < len(batch) for piece in self.cut(*batch[i])]
                     for i in range(max(map(len, batches)))]

    def cut(self, x, y):
        rows = -(-len(x) // self.run["pieces"]) or 1
        return [(x[i:i + rows], y[i:i + rows]) for i in range(0, len(x), rows)]

    def window(self, length, budget):
        """The pieces of the next window, without what is skipped."""
        held, pieces, weight = 0, [], 0
        while self.left and held < length and weight < budget * len(self.ranks):
            microbatch = self.left.pop(0)
            kept = [(x, y) for x, y in microbatch if self.run["nan"] not in ("skip_microbatch", "zero") or not np.isnan(x).any()]
            held += bool(kept) or self.run["nan"] in ("zero", "empty")
            pieces += kept
            weight += sum(len(x) for x, _ in kept)
        return pieces


def simulated(run, count, together=None, gradients_of=reference.loss_and_gradients, clip_norm=0.5):
    """The same in one process, in float64: the k-th update has the k-th window of each group of ranks."""
    oracle = reference.Accumulation(values(MLP(seed=0).trainable_params()), ORACLES[run["optimizer"]](), 1, "sum", clip_norm, "skip_window")
    together, windows, measured = together or inside(run["sync"], count), WINDOWS.get(run["windows"], run["windows"]), []
    groups = [Group(run, range(start, start + together)) for start in range(0, count, together)]
    while any(group.left for group in groups):
        budget = getattr(windows, "budget", np.inf)
        length = np.inf if budget < np.inf else reference.window_length(windows, oracle.update_step)
        pieces = [piece for group in groups for piece in group.window(length, budget)]
        if not pieces:
            continue
        found = [(gradients_of(oracle.parameters, x, y)[1], len(x)) for x, y in pieces]
        divisor = count if run["reduction"] == "sum" else sum(weight for _, weight in found)
        if run["losses"] > 1:
            found = [(gradients_of(oracle.parameters, *map(np.concatenate, zip(*pieces)))[1], divisor)]
        updates = oracle.update_step
        oracle([sum(weight * g for g, weight in zip(each, [weight for _, weight in found])) / divisor
                for each in zip(*[gradients for gradients, _ in found])])
        if oracle.update_step > updates:
            measured.append([(np.concatenate([g.reshape(-1) for g in gradients]), weight) for gradients, weight in found])
    oracle.noise = reference.noise_and_signal(measured, 0.9) if run.get("noise") else None
    return oracle


def undivided(run):
    return {"losses": 1, "nan": "", "pieces": 1, "reduction": "mean", "optimizer": "SGD", "windows": "two", **run}
