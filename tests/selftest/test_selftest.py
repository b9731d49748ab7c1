"""`ms-accum selftest`: it passes, and each row fails when what it checks is broken."""
import json
import signal
import sys
from contextlib import suppress
from functools import partial
from types import SimpleNamespace

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, ops
from support.pages import PAGES, ROOT

from ms_accum import __main__ as cli
from ms_accum import __version__
from ms_accum.checkpoint import checkpoint
from ms_accum.core import stages
from ms_accum.core import way as ways
from ms_accum.core.buffers import Buffers
from ms_accum.core.counters import Counters
from ms_accum.core.keeper import Keeper
from ms_accum.core.kernels import InPlace, Portable
from ms_accum.core.stages import AdjustedLossScale, LossScale, SkipWindow
from ms_accum.core.way import Way
from ms_accum.selftest import command, figures, kernels, losses, nonfinite, plain, selection
from ms_accum.selftest.drivers import Driver
from ms_accum.selftest.modes import running
from ms_accum.selftest.rows import FAILS, HOLDS, MEASURED, NO_KERNEL, NOT_RUN, Check, Figure, Name, Row, row_of
from ms_accum.selftest.settings import MEANS, ONES, SAMPLES, SUMS
from ms_accum.selftest.training import BOUNDS, DRIVERS, Training
from ms_accum.steps import program, several_losses
from ms_accum.steps.step import TrainStep
from ms_accum.tensors import finite_sum, global_norm, mapped, square_sum, weighted

OP_BY_OP = ("by hand, op by op", "cell, PyNative")
pytestmark = pytest.mark.filterwarnings("ignore:a window of the accumulator")


def results(setting, driver, dtype="float32"):
    """What each row of a training says, by its check."""
    return {row.name.check: row for row in map(row_of, Training(setting, driver, dtype).checks())}


# --- it passes --------------------------------------------------------------------------------------------------------


@pytest.mark.slow  # 25 s
def test_the_quick_run_passes(capsys):
    assert cli.main(["selftest", "--quick"]) == 0
    assert "\n11 hold, 0 fail, 0 without a kernel, 8 not run, 1 measured\n" in capsys.readouterr().out


@pytest.mark.slow  # two minutes
def test_the_whole_run_passes_but_for_what_cpu_has_no_kernel_for(capsys):
    assert cli.main(["selftest", "--json", "cpu.json"]) == 0
    with open("cpu.json", encoding="utf-8") as file:
        rows = json.load(file)["rows"]
    assert len({(row["check"], row["driver"], row["dtype"]) for row in rows}) == len(rows)
    assert {row["dtype"] for row in rows if row["result"] == HOLDS} == {"float32", "float16"}
    assert {row["driver"] for row in rows if row["result"] == HOLDS} >= {*DRIVERS}


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_op_by_op_holds(dtype):
    """And bounds are a third of what they may be at most: a correct build is not near them."""
    for driver in OP_BY_OP:
        for setting in (SAMPLES, MEANS, SUMS):
            for row in results(setting, driver, dtype).values():
                assert (row.result, row.message) == (HOLDS, "")
                assert row.difference <= row.bound / 3


def test_the_quick_run_has_each_check_once_and_every_driver():
    quick = [check.name for check in selection.rows_to_be(quick=True)]
    every = [check.name for check in selection.rows_to_be(quick=False)]
    assert len(quick) == len({(name.check, name.driver) for name in quick}) == 23
    assert {name.check for name in quick} == {name.check for name in every}
    assert {name.driver for name in quick} >= {*DRIVERS}
    assert len(every) == len(set(every))


def test_the_page_has_the_figures_of_the_record():
    """The record of the CPU run, and what the page says of it."""
    record = json.loads((ROOT / "tutorials/benchmarks/records/devices/cpu.json").read_text(encoding="utf-8"))
    holding = [row for row in record["rows"] if row["result"] == HOLDS]
    largest = {dtype: max(row["difference"] for row in holding if row["dtype"] == dtype)
               for dtype in ("float32", "float16")}
    assert record["holds"]
    assert f"{len(holding)} rows hold" in PAGES["selftest"]
    figures = f"{largest['float32']:.0e} in float32 and {largest['float16']:.2g} in float16".replace("e-0", "e-")
    assert figures in PAGES["selftest"]
    assert {(row["check"], row["driver"], row["dtype"]) for row in record["rows"]} == {
        check.name for check in selection.rows_to_be(quick=False)}


