"""Two hosts: a run on them, over a slow link, and what is left of it when a host is killed or the link is cut."""
import json
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from time import monotonic, sleep

import mindspore as ms
import pytest
from cluster import Cluster, usable

from ms_accum.mnist.network import Network

if usable():
    pytest.skip(usable(), allow_module_level=True)

ROOT = Path(__file__).parents[2]
PROGRAMS = Path(sys.executable).parent
MNIST = ["-m", "ms_accum", "mnist", "--epochs", "2", "--batch-size", "400", "--accumulate-step", "4", "--mode", "pynative", "--lr", "0.1",
         "--save", "run.ckpt", "--save-every", "5", "--json", "run.json"]
UPDATES = 8
GRADIENTS = 4 * (784 * 512 + 512 + 512 * 512 + 512 + 512 * 10 + 10)  # bytes
PATIENCE = 300
SEND = "import socket, sys; socket.create_connection((sys.argv[1], 7000), timeout=1).sendall(bytes(10**6))"
RECEIVE = "import socket; c = socket.create_server(('', 7000)).accept()[0]; print('ready')\nwhile c.recv(10**6): pass"

SAY_GOODBYE = """
import socket, sys
from pathlib import Path
from time import monotonic, sleep
from ms_accum.distributed.watch import _probed

connection = _probed(socket.create_connection((sys.argv[1], 7000), timeout=5))
Path("connected").touch()
while not Path("cut").exists():
    sleep(0.05)
start = monotonic()
connection.sendall(b"goodbye\\n")
try:
    connection.recv(1)
except OSError as error:
    print("waited", monotonic() - start, error)
"""


def wait_until(condition, seconds=PATIENCE):
    end = monotonic() + seconds
    while not condition():
        assert monotonic() < end, "waited for too long"
        sleep(0.05)


def namespaces():
    return subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout


# --- the box --------------------------------------------------------------------------------------------------------------


def python(cluster, host, code, *arguments):
    return cluster.start(host, [sys.executable, "-S", "-c", code, *arguments], Path(f"log{host}"))


def test_bytes_are_counted_links_cut_and_hosts_killed():
    with Cluster(3) as cluster:
        for _ in range(2):
            before = cluster.sent(0)
            receiver = python(cluster, 2, RECEIVE)
            sleep(0.5)
            assert python(cluster, 0, SEND, cluster.address(2)).wait(10) == 0
            assert receiver.wait(10) == 0
            assert 10**6 < cluster.sent(0) - before < 1.1 * 10**6
            cluster.cut(2)
            assert python(cluster, 0, SEND, cluster.address(2)).wait(10) == 1
            cluster.mend(2)
        sleeper, other = (python(cluster, host, "import time; time.sleep(60)") for host in (1, 2))
        cluster.kill(1)
        assert sleeper.wait(10) == -9
        assert other.poll() is None
        assert f"-{os.getpid()}-" in namespaces()
    assert other.wait(10) == -9
    assert f"-{os.getpid()}-" not in namespaces()


def test_a_link_has_its_rate():
    with Cluster(rate="10mbit") as cluster:
        receiver = python(cluster, 1, RECEIVE)
        sleep(0.5)
        start = monotonic()
        python(cluster, 0, SEND, cluster.address(1))
        assert receiver.wait(10) == 0
        assert monotonic() - start > 0.7  # 10**6 bytes take 0.8 s


