"""A process with one contestant in it: reads a command per line on stdin, answers with a line of JSON on stdout.

    python worker.py '{"contestant": "split", "case": {"network": "mlp-784-512-10", "batch": 32}}'

It builds the contestant and says {"ready": true}; from then on it sleeps until it is asked:

    {"do": "agree", "windows": 3, "file": F}     parameters after 3 windows, in F (.npz)   -> {"digest": ...}
    {"do": "time", "microbatches": 64}           train on that many, wait for the end      -> {"seconds": ...}
    {"do": "peak", "batch": 2048, "windows": 2}  train on microbatches of that size        -> {"peak": ..., "data": ...}
    {"do": "plan", "batch": 2048}                bytes on the device in a dry run        -> {"peak": ..., "parameters": ...}
    {"do": "state"}                                                                        -> {"state_bytes": ..., "parameter_bytes": ...,
                                                                                            "first_window": seconds}

What goes wrong is answered as {"missing": package} or {"error": line}.
"""
from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Callable
from typing import Any, TextIO

import contestants
import numpy as np
from case import Case, EpochCase


def main() -> None:
    """Build the contestant, then answer until stdin ends."""
    answers = _private_stdout()
    job = json.loads(sys.argv[1])
    contestant = None

    def build() -> dict:
        nonlocal contestant
        case = EpochCase(**job["case"]) if "folder" in job["case"] else Case(**job["case"])
        contestant = contestants.builder(job["contestant"])(case)
        return {"ready": True}

    _answer(answers, build)
    for line in sys.stdin:
        command = json.loads(line)
        _answer(answers, lambda command=command: COMMANDS[command.pop("do")](contestant, **command))


def agree(contestant: Any, windows: int, file: str) -> dict:
    """Leave the parameters after `windows` windows in `file`."""
    parameters = contestant.agree(windows)
    np.savez(file, *parameters)
    digest = hashlib.sha256(b"".join(np.ascontiguousarray(p).tobytes() for p in parameters)).hexdigest()
    return {"digest": digest[:16], "arrays": len(parameters)}


def time(contestant: Any, microbatches: int) -> dict:
    """Seconds that `microbatches` take."""
    return {"seconds": contestant.time(microbatches)}


def peak(contestant: Any, batch: int, windows: int) -> dict:
    """Peak RSS of this process once it has trained on microbatches of `batch` samples, and what it was given at a time; in bytes."""
    contestant.load(batch, distinct=False)
    contestant.run(windows * contestant.case.accumulate_step)
    pieces = contestant.case.accumulate_step if contestant.whole_window else 1
    data = pieces * batch * int(np.prod(contestant.case.input_shape)) * 4
    return {"peak": _peak_rss(), "data": data}


def plan(contestant: Any, batch: int) -> dict:
    """Peak bytes on the device in a window with microbatches of `batch` samples, and how many parameters the network has."""
    return {"peak": contestant.device_peak(batch), "parameters": sum(p.size for p in contestant.trained)}


def state(contestant: Any) -> dict:
    """Bytes that accumulation keeps from call to call, bytes of the parameters, seconds of the first window."""
    return {"state_bytes": contestant.state_bytes(), "parameter_bytes": sum(p.nbytes for p in contestant.parameters()),
            "first_window": contestant.first_window}


COMMANDS: dict[str, Callable[..., dict]] = {"agree": agree, "time": time, "peak": peak, "plan": plan, "state": state}


def _answer(answers: TextIO, ask: Callable[[], dict]) -> None:
    try:
        answer = ask()
    except ModuleNotFoundError as error:
        package = (error.name or "").split(".")[0]
        answer = {"missing": package} if package in contestants.PACKAGES else {"error": error_line(error)}
    # Whatever a framework raises is an answer to the runner, which then goes on without this contestant.
    except Exception as error:
        answer = {"error": error_line(error)}
    print(json.dumps(answer), file=answers, flush=True)


def error_line(error: Exception) -> str:
    """The first line that says something: MindSpore's messages go on with call stacks."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip(" -\n")]
    return f"{type(error).__name__}: {lines[0] if lines else ''}"


def _private_stdout() -> TextIO:
    """The real stdout; what frameworks print goes to stderr, where it cannot be taken for an answer."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return answers


def _peak_rss() -> int:
    # Of this program alone; `ru_maxrss` starts with the peak of the process that launched it.
    with open("/proc/self/status", encoding="ascii") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM:"))


if __name__ == "__main__":
    main()
