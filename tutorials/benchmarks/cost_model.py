"""What a microbatch takes on many ranks: a cost model, fitted to a record of the suite distributed, and on paper beyond it.

`hosts.py` checks it against two hosts.

    seconds = microbatch + update / N + (hops x latency + bytes x seconds of a byte) / N      hops and bytes of a window, see `exchange`

A ring's AllReduce of b bytes on n ranks takes 2(n - 1) hops, and each rank sends 2(n - 1)/n x b bytes; ReduceScatter and AllGather are
half of it. Ranks on one machine share its cores and its memory: they compute 1 + crowding x (n - 1) times as long, and send n times as
long. What a host sends to others takes its link's time besides. Nothing overlaps: where exchanges hide behind the backward pass, a
microbatch's exchange costs less than this.
"""
from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import astuple, dataclass
from itertools import product
from math import ceil
from pathlib import Path
from statistics import median

import numpy as np
import records

RECORD = Path(__file__).with_name("records") / "distributed.json"
MODES = ("window", "microbatch", "shard", "node", "node-shard", "local")
CROWDING = np.linspace(0, 4, 401)
FLOAT = 4
HEADER = 3 * FLOAT


@dataclass(frozen=True)
class Costs:
    """Of a network on a machine.

    Attributes:
        microbatch: Seconds for forward, backward and adding the gradients.
        update: Seconds for what closes a window.
        latency: Seconds for a hop.
        byte: Seconds to send one.
        crowding: Part of a rank's time that each further rank on the same machine adds to it.
        wire: Bytes that go over a link for each byte of a ring.
    """

    microbatch: float
    update: float
    latency: float
    byte: float
    crowding: float = 0.0
    wire: float = 1.0


@dataclass(frozen=True)
class Run:
    """What is trained, on how many ranks, and how they exchange.

    Attributes:
        mode: "alone" or one of `MODES`.
        ranks: Their number.
        n: Microbatches in a window.
        size: Bytes of the gradients.
        buckets: Collectives that carry them.
        one_machine: Whether all ranks are on one, which may hold several hosts as network namespaces.
        scatters: Whether the backend has a ReduceScatter, and an AllGather for part of the ranks; otherwise an AllReduce stands in.
        hosts: Their number; each has equally many ranks.
        link: Seconds for a byte that a host sends to others.
        every: Windows between two exchanges of "local".
    """

    mode: str
    ranks: int
    n: int
    size: float
    buckets: int = 1
    one_machine: bool = False
    scatters: bool = True
    hosts: int = 1
    link: float = 0.0
    every: int = 50


def seconds(costs: Costs, run: Run) -> float:
    """For a microbatch."""
    crossing = exchange(run)[2]
    return float(np.dot(terms(run, costs.crowding), astuple(costs)[:4]) + costs.wire * crossing * run.link / run.n)


def terms(run: Run, crowding: float) -> tuple[float, float, float, float]:
    """How often a microbatch pays the first four of the costs."""
    crowd, sharing = (1 + crowding * (run.ranks - 1), run.ranks) if run.one_machine else (1, 1)
    hops, sent, _ = exchange(run)
    return crowd, crowd / run.n, hops / run.n, sharing * sent / run.n


def exchange(run: Run) -> np.ndarray:
    """Hops, bytes that a rank sends, and bytes that a host sends to others, in a window."""
    node = run.ranks // run.hosts

    def half(members: int, size: float, rings: int, buckets: int = run.buckets) -> np.ndarray:
        """Of an AllReduce, which is a ReduceScatter and an AllGather; `rings` of them leave a host."""
        sent = size * (members - 1) / members
        return np.array([buckets * (members - 1), sent, rings * sent])

    # In a ring of all ranks, one rank of each host sends to another host. Between hosts, each rank of a host has a ring with its part.
    everyone, everyone_header = [half(run.ranks, *what) for what in ((run.size, run.hosts > 1), (HEADER, run.hosts > 1, 1))]
    inside, inside_header = [half(node, *what) for what in ((run.size, 0), (HEADER, 0, 1))]
    across = half(run.hosts, run.size / node, node) + half(run.hosts, HEADER, node, 1)
    scatter = 1 if run.scatters else 2
    return {
        "alone": 0 * everyone,
        "window": 2 * everyone,
        "microbatch": run.n * 2 * everyone,
        "shard": run.n * (2 * everyone_header + scatter * everyone) + everyone,
        "node": run.n * 2 * inside + 2 * across + scatter * inside,
        "node-shard": run.n * (2 * inside_header + scatter * inside) + 2 * across + scatter * inside,
        "local": 2 * everyone / run.every,
    }[run.mode]


