"""What each rank of a test run does: `rank_cases.py FOLDER CASE...`, started by msrun from launch.py.

A case is the name of a function below and its arguments, joined by colons. It runs op by op unless "jit" stands at its
end. What it returns goes into FOLDER/rank<r>.json under the name of the case.
"""
import json
import os
import shutil
import sys
import warnings
from contextlib import redirect_stdout
from dataclasses import replace
from functools import partial
from itertools import islice, product
from pathlib import Path
from time import perf_counter, sleep
from unittest.mock import patch

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, amp, nn, ops
from mindspore.communication import get_group_size, get_rank, init
from mindspore.dataset import GeneratorDataset
from mindspore.train import LearningRateScheduler, Model

from ms_accum import (
    Accumulator,
    DataParallel,
    Stage,
    TrainOneStepCell,
    load_checkpoint,
    make_grad_cache_step,
    make_train_step,
    save_checkpoint,
    shard_parameters,
)
from ms_accum import __main__ as cli
from ms_accum.batch_size import GradientNoiseScale
from ms_accum.checkpoint.file import Entry, read_file
from ms_accum.core.window import Window
from ms_accum.distributed import data_parallel
from ms_accum.distributed.buckets import Buckets
from ms_accum.distributed.ranks import require_equal
from ms_accum.distributed.tags import wait_for_all
from ms_accum.distributed.zero import Scatter
from ms_accum.model.callbacks import FlushCallback, PerUpdate, WindowLog
from ms_accum.selftest.comparing import difference, values
from ms_accum.selftest.networks import MLP, batches, mean_loss, tensors
from support import zero_cases
from support.differential.accumulating import Accumulating
from support.differential.cases import COMPILED, OP_BY_OP
from support.differential.ranks import DRAWN, NAMED, case_of
from support.drivers import counters
from support.noisy_samples import Position, noisy
from support.protocol_cases import (  # noqa: F401
    built_again,
    by_hand,
    evaluated_alone,
    left_by_an_error,
    left_early,
    own_all_reduce,
    reset_inside,
    said_by,
    saved_on_update,
    twins,
    unmatched,
)
from support.scripts import run_here
from support.zero_cases import (  # noqa: F401
    zero_defects,
    zero_interrupted,
    zero_model,
    zero_optimizers,
    zero_refusals,
    zero_runs,
)