def test_nothing_is_left_after_errors_and_killed_runs():
    run = subprocess.Popen([sys.executable, "-c", "from cluster import Cluster\nwith Cluster(): print(flush=True), input()"],
                           cwd=Path(__file__).parent, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    run.stdout.readline()
    run.kill()
    run.communicate()
    assert f"-{run.pid}-" in namespaces()
    with suppress(ZeroDivisionError), Cluster():
        assert f"-{run.pid}-" not in namespaces()
        raise ZeroDivisionError
    assert f"-{os.getpid()}-" not in namespaces()
    with pytest.raises(RuntimeError, match=r"`tc .* failed: "), Cluster(rate="fast"):
        pass
    assert f"-{os.getpid()}-" not in namespaces()


@pytest.mark.slow
def test_what_is_said_after_the_link_was_cut_does_not_wait_for_minutes():
    """The kernel would send it again and again, and not ask whether the other host is there."""
    with Cluster() as cluster:
        python(cluster, 0, RECEIVE)
        sleep(0.5)
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        speaker = cluster.start(1, [sys.executable, "-c", SAY_GOODBYE, cluster.address(0)], Path("speaker"), env=environment)
        wait_until(Path("connected").exists)
        cluster.cut(1)
        Path("cut").touch()
        assert speaker.wait(30) == 0
    (_, seconds, *_), = [line.split() for line in Path("speaker").read_text(encoding="utf-8").splitlines() if "waited" in line]
    assert 5 < float(seconds) < 15


# --- ms-accum mnist on it -------------------------------------------------------------------------------------------------


def start(cluster, folder, *options, ranks_of_a_host=1, port=8118):
    """Start the guide's command on every host, each in a folder of its own, as on a disk of its own."""
    hosts = cluster.hosts
    path = os.pathsep.join(map(str, filter(None, [ROOT, os.environ.get("PYTHONPATH")])))
    environment = {**os.environ, "PYTHONPATH": path, "GLOG_v": "4", "PATH": f"{PROGRAMS}:{os.environ['PATH']}"}
    runs = []
    for host in hosts:
        (folder / str(host)).mkdir(parents=True, exist_ok=True)
        command = ["msrun", f"--worker_num={ranks_of_a_host * len(hosts)}", f"--local_worker_num={ranks_of_a_host}",
                   f"--master_addr={cluster.address(0)}", f"--master_port={port}", f"--node_rank={host}", "--join=True",
                   "--log_dir=ranks", "python", *MNIST, *options]
        runs.append(cluster.start(host, command, folder / f"{host}.log", cwd=folder / str(host), env=environment))
    return runs


def finish(folder, runs):
    """Wait for the end of a run; return rank 0's parameters and figures."""
    for host, run in enumerate(runs):
        assert run.wait(PATIENCE) == 0, (folder / f"{host}.log").read_text(encoding="utf-8")
    saved = ms.load_checkpoint(str(folder / "0" / "run.ckpt"))
    figures = json.loads((folder / "0" / "run.json").read_text(encoding="utf-8"))
    return ({p.name: saved[p.name].asnumpy().tobytes() for p in Network(0).trainable_params()},
            {name: figures[name] for name in ("loss", "accuracy", "update_step", "ranks")})


@pytest.fixture(scope="module")
def on_one_host(tmp_path_factory):
    """Parameters and figures of the run with both ranks on one host."""
    folder = tmp_path_factory.mktemp("one")
    with Cluster(1) as cluster:
        return finish(folder, start(cluster, folder, ranks_of_a_host=2))


@pytest.mark.slow
@pytest.mark.parametrize("rate", [None, "10mbit"])
def test_two_hosts_train_as_two_ranks_on_one_host(rate, tmp_path, on_one_host):
    """Bit-identical, however slow the link. A host sends twice the gradients for each window.

    A ring's AllReduce on two ranks needs half of that. In MindSpore 2.10's CPU backend, AllReduce and AllGather alone also
    send twice what they need, and the receiver of a Broadcast sends as much as it gets.
    """
    with Cluster(2, rate) as cluster:
        assert finish(tmp_path, start(cluster, tmp_path)) == on_one_host
        sent = [cluster.sent(host) for host in cluster.hosts]
    assert on_one_host[1]["update_step"] == UPDATES
    for bytes_sent in sent:
        assert 1 < bytes_sent / ((2 * UPDATES + 1) * GRADIENTS) < 1.1, "and the initial parameters once"


LOST = {  # what happens, who survives, and what the survivors say
    "cut": (lambda cluster: cluster.cut(1), [0, 1], "has not answered for 10 s: its host is down or the network is cut"),
    "kill 0": (lambda cluster: cluster.kill(0), [1], "has not answered for 10 s: its host is down or the network is cut"),
    "kill 1": (lambda cluster: cluster.kill(1), [0], "has not answered for 10 s: its host is down or the network is cut"),
}


@pytest.mark.slow
@pytest.mark.parametrize("lost", LOST)
def test_a_run_that_loses_a_host_ends_soon_and_resumes_bit_identically(lost, tmp_path, on_one_host):
    happens, survivors, said = LOST[lost]
    with Cluster(2, "10mbit") as cluster:
        runs = start(cluster, tmp_path)
        wait_until((tmp_path / "0" / "run.ckpt").exists)
        happens(cluster)
        end = monotonic() + 30
        for host in survivors:
            assert runs[host].wait(max(end - monotonic(), 0.1)) == 1
            lines = (tmp_path / str(host) / "ranks" / f"worker_{host}.log").read_text(encoding="utf-8").splitlines()
            other = 1 - host
            assert [line for line in lines if "error" in line.lower()] == lines[-1:] == [
                f"ms-accum mnist: error: rank {other} (host {cluster.address(other)}) {said}; "
                "start all ranks again with --resume run.ckpt"]
            assert lines[-1] in (tmp_path / f"{host}.log").read_text(encoding="utf-8"), "it is on the terminal"
        for host in cluster.hosts:
            cluster.kill(host)
            cluster.mend(host)
        assert not (tmp_path / "0" / "run.json").exists(), "it was not finished"
        assert finish(tmp_path, start(cluster, tmp_path, "--resume", "run.ckpt", port=8119)) == on_one_host
        assert "microbatches done" in (tmp_path / "0.log").read_text(encoding="utf-8")
