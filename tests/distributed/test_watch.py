"""Watching, in one process: this is rank 1, and rank 0 is a socket. For ranks on two hosts see test_cluster.py."""
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import traceback
from contextlib import suppress
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread, Timer
from time import sleep
from types import SimpleNamespace

import numpy as np
import pytest

from ms_accum import ending_together
from ms_accum.distributed import watch

FAILED = "rank 2 (host 10.0.0.3) has failed (ValueError), see its log"
ENDED = ("scheduler", 0.5, 1)  # the scheduler first, for msrun may kill this process in that moment


@pytest.fixture
def ends(monkeypatch):
    """A queue of what the process would do at its end."""
    ends, done, goodbyes = SimpleQueue(), [], threading.Semaphore(0)

    def end(status):
        ends.put((*done[-2:], status))
        goodbyes.release(3)  # the block would wait for them

    monkeypatch.setattr(watch.os, "_exit", end)
    monkeypatch.setattr(watch, "Semaphore", lambda _: goodbyes)
    monkeypatch.setattr(watch, "_connections", set())
    monkeypatch.setattr(watch, "_left_open", [])
    monkeypatch.setattr(watch, "_end_scheduler", lambda: done.append("scheduler"))
    monkeypatch.setattr(watch, "sleep", done.append)
    monkeypatch.setattr(watch, "get_rank", lambda: 1)
    monkeypatch.setattr(watch, "world_size", lambda: 3)
    monkeypatch.setattr(watch, "wait_for_all", lambda: None)
    monkeypatch.setenv("MS_SCHED_HOST", "127.0.0.1")
    monkeypatch.setenv("MS_SCHED_PORT", "8118")
    return ends


