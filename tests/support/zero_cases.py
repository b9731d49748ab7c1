"""What each rank does in the tests of ZeRO: the same small runs with each reducer, as the difference from `zero=0`.

The functions are cases of `rank_cases.py`.
"""
import os
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from unittest.mock import patch

import mindspore as ms
import numpy as np
from mindspore import Parameter, ParameterTuple, Tensor, amp, nn, ops
from mindspore.dataset import GeneratorDataset
from mindspore.train import Model

from ms_accum import (
    Accumulator,
    DataParallel,
    Stage,
    TrainOneStepCell,
    check_equivalence,
    load_checkpoint,
    make_train_step,
    save_checkpoint,
)
from ms_accum import shard_parameters as sharded
from ms_accum.distributed.ranks import gather
from ms_accum.distributed.tags import wait_for_all
from ms_accum.distributed.zero import Scatter, Zero
from ms_accum.model.callbacks import FlushCallback
from ms_accum.selftest.networks import MLP, batches, mean_loss
from support.differential.cases import plain_case
from support.differential.optimizers import COMPILED_ONLY, OPTIMIZERS, build_optimizer
from support.modes import recorded_warnings

SMALL = 8e-5  # mebibytes: several buckets
REDUCERS = {"zero=0": DataParallel(bucket_mib=SMALL), "zero=1": DataParallel(zero=1, bucket_mib=SMALL),
            "microbatch": DataParallel(sync="microbatch", bucket_mib=SMALL),
            "zero=2": DataParallel(zero=2, bucket_mib=SMALL)}
OWN = {name: replace(reducer, elementwise=True) for name, reducer in REDUCERS.items()}  # for users' optimizers
PLAIN = {"zero=1": "zero=0", "zero=2": "microbatch"}  # what sums in the same order
WHOLE = ("nn.AdaFactor",)  # looks at whole parameters
CE = nn.CrossEntropyLoss()


class Tied(nn.Cell):
    """A network that uses one Parameter twice, and has a scalar, a vector of one element and a frozen Parameter."""

    def __init__(self, seed):
        super().__init__()
        rng = np.random.default_rng(seed)
        self.table = Parameter(Tensor(rng.normal(size=(6, 5)), ms.float32), name="table")
        self.frozen = Parameter(Tensor(np.full(3, 2.0), ms.float32), name="frozen", requires_grad=False)
        self.scale = Parameter(Tensor(1.5, ms.float32), name="scale")
        self.bias = Parameter(Tensor([0.5], ms.float32), name="bias")
        self.out = nn.Dense(6, 3, weight_init=Tensor(rng.normal(size=(3, 6)), ms.float32), bias_init="zeros")

    def construct(self, x):
        hidden = ops.tanh(ops.matmul(x, self.table) * self.scale + self.bias)
        return self.out(ops.matmul(hidden, self.table.T)) * self.frozen


class Half(nn.Cell):
    """A network of float16 Parameters."""

    def __init__(self, seed):
        super().__init__()
        rng = np.random.default_rng(seed)
        self.first, self.second = nn.Dense(6, 5, dtype=ms.float16), nn.Dense(5, 3, dtype=ms.float16)
        for parameter in self.trainable_params():
            parameter.set_data(Tensor(rng.normal(0, 0.5, parameter.shape), ms.float16))

    def construct(self, x):
        return self.second(ops.tanh(self.first(x.astype(ms.float16)))).astype(ms.float32)


def data(rank, sizes=(4, 4, 3, 5, 4, 4, 2, 4), nan_at=None):
    """Microbatches of a rank: x float32 (n, 6), y int32 (n,), mask float32 (n,)."""
    sizes = [size + rank % 2 for size in sizes]
    made = []
    for i, (x, y) in enumerate(batches(sizes, seed=100 + rank)):
        x = x.astype(np.float32)
        if i == nan_at and rank == 0:
            x[0, 0] = np.nan
        made.append((x, y.astype(np.int32), (np.arange(len(x)) % 3 < 2).astype(np.float32)))
    return made


