"""The site: builds without a warning or a broken link, holds all pages and names, and asks no other server."""
import inspect
import os
import re
import runpy
import shutil
import subprocess
import sys
from collections import Counter

import pytest
from support.pages import PAGES, PATHS, PUBLIC, README, ROOT, TUTORIALS

import ms_accum
from ms_accum.batch_size import GradientNoiseScale
from ms_accum.core.boundary import Status
from ms_accum.steps.train_step import TrainStep


def build(source, site):
    """Return mkdocs' exit status and what it said."""
    command = [sys.executable, "-m", "mkdocs", "build", "-f", source / "mkdocs.yml", "-d", site]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    return done.returncode, done.stderr


def names_for_users():
    """The public names, what `make_train_step` and `status()` return, and the members of classes.

    Not what others call: MindSpore a Cell or a callback, an accumulator a stage or a reducer.
    """
    called = "construct", "compile", "set_grad", "to_float", "bind", "take"
    owners = {**PUBLIC, "ms_accum.steps.train_step.TrainStep": TrainStep}
    yield from (*owners, "ms_accum.core.boundary.Status")
    for owner, value in owners.items():
        for name, member in vars(value).items() if inspect.isclass(value) else ():
            by_others = name in called or name.startswith(("on_train", "on_eval")) or (
                value is GradientNoiseScale and name in ("measure", "on_update"))
            if (name == "__call__" or not name.startswith("_")) and not by_others and (
                    inspect.isfunction(member) or isinstance(member, property)):
                yield f"{owner}.{name}"


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The folder of the built site."""
    folder = tmp_path_factory.mktemp("site")
    status, said = build(ROOT, folder)
    assert status == 0, said
    return folder


def test_it_holds_every_page_and_public_name_and_asks_no_other_server(site):
    pages = {path.stem: path.read_text(encoding="utf-8") for path in (site / "reference").glob("*.html")}
    found = Counter(re.findall(r'<h\d id="(ms_accum\.[\w.]+)"', "".join(pages.values())))
    assert found == Counter(names_for_users())
    assert "Number of microbatches in a window: an int" in pages["names"], "an argument's description"
    fields = re.findall(r'<td><code><span title="ms_accum\.core\.boundary\.Status\.(\w+)"', pages["names"])
    assert fields == list(Status._fields)
    assert not re.search(r"Uncopied|\bfingerprint\b", "".join(pages.values()))
    for path in (*PATHS, *TUTORIALS.glob("*.ipynb")):
        text = (site / path.relative_to(TUTORIALS)).with_suffix(".html").read_text(encoding="utf-8")
        asked = r'<(?:script|link|img)[^>]* (?:src|href)="(?:https?:)?//[^"]*\.(?:js|css|woff2?|png|svg)"'
        assert re.findall(asked, text) == [], path
        assert not re.search(r"<tr[^>]*>\s*(?:<th[^>]*>\s*</th>\s*)+</tr>", text), f"{path}: a table without headings"


def test_pages_have_version_and_licence_and_link_to_the_repository_if_it_is_known(site, monkeypatch):
    page = (site / "guide" / "contract.html").read_text(encoding="utf-8")
    assert f"ms_accum {ms_accum.__version__}, licence Apache-2.0" in page
    assert f"Version {ms_accum.__version__}, licence Apache-2.0" in PAGES["index"]
    assert "edit/main" not in page
    on_config = runpy.run_path(str(TUTORIALS / "reference" / "hooks.py"))["on_config"]
    assert on_config({}).keys() == {"copyright"}
    monkeypatch.setenv("MS_ACCUM_REPOSITORY", "http://example.org/ms_accum")
    config = on_config({})
    assert config["repo_url"] + config["edit_uri"] == "http://example.org/ms_accum/edit/main/tutorials/"


def test_the_start_page_has_readmes_diff():
    diff = re.search(r"^```diff\n.*?^```", README, re.MULTILINE | re.DOTALL)[0]
    assert diff in PAGES["index"]


NO_SUCH_NAME = [
    ("tutorials/reference/names.md", "m.by_epoch\n", "m.by_epochs\n", "by_epochs could not be found")]
NO_SUCH_PLACE = [
    ("tutorials/index.md", "(guide/contract.md)", "(guide/contracts.md)", "contracts.md"),
    ("tutorials/guide/check.md", "(train-step.md#weights)", "(train-step.md#parts)", "#parts"),
    ("tutorials/guide/lost.md", "", "# Lost\n", "lost.md"),  # the navigation lacks it
    ("tutorials/guide/selftest.md", "", '<img src="no.png">', "selftest.html links to 'no.png'"),
    ("mkdocs.yml", "records/*.png", "records/report.png", "links to '../benchmarks/records/ascend.png'"),
]


@pytest.mark.slow
@pytest.mark.parametrize("damages", [
    pytest.param(NO_SUCH_NAME, id="name"), pytest.param(NO_SUCH_PLACE, id="place")])
def test_what_is_wrong_in_it_fails(damages, tmp_path):
    copy = tmp_path / "repository"
    for folder in ("ms_accum", "tutorials"):
        shutil.copytree(ROOT / folder, copy / folder, ignore=shutil.ignore_patterns("digits", "__pycache__"))
    shutil.copy(ROOT / "mkdocs.yml", copy)
    for name, before, after, _ in damages:
        path = copy / name
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        assert before in text
        path.write_text(text.replace(before, after, 1), encoding="utf-8")
    status, said = build(copy, tmp_path / "site")
    assert status != 0
    for *_, problem in damages:
        assert problem in said
