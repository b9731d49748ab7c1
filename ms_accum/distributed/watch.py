"""Watching: if a rank fails or dies, or its network is cut, every other rank ends soon, with one line that says so.

Each rank keeps a TCP connection to rank 0 and sends nothing on it until it ends. The kernel closes the connection when
the process dies, and asks the other host every second whether it is there. Heartbeats from Python would stop while
MindSpore compiles, because it holds the GIL.

    rank 1: done ──► "goodbye" ──► rank 0, when all have said it ──► "goodbye" ──► every rank leaves the block
    rank 1: fails ─► "unless you fail, too: rank 1 ..." ─┐
    rank 1: dies ──► the connection closes ──────────────┴► rank 0 ──► "rank 1 ..." ──► every rank says so and ends
"""
from __future__ import annotations

import atexit
import multiprocessing
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from secrets import token_hex
from threading import Lock, Semaphore, Thread, Timer
from time import monotonic, sleep
from typing import Optional, Union

import numpy as np
from mindspore.communication import get_rank

from ..arguments import instance_of
from .ranks import gather, wait_for_all, world_size

SILENCE = 10  # seconds
_PROBES = {"TCP_KEEPIDLE": 2, "TCP_KEEPINTVL": 1, "TCP_KEEPCNT": SILENCE - 2,
           "TCP_USER_TIMEOUT": 1000 * SILENCE}  # while a line has not arrived, nothing is probed
_ARRIVAL = 20  # seconds; on CPU, those that have connected wait 30 in a collective
_ROW = 128  # bytes
_WELCOME = b"."
_GOODBYE = "goodbye\n"
_UNLESS = "unless you fail, too: "
_MOMENT = 1.0  # seconds, in which ranks fail together


@contextmanager
def ending_together(
    remedy: Union[str, Callable[[], str]] = "start all ranks again", *, name: Optional[str] = None,
) -> Iterator[None]:
    """Run the block on all ranks; if one is lost meanwhile, end the others with status 1 and one line on stderr.

        with ending_together("start all ranks again with --resume"):
            train()

    A rank is lost if its process ends, if it raises an exception, or if its host has not answered for 10 seconds. The
    line says which one it was. A rank that is done, also by `sys.exit(0)`, waits for the others. Ranks that raise
    exceptions within a second each raise their own. Without several ranks, nothing is watched.

    A process that hangs is not noticed, because its operating system still answers.

    Args:
        remedy: What to do, for the end of the line, or a function that returns it then.
        name: What the line begins with; None: the name of the script.

    Raises:
        TypeError: If `remedy` is neither a text nor a function.
        RuntimeError: If msrun started several ranks and `init()` was not called.

    Source: torchrun ends all workers of a host if one fails; this also looks after the other hosts.

    Example:
        >>> from ms_accum import ending_together
        >>> with ending_together():
        ...     print("training")
        training
    """
    if not isinstance(remedy, str):
        instance_of("remedy", remedy, Callable, "a text, or a function that returns one")
    if world_size() == 1:
        yield
        return
    watch = _Watch(Path(sys.argv[0]).name if name is None else name, remedy)
    leaving = None
    try:
        try:
            yield
        except SystemExit as error:
            if error.code not in (None, 0):
                raise
            leaving = error
        watch.stop()
    except BaseException as error:
        watch.fail(error)
        raise
    if leaving is not None:
        raise leaving


