"""The guide: it builds, its scripts run and print what it says, and what it says about the repository is true."""
import inspect
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import run_python

import ms_accum

ROOT = Path(__file__).parents[1]
GUIDE = ROOT / "tutorials" / "guide"
SITE = ROOT / "tutorials" / "reference"
PAGES = {path.stem: path.read_text(encoding="utf-8") for path in sorted(GUIDE.glob("*.md"))}
PUBLIC = [name for name, value in vars(ms_accum).items() if inspect.isclass(value) or inspect.isfunction(value)]

# --- the site -------------------------------------------------------------------------------------------------------------


def build(source, site):
    """Return mkdocs' exit status and what it said."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", source / "mkdocs.yml", "-d", site]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.returncode, done.stderr


def test_the_site_builds_without_a_warning_and_holds_every_public_name(tmp_path):
    status, said = build(SITE, tmp_path / "site")
    assert status == 0, said
    page = (tmp_path / "site" / "reference.html").read_text(encoding="utf-8")
    for name in PUBLIC:
        assert f'id="ms_accum.{name}"' in page, name
    assert "Microbatches in a window: an int" in page, "an argument's description"
    assert {path.stem for path in (tmp_path / "site").glob("*.html")} >= PAGES.keys()


def test_what_is_wrong_in_it_fails(tmp_path):
    """Names, documented arguments, pages and headings that do not exist, and a page that the navigation lacks."""
    copy = tmp_path / "repository"
    shutil.copytree(SITE, copy / "tutorials" / "reference")
    shutil.copytree(GUIDE, copy / "tutorials" / "guide")
    shutil.copytree(ROOT / "ms_accum", copy / "ms_accum", ignore=shutil.ignore_patterns("digits", "__pycache__"))
    pages = copy / "tutorials" / "guide"
    for path, before, after in (
            (pages / "reference.md", "::: ms_accum.scale_lr\n", "::: ms_accum.scale_rate\n"),
            (copy / "ms_accum" / "accumulator.py", "        clip_norm: Largest", "        clip_nrom: Largest"),
            (pages / "index.md", "(limits.md)", "(limitations.md)"),
            (pages / "concepts.md", "(train-step.md#pieces)", "(train-step.md#parts)")):
        text = path.read_text(encoding="utf-8")
        assert before in text
        path.write_text(text.replace(before, after), encoding="utf-8")
    (pages / "lost.md").write_text("# Lost\n", encoding="utf-8")
    status, said = build(copy / "tutorials" / "reference", tmp_path / "site")
    assert status != 0
    for problem in ("ms_accum.scale_rate could not be found", "clip_nrom", "limitations.md", "#parts", "lost.md"):
        assert problem in said


# --- the scripts ----------------------------------------------------------------------------------------------------------

EXAMPLE = re.compile(r"^```python\n(.*?)^```\n(?:\n(It prints(?:, for example)?):\n\n```text\n(.*?)^```\n)?", re.MULTILINE | re.DOTALL)
SCRIPTS = {name: EXAMPLE.findall(text) for name, text in PAGES.items() if "```python" in text}
RUNNER = """
import contextlib, io, json, os, runpy, sys
import mindspore as ms
printed = {}
for path in sys.argv[1:]:
    ms.set_context(mode=ms.PYNATIVE_MODE)
    name = os.path.basename(path)[:-3]
    os.makedirs(name + "_files")
    os.chdir(name + "_files")
    with contextlib.redirect_stdout(io.StringIO()) as out:
        runpy.run_path(path, run_name=name)
    os.chdir("..")
    printed[name] = out.getvalue()
print(json.dumps(printed))
"""
END = "--- end of block {} ---\n"


def script(name):
    """Return the blocks of a page as one script that prints where each block ends, and what else is tested of the page."""
    blocks = [code + f"print({END.format(i)[:-1]!r})\n" for i, (code, _, _) in enumerate(SCRIPTS[name])]
    return "".join(blocks) + ("\n".join(replacements()) if name == "migration" else "")


def replacements():
    """The code in the last column of the table of migration.md."""
    rows = [row.split("|") for row in PAGES["migration"].splitlines() if row.startswith("| ") and row.count("|") == 4]
    assert len(rows) == 12
    lines = [line for row in rows[1:] for line in re.findall(r"`([^`]+)`", row[3]) if line != "loss / 4"]
    assert len(lines) > 10
    return lines


def comparable(text, exact):
    """Printed text; of an example, without its figures and what follows them on lines that list parameters."""
    lines = [line.rstrip() for line in text.rstrip("\n").splitlines()]
    if exact:
        return lines
    return [re.sub(r"[\d.]+e[+-]\d\d", "#", line) for line in lines if not line.startswith(("largest", "beyond"))]


@pytest.mark.parametrize("part", [0, 1])
def test_the_scripts_of_all_pages_run_and_print_what_the_pages_say(part, tmp_path):
    """Two processes run all pages, from files, because graph mode reads the source of functions."""
    import json
    names = sorted(SCRIPTS)[part::2]
    for name in names:
        (tmp_path / f"{name}.py").write_text(script(name), encoding="utf-8")
    printed = json.loads(run_python(RUNNER, *(str(tmp_path / f"{name}.py") for name in names)).splitlines()[-1])
    compared = 0
    for name in names:
        rest = printed[name]
        for i, (_, marker, expected) in enumerate(SCRIPTS[name]):
            said, rest = rest.split(END.format(i), 1)
            if marker:
                exact = marker == "It prints"
                assert comparable(said, exact) == comparable(expected, exact), f"{name}.md, block {i}"
                compared += 1
    assert compared >= 5