# --- each row fails when what it checks is broken ---------------------------------------------------------------------
# Graph mode compiles these from their source.


def unweighted(self, gradients, weight):
    return mapped(weighted, 1.0, gradients, self.gradient_dtypes)


def undivided_sum(contributors, unit, weight):
    return unit


def unclipped(clip_norm, grad_norm, exchange, gradients, factor):
    if clip_norm is not None:
        ops.assign(grad_norm, global_norm(gradients, factor))
    return factor


def square_of_the_sum(gradients, factor=1.0):
    return square_sum(gradients)


def accepted(self, gradients, sums):
    return True


def not_restored(self, gradients):
    return gradients


def not_adjusted(self, applied):
    pass


def not_cleared(self, zero, buffers):
    pass


def not_flushed(self, pieces=1):
    return False, False


_add, _add_piece, _update_alone, _call = Way.add, Way.add_piece, Way.update_alone, Driver.__call__


def weighed_again(self, gradients, weight, counted=None, active=1, factor=None):
    return _add(self, gradients, weight, counted, active, None)


def loading_all_but(*ends):
    """MindSpore's operators as a load uses them, but for Parameters whose names end so."""
    def assign(parameter, value):
        return parameter if parameter.name.endswith(ends) else ops.assign(parameter, value)
    return SimpleNamespace(**{**vars(ops), "assign": assign})


def averaged(contributors, unit, weight):
    return unit / weight


ALL = {phase.name for setting in (SAMPLES, MEANS, SUMS) for phase in setting.phases}
# What is broken: where, by what, and which rows fail, of those of a cell.
BREAKAGES = {
    "weights are ignored": (Buffers, "weighed", unweighted, {
        "ragged windows", "incomplete window", "clipping", "token weights, means", "loss scale"}),
    "the sum is not divided": (ways, "normalising", undivided_sum, ALL),
    "nothing is clipped": (ways, "clipping", unclipped, {"clipping"}),
    "the norm is that of the sum": (ways, "square_sum", square_of_the_sum, {
        "ragged windows", "clipping", "skipping", "save and resume"}),
    "NaN is applied": (SkipWindow, "accepts", accepted, {"skipping", "loss scale", "save and resume"}),
    "the loss scale stays in the gradient": (LossScale, "restore", not_restored, {
        "token weights, means", "loss scale"}),
    "the loss scale stays as it is": (AdjustedLossScale, "on_close", not_adjusted, {"loss scale"}),
    "buffers are not emptied": (Portable, "clear", not_cleared, ALL),
    "flush does nothing": (Keeper, "flush", not_flushed, {"incomplete window"}),
    "gradients of a sum are weighed again": (Way, "add", weighed_again, {"token weights, sums"}),
    "a buffer is not loaded": (checkpoint, "ops", loading_all_but(".second.weight"), {"save and resume"}),
    "a counter is not loaded": (checkpoint, "ops", loading_all_but(".update_step"), {"save and resume"}),
    "the optimizer's state is not loaded": (checkpoint, "ops", loading_all_but("moments.first.bias"), {
        "save and resume"}),
}


@pytest.mark.parametrize("name", BREAKAGES)
def test_each_row_fails_when_what_it_checks_is_broken(monkeypatch, name):
    """And no other row: each says what is wrong. By more than any dtype's bound. Control: `test_op_by_op_holds`."""
    owner, attribute, broken, checks = BREAKAGES[name]
    monkeypatch.setattr(owner, attribute, broken)
    rows = [row for setting in (SAMPLES, MEANS, SUMS) for row in results(setting, "cell, PyNative").values()]
    failed = [row for row in rows if row.result == FAILS]
    assert {row.name.check for row in failed} == checks
    inexact = [row.difference for row in failed if row.difference is not None and row.bound > 0]
    assert min(inexact, default=1) > 2 * BOUNDS["bfloat16"]
    assert not any("Error" in row.message for row in failed)


