"""Two hosts: a run on them, over a slow link, and what is left of it when a rank, a host or the link dies."""
import os
import re
import subprocess
import sys
from pathlib import Path
from time import monotonic, sleep

import pytest
from support import tiny
from support.cluster import Cluster, usable
from support.scripts import saved

if usable():
    pytest.skip(usable(), allow_module_level=True)

ROOT = Path(__file__).parents[2]
PROGRAMS = Path(sys.executable).parent
# 20 documents are 6 microbatches: for 2 ranks, windows of 2 and of 1 in an epoch.
TRAIN = [str(ROOT / "tutorials" / "lm" / "train.py"), "--text", "text", "--epochs", "2", "--batch-size", "4",
         "--accumulate-step", "2", "--save", "run.safetensors"]
UPDATES = 4
GRADIENTS = 4 * 997_440  # bytes
SETTINGS = {"MS_NODE_TIMEOUT": "5", "MS_HEARTBEAT_RETRY_TIMEOUT": "5"}  # those of the guide
SEND = "import socket, sys; socket.create_connection((sys.argv[1], 7000), timeout=1).sendall(bytes(10**6))"
RECEIVE = "import socket; c = socket.create_server(('', 7000)).accept()[0]\nwhile c.recv(10**6): pass"


def namespaces(*command):
    return subprocess.run(["ip", "netns", *command], capture_output=True, text=True, check=True).stdout


def python(cluster, host, code, *arguments):
    run = cluster.start(host, [sys.executable, "-S", "-c", code, *arguments], Path(f"log{host}"))
    sleep(0.5 if code == RECEIVE else 0)
    return run


@pytest.mark.slow
def test_bytes_are_counted_links_have_a_rate_and_are_cut_and_hosts_are_killed():
    with Cluster(3, "10mbit") as cluster:
        before, start, receiver = cluster.sent(0), monotonic(), python(cluster, 2, RECEIVE)
        assert python(cluster, 0, SEND, cluster.address(2)).wait(10) == receiver.wait(10) == 0
        assert 10**6 < cluster.sent(0) - before < 1.1 * 10**6
        assert monotonic() - start > 0.7  # 10**6 bytes take 0.8 s
        receiver = python(cluster, 2, RECEIVE)
        cluster.cut(2)
        assert python(cluster, 0, SEND, cluster.address(2)).wait(10) == 1
        cluster.mend(2)
        assert python(cluster, 0, SEND, cluster.address(2)).wait(10) == receiver.wait(10) == 0
        sleeper, other = (python(cluster, host, "import time; time.sleep(60)") for host in (1, 2))
        cluster.kill(1)
        assert (sleeper.wait(10), other.poll()) == (-9, None)
    assert other.wait(10) == -9
    assert f"-{os.getpid()}-" not in namespaces("list")


def start(cluster, folder, *options, ranks_of_a_host=1, port=8118):
    """Start the guide's command on every host, each in a folder of its own, as on a disk of its own."""
    path = os.pathsep.join(map(str, filter(None, [ROOT, os.environ.get("PYTHONPATH")])))
    environment = {**os.environ, **SETTINGS, "PYTHONPATH": path, "GLOG_v": "4", "MS_JIT": "0",
                   "PATH": f"{PROGRAMS}:{os.environ['PATH']}"}
    ranks, runs = ranks_of_a_host * len(cluster.hosts), []
    for host in cluster.hosts:
        (folder / str(host)).mkdir(parents=True, exist_ok=True)
        (folder / str(host) / "text").write_bytes(tiny.text())
        command = ["msrun", f"--worker_num={ranks}", f"--local_worker_num={ranks_of_a_host}",
                   f"--master_addr={cluster.address(0)}", f"--master_port={port}", f"--node_rank={host}", "--join=True",
                   "--log_dir=ranks", "python", *TRAIN, *options]
        runs.append(cluster.start(host, command, folder / f"{host}.log", cwd=folder / str(host), env=environment))
    return runs


def finish(folder, runs):
    """Wait for the end of a run; return the state that rank 0 saved, and the last epoch that it printed."""
    for host, run in enumerate(runs):
        assert run.wait(300) == 0, (folder / f"{host}.log").read_text(encoding="utf-8")
    log = (folder / "0" / "ranks" / "worker_0.log").read_text(encoding="utf-8")
    return saved(folder / "0" / "run.safetensors"), re.findall(r"^epoch 2/2 .*", log, re.MULTILINE)


@pytest.fixture(scope="module")
def on_one_host(tmp_path_factory):
    """Parameters and figures of the run with both ranks on one host."""
    folder = tmp_path_factory.mktemp("one")
    with Cluster(1) as cluster:
        return finish(folder, start(cluster, folder, ranks_of_a_host=2))


@pytest.mark.slow
@pytest.mark.parametrize("rate", [None, "40mbit"])
def test_two_hosts_train_as_two_ranks_on_one_host(rate, tmp_path, on_one_host):
    """Bit-identical, however slow the link. A host sends twice the gradients for each window.

    A ring's AllReduce on two ranks needs half of that. In MindSpore 2.10's CPU backend, AllReduce and AllGather alone
    also send twice what they need, and the receiver of a Broadcast sends as much as it gets.
    """
    with Cluster(2, rate) as cluster:
        assert finish(tmp_path, start(cluster, tmp_path)) == on_one_host
        sent = [cluster.sent(host) for host in cluster.hosts]
    assert len(on_one_host[1]) == 1
    for bytes_sent in sent:
        assert 1 < bytes_sent / ((2 * UPDATES + 1) * GRADIENTS) < 1.1, "and the initial parameters once"


def kill_rank(cluster, host):
    """Kill the python processes of a host that msrun started, but not msrun."""
    for pid in namespaces("pids", cluster.names[host]).split():
        if f"MS_NODE_ID={host}" in Path("/proc", pid, "environ").read_text(encoding="utf-8").split("\0"):
            os.kill(int(pid), 9)


@pytest.mark.slow
@pytest.mark.parametrize(("happens", "survivors"), [
    (lambda cluster: cluster.cut(1), [0, 1]), (lambda cluster: cluster.kill(0), [1]),
    (lambda cluster: kill_rank(cluster, 1), [0, 1])], ids=["link", "host", "rank"])
def test_a_run_that_loses_a_host_ends_soon_and_resumes_bit_identically(happens, survivors, tmp_path, on_one_host):
    """Within a minute, with the guide's settings; measured: 2 to 27 s."""
    with Cluster(2, "40mbit") as cluster:
        runs = start(cluster, tmp_path)
        while not (tmp_path / "0" / "run.safetensors").exists():
            assert all(run.poll() is None for run in runs)
            sleep(0.05)
        happens(cluster)
        end = monotonic() + 60
        for host in survivors:
            assert runs[host].wait(max(end - monotonic(), 0.1)) == 1
        for host in cluster.hosts:
            cluster.kill(host)
            cluster.mend(host)
        log = tmp_path / "0" / "ranks" / "worker_0.log"
        assert "epoch 2/2" not in log.read_text(encoding="utf-8"), "it was not finished"
        assert finish(tmp_path, start(cluster, tmp_path, "--resume", "run.safetensors", port=8119)) == on_one_host
        assert "epoch 1/2" not in log.read_text(encoding="utf-8")
