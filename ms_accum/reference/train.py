"""Train on microbatches in seeded order, dealt out to the ranks; flush the last window of each epoch, and test."""
from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any, Optional, Protocol, Union

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn
from mindspore.dataset import GeneratorDataset
from mindspore.train import LambdaCallback, Model

from ms_accum.accumulator import Accumulator
from ms_accum.batch_size import AdaptiveWindow, GradientNoiseScale
from ms_accum.callbacks import FlushCallback
from ms_accum.check.isolation import in_mode
from ms_accum.checkpoint import load_checkpoint, save_checkpoint
from ms_accum.checkpoint_file import CheckpointError
from ms_accum.distributed.exchange import DataParallel
from ms_accum.distributed.ranks import gather
from ms_accum.model import TrainOneStepCell
from ms_accum.step import TrainStep
from ms_accum.window import AccumulateStep

from .settings import Settings

# What another number of ranks may change.
_OF_RANKS = ("ranks", "rank", "accumulate_step", "sync", "shard", "ranks_per_node")
AnyStep = Union[TrainStep, TrainOneStepCell]


class Data(Protocol):
    """What a network is trained on: rows, each of one unit or more. A loss is the mean over units."""

    size: int  # units in all rows

    def batch(self, rows: np.ndarray) -> tuple[np.ndarray, ...]:
        """Return the arguments of the train step for these rows, int `(n,)`."""

    def count(self, rows: np.ndarray) -> int:
        """Return the number of units in these rows."""


@dataclass(frozen=True)
class Words:
    """How a run names what it counts and measures."""

    rows: str  # what a microbatch has `batch_size` of: "digits"
    unit: str  # what a loss is the mean over: "digits"
    score: str  # the test's result among the figures: "accuracy"
    score_format: str  # the same in a line: "accuracy {:.2f} %"
    score_axis: str  # the same in the plot: "accuracy in %"
    score_title: str
    loss_axis: str
    loss_title: str


class Task(ABC):
    """What a reference run trains, on what, and how it is tested.

    Attributes:
        command: The command that runs it.
        words: How it names what it counts and measures.
        label: What sets this run apart from the one that `--compare` adds.
        settings: Its settings.
        network: The network, which is trained in place.
        data: What it is trained on.
        identity: The same text for the same data.
    """

    command: str
    words: Words
    label: str
    settings: Settings
    network: nn.Cell
    data: Data
    identity: str

    @abstractmethod
    def make_step(self) -> AnyStep:
        """Make the train step that the settings describe."""

    @abstractmethod
    def order(self, epoch: int) -> list[np.ndarray]:
        """Return the rows of each microbatch of an epoch, of all ranks, in seeded order: int `(n,)` each."""

    @abstractmethod
    def make_test(self) -> Callable[[], float]:
        """Return the test, which is compiled once: `() -> score`."""

    @abstractmethod
    def counterpart(self) -> Task:
        """Return what `--compare` also trains, from the same weights."""

    @abstractmethod
    def describe_data(self) -> str:
        """Say what is trained and tested on."""

    @abstractmethod
    def data_figures(self) -> dict[str, Any]:
        """Return how much is trained and tested on."""

    def describe_batch(self) -> str:
        """Say how large the batch of an update is, and how it is made up."""
        settings = self.settings
        ranks = "" if settings.ranks == 1 else f" x {settings.ranks} ranks"
        if settings.adaptive:
            bounds = AdaptiveWindow()
            pieces = f"{settings.batch_size:,} x {bounds.minimum} to {bounds.maximum}{ranks}"
            return f"{pieces} {self.words.rows} an update, as the noise scale asks"
        pieces = f"{settings.batch_size:,} x {settings.accumulate_step:,}{ranks}"
        return f"{pieces} = {settings.effective_batch:,} {self.words.rows} an update"

    def update_size(self, epochs: list[Epoch]) -> int:
        """Return the units of an update, on average if updates differ."""
        return self.settings.effective_batch or round(self.data.size * len(epochs) / epochs[-1].update_step)

    def describe_difference(self, score: float, other: float) -> list[str]:
        """Say, in lines, how the scores of this run and of its counterpart differ."""
        return []

    def closing(self) -> dict[str, str]:
        """Return what the trained network has to show at the end, by name."""
        return {}


@dataclass(frozen=True)
class Epoch:
    """The results of one epoch."""

    epoch: int  # from 1
    loss: float  # mean over the units of all ranks, each at the moment it was trained on
    score: float  # of the test
    train_seconds: float  # wall time, including compilation
    test_seconds: float
    update_step: int  # updates since the start of the run
    microbatch_losses: np.ndarray = field(repr=False)  # mean loss of each microbatch of this rank, float64
    noise_scale: Optional[float] = None  # in units: over the epoch, or recent if adaptive; None if not measured
    window_length: Optional[int] = None  # microbatches in the next window; None if the noise scale does not choose