def test_sums_by_hand_fail_when_they_are_averaged(monkeypatch):
    monkeypatch.setattr(ways, "normalising", averaged)
    assert results(SUMS, "by hand, op by op")["token weights, sums"].result == FAILS


@pytest.mark.parametrize(("driver", "owner", "attribute", "broken", "setting", "check"), [
    ("train step", ways, "normalising", undivided_sum, SUMS, "token weights, sums"),
    ("by hand, compiled", LossScale, "restore", not_restored, MEANS, "token weights, means"),
    ("cell, graph mode", SkipWindow, "accepts", accepted, MEANS, "loss scale"),
])
def test_compiled_rows_fail(monkeypatch, driver, owner, attribute, broken, setting, check):
    """Graphs are compiled from what is broken. Control: `test_the_quick_run_passes`."""
    monkeypatch.setattr(owner, attribute, broken)
    assert results(setting, driver)[check].result == FAILS


def thrice(self, gradients, weight, factor=None):
    _update_alone(self, tuple([3 * gradient for gradient in gradients]), weight, factor)


def twice_the_loss(self, *batch):
    loss = _call(self, *batch)
    return tuple([2 * loss[0], *loss[1:]]) if isinstance(loss, tuple) else 2 * loss


def test_windows_of_one_losses_and_counts_fail(monkeypatch):
    """Windows of one compiled, where they have an update of their own. Control: they hold."""
    check, = Training(ONES, "train step", "float32").checks()
    assert row_of(check).result == HOLDS
    monkeypatch.setattr(Way, "update_alone", thrice)
    check, = Training(ONES, "train step", "float32").checks()
    assert row_of(check).result == FAILS
    monkeypatch.setattr(Driver, "__call__", twice_the_loss)
    row = results(SAMPLES, "cell, PyNative")["ragged windows"]
    assert (row.result, row.difference) == (FAILS, pytest.approx(1, rel=1e-3))
    monkeypatch.undo()
    monkeypatch.setattr(Counters, "see", lambda self, *counted: None)
    assert results(SAMPLES, "cell, PyNative")["ragged windows"].message == "0 samples were counted, expected 24"


def nan_alone(gradients):
    found = [ops.isnan(gradient.astype(ms.float32)).any() for gradient in gradients]
    return ops.where(sum(flag.astype(ms.float32) for flag in found) > 0, Tensor(np.nan), Tensor(1.0))


def of_the_first(gradients):
    return finite_sum(gradients[:1])


@pytest.mark.parametrize(("broken", "missed"), [(nan_alone, 8), (of_the_first, 9), (finite_sum, 0)])
def test_a_bad_element_that_is_not_seen_fails(monkeypatch, uncompiled, broken, missed):
    """In each of four parameters, and three kinds of numbers."""
    monkeypatch.setattr(stages, "finite_sum", broken)
    monkeypatch.setattr(stages, "all_finite", lambda gradients: ops.isfinite(broken(gradients)))
    for check in nonfinite.checks_of_nonfinite("float32"):
        row = row_of(check)
        assert (row.result, row.difference) == (FAILS if missed else HOLDS, missed)


def test_leaving_out_what_is_finite_fails(monkeypatch, uncompiled):
    monkeypatch.setattr(stages, "finite_sum", lambda gradients: Tensor(np.nan))
    monkeypatch.setattr(stages, "all_finite", lambda gradients: Tensor(False))
    for check in nonfinite.checks_of_nonfinite("float32"):
        assert row_of(check).message == "finite gradients were left out, too"


def test_pieces_fail_when_the_last_one_counts_as_a_full_one(monkeypatch):
    """Op by op. Control: as they are."""
    monkeypatch.setitem(DRIVERS, "train step, 2 pieces", ("step-pynative", 2))
    assert results(SAMPLES, "train step, 2 pieces")["ragged windows"].result == HOLDS
    monkeypatch.setattr(program, "starts_of", lambda samples, pieces: [(0, 3), (2, 3)] if samples == 5 else [(0, 2)])
    assert results(SAMPLES, "train step, 2 pieces")["ragged windows"].result == FAILS


def one_divisor(weight):
    return weight * 0 + 3.0


def weighed_alike(self, gradients, weight, counted=None, active=1, factor=None):
    return _add_piece(self, gradients, 1.0, counted, active, factor)


