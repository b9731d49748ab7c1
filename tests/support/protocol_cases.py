"""Ranks whose calls differ, as users' scripts have them: cases of `rank_cases.py`. Each rank has data of its own."""
import os
from itertools import chain

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops

from ms_accum import Accumulator, DataParallel, load_checkpoint, make_train_step, save_checkpoint, until_weight
from ms_accum.distributed.tags import BUILD, TRAIN, wait_for_all
from ms_accum.distributed.tags import said_by as what_is_said
from ms_accum.selftest.comparing import values
from ms_accum.selftest.networks import MLP, batches, mean_loss
from support import reference

RATE = 0.1


def said_by(function, *arguments, **keywords):
    """What an error says."""
    try:
        function(*arguments, **keywords)
    except (TypeError, ValueError, OSError, RuntimeError, UserWarning) as error:
        return f"{type(error).__name__}: {error}"
    return "accepted"


def data_of(rank, epoch, count):
    """`[(x, y)]` of a rank's epoch."""
    sizes = [1 + (i + rank) % 3 for i in range(count)]
    return [(x.astype(np.float32), y.astype(np.int32)) for x, y in batches(sizes, seed=1000 * epoch + rank)]


def built(accumulate_step=2, **settings):
    """A network, and a train step of two ranks."""
    network = MLP(seed=0)
    optimizer = nn.SGD(network.trainable_params(), RATE)
    settings.setdefault("reducer", DataParallel())
    return network, make_train_step(mean_loss(network), optimizer, accumulate_step, **settings)


def plain(windows):
    """The parameters after plain training on these windows, each a list of batches."""
    oracle = reference.Undivided(values(MLP(seed=0).trainable_params()), reference.SGD(RATE, 0.0), 10**6, "mean", None)
    for window in windows:
        for x, y in window:
            oracle((x, y), len(x))
        oracle.flush()
    return oracle.parameters


