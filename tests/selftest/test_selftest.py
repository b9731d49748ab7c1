"""`ms-accum selftest`: it passes, each row fails when what it checks is broken, and it says so."""
import re
import signal
import subprocess
from contextlib import suppress

import mindspore as ms
import numpy as np
import pytest
from support.launch import msrun
from support.pages import PAGES, README
from support.selftest_defects import ALL, DEFECTS, in_place

from ms_accum import __main__ as cli
from ms_accum import __version__
from ms_accum.core.kernels import Portable
from ms_accum.selftest import checks, training
from ms_accum.selftest.checks import BOUNDS, DRIVERS
from ms_accum.selftest.modes import running

FAILS, HOLDS, MEASURED, NO_KERNEL, NOT_RUN = "FAILS", "holds", "measured", "no kernel", "not run"
ROW = re.compile(rf"^(?P<check>.{{20}}) (?P<driver>.{{21}}) (?P<dtype>b?float\d\d) +(?P<result>{FAILS}|{HOLDS}|"
                 rf"{MEASURED}|{NO_KERNEL}|{NOT_RUN}) +[\d.]+ ?(?P<found>.*)$", re.MULTILINE)


@pytest.fixture
def selftest(capsys):
    """Run the command. Return its exit status, its rows and the verdict."""
    def run(*options):
        checks.train_plainly.cache_clear()
        status = cli.main(["selftest", *options])
        run.said = capsys.readouterr().out
        rows = [{name: text.strip() for name, text in row.groupdict().items()} for row in ROW.finditer(run.said)]
        return status, rows, re.sub(r"; \d+ seconds\)$", ")", run.said.splitlines()[-1])
    return run


@pytest.fixture
def op_by_op(monkeypatch):
    """Let all drivers run op by op, which is faster."""
    for driver in DRIVERS:
        monkeypatch.setitem(DRIVERS, driver, "pynative")
    with running("pynative"):
        yield


def off_of(rows):
    """Return the errors of rows, each with its limit."""
    return [(float(off), float(limit)) for row in rows for off, limit in re.findall(r"off by (\S+), limit ([\de.-]+)",
                                                                                  row["found"])]


# --- it passes --------------------------------------------------------------------------------------------------------


def without_figures(text):
    """Return a table without what differs between runs."""
    text = re.sub(r"^versions .*$", "versions", text, flags=re.MULTILINE)
    return re.sub(r"\d\.\de-\d\d(?=, limit)|(?<=holds|t run) +\d+\.\d|(?<=; )\d+(?= seconds)", "#", text)


@pytest.mark.slow
def test_the_quick_run_passes_and_the_page_shows_what_it_prints(selftest):
    """Every driver and check. Controls: a changed line; the defects below."""
    status, rows, _ = selftest("--quick")
    assert status == 0
    assert {row["result"] for row in rows} == {HOLDS, NOT_RUN}
    assert {row["driver"] for row in rows if row["result"] == HOLDS} >= {*DRIVERS}
    assert {row["check"] for row in rows} == {row.check for row in checks.rows(is_quick=False)}
    shown = re.search(r"^```text\n(versions.*?)^```", PAGES["selftest"], re.MULTILINE | re.DOTALL)[1].splitlines()
    lines = {without_figures(line) for line in selftest.said.splitlines()}
    assert [line for line in shown if without_figures(line) not in lines] == []
    assert without_figures(shown[-2].replace("0 reads", "9 reads")) not in lines  # negative control


@pytest.mark.slow  # two minutes
def test_the_whole_run_passes_but_for_what_cpu_has_no_kernel_for(selftest):
    """Bounds are three times what a correct build is off, or more."""
    status, rows, verdict = selftest()
    assert status == 0
    assert f'"{verdict}"' in PAGES["selftest"]
    holding = [row for row in rows if row["result"] == HOLDS]
    assert {(row["driver"], row["dtype"]) for row in holding} >= {
        (driver, dtype) for driver in DRIVERS for dtype in ("float32", "float16")}
    assert all(off <= limit / 3 for off, limit in off_of(holding))


@pytest.mark.slow  # two processes
def test_ranks_are_compared_with_training_on_the_samples_of_all(tmp_path):
    (program, *command), environment = msrun(tmp_path, 2, __file__, "selftest", "--quick", "--rows", "ranks")
    command[command.index(__file__):command.index(str(tmp_path)) + 1] = ["python", "-m", "ms_accum"]
    end = subprocess.run([program, "--tail_worker_log=0", *command], env=environment, cwd=tmp_path, text=True,
                         capture_output=True, check=False)
    assert end.returncode == 0, end.stdout
    said = (tmp_path / "logs/worker_0.log").read_text(encoding="utf-8")  # with warnings behind the names of rows
    assert re.findall(r"^ranks +(\S.*?\S) +float32", said, re.MULTILINE) == [*checks.REDUCERS]
    assert "exact on this device (holds: 4; " in said


def test_pages_and_help_say_the_same_of_its_time(capsys):
    """Control: no other number of seconds or minutes."""
    cli.main(["selftest", "--help"])
    texts = [capsys.readouterr().out, PAGES["selftest"]]
    said = [re.findall(r"(\w+) (minutes|seconds)\b(?!\))", text) for text in texts]
    assert said == [[("two", "minutes"), ("20", "seconds")]] * 2
    assert "tests in two minutes" in README


# --- each row fails when what it checks is broken ---------------------------------------------------------------------


@pytest.mark.parametrize("name", [
    pytest.param(name, marks=[pytest.mark.slow] * defect.slow) for name, defect in DEFECTS.items()])
