"""Which batch, and when: constant windows, a ramp, seesaw and AdaptiveWindow, on the same samples in the same order.

    python tutorials/benchmarks/batch_size.py --train --time --draw    # records/batch_size.json and guide/batch-size.png

Two problems: the digits of `ms-accum mnist` with SGD, and the text of `ms-accum lm` with Adam. Each contestant gets the learning rate of a
cosine decay over the samples, scaled to its window ("linear" for SGD, "sqrt" for Adam). The peak is chosen for each contestant: of PEAKS,
the one with the lowest last loss for the first seed, of those at which no seed diverges. Training may run on a busy machine. `--time`
needs an idle one: it measures what a microbatch costs, an update, and measuring the noise scale; seconds are sums of these.
"""
from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import cos, inf, isfinite, pi
from pathlib import Path
from statistics import fmean
from time import perf_counter
from typing import Any

import mindspore as ms
import numpy as np
import records
from mindspore import Parameter, Tensor, nn, ops

from ms_accum import Accumulator, avoid_busy_waiting, make_train_step
from ms_accum.batch_size import AdaptiveWindow, batch_ramp, scale_lr, seesaw
from ms_accum.lm import data as text_data
from ms_accum.lm import train as text_train
from ms_accum.lm.network import BitsPerByte, count_bytes
from ms_accum.lm.network import Network as TextNetwork
from ms_accum.mnist import data as digits_data
from ms_accum.mnist import train as digits_train
from ms_accum.mnist.network import Network as DigitsNetwork
from ms_accum.mnist.network import make_forward
from ms_accum.programs import adam

LONGEST = 16
CONTESTANTS = ("1", "2", "4", "16", "ramp", "seesaw", "adaptive")
PEAKS = {"digits": (0.0125, 0.025, 0.05, 0.1, 0.2, 0.4, 0.8), "text": (2.5e-4, 5e-4, 1e-3, 2e-3, 4e-3)}
POINTS = 8
RECORD = records.HERE / "records" / "batch_size.json"
FIGURE = records.HERE.parent / "guide" / "batch-size.png"


@dataclass
class Problem:
    """What is trained: a network with its loss, what it weighs, its optimizer, its samples and its test."""

    name: str
    rule: str
    make_network: Callable[[int], nn.Cell]
    make_loss: Callable[[nn.Cell], Callable]
    weight_fn: Callable | None
    make_optimizer: Callable[[list, Any], nn.Cell]
    clip_norm: float | None
    test: Callable[[Callable], float]
    unit: str
    microbatches: Callable[[int], list[tuple]]  # all of a run with a seed, of all epochs


def digits(quick: bool) -> Problem:
    """Return the problem of `ms-accum mnist`: three epochs of 10,000 digits in microbatches of 32."""
    mnist = digits_data.load("embedded")

    def microbatches(seed: int) -> list[tuple]:
        size = 256 if quick else 32
        return [mnist.train.batch(rows) for epoch in (1, 2, 3) for rows in digits_train.order(len(mnist.train), size, seed, epoch)]

    def test(loss: Callable) -> float:
        return float(loss(*map(Tensor, mnist.test.batch(np.arange(len(mnist.test))))))

    return Problem("digits", "linear", DigitsNetwork, make_forward, None, nn.SGD, None, test, "digits", microbatches)


def text(quick: bool) -> Problem:
    """Return the problem of `ms-accum lm`: two epochs of a quarter of Python's help in microbatches of 16 rows."""
    excerpt, size = text_data.load("excerpt", 42), 128 if quick else 16

    def microbatches(seed: int) -> list[tuple]:
        return [excerpt.train.batch(rows) for epoch in range(1, 2 if quick else 3)
                for rows in text_train.order(excerpt.train, size, seed, epoch)]

    def test(loss: Callable) -> float:
        return text_train.evaluate(loss, excerpt.validation, size)

    return Problem("text", "sqrt", TextNetwork, BitsPerByte, count_bytes, adam, 1.0, test, "bytes", microbatches)


def cosine(p: int, updates: int) -> float:
    """Return the decay from 1 at the start to 0 at the end."""
    return (1 + cos(pi * p / updates)) / 2


