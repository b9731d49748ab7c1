"""`ms-accum selftest`: it passes, each row fails when what it checks is broken, and it says so."""
import json
import re
import signal
import subprocess
import sys
from contextlib import suppress
from types import SimpleNamespace

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, ops
from support.pages import PAGES, ROOT
from support.selftest_defects import ALL, DEFECTS, in_place

from ms_accum import __main__ as cli
from ms_accum import __version__
from ms_accum.core import kernels
from ms_accum.core.kernels import SWITCH, Portable
from ms_accum.selftest import command, plain, test_kernels, test_memory_and_time
from ms_accum.selftest.modes import running
from ms_accum.selftest.training import BOUNDS, DRIVERS

FAILS, HOLDS, MEASURED, NO_KERNEL, NOT_RUN = "FAILS", "holds", "measured", "no kernel", "not run"


def selftest(*options):
    """Run the command. Return its exit status, and its file."""
    status = cli.main(["selftest", *options, "--json", "found.json"])
    with open("found.json", encoding="utf-8") as file:
        return status, json.load(file)


def rows_of(text):
    """Return the rows that this text chooses, by their check."""
    return {row["check"]: row for row in selftest("--rows", text)[1]["rows"]}


def without_figures(text):
    """Return a table without what differs between runs."""
    text = re.sub(r"^versions .*$", "versions", text, flags=re.MULTILINE)
    text = re.sub(r"\d\.\de-\d\d(?=, limit)|[\d.]+ ms|[\d.]+ x|\d\.\d\d to \d\.\d\d", "#", text)
    return re.sub(r"(?<=holds|sured|t run) +\d+\.\d", " #", text)


# --- it passes --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_quick_run_passes_and_the_page_shows_what_it_prints(capsys):
    """Each check once, and every driver. Control of what compiled rows say when they fail."""
    assert cli.main(["selftest", "--quick"]) == 0
    printed = capsys.readouterr().out
    shown = re.search(r"^```text\n(versions.*?)^```", PAGES["selftest"], re.MULTILINE | re.DOTALL)[1].splitlines()
    lines = {without_figures(line) for line in printed.splitlines()}
    assert [line for line in shown if without_figures(line) not in lines] == []
    assert without_figures(shown[-2].replace("0 reads", "9 reads")) not in lines  # negative control
    assert printed.splitlines()[-1] == shown[-1] == (
        "exact on this device: 14 checks hold, 8 do not apply to it, 1 is a measurement")
    for driver in DRIVERS:
        assert f" {driver:<20} float32   holds " in printed


@pytest.mark.slow  # two minutes
def test_the_whole_run_passes_but_for_what_cpu_has_no_kernel_for():
    status, found = selftest()
    assert status == 0
    assert found["verdict"] == ("exact on this device: 115 checks hold, 57 need a kernel that it lacks, 10 do not "
                                "apply to it, 1 is a measurement")
    holding = [row for row in found["rows"] if row["result"] == HOLDS]
    assert {row["dtype"] for row in holding} == {"float32", "float16"}
    assert {row["driver"] for row in holding} >= {*DRIVERS}


def test_the_page_has_the_figures_of_the_record(monkeypatch, capsys):
    """The record of the CPU run, and what the page says of it. It has the rows of today.

    Bounds are three times what a correct build is off, or more.
    """
    record = json.loads((ROOT / "tutorials/benchmarks/records/devices/cpu.json").read_text(encoding="utf-8"))
    holding = [row for row in record["rows"] if row["result"] == HOLDS]
    largest = {dtype: max(row["difference"] for row in holding if row["dtype"] == dtype)
               for dtype in ("float32", "float16")}
    assert record["holds"]
    assert all(row["difference"] <= row["bound"] / 3 for row in holding)
    assert record["verdict"] in PAGES["selftest"]
    figures = f"{largest['float32']:.0e} in float32 and {largest['float16']:.2g} in float16".replace("e-0", "e-")
    assert figures in PAGES["selftest"]
    table = command.Table("no such row", 0, 1)
    monkeypatch.setattr(command, "Table", lambda *_: table)
    assert cli.main(["selftest", "--rows", "no such row"]) == 2
    assert [{key: row[key] for key in ("check", "driver", "dtype")} for row in record["rows"]] == [
        *table.names.values()]


# --- each row fails when what it checks is broken ---------------------------------------------------------------------


@pytest.mark.parametrize("name", [
    pytest.param(name, marks=[pytest.mark.slow] * defect.slow) for name, defect in DEFECTS.items()])