def losses_of(network):
    """The losses by name, each with the options of its train step."""
    def mean(x, y, mask):
        return CE(network(x), y)

    def masked(x, y, mask):
        return (ops.cross_entropy(network(x), y, reduction="none") * mask).sum() / mask.sum()

    def tokens(x, y, mask):
        return (ops.cross_entropy(network(x), y, reduction="none") * mask).sum()

    def weight(x, y, mask):
        return mask.sum()

    return {"mean": (mean, {}), "masked": (masked, {"weight_fn": weight}),
            "sum": (tokens, {"weight_fn": weight, "loss_reduction": "sum"})}


def groups_of(parameters, sharding):
    """Groups with weight decay, and one with a learning rate of its own."""
    matrices, others = ([p for p in parameters if (p.ndim > 1) == wanted] for wanted in (True, False))
    return sharding([{"params": others, "lr": 0.02}, {"params": matrices, "weight_decay": 0.1},
                     {"order_params": parameters}])


def trained(rank, zero, network=MLP, loss="mean", groups=False, change=False,
            dataset=None, optimizer=None, finish=True, accumulate_step=2, reducers=REDUCERS, **options):
    """Train with a reducer. Return the network and the train step."""
    sharding = list if zero in PLAIN.values() else sharded
    net = network(seed=rank)  # rank 0's values replace them
    parameters = net.trainable_params()
    if optimizer is not None:
        made = optimizer(parameters, sharding)
    elif groups:
        made = nn.AdamWeightDecay(groups_of(parameters, sharding), nn.exponential_decay_lr(0.05, 0.8, 100, 1, 1),
                                  eps=0.1)
    else:
        made = nn.Momentum(sharding(parameters), 0.05, 0.9)
    function, more = losses_of(net)[loss]
    step = make_train_step(function, made, accumulate_step, reducer=reducers[zero], **more, **options)
    dataset = data(rank) if dataset is None else dataset
    for i, _ in enumerate(step.epoch(dataset) if finish else (step(*batch) for batch in dataset)):
        if change and i == 3:  # between two updates: what the user writes is respected
            ops.assign(parameters[0], parameters[0] * 0.5)
    return net, step


RUNS = {
    "plain": {}, "groups": {"groups": True}, "clipped": {"clip_norm": 0.05, "groups": True},
    "masked": {"loss": "masked"}, "sum": {"loss": "sum"}, "pieces": {"pieces": 2},
    "long_window": {"accumulate_step": 3},
    "windows_of_one": {"accumulate_step": 1}, "changed": {"change": True},
    "tied": {"network": Tied, "clip_norm": 0.5}, "skip_window": {"on_nonfinite": "skip_window", "nan": 3},
    "skip_microbatch": {"on_nonfinite": "skip_microbatch", "nan": 3}, "scaler": {"scaler": True, "nan": 3},
    "half": {"network": Half, "clip_norm": 0.5},
}


def run(rank, zero, nan=None, scaler=False, **settings):
    """What one of `RUNS` ends with: arrays, and what is counted."""
    if scaler:
        settings["loss_scaler"] = amp.DynamicLossScaler(2**8, 2, 2)
    net, step = trained(rank, zero, dataset=data(rank, nan_at=nan), **settings)
    arrays = [p.asnumpy().copy() for p in net.trainable_params()]
    acc = step.accumulator
    counts = [int(acc.update_step), int(acc.skipped), int(acc.seen), int(acc.closed_windows)]
    return arrays, counts, float(acc.grad_norm)


def distance(one, other):
    """Largest difference of arrays, relative to the largest value of each."""
    return max(float(np.abs(a - b).max() / (np.abs(b).max() or 1)) for a, b in zip(one, other))


def zero_runs(rank, name):
    """How far ZeRO ends from the same exchange without it, and how far that moved; what is counted."""
    found, settings = {}, RUNS[name]
    for zero in ("zero=1", "zero=2"):
        base, counts, norm = run(rank, PLAIN[zero], **settings)
        start = [p.asnumpy() for p in settings.get("network", MLP)(seed=0).trainable_params()]
        arrays, other, other_norm = run(rank, zero, **settings)
        same = gather(np.concatenate([a.ravel() for a in arrays]).astype(np.float32))
        found[zero] = {"moved": distance(base[:len(start)], start), "off": distance(arrays, base),
                       "alike": bool((same == same[0]).all()), "counts": [counts, other],
                       "norms": [norm, other_norm] if "clip_norm" in settings else [0, 0]}
    return found


