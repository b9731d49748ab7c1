"""A cluster in a box: hosts that are network namespaces of this machine, joined by a switch whose links have a rate.

Benchmarks use it, too. It needs root, `ip` and `tc`.
"""
from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterable
from contextlib import suppress
from functools import cache
from itertools import count
from pathlib import Path
from time import sleep
from typing import Optional

_PREFIX = "ms-accum"
_numbers = count()


class Cluster:
    """Hosts with the addresses 10.0.0.1, 10.0.0.2, ..., as a context manager. Everything in them ends with the block.

    `rate` is what each host can send at most, as `tc` writes it: "10mbit"; None: as fast as the machine is.
    RuntimeError if the machine refuses.
    """

    def __init__(self, hosts: int = 2, rate: Optional[str] = None) -> None:
        self.hosts = range(hosts)
        self.rate = rate
        name = f"{_PREFIX}-{os.getpid()}-{next(_numbers)}"
        self.names = [f"{name}-host{host}" for host in self.hosts]
        self._switch = f"{name}-switch"

    def __enter__(self) -> Cluster:
        try:
            self._build()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        _remove([*self.names, self._switch])

    def address(self, host: int) -> str:
        """Return the address of a host."""
        return f"10.0.0.{host + 1}"

    def start(self, host: int, command: Iterable[object], log: Path, **options: object) -> subprocess.Popen:
        """Start a command on a host, with its output in the file `log`; the other options are those of Popen."""
        with log.open("w") as output:
            return subprocess.Popen(["ip", "netns", "exec", self.names[host], *map(str, command)],
                                    stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, **options)

    def sent(self, host: int) -> int:
        """Return the bytes that a host has sent, counted at its interface, headers included."""
        link, = json.loads(_run("ip", "-n", self.names[host], "-json", "-statistics", "link", "show", "eth0"))
        return link["stats64"]["tx"]["bytes"]

    def cut(self, host: int) -> None:
        """Cut a host's link at the switch: what is sent is lost, and nobody is told."""
        _run("ip", "-n", self._switch, "link", "set", f"port{host}", "nomaster")

    def mend(self, host: int) -> None:
        """Join a host again that was cut."""
        _run("ip", "-n", self._switch, "link", "set", f"port{host}", "master", "bridge")

    def kill(self, host: int) -> None:
        """Kill all that runs on a host, as if its power failed. Its link is cut first, so that nobody is told."""
        self.cut(host)
        _kill(self.names[host])

    def _build(self) -> None:
        for name in (self._switch, *self.names):
            _run("ip", "netns", "add", name)
            _run("ip", "-n", name, "link", "set", "lo", "up")
        _run("ip", "-n", self._switch, "link", "add", "bridge", "type", "bridge")
        _run("ip", "-n", self._switch, "link", "set", "bridge", "up")
        for host, name in zip(self.hosts, self.names):
            port = f"port{host}"
            _run("ip", "link", "add", "eth0", "netns", name, "type", "veth", "peer", port, "netns", self._switch)
            _run("ip", "-n", self._switch, "link", "set", port, "up", "master", "bridge")
            _run("ip", "-n", name, "address", "add", f"{self.address(host)}/24", "dev", "eth0")
            _run("ip", "-n", name, "link", "set", "eth0", "up")
            if self.rate:
                _run("tc", "-n", name, "qdisc", "add", "dev", "eth0", "root", "tbf", "rate", self.rate,
                     "burst", "32kbit", "latency", "400ms")


@cache
def usable() -> str:
    """Return why there can be no cluster on this machine, or an empty text."""
    try:
        with Cluster(rate="10mbit"):
            return ""
    except RuntimeError as error:
        return f"a cluster in a box needs root, ip, tc and network namespaces: {error}"


def _run(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise RuntimeError(str(error)) from error
    if done.returncode:
        raise RuntimeError(f"`{' '.join(command)}` failed: {done.stderr.strip()}")
    return done.stdout


def _remove(names: list[str]) -> None:
    for name in names:
        with suppress(RuntimeError):  # it was never made
            _kill(name)
            _run("ip", "netns", "delete", name)


def _kill(name: str) -> None:
    while pids := _run("ip", "netns", "pids", name).split():
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        sleep(0.02)