def test_each_defect_is_found(monkeypatch, name):
    """And no other row fails. By more than any dtype's bound. Controls: the quick run and the next tests."""
    defect = DEFECTS[name]
    for patch in defect.patches:
        monkeypatch.setattr(*patch)
    monkeypatch.setitem(DRIVERS, "train step, 2 pieces", ("step-pynative", 2))
    with running("pynative" if defect.op_by_op else "jit"):
        is_quick = defect.rows.startswith(("bad element", "token weights, sums, by hand"))
        status, found = selftest(*["--quick"] * is_quick, "--rows", defect.rows)
    failed = [row for row in found["rows"] if row["result"] == FAILS]
    assert status == 1
    assert {row["check"] for row in failed} == defect.fails
    inexact = [row["difference"] for row in failed if row["difference"] is not None and row["bound"] > 0]
    assert min(inexact, default=1) > 2 * BOUNDS["bfloat16"]
    for row in failed:
        assert defect.says in row["message"]
        assert defect.says or "Error" not in row["message"]


def test_without_a_defect_these_rows_hold(monkeypatch):
    """Control of the defects that are found op by op; in the other rows, see the next test."""
    monkeypatch.setitem(DRIVERS, "train step, 2 pieces", ("step-pynative", 2))
    with running("pynative"):
        for rows in {defect.rows for defect in DEFECTS.values() if defect.op_by_op and not defect.slow}:
            status, found = selftest(*["--quick"] * (rows == "bad element"), "--rows", rows)
            assert {row["result"] for row in found["rows"]} == {NOT_RUN if "kernels" in rows else HOLDS}, rows
            assert status == ("kernels" in rows)


def test_a_failure_is_in_the_table_the_file_and_the_exit_status(monkeypatch, capsys):
    """And the rows beside it hold: they are the control of `test_each_defect_is_found`."""
    monkeypatch.setattr(*DEFECTS["flush does nothing"].patches[0])
    monkeypatch.setenv("MS_ALLOC_CONF", "enable_vmm:True")
    status, found = selftest("--device", "CPU", "--rows", "cell, PyNative, float32")
    said = capsys.readouterr().out
    verdict = ("NOT exact on this device: 1 check fails, 8 checks hold (first: incomplete window, cell, PyNative, "
               "float32)")
    assert re.search(r"\nincomplete window        cell, PyNative       float32   FAILS  +\d+\.\d  flush\(\) closed no "
                     r"window\n", said)
    assert said.endswith(f"\n{verdict}\nwrote found.json\n")
    assert (status, found["verdict"], found["holds"]) == (1, verdict, False)
    assert found["versions"]["ms_accum"] == __version__
    assert found["versions"]["python"] == sys.version.split()[0]
    assert (found["device"], found["ranks"], found["quick"], found["figures"]) == ("CPU", 1, False, {})
    assert found["flags"]["MS_ALLOC_CONF"] == "enable_vmm:True"
    assert {row["check"]: row["result"] for row in found["rows"]} == {
        check: FAILS if check == "incomplete window" else HOLDS for check in ALL}
    assert found["in_place"] is False


def test_kernels_in_place_are_compared_with_portable_ones(monkeypatch):
    """Control of kernels in place that are wrong. On another device there are none."""
    assert {row["result"] for row in rows_of("kernels in place").values()} == {NOT_RUN}
    for patch in in_place(Portable):
        monkeypatch.setattr(*patch)
    with running("pynative"):
        found = selftest("--rows", "kernels in place")[1]["rows"]
    assert [(row["driver"], row["result"]) for row in found] == [
        (f"buffer of {size}", HOLDS) for size in ("1", "7", "1,000", "65,537", "10,000,000")]


def test_fused_products_are_compared_where_they_are_switched_on(monkeypatch):
    """In float32, which CPU has. Controls: products that are not fused, and gradients that are doubled."""
    off = []

    def fused():
        test_kernels.test_fused_products("float32", lambda error: off.append(error))

    monkeypatch.setenv("MS_DEV_GRAPH_KERNEL_FLAGS", "--enable_pass=matmul_assignadd_fusion")
    assert rows_of("fused products")["fused products"]["result"] == NO_KERNEL
    with running("pynative"):
        with pytest.raises(AssertionError, match="0 products of 2 are fused"):  # as CPU has no such kernel
            fused()
        monkeypatch.setattr(test_kernels, "fused_products", lambda folder: 2)
        fused()
        monkeypatch.setattr(kernels, "add_one", lambda factor, buffer, gradient: ops.assign_add(buffer, 2 * gradient))
        fused()
    assert off[0] < 1e-4
    assert off[1] == pytest.approx(1)


