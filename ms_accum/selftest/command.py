"""The command `ms-accum selftest`: its options, its table and its JSON file."""
from __future__ import annotations

import argparse
import os
import re
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any, Optional, Union

import mindspore as ms
from tqdm import tqdm

from ..cli.files import write_json
from ..cli.interrupts import raise_if_interrupted
from ..cli.options import add_command, output
from ..cli.process import join_ranks, versions
from ..core.probe import SWITCH, kernels
from ..distributed.ranks import wait_for_all, world_size
from .ranks import of_all_ranks
from .rows import FAILS, HOLDS, MEASURED, NO_KERNEL, NOT_RUN, Check, Figure, Name, Row, row_of, said
from .selection import rows_to_be

DESCRIPTION = """\
Test on this device whether accumulation is exact. Each driver is compared with plain MindSpore, which trains on the
undivided batch on the same device, in float32, float16 and bfloat16. Ascend's own kernels are compared with the
portable ones. The memory and time of accumulation are measured. Under msrun, the exchanges between ranks are tested,
too.

Each row of the table "holds" or "FAILS". Differences are relative to the change of the parameters in training. If plain
MindSpore fails on this device, too, the row says "no kernel", which is not a failure."""

EXAMPLES = """\
examples:
  ms-accum selftest                            # about two minutes on a CPU with 2 cores
  ms-accum selftest --quick                    # float32 only, each check once
  ms-accum selftest --device Ascend --json ascend.json
  ms-accum selftest --rows "save and resume"   # only these rows
  msrun --worker_num=2 --local_worker_num=2 --join=True --log_dir=ranks \\
      --tail_worker_log=0 python -m ms_accum selftest

exit status: 0 if no row fails, 1 if one does or none could run, 2 for a bad command line"""

# Variables that change how MindSpore compiles and runs.
FLAGS = ("MS_DEV_GRAPH_KERNEL_FLAGS", "MS_SIMULATION_LEVEL", "MS_JIT", "MS_JIT_MODULES", "MS_DEV_HOST_BLOCKING_RUN",
         "MS_ALLOC_CONF", "OMP_NUM_THREADS", SWITCH)

THREADS = 6
HEADER = ("check", "driver", "dtype", "result", "difference", "seconds")
SUMMARY = {HOLDS: "hold", FAILS: "fail", NO_KERNEL: "without a kernel", NOT_RUN: "not run", MEASURED: "measured"}


def add_parser(subcommands: argparse._SubParsersAction) -> None:
    """Add `selftest` to the commands of `ms-accum`."""
    add = add_command(subcommands, "selftest", run, "test on this device whether accumulation is exact", DESCRIPTION,
                      EXAMPLES).add_argument
    add("--device", choices=("CPU", "GPU", "Ascend"), help="where to run (default: what MindSpore finds)")
    add("--quick", action="store_true", help="float32 only, and each check with one driver: half a minute on 2 cores")
    add("--rows", metavar="TEXT",
        help='run only the rows of this check, driver or dtype, e.g. "clipping"; TEXT is the beginning of a word')
    add("--json", type=output(".json"), metavar="FILE", help="write versions, device, flags, rows and figures")


def run(options: argparse.Namespace) -> int:
    """Run each row, print and write. Return 1 if a row fails, or if no row could be run."""
    rank, ranks = start(options.device)
    names = [check.name for check in rows_to_be(options.quick, rank, ranks)]
    chosen = [name for name in names if options.rows is None or begins_a_word(options.rows, str(name))]
    if not chosen:
        raise ValueError(f"argument --rows: no row has {options.rows!r} in its name; there are {parts_of(names)}")
    print(f"versions   {', '.join(f'{name} {version}' for name, version in versions().items())}",
          *([f"ranks      {ranks}"] if ranks > 1 else []), line(*HEADER), sep="\n", flush=True)
    checks = (check for check in rows_to_be(options.quick, rank, ranks) if check.name in chosen)
    rows = list(shown(checks, len(chosen), rank, ranks))
    results = Counter(row.result for row in rows)
    print(", ".join(f"{results[result]} {called}" for result, called in SUMMARY.items()), flush=True)
    holds = results[FAILS] == 0 and results[HOLDS] + results[MEASURED] > 0
    if options.json and rank == 0:
        write_json(options.json, {**report(options, rows, ranks), "holds": holds})
    if ranks > 1:
        wait_for_all()
    return int(not holds)


