"""The command `ms-accum selftest`: run this folder with pytest, and print a table and a verdict."""
from __future__ import annotations

import argparse
import os
import re
import sys
from collections import Counter
from contextlib import suppress
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any, Optional
from unittest.mock import patch

import mindspore as ms
import numpy as np
from mindspore import Tensor, ops

from ..arguments import one_line
from ..cli.files import file_to_write, write_json
from ..cli.interrupts import raise_if_interrupted
from ..cli.options import add_command
from ..cli.process import join_ranks, versions
from ..core.kernels import SWITCH
from ..distributed.meeting import world_size
from ..mindspore_api import get_rank

if TYPE_CHECKING:
    import pytest

DESCRIPTION = """\
Test on this device whether accumulation is exact. Each driver is compared with plain MindSpore, which trains on the
undivided batch on the same device, in float32, float16 and bfloat16. Ascend's own kernels are compared with the
portable ones. The memory and time of accumulation are measured. Under msrun, the exchanges between ranks are tested,
too.

Each row of the table "holds" or "FAILS". Errors are relative to the change of the parameters in training. If plain
MindSpore fails on this device, too, the row says "no kernel", which is not a failure. The last line is the verdict.

The tests are a pytest suite (pip install pytest): pytest --pyargs ms_accum.selftest also runs them."""

EXAMPLES = """\
examples:
  ms-accum selftest                            # less than two minutes on a CPU with 2 cores
  ms-accum selftest --quick                    # float32 only, each check once
  ms-accum selftest --device Ascend --json ascend.json
  ms-accum selftest --rows "save and resume"   # only these rows
  msrun --worker_num=2 --local_worker_num=2 --join=True --log_dir=ranks --master_port=8118 \\
      --tail_worker_log=0 python -m ms_accum selftest   # nothing for a minute: give another port

exit status: 0 if no row fails, 1 if one does or none could run, 2 for a bad command line or without pytest"""

# Variables that change how MindSpore compiles and runs.
FLAGS = ("MS_DEV_GRAPH_KERNEL_FLAGS", "MS_SIMULATION_LEVEL", "MS_JIT", "MS_JIT_MODULES", "MS_DEV_HOST_BLOCKING_RUN",
         "MS_ALLOC_CONF", "OMP_NUM_THREADS", SWITCH)
THREADS = 6
DTYPES = ("float32", "float16", "bfloat16")
HOLDS, MEASURED, NOT_RUN, NO_KERNEL, FAILS = RESULTS = ("holds", "measured", "not run", "no kernel", "FAILS")
LINE = "{check:<24} {driver:<20} {dtype:<9} "


def add_parser(subcommands: argparse._SubParsersAction) -> None:
    """Add `selftest` to the commands of `ms-accum`."""
    add = add_command(subcommands, "selftest", run, "test on this device whether accumulation is exact", DESCRIPTION,
                      EXAMPLES).add_argument
    add("--device", choices=("CPU", "GPU", "Ascend"), help="where to run (default: what MindSpore finds)")
    add("--quick", action="store_true", help="float32 only, and each check with one driver: 15 seconds on 2 cores")
    add("--rows", metavar="TEXT",
        help='run only the rows of this check, driver or dtype, e.g. "clipping"; TEXT is the beginning of a word')
    add("--json", type=file_to_write, metavar="FILE", help="write versions, device, flags, rows and figures")


