"""What is checked, in one table. A check returns a result, and what it found; if it raises any error, it fails, too."""
from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple, Optional
from unittest.mock import patch

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops

from ms_accum import DataParallel, load_checkpoint, make_grad_cache_step, make_train_step, save_checkpoint
from ms_accum import shard_parameters as sharded

from ..core.kernels import SWITCH
from ..core.stages import SkipWindow
from ..distributed.exchange import OneDevice
from ..distributed.meeting import world_size
from ..mindspore_api import get_rank
from ..runtime import synchronize
from .comparing import values
from .networks import MLP, targets
from .training import DRIVERS, Plain, Training, Windows, optimizer_of, samples, spoilt, texts

# From the best result to the worst one.
HOLDS, MEASURED, NOT_RUN, NO_KERNEL, FAILS = RESULTS = ("holds", "measured", "not run", "no kernel", "FAILS")
# The largest norm of the difference to plain training, relative to the norm of the parameters' change.
BOUNDS = {"float32": 1e-4, "float16": 2e-2, "bfloat16": 1e-1}
Found = tuple[str, str]

OPTIONS: dict[str, Any] = {"length": 3, "clip_norm": 0.8, "scale": 64}
# Ragged windows, one whose gradient is clipped, and an incomplete one.
RAGGED = [samples((5, 2, 5), 2), samples((2, 5, 5), 12), samples((5, 5, 2), 3, factor=5), samples((5, 2), 0)]
TEXTS = [texts((12, 2), 1), texts((5, 9), 2)]
REDUCERS: dict[str, dict[str, Any]] = {
    "once a window": {}, "each microbatch": {"sync": "microbatch"}, "ZeRO 1": {"zero": 1}, "ZeRO 2": {"zero": 2}}
IN_PLACE, UNCOUNTED = ("Ascend",), ("CPU",)  # devices with kernels in place; those whose bytes nobody counts
# Bytes per parameter at the peak of an addition and of an update, as the dry run planned them with kernels in place:
# see "Ascend and GPU".
PLAN = {"float32": (8.34, 12.0), "bfloat16": (6.48, 14.0)}
WIDTH = 2048


def within(dtype: str, *errors: float) -> Found:
    """Compare the largest error with the limit of this dtype."""
    off, bound = float(np.max(errors)), BOUNDS[dtype]
    return HOLDS if off <= bound else FAILS, f"off by {off:.1e}, limit {bound:.0e}"


@cache
def train_plainly(dtype: str) -> None:
    """Train in plain MindSpore: an error means that the device has no kernel for this dtype."""
    Training("train step", dtype, 1).plainly([samples((5,), 2)])


def exact(driver: str, dtype: str, windows: Windows, learned: Optional[Windows] = None, **options: Any) -> Found:
    """Train on `learned`, or on the windows: parameters (and losses, unless weighed) are those of the undivided batch.
    """
    training = Training(driver, dtype, **options)
    losses, expected = training.learn(learned or windows), training.plainly(windows)
    off = [expected.off(training.network)]
    if "weight_fn" not in options:
        count, seen = sum(len(x) for window in windows for x, _ in window), training.status().seen
        assert seen == count, f"{seen} samples were counted, expected {count}"
        off += [abs(float(loss) / wanted - 1) for loss, wanted in zip(losses, expected.losses)]
    return within(dtype, *off)


