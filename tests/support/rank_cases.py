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
from conftest import MLP, mean_loss, tensors, values
from drivers import Driver, LossOf, counters
from mindspore import Tensor, amp, nn, ops
from mindspore.communication import get_group_size, get_rank, init
from mindspore.dataset import GeneratorDataset
from mindspore.train import LearningRateScheduler, Model
from noisy_samples import Position, noisy
from rank_runs import DRAWN, LOCAL, NAMED, epochs_of, microbatches, reduction_of, run_of, window_of

from ms_accum import Accumulator, DataParallel, TrainOneStepCell, load_checkpoint, make_train_step, save_checkpoint
from ms_accum.batch_size import AdaptiveWindow, GradientNoiseScale
from ms_accum.callbacks import FlushCallback, PerUpdate, WindowLog
from ms_accum.cli import main as cli
from ms_accum.distributed import LocalUpdates, exchange
from ms_accum.distributed.buckets import Buckets
from ms_accum.distributed.ranks import wait_for_all

RANKS = int(os.environ.get("MS_WORKER_NUM", "2"))
SMALL = 8e-5  # mebibytes, 83 bytes: three buckets for four parameters
REDUCERS = {
    "window": DataParallel(bucket_mib=SMALL),
    "microbatch": DataParallel(sync="microbatch"),
    "shard": DataParallel(sync="microbatch", shard=True, bucket_mib=SMALL),
    "nodes": DataParallel(sync="node", ranks_per_node=RANKS // 2, bucket_mib=SMALL),
    "nodes-shard": DataParallel(sync="node", ranks_per_node=RANKS // 2, shard=True, bucket_mib=SMALL),
    "one-node-shard": DataParallel(sync="node", shard=True, bucket_mib=SMALL),
}
OPTIMIZERS = {"SGD": lambda parameters: nn.SGD(parameters, 0.1), "Adam": lambda parameters: nn.Adam(parameters, 0.01),
              "Momentum": lambda parameters: nn.Momentum(parameters, 0.1, 0.9)}
MNIST = ("--epochs", "2", "--batch-size", "400", "--clip-norm", "1", "--json", "run.json", "--save", "run.ckpt")
_RUNS = [f"trained:{name}" for name in range(DRAWN)]
_OTHERS = ["damaged", "other_ranks:window", "other_ranks:shard", "adaptive:window", "adaptive:shard"]
_NODES = ["other_ranks:nodes", "adaptive:nodes-shard"]  # of several ranks
LAUNCHES = {  # ranks, cases
    "fast": (2, [*_RUNS, "trained:pair", "trained:each", *_OTHERS, "two_dtypes", "logged:window", "logged:microbatch", "traffic:window",
                 "traffic:microbatch", "refusals", "trained:window:jit", "trained:local:jit", "mnist", "failing"]),
    "compiled": (2, [f"{case}:jit" for case in (*_RUNS, "trained:pair", "trained:each", *_OTHERS, "mnist")]),
    "four": (4, [*_RUNS, *(f"{case}:jit" for case in _RUNS[::4]), *(f"trained:{name}" for name in NAMED), *_OTHERS, *_NODES]),
    "left": (2, ["left_alone:jit"]),
}


def cases_of(launch, kind):
    """The cases of a launch that call the function `kind`."""
    return [case for case in LAUNCHES[launch][1] if case.split(":")[0] == kind]


def every_launch_of(kind):
    """Parametrize a test by the launches that have such cases; all but the fast one are slow."""
    return pytest.mark.parametrize("launch", [launch if launch == "fast" else pytest.param(launch, marks=pytest.mark.slow)
                                              for launch in LAUNCHES if cases_of(launch, kind)])


def accumulator(network, optimizer="SGD", sync=None, clip_norm=0.5, accumulate_step=2, reduction="mean", **settings):
    optimizer = OPTIMIZERS[optimizer](network.trainable_params())
    return Accumulator(optimizer, accumulate_step, clip_norm, reduction=reduction, reducer=REDUCERS.get(sync), **settings)


def train(step, batches):
    """Train for an epoch, every other batch by name."""
    for _ in step.epoch(dict(zip("xy", batch)) if i % 2 else batch for i, batch in enumerate(batches)):
        pass


def finite_rows(x, y):
    """A weight: 0 where there is a NaN."""
    return ops.isfinite(x.sum()).astype(ms.float32) * x.shape[0]


def rows_of_both(x, y):
    return x.shape[0], (y < 2).sum()


class LossesOf(LossOf):
    """Means over all rows, and over those of two classes."""

    def construct(self, x, y):
        chosen = (y < 2).astype(ms.float32)
        return super().construct(x, y), (ops.square(self.network(x)).sum(-1) * chosen).sum() / chosen.sum()


def driver_of(kind, loss, acc, pieces=1, weight_fn=None):
    """A driver that runs as MS_JIT says."""
    compiled = {"cell": "graph"}.get(kind, "jit")
    name = f"{kind}-{'pynative' if os.environ.get('MS_JIT') == '0' else compiled}"
    if kind == "ahead":
        return Driver(name, acc, LossesOf(loss.network), (rows_of_both,), losses=2, pieces=pieces)
    return Driver(name, acc, loss, (weight_fn,), pieces=pieces)


def result(acc):
    return {**counters(acc), "grad_norm": float(acc.grad_norm), "parameters": values(acc.optimizer.parameters)}


class Trained:
    """A run on one rank, with all that it holds. Each rank starts from weights of its own, which rank 0's replace."""

    def __init__(self, run, seed):
        self.run, self.network, local = run, MLP(seed=seed), run["sync"] == "local"
        self.loss = LossOf(self.network)
        self.evaluate, self.batch = ms.jit(mean_loss(self.network)), tensors(*microbatches("equal", 0)[0])
        self.evaluate(*self.batch)  # compiled before rank 0's values arrive
        self.scaler = amp.DynamicLossScaler(1024, 2, 1000) if run["nan"] == "scaler" else None
        self.noise_scale = GradientNoiseScale(decay=0.9) if run["noise"] else None
        self.local = LocalUpdates(self.network.trainable_params(), *LOCAL[run["local"]]) if local else None
        self.accumulator = accumulator(
            self.network, run["optimizer"], run["sync"], None if run["local"] == "each" else 0.5, window_of(run, 1), reduction_of(run),
            on_nonfinite=run["nan"] if run["nan"].startswith("skip") else "apply", noise_scale=self.noise_scale,
            loss_scaler=self.scaler, after_update=self.local)

    def epoch(self, driver, batches):
        with driver:
            driver.epoch(batches)
        if self.local is not None:
            self.local.finish()

    def driver(self, kind, pieces):
        return driver_of(kind, self.loss, self.accumulator, pieces, finite_rows if self.run["nan"] == "zero" else None)

    def bits(self):
        acc = self.accumulator
        return [p.asnumpy().tobytes() for p in (*self.network.get_parameters(), *acc.optimizer.get_parameters(), *acc.parameters)]


def trained(rank, name):
    """Train on this rank's part. With "save", a checkpoint in the last epoch, in the middle of a window, is loaded by another one."""
    run = run_of(name)
    training = Trained(run, rank)
    *before, (kind, pieces, batches) = epochs_of(run, rank)
    for first_kind, first_pieces, first in before:
        training.epoch(training.driver(first_kind, first_pieces), first)
    driver, saved = training.driver(kind, pieces), {}
    if run["save"]:
        path = FOLDER / f"{name}{rank if run['sync'] == 'local' else ''}.{'safetensors' if int(name) % 2 else 'ckpt'}"
        with driver:
            driver(*batches.pop(0))
        save_checkpoint(path, training.network, training.accumulator, extra={"rank": rank})
        saved["mini_step"] = int(training.accumulator.mini_step)
    training.epoch(driver, batches)
    if run["save"]:
        other = Trained(run, 2 + rank)
        saved["extra"] = load_checkpoint(path, other.network, other.accumulator)
        other.epoch(other.driver(kind, pieces), batches)
        saved["same"] = other.bits() == training.bits()
    acc, scaler, noise = training.accumulator, training.scaler, training.noise_scale
    return {**result(acc), "scale": scaler and float(scaler.scale_value), "bytes": acc.buffers.nbytes,
            "loss": float(training.evaluate(*training.batch)), "noise": noise and [noise.noise, noise.gradient_squared], "saved": saved}


def step_of(sync, accumulate_step, seed):
    network = MLP(seed=seed)
    return network, make_train_step(mean_loss(network), accumulator(network, "Momentum", sync, accumulate_step=accumulate_step))


def damaged(rank):
    """What each rank says where one cannot save, or one's file is wrong."""
    path, (network, step) = FOLDER / "damaged.ckpt", step_of("shard", 2, 0)
    for x, y in microbatches("equal", rank)[:3]:
        step(x, y)
        save_checkpoint(path, network, step)
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
    return {"files": files, **said}


def dealt_out(ranks):
    """The microbatches of all ranks: the first of each, the second of each, ..."""
    return [batch for row in zip(*(microbatches("equal", rank) for rank in range(ranks))) for batch in row]


def other_ranks(rank, sync):
    """Rank 0 saves as a single process, with a closed window and in the middle of one; then all ranks do."""
    ranks, said, batches = get_group_size(), {}, microbatches("equal", rank)
    for name, count in (("closed", 8), ("open", 3)):
        path = FOLDER / f"one-{sync}-{name}.ckpt"
        if rank == 0:
            network, step = step_of(None, 8, 0)
            for batch in dealt_out(ranks)[:count]:
                step(*batch)
            save_checkpoint(path, network, step)
        wait_for_all()
        network, step = step_of(sync, 8 // ranks, 1)
        said[name] = said_by(load_checkpoint, path, network, step)
        if name == "closed":
            train(step, batches[8 // ranks:])
            said["parameters"] = values(network.trainable_params())
    network, step = step_of(sync, 8 // ranks, 0)
    for i, batch in enumerate(batches):
        step(*batch)
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
    acc = Accumulator(nn.SGD([network.point], 1e-3), AdaptiveWindow(maximum=8), reduction="mean", reducer=REDUCERS[sync])
    step = make_train_step(network, acc)
    lengths = [acc.window.length for _ in step.epoch((Tensor(x),) for x in noisy_data(rank, get_group_size()))]
    return {**result(acc), "lengths": lengths}


def traffic(rank, sync):
    """16 microbatches, N = 8: collectives, their bytes, ten elements after each (Colossal-AI's check). With "window", rank 1 skips two."""
    network, sent, all_reduce = MLP(seed=0), [], ops.AllReduce.__call__

    def counted(self, x):
        sent.append(x.nbytes)
        return all_reduce(self, x)

    acc = Accumulator(nn.SGD(network.trainable_params(), 0.1), 8, reduction="mean", reducer=DataParallel(sync=sync),
                      on_nonfinite="skip_microbatch")
    step = make_train_step(mean_loss(network), acc)
    seen = [network.first.weight.asnumpy().reshape(-1)[:10].copy()]
    with patch.object(ops.AllReduce, "__call__", counted):
        for i, (x, y) in enumerate(microbatches("equal", rank)[:4] * 4):
            if sync == "window" and rank == 1 and i % 8 == 3:
                step(x * np.float32(np.nan), y)
            step(x, y)
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
    callbacks = [FlushCallback(), WindowLog(rows.append), Recorder(LearningRateScheduler(lambda rate, step: rate / 2))]
    Model(cell).train(1, GeneratorDataset(microbatches("uneven", rank), ["x", "y"], shuffle=False), callbacks, dataset_sink_mode=False)
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
            "losses": said_by(make_train_step, LossesOf(MLP()), accumulator(MLP(), sync="microbatch"), losses=2)}


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
    batches = microbatches("equal", rank)
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
