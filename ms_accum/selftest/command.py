"""The command `ms-accum selftest`: run the checks, and print a table and a verdict."""
from __future__ import annotations

import argparse
import os
import sys
from collections import Counter
from contextlib import suppress
from time import perf_counter

import mindspore as ms
from mindspore import Tensor, ops

from ..arguments import one_line
from ..cli.interrupts import raise_if_interrupted
from ..cli.options import add_command
from ..cli.process import join_ranks, versions
from ..core.kernels import SWITCH
from ..distributed.meeting import world_size
from ..mindspore_api import get_rank
from ..runtime import synchronize
from . import checks
from .checks import FAILS, HOLDS, NO_KERNEL, RESULTS, Found, Row
from .modes import recover

DESCRIPTION = """\
Test on this device whether accumulation is exact: each driver (way to train) is compared with plain MindSpore, which
trains on the undivided batch. Kernels that work in place and, under msrun, exchanges between ranks are tested, reads of
the device are counted, and memory is measured.

Each row "holds" or "FAILS". Errors are relative to the change of the parameters in training. If plain MindSpore fails
in 16 bits, too, there is "no kernel", which is not a failure. The last line is the verdict.
On 2 cores of a CPU it takes two minutes, with --quick 20 seconds."""
EXAMPLES = """\
examples:
  ms-accum selftest | tee ascend.txt
  ms-accum selftest --quick --rows "save and resume"
  msrun --worker_num=2 --local_worker_num=2 --join=True --log_dir=ranks --master_port=8118 \\
      --tail_worker_log=0 python -m ms_accum selftest   # nothing for a minute: give another port

exit status: 0 if no row fails, 1 if one does or none could run, 2 for a bad command line"""
# Variables that change how MindSpore compiles and runs.
FLAGS = ("MS_WORKER_NUM", "MS_DEV_GRAPH_KERNEL_FLAGS", "MS_JIT", "MS_ALLOC_CONF", "OMP_NUM_THREADS", SWITCH)
LINE = "{:<20} {:<21} {:<9} "


def add_parser(subcommands: argparse._SubParsersAction) -> None:
    """Add `selftest` to the commands of `ms-accum`."""
    add = add_command(subcommands, "selftest", run, "test on this device whether accumulation is exact", DESCRIPTION,
                      EXAMPLES).add_argument
    add("--quick", action="store_true", help="float32 only, and each check with few drivers")
    add("--rows", metavar="TEXT", default="", help='only rows with TEXT in them: a check, driver or dtype')


def run(options: argparse.Namespace) -> int:
    """Run the checks and print what they found. Return 1 if a row fails, or if no row could be run."""
    if ms.get_context("device_target") == "Ascend" and (os.cpu_count() or 1) < 6:
        ms.runtime.dispatch_threads_num(6)  # with fewer, graphs with branches fail: see "Ascend and GPU"
    join_ranks()
    every, began = checks.rows(options.quick), perf_counter()
    counts, failing, without = Counter(), [], set()  # type: Counter[str], list[str], set[str]
    rows = [row for row in every if options.rows in ", ".join(row[:3])]
    if not rows:
        checked = ", ".join(dict.fromkeys(row.check for row in every))
        raise ValueError(f"argument --rows: no row has {options.rows!r} in its name; there are {checked}")
    print(f"versions   {', '.join(f'{name} {version}' for name, version in versions().items())}",
          *(f"{name}={os.environ[name]}" for name in FLAGS if name in os.environ),
          LINE.format("check", "driver", "dtype") + "result    seconds  found", sep="\n", flush=True)
    for row in rows:
        if row.dtype in without:
            continue
        print(LINE.format(*row), end="", flush=True)  # first: if the process dies, the last line says in which row
        start = perf_counter()
        result, message = of_all_ranks(row, *result_of(row))
        print(f"{result:<9} {perf_counter() - start:>7.1f}  {message}".rstrip(), flush=True)
        counts[result] += 1
        failing += [f"first {', '.join(row[:3])}"] * (result == FAILS)
        without |= {row.dtype} if result == NO_KERNEL else set()
    found = "NOT exact" if failing else "exact" if counts[HOLDS] else "not tested"
    said = [*(f"{result}: {counts[result]}" for result in RESULTS if counts[result]), *failing[:1]]
    print(f"{found} on this device ({'; '.join(said)}; {perf_counter() - began:.0f} seconds)", flush=True)
    return int(found != "exact")


def result_of(row: Row) -> Found:
    """Return the result of a row, and what was found."""
    of_an_error = FAILS if row.dtype == "float32" else NO_KERNEL
    try:
        checks.train_plainly(row.dtype)
        of_an_error = FAILS
        result, message = row.run(row.driver, row.dtype)
    except AssertionError as error:
        result, message = FAILS, str(error)
    except Exception as error:
        result, message = of_an_error, f"{type(error).__name__}: {one_line(error)}"
        with suppress(Exception):
            synchronize()  # so that the next row does not get the rest of this error
        recover()
    raise_if_interrupted()
    return result, message


def of_all_ranks(row: Row, result: str, message: str) -> Found:
    """Return the worst result of all ranks. Every rank has to call it."""
    if world_size() == 1:
        return result, message
    if get_rank() > 0 and result == FAILS:  # rank 0 cannot know why
        print(f"rank {get_rank()}: {LINE.format(*row)} {message}", file=sys.stderr, flush=True)
    worst = RESULTS[ops.AllGather()(Tensor([RESULTS.index(result)], ms.int32)).asnumpy().max()]
    return worst, message if worst == result else "another rank: see its stderr"
