"""Which exchange for which link: two hosts with two ranks each, on links of 10 Gbit/s, 1 Gbit/s and 100 Mbit/s.

    python tutorials/benchmarks/hosts.py          # records/hosts.json, guide/many-ranks.png, and a table; needs root, ip and tc

The hosts are network namespaces of this machine (`two_hosts.py`). Bytes are counted at the interface. Beside each time is what
`cost_model.py` predicts: its costs are fitted to runs on one host (`records/distributed.json`), and bytes go over the link as often as
they were counted here.
"""
from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median

import cost_model
import records
import two_hosts
from cost_model import Run
from two_hosts import FOLDER, HOSTS, time_each

RECORD = records.HERE / "records" / "hosts.json"
FIGURE = records.HERE.parent / "guide" / "many-ranks.png"
RATES = {"10 Gbit/s": 10_000, "1 Gbit/s": 1000, "100 Mbit/s": 100}  # Mbit/s
WAYS = ("window", "microbatch", "shard", "node", "node-shard", "local")
RANKS, SAMPLES, N, WINDOWS, ROUNDS = 2, 32, 4, 4, 3
GRADIENTS = 4 * (784 * 512 + 512 + 512 * 512 + 512 + 512 * 10 + 10)  # bytes


def work() -> None:
    """On each rank: time each way at each rate."""
    import mindspore as ms
    import numpy as np
    from mindspore import Tensor, nn
    from mindspore.communication import get_rank, init

    from ms_accum import DataParallel, avoid_busy_waiting, make_train_step
    from ms_accum.distributed import LocalUpdates
    from ms_accum.mnist.network import Network, make_forward

    avoid_busy_waiting()
    init()
    reducers = {"window": DataParallel(), "microbatch": DataParallel(sync="microbatch"),
                "shard": DataParallel(sync="microbatch", shard=True), "node": DataParallel(sync="node", ranks_per_node=RANKS),
                "node-shard": DataParallel(sync="node", shard=True, ranks_per_node=RANKS)}
    rng = np.random.default_rng(get_rank())
    batch = Tensor(rng.random((SAMPLES, 784)), ms.float32), Tensor(rng.integers(0, 10, SAMPLES), ms.int32)
    steps = {}
    for way in WAYS:
        network = Network(0)
        local = LocalUpdates(network.trainable_params(), every=WINDOWS) if way == "local" else None
        steps[way] = make_train_step(make_forward(network), nn.SGD(network.trainable_params(), 0.01), N, reducer=reducers.get(way),
                                     after_update=local)

    def train(step: object) -> None:
        for _ in range(N * WINDOWS):
            loss = step(*batch)
        float(loss)

    time_each(RATES, ROUNDS, {way: partial(train, step) for way, step in steps.items()})


def measure() -> list[list]:
    """Return a row for each rate and way: medians of the seconds of a sample, and of the bytes of a host for a window."""
    hosts = two_hosts.measure(__file__, RANKS, RATES)
    samples = HOSTS * RANKS * SAMPLES * N * WINDOWS
    rows = []
    for rate in RATES:
        for way in WAYS:
            found = [[row[2:] for row in host if row[:2] == [rate, way]] for host in hosts]
            seconds = [max(pair) / samples for pair in zip(*[[row[0] for row in host] for host in found])]
            sent = median(row[1] for host in found for row in host) / WINDOWS
            rows.append([rate, way, median(seconds), min(seconds), max(seconds), sent])
    return rows


def runs_of(rows: list[list]) -> list[tuple[Run, float]]:
    """Return what each row ran, and its seconds for a microbatch of all ranks."""
    return [(Run(way, HOSTS * RANKS, N, GRADIENTS, one_machine=True, scatters=False, hosts=HOSTS, link=8e-6 / RATES[rate], every=WINDOWS),
             seconds * HOSTS * RANKS * SAMPLES) for rate, way, seconds, *_ in rows]


def of_a_ring(rows: list[list]) -> list[float]:
    """Return the bytes of each row, as multiples of those of rings."""
    return [row[5] / cost_model.exchange(run)[2] for row, (run, _) in zip(rows, runs_of(rows))]


