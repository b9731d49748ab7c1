"""Report a run: a header, progress, a line for each epoch, all figures as a dict, and the curves."""
from __future__ import annotations

import os
import platform
import sys
from math import isfinite
from time import perf_counter
from typing import TYPE_CHECKING, Any, Optional

import mindspore as ms
import numpy as np
from mindspore import Tensor
from tqdm import tqdm

import ms_accum

from .data import Mnist
from .settings import Settings
from .train import Epoch

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Runs = dict[str, list[Epoch]]

PROGRESS_LINES = 4
# The second run lies on the first where they agree: dashes and crosses leave the first visible.
STYLES = ("o-", "x--")
_API = {"functional": "make_train_step", "model": "mindspore.train.Model"}


def versions() -> dict[str, str]:
    """Return the versions of what a run's figures depend on."""
    packages = {package.__name__: package.__version__ for package in (ms_accum, ms, np)}
    return {**packages, "python": platform.python_version()}


def header(settings: Settings, mnist: Mnist, source: str, device: str) -> str:
    """Format versions, device, data, effective batch and optimizer, a line each."""
    names = ", ".join(f"{name} {version}" for name, version in versions().items())
    clipped = "" if settings.clip_norm is None else f", clipped to norm {settings.clip_norm:g}"
    cut = "" if settings.micro_size == 1 else f", each microbatch in {settings.micro_size:,} pieces"
    strategy = "" if settings.strategy == "fused" else f", strategy {settings.strategy}"
    shards = " in shards" if settings.shard else ""
    exchange = "" if settings.ranks == 1 else f", gradients exchanged each {settings.sync}{shards}"
    return "\n".join((
        f"versions   {names}",
        f"device     {device}, {os.cpu_count()} CPU cores, {settings.mode} mode, {_API[settings.api]}, "
        f"gradients in {settings.gradients}",
        f"data       {source}: {len(mnist.train):,} digits to train on, {len(mnist.test):,} to test on",
        f"batch      {batch(settings)}{cut}{strategy}{exchange}",
        f"optimizer  {settings.optimizer}, learning rate {settings.lr:g}{clipped}, seed {settings.seed}",
    ))


def batch(settings: Settings) -> str:
    """Format the effective batch and how it is made up."""
    ranks = "" if settings.ranks == 1 else f" x {settings.ranks} ranks"
    pieces = f"{settings.batch_size:,} x {settings.accumulate_step:,}{ranks}"
    return f"{pieces} = {settings.effective_batch:,} digits an update"


def epoch_line(epoch: Epoch, settings: Settings) -> str:
    """Format the figures of one epoch."""
    noise = "" if epoch.noise_scale is None else f"  noise scale {epoch.noise_scale:,.0f} digits"
    return (f"epoch {epoch.epoch}/{settings.epochs}  loss {epoch.loss:.4f}  accuracy {epoch.accuracy:.2f} %  "
            f"train {epoch.train_seconds:.2f} s  test {epoch.test_seconds:.2f} s{noise}")


def critical_batch(settings: Settings, epochs: list[Epoch]) -> str:
    """Say what the noise scale of the last epoch means for the batch."""
    critical, used = epochs[-1].noise_scale, settings.effective_batch
    if not isfinite(critical):
        return "critical batch size unknown: noise hides the last epoch's gradient; use more microbatches"
    verdict = "a larger batch saves updates" if critical > used else "a smaller batch learns as much from an update"
    ratio = f"{critical / used:.2g} x the {used:,} of an update"
    return f"critical batch size about {critical:,.0f} digits, {ratio}: {verdict}"


def comparison(settings: Settings, accumulated: list[Epoch], undivided: list[Epoch], difference: float) -> str:
    """Format both accuracies and the largest difference between the parameters."""
    return "\n".join((
        f"accumulated  {batch(settings)}: accuracy {accumulated[-1].accuracy:.2f} %",
        f"undivided    {batch(settings.undivided())}: accuracy {undivided[-1].accuracy:.2f} %",
        f"largest parameter difference {difference:.3g}",
    ))


def figures(settings: Settings, epochs: list[Epoch]) -> dict[str, Any]:
    """Return all figures of a training: seconds are sums over its epochs, the others those after the last epoch."""
    lines = [{name: value for name, value in vars(epoch).items() if name != "microbatch_losses"} for epoch in epochs]
    chosen = (
        "batch_size", "accumulate_step", "micro_size", "api", "strategy", "ranks", "sync", "shard", "effective_batch")
    return {
        **{name: lines[-1][name] for name in ("accuracy", "loss", "update_step", "noise_scale")},
        **{name: sum(line[name] for line in lines) for name in ("train_seconds", "test_seconds")},
        **{name: getattr(settings, name) for name in chosen},
        "epochs": lines,
    }


