"""Programs of ranks, drawn at random, legal or not.

Each rank runs its own list of calls: epochs over different numbers of batches, some left early, single calls, flushes,
saves, evaluations, for two train steps. A draw ends in one of two ways: no rank raises an error, and all hold what
plain MindSpore computes from the batches of all ranks, op by op; or every rank raises an error.
"""
import random
from itertools import islice
from typing import NamedTuple

import mindspore as ms
import numpy as np
from mindspore import Tensor, amp, nn, ops

from ms_accum import DataParallel, RanksDiffer, make_train_step, shard_parameters, until_weight
from ms_accum.distributed import meeting
from ms_accum.distributed.exchange import SAVE

FEATURES, BUDGET, END = 3, 4, 99
SMALL = 3e-5  # mebibytes, 31 bytes: several buckets
KINDS = {"window": {}, "microbatch": {"sync": "microbatch"}, "zero1": {"zero": 1}, "zero2": {"zero": 2}}
NODES = {"node": {"sync": "node", "ranks_per_node": 2}, "node-zero2": {"sync": "node", "ranks_per_node": 2, "zero": 2}}
ALONE = {"sync": "node", "ranks_per_node": 1}  # on two ranks


class Draw(NamedTuple):
    """What is trained: options, the calls of each rank, and whether all make the same."""

    kind: str
    length: object
    tokens: bool
    is_sum: bool
    clip_norm: object
    adam: bool
    bucket_mib: float
    drops: str  # on_nonfinite, or "scaler"
    pieces: int
    compiled: bool
    programs: list
    is_legal: bool
    min_weight: object

    @property
    def reducer(self):
        return DataParallel(bucket_mib=self.bucket_mib, **(KINDS | NODES | {"alone": ALONE})[self.kind])


def drawn(number, ranks, kind=None):
    """A call is `(name, which step, batches)`; a batch `(samples, seed, whether it holds NaN)`."""
    rng, compiled = random.Random(number), number % 6 == 5
    kind = kind or rng.choice([*KINDS, *NODES] if ranks == 4 else [*KINDS, "alone"])
    length = rng.choice((1, 2, 3, {0: 1, 2: 3}, *["budget"] * (kind in ("window", "zero1"))))
    drops = rng.choice(("apply", "apply", "skip_microbatch", "skip_window", "scaler"))

    def batches(least):
        sizes = (2, 3) if compiled else (1, 2, 3, 4)
        return [(rng.choice(sizes), rng.randrange(10**6), drops != "apply" and rng.random() < 0.15)
                for _ in range(rng.randint(least, 5))]

    steps = 2 - compiled
    names = [rng.choice(("epoch", "epoch", "left", "calls", "flush", "save", "evaluate"))
             for _ in range(rng.randint(1, 3 - compiled))]
    which = [rng.randrange(steps) for _ in names]
    programs = [[(name, step, batches(name in ("calls", "left", "evaluate"))) for name, step in zip(names, which)]
                for _ in range(ranks)]
    is_legal = rng.random() < 0.6
    if not is_legal:
        own = rng.choice(programs)
        place = rng.randrange(len(own) + 1)
        change = rng.choice(("insert", "insert", "remove", "which", "parameter", "rate"))
        if change == "insert":
            name = rng.choice(("epoch", "flush", "save", "evaluate", "raise"))
            own.insert(place, (name, rng.randrange(steps), batches(1)))
        elif change in ("parameter", "rate"):
            own.insert(place, (change, rng.randrange(steps), []))
            for program in programs:
                program += [("flush", step, []) for step in range(steps)]
        elif change == "remove":
            own.pop(place - 1)
        else:
            name, step, of_call = own[place - 1]
            own[place - 1] = name, steps - 1 - step, of_call
    return Draw(kind, length, rng.random() < 0.5, rng.random() < 0.3, rng.choice((None, 0.3)), rng.random() < 0.5,
                rng.choice((SMALL, 32)), drops, rng.choice((1, 1, 2)), compiled, programs, is_legal,
                rng.choice((None, None, 7.0)))


