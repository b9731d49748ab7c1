"""Shared by the programs `ms-accum mnist` and `ms-accum lm`: options, ranks, progress, report and plot."""
from __future__ import annotations

import logging
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from math import isfinite
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np
from mindspore import Parameter, Tensor, nn
from tqdm import tqdm

from ..checkpoint.file import SUFFIX, CheckpointError
from ..cli.files import printable, say_written, write_file, write_json
from ..cli.interrupts import raise_if_interrupted
from ..cli.options import count, number, output
from ..cli.process import join_ranks, versions
from ..distributed.data_parallel import DataParallel
from ..distributed.ranks import gather, wait_for_all, world_size

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from ..steps.train_step import TrainStep

PROGRESS_SECONDS = 10.0
# Options that a resumed run may change.
_FREE = {"epochs", "accumulate_step", "sync", "zero", "compare", "save", "resume", "json", "plot"}


def adam(parameters: list[Parameter], learning_rate: float) -> nn.Adam:
    """Build Adam without MindSpore's warning that Adam itself uses a deprecated operator (2.10)."""
    logged = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        return nn.Adam(parameters, learning_rate)
    finally:
        logging.disable(logged)


# Not nn.SGD, which takes no float64; without momentum, nn.Momentum trains bit-identically.
OPTIMIZERS: dict[str, Callable[..., nn.Optimizer]] = {
    "sgd": partial(nn.Momentum, momentum=0.0), "momentum": partial(nn.Momentum, momentum=0.9), "adam": adam}


@dataclass(frozen=True)
class Program:
    """Describe a program, with its names of units and results."""

    name: str  # its command
    ways: dict[str, Callable[[Namespace, Report], nn.Cell]]  # training functions by label; the second is for --compare
    rows: str  # the unit of `--batch-size`: "digits"
    unit: str  # the unit that a loss is averaged over: "digits"
    score: str  # the test's result: "accuracy"
    score_format: str  # the same in a line: "accuracy {:.2f} %"


def add_options(parser: ArgumentParser, compare: str, **defaults: Any) -> None:
    """Add the options that both programs have, and defaults of some of them. `compare` is a help text."""
    add = parser.add_argument
    rate = partial(number, float, lambda x: isfinite(x) and x > 0, "a finite number > 0")
    seed = partial(number, int, lambda n: n >= 0, "a whole number from 0")
    add("--epochs", type=count, default=3, metavar="N", help="passes over the training data (default: %(default)s)")
    add("--accumulate-step", type=count, default=2, metavar="N",
        help="microbatches in a window, between two updates (default: %(default)s)")
    add("--optimizer", choices=OPTIMIZERS, help="(default: %(default)s)")
    add("--lr", type=rate, metavar="RATE", help="learning rate (default: %(default)s)")
    add("--clip-norm", type=float, metavar="NORM",
        help="clip the accumulated gradient to this global norm (default: %(default)s)")
    add("--seed", type=seed, default=42, metavar="N",
        help="seed of the initial weights and the order of the data (default: %(default)s)")
    add("--sync", choices=("window", "microbatch", "node"),
        help="how often ranks exchange gradients, see DataParallel (default: window; microbatch with --zero 2)")
    add("--zero", type=int, choices=(0, 1, 2), default=0,
        help="divide among ranks: 1 the optimizer's state, 2 also the buffers (default: %(default)s)")
    add("--compare", action="store_true", help=compare)
    add("--save", type=output(SUFFIX), metavar="FILE.safetensors", help="write a checkpoint after each epoch")
    add("--resume", metavar="FILE.safetensors",
        help="continue from a checkpoint as if the run had never stopped; --epochs, --accumulate-step and the number "
             "of ranks may differ")
    add("--json", type=output(), metavar="FILE", help="write all results and options")
    add("--plot", type=output(".png"), metavar="FILE.png", help="draw loss and score; needs matplotlib")
    parser.set_defaults(**defaults)


