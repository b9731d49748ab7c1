"""Draw README's figure from a real run: twelve microbatches of digits, three windows, one parameter.

    python tutorials/figure.py [FILE.svg]
"""
from __future__ import annotations

import sys
from pathlib import Path

import matplotlib
import mindspore as ms
import numpy as np
from mindspore import Tensor, nn
from mnist.data import load

from ms_accum import Accumulator, avoid_busy_waiting, make_train_step

MICROBATCHES, ACCUMULATE_STEP, SAMPLES = 12, 4, 32
COLOURS = ("#4c78a8", "#f58518", "#54a24b")


def measure() -> tuple[list[float], list[float]]:
    """The norm of the first layer's buffer and the value of one of its biases, after each microbatch."""
    digits, _ = load("embedded")
    ms.set_seed(42)
    network = nn.SequentialCell(nn.Dense(784, 512), nn.ReLU(), nn.Dense(512, 512), nn.ReLU(), nn.Dense(512, 10))
    accumulator = Accumulator(nn.SGD(network.trainable_params(), 0.5), ACCUMULATE_STEP, reduction="mean")
    train_step = make_train_step(nn.WithLossCell(network, nn.CrossEntropyLoss()), accumulator)
    bias = network.trainable_params()[-1]
    norms, values = [], [float(bias.asnumpy()[0])]
    for i in range(MICROBATCHES):
        rows = slice(i * SAMPLES, (i + 1) * SAMPLES)
        pixels = (digits.images[rows].reshape(SAMPLES, 784) / 255).astype(np.float32)
        train_step(Tensor(pixels), Tensor(digits.labels[rows]))
        norms.append(float(np.linalg.norm(accumulator.window.buffers[-1].asnumpy())))
        values.append(float(bias.asnumpy()[0]))
    return norms, values


def draw(path: Path, norms: list[float], values: list[float]) -> None:
    """Three strips above each other: the microbatches, what the buffer holds, the parameter."""
    matplotlib.use("svg")
    matplotlib.rcParams.update({"svg.hashsalt": "ms_accum", "svg.fonttype": "none", "font.size": 10})
    from matplotlib import pyplot as plt

    figure, (top, middle, bottom) = plt.subplots(3, 1, figsize=(9, 4.6), sharex=True, height_ratios=(1.1, 1, 1))
    at = np.arange(MICROBATCHES)
    colours = [COLOURS[i // ACCUMULATE_STEP % len(COLOURS)] for i in at]
    top.bar(at, 1, width=0.86, color=colours)
    for i in at:
        words = "forward\nbackward\nadd" + ("\n+ update" if (i + 1) % ACCUMULATE_STEP == 0 else "")
        top.text(i, 0.5, words, ha="center", va="center", color="white", fontsize=7)
    for window in range(MICROBATCHES // ACCUMULATE_STEP):
        middle_of_window = window * ACCUMULATE_STEP + (ACCUMULATE_STEP - 1) / 2
        top.text(middle_of_window, 1.12, f"window {window + 1}", ha="center", color=COLOURS[window])
    top.set_ylim(0, 1.4)
    top.set_axis_off()

    # The buffer is emptied by the update, within the boundary's microbatch.
    middle.bar(at, norms, width=0.86, color=colours)
    middle.set_ylabel("gradients in\nthe buffer", rotation=0, ha="right", va="center")
    for boundary in range(ACCUMULATE_STEP - 1, MICROBATCHES, ACCUMULATE_STEP):
        middle.text(boundary, 0.05 * max(norms), "emptied", ha="center", fontsize=8)
    bottom.step(np.arange(-1, MICROBATCHES) + 0.5, values, where="post", color="black")
    bottom.set_ylabel("a parameter", rotation=0, ha="right", va="center")
    bottom.set_xlabel("microbatch")
    bottom.set_xticks(at, at + 1)
    for axis in (middle, bottom):
        axis.set_yticks([])
        axis.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    """Measure and draw."""
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).with_name("accumulation.svg")
    avoid_busy_waiting()
    norms, values = measure()
    moved = [i + 1 for i in range(MICROBATCHES) if values[i + 1] != values[i]]
    if moved != list(range(ACCUMULATE_STEP, MICROBATCHES + 1, ACCUMULATE_STEP)):
        sys.exit(f"the parameter moved at microbatches {moved}, expected every {ACCUMULATE_STEP}th")
    draw(path, norms, values)
    print(f"{path}: the parameter moved at microbatches {', '.join(map(str, moved))}")


if __name__ == "__main__":
    main()
