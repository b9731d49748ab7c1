"""Checkpoints of several ranks, made in one process: by each rank's accumulator, and the sums that the ranks would exchange."""
import numpy as np
from conftest import MLP, mean_loss, tensors
from mindspore import Tensor, nn

from ms_accum import Accumulator, checkpoint_file, make_train_step
from ms_accum import checkpoint as checkpoint_module

GENERATION = "0123456789abcdef"
BUCKETS = [[0, 1], [2, 3]]  # of the MLP's 30 + 5 and 15 + 3 elements
KINDS = {  # reducer, ranks that count together (of 4)
    "window": ("WindowSync", 1), "microbatch": ("MicrobatchSync", 4), "shard": ("ShardedSync", 4), "nodes": ("NodeSync", 2),
    "nodes-shard": ("ShardedNodeSync", 2)}
# Microbatches that each of 4 ranks has added to its open window; those that count together have as many.
COUNTS = {"window": [3, 1, 2, 2], "microbatch": [2] * 4, "shard": [2] * 4, "nodes": [3, 3, 1, 1], "nodes-shard": [3, 3, 1, 1]}


def rows_of(rank, count):
    """The first microbatches of a rank of 4, each of another size: [(x float64 (n, 6), y int (n,))]."""
    rng = np.random.default_rng(200 + rank)
    return [(rng.normal(size=(n, 6)), rng.integers(0, 3, n)) for n in [3 + rank, 2, 5 - rank, 1][:count]]


def rows_of_all(sync):
    """What the open window of the four ranks holds."""
    return [batch for rank, count in enumerate(COUNTS[sync]) for batch in rows_of(rank, count)]


def rows_of_one(count):
    """The first microbatches of a single process."""
    return [(x, y) for rank in range(4) for x, y in rows_of(rank, 2)][:count]


def rows_after(rank, count):
    """What a rank adds to a window that it has loaded."""
    rng = np.random.default_rng(300 + rank)
    return [(rng.normal(size=(n, 6)), rng.integers(0, 3, n)) for n in [2 + rank, 6, 1, 3, 2, 4, 1, 5][:count]]


def after_full(rank):
    """What a rank adds to the next window if its share of the loaded one is full: ranks 1 and 3 have no data left."""
    return rows_after(rank, 1 - rank % 2)


def build(accumulate_step, reducer=None, seed=0, **options):
    network = MLP(seed=seed)
    options = {"reduction": "mean", "clip_norm": 0.5, **options}
    acc = Accumulator(nn.SGD(network.trainable_params(), 0.1), accumulate_step, reducer=reducer, **options)
    step = make_train_step(mean_loss(network), acc, strategy="fused") if acc.reduction == "mean" else None
    return network, acc, step


def save_as_four(path, sync, accumulate_step=4, counts=None, forget=None, extra=None, drop=(), change=None, build=build, **options):
    """Save as four ranks of `sync` would in the middle of their first window, each after its number of microbatches.

    Args:
        forget: A rank whose microbatches are lost, or "unit": as if all buffers counted in one unit.
        drop: Keys that files do not have, as those of another version.
        change: `(rank, entries, about) -> None`, which changes what is written.
    """
    reducer, party = KINDS[sync]
    files = []
    for rank, count in enumerate(counts or COUNTS[sync]):
        network, acc, step = build(accumulate_step, **options)
        for x, y in rows_of(rank, count):
            step(*tensors(x, y))
        entries, about = checkpoint_module._contents(network, acc, extra, rank, GENERATION)
        files.append(({name: p.asnumpy().copy() for name, p in entries.items()}, about))
    names = [f"accumulator:{p.name}" for p in acc.optimizer.parameters]
    if forget == "unit":
        for entries, _ in files:
            entries["accumulator:weight_unit"] = files[0][0]["accumulator:weight_unit"]
    elif forget is not None:
        for name in names:
            files[forget][0][name] *= 0
    if party > 1:
        for start in range(0, 4, party):
            _exchange([entries for entries, _ in files[start:start + party]], names)
    for rank, (entries, about) in enumerate(files):
        about.update(ranks=4, reducer=reducer, sharing={"party": party, "buckets": []})
        if "shard" in sync:
            about.update(parameters=checkpoint_module._order(acc), sharing={"party": party, "buckets": BUCKETS})
            whole = [entries.pop(name).reshape(-1) for name in names]
            for i, members in enumerate(BUCKETS):
                flat = np.concatenate([whole[j] for j in members])
                entries[f"accumulator:shard{i}"] = np.split(np.pad(flat, (0, -len(flat) % party)), party)[rank % party]
        for key in drop:
            del about[key]
        if change:
            change(rank, entries, about)
        file = path if rank == 0 else checkpoint_file.path_of_rank(path.resolve(), rank, 4, GENERATION)
        checkpoint_file.write_file(file, {name: Tensor(np.asarray(value)) for name, value in entries.items()}, about)


def _exchange(party, names):
    """Give each of these ranks the sums of all, in the user's unit."""
    summed = {"accumulator:weight_sum": sum(entries["accumulator:weight_sum"] for entries in party)}
    for name in names:
        units = [entries["accumulator:weight_unit"] for entries in party]
        summed[name] = sum(entries[name] * unit for entries, unit in zip(party, units)).astype(np.float32)
    for entries in party:
        entries.update(summed)
        entries["accumulator:weight_unit"] = np.zeros_like(units[0])
