"""What each rank of a test run does: `rank_cases.py FOLDER CASE...`, started by msrun from launch.py.

A case is the name of a function below and its arguments, joined by colons. It runs op by op unless "jit" or "graph"
stands at its end. What it returns goes into FOLDER/rank<r>.json under the name of the case.
"""
import json
import os
import sys
from contextlib import redirect_stdout
from pathlib import Path
from time import perf_counter
from unittest.mock import patch

import dealing
import mindspore as ms
import numpy as np
import pytest
from conftest import MLP, mean_loss, tensors, values
from mindspore import Tensor, amp, nn, ops
from mindspore.communication import get_group_size, get_rank, init
from mindspore.dataset import GeneratorDataset
from mindspore.train import Callback, LearningRateScheduler, Model
from noisy_samples import Position, noisy

from ms_accum import (
    Accumulator,
    AdaptiveWindow,
    DataParallel,
    FlushCallback,
    GradientNoiseScale,
    LocalUpdates,
    PerUpdate,
    TrainOneStepCell,
    WindowLog,
    avoid_busy_waiting,
    ending_together,
    load_checkpoint,
    make_train_step,
    save_checkpoint,
    until_weight,
)
from ms_accum.cli import main as cli
from ms_accum.cli import reference as cli_reference
from ms_accum.distributed import reducers
from ms_accum.distributed.buckets import Buckets, Layout
from ms_accum.distributed.ranks import wait_for_all
from ms_accum.reference import train as reference_train

N = 2
BUDGET_OF_A_RANK = 7
SYNCS = {
    "window": DataParallel(bucket_mib=8e-5),  # 83 bytes: three buckets for four parameters
    "microbatch": DataParallel(sync="microbatch"),
    "shard": DataParallel(sync="microbatch", shard=True, bucket_mib=8e-5),
}
WITHOUT_NODES = tuple(SYNCS)
# Of two ranks: each a node of its own, or both in one. Of four: two in each of two nodes.
PER_NODE = int(os.environ.get("MS_WORKER_NUM", "2")) // 2
SYNCS |= {"nodes": DataParallel(sync="node", ranks_per_node=PER_NODE, bucket_mib=8e-5),
          "nodes-shard": DataParallel(sync="node", ranks_per_node=PER_NODE, shard=True, bucket_mib=8e-5),
          "one-node": DataParallel(sync="node"), "one-node-shard": DataParallel(sync="node", shard=True, bucket_mib=8e-5)}
NODES = [f"trained:{sync}:{sizes}:{optimizer}{more}" for sync, sizes, optimizer, more in (
    ("nodes", "uneven", "SGD", ""), ("nodes-shard", "uneven", "Adam", ""), ("one-node", "uneven", "Momentum", ""),
    ("one-node-shard", "unequal", "SGD", ""), ("nodes-shard", "uneven", "SGD", ":nan:skip_window"), ("nodes", "equal", "SGD", ":overflow"),
    ("nodes", "unequal", "SGD", ":fused"), ("nodes", "uneven", "SGD", ":budget"), ("nodes-shard", "uneven", "SGD", ":nan:skip_microbatch"))]
OPTIMIZERS = {"SGD": lambda parameters: nn.SGD(parameters, 0.1), "Adam": lambda parameters: nn.Adam(parameters, 0.01),
              "Momentum": lambda parameters: nn.Momentum(parameters, 0.1, 0.9)}
STILL = {"still": lambda parameters: nn.SGD(parameters, 1e-30)}
SIZES = {  # samples in the microbatches of rank r; those of one size are compiled once
    "equal": lambda r: [4] * 5,
    "unequal": lambda r: [3 + r, 4, 5 - r % 2, 2, 1 + r],
    "uneven": lambda r: [3 + r, 4, 2, 5, 3][:5 - 2 * (r % 2)],  # ranks 1 and 3 run out of data two microbatches early
    "long": lambda r: [3 + r, 4, 2, 5, 3] * 2 + [4],
    "halved": lambda r: ([3 + r, 4, 2, 5, 3] * 2 + [4])[:11 - 5 * (r % 2)],  # three windows less on ranks 1 and 3
    "alike": lambda r: [4] * (6 - 2 * (r % 2)),  # one window less, all of the same weight
}
LOCAL = {"local": LocalUpdates(2, 0.7, 0.9), "averaged": LocalUpdates(2, 1, 0), "each": LocalUpdates(1, 1, 0),
         "rounds": LocalUpdates(3, 0.7, 0.9)}
