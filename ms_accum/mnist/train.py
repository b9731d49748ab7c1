"""Train on microbatches in seeded order, dealt out to the ranks; flush the last window of each epoch, and test."""
from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Optional, Union

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn
from mindspore.dataset import GeneratorDataset
from mindspore.train import LambdaCallback, Model

from ms_accum.accumulator import Accumulator
from ms_accum.batch_size.noise_scale import GradientNoiseScale
from ms_accum.callbacks import FlushCallback
from ms_accum.check.isolation import in_mode
from ms_accum.checkpoint import CheckpointError, load_checkpoint, save_checkpoint
from ms_accum.compiled import CompiledStep
from ms_accum.distributed.ranks import gather
from ms_accum.distributed.reducers import DataParallel
from ms_accum.model import TrainOneStepCell
from ms_accum.train_step import make_train_step

from .data import Digits, Mnist
from .network import CountCorrect, Float64Optimizer, Network, make_forward
from .settings import Settings

TEST_BATCH = 1000
AnyStep = Union[CompiledStep, TrainOneStepCell]


@dataclass(frozen=True)
class Epoch:
    """The results of one epoch."""

    epoch: int  # from 1
    loss: float  # mean over the digits of all ranks, each at the moment it was trained on
    accuracy: float  # on the test digits, in per cent
    train_seconds: float  # wall time, including compilation
    test_seconds: float
    update_step: int  # updates since the start of the run
    microbatch_losses: np.ndarray = field(repr=False)  # mean loss of each microbatch of this rank, float64
    noise_scale: Optional[float] = None  # over the epoch, in digits; None if it is not measured


@dataclass(frozen=True)
class Checkpoints:
    """Where a run is saved, and where it continues from."""

    save: Optional[Path] = None  # file to save to at the end
    every: Optional[int] = None  # also save after this many microbatches of a rank
    resume: Optional[Path] = None  # file to continue from
    resumed: Callable[[int, int], None] = lambda epochs, microbatches: None  # called with what is done


def train(mnist: Mnist, network: Network, settings: Settings,
          on_microbatch: Callable[[int, int, Tensor], None] = lambda *_: None,
          checkpoints: Checkpoints = Checkpoints()) -> Iterator[Epoch]:
    """Train `network` in place; yield each epoch, in a resumed run also those that were done before.

    `on_microbatch(epoch, digits that all ranks trained on in it, loss)` is called after each microbatch.
    CheckpointError if the checkpoint to resume is damaged or from another run; OSError if one cannot be written: the
    old one is still there.
    """
    train_step = make_step(network, settings)
    accumulator = train_step.accumulator
    epochs: list[Epoch] = []
    losses: list[float] = []  # of the open epoch's microbatches
    if checkpoints.resume:
        epochs, losses = _done(load_checkpoint(checkpoints.resume, network, accumulator), settings, mnist)
        checkpoints.resumed(len(epochs), len(losses))
    yield from epochs

    def save() -> None:
        done = [{**vars(epoch), "microbatch_losses": epoch.microbatch_losses.tolist()} for epoch in epochs]
        extra = {"run": _identity(settings, mnist), "epochs": done, "losses": losses}
        save_checkpoint(checkpoints.save, network, accumulator, extra=extra)

    count_correct = ms.jit(CountCorrect(network)) if settings.mode == "graph" else CountCorrect(network)
    for epoch in range(len(epochs) + 1, settings.epochs + 1):
        microbatches = microbatches_of(epoch, len(mnist.train), settings)
        save_at = _saves(epoch, len(mnist.train), settings, checkpoints.every)
        if accumulator.noise_scale is not None and not losses:
            accumulator.noise_scale.reset()
        start = perf_counter()
        with _mode(settings):
            train_epoch(train_step, mnist.train, microbatches, partial(on_microbatch, epoch), losses, save_at, save,
                        settings.ranks)
        trained = perf_counter()
        accuracy = evaluate(count_correct, mnist.test, settings)
        epochs.append(Epoch(
            epoch=epoch,
            loss=_mean_loss(np.array(losses), microbatches, settings),
            accuracy=accuracy,
            train_seconds=trained - start,
            test_seconds=perf_counter() - trained,
            update_step=int(accumulator.update_step.asnumpy()),
            microbatch_losses=np.array(losses),
            noise_scale=accumulator.noise_scale and accumulator.noise_scale.scale(),
        ))
        losses.clear()
        yield epochs[-1]
    if checkpoints.save:
        save()


