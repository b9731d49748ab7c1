"""Train and test: microbatches in seeded order, dealt out to the ranks, one update per window, the last one of an epoch flushed."""
from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Optional, Union

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn

from ms_accum.accumulator import Accumulator
from ms_accum.batch_size.noise_scale import GradientNoiseScale
from ms_accum.checkpoint import CheckpointError, load_checkpoint, save_checkpoint
from ms_accum.distributed.ranks import gather
from ms_accum.distributed.reducers import DataParallel
from ms_accum.model import TrainOneStepCell
from ms_accum.train_step import TrainStep, make_train_step

from .data import Digits, Mnist
from .feed import FEEDS, in_a_loop
from .network import Network
from .settings import Settings
from .step import CountCorrect, Float64Optimizer, make_forward

TEST_BATCH = 1000
DEFAULT_MOMENTUM = {"sgd": 0.0, "momentum": 0.9}


@dataclass(frozen=True)
class Epoch:
    """What one epoch gave.

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
    """Where a run is saved, and where it goes on from.

    Attributes:
        save: File to save to at the end; None: nowhere.
        every: Microbatches (of a rank) after which it is saved, too; None: only at the end.
        resume: File to go on from; None: from the start.
        resumed: Called when that is loaded: `(epochs done, microbatches done of the next)`.
    """

    save: Optional[Path] = None
    every: Optional[int] = None
    resume: Optional[Path] = None
    resumed: Callable[[int, int], None] = lambda epochs, microbatches: None


@dataclass
class Place:
    """How far a run has come: the epochs that are done, and the losses of the next one's microbatches so far."""

    epochs: list[Epoch] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)

    def as_extra(self, settings: Settings, mnist: Mnist) -> dict:
        """What a checkpoint holds of it."""
        epochs = [{**asdict(epoch), "microbatch_losses": epoch.microbatch_losses.tolist()} for epoch in self.epochs]
        return {"run": _identity(settings, mnist), "epochs": epochs, "losses": list(self.losses)}

    @classmethod
    def of_extra(cls, extra: object, settings: Settings, mnist: Mnist) -> Place:
        """From a checkpoint. Raises CheckpointError if that is one of another run."""
        if not isinstance(extra, dict) or not {"run", "epochs", "losses"} <= extra.keys():
            raise CheckpointError("the checkpoint is none of `ms-accum mnist`; give one that --save wrote")
        for name, value in _identity(settings, mnist).items():
            if extra["run"].get(name) != value:
                raise CheckpointError(f"the checkpoint is of a run with {name} {extra['run'].get(name)}, but this one has {value}; "
                                      "give the same options and digits")
        epochs = [Epoch(**{**epoch, "microbatch_losses": np.array(epoch["microbatch_losses"])}) for epoch in extra["epochs"]]
        if len(epochs) > settings.epochs:
            raise CheckpointError(f"the checkpoint has {len(epochs)} epochs behind it, but this run is of {settings.epochs}; "
                                  "give more --epochs")
        return cls(epochs, extra["losses"])


def _identity(settings: Settings, mnist: Mnist) -> dict:
    """What has to be the same for a run to go on; how many epochs it has may change."""
    run = {name: value for name, value in asdict(settings).items() if name != "epochs"}
    return {**run, "digits": mnist.identity}


