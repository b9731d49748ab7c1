"""Every tutorial runs from a clean kernel, and what is stored in it is what it gives."""
import ast
import base64
import re
from pathlib import Path

import nbformat
import pytest
from nbclient.exceptions import CellExecutionError
from nbformat.v4 import new_code_cell, new_notebook
from notebooks import cleaned, code_cells, executed, pictures, same_text, text

TUTORIALS = sorted((Path(__file__).parents[1] / "tutorials").glob("*.ipynb"))
each_tutorial = pytest.mark.parametrize("path", TUTORIALS, ids=lambda path: path.stem)


def read(path):
    return nbformat.read(path, as_version=4)


def nodes(cell, kind):
    """The syntax nodes of a kind in a cell, without lines for IPython."""
    lines = [line for line in cell.source.splitlines() if not line.startswith("%")]
    return [node for node in ast.walk(ast.parse("\n".join(lines))) if isinstance(node, kind)]


@each_tutorial
def test_tutorial_runs_and_gives_what_is_stored(path):
    stored = read(path)
    run = cleaned(executed(stored))
    for cell, again in zip(code_cells(stored), code_cells(run), strict=True):
        assert same_text(cell, again), f"{cell.id}:\n{text(again)}\ninstead of\n{text(cell)}"
        assert len(pictures(cell)) == len(pictures(again)), cell.id


@each_tutorial
def test_stored_outputs_are_whole_and_clean(path):
    notebook = read(path)
    nbformat.validate(notebook)
    cells = code_cells(notebook)
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    assert all(cell.outputs for cell in cells if nodes(cell, ast.stmt) and not imports_only(cell))
    assert not [cell.id for cell in cells if any(output.output_type == "error" for output in cell.outputs)]
    outputs = "".join(text(cell) for cell in cells)
    assert not re.search(r"/(tmp|home|root|Users)/|seconds| ms\b|WARNING", outputs)
    assert all(len(base64.b64decode(picture)) < 100_000 for cell in cells for picture in pictures(cell))
    assert cleaned(notebook) == notebook


def imports_only(cell):
    return all(isinstance(node, (ast.Import, ast.ImportFrom)) for node in nodes(cell, ast.stmt))


@each_tutorial
def test_claims_are_asserted(path):
    """Of the cells that do more than write a script, most assert something."""
    cells = [cell for cell in code_cells(read(path)) if not cell.source.startswith("%%writefile")]
    assert len(cells) >= 6
    assert sum(bool(nodes(cell, ast.Assert)) for cell in cells) > 0.7 * len(cells)


@each_tutorial
def test_links_lead_somewhere(path):
    for cell in read(path).cells:
        if cell.cell_type == "markdown":
            for target in re.findall(r"\]\((?!https?:)([^)]+)\)", cell.source):
                assert (path.parent / target).exists(), target


def test_there_are_tutorials():
    assert {path.name[0] for path in TUTORIALS} >= {"1", "2", "3", "6"}


# --- controls: a tutorial that is wrong fails ------------------------------------------------------------------------------


def test_a_broken_assertion_fails():
    """The second tutorial with the first assertion that measures a negated."""
    notebook = read(next(path for path in TUTORIALS if path.name.startswith("2-")))
    cell = next(cell for cell in code_cells(notebook) if "assert max(errors_by_hand[:2]) < 1e-5" in cell.source)
    cell.source = cell.source.replace("assert max(errors_by_hand[:2]) < 1e-5", "assert not max(errors_by_hand[:2]) < 1e-5")
    with pytest.raises(CellExecutionError, match="AssertionError"):
        executed(notebook)


# What breaks ms_accum before the tutorial imports it, and an assertion of the cell that notices.
SABOTAGE = {
    "1-": ("""
import ms_accum.window
def three(self, update_step):
    return 3
ms_accum.window.Window.length = three
""", "assert int(accumulator.update_step) == 64"),
    "2-": ("""
import ms_accum.accumulator
from ms_accum.gradients import as_weight
def one(weight):
    return as_weight(1.0)
ms_accum.accumulator.as_weight = one
""", 'assert right["ragged batch"] < 1e-5'),
    "3-": ("""
import mindspore, ms_accum.accumulator
def float16(wanted, own):
    return mindspore.float16
ms_accum.accumulator._buffer_dtype = float16
""", "assert abs(single - exact).max() < 1e-4"),
    "6-": ("""
import ms_accum.accumulator
def never(norm, limit):
    return 1.0
ms_accum.accumulator.clip_factor = never
""", "assert (step < 0.1001) == (build is Accumulator)"),
}


@pytest.mark.parametrize("number", ["2-", *(pytest.param(number, marks=pytest.mark.slow) for number in ("1-", "3-", "6-"))])
def test_a_broken_library_fails(number):
    """With another window, without weights, with float16 buffers, or without clipping, the tutorial on it stops at an assertion."""
    notebook = read(next(path for path in TUTORIALS if path.name.startswith(number)))
    sabotage, noticing = SABOTAGE[number]
    notebook.cells.insert(0, new_code_cell(sabotage))
    with pytest.raises(CellExecutionError, match=f"(?s){re.escape(noticing)}.*AssertionError"):
        executed(notebook)


def test_another_output_is_noticed():
    def printed(words, tags=()):
        cell = new_code_cell("", metadata={"tags": list(tags)})
        cell.outputs = [nbformat.v4.new_output("stream", name="stdout", text=words)]
        return cell

    assert same_text(printed("off by 50%, 1,024 digits, 1e-07"), printed("off by 50.2%, 1,024 digits, 3e-07"))
    assert not same_text(printed("off by 50%"), printed("off by 55%"))
    assert not same_text(printed("True 1"), printed("False 1"))
    assert same_text(printed("538 MiB", ["measured"]), printed("611 MiB", ["measured"]))
    assert not same_text(printed("538 MiB", ["measured"]), printed("538 KiB", ["measured"]))


def test_the_kernel_imports_the_package_under_test():
    import ms_accum

    source = "from importlib.util import find_spec\nprint(find_spec('ms_accum').origin)"
    assert text(executed(new_notebook(cells=[new_code_cell(source)])).cells[0]).strip() == ms_accum.__file__
