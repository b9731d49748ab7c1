"""The curves of a run: loss and accuracy, and the noise scale if it was measured."""
from __future__ import annotations

from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from ..cli.files import whole
from .train import Epoch

# The second run lies on the first where they agree: dashes and crosses leave it visible.
STYLES = ("o-", "x--")


def write_plot(path: Path, runs: dict[str, list[Epoch]], effective_batch: int) -> None:
    """Draw one or two runs, by name, over the epochs; writes a PNG.

    Args:
        path: The file.
        runs: Their loss and test accuracy are drawn; of the first one also the noise scale, if it was measured.
        effective_batch: Digits in an update.
    """
    epochs = next(iter(runs.values()))
    panels = 2 if epochs[0].noise_scale is None else 3
    # A Figure of its own, not pyplot: no global state, and no display is looked for.
    figure = Figure(figsize=(5 * panels, 4), layout="constrained")
    loss_axes, accuracy_axes, *noise_axes = figure.subplots(1, panels)
    for number, (name, epochs) in enumerate(runs.items()):
        _draw_loss(loss_axes, f"C{number}", STYLES[number], name, epochs)
        _draw_accuracy(accuracy_axes, f"C{number}", STYLES[number], name, epochs)
    loss_axes.set(ylabel="loss", title="Cross entropy: each microbatch, and mean of an epoch", ylim=(0, None))
    accuracy_axes.set(ylabel="accuracy in %", title="Test digits labelled correctly")
    for axes in noise_axes:
        _draw_noise_scale(axes, epochs, effective_batch)
    for axes in (loss_axes, accuracy_axes, *noise_axes):
        axes.set_xlabel("epochs")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(alpha=0.3)
        axes.legend()
    with whole(path) as part:
        figure.savefig(part, format="png", dpi=120)


def _draw_loss(axes: Axes, colour: str, style: str, name: str, epochs: list[Epoch]) -> None:
    losses = np.concatenate([epoch.microbatch_losses for epoch in epochs])
    axes.plot(np.linspace(0, len(epochs), len(losses)), losses, color=colour, alpha=0.25, linewidth=0.5)
    axes.plot([epoch.epoch - 0.5 for epoch in epochs], [epoch.loss for epoch in epochs], style, color=colour, label=name)


def _draw_accuracy(axes: Axes, colour: str, style: str, name: str, epochs: list[Epoch]) -> None:
    axes.plot([epoch.epoch for epoch in epochs], [epoch.accuracy for epoch in epochs], style, color=colour, label=name)


def _draw_noise_scale(axes: Axes, epochs: list[Epoch], effective_batch: int) -> None:
    axes.plot([epoch.epoch - 0.5 for epoch in epochs], [epoch.noise_scale for epoch in epochs], STYLES[0], color="C2",
              label="critical batch size (noise scale)")
    axes.axhline(effective_batch, color="C7", linestyle=":", label=f"an update: {effective_batch:,} digits")
    axes.set(ylabel="digits", yscale="log", title="How large a batch is worth it")