@pytest.mark.parametrize(("place", "owner", "attribute", "broken"), [
    (0, several_losses, "divisor", one_divisor), (1, Way, "add_piece", weighed_alike)])
def test_losses_fail(monkeypatch, place, owner, attribute, broken):
    """Several losses of which each is divided by 3, and pieces of a contrastive loss that weigh the same."""
    with running("pynative"):
        check = losses.checks_of_losses("float32")[place]
        assert row_of(check).result == HOLDS
        monkeypatch.setattr(owner, attribute, broken)
        assert row_of(check).result == FAILS


def test_reads_of_the_device_fail_when_there_are_more(monkeypatch):
    """Compiled, for op by op each branch reads its condition."""
    *_, check = figures.figures(True)
    assert row_of(check).result == HOLDS
    call = TrainStep.__call__
    monkeypatch.setattr(TrainStep, "__call__", lambda self, *batch: (call(self, *batch), int(self.accumulator.seen)))
    row = row_of(check)
    assert (row.result, row.difference) == (FAILS, 32)


# --- kernels and figures ----------------------------------------------------------------------------------------------


class Halves(Portable):
    def scale(self, factor, gradients, dtypes):
        return super().scale(factor / 2, gradients, dtypes)


@pytest.mark.parametrize(("special", "result"), [(Portable, HOLDS), (Halves, FAILS)])
def test_kernels_in_place_are_compared_on_ascend(monkeypatch, uncompiled, special, result):
    """On another device there are none."""
    *checks, _ = kernels.checks_of_kernels()
    assert [row_of(check).result for check in checks] == [NOT_RUN] * 5
    monkeypatch.setattr(kernels, "require_in_place", lambda: None)
    monkeypatch.setattr(kernels, "InPlace", special)
    *checks, _ = kernels.checks_of_kernels()
    assert [row_of(check).result for check in checks] == [result] * 5
    assert [check.name.driver for check in checks] == [
        f"buffer of {size}" for size in ("1", "7", "1,000", "65,537", "10,000,000")]


def test_kernels_in_place_that_the_device_lacks_fail(monkeypatch):
    """As on CPU, where MindSpore has no such operator: on Ascend, that is no missing kernel."""
    monkeypatch.setattr(kernels, "require_in_place", lambda: None)
    check, *_ = kernels.checks_of_kernels()
    assert row_of(check).result == FAILS


def test_fused_products_are_compared_where_they_are_switched_on(monkeypatch, uncompiled):
    """In float32, which CPU has. Control: gradients that are multiplied before they are added."""
    *_, check = kernels.checks_of_kernels()
    row = row_of(check)
    assert (row.result, row.message) == (NOT_RUN, "not switched on in MS_DEV_GRAPH_KERNEL_FLAGS")
    monkeypatch.setenv("MS_DEV_GRAPH_KERNEL_FLAGS", "--enable_pass=matmul_assignadd_fusion")
    assert row_of(check).result == NO_KERNEL
    check = Check(check.name, partial(kernels.gradients_by_numpy, "float32"), partial(kernels.fused, "float32"), 1e-4)
    row = row_of(check)
    assert (row.result, row.message) == (FAILS, "0 products of 2 are fused")  # as CPU has no such kernel
    monkeypatch.setattr(kernels, "fused_products", lambda folder: 2)
    assert row_of(check).result == HOLDS
    monkeypatch.setattr(Buffers, "weighed", lambda self, gradients, weight: tuple(2 * g for g in gradients))
    assert row_of(check).result == FAILS


def test_fused_products_are_counted_in_the_graph_that_has_most(tmp_path):
    assert kernels.fused_products(tmp_path) == 0
    for name, text in (("graph_build_0.ir", "Add("), ("graph_build_1.ir", "%1 = InplaceMatmulAdd(%0)\n" * 2),
                       ("validate_1.ir", "InplaceMatmulAdd(" * 3)):
        (tmp_path / name).write_text(text, encoding="utf-8")
    assert kernels.fused_products(tmp_path) == 2