def optimizer_of(name, groups):
    case = plain_case("step", optimizer=name, groups=groups)
    return lambda parameters, sharding: build_optimizer(case, parameters, sharding)


def zero_optimizers(rank):
    """Every elementwise optimizer: as `zero_runs`, and how many elements it holds of how many. Compiled, stage 1."""
    found = {}
    compiled = os.environ["MS_JIT"] != "0"
    for name in OPTIMIZERS:
        if name in WHOLE or (name in COMPILED_ONLY and not compiled):
            continue
        options = {"optimizer": optimizer_of(name, name != "nn.FTRL"), "dataset": data(rank, (4, 3, 4, 4))}
        found[name] = {}
        for zero, plain in list(PLAIN.items())[:1 if compiled else 2]:
            base = values_of(trained(rank, plain, **options)[0])
            net, step = trained(rank, zero, **options)
            found[name][zero] = {"moved": distance(base, values_of(MLP(seed=0))), "off": distance(values_of(net), base)}
            found[name]["held"] = [sum(p.size for p in step.accumulator.optimizer.parameters),
                                   sum(p.size for p in net.trainable_params())]
    return found


def values_of(network):
    return [p.asnumpy().copy() for p in network.trainable_params()]


def zero_defects(rank):
    """Negative controls: how far ZeRO ends from the same exchange without it, with a defect."""
    found = {}
    for zero, plain in PLAIN.items():
        base = run(rank, plain, clip_norm=0.05, change=True)[0]
        for name, patched in DEFECTS.items():
            with patched():
                found[f"{name}, {zero}"] = distance(run(rank, zero, clip_norm=0.05, change=True)[0], base)
    return found


def _stale():
    """The last parameter keeps what it was."""
    whole = Zero.gather_parameters

    def gather_parameters(self):
        kept = self.weights[-1] + 0.0
        whole(self)
        ops.assign(self.weights[-1], kept)
    return patch.object(Zero, "gather_parameters", gather_parameters)


def _alone():
    def over_slices(self, number):
        return number
    return patch.object(Zero, "over_slices", over_slices)


def _uncut():
    def cut_parameters(self):
        pass
    return patch.object(Zero, "cut_parameters", cut_parameters)


def _exchanged_rows():
    """Each rank keeps the other's part of the sum."""
    keep = Scatter.__init__

    def start(self, group, place, parts):
        keep(self, group, parts - 1 - place, parts)
    return patch.object(Scatter, "__init__", start)


DEFECTS = {"none": nullcontext, "a slice is not gathered": _stale, "a norm of one slice": _alone,
           "parameters are not cut": _uncut, "rows of another rank": _exchanged_rows}


def zero_model(rank):
    """How far `Model.train` ends from zero=0, how far that moved, and what the check says of a network with slices."""
    network, found = MLP(seed=0), {}
    start = values_of(network)
    for zero, plain in PLAIN.items():
        ends = []
        for name, sharding in ((plain, list), (zero, sharded)):
            network = MLP(seed=0)
            optimizer = nn.AdamWeightDecay(sharding(network.trainable_params()), 0.05)
            cell = TrainOneStepCell(nn.WithLossCell(network, CE), optimizer, 2, clip_norm=0.5, reducer=REDUCERS[name])
            dataset = GeneratorDataset([batch[:2] for batch in data(rank)[:5]], ["x", "y"], shuffle=False)
            Model(cell).train(2, dataset, [FlushCallback()], dataset_sink_mode=False)
            ends.append(values_of(network))
        x, y = map(Tensor, data(rank)[0][:2])
        report = check_equivalence(mean_loss(network), network, (x, y), 2)
        found[zero] = {"moved": distance(ends[0], start), "off": distance(ends[1], ends[0]), "ok": report.ok}
    return found


