"""Is it worth it to exchange a window's first buckets while the backward pass of its last microbatch is still running?

    python tutorials/benchmarks/overlap.py        # records/overlap.json and a table; needs root, ip and tc

Two hosts with one rank each (`two_hosts.py`), a stack of dense layers, SGD, windows of N microbatches. Contestants:

    whole       the library: gradients are exchanged when the window is complete, in one bucket
    buckets     the same, in buckets of 1 MiB
    overlapped  a third graph does the last microbatch, the exchange and the update; buckets of 1 MiB, last layers first, and each waits
                for its own gradients alone
    waiting     the control: the same graph, but each bucket waits for all gradients
    alone       no exchange
"""
from __future__ import annotations

import argparse
import json
import os
import sys
from functools import partial
from pathlib import Path
from statistics import median

import records
import two_hosts
from two_hosts import FOLDER, HOSTS, time_each

RECORD = records.HERE / "records" / "overlap.json"
RATES = {"10 Gbit/s": 10_000, "1 Gbit/s": 1000, "300 Mbit/s": 300}  # Mbit/s
CONTESTANTS = ("whole", "buckets", "overlapped", "waiting", "alone")
WIDTH, LAYERS, SAMPLES, N, WINDOWS, ROUNDS = 512, 8, 128, 4, 3, 10
MEBIBYTE = 2**20


def work() -> None:
    """On each rank: train each contestant from the same start, compare them, and time them."""
    import mindspore as ms
    import numpy as np
    from mindspore import Tensor
    from mindspore.communication import get_rank, init

    from ms_accum import avoid_busy_waiting

    avoid_busy_waiting()
    init()
    rng = np.random.default_rng(get_rank())
    batches = [(Tensor(rng.standard_normal((SAMPLES, WIDTH)), ms.float32), Tensor(rng.standard_normal((SAMPLES, WIDTH)), ms.float32))
               for _ in range(N)]
    made = {name: make(name) for name in CONTESTANTS}

    def train(window: object) -> None:
        for _ in range(WINDOWS):
            loss = window(batches)
        float(loss)

    time_each(RATES, ROUNDS, {name: partial(train, window) for name, (_, window) in made.items()})
    trained = {name: np.concatenate([p.asnumpy().ravel() for p in parameters]) for name, (parameters, _) in made.items()}
    for name in ("buckets", "overlapped", "waiting"):
        difference = np.abs(trained[name] - trained["whole"]).max()
        if not difference <= 1e-5:
            raise SystemExit(f"{name} differs from whole by {difference}")
    if np.abs(trained["alone"] - trained["whole"]).max() <= 1e-5:
        raise SystemExit("alone does not differ from whole, so the comparison shows nothing")


def make(name: str) -> tuple:
    """Return the parameters of a network, and a function that trains a window of batches and returns the last loss."""
    import mindspore as ms
    import numpy as np
    from mindspore import Tensor, nn, ops

    from ms_accum import DataParallel, make_train_step

    rng = np.random.default_rng(0)
    layers = []
    for _ in range(LAYERS):
        weight = Tensor(rng.standard_normal((WIDTH, WIDTH)) / WIDTH**0.5, ms.float32)
        layers += [nn.Dense(WIDTH, WIDTH, weight_init=weight, bias_init="zeros"), nn.ReLU()]
    network = nn.SequentialCell(layers)
    optimizer = nn.SGD(network.trainable_params(), 0.01)

    def forward(x: Tensor, y: Tensor) -> Tensor:
        return ops.square(network(x) - y).mean()

    if name in ("whole", "buckets", "alone"):
        reducer = None if name == "alone" else DataParallel(bucket_mib=1 if name == "buckets" else 32)
        step = make_train_step(forward, optimizer, N, reducer=reducer)

        def window(batches: list) -> Tensor:
            for batch in batches:
                loss = step(*batch)
            return loss

        return optimizer.parameters, window
    return optimizer.parameters, third_graph(forward, optimizer, name == "waiting")


