"""Draw the training loss of each update, and the test accuracy of each epoch."""
from __future__ import annotations

from matplotlib.figure import Figure


def plot(path: str, histories: dict[str, dict]) -> None:
    """Write a PNG. `histories`: for each label, {"loss": one for each update, "accuracy": one for each epoch}."""
    figure = Figure(figsize=(10, 4), dpi=120, layout="constrained")  # without pyplot, no display is needed
    left, right = figure.subplots(1, 2)
    # Two trainings that agree lie on each other: the second is a broad pale line below the first.
    lines = {"linewidth": 1, "zorder": 3}, {"linewidth": 5, "alpha": 0.4, "zorder": 2}
    for (label, history), line in zip(histories.items(), lines):
        left.plot(range(1, len(history["loss"]) + 1), history["loss"], label=label, **line)
        right.plot(range(1, len(history["accuracy"]) + 1), history["accuracy"], "o-", label=label, **line)
    left.set(xlabel="update", ylabel="training loss (cross entropy in nats)", ylim=(0, None))
    right.set(xlabel="epoch", ylabel="test accuracy (%)")
    right.xaxis.get_major_locator().set_params(integer=True)
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(path)