# --- fitted to a record ----------------------------------------------------------------------------------------------------


def measured(record: dict) -> list[tuple[Run, float]]:
    """What was run, and the median of its seconds. Raises ValueError if there is too little to fit."""
    if record["suite"] != "distributed":
        raise ValueError(f"the record is of suite {record['suite']}, expected distributed")
    rows = []
    for group in record["groups"]:
        for mode, figures in group["contestants"].items():
            if figures.get("samples"):
                run = Run(mode, group["case"]["ranks"], group["case"]["accumulate_step"], figures["parameter_bytes"],
                          one_machine=True, scatters=False)
                rows.append((run, median(figures["samples"])))
    counts = {run.ranks for run, _ in rows}
    if len(counts) < 2:
        raise ValueError(f"the record has samples of {len(counts)} numbers of ranks, expected 2 or more")
    return rows


def fitted(rows: list[tuple[Run, float]]) -> Costs:
    """The costs, none below zero, with the least squares of relative errors."""
    return min((costs for crowding in CROWDING for costs in _candidates(rows, float(crowding))), key=lambda costs: _squares(costs, rows))


def relative_errors(costs: Costs, rows: Iterable[tuple[Run, float]]) -> list[float]:
    """(model - measured) / measured."""
    return [seconds(costs, run) / sample - 1 for run, sample in rows]


def _squares(costs: Costs, rows: list[tuple[Run, float]]) -> float:
    return sum(error**2 for error in relative_errors(costs, rows))


def _candidates(rows: list[tuple[Run, float]], crowding: float) -> Iterator[Costs]:
    """For a given crowding the model is linear: the solutions with some of the costs, the others zero, that have none below zero."""
    matrix = np.array([np.array(terms(run, crowding)) / sample for run, sample in rows])
    for kept in map(np.array, product((False, True), repeat=4)):
        solution = np.zeros(4)
        solution[kept] = np.linalg.lstsq(matrix[:, kept], np.ones(len(rows)), rcond=None)[0]
        if (solution >= 0).all():
            yield Costs(*map(float, solution), crowding)


# --- tables ----------------------------------------------------------------------------------------------------------------


def fit_table(rows: list[tuple[Run, float]], costs: Costs) -> str:
    """The model against what it was fitted to."""
    lines = [("ranks", "N", "mode", "measured, ms", "model, ms", "error")]
    lines += [(run.ranks, run.n, run.mode, f"{sample * 1e3:.2f}", f"{seconds(costs, run) * 1e3:.2f}", f"{error:+.0%}")
              for (run, sample), error in zip(rows, relative_errors(costs, rows))]
    return _table(lines)


def error_line(costs: Costs, rows: list[tuple[Run, float]]) -> str:
    """The middle and the largest of the relative errors."""
    errors = np.abs(relative_errors(costs, rows))
    return f"median {np.median(errors):.0%}, largest {errors.max():.0%}"


def held_out_line(rows: list[tuple[Run, float]]) -> str:
    """How well a fit to the others predicts the largest number of ranks."""
    most = max(run.ranks for run, _ in rows)
    fewer = [(run, sample) for run, sample in rows if run.ranks < most]
    return f"Fitted without the rows of {most} ranks, on these: {error_line(fitted(fewer), [row for row in rows if row not in fewer])}."


def paper_table(options: argparse.Namespace) -> str:
    """Networks, numbers of ranks and links that were not run."""
    lines = [("parameters", "ranks", "N", "Gbit/s", "compute and add, ms", *(f"{mode}, ms" for mode in MODES))]
    for parameters, ranks, n, gbit in product(options.parameters, options.ranks, options.n, options.link_gbit):
        costs, size = assumed(options, parameters), parameters * FLOAT
        runs = [Run(mode, ranks, n, size, ceil(size / (options.bucket_mib * 2**20)), hosts=ceil(ranks / options.ranks_per_host),
                    link=8e-9 / gbit) for mode in MODES]
        times = [costs.microbatch, *(seconds(costs, run) for run in runs)]
        lines.append((f"{parameters / 1e6:,.0f} M", f"{ranks:,}", n, f"{gbit:g}", *(f"{time * 1e3:,.0f}" for time in times)))
    return _table(lines)