def batch_of(batch):
    samples, seed, is_nan = batch
    rng = np.random.default_rng(seed)
    x, mask = rng.normal(size=(samples, FEATURES)).astype("f"), (rng.random(samples) < 0.6).astype("f")
    mask[0] = 1
    return np.full_like(x, np.nan) if is_nan else x, rng.integers(0, 2, samples).astype("i"), mask


def network_of(seed):
    network, rng = nn.SequentialCell(nn.Dense(FEATURES, 4), nn.Tanh(), nn.Dense(4, 2)), np.random.default_rng(seed)
    for parameter in network.trainable_params():
        ops.assign(parameter, Tensor(rng.normal(size=parameter.shape).astype("f") / 2))
    return network


def forward_of(network, draw, is_sum):
    losses = nn.CrossEntropyLoss(reduction="none")

    def forward(x, label, mask):
        loss = losses(network(x), label)
        loss = loss * mask if draw.tokens else loss
        if is_sum:
            return loss.sum()
        return loss.sum() / mask.sum() if draw.tokens else loss.mean()
    return forward


def optimizer_of(parameters, draw):
    return nn.Adam(parameters, 1e-2) if draw.adam else nn.Momentum(parameters, 0.1, 0.9)


def weight_of(batch, draw):
    return batch[2].sum() if draw.tokens else len(batch[0])


# --- what is expected -------------------------------------------------------------------------------------------------


def expected(draw, which):
    """`(parameters, (update_step, skipped), (loss, weight, norm))` of a step, trained on the batches of all ranks.

    The last three are () if the last window was dropped.
    """
    network = network_of(which)
    optimizer = optimizer_of(network.trainable_params(), draw)
    grad_fn = ms.value_and_grad(forward_of(network, draw, False), None, optimizer.parameters)
    updates, skipped, last = 0, 0, ()
    for calls in zip(*draw.programs):
        queues = [list(map(batch_of, batches)) for name, step, batches in calls
                  if step == which and name in ("epoch", "left", "calls")]
        while any(queues):
            window = [batch for queue in queues for batch in _taken(queue, draw, updates)]
            bad = [np.isnan(batch[0]).any() for batch in window]
            if draw.drops == "skip_microbatch":
                skipped += sum(_pieces_that_count(b[2], draw) for b, is_bad in zip(window, bad) if is_bad)
                window = [b for b, is_bad in zip(window, bad) if not is_bad]
            elif any(bad):
                window, skipped = [], skipped + 1
            if not window:
                last = ()
                continue
            loss, gradients = grad_fn(*(Tensor(np.concatenate(column)) for column in zip(*window)))
            weight = float(sum(weight_of(b, draw) for b in window))
            share = weight / max(weight, draw.min_weight or 0)
            gradients = [g * share for g in gradients]
            norm = float(np.sqrt(sum((g.asnumpy().astype(float)**2).sum() for g in gradients)))
            factor = min(1, draw.clip_norm / (norm + 1e-6)) if draw.clip_norm else 1
            optimizer(tuple(g * factor for g in gradients))
            updates, last = updates + 1, (float(loss) * share, weight, norm)
    return flat(network), (updates, skipped), last


def _pieces_that_count(mask, draw):
    """How many pieces of a batch have a weight, or are sums: means of weight 0 are ignored in any case."""
    parts = np.array_split(mask, min(draw.pieces, len(mask)))
    return sum(part.any() or draw.is_sum or not draw.tokens for part in parts)


def _taken(queue, draw, updates):
    """Take a window of one rank from what is left."""
    if draw.length == "budget":
        sums = np.cumsum([0 if draw.drops == "skip_microbatch" and np.isnan(b[0]).any() else weight_of(b, draw)
                          for b in queue])
        count = int(np.searchsorted(sums, BUDGET)) + 1
    else:
        count = draw.length if isinstance(draw.length, int) else draw.length[2 * (updates >= 2)]
    window = queue[:count]
    del queue[:count]
    return window


