"""Report a run: a header, progress, a line for each epoch, all figures as a dict, and the curves."""
from __future__ import annotations

import os
import platform
import sys
from math import isfinite, isnan
from time import perf_counter
from typing import TYPE_CHECKING, Any, Optional

import mindspore as ms
import numpy as np
from mindspore import Tensor
from tqdm import tqdm

import ms_accum
from ms_accum.accumulator import Accumulator

from .train import Epoch, Task

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Runs = list[tuple[Task, list[Epoch]]]

PROGRESS_LINES = 4
# The second run lies on the first where they agree: dashes and crosses leave the first visible.
STYLES = ("o-", "x--")
_API = {"functional": "make_train_step", "model": "mindspore.train.Model"}


def versions() -> dict[str, str]:
    """Return the versions of what a run's figures depend on."""
    packages = {package.__name__: package.__version__ for package in (ms_accum, ms, np)}
    return {**packages, "python": platform.python_version()}


def header(task: Task, device: str) -> str:
    """Format versions, device, data, effective batch and optimizer, a line each."""
    settings = task.settings
    names = ", ".join(f"{name} {version}" for name, version in versions().items())
    clipped = "" if settings.clip_norm is None else f", clipped to norm {settings.clip_norm:g}"
    cut = "" if settings.pieces == 1 else f", each microbatch in {settings.pieces:,} pieces"
    shards = " in shards" if settings.shard else ""
    often = "microbatch in a node and each window between nodes" if settings.sync == "node" else settings.sync
    exchange = "" if settings.ranks == 1 else f", gradients exchanged each {often}{shards}"
    return "\n".join((
        f"versions   {names}",
        f"device     {device}, {os.cpu_count()} CPU cores, {settings.mode} mode, {_API[settings.api]}, "
        f"gradients in {settings.gradients}",
        f"data       {task.describe_data()}",
        f"batch      {task.describe_batch()}{cut}{exchange}",
        f"optimizer  {settings.optimizer}, learning rate {settings.lr:g}{clipped}, seed {settings.seed}",
    ))


def epoch_line(epoch: Epoch, task: Task) -> str:
    """Format the figures of one epoch."""
    noise = "" if epoch.noise_scale is None else f"  noise scale {epoch.noise_scale:,.0f} {task.words.unit}"
    window = "" if epoch.window_length is None else f"  window {epoch.window_length}"
    return (f"epoch {epoch.epoch}/{task.settings.epochs}  loss {epoch.loss:.4f}  {_score(epoch, task)}  "
            f"train {epoch.train_seconds:.2f} s  test {epoch.test_seconds:.2f} s{noise}{window}")


def _score(epoch: Epoch, task: Task) -> str:
    return task.words.score_format.format(epoch.score)


def critical_batch(task: Task, epochs: list[Epoch]) -> str:
    """Say what the last noise scale means for the batch."""
    critical, used = epochs[-1].noise_scale, task.update_size(epochs)
    if isnan(critical):
        return "critical batch size unknown: no window held more than one microbatch, so nothing was compared"
    if not isfinite(critical):
        return "critical batch size unknown: noise hides the last epoch's gradient; use more microbatches"
    verdict = "a larger batch saves updates" if critical > used else "a smaller batch learns as much from an update"
    ratio = f"{critical / used:.2g} x the {used:,} of an update"
    return f"critical batch size about {critical:,.0f} {task.words.unit}, {ratio}: {verdict}"


def comparison(runs: Runs, difference: float) -> str:
    """Format the scores of two runs and the largest difference between the parameters."""
    (task, epochs), (_, others) = runs
    width = max(len(task.label) for task, _ in runs)
    return "\n".join((
        *(f"{task.label:<{width}}  {task.describe_batch()}: {_score(epochs[-1], task)}" for task, epochs in runs),
        *task.describe_difference(epochs[-1].score, others[-1].score),
        f"largest parameter difference {difference:.3g}",
    ))


def figures(task: Task, epochs: list[Epoch]) -> dict[str, Any]:
    """Return all figures of a training: seconds are sums over its epochs, the others those after the last epoch."""
    settings, score = task.settings, task.words.score
    lines = [{score if name == "score" else name: value for name, value in vars(epoch).items()
              if name != "microbatch_losses"} for epoch in epochs]
    chosen = (
        "batch_size", "accumulate_step", "pieces", "api", "ranks", "sync", "shard", "ranks_per_node", "effective_batch")
    return {
        **{name: lines[-1][name] for name in (score, "loss", "update_step", "noise_scale")},
        **{name: sum(line[name] for line in lines) for name in ("train_seconds", "test_seconds")},
        **{name: getattr(settings, name) for name in chosen},
        "epochs": lines,
    }