RANKS = int(os.environ.get("MS_WORKER_NUM", "2"))
SMALL = 8e-5  # mebibytes, 83 bytes: three buckets for four parameters
REDUCERS = {
    "window": DataParallel(bucket_mib=SMALL),
    "microbatch": DataParallel(sync="microbatch"),
    "zero1": DataParallel(zero=1, bucket_mib=SMALL),
    "zero2": DataParallel(zero=2, bucket_mib=SMALL),
    "zero2-large": DataParallel(sync="microbatch", zero=2),
    "nodes": DataParallel(sync="node", ranks_per_node=RANKS // 2, bucket_mib=SMALL),
    "nodes-zero2": DataParallel(sync="node", ranks_per_node=RANKS // 2, zero=2, bucket_mib=SMALL),
    "one-node-zero2": DataParallel(sync="node", zero=2, bucket_mib=SMALL),
}
NOISE_DECAY, NOISE_RATE = 0.95, 1e-3
COMPILED_OF = dict(zip(OP_BY_OP, COMPILED))
MNIST = ("--epochs", "2", "--batch-size", "400", "--momentum", "0.9", "--save", "run.safetensors")
_RUNS = [f"trained:{name}" for name in range(DRAWN)]
_FEW = [f"trained:{i}" for i in (0, 4, 8, 9, 12, 17, 18, 22)]  # one of each kind of exchange, of small networks
_FILES = ["damaged", "other_ranks:window", "other_ranks:zero1", "other_ranks:zero2"]
_NOISE = ["noise:window", "noise:zero1", "noise:zero2"]
_OTHERS = [*_FILES, *_NOISE]
_NODES = ["other_ranks:nodes", "noise:nodes-zero2", "other_ranks:nodes-zero2"]  # of several ranks
_ZERO = ["zero_refusals", "zero_interrupted"]
_STUCK = [f"stuck:{sync}" for sync in ("window", "microbatch", "zero1", "zero2")]
_ZERO_RUNS = [f"zero_runs:{name}" for name in zero_cases.RUNS]
FAST = ("fast",)
LAUNCHES = {  # ranks, cases
    "fast": (2, [*_FEW, *_NOISE, *_ZERO, "traffic:window", "traffic:microbatch", "followed:jit", *_FILES, *_STUCK,
                 "logged:window", "logged:microbatch", "refusals", "apart", "empty", "returned:window",
                 "left_early", "left_by_an_error", "evaluated_alone", "saved_on_update", "evaluated",
                 "unmatched", "built_again",
                 "stuck_in_flush", "failing"]),
    "others": (2, [*(case for case in _RUNS if case not in _FEW), "resumed:window", "resumed:zero2", "zero_defects",
                   "zero_model", "zero_own", "selftest"]),
    "scripts": (2, ["mnist", "mnist_zero"]),
    "compiled": (2, [f"{case}:jit" for case in (*_RUNS, *map("trained:{}".format, NAMED), *_OTHERS, "mnist",
                                            "empty:each", "returned:window:microbatch:zero1")]),
    "four": (4, [*_RUNS, *(f"{case}:jit" for case in _RUNS[::4]), *_OTHERS, *_NODES]),
    "zero": (2, [*_ZERO_RUNS, "zero_optimizers", "zero_checkpoints"]),
    "zero-compiled": (2, [f"{case}:jit" for case in ("zero_defects", "zero_model", *_ZERO_RUNS)]),
    "zero-optimizers": (2, ["zero_checkpoints:jit", "zero_optimizers:jit"]),
    "left": (2, ["left_alone:jit"]),
    "calls": (2, ["evaluated:jit", "declared:jit", "twins", "by_hand", "by_hand:jit"]),
    "mixed": (2, ["own_all_reduce"]),
    "reset": (2, ["reset_inside"]),
}


def every(kind):
    """Parametrize a test by the cases that call the function `kind`; only those of the fast launches are fast."""
    return pytest.mark.parametrize(("launch", "case"), [
        pytest.param(launch, case, marks=[] if launch in FAST else [pytest.mark.slow])
        for launch, (_, cases) in LAUNCHES.items() for case in cases if case.split(":")[0] == kind])


def microbatches(rank, uneven=False):
    """[(x float32 (n, 6), y int32 (n,))] of a rank."""
    sizes = [3 + rank, 4, 2, 5, 3, 4, 1][:7 - 3 * (rank % 2)] if uneven else [4] * 5
    return [(x.astype(np.float32), y.astype(np.int32)) for x, y in batches(sizes, seed=100 + rank)]


def accumulator(network, **settings):
    return Accumulator(reduction="mean", **settings_of(network, **settings))


def settings_of(network, optimizer=nn.SGD, sync=None, clip_norm=0.5, accumulate_step=2, **settings):
    """Arguments of an Accumulator, or of a step, which exchanges in this way."""
    return {"optimizer": optimizer(parameters_for(network.trainable_params(), sync), 0.1),
            "accumulate_step": accumulate_step, "clip_norm": clip_norm, "reducer": REDUCERS.get(sync), **settings}


def parameters_for(parameters, sync):
    """What the optimizer gets, where ranks exchange in this way."""
    return shard_parameters(parameters) if "zero" in (sync or "") else parameters


def train(step, data):
    """Train for an epoch, or the rest of one, every other batch by name."""
    for _ in step.epoch((dict(zip("xy", batch)) if i % 2 else batch for i, batch in enumerate(data)), resume=False):
        pass


def trained(rank, name):
    """Train on this rank's part, from weights of its own, which rank 0's replace. Another run loads the checkpoint."""
    case = case_of(name)
    if os.environ["MS_JIT"] != "0":
        case = case._replace(driver=COMPILED_OF.get(case.driver, case.driver))

    def start(seed):
        return Accumulating(case, case.seed + seed, reducer=REDUCERS[case.sync])

    def finish(run, data):
        with run.driver as driver:
            run.train(data, last=True)
            driver.flush()

    # Statistics of BatchNorm stay what each rank built.
    alike = case.norm == "batch"
    run, data, saved = start(0 if alike else rank), case.batches(rank), case.save_at or 0
    path = FOLDER / f"{name}.safetensors"
    if saved:
        with run.driver:
            run.train(data[:saved])
        run.save(path, rank)
    finish(run, data[saved:])
    found = run.facts()
    if saved:
        other = start(2 + rank)
        found["position"] = other.load(path)
        finish(other, data[saved:])
        found["same"] = other.bits() == run.bits()
    buffers, parameters = run.accumulator.window.nbytes, run.accumulator.weights
    return {**found, "bytes": buffers, "sizes": [p.size for p in parameters]}


def followed(rank):
    """The loss, by a graph that was compiled before rank 0's values arrive."""
    network = MLP(seed=rank)
    evaluate, batch = ms.jit(mean_loss(network)), tensors(*microbatches(0)[0])
    before = float(evaluate(*batch))
    accumulator(network, sync="window")
    return before, float(evaluate(*batch))


def step_of(sync, accumulate_step, seed):
    network = MLP(seed=seed)
    return network, make_train_step(mean_loss(network), **settings_of(
        network, partial(nn.Momentum, momentum=0.9), sync, accumulate_step=accumulate_step))


def evaluated(rank):
    """The mean loss of all ranks' data in an open window, of which nothing changes; what ranks say that do not agree.

    Rank 0 has 7 batches, rank 1 has 4, or none.
    """
    network, step = step_of("window", 2, 0)
    data = microbatches(rank, uneven=True)
    step(*data[0])
    before = step.status().mini_step

    def broken():
        yield data[0]
        if rank == 1:
            raise OSError("no such file")

    found = {"all": step.evaluate(data), "rank 0": step.evaluate(data if rank == 0 else []),
             "none": said_by(step.evaluate, []), "broken": said_by(lambda: step.evaluate(broken())),
             "again": step.evaluate(data), "held": [before, step.status().mini_step]}
    means = [float(mean_loss(network)(*tensors(*batch))) for batch in data]
    return {**found, "own": np.mean(means), "other": said_by(lambda: step.evaluate(data) if rank else step.flush())}


def declared(rank):
    """Parameters after training on batches of other sizes on each rank, whose shapes are declared as dynamic or not."""
    x, y = (Tensor(shape=shape, dtype=dtype) for shape, dtype in (([None, 6], ms.float32), ([None], ms.int32)))
    left = {}
    for sync in ("window", "microbatch", "zero1"):
        for kind in ("static", "declared"):
            network = MLP(seed=0)
            forward_fn = mean_loss(network)
            if kind == "declared":
                forward_fn = ms.enable_dynamic(x=x, y=y)(forward_fn)
            step = make_train_step(forward_fn, **settings_of(network, sync=sync))
            train(step, microbatches(rank, uneven=True))
            shapes = str(step).rpartition(", ")[2].split()[0]
            left[f"{sync} {kind}"] = int(shapes), [p.asnumpy().tolist() for p in network.get_parameters()]
    return left


def damaged(rank):
    """What is left by saves, and what each rank says where one cannot save or load, or they do not agree."""
    path, (network, step) = FOLDER / "damaged.safetensors", step_of("zero2", 2, 0)

    def files():
        wait_for_all()
        return [other.name for other in path.parent.glob(f"*{path.stem}*")]

    left = []
    for x, y in microbatches(rank)[:3]:
        step(x, y)
        save_checkpoint(path, network, step)
        left.append(files())
    whole, other = path.read_bytes(), FOLDER / f"another{rank}.safetensors"
    said = {"extra": said_by(save_checkpoint, path, network, step, extra=(1,) if rank == 1 else [1]),
            "folder": said_by(save_checkpoint, FOLDER / "nowhere" / path.name, network, step),
            "saved to": said_by(save_checkpoint, other, network, step),
            "loaded from": said_by(load_checkpoint, other, network, step)}
    if rank == 1:
        network.frozen = Parameter(Tensor(0.0), name="frozen", requires_grad=False)
    said["saved others"], said["loaded others"] = (said_by(call, path, network, step)
                                                   for call in (save_checkpoint, load_checkpoint))
    unchanged, files_then = path.read_bytes() == whole, files()
    network, step = step_of("zero2", 2, 1)
    wait_for_all()
    if rank == 0:
        path.write_bytes(whole[:-1])
    said["truncated"] = said_by(load_checkpoint, path, network, step)
    if rank == 0:
        path.write_bytes(whole)
    with patch.object(Entry, "read", unreadable if rank == 0 else Entry.read):
        said["written"] = said_by(load_checkpoint, path, network, step)
    said["torn"] = said_by(step, *microbatches(rank)[0])
    load_checkpoint(path, network, step)
    said["mended"] = said_by(step, *microbatches(rank)[0])
    return {"files": [*left, files_then], "unchanged": unchanged, "said": said}


def unreadable(entry):
    raise OSError("it was written while it was read")


def without_rank_1(path, opened):
    """What the file of a checkpoint holds, but for what is rank 1's own."""
    entries, about = read_file(path, opened)
    return {name: entry for name, entry in entries.items() if not name.startswith("rank1:")}, about


def dealt_out(ranks):
    """The microbatches of all ranks: the first of each, the second of each, ..."""
    return [batch for row in zip(*(microbatches(rank) for rank in range(ranks))) for batch in row]


def resumed(rank, sync):
    """How far runs end from one that goes on, after a save in the middle of an epoch, from a copy of the file.

    Then, with nothing skipped, and without what the file holds of rank 1. Ranks have 7 and 4 microbatches.
    """
    data, path, off = microbatches(rank, uneven=True), FOLDER / f"resumed-{sync}.safetensors", []
    copy = path.with_stem(f"copy-{sync}")
    whole, step = step_of(sync, 2, 0)
    list(step.epoch(data))
    for after, resume, read in ((1, True, read_file), (2, True, read_file), (3, True, read_file),
                                (2, False, read_file), (3, True, without_rank_1)):
        network, step = step_of(sync, 2, 0)
        epoch = step.epoch(data)
        for _ in islice(epoch, after):
            pass
        save_checkpoint(path, network, step)
        if rank == 0:
            shutil.copy(path, copy)
        list(epoch)
        save_checkpoint(path, network, step)
        network, step = step_of(sync, 2, 1)
        with patch("ms_accum.checkpoint.checkpoint.read_file", read):
            load_checkpoint(copy, network, step)
        with warnings.catch_warnings():
            warnings.filterwarnings("error", "resume=True has skipped" if read is read_file else "$^")
            list(step.epoch(data, resume=resume))
        off.append(difference(values(network.trainable_params()), values(whole.trainable_params())))
    return off


def other_ranks(rank, sync):
    """Rank 0 saves as a single process, with a closed window and in the middle of one; then all ranks do."""
    ranks, said, data = get_group_size(), {}, microbatches(rank)
    for name, count in (("closed", 8), ("open", 3)):
        path = FOLDER / f"one-{sync}-{name}.safetensors"
        if rank == 0:
            network, step = step_of(None, 8, 0)
            for batch in dealt_out(ranks)[:count]:
                step(*batch)
            save_checkpoint(path, network, step)
        wait_for_all()
        network, step = step_of(sync, 8 // ranks, 1)
        said[name] = said_by(load_checkpoint, path, network, step)
        if name == "closed":
            said["place"] = said_by(list, step.epoch(data, resume=True))
            train(step, data[8 // ranks:])
            said["parameters"] = values(network.trainable_params())
    network, step = step_of(sync, 8 // ranks, 0)
    for i, batch in enumerate(data):
        step(*batch)
        if i + 1 == 8 // ranks:
            save_checkpoint(FOLDER / f"ranks-{sync}-closed.safetensors", network, step)
    save_checkpoint(FOLDER / f"ranks-{sync}-open.safetensors", network, step)
    return said


def noisy_data(rank, ranks):
    """Microbatches of one rank, with a noise scale of 2.5 of all ranks'; odd ones run out two microbatches early."""
    return noisy([4] * (16 - 2 * (rank % 2)), 2.5 * 4 * ranks, seed=rank)


def noise(rank, sync):
    """What is measured in windows of 3 microbatches."""
    network, noise_scale = Position("measured"), GradientNoiseScale(NOISE_DECAY)
    optimizer = nn.SGD(parameters_for([network.point], sync), NOISE_RATE)
    step = make_train_step(network, optimizer, 3, reducer=REDUCERS[sync], stages=(noise_scale,))
    for _ in step.epoch((Tensor(x),) for x in noisy_data(rank, get_group_size())):
        pass
    measured = [noise_scale.noise, noise_scale.gradient_squared, noise_scale.microbatch_weight]
    return {"counters": counters(step.accumulator), "measured": measured, "point": values([network.point])[0]}


def empty(rank, *each):
    """Three windows: with tokens on rank 1, on no rank, and on rank 0 alone, for which rank 1 flushes.

    What was counted, and how far the second window moved the parameters. `each`: with all pairs, not with three.
    """
    found = {}
    syncs, policies = ("window", "microbatch", "zero1"), ("apply", "skip_microbatch", "skip_window")
    for sync, policy in product(syncs, policies) if each else zip(syncs, policies):
        if (sync, policy) == ("zero1", "skip_microbatch"):
            continue
        network = MLP(seed=0)
        step = make_train_step(
            network_sum(network), weight_fn=first_is_set, loss_reduction="sum",
            **settings_of(network, partial(nn.Momentum, momentum=0.9), sync, None, 1, on_nonfinite=policy))
        moved, kinds = [], [rank, 0, 1][:3 - rank]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            for kind in kinds:
                before = values(network.trainable_params())
                step(np.full((2, 6), kind, np.float32))
                moved.append(difference(values(network.trainable_params()), before))
            step.flush()
        status = step.status()
        found[f"{sync} {policy}"] = [status.update_step, status.skipped, status.empty_windows, moved[1]]
    return found


def returned(rank, *syncs):
    """How far a run whose forward_fn returns its weight ends from one with a weight_fn, and from one of samples."""
    off = {}
    for sync in syncs:
        ended = []
        for kind in ("returned", "weight_fn", "samples"):
            network = MLP(seed=0)
            loss = network_sum(network)

            step = make_train_step(
                with_first(loss) if kind == "returned" else loss, accumulator(network, sync=sync, clip_norm=None),
                has_weight=kind == "returned", weight_fn=first_is_set if kind == "weight_fn" else None,
                loss_reduction="sum")
            for x, _ in microbatches(rank):
                step(x * (x[:, :1] > rank - 0.5))
            step.flush()
            ended.append(values(network.trainable_params()))
        off[sync] = [difference(ended[0], other) for other in ended[1:]]
    return off


def network_sum(network):
    def forward_fn(x):
        return (network(x) * x[:, :1]).sum()

    return forward_fn


def with_first(loss):
    def forward_fn(x):
        return loss(x), first_is_set(x)

    return forward_fn


def first_is_set(x):
    return (x[:, 0] != 0).sum()


def traffic(rank, sync):
    """16 microbatches, N = 8: collectives, their bytes, and what moved. With "window", rank 1 skips two."""
    network, sent, moved, all_reduce = MLP(seed=0), [], [], ops.AllReduce.__call__

    def counted(self, x):
        sent.append(x.nbytes)
        return all_reduce(self, x)

    step = make_train_step(mean_loss(network), nn.SGD(network.trainable_params(), 0.1), 8,
                           reducer=DataParallel(sync=sync), on_nonfinite="skip_microbatch")
    with patch.object(ops.AllReduce, "__call__", counted):
        for i, (x, y) in enumerate(microbatches(rank)[:4] * 4):
            before = values(network.trainable_params())
            if sync == "window" and rank == 1 and i % 8 == 3:
                step(x * np.float32(np.nan), y)
            step(x, y)
            moved.append([bool((p != q).any()) for p, q in zip(before, values(network.trainable_params()))])
    return {"collectives": len(sent), "bytes": sum(sent), "parameters": sum(p.nbytes for p in step.accumulator.weights),
            "moved": moved, "skipped": step.status().skipped}


def logged(rank, sync):
    """What WindowLog writes where ranks have uneven data, each loss, and what changing the learning rate says."""
    rows, losses, said, network = [], {}, [], MLP(seed=0)

    class Recorder(PerUpdate):
        def on_train_step_end(self, run_context):  # goes on, for rank 0 waits in flushes
            losses[run_context.original_args().cur_step_num] = float(run_context.original_args().net_outputs)
            said.append(said_by(super().on_train_step_end, run_context))

    reducer = replace(REDUCERS[sync], compare=False)  # ranks differ once the rate has changed
    cell = TrainOneStepCell(nn.WithLossCell(network, nn.CrossEntropyLoss()), nn.SGD(network.trainable_params(), 0.1), 2,
                            reducer=reducer)
    callbacks = [FlushCallback(), WindowLog(rows.append), Recorder(LearningRateScheduler(lambda rate, step: rate / 2))]
    data = GeneratorDataset(microbatches(rank, uneven=True), ["x", "y"], shuffle=False)
    Model(cell).train(1, data, callbacks, dataset_sink_mode=False)
    rows = [[row[name] for name in ("microbatch", "update_step", "loss", "weight")] for row in rows]
    return {"rows": rows, "losses": list(losses.values()), "said": said}


def refusals(rank):
    """What every rank says where they are not alike, and where they are."""
    def make(accumulate_step=2, seed=0, rate=0.1, features=6, made=nn.SGD, options=None, groups=None, slices=False,
             **given):
        """An accumulator, of an optimizer with `options`, and of a reducer with some of those that are given."""
        reducer = {name: given.pop(name) for name in (
            "sync", "broadcast", "ranks_per_node", "bucket_mib", "compare", "zero") if name in given}
        parameters = MLP(seed=seed, features=features).trainable_params()
        if slices:
            parameters = shard_parameters(parameters)
        if groups is not None:
            parameters = [{"params": parameters[:groups], "weight_decay": 0.1}, {"params": parameters[groups:]}]
        return Accumulator(made(parameters, rate, **options or {}), accumulate_step, reduction="mean",
                           reducer=DataParallel(**reducer), **given)

    def step(**options):
        network = MLP()
        return make_train_step(mean_loss(network), **settings_of(network, sync="window"), **options)

    def cell(**options):
        network = MLP()
        return TrainOneStepCell(nn.WithLossCell(network, nn.CrossEntropyLoss()), **settings_of(network, sync="window"),
                                **options)

    def cached(pieces):
        network = MLP()
        return make_grad_cache_step(network, ops.sum, pieces=pieces, **settings_of(network, sync="window"))

    def weight_fn(*batch):
        return 1.0

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        alone = said_by(Accumulator, nn.SGD(MLP().trainable_params(), 0.1), 2, reduction="sum")
    with patch.object(data_parallel, "get_local_rank_size", lambda: 1 + rank):
        started = said_by(make, sync="node")
    one, skip = rank == 1, "skip_window"
    own = nn.CosineDecayLR(0.01, 0.1, 20 - 8 * rank)  # from this rank's number of batches
    alike = {"options": {"momentum": 0.9}, "stages": (GradientNoiseScale(), Clamp(1.0)),
             "loss_scaler": amp.DynamicLossScaler(2, 2, 5), "groups": 1,
             "rate": nn.CosineDecayLR(0.01, 0.1, 20)}
    return {
        "alone": alone, "started": started,
        "alike": said_by(make, broadcast=False), "all alike": said_by(make, **alike),
        "accumulate_step": said_by(make, 2 + rank), "seed": said_by(make, seed=rank, broadcast=False),
        "nodes": said_by(make, sync="node", ranks_per_node=3),
        "hosts": said_by(make, sync="node", ranks_per_node=1 + rank),
        "compare": said_by(make, compare=one), "stage of ZeRO": said_by(make, zero=rank, slices=one),
        "stages of ZeRO": said_by(make, zero=1 + rank, slices=True), "slices": said_by(make, zero=1, slices=one),
        "rate alike": said_by(make, rate=Tensor(0.1) if one else 0.1),
        "bucket alike": said_by(make, bucket_mib=32.0 if one else 32),
        "shapes": said_by(make, features=6 + rank), "rate": said_by(make, rate=0.1 * (1 + rank)),
        "schedule": said_by(make, rate=own), "decay": said_by(make, options={"weight_decay": 0.1 * rank}),
        "decays": said_by(make, made=partial(nn.Momentum, momentum=0.9), options={"weight_decay": Decay(own)}),
        "groups": said_by(make, groups=1 + rank),
        "beta": said_by(make, made=nn.Adam, options={"beta1": 0.9 - 0.1 * rank}),
        "nesterov": said_by(make, options={"momentum": 0.9, "nesterov": one}),
        "class": said_by(make, made=nn.Adam if one else nn.SGD),
        "scale": said_by(make, loss_scaler=amp.StaticLossScaler(2 ** (rank + 1))),
        "scaler": said_by(make, loss_scaler=amp.StaticLossScaler(2) if one else None),
        "max_skips": said_by(make, on_nonfinite=skip, max_skips=rank),
        "buffer_dtype": said_by(make, buffer_dtype=ms.float16 if one else None),
        "stage": said_by(make, stages=(Clamp(1.0),) if one else ()),
        "limit": said_by(make, stages=(Clamp(1.0 + rank),)),
        "pieces": said_by(step, pieces=1 + rank), "weight_fn": said_by(step, weight_fn=weight_fn if one else None),
        "sums": said_by(step, loss_reduction="sum" if one else "mean", weight_fn=weight_fn),
        "aux": said_by(step, has_aux=one),
        "axis": said_by(step, batch_axis=rank), "cell": said_by(cell, batch_axis=rank),
        "kind": said_by(cell if one else step), "cached": said_by(cached, 1 + rank),
        "step alike": said_by(step, pieces=2, weight_fn=weight_fn), "cell alike": said_by(cell),
        "cached alike": said_by(cached, 2)}


class Decay(nn.Cell):
    """A weight decay of a user's own, by a schedule."""

    def __init__(self, schedule):
        super().__init__()
        self.schedule = schedule

    def construct(self, global_step):
        return self.schedule(global_step)


@ms.jit_class
class Clamp(Stage):
    """A stage of a user's own with a number."""

    def __init__(self, limit):
        self.limit = limit


def apart(rank):
    """What ranks say whose Parameters are equal, and of which one differs in one bit."""
    network = MLP(seed=0)
    half = Parameter(Tensor(np.ones(3), ms.bfloat16), name="half", requires_grad=False)
    named = {p.name: p for p in (*network.get_parameters(), half)}
    equal = said_by(require_equal, named)
    if rank == 1:
        network.second.weight.set_data(network.second.weight + 1e-7)
        half.set_data(half + 1)
    return equal, said_by(require_equal, named), said_by(require_equal, {"first": named["first.weight"]})


def stuck(rank, sync):
    """After how many windows a run stops whose second to fifth are NaN on rank 1."""
    network = MLP(seed=0)
    step = make_train_step(mean_loss(network), **settings_of(
        network, sync=sync, on_nonfinite="skip_window", max_skips=1))
    for i, (x, y) in enumerate(microbatches(rank)[:2] * 5):
        said = said_by(step, x * np.float32(np.nan if rank == 1 and i >= 2 else 1), y)
        if said != "accepted":
            return i // 2, said
    return None


def stuck_in_flush(rank):
    """What a rank says where rank 1 has no data left, and all later windows of rank 0 are NaN."""
    network = MLP(seed=0)
    step = make_train_step(mean_loss(network), **settings_of(
        network, sync="window", on_nonfinite="skip_window", max_skips=1))
    data = microbatches(rank)[:2] + [(x * np.float32(np.nan), y) for x, y in microbatches(rank)[:4]] * (1 - rank)
    return said_by(list, step.epoch(data))


def mnist(rank):
    """The updates that tutorials/mnist/train.py makes in FOLDER/mnist, and its accuracies."""
    return _mnist(FOLDER / "mnist")


def mnist_zero(rank):
    """The same with ZeRO, in FOLDER/mnist-zero."""
    return _mnist(FOLDER / "mnist-zero", "--zero", "1")


def _mnist(folder, *options):
    folder.mkdir(exist_ok=True)
    os.chdir(folder)
    with redirect_stdout(sys.stdout):  # rank 1 replaces its own
        history = run_here("mnist", *MNIST, *options)["history"]
    return history["loss"], history["accuracy"]


def zero_checkpoints(rank):
    return zero_cases.zero_checkpoints(rank, FOLDER)


def zero_own(rank):
    return zero_cases.zero_own(rank, FOLDER)


def selftest(rank):
    """Status and rows of `ms-accum selftest`: as it is, with sums that are halved, and wrong on rank 1."""

    def half(exchange):
        def halved(self, gradients, *others):
            gradients, numbers = exchange(self, gradients, *others)
            return tuple(g / 2 for g in gradients), numbers
        return halved

    def run(name, *rows):
        path = FOLDER / f"selftest-{name}.json"
        with redirect_stdout(sys.stdout):  # rank 1 replaces its own
            status = cli.main(["selftest", "--rows", ", ".join(rows), "--json", str(path)])
        found = json.loads(path.read_text(encoding="utf-8"))["rows"] if rank == 0 else []
        return status, [[row["check"], row["dtype"], row["result"], row["message"]] for row in found]

    scatter = Scatter.__call__
    found = {"whole": run("whole", "by hand, op by op", "float32"),
             "dtypes": run("dtypes", "2 ranks, zero 2", "by hand, op by op")}
    with patch.object(Buckets, "all_reduce", half(Buckets.all_reduce)), \
            patch.object(Scatter, "__call__", lambda self, flat: scatter(self, flat) / 2):
        found["half"] = run("half", "by hand, op by op", "float32")
    with patch.object(Window, "update_with", unnormalised if rank == 1 else Window.update_with):
        found["one"] = run("one", "token weights, means", "by hand, op by op", "float32")
    return found


_apply = Window.update_with


def unnormalised(self, window):
    window["weight"] = window["unit"]
    _apply(self, window)


def left_alone(rank):
    """What rank 0 says when rank 1 leaves its epoch early, and lives on for longer than MindSpore waits."""
    _, step = step_of("window", 2, 0)
    if rank == 0:
        return said_by(list, step.epoch(microbatches(rank)))
    next(step.epoch(microbatches(rank)))
    sleep(60)
    return "left"


def failing(rank):
    """Train until rank 1 raises an error. The last case, for no rank comes back from it."""
    acc = accumulator(MLP(seed=0), sync="window")
    for i in range(10**6):
        acc(acc.weights)
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