def run(options: argparse.Namespace) -> int:
    """Run pytest, print and write. Return 1 if a row fails, or if no row could be run."""
    try:
        import pytest
    except ImportError as error:
        raise ValueError("the selftest needs pytest: pip install pytest") from error
    rank, ranks = start(options.device)
    table, folder = Table(options.rows, rank, ranks), str(Path(__file__).parent)
    # Only the table is printed, and settings and plugins of the user's own tests do not count.
    arguments = [folder, "-c", os.devnull, "--rootdir", folder, "-p", "no:terminal", "-p", "no:cacheprovider"]
    with patch.dict(os.environ, PYTEST_ADDOPTS="", PYTEST_PLUGINS="", PYTEST_DISABLE_PLUGIN_AUTOLOAD="1"):
        status = pytest.main([*arguments, *["-m", "quick"] * options.quick], plugins=[table])
    raise_if_interrupted()
    if table.error is not None:
        raise table.error
    if table.missing:
        raise ValueError(table.missing)
    holds, said = verdict(table.rows)
    if status not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        holds, said = False, f"not tested: pytest stopped with status {int(status)}"
    print(said, flush=True)
    if options.json and rank == 0:
        name = None
        with suppress(Exception):  # a device that MindSpore has no name for
            name = ms.hal.get_device_name(0)
        write_json(options.json, {
            "versions": versions(), "device": ms.get_context("device_target"), "device_name": name,
            "flags": {name: os.environ[name] for name in FLAGS if name in os.environ},
            "jit_config": ms.get_context("jit_config"), "jit_level": ms.get_context("jit_level"),
            "in_place": os.environ.get(SWITCH) == "1", "ranks": ranks, "quick": options.quick,
            "verdict": said, "holds": holds, "rows": table.rows,
            "figures": {named(row): row["value"] for row in table.rows if row["result"] == MEASURED}})
    if ranks > 1:
        gathered(np.zeros(1))  # a rank that still communicates fails if another one ends
    return int(not holds)


def start(device: Optional[str]) -> tuple[int, int]:
    """Choose the device and join the other ranks. Return this rank, and the number of ranks."""
    if os.environ.get("MS_SIMULATION_LEVEL"):
        raise ValueError("MS_SIMULATION_LEVEL is set: a dry run computes no values, so nothing can be tested; unset it")
    if device not in (None, ms.get_context("device_target")):
        try:
            ms.set_device(device)
        except Exception as error:
            raise ValueError(f"argument --device: MindSpore cannot use {device} here ({one_line(error)}); leave it out "
                             "to use the device that MindSpore finds") from error
    if ms.get_context("device_target") == "Ascend" and (os.cpu_count() or 1) < THREADS:
        ms.runtime.dispatch_threads_num(THREADS)  # with fewer, graphs with branches fail: see "On Ascend and GPU"
    join_ranks()
    ranks = world_size()
    return (get_rank() if ranks > 1 else 0), ranks


def name_of(item: Any) -> dict[str, str]:
    """Return the check, the driver and the dtype of a test."""
    test = item.originalname.removeprefix("test_").replace("__", ", ").replace("_", " ")
    return {"check": test, **item.callspec.params}


def named(row: dict[str, Any]) -> str:
    """Return the name of a row."""
    return ", ".join((row["check"], row["driver"], row["dtype"]))


def begins_a_word(text: str, name: str) -> bool:
    """Return whether a word of the name begins with this text ("float16" selects no row in bfloat16)."""
    return text != "" and re.search(rf"(?<!\w){re.escape(text)}", name) is not None


