"""Worker processes: started side by side, asked one at a time, and stopped whatever happens."""
from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Timer

WORKER = Path(__file__).with_name("worker.py")
PATIENCE = 900
_PATH = re.compile(r"(?<![\w.:])(?:/[\w.+@~-]+)+/([\w.+@~-]+)")


class Unavailable(Exception):
    """A contestant that cannot go on. `reason`: "skipped" (its package is missing) or "crashed"."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class Worker:
    """A contestant in a process of its own; it sleeps until it is asked.

    Args:
        contestant: Name of the contestant.
        case: What `case.Case` or `case.EpochCase` is made of.
        scratch: Folder for what a worker drops into its working directory.
    """

    def __init__(self, contestant: str, case: dict, scratch: Path) -> None:
        self.contestant = contestant
        self.folder = scratch
        self.folder.mkdir(parents=True)
        self.errors = (self.folder / "stderr").open("w+", encoding="utf-8", errors="replace")
        # The busy waiting is for each contestant to cure, or not.
        environment = {name: value for name, value in os.environ.items() if name != "MS_DEV_HOST_BLOCKING_RUN"}
        environment.setdefault("JAX_PLATFORMS", "cpu")
        # In a session of its own, so that what it launches in turn (PyTorch's compiler) can be stopped with it.
        self.process = subprocess.Popen(
            [sys.executable, str(WORKER), json.dumps({"contestant": contestant, "case": case})], start_new_session=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.errors, cwd=self.folder, env=environment, text=True)

    def ready(self) -> None:
        """Wait until it is built. Raises Unavailable if it cannot be."""
        self._answer()

    def ask(self, do: str, **arguments: object) -> dict:
        """Send a command and wait for the answer. Raises Unavailable if there is none, or it is an error."""
        # Where the pipe is broken, the answer is the worker's last words.
        with suppress(BrokenPipeError):
            print(json.dumps({"do": do, **arguments}), file=self.process.stdin, flush=True)
        return self._answer()

    def stop(self) -> None:
        """End the process and its children."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.communicate()
        self.errors.close()

    def _answer(self) -> dict:
        timer = Timer(PATIENCE, self.process.kill)
        timer.start()
        line = self.process.stdout.readline()
        timer.cancel()
        if not line:
            raise Unavailable("crashed", f"{self._last_line()} (exit status {self.process.wait()})")
        answer = json.loads(line)
        if "missing" in answer:
            raise Unavailable("skipped", f"package {answer['missing']} is not installed")
        if "error" in answer:
            raise Unavailable("crashed", without_paths(answer["error"]))
        return answer

    def _last_line(self) -> str:
        self.errors.seek(0)
        lines = [line.strip() for line in self.errors if line.strip()]
        return without_paths(lines[-1]) if lines else "no message"


@contextmanager
def fleet(names: Iterable[str], case: dict, scratch: Path, unavailable: Callable[[str, Unavailable], None]) -> Iterator[dict[str, Worker]]:
    """Workers by name, built as many at a time as there are cores; those that fail are reported and left out."""
    workers: dict[str, Worker] = {}

    def launch(name: str) -> None:
        workers[name] = Worker(name, case, scratch / name)
        workers[name].ready()

    try:
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            launched = {name: pool.submit(launch, name) for name in names}
        for name, future in launched.items():
            try:
                future.result()
            except Unavailable as error:
                unavailable(name, error)
        yield {name: workers[name] for name, future in launched.items() if not future.exception()}
    finally:
        for worker in workers.values():
            worker.stop()


def without_paths(text: str) -> str:
    """`text` with the names of files, but not where they lie."""
    return _PATH.sub(r"\1", text)