# The accumulators of `together`: optimizer, reducer, on_nonfinite.
TOGETHER = [("Momentum", "window", "apply"), ("SGD", "microbatch", "apply"), ("Adam", "shard", "apply"),
            ("SGD", "window", "skip_microbatch")]
MNIST = ("--epochs", "2", "--batch-size", "400", "--clip-norm", "1", "--json", "run.json", "--save", "run.ckpt")

MNIST_SHORT = ("--epochs", "1", "--batch-size", "400", "--clip-norm", "1")

MATRIX = [f"trained:{sync}:{sizes}:{optimizer}"
          for sync in WITHOUT_NODES for sizes in ("equal", "unequal", "uneven") for optimizer in OPTIMIZERS]
BAD = [f"trained:{sync}:{sizes}:SGD:{what}" for sync, sizes, what in (
    ("window", "uneven", "nan:skip_window"), ("shard", "uneven", "nan:skip_microbatch"),
    ("microbatch", "uneven", "nan:skip_window"), ("shard", "uneven", "nan:skip_window"), ("window", "equal", "overflow"),
    ("window", "uneven", "nan"))]
BUDGET = [f"trained:{sync}:{sizes}:SGD:budget" for sync in WITHOUT_NODES for sizes in ("unequal", "uneven")]
PAIR = [f"pair:{sizes}:{driver}" for sizes, driver in (("uneven", "split"), ("uneven", "ahead"), ("equal", "fused"), ("uneven", "skip"))]
NOISE = [f"trained:{sync}:uneven:still:noise{skip}"
         for sync, skip in (("window", ""), ("microbatch", ""), ("shard", ""), ("window", ":skip_microbatch"))]
ADAPTIVE = [f"adaptive:{sync}" for sync in (*WITHOUT_NODES, "nodes-shard")]
DEALT = [f"dealt_out:{sync}" for sync in (*WITHOUT_NODES, "nodes", "nodes-shard")]
RESUME = ["resume:window:ckpt", "resume:microbatch:ckpt", "resume:shard:safetensors", "resume:nodes-shard:ckpt"]
OUTER = ["outer:long:local:SGD", "outer:halved:local:Momentum", "outer:halved:local:Adam:fused", "outer:halved:averaged:SGD:twice",
         "outer:halved:rounds:SGD:nan:twice", "as_data_parallel:split", "as_data_parallel:fused", "resume:local:ckpt", "alone"]