@pytest.fixture
def rank_0(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as server:
        row_0 = f"127.0.0.1 {server.getsockname()[1]} secret".encode().ljust(watch._ROW)
        monkeypatch.setattr(watch, "gather", gathers(lambda row: np.stack([np.frombuffer(row_0, np.int32), row, row])))
        Thread(target=welcome, args=(server, arrived := SimpleQueue()), daemon=True).start()
        yield SimpleNamespace(accept=lambda: arrived.get(timeout=10))


def gathers(rows, connected=True):
    """Return a `gather` that gives these rows first, and then whether all ranks are connected."""
    return lambda row: rows(row) if len(row) > 1 else np.array([row, [connected]])


def welcome(server, arrived):
    with suppress(OSError):  # it was closed
        connection = server.accept()[0]
        assert connection.recv(100) == b"secret 1\n"
        connection.sendall(b".")
        arrived.put(connection)


def say_that_rank_2_died(connection):
    connection.sendall(b"rank 2 (host 10.0.0.3) has ended: it was killed\n")


def say_that_rank_2_failed(connection):
    connection.sendall(f"unless you fail, too: {FAILED}\n".encode())


def reset(connection):
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


@pytest.mark.parametrize(("does", "said"), [
    (socket.socket.close, "rank 0 (host 127.0.0.1) has ended: it was killed or it failed, see its log"),
    (reset, "rank 0 (host 127.0.0.1) has ended: it was killed"),
])
def test_a_lost_rank_ends_this_one_with_one_line(does, said, ends, rank_0, capfd):
    with ending_together(lambda: "start again", name="train.py"):
        does(rank_0.accept())
        assert ends.get(timeout=10) == ENDED
    assert capfd.readouterr().err == f"train.py: error: {said}; start again\n"


@pytest.mark.parametrize("silence", [0.1, 10])
@pytest.mark.parametrize(("does", "said"), [
    (say_that_rank_2_died, "rank 2 (host 10.0.0.3) has ended: it was killed"),
    (say_that_rank_2_failed, "rank 2 (host 10.0.0.3) has failed (ValueError), see its log"),
])
def test_a_rank_that_hears_of_a_lost_one_says_so_and_ends_after_it(does, said, silence, ends, rank_0, monkeypatch, capfd):
    """If it ended first, msrun would kill the one that fails before it has printed its error. But it does not wait for ever."""
    monkeypatch.setattr(watch, "SILENCE", silence)
    with ending_together(lambda: "start again", name="train.py"):
        connection = rank_0.accept()
        does(connection)
        if silence == 10:
            with pytest.raises(Empty):
                ends.get(timeout=0.5)
            assert capfd.readouterr().err == f"train.py: error: {said}; start again\n"
            connection.close()
        assert ends.get(timeout=5) == ENDED
        connection.close()


def wait_for_listeners():
    for thread in threading.enumerate():
        if "_listen" in thread.name:
            thread.join(10)


def answering(rank_0, *does):
    """Return a queue of what rank 0 hears before it does each of these, half a second later."""
    heard = SimpleQueue()

    def answer():
        connection = rank_0.accept()
        for do in does:
            heard.put(connection.recv(100))
            sleep(0.5)
            heard.put("answer")
            do(connection)
        heard.put(connection)

    Thread(target=answer).start()
    return heard


def say_goodbye(connection):
    connection.sendall(b"goodbye\n")


@pytest.mark.parametrize("leave", [lambda: None, sys.exit])
def test_a_rank_that_is_done_waits_for_the_goodbye_of_rank_0(leave, ends, rank_0, capfd):
    """For as long as it takes: MindSpore's own collectives would fail after 30 s. Nothing is left open."""
    heard = answering(rank_0, say_goodbye)
    with suppress(SystemExit), ending_together():
        leave()
    assert [heard.get_nowait() for _ in range(2)] == [b"goodbye\n", "answer"]
    connection = heard.get(timeout=10)
    assert connection.recv(100) == b""
    wait_for_listeners()
    assert (ends.empty(), capfd.readouterr().err, watch._connections) == (True, "", set())


def test_rank_0_may_end_at_once_after_its_goodbye(ends, rank_0, monkeypatch):
    """Before this rank has noticed that all are done."""
    class Late(threading.Semaphore):
        def acquire(self):
            super().acquire()
            wait_for_listeners()

    monkeypatch.setattr(watch, "Semaphore", Late)
    answering(rank_0, lambda connection: (say_goodbye(connection), connection.close()))
    with ending_together():
        pass
    assert ends.empty()


def test_a_rank_that_is_done_may_hear_that_another_one_is_lost(ends, rank_0, capfd):
    answering(rank_0, lambda connection: (say_that_rank_2_died(connection), connection.close()))
    with ending_together("start again", name="train.py"):
        pass
    assert ends.get(timeout=10) == ENDED
    assert capfd.readouterr().err == "train.py: error: rank 2 (host 10.0.0.3) has ended: it was killed; start again\n"


def test_without_all_connections_ranks_meet_in_a_collective(ends, rank_0, monkeypatch):
    met = []
    monkeypatch.setattr(watch, "gather", gathers(watch.gather, connected=False))
    monkeypatch.setattr(watch, "wait_for_all", lambda: met.append("all"))
    with ending_together():
        connection = rank_0.accept()
    assert met == ["all"]
    assert connection.recv(100) == b"goodbye\n"


def test_without_all_connections_a_rank_may_be_faster_than_rank_0(ends, ranks_1_to_3, monkeypatch):
    def meet():
        for other in (1, 2):
            say_goodbye(others[other])
            others[other].close()
        sleep(0.3)

    others = ranks_1_to_3
    monkeypatch.setattr(watch, "gather", gathers(watch.gather, connected=False))
    monkeypatch.setattr(watch, "wait_for_all", meet)
    with ending_together():
        pass
    others[3].close()
    wait_for_listeners()
    assert ends.empty()


def test_an_error_while_a_rank_waits_is_told_to_the_others(at_exit, ends, rank_0, monkeypatch):
    class Interrupted(threading.Semaphore):
        def acquire(self):
            raise KeyboardInterrupt

    monkeypatch.setattr(watch, "Semaphore", Interrupted)
    monkeypatch.setattr(watch, "SILENCE", 0.2)
    with suppress(KeyboardInterrupt), ending_together():
        connection = rank_0.accept()
    assert connection.makefile().readlines(2) == ["goodbye\n"]
    assert at_exit


def test_a_forked_process_does_not_wait(ends, rank_0, monkeypatch):
    with ending_together():
        connection = rank_0.accept()
        monkeypatch.setattr(watch.os, "getpid", lambda: -1)
    with pytest.raises(BlockingIOError):
        connection.recv(100, socket.MSG_DONTWAIT)
    reset(connection)
    assert ends.get(timeout=10) == ENDED, "the listener is still there, in this test"


def test_blocks_may_be_nested(ends, rank_0):
    """One of them ends the process."""
    with ending_together():
        with watch._ending:
            rank_0.accept().close()
            with pytest.raises(Empty):
                ends.get(timeout=0.3)
        assert ends.get(timeout=10) == ENDED


def say_that_this_rank_failed(connection):
    connection.sendall(b"rank 1 (host 127.0.0.1) has failed (ZeroDivisionError), see its log\n")


@pytest.fixture
def at_exit(monkeypatch):
    at_exit = []
    monkeypatch.setattr(watch.atexit, "register", lambda *call: at_exit.append(call))
    monkeypatch.setattr(watch.atexit, "unregister", lambda _: at_exit.clear())
    return at_exit


@pytest.mark.parametrize("failure", [ZeroDivisionError(), SystemExit(3), SystemExit("")])
def test_a_rank_that_fails_tells_the_others_and_waits_until_they_have_said_so(failure, at_exit, ends, rank_0, monkeypatch, capfd):
    """What rank 0 does then ends nobody: the error is raised. If that takes long, it is printed before msrun kills this rank."""
    timers = []
    timer = SimpleNamespace(daemon=False, start=lambda: timers.append(timer.daemon))
    monkeypatch.setattr(watch, "Timer", lambda *call: timers.append(call) or timer)
    heard = answering(rank_0, say_that_this_rank_failed)
    with suppress(type(failure)), ending_together(name="train.py"):
        raise failure
    said = f"unless you fail, too: rank 1 (host 127.0.0.1) has failed ({type(failure).__name__}), see its log\n"
    assert [heard.get_nowait() for _ in range(2)] == [said.encode(), "answer"]
    (after, error, its_watch), = at_exit
    assert (after, error, its_watch._others_end) == (watch._end_scheduler_after, failure, True)
    (delay, prints, (_, error, _)), daemon = timers
    assert (delay, prints, error, daemon) == (watch.SILENCE / 2, traceback.print_exception, failure, True)
    connection = heard.get(timeout=10)
    with pytest.raises(BlockingIOError):  # they take the end of the connection for the end of this rank
        connection.recv(1, socket.MSG_DONTWAIT)
    connection.close()
    wait_for_listeners()
    assert (ends.empty(), capfd.readouterr().err) == (True, "")


def test_a_rank_that_fails_does_not_wait_for_ever(at_exit, ends, rank_0, monkeypatch):
    monkeypatch.setattr(watch, "SILENCE", 0.2)
    monkeypatch.setattr(watch, "Timer", None)
    with suppress(ZeroDivisionError), ending_together():
        connection = rank_0.accept()
        raise ZeroDivisionError
    connection.close()
    wait_for_listeners()
    assert ends.empty()


@pytest.mark.parametrize("first", ["this", "rank 0"])
def test_ranks_that_fail_together_raise_their_own_errors(first, at_exit, ends, rank_0, monkeypatch, capfd):
    monkeypatch.setattr(watch, "Timer", None)
    monkeypatch.setattr(watch, "sleep", lambda _: (heard.set(), failed.wait(10)))
    heard, failed, tell = threading.Event(), threading.Event(), watch._Watch._tell
    monkeypatch.setattr(watch._Watch, "_tell", lambda self, line: (tell(self, line), failed.set()))
    if first == "this":
        answering(rank_0, say_that_rank_2_failed)
    with suppress(ZeroDivisionError), ending_together():
        if first == "rank 0":
            say_that_rank_2_failed(rank_0.accept())
            heard.wait(10)
        raise ZeroDivisionError
    wait_for_listeners()
    assert (ends.empty(), capfd.readouterr().err) == (True, "")
    assert heard.is_set() == (first == "rank 0"), "a rank that has failed has nothing to wait for"


def test_a_block_that_ends_well_makes_up_for_one_that_failed(at_exit, ends, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as server:
        row_0 = f"127.0.0.1 {server.getsockname()[1]} secret".encode().ljust(watch._ROW)
        monkeypatch.setattr(watch, "gather", gathers(lambda row: np.stack([np.frombuffer(row_0, np.int32), row, row])))
        for answer in (say_that_rank_2_failed, say_goodbye):
            Thread(target=welcome, args=(server, arrived := SimpleQueue()), daemon=True).start()
            answering(SimpleNamespace(accept=partial(arrived.get, timeout=10)), answer)
            with suppress(ZeroDivisionError), ending_together():
                if answer is say_that_rank_2_failed:
                    raise ZeroDivisionError
            assert len(at_exit) == (answer is say_that_rank_2_failed)
            wait_for_listeners()
            assert len(watch._connections) == len(watch._left_open) == (answer is say_that_rank_2_failed)


@pytest.mark.parametrize(("error", "uncaught", "left", "ended"), [
    (SystemExit(3), False, False, True), (ZeroDivisionError(), True, False, True), (ZeroDivisionError(), False, True, True),
    (ZeroDivisionError(), False, False, False)])
def test_the_scheduler_ends_with_a_script_that_fails(error, uncaught, left, ended, monkeypatch):
    """But not where all ranks have caught their errors: others may still be at work, and it would take them down."""
    done = []
    monkeypatch.setattr(watch, "_end_scheduler", lambda: done.append("scheduler"))
    monkeypatch.delattr(sys, "last_value", raising=False)
    if uncaught:
        monkeypatch.setattr(sys, "last_value", error, raising=False)
    watch._end_scheduler_after(error, SimpleNamespace(_others_end=left))
    assert done == ["scheduler"] * ended


@pytest.fixture
def ranks_1_to_3(monkeypatch):
    """Sockets, once this rank, which is rank 0, has begun to watch."""
    others = {}

    def rows(row):
        address, port, token = row.tobytes().decode().split()
        for rank in (3, 1, 2):
            others[rank] = socket.create_connection((address, int(port)), timeout=10)
            others[rank].sendall(f"{token} {rank}\n".encode())
        return np.stack([row, *(np.frombuffer((b"10.0.0.%d" % host).ljust(watch._ROW), np.int32) for host in (2, 3, 4))])

    monkeypatch.setattr(watch, "get_rank", lambda: 0)
    monkeypatch.setattr(watch, "gather", gathers(rows))
    return others


def test_rank_0_tells_the_others_who_died(ends, ranks_1_to_3, capfd):
    others = ranks_1_to_3
    said = "rank 2 (host 10.0.0.3) has ended: it was killed or it failed, see its log"
    with ending_together(lambda: "start again", name="train.py"):
        assert [others[rank].recv(1) for rank in (1, 2, 3)] == [b"."] * 3
        say_goodbye(others[2])  # it may be done before
        others[2].close()
        assert ends.get(timeout=10) == ENDED
        assert [others[rank].makefile().readline() for rank in (1, 3)] == [f"{said}\n"] * 2
    for rank in (1, 3):
        others[rank].close()
    assert capfd.readouterr().err == f"train.py: error: {said}; start again\n"


def test_rank_0_says_goodbye_when_all_have(ends, ranks_1_to_3):
    with ending_together():
        others = ranks_1_to_3
        assert [others[rank].recv(1) for rank in (1, 2, 3)] == [b"."] * 3
        say_goodbye(others[1])
        say_goodbye(others[2])
        late = Timer(0.5, lambda: (order.append("last"), say_goodbye(others[3])))
        late.start()
        order = []
    assert order == ["last"]
    for other in others.values():
        assert (other.recv(100), other.recv(100)) == (b"goodbye\n", b"")
        other.close()
    wait_for_listeners()
    assert (ends.empty(), watch._connections) == (True, set())


def test_a_rank_that_fails_after_its_goodbye_ends_rank_0(ends, ranks_1_to_3):
    """It may have been interrupted while it waited."""
    others = ranks_1_to_3
    with ending_together():
        for other in others.values():
            say_goodbye(other)
        others[1].sendall(b"unless you fail, too: rank 1 (host 10.0.0.2) has failed (KeyboardInterrupt), see its log\n")
        assert others[2].makefile().readline().startswith(".rank 1 (host 10.0.0.2) has failed")
        Timer(0.5, others[1].close).start()
    assert ends.get_nowait() == ENDED
    for rank in (2, 3):
        others[rank].close()


def test_only_the_scheduler_of_this_run_is_killed(monkeypatch):
    monkeypatch.setattr(watch.os, "getppid", os.getpid)
    monkeypatch.setenv("MS_SCHED_HOST", "127.0.0.1")
    monkeypatch.setenv("MS_SCHED_PORT", "8118")
    scheduler, worker, other = (
        subprocess.Popen(["sleep", "60"], env={**os.environ, "MS_ROLE": role, "MS_SCHED_PORT": port})
        for role, port in (("MS_SCHED", "8118"), ("MS_WORKER", "8118"), ("MS_SCHED", "8119")))
    while any(not Path(f"/proc/{process.pid}/environ").read_bytes() for process in (scheduler, worker, other)):
        sleep(0.01)  # Popen returns before the kernel shows it
    watch._end_scheduler()
    assert scheduler.wait(10) == -signal.SIGKILL
    for process in (worker, other):
        assert process.poll() is None
        process.kill()
        process.wait()


def test_a_forked_process_closes_what_it_inherits():
    """Or its mother's death would not be noticed while it lives."""
    one, other = socket.socketpair()
    watch._connections.add(one)
    file = one.makefile()  # as the listener's
    child = os.fork()
    if child == 0:
        sleep(60)
    file.close()
    one.close()
    other.settimeout(10)
    assert other.recv(1) == b""
    other.close()
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


@pytest.mark.parametrize(("remedy", "said"), [
    ("start again", "start again"), (lambda: 1 // 0, "what to do is not known (ZeroDivisionError: "),
    (lambda: sys.exit(2), "what to do is not known (SystemExit: 2)"), ("load d\udce9j.ckpt", "load d\\udce9j.ckpt")])
def test_the_remedy(remedy, said, ends, rank_0, capfd):
    with ending_together(remedy, name="train.py"):
        rank_0.accept().close()
        assert ends.get(timeout=10) == ENDED
    assert f"see its log; {said}" in capfd.readouterr().err
    with pytest.raises(TypeError, match="remedy is of type NoneType, expected a text, or a function"), ending_together(None):
        pass


def test_a_rank_ends_where_nobody_can_read_why(ends, rank_0, monkeypatch):
    """And takes the processes that it started with it."""
    def broken(*_):
        raise BrokenPipeError

    killed = []
    monkeypatch.setattr(watch.os, "write", broken)
    monkeypatch.setattr(watch.multiprocessing, "active_children", lambda: [SimpleNamespace(kill=lambda: killed.append("child"))])
    with ending_together():
        rank_0.accept().close()
        assert ends.get(timeout=10) == ENDED
    assert killed == ["child"]


def test_a_rank_ends_whatever_happens_on_the_way(ends, rank_0, monkeypatch):
    monkeypatch.setattr(watch, "_end_scheduler", lambda: 1 // 0)
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    with ending_together():
        rank_0.accept().close()
        assert ends.get(timeout=10) == (1,)


def test_a_rank_that_cannot_connect_says_so_and_goes_on(ends, rank_0, monkeypatch, capfd):
    def refuse(*_, **__):
        raise ConnectionRefusedError(111, "Connection refused")

    monkeypatch.setattr(watch.socket, "create_connection", refuse)
    with ending_together(lambda: "start again", name="train.py"):
        pass
    assert ends.empty()
    assert "train.py: rank 1 cannot watch all others ([Errno 111] Connection refused); if one dies" in capfd.readouterr().err


def test_rank_0_takes_only_those_who_know_the_token():
    others = {}
    with socket.create_server(("127.0.0.1", 0)) as server:
        place = server.getsockname()
        with socket.create_connection(place) as stranger:
            stranger.sendall(b"\xff 1\n")
            accepting = Thread(target=watch._accept, args=(server, "secret", 2, others))
            accepting.start()
            connection = watch._connected(*place, "secret", 1)
            accepting.join(10)
    assert list(others) == [1]
    for end in (connection, *others.values()):
        assert end.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        idle, interval, count, unheard = (end.getsockopt(socket.IPPROTO_TCP, getattr(socket, option)) for option in watch._PROBES)
        assert (idle + interval * count, unheard / 1000, end.gettimeout()) == (watch.SILENCE, watch.SILENCE, None)
        end.close()


def test_a_rank_that_does_not_come_in_time_is_not_watched(monkeypatch):
    monkeypatch.setattr(watch, "_ARRIVAL", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as server, pytest.raises(TimeoutError, match="timed out"):
        watch._accept(server, "secret", 2, {})