class Progress:
    """Show an epoch's progress on stdout, with digits/s and the loss of a recent microbatch.

    On a terminal it is a bar, elsewhere `PROGRESS_LINES` - 1 lines before the epoch's own.
    """

    def __init__(self, settings: Settings, mnist: Mnist) -> None:
        self.epochs, self.digits = settings.epochs, len(mnist.train)
        self.show = self._draw if sys.stdout.isatty() else self._print
        self.bar: Optional[tqdm] = None
        self.lines = self.first = 0
        self.start = 0.0

    def __call__(self, epoch: int, done: int, loss: Tensor) -> None:
        self.show(f"epoch {epoch}/{self.epochs}", done, loss)
        if done == self.digits:
            self.close()

    def _draw(self, epoch: str, done: int, loss: Tensor) -> None:
        if self.bar is None:
            self.bar = tqdm(total=self.digits, desc=epoch, unit=" digits", unit_scale=True, leave=False,
                            dynamic_ncols=True, file=sys.stdout)
        # Reading the loss waits for the device, so it is read only when the bar is drawn.
        if self.bar.update(done - self.bar.n):
            self.bar.set_postfix(loss=f"{float(loss.asnumpy()):.3f}", refresh=False)

    def _print(self, epoch: str, done: int, loss: Tensor) -> None:
        if self.first == 0:  # the first microbatch may include compiling, so the rate counts from its end
            self.first, self.start = done, perf_counter()
        lines = PROGRESS_LINES * done // self.digits
        if self.lines < lines < PROGRESS_LINES:
            rate = (done - self.first) / (perf_counter() - self.start)
            print(f"{epoch}  {done:,} digits  loss {float(loss.asnumpy()):.4f}  {rate:,.0f} digits/s", flush=True)
            self.lines = lines

    def close(self) -> None:
        """Remove the bar, and start again with the next epoch."""
        if self.bar is not None:
            self.bar.close()
        self.bar, self.lines, self.first = None, 0, 0


def plot(runs: Runs, effective_batch: int) -> Figure:
    """Draw one or two runs over the epochs: loss and test accuracy; of the first also the noise scale, if measured."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    first = next(iter(runs.values()))
    panels = 2 if first[0].noise_scale is None else 3
    # A Figure of its own, not pyplot: no global state, and no display is needed.
    figure = Figure(figsize=(5 * panels, 4), layout="constrained")
    loss_axes, accuracy_axes, *noise_axes = figure.subplots(1, panels)
    for number, (name, epochs) in enumerate(runs.items()):
        look = {"color": f"C{number}", "label": name}
        losses = np.concatenate([epoch.microbatch_losses for epoch in epochs])
        loss_axes.plot(np.linspace(0, len(epochs), len(losses)), losses, color=look["color"], alpha=0.25, linewidth=0.5)
        ends = np.array([epoch.epoch for epoch in epochs])
        loss_axes.plot(ends - 0.5, [epoch.loss for epoch in epochs], STYLES[number], **look)
        accuracy_axes.plot(ends, [epoch.accuracy for epoch in epochs], STYLES[number], **look)
    loss_axes.set(ylabel="loss", title="Cross entropy: each microbatch, and mean of an epoch", ylim=(0, None))
    accuracy_axes.set(ylabel="accuracy in %", title="Test digits labelled correctly")
    for axes in noise_axes:
        _draw_noise_scale(axes, first, effective_batch)
    for axes in (loss_axes, accuracy_axes, *noise_axes):
        axes.set_xlabel("epochs")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(alpha=0.3)
        axes.legend()
    return figure


def _draw_noise_scale(axes: Axes, epochs: list[Epoch], effective_batch: int) -> None:
    axes.plot([epoch.epoch - 0.5 for epoch in epochs], [epoch.noise_scale for epoch in epochs], STYLES[0], color="C2",
              label="critical batch size (noise scale)")
    axes.axhline(effective_batch, color="C7", linestyle=":", label=f"an update: {effective_batch:,} digits")
    axes.set(ylabel="digits", yscale="log", title="How large a batch is worth it")
