"""Train and test: microbatches in seeded order, dealt out to the ranks, each epoch's last window flushed."""
from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any, Optional, Union

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn
from mindspore.dataset import GeneratorDataset
from mindspore.train import Callback, Model, RunContext

from ms_accum.accumulator import Accumulator
from ms_accum.batch_size.noise_scale import GradientNoiseScale
from ms_accum.callbacks import FlushCallback
from ms_accum.checkpoint import CheckpointError, load_checkpoint, save_checkpoint
from ms_accum.distributed.ranks import gather
from ms_accum.distributed.reducers import DataParallel
from ms_accum.model import TrainOneStepCell
from ms_accum.train_step import TrainStep, make_train_step

from .data import Digits, Mnist
from .network import CountCorrect, Float64Optimizer, Network, make_forward
from .settings import Settings

TEST_BATCH = 1000
DEFAULT_MOMENTUM = {"sgd": 0.0, "momentum": 0.9}


@dataclass(frozen=True)
class Epoch:
    """Hold the results of one epoch.

    Attributes:
        epoch: Number of the epoch, from 1.
        loss: Mean loss of the digits of all ranks, each at the moment it was trained on.
        accuracy: Of the test digits, per cent.
        train_seconds, test_seconds: Wall time, with the compilation of what ran for the first time.
        update_step: Updates since the start of the run.
        microbatch_losses: Mean loss of each microbatch of this rank, float64 `(microbatches,)`.
        noise_scale: Gradient noise scale over the epoch, in digits; None if it is not measured.
    """

    epoch: int
    loss: float
    accuracy: float
    train_seconds: float
    test_seconds: float
    update_step: int
    microbatch_losses: np.ndarray = field(repr=False)
    noise_scale: Optional[float] = None


OnMicrobatch = Callable[[int, int, Tensor], None]


@dataclass(frozen=True)
class Checkpoints:
    """Say where a run is saved, and where it continues from.

    Attributes:
        save: File to save to at the end; None: nowhere.
        every: Also save after this many microbatches of a rank; None: only at the end.
        resume: File to continue from; None: from the start.
        resumed: Called when that is loaded: `(epochs done, microbatches done of the next)`.
    """

    save: Optional[Path] = None
    every: Optional[int] = None
    resume: Optional[Path] = None
    resumed: Callable[[int, int], None] = lambda epochs, microbatches: None


@dataclass
class Place:
    """Hold a run's progress: the epochs that are done, and the losses of the next one's microbatches so far."""

    epochs: list[Epoch] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)

    def as_extra(self, settings: Settings, mnist: Mnist) -> dict:
        """Return what a checkpoint holds of it."""
        epochs = [{**asdict(epoch), "microbatch_losses": epoch.microbatch_losses.tolist()} for epoch in self.epochs]
        return {"run": _identity(settings, mnist), "epochs": epochs, "losses": list(self.losses)}

    @classmethod
    def of_extra(cls, extra: object, settings: Settings, mnist: Mnist) -> Place:
        """Read it from a checkpoint. Raises CheckpointError if that is from another run."""
        if not isinstance(extra, dict) or not {"run", "epochs", "losses"} <= extra.keys():
            raise CheckpointError("the checkpoint is not from `ms-accum mnist`; give one that --save wrote")
        for name, value in _identity(settings, mnist).items():
            if extra["run"].get(name) != value:
                raise CheckpointError(f"the checkpoint is from a run with {name} {extra['run'].get(name)}, but this run has "
                                      f"{value}; give the same options and digits")
        epochs = [
            Epoch(**{**epoch, "microbatch_losses": np.array(epoch["microbatch_losses"])}) for epoch in extra["epochs"]]
        if len(epochs) > settings.epochs:
            raise CheckpointError(f"the checkpoint holds {len(epochs)} epochs, but this run has only {settings.epochs}; give "
                                  "more --epochs")
        return cls(epochs, extra["losses"])


def _identity(settings: Settings, mnist: Mnist) -> dict:
    """Return what must not change when a run is resumed; the number of epochs may."""
    run = {name: value for name, value in asdict(settings).items() if name != "epochs"}
    return {**run, "digits": mnist.identity}