def save_and_resume(driver: str, dtype: str) -> Found:
    """A window with NaN halves the loss scale, and changes nothing else. Saved and loaded, training goes on equally."""
    training, ends = Training(driver, dtype, **OPTIONS), []
    first, second = (samples((5, 5, 5), seed) for seed in (2, 12))
    state = [*training.network.get_parameters(), *training.optimizer.get_parameters()]
    before = values(state)
    training.learn([spoilt(second)])
    assert all(map(np.array_equal, before, values(state))), "a window with NaN changed parameters or state"
    assert training.status().skipped == 1, "a window with NaN was not counted as skipped"
    scale = float(training.scaler.scale_value)
    assert scale == 32, f"the loss scale is {scale:g} after an overflow, expected 32"
    training.learn([first])
    with TemporaryDirectory() as folder:
        saved = Path(folder) / "selftest.safetensors", training.network, training.accumulator
        save_checkpoint(*saved)
        for _ in range(2):
            training.learn([second])
            result, message = within(dtype, training.plainly([first, second]).off(training.network))
            ends.append(values([*state, training.window.counts, training.window.sums, *training.window.state.values()]))
            load_checkpoint(*saved)
    differing = sum(not np.array_equal(a, b, equal_nan=True) for a, b in zip(*ends))
    return FAILS if differing else result, f"{message}; {differing} of {len(ends[0])} tensors differ after resuming"


def loss_of_a_batch(driver: str, dtype: str) -> Found:
    """The loss compares all samples of a batch, whose representations are computed one piece at a time."""
    def loss_fn(x: Tensor) -> Tensor:
        return ops.square(ops.matmul(x.T, x).astype(ms.float32)).mean()

    plainly, network = (MLP(dtype=getattr(ms, dtype)) for _ in range(2))
    x = Tensor(samples((5,), 1)[0][0], getattr(ms, dtype))
    expected = Plain(lambda _: loss_fn(plainly(x)), plainly.trainable_params(), [[(np.zeros(1),)]])
    make_grad_cache_step(network, loss_fn, optimizer_of(network.trainable_params()), 1, pieces=2)(x)
    return within(dtype, expected.off(network))


def bad_element(driver: str, dtype: str) -> Found:
    """One element that is not finite is seen in each gradient, and none where there is none."""
    stage = SkipWindow()
    stage.exchange = OneDevice(())

    @ms.jit
    def is_finite(*gradients: Tensor) -> Tensor:
        return stage.accepts({"gradients": gradients, "weight": 1.0})

    seen = []
    for number, place in product((np.nan, np.inf, -np.inf, 1.0), range(3)):
        ones = [np.ones(size, np.float32) for size in (30, 5, 1_000)]
        ones[place][-1] = number
        seen.append(not is_finite(*(Tensor(one, getattr(ms, dtype)) for one in ones)))
    assert not any(seen[9:]), "finite gradients were left out"
    return HOLDS if all(seen[:9]) else FAILS, f"{sum(seen[:9])} of 9 bad elements were seen"


def ranks(driver: str, dtype: str) -> Found:
    """What ranks exchange, against plain training on the samples of all. Each has other data and weights."""
    reducer, rank = DataParallel(**REDUCERS[driver]), get_rank()
    training = Training("train step", dtype, 2, trained=sharded if reducer.zero else list, seed=rank, reducer=reducer)
    # Odd ranks have less data, in other sizes.
    data = [samples((2, 5, 2) if rank % 2 else (5, 2, 5, 2, 5), 20 + rank) for rank in range(world_size())]
    training.learn([data[rank]])
    expected = training.plainly([[batch for own in data for batch in own[i:i + 2]] for i in (0, 2, 4)])
    return within(dtype, expected.off(training.network))


def kernels_in_place(driver: str, dtype: str) -> Found:
    """Kernels that work in place give what plain training gives."""
    if (device := ms.get_context("device_target")) not in IN_PLACE:
        return NOT_RUN, f"ms_accum has no kernel that works in place on {device}"
    with patch.dict(os.environ, {SWITCH: "1"}):
        return exact(driver, dtype, RAGGED, **OPTIONS)


@contextmanager
def counted_reads() -> Iterator[list[str]]:
    """Yield a list that gets an entry for each value that the host reads from the device in the block."""
    made: list[str] = []

    def noted(name: str) -> Callable:
        reader = getattr(Tensor, name)

        def read(*arguments: Any) -> Any:
            made.append(name)
            return reader(*arguments)
        return read

    # All other ways to read use these. MindSpore 2.8 and older has no `_item`, and converts by `asnumpy`.
    readers: dict[str, Any] = {name: noted(name) for name in ("asnumpy", "_item") if hasattr(Tensor, name)}
    with patch.multiple(Tensor, **readers):
        yield made


