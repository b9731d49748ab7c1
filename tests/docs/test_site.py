"""The site: builds without a warning or a broken link, holds all pages and names, asks no other server; is readable."""
import inspect
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
import threading
from collections import Counter
from functools import partial
from html import unescape
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

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


# --- in a browser -----------------------------------------------------------------------------------------------------

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
SEEN = ["index", "guide/first-hour", "guide/batch-size", "guide/many-ranks", "reference/names"]
WIDTHS = (1400, 390)
# Opens each page in a frame of each width, because the window of a headless Chromium is at least 500 pixels wide. Text
# may leave its column only inside a box that scrolls; on a wide screen, tables and lines of up to 100 columns have to
# fit without scrolling, and a line of a paragraph holds about 90 characters: text is as wide as code.
LOOK = """<pre id="found"></pre><script type="module">
const found = {}
for (const [page, width] of CASES) {
  const frame = document.createElement('iframe')
  frame.style = `width: ${width}px; height: 900px; border: 0`
  frame.src = `${page}.html`
  await new Promise(done => { frame.onload = done; document.body.append(frame) })
  await new Promise(done => setTimeout(done, 300))
  const view = frame.contentWindow, root = frame.contentDocument
  const column = root.querySelector('article').getBoundingClientRect()
  const out = found[`${page} ${width}`] = {texts: 0, wrong: []}
  if (root.documentElement.scrollWidth > width) out.wrong.push('the page scrolls sideways')
  const texts = root.createTreeWalker(root.querySelector('article'), NodeFilter.SHOW_TEXT)
  while (texts.nextNode()) {
    const text = texts.currentNode, range = root.createRange()
    range.selectNodeContents(text)
    const boxes = [...range.getClientRects()].filter(box => box.width > 0)
    let right = column.right, scrolls = false
    for (let box = text.parentElement; box.tagName != 'ARTICLE'; box = box.parentElement) {
      const overflow = view.getComputedStyle(box).overflowX
      if (overflow == 'auto' || overflow == 'scroll') { scrolls = true; break }
      if (overflow != 'visible') right = Math.min(right, box.getBoundingClientRect().right)
    }
    if (text.data.trim() && boxes.length) out.texts++
    if (!scrolls && boxes.some(box => box.right > right + 1)) out.wrong.push(text.data.trim().slice(0, 60))
  }
  for (const box of width < 1000 ? [] : root.querySelectorAll('.md-typeset__scrollwrap, pre > code'))
    if (box.scrollWidth > box.clientWidth + 1 && (box.tagName != 'CODE' || !/.{101}/.test(box.textContent)))
      out.wrong.push(`scrolls: ${box.textContent.trim().slice(0, 60)}`)
  for (const box of width < 1000 ? [] : root.querySelectorAll('article p')) {
    const lines = box.getBoundingClientRect().height / parseFloat(view.getComputedStyle(box).lineHeight)
    const characters = Math.round(box.textContent.length / lines)
    if (characters && lines > 2.5 && (characters > 105 || characters < 45))
      out.wrong.push(`${characters} characters in a line`)
  }
  frame.remove()
}
document.getElementById('found').textContent = JSON.stringify(found)
</script>"""


class Quiet(SimpleHTTPRequestHandler):
    """Serves files, and logs nothing."""

    def log_message(self, *_):
        """Log nothing."""


def looked_at(site, cases):
    """Return what headless Chromium finds: for each "page width", how many texts there are, and which stick out."""
    (site / "look.html").write_text(f"<script>CASES = {json.dumps(cases)}</script>{LOOK}", encoding="utf-8")
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(site))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom", "--window-size=1400,1000",
                   "--virtual-time-budget=20000", f"http://127.0.0.1:{server.server_port}/look.html"]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
        server.shutdown()
    return json.loads(unescape(re.search(r'<pre id="found">(.*?)</pre>', done.stdout, re.DOTALL)[1]))


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")
def test_no_text_sticks_out_and_lines_have_about_90_characters(site):
    found = looked_at(site, [(name, width) for name in SEEN for width in WIDTHS])
    assert len(found) == len(SEEN) * len(WIDTHS)
    assert min(seen["texts"] for seen in found.values()) > 100
    assert {case: seen["wrong"] for case, seen in found.items() if seen["wrong"]} == {}


# What is added to a page, and the widths at which that is found.
ADDED = {
    # Its own box may scroll on a narrow screen.
    "table": ("<table><tr>" + "<td>acolumnofatable</td>" * 30 + "</tr></table>", [1400]),
    "far": ("<div style='width: 2000px; text-align: right'>far away</div>", [1400, 390]),
    "long": (f"<p style='font-size: 0.5rem'>{'long lines of many words ' * 40}</p>", [1400]),
    "hidden": ("<div style='overflow: hidden; white-space: nowrap'>" + "hidden words " * 30 + "</div>", [1400, 390]),
    "code": (
        "<pre><code>" + "x" * 100 + "</code></pre><style>pre > code { font-size: 3rem !important }</style>", [1400])}


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")
def test_text_that_sticks_out_and_long_lines_are_found(site):
    html = (site / "guide" / "contract.html").read_text(encoding="utf-8")
    assert "</article>" in html
    for name, (added, _) in ADDED.items():
        (site / "guide" / f"{name}.html").write_text(html.replace("</article>", added + "</article>"), encoding="utf-8")
    found = looked_at(site, [(f"guide/{name}", width) for name in ADDED for width in WIDTHS])
    assert {name: [width for width in WIDTHS if found[f"guide/{name} {width}"]["wrong"]] for name in ADDED} == {
        name: widths for name, (_, widths) in ADDED.items()}