def _identity(settings: Settings, mnist: Mnist) -> dict:
    """Return what must not change when a run is resumed; the number of epochs may."""
    run = {**asdict(settings), "digits": mnist.identity}
    del run["epochs"]
    return run


def _done(extra: object, settings: Settings, mnist: Mnist) -> tuple[list[Epoch], list[float]]:
    """Return the epochs and the open epoch's losses in a checkpoint. CheckpointError if it is from another run."""
    if not isinstance(extra, dict) or not {"run", "epochs", "losses"} <= extra.keys():
        raise CheckpointError("the checkpoint is not from `ms-accum mnist`; give one that --save wrote")
    for name, value in _identity(settings, mnist).items():
        if extra["run"].get(name) != value:
            raise CheckpointError(f"the checkpoint is from a run with {name} {extra['run'].get(name)}, but this run "
                                  f"has {value}; give the same options and digits")
    if len(extra["epochs"]) > settings.epochs:
        raise CheckpointError(f"the checkpoint holds {len(extra['epochs'])} epochs, but this run has only "
                              f"{settings.epochs}; give more --epochs")
    epochs = [Epoch(**{**epoch, "microbatch_losses": np.array(epoch["microbatch_losses"])})
              for epoch in extra["epochs"]]
    return epochs, extra["losses"]


def microbatches_of(epoch: int, digits: int, settings: Settings) -> list[np.ndarray]:
    """Return the rows of each of this rank's microbatches in an epoch, in seeded order; the last one may be smaller.

    They are dealt out one by one, so a window of all ranks holds the same digits as a window of a single process.
    """
    order = np.random.default_rng([settings.seed, epoch]).permutation(digits)
    return cut(order, settings.batch_size)[settings.rank::settings.ranks]


def cut(order: np.ndarray, batch_size: int) -> list[np.ndarray]:
    """Cut `order`, int `(n,)`, into pieces of `batch_size`; the last one may be smaller."""
    return [order[start:start + batch_size] for start in range(0, len(order), batch_size)]