def run(program: Program, options: Namespace) -> None:
    """Train, report and write. Raise ValueError for wrong input, OSError for files that cannot be read or written."""
    if options.compare and (options.save, options.resume) != (None, None):
        raise ValueError("argument --compare: it trains twice, so it cannot be used with checkpoints; leave out --save "
                         "and --resume")
    join_ranks()
    reports, networks = [], []
    for label, train in list(program.ways.items())[:1 + options.compare]:
        reports.append(Report(program, label, options))
        networks.append(train(options, reports[-1]))
    figures = {**reports[0].figures(), "versions": versions(), "options": vars(options)}
    if options.compare:
        difference = largest_difference(*networks)
        print("\ncomparison", *(f"{report.label:<13}  {report.score()}" for report in reports), sep="\n")
        print(f"largest parameter difference {difference:.3g}", flush=True)
        figures |= {"compared": reports[1].figures(), "largest_parameter_difference": difference}
    _write(options, reports, figures)


def _write(options: Namespace, reports: list[Report], figures: dict) -> None:
    exchange = reports[0].accumulator.exchange
    if exchange.rank == 0:
        if options.save and reports[0].trained > 0:
            say_written(options.save)
        if options.json:
            write_json(options.json, figures)
        if options.plot:
            write_file(options.plot, plot(reports).savefig)
    if exchange.ranks > 1:
        wait_for_all()  # if one rank exits, others that still communicate fail


def largest_difference(one: nn.Cell, other: nn.Cell) -> float:
    """Return the largest absolute difference between the parameters of two networks; NaN if either holds one."""
    pairs = zip(one.get_parameters(), other.get_parameters())
    return float(np.max([np.abs(a.asnumpy() - b.asnumpy()).max() for a, b in pairs]))


