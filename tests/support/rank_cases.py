"""What each rank of a test run does: `rank_cases.py FOLDER CASE...`, started by msrun from launch.py.

A case is the name of a function below and its arguments, joined by colons. It runs op by op unless "jit" stands at its
end. What it returns goes into FOLDER/rank<r>.json under the name of the case.
"""
import json
import os
import sys
from contextlib import redirect_stdout
from pathlib import Path
from time import perf_counter, sleep
from unittest.mock import patch

import mindspore as ms
import numpy as np
import pytest
from conftest import MLP, compiled, mean_loss, tensors, values
from mindspore import Tensor, amp, nn, ops
from mindspore.communication import get_group_size, get_rank, init
from mindspore.dataset import GeneratorDataset
from mindspore.train import LearningRateScheduler, Model
from noisy_samples import Position, noisy

from ms_accum import Accumulator, DataParallel, TrainOneStepCell, load_checkpoint, make_train_step, save_checkpoint, until_weight
from ms_accum.batch_size import AdaptiveWindow, GradientNoiseScale
from ms_accum.callbacks import FlushCallback, PerUpdate, WindowLog
from ms_accum.cli import main as cli
from ms_accum.distributed import LocalUpdates, exchange
from ms_accum.distributed.buckets import Buckets
from ms_accum.distributed.ranks import wait_for_all

