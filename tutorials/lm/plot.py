"""Draw the training loss of each update, and the validation of each epoch."""
from __future__ import annotations

from matplotlib.figure import Figure


def plot(path: str, histories: dict[str, dict]) -> None:
    """Write a PNG. `histories`: for each label, {"loss": one for each update, "validation": one for each epoch}."""
    figure = Figure(figsize=(10, 4), dpi=120, layout="constrained")  # without pyplot, no display is needed
    left, right = figure.subplots(1, 2)
    for label, history in histories.items():
        left.plot(range(1, len(history["loss"]) + 1), history["loss"], linewidth=1, alpha=0.7, label=label)
        right.plot(range(1, len(history["validation"]) + 1), history["validation"], "o-", label=label)
    left.set(xlabel="update", ylabel="training loss (bits per byte)")
    right.set(xlabel="epoch", ylabel="validation (bits per byte)")
    right.xaxis.get_major_locator().set_params(integer=True)
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(path)