def predicting(rows: list[list]) -> cost_model.Costs:
    """Return the costs of ranks on one host, with a link on which bytes cost what was counted."""
    costs = cost_model.fitted(cost_model.measured(records.read(cost_model.RECORD)))
    return replace(costs, wire=median(of_a_ring(rows)))


def table(rows: list[list]) -> list[str]:
    """Return the rows of a Markdown table."""
    costs = predicting(rows)
    rates = " | ".join(f"{rate}: µs/sample | predicted" for rate in RATES)
    lines = [f"| exchange | MB sent by a host for a window | {rates} |", "|-|-|" + "-|-|" * len(RATES)]
    for way in WAYS:
        mine = [row for row in rows if row[1] == way]
        times = []
        for (_, _, *measured, _), (run, _) in zip(mine, runs_of(mine)):
            middle, low, high = (f"{1e6 * seconds:,.0f}" for seconds in measured)
            times += [f"{middle} ({low} to {high})", f"{1e6 * cost_model.seconds(costs, run) / (HOSTS * RANKS * SAMPLES):,.0f}"]
        lines.append(f"| {' | '.join((way, f'{median(row[5] for row in mine) / 1e6:.1f}', *times))} |")
    return lines


def draw(rows: list[list], file: Path) -> None:
    """Draw the time of a sample against the rate of the link: medians and ranges, and, dotted, what is predicted."""
    from matplotlib.figure import Figure

    costs = predicting(rows)
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    for i, way in enumerate(WAYS):
        mine = {rate: row for rate, *row in rows if row[0] == way}
        places = list(RATES.values())
        middle, low, high = zip(*[[1e6 * value for value in mine[rate][1:4]] for rate in RATES])
        errors = [[m - a for m, a in zip(middle, low)], [b - m for m, b in zip(middle, high)]]
        axes.errorbar(places, middle, errors, marker="o", capsize=3, color=f"C{i}", label=way)
        runs = [run for run, _ in runs_of(rows) if run.mode == way]
        predicted = [1e6 * cost_model.seconds(costs, run) / (HOSTS * RANKS * SAMPLES) for run in runs]
        axes.plot(places, predicted, ":", color=f"C{i}", alpha=0.6)
    axes.set(xscale="log", yscale="log", xlabel="rate of the link in Mbit/s", ylabel="µs for a sample",
             title="Two hosts with two ranks each (dotted: predicted)")
    axes.grid(alpha=0.3, which="both")
    axes.legend(fontsize=8)
    figure.savefig(file, dpi=80)


def main(arguments: list[str]) -> None:
    """Run, write the record, draw it, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=RECORD, metavar="FILE.json", help="(default: records/hosts.json)")
    parser.add_argument("--table", action="store_true", help="print the table of the record, without a run")
    parser.add_argument("--figure", type=Path, metavar="FILE.png", help="draw the record (default, after a run: guide/many-ranks.png)")
    options = parser.parse_args(arguments)
    if not options.table:
        record = {"suite": "hosts", "quick": False, "command": "python tutorials/benchmarks/hosts.py", **records.circumstances(),
                  "groups": [], "hosts": HOSTS, "ranks_of_a_host": RANKS, "samples": SAMPLES, "accumulate_step": N, "windows": WINDOWS,
                  "columns": ["rate", "exchange", "seconds of a sample", "least", "most", "bytes of a host for a window"],
                  "rows": measure()}
        records.write(record, options.output)
    rows = json.loads(options.output.read_text(encoding="utf-8"))["rows"]
    if options.figure or not options.table:
        draw(rows, options.figure or FIGURE)
    print("\n".join(table(rows)))
    ratios = sorted(median(of_a_ring([row for row in rows if row[1] == way])) for way in WAYS)
    print(f"\nBytes of rings: {ratios[0]:.2f} to {ratios[-1]:.2f} times as many.")
    print(f"Predicted with an error of {cost_model.error_line(predicting(rows), runs_of(rows))}.")


if __name__ == "__main__":
    if FOLDER in os.environ:
        work()
    else:
        main(sys.argv[1:])
