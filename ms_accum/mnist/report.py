"""What a run says: a header, progress, one line for each epoch, and every figure as a dict."""
from __future__ import annotations

import os
import platform
import sys
from dataclasses import asdict
from math import isfinite
from time import perf_counter
from typing import Optional, Union

import mindspore as ms
import numpy as np
from mindspore import Tensor
from tqdm import tqdm

import ms_accum

from .data import Mnist
from .settings import Settings
from .train import Epoch

PROGRESS_LINES = 4
_API = {"functional": "make_train_step", "model": "mindspore.train.Model"}


def versions() -> dict[str, str]:
    """Versions of what a run's figures depend on."""
    return {
        "ms_accum": ms_accum.__version__,
        "mindspore": ms.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
    }


def header(settings: Settings, mnist: Mnist, source: str, device: str) -> str:
    """Versions, device, data and effective batch, a line each."""
    names = ", ".join(f"{name} {version}" for name, version in versions().items())
    clipped = "" if settings.clip_norm is None else f", clipped to norm {settings.clip_norm:g}"
    source = source.encode(errors="backslashreplace").decode()  # a folder's name need not be UTF-8, what is printed has to be
    return "\n".join((
        f"versions   {names}",
        f"device     {device}, {os.cpu_count()} CPU cores, {settings.mode} mode, {_API[settings.api]}, gradients in {settings.gradients}",
        f"data       {source}: {len(mnist.train):,} digits to train on, {len(mnist.test):,} to test on",
        f"batch      {batch(settings)}{_cut(settings)}",
        f"optimizer  {settings.optimizer}, learning rate {settings.lr:g}{clipped}, seed {settings.seed}",
    ))


def _cut(settings: Settings) -> str:
    cut = "" if settings.micro_size == 1 else f", each microbatch in {settings.micro_size:,} pieces"
    strategy = "" if settings.strategy == "fused" else f", strategy {settings.strategy}"
    shards = " in shards" if settings.shard else ""
    return cut + strategy + ("" if settings.ranks == 1 else f", gradients exchanged each {settings.sync}{shards}")


def batch(settings: Settings) -> str:
    """The effective batch and how it is made up."""
    ranks = "" if settings.ranks == 1 else f" x {settings.ranks} ranks"
    return f"{settings.batch_size:,} x {settings.accumulate_step:,}{ranks} = {settings.effective_batch:,} digits an update"


def epoch_line(epoch: Epoch, settings: Settings) -> str:
    """The figures of one epoch."""
    noise = "" if epoch.noise_scale is None else f"  noise scale {epoch.noise_scale:,.0f} digits"
    return (f"epoch {epoch.epoch}/{settings.epochs}  loss {epoch.loss:.4f}  accuracy {epoch.accuracy:.2f} %  "
            f"train {epoch.train_seconds:.2f} s  test {epoch.test_seconds:.2f} s{noise}")


def critical_batch(settings: Settings, epochs: list[Epoch]) -> str:
    """What the noise scale of the last epoch says about the batch."""
    critical, used = epochs[-1].noise_scale, settings.effective_batch
    if not isfinite(critical):
        return "critical batch size unknown: the gradient of the last epoch drowns in noise; give more microbatches"
    verdict = "a larger batch saves updates" if critical > used else "a smaller batch learns as much from an update"
    return f"critical batch size about {critical:,.0f} digits, {critical / used:.2g} x the {used:,} of an update: {verdict}"


def comparison(settings: Settings, accumulated: list[Epoch], undivided: list[Epoch], difference: float) -> str:
    """Both accuracies and the largest difference between the parameters."""
    return "\n".join((
        f"accumulated  {batch(settings)}: accuracy {accumulated[-1].accuracy:.2f} %",
        f"undivided    {batch(settings.undivided())}: accuracy {undivided[-1].accuracy:.2f} %",
        f"largest parameter difference {difference:.3g}",
    ))


def figures(settings: Settings, epochs: list[Epoch]) -> dict:
    """What a training gave; seconds are sums over its epochs, accuracy in per cent is that after the last."""
    return {
        "accuracy": epochs[-1].accuracy,
        "loss": epochs[-1].loss,
        "train_seconds": sum(epoch.train_seconds for epoch in epochs),
        "test_seconds": sum(epoch.test_seconds for epoch in epochs),
        "update_step": epochs[-1].update_step,
        "noise_scale": epochs[-1].noise_scale,
        "batch_size": settings.batch_size,
        "accumulate_step": settings.accumulate_step,
        "micro_size": settings.micro_size,
        "api": settings.api,
        "strategy": settings.strategy,
        "ranks": settings.ranks,
        "sync": settings.sync,
        "shard": settings.shard,
        "effective_batch": settings.effective_batch,
        "epochs": [_without_curve(epoch) for epoch in epochs],
    }


def as_json(value: object) -> object:
    """`value` with None for every float that JSON cannot hold: NaN and infinity."""
    if isinstance(value, dict):
        return {key: as_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [as_json(item) for item in value]
    return None if isinstance(value, float) and not isfinite(value) else value


def _without_curve(epoch: Epoch) -> dict:
    values = asdict(epoch)
    del values["microbatch_losses"]
    return values


class Bar:
    """Progress on a terminal: a bar for each epoch, with the loss of the newest microbatch and digits/s."""

    def __init__(self, settings: Settings, mnist: Mnist) -> None:
        self.epochs = settings.epochs
        self.digits = len(mnist.train)
        self.bar: Optional[tqdm] = None

    def __call__(self, epoch: int, done: int, loss: Tensor) -> None:
        if self.bar is None:
            self.bar = tqdm(total=self.digits, desc=f"epoch {epoch}/{self.epochs}", unit=" digits", unit_scale=True,
                            leave=False, dynamic_ncols=True, file=sys.stdout)
        # Reading the loss waits for the device, so it is only done when the bar is drawn.
        if self.bar.update(done - self.bar.n):
            self.bar.set_postfix(loss=f"{float(loss.asnumpy()):.3f}", refresh=False)
        if done == self.digits:
            self.close()

    def close(self) -> None:
        """Take the bar away; the next epoch draws its own."""
        if self.bar is not None:
            self.bar.close()
            self.bar = None


class Lines:
    """Progress where there is no terminal: `PROGRESS_LINES` - 1 lines an epoch; its own line is the last."""

    def __init__(self, settings: Settings, mnist: Mnist) -> None:
        self.epochs = settings.epochs
        self.digits = len(mnist.train)
        self.parts = 0
        self.first = 0
        self.start = 0.0

    def __call__(self, epoch: int, done: int, loss: Tensor) -> None:
        if self.first == 0:
            # The first microbatch may be compiled first: the rate counts from its end.
            self.first, self.start = done, perf_counter()
        parts = PROGRESS_LINES * done // self.digits
        if self.parts < parts < PROGRESS_LINES:
            value = float(loss.asnumpy())
            rate = (done - self.first) / (perf_counter() - self.start)
            print(f"epoch {epoch}/{self.epochs}  {done:,} digits  loss {value:.4f}  {rate:,.0f} digits/s", flush=True)
            self.parts = parts
        if done == self.digits:
            self.close()

    def close(self) -> None:
        """Begin anew with the next epoch."""
        self.parts = 0
        self.first = 0


def progress(settings: Settings, mnist: Mnist) -> Union[Bar, Lines]:
    """What shows progress where stdout goes: called as `(epoch, digits done, loss)`, closed with `close()`."""
    return Bar(settings, mnist) if sys.stdout.isatty() else Lines(settings, mnist)
