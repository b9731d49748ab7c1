"""Contestants in processes of their own: built side by side, asked one at a time, and stopped whatever happens."""
from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import contestants
from case import Case

PATIENCE = 900
_PATH = re.compile(r"(?<![\w.:])(?:/[\w.+@~-]+)+/([\w.+@~-]+)")


class Unavailable(Exception):
    """A contestant that cannot go on. `reason`: "skipped" (its package is missing) or "crashed"."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(reason, message)
        self.reason, self.message = reason, message


class Worker:
    """A contestant in a process of its own; it sleeps until it is asked.

    Args:
        contestant: Name of the contestant.
        case: Its case.
        scratch: Folder for what a worker says and drops into its working directory.
    """

    def __init__(self, contestant: str, case: Case, scratch: Path) -> None:
        scratch.mkdir(parents=True)
        self.said = scratch / "said"
        context = get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(theirs, contestant, asdict(case), scratch))
        self.process.start()
        theirs.close()

    def ask(self, do: str, **arguments: object) -> Any:
        """Send a command and wait for the answer. Raises Unavailable if there is none, or it is an error."""
        # Where the pipe is broken, the answer is the worker's last words.
        with suppress(OSError):
            self.pipe.send((do, arguments))
        try:
            if not self.pipe.poll(PATIENCE):
                raise Unavailable("crashed", f"no answer after {PATIENCE} s")
            answer = self.pipe.recv()
        except (EOFError, OSError) as error:
            self.process.join()
            raise Unavailable("crashed", f"{self._last_line()} (exit status {self.process.exitcode})") from error
        if isinstance(answer, Unavailable):
            raise answer
        return answer

    def stop(self) -> None:
        """End the process and its children."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.kill()
        self.process.join()
        self.pipe.close()

    def _last_line(self) -> str:
        said = self.said.read_text(encoding="utf-8", errors="replace")
        lines = [line.strip() for line in said.splitlines() if line.strip()]
        return without_paths(lines[-1]) if lines else "no message"


class Team:
    """The workers of a group, built as many at a time as there are cores. Who fails is reported, and not asked again.

    Attributes:
        figures: Of each contestant by name; `status` and `message` of those that cannot go on.
    """

    def __init__(self, names: Iterable[str], case: Case, scratch: Path, figures: dict[str, dict]) -> None:
        self.figures = {name: figures[name] for name in names}
        self.case, self.scratch = case, scratch
        self.workers: dict[str, Worker] = {}

    def __enter__(self) -> Team:
        try:
            self.ask_all("build")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        for worker in self.workers.values():
            worker.stop()

    @property
    def names(self) -> list[str]:
        """Those that go on."""
        return [name for name, figures in self.figures.items() if "message" not in figures]

    def ask(self, name: str, do: str, **arguments: object) -> Any:
        """The answer of a contestant; None if it cannot go on."""
        try:
            if do == "build":
                self.workers[name] = Worker(name, self.case, self.scratch / name)
            return self.workers[name].ask(do, **arguments)
        except Unavailable as error:
            report(name, self.figures[name], error)
            return None

    def ask_all(self, do: str, **arguments: object) -> dict[str, Any]:
        """The answers of all who can, side by side."""
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            names = self.names
            answers = dict(zip(names, pool.map(lambda name: self.ask(name, do, **arguments), names)))
        return {name: answers[name] for name in self.names}


def report(name: str, figures: dict, error: Unavailable) -> None:
    """Keep why a contestant cannot go on."""
    figures.update(status=error.reason, message=error.message)
    say(f"  {name}: {error.reason}: {error.message}")


def serve(pipe: Connection, contestant: str, case: dict, scratch: Path) -> None:
    """The worker's side: build the contestant, and answer until the runner ends."""
    # In a session of its own, so that what it launches in turn (PyTorch's compiler) can be stopped with it.
    os.setsid()
    os.chdir(scratch)
    with open("said", "wb") as said:
        for stream in (1, 2):
            os.dup2(said.fileno(), stream)
    # The busy waiting is for each contestant to cure, or not.
    os.environ.pop("MS_DEV_HOST_BLOCKING_RUN", None)
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    built = None
    with suppress(EOFError):
        while True:
            do, arguments = pipe.recv()
            try:
                if do == "build":
                    built, answer = contestants.builder(contestant)(Case(**case)), None
                else:
                    answer = getattr(built, do)(**arguments)
            # Whatever a framework raises is an answer to the runner, which then goes on without this contestant.
            except Exception as error:
                answer = unavailable(error)
            pipe.send(answer)


def unavailable(error: Exception) -> Unavailable:
    """Why a contestant cannot go on. Of the message the first line with words: MindSpore's go on with call stacks."""
    package = (error.name or "").split(".")[0] if isinstance(error, ModuleNotFoundError) else ""
    if package in contestants.PACKAGES:
        return Unavailable("skipped", f"package {package} is not installed")
    lines = [line.strip() for line in str(error).splitlines() if line.strip(" -\n")]
    return Unavailable("crashed", without_paths(f"{type(error).__name__}: {lines[0] if lines else ''}"))


def without_paths(text: str) -> str:
    """`text` with the names of files, but not where they lie."""
    return _PATH.sub(r"\1", text)


def say(line: str) -> None:
    """Progress, on stderr."""
    print(line, file=sys.stderr, flush=True)