LAUNCHES = {  # ranks, cases
    # Every sync with each kind of sizes and each optimizer.
    "fast": (2, [*(case for i, case in enumerate(MATRIX) if (i + i // 3 + i // 9) % 3 == 0), *BAD, BAD[0] + ":fused", *BUDGET, *PAIR,
                 *(f"trained:{sync}:uneven:SGD:fused" for sync in WITHOUT_NODES), *NODES, *NOISE, *RESUME, *DEALT, *ADAPTIVE, *OUTER,
                 "together:jit", "by_hand", "two_dtypes", "logged:window", "logged:microbatch", "traffic:window", "traffic:microbatch",
                 "traffic:nodes", "refusals", "compiled_before:jit", "mnist", "mnist_dealt_out", "failing"]),
    "compiled": (2, [*MATRIX, *(f"{case}:jit" for case in [*MATRIX[2::3], *BAD[:5], *BUDGET, *PAIR, *NODES, "mnist"]),
                     "trained:window:uneven:SGD:nan:skip_microbatch:jit", "trained:microbatch:unequal:SGD:fused:jit",
                     "trained:shard:uneven:Adam:fused:jit", *(f"trained:{sync}:uneven:SGD:graph" for sync in WITHOUT_NODES)]),
    "compiled-state": (2, [f"{case}:jit" for case in [*NOISE, *RESUME, *ADAPTIVE, *OUTER]]),
    "four": (4, [*MATRIX[2::3], *BUDGET, *PAIR, NOISE[0], RESUME[0], *DEALT, f"{DEALT[0]}:jit", *ADAPTIVE, *OUTER, *NODES,
                 *(f"{case}:jit" for case in NODES[:2]),
                 "trained:window:uneven:Adam",
                 "trained:window:uneven:SGD:nan:skip_microbatch", *(f"trained:{sync}:uneven:Adam:jit" for sync in WITHOUT_NODES)]),
}


def cases_of(launch, kind, feature=""):
    """The cases of a launch that call the function `kind`, and have the argument `feature`."""
    cases = [case for case in LAUNCHES[launch][1] if case.split(":")[0] == kind]
    return [case for case in cases if not feature or feature in case.split(":")]


def every_launch_of(kind, feature=""):
    """Parametrize a test by the launches that have such cases; all but the fast one are slow."""
    launches = [launch for launch in LAUNCHES if cases_of(launch, kind, feature)]
    return pytest.mark.parametrize("launch", [launch if launch == "fast" else pytest.param(launch, marks=pytest.mark.slow)
                                              for launch in launches])


def microbatches(sizes, rank):
    """[(x float64 (n, 6), y int (n,))] of a rank."""
    rng = np.random.default_rng(100 + rank)
    return [(rng.normal(size=(n, 6)), rng.integers(0, 3, n)) for n in SIZES[sizes](rank)]


def weight_of(rank, i):
    """How often `together` counts microbatch i of a rank."""
    return 1 + (rank + i) % 3


def accumulator(network, optimizer="SGD", sync="window", clip_norm=0.5, accumulate_step=N, **settings):
    optimizer = {**OPTIMIZERS, **STILL}[optimizer](network.trainable_params())
    return Accumulator(optimizer, accumulate_step, clip_norm, reduction="mean", reducer={**SYNCS, **LOCAL}.get(sync), **settings)


def train(step, batches):
    """Train for an epoch, on half of the ranks by name; ranks may have different numbers of batches."""
    by_name = get_rank() % 2 == 1
    for _ in step.epoch(dict(zip("xy", tensors(x, y))) if by_name else tensors(x, y) for x, y in batches):
        pass


def state(acc):
    return {"counters": [int(acc.update_step), int(acc.mini_step), int(acc.skipped)], "grad_norm": float(acc.grad_norm),
            "parameters": values(acc.optimizer.parameters), "buffers": sum(b.nbytes for b in acc.buffers)}


def trained(rank, sync, sizes, optimizer, *features):
    """Train on this rank's part; each rank starts from weights of its own, which rank 0's replace."""
    network, batches = MLP(seed=rank), microbatches(sizes, rank)
    if rank == 1 and "nan" in features:
        batches[1][0][0, 0] = np.nan
    if rank == 0 and "overflow" in features:
        batches[0][0][0, 0] = np.inf
    scaler = amp.DynamicLossScaler(1024, 2, 1000) if "overflow" in features else None
    noise_scale = GradientNoiseScale(decay=0.9) if "noise" in features else None
    on_nonfinite = next((feature for feature in features if feature.startswith("skip")), "apply")
    step = until_weight(BUDGET_OF_A_RANK) if "budget" in features else N
    acc = accumulator(network, optimizer, sync, on_nonfinite=on_nonfinite, noise_scale=noise_scale, accumulate_step=step)
    strategy = "fused" if "fused" in features else "split"
    train(make_train_step(mean_loss(network), acc, strategy=strategy, loss_scaler=scaler), batches)
    return {**state(acc), "sets": len(acc.buffers), "scale": scaler and float(scaler.scale_value),
            "noise": noise_scale and [noise_scale.noise, noise_scale.gradient_squared]}


def outer(rank, sizes, reducer, optimizer, *features):
    """Local updates, each rank from weights of its own. A NaN makes rank 1 drop its first window."""
    network, batches = MLP(seed=rank), microbatches(sizes, rank)
    acc = accumulator(network, optimizer, reducer, on_nonfinite="skip_window" if "nan" in features else "apply")
    step, spread = make_train_step(mean_loss(network), acc, strategy="fused" if "fused" in features else "split"), []
    for epoch in range(1 + ("twice" in features)):
        if rank == 1 and "nan" in features:
            batches[0][0][0, 0] = np.nan if epoch == 0 else 0
        for i, (x, y) in enumerate(batches):
            step(*tensors(x, y))
            spread += [network.first.bias.asnumpy().copy()] if (epoch, i) == (0, 1) else []  # after the first update
        step.flush()
        step.flush()  # does nothing
    return {**state(acc), "spread": spread}


def as_data_parallel(rank, strategy):
    """The parameters of DataParallel, and of local updates that are averaged after each one, or after two."""
    found = {}
    for reducer in ("window", "each", "averaged"):
        network = MLP(seed=0)
        acc = accumulator(network, "SGD", reducer, clip_norm=None)
        train(make_train_step(mean_loss(network), acc, strategy=strategy), microbatches("alike", rank))
        found[reducer] = values(acc.optimizer.parameters)
    return found


def alone(rank):
    """Until the first exchange, a rank is a process of its own: noise scale, lengths of windows, clipping, parameters."""
    found = {}
    for name, reducer in (("local", LocalUpdates(1000)), ("plain", None)):
        network = Position("alone")
        acc = Accumulator(nn.SGD([network.point], 1e-3), AdaptiveWindow(minimum=2, maximum=8), 0.5, reduction="mean", reducer=reducer)
        step, lengths = make_train_step(network, acc), []
        for x in noisy([4] * 40, 10 * 4, seed=rank):
            step(Tensor(x))
            lengths.append(acc.window_length)
        found[name] = [lengths, acc.noise_scale.noise, float(acc.grad_norm), values(acc.optimizer.parameters)]
        acc.flush()
    return found


def losses_of(network):
    """Means over all rows, and over those of two classes."""
    loss_fn = mean_loss(network)

    def forward_fn(x, y):
        chosen = (y < 2).astype(ms.float32)
        return loss_fn(x, y), (ops.square(network(x)).sum(-1) * chosen).sum() / chosen.sum()

    return forward_fn


def rows_of_both(x, y):
    return x.shape[0], (y < 2).sum()


def pair(rank, sizes, driver):
    """Train with two losses, each divided by what all ranks have of it. A NaN on rank 1 makes all skip a microbatch."""
    network, batches = MLP(seed=0), microbatches(sizes, rank)
    if rank == 1 and driver == "skip":
        batches[1][0][0, 0] = np.nan
    acc = accumulator(network, losses=2, on_nonfinite="skip_microbatch" if driver == "skip" else "apply")
    step = make_train_step(losses_of(network), acc, weight_fn=rows_of_both, strategy="fused" if driver == "fused" else "split")
    for _ in step.epoch((tensors(x, y) for x, y in batches), lookahead=driver == "ahead"):
        pass
    return {**state(acc), "sets": len(acc.buffers) // 4}


def together(rank, settings=TOGETHER):
    """Four accumulators in one step, with Tensors as weights; only the last one sees the NaN of rank 1."""
    networks, loss_fn = nn.CellList([MLP(seed=0) for _ in settings]), nn.CrossEntropyLoss()
    accs = one, two, three, four = [accumulator(network, optimizer, sync, on_nonfinite=on_nonfinite)
                                    for network, (optimizer, sync, on_nonfinite) in zip(networks, settings)]

    def forward_fn(x, y):
        return sum([loss_fn(network(x), y) for network in networks])

    grad_fn = ms.grad(forward_fn, None, networks.trainable_params())

    @ms.jit
    def step(x, y, weight, spoil):
        grads = grad_fn(x, y)
        # Collectives of one graph have to start in the same order on every rank.
        weight = ops.depend(weight, one(grads[:4], weight))
        weight = ops.depend(weight, two(grads[4:8], weight))
        weight = ops.depend(weight, three(grads[8:12], weight))
        return four(tuple([g * spoil for g in grads[12:]]), weight)

    for i, (x, y) in enumerate(microbatches("equal", rank)):
        spoil = np.nan if (rank, i) == (1, 1) else 1.0
        step(*tensors(x, y), Tensor(weight_of(rank, i), ms.float32), Tensor(spoil, ms.float32))
    for acc in accs:
        acc.flush()
    return [state(acc) for acc in accs]


def by_hand(rank):
    """Gradients that the script computes itself: reduction="sum", the number 0 as a weight, the published experiment."""
    found = {"article": train_article([article_rows()[rank::2]], reducer=DataParallel())}
    for sync, reducer in {**SYNCS, "each": LOCAL["each"]}.items():
        network = MLP(seed=0)
        acc = Accumulator(nn.SGD(network.trainable_params(), 0.1), N, reducer=reducer)
        grad_fn = ms.grad(mean_loss(network), None, acc.optimizer.parameters)
        for x, y in microbatches("equal", rank):
            acc(tuple([g / N for g in grad_fn(*tensors(x, y))]))
        acc.flush()
        found[f"sum:{sync}"] = state(acc)
        acc = accumulator(MLP(seed=0), sync=sync, clip_norm=None)
        for value, weight in ((float("nan") if rank else 1.0, 0 if rank else 1.0), (1.0, 1.0)):
            acc(tuple([p * 0 + value for p in acc.optimizer.parameters]), weight)
        found[f"zero:{sync}"] = state(acc)
    return found


def article_rows():
    """The published 8 x 8 numbers."""
    path = Path(__file__).parents[1] / "article_rand8x8.json"
    return np.array(json.loads(path.read_text(encoding="utf-8"))["rows"], np.float32)


def train_article(windows, divisor=1, reducer=None):
    """Two epochs of the published experiment; the loss is the sum of the outputs."""
    network = nn.Dense(8, 1, weight_init="ones", has_bias=False)
    acc = Accumulator(nn.SGD(network.trainable_params(), 0.01, 0.9), len(windows), reducer=reducer)
    grad_fn = ms.grad(lambda x: network(x).sum() / divisor, None, acc.optimizer.parameters)
    for x in windows * 2:
        acc(grad_fn(Tensor(x)))
    return [f"{weight:.4f}" for weight in network.weight.asnumpy().reshape(-1)]


def traffic(rank, sync):
    """16 microbatches, N = 8: collectives, their bytes, and ten elements after each microbatch (Colossal-AI's check)."""
    network, sent, all_reduce = MLP(seed=0), [], ops.AllReduce.__call__

    def counted(self, x):
        if not self.group.startswith("ms_accum") or len(range(*map(int, self.group.split(".")[1:]))) > 1:  # not a rank with itself
            sent.append(x.nbytes)
        return all_reduce(self, x)

    reducer = DataParallel(sync="node", ranks_per_node=1) if sync == "nodes" else DataParallel(sync=sync)
    acc = Accumulator(nn.SGD(network.trainable_params(), 0.1), 8, reduction="mean", reducer=reducer)
    step = make_train_step(mean_loss(network), acc)
    seen = [network.first.weight.asnumpy().reshape(-1)[:10].copy()]
    with patch.object(ops.AllReduce, "__call__", counted):
        for x, y in microbatches("equal", rank)[:4] * 4:
            step(*tensors(x, y))
            seen.append(network.first.weight.asnumpy().reshape(-1)[:10].copy())
    return {"collectives": len(sent), "bytes": sum(sent), "parameters": sum(p.nbytes for p in acc.optimizer.parameters),
            "seen": seen}


def two_dtypes(rank):
    """Sums of gradients and a header: of buckets of float16 and float32, and of float16 alone."""
    found = []
    for dtypes in ((ms.float16, ms.float32, ms.float16, ms.float32), (ms.float16,) * 4):
        gradients = tuple([Tensor(np.full(shape, (i + 1) * (rank + 1)), dtype)
                           for i, (shape, dtype) in enumerate(zip([(3,), (2, 2), (), (5,)], dtypes))])
        buckets = Buckets(Layout(gradients, dtypes, False, {}), 10, rank, get_group_size())
        summed, header = buckets.all_reduce(gradients, (4097.0, rank))
        parts, same = buckets.reduce_scatter(gradients, (4097.0, rank))
        found.append([summed, buckets.all_gather(parts), header, same])
    return found


def logged(rank, sync):
    """What WindowLog writes where ranks have uneven data, each microbatch's loss, and what changing the learning rate says."""
    rows, losses, said = [], [], []

    class Recorder(Callback):
        def on_train_step_end(self, run_context):
            losses.append(float(run_context.original_args().net_outputs))

    class Noted(PerUpdate):
        def on_train_step_end(self, run_context):  # goes on, for rank 0 waits in flushes
            said.append(said_by(super().on_train_step_end, run_context))

    def train(*callbacks):
        network = MLP(seed=0)
        cell = TrainOneStepCell(nn.WithLossCell(network, nn.CrossEntropyLoss()), nn.SGD(network.trainable_params(), 0.1), N,
                                reducer=SYNCS[sync])
        data = [(x.astype(np.float32), y.astype(np.int32)) for x, y in microbatches("uneven", rank)]
        Model(cell).train(1, GeneratorDataset(data, ["x", "y"], shuffle=False), [FlushCallback(), *callbacks], dataset_sink_mode=False)

    train(WindowLog(rows.append), Recorder())
    train(Noted(LearningRateScheduler(lambda rate, step: rate / 2)))
    rows = [[row[name] for name in ("microbatch", "update_step", "loss", "weight")] for row in rows]
    return {"rows": rows, "losses": losses, "said": said}


def said_by(function, *arguments, **keywords):
    """What a refusal says."""
    try:
        function(*arguments, **keywords)
    except (TypeError, ValueError, OSError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "accepted"


def refusals(rank):
    """What every rank says where they are not alike, and where they are."""
    def make(accumulate_step=2, seed=0, rate=0.1, **data_parallel):
        optimizer = nn.SGD(MLP(seed=seed).trainable_params(), rate)
        return Accumulator(optimizer, accumulate_step, reduction="mean", reducer=DataParallel(**data_parallel))

    acc, loss = make(sync="microbatch"), mean_loss(MLP())
    with patch.object(reducers, "get_local_rank_size", lambda: 1 + rank):
        started = said_by(make, sync="node")
    return {"accumulate_step": said_by(make, 2 + rank), "seed": said_by(make, seed=rank, broadcast=False),
            "nodes": said_by(make, sync="node", ranks_per_node=3), "started": started,
            "hosts": said_by(make, sync="node", ranks_per_node=1 + rank),
            "alike": said_by(make, broadcast=False), "rate": said_by(make, rate=0.1 * (1 + rank)),
            "loss_scaler": said_by(make_train_step, loss, acc, loss_scaler=amp.StaticLossScaler(2 ** (rank + 1))),
            "micro_size": said_by(make_train_step, loss, acc, micro_size=2),
            "every": said_by(accumulator, MLP(), sync=["local", "rounds"][rank]),
            "reducer": said_by(accumulator, MLP(), sync=["local", "window"][rank])}


def compiled_before(rank):
    """A graph that was compiled before rank 0's values arrive follows them."""
    network, x = MLP(seed=rank), Tensor(np.ones((1, 6)), ms.float32)

    @ms.jit
    def evaluate(x):
        return network(x)

    evaluate(x)
    accumulator(network)
    return {"seen": evaluate(x), "expected": MLP(seed=0)(x)}


def resume(rank, sync, suffix):
    """Saved in mid-window, twice; continued, and resumed by others; then with rank 1's file damaged."""
    path = FOLDER / f"resume-{sync}.{suffix}"

    def build(seed):
        network = MLP(seed=seed)
        acc = accumulator(network, "Momentum", sync)
        return network, acc, make_train_step(mean_loss(network), acc)

    def everything():
        parameters = (*network.get_parameters(), *acc.optimizer.get_parameters(), *acc.parameters)
        return [p.asnumpy().tobytes() for p in parameters]

    batches, saved = microbatches("long", rank), 7  # of local updates, the second one of a round
    network, acc, step = build(0)
    step(*tensors(*batches[0]))
    save_checkpoint(path, network, acc, extra="first")
    for x, y in batches[1:saved]:
        step(*tensors(x, y))
    save_checkpoint(path, network, acc, extra={"rank": rank})
    mini_step = int(acc.mini_step)
    train(step, batches[saved:])
    uninterrupted = everything()
    network, acc, step = build(1)
    extra = load_checkpoint(path, network, acc)
    train(step, batches[saved:])
    same = everything() == uninterrupted
    unsaved = said_by(save_checkpoint, path, network, acc, extra=(1,) if rank == 1 else [1])
    wait_for_all()
    files = len(list(path.parent.glob(f"*{path.stem}.*")))
    if rank == 1:
        mine, = path.parent.glob(f"{path.stem}.rank1of*")
        mine.write_bytes(mine.read_bytes()[:-1])
    before = everything()
    damaged = said_by(load_checkpoint, path, network, acc)
    swapped, earlier = path.with_name(f"swapped-{path.name}"), b""
    for i in range(2):
        save_checkpoint(swapped, network, acc, extra=i)
        if rank == 1:
            mine, = path.parent.glob(f"{swapped.stem}.rank1of*")
            earlier = earlier or mine.read_bytes()
    if rank == 1:
        mine.write_bytes(earlier)
    swapped = said_by(load_checkpoint, swapped, network, acc)
    blocked = path.with_name(f"blocked-{path.name}")
    if rank == 0:
        blocked.mkdir()
    wait_for_all()
    unnamed = said_by(save_checkpoint, blocked, network, acc)
    wait_for_all()
    return {"mini_step": mini_step, "extra": extra, "same": same, "unsaved": unsaved, "damaged": damaged, "swapped": swapped,
            "files": files, "untouched": everything() == before, "unnamed": unnamed,
            "left": [str(file) for file in path.parent.glob(f"*{blocked.stem}.rank*")]}


def dealt_out(rank, sync):
    """Checkpoints of another number of ranks, saved in mid-window: of four (made by rank 0), of one, and one that these ranks leave."""
    ranks, updated, said = get_group_size(), {}, {}

    def finish(path, accumulate_step):
        """Load into other weights, and train until the window is full, or, if it is already, on what `dealing.after_full` gives."""
        network, acc, step = dealing.build(accumulate_step, SYNCS[sync], seed=9)
        load_checkpoint(path, network, acc)
        start = int(acc.mini_step)
        for x, y in dealing.rows_after(rank, accumulate_step - start) or dealing.after_full(rank):
            step(*tensors(x, y))
        return {"start": start, "flushed": bool(step.flush()), **state(acc)}

    four = FOLDER / f"dealt-four-{sync}.ckpt"
    if rank == 0:
        dealing.save_as_four(four, sync)
    wait_for_all()
    if ranks != 4:
        updated["four"] = finish(four, 16 // ranks)
    for done in (6, 7):
        one = FOLDER / f"dealt-one-{sync}-{done}.ckpt"
        if rank == 0:
            network, acc, step = dealing.build(8)
            for x, y in dealing.rows_of_one(done):
                step(*tensors(x, y))
            save_checkpoint(one, network, acc)
        wait_for_all()
    network, acc, step = dealing.build(8 // ranks, SYNCS[sync], seed=9)
    for done in (6, 7):
        said[done] = said_by(load_checkpoint, FOLDER / f"dealt-one-{sync}-{done}.ckpt", network, acc)
        if said[done] == "accepted":
            updated[f"one, {done}"] = finish(FOLDER / f"dealt-one-{sync}-{done}.ckpt", 8 // ranks)
    said["length"] = said_by(load_checkpoint, four, *dealing.build(3, SYNCS[sync])[:2])
    network, acc, step = dealing.build(4, SYNCS[sync])
    for x, y in dealing.rows_of(rank, 2):
        step(*tensors(x, y))
    save_checkpoint(FOLDER / f"dealt-{sync}.ckpt", network, acc, extra=rank)
    return {"updated": updated, "said": said}


def noisy_data(rank, ranks):
    """Microbatches of one rank, with a noise scale of 2.5 of all ranks'; odd ones run out of data two microbatches early."""
    return noisy([4] * (40 - 2 * (rank % 2)), 2.5 * 4 * ranks, seed=rank)


def adaptive(rank, sync):
    """Windows get longer. Saved in the middle of one before a change and of one after it, and resumed by others."""
    def build():
        network = Position("adapted")
        acc = Accumulator(nn.SGD([network.point], 1e-3), AdaptiveWindow(maximum=8), reduction="mean", reducer=SYNCS[sync])
        return network, acc, make_train_step(network, acc)

    def trained_on(acc, step, data):
        lengths = []
        for _ in step.epoch((Tensor(x),) for x in data):
            lengths.append(acc.window_length)
        return lengths, [p.asnumpy().tobytes() for p in (*acc.optimizer.parameters, *acc.parameters)]

    data, saved = noisy_data(rank, get_group_size()), (7, 9)
    network, acc, step = build()
    for i, x in enumerate(data[:saved[1]]):
        step(Tensor(x))
        if i + 1 in saved:
            save_checkpoint(FOLDER / f"adaptive-{sync}-{i + 1}.ckpt", network, acc, extra=[acc.window_length, int(acc.mini_step)])
    lengths, end = trained_on(acc, step, data[saved[1]:])
    resumed = []
    for i in saved:
        network, again, step = build()
        at = load_checkpoint(FOLDER / f"adaptive-{sync}-{i}.ckpt", network, again)
        resumed.append([*at, trained_on(again, step, data[i:])[1] == end])
    return {**state(acc), "lengths": lengths, "resumed": resumed}


def mnist(rank):
    """The reference run, in FOLDER/mnist."""
    folder = FOLDER / "mnist"
    folder.mkdir(exist_ok=True)
    os.chdir(folder)
    mode = "pynative" if os.environ["MS_JIT"] == "0" else "graph"
    with redirect_stdout(sys.stdout):  # rank 1 replaces its own
        return cli.main(["mnist", *MNIST, "--save-every", "5", "--mode", mode])


def mnist_dealt_out(rank):
    """The reference run, stopped after 4 microbatches of each rank, and what two ranks make of one that a single process began."""
    folder = FOLDER / "mnist-dealt-out"
    folder.mkdir(exist_ok=True)
    os.chdir(folder)
    found = []
    options = ["mnist", *MNIST_SHORT, "--mode", "pynative", "--accumulate-step", "4"]
    if rank == 0:
        with patch.object(cli_reference, "join_ranks", lambda settings: settings):
            one = [*options[:-1], "8", "--save", "one.ckpt", "--save-every", "7", "--epochs", "1"]
            found.append(stopped_at_the_first_save(one, 7))
    wait_for_all()
    with redirect_stdout(sys.stdout):
        found.append(cli.main([*options, "--resume", "one.ckpt", "--json", "resumed.json"]))
    wait_for_all()
    with redirect_stdout(sys.stdout):
        found.append(stopped_at_the_first_save([*options, "--save", "two.ckpt", "--save-every", "7"], 7))
    wait_for_all()
    return found


class Stopped(Exception):
    """Stands for kill -9."""


def stopped_at_the_first_save(command, microbatches):
    """Run a command until it has saved once."""
    save = reference_train.save_checkpoint

    def save_and_stop(*arguments, **options):
        save(*arguments, **options)
        raise Stopped

    with patch.object(reference_train, "save_checkpoint", save_and_stop):
        try:
            cli.main(command)
        except Stopped:
            return f"stopped after {microbatches}"
    return "not stopped"


def failing(rank):
    """Train until rank 1 raises an error. The last case, for no rank comes back from it."""
    acc = accumulator(MLP(seed=0))
    with ending_together("start again", name="train.py"):
        for i in range(10**6):
            acc(acc.optimizer.parameters)
            if i == 20 and rank == 1:
                raise ValueError("no more digits")


def as_json(value):
    return (value.asnumpy() if isinstance(value, Tensor) else value).tolist()


def main(*cases):
    avoid_busy_waiting()
    ms.set_device("CPU")
    init()
    rank, found = get_rank(), {}
    for case in cases:
        name, *arguments = case.split(":")
        mode = arguments.pop() if arguments and arguments[-1] in ("jit", "graph") else "pynative"
        os.environ["MS_JIT"] = "0" if mode == "pynative" else "1"
        ms.set_context(mode=ms.GRAPH_MODE if mode == "graph" else ms.PYNATIVE_MODE)
        start = perf_counter()
        found[case] = globals()[name](rank, *arguments)
        print(f"rank {rank}: {case}  {perf_counter() - start:.1f} s", flush=True)
        (FOLDER / f"rank{rank}.json").write_text(json.dumps(found, default=as_json), encoding="utf-8")
    wait_for_all()


if __name__ == "__main__":
    FOLDER = Path(sys.argv[1])
    main(*sys.argv[2:])