class _Watch:
    def __init__(self, name: str, remedy: Union[str, Callable[[], str]]) -> None:
        self._name, self._remedy, self._lock, self._stopped = name, remedy, Lock(), False
        self._goodbyes, self._process = Semaphore(0), os.getpid()
        self._failed = self._others_end = False  # whether this rank has failed, and others end because of it
        atexit.unregister(_end_scheduler_after)  # of an earlier block, whose error was caught
        while _left_open:
            _left_open.pop()._close()
        self._rank = rank = get_rank()
        address, token = _own_address(), token_hex(8)
        with socket.create_server((address, 0)) as server:
            row = f"{address} {server.getsockname()[1]} {token}".encode().ljust(_ROW)
            rows = [row.tobytes().decode().split() for row in gather(np.frombuffer(row, np.int32))]
            self._hosts = [row[0] for row in rows]
            self._others: dict[int, socket.socket] = {}
            connected = 1
            try:
                if rank == 0:
                    _accept(server, token, len(rows), self._others)
                else:
                    self._others[0] = _connected(*rows[0], rank)
            except OSError as error:
                connected = 0
                print(f"{name}: rank {rank} cannot watch all others ({error}); if one dies, this one may wait "
                      "for about a minute", file=sys.stderr, flush=True)
        self._connected = gather(np.array([connected], np.int32)).all()
        self._listeners = [Thread(target=self._listen, args=named, daemon=True) for named in self._others.items()]
        for listener in self._listeners:
            listener.start()

    def stop(self) -> None:
        """Wait until all ranks are done. If one is lost meanwhile, this one ends."""
        if os.getpid() != self._process:  # forked in the block: the listeners are not here
            return
        if not self._connected:
            wait_for_all()  # which fails on CPU after MindSpore's 30 s
        elif self._rank == 0:
            for _ in self._others:
                self._goodbyes.acquire()
        else:
            self._tell(_GOODBYE)
            self._goodbyes.acquire()
        with self._lock:  # not while this rank ends because of another one
            self._stopped = True
        if self._rank == 0 or not self._connected:
            self._tell(_GOODBYE)
        for connection in self._others.values():
            with suppress(OSError):  # the other one was faster
                connection.shutdown(socket.SHUT_RDWR)

    def fail(self, error: BaseException) -> None:
        """Tell the others that this rank fails, and wait until they have said so, before msrun hears of it."""
        with self._lock:  # not while this rank ends because of another one
            self._stopped = self._failed = True
        self._tell(f"{_UNLESS}{self._who(self._rank)} has failed ({type(error).__name__}), see its log\n")
        atexit.register(_end_scheduler_after, error, self)
        _left_open.append(self)
        end = monotonic() + SILENCE
        for listener in self._listeners:
            listener.join(max(end - monotonic(), 0))
        if self._others_end:  # and they do not wait for long, if something holds the error back
            printing = Timer(SILENCE / 2, traceback.print_exception, (type(error), error, error.__traceback__))
            printing.daemon = True
            printing.start()

    def _who(self, rank: int) -> str:
        return f"rank {rank} (host {self._hosts[rank]})"

    def _listen(self, other: int, connection: socket.socket) -> None:
        who = self._who(other)
        try:
            lines = connection.makefile(encoding="utf-8")
            heard = lines.readline()
            if heard == _GOODBYE:
                # Rank 0 says it when all have, and without all connections, each does when all have met.
                self._stopped = self._stopped or self._rank > 0 or not self._connected
                self._goodbyes.release()
                heard = lines.readline()
            heard = heard or f"{who} has ended: it was killed or it failed, see its log"
        except ConnectionResetError:
            heard = f"{who} has ended: it was killed"
        except OSError:
            heard = f"{who} has not answered for {SILENCE} s: its host is down or the network is cut"
        if heard.startswith(_UNLESS):
            heard = heard.removeprefix(_UNLESS)
            if not self._stopped:
                sleep(_MOMENT)
        elif self._failed:
            self._others_end = True
        with self._lock, _ending:
            if not self._stopped:
                self._end(heard.strip(), connection)
        if not self._failed:  # a rank that fails leaves its connections open until it has printed its error
            connection.close()
            _connections.discard(connection)

    def _close(self) -> None:
        for connection in self._others.values():
            connection.close()
            _connections.discard(connection)

    def _end(self, reason: str, connection: socket.socket) -> None:
        try:
            self._say(reason)
            self._tell(f"{reason}\n")
            with suppress(OSError):  # until the other one has ended: if this one did before, msrun would kill it
                connection.settimeout(SILENCE)
                connection.recv(1)
            _end_scheduler()  # before msrun, which looks each second, hears of the dead rank and kills this one
            for child in multiprocessing.active_children():
                child.kill()
            sleep(0.5)  # msrun needs a moment to show that line before it hears of the end
        finally:
            os._exit(1)

    def _say(self, reason: str) -> None:
        try:
            remedy = self._remedy if isinstance(self._remedy, str) else self._remedy()
        except BaseException as error:  # also SystemExit, which would end this thread alone
            remedy = f"what to do is not known ({type(error).__name__}: {error})"
        with suppress(OSError):  # nobody can read it
            os.write(2, f"{self._name}: error: {reason}; {remedy}\n".encode(errors="backslashreplace"))

    def _tell(self, line: str) -> None:
        for connection in self._others.values():
            with suppress(OSError):
                connection.sendall(line.encode())