def flat(network):
    return np.concatenate([p.asnumpy().ravel() for p in network.trainable_params()])


# --- what a rank does -------------------------------------------------------------------------------------------------


def step_of(draw, which, reducer=None):
    network = network_of(which)
    reducer = reducer or draw.reducer
    parameters = network.trainable_params()
    optimizer = optimizer_of(shard_parameters(parameters) if reducer.zero else parameters, draw)

    def counted(x, label, mask):
        return mask.sum()

    options = {"loss_scaler": amp.StaticLossScaler(8.0)} if draw.drops == "scaler" else {"on_nonfinite": draw.drops}
    return network, make_train_step(
        forward_of(network, draw, draw.is_sum), optimizer,
        until_weight(BUDGET, at_most=100) if draw.length == "budget" else draw.length,
        loss_reduction="sum" if draw.is_sum else "mean", weight_fn=counted if draw.tokens else None, network=network,
        clip_norm=draw.clip_norm, min_weight=draw.min_weight, reducer=reducer, pieces=draw.pieces,
        eager=not draw.compiled, max_skips=None, **options)


def trained(draw, rank):
    """`(error or None, [network], [step])` of a rank."""
    meeting._ended.clear()  # noqa: SLF001 (a run would end)
    ms.set_context(mode=ms.GRAPH_MODE if draw.compiled else ms.PYNATIVE_MODE)
    networks, steps, error = [], [], None
    try:
        for which in range(2 - draw.compiled):
            network, step = step_of(draw, which)
            networks.append(network)
            steps.append(step)
        for name, which, batches in draw.programs[rank]:
            _call(steps[which], name, list(map(batch_of, batches)))
    except (RanksDiffer, OSError) as caught:
        error = caught
    if not isinstance(error, RanksDiffer):
        try:
            steps[0].boundary.window.exchange.require_alike(END, {"the error": error is not None})
        except RanksDiffer as caught:
            error = caught
    ms.set_context(mode=ms.PYNATIVE_MODE)
    return error, networks, steps


def _call(step, name, batches):
    if name == "epoch":
        for _ in step.epoch(batches):
            pass
    elif name == "left":
        for _ in islice(step.epoch([*batches, *batches]), len(batches)):  # one more is never trained
            pass
        step.flush()
    elif name == "calls":
        for batch in batches:
            step(*batch)
        step.flush()
    elif name == "flush":
        step.flush()
    elif name == "save":
        step.boundary.window.exchange.compare(SAVE, step.boundary.compared())
    elif name == "evaluate":
        step.evaluate([(np.zeros_like(x), label, mask) for x, label, mask in batches])
    elif name == "parameter":
        parameter = step.boundary.window.exchange.parameters[0]
        ops.assign(parameter, parameter * 0.5)
    elif name == "rate":
        step.learning_rate = 1e-3
    else:
        raise OSError("no such file")


def result_of(draw, rank):
    """"right", "error", or what is wrong."""
    error, networks, steps = trained(draw, rank)
    if error is not None:
        return "error"
    for which, (network, step) in enumerate(zip(networks, steps)):
        parameters, counts, last = expected(draw, which)
        status = step.status()
        found = status.loss, status.weight, status.grad_norm
        off = np.abs(flat(network) - parameters).max()
        if not off < 1e-5:
            return f"a difference of {off:.1e}"
        if (status.update_step, status.skipped) != counts:
            return f"{status}, expected {counts}"
        if last and not np.allclose(found[:2 + (draw.clip_norm is not None)], last[:2 + (draw.clip_norm is not None)],
                                    rtol=1e-4):
            return f"{found}, expected {last}"
    return "right"