def joined(*of_ranks):
    """The windows of two microbatches of all ranks, each a list of batches."""
    count = max(-(-len(data) // 2) for data in of_ranks)
    return [[batch for data in of_ranks for batch in data[2 * i:2 * i + 2]] for i in range(count)]


def left_early(rank):
    """Three epochs: rank 1 leaves the first early, rank 0 the last; all call `flush` after each loop, as on one device.

    Return the difference from plain training, and the number of updates.
    """
    network, step = built()
    left, windows = {(1, 0): 2, (0, 2): 3}, []
    for epoch in range(3):
        trained = [data_of(each, epoch, 8)[:left.get((each, epoch), 8)] for each in range(2)]
        windows += joined(*trained)
        for i, _ in enumerate(step.epoch(data_of(rank, epoch, 8)), 1):
            if i == left.get((rank, epoch)):
                break
        step.flush()
    off = max(np.abs(p - q).max() for p, q in zip(values(network.trainable_params()), plain(windows)))
    return float(off), int(step.accumulator.update_step), len(windows)


def left_by_an_error(rank):
    """Three epochs: rank 1 cannot read the first batch of the second, and flushes.

    Return the difference from plain training.
    """
    def broken():
        raise OSError("no such file")
        yield

    network, step = built()
    for epoch in range(3):
        if (rank, epoch) == (1, 1):
            assert said_by(list, step.epoch(broken())) == "OSError: no such file"
            step.flush()
        else:
            list(step.epoch(data_of(rank, epoch, 8)))
    windows = [joined(data_of(0, epoch, 8), data_of(1, epoch, 8 * (epoch != 1))) for epoch in range(3)]
    return float(max(np.abs(p - q).max() for p, q in zip(
        values(network.trainable_params()), plain([*chain(*windows)]))))


def evaluated_alone(rank):
    """In windows of one microbatch, what a rank says that trains while rank 0 evaluates."""
    _, single = built(1)
    batch = data_of(rank, 0, 1)[0]
    single(*batch)
    said = said_by(lambda: single.evaluate([batch]) if rank == 0 else [single(*batch) for _ in range(2)])
    single.accumulator.exchange.forgive()
    wait_for_all()
    return said


def twins(rank):
    """Two steps for each batch, with 8 and 4 batches. Then the same with equal numbers, and what differs from plain."""
    steps = [built()[1] for _ in range(2)]

    def train(count):
        for batch in data_of(rank, 0, count):
            for step in steps:
                step(*batch)
        for step in steps:
            step.flush()

    uneven = said_by(train, 8 - 4 * rank)
    wait_for_all()
    steps[0].accumulator.exchange.forgive()  # as if all ranks loaded a checkpoint
    pairs = [built() for _ in range(2)]
    steps = [step for _, step in pairs]
    train(5)
    expected = plain(joined(data_of(0, 0, 5), data_of(1, 0, 5)))
    off = max(np.abs(p - q).max() for network, _ in pairs
              for p, q in zip(values(network.trainable_params()), expected))
    return uneven, float(off)


def saved_on_update(rank):
    """Save after each second update, with `until_weight` and uneven data. Return the updates of each save.

    Another run loads the last one, and goes on: return whether it ends with the same bits.
    """
    path, data = "on-update.safetensors", data_of(rank, 0, 9 - 5 * rank)

    def start():
        network, step = built(until_weight(4))
        return network, step, []

    network, step, saved = start()

    def save():
        save_checkpoint(path, network, step)
        saved.append((int(step.accumulator.update_step), step.trained))

    step.on_update(save, every=2)
    for _ in step.epoch(data):
        pass
    other, again, _ = start()
    load_checkpoint(path, other, again)
    for _ in again.epoch(data, resume=True):
        pass
    same = all((p == q).all() for p, q in zip(values(network.trainable_params()), values(other.trainable_params())))
    return [update for update, _ in saved], same, int(step.accumulator.update_step)


def unmatched(rank):
    """What each rank says about calls that only some ranks make, or make with other arguments; then it goes on."""
    network, step = built()
    start, said = [p.asnumpy().copy() for p in network.trainable_params()], {}
    for case in (only_rank_0_saves, saved_by_own_count, left_without_flush, go_on, rates_apart):
        with step.boundary.loading(is_open=False):  # as all ranks load a checkpoint
            for p, value in zip(network.trainable_params(), start):
                ops.assign(p, Tensor(value))
        step.boundary.end_epoch()
        said[case.__name__] = said_by(case, rank, network, step)
        _meet()
    step.accumulator.exchange.forgive()
    return said


def only_rank_0_saves(rank, network, step):
    for batch in data_of(rank, 0, 4):
        step(*batch)
    if rank == 0:
        save_checkpoint("one.safetensors", network, step)
    step.flush()


def saved_by_own_count(rank, network, step):
    for i, batch in enumerate(data_of(rank, 1, 6 - 3 * rank)):
        step(*batch)
        if i % 2:
            save_checkpoint("updated.safetensors", network, step)
    step.flush()


def left_without_flush(rank, network, step):
    for epoch in range(2):
        for i, _ in enumerate(step.epoch(data_of(rank, epoch, 6))):
            if rank == 1 and i == 2:
                break
    step.flush()


def rates_apart(rank, network, step):
    for i, batch in enumerate(data_of(rank, 2, 6 - 3 * rank)):
        step(*batch)
        if i % 2:
            ops.assign(step.accumulator.optimizer.learning_rate, Tensor(RATE / (i + 1)))
    step.flush()


def go_on(rank, network, step):
    for _ in step.epoch(data_of(rank, 3, 5 - rank)):
        pass


def built_again(rank):
    """What ranks say where only rank 1 builds another step, and then their old one, when both have built a new one.

    Also return how far the new one is from plain training.
    """
    _, old = built()

    def apart():
        if rank == 1:
            built()
        for batch in data_of(rank, 0, 2):
            old(*batch)
        old.status()

    said, (network, step) = said_by(apart), built()
    for _ in step.epoch(data_of(rank, 0, 6)):
        pass
    off = max(np.abs(p - q).max() for p, q in zip(values(network.trainable_params()),
                                                  plain(joined(data_of(0, 0, 6), data_of(1, 0, 6)))))
    again = said_by(old.status)
    with old.boundary.loading(is_open=False):  # as all ranks load a checkpoint
        pass
    back = said_by(old.status)
    sums_each = Accumulator(nn.SGD(MLP(seed=0).trainable_params(), RATE), 2, reduction="mean",
                            reducer=DataParallel(sync="microbatch"))
    rows = np.zeros((2, 8), np.float32)
    rows[:, :2], rows[:, 4] = [[TRAIN, sums_each.exchange.number], [BUILD, sums_each.exchange.number + 1]], 1
    return said, float(off), again, back, what_is_said(rows, sums_each.exchange.tags_inside)


def _meet():
    """Meet the other ranks, which may have been stopped before an exchange that this rank made."""
    for _ in range(3):
        if said_by(wait_for_all) == "accepted":
            return
    wait_for_all()


def by_hand(rank):
    """What each rank says where accumulators by hand pair with each other's, and whether one has moved."""
    accumulators = [Accumulator(nn.SGD(MLP(seed=0).trainable_params(), RATE), 1, reduction="mean",
                                reducer=DataParallel()) for _ in range(2)]
    own = accumulators[rank]

    def call(gradients):
        return own(gradients)

    before = values(own.weights)  # copies
    at_once = said_by(ms.jit(call) if os.environ["MS_JIT"] == "1" else call, tuple(p + 1 for p in own.weights))
    moved = any((p != q).any() for p, q in zip(before, values(own.weights)))
    said = at_once, said_by(own.status), moved, said_by(own, tuple(p + 1 for p in own.weights))
    own.exchange.forgive()
    return said


def reset_inside(rank):
    """What a rank says where ranks sum each microbatch, and rank 1 drops its open window. Without that: nothing."""
    found = []
    for resets in (False, True):
        _, step = built(3, reducer=DataParallel(sync="microbatch"))
        first, *others = data_of(rank, 0, 4)
        step(*first)
        if rank == 1 and resets:
            step.accumulator.reset()
        found.append(said_by(lambda step=step, others=others: [step(*batch) for batch in others] and step.status()))
        if not resets:
            step.flush()
    return found


def own_all_reduce(rank):
    """What a rank says whose flush meets another rank's own AllReduce of the loss."""
    _, step = built()
    sum_ = ops.AllReduce()

    def train():
        for batch in data_of(rank, 0, 6 - 4 * rank):
            loss = step(*batch)
            sum_(loss).asnumpy()
        step.flush()

    return said_by(train)

