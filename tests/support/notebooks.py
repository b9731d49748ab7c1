"""Notebooks as scripts, and executed in a clean kernel. Run as a script, it stores the outputs:

    PYTHONPATH=.:tests python tests/support/notebooks.py tutorials/1-*.ipynb
"""
import copy
import os
import re
import sys
import tempfile
from pathlib import Path

import nbformat
import numpy as np
from nbclient import NotebookClient

import ms_accum
from support.pages import TUTORIALS, Block

# Per cell, and generous: a hanging cell is to end, a busy machine is not to fail.
TIMEOUT = 600
NUMBER = re.compile(r"[-+]?\d[\d,]*(?:\.\d+)?(?:[eE][-+]?\d+)?")


def executed(notebook):
    """A copy of `notebook` with the outputs of a new kernel, which imports this process's ms_accum.

    The folder of the kernel holds only the digits of tutorials/mnist, as in a clone.

    Raises:
        nbclient.exceptions.CellExecutionError: If a cell raises.
    """
    notebook = copy.deepcopy(notebook)
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "mnist").symlink_to(TUTORIALS / "mnist")
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(Path(ms_accum.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]),
            "IPYTHONDIR": folder,  # nobody's startup files, and no history left behind
        }
        where = {"metadata": {"path": folder}}
        client = NotebookClient(notebook, timeout=TIMEOUT, kernel_name="python3", resources=where)
        client.execute(env=environment)
    return notebook


def cleaned(notebook):
    """`notebook` as it is stored: without stderr and times of execution, and with what a cell printed in one piece."""
    notebook = copy.deepcopy(notebook)
    notebook.metadata.get("language_info", {}).pop("version", None)
    for cell in code_cells(notebook):
        cell.metadata.pop("execution", None)
        printed = text(cell)
        cell.outputs = [output for output in cell.outputs if output.output_type != "stream"]
        if printed:
            cell.outputs.insert(0, nbformat.v4.new_output("stream", name="stdout", text=printed))
    return notebook


def code_cells(notebook):
    """The cells that are executed."""
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def text(cell):
    """What a cell printed."""
    return "".join(output.text for output in cell.outputs if output.get("name") == "stdout")


def pictures(cell):
    """The PNGs of a cell, in base64."""
    return [output.data["image/png"] for output in cell.outputs if "image/png" in output.get("data", {})]


def python(cell):
    """The code of a cell without IPython's commands: a file is written, nothing is installed."""
    def written(file):
        return f"open({file[1]!r}, 'w').write({file[2]!r})\nprint('Writing', {file[1]!r})"

    source = re.sub(r"\A%%writefile (\S+)\n(.*)", written, cell.source, flags=re.DOTALL)
    return re.sub(r"^( +)%pip .*", r"\1raise ImportError", source, flags=re.MULTILINE)


def blocks_of(notebook):
    """The cells of a notebook as blocks of a script."""
    return [Block(python(cell)) for cell in code_cells(notebook)]


def outputs(notebook):
    """What each cell printed, and how many pictures it drew."""
    return [(text(cell), len(pictures(cell))) for cell in code_cells(notebook)]


def same_text(one, two, measured=False):
    """Whether texts have the same words and, unless they were measured, the same numbers.

    Numbers are the same to 2 %; those below 1e-4 are rounding errors, and any other one will do.
    """
    if NUMBER.sub("#", one).split() != NUMBER.sub("#", two).split():
        return False
    numbers = ([float(number.replace(",", "")) for number in NUMBER.findall(some)] for some in (one, two))
    return measured or np.allclose(*numbers, rtol=0.02, atol=1e-4)


def differences(notebook, found):
    """The ids of the cells whose stored outputs are not what was found."""
    def agrees(cell, printed, drawn):
        measured = "measured" in cell.metadata.get("tags", [])
        return same_text(text(cell), printed, measured) and len(pictures(cell)) == drawn

    cells = zip(code_cells(notebook), found, strict=True)
    return [cell.id for cell, (printed, drawn) in cells if not agrees(cell, printed, drawn)]


if __name__ == "__main__":
    for path in map(Path, sys.argv[1:]):
        nbformat.write(cleaned(executed(nbformat.read(path, as_version=4))), path)