def test_each_defect_is_found(selftest, request, monkeypatch, name):
    """And no other row fails. By more than any dtype's bound. Controls: the quick run and the next test."""
    defect = DEFECTS[name]
    for patch in defect.patches:
        monkeypatch.setattr(*patch)
    if defect.op_by_op:
        request.getfixturevalue("op_by_op")
    status, rows, verdict = selftest(*["--quick"] * defect.quick, "--rows", defect.rows)
    failed = [row for row in rows if row["result"] == FAILS]
    assert status == 1
    assert verdict.startswith("NOT exact on this device (")
    assert verdict.endswith("; first {check}, {driver}, {dtype})".format(**failed[0]))
    assert failed == [row for row in rows if row["check"] in defect.fails]
    assert {row["check"] for row in failed} == defect.fails
    assert min((off for off, _ in off_of(failed) if not defect.says), default=1) > 2 * BOUNDS["bfloat16"]
    for row in failed:
        assert defect.says in row["found"]
        assert defect.says or "Error" not in row["found"]


def test_without_a_defect_these_rows_hold(selftest, monkeypatch, op_by_op):
    """Also kernels in place, where they are those of CPU."""
    for patch in in_place(Portable):
        monkeypatch.setattr(*patch)
    for rows in {defect.rows for defect in DEFECTS.values() if not defect.slow}:
        status, found, verdict = selftest("--quick", "--rows", rows) if rows == ALL[-1] else selftest("--rows", rows)
        assert (status, {row["result"] for row in found} - {NO_KERNEL}) == (0, {HOLDS}), rows
        assert verdict.startswith("exact on this device (holds: ")
    assert selftest.said.startswith(f"versions   ms_accum {__version__}, mindspore {ms.__version__}, ")


def test_memory_is_measured_where_mindspore_counts_it(monkeypatch, uncompiled):
    """With the plan. On CPU, MindSpore counts nothing."""
    assert checks.bytes_per_parameter("train step", "float32")[0] == NOT_RUN
    parameters, peaks = 13 * (8 * 8 + 8), iter((9.0, 13.0))
    monkeypatch.setattr(checks, "WIDTH", 8)
    monkeypatch.setattr(checks, "UNCOUNTED", ())
    monkeypatch.setattr(ms.runtime, "memory_allocated", lambda: 100)
    monkeypatch.setattr(ms.runtime, "max_memory_allocated", lambda: 100 + next(peaks) * parameters)
    monkeypatch.setattr(ms.runtime, "reset_max_memory_allocated", lambda: None)
    assert checks.bytes_per_parameter("train step", "float32") == (
        MEASURED, "at the peak of an addition 9.00 (plan 8.34), of an update 13.00 (plan 12.00)")


# --- rows, table and errors -------------------------------------------------------------------------------------------


def test_a_missing_kernel_is_no_failure_and_nothing_that_could_run_is_no_success(selftest):
    """Plain MindSpore has no bfloat16 product on CPU, so one row says so."""
    status, rows, verdict = selftest("--rows", "cell, PyNative, bfloat16")
    assert [row["result"] for row in rows] == [NO_KERNEL]
    assert "TypeError: Select CPU operator[MatMul] fail" in rows[0]["found"]
    assert (status, verdict) == (1, "not tested on this device (no kernel: 1)")
    status, rows, verdict = selftest("--rows", "windows of one, cell, PyNative")
    assert [row["result"] for row in rows] == [HOLDS, HOLDS, NO_KERNEL]
    assert (status, verdict) == (0, "exact on this device (holds: 2; no kernel: 1)")


@pytest.mark.parametrize(("dtype", "result"), [("float32", FAILS), ("float16", NO_KERNEL)])
def test_a_reference_that_fails_in_float32_is_a_failure(selftest, monkeypatch, dtype, result):
    """Every device computes in float32: a broken reference would make each row "no kernel", and nothing would fail."""
    def broken(*_):
        raise MemoryError

    monkeypatch.setattr(training, "optimizer_of", broken)
    status, rows, _ = selftest("--rows", f"windows of one, train step, {dtype}")
    assert (status, rows[0]["result"], rows[0]["found"]) == (1, result, "MemoryError:")


@pytest.mark.parametrize("value", [0.0, float("nan")])
def test_a_device_on_which_nothing_moves_fails(selftest, monkeypatch, value):
    """Zeros and NaN are equal on both sides."""
    monkeypatch.setattr(training, "values", lambda parameters: [np.full(p.shape, value) for p in parameters])
    row, = selftest("--rows", "token weights, sums, cell, PyNative, float32")[1]
    assert row["result"] == FAILS
    assert row["found"].startswith("plain training did not move the parameters")


def test_a_row_that_does_not_exist(capsys):
    assert cli.main(["selftest", "--rows", "no such row"]) == 2
    said = capsys.readouterr().err
    assert "no row has 'no such row' in its name; there are ragged windows, save and resume, " in said


def test_an_interrupt_that_mindspore_drops_ends_the_run_behind_its_row(monkeypatch, capsys):
    """And the row's name is printed before the row is run."""
    def dropping(driver, dtype):
        with suppress(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        return HOLDS, ""

    monkeypatch.setattr(checks, "kernels_in_place", lambda driver, dtype: (HOLDS, ""))
    assert cli.main(["selftest", "--quick", "--rows", "kernels"]) == 0  # negative control: both rows
    assert capsys.readouterr().out.count("\nkernels in place ") == 2
    monkeypatch.setattr(checks, "kernels_in_place", dropping)
    assert cli.main(["selftest", "--quick", "--rows", "kernels"]) == 130
    printed = capsys.readouterr()
    assert printed.out.endswith("\nkernels in place     train step            float32   ")
    assert printed.err == "ms-accum: interrupted\n"