def _own_address() -> str:
    """Return the address of this host in the network of the scheduler."""
    place = os.environ["MS_SCHED_HOST"], int(os.environ["MS_SCHED_PORT"])
    with socket.socket(type=socket.SOCK_DGRAM) as probe:
        probe.connect(place)  # UDP: nothing is sent
        return probe.getsockname()[0]


def _accept(server: socket.socket, token: str, ranks: int, others: dict[int, socket.socket]) -> None:
    """Put a connection to each of the other ranks into `others`. OSError if they do not come in time."""
    end = monotonic() + _ARRIVAL
    while len(others) < ranks - 1:
        server.settimeout(max(end - monotonic(), 0.01))
        connection = server.accept()[0]
        connection.settimeout(server.gettimeout())
        with suppress(OSError):
            said = connection.makefile(encoding="utf-8", errors="replace").readline().split()
            if said[:1] == [token]:  # otherwise it is not one of the ranks
                connection.sendall(_WELCOME)
                others[int(said[1])] = _probed(connection)


def _connected(address: str, port: str, token: str, rank: int) -> socket.socket:
    connection = socket.create_connection((address, int(port)), timeout=_ARRIVAL)
    connection.sendall(f"{token} {rank}\n".encode())
    if connection.recv(len(_WELCOME)) != _WELCOME:
        raise ConnectionError("rank 0 did not wait for this one")
    return _probed(connection)


def _probed(connection: socket.socket) -> socket.socket:
    """Let the kernel ask whether the other host is there."""
    _connections.add(connection)
    connection.settimeout(None)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _PROBES.items():
        connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
    return connection


def _end_scheduler_after(error: BaseException, watch: _Watch) -> None:
    """End the scheduler if errors end the script. If all ranks have caught theirs, others may still be at work."""
    if watch._others_end or isinstance(error, SystemExit) or hasattr(sys, "last_value"):
        _end_scheduler()


def _end_scheduler() -> None:
    """Kill the scheduler that msrun started beside this rank: msrun waits for it, and it would not end for a minute."""
    names = ("MS_SCHED_HOST", "MS_SCHED_PORT")  # of this run: without --join, schedulers of others are siblings, too
    mine = {b"MS_ROLE=MS_SCHED", *(f"{name}={os.environ.get(name)}".encode() for name in names)}
    siblings = Path(f"/proc/{os.getppid()}/task/{os.getppid()}/children")
    with suppress(OSError):
        for pid in siblings.read_text(encoding="ascii").split():
            if mine <= set(Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")):
                os.kill(int(pid), signal.SIGKILL)


def _close_in_child() -> None:
    """Close what a forked process has inherited: while it lives, the others would not notice that this one died."""
    for connection in _connections:
        with suppress(OSError):  # it is closed
            os.close(connection.detach())  # close() would wait for the listener, a thread that was not forked


_ending = Lock()  # blocks may be nested
_left_open: list[_Watch] = []  # their connections are open, until the process ends or the next block begins
_connections: set[socket.socket] = set()
if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_close_in_child)