def train(
    mnist: Mnist,
    network: Network,
    settings: Settings,
    on_microbatch: OnMicrobatch = lambda *_: None,
    checkpoints: Checkpoints = Checkpoints(),
) -> Iterator[Epoch]:
    """Train `network` in place; yield each epoch, in a resumed run also those that were done before.

    Args:
        mnist: Digits to train on and to test on.
        network: With its initial weights.
        settings: The run.
        on_microbatch: Called after each microbatch: `(epoch, digits that all ranks trained on in it, loss)`.
        checkpoints: Where to save, and what to resume from.

    Raises:
        CheckpointError: If the checkpoint to resume is damaged, or from another run.
        OSError: If a checkpoint cannot be written; the previous one is still there.
    """
    train_step = make_step(network, settings)
    accumulator = train_step.accumulator
    place = Place()
    if checkpoints.resume:
        place = Place.of_extra(load_checkpoint(checkpoints.resume, network, accumulator), settings, mnist)
        checkpoints.resumed(len(place.epochs), len(place.losses))
    yield from place.epochs

    def save() -> None:
        save_checkpoint(checkpoints.save, network, accumulator, extra=place.as_extra(settings, mnist))

    count_correct = ms.jit(CountCorrect(network)) if settings.mode == "graph" else CountCorrect(network)
    for epoch in range(len(place.epochs) + 1, settings.epochs + 1):
        microbatches = microbatches_of(epoch, len(mnist.train), settings)
        save_at = _saves(epoch, len(mnist.train), settings, checkpoints.every)
        if accumulator.noise_scale is not None and not place.losses:
            accumulator.noise_scale.reset()
        start = perf_counter()
        with _mode(settings):
            train_epoch(train_step, mnist.train, microbatches, partial(on_microbatch, epoch), place.losses, save_at, save,
                        settings.ranks)
        losses, place.losses = np.array(place.losses, np.float64), []
        trained = perf_counter()
        accuracy = evaluate(count_correct, mnist.test, settings)
        place.epochs.append(Epoch(
            epoch=epoch,
            loss=_mean_loss(losses, microbatches, settings),
            accuracy=accuracy,
            train_seconds=trained - start,
            test_seconds=perf_counter() - trained,
            update_step=int(accumulator.update_step.asnumpy()),
            microbatch_losses=losses,
            noise_scale=accumulator.noise_scale and accumulator.noise_scale.scale(),
        ))
        yield place.epochs[-1]
    if checkpoints.save:
        save()


def microbatches_of(epoch: int, digits: int, settings: Settings) -> list[np.ndarray]:
    """Return the rows of each of this rank's microbatches in an epoch, in seeded order; the last one may be shorter.

    They are dealt out one by one, so a window of all ranks holds the same digits as one of a single process.
    """
    order = np.random.default_rng([settings.seed, epoch]).permutation(digits)
    return cut(order, settings.batch_size)[settings.rank::settings.ranks]


def cut(order: np.ndarray, batch_size: int) -> list[np.ndarray]:
    """Cut `order`, int `(n,)`, into pieces of `batch_size`; the last one may be shorter."""
    return [order[start:start + batch_size] for start in range(0, len(order), batch_size)]


