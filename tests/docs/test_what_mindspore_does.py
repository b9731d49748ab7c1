"""Each trap of the page what-mindspore-does is still there, and so is its workaround.

If the first test fails, MindSpore has changed: remove the workaround, and its section of the page.
"""
import json
import re
from pathlib import Path

import mindspore as ms
import pytest
from support.pages import PAGES, ROOT, blocks_of
from support.processes import run_python

PAGE = PAGES["what-mindspore-does"]
WORKAROUND = re.compile(r'`([\w/]+\.py)`: "([^"]+)"')
# Runs files one after the other, each with the names of those before. Graph mode reads the source of functions.
RUN = """
import contextlib, io, json, runpy, sys, traceback
names, printed = {}, []
for path in sys.argv[1:]:
    with contextlib.redirect_stdout(io.StringIO()) as out:
        try:
            names.update(runpy.run_path(path, names))
        except BaseException:
            traceback.print_exc(file=out)
    printed.append(out.getvalue())
print(json.dumps(printed))
"""


def traps_of(page):
    """Return the text of each trap by its title. What all of them share comes first, without a title."""
    introduction, *sections = re.split(r"^(?=##+ )", page, flags=re.MULTILINE)
    return {"": introduction} | dict(
        section.removeprefix("### ").split("\n", 1) for section in sections if section.startswith("### "))


def changed(page):
    """Run the blocks of a page in one process. Return what some printed that is not as the page says, by title."""
    blocks = [(title, block) for title, text in traps_of(page).items() for block in blocks_of(text)]
    files = [f"block{number}.py" for number in range(len(blocks))]
    for file, (_, block) in zip(files, blocks):
        Path(file).write_text(block.code, encoding="utf-8")
    printed = json.loads(run_python(RUN, *files).splitlines()[-1])
    return {title: text for (title, block), text in zip(blocks, printed, strict=True)
            if not block._replace(printed=block.printed or "").agrees(text)}


def missing(page):
    """Return the workarounds that are not where the page says: the quoted words have to stand in the file."""
    def text_of(name):
        return re.sub(r"\s+(?:# +)?", " ", (ROOT / name).read_text(encoding="utf-8"))

    return [(name, words) for name, words in WORKAROUND.findall(page) if words not in text_of(name)]


@pytest.mark.slow
@pytest.mark.skipif(tuple(map(int, ms.__version__.split(".")[:2])) < (2, 10), reason="the page is about MindSpore 2.10")
def test_mindspore_still_does_what_the_page_says(monkeypatch):
    """By default, that is, without the variable that `avoid_busy_waiting` sets."""
    monkeypatch.delenv("MS_DEV_HOST_BLOCKING_RUN", raising=False)
    assert changed(PAGE) == {}


def test_each_trap_has_a_block_that_prints_and_a_workaround_that_names_it():
    _, *traps = traps_of(PAGE).items()
    assert len(traps) == PAGE.count("\n### ") == 21
    for title, text in traps:
        assert [block for block in blocks_of(text) if block.printed], title
        assert WORKAROUND.search(text), title
    assert len(WORKAROUND.findall(PAGE)) == PAGE.count('.py`: "') > 30
    assert missing(PAGE) == []


TRAP = """### {}

```python
{}
```

It prints:

```text
2
```

Worked around in `setup.py`: "{}".

"""


def test_a_change_an_error_and_a_lost_workaround_are_seen():
    page = "".join(TRAP.format(*trap) for trap in (
        ("same", "two = 2\nprint(two)", "from setuptools import"), ("other", "print(two + 1)", "from setuptools"),
        ("error", "print(three)", "no such words")))
    assert {title: text.splitlines()[-1] for title, text in changed(page).items()} == {
        "other": "3", "error": "NameError: name 'three' is not defined"}
    assert missing(page) == [("setup.py", "no such words")]