class Progress:
    """Show progress on stdout, with units/s, the loss of a recent microbatch and the length of an adaptive window.

    On a terminal it is a bar, elsewhere `PROGRESS_LINES` - 1 lines before the epoch's own.
    """

    def __init__(self, task: Task) -> None:
        self.epochs, self.size, self.unit = task.settings.epochs, task.data.size, task.words.unit
        self.adaptive = task.settings.adaptive
        self.show = self._draw if sys.stdout.isatty() else self._print
        self.bar: Optional[tqdm] = None
        self.lines = self.first = 0
        self.start = 0.0

    def __call__(self, accumulator: Accumulator, epoch: int, done: int, loss: Tensor) -> None:
        self.show(accumulator, f"epoch {epoch}/{self.epochs}", done, loss)
        if done == self.size:
            self.close()

    def _draw(self, accumulator: Accumulator, epoch: str, done: int, loss: Tensor) -> None:
        if self.bar is None:
            self.bar = tqdm(total=self.size, desc=epoch, unit=f" {self.unit}", unit_scale=True, leave=False,
                            dynamic_ncols=True, file=sys.stdout)
        # Reading the loss waits for the device, so it is read only when the bar is drawn.
        if self.bar.update(done - self.bar.n):
            window = {"window": accumulator.window.length} if self.adaptive else {}
            self.bar.set_postfix(loss=f"{float(loss.asnumpy()):.3f}", **window, refresh=False)

    def _print(self, accumulator: Accumulator, epoch: str, done: int, loss: Tensor) -> None:
        if self.first == 0:  # the first microbatch may include compiling, so the rate counts from its end
            self.first, self.start = done, perf_counter()
        lines = PROGRESS_LINES * done // self.size
        if self.lines < lines < PROGRESS_LINES:
            rate = (done - self.first) / (perf_counter() - self.start)
            speed = f"  {rate:,.0f} {self.unit}/s" if rate else ""
            window = f"  window {accumulator.window.length}" if self.adaptive else ""
            print(f"{epoch}  {done:,} {self.unit}  loss {float(loss.asnumpy()):.4f}{window}{speed}",
                  flush=True)
            self.lines = lines

    def close(self) -> None:
        """Remove the bar, and start again with the next epoch."""
        if self.bar is not None:
            self.bar.close()
        self.bar, self.lines, self.first = None, 0, 0


def plot(runs: Runs) -> Figure:
    """Draw one or two runs over the epochs: loss and test score; of the first also the noise scale, if measured."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    task, first = runs[0]
    panels = 2 if first[0].noise_scale is None else 3
    # A Figure of its own, not pyplot: no global state, and no display is needed.
    figure = Figure(figsize=(5 * panels, 4), layout="constrained")
    loss_axes, score_axes, *noise_axes = figure.subplots(1, panels)
    for number, (run, epochs) in enumerate(runs):
        look = {"color": f"C{number}", "label": run.label}
        losses = np.concatenate([epoch.microbatch_losses for epoch in epochs])
        loss_axes.plot(np.linspace(0, len(epochs), len(losses)), losses, color=look["color"], alpha=0.25, linewidth=0.5)
        ends = np.array([epoch.epoch for epoch in epochs])
        loss_axes.plot(ends - 0.5, [epoch.loss for epoch in epochs], STYLES[number], **look)
        score_axes.plot(ends, [epoch.score for epoch in epochs], STYLES[number], **look)
    loss_axes.set(ylabel=task.words.loss_axis, title=task.words.loss_title, ylim=(0, None))
    score_axes.set(ylabel=task.words.score_axis, title=task.words.score_title)
    for axes in noise_axes:
        _draw_noise_scale(axes, task, first)
    for axes in (loss_axes, score_axes, *noise_axes):
        axes.set_xlabel("epochs")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(alpha=0.3)
        axes.legend()
    return figure


def _draw_noise_scale(axes: Axes, task: Task, epochs: list[Epoch]) -> None:
    axes.plot([epoch.epoch - 0.5 for epoch in epochs], [epoch.noise_scale for epoch in epochs], STYLES[0], color="C2",
              label="critical batch size (noise scale)")
    update, unit = task.update_size(epochs), task.words.unit
    axes.axhline(update, color="C7", linestyle=":", label=f"an update: {update:,} {unit}")
    axes.set(ylabel=unit, yscale="log", title="How large a batch is worth it")