def _saves(epoch: int, digits: int, settings: Settings, every: Optional[int]) -> range:
    """After which microbatches of this epoch to save: the same on every rank, or one would wait for ever."""
    shortest = -(-digits // settings.batch_size) // settings.ranks
    return range(every - (epoch - 1) * shortest % every, shortest + 1, every) if every else range(0)


def make_step(network: Network, settings: Settings) -> Union[TrainStep, TrainOneStepCell]:
    """Make the train step that the settings describe."""
    optimizer = make_optimizer(network, settings)
    if settings.gradients == "float64":
        network = Network(seed=0, dtype=ms.float64)
        optimizer = Float64Optimizer(optimizer, network)
    reducer = DataParallel(sync=settings.sync, shard=settings.shard) if settings.ranks > 1 else None
    accumulator = Accumulator(optimizer, settings.accumulate_step, settings.clip_norm, reduction="mean", reducer=reducer,
                              noise_scale=GradientNoiseScale(decay=1) if settings.noise_scale else None)
    if settings.api == "model":
        return TrainOneStepCell(make_forward(network), accumulator, micro_size=settings.micro_size)
    return make_train_step(make_forward(network), accumulator, micro_size=settings.micro_size, strategy=settings.strategy)


def make_optimizer(network: Network, settings: Settings) -> nn.Optimizer:
    """Make the optimizer that the settings name."""
    parameters = network.trainable_params()
    if settings.optimizer == "adam":
        return nn.Adam(parameters, settings.lr)
    momentum = DEFAULT_MOMENTUM[settings.optimizer] if settings.momentum is None else settings.momentum
    if settings.optimizer == "momentum":
        return nn.Momentum(parameters, settings.lr, momentum)
    return nn.SGD(parameters, settings.lr, momentum)


def train_epoch(
    train_step: Union[TrainStep, TrainOneStepCell],
    digits: Digits,
    microbatches: Sequence[np.ndarray],
    on_microbatch: Callable[[int, Tensor], None],
    losses: list[float],
    save_at: range = range(0),
    save: Callable[[], None] = lambda: None,
    ranks: int = 1,
) -> None:
    """Train on the rows of each microbatch in turn and close the last window.

    Args:
        train_step: As from `make_step`.
        digits: Digits to train on.
        microbatches: Rows of `digits`, as from `microbatches_of`.
        on_microbatch: Called after each microbatch: `(digits trained on by all ranks, loss of the microbatch)`.
        losses: Mean losses of the microbatches that are already done, which are skipped; those of the others are appended.
        save_at: Numbers of microbatches of this epoch after which to save.
        save: Called then; `losses` is complete.
        ranks: How many train; the others are taken to be as far as this one.
    """
    # The losses stay on the device until they are needed: reading one here would wait for it.
    unread = []

    def read() -> None:
        losses.extend(float(loss.asnumpy()) for loss in unread)
        unread.clear()

    done = len(losses)

    def took(loss: Tensor) -> None:
        nonlocal done
        done += 1
        unread.append(loss)
        seen = min(ranks * sum(map(len, microbatches[:done])), len(digits) - 1)
        on_microbatch(len(digits) if done == len(microbatches) else seen, loss)
        if done in save_at:
            read()
            save()

    feed = _with_model if isinstance(train_step, TrainOneStepCell) else _in_a_loop
    feed(train_step, digits, microbatches[done:], took)
    read()


Took = Callable[[Tensor], None]


def _in_a_loop(train_step: TrainStep, digits: Digits, microbatches: Sequence[np.ndarray], took: Took) -> None:
    for rows in microbatches:
        took(train_step(Tensor(digits.images[rows]), Tensor(digits.labels[rows])))
    train_step.flush()


def _with_model(cell: TrainOneStepCell, digits: Digits, microbatches: Sequence[np.ndarray], took: Took) -> None:
    if len(microbatches) == 0:  # the epoch was saved after its last microbatch: only the flush is left
        cell.flush()
        return
    dataset = GeneratorDataset(_Source(digits, microbatches), ["images", "labels"], shuffle=False)
    Model(cell).train(1, dataset, callbacks=[_Took(took), FlushCallback()], dataset_sink_mode=False)


class _Source:
    """Microbatches as rows of a dataset."""

    def __init__(self, digits: Digits, microbatches: Sequence[np.ndarray]) -> None:
        self.digits, self.microbatches = digits, microbatches

    def __getitem__(self, i: int) -> tuple[np.ndarray, np.ndarray]:
        rows = self.microbatches[i]
        return self.digits.images[rows], self.digits.labels[rows]

    def __len__(self) -> int:
        return len(self.microbatches)


class _Took(Callback):
    """Pass on the loss of each microbatch, before the last window is closed, as the loop does."""

    def __init__(self, took: Took) -> None:
        super().__init__()
        self.took = took

    def on_train_step_end(self, run_context: RunContext) -> Any:
        self.took(run_context.original_args().net_outputs)


def evaluate(count_correct: Callable[..., Tensor], digits: Digits, settings: Settings) -> float:
    """Return the accuracy on all digits, per cent, counted by a `CountCorrect`; each rank counts its part."""
    correct = [
        count_correct(Tensor(digits.images[rows]), Tensor(digits.labels[rows]))
        for rows in cut(np.arange(len(digits)), TEST_BATCH)[settings.rank::settings.ranks]]
    count = np.array([sum(int(count.asnumpy()) for count in correct)], np.int32)
    return 100 * int(_of_all_ranks(count, settings).sum()) / len(digits)


def _mean_loss(losses: np.ndarray, microbatches: list[np.ndarray], settings: Settings) -> float:
    digits = [len(rows) for rows in microbatches]
    total, count = _of_all_ranks(np.array([losses @ digits, sum(digits)], np.float64), settings).sum(axis=0)
    return float(total / count)


def _of_all_ranks(numbers: np.ndarray, settings: Settings) -> np.ndarray:
    """A row from each rank."""
    return gather(numbers) if settings.ranks > 1 else numbers[None]


@contextmanager
def _mode(settings: Settings) -> Iterator[None]:
    """Run jitted functions op by op in "pynative" mode, by MindSpore's own switch; compile a `Model`'s cell in "graph" mode."""
    before, context = os.environ.get("MS_JIT"), ms.get_context("mode")
    if settings.mode == "pynative":
        os.environ["MS_JIT"] = "0"
    elif settings.api == "model":
        ms.set_context(mode=ms.GRAPH_MODE)
    try:
        yield
    finally:
        ms.set_context(mode=context)
        if before is None:
            os.environ.pop("MS_JIT", None)
        else:
            os.environ["MS_JIT"] = before