@dataclass(frozen=True)
class Checkpoints:
    """Where a run is saved, and where it continues from."""

    save: Optional[Path] = None  # file to save to at the end
    every: Optional[int] = None  # also save after this many microbatches of a rank
    resume: Optional[Path] = None  # file to continue from
    resumed: Callable[[int, int], None] = lambda epochs, microbatches: None  # called with what all ranks have done


def train(task: Task, on_microbatch: Callable[[Accumulator, int, int, Tensor], None] = lambda *_: None,
          checkpoints: Checkpoints = Checkpoints()) -> Iterator[Epoch]:
    """Train the task's network in place; yield each epoch, in a resumed run also those that were done before.

    `on_microbatch(accumulator, epoch, units that all ranks trained on in it, loss)` is called after each microbatch.
    CheckpointError if the checkpoint to resume is damaged or from another run; OSError if one cannot be written: the
    old one is still there.
    """
    settings, train_step = task.settings, task.make_step()
    accumulator = train_step.accumulator
    epochs: list[Epoch] = []
    losses: list[float] = []  # of the open epoch's microbatches
    if checkpoints.resume:
        epochs, of_all = _done(load_checkpoint(checkpoints.resume, task.network, accumulator), task)
        losses = of_all[settings.rank::settings.ranks]
        checkpoints.resumed(len(epochs), len(of_all))
    yield from epochs

    def save() -> None:
        done = [{**vars(epoch), "microbatch_losses": epoch.microbatch_losses.tolist()} for epoch in epochs]
        # In the order of the data; all ranks have as many.
        of_all = of_all_ranks(np.array(losses), settings).T.ravel().tolist() if losses else []
        save_checkpoint(checkpoints.save, task.network, accumulator,
                        extra={"run": _identity(task), "epochs": done, "losses": of_all})

    test = task.make_test()
    for epoch in range(len(epochs) + 1, settings.epochs + 1):
        order = task.order(epoch)
        microbatches = order[settings.rank::settings.ranks]
        save_at = _saves(epoch, len(order) // settings.ranks, checkpoints.every)
        if settings.noise_scale and not settings.adaptive and not losses:
            accumulator.noise_scale.reset()
        start = perf_counter()
        with _mode(settings):
            train_epoch(train_step, task.data, microbatches, partial(on_microbatch, accumulator, epoch), losses,
                        save_at, save, settings.ranks)
        trained = perf_counter()
        score = test()
        epochs.append(Epoch(
            epoch=epoch,
            loss=_mean_loss(np.array(losses), [task.data.count(rows) for rows in microbatches], settings),
            score=score,
            train_seconds=trained - start,
            test_seconds=perf_counter() - trained,
            update_step=int(accumulator.update_step.asnumpy()),
            microbatch_losses=np.array(losses),
            noise_scale=accumulator.noise_scale and accumulator.noise_scale.scale(),
            window_length=accumulator.window.length if settings.adaptive else None,
        ))
        losses.clear()
        yield epochs[-1]
    if checkpoints.save:
        save()


def _identity(task: Task) -> dict:
    """Return what must not change when a run is resumed; the number of epochs may, and that of ranks (`_OF_RANKS`)."""
    run = {"command": task.command, **asdict(task.settings), task.words.unit: task.identity}
    del run["epochs"]
    return run


def _done(extra: object, task: Task) -> tuple[list[Epoch], list[float]]:
    """Return the epochs, and the open epoch's losses of all ranks. CheckpointError if it is from another run."""
    if not isinstance(extra, dict) or not {"run", "epochs", "losses"} <= extra.keys():
        raise CheckpointError(f"the checkpoint is not from `ms-accum {task.command}`; give one that --save wrote")
    settings = task.settings
    dealt_out = extra["run"].get("ranks") != settings.ranks
    for name, value in _identity(task).items():
        if extra["run"].get(name) != value and not (dealt_out and name in _OF_RANKS):
            raise CheckpointError(f"the checkpoint is from a run with {name} {extra['run'].get(name)}, but this run "
                                  f"has {value}; give the same options and {task.words.rows}")
    if len(extra["epochs"]) > task.settings.epochs:
        raise CheckpointError(f"the checkpoint holds {len(extra['epochs'])} epochs, but this run has only "
                              f"{task.settings.epochs}; give more --epochs")
    epochs = [Epoch(**{**epoch, "microbatch_losses": np.array(epoch["microbatch_losses"])})
              for epoch in extra["epochs"]]
    return epochs, extra["losses"]


def cut(order: np.ndarray, batch_size: int) -> list[np.ndarray]:
    """Cut `order`, int `(n,)`, into pieces of `batch_size`; the last one may be smaller."""
    return [order[start:start + batch_size] for start in range(0, len(order), batch_size)]


def _saves(epoch: int, fewest: int, every: Optional[int]) -> range:
    """Return after which microbatches of this epoch to save: the same on every rank, or one would wait forever.

    `fewest` is the number of microbatches in each epoch of the rank that has fewest.
    """
    return range(every - (epoch - 1) * fewest % every, fewest + 1, every) if every else range(0)


def make_accumulator(optimizer: nn.Cell, settings: Settings, accumulate_step: AccumulateStep) -> Accumulator:
    """Make the accumulator that the settings describe, with windows of `accumulate_step` unless they are adaptive."""
    reducer = None
    if settings.ranks > 1:
        reducer = DataParallel(sync=settings.sync, shard=settings.shard, ranks_per_node=settings.ranks_per_node)
    noise_scale = GradientNoiseScale(decay=1) if settings.noise_scale and not settings.adaptive else None
    length = AdaptiveWindow() if settings.adaptive else accumulate_step
    return Accumulator(optimizer, length, settings.clip_norm, reduction="mean", reducer=reducer,
                       noise_scale=noise_scale)


def make_adam(network: nn.Cell, lr: float) -> nn.Adam:
    """Make Adam for all parameters of a network."""
    with nothing_logged():  # MindSpore 2.10 warns that an operator is deprecated which Adam makes for sparse gradients
        return nn.Adam(network.trainable_params(), lr)


@contextmanager
def nothing_logged() -> Iterator[None]:
    """Run the block without a message from MindSpore's Python code."""
    logged = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(logged)


def train_epoch(train_step: AnyStep, data: Data, microbatches: Sequence[np.ndarray],
                on_microbatch: Callable[[int, Tensor], None], losses: list[float], save_at: range = range(0),
                save: Callable[[], None] = lambda: None, ranks: int = 1) -> None:
    """Train on the rows of each microbatch in turn and close the last window.

    `losses` holds those of the microbatches that are already done and are skipped; those of the others are appended.
    After each, `on_microbatch(units trained on by all ranks, loss)` is called: other ranks are assumed to be as far as
    this one. After the microbatches with the numbers `save_at`, `save()` is called, and `losses` is complete then.
    """
    unread = []  # losses stay on the device until they are needed, because reading one waits for it
    counts = np.cumsum([data.count(rows) for rows in microbatches])

    def read() -> None:
        losses.extend(float(loss.asnumpy()) for loss in unread)
        unread.clear()

    def took(loss: Tensor) -> None:
        unread.append(loss)
        done = len(losses) + len(unread)
        seen = min(ranks * int(counts[done - 1]), data.size - 1)
        on_microbatch(data.size if done == len(microbatches) else seen, loss)
        if done in save_at:
            read()
            save()

    feed = _with_model if isinstance(train_step, TrainOneStepCell) else _in_a_loop
    feed(train_step, (data.batch(rows) for rows in microbatches[len(losses):]), took)
    read()


def _in_a_loop(train_step: TrainStep, batches: Iterable[tuple], took: Callable[[Tensor], None]) -> None:
    for batch in batches:
        took(train_step(*map(Tensor, batch)))
    train_step.flush()


def _with_model(cell: TrainOneStepCell, batches: Iterable[tuple], took: Callable[[Tensor], None]) -> None:
    rows = list(batches)
    if not rows:  # the epoch was saved after its last microbatch: only the flush is left
        cell.flush()
        return
    dataset = GeneratorDataset(rows, [f"column_{i}" for i in range(len(rows[0]))], shuffle=False)
    # As in the loop, the loss is taken before the last window is flushed.
    losses = LambdaCallback(on_train_step_end=lambda run_context: took(run_context.original_args().net_outputs))
    Model(cell).train(1, dataset, callbacks=[losses, FlushCallback()], dataset_sink_mode=False)


def _mean_loss(losses: np.ndarray, counts: list[int], settings: Settings) -> float:
    total, count = of_all_ranks(np.array([losses @ counts, sum(counts)], np.float64), settings).sum(axis=0)
    return float(total / count)


def of_all_ranks(numbers: np.ndarray, settings: Settings) -> np.ndarray:
    """Return a row from each rank."""
    return gather(numbers) if settings.ranks > 1 else numbers[None]


def _mode(settings: Settings) -> AbstractContextManager:
    if settings.mode == "pynative":
        return in_mode(ms.PYNATIVE_MODE)
    return in_mode(ms.GRAPH_MODE) if settings.api == "model" else nullcontext()
