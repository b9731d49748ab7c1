"""The curves of a run: loss and accuracy."""
from __future__ import annotations

from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from .output import whole
from .train import Epoch

# The second run lies on the first where they agree: dashes and crosses leave it visible.
STYLES = ("o-", "x--")


def write_plot(path: Path, runs: dict[str, list[Epoch]]) -> None:
    """Draw loss and test accuracy of one or two runs, by name, over the epochs; writes a PNG."""
    # A Figure of its own, not pyplot: no global state, and no display is looked for.
    figure = Figure(figsize=(10, 4), layout="constrained")
    loss_axes, accuracy_axes = figure.subplots(1, 2)
    for number, (name, epochs) in enumerate(runs.items()):
        _draw_loss(loss_axes, f"C{number}", STYLES[number], name, epochs)
        _draw_accuracy(accuracy_axes, f"C{number}", STYLES[number], name, epochs)
    loss_axes.set(ylabel="loss", title="Cross entropy: each microbatch, and mean of an epoch", ylim=(0, None))
    accuracy_axes.set(ylabel="accuracy in %", title="Test digits labelled correctly")
    for axes in (loss_axes, accuracy_axes):
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
