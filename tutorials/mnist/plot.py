"""Draw the training loss of each update, and the test accuracy of each epoch."""
from __future__ import annotations

import numpy as np
from matplotlib.figure import Figure


def plot(path: str, histories: dict[str, dict]) -> None:
    """Write a PNG. `histories`: for each label, {"loss": one for each update, "accuracy": one for each epoch}."""
    figure = Figure(figsize=(10, 4), dpi=120, layout="constrained")  # without pyplot, no display is needed
    left, right = figure.subplots(1, 2)
    # If two trainings agree, the second lies on the first: dashes leave the first visible.
    for (label, history), style in zip(histories.items(), ("-", "--")):
        losses, accuracies = np.array(history["loss"]), history["accuracy"]
        width = 1 + len(losses) // 50
        line, = left.plot(np.arange(1, len(losses) + 1), losses, linewidth=0.7, alpha=0.35)
        left.plot(np.arange(width, len(losses) + 1), np.convolve(losses, np.ones(width) / width, "valid"), style,
                  linewidth=2, color=line.get_color(), label=f"{label}, mean of {width} updates")
        right.plot(np.arange(1, len(accuracies) + 1), accuracies, f"o{style}", label=label)
    left.set(xlabel="update", ylabel="training loss (cross entropy in nats)")
    right.set(xlabel="epoch", ylabel="test accuracy (%)")
    right.xaxis.get_major_locator().set_params(integer=True)
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(path)