RANKS = int(os.environ.get("MS_WORKER_NUM", "2"))
SMALL = 8e-5  # mebibytes, 83 bytes: three buckets for four parameters
SYNCS = {
    "window": DataParallel(bucket_mib=SMALL),
    "microbatch": DataParallel(sync="microbatch"),
    "shard": DataParallel(sync="microbatch", shard=True, bucket_mib=SMALL),
    # Of two ranks: each a node of its own. Of four: two in each of two nodes.
    "nodes": DataParallel(sync="node", ranks_per_node=RANKS // 2, bucket_mib=SMALL),
    "nodes-shard": DataParallel(sync="node", ranks_per_node=RANKS // 2, shard=True, bucket_mib=SMALL),
    "one-node-shard": DataParallel(sync="node", shard=True, bucket_mib=SMALL),
}
OPTIMIZERS = {"SGD": lambda parameters: nn.SGD(parameters, 0.1), "Adam": lambda parameters: nn.Adam(parameters, 0.01),
              "Momentum": lambda parameters: nn.Momentum(parameters, 0.1, 0.9)}
SIZES = {  # samples in the microbatches of rank r; those of one size are compiled once
    "equal": lambda r: [4] * 5,
    "unequal": lambda r: [3 + r, 4, 5 - r % 2, 2, 1 + r],
    "uneven": lambda r: [3 + r, 4, 2, 5, 3, 4, 1][:7 - 3 * (r % 2)],  # ranks 1 and 3 run out of data
    "alike": lambda r: [4] * (6 - 2 * (r % 2)),  # one window less, all of the same weight
    "long": lambda r: [3 + r, 4, 2, 5, 3] * 2 + [4],
    "halved": lambda r: ([3 + r, 4, 2, 5, 3] * 2 + [4])[:11 - 5 * (r % 2)],  # three windows less on ranks 1 and 3
}
WINDOWS = {"two": 2, "one": 1, "schedule": {0: 1, 1: 3}, "budget": until_weight(7)}
LOCAL = {"local": (2, 0.7, 0.9), "averaged": (2, 1, 0), "each": (1, 1, 0), "rounds": (3, 0.7, 0.9)}
MNIST = ("--epochs", "2", "--batch-size", "400", "--clip-norm", "1", "--json", "run.json", "--save", "run.ckpt")
CHOICES = {"sizes": ("equal", "unequal", "uneven"), "optimizer": tuple(OPTIMIZERS), "windows": tuple(WINDOWS), "noise": (False, True),
           "driver": ("step 1", "step 3", "step 4", "cell", "hand mean", "hand sum"),  # and pieces (of 1 to 6 rows) or reduction
           "nan": ("", "skip_microbatch", "skip_window", "scaler", "zero", "empty")}


def drawn(number):
    """The settings of a run: 36 of them combine each sync with each choice. Rank 1's second microbatch holds a NaN or is empty."""
    turn, sync = divmod(int(number), len(SYNCS))
    run = {"sync": list(SYNCS)[sync]}
    for i, (name, choices) in enumerate(CHOICES.items()):
        again, place = divmod(turn, len(choices))
        run[name] = choices[np.random.default_rng([sync, again, i]).permutation(len(choices))[place]]
    run["driver"], detail = [*run["driver"].split(), ""][:2]
    return {**run, "pieces": int(detail) if detail.isdigit() else 1, "reduction": "sum" if detail == "sum" else "mean"}


OUTER = ["outer:alike:each:SGD", "outer:long:local:SGD", "outer:halved:local:Momentum", "outer:halved:rounds:SGD:nan:twice"]
RESUME = ["resume:window:ckpt", "resume:shard:safetensors", "resume:nodes-shard:ckpt"]
ADAPTIVE = ["adaptive:window", "adaptive:nodes-shard"]
OTHER_RANKS = [f"other_ranks:{sync}" for sync in ("window", "shard", "nodes")]
LAUNCHES = {  # ranks, cases
    "fast": (2, [*(f"trained:{i}" for i in range(36)), "pair:uneven:1", "pair:equal:2", *OUTER, *RESUME, *OTHER_RANKS, *ADAPTIVE,
                 "two_dtypes", "logged:window", "logged:microbatch", "traffic:window", "traffic:microbatch", "traffic:nodes",
                 "refusals", "trained:6:jit", "outer:alike:local:SGD:jit", "mnist", "failing"]),
    "compiled": (2, [*(f"trained:{i}:jit" for i in range(24)), *(f"{case}:jit" for case in (
        "pair:uneven:1", "pair:equal:2", *OUTER, *RESUME, *ADAPTIVE, "mnist"))]),
    "four": (4, [*(f"trained:{i}" for i in range(36, 60)), *(f"trained:{i}:jit" for i in range(24, 30)), "pair:uneven:1", *OUTER,
                 *RESUME, *OTHER_RANKS, *ADAPTIVE]),
    "left": (2, ["left_alone:jit"]),
}


def cases_of(launch, kind):
    """The cases of a launch that call the function `kind`."""
    return [case for case in LAUNCHES[launch][1] if case.split(":")[0] == kind]


def every_launch_of(kind):
    """Parametrize a test by the launches that have such cases; all but the fast one are slow."""
    return pytest.mark.parametrize("launch", [launch if launch == "fast" else pytest.param(launch, marks=pytest.mark.slow)
                                              for launch in LAUNCHES if cases_of(launch, kind)])


def microbatches(sizes, rank, nan=False):
    """[(x float64 (n, 6), y int (n,))] of a rank."""
    rng = np.random.default_rng(100 + rank)
    batches = [(rng.normal(size=(n, 6)), rng.integers(0, 3, n)) for n in SIZES[sizes](rank)]
    if nan == "empty" and rank == 1:
        batches[1] = tuple(rows[:0] for rows in batches[1])
    elif nan and rank == 1:
        batches[1][0][0, 0] = np.nan
    return batches


def dealt_out(sizes, ranks):
    """The microbatches of all ranks: the first of each, the second of each, ..."""
    return [batch for row in zip(*(microbatches(sizes, rank) for rank in range(ranks))) for batch in row]


def accumulator(network, optimizer="SGD", sync=None, clip_norm=0.5, accumulate_step=2, reduction="mean", **settings):
    optimizer = OPTIMIZERS[optimizer](network.trainable_params())
    return Accumulator(optimizer, accumulate_step, clip_norm, reduction=reduction, reducer=SYNCS.get(sync), **settings)


def finite_rows(x, y):
    """A weight: 0 where there is a NaN."""
    return ops.isfinite(x.sum()).astype(ms.float32) * x.shape[0]


def train(step, batches):
    """Train for an epoch, every other batch by name."""
    for _ in step.epoch(dict(zip("xy", tensors(*batch))) if i % 2 else tensors(*batch) for i, batch in enumerate(batches)):
        pass


def train_by(driver, network, acc, batches, pieces=1, weight_fn=None):
    """Train for an epoch, and flush."""
    if driver == "step":
        return train(make_train_step(mean_loss(network), acc, pieces=pieces, weight_fn=weight_fn), batches)
    if driver == "cell":
        ms.set_context(mode=ms.PYNATIVE_MODE if os.environ["MS_JIT"] == "0" else ms.GRAPH_MODE)
        step = TrainOneStepCell(nn.WithLossCell(network, nn.CrossEntropyLoss()), acc, weight_fn=weight_fn)
        for x, y in batches:
            step(*tensors(x, y))
        step.flush()
        return ms.set_context(mode=ms.PYNATIVE_MODE)
    forward_fn = mean_loss(network)

    def scaled(x, y):
        return acc.scaled(forward_fn(x, y))

    grad_fn = ms.grad(scaled, None, acc.optimizer.parameters)

    def step(x, y, weight):
        return acc(grad_fn(x, y), weight)

    step = compiled(step, "pynative" if os.environ["MS_JIT"] == "0" else "jit")
    for x, y in batches:
        if not len(x):  # by hand, nothing of it is differentiated
            acc(acc.optimizer.parameters, 0.0)
            continue
        x, y = tensors(x, y)
        step(x, y, finite_rows(x, y) if weight_fn else Tensor(x.shape[0], ms.float32))
    return acc.flush()


def state(acc):
    return {"counters": [int(acc.update_step), int(acc.mini_step), int(acc.skipped)], "grad_norm": float(acc.grad_norm),
            "parameters": values(acc.optimizer.parameters)}


def trained(rank, number):
    """Train on this rank's part; each rank starts from weights of its own, which rank 0's replace."""
    run, network = drawn(number), MLP(seed=rank)
    evaluate, batch = ms.jit(mean_loss(network)), tensors(*microbatches("equal", 0)[0])
    evaluate(*batch)  # compiled before rank 0's values arrive
    scaler = amp.DynamicLossScaler(1024, 2, 1000) if run["nan"] == "scaler" else None
    noise_scale = GradientNoiseScale(decay=0.9) if run["noise"] else None
    acc = accumulator(network, run["optimizer"], run["sync"], accumulate_step=WINDOWS[run["windows"]], reduction=run["reduction"],
                      on_nonfinite=run["nan"] if run["nan"].startswith("skip") else "apply", noise_scale=noise_scale,
                      loss_scaler=scaler)
    train_by(run["driver"], network, acc, microbatches(run["sizes"], rank, run["nan"]), run["pieces"],
             finite_rows if run["nan"] == "zero" else None)
    return {**state(acc), "scale": scaler and float(scaler.scale_value), "bytes": acc.buffers.nbytes, "loss": float(evaluate(*batch)),
            "noise": noise_scale and [noise_scale.noise, noise_scale.gradient_squared]}


def losses_of(network):
    """Means over all rows, and over those of two classes."""
    loss_fn = mean_loss(network)

    def forward_fn(x, y):
        chosen = (y < 2).astype(ms.float32)
        return loss_fn(x, y), (ops.square(network(x)).sum(-1) * chosen).sum() / chosen.sum()

    return forward_fn


def pair(rank, sizes, pieces):
    """Train with two losses, each divided by what all ranks have of it."""
    def rows_of_both(x, y):
        return x.shape[0], (y < 2).sum()

    network = MLP(seed=0)
    acc = accumulator(network, sync="window")
    step = make_train_step(losses_of(network), acc, weight_fn=rows_of_both, losses=2, pieces=int(pieces))
    train(step, microbatches(sizes, rank))
    return state(acc)


def outer(rank, sizes, name, optimizer, *features):
    """Local updates, each rank from weights of its own. A NaN makes rank 1 drop its first window."""
    network = MLP(seed=rank)
    local = LocalUpdates(network.trainable_params(), *LOCAL[name])
    acc = accumulator(network, optimizer, clip_norm=None if name == "each" else 0.5, on_nonfinite="skip_window", after_update=local)
    step = make_train_step(mean_loss(network), acc)
    for _ in range(1 + ("twice" in features)):
        train(step, microbatches(sizes, rank, "nan" in features))
        local.finish()
    return state(acc)


def everything(network, step):
    parameters = (*network.get_parameters(), *step.accumulator.optimizer.get_parameters(), *step.accumulator.parameters)
    return [p.asnumpy().tobytes() for p in parameters]


def step_of(sync, accumulate_step, seed):
    network = MLP(seed=seed)
    return network, make_train_step(mean_loss(network), accumulator(network, "Momentum", sync, accumulate_step=accumulate_step))


def resume(rank, sync, suffix):
    """Saved in mid-window, twice; continued, and resumed by others; then with what goes wrong on one rank."""
    path, batches = FOLDER / f"resume-{sync}.{suffix}", microbatches("long", rank)
    network, step = step_of(sync, 2, 0)
    for i, (x, y) in enumerate(batches[:7]):
        step(*tensors(x, y))
        if i in (0, 6):
            save_checkpoint(path, network, step, extra={"rank": rank})
    mini_step = int(step.accumulator.mini_step)
    train(step, batches[7:])
    uninterrupted = everything(network, step)
    network, step = step_of(sync, 2, 1)
    extra = load_checkpoint(path, network, step)
    train(step, batches[7:])
    same = everything(network, step) == uninterrupted
    said = {"unsaved": said_by(save_checkpoint, path, network, step, extra=(1,) if rank == 1 else [1])}
    wait_for_all()
    files, kept = len(list(path.parent.glob(f"*{path.stem}.*"))), b""
    for what in ("truncated", "swapped"):
        if rank == 1:
            mine, = path.parent.glob(f"{path.stem}.rank1of*")
            whole = mine.read_bytes()
            mine.write_bytes(kept or whole[:-1])
            kept = whole  # of an earlier save
        said[what] = said_by(load_checkpoint, path, network, step)
        save_checkpoint(path, network, step)
    return {"mini_step": mini_step, "extra": extra, "same": same, "files": files, **said}


def other_ranks(rank, sync):
    """Rank 0 saves as a single process, with a closed window and in the middle of one; then all ranks do."""
    ranks, said, batches = get_group_size(), {}, microbatches("equal", rank)
    for name, count in (("closed", 8), ("open", 3)):
        path = FOLDER / f"one-{sync}-{name}.ckpt"
        if rank == 0:
            network, step = step_of(None, 8, 0)
            for x, y in dealt_out("equal", ranks)[:count]:
                step(*tensors(x, y))
            save_checkpoint(path, network, step)
        wait_for_all()
        network, step = step_of(sync, 8 // ranks, 1)
        said[name] = said_by(load_checkpoint, path, network, step)
        if name == "closed":
            train(step, batches[8 // ranks:])
            said["parameters"] = values(network.trainable_params())
    network, step = step_of(sync, 8 // ranks, 0)
    for i, (x, y) in enumerate(batches):
        step(*tensors(x, y))
        if i + 1 == 8 // ranks:
            save_checkpoint(FOLDER / f"ranks-{sync}-closed.ckpt", network, step)
    save_checkpoint(FOLDER / f"ranks-{sync}-open.ckpt", network, step)
    return said


def noisy_data(rank, ranks):
    """Microbatches of one rank, with a noise scale of 2.5 of all ranks'; odd ones run out of data two microbatches early."""
    return noisy([4] * (40 - 2 * (rank % 2)), 2.5 * 4 * ranks, seed=rank)


def adaptive(rank, sync):
    """Windows get longer."""
    network = Position("adapted")
    acc = Accumulator(nn.SGD([network.point], 1e-3), AdaptiveWindow(maximum=8), reduction="mean", reducer=SYNCS[sync])
    step = make_train_step(network, acc)
    lengths = [acc.window.length for _ in step.epoch((Tensor(x),) for x in noisy_data(rank, get_group_size()))]
    return {**state(acc), "lengths": lengths}


def traffic(rank, sync):
    """16 microbatches, N = 8: collectives, their bytes, ten elements after each (Colossal-AI's check). With "window", rank 1 skips two."""
    network, sent, all_reduce = MLP(seed=0), [], ops.AllReduce.__call__

    def counted(self, x):
        sent.append(x.nbytes)
        return all_reduce(self, x)

    reducer = DataParallel(sync="node", ranks_per_node=1) if sync == "nodes" else DataParallel(sync=sync)
    acc = Accumulator(nn.SGD(network.trainable_params(), 0.1), 8, reduction="mean", reducer=reducer, on_nonfinite="skip_microbatch")
    step = make_train_step(mean_loss(network), acc)
    seen = [network.first.weight.asnumpy().reshape(-1)[:10].copy()]
    with patch.object(ops.AllReduce, "__call__", counted):
        for i, (x, y) in enumerate(microbatches("equal", rank)[:4] * 4):
            if sync == "window" and rank == 1 and i % 8 == 3:
                step(*tensors(x * np.nan, y))
            step(*tensors(x, y))
            seen.append(network.first.weight.asnumpy().reshape(-1)[:10].copy())
    return {"collectives": len(sent), "bytes": sum(sent), "parameters": sum(p.nbytes for p in acc.optimizer.parameters),
            "seen": seen, "skipped": int(acc.skipped)}


def two_dtypes(rank):
    """Sums of gradients and of numbers: of buckets of float16 and float32, and of float16 alone."""
    found = []
    for dtypes in ((ms.float16, ms.float32, ms.float16, ms.float32), (ms.float16,) * 4):
        gradients = tuple([Tensor(np.full(shape, (i + 1) * (rank + 1)), dtype)
                           for i, (shape, dtype) in enumerate(zip([(3,), (2, 2), (), (5,)], dtypes))])
        buckets = Buckets(gradients, dtypes, 10, rank, get_group_size())
        summed, numbers = buckets.all_reduce(gradients, (4097.0, rank))
        parts, same = buckets.reduce_scatter(gradients, (4097.0, rank))
        found.append([summed, buckets.all_gather(parts), numbers, same])
    return found


def logged(rank, sync):
    """What WindowLog writes where ranks have uneven data, each microbatch's loss, and what changing the learning rate says."""
    rows, losses, said, network = [], {}, [], MLP(seed=0)

    class Recorder(PerUpdate):
        def on_train_step_end(self, run_context):  # goes on, for rank 0 waits in flushes
            losses[run_context.original_args().cur_step_num] = float(run_context.original_args().net_outputs)
            said.append(said_by(super().on_train_step_end, run_context))

    acc = accumulator(network, sync=sync, clip_norm=None)
    cell = TrainOneStepCell(nn.WithLossCell(network, nn.CrossEntropyLoss()), acc)
    data = [(x.astype(np.float32), y.astype(np.int32)) for x, y in microbatches("uneven", rank)]
    callbacks = [FlushCallback(), WindowLog(rows.append), Recorder(LearningRateScheduler(lambda rate, step: rate / 2))]
    Model(cell).train(1, GeneratorDataset(data, ["x", "y"], shuffle=False), callbacks, dataset_sink_mode=False)
    rows = [[row[name] for name in ("microbatch", "update_step", "loss", "weight")] for row in rows]
    return {"rows": rows, "losses": list(losses.values()), "said": said}


def said_by(function, *arguments, **keywords):
    """What a refusal says."""
    try:
        function(*arguments, **keywords)
    except (TypeError, ValueError, OSError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "accepted"


def refusals(rank):
    """What every rank says where they are not alike, and where they are."""
    def make(accumulate_step=2, seed=0, rate=0.1, scale=2, **data_parallel):
        optimizer = nn.SGD(MLP(seed=seed).trainable_params(), rate)
        return Accumulator(optimizer, accumulate_step, reduction="mean", reducer=DataParallel(**data_parallel),
                           loss_scaler=amp.StaticLossScaler(scale))

    with patch.object(exchange, "get_local_rank_size", lambda: 1 + rank):
        started = said_by(make, sync="node")
    return {"accumulate_step": said_by(make, 2 + rank), "seed": said_by(make, seed=rank, broadcast=False),
            "nodes": said_by(make, sync="node", ranks_per_node=3), "started": started,
            "hosts": said_by(make, sync="node", ranks_per_node=1 + rank), "alike": said_by(make, broadcast=False),
            "rate": said_by(make, rate=0.1 * (1 + rank)), "loss_scaler": said_by(make, scale=2 ** (rank + 1)),
            "every": said_by(LocalUpdates, MLP().trainable_params(), every=2 + rank),
            "shapes": said_by(LocalUpdates, MLP(features=6 + rank).trainable_params()),
            "losses": said_by(make_train_step, losses_of(MLP()), accumulator(MLP(), sync="microbatch"), losses=2)}


def mnist(rank):
    """`ms-accum mnist`, in FOLDER/mnist."""
    folder = FOLDER / "mnist"
    folder.mkdir(exist_ok=True)
    os.chdir(folder)
    with redirect_stdout(sys.stdout):  # rank 1 replaces its own
        return cli.main(["mnist", *MNIST])


def left_alone(rank):
    """What rank 0 says when rank 1 leaves its epoch early, and lives on for longer than MindSpore waits."""
    _, step = step_of("window", 2, 0)
    batches = [tensors(x, y) for x, y in microbatches("equal", rank)]
    if rank == 0:
        return said_by(list, step.epoch(batches))
    next(step.epoch(batches))
    sleep(60)
    return "left"


def failing(rank):
    """Train until rank 1 raises an error. The last case, for no rank comes back from it."""
    acc = accumulator(MLP(seed=0), sync="window")
    for i in range(10**6):
        acc(acc.optimizer.parameters)
        if i == 20 and rank == 1:
            raise ValueError("no more digits")


def as_json(value):
    return (value.asnumpy() if isinstance(value, Tensor) else value).tolist()


def main(*cases):
    ms.set_device("CPU")
    init()
    rank, found = get_rank(), {}
    for case in cases:
        name, *arguments = case.split(":")
        os.environ["MS_JIT"] = "1" if arguments[-1:] == ["jit"] else "0"
        start = perf_counter()
        found[case] = globals()[name](rank, *[argument for argument in arguments if argument != "jit"])
        print(f"rank {rank}: {case}  {perf_counter() - start:.1f} s", flush=True)
        (FOLDER / f"rank{rank}.json").write_text(json.dumps(found, default=as_json), encoding="utf-8")
    wait_for_all()


if __name__ == "__main__":
    FOLDER = Path(sys.argv[1])
    main(*sys.argv[2:])