def start(device: Optional[str]) -> tuple[int, int]:
    """Choose the device and join the other ranks. Return this rank, and the number of ranks."""
    if os.environ.get("MS_SIMULATION_LEVEL"):
        raise ValueError("MS_SIMULATION_LEVEL is set: a dry run computes no values, so nothing can be tested; unset it")
    if device not in (None, ms.get_context("device_target")):
        try:
            ms.set_device(device)
        except Exception as error:
            raise ValueError(f"argument --device: MindSpore cannot use {device} here ({said(error)}); leave it out to "
                             "use the device that MindSpore finds") from error
    if ms.get_context("device_target") == "Ascend" and (os.cpu_count() or 1) < THREADS:
        ms.runtime.dispatch_threads_num(THREADS)  # with fewer, graphs with branches fail: see "On Ascend and GPU"
    join_ranks()
    kernels()  # on an Ascend, their test: its error or warning comes before the table
    ranks = world_size()
    if ranks == 1:
        return 0, 1
    from mindspore.communication import get_rank

    return get_rank(), ranks


def begins_a_word(text: str, name: str) -> bool:
    """Return whether a word of the name begins with this text ("float16" selects no row in bfloat16)."""
    return text != "" and re.search(rf"(?<!\w){re.escape(text)}", name) is not None


def parts_of(names: Sequence[Name]) -> str:
    """Return the checks, drivers and dtypes of rows."""
    return "; ".join(", ".join(dict.fromkeys(filter(None, column))) for column in zip(*names))


def shown(checks: Iterator[Union[Check, Figure]], count: int, rank: int, ranks: int) -> Iterator[Row]:
    """Yield the row of each check, and print it, with a bar on a terminal."""
    with tqdm(total=count, unit="row", leave=False, dynamic_ncols=True, file=sys.stderr,
              disable=not sys.stderr.isatty() or rank > 0) as bar:
        for check in checks:
            bar.set_postfix_str(str(check.name))
            row = row_of(check)
            raise_if_interrupted()
            if rank > 0 and row.result == FAILS:  # rank 0 cannot know this
                print(f"rank {rank}: {text(row)}", file=sys.stderr, flush=True)
            row = of_all_ranks(row, ranks)
            bar.update()
            bar.clear()
            print(text(row), flush=True)
            yield row


def text(row: Row) -> str:
    """Return the line of a row."""
    off = "" if row.difference is None else f"{row.difference:.1e} of {row.bound:.0e}"
    return line(*row.name, row.result, off, f"{row.seconds:.1f}", row.message)


def line(check: str, driver: str, dtype: str, result: str, off: str, seconds: str, message: str = "") -> str:
    """Return a line with these columns."""
    return (f"{check:<24} {driver:<20} {dtype:<9} {result:<9} {off:<17} {seconds:>7}  {message}").rstrip()


def report(options: argparse.Namespace, rows: Sequence[Row], ranks: int) -> dict[str, Any]:
    """Return the contents of the JSON file, except whether all rows hold."""
    found = [{**row.name._asdict(), **{key: value for key, value in asdict(row).items() if key != "name"}}
             for row in rows]
    return {
        "versions": versions(), "device": ms.get_context("device_target"), "device_name": device_name(),
        "flags": {name: os.environ[name] for name in FLAGS if name in os.environ},
        "jit_config": ms.get_context("jit_config"), "jit_level": ms.get_context("jit_level"),
        "kernels": type(kernels()).__name__, "ranks": ranks, "quick": options.quick,
        "rows": found,
        "figures": {str(row.name): row.value for row in rows if row.result == MEASURED}}


def device_name() -> Optional[str]:
    """Return MindSpore's name of the device."""
    try:
        return ms.hal.get_device_name(0)
    except Exception:  # a device that MindSpore has no name for
        return None
