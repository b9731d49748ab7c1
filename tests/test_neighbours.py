"""The page "With other libraries": its blocks are exact on networks of the libraries, and its figures are the record's.

A library that is not installed is skipped: MindONE, MindYOLO and MindOCR are in the extra [ecosystem]. Each block and each row runs in a
process of its own.
"""
import json
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from pages import PAGES, ROOT

BENCHMARKS, SUPPORT = ROOT / "tutorials" / "benchmarks", ROOT / "tests" / "support"
PAGE = PAGES["other-libraries"]
RECORD = json.loads((BENCHMARKS / "records" / "neighbours.json").read_text(encoding="utf-8"))
BLOCKS = {found: block for block in re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
          for found in re.findall(r"^from (mind\w+)\.", block, re.MULTILINE)[:1] if found != "mindspore"}


def run(script, *arguments):
    """The last line that a script prints, in JSON."""
    path = os.pathsep.join(map(str, (ROOT, BENCHMARKS, SUPPORT)))
    done = subprocess.run([sys.executable, script, *map(str, arguments)], capture_output=True, text=True, check=False,
                          env={**os.environ, "PYTHONPATH": path})
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture
def neighbours(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    import neighbours
    return neighbours


def needs(library):
    """Skip unless it is there. MindOCR cannot be imported as a whole beside MindSpore 2.10."""
    if find_spec(library) is None:
        pytest.skip(f"needs {library}: pip install '.[ecosystem]'")


# --- the blocks ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("library", "network"), [
    ("mindcv", "vit"), ("mindone", "llama"), ("mindone", "gpt2"), ("mindyolo", "detector"), ("mindocr", "reader")])
def test_the_block_of_a_library_is_exact_with_its_networks(library, network):
    """A window of 4 and one of 3 uneven microbatches. Negative control: unweighted means of their gradients train other weights."""
    needs(library)
    Path("block.py").write_text(BLOCKS[library], encoding="utf-8")
    error, of_means = run(SUPPORT / "recipes.py", "block.py", network)
    assert error <= 1e-5
    assert of_means >= 1e-2


# --- the figures -----------------------------------------------------------------------------------------------------------


def test_the_page_has_the_records_figures(neighbours):
    """All rows but those of equal microbatches, which are the control: there, every library agrees."""
    equal = [row for row in RECORD["rows"] if row["data"] == neighbours.EQUAL]
    assert [row["library"] for row in equal] == ["mindone", "mindcv", "mindyolo", "mindocr"]
    assert all(max(row["error"], row["ms_accum"]) <= 1e-6 for row in equal)
    table = re.search(r"^\| library \|.*\n\|[-|]+\n((?:\|.*\n)+)", PAGE, re.MULTILINE)[1]
    assert table.splitlines() == [neighbours.line(row) for row in RECORD["rows"] if row not in equal]
    assert all(row["ms_accum"] <= 1e-5 for row in RECORD["rows"] if "ms_accum" in row)
    (by_images,) = (row["by_images"] for row in RECORD["rows"] if "by_images" in row)
    assert f"weighing by images is off by {by_images:.2g}" in PAGE
    assert f"`{RECORD['command']}`" in PAGE


def test_readme_has_the_records_figures(neighbours):
    rows = [row for row in RECORD["rows"] if row["library"] != "mindyolo" and row["error"] is not None
            and row["data"] in (neighbours.ROWS_DIFFER, neighbours.TOKENS_DIFFER, neighbours.LAST)]
    assert len(rows) == 7
    readme = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    errors = [row["error"] for row in rows]
    assert f"by {min(errors):.2f} to {max(errors):.2f} of the way that it moves the parameters" in readme
    assert max(row["ms_accum"] for row in rows) < 1e-6
    assert "here by less than 1e-6" in readme


@pytest.mark.slow
@pytest.mark.parametrize("i", range(len(RECORD["rows"])))
def test_the_record_is_what_the_libraries_do(i, neighbours):
    before = RECORD["rows"][i]
    needs(before["library"])
    found = run(BENCHMARKS / "neighbours.py", "--row", i)
    assert (before["call"], before["data"]) == (neighbours.ROWS[i].call, neighbours.ROWS[i].data)
    assert found.get("raised") == before.get("raised")
    assert found.get("calls") == before.get("calls")
    assert (found["error"] is None) == (before["error"] is None)
    assert found["error"] is None or found["error"] == pytest.approx(before["error"], rel=1e-2, abs=1e-6)
    assert found.get("ms_accum", 0) <= 1e-5


@pytest.mark.slow
def test_mindones_trainer_does_train_without_accumulation():
    """Negative control: the same network, data and arguments."""
    needs("mindone")
    Path("trainer.py").write_text(
        "import json, mint_on_cpu, neighbours\nmint_on_cpu.install()\nprint(json.dumps(neighbours.mindone_trainer(1)))\n", encoding="utf-8")
    assert run("trainer.py") == {"error": None, "updates": 2}


def test_help_says_what_is_compared_and_a_missing_library_is_named(monkeypatch, capsys, neighbours):
    with pytest.raises(SystemExit):
        neighbours.main(["--help"])
    assert "undivided batch of each window" in capsys.readouterr().out
    monkeypatch.setattr(neighbours, "find_spec", lambda name: None)
    neighbours.main(["--only", "mindone"])
    said = capsys.readouterr()
    assert "mindone is not installed: left out" in said.err
    assert json.loads(said.out)["rows"] == []
