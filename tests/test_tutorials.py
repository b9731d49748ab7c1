"""Every notebook runs from a clean kernel, alone in an empty folder, and its stored outputs are what it gives."""
import ast
import base64
import copy
import importlib
import re
from pathlib import Path

import nbformat
import pytest
from IPython.core.inputtransformer2 import TransformerManager
from nbclient.exceptions import CellExecutionError
from nbformat.v4 import new_code_cell, new_notebook
from notebooks import NUMBER, cleaned, code_cells, differences, executed, pictures, same_text, text

import ms_accum

TUTORIALS = sorted((Path(__file__).parents[1] / "tutorials").glob("*.ipynb"))
assert [path.name[0] for path in TUTORIALS] == list("12345")
each_tutorial = pytest.mark.parametrize("path", TUTORIALS, ids=lambda path: path.stem)


def read(path):
    return nbformat.read(path, as_version=4)


def syntax(cell):
    """The syntax tree of a cell, or of the file that it writes."""
    source = re.sub(r"\A%%writefile .*\n", "", cell.source)
    return ast.parse(TransformerManager().transform_cell(source))


def nodes(cell, *kinds):
    """The syntax nodes of some kinds in a cell."""
    return [node for node in ast.walk(syntax(cell)) if isinstance(node, kinds)]


@each_tutorial
def test_tutorial_runs_and_gives_what_is_stored(path):
    if path.name.startswith("5-"):
        pytest.importorskip("mindcv", reason="needs MindCV: pip install '.[test]'")
    stored, longer = read(path), read(path)
    longer.cells.append(new_code_cell("import ms_accum\nprint(ms_accum.__file__)"))
    again = cleaned(executed(longer))
    assert text(again.cells.pop()).strip() == ms_accum.__file__, "the kernel imports the package under test"
    different = differences(stored, again)
    assert not different, "\n".join(f"{cell.id}:\n{text(cell)}" for cell in again.cells if cell.id in different)


@each_tutorial
def test_a_changed_number_is_noticed(path):
    """Each stored number above the rounding errors, one after the other, unless it was measured."""
    notebook, changed = read(path), 0
    for i, cell in enumerate(notebook.cells):
        for match in NUMBER.finditer(text(cell)) if cell.cell_type == "code" else ():
            value = float(match[0].replace(",", ""))
            if abs(value) < 0.01 or "measured" in cell.metadata.get("tags", []):
                continue
            other = copy.deepcopy(notebook)
            output = next(output for output in other.cells[i].outputs if output.output_type == "stream")
            output.text = f"{text(cell)[:match.start()]}{1.1 * value:.9g}{text(cell)[match.end():]}"
            assert differences(notebook, other) == [cell.id], match[0]
            changed += 1
    assert changed >= 10
    assert differences(notebook, copy.deepcopy(notebook)) == []


@each_tutorial
def test_a_lost_picture_is_noticed(path):
    notebook = read(path)
    drawn = [cell.id for cell in code_cells(notebook) if pictures(cell)]
    assert drawn or path.name.startswith("4-")
    other = copy.deepcopy(notebook)
    for cell in code_cells(other):
        cell.outputs = [output for output in cell.outputs if output.output_type == "stream"]
    assert differences(notebook, other) == drawn


@each_tutorial
def test_notebooks_install_what_they_need_and_import_public_names(path):
    assert 'if not importlib.util.find_spec("ms_accum"):\n    %pip install' in code_cells(read(path))[0].source
    found = [(node.module, name.name) for cell in code_cells(read(path)) for node in nodes(cell, ast.ImportFrom)
             for name in node.names if node.module.split(".")[0] == "ms_accum"]
    assert {module for module, _ in found} <= {"ms_accum", "ms_accum.batch_size", "ms_accum.mnist.data"}
    assert found
    assert [(module, name) for module, name in found if not hasattr(importlib.import_module(module), name)] == []


@each_tutorial
def test_stored_outputs_are_whole_and_clean(path):
    notebook = read(path)
    nbformat.validate(notebook)
    cells = code_cells(notebook)
    assert len(notebook.cells) <= 20
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    assert all(cell.outputs for cell in cells[1:])
    assert not [cell.id for cell in cells if any(output.output_type == "error" for output in cell.outputs)]
    outputs = "".join(text(cell) for cell in cells)
    assert not re.search(r"/(tmp|home|root|Users)/|seconds| ms\b|WARNING", outputs)
    assert all(len(base64.b64decode(picture)) < 30_000 for cell in cells for picture in pictures(cell))
    assert cleaned(notebook) == notebook


@each_tutorial
def test_claims_are_printed_with_a_number(path):
    """No cell only asserts: each section with code says in print what it found."""
    found, heading = {}, ""
    for cell in read(path).cells:
        if cell.cell_type == "markdown":
            heading = [heading, *re.findall("^## (.*)", cell.source, re.MULTILINE)][-1]
        else:
            assert not nodes(cell, ast.Assert), cell.id
            found[heading] = found.get(heading, "") + text(cell)
    found.pop("", None)  # what precedes the first section
    assert len(found) >= 3
    assert [heading for heading, printed in found.items() if not NUMBER.search(printed)] == []


@each_tutorial
def test_the_next_notebook_is_linked_and_links_lead_somewhere(path):
    texts = [cell.source for cell in read(path).cells if cell.cell_type == "markdown"]
    following = TUTORIALS[TUTORIALS.index(path) + 1:] or TUTORIALS[:1]
    assert f"]({following[0].name})" in texts[-1].split("\n")[-1]
    for target in re.findall(r"\]\((?!https?:)([^)]+)\)", "\n".join(texts)):
        assert (path.parent / target).exists(), target


def test_an_error_is_reported():
    with pytest.raises(CellExecutionError, match="ZeroDivisionError"):
        executed(new_notebook(cells=[new_code_cell("one = 1"), new_code_cell("one / 0")]))


# A library whose make_train_step never clips.
FORGETFUL = """
import ms_accum
def forgetful(*arguments, make_train_step=ms_accum.make_train_step, clip_norm=None, **options):
    return make_train_step(*arguments, **options)
ms_accum.make_train_step = forgetful
"""


@pytest.mark.slow
def test_a_broken_library_is_noticed():
    """Without clipping, exactly the cell on clipping and the summary of the errors differ."""
    stored = read(TUTORIALS[1])
    broken = copy.deepcopy(stored)
    broken.cells.insert(0, new_code_cell(FORGETFUL))
    again = cleaned(executed(broken))
    del again.cells[0]
    clipping = [cell.id for cell in code_cells(stored) if re.search("clip_norm: off by|ms_accum at most by", text(cell))]
    assert len(clipping) == 2
    assert differences(stored, again) == clipping


def test_another_output_is_noticed():
    def printed(words, tags=()):
        cell = new_code_cell("", metadata={"tags": list(tags)})
        cell.outputs = [nbformat.v4.new_output("stream", name="stdout", text=words)]
        return cell

    assert same_text(printed("off by 50%, 1,024 digits, 1e-07"), printed("off by 50.2%, 1,024 digits, 3e-07"))
    assert not same_text(printed("off by 50%"), printed("off by 55%"))
    assert not same_text(printed("off by 1e-07"), printed("off by 1e-02"))
    assert not same_text(printed("True 1"), printed("False 1"))
    assert same_text(printed("538 MiB", ["measured"]), printed("611 MiB", ["measured"]))
    assert not same_text(printed("538 MiB", ["measured"]), printed("538 KiB", ["measured"]))
