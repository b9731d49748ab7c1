"""The documentation site: built from the docstrings with warnings as errors, and every public name is in it."""
import inspect
import shutil
import subprocess
import sys
from pathlib import Path

import ms_accum

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "tutorials" / "reference"


def build(source, site):
    """Return mkdocs' exit status and what it said."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", source / "mkdocs.yml", "-d", site]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.returncode, done.stderr


def test_it_builds_without_a_warning_and_holds_every_public_name(tmp_path):
    status, said = build(SOURCE, tmp_path / "site")
    assert status == 0, said
    page = (tmp_path / "site" / "index.html").read_text(encoding="utf-8")
    for name in (name for name, value in vars(ms_accum).items() if inspect.isclass(value) or inspect.isfunction(value)):
        assert f'id="ms_accum.{name}"' in page, name
    assert "Microbatches in a window: an int" in page, "an argument's description"


def test_what_is_wrong_in_it_fails(tmp_path):
    """A name that does not exist, and a documented argument that does not."""
    copy = tmp_path / "repository"
    shutil.copytree(SOURCE, copy / "tutorials" / "reference")
    shutil.copytree(ROOT / "ms_accum", copy / "ms_accum", ignore=shutil.ignore_patterns("digits", "__pycache__"))
    for path, before, after in (
            (copy / "tutorials" / "reference" / "pages" / "index.md", "::: ms_accum.scale_lr\n", "::: ms_accum.scale_rate\n"),
            (copy / "ms_accum" / "accumulator.py", "        clip_norm: Largest", "        clip_nrom: Largest")):
        text = path.read_text(encoding="utf-8")
        assert before in text
        path.write_text(text.replace(before, after), encoding="utf-8")
    status, output = build(copy / "tutorials" / "reference", tmp_path / "site")
    assert status != 0
    assert "ms_accum.scale_rate could not be found" in output
    assert "clip_nrom" in output
