"""Every tutorial runs from a clean kernel, and its stored outputs are what it gives."""
import ast
import base64
import importlib
import re
from pathlib import Path

import nbformat
import pytest
from nbclient.exceptions import CellExecutionError
from nbformat.v4 import new_code_cell, new_notebook
from notebooks import cleaned, code_cells, executed, pictures, same_text, text

import ms_accum

TUTORIALS = sorted((Path(__file__).parents[1] / "tutorials").glob("*.ipynb"))
assert {path.name[0] for path in TUTORIALS} >= {"1", "2", "3", "6"}
each_tutorial = pytest.mark.parametrize("path", TUTORIALS, ids=lambda path: path.stem)


def read(path):
    return nbformat.read(path, as_version=4)


def nodes(cell, kind):
    """The syntax nodes of a kind in a cell, without lines for IPython."""
    lines = [line for line in cell.source.splitlines() if not line.startswith("%")]
    return [node for node in ast.walk(ast.parse("\n".join(lines))) if isinstance(node, kind)]


# One of them in the suite: each graph that a kernel compiles takes seconds.
@pytest.mark.parametrize("path", [pytest.param(path, id=path.stem, marks=[] if path.name.startswith("2-") else [pytest.mark.slow])
                                  for path in TUTORIALS])
def test_tutorial_runs_and_gives_what_is_stored(path):
    stored, longer = read(path), read(path)
    longer.cells.append(new_code_cell("import ms_accum\nprint(ms_accum.__file__)"))
    *cells, last = code_cells(cleaned(executed(longer)))
    assert text(last).strip() == ms_accum.__file__, "the kernel imports the package under test"
    for cell, again in zip(code_cells(stored), cells, strict=True):
        assert same_text(cell, again), f"{cell.id}:\n{text(again)}\ninstead of\n{text(cell)}"
        assert len(pictures(cell)) == len(pictures(again)), cell.id


@each_tutorial
def test_what_is_imported_from_the_package_exists(path):
    found = [(node.module, name.name) for cell in code_cells(read(path)) for node in nodes(cell, ast.ImportFrom)
             for name in node.names if node.module.split(".")[0] == "ms_accum"]
    assert found
    assert [(module, name) for module, name in found if not hasattr(importlib.import_module(module), name)] == []


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


def test_a_failed_assertion_is_reported():
    with pytest.raises(CellExecutionError, match="AssertionError"):
        executed(new_notebook(cells=[new_code_cell("two = 2"), new_code_cell("assert two + two == 5")]))


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
from ms_accum.arguments import as_weight
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


@pytest.mark.slow
@pytest.mark.parametrize("number", SABOTAGE)
def test_a_broken_library_fails(number):
    """With another window, without weights, with float16 buffers, or without clipping, the tutorial on it stops at an assertion."""
    notebook = read(next(path for path in TUTORIALS if path.name.startswith(number)))
    sabotage, noticing = SABOTAGE[number]
    notebook.cells.insert(0, new_code_cell(sabotage))
    with pytest.raises(CellExecutionError, match=f"(?s){re.escape(noticing)}.*AssertionError"):
        executed(notebook)


def test_the_assertions_that_must_notice_are_there():
    sources = {path.name[:2]: [cell.source for cell in code_cells(read(path))] for path in TUTORIALS}
    assert [number for number, (_, noticing) in SABOTAGE.items() if not any(noticing in source for source in sources[number])] == []


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
