"""What each rank of a test run does; started by msrun from test_distributed.py: `ranks.py FOLDER SCENARIO...`.

Each scenario leaves arrays; they end up in FOLDER/rank<r>.npz, named "<scenario>/<array>".
"""
import json
import os
import sys
from pathlib import Path
from time import perf_counter

import mindspore as ms
import numpy as np
from conftest import MLP, mean_loss, tensors, values
from mindspore import Tensor, amp, nn
from mindspore.communication import get_group_size, get_rank, init

from ms_accum import Accumulator, DataParallel, GradientNoiseScale, avoid_busy_waiting, load_checkpoint, make_train_step, save_checkpoint
from ms_accum.checkpoint import CheckpointError
from ms_accum.distributed.ranks import wait_for_all

N = 2
SYNCS = {
    "window": DataParallel(bucket_mib=1e-4),  # 100 bytes: three buckets for four parameters
    "microbatch": DataParallel(sync="microbatch"),
    "shard": DataParallel(sync="microbatch", shard=True, bucket_mib=1e-4),
}
OPTIMIZERS = {
    "SGD": lambda parameters: nn.SGD(parameters, 0.1),
    "Momentum": lambda parameters: nn.Momentum(parameters, 0.1, 0.9),
    "Adam": lambda parameters: nn.Adam(parameters, 0.01),
}
SIZES = {  # samples in the microbatches of rank r
    "equal": lambda r: [4] * 5,
    "unequal": lambda r: [3 + r, 4, 5 - r % 2, 2, 1 + r],
    "uneven": lambda r: [3 + r, 4, 2, 5, 3][:5 - 2 * (r % 2)],  # ranks 1 and 3 run out of data two microbatches early
}


def microbatches(sizes, rank):
    """[(x float64 (n, 6), y int (n,))] of a rank."""
    rng = np.random.default_rng(100 + rank)
    return [(rng.normal(size=(n, 6)), rng.integers(0, 3, n)) for n in SIZES[sizes](rank)]


def train(acc, train_step, batches):
    losses = [float(train_step(*tensors(x, y))) for x, y in batches]
    train_step.flush()
    return losses, [int(acc.update_step), int(acc.mini_step), int(acc.skipped)]


def matrix(rank, ranks, sync, sizes, optimizer, strategy="fused", clip_norm=0.5):
    """Train on this rank's part; each rank starts from weights of its own, which rank 0's replace."""
    network = MLP(seed=rank)
    acc = Accumulator(OPTIMIZERS[optimizer](network.trainable_params()), N, clip_norm, reduction="mean", reducer=SYNCS[sync])
    train_step = make_train_step(mean_loss(network), acc, strategy=strategy)
    losses, counters = train(acc, train_step, microbatches(sizes, rank))
    return {"losses": losses, "counters": counters, "grad_norm": float(acc.grad_norm), "buffers": sum(b.nbytes for b in acc.buffers),
            **{f"parameter{i}": value for i, value in enumerate(values(network.trainable_params()))}}


def summed(rank, ranks, sync):
    """reduction="sum", driven by hand."""
    network = MLP(seed=0)
    acc = Accumulator(nn.SGD(network.trainable_params(), 0.1), N, reducer=SYNCS[sync])
    forward_fn = mean_loss(network)

    def divided(x, y):
        return forward_fn(x, y) / N

    grad_fn = ms.value_and_grad(divided, None, acc.optimizer.parameters)

    @ms.jit
    def train_step(x, y):
        loss, grads = grad_fn(x, y)
        return loss, acc(grads)

    for x, y in microbatches("equal", rank):
        train_step(*tensors(x, y))
    acc.flush()
    return {f"parameter{i}": value for i, value in enumerate(values(network.trainable_params()))}


def article(rank, ranks):
    """Rank r takes the rows r::2 of the published 8 x 8 numbers; no division, as DDP averages."""
    rows = np.array(json.loads((Path(__file__).parent / "article_rand8x8.json").read_text(encoding="utf-8"))["rows"], np.float32)
    network = nn.Dense(8, 1, weight_init="ones", has_bias=False)
    acc = Accumulator(nn.SGD(network.trainable_params(), 0.01, 0.9), 1, reducer=DataParallel())
    return {"weights": train_article(network, acc, [rows[rank::ranks]])}


def train_article(network, acc, microbatches, divisor=1):
    """2 epochs; loss: the sum of the outputs, divided."""
    def forward_fn(x):
        return network(x).sum() / divisor

    grad_fn = ms.value_and_grad(forward_fn, None, acc.optimizer.parameters)

    @ms.jit
    def train_step(x):
        loss, grads = grad_fn(x)
        return loss, acc(grads)

    for _ in range(2):
        for x in microbatches:
            train_step(Tensor(x))
    return network.weight.asnumpy().reshape(-1)