def third_graph(forward: object, optimizer: object, waits: bool) -> object:
    """Return what trains a window: a graph for all microbatches but the last one, and one for that, the exchange and the update."""
    import mindspore as ms
    from mindspore import Parameter, ParameterTuple, Tensor, ops

    parameters = optimizer.parameters
    buffers = ParameterTuple([Parameter(ops.zeros_like(p), name=f"buffer.{p.name}", requires_grad=False) for p in parameters])
    buckets = last_layers_first([p.size for p in parameters])
    shapes, sizes = [p.shape for p in parameters], [p.size for p in parameters]
    places = [members.index(i) + sum(map(len, buckets[:b])) for i in range(len(sizes)) for b, members in enumerate(buckets) if i in members]
    grad_fn = ms.value_and_grad(forward, None, parameters)
    add = ops.MultitypeFuncGraph("add")
    total = ops.MultitypeFuncGraph("total")
    empty = ops.MultitypeFuncGraph("empty")
    exchange, mapped, scale = ops.AllReduce(), ops.HyperMap(), 1.0 / (N * HOSTS)

    @add.register("Tensor", "Tensor")
    def _add(buffer: Parameter, gradient: Tensor) -> Tensor:
        return ops.assign_add(buffer, gradient)

    @total.register("Tensor", "Tensor")
    def _total(buffer: Parameter, gradient: Tensor) -> Tensor:
        return buffer + gradient

    @empty.register("Tensor")
    def _empty(buffer: Parameter) -> Tensor:
        return ops.assign(buffer, ops.zeros_like(buffer))

    @ms.jit
    def accumulate(x: Tensor, y: Tensor) -> Tensor:
        loss, gradients = grad_fn(x, y)
        return ops.depend(loss, mapped(add, buffers, gradients))

    @ms.jit
    def finish(x: Tensor, y: Tensor) -> Tensor:
        loss, gradients = grad_fn(x, y)
        sums = mapped(total, buffers, gradients)
        exchanged, last = (), loss
        for members in buckets:
            bucket = ops.concat([sums[i].reshape(-1) for i in members]) * scale
            if waits:
                bucket = ops.depend(bucket, sums)
            if exchanged:  # one collective after another, the same on all ranks
                bucket = ops.depend(bucket, last)
            last = exchange(bucket)
            start = 0
            for i in members:
                exchanged = (*exchanged, last[start:start + sizes[i]].reshape(shapes[i]))
                start += sizes[i]
        emptied = ops.depend(loss, mapped(empty, buffers))
        return ops.depend(emptied, optimizer(tuple([exchanged[place] for place in places])))

    def window(batches: list) -> Tensor:
        for batch in batches[:-1]:
            accumulate(*batch)
        return finish(*batches[-1])

    return window


def last_layers_first(sizes: list[int]) -> list[list[int]]:
    """Return the parameters of each bucket, by their places: the backward pass has the last ones first."""
    buckets: list[list[int]] = []
    room = 0
    for i in reversed(range(len(sizes))):
        if room < 4 * sizes[i]:
            buckets.append([])
            room = MEBIBYTE
        buckets[-1].append(i)
        room -= 4 * sizes[i]
    return buckets


def table(rows: list[list]) -> list[str]:
    """Return the rows of a Markdown table: paired ratios to the control's time, and the control's milliseconds for a window."""
    lines = [f"| link | {' | '.join(CONTESTANTS)} |", "|-" * (1 + len(CONTESTANTS)) + "|"]
    for rate in RATES:
        times = {name: [seconds for *what, seconds, _ in rows if what == [rate, name]] for name in CONTESTANTS}
        cells = []
        for name in CONTESTANTS:
            ratios = [mine / control for mine, control in zip(times[name], times["waiting"])]
            cells.append(f"{1e3 * median(times[name]) / WINDOWS:,.0f} ms" if name == "waiting" else
                         f"{median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})")
        lines.append(f"| {rate} | {' | '.join(cells)} |")
    return lines


def main(arguments: list[str]) -> None:
    """Run, write the record, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=RECORD, metavar="FILE.json", help="(default: records/overlap.json)")
    parser.add_argument("--table", action="store_true", help="print the table of the record, without a run")
    options = parser.parse_args(arguments)
    if not options.table:
        rows = two_hosts.measure(__file__, 1, RATES)[0]
        record = {"suite": "overlap", "quick": False, "command": "python tutorials/benchmarks/overlap.py", **records.circumstances(),
                  "groups": [], "hosts": HOSTS, "layers": LAYERS, "width": WIDTH, "samples": SAMPLES, "accumulate_step": N,
                  "windows": WINDOWS, "columns": ["rate", "contestant", "seconds", "bytes"], "rows": rows}
        records.write(record, options.output)
    print("\n".join(table(json.loads(options.output.read_text(encoding="utf-8"))["rows"])))


if __name__ == "__main__":
    if FOLDER in os.environ:
        work()
    else:
        main(sys.argv[1:])