def train(
    mnist: Mnist,
    network: Network,
    settings: Settings,
    on_microbatch: OnMicrobatch = lambda *_: None,
    checkpoints: Checkpoints = Checkpoints(),
) -> Iterator[Epoch]:
    """Train `network` in place; yields after each epoch, of a resumed run also those that were done before.

    Args:
        mnist: Digits to train on and to test on.
        network: With its initial weights.
        settings: The run.
        on_microbatch: Called after each microbatch: `(epoch, digits trained on in this epoch by all ranks, loss of the microbatch)`.
        checkpoints: Where to save, and what to resume from.

    Raises:
        CheckpointError: If what is to be resumed is damaged, or of another run.
        OSError: If a checkpoint cannot be written; the one before is still there.
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

    count_correct = CountCorrect(network)
    if settings.mode == "graph":
        count_correct = ms.jit(count_correct)
    for epoch in range(len(place.epochs) + 1, settings.epochs + 1):
        order = np.random.default_rng([settings.seed, epoch]).permutation(len(mnist.train))
        # Dealt out one by one, so that a window of all ranks holds the same digits as one of a single process.
        microbatches = cut(order, settings.batch_size)[settings.rank::settings.ranks]

        if accumulator.noise_scale is not None and not place.losses:
            accumulator.noise_scale.reset()
        start = perf_counter()
        with _mode(settings):
            # At the same microbatches on every rank, or one of them would wait for ever.
            shortest = -(-len(order) // settings.batch_size) // settings.ranks
            every = checkpoints.every
            save_at = range(every - (epoch - 1) * shortest % every, shortest + 1, every) if every else range(0)
            train_epoch(train_step, mnist.train, microbatches, partial(on_microbatch, epoch), place.losses, save_at, save, settings.ranks,
                        FEEDS[settings.api])
        losses, place.losses = np.array(place.losses, np.float64), []
        trained = perf_counter()
        accuracy = evaluate(count_correct, mnist.test, settings)
        tested = perf_counter()

        place.epochs.append(Epoch(
            epoch=epoch,
            loss=_mean_loss(losses, microbatches, settings),
            accuracy=accuracy,
            train_seconds=trained - start,
            test_seconds=tested - trained,
            update_step=int(accumulator.update_step.asnumpy()),
            microbatch_losses=losses,
            noise_scale=accumulator.noise_scale and accumulator.noise_scale.scale(),
        ))
        yield place.epochs[-1]
    if checkpoints.save:
        save()


def make_step(network: Network, settings: Settings) -> Union[TrainStep, TrainOneStepCell]:
    """The train step that the settings describe."""
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
    """The optimizer that the settings name."""
    parameters = network.trainable_params()
    if settings.optimizer == "adam":
        return nn.Adam(parameters, settings.lr)
    momentum = DEFAULT_MOMENTUM[settings.optimizer] if settings.momentum is None else settings.momentum
    if settings.optimizer == "momentum":
        return nn.Momentum(parameters, settings.lr, momentum)
    return nn.SGD(parameters, settings.lr, momentum)


def cut(order: np.ndarray, batch_size: int) -> list[np.ndarray]:
    """`order`, int `(n,)`, in pieces of `batch_size`; the last one may be shorter."""
    return [order[start:start + batch_size] for start in range(0, len(order), batch_size)]


def train_epoch(
    train_step: TrainStep,
    digits: Digits,
    microbatches: list[np.ndarray],
    on_microbatch: Callable[[int, Tensor], None],
    losses: list[float],
    save_at: range = range(0),
    save: Callable[[], None] = lambda: None,
    ranks: int = 1,
    feed: Callable = in_a_loop,
) -> None:
    """Train on the rows of each microbatch in turn and close the last window.

    Args:
        train_step: As from `make_step`.
        digits: Digits to train on.
        microbatches: Rows of `digits`, as from `cut`.
        on_microbatch: Called after each microbatch: `(digits trained on by all ranks, loss of the microbatch)`.
        losses: Mean loss of each microbatch that was trained on before, which are passed over; those of the others are appended.
        save_at: Numbers of microbatches of this epoch after which to save.
        save: Called then; `losses` is complete.
        ranks: How many train; the others are taken to be as far as this one.
        feed: What takes `train_step` through the microbatches, see `feed`.
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

    feed(train_step, digits, microbatches[done:], took)
    read()


def evaluate(count_correct: Callable[..., Tensor], digits: Digits, settings: Settings) -> float:
    """Accuracy on all digits, per cent, counted by a `step.CountCorrect`, compiled or not; each rank counts its part."""
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
    """In "pynative" mode, jitted functions run op by op, by MindSpore's own switch; in "graph" mode, a `Model` compiles its cell."""
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
