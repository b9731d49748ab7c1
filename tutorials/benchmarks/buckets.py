"""Texts of uneven length: microbatches of a fixed number of rows, and those of `Dataset.bucket_batch_by_length`.

Each way trains a byte-level transformer on the same paragraphs of Python's help texts (`pydoc_data.topics`). First, all ways have to give
the same gradient of all paragraphs. Then they are timed in rounds that alternate between them, each epoch with other microbatches.
Peak memory is taken in processes of their own. The last line printed is one JSON object.
"""
from __future__ import annotations

import argparse
import json
import random
import re
import subprocess
import sys
from collections import deque
from collections.abc import Callable
from pathlib import Path
from pydoc_data.topics import topics
from time import perf_counter

import mindspore as ms
import numpy as np
import records
from mindspore import Tensor, nn, ops
from mindspore.dataset import Dataset, GeneratorDataset
from networks import Block

from ms_accum import avoid_busy_waiting, make_train_step, until_weight

LONGEST, WIDTH, BLOCKS, BUDGET, MASKED = 512, 128, 2, 8192, -100
# {length: rows}, each with 4,096 places but the last way, which has 2,048.
WAYS = {"8 rows": {512: 8}, "2 shapes": {128: 32, 512: 8}, "4 shapes": {64: 64, 128: 32, 256: 16, 512: 8},
        "4 half shapes": {64: 32, 128: 16, 256: 8, 512: 4}}
PAD = {"tokens": ([None], 0), "targets": ([None], MASKED)}
TOLERANCE = 1e-4
WEIGHINGS = 3

Rows = list[tuple[np.ndarray, np.ndarray]]


def paragraphs(count: int) -> Rows:
    """Return bytes and the next bytes, int32, of some paragraphs; long ones are cut."""
    texts = [text.strip().encode() for topic in topics.values() for text in topic.split("\n\n")]
    pieces = [text[i:i + LONGEST + 1] for text in texts for i in range(0, len(text), LONGEST)]
    arrays = [np.frombuffer(piece, np.uint8).astype(np.int32) for piece in pieces if len(piece) > 1]
    return [(array[:-1], array[1:]) for array in random.Random(0).sample(arrays, count)]