def test_memory_is_measured_where_mindspore_counts_it(monkeypatch, uncompiled):
    """With the plan where there is one. On CPU it counts nothing."""
    memory = figures.Memory("float32", 8)
    add = Figure(Name("bytes"), memory.plain, memory.measure("add"))
    row = row_of(add)
    assert (row.result, row.message) == (NOT_RUN, "not measured on CPU")
    parameters, peaks = figures.LAYERS * (8 * 8 + 8), iter((9.0, 13.0))
    monkeypatch.setattr(figures.ms.runtime, "memory_allocated", lambda: 100)
    monkeypatch.setattr(figures.ms.runtime, "max_memory_allocated", lambda: 100 + next(peaks) * parameters)
    monkeypatch.setattr(figures.ms.runtime, "reset_max_memory_allocated", lambda: None)
    assert memory.peaks == {"add": 9.0, "update": 13.0}
    assert memory.measure("add")() == (9.0, "9.00; no plan")
    monkeypatch.setattr(figures, "WIDTH", 8)
    assert memory.measure("update")() == (13.0, "13.00; no plan")  # portable kernels
    monkeypatch.setattr(figures, "kernels", InPlace)
    assert memory.measure("update")() == (13.0, "13.00; planned 12.00")


def test_milliseconds_are_those_of_pairs(uncompiled):
    times = figures.Times(4)
    row = row_of(Figure(Name("milliseconds"), times.plain, times.measure))
    assert row.result == MEASURED
    assert row.value["windows"] == 4
    assert 0 < row.value["quartiles"][0] <= row.value["ratio"] <= row.value["quartiles"][1]
    assert row.message.startswith(f"{row.value['ours']:.2f}; {row.value['ratio']:.2f} x the tutorial's class")


# --- rows, table and files --------------------------------------------------------------------------------------------


def test_a_missing_kernel_is_a_row_and_no_failure(capsys):
    """Plain MindSpore has no bfloat16 product on CPU. What comes next, compiled, holds."""
    assert cli.main(["selftest", "--rows", "token weights, sums, cell, PyNative"]) == 0
    said = capsys.readouterr().out
    assert "\n2 hold, 0 fail, 1 without a kernel, 0 not run, 0 measured\n" in said
    assert "Select CPU operator[MatMul] fail" in said
    assert results(SUMS, "train step")["token weights, sums"].result == HOLDS


def test_nothing_that_could_run_is_no_success(capsys):
    assert cli.main(["selftest", "--rows", "clipping, cell, PyNative, bfloat16"]) == 1
    assert "\n0 hold, 0 fail, 1 without a kernel, 0 not run, 0 measured\n" in capsys.readouterr().out


@pytest.mark.parametrize(("dtype", "result"), [("float32", FAILS), ("float16", NO_KERNEL)])
def test_a_reference_that_fails_in_float32_is_a_failure(monkeypatch, dtype, result):
    """Every device computes in float32: a broken reference would make each row "no kernel", and nothing would fail."""
    def broken(*_):
        raise MemoryError

    monkeypatch.setattr(plain, "train", broken)
    row = row_of(next(Training(SAMPLES, "train step", dtype).checks()))
    assert (row.result, row.message) == (result, "plain MindSpore: MemoryError:")


def test_what_fails_where_plain_mindspore_does_not_is_a_failure(monkeypatch):
    def add(self, *arguments):
        raise RuntimeError("\n----\nno kernel for this\nmore")

    monkeypatch.setattr(Way, "add_unmarked", add)
    row = results(SUMS, "cell, PyNative")["token weights, sums"]
    assert (row.result, row.message) == (FAILS, "RuntimeError: no kernel for this")


def test_a_failure_is_in_the_table_the_file_and_the_exit_status(monkeypatch, capsys):
    """And the rows beside it hold."""
    monkeypatch.setattr(Keeper, "flush", not_flushed)
    monkeypatch.setenv("MS_ALLOC_CONF", "enable_vmm:True")
    arguments = ["selftest", "--device", "CPU", "--rows", "cell, PyNative, float32", "--json", "found.json"]
    assert cli.main([*arguments]) == 1
    said = capsys.readouterr().out
    assert "incomplete window        cell, PyNative       float32   FAILS" in said
    assert "flush() closed no window" in said
    with open("found.json", encoding="utf-8") as file:
        found = json.load(file)
    assert found["versions"]["ms_accum"] == __version__
    assert found["versions"]["python"] == sys.version.split()[0]
    assert (found["device"], found["ranks"], found["quick"], found["holds"]) == ("CPU", 1, False, False)
    assert found["flags"]["MS_ALLOC_CONF"] == "enable_vmm:True"
    assert {row["check"]: row["result"] for row in found["rows"]} == {
        check: FAILS if check == "incomplete window" else HOLDS for check in {*ALL, "windows of one"}}
    assert found["figures"] == {}
    assert found["kernels"] == "Portable"


