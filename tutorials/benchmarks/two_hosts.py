"""Two hosts on this machine, whose link gets one rate after another, while ranks time what they exchange. Needs root, ip and tc.

The hosts are network namespaces (`tests/distributed/cluster.py`): their ranks share the machine's cores, and only the link is that of two
hosts. Everything is compiled once, before the first rate is set.
"""
from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter, sleep

import records

HOSTS = 2
FOLDER = "MS_ACCUM_HOSTS"  # the variable with the folder where ranks write
COUNTER = Path("/sys/class/net/eth0/statistics/tx_bytes")


def measure(script: str, ranks: int, rates: dict[str, int]) -> list[list[list]]:
    """Run a script as `ranks` ranks on each host. Return each host's rows: rate, contestant, seconds, bytes sent.

    Args:
        script: It calls `time_each` if the variable `FOLDER` is set (msrun would take an option for its own).
        ranks: On each host.
        rates: The links' Mbit/s, by name.
    """
    sys.path.append(str(records.HERE.parents[1] / "tests" / "distributed"))
    from cluster import Cluster

    programs = Path(sys.executable).parent
    with TemporaryDirectory() as temporary, Cluster(HOSTS) as cluster:
        folder = Path(temporary)
        environment = {**os.environ, FOLDER: temporary, "GLOG_v": "4", "PATH": f"{programs}:{os.environ['PATH']}"}
        runs = []
        for host in cluster.hosts:
            command = ["msrun", f"--worker_num={HOSTS * ranks}", f"--local_worker_num={ranks}", f"--master_addr={cluster.address(0)}",
                       f"--node_rank={host}", "--join=True", f"--log_dir={folder / f'ranks{host}'}", "python", script]
            runs.append(cluster.start(host, command, folder / f"{host}.log", cwd=folder, env=environment))
        for number, (rate, mbit) in enumerate(rates.items()):
            while not (folder / f"want-{number}").exists():
                if any(run.poll() is not None for run in runs):
                    raise SystemExit(_said(folder))
                sleep(0.1)
            for host in cluster.hosts:
                # A burst of a millisecond; with less, the kernel's clock would limit fast links.
                subprocess.run(["tc", "-n", cluster._names[host], "qdisc", "replace", "dev", "eth0", "root", "tbf", "rate", f"{mbit}mbit",
                                "burst", f"{max(mbit, 100)}kbit", "latency", "400ms"], check=True)
            print(f"timing at {rate}", file=sys.stderr, flush=True)
            (folder / f"have-{number}").touch()
        if any([run.wait(600) for run in runs]):
            raise SystemExit(_said(folder))
        return [json.loads((folder / f"rank{host * ranks}.json").read_text(encoding="utf-8")) for host in cluster.hosts]


def _said(folder: Path) -> str:
    """Return the ends of the logs of all ranks."""
    return "\n".join(f"{log}:\n{log.read_text(encoding='utf-8')[-1500:]}" for log in sorted(folder.glob("ranks*/worker_*.log")))


def time_each(rates: Iterable[str], rounds: int, contestants: dict[str, Callable[[], None]]) -> None:
    """On each rank: call each contestant once, and then `rounds` times at each rate, one after another."""
    from mindspore.communication import get_rank

    from ms_accum.distributed.ranks import wait_for_all

    folder, rank = Path(os.environ[FOLDER]), get_rank()
    for run in contestants.values():
        run()
    rows = []
    for number, rate in enumerate(rates):
        if rank == 0:
            (folder / f"want-{number}").touch()
        while not (folder / f"have-{number}").exists():
            sleep(0.05)
        for _ in range(rounds):
            for name, run in contestants.items():
                wait_for_all()
                sent, start = int(COUNTER.read_text(encoding="ascii")), perf_counter()
                run()
                wait_for_all()
                rows.append([rate, name, perf_counter() - start, int(COUNTER.read_text(encoding="ascii")) - sent])
    (folder / f"rank{rank}.json").write_text(json.dumps(rows), encoding="utf-8")
    wait_for_all()