class Contestant:
    """A way to choose windows, compiled once; `run` trains from the start with a seed and a peak of the learning rate."""

    def __init__(self, problem: Problem, name: str) -> None:
        self.problem, self.name = problem, name
        network = problem.make_network(0)
        self.batches = problem.microbatches(0)
        window, rates = self.schedule(1.0)
        self.optimizer = problem.make_optimizer(network.trainable_params(), rates)
        rate = self.optimizer.learning_rate
        self.rates = rate if isinstance(rate, Parameter) else rate.learning_rate  # of a list, MindSpore keeps a Cell
        self.accumulator = Accumulator(self.optimizer, window, problem.clip_norm, reduction="mean")
        loss = problem.make_loss(network)
        self.step = make_train_step(loss, self.accumulator, weight_fn=problem.weight_fn)
        self.loss = ms.jit(loss)
        state = {id(p): p for p in (*self.optimizer.get_parameters(), *self.accumulator.parameters)}
        self.start = [(p, Tensor(p.asnumpy().copy())) for p in state.values()]
        self.compile()

    def schedule(self, peak: float) -> tuple[Any, Any]:
        """Return `accumulate_step` and the learning rates for a peak of the plain run, one microbatch to an update."""
        updates, rule = len(self.batches), self.problem.rule
        self.plain = [peak * cosine(p, updates) for p in range(updates)]
        if self.name == "adaptive":
            return AdaptiveWindow(), peak
        if self.name == "ramp":
            return batch_ramp(updates, self.plain, maximum=LONGEST, rule=rule)
        if self.name == "seesaw":
            return seesaw(updates, self.plain, maximum=LONGEST, rule=rule)
        length = int(self.name)
        windows = [self.plain[i:i + length] for i in range(0, updates, length)]
        return length, [fmean(window) * scale_lr(1.0, len(window), rule) for window in windows]

    def compile(self) -> None:
        """Train on one microbatch of each shape, and test."""
        for batch in {tuple(part.shape for part in batch): batch for batch in self.batches}.values():
            self.step(*map(Tensor, batch))
        self.step.flush()
        self.problem.test(self.loss)

    def reset(self, seed: int, peak: float) -> None:
        """Go back to the start: the weights and the order of a seed, the rates of a peak."""
        self.batches = self.problem.microbatches(seed)
        for parameter, value in self.start:
            ops.assign(parameter, value)
        initial = {p.name: p for p in self.problem.make_network(seed).trainable_params()}
        for parameter in self.optimizer.parameters:
            ops.assign(parameter, Tensor(initial[parameter.name].asnumpy().copy()))
        ops.assign(self.rates, Tensor(self.schedule(peak)[1], ms.float32))
        self.accumulator.reset()

    def run(self, seed: int, peak: float) -> dict:
        """Train on all microbatches. Return the curve, microbatches, updates and test loss at POINTS points, and adaptive lengths."""
        self.reset(seed, peak)
        accumulator, total = self.accumulator, len(self.batches)
        marks = {total * (i + 1) // POINTS for i in range(POINTS)}
        curve, lengths = [], []
        for done, batch in enumerate(self.batches):
            if self.name == "adaptive" and int(accumulator.mini_step) == 0:
                # As the others: the plain rates that the window stands for, scaled to it.
                length = accumulator.window.length
                lengths.append(length)
                rates = self.plain[done:done + length]
                ops.assign(self.rates, Tensor(fmean(rates) * scale_lr(1.0, len(rates), self.problem.rule), ms.float32))
            self.step(*map(Tensor, batch))
            if done + 1 == total:
                self.step.flush()
            if done + 1 in marks:
                loss = self.problem.test(self.loss)
                curve.append([done + 1, int(accumulator.update_step), loss if isfinite(loss) else None])
        return {"seed": seed, "peak": peak, "curve": curve, "lengths": lengths}


def last_loss(run: dict) -> float:
    """Return the loss after all samples; infinity if training diverged."""
    loss = run["curve"][-1][2]
    return inf if loss is None else loss


def compare(problem: Problem, seeds: int, peaks: tuple[float, ...], names: list[str], found: dict) -> Iterator[str]:
    """Choose a peak for each contestant with the first seed, and train with the other seeds. Yield after each."""
    found |= {"rule": problem.rule, "unit": problem.unit, "microbatches": len(problem.microbatches(0))}
    found.setdefault("contestants", {})
    for name in names:
        contestant = Contestant(problem, name)
        sweep = [contestant.run(0, peak) for peak in peaks]
        for best in sorted(sweep, key=last_loss):
            runs = [best, *(contestant.run(seed, best["peak"]) for seed in range(1, seeds))]
            if all(isfinite(last_loss(run)) for run in runs):
                break
        ends = [[run["peak"], run["curve"][-1][2]] for run in sweep]
        found["contestants"][name] = {"sweep": ends, "runs": runs}
        losses = [last_loss(run) for run in runs]
        yield (f"{problem.name}, {name}: peak {best['peak']:g}, {best['curve'][-1][1]} updates, last losses "
               + ", ".join(f"{loss:.4f}" for loss in losses))


def costs(problem: Problem, rounds: int) -> dict[str, float]:
    """Return the seconds of a microbatch, of an update, and of measuring a microbatch's noise: medians of alternating rounds."""
    contestants = [Contestant(problem, name) for name in ("1", str(LONGEST), "adaptive")]
    # The same samples again and again have no noise, so the third one's windows stay at one microbatch.
    batch = tuple(map(Tensor, contestants[0].batches[0]))
    samples = []
    for _ in range(rounds):
        row = []
        for contestant in contestants:
            contestant.reset(0, 1e-9)  # lists of rates end
            start = perf_counter()
            for _ in range(4 * LONGEST):
                loss = contestant.step(*batch)
            float(loss)
            row.append((perf_counter() - start) / (4 * LONGEST))
        samples.append(row)
    each, long, measuring = np.median(samples, axis=0)
    update = (each - long) * LONGEST / (LONGEST - 1)
    found = {"microbatch": each - update, "update": update, "measuring": measuring - each}
    say(f"{problem.name}: " + ", ".join(f"{name} {1000 * seconds:.2f} ms" for name, seconds in found.items()))
    return {**found, "rounds": samples}


def seconds(costs: dict, contestant: str, microbatches: np.ndarray, updates: np.ndarray) -> np.ndarray:
    """Return the seconds of that many microbatches and updates."""
    each = costs["microbatch"] + (costs["measuring"] if contestant == "adaptive" else 0.0)
    return microbatches * each + updates * costs["update"]


def lengths_of(problem: dict, name: str, run: dict) -> list[int]:
    """Return the length of each window of a run."""
    total = problem["microbatches"]
    if name == "adaptive":
        return run["lengths"]
    if name.isdigit():
        return [int(name)] * -(-total // int(name))
    starts, rates = {"ramp": batch_ramp, "seesaw": seesaw}[name](total, [cosine(p, total) for p in range(total)], maximum=LONGEST)
    return [starts[max(start for start in starts if start <= update)] for update in range(len(rates))]


def largest_rate(problem: dict, name: str, run: dict) -> float:
    """Return the largest learning rate that the optimizer used."""
    plain, rates, done = [run["peak"] * cosine(p, problem["microbatches"]) for p in range(problem["microbatches"])], [], 0
    for length in lengths_of(problem, name, run):
        window = plain[done:done + length]
        rates.append(fmean(window) * scale_lr(1.0, len(window), problem["rule"]))
        done += length
    return max(rates)


def table(problem: dict) -> list[str]:
    """Return the rows of a Markdown table: what a contestant has after all samples, means over the seeds."""
    rows = ["| window | peak of the cosine | largest rate in the optimizer | updates | seconds | test loss at the end (of each seed) |",
            "|-|-|-|-|-|-|"]
    for name, found in problem["contestants"].items():
        runs = found["runs"]
        ends = [run["curve"][-1] for run in runs]
        updates, losses = fmean(end[1] for end in ends), [end[2] for end in ends]
        each = f" ({', '.join(str(end[1]) for end in ends)})" if len({end[1] for end in ends}) > 1 else ""
        time = seconds(problem["costs"], name, ends[0][0], updates)
        told = "diverged" if None in losses else f"{fmean(losses):.3f} ({', '.join(f'{loss:.3f}' for loss in losses)})"
        rows.append(f"| {f'N = {name}' if name.isdigit() else name} | {runs[0]['peak']:g} | "
                    f"{max(largest_rate(problem, name, run) for run in runs):.2g} | {updates:.0f}{each} | {time:.1f} | {told} |")
    return rows


def draw(record: dict, file: Path) -> None:
    """Draw the test loss against samples, updates and seconds: means over the seeds, and their range."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = list(record["problems"])
    figure, axes = pyplot.subplots(len(names), 3, figsize=(13, 4 * len(names)), layout="constrained", squeeze=False)
    for row, name in zip(axes, names):
        problem = record["problems"][name]
        for i, (contestant, found) in enumerate(problem["contestants"].items()):
            curves = np.array([run["curve"] for run in found["runs"]], float)  # of a run that diverged, NaN
            label = f"N = {contestant}" if contestant.isdigit() else contestant
            look = {"color": f"C{i}", "linestyle": "-" if contestant.isdigit() else "--"}
            microbatches, updates, losses = curves[:, :, 0].mean(0), curves[:, :, 1].mean(0), curves[:, :, 2]
            for panel, places in zip(row, (microbatches, updates, seconds(problem["costs"], contestant, microbatches, updates))):
                panel.plot(places, losses.mean(0), marker=".", label=label, **look)
                panel.fill_between(places, losses.min(0), losses.max(0), color=look["color"], alpha=0.12, linewidth=0)
        last = [run["curve"][-1][2] for found in problem["contestants"].values() for run in found["runs"] if run["curve"][-1][2]]
        low, high = min(last), max(last)
        for panel, axis in zip(row, ("microbatches", "updates", "seconds in train steps")):
            unit = " in bits per byte" if name == "text" else ""
            panel.set(xlabel=axis, ylabel=f"{name}: test loss{unit}", ylim=(low - 0.1 * (high - low), high + 1.5 * (high - low)))
            panel.grid(alpha=0.3)
        row[1].set_xscale("log")
        row[0].set_title("mean and range of the seeds", fontsize=9, loc="left")
        row[2].legend(fontsize=8)
    figure.savefig(file, dpi=80)
    pyplot.close(figure)


def main(arguments: list[str]) -> None:
    """Run and write the record and the figure, or only draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train", action="store_true", help="train all contestants, and write the record")
    parser.add_argument("--time", action="store_true", help="measure what microbatches and updates cost, and add it to the record")
    parser.add_argument("--draw", action="store_true", help="draw the record, and print its tables")
    parser.add_argument("--problems", default="digits,text", help="(default: %(default)s)")
    parser.add_argument("--contestants", default=",".join(CONTESTANTS), help="those to train (default: %(default)s)")
    parser.add_argument("--seeds", type=int, default=3, help="(default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="large microbatches, one peak and one round, for tests")
    parser.add_argument("--output", type=Path, default=RECORD, metavar="FILE.json", help="(default: records/batch_size.json)")
    parser.add_argument("--figure", type=Path, default=FIGURE, metavar="FILE.png", help="(default: guide/batch-size.png)")
    options = parser.parse_args(arguments)
    if not options.train | options.time | options.draw:
        parser.error("nothing to do; give --train, --time, --draw, or several of them")
    avoid_busy_waiting()
    record = json.loads(options.output.read_text(encoding="utf-8")) if options.output.exists() else {"suite": "batch_size", "problems": {}}
    for name in options.problems.split(",") if options.train | options.time else ():
        problem = {"digits": digits, "text": text}[name](options.quick)
        found = record["problems"].setdefault(name, {})
        if options.train:
            peaks = PEAKS[name][1:2] if options.quick else PEAKS[name]
            for line in compare(problem, options.seeds, peaks, options.contestants.split(","), found):
                say(line)
                records.write(record, options.output)
        if options.time:
            found["costs"] = costs(problem, 1 if options.quick else 7)
        record |= {"quick": options.quick, "command": "python tutorials/benchmarks/batch_size.py --train --time --draw",
                   **records.circumstances(), "groups": []}
        records.write(record, options.output)
    if options.draw:
        for name, problem in record["problems"].items():
            say(f"{name}, {problem['microbatches']:,} microbatches:\n" + "\n".join(table(problem)))
        draw(record, options.figure)


def say(line: str) -> None:
    """Print at once."""
    print(line, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