def test_figures_are_in_the_file_by_their_name(uncompiled):
    assert cli.main(["selftest", "--quick", "--rows", "milliseconds", "--json", "found.json"]) == 0
    with open("found.json", encoding="utf-8") as file:
        assert json.load(file)["figures"]["milliseconds, train step, float32"]["ratio"] > 0


@pytest.mark.parametrize(("arguments", "said"), [
    (["--rows", "no such row"], "no row has 'no such row' in its name; there are ragged windows, incomplete window, "),
    (["--rows", ""], "no row has '' in its name"),
    (["--device", "GPU"], "MindSpore cannot use GPU here"),
    (["--json", "file.txt"], "does not end in .json"),
])
def test_a_wrong_command_line(capsys, arguments, said):
    assert cli.main(["selftest", *arguments]) == 2
    assert said in capsys.readouterr().err


def test_an_interrupt_that_mindspore_drops_ends_the_run_behind_its_row(monkeypatch, capsys):
    run = command.row_of

    def dropping(check):
        with suppress(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        return run(check)

    assert cli.main(["selftest", "--rows", "kernels"]) == 1  # negative control: all rows, of which none can be run
    assert capsys.readouterr().out.count("buffer of") == 5
    monkeypatch.setattr(command, "row_of", dropping)
    assert cli.main(["selftest", "--rows", "kernels"]) == 130
    printed = capsys.readouterr()
    assert (printed.out.count("buffer of"), printed.err) == (0, "ms-accum: interrupted\n")


def test_a_dry_run_is_refused(monkeypatch, capsys):
    monkeypatch.setenv("MS_SIMULATION_LEVEL", "1")
    assert cli.main(["selftest", "--quick"]) == 2
    assert "a dry run computes no values" in capsys.readouterr().err


def test_a_wrong_switch_of_the_kernels_ends_it_before_the_table(monkeypatch, capsys):
    def choose():
        raise ValueError("MS_ACCUM_IN_PLACE in the environment is '2', expected 0 or 1")

    monkeypatch.setattr(command, "kernels", choose)
    assert cli.main(["selftest", "--quick"]) == 2
    printed = capsys.readouterr()
    assert "MS_ACCUM_IN_PLACE in the environment is '2', expected 0 or 1" in printed.err
    assert printed.out == ""


@pytest.mark.parametrize("value", [0.0, float("nan")])
def test_a_device_on_which_nothing_moves_fails(monkeypatch, value):
    """Zeros and NaN are equal on both sides."""
    monkeypatch.setattr(plain, "values", lambda parameters: [np.full(p.shape, value) for p in parameters])
    row = results(SUMS, "cell, PyNative")["token weights, sums"]
    assert row.result == FAILS
    assert row.message.startswith("plain training did not move the parameters")


def test_help_names_it(capsys):
    assert cli.main(["selftest", "--help"]) == 0
    assert "exit status: 0 if no row fails" in capsys.readouterr().out


def test_rows_are_chosen_by_the_beginning_of_a_word():
    name = "ragged windows, by hand, op by op, bfloat16"
    for text in ("windows", "op by", "hand, op", "bfloat16", "bf"):
        assert command.begins_a_word(text, name)
    for text in ("", "float16", "indows", "(", "op  by"):
        assert not command.begins_a_word(text, name)


def test_the_name_and_the_line_of_a_row():
    """The names that `--rows` looks in, and the line of a row."""
    row = Row(Name("clipping", "train step", "float16"), FAILS, 0.5, 0.02, message="why")
    assert str(row.name) == "clipping, train step, float16"
    assert command.text(row).split() == ["clipping", "train", "step", "float16", "FAILS", "5.0e-01", "of", "2e-02",
                                         "0.0", "why"]