def unchanged_between_boundaries(rank, ranks):
    """Colossal-AI's check: the first ten elements after each of 8 microbatches, N = 4."""
    network = MLP(seed=0)
    acc = Accumulator(nn.SGD(network.trainable_params(), 0.1), 4, reduction="mean", reducer=DataParallel())
    train_step = make_train_step(mean_loss(network), acc)
    seen = [network.first.weight.asnumpy().reshape(-1)[:10].copy()]
    for x, y in microbatches("equal", rank) + microbatches("unequal", rank)[:3]:
        train_step(*tensors(x, y))
        seen.append(network.first.weight.asnumpy().reshape(-1)[:10].copy())
    return {"seen": np.array(seen)}


def nonfinite(rank, ranks, sync, on_nonfinite):
    """One rank's second microbatch holds a NaN."""
    network = MLP(seed=0)
    acc = Accumulator(nn.SGD(network.trainable_params(), 0.1), N, 0.5, reduction="mean", on_nonfinite=on_nonfinite, reducer=SYNCS[sync])
    train_step = make_train_step(mean_loss(network), acc)
    batches = [(x.copy(), y) for x, y in microbatches("uneven", rank)]
    if rank == 1:
        batches[1][0][0, 0] = np.nan
    _, counters = train(acc, train_step, batches)
    return {"counters": counters, **{f"parameter{i}": value for i, value in enumerate(values(network.trainable_params()))}}


def overflow(rank, ranks):
    """A loss scaler, and an overflow on one rank: the same scale on all of them afterwards."""
    network = MLP(seed=0)
    acc = Accumulator(nn.SGD(network.trainable_params(), 0.1), N, reduction="mean", reducer=DataParallel())
    scaler = amp.DynamicLossScaler(1024, 2, 1000)
    train_step = make_train_step(mean_loss(network), acc, loss_scaler=scaler)
    batches = [(x.copy(), y) for x, y in microbatches("equal", rank)]
    if rank == 0:
        batches[0][0][0, 0] = np.inf
    _, counters = train(acc, train_step, batches)
    return {"scale": float(scaler.scale_value), "counters": counters, "finite": np.isfinite(network.first.weight.asnumpy()).all()}


def traffic(rank, ranks, sync, accumulate_step=8):
    """Collectives and bytes of 16 microbatches, counted op by op."""
    network = MLP(seed=0)
    acc = Accumulator(nn.SGD(network.trainable_params(), 0.1), accumulate_step, reduction="mean", reducer=DataParallel(sync=sync))
    buckets = acc.reducer.buckets
    sent = []
    all_reduce = buckets.sum

    def counted(x):
        sent.append(x.nbytes)
        return all_reduce(x)

    buckets.sum = counted
    train_step = make_train_step(mean_loss(network), acc)
    jit, os.environ["MS_JIT"] = os.environ.get("MS_JIT", "1"), "0"
    try:
        for x, y in microbatches("equal", rank)[:4] * 4:
            train_step(*tensors(x, y))
    finally:
        os.environ["MS_JIT"] = jit
    return {"collectives": len(sent), "bytes": sum(sent), "parameters": sum(p.nbytes for p in network.trainable_params())}


def refusals(rank, ranks):
    """What every rank says where they are not alike."""
    said = []
    for accumulate_step, seed, reducer in ((2 + rank, 0, DataParallel()), (2, rank, DataParallel(broadcast=False)),
                                           (2, 0, DataParallel(broadcast=False))):
        network = MLP(hidden=5, seed=seed)
        try:
            Accumulator(nn.SGD(network.trainable_params(), 0.1), accumulate_step, reduction="mean", reducer=reducer)
            said.append("accepted")
        except ValueError as error:
            said.append(str(error))
    try:
        Accumulator(nn.SGD(MLP().trainable_params(), 0.1 * (1 + rank)), 2, reducer=DataParallel())
    except ValueError as error:
        said.append(str(error))
    acc = Accumulator(nn.SGD(MLP().trainable_params(), 0.1), 2, reduction="mean", reducer=DataParallel(sync="microbatch"))
    try:
        acc.unscale_by(amp.StaticLossScaler(2 ** (rank + 1)))
    except ValueError as error:
        said.append(str(error))
    try:
        make_train_step(mean_loss(MLP()), acc, micro_size=2)
    except ValueError as error:
        said.append(str(error))
    return {"said": np.array(said)}