# --- what is refused --------------------------------------------------------------------------------------------------


class Sign(nn.Optimizer):
    """An elementwise optimizer of a user, with state."""

    def __init__(self, parameters, rate):
        super().__init__(rate, parameters)
        self.slots = self.parameters.clone(prefix="slots", init="zeros")

    def construct(self, gradients):
        rate = self.get_lr()
        for i in range(len(gradients)):
            ops.assign_add(self.slots[i], gradients[i])
            ops.assign_sub(self.parameters[i], rate * ops.tanh(self.slots[i]))
        return True


class Measuring(Stage):
    """A stage that looks at a window's gradients."""

    def accepts(self, gradients, sums):
        return gradients[0].max() < 1


def said_by(function, *arguments, **keywords):
    """What a refusal says."""
    try:
        function(*arguments, **keywords)
    except (TypeError, ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "accepted"


def warned_of(rank):
    """What is said where each node has one rank."""
    optimizer = nn.SGD(sharded(MLP(seed=0).trainable_params()), 0.1)
    with recorded_warnings() as said:
        Accumulator(optimizer, 2, reduction="sum", reducer=DataParallel(sync="node", zero=2, ranks_per_node=1))
    return "; ".join(str(warning.message) for warning in said)


def zero_refusals(rank):
    """What every rank says to what does not fit together."""
    def make(optimizer=nn.SGD, sharding=sharded, reducer=REDUCERS["zero=1"], **options):
        parameters = sharding(MLP(seed=0).trainable_params())
        return Accumulator(optimizer(parameters, 0.1), 2, reduction="mean", reducer=reducer, **options)

    def some(parameters):
        return [*sharded(parameters[:1]), *parameters[1:]]

    def centralized(parameters, rate):
        return nn.Adam([{"params": list(parameters), "grad_centralization": True}], rate)

    def factored(parameters, rate):
        return nn.AdaFactor(parameters, rate, scale_parameter=False, relative_step=False)

    whole, twice = MLP(seed=0).trainable_params(), sharded(MLP(seed=0).trainable_params())
    return {"whole": said_by(make, sharding=list), "no zero": said_by(make, reducer=DataParallel()),
            "no reducer": said_by(make, reducer=None), "some": said_by(make, sharding=some),
            "Lamb": said_by(make, nn.Lamb), "AdaFactor": said_by(make, factored),
            "LARS": said_by(make, lambda parameters, rate: nn.LARS(nn.Momentum(parameters, rate, 0.9))),
            "centralized": said_by(make, centralized), "own": said_by(make, Sign), "one in a node": warned_of(rank),
            "stage": said_by(make, stages=(Measuring(),)), "twice": said_by(sharded, twice),
            "float": said_by(sharded, [1.0]), "whole gradients": said_by(make(), tuple(sharded(whole))),
            "accepted": said_by(make, Sign, reducer=OWN["zero=1"])}


# --- checkpoints and interrupts ---------------------------------------------------------------------------------------


def zero_checkpoints(rank, folder):
    """Save at a closed window with one reducer, and go on with another: the distance from an uninterrupted run."""
    found, order = {}, ["zero=0", "zero=1", "zero=2"]
    dataset = data(rank)
    for saved in order:
        for going_on in order:
            path = folder / f"zero-{order.index(saved)}{order.index(going_on)}.safetensors"
            net, step = trained(rank, saved, groups=True, dataset=dataset[:4])
            save_checkpoint(path, net, step, extra=1)
            other, resumed = trained(1 + rank, going_on, groups=True, dataset=dataset[:1], finish=False)
            load_checkpoint(path, other, resumed)
            for batch in dataset[4:]:
                step(*batch)
                resumed(*batch)
            found[f"{saved} to {going_on}"] = distance(values_of(other), values_of(net))
            if rank == 0:
                names = ms.load_checkpoint(str(path), format="safetensors")
                found[f"entries of {saved}"] = sorted(f"{name} {tuple(p.shape)}" for name, p in names.items()
                                                      if name != "ms_accum" and not name.startswith("rank1:"))
    return found


class Warmed(nn.Cell):
    """A user's optimizer: momentum in a list, and two counters by which its rate changes."""

    def __init__(self, parameters):
        super().__init__(auto_prefix=False)
        hold(self, parameters)

    def construct(self, gradients):
        return warmed(self, gradients)


class Bare:
    """The same, but no Cell."""

    def __init__(self, parameters):
        hold(self, parameters)

    def __call__(self, gradients):
        return warmed(self, gradients)


def hold(optimizer, parameters):
    optimizer.parameters = ParameterTuple(parameters)
    optimizer.slots = [Parameter(ops.zeros_like(p), name=f"slot{i}") for i, p in enumerate(parameters)]
    optimizer.count, optimizer.calls = Parameter(Tensor(0.0), name="count"), 0


def warmed(optimizer, gradients):
    rate = 0.05 / (1 + optimizer.count + optimizer.calls)
    for parameter, slot, gradient in zip(optimizer.parameters, optimizer.slots, gradients):
        ops.assign(slot, 0.9 * slot + gradient)
        ops.assign_sub(parameter, rate * slot)
    ops.assign_add(optimizer.count, 1.0)
    optimizer.calls += 1
    return True


class Hidden(nn.Optimizer):
    """One of whose state nothing can be found by name or place."""

    def __init__(self, parameters, rate):
        super().__init__(rate, parameters)
        self.first = [Parameter(ops.zeros_like(p), name=f"first{i}") for i, p in enumerate(parameters[:1])]
        self.others = [Parameter(ops.zeros_like(p), name=f"other{i}") for i, p in enumerate(parameters[1:])]

    def construct(self, gradients):
        for parameter, slot, gradient in zip(self.parameters, [*self.first, *self.others], gradients):
            ops.assign_add(slot, gradient)
            ops.assign_sub(parameter, 0.1 * ops.tanh(slot))
        return True


def zero_own(rank, folder):
    """A user's optimizers: how far from zero=0, how far that moved, through a checkpoint; what one is told that hides.

    Op by op.
    """
    found, path = {}, folder / "own.safetensors"
    options, bare = ({"optimizer": lambda parameters, sharding, kind=kind: kind(sharding(parameters)), "reducers": OWN}
                     for kind in (Warmed, Bare))
    whole, _ = trained(rank, "zero=0", **options)
    bare, _ = trained(rank, "zero=1", **bare)
    found["no cell"] = {"off": distance(values_of(bare), values_of(whole)),
                        "moved": distance(values_of(whole), values_of(MLP(seed=0)))}
    for zero in ("zero=1", "zero=2"):
        net, step = trained(rank, zero, **options, dataset=data(rank)[:4], finish=False)
        save_checkpoint(path, net, step)
        net, step = trained(1 + rank, "zero=2" if zero == "zero=1" else "zero=1", **options, dataset=[],
                               finish=False)
        load_checkpoint(path, net, step)
        step.accumulator.optimizer.calls = 2  # a plain number is not in a file
        for batch in data(rank)[4:]:
            step(*batch)
        found[zero] = {"off": distance(values_of(net), values_of(whole)),
                       "moved": distance(values_of(whole), values_of(MLP(seed=0)))}
    hides = {"optimizer": lambda parameters, sharding: Hidden(sharding(parameters), 0.1), "reducers": OWN}
    net, step = trained(rank, "zero=1", **hides, dataset=data(rank)[:2], finish=False)
    return {**found, "hidden": said_by(save_checkpoint, path, net, step)}


def zero_interrupted(rank):
    """What the next microbatch says after the gather of an update was interrupted."""
    @contextmanager
    def failing():
        def gather_parameters(self):
            raise KeyboardInterrupt
        with patch.object(Zero, "gather_parameters", gather_parameters):
            yield

    _, step = trained(rank, "zero=1", dataset=data(rank)[:3], finish=False)
    with failing():
        try:
            step(*data(rank)[3])
            return "not interrupted"
        except KeyboardInterrupt:
            pass
    said = said_by(step, *data(rank)[4])
    wait_for_all()
    return said