def assumed(options: argparse.Namespace, parameters: float) -> Costs:
    """The options' costs of a network: 6 operations for each parameter and token; adding reads 2 and writes 1 float for each parameter."""
    compute = 6 * parameters * options.tokens / (options.teraflops * 1e12)
    floats = parameters * FLOAT / (options.memory_gbs * 1e9)
    # SGD reads a gradient and a parameter, writes the parameter, and empties the buffer.
    return Costs(compute + 3 * floats, 4 * floats, options.latency_us * 1e-6, 1 / (options.bandwidth_gbs * 1e9))


def _table(lines: list[tuple]) -> str:
    head, *rows = [[str(cell) for cell in line] for line in lines]
    return "\n".join([f"| {' | '.join(head)} |", "|-" * len(head) + "|", *(f"| {' | '.join(row)} |" for row in rows)])


# --- command line ----------------------------------------------------------------------------------------------------------


def main(arguments: list[str]) -> None:
    """Fit, check, and go on on paper."""
    parser = make_parser()
    options = parser.parse_args(arguments)
    together = options.ranks_per_host
    for ranks in options.ranks:
        if ranks > together and ranks % together:
            parser.error(f"argument --ranks: expected a multiple of --ranks-per-host {together}, or fewer, got {ranks}")
    try:
        rows = measured(records.read(options.record))
    except ValueError as error:
        parser.exit(2, f"cost_model.py: error: {error}\n")
    costs = fitted(rows)
    print(f"Fitted: {costs.microbatch * 1e3:.2f} ms a microbatch, {costs.update * 1e3:.2f} ms an update, "
          f"{costs.latency * 1e6:.0f} us a hop, {costs.byte * 1e9:.2f} ns a byte, crowding {costs.crowding:.2f}.\n"
          f"Error: {error_line(costs, rows)}. {held_out_line(rows)}\n")
    print(fit_table(rows, costs))
    print(f"\nOn paper: {options.ranks_per_host} ranks on a host, {options.bandwidth_gbs:g} GB/s inside it, "
          f"{options.latency_us:g} us a hop, {options.teraflops:g} TFLOP/s, {options.tokens:,} tokens a microbatch, "
          f"{options.memory_gbs:g} GB/s of memory, buckets of {options.bucket_mib:g} MiB.\n")
    print(paper_table(options))


def make_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(prog="cost_model.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("record", nargs="?", type=Path, default=RECORD, metavar="RECORD",
                        help="what to fit (default: records/distributed.json)")
    paper = parser.add_argument_group("on paper")
    for name, default, what in (
            ("--ranks-per-host", 8, "ranks on a host"),
            ("--bandwidth-gbs", 100.0, "GB/s that a rank sends inside a host"),
            ("--latency-us", 10.0, "microseconds for a hop"),
            ("--teraflops", 100.0, "TFLOP/s of a rank"),
            ("--tokens", 8192, "tokens in a microbatch of a rank"),
            ("--memory-gbs", 1000.0, "GB/s of a rank's memory"),
            ("--bucket-mib", 32.0, "MiB in one collective")):
        paper.add_argument(name, type=_positive(type(default)), default=default, metavar="X", help=f"{what} (default: {default:,g})")
    for name, default, what in (
            ("--parameters", (1e7, 1e9), "of the networks"),
            ("--ranks", (64, 1024), "their numbers"),
            ("--n", (8,), "microbatches in a window"),
            ("--link-gbit", (100.0, 10.0, 1.0), "Gbit/s of a host's link")):
        paper.add_argument(name, type=_positive(type(default[0])), nargs="+", default=default, metavar="X",
                           help=f"{what} (default: {' '.join(f'{value:g}' for value in default)})")
    return parser


def _positive(kind: type) -> Callable[[str], float]:
    def number(text: str) -> float:
        value = kind(text)
        if not 0 < value < float("inf"):
            raise argparse.ArgumentTypeError(f"expected a number > 0, got {text!r}")
        return value
    number.__name__ = kind.__name__
    return number


if __name__ == "__main__":
    main(sys.argv[1:])