def reads_of_the_device(driver: str, dtype: str) -> Found:
    """The host reads nothing from the device while it trains: each read would wait for it."""
    training = Training(driver, dtype, **OPTIONS)
    training.learn(RAGGED[:1])
    with counted_reads() as made:
        training.learn(RAGGED[:1] * 8)
    return FAILS if made else HOLDS, f"{len(made)} reads in 8 windows, expected 0"


def bytes_per_parameter(driver: str, dtype: str) -> Found:
    """Only measured: kernels and MindSpore's own memory differ between devices."""
    if (device := ms.get_context("device_target")) in UNCOUNTED:
        return NOT_RUN, f"MindSpore does not count bytes on {device}"
    gc.collect()
    synchronize()
    before, found = ms.runtime.memory_allocated(), []
    network = nn.SequentialCell([nn.Dense(WIDTH, WIDTH, dtype=getattr(ms, dtype)) for _ in range(13)])

    def forward_fn(x: Tensor) -> Tensor:
        return network(x).astype(ms.float32).mean()

    step = make_train_step(forward_fn, optimizer_of(network.trainable_params()), 2)
    for planned in PLAN[dtype]:
        ms.runtime.reset_max_memory_allocated()
        step(Tensor(np.ones((16, WIDTH)), getattr(ms, dtype)))
        synchronize()
        peak = (ms.runtime.max_memory_allocated() - before) / sum(p.size for p in network.trainable_params())
        found.append(f"{peak:.2f} (plan {planned:.2f})")
    return MEASURED, "at the peak of an addition {}, of an update {}".format(*found)


class Row(NamedTuple):
    """A check with one driver, in one dtype."""

    check: str
    driver: str
    dtype: str
    run: Callable[[str, str], Found]


def rows(is_quick: bool) -> list[Row]:
    """Return the rows of the table, by dtype; if `is_quick`, those in float32, each check with few drivers."""
    every, means, ones = (DRIVERS, BOUNDS), [*TEXTS, texts((7, 0), 2)], [samples((5,), 2), samples((5,), 12)]
    # By check: its drivers in the quick run, all its drivers (None: the same), and its dtypes.
    table: dict[str, tuple] = {
        "ragged windows": (partial(exact, windows=RAGGED, **OPTIONS), ["by hand, compiled", "cell, PyNative"], *every),
        "save and resume": (save_and_resume, ["by hand, op by op", "train step, 2 pieces"], *every),
        "windows of one": (partial(exact, windows=ones, length=1), ["train step"], *every),
        "token weights, means": (partial(
            exact, windows=[*means, TEXTS[0][1:]], learned=[*means, spoilt(TEXTS[0])], length=2, weight_fn=targets,
            on_nonfinite="skip_microbatch"), ["cell, graph mode"], *every),
        "token weights, sums": (partial(exact, windows=TEXTS, length=2, reduction="sum", weight_fn=targets),
                                ["by hand, op by op", "train step", "cell, PyNative"], *every),
        "loss of a batch": (loss_of_a_batch, ["cached, 2 pieces"], None, BOUNDS),
        "bad element": (bad_element, ["compiled"], None, BOUNDS),
        "ranks": (ranks, REDUCERS if world_size() > 1 else [], None, BOUNDS),
        "kernels in place": (kernels_in_place, ["train step", "by hand, op by op"], None, BOUNDS),
        "reads of the device": (reads_of_the_device, ["train step"], None, ["float32"]),
        "bytes per parameter": (bytes_per_parameter, ["train step"], None, PLAN),
    }
    return [Row(check, driver, dtype, run) for dtype in (["float32"] if is_quick else BOUNDS)
            for check, (run, quick, drivers, dtypes) in table.items() if dtype in dtypes
            for driver in (quick if is_quick or drivers is None else drivers)]