def compiled_before(rank, ranks):
    """A graph that was compiled before rank 0's values arrive follows them."""
    network = MLP(seed=rank)
    x = Tensor(np.ones((1, 6)), ms.float32)

    @ms.jit
    def evaluate(x):
        return network(x)

    evaluate(x)
    Accumulator(nn.SGD(network.trainable_params(), 0.1), 1, reducer=DataParallel())
    return {"seen": evaluate(x).asnumpy(), "expected": MLP(seed=0)(x).asnumpy()}


def weight_zero(rank, ranks, sync):
    """Rank 1's first microbatch is NaN and of weight 0, a number."""
    network = MLP(seed=0)
    acc = Accumulator(nn.SGD(network.trainable_params(), 0.1), 2, reduction="mean", reducer=SYNCS[sync])
    for value, weight in ((float("nan") if rank else 1.0, 0 if rank else 1.0), (1.0, 1.0)):
        acc(tuple([p * 0 + value for p in acc.optimizer.parameters]), weight)
    return {f"parameter{i}": value for i, value in enumerate(values(network.trainable_params()))}


def resume(rank, ranks, sync, suffix):
    """Saved in mid-window, twice; continued, and resumed by others; then with rank 1's file damaged."""
    path = FOLDER / f"resume-{sync}.{suffix}"

    def build(seed):
        network = MLP(seed=seed)
        acc = Accumulator(nn.Momentum(network.trainable_params(), 0.1, 0.9), N, 0.5, reduction="mean", reducer=SYNCS[sync])
        return network, acc, make_train_step(mean_loss(network), acc)

    def state():
        return [p.asnumpy().tobytes() for p in (*network.get_parameters(), *acc.optimizer.get_parameters(), *acc.parameters)]

    batches = microbatches("unequal", rank)
    network, acc, train_step = build(0)
    train_step(*tensors(*batches[0]))
    save_checkpoint(path, network, acc, extra="first")
    for x, y in batches[1:3]:
        train_step(*tensors(x, y))
    save_checkpoint(path, network, acc, extra={"rank": rank})
    mini_step = int(acc.mini_step)
    train(acc, train_step, batches[3:])
    uninterrupted = state()

    network, acc, train_step = build(1)
    extra = load_checkpoint(path, network, acc)
    train(acc, train_step, batches[3:])
    same = state() == uninterrupted

    refused = "accepted"
    try:
        save_checkpoint(path, network, acc, extra=(1,) if rank == 1 else [1])
    except (TypeError, OSError) as error:
        refused = type(error).__name__
    wait_for_all()
    files = len(list(path.parent.glob(f"*{path.stem}.*")))

    said = "accepted"
    if rank == 1:
        mine, = path.parent.glob(f"{path.stem}.rank1of*")
        mine.write_bytes(mine.read_bytes()[:-1])
    before = state()
    try:
        load_checkpoint(path, network, acc)
    except CheckpointError as error:
        said = str(error)
    return {"mini_step": mini_step, "extra": json.dumps(extra), "same": same, "said": said, "untouched": state() == before,
            "refused": refused, "files": files}


def noise(rank, ranks, sync, on_nonfinite="apply"):
    """The noise scale of gradients that stay where they are; one rank runs out of data early."""
    network = MLP(seed=0)
    acc = Accumulator(nn.SGD(network.trainable_params(), 1e-30), N, reduction="mean", on_nonfinite=on_nonfinite, reducer=SYNCS[sync],
                      noise_scale=GradientNoiseScale(decay=0.9))
    train(acc, make_train_step(mean_loss(network), acc), microbatches("uneven", rank))
    return {"found": [acc.noise_scale.noise, acc.noise_scale.gradient_squared]}


SCENARIOS = {function.__name__: function for function in (
    matrix, summed, article, unchanged_between_boundaries, nonfinite, overflow, traffic, refusals, compiled_before, weight_zero, resume,
    noise)}


def main(*scenarios):
    avoid_busy_waiting()
    ms.set_device("CPU")
    init()
    rank, ranks = get_rank(), get_group_size()
    arrays = {}
    for scenario in scenarios:
        name, *arguments = scenario.split(":")
        mode = arguments.pop() if arguments and arguments[-1] in ("graph", "pynative") else "jit"
        os.environ["MS_JIT"] = "0" if mode == "pynative" else "1"
        ms.set_context(mode=ms.GRAPH_MODE if mode == "graph" else ms.PYNATIVE_MODE)
        start = perf_counter()
        for key, value in SCENARIOS[name](rank, ranks, *arguments).items():
            arrays[f"{scenario}/{key}"] = np.array(value)
        print(f"rank {rank}: {scenario}  {perf_counter() - start:.1f} s", flush=True)
    np.savez(FOLDER / f"rank{rank}.npz", **arrays)
    wait_for_all()


if __name__ == "__main__":
    FOLDER = Path(sys.argv[1])
    main(*sys.argv[2:])