def _saves(epoch: int, digits: int, settings: Settings, every: Optional[int]) -> range:
    """Return after which microbatches of this epoch to save: the same on every rank, or one would wait forever."""
    fewest = -(-digits // settings.batch_size) // settings.ranks
    return range(every - (epoch - 1) * fewest % every, fewest + 1, every) if every else range(0)


def make_step(network: Network, settings: Settings) -> AnyStep:
    """Make the train step that the settings describe."""
    optimizer = make_optimizer(network, settings)
    if settings.gradients == "float64":
        network = Network(seed=0, dtype=ms.float64)
        optimizer = Float64Optimizer(optimizer, network)
    reducer = DataParallel(sync=settings.sync, shard=settings.shard) if settings.ranks > 1 else None
    noise_scale = GradientNoiseScale(decay=1) if settings.noise_scale else None
    accumulator = Accumulator(optimizer, settings.accumulate_step, settings.clip_norm, reduction="mean",
                              reducer=reducer, noise_scale=noise_scale)
    make = TrainOneStepCell if settings.api == "model" else partial(make_train_step, strategy=settings.strategy)
    return make(make_forward(network), accumulator, micro_size=settings.micro_size)


def make_optimizer(network: Network, settings: Settings) -> nn.Optimizer:
    """Make the optimizer that the settings name."""
    parameters, lr, momentum = network.trainable_params(), settings.lr, settings.momentum
    if settings.optimizer == "adam":
        return nn.Adam(parameters, lr)
    if settings.optimizer == "momentum":
        return nn.Momentum(parameters, lr, 0.9 if momentum is None else momentum)
    return nn.SGD(parameters, lr, momentum or 0.0)


def train_epoch(train_step: AnyStep, digits: Digits, microbatches: Sequence[np.ndarray],
                on_microbatch: Callable[[int, Tensor], None], losses: list[float], save_at: range = range(0),
                save: Callable[[], None] = lambda: None, ranks: int = 1) -> None:
    """Train on the rows of each microbatch in turn and close the last window.

    `losses` holds those of the microbatches that are already done and are skipped; those of the others are appended.
    After each, `on_microbatch(digits trained on by all ranks, loss)` is called: other ranks are assumed to be as far as
    this one. After the microbatches with the numbers `save_at`, `save()` is called, and `losses` is complete then.
    """
    unread = []  # losses stay on the device until they are needed, because reading one waits for it

    def read() -> None:
        losses.extend(float(loss.asnumpy()) for loss in unread)
        unread.clear()

    def took(loss: Tensor) -> None:
        unread.append(loss)
        done = len(losses) + len(unread)
        seen = min(ranks * sum(map(len, microbatches[:done])), len(digits) - 1)
        on_microbatch(len(digits) if done == len(microbatches) else seen, loss)
        if done in save_at:
            read()
            save()

    feed = _with_model if isinstance(train_step, TrainOneStepCell) else _in_a_loop
    feed(train_step, ((digits.images[rows], digits.labels[rows]) for rows in microbatches[len(losses):]), took)
    read()


def _in_a_loop(train_step: CompiledStep, batches: Iterable[tuple], took: Callable[[Tensor], None]) -> None:
    for images, labels in batches:
        took(train_step(Tensor(images), Tensor(labels)))
    train_step.flush()


def _with_model(cell: TrainOneStepCell, batches: Iterable[tuple], took: Callable[[Tensor], None]) -> None:
    rows = list(batches)
    if not rows:  # the epoch was saved after its last microbatch: only the flush is left
        cell.flush()
        return
    dataset = GeneratorDataset(rows, ["images", "labels"], shuffle=False)
    # As in the loop, the loss is taken before the last window is flushed.
    losses = LambdaCallback(on_train_step_end=lambda run_context: took(run_context.original_args().net_outputs))
    Model(cell).train(1, dataset, callbacks=[losses, FlushCallback()], dataset_sink_mode=False)


def evaluate(count_correct: Callable[..., Tensor], digits: Digits, settings: Settings) -> float:
    """Return the accuracy on all digits, in per cent, counted by a `CountCorrect`; each rank counts its part."""
    correct = [count_correct(Tensor(digits.images[rows]), Tensor(digits.labels[rows]))
               for rows in cut(np.arange(len(digits)), TEST_BATCH)[settings.rank::settings.ranks]]
    count = np.array([sum(int(count.asnumpy()) for count in correct)], np.int32)
    return 100 * int(_of_all_ranks(count, settings).sum()) / len(digits)


def _mean_loss(losses: np.ndarray, microbatches: list[np.ndarray], settings: Settings) -> float:
    digits = [len(rows) for rows in microbatches]
    total, count = _of_all_ranks(np.array([losses @ digits, sum(digits)], np.float64), settings).sum(axis=0)
    return float(total / count)


def _of_all_ranks(numbers: np.ndarray, settings: Settings) -> np.ndarray:
    """Return a row from each rank."""
    return gather(numbers) if settings.ranks > 1 else numbers[None]


def _mode(settings: Settings) -> AbstractContextManager:
    if settings.mode == "pynative":
        return in_mode(ms.PYNATIVE_MODE)
    return in_mode(ms.GRAPH_MODE) if settings.api == "model" else nullcontext()