def test_fused_products_are_counted_in_the_graph_that_has_most(tmp_path):
    assert test_kernels.fused_products(tmp_path) == 0
    for name, text in (("graph_build_0.ir", "Add("), ("graph_build_1.ir", "%1 = InplaceMatmulAdd(%0)\n" * 2),
                       ("validate_1.ir", "InplaceMatmulAdd(" * 3)):
        (tmp_path / name).write_text(text, encoding="utf-8")
    assert test_kernels.fused_products(tmp_path) == 2


def test_memory_is_measured_where_mindspore_counts_it(monkeypatch, uncompiled):
    """With the plan where kernels work in place. On CPU, MindSpore counts nothing."""
    parameters, peaks = test_memory_and_time.LAYERS * (8 * 8 + 8), iter((9.0, 13.0))
    monkeypatch.setattr(test_memory_and_time, "WIDTH", 8)
    monkeypatch.setattr(ms.runtime, "memory_allocated", lambda: 100)
    monkeypatch.setattr(ms.runtime, "max_memory_allocated", lambda: 100 + next(peaks) * parameters)
    monkeypatch.setattr(ms.runtime, "reset_max_memory_allocated", lambda: None)
    found, said = test_memory_and_time.measured_peaks(Tensor(np.ones((2, 8)), ms.float32)), {}
    assert found == {"add": 9.0, "update": 13.0}
    test_memory_and_time.test_bytes_per_parameter(found, "add", "float32", said.__setitem__)
    assert said == {"value": 9.0,
                    "message": "9.00 bytes per parameter at the peak; the plan is for kernels in place only"}
    monkeypatch.setenv(SWITCH, "1")
    test_memory_and_time.test_bytes_per_parameter(found, "update", "float32", said.__setitem__)
    assert said["message"] == "13.00 bytes per parameter at the peak; planned 12.00"


def test_milliseconds_are_those_of_pairs(monkeypatch, uncompiled):
    monkeypatch.setattr(test_memory_and_time, "WINDOWS", 4)
    status, found = selftest("--rows", "milliseconds")
    row, = found["rows"]
    value = found["figures"]["milliseconds, train step, float32"]
    assert (status, row["result"], row["value"]) == (0, MEASURED, value)
    assert value["windows"] == 4
    assert 0 < value["quartiles"][0] <= value["ratio"] <= value["quartiles"][1]
    assert row["message"].startswith(f"{value['ours']:.2f} ms per microbatch, {value['ratio']:.2f} x the time")
    assert found["verdict"] == "exact on this device: 1 is a measurement"


# --- rows, table and files --------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_missing_kernel_is_a_row_and_no_failure(capsys):
    """Plain MindSpore has no bfloat16 product on CPU. What comes next, compiled, holds."""
    assert cli.main(["selftest", "--rows", "token weights, sums, cell, PyNative"]) == 0
    said = capsys.readouterr().out
    assert said.endswith("\nexact on this device: 2 checks hold, 1 needs a kernel that it lacks\n")
    assert "no kernel     0.0  plain MindSpore: TypeError: Select CPU operator[MatMul] fail" in said
    assert rows_of("token weights, sums, train step, float32")["token weights, sums"]["result"] == HOLDS


def test_nothing_that_could_run_is_no_success(capsys):
    assert cli.main(["selftest", "--rows", "clipping, cell, PyNative, bfloat16"]) == 1
    assert capsys.readouterr().out.endswith(
        "\nnot tested on this device: no check could run, 1 needs a kernel that it lacks\n")


@pytest.mark.parametrize(("dtype", "result"), [("float32", FAILS), ("float16", NO_KERNEL)])
def test_a_reference_that_fails_in_float32_is_a_failure(monkeypatch, dtype, result):
    """Every device computes in float32: a broken reference would make each row "no kernel", and nothing would fail."""
    def broken(*_):
        raise MemoryError

    monkeypatch.setattr(plain, "optimizer_of", broken)
    row = rows_of(f"clipping, train step, {dtype}")["clipping"]
    assert (row["result"], row["message"]) == (result, "plain MindSpore: MemoryError:")