class Report:
    """Print the progress of a training, and keep its results.

        report.begin(train_step, "10,000 digits", resumed)
        for epoch in report.epochs_left():
            losses = report.progress(train_step.epoch(batches), sizes)
            report.add(losses, score)

    Attributes:
        state: The state to save in a checkpoint, and to give to `begin` as `resumed`.
    """

    def __init__(self, program: Program, label: str, options: Namespace) -> None:
        self.program, self.label, self.options = program, label, options
        self.epochs: list[dict[str, Any]] = []
        self.trained = 0.0  # when the training of the last epoch ended
        run = {"command": program.name, **{name: v for name, v in vars(options).items() if name not in _FREE}}
        self.state: dict[str, Any] = {"run": run, "epochs": self.epochs}
        if options.compare:
            print(f"\n{label}")

    def begin(self, train_step: TrainStep, data: str, resumed: Any) -> None:
        """Print the settings, the data and the batch size of an update. Continue after the epochs of `resumed`.

        Raise CheckpointError if `resumed` is from a run with other options.
        """
        options, self.accumulator = self.options, train_step.accumulator
        self.ranks = ranks = world_size()
        if resumed is not None:
            self._resume(resumed)
        sync = DataParallel(sync=options.sync, zero=options.zero).sync
        of, exchanged = ("", "") if ranks == 1 else (f" x {ranks} ranks", f", gradients exchanged each {sync}")
        size = options.batch_size * options.accumulate_step * ranks
        clipped = "" if options.clip_norm is None else f", clipped to norm {options.clip_norm:g}"
        print(f"versions   {', '.join(f'{name} {version}' for name, version in versions().items())}",
              f"data       {printable(data)}",
              f"batch      {options.batch_size:,} x {options.accumulate_step:,}{of} = {size:,} {self.program.rows} an "
              f"update{exchanged}",
              f"optimizer  {options.optimizer}, learning rate {options.lr:g}{clipped}, seed {options.seed}",
              sep="\n", flush=True)

    def _resume(self, resumed: Any) -> None:
        path = self.options.resume
        if not isinstance(resumed, dict) or not resumed.keys() >= self.state.keys():
            raise CheckpointError(f"{path} holds no epochs; give a file that --save wrote")
        for name, value in self.state["run"].items():
            if resumed["run"].get(name) != value:
                raise CheckpointError(f"{path} is from a run with {name} {resumed['run'].get(name)}, but this run has "
                                      f"{value}; give the same options")
        self.epochs.extend(resumed["epochs"])
        print(f"resumed    {printable(path)}, saved after epoch {len(self.epochs)}")

    def epochs_left(self) -> range:
        """Return the numbers of the epochs to train, from 1. If there are none, print that training has finished."""
        left = range(len(self.epochs) + 1, self.options.epochs + 1)
        if not left:
            last = self.epochs[-1]
            print(f"finished   epoch {last['epoch']}/{self.options.epochs}  loss {last['loss']:.4f}  {self.score()}; "
                  f"to train on, give --epochs {last['epoch'] + 1} or more", flush=True)
        return left

    def progress(self, losses: Iterable[Tensor], sizes: Sequence[int]) -> list[Tensor]:
        """Return the losses of an epoch, whose microbatches hold `sizes` units, and show its progress.

        On a terminal, it shows a progress bar; elsewhere, a line every 10 seconds. A loss is read only to be shown,
        because reading waits for the device.
        """
        self.sizes, self.start, taken, done = sizes, perf_counter(), [], 0
        name, unit, due = f"epoch {len(self.epochs) + 1}/{self.options.epochs}", self.program.unit, PROGRESS_SECONDS
        with tqdm(total=sum(sizes), desc=name, unit=f" {unit}", unit_scale=True, leave=False, dynamic_ncols=True,
                  file=sys.stdout, disable=not sys.stdout.isatty()) as bar:
            for loss, size in zip(losses, sizes):
                raise_if_interrupted()
                taken.append(loss)
                done += size
                if bar.update(size):
                    bar.set_postfix(loss=f"{float(loss):.3f}", refresh=False)
                elif bar.disable and perf_counter() - self.start >= due:
                    print(f"{name}  {done:,} of {sum(sizes):,} {unit}  loss {float(loss):.4f}", flush=True)
                    due += PROGRESS_SECONDS
        self.trained = perf_counter()
        return taken

    def add(self, losses: list[Tensor], score: float) -> None:
        """Keep and print the results of an epoch: the mean loss over the units of all ranks, and the test's result."""
        sums = np.array([np.dot([float(loss) for loss in losses], self.sizes), sum(self.sizes)], np.float64)
        total, units = gather(sums).sum(axis=0) if self.ranks > 1 else sums
        last = {"epoch": len(self.epochs) + 1, "loss": float(total / units), self.program.score: float(score),
                "update_step": int(self.accumulator.update_step), "train_seconds": self.trained - self.start,
                "test_seconds": perf_counter() - self.trained}
        self.epochs.append(last)
        print(f"epoch {last['epoch']}/{self.options.epochs}  loss {last['loss']:.4f}  {self.score()}  "
              f"train {last['train_seconds']:.2f} s  test {last['test_seconds']:.2f} s", flush=True)

    def score(self) -> str:
        """Return the last result of the test as text."""
        return self.program.score_format.format(self.epochs[-1][self.program.score])

    def figures(self) -> dict[str, Any]:
        """Return the results of the last epoch, and those of all epochs."""
        return {**self.epochs[-1], "ranks": self.ranks, "epochs": self.epochs}


def plot(reports: list[Report]) -> Figure:
    """Draw loss and test score of one or two trainings over the epochs."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    # A Figure of its own, not pyplot: no global state, and no display is needed.
    figure = Figure(figsize=(10, 4), dpi=120, layout="constrained")
    for axes, name in zip(figure.subplots(1, 2), ("loss", reports[0].program.score)):
        # If both trainings agree, the second lies on the first: dashes and crosses leave the first visible.
        for report, style in zip(reports, ("o-", "x--")):
            axes.plot(*zip(*((epoch["epoch"], epoch[name]) for epoch in report.epochs)), style, label=report.label)
        axes.set(xlabel="epoch", ylabel=name)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(alpha=0.3)
        axes.legend()
    return figure
