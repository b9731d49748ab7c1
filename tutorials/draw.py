"""Draw the pictures of README and the guide: window.svg from a real run, memory.svg from a record, and graphs.svg.

    python tutorials/draw.py [FOLDER]

Each has a background of its own, and colours for light and dark.
"""
from __future__ import annotations

import sys
from html import escape
from pathlib import Path

import mindspore as ms
import numpy as np
from benchmarks.records import read
from mindspore import nn
from mnist.data import load

from ms_accum import avoid_busy_waiting, make_train_step

HERE = Path(__file__).parent
SIZES, ACCUMULATE_STEP = [16] * 10 + [8], 4  # samples of the microbatches, and how many a window has
STRATEGIES = HERE / "benchmarks" / "records" / "strategies.json"
NETWORKS = ("MLP", "CNN", "transformer")
WIDTH = 600
STYLE = """
text { font: 13px system-ui, "Segoe UI", "Helvetica Neue", Arial, sans-serif; fill: #1f2328 }
.small { font-size: 12px; fill: #59636e }
.name { font-weight: 600 }
.on { fill: #ffffff; font-weight: 600 }
.paper { fill: #ffffff; stroke: #d1d9e0 }
.box { fill: #f3f5f8; stroke: #aeb8c2 }
.axis { stroke: #aeb8c2; fill: none }
.way { stroke: #59636e; stroke-width: 1.5; fill: none }
.head { fill: #59636e }
.value { stroke: #1f2328; stroke-width: 2; fill: none }
.c0 { fill: #2f6db5 } .c1 { fill: #b4530d } .c2 { fill: #2d7a35 }
@media (prefers-color-scheme: dark) {
text, .name { fill: #e6edf3 }
.small { fill: #aab4bf }
.on { fill: #ffffff }
.paper { fill: #1b1f24; stroke: #3d444d }
.box { fill: #262c33; stroke: #59636e }
.axis { stroke: #59636e }
.way { stroke: #aab4bf }
.head { fill: #aab4bf }
.value { stroke: #e6edf3 }
.c0 { fill: #3f7fc9 } .c1 { fill: #c4631c } .c2 { fill: #378a40 }
}"""


class Picture:
    """An SVG of `WIDTH` times `height`, with a title for who cannot see it."""

    def __init__(self, height: int, title: str) -> None:
        self.height, self.title, self.parts = height, title, list[str]()

    def text(self, x: float, y: float, words: str, kind: str = "", anchor: str = "middle") -> None:
        """Write words whose baseline is at y."""
        self.parts.append(f'<text x="{x:.0f}" y="{y:.0f}" class="{kind}" text-anchor="{anchor}">{escape(words)}</text>')

    def box(self, x: float, y: float, width: float, height: float, kind: str) -> None:
        """Draw a rectangle, from its corner at the top left."""
        self.parts.append(f'<rect x="{x:.0f}" y="{y:.0f}" width="{width:.0f}" height="{height:.0f}" rx="3" '
                          f'class="{kind}"/>')

    def path(self, points: list[tuple[float, float]], kind: str, head: bool = False) -> None:
        """Draw a line through points, with an arrow's head if it leads down."""
        self.parts.append(f'<polyline points="{" ".join(f"{x:.0f},{y:.0f}" for x, y in points)}" class="{kind}"/>')
        if head:
            x, y = points[-1]
            self.parts.append(f'<path d="M{x - 5:.0f},{y - 7:.0f} h10 l-5,8 z" class="head"/>')

    def write(self, path: Path) -> None:
        """Write the file."""
        size = f'width="{WIDTH}" height="{self.height}" viewBox="0 0 {WIDTH} {self.height}"'
        paper = f'<rect x="0.5" y="0.5" width="{WIDTH - 1}" height="{self.height - 1}" rx="8" class="paper"/>'
        path.write_text("\n".join([f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">',
                                   f"<title>{escape(self.title)}</title>", f"<style>{STYLE}\n</style>", paper,
                                   *self.parts, "</svg>\n"]), encoding="utf-8")


# --- a window ---------------------------------------------------------------------------------------------------------


def measured() -> tuple[list[float], list[float]]:
    """Return the norm of a buffer before and a parameter after each microbatch, and the parameter at the begin."""
    digits, _ = load("embedded")
    images = (digits.images / 255).astype(np.float32).reshape(-1, 784)
    ends = np.cumsum(SIZES)
    batches = [(images[end - size:end], digits.labels[end - size:end]) for size, end in zip(SIZES, ends)]
    ms.set_seed(42)
    network = nn.SequentialCell(nn.Dense(784, 512), nn.ReLU(), nn.Dense(512, 512), nn.ReLU(), nn.Dense(512, 10))
    optimizer = nn.SGD(network.trainable_params(), 0.5)
    train_step = make_train_step(nn.WithLossCell(network, nn.CrossEntropyLoss()), optimizer, ACCUMULATE_STEP)
    bias = network.trainable_params()[-1]
    norms, values = [], [float(bias[0])]
    for _ in train_step.epoch(batches):
        norms.append(float(np.linalg.norm(train_step.boundary.window.buffers[-1].asnumpy())))
        values.append(float(bias[0]))
    return norms, values


def windows() -> list[list[int]]:
    """Return the numbers of the microbatches of each window."""
    numbers = list(range(len(SIZES)))
    return [numbers[first:first + ACCUMULATE_STEP] for first in range(0, len(numbers), ACCUMULATE_STEP)]