class Table:
    """Print a row for each test. The name is printed first: if the process dies, the last line says in which test.

    Args:
        chosen: Text of the rows to run. None: all rows.
        rank, ranks: This rank, and the number of ranks, which all have the same rows.
    """

    def __init__(self, chosen: Optional[str], rank: int, ranks: int) -> None:
        self.chosen, self.rank, self.ranks, self.missing = chosen, rank, ranks, ""
        self.error: Optional[BaseException] = None  # of the table itself, e.g. because stdout was closed
        self.rows: list[dict[str, Any]] = []

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Print an error in a file of tests."""
        if report.failed:
            print(report.longrepr, file=sys.stderr)

    def pytest_internalerror(self, excinfo: pytest.ExceptionInfo[BaseException]) -> bool:
        """Keep the error: it is raised again when pytest has ended."""
        self.error = excinfo.value
        return True

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Choose the rows, and print the head of the table."""
        session.items.sort(key=lambda item: (item.path, DTYPES.index(name_of(item)["dtype"])))
        self.names = {item.nodeid: name_of(item) for item in session.items}
        if self.chosen is not None:
            session.items = [item for item in session.items if begins_a_word(self.chosen, named(name_of(item)))]
        if not session.items and self.names:
            columns = zip(*(name.values() for name in self.names.values()))
            there = "; ".join(", ".join(dict.fromkeys(column)) for column in columns)
            self.missing = f"argument --rows: no row has {self.chosen!r} in its name; there are {there}"
            return
        print(f"versions   {', '.join(f'{name} {version}' for name, version in versions().items())}",
              *([f"ranks      {self.ranks}"] if self.ranks > 1 else []),
              LINE.format(check="check", driver="driver", dtype="dtype") + "result    seconds  found",
              sep="\n", flush=True)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Print the name of a row."""
        self.row, self.began = {**self.names[nodeid], **dict.fromkeys(("difference", "bound", "value")),
                                "result": HOLDS, "message": ""}, perf_counter()
        print(LINE.format(**self.row), end="", flush=True)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep what the test has recorded, and how it ended."""
        row = self.row
        row.update(report.user_properties)
        if report.passed:
            row["result"] = MEASURED if row["value"] is not None and row["result"] == HOLDS else row["result"]
        elif report.skipped:
            reason = report.longrepr[2].removeprefix("Skipped: ")  # type: ignore[index]
            row["message"] = reason.removeprefix("no kernel: ")
            row["result"] = NO_KERNEL if reason != row["message"] else NOT_RUN
        else:
            row["result"] = FAILS
            if row["difference"] is None:
                crash = getattr(report.longrepr, "reprcrash", None)
                said = crash.message.removeprefix("AssertionError: ") if crash else str(report.longrepr)
                lines = [line for line in said.splitlines() if line.strip("- ")]
                # The first line of MindSpore's errors is empty.
                row["message"] = one_line(Exception(" ".join(lines[:1 + lines[0].rstrip().endswith("Error:")])))

    def pytest_runtest_logfinish(self) -> None:
        """Print the rest of the row."""
        raise_if_interrupted()
        row = {**self.row, "seconds": perf_counter() - self.began}
        if self.rank > 0 and row["result"] == FAILS:  # rank 0 cannot know this
            print(f"rank {self.rank}: {LINE.format(**row)}{end_of(row)}", file=sys.stderr, flush=True)
        self.rows.append(of_all_ranks(row) if self.ranks > 1 else row)
        print(end_of(self.rows[-1]), flush=True)


def end_of(row: dict[str, Any]) -> str:
    """Return the result of a row, and what was found."""
    off = f"off by {row['difference']:.1e}, limit {row['bound']:.0e}" if row["bound"] else ""
    return f"{row['result']:<9} {row['seconds']:>7.1f}  {'; '.join(filter(None, (off, row['message'])))}".rstrip()


def of_all_ranks(row: dict[str, Any]) -> dict[str, Any]:
    """Return the worst row of all ranks, with the ranks in its message. Every rank has to call it."""
    own, off = RESULTS.index(row["result"]), row["difference"]
    rows = gathered(np.array([own, np.inf if off is None else off])).tolist()
    worst, off = max(rows, key=lambda found: (found[0], np.nan_to_num(found[1], nan=np.inf)))
    row = {**row, "result": RESULTS[int(worst)], "difference": None if np.isinf(off) else off}
    if worst != own or row["result"] == FAILS:
        ranks = ", ".join(str(rank) for rank, (result, _) in enumerate(rows) if result == worst)
        said = row["message"] if worst == own else "see its output on stderr"
        row["message"] = f"rank {ranks}{': ' * bool(said)}{said}"
    return row


def gathered(numbers: np.ndarray) -> np.ndarray:
    """Return the numbers of all ranks, `(ranks, length)`, given this rank's: float64 `(length,)`."""
    return ops.AllGather()(Tensor(numbers.view(np.int32))).asnumpy().reshape(world_size(), -1).view(np.float64)


def verdict(rows: list[dict[str, Any]]) -> tuple[bool, str]:
    """Return whether all rows hold that could run, and a sentence that says so."""
    found = Counter(row["result"] for row in rows)
    said = ", ".join(f"{found[result]} {one if found[result] == 1 else many}" for result, one, many in (
        (FAILS, "check fails", "checks fail"), (HOLDS, "check holds", "checks hold"),
        (NO_KERNEL, "needs a kernel that it lacks", "need a kernel that it lacks"),
        (NOT_RUN, "does not apply to it", "do not apply to it"), (MEASURED, "is a measurement", "are measurements"),
    ) if found[result])
    if found[FAILS]:
        first = named(next(row for row in rows if row["result"] == FAILS))
        return False, f"NOT exact on this device: {said} (first: {first})"
    if found[HOLDS] + found[MEASURED] == 0:
        return False, f"not tested on this device: no check could run, {said}"
    return True, f"exact on this device: {said}"