def batched(rows: Rows, sizes: dict[int, int]) -> Dataset:
    """Return microbatches of one shape for each of `{length: rows}`; the last one of a shape is filled up with masked rows."""
    def filled(tokens: np.ndarray, targets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        missing = ((0, sizes[tokens.shape[1]] - len(tokens)), (0, 0))
        return np.pad(tokens, missing), np.pad(targets, missing, constant_values=MASKED)

    dataset = GeneratorDataset(rows, list(PAD), shuffle=True)
    dataset = dataset.bucket_batch_by_length(["tokens"], [length + 1 for length in sizes], [*sizes.values(), 1], pad_info=PAD,
                                             pad_to_bucket_boundary=True)
    return dataset.map(filled, list(PAD))


class Causal(Block):
    """A transformer block whose tokens attend to those before them, and so to no padding."""

    def attend(self, x: Tensor) -> Tensor:
        """Attend over axis 1 of x, `(rows, tokens, width)`."""
        later = Tensor(np.triu(np.full((LONGEST, LONGEST), -1e9, np.float32), 1))[:x.shape[1], :x.shape[1]]
        scores = ops.matmul(self.by_head(self.query(x)), self.by_head(self.key(x)).swapaxes(2, 3)) * self.scale
        mixed = ops.matmul(ops.softmax(scores + later, axis=-1), self.by_head(self.value(x)))
        return self.project(mixed.swapaxes(1, 2).reshape(x.shape))


class Reader(nn.Cell):
    """The mean loss of the next byte, over all that is not masked."""

    def __init__(self) -> None:
        super().__init__()
        ms.set_seed(0)
        self.embed, self.place = nn.Embedding(256, WIDTH), nn.Embedding(LONGEST, WIDTH)
        self.blocks = nn.SequentialCell([Causal(WIDTH) for _ in range(BLOCKS)])
        self.head = nn.Dense(WIDTH, 256)

    def construct(self, tokens: Tensor, targets: Tensor) -> Tensor:
        hidden = self.blocks(self.embed(tokens) + self.place(ops.arange(tokens.shape[1])))
        return ops.cross_entropy(self.head(hidden).reshape(-1, 256), targets.reshape(-1), ignore_index=MASKED)


def unmasked(tokens: Tensor, targets: Tensor) -> Tensor:
    """Return the weight of a microbatch."""
    return (targets != MASKED).sum()


def trained(rows: Rows, sizes: dict[int, int], accumulate_step: object, learning_rate: float) -> tuple[Reader, Callable]:
    """Return a network, and a function that trains it on all rows and returns the seconds that it took."""
    reader, dataset = Reader(), batched(rows, sizes)
    optimizer = nn.SGD(reader.trainable_params(), learning_rate)
    train_step = make_train_step(reader, optimizer, accumulate_step, weight_fn=unmasked)

    def epoch() -> float:
        start = perf_counter()
        (loss,) = deque(train_step.epoch(dataset), maxlen=1)
        float(loss)
        reader.head.bias.asnumpy()
        return perf_counter() - start

    return reader, epoch


def gradient(rows: Rows, sizes: dict[int, int]) -> np.ndarray:
    """Return the gradient of all rows: what one window changes at a learning rate of 1."""
    reader, epoch = trained(rows, sizes, accumulate_step=len(rows), learning_rate=1.0)
    before = np.concatenate([p.asnumpy().ravel() for p in reader.trainable_params()])
    epoch()
    return before - np.concatenate([p.asnumpy().ravel() for p in reader.trainable_params()])


def growth(rows: Rows, sizes: dict[int, int]) -> float:
    """Return by how many MiB an epoch raises the peak RSS of this process, compiling included."""
    def peak() -> int:
        return int(re.search(r"VmHWM:\s*(\d+)", Path("/proc/self/status").read_text(encoding="utf-8"))[1])

    _, epoch = trained(rows, sizes, until_weight(BUDGET), learning_rate=0.1)
    before = peak()
    epoch()
    return (peak() - before) / 1024


def compared(rows: Rows, rounds: int) -> dict[str, dict]:
    """Return what was measured of each way. Exits if they differ."""
    tokens = sum(len(row) for row, _ in rows)
    wanted, epochs, results = gradient(rows, {LONGEST: 1}), {}, {}
    for name, sizes in WAYS.items():
        difference = float(np.linalg.norm(gradient(rows, sizes) - wanted) / np.linalg.norm(wanted))
        if not difference <= TOLERANCE:
            raise SystemExit(f"{name}: the gradient differs by {difference:.0e}, allowed {TOLERANCE:.0e}")
        _, epochs[name] = trained(rows, sizes, until_weight(BUDGET), learning_rate=0.1)
        results[name] = {"difference": difference, "tokens_in_a_microbatch": tokens / batched(rows, sizes).get_dataset_size(),
                         "first_epoch_seconds": epochs[name](), "samples": []}
    for i in range(rounds):
        print(f"round {i + 1} of {rounds}", file=sys.stderr, flush=True)
        for name in random.Random(i).sample(list(WAYS), len(WAYS)):
            results[name]["samples"].append(tokens / epochs[name]())
    for name, figures in results.items():
        figures["tokens_per_second"] = records.spread(figures["samples"])
        figures["ratio"] = records.spread([a / b for a, b in zip(figures["samples"], results["8 rows"]["samples"])])
        command = [sys.executable, __file__, "--rows", str(len(rows)), "--peak", name]
        peaks = [subprocess.run(command, capture_output=True, check=True) for _ in range(min(rounds, WEIGHINGS))]
        figures["growth_mib"] = [float(done.stdout.split()[-1]) for done in peaks]
    return results


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=192, help="paragraphs in an epoch (default: 192)")
    parser.add_argument("--rounds", type=int, default=7, help="rounds to take medians over (default: 7)")
    parser.add_argument("--peak", choices=WAYS, help="only train this way, and print by how many MiB the peak grows")
    options = parser.parse_args()
    avoid_busy_waiting()
    rows = paragraphs(options.rows)
    if options.peak:
        print(growth(rows, WAYS[options.peak]))
    else:
        print(json.dumps({**records.circumstances(), "rows": len(rows), "ways": compared(rows, options.rounds)}))


if __name__ == "__main__":
    main()