@pytest.mark.parametrize("value", [0.0, float("nan")])
def test_a_device_on_which_nothing_moves_fails(monkeypatch, value):
    """Zeros and NaN are equal on both sides."""
    monkeypatch.setattr(plain, "values", lambda parameters: [np.full(p.shape, value) for p in parameters])
    row = rows_of("token weights, sums, cell, PyNative, float32")["token weights, sums"]
    assert row["result"] == FAILS
    assert row["message"].startswith("plain training did not move the parameters")


@pytest.mark.parametrize(("arguments", "said"), [
    (["--rows", "no such row"], "no row has 'no such row' in its name; there are ragged windows, incomplete window, "),
    (["--rows", ""], "no row has '' in its name"),
    (["--device", "GPU"], "MindSpore cannot use GPU here"),
    (["--json", "missing/file.json"], "cannot write missing/file.json"),
])
def test_a_wrong_command_line(capsys, arguments, said):
    assert cli.main(["selftest", *arguments]) == 2
    assert said in capsys.readouterr().err


def test_without_pytest_one_line_says_what_to_do(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "pytest", None)
    assert cli.main(["selftest"]) == 2
    assert capsys.readouterr().err == "ms-accum selftest: error: the selftest needs pytest: pip install pytest\n"


def test_settings_of_other_tests_do_not_count(monkeypatch, tmp_path):
    """Control: pytest itself fails with them."""
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = --no-such-option\n", encoding="utf-8")
    monkeypatch.setenv("PYTEST_ADDOPTS", "--nor-this-one")
    assert rows_of("kernels in place, buffer of 7")["kernels in place"]["result"] == NOT_RUN
    assert pytest.main([]) == pytest.ExitCode.USAGE_ERROR


def test_pytest_that_stops_is_no_success(monkeypatch, capsys):
    """As with a file of tests that cannot be imported. Its error is printed."""
    monkeypatch.setitem(sys.modules, "ms_accum.selftest.reads", None)
    monkeypatch.delitem(sys.modules, "ms_accum.selftest.test_memory_and_time")
    assert cli.main(["selftest", "--rows", "kernels"]) == 1
    printed = capsys.readouterr()
    assert printed.out.endswith("\nnot tested: pytest stopped with status 2\n")
    assert "import of ms_accum.selftest.reads halted" in printed.err


def test_a_closed_stdout_ends_the_run(monkeypatch):
    def closed(row):
        raise BrokenPipeError

    monkeypatch.setattr(command, "end_of", closed)
    with pytest.raises(BrokenPipeError):
        command.run(SimpleNamespace(device=None, rows="kernels", quick=True, json=None))


def test_an_interrupt_that_mindspore_drops_ends_the_run_behind_its_row(monkeypatch, capsys):
    """And the row's name is printed before the row is run."""
    require = test_kernels.require_in_place

    def dropping():
        with suppress(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        require()

    assert cli.main(["selftest", "--rows", "kernels"]) == 1  # negative control: all rows, of which none can be run
    assert capsys.readouterr().out.count("buffer of") == 5
    monkeypatch.setattr(test_kernels, "require_in_place", dropping)
    assert cli.main(["selftest", "--rows", "kernels"]) == 130
    printed = capsys.readouterr()
    assert printed.out.endswith("\nkernels in place         buffer of 1          float32   ")
    assert printed.err == "ms-accum: interrupted\n"


@pytest.mark.slow  # a process of its own
def test_a_process_that_dies_names_its_row():
    script = ("import os; from ms_accum import __main__ as cli; from ms_accum.selftest import test_kernels;"
              "test_kernels.require_in_place = os.abort; cli.main(['selftest', '--rows', 'buffer of 7'])")
    end = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert end.returncode == -signal.SIGABRT
    assert end.stdout.endswith("\nkernels in place         buffer of 7          float32   ")


def test_a_dry_run_is_refused(monkeypatch, capsys):
    monkeypatch.setenv("MS_SIMULATION_LEVEL", "1")
    assert cli.main(["selftest", "--quick"]) == 2
    assert "a dry run computes no values" in capsys.readouterr().err


def test_help_names_it(capsys):
    assert cli.main(["selftest", "--help"]) == 0
    assert "exit status: 0 if no row fails" in capsys.readouterr().out


def test_rows_are_chosen_by_the_beginning_of_a_word():
    name = "ragged windows, by hand, op by op, bfloat16"
    for text in ("windows", "op by", "hand, op", "bfloat16", "bf"):
        assert command.begins_a_word(text, name)
    for text in ("", "float16", "indows", "(", "op  by"):
        assert not command.begins_a_word(text, name)
