"""Every notebook runs in a folder with the digits, or alone, and its stored outputs are what it gives."""
import ast
import base64
import os
import re
from pathlib import Path

import nbformat
import numpy as np
import pytest
from support.mnist_files import embedded_set, write
from support.notebooks import (
    NUMBER,
    blocks_of,
    cleaned,
    code_cells,
    differences,
    executed,
    outputs,
    pictures,
    same_text,
    text,
)
from support.pages import TUTORIALS, run_blocks

NOTEBOOKS = {path.stem: nbformat.read(path, as_version=4) for path in sorted(TUTORIALS.glob("*.ipynb"))}
assert [name[0] for name in NOTEBOOKS] == list("12345")
each_notebook = pytest.mark.parametrize("name", NOTEBOOKS)


def wrong(found):
    """The cells, by notebook, whose stored outputs are not what was found."""
    all_of = {name: differences(NOTEBOOKS[name], cells) for name, cells in found.items()}
    return {name: cells for name, cells in all_of.items() if cells}


@pytest.mark.slow
def test_notebooks_give_what_is_stored(monkeypatch):
    """As scripts, one after the other in one process."""
    pytest.importorskip("mindcv", reason="needs MindCV: pip install '.[test]'")
    monkeypatch.setenv("MPLBACKEND", "Agg")
    found = run_blocks({name: blocks_of(notebook) for name, notebook in NOTEBOOKS.items()})
    assert wrong(found) == {}, found


@pytest.mark.slow
@each_notebook
def test_a_notebook_gives_what_is_stored_in_a_clean_kernel(name):
    assert wrong({name: outputs(cleaned(executed(NOTEBOOKS[name])))}) == {}


def test_a_notebook_alone_downloads_the_same_digits(monkeypatch):
    """All notebooks with digits have the same code. The archive is one of the first 90 digits."""
    found = [re.search(r'^if os\.path\.exists\("mnist"\).*?^images, labels = .*?$', cell.source, re.M | re.S)
             for notebook in NOTEBOOKS.values() for cell in code_cells(notebook)]
    code, *others = [match[0] for match in found if match]
    assert others == [code] * 3

    def download(url, path, kind):
        assert (url.endswith("/MNIST_Data.zip"), kind) == (True, "zip")
        write(Path(path, "MNIST_Data"), embedded_set(90, 50))
        return path

    monkeypatch.setattr("download.download", download)
    alone, beside = {"os": os, "np": np}, {"os": os, "np": np}
    exec(code, alone)
    assert "MnistDataset" in alone
    monkeypatch.syspath_prepend(TUTORIALS)
    Path("mnist").symlink_to(TUTORIALS / "mnist")
    exec(code, beside)
    assert "MnistDataset" not in beside
    for name, shape, dtype in (("images", (784,), np.float32), ("labels", (), np.int32)):
        assert (beside[name].shape, beside[name].dtype, alone[name].dtype) == ((10_000, *shape), dtype, dtype)
        np.testing.assert_array_equal(alone[name], beside[name][:90])


def test_another_output_is_noticed():
    """Words, numbers above rounding errors (each of the stored ones) unless they were measured, and pictures."""
    assert same_text("off by 50%, 1,024 digits, 1e-07", "off by 50.2%, 1,024 digits, 3e-07")
    assert not same_text("off by 1e-07", "off by 1e-02")
    assert not same_text("True 1", "False 1")
    assert same_text("538 MiB", "611 MiB", measured=True)
    assert not same_text("538 MiB", "538 KiB", measured=True)
    for notebook in NOTEBOOKS.values():
        changed = [(text(cell), f"{text(cell)[:match.start()]}{1.1 * value:.9g}{text(cell)[match.end():]}")
                   for cell in code_cells(notebook) for match in NUMBER.finditer(text(cell))
                   if abs(value := float(match[0].replace(",", ""))) >= 0.01]
        assert len(changed) >= 10
        assert not any(same_text(one, two) for one, two in changed)
        assert differences(notebook, outputs(notebook)) == []
        undrawn = [(printed, 0) for printed, _ in outputs(notebook)]
        assert differences(notebook, undrawn) == [cell.id for cell in code_cells(notebook) if pictures(cell)]


@each_notebook
def test_a_notebook_is_whole_and_its_claims_are_printed(name):
    """Each section with code prints what it found: no cell only asserts. Links lead somewhere, the last one onwards."""
    notebook = NOTEBOOKS[name]
    nbformat.validate(notebook)
    assert cleaned(notebook) == notebook
    cells = code_cells(notebook)
    assert len(notebook.cells) <= 20
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    assert all(cell.outputs for cell in cells[1:])
    assert not any(output.output_type == "error" for cell in cells for output in cell.outputs)
    assert not re.search(r"/(tmp|home|root|Users)/|seconds| ms\b|WARNING", "".join(map(text, cells)))
    assert all(len(base64.b64decode(picture)) < 30_000 for cell in cells for picture in pictures(cell))
    assert 'if not importlib.util.find_spec("ms_accum"):\n    # Two dots' in cells[0].source
    assert re.search(r'^    %pip install -q "\.\.(?:\[plot\])?"$', cells[0].source, re.MULTILINE)
    assert (TUTORIALS / ".." / "setup.py").exists()
    imported = set(re.findall(r"^from (ms_accum\S*) import", "\n".join(cell.source for cell in cells), re.MULTILINE))
    assert imported
    assert imported <= {"ms_accum", "ms_accum.batch_size"}

    nodes = [node for block in blocks_of(notebook) for node in ast.walk(ast.parse(block.code))]
    assert not any(isinstance(node, ast.Assert) for node in nodes)
    printed, heading, prose = {}, "", ""
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            heading = [heading, *re.findall("^## (.*)", cell.source, re.MULTILINE)][-1]
            prose += cell.source + "\n"
        else:
            printed[heading] = printed.get(heading, "") + text(cell)
    printed.pop("", None)  # what precedes the first section
    assert len(printed) >= 3
    assert [heading for heading, words in printed.items() if not NUMBER.search(words)] == []
    following = [*NOTEBOOKS, *NOTEBOOKS][list(NOTEBOOKS).index(name) + 1]
    assert f"]({following}.ipynb)" in prose.splitlines()[-1]
    for target in re.findall(r"\]\((?!https?:)([^)]+)\)", prose):
        assert (TUTORIALS / target).exists(), target
