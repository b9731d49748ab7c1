"""Which exchange for which link: two hosts with two ranks each, on links of 10 Gbit/s, 1 Gbit/s and 100 Mbit/s.

    python tutorials/benchmarks/hosts.py          # records/hosts.json, guide/many-ranks.png, and a table; needs root, ip and tc

The hosts are network namespaces of this machine (`tests/distributed/cluster.py`), so four ranks share its cores and only the link is
that of two hosts. Each way to exchange is compiled once; then the link's rate is changed, and windows are timed. Bytes are counted at the
interface. Beside each time is what `cost_model.py` predicts: its costs are fitted to runs on one host (`records/distributed.json`), and
bytes go over the link as often as they were counted here.
"""
from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import cost_model
import records
from cost_model import Run

RECORD = records.HERE / "records" / "hosts.json"
FIGURE = records.HERE.parent / "guide" / "many-ranks.png"
RATES = {"10 Gbit/s": 10_000, "1 Gbit/s": 1000, "100 Mbit/s": 100}  # Mbit/s
WAYS = ("window", "microbatch", "shard", "node", "node-shard", "local")
HOSTS, RANKS, SAMPLES, N, WINDOWS, ROUNDS = 2, 2, 32, 4, 4, 3
GRADIENTS = 4 * (784 * 512 + 512 + 512 * 512 + 512 + 512 * 10 + 10)  # bytes
FOLDER = "MS_ACCUM_HOSTS"  # where ranks write
COUNTER = Path("/sys/class/net/eth0/statistics/tx_bytes")


# --- what each rank does --------------------------------------------------------------------------------------------------


def work(folder: Path) -> None:
    """Train each way at each rate; rank 0 writes the seconds of a window, and the first rank of each host its bytes."""
    import mindspore as ms
    import numpy as np
    from mindspore import Tensor, nn
    from mindspore.communication import get_rank, init

    from ms_accum import DataParallel, LocalUpdates, avoid_busy_waiting, make_train_step
    from ms_accum.distributed.ranks import wait_for_all
    from ms_accum.mnist.network import Network, make_forward

    avoid_busy_waiting()
    init()
    rank = get_rank()
    reducers = {"window": DataParallel(), "microbatch": DataParallel(sync="microbatch"),
                "shard": DataParallel(sync="microbatch", shard=True), "node": DataParallel(sync="node", ranks_per_node=RANKS),
                "node-shard": DataParallel(sync="node", shard=True, ranks_per_node=RANKS), "local": LocalUpdates(every=WINDOWS)}
    rng = np.random.default_rng(rank)
    batch = Tensor(rng.random((SAMPLES, 784)), ms.float32), Tensor(rng.integers(0, 10, SAMPLES), ms.int32)
    steps = {}
    for way in WAYS:
        network = Network(0)
        steps[way] = make_train_step(make_forward(network), nn.SGD(network.trainable_params(), 0.01), N, reducer=reducers[way])

    def train(step: object) -> None:
        for _ in range(N * WINDOWS):
            loss = step(*batch)
        float(loss)
        wait_for_all()

    for way in WAYS:
        train(steps[way])
    rows = []
    for rate in RATES:
        if rank == 0:
            (folder / f"want-{rate.replace('/', '-')}").touch()
        while not (folder / f"have-{rate.replace('/', '-')}").exists():
            time.sleep(0.05)
        wait_for_all()
        for _ in range(ROUNDS):
            for way in WAYS:
                wait_for_all()
                sent, start = int(COUNTER.read_text(encoding="ascii")), time.perf_counter()
                train(steps[way])
                rows.append([rate, way, time.perf_counter() - start, int(COUNTER.read_text(encoding="ascii")) - sent])
    if rank % RANKS == 0:
        (folder / f"host{rank // RANKS}.json").write_text(json.dumps(rows), encoding="utf-8")
    wait_for_all()


# --- the cluster ----------------------------------------------------------------------------------------------------------


def measure() -> list[list]:
    """Return a row for each rate and way: medians of the seconds of a sample, and of the bytes of a host for a window."""
    sys.path.append(str(records.HERE.parents[1] / "tests" / "distributed"))
    from cluster import Cluster

    programs = Path(sys.executable).parent
    with TemporaryDirectory() as temporary, Cluster(HOSTS) as cluster:
        folder = Path(temporary)
        environment = {**os.environ, FOLDER: temporary, "GLOG_v": "4", "PATH": f"{programs}:{os.environ['PATH']}"}
        runs = []
        for host in cluster.hosts:
            command = ["msrun", f"--worker_num={HOSTS * RANKS}", f"--local_worker_num={RANKS}", f"--master_addr={cluster.address(0)}",
                       f"--node_rank={host}", "--join=True", f"--log_dir={folder / f'ranks{host}'}", "python", __file__]
            runs.append(cluster.start(host, command, folder / f"{host}.log", cwd=folder, env=environment))
        for rate, mbit in RATES.items():
            name = rate.replace("/", "-")
            while not (folder / f"want-{name}").exists():
                if any(run.poll() is not None for run in runs):
                    raise SystemExit((folder / "0.log").read_text(encoding="utf-8")[-3000:])
                time.sleep(0.1)
            for host in cluster.hosts:
                # A burst of a millisecond; with less, the kernel's clock would limit fast links.
                subprocess.run(["tc", "-n", cluster._names[host], "qdisc", "replace", "dev", "eth0", "root", "tbf", "rate", f"{mbit}mbit",
                                "burst", f"{max(mbit, 100)}kbit", "latency", "400ms"], check=True)
            (folder / f"have-{name}").touch()
        for run in runs:
            run.wait(600)
        hosts = [json.loads((folder / f"host{host}.json").read_text(encoding="utf-8")) for host in cluster.hosts]
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
    if FOLDER in os.environ:  # msrun would take an option for its own
        work(Path(os.environ[FOLDER]))
    else:
        main(sys.argv[1:])
