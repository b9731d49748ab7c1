"""The page "With other libraries": its blocks are exact, and its figures are the record's."""
import json
import re
from functools import partial

import numpy as np
import pytest
from other_libraries import Plainly, mean_of_means, run_block, undivided
from pages import PAGES, ROOT

from ms_accum import make_train_step

PAGE = PAGES["other-libraries"]
BLOCKS = {found: block for block in re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
          for found in re.findall(r"^from (mind\w+)\.", block, re.MULTILINE)[:1] if found != "mindspore"}


@pytest.mark.parametrize("library", ["mindcv", "mindone", "mindyolo", "mindocr"])
def test_the_block_of_a_library_is_exact(tmp_path, library):
    """A window of 4 and one of 3 uneven microbatches. Negative control: unweighted means train other weights."""
    if library == "mindcv":
        pytest.importorskip("mindcv", reason="needs MindCV: pip install '.[test]'")
    path = tmp_path / f"block_of_{library}.py"
    code = re.sub("clip_norm=[0-9.]+", "clip_norm=0.05", BLOCKS[library])  # gradients here are small
    path.write_text(code, encoding="utf-8")
    names, trained = run_block(path, library, make_train_step)
    assert int(names["train_step"].accumulator.update_step) == 2
    averages = [names[name].updates for name in ("ema", "average") if name in names]
    assert [float(updates.asnumpy()) for updates in averages] == [2.0] * (library in ("mindone", "mindcv"))
    plain, wanted = run_block(path, library, partial(Plainly, undivided))
    _, wrong = run_block(path, library, partial(Plainly, mean_of_means))
    moved = np.linalg.norm(wanted - plain["train_step"].start)
    assert moved > 1e-3
    assert np.linalg.norm(trained - wanted) <= 1e-5 * moved
    assert np.linalg.norm(wrong - wanted) >= 1e-2 * moved


# --- the figures ------------------------------------------------------------------------------------------------------

RECORD = json.loads((ROOT / "tutorials" / "benchmarks" / "records" / "neighbours.json").read_text(encoding="utf-8"))
NAMES = {"mindone": "MindONE", "mindcv": "MindCV", "mindyolo": "MindYOLO", "mindocr": "MindOCR"}
UNEVEN = "microbatches of 8, 2, 5 and 1 rows", "microbatches of 44, 44, 8 and 8 tokens", "a last window of 3"


def line(row):
    """A row of the record as one of the page's table."""
    error = row["error"]
    if "raised" in row:
        theirs = f"fails: `{row['raised'].split(':')[0]}`"
    else:
        theirs = f"{error:.2g}" if error >= 1e-3 else f"{error:.0e}"
    calls = ", averaged {} times in {} updates".format(*row["calls"][::2]) if "calls" in row else ""
    ours = f"{row['ms_accum']:.0e}" if "ms_accum" in row else "-"
    return f"| {NAMES[row['library']]} {row['call']} | {row['data']} | {theirs}{calls} | {ours} |"


def test_the_page_has_the_records_figures():
    """All rows but those of equal microbatches, which are the control: there, every library agrees."""
    equal = [row for row in RECORD["rows"] if row["data"] == "equal microbatches, full windows"]
    assert [row["library"] for row in equal] == list(NAMES)
    assert all(max(row["error"], row["ms_accum"]) <= 1e-6 for row in equal)
    table = re.search(r"^\| library \|.*\n\|[-|]+\n((?:\|.*\n)+)", PAGE, re.MULTILINE)[1]
    assert table.splitlines() == [line(row) for row in RECORD["rows"] if row not in equal]
    assert all(row["ms_accum"] <= 1e-5 for row in RECORD["rows"] if "ms_accum" in row)
    (by_images,) = (row["by_images"] for row in RECORD["rows"] if "by_images" in row)
    assert f"weighing by images is off by {by_images:.2g}" in PAGE
    assert all(f"{name} {RECORD['versions'][library]}" in PAGE for library, name in NAMES.items())
    assert RECORD["date"][:10] in PAGE


def test_readme_has_the_records_figures():
    rows = [row for row in RECORD["rows"] if row["library"] != "mindyolo" and row["data"] in UNEVEN]
    rows = [row for row in rows if row["error"] is not None]
    assert len(rows) == 7
    errors = [row["error"] for row in rows]
    readme = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    assert f"by {min(errors):.2f} to {max(errors):.2f} of the way that it moves the parameters" in readme
    assert max(row["ms_accum"] for row in rows) < 1e-6
    assert "here by less than 1e-6" in readme