def draw_window(norms: list[float], values: list[float]) -> Picture:
    """Three strips above each other: the microbatches, what the buffer holds, the parameter."""
    picture = Picture(330, "Microbatches in windows of 4, 4 and 3, the buffer and a parameter")
    left, step, wide = 104, 44, 38
    for y, words in ((92, ("microbatch", "and its weight")), (192, ("gradients in", "the buffer")),
                     (272, ("a parameter",))):
        for line, word in enumerate(words):
            picture.text(12, y + 17 * line, word, "name" if line == 0 else "small", "start")
    for number, window in enumerate(windows()):
        weight = sum(SIZES[i] for i in window)
        middle = left + step * (window[0] + window[-1]) / 2 + wide / 2
        picture.text(middle, 26, f"window {number + 1}", "name")
        picture.text(middle, 44, f"update: sum / {weight}", "small")
        for i in window:
            height, x = 3.0 * SIZES[i], left + step * i
            picture.box(x, 118 - height, wide, height, f"c{number}")
            picture.text(x + wide / 2, 118 - height / 2 + 5, str(SIZES[i]), "on")
            if norms[i]:
                height = 66 * norms[i] / max(norms)
                picture.box(x, 218 - height, wide, height, f"c{number}")
        end = left + step * window[-1] + wide / 2
        picture.text(end, 213, "empty", "small")
        picture.path([(end, 222), (end, 244)], "way", head=True)
    picture.path([(left, 218), (left + step * len(SIZES), 218)], "axis")
    low, high = min(values), max(values)
    heights = [308 - 50 * (value - low) / (high - low) for value in values]
    points = [(float(left), heights[0])]
    for i, height in enumerate(heights[1:]):
        points += [(left + step * i + wide / 2, points[-1][1]), (left + step * i + wide / 2, height)]
    picture.path([*points, (left + step * len(SIZES), points[-1][1])], "value")
    return picture


# --- memory -----------------------------------------------------------------------------------------------------------

WAYS = {"undivided": "at once", "ms_accum": "in 4 microbatches", "ms_accum-pieces": "each in 8 pieces"}


def growths() -> dict[str, dict[str, float]]:
    """Return by network, and by way, how much a batch adds to the peak memory, in MiB."""
    groups = {group["name"]: group["contestants"] for group in read(STRATEGIES)["groups"]}
    return {network: {words: groups[f"{network}, N = 4, cut in 8"][way]["growth"] / 2**20
                      for way, words in WAYS.items()} for network in NETWORKS}


def draw_memory(growths: dict[str, dict[str, float]]) -> Picture:
    """A bar for each way to train a batch, relative to the whole batch at once."""
    picture = Picture(40 + 94 * len(growths), "Extra memory of a batch: at once, in 4 microbatches, each in 8 pieces")
    left, wide = 240, 270
    picture.text(12, 24, "What a batch adds to the peak memory", "name", "start")
    for number, (network, ways) in enumerate(growths.items()):
        y = 42 + 94 * number
        picture.text(12, y + 16, network, "name", "start")
        for row, (words, mib) in enumerate(ways.items()):
            length = wide * mib / max(ways.values())
            picture.text(left - 10, y + 16 + 24 * row, words, "small", "end")
            picture.box(left, y + 2 + 24 * row, length, 19, f"c{(1, 0, 2)[row]}")
            picture.text(left + length + 6, y + 16 + 24 * row, f"{mib:,.0f} MiB", "", "start")
    return picture


# --- graphs -----------------------------------------------------------------------------------------------------------

GRAPHS = (
    ("each microbatch", "(or each of its pieces)", "add", ("forward", "backward", "add to the buffers")),
    ("the window is full,", "or flush()", "update", ("sum over the ranks", "divide and clip", "optimizer",
                                                       "empty the buffers")),
    ("accumulate_step=1,", "a batch that is not cut", "alone", ("forward", "backward", "divide and clip", "optimizer",
                                                                "(no buffers)")),
)


def draw_graphs() -> Picture:
    """Above what the host does, below the graphs on the device, with what calls each."""
    picture = Picture(320, "The three graphs of a train step, and when the host calls each")
    picture.text(12, 62, "host", "name", "start")
    picture.text(12, 190, "device", "name", "start")
    picture.box(78, 16, 504, 32, "box")
    picture.text(330, 37, "train_step: counts microbatches, decides when a window closes", "")
    for number, (when, more, name, steps) in enumerate(GRAPHS):
        x, wide = 78 + 172 * number, 160
        middle = x + wide / 2
        picture.path([(middle, 48), (middle, 60)], "way")
        picture.text(middle, 76, when, "small")
        picture.text(middle, 93, more, "small")
        picture.path([(middle, 101), (middle, 124)], "way", head=True)
        picture.box(x, 126, wide, 178, "box")
        picture.box(x, 126, wide, 30, f"c{number}")
        picture.text(middle, 146, name, "on")
        for line, step in enumerate(steps):
            picture.text(middle, 182 + 25 * line, step, "")
    return picture


def main() -> None:
    """Measure and draw."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else HERE / "figures"
    avoid_busy_waiting()
    norms, values = measured()
    moved = [i + 1 for i in range(len(SIZES)) if values[i + 1] != values[i]]
    if moved != [window[-1] + 1 for window in windows()]:
        sys.exit(f"the parameter moved at microbatches {moved}, expected at the last of each window")
    draw_window(norms, values).write(folder / "window.svg")
    draw_memory(growths()).write(folder / "memory.svg")
    draw_graphs().write(folder / "graphs.svg")
    print(f"the parameter moved at microbatches {', '.join(map(str, moved))}")


if __name__ == "__main__":
    main()
