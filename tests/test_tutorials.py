"""Every tutorial runs from a clean kernel, and its stored outputs are what it gives."""
import ast
import base64
import importlib
import re
from pathlib import Path

import nbformat
import pytest
from nbclient.exceptions import CellExecutionError
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook
from notebooks import cleaned, code_cells, executed, pictures, same_text, text

import ms_accum

TUTORIALS = sorted((Path(__file__).parents[1] / "tutorials").glob("*.ipynb"))
assert [path.name[0] for path in TUTORIALS] == list("12345678")
each_tutorial = pytest.mark.parametrize("path", TUTORIALS, ids=lambda path: path.stem)


def read(path):
    return nbformat.read(path, as_version=4)


def syntax(cell):
    """The syntax tree of a cell, without lines for IPython."""
    return ast.parse("\n".join(line for line in cell.source.splitlines() if not line.startswith("%")))


def nodes(cell, kind):
    """The syntax nodes of a kind in a cell."""
    return [node for node in ast.walk(syntax(cell)) if isinstance(node, kind)]


# One of them in the suite: each graph that a kernel compiles takes seconds.
@pytest.mark.parametrize("path", [pytest.param(path, id=path.stem, marks=[] if path.name.startswith("2-") else [pytest.mark.slow])
                                  for path in TUTORIALS])
def test_tutorial_runs_and_gives_what_is_stored(path):
    if path.name.startswith("7-"):
        pytest.importorskip("mindcv", reason="needs MindCV: pip install '.[ecosystem]'")
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
    assert all(cell.outputs for cell in cells if nodes(cell, ast.stmt) and not only(cell, ast.Import, ast.ImportFrom, ast.Assert))
    assert not [cell.id for cell in cells if any(output.output_type == "error" for output in cell.outputs)]
    outputs = "".join(text(cell) for cell in cells)
    assert not re.search(r"/(tmp|home|root|Users)/|seconds| ms\b|WARNING", outputs)
    assert all(len(base64.b64decode(picture)) < 100_000 for cell in cells for picture in pictures(cell))
    assert cleaned(notebook) == notebook


def only(cell, *kinds):
    """Whether a cell consists of some kinds of statements."""
    return all(isinstance(node, kinds) for node in syntax(cell).body)


def sections(notebook):
    """The code cells under each heading of level 2, without cells that write a script: `{heading: cells}`."""
    found, heading = {}, ""
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            heading = ([heading, *re.findall("^## (.*)", cell.source, re.MULTILINE)])[-1]
        elif not cell.source.startswith("%%writefile"):
            found.setdefault(heading, []).append(cell)
    return found


@each_tutorial
def test_claims_are_asserted(path):
    """Each section with code ends with a cell that asserts what it claims; other cells assert nothing."""
    found = sections(read(path))
    found.pop("", None)  # what precedes the first section
    assert len(found) >= 3
    for heading, cells in found.items():
        *others, last = cells
        assert others, heading
        assert only(last, ast.Assert), f"{heading}: the section does not end with assertions"
        assert 1 <= len(nodes(last, ast.Assert)) <= 8, heading
        assert not [cell.id for cell in others if nodes(cell, ast.Assert)], heading


def test_a_section_without_assertions_is_noticed():
    heading, work, claims = new_markdown_cell("## It works"), new_code_cell("one = 1"), new_code_cell("assert one == 1")
    assert sections(new_notebook(cells=[heading, work, claims])) == {"It works": [work, claims]}
    assert only(claims, ast.Assert)
    assert not only(work, ast.Assert)
    assert not only(new_code_cell("one = 1\nassert one == 1"), ast.Assert)


@each_tutorial
def test_the_next_notebook_is_linked(path):
    """Each one ends with a link to the next, the first begins with one to that on MindSpore's tutorial."""
    *_, last = read(path).cells
    following = TUTORIALS[TUTORIALS.index(path) + 1:]
    assert last.cell_type == "markdown"
    assert not following or f"]({following[0].name})" in last.source.split("\nNext: ")[-1]


def test_the_first_paragraph_sends_users_of_the_tutorial_to_its_notebook():
    first_paragraph = read(TUTORIALS[0]).cells[0].source.split("\n\n")[1]
    assert "(6-mindspore-tutorial.ipynb)" in first_paragraph


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
ms_accum.window.Window.host_length = three
""", "assert updates == 3 * (156 + 1)"),
    "2-": ("""
import ms_accum.accumulator
from ms_accum.arguments import as_weight
def one(weight):
    return as_weight(1.0)
ms_accum.accumulator.as_weight = one
""", 'assert exact["ragged batch"] < 1e-5'),
    "3-": ("""
import mindspore, ms_accum.accumulator
def float16(wanted, own):
    return mindspore.float16
ms_accum.accumulator.buffer_dtype_of = float16
""", "assert abs(single - exact).max() < 1e-4"),
    "6-": ("""
import ms_accum.update
def never(norm, limit):
    return 1.0
ms_accum.update.clip_factor = never
""", 'assert moves["Accumulator"] < 0.1001'),
    "8-": ("""
import numpy as np
import ms_accum.losses
weigh = ms_accum.losses.WeighedPieces.weigh
def of_the_first(self, *batch):
    weights = weigh(self, *batch)
    return np.repeat(weights[:, :1], weights.shape[1], axis=1)
ms_accum.losses.WeighedPieces.weigh = of_the_first
""", "assert error < 1e-4"),
}


@pytest.mark.slow
@pytest.mark.parametrize("number", SABOTAGE)
def test_a_broken_library_fails(number):
    """With another window, wrong or no weights, float16 buffers, or without clipping, the notebook stops at an assertion."""
    notebook = read(next(path for path in TUTORIALS if path.name.startswith(number)))
    sabotage, noticing = SABOTAGE[number]
    notebook.cells.insert(0, new_code_cell(sabotage))
    with pytest.raises(CellExecutionError) as stop:
        executed(notebook)
    assert re.search(rf"-> *\d+ {re.escape(noticing)}.*AssertionError", re.sub(r"\x1b\[[\d;]*m", "", str(stop.value)), re.DOTALL)


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
